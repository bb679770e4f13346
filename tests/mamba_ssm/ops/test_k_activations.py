"""swiglu against its formula."""

import pytest
import torch
import torch.nn.functional as F

from mamba_ssm.ops.triton.k_activations import swiglu
from mamba_ssm.testing import assert_close


def test_swiglu_of_two_and_of_one():
    x, y = torch.randn(2, 3, 4, dtype=torch.float64).unbind(0)
    assert_close(swiglu(x, y), F.silu(x) * y, 1e-14)
    assert_close(swiglu(torch.cat([x, y], dim=-1)), F.silu(x) * y, 1e-14)
    t = (x.clone().requires_grad_(), y.clone().requires_grad_())
    assert torch.autograd.gradcheck(swiglu, t)
    assert swiglu(x.bfloat16(), y.bfloat16()).dtype == torch.bfloat16


def test_halves_of_different_width_are_refused():
    with pytest.raises(ValueError, match=r"swiglu: y has shape \(2, 3\), expected like x = \(2, 4\)"):
        swiglu(torch.zeros(2, 4), torch.zeros(2, 3))

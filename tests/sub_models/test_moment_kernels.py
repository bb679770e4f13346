"""Weighted moments by a kernel (interpreted on a CPU) against the plain form in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sub_models import moment_kernels
from sub_models.functions_losses import weighted_moments

pytestmark = pytest.mark.usefixtures("interpreted_loops")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@settings(max_examples=25, deadline=None)
@given(
    batch=st.integers(1, 9),
    length=st.integers(1, 7),
    width=st.sampled_from([1, 40, 256, 300]),
    spare=st.integers(0, 1),
    programs=st.sampled_from([1, 5, 1056]),
)
def test_moments(batch, length, width, spare, programs):
    torch.manual_seed(batch)
    x = (5 + torch.randn(batch, length + spare, width)).to(DEVICE)[:, :length]
    weight, centre = (torch.rand(batch, length, device=DEVICE) > 0.3).float(), 5 + torch.randn(width, device=DEVICE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moment_kernels, "PROGRAMS", programs)
        got = moment_kernels.run_moments(x, weight, centre)
    expected = weighted_moments(x.double(), weight.double(), centre.double())
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-4)


def test_no_rows_and_registration():
    x, weight = torch.randn(2, 3, 4, device=DEVICE), torch.ones(2, 3, device=DEVICE)
    centre = torch.ones(4, device=DEVICE)
    assert not any(moment.any() for moment in moment_kernels.run_moments(x[:0], weight[:0], centre))
    torch.library.opcheck(torch.ops.mamba_ssm_triton.weighted_moments.default, (x, weight, centre))

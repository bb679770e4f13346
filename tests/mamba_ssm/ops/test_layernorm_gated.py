"""Gated norms against torch's own in float64, group by group."""

import pytest
import torch
import torch.nn.functional as F

from mamba_ssm.ops.triton.layernorm_gated import LayerNorm, RMSNorm, layernorm_fn, rms_norm_ref, rmsnorm_fn
from mamba_ssm.testing import NoHostSync, assert_close


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("norm_before_gate", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("group_size", [None, 3, 6])
def test_equals_torch_group_by_group(rms, norm_before_gate, gated, group_size):
    x, z, w = draw(2, 5, 6), draw(2, 5, 6, seed=1) if gated else None, draw(6, seed=2)
    b = None if rms else draw(6, seed=3)
    gate = 1.0 if z is None else F.silu(z)
    rows = (x if norm_before_gate else x * gate).split(group_size or 6, dim=-1)
    norm = F.rms_norm if rms else F.layer_norm
    want = torch.cat([norm(g, g.shape[-1:], eps=1e-6) for g in rows], dim=-1) * w + (0.0 if b is None else b)
    want = want * gate if norm_before_gate else want
    function = rmsnorm_fn if rms else layernorm_fn
    assert_close(function(x, w, b, z, group_size=group_size, norm_before_gate=norm_before_gate), want, 1e-12)
    if rms:
        assert_close(rms_norm_ref(x, w, b, z, 1e-6, group_size, norm_before_gate), want, 1e-12)


@pytest.mark.parametrize("norm_before_gate", [False, True])
def test_gradcheck(norm_before_gate):
    t = (draw(2, 6), draw(6), draw(6, seed=1), draw(2, 6, seed=2))
    for function in (rmsnorm_fn, layernorm_fn):
        assert torch.autograd.gradcheck(lambda *v, f=function: f(*v, 1e-6, 3, norm_before_gate), t)


def test_modules_and_low_precision():
    x, z = draw(3, 8), draw(3, 8, seed=1)
    for module in (RMSNorm(8, group_size=4), LayerNorm(8)):
        want = module.double()(x, z)
        out = module.float()(x.bfloat16(), z.bfloat16())
        assert out.dtype == torch.bfloat16
        assert_close(out, want, 6e-3)
    assert RMSNorm(8).bias is None
    assert LayerNorm(8).bias is not None


def test_no_host_sync():
    with NoHostSync():
        rmsnorm_fn(draw(2, 6), draw(6), None, draw(2, 6), group_size=3).sum().backward()


def test_wrong_arguments_are_refused_by_name():
    with pytest.raises(ValueError, match=r"z has shape \(6,\), expected \(..., D\) like x"):
        rmsnorm_fn(draw(2, 6), draw(6), None, draw(6))
    with pytest.raises(ValueError, match="group_size is 4, expected a divisor of D = 6"):
        rmsnorm_fn(draw(2, 6), draw(6), None, group_size=4)

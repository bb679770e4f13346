"""LayerNorm and RMSNorm with residual add against torch's own in float64."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_ssm.ops.triton.layer_norm import (
    RMSNorm,
    layer_norm_fn,
    layer_norm_ref,
    rms_norm_fn,
    rms_norm_ref,
)
from mamba_ssm.testing import NoHostSync, assert_close


def draw(*shape, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def expected(stream, weight, bias, rms):
    """The norm as torch has it."""
    if rms:
        out = F.rms_norm(stream, stream.shape[-1:], weight, 1e-6)
        return out if bias is None else out + bias
    return F.layer_norm(stream, stream.shape[-1:], weight, bias, 1e-6)


@settings(max_examples=40, deadline=None)
@given(
    rms=st.booleans(), residual=st.booleans(), bias=st.booleans(), prenorm=st.booleans(), in_fp32=st.booleans(),
    centred=st.booleans(), rowscale=st.booleans(), second=st.booleans(), width=st.sampled_from([1, 5, 64]),
)  # fmt: skip
def test_equals_torch(rms, residual, bias, prenorm, in_fp32, centred, rowscale, second, width):
    x, r, s = draw(2, 3, width), draw(2, 3, width, seed=1) if residual else None, draw(2, 3) if rowscale else None
    w, b = draw(width, seed=2), draw(width, seed=3) if bias else None
    x1, w1, b1 = (draw(2, 3, width, seed=4), draw(width, seed=5), draw(width, seed=6)) if second else (None, None, None)
    function = rms_norm_fn if rms else layer_norm_fn
    result = function(
        x, w, b, r, x1=x1, weight1=w1, bias1=b1, rowscale=s, prenorm=prenorm, residual_in_fp32=in_fp32,
        zero_centered_weight=centred,
    )  # fmt: skip
    results = result if isinstance(result, tuple) else (result,)
    stream = x * (1.0 if s is None else s.unsqueeze(-1))
    stream = stream + (0.0 if x1 is None else x1) + (0.0 if r is None else r)
    want = [expected(stream, w + centred, b, rms)]
    want += [expected(stream, w1 + centred, b1, rms)] if second else []
    want += [stream] if prenorm else []
    assert len(results) == len(want)
    for got, one in zip(results, want, strict=True):
        assert_close(got, one, 1e-12)


@pytest.mark.parametrize("function, judge", [(layer_norm_fn, layer_norm_ref), (rms_norm_fn, rms_norm_ref)])
def test_gradcheck_and_judges(function, judge):
    x, w, b, r = draw(3, 5), draw(5), draw(5, seed=1), draw(3, 5, seed=2)
    assert torch.autograd.gradcheck(lambda *t: function(*t, prenorm=True), (x, w, b, r))
    assert_close(judge(x, w, b, r), function(x, w, b, r), 1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("function", [layer_norm_fn, rms_norm_fn])
def test_low_precision_accumulates_in_float32(dtype, function):
    x, w, b, r = draw(4, 257, dtype=dtype), draw(257), draw(257, seed=1), draw(4, 257, seed=2)
    w, b, r = (t.detach().float() for t in (w, b, r))
    out, stream = function(x, w, b, r, prenorm=True, residual_in_fp32=True)
    assert (out.dtype, stream.dtype) == (dtype, torch.float32)
    want = function(x.double(), w.double(), b.double(), r.double())
    assert_close(out, want, {torch.float32: 1e-6, torch.bfloat16: 3e-3, torch.float16: 5e-4}[dtype])
    upcast = (layer_norm_ref if function is layer_norm_fn else rms_norm_ref)(x, w, b, r, upcast=True)
    assert torch.equal(upcast, out)


def test_module_drops_x_in_training_only():
    norm = RMSNorm(8, dropout_p=0.5).double()
    x = draw(64, 8)
    torch.manual_seed(0)
    _, stream = norm(x, residual=torch.zeros_like(x), prenorm=True)
    kept = stream != 0
    assert 0.3 < kept.double().mean() < 0.7
    assert_close(stream[kept], 2.0 * x[kept], 1e-14)
    norm.eval()
    assert_close(norm(x), F.rms_norm(x, (8,), norm.weight, 1e-5), 1e-14)


def test_zero_centred_module_starts_as_the_identity_scale():
    assert torch.equal(RMSNorm(4, zero_centered_weight=True).weight, torch.zeros(4))
    x = draw(3, 4)
    assert_close(RMSNorm(4, zero_centered_weight=True).double()(x), RMSNorm(4).double()(x), 1e-14)


def test_no_host_sync():
    x, w = draw(2, 4), draw(4)
    with NoHostSync():
        rms_norm_fn(x, w, None, x, dropout_p=0.1).sum().backward()


@pytest.mark.parametrize("change, message", [
    ({"weight": torch.ones(3)}, r"weight has shape \(3,\), expected \(D\) = \(4\)"),
    ({"residual": torch.ones(4)}, r"residual has shape \(4,\), expected \(..., D\) like x = \(2, 4\)"),
    ({"rowscale": torch.ones(2, 1)}, r"rowscale has shape \(2, 1\), expected x's shape without D = \(2\)"),
])  # fmt: skip
def test_wrong_shapes_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        layer_norm_fn(**{"x": torch.ones(2, 4), "weight": torch.ones(4), "bias": None, **change})

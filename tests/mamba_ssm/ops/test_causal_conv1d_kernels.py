"""The kernels of the causal convolution (interpreted on a CPU) against the reference in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_ssm.ops.causal_conv1d import _update_reference
from mamba_ssm.testing import FORWARD_TOLERANCE, assert_close

kernels = pytest.importorskip("mamba_ssm.ops.triton.causal_conv1d_kernels", exc_type=ImportError)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def draw(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)


@torch.no_grad()
def check_update(x, window, weight, bias, activation, tolerance):
    moved, wide = window.clone(memory_format=torch.preserve_format), window.double()
    out = kernels.causal_conv1d_update(x, moved, weight, bias, activation)
    want = _update_reference(x.double(), wide, weight.double(), None if bias is None else bias.double(), activation)
    assert out.dtype == x.dtype
    assert_close(out, want, tolerance)
    assert_close(moved, wide, FORWARD_TOLERANCE[window.dtype] if window.dtype != x.dtype else 0.0, "conv_state")


@settings(max_examples=20, deadline=None)
@given(
    batch=st.sampled_from([0, 1, 3]), channels=st.sampled_from([1, 5, 300]),
    width_window=st.sampled_from([(2, 1), (2, 2), (3, 5), (4, 3), (4, 4)]), bias=st.booleans(),
    activation=st.sampled_from([None, "silu"]), trailing=st.booleans(), transposed=st.booleans(),
)  # fmt: skip
def test_update(batch, channels, width_window, bias, activation, trailing, transposed):
    width, window = width_window
    x = draw(batch, 2 * channels)[:, channels:]
    x = x.unsqueeze(2) if trailing else x
    state = draw(batch, window, channels).mT if transposed else draw(batch, channels, window)
    b = draw(channels, seed=1) if bias else None
    check_update(x, state, draw(channels, width), b, activation, FORWARD_TOLERANCE[torch.float32])


def test_update_leaves_the_rest_to_the_reference():
    """Several rows at a time, float64, and a wanted gradient."""
    x, state, weight = draw(2, 3, 4), draw(2, 3, 4), draw(3, 4)
    check_update(x, state, weight, None, "silu", FORWARD_TOLERANCE[torch.float32])
    check_update(x[..., 0].double(), state.double(), weight.double(), None, None, 1e-14)
    kernels.causal_conv1d_update(x[..., 0], state, weight.requires_grad_(), None, None).sum().backward()
    assert weight.grad.abs().sum() > 0


def test_registration_of_the_update():
    torch.library.opcheck(kernels.run_update, (draw(2, 5), draw(2, 5, 4), draw(5, 4), draw(5), True))


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("batch, channels", [(1, 1056), (2, 33), (16, 1024), (1024, 1056)])
def test_update_on_a_gpu(dtype, batch, channels):
    for width in (2, 3, 4):
        state, weight = draw(batch, channels, width), draw(channels, width)
        x, bias = draw(batch, channels, dtype=dtype), draw(channels)
        check_update(x, state, weight, bias, "silu", FORWARD_TOLERANCE[dtype])

"""Functions that kernels share, against torch's in float64 (interpreted on a CPU)."""

import math

import pytest
import torch

triton = pytest.importorskip("triton", exc_type=ImportError)
jit_math = pytest.importorskip("mamba_ssm.ops.triton.jit_math", exc_type=ImportError)
tl = triton.language

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXTREMES = [0.0, -0.0, 1e-40, -1e-40, 1e-30, 80.0, -80.0, 88.0, -88.0, 100.0, -100.0, 1e30, -1e30, math.inf, -math.inf]


@triton.jit
def _apply_kernel(x_ptr, sigmoid_ptr, slope_ptr, count, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < count, other=0.0)
    tl.store(sigmoid_ptr + at, jit_math.sigmoid(x), mask=at < count)
    tl.store(slope_ptr + at, jit_math.silu_slope(x), mask=at < count)


@pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")  # NumPy's, in Triton's interpreter
def test_sigmoid_and_slope_at_all_magnitudes():
    x = torch.cat((torch.tensor(EXTREMES), torch.linspace(-30, 30, 901))).to(DEVICE)
    share, slope = torch.full_like(x, math.nan), torch.full_like(x, math.nan)
    _apply_kernel[(1,)](x, share, slope, len(x), BLOCK=1024)
    exact = torch.sigmoid(x.double())
    torch.testing.assert_close(share.double(), exact, rtol=2e-6, atol=2e-38)
    finite = x.isfinite()  # silu'(-inf) is 0 · inf
    expected = exact * (1 + x.double() * torch.sigmoid(-x.double()))
    torch.testing.assert_close(slope[finite].double(), expected[finite], rtol=2e-6, atol=1e-6)

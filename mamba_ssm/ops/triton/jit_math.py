"""Functions that kernels share, in float32.   softplus(x) = max(x, 0) + log1p(exp(-|x|)),   silu(x) = x · sigmoid(x)"""

import triton
import triton.language as tl

from mamba_ssm.ops.triton.launch import INTERPRETED

ON_GPU = tl.constexpr(not INTERPRETED)


@triton.jit
def softplus(x):
    """Relatively exact also far below zero, where 1 + exp(x) would round to 1: log1p(u) = 2 artanh(u / (2 + u)), whose
    series up to the 15th power leaves 1e-8 for u <= 1."""
    u = tl.exp(-tl.abs(x))
    s = u / (2.0 + u)                                                # at most 1/3
    q = s * s
    tail = 1.0 / 13.0 + q * (1.0 / 15.0)
    tail = 1.0 / 9.0 + q * (1.0 / 11.0 + q * tail)
    tail = 1.0 / 5.0 + q * (1.0 / 7.0 + q * tail)
    return tl.maximum(x, 0.0) + 2.0 * s * (1.0 + q * (1.0 / 3.0 + q * tail))


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) by the GPU's own exponential and reciprocal, good to a few units in the last place. Triton's
    functions take more than three times the instructions, to serve denormal numbers."""
    if ON_GPU:
        power = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * -1.4426950408889634], dtype=tl.float32, is_pure=True, pack=1
        )
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + power], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.sigmoid(x)


@triton.jit
def silu(x):
    return x * sigmoid(x)


@triton.jit
def silu_slope(x):
    """silu'(x)"""
    share = sigmoid(x)
    return share * (1.0 + x * (1.0 - share))

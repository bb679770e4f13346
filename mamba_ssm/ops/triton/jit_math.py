"""Functions that kernels share, in float32.   softplus(x) = max(x, 0) + log1p(exp(-|x|)),   silu(x) = x · sigmoid(x)"""

import triton
import triton.language as tl


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
def silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def silu_slope(x):
    """silu'(x)"""
    sigmoid = tl.sigmoid(x)
    return sigmoid * (1.0 + x * (1.0 - sigmoid))

"""Gated activations in plain PyTorch.   silu(x) = x · sigmoid(x)"""

import torch
import torch.nn.functional as F

from mamba_ssm.ops.checks import check_shape
from mamba_ssm.ops.numerics import accumulate_dtype

Tensor = torch.Tensor


def swiglu(x: Tensor, y: Tensor | None = None) -> Tensor:
    """silu(x) · y, x and y (..., D) alike; with y None x (..., 2D) holds both halves.   -> (..., D) in x's dtype"""
    if y is None:
        x, y = x.chunk(2, dim=-1)
    check_shape("swiglu", "y", y, "like x", x.shape)
    dtype = accumulate_dtype(x, y)
    return (F.silu(x.to(dtype)) * y.to(dtype)).to(x.dtype)

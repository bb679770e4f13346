"""Activations of MLPs in one pass over their rows.

    swiglu(x, y) = silu(x) · y,   dx = dout y silu'(x),   dy = dout silu(x);     squared_relu(x) = max(x, 0)²
"""

import torch
import torch.nn.functional as F

from mamba_ssm.ops.checks import check_device, check_floating, check_shape
from mamba_ssm.ops.numerics import accumulate_dtype, without_autocast
from mamba_ssm.ops.tiers import implementation, register, register_operator
from mamba_ssm.ops.triton.launch import register_triton

Tensor = torch.Tensor

register_operator("swiglu", cuda=("triton",))
register_operator("squared_relu", cuda=("triton",))


def swiglu(x: Tensor, y: Tensor | None = None) -> Tensor:
    """silu(x) · y, x and y (..., D) alike; with y None x (..., 2D) holds both halves.   -> (..., D) in x's dtype"""
    check_floating("swiglu", x=x, y=y)
    if y is None:
        if x.dim() == 0 or x.shape[-1] % 2:
            raise ValueError(f"swiglu: x has shape {tuple(x.shape)}, expected (..., 2D) without y")
        x, y = x.chunk(2, dim=-1)
    check_device("swiglu", x.device, y=y)
    check_shape("swiglu", "y", y, "like x", x.shape)
    return implementation("swiglu", x.device)(x, y)


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0)², any shape.   -> like x"""
    check_floating("squared_relu", x=x)
    return implementation("squared_relu", x.device)(x)


def _swiglu_reference(x: Tensor, y: Tensor) -> Tensor:
    with without_autocast(x):
        dtype = accumulate_dtype(x, y)
        return (F.silu(x.to(dtype)) * y.to(dtype)).to(x.dtype)


def _squared_relu_reference(x: Tensor) -> Tensor:
    with without_autocast(x):
        return F.relu(x.to(accumulate_dtype(x))).square().to(x.dtype)


register("swiglu", "reference", _swiglu_reference)
register("squared_relu", "reference", _squared_relu_reference)
register_triton("swiglu", "k_activations_kernels", "swiglu")
register_triton("squared_relu", "k_activations_kernels", "squared_relu")

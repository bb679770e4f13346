"""Kernels of `k_activations`; the mathematics stands there.   M rows, D columns"""

import torch
import triton
import triton.language as tl

from mamba_ssm.ops.numerics import accumulate_dtype
from mamba_ssm.ops.tiers import reference_instead
from mamba_ssm.ops.triton.jit_math import silu, silu_slope
from mamba_ssm.ops.triton.launch import ceil_div, define, differentiate

Tensor = torch.Tensor

BLOCK = 1024                                                         # columns of one program, 8 in each of 128 threads


@triton.jit
def _forward_kernel(x_ptr, y_ptr, out_ptr, D, stride_x, stride_y, GATED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride_x + d, mask=d < D, other=0.0).to(tl.float32)
    if GATED:
        out = silu(x) * tl.load(y_ptr + row * stride_y + d, mask=d < D, other=0.0).to(tl.float32)
    else:
        out = tl.maximum(x, 0.0)
        out *= out
    tl.store(out_ptr + row * D + d, out.to(out_ptr.dtype.element_ty), mask=d < D)


@triton.jit
def _backward_kernel(
    dout_ptr, x_ptr, y_ptr, dx_ptr, dy_ptr, D, stride_do, stride_x, stride_y, GATED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dout = tl.load(dout_ptr + row * stride_do + d, mask=d < D, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * stride_x + d, mask=d < D, other=0.0).to(tl.float32)
    if GATED:
        y = tl.load(y_ptr + row * stride_y + d, mask=d < D, other=0.0).to(tl.float32)
        tl.store(dy_ptr + row * D + d, (dout * silu(x)).to(dy_ptr.dtype.element_ty), mask=d < D)
        dx = dout * y * silu_slope(x)
    else:
        dx = 2.0 * dout * tl.maximum(x, 0.0)
    tl.store(dx_ptr + row * D + d, dx.to(dx_ptr.dtype.element_ty), mask=d < D)


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(1) == 1 else tensor.contiguous()


def _grid(x: Tensor) -> tuple[int, int]:
    return x.shape[0], ceil_div(x.shape[1], BLOCK)


def _launch_forward(x: Tensor, y: Tensor | None) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    gated = y is not None
    x, y = _rows(x), _rows(y) if gated else x
    _forward_kernel[_grid(x)](x, y, out, x.shape[1], x.stride(0), y.stride(0), GATED=gated, BLOCK=BLOCK, num_warps=4)
    return out


def _launch_backward(dout: Tensor, x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
    dx, dy = _fake_backward(dout, x, y)
    if dx.numel() == 0:
        return dx, dy
    gated = y is not None
    dout, x, y = _rows(dout), _rows(x), _rows(y) if gated else x
    _backward_kernel[_grid(x)](
        dout, x, y, dx, dy, x.shape[1], dout.stride(0), x.stride(0), y.stride(0), GATED=gated, BLOCK=BLOCK, num_warps=4
    )
    return dx, dy


def _fake_backward(dout: Tensor, x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dy = torch.empty((0,) if y is None else y.shape, dtype=(x if y is None else y).dtype, device=x.device)
    return dx, dy


run_activation = define(
    "activation(Tensor x, Tensor? y) -> Tensor",
    _launch_forward,
    lambda x, y: torch.empty(x.shape, dtype=x.dtype, device=x.device),
)
_run_backward = define(
    "activation_backward(Tensor dout, Tensor x, Tensor? y) -> (Tensor, Tensor)", _launch_backward, _fake_backward
)


def _setup_context(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx, dout):
    x, y = ctx.saved_tensors
    dx, dy = _run_backward(dout, x, y)
    return dx, None if y is None else dy


differentiate("activation", _backward, _setup_context)


def swiglu(x: Tensor, y: Tensor) -> Tensor:
    """`swiglu` on the triton tier."""
    if accumulate_dtype(x, y) == torch.float64:
        return reference_instead("swiglu", x.device, "the kernel takes no float64")(x, y)
    rows = (-1, x.shape[-1]) if x.numel() else (0, 1)
    return run_activation(x.reshape(rows), y.reshape(rows)).view(x.shape)


def squared_relu(x: Tensor) -> Tensor:
    """`squared_relu` on the triton tier."""
    if x.dtype == torch.float64:
        return reference_instead("squared_relu", x.device, "the kernel takes no float64")(x)
    rows = (-1, x.shape[-1]) if x.numel() and x.dim() else (x.numel(), 1)
    return run_activation(x.reshape(rows), None).view(x.shape)

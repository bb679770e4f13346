"""Kernels of `mamba_ssm.ops.causal_conv1d`; the mathematics stands there.

Letters: B batch, L length, D channels, W width, S length of the rolling window (S >= W-1).
"""

import torch
import triton
import triton.language as tl

from mamba_ssm.ops.numerics import accumulate_dtype
from mamba_ssm.ops.tiers import reference_instead
from mamba_ssm.ops.triton.jit_math import silu
from mamba_ssm.ops.triton.launch import define

Tensor = torch.Tensor

UPDATE_BLOCK = 256                                                   # channels of one program


@triton.jit
def convolve_one(
    x, channel, live, window_ptr, weight_ptr, bias_ptr,
    stride_wd, stride_ww, STRIDE_D: tl.constexpr, STRIDE_S: tl.constexpr, W: tl.constexpr, S: tl.constexpr,
    BLOCK_S: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Channels' newest inputs x (D) enter their windows (D, S), in place.   -> the convolution's newest row (D)

    All threads have read their part of the windows before any writes: the shift reads what a neighbour overwrites."""
    k = tl.arange(0, BLOCK_S)
    cell = window_ptr + channel[:, None] * STRIDE_D + k[None, :] * STRIDE_S                # (D, S)
    moved = tl.load(cell + STRIDE_S, mask=live[:, None] & (k < S - 1)[None, :], other=0.0).to(tl.float32)
    window = tl.where((k == S - 1)[None, :], x[:, None], moved)
    tap = k - (S - W)
    inside = live[:, None] & ((tap >= 0) & (tap < W))[None, :]
    weight = tl.load(weight_ptr + channel[:, None] * stride_wd + tap[None, :] * stride_ww, mask=inside, other=0.0)
    out = tl.sum(window * weight.to(tl.float32), axis=1)
    if S < W:                                                        # S = W-1: the oldest tap's input leaves the window
        oldest = tl.load(window_ptr + channel * STRIDE_D, mask=live, other=0.0).to(tl.float32)
        out += oldest * tl.load(weight_ptr + channel * stride_wd, mask=live, other=0.0).to(tl.float32)
    if HAS_BIAS:
        out += tl.load(bias_ptr + channel, mask=live, other=0.0).to(tl.float32)
    tl.debug_barrier()
    tl.store(cell, window.to(window_ptr.dtype.element_ty), mask=live[:, None] & (k < S)[None, :])
    return out


@triton.jit
def _update_kernel(
    x_ptr, window_ptr, weight_ptr, bias_ptr, out_ptr,
    channels, stride_xb, stride_xd, stride_sb, stride_wd, stride_ww,
    STRIDE_D: tl.constexpr, STRIDE_S: tl.constexpr, W: tl.constexpr, S: tl.constexpr, BLOCK_S: tl.constexpr,
    HAS_BIAS: tl.constexpr, SILU: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    live = channel < channels
    x = tl.load(x_ptr + row * stride_xb + channel * stride_xd, mask=live, other=0.0).to(tl.float32)
    out = convolve_one(
        x, channel, live, window_ptr + row * stride_sb, weight_ptr, bias_ptr, stride_wd, stride_ww, STRIDE_D, STRIDE_S,
        W, S, BLOCK_S, HAS_BIAS,
    )  # fmt: skip
    if SILU:
        out = silu(out)
    tl.store(out_ptr + row * channels + channel, out.to(out_ptr.dtype.element_ty), mask=live)


def _launch_update(x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    batch, channels = x.shape
    out = torch.empty((batch, channels), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    block = min(UPDATE_BLOCK, triton.next_power_of_2(channels))
    window, width = conv_state.shape[2], weight.shape[1]
    _update_kernel[(batch, triton.cdiv(channels, block))](
        x, conv_state, weight, None if bias is None else bias.contiguous(), out,
        channels, *x.stride(), conv_state.stride(0), *weight.stride(),
        STRIDE_D=conv_state.stride(1), STRIDE_S=conv_state.stride(2), W=width, S=window,
        BLOCK_S=triton.next_power_of_2(max(window, 1)), HAS_BIAS=bias is not None, SILU=silu, BLOCK_D=block,
        num_warps=4,
    )  # fmt: skip
    return out


run_update = define(
    "causal_conv1d_update(Tensor x, Tensor(a!) conv_state, Tensor weight, Tensor? bias, bool silu) -> Tensor",
    _launch_update,
    lambda x, conv_state, weight, bias, silu: x.new_empty(x.shape),
)


def causal_conv1d_update(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> Tensor:
    """`mamba_ssm.ops.causal_conv1d.causal_conv1d_update` for one row at a time; nothing is differentiated."""
    wanted = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, conv_state, weight, bias))
    reason = None
    if x.dim() == 3 and x.shape[2] != 1:
        reason = "the kernel takes one row at a time"
    elif accumulate_dtype(x, conv_state, weight, bias) == torch.float64:
        reason = "the kernel takes no float64"
    elif wanted:
        reason = "the kernel has no gradient"
    if reason is not None:
        return reference_instead("causal_conv1d_update", x.device, reason)(x, conv_state, weight, bias, activation)
    rows = x.squeeze(2) if x.dim() == 3 else x
    return run_update(rows, conv_state, weight, bias, activation is not None).view(x.shape)

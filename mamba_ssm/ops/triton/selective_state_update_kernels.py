"""Kernel of `selective_state_update`; the mathematics stands there. Heads and their channels are one axis of channels.

Letters: B batch, C channels (D, or H · P), N state size, G groups, S rows of the state tensor.
"""

import torch
import triton
import triton.language as tl

from mamba_ssm.ops.checks import is_differentiated
from mamba_ssm.ops.numerics import accumulate_dtype
from mamba_ssm.ops.tiers import reference_instead
from mamba_ssm.ops.triton.jit_math import silu, softplus
from mamba_ssm.ops.triton.launch import ceil_div, define, next_power_of_two

Tensor = torch.Tensor

TILE = 2048                            # elements of the state in one program: 16 registers in each of 128 threads


@triton.jit
def _channels(ptr, head, channel, stride_h, stride_p, live):
    return tl.load(ptr + head * stride_h + channel * stride_p, mask=live, other=0.0).to(tl.float32)


@triton.jit
def _decay_rates(
    A_ptr, head, channel, n, live, inside, stride_h, stride_p, stride_n, TIED: tl.constexpr, A_IS_LOG: tl.constexpr
):
    """A (C, N), or (C) where all of a channel's states decay alike."""
    if TIED:
        A = _channels(A_ptr, head, channel, stride_h, stride_p, live)
    else:
        cell = A_ptr + (head * stride_h + channel * stride_p)[:, None] + n[None, :] * stride_n
        A = tl.load(cell, mask=inside, other=0.0).to(tl.float32)
    if A_IS_LOG:
        A = -tl.exp(A)
    return A


@triton.jit
def _weights(ptr, group, n, live, stride_g, stride_n, N: tl.constexpr, ONE_GROUP: tl.constexpr):
    """B or C as (1, N), or (C, N) where the channels are of several groups."""
    if ONE_GROUP:
        weight = tl.load(ptr + n * stride_n, mask=n < N, other=0.0)[None, :]
    else:
        inside = live[:, None] & (n < N)[None, :]
        weight = tl.load(ptr + group[:, None] * stride_g + n[None, :] * stride_n, mask=inside, other=0.0)
    return weight.to(tl.float32)


@triton.jit
def _state_update_kernel(
    state_ptr, x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, dt_bias_ptr, indices_ptr, out_ptr,
    channels, P, channels_of_B, channels_of_C,
    stride_sb, stride_sh, stride_sp, stride_sn, stride_xb, stride_xh, stride_xp, stride_tb, stride_th, stride_tp,
    stride_Ah, stride_Ap, stride_An, stride_Bb, stride_Bg, stride_Bn, stride_Cb, stride_Cg, stride_Cn,
    stride_Dh, stride_Dp, stride_zb, stride_zh, stride_zp, stride_bh, stride_bp, stride_i,
    N: tl.constexpr, HAS_D: tl.constexpr, HAS_Z: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_INDICES: tl.constexpr,
    SOFTPLUS: tl.constexpr, TIED: tl.constexpr, A_IS_LOG: tl.constexpr, ONE_B: tl.constexpr, ONE_C: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    n = tl.arange(0, BLOCK_N)
    live = c < channels
    inside = live[:, None] & (n < N)[None, :]                                              # (C, N)
    head, channel = c // P, c % P
    A = _decay_rates(A_ptr, head, channel, n, live, inside, stride_Ah, stride_Ap, stride_An, TIED, A_IS_LOG)
    kept = row
    if HAS_INDICES:
        kept = tl.load(indices_ptr + row * stride_i).to(tl.int64)
    cell = state_ptr + kept * stride_sb + (head * stride_sh + channel * stride_sp)[:, None] + n[None, :] * stride_sn
    state = tl.load(cell, mask=inside, other=0.0).to(tl.float32)
    x = _channels(x_ptr + row * stride_xb, head, channel, stride_xh, stride_xp, live)
    dt = _channels(dt_ptr + row * stride_tb, head, channel, stride_th, stride_tp, live)
    if HAS_BIAS:
        dt += _channels(dt_bias_ptr, head, channel, stride_bh, stride_bp, live)
    if SOFTPLUS:
        dt = softplus(dt)
    B = _weights(B_ptr + row * stride_Bb, c // channels_of_B, n, live, stride_Bg, stride_Bn, N, ONE_B)
    C = _weights(C_ptr + row * stride_Cb, c // channels_of_C, n, live, stride_Cg, stride_Cn, N, ONE_C)
    if TIED:
        decay = tl.exp(dt * A)[:, None]
    else:
        decay = tl.exp(dt[:, None] * A)
    state = decay * state + (dt * x)[:, None] * B
    out = tl.sum(state * C, axis=1)
    if HAS_D:
        out += x * _channels(D_ptr, head, channel, stride_Dh, stride_Dp, live)
    if HAS_Z:
        out *= silu(_channels(z_ptr + row * stride_zb, head, channel, stride_zh, stride_zp, live))
    tl.store(out_ptr + row * channels + c, out.to(out_ptr.dtype.element_ty), mask=live)
    tl.debug_barrier()                       # threads that hold the same cell have read it before one overwrites it
    tl.store(cell, state.to(state_ptr.dtype.element_ty), mask=inside)


def _launch(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
    dt_bias: Tensor | None, dt_softplus: bool, state_batch_indices: Tensor | None, A_is_log: bool,
) -> Tensor:  # fmt: skip
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    batch, size, headed = x.shape[0], state.shape[-1], x.dim() == 3
    channels = out.numel() // batch
    B, C = (weight.unsqueeze(1) if weight.dim() == 2 else weight for weight in (B, C))     # (B, G, N)
    block_n = next_power_of_two(size)
    block_c = min(next_power_of_two(channels), max(TILE // block_n, 4))
    _state_update_kernel[(batch, ceil_div(channels, block_c))](
        state, x, dt, A, B, C, D, z, dt_bias, state_batch_indices, out,
        channels, x.shape[2] if headed else channels, channels // B.shape[1], channels // C.shape[1],
        *_with_head(state.stride(), headed, 1), *_with_head(x.stride(), headed, 1), *_with_head(dt.stride(), headed, 1),
        *_with_head(A.stride(), headed, 0), *B.stride(), *C.stride(),
        *_optional(D, headed, 0), *_optional(z, headed, 1), *_optional(dt_bias, headed, 0),
        0 if state_batch_indices is None else state_batch_indices.stride(0),
        N=size, HAS_D=D is not None, HAS_Z=z is not None, HAS_BIAS=dt_bias is not None,
        HAS_INDICES=state_batch_indices is not None, SOFTPLUS=dt_softplus, TIED=A.stride(-1) == 0 or size == 1,
        A_IS_LOG=A_is_log, ONE_B=B.shape[1] == 1, ONE_C=C.shape[1] == 1, BLOCK_C=block_c, BLOCK_N=block_n,
        num_warps=4,
    )  # fmt: skip
    return out


def _with_head(strides: tuple[int, ...], headed: bool, axis: int) -> tuple[int, ...]:
    """Strides with one for the head at `axis`, of which there is but one where there are no heads."""
    return strides if headed else (*strides[:axis], 0, *strides[axis:])


def _optional(tensor: Tensor | None, headed: bool, axis: int) -> tuple[int, ...]:
    return (0,) * (2 + axis) if tensor is None else _with_head(tensor.stride(), headed, axis)


run_state_update = define(
    "selective_state_update(Tensor(a!) state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z,"
    " Tensor? dt_bias, bool dt_softplus, Tensor? state_batch_indices, bool A_is_log) -> Tensor",
    _launch,
    lambda state, x, *others: x.new_empty(x.shape),
)


def selective_state_update(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, state_batch_indices) -> Tensor:
    """`selective_state_update` on the triton tier; nothing is differentiated."""
    tensors = (state, x, dt, A, B, C, D, z, dt_bias)
    reason = None
    if accumulate_dtype(*tensors) == torch.float64:
        reason = "the kernel takes no float64"
    elif is_differentiated(tensors):
        reason = "the kernel has no gradient"
    if reason is not None:
        run = reference_instead("selective_state_update", x.device, reason)
        return run(*tensors, dt_softplus, state_batch_indices)
    return run_state_update(*tensors, dt_softplus, state_batch_indices, False)

"""The kernel of `dual_step`; the mathematics stands there.

A program is a group of a batch row, since the norm runs over a group's channels. It reads some rows at a
time, the first of them before anything else, since what takes time is the way from memory; these alone are to stay in
the cache until the next step, which does not hold all. On an H200, B1024 H16 P64 N16, 16 steps of two layers behind 8
rows: 16.7 us a step; 18.3 where all rows are cached alike, 23.0 with rows read one after the other.

Letters: B batch, L rows of the pass, S steps, H heads, P headdim, G groups, N state size, W convolution width, E
columns of (x, B, C). Tiles are (heads of a group, P).
"""

import torch
import triton
import triton.language as tl

from mamba_ssm.ops.numerics import accumulate_dtype
from mamba_ssm.ops.tiers import reference_instead
from mamba_ssm.ops.triton.jit_math import silu, softplus
from mamba_ssm.ops.triton.launch import next_power_of_two
from mamba_ssm.ops.triton.recurrent_step_kernels import load_float, place_of_norm

Tensor = torch.Tensor

CHANNELS_OF_THREAD = 8                                               # 16 bytes of a bfloat16 row
ROWS_AT_ONCE = 4                                                     # rows whose loads are on their way at once
REGISTERS = 64                                                       # of a thread: all programs of B1024 fit on an H200
MOST_WARPS = 8
MOST_CHANNELS = 4096                                                 # of a group: what the registers of a program hold


@triton.jit
def _convolved(
    column, live, inputs_ptr, window_ptr, weight_ptr, bias_ptr, count, E: tl.constexpr, W: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """silu of the convolution's newest row at columns of (x, B, C), whose inputs enter the window."""
    newest = tl.load(inputs_ptr + column, mask=live, other=0.0)
    out = newest.to(tl.float32) * load_float(weight_ptr + (W - 1) * E, column, live)
    for i in tl.static_range(1, W):
        before = window_ptr + ((count + W - i) % W) * E
        out += load_float(before, column, live) * load_float(weight_ptr + (W - 1 - i) * E, column, live)
    if HAS_BIAS:
        out += load_float(bias_ptr, column, live)
    tl.store(window_ptr + (count % W) * E + column, newest.to(window_ptr.dtype.element_ty), mask=live)
    return silu(out)


@triton.jit
def _rows(
    rows_ptr, left_ptr, stride, first, end, channel, live, b_column, n_live, head, head_live, H: tl.constexpr,
    ROWS: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """Of rows first .. first + ROWS - 1 < end: x (heads, ROWS, P), B (ROWS, N), what is left (heads, ROWS)."""
    row = first + tl.arange(0, ROWS)
    there = row < end
    x = tl.load(
        rows_ptr + (row[None, :, None] * stride + channel[:, None, :]),
        mask=there[None, :, None] & live[:, None, :], other=0.0, eviction_policy=CACHE,
    )  # fmt: skip
    B = tl.load(
        rows_ptr + (row[:, None] * stride + b_column[None, :]), mask=there[:, None] & n_live[None, :], other=0.0
    )
    left = tl.load(
        left_ptr + (row[None, :] * H + head[:, None]), mask=there[None, :] & head_live[:, None], other=0.0
    )
    return x, B, left


@triton.jit
def _weighed(x, B, left, C, decay, left_ptr, first, end, head, head_live, H: tl.constexpr, ROWS: tl.constexpr):
    """What these rows add to y (heads, P); what is left of them decays into left_ptr."""
    row = first + tl.arange(0, ROWS)
    left *= decay[:, None]
    tl.store(left_ptr + (row[None, :] * H + head[:, None]), left, mask=(row < end)[None, :] & head_live[:, None])
    weight = left * tl.sum(C[None, :] * B.to(tl.float32), axis=1)[None, :]
    return tl.sum(weight[:, :, None] * x.to(tl.float32), axis=1)


@triton.jit(do_not_specialize=["count", "length"])
def _dual_step_kernel(
    zxbcdt_ptr, passed_ptr, passed_left_ptr, stepped_ptr, stepped_left_ptr, window_ptr, weight_ptr, bias_ptr,
    dt_bias_ptr, A_log_ptr, D_ptr, norm_weight_ptr, out_ptr,
    count, length, room, stride_z, stride_passed_b, stride_passed, stride_stepped, eps, dt_min, dt_max,
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr, W: tl.constexpr,
    HAS_BIAS: tl.constexpr, D_OF_CHANNEL: tl.constexpr, LIMITED: tl.constexpr, NORM: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    HEADS: tl.constexpr = H // G
    E: tl.constexpr = H * P + 2 * G * N
    b, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    h, p, n = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    head, head_live, n_live = group * HEADS + h, h < HEADS, n < N
    channel = head[:, None] * P + p[None, :]                                               # (heads, P)
    live = head_live[:, None] & (p < P)[None, :]
    b_column = H * P + group * N + n
    half = count % 2
    zxbcdt_ptr += b * stride_z
    inputs_ptr = zxbcdt_ptr + H * P
    passed_ptr += b * stride_passed_b
    passed_left_ptr += (2 * b + half) * length * H
    passed_then_ptr = passed_left_ptr + (1 - 2 * half) * length * H
    stepped_ptr += b * room * stride_stepped
    stepped_left_ptr += (2 * b + half) * room * H
    stepped_then_ptr = stepped_left_ptr + (1 - 2 * half) * room * H
    window_ptr += b * W * E

    # On their way while B, C and the decays are computed.
    x_rows, B_rows, left = _rows(
        passed_ptr, passed_left_ptr, stride_passed, 0, length, channel, live, b_column, n_live, head, head_live, H,
        ROWS, "",
    )  # fmt: skip
    dt = softplus(load_float(inputs_ptr + E, head, head_live) + load_float(dt_bias_ptr, head, head_live))
    if LIMITED:
        dt = tl.minimum(tl.maximum(dt, dt_min), dt_max)
    decay = tl.exp(-dt * tl.exp(load_float(A_log_ptr, head, head_live)))
    B = _convolved(b_column, n_live, inputs_ptr, window_ptr, weight_ptr, bias_ptr, count, E, W, HAS_BIAS)
    C = _convolved(b_column + G * N, n_live, inputs_ptr, window_ptr, weight_ptr, bias_ptr, count, E, W, HAS_BIAS)
    newest = stepped_ptr + count * stride_stepped
    tl.store(newest + b_column, B.to(stepped_ptr.dtype.element_ty), mask=n_live)
    tl.store(stepped_then_ptr + count * H + head, dt, mask=head_live)
    weight = dt * tl.sum(C * B, axis=0)

    y = _weighed(x_rows, B_rows, left, C, decay, passed_then_ptr, 0, length, head, head_live, H, ROWS)
    for first in range(ROWS, length, ROWS):
        x_rows, B_rows, left = _rows(
            passed_ptr, passed_left_ptr, stride_passed, first, length, channel, live, b_column, n_live, head,
            head_live, H, ROWS, "evict_first",
        )  # fmt: skip
        y += _weighed(x_rows, B_rows, left, C, decay, passed_then_ptr, first, length, head, head_live, H, ROWS)
    for first in range(0, count, ROWS):
        x_rows, B_rows, left = _rows(
            stepped_ptr, stepped_left_ptr, stride_stepped, first, count, channel, live, b_column, n_live, head,
            head_live, H, ROWS, "evict_first",
        )  # fmt: skip
        y += _weighed(x_rows, B_rows, left, C, decay, stepped_then_ptr, first, count, head, head_live, H, ROWS)

    # Behind the loops, which need the registers.
    x = _convolved(channel, live, inputs_ptr, window_ptr, weight_ptr, bias_ptr, count, E, W, HAS_BIAS)
    tl.store(newest + channel, x.to(stepped_ptr.dtype.element_ty), mask=live)
    if D_OF_CHANNEL:
        y += x * (weight[:, None] + load_float(D_ptr, channel, live))
    else:
        y += x * (weight + load_float(D_ptr, head, head_live))[:, None]
    gate = silu(load_float(zxbcdt_ptr, channel, live))
    if NORM == 1:
        y *= gate
    if NORM != 0:
        scale = tl.rsqrt(tl.sum(y * y) / (HEADS * P) + eps)
        y *= scale * load_float(norm_weight_ptr, channel, live)
    if NORM != 1:
        y *= gate
    tl.store(out_ptr + b * (H * P) + channel, y.to(out_ptr.dtype.element_ty), mask=live)


@torch.no_grad()
def mamba2_dual_step(
    zxbcdt, kept, conv_bias, dt_bias, A_log, D, ngroups, norm_weight, norm_eps, norm_before_gate, dt_limit
) -> Tensor:
    """`mamba2_dual_step` on the triton tier."""
    arguments = (zxbcdt, kept, conv_bias, dt_bias, A_log, D, ngroups, norm_weight)
    if (reason := _why_not(zxbcdt, kept, dt_bias, ngroups)) is not None:
        run = reference_instead("mamba2_dual_step", zxbcdt.device, reason)
        return run(*arguments, norm_eps, norm_before_gate, dt_limit)
    batch, width, channels = kept.window.shape
    heads = dt_bias.shape[0]
    d_ssm = zxbcdt.shape[1] - channels - heads
    block_h, block_p = next_power_of_two(heads // ngroups), next_power_of_two(d_ssm // heads)
    out = torch.empty((batch, d_ssm), dtype=zxbcdt.dtype, device=zxbcdt.device)
    norm = place_of_norm(norm_weight, norm_before_gate)
    if batch == 0:
        return out
    dense = (None if tensor is None else tensor.contiguous() for tensor in (conv_bias, dt_bias, A_log, D, norm_weight))
    warps = max(1, min(MOST_WARPS, block_h * block_p // (32 * CHANNELS_OF_THREAD)))
    narrow = kept.passed.x_B.itemsize == 2 and block_h * block_p <= 32 * warps * CHANNELS_OF_THREAD
    _dual_step_kernel[(batch, ngroups)](
        zxbcdt, *kept.passed, *kept.stepped, kept.window, kept.taps, *dense, out,
        kept.count, kept.passed.left.shape[2], kept.room, zxbcdt.stride(0), *kept.passed.x_B.stride()[:2],
        kept.stepped.x_B.stride(1), norm_eps, float(dt_limit[0]), float(dt_limit[1]),
        H=heads, P=d_ssm // heads, G=ngroups, N=(channels - d_ssm) // (2 * ngroups), W=width,
        HAS_BIAS=conv_bias is not None, D_OF_CHANNEL=D.dim() == 2, LIMITED=tuple(dt_limit) != (0.0, float("inf")),
        NORM=norm, BLOCK_H=block_h, BLOCK_P=block_p, BLOCK_N=next_power_of_two((channels - d_ssm) // (2 * ngroups)),
        ROWS=ROWS_AT_ONCE, num_warps=warps, maxnreg=REGISTERS if narrow else None,
    )  # fmt: skip
    return out


def _why_not(zxbcdt, kept, dt_bias, ngroups) -> str | None:
    if accumulate_dtype(zxbcdt, kept.window, kept.taps, dt_bias) == torch.float64:
        return "the kernels take no float64"
    d_ssm = zxbcdt.shape[1] - kept.window.shape[2] - dt_bias.shape[0]
    if d_ssm // ngroups > MOST_CHANNELS:
        return f"the kernel takes groups of at most {MOST_CHANNELS} channels"
    dense = (kept.passed.left, *kept.stepped, kept.window, kept.taps)
    if zxbcdt.stride(1) != 1 or kept.passed.x_B.stride(2) != 1 or not all(tensor.is_contiguous() for tensor in dense):
        return "the kernel takes rows without gaps"
    return None

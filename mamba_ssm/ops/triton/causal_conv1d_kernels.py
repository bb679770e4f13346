"""Kernels of `mamba_ssm.ops.causal_conv1d`; the mathematics stands there.

    p_t = bias + Σ_i w_{W-1-i} x_{t-i} [same piece],   out = act(p),   i = 0..W-1
    dp = dout act'(p),   dx_s = Σ_i w_{W-1-i} dp_{s+i} [same piece],   dw_{W-1-i} = Σ_t dp_t x_{t-i} [same piece]

Backward computes p again, once, and keeps dp in float32. Each of its programs sums dw over its own rows; those sums are
added up in a fixed order.

Letters: B batch, L length, D channels, W width, S length of the rolling window (S >= W-1). Tiles are (D, L).
"""

import torch
import triton
import triton.language as tl

from mamba_ssm.ops import conv1d_package
from mamba_ssm.ops.causal_conv1d import causal_conv1d_window
from mamba_ssm.ops.checks import is_differentiated
from mamba_ssm.ops.numerics import accumulate_dtype
from mamba_ssm.ops.tiers import reference_instead
from mamba_ssm.ops.triton.jit_math import silu, silu_slope
from mamba_ssm.ops.triton.launch import ceil_div, define, differentiate, next_power_of_two
from mamba_ssm.ops.triton.sum_kernels import add_programs

Tensor = torch.Tensor

MAX_WIDTH = 4                                                        # the loops over taps are unrolled
UPDATE_BLOCK = 256                                                   # channels of one program
# Tiles (D, L), longer where memory is dense; sums over L take longer rows of them. On an H200, B16 L128 D1056, channels
# last: forward 6 us (64, 16: 12), dx 7 (14), dw 17 (128, 8: 27).
CHANNELS_FIRST, CHANNELS_LAST, CHANNELS_LAST_SUMS = (16, 64), (128, 8), (32, 32)
PROGRAMS = 1024                                                      # of dw's kernel, about: sums to add up


@triton.jit
def _joined(seq_ptr, row, length, stride, HAS_SEQ: tl.constexpr):
    """Whether rows (L) are of one piece with the row before; what enters is of the first row's piece."""
    joined = row < length
    if HAS_SEQ:
        inner = (row > 0) & (row < length)
        here = tl.load(seq_ptr + row * stride, mask=inner, other=0)
        before = tl.load(seq_ptr + (row - 1) * stride, mask=inner, other=0)
        joined = joined & (here == before)
    return joined


@triton.jit
def _inputs(
    x_ptr, initial_ptr, d, row, live, visible, length, stride_xd, stride_xl, stride_id, stride_il,
    W: tl.constexpr, HAS_INITIAL: tl.constexpr,
):  # fmt: skip
    """x at rows (L) from -(W-1) on, where visible (L): (D, L)."""
    seen = live[:, None] & (visible & (row >= 0) & (row < length))[None, :]
    x = tl.load(x_ptr + d[:, None] * stride_xd + row[None, :] * stride_xl, mask=seen, other=0.0).to(tl.float32)
    if HAS_INITIAL:
        entering = live[:, None] & (visible & (row < 0) & (row > -W))[None, :]
        cell = initial_ptr + d[:, None] * stride_id + (row + W - 1)[None, :] * stride_il
        x += tl.load(cell, mask=entering, other=0.0).to(tl.float32)
    return x


@triton.jit
def _preactivation(
    x_ptr, weight_ptr, bias_ptr, seq_ptr, initial_ptr, d, row, live, length,
    stride_xd, stride_xl, stride_wd, stride_ww, stride_sl, stride_id, stride_il,
    W: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SEQ: tl.constexpr, HAS_INITIAL: tl.constexpr,
):  # fmt: skip
    """p at rows (L): (D, L)."""
    visible = (row >= 0) & (row < length)
    p = tl.zeros((d.shape[0], row.shape[0]), tl.float32)
    if HAS_BIAS:
        p += tl.load(bias_ptr + d, mask=live, other=0.0).to(tl.float32)[:, None]
    for i in tl.static_range(W):
        if i > 0:
            visible = visible & _joined(seq_ptr, row - i + 1, length, stride_sl, HAS_SEQ)
        weight = tl.load(weight_ptr + d * stride_wd + (W - 1 - i) * stride_ww, mask=live, other=0.0).to(tl.float32)
        p += weight[:, None] * _inputs(
            x_ptr, initial_ptr, d, row - i, live, visible, length, stride_xd, stride_xl, stride_id, stride_il, W,
            HAS_INITIAL,
        )  # fmt: skip
    return p


@triton.jit(do_not_specialize=["length"])
def _forward_kernel(
    x_ptr, weight_ptr, bias_ptr, seq_ptr, initial_ptr, out_ptr,
    channels, length, stride_xb, stride_xd, stride_xl, stride_ob, stride_od, stride_ol, stride_wd, stride_ww,
    stride_sb, stride_sl, stride_ib, stride_id, stride_il,
    W: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SEQ: tl.constexpr, HAS_INITIAL: tl.constexpr, SILU: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(length, BLOCK_L)
    b = (tl.program_id(0) // blocks).to(tl.int64)
    row = ((tl.program_id(0) % blocks) * BLOCK_L + tl.arange(0, BLOCK_L)).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    live = d < channels
    out = _preactivation(
        x_ptr + b * stride_xb, weight_ptr, bias_ptr, seq_ptr + b * stride_sb, initial_ptr + b * stride_ib, d, row, live,
        length, stride_xd, stride_xl, stride_wd, stride_ww, stride_sl, stride_id, stride_il, W, HAS_BIAS, HAS_SEQ,
        HAS_INITIAL,
    )  # fmt: skip
    if SILU:
        out = silu(out)
    cell = out_ptr + b * stride_ob + d[:, None] * stride_od + row[None, :] * stride_ol
    tl.store(cell, out.to(out_ptr.dtype.element_ty), mask=live[:, None] & (row < length)[None, :])


@triton.jit(do_not_specialize=["length"])
def _weight_gradient_kernel(
    dout_ptr, x_ptr, weight_ptr, bias_ptr, seq_ptr, initial_ptr, dp_ptr, dweight_ptr, dbias_ptr,
    channels, length, programs_of_row, stride_gb, stride_gd, stride_gl, stride_xb, stride_xd, stride_xl,
    stride_pb, stride_pd, stride_pl, stride_wd, stride_ww, stride_sb, stride_sl, stride_ib, stride_id, stride_il,
    W: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SEQ: tl.constexpr, HAS_INITIAL: tl.constexpr, SILU: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """dp, unless it is dout, and this program's sums for dw and the bias's gradient, added up over rows at its end."""
    b = (tl.program_id(0) // programs_of_row).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    live = d < channels
    x_ptr += b * stride_xb
    seq_ptr += b * stride_sb
    initial_ptr += b * stride_ib
    nothing = tl.zeros((BLOCK_D, BLOCK_L), tl.float32)
    dw0, dw1, dw2, dw3, dbias = nothing, nothing, nothing, nothing, nothing
    for block in range(BLOCKS):
        first = ((tl.program_id(0) % programs_of_row) * BLOCKS + block) * BLOCK_L
        row = (first + tl.arange(0, BLOCK_L)).to(tl.int64)
        p = tl.zeros((BLOCK_D, BLOCK_L), tl.float32)
        if HAS_BIAS:
            p += tl.load(bias_ptr + d, mask=live, other=0.0).to(tl.float32)[:, None]
        visible = row < length
        taps = ()                                                                          # inputs, newest first
        for i in tl.static_range(W):
            if i > 0:
                visible = visible & _joined(seq_ptr, row - i + 1, length, stride_sl, HAS_SEQ)
            x = _inputs(
                x_ptr, initial_ptr, d, row - i, live, visible, length, stride_xd, stride_xl, stride_id, stride_il, W,
                HAS_INITIAL,
            )  # fmt: skip
            weight = tl.load(weight_ptr + d * stride_wd + (W - 1 - i) * stride_ww, mask=live, other=0.0)
            p += weight.to(tl.float32)[:, None] * x
            taps += (x,)
        inside = live[:, None] & (row < length)[None, :]
        cell = dout_ptr + b * stride_gb + d[:, None] * stride_gd + row[None, :] * stride_gl
        dp = tl.load(cell, mask=inside, other=0.0).to(tl.float32)
        if SILU:
            dp *= silu_slope(p)
            cell = dp_ptr + b * stride_pb + d[:, None] * stride_pd + row[None, :] * stride_pl
            tl.store(cell, dp, mask=inside)
        dbias += dp
        dw0 += dp * taps[0]
        if W > 1:
            dw1 += dp * taps[1]
        if W > 2:
            dw2 += dp * taps[2]
        if W > 3:
            dw3 += dp * taps[3]
    place = tl.program_id(0).to(tl.int64) * channels + d
    dweight_ptr += place * W + W - 1
    tl.store(dweight_ptr, tl.sum(dw0, axis=1), mask=live)
    if W > 1:
        tl.store(dweight_ptr - 1, tl.sum(dw1, axis=1), mask=live)
    if W > 2:
        tl.store(dweight_ptr - 2, tl.sum(dw2, axis=1), mask=live)
    if W > 3:
        tl.store(dweight_ptr - 3, tl.sum(dw3, axis=1), mask=live)
    if HAS_BIAS:
        tl.store(dbias_ptr + place, tl.sum(dbias, axis=1), mask=live)


@triton.jit(do_not_specialize=["length"])
def _input_gradient_kernel(
    dp_ptr, weight_ptr, seq_ptr, dx_ptr, dinitial_ptr,
    channels, length, stride_pb, stride_pd, stride_pl, stride_xb, stride_xd, stride_xl, stride_wd, stride_ww,
    stride_sb, stride_sl, W: tl.constexpr, HAS_SEQ: tl.constexpr, HAS_INITIAL: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_L: tl.constexpr,
):  # fmt: skip
    """dx, and before its first row that of the initial states, whose rows are counted from -(W-1)."""
    rows = length
    if HAS_INITIAL:
        rows += W - 1
    blocks = tl.cdiv(rows, BLOCK_L)
    b = (tl.program_id(0) // blocks).to(tl.int64)
    row = ((tl.program_id(0) % blocks) * BLOCK_L + tl.arange(0, BLOCK_L)).to(tl.int64)
    if HAS_INITIAL:
        row -= W - 1
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    live = d < channels
    dx = tl.zeros((BLOCK_D, BLOCK_L), tl.float32)
    visible = row < length
    for i in tl.static_range(W):
        later = row + i
        if i > 0:
            visible = visible & _joined(seq_ptr + b * stride_sb, later, length, stride_sl, HAS_SEQ)
        known = live[:, None] & (visible & (later >= 0) & (later < length))[None, :]
        cell = dp_ptr + b * stride_pb + d[:, None] * stride_pd + later[None, :] * stride_pl
        weight = tl.load(weight_ptr + d * stride_wd + (W - 1 - i) * stride_ww, mask=live, other=0.0)
        dx += weight.to(tl.float32)[:, None] * tl.load(cell, mask=known, other=0.0).to(tl.float32)
    cell = dx_ptr + b * stride_xb + d[:, None] * stride_xd + row[None, :] * stride_xl
    tl.store(cell, dx.to(dx_ptr.dtype.element_ty), mask=live[:, None] & ((row >= 0) & (row < length))[None, :])
    if HAS_INITIAL:
        cell = dinitial_ptr + (b * channels + d)[:, None] * (W - 1) + (row + W - 1)[None, :]
        tl.store(cell, dx.to(dinitial_ptr.dtype.element_ty), mask=live[:, None] & (row < 0)[None, :])


def _strides(tensor: Tensor | None, count: int) -> tuple[int, ...]:
    return (0,) * count if tensor is None else tensor.stride()


def _tile(x: Tensor, channels_last: tuple[int, int]) -> tuple[int, int]:
    """BLOCK_D and BLOCK_L."""
    most_d, most_l = channels_last if x.stride(1) == 1 else CHANNELS_FIRST
    return min(most_d, next_power_of_two(x.shape[1])), min(most_l, next_power_of_two(x.shape[2]))


def _launch_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor | None, initial_states: Tensor | None, silu: bool
) -> Tensor:
    out = torch.empty_like(x)
    if out.numel() == 0:
        return out
    batch, channels, length = x.shape
    block_d, block_l = _tile(x, CHANNELS_LAST)
    _forward_kernel[(batch * ceil_div(length, block_l), ceil_div(channels, block_d))](
        x, weight, None if bias is None else bias.contiguous(), x if seq_idx is None else seq_idx,
        x if initial_states is None else initial_states, out,
        channels, length, *x.stride(), *out.stride(), *weight.stride(), *_strides(seq_idx, 2),
        *_strides(initial_states, 3),
        W=weight.shape[1], HAS_BIAS=bias is not None, HAS_SEQ=seq_idx is not None,
        HAS_INITIAL=initial_states is not None, SILU=silu, BLOCK_D=block_d, BLOCK_L=block_l, num_warps=4,
    )  # fmt: skip
    return out


def _launch_backward(
    dout: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor | None,
    initial_states: Tensor | None, silu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dx, dweight, dbias, dinitial = _fake_backward(dout, x, weight, bias, seq_idx, initial_states, silu)
    if x.numel() == 0:
        return dx, dweight.zero_(), dbias.zero_(), dinitial.zero_()
    batch, channels, length = x.shape
    width = weight.shape[1]
    block_d, block_l = _tile(x, CHANNELS_LAST_SUMS)
    blocks, grid_d = ceil_div(length, block_l), ceil_div(channels, block_d)
    of_program = min(next_power_of_two(blocks), next_power_of_two(ceil_div(batch * blocks * grid_d, PROGRAMS)))
    of_row = ceil_div(blocks, of_program)
    dp = torch.empty_like(x, dtype=torch.float32) if silu else dout
    sums = torch.empty((batch * of_row, channels, width), dtype=torch.float32, device=x.device)
    bias_sums = sums if bias is None else torch.empty(sums.shape[:2], dtype=torch.float32, device=x.device)
    seq = x if seq_idx is None else seq_idx
    _weight_gradient_kernel[(batch * of_row, grid_d)](
        dout, x, weight, None if bias is None else bias.contiguous(), seq,
        x if initial_states is None else initial_states, dp, sums, bias_sums,
        channels, length, of_row, *dout.stride(), *x.stride(), *dp.stride(), *weight.stride(), *_strides(seq_idx, 2),
        *_strides(initial_states, 3),
        W=width, HAS_BIAS=bias is not None, HAS_SEQ=seq_idx is not None, HAS_INITIAL=initial_states is not None,
        SILU=silu, BLOCKS=of_program, BLOCK_D=block_d, BLOCK_L=block_l, num_warps=4,
    )  # fmt: skip
    rows = length + (0 if initial_states is None else width - 1)
    block_d, block_l = _tile(x, CHANNELS_LAST)
    _input_gradient_kernel[(batch * ceil_div(rows, block_l), ceil_div(channels, block_d))](
        dp, weight, seq, dx, dinitial,
        channels, length, *dp.stride(), *dx.stride(), *weight.stride(), *_strides(seq_idx, 2),
        W=width, HAS_SEQ=seq_idx is not None, HAS_INITIAL=initial_states is not None, BLOCK_D=block_d, BLOCK_L=block_l,
        num_warps=4,
    )  # fmt: skip
    add_programs(sums.unsqueeze(0), dweight)
    if bias is not None:
        add_programs(bias_sums.unsqueeze(0), dbias)
    return dx, dweight, dbias, dinitial


def _fake_backward(dout, x, weight, bias, seq_idx, initial_states, silu):
    def like(tensor: Tensor | None) -> Tensor:
        if tensor is None:
            return torch.empty((0,), dtype=x.dtype, device=x.device)
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=x.device)

    return torch.empty_like(x), like(weight), like(bias), like(initial_states)


run_conv = define(
    "causal_conv1d(Tensor x, Tensor weight, Tensor? bias, Tensor? seq_idx, Tensor? initial_states, bool silu)"
    " -> Tensor",
    _launch_forward,
    lambda x, *others: torch.empty_like(x),
)
_run_backward = define(
    "causal_conv1d_backward(Tensor dout, Tensor x, Tensor weight, Tensor? bias, Tensor? seq_idx,"
    " Tensor? initial_states, bool silu) -> (Tensor, Tensor, Tensor, Tensor)",
    _launch_backward,
    _fake_backward,
)


def _setup_context(ctx, inputs, output) -> None:
    *tensors, ctx.silu = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, dout):
    x, weight, bias, seq_idx, initial_states = ctx.saved_tensors
    dx, dweight, dbias, dinitial = _run_backward(dout, x, weight, bias, seq_idx, initial_states, ctx.silu)
    return dx, dweight, None if bias is None else dbias, None, None if initial_states is None else dinitial, None


differentiate("causal_conv1d", _backward, _setup_context)


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor | None, initial_states: Tensor | None,
    return_final_states: bool, activation: str | None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """`mamba_ssm.ops.causal_conv1d.causal_conv1d_fn` on the triton tier, or by the package where that is faster."""
    reason = None
    if accumulate_dtype(x, weight, bias, initial_states) == torch.float64:
        reason = "the kernels take no float64"
    elif not 1 <= weight.shape[1] <= MAX_WIDTH:
        reason = f"the kernels take widths up to {MAX_WIDTH}"
    if reason is not None:
        run = reference_instead("causal_conv1d", x.device, reason)
        return run(x, weight, bias, seq_idx, initial_states, return_final_states, activation)
    package_takes = conv1d_package.INSTALLED and conv1d_package.takes(
        x, weight, seq_idx, initial_states, return_final_states
    )
    if package_takes and conv1d_package.is_faster(_plain_conv, x, weight, bias, activation):
        return conv1d_package.run(x, weight, bias, activation)
    entering = initial_states if weight.shape[1] > 1 else None
    out = run_conv(x, weight, bias, seq_idx, entering, activation is not None)
    if not return_final_states:
        return out
    return out, causal_conv1d_window(x, weight.shape[1] - 1, seq_idx, initial_states)


def _plain_conv(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    return run_conv(x, weight, bias, None, None, activation is not None)


@triton.jit
def convolve_one(
    x, channel, live, window_ptr, weight_ptr, bias_ptr,
    stride_wd, stride_ww, STRIDE_D: tl.constexpr, STRIDE_S: tl.constexpr, W: tl.constexpr, S: tl.constexpr,
    BLOCK_S: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Channels' newest inputs x (D) enter their windows (D, S).   -> the convolution's newest row (D); the new windows
    (D, S), where they go, and which are real: the caller stores them behind a barrier, for the shift reads cells that
    other threads write."""
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
    return out, window, cell, live[:, None] & (k < S)[None, :]


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
    out, window, cell, inside = convolve_one(
        x, channel, live, window_ptr + row * stride_sb, weight_ptr, bias_ptr, stride_wd, stride_ww, STRIDE_D, STRIDE_S,
        W, S, BLOCK_S, HAS_BIAS,
    )  # fmt: skip
    if SILU:
        out = silu(out)
    tl.debug_barrier()
    tl.store(cell, window.to(window_ptr.dtype.element_ty), mask=inside)
    tl.store(out_ptr + row * channels + channel, out.to(out_ptr.dtype.element_ty), mask=live)


def _launch_update(x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    batch, channels = x.shape
    out = torch.empty((batch, channels), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    block = min(UPDATE_BLOCK, next_power_of_two(channels))
    window, width = conv_state.shape[2], weight.shape[1]
    _update_kernel[(batch, ceil_div(channels, block))](
        x, conv_state, weight, None if bias is None else bias.contiguous(), out,
        channels, *x.stride(), conv_state.stride(0), *weight.stride(),
        STRIDE_D=conv_state.stride(1), STRIDE_S=conv_state.stride(2), W=width, S=window,
        BLOCK_S=next_power_of_two(max(window, 1)), HAS_BIAS=bias is not None, SILU=silu, BLOCK_D=block,
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
    wanted = is_differentiated((x, conv_state, weight, bias))
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

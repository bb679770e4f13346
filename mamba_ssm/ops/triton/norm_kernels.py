"""Kernels of all norms: LayerNorm and RMSNorm, with a residual stream, a gate, groups, a SiLU behind them, and the bias
of a linear layer before them (`shift`).

    s = x + shift + residual,   u = s · silu(z) if the gate comes first, else s,   n = (u - mean) / std
    p = n · w + b,   out = p · silu(z) if the gate comes last, silu(p) if asked, else p

    g = dp,   dw = Σ g n,   db = Σ g,   dshift = Σ ds
    du = (w g - n ⟨n, w g⟩ - ⟨w g⟩) / std   (⟨⟩: mean over the group, RMS: only one)

Statistics and sums are in float32. Rows are summed in a fixed order: each program sums its own, then their sums are.

A block is M rows of S strips of C channels: where a warp can hold a row, no two warps share one, and the sums over
its channels need no barrier.

Letters: M rows, G groups of D channels each, in S strips of C; x, z, residual, out (M, G · D).
"""

import torch
import triton
import triton.language as tl

from mamba_ssm.ops.numerics import accumulate_dtype
from mamba_ssm.ops.tiers import reference_instead
from mamba_ssm.ops.triton.jit_math import silu, silu_slope
from mamba_ssm.ops.triton.launch import ceil_div, define, differentiate, next_power_of_two
from mamba_ssm.ops.triton.sum_kernels import add_programs

Tensor = torch.Tensor

MAX_CHANNELS = 16384                   # of a group: what the registers of one program hold
TILE = 2048                            # elements of one block where rows are shorter, so 16 in each of 128 threads
STRIP = 256                            # channels that the threads of a warp read at once, 16 bytes each in bfloat16
STAGES = 3                             # blocks of a program of the backward pass that shared memory holds
PROGRAMS = 264                         # of the backward pass for each group: two for each multiprocessor of an H200
LEAST_BLOCKS = 4                       # of a program of the backward pass
NO_GATE, GATE_FIRST, GATE_LAST = range(3)


@triton.jit
def _columns(D: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr):
    """The group's channels (S, C) and which there are"""
    d = tl.arange(0, BLOCK_S)[:, None] * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    return tl.program_id(1) * D + d, d < D


@triton.jit
def _tile(ptr, row, column, stride, inside):
    cell = ptr + row.to(tl.int64)[:, None, None] * stride + column[None, :, :]
    return tl.load(cell, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _put(ptr, row, column, stride, inside, value):
    cell = ptr + row.to(tl.int64)[:, None, None] * stride + column[None, :, :]
    tl.store(cell, value.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def _row_sum(x):
    """(M, S, C) -> (M, 1, 1)"""
    return tl.sum(tl.sum(x, axis=1, keep_dims=True), axis=2, keep_dims=True)


@triton.jit
def _affine(weight_ptr, bias_ptr, column, live, FROM_ONE: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Weight and bias (1, S, C)."""
    weight = tl.load(weight_ptr + column, mask=live, other=0.0).to(tl.float32)
    if FROM_ONE:
        weight += 1.0
    bias = tl.zeros_like(weight)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + column, mask=live, other=0.0).to(tl.float32)
    return weight[None, :, :], bias[None, :, :]


@triton.jit
def _stream(
    x_ptr, residual_ptr, shift_ptr, row, column, live, stride_x, stride_r, inside,
    HAS_RESIDUAL: tl.constexpr, HAS_SHIFT: tl.constexpr,
):  # fmt: skip
    """x + shift + residual (M, S, C); outside it is not 0 with a shift"""
    x = _tile(x_ptr, row, column, stride_x, inside)
    if HAS_SHIFT:
        x += tl.load(shift_ptr + column, mask=live, other=0.0).to(tl.float32)[None, :, :]
    if HAS_RESIDUAL:
        x += _tile(residual_ptr, row, column, stride_r, inside)
    return x


@triton.jit(do_not_specialize=["rows"])
def _norm_forward_kernel(
    x_ptr, weight_ptr, bias_ptr, residual_ptr, z_ptr, shift_ptr, out_ptr, stream_ptr, stats_ptr,
    rows, stride_x, stride_r, stride_z, eps,
    G: tl.constexpr, D: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_SHIFT: tl.constexpr,
    KEEP: tl.constexpr, GATE: tl.constexpr, RMS: tl.constexpr, FROM_ONE: tl.constexpr, SILU: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1)
    column, live = _columns(D, BLOCK_S, BLOCK_C)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = (row < rows)[:, None, None] & live[None, :, :]                                # (M, S, C)
    x = _stream(
        x_ptr, residual_ptr, shift_ptr, row, column, live, stride_x, stride_r, inside, HAS_RESIDUAL, HAS_SHIFT
    )
    if KEEP:
        _put(stream_ptr, row, column, G * D, inside, x)
    if GATE != 0:
        gate = silu(_tile(z_ptr, row, column, stride_z, inside))
    if GATE == 1:                                                                          # GATE_FIRST
        x *= gate
    at, is_row = (row * G + group)[:, None, None], (row < rows)[:, None, None]
    if not RMS:
        mean = _row_sum(x) / D
        tl.store(stats_ptr + rows * G + at, mean, mask=is_row)
        x = tl.where(inside, x - mean, 0.0)
    scale = tl.rsqrt(_row_sum(x * x) / D + eps)
    tl.store(stats_ptr + at, scale, mask=is_row)
    weight, bias = _affine(weight_ptr, bias_ptr, column, live, FROM_ONE, HAS_BIAS)
    out = x * scale * weight + bias
    if GATE == 2:                                                                          # GATE_LAST
        out *= gate
    if SILU:
        out = silu(out)
    _put(out_ptr, row, column, G * D, inside, out)


@triton.jit(do_not_specialize=["rows", "blocks"])
def _norm_backward_kernel(
    dout_ptr, dstream_ptr, x_ptr, weight_ptr, bias_ptr, residual_ptr, z_ptr, shift_ptr, stats_ptr,
    dx_ptr, dresidual_ptr, dz_ptr, sums_ptr,
    rows, blocks, stride_do, stride_ds, stride_x, stride_r, stride_z,
    G: tl.constexpr, D: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_SHIFT: tl.constexpr,
    HAS_DSTREAM: tl.constexpr, SPLIT: tl.constexpr, GATE: tl.constexpr, RMS: tl.constexpr, FROM_ONE: tl.constexpr,
    SILU: tl.constexpr, STAGES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1)
    column, live = _columns(D, BLOCK_S, BLOCK_C)
    weight, bias = _affine(weight_ptr, bias_ptr, column, live, FROM_ONE, HAS_BIAS)
    dweight = tl.zeros((BLOCK_M, BLOCK_S, BLOCK_C), tl.float32)
    dbias = tl.zeros((BLOCK_M, BLOCK_S, BLOCK_C), tl.float32)
    dshift = tl.zeros((BLOCK_M, BLOCK_S, BLOCK_C), tl.float32)
    start = tl.program_id(0) * blocks
    for block in tl.range(start, start + blocks, num_stages=STAGES):  # which fetches blocks ahead
        row = block * BLOCK_M + tl.arange(0, BLOCK_M)
        inside = (row < rows)[:, None, None] & live[None, :, :]
        x = _stream(
            x_ptr, residual_ptr, shift_ptr, row, column, live, stride_x, stride_r, inside, HAS_RESIDUAL, HAS_SHIFT
        )
        g = _tile(dout_ptr, row, column, stride_do, inside)
        normed = x
        if GATE != 0:
            z = _tile(z_ptr, row, column, stride_z, inside)
        if GATE == 1:
            normed = x * silu(z)
        at, is_row = (row * G + group)[:, None, None], (row < rows)[:, None, None]
        scale = tl.load(stats_ptr + at, mask=is_row, other=0.0)                            # 0 outside
        if not RMS:
            normed -= tl.load(stats_ptr + rows * G + at, mask=is_row, other=0.0)
            normed = tl.where(live[None, :, :], normed, 0.0)
        normed *= scale
        if GATE == 2:
            _put(dz_ptr, row, column, G * D, inside, g * (normed * weight + bias) * silu_slope(z))
            g *= silu(z)
        if SILU:
            g *= silu_slope(normed * weight + bias)
        dweight += g * normed
        if HAS_BIAS:
            dbias += g
        g *= weight
        du = g - normed * (_row_sum(g * normed) / D)
        if not RMS:
            du -= _row_sum(g) / D
        du *= scale
        if GATE == 1:
            _put(dz_ptr, row, column, G * D, inside, du * x * silu_slope(z))
            du *= silu(z)
        if HAS_DSTREAM:
            du += _tile(dstream_ptr, row, column, stride_ds, inside)
        if HAS_SHIFT:
            dshift += du
        _put(dx_ptr, row, column, G * D, inside, du)
        if SPLIT:
            _put(dresidual_ptr, row, column, G * D, inside, du)
    # Each row of the block leaves its own: to add those of other warps first takes longer than all the rest (H200,
    # 17,408 rows of 512 bfloat16 channels: 29.8 us instead of 22.3).
    place = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64) * (G * D)
    cell, is_live = sums_ptr + place[:, None, None] + column[None, :, :], live[None, :, :]
    next_sums = tl.num_programs(0).to(tl.int64) * (BLOCK_M * G * D)
    tl.store(cell, dweight, mask=is_live)
    if HAS_BIAS:
        cell += next_sums
        tl.store(cell, dbias, mask=is_live)
    if HAS_SHIFT:
        tl.store(cell + next_sums, dshift, mask=is_live)


def _blocks(channels: int) -> dict[str, int]:
    """Rows, strips and channels of a strip of one block, and the warps that hold it."""
    block_d = next_power_of_two(channels)
    block_m, block_c = max(1, min(16, TILE // block_d)), min(STRIP, block_d)
    warps = max(1, min(16, block_m * block_d // 512))
    return {"BLOCK_M": block_m, "BLOCK_S": block_d // block_c, "BLOCK_C": block_c, "num_warps": warps}


def _dense_rows(tensor: Tensor | None) -> Tensor | None:
    """(M, C) with channels side by side; the rows may be apart."""
    return tensor if tensor is None or tensor.stride(1) == 1 or tensor.shape[1] == 1 else tensor.contiguous()


def _dense(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _stride(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.stride(0)


def _launch_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, z: Tensor | None, shift: Tensor | None,
    eps: float, groups: int, rms: bool, from_one: bool, silu: bool, gate: int, stream_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    out, stream, stats = _fake_forward(
        x, weight, bias, residual, z, shift, eps, groups, rms, from_one, silu, gate, stream_dtype
    )
    rows, channels = x.shape[0], x.shape[1] // groups
    if rows == 0:
        return out, stream, stats
    x, residual, z = _dense_rows(x), _dense_rows(residual), _dense_rows(z)
    blocks = _blocks(channels)
    _norm_forward_kernel[(ceil_div(rows, blocks["BLOCK_M"]), groups)](
        x, weight.contiguous(), _dense(bias), residual, z, _dense(shift), out, stream, stats,
        rows, _stride(x), _stride(residual), _stride(z), eps,
        G=groups, D=channels, HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None,
        HAS_SHIFT=shift is not None, KEEP=stream_dtype is not None, GATE=gate, RMS=rms, FROM_ONE=from_one, SILU=silu,
        **blocks,
    )  # fmt: skip
    return out, stream, stats


def _fake_forward(x, weight, bias, residual, z, shift, eps, groups, rms, from_one, silu, gate, stream_dtype):
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    kept = x.shape if stream_dtype is not None else (0,)
    stream = torch.empty(kept, dtype=stream_dtype if stream_dtype is not None else x.dtype, device=x.device)
    stats = torch.empty((1 if rms else 2, x.shape[0], groups), dtype=torch.float32, device=x.device)
    return out, stream, stats


def _launch_backward(
    dout: Tensor, dstream: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None,
    z: Tensor | None, shift: Tensor | None, stats: Tensor, groups: int, rms: bool, from_one: bool, silu: bool,
    gate: int, x_dtype: torch.dtype, residual_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dx, dresidual, dz, *affine = _fake_backward(
        dout, dstream, x, weight, bias, residual, z, shift, stats, groups, rms, from_one, silu, gate, x_dtype,
        residual_dtype,
    )  # fmt: skip
    rows, channels = x.shape[0], x.shape[1] // groups
    if rows == 0:
        return dx, dresidual, dz, *(grad.zero_() for grad in affine)
    blocks = _blocks(channels)
    of_program = max(LEAST_BLOCKS, ceil_div(rows, PROGRAMS * blocks["BLOCK_M"]))
    programs = ceil_div(rows, of_program * blocks["BLOCK_M"])
    wanted = [grad for grad in affine if len(grad)]
    sums = torch.empty((len(wanted), programs * blocks["BLOCK_M"], x.shape[1]), dtype=torch.float32, device=x.device)
    dout, dstream, x, residual, z = (_dense_rows(tensor) for tensor in (dout, dstream, x, residual, z))
    _norm_backward_kernel[(programs, groups)](
        dout, dstream, x, weight.contiguous(), _dense(bias), residual, z, _dense(shift), stats, dx, dresidual, dz, sums,
        rows, of_program, _stride(dout), _stride(dstream), _stride(x), _stride(residual), _stride(z),
        G=groups, D=channels, HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None,
        HAS_SHIFT=shift is not None, HAS_DSTREAM=dstream is not None, SPLIT=residual_dtype is not None, GATE=gate,
        RMS=rms, FROM_ONE=from_one, SILU=silu,
        STAGES=STAGES if next_power_of_two(channels) <= TILE else 1, **blocks,
    )  # fmt: skip
    add_programs(sums, *wanted)
    return dx, dresidual, dz, *affine


def _fake_backward(
    dout, dstream, x, weight, bias, residual, z, shift, stats, groups, rms, from_one, silu, gate, x_dtype,
    residual_dtype,
):  # fmt: skip
    def like(tensor: Tensor | None, dtype: torch.dtype | None) -> Tensor:
        shape = (0,) if tensor is None or dtype is None else tensor.shape
        return torch.empty(shape, dtype=torch.float32 if dtype is None else dtype, device=x.device)

    def like_itself(tensor: Tensor | None) -> Tensor:
        return like(tensor, None if tensor is None else tensor.dtype)

    return (
        like(x, x_dtype), like(x, residual_dtype), *(like_itself(tensor) for tensor in (z, weight, bias, shift)),
    )  # fmt: skip


run_norm = define(
    "norm(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, Tensor? z, Tensor? shift, float eps, int groups,"
    " bool rms, bool from_one, bool silu, int gate, ScalarType? stream_dtype) -> (Tensor, Tensor, Tensor)",
    _launch_forward,
    _fake_forward,
)
_run_backward = define(
    "norm_backward(Tensor dout, Tensor? dstream, Tensor x, Tensor weight, Tensor? bias, Tensor? residual, Tensor? z,"
    " Tensor? shift, Tensor stats, int groups, bool rms, bool from_one, bool silu, int gate, ScalarType x_dtype,"
    " ScalarType? residual_dtype) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _launch_backward,
    _fake_backward,
)


def _setup_context(ctx, inputs, output) -> None:
    """Saved: the stream where it is kept unrounded, else what it is the sum of."""
    x, weight, bias, residual, z, shift, _, *ctx.options, stream_dtype = inputs
    _, stream, stats = output
    ctx.set_materialize_grads(False)
    ctx.x_dtype, ctx.residual_dtype = x.dtype, None if residual is None else residual.dtype
    ctx.keeps_stream = stream_dtype is not None
    if stream_dtype == torch.float32 and shift is None:
        x, residual = stream, None
    ctx.save_for_backward(x, weight, bias, residual, z, shift, stats)


def _backward(ctx, dout, dstream, dstats):
    x, weight, bias, residual, z, shift, stats = ctx.saved_tensors
    dout = torch.zeros(x.shape, dtype=ctx.x_dtype, device=x.device) if dout is None else dout
    split = ctx.residual_dtype if ctx.residual_dtype != ctx.x_dtype else None
    dx, dresidual, dz, dweight, dbias, dshift = _run_backward(
        dout, dstream if ctx.keeps_stream else None, x, weight, bias, residual, z, shift, stats, *ctx.options,
        ctx.x_dtype, split,
    )  # fmt: skip
    if ctx.residual_dtype is None:
        dresidual = None
    elif split is None:
        dresidual = dx
    return (
        dx, dweight, None if bias is None else dbias, dresidual, None if z is None else dz,
        None if shift is None else dshift, None, *[None] * len(ctx.options), None,
    )  # fmt: skip


differentiate("norm", _backward, _setup_context)


def layer_norm(
    x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale, prenorm, residual_in_fp32,
    zero_centered_weight, is_rms_norm, activation=None, shift=None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """`layer_norm_fn` on the triton tier."""
    reason = _why_not(x, x.shape[-1], weight, bias, residual, shift)
    if reason is None and (x1 is not None or weight1 is not None or rowscale is not None or dropout_p > 0.0):
        reason = "the kernels take no x1, weight1, rowscale or dropout"
    if reason is not None:
        return reference_instead("layer_norm", x.device, reason)(
            x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale, prenorm, residual_in_fp32,
            zero_centered_weight, is_rms_norm, activation, shift,
        )  # fmt: skip
    kept = None
    if prenorm:
        kept = torch.float32 if residual_in_fp32 else (x if residual is None else residual).dtype
    rows = (-1, x.shape[-1])
    out, stream, _ = run_norm(
        x.reshape(rows), weight, bias, None if residual is None else residual.reshape(rows), None, shift, eps, 1,
        is_rms_norm, zero_centered_weight, activation is not None, NO_GATE, kept,
    )  # fmt: skip
    return (out.view(x.shape), stream.view(x.shape)) if prenorm else out.view(x.shape)


def gated_norm(x, weight, bias, z, eps, group_size, norm_before_gate, is_rms_norm) -> Tensor:
    """`layernorm_fn` of `layernorm_gated` on the triton tier."""
    channels = x.shape[-1]
    group_size = channels if group_size is None else group_size
    if (reason := _why_not(x, group_size, weight, bias, z)) is not None:
        run = reference_instead("layernorm_gated", x.device, reason)
        return run(x, weight, bias, z, eps, group_size, norm_before_gate, is_rms_norm)
    gate = NO_GATE if z is None else GATE_LAST if norm_before_gate else GATE_FIRST
    rows = (-1, channels)
    out, *_ = run_norm(
        x.reshape(rows), weight, bias, None, None if z is None else z.reshape(rows), None, eps, channels // group_size,
        is_rms_norm, False, False, gate, None,
    )  # fmt: skip
    return out.view(x.shape)


def _why_not(x: Tensor, channels: int, *others: Tensor | None) -> str | None:
    if accumulate_dtype(x, *others) == torch.float64:
        return "the kernels take no float64"
    if not 1 <= channels <= MAX_CHANNELS:
        return f"the kernels take 1 to {MAX_CHANNELS} channels"
    return None

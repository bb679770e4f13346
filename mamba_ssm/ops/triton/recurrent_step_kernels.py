"""Kernels of `recurrent_step`; the mathematics stands there.

Mamba-2's step is one kernel, a program for each group of each batch row, since the norm runs over a group's channels:
it reads and writes that group's states once, block by block, and norms its outputs when all are there.
Mamba's step is two kernels around its two small projections.

Letters: B batch, H heads, P headdim, G groups, C channels of a group (H · P / G), N state size, W convolution width,
S length of its rolling window.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from mamba_ssm.ops.causal_conv1d import causal_conv1d_update
from mamba_ssm.ops.checks import is_differentiated
from mamba_ssm.ops.numerics import accumulate_dtype
from mamba_ssm.ops.tiers import reference_instead
from mamba_ssm.ops.triton.causal_conv1d_kernels import convolve_one
from mamba_ssm.ops.triton.jit_math import silu, softplus
from mamba_ssm.ops.triton.launch import ceil_div, define, next_power_of_two
from mamba_ssm.ops.triton.selective_state_update_kernels import run_state_update
from mamba_ssm.ops.triton.tuning import tuned

Tensor = torch.Tensor

# Elements of the state in registers at once, warps, registers of a thread. On an H200 in a graph, 1024 channels, N 16:
# B1024 0.052 ms, without the bound on registers 0.054; a lone program takes all at once: B1 0.0053 ms, 0.0066 in
# smaller blocks.
SHARED, LONE = (4096, 8, 64), (16384, 8, None)
OTHERS = [(2048, 4, 64), (4096, 4, None), (4096, 8, None), (8192, 8, 80), (8192, 8, None), (16384, 16, None)]
MANY_PROGRAMS = 128
MOST_KEPT = 8                          # blocks whose outputs wait in registers, unrolled
NO_NORM, GATE_FIRST, NORM_FIRST = range(3)


@triton.jit
def load_float(ptr, index, live):
    """Numbers as float32, 0 where there is none."""
    return tl.load(ptr + index, mask=live, other=0.0).to(tl.float32)


@triton.jit
def _move_on(
    inner, B, C, group, zxbcdt_ptr, conv_state_ptr, ssm_state_ptr, conv_weight_ptr, conv_bias_ptr, dt_bias_ptr,
    A_log_ptr, D_ptr, stride_wd, stride_ww, dt_min, dt_max,
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr, W: tl.constexpr, S: tl.constexpr,
    HAS_BIAS: tl.constexpr, D_OF_CHANNEL: tl.constexpr, LIMITED: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Channels `inner` (C) of a group: their windows and states move on by one row.   -> y (C), not gated or normed

    The states of all are read before any are written: other threads may hold the same cells, or write what a window's
    shift reads."""
    CHANNELS: tl.constexpr = H * P // G
    n = tl.arange(0, BLOCK_N)
    live = inner < CHANNELS
    channel = group * CHANNELS + inner
    head = channel // P
    inside = live[:, None] & (n < N)[None, :]
    x = load_float(zxbcdt_ptr + H * P, channel, live)
    x, window, window_cell, moving = convolve_one(
        x, channel, live, conv_state_ptr, conv_weight_ptr, conv_bias_ptr, stride_wd, stride_ww, S, 1, W, S, BLOCK_S,
        HAS_BIAS,
    )  # fmt: skip
    cell = ssm_state_ptr + channel[:, None] * N + n[None, :]                               # (C, N)
    state = tl.load(cell, mask=inside, other=0.0).to(tl.float32)
    x = silu(x)
    dt = softplus(load_float(zxbcdt_ptr + 2 * H * P + 2 * G * N, head, live) + load_float(dt_bias_ptr, head, live))
    if LIMITED:
        dt = tl.minimum(tl.maximum(dt, dt_min), dt_max)
    decay = tl.exp(-dt * tl.exp(load_float(A_log_ptr, head, live)))
    if D_OF_CHANNEL:
        skip = x * load_float(D_ptr, channel, live)
    else:
        skip = x * load_float(D_ptr, head, live)
    state = decay[:, None] * state + (dt * x)[:, None] * B
    y = tl.sum(state * C, axis=1) + skip
    tl.debug_barrier()
    tl.store(window_cell, window.to(conv_state_ptr.dtype.element_ty), mask=moving)
    tl.store(cell, state.to(ssm_state_ptr.dtype.element_ty), mask=inside)
    return y


@triton.jit
def _finish(
    y, scale, inner, group, zxbcdt_ptr, norm_weight_ptr, out_ptr, CHANNELS: tl.constexpr, NORM: tl.constexpr
):
    """y (C), gated already if the gate comes before the norm, is normed, gated otherwise, and written."""
    live = inner < CHANNELS
    channel = group * CHANNELS + inner
    if NORM != 0:
        y *= scale * load_float(norm_weight_ptr, channel, live)
    if NORM != 1:
        y *= silu(load_float(zxbcdt_ptr, channel, live))
    tl.store(out_ptr + channel, y.to(out_ptr.dtype.element_ty), mask=live)


@triton.jit
def _mamba2_step_kernel(
    zxbcdt_ptr, conv_state_ptr, ssm_state_ptr, conv_weight_ptr, conv_bias_ptr, dt_bias_ptr, A_log_ptr, D_ptr,
    norm_weight_ptr, out_ptr, ungated_ptr,
    stride_row, stride_conv, stride_ssm, stride_wd, stride_ww, eps, dt_min, dt_max,
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr, W: tl.constexpr, S: tl.constexpr,
    HAS_BIAS: tl.constexpr, D_OF_CHANNEL: tl.constexpr, LIMITED: tl.constexpr, NORM: tl.constexpr,
    KEPT: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """KEPT: outputs of so many blocks, which are all, wait for the norm in registers; 0: they wait in `ungated`."""
    CHANNELS: tl.constexpr = H * P // G
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    zxbcdt_ptr += row * stride_row
    conv_state_ptr += row * stride_conv
    ssm_state_ptr += row * stride_ssm
    out_ptr += row * (H * P)
    n = tl.arange(0, BLOCK_N)
    b_channel = H * P + group * N + n
    c_channel = b_channel + G * N
    B = load_float(zxbcdt_ptr + H * P, b_channel, n < N)
    C = load_float(zxbcdt_ptr + H * P, c_channel, n < N)
    B, b_window, b_cell, b_moving = convolve_one(
        B, b_channel, n < N, conv_state_ptr, conv_weight_ptr, conv_bias_ptr, stride_wd, stride_ww, S, 1, W, S, BLOCK_S,
        HAS_BIAS,
    )  # fmt: skip
    C, c_window, c_cell, c_moving = convolve_one(
        C, c_channel, n < N, conv_state_ptr, conv_weight_ptr, conv_bias_ptr, stride_wd, stride_ww, S, 1, W, S, BLOCK_S,
        HAS_BIAS,
    )  # fmt: skip
    tl.debug_barrier()                                               # cells are read by all threads, then overwritten
    tl.store(b_cell, b_window.to(conv_state_ptr.dtype.element_ty), mask=b_moving)
    tl.store(c_cell, c_window.to(conv_state_ptr.dtype.element_ty), mask=c_moving)
    B, C = silu(B)[None, :], silu(C)[None, :]                                              # (1, N)
    squares = tl.zeros((BLOCK_C,), tl.float32)
    ys = ()
    for i in tl.static_range(KEPT):
        inner = i * BLOCK_C + tl.arange(0, BLOCK_C)
        y = _move_on(
            inner, B, C, group, zxbcdt_ptr, conv_state_ptr, ssm_state_ptr, conv_weight_ptr, conv_bias_ptr, dt_bias_ptr,
            A_log_ptr, D_ptr, stride_wd, stride_ww, dt_min, dt_max, H, P, G, N, W, S, HAS_BIAS, D_OF_CHANNEL, LIMITED,
            BLOCK_N, BLOCK_S,
        )  # fmt: skip
        if NORM == 1:
            y *= silu(load_float(zxbcdt_ptr, group * CHANNELS + inner, inner < CHANNELS))
        squares += y * y
        ys += (y,)
    if KEPT == 0:
        ungated_ptr += row * (H * P) + group * CHANNELS
        for first in range(0, CHANNELS, BLOCK_C):
            inner = first + tl.arange(0, BLOCK_C)
            y = _move_on(
                inner, B, C, group, zxbcdt_ptr, conv_state_ptr, ssm_state_ptr, conv_weight_ptr, conv_bias_ptr,
                dt_bias_ptr, A_log_ptr, D_ptr, stride_wd, stride_ww, dt_min, dt_max, H, P, G, N, W, S, HAS_BIAS,
                D_OF_CHANNEL, LIMITED, BLOCK_N, BLOCK_S,
            )  # fmt: skip
            if NORM == 1:
                y *= silu(load_float(zxbcdt_ptr, group * CHANNELS + inner, inner < CHANNELS))
            squares += y * y
            tl.store(ungated_ptr + inner, y, mask=inner < CHANNELS)
        tl.debug_barrier()                                          # what this loop wrote is read by other threads
    scale = tl.rsqrt(tl.sum(squares) / CHANNELS + eps)
    for i in tl.static_range(KEPT):
        inner = i * BLOCK_C + tl.arange(0, BLOCK_C)
        _finish(ys[i], scale, inner, group, zxbcdt_ptr, norm_weight_ptr, out_ptr, CHANNELS, NORM)
    if KEPT == 0:
        for first in range(0, CHANNELS, BLOCK_C):
            inner = first + tl.arange(0, BLOCK_C)
            y = load_float(ungated_ptr, inner, inner < CHANNELS)
            _finish(y, scale, inner, group, zxbcdt_ptr, norm_weight_ptr, out_ptr, CHANNELS, NORM)


def place_of_norm(norm_weight: Tensor | None, norm_before_gate: bool) -> int:
    """`NORM` of a step's kernel."""
    return NO_NORM if norm_weight is None else NORM_FIRST if norm_before_gate else GATE_FIRST


def _blocks(chosen: tuple[int, int, int | None], channels: int, size: int) -> dict[str, int | None]:
    """Channels and states of one block, warps and registers of one program, for groups of `channels`."""
    tile, warps, registers = chosen
    block_n = next_power_of_two(size)
    block = min(next_power_of_two(channels), max(tile // block_n, 16))
    warps = max(1, min(warps, block * block_n // 128))               # four states in each thread at least
    return {"BLOCK_C": block, "BLOCK_N": block_n, "num_warps": warps, "maxnreg": registers}


def _launch_mamba2_step(
    zxbcdt: Tensor, conv_state: Tensor, ssm_state: Tensor, conv_weight: Tensor, conv_bias: Tensor | None,
    dt_bias: Tensor, A_log: Tensor, D: Tensor, norm_weight: Tensor | None, norm_eps: float, norm_before_gate: bool,
    dt_min: float, dt_max: float,
) -> Tensor:  # fmt: skip
    batch, heads, headdim, size = ssm_state.shape
    d_ssm = heads * headdim
    groups = (conv_weight.shape[0] - d_ssm) // (2 * size)
    others = (conv_weight, conv_bias, dt_bias, A_log, D, norm_weight)
    options = (groups, norm_eps, norm_before_gate, dt_min, dt_max)
    if batch == 0:
        return zxbcdt.new_empty(0, d_ssm)
    kind = (batch.bit_length(), heads, headdim, size, groups, conv_state.dtype, ssm_state.dtype, zxbcdt.dtype)
    copies = []

    def run_on_copies(blocks: tuple[int, int, int | None]) -> None:
        copies.extend(() if copies else (conv_state.clone(), ssm_state.clone()))
        _run_mamba2_step(blocks, zxbcdt, *copies, others, options)

    table = SHARED if batch * groups >= MANY_PROGRAMS else LONE
    blocks = tuned("mamba2_step", zxbcdt.device, kind, table, OTHERS, run_on_copies)
    return _run_mamba2_step(blocks, zxbcdt, conv_state, ssm_state, others, options)


def _run_mamba2_step(
    chosen: tuple[int, int, int | None], zxbcdt: Tensor, conv_state: Tensor, ssm_state: Tensor,
    others: tuple[Tensor | None, ...], options: tuple,
) -> Tensor:  # fmt: skip
    batch, heads, headdim, size = ssm_state.shape
    conv_weight, conv_bias, dt_bias, A_log, D, norm_weight = others
    groups, norm_eps, norm_before_gate, dt_min, dt_max = options
    d_ssm = heads * headdim
    out = torch.empty((batch, d_ssm), dtype=zxbcdt.dtype, device=zxbcdt.device)
    blocks = _blocks(chosen, d_ssm // groups, size)
    kept = ceil_div(d_ssm // groups, blocks["BLOCK_C"])
    kept = kept if kept <= MOST_KEPT else 0
    ungated = None if kept else torch.empty((batch, d_ssm), dtype=torch.float32, device=zxbcdt.device)
    norm = place_of_norm(norm_weight, norm_before_gate)
    _mamba2_step_kernel[(batch, groups)](
        zxbcdt, conv_state, ssm_state, conv_weight, conv_bias, dt_bias, A_log, D, norm_weight, out, ungated,
        zxbcdt.stride(0), conv_state.stride(0), ssm_state.stride(0), *conv_weight.stride(), norm_eps, dt_min, dt_max,
        H=heads, P=headdim, G=groups, N=size, W=conv_weight.shape[1], S=conv_state.shape[2],
        HAS_BIAS=conv_bias is not None, D_OF_CHANNEL=D.dim() == 2,
        LIMITED=dt_min > 0.0 or dt_max < float("inf"), NORM=norm, KEPT=kept,
        BLOCK_S=next_power_of_two(conv_state.shape[2]), **blocks,
    )  # fmt: skip
    return out


run_mamba2_step = define(
    "mamba2_step(Tensor zxbcdt, Tensor(a!) conv_state, Tensor(b!) ssm_state, Tensor conv_weight, Tensor? conv_bias,"
    " Tensor dt_bias, Tensor A_log, Tensor D, Tensor? norm_weight, float norm_eps, bool norm_before_gate,"
    " float dt_min, float dt_max) -> Tensor",
    _launch_mamba2_step,
    lambda zxbcdt, conv_state, ssm_state, *others: zxbcdt.new_empty(
        zxbcdt.shape[0], ssm_state.shape[1] * ssm_state.shape[2]
    ),
)


def mamba2_step(
    zxbcdt, conv_state, ssm_state, conv_weight, conv_bias, dt_bias, A_log, D, norm_weight, norm_eps, norm_before_gate,
    dt_limit,
) -> Tensor:  # fmt: skip
    """`mamba2_step` on the triton tier; nothing is differentiated."""
    tensors = (zxbcdt, conv_state, ssm_state, conv_weight, conv_bias, dt_bias, A_log, D, norm_weight)
    reason = _why_not(tensors)
    if reason is None and not (_rows_are_dense(conv_state) and _rows_are_dense(ssm_state) and zxbcdt.stride(1) == 1):
        reason = "the kernel takes rows without gaps"
    if reason is not None:
        run = reference_instead("mamba2_step", zxbcdt.device, reason)
        return run(*tensors, norm_eps, norm_before_gate, dt_limit)
    dense = (None if tensor is None else tensor.contiguous() for tensor in tensors[4:])
    return run_mamba2_step(*tensors[:4], *dense, norm_eps, norm_before_gate, float(dt_limit[0]), float(dt_limit[1]))


def mamba_step(
    xz, conv_state, ssm_state, conv_weight, conv_bias, x_proj_weight, dt_proj_weight, dt_bias, A_log, D
) -> Tensor:
    """`mamba_step` on the triton tier; nothing is differentiated."""
    tensors = (xz, conv_state, ssm_state, conv_weight, conv_bias, x_proj_weight, dt_proj_weight, dt_bias, A_log, D)
    if (reason := _why_not(tensors)) is not None:
        return reference_instead("mamba_step", xz.device, reason)(*tensors)
    x, z = xz.chunk(2, dim=-1)                                                            # (B, D) each
    x = causal_conv1d_update(x, conv_state, conv_weight, conv_bias, "silu")
    dt, B, C = F.linear(x, x_proj_weight).split([dt_proj_weight.shape[1], A_log.shape[1], A_log.shape[1]], dim=-1)
    dt = F.linear(dt, dt_proj_weight)
    return run_state_update(ssm_state, x, dt, A_log, B, C, D, z, dt_bias, True, None, True)


def _why_not(tensors: tuple[Tensor | None, ...]) -> str | None:
    if accumulate_dtype(*tensors) == torch.float64:
        return "the kernels take no float64"
    if is_differentiated(tensors):
        return "the kernels have no gradient"
    return None


def _rows_are_dense(state: Tensor) -> bool:
    return state.shape[0] == 0 or state[0].is_contiguous()

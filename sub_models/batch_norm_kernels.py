"""Triton kernels of `fused_batch_norm`: batch norm and SiLU on rows of channels, each pass at the speed of memory.

    n = scale · x + shift,   out = n σ(n),   scale = w / √(var + eps),   shift = b - scale · mean

Rows are pixels: row r of x may lie in another place of out, where one of them holds 2×2 blocks of pixels and the other
pixels line by line. No sums are exchanged through atomics, so that results do not change from run to run.

Letters: R rows, C channels, P programs that each sum a share of the rows.
"""

import torch
import triton
import triton.language as tl

from mamba_ssm.ops.triton.jit_math import sigmoid
from mamba_ssm.ops.triton.launch import define, differentiate

Tensor = torch.Tensor

TILE = 4096  # elements that a program holds at a time
SUM_TILE = 2048  # the same of sums over rows, whose totals take registers, too
MOMENTS_PROGRAMS, GRADIENT_PROGRAMS = 1056, 660  # of sums over rows: eight and five for each multiprocessor of an H200
LEAST_TILES = 4  # that a program of a sum over rows takes
AT_ONCE = tl.constexpr(256)  # partial sums that a program adds at a time,
FEW = tl.constexpr(16)  # of so many channels


@triton.jit
def _row_of_out(row, width: tl.constexpr, MOVE: tl.constexpr):
    """Where row `row` of x lies in out. width: of x's line, in blocks or pixels; MOVE: 0 in the same place, 1 blocks to
    lines, 2 lines to blocks."""
    if MOVE == 1:
        block, pixel = row // 4, row % 4
        return (2 * (block // width) + pixel // 2) * (2 * width) + 2 * (block % width) + pixel % 2
    elif MOVE == 2:
        line, column = row // width, row % width
        block = (line // 2) * (width // 2) + column // 2
        return 4 * block + 2 * (line % 2) + column % 2
    return row


@triton.jit
def _tile(tile, rows, C: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr):
    """Rows, channels and mask of tile number `tile`."""
    row = tile * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, WIDE)
    return row, channel, (row[:, None] < rows) & (channel[None, :] < C)


@triton.jit
def _place(row, channel, C: tl.constexpr):
    """Where the numbers of a tile lie.   (ROWS), (WIDE) -> (ROWS, WIDE), 64 bits."""
    return row.to(tl.int64)[:, None] * C + channel[None, :]


@triton.jit
def _moments_kernel(
    x_ptr, partial_ptr, rows,
    C: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """partial (P, 2, C): sums of x - x_0 and of its square, x_0 the first row, which keeps large means from cancelling
    the variance."""
    channel = tl.arange(0, WIDE)
    origin = tl.load(x_ptr + channel, mask=channel < C, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, WIDE), dtype=tl.float32)
    square = tl.zeros((ROWS, WIDE), dtype=tl.float32)
    program = tl.program_id(0)
    for step in range(STEPS):
        row, channel, mask = _tile(program + step * PARTS, rows, C, ROWS, WIDE)
        x = tl.load(x_ptr + _place(row, channel, C), mask=mask, other=0.0).to(tl.float32)
        x = tl.where(mask, x - origin[None, :], 0.0)
        total += x
        square += x * x
    out = partial_ptr + program * 2 * C + channel
    tl.store(out, tl.sum(total, axis=0), mask=channel < C)
    tl.store(out + C, tl.sum(square, axis=0), mask=channel < C)


@triton.jit
def _sum_partials(partial_ptr, channel, C: tl.constexpr, PARTS: tl.constexpr):
    """partial (P, 2, C) -> its two sums over P for the channels `channel` (FEW)."""
    first = tl.zeros((AT_ONCE, FEW), dtype=tl.float32)
    second = tl.zeros((AT_ONCE, FEW), dtype=tl.float32)
    for start in range(0, PARTS, AT_ONCE):
        part = start + tl.arange(0, AT_ONCE)
        mask = (part[:, None] < PARTS) & (channel[None, :] < C)
        place = partial_ptr + part[:, None] * (2 * C) + channel[None, :]
        first += tl.load(place, mask=mask, other=0.0)
        second += tl.load(place + C, mask=mask, other=0.0)
    return tl.sum(first, axis=0), tl.sum(second, axis=0)


@triton.jit
def _finish_moments_kernel(x_ptr, partial_ptr, mean_ptr, var_ptr, rows, C: tl.constexpr, PARTS: tl.constexpr):
    """Mean and (biased) variance (C) from partial sums (P, 2, C), about x_0 unless x_ptr is None."""
    channel = tl.program_id(0) * FEW + tl.arange(0, FEW)
    origin = tl.zeros((FEW,), dtype=tl.float32)
    if x_ptr is not None:
        origin += tl.load(x_ptr + channel, mask=channel < C, other=0.0).to(tl.float32)
    total, square = _sum_partials(partial_ptr, channel, C, PARTS)
    offset = total / rows
    tl.store(mean_ptr + channel, origin + offset, mask=channel < C)
    tl.store(var_ptr + channel, tl.maximum(square / rows - offset * offset, 0.0), mask=channel < C)


@triton.jit
def _scale_and_shift(mean_ptr, var_ptr, weight_ptr, bias_ptr, channel, eps, C: tl.constexpr):
    mean = tl.load(mean_ptr + channel, mask=channel < C, other=0.0)
    var = tl.load(var_ptr + channel, mask=channel < C, other=1.0)
    weight = tl.load(weight_ptr + channel, mask=channel < C, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + channel, mask=channel < C, other=0.0).to(tl.float32)
    scale = weight * tl.rsqrt(var + eps)
    return mean, var, scale, bias - scale * mean


@triton.jit
def _apply_kernel(
    x_ptr, out_ptr, mean_ptr, var_ptr, weight_ptr, bias_ptr, rows, eps, width: tl.constexpr,
    C: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, MOVE: tl.constexpr,
):  # fmt: skip
    row, channel, mask = _tile(tl.program_id(0), rows, C, ROWS, WIDE)
    _, _, scale, shift = _scale_and_shift(mean_ptr, var_ptr, weight_ptr, bias_ptr, channel, eps, C)
    x = tl.load(x_ptr + _place(row, channel, C), mask=mask, other=0.0).to(tl.float32)
    n = x * scale[None, :] + shift[None, :]
    out = n * sigmoid(n)
    row = _row_of_out(row, width, MOVE)
    tl.store(out_ptr + _place(row, channel, C), out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _grad_of_n(x, grad, scale, shift):
    """Gradient of n from that of n σ(n)."""
    n = x * scale[None, :] + shift[None, :]
    gate = sigmoid(n)
    return grad * gate * (1.0 + n * (1.0 - gate))


@triton.jit
def _backward_sums_kernel(
    grad_ptr, x_ptr, mean_ptr, var_ptr, weight_ptr, bias_ptr, partial_ptr, rows, eps, width: tl.constexpr,
    C: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, MOVE: tl.constexpr, PARTS: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """partial (P, 2, C): sums of dn and of dn · (x - mean)."""
    channel = tl.arange(0, WIDE)
    mean, _, scale, shift = _scale_and_shift(mean_ptr, var_ptr, weight_ptr, bias_ptr, channel, eps, C)
    first = tl.zeros((ROWS, WIDE), dtype=tl.float32)
    second = tl.zeros((ROWS, WIDE), dtype=tl.float32)
    program = tl.program_id(0)
    for step in range(STEPS):
        row, channel, mask = _tile(program + step * PARTS, rows, C, ROWS, WIDE)
        x = tl.load(x_ptr + _place(row, channel, C), mask=mask, other=0.0).to(tl.float32)
        row = _row_of_out(row, width, MOVE)
        grad = tl.load(grad_ptr + _place(row, channel, C), mask=mask, other=0.0).to(tl.float32)
        dn = _grad_of_n(x, grad, scale, shift)
        first += dn
        second += dn * (x - mean[None, :])
    out = partial_ptr + program * 2 * C + channel
    tl.store(out, tl.sum(first, axis=0), mask=channel < C)
    tl.store(out + C, tl.sum(second, axis=0), mask=channel < C)


@triton.jit
def _finish_backward_kernel(
    partial_ptr, mean_ptr, var_ptr, grad_weight_ptr, grad_bias_ptr, eps, C: tl.constexpr, PARTS: tl.constexpr
):
    """From partial sums (P, 2, C) of dn and of dn · (x - mean), or of dn · x unless mean_ptr is None."""
    channel = tl.program_id(0) * FEW + tl.arange(0, FEW)
    first, second = _sum_partials(partial_ptr, channel, C, PARTS)
    if mean_ptr is not None:
        second -= first * tl.load(mean_ptr + channel, mask=channel < C, other=0.0)
    var = tl.load(var_ptr + channel, mask=channel < C, other=1.0)
    tl.store(grad_bias_ptr + channel, first, mask=channel < C)
    tl.store(grad_weight_ptr + channel, second * tl.rsqrt(var + eps), mask=channel < C)


@triton.jit
def _backward_apply_kernel(
    grad_ptr, x_ptr, mean_ptr, var_ptr, weight_ptr, bias_ptr, grad_weight_ptr, grad_bias_ptr, grad_x_ptr, rows, eps,
    width: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, MOVE: tl.constexpr,
):  # fmt: skip
    """dx = scale · (dn - mean(dn) - x̂ · mean(dn · x̂)),   x̂ = (x - mean) / √(var + eps)."""
    row, channel, mask = _tile(tl.program_id(0), rows, C, ROWS, WIDE)
    mean, var, scale, shift = _scale_and_shift(mean_ptr, var_ptr, weight_ptr, bias_ptr, channel, eps, C)
    dn_mean = tl.load(grad_bias_ptr + channel, mask=channel < C, other=0.0) / rows
    slope = scale * tl.load(grad_weight_ptr + channel, mask=channel < C, other=0.0) * (tl.rsqrt(var + eps) / rows)
    constant = mean * slope - scale * dn_mean
    x = tl.load(x_ptr + _place(row, channel, C), mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + _place(_row_of_out(row, width, MOVE), channel, C), mask=mask, other=0.0).to(tl.float32)
    dn = _grad_of_n(x, grad, scale, shift)
    dx = scale[None, :] * dn + (constant[None, :] - slope[None, :] * x)
    tl.store(grad_x_ptr + _place(row, channel, C), dx.to(grad_x_ptr.dtype.element_ty), mask=mask)


def moments(x: Tensor, channels: int) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each channel.   x (..., R', C·pixels) contiguous -> (C) twice, float32."""
    rows, tile_rows, wide = _sizes(x, channels, SUM_TILE)
    parts, steps = _shares(rows, tile_rows, MOMENTS_PROGRAMS)
    partial = torch.empty((parts, 2, channels), dtype=torch.float32, device=x.device)
    _moments_kernel[(parts,)](x, partial, rows, C=channels, ROWS=tile_rows, WIDE=wide, PARTS=parts, STEPS=steps)
    return finish_moments(partial, rows, x)


def finish_moments(partial: Tensor, rows: int, x: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each channel of R rows, from sums of them and of their squares, taken about the first
    row of x, or about zero.   partial (P, 2, C) float32 -> (C) twice, float32."""
    parts, _, channels = partial.shape
    mean, var = (torch.empty(channels, dtype=torch.float32, device=partial.device) for _ in range(2))
    _finish_moments_kernel[_few(channels)](x, partial, mean, var, rows, C=channels, PARTS=parts)
    return mean, var


def apply(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor, eps: float, width: int, move: int
) -> Tensor:
    """The normed, activated rows, flat, in the order that `move` asks for."""
    channels = weight.shape[0]
    rows, tile_rows, wide = _sizes(x, channels)
    out = torch.empty(x.numel(), dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(rows, tile_rows),)
    _apply_kernel[grid](
        x, out, mean, var, weight, bias, rows, eps, width, C=channels, ROWS=tile_rows, WIDE=wide, MOVE=move
    )
    return out


def backward(
    grad: Tensor, x: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor, eps: float, width: int, move: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x (like x), weight and bias (C) from grad, which lies as out does."""
    channels = weight.shape[0]
    rows, tile_rows, wide = _sizes(x, channels, SUM_TILE)
    parts, steps = _shares(rows, tile_rows, GRADIENT_PROGRAMS)
    partial = torch.empty((parts, 2, channels), dtype=torch.float32, device=x.device)
    _backward_sums_kernel[(parts,)](
        grad, x, mean, var, weight, bias, partial, rows, eps, width,
        C=channels, ROWS=tile_rows, WIDE=wide, MOVE=move, PARTS=parts, STEPS=steps,
    )  # fmt: skip
    return finish_backward(partial, None, grad, x, mean, var, weight, bias, eps, width, move)


def finish_backward(
    partial: Tensor,
    origin: Tensor | None,
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    width: int,
    move: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """`backward` from sums of dn and of dn · (x - mean) on, or of dn · x where origin is the mean.
    partial (P, 2, C) float32."""
    channels = weight.shape[0]
    rows, tile_rows, wide = _sizes(x, channels)
    grad_weight, grad_bias = finish_sums(partial, origin, var, weight, eps)
    grad_x = torch.empty_like(x)
    _backward_apply_kernel[(triton.cdiv(rows, tile_rows),)](
        grad, x, mean, var, weight, bias, grad_weight, grad_bias, grad_x, rows, eps, width,
        C=channels, ROWS=tile_rows, WIDE=wide, MOVE=move,
    )  # fmt: skip
    return grad_x, grad_weight, grad_bias


def finish_sums(
    partial: Tensor, origin: Tensor | None, var: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Gradients of weight and bias (C) from sums as `finish_backward` takes them."""
    parts, _, channels = partial.shape
    grad_weight, grad_bias = torch.empty_like(weight), torch.empty_like(weight)
    _finish_backward_kernel[_few(channels)](partial, origin, var, grad_weight, grad_bias, eps, C=channels, PARTS=parts)
    return grad_weight, grad_bias


def _sizes(x: Tensor, channels: int, tile: int = TILE) -> tuple[int, int, int]:
    """(R, rows of a tile, C rounded up to a power of two)."""
    wide = max(16, triton.next_power_of_2(channels))
    return x.numel() // channels, max(1, tile // wide), wide


def _shares(rows: int, tile_rows: int, programs: int) -> tuple[int, int]:
    """(P, tiles that each program sums): few programs where there is little to sum, for what they leave is summed by
    one."""
    tiles = triton.cdiv(rows, tile_rows)
    parts = min(programs, triton.cdiv(tiles, LEAST_TILES))
    return parts, triton.cdiv(tiles, parts)


def _few(channels: int) -> tuple[int]:
    """Programs that finish sums."""
    return (triton.cdiv(channels, FEW.value),)


def _run(x, mean, var, weight, bias, conv_bias, eps, width, move):
    return apply(x, mean, var, weight, bias, eps, width, move)


def _fake_moments(x, channels):
    return tuple(x.new_empty(channels, dtype=torch.float32) for _ in range(2))


def _fake_run(x, mean, var, weight, bias, conv_bias, eps, width, move):
    return x.new_empty(x.numel())


def _fake_apply(x, mean, var, weight, bias, eps, width, move):
    return x.new_empty(x.numel())


def _fake_backward(grad, x, mean, var, weight, bias, eps, width, move):
    return torch.empty_like(x), torch.empty_like(weight), torch.empty_like(bias)


def _keep(ctx, inputs, output):
    *tensors, _, ctx.eps, ctx.width, ctx.move = inputs
    ctx.save_for_backward(*tensors)


def _differentiated(ctx, grad):
    bias = ctx.saved_tensors[-1]
    grads = _backward_operator(grad.contiguous(), *ctx.saved_tensors, ctx.eps, ctx.width, ctx.move)
    grad_x, grad_weight, grad_bias = grads
    return grad_x, None, None, grad_weight, grad_bias, torch.zeros_like(bias), None, None, None


_STATISTICS = "Tensor mean, Tensor var, Tensor weight, Tensor bias"
_PLACES = "float eps, int width, int move"
moments_operator = define("batch_norm_moments(Tensor x, int channels) -> (Tensor, Tensor)", moments, _fake_moments)
# mean and var are x's own: the gradient of x knows what it moves in them
train_operator = define(
    f"batch_norm_silu(Tensor x, {_STATISTICS}, Tensor conv_bias, {_PLACES}) -> Tensor", _run, _fake_run
)
apply_operator = define(f"batch_norm_silu_apply(Tensor x, {_STATISTICS}, {_PLACES}) -> Tensor", apply, _fake_apply)
_backward_operator = define(
    f"batch_norm_silu_backward(Tensor grad, Tensor x, {_STATISTICS}, {_PLACES}) -> (Tensor, Tensor, Tensor)",
    backward,
    _fake_backward,
)
differentiate("batch_norm_silu", _differentiated, _keep)

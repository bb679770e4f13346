"""Convolutions on 2×2 blocks of pixels by kernels of the native extension (csrc/convolutions), where those beat cuDNN.

All are y = conv(x, w) of stride 1 with a 3×3 kernel of blocks, as `space_to_depth` makes them, in bfloat16. Four
shapes of the default stacks have kernels that leave out what is zero and read a frame once:

    strided      4·16 -> 32 channels at 32×32 blocks, 4·32 -> 48 at 16×16: a 5×5 convolution of stride 2
    spread       32 -> 4·16 at 32×32, 48 -> 4·32 at 16×16: a transposed 5×5 convolution of stride 2
    to colours   4·16 -> 4·3 (and 4 of zeros) at 32×32
    from colours 4·3 (and 4 of zeros) -> 4·16 at 32×32

The gradient of x is the convolution of dy with the adjoint weight, so that one of them serves it, too; the gradient of
w has kernels between 3 and 16, 16 and 32, 32 and 48 channels. The rest is cuDNN's. Beside a batch norm, kernels also
leave sums over all pixels: moments of what they put out for a norm that follows, and of a norm before, with SiLU
between, the sums that its gradient takes. On an H200, 2,048 frames, encoder and decoder forward and backward with fused
batch norm, nothing compiled: 9.81 ms with cuDNN alone, 7.23 ms so (benchmarks/results/convolutions_nvidia_h200.json).

Letters: B batch, O and C channels out and in of a convolution of blocks.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mamba_ssm.ops import _native
from mamba_ssm.ops.triton import launch
from mamba_ssm.ops.triton.launch import define, differentiate
from sub_models.fused_batch_norm import Normed

if launch.why_not() is None:
    from sub_models.batch_norm_kernels import finish_backward, finish_moments, finish_sums

SHARED_BYTES = 230_000  # that a block of threads needs, as on compute capability 9.0
WEIGHTS_ORDER = 2  # of the extension that takes weights as this module lays them
PADDED_COLOURS = 16  # channels of a block of 4·3, filled up
COLOURS = 12

Plan = tuple[str | None, str | None, str | None]  # kernels of y, of x's gradient, of w's gradient
_STRIDED, _SPREAD, _TO_COLOURS, _FROM_COLOURS = "strided", "spread", "to_colours", "from_colours"
_SUMMING = (_STRIDED, _SPREAD, _FROM_COLOURS)  # kernels that have sums for a batch norm beside them
PLANS: dict[tuple[type[nn.Module], int, int, int], tuple[int, Plan]] = {
    # layer, channels in and out, stride: side of the frame in blocks, plan; None where cuDNN is as fast
    (nn.Conv2d, 3, 16, 1): (32, (_FROM_COLOURS, None, _FROM_COLOURS)),
    (nn.Conv2d, 16, 32, 2): (32, (_STRIDED, _SPREAD, _STRIDED)),
    (nn.Conv2d, 32, 48, 2): (16, (_STRIDED, _SPREAD, _STRIDED)),
    (nn.ConvTranspose2d, 48, 32, 2): (16, (_SPREAD, _STRIDED, _STRIDED)),
    (nn.ConvTranspose2d, 32, 16, 2): (32, (_SPREAD, _STRIDED, _STRIDED)),
    (nn.ConvTranspose2d, 16, 3, 1): (32, (_TO_COLOURS, _FROM_COLOURS, _FROM_COLOURS)),
}


def plan_of(layer: nn.Conv2d | nn.ConvTranspose2d, rows: Tensor) -> Plan | None:
    """Which kernels take part in `layer` on rows (B, height, width, C) of a GPU under bfloat16 autocast; None for no
    kernel at all."""
    if not rows.is_cuda or NO_KERNELS is not None or layer.kernel_size != (5, 5) or layer.groups != 1:
        return None
    if not torch.is_autocast_enabled("cuda") or torch.get_autocast_dtype("cuda") != torch.bfloat16:
        return None
    if torch.cuda.get_device_properties(rows.device).shared_memory_per_block_optin < SHARED_BYTES:
        return None
    side, plan = PLANS.get((type(layer), layer.in_channels, layer.out_channels, layer.stride[0]), (0, None))
    return plan if tuple(rows.shape[1:3]) == (side, side) else None


class Convolved(NamedTuple):
    rows: Tensor  # (B, height, width, O), bfloat16
    moments: tuple[Tensor, Tensor] | None  # mean and biased variance of each of a pixel's channels, float32
    source: tuple[Tensor, Tensor] | None  # x and weight, whose gradient may be made behind a norm


def convolve(x: Tensor, weight: Tensor, plan: Plan, moments: bool = False, normed: Normed | None = None) -> Convolved:
    """x (B, height, width, C) with weight (O, C, 3, 3), channels filled up to multiples of 8; moments only if they are
    asked for and the plan's kernel has them.

    normed: the batch norm with SiLU that x came out of. Where the plan's kernel has the sums that its gradient takes,
    that is computed here, too, and none flows through x; nor to the convolution before, if that left it to this one.
    """
    with torch.autocast("cuda", enabled=False):
        x, weight, kernel = x.bfloat16(), weight.bfloat16(), plan[0]
        rows = None if kernel is None else ROWS[kernel](weight.detach())
        how = (*(name or "" for name in plan), moments and kernel in _SUMMING)
        if normed is not None and _has_gradient_sums(plan, normed):
            makes = plan[1] == _SPREAD and normed.source is not None  # the gradient of the convolution before, too
            source = normed.source if makes else (None, None)
            came = normed.x.detach() if makes else normed.x
            y, *found = _operator_after_norm(x.detach(), came, *normed[1:-1], weight, rows, *how, *source)
        else:
            y, *found = _operator(x, weight, rows, *how)
    leaves = plan[2] == _FROM_COLOURS and x.shape[-1] == PADDED_COLOURS and not x.requires_grad
    return Convolved(y, tuple(found) if how[-1] else None, (x, weight) if leaves else None)


def _has_gradient_sums(plan: Plan, normed: Normed) -> bool:
    """Whether x's gradient comes with the sums that a norm before takes. The kernels read what was normed as blocks,
    but line by line where that is what a convolution of stride 2 put out."""
    moves = {_STRIDED: 1, _FROM_COLOURS: 0, _SPREAD: 2 if normed.x.shape[-1] == 32 else 0}
    return plan[1] in _SUMMING and normed.move == moves[plan[1]] and normed.x.dtype == torch.bfloat16


def _run(x, weight, rows, kernel, kernel_x, kernel_w, moments):
    if moments:
        out, partial = _native_convolution(f"{kernel}_and_moments", x, rows)
        return out, *finish_moments(partial, out.numel() // partial.shape[-1])
    out = _native_convolution(kernel, x, rows) if kernel else _plain(x, weight)
    return out, *(x.new_empty(0, dtype=torch.float32) for _ in range(2))


def _fake(x, weight, rows, kernel, kernel_x, kernel_w, moments):
    channels = (weight.shape[0] if kernel == _STRIDED else weight.shape[0] // 4) if moments else 0
    return x.new_empty(*x.shape[:3], weight.shape[0]), *(x.new_empty(channels, dtype=torch.float32) for _ in range(2))


def _keep(ctx, inputs, output):
    x, weight, _, *ctx.kernels, _ = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(x, weight)


def _differentiated(ctx, grad, *_):
    grads = _gradients(grad.contiguous(), *ctx.saved_tensors, *ctx.kernels[1:], *ctx.needs_input_grad[:2])
    return *grads, None, None, None, None, None


def _gradients(grad, x, weight, kernel_x, kernel_w, wants_x, wants_weight):
    grad_x = grad_weight = None
    if wants_x and kernel_x:
        turned = adjoint(weight)
        grad_x, wants_x = _native_convolution(kernel_x, grad, ROWS[kernel_x](turned)), False
    if wants_weight and kernel_w:
        grad_weight, wants_weight = WEIGHT_GRADIENTS[kernel_w](x, grad), False
    if wants_x or wants_weight:
        plain_x, plain_weight = _plain_backward(grad, x, weight, wants_x, wants_weight)
        grad_x = plain_x if wants_x else grad_x
        grad_weight = plain_weight if wants_weight else grad_weight
    return grad_x, grad_weight


def _run_after_norm(a, x, mean, var, scale, shift, bias, eps, width, move, *convolution):
    return _run(a, *convolution[:-2])


def _fake_after_norm(a, x, mean, var, scale, shift, bias, eps, width, move, *convolution):
    return _fake(a, *convolution[:-2])


def _keep_after_norm(ctx, inputs, output):
    *tensors, ctx.eps, ctx.width, ctx.move, weight, _, _, ctx.kernel_x, ctx.kernel_w, _, rows_before, _ = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*tensors, weight, rows_before)


def _differentiated_after_norm(ctx, grad, *_):
    a, *norm, bias, weight, rows_before = ctx.saved_tensors
    places = (ctx.eps, ctx.width, ctx.move)
    grad, grad_x, grad_before = grad.contiguous(), None, None
    _, grad_weight = _gradients(grad, a, weight, "", ctx.kernel_w, False, True)
    rows = ROWS[ctx.kernel_x](adjoint(weight))
    if rows_before is None:
        grad_x, grad_scale, grad_shift = _backward_through_norm(grad, rows, *norm, *places, ctx.kernel_x)
    else:
        product, grad_scale, grad_shift = _backward_to_colours(grad, rows, *norm, ctx.eps, rows_before)
        grad_before = _from_seen_numbers(product, a.dtype)
    none = (None,) * 3
    of_norm = (grad_x, None, None, grad_scale, grad_shift, torch.zeros_like(bias))
    return None, *of_norm, *none, grad_weight, None, *none, None, None, grad_before


def _run_backward_through_norm(grad, rows, x, mean, var, scale, shift, eps, width, move, kernel_x):
    norm = (x, mean, var, scale, shift, eps)
    grad_a, partial = _native_convolution(f"{kernel_x}_and_gradients", grad, rows, *norm)
    return finish_backward(partial, mean, grad_a, *norm, width, move)


def _fake_backward_through_norm(grad, rows, x, mean, var, scale, shift, eps, width, move, kernel_x):
    return torch.empty_like(x), torch.empty_like(scale), torch.empty_like(shift)


def _run_backward_to_colours(grad, rows, x, mean, var, scale, shift, eps, rows_before):
    norm = (x, mean, var, scale, shift, eps)
    grad_a, partial = _native_convolution(f"{_SPREAD}_and_gradients", grad, rows, *norm)
    of_norm = finish_sums(partial, mean, var, scale, eps)
    kernel = torch.ops.drama_native.colour_weight_gradient_through_norm
    return kernel(grad_a, rows_before, *norm, *of_norm), *of_norm


def _fake_backward_to_colours(grad, rows, x, mean, var, scale, shift, eps, rows_before):
    product = scale.new_empty((64, 120), dtype=torch.float32)
    return product, torch.empty_like(scale), torch.empty_like(shift)


_CONVOLUTION = "Tensor weight, Tensor? rows, str kernel, str kernel_x, str kernel_w, bool moments"
_NORM = "Tensor x, Tensor mean, Tensor var, Tensor scale, Tensor shift"
_PLACES = "float eps, int width, int move"
_operator = define(f"convolution_of_blocks(Tensor x, {_CONVOLUTION}) -> (Tensor, Tensor, Tensor)", _run, _fake)
differentiate("convolution_of_blocks", _differentiated, _keep)
# a = silu(norm(x)) is taken as it is: x gets its gradient, and that of the norm's parameters is here, too
_operator_after_norm = define(
    f"convolution_after_norm(Tensor a, {_NORM}, Tensor bias, {_PLACES}, {_CONVOLUTION},"
    " Tensor? rows_before, Tensor? weight_before) -> (Tensor, Tensor, Tensor)",
    _run_after_norm,
    _fake_after_norm,
)
differentiate("convolution_after_norm", _differentiated_after_norm, _keep_after_norm)
_backward_through_norm = define(
    f"convolution_backward_through_norm(Tensor grad, Tensor rows, {_NORM}, {_PLACES}, str kernel_x)"
    " -> (Tensor, Tensor, Tensor)",
    _run_backward_through_norm,
    _fake_backward_through_norm,
)
_backward_to_colours = define(
    f"convolution_backward_to_colours(Tensor grad, Tensor rows, {_NORM}, float eps, Tensor rows_before)"
    " -> (Tensor, Tensor, Tensor)",
    _run_backward_to_colours,
    _fake_backward_to_colours,
)


def _native_convolution(kernel: str, x: Tensor, rows: Tensor, *norm: Tensor | float) -> Tensor | tuple[Tensor, Tensor]:
    """x (B, height, width, C) with the rows of weights that ROWS made of (O, C, 3, 3) -> (B, height, width, O), and of
    a kernel with sums those of P blocks of threads, (P, 2, channels of a pixel)."""
    return getattr(torch.ops.drama_native, kernel)(x, rows, *norm)


def _plain(x: Tensor, weight: Tensor) -> Tensor:
    weight = weight.contiguous(memory_format=torch.channels_last)
    return F.conv2d(x.permute(0, 3, 1, 2), weight, padding=1).permute(0, 2, 3, 1)


def _plain_backward(
    grad: Tensor, x: Tensor, weight: Tensor, wants_x: bool, wants_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    grad_x, grad_weight, _ = torch.ops.aten.convolution_backward(
        grad.permute(0, 3, 1, 2),
        x.permute(0, 3, 1, 2),
        weight.contiguous(memory_format=torch.channels_last),
        None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [wants_x, wants_weight, False],
    )  # fmt: skip
    return None if grad_x is None else grad_x.permute(0, 2, 3, 1), grad_weight


def adjoint(weight: Tensor) -> Tensor:
    """The weight that takes dy to dx.   (O, C, 3, 3) -> (C, O, 3, 3)."""
    return weight.transpose(0, 1).flip(-2, -1)


def window(weight: Tensor) -> Tensor:
    """What each channel out takes of the 6 × 6 pixels it sees.   (O, 4·C, 3, 3) -> (O, C, 6, 6)."""
    blocks = weight.unflatten(1, (2, 2, -1))  # (O, row and column in a block, C, blocks down, blocks across)
    return blocks.permute(0, 3, 4, 1, 5, 2).reshape(len(weight), -1, 6, 6)


def strided_rows(weight: Tensor) -> Tensor:
    """(O, 4·C, 3, 3) of a 5×5 convolution of stride 2 -> rows of weights (25 · C/16 · O, 16)."""
    return tap_rows(window(weight)[..., :5, :5])


def spread_rows(weight: Tensor) -> Tensor:
    """(4·O, C, 3, 3) of a transposed 5×5 convolution of stride 2 -> rows of weights (25 · C/16 · O, 16): by neighbour,
    16 channels in, then pixel of the block that takes of it; the second row and column take none from above or left."""
    pixels = lane_columns(weight.unflatten(0, (2, 2, -1)), 2).unflatten(3, (-1, 16)).permute(3, 0, 1, 2, 4, 5, 6)
    taps = [
        pixels[:, : min(2, down + 1), : min(2, right + 1), :, :, down, right].flatten(0, 3)
        for down in range(3)
        for right in range(3)
    ]
    return torch.cat(taps)


def to_colours_rows(weight: Tensor) -> Tensor:
    """(16, 4·16, 3, 3) -> rows of weights (36 · 16, 16)."""
    return tap_rows(window(weight))


def from_colours_rows(weight: Tensor) -> Tensor:
    """(4·16, 16, 3, 3) -> rows of weights (7 · 64, 16)."""
    halves = seen_numbers(weight[:, :COLOURS]).unflatten(0, (2, 32))  # pixels 0 and 1, pixels 2 and 3 of a block
    return number_rows(lane_columns(halves, 1).flatten(0, 1))  # a lane gets 8 channels of a pixel of each half


def seen_numbers(weight: Tensor) -> Tensor:
    """What each channel out takes of the 6 × 18 numbers that a block sees: the first 16 of each row, the last 2 of all
    rows, and 4 zeros.   (O, 4·3, 3, 3) -> (O, 7·16)."""
    seen = window(weight).permute(0, 2, 3, 1).flatten(2)  # (O, 6, 6 · 3)
    return torch.cat((seen[..., :16].flatten(1), F.pad(seen[..., 16:].flatten(1), (0, 4))), dim=1)


def number_rows(columns: Tensor) -> Tensor:
    """(columns of the product, 7·16) -> (7 · columns, 16)."""
    return columns.unflatten(1, (7, 16)).transpose(0, 1).flatten(0, 1)


def tap_rows(weight: Tensor) -> Tensor:
    """(O, C, k, k) of stride 2 -> (k² · C/16 · O, 16): by tap, 16 channels in, column of the product."""
    taps = weight.permute(2, 3, 1, 0).unflatten(2, (-1, 16)).flatten(0, 2)  # (k² · C/16, 16, O)
    whole = weight.shape[0] // 32 * 32  # the lanes of a column write 8 of these channels each, and 4 of the rest
    parts = [part for part in taps.split((whole, weight.shape[0] - whole), dim=2) if part.shape[2]]
    return torch.cat([lane_columns(part, 2) for part in parts], dim=2).transpose(1, 2).flatten(0, 1)


def lane_columns(channels: Tensor, dim: int) -> Tensor:
    """Channels in the order of a product's columns: 8 neighbours are two channels of each of 4 lanes, so that a lane
    gets channels side by side, which it writes at once."""
    lanes = channels.unflatten(dim, (4, -1, 2))  # lane, which 8 columns, which of the two
    return lanes.transpose(dim, dim + 1).flatten(dim, dim + 2)


def colour_weight_gradient(x: Tensor, grad: Tensor) -> Tensor:
    """Gradient of w between blocks of colours and blocks of 16 channels, x and grad either way round.
    -> (4·16, 16, 3, 3) or (16, 4·16, 3, 3), bfloat16."""
    if x.shape[-1] != PADDED_COLOURS:  # conv(x, w) = y is conv(y, adjoint(w)) = x as far as w's gradient goes
        return adjoint(colour_weight_gradient(grad, x))
    return _from_seen_numbers(torch.ops.drama_native.colour_weight_gradient(grad, x), x.dtype)


def _from_seen_numbers(product: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight's gradient from that of the numbers that a block sees.   (64, 3 · 40) -> (4·16, 16, 3, 3)."""
    seen = product.unflatten(1, (3, 40))[..., :36].unflatten(2, (3, 2, 6))  # (64, across, down, row, column and colour)
    gradient = seen.permute(0, 3, 4, 2, 1).reshape(64, COLOURS, 3, 3)
    return F.pad(gradient, (0, 0, 0, 0, 0, PADDED_COLOURS - COLOURS)).to(dtype)


def strided_weight_gradient(x: Tensor, grad: Tensor) -> Tensor:
    """Gradient of w between blocks of 4·C channels and O < 4·C channels, x and grad either way round.
    -> (O, 4·C, 3, 3) or (4·C, O, 3, 3), bfloat16."""
    if grad.shape[-1] > x.shape[-1]:
        return adjoint(strided_weight_gradient(grad, x))
    taps = torch.ops.drama_native.strided_weight_gradient(x, grad).unflatten(0, (5, 5))  # (5, 5, C, O)
    seen = F.pad(taps, (0, 0, 0, 0, 0, 1, 0, 1)).unflatten(1, (3, 2)).unflatten(0, (3, 2))  # blocks down, row, ...
    return seen.permute(5, 1, 3, 4, 0, 2).reshape(grad.shape[-1], x.shape[-1], 3, 3).to(x.dtype)


ROWS: dict[str, Callable[[Tensor], Tensor]] = {  # of weights, as each kernel takes them
    _STRIDED: strided_rows,
    _SPREAD: spread_rows,
    _TO_COLOURS: to_colours_rows,
    _FROM_COLOURS: from_colours_rows,
}
WEIGHT_GRADIENTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    _STRIDED: strided_weight_gradient,
    _FROM_COLOURS: colour_weight_gradient,
}


def why_not() -> str | None:
    """Why there are no native convolutions, or None if there are."""
    if (reason := _native.why_not("cuda")) is not None:
        return reason
    operators, names = torch.ops.drama_native, (*FAKES, *UNTRACED, "weights_order")
    if not all(hasattr(operators, name) for name in names) or operators.weights_order() != WEIGHTS_ORDER:
        return "the native extension is older than its convolutions: pip install -e . --no-build-isolation"
    return None


def _fake_strided(rows: Tensor, weights: Tensor) -> Tensor:
    return rows.new_empty(*rows.shape[:3], 32 if rows.shape[1] == 32 else 48)


FAKES: dict[str, Callable[..., Tensor]] = {  # the operators' outputs without values
    "encoder_front": lambda frames, weights, shifts: weights.new_empty(frames.shape[0], 16, 16, 4 * 32),
    "encoder_third": lambda rows, weights, shifts: rows.new_empty(rows.shape[0], 8, 8, 4 * 48),
    "strided": _fake_strided,
    "spread": lambda rows, weights: rows.new_empty(*rows.shape[:3], 64 if rows.shape[1] == 32 else 128),
    "to_colours": lambda rows, weights: rows.new_empty(*rows.shape[:3], PADDED_COLOURS),
    "from_colours": lambda rows, weights: rows.new_empty(*rows.shape[:3], 64),
    "colour_weight_gradient": lambda grads, rows: grads.new_empty((64, 120), dtype=torch.float32),
    "strided_weight_gradient": lambda rows, grads: rows.new_empty(
        (25, rows.shape[3] // 4, grads.shape[3]), dtype=torch.float32
    ),
}
UNTRACED = (  # operators that run inside of others, and so have no fakes
    *(f"{name}_and_{sums}" for name in _SUMMING for sums in ("moments", "gradients")),
    "colour_weight_gradient_through_norm",
)


def register_fakes() -> None:
    for name, fake in FAKES.items():
        torch.library.register_fake(f"drama_native::{name}", fake)


if (NO_KERNELS := why_not()) is None:  # why there are none
    register_fakes()

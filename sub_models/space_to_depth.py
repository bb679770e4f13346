"""The convolution stack on 2×2 blocks of pixels: the same numbers from convolutions that fill a GPU's matrix units.

An image (height, width, C) is re-laid as (height/2, width/2, 4C), a block's four pixels side by side in its channels.
A convolution of any odd kernel and of stride 1 or 2, transposed or not, is then a convolution of stride 1 with a small
kernel and four times the channels: 3, 16 or 32 channels at 64×64 leave most of a matrix unit idle, 12 to 256 do not.
The weights are those of the plain layers, rewritten for each pass; the result differs in the order of sums alone.

Letters: B batch, C channels in, O channels out, k kernel, T taps of the rewritten kernel; h = (k - 1) / 2. With pixel
2m + a of an axis in block m, and weight w[y] reading the pixel y - h further on, pixel a of a block reads pixel d of
the block t further on with w[2t + d + h - a].
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sub_models.fused_batch_norm import NO_KERNELS, Normed, can_fuse, norm_rows
from sub_models.native_convolutions import Convolved, convolve, plan_of

if NO_KERNELS is None:
    from sub_models.frame_blocks import frame_blocks

CHANNEL_MULTIPLE = 8  # bfloat16 channels that a tensor core reads at once


def can_relay(layers: Iterable[nn.Module], height: int, width: int) -> bool:
    """Whether `run_relaid` computes these layers: an image of even size, convolutions of stride 1 or 2."""
    strides = {layer.stride for layer in layers if isinstance(layer, nn.Conv2d | nn.ConvTranspose2d)}
    return height % 2 == 0 and width % 2 == 0 and strides <= {(1, 1), (2, 2)}


def run_relaid(layers: Iterable[nn.Module], x: Tensor) -> Tensor:
    """A sequence of convolutions, each with its norm and activation, as `nn.Sequential(*layers)` computes it.

    layers: `Conv2d` and `ConvTranspose2d` of 'same' padding, and modules that act on each pixel alone or, as batch
    norm, on each channel.   x (B, C, height, width) -> (B, O, height', width'), channels-last in memory.

    Raises:
        ValueError: an axis that has to be cut into blocks has an odd size.
    """
    return run_rows(layers, x.permute(0, 2, 3, 1), blocks=False)


def run_bytes(layers: Iterable[nn.Module], frames: Tensor) -> Tensor:
    """`run_relaid` of frames (B, height, width, C) uint8, scaled to 0..1, where `can_lay_bytes`.
    -> (B, O, height', width')"""
    layers = list(layers)
    channels = 4 * frames.shape[3]
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else layers[0].weight.dtype
    return run_rows(layers, frame_blocks(frames, channels + -channels % CHANNEL_MULTIPLE, dtype), blocks=True)


def can_lay_bytes(first: nn.Module) -> bool:
    """Whether `run_bytes` may begin with the layer `first`: on a GPU, in at most single precision."""
    return NO_KERNELS is None and first.weight.is_cuda and first.weight.dtype != torch.float64


def run_rows(layers: Iterable[nn.Module], rows: Tensor, blocks: bool) -> Tensor:
    """`run_relaid` from rows of channels on.   rows (B, height, width, C), or (B, height/2, width/2, 4C) with `blocks`,
    -> (B, O, height', width')."""
    rows, bias, blocks = run_unfinished(layers, rows, blocks)
    return _arrange(_add_bias(rows, bias), blocks, False).permute(0, 3, 1, 2)


def run_unfinished(
    layers: Iterable[nn.Module], rows: Tensor, blocks: bool, spare: bool = False
) -> tuple[Tensor, Tensor | None, bool]:
    """`run_rows` without its last pass over memory: rows, the bias (O) that is still to be added to them, and whether
    they hold blocks. With `spare` a last convolution's rows keep the zero channels that it was filled up with."""
    layers, bias, found, normed = list(layers), None, (None, None), None  # found: of a convolution, by its kernel
    fused = False  # was this layer computed with the one before?
    for i, layer in enumerate(layers):
        following = layers[i + 1] if i + 1 < len(layers) else None
        if fused:
            fused = False
        elif isinstance(layer, nn.Conv2d | nn.ConvTranspose2d):
            rows = _arrange(rows, blocks, _takes_blocks(layer))
            is_last, asks = following is None, isinstance(following, nn.BatchNorm2d) and following.training
            (rows, *found), bias = _convolve(rows, layer, spare and is_last, asks, normed), layer.bias
            normed = None
            blocks = isinstance(layer, nn.ConvTranspose2d) or layer.stride == (1, 1)
        elif can_fuse(layer, following, rows):
            wanted = i + 2 < len(layers) and _takes_blocks(layers[i + 2])
            rows, normed = norm_rows(rows, layer, bias, blocks, wanted, *found)
            blocks, bias, found, fused = wanted, None, (None, None), True
        else:
            rows, bias = _by_pixel(layer, _add_bias(rows, bias), 4 if blocks else 1), None
            found, normed = (None, None), None
    return rows, bias, blocks


def _takes_blocks(layer: nn.Module) -> bool:
    """Whether `layer` is a convolution that reads blocks of pixels."""
    upsamples = isinstance(layer, nn.ConvTranspose2d) and layer.stride == (2, 2)
    return isinstance(layer, nn.Conv2d | nn.ConvTranspose2d) and not upsamples


def _arrange(rows: Tensor, blocks: bool, wanted: bool) -> Tensor:
    """Rows that hold blocks of pixels, or not, as they are wanted."""
    if blocks == wanted:
        return rows
    return space_to_depth(rows) if wanted else depth_to_space(rows)


def space_to_depth(x: Tensor) -> Tensor:
    """(B, height, width, C) -> (B, height/2, width/2, 4C)."""
    _, height, width, _ = x.shape
    if height % 2 or width % 2:
        raise ValueError(f"space_to_depth: an image of {height}x{width}, expected even sizes")
    return x.unflatten(2, (width // 2, 2)).unflatten(1, (height // 2, 2)).transpose(2, 3).flatten(3)


def depth_to_space(x: Tensor) -> Tensor:
    """(B, height, width, 4C) -> (B, 2 height, 2 width, C)."""
    return x.unflatten(3, (2, 2, -1)).transpose(2, 3).flatten(3, 4).flatten(1, 2)


def relaid_weight(layer: nn.Conv2d | nn.ConvTranspose2d) -> Tensor:
    """The weight of the convolution of stride 1 that computes `layer`.

    Conv2d of stride 1 and ConvTranspose2d of stride 1: blocks to blocks, (4·O, 4·C, T, T); Conv2d of stride 2: blocks
    to pixels, (O, 4·C, T, T); ConvTranspose2d of stride 2: pixels to blocks, (4·O, C, T, T).
    """
    weight = layer.weight
    if isinstance(layer, nn.ConvTranspose2d):  # pixel y gives to pixel y + j - h: reads with the kernel turned round
        weight = weight.transpose(0, 1).flip(-2, -1)
    pixels_in = isinstance(layer, nn.ConvTranspose2d) and layer.stride == (2, 2)
    pixels_out = isinstance(layer, nn.Conv2d) and layer.stride == (2, 2)
    taps = _taps(weight, 0, 0) if pixels_out else block_taps(weight)  # (1·O or 4·O, 2, 2, C, T, T)
    return taps[:, 0, 0] if pixels_in else taps.flatten(1, 3)


def block_taps(weight: Tensor) -> Tensor:
    """What the pixels of a block read.   weight (O, C, k, k) -> (4·O, 2, 2, C, T, T), by pixel of the block read."""
    return torch.cat([_taps(weight, row, column) for row in (0, 1) for column in (0, 1)])


def _taps(weight: Tensor, row: int, column: int) -> Tensor:
    """What pixel (row, column) of a block reads.   weight (O, C, k, k) -> (O, 2, 2, C, T, T), by pixel of the block
    read."""
    padding, reach = _padding_and_reach(weight)
    spare = 2 * (2 * reach + 1) - weight.shape[-1]
    left, top = (2 * reach + place - padding for place in (column, row))
    spread = F.pad(weight, (left, spare - left, top, spare - top))  # (O, C, 2T, 2T)
    spread = spread.unflatten(3, (-1, 2)).unflatten(2, (-1, 2))  # (O, C, T, 2, T, 2)
    return spread.permute(0, 3, 5, 1, 2, 4)


def _padding_and_reach(weight: Tensor) -> tuple[int, int]:
    """(h, how many blocks away the kernel reads)."""
    padding = weight.shape[-1] // 2
    return padding, (padding + 1) // 2


def _convolve(
    rows: Tensor, layer: nn.Conv2d | nn.ConvTranspose2d, spare: bool, asks: bool, normed: Normed | None
) -> Convolved:
    """rows (B, height, width, C), or filled up, -> (B, height, width, O), or with `spare` O rounded up to
    `CHANNEL_MULTIPLE`, the rest zeros; C and O of the rewritten convolution. If a norm that follows `asks`, with what
    the kernel has for it. normed: the norm that rows came out of, if any."""
    weight = relaid_weight(layer)  # (O, C, T, T), odd T
    channels_out, channels_in = weight.shape[:2]
    spare_out, spare_in = -channels_out % CHANNEL_MULTIPLE, -channels_in % CHANNEL_MULTIPLE
    x = F.pad(rows, (0, channels_in + spare_in - rows.shape[-1]))
    weight = F.pad(weight, (0, 0, 0, 0, 0, spare_in, 0, spare_out))
    if (plan := plan_of(layer, x)) is not None:
        out = convolve(x, weight, plan, asks, normed)
    else:
        weight = weight.contiguous(memory_format=torch.channels_last)
        x = x.permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last)
        out = Convolved(F.conv2d(x, weight, padding=weight.shape[-1] // 2).permute(0, 2, 3, 1), None, None)
    return out if spare else out._replace(rows=out.rows[..., :channels_out])


def _add_bias(rows: Tensor, bias: Tensor | None) -> Tensor:
    """rows (..., O or 4·O) plus bias (O)."""
    return rows if bias is None else rows + bias.to(rows.dtype).repeat(rows.shape[-1] // bias.shape[0])


def _by_pixel(layer: nn.Module, rows: Tensor, pixels: int) -> Tensor:
    """A norm or activation for images on rows that hold `pixels` pixels each.   (B, height, width, C) -> same."""
    flat = rows.reshape(-1, rows.shape[-1] // pixels)[:, :, None, None]
    return layer(flat)[:, :, 0, 0].reshape(rows.shape)

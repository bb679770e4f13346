"""The first layers of the default encoder outside of training: frames of bytes in, two kernels for three layers.

    silu(norm(conv(x))) = 2h σ(2h) = h + h tanh(h),   h = (w · scale / 2) * x + (shift - scale · mean) / 2

with running statistics in scale = norm.weight / √(var + eps). The kernels are CUDA's (csrc/convolutions), part of the
native extension: 5×5 convolutions as products of matrices, the first two without their intermediate in memory.
Here are the weights as the kernels take them, and when they may be used.

Letters: O channels out, C channels in, R rows of 16 numbers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sub_models.native_convolutions import NO_KERNELS, SHARED_BYTES, lane_columns, number_rows, seen_numbers, tap_rows
from sub_models.space_to_depth import block_taps

FRAME = (64, 64, 3)  # height, width, channels
STAGES = (((3, 16, 1), (16, 32, 2)), ((32, 48, 2),))  # channels in, channels out and stride of each one's convolutions
LEVELS = 255.0


def encoder_front(frames: Tensor, weights: Tensor, shifts: Tensor) -> Tensor:
    """Layers 1 and 2.   frames (B, 64, 64, 3), rows of weights (7·64 + 25·32, 16), shifts (16 + 32)
    -> (B, 16, 16, 4·32)."""
    return torch.ops.drama_native.encoder_front(frames, weights, shifts)


def encoder_third(rows: Tensor, weights: Tensor, shifts: Tensor) -> Tensor:
    """Layer 3.   (B, 16, 16, 4·32), rows of weights (25·2·48, 16), shifts (48) -> (B, 8, 8, 4·48)."""
    return torch.ops.drama_native.encoder_third(rows, weights, shifts)


def fusible_layers(layers: Sequence[nn.Module], height: int, width: int, device: torch.device) -> int:
    """How many of an encoder's modules `encode_bytes` can compute on `device`: 0, 6 or 9."""
    if device.type != "cuda" or NO_KERNELS is not None or (height, width) != FRAME[:2]:
        return 0
    if torch.cuda.get_device_properties(device).shared_memory_per_block_optin < SHARED_BYTES:
        return 0
    count = 0
    for stage in STAGES:
        for sizes in stage:
            if not _is_layer(layers[count : count + 3], *sizes):
                return 0 if count < 6 else 6
            count += 3
    return count


def _is_layer(modules: Sequence[nn.Module], channels_in: int, channels_out: int, stride: int) -> bool:
    if len(modules) < 3:
        return False
    conv, norm, act = modules
    return (
        isinstance(conv, nn.Conv2d)
        and (conv.in_channels, conv.out_channels, conv.stride) == (channels_in, channels_out, (stride, stride))
        and (conv.kernel_size, conv.padding, conv.groups) == ((5, 5), (2, 2), 1)
        and isinstance(norm, nn.BatchNorm2d)
        and norm.affine
        and norm.track_running_stats
        and isinstance(act, nn.SiLU)
    )


def may_fuse(training: bool) -> bool:
    """Whether the kernels compute what is wanted now: running statistics, no gradients, bfloat16."""
    autocast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") == torch.bfloat16
    return autocast and not training and not torch.is_grad_enabled()


def encode_bytes(layers: Sequence[nn.Module], frames: Tensor) -> Tensor:
    """The first 6 or 9 modules of an encoder, as many as are given; see `fusible_layers`.

    frames (B, 64, 64, 3) uint8 -> blocks of 2×2 pixels, bfloat16, (B, 16, 16, 4·32) or (B, 8, 8, 4·48).
    """
    with torch.autocast("cuda", enabled=False):
        first, first_shift = _folded(*layers[0:2])
        second, second_shift = _folded(*layers[3:5])
        weights = torch.cat((window_rows(first / LEVELS), tap_rows(second)))
        shifts = torch.cat((first_shift, second_shift))
        rows = encoder_front(frames, weights.bfloat16(), shifts)
        if len(layers) > 6:
            third, third_shift = _folded(*layers[6:8])
            rows = encoder_third(rows, tap_rows(third).bfloat16(), third_shift)
    return rows


def _folded(conv: nn.Conv2d, norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """Half the weight (O, C, 5, 5) and half the shift (O) of a convolution and its norm, float32."""
    scale = norm.weight / (norm.running_var + norm.eps).sqrt()
    mean = norm.running_mean if conv.bias is None else norm.running_mean - conv.bias
    return 0.5 * scale[:, None, None, None] * conv.weight, 0.5 * (norm.bias - scale * mean)


def window_rows(weight: Tensor) -> Tensor:
    """(16, 3, 5, 5) of stride 1 -> (7 · 64, 16): what each pixel and channel of a block takes of what the block sees; a
    lane gets the channels of one pixel."""
    return number_rows(lane_columns(seen_numbers(block_taps(weight).flatten(1, 3)), 0))

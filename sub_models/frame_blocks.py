"""Frames of bytes as the first convolution on 2×2 blocks of pixels takes them: scaled to 0..1, re-laid, filled up.

    out[b, i, j, (2r + s) C + c] = frames[b, 2i + r, 2j + s, c] / 255,   zeros behind 4·C

One pass over memory by a kernel of Triton's; `space_to_depth` of the scaled image is the plain form, of which torch's
compiler makes one pass, too, at a third of the speed.

Letters: B frames, C channels, W channels of a block.
"""

import torch
import triton
import triton.language as tl

from mamba_ssm.ops.triton.launch import ceil_div, define, next_power_of_two

Tensor = torch.Tensor

LEVELS = 255.0
TILE = 2048  # numbers of a program


@triton.jit
def _blocks_kernel(
    frames_ptr, out_ptr, blocks, scale, BLOCKS_WIDE: tl.constexpr, C: tl.constexpr, W: tl.constexpr,
    WIDE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)  # of those of all frames
    channel = tl.arange(0, WIDE)
    line = 2 * BLOCKS_WIDE * C  # numbers of a line of pixels
    first = block // BLOCKS_WIDE * (2 * line) + block % BLOCKS_WIDE * (2 * C)
    inside = channel // (2 * C) * line + channel % (2 * C)  # the block's rows are 2·C neighbours
    mask = (block < blocks)[:, None] & (channel < 4 * C)[None, :]
    byte = tl.load(frames_ptr + first[:, None] + inside[None, :], mask=mask, other=0)
    out = byte.to(tl.float32) * scale  # as torch divides by a number on a GPU; in half precision a division's result
    within = (block < blocks)[:, None] & (channel < W)[None, :]
    tl.store(out_ptr + block[:, None] * W + channel[None, :], out.to(out_ptr.dtype.element_ty), mask=within)


def _run(frames: Tensor, channels: int, dtype: torch.dtype) -> Tensor:
    out = _fake(frames, channels, dtype)
    count, wide = out.numel() // channels, next_power_of_two(channels)
    size = max(1, TILE // wide)
    if count:
        _blocks_kernel[(ceil_div(count, size),)](
            frames.contiguous(), out, count, 1.0 / LEVELS,
            BLOCKS_WIDE=out.shape[2], C=frames.shape[3], W=channels, WIDE=wide, BLOCKS=size,
        )  # fmt: skip
    return out


def _fake(frames: Tensor, channels: int, dtype: torch.dtype) -> Tensor:
    batch, height, width, _ = frames.shape
    return torch.empty((batch, height // 2, width // 2, channels), dtype=dtype, device=frames.device)


# frames (B, height, width, C) uint8 of even size, W >= 4·C -> (B, height / 2, width / 2, W) of `dtype`
frame_blocks = define("frame_blocks(Tensor frames, int channels, ScalarType dtype) -> Tensor", _run, _fake)

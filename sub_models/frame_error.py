"""Squared error of decoded frames, straight from the last convolution's output on blocks of pixels: bias, sigmoid, the
order of pixels and the difference to the stored bytes are one pass forward and one backward, and no image is stored.

    s = sigmoid(x + bias_c),   error_b = Σ (s - obs / 255)²,   dx = 2 dout_b (s - obs / 255) s (1 - s),   dbias_c = Σ dx

The kernels are Triton's and run on a GPU; `reconstruction_loss` of the decoded image is the plain form.
Letters: B frames, C channels, P blocks of pixels in a frame, W channels of a block, the 4·C true ones first.
"""

import torch
import triton
import triton.language as tl

from mamba_ssm.ops.triton.jit_math import sigmoid
from mamba_ssm.ops.triton.launch import define, differentiate, next_power_of_two

Tensor = torch.Tensor

TILE = 2048  # elements that a program holds; one program works on a frame


@triton.jit
def _difference(
    x_ptr, bias_ptr, obs_ptr, frame, place, channel, mask, P: tl.constexpr, BLOCKS_WIDE: tl.constexpr,
    C: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """s and s - obs / 255 of the blocks `place` (PLACES,) and their channels (WIDE,)."""
    x = tl.load(x_ptr + frame * P * W + place[:, None] * W + channel[None, :], mask=mask, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + channel % C, mask=channel < 4 * C, other=0.0).to(tl.float32)
    share = sigmoid(x + bias[None, :])
    pixel = channel // C  # of the block: 2 · row + column
    line = 2 * (place // BLOCKS_WIDE)[:, None] + (pixel // 2)[None, :]
    column = 2 * (place % BLOCKS_WIDE)[:, None] + (pixel % 2)[None, :]
    byte = (line * 2 * BLOCKS_WIDE + column) * C + (channel % C)[None, :]
    obs = tl.load(obs_ptr + frame * P * 4 * C + byte, mask=mask, other=0).to(tl.float32)
    return share, tl.where(mask, share - obs * (1.0 / 255.0), 0.0)


@triton.jit
def _error_kernel(
    x_ptr, bias_ptr, obs_ptr, out_ptr, P: tl.constexpr, BLOCKS_WIDE: tl.constexpr, C: tl.constexpr, W: tl.constexpr,
    WIDE: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    frame = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, WIDE)
    total = tl.zeros((PLACES, WIDE), tl.float32)
    for first in range(0, P, PLACES):
        place = first + tl.arange(0, PLACES)
        mask = (place < P)[:, None] & (channel < 4 * C)[None, :]
        _, difference = _difference(x_ptr, bias_ptr, obs_ptr, frame, place, channel, mask, P, BLOCKS_WIDE, C, W)
        total += difference * difference
    tl.store(out_ptr + frame, tl.sum(tl.sum(total, axis=1), axis=0))


@triton.jit
def _error_backward_kernel(
    dout_ptr, x_ptr, bias_ptr, obs_ptr, dx_ptr, partial_ptr, P: tl.constexpr, BLOCKS_WIDE: tl.constexpr,
    C: tl.constexpr, W: tl.constexpr, WIDE: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """dx, and for each frame the sums of dx over its blocks."""
    frame = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, WIDE)
    factor = 2.0 * tl.load(dout_ptr + frame).to(tl.float32)
    total = tl.zeros((PLACES, WIDE), tl.float32)
    for first in range(0, P, PLACES):
        place = first + tl.arange(0, PLACES)
        mask = (place < P)[:, None] & (channel < 4 * C)[None, :]
        share, difference = _difference(x_ptr, bias_ptr, obs_ptr, frame, place, channel, mask, P, BLOCKS_WIDE, C, W)
        dx = factor * difference * share * (1.0 - share)
        total += dx
        within = (place < P)[:, None] & (channel < W)[None, :]
        dx_at = dx_ptr + frame * P * W + place[:, None] * W + channel[None, :]
        tl.store(dx_at, dx.to(dx_ptr.dtype.element_ty), mask=within)
    tl.store(partial_ptr + frame * WIDE + channel, tl.sum(total, axis=0))


def _sizes(rows: Tensor, bias: Tensor) -> dict[str, int]:
    """What both kernels have to know of rows (B, height, width, W)."""
    channels, width = len(bias), rows.shape[-1]
    wide = next_power_of_two(width)
    sizes = {"P": rows.shape[1] * rows.shape[2], "BLOCKS_WIDE": rows.shape[2], "C": channels, "W": width}
    return {**sizes, "WIDE": wide, "PLACES": max(1, TILE // wide)}


def _forward(rows: Tensor, bias: Tensor, obs: Tensor) -> Tensor:
    out = torch.empty(rows.shape[0], dtype=torch.float32, device=rows.device)
    _error_kernel[(len(out),)](rows.contiguous(), bias, obs.contiguous(), out, **_sizes(rows, bias))
    return out


def _backward(dout: Tensor, rows: Tensor, bias: Tensor, obs: Tensor) -> tuple[Tensor, Tensor]:
    sizes, dx = _sizes(rows, bias), torch.empty_like(rows, memory_format=torch.contiguous_format)
    partial = torch.empty((rows.shape[0], sizes["WIDE"]), dtype=torch.float32, device=rows.device)
    _error_backward_kernel[(rows.shape[0],)](
        dout.contiguous(), rows.contiguous(), bias, obs.contiguous(), dx, partial, **sizes
    )
    return dx, partial


def _fake_backward(dout: Tensor, rows: Tensor, bias: Tensor, obs: Tensor) -> tuple[Tensor, Tensor]:
    dx = torch.empty_like(rows, memory_format=torch.contiguous_format)
    return dx, rows.new_empty((rows.shape[0], _sizes(rows, bias)["WIDE"]), dtype=torch.float32)


# rows (B, height / 2, width / 2, W), bias (C), obs (B, height, width, C) uint8 -> (B) float32
frame_error = define(
    "frame_error(Tensor rows, Tensor bias, Tensor obs) -> Tensor",
    _forward,
    lambda rows, bias, obs: rows.new_empty(rows.shape[0], dtype=torch.float32),
)
# -> dx like rows, and its sums over each frame's blocks (B, W rounded up to a power of two)
_backward_operator = define(
    "frame_error_backward(Tensor dout, Tensor rows, Tensor bias, Tensor obs) -> (Tensor, Tensor)",
    _backward,
    _fake_backward,
)


def _keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _differentiated(ctx, dout):
    rows, bias, obs = ctx.saved_tensors
    dx, partial = _backward_operator(dout, rows, bias, obs)
    dbias = partial[:, : 4 * len(bias)].sum(0).view(4, len(bias)).sum(0)
    return dx, dbias.to(bias.dtype), None


differentiate("frame_error", _differentiated, _keep)

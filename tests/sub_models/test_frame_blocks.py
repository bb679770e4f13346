"""Frames of bytes as blocks by the kernel, against the plain form."""

import pytest
import torch
from torch.nn import functional as F

from sub_models.frame_blocks import frame_blocks
from sub_models.space_to_depth import space_to_depth

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU the kernel runs through Triton's interpreter


def make_frames(batch, height, width, channels):
    torch.manual_seed(0)
    return torch.randint(0, 256, (batch, height, width, channels), dtype=torch.uint8, device=DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "channels"), [((3, 64, 64, 3), 16), ((1, 2, 2, 3), 12), ((2, 6, 10, 1), 8), ((5, 4, 14, 4), 24)]
)
def test_the_same_numbers(shape, channels, dtype):
    frames = make_frames(*shape)
    expected = space_to_depth(frames.float() / 255.0)
    expected = F.pad(expected, (0, channels - expected.shape[-1])).to(dtype)
    tolerance = 2e-7 if dtype == torch.float32 else 0.0 if DEVICE == "cuda" else 2**-7  # the interpreter cuts off
    torch.testing.assert_close(frame_blocks(frames, channels, dtype), expected, rtol=tolerance, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_product_with_the_inverse_rounds_to_the_same(dtype):
    """In half precision the kernel multiplies: that all bytes become what a division makes of them is shown here."""
    byte = torch.arange(256, dtype=torch.float32)
    assert torch.equal((byte * (1.0 / 255.0)).to(dtype), (byte / 255.0).to(dtype))


def test_no_frames():
    assert frame_blocks(make_frames(0, 4, 4, 3), 16, torch.float32).shape == (0, 2, 2, 16)


def test_frames_with_gaps():
    frames = make_frames(4, 4, 4, 3)[::2]
    assert torch.equal(frame_blocks(frames, 16, torch.float32), frame_blocks(frames.clone(), 16, torch.float32))


def test_the_operator_is_registered_well():
    torch.library.opcheck(torch.ops.mamba_ssm_triton.frame_blocks.default, (make_frames(1, 4, 4, 3), 16, torch.float32))

"""Convolutions on blocks of pixels: outputs, gradients and running statistics of the plain layers."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from sub_models.fused_batch_norm import NO_KERNELS
from sub_models.space_to_depth import can_relay, depth_to_space, relaid_weight, run_bytes, run_relaid, space_to_depth
from sub_models.world_models import Decoder, Encoder


def test_blocks_hold_their_four_pixels():
    image = torch.arange(2 * 4 * 6 * 3).view(2, 4, 6, 3)
    blocks = space_to_depth(image)
    assert blocks.shape == (2, 2, 3, 12)
    for row in range(2):
        for column in range(2):
            pixels = image[:, row::2, column::2]
            place = 3 * (2 * row + column)
            assert torch.equal(blocks[..., place : place + 3], pixels)
    assert torch.equal(depth_to_space(blocks), image)
    with pytest.raises(ValueError, match="an image of 3x6, expected even sizes"):
        space_to_depth(image[:, :3])


@settings(deadline=None, max_examples=40)
@given(
    kernel=st.sampled_from([1, 3, 5, 7, 9]),
    stride=st.sampled_from([1, 2]),
    transposed=st.booleans(),
    channels=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    size=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    seed=st.integers(0, 99),
)
def test_one_layer_equals_the_plain_one(kernel, stride, transposed, channels, size, seed):
    torch.manual_seed(seed)
    border = kernel // 2
    if transposed:
        layer = nn.ConvTranspose2d(*channels, kernel, stride, border, output_padding=stride - 1)
    else:
        layer = nn.Conv2d(*channels, kernel, stride, border)
    layer.double()
    x = torch.randn(2, channels[0], 2 * size[0], 2 * size[1], dtype=torch.float64)
    torch.testing.assert_close(run_relaid([layer], x), layer(x), rtol=1e-12, atol=1e-12)


def test_weights_have_the_shapes_that_are_promised():
    assert relaid_weight(nn.Conv2d(3, 16, 5, 1, 2)).shape == (64, 12, 3, 3)
    assert relaid_weight(nn.Conv2d(16, 32, 5, 2, 2)).shape == (32, 64, 3, 3)
    assert relaid_weight(nn.ConvTranspose2d(64, 48, 5, 2, 2, output_padding=1)).shape == (192, 64, 3, 3)
    assert relaid_weight(nn.ConvTranspose2d(16, 3, 5, 1, 2)).shape == (12, 64, 3, 3)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("first_stride_one", [True, False])
@pytest.mark.parametrize("norm", ["batch", "rms", "layer", "none"])
def test_stacks_equal_the_plain_ones(norm, first_stride_one, training):
    torch.manual_seed(0)
    sizes = {"image_size": (3, 16, 24), "depth": 4, "mults": [1, 3, 2], "kernel": 5, "padding": "same"}
    stack = {**sizes, "norm": norm, "act": "SiLU", "first_stride_one": first_stride_one}
    for plain, shape in ((Encoder(**stack), (5, 3, 16, 24)), (Decoder(7, final_sigmoid=True, **stack), (5, 7))):
        plain.double().train(training)
        for p in plain.parameters():
            nn.init.normal_(p, std=0.3)
        relaid = copy.deepcopy(plain)
        assert relaid.can_relay
        relaid.relaid = True
        results = []
        for module in (plain, relaid):
            x = torch.linspace(-1, 1, 5 * torch.Size(shape[1:]).numel(), dtype=torch.float64).view(shape).sin()
            x.requires_grad_()
            out = module(x)
            weight = torch.linspace(0.1, 1, out.numel(), dtype=torch.float64).view(out.shape)
            (weight * out.square()).sum().backward()
            gradients = [x.grad, *(p.grad for p in module.parameters())]
            results.append([out.detach(), *gradients, *(b.double() for b in module.buffers())])
        for expected, got in zip(*results, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


def test_odd_images_and_other_strides_stay_plain():
    assert can_relay([nn.Conv2d(3, 4, 5, 1, 2), nn.SiLU()], 16, 24)
    assert not can_relay([nn.Conv2d(3, 4, 5, 1, 2)], 15, 24)
    assert not can_relay([nn.Conv2d(3, 4, 5, 3, 2)], 16, 24)
    assert not Encoder((3, 15, 15), 4, [1], 5, "same", "none", "SiLU", True).can_relay


@pytest.mark.skipif(NO_KERNELS is not None, reason=f"no Triton kernels here: {NO_KERNELS}")
@pytest.mark.parametrize("channels", [1, 3])
def test_frames_of_bytes(channels):
    """Scaled and re-laid in one pass, filled up with channels that no weight reads."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layers = nn.Sequential(nn.Conv2d(channels, 8, 5, 1, 2), nn.SiLU(), nn.Conv2d(8, 8, 3, 2, 1)).to(device)
    frames = torch.randint(0, 256, (2, 8, 12, channels), dtype=torch.uint8, device=device)
    expected = layers(frames.permute(0, 3, 1, 2) / 255.0)
    torch.testing.assert_close(run_bytes(layers, frames), expected, rtol=1e-4, atol=1e-5)

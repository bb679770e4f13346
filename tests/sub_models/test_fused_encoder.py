"""The encoder's fused first layers against the plain modules: the weights' order on the CPU, the kernels on a GPU."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sub_models.fused_encoder import encode_bytes, fusible_layers, window_rows
from sub_models.native_convolutions import NO_KERNELS, tap_rows
from sub_models.space_to_depth import depth_to_space
from sub_models.world_models import Encoder

STACK = {"depth": 16, "mults": [1, 2, 3, 4, 4], "kernel": 5, "padding": "same", "norm": "batch", "act": "SiLU"}
needs_kernels = pytest.mark.skipif(
    not torch.cuda.is_available() or NO_KERNELS is not None,
    reason="needs a CUDA device and the native extension",
)


def encoder(device="cpu", **changes):
    """The default encoder with norms that are not the identity."""
    torch.manual_seed(0)
    made = Encoder((3, 64, 64), first_stride_one=True, **(STACK | changes)).to(device)
    for norm in made.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.normal_(norm.weight, 1.0, 0.3)
            nn.init.normal_(norm.bias, 0.0, 0.5)
            nn.init.normal_(norm.running_mean, 0.0, 0.2)
            nn.init.uniform_(norm.running_var, 0.02, 0.3)
    for conv in made.modules():
        if isinstance(conv, nn.Conv2d):
            nn.init.normal_(conv.bias, 0.0, 0.2)
    return made.eval().requires_grad_(False)


def images(count, device="cpu"):
    torch.manual_seed(1)
    return torch.randint(0, 256, (count, 64, 64, 3), dtype=torch.uint8, device=device)


def columns_of(count):
    """Channel of each column of the strided product, as a lane writes them: 8 side by side, then 4."""
    place = [(n // 8, n % 8 // 2, n % 2) for n in range(count)]
    return [8 * q + 2 * f + e if f < 4 else 32 + 4 * q + 2 * (f - 4) + e for f, q, e in place]


def test_rows_of_windows_are_the_convolution():
    """The product that the first kernel takes: a block's 6 x 18 numbers in their order times the rows of weights."""
    image, weight = torch.randn(2, 8, 6, 3), torch.randn(16, 3, 5, 5)
    padded = F.pad(image, (0, 0, 2, 2, 2, 2))  # (2, 12, 10, 3)
    windows = padded.unfold(1, 6, 2).unfold(2, 6, 2).permute(0, 1, 2, 4, 5, 3).flatten(4)  # (2, 4, 3, 6, 18)
    numbers = torch.cat((windows[..., :16].flatten(3), windows[..., 16:].flatten(3)), dim=-1)
    matrix = window_rows(weight).view(7, 64, 16).transpose(0, 1).flatten(1)  # (64 columns, 112)
    product = F.pad(numbers, (0, 4)) @ matrix.T  # (2, 4, 3, 64)
    places = [(n % 8 // 2) * 16 + 2 * (n // 8) + n % 2 for n in range(64)]  # pixel of the block, channel
    blocks = torch.empty_like(product)
    blocks[..., places] = product
    expected = F.conv2d(image.permute(0, 3, 1, 2), weight, padding=2).permute(0, 2, 3, 1)
    torch.testing.assert_close(depth_to_space(blocks), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("channels_in", "channels_out"), [(16, 32), (32, 48)])
def test_rows_of_taps_are_the_convolution(channels_in, channels_out):
    image, weight = torch.randn(2, 8, 6, channels_in), torch.randn(channels_out, channels_in, 5, 5)
    padded = F.pad(image, (0, 0, 2, 2, 2, 2))
    windows = padded.unfold(1, 5, 2).unfold(2, 5, 2).permute(0, 1, 2, 4, 5, 3).flatten(3)  # (2, 4, 3, 25 · channels)
    matrix = tap_rows(weight).view(-1, channels_out, 16).transpose(0, 1).flatten(1)  # (columns, 25 · channels)
    out = torch.empty(2, 4, 3, channels_out)
    out[..., columns_of(channels_out)] = windows @ matrix.T
    expected = F.conv2d(image.permute(0, 3, 1, 2), weight, stride=2, padding=2).permute(0, 2, 3, 1)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-3)


def test_emulated_kernels_equal_the_plain_layers(emulated_convolutions):
    layers, frames = encoder().layers[:9], images(3)
    with torch.no_grad():
        rows = encode_bytes(layers, frames)
        expected = layers.double()(frames.permute(0, 3, 1, 2).double() / 255.0).permute(0, 2, 3, 1)
    error = (depth_to_space(rows).double() - expected).norm() / expected.norm()
    assert error < 6e-3, f"{error:.2e}"


def test_nothing_is_fused_on_a_cpu():
    assert fusible_layers(encoder().layers, 64, 64, torch.device("cpu")) == 0


def test_bytes_count_in_255ths():
    made, bytes_ = encoder(), images(2).permute(0, 3, 1, 2)
    assert torch.equal(made(bytes_), made(bytes_.float() / 255.0))


@pytest.mark.gpu
@needs_kernels
def test_what_is_fused():
    device = torch.device("cuda")
    count = fusible_layers(encoder().layers, 64, 64, device)
    if count == 0:
        pytest.skip("this GPU has too little shared memory")
    assert count == 9
    assert fusible_layers(encoder(mults=[1, 2, 4]).layers, 64, 64, device) == 6
    assert fusible_layers(encoder().layers, 64, 96, device) == 0
    for other in ({"mults": [2, 2]}, {"mults": [1]}, {"norm": "rms"}, {"act": "ReLU"}, {"kernel": 3}):
        assert fusible_layers(encoder(**other).layers, 64, 64, device) == 0


@pytest.mark.gpu
@needs_kernels
@pytest.mark.parametrize("count", [0, 1, 3, 131, 300])
@pytest.mark.parametrize("modules", [6, 9])
def test_fused_layers_equal_the_plain_ones_on_a_gpu(count, modules):
    """Against float64, and no further off than the plain modules in bfloat16."""
    made, frames = encoder("cuda"), images(count, "cuda")
    if fusible_layers(made.layers, 64, 64, torch.device("cuda")) < modules:
        pytest.skip("this GPU has too little shared memory")
    layers = made.layers[:modules]
    exact = copy.deepcopy(layers).double()
    image = frames.permute(0, 3, 1, 2)
    with torch.autocast("cuda", torch.bfloat16):
        rows = encode_bytes(layers, frames)
        plain = layers(image.float() / 255.0).double() if count else None
    got = depth_to_space(rows).permute(0, 3, 1, 2).double()
    assert rows.dtype == torch.bfloat16 and len(rows) == count
    if count:
        expected = exact(image.double() / 255.0)
        error, plain_error = ((x - expected).norm() / expected.norm() for x in (got, plain))
        assert error < 6e-3 and error < 1.5 * plain_error, f"{error:.2e}, plain {plain_error:.2e}"
        # an element may be the small difference of large terms: the plain modules' own worst one is the measure
        worst, plain_worst = ((x - expected).abs().max() for x in (got, plain))
        assert worst < 1.5 * plain_worst, f"{worst:.2e}, plain {plain_worst:.2e}"


@pytest.mark.gpu
@needs_kernels
def test_whole_encoder_on_a_gpu():
    """From bytes, compiled to one program, against the plain modules."""
    made, image = encoder("cuda"), images(40, "cuda").permute(0, 3, 1, 2)
    expected = copy.deepcopy(made).double()(image.double() / 255.0)
    made.relaid, made.fused = True, fusible_layers(made.layers, 64, 64, torch.device("cuda"))
    program = torch.compile(made.forward, fullgraph=True, backend="aot_eager")
    for run in (made, program):
        with torch.autocast("cuda", torch.bfloat16), torch.no_grad():
            got = run(image).double()
        assert (got - expected).norm() / expected.norm() < 2e-2


@pytest.mark.gpu
@needs_kernels
def test_operators_are_registered_well_and_refuse_other_shapes():
    frames, shifts = images(2, "cuda"), torch.zeros(48, device="cuda")
    weights = torch.zeros(7 * 64 + 25 * 32, 16, dtype=torch.bfloat16, device="cuda")
    front = torch.ops.drama_native.encoder_front
    tests = ("test_schema", "test_faketensor")  # nothing is differentiated
    torch.library.opcheck(front.default, (frames, weights, shifts), test_utils=tests)
    rows = torch.zeros(2, 16, 16, 128, dtype=torch.bfloat16, device="cuda")
    weights_of_third = torch.zeros(25 * 2 * 48, 16, dtype=torch.bfloat16, device="cuda")
    third = torch.ops.drama_native.encoder_third
    torch.library.opcheck(third.default, (rows, weights_of_third, shifts), test_utils=tests)
    with pytest.raises(ValueError, match=r"frames has shape \[2, 64, 32, 3\]"):
        front(frames[:, :, :32], weights, shifts)
    with pytest.raises(ValueError, match="weights has shape"):
        third(rows, weights, shifts)

"""The squared error of frames from blocks of pixels, against the plain form on the decoded image in float64."""

import pytest
import torch

from sub_models.frame_error import frame_error
from sub_models.functions_losses import reconstruction_loss
from sub_models.space_to_depth import depth_to_space
from sub_models.world_models import Decoder

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU the kernels run through Triton's interpreter
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 4e-3}  # of dx, which the interpreter cuts off; all else is float32
# Of a decoder's gradients, whose convolutions are TF32 on a GPU.
DECODER = {"rtol": 1e-3, "atol": 2e-3} if DEVICE == "cuda" else {"rtol": 1e-5, "atol": 5e-5}


def inputs(frames, height, width, channels, spare, dtype):
    torch.manual_seed(0)
    rows = (torch.randn(frames, height // 2, width // 2, 4 * channels + spare) * 2).to(dtype)
    bias = torch.randn(channels)
    obs = torch.randint(0, 256, (frames, height, width, channels), dtype=torch.uint8)
    return [tensor.to(DEVICE) for tensor in (rows.requires_grad_(), bias.requires_grad_(), obs)]


def plain(rows, bias, obs):
    pixels = depth_to_space(rows[..., : 4 * len(bias)])
    return reconstruction_loss(torch.sigmoid(pixels + bias).movedim(-1, -3), obs.movedim(-1, -3).double() / 255.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("frames", "height", "width", "channels", "spare"),
    [(2, 32, 32, 3, 4), (3, 6, 10, 1, 4), (1, 2, 2, 3, 4), (5, 16, 8, 4, 0)],
)
def test_error_and_gradients(frames, height, width, channels, spare, dtype):
    rows, bias, obs = (
        x.detach().requires_grad_(x.is_floating_point()) for x in inputs(frames, height, width, channels, spare, dtype)
    )
    weight = torch.linspace(0.5, 1.5, frames, device=DEVICE)
    error = frame_error(rows, bias, obs)
    (error * weight).sum().backward()
    judged = [x.detach().double().requires_grad_() for x in (rows, bias)]
    expected = plain(*judged, obs)
    (expected * weight).sum().backward()
    assert error.dtype == torch.float32
    gradients = (rows.grad, judged[0].grad, ROUNDING[dtype]), (bias.grad, judged[1].grad, 1e-5)
    for got, true, tolerance in ((error, expected, 1e-5), *gradients):
        assert (got.double() - true).norm() <= tolerance * true.norm()
    assert (rows.grad[..., 4 * channels :] == 0).all()


def test_operators_are_registered_well():
    rows, bias, obs = inputs(2, 4, 4, 3, 4, torch.float32)
    operators = torch.ops.mamba_ssm_triton
    torch.library.opcheck(operators.frame_error.default, (rows.detach().requires_grad_(), bias.detach(), obs))
    torch.library.opcheck(
        operators.frame_error_backward.default, (torch.ones(2, device=DEVICE), rows.detach(), bias.detach(), obs)
    )


@pytest.mark.parametrize("channels", [1, 3])
def test_a_decoder_measures_the_error_of_its_frames(channels, monkeypatch):
    """On blocks of pixels, from the last convolution's output: the same error and gradients as of the decoded image."""
    torch.manual_seed(0)
    stack = {"depth": 4, "mults": [1, 2], "kernel": 5, "padding": "same", "norm": "batch", "act": "SiLU"}
    decoder = Decoder(12, (channels, 16, 16), first_stride_one=True, final_sigmoid=True, **stack).to(DEVICE)
    stoch = torch.randn(3, 12, device=DEVICE, requires_grad=True)
    obs = torch.randint(0, 256, (3, 16, 16, channels), dtype=torch.uint8, device=DEVICE)
    image = obs.movedim(-1, -3) / 255.0
    results = []
    for fused in (False, True):
        decoder.relaid = fused
        monkeypatch.setattr(Decoder, "_measures_error", lambda self, stoch, fused=fused: fused)
        error = decoder.error(stoch, obs, image)
        results.append((error, *torch.autograd.grad(error.mean(), [stoch, *decoder.parameters()])))
    names = ["error", "stoch", *(name for name, _ in decoder.named_parameters())]
    for name, got, expected in zip(names, *reversed(results), strict=True):
        torch.testing.assert_close(got, expected, **DECODER, msg=name)


def test_only_decoders_that_end_in_a_sigmoid_measure_it():
    stack = {"depth": 4, "mults": [1, 2], "kernel": 5, "padding": "same", "norm": "none", "act": "SiLU"}
    decoder = Decoder(12, (3, 16, 16), first_stride_one=True, final_sigmoid=False, **stack).to(DEVICE)
    decoder.relaid = True
    stoch, obs = torch.randn(2, 12, device=DEVICE), torch.zeros(2, 16, 16, 3, dtype=torch.uint8, device=DEVICE)
    expected = reconstruction_loss(decoder(stoch), obs.movedim(-1, -3) / 255.0)
    torch.testing.assert_close(decoder.error(stoch, obs, obs.movedim(-1, -3) / 255.0), expected)

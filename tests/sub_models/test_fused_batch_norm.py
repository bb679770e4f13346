"""Batch norm with SiLU in fused passes against the plain modules: through Triton's interpreter, and on a GPU."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sub_models.space_to_depth
from sub_models.fused_batch_norm import NO_KERNELS, batch_norm_silu, can_fuse
from sub_models.space_to_depth import depth_to_space, space_to_depth
from sub_models.world_models import Decoder, Encoder

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"

pytestmark = pytest.mark.skipif(NO_KERNELS is not None, reason=f"no Triton kernels here: {NO_KERNELS}")


def norm_of(channels):
    norm = nn.BatchNorm2d(channels, device=DEVICE)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    return norm


def plain(norm, image, bias):
    return F.silu(norm((image if bias is None else image + bias).permute(0, 3, 1, 2))).permute(0, 2, 3, 1)


def fused(norm, image, bias, in_blocks, out_blocks):
    out = batch_norm_silu(space_to_depth(image) if in_blocks else image, norm, bias, in_blocks, out_blocks)
    return depth_to_space(out) if out_blocks else out


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("out_blocks", [False, True])
@pytest.mark.parametrize("in_blocks", [False, True])
@pytest.mark.parametrize("channels", [3, 16, 48])
def test_outputs_gradients_and_statistics(channels, in_blocks, out_blocks, with_bias):
    torch.manual_seed(0)
    reference = norm_of(channels)
    image = torch.randn(3, 4, 6, channels, device=DEVICE) * 2 + 30  # a mean far from zero
    bias = torch.randn(channels, device=DEVICE, requires_grad=True) if with_bias else None
    weight = torch.randn_like(image)
    results = []
    for run in (plain, lambda *arguments: fused(*arguments, in_blocks, out_blocks)):
        norm, x = copy.deepcopy(reference), image.clone().requires_grad_()
        out = run(norm, x, bias)
        gradients = torch.autograd.grad((out * weight).sum(), [x, norm.weight, norm.bias])
        norm.eval()
        with torch.no_grad():
            results.append([out, *gradients, *(b.float() for b in norm.buffers()), run(norm, x, bias)])
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-4, atol=2e-4)


def test_many_tiles_and_programs():
    """More rows than one program takes, and a last tile that is not full."""
    torch.manual_seed(0)
    norm, image = norm_of(16), torch.randn(2, 1000, 3, 16, device=DEVICE)
    expected = plain(copy.deepcopy(norm), image, None)
    torch.testing.assert_close(fused(norm, image, None, False, False), expected, rtol=1e-4, atol=1e-4)


def test_the_bias_before_it_gets_a_gradient_of_zero():
    bias = torch.zeros(4, device=DEVICE, requires_grad=True)
    out = batch_norm_silu(torch.randn(1, 2, 2, 4, device=DEVICE), norm_of(4), bias, False, False)
    out.square().sum().backward()
    assert torch.equal(bias.grad, torch.zeros_like(bias))


def test_the_operator_is_registered_well():
    x, rows = torch.randn(2, 4, 4, 8, device=DEVICE).requires_grad_(), torch.randn(3, 8, device=DEVICE)
    torch.library.opcheck(torch.ops.mamba_ssm_triton.batch_norm_moments.default, (x.detach(), 8))
    moments = torch.ops.mamba_ssm_triton.batch_norm_moments(x.detach(), 8)
    arguments = (x, *moments, *(row.clone().requires_grad_() for row in rows), 1e-5, 4, 2)
    torch.library.opcheck(torch.ops.mamba_ssm_triton.batch_norm_silu.default, arguments)


def test_what_is_fused():
    norm, rows = nn.BatchNorm2d(4), torch.zeros(1, 2, 2, 4, device=DEVICE)
    assert can_fuse(norm, nn.SiLU(), rows) == ON_GPU
    for other in (nn.BatchNorm2d(4, affine=False), nn.BatchNorm2d(4, momentum=None), nn.Identity()):
        assert not can_fuse(other, nn.SiLU(), rows)
    assert not can_fuse(norm, nn.ReLU(), rows) and not can_fuse(norm, None, rows)
    assert not can_fuse(norm, nn.SiLU(), rows.double())
    norm.eval()
    assert not can_fuse(norm, nn.SiLU(), rows)  # its gradient would be lost
    with torch.no_grad():
        assert can_fuse(norm, nn.SiLU(), rows) == ON_GPU


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("amp", [False, True])
def test_whole_stacks_on_a_gpu(amp):
    """Encoder and decoder of the default size, re-laid and fused, against the plain modules in float64."""
    torch.backends.cudnn.allow_tf32 = False
    sizes = {"image_size": (3, 64, 64), "depth": 16, "mults": [1, 2, 3, 4, 4], "kernel": 5, "padding": "same"}
    stack = {**sizes, "norm": "batch", "act": "SiLU", "first_stride_one": True}
    for module, shape in ((Encoder(**stack), (8, 3, 64, 64)), (Decoder(32, final_sigmoid=True, **stack), (8, 32))):
        exact = copy.deepcopy(module).double().cuda()
        module.cuda().relaid = True
        x = torch.rand(shape, device="cuda", requires_grad=True)
        twin = x.detach().double().requires_grad_()
        with torch.autocast("cuda", torch.bfloat16, enabled=amp):
            out = module(x)
        expected = exact(twin)
        weight = torch.randn_like(expected)
        (out * weight).sum().backward()
        (expected * weight).sum().backward()
        tolerance = 5e-2 if amp else 1e-4
        pairs = {"out": (out, expected), "x": (x.grad, twin.grad)}
        pairs |= {
            name: (p.grad, q.grad)
            for (name, p), q in zip(module.named_parameters(), exact.parameters(), strict=True)
            if q.grad.abs().max() > 1e-9  # biases before a batch norm have none
        }
        pairs |= {name: (b, c) for (name, b), c in zip(module.named_buffers(), exact.buffers(), strict=True)}
        for name, (got, want) in pairs.items():
            error = (got.double() - want.double()).norm() / want.double().norm()
            assert error < tolerance, f"{type(module).__name__} {name}: relative error {error:.2e}"


def test_fused_stacks_become_one_program(monkeypatch):
    """Torch's compiler must take the kernels as they are: looking for Triton while it traces would stop it."""
    torch.manual_seed(0)
    monkeypatch.setattr(sub_models.space_to_depth, "can_fuse", lambda *found: isinstance(found[1], nn.SiLU))
    stack = {"depth": 4, "mults": [1, 2], "kernel": 5, "padding": "same", "norm": "batch", "act": "SiLU"}
    plain_encoder = Encoder((3, 8, 8), first_stride_one=True, **stack).to(DEVICE)
    encoder = copy.deepcopy(plain_encoder)
    encoder.relaid = True
    program = torch.compile(encoder.forward, fullgraph=True, backend="aot_eager")
    image = torch.rand(2, 3, 8, 8, device=DEVICE)
    torch.testing.assert_close(program(image), plain_encoder(image), rtol=1e-4, atol=1e-4)

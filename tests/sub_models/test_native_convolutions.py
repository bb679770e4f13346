"""Convolutions on blocks by the native kernels: values and gradients, emulated on the CPU and on a GPU."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mamba_ssm.ops.triton.launch import INTERPRETED
from sub_models import native_convolutions, space_to_depth
from sub_models.fused_batch_norm import norm_rows
from sub_models.native_convolutions import NO_KERNELS, PLANS, ROWS, convolve, plan_of
from sub_models.space_to_depth import relaid_weight, run_relaid
from sub_models.world_models import Decoder, Encoder

ON_GPU = torch.cuda.is_available()
needs_kernels = pytest.mark.skipif(
    not ON_GPU or NO_KERNELS is not None, reason="needs a CUDA device and the native extension"
)
interpreted = pytest.mark.skipif(not INTERPRETED, reason="operators on a CPU are those of Triton's interpreter")
CASES = [pytest.param(*case, id=f"{case[0].__name__}-{case[1]}-{case[2]}") for case in PLANS]


def has_sums(case):
    """Whether the gradient of x comes with the sums of a norm before."""
    return PLANS[case.values][1][1] is not None


def made(kind, channels_in, channels_out, stride):
    torch.manual_seed(0)
    extra = {"output_padding": stride - 1} if kind is nn.ConvTranspose2d else {}
    return kind(channels_in, channels_out, 5, stride, 2, **extra)


def filled(x, dim):
    """With channels of zeros up to a multiple of 8."""
    spare = -x.shape[dim] % 8
    return torch.cat((x, x.new_zeros([spare if i == dim else size for i, size in enumerate(x.shape)])), dim)


def relative_error(got, expected):
    return ((got.double() - expected).norm() / expected.norm()).item()


def check_a_plan(layer, side, plan, frames, device):
    """y and both gradients against float64 of the same bfloat16 numbers: nothing but one rounding may differ."""
    weight = relaid_weight(layer).detach()
    channels_out, channels_in = weight.shape[:2]
    weight = filled(filled(weight, 0), 1).bfloat16().to(device)
    x = filled(torch.randn(frames, side, side, channels_in), 3).bfloat16().to(device)
    grad = filled(torch.randn(frames, side, side, channels_out), 3).bfloat16().to(device)
    results = []
    for run, dtype in ((lambda x, w: convolve(x, w, plan)[0], torch.bfloat16), (exact, torch.float64)):
        a, b = (t.to(dtype).requires_grad_() for t in (x, weight))
        y = run(a, b)
        dx, dw = torch.autograd.grad(y, (a, b), grad.to(dtype))
        dw = dw * (weight != 0)  # the rest is always zero in the weight and gets no gradient from the layer's own
        results.append([y, dx[..., :channels_in], dw[:channels_out, :channels_in]])
    for got, expected in zip(*results, strict=True):
        assert relative_error(got, expected) < 3e-3
    y, moments, _ = convolve(x, weight, plan, moments=True)
    assert torch.equal(y, results[0][0])
    if plan[0] in ("strided", "spread", "from_colours"):
        check_moments(moments, results[1][0].reshape(-1, layer.out_channels))
    else:
        assert moments is None


def check_moments(moments, pixels):
    variance, mean = torch.var_mean(pixels, dim=0, correction=0)
    for got, expected in zip(moments, (mean, variance), strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)


def check_after_a_norm(layer, side, plan, frames, device, tolerance):
    """y = conv(silu(norm(x))) and the gradients of x, of the norm and of the weight against float64."""
    weight = filled(filled(relaid_weight(layer).detach(), 0), 1).bfloat16().to(device)
    takes_blocks = weight.shape[1] == 4 * layer.in_channels
    norm = nn.BatchNorm2d(layer.in_channels, device=device)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    pixels = 2 * side if takes_blocks else side
    image = 2 * torch.randn(frames, pixels, pixels, layer.in_channels) + torch.randn(layer.in_channels)
    in_blocks = (layer.in_channels, layer.out_channels) != (32, 48)  # what the convolution before puts out
    came = (space_to_depth.space_to_depth(image) if in_blocks else image).bfloat16().to(device)
    grad = filled(torch.randn(frames, side, side, weight.shape[0]), 3).bfloat16().to(device)
    results = []
    for exactly in (False, True):
        dtype = torch.float64 if exactly else torch.bfloat16
        twin = copy.deepcopy(norm).to(torch.float64 if exactly else torch.float32)
        x, w = (t.to(dtype).requires_grad_() for t in (came, weight))
        if exactly:
            lines = space_to_depth.depth_to_space(x) if in_blocks else x
            a = F.silu(twin(lines.permute(0, 3, 1, 2))).permute(0, 2, 3, 1)
            y = exact(space_to_depth.space_to_depth(a) if takes_blocks else a, w)
        else:
            a, normed = norm_rows(x, twin, None, in_blocks, takes_blocks)
            y = convolve(a, w, plan, normed=normed).rows
            assert "after_norm" in y.grad_fn.name()
        dx, dw, *of_norm = torch.autograd.grad(y, (x, w, twin.weight, twin.bias), grad.to(dtype))
        results.append([y, dx, dw * (weight != 0), *of_norm])
    for got, expected in zip(*results, strict=True):
        assert relative_error(got, expected) < tolerance


def exact(x, weight):
    return F.conv2d(x.permute(0, 3, 1, 2), weight, padding=1).permute(0, 2, 3, 1)


@interpreted
@pytest.mark.parametrize(("kind", "channels_in", "channels_out", "stride"), CASES)
def test_emulated_kernels(emulated_convolutions, kind, channels_in, channels_out, stride):
    side, plan = PLANS[kind, channels_in, channels_out, stride]
    check_a_plan(made(kind, channels_in, channels_out, stride), side, plan, 1, "cpu")


@interpreted
@pytest.mark.parametrize(("kind", "channels_in", "channels_out", "stride"), [case for case in CASES if has_sums(case)])
def test_emulated_kernels_after_a_norm(emulated_convolutions, kind, channels_in, channels_out, stride):
    side, plan = PLANS[kind, channels_in, channels_out, stride]
    check_after_a_norm(made(kind, channels_in, channels_out, stride), side, plan, 1, "cpu", 1e-2)


def first_layers():
    """An image of colours, two convolutions and the norm between them, whose gradients are made together."""
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(16)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    return nn.Sequential(made(nn.Conv2d, 3, 16, 1), norm, nn.SiLU(), made(nn.Conv2d, 16, 32, 2))


def check_first_layers(device, frames, tolerance):
    stack, image = first_layers().to(device), torch.rand(frames, 3, 64, 64, device=device)
    exact_stack = copy.deepcopy(stack).double()
    expected = exact_stack(image.double())
    weight = torch.randn_like(expected)
    (expected * weight).sum().backward()
    out = run_relaid(stack, image)
    (out * weight).sum().backward()
    for (name, p), q in zip(stack.named_parameters(), exact_stack.parameters(), strict=True):
        if name == "0.bias":  # cancels in the norm
            assert torch.equal(p.grad, torch.zeros_like(p))
        else:
            assert relative_error(p.grad, q.grad) < tolerance, name
    return out


@interpreted
def test_emulated_first_layers(emulated_convolutions, monkeypatch):
    def plan(layer, rows):
        return PLANS[type(layer), layer.in_channels, layer.out_channels, layer.stride[0]][1]

    monkeypatch.setattr(space_to_depth, "plan_of", plan)
    monkeypatch.setattr(space_to_depth, "can_fuse", lambda *found: isinstance(found[1], nn.SiLU))
    out = check_first_layers("cpu", 1, 3e-2)
    names, nodes = set(), [out.grad_fn]
    while nodes:
        node = nodes.pop()
        names.add(node.name())
        nodes += [parent for parent, _ in node.next_functions if parent is not None]
    assert {name for name in names if "convolution" in name} == {"convolution_after_normBackward"}


@interpreted
@pytest.mark.parametrize("with_norm", [False, True])
def test_emulated_kernels_in_a_stack(emulated_convolutions, monkeypatch, with_norm):
    """They take the places of the plain layers, in one program of torch's compiler."""

    def plan(layer, rows):
        side, plan = PLANS.get((type(layer), layer.in_channels, layer.out_channels, layer.stride[0]), (0, None))
        return plan if rows.shape[1] == side else None

    monkeypatch.setattr(space_to_depth, "plan_of", plan)
    between = (nn.BatchNorm2d(16), nn.SiLU()) if with_norm else (nn.Tanh(),)
    monkeypatch.setattr(space_to_depth, "can_fuse", lambda *found: isinstance(found[1], nn.SiLU))
    stack = nn.Sequential(made(nn.Conv2d, 3, 16, 1), *between, made(nn.ConvTranspose2d, 16, 3, 1))
    twin, image = copy.deepcopy(stack), torch.rand(1, 3, 64, 64)
    expected = torch.autograd.grad(stack(image).square().sum(), list(stack.parameters()))
    program = torch.compile(run_relaid, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(program(list(twin), image).float().square().sum(), list(twin.parameters()))
    for (name, _), a, b in zip(stack.named_parameters(), got, expected, strict=True):
        if not (with_norm and name == "0.bias"):  # cancels in the norm
            assert relative_error(a, b.double()) < 2e-2, name
    for got, expected in zip(twin.buffers(), stack.buffers(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)


@interpreted
def test_the_operator_is_registered_well(emulated_convolutions):
    """The smallest case, whose every part has or has not a kernel."""
    x, weight = (torch.randn(shape).bfloat16().requires_grad_() for shape in ((1, 16, 16, 128), (48, 128, 3, 3)))
    operator = torch.ops.mamba_ssm_triton.convolution_of_blocks.default
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    for kernel, moments in (("", False), ("strided", False), ("strided", True)):
        rows = ROWS[kernel](weight.detach()) if kernel else None
        torch.library.opcheck(operator, (x, weight, rows, kernel, "", "", moments), test_utils=tests)


def test_an_extension_for_weights_in_another_order_is_refused(emulated_convolutions, monkeypatch):
    """Its kernels would compute something else without a word."""
    monkeypatch.setattr(native_convolutions._native, "why_not", lambda device: None)
    order = native_convolutions.WEIGHTS_ORDER
    if not hasattr(torch.ops.drama_native, "weights_order"):
        emulated_convolutions.define("weights_order() -> int")
        emulated_convolutions.impl("weights_order", lambda: order, "CompositeExplicitAutograd")
    assert native_convolutions.why_not() is None
    monkeypatch.setattr(native_convolutions, "WEIGHTS_ORDER", order + 1)
    assert "older than its convolutions" in native_convolutions.why_not()


def test_no_plan_without_a_gpu():
    assert plan_of(made(nn.Conv2d, 3, 16, 1), torch.zeros(1, 32, 32, 16)) is None


@pytest.mark.gpu
@needs_kernels
@pytest.mark.parametrize("frames", [1, 133, 300])
@pytest.mark.parametrize(("kind", "channels_in", "channels_out", "stride"), CASES)
def test_kernels_on_a_gpu(kind, channels_in, channels_out, stride, frames):
    layer = made(kind, channels_in, channels_out, stride)
    side, plan = PLANS[kind, channels_in, channels_out, stride]
    with torch.autocast("cuda", torch.bfloat16):
        if plan_of(layer, torch.zeros(1, side, side, 8, device="cuda")) is None:
            pytest.skip("this GPU has too little shared memory")
    check_a_plan(layer, side, plan, frames, "cuda")


@pytest.mark.gpu
@needs_kernels
@pytest.mark.parametrize("frames", [2, 133])
@pytest.mark.parametrize(("kind", "channels_in", "channels_out", "stride"), [case for case in CASES if has_sums(case)])
def test_kernels_after_a_norm_on_a_gpu(kind, channels_in, channels_out, stride, frames):
    side, plan = PLANS[kind, channels_in, channels_out, stride]
    check_after_a_norm(made(kind, channels_in, channels_out, stride), side, plan, frames, "cuda", 6e-3)


@pytest.mark.gpu
@needs_kernels
def test_first_layers_on_a_gpu():
    with torch.autocast("cuda", torch.bfloat16):
        check_first_layers("cuda", 37, 3e-2)


@pytest.mark.gpu
@needs_kernels
def test_when_there_is_a_plan():
    layer, rows = made(nn.Conv2d, 16, 32, 2), torch.zeros(1, 32, 32, 64, device="cuda")
    assert plan_of(layer, rows) is None  # float32
    with torch.autocast("cuda", torch.float16):
        assert plan_of(layer, rows) is None
    with torch.autocast("cuda", torch.bfloat16):
        assert plan_of(layer, rows[:, :16]) is None
        assert plan_of(nn.Conv2d(16, 32, 3, 2, 1), rows) is None


@pytest.mark.gpu
@needs_kernels
@pytest.mark.parametrize("compile_them", [False, True])
def test_whole_stacks_on_a_gpu(monkeypatch, compile_them):
    """Losses and gradients with and without the kernels differ by bfloat16's rounding alone."""
    torch.manual_seed(0)
    sizes = {"image_size": (3, 64, 64), "depth": 16, "mults": [1, 2, 3, 4, 4], "kernel": 5, "padding": "same"}
    stack = {**sizes, "norm": "batch", "act": "SiLU", "first_stride_one": True}
    encoder, decoder = Encoder(**stack).cuda(), Decoder(32, final_sigmoid=True, **stack).cuda()
    encoder.relaid = decoder.relaid = True
    image, stoch = torch.rand(40, 3, 64, 64, device="cuda"), torch.rand(40, 32, device="cuda")

    def loss(encoder, decoder):
        return encoder(image).float().square().mean() + (decoder(stoch).float() - image).square().mean()

    results = []
    for plan in (plan_of, lambda *_: None):
        monkeypatch.setattr(space_to_depth, "plan_of", plan)
        torch.compiler.reset()
        run = torch.compile(loss, fullgraph=True, backend="aot_eager") if compile_them else loss
        twins = copy.deepcopy(encoder), copy.deepcopy(decoder)
        with torch.autocast("cuda", torch.bfloat16):
            value = run(*twins)
        value.backward()
        grads = {name: p.grad for twin in twins for name, p in twin.named_parameters() if name.endswith("weight")}
        results.append({"loss": value.detach(), **grads})
    for name, got in results[0].items():
        assert relative_error(got, results[1][name].double()) < 6e-2, name

"""The kernels of all norms (interpreted on a CPU) against the references in float64, outputs and gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_ssm.ops.triton.layer_norm import RMSNorm, _layer_norm_reference
from mamba_ssm.ops.triton.layernorm_gated import _gated_norm_reference
from mamba_ssm.testing import FORWARD_TOLERANCE, GRADIENT_TOLERANCE, NoHostSync, assert_close, compare

kernels = pytest.importorskip("mamba_ssm.ops.triton.norm_kernels", exc_type=ImportError)
sum_kernels = pytest.importorskip("mamba_ssm.ops.triton.sum_kernels", exc_type=ImportError)

pytestmark = pytest.mark.usefixtures("interpreted_loops")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def draw(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype).requires_grad_()


def layer_norm_with(function, prenorm=False, in_fp32=False, centred=False, rms=False, activation=None):
    """`function` as one of x, weight, bias, residual and shift."""

    def norm(x, weight, bias, residual, shift=None):
        return function(
            x, weight, bias, residual, None, None, None, 1e-6, 0.0, None, prenorm, in_fp32, centred, rms, activation,
            shift,
        )  # fmt: skip

    return norm


def gated_norm_with(function, group_size=None, norm_before_gate=True, rms=True):
    def norm(x, weight, bias, z):
        return function(x, weight, bias, z, 1e-6, group_size, norm_before_gate, rms)

    return norm


def check(with_options, kernel, reference, inputs, dtype, **options):
    forward, backward = FORWARD_TOLERANCE[dtype], GRADIENT_TOLERANCE[dtype]
    compare(with_options(kernel, **options), with_options(reference, **options), inputs, forward, backward)


def check_layer_norm(inputs, dtype=torch.float32, **options):
    check(layer_norm_with, kernels.layer_norm, _layer_norm_reference, inputs, dtype, **options)


def check_gated_norm(inputs, dtype=torch.float32, **options):
    check(gated_norm_with, kernels.gated_norm, _gated_norm_reference, inputs, dtype, **options)


def layer_norm_inputs(shape, residual=True, bias=True, dtype=torch.float32, residual_dtype=torch.float32):
    return {
        "x": draw(*shape, dtype=dtype), "weight": draw(shape[-1]), "bias": draw(shape[-1], seed=1) if bias else None,
        "residual": draw(*shape, dtype=residual_dtype, seed=2) if residual else None,
    }  # fmt: skip


def gated_norm_inputs(shape, gated=True, bias=True, dtype=torch.float32):
    return {
        "x": draw(*shape, dtype=dtype), "weight": draw(shape[-1]), "bias": draw(shape[-1], seed=1) if bias else None,
        "z": draw(*shape, dtype=dtype, seed=2) if gated else None,
    }  # fmt: skip


@settings(max_examples=30, deadline=None)
@given(
    shape=st.sampled_from([(3, 7), (1, 64), (2, 3, 17), (40, 12)]), residual=st.booleans(), bias=st.booleans(),
    shifted=st.booleans(), prenorm=st.booleans(), in_fp32=st.booleans(), centred=st.booleans(), rms=st.booleans(),
    activation=st.sampled_from([None, "silu"]),
)  # fmt: skip
def test_layer_norm(shape, residual, bias, shifted, **options):
    t = layer_norm_inputs(shape, residual, bias)
    check_layer_norm(t | {"shift": draw(shape[-1], seed=3)} if shifted else t, **options)


@settings(max_examples=20, deadline=None)
@given(
    shape=st.sampled_from([(3, 24), (2, 3, 60), (40, 30)]), groups=st.sampled_from([None, 1, 2, 3]),
    gated=st.booleans(), bias=st.booleans(), norm_before_gate=st.booleans(), rms=st.booleans(),
)  # fmt: skip
def test_gated_norm(shape, groups, gated, bias, norm_before_gate, rms):
    group_size = None if groups is None else shape[-1] // groups
    inputs = gated_norm_inputs(shape, gated, bias)
    check_gated_norm(inputs, group_size=group_size, norm_before_gate=norm_before_gate, rms=rms)


@pytest.mark.parametrize("where", ["kernels", "sum_kernels"])
def test_many_rows_for_each_program(monkeypatch, where):
    """Sums over rows that one program takes in several blocks, and those of several programs, in one or more blocks."""
    monkeypatch.setattr(kernels if where == "kernels" else sum_kernels, "PROGRAMS", 2)
    monkeypatch.setattr(kernels, "LEAST_BLOCKS", 1)
    check_layer_norm(layer_norm_inputs((83, 9)) | {"shift": draw(9, seed=3)}, prenorm=True)
    check_gated_norm(gated_norm_inputs((83, 12)), group_size=6)


@pytest.mark.parametrize("residual_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_fp32", [False, True])
def test_low_precision_and_dtypes(residual_dtype, in_fp32):
    t = layer_norm_inputs((6, 64), dtype=torch.bfloat16, residual_dtype=residual_dtype)
    check_layer_norm(t, torch.bfloat16, prenorm=True, in_fp32=in_fp32, rms=True)
    out, stream = layer_norm_with(kernels.layer_norm, prenorm=True, in_fp32=in_fp32)(**t)
    assert (out.dtype, stream.dtype) == (torch.bfloat16, torch.float32 if in_fp32 else residual_dtype)
    grads = torch.autograd.grad(out.sum() + stream.sum(), list(t.values()))
    assert [g.dtype for g in grads] == [v.dtype for v in t.values()]
    check_gated_norm(gated_norm_inputs((6, 64), dtype=torch.bfloat16), torch.bfloat16, group_size=32)


def test_views_and_expanded_gradients():
    """Slices of a wider row, transposed rows, and a cotangent that expand made."""
    wide = draw(4, 30).detach()
    t = gated_norm_inputs((4, 10))
    for x, z in ((wide[:, :10], wide[:, 20:]), (wide[:, ::3], wide.t().contiguous().t()[:, :10])):
        check_gated_norm({**t, "x": x.requires_grad_(), "z": z.requires_grad_()})
    x = draw(4, 10)
    kernels.layer_norm(x, *list(layer_norm_inputs((4, 10)).values())[1:], *[None] * 3, 1e-6, 0.0, None, *[False] * 4)\
        .sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("shape", [(0, 5), (2, 0, 3), (0, 1)])
def test_no_rows(shape):
    check_layer_norm(layer_norm_inputs(shape), prenorm=True)
    check_gated_norm(gated_norm_inputs(shape))


def test_rest_goes_to_the_reference():
    """float64, dropout, a second branch, a factor for each row, and rows wider than registers hold."""
    x, w = draw(3, 4), draw(4)
    rest = (1e-6, 0.0, None, False, False, False, True)
    assert kernels.layer_norm(x.double(), w.double(), None, None, None, None, None, *rest).dtype == torch.float64
    out, second = kernels.layer_norm(x, w, None, None, x, w, None, *rest)
    assert_close(out, second, 0.0)
    scaled = kernels.layer_norm(x, w, None, None, None, None, None, 1e-6, 0.0, draw(3), *rest[3:])
    assert_close(scaled.abs(), kernels.layer_norm(x, w, None, None, None, None, None, *rest).abs(), 1e-4)
    wide = draw(1, kernels.MAX_CHANNELS + 1)
    assert kernels.gated_norm(wide, wide[0], None, None, 1e-6, None, True, True).isfinite().all()


def test_unused_outputs_and_frozen_inputs():
    """Only the stream is used; only the weight wants a gradient."""
    t = layer_norm_inputs((3, 8))
    _, stream = layer_norm_with(kernels.layer_norm, prenorm=True)(**t)
    grads = torch.autograd.grad(stream.sum(), [t["x"], t["residual"]])
    assert all(torch.equal(g, torch.ones_like(g)) for g in grads)
    t = {name: value.detach() for name, value in t.items()} | {"weight": draw(8)}
    out = layer_norm_with(kernels.layer_norm)(**t)
    (grad,) = torch.autograd.grad(out.sum(), [t["weight"]])
    assert grad.isfinite().all()


def test_registration():
    t = layer_norm_inputs((5, 12), dtype=torch.bfloat16)
    torch.library.opcheck(kernels.run_norm, (*t.values(), None, None, 1e-6, 1, True, False, True, 0, torch.float32))
    t = gated_norm_inputs((5, 12))
    options = (1e-6, 2, False, False, False, kernels.GATE_FIRST, None)
    torch.library.opcheck(kernels.run_norm, (t["x"], t["weight"], t["bias"], None, t["z"], None, *options))


def test_no_host_sync():
    with NoHostSync():
        layer_norm_with(kernels.layer_norm)(**layer_norm_inputs((3, 8))).sum().backward()


def test_module_with_an_activation():
    x = draw(3, 8)
    plain, fused = RMSNorm(8, device=DEVICE), RMSNorm(8, activation="silu", device=DEVICE)
    assert_close(fused(x), torch.nn.functional.silu(plain(x)), 1e-6)
    with pytest.raises(ValueError, match="activation is 'relu', expected one of None, 'silu', 'swish'"):
        RMSNorm(8, activation="relu")


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 8), (2048, 512), (16, 128, 512), (1024, 512), (3, 257), (777, 96), (5, 16384)])
@pytest.mark.parametrize("rms", [False, True])
def test_layer_norm_on_a_gpu(dtype, shape, rms):
    for residual, prenorm, activation in ((False, False, None), (False, False, "silu"), (True, True, None)):
        t = layer_norm_inputs(shape, residual, dtype=dtype)
        check_layer_norm(t, dtype, prenorm=prenorm, in_fp32=True, rms=rms, activation=activation)
    t = layer_norm_inputs(shape, residual=False, bias=False, dtype=dtype) | {"shift": draw(shape[-1], seed=3)}
    check_layer_norm(t, dtype, rms=rms, activation="silu")


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape, group_size", [((2048, 1024), None), ((16, 128, 1024), 256), ((33, 1536), 24)])
@pytest.mark.parametrize("norm_before_gate", [False, True])
def test_gated_norm_on_a_gpu(dtype, shape, group_size, norm_before_gate):
    for rms in (False, True):
        t = gated_norm_inputs(shape, dtype=dtype)
        check_gated_norm(t, dtype, group_size=group_size, norm_before_gate=norm_before_gate, rms=rms)


@gpu
@pytest.mark.gpu
def test_compiled_and_captured():
    """One graph for the compiler, and the same numbers from a CUDA graph; backward gives the same bits twice."""
    t = layer_norm_inputs((2048, 512), dtype=torch.bfloat16)
    norm = layer_norm_with(kernels.layer_norm, prenorm=True, in_fp32=True, rms=True)

    def step(function):
        out, stream = function(**t)
        return torch.autograd.grad((out.float().square() + stream).sum(), list(t.values()))

    eager, again = step(norm), step(norm)
    compiled = step(torch.compile(norm, fullgraph=True))
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(norm)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = step(norm)
    graph.replay()
    for one, same, other, replayed in zip(eager, again, compiled, captured, strict=True):
        assert torch.equal(one, same)
        assert torch.equal(one, replayed)
        assert_close(other, one, 1e-6)

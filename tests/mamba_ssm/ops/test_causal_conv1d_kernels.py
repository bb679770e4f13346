"""The kernels of the causal convolution (interpreted on a CPU) against the reference in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_ssm.ops.causal_conv1d import _conv_reference, _update_reference
from mamba_ssm.testing import FORWARD_TOLERANCE, GRADIENT_TOLERANCE, NoHostSync, assert_close, compare, in_case

kernels = pytest.importorskip("mamba_ssm.ops.triton.causal_conv1d_kernels", exc_type=ImportError)

pytestmark = pytest.mark.usefixtures("interpreted_loops")
LENGTHS = (1, 2, 3, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000, 2048, 4099)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def draw(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)


def conv_inputs(
    batch=2, channels=5, length=9, width=4, bias=True, initial=False, pieces=False, last=False, dtype=torch.float32,
    seed=0,
):  # fmt: skip
    """`last`: channels are adjacent in memory, beside others of a wider row, as projections leave them."""
    x = draw(batch, length, 3 + channels, dtype=dtype, seed=seed)[:, :, 3:].transpose(1, 2)
    starts = torch.rand(batch, length, generator=torch.Generator().manual_seed(seed)) < 0.3
    entering = draw(batch, channels, width - 1, dtype=dtype, seed=seed).requires_grad_() if initial else None
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return {
        "x": (x if last else x.contiguous()).requires_grad_(),
        "weight": draw(channels, width, dtype=wide, seed=seed).requires_grad_(),
        "bias": draw(channels, dtype=wide, seed=seed + 1).requires_grad_() if bias else None,
        "seq_idx": (starts.cumsum(dim=1) % 3).int().to(DEVICE) if pieces else None,
        "initial_states": entering,
    }  # fmt: skip


def check_conv(inputs, activation=None):
    """Outputs with the final states, and the gradient of every input."""
    dtype = inputs["x"].dtype
    both = [lambda f=f, **t: f(*t.values(), True, activation) for f in (kernels.causal_conv1d, _conv_reference)]
    compare(*both, inputs, FORWARD_TOLERANCE[dtype], GRADIENT_TOLERANCE[dtype])


@settings(max_examples=10, deadline=None)
@given(
    length=st.sampled_from([1, 2, 9]), width=st.integers(1, 4), bias=st.booleans(), initial=st.booleans(),
    pieces=st.booleans(), last=st.booleans(), activation=st.sampled_from([None, "silu"]), seed=st.integers(0, 99),
)  # fmt: skip
def test_conv(length, width, bias, initial, pieces, last, activation, seed):
    check_conv(conv_inputs(1, 5, length, width, bias, initial, pieces, last, seed=seed), activation)


@pytest.mark.parametrize("last", [False, True])
def test_conv_over_several_tiles(monkeypatch, last):
    """Boundaries of tiles, of programs that take several, and of the channels."""
    monkeypatch.setattr(kernels, "PROGRAMS", 1)
    for name, tile in (("CHANNELS_FIRST", (4, 4)), ("CHANNELS_LAST", (8, 2)), ("CHANNELS_LAST_SUMS", (2, 4))):
        monkeypatch.setattr(kernels, name, tile)
    check_conv(conv_inputs(1, 5, 11, initial=True, pieces=True, last=last), "silu")


def test_conv_leaves_the_rest_to_the_reference():
    check_conv(conv_inputs(width=6))
    check_conv(conv_inputs(dtype=torch.float64, pieces=True), "silu")


@pytest.mark.parametrize("shape", [(0, 5, 3), (2, 5, 0)])
def test_conv_of_nothing(shape):
    t = conv_inputs(*shape, initial=True)
    out, final = kernels.causal_conv1d(*t.values(), True, "silu")
    assert out.shape == shape
    assert torch.equal(final, t["initial_states"])
    (grad,) = torch.autograd.grad(out.sum(), [t["weight"]])
    assert not grad.any()


def test_conv_in_low_precision_keeps_the_layout():
    t = conv_inputs(last=True, pieces=True, dtype=torch.bfloat16)
    check_conv(t, "silu")
    out = kernels.causal_conv1d(*t.values(), False, "silu")
    assert (out.dtype, out.stride(1)) == (torch.bfloat16, 1)


def test_conv_registration_and_no_host_sync():
    t = conv_inputs(1, 3, 5, 2, initial=True, pieces=True, last=True)
    torch.library.opcheck(kernels.run_conv, (*t.values(), True))
    with NoHostSync():
        kernels.causal_conv1d(*t.values(), False, "silu").sum().backward()


@torch.no_grad()
def check_update(x, window, weight, bias, activation, tolerance):
    moved, wide = window.clone(memory_format=torch.preserve_format), window.double()
    out = kernels.causal_conv1d_update(x, moved, weight, bias, activation)
    want = _update_reference(x.double(), wide, weight.double(), None if bias is None else bias.double(), activation)
    assert out.dtype == x.dtype
    assert_close(out, want, tolerance)
    assert_close(moved, wide, FORWARD_TOLERANCE[window.dtype] if window.dtype != x.dtype else 0.0, "conv_state")


@settings(max_examples=20, deadline=None)
@given(
    batch=st.sampled_from([0, 1, 3]), channels=st.sampled_from([1, 5, 300]),
    width_window=st.sampled_from([(2, 1), (2, 2), (3, 5), (4, 3), (4, 4)]), bias=st.booleans(),
    activation=st.sampled_from([None, "silu"]), trailing=st.booleans(), transposed=st.booleans(),
)  # fmt: skip
def test_update(batch, channels, width_window, bias, activation, trailing, transposed):
    width, window = width_window
    x = draw(batch, 2 * channels)[:, channels:]
    x = x.unsqueeze(2) if trailing else x
    state = draw(batch, window, channels).mT if transposed else draw(batch, channels, window)
    b = draw(channels, seed=1) if bias else None
    check_update(x, state, draw(channels, width), b, activation, FORWARD_TOLERANCE[torch.float32])


def test_update_leaves_the_rest_to_the_reference():
    """Several rows at a time, float64, and a wanted gradient."""
    x, state, weight = draw(2, 3, 4), draw(2, 3, 4), draw(3, 4)
    check_update(x, state, weight, None, "silu", FORWARD_TOLERANCE[torch.float32])
    check_update(x[..., 0].double(), state.double(), weight.double(), None, None, 1e-14)
    kernels.causal_conv1d_update(x[..., 0], state, weight.requires_grad_(), None, None).sum().backward()
    assert weight.grad.abs().sum() > 0


def test_registration_of_the_update():
    torch.library.opcheck(kernels.run_update, (draw(2, 5), draw(2, 5, 4), draw(5, 4), draw(5), True))


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("batch, channels", [(1, 1056), (2, 33), (16, 1024), (1024, 1056)])
def test_update_on_a_gpu(dtype, batch, channels):
    for width in (2, 3, 4):
        state, weight = draw(batch, channels, width), draw(channels, width)
        x, bias = draw(batch, channels, dtype=dtype), draw(channels)
        check_update(x, state, weight, bias, "silu", FORWARD_TOLERANCE[dtype])


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("pieces, initial", [(False, False), (True, True)])
def test_conv_on_a_gpu(dtype, last, pieces, initial):
    """Many lengths, for which kernels are built once."""
    shapes = ((16, 1056, 128), (2, 96, 1), (1, 33, 17), (3, 64, 65), (2, 64, 1000), (1, 48, 4099))
    for batch, channels, length in shapes:
        t = conv_inputs(batch, channels, length, initial=initial, pieces=pieces, last=last, dtype=dtype)
        check_conv(t, "silu")
    for width, bias in ((2, True), (3, False)):
        t = conv_inputs(2, 64, 100, width, bias, initial, pieces, last, dtype)
        check_conv(t, None)


@gpu
@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("initial", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_conv_grid(width, bias, initial, pieces, last, dtype):
    """Every length with every subset of arguments. Sizes and activations take turns, others in each subset: for all of
    them at each length three times as many kernels would be built."""
    turn = width + bias + initial + pieces + last
    for number, length in enumerate(LENGTHS):
        batch, channels = ((1, 33), (2, 96), (16, 64) if length <= 257 else (2, 48))[(number + turn) % 3]
        activation = (None, "silu")[(number // 2 + turn) % 2]
        with in_case(f"batch {batch}, {channels} channels, length {length}, {activation}"):
            check_conv(conv_inputs(batch, channels, length, width, bias, initial, pieces, last, dtype), activation)


@gpu
@pytest.mark.gpu
def test_conv_compiled_and_captured():
    """One graph for the compiler, the same bits from a CUDA graph, and from another run."""
    t = conv_inputs(16, 1056, 128, pieces=True, last=True, dtype=torch.bfloat16)
    needing = [value for value in t.values() if value is not None and value.requires_grad]

    def conv(x, weight, bias, seq_idx, initial_states):
        return kernels.causal_conv1d(x, weight, bias, seq_idx, initial_states, False, "silu")

    def step(function):
        return torch.autograd.grad(function(**t).float().square().sum(), needing)

    eager, again, compiled = step(conv), step(conv), step(torch.compile(conv, fullgraph=True))
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(conv)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = step(conv)
    graph.replay()
    for one, same, other, replayed in zip(eager, again, compiled, captured, strict=True):
        assert torch.equal(one, same)
        assert torch.equal(one, replayed)
        assert_close(other, one, 1e-3)

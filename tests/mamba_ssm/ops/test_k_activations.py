"""Activations against their formulas; their kernels (interpreted on a CPU) against the references in float64."""

import pytest
import torch
import torch.nn.functional as F

from mamba_ssm.ops.triton.k_activations import _squared_relu_reference, _swiglu_reference, squared_relu, swiglu
from mamba_ssm.testing import FORWARD_TOLERANCE, GRADIENT_TOLERANCE, NoHostSync, assert_close, compare

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def kernels():
    return pytest.importorskip("mamba_ssm.ops.triton.k_activations_kernels", exc_type=ImportError)


def test_swiglu_of_two_and_of_one():
    x, y = torch.randn(2, 3, 4, dtype=torch.float64).unbind(0)
    assert_close(swiglu(x, y), F.silu(x) * y, 1e-14)
    assert_close(swiglu(torch.cat([x, y], dim=-1)), F.silu(x) * y, 1e-14)
    t = (x.clone().requires_grad_(), y.clone().requires_grad_())
    assert torch.autograd.gradcheck(swiglu, t)
    assert swiglu(x.bfloat16(), y.bfloat16()).dtype == torch.bfloat16


def test_squared_relu():
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert_close(squared_relu(x), torch.where(x > 0, x * x, 0.0), 1e-14)
    assert torch.autograd.gradcheck(squared_relu, (x,))


def draw(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype).requires_grad_()


def check_kernels(kernels, x, y, dtype):
    forward, backward = FORWARD_TOLERANCE[dtype], GRADIENT_TOLERANCE[dtype]
    compare(kernels.swiglu, _swiglu_reference, {"x": x, "y": y}, forward, backward)
    compare(kernels.squared_relu, _squared_relu_reference, {"x": x}, forward, backward)


@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 1030), (7,), (0, 4), (4, 0), (2, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_kernels(kernels, shape, dtype):
    check_kernels(kernels, draw(*shape, dtype=dtype), draw(*shape, dtype=dtype, seed=1), dtype)


def test_kernels_take_halves_of_rows_and_transposed_ones(kernels):
    rows = draw(6, 10).detach()
    for x, y in (rows.chunk(2, dim=-1), (rows[:, :6].t(), rows[:, 4:].t())):
        check_kernels(kernels, x.requires_grad_(), y.requires_grad_(), torch.float32)


def test_registration_and_no_host_sync(kernels):
    torch.library.opcheck(kernels.run_activation, (draw(3, 5), draw(3, 5, seed=1)))
    torch.library.opcheck(kernels.run_activation, (draw(3, 5), None))
    with NoHostSync():
        kernels.swiglu(draw(3, 5), draw(3, 5)).sum().backward()


@pytest.mark.parametrize("call, error, message", [
    (lambda: swiglu(torch.zeros(2, 4), torch.zeros(2, 3)), ValueError, r"y has shape \(2, 3\), expected like x"),
    (lambda: swiglu(torch.zeros(2, 3)), ValueError, r"x has shape \(2, 3\), expected \(..., 2D\) without y"),
    (lambda: squared_relu(torch.zeros(2, dtype=torch.int32)), TypeError, "x has dtype torch.int32"),
])  # fmt: skip
def test_wrong_arguments_are_refused_by_name(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_kernels_on_a_gpu(kernels, dtype):
    check_kernels(kernels, draw(2048, 1408, dtype=dtype), draw(2048, 1408, dtype=dtype, seed=1), dtype)
    for function, count in ((swiglu, 2), (squared_relu, 1)):
        rows = [draw(64, 100, dtype=dtype, seed=i) for i in range(count)]
        assert_close(torch.compile(function, fullgraph=True)(*rows), function(*rows), FORWARD_TOLERANCE[dtype])

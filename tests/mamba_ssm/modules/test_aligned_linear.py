"""Zeros that fill a layer up change neither outputs nor gradients."""

import pytest
import torch

from mamba_ssm.modules.aligned_linear import AlignedLinear


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("d_in", "d_out"), [(5, 3), (8, 3), (5, 16), (8, 8)])
def test_padded_equals_plain(d_in, d_out, bias):
    torch.manual_seed(0)
    layer = AlignedLinear(d_in, d_out, bias=bias).double()
    x = torch.randn(4, 2, d_in, dtype=torch.float64, requires_grad=True)
    inputs = [x, *layer.parameters()]
    plain, padded = layer(x), layer.padded(x, -d_in % 8, -d_out % 8)
    torch.testing.assert_close(padded, plain, rtol=1e-12, atol=1e-12)
    expected = torch.autograd.grad(plain.square().sum(), inputs)
    for got, want in zip(torch.autograd.grad(padded.square().sum(), inputs), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_it_is_still_the_layer():
    layer = AlignedLinear(1027, 255, device="cuda")
    x = torch.randn(64, 1027, device="cuda")
    expected = torch.nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double())
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-3, atol=1e-3)

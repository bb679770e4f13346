"""Loss and value of the two-hot code by kernels, against the plain form in float64."""

import math

import pytest
import torch

from sub_models.functions_losses import SymlogTwoHot
from sub_models.two_hot_kernels import run_decode, run_loss

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU the kernels run through Triton's interpreter
TARGETS = torch.tensor([0.0, 1.0, -1.0, 0.37, -21.0, 1e4, -1e9, 1e12, 1e-5, math.inf])


def make_logits(batch, length, bins, dtype, spare=1):
    """Rows with gaps, as a padded linear layer's output without its last step has; behind the bins and at the end of
    the memory what is no number."""
    torch.manual_seed(0)
    whole = 3 * torch.randn(batch, length + (spare > 0), bins + spare, device=DEVICE)
    whole[..., bins:] = math.nan
    return whole.to(dtype)[:, :length, :bins].requires_grad_()


@pytest.mark.parametrize(("batch", "length", "bins"), [(1, 1, 2), (5, 2, 255), (3, 5, 41), (10, 1, 255)])
@pytest.mark.parametrize("num_targets", [1, 2])
@pytest.mark.parametrize("spare", [0, 1])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-5), (torch.bfloat16, 1e-2)])  # places up to 254
def test_loss_and_its_gradient(batch, length, bins, num_targets, spare, dtype, tolerance):
    code, logits = SymlogTwoHot(bins).double(), make_logits(batch, length, bins, dtype, spare)
    picked = torch.arange(num_targets * batch * length).view(num_targets, batch, length) % len(TARGETS)
    targets, weight = TARGETS[picked], torch.randn(batch, length)
    twin = logits.detach().cpu().double().requires_grad_()
    expected = code.loss(twin, *targets.double())
    (expected * weight).sum().backward()
    loss, _ = run_loss(logits, targets.to(DEVICE), code.low, code.high)
    (grad,) = torch.autograd.grad((loss * weight.to(DEVICE)).sum(), logits)
    torch.testing.assert_close(loss.cpu().double(), expected.detach(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(grad.cpu().double(), twin.grad, rtol=tolerance, atol=tolerance)
    assert grad.dtype == dtype and grad.shape == logits.shape


def test_a_target_that_is_no_number_is_seen_in_the_loss():
    """An update that would be made from it is left out for that."""
    targets = torch.tensor([[[math.nan, 1.0]]], device=DEVICE)
    loss, _ = run_loss(make_logits(1, 2, 255, torch.float32), targets, -20.0, 20.0)
    assert loss.isnan().tolist() == [[True, False]]


@pytest.mark.parametrize(("batch", "length", "bins"), [(1, 1, 2), (7, 3, 255), (3, 5, 41)])
@pytest.mark.parametrize("spare", [0, 1])
def test_decoded_values(batch, length, bins, spare):
    code, logits = SymlogTwoHot(bins), make_logits(batch, length, bins, torch.float32, spare).detach()
    value = run_decode(logits, code.bins.to(DEVICE)).cpu()
    torch.testing.assert_close(value.double(), code.double().decode(logits.cpu().double()), rtol=1e-4, atol=1e-5)


def test_operators_are_registered_well():
    logits, targets = make_logits(2, 3, 9, torch.float32), torch.randn(2, 2, 3, device=DEVICE)
    torch.library.opcheck(torch.ops.mamba_ssm_triton.two_hot_loss.default, (logits, targets, -20.0, 20.0))
    bins = torch.linspace(-20, 20, 9, device=DEVICE)
    torch.library.opcheck(torch.ops.mamba_ssm_triton.two_hot_decode.default, (logits.detach(), bins))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize("shape", [(6,), (4, 6)])
def test_the_code_takes_them_on_a_gpu(shape):
    code, plain = SymlogTwoHot().to(DEVICE), SymlogTwoHot().double()
    logits, targets = torch.randn(*shape, 255, device=DEVICE), torch.randn(2, *shape, device=DEVICE)
    expected = plain.loss(logits.cpu().double(), *targets.cpu().double())
    torch.testing.assert_close(code.loss(logits, *targets).cpu().double(), expected, rtol=1e-4, atol=1e-4)
    value = plain.decode(logits.cpu().double())
    torch.testing.assert_close(code.decode(logits).cpu().double(), value, rtol=1e-4, atol=1e-5)

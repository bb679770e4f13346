"""The loss of termination logits by kernels, against torch's own in float64."""

import pytest
import torch
from torch.nn import functional as F

from sub_models.binary_loss_kernels import run_binary_loss
from sub_models.functions_losses import binary_cross_entropy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU the kernels run through Triton's interpreter


def make_inputs(batch, length, dtype):
    """A column of a padded linear layer's output, small and great ones among it, and targets 0, 1 and between."""
    torch.manual_seed(0)
    wide = 4 * torch.randn(batch, length, 8, device=DEVICE)
    wide[:, ::3] *= 20
    return wide.to(dtype)[..., 0].requires_grad_(), torch.rand(batch, length, device=DEVICE).round(decimals=1)


@pytest.mark.parametrize(("batch", "length"), [(0, 3), (1, 1), (3, 7), (2, 257)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_loss_and_its_gradient(batch, length, dtype, tolerance):
    logits, target = make_inputs(batch, length, dtype)
    twin, weight = logits.detach().double().requires_grad_(), torch.randn(batch, length, device=DEVICE)
    expected = F.binary_cross_entropy_with_logits(twin, target.double(), reduction="none")
    (expected * weight).sum().backward()
    loss = run_binary_loss(logits, target)
    (grad,) = torch.autograd.grad((loss * weight).sum(), logits)
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grad.double(), twin.grad, rtol=tolerance, atol=1e-6)
    assert loss.dtype == torch.float32 and grad.dtype == dtype


def test_small_losses_keep_their_places():
    """exp(-20) is lost in 1 + exp(-20)."""
    logits, target = torch.full((1, 1), 20.0, device=DEVICE), torch.ones(1, 1, device=DEVICE)
    torch.testing.assert_close(run_binary_loss(logits, target).item(), 2.0611537e-9, rtol=1e-5, atol=0)


def test_a_logit_that_is_no_number_is_seen_in_the_loss():
    """An update that would be made from it is left out for that."""
    logits = torch.tensor([[float("nan"), 1.0]], device=DEVICE)
    assert run_binary_loss(logits, torch.ones(1, 2, device=DEVICE)).isnan().tolist() == [[True, False]]


def test_the_operator_is_registered_well():
    torch.library.opcheck(torch.ops.mamba_ssm_triton.binary_loss.default, make_inputs(2, 3, torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_plain_form(dtype):
    logits, target = (x.to(dtype) for x in make_inputs(2, 3, torch.float32))
    expected = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    torch.testing.assert_close(binary_cross_entropy(logits, target), expected)

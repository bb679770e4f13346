"""The latent's loss terms and their gradients by kernels (interpreted on a CPU) against the plain forms in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sub_models.functions_losses import latent_terms, uniform_mix_logits
from sub_models.latent_kernels import run_latent_terms

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def check(batch, length, categoricals, classes, ratio, dtype, scale, tolerance):
    generator = torch.Generator().manual_seed(batch + length)
    q, p = (scale * torch.randn(batch, length, categoricals * classes, generator=generator) for _ in range(2))
    q, p = (x.to(DEVICE, dtype).requires_grad_() for x in (q, p))
    twins = [x.detach().cpu().double().requires_grad_() for x in (q, p)]
    got = run_latent_terms(q, p, categoricals, ratio)
    log_q = uniform_mix_logits(twins[0].unflatten(-1, (categoricals, classes)), ratio)
    expected = latent_terms(*twins, log_q, ratio)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one.detach().cpu().double(), other.detach(), rtol=1e-5, atol=2e-5 * categoricals)
    weights = [torch.randn(batch, length - 1, generator=generator) for _ in range(2)]
    sum((term * w.to(DEVICE)).sum() for term, w in zip(got[:2], weights, strict=True)).backward()
    sum((term * w).sum() for term, w in zip(expected[:2], weights, strict=True)).backward()
    for x, twin in zip((q, p), twins, strict=True):
        assert x.grad.dtype == dtype
        torch.testing.assert_close(x.grad.cpu().double(), twin.grad, rtol=tolerance, atol=tolerance)


@settings(max_examples=25, deadline=None)
@given(
    batch=st.integers(1, 3),
    length=st.integers(1, 5),
    categoricals=st.sampled_from([1, 3, 8]),
    classes=st.sampled_from([2, 5, 8]),
    ratio=st.sampled_from([0.0, 0.01, 0.5]),
    scale=st.sampled_from([0.1, 3.0]),
)
def test_terms_and_gradients(batch, length, categoricals, classes, ratio, scale):
    check(batch, length, categoricals, classes, ratio, torch.float32, scale, 2e-5)


def test_low_precision_at_the_default_size():
    check(2, 4, 32, 32, 0.01, torch.bfloat16, 2.0, 1e-2)


def test_a_logit_that_is_no_number_is_seen():
    q, p = torch.zeros(2, 1, 3, 8, device=DEVICE)
    q[0, 1, 2] = torch.nan
    kl, *_ = run_latent_terms(q, p, 2, 0.01)
    assert kl.isnan().tolist() == [[True, False]]


def test_registration():
    q, p = torch.randn(2, 2, 3, 8, device=DEVICE).requires_grad_().unbind()
    torch.library.opcheck(torch.ops.mamba_ssm_triton.latent_terms.default, (q, p, 2, 0.01))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA device")
def test_the_world_models_size():
    check(16, 128, 32, 32, 0.01, torch.bfloat16, 1.0, 1e-2)

"""λ-returns and quantiles in a launch each, against the plain forms in float64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sub_models.functions_losses import lambda_return, masked_quantiles
from sub_models.return_kernels import run_lambda_return, run_masked_quantiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU the kernels run through Triton's interpreter


@pytest.mark.parametrize(("rows", "horizon"), [(1, 1), (3, 2), (65, 15), (130, 16), (2, 17)])
@pytest.mark.parametrize(("gamma", "lam"), [(0.985, 0.95), (1.0, 0.0), (0.9, 1.0)])
def test_lambda_returns_of_two_critics(rows, horizon, gamma, lam):
    torch.manual_seed(0)
    reward, value = torch.randn(rows, horizon), torch.randn(2, rows, horizon + 1) * 10
    termination = (torch.rand(rows, horizon) < 0.2).float()
    expected = lambda_return(reward.double(), termination.double(), value.double(), gamma, lam)
    got = run_lambda_return(*(x.to(DEVICE) for x in (reward, termination, value)), gamma, lam)
    torch.testing.assert_close(got.cpu().double(), expected, rtol=1e-5, atol=1e-5)


@given(st.integers(1, 300), st.floats(0, 1), st.sampled_from([1e-3, 1.0, 1e20]), st.booleans(), st.integers(0, 999))
@settings(deadline=None, max_examples=10)
def test_quantiles_equal_a_sort(size, share, scale, ties, seed):
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=size).round(0 if ties else 9) * scale).astype(np.float32)
    numbers = torch.from_numpy(x), torch.from_numpy((rng.random(size) < share).astype(np.float32))
    quantiles = torch.tensor([0.0, 0.05, 0.5, 0.95, 1.0])
    got = run_masked_quantiles(*(tensor.to(DEVICE) for tensor in (*numbers, quantiles)))
    torch.testing.assert_close(got.cpu(), masked_quantiles(*numbers, quantiles), rtol=1e-5, atol=1e-6 * scale)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, in Triton's interpreter
def test_quantiles_at_the_edges_are_those_of_a_sort():
    """Infinities are ordered like numbers, both zeros are zero, nothing alive is 0."""
    quantiles = torch.tensor([0.0, 0.4, 0.6, 1.0])
    x = torch.tensor([-math.inf, 3.0, -0.0, 0.0, math.inf, -2.5])
    for some, weight in ((x, torch.ones(6)), (x, torch.zeros(6)), (x[1:2], torch.ones(1)), (x[1:4], torch.ones(3))):
        got = run_masked_quantiles(*(tensor.to(DEVICE) for tensor in (some, weight, quantiles))).cpu()
        torch.testing.assert_close(got, masked_quantiles(some, weight, quantiles), equal_nan=True)


def test_operators_are_registered_well():
    inputs = torch.randn(3, 4, device=DEVICE), torch.zeros(3, 4, device=DEVICE), torch.randn(2, 3, 5, device=DEVICE)
    torch.library.opcheck(torch.ops.mamba_ssm_triton.lambda_return.default, (*inputs, 0.9, 0.8))
    quantiles = torch.tensor([0.5], device=DEVICE)
    torch.library.opcheck(torch.ops.mamba_ssm_triton.masked_quantiles.default, (inputs[0], inputs[1], quantiles))

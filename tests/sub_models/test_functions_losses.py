"""Every formula against a brute-force version, written as loops over scalars or taken from torch.distributions."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributions import Categorical, kl_divergence
from torch.nn import functional as F

from sub_models.functions_losses import (
    TRUNCATED_NORMAL_STD,
    SymlogTwoHot,
    categorical_entropy,
    categorical_kl,
    init_orthogonal,
    init_truncated_normal,
    lambda_return,
    masked_mean,
    masked_quantiles,
    reconstruction_loss,
    sample_index,
    sample_one_hot,
    symexp,
    symlog,
    uniform_mix_logits,
)


def brute_force_two_hot(x: float, bins: list[float]) -> list[float]:
    """The code of one number: find its two neighbours by looking at every bin."""
    y = math.copysign(math.log(1 + abs(x)), x)
    y = min(max(y, bins[0]), bins[-1])
    code = [0.0] * len(bins)
    for i in range(len(bins) - 1):
        if bins[i] <= y <= bins[i + 1]:
            share = (y - bins[i]) / (bins[i + 1] - bins[i])
            code[i], code[i + 1] = 1 - share, share
            return code
    raise AssertionError(y)


@pytest.mark.parametrize("x", [0.0, 1.0, -1.0, 0.37, -21.0, 1e4, -1e9, 1e12])
def test_symexp_inverts_symlog(x):
    value = torch.tensor(x, dtype=torch.float64)
    torch.testing.assert_close(symexp(symlog(value)), value)


@given(st.lists(st.floats(-1e10, 1e10), min_size=1, max_size=20), st.sampled_from([2, 3, 41, 255]))
@settings(deadline=None, max_examples=50)
def test_two_hot_equals_brute_force(values, num_bins):
    code = SymlogTwoHot(num_bins).double()
    bins = np.linspace(-20, 20, num_bins).tolist()
    expected = torch.tensor([brute_force_two_hot(x, bins) for x in values], dtype=torch.float64)
    torch.testing.assert_close(code.encode(torch.tensor(values, dtype=torch.float64)), expected, atol=1e-9, rtol=1e-9)


def test_two_hot_decodes_what_it_encoded_and_clips_the_rest():
    code = SymlogTwoHot().double()
    values = torch.tensor([0.0, 1.0, -3.5, 1000.0, -0.01], dtype=torch.float64)
    torch.testing.assert_close(code.decode(code.encode(values).log()), values)
    far = code.encode(torch.tensor([1e30, -1e30]))
    assert far[0, -1] == 1 and far[1, 0] == 1 and far.sum() == 2


def test_two_hot_loss_is_cross_entropy_and_smallest_at_the_target():
    code = SymlogTwoHot(11, -2, 2)
    logits, target = torch.randn(7, 11), torch.randn(7)
    expected = -(code.encode(target) * F.log_softmax(logits, -1)).sum(-1)
    torch.testing.assert_close(code.loss(logits, target), expected)
    logits = torch.zeros(1, 11, requires_grad=True)
    for _ in range(400):
        (grad,) = torch.autograd.grad(code.loss(logits, torch.tensor([0.7])).sum(), logits)
        logits = (logits - 2.0 * grad).detach().requires_grad_()
    torch.testing.assert_close(code.decode(logits), torch.tensor([0.7]), atol=2e-2, rtol=0)


def test_two_hot_loss_looks_up_what_the_whole_code_adds_up():
    """On a CPU two bins stand for all: the same loss and gradient, at the range's ends too; NaN stays NaN."""
    code = SymlogTwoHot(11, -2, 2)
    target = torch.tensor([0.0, 0.3, -0.7, 1e9, -1e9, math.inf, math.e**2 - 1, math.nan])
    logits = torch.randn(8, 11, requires_grad=True)
    expected = -(code.encode(target) * F.log_softmax(logits, -1)).sum(-1)
    loss = code.loss(logits, target)
    torch.testing.assert_close(loss, expected, equal_nan=True)
    assert loss.isnan().tolist() == [False] * 7 + [True]
    grads = (torch.autograd.grad(x[:7].sum(), logits)[0] for x in (loss, expected))
    torch.testing.assert_close(*(grad[:7] for grad in grads))


def test_two_hot_at_zero_logits_decodes_to_zero():
    """A critic whose last layer starts near zero must start with value 0."""
    assert abs(SymlogTwoHot().decode(torch.zeros(255)).item()) < 1e-3


@pytest.mark.parametrize(("num_categories", "num_classes"), [(4, 3), (3, 8), (32, 5)])
def test_uniform_mix_divides_by_the_number_of_classes(num_categories, num_classes):
    """K ≠ C tells a mix by categoricals from the right one: only the latter sums to one."""
    logits = 5 * torch.randn(2, num_categories, num_classes, dtype=torch.float64)
    mixed = uniform_mix_logits(logits, 0.1).exp()
    expected = torch.empty_like(mixed)
    for index in np.ndindex(*logits.shape[:-1]):
        weights = [math.exp(v) for v in logits[index].tolist()]
        expected[index] = torch.tensor([0.9 * w / sum(weights) + 0.1 / num_classes for w in weights])
    torch.testing.assert_close(mixed, expected)
    torch.testing.assert_close(mixed.sum(-1), torch.ones_like(mixed[..., 0]))


def test_uniform_mix_keeps_extreme_logits_finite():
    log_probs = uniform_mix_logits(torch.tensor([1e4, -1e4, 0.0]), 0.01)
    torch.testing.assert_close(log_probs.exp(), torch.tensor([0.99 + 0.01 / 3, 0.01 / 3, 0.01 / 3]))


def test_sampling_follows_the_probabilities():
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05])
    torch.manual_seed(0)
    draws = sample_index(probs.log().expand(200_000, 4))
    counts = torch.bincount(draws, minlength=4).double()
    chi_square = ((counts - 200_000 * probs) ** 2 / (200_000 * probs)).sum()
    assert chi_square < 16.3  # 99.9 % quantile with three degrees of freedom


def test_one_hot_sample_passes_the_gradient_of_the_probabilities():
    logits = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, 7, dtype=torch.float64)
    log_probs = F.log_softmax(logits, -1)
    sample = sample_one_hot(log_probs)
    assert ((sample.detach() == 0) | ((sample.detach() - 1).abs() < 1e-12)).all()
    torch.testing.assert_close(sample.detach().sum(-1), torch.ones(5, dtype=torch.float64))
    (grad,) = torch.autograd.grad((sample * weight).sum(), logits)
    (expected,) = torch.autograd.grad((F.softmax(logits, -1) * weight).sum(), logits)
    torch.testing.assert_close(grad, expected)


def test_kl_and_entropy_equal_torch_distributions():
    q, p = (F.log_softmax(torch.randn(2, 3, 4, 5, dtype=torch.float64), -1) for _ in range(2))
    expected = kl_divergence(Categorical(logits=q), Categorical(logits=p)).sum(-1)
    torch.testing.assert_close(categorical_kl(q, p), expected)
    torch.testing.assert_close(categorical_entropy(q), Categorical(logits=q).entropy())


def brute_force_lambda_return(reward, termination, value, gamma, lam):
    """R_i straight from its recursive definition."""
    if len(reward) == 0:
        return []
    later = brute_force_lambda_return(reward[1:], termination[1:], value[1:], gamma, lam)
    following = later[0] if later else value[1]
    mixed = (1 - lam) * value[1] + lam * following
    return [reward[0] + gamma * (1 - termination[0]) * mixed, *later]


@given(st.integers(1, 6), st.floats(0, 1), st.floats(0, 1), st.integers(0, 10_000))
@settings(deadline=None, max_examples=50)
def test_lambda_return_equals_its_definition(horizon, gamma, lam, seed):
    rng = np.random.default_rng(seed)
    reward, value = rng.normal(size=(2, horizon)), rng.normal(size=(2, horizon + 1))
    termination = rng.integers(0, 2, size=(2, horizon)).astype(float)
    inputs = [torch.from_numpy(x) for x in (reward, termination, value)]
    got, _ = lambda_return(*inputs[:2], torch.stack((inputs[2], 2 * inputs[2])), gamma, lam)
    expected = [
        brute_force_lambda_return(*(x[i].tolist() for x in (reward, termination, value)), gamma, lam) for i in (0, 1)
    ]
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-10, atol=1e-10)
    assert torch.equal(got, lambda_return(*inputs, gamma, lam))  # of one critic alone


def test_lambda_zero_bootstraps_from_the_next_state():
    """With λ = 0 the return is r_i + γ V(s_{i+1}); V(s_i) in its place would give 1.5."""
    value = torch.tensor([[1.0, 5.0, 7.0]])
    returns = lambda_return(torch.ones(1, 2), torch.zeros(1, 2), value, 0.5, 0.0)
    torch.testing.assert_close(returns, torch.tensor([[3.5, 4.5]]))


def test_lambda_return_names_wrong_shapes():
    with pytest.raises(ValueError, match=r"value \(1, 2\).*\(\.\.\., B, H\+1\)"):
        lambda_return(torch.ones(1, 2), torch.zeros(1, 2), torch.ones(1, 2), 0.9, 0.9)


@given(st.integers(1, 200), st.floats(0, 1), st.floats(0, 1), st.integers(0, 1000))
@settings(deadline=None, max_examples=60)
def test_masked_quantiles_equal_numpy(size, q, share, seed):
    rng = np.random.default_rng(seed)
    x, alive, quantiles = rng.normal(size=size), rng.random(size) < share, np.array([q, 0.5])
    got = masked_quantiles(*(torch.from_numpy(array) for array in (x, alive.astype(float), quantiles)))
    expected = np.quantile(x[alive], quantiles) if alive.any() else np.zeros(2)
    np.testing.assert_allclose(got, expected, atol=1e-9)


def test_masked_mean_leaves_out_weight_zero():
    x = torch.tensor([1.0, 2.0, 300.0])
    assert masked_mean(x, torch.tensor([1.0, 1.0, 0.0])) == 1.5
    assert masked_mean(x, torch.zeros(3)) == 0
    assert masked_mean(x, None) == 101
    weight = torch.tensor([[[1.0], [0.0], [1.0]], [[0.0], [1.0], [1.0]]])
    assert masked_mean(torch.arange(6.0).view(2, 3, 1), weight) == 2.75


def test_reconstruction_loss_sums_over_a_frame():
    a, b = torch.rand(2, 3, 3, 4, 5), torch.rand(2, 3, 3, 4, 5)
    expected = sum(((a[..., c, i, j] - b[..., c, i, j]) ** 2) for c in range(3) for i in range(4) for j in range(5))
    torch.testing.assert_close(reconstruction_loss(a, b), expected)


@pytest.mark.parametrize("layer", [nn.Linear(300, 500), nn.Conv2d(32, 64, 5), nn.ConvTranspose2d(64, 32, 5)])
def test_truncated_normal_has_the_wanted_spread(layer):
    torch.manual_seed(0)
    init_truncated_normal(layer)
    fans = (layer.weight.shape[0] + layer.weight.shape[1]) * math.prod(layer.weight.shape[2:])
    wanted = math.sqrt(2 / fans)
    assert layer.weight.std().item() == pytest.approx(wanted, rel=0.02)
    assert layer.weight.abs().max() <= 2 * wanted / TRUNCATED_NORMAL_STD
    assert not layer.bias.any()


def test_truncation_constant_is_the_spread_of_a_truncated_normal():
    edge_density = math.exp(-2.0) / math.sqrt(2 * math.pi)
    inside = math.erf(2 / math.sqrt(2))
    assert pytest.approx(math.sqrt(1 - 4 * edge_density / inside), rel=1e-6) == TRUNCATED_NORMAL_STD


def test_orthogonal_weights_have_the_gain():
    layer = nn.Linear(20, 10)
    init_orthogonal(layer)
    torch.testing.assert_close(layer.weight @ layer.weight.T, 2 * torch.eye(10), atol=1e-5, rtol=0)
    assert not layer.bias.any()

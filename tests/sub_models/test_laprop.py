"""LaProp against its definition written as a loop over scalars, and its device-side skipping."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sub_models.laprop import LaProp


def scalar_laprop(theta, grads, lr, beta1, beta2, eps, weight_decay):
    """The published update for one number."""
    m = v = 0.0
    for t, g in enumerate(grads, start=1):
        v = beta2 * v + (1 - beta2) * g * g
        m = beta1 * m + (1 - beta1) * g / (math.sqrt(v / (1 - beta2**t)) + eps)
        theta = theta * (1 - lr * weight_decay) - lr * m / (1 - beta1**t)
    return theta


@given(
    st.integers(1, 12),
    st.sampled_from([0.0, 0.5, 0.9]),
    st.sampled_from([0.5, 0.999]),
    st.sampled_from([1e-20, 1e-3]),
    st.sampled_from([0.0, 0.1]),
    st.integers(0, 999),
)
@settings(deadline=None, max_examples=40)
def test_equals_a_loop_over_scalars(num_steps, beta1, beta2, eps, weight_decay, seed):
    torch.manual_seed(seed)
    params = [
        torch.randn(3, dtype=torch.float64, requires_grad=True),
        torch.randn((), dtype=torch.float64, requires_grad=True),
    ]
    start = [p.detach().clone() for p in params]
    grads = [[torch.randn_like(p) for p in params] for _ in range(num_steps)]
    optimiser = LaProp(params, 0.01, (beta1, beta2), eps, weight_decay)
    for step_grads in grads:
        for p, g in zip(params, step_grads, strict=True):
            p.grad = g.clone()
        optimiser.step()
    for i, p in enumerate(params):
        for j in range(p.numel()):
            history = [g[i].flatten()[j].item() for g in grads]
            expected = scalar_laprop(start[i].flatten()[j].item(), history, 0.01, beta1, beta2, eps, weight_decay)
            # the bias corrections 1 - β^t are float32 tensors
            assert p.flatten()[j].item() == pytest.approx(expected, rel=2e-6, abs=2e-6)


def test_differs_from_adam():
    """The order of the two steps is what makes LaProp: after a change of gradient scale the two must part."""
    p, q = (torch.zeros(1, requires_grad=True) for _ in range(2))
    laprop, adam = LaProp([p], 0.1), torch.optim.Adam([q], 0.1)
    for scale in (1.0, 100.0, 1.0):
        p.grad, q.grad = torch.tensor([scale]), torch.tensor([scale])
        laprop.step()
        adam.step()
    assert abs(p.item() - q.item()) > 1e-3


def test_found_inf_leaves_everything_as_it_is():
    p = torch.ones(4, requires_grad=True)
    optimiser = LaProp([p], 0.1, weight_decay=0.5)
    p.grad = torch.ones(4)
    optimiser.step()
    before = p.detach().clone(), {k: v.clone() for k, v in optimiser.state[p].items()}
    p.grad = torch.full((4,), math.nan)
    optimiser.found_inf = torch.tensor(1.0)
    optimiser.step()
    assert torch.equal(p, before[0])
    assert all(torch.equal(optimiser.state[p][k], v) for k, v in before[1].items())
    optimiser.found_inf = torch.tensor(0.0)
    p.grad = torch.ones(4)
    optimiser.step()
    assert not torch.equal(p, before[0])


def test_saved_state_continues_bit_for_bit():
    def train(p, optimiser, steps):
        for i in steps:
            p.grad = torch.sin(torch.arange(5.0) + i)
            optimiser.step()

    whole, half = torch.ones(5, requires_grad=True), torch.ones(5, requires_grad=True)
    train(whole, LaProp([whole], 0.01), range(6))
    first = LaProp([half], 0.01)
    train(half, first, range(3))
    restored = torch.tensor(half.detach().numpy().copy(), requires_grad=True)
    second = LaProp([restored], 0.01)
    second.load_state_dict(first.state_dict())
    train(restored, second, range(3, 6))
    assert torch.equal(restored, whole)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"lr": -1.0}, "lr=-1.0"), ({"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\)"), ({"eps": -1}, "eps=-1")],
)
def test_refuses_arguments_outside_their_range(arguments, message):
    with pytest.raises(ValueError, match=message):
        LaProp([torch.ones(1, requires_grad=True)], **arguments)

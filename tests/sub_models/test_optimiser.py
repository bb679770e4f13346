"""Warm-up, clipping, skipping and resuming of one update, for both optimisers."""

import itertools
import math

import pytest
import torch

from sub_models.optimiser import Optimiser

NAMES = ["Laprop", "Adam"]


def make(name, max_grad_norm=1e9, warmup_steps=0, learning_rate=0.1, weight_decay=0.0):
    p = torch.nn.Parameter(torch.ones(4))
    return p, Optimiser([p], name, learning_rate, 1e-8, max_grad_norm, warmup_steps, weight_decay)


@pytest.mark.parametrize("name", NAMES)
def test_warmup_is_linear(name):
    """Under a constant gradient both optimisers move by the learning rate, so the moves show the warm-up."""
    p, optimiser = make(name, warmup_steps=4)
    values = [1.0]
    for _ in range(6):
        optimiser.update(p.sum())
        values.append(p[0].item())
    moves = [a - b for a, b in itertools.pairwise(values)]
    assert moves == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.1], abs=1e-5)


def test_gradients_are_clipped_to_the_global_norm():
    p, optimiser = make("Laprop", max_grad_norm=1.0)
    metrics = optimiser.update((p * 3).sum())
    assert metrics["grad_norm"].item() == pytest.approx(6.0)  # √(4 · 3²), before clipping
    assert metrics["clipped"] == 1
    assert p.grad.norm().item() == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("fault", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_skipped_and_counted(name, fault):
    p, optimiser = make(name)
    optimiser.update(p.square().sum())
    before = p.detach().clone()
    metrics = optimiser.update((p * fault).sum())
    assert torch.equal(p, before)
    assert metrics["skipped"] == 1 and optimiser.skipped == 1 and optimiser.updates == 1
    optimiser.update(p.square().sum())
    assert torch.isfinite(p).all() and not torch.equal(p, before)


@pytest.mark.parametrize("name", NAMES)
def test_disabled_updates_change_nothing(name):
    p, optimiser = make(name, weight_decay=0.1)
    optimiser.update(p.square().sum())
    before, state = p.detach().clone(), optimiser.state_dict()["inner"]["state"][0]
    state = {k: v.clone() for k, v in state.items()}
    metrics = optimiser.update(p.square().sum(), enabled=torch.tensor(False))
    assert torch.equal(p, before) and metrics["skipped"] == 0
    assert all(torch.equal(optimiser.inner.state[p][k], v) for k, v in state.items())


@pytest.mark.parametrize("name", NAMES)
def test_resuming_continues_warmup_and_moments_bit_for_bit(name, tmp_path):
    p, optimiser = make(name, warmup_steps=8)
    for _ in range(3):
        optimiser.update((p.square() * torch.arange(4.0)).sum())
    torch.save({"p": p.detach(), "optimiser": optimiser.state_dict()}, tmp_path / "state.pt")
    for _ in range(3):
        optimiser.update((p.square() * torch.arange(4.0)).sum())
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    q, resumed = make(name, warmup_steps=8)
    with torch.no_grad():
        q.copy_(saved["p"])
    resumed.load_state_dict(saved["optimiser"])
    for _ in range(3):
        resumed.update((q.square() * torch.arange(4.0)).sum())
    assert torch.equal(p, q)


def test_unknown_name_is_refused():
    with pytest.raises(ValueError, match="'SGD', expected 'Laprop' or 'Adam'"):
        make("SGD")

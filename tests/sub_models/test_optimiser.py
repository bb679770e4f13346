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


def test_a_loss_that_is_not_finite_is_skipped_though_its_gradient_is():
    """Something went wrong in it: nothing may be learned from the rest."""
    p, optimiser = make("Laprop")
    metrics = optimiser.update(p.sum() + math.inf)
    assert torch.equal(p, torch.ones(4)) and metrics["skipped"] == 1 and metrics["clipped"] == 0


def test_skips_in_a_row_are_counted_until_an_update_is_made(tmp_path):
    """What stops a diverging run. An update that is left out for another reason neither counts nor ends the row."""
    p, optimiser = make("Laprop")
    seen = []
    for kind in "bb.b-b.b":  # bad, good, switched off
        enabled = torch.tensor(kind != "-")
        optimiser.update((p * (math.nan if kind == "b" else 1.0)).sum(), enabled=enabled)
        seen.append((optimiser.skipped_in_a_row.item(), optimiser.longest_row.item()))
    assert seen == [(1, 1), (2, 2), (0, 2), (1, 2), (1, 2), (2, 2), (0, 2), (1, 2)]
    torch.save(optimiser.state_dict(), tmp_path / "state.pt")
    _, restored = make("Laprop")
    restored.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert (restored.skipped, restored.skipped_in_a_row, restored.longest_row) == (5, 1, 2)


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


@pytest.mark.parametrize("name", NAMES)
def test_moments_keep_the_memory_order_of_their_parameter(name):
    """A file holds contiguous tensors; fused steps pair channels-last weights with moments by storage order."""

    def make_layer():
        torch.manual_seed(0)
        layer = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        return layer, Optimiser(layer.parameters(), name, 0.1, 1e-8, 1e9)

    def train(layer, optimiser, times):
        for i in times:
            image = torch.sin(torch.arange(75.0) + i).reshape(1, 3, 5, 5)
            optimiser.update(layer(image).square().sum())

    whole, optimiser = make_layer()
    train(whole, optimiser, range(3))
    saved = optimiser.state_dict()
    state = {
        k: {n: t.clone(memory_format=torch.contiguous_format) for n, t in v.items()}
        for k, v in saved["inner"]["state"].items()
    }
    saved = {**saved, "inner": {**saved["inner"], "state": state}, "updates": saved["updates"].clone()}
    half, resumed = make_layer()
    half.load_state_dict(whole.state_dict())
    resumed.load_state_dict(saved)
    train(whole, optimiser, range(3, 6))
    train(half, resumed, range(3, 6))
    assert torch.equal(whole.weight, half.weight)


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_optimiser_takes_its_own_settings_but_no_other_kind(name):
    p, first = make(name)
    first.update(p.sum())
    q, second = make(name, learning_rate=0.5, weight_decay=0.25)
    second.load_state_dict(first.state_dict())
    second.update(q.sum())
    assert second.lr == 0.5 and second.inner.param_groups[0]["weight_decay"] == 0.25
    other = NAMES[1 - NAMES.index(name)]
    with pytest.raises(ValueError, match=f"saved optimiser is {name}, this one is {other}"):
        make(other)[1].load_state_dict(first.state_dict())


def test_marked_parameters_are_not_decayed():
    p, q = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    q._no_weight_decay = True
    optimiser = Optimiser([p, q], "Laprop", 0.1, 1e-8, 1e9, weight_decay=0.5)
    optimiser.update((p + q).sum() * 0.0)
    assert (p < 1).all() and (q == 1).all()


def test_unknown_name_is_refused():
    with pytest.raises(ValueError, match="'SGD', expected 'Laprop' or 'Adam'"):
        make("SGD")

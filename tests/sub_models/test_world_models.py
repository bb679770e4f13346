"""The world model: sizes, loss against a brute-force version, masks, imagination against the parallel pass,
pictures."""

import copy
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from torch.distributions import Categorical, kl_divergence

import agents
import sub_models.world_models
from replay_buffer import Batch
from sub_models.functions_losses import sample_one_hot, symlog
from sub_models.world_models import (
    Decoder,
    Encoder,
    MLPHead,
    build_world_model,
    image_norm,
    pyramid,
)
from tests.support import BACKBONES, STACK, A, C, D, K, make_agent_for, make_batch, make_world_model
from utils import load_config


class UniformPolicy:
    """Random actions that are remembered."""

    def __init__(self, continuous=False):
        self.continuous = continuous

    def noise(self, *leading):
        return torch.rand(*leading, A) if self.continuous else torch.rand(leading)

    def sample(self, feature, noise):
        if self.continuous:
            action = noise * 2 - 1
            return action, action, torch.zeros(len(feature))
        action = (noise * A).long()
        return action, action, torch.full((len(feature),), -np.log(A))


@pytest.mark.parametrize(
    ("backbone", "expected"), [("Mamba2", 7_155_459), ("Mamba", 7_337_315), ("Transformer", 8_477_539)]
)
def test_parameter_counts_of_the_default_configuration(backbone, expected):
    """The sizes of the published agent: a different count means another model."""
    from agents import build_agent

    config = load_config(["--Models.WorldModel.Backbone", backbone], "train.py").config
    device, actions = torch.device("cpu"), gymnasium.spaces.Discrete(6)
    world_model = build_world_model(config, actions, device)
    assert sum(p.numel() for p in world_model.parameters()) == expected
    agent = build_agent(config, world_model.feature_dim, actions, device)
    assert sum(p.numel() for p in agent.parameters()) == 3_416_580


@pytest.mark.parametrize("first_stride_one", [True, False])
@pytest.mark.parametrize("norm", ["batch", "rms", "layer", "none"])
def test_decoder_mirrors_the_encoder(first_stride_one, norm):
    stack = {**STACK, "image_size": (3, 16, 24), "norm": norm, "first_stride_one": first_stride_one}
    encoder, decoder = Encoder(**stack), Decoder(7, final_sigmoid=True, **stack)
    image = decoder(torch.randn(5, 7))
    assert image.shape == (5, 3, 16, 24) and image.min() >= 0 and image.max() <= 1
    assert encoder(image).shape == (5, encoder.embed_dim)
    assert encoder.embed_dim == int(np.prod(pyramid((3, 16, 24), 4, [1, 2], first_stride_one).inner_size))


def test_norms_add_the_biases_of_the_layers_before_them():
    head = MLPHead(7, 6, 5, 3, "SiLU").double()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    x, weight = torch.randn(4, 3, 7).double(), torch.randn(4, 3, 5).double()
    outs = [forward(x) for forward in (head.layers, head._with_biases_in_norms)]
    torch.testing.assert_close(*outs)
    gradients = [torch.autograd.grad((out * weight).sum(), list(head.parameters())) for out in outs]
    torch.testing.assert_close(*gradients)


def test_stacks_refuse_what_they_cannot_build():
    with pytest.raises(ValueError, match="15x16 cannot be divided by 2"):
        pyramid((3, 15, 16), 4, [1, 1], True)
    with pytest.raises(ValueError, match="kernel 4, expected 'same' and an odd kernel"):
        Encoder(**{**STACK, "kernel": 4}, image_size=(3, 16, 16), norm="none", first_stride_one=True)
    with pytest.raises(ValueError, match="'group', expected 'batch'"):
        image_norm("group", 4)


def brute_force_loss(world_model, batch, stoch):
    """Section 2's loss written out for every single time step, from the same latent sample."""
    image = batch.obs.permute(0, 1, 4, 2, 3).double() / 255
    batch_size, seqlen = batch.obs.shape[:2]
    embed = world_model.encoder(image.flatten(0, 1))

    def mixed(logits):
        probs = torch.softmax(logits.unflatten(-1, (K, C)), -1)
        return 0.99 * probs + 0.01 / C

    posterior = mixed(world_model.posterior_head(embed)).unflatten(0, (batch_size, seqlen))
    action = torch.nn.functional.one_hot(batch.action, A).double()
    bins = torch.linspace(-20, 20, 255, dtype=torch.float64)
    totals = {name: [] for name in ("reconstruction", "reward", "termination", "dynamics", "representation")}
    reconstruction = world_model.decoder(stoch.flatten(0, 1)).unflatten(0, (batch_size, seqlen))
    for b in range(batch_size):
        for t in range(seqlen):
            start = max(i for i in range(t + 1) if i == 0 or batch.is_first[b, i])
            deter = world_model.sequence_model(stoch[b : b + 1, start : t + 1], action[b : b + 1, start : t + 1])[0, -1]
            totals["reconstruction"].append(((reconstruction[b, t] - image[b, t]) ** 2).sum())
            code = torch.tensor(
                np.maximum(0, 1 - np.abs(symlog(batch.reward[b, t].double()).item() - bins.numpy()) / (40 / 254))
            )
            totals["reward"].append(-(code * torch.log_softmax(world_model.reward_head(deter), -1)).sum())
            logit = world_model.termination_head(deter)[0]
            probability = torch.sigmoid(logit if batch.termination[b, t] else -logit)
            totals["termination"].append(-torch.log(probability))
            if t + 1 < seqlen and not batch.is_first[b, t + 1]:
                q, p = posterior[b, t + 1], mixed(world_model.prior_head(deter))
                kl = kl_divergence(Categorical(probs=q), Categorical(probs=p)).sum()
                totals["dynamics"].append(kl.clamp(min=1.0))
                totals["representation"].append(kl.clamp(min=1.0))
    return {name: torch.stack(values).mean() for name, values in totals.items()}


@pytest.mark.parametrize("backbone", BACKBONES)
def test_loss_equals_a_loop_over_time_steps(backbone, monkeypatch):
    world_model, batch = make_world_model(backbone).eval(), make_batch()
    drawn = {}

    def remember(log_probs):
        drawn["stoch"] = Categorical(logits=log_probs).sample()
        return torch.nn.functional.one_hot(drawn["stoch"], C).double()

    monkeypatch.setattr("sub_models.world_models.sample_one_hot", remember)
    total, metrics = world_model.loss(batch)
    stoch = torch.nn.functional.one_hot(drawn["stoch"], C).double().flatten(-2)
    expected = brute_force_loss(world_model, batch, stoch)
    for name, value in expected.items():
        torch.testing.assert_close(metrics[f"world_model/{name}"], value.detach(), msg=lambda m, n=name: f"{n}: {m}")
    weights = {"dynamics": 1.0, "representation": 0.1}
    torch.testing.assert_close(total, sum(weights.get(name, 1.0) * value for name, value in expected.items()))


def test_kl_terms_train_one_side_each():
    """β_dyn trains the prior, β_rep the posterior: neither moves the other's head.

    The core's input is cut off here, for through it the latent, and so the posterior, shapes every prior.
    """
    batch = make_batch()
    for coefs, trained, still in (
        ({"dynamics_coef": 1e3, "representation_coef": 0.0}, "prior_head", "posterior_head"),
        ({"dynamics_coef": 0.0, "representation_coef": 1e3}, "posterior_head", "prior_head"),
    ):
        world_model = make_world_model(free_bits=0.0, **coefs)
        baseline = make_world_model(free_bits=0.0, dynamics_coef=0.0, representation_coef=0.0)
        gradients = []
        for model in (world_model, baseline):
            core = model.sequence_model.forward
            model.sequence_model.forward = lambda stoch, *rest, core=core: core(stoch.detach(), *rest)
            torch.manual_seed(1)
            loss, _ = model.loss(batch)
            loss.backward()
            gradients.append(model)

        def difference(name, gradients=gradients):
            first, second = (getattr(model, name).weight.grad for model in gradients)
            return (first if second is None else first - second).abs().max() if first is not None else 0.0

        assert difference(trained) > 1.0
        assert difference(still) < 1e-9


def test_pairs_across_an_episode_start_are_left_out_of_the_kl():
    """What follows an episode's end cannot be predicted; with the mask its observation does not touch the KL."""
    batch = make_batch()
    other = batch._replace(obs=batch.obs.clone())
    other.obs[0, 3] = 255 - other.obs[0, 3]  # the first observation of the next episode
    values = {}
    for mask in (True, False):
        world_model = make_world_model(mask_episode_start=mask, free_bits=0.0).eval()
        pair = []
        for variant in (batch, other):
            truncated = Batch(*(x[:1, :4] for x in variant if x is not None))  # the pair (2, 3) is the last one
            torch.manual_seed(0)
            pair.append(world_model.loss(truncated)[1]["world_model/kl"])
        values[mask] = abs(pair[0] - pair[1]).item()
    assert values[True] < 1e-12 < 1e-6 < values[False]


@pytest.mark.parametrize("backbone", BACKBONES)
def test_reset_at_episode_start_cuts_the_state(backbone):
    batch = make_batch()
    for reset in (True, False):
        world_model = make_world_model(backbone, reset_at_episode_start=reset).eval()
        stoch = torch.randn(1, 6, K * C, dtype=torch.float64)
        action = world_model.encode_action(batch.action[:1])
        whole = world_model.sequence_model(stoch, action, world_model.segments(batch.is_first[:1]))
        alone = world_model.sequence_model(stoch[:, 3:], action[:, 3:])
        assert torch.allclose(whole[:, 3:], alone, atol=1e-10) == reset


def test_what_is_monitored_has_the_values_that_its_name_says():
    """Entropy of the latents and KL in nats over all categoricals, without free bits; the norm before clipping."""
    world_model, batch = make_world_model(unimix_ratio=0.0, free_bits=1.0), make_batch()
    for head in (world_model.posterior_head, world_model.prior_head):
        torch.nn.init.zeros_(head.weight)
        torch.nn.init.zeros_(head.bias)
    metrics = world_model.update(batch)
    uniform = K * np.log(C)
    assert metrics["world_model/posterior_entropy"].item() == pytest.approx(uniform)
    assert metrics["world_model/prior_entropy"].item() == pytest.approx(uniform)
    assert metrics["world_model/kl"].item() == pytest.approx(0.0, abs=1e-12)
    assert metrics["world_model/dynamics"].item() == 1.0
    for head in (world_model.posterior_head, world_model.prior_head):
        torch.nn.init.zeros_(head.weight)
        torch.nn.init.zeros_(head.bias)
    with torch.no_grad():  # the prior: ln 2 more for the first class of each categorical
        world_model.prior_head.bias.unflatten(0, (K, C))[:, 0] = np.log(2.0)
    _, metrics = world_model.loss(batch)
    expected = K * (np.log(C + 1) - np.log(C) - np.log(2.0) / C)
    assert metrics["world_model/kl"].item() == pytest.approx(expected)
    world_model.optimiser.max_grad_norm = 1e-3
    metrics = world_model.update(batch)
    clipped = torch.stack([p.grad.square().sum() for p in world_model.parameters()]).sum().sqrt().item()
    assert metrics["world_model/grad_norm"] > 1e-3 and metrics["world_model/clipped"] == 1
    assert clipped == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("norm", ["batch", "layer"])
def test_an_update_that_is_left_out_leaves_no_trace(norm):
    """Running statistics that took in a bad batch would spoil acting and imagination for good."""
    world_model = make_world_model(norm=norm)
    world_model.update(make_batch())
    before = {name: value.clone() for name, value in world_model.state_dict().items()}
    bad = make_batch(seed=1)
    bad.reward[0, 0] = torch.nan
    assert world_model.update(bad)["world_model/skipped"] == 1
    moved = [name for name, value in world_model.state_dict().items() if not torch.equal(value, before[name])]
    assert [name for name in moved if not name.endswith("num_batches_tracked")] == []
    world_model.update(make_batch())
    state = world_model.state_dict()
    running = [name for name in state if "running" in name]
    assert bool(running) == (norm == "batch")
    assert all(torch.isfinite(state[name]).all() and not torch.equal(state[name], before[name]) for name in running)


def test_update_lowers_the_loss():
    world_model, batch = make_world_model(), make_batch(4, 8)
    losses = [world_model.update(batch)["world_model/loss"].item() for _ in range(30)]
    assert np.mean(losses[-5:]) < 0.9 * np.mean(losses[:5])


@pytest.mark.parametrize("continuous", [False, True])
@pytest.mark.parametrize("backbone", BACKBONES)
def test_imagined_features_equal_the_parallel_pass(backbone, continuous):
    """The d of every imagined step must be what the core gives for the whole sequence at once."""
    world_model = make_world_model(backbone, continuous)
    contexts = make_batch(3, 5, continuous)
    seen = {}
    original = world_model.sequence_model.start

    def record(stoch, action, seq_idx, max_seqlen):
        seen["contexts"] = (stoch, action, seq_idx)
        return original(stoch, action, seq_idx, max_seqlen)

    world_model.sequence_model.start = record
    rollout = world_model.imagine(UniformPolicy(continuous), contexts, horizon=7)
    context_stoch, context_action, seq_idx = seen["contexts"]
    stoch = torch.cat((context_stoch, rollout.feature[:, :-1, : K * C]), 1)
    action = torch.cat((context_action, world_model.encode_action(rollout.action)), 1)
    seq_idx = torch.cat((seq_idx, seq_idx[:, -1:].expand(-1, 7)), 1)
    deter = world_model.sequence_model(stoch, action, seq_idx)  # (3, 12, D)
    torch.testing.assert_close(rollout.feature[..., K * C :], deter[:, 4:], atol=1e-10, rtol=1e-10)
    reward = world_model.reward_code.decode(world_model.reward_head(deter[:, 5:]))
    torch.testing.assert_close(rollout.reward, reward)
    termination = (world_model.termination_head(deter[:, 5:]).squeeze(-1) > 0).double()
    assert torch.equal(rollout.termination, termination)
    assert rollout.feature.shape == (3, 8, K * C + D) and rollout.log_prob.shape == (3, 7)
    assert rollout.normed is None and not any(x.requires_grad for x in rollout[:-1])


@pytest.mark.parametrize("mask", [True, False])
def test_weight_is_zero_behind_a_termination(mask):
    world_model = make_world_model(mask_after_termination=mask)
    termination = torch.tensor([[0.0, 0, 0, 0], [0, 1, 0, 0], [1, 0, 0, 1], [0, 0, 0, 0]])
    weight = world_model._alive(torch.tensor([0.0, 0.0, 0.0, 1.0]), termination)
    expected = [[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]] if mask else np.ones((4, 4))
    np.testing.assert_array_equal(weight.numpy(), expected)


def test_a_rollout_from_a_terminal_row_is_dead():
    """There is nothing to imagine behind the end of an episode."""
    world_model, contexts = make_world_model(), make_batch(4, 5)
    rollout = world_model.imagine(UniformPolicy(), contexts, 3)
    ended = contexts.termination[:, -1] > 0
    assert ended.any() and not ended.all()
    assert not rollout.weight[ended].any() and rollout.weight[~ended, 0].all()


@pytest.mark.parametrize("continuous", [False, True])
def test_rollouts_hold_the_log_probability_of_the_action_they_hold(continuous):
    world_model, contexts = make_world_model(continuous=continuous), make_batch(4, 5, continuous)
    agent = make_agent_for(world_model)
    rollout = world_model.imagine(agent, contexts, 3)
    expected = agent.actions.log_prob(agent.policy(rollout.feature[:, :-1]), rollout.action)
    torch.testing.assert_close(rollout.log_prob, expected)


def test_imagination_and_pictures_move_nothing():
    """Fault of published code: using the model moved its running statistics."""
    world_model, batch = make_world_model(), make_batch(3, 5)
    world_model.update(batch)
    before = copy.deepcopy(world_model.state_dict())
    world_model.imagine(UniformPolicy(), batch, 3)
    world_model.reconstruct(batch.obs)
    world_model.predict_open_loop(batch, 2)
    for key, value in world_model.state_dict().items():
        assert torch.equal(value, before[key]), key


@pytest.mark.parametrize("backbone", BACKBONES)
def test_open_loop_prediction_sees_only_context_and_actions(backbone):
    world_model, batch = make_world_model(backbone), make_batch(2, 6)
    changed = batch._replace(obs=batch.obs.clone())
    changed.obs[:, 3:] = 7
    frames = []
    for variant in (batch, changed):
        torch.manual_seed(4)
        frames.append(world_model.predict_open_loop(variant, 3))
    assert torch.equal(*frames) and frames[0].shape == batch.obs.shape and frames[0].dtype == torch.uint8
    with pytest.raises(ValueError, match=r"context_length=6, expected 1..5"):
        world_model.predict_open_loop(batch, 6)


def test_reconstruction_shows_what_the_decoder_says():
    world_model, batch = make_world_model(), make_batch()
    torch.manual_seed(2)
    frames = world_model.reconstruct(batch.obs)
    torch.manual_seed(2)
    world_model.eval()
    image = batch.obs.permute(0, 1, 4, 2, 3).double() / 255
    stoch = sample_one_hot(world_model.posterior(image)).flatten(-2)
    decoded = world_model.decoder(stoch.flatten(0, 1)).unflatten(0, (2, 6)).permute(0, 1, 3, 4, 2)
    np.testing.assert_allclose(frames.numpy(), (decoded * 255).round().detach().numpy())


@pytest.mark.parametrize("kind", ["AC", "PPO"])
def test_updates_read_nothing_back(monkeypatch, kind):
    """Fault of published code: every update waited for the device to print its losses."""
    world_model, batch = make_world_model(), make_batch(3, 5)
    agent = make_agent_for(world_model, kind)

    def refuse(tensor, *_):
        raise AssertionError("an update reads a tensor on the host")

    for name in ("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    metrics = {**world_model.update(batch), **agent.update(world_model.imagine(agent, batch, 3))}
    monkeypatch.undo()
    assert all(isinstance(value, torch.Tensor) and value.dim() == 0 for value in metrics.values())


@pytest.mark.parametrize(
    ("backbone", "kind", "continuous"),
    [
        ("Mamba2", "AC", False),
        pytest.param("Transformer", "PPO", True, marks=pytest.mark.slow),
        pytest.param("Mamba", "AC", True, marks=pytest.mark.slow),
    ],
)
def test_compiled_parts_compute_the_same(monkeypatch, backbone, kind, continuous):
    """Every part becomes one program without a break, and the program draws and computes what the plain code does. The
    names of the state stay: published code saved compiled modules with a prefix."""
    for module in (sub_models.world_models, agents):  # "eager": traced as on a GPU, without waiting for a compiler
        trace = partial(torch.compile, fullgraph=True, dynamic=False, backend="eager")
        monkeypatch.setattr(module, "compiled", trace)
    batch, histories = make_batch(3, 5, continuous), []
    for fast in (False, True):
        world_model = make_world_model(backbone, continuous)
        agent = make_agent_for(world_model, kind)
        names = [*world_model.state_dict(), *agent.state_dict()]
        if fast:
            world_model.compile_parts()
            agent.compile_parts()
            assert world_model.encoder.relaid and world_model.decoder.relaid
        assert [*world_model.state_dict(), *agent.state_dict()] == names
        torch.manual_seed(1)
        history = []
        for _ in range(2):
            metrics = {**world_model.update(batch), **agent.update(world_model.imagine(agent, batch, 3))}
            history.append(torch.stack([metrics[name].double() for name in sorted(metrics)]))
        histories.append(torch.stack(history))
    torch.testing.assert_close(histories[1], histories[0], rtol=1e-9, atol=1e-9)

"""The agents: statistics, distributions, advantage scale, masking, PPO's ratio and early stop, saving."""

import copy
import math

import numpy as np
import pytest
import torch
from torch.distributions import Categorical, Normal, TanhTransform, TransformedDistribution

from agents import (
    VARIANCE_FLOOR,
    ActorCriticAgent,
    CategoricalActions,
    FeatureNorm,
    PPOAgent,
    ReturnScale,
    TanhGaussianActions,
)
from sub_models.functions_losses import lambda_return
from sub_models.optimiser import Optimiser
from sub_models.world_models import Rollout

F, A, H, B = 12, 4, 5, 32
PPO_ARGUMENTS = {"epsilon_clip": 0.2, "num_epochs": 3, "minibatch": 50, "critic_coef": 1.0, "kl_threshold": 1e9}


def make_agent(kind="AC", continuous=False, learning_rate=1e-3, **ppo):
    torch.manual_seed(0)
    actions = TanhGaussianActions(2) if continuous else CategoricalActions(A, 0.0)
    arguments = {"actor_units": 16, "critic_units": 16, "num_layers": 2}
    if kind == "PPO":
        agent = PPOAgent(F, actions, **{**PPO_ARGUMENTS, **ppo}, **arguments)
    else:
        agent = ActorCriticAgent(F, actions, **arguments)
    agent.optimiser = Optimiser(agent.trained_parameters(), "Adam", learning_rate, 1e-8, 100.0)
    return agent


def make_rollout(agent, weight=None, seed=1):
    torch.manual_seed(seed)
    dtype = agent.feature_norm.mean.dtype
    feature = torch.randn(B, H + 1, F, dtype=dtype) * 3 + 1
    _, action, log_prob = agent.sample(feature[:, :-1], agent.noise(B, H))
    termination = (torch.rand(B, H) < 0.1).to(dtype)
    weight = torch.ones(B, H, dtype=dtype) if weight is None else weight
    return Rollout(feature, action, torch.randn(B, H, dtype=dtype), termination, log_prob, weight)


def test_feature_norm_takes_the_first_batch_and_then_averages_exactly():
    """The buffers must be the mean and variance of the exponentially weighted mixture of all batches."""
    norm = FeatureNorm(3, decay=0.9).double()
    batches = [torch.randn(50, 4, 3, dtype=torch.float64) * (i + 1) + i for i in range(4)]
    shares = [1.0]
    for batch in batches:
        norm.update(batch, torch.ones(50, 4, dtype=torch.float64))
    for _ in batches[1:]:
        shares = [0.9 * s for s in shares] + [0.1]
    flat = [b.flatten(0, 1) for b in batches]
    mean = sum(s * b.mean(0) for s, b in zip(shares, flat, strict=True))
    square = sum(s * b.square().mean(0) for s, b in zip(shares, flat, strict=True))
    torch.testing.assert_close(norm.mean, mean)
    torch.testing.assert_close(norm.variance, square - mean**2)
    x = torch.randn(2, 3, dtype=torch.float64)
    torch.testing.assert_close(norm(x), (x - mean) / (square - mean**2 + VARIANCE_FLOOR).sqrt())


@pytest.mark.parametrize("mean", [0.0, 100.0, 10_000.0])
def test_feature_norm_finds_a_small_variance_about_a_large_mean(mean):
    """The first batch has no running mean near it."""
    norm = FeatureNorm(2)
    feature = mean + torch.randn(64, 15, 2, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 0.0])
    norm.update(feature, torch.ones(64, 15))
    expected = feature.double().var((0, 1), correction=0).float()
    assert torch.allclose(norm.variance, expected, rtol=1e-3, atol=1e-6)
    assert torch.allclose(norm.mean, feature.double().mean((0, 1)).float(), rtol=1e-6, atol=1e-6)


def test_feature_norm_ignores_dead_steps_and_empty_batches():
    norm = FeatureNorm(2)
    feature = torch.tensor([[1.0, 2.0], [3.0, 4.0], [1e6, 1e6]])
    norm.update(feature, torch.tensor([1.0, 1.0, 0.0]))
    torch.testing.assert_close(norm.mean, torch.tensor([2.0, 3.0]))
    torch.testing.assert_close(norm.variance, torch.tensor([1.0, 1.0]))
    before = copy.deepcopy(norm.state_dict())
    norm.update(feature, torch.zeros(3))
    assert all(torch.equal(before[k], v) for k, v in norm.state_dict().items())


def test_statistics_move_in_updates_only_and_are_saved():
    """Faults of published code: statistics that also move while acting, and that a checkpoint forgets."""
    agent = make_agent()
    before = agent.feature_norm.mean.clone()
    agent.choose(torch.randn(9, F) + 5, greedy=False)
    agent.sample(torch.randn(9, F) + 5, agent.noise(9))
    assert torch.equal(agent.feature_norm.mean, before)
    agent.update(make_rollout(agent))
    assert not torch.equal(agent.feature_norm.mean, before)
    restored = make_agent()
    restored.load_state_dict(agent.state_dict())
    feature = torch.randn(9, F)
    assert torch.equal(restored.policy(feature), agent.policy(feature))
    assert torch.equal(restored.return_scale.percentiles, agent.return_scale.percentiles)


@pytest.mark.parametrize("kind", ["AC", "PPO"])
@pytest.mark.parametrize("fault", [float("nan"), float("inf")])
def test_a_rollout_that_is_not_finite_changes_nothing(kind, fault):
    """One such batch must not live on in the statistics, which no later batch could heal."""
    agent = make_agent(kind, minibatch=B * H, num_epochs=1)
    agent.update(make_rollout(agent))
    before = {name: value.clone() for name, value in agent.state_dict().items()}
    rollout = make_rollout(agent)
    rollout.feature[3, 2] = fault
    rollout.reward[1, 0] = fault
    metrics = agent.update(rollout)
    assert metrics["agent/skipped"] == 1
    moved = [name for name, value in agent.state_dict().items() if not torch.equal(value, before[name])]
    assert [name for name in moved if not name.startswith("slow_critic")] == []
    assert all(torch.isfinite(value).all() for value in agent.state_dict().values())
    assert agent.update(make_rollout(agent))["agent/skipped"] == 0


@pytest.mark.parametrize("kind", ["AC", "PPO"])
def test_an_update_that_is_left_out_moves_no_statistics(kind):
    """A gradient may overflow though rollout and loss are finite: that step then never was."""
    agent = make_agent(kind, minibatch=B * H, num_epochs=1)
    agent.update(make_rollout(agent))
    before = {name: value.clone() for name, value in agent.state_dict().items()}
    hook = agent.critic.layers[0].weight.register_hook(lambda grad: grad * float("inf"))
    assert agent.update(make_rollout(agent))["agent/skipped"] == 1
    moved = [name for name, value in agent.state_dict().items() if not torch.equal(value, before[name])]
    assert [name for name in moved if not name.startswith("slow_critic")] == []
    hook.remove()
    agent.update(make_rollout(agent))
    assert agent.return_scale.updates == 2 and agent.feature_norm.updates == 2


def test_return_scale_is_the_average_of_percentiles():
    scale = ReturnScale(decay=0.9).double()
    rng = np.random.default_rng(0)
    low = high = None
    for _ in range(4):
        returns, weight = rng.normal(size=(20, 5)) * 10, (rng.random((20, 5)) < 0.7).astype(float)
        got = scale.update(torch.from_numpy(returns), torch.from_numpy(weight))
        p5, p95 = np.quantile(returns[weight > 0], [0.05, 0.95])
        low = p5 if low is None else 0.9 * low + 0.1 * p5
        high = p95 if high is None else 0.9 * high + 0.1 * p95
        assert got.item() == pytest.approx(max(1.0, high - low), rel=1e-5)


def test_small_returns_are_not_blown_up():
    assert ReturnScale().update(torch.rand(4, 4) * 1e-3, torch.ones(4, 4)) == 1.0


def test_categorical_policy_equals_torch_distributions():
    actions = CategoricalActions(A, 0.0)
    output, action = torch.randn(6, A), torch.randint(0, A, (6,))
    params, reference = actions.parameters_of(output), Categorical(logits=output)
    torch.testing.assert_close(actions.log_prob(params, action), reference.log_prob(action))
    torch.testing.assert_close(actions.entropy(params), reference.entropy())
    assert torch.equal(actions.mode(params), output.argmax(-1))
    mixed = CategoricalActions(A, 0.2).parameters_of(output).exp()
    torch.testing.assert_close(mixed, 0.8 * reference.probs + 0.2 / A)


def test_gaussian_policy_gives_the_exact_log_probability_of_the_action_taken():
    actions = TanhGaussianActions(3)
    params = actions.parameters_of(torch.randn(500, 6, dtype=torch.float64))
    mean, std = params.chunk(2, -1)
    assert (std > 0.1).all() and (std < 1.0).all()
    u = actions.sample(params, actions.noise(500, dtype=torch.float64))
    squashed = TransformedDistribution(Normal(mean, std), [TanhTransform(cache_size=1)])
    expected = squashed.log_prob(actions.to_env(u)).sum(-1)
    torch.testing.assert_close(actions.log_prob(params, u), expected, atol=1e-5, rtol=1e-5)
    far = torch.full((1, 3), 30.0, dtype=torch.float64)  # tanh is 1 there, but log π must stay finite
    assert torch.isfinite(actions.log_prob(params[:1], far)).all() and actions.to_env(far).max() <= 1
    assert torch.equal(actions.mode(params), mean)


def test_gaussian_entropy_estimate_has_the_right_mean():
    actions = TanhGaussianActions(2)
    params = actions.parameters_of(torch.randn(1, 4)).expand(200_000, 4)
    monte_carlo = -actions.log_prob(params, actions.sample(params, actions.noise(200_000))).mean()
    assert actions.entropy(params).mean().item() == pytest.approx(monte_carlo.item(), abs=0.02)


def test_first_policy_is_nearly_uniform_and_first_value_nearly_zero():
    agent = make_agent()
    feature = torch.randn(100, F)
    assert (agent.policy(feature).exp() - 1 / A).abs().max() < 0.01
    assert agent.value_code.decode(agent.critic(agent.feature_norm(feature))).abs().max() < 0.1


def brute_force_ac_loss(agent, rollout):
    """The loss of one update, written out over every single step."""
    norm = (rollout.feature - agent.feature_norm.mean) / (agent.feature_norm.variance + VARIANCE_FLOOR).sqrt()
    logits, slow_logits = agent.critic(norm), agent.slow_critic(norm)
    value, slow_value = agent.value_code.decode(logits), agent.value_code.decode(slow_logits)
    target = lambda_return(rollout.reward, rollout.termination, value, 0.985, 0.95)
    slow_target = lambda_return(rollout.reward, rollout.termination, slow_value, 0.985, 0.95)
    alive = rollout.weight > 0
    p5, p95 = np.quantile(target[alive].detach().numpy(), [0.05, 0.95])
    distribution = Categorical(logits=agent.actor(norm[:, :-1]))
    total, count = 0.0, 0
    for b in range(B):
        for i in range(H):
            if not alive[b, i]:
                continue
            advantage = ((target[b, i] - value[b, i]) / max(1.0, p95 - p5)).detach()
            total = total - distribution.log_prob(rollout.action)[b, i] * advantage
            for goal in (target, slow_target):
                code = agent.value_code.encode(goal[b, i].detach())
                total = total - (code * torch.log_softmax(logits[b, i], -1)).sum()
            total = total - 3e-4 * distribution.entropy()[b, i]
            count += 1
    return total / count


def test_actor_critic_update_follows_the_brute_force_gradient():
    agent = make_agent().double()
    weight = (torch.rand(B, H) < 0.8).double()
    rollout = make_rollout(agent, weight)
    expected_agent = copy.deepcopy(agent)
    loss = brute_force_ac_loss(expected_agent, rollout)
    gradients = torch.autograd.grad(loss, list(expected_agent.trained_parameters()))
    agent.update(rollout)
    for parameter, gradient in zip(agent.trained_parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, atol=1e-9, rtol=1e-6)


@pytest.mark.parametrize("kind", ["AC", "PPO"])
def test_dead_steps_have_no_influence(kind):
    """Padding behind a predicted termination must not be trained on."""
    weight = torch.ones(B, H)
    weight[:, 3:] = 0.0
    results = []
    for junk in (0.0, 100.0):
        agent = make_agent(kind)
        rollout = make_rollout(agent, weight)
        termination = rollout.termination.clone()
        termination[:, 2] = 1.0
        feature = rollout.feature.clone()
        feature[:, 3:] += junk
        reward = rollout.reward + junk * (1 - weight)
        agent.update(rollout._replace(reward=reward, termination=termination, feature=feature))
        results.append(agent.state_dict())
    for key, value in results[0].items():
        torch.testing.assert_close(results[1][key], value, msg=key)


def test_slow_critic_is_an_exponential_average():
    agent = make_agent()
    slow = [p.clone() for p in agent.slow_critic.parameters()]
    agent.update(make_rollout(agent))
    for before, after, fast in zip(slow, agent.slow_critic.parameters(), agent.critic.parameters(), strict=True):
        torch.testing.assert_close(after, 0.98 * before + 0.02 * fast)


def test_ppo_starts_at_ratio_one():
    """The first minibatch sees exactly the policy that acted: its KL is zero, whatever the statistics do later."""
    agent = make_agent("PPO", minibatch=B * H, num_epochs=1)
    agent.update(make_rollout(agent))
    metrics = agent.update(make_rollout(agent, seed=2))
    assert metrics["agent/approximate_kl"].abs() < 1e-6 and metrics["agent/clip_fraction"] == 0


@pytest.mark.parametrize("minibatch", [1, 50, B * H - 1, B * H, 1000])
def test_a_pass_of_ppo_takes_every_step_once(minibatch):
    agent = make_agent("PPO", minibatch=minibatch)
    steps = torch.arange(B * H)
    parts = [steps[index] for index in agent._minibatches(len(steps), steps.device)]
    assert torch.equal(torch.cat(parts).sort().values, steps) and max(map(len, parts)) <= minibatch


@pytest.mark.parametrize("continuous", [False, True])
def test_a_pass_in_one_minibatch_is_the_shuffled_one(continuous):
    """It runs the critic once for targets and loss; a minibatch of all steps in any order has the same losses."""
    whole, shuffled = (make_agent("PPO", continuous, minibatch=minibatch).double() for minibatch in (B * H, 1))
    for agent in (whole, shuffled):
        agent.actions.entropy = lambda params: params.sum(-1)  # without random numbers
    shuffled._minibatches = lambda num_steps, device: [torch.randperm(num_steps)]
    rollout = make_rollout(whole, weight=(torch.rand(B, H) < 0.7).double())
    metrics, others = whole.update(rollout), shuffled.update(rollout)
    torch.testing.assert_close(metrics, others, atol=1e-10, rtol=1e-8)
    for parameter, other in zip(whole.parameters(), shuffled.parameters(), strict=True):
        torch.testing.assert_close(parameter, other, atol=1e-9, rtol=1e-6)
    assert whole.optimiser.updates == shuffled.optimiser.updates == 3


def test_ppo_stops_once_the_kl_passes_its_threshold():
    still = make_agent("PPO", kl_threshold=-1.0)
    rollout = make_rollout(still)
    before = copy.deepcopy(list(still.trained_parameters()))
    metrics = still.update(rollout)
    assert all(torch.equal(a, b) for a, b in zip(before, still.trained_parameters(), strict=True))
    assert metrics["agent/stopped_early"] == 1
    # after the stop nothing moves, not even when a later minibatch would be under the threshold again
    stopped, free = (make_agent("PPO", learning_rate=0.05, kl_threshold=threshold) for threshold in (1e-4, 1e9))
    for agent in (stopped, free):
        torch.manual_seed(3)
        agent.update(rollout)
    assert 1 <= stopped.optimiser.updates < free.optimiser.updates == 3 * math.ceil(B * H / 50)


def test_ppo_logs_what_was_before_its_stop():
    """Minibatches behind the stop taught nothing; their KL and losses would blur what the update did."""
    agent = make_agent("PPO", learning_rate=0.05, kl_threshold=1e-4)
    seen, judge = [], agent._minibatch_loss

    def watched(steps, going):
        loss, metrics, still_going = judge(steps, going)
        if going:
            seen.append({name: value.clone() for name, value in metrics.items()})
        return loss, metrics, still_going

    agent._minibatch_loss = watched
    metrics = agent.update(make_rollout(agent))
    minibatches = 3 * math.ceil(B * H / 50)
    assert 2 <= len(seen) < minibatches
    for name in ("approximate_kl", "policy_loss", "value_loss", "clip_fraction"):
        torch.testing.assert_close(metrics[f"agent/{name}"], torch.stack([m[name] for m in seen]).mean())
    assert metrics["agent/stopped_early"].item() == pytest.approx(1 - (len(seen) - 1) / minibatches)


def test_ppo_gradient_equals_the_clipped_objective():
    agent = make_agent("PPO", minibatch=B * H, num_epochs=1).double()
    rollout = make_rollout(agent)
    rollout = rollout._replace(log_prob=rollout.log_prob + 0.4 * torch.randn(B, H))  # ratios on both sides of the clip
    other = copy.deepcopy(agent)
    value = other.value_code.decode(other.critic(other.feature_norm(rollout.feature))).detach()
    target = lambda_return(rollout.reward, rollout.termination, value, 0.985, 0.95)
    p5, p95 = np.quantile(target.numpy(), [0.05, 0.95])
    advantage = (target - value[:, :-1]) / max(1.0, p95 - p5)
    distribution = Categorical(logits=other.actor(other.feature_norm(rollout.feature[:, :-1])))
    ratio = (distribution.log_prob(rollout.action) - rollout.log_prob).exp()
    loss = 0.0
    for r, a in zip(ratio.flatten(), advantage.flatten(), strict=True):
        clipped = min(max(r.item(), 0.8), 1.2)
        loss = loss - (r * a if (r * a).item() <= clipped * a.item() else clipped * a)
    loss = loss / (B * H) - 3e-4 * distribution.entropy().mean()
    gradients = torch.autograd.grad(loss, list(other.actor.parameters()))
    agent.update(rollout)
    for parameter, gradient in zip(agent.actor.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, atol=1e-9, rtol=1e-6)


@pytest.mark.parametrize("kind", ["AC", "PPO"])
@pytest.mark.parametrize("continuous", [False, True])
def test_a_bandit_is_learned(kind, continuous):
    """With reward for one action only, its probability must rise."""
    agent = make_agent(kind, continuous, learning_rate=3e-3)
    feature = torch.randn(64, 2, F)
    for _ in range(150):
        env_action, action, log_prob = agent.sample(feature[:, 0], agent.noise(64))
        good = env_action[:, 0].unsqueeze(-1) if continuous else (env_action == 2).float().unsqueeze(-1)
        shape = (64, 1)
        agent.update(
            Rollout(feature, action.unsqueeze(1), good, torch.ones(shape), log_prob.unsqueeze(1), torch.ones(shape))
        )
    chosen = agent.choose(feature[:, 0], greedy=True)
    assert (chosen[:, 0] > 0.8).float().mean() > 0.9 if continuous else (chosen == 2).float().mean() > 0.9

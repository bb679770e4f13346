"""The behaviour of Drama (arXiv 2410.08893, section 2.2): actor-critic (AC) and PPO, both learning from imagined
rollouts.

The two agents share networks, feature statistics, return scale and action distributions; they differ in `update` alone.

Letters: B rollouts, H imagined steps, F feature width, A actions or action width, N bins of the value code.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sub_models.compilation import compiled
from sub_models.functions_losses import (
    SymlogTwoHot,
    categorical_entropy,
    full_precision,
    index_at,
    init_orthogonal,
    lambda_return,
    masked_mean,
    masked_quantiles,
    uniform_mix_logits,
    weighted_moments,
)
from sub_models.fused_imagination import ActorParts
from sub_models.optimiser import Optimiser
from sub_models.world_models import MLPHead, Rollout

if TYPE_CHECKING:
    import gymnasium

    from utils import Config

LAST_LAYER_GAIN = 0.001
STATISTICS_DECAY = 0.99
SLOW_CRITIC_DECAY = 0.98
VARIANCE_FLOOR = 1e-3  # a class that was never seen must not blow up to an unbounded feature when it appears
MIN_STD, MAX_STD = 0.1, 1.0


class FeatureNorm(nn.Module):
    """Features minus their running mean, over the root of their running variance.

    The statistics are buffers (they belong to the checkpoint) and move in `update` only, never while acting.
    """

    def __init__(self, num_features: int, decay: float = STATISTICS_DECAY) -> None:
        super().__init__()
        self.decay = decay
        self.register_buffer("mean", torch.zeros(num_features))
        self.register_buffer("variance", torch.ones(num_features))
        self.register_buffer("updates", torch.zeros(()))

    def forward(self, feature: Tensor) -> Tensor:
        """(..., F) -> (..., F)."""
        return (feature - self.mean) * torch.rsqrt(self.variance + VARIANCE_FLOOR)

    @torch.no_grad()
    def update(self, feature: Tensor, weight: Tensor) -> None:
        """Mix in the statistics of a batch; the first batch is taken as it is, one that is not finite not at all.

        feature (..., F), weight (...).
        """
        total = weight.sum()
        # Both sums in one pass: moments about the running mean, at first about a row of the batch, either of which is
        # close enough for the variance not to cancel.
        centre = torch.where(self.updates == 0, feature[(0,) * (feature.dim() - 1)], self.mean)
        first, second = weighted_moments(feature, weight, centre)
        shift = first / total.clamp(min=1.0)
        batch_variance = (second / total.clamp(min=1.0) - shift.square()).clamp(min=0.0)
        counts = (total > 0) & torch.isfinite(batch_variance).all()  # nor is the mean otherwise
        shift = torch.where(counts, shift + (centre - self.mean), 0.0)  # of the mean
        batch_variance = torch.where(counts, batch_variance, self.variance)
        rate = torch.where(self.updates == 0, 1.0, 1.0 - self.decay) * counts
        # variance of the mixture of the two populations, with shares 1 - rate and rate
        self.variance.copy_((1 - rate) * (self.variance + rate * shift.square()) + rate * batch_variance)
        self.mean.add_(rate * shift)
        self.updates.add_(counts)


class ReturnScale(nn.Module):
    """S = P95 − P5 of the λ-returns, each percentile an exponential average whose first value is taken as it is."""

    def __init__(self, decay: float = STATISTICS_DECAY, low: float = 0.05, high: float = 0.95) -> None:
        super().__init__()
        self.decay = decay
        self.register_buffer("quantiles", torch.tensor((low, high)), persistent=False)
        self.register_buffer("percentiles", torch.zeros(2))
        self.register_buffer("updates", torch.zeros(()))

    @torch.no_grad()
    def update(self, returns: Tensor, weight: Tensor) -> Tensor:
        """returns, weight (B, H) -> divisor max(1, S), 0-d. Returns that are not finite move nothing."""
        fresh = masked_quantiles(returns, weight, self.quantiles)
        counts = (weight.sum() > 0) & torch.isfinite(torch.where(weight > 0, returns, 0.0)).all()
        fresh = torch.where(counts, fresh, self.percentiles)
        rate = torch.where(self.updates == 0, 1.0, 1.0 - self.decay) * counts
        self.percentiles.lerp_(fresh, rate)
        self.updates.add_(counts)
        return (self.percentiles[1] - self.percentiles[0]).clamp(min=1.0)

    def snapshot(self) -> Tensor:
        """(3,), for `restore`."""
        return torch.cat((self.percentiles, self.updates[None]))

    @torch.no_grad()
    def restore(self, snapshot: Tensor, wanted: Tensor) -> None:
        """Go back to a snapshot where `wanted` (0-d bool) says so."""
        percentiles, updates = torch.where(wanted, snapshot, self.snapshot()).split([2, 1])
        self.percentiles.copy_(percentiles)
        self.updates.copy_(updates[0])


class CategoricalActions(nn.Module):
    """Discrete actions: softmax policy with an optional uniform mix.   `num_outputs` logits per state."""

    def __init__(self, num_actions: int, unimix_ratio: float) -> None:
        super().__init__()
        self.num_actions, self.unimix_ratio = num_actions, unimix_ratio
        self.num_outputs = num_actions

    def parameters_of(self, output: Tensor) -> Tensor:
        """Network output (..., A) -> normalised log-probabilities (..., A), float32."""
        return uniform_mix_logits(output, self.unimix_ratio)

    def noise(self, *leading: int, **factory: Any) -> Tensor:
        """What `sample` takes for (*leading, A).   -> leading, uniform in 0..1."""
        return torch.rand(leading, **factory)

    def sample(self, log_probs: Tensor, noise: Tensor) -> Tensor:
        """(..., A), noise (...) -> action (...) int64."""
        return index_at(log_probs, noise)

    def mode(self, log_probs: Tensor) -> Tensor:
        return log_probs.argmax(-1)

    def log_prob(self, log_probs: Tensor, action: Tensor) -> Tensor:
        """(..., A), action (...) -> (...) nats."""
        return log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1)

    def entropy(self, log_probs: Tensor) -> Tensor:
        return categorical_entropy(log_probs)

    def to_env(self, action: Tensor) -> Tensor:
        """The environment takes the index itself."""
        return action


class TanhGaussianActions(nn.Module):
    """Continuous actions in (−1, 1): tanh of a Gaussian with learned standard deviation between 0.1 and 1.

    An "action" here is the Gaussian variable u before tanh: log-probabilities are then exactly those of the action that
    was taken, however close tanh(u) is to its bounds. log π(tanh u) = log N(u) − Σ log(1 − tanh² u).
    """

    def __init__(self, action_dim: int) -> None:
        super().__init__()
        self.action_dim = action_dim
        self.num_outputs = 2 * action_dim

    def parameters_of(self, output: Tensor) -> Tensor:
        """Network output (..., 2A) -> mean and standard deviation (..., 2A), float32."""
        mean, raw_std = full_precision(output).chunk(2, dim=-1)
        return torch.cat((mean, MIN_STD + (MAX_STD - MIN_STD) * torch.sigmoid(raw_std)), dim=-1)

    def noise(self, *leading: int, **factory: Any) -> Tensor:
        """What `sample` takes for (*leading, 2A).   -> (*leading, A), normal."""
        return torch.randn((*leading, self.action_dim), **factory)

    def sample(self, params: Tensor, noise: Tensor) -> Tensor:
        """(..., 2A), noise (..., A) -> u (..., A)."""
        mean, std = params.chunk(2, dim=-1)
        return mean + std * noise

    def mode(self, params: Tensor) -> Tensor:
        return params.chunk(2, dim=-1)[0]

    def log_prob(self, params: Tensor, action: Tensor) -> Tensor:
        """(..., 2A), u (..., A) -> (...) nats."""
        mean, std = params.chunk(2, dim=-1)
        gaussian = -0.5 * ((action - mean) / std).square() - std.log() - 0.5 * math.log(2 * math.pi)
        return (gaussian - self._log_slope(action)).sum(-1)

    def entropy(self, params: Tensor) -> Tensor:
        """Gaussian entropy plus a one-sample, reparameterised estimate of tanh's share.   (..., 2A) -> (...)."""
        mean, std = params.chunk(2, dim=-1)
        gaussian = std.log() + 0.5 * math.log(2 * math.pi * math.e)
        return (gaussian + self._log_slope(mean + std * torch.randn_like(std))).sum(-1)

    def to_env(self, action: Tensor) -> Tensor:
        return torch.tanh(action)

    @staticmethod
    def _log_slope(u: Tensor) -> Tensor:
        """log(1 − tanh² u) without cancellation."""
        return 2.0 * (math.log(2.0) - u - F.softplus(-2.0 * u))


class ActorCriticAgent(nn.Module):
    """Actor and critics on normalised features; `update` is the actor-critic rule of the paper.

    Args:
        feature_dim: F.   actions: distribution family of the action space.
        actor_units, critic_units, num_layers, act: sizes of the networks and their activation.
        gamma, lam: of the λ-return.   entropy_coef: weight of the entropy bonus.
        autocast_dtype: None for the parameters' own precision.
    """

    def __init__(
        self,
        feature_dim: int,
        actions: CategoricalActions | TanhGaussianActions,
        actor_units: int = 256,
        critic_units: int = 512,
        num_layers: int = 3,
        act: str = "SiLU",
        gamma: float = 0.985,
        lam: float = 0.95,
        entropy_coef: float = 3e-4,
        autocast_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.actions = actions
        self.gamma, self.lam, self.entropy_coef = gamma, lam, entropy_coef
        self.autocast_dtype = autocast_dtype
        self.value_code = SymlogTwoHot()
        self.feature_norm = FeatureNorm(feature_dim)
        self.return_scale = ReturnScale()
        self.actor = MLPHead(feature_dim, actor_units, actions.num_outputs, num_layers, act)
        self.critic = MLPHead(feature_dim, critic_units, self.value_code.num_bins, num_layers, act)
        for network in (self.actor, self.critic):
            network.apply(init_orthogonal)
            init_orthogonal(network.layers[-1], LAST_LAYER_GAIN)
        self.slow_critic = copy.deepcopy(self.critic).requires_grad_(False)
        self.optimiser: Optimiser | None = None

    def trained_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of actor and critic; the slow critic only follows."""
        yield from self.actor.parameters()
        yield from self.critic.parameters()

    def autocast(self) -> AbstractContextManager:
        device_type = self.feature_norm.mean.device.type
        return torch.autocast(device_type, self.autocast_dtype, enabled=self.autocast_dtype is not None)

    def policy(self, feature: Tensor) -> Tensor:
        """Parameters of the action distribution.   (..., F) -> (..., A) or (..., 2A), float32."""
        return self._policy(self.feature_norm(feature))

    def _normed(self, rollout: Rollout) -> Tensor:
        """What the networks take of a rollout, in the type of their products.   -> (B, H+1, F)."""
        normed = self.feature_norm(rollout.feature) if rollout.normed is None else rollout.normed
        return normed if self.autocast_dtype is None else normed.to(self.autocast_dtype)

    def _policy(self, normed: Tensor) -> Tensor:
        with self.autocast():
            output = self.actor(normed)
        return self.actions.parameters_of(output)

    def _value_logits(self, critic: MLPHead, normed: Tensor) -> Tensor:
        with self.autocast():
            return critic(normed)

    def noise(self, *leading: int) -> Tensor:
        """The random numbers that `sample` takes for features (*leading, F), in one launch."""
        mean = self.feature_norm.mean
        return self.actions.noise(*leading, dtype=mean.dtype, device=mean.device)

    @torch.no_grad()
    def sample(self, feature: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """feature (B, F), noise as `noise(B)` makes it -> environment action, action as the policy parameterises it,
        its log-probability (B,)."""
        params = self.policy(feature)
        action = self.actions.sample(params, noise)
        return self.actions.to_env(action), action, self.actions.log_prob(params, action)

    def actor_parts(self) -> ActorParts | None:
        """What the kernels of imagination need for `sample`; None for continuous actions and other networks."""
        norm = self.feature_norm
        if not isinstance(self.actions, CategoricalActions) or not self.actor.activates_in_norm:
            return None
        return ActorParts(self.actor.layers, norm.mean, norm.variance, VARIANCE_FLOOR, self.actions.unimix_ratio)

    @torch.no_grad()
    def choose(self, feature: Tensor, greedy: bool) -> Tensor:
        """Environment action: the distribution's mode if greedy, else a sample.   (B, F) -> (B,) or (B, A)."""
        params = self.policy(feature)
        action = self.actions.mode(params) if greedy else self.actions.sample(params, self.noise(*feature.shape[:-1]))
        return self.actions.to_env(action)

    def update(self, rollout: Rollout) -> dict[str, Tensor]:
        """One optimiser step on a rollout; returns metrics as 0-d tensors on the device, without waiting for it.

        Policy loss −log π(a) · sg(advantage / max(1, S)); critic: two-hot to sg(R) and to the return of the slow
        critic.
        """
        scale = self.return_scale.snapshot()
        loss, metrics = self._loss(rollout)
        metrics |= self.optimiser.update(loss)
        metrics |= self._after_update(rollout, scale, metrics["skipped"] == 0)
        return {f"agent/{name}": value for name, value in metrics.items()}

    def compile_parts(self) -> None:
        """Fuse what an update is made of; parameters and the names of the state stay as they are."""
        self._loss = compiled(self._loss)
        self._after_update = compiled(self._after_update)

    def _loss(self, rollout: Rollout) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of a whole rollout, and its parts as detached 0-d tensors; moves the return scale."""
        normed = self._normed(rollout)  # (B, H+1, F), once for all networks
        value_logits = self._value_logits(self.critic, normed)  # (B, H+1, N)
        value = self.value_code.decode(value_logits)
        target, slow_target = self._targets(rollout, value, self._slow_value(normed))
        scale = self.return_scale.update(target, rollout.weight)
        advantage = (target - value[:, :-1]) / scale

        params = self._policy(normed)[:, :-1]  # the last state's is cheaper to leave out here than a copy of `normed`
        log_prob = self.actions.log_prob(params, rollout.action)
        policy_loss = masked_mean(-log_prob * advantage, rollout.weight)
        entropy = masked_mean(self.actions.entropy(params), rollout.weight)
        value_loss = self._value_loss(value_logits[:, :-1], target, slow_target, rollout.weight)
        loss = policy_loss + value_loss - self.entropy_coef * entropy
        metrics = {
            "policy_loss": policy_loss.detach(),
            "value_loss": value_loss.detach(),
            "entropy": entropy.detach(),
            "return": masked_mean(target, rollout.weight),
            "return_scale": scale,
        }
        return loss, metrics

    # --- shared by both agents ---

    @torch.no_grad()
    def _slow_value(self, normed: Tensor) -> Tensor:
        """(B, H+1, F) -> (B, H+1)."""
        return self.value_code.decode(self._value_logits(self.slow_critic, normed))

    @torch.no_grad()
    def _targets(self, rollout: Rollout, value: Tensor, slow_value: Tensor) -> tuple[Tensor, Tensor]:
        """λ-returns with the critic's values (B, H+1) and with the slow critic's.   -> (B, H) twice."""
        values = torch.stack((value, slow_value))
        return lambda_return(rollout.reward, rollout.termination, values, self.gamma, self.lam).unbind()

    def _value_loss(self, logits: Tensor, target: Tensor, slow_target: Tensor, weight: Tensor) -> Tensor:
        return masked_mean(self.value_code.loss(logits, target, slow_target), weight)

    @torch.no_grad()
    def _after_update(self, rollout: Rollout, scale: Tensor, made: Tensor) -> dict[str, Tensor]:
        """Let the slow critic follow, and move the feature statistics; where no step was made (`made`, 0-d bool), these
        stay and the return scale goes back to its snapshot `scale`.   -> metrics of the rollout.

        The statistics move after the policy step, so that the step sees the policy exactly as it acted in the rollout.
        """
        slow, fast = list(self.slow_critic.parameters()), list(self.critic.parameters())
        torch._foreach_lerp_(slow, fast, 1.0 - SLOW_CRITIC_DECAY)
        self.feature_norm.update(rollout.feature[:, :-1], rollout.weight * made)
        self.return_scale.restore(scale, ~made)
        reward, weight = rollout.reward, rollout.weight
        return {"imagined_reward": masked_mean(reward, weight), "alive": masked_mean(weight, None)}


class PPOAgent(ActorCriticAgent):
    """Proximal policy optimisation (arXiv 1707.06347) on the same rollouts.

    Args (besides those of `ActorCriticAgent`):
        epsilon_clip: the ratio of new to old probability is clipped to 1 ± this.
        num_epochs, minibatch: passes over the rollout's B·H steps, and steps per optimiser update.
        critic_coef: weight of the value loss.
        kl_threshold: nats; once a minibatch's approximate KL(old ‖ new) passes it, the remaining updates are left out.
    """

    def __init__(
        self,
        *args,
        epsilon_clip: float,
        num_epochs: int,
        minibatch: int,
        critic_coef: float,
        kl_threshold: float,
        **kwargs,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.epsilon_clip, self.num_epochs, self.minibatch = epsilon_clip, num_epochs, minibatch
        self.critic_coef, self.kl_threshold = critic_coef, kl_threshold

    def update(self, rollout: Rollout) -> dict[str, Tensor]:
        """`num_epochs` passes of shuffled minibatches; value targets are made anew for each pass.

        The early stop is a device-side flag: updates after it leave everything as it is, without a host sync. Metrics
        are means over the minibatches up to the one that set it.
        """
        normed = self._normed(rollout)
        slow_value = self._slow_value(normed)  # the slow critic stays as it is until the end
        going = torch.ones((), dtype=torch.bool, device=rollout.reward.device)
        history: list[dict[str, Tensor]] = []
        snapshot, scale = self.return_scale.snapshot(), None
        for _ in range(self.num_epochs):
            if rollout.reward.numel() <= self.minibatch:
                losses, target, scale = self._pass_loss(rollout, normed, slow_value, scale, going)
                going = self._step(*losses, history)
                continue
            steps, target, scale = self._judge(rollout, normed, slow_value, scale)
            for index in self._minibatches(rollout.reward.numel(), rollout.reward.device):
                going = self._step(*self._minibatch_loss([x[index] for x in steps], going), history)
        metrics, made = self._summary({name: torch.stack([m[name] for m in history]) for name in history[0]})
        metrics |= {"return": masked_mean(target, rollout.weight), "return_scale": scale}
        metrics |= self._after_update(rollout, snapshot, made)
        return {f"agent/{name}": value for name, value in metrics.items()}

    def _step(
        self, loss: Tensor, metrics: dict[str, Tensor], going: Tensor, history: list[dict[str, Tensor]]
    ) -> Tensor:
        """The optimiser's step on a minibatch's loss, whose metrics go to the history.   -> the flag, as it came."""
        history.append(metrics | self.optimiser.update(loss, enabled=going))
        return going

    def _summary(self, columns: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        """Metrics of an update from those of its minibatches, one entry each, and whether any of these made a step."""
        stopped = columns["stopped_early"]
        before_stop = F.pad(stopped, (1, 0))[:-1] == 0  # the flag was still up before the minibatch
        columns_before = {name: torch.where(before_stop, column, 0.0) for name, column in columns.items()}
        mean = {name: masked_mean(column, before_stop) for name, column in columns_before.items()}
        mean["stopped_early"] = stopped.mean()
        return mean, (before_stop & (columns["skipped"] == 0)).any()

    def compile_parts(self) -> None:
        self._slow_value = compiled(self._slow_value)
        self._pass_loss = compiled(self._pass_loss)
        self._summary = compiled(self._summary)
        self._judge = compiled(self._judge)
        self._minibatch_loss = compiled(self._minibatch_loss)
        self._after_update = compiled(self._after_update)

    def _minibatches(self, num_steps: int, device: torch.device) -> Sequence[Tensor]:
        """Which of the steps each minibatch of a shuffled pass takes."""
        return torch.rand(num_steps, device=device).argsort().split(self.minibatch)

    def _pass_loss(
        self, rollout: Rollout, normed: Tensor, slow_value: Tensor, scale: Tensor | None, going: Tensor
    ) -> tuple[tuple[Tensor, dict[str, Tensor], Tensor], Tensor, Tensor]:
        """`_minibatch_loss` of all steps, which need no order then, with its own targets: the critic runs once.
        -> its result, the λ-returns (B, H), and the return scale, moved if it was None."""
        value_logits = self._value_logits(self.critic, normed)  # (B, H+1, N)
        targets, scale = self._judged(rollout, value_logits, slow_value, scale)
        params = self._policy(normed)[:, :-1]
        acted = (rollout.action, rollout.log_prob, rollout.weight)
        return self._clipped_loss(params, value_logits[:, :-1], *acted, *targets, going), targets[1], scale

    @torch.no_grad()
    def _judge(
        self, rollout: Rollout, normed: Tensor, slow_value: Tensor, scale: Tensor | None
    ) -> tuple[list[Tensor], Tensor, Tensor]:
        """What a pass takes minibatches of, (B·H, ...) each, the λ-returns (B, H), and the return scale, moved if it
        was None."""
        targets, scale = self._judged(rollout, self._value_logits(self.critic, normed), slow_value, scale)
        steps = (normed[:, :-1], rollout.action, rollout.log_prob, rollout.weight, *targets)
        return [x.flatten(0, 1) for x in steps], targets[1], scale

    @torch.no_grad()
    def _judged(
        self, rollout: Rollout, value_logits: Tensor, slow_value: Tensor, scale: Tensor | None
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        """Advantages and λ-returns with the critic's and with the slow critic's values, (B, H) each, and the return
        scale, moved if it was None."""
        value = self.value_code.decode(value_logits)  # (B, H+1)
        target, slow_target = self._targets(rollout, value, slow_value)
        scale = self.return_scale.update(target, rollout.weight) if scale is None else scale
        return ((target - value[:, :-1]) / scale, target, slow_target), scale

    def _minibatch_loss(self, steps: list[Tensor], going: Tensor) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Clipped loss of a minibatch, its parts as detached 0-d tensors, and the flag that says whether to go on."""
        normed, *others = steps
        return self._clipped_loss(self._policy(normed), self._value_logits(self.critic, normed), *others, going)

    def _clipped_loss(
        self,
        params: Tensor,
        value_logits: Tensor,
        action: Tensor,
        old_log_prob: Tensor,
        weight: Tensor,
        advantage: Tensor,
        target: Tensor,
        slow_target: Tensor,
        going: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """`_minibatch_loss` of what the networks say: parameters of the policy (..., A) and value logits (..., N)."""
        log_ratio = self.actions.log_prob(params, action) - old_log_prob
        ratio = log_ratio.exp()
        clipped_ratio = ratio.clamp(1 - self.epsilon_clip, 1 + self.epsilon_clip)
        policy_loss = masked_mean(-torch.minimum(ratio * advantage, clipped_ratio * advantage), weight)
        value_loss = self._value_loss(value_logits, target, slow_target, weight)
        entropy = masked_mean(self.actions.entropy(params), weight)
        with torch.no_grad():
            approximate_kl = masked_mean(ratio - 1 - log_ratio, weight)  # ≥ 0, unbiased (Schulman's third estimator)
            clip_fraction = masked_mean(((ratio - 1).abs() > self.epsilon_clip).float(), weight)
            going = going & (approximate_kl <= self.kl_threshold)
        loss = policy_loss + self.critic_coef * value_loss - self.entropy_coef * entropy
        metrics = {
            "policy_loss": policy_loss.detach(),
            "value_loss": value_loss.detach(),
            "entropy": entropy.detach(),
            "approximate_kl": approximate_kl,
            "clip_fraction": clip_fraction,
            "stopped_early": (~going).float(),
        }
        return loss, metrics, going


def build_agent(
    config: "Config", feature_dim: int, action_space: "gymnasium.Space", device: torch.device
) -> ActorCriticAgent:
    """The agent that `Models.Agent` describes, on a device, with its optimiser.

    action_space: gymnasium `Discrete`, or `Box` of shape (A,).
    """
    section = getattr(config.Models.Agent, config.Models.Agent.Policy)
    if hasattr(action_space, "n"):
        actions = CategoricalActions(int(action_space.n), config.Models.Agent.Unimix_ratio)
    else:
        actions = TanhGaussianActions(action_space.shape[0])
    use_amp = config.BasicSettings.Use_amp and device.type == "cuda"
    shared = {
        "actor_units": section.Actor.HiddenUnits,
        "critic_units": section.Critic.HiddenUnits,
        "num_layers": section.NumLayers,
        "act": section.Act,
        "gamma": section.Gamma,
        "lam": section.Lambda,
        "entropy_coef": section.EntropyCoef,
        "autocast_dtype": torch.bfloat16 if use_amp else None,
    }
    if config.Models.Agent.Policy == "PPO":
        agent = PPOAgent(
            feature_dim,
            actions,
            epsilon_clip=section.EpsilonClip,
            num_epochs=section.K_epochs,
            minibatch=section.Minibatch,
            critic_coef=section.CriticCoef,
            kl_threshold=section.KL_threshold,
            **shared,
        )
    else:
        agent = ActorCriticAgent(feature_dim, actions, **shared)
    agent.to(device)
    training, updates = config.JointTrainAgent, 1
    if config.Models.Agent.Policy == "PPO":
        steps = training.ImagineBatchSize * training.ImagineBatchLength
        updates = section.K_epochs * math.ceil(steps / section.Minibatch)
    optimiser_section = getattr(section, section.Optimiser)
    agent.optimiser = Optimiser(
        agent.trained_parameters(),
        section.Optimiser,
        optimiser_section.LearningRate,
        optimiser_section.Epsilon,
        section.Max_grad_norm,
        section.Warmup_steps,
        updates_in_a_call=updates,
    )
    return agent

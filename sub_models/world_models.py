"""Drama's world model (arXiv 2410.08893, section 2.1): encoder, discrete latent, sequence core, decoder and heads.

    z_t ~ q(z_t | obs_t)            posterior, from the encoder
    d_t = f(z_1..z_t, a_1..a_t)     sequence core: Mamba, Mamba-2 or Transformer
    z_{t+1} ~ p(z_{t+1} | d_t)      prior
    obs_t ~ decoder(z_t),  r_t ~ reward(d_t),  e_t ~ termination(d_t)

Letters: B batch, L time, H imagined steps, A actions or action width, K categoricals of C classes, Z = K·C, D width of
the deterministic state, F = Z + D. In the convolution stack `channels, height, width` are spelled out.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mamba_ssm.models.mixer_seq_simple import MambaWrapperModel
from mamba_ssm.modules.aligned_linear import AlignedLinear
from mamba_ssm.ops.triton.launch import why_not
from mamba_ssm.ops.triton.layer_norm import RMSNorm
from sub_models.compilation import compiled
from sub_models.functions_losses import (
    SymlogTwoHot,
    binary_cross_entropy,
    full_precision,
    init_truncated_normal,
    latent_terms,
    masked_mean,
    one_hot_at,
    reconstruction_loss,
    sample_one_hot,
    uniform_mix_logits,
)
from sub_models.fused_encoder import LEVELS, encode_bytes, fusible_layers, may_fuse
from sub_models.fused_imagination import ActorParts, can_draw, can_roll_out, draw_one_hot, roll_out
from sub_models.optimiser import Optimiser
from sub_models.space_to_depth import can_lay_bytes, can_relay, run_bytes, run_relaid, run_rows, run_unfinished
from sub_models.transformer_model import StochasticTransformer

if (NO_KERNELS := why_not()) is None:  # why there are none
    from sub_models.frame_error import frame_error

if TYPE_CHECKING:
    import gymnasium

    from config_files.schema import Config
    from config_files.schema import Encoder as EncoderSection
    from replay_buffer import Batch

ACTIVATIONS = {"SiLU": nn.SiLU, "ReLU": nn.ReLU, "GELU": nn.GELU, "ELU": nn.ELU}
HEAD_NORM_EPS = 1e-5


class Rollout(NamedTuple):
    """What the policy learns from: H imagined steps of B rollouts. Nothing in it carries a gradient."""

    feature: Tensor  # (B, H+1, F) float32: concat(ẑ_i, d_i)
    action: Tensor  # (B, H) int64, or (B, H, A) float32: the policy's own parameterisation (before squashing)
    reward: Tensor  # (B, H) float32, of action i
    termination: Tensor  # (B, H) float32 in {0, 1}: action i ended the life or the episode
    log_prob: Tensor  # (B, H) float32, nats, under the policy that acted
    weight: Tensor  # (B, H) float32: 0 where the rollout was dead before step i
    normed: Tensor | None = None  # (B, H+1, F): the features as the policy's networks took them, where that was kept


class Policy(Protocol):
    """The part of an agent that imagination needs."""

    def noise(self, *leading: int) -> Tensor:
        """The random numbers that `sample` takes for features (*leading, F).   -> (*leading, ...)."""
        ...

    def sample(self, feature: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """feature (B, F) and its noise -> environment action (B,) or (B, A), the same as the policy parameterises it,
        log-prob (B,)."""
        ...

    def actor_parts(self) -> ActorParts | None:
        """What `fused_imagination` makes of the policy; None where it can't."""
        ...


class ChannelNorm(nn.Module):
    """RMSNorm or LayerNorm over the channels of an image.   (B, channels, height, width) -> same."""

    def __init__(self, channels: int, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.movedim(1, -1)).movedim(-1, 1)


def image_norm(name: str, channels: int) -> nn.Module:
    """The normalisation that follows a convolution: 'batch', 'rms', 'layer' or 'none'."""
    if name == "batch":
        return nn.BatchNorm2d(channels)
    if name == "rms":
        return ChannelNorm(channels, nn.RMSNorm(channels, eps=1e-5))
    if name == "layer":
        return ChannelNorm(channels, nn.LayerNorm(channels))
    if name == "none":
        return nn.Identity()
    raise ValueError(f"image_norm: {name!r}, expected 'batch', 'rms', 'layer' or 'none'")


class Pyramid(NamedTuple):
    """Sizes of a stack of strided convolutions, from the image inwards."""

    channels: list[int]  # of the image and behind each layer
    strides: list[int]  # of each layer
    inner_size: tuple[int, int, int]  # (channels, height, width) behind the last layer


def pyramid(image_size: Sequence[int], depth: int, mults: Sequence[int], first_stride_one: bool) -> Pyramid:
    """The sizes of an encoder or decoder.   image_size: (channels, height, width).

    Raises:
        ValueError: the image cannot be halved that often.
    """
    channels, height, width = image_size
    strides = [1 if i == 0 and first_stride_one else 2 for i in range(len(mults))]
    factor = math.prod(strides)
    if height % factor or width % factor:
        raise ValueError(
            f"an image of {height}x{width} cannot be divided by {factor}, the product of strides {strides}"
        )
    widths = [channels, *(depth * mult for mult in mults)]
    return Pyramid(widths, strides, (widths[-1], height // factor, width // factor))


def same_padding(kernel: int, padding: str) -> int:
    """Border that keeps the size at stride 1; 'same' is the only padding whose sizes a decoder can mirror."""
    if padding != "same" or kernel % 2 == 0:
        raise ValueError(f"convolution with padding {padding!r} and kernel {kernel}, expected 'same' and an odd kernel")
    return kernel // 2


class Encoder(nn.Module):
    """Convolutions that halve the image (the first keeps its size if `first_stride_one`), each with norm and
    activation.

    (B, channels, height, width), floats in 0..1 or uint8 in 0..255, -> (B, embed_dim).

    Args:
        image_size: (channels, height, width).
        depth, mults: the i-th layer has depth * mults[i] channels.
        kernel, padding: odd kernel size and 'same', so that only strides shrink the image.
        norm: see `image_norm`.   act: name of the activation.
    """

    def __init__(
        self,
        image_size: Sequence[int],
        depth: int,
        mults: Sequence[int],
        kernel: int,
        padding: str,
        norm: str,
        act: str,
        first_stride_one: bool,
    ) -> None:
        super().__init__()
        sizes = pyramid(image_size, depth, mults, first_stride_one)
        border = same_padding(kernel, padding)
        layers: list[nn.Module] = []
        for c_in, c_out, stride in zip(sizes.channels[:-1], sizes.channels[1:], sizes.strides, strict=True):
            layers += [nn.Conv2d(c_in, c_out, kernel, stride, border), image_norm(norm, c_out), ACTIVATIONS[act]()]
        self.layers = nn.Sequential(*layers)
        self.embed_dim = math.prod(sizes.inner_size)
        self.size = tuple(image_size[1:])  # height, width
        self.can_relay = can_relay(layers, *image_size[1:])
        self.relaid = False  # computed on blocks of pixels
        self.fused = 0  # modules of it that `encode_bytes` computes, for images of bytes outside of training
        self.apply(init_truncated_normal)

    def forward(self, image: Tensor) -> Tensor:
        layers = list(self.layers)
        if image.dtype == torch.uint8 and self.fused and may_fuse(self.training):
            rows = encode_bytes(layers[: self.fused], image.permute(0, 2, 3, 1))
            return run_rows(layers[self.fused :], rows, blocks=True).flatten(1)
        if image.dtype == torch.uint8 and self.lays_bytes:
            return run_bytes(layers, image.permute(0, 2, 3, 1)).flatten(1)
        if image.dtype == torch.uint8:
            image = image.to(layers[0].weight.dtype) / LEVELS
        embed = run_relaid(layers, image) if self.relaid else self.layers(image)
        return embed.flatten(1)

    @property
    def lays_bytes(self) -> bool:
        """Whether images of bytes become blocks of pixels in one pass, so that they are better given as they are."""
        return self.relaid and can_lay_bytes(self.layers[0])


class Decoder(nn.Module):
    """Mirror of the encoder: linear layer, norm, activation, then transposed convolutions back to the image.

    (B, Z) -> (B, channels, height, width), in 0..1 with `final_sigmoid`. Arguments as for `Encoder`, from the image
    inwards.
    """

    def __init__(
        self,
        stoch_dim: int,
        image_size: Sequence[int],
        depth: int,
        mults: Sequence[int],
        kernel: int,
        padding: str,
        norm: str,
        act: str,
        first_stride_one: bool,
        final_sigmoid: bool,
    ) -> None:
        super().__init__()
        sizes = pyramid(image_size, depth, mults, first_stride_one)
        border = same_padding(kernel, padding)
        self.inner_size = sizes.inner_size
        self.linear = nn.Linear(stoch_dim, math.prod(sizes.inner_size))
        layers: list[nn.Module] = []
        for c_in, c_out, stride in zip(sizes.channels[:0:-1], sizes.channels[-2::-1], sizes.strides[::-1], strict=True):
            layers += [
                image_norm(norm, c_in),
                ACTIVATIONS[act](),
                nn.ConvTranspose2d(c_in, c_out, kernel, stride, border, output_padding=stride - 1),
            ]
        if final_sigmoid:
            layers.append(nn.Sigmoid())
        self.layers = nn.Sequential(*layers)
        self.can_relay = can_relay(layers, *image_size[1:])
        self.relaid = False  # computed on blocks of pixels
        self.apply(init_truncated_normal)

    def forward(self, stoch: Tensor) -> Tensor:
        inner = self.linear(stoch).unflatten(-1, self.inner_size)
        return run_relaid(self.layers, inner) if self.relaid else self.layers(inner)

    def error(self, stoch: Tensor, obs: Tensor, image: Tensor) -> Tensor:
        """`reconstruction_loss` of the decoded frames.   (B, Z), obs (B, height, width, channels) uint8 and the same
        frames as image (B, channels, height, width) in 0..1 -> (B,) float32."""
        if not self._measures_error(stoch):
            return reconstruction_loss(self(stoch), image)
        inner = self.linear(stoch).unflatten(-1, self.inner_size)
        rows, bias, _ = run_unfinished(self.layers[:-1], inner.permute(0, 2, 3, 1), blocks=False, spare=True)
        return frame_error(rows, bias, obs)

    def _measures_error(self, stoch: Tensor) -> bool:
        """Whether `frame_error` does what follows the last convolution."""
        *_, last, act = self.layers
        ends = isinstance(last, nn.ConvTranspose2d) and last.bias is not None and isinstance(act, nn.Sigmoid)
        return self.relaid and ends and stoch.is_cuda and stoch.dtype != torch.float64 and NO_KERNELS is None


class MLPHead(nn.Module):
    """`num_layers` of linear, RMSNorm, activation; then a linear layer.   (..., d_in) -> (..., d_out).

    The norm computes a SiLU itself; an identity holds its place, so that the layers' names stay. On a GPU it adds the
    bias of the layer before it, too, whose gradient then is one of the norm's sums.
    """

    def __init__(self, d_in: int, d_hidden: int, d_out: int, num_layers: int, act: str) -> None:
        super().__init__()
        self.activates_in_norm = act == "SiLU"
        layers: list[nn.Module] = []
        for i in range(num_layers):
            layers += [
                nn.Linear(d_in if i == 0 else d_hidden, d_hidden),
                RMSNorm(d_hidden, eps=HEAD_NORM_EPS, activation="silu" if self.activates_in_norm else None),
                nn.Identity() if self.activates_in_norm else ACTIVATIONS[act](),
            ]
        self.layers = nn.Sequential(*layers, AlignedLinear(d_hidden, d_out))

    def forward(self, x: Tensor) -> Tensor:
        return self._with_biases_in_norms(x) if self.activates_in_norm and x.is_cuda else self.layers(x)

    def _with_biases_in_norms(self, x: Tensor) -> Tensor:
        *hidden, last = self.layers
        for linear, norm in zip(hidden[::3], hidden[1::3], strict=True):
            x = norm(F.linear(x, linear.weight), shift=linear.bias)
        return last(x)


class WorldModel(nn.Module):
    """Encoder, latent heads, sequence core, decoder, reward and termination heads, with their loss and imagination.

    Args:
        encoder, decoder: see the classes above.
        sequence_model: core with `forward(stoch, action, seq_idx, state)`, `init_state` and `step`, of width
            `deter_dim`.
        deter_dim: D.   num_categories: K.   num_classes: C.
        num_actions: A of a discrete action space; None for continuous actions, which enter as they are.
        reward_head, termination_head: D -> reward bins, D -> 1 logit.
        unimix_ratio: share of the uniform distribution in posterior and prior.
        free_bits: nats below which a KL term is not lowered.
        dynamics_coef, representation_coef: weights of the two KL terms.
        mask_episode_start: leave KL pairs out whose second observation opens an episode.
        reset_at_episode_start: the core's state restarts where an episode begins inside a sequence.
        mask_after_termination: imagined steps after a predicted termination get weight 0.
        autocast_dtype: None for the parameters' own precision.
    """

    def __init__(
        self,
        encoder: Encoder,
        decoder: Decoder,
        sequence_model: nn.Module,
        reward_head: MLPHead,
        termination_head: MLPHead,
        deter_dim: int,
        num_categories: int,
        num_classes: int,
        num_actions: int | None,
        unimix_ratio: float = 0.01,
        free_bits: float = 1.0,
        dynamics_coef: float = 1.0,
        representation_coef: float = 0.1,
        mask_episode_start: bool = True,
        reset_at_episode_start: bool = True,
        mask_after_termination: bool = True,
        autocast_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.encoder, self.decoder, self.sequence_model = encoder, decoder, sequence_model
        self.reward_head, self.termination_head = reward_head, termination_head
        self.num_categories, self.num_classes = num_categories, num_classes
        self.stoch_dim, self.deter_dim = num_categories * num_classes, deter_dim
        self.feature_dim = self.stoch_dim + deter_dim
        self.num_actions = num_actions
        self.unimix_ratio, self.free_bits = unimix_ratio, free_bits
        self.dynamics_coef, self.representation_coef = dynamics_coef, representation_coef
        self.mask_episode_start = mask_episode_start
        self.reset_at_episode_start = reset_at_episode_start
        self.mask_after_termination = mask_after_termination
        self.autocast_dtype = autocast_dtype
        self.posterior_head = nn.Linear(encoder.embed_dim, self.stoch_dim)
        self.prior_head = nn.Linear(deter_dim, self.stoch_dim)
        self.reward_code = SymlogTwoHot()
        for part in (self.posterior_head, self.prior_head, self.reward_head, self.termination_head):
            part.apply(init_truncated_normal)
        self.optimiser: Optimiser | None = None
        self.fuses_imagination = False  # imagined steps by the kernels of `fused_imagination`, where these serve

    @property
    def device(self) -> torch.device:
        return self.prior_head.weight.device

    @property
    def compute_dtype(self) -> torch.dtype:
        """Of the products of linear layers."""
        return self.prior_head.weight.dtype if self.autocast_dtype is None else self.autocast_dtype

    def autocast(self) -> AbstractContextManager:
        return torch.autocast(self.device.type, self.autocast_dtype, enabled=self.autocast_dtype is not None)

    # --- parts ---

    def to_image(self, obs: Tensor) -> Tensor:
        """obs (..., height, width, channels) uint8 -> (..., channels, height, width) floats in 0..1, channels-last."""
        return obs.movedim(-1, -3).to(self.prior_head.weight.dtype) / 255.0

    def encode_action(self, action: Tensor) -> Tensor:
        """Discrete (...) -> one-hot (..., A); continuous (..., A) -> itself; in the parameters' dtype."""
        if self.num_actions is not None:
            action = F.one_hot(action, self.num_actions)
        return action.to(self.prior_head.weight.dtype)

    def _mixed(self, logits: Tensor) -> Tensor:
        """Head output (..., Z) -> log-probabilities (..., K, C), float32."""
        logits = logits.unflatten(-1, (self.num_categories, self.num_classes))
        return uniform_mix_logits(logits, self.unimix_ratio)

    def posterior(self, image: Tensor) -> Tensor:
        """log q(z | obs).   (..., channels, height, width), floats or bytes as `Encoder` takes them -> (..., K, C)."""
        return self._mixed(self._posterior_logits(image))

    def _posterior_logits(self, image: Tensor) -> Tensor:
        embed = self.encoder(image.flatten(0, -4))  # (prod(...), embed_dim)
        return self.posterior_head(embed).unflatten(0, image.shape[:-3])  # (..., Z)

    def prior(self, deter: Tensor) -> Tensor:
        """log p(z_next | d).   (..., D) -> (..., K, C)."""
        return self._mixed(self.prior_head(deter))

    def segments(self, is_first: Tensor) -> Tensor | None:
        """is_first (B, L) -> seq_idx (B, L) int32 that changes where an episode begins; None when states carry over."""
        return is_first.int().cumsum(dim=1, dtype=torch.int32) if self.reset_at_episode_start else None

    # --- learning ---

    def compile_parts(self) -> None:
        """Fuse what updates and imagined steps are made of; parameters and the names of the state stay as they are.

        The convolutions run on blocks of pixels (see `space_to_depth`), imagined steps by `fused_imagination` where it
        serves, and loss and the rest of imagination through torch.compile.
        """
        self.fuses_imagination = True
        for stack in (self.encoder, self.decoder):
            stack.relaid = stack.can_relay
        self.encoder.fused = fusible_layers(self.encoder.layers, *self.encoder.size, self.device)
        self.loss = compiled(self.loss)
        self._start = compiled(self._start)
        self._draw = compiled(self._draw)
        self._outcome = compiled(self._outcome)
        if self.sequence_model.max_seqlen is None:  # a state of fixed size: every step is the same program
            self.sequence_model.step = compiled(self.sequence_model.step)

    def loss(self, batch: "Batch") -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of section 2 of the paper, averaged over B and L, and its parts as detached 0-d tensors.

        batch: obs (B, L, height, width, channels) uint8; action (B, L) int64 or (B, L, A); reward, termination (B, L)
        float32; is_first (B, L) bool.
        """
        image = self.to_image(batch.obs)
        with self.autocast():
            frames = batch.obs.movedim(-1, -3) if self.encoder.lays_bytes else image
            posterior_logits = self._posterior_logits(frames)  # (B, L, Z)
            log_q = self._mixed(posterior_logits)  # (B, L, K, C)
            stoch = sample_one_hot(log_q).flatten(-2)  # (B, L, Z)
            error = self.decoder.error(stoch.flatten(0, 1), batch.obs.flatten(0, 1), image.flatten(0, 1))  # (B·L,)
            deter = self.sequence_model(stoch, self.encode_action(batch.action), self.segments(batch.is_first))
            prior_logits = self.prior_head(deter)  # (B, L, Z), of the latent one step later
            reward_logits = self.reward_head(deter)  # (B, L, N)
            termination_logits = self.termination_head(deter).squeeze(-1)  # (B, L)

        reconstruction_term = error.mean()
        reward_term = self.reward_code.loss(reward_logits, batch.reward).mean()
        termination_term = binary_cross_entropy(termination_logits, batch.termination).mean()
        dynamics, representation, posterior_entropy, prior_entropy = latent_terms(
            posterior_logits, prior_logits, log_q, self.unimix_ratio
        )
        pairs = (~batch.is_first[:, 1:]).to(log_q.dtype) if self.mask_episode_start else None  # (B, L-1)
        dynamics_term = masked_mean(dynamics.clamp(min=self.free_bits), pairs)
        representation_term = masked_mean(representation.clamp(min=self.free_bits), pairs)
        total = (
            reconstruction_term
            + reward_term
            + termination_term
            + self.dynamics_coef * dynamics_term
            + self.representation_coef * representation_term
        )
        metrics = {
            "loss": total,
            "reconstruction": reconstruction_term,
            "reward": reward_term,
            "termination": termination_term,
            "dynamics": dynamics_term,
            "representation": representation_term,
            "kl": masked_mean(dynamics, pairs),
            "posterior_entropy": posterior_entropy.mean(),
            "prior_entropy": prior_entropy.mean(),
        }
        return total, {f"world_model/{name}": value.detach() for name, value in metrics.items()}

    def update(self, batch: "Batch") -> dict[str, Tensor]:
        """One optimiser step on a batch; returns metrics as 0-d tensors on the device, without waiting for it.

        Where the optimiser leaves the step out, batch norm's running statistics stay as they were, too.
        """
        self.train()
        norms = [module for module in self.modules() if isinstance(module, nn.BatchNorm2d)]
        statistics = [buffer for norm in norms for buffer in (norm.running_mean, norm.running_var)]  # 1-d each
        before = torch.cat(statistics) if statistics else None
        loss, metrics = self.loss(batch)
        metrics |= {f"world_model/{name}": value for name, value in self.optimiser.update(loss).items()}
        if statistics:
            kept = torch.where(metrics["world_model/skipped"] > 0, before, torch.cat(statistics))
            torch._foreach_copy_(statistics, kept.split([len(buffer) for buffer in statistics]))
        return metrics

    # --- imagination ---

    @torch.no_grad()
    def imagine(self, policy: Policy, contexts: "Batch", horizon: int) -> Rollout:
        """Roll the policy out for `horizon` steps inside the model, from the end of real contexts (section 2.2).

        contexts: a `Batch` of (B, context length) rows -> `Rollout` of (B, horizon) steps. Batch statistics and random
        dropout are not used here and running statistics do not move.
        """
        self.eval()
        batch_size, context_length = contexts.obs.shape[:2]
        latent_ticket = self._tickets(horizon + 1, batch_size)  # all random numbers of the steps in one launch each
        action_noise = policy.noise(horizon, batch_size)
        with self.autocast():
            actor = policy.actor_parts() if self.fuses_imagination else None
            by_kernels = can_roll_out(self, actor)
            length = context_length + horizon
            keeps_rows = by_kernels and self.sequence_model.can_keep_rows(length)
            deter, state = self._start(contexts, length, keeps_rows)  # (B, D)
            if by_kernels:
                steps = roll_out(self, actor, deter, state, latent_ticket, action_noise)
            else:
                steps = self._roll_out(policy, deter, state, latent_ticket, action_noise)
            feature, action, log_prob, normed = steps
            # d_{i+1} tells what a_i earned and whether it ended
            reward, termination, weight = self._outcome(feature, contexts.termination[:, -1])
        return Rollout(feature, action, reward, termination, log_prob, weight, normed)

    def _start(self, contexts: "Batch", max_seqlen: int, keeps_rows: bool) -> tuple[Tensor, Any]:
        """d (B, D) and the core's state, or its kept rows, after the contexts' rows; they and what follows are
        `max_seqlen` rows."""
        logits = self._posterior_logits(contexts.obs.movedim(-1, -3))  # (B, L, Z)
        stoch = self._stoch_at(logits, self._tickets(*logits.shape[:2]))
        action = self.encode_action(contexts.action)
        start = self.sequence_model.start_keeping if keeps_rows else self.sequence_model.start
        deter, state = start(stoch, action, self.segments(contexts.is_first), max_seqlen)
        return deter[:, -1], state

    def _roll_out(
        self, policy: Policy, deter: Tensor, state: Any, latent_ticket: Tensor, action_noise: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, None]:
        """H imagined steps from d (B, D) and the core's state, which is moved on.   latent_ticket (H+1, B, K), action
        noise (H, B, ...) -> feature (B, H+1, F), action (B, H) or (B, H, A), its log-probability (B, H), and no normed
        features."""
        features, actions, log_probs = [], [], []
        for ticket, noise in zip(latent_ticket[:-1], action_noise, strict=True):
            feature, encoded_action, action, log_prob = self._draw(policy, deter, ticket, noise)
            deter = self.sequence_model.step(feature[:, : self.stoch_dim], encoded_action, state)
            features.append(feature)
            actions.append(action)
            log_probs.append(log_prob)
        features.append(self._feature(deter, latent_ticket[-1]))
        return *(torch.stack(steps, dim=1) for steps in (features, actions, log_probs)), None

    def _draw(
        self, policy: Policy, deter: Tensor, latent_ticket: Tensor, action_noise: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What an imagined step draws.   d (B, D), latent_ticket (B, K) -> feature (B, F), the action as the core takes
        it (B, A), as the policy parameterises it, and its log-probability (B,)."""
        feature = self._feature(deter, latent_ticket)
        env_action, action, log_prob = policy.sample(feature, action_noise)
        return feature, self.encode_action(env_action), action, log_prob

    def _feature(self, deter: Tensor, ticket: Tensor) -> Tensor:
        """concat(ẑ, d) with ẑ drawn from the prior.   (B, D), ticket (B, K) -> (B, F), float32."""
        stoch = self._stoch_at(self.prior_head(deter), ticket)
        return torch.cat((full_precision(stoch), full_precision(deter)), dim=-1)

    def _tickets(self, *leading: int) -> Tensor:
        """What latents are drawn by.   -> (*leading, K), uniform in 0..1."""
        weight = self.prior_head.weight
        return torch.rand((*leading, self.num_categories), dtype=weight.dtype, device=weight.device)

    def _stoch_at(self, logits: Tensor, ticket: Tensor) -> Tensor:
        """The latent that tickets fall upon, as one-hot codes without gradient.   head output (..., Z), (..., K) ->
        (..., Z)."""
        if can_draw(logits):
            return draw_one_hot(logits, ticket, self.unimix_ratio)
        return one_hot_at(self._mixed(logits), ticket).flatten(-2)

    def _outcome(self, feature: Tensor, context_termination: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Reward and termination (0 or 1) that the model reads off the later d's, and the steps' weight.
        feature (B, H+1, F), context_termination (B,) -> (B, H) float32, three times."""
        deter = feature[:, 1:, self.stoch_dim :]
        reward = self.reward_code.decode(self.reward_head(deter))
        termination = (self.termination_head(deter).squeeze(-1) > 0).to(reward.dtype)
        return reward, termination, self._alive(context_termination, termination)

    def _alive(self, context_termination: Tensor, termination: Tensor) -> Tensor:
        """Weight (B, H): 1 until the first termination, the context's last row included.   (B,), (B, H) -> (B, H)."""
        if not self.mask_after_termination:
            return torch.ones_like(termination)
        before = torch.cat((context_termination.unsqueeze(1).to(termination.dtype), termination[:, :-1]), dim=1)
        return (1.0 - before).cumprod(dim=1)

    # --- pictures ---

    @torch.no_grad()
    def reconstruct(self, obs: Tensor) -> Tensor:
        """Decoded posterior samples of frames.   (B, L, height, width, channels) uint8 -> same."""
        self.eval()
        with self.autocast():
            stoch = sample_one_hot(self.posterior(obs.movedim(-1, -3))).flatten(-2)
        return self._decode_frames(stoch)

    @torch.no_grad()
    def predict_open_loop(self, batch: "Batch", context_length: int) -> Tensor:
        """Frames that the model sees after `context_length` rows when it gets only the actions that were really taken.

        batch with (B, L) rows -> (B, L, height, width, channels) uint8; the first `context_length` are reconstructions.
        """
        self.eval()
        seqlen = batch.obs.shape[1]
        if not 0 < context_length < seqlen:
            raise ValueError(f"predict_open_loop: context_length={context_length}, expected 1..{seqlen - 1}")
        state = self.sequence_model.init_state(batch.obs.shape[0], seqlen)
        action = self.encode_action(batch.action)
        seq_idx = self.segments(batch.is_first[:, :context_length])
        with self.autocast():
            stoch = sample_one_hot(self.posterior(batch.obs[:, :context_length].movedim(-1, -3))).flatten(-2)
            deter = self.sequence_model(stoch, action[:, :context_length], seq_idx, state)[:, -1]
            stochs = [*stoch.unbind(1)]
            for i in range(context_length, seqlen):
                stochs.append(sample_one_hot(self.prior(deter)).flatten(-2))
                deter = self.sequence_model.step(stochs[-1], action[:, i], state)
        return self._decode_frames(torch.stack(stochs, dim=1))

    def _decode_frames(self, stoch: Tensor) -> Tensor:
        with self.autocast():
            image = self.decoder(stoch.flatten(0, 1)).unflatten(0, stoch.shape[:2])
        return (full_precision(image).clamp(0, 1) * 255).round().to(torch.uint8).movedim(-3, -1)


def build_sequence_model(config: "Config", stoch_dim: int, action_dim: int) -> nn.Module:
    """The core that `Models.WorldModel.Backbone` names."""
    section = config.Models.WorldModel
    if section.Backbone == "Transformer":
        return StochasticTransformer(
            stoch_dim,
            action_dim,
            d_model=section.HiddenStateDim,
            num_layers=section.Transformer.NumLayers,
            num_heads=section.Transformer.NumHeads,
            max_seqlen=config.JointTrainAgent.BatchLength,
            dropout=section.Dropout,
        )
    ssm_cfg = section.Mamba.ssm_cfg
    shared = {"layer": section.Backbone, "d_state": ssm_cfg.d_state, "d_conv": ssm_cfg.d_conv, "expand": ssm_cfg.expand}
    if section.Backbone == "Mamba2":
        shared |= {"headdim": ssm_cfg.headdim, "ngroups": ssm_cfg.ngroups, "chunk_size": ssm_cfg.chunk_size}
    return MambaWrapperModel(
        d_model=section.HiddenStateDim,
        n_layer=section.Mamba.n_layer,
        stoch_dim=stoch_dim,
        action_dim=action_dim,
        d_intermediate=section.Mamba.d_intermediate,
        ssm_cfg=shared,
        dropout=section.Dropout,
    )


def _stack_arguments(section: "EncoderSection", in_channels: int) -> dict[str, Any]:
    _, height, width = section.InputSize
    return {
        "image_size": (in_channels, height, width),
        "depth": section.Depth,
        "mults": section.Mults,
        "kernel": section.Kernel,
        "padding": section.Padding,
        "norm": section.Norm,
        "first_stride_one": section.FirstStrideOne,
    }


def build_world_model(config: "Config", action_space: "gymnasium.Space", device: torch.device) -> WorldModel:
    """The world model that a configuration describes, on a device, with its optimiser.

    action_space: gymnasium `Discrete`, or `Box` of shape (A,).
    """
    section = config.Models.WorldModel
    discrete = hasattr(action_space, "n")
    num_actions = int(action_space.n) if discrete else None
    action_dim = num_actions if discrete else action_space.shape[0]
    stoch_dim = section.CategoricalDim * section.ClassDim
    encoder = Encoder(act=section.Act, **_stack_arguments(section.Encoder, section.InChannels))
    decoder = Decoder(
        stoch_dim,
        act=section.Act,
        final_sigmoid=section.Decoder.FinalLayerSigmoid,
        **_stack_arguments(section.Decoder, section.InChannels),
    )
    reward_head = MLPHead(
        section.HiddenStateDim,
        section.Reward.HiddenUnits,
        SymlogTwoHot().num_bins,
        section.Reward.LayerNum,
        section.Act,
    )
    termination_head = MLPHead(
        section.HiddenStateDim, section.Termination.HiddenUnits, 1, section.Termination.LayerNum, section.Act
    )
    use_amp = config.BasicSettings.Use_amp and device.type == "cuda"
    training = config.JointTrainAgent
    world_model = WorldModel(
        encoder,
        decoder,
        build_sequence_model(config, stoch_dim, action_dim),
        reward_head,
        termination_head,
        deter_dim=section.HiddenStateDim,
        num_categories=section.CategoricalDim,
        num_classes=section.ClassDim,
        num_actions=num_actions,
        unimix_ratio=section.Unimix_ratio,
        free_bits=section.FreeBits,
        dynamics_coef=section.DynamicsCoef,
        representation_coef=section.RepresentationCoef,
        mask_episode_start=training.MaskEpisodeStart,
        reset_at_episode_start=training.ResetStateAtEpisodeStart,
        mask_after_termination=training.MaskAfterTermination,
        autocast_dtype=torch.bfloat16 if use_amp else None,
    ).to(device, memory_format=torch.channels_last)
    optimiser_section = getattr(section, section.Optimiser)
    world_model.optimiser = Optimiser(
        world_model.parameters(),
        section.Optimiser,
        optimiser_section.LearningRate,
        optimiser_section.Epsilon,
        section.Max_grad_norm,
        section.Warmup_steps,
        section.Weight_decay,
    )
    return world_model

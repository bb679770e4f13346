"""Imagined steps in few launches: what `WorldModel._roll_out` does, for discrete actions and the Mamba cores.

One step is the prior's linear layer, a kernel that draws the latent, the actor's first linear layer, a kernel that is
the rest of the actor and draws the action, a kernel for the stem, and the blocks of the core. Weights are cast to
autocast's type once for all steps, and features, actions and log-probabilities written where the rollout has them. The
random numbers are those of the plain form. The kernels are Triton's (`imagination_kernels`) and run on a GPU.
Mamba-2 keeps the rows of short sequences in place of states, which are more to read and write (`ops.triton.dual_step`).

Letters as in `world_models`; U width of the actor's hidden layers, M width of the core.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from mamba_ssm.models.mixer_seq_simple import MambaWrapperModel
from mamba_ssm.ops.checks import is_differentiated
from mamba_ssm.ops.triton.launch import why_not
from mamba_ssm.ops.triton.layer_norm import RMSNorm

if (NO_KERNELS := why_not()) is None:  # why there are none
    from sub_models.imagination_kernels import ACTOR_WIDTH, draw_action, draw_latent, embed, run_draw_one_hot

if TYPE_CHECKING:
    from sub_models.world_models import WorldModel


class ActorParts(NamedTuple):
    """What imagination has to know of a policy to sample from it by its kernels."""

    layers: nn.Sequential  # N times linear, RMSNorm with SiLU, identity; then a linear layer of A outputs
    mean: Tensor  # (F), of the features
    variance: Tensor  # (F)
    variance_floor: float
    unimix_ratio: float


def can_draw(logits: Tensor) -> bool:
    """Whether `draw_one_hot` takes this head output: on a GPU, at most single precision, no gradient to come."""
    return (
        NO_KERNELS is None
        and logits.is_cuda
        and logits.dtype != torch.float64
        and not is_differentiated((logits,))
    )


def draw_one_hot(logits: Tensor, ticket: Tensor, unimix_ratio: float) -> Tensor:
    """The latent that each ticket falls upon, in one launch.   head output (..., Z), ticket (..., K) float32 in 0..1 ->
    one-hot codes (..., Z) in logits' dtype."""
    return run_draw_one_hot(logits.flatten(0, -2), ticket.flatten(0, -2), unimix_ratio).view(logits.shape)


def can_roll_out(world_model: "WorldModel", actor: ActorParts | None) -> bool:
    """Whether `roll_out` serves this model and policy: discrete actions, a core of Mamba blocks, float32 parameters on
    a GPU."""
    return (
        NO_KERNELS is None
        and actor is not None
        and world_model.device.type == "cuda"
        and isinstance(world_model.sequence_model, MambaWrapperModel)
        and isinstance(world_model.sequence_model.layers[0].norm, RMSNorm)
        and world_model.sequence_model.fused_add_norm
        and world_model.prior_head.weight.dtype == torch.float32
        and actor.layers[0].out_features <= ACTOR_WIDTH
    )


def roll_out(
    world_model: "WorldModel",
    actor: ActorParts,
    deter: Tensor,
    state: Any,
    latent_ticket: Tensor,
    action_ticket: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """d (B, D) and the core's state or kept rows, which are moved on; latent_ticket (H+1, B, K), action_ticket (H, B)
    uniform in 0..1 -> feature (B, H+1, F) float32, action (B, H) int64, its log-probability (B, H) float32, and the
    normed feature (B, H+1, F) in the type of the policy's products."""
    horizon, batch_size = action_ticket.shape
    feature = torch.empty((batch_size, horizon + 1, world_model.feature_dim), device=deter.device)
    action = torch.empty((batch_size, horizon), dtype=torch.int64, device=deter.device)
    log_prob = torch.empty((batch_size, horizon), device=deter.device)
    normed = torch.empty_like(feature, dtype=world_model.compute_dtype)
    index = torch.empty_like(latent_ticket[0], dtype=torch.int32)
    sample, embed_row = _Sampler(actor, normed.dtype), _Stem(world_model, normed.dtype)
    with torch.cuda.device_of(deter):  # where kernels are launched
        for i in range(horizon + 1):
            draw_latent(
                world_model.prior_head(deter), latent_ticket[i], deter, world_model.unimix_ratio, actor.mean,
                actor.variance, actor.variance_floor, feature[:, i], normed[:, i], index, world_model.num_classes,
            )  # fmt: skip
            if i < horizon:
                sample(normed[:, i], action_ticket[i], action[:, i], log_prob[:, i])
                hidden, normed_row = (row.unsqueeze(1) for row in embed_row(index, action[:, i]))  # (B, 1, M)
                deter = world_model.sequence_model.run_blocks(hidden, state=state, normed=normed_row).squeeze(1)
    return feature, action, log_prob, normed


class _Sampler:
    """The actor behind its normed input, with weights of one dtype."""

    def __init__(self, actor: ActorParts, dtype: torch.dtype) -> None:
        self.first, *others = actor.layers[0:-1:3]
        norms = actor.layers[1:-1:3]
        last, width = actor.layers[-1], self.first.out_features
        weights = [layer.weight for layer in others] or [self.first.weight.new_empty(0, width)]
        biases = [layer.bias for layer in others] or [self.first.bias.new_empty(0)]
        self.weights = torch.cat(weights).to(dtype).view(-1, width, width)
        self.biases = torch.cat(biases).to(dtype).view(-1, width)
        self.norms = torch.stack([norm.weight for norm in norms])
        self.last_weight, self.last_bias = last.weight.to(dtype), last.bias.to(dtype)
        self.eps, self.ratio = norms[0].eps, actor.unimix_ratio

    def __call__(self, normed: Tensor, ticket: Tensor, action: Tensor, log_prob: Tensor) -> None:
        """normed (B, F), ticket (B,) -> action (B,) and log_prob (B,), both written."""
        draw_action(
            self.first(normed), self.weights, self.biases, self.norms, self.last_weight, self.last_bias, self.eps,
            self.ratio, ticket, action, log_prob,
        )  # fmt: skip


class _Stem:
    """The core's stem and first norm on a latent and an action known by their indices, with weights of one dtype."""

    def __init__(self, world_model: "WorldModel", dtype: torch.dtype) -> None:
        linear, self.norm = world_model.sequence_model.stem
        self.next_norm = world_model.sequence_model.layers[0].norm
        self.columns = linear.weight.t().to(dtype).contiguous()  # (Z + A, M)
        self.bias = linear.bias.to(dtype)
        self.num_classes = world_model.num_classes

    def __call__(self, index: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """index (B, K), action (B,) -> (B, M) and the first block's norm of it (B, M)."""
        norms = (self.norm.weight, self.norm.eps, self.next_norm.weight, self.next_norm.eps)
        return embed(index, action, self.columns, self.bias, *norms, self.num_classes)

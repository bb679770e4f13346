"""Distributions, losses and returns of Drama (arXiv 2410.08893, sections 2 and 3), as pure functions.

Letters: B batch, L time, K categoricals, C classes of each, N bins of a two-hot code, H imagined steps.
Everything here computes in float32 or wider, whatever autocast would choose, because probabilities, logarithms and
returns lose their meaning in bfloat16.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mamba_ssm.ops.checks import is_differentiated
from mamba_ssm.ops.triton.launch import why_not

if (NO_KERNELS := why_not()) is None:  # why there are none
    from sub_models.binary_loss_kernels import run_binary_loss
    from sub_models.latent_kernels import run_latent_terms
    from sub_models.moment_kernels import run_moments
    from sub_models.return_kernels import MOST_NUMBERS, run_lambda_return, run_masked_quantiles
    from sub_models.two_hot_kernels import run_decode, run_loss

# Standard deviation of a unit normal truncated to ±2: drawing with std / 0.8796 gives back the wanted std.
TRUNCATED_NORMAL_STD = 0.87962566103423978


def full_precision(x: Tensor) -> Tensor:
    """The tensor in at least float32 (float64 stays), so that references can run in double."""
    return x if x.dtype == torch.float64 else x.float()


def symlog(x: Tensor) -> Tensor:
    """sign(x) ln(1 + |x|): squashes rewards and values of any scale.   any shape -> same shape."""
    return torch.sign(x) * torch.log1p(torch.abs(x))


def symexp(x: Tensor) -> Tensor:
    """Inverse of `symlog`: sign(x) (exp|x| - 1).   any shape -> same shape."""
    return torch.sign(x) * torch.expm1(torch.abs(x))


class SymlogTwoHot(nn.Module):
    """Scalars as a distribution over bins that are evenly spaced in symlog space (DreamerV3, arXiv 2301.04104).

    A target x lies between two neighbouring bins; its code puts on each the share that makes the mean equal symlog(x).
    Targets outside the bins' range are coded by the outermost bin.
    """

    def __init__(self, num_bins: int = 255, low: float = -20.0, high: float = 20.0) -> None:
        super().__init__()
        if num_bins < 2 or not low < high:
            raise ValueError(
                f"SymlogTwoHot: num_bins={num_bins}, low={low}, high={high}; need num_bins >= 2, low < high"
            )
        self.num_bins, self.low, self.high = num_bins, low, high
        self.register_buffer("bins", torch.linspace(low, high, num_bins), persistent=False)

    def encode(self, x: Tensor) -> Tensor:
        """x (...) -> two-hot code (..., N) that sums to 1; no gradient flows through it."""
        lower, upper_share = self._neighbours(x)
        lower, upper_share = lower.unsqueeze(-1), upper_share.unsqueeze(-1)  # (..., 1)
        index = torch.arange(self.num_bins, device=x.device)
        return (index == lower) * (1 - upper_share) + (index == lower + 1) * upper_share  # (..., N)

    @torch.no_grad()
    def _neighbours(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The lower of the two bins and the share of the upper one.   (...) -> (...) floating point, twice."""
        width = (self.high - self.low) / (self.num_bins - 1)
        position = (symlog(full_precision(x)).clamp(self.low, self.high) - self.low) / width  # (...) in bins
        lower = position.floor().clamp(max=self.num_bins - 2)
        return lower, position - lower

    def loss(self, logits: Tensor, *targets: Tensor) -> Tensor:
        """Cross-entropy in nats, summed over the targets.   logits (..., N), each target (...) -> (...).

        On a GPU in one launch. On a CPU only the two bins of a code are looked up, which takes a third of the time at
        255 bins.
        """
        if _kernels_take(*targets) and self._is_for_kernels(logits):
            rows = self._as_rows(logits)
            loss, _ = run_loss(rows, torch.stack(targets).view(-1, *rows.shape[:2]), self.low, self.high)
            return loss.view(logits.shape[:-1])
        log_probs = F.log_softmax(full_precision(logits), dim=-1)
        return sum(self._cross_entropy(log_probs, target) for target in targets)

    def _cross_entropy(self, log_probs: Tensor, target: Tensor) -> Tensor:
        lower, upper_share = self._neighbours(target)
        index = lower.nan_to_num().long().unsqueeze(-1)  # (..., 1); a target that is NaN has a share that is
        pair = log_probs.gather(-1, torch.cat((index, index + 1), dim=-1))  # (..., 2)
        return -((1 - upper_share) * pair[..., 0] + upper_share * pair[..., 1])

    @torch.no_grad()
    def decode(self, logits: Tensor) -> Tensor:
        """Mean of the distribution, back in the target's scale, without gradient.   logits (..., N) -> (...)."""
        if self._is_for_kernels(logits):
            return run_decode(self._as_rows(logits), self.bins).view(logits.shape[:-1])
        probs = F.softmax(full_precision(logits), dim=-1)
        return symexp((probs * self.bins).sum(-1))

    def _is_for_kernels(self, logits: Tensor) -> bool:
        return (
            NO_KERNELS is None
            and logits.is_cuda
            and self.bins.dtype == torch.float32
            and logits.dtype != torch.float64
            and logits.dim() in (2, 3)
            and logits.stride(-1) == 1
        )

    def _as_rows(self, logits: Tensor) -> Tensor:
        """(B, N) or (B, T, N) -> (B, T, N), without a copy."""
        return logits if logits.dim() == 3 else logits.unsqueeze(1)


def uniform_mix_logits(logits: Tensor, ratio: float) -> Tensor:
    """Log-probabilities of (1 - ratio) softmax(logits) + ratio / C, with C the number of classes (the last axis).

    Keeps every class reachable, so that KL terms stay finite.   logits (..., C) -> (..., C), normalised.
    """
    log_probs = F.log_softmax(full_precision(logits), dim=-1)
    if ratio == 0.0:
        return log_probs
    num_classes = logits.shape[-1]
    return torch.logaddexp(
        log_probs + math.log1p(-ratio), torch.full_like(log_probs, math.log(ratio) - math.log(num_classes))
    )


def sample_index(log_probs: Tensor) -> Tensor:
    """A class drawn from each categorical, without a host sync.   normalised log-probabilities (..., C) -> (...) int64.

    On a GPU each class gets a Gumbel variate and the greatest sum wins, which fuses into one kernel. On a CPU that
    would cost a fifth of imagination's time in random numbers: there, one uniform number for each categorical is looked
    up in its cumulative distribution.
    """
    if log_probs.is_cuda:
        log_probs = log_probs.detach()
        return (log_probs - torch.log(-torch.log(torch.rand_like(log_probs)))).argmax(-1)
    return index_at(log_probs, torch.rand(log_probs.shape[:-1], dtype=torch.float64, device=log_probs.device))


def index_at(log_probs: Tensor, ticket: Tensor) -> Tensor:
    """The class of each categorical that its ticket falls upon: where the cumulative distribution passes it.
    normalised log-probabilities (..., C), ticket (...) uniform in 0..1 -> (...) int64."""
    num_classes = log_probs.shape[-1]
    # A product with a triangle of ones is a cumulative sum; float64 keeps autocast out.
    triangle = torch.ones(num_classes, num_classes, dtype=torch.float64, device=log_probs.device).triu()
    cumulative = log_probs.detach().double().exp() @ triangle  # (..., C)
    passed = (cumulative <= ticket.unsqueeze(-1) * cumulative[..., -1:]).sum(-1)
    return passed.clamp(max=num_classes - 1)


def one_hot_at(log_probs: Tensor, ticket: Tensor) -> Tensor:
    """`index_at` as a one-hot code, without gradient.   (..., C), (...) -> (..., C)."""
    return F.one_hot(index_at(log_probs, ticket), log_probs.shape[-1]).to(log_probs.dtype)


def sample_one_hot(log_probs: Tensor) -> Tensor:
    """One-hot sample with the straight-through gradient of the probabilities.   (..., C) -> (..., C)."""
    sample = F.one_hot(sample_index(log_probs), log_probs.shape[-1]).to(log_probs.dtype)
    if not log_probs.requires_grad:
        return sample
    probs = log_probs.exp()
    return sample + (probs - probs.detach())


def categorical_kl(log_q: Tensor, log_p: Tensor) -> Tensor:
    """KL(q ‖ p) in nats, summed over the K categoricals.   normalised log-probabilities (..., K, C) -> (...)."""
    return (log_q.exp() * (log_q - log_p)).sum((-2, -1))


def categorical_entropy(log_probs: Tensor) -> Tensor:
    """Entropy in nats of each categorical.   normalised log-probabilities (..., C) -> (...)."""
    return -(log_probs.exp() * log_probs).sum(-1)


def binary_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy in nats of each logit's Bernoulli distribution; no gradient for the targets.   logits, target
    (B, L) -> (B, L), float32 or wider. On a GPU in one launch."""
    if _kernels_take(target) and logits.is_cuda and logits.dtype != torch.float64:
        return run_binary_loss(logits, target)
    logits = full_precision(logits)
    return F.binary_cross_entropy_with_logits(logits, target.to(logits.dtype), reduction="none")


def latent_terms(
    q_logits: Tensor, p_logits: Tensor, log_q: Tensor, ratio: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """KL of the posterior of each step but the first to the prior of the step before, as the prior learns from it and
    as the posterior does, and the entropies of posterior and prior, without gradient; nats.

    posterior and prior logits (B, L, K·C), mixed with `ratio` of the uniform distribution; log_q (B, L, K, C) are the
    posterior's mixed log-probabilities -> (B, L-1), (B, L-1), (B, L), (B, L), float32 or wider. On a GPU in one launch.
    """
    if NO_KERNELS is None and q_logits.is_cuda and torch.float64 not in (q_logits.dtype, p_logits.dtype):
        return run_latent_terms(q_logits, p_logits, log_q.shape[2], ratio)
    log_p = uniform_mix_logits(p_logits.unflatten(-1, log_q.shape[2:]), ratio)
    next_log_q, next_log_p = log_q[:, 1:], log_p[:, :-1]
    kl = (categorical_kl(next_log_q.detach(), next_log_p), categorical_kl(next_log_q, next_log_p.detach()))
    return *kl, *(categorical_entropy(x.detach()).sum(-1) for x in (log_q, log_p))


def masked_mean(x: Tensor, weight: Tensor | None) -> Tensor:
    """Mean of x over the entries of weight 1 (weight None: over all); 0 where no entry counts.   (...) -> ()."""
    if weight is None:
        return total(x) / max(x.numel(), 1)
    return total(x * weight) / total(weight).clamp(min=1.0)


def total(x: Tensor) -> Tensor:
    """Sum of all entries, in two steps.   (...) -> ().

    Compiled, many programs share the first; a single long sum takes all that leads to it into a few of them: 0.020 ms
    for the loss of 16,384 steps, 0.002 so.
    """
    return x.sum(-1).sum() if x.dim() > 1 else x.sum()


def reconstruction_loss(reconstruction: Tensor, obs: Tensor) -> Tensor:
    """Squared error summed over pixels and channels.   (..., C, H, W) twice, in 0..1 -> (...), float32."""
    return (full_precision(reconstruction) - full_precision(obs)).square().sum((-3, -2, -1))


def lambda_return(reward: Tensor, termination: Tensor, value: Tensor, gamma: float, lam: float) -> Tensor:
    """R_i = r_i + γ(1 - e_i)((1 - λ)V_{i+1} + λ R_{i+1}), R_H = V_H.

    reward, termination (B, H); value (B, H+1), or (N, B, H+1) of N critics -> (B, H) or (N, B, H), float32 or wider.
    Gradients flow if the inputs ask for them. Without gradients a GPU does it in one launch.
    """
    if value.shape[-1] != reward.shape[1] + 1 or termination.shape != reward.shape:
        raise ValueError(
            f"lambda_return: reward {tuple(reward.shape)}, termination {tuple(termination.shape)}, value "
            f"{tuple(value.shape)}; expected (B, H), (B, H), (..., B, H+1)"
        )
    value = full_precision(value)
    if _kernels_take(reward, termination, value):
        critics = value.reshape(-1, *value.shape[-2:])
        return run_lambda_return(reward, termination, critics, gamma, lam).view(*value.shape[:-1], -1)
    discount = gamma * (1.0 - termination.to(value.dtype))  # (B, H), 0 where the episode ended
    returns = [value[..., -1]]
    for i in reversed(range(reward.shape[1])):
        mixed = (1.0 - lam) * value[..., i + 1] + lam * returns[-1]
        returns.append(reward[:, i] + discount[:, i] * mixed)
    return torch.stack(returns[:0:-1], dim=-1)


def masked_quantiles(x: Tensor, weight: Tensor, quantiles: Tensor) -> Tensor:
    """Linearly interpolated quantiles of the entries of x whose weight is positive.   x, weight (...), quantiles (Q)
    -> (Q), without gradient; 0 where no entry counts.

    Written with a sort instead of `torch.nanquantile` so that it runs in a CUDA graph; on a GPU without the sort, whose
    many passes take longer than all that is computed from its result.
    """
    if _kernels_take(x, weight, quantiles) and x.numel() <= MOST_NUMBERS:
        return run_masked_quantiles(x, weight, quantiles)
    alive = weight.flatten() > 0
    ordered = torch.where(alive, full_precision(x).flatten(), math.inf).sort().values
    last = (alive.sum() - 1).clamp(min=0)
    position = quantiles.to(ordered.dtype) * last
    lower = position.floor().long()
    low_value = ordered.index_select(0, lower)  # plain indexing would wait for the device
    high_value = ordered.index_select(0, torch.minimum(lower + 1, last))
    quantile = low_value + (position - lower) * (high_value - low_value)
    return torch.where(alive.any(), quantile, torch.zeros_like(quantile))


def weighted_moments(x: Tensor, weight: Tensor, centre: Tensor) -> tuple[Tensor, Tensor]:
    """Σ w (x - centre) and Σ w (x - centre)² over all rows, on a GPU in one pass.   x (..., F), weight w (...), centre
    (F) -> (F) twice."""
    if _kernels_take(x, weight, centre) and x.dim() == 3 and x.stride(-1) == 1:
        return run_moments(x, weight, centre)
    axes, centred = tuple(range(x.dim() - 1)), x - centre
    weighted = centred * weight.unsqueeze(-1)
    return weighted.sum(axes), (weighted * centred).sum(axes)


def _kernels_take(*tensors: Tensor) -> bool:
    """Whether Triton's kernels take these inputs: float32 on a GPU, with no gradient to come."""
    return (
        NO_KERNELS is None
        and all(tensor.is_cuda and tensor.dtype == torch.float32 for tensor in tensors)
        and not is_differentiated(tensors)
    )


@torch.no_grad()
def init_truncated_normal(module: nn.Module) -> None:
    """Initialise a linear or (transposed) convolution layer in place, as `module.apply` calls it.

    Weights: normal truncated at ±2 std with variance 2 / (fan_in + fan_out); biases: zero.
    """
    if isinstance(module, (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)):
        receptive_field = math.prod(module.weight.shape[2:])
        fans = (module.weight.shape[0] + module.weight.shape[1]) * receptive_field
        std = math.sqrt(2.0 / fans) / TRUNCATED_NORMAL_STD
        nn.init.trunc_normal_(module.weight, std=std, a=-2 * std, b=2 * std)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


@torch.no_grad()
def init_orthogonal(module: nn.Module, gain: float = math.sqrt(2.0)) -> None:
    """Initialise a linear layer in place: orthogonal weights of the given gain, zero bias."""
    if isinstance(module, nn.Linear):
        nn.init.orthogonal_(module.weight, gain)
        nn.init.zeros_(module.bias)

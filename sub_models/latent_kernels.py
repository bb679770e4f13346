"""Triton kernels of the latent's loss terms: divergence and entropies of the mixed posterior and prior, in one pass
over both heads' outputs, and both gradients in another.

    P = softmax(z),   M = (1 - ρ) P + ρ / C,   kl_l = Σ M^q_{l+1} (ln M^q_{l+1} - ln M^p_l),   h = -Σ M ln M
    dz^p = -g (1 - ρ) P^p (a - Σ P^p a), a = M^q / M^p,   dz^q = g (1 - ρ) P^q (a - Σ P^q a), a = ln M^q - ln M^p

A program takes the posterior of step l and the prior of the step before; that of step 0 has no prior before it and
takes the last one, for its entropy alone.

Letters: B sequences, L steps, K categoricals, C classes; ρ the uniform share.
"""

import torch
import triton
import triton.language as tl

from mamba_ssm.ops.triton.launch import define, differentiate, next_power_of_two

Tensor = torch.Tensor


@triton.jit
def _mixed(z_ptr, cell, inside, ratio, C: tl.constexpr, MIXED: tl.constexpr):
    """P, M and ln M (K, C); 0 where there is no class."""
    z = tl.load(z_ptr + cell, mask=inside, other=-float("inf")).to(tl.float32)
    exists = (tl.max(inside.to(tl.int32), axis=1) > 0)[:, None]  # the categorical
    exponent = z - tl.where(exists, tl.max(z, axis=1)[:, None], 0.0)
    weight = tl.where(inside, tl.exp(exponent), 0.0)
    total = tl.where(exists, tl.sum(weight, axis=1)[:, None], 1.0)
    share = weight / total
    if MIXED:
        mixed = tl.where(inside, (1.0 - ratio) * share + ratio / C, 1.0)
        log_mixed = tl.log(mixed)
        mixed = tl.where(inside, mixed, 0.0)
    else:
        mixed = share
        log_mixed = tl.where(inside, exponent - tl.log(total), 0.0)
    return share, mixed, log_mixed


@triton.jit
def _cells(L, K: tl.constexpr, C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr):
    """Row of the posterior, row of the prior before it, whether these are a pair, cells (K, C) of a row, which are."""
    row = tl.program_id(0).to(tl.int64)
    paired = row % L > 0
    before = tl.where(paired, row - 1, row + L - 1)
    k, c = tl.arange(0, BLOCK_K)[:, None], tl.arange(0, BLOCK_C)[None, :]
    return row, before, paired, k * C + c, (k < K) & (c < C)


@triton.jit
def _terms_kernel(
    q_ptr, p_ptr, for_p_ptr, for_q_ptr, q_entropy_ptr, p_entropy_ptr, L, ratio,
    K: tl.constexpr, C: tl.constexpr, MIXED: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    row, before, paired, cell, inside = _cells(L, K, C, BLOCK_K, BLOCK_C)
    _, q, log_q = _mixed(q_ptr, row * K * C + cell, inside, ratio, C, MIXED)
    _, p, log_p = _mixed(p_ptr, before * K * C + cell, inside, ratio, C, MIXED)
    tl.store(q_entropy_ptr + row, -tl.sum(tl.sum(q * log_q, axis=1), axis=0))
    tl.store(p_entropy_ptr + before, -tl.sum(tl.sum(p * log_p, axis=1), axis=0))
    if paired:
        kl, pair = tl.sum(tl.sum(q * (log_q - log_p), axis=1), axis=0), row - row // L - 1
        tl.store(for_p_ptr + pair, kl)
        tl.store(for_q_ptr + pair, kl)


@triton.jit
def _gradients_kernel(
    for_p_ptr, for_q_ptr, q_ptr, p_ptr, dq_ptr, dp_ptr, L, ratio,
    K: tl.constexpr, C: tl.constexpr, MIXED: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    row, before, paired, cell, inside = _cells(L, K, C, BLOCK_K, BLOCK_C)
    q_share, q, log_q = _mixed(q_ptr, row * K * C + cell, inside, ratio, C, MIXED)
    p_share, p, log_p = _mixed(p_ptr, before * K * C + cell, inside, ratio, C, MIXED)
    pair = row - row // L - 1
    for_q = (1.0 - ratio) * tl.load(for_q_ptr + pair, mask=paired, other=0.0)
    for_p = (1.0 - ratio) * tl.load(for_p_ptr + pair, mask=paired, other=0.0)
    slope = log_q - log_p
    dq = for_q * q_share * (slope - tl.sum(q_share * slope, axis=1)[:, None])
    if MIXED:
        odds = q / tl.where(inside, p, 1.0)
        dp = -for_p * p_share * (odds - tl.sum(p_share * odds, axis=1)[:, None])
    else:
        dp = for_p * (p - q)
    tl.store(dq_ptr + row * K * C + cell, dq.to(dq_ptr.dtype.element_ty), mask=inside)
    tl.store(dp_ptr + before * K * C + cell, dp.to(dp_ptr.dtype.element_ty), mask=inside)


def _sizes(q: Tensor, categoricals: int, ratio: float) -> dict[str, int | bool]:
    classes = q.shape[2] // categoricals
    blocks = {"BLOCK_K": next_power_of_two(categoricals), "BLOCK_C": next_power_of_two(classes)}
    return {"K": categoricals, "C": classes, "MIXED": ratio > 0, **blocks}


def _launch(q: Tensor, p: Tensor, categoricals: int, ratio: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    for_p, for_q, q_entropy, p_entropy = _fake(q, p, categoricals, ratio)
    if q.numel():
        _terms_kernel[(q_entropy.numel(),)](
            q.contiguous(), p.contiguous(), for_p, for_q, q_entropy, p_entropy, q.shape[1], ratio,
            **_sizes(q, categoricals, ratio),
        )  # fmt: skip
    return for_p, for_q, q_entropy, p_entropy


def _fake(q, p, categoricals, ratio):
    batch, length, _ = q.shape
    pairs, steps = (batch, max(length - 1, 0)), (batch, length)
    return tuple(torch.empty(shape, dtype=torch.float32, device=q.device) for shape in (pairs, pairs, steps, steps))


def _launch_backward(
    dfor_p: Tensor, dfor_q: Tensor, q: Tensor, p: Tensor, categoricals: int, ratio: float
) -> tuple[Tensor, Tensor]:
    dq, dp = _fake_backward(dfor_p, dfor_q, q, p, categoricals, ratio)
    if q.numel():
        _gradients_kernel[(q.shape[0] * q.shape[1],)](
            dfor_p.contiguous(), dfor_q.contiguous(), q.contiguous(), p.contiguous(), dq, dp, q.shape[1], ratio,
            **_sizes(q, categoricals, ratio),
        )  # fmt: skip
    return dq, dp


def _fake_backward(dfor_p, dfor_q, q, p, categoricals, ratio):
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, p))


# posterior and prior logits (B, L, K · C) -> (B, L-1) twice, the divergence as p and as q learn from it, and the
# entropies of posterior and prior (B, L), without gradient; all float32
run_latent_terms = define(
    "latent_terms(Tensor q, Tensor p, int categoricals, float ratio) -> (Tensor, Tensor, Tensor, Tensor)",
    _launch,
    _fake,
)
_run_backward = define(
    "latent_terms_backward(Tensor dfor_p, Tensor dfor_q, Tensor q, Tensor p, int categoricals, float ratio)"
    " -> (Tensor, Tensor)",
    _launch_backward,
    _fake_backward,
)


def _setup_context(ctx, inputs, output) -> None:
    q, p, *ctx.options = inputs
    ctx.save_for_backward(q, p)
    ctx.mark_non_differentiable(*output[2:])


def _backward(ctx, dfor_p, dfor_q, *_):
    return *_run_backward(dfor_p, dfor_q, *ctx.saved_tensors, *ctx.options), None, None


differentiate("latent_terms", _backward, _setup_context)

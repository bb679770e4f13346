"""Triton kernels of imagination; the mathematics is that of `WorldModel`, `CategoricalActions` and the stem of
`MambaWrapperModel`, which `fused_imagination` says more about.

    draw_one_hot  head output -> z by the inverse of its cumulative distribution
    draw_latent   head output -> ẑ by the inverse of its cumulative distribution, concat(ẑ, d), the policy's input
    draw_action   first linear layer's output of the actor -> the rest of the actor, action, log π(action)
    embed         class indices of ẑ and an action -> silu(rmsnorm(W concat(ẑ, one-hot of the action) + b)), for which
                  K + 1 columns of W are summed, and the norm of that by which the first block begins

Letters: B rows, K categoricals of C classes, Z = K·C, D width of d, F = Z + D, U width of the actor's hidden layers,
A actions, M width of the core.
"""

import torch
import triton
import triton.language as tl

from mamba_ssm.ops.triton.jit_math import silu
from mamba_ssm.ops.triton.launch import ceil_div, define, next_power_of_two

Tensor = torch.Tensor

ACTOR_ROWS = 16  # of one program: the least that a tensor core takes, since programs are few
ACTOR_WIDTH = 1024  # of the actor's layers, at most: what the registers of one program hold
CHANNELS_OF_WARP = 512  # of the stem: one warp for the default width, 5.3 us on an H200 for 1024 rows, four take 6.1
WEIGHT_TILE = 2**15  # bytes of a weight that are multiplied at a time


@triton.jit
def _class_at(probs, ticket, C: tl.constexpr):
    """The class that `ticket` (R) in 0..1 falls upon in rows of probabilities (R, C).   -> (R) int32"""
    cumulative = tl.cumsum(probs, axis=1)
    total = tl.max(cumulative, axis=1)
    passed = tl.sum((cumulative <= (ticket * total)[:, None]).to(tl.int32), axis=1)
    return tl.minimum(passed, C - 1)


@triton.jit
def _softmax(logits, inside):
    weight = tl.where(inside, tl.exp(logits - tl.max(logits, axis=1)[:, None]), 0.0)
    return weight / tl.sum(weight, axis=1)[:, None]


@triton.jit
def _draw(
    logits_ptr, ticket_ptr, ratio, K: tl.constexpr, C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    """Of one row: its classes (K), their one-hot code, that code's places in a row, and which of them there are."""
    k, c = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_C)
    inside = (k < K)[:, None] & (c < C)[None, :]  # (K, C)
    cell = k[:, None] * C + c[None, :]
    logits = tl.load(logits_ptr + cell, mask=inside, other=0.0).to(tl.float32)
    logits = tl.where((c < C)[None, :], logits, -float("inf"))
    probs = (1.0 - ratio) * _softmax(logits, (c < C)[None, :]) + tl.where(inside, ratio / C, 0.0)
    ticket = tl.load(ticket_ptr + k, mask=k < K, other=0.0)
    index = _class_at(probs, ticket, C)  # (K)
    return index, (c[None, :] == index[:, None]).to(tl.float32), cell, inside


@triton.jit
def _draw_one_hot_kernel(
    logits_ptr, ticket_ptr, out_ptr, stride_logits, ratio,
    K: tl.constexpr, C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_logits
    _, stoch, cell, inside = _draw(logits_ptr, ticket_ptr + row * K, ratio, K, C, BLOCK_K, BLOCK_C)
    tl.store(out_ptr + row * K * C + cell, stoch.to(out_ptr.dtype.element_ty), mask=inside)


def _launch_draw_one_hot(logits: Tensor, ticket: Tensor, ratio: float) -> Tensor:
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    rows, categoricals = ticket.shape
    classes = logits.shape[1] // categoricals
    if rows:
        _draw_one_hot_kernel[(rows,)](
            logits, ticket.contiguous(), out, logits.stride(0), ratio, K=categoricals, C=classes,
            BLOCK_K=next_power_of_two(categoricals), BLOCK_C=next_power_of_two(classes),
        )  # fmt: skip
    return out


# logits (B, Z) with classes side by side, ticket (B, K) in 0..1, float32 -> one-hot codes (B, Z) in logits' dtype
run_draw_one_hot = define(
    "draw_one_hot(Tensor logits, Tensor ticket, float ratio) -> Tensor",
    _launch_draw_one_hot,
    lambda logits, ticket, ratio: torch.empty(logits.shape, dtype=logits.dtype, device=logits.device),
)


@triton.jit
def _draw_latent_kernel(
    logits_ptr, ticket_ptr, deter_ptr, mean_ptr, variance_ptr, feature_ptr, normed_ptr, index_ptr,
    stride_logits, stride_deter, stride_feature, stride_normed, ratio, floor,
    K: tl.constexpr, C: tl.constexpr, D: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    k, d = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D)
    logits_ptr += row * stride_logits
    index, stoch, cell, inside = _draw(logits_ptr, ticket_ptr + row * K, ratio, K, C, BLOCK_K, BLOCK_C)
    deter = tl.load(deter_ptr + row * stride_deter + d, mask=d < D, other=0.0).to(tl.float32)
    feature_ptr += row * stride_feature
    tl.store(feature_ptr + cell, stoch, mask=inside)
    tl.store(feature_ptr + K * C + d, deter, mask=d < D)
    tl.store(index_ptr + row * K + k, index, mask=k < K)
    normed_ptr += row * stride_normed
    element = normed_ptr.dtype.element_ty
    mean = tl.load(mean_ptr + cell, mask=inside, other=0.0)
    scale = tl.rsqrt(tl.load(variance_ptr + cell, mask=inside, other=1.0) + floor)
    tl.store(normed_ptr + cell, ((stoch - mean) * scale).to(element), mask=inside)
    mean = tl.load(mean_ptr + K * C + d, mask=d < D, other=0.0)
    scale = tl.rsqrt(tl.load(variance_ptr + K * C + d, mask=d < D, other=1.0) + floor)
    tl.store(normed_ptr + K * C + d, ((deter - mean) * scale).to(element), mask=d < D)


def draw_latent(
    logits: Tensor,
    ticket: Tensor,
    deter: Tensor,
    ratio: float,
    mean: Tensor,
    variance: Tensor,
    floor: float,
    feature: Tensor,
    normed: Tensor,
    index: Tensor,
    num_classes: int,
) -> None:
    """Write concat(ẑ, d) into feature (B, F) float32, (feature - mean) / √(variance + floor) into normed (B, F), the
    classes of ẑ into index (B, K) int32.

    logits (B, Z); ticket (B, K) in 0..1; deter (B, D); mean, variance (F). Rows of logits, deter, feature and normed
    may have gaps.
    """
    rows, categoricals, width = logits.shape[0], ticket.shape[1], deter.shape[1]
    _draw_latent_kernel[(rows,)](
        logits, ticket, deter, mean, variance, feature, normed, index,
        logits.stride(0), deter.stride(0), feature.stride(0), normed.stride(0), ratio, floor,
        K=categoricals, C=num_classes, D=width, BLOCK_K=next_power_of_two(categoricals),
        BLOCK_C=next_power_of_two(num_classes), BLOCK_D=next_power_of_two(width),
    )  # fmt: skip


@triton.jit
def _normed(x, weight_ptr, u, eps, U: tl.constexpr):
    """silu(rmsnorm(x) · weight), rows (R, U); what lies beyond U must be zero and stays zero."""
    weight = tl.load(weight_ptr + u, mask=u < U, other=0.0).to(tl.float32)
    return silu(x * tl.rsqrt(tl.sum(x * x, axis=1) / U + eps)[:, None] * weight[None, :])


@triton.jit
def _product(
    x_ptr, weight_ptr, bias_ptr, row, rows, N: tl.constexpr, U: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_DEPTH: tl.constexpr,
):  # fmt: skip
    """x Wᵀ + b for rows of x (B, U), W (N, U), rounded like a linear layer's output.   -> (R, N) float32"""
    n = tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, U, BLOCK_DEPTH):
        depth = first + tl.arange(0, BLOCK_DEPTH)
        x = tl.load(
            x_ptr + row[:, None] * U + depth[None, :], mask=(row < rows)[:, None] & (depth < U)[None, :], other=0.0
        )
        w = tl.load(
            weight_ptr + n[None, :] * U + depth[:, None], mask=(n < N)[None, :] & (depth < U)[:, None], other=0.0
        )
        total = tl.dot(x, w, total, input_precision="ieee")
    total += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    return total.to(x_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def _draw_action_kernel(
    hidden_ptr, weight_ptr, bias_ptr, norm_ptr, last_weight_ptr, last_bias_ptr, ticket_ptr, action_ptr, log_prob_ptr,
    rows, stride_action, stride_log_prob, eps, ratio,
    LAYERS: tl.constexpr, U: tl.constexpr, A: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_U: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_DEPTH: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    u, a = tl.arange(0, BLOCK_U), tl.arange(0, BLOCK_A)
    cell = hidden_ptr + row[:, None] * U + u[None, :]
    inside = (row < rows)[:, None] & (u < U)[None, :]
    x = tl.load(cell, mask=inside, other=0.0).to(tl.float32)
    for layer in range(LAYERS):
        x = _normed(x, norm_ptr + layer * U, u, eps, U)
        tl.debug_barrier()  # all threads have read a layer's input before one overwrites it,
        tl.store(cell, x.to(hidden_ptr.dtype.element_ty), mask=inside)
        tl.debug_barrier()  # and written it before one reads what is another's
        x = _product(
            hidden_ptr, weight_ptr + layer * U * U, bias_ptr + layer * U, row, rows, U, U, BLOCK_M, BLOCK_U, BLOCK_DEPTH
        )
    x = _normed(x, norm_ptr + LAYERS * U, u, eps, U)
    tl.debug_barrier()
    tl.store(cell, x.to(hidden_ptr.dtype.element_ty), mask=inside)
    tl.debug_barrier()
    logits = _product(hidden_ptr, last_weight_ptr, last_bias_ptr, row, rows, A, U, BLOCK_M, BLOCK_A, BLOCK_DEPTH)
    live = (a < A)[None, :]
    logits = tl.where(live, logits, -float("inf"))
    probs = (1.0 - ratio) * _softmax(logits, live) + tl.where(live, ratio / A, 0.0)  # (R, A)
    ticket = tl.load(ticket_ptr + row, mask=row < rows, other=0.0)
    action = _class_at(probs, ticket, A)  # (R)
    taken = a[None, :] == action[:, None]
    chosen = tl.sum(tl.where(taken, probs, 0.0), axis=1)
    tl.store(action_ptr + row * stride_action, action.to(tl.int64), mask=row < rows)
    tl.store(log_prob_ptr + row * stride_log_prob, tl.log(chosen), mask=row < rows)


def draw_action(
    hidden: Tensor,
    weights: Tensor,
    biases: Tensor,
    norms: Tensor,
    last_weight: Tensor,
    last_bias: Tensor,
    eps: float,
    ratio: float,
    ticket: Tensor,
    action: Tensor,
    log_prob: Tensor,
) -> None:
    """Write action (B,) int64 and its log-probability (B,) float32, views of any stride. `hidden` is overwritten.

    hidden (B, U): output of the first of N linear layers before the last; weights (N - 1, U, U), biases (N - 1, U) of
    the others, norms (N, U) of the RMSNorms behind each, last_weight (A, U) and last_bias (A) in hidden's dtype; ticket
    (B,) in 0..1.
    """
    rows, units = hidden.shape
    num_actions, block = last_weight.shape[0], max(16, next_power_of_two(units))
    _draw_action_kernel[(ceil_div(rows, ACTOR_ROWS),)](
        hidden, weights, biases, norms, last_weight, last_bias, ticket, action, log_prob,
        rows, action.stride(0), log_prob.stride(0), eps, ratio,
        LAYERS=weights.shape[0], U=units, A=num_actions,
        BLOCK_M=ACTOR_ROWS, BLOCK_U=block, BLOCK_A=max(16, next_power_of_two(num_actions)),
        BLOCK_DEPTH=max(16, min(block, WEIGHT_TILE // (block * hidden.element_size()))), num_warps=8,
    )  # fmt: skip


@triton.jit
def _embed_kernel(
    index_ptr, action_ptr, columns_ptr, bias_ptr, norm_ptr, next_norm_ptr, out_ptr, normed_ptr, stride_action, eps,
    next_eps, K: tl.constexpr, C: tl.constexpr, M: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    m = tl.arange(0, BLOCK_M)
    live = m < M
    total = tl.load(bias_ptr + m, mask=live, other=0.0).to(tl.float32)
    for k in tl.static_range(K):
        column = k * C + tl.load(index_ptr + row * K + k)
        total += tl.load(columns_ptr + column * M + m, mask=live, other=0.0).to(tl.float32)
    column = K * C + tl.load(action_ptr + row * stride_action)
    total += tl.load(columns_ptr + column * M + m, mask=live, other=0.0).to(tl.float32)
    total = total.to(out_ptr.dtype.element_ty).to(tl.float32)
    weight = tl.load(norm_ptr + m, mask=live, other=0.0).to(tl.float32)
    out = silu(total * tl.rsqrt(tl.sum(total * total) / M + eps) * weight).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * M + m, out, mask=live)
    out = out.to(tl.float32)
    weight = tl.load(next_norm_ptr + m, mask=live, other=0.0).to(tl.float32)
    normed = out * tl.rsqrt(tl.sum(out * out) / M + next_eps) * weight
    tl.store(normed_ptr + row * M + m, normed.to(normed_ptr.dtype.element_ty), mask=live)


def embed(
    index: Tensor,
    action: Tensor,
    columns: Tensor,
    bias: Tensor,
    norm: Tensor,
    eps: float,
    next_norm: Tensor,
    next_eps: float,
    num_classes: int,
) -> tuple[Tensor, Tensor]:
    """index (B, K) int32, action (B,) int64, columns (Z + A, M), bias, norm and next_norm (M) -> the stem's output and
    rmsnorm(it) · next_norm, (B, M) each in columns' dtype."""
    rows, width = index.shape[0], columns.shape[1]
    block = next_power_of_two(width)
    out, normed = (torch.empty((rows, width), dtype=columns.dtype, device=columns.device) for _ in range(2))
    _embed_kernel[(rows,)](
        index, action, columns, bias, norm, next_norm, out, normed, action.stride(0), eps, next_eps,
        K=index.shape[1], C=num_classes, M=width, BLOCK_M=block, num_warps=max(1, min(8, block // CHANNELS_OF_WARP)),
    )  # fmt: skip
    return out, normed

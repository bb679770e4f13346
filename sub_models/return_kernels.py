"""Triton kernels for what is learned from returns, a launch each instead of one for every imagined step or sort pass.

    lambda_return      R_i = r_i + γ(1 - e_i)((1 - λ)V_{i+1} + λ R_{i+1}), R_H = V_H, a scan of affine maps
    masked_quantiles   two order statistics, found bit by bit, and the value between them

Letters: B rollouts, H imagined steps, N critics, M numbers, Q quantiles.
"""

import torch
import triton
import triton.language as tl

from mamba_ssm.ops.triton.launch import ceil_div, define, next_power_of_two

Tensor = torch.Tensor

TILE = 1024  # elements of the returns that a program holds
WARPS = 16  # of a program of the quantiles
MOST_NUMBERS = 2**15  # that one program holds: 64 in each of 512 threads
DEAD = tl.constexpr(2147483647)  # the greatest key


@triton.jit
def _compose(later_factor, later_offset, factor, offset):
    """R -> offset + factor · (later_offset + later_factor · R)"""
    return factor * later_factor, offset + factor * later_offset


@triton.jit
def _lambda_return_kernel(
    reward_ptr, termination_ptr, value_ptr, out_ptr, rows, gamma, lam,
    H: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)).to(tl.int64)
    critic = tl.program_id(1).to(tl.int64)
    i = tl.arange(0, BLOCK_H)
    inside = (row < rows)[:, None] & (i < H)[None, :]  # (B, H)
    cell = row[:, None] * H + i[None, :]
    reward = tl.load(reward_ptr + cell, mask=inside, other=0.0)
    discount = gamma * (1.0 - tl.load(termination_ptr + cell, mask=inside, other=0.0))
    following = tl.load(value_ptr + critic * rows * (H + 1) + cell + row[:, None] + 1, mask=inside, other=0.0)
    last = (i == H - 1)[None, :]
    factor = tl.where(inside, tl.where(last, 0.0, discount * lam), 1.0)
    offset = tl.where(inside, reward + discount * tl.where(last, following, (1.0 - lam) * following), 0.0)
    _, returns = tl.associative_scan((factor, offset), 1, _compose, reverse=True)
    tl.store(out_ptr + critic * rows * H + cell, returns, mask=inside)


def _launch_lambda_return(reward: Tensor, termination: Tensor, value: Tensor, gamma: float, lam: float) -> Tensor:
    reward, termination, value = reward.contiguous(), termination.contiguous(), value.contiguous()
    critics, (rows, horizon) = value.shape[0], reward.shape
    out = torch.empty((critics, rows, horizon), dtype=torch.float32, device=reward.device)
    if out.numel() == 0:
        return out
    block_h = next_power_of_two(horizon)
    block_b = max(1, TILE // block_h)
    _lambda_return_kernel[(ceil_div(rows, block_b), critics)](
        reward, termination, value, out, rows, gamma, lam, H=horizon, BLOCK_B=block_b, BLOCK_H=block_h
    )
    return out


# reward, termination (B, H), value (N, B, H+1), all float32 -> (N, B, H)
run_lambda_return = define(
    "lambda_return(Tensor reward, Tensor termination, Tensor value, float gamma, float lam) -> Tensor",
    _launch_lambda_return,
    lambda reward, termination, value, gamma, lam: reward.new_empty(value.shape[0], *reward.shape),
)


@triton.jit
def _float_of(key):
    """The float32 whose place in the order is `key`."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _masked_quantiles_kernel(x_ptr, weight_ptr, quantile_ptr, out_ptr, count, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    alive = tl.load(weight_ptr + at, mask=at < count, other=0.0) > 0.0
    bits = tl.load(x_ptr + at, mask=at < count, other=0.0).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # integers in the order of the floats
    key = tl.where(alive, key, DEAD)
    num_alive = tl.sum(alive.to(tl.int32))
    last = tl.maximum(num_alive - 1, 0)
    position = tl.load(quantile_ptr + tl.program_id(0)) * last.to(tl.float32)
    rank = tl.floor(position).to(tl.int32)
    # The greatest key that at most `rank` keys are less than is that of the rank.
    below_zero = tl.sum((key < 0).to(tl.int32))
    found = tl.where(below_zero <= rank, 0, -2147483648)
    for i in range(31):
        candidate = found + (1 << (30 - i))
        below = tl.sum((key < candidate).to(tl.int32))
        found = tl.where(below <= rank, candidate, found)
    up_to = tl.sum((key <= found).to(tl.int32))
    next_key = tl.min(tl.where(key > found, key, DEAD))
    following = tl.where(up_to > tl.minimum(rank + 1, last), found, next_key)
    low = _float_of(found)
    quantile = low + (position - rank.to(tl.float32)) * (_float_of(following) - low)
    tl.store(out_ptr + tl.program_id(0), tl.where(num_alive > 0, quantile, 0.0))


def _launch_masked_quantiles(x: Tensor, weight: Tensor, quantiles: Tensor) -> Tensor:
    out = torch.empty_like(quantiles)
    block = max(128, next_power_of_two(max(1, x.numel())))
    _masked_quantiles_kernel[(len(quantiles),)](
        x.contiguous(), weight.contiguous(), quantiles, out, x.numel(), BLOCK=block, num_warps=min(WARPS, block // 128)
    )
    return out


# x, weight (...) of at most MOST_NUMBERS elements, quantiles (Q), all float32 -> (Q)
run_masked_quantiles = define(
    "masked_quantiles(Tensor x, Tensor weight, Tensor quantiles) -> Tensor",
    _launch_masked_quantiles,
    lambda x, weight, quantiles: torch.empty_like(quantiles),
)

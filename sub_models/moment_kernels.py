"""Triton kernel of `FeatureNorm`: both weighted sums of a batch of features in one pass over it.

    first_f = Σ w (x_f - c_f),   second_f = Σ w (x_f - c_f)²

Letters: B rollouts, T steps, F features, M rows (B · T), P programs that share the rows.
"""

import torch
import triton
import triton.language as tl

from mamba_ssm.ops.triton.launch import ceil_div, define
from mamba_ssm.ops.triton.sum_kernels import add_programs

Tensor = torch.Tensor

BLOCK_M, BLOCK_F = 16, 128  # of a block, which a program of 4 warps takes at a time
PROGRAMS = 528  # four for each multiprocessor of an H200
STAGES = 4  # blocks of a program that shared memory holds


@triton.jit(do_not_specialize=["rows", "blocks"])
def _moments_kernel(
    x_ptr, weight_ptr, centre_ptr, sums_ptr, rows, blocks, stride_b, stride_t,
    T: tl.constexpr, F: tl.constexpr, STAGES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    centre = tl.load(centre_ptr + f, mask=f < F, other=0.0)[None, :]
    first = tl.zeros((BLOCK_M, BLOCK_F), tl.float32)
    second = tl.zeros((BLOCK_M, BLOCK_F), tl.float32)
    start = tl.program_id(0) * blocks
    for block in tl.range(start, start + blocks, num_stages=STAGES):  # which fetches blocks ahead
        row = block * BLOCK_M + tl.arange(0, BLOCK_M)
        place = (row // T).to(tl.int64) * stride_b + (row % T).to(tl.int64) * stride_t
        inside = (row < rows)[:, None] & (f < F)[None, :]  # (M, F)
        x = tl.load(x_ptr + place[:, None] + f[None, :], mask=inside, other=0.0) - centre
        weighted = x * tl.load(weight_ptr + row, mask=row < rows, other=0.0)[:, None]
        first += weighted
        second += weighted * x
    sums_ptr += tl.program_id(0) * F + f
    tl.store(sums_ptr, tl.sum(first, axis=0), mask=f < F)
    tl.store(sums_ptr + tl.num_programs(0).to(tl.int64) * F, tl.sum(second, axis=0), mask=f < F)


def _launch(x: Tensor, weight: Tensor, centre: Tensor) -> tuple[Tensor, Tensor]:
    (_, length, width), rows = x.shape, weight.numel()
    first, second = torch.empty_like(centre), torch.empty_like(centre)
    if rows == 0:
        return first.zero_(), second.zero_()
    columns = ceil_div(width, BLOCK_F)
    blocks = ceil_div(rows, BLOCK_M * ceil_div(PROGRAMS, columns))  # of a program
    programs = ceil_div(rows, BLOCK_M * blocks)
    sums = torch.empty((2, programs, width), dtype=torch.float32, device=x.device)
    _moments_kernel[(programs, columns)](
        x, weight.contiguous(), centre.contiguous(), sums, rows, blocks, x.stride(0), x.stride(1),
        T=length, F=width, STAGES=STAGES, BLOCK_M=BLOCK_M, BLOCK_F=BLOCK_F,
    )  # fmt: skip
    add_programs(sums, first, second)
    return first, second


# x (B, T, F) with features side by side, weight (B, T), centre (F), all float32 -> two sums (F)
run_moments = define(
    "weighted_moments(Tensor x, Tensor weight, Tensor centre) -> (Tensor, Tensor)",
    _launch,
    lambda x, weight, centre: (torch.empty_like(centre), torch.empty_like(centre)),
)

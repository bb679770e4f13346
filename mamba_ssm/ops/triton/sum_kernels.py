"""The last step of a sum over rows: what each program of a kernel added up becomes one row, in a fixed order."""

import torch
import triton
import triton.language as tl

from mamba_ssm.ops.triton.launch import ceil_div

Tensor = torch.Tensor

PROGRAMS, COLUMNS = 256, 8             # of a block
STAGES = 3                             # blocks that shared memory holds


@triton.jit(do_not_specialize=["programs"])
def _add_programs_kernel(
    sums_ptr, first_ptr, second_ptr, third_ptr, programs, columns, STAGES: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(1)
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    sums_ptr += which.to(tl.int64) * programs * columns
    total = tl.zeros((BLOCK_P, BLOCK_D), tl.float32)
    for start in tl.range(0, programs, BLOCK_P, num_stages=STAGES):
        p = start + tl.arange(0, BLOCK_P)
        inside = (p < programs)[:, None] & (d < columns)[None, :]
        total += tl.load(sums_ptr + p[:, None] * columns + d[None, :], mask=inside, other=0.0)
    total = tl.sum(total, axis=0)
    if which == 0:
        tl.store(first_ptr + d, total.to(first_ptr.dtype.element_ty), mask=d < columns)
    elif which == 1:
        tl.store(second_ptr + d, total.to(second_ptr.dtype.element_ty), mask=d < columns)
    else:
        tl.store(third_ptr + d, total.to(third_ptr.dtype.element_ty), mask=d < columns)


def add_programs(sums: Tensor, *outs: Tensor) -> None:
    """sums (S, P, ...) float32 of S <= 3 quantities and P programs; each quantity's sum over P goes to one of S dense
    tensors of any dtype."""
    count, programs = sums.shape[:2]
    columns = outs[0].numel()
    _add_programs_kernel[(ceil_div(columns, COLUMNS), count)](
        sums, outs[0], outs[min(1, count - 1)], outs[-1], programs, columns, STAGES=STAGES,
        BLOCK_P=PROGRAMS, BLOCK_D=COLUMNS,
    )  # fmt: skip

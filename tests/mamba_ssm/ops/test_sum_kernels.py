"""Sums over the programs of a kernel (interpreted on a CPU) against those in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

sum_kernels = pytest.importorskip("mamba_ssm.ops.triton.sum_kernels", exc_type=ImportError)

pytestmark = pytest.mark.usefixtures("interpreted_loops")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@settings(max_examples=25, deadline=None)
@given(
    dtypes=st.lists(st.sampled_from([torch.float32, torch.bfloat16]), min_size=1, max_size=3),
    programs=st.sampled_from([1, 2, 127, 128, 300]), shape=st.sampled_from([(1,), (16,), (33,), (5, 4)]),
)  # fmt: skip
def test_sums(dtypes, programs, shape):
    torch.manual_seed(programs)
    sums = torch.randn(len(dtypes), programs, *shape).to(DEVICE)
    outs = [torch.full(shape, torch.nan, dtype=dtype, device=DEVICE) for dtype in dtypes]
    sum_kernels.add_programs(sums, *outs)
    for out, expected in zip(outs, sums.double().sum(1), strict=True):
        tolerance = 1e-5 if out.dtype == torch.float32 else 1e-2
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=1e-4)


def test_the_same_bits_each_time():
    sums = torch.randn(1, 1000, 48, device=DEVICE)
    first, second = torch.empty(2, 48, device=DEVICE)
    sum_kernels.add_programs(sums, first)
    sum_kernels.add_programs(sums, second)
    assert torch.equal(first, second)

"""The shortest form of state-space duality against the recurrence."""

import pytest
import torch

from mamba_ssm.modules.ssd_minimal import segsum, ssd_minimal_discrete
from mamba_ssm.testing import assert_close


def test_segsum_sums_between_rows():
    x = torch.tensor([1.0, 2.0, 3.0])
    inf = torch.inf
    assert segsum(x).tolist() == [[0.0, -inf, -inf], [2.0, 0.0, -inf], [5.0, 3.0, 0.0]]


@pytest.mark.parametrize("block_len", [1, 2, 4, 8])
def test_equals_the_recurrence(block_len):
    generator = torch.Generator().manual_seed(0)
    X, B, C = (torch.randn(2, 8, 3, n, generator=generator, dtype=torch.float64) for n in (4, 5, 5))
    A = -torch.rand(2, 8, 3, generator=generator, dtype=torch.float64)
    initial = torch.randn(2, 1, 3, 4, 5, generator=generator, dtype=torch.float64)
    Y, final = ssd_minimal_discrete(X, A, B, C, block_len, initial)
    h = initial[:, 0]
    for t in range(8):
        h = A[:, t].exp()[..., None, None] * h + X[:, t, :, :, None] * B[:, t, :, None]
        assert_close(Y[:, t], (h * C[:, t, :, None]).sum(-1), 1e-12)
    assert_close(final, h, 1e-12)


def test_length_must_be_a_multiple_of_the_block():
    with pytest.raises(ValueError, match="expected L a multiple of block_len = 3"):
        ssd_minimal_discrete(*(torch.zeros(1, 8, 1, 1),), torch.zeros(1, 8, 1), *(torch.zeros(1, 8, 1, 1),) * 2, 3)

"""The quick check ahead of a launch lets through nothing that the checks by name would refuse."""

import pytest
import torch

from mamba_ssm.ops.checks import are_real_on_one_device

REAL = torch.zeros(1)


@pytest.mark.parametrize(("others", "right"), [
    ((), True),
    ((None, REAL), True),
    ((None, REAL.bfloat16(), REAL.double()), True),
    ((REAL.int(),), False),
    ((REAL.bool(), None), False),
    ((REAL.to(torch.complex64),), False),
    ((REAL.to("meta"),), False),
    ((None, REAL.to("meta"), REAL.to("meta")), False),
])  # fmt: skip
def test_only_real_tensors_on_one_device_are_let_through(others, right):
    assert are_real_on_one_device((REAL, *others)) == right
    assert are_real_on_one_device((*others, REAL)) == right


def test_without_tensors_there_is_no_device():
    assert not are_real_on_one_device((None, None))

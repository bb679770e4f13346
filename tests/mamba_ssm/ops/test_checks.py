"""Checks before a launch: the quick one lets through nothing that those by name would refuse."""

import pytest
import torch

from mamba_ssm.ops.checks import are_real_on_one_device, is_differentiated

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


def test_is_differentiated():
    plain, wanted = torch.ones(1), torch.ones(1, requires_grad=True)
    assert is_differentiated((plain, None, 3, wanted))
    assert not is_differentiated((plain, None, "silu"))
    with torch.no_grad():
        assert not is_differentiated((wanted,))

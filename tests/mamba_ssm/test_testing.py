"""What tests share."""

import pytest

from mamba_ssm.testing import in_case


def test_a_failure_names_its_case():
    with pytest.raises(AssertionError, match="length 3: output 0: too far"), in_case("length 3"):
        raise AssertionError("output 0: too far")

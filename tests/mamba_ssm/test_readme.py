"""The README's examples run as they stand, and the language model learns."""

import re
from pathlib import Path

import pytest
import torch

README = Path(__file__).parents[2] / "mamba_ssm" / "README.md"


def examples():
    return re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)


def test_layer_and_tier_examples(capsys):
    layer, _, tiers = examples()
    names = {}
    exec(compile(layer + tiers, "README.md", "exec"), names)
    assert "selective_scan on cpu runs on the" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_language_model_falls_below_two_and_a_half_bits_per_byte():
    names = {}
    exec(compile(examples()[1], "README.md", "exec"), names)
    assert names["held_out_bits"] < 2.5
    assert names["written"].startswith("Return the ")
    assert len(names["written"].encode()) >= 200
    assert sum(word in names["text"].decode() for word in names["written"].split()) > len(names["written"].split()) / 2
    assert torch.isfinite(torch.tensor(names["held_out_bits"]))

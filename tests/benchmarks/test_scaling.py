"""The scaling benchmark: each core takes each length, and the table says how its cost grows."""

import json

import pytest
import torch

import benchmarks.scaling
from benchmarks.scaling import BACKBONES, LENGTHS, for_length, make_pass, plot, run, table
from utils import load_config


@pytest.mark.parametrize("backbone", BACKBONES)
def test_a_pass_gives_gradients_for_every_row(backbone):
    """Sequences longer than those of training, and the same number of rows whatever their length."""
    config = load_config(["--config", "tests/tiny.yaml"], "train.py").config
    for length in (8, 64):
        gradient, *others = make_pass(for_length(config, backbone, length), length, 64, torch.device("cpu"))()
        assert gradient.shape[:2] == (64 // length, length)
        assert (gradient.abs().sum(dim=-1) > 0).all() and any(other is not None for other in others)


def test_table_and_plot(tmp_path):
    results = [
        {"backbone": "Mamba2", "length": 128, "median_ms": 2.0, "peak_MiB": 100.0},
        {"backbone": "Mamba2", "length": 512, "median_ms": 2.1, "peak_MiB": 100.0},
        {"backbone": "Transformer", "length": 128, "median_ms": 1.0, "peak_MiB": 90.0},
        {"backbone": "Transformer", "length": 512, "median_ms": 3.0, "peak_MiB": 90.0},
    ]
    lines = [line.split() for line in table(results).splitlines()]
    assert lines[0] == ["L", "Mamba2", "Transformer"] and lines[-1] == ["growth", "1.05", "3.00"]
    assert lines[2] == ["512", "2.10", "ms", "100", "MiB", "3.00", "ms", "90", "MiB"]
    plot({"results": results, "rows": 1024}, tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").stat().st_size > 5000


@pytest.mark.parametrize("kind", LENGTHS)
def test_the_default_configuration_takes_the_default_lengths(kind):
    config = load_config([], "train.py").config
    assert [for_length(config, "Mamba", length).JointTrainAgent.BatchLength for length in LENGTHS[kind]] == list(
        LENGTHS[kind]
    )


def test_what_was_measured_before_a_fault_is_written(tmp_path, monkeypatch):
    """A length that needs too much memory would cost the figures of all others."""
    config = load_config(["--config", "tests/tiny.yaml", "--BasicSettings.Device", "cpu"], "train.py").config
    measured = []

    def measure(*words):
        measured.append(words)
        if len(measured) == 2:
            raise MemoryError
        return {"median_ms": 1.0}

    monkeypatch.setattr(benchmarks.scaling, "measure", measure)
    with pytest.raises(MemoryError):
        run(config, ["Mamba2"], [8, 16], 64, 20, tmp_path / "out.json")
    written = json.loads((tmp_path / "out.json").read_text())["results"]
    assert written == [{"backbone": "Mamba2", "length": 8, "median_ms": 1.0}]

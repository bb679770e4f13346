"""The packing benchmark: processes work side by side, what can't be measured is said."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.packing import why_no_mps

ROOT = Path(__file__).resolve().parents[2]


def pack(out, *words):
    command = [sys.executable, "benchmarks/packing.py", "--seconds", "0.3", "--out", str(out)]
    tiny = ["--config", "tests/tiny.yaml", "--BasicSettings.Device", "cpu"]
    return subprocess.run([*command, *words, *tiny], cwd=ROOT, capture_output=True, text=True, timeout=200)


@pytest.mark.slow
def test_two_runs_side_by_side(tmp_path):
    out = tmp_path / "folder" / "packing.json"
    done = pack(out, "--runs", "1,2")
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    one, two = report["results"]
    assert (one["runs"], two["runs"]) == (1, 2) and len(two["each"]) == 2
    assert two["steps_per_second"] == sum(two["each"]) > 0 and one["gain"] == 1.0
    assert report["mps_missing"] == "the device is cpu" and "MPS on: not measured, the device is cpu" in done.stdout
    assert report["hardware"] and report["env"] == "Toy/Catch-v0"


def test_what_keeps_from_measuring_mps(monkeypatch, tmp_path):
    assert why_no_mps(torch.device("cpu")) == "the device is cpu"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "is not on this machine's PATH" in why_no_mps(torch.device("cuda"))


@pytest.mark.slow
def test_a_worker_that_fails_is_reported(tmp_path):
    out = tmp_path / "packing.json"
    done = pack(out, "--runs", "1", "--BasicSettings.Env_name", "Toy/Nothing-v0")
    assert done.returncode == 1 and "a process ended with code" in done.stdout
    assert json.loads(out.read_text())["failed"]["off"]

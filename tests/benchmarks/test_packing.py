"""The packing benchmark: processes work side by side, what can't be measured is said."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.packing import MPS_DAEMON, Benchmark, Workers, mps, why_no_mps

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


def daemon(tmp_path, monkeypatch, text):
    """A program in the place of NVIDIA's daemon."""
    program = tmp_path / MPS_DAEMON
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)


def test_the_service_runs_as_long_as_it_is_needed(tmp_path, monkeypatch):
    """A daemon that stays would serve whoever comes next on this machine."""
    daemon(
        tmp_path, monkeypatch, f'[ "$1" = -d ] && echo $CUDA_MPS_PIPE_DIRECTORY > {tmp_path}/a || cat > {tmp_path}/b'
    )
    with mps(True) as environment:
        assert (tmp_path / "a").read_text().strip() == environment["CUDA_MPS_PIPE_DIRECTORY"]
        assert not (tmp_path / "b").exists()
    assert (tmp_path / "b").read_text() == "quit\n"
    with mps(False) as environment:
        assert "CUDA_MPS_PIPE_DIRECTORY" not in environment


def test_a_service_that_does_not_start_leaves_the_other_rows(tmp_path, monkeypatch):
    daemon(tmp_path, monkeypatch, "echo no such thing here; exit 1")
    monkeypatch.setattr(sys, "executable", "/bin/true")
    monkeypatch.setattr(Workers, "warm_up", lambda *words: None)
    monkeypatch.setattr(Workers, "measure", lambda self, number, seconds: row(number))
    benchmark = Benchmark({"failed": {}, "results": []}, tmp_path / "folder" / "out.json")
    benchmark.run([1, 2], 0.1, ["off", "on"], [], patience=1.0)
    written = json.loads((tmp_path / "folder" / "out.json").read_text())
    assert [(found["runs"], found["mps"], found["gain"]) for found in written["results"]] == [
        (1, False, 1),
        (2, False, 2),
    ]
    assert list(written["failed"]) == ["on"] and "no such thing here" in written["failed"]["on"]


def row(number):
    return {"runs": number, "steps_per_second": 3.0 * number, "each": [3.0] * number, "reserved_mib_of_one": 0.0}


def test_processes_that_are_never_warm_are_given_up(tmp_path):
    """A service that hangs would hold the whole benchmark, rows without it included."""
    benchmark = Benchmark({"failed": {}, "results": []}, tmp_path / "out.json")
    begin = time.monotonic()
    benchmark.run([1], 0.1, ["off"], ["--config", "tests/tiny.yaml", "--BasicSettings.Device", "cpu"], patience=0.1)
    assert time.monotonic() - begin < 30 and "did not answer in time" in benchmark.content["failed"]["off"]

"""The step's benchmark: parts of a traced step add up, and a figure is on disk as soon as it is known."""

import json
import sys

import pytest
import torch

from benchmarks import train_step
from benchmarks.train_step import parts_of_trace, timed


def span(first, last, name="kernel", category="kernel"):
    return {"name": name, "cat": category, "ts": first, "dur": last - first}


def test_a_traced_step_is_the_sum_of_its_parts():
    steps = [span(1000.0 * i, 1000.0 * (i + 1), f"ProfilerStep#{i}", "user_annotation") for i in (1, 2)]
    kernels = [
        span(1100, 1200),
        span(1150, 1300),
        span(1310, 1400),
        span(2500, 2600),
        span(1400, 1500, "copy", "cpu_op"),
    ]
    annotation = span(0, 9000, "ProfilerStep#1", "gpu_user_annotation")  # the device's view of a step is no step
    parts = parts_of_trace([*steps, *kernels, annotation, {"name": "no span", "ts": 5}], 2)
    assert parts["busy_ms"] == pytest.approx((200 + 90 + 100) / 2e3)  # those that overlap count once
    assert parts["gaps_ms"] == pytest.approx(10 / 2e3)
    assert parts["idle_ms"] == pytest.approx((100 + 1100 + 400) / 2e3)
    assert parts["step_ms"] == pytest.approx(sum(parts[name] for name in ("busy_ms", "gaps_ms", "idle_ms"))) == 1.0
    assert parts["kernels"] == 2


def test_the_trace_of_torch_is_understood(tmp_path):
    """Names and categories are torch's: what it writes on a CPU has steps, without kernels."""
    path, schedule = tmp_path / "trace.json", torch.profiler.schedule(wait=0, warmup=1, active=2, repeat=1)
    with torch.profiler.profile(schedule=schedule, acc_events=True) as profile:
        for _ in range(3):
            torch.ones(9).exp()
            profile.step()
    profile.export_chrome_trace(str(path))
    parts = parts_of_trace(json.loads(path.read_text())["traceEvents"], 2)
    assert parts["busy_ms"] == 0 and 0 < parts["step_ms"] == parts["gaps_ms"] + parts["idle_ms"]


def test_every_call_is_timed():
    calls = []
    result = timed(lambda: calls.append(0), torch.device("cpu"), 7)
    assert len(calls) == train_step.WARMUP_CALLS + 2 + 7 and result["min_ms"] <= result["median_ms"] <= result["max_ms"]


def test_figures_are_kept_as_they_come(tmp_path, monkeypatch, capsys):
    """A run that is ended early must not lose what it has measured."""
    out = tmp_path / "new" / "times.json"

    def measure(config, steps, profile):
        if config.Models.Agent.Policy == "PPO":
            raise KeyboardInterrupt
        return {"sum_ms": 1.5} | {name: {"median_ms": 0.3} for name in train_step.PARTS}

    monkeypatch.setattr(train_step, "measure", measure)
    monkeypatch.setattr(
        sys,
        "argv",
        ["train_step.py", "--out", str(out), "--variants", "Mamba-AC,Mamba-PPO", "--BasicSettings.Device", "cpu"],
    )
    with pytest.raises(KeyboardInterrupt):
        train_step.main()
    (result,) = json.loads(out.read_text())["results"]
    assert (result["backbone"], result["policy"], result["mode"], result["sum_ms"]) == ("Mamba", "AC", "eager", 1.5)
    assert "Mamba + AC" in capsys.readouterr().out

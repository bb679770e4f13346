"""Health of a long run: leaks are seen in the samples, and a run of some thousand steps has none."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from benchmarks.long_run_health import Watch, verdict

ROOT = Path(__file__).resolve().parents[2]


def samples(memory_leak=0.0, handle_leak=0.0, log_leak=0.0, count=400):
    """Of 20,000 steps: memory fills up at first, evaluations take handles for a moment, each step logs 40 bytes."""
    rng = np.random.default_rng(0)
    return [
        {
            "step": step,
            "seconds": step / 20,
            "resident_mib": 480 + min(step, 4000) / 200 + memory_leak * step + rng.normal() * 3,
            "handles": 12 + (5 if step % 1000 < 200 else 0) + int(handle_leak * step),
            "threads": 2,
            "log_bytes": 40 * step + log_leak * step**2,
        }
        for step in np.linspace(1, 20_000, count).round().astype(int).tolist()
    ]


@pytest.mark.parametrize(
    ("leak", "sick"),
    [
        ({}, set()),
        ({"memory_leak": 0.003}, {"resident_mib"}),  # an observation of 32 x 32 x 3 bytes a step
        ({"handle_leak": 1 / 2000}, {"handles"}),  # one for every second evaluation
        ({"log_leak": 0.002}, {"log_bytes"}),
    ],
)
def test_leaks_are_seen_and_noise_is_not(leak, sick):
    found = verdict(samples(**leak))
    assert {name for name, figure in found.items() if not figure["flat"]} == sick


def test_a_training_beside_is_watched_until_it_ends(tmp_path):
    """For runs that are too dear to be made for their health's sake."""
    folder = tmp_path / "runs" / "run"
    folder.mkdir(parents=True)
    log = """import sys, time
for step in range(1, 60):
    with open(sys.argv[1], "a") as file:
        file.write('{"step": %d}\\n' % step)
    time.sleep(0.02)
"""
    with subprocess.Popen([sys.executable, "-c", log, str(folder / "metrics.jsonl")]) as process:
        watch = Watch(folder.parent, period=0.01)
        waiter = threading.Thread(target=process.wait)
        waiter.start()
        watch.follow(process.pid)
        waiter.join()
    assert len(watch.samples) >= 12 and watch.samples[-1]["step"] > 30
    assert verdict(watch.samples)["handles"]["flat"] and watch.samples[0]["resident_mib"] > 1


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_run_of_some_thousand_steps_stays_healthy(tmp_path):
    """The real program: memory, handles and threads end where they were, and log lines cost what they cost."""
    small = [f"--config={ROOT / 'tests' / 'tiny.yaml'}", "--JointTrainAgent.BufferMaxLength=500"]
    command = ["benchmarks/long_run_health.py", "--steps=4000", "--period=0.3", f"--results={tmp_path}", "--label=test"]
    run = subprocess.run([sys.executable, *command, *small], cwd=ROOT, capture_output=True, text=True, timeout=1100)
    assert run.returncode == 0, run.stdout + run.stderr
    report = json.loads((tmp_path / "long_run_test.json").read_text())
    assert report["steps"] == 4000 and len(report["samples"]) > 50
    assert (tmp_path / "long_run_test.png").stat().st_size > 1000

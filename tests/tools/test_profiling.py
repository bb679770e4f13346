"""`--profile N`: a trace of N steps and a table, and nothing else changes."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from tools.profiling import StepProfiler, table
from utils import ConfigError, load_config

CPU = torch.device("cpu")


def run_profiler(folder, num_steps, settled_from, last_step):
    with StepProfiler(folder, num_steps, CPU) as profiler:
        for step in range(1, last_step + 1):
            torch.ones(3).exp()
            profiler.after_step(step, settled=step >= settled_from)


def test_traces_the_steps_after_warm_up_and_no_others(tmp_path, caplog):
    """Step 3 is the first that is warm; in step 4 the profiler starts; 5 and 6 are traced."""
    with caplog.at_level("INFO"):
        run_profiler(tmp_path, 2, settled_from=3, last_step=9)
    (path,) = tmp_path.iterdir()
    assert path.name == "profile_000000005_000000006.json"
    names = [event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]]
    assert names.count("aten::exp") == 2 and sum(name.startswith("ProfilerStep#") for name in names) == 2
    assert "2 steps of" in caplog.text and "1.0  aten::exp" in caplog.text and str(path) in caplog.text


@pytest.mark.parametrize("settled_from", [2, 99])
def test_a_run_that_ends_before_is_told(tmp_path, caplog, settled_from):
    run_profiler(tmp_path, 5, settled_from, last_step=4)
    assert "--profile 5: no trace" in caplog.text and not list(tmp_path.iterdir())


def test_without_the_option_nothing_is_traced(tmp_path, caplog):
    run_profiler(tmp_path, None, settled_from=1, last_step=9)
    assert not caplog.text and not list(tmp_path.iterdir())


def test_the_table_counts_kernels_on_a_gpu_and_operations_on_a_cpu():
    def event(key, kind, device_time, cpu_time, count):
        times = {"self_device_time_total": device_time, "self_cpu_time_total": cpu_time}
        return SimpleNamespace(key=key, device_type=kind, count=count, **times)

    events = [
        event("aten::mm", DeviceType.CPU, 4000.0, 1000.0, 4),
        event("gemm", DeviceType.CUDA, 4000.0, 0.0, 4),
        event("add", DeviceType.CUDA, 6000.0, 0.0, 2),
        event("ProfilerStep#1", DeviceType.CUDA, 9000.0, 0.0, 2),
    ]
    lines = table(events, 2, 20.0, torch.device("cuda")).splitlines()
    assert lines[0] == "2 steps of 10.000 ms while traced: 5.000 ms in 3 kernels and copies each"
    assert [line.split() for line in lines[2:]] == [["3.000", "30.0%", "1.0", "add"], ["2.000", "20.0%", "2.0", "gemm"]]
    assert table(events, 2, 20.0, CPU).splitlines()[2].split() == ["0.500", "5.0%", "2.0", "aten::mm"]


def test_the_option_is_a_count_and_training_alone_has_it():
    assert load_config(["--profile", "7"], "train.py").profile == 7
    for value in ("0", "-1", "x", "1.5", "9" * 20):
        with pytest.raises(ConfigError, match="--profile"):
            load_config([f"--profile={value}"], "train.py")
    with pytest.raises(ConfigError, match="profile: unknown key"):
        load_config(["--profile", "7"], "eval.py")

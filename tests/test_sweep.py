"""Sweeps: what is tried again, what is not repeated, what a kill leaves, on this machine and through Ray."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

import sweep as sweep_script
from sweep import Display, LocalPlace, main, parse, table, work_off
from tools.sweeps import FAILED, FINISHED, RUNNING, WAITING, Outcome, Sweep, SweepRun, plan, read_sweep

ROOT = Path(__file__).resolve().parents[1]
TINY = ["--config", str(ROOT / "tests" / "tiny.yaml"), "--BasicSettings.Device", "cpu"]
FOUR_RUNS = ["--games", "Toy/Catch-v0", "Toy/Recall-v0", "--seeds", "0", "1", "--cpus-per-run", "1"]
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")


class ScriptedPlace:
    """Every attempt ends as the script says: {name: outcomes in turn}."""

    def __init__(self, script):
        self.script, self.submitted, self.stopped, self._open = script, [], False, []

    def submit(self, sweep, run):
        self.submitted.append(run.name)
        self._open.append((len(self.submitted), run.name))
        return self._open[-1]

    def collect(self, seconds):
        ticket = self._open.pop(0)
        return [(ticket, Outcome(False, 1.0, stopped=True) if self.stopped else self.script[ticket[1]].pop(0))]

    def stop(self):
        self.stopped = True


def made_sweep(folder, *names):
    return Sweep(folder, [SweepRun(name, "Toy/Catch-v0", i, "default") for i, name in enumerate(names)])


def test_failed_runs_are_tried_again_and_finished_ones_left_alone(tmp_path):
    sweep = made_sweep(tmp_path, "done", "flaky", "broken", "good")
    sweep.runs[0].status = FINISHED
    place = ScriptedPlace(
        {
            "flaky": [Outcome(False, 1.0, "code 1: lost"), Outcome(True, 2.0)],
            "broken": [Outcome(False, 1.0, f"code {i}") for i in range(3)],
            "good": [Outcome(True, 5.0)],
        }
    )
    work_off(sweep, place, retries=2, display=Display(io.StringIO()), stop=threading.Event())
    assert sorted(place.submitted) == sorted(["flaky", "broken", "good", "flaky", "broken", "broken"])
    done, flaky, broken, good = read_sweep(tmp_path).runs
    assert [run.status for run in (done, flaky, broken, good)] == [FINISHED, FINISHED, FAILED, FINISHED]
    assert (flaky.attempts, flaky.seconds, flaky.error) == (2, 3.0, None)
    assert (broken.attempts, broken.error) == (3, "code 2")


def test_a_stop_leaves_runs_waiting(tmp_path):
    sweep, stop = made_sweep(tmp_path, "a", "b"), threading.Event()
    stop.set()
    place = ScriptedPlace({})
    work_off(sweep, place, retries=2, display=Display(io.StringIO()), stop=stop)
    assert place.stopped and (tmp_path / "stop").exists()
    assert [run.status for run in sweep.runs] == [WAITING, WAITING]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_table_is_redrawn_in_place_and_lines_elsewhere_are_told_once(tmp_path):
    sweep = made_sweep(tmp_path, "a", "b")
    sweep.runs[1].status = RUNNING
    assert "1 running, 0 failed, 1 waiting, 0 finished" in table(sweep)[0] and table(sweep)[1].startswith("b ")
    terminal, plain = Terminal(), io.StringIO()
    for stream in (terminal, plain):
        display = Display(stream)
        display.show(sweep)
        display.show(sweep)
        display.say("word")
    assert terminal.getvalue().count("\x1b[3F\x1b[J") == 2
    assert "\x1b" not in plain.getvalue() and plain.getvalue().count("running") == 1


@pytest.mark.parametrize(
    "words",
    [["--games", "Pong"], ["--seeds", "0"], ["--JointTrainAgent.Tau", "3"], ["--set", "A=1"], ["--runs-per-gpu", "0"]],
)
def test_half_a_command_is_refused(words, capsys):
    with pytest.raises(SystemExit) as error:
        parse(["--out", "x", *words])
    assert error.value.code == 2 and "error: " in capsys.readouterr().err


def test_the_words_for_training_are_passed_on(tmp_path):
    words = ["--out", str(tmp_path), "--games", "Pong", "Boxing", "--seeds", "0", "1", "--config", "a.yaml"]
    options, rest = parse([*words, "--JointTrainAgent.Tau", "-1"])
    assert options.games == ["Pong", "Boxing"] and options.seeds == [0, 1]
    assert rest == ["--config", "a.yaml", "--JointTrainAgent.Tau", "-1"]


def test_faults_are_one_line(tmp_path, capsys):
    assert main(["--out", str(tmp_path), "--games", "Pong", "--seeds", "0", "--n.o", "1"]) == 2
    assert main(["--out", str(tmp_path / "none")]) == 1
    assert main(["--out", str(tmp_path / "typo"), "--games", "Toy/Cathc-v0", "--seeds", "0", *TINY]) == 2
    assert [line[:7] for line in capsys.readouterr().err.strip().splitlines()] == ["error: "] * 3
    assert not (tmp_path / "typo").exists()


def test_a_model_to_start_from_that_is_not_there_is_told_before_anything_starts(tmp_path, monkeypatch, capsys):
    """Every run would fail, each of them several times."""
    monkeypatch.chdir(tmp_path)
    words = ["--games", "Toy/Catch-v0", "--seeds", "0", "--BasicSettings.SavePath", "no/model.pt"]
    assert main(["--out", "sweep", *words, *TINY]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}/no/model.pt: no such file or folder")
    assert not (tmp_path / "sweep").exists()


def test_a_run_that_cannot_be_read_does_not_end_the_others(tmp_path):
    (sweep := made_sweep(tmp_path, "a")).save()
    (tmp_path / "runs" / "a" / "one").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "one" / "config.yaml").write_text("a: [")
    place = LocalPlace(parse(["--out", str(tmp_path)])[0], uses_gpu=False)
    work_off(sweep, place, retries=0, display=Display(io.StringIO()), stop=threading.Event())
    place.close()
    assert sweep.runs[0].status == FAILED and "config.yaml: line 1: not YAML" in sweep.runs[0].error


def test_each_slot_is_a_share_of_a_gpu(monkeypatch):
    monkeypatch.setattr(sweep_script, "_visible_gpus", lambda: ["3", "5"])
    options, _ = parse(["--out", "x", "--runs-per-gpu", "2"])
    place = sweep_script.LocalPlace(options, uses_gpu=True)
    slots = [place._slots.get()["CUDA_VISIBLE_DEVICES"] for _ in range(place._slots.qsize())]
    assert sorted(slots) == ["3", "3", "5", "5"]
    place.close()


def test_a_run_in_a_process_of_its_own(tmp_path, capsys):
    """Trained, evaluated, logged; the second call has nothing to do."""
    words = ["--backend", "local", "--games", "Toy/Catch-v0", "--seeds", "3", "--JointTrainAgent.SampleMaxSteps", "40"]
    assert main(["--out", str(tmp_path), *words, *TINY]) == 0
    (run,) = read_sweep(tmp_path).runs
    assert (run.status, run.attempts, run.error) == (FINISHED, 1, None)
    row = json.loads((tmp_path / "summary.json").read_text())["runs"][0]
    assert row["step"] == 40 and row["evaluation_episodes"] == 3
    (origin,) = tmp_path.glob("runs/*/*/origin.json")
    assert {"command", "versions", "hardware", "commit"} <= json.loads(origin.read_text()).keys()
    assert "report with: python eval.py --report" in capsys.readouterr().out
    before = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.glob("runs/*/*/*"))
    assert main(["--out", str(tmp_path)]) == 0
    assert sorted((path, path.stat().st_mtime_ns) for path in tmp_path.glob("runs/*/*/*")) == before


def start(out, *words):
    return subprocess.Popen(
        [sys.executable, "sweep.py", "--out", str(out), *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def wait_until(condition, seconds=600):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.3)


def finished(out):
    return [run.name for run in read_sweep(out).runs if run.status == FINISHED] if (out / "sweep.json").exists() else []


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("backend", ["local", pytest.param("ray", marks=needs_ray)])
def test_a_killed_sweep_goes_on_and_repeats_nothing(tmp_path, backend):
    words = [*FOUR_RUNS, *TINY, "--backend", backend, "--JointTrainAgent.SampleMaxSteps", "400"]
    process = start(tmp_path, *words)
    wait_until(lambda: len(finished(tmp_path)) >= 2 and len(list(tmp_path.glob("runs/*/*/ckpt/step_*"))) > 5)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    kept = finished(tmp_path)
    logs = {name: (tmp_path / "logs" / f"{name}.log").read_bytes() for name in kept}
    assert 2 <= len(kept) < 4
    done = start(tmp_path, "--backend", backend, "--cpus-per-run", "1")
    output = done.communicate(timeout=600)[0].decode()
    assert done.returncode == 0, output
    assert len(finished(tmp_path)) == 4
    assert all((tmp_path / "logs" / f"{name}.log").read_bytes() == log for name, log in logs.items())
    others = [log for log in tmp_path.glob("logs/*.log") if log.stem not in kept]
    assert any(re.search(r"goes on at step [1-9]", log.read_text()) for log in others)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@needs_ray
def test_two_ray_nodes_share_the_runs(tmp_path):
    """Each node has room for one run: two at a time means both work."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1)
        done = start(
            tmp_path, *FOUR_RUNS, *TINY, "--address", cluster.address, "--JointTrainAgent.SampleMaxSteps", "40"
        )
        output = done.communicate(timeout=600)[0].decode()
    finally:
        cluster.shutdown()
    assert done.returncode == 0, output
    assert "on 2 node(s) with 2 CPU" in output and len(finished(tmp_path)) == 4


def test_a_plan_without_ray_needs_no_ray(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sweep_script, "find_spec", lambda _: None)
    words = ["--out", str(tmp_path), "--games", "Toy/Catch-v0", "--seeds", "0", *TINY]
    assert main([*words, "--backend", "ray"]) == 1
    assert "pip install -r requirements-sweep.txt" in capsys.readouterr().err
    options, _ = parse([*words, "--backend", "auto"])
    place = sweep_script.choose_place(options, uses_gpu=False)
    assert isinstance(place, sweep_script.LocalPlace)
    place.close()
    assert len(plan(["Toy/Catch-v0"], [0], [], TINY)) == 1

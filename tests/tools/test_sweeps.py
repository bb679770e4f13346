"""The parts of a sweep: its plan, its manifest, and what tells that a run is finished."""

import json
import subprocess
import sys
import threading

import pytest

from tests.test_train import run_training
from tests.tools.made_results import make_result
from tools import sweeps
from tools.sweeps import (
    FAILED,
    FINISHED,
    RUNNING,
    WAITING,
    Sweep,
    SweepError,
    SweepRun,
    _call,
    attempt,
    expand_games,
    expand_settings,
    is_evaluated,
    is_trained,
    locked,
    open_sweep,
    plan,
    progress_of,
    read_sweep,
    stop_file,
    summary_rows,
    write_summary,
)
from utils import ConfigError


def test_games_are_environments_each_once():
    assert expand_games(["Pong", "Toy/Catch-v0", "ALE/Pong-v5", "CartPole-v1", "my:Env-v0"]) == [
        "ALE/Pong-v5",
        "Toy/Catch-v0",
        "CartPole-v1",
        "my:Env-v0",
    ]
    assert len(expand_games(["atari100k", "Pong"])) == 26


def test_settings_are_every_combination():
    found = expand_settings(["A.b=1,2", "C=[1,2],[3]"])
    assert found == [{"A.b": a, "C": c} for a in "12" for c in ("[1,2]", "[3]")]
    assert expand_settings([]) == [{}]
    with pytest.raises(SweepError, match="expected KEY=value,value"):
        expand_settings(["A.b"])
    with pytest.raises(SweepError, match=r"A\.b: it was varied already"):
        expand_settings(["A.b=1", "A.b=2"])
    with pytest.raises(SweepError, match="--seeds varies it"):
        expand_settings(["BasicSettings.Seed=1,2"])


def test_a_plan_is_checked_as_a_whole():
    planned = plan(["Pong"], [0, 1], ["Models.WorldModel.Backbone=Mamba,Mamba2"], ["--n", "note"])
    assert [run.name for run, _ in planned] == [
        f"Pong-v5_Backbone={backbone}_seed{seed}" for backbone in ("Mamba", "Mamba2") for seed in (0, 1)
    ]
    assert [config.BasicSettings.Seed for _, config in planned] == [0, 1, 0, 1]
    assert {config.n for _, config in planned} == {"note"}
    assert planned[0].config.Models.WorldModel.Backbone == "Mamba"
    with pytest.raises(ConfigError, match="Backbone = Mambo"):
        plan(["Pong"], [0], ["Models.WorldModel.Backbone=Mamba,Mambo"], [])
    with pytest.raises(SweepError, match="places its runs itself"):
        plan(["Pong"], [0], [], ["--BasicSettings.Device=cuda:0"])
    with pytest.raises(SweepError, match="several runs would be called"):
        plan(["Pong"], [0], ["JointTrainAgent.Tau=5,5"], [])
    for words in (["--profile", "3"], ["--doctor"], ["--debug-batch", "batch.pt"]):
        with pytest.raises(SweepError, match="only trains and evaluates"):
            plan(["Pong"], [0], [], words)


def test_a_relative_save_path_starts_where_the_user_is(tmp_path, monkeypatch):
    """Runs are started in the repository's folder, where that path would mean another model, or none."""
    monkeypatch.chdir(tmp_path)
    planned = plan(["Pong"], [0], ["BasicSettings.SavePath=a,../b/c,/d"], [])
    expected = [str(tmp_path / "a"), str(tmp_path.parent / "b" / "c"), "/d"]
    assert [config.BasicSettings.SavePath for _, config in planned] == expected
    assert plan(["Pong"], [0], [], [])[0].config.BasicSettings.SavePath is None


def test_a_sweep_is_gone_on_with(tmp_path):
    sweep = open_sweep(tmp_path, plan(["Pong"], [0, 1], [], []))
    for run, status in zip(sweep.runs, (FINISHED, RUNNING), strict=True):
        run.status, run.attempts = status, 3
    sweep.save()
    again = open_sweep(tmp_path, plan(["Pong"], [1, 2], [], []))
    assert [(run.seed, run.status, run.attempts) for run in again.runs] == [
        (0, FINISHED, 3),
        (1, WAITING, 0),
        (2, WAITING, 0),
    ]
    assert open_sweep(tmp_path, []).runs[0].status == FINISHED
    with pytest.raises(SweepError, match=r"seed0.yaml: .*another configuration \(JointTrainAgent.Tau 10.0 -> 3.0\)"):
        open_sweep(tmp_path, plan(["Pong"], [0], [], ["--JointTrainAgent.Tau", "3"]))


def test_folders_that_hold_no_sweep_are_refused(tmp_path):
    assert read_sweep(tmp_path) is None
    with pytest.raises(SweepError, match="no sweep was begun there"):
        open_sweep(tmp_path, [])
    (tmp_path / "sweep.json").write_text("[]")
    with pytest.raises(SweepError, match="not a manifest of this version"):
        read_sweep(tmp_path)
    for rest in ("", ', "runs": 5', ', "runs": [{"name": "a"}]', ', "runs": [{"other": 1}]', ', "runs": ["a"]'):
        (tmp_path / "sweep.json").write_text(f'{{"format": 1{rest}}}')
        with pytest.raises(SweepError, match="damaged"):
            read_sweep(tmp_path)


def test_a_run_is_finished_when_its_last_step_is_saved_and_evaluated(tmp_path):
    folder = run_training(tmp_path, "--JointTrainAgent.SampleMaxSteps", 40)
    assert is_trained(folder) and not is_evaluated(folder)
    (folder / "eval" / "step_000000040").mkdir()
    (folder / "eval" / "step_000000040" / "summary.json").write_text("{}")
    assert is_evaluated(folder)
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("SampleMaxSteps: 40", "SampleMaxSteps: 80"))
    assert not is_trained(folder) and not is_evaluated(folder)


def test_a_run_without_checkpoints_is_finished_between_two_lines_of_metrics(tmp_path):
    folder = run_training(tmp_path, "--JointTrainAgent.SampleMaxSteps", 43, "--JointTrainAgent.SaveModels", "false")
    assert is_trained(folder) and progress_of(folder)[0] == 43


def test_progress_survives_half_lines(tmp_path):
    assert progress_of(tmp_path) == (0, None)
    lines = ['{"step": 10, "episode/return": 1.0}', '{"step": 20, "episode/return": 3.0}', '{"step": 30, "loss"']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert progress_of(tmp_path) == (20, 2.0)


@pytest.mark.parametrize(("code", "word"), [(2, "code 2"), (-9, "signal SIGKILL")])
def test_a_failed_attempt_says_why(tmp_path, monkeypatch, code, word):
    lines = []

    def call(line, log, environment, stop):
        lines.append(line)
        log.write_text("checkpoint\nerror: no such thing\n\n$ train.py\n")
        return code

    monkeypatch.setattr(sweeps, "_call", call)
    outcome = attempt(str(tmp_path), "name", {})
    assert not outcome.finished and not outcome.stopped and outcome.error == f"{word}: error: no such thing"
    assert [line[1:4] for line in lines] == [["train.py", "--config", str(tmp_path / "configs" / "name.yaml")]]


def test_an_attempt_resumes_what_is_begun_and_evaluates_what_is_trained(tmp_path, monkeypatch):
    folder = run_training(tmp_path / "runs" / "name", "--JointTrainAgent.SampleMaxSteps", 40)
    config = folder / "config.yaml"
    whole = config.read_text()
    config.write_text(whole.replace("SampleMaxSteps: 40", "SampleMaxSteps: 80"))
    lines = []

    def call(line, *_):
        lines.append(line[1:])
        config.write_text(whole)  # the last step is now that of the checkpoint
        if line[1] == "eval.py":
            (folder / "eval" / "step_000000040").mkdir()
            (folder / "eval" / "step_000000040" / "summary.json").write_text("{}")
        return 0

    monkeypatch.setattr(sweeps, "_call", call)
    assert attempt(str(tmp_path), "name", {}).finished
    assert lines == [["train.py", "--resume", str(folder)], ["eval.py", str(folder)]]
    assert attempt(str(tmp_path), "name", {}).finished and len(lines) == 2


def test_a_stopped_command_ends_and_keeps_its_output(tmp_path):
    stop = stop_file(tmp_path)
    threading.Timer(0.5, stop.touch).start()
    log = tmp_path / "log"
    script = 'echo "$WORD"; trap "echo saved; exit 0" TERM; while true; do sleep 0.05; done'
    assert _call(["bash", "-c", script], log, {"WORD": "begun"}, stop) == 0
    assert log.read_text().endswith("begun\nsaved\n")


def test_nothing_begins_while_a_sweep_is_stopped_and_the_next_call_goes_on(tmp_path):
    planned = plan(["Pong"], [0], [], [])
    open_sweep(tmp_path, planned)
    stop_file(tmp_path).touch()
    assert attempt(str(tmp_path), "Pong-v5_seed0", {}).stopped and not (tmp_path / "logs").exists()
    open_sweep(tmp_path, planned)
    assert not stop_file(tmp_path).exists()


def test_one_process_at_a_time(tmp_path):
    path = str(tmp_path / "lock")
    script = f"import fcntl, sys; f = open({path!r}, 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True)"
    with subprocess.Popen(
        [sys.executable, "-c", f"{script}; sys.stdin.read()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        other.stdout.readline()
        with pytest.raises(SweepError, match=r"another sweep.py works there"), locked(tmp_path):
            pass
    with locked(tmp_path):
        assert (tmp_path / "lock").exists()


def test_the_summary_has_a_row_for_each_run(tmp_path):
    runs = [SweepRun("a", "ALE/Pong-v5", 0, "default", FINISHED, 1, 2.5), SweepRun("b", "ALE/Pong-v5", 1, "default")]
    runs[1].status, runs[1].error = FAILED, "code 1: error: no"
    make_result(tmp_path / "runs" / "a" / "folder", evaluation=[1.0, 3.0])
    sweep = Sweep(tmp_path, runs, {"commit": "abc"})
    first, second = summary_rows(sweep)
    assert (first["step"], first["recent_return"], first["evaluation_mean"]) == (2000, -20.5, 2.0)
    assert (second["step"], second["evaluation_mean"], second["error"]) == (0, None, "code 1: error: no")
    write_summary(sweep)
    assert json.loads((tmp_path / "summary.json").read_text())["commit"] == "abc"
    assert (tmp_path / "summary.csv").read_text().count("\n") == 3

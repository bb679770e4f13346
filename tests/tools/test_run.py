"""A run's folder: nothing is lost or doubled, whatever happens to the process or the disk."""

import errno
import io
import json
import logging
import math
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import types

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import tools.run as tools
from replay_buffer import ReplayBuffer
from tools.checkpoints import CheckpointError, load_state, read_model
from tools.run import (
    MetricSums,
    RunError,
    bootstrap_interval,
    cut_metrics,
    duration,
    episode_table,
    learning_curve,
    open_run,
    read_metrics,
)
from utils import load_config

fork = multiprocessing.get_context("fork")
MODEL = {"world_model": {"w": torch.zeros(3)}, "agent": {}, "spaces": {"obs": [3]}}


@pytest.fixture
def config(tmp_path):
    return make_config(tmp_path)


def make_config(tmp_path, *overrides):
    return load_config(["--BasicSettings.RunDir", str(tmp_path / "runs"), *overrides], "train.py").config


@pytest.fixture
def run(config):
    with open_run(config) as run:
        yield run


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def without_time(records):
    return [{name: value for name, value in record.items() if not name.startswith("time/")} for record in records]


# --------------------------------------------------------------------------------------------------------- run folders


def test_a_new_run_has_its_folder(run, config):
    """Everything that a run writes has a place, and the configuration that made it is beside it."""
    assert run.folder.parent.name == "runs"
    assert run.folder.name.startswith("ALE-Pong-v5_Mamba2_AC_standard_seed3710_20")
    assert {"tb", "ckpt", "replay", "pictures", "videos", "eval"} <= set(os.listdir(run.folder))
    with pytest.raises(RunError, match="in use"):
        in_child(open_run, None, run.folder)
    assert tools.config_from_file(run.folder / "config.yaml") == config
    assert run.start_step == 0 and run.load_checkpoint() is None


def test_a_run_remembers_where_the_model_was_that_it_starts_from(tmp_path, monkeypatch):
    """Killed before its first checkpoint and resumed from another folder, it would start from another model."""
    monkeypatch.chdir(tmp_path)
    with open_run(make_config(tmp_path, "--BasicSettings.SavePath", "models/a.pt")) as run:
        assert run.config.BasicSettings.SavePath == str(tmp_path / "models" / "a.pt")
    assert tools.config_from_file(run.folder / "config.yaml") == run.config


def test_runs_of_one_second_do_not_share_a_folder(config, monkeypatch):
    """Two seeds started by one script would overwrite each other."""
    monkeypatch.setattr(time, "strftime", lambda form: "20261130-120000")
    folders = set()
    for _ in range(3):
        with open_run(config) as run:
            folders.add(run.folder)
    assert len(folders) == 3


def test_runs_of_one_second_in_processes(config, monkeypatch):
    """The same between processes, where looking first and making then would race."""
    monkeypatch.setattr(time, "strftime", lambda form: "20261130-120000")
    results = fork.SimpleQueue()
    workers = [fork.Process(target=lambda: results.put(str(tools._new_folder(config)))) for _ in range(8)]
    for worker in workers:
        worker.start()
    assert len({results.get() for _ in workers}) == 8
    for worker in workers:
        worker.join()


def test_a_run_dir_that_can_not_be_written_is_one_line(tmp_path):
    """The user learns which key to change."""
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(RunError, match=r"^BasicSettings.RunDir .*runs: no run can be stored there \(File exists\)$"):
        open_run(make_config(tmp_path))


def test_resuming_what_is_no_run_says_what_is_there(tmp_path):
    """A mistyped folder gets its listing."""
    (tmp_path / "a").mkdir()
    with pytest.raises(RunError, match=r"a: not a run's folder, it has no config.yaml; .*a holds nothing"):
        open_run(None, tmp_path / "a")


def test_a_stored_result_is_not_resumed(config, tmp_path):
    """Beginning again in its folder would cut its metrics."""
    (tmp_path / "CARD.md").write_text("# A card")
    (tmp_path / "metrics.jsonl").write_text('{"step": 7}\n')
    with pytest.raises(RunError, match="a stored result has no checkpoint to go on from"):
        open_run(config, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"CARD.md", "metrics.jsonl"}


def test_overrides_on_resume_are_kept_and_told(config, tmp_path, caplog):
    """Extending a run must not be silently ignored, nor silently done."""
    with open_run(config) as run:
        pass
    longer = make_config(tmp_path, "--JointTrainAgent.SampleMaxSteps", "200000")
    with open_run(longer, run.folder) as resumed:
        assert resumed.config == longer
        resumed.keep_config()
    assert "JointTrainAgent.SampleMaxSteps 105000 -> 200000" in caplog.text
    with open_run(None, run.folder) as resumed:
        assert resumed.config == longer


def in_child(function, *args):
    """Call it in another process; its exception is raised here."""
    results = fork.SimpleQueue()

    def work():
        try:
            function(*args)
            results.put(None)
        except Exception as error:
            results.put(error)

    child = fork.Process(target=work)
    child.start()
    outcome = results.get()
    child.join()
    if outcome is not None:
        raise outcome


def hold_run(folder, ready, with_worker):
    """Open the run, optionally leave a worker process behind, and wait to be killed."""
    with open_run(None, folder):
        if with_worker:
            worker = fork.Process(target=time.sleep, args=(5,))
            worker.start()
            ready.put(worker.pid)
        ready.put(0)
        time.sleep(60)


@pytest.mark.parametrize("with_worker", [False, True])
def test_the_lock_dies_with_its_process(config, with_worker):
    """Two processes in one folder would mix their files; an orphaned worker must not hold a killed run back."""
    with open_run(config) as run:
        pass
    ready = fork.SimpleQueue()
    holder = fork.Process(target=hold_run, args=(run.folder, ready, with_worker))
    holder.start()
    worker = ready.get() if with_worker else None
    ready.get()
    try:
        with pytest.raises(RunError, match=f"in use by process {holder.pid} on "):
            open_run(None, run.folder)
    finally:
        holder.kill()
        holder.join()
    with open_run(None, run.folder) as again:
        assert again.start_step == 0
    if worker:
        os.kill(worker, signal.SIGKILL)


# ------------------------------------------------------------------------------------------------------------- metrics


@given(st.lists(st.lists(st.floats(-1e6, 1e6, width=32), min_size=3, max_size=3), min_size=1, max_size=30))
def test_means_equal_those_of_float64(rows):
    """A float32 sum over an interval would drift."""
    sums = MetricSums()
    for a, b, c in rows:
        sums.add({"a": torch.tensor(a), "b": torch.tensor(b, dtype=torch.float64), "c": c})
    means = sums.take()
    expected = np.array(rows, np.float64).mean(axis=0)
    np.testing.assert_allclose([means[name] for name in "abc"], expected, rtol=1e-12, atol=1e-9)


def test_accumulate_takes_every_dtype():
    """Counters and flags are logged beside losses."""
    sums = MetricSums()
    sums.add({"a": torch.tensor(True), "b": torch.tensor(3), "c": torch.tensor(1.5, dtype=torch.bfloat16), "d": 2})
    sums.add({"b": torch.tensor(5)})
    assert sums.take() == {"a": 1.0, "b": 4.0, "c": 1.5, "d": 2.0}
    assert sums.take() == {}


def test_accumulate_copies():
    """A CUDA graph overwrites its outputs in place at the next replay."""
    sums, static = MetricSums(), torch.tensor(0.0, requires_grad=True)
    for value in (1.0, 2.0, 6.0):
        static.data.fill_(value)
        sums.add({"loss": static})
    static.data.fill_(100.0)
    assert sums.take() == {"loss": 3.0}


def test_accumulate_refuses_vectors():
    """A forgotten mean() would be broadcast into nonsense."""
    with pytest.raises(ValueError, match=r"metric loss has shape \(2,\), expected a 0-d tensor"):
        MetricSums().add({"loss": torch.zeros(2)})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_accumulate_does_not_wait_for_the_device():
    """One sync a step is what device-side sums are there to avoid."""
    sums = MetricSums()
    values = {"a": torch.tensor(1.0, device="cuda"), "b": torch.tensor(2.0, device="cuda"), "c": 3.0}
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            sums.add(values)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sums.take() == {"a": 1.0, "b": 2.0, "c": 3.0}


def test_lines_say_what_was_logged(run):
    """metrics.jsonl is the truth: also about numbers that are none."""
    run.accumulate({"world_model/loss": torch.tensor(2.0)})
    run.accumulate({"world_model/loss": torch.tensor(4.0), "agent/value_loss": 0.5, "agent/entropy": 9.0})
    run.log(3, {"episode/return": np.float32(-1.0), "x": math.nan, "y": -math.inf})
    run.flush(4)
    first, second = lines(run.folder)
    assert first["episode/return"] == -1.0 and math.isnan(first["x"]) and first["y"] == -math.inf
    assert without_time([second]) == [
        {"step": 4, "world_model/loss": 3.0, "agent/value_loss": 0.5, "agent/entropy": 9.0}
    ]
    assert second["time/steps_per_second"] > 0
    assert run.status() == "score -1  agent/value_loss 0.5  world_model 3"


def test_wall_time_is_that_of_all_processes(config, monkeypatch):
    """A run in pieces must not look faster than it was: what a kill undid took its time too."""
    now = 1000.0
    monkeypatch.setattr(tools.time, "monotonic", lambda: now)

    def work(run, step, seconds, save=False):
        nonlocal now
        now += seconds
        run.flush(step)
        if save:
            run.save_checkpoint(step, model=MODEL, train={})

    with open_run(config) as run:
        work(run, 10, 30.0, save=True)
        work(run, 20, 40.0)  # lost
    for lost in (5.0, 7.0):  # killed twice before the next checkpoint
        now += 3600.0  # nobody worked
        with open_run(None, run.folder) as resumed:
            resumed.keep_config()
            work(resumed, 20, lost)
    with open_run(None, run.folder) as resumed:
        resumed.keep_config()
        assert [line["time/total_seconds"] for line in lines(run.folder)] == [30.0]
        work(resumed, 20, 11.0, save=True)
        assert "wall time: 2 min\n" in resumed.report()
    assert [line["time/total_seconds"] for line in lines(run.folder)] == [30.0, 93.0]
    pieces = json.loads((run.folder / "origin.json").read_text())["resumed"]
    assert [(piece["step"], piece["seconds"]) for piece in pieces] == [(10, 70.0), (10, 75.0), (10, 82.0)]
    assert {"command", "versions", "hardware", "commit"} <= pieces[0].keys()


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0 s"), (59.4, "59 s"), (61, "1 min"), (3570, "1 h 0 min"), (19_900, "5 h 32 min")]
)
def test_durations(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize("content", [None, "not json", "[]", '{"resumed": 3}', '{"resumed": [3, {"seconds": "x"}]}'])
def test_a_run_goes_on_without_a_sound_origin(config, content):
    """The file only tells a reader where figures come from: no reason to lose a run."""
    with open_run(config) as run:
        run.save_checkpoint(1, model=MODEL, train={})
    (run.folder / "origin.json").unlink()
    if content is not None:
        (run.folder / "origin.json").write_text(content)
    with open_run(None, run.folder) as resumed:
        resumed.keep_config()
    assert json.loads((run.folder / "origin.json").read_text())["resumed"][-1]["step"] == 1


def test_tensorboard_mirrors_the_file(config):
    """Both must show the same curves, also where a killed process's steps are run again."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with open_run(config) as run:
        for step in (5, 6, 7):
            run.log(step, {"episode/return": 2.5})
            if step == 5:
                run.save_checkpoint(step, model=MODEL, train={})
    time.sleep(0.01)
    with open_run(None, run.folder) as resumed:
        resumed.log(6, {"episode/return": math.inf})
    events = EventAccumulator(str(run.folder / "tb")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("episode/return")] == [(5, 2.5), (6, math.inf)]


def test_cut_keeps_whole_lines_up_to_the_step(tmp_path):
    """A killed process leaves half a line, and lines that will be written again."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a": 1}\nrubbish\n{"step": 3, "a": 2}\n{"step": 2, "a": NaN}\n{"step": 2, "b"')
    assert cut_metrics(path, 2) == 3
    assert path.read_text() == '{"step": 1, "a": 1}\n{"step": 2, "a": NaN}\n'
    assert cut_metrics(path, 2) == 0
    assert cut_metrics(tmp_path / "none", 2) == 0


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_mutated_metrics_are_read_without_an_exception(tmp_path, count):
    """Someone's editor or disk may have touched the file."""
    original = b"".join(b'{"step": %d, "a": %d.5}\n' % (step, step) for step in range(20))
    rng, path = random.Random(0), tmp_path / "metrics.jsonl"
    for _ in range(count):
        data = bytearray(original)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(data))
            data[at : at + rng.randrange(3)] = rng.randbytes(rng.randrange(3))
        path.write_bytes(data)
        read_metrics(path)
        cut_metrics(path, 10)
        assert all(step <= 10 for steps, _ in read_metrics(path).values() for step in steps)


def limited_file_size(limit):
    """Writes past `limit` bytes of a file fail with an OSError, as on a full disk."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old[1]))
    return old


def test_metric_lines_wait_for_room_on_the_disk(run, caplog):
    """A full disk must neither end the run nor leave a hole or half a line."""
    for step in range(20):
        run.log(step, {"a": step})
    old = limited_file_size((run.folder / "metrics.jsonl").stat().st_size + 7)
    try:
        for step in range(20, 40):
            run.log(step, {"a": step})
        assert [record["step"] for record in lines(run.folder)] == list(range(20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    run.log(40, {"a": 40})
    assert [record["step"] for record in lines(run.folder)] == list(range(41))
    assert caplog.text.count("metrics.jsonl can't be written") == 1


# ------------------------------------------------------------------------------------------------------------ trackers


def with_wandb(tmp_path, mode="offline"):
    return make_config(tmp_path, "--Wandb.Init.Mode", mode)


class FakeWandb(types.ModuleType):
    """Records what is asked of it."""

    def __init__(self, failing=()):
        super().__init__("wandb")
        self.calls, self.failing = [], failing

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args, **kwargs):
            self.calls.append((name, args, kwargs))
            if name in self.failing:
                raise ConnectionError(f"{name} failed\nwith details")
            return self

        return call


def test_wandb_is_not_imported_unless_asked_for(config, monkeypatch, caplog):
    """It phones home and takes seconds."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    with open_run(config) as run:
        run.log(1, {"a": 1})
    assert "Weights & Biases" not in caplog.text


def test_wandb_that_is_not_installed_is_a_warning(tmp_path, monkeypatch, caplog):
    """A tracker never stops a run."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    with open_run(with_wandb(tmp_path)) as run:
        for step in range(3):
            run.log(step, {"a": 1})
    assert len(lines(run.folder)) == 3
    assert caplog.text.count("Weights & Biases is off for this run") == 1


def test_wandb_gets_its_own_step_axis(tmp_path, monkeypatch):
    """Its default axis counts calls of log."""
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with open_run(with_wandb(tmp_path)) as run:
        run.log(7, {"a": 1.5})
    names = [name for name, *_ in fake.calls]
    assert names == ["Settings", "init", "define_metric", "define_metric", "log", "finish"]
    assert fake.calls[1][2]["mode"] == "offline" and fake.calls[1][2]["id"] == run.folder.name
    assert fake.calls[3][1:] == (("*",), {"step_metric": "step"})
    assert fake.calls[4][1] == ({"step": 7, "a": 1.5},)


@pytest.mark.parametrize("failing", ["init", "log", "finish"])
def test_wandb_without_a_network_is_one_warning(tmp_path, monkeypatch, caplog, failing):
    """Whenever it fails, the run goes on and says so once, in one line."""
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb(failing=(failing,)))
    with open_run(with_wandb(tmp_path)) as run:
        for step in range(3):
            run.log(step, {"a": 1})
    assert len(lines(run.folder)) == 3
    warnings = [record.getMessage() for record in caplog.records if "Weights & Biases" in record.getMessage()]
    assert len(warnings) == 1 and "ConnectionError" in warnings[0] and "\n" not in warnings[0]


def test_wandb_without_an_account_does_not_ask_at_the_terminal(tmp_path, monkeypatch, caplog):
    """An unattended run would wait for an answer for ever."""
    fake = FakeWandb()
    fake.login = lambda prompt: False
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with open_run(with_wandb(tmp_path, "online")) as run:
        run.log(1, {"a": 1})
    assert not fake.calls
    assert "no account is set up here" in caplog.text


# ------------------------------------------------------------------------------------------------------------ progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_log_lines_do_not_tear_the_bar(config, monkeypatch):
    """Both share the terminal's last line."""
    monkeypatch.setattr(sys, "stderr", Terminal())
    with open_run(config) as run:
        run.log(1, {"episode/return": 3.0})
        for step in range(1, 50):
            run.progress(step)
            if step == 25:
                logging.getLogger("drama.somewhere").warning("look here")
                logging.getLogger("elsewhere").info("chatter")
        text = sys.stderr.getvalue()
    shown = [line.rpartition("\r")[2] for line in text.split("\n")]
    assert "warning: look here" in shown
    assert "chatter" not in text
    assert "/105000" in text


def test_without_a_terminal_progress_is_lines(capsys):
    """A bar in a log file is megabytes of carriage returns."""
    progress = tools.Progress(100, 0, line_seconds=0.0)
    progress.update(50, lambda: "score 3")
    progress.close()
    quiet = tools.Progress(100, 0, line_seconds=60.0)
    quiet.update(50, lambda: "score 3")
    text = capsys.readouterr().err
    assert text.count("\n") == 1 and text.startswith("step 50/100  ") and text.endswith("score 3\n")
    assert "\r" not in text


def test_random_play_at_the_start_does_not_promise_an_early_end(capsys, monkeypatch):
    """1,000 steps a second before training and 10 with it: the time left is known from the first trained steps on."""
    clock = [0.0]
    monkeypatch.setattr(tools.time, "monotonic", lambda: clock[0])
    progress = tools.Progress(2000, 0, trains_from=1000, line_seconds=0.5)
    for step in range(1, 1101):
        clock[0] += 0.001 if step <= 1000 else 0.1
        progress.update(step, lambda: "")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("step 500/2000  1000.0 step/s  left ? (trains from step 1000)")
    assert lines[1].startswith("step 1005/2000  10.0 step/s  left 01:39")


def test_the_bar_does_not_promise_it_either(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    progress = tools.Progress(100, 0, trains_from=50)
    progress.update(10, lambda: "")
    progress._bar.refresh()
    before = sys.stderr.getvalue()
    progress.update(60, lambda: "")
    progress._bar.refresh()
    progress.close()
    assert "<?, " in before and "10/100" in before
    last = sys.stderr.getvalue().rpartition("60/100")[2]
    assert "<" in last and "<?" not in last


def test_lines_stand_once_where_a_library_logs_at_its_import(config, capsys):
    """dm_control does, which gives the root a handler of its own."""
    foreign = logging.StreamHandler(sys.stderr)
    logging.getLogger().addHandler(foreign)
    try:
        with open_run(config):
            logging.getLogger("drama").info("said once")
        assert foreign in logging.getLogger().handlers
    finally:
        logging.getLogger().removeHandler(foreign)
    assert capsys.readouterr().err.count("said once") == 1


def test_a_log_file_on_the_full_disk_does_not_end_the_run(config, monkeypatch):
    """stderr often goes to the very disk that is full."""

    class Full(io.StringIO):
        def write(self, text):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "stderr", Full())
    with open_run(config) as run:
        logging.getLogger("drama").warning("nobody hears this")
        run.progress(1)
    tools.Progress(100, 0, line_seconds=0.0).update(50, lambda: "score 3")


# --------------------------------------------------------------------------------------------------------- checkpoints


def losses(step):
    return {"agent/loss": torch.tensor(1.0 / step), "x": 0.1 * step}


def test_metrics_of_a_resumed_run_equal_the_unbroken_ones(config, monkeypatch):
    """The sums pending at the checkpoint belong to it, to the last bit."""

    def train(run, first, last):
        for step in range(first, last + 1):
            run.accumulate(losses(step))
            if step % 3 == 0:
                run.log(step, {"episode/return": 0.1 * step})
            if step % 10 == 0:
                run.flush(step)
            if step % 17 == 0:
                run.save_checkpoint(step, model=MODEL, train={})

    with open_run(config) as whole:
        train(whole, 1, 50)
    with open_run(config) as broken:
        train(broken, 1, 43)
    with open_run(None, broken.folder) as resumed:
        assert resumed.load_checkpoint().step == resumed.start_step == 34
        train(resumed, 35, 50)
        assert resumed.status() == whole.status()
    assert without_time(lines(broken.folder)) == without_time(lines(whole.folder))


def test_a_checkpoint_describes_itself(run, config):
    """A model file has to be usable without its run."""
    folder = run.save_checkpoint(12, model=MODEL, train={"a": np.arange(3)})
    shutil.copy(folder / "model.pt", run.folder.parent / "alone.pt")
    model = read_model(run.folder.parent / "alone.pt")
    assert model.step == 12 and model.spaces == {"obs": [3]}
    assert tools.config_to_dict(config) == model.config
    assert model.versions["torch"] == torch.__version__


def test_save_models_false_writes_none_and_says_so_once(tmp_path, caplog):
    """For those who only want curves."""
    with open_run(make_config(tmp_path, "--JointTrainAgent.SaveModels", "false")) as run:
        for step in (1, 2):
            assert run.save_checkpoint(step, model=MODEL, train={}) is None
        assert os.listdir(run.folder / "ckpt") == []
        assert "eval.py" not in run.report()
    assert '"step": 2' in (run.folder / "metrics.jsonl").read_text(), "how far the run got is known by its log"
    assert caplog.text.count("SaveModels is false") == 1


class FailingReplay:
    def save(self, folder):
        raise OSError(errno.EROFS, "Read-only file system")


def test_a_full_disk_while_saving_does_not_end_the_training(run, caplog):
    """The good checkpoint stays, the reason is told, nothing half-written stays, the next try may work."""
    good = run.save_checkpoint(1, model=MODEL, train={})
    big = {"w": torch.zeros(100_000)}
    old = limited_file_size(50_000)
    try:
        assert run.save_checkpoint(2, model=MODEL, train=big) is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert os.listdir(run.folder / "ckpt") == [good.name]
    assert f"step 2 is not saved (File too large): training goes on, the last checkpoint is {good}" in caplog.text
    assert run.save_checkpoint(3, model=MODEL, train={}, replay=FailingReplay()) is None
    assert "step 3 is not saved (Read-only file system)" in caplog.text
    assert run.save_checkpoint(4, model=MODEL, train=big).name == "step_000000004"


def test_resuming_on_a_full_disk_is_one_line(config):
    """Nothing can be continued there, and nothing may be lost by trying."""
    with open_run(config) as run:
        for step in range(20):
            run.log(step, {"a": 1})
            if step == 10:
                run.save_checkpoint(step, model=MODEL, train={})
    before = lines(run.folder)
    old = limited_file_size(100)
    try:
        with pytest.raises(RunError, match=r"no run can be stored there \(File too large\)$"):
            open_run(None, run.folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert lines(run.folder) == before


def test_a_full_disk_while_drawing_does_not_end_the_training(run, caplog):
    """Pictures are the first to fill a quota."""
    old = limited_file_size(10)
    try:
        run.save_picture("a", np.zeros((9, 9, 3), np.uint8))
        run.save_video("a", np.zeros((9, 9, 9, 3), np.uint8))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert caplog.text.count("failed") >= 2
    assert os.listdir(run.folder / "pictures") == os.listdir(run.folder / "videos") == []


@pytest.fixture
def tiny_disk(tmp_path):
    """A real file system of 256 KiB, where this user may mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("may not mount a tmpfs")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_disk_that_is_really_full(tiny_disk, caplog):
    """Everything a run writes, on a disk without room: it ends in order with its last good checkpoint."""
    with open_run(make_config(tiny_disk)) as run:
        good = run.save_checkpoint(1, model=MODEL, train={})
        for step in range(2, 6):
            run.log(step, {"a": step})
            assert run.save_checkpoint(step, model=MODEL, train={"w": torch.rand(100_000)}) is None
        (tiny_disk / "ballast").write_bytes(b"")
        with pytest.raises(OSError, match="No space"):
            (tiny_disk / "ballast").write_bytes(bytes(300_000))
        for step in range(6, 400):
            run.log(step, {"a": step})
        run.save_picture("a", np.zeros((64, 64, 3), np.uint8))
        (tiny_disk / "ballast").unlink()
    assert "No space left on device" in caplog.text
    assert [record["step"] for record in lines(run.folder)] == list(range(2, 400))
    with open_run(None, run.folder) as resumed:
        assert resumed.load_checkpoint().folder == good


def test_a_damaged_newest_checkpoint_falls_back(config, caplog):
    """Its metric lines go with it, so none is doubled when its steps are run again; the older one's replay is there."""
    replay = make_replay()
    with open_run(config) as run:
        for step in range(1, 4):
            add_row(replay, step)
            run.log(step, {"a": step})
            newest = run.save_checkpoint(step, model=MODEL, train={"step": step}, replay=replay)
    (newest / "train.pt").write_bytes(b"")
    with open_run(None, run.folder) as resumed:
        checkpoint, restored = resumed.load_checkpoint(), make_replay()
        restored.load(run.folder / "replay", checkpoint.replay)
        assert checkpoint.train == {"step": 2} and len(restored) == 2
        assert [record["step"] for record in lines(run.folder)] == [1, 2]
        resumed.save_checkpoint(3, model=MODEL, train={}, replay=restored)
    assert "step_000000003" in caplog.text


def test_a_run_killed_before_its_first_checkpoint_starts_anew(config):
    """Its lines would be written a second time."""
    with open_run(config) as run:
        run.log(0, {"a": 1})
        run.log(5, {"a": 1})
    (run.folder / "pictures" / ".a.png.123.tmp").write_bytes(b"half")
    with open_run(None, run.folder) as resumed:
        assert resumed.load_checkpoint() is None and resumed.start_step == 0
        assert lines(run.folder) == []
        assert os.listdir(run.folder / "pictures") == ["learning_curve.png"]


def make_replay():
    return ReplayBuffer(
        capacity=40, num_envs=1, obs_shape=(8, 8, 3), action_shape=(), device="cpu", out_device="cpu", batch_size=2,
        batch_length=4, imagine_batch_size=2, context_length=2, sampling="uniform", tau=1.0, imagination_tau=1.0,
        alpha=1.0, beta=1.0,
    )  # fmt: skip


def add_row(replay, step):
    obs = np.full((1, 8, 8, 3), step % 256, np.uint8)
    replay.append(obs, np.zeros(1, np.int64), np.zeros(1, np.float32), np.zeros(1, bool), np.zeros(1, bool))


def train_until_killed(folder, ready):
    """Steps that each log, and save every third: as a real run does, only faster."""
    with open_run(None, folder) as run:
        replay, checkpoint = make_replay(), run.load_checkpoint()
        if checkpoint is not None:
            replay.load(run.folder / "replay", checkpoint.replay)
        ready.put(run.start_step)
        for step in range(run.start_step + 1, 1_000_000):
            add_row(replay, step)
            run.accumulate({"agent/loss": torch.tensor(float(step))})
            run.log(step, {"x": step})
            if step % 5 == 0:
                run.flush(step)
            if step % 3 == 0:
                weights = {**MODEL, "world_model": {"w": torch.full((20_000,), float(step))}}
                run.save_checkpoint(step, model=weights, train={"step": step}, replay=replay)


def check_survivor(folder):
    """Open the killed run as a resuming process would; returns its step."""
    with open_run(None, folder) as run:
        step, checkpoint = run.start_step, run.load_checkpoint()
        records = without_time(lines(folder))
        expected = []
        for i in range(1, step + 1):
            expected.append({"step": i, "x": i})
            if i % 5 == 0:
                expected.append({"step": i, "agent/loss": i - 2.0})
        assert records == expected
        if checkpoint is not None:
            assert checkpoint.step == step == checkpoint.train["step"]
            assert bool((checkpoint.model.world_model["w"] == step).all())
            replay = make_replay()
            replay.load(run.folder / "replay", checkpoint.replay)
            assert len(replay) == min(step, 40)
    leftovers = [name for name in os.listdir(folder / "ckpt") if not name.startswith("step_")]
    assert leftovers == []
    return step


@pytest.mark.parametrize("kills", [8, pytest.param(100, marks=pytest.mark.slow)])
def test_killed_at_any_moment(config, kills):
    """SIGKILL, also in the middle of a checkpoint: the last complete one loads, no metric line is lost or doubled."""
    import tensorboard.summary.writer.record_writer  # noqa: F401  here once, not in every child

    with open_run(config) as run:
        pass
    rng, reached = random.Random(0), [0]
    for _ in range(kills):
        ready = fork.SimpleQueue()
        child = fork.Process(target=train_until_killed, args=(run.folder, ready))
        child.start()
        assert ready.get() == reached[-1]
        time.sleep(rng.uniform(0.02, 0.3))
        child.kill()
        child.join()
        reached.append(check_survivor(run.folder))
    assert reached[-1] > kills and reached == sorted(reached)


# ------------------------------------------------------------------------------------------------------------- signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_asks_the_loop_to_stop(config, number):
    """Preemption and Ctrl-C: the step is finished, then train.py saves and leaves."""
    before = signal.getsignal(number)
    with open_run(config) as run:
        assert not run.stop_requested
        os.kill(os.getpid(), number)
        assert run.stop_requested and run.stop_reason == number.name
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(SystemExit) as left:
            os.kill(os.getpid(), signal.SIGINT)
        assert left.value.code == 130
    assert signal.getsignal(number) is before


def test_workers_forked_from_the_run_can_be_ended(config):
    """They inherit the handlers: Ctrl-C must leave them to their parent, terminate() must still end them."""
    with open_run(config):
        worker = fork.Process(target=time.sleep, args=(30,))
        worker.start()
        time.sleep(0.1)
        os.kill(worker.pid, signal.SIGINT)
        time.sleep(0.1)
        assert worker.is_alive()
        worker.terminate()
        worker.join(5)
        assert worker.exitcode == -signal.SIGTERM


def test_the_program_can_stop_itself(run):
    """Divergence and lost environments end a run the same way, with their own reason."""
    run.stop("20 updates in a row were not finite")
    run.stop("later")
    assert run.stop_requested and run.stop_reason == "20 updates in a row were not finite"


def test_close_leaves_nothing_behind(config):
    """Open files, handlers and locks of finished runs would pile up in a long session."""
    handlers, files = len(logging.getLogger().handlers), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with open_run(config) as run:
            run.log(1, {"a": 1})
        run.close()
    assert len(logging.getLogger().handlers) == handlers
    assert len(os.listdir("/proc/self/fd")) <= files + 1


# ------------------------------------------------------------------------------------------------- curve and tables


def test_the_learning_curve_is_drawn_at_the_end(config):
    """It is the first thing that one looks at."""
    with open_run(config) as run:
        for step in range(1, 300):
            if step % 5 == 0:
                run.log(step, {tools.EPISODE_RETURN: math.log(step)})
            if step % 50 == 0:
                run.log(step, {tools.EVALUATION_RETURN: math.log(step), "agent/loss": math.nan})
            if step % 10 == 0:
                run.log(step, {"world_model/loss": 100.0 / step})
    image = cv2.imread(str(run.folder / "pictures" / "learning_curve.png"))
    assert image.shape == (800, 1000, 3)
    upper, lower = image[:400], image[400:]
    for half in (upper, lower):
        coloured = (half.max(axis=2).astype(int) - half.min(axis=2)) > 60
        assert coloured.sum() > 200


def test_a_run_without_metrics_has_no_curve(config):
    """An empty picture would be taken for a fault; asked for, it is drawn all the same."""
    with open_run(config) as run:
        pass
    assert os.listdir(run.folder / "pictures") == []
    assert learning_curve(run.folder).stat().st_size > 1000


def test_the_report_ends_with_the_mean_of_the_last_episodes(run):
    """The quickstart's user reads the score there."""
    assert run.report().startswith("no episode ended\n")
    for step in range(1, 201):
        run.log(step, {tools.EPISODE_RETURN: float(step > 150)})
    curve, score, took, where, *_ = run.report().splitlines()
    assert curve.startswith("return by step (mean of 50 episodes): 0.00 at 50, 0.00 at 80, ")
    assert curve.endswith(", 0.40 at 170, 1.00 at 200")
    assert score == "mean return 1.000 over the last 50 of 200 episodes"
    assert took == "wall time: 0 s"
    assert where == f"learning curve: {run.folder}/pictures/learning_curve.png"


def test_episode_table():
    """Columns keep their order; what contains a comma is quoted."""
    text = episode_table([{"episode": 0, "game": "a,b"}, {"episode": 1, "score": 2.5}])
    assert text == 'episode,game,score\n0,"a,b",\n1,,2.5\n'


def test_bootstrap_interval():
    """Against the normal approximation, and repeatable."""
    values = np.random.default_rng(0).normal(3.0, 2.0, 400)
    low, high = bootstrap_interval(values)
    half_width = 1.96 * values.std() / math.sqrt(len(values))
    assert abs(low - (values.mean() - half_width)) < 0.03 and abs(high - (values.mean() + half_width)) < 0.03
    assert bootstrap_interval(values) == (low, high)
    assert bootstrap_interval([2.0]) == (2.0, 2.0)
    assert all(map(math.isnan, bootstrap_interval([])))


def test_another_architecture_is_refused_at_the_run_too(run):
    """What load_state is for: the checkpoint of another network."""
    run.save_checkpoint(1, model={**MODEL, "agent": nn.Linear(2, 3).state_dict()}, train={})
    with pytest.raises(CheckpointError, match="1 of another shape: weight"):
        load_state(nn.Linear(4, 3), read_model(run.folder).agent, "agent")

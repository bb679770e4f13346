"""What happens to whole runs: breaks on a GPU, divergence, environments that fail, the user's Ctrl-C."""

import contextlib
import errno
import json
import math
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch

from envs.toy import Catch
from tests.test_train import ROOT, assert_same_run, metrics_of, newest_state, run_training, words
from tools.checkpoints import CheckpointFolder, read_checkpoint
from tools.run import Run
from train import main

RESUME_ON_GPU = """
import sys
from tests.test_train import run_training
folder, *options = sys.argv[1:]
common = ["--BasicSettings.Device=cuda", "--BasicSettings.Deterministic=true", *options]
whole = run_training(folder, *common)
half = run_training(folder, *common, "--JointTrainAgent.SampleMaxSteps=48")
print(whole, half)
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "options",
    [
        ("--BasicSettings.Use_cg=true", "--BasicSettings.Compile=false"),
        ("--BasicSettings.Use_cg=false", "--BasicSettings.Compile=false"),
        ("--BasicSettings.Use_cg=true", "--BasicSettings.Compile=true"),
        ("--BasicSettings.Use_cg=true", "--BasicSettings.Compile=false", "--BasicSettings.ReplayBufferOnGPU=false"),
        ("--BasicSettings.Use_cg=true", "--BasicSettings.Compile=false", "--Models.WorldModel.Backbone=Mamba",
         "--Models.Agent.Policy=PPO"),
        ("--BasicSettings.Use_cg=true", "--BasicSettings.Compile=false", "--Models.WorldModel.Backbone=Transformer",
         "--Models.WorldModel.Optimiser=Adam"),
    ],
    ids=["graphs", "eager", "compiled", "host_replay", "mamba_ppo", "transformer_adam"],
)  # fmt: skip
def test_a_deterministic_run_on_a_gpu_resumes_bit_for_bit(tmp_path, options):
    """The break moves where graphs are captured, and must move no weight, random state or metric."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    runs = subprocess.run(
        [sys.executable, "-c", RESUME_ON_GPU, str(tmp_path), *options],
        cwd=ROOT, capture_output=True, text=True, timeout=280, env=environment,
    )  # fmt: skip
    assert runs.returncode == 0, runs.stderr
    whole, half = map(Path, runs.stdout.splitlines()[-1].split())
    resumed = [sys.executable, "train.py", "--resume", str(half), "--JointTrainAgent.SampleMaxSteps=80"]
    again = subprocess.run(resumed, cwd=ROOT, capture_output=True, text=True, timeout=280, env=environment)
    assert again.returncode == 0, again.stderr
    assert newest_state(whole).train["world_model_optimiser"]["updates"] > 12  # captured long before the break
    assert_same_run(whole, half)


# -------------------------------------------------------------------------------------------------------- being killed

KILLS = 30


def start_and_kill(command, folder, rng):
    """Run until some metric lines are new, and a random moment longer."""
    metrics = folder / "metrics.jsonl"
    before, awaited = metrics.read_bytes(), rng.integers(1, 9)
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        while process.poll() is None and new_lines(before, metrics.read_bytes()) < awaited:
            time.sleep(0.01)
        time.sleep(rng.uniform(0.0, 0.1))
        process.kill()
        assert process.wait() == -signal.SIGKILL, process.stderr.read().decode()


def new_lines(before, now):
    """Lines from the first that differs; as long as a resumed run writes what was cut, none is."""
    old, new = before.splitlines(True), now.splitlines(True)
    differs = [i for i, pair in enumerate(zip(old, new, strict=False)) if pair[0] != pair[1]]
    first = differs[0] if differs else len(old)
    return sum(line.endswith(b"\n") for line in new[first:])


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_run_killed_again_and_again_ends_as_if_it_had_not_been(tmp_path):
    """SIGKILL at random moments of a real run, also inside checkpoints. Each time the newest checkpoint is sound, and
    up to its step the metrics are those of the unbroken run; in the end everything is."""
    options = ("--JointTrainAgent.SampleMaxSteps", 1600, "--JointTrainAgent.SaveEverySteps", 20)
    whole = run_training(tmp_path / "whole", *options)
    expected, rng, steps = metrics_of(whole), np.random.default_rng(0), [0]
    assert main(words(tmp_path / "killed", *options[:1], 4, *options[2:])) == 0  # the folder, and a first checkpoint
    (folder,) = (tmp_path / "killed").iterdir()
    command = [sys.executable, "train.py", "--resume", str(folder), *map(str, options[:1]), str(options[1])]
    for _ in range(KILLS):
        start_and_kill(command, folder, rng)
        cut = CheckpointFolder(folder / "ckpt").newest_sound()
        steps.append(read_checkpoint(cut)[0].step)
        found = [line for line in metrics_of_whole_lines(folder) if line["step"] <= steps[-1]]
        assert found == [line for line in expected if line["step"] <= steps[-1]]
    assert steps == sorted(steps) and len(set(steps)) > KILLS // 2
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=900)
    assert_same_run(whole, folder)


def metrics_of_whole_lines(folder):
    """As `metrics_of`, but of a file whose last line may be half."""
    whole = [line for line in (folder / "metrics.jsonl").read_bytes().splitlines(True) if line.endswith(b"\n")]
    lines = [{k: v for k, v in json.loads(line).items() if not k.startswith("time/")} for line in whole]
    return [line for line in lines if len(line) > 1]


# ---------------------------------------------------------------------------------------------------------- divergence


def on_devices(test):
    """On the CPU, and on a GPU with CUDA graphs."""
    gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
    return pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])(test)


@on_devices
@pytest.mark.parametrize(
    ("part", "key", "step"),
    [
        ("world_model", "Models.WorldModel.Laprop.LearningRate", 70),
        ("agent", "Models.Agent.AC.Laprop.LearningRate", 80),
    ],
)
@pytest.mark.filterwarnings("ignore:Error detected in")
def test_a_run_that_diverges_stops_and_can_be_looked_into(tmp_path, capsys, device, part, key, step):
    """Steps so long that everything overflows: the run ends with a report, and its batch shows the fault again."""
    options = ("--BasicSettings.Compile=false", f"--BasicSettings.Device={device}", f"--{key}=1e30")
    assert main(words(tmp_path, *options, "--JointTrainAgent.SampleMaxSteps=400")) == 1
    report = capsys.readouterr().err
    (folder,) = tmp_path.iterdir()
    batch = folder / "faults" / f"step_0000000{step}_{part}" / "batch.pt"
    assert re.search(rf"error: step {step}: 1\d updates of {part} in a row were not finite", report)
    assert f"python train.py --debug-batch {batch}" in report
    assert f"step 40 is saved, go on with --resume {folder}" in report
    lines = metrics_of(folder)
    assert lines[-1]["step"] == step and lines[-1][f"{part}/skipped"] == 1
    assert main(["--debug-batch", str(batch), "--BasicSettings.Device", "cpu"]) == 0
    found = capsys.readouterr().out
    assert f"{part} at step {step}" in found and "not finite in the rows: nothing" in found
    assert "repeated with seed 0, not finite in the order of their appearance" in found
    assert main(["--debug-batch", str(tmp_path / "none.pt")]) == 2


# -------------------------------------------------------------------------------------------------------- being stopped


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_stopped_run_says_so_by_its_exit_code_and_goes_on(tmp_path, capsys, number, code):
    """Whoever starts runs by a script must see that this one is not finished."""

    def stop():
        while not list(tmp_path.glob("*/metrics.jsonl")):
            time.sleep(0.01)
        time.sleep(0.3)
        os.kill(os.getpid(), number)

    handler = signal.getsignal(number)
    signal.signal(number, signal.SIG_DFL)  # under nohup SIGHUP is ignored, and a run leaves that so
    killer = threading.Thread(target=stop)
    killer.start()
    try:
        assert main(words(tmp_path, "--JointTrainAgent.SampleMaxSteps=100000")) == code
    finally:
        signal.signal(number, handler)
    killer.join()
    (folder,) = tmp_path.iterdir()
    step = newest_state(folder).step
    assert f"step {step} is saved, go on with --resume {folder}" in capsys.readouterr().err
    assert main(["--resume", str(folder), f"--JointTrainAgent.SampleMaxSteps={step + 4}"]) == 0
    assert newest_state(folder).step == step + 4


@pytest.mark.parametrize("ignored", [False, True])
def test_a_closed_terminal_ends_a_run_in_order_unless_it_is_to_stay(tmp_path, ignored):
    """A lost connection would cost the steps since the last checkpoint, and `nohup` would not help."""
    keys = words(tmp_path, "--JointTrainAgent.SampleMaxSteps=100000")
    process, terminal = pty.fork()
    if process == 0:
        signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
        os.chdir(ROOT)
        os.execv(sys.executable, [sys.executable, "train.py", *keys])
    while not any(path.stat().st_size for path in tmp_path.glob("*/metrics.jsonl")):
        os.read(terminal, 1 << 16)
    os.close(terminal)
    (folder,) = tmp_path.iterdir()
    if ignored:
        lines = len(metrics_of(folder))
        time.sleep(1.0)
        assert os.waitpid(process, os.WNOHANG) == (0, 0) and len(metrics_of(folder)) > lines
        os.kill(process, signal.SIGTERM)
    status = os.waitpid(process, 0)[1]
    assert os.waitstatus_to_exitcode(status) == (143 if ignored else 129)
    assert newest_state(folder).step >= metrics_of(folder)[-1]["step"] > 0


def test_ctrl_c_before_the_first_step_leaves_nothing(tmp_path, monkeypatch, capsys):
    def interrupt(config):
        raise KeyboardInterrupt

    monkeypatch.setattr("train.check_start", interrupt)
    assert main(words(tmp_path)) == 130
    assert capsys.readouterr().err == "stopped by Ctrl-C before the first step\n"
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------------------ full disk


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 6 MiB, where this user may mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("may not mount a tmpfs")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_training_on_a_full_disk_goes_on_and_its_last_checkpoint_stays(small_disk, monkeypatch, capsys):
    """The disk is full from step 45 to step 90: every metric line is there in the end, and so is every checkpoint but
    those of that time."""
    ballast = small_disk / "ballast"
    progress = Run.progress

    def fill_up(run, step):
        if step == 45:
            with contextlib.suppress(OSError), open(ballast, "wb", buffering=0) as file:
                while True:
                    file.write(bytes(512))
        elif step == 90:
            saved.extend(path.name for path in (run.folder / "ckpt").iterdir())
            ballast.unlink()
        progress(run, step)

    saved = []
    monkeypatch.setattr(Run, "progress", fill_up)
    options = ("--JointTrainAgent.SampleMaxSteps=120", "--JointTrainAgent.SaveEverySteps=20")
    assert main(words(small_disk, *options)) == 0
    (folder,) = (path for path in small_disk.iterdir() if path.is_dir())
    told = capsys.readouterr().err
    assert "step 60 is not saved (No space left on device)" in told and "step 80 is not saved" in told
    assert sorted(saved) == ["step_000000020", "step_000000040"]
    steps = [line["step"] for line in metrics_of(folder) if "world_model/loss" in line]
    assert steps == list(range(30, 121, 10))
    assert newest_state(folder).step == 120
    assert main(["--resume", str(folder), "--JointTrainAgent.SampleMaxSteps=124"]) == 0


def test_a_run_whose_last_step_is_not_saved_says_so_with_its_exit_code(tmp_path, monkeypatch, capsys):
    """A sweep or a script would take it for finished, and evaluate an older step."""
    write = CheckpointFolder.write

    def full_at_the_end(folder, step, files):
        if step == 80:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(folder, step, files)

    monkeypatch.setattr(CheckpointFolder, "write", full_at_the_end)
    options = ("--JointTrainAgent.SampleMaxSteps=80", "--JointTrainAgent.SaveEverySteps=40")
    assert main(words(tmp_path, *options)) == 1
    (folder,) = tmp_path.iterdir()
    told = capsys.readouterr().out.splitlines()[-1]
    assert told.startswith("step 80 is not saved (No space left on device): step 40 is saved, go on with --resume")
    monkeypatch.undo()
    assert main(["--resume", str(folder)]) == 0 and newest_state(folder).step == 80


def test_a_run_whose_folder_is_removed_ends(tmp_path, monkeypatch, capsys):
    """It would train to its end for checkpoints that nothing can go on from."""
    progress = Run.progress

    def remove(run, step):
        if step == 45:
            shutil.rmtree(run.folder)
        progress(run, step)

    monkeypatch.setattr(Run, "progress", remove)
    assert main(words(tmp_path, "--JointTrainAgent.SampleMaxSteps=120", "--JointTrainAgent.SaveEverySteps=20")) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and "was removed while it was in use, step 60 cannot be saved" in error
    assert not list(tmp_path.iterdir())


# ----------------------------------------------------------------------------------------------- environments that fail


class Flammable(Catch):
    """Every `life`-th step raises."""

    life, steps = 23, 0

    def __init__(self):
        super().__init__(16)

    def step(self, action):
        Flammable.steps += 1
        if Flammable.steps % Flammable.life == 0:
            raise RuntimeError("emulator on fire")
        return super().step(action)


@pytest.fixture
def flammable():
    Flammable.steps = 0
    gymnasium.register("Test/Flammable-v0", entry_point=Flammable)
    yield "--BasicSettings.Env_name=Test/Flammable-v0"
    del gymnasium.registry["Test/Flammable-v0"]


def test_a_run_survives_its_environments_and_counts_their_failures(tmp_path, flammable, capsys):
    """Every row in the replay is a step that the environment made, and as many of them as the run has steps."""
    assert main(words(tmp_path, flammable, "--Env.WorkerRestarts=9")) == 0
    (folder,) = tmp_path.iterdir()
    failures = [line["environment/restarts"] for line in metrics_of(folder) if "environment/restarts" in line]
    assert failures == sorted(failures) and failures[-1] == (Flammable.steps - Flammable.steps % 23) / 23 == 3
    assert newest_state(folder).replay["rows_written"] == 80
    assert capsys.readouterr().err.count("RuntimeError: emulator on fire") == 3


def test_failures_without_end_stop_the_run_with_the_traceback(tmp_path, flammable, capsys):
    assert main(words(tmp_path, flammable, "--Env.WorkerRestarts=2")) == 1
    error = capsys.readouterr().err
    error = error[error.index("error: ") :]
    assert "failed again after 2 restarts (Env.WorkerRestarts)" in error
    assert "in step" in error and "emulator on fire" in error
    (folder,) = tmp_path.iterdir()
    assert newest_state(folder).step == 40


# ----------------------------------------------------------------------------------------------------------- monitoring


@pytest.mark.parametrize("policy", ["AC", "PPO"])
def test_what_shows_numerical_trouble_early_is_in_the_metrics(tmp_path, policy):
    """Gradient norms, clipping, skipping, KL, entropies and the scale of values, in every line with updates."""
    folder = run_training(tmp_path, "--Models.Agent.Policy", policy)
    world_model = ("grad_norm", "clipped", "skipped", "kl", "posterior_entropy", "prior_entropy")
    agent = ("grad_norm", "clipped", "skipped", "entropy", "return", "return_scale")
    agent += ("approximate_kl", "clip_fraction") if policy == "PPO" else ()
    watched = [f"world_model/{name}" for name in world_model] + [f"agent/{name}" for name in agent]
    lines = [line for line in metrics_of(folder) if "agent/policy_loss" in line]
    assert len(lines) == 5
    for line in lines:
        assert all(math.isfinite(line[name]) for name in watched)
        assert line["world_model/grad_norm"] > 0 and line["agent/grad_norm"] > 0 and line["agent/return_scale"] >= 1
        assert 0 < line["world_model/posterior_entropy"] <= 3 * math.log(4) + 1e-6  # 3 categoricals of 4 classes

"""What happens to whole runs: breaks on a GPU, divergence, environments that fail, the user's Ctrl-C."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from tests.test_train import ROOT, assert_same_run, metrics_of, newest_state, words
from train import main

RESUME_ON_GPU = """
import sys
import threading
import time
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


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_run_says_so_by_its_exit_code_and_goes_on(tmp_path, capsys, number, code):
    """Whoever starts runs by a script must see that this one is not finished."""

    def stop():
        while not list(tmp_path.glob("*/metrics.jsonl")):
            time.sleep(0.01)
        time.sleep(0.3)
        os.kill(os.getpid(), number)

    killer = threading.Thread(target=stop)
    killer.start()
    assert main(words(tmp_path, "--JointTrainAgent.SampleMaxSteps=100000")) == code
    killer.join()
    (folder,) = tmp_path.iterdir()
    step = newest_state(folder).step
    assert f"step {step} is saved, go on with --resume {folder}" in capsys.readouterr().err
    assert main(["--resume", str(folder), f"--JointTrainAgent.SampleMaxSteps={step + 4}"]) == 0
    assert newest_state(folder).step == step + 4

"""What happens to whole runs: breaks on a GPU, divergence, environments that fail, the user's Ctrl-C."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.test_train import ROOT, assert_same_run, newest_state

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

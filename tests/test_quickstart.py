"""Every combination of core and policy learns the toy task Catch, in minutes on a CPU."""

import time
from pathlib import Path

import numpy as np
import pytest

from tools.run import EPISODE_RETURN, open_run, read_metrics
from train import train
from utils import load_config

ROOT = Path(__file__).resolve().parents[1]
CATCH = str(ROOT / "config_files" / "quickstart.yaml")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("policy", ["AC", "PPO"])
@pytest.mark.parametrize("backbone", ["Mamba2", "Mamba", "Transformer"])
def test_catch_is_learned(tmp_path, backbone, policy, record_property):
    """Random play returns −0.6 on average; the last 50 episodes of a run must return more than 0.9."""
    chosen = ["--Models.WorldModel.Backbone", backbone, "--Models.Agent.Policy", policy]
    config = load_config(["--config", CATCH, "--BasicSettings.RunDir", str(tmp_path), *chosen], "train.py").config
    start = time.monotonic()
    with open_run(config) as run:
        train(run)
    record_property("seconds", time.monotonic() - start)
    _, returns = read_metrics(run.folder)[EPISODE_RETURN]
    assert np.mean(returns[:20]) < 0
    assert np.mean(returns[-50:]) > 0.9

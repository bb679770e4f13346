"""The toy tasks are learned in minutes on a CPU: Catch by each core and policy, Reach by both policies, Recall by an
actor that remembers whole episodes."""

import time
from pathlib import Path

import numpy as np
import pytest
import torch

from eval import build_from, evaluate
from tools.checkpoints import read_model
from tools.run import EPISODE_RETURN, EVALUATION_RETURN, open_run, read_metrics
from train import train
from utils import load_config

ROOT = Path(__file__).resolve().parents[1]
CATCH = str(ROOT / "config_files" / "quickstart.yaml")
REACH = str(ROOT / "config_files" / "toy_reach.yaml")
RECALL = str(ROOT / "config_files" / "toy_recall.yaml")
REACH_BY_CHANCE, REACH_STRAIGHT = 4.0, 17.8                            # mean returns: random actions, the shortest way


def learn(tmp_path, *options):
    """Train with a configuration -> the run's folder, the returns of its episodes, seconds."""
    config = load_config(["--BasicSettings.RunDir", str(tmp_path), *options], "train.py").config
    start = time.monotonic()
    with open_run(config) as run:
        train(run)
    return run.folder, read_metrics(run.folder)[EPISODE_RETURN][1], time.monotonic() - start


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("policy", ["AC", "PPO"])
@pytest.mark.parametrize("backbone", ["Mamba2", "Mamba", "Transformer"])
def test_catch_is_learned(tmp_path, backbone, policy, record_property):
    """Random play returns −0.6 on average; the last 50 episodes of a run must return more than 0.9."""
    chosen = ["--Models.WorldModel.Backbone", backbone, "--Models.Agent.Policy", policy]
    _, returns, seconds = learn(tmp_path, "--config", CATCH, *chosen)
    record_property("seconds", seconds)
    assert np.mean(returns[:20]) < 0
    assert np.mean(returns[-50:]) > 0.9


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("policy", ["AC", "PPO"])
def test_reach_is_learned(tmp_path, policy, record_property):
    """Continuous actions: the last 50 episodes must close 60 % of the gap between chance and the shortest way."""
    presets = ("--config", CATCH, "--config", REACH)
    _, returns, seconds = learn(tmp_path, *presets, "--Models.Agent.Policy", policy)
    record_property("seconds", seconds)
    assert np.mean(returns[:40]) < REACH_BY_CHANCE + 2
    assert np.mean(returns[-50:]) > REACH_BY_CHANCE + 0.6 * (REACH_STRAIGHT - REACH_BY_CHANCE)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_recall_is_learned_and_needs_the_whole_episode(tmp_path, record_property):
    """The colour lies 20 steps back. The same weights answer it from the state of the whole episode, and by chance, a
    third, from a window of 16 steps."""
    presets = ("--config", CATCH, "--config", RECALL)
    folder, _, seconds = learn(tmp_path, *presets)
    record_property("seconds", seconds)
    device = torch.device("cpu")
    scores = {}
    for context_length in (0, 16):
        chosen = ("--JointTrainAgent.RealityContextLength", str(context_length), "--Evaluate.EpisodeNum", "100")
        config = load_config([*presets, *chosen, "--Evaluate.SaveVideo", "false"], "train.py").config
        models = build_from(read_model(folder, device), config, device)
        scores[context_length] = evaluate(*models, config, seed=0).metrics()[EVALUATION_RETURN]
    assert scores[0] > 0.8
    assert 0.15 < scores[16] < 0.52  # 0.33 within four standard errors

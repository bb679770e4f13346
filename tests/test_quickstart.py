"""The toy tasks are learned in minutes on a CPU: Catch by each core and policy, Reach by both policies, Recall from the
state of the whole episode."""

import time
from pathlib import Path

import numpy as np
import pytest
import torch

from eval import build_from, evaluate
from tools.checkpoints import read_model
from tools.run import EPISODE_RETURN, open_run, read_metrics
from train import train
from utils import config_from_dict, load_config, override_config

ROOT = Path(__file__).resolve().parents[1]
CATCH = str(ROOT / "config_files" / "quickstart.yaml")
REACH = str(ROOT / "config_files" / "toy_reach.yaml")
RECALL = str(ROOT / "config_files" / "toy_recall.yaml")
RECALL_BY_CHANCE = 1 / 3                                               # mean return of whoever does not know the colour
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


def recalled(folder, context_length):
    """Mean return of 400 greedy episodes with the longest wait, acting from so many rows."""
    saved = read_model(folder)
    chosen = {
        "JointTrainAgent.RealityContextLength": context_length,
        "Env.Toy.RecallVaries": False,
        "Evaluate.EpisodeNum": 400,
        "Evaluate.SaveVideo": False,
    }
    config = override_config(config_from_dict(saved.config), chosen)
    world_model, agent = build_from(saved, config, torch.device("cpu"))
    return evaluate(world_model, agent, config, seed=0).scores().mean()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_recall_is_learned_and_needs_the_whole_episode(tmp_path, seed, record_property):
    """The colour was shown more than 20 steps ago: known from the state of the whole episode, a guess from 16 rows."""
    presets = ("--config", CATCH, "--config", RECALL)
    folder, _, seconds = learn(tmp_path, *presets, "--BasicSettings.Seed", str(seed))
    record_property("seconds", seconds)
    assert recalled(folder, context_length=0) > 0.8
    assert abs(recalled(folder, context_length=16) - RECALL_BY_CHANCE) < 0.12    # 5 standard deviations

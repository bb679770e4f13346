"""Small models: size, precision, nothing lost that acts."""

from types import SimpleNamespace

import pytest
import torch

from agents import build_agent
from envs.spaces import action_space_of
from sub_models.world_models import build_world_model
from tests.test_train import run_training
from tools.checkpoints import CheckpointError, SavedModel, read_model
from tools.export import export_model, with_critics
from utils import config_from_dict, config_to_dict, load_config


def test_matrices_are_halves_of_the_same_values_and_all_else_is_the_same(tmp_path):
    saved = read_model(run_training(tmp_path, "--JointTrainAgent.SampleMaxSteps", 40))
    size = export_model(saved, tmp_path / "small.pt")
    small = read_model(tmp_path / "small.pt")
    assert (tmp_path / "small.pt").stat().st_size == size < saved.path.stat().st_size
    assert (small.step, small.config, small.spaces) == (saved.step, saved.config, saved.spaces)
    assert small.world_model.keys() == saved.world_model.keys()
    assert not [name for name in small.agent if "critic" in name] and [name for name in small.agent if "actor" in name]
    for name, tensor in {**small.world_model, **small.agent}.items():
        given = {**saved.world_model, **saved.agent}[name]
        if given.dim() >= 2:
            assert tensor.dtype == torch.half
            torch.testing.assert_close(tensor.float(), given, rtol=1e-3, atol=1e-7)
        else:
            assert tensor.dtype == given.dtype and torch.equal(tensor, given)


def test_missing_critics_are_taken_from_a_fresh_agent_but_damage_is_not_mended(tmp_path):
    saved = read_model(run_training(tmp_path, "--JointTrainAgent.SampleMaxSteps", 40))
    export_model(saved, tmp_path / "small.pt")
    small = read_model(tmp_path / "small.pt")
    config = config_from_dict(saved.config)
    space = action_space_of(saved.spaces)
    world_model = build_world_model(config, space, torch.device("cpu"))
    agent = build_agent(config, world_model.feature_dim, space, torch.device("cpu"))
    with_critics(small, agent).load_into(world_model, agent)
    assert with_critics(saved, agent) is saved
    del saved.agent[next(name for name in saved.agent if name.startswith("critic."))]
    with pytest.raises(CheckpointError, match="1 missing: critic"):
        with_critics(saved, agent).load_into(world_model, agent)


def test_the_default_model_fits_beside_its_figures(tmp_path):
    """A newcomer is to evaluate a trained agent at once: 16 MB at most with Pong's six actions."""
    config = load_config([], "train.py").config
    spaces = {"observation": [64, 64, 3], "actions": 6}
    world_model = build_world_model(config, SimpleNamespace(n=6), torch.device("cpu"))
    agent = build_agent(config, world_model.feature_dim, SimpleNamespace(n=6), torch.device("cpu"))
    weights = (world_model.state_dict(), agent.state_dict())
    saved = SavedModel(tmp_path, 100_000, config_to_dict(config), spaces, {}, *weights)
    assert 15_000_000 < export_model(saved, tmp_path / "small.pt") < 16_000_000

"""Grey observations: right values and shapes, the environment's state still within reach."""

import gymnasium
import numpy as np
import pytest

from config_files.schema import Config
from env_wrapper import make_env
from envs.grey import GreyObservation
from envs.toy import Catch
from utils import DEFAULTS_FILE, load_config

QUICKSTART = str(DEFAULTS_FILE.parent / "quickstart.yaml")
GREY = [
    "--config", QUICKSTART, "--BasicSettings.ImageChannel", "1", "--Models.WorldModel.InChannels", "1",
    "--Models.WorldModel.Encoder.InputSize", "1,32,32", "--Models.WorldModel.Decoder.InputSize", "1,32,32",
]  # fmt: skip


@pytest.fixture(scope="module")
def config() -> Config:
    return load_config(GREY, "train.py").config


def test_values_are_the_luminance_of_the_colours():
    colour, grey = Catch(32), GreyObservation(Catch(32))
    seen, _ = colour.reset(seed=3)
    got, _ = grey.reset(seed=3)
    assert got.shape == grey.observation_space.shape == (32, 32, 1) and got.dtype == np.uint8
    expected = seen @ np.array([0.299, 0.587, 0.114])
    assert np.abs(got[..., 0] - expected).max() <= 1
    assert grey.step(1)[0].shape == (32, 32, 1)


def test_one_channel_makes_every_frame_grey(config):
    env = make_env("Toy/Catch-v0", config, seed=0)
    obs, _ = env.reset()
    assert obs.shape == env.observation_space.shape == (32, 32, 1)


def test_a_saved_state_goes_on_alike(config):
    env, other = (make_env("Toy/Catch-v0", config, seed=seed) for seed in (0, 1))
    env.reset()
    other.reset()
    other.set_state(env.get_state())
    for _ in range(5):
        np.testing.assert_array_equal(env.step(2)[0], other.step(2)[0])


def test_an_environment_without_a_state_has_none_when_grey():
    stateless = gymnasium.Wrapper(Catch(32))
    assert not hasattr(GreyObservation(stateless), "get_state")
    assert hasattr(GreyObservation(Catch(32)), "get_state")

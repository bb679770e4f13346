"""What the schema accepts can be built and trained: random small configurations over every structural key."""

import gymnasium
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agents import build_agent
from config_files.schema import Config
from replay_buffer import Batch
from sub_models.world_models import build_world_model
from utils import DEFAULTS_FILE, ConfigError, isolated_rng, load_config, override_config

QUICKSTART = str(DEFAULTS_FILE.parent / "quickstart.yaml")
WORLD_MODEL, AGENT, TRAIN = "Models.WorldModel", "Models.Agent", "JointTrainAgent"
FEW, SIZES = st.integers(1, 3), st.sampled_from([1, 4, 8, 12, 16])


def stack(name: str) -> dict[str, st.SearchStrategy]:
    prefix = f"{WORLD_MODEL}.{name}"
    return {
        f"{prefix}.Depth": FEW,
        f"{prefix}.Mults": st.lists(FEW, min_size=1, max_size=4),
        f"{prefix}.Norm": st.sampled_from(["batch", "rms", "layer", "none"]),
        f"{prefix}.Kernel": st.sampled_from([1, 3, 5, 7]),
        f"{prefix}.FirstStrideOne": st.booleans(),
    }


def policy(name: str) -> dict[str, st.SearchStrategy]:
    prefix = f"{AGENT}.{name}"
    return {
        f"{prefix}.NumLayers": FEW,
        f"{prefix}.Act": st.sampled_from(["SiLU", "ReLU", "GELU", "ELU"]),
        f"{prefix}.Optimiser": st.sampled_from(["Laprop", "Adam"]),
        f"{prefix}.Actor.HiddenUnits": SIZES,
        f"{prefix}.Critic.HiddenUnits": SIZES,
    }


STRUCTURE = {
    **stack("Encoder"),
    **stack("Decoder"),
    **policy("AC"),
    **policy("PPO"),
    f"{WORLD_MODEL}.Decoder.FinalLayerSigmoid": st.booleans(),
    f"{WORLD_MODEL}.Backbone": st.sampled_from(["Mamba", "Mamba2", "Transformer"]),
    f"{WORLD_MODEL}.Act": st.sampled_from(["SiLU", "ReLU", "GELU", "ELU"]),
    f"{WORLD_MODEL}.CategoricalDim": FEW,
    f"{WORLD_MODEL}.ClassDim": st.integers(2, 4),
    f"{WORLD_MODEL}.HiddenStateDim": SIZES,
    f"{WORLD_MODEL}.Optimiser": st.sampled_from(["Laprop", "Adam"]),
    f"{WORLD_MODEL}.Dropout": st.sampled_from([0, 0.5]),
    f"{WORLD_MODEL}.Reward.HiddenUnits": SIZES,
    f"{WORLD_MODEL}.Reward.LayerNum": FEW,
    f"{WORLD_MODEL}.Termination.LayerNum": FEW,
    f"{WORLD_MODEL}.Transformer.NumLayers": FEW,
    f"{WORLD_MODEL}.Transformer.NumHeads": FEW,
    f"{WORLD_MODEL}.Mamba.n_layer": FEW,
    f"{WORLD_MODEL}.Mamba.d_intermediate": st.sampled_from([0, 8]),
    f"{WORLD_MODEL}.Mamba.ssm_cfg.d_state": st.sampled_from([1, 3, 16]),
    f"{WORLD_MODEL}.Mamba.ssm_cfg.d_conv": st.sampled_from([2, 3, 4]),
    f"{WORLD_MODEL}.Mamba.ssm_cfg.expand": FEW,
    f"{WORLD_MODEL}.Mamba.ssm_cfg.headdim": st.sampled_from([1, 4, 8]),
    f"{WORLD_MODEL}.Mamba.ssm_cfg.ngroups": st.integers(1, 2),
    f"{WORLD_MODEL}.Mamba.ssm_cfg.chunk_size": st.sampled_from([16, 64]),
    f"{AGENT}.Policy": st.sampled_from(["AC", "PPO"]),
    f"{AGENT}.PPO.Minibatch": st.sampled_from([1, 5, 1000]),
    f"{TRAIN}.MaskEpisodeStart": st.booleans(),
    f"{TRAIN}.MaskAfterTermination": st.booleans(),
    f"{TRAIN}.ResetStateAtEpisodeStart": st.booleans(),
    "BasicSettings.ImageSize": st.sampled_from([8, 12, 16]),
}
FIXED = {
    "BasicSettings.Device": "cpu",
    f"{TRAIN}.BatchSize": 2,
    f"{TRAIN}.BatchLength": 6,
    f"{TRAIN}.ImagineBatchSize": 3,
    f"{TRAIN}.ImagineContextLength": 2,
    f"{TRAIN}.ImagineBatchLength": 3,
    f"{TRAIN}.RealityContextLength": 2,
}
SPACES = [gymnasium.spaces.Discrete(3), gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)]


def random_batch(config: Config, space: gymnasium.Space, size: int, length: int) -> Batch:
    image = config.BasicSettings.ImageSize
    discrete = isinstance(space, gymnasium.spaces.Discrete)
    return Batch(
        obs=torch.randint(0, 256, (size, length, image, image, 3), dtype=torch.uint8),
        action=torch.randint(0, 3, (size, length)) if discrete else torch.rand(size, length, *space.shape) * 2 - 1,
        reward=torch.randn(size, length),
        termination=torch.randint(0, 2, (size, length)).float(),
        is_first=torch.randint(0, 2, (size, length)).bool(),
    )


@pytest.mark.slow
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(chosen=st.fixed_dictionaries({}, optional=STRUCTURE), space=st.sampled_from(SPACES))
def test_what_is_accepted_trains(chosen, space):
    check_that_it_trains(chosen, space)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(chosen=st.fixed_dictionaries(STRUCTURE), space=st.sampled_from(SPACES))
def test_what_is_accepted_trains_in_a_few_examples(chosen, space):
    check_that_it_trains(chosen, space)


def check_that_it_trains(chosen: dict[str, object], space: gymnasium.Space) -> None:
    """One update of world model and agent with finite losses, or a refusal in one line before anything is built."""
    size = chosen.get("BasicSettings.ImageSize", 16)
    shape = {f"{WORLD_MODEL}.{part}.InputSize": [3, size, size] for part in ("Encoder", "Decoder")}
    base = load_config(["--config", QUICKSTART], "train.py").config
    try:
        config = override_config(base, {"BasicSettings.ImageSize": size, **FIXED, **shape, **chosen})
    except ConfigError as error:
        assert str(error).isprintable()
        return
    train = config.JointTrainAgent
    with isolated_rng(0):
        world_model = build_world_model(config, space, torch.device("cpu"))
        agent = build_agent(config, world_model.feature_dim, space, torch.device("cpu"))
        losses = world_model.update(random_batch(config, space, train.BatchSize, train.BatchLength))
        contexts = random_batch(config, space, train.ImagineBatchSize, train.ImagineContextLength)
        losses |= agent.update(world_model.imagine(agent, contexts, train.ImagineBatchLength))
    assert all(torch.isfinite(loss).all() for loss in losses.values()), losses

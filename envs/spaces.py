"""Observation and action spaces as plain values, so that a checkpoint describes what it was trained for."""

from typing import Any

import gymnasium
import numpy as np


def describe_spaces(observation_space: gymnasium.Space, action_space: gymnasium.Space) -> dict[str, Any]:
    """Spaces of one environment -> {'obs_shape': [H, W, C], 'num_actions': A or None, 'action_shape': [] or [A]}."""
    discrete = isinstance(action_space, gymnasium.spaces.Discrete)
    return {
        "obs_shape": list(observation_space.shape),
        "num_actions": int(action_space.n) if discrete else None,
        "action_shape": list(action_space.shape),
    }


def action_space_of(description: dict[str, Any]) -> gymnasium.Space:
    """The action space that `describe_spaces` described."""
    if description["num_actions"] is not None:
        return gymnasium.spaces.Discrete(description["num_actions"])
    return gymnasium.spaces.Box(-1.0, 1.0, tuple(description["action_shape"]), np.float32)

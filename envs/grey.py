"""Grey observations, for `BasicSettings.ImageChannel: 1`."""

from typing import Any

import cv2
import gymnasium
import numpy as np


class GreyObservation(gymnasium.ObservationWrapper):
    """Colour to luminance (0.299 R + 0.587 G + 0.114 B).   (S, S, 3) uint8 -> (S, S, 1) uint8."""

    def __init__(self, env: gymnasium.Env):
        super().__init__(env)
        height, width, _ = env.observation_space.shape
        self.observation_space = gymnasium.spaces.Box(0, 255, (height, width, 1), np.uint8)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        return cv2.cvtColor(observation, cv2.COLOR_RGB2GRAY)[..., None]

    def __getattr__(self, name: str) -> Any:
        """The environment's own state; where it has none, this has none either."""
        if name in ("get_state", "set_state"):
            return getattr(self.env, name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

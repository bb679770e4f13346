"""Any environment that gymnasium knows by its id, seen as images.

Image observations (uint8, H x W, H x W x 1, H x W x 3 or channels first) are resized; everything else is replaced by
the `render()` frames. Box actions with finite bounds are scaled to -1..1, Discrete ones start at 0.
"""

import importlib
import os
from typing import Any

import gymnasium
import numpy as np

from envs.common import (
    EnvironmentOutputError,
    EnvironmentUnavailable,
    UnknownEnvironment,
    UnusableEnvironment,
    resize_image,
)


class Answers(gymnasium.Wrapper):
    """The class itself, held to the form of gymnasium's answers: (observation, info), and five values a step."""

    def reset(self, **arguments: Any) -> tuple[Any, dict[str, Any]]:
        answer = self.env.reset(**arguments)
        _check_answer("reset()", answer, ("observation", "info"))
        return answer

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        answer = self.env.step(action)
        _check_answer("step()", answer, ("observation", "reward", "terminated", "truncated", "info"))
        return answer


class ImageObservation(gymnasium.ObservationWrapper):
    """Observations as uint8 (S, S, 3), S = image_size; from `render()` where `from_render`.

    State is that of the class itself, if it has get_state() and set_state(), and the steps under its time limit.
    """

    def __init__(self, env: gymnasium.Env, name: str, image_size: int, from_render: bool):
        super().__init__(env)
        self.name, self.image_size, self.from_render = name, image_size, from_render
        self.observation_space = gymnasium.spaces.Box(0, 255, (image_size, image_size, 3), np.uint8)
        space = env.observation_space
        self._is_narrow = not from_render and bool((space.low > 0).any() or (space.high < 255).any())

    def observation(self, observation: Any) -> np.ndarray:
        if self.from_render:
            return resize_image(_as_rgb(self.env.render(), "render()"), self.image_size)
        expected = self.env.observation_space
        if not isinstance(observation, np.ndarray) or observation.shape != expected.shape:
            raise EnvironmentOutputError(f"observation is {_describe(observation)}, its space says {expected}")
        if self._is_narrow and not expected.contains(observation):
            found = f"{_describe(observation)} in {observation.min()}..{observation.max()}"
            raise EnvironmentOutputError(f"observation is {found}, its space says {expected}")
        return resize_image(_as_rgb(observation, "observation"), self.image_size)

    def get_state(self) -> dict[str, Any]:
        limit = self._time_limit()
        return {"env": self._stateful().get_state(), "elapsed": None if limit is None else limit._elapsed_steps}

    def set_state(self, state: dict[str, Any]) -> None:
        inner = self._stateful()
        self.env.reset()                                               # gymnasium's wrappers want one before a step
        inner.set_state(state["env"])
        if (limit := self._time_limit()) is not None:
            limit._elapsed_steps = state["elapsed"]

    def _stateful(self) -> Any:
        if not hasattr(self.unwrapped, "get_state"):
            raise NotImplementedError(f"{self.name}: its class has no get_state() and set_state()")
        return self.unwrapped

    def _time_limit(self) -> gymnasium.wrappers.TimeLimit | None:
        env = self.env
        while isinstance(env, gymnasium.Wrapper):
            if isinstance(env, gymnasium.wrappers.TimeLimit):
                return env
            env = env.env
        return None


class UnitAction(gymnasium.ActionWrapper):
    """Box(low, high) as Box(-1, 1), and Discrete(n, start=k) as Discrete(n)."""

    def __init__(self, env: gymnasium.Env, name: str):
        super().__init__(env)
        space = env.action_space
        if isinstance(space, gymnasium.spaces.Discrete):
            self.action_space = gymnasium.spaces.Discrete(int(space.n))
        elif _is_bounded_vector(space):
            self.action_space = gymnasium.spaces.Box(-1.0, 1.0, space.shape, np.float32)
        else:
            raise UnusableEnvironment(
                f"{name}: its action space is {space}; expected Discrete, or a vector Box of floats with finite bounds"
            )

    def action(self, action: Any) -> Any:
        space = self.env.action_space
        if isinstance(space, gymnasium.spaces.Discrete):
            return int(action) + int(space.start)
        unit = (np.asarray(action, np.float64) + 1.0) / 2.0            # 0..1
        return (space.low + unit * (space.high - space.low)).astype(space.dtype)


def build_registered(name: str, image_size: int) -> gymnasium.Env:
    """`name` is a gymnasium id; `module:id` imports the module first."""
    spec = find_registration(name)
    env = _make(spec)
    from_render = not _is_image(env.observation_space)
    if from_render:
        modes = env.metadata.get("render_modes") or []
        if "rgb_array" not in modes:
            raise UnusableEnvironment(
                f"{name}: its observations are {env.observation_space}, not uint8 images, and it cannot render "
                f"'rgb_array' frames in their place (its render_modes: {list(modes)})"
            )
        env.close()
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")              # pygame draws to memory, also without a screen
        env = _make(spec, render_mode="rgb_array")
    return ImageObservation(UnitAction(env, name), name, image_size, from_render)


def _make(spec: gymnasium.envs.registration.EnvSpec, **arguments: Any) -> gymnasium.Env:
    """gymnasium.make, with `Answers` below the wrappers that it adds: those unpack what they get."""
    try:
        env = gymnasium.make(spec, disable_env_checker=True, **arguments)
    except gymnasium.error.DependencyNotInstalled as error:
        raise EnvironmentUnavailable(f"{spec.id}: {error}") from error
    if env is env.unwrapped:
        return Answers(env)
    innermost = env
    while innermost.env is not env.unwrapped:
        innermost = innermost.env
    innermost.env = Answers(innermost.env)
    return env


def find_registration(name: str) -> gymnasium.envs.registration.EnvSpec:
    """gymnasium's record of `name`, its module imported first; UnknownEnvironment where there is none."""
    module, _, env_id = name.rpartition(":")
    if module:
        _import_for(name, module)
    try:
        return gymnasium.spec(env_id)
    except gymnasium.error.Error as error:
        known = ["ALE/Pong-v5", "Toy/Catch-v0", "Toy/Recall-v0", "Toy/Reach-v0", *gymnasium.registry]
        raise UnknownEnvironment(name, "not an environment that this machine knows", known) from error


def _import_for(name: str, module: str) -> None:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        problem = f"cannot import the module before the colon ({error}; is its folder on PYTHONPATH?)"
        raise UnknownEnvironment(name, problem, []) from error


def _is_image(space: gymnasium.Space) -> bool:
    if not isinstance(space, gymnasium.spaces.Box) or space.dtype != np.uint8:
        return False
    shape = space.shape
    return len(shape) == 2 or (len(shape) == 3 and (shape[2] in (1, 3) or shape[0] in (1, 3)))


def _is_bounded_vector(space: gymnasium.Space) -> bool:
    return (
        isinstance(space, gymnasium.spaces.Box)
        and len(space.shape) == 1
        and np.issubdtype(space.dtype, np.floating)
        and bool(np.isfinite(space.low).all() and np.isfinite(space.high).all())
    )


def _as_rgb(image: Any, origin: str) -> np.ndarray:
    """uint8 (H, W), (H, W, 1), (H, W, 3), (1, H, W) or (3, H, W) -> (H, W, 3)."""
    if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.ndim not in (2, 3):
        raise EnvironmentOutputError(f"{origin} is {_describe(image)}, expected a uint8 image")
    if image.ndim == 2:
        image = image[:, :, None]
    if image.shape[2] not in (1, 3):
        image = image.transpose(1, 2, 0)
    if image.shape[2] not in (1, 3) or 0 in image.shape:
        raise EnvironmentOutputError(f"{origin} is {_describe(image)}, expected one or three channels")
    return np.ascontiguousarray(np.broadcast_to(image, (*image.shape[:2], 3)))


def _check_answer(call: str, answer: Any, names: tuple[str, ...]) -> None:
    """Raise unless the answer is a tuple of as many values as there are names, the last of them a dict."""
    expected = f"a tuple of {', '.join(names)}"
    if not isinstance(answer, tuple) or len(answer) != len(names):
        got = f"a tuple of {len(answer)} values" if isinstance(answer, tuple) else _describe(answer)
        raise EnvironmentOutputError(f"{call} returned {got}, expected {expected}")
    if not isinstance(answer[-1], dict):
        raise EnvironmentOutputError(f"{call} returned {_describe(answer[-1])} as info, expected a dict")


def _describe(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} {value.shape}"
    return f"{type(value).__name__} {value!r:.60}"

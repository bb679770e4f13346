"""One interface for every environment: build one by name (`make_env`) or several at once (`make_vec_env`).

What comes out is a gymnasium.Env with a uint8 (S, S, C) observation, S = BasicSettings.ImageSize, C = ImageChannel (1:
grey), and a Discrete or Box(-1, 1) action space. `terminated` means that the task ended, `truncated` that a time limit
did; a lost life is neither.
`info` holds, after every reset and step, the keys of EPISODE_KEYS:
    is_first         this observation opens an episode
    life_loss        the last action lost a life
    episode_return   sum of the episode's raw rewards so far, all lives
    episode_length   agent steps of the episode so far
"""

import functools
import importlib.metadata
import importlib.util
import os
from typing import Any, NamedTuple

import gymnasium
import numpy as np

from envs import my_dmc, my_memory_maze, rendering
from envs.common import EnvironmentOutputError
from envs.grey import GreyObservation
from envs.my_atari import atari_games, build_atari
from envs.my_dmc import build_dmc, is_control_name
from envs.my_memory_maze import build_memory_maze
from envs.parallel import VectorEnv
from envs.registered import build_registered, find_registration
from envs.toy import TOY_NAMES, build_toy

LARGEST_REWARD = float(np.finfo(np.float32).max)                       # what a row can hold
RENDERED_FAMILIES = ("dmc", "memory_maze")

OPTIONAL_FAMILIES = {                                                  # family -> packages, what to install
    "dmc/<domain>-<task>": (("dm_control", "mujoco"), my_dmc.REQUIREMENTS),
    "memory_maze:MemoryMaze-<size>-v0": (("memory_maze", "gym", "dm_control", "mujoco"), my_memory_maze.REQUIREMENTS),
    "gymnasium ids that pygame draws": (("pygame",), "pygame==2.6.1"),
}

__all__ = ["Episode", "FamilyStatus", "environment_report", "make_env", "make_vec_env"]


class FamilyStatus(NamedTuple):
    """A line of environment_report; `fix` is empty where there is nothing to do."""

    family: str
    ok: bool
    detail: str
    fix: str


class Episode(gymnasium.Wrapper):
    """Checks what goes in and comes out, keeps the episode's account, and seeds the first reset.

    `name` is how errors call the environment. `seed` is used once, at the first reset that is not given one; the random
    stream goes on from there. Continuous actions are clipped to -1..1.
    """

    def __init__(self, env: gymnasium.Env, name: str, seed: int | None):
        super().__init__(env)
        self.name = name
        self._first_seed = seed
        self._steps = 0                                                # agent steps since the environment was built
        self._episode_return, self._episode_length = 0.0, 0
        self._in_episode = False

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        seed = self._first_seed if seed is None else seed
        self._first_seed = None
        obs, info = self._call(self.env.reset, seed=seed, options=options)
        self._check_obs(obs)
        self._episode_return, self._episode_length = 0.0, 0
        self._in_episode = True
        return obs, {**info, **self._account(is_first=True, life_loss=False)}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        if not self._in_episode:
            raise RuntimeError(f"{self.name}: step() was called with no episode under way; call reset() first")
        action = self._checked_action(action)
        self._steps += 1
        self._episode_length += 1
        obs, reward, terminated, truncated, info = self._call(self.env.step, action)
        self._check_obs(obs)
        self._episode_return += self._checked_reward(reward)
        terminated, truncated = self._checked_flag("terminated", terminated), self._checked_flag("truncated", truncated)
        self._in_episode = not (terminated or truncated)
        life_loss = self._checked_flag("info['life_loss']", info.get("life_loss", False))
        account = self._account(is_first=False, life_loss=life_loss)
        return obs, float(reward), terminated, truncated, {**info, **account}

    def get_state(self) -> dict[str, Any]:
        """All that the future depends on, as plain values; NotImplementedError where the family cannot give it."""
        return {
            "env": self._stateful_env().get_state(),
            "steps": self._steps,
            "episode_return": self._episode_return,
            "episode_length": self._episode_length,
            "in_episode": self._in_episode,
            "first_seed": self._first_seed,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue as the environment that gave `state` would have."""
        self._stateful_env().set_state(state["env"])
        self._steps = state["steps"]
        self._episode_return, self._episode_length = state["episode_return"], state["episode_length"]
        self._in_episode, self._first_seed = state["in_episode"], state["first_seed"]

    def _stateful_env(self) -> Any:
        if not hasattr(self.env, "get_state"):
            raise NotImplementedError(f"{self.name}: this kind of environment cannot save or restore its state")
        return self.env

    def _account(self, is_first: bool, life_loss: bool) -> dict[str, Any]:
        return {
            "is_first": is_first,
            "life_loss": life_loss,
            "episode_return": self._episode_return,
            "episode_length": self._episode_length,
        }

    def _call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (EnvironmentOutputError, gymnasium.error.DependencyNotInstalled) as error:
            raise self._fault(str(error)) from error
        except Exception as error:
            error.add_note(f"raised by environment {self._where()}")
            raise

    def _where(self) -> str:
        return f"{self.name}, step {self._steps} (step {self._episode_length} of its episode)"

    def _fault(self, problem: str) -> EnvironmentOutputError:
        return EnvironmentOutputError(f"{self._where()}: {problem}")

    def _check_obs(self, obs: Any) -> None:
        shape = self.observation_space.shape
        if not isinstance(obs, np.ndarray) or obs.dtype != np.uint8 or obs.shape != shape:
            got = f"{obs.dtype} {obs.shape}" if isinstance(obs, np.ndarray) else type(obs).__name__
            raise self._fault(f"observation is {got}, expected uint8 {shape}")

    def _checked_reward(self, reward: Any) -> float:
        if np.shape(reward) != ():
            raise self._fault(f"reward has shape {np.shape(reward)}, expected one number")
        try:
            value = float(reward)
        except (TypeError, ValueError):
            value = None
        if value is None or isinstance(reward, str | bytes):           # float() would read a text
            raise self._fault(f"reward is {reward!r:.60}, expected a number")
        if not abs(value) <= LARGEST_REWARD:                           # False for NaN, too
            raise self._fault(f"reward is {value}, expected a finite number of at most {LARGEST_REWARD:.3g}")
        return value

    def _checked_flag(self, key: str, value: Any) -> bool:
        if not isinstance(value, bool | np.bool_):
            raise self._fault(f"{key} is {value!r}, expected True or False")
        return bool(value)

    def _checked_action(self, action: Any) -> Any:
        space = self.action_space
        if isinstance(space, gymnasium.spaces.Discrete):
            if not space.contains(action):
                raise ValueError(f"{self.name}: action {action!r} is not one of 0..{space.n - 1}")
            return int(action)
        action = np.asarray(action, np.float32)
        if action.shape != space.shape or not np.isfinite(action).all():
            raise ValueError(f"{self.name}: action {action} has to be {space.shape} finite numbers in -1..1")
        return action.clip(-1.0, 1.0)


def make_env(name: str, config: Any, seed: int | None) -> Episode:
    """One environment. `config` is the whole configuration; `seed` is given at the first reset."""
    return Episode(_build(name, config), name, seed)


def make_vec_env(name: str, config: Any, num_envs: int, seed: int, asynchronous: bool | None = None) -> VectorEnv:
    """`num_envs` environments, each with its own seed drawn from `seed`.

    asynchronous: worker processes (True) or this process (False); None: workers where there is more than one.
    """
    family = _family_of(name)
    registration = find_registration(name) if family is None else None
    if family in RENDERED_FAMILIES:
        rendering.choose_backend(name)                                           # once, and not again in each worker
    backend = os.environ.get(rendering.VARIABLE)
    build = functools.partial(_build_in_worker, backend, registration, name, config)
    return VectorEnv(
        build,
        name=name,
        num_envs=num_envs,
        seed=seed,
        asynchronous=num_envs > 1 if asynchronous is None else asynchronous,
        max_restarts=config.Env.WorkerRestarts,
        timeout=config.Env.WorkerTimeout,
    )


def environment_report() -> list[FamilyStatus]:
    """Which families this machine can run, and whether it can render physics (a trial that takes seconds)."""
    report = [
        FamilyStatus("ALE/<Game>-v5", True, f"{len(atari_games())} games", ""),
        FamilyStatus("Toy/<name>-v0", True, ", ".join(TOY_NAMES), ""),
    ]
    for family, (packages, requirements) in OPTIONAL_FAMILIES.items():
        missing = [package for package in packages if importlib.util.find_spec(package) is None]
        if missing:
            problem = f"not installed: {', '.join(missing)}"
            report.append(FamilyStatus(family, False, problem, f"pip install {requirements}"))
        else:
            versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in packages)
            report.append(FamilyStatus(family, True, versions, ""))
    if importlib.util.find_spec("dm_control") is not None:
        report.append(_rendering_status())
    return report


def _rendering_status() -> FamilyStatus:
    chosen = os.environ.get(rendering.VARIABLE)
    failures = {}
    for backend in [chosen] if chosen else rendering.DEBIAN_PACKAGES:
        failures[backend] = rendering.probe_backend(backend)
        if failures[backend] is None:
            return FamilyStatus("rendering", True, f"a scene was rendered with {rendering.VARIABLE}={backend}", "")
    problems = "; ".join(f"{backend}: {failure}" for backend, failure in failures.items())
    return FamilyStatus("rendering", False, problems, rendering.install_hint())


def _build_in_worker(backend: str | None, registration: Any, name: str, config: Any, seed: int) -> Episode:
    """make_env for a process that may not know what the main one does: rendering backend, registered environments."""
    if backend is not None:
        os.environ[rendering.VARIABLE] = backend
    if registration is not None:
        gymnasium.registry.setdefault(registration.id, registration)
    return make_env(name, config, seed)


def _family_of(name: str) -> str | None:
    """The family whose own builder knows `name`; None: gymnasium's registry."""
    if name.startswith("ALE/"):
        return "atari"
    if name.startswith("Toy/"):
        return "toy"
    if is_control_name(name):
        return "dmc"
    if name.startswith(("memory_maze:", "MemoryMaze-")):
        return "memory_maze"
    return None


def _build(name: str, config: Any) -> gymnasium.Env:
    env = _build_in_colour(name, config)
    return GreyObservation(env) if config.BasicSettings.ImageChannel == 1 else env


def _build_in_colour(name: str, config: Any) -> gymnasium.Env:
    size = config.BasicSettings.ImageSize
    family = _family_of(name)
    if family == "atari":
        atari = config.Env.Atari
        return build_atari(name, size, atari.FrameSkip, atari.RepeatActionProbability, atari.NoopMax)
    if family == "toy":
        return build_toy(name, size, config.Env.Toy.RecallDelay, config.Env.Toy.RecallVaries)
    if family == "dmc":
        return build_dmc(name, size)
    if family == "memory_maze":
        return build_memory_maze(name, size)
    return build_registered(name, size)

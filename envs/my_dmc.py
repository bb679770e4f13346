"""The DeepMind Control Suite from pixels: `dmc/<domain>-<task>`, for instance dmc/walker-walk.

Each agent step repeats its action for two control steps and adds up their rewards. An episode is cut after 1000 control
steps, which is a truncation: no task of the suite but lqr ever terminates by itself (with discount 0).
"""

from typing import Any, ClassVar

import gymnasium
import numpy as np

from envs.common import UnknownEnvironment
from envs.rendering import choose_backend, import_optional, silence_absl

REQUIREMENTS = "dm-control==1.0.50 mujoco==3.17.0"
PREFIXES = ("dmc/", "dm_control/", "dmc_", "dm_")
ACTION_REPEAT = 2
CONTROL_STEPS = 1000                                                   # of an episode
UNBOUNDED = 1e6
CAMERAS = {"quadruped": 2}                                             # all other domains: 0


class ControlTask(gymnasium.Env):
    """One task.   obs (S, S, 3) uint8, S = image_size; actions (A,) in -1..1, scaled to the task's own bounds."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}

    def __init__(
        self,
        domain: str,
        task: str,
        image_size: int,
        action_repeat: int = ACTION_REPEAT,
        control_steps: int = CONTROL_STEPS,
    ):
        choose_backend("the DeepMind Control Suite")
        suite = import_suite()
        self._mujoco = import_optional("mujoco", "the DeepMind Control Suite", REQUIREMENTS)
        self._env = suite.load(domain, task, task_kwargs={"random": 0})
        self._seeded = False
        self.image_size, self.camera = image_size, CAMERAS.get(domain, 0)
        self.action_repeat, self.control_steps = action_repeat, control_steps
        self._low, self._high = action_bounds(self._env.action_spec())
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, self._low.shape, np.float32)
        self.observation_space = gymnasium.spaces.Box(0, 255, (image_size, image_size, 3), np.uint8)
        self._pristine = {name: array.copy() for name, array in self._model_arrays().items()}
        self._played = 0                                               # control steps of the episode

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None or not self._seeded:
            self._env.task.random.seed(int(self.np_random.integers(2**32)))
            self._seeded = True
        self._env.reset()
        self._played = 0
        return self._render(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        unit = (np.asarray(action, np.float64) + 1.0) / 2.0            # 0..1
        scaled = self._low + unit * (self._high - self._low)
        reward, last, discount, repeats = 0.0, False, 1.0, 0
        while repeats < self.action_repeat and not last:
            time_step = self._env.step(scaled)
            reward += time_step.reward
            repeats += 1
            self._played += 1
            last = time_step.last() or self._played >= self.control_steps
            discount = time_step.discount
        terminated = last and discount == 0.0
        return self._render(), float(reward), terminated, last and not terminated, {}

    def close(self) -> None:
        self._env.close()

    def get_state(self) -> dict[str, Any]:
        model, data = self._env.physics.model.ptr, self._env.physics.data.ptr
        kind = self._mujoco.mjtState.mjSTATE_INTEGRATION
        physics = np.empty(self._mujoco.mj_stateSize(model, kind), np.float64)
        self._mujoco.mj_getState(model, data, physics, kind)
        return {
            "physics": physics.tobytes(),
            "model": {name: array.tobytes() for name, array in self._changed_arrays().items()},
            "task": {name: _plain(value) for name, value in vars(self._env.task).items() if _plain(value) is not None},
            "task_rng": _random_state_to_plain(self._env.task.random),
            "rng": self.np_random.bit_generator.state,
            "seeded": self._seeded,
            "played": self._played,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        self._env.reset()                                              # else the next step would reset
        model, data = self._env.physics.model.ptr, self._env.physics.data.ptr
        for name, array in self._model_arrays().items():
            array[...] = self._pristine[name]
            if name in state["model"]:
                array[...] = np.frombuffer(state["model"][name], array.dtype).reshape(array.shape)
        kind = self._mujoco.mjtState.mjSTATE_INTEGRATION
        self._mujoco.mj_setState(model, data, np.frombuffer(state["physics"], np.float64), kind)
        self._mujoco.mj_step1(model, data)                             # what the suite leaves behind after each step
        self._upload_terrain()
        vars(self._env.task).update(state["task"])
        _set_random_state(self._env.task.random, state["task_rng"])
        self.np_random.bit_generator.state = state["rng"]
        self._seeded, self._played = state["seeded"], state["played"]
        self._env._step_count = state["played"]                        # the suite's own clock has no setter

    def _render(self) -> np.ndarray:
        return self._env.physics.render(self.image_size, self.image_size, camera_id=self.camera).copy()

    def _upload_terrain(self) -> None:
        """Height fields are drawn from a copy in the graphics library, made when the first picture is rendered."""
        physics = self._env.physics
        if not physics.contexts:
            return
        with physics.contexts.gl.make_current() as context:
            for index in range(physics.model.nhfield):
                context.call(
                    self._mujoco.mjr_uploadHField, physics.model.ptr, physics.contexts.mujoco.ptr, index
                )

    def _model_arrays(self) -> dict[str, np.ndarray]:
        """The model's numeric arrays, as views. Some tasks write into them at each reset (where the target is, say)."""
        model = self._env.physics.model.ptr
        names = (name for name in dir(model) if not name.startswith("_"))
        values = ((name, getattr(model, name)) for name in names)
        return {name: value for name, value in values if isinstance(value, np.ndarray)}

    def _changed_arrays(self) -> dict[str, np.ndarray]:
        arrays = self._model_arrays()
        return {name: array for name, array in arrays.items() if not np.array_equal(array, self._pristine[name])}


def import_suite() -> Any:
    """dm_control.suite, once a rendering backend has been chosen."""
    silence_absl()
    return import_optional("dm_control.suite", "the DeepMind Control Suite", REQUIREMENTS)


def is_control_name(name: str) -> bool:
    return name.startswith(PREFIXES)


def build_dmc(name: str, image_size: int) -> ControlTask:
    """`name` is dmc/walker-walk, or the same as dm_control/walker-walk-v0, dmc_walker_walk or dm_walker_walk."""
    choose_backend(name)
    tasks = {_folded(f"{domain}-{task}"): (domain, task) for domain, task in import_suite().ALL_TASKS}
    prefix = next(prefix for prefix in PREFIXES if name.startswith(prefix))
    wanted = _folded(name.removeprefix(prefix).removesuffix("-v0"))
    if wanted not in tasks:
        known = [f"dmc/{domain}-{task}" for domain, task in tasks.values()]
        raise UnknownEnvironment(name, "no such task in the DeepMind Control Suite", known)
    return ControlTask(*tasks[wanted], image_size)


def action_bounds(spec: Any) -> tuple[np.ndarray, np.ndarray]:
    """Bounds of each action, -1 and 1 where the task has none (mujoco writes 1e10 for 'none')."""
    low = np.broadcast_to(spec.minimum, spec.shape).astype(np.float64)
    high = np.broadcast_to(spec.maximum, spec.shape).astype(np.float64)
    bounded = (low > -UNBOUNDED) & (high < UNBOUNDED)
    return np.where(bounded, low, -1.0), np.where(bounded, high, 1.0)


def _folded(name: str) -> str:
    return name.lower().replace("-", "_")


def _plain(value: Any) -> bool | int | float | str | None:
    """A task's attribute as a plain value; None for what is built once and never changes."""
    if isinstance(value, np.generic):
        value = value.item()
    return value if isinstance(value, bool | int | float | str) else None


def _random_state_to_plain(random: np.random.RandomState) -> dict[str, Any]:
    state = random.get_state(legacy=False)
    return {**state, "state": {"key": state["state"]["key"].tolist(), "pos": int(state["state"]["pos"])}}


def _set_random_state(random: np.random.RandomState, state: dict[str, Any]) -> None:
    key = np.array(state["state"]["key"], np.uint32)
    random.set_state({**state, "state": {"key": key, "pos": state["state"]["pos"]}})

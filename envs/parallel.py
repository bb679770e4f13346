"""Several environments stepped together, and what happens when one of them fails.

Each environment is a lane: a gymnasium vector environment of size one (AsyncVectorEnv with shared memory in a worker
process, or SyncVectorEnv in this process), so that one can be replaced while the others go on.

Autoreset mode is SAME_STEP: the step that ends an episode also resets, and its result carries both the ended episode's
last observation (`final_obs`) and the next one's first (`obs`). With gymnasium's default, NEXT_STEP, every episode is
followed by a step whose action is ignored; such a row must not reach a replay buffer, and there is none in this mode.

A worker that dies, hangs for `timeout` seconds or raises is reported with its traceback and replaced, at most
`max_restarts` times for each environment; its unfinished episode is closed as truncated with reward 0, the last
observation that was seen as the final one, and `restarted` set. That step did not happen: `retake` makes it good in the
new episode, for whoever records transitions. After that, and at once where the fault is the
environment's own output (EnvironmentOutputError), WorkerFailed is raised. Workers start from a fork server (never from
this process, which may hold threads and a GPU), ignore Ctrl-C, and end when the main process does, however it ends.

Letters: E environments, H x W image.
"""

import contextlib
import faulthandler
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.vector.async_vector_env import AsyncState

from envs.common import EnvironmentOutputError

logger = logging.getLogger(__name__)

EPISODE_KEYS = ("is_first", "life_loss", "episode_return", "episode_length")
PRELOADED = ("numpy", "cv2", "gymnasium.vector", "ale_py")           # imported once, by the fork server


class StepResult(NamedTuple):
    """One step of E environments. After an episode's end `obs` is already the next episode's first observation."""

    obs: np.ndarray                   # (E, H, W, 3) uint8, the next action is chosen from it
    reward: np.ndarray                # (E,) float32
    terminated: np.ndarray            # (E,) bool
    truncated: np.ndarray             # (E,) bool
    life_loss: np.ndarray             # (E,) bool
    is_first: np.ndarray              # (E,) bool, `obs` opens an episode
    final_obs: dict[int, np.ndarray]  # environment -> last observation of the ended episode
    episode_return: np.ndarray        # (E,) float64, valid where terminated or truncated
    episode_length: np.ndarray        # (E,) int64, valid where terminated or truncated
    restarted: np.ndarray             # (E,) bool, the environment failed and was replaced

    @property
    def finished(self) -> np.ndarray:
        """(E,) bool, an episode ended as its environment wanted: only then do return and length count as a result."""
        return (self.terminated | self.truncated) & ~self.restarted


class WorkerFailed(RuntimeError):
    """An environment failed for good."""


class _LaneFault(Exception):
    """What happened to a lane; `is_final` where a restart cannot help."""

    def __init__(self, problem: str, is_final: bool = False):
        super().__init__(problem)
        self.is_final = is_final


class _Moment(NamedTuple):
    """One lane's share of a StepResult."""

    obs: np.ndarray
    reward: float
    terminated: bool
    truncated: bool
    life_loss: bool
    final_obs: np.ndarray | None
    episode_return: float
    episode_length: int


@dataclass(frozen=True)
class _Recipe:
    """How to build an environment, and the spaces that it is known to have."""

    build: Callable[[int], gymnasium.Env]                              # seed -> environment
    observation_space: gymnasium.Space
    action_space: gymnasium.Space
    timeout: float


class _GuardedEnv(gymnasium.Env):
    """Turns every exception into an `error` in `info`, so that it reaches the main process whatever its type.

    `recipe` gives the spaces; with `seed` None nothing is built (AsyncVectorEnv wants such a copy in the main process).
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}
    render_mode = None

    def __init__(self, recipe: _Recipe, seed: int | None):
        self.observation_space, self.action_space = recipe.observation_space, recipe.action_space
        self.env: gymnasium.Env | None = None
        self.fault: dict[str, Any] | None = None
        if seed is not None:
            self.env = self._try(recipe.build, seed)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        result = self._try(self.env.reset) if self.fault is None else None
        if self.fault is not None:
            return self._no_obs(), self.fault
        obs, info = result
        return obs, {key: info[key] for key in EPISODE_KEYS}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        result = self._try(self.env.step, action) if self.fault is None else None
        if self.fault is not None:
            return self._no_obs(), 0.0, False, True, {}                # the reset that follows hands the fault over
        *rest, info = result
        return *rest, {key: info[key] for key in EPISODE_KEYS}

    def close(self) -> None:
        if self.env is not None:
            self.env.close()

    def attempt(self, method: str, *args: Any) -> tuple[Any, tuple[bool, str] | None]:
        """Call a method of the environment -> (result, None) or (None, (is NotImplementedError, what was raised))."""
        try:
            return getattr(self.env, method)(*args), None
        except Exception as error:
            is_missing = isinstance(error, NotImplementedError)
            return None, (is_missing, str(error) if is_missing else traceback.format_exc())

    def _try(self, function: Callable, *args: Any) -> Any:
        try:
            return function(*args)
        except Exception as error:
            is_final = isinstance(error, EnvironmentOutputError)
            self.fault = {"error": str(error) if is_final else traceback.format_exc(), "error_is_final": is_final}
            return None

    def _no_obs(self) -> np.ndarray:
        return np.zeros(self.observation_space.shape, self.observation_space.dtype)


@dataclass(frozen=True)
class _WorkerFactory:
    """Builds the guarded environment in a worker, and a hollow one in the process that made this factory."""

    recipe: _Recipe
    seed: int
    main_pid: int

    def __call__(self) -> _GuardedEnv:
        if os.getpid() == self.main_pid:
            return _GuardedEnv(self.recipe, None)
        _settle_worker()
        building = threading.Timer(self.recipe.timeout, os._exit, (1,))
        building.start()                                               # a constructor that hangs becomes a death
        env = _GuardedEnv(self.recipe, self.seed)
        building.cancel()
        return env


def _settle_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)                       # Ctrl-C is the main process's to answer
    faulthandler.enable()
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1)                          # the main process asks a hung worker where it is
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """An idle worker meets a closed pipe when the main process dies; one that is busy, or hangs, would stay."""
    multiprocessing.parent_process().join()
    os._exit(1)


class _Lane:
    """One environment behind gymnasium's vector API; every fault comes out as a _LaneFault."""

    def __init__(self, recipe: _Recipe, asynchronous: bool, seeds: np.random.SeedSequence):
        self.recipe, self.asynchronous = recipe, asynchronous
        self._seeds = seeds
        self._vector: AsyncVectorEnv | SyncVectorEnv | None = None
        self._action: np.ndarray | None = None                         # (1,) or (1, A), sent and not yet answered
        self._fault: _LaneFault | None = None
        self.restarts = 0

    def start(self) -> None:
        """A fresh environment with a seed that no earlier one of this lane had."""
        seed = int(self._seeds.spawn(1)[0].generate_state(1)[0])
        self._fault = None
        if not self.asynchronous:
            factories = [lambda: _GuardedEnv(self.recipe, seed)]
            self._vector = SyncVectorEnv(factories, copy=True, autoreset_mode=AutoresetMode.SAME_STEP)
            return
        factories = [_WorkerFactory(self.recipe, seed, os.getpid())]
        try:
            with _workers_leave_main_alone():
                self._vector = AsyncVectorEnv(
                    factories, shared_memory=True, context=_start_method(), autoreset_mode=AutoresetMode.SAME_STEP
                )
        except (EOFError, ConnectionError) as error:
            raise _LaneFault(f"the worker ended while it built the environment ({error!r})") from error

    def stop(self) -> None:
        """End the environment and its process, in whatever state they are."""
        vector, self._vector = self._vector, None
        if vector is None:
            return
        if not self.asynchronous:
            vector.close()
            return
        for process in vector.processes:
            process.kill()
        vector._state = AsyncState.DEFAULT                             # else close() asks the dead for a pending answer
        vector.close(terminate=True)

    def close(self) -> None:
        """Let the environment close itself, and end its process."""
        if self.asynchronous and self._vector is not None and self._action is None and self._fault is None:
            with contextlib.suppress(_LaneFault):
                self._attempt("close")
        self.stop()

    def request_reset(self) -> None:
        if self.asynchronous:
            self._guard(self._vector.reset_async)

    def reset(self) -> np.ndarray:
        """-> first observation (H, W, 3). Answers `request_reset`."""
        if self.asynchronous:
            obs, info = self._guard(self._vector.reset_wait, self.recipe.timeout)
        else:
            obs, info = self._vector.reset()
        self._raise_reported(info)
        return obs[0]

    def send(self, action: np.ndarray) -> None:
        self._action = action
        if self.asynchronous:
            try:
                self._guard(self._vector.step_async, action)
            except _LaneFault as fault:
                self._fault = fault                                    # raised when the answer is asked for

    def receive(self) -> _Moment:
        action, self._action = self._action, None
        if self._fault is not None:
            raise self._fault
        if self.asynchronous:
            step = self._guard(self._vector.step_wait, self.recipe.timeout)
        else:
            step = self._vector.step(action)
        return self._moment(*step)

    def call(self, method: str, *args: Any) -> Any:
        """Result of the environment's own `method`."""
        result, fault = self._attempt(method, *args)
        if fault is None:
            return result
        is_missing, problem = fault
        raise NotImplementedError(problem) if is_missing else WorkerFailed(problem)

    def _attempt(self, method: str, *args: Any) -> tuple[Any, tuple[bool, str] | None]:
        if not self.asynchronous:
            return self._vector.call("attempt", method, *args)[0]
        self._guard(self._vector.call_async, "attempt", method, *args)
        return self._guard(self._vector.call_wait, self.recipe.timeout)[0]

    def _moment(self, obs: Any, reward: Any, terminated: Any, truncated: Any, info: dict[str, Any]) -> _Moment:
        self._raise_reported(info)
        account = info.get("final_info", info)                         # of the episode that this step belongs to
        return _Moment(
            obs=obs[0],
            reward=float(reward[0]),
            terminated=bool(terminated[0]),
            truncated=bool(truncated[0]),
            life_loss=bool(account["life_loss"][0]),
            final_obs=info["final_obs"][0] if "final_obs" in info else None,
            episode_return=float(account["episode_return"][0]),
            episode_length=int(account["episode_length"][0]),
        )

    def _raise_reported(self, info: dict[str, Any]) -> None:
        if "error" in info:
            raise _LaneFault(info["error"][0], is_final=bool(info["error_is_final"][0]))

    def _guard(self, function: Callable, *args: Any) -> Any:
        try:
            return function(*args)
        except multiprocessing.TimeoutError as error:
            self._ask_where()
            problem = f"the worker gave no answer for {self.recipe.timeout:g} s (its stack is on standard error)"
            raise _LaneFault(problem) from error
        except (EOFError, ConnectionError) as error:
            raise _LaneFault(f"the worker died {self._cause_of_death()}") from error

    def _ask_where(self) -> None:
        process = self._vector.processes[0]
        if process.is_alive() and hasattr(signal, "SIGUSR1"):
            os.kill(process.pid, signal.SIGUSR1)
            time.sleep(0.2)                                            # time to write its stack before it is killed

    def _cause_of_death(self) -> str:
        process = self._vector.processes[0]
        process.join(timeout=5.0)
        code = process.exitcode
        if code is not None and code < 0:
            return f"of signal {signal.Signals(-code).name}"
        return f"with exit code {code} (its traceback is on standard error)"


class VectorEnv:
    """E environments of one kind.   See the module for failures and the autoreset mode.

    build(seed=...) makes one environment (as env_wrapper.make_env does: uint8 images, EPISODE_KEYS in `info`); it must
    be picklable when `asynchronous`. Environment i gets its own seed from SeedSequence(seed), the same in every mode.
    `obs` is the observation (E, H, W, 3) that the next actions are chosen from.
    """

    def __init__(
        self,
        build: Callable[..., gymnasium.Env],
        name: str,
        num_envs: int,
        seed: int,
        asynchronous: bool,
        max_restarts: int,
        timeout: float,
    ):
        if num_envs < 1:
            raise ValueError(f"num_envs is {num_envs}, expected 1 or more")
        sample = build(seed=0)                                         # its construction errors surface here, unwrapped
        self.observation_space, self.action_space = sample.observation_space, sample.action_space
        sample.close()
        self.name, self.num_envs, self.max_restarts = name, num_envs, max_restarts
        recipe = _Recipe(build, self.observation_space, self.action_space, timeout)
        seeds = np.random.SeedSequence(seed).spawn(num_envs)
        self._lanes = [_Lane(recipe, asynchronous, lane_seeds) for lane_seeds in seeds]
        self.obs = np.zeros((num_envs, *self.observation_space.shape), np.uint8)
        self._returns = np.zeros(num_envs, np.float64)                 # of the episodes under way
        self._lengths = np.zeros(num_envs, np.int64)
        self._started = False

    def reset(self) -> np.ndarray:
        """Start a new episode everywhere -> obs (E, H, W, 3)."""
        faults: dict[int, _LaneFault] = {}
        for attempt in (self._start_or_request, self._take_first):
            for index in range(self.num_envs):
                if index in faults:
                    continue
                try:
                    attempt(index)
                except _LaneFault as fault:
                    faults[index] = fault
        for index, fault in faults.items():
            self.obs[index] = self._replace(index, fault)
        self._started = True
        self._returns[:], self._lengths[:] = 0.0, 0
        return self.obs.copy()

    def step(self, actions: np.ndarray) -> StepResult:
        """actions (E,) integers or (E, A) floats."""
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: np.ndarray) -> None:
        """Hand the actions over; workers run until `step_wait` collects the results."""
        actions = np.asarray(actions)
        expected = (self.num_envs, *self.action_space.shape)
        if actions.shape != expected:
            raise ValueError(f"{self.name}: actions have shape {actions.shape}, expected {expected}")
        for index, lane in enumerate(self._lanes):
            lane.send(actions[index : index + 1])

    def step_wait(self) -> StepResult:
        moments, restarted = zip(*map(self._receive, range(self.num_envs)), strict=True)
        return self._collect(moments, np.array(restarted))

    def retake(self, result: StepResult, actions: np.ndarray) -> StepResult:
        """`result` with the replaced environments' actions taken in their new episodes, whose `obs` it holds.

        One that fails again is replaced again and is `restarted` in what comes back, too.
        """
        moments = [self._moment_in(result, index) for index in range(self.num_envs)]
        restarted = np.zeros(self.num_envs, bool)
        for index in np.flatnonzero(result.restarted).tolist():
            self._lanes[index].send(np.asarray(actions)[index : index + 1])
            moments[index], restarted[index] = self._receive(index)
        return self._collect(moments, restarted)

    @property
    def restarts(self) -> int:
        """Environments that failed and were replaced, since the beginning."""
        return sum(lane.restarts for lane in self._lanes)

    def get_state(self) -> list[dict[str, Any]]:
        """All that each environment's future depends on, as plain values; NotImplementedError where one cannot."""
        return [
            {
                "env": self._call(index, "get_state"),
                "obs": self.obs[index].tobytes(),
                "episode_return": float(self._returns[index]),
                "episode_length": int(self._lengths[index]),
            }
            for index in range(self.num_envs)
        ]

    def set_state(self, states: list[dict[str, Any]]) -> None:
        """Continue as the environments that gave `states` would have, in any mode; needs no reset before it."""
        if len(states) != self.num_envs:
            raise ValueError(f"{self.name}: {len(states)} states for {self.num_envs} environments")
        if not self._started:
            self.reset()
        for index, state in enumerate(states):
            self._call(index, "set_state", state["env"])
            self.obs[index] = np.frombuffer(state["obs"], np.uint8).reshape(self.obs.shape[1:])
            self._returns[index], self._lengths[index] = state["episode_return"], state["episode_length"]

    def close(self) -> None:
        for lane in self._lanes:
            lane.close()

    def __enter__(self) -> "VectorEnv":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start_or_request(self, index: int) -> None:
        if not self._started:
            self._lanes[index].start()
        self._lanes[index].request_reset()

    def _take_first(self, index: int) -> None:
        self.obs[index] = self._lanes[index].reset()

    def _call(self, index: int, method: str, *args: Any) -> Any:
        try:
            return self._lanes[index].call(method, *args)
        except _LaneFault as fault:
            raise WorkerFailed(f"{self._label(index)}: {method}: {fault}") from fault

    def _receive(self, index: int) -> tuple[_Moment, bool]:
        """A lane's answer, and whether it failed and was replaced."""
        try:
            return self._lanes[index].receive(), False
        except _LaneFault as fault:
            return self._close_episode(index, fault), True

    @staticmethod
    def _moment_in(result: StepResult, index: int) -> _Moment:
        shared = set(_Moment._fields) - {"final_obs"}
        values = {name: getattr(result, name)[index] for name in shared}
        return _Moment(**values, final_obs=result.final_obs.get(index))

    def _collect(self, moments: Sequence[_Moment], restarted: np.ndarray) -> StepResult:
        column = {field: [getattr(moment, field) for moment in moments] for field in _Moment._fields}
        terminated, truncated = np.array(column["terminated"], bool), np.array(column["truncated"], bool)
        ended = terminated | truncated
        self.obs = np.stack(column["obs"])
        result = StepResult(
            obs=self.obs.copy(),
            reward=np.array(column["reward"], np.float32),
            terminated=terminated,
            truncated=truncated,
            life_loss=np.array(column["life_loss"], bool),
            is_first=ended,
            final_obs={index: moments[index].final_obs.copy() for index in np.flatnonzero(ended).tolist()},
            episode_return=np.array(column["episode_return"], np.float64),
            episode_length=np.array(column["episode_length"], np.int64),
            restarted=restarted,
        )
        self._returns = np.where(ended, 0.0, result.episode_return)
        self._lengths = np.where(ended, 0, result.episode_length)
        return result

    def _close_episode(self, index: int, fault: _LaneFault) -> _Moment:
        last_obs = self.obs[index].copy()
        return _Moment(
            obs=self._replace(index, fault),
            reward=0.0,
            terminated=False,
            truncated=True,
            life_loss=False,
            final_obs=last_obs,
            episode_return=float(self._returns[index]),
            episode_length=int(self._lengths[index]) + 1,
        )

    def _replace(self, index: int, fault: _LaneFault) -> np.ndarray:
        """Start a new environment in place of the one that failed -> its first observation."""
        lane = self._lanes[index]
        while True:
            lane.stop()
            if fault.is_final:
                self.close()
                raise WorkerFailed(f"{self._label(index)}: {fault}") from fault
            if lane.restarts >= self.max_restarts:
                self.close()
                raise WorkerFailed(
                    f"{self._label(index)} failed again after {lane.restarts} restarts (Env.WorkerRestarts): {fault}"
                ) from fault
            lane.restarts += 1
            count = f"{lane.restarts} of {self.max_restarts}"
            logger.warning("%s failed, restart %s: %s", self._label(index), count, fault)
            try:
                lane.start()
                lane.request_reset()
                return lane.reset()
            except _LaneFault as next_fault:
                fault = next_fault

    def _label(self, index: int) -> str:
        return f"environment {index} of {self.num_envs} ({self.name})"


def _start_method() -> str:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return "spawn"
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(PRELOADED))
    return "forkserver"


@contextlib.contextmanager
def _workers_leave_main_alone() -> Iterator[None]:
    """Start processes that do not import the main script again.

    By default each worker would run it up to its `__main__` guard (seconds and hundreds of MB for torch alone), or all
    of it where there is no guard. Nothing needs it: cloudpickle sends what is defined in `__main__` by value.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main

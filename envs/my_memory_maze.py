"""Memory Maze: find the object of the border's colour again and again, in a maze that must be remembered.

Built from the package's dm_env tasks. Importing the package registers with the old `gym` and sets MUJOCO_GL, so the
backend is chosen first, and gym's notice that it is unmaintained is taken out before it is printed.
"""

from typing import Any, ClassVar

import gymnasium
import numpy as np

from envs.common import UnknownEnvironment
from envs.rendering import choose_backend, import_optional, silence_absl

REQUIREMENTS = "memory-maze==1.0.3 gym==0.26.2 dm-control==1.0.50 mujoco==3.17.0"
SIZES = ("9x9", "11x11", "13x13", "15x15")                             # 1000, 2000, 3000, 4000 steps
MEMORY_MAZE_NAMES = tuple(f"memory_maze:MemoryMaze-{size}-v0" for size in SIZES)


class MemoryMaze(gymnasium.Env):
    """One maze size.   obs (S, S, 3) uint8, S = image_size; 6 actions: none, forward, left, right, both diagonals.

    The time limit is a truncation. A new maze is drawn at each reset. The state of the maze generator cannot be read:
    there is no get_state.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}

    def __init__(self, size: str, image_size: int):
        self._build_task = getattr(import_tasks(), f"memory_maze_{size}")
        self.image_size = image_size
        self._env: Any = None                                          # takes its seed when built: at the first reset
        self.action_space = gymnasium.spaces.Discrete(6)
        self.observation_space = gymnasium.spaces.Box(0, 255, (image_size, image_size, 3), np.uint8)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None or self._env is None:
            self.close()
            self._env = self._build_task(
                seed=int(self.np_random.integers(2**32)), image_only_obs=True, camera_resolution=self.image_size
            )
        return self._env.reset().observation.copy(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        time_step = self._env.step(int(action))
        terminated = time_step.last() and time_step.discount == 0.0
        truncated = time_step.last() and not terminated
        return time_step.observation.copy(), float(time_step.reward), terminated, truncated, {}

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None


def import_tasks() -> Any:
    """The package's task constructors, its and gym's chatter kept from the user."""
    choose_backend("Memory Maze")
    notices = import_optional("gym_notices.notices", "Memory Maze", REQUIREMENTS)
    notices.notices.clear()
    silence_absl()
    return import_optional("memory_maze.tasks", "Memory Maze", REQUIREMENTS)


def build_memory_maze(name: str, image_size: int) -> MemoryMaze:
    """`name` is one of MEMORY_MAZE_NAMES, with or without the module before the colon."""
    size = name.removeprefix("memory_maze:").removeprefix("MemoryMaze-").removesuffix("-v0")
    if size not in SIZES:
        raise UnknownEnvironment(name, "no such maze", MEMORY_MAZE_NAMES)
    return MemoryMaze(size, image_size)

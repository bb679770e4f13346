"""Memory Maze, rendered for real."""

import importlib.util
import os
import subprocess
import sys

import numpy as np
import pytest

from envs.common import EnvironmentUnavailable, UnknownEnvironment
from envs.my_memory_maze import MEMORY_MAZE_NAMES, SIZES, MemoryMaze, build_memory_maze
from envs.rendering import choose_backend

if importlib.util.find_spec("memory_maze") is None:
    pytest.skip("memory_maze is not installed", allow_module_level=True)
try:
    choose_backend("the tests")
except EnvironmentUnavailable as unavailable:
    pytest.skip(str(unavailable), allow_module_level=True)


def first_frames(env, seed):
    frames = [env.reset(seed=seed)[0]]
    frames += [env.step(action)[0] for action in (1, 2, 1)]
    frames.append(env.reset()[0])
    return np.stack(frames)


def test_same_seed_same_mazes_and_truncation_at_the_limit():
    env = MemoryMaze("9x9", 64)
    first, again = first_frames(env, 1), first_frames(env, 1)
    assert first.shape == (5, 64, 64, 3)
    assert np.array_equal(first, again)
    assert not np.array_equal(first[0], first[1])                      # forward moves
    assert not np.array_equal(first[0], first[4])                      # the second maze is another one
    assert env.action_space.n == 6
    env._env.env.env.env.env._time_limit = 0.9                         # composer.Environment; 4 steps a second
    assert [env.step(0)[2:4] for _ in range(4)] == [(False, False)] * 3 + [(False, True)]
    env.close()


@pytest.mark.slow
def test_other_seed_other_mazes():
    env = MemoryMaze("9x9", 64)
    assert not np.array_equal(first_frames(env, 1), first_frames(env, 2))
    env.close()


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_length_of_an_episode(size):
    env = build_memory_maze(f"memory_maze:MemoryMaze-{size}-v0", 32)
    env.reset(seed=0)
    steps = env._env._time_limit / env._env.control_timestep()
    assert round(steps) == 1000 * (1 + SIZES.index(size))
    env.close()


def test_unknown_maze_names_the_nearest():
    with pytest.raises(UnknownEnvironment, match=r"no such maze; nearest: .*MemoryMaze-9x9-v0"):
        build_memory_maze("memory_maze:MemoryMaze-9x8-v0", 64)
    assert len(MEMORY_MAZE_NAMES) == 4


@pytest.mark.slow
def test_is_silent(tmp_path):
    """gym's notice, memory_maze's and dm_control's chatter do not reach the user; other warnings still would."""
    script = "from envs.my_memory_maze import MemoryMaze; e = MemoryMaze('9x9', 32); e.reset(seed=0); e.step(1)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("", "")

"""Vectors of environments: the same in every mode, honest at episode ends, and alive after a worker's failure."""

import fcntl
import functools
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import gymnasium
import numpy as np
import pytest

from env_wrapper import Episode
from envs.my_atari import Atari
from envs.parallel import StepResult, VectorEnv, WorkerFailed
from envs.toy import Catch, Reach, Recall

MODES = [pytest.param(False, id="in_process"), pytest.param(True, id="workers")]


def build_catch(seed):
    return Episode(Catch(16), "Toy/Catch-v0", seed)


def build_reach(seed):
    return Episode(Reach(16), "Toy/Reach-v0", seed)


def build_recall(seed):
    return Episode(Recall(16, 3), "Toy/Recall-v0", seed)


def build_breakout(seed):
    return Episode(Atari("breakout", 32, 4, 0.25, 5), "ALE/Breakout-v5", seed)


class FailsAt(gymnasium.Wrapper):
    """Fails in its `step`-th step, but only as often as `times`; the count is kept in a file, across processes."""

    def __init__(self, env, way, step, times, file):
        super().__init__(env)
        self.way, self.fatal_step, self.times, self.file, self.count = way, step, times, Path(file), 0

    def step(self, action):
        self.count += 1
        if self.count == self.fatal_step and self._is_due():
            self.way()
        return self.env.step(action)

    def _is_due(self):
        """Claim one of the failures; locked, for workers come here at the same moment."""
        with self.file.open("r+b") as claims:
            fcntl.flock(claims, fcntl.LOCK_EX)
            failures = len(claims.read())
            if failures < self.times:
                claims.write(b"x")
        return failures < self.times


def way_raise():
    raise RuntimeError("100 %s of ruin")                               # a percent sign must not spoil the report


def way_kill():
    os.kill(os.getpid(), signal.SIGKILL)


def way_exit():
    sys.exit(3)


def way_hang():
    time.sleep(1000)


def build_failing(way, step, times, file, seed):
    return Episode(FailsAt(Catch(16), way, step, times, file), "Test/Fails-v0", seed)


def vector(build, num_envs=1, seed=0, asynchronous=False, max_restarts=3, timeout=30.0):
    return VectorEnv(build, "Test/Env-v0", num_envs, seed, asynchronous, max_restarts, timeout)


def actions_for(envs, rng):
    """Actions for 3 environments, of which the first `num_envs` are used: the same whatever the number."""
    if isinstance(envs.action_space, gymnasium.spaces.Discrete):
        return rng.integers(envs.action_space.n, size=3)[: envs.num_envs]
    return rng.uniform(-1, 1, (3, *envs.action_space.shape)).astype(np.float32)[: envs.num_envs]


def run(envs, steps, rng):
    return [envs.step(actions_for(envs, rng)) for _ in range(steps)]


def assert_same(results, others, num_envs):
    for result, other in zip(results, others, strict=True):
        for field in StepResult._fields:
            one, two = getattr(result, field), getattr(other, field)
            if field == "final_obs":
                assert [i for i in one if i < num_envs] == [i for i in two if i < num_envs]
                assert all(np.array_equal(one[i], two[i]) for i in one if i < num_envs)
            else:
                assert one.dtype == two.dtype
                assert np.array_equal(one[:num_envs], two[:num_envs]), field


@pytest.mark.parametrize("build", [build_catch, build_reach, build_breakout])
def test_same_seed_same_trajectories_for_any_number_and_mode(build):
    with vector(build, 3, seed=5) as envs:
        first = envs.reset()
        expected = run(envs, 40, np.random.default_rng(0))
    assert not np.array_equal(expected[-1].obs[0], expected[-1].obs[1])
    slow = build is build_breakout                                     # the emulator takes 0.1 s to load
    for num_envs, asynchronous in [(1, False), (2, True)] if slow else [(1, False), (2, False), (1, True), (3, True)]:
        with vector(build, num_envs, seed=5, asynchronous=asynchronous) as envs:
            assert np.array_equal(envs.reset(), first[:num_envs])
            assert_same(expected, run(envs, 40, np.random.default_rng(0)), num_envs)


@pytest.mark.parametrize("asynchronous", MODES)
def test_other_seed_other_episodes(asynchronous):
    with vector(build_reach, 2, seed=1, asynchronous=asynchronous) as one, vector(build_reach, 2, seed=2) as two:
        first, other = one.reset(), two.reset()
    assert not np.array_equal(first, other)
    assert not np.array_equal(first[0], first[1])


@pytest.mark.parametrize("asynchronous", MODES)
@pytest.mark.parametrize("build", [build_catch, build_reach, build_recall])
def test_episode_ends_as_a_single_environment_would(build, asynchronous):
    """`final_obs` is the terminal observation, `obs` the next episode's first, no action is swallowed."""
    with vector(build, 1, seed=3, asynchronous=asynchronous) as envs:
        obs = envs.reset()
        single = build(int(np.random.SeedSequence(3).spawn(1)[0].spawn(1)[0].generate_state(1)[0]))
        assert np.array_equal(obs[0], single.reset()[0])
        rng, ends = np.random.default_rng(0), 0
        for _ in range(50):
            action = actions_for(envs, rng)
            result = envs.step(action)
            obs, reward, terminated, truncated, info = single.step(action[0])
            assert (result.terminated[0], result.truncated[0]) == (terminated, truncated)
            assert result.reward[0] == np.float32(reward)
            if terminated or truncated:
                ends += 1
                assert np.array_equal(result.final_obs[0], obs)
                assert result.episode_return[0] == info["episode_return"]
                assert result.episode_length[0] == info["episode_length"]
                assert result.finished[0]
                obs, info = single.reset()
            else:
                assert result.final_obs == {}
            assert result.is_first[0] == info["is_first"]
            assert np.array_equal(result.obs[0], obs)
        assert ends >= 2


def test_results_do_not_change_afterwards():
    """The replay buffer keeps what it is given; shared memory is written again one step later."""
    with vector(build_reach, 2, asynchronous=True) as envs:
        first = envs.reset()
        kept = first.copy()
        results = run(envs, 25, np.random.default_rng(0))
        copies = [result.obs.copy() for result in results]
        run(envs, 25, np.random.default_rng(1))
        assert np.array_equal(first, kept)
        assert all(np.array_equal(result.obs, copy) for result, copy in zip(results, copies, strict=True))


def test_result_types():
    with vector(build_reach, 2) as envs:
        envs.reset()
        result = envs.step(np.zeros((2, 2), np.float32))
    kinds = {field: getattr(result, field).dtype for field in StepResult._fields if field != "final_obs"}
    assert kinds == {
        "obs": np.uint8, "reward": np.float32, "terminated": bool, "truncated": bool, "life_loss": bool,
        "is_first": bool, "episode_return": np.float64, "episode_length": np.int64, "restarted": bool,
    }  # fmt: skip
    assert result.obs.shape == (2, 16, 16, 3)


@pytest.mark.parametrize("asynchronous", MODES)
@pytest.mark.parametrize("build", [build_catch, build_breakout])
def test_state_restores_the_future(build, asynchronous):
    """Taken in one mode and given to the other: a resumed run may use another number of processes."""
    with vector(build, 2, seed=1, asynchronous=asynchronous) as envs:
        envs.reset()
        run(envs, 13, np.random.default_rng(0))
        states, obs = envs.get_state(), envs.obs
        expected = run(envs, 40, np.random.default_rng(1))
    with vector(build, 2, seed=99, asynchronous=not asynchronous) as envs:
        envs.set_state(states)
        assert envs.get_state() == states
        assert np.array_equal(envs.obs, obs)
        assert_same(expected, run(envs, 40, np.random.default_rng(1)), 2)


@pytest.mark.parametrize("asynchronous", MODES)
def test_missing_state_is_not_implemented(asynchronous):
    build = functools.partial(build_failing, way_raise, -1, 0, os.devnull)
    with vector(build, 1, asynchronous=asynchronous) as envs:
        envs.reset()
        with pytest.raises(NotImplementedError, match="Test/Fails-v0: this kind of environment cannot save"):
            envs.get_state()


FAILURES = [
    pytest.param(False, way_raise, "100 %s of ruin", id="raise_in_process"),
    pytest.param(True, way_raise, "100 %s of ruin", id="raise"),
    pytest.param(True, way_kill, "died of signal SIGKILL", id="kill"),
    pytest.param(True, way_exit, "died with exit code", id="exit"),
    pytest.param(True, way_hang, "no answer for 2 s", id="hang"),
]


@pytest.mark.parametrize(("asynchronous", "way", "words"), FAILURES)
def test_a_failed_worker_is_replaced_and_its_episode_truncated(asynchronous, way, words, tmp_path, caplog):
    """The other environment goes on undisturbed; the new one has a seed of its own and plays on."""
    file = tmp_path / "failures"
    file.write_bytes(b"")
    build = functools.partial(build_failing, way, 5, 1, file)
    with vector(build_catch, 2, seed=7) as healthy, caplog.at_level(logging.WARNING):
        envs = vector(build, 2, seed=7, asynchronous=asynchronous, timeout=2.0 if way is way_hang else 30.0)
        assert np.array_equal(envs.reset(), healthy.reset())
        for step in range(1, 20):
            before, actions = envs.obs, np.array([step % 3, 1])
            result, expected = envs.step(actions), healthy.step(actions)
            failed = np.flatnonzero(result.restarted).tolist()
            assert len(failed) == (step == 5)
            assert not result.finished[failed].any()                   # no score for the episode that broke off
            if step == 5:
                lane = failed[0]
                assert (result.terminated[lane], result.truncated[lane], result.is_first[lane]) == (False, True, True)
                assert np.array_equal(result.final_obs[lane], before[lane])
                assert (result.reward[lane], result.episode_length[lane]) == (0.0, 5)
                assert (result.obs[lane] > 0).any()
            if step <= 5:
                others = [i for i in range(2) if i not in failed]
                assert np.array_equal(result.obs[others], expected.obs[others])
        envs.close()
    report = [record.getMessage() for record in caplog.records]
    assert len(report) == 1
    assert f"environment {lane} of 2 (Test/Env-v0) failed, restart 1 of 3:" in report[0]
    assert words in report[0]
    assert ("in way_raise" in report[0]) == (way is way_raise)          # its traceback


@pytest.mark.parametrize("asynchronous", MODES)
def test_restarts_are_limited(asynchronous, tmp_path):
    file = tmp_path / "failures"
    file.write_bytes(b"")
    build = functools.partial(build_failing, way_raise, 1, 99, file)
    envs = vector(build, 1, asynchronous=asynchronous, max_restarts=2)
    envs.reset()
    assert envs.step(np.array([1])).restarted[0]
    assert envs.step(np.array([1])).restarted[0]
    with pytest.raises(WorkerFailed, match=r"(?s)failed again after 2 restarts .*100 %s of ruin"):
        envs.step(np.array([1]))
    assert len(file.read_bytes()) == 3


class Nan(Catch):
    def step(self, action):
        obs, _, *rest = super().step(action)
        return obs, float("nan"), *rest


def build_nan(seed):
    return Episode(Nan(16), "Test/Nan-v0", seed)


@pytest.mark.parametrize("asynchronous", MODES)
def test_bad_output_is_an_error_at_once(asynchronous, caplog):
    """A restart would only meet it again."""
    envs = vector(build_nan, 2, asynchronous=asynchronous)
    envs.reset()
    with pytest.raises(WorkerFailed, match=r"^environment 0 of 2 .*: Test/Nan-v0, step 1 .*: reward is nan"):
        envs.step(np.array([1, 1]))
    assert caplog.records == []


def build_only_first(file, seed):
    if len(file.read_bytes()) >= 2:                                    # the sample and the first worker are built
        raise ValueError("no display")
    file.write_bytes(file.read_bytes() + b"x")
    return build_failing(way_raise, 1, 99, os.devnull, seed)


def test_a_replacement_that_cannot_be_built_is_reported(tmp_path):
    file = tmp_path / "builds"
    file.write_bytes(b"")
    envs = vector(functools.partial(build_only_first, file), 1, asynchronous=True, max_restarts=2)
    envs.reset()
    with pytest.raises(WorkerFailed, match=r"(?s)after 2 restarts.*ValueError: no display"):
        envs.step(np.array([1]))


def test_wrong_arguments():
    with pytest.raises(ValueError, match="num_envs is 0"):
        vector(build_catch, 0)
    with vector(build_catch, 2) as envs:
        envs.reset()
        with pytest.raises(ValueError, match=r"actions have shape \(1,\), expected \(2,\)"):
            envs.step(np.array([1]))
        with pytest.raises(ValueError, match="1 states for 2 environments"):
            envs.set_state(envs.get_state()[:1])


def workers_of(envs):
    return [process.pid for lane in envs._lanes for process in lane._vector.processes]


def assert_end(pids):
    """All of them, within seconds."""
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_close_leaves_no_process():
    envs = vector(build_catch, 2, asynchronous=True)
    envs.reset()
    workers = workers_of(envs)
    envs.step_async(np.array([1, 1]))                                  # closed with an answer under way
    envs.close()
    assert_end(workers)
    envs.close()


ORPHANS = """
import pathlib, sys
from builders import *
file = pathlib.Path(sys.argv[0] + ".failures")
file.write_bytes(b"")
envs = vector(functools.partial(build_failing, way_hang, 1, 99, file), 2, asynchronous=True)
envs.reset()
print(*workers_of(envs), flush=True)
envs.step_async(np.array([1, 1]))
time.sleep(0.5)
{ending}
"""


@pytest.mark.parametrize("ending", ["os.kill(os.getpid(), signal.SIGKILL)", "raise ValueError", "pass"])
def test_workers_end_with_the_main_process(ending, tmp_path):
    """Also when it is killed while they hang. The script has no `__main__` guard: workers must not run it."""
    (tmp_path / "builders.py").write_text(Path(__file__).read_text())
    (tmp_path / "script.py").write_text(ORPHANS.format(ending=ending))
    paths = os.pathsep.join([str(tmp_path), os.getcwd()])
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "script.py")],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as script:
        pids = [int(word) for word in script.stdout.readline().split()]
        script.wait(timeout=60)
    assert len(pids) == 2
    assert_end(pids)


def test_workers_ignore_ctrl_c():
    """The main process answers it, with a checkpoint that needs the environments' states."""
    with vector(build_catch, 2, asynchronous=True) as envs:
        envs.reset()
        for worker in workers_of(envs):
            os.kill(worker, signal.SIGINT)
        time.sleep(0.1)
        assert not envs.step(np.array([1, 1])).restarted.any()
        assert len(envs.get_state()) == 2

"""The DeepMind Control Suite, rendered for real: names, actions, rewards, time limit, seeds and saved states."""

import importlib.util

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from env_wrapper import make_env, make_vec_env
from envs.common import EnvironmentUnavailable, UnknownEnvironment
from envs.my_dmc import ControlTask, action_bounds, build_dmc, import_suite
from envs.rendering import choose_backend
from utils import load_config

if importlib.util.find_spec("dm_control") is None:
    pytest.skip("dm_control is not installed", allow_module_level=True)
try:
    choose_backend("the tests")
except EnvironmentUnavailable as unavailable:
    pytest.skip(str(unavailable), allow_module_level=True)

FAST = ["walker-walk", "reacher-hard"]                                 # reacher: the target is part of the model


@pytest.fixture(scope="module")
def config():
    return load_config([], "train.py").config


def all_tasks():
    names = [f"{domain}-{task}" for domain, task in import_suite().ALL_TASKS]
    return [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in names]


@pytest.mark.parametrize(
    "name", ["dmc/walker-walk", "dm_control/walker-walk-v0", "dmc_walker_walk", "dm_walker_walk", "dmc/Walker-walk"]
)
def test_spellings_of_a_name(name):
    env = build_dmc(name, 64)
    assert type(env._env.task).__name__ == "PlanarWalker"
    assert env.action_space == gymnasium.spaces.Box(-1.0, 1.0, (6,), np.float32)


@pytest.mark.parametrize("name", ["dmc/ball_in_cup-catch", "dmc_ball_in_cup_catch", "dmc/cartpole-three_poles"])
def test_names_with_underscores(name):
    assert build_dmc(name, 64).observation_space.shape == (64, 64, 3)


def test_unknown_task_names_the_nearest():
    with pytest.raises(UnknownEnvironment, match=r"dmc/waker-walk.*no such task .*; nearest: .*dmc/walker-walk"):
        build_dmc("dmc/waker-walk", 64)


@pytest.mark.filterwarnings("ignore:.*alternative render modes.*:UserWarning")
def test_passes_the_checker():
    check_env(ControlTask("cartpole", "swingup", 32))


@pytest.mark.parametrize(("domain", "task", "camera"), [("walker", "walk", 0), ("quadruped", "run", 2)])
def test_camera_and_size(domain, task, camera):
    env = ControlTask(domain, task, 48)
    obs, _ = env.reset(seed=0)
    pictures = [env._env.physics.render(48, 48, camera_id=i) for i in range(3 if camera else 2)]
    assert [np.array_equal(obs, picture) for picture in pictures].index(True) == camera
    assert obs.std() > 5                                               # something is to be seen


def test_an_action_is_scaled_repeated_and_its_rewards_added():
    env = ControlTask("reacher", "easy", 16)
    env._low, env._high = np.array([0.0, -0.5]), np.array([1.0, 0.5])  # as if these were the task's bounds
    env.reset(seed=0)
    env._env.reset()
    played, raw_step = [], env._env.step

    def step(action):
        time_step = raw_step(action)
        played.append(action.tolist())
        return time_step._replace(reward=len(played) * 1.0)

    env._env.step = step
    assert env.step(np.array([-1.0, 1.0], np.float32))[1] == 1.0 + 2.0
    assert env.step(np.array([0.5, 0.0], np.float32))[1] == 3.0 + 4.0
    assert played == [[0.0, 0.5]] * 2 + [[0.75, 0.0]] * 2


def test_unbounded_actions_stay_within_one():
    low, high = action_bounds(ControlTask("lqr", "lqr_2_1", 16)._env.action_spec())
    assert (low == -1.0).all()
    assert (high == 1.0).all()


@pytest.mark.parametrize("control_steps", [1, 5, 6])
def test_the_time_limit_truncates(control_steps):
    """Also in the middle of a repeated action."""
    env = ControlTask("pendulum", "swingup", 16, control_steps=control_steps)
    agent_steps = -(-control_steps // 2)
    for _ in range(2):
        env.reset(seed=0)
        ends = [env.step(np.zeros(1, np.float32))[2:4] for _ in range(agent_steps)]
        assert ends == [(False, False)] * (agent_steps - 1) + [(False, True)]
    assert ControlTask("pendulum", "swingup", 16).control_steps == 1000


def test_the_suites_own_limit_is_no_shorter():
    """1000 control steps for every task that has a limit; the last of them ends the episode in any case."""
    env = ControlTask("walker", "walk", 16)
    assert env._env._step_limit == 1000


def test_discount_zero_is_a_termination(monkeypatch):
    env = ControlTask("lqr", "lqr_2_1", 16)
    env.reset(seed=0)
    assert env.step(np.zeros(1, np.float32))[2:4] == (False, False)
    monkeypatch.setattr(env._env.task, "get_termination", lambda physics: 0.0)
    assert env.step(np.zeros(1, np.float32))[2:4] == (True, False)


def play(env, steps, rng):
    trace = []
    for _ in range(steps):
        obs, reward, *_ = env.step(rng.uniform(-1, 1, env.action_space.shape).astype(np.float32))
        trace.append((obs.tobytes(), reward))
    return trace


def test_same_seed_same_episodes():
    first, again, other = (ControlTask("reacher", "easy", 16, control_steps=4) for _ in range(3))
    seen = []
    for env, seed in ((first, 1), (again, 1), (other, 2)):
        starts = [env.reset(seed=seed)[0].tobytes(), env.reset()[0].tobytes()]
        seen.append(starts + play(env, 2, np.random.default_rng(0)))
    assert seen[0] == seen[1]
    assert seen[0] != seen[2]
    assert seen[0][0] != seen[0][1]                                    # the second episode is another one


@pytest.mark.parametrize("name", all_tasks())
def test_state_restores_the_future(name):
    domain, task = name.rsplit("-", 1)
    first, second = (ControlTask(domain, task, 16) for _ in range(2))
    first.reset(seed=1)
    second.reset(seed=2)
    first.reset()
    play(first, 3, np.random.default_rng(0))
    second.set_state(first.get_state())
    assert play(first, 6, np.random.default_rng(1)) == play(second, 6, np.random.default_rng(1))
    assert np.array_equal(first.reset()[0], second.reset()[0])


def test_workers_render_the_same(config):
    """Each with its own graphics context, in the backend that the main process chose."""
    results = []
    for asynchronous in (False, True):
        with make_vec_env("dmc/cartpole-swingup", config, 2, 3, asynchronous=asynchronous) as envs:
            obs = [envs.reset()]
            obs += [envs.step(np.full((2, 1), 0.5, np.float32)).obs for _ in range(3)]
        results.append(np.stack(obs))
    assert np.array_equal(*results)
    assert not np.array_equal(results[0][0], results[0][-1])


def test_through_the_wrapper(config):
    env = make_env("dmc/cartpole-balance", config, 0)
    env.reset()
    total = sum(env.step(np.zeros(1, np.float32))[1] for _ in range(3))
    _, reward, _, _, info = env.step(np.ones(1, np.float32))
    assert info["episode_return"] == total + reward > 0
    assert info["episode_length"] == 4

"""What reaches the replay: rows in order, terminations from lost lives and ends, never from time limits."""

import gymnasium
import numpy as np
import pytest
import torch

from env_wrapper import Episode
from envs.collector import Collector, FinishedEpisode
from envs.common import EnvironmentUnavailable
from envs.my_atari import Atari
from envs.my_dmc import ControlTask
from envs.my_memory_maze import MemoryMaze
from envs.parallel import StepResult, VectorEnv, WorkerFailed
from envs.toy import Catch, Reach
from replay_buffer import ReplayBuffer


class ScriptedEnv:
    """One environment of tagged observations: a life is lost at step 2, a time limit hits at 4, the episode ends at
    6."""

    num_envs = 1

    def __init__(self):
        self.time = 0

    def _frame(self, number):
        return np.full((1, 2, 2, 3), number, np.uint8)

    def reset(self):
        return self._frame(0)

    def step_async(self, actions):
        self.sent = actions

    def step_wait(self):
        self.time += 1
        t = self.time
        return StepResult(
            obs=self._frame(100 + t if t in (4, 6) else t),
            reward=np.array([t], np.float32),
            terminated=np.array([t == 6]),
            truncated=np.array([t == 4]),
            life_loss=np.array([t == 2]),
            is_first=np.array([t in (4, 6)]),
            final_obs={0: self._frame(t)[0]} if t in (4, 6) else {},
            episode_return=np.array([10.0 * t]),
            episode_length=np.array([t]),
            restarted=np.array([False]),
        )

    def get_state(self):
        raise NotImplementedError


class Chosen:
    """An action that is known at once, or when it is waited for."""

    def __init__(self, action, is_known=True):
        self.action, self.is_known = action, is_known

    def wait(self):
        return self.action


class CountingActor:
    """Plays 0, 1, 2, ... and remembers what it was shown."""

    def __init__(self, is_known=True):
        self.seen, self.is_known = [], is_known

    def init_state(self, obs):
        return None

    def begin(self, obs, state, is_first, explore):
        self.seen.append((int(obs.flat[0]), bool(is_first[0])))
        return Chosen(np.array([len(self.seen) - 1]), self.is_known), state


@pytest.mark.parametrize("is_known", [True, False])
def test_rows_boundaries_and_terminations(is_known):
    actor = CountingActor(is_known)
    collector = Collector(ScriptedEnv(), actor)
    rows, finished = [], []
    for _ in range(7):
        collector.send(explore=False)
        rows.append(collector.receive())
        finished += collector.finished
    assert [int(r.obs.flat[0]) for r in rows] == [0, 1, 2, 3, 104, 5, 106]  # after an end: the reset's observation
    assert [bool(r.is_first[0]) for r in rows] == [True, False, False, False, True, False, True]
    assert [bool(r.termination[0]) for r in rows] == [False, True, False, False, False, True, False]
    assert [int(r.action[0]) for r in rows] == list(range(7))
    assert [float(r.reward[0]) for r in rows] == [1, 2, 3, 4, 5, 6, 7]
    finals = [{env: int(frame.flat[0]) for env, frame in r.final_obs.items()} for r in rows]
    assert finals == [{}, {}, {}, {0: 4}, {}, {0: 6}, {}]  # not of the lost life: its next observation is a row
    assert not any(r.abandoned_obs for r in rows)
    assert actor.seen == [(int(r.obs.flat[0]), bool(r.is_first[0])) for r in rows]
    assert finished == [FinishedEpisode(40.0, 4), FinishedEpisode(60.0, 6)]


@pytest.mark.parametrize("is_known", [True, False])
def test_environments_wait_for_an_action_that_is_not_known_yet(is_known):
    """What is launched between `send` and `receive` must not come after an action that a device still computes."""

    class Env(ScriptedEnv):
        begun = 0

        def step_async(self, actions):
            self.begun += 1
            super().step_async(actions)

    env = Env()
    collector = Collector(env, CountingActor(is_known))
    for step in range(3):
        collector.send(explore=False)
        assert env.begun == step + is_known
        collector.receive()
        assert env.begun == step + 1


@pytest.mark.parametrize(("steps", "left"), [(0, {}), (3, {0: 3}), (4, {})])
def test_environments_without_a_state_begin_a_new_episode(steps, left):
    """The one that is left ended with the newest row, and what that led to is known: told once, and not of an episode
    that ended by itself."""

    class Memory:
        def tensors(self):
            return {}

    actor = CountingActor()
    actor.init_state = lambda obs: Memory()
    collector, resumed = Collector(ScriptedEnv(), actor), Collector(ScriptedEnv(), actor)
    for _ in range(steps):
        collector.send(explore=False)
        collector.receive()
    state = collector.state_dict()
    assert state["env"] is None
    assert resumed.load_state_dict(state) is False
    rows = []
    for _ in range(2):
        resumed.send(explore=False)
        rows.append(resumed.receive())
    assert {env: int(frame.flat[0]) for env, frame in rows[0].abandoned_obs.items()} == left
    assert rows[0].is_first.all() and rows[1].abandoned_obs == {}


class Witness(gymnasium.Wrapper):
    """Writes every transition that happened into `seen`, and raises in the steps of its life that `fatal` names."""

    def __init__(self, env, seen, fatal):
        super().__init__(env)
        self.seen, self.fatal, self.count = seen, fatal, 0

    def reset(self, **arguments):
        self.obs, info = self.env.reset(**arguments)
        self.is_first = True
        return self.obs, info

    def step(self, action):
        self.count += 1
        if self.count in self.fatal:
            raise RuntimeError("emulator on fire")
        obs, reward, terminated, truncated, info = self.env.step(action)
        transition = (self.obs.tobytes(), int(action), float(reward), bool(terminated), self.is_first, obs.tobytes())
        self.seen.append(transition)
        self.obs, self.is_first = obs, False
        return obs, reward, terminated, truncated, info


class RandomActor(CountingActor):
    def begin(self, obs, state, is_first, explore):
        self.seen.append((obs.copy(), is_first.copy()))
        return Chosen(np.random.default_rng(len(self.seen)).integers(0, 3, len(obs))), state


def collect(fatal, steps, max_restarts=3, num_envs=2):
    """Rows of a vector whose environments fail as `fatal` (one set of steps a construction) says, and what happened."""
    seen, plans = [], iter(fatal)

    def build(seed):
        return Episode(Witness(Catch(16), seen, next(plans, ())), "Test/Fire-v0", seed)

    actor = RandomActor()
    with VectorEnv(build, "Test/Fire-v0", num_envs, 0, False, max_restarts, 5.0) as env:
        collector = Collector(env, actor)
        rows = []
        for _ in range(steps):
            collector.send(explore=True)
            rows.append(collector.receive())
        return rows, seen, actor.seen, env.restarts


@pytest.mark.parametrize(
    ("fatal", "restarts"),
    [
        ([(), (5,)], 1),
        ([(), (5,), (1,)], 2),  # (constructions: a sample, two environments, replacements) one that never steps
        ([(), (12,), (9,), (1,), (1,)], 4),
        ([(), (1,), (1,)], 2),
    ],
)
def test_a_step_that_did_not_happen_is_no_row(fatal, restarts):
    """A failed environment earned no reward 0: what the replay gets are transitions of the environment, all of them."""
    rows, happened, shown, counted = collect(fatal, 30)
    assert counted == restarts
    stored = [
        (r.obs[i].tobytes(), int(r.action[i]), float(r.reward[i]), bool(r.termination[i]), bool(r.is_first[i]))
        for r in rows
        for i in range(2)
    ]
    assert sorted(stored) == sorted(transition[:5] for transition in happened)
    for earlier, later, (obs, forgets) in zip(rows, rows[1:], shown[1:], strict=False):
        assert (later.is_first >= earlier.termination).all()
        assert (forgets >= later.is_first).all() or not np.array_equal(obs, later.obs)


def replay_of(num_envs, env):
    """A buffer that holds 40 rows of each environment."""
    return ReplayBuffer(
        capacity=40 * num_envs, num_envs=num_envs, obs_shape=env.observation_space.shape,
        action_shape=env.action_space.shape, device="cpu", out_device="cpu", batch_size=1, batch_length=1,
        imagine_batch_size=1, context_length=1, sampling="uniform", tau=1, imagination_tau=1, alpha=1, beta=1,
    )  # fmt: skip


class ShortMaze(MemoryMaze):
    def reset(self, **arguments):
        obs, info = super().reset(**arguments)
        self._env.env.env.env.env._time_limit = 0.6  # composer.Environment; 4 steps a second
        return obs, info


SHORT_LIMITS = {
    "atari": lambda: Atari("pong", 16, 4, 0.0, 0, max_raw_frames=12),
    "dmc": lambda: ControlTask("pendulum", "swingup", 16, control_steps=6),
    "memory_maze": lambda: ShortMaze("9x9", 16),
    "registered": lambda: gymnasium.wrappers.TimeLimit(Catch(16), 3),
    "toy": lambda: Reach(16),
}


@pytest.mark.parametrize(
    "family", ["atari", "dmc", pytest.param("memory_maze", marks=pytest.mark.slow), "registered", "toy"]
)
def test_a_time_limit_is_no_termination_in_the_replay(family):
    """Of any family: the value of going on stays, and what the last action led to is there to take it from."""
    actor, limit = RandomActor(), 20 if family == "toy" else 3

    def build(seed):
        return Episode(SHORT_LIMITS[family](), family, seed)

    try:
        env = VectorEnv(build, family, 1, 0, False, 0, 60.0)
    except EnvironmentUnavailable as unavailable:
        pytest.skip(str(unavailable))
    actor.begin = lambda obs, state, is_first, explore: (Chosen(env.action_space.sample()[None]), state)
    with env:
        env.action_space.seed(0)
        collector, replay = Collector(env, actor), replay_of(1, env)
        for _ in range(2 * limit):
            collector.send(explore=True)
            replay.append(*collector.receive())
    batch = replay.recent_sequences(1, 2 * limit)
    final = replay.final_obs(batch)
    assert not batch.termination.any()
    assert batch.is_first[0].nonzero().flatten().tolist() == [0, limit]
    assert final.step.tolist() == [limit - 1, 2 * limit - 1]


@pytest.mark.parametrize(
    "fatal", [[()], [(), (5,)], [(), (12,), (9,), (1,), (1,)], [(), (1,), (1,)], [(), (10,), (19,)]]
)
def test_what_each_action_led_to_is_in_the_replay(fatal):
    """The next row's observation, or where an episode ended, also by a fault, its final one."""
    rows, happened, _, _ = collect(fatal, 30)
    replay = replay_of(2, Catch(16))
    for row in rows:
        replay.append(*row)
    for env in range(2):
        batch = replay.read_again(torch.tensor([[env, 0]]), 30)
        _, steps, frames = replay.final_obs(batch)
        assert steps[steps < 29].tolist() == batch.is_first[0, 1:].nonzero().flatten().tolist()
        led_to = dict(enumerate(batch.obs[0, 1:])) | dict(zip(steps.tolist(), frames, strict=True))
        for step, after in led_to.items():
            before, action, after = batch.obs[0, step].numpy().tobytes(), batch.action[0, step], after.numpy().tobytes()
            happened.remove(next(t for t in happened if (t[0], t[1], t[5]) == (before, action, after)))
    assert len(happened) == sum(env not in rows[-1].final_obs for env in range(2))  # the newest rows'


def test_the_actor_forgets_what_the_failed_environment_showed():
    """Its memory of the action belongs to an observation of the broken episode."""
    rows, _, shown, _ = collect([(), (5,)], 8, num_envs=1)
    assert [bool(row.is_first[0]) for row in rows][:6] == [True, False, False, False, True, False]
    assert [bool(forgets[0]) for _, forgets in shown][:7] == [True, False, False, False, False, True, False]
    assert not np.array_equal(shown[4][0], rows[4].obs) and np.array_equal(shown[5][0], rows[5].obs)


def test_failures_without_end_stop_the_collection():
    with pytest.raises(WorkerFailed, match="failed again after 3 restarts"):
        collect([(), *[(1,)] * 9], 5, num_envs=1)

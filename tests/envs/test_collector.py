"""What reaches the replay: rows in order, terminations from lost lives and ends, never from time limits."""

import numpy as np

from envs.collector import Collector, FinishedEpisode
from envs.parallel import StepResult


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


class CountingActor:
    """Plays 0, 1, 2, ... and remembers what it was shown."""

    def __init__(self):
        self.seen = []

    def init_state(self, obs):
        return None

    def act(self, obs, state, is_first, explore):
        self.seen.append((int(obs.flat[0]), bool(is_first[0])))
        return np.array([len(self.seen) - 1]), state


def test_rows_boundaries_and_terminations():
    actor = CountingActor()
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
    assert actor.seen == [(int(r.obs.flat[0]), bool(r.is_first[0])) for r in rows]
    assert finished == [FinishedEpisode(40.0, 4), FinishedEpisode(60.0, 6)]


def test_environments_without_a_state_begin_a_new_episode():
    class Memory:
        def tensors(self):
            return {}

    actor = CountingActor()
    actor.init_state = lambda obs: Memory()
    collector = Collector(ScriptedEnv(), actor)
    state = collector.state_dict()
    assert state["env"] is None
    fresh = Collector(ScriptedEnv(), actor)
    assert fresh.load_state_dict(state) is False

"""Real experience: an actor plays a vector of environments and hands out one row a step for each of them."""

from typing import Any, NamedTuple, Protocol

import numpy as np

from envs.parallel import VectorEnv


class Row(NamedTuple):
    """Row t of E environments, as the replay stores it, and the observations that are no row's because an episode ended
    with them: environment -> (H, W, C) uint8."""

    obs: np.ndarray  # (E, H, W, C) uint8
    action: np.ndarray  # (E,) int64 or (E, A) float32
    reward: np.ndarray  # (E,) float32: what action t earned
    termination: np.ndarray  # (E,) bool: action t ended the life or the episode; never set by a time limit
    is_first: np.ndarray  # (E,) bool: obs opens an episode
    final_obs: dict[int, np.ndarray]  # what action t led to, where it ended the episode
    abandoned_obs: dict[int, np.ndarray]  # what action t-1 led to, where its episode turned out to be broken


class FinishedEpisode(NamedTuple):
    """Score and length (agent steps, all lives) of an episode that ended."""

    episode_return: float
    episode_length: int


class ChosenAction(Protocol):
    """An action (E,) or (E, A) that may still be computed: `is_known` says that nothing is gained by letting other work
    begin before `wait`."""

    @property
    def is_known(self) -> bool: ...

    def wait(self) -> np.ndarray: ...


class StreamingActor(Protocol):
    """What the collector asks of an actor (`sub_models.acting.Actor`)."""

    def begin(self, obs: np.ndarray, state: Any, is_first: np.ndarray, explore: bool) -> tuple[ChosenAction, Any]: ...

    def init_state(self, obs: np.ndarray) -> Any: ...


class Collector:
    """Plays `env` with `actor`. A step is split into `send` and `receive`, so that training can run in between: beside
    workers that are stepping, or beside this process if training is only launched there and runs on a GPU.

    Every row is a transition that happened. Where an environment failed, the broken episode ends with the row before
    (nothing is known of its last action), and the action is taken in the episode that replaces it. So it is where a
    resumed run has to begin a new episode.
    `finished` lists the episodes that ended in the last step, one entry an environment.
    """

    def __init__(self, env: VectorEnv, actor: StreamingActor) -> None:
        self.env, self.actor = env, actor
        self.finished: list[FinishedEpisode] = []
        self._obs = env.reset()  # (E, H, W, C)
        self._is_first = np.ones(env.num_envs, dtype=bool)
        self._forgets = np.ones(env.num_envs, dtype=bool)  # whose memory in the actor ends: as a rule `_is_first`
        self._abandoned: dict[int, np.ndarray] = {}  # environment -> last observation of an episode that was left
        self._state = actor.init_state(self._obs)
        self._chosen: ChosenAction | None = None  # what the environments have not been sent yet
        self._action: np.ndarray | None = None

    def send(self, explore: bool) -> None:
        """Choose an action for the newest observations (at random if `explore`) and set the environments going, as soon
        as it is known: now, or else in `receive`."""
        self._chosen, self._state = self.actor.begin(self._obs, self._state, self._forgets, explore)
        if self._chosen.is_known:
            self._start_step()

    def _start_step(self) -> None:
        self._action, self._chosen = self._chosen.wait(), None
        self.env.step_async(self._action)

    def receive(self) -> Row:
        """Wait for the environments; the row of the step that `send` began."""
        if self._chosen is not None:
            self._start_step()
        result, failed = self.env.step_wait(), np.zeros(self.env.num_envs, dtype=bool)
        while result.restarted.any():  # ends: restarts are limited
            self._abandon(self._obs, result.restarted & ~self._is_first & ~failed)
            failed |= result.restarted
            self._obs = np.where(result.restarted[:, None, None, None], result.obs, self._obs)
            result = self.env.retake(result, self._action)
        is_first = self._is_first | failed
        termination = result.terminated | result.life_loss
        row = Row(self._obs, self._action, result.reward, termination, is_first, result.final_obs, self._abandoned)
        self._abandoned = {}
        self.finished = [
            FinishedEpisode(float(result.episode_return[i]), int(result.episode_length[i]))
            for i in np.flatnonzero(result.finished)
        ]
        self._obs, self._is_first = result.obs, result.is_first
        self._forgets = result.is_first | failed  # the actor remembers the action, but after another observation
        return row

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on. 'env' is None where the environments cannot give their state."""
        try:
            env_state = self.env.get_state()
        except NotImplementedError:
            env_state = None
        return {
            "obs": self._obs,
            "is_first": self._is_first,
            "forgets": self._forgets,
            "actor": self._state.tensors(),
            "env": env_state,
        }

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Continue where `state` was taken. Without an environment state a new episode begins instead: then False."""
        if state["env"] is None:
            self._abandon(np.array(state["obs"]), ~np.array(state["is_first"]))
            return False
        self.env.set_state(state["env"])
        self._obs, self._is_first = np.array(state["obs"]), np.array(state["is_first"])
        self._forgets = np.array(state["forgets"])
        self._state.load(state["actor"])
        return True

    def _abandon(self, obs: np.ndarray, which: np.ndarray) -> None:
        """Note the observations (E, H, W, C) of the environments whose episode ended with them, (E,) bool."""
        self._abandoned |= {index: obs[index] for index in np.flatnonzero(which).tolist()}

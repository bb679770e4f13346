"""Acting with a trained or training agent: from a stream of observations to actions (arXiv 2410.08893, section 2.2).

At step t the actor knows the episode's rows before t. The core turns them into d_t; with `act_on='prior'`, as
published, the policy sees concat(ẑ_t ~ p(· | d_t), d_t), with 'posterior' concat(z_t ~ q(· | obs_t), d_t). The first
action of an episode is random, for there is no row yet.

Letters: E environments, W rows of the context window, A actions or action width, D width of the deterministic state.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sub_models.compilation import compiled
from sub_models.cuda_graph import CapturedStep
from sub_models.functions_losses import full_precision, sample_one_hot
from sub_models.world_models import WorldModel

if TYPE_CHECKING:
    from agents import ActorCriticAgent
    from config_files.schema import Config


class ActingState:
    """What an actor remembers of the running episodes, one row an environment; all tensors are changed in place.

    `length` (E,) counts the remembered rows. With a window: the last W observations and actions, newest last. Without:
    the recurrent state of the core and the d that it gave.
    """

    def __init__(self, length: Tensor, window: dict[str, Tensor] | None, core: Any, deter: Tensor | None) -> None:
        self.length, self.window, self.core, self.deter = length, window, core, deter

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of the state by name; writing into them restores a saved state."""
        named = {"length": self.length}
        if self.window is not None:
            named |= {f"window_{name}": tensor for name, tensor in self.window.items()}
        else:
            named |= {f"core_{i}": tensor for i, tensor in enumerate(self.core.tensors())}
            named["deter"] = self.deter
        return named

    def load(self, saved: dict[str, Tensor]) -> None:
        """Copy a saved `tensors()` into this state."""
        for name, tensor in self.tensors().items():
            tensor.copy_(saved[name])


class ChosenAction:
    """An action that the device may still be computing: work that is launched before `wait` runs meanwhile.

    action: int64 (E,) or float32 (E, A) on any device; with `arrival` in pinned host memory, which holds it once that
    event has passed. single: the caller asked for one environment's action, without its leading axis.
    """

    def __init__(self, action: Tensor, single: bool, arrival: torch.cuda.Event | None = None) -> None:
        self._action, self._single, self._arrival = action, single, arrival

    @property
    def is_known(self) -> bool:
        """Whether `wait` costs no more than a copy: nothing is gained by launching other work first."""
        return self._arrival is None

    def wait(self) -> np.ndarray:
        """The action, as `Actor.act` gives it; to be called before the actor is asked for the next one."""
        if self._arrival is not None:
            self._arrival.synchronize()
        action = self._action.cpu().numpy().copy()
        return action[0] if self._single else action


class _CapturedChoice:
    """`choose` for one state as a CUDA graph, which takes observations from pinned host memory and leaves the actions
    there: nothing but the graph is launched for a step, and the host need not wait before it launches more.

    obs: an observation batch, for its shape. action: an action batch, for its shape and dtype.
    """

    def __init__(self, choose: Callable[[Tensor, Tensor], Tensor], obs: np.ndarray, action: Tensor) -> None:
        self._obs = torch.empty(obs.shape, dtype=torch.uint8, pin_memory=True)
        self._is_first = torch.empty(len(obs), dtype=torch.bool, pin_memory=True)
        self._action = torch.empty(action.shape, dtype=action.dtype, pin_memory=True)
        self._arrival, self._device = torch.cuda.Event(), action.device
        self._step = CapturedStep(lambda: self._choose(choose), action.device, enabled=True)

    def launch(self, obs: np.ndarray, is_first: np.ndarray, single: bool) -> ChosenAction:
        self._obs.numpy()[...] = obs
        self._is_first.numpy()[...] = is_first
        self._step()
        self._arrival.record(torch.cuda.current_stream(self._device))
        return ChosenAction(self._action, single, self._arrival)

    def _choose(self, choose: Callable[[Tensor, Tensor], Tensor]) -> None:
        obs = self._obs.to(self._device, non_blocking=True)
        action = choose(obs, self._is_first.to(self._device, non_blocking=True))
        self._action.copy_(action, non_blocking=True)


class Actor:
    """Steps a world model and an agent along real episodes.

    Args:
        context_length: rows of the episode that the core sees again at each step; 0: the whole episode, by a recurrent
            state that costs the same at each step. The Transformer has no such state: 0 gives it a window as long as
            its learned positions.
        act_on: 'prior' or 'posterior'.
        greedy: take the mode of the policy instead of a sample.
        capture: run a step as a CUDA graph (on a GPU).
        fuse: send a captured step through torch.compile first, which takes it many seconds once.
    """

    def __init__(
        self,
        world_model: WorldModel,
        agent: "ActorCriticAgent",
        context_length: int,
        act_on: str = "prior",
        greedy: bool = False,
        capture: bool = False,
        fuse: bool = False,
    ) -> None:
        if act_on not in ("prior", "posterior"):
            raise ValueError(f"Actor: act_on is {act_on!r}, expected 'prior' or 'posterior'")
        self.world_model, self.agent = world_model, agent
        self.act_on, self.greedy, self.capture = act_on, greedy, capture
        longest = world_model.sequence_model.max_seqlen  # None for a core with a recurrent state
        self.window_length = longest if context_length == 0 and longest is not None else context_length
        self._captured_choice = compiled(self._choose) if fuse else self._choose
        self._captured: tuple[ActingState, _CapturedChoice] | None = None

    def init_state(self, obs: np.ndarray | Tensor) -> ActingState:
        """An empty memory for observations like obs (E, height, width, channels)."""
        num_envs, device = obs.shape[0], self.world_model.device
        length = torch.zeros(num_envs, dtype=torch.int64, device=device)
        if self.window_length:
            window = {
                "obs": torch.zeros((num_envs, self.window_length, *obs.shape[1:]), dtype=torch.uint8, device=device),
                "action": self._no_action((num_envs, self.window_length)),
            }
            return ActingState(length, window, None, None)
        core = self.world_model.sequence_model.init_state(num_envs)
        deter = self.world_model.prior_head.weight.new_zeros((num_envs, self.world_model.deter_dim))
        return ActingState(length, None, core, deter)

    def act(
        self,
        obs: np.ndarray,
        state: ActingState | None = None,
        is_first: np.ndarray | None = None,
        explore: bool = False,
    ) -> tuple[np.ndarray, ActingState]:
        """Choose actions and remember the rows (obs, action).

        obs (height, width, channels) uint8, or with a leading E for several environments; state None: an episode
        begins; is_first (E,) bool: which environments begin a new episode now; explore: uniformly random actions.
        -> action: int64 () or (E,), or float32 (A,) or (E, A); and the state for the next call (changed in place).
        """
        chosen, state = self.begin(obs, state, is_first, explore)
        return chosen.wait(), state

    def begin(
        self,
        obs: np.ndarray,
        state: ActingState | None = None,
        is_first: np.ndarray | None = None,
        explore: bool = False,
    ) -> tuple[ChosenAction, ActingState]:
        """`act` without waiting for the action; a step that is captured is only launched."""
        single = obs.ndim == 3
        obs = obs[None] if single else obs
        if state is None:
            state = self.init_state(obs)
            is_first = np.ones(len(obs), dtype=bool)
        elif is_first is None:
            is_first = np.zeros(len(obs), dtype=bool)
        device = self.world_model.device
        if self.capture and device.type == "cuda" and not explore:
            return self._captured_for(state, obs).launch(obs, is_first, single), state
        obs = torch.as_tensor(obs).to(device, non_blocking=True)
        is_first = torch.as_tensor(is_first).to(device, non_blocking=True)
        if explore and self.window_length:  # nothing to compute: keep the cheap path of random play cheap
            action = self._explore(obs, is_first, state)
        else:
            action = self._choose(obs, is_first, state, explore)
        return ChosenAction(action, single), state

    def _captured_for(self, state: ActingState, obs: np.ndarray) -> _CapturedChoice:
        """The graph that works on this state; captured anew for another one."""
        if self._captured is None or self._captured[0] is not state:
            choose = functools.partial(self._captured_choice, state=state, explore=False)
            self._captured = (state, _CapturedChoice(choose, obs, self._no_action((len(obs),))))
        return self._captured[1]

    @torch.no_grad()
    def _explore(self, obs: Tensor, is_first: Tensor, state: ActingState) -> Tensor:
        state.length.mul_(~is_first)
        action = self._random_action(obs.shape[0])
        self._remember_in_window(obs, action, state)
        return action

    @torch.no_grad()
    def _choose(self, obs: Tensor, is_first: Tensor, state: ActingState, explore: bool) -> Tensor:
        """obs (E, height, width, channels), is_first (E,) on the device -> action (E,) or (E, A)."""
        world_model = self.world_model
        world_model.eval()
        state.length.mul_(~is_first)
        posterior_sample = None
        with world_model.autocast():
            if self.act_on == "posterior" or not self.window_length:
                posterior_sample = sample_one_hot(world_model.posterior(world_model.to_image(obs))).flatten(
                    -2
                )  # (E, Z)
            deter = self._deter_of_window(state) if self.window_length else state.deter
            if self.act_on == "posterior":
                stoch = posterior_sample
            else:
                stoch = sample_one_hot(world_model.prior(deter)).flatten(-2)
            feature = torch.cat((stoch, full_precision(deter)), dim=-1)  # (E, F)
        action = self._random_action(obs.shape[0])
        if not explore:
            opens = (state.length == 0).reshape(-1, *[1] * (action.dim() - 1))
            action = torch.where(opens, action, self.agent.choose(feature, self.greedy))
        if self.window_length:
            self._remember_in_window(obs, action, state)
        else:
            with world_model.autocast():
                encoded = world_model.encode_action(action)
                deter = world_model.sequence_model.step(posterior_sample, encoded, state.core, reset=is_first)
            state.deter.copy_(deter)
            state.length.add_(1)
        return action

    def _deter_of_window(self, state: ActingState) -> Tensor:
        """d after the remembered rows, by one parallel pass over the window.   -> (E, D).

        Rows that are not filled yet belong to another piece (`seq_idx`), so that the episode starts from an empty
        state.
        """
        world_model, window = self.world_model, state.window
        stoch = sample_one_hot(world_model.posterior(world_model.to_image(window["obs"]))).flatten(-2)  # (E, W, Z)
        index = torch.arange(self.window_length, device=world_model.device)
        seq_idx = (index >= self.window_length - state.length.unsqueeze(-1)).int()  # (E, W)
        return world_model.sequence_model(stoch, world_model.encode_action(window["action"]), seq_idx)[:, -1]

    def _remember_in_window(self, obs: Tensor, action: Tensor, state: ActingState) -> None:
        for name, newest in (("obs", obs), ("action", action)):
            tensor = state.window[name]
            tensor.copy_(torch.cat((tensor[:, 1:], newest.unsqueeze(1)), dim=1))
        state.length.add_(1).clamp_(max=self.window_length)

    def _no_action(self, shape: tuple[int, ...]) -> Tensor:
        if self.world_model.num_actions is not None:
            return torch.zeros(shape, dtype=torch.int64, device=self.world_model.device)
        return torch.zeros((*shape, self.agent.actions.action_dim), device=self.world_model.device)

    def _random_action(self, num_envs: int) -> Tensor:
        """Uniform over the action space.   -> (E,) int64 or (E, A) float32 in [−1, 1)."""
        if self.world_model.num_actions is not None:
            return torch.randint(0, self.world_model.num_actions, (num_envs,), device=self.world_model.device)
        return 2.0 * torch.rand((num_envs, self.agent.actions.action_dim), device=self.world_model.device) - 1.0


def build_actor(
    config: "Config",
    world_model: WorldModel,
    agent: "ActorCriticAgent",
    greedy: bool = False,
    capture: bool | None = None,
    fuse: bool = False,
) -> Actor:
    """The actor that a configuration describes. `capture` None: as `BasicSettings.Use_cg` says; `fuse`: for an actor
    that lives long enough to be compiled."""
    training = config.JointTrainAgent
    capture = config.BasicSettings.Use_cg if capture is None else capture
    return Actor(world_model, agent, training.RealityContextLength, training.ActOn, greedy, capture, fuse)

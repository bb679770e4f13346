"""One training update: backward pass, clipping, warm-up, skipping of non-finite gradients, parameter step.

Nothing here waits for the device: learning rate, update count and the decision to skip are tensors, so that an update
can be captured in a CUDA graph and replayed.
"""

import logging
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from sub_models.laprop import LaProp, make_fused_step, why_not_fused

logger = logging.getLogger("drama.optimiser")

COUNTS = ("updates", "skipped", "skipped_in_a_row", "longest_row")


class Optimiser:
    """LaProp or AdamW with linear warm-up and gradient-norm clipping.

    Args:
        params: the parameters to train.
        name: 'Laprop' or 'Adam' (with decoupled weight decay).
        learning_rate, epsilon, weight_decay: of the chosen optimiser.
        max_grad_norm: gradients are scaled down to this global norm.
        warmup_steps: the n-th update (from 1) uses min(1, n / warmup_steps) of the learning rate; 0 for none.
        fused: the step in three launches (see `fused_optimiser`), with the same result up to rounding and the same
            state; it leaves `.grad` unscaled. None: on a GPU, where the parameters allow it.
        updates_in_a_call: updates that one (captured) training step makes: what a CUDA graph of it has to hold.

    Parameters marked `_no_weight_decay` are left out of weight decay.
    Counts, 0-d tensors: `updates` made (they set the warm-up), `skipped` for what was not finite, how many of those
    follow each other up to now (`skipped_in_a_row`; an update that was made ends the row) and the longest such row
    (`longest_row`). `state_dict` holds them and the inner optimiser's state.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        name: str,
        learning_rate: float,
        epsilon: float,
        max_grad_norm: float,
        warmup_steps: int = 0,
        weight_decay: float = 0.0,
        fused: bool | None = None,
        updates_in_a_call: int = 1,
    ) -> None:
        self.params = list(params)
        device = self.params[0].device
        self.learning_rate, self.max_grad_norm, self.warmup_steps = learning_rate, max_grad_norm, warmup_steps
        self.updates = torch.zeros((), device=device)
        self.skipped = torch.zeros((), device=device)
        self.skipped_in_a_row = torch.zeros((), device=device)
        self.longest_row = torch.zeros((), device=device)
        self.lr = torch.tensor(learning_rate, device=device)
        self.name = name
        kept_whole = [p for p in self.params if weight_decay and getattr(p, "_no_weight_decay", False)]
        shrunk = [p for p in self.params if not any(p is other for other in kept_whole)]
        groups = [{"params": shrunk, "weight_decay": weight_decay}, {"params": kept_whole, "weight_decay": 0.0}]
        groups = [group for group in groups if group["params"]]
        if name == "Laprop":
            self.inner: torch.optim.Optimizer = LaProp(groups, self.lr, eps=epsilon)
        elif name == "Adam":
            self.inner = torch.optim.AdamW(groups, self.lr, eps=epsilon, fused=True, capturable=device.type == "cuda")
        else:
            raise ValueError(f"Optimiser: name is {name!r}, expected 'Laprop' or 'Adam'")
        if fused is None:
            reason = why_not_fused(self.params)
            fused = device.type == "cuda" and reason is None
            if device.type == "cuda" and not fused:
                logger.warning("optimiser: a launch for each operation instead of three in all: %s", reason)
        self.fused_step = make_fused_step(self.inner, self, 2 * updates_in_a_call) if fused else None

    def update(self, loss: Tensor, enabled: Tensor | None = None) -> dict[str, Tensor]:
        """Minimise a scalar loss by one step, unless `enabled` (0-d bool) is False or loss or gradient are not finite.

        Returns the gradient norm before clipping, the share of clipped and of skipped updates (0 or 1), as 0-d tensors.
        """
        self.inner.zero_grad(set_to_none=True)
        loss.backward()
        return self.step(loss.detach(), enabled)

    def step(self, loss: Tensor, enabled: Tensor | None = None) -> dict[str, Tensor]:
        """`update` with the gradients that the parameters hold, those of `loss`."""
        step = self._plain_step if self.fused_step is None else self.fused_step.clipped_step
        return dict(zip(("grad_norm", "clipped", "skipped"), step(loss, enabled), strict=True))

    def _plain_step(self, loss: Tensor, enabled: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        grad_norm = nn.utils.clip_grad_norm_(self.params, self.max_grad_norm, foreach=True)
        finite = torch.isfinite(grad_norm) & torch.isfinite(loss)
        going = finite if enabled is None else finite & enabled
        self.updates.add_(going)
        self._count_skip(finite, going)
        warmth = (self.updates / self.warmup_steps).clamp(max=1.0) if self.warmup_steps else 1.0
        self.lr.copy_(self.learning_rate * warmth)
        self.inner.found_inf = (~going).float()
        self.inner.grad_scale = None
        self.inner.step()
        clipped = (finite & (grad_norm > self.max_grad_norm)).float()
        return torch.where(finite, grad_norm, 0.0), clipped, (~finite).float()

    def _count_skip(self, finite: Tensor, going: Tensor) -> None:
        self.skipped.add_(~finite)
        self.skipped_in_a_row.mul_(~going).add_(~finite)
        torch.maximum(self.longest_row, self.skipped_in_a_row, out=self.longest_row)

    def state_dict(self) -> dict:
        return {
            "name": self.name,
            "inner": self.inner.state_dict(),
            **{name: getattr(self, name) for name in COUNTS},
        }

    def load_state_dict(self, state: dict) -> None:
        """Restore moments and counts in place; learning rate, epsilon and weight decay stay this object's own.

        Raises:
            ValueError: the state is another kind of optimiser's.
        """
        if state["name"] != self.name:
            raise ValueError(f"the saved optimiser is {state['name']}, this one is {self.name}")
        own = [{key: value for key, value in group.items() if key != "params"} for group in self.inner.param_groups]
        self.inner.load_state_dict(state["inner"])
        for group, settings in zip(self.inner.param_groups, own, strict=True):
            group.update(settings)
            for p in group["params"]:
                self._match_layout(p)
        for name in COUNTS:
            getattr(self, name).copy_(state[name])

    def _match_layout(self, p: nn.Parameter) -> None:
        """Store moments in the parameter's memory order, as before saving: fused steps pair elements by storage."""
        moments = self.inner.state.get(p, {})
        for key, moment in moments.items():
            if moment.shape == p.shape and moment.stride() != p.stride():
                moments[key] = torch.empty_like(p, memory_format=torch.preserve_format).copy_(moment)

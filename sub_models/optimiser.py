"""One training update: backward pass, clipping, warm-up, skipping of non-finite gradients, parameter step.

Nothing here waits for the device: learning rate, update count and the decision to skip are tensors, so that an update
can be captured in a CUDA graph and replayed.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from sub_models.laprop import LaProp


class Optimiser:
    """LaProp or AdamW with linear warm-up and gradient-norm clipping.

    Args:
        params: the parameters to train.
        name: 'Laprop' or 'Adam' (with decoupled weight decay).
        learning_rate, epsilon, weight_decay: of the chosen optimiser.
        max_grad_norm: gradients are scaled down to this global norm.
        warmup_steps: the n-th update (from 1) uses min(1, n / warmup_steps) of the learning rate; 0 for none.

    `state_dict` holds the inner optimiser's state, the update count (which sets the warm-up) and the count of skips.
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
    ) -> None:
        self.params = list(params)
        device = self.params[0].device
        self.learning_rate, self.max_grad_norm, self.warmup_steps = learning_rate, max_grad_norm, warmup_steps
        self.updates = torch.zeros((), device=device)
        self.skipped = torch.zeros((), device=device)
        self.lr = torch.tensor(learning_rate, device=device)
        if name == "Laprop":
            self.inner: torch.optim.Optimizer = LaProp(self.params, self.lr, eps=epsilon, weight_decay=weight_decay)
        elif name == "Adam":
            self.inner = torch.optim.AdamW(
                self.params,
                self.lr,
                eps=epsilon,
                weight_decay=weight_decay,
                fused=True,
                capturable=device.type == "cuda",
            )
        else:
            raise ValueError(f"Optimiser: name is {name!r}, expected 'Laprop' or 'Adam'")

    def update(self, loss: Tensor, enabled: Tensor | None = None) -> dict[str, Tensor]:
        """Minimise a scalar loss by one step. `enabled` (0-d bool) False, or a gradient that is not finite, skips it.

        Returns the gradient norm before clipping, the share of clipped and of skipped updates (0 or 1), as 0-d tensors.
        """
        self.inner.zero_grad(set_to_none=True)
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(self.params, self.max_grad_norm, foreach=True)
        finite = torch.isfinite(grad_norm)
        going = finite if enabled is None else finite & enabled
        self.updates.add_(going)
        self.skipped.add_(~finite)
        warmth = (self.updates / self.warmup_steps).clamp(max=1.0) if self.warmup_steps else 1.0
        self.lr.copy_(self.learning_rate * warmth)
        self.inner.found_inf = (~going).float()
        self.inner.grad_scale = None
        self.inner.step()
        return {
            "grad_norm": torch.where(finite, grad_norm, 0.0),
            "clipped": (grad_norm > self.max_grad_norm).float(),
            "skipped": (~finite).float(),
        }

    def state_dict(self) -> dict:
        return {"inner": self.inner.state_dict(), "updates": self.updates, "skipped": self.skipped}

    def load_state_dict(self, state: dict) -> None:
        """Restore in place: captured graphs and this object go on sharing the learning rate and the counts."""
        self.inner.load_state_dict(state["inner"])
        for group in self.inner.param_groups:
            self.lr.copy_(torch.as_tensor(group["lr"]))
            group["lr"] = self.lr
        self.updates.copy_(state["updates"])
        self.skipped.copy_(state["skipped"])

"""LaProp (Ziyin et al., 2020, arXiv 2002.04839): Adam with the order of its two steps exchanged.

    v_t = β2 v_{t-1} + (1 - β2) g_t²
    m_t = β1 m_{t-1} + (1 - β1) g_t / (√(v_t / (1 - β2^t)) + ε)
    θ_t = θ_{t-1} (1 - lr·wd) - lr m_t / (1 - β1^t)

Adam divides the accumulated gradient; LaProp accumulates the divided gradient, so that a step never exceeds lr however
small β2 is beside β1. Everything, the step count included, lives in tensors: one call can be captured in a CUDA graph.
"""

import importlib.util
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sub_models.fused_optimiser import Clipping, FusedStep


class LaProp(torch.optim.Optimizer):
    """LaProp with decoupled weight decay that is multiplied by the learning rate.

    Args:
        params: parameters or parameter groups, as every torch optimiser takes them.
        lr: learning rate; a 0-d tensor may be changed in place between (captured) steps.
        betas: decay of the mean of normalised gradients and of squared gradients, each in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: share of each parameter that is removed per step, times lr.
        fused: all parameters in two launches (see `fused_optimiser`), with the same result up to rounding and the same
            state; False: in one launch for each operation.

    A 0-d tensor in the attribute `found_inf` (torch's convention for gradient scaling), where it is 1, makes a step
    leave parameters and state as they are, without a host sync.

    Raises:
        ValueError: an argument outside its range, or parameters that the fused kernels do not take.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 4e-5,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-20,
        weight_decay: float = 0.0,
        fused: bool = False,
    ) -> None:
        if not isinstance(lr, Tensor) and lr < 0:
            raise ValueError(f"LaProp: lr={lr}, expected >= 0")
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"LaProp: betas={betas}, expected each in [0, 1)")
        if eps < 0 or weight_decay < 0:
            raise ValueError(f"LaProp: eps={eps}, weight_decay={weight_decay}, expected both >= 0")
        # 'capturable' makes load_state_dict move the step count to the parameters' device.
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "capturable": True}
        super().__init__(params, defaults)
        self.found_inf: Tensor | None = None
        self._fused_step = make_fused_step(self).step if fused else None

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """One update of every parameter that has a gradient; returns the closure's loss if one is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._fused_step is not None:
            self._fused_step(self.found_inf)
            return loss
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._update(group, params)
        return loss

    def _update(self, group: dict[str, Any], params: list[Tensor]) -> None:
        grads = [p.grad for p in params]
        means, squares = self._moments(params)
        device = params[0].device
        lead_state = self.state[group["params"][0]]
        step = lead_state.setdefault("step", torch.zeros((), dtype=torch.float32, device=device))

        skip = torch.zeros((), device=device) if self.found_inf is None else self.found_inf.to(device)
        keep_going = 1.0 - skip  # 0-d: 1 for a normal step, 0 to leave all as it is
        step.add_(keep_going)
        count = step.clamp(min=1.0)
        beta1, beta2 = group["betas"]
        lr = group["lr"] * keep_going
        if self.found_inf is not None:  # 0 · inf is NaN: gradients of a skipped step must not reach the moments
            grads = [torch.where(skip > 0, 0.0, grad) for grad in grads]
        mean_share, square_share = keep_going * (1.0 - beta1), keep_going * (1.0 - beta2)
        # In float64, then as the parameters: 1 - β2^t of a float32 power has lost four of its digits at t = 1.
        correction1, correction2 = ((1.0 - beta ** count.double()).to(params[0].dtype) for beta in (beta1, beta2))

        torch._foreach_mul_(squares, 1.0 - square_share)
        torch._foreach_add_(squares, torch._foreach_mul(torch._foreach_mul(grads, grads), square_share))
        denominators = torch._foreach_div(squares, correction2)
        torch._foreach_sqrt_(denominators)
        torch._foreach_add_(denominators, group["eps"])
        torch._foreach_mul_(means, 1.0 - mean_share)
        torch._foreach_add_(means, torch._foreach_mul(torch._foreach_div(grads, denominators), mean_share))
        if group["weight_decay"]:
            torch._foreach_mul_(params, 1.0 - lr * group["weight_decay"])
        torch._foreach_sub_(params, torch._foreach_mul(means, lr / correction1))

    def _moments(self, params: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The two running moments of each parameter, made at zero on first use."""
        for p in params:
            state = self.state[p]
            if "exp_avg" not in state:
                state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        return [self.state[p]["exp_avg"] for p in params], [self.state[p]["exp_avg_sq"] for p in params]


def why_not_fused(params: Sequence[Tensor]) -> str | None:
    """Why the fused kernels cannot step these parameters, or None if they can."""
    first = params[0]
    interpreted = first.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    if not (first.is_cuda or interpreted):
        return f"parameters are on {first.device}, expected a CUDA device"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install triton"
    for p in params:
        if p.dtype != torch.float32 or p.device != first.device:
            return f"a parameter is {p.dtype} on {p.device}, expected torch.float32 on {first.device}"
        extent = 1 + sum((size - 1) * stride for size, stride in zip(p.shape, p.stride(), strict=True))
        if p.numel() and extent != p.numel():
            return f"a parameter of shape {tuple(p.shape)} and strides {p.stride()} has gaps in its memory"
    return None


def make_fused_step(
    optimiser: torch.optim.Optimizer, clipping: "Clipping | None" = None, captured_updates: int = 0
) -> "FusedStep":
    """The fused kernels for a `LaProp` or `AdamW`; arguments as for `FusedStep`.

    Raises:
        ValueError: they do not take its parameters.
    """
    reason = why_not_fused([p for group in optimiser.param_groups for p in group["params"]])
    if reason is not None:
        raise ValueError(f"fused {type(optimiser).__name__}: {reason}")
    from sub_models.fused_optimiser import FusedStep  # here, because it imports triton

    return FusedStep(optimiser, clipping, captured_updates)

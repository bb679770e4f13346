"""Helpers around torch: autograd functions under autocast, counting parameters, groups for weight decay."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def custom_fwd(function: Callable | None = None, *, device_type: str = "cuda", **options: Any) -> Callable:
    """Decorator of an autograd function's forward: it runs under the caller's autocast state of `device_type`."""
    return torch.amp.custom_fwd(function, device_type=device_type, **options)


def custom_bwd(function: Callable | None = None, *, device_type: str = "cuda") -> Callable:
    """Decorator of an autograd function's backward: it runs under the autocast state that its forward had."""
    if function is None:
        return lambda decorated: torch.amp.custom_bwd(decorated, device_type=device_type)
    return torch.amp.custom_bwd(function, device_type=device_type)


def count_parameters(module: nn.Module, trainable_only: bool = False) -> int:
    """How many numbers the module's parameters hold; shared ones count once."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad or not trainable_only)


def weight_decay_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Optimiser groups: matrices decay; vectors (norms, biases, D) and parameters marked `_no_weight_decay` do not."""
    decayed, kept = [], []
    for parameter in module.parameters():
        spared = parameter.dim() < 2 or getattr(parameter, "_no_weight_decay", False)
        (kept if spared else decayed).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]

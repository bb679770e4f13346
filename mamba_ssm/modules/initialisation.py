"""Initial values that the mixers share."""

import math

import torch
from torch import nn

Tensor = torch.Tensor


def inverse_softplus_of_dt(
    size: int, dt_min: float, dt_max: float, dt_init_floor: float, device: torch.device | str | None = None
) -> Tensor:
    """Bias (size) whose softplus is a log-uniform draw from dt_min..dt_max, at least dt_init_floor."""
    log_dt = torch.rand(size, device=device) * (math.log(dt_max) - math.log(dt_min)) + math.log(dt_min)
    dt = torch.exp(log_dt).clamp(min=dt_init_floor)
    return dt + torch.log(-torch.expm1(-dt))                                              # softplus⁻¹(dt), stably


def without_weight_decay(parameter: nn.Parameter) -> nn.Parameter:
    """Mark a parameter that an optimiser must not decay."""
    parameter._no_weight_decay = True
    return parameter

"""Gated MLP: fc2(value · act(gate)), value and gate from one projection.   M width, F hidden width."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

Tensor = torch.Tensor


class GatedMLP(nn.Module):
    """Gated MLP (..., M) -> (..., out_features)."""

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        activation: Callable[[Tensor], Tensor] = F.silu,
        bias: bool = False,
        multiple_of: int = 128,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        """hidden_features None is 8/3 · M (as many weights as an ungated MLP of width 4M), rounded up to multiple_of;
        out_features None is M."""
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        hidden = int(8 * in_features / 3) if hidden_features is None else hidden_features
        hidden = -(-hidden // multiple_of) * multiple_of
        self.activation = activation
        self.fc1 = nn.Linear(in_features, 2 * hidden, bias=bias, **factory)
        self.fc2 = nn.Linear(hidden, in_features if out_features is None else out_features, bias=bias, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., M) -> (..., out_features)"""
        value, gate = self.fc1(x).chunk(2, dim=-1)                                        # (..., F) each
        return self.fc2(value * self.activation(gate))

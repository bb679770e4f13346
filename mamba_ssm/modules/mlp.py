"""Gated MLP: fc2(value · act(gate)), value and gate from one projection.   M width, F hidden width."""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import ProcessGroup

from mamba_ssm.distributed.tensor_parallel import column_linear, row_linear

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
        process_group: ProcessGroup | None = None,
        sequence_parallel: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        """hidden_features None is 8/3 · M (as many weights as an ungated MLP of width 4M), rounded up to multiple_of;
        out_features None is M. process_group spreads the hidden width over its ranks, sequence_parallel the
        rows too."""
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        hidden = int(8 * in_features / 3) if hidden_features is None else hidden_features
        hidden = -(-hidden // multiple_of) * multiple_of
        self.activation = activation
        world = 1 if process_group is None else dist.get_world_size(process_group)
        if hidden % world:
            raise ValueError(f"GatedMLP: the hidden width is {hidden}, expected a multiple of {world} ranks")
        out_features = in_features if out_features is None else out_features
        self.hidden = hidden // world
        self.fc1 = column_linear(in_features, 2 * hidden, process_group, sequence_parallel, bias=bias, **factory)
        self.fc2 = row_linear(hidden, out_features, process_group, sequence_parallel, bias=bias, **factory)

    def parallel_parts(self) -> dict[str, list[int]]:
        """What each rank of a process group takes its own share of: widths along the axes of fc1 and fc2."""
        return {"fc1": [self.hidden, self.hidden], "fc2": [self.hidden]}

    def forward(self, x: Tensor) -> Tensor:
        """x (..., M), or this rank's rows (B·L/W, M) if sequence-parallel -> (..., out_features) of the same rows"""
        value, gate = self.fc1(x).chunk(2, dim=-1)                                        # (..., F) each
        return self.fc2(value * self.activation(gate))

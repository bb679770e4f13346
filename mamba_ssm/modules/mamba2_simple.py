"""Mamba-2's mixer with fewer options, and learnable states to start from.   H heads, P headdim, N d_state."""

import torch
from torch import nn

from mamba_ssm.modules.initialisation import without_weight_decay
from mamba_ssm.modules.mamba2 import Mamba2
from mamba_ssm.ops.triton.ssd_combined import NO_LIMIT

Tensor = torch.Tensor


class Mamba2Simple(Mamba2):
    """Mamba-2's mixer, (B, L, M) -> (B, L, M)."""

    def __init__(
        self,
        d_model: int,
        d_state: int = 64,
        d_conv: int = 4,
        conv_init: float | None = None,
        expand: int = 2,
        headdim: int = 128,
        ngroups: int = 1,
        A_init_range: tuple[float, float] = (1.0, 16.0),
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init_floor: float = 1e-4,
        dt_limit: tuple[float, float] = NO_LIMIT,
        learnable_init_states: bool = False,
        bias: bool = False,
        conv_bias: bool = True,
        chunk_size: int = 256,
        use_mem_eff_path: bool = True,
        layer_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        """learnable_init_states: sequences start from a learnt state instead of zeros (pieces that seq_idx separates
        within a pass start from zeros); the rest as in `Mamba2`."""
        super().__init__(
            d_model, d_state=d_state, d_conv=d_conv, conv_init=conv_init, expand=expand, headdim=headdim,
            ngroups=ngroups, A_init_range=A_init_range, dt_min=dt_min, dt_max=dt_max, dt_init_floor=dt_init_floor,
            dt_limit=dt_limit, bias=bias, conv_bias=conv_bias, chunk_size=chunk_size, use_mem_eff_path=use_mem_eff_path,
            layer_idx=layer_idx, device=device, dtype=dtype,
        )  # fmt: skip
        self.learnable_init_states = learnable_init_states
        if learnable_init_states:
            start = torch.zeros(self.nheads, headdim, d_state, device=device, dtype=torch.float32)
            self.init_states = without_weight_decay(nn.Parameter(start))

    def start_state(self) -> Tensor | None:
        """The learnt state (H, P, N), or None."""
        return self.init_states if self.learnable_init_states else None

"""Mamba's mixer: in_proj → causal convolution, SiLU → (Δ, B, C) from the row → selective scan → gate → out_proj.

Letters: B batch, L length, M d_model, D = expand · M channels, N d_state, R dt_rank, W d_conv, S packed
sequences.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from mamba_ssm.modules.cache import (
    MixerState,
    RecurrentMixer,
    check_final_states,
    check_packed_prompts,
    leave_state,
    packed_of_rows,
    readable,
    rows_of_packed,
)
from mamba_ssm.modules.initialisation import inverse_softplus_of_dt, without_weight_decay
from mamba_ssm.ops.causal_conv1d import causal_conv1d_fn, causal_conv1d_window
from mamba_ssm.ops.checks import check_choice, check_shape
from mamba_ssm.ops.numerics import accumulate_dtype, packed_seq_idx
from mamba_ssm.ops.selective_scan_interface import mamba_inner_fn, selective_scan_fn
from mamba_ssm.ops.triton.recurrent_step import mamba_step
from mamba_ssm.utils.generation import InferenceParams

Tensor = torch.Tensor


class Mamba(RecurrentMixer):
    """Mamba's mixer, (B, L, M) -> (B, L, M)."""

    def __init__(
        self,
        d_model: int,
        d_state: int = 16,
        d_conv: int = 4,
        expand: int = 2,
        dt_rank: int | str = "auto",
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init: str = "random",
        dt_scale: float = 1.0,
        dt_init_floor: float = 1e-4,
        conv_bias: bool = True,
        bias: bool = False,
        use_fast_path: bool = True,
        layer_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        """dt_rank "auto" is M/16 rounded up; dt_init "random" draws dt_proj's weight uniformly, "constant" fills it;
        use_fast_path runs the whole inner block as one operator where no state enters or leaves."""
        super().__init__()
        check_choice("Mamba", "dt_init", dt_init, ("random", "constant"))
        factory = {"device": device, "dtype": dtype}
        self.d_model, self.d_state, self.d_conv, self.expand = d_model, d_state, d_conv, expand
        self.d_inner = int(expand * d_model)
        self.dt_rank = math.ceil(d_model / 16) if dt_rank == "auto" else dt_rank
        self.use_fast_path, self.layer_idx = use_fast_path, layer_idx
        self.activation = "silu"

        self.in_proj = nn.Linear(d_model, 2 * self.d_inner, bias=bias, **factory)
        self.conv1d = nn.Conv1d(
            self.d_inner, self.d_inner, d_conv, groups=self.d_inner, padding=d_conv - 1, bias=conv_bias, **factory
        )
        self.x_proj = nn.Linear(self.d_inner, self.dt_rank + 2 * d_state, bias=False, **factory)
        self.dt_proj = nn.Linear(self.dt_rank, self.d_inner, bias=True, **factory)
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=bias, **factory)
        self._init_dt(dt_init, dt_scale, dt_min, dt_max, dt_init_floor)
        A = torch.arange(1, d_state + 1, dtype=torch.float32, device=device).repeat(self.d_inner, 1)
        self.A_log = without_weight_decay(nn.Parameter(torch.log(A)))                     # (D, N), float32
        self.D = without_weight_decay(nn.Parameter(torch.ones(self.d_inner, device=device, dtype=torch.float32)))

    @torch.no_grad()
    def _init_dt(self, dt_init: str, dt_scale: float, dt_min: float, dt_max: float, dt_init_floor: float) -> None:
        std = self.dt_rank**-0.5 * dt_scale
        if dt_init == "constant":
            nn.init.constant_(self.dt_proj.weight, std)
        else:
            nn.init.uniform_(self.dt_proj.weight, -std, std)
        bias = self.dt_proj.bias
        bias.copy_(inverse_softplus_of_dt(self.d_inner, dt_min, dt_max, dt_init_floor, bias.device))
        bias._no_reinit = True

    def state_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """conv_state (D, W), ssm_state (D, N)."""
        return (self.d_inner, self.d_conv), (self.d_inner, self.d_state)

    def forward(
        self,
        hidden_states: Tensor,
        inference_params: InferenceParams | None = None,
        seq_idx: Tensor | None = None,
        state: MixerState | None = None,
        cu_seqlens: Tensor | None = None,
        final_states: list[MixerState] | None = None,
    ) -> Tensor:
        """hidden_states (B, L, M); seq_idx (B, L) integers, rows of different index don't see each other; cu_seqlens
        (S+1) integers: starts and end of sequences packed into B = 1 row.

        state (conv_state (B, D, W), ssm_state (B, D, N)): the pass continues from it, it belongs to the first row's
        seq_idx, and is left, in place and without gradient, as it is after the last row; with cu_seqlens the S
        sequences start, and their S final states are left. inference_params: the same with the state kept there.
        final_states, without state, cu_seqlens and inference_params: the state after the last row is appended to it,
        which saves filling and copying one.
        -> (B, L, M)"""
        check_final_states("Mamba", final_states, state, cu_seqlens, inference_params)
        check_shape("Mamba", "hidden_states", hidden_states, "(B, L, d_model)", (None, None, self.d_model))
        batch, longest = hidden_states.shape[:2]
        if cu_seqlens is not None and seq_idx is None:
            seq_idx = packed_seq_idx(cu_seqlens, longest)
        if inference_params is not None:
            if cu_seqlens is not None:
                check_packed_prompts("Mamba", hidden_states, cu_seqlens, inference_params)
                batch, longest = cu_seqlens.shape[0] - 1, min(longest, inference_params.max_seqlen)
            state = self.cached_state(inference_params, batch)
        if state is not None and hidden_states.shape[1] == 1 and seq_idx is None:
            return self.step(hidden_states, *state)[0]
        xz = self.in_proj(hidden_states).transpose(1, 2)                                  # (B, 2D, L)
        if state is not None and cu_seqlens is not None:
            return self._scan_packed(xz, seq_idx, cu_seqlens, longest, state)
        if state is not None or final_states is not None or not self.use_fast_path:
            return self._scan(xz, seq_idx, state, final_states)
        return mamba_inner_fn(
            xz, self.conv1d.weight, self.conv1d.bias, self.x_proj.weight, self.dt_proj.weight, self.out_proj.weight,
            self.out_proj.bias, self._A(), D=self.D, delta_bias=self.dt_proj.bias, seq_idx=seq_idx,
        )  # fmt: skip

    def _scan(
        self, xz: Tensor, seq_idx: Tensor | None, state: MixerState | None, final_states: list[MixerState] | None
    ) -> Tensor:
        conv_state, ssm_state = (None, None) if state is None else readable(state)
        x, z = xz.chunk(2, dim=1)                                                         # (B, D, L) each
        inputs = self._scan_inputs(x, seq_idx, conv_state)
        y, last_state = self._selective_scan(*inputs, z, seq_idx=seq_idx, initial_state=ssm_state)
        if state is not None or final_states is not None:
            window = causal_conv1d_window(x.detach(), self.d_conv, seq_idx, conv_state)
            leave_state(state, final_states, window, last_state.detach())
        return self.out_proj(y.transpose(1, 2))

    def _scan_packed(
        self, xz: Tensor, seq_idx: Tensor, cu_seqlens: Tensor, longest: int, state: MixerState
    ) -> Tensor:
        """Each sequence is scanned in a row of its own, aligned to its end: zeros before it leave the state at zero."""
        x, z = xz.chunk(2, dim=1)                                                         # (1, D, L) each
        state[0].copy_(rows_of_packed(x.detach(), cu_seqlens, self.d_conv))
        inputs = (*self._scan_inputs(x, seq_idx, None), z)
        y, last_state = self._selective_scan(*(rows_of_packed(part, cu_seqlens, longest) for part in inputs))
        state[1].copy_(last_state.detach())
        return self.out_proj(packed_of_rows(y, cu_seqlens, x.shape[2]).transpose(1, 2))

    def _scan_inputs(self, x: Tensor, seq_idx: Tensor | None, conv_state: Tensor | None) -> tuple[Tensor, ...]:
        """x (B, D, L) before the convolution -> x behind it and Δ (B, D, L), B and C (B, N, L)."""
        x = causal_conv1d_fn(
            x, self.conv1d.weight.squeeze(1), self.conv1d.bias, seq_idx=seq_idx,
            initial_states=None if conv_state is None else conv_state[:, :, 1:], activation=self.activation,
        )  # fmt: skip
        return x, *(part.transpose(1, 2) for part in self._dt_B_C(x.transpose(1, 2)))

    def _selective_scan(
        self, x: Tensor, dt: Tensor, B: Tensor, C: Tensor, z: Tensor, **start: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """y (B, D, L) and the last state (B, D, N); start: seq_idx, initial_state."""
        return selective_scan_fn(
            x, dt, self._A(), B, C, self.D, z, self.dt_proj.bias, delta_softplus=True, return_last_state=True, **start
        )

    def step(self, hidden_states: Tensor, conv_state: Tensor, ssm_state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One row: hidden_states (B, 1, M), the states as in `forward`, moved on in place.
        -> (out (B, 1, M), conv_state, ssm_state)"""
        check_shape("Mamba.step", "hidden_states", hidden_states, "(B, 1, d_model)", (None, 1, self.d_model))
        y = mamba_step(
            self.in_proj(hidden_states.squeeze(1)), conv_state, ssm_state, self.conv1d.weight.squeeze(1),
            self.conv1d.bias, self.x_proj.weight, self.dt_proj.weight, self.dt_proj.bias, self.A_log, self.D,
        )  # fmt: skip
        return self.out_proj(y).unsqueeze(1), conv_state, ssm_state

    def _dt_B_C(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (..., D) -> Δ without its bias (..., D), B and C (..., N)."""
        dt, B, C = self.x_proj(x).split([self.dt_rank, self.d_state, self.d_state], dim=-1)
        return F.linear(dt, self.dt_proj.weight), B, C

    def _A(self) -> Tensor:
        return -torch.exp(self.A_log.to(accumulate_dtype(self.A_log)))                    # (D, N)

"""Mamba-2's mixer: in_proj → (z, x, B, C, Δ), convolution, SiLU → scan, one decay per head → gated norm → out_proj.

Letters: B batch, L length, M d_model, H heads, P headdim, d_ssm = H · P, G ngroups, N d_state, W d_conv, S packed
sequences. With a process group every count but M is this rank's share.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import ProcessGroup

from mamba_ssm.distributed.tensor_parallel import column_linear, row_linear
from mamba_ssm.modules.cache import (
    MixerState,
    RecurrentMixer,
    check_final_states,
    check_packed_prompts,
    leave_state,
    readable,
)
from mamba_ssm.modules.initialisation import inverse_softplus_of_dt, without_weight_decay
from mamba_ssm.ops.causal_conv1d import (
    causal_conv1d_fn,
    causal_conv1d_varlen_states,
    causal_conv1d_window,
)
from mamba_ssm.ops.checks import check_shape
from mamba_ssm.ops.numerics import accumulate_dtype, packed_seq_idx
from mamba_ssm.ops.triton.dual_step import KeptRows, keep_rows, mamba2_dual_step
from mamba_ssm.ops.triton.layernorm_gated import RMSNorm
from mamba_ssm.ops.triton.recurrent_step import mamba2_step
from mamba_ssm.ops.triton.ssd_combined import NO_LIMIT, mamba_chunk_scan_combined, mamba_split_conv1d_scan_combined
from mamba_ssm.utils.generation import InferenceParams

Tensor = torch.Tensor

NORM_EPS = 1e-5
ROWS_OF_A_STATE = 4                    # times d_state: rows in bfloat16 of as many bytes as a step of the state moves


class Mamba2(RecurrentMixer):
    """Mamba-2's mixer, (B, L, M) -> (B, L, M)."""

    def __init__(
        self,
        d_model: int,
        d_state: int = 128,
        d_conv: int = 4,
        conv_init: float | None = None,
        expand: int = 2,
        headdim: int = 64,
        d_ssm: int | None = None,
        ngroups: int = 1,
        A_init_range: tuple[float, float] = (1.0, 16.0),
        D_has_hdim: bool = False,
        rmsnorm: bool = True,
        norm_before_gate: bool = False,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init_floor: float = 1e-4,
        dt_limit: tuple[float, float] = NO_LIMIT,
        bias: bool = False,
        conv_bias: bool = True,
        chunk_size: int = 256,
        use_mem_eff_path: bool = True,
        layer_idx: int | None = None,
        process_group: ProcessGroup | None = None,
        sequence_parallel: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        """conv_init draws the convolution uniformly from -conv_init..conv_init (None: torch's default); d_ssm None is
        expand · M, the channels beyond it are a gated MLP; D_has_hdim gives each channel its D, else each head;
        use_mem_eff_path runs the whole inner block as one operator where no state enters or leaves. process_group
        spreads heads and groups over its ranks (sizes count all together); sequence_parallel spreads u's rows too."""
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        self.d_model, self.d_state, self.d_conv, self.expand = d_model, d_state, d_conv, expand
        self.headdim, self.chunk_size, self.dt_limit = headdim, chunk_size, tuple(dt_limit)
        self.process_group, self.sequence_parallel = process_group, sequence_parallel
        world = 1 if process_group is None else dist.get_world_size(process_group)
        d_inner = expand * d_model
        d_ssm = d_inner if d_ssm is None else d_ssm
        _check_sizes(d_inner, d_ssm, headdim, ngroups, world)
        self.d_inner, self.d_ssm, self.ngroups = d_inner // world, d_ssm // world, ngroups // world
        self.nheads = self.d_ssm // headdim
        self.D_has_hdim, self.rmsnorm, self.norm_before_gate = D_has_hdim, rmsnorm, norm_before_gate
        self.use_mem_eff_path, self.layer_idx = use_mem_eff_path, layer_idx
        self.activation = "silu"

        self.conv_dim = self.d_ssm + 2 * self.ngroups * d_state
        self.in_proj = column_linear(
            d_model, sum(self._split_sizes()) * world, process_group, sequence_parallel, bias=bias, **factory
        )
        self.conv1d = nn.Conv1d(
            self.conv_dim, self.conv_dim, d_conv, groups=self.conv_dim, padding=d_conv - 1, bias=conv_bias, **factory
        )
        if conv_init is not None:
            nn.init.uniform_(self.conv1d.weight, -conv_init, conv_init)
        dt_bias = inverse_softplus_of_dt(self.nheads, dt_min, dt_max, dt_init_floor, device)
        self.dt_bias = without_weight_decay(nn.Parameter(dt_bias))                        # (H), float32
        A = torch.empty(self.nheads, device=device, dtype=torch.float32).uniform_(*A_init_range)
        self.A_log = without_weight_decay(nn.Parameter(torch.log(A)))                     # (H), float32
        D = torch.ones(self.d_ssm if D_has_hdim else self.nheads, device=device, dtype=torch.float32)
        self.D = without_weight_decay(nn.Parameter(D))
        if rmsnorm:
            self.norm = RMSNorm(
                self.d_ssm, eps=NORM_EPS, group_size=d_ssm // ngroups, norm_before_gate=norm_before_gate, **factory
            )
        self.out_proj = row_linear(d_inner, d_model, process_group, sequence_parallel, bias=bias, **factory)

    def _split_sizes(self) -> list[int]:
        """Widths of in_proj's parts: gate and value of the MLP, z, (x, B, C), Δ."""
        d_mlp = self.d_inner - self.d_ssm
        return [d_mlp, d_mlp, self.d_ssm, self.conv_dim, self.nheads]

    def parallel_parts(self) -> dict[str, list[int]]:
        """Widths along in_proj's, conv1d's and out_proj's axis that each rank of a group takes its own share of."""
        d_mlp, *_, nheads = self._split_sizes()
        convolved = [self.d_ssm, self.ngroups * self.d_state, self.ngroups * self.d_state]
        columns = [d_mlp, d_mlp, self.d_ssm, *convolved, nheads]
        return {"in_proj": columns, "conv1d": convolved, "out_proj": [d_mlp, self.d_ssm]}

    def state_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """conv_state (d_ssm + 2GN, W), ssm_state (H, P, N)."""
        return (self.conv_dim, self.d_conv), (self.nheads, self.headdim, self.d_state)

    def forward(
        self,
        u: Tensor,
        seqlen: int | None = None,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        inference_params: InferenceParams | None = None,
        state: MixerState | KeptRows | None = None,
        final_states: list[MixerState | KeptRows] | None = None,
        steps_to_come: int | None = None,
    ) -> Tensor:
        """u (B, L, M), or with seqlen = L (B·L, M), of which each rank holds its B·L/W rows if it is sequence-parallel;
        seq_idx (B, L) integers, rows of different index don't see each other; cu_seqlens (S+1) integers: starts and end
        of sequences packed into B = 1 row.

        state (conv_state (B, d_ssm + 2GN, W), ssm_state (B, H, P, N)): the pass continues from it, it belongs to the
        first row's seq_idx, and is left, in place and without gradient, as it is after the last row; with cu_seqlens
        the S sequences start, and their S final states are left. inference_params: the same with the state kept there.
        final_states, without state, cu_seqlens and inference_params: the state after the last row is appended to it,
        which saves filling and copying one; with steps_to_come the rows themselves are, as a `state` for at most so
        many single rows that follow (see `ops.triton.dual_step`; `can_keep_rows` says where).
        -> like u"""
        flat = seqlen is not None
        check_final_states("Mamba2", final_states, state, cu_seqlens, inference_params)
        self._check_steps_to_come(steps_to_come, final_states)
        check_shape("Mamba2", "u", u, "(B, L, M), (B·L, M) with seqlen", (None,) * (2 - flat) + (self.d_model,))
        zxbcdt = self.in_proj(u)
        zxbcdt = zxbcdt.unflatten(0, (-1, seqlen)) if flat else zxbcdt                    # (B, L, sum of the parts)
        batch, length = zxbcdt.shape[:2]
        if cu_seqlens is not None and seq_idx is None:
            seq_idx = packed_seq_idx(cu_seqlens, length)
        if inference_params is not None:
            if cu_seqlens is not None:
                check_packed_prompts("Mamba2", zxbcdt, cu_seqlens, inference_params)
                batch = cu_seqlens.shape[0] - 1
            state = self.cached_state(inference_params, batch)
        if state is None and final_states is None and self.use_mem_eff_path:
            y = self._one_operator(zxbcdt, seq_idx)
        elif isinstance(state, KeptRows) and (length != 1 or seq_idx is not None):
            raise ValueError(f"Mamba2: u has {length} rows for kept rows, expected one at a time and no seq_idx")
        elif state is not None and length == 1 and seq_idx is None:
            y = self._step(zxbcdt.squeeze(1), state).unsqueeze(1)
        else:
            y = self._scan(zxbcdt, seq_idx, cu_seqlens, state, final_states, steps_to_come)
        return self.out_proj(y.flatten(0, 1) if flat else y)

    def _one_operator(self, zxbcdt: Tensor, seq_idx: Tensor | None) -> Tensor:
        return mamba_split_conv1d_scan_combined(
            zxbcdt, self.conv1d.weight.squeeze(1), self.conv1d.bias, self.dt_bias, self._A(), self._D(),
            self.chunk_size, initial_states=self._started(zxbcdt), seq_idx=seq_idx, dt_limit=self.dt_limit,
            activation=self.activation,
            rmsnorm_weight=self.norm.weight if self.rmsnorm else None, rmsnorm_eps=NORM_EPS, headdim=self.headdim,
            ngroups=self.ngroups, norm_before_gate=self.norm_before_gate,
        )  # fmt: skip

    def _scan(
        self,
        zxbcdt: Tensor,
        seq_idx: Tensor | None,
        cu_seqlens: Tensor | None,
        state: MixerState | None,
        final_states: list[MixerState | KeptRows] | None,
        steps_to_come: int | None,
    ) -> Tensor:
        packed = cu_seqlens is not None and state is not None                             # no state enters
        conv_state, ssm_state = (None, self._started(zxbcdt)) if state is None or packed else readable(state)
        gate, value, z, xBC, dt = zxbcdt.split(self._split_sizes(), dim=-1)
        inputs = xBC.transpose(1, 2)                                                      # (B, d_ssm + 2GN, L)
        xBC = causal_conv1d_fn(
            inputs, self.conv1d.weight.squeeze(1), self.conv1d.bias, seq_idx=seq_idx,
            initial_states=None if conv_state is None else conv_state[:, :, 1:], activation=self.activation,
        ).transpose(1, 2)  # fmt: skip
        x, B, C = self._x_B_C(xBC)
        scanned = mamba_chunk_scan_combined(
            x, dt, self._A(), B, C, self.chunk_size, D=self._D(),
            z=None if self.rmsnorm else z.unflatten(-1, x.shape[2:]), dt_bias=self.dt_bias, initial_states=ssm_state,
            seq_idx=seq_idx, cu_seqlens=cu_seqlens, dt_softplus=True, dt_limit=self.dt_limit,
            return_final_states=steps_to_come is None, return_varlen_states=packed,
        )  # fmt: skip
        y, *states = (scanned,) if steps_to_come is not None else scanned
        if steps_to_come is not None:
            parameters = (self.conv1d.weight.squeeze(1), self.dt_bias, self.A_log)
            final_states.append(keep_rows(xBC, inputs, dt, *parameters, steps_to_come, seq_idx, self.dt_limit))
        elif state is not None or final_states is not None:
            inputs = inputs.detach()
            if packed:
                window = causal_conv1d_varlen_states(inputs[0].transpose(0, 1), cu_seqlens, self.d_conv)
            else:
                window = causal_conv1d_window(inputs, self.d_conv, seq_idx, conv_state)
            leave_state(state, final_states, window, states[-1].detach())
        y = y.flatten(-2)
        return self._with_mlp(self.norm(y, z) if self.rmsnorm else y, gate, value)

    def step(self, hidden_states: Tensor, conv_state: Tensor, ssm_state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One row: hidden_states (B, 1, M), the states as in `forward`, moved on in place.
        -> (out (B, 1, M), conv_state, ssm_state)"""
        check_shape("Mamba2.step", "hidden_states", hidden_states, "(B, 1, d_model)", (None, 1, self.d_model))
        y = self._step(self.in_proj(hidden_states).squeeze(1), (conv_state, ssm_state))
        return self.out_proj(y.unsqueeze(1)), conv_state, ssm_state

    def _step(self, zxbcdt: Tensor, state: MixerState | KeptRows) -> Tensor:
        d_mlp = self.d_inner - self.d_ssm
        gate, value, zxbcdt = zxbcdt.split([d_mlp, d_mlp, zxbcdt.shape[1] - 2 * d_mlp], dim=-1)
        norm = (self.norm.weight if self.rmsnorm else None, NORM_EPS, self.norm_before_gate, self.dt_limit)
        parameters = (self.conv1d.bias, self.dt_bias, self.A_log, self._D())
        if isinstance(state, KeptRows):
            y = mamba2_dual_step(zxbcdt, state, *parameters, self.ngroups, *norm)
        else:
            y = mamba2_step(zxbcdt, *state, self.conv1d.weight.squeeze(1), *parameters, *norm)
        return self._with_mlp(y, gate, value)

    def can_keep_rows(self, length: int) -> bool:
        """Whether sequences of `length` rows may keep rows for a state: from zero, and with less to read and write."""
        return self.start_state() is None and length <= ROWS_OF_A_STATE * self.d_state

    def _check_steps_to_come(self, steps_to_come: int | None, final_states: list | None) -> None:
        if steps_to_come is not None and (final_states is None or self.start_state() is not None):
            raise ValueError("Mamba2: steps_to_come is given, expected final_states with it and a start from zero")

    def _x_B_C(self, xBC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(..., d_ssm + 2GN) -> (..., H, P), (..., G, N), (..., G, N)."""
        widths = [self.d_ssm, self.ngroups * self.d_state, self.ngroups * self.d_state]
        x, B, C = xBC.split(widths, dim=-1)
        groups = (self.ngroups, self.d_state)
        return x.unflatten(-1, (self.nheads, self.headdim)), B.unflatten(-1, groups), C.unflatten(-1, groups)

    def _with_mlp(self, y: Tensor, gate: Tensor, value: Tensor) -> Tensor:
        return torch.cat([F.silu(gate) * value, y], dim=-1) if self.d_inner > self.d_ssm else y

    def _started(self, zxbcdt: Tensor) -> Tensor | None:
        start = self.start_state()
        return None if start is None else start.expand(zxbcdt.shape[0], -1, -1, -1)

    def _A(self) -> Tensor:
        return -torch.exp(self.A_log.to(accumulate_dtype(self.A_log)))                    # (H)

    def _D(self) -> Tensor:
        return self.D.unflatten(0, (self.nheads, self.headdim)) if self.D_has_hdim else self.D


def _check_sizes(d_inner: int, d_ssm: int, headdim: int, ngroups: int, world: int) -> None:
    if d_ssm % headdim:
        raise ValueError(f"Mamba2: headdim is {headdim}, expected a divisor of d_ssm = {d_ssm}")
    heads = d_ssm // headdim
    if heads % ngroups:
        raise ValueError(f"Mamba2: ngroups is {ngroups}, expected a divisor of the number of heads = {heads}")
    if d_ssm > d_inner:
        raise ValueError(f"Mamba2: d_ssm is {d_ssm}, expected at most expand * d_model = {d_inner}")
    if ngroups % world or (d_inner - d_ssm) % world:
        raise ValueError(
            f"Mamba2: ngroups is {ngroups} and d_inner - d_ssm {d_inner - d_ssm}, expected multiples of {world} ranks"
        )

"""State-space duality, the recurrence of Mamba-2, in chunked matmul form, and Mamba-2's inner block around it.

    h_t = exp(Δ_t A_h) h_{t-1} + Δ_t x_t B_tᵀ,   y_t = h_t C_t + D x_t,   out = y · silu(z)

with Δ = clamp(softplus(dt + dt_bias)). Four parts: C_i · B_j inside a chunk, the state each chunk adds, the scan over
chunk states, the outputs. With `seq_idx` the state is zeroed before each row whose index differs from the row before.

Letters: B batch, L length, H heads, P headdim, G groups, N state size, Q chunk size, K chunks, S packed sequences,
W convolution width, M model width.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from mamba_ssm.ops.causal_conv1d import causal_conv1d_fn, causal_conv1d_ref
from mamba_ssm.ops.checks import are_real_on_one_device, check_device, check_floating, check_integer, check_shape
from mamba_ssm.ops.numerics import accumulate_dtype, packed_seq_idx, sequence_pieces, sequence_starts, without_autocast
from mamba_ssm.ops.tiers import implementation, register, register_operator, register_unavailable
from mamba_ssm.ops.triton.launch import register_triton, why_not
from mamba_ssm.ops.triton.layernorm_gated import rms_norm_ref, rmsnorm_fn
from mamba_ssm.ops.triton.ssd_bmm import bmm_chunk
from mamba_ssm.ops.triton.ssd_chunk_scan import chunk_scan
from mamba_ssm.ops.triton.ssd_chunk_state import chunk_cumsum, chunk_state, chunk_state_varlen
from mamba_ssm.ops.triton.ssd_state_passing import state_passing

Tensor = torch.Tensor

NO_LIMIT = (0.0, math.inf)

register_operator("mamba_chunk_scan_combined", cuda=("triton",))
register_operator("mamba_split_conv1d_scan_combined", cuda=("triton",))


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = NO_LIMIT,
    return_final_states: bool = False,
    return_varlen_states: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """Mamba-2's scan on the fastest tier there is.

    x, z (B, L, H, P); dt (B, L, H); A, dt_bias (H); B, C (B, L, G, N); D (H) or (H, P); initial_states (B, H, P, N),
    zeros if None, belong to the first row's sequence; seq_idx (B, L) integers; cu_seqlens (S+1) integers, for B = 1:
    the rows at which packed sequences start, and the end (seq_idx follows from it if None; its values are not checked,
    for that would wait for the device). chunk_size is the most rows a chunk takes, and does not change the result.
    -> out (B, L, H, P) in x's dtype; with return_final_states the state after the last row (B, H, P, N), with
    return_varlen_states the states at the ends of the packed sequences (S, H, P, N), both in float32 (float64 if an
    input is), in that order. Integers and dt_limit are not differentiated."""
    arguments = (x, dt, A, B, C, chunk_size, D, z, dt_bias, initial_states, seq_idx, cu_seqlens, dt_softplus, dt_limit)
    _check_chunk_scan(*arguments[:12], return_varlen_states)
    run = implementation("mamba_chunk_scan_combined", x.device)
    return run(*arguments, return_final_states, return_varlen_states)


def mamba_chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = NO_LIMIT,
    return_final_states: bool = False,
    return_varlen_states: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """`mamba_chunk_scan_combined` from its four parts in plain PyTorch: the reference tier."""
    arguments = (x, dt, A, B, C, chunk_size, D, z, dt_bias, initial_states, seq_idx, cu_seqlens)
    _check_chunk_scan(*arguments, return_varlen_states)
    with without_autocast(x):
        if seq_idx is None and cu_seqlens is not None:
            seq_idx = packed_seq_idx(cu_seqlens, x.shape[1])
        wide = _widen(x, dt, B, C, dt_bias, dt_softplus, dt_limit, A, initial_states)
        y, final_states, varlen_states = _scan_chunks(
            *wide, A, chunk_size, initial_states, seq_idx, cu_seqlens if return_varlen_states else None,
            return_final_states,
        )  # fmt: skip
        out = _skip_and_gate(y, wide[0], D, z).to(x.dtype)
    return _results(out, final_states, varlen_states, return_final_states, return_varlen_states)


def ssd_chunk_scan_combined_ref(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = NO_LIMIT,
    return_final_states: bool = False,
    return_varlen_states: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """The judge of `mamba_chunk_scan_combined`: one row after the other; chunk_size plays no part in it."""
    arguments = (x, dt, A, B, C, chunk_size, D, z, dt_bias, initial_states, seq_idx, cu_seqlens)
    _check_chunk_scan(*arguments, return_varlen_states)
    with without_autocast(x):
        if seq_idx is None and cu_seqlens is not None:
            seq_idx = packed_seq_idx(cu_seqlens, x.shape[1])
        rows, dt, B, C = _widen(x, dt, B, C, dt_bias, dt_softplus, dt_limit, A, initial_states)
        repeats = x.shape[2] // B.shape[2]
        decay = torch.exp(dt * A.to(dt.dtype))                                            # (B, L, H)
        if seq_idx is not None:
            decay = decay.masked_fill(sequence_starts(seq_idx).unsqueeze(-1), 0.0)
        drive = (dt.unsqueeze(-1) * rows).unsqueeze(-1) * B.repeat_interleave(repeats, dim=2).unsqueeze(3)
        state = _initial(rows, B, initial_states)                                         # (B, H, P, N)
        states = [state]
        for decay_t, drive_t in zip(decay.unbind(1), drive.unbind(1), strict=True):
            states.append(decay_t[..., None, None] * states[-1] + drive_t)
        all_states = torch.stack(states, dim=1)                                           # (B, 1+L, H, P, N)
        y = (all_states[:, 1:] * C.repeat_interleave(repeats, dim=2).unsqueeze(3)).sum(dim=-1)
        out = _skip_and_gate(y, rows, D, z).to(x.dtype)
        varlen_states = None
        if return_varlen_states:
            empty = cu_seqlens[1:] == cu_seqlens[:-1]
            varlen_states = all_states[0, cu_seqlens[1:].long()].masked_fill(empty[:, None, None, None], 0.0)
    return _results(out, states[-1], varlen_states, return_final_states, return_varlen_states)


def ssd_selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = NO_LIMIT,
) -> Tensor:
    """`ssd_chunk_scan_combined_ref` under the name and with the arguments that some callers know: (B, L, H, P)."""
    return ssd_chunk_scan_combined_ref(
        x, dt, A, B, C, 1, D=D, z=z, dt_bias=dt_bias, dt_softplus=dt_softplus, dt_limit=dt_limit
    )


def _scan_chunks(x, dt, B, C, A, chunk_size, initial_states, seq_idx, cu_seqlens, return_final_states):
    """y (B, L, H, P), final states (B, H, P, N) or None if nobody wants them, with cu_seqlens states (S, H, P, N)."""
    length = x.shape[1]
    if length == 0:
        final = _initial(x, B, initial_states)
        return x, final, None if cu_seqlens is None else final.expand(cu_seqlens.shape[0] - 1, *final.shape[1:]) * 0.0
    chunks = -(-length // chunk_size)
    size = -(-length // chunks)                              # even chunks: at most K-1 rows of padding
    pieces = None
    if seq_idx is not None:
        pieces = sequence_pieces(seq_idx)
        padding = pieces[:, -1:].expand(-1, chunks * size - length)
        pieces = torch.cat([pieces, padding], dim=1).unflatten(1, (chunks, size))         # (B, K, Q)
    x, dt, B, C = (_into_chunks(rows, chunks, size) for rows in (x, dt, B, C))            # padding has Δ = 0
    dA_cumsum = chunk_cumsum(dt, A)                                                       # (B, K, H, Q) float64
    if chunks == 1 and cu_seqlens is None and not return_final_states:
        entering, final = None if initial_states is None else initial_states.to(x.dtype).unsqueeze(1), None
    else:
        states = chunk_state(B, x, dt, dA_cumsum, pieces)
        entering, final = state_passing(states, dA_cumsum[..., -1], initial_states, pieces)
    nothing_enters = chunks == 1 and initial_states is None
    CB = bmm_chunk(C, B)
    y = chunk_scan(CB, x, dt, dA_cumsum, C, None if nothing_enters else entering, pieces)
    varlen = None if cu_seqlens is None else chunk_state_varlen(B, x, dt, dA_cumsum, pieces, cu_seqlens, entering)
    return y.flatten(1, 2)[:, :length], final, varlen


def _widen(x, dt, B, C, dt_bias, dt_softplus, dt_limit, A, initial_states):
    """x, Δ, B, C in the dtype that sums are kept in."""
    dtype = accumulate_dtype(x, dt, B, C, dt_bias, A, initial_states)
    dt = dt.to(dtype) if dt_bias is None else dt.to(dtype) + dt_bias.to(dtype)
    dt = F.softplus(dt) if dt_softplus else dt
    if not dt_softplus or tuple(dt_limit) != NO_LIMIT:       # softplus is never below 0
        dt = dt.clamp(*dt_limit)
    return x.to(dtype), dt, B.to(dtype), C.to(dtype)


def _into_chunks(rows: Tensor, chunks: int, size: int) -> Tensor:
    """(B, L, ...) -> (B, K, Q, ...), zeros behind the last row."""
    missing = chunks * size - rows.shape[1]
    if missing:
        rows = F.pad(rows, [0, 0] * (rows.dim() - 2) + [0, missing])
    return rows.unflatten(1, (chunks, size))


def _initial(x: Tensor, B: Tensor, initial_states: Tensor | None) -> Tensor:
    if initial_states is not None:
        return initial_states.to(x.dtype)
    return x.new_zeros(x.shape[0], *x.shape[2:], B.shape[-1])


def _skip_and_gate(y: Tensor, x: Tensor, D: Tensor | None, z: Tensor | None) -> Tensor:
    if D is not None:
        y = y + x * (D if D.dim() == 2 else D.unsqueeze(-1)).to(x.dtype)
    return y if z is None else y * F.silu(z.to(x.dtype))


def _results(out, final_states, varlen_states, return_final_states, return_varlen_states):
    extra = [final_states] if return_final_states else []
    extra += [varlen_states] if return_varlen_states else []
    return (out, *extra) if extra else out


register("mamba_chunk_scan_combined", "reference", mamba_chunk_scan)
register_triton("mamba_chunk_scan_combined", "ssd_triton", "chunk_scan_on_gpu")


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_limit: tuple[float, float] = NO_LIMIT,
    return_final_states: bool = False,
    activation: str | None = "silu",
    rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """Mamba-2 between its input projection and its output: split, convolution, scan, gate or gated norm, projection.

    zxbcdt (B, L, 2E + 2HP + 2GN + H): E gate and E value channels that bypass the scan (usually none), z, x, B, C, dt;
    conv1d_weight (HP + 2GN, W); conv1d_bias (HP + 2GN); dt_bias, A (H); D (H, P), or (H) with headdim given;
    initial_states, seq_idx, chunk_size, dt_limit as in `mamba_chunk_scan_combined`; rmsnorm_weight (HP), None gates
    without a norm; outproj_weight (M, E + HP), None leaves the projection out; outproj_bias (M).
    -> (B, L, M), or (B, L, E + HP) without projection, and with return_final_states the final state (B, H, P, N)."""
    run = implementation("mamba_split_conv1d_scan_combined", zxbcdt.device)
    return run(
        zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, initial_states, seq_idx, dt_limit,
        return_final_states, activation, rmsnorm_weight, rmsnorm_eps, outproj_weight, outproj_bias, headdim, ngroups,
        norm_before_gate,
    )  # fmt: skip


def mamba_split_conv1d_scan_ref(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_limit: tuple[float, float] = NO_LIMIT,
    return_final_states: bool = False,
    activation: str | None = "silu",
    rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """The judge: `mamba_split_conv1d_scan_combined` from the judges of its parts."""
    parts = (causal_conv1d_ref, ssd_chunk_scan_combined_ref, rms_norm_ref)
    return _split_conv1d_scan(
        parts, zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, initial_states, seq_idx, dt_limit,
        return_final_states, activation, rmsnorm_weight, rmsnorm_eps, outproj_weight, outproj_bias, headdim, ngroups,
        norm_before_gate,
    )  # fmt: skip


def _split_conv1d_scan(
    parts, zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, initial_states, seq_idx, dt_limit,
    return_final_states, activation, rmsnorm_weight, rmsnorm_eps, outproj_weight, outproj_bias, headdim, ngroups,
    norm_before_gate,
):  # fmt: skip
    conv, scan, norm = parts
    heads, headdim, state, bypass = _split_sizes(zxbcdt, conv1d_weight, D, headdim, ngroups)
    dim, conv_dim = heads * headdim, conv1d_weight.shape[0]
    gate, value, z, xBC, dt = zxbcdt.split([bypass, bypass, dim, conv_dim, heads], dim=-1)
    xBC = conv(xBC.transpose(1, 2), conv1d_weight, conv1d_bias, seq_idx=seq_idx, activation=activation).transpose(1, 2)
    x, B, C = xBC.split([dim, ngroups * state, ngroups * state], dim=-1)
    result = scan(
        x.unflatten(-1, (heads, headdim)), dt, A, B.unflatten(-1, (ngroups, state)), C.unflatten(-1, (ngroups, state)),
        chunk_size, D=D, z=z.unflatten(-1, (heads, headdim)) if rmsnorm_weight is None else None, dt_bias=dt_bias,
        initial_states=initial_states, seq_idx=seq_idx, dt_softplus=True, dt_limit=dt_limit,
        return_final_states=return_final_states,
    )  # fmt: skip
    out, final_states = result if return_final_states else (result, None)
    out = out.flatten(2)
    if rmsnorm_weight is not None:
        out = norm(out, rmsnorm_weight, None, z, rmsnorm_eps, dim // ngroups, norm_before_gate)
    if bypass:
        out = torch.cat([F.silu(gate) * value, out], dim=-1)
    if outproj_weight is not None:
        out = F.linear(out, outproj_weight, outproj_bias)
    return (out, final_states) if return_final_states else out


def _split_conv1d_scan_reference(*arguments):
    return _split_conv1d_scan((causal_conv1d_fn, mamba_chunk_scan_combined, rmsnorm_fn), *arguments)


register("mamba_split_conv1d_scan_combined", "reference", _split_conv1d_scan_reference)


class _SplitConv1dScan(torch.autograd.Function):
    """`_split_conv1d_scan` without its bypass that keeps its inputs and the scan's output: backward runs convolution
    and gated norm again, and the scan's own backward, but neither the scan nor the projection.

    tensors: zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, initial_states, rmsnorm_weight, outproj_weight,
    outproj_bias; options: what is not differentiated. -> out, and the final states, or None if not asked for."""

    @staticmethod
    def forward(ctx, options, *tensors):
        zxbcdt, conv_weight, conv_bias, dt_bias, A, D, initial_states, norm_weight, out_weight, out_bias = tensors
        z, xBC, dt = _split_parts(options, zxbcdt, conv_weight, D)
        x, B, C = _convolved(options, xBC, conv_weight, conv_bias, D)
        gate = z if norm_weight is None else None
        _check_chunk_scan(
            x, dt, A, B, C, options.scan[1], D, gate, dt_bias, initial_states, options.seq_idx, None, False
        )
        y, *states = torch.ops.mamba_ssm_triton.ssd_scan(
            x, dt, A, B, C, D, gate, dt_bias, initial_states, *options.scan, options.return_final_states, True
        )
        final = states.pop(0) if options.return_final_states else None
        entering = states[0] if states else None
        out = _normed(options, y, z, norm_weight)
        ctx.options = options
        ctx.save_for_backward(*tensors, entering, y if norm_weight is not None or out_weight is not None else None)
        ctx.set_materialize_grads(False)
        return (out if out_weight is None else F.linear(out, out_weight, out_bias)), final

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, dfinal):
        options, (*tensors, entering, y) = ctx.options, ctx.saved_tensors
        zxbcdt, conv_weight, conv_bias, dt_bias, A, D, initial_states, norm_weight, out_weight, out_bias = tensors
        z, xBC, dt = _split_parts(options, zxbcdt, conv_weight, D)
        leaves = [None if t is None else t.detach().requires_grad_() for t in (xBC, conv_weight, conv_bias)]
        with torch.enable_grad():
            x, B, C = _convolved(options, *leaves, D)
        dy, dz, dnorm, dweight, dbias = _backward_of_output(options, dout, y, z, norm_weight, out_weight, out_bias)
        if dy is None:
            dy = torch.zeros_like(x)
        gate = z if norm_weight is None else None
        dx, ddt, dA, dB, dC, dD, *others = torch.ops.mamba_ssm_triton.ssd_scan_backward(
            dy, dfinal, entering, *(t.detach() for t in (x, dt, A, B, C, D)), gate, dt_bias, initial_states,
            *options.scan,
        )
        dgate = None if gate is None else others.pop(0)
        ddt_bias, dinitial = others.pop(0), others[0] if others else None
        needing = [leaf for leaf in leaves if leaf is not None]
        dxBC, dconv, *dconv_bias = torch.autograd.grad((x, B, C), needing, (dx, dB, dC))
        dz = dgate if norm_weight is None else dz
        dzxbcdt = torch.cat([dz.flatten(2), dxBC, ddt], dim=-1)
        return (
            None, dzxbcdt, dconv, *(dconv_bias or [None]), ddt_bias, dA, dD, dinitial, dnorm, dweight, dbias,
        )  # fmt: skip


class _SplitOptions(NamedTuple):
    """What of `mamba_split_conv1d_scan_combined` is not differentiated."""

    heads: int
    headdim: int
    groups: int
    seq_idx: Tensor | None
    scan: tuple                                          # seq_idx and options as the scan's operator takes them
    return_final_states: bool
    activation: str | None
    eps: float
    norm_before_gate: bool


def _split_parts(options: _SplitOptions, zxbcdt: Tensor, conv_weight: Tensor, D: Tensor):
    """z (B, L, H, P), the inputs of the convolution (B, L, HP + 2GN), dt (B, L, H)."""
    dim = options.heads * options.headdim
    z, xBC, dt = zxbcdt.split([dim, conv_weight.shape[0], options.heads], dim=-1)
    return z.unflatten(-1, (options.heads, options.headdim)), xBC, dt


def _convolved(options: _SplitOptions, xBC: Tensor, conv_weight: Tensor, conv_bias: Tensor | None, D: Tensor):
    """x (B, L, H, P), B and C (B, L, G, N)."""
    dim = options.heads * options.headdim
    xBC = causal_conv1d_fn(
        xBC.transpose(1, 2), conv_weight, conv_bias, seq_idx=options.seq_idx, activation=options.activation
    ).transpose(1, 2)
    x, BC = xBC.split([dim, xBC.shape[-1] - dim], dim=-1)
    B, C = BC.unflatten(-1, (2, options.groups, -1)).unbind(2)
    return x.unflatten(-1, (options.heads, options.headdim)), B, C


def _normed(options: _SplitOptions, y: Tensor, z: Tensor, norm_weight: Tensor | None) -> Tensor:
    """y, z (B, L, H, P) -> (B, L, HP)"""
    if norm_weight is None:
        return y.flatten(2)
    group_size = norm_weight.shape[0] // options.groups
    return rmsnorm_fn(
        y.flatten(2), norm_weight, None, z.flatten(2), options.eps, group_size, options.norm_before_gate
    )


def _backward_of_output(options, dout, y, z, norm_weight, out_weight, out_bias):
    """Derivatives of y, z, rmsnorm_weight, outproj_weight and outproj_bias, None where there is none."""
    if dout is None:
        return None, None if norm_weight is None else torch.zeros_like(z), None, None, None
    dweight = dbias = dz = dnorm = None
    leaves = () if norm_weight is None else tuple(t.detach().requires_grad_() for t in (y, z, norm_weight))
    if out_weight is not None or leaves:
        with torch.enable_grad():
            normed = _normed(options, *leaves) if leaves else y.flatten(2)
    if out_weight is not None:
        rows = dout.flatten(0, 1)                                                         # (BL, M)
        dweight = (rows.t() @ normed.detach().flatten(0, 1).to(rows.dtype)).to(out_weight.dtype)
        dbias = None if out_bias is None else rows.sum(0).to(out_bias.dtype)
        dout = (dout @ out_weight.to(dout.dtype)).to(normed.dtype)
    dy = dout
    if leaves:
        dy, dz, dnorm = torch.autograd.grad(normed, leaves, dout)
    return dy.reshape(z.shape), dz, dnorm, dweight, dbias


def _split_conv1d_scan_on_gpu(
    zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, initial_states, seq_idx, dt_limit,
    return_final_states, activation, rmsnorm_weight, rmsnorm_eps, outproj_weight, outproj_bias, headdim, ngroups,
    norm_before_gate,
):  # fmt: skip
    """The fused form in training, the parts where nothing is to be kept or they need it: without gradient, in a
    compiler (which partitions them itself), with a bypass, or with what the Triton scan does not take."""
    arguments = (
        zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, initial_states, seq_idx, dt_limit,
        return_final_states, activation, rmsnorm_weight, rmsnorm_eps, outproj_weight, outproj_bias, headdim, ngroups,
        norm_before_gate,
    )  # fmt: skip
    heads, headdim, state, bypass = _split_sizes(zxbcdt, conv1d_weight, D, headdim, ngroups)
    tensors = (
        zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, initial_states, rmsnorm_weight, outproj_weight, outproj_bias,
    )  # fmt: skip
    takes = accumulate_dtype(*tensors) != torch.float64 and state <= 256 and headdim <= 128 and zxbcdt.numel() > 0
    if bypass or not takes or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return _split_conv1d_scan_reference(*arguments)
    scan = (seq_idx, chunk_size, True, float(dt_limit[0]), float(dt_limit[1]))
    options = _SplitOptions(
        heads, headdim, ngroups, seq_idx, scan, return_final_states, activation, rmsnorm_eps, norm_before_gate
    )
    out, final_states = _SplitConv1dScan.apply(options, *tensors)
    return (out, final_states) if return_final_states else out


if (_reason := why_not()) is None:
    register("mamba_split_conv1d_scan_combined", "triton", _split_conv1d_scan_on_gpu)
else:
    register_unavailable("mamba_split_conv1d_scan_combined", "triton", _reason)


def _split_sizes(zxbcdt, conv1d_weight, D, headdim, ngroups) -> tuple[int, int, int, int]:
    """H, P, N and E, read from the shapes."""
    name = "mamba_split_conv1d_scan_combined"
    check_shape(name, "zxbcdt", zxbcdt, "(B, L, 2E + 2HP + 2GN + H)", (None, None, None))
    check_shape(name, "conv1d_weight", conv1d_weight, "(HP + 2GN, W)", (None, None))
    if D.dim() == 1 and headdim is None:
        raise ValueError(f"{name}: headdim is None, expected P because D has shape {tuple(D.shape)}, not (H, P)")
    heads, headdim = D.shape[0], D.shape[1] if D.dim() == 2 else headdim
    state, remainder = divmod(conv1d_weight.shape[0] - heads * headdim, 2 * ngroups)
    bypass, odd = divmod(zxbcdt.shape[-1] - heads * headdim - conv1d_weight.shape[0] - heads, 2)
    if remainder or odd or state <= 0 or bypass < 0:
        raise ValueError(
            f"{name}: zxbcdt has shape {tuple(zxbcdt.shape)} and conv1d_weight {tuple(conv1d_weight.shape)}, expected "
            f"a last axis 2E + 2HP + 2GN + H and a first axis HP + 2GN with H = {heads}, P = {headdim}, G = {ngroups}"
        )
    return heads, headdim, state, bypass


def _is_usual(x, dt, A, B, C, D, z, dt_bias, initial_states) -> bool:
    """Whether the arguments are right, D (H): a launch waits for this."""
    shape, columns = x.shape, B.shape
    if len(shape) != 4 or len(columns) != 4 or columns[2] == 0 or shape[2] % columns[2]:
        return False
    per_head = shape[2:3]
    return (
        dt.shape == shape[:3]
        and A.shape == per_head
        and columns[:2] == shape[:2]
        and C.shape == columns
        and (D is None or D.shape == per_head)
        and (z is None or z.shape == shape)
        and (dt_bias is None or dt_bias.shape == per_head)
        and (initial_states is None or initial_states.shape == (shape[0], *shape[2:], columns[3]))
        and are_real_on_one_device((x, dt, A, B, C, D, z, dt_bias, initial_states))
    )


def _check_chunk_scan(
    x, dt, A, B, C, chunk_size, D, z, dt_bias, initial_states, seq_idx, cu_seqlens, return_varlen_states
) -> None:
    integers = seq_idx is not None or cu_seqlens is not None or return_varlen_states
    if not integers and chunk_size >= 1 and _is_usual(x, dt, A, B, C, D, z, dt_bias, initial_states):
        return
    name = "mamba_chunk_scan_combined"
    check_floating(name, x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias, initial_states=initial_states)
    check_integer(name, seq_idx=seq_idx, cu_seqlens=cu_seqlens)
    check_device(
        name, x.device, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias, initial_states=initial_states,
        seq_idx=seq_idx, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    check_shape(name, "x", x, "(B, L, H, P)", (None, None, None, None))
    batch, length, heads, headdim = x.shape
    check_shape(name, "dt", dt, "(B, L, H)", (batch, length, heads))
    check_shape(name, "A", A, "(H)", (heads,))
    check_shape(name, "B", B, "(B, L, G, N)", (batch, length, None, None))
    groups, state = B.shape[2:]
    if groups == 0 or heads % groups:
        raise ValueError(f"{name}: B has {groups} groups, expected a divisor of H = {heads}")
    check_shape(name, "C", C, "(B, L, G, N) like B", B.shape)
    check_shape(name, "D", D, "(H) or (H, P)", (heads,), (heads, headdim))
    check_shape(name, "z", z, "(B, L, H, P) like x", x.shape)
    check_shape(name, "dt_bias", dt_bias, "(H)", (heads,))
    check_shape(name, "initial_states", initial_states, "(B, H, P, N)", (batch, heads, headdim, state))
    check_shape(name, "seq_idx", seq_idx, "(B, L)", (batch, length))
    check_shape(name, "cu_seqlens", cu_seqlens, "(S+1)", (None,))
    if chunk_size < 1:
        raise ValueError(f"{name}: chunk_size is {chunk_size}, expected at least 1")
    if cu_seqlens is not None and batch != 1:
        raise ValueError(f"{name}: cu_seqlens packs sequences into one batch row, but x has shape {tuple(x.shape)}")
    if return_varlen_states and cu_seqlens is None:
        raise ValueError(f"{name}: return_varlen_states is true but cu_seqlens is None, expected the sequences' starts")

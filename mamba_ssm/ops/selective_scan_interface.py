"""Selective scan, the recurrence of Mamba, and Mamba's inner block around it.

For each channel   h_t = exp(Δ_t A) ⊙ h_{t-1} + Δ_t B_t u_t,   y_t = Re⟨C_t, h_t⟩ + D u_t,   out = y · silu(z),
with Δ = softplus(delta + delta_bias) if asked (the identity above 20); with complex A the inner product counts twice.
With `seq_idx` the state is zeroed before each row whose index differs from the row before.

Letters: B batch, L length, D channels, N state size, G groups, R rank of delta, W convolution width, M model width.
"""

import torch
import torch.nn.functional as F

from mamba_ssm.ops._native import MAX_CUDA_STATE, register_native
from mamba_ssm.ops._native import selective_scan as native_selective_scan
from mamba_ssm.ops.causal_conv1d import causal_conv1d_fn
from mamba_ssm.ops.checks import (
    are_real_on_one_device,
    check_choice,
    check_device,
    check_floating,
    check_integer,
    check_shape,
)
from mamba_ssm.ops.numerics import accumulate_dtype, sequence_starts, without_autocast
from mamba_ssm.ops.tiers import implementation, reference_instead, register, register_operator

Tensor = torch.Tensor

register_operator("selective_scan", cpu=("cpu",), cuda=("cuda",))
register_operator("mamba_inner", cpu=("cpu",), cuda=("cuda",))


def selective_scan_fn(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    seq_idx: Tensor | None = None,
    initial_state: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Selective scan on the fastest tier there is.

    u, delta, z (B, D, L); A (D, N), real or complex; B, C: (D, N) constant, (B, N, L), or (B, G, N, L) (real/imaginary
    pairs along a last axis of 2L if A is complex); D, delta_bias (D); seq_idx (B, L) integers, never differentiated;
    initial_state (B, D, N), zeros if None, belongs to the first row's seq_idx.
    -> out (B, D, L) in u's dtype, and with `return_last_state` the state after the last row (B, D, N) in float32
    (float64 or complex where the inputs are)."""
    _check_selective_scan(u, delta, A, B, C, D, z, delta_bias, seq_idx, initial_state)
    run = implementation("selective_scan", u.device)
    return run(u, delta, A, B, C, D, z, delta_bias, delta_softplus, return_last_state, seq_idx, initial_state)


def selective_scan_ref(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    seq_idx: Tensor | None = None,
    initial_state: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The judge of every other tier: one row after the other in plain PyTorch, as `selective_scan_fn` in all else."""
    _check_selective_scan(u, delta, A, B, C, D, z, delta_bias, seq_idx, initial_state)
    return _selective_scan_reference(
        u, delta, A, B, C, D, z, delta_bias, delta_softplus, return_last_state, seq_idx, initial_state
    )


def _selective_scan_reference(
    u, delta, A, B, C, D, z, delta_bias, delta_softplus, return_last_state, seq_idx, initial_state
):
    with without_autocast(u):
        dtype = accumulate_dtype(u, delta, A, B, C, D, z, delta_bias, initial_state)
        state_dtype = dtype.to_complex() if A.is_complex() else dtype
        x = u.to(dtype)
        delta = delta.to(dtype) if delta_bias is None else delta.to(dtype) + delta_bias.to(dtype)[:, None]
        delta = F.softplus(delta) if delta_softplus else delta                            # (B, D, L)
        B = _spread(B.to(B.dtype if B.is_complex() else dtype), u, A)                     # (B|1, D|1, L|1, N)
        C = _spread(C.to(C.dtype if C.is_complex() else dtype), u, A)
        decay = torch.exp(delta.unsqueeze(-1) * A.to(state_dtype)[:, None])               # (B, D, L, N)
        if seq_idx is not None:
            decay = decay.masked_fill(sequence_starts(seq_idx)[:, None, :, None], 0.0)
        states, last_state = _scan(decay, (delta * x).unsqueeze(-1) * B, initial_state)   # (B, D, L, N), (B, D, N)
        y = (states * C).sum(dim=-1)                                                      # (B, D, L)
        y = 2.0 * y.real if A.is_complex() else y
        y = y if D is None else y + x * D.to(dtype)[:, None]
        out = (y if z is None else y * F.silu(z.to(dtype))).to(u.dtype)
    return (out, last_state) if return_last_state else out


def _scan(decay: Tensor, drive: Tensor, initial_state: Tensor | None) -> tuple[Tensor, Tensor]:
    """h_t = decay_t h_{t-1} + drive_t along the third axis: all states (B, D, L, N), the last one (B, D, N)."""
    drive = drive.to(decay.dtype).expand_as(decay)
    batch, channels, _, size = decay.shape
    state = decay.new_zeros(batch, channels, size) if initial_state is None else initial_state.to(decay.dtype)
    states = []
    for decay_t, drive_t in zip(decay.unbind(2), drive.unbind(2), strict=True):
        state = torch.addcmul(drive_t, decay_t, state)
        states.append(state)
    return (torch.stack(states, dim=2) if states else decay), state


def _spread(weight: Tensor, u: Tensor, A: Tensor) -> Tensor:
    """B or C in any of its forms as something that multiplies (B, D, L, N)."""
    if weight.dim() == 2:
        return weight[None, :, None, :]                                                   # (1, D, 1, N)
    if A.is_complex():
        weight = torch.view_as_complex(weight.unflatten(-1, (-1, 2)).contiguous())        # (..., N, L)
    if weight.dim() == 3:
        return weight.transpose(1, 2).unsqueeze(1)                                        # (B, 1, L, N)
    repeats = u.shape[1] // weight.shape[1]
    return weight.transpose(2, 3).repeat_interleave(repeats, dim=1)                       # (B, D, L, N)


register("selective_scan", "reference", _selective_scan_reference)


def _selective_scan_on_gpu(u, delta, A, *others):
    """The CUDA kernels, or the reference for what they don't take: float64, and states too wide for their registers."""
    run, reason = native_selective_scan, None
    dtypes = {x.dtype for x in (u, delta, A, *others) if isinstance(x, Tensor)}
    if not dtypes.isdisjoint((torch.float64, torch.complex128)):
        reason = "the CUDA kernels take no float64"
    elif A.shape[1] > MAX_CUDA_STATE:
        reason = f"the CUDA kernels take states up to N = {MAX_CUDA_STATE}"
    if reason is not None:
        run = reference_instead("selective_scan", u.device, reason)
    return run(u, delta, A, *others)


register_native("selective_scan", cpu=native_selective_scan, cuda=_selective_scan_on_gpu)


def mamba_inner_fn(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    A: Tensor,
    B: Tensor | None = None,
    C: Tensor | None = None,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    B_proj_bias: Tensor | None = None,
    C_proj_bias: Tensor | None = None,
    delta_softplus: bool = True,
    checkpoint_lvl: int = 1,
    b_rms_weight: Tensor | None = None,
    c_rms_weight: Tensor | None = None,
    dt_rms_weight: Tensor | None = None,
    b_c_dt_rms_eps: float = 1e-6,
    seq_idx: Tensor | None = None,
) -> Tensor:
    """Mamba between its input projection and its output: convolution, SiLU, projection to (delta, B, C), scan, gate,
    output projection, on the fastest tier there is.

    xz (B, 2D, L); conv1d_weight (D, 1, W); conv1d_bias (D); x_proj_weight (R + variable parts of N, D), 2N for each
    with complex A; delta_proj_weight (D, R); out_proj_weight (M, D); out_proj_bias (M); A, B, C, D, delta_bias, seq_idx
    as in `selective_scan_fn`, B and C None where they come from the projection; B_proj_bias, C_proj_bias as wide as
    those parts; *_rms_weight: weights of an RMSNorm over the parts. checkpoint_lvl 1 recomputes the convolution and
    delta in backward, 0 keeps them: same results, a tier without recomputation ignores it.   -> (B, L, M)"""
    arguments = (
        xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight, out_proj_bias, A, B, C, D,
        delta_bias, B_proj_bias, C_proj_bias, delta_softplus, checkpoint_lvl, b_rms_weight, c_rms_weight, dt_rms_weight,
        b_c_dt_rms_eps, seq_idx,
    )  # fmt: skip
    _check_mamba_inner(xz, conv1d_weight, x_proj_weight, delta_proj_weight, out_proj_weight, A, B, C, checkpoint_lvl)
    return implementation("mamba_inner", xz.device)(*arguments)


def mamba_inner_ref(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    A: Tensor,
    B: Tensor | None = None,
    C: Tensor | None = None,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    B_proj_bias: Tensor | None = None,
    C_proj_bias: Tensor | None = None,
    delta_softplus: bool = True,
    checkpoint_lvl: int = 1,
    b_rms_weight: Tensor | None = None,
    c_rms_weight: Tensor | None = None,
    dt_rms_weight: Tensor | None = None,
    b_c_dt_rms_eps: float = 1e-6,
    seq_idx: Tensor | None = None,
) -> Tensor:
    """`mamba_inner_fn` from its parts, each on its own tier; autograd keeps the intermediates."""
    _check_mamba_inner(xz, conv1d_weight, x_proj_weight, delta_proj_weight, out_proj_weight, A, B, C, checkpoint_lvl)
    x, z, delta, B, C = _scan_inputs(
        xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, A, B, C, B_proj_bias, C_proj_bias,
        b_rms_weight, c_rms_weight, dt_rms_weight, b_c_dt_rms_eps, seq_idx,
    )  # fmt: skip
    y = selective_scan_fn(x, delta, A, B, C, D, z, delta_bias, delta_softplus, seq_idx=seq_idx)
    return F.linear(y.transpose(1, 2), out_proj_weight, out_proj_bias)


def _scan_inputs(
    xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, A, B, C, B_proj_bias, C_proj_bias,
    b_rms_weight, c_rms_weight, dt_rms_weight, eps, seq_idx,
):  # fmt: skip
    """u, z, delta (B, D, L), B and C of the scan inside `mamba_inner_fn`."""
    x, z = xz.chunk(2, dim=1)                                                             # (B, D, L) each
    x = causal_conv1d_fn(x, conv1d_weight.squeeze(1), conv1d_bias, seq_idx=seq_idx, activation="silu")
    projected = F.linear(x.transpose(1, 2), x_proj_weight)                                # (B, L, R + ...)
    columns = A.shape[1] * (2 if A.is_complex() else 1)
    widths = [delta_proj_weight.shape[1], columns if B is None else 0, columns if C is None else 0]
    delta, projected_B, projected_C = projected.split(widths, dim=-1)
    delta = F.linear(_rms_normalise(delta, dt_rms_weight, eps), delta_proj_weight).transpose(1, 2)
    if B is None:
        B = _over_length(projected_B, B_proj_bias, b_rms_weight, eps, A)
    if C is None:
        C = _over_length(projected_C, C_proj_bias, c_rms_weight, eps, A)
    return x, z, delta, B, C


def _over_length(weight: Tensor, bias: Tensor | None, rms_weight: Tensor | None, eps: float, A: Tensor) -> Tensor:
    """A projected part (B, L, N or 2N) in the scan's layout (B, N, L or 2L)."""
    weight = _rms_normalise(weight if bias is None else weight + bias.to(weight.dtype), rms_weight, eps)
    if A.is_complex():
        return weight.unflatten(-1, (-1, 2)).transpose(1, 2).flatten(2)                   # (B, N, L, 2) -> (B, N, 2L)
    return weight.transpose(1, 2)


def _rms_normalise(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    if weight is None:
        return x
    wide = x.to(accumulate_dtype(x))
    return (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps) * weight).to(x.dtype)


register("mamba_inner", "reference", mamba_inner_ref)


class _MambaInner(torch.autograd.Function):
    """`mamba_inner_ref` that keeps no intermediate: backward runs everything up to the output projection again, once
    (checkpoint_lvl 1), or forward keeps what that needs (0).   Saved at level 1: the inputs."""

    @staticmethod
    def forward(
        ctx, checkpoint_lvl, delta_softplus, eps, seq_idx, out_proj_weight, out_proj_bias, delta_bias, D, *projections
    ):
        device_type = projections[0].device.type
        ctx.autocast = (device_type, torch.get_autocast_dtype(device_type), torch.is_autocast_enabled(device_type))
        ctx.checkpoint_lvl, ctx.delta_softplus, ctx.eps, ctx.seq_idx = checkpoint_lvl, delta_softplus, eps, seq_idx
        ctx.save_for_backward(out_proj_weight, out_proj_bias, delta_bias, D, *projections)
        with torch.set_grad_enabled(checkpoint_lvl == 0):
            leaves, y = _MambaInner.gated_scan(ctx, delta_bias, D, *projections)
        ctx.kept = (leaves, y) if checkpoint_lvl == 0 else None
        return F.linear(y.detach().transpose(1, 2), out_proj_weight, out_proj_bias)       # (B, L, M)

    @staticmethod
    def gated_scan(ctx, delta_bias, D, *projections):
        """Fresh leaves for delta_bias, D and `projections`, and y (B, D, L) computed from them."""
        wanted = ctx.needs_input_grad[6:]
        leaves = [
            tensor if tensor is None else tensor.detach().requires_grad_(need)
            for tensor, need in zip((delta_bias, D, *projections), wanted, strict=True)
        ]
        delta_bias, D, xz, *weights = leaves
        A = weights[4]
        u, z, delta, B, C = _scan_inputs(xz, *weights, ctx.eps, ctx.seq_idx)
        y = selective_scan_fn(u, delta, A, B, C, D, z, delta_bias, ctx.delta_softplus, seq_idx=ctx.seq_idx)
        return leaves, y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        out_proj_weight, out_proj_bias, *others = ctx.saved_tensors
        device_type, dtype, enabled = ctx.autocast
        if ctx.kept is None:
            with torch.enable_grad(), torch.autocast(device_type, dtype, enabled):
                leaves, y = _MambaInner.gated_scan(ctx, *others)
        else:
            leaves, y = ctx.kept
        dy = (dout @ out_proj_weight.to(dout.dtype)).transpose(1, 2).to(y.dtype)          # (B, D, L)
        rows = dout.flatten(0, 1)                                                         # (BL, M)
        dweight = rows.t() @ y.detach().transpose(1, 2).flatten(0, 1).to(dout.dtype)
        dbias = None if out_proj_bias is None else rows.sum(0).to(out_proj_bias.dtype)
        needing = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
        found = iter(torch.autograd.grad(y, needing, dy, retain_graph=ctx.kept is not None) if needing else ())
        grads = [next(found) if leaf is not None and leaf.requires_grad else None for leaf in leaves]
        return None, None, None, None, dweight.to(out_proj_weight.dtype), dbias, *grads


def _mamba_inner_checkpointed(
    xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight, out_proj_bias, A, B, C, D,
    delta_bias, B_proj_bias, C_proj_bias, delta_softplus, checkpoint_lvl, b_rms_weight, c_rms_weight, dt_rms_weight,
    b_c_dt_rms_eps, seq_idx,
):  # fmt: skip
    """`mamba_inner_fn` through `_MambaInner`; a compiler partitions the plain parts better itself."""
    projections = (
        xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, A, B, C, B_proj_bias, C_proj_bias,
        b_rms_weight, c_rms_weight, dt_rms_weight,
    )  # fmt: skip
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return mamba_inner_ref(
            *projections[:5], out_proj_weight, out_proj_bias, A, B, C, D, delta_bias, B_proj_bias, C_proj_bias,
            delta_softplus, checkpoint_lvl, b_rms_weight, c_rms_weight, dt_rms_weight, b_c_dt_rms_eps, seq_idx,
        )  # fmt: skip
    return _MambaInner.apply(
        checkpoint_lvl, delta_softplus, b_c_dt_rms_eps, seq_idx, out_proj_weight, out_proj_bias, delta_bias, D,
        *projections,
    )  # fmt: skip


register_native("mamba_inner", cpu=_mamba_inner_checkpointed, cuda=_mamba_inner_checkpointed)


def _check_mamba_inner(xz, conv1d_weight, x_proj_weight, delta_proj_weight, out_proj_weight, A, B, C, checkpoint_lvl):
    name = "mamba_inner"
    check_shape(name, "A", A, "(D, N)", (None, None))
    channels, rank = A.shape[0], delta_proj_weight.shape[-1]
    variable = A.shape[1] * (2 if A.is_complex() else 1) * ((B is None) + (C is None))
    check_shape(name, "xz", xz, "(B, 2D, L)", (None, 2 * channels, None))
    check_shape(name, "conv1d_weight", conv1d_weight, "(D, 1, W)", (channels, 1, None))
    check_shape(name, "delta_proj_weight", delta_proj_weight, "(D, R)", (channels, None))
    check_shape(name, "x_proj_weight", x_proj_weight, "(R + variable parts, D)", (rank + variable, channels))
    check_shape(name, "out_proj_weight", out_proj_weight, "(M, D)", (None, channels))
    check_choice(name, "checkpoint_lvl", checkpoint_lvl, (0, 1))


def _is_usual(u, delta, A, B, C, D, z, delta_bias, seq_idx, initial_state) -> bool:
    """Whether the arguments are right in the commonest way, B and C (B, N, L) and all real: a launch waits for this."""
    shape, per_channel = u.shape, u.shape[1:2]
    if len(shape) != 3 or seq_idx is not None or initial_state is not None:
        return False
    projection = (shape[0], *A.shape[1:], shape[2])
    return (
        delta.shape == shape
        and A.shape[:1] == per_channel
        and B.shape == C.shape == projection
        and (z is None or z.shape == shape)
        and (D is None or D.shape == per_channel)
        and (delta_bias is None or delta_bias.shape == per_channel)
        and are_real_on_one_device((u, delta, A, B, C, D, z, delta_bias))
    )


def _check_selective_scan(u, delta, A, B, C, D, z, delta_bias, seq_idx, initial_state) -> None:
    if _is_usual(u, delta, A, B, C, D, z, delta_bias, seq_idx, initial_state):
        return
    name = "selective_scan"
    check_floating(name, u=u, delta=delta, D=D, z=z, delta_bias=delta_bias)
    check_integer(name, seq_idx=seq_idx)
    check_device(
        name, u.device, delta=delta, A=A, B=B, C=C, D=D, z=z, delta_bias=delta_bias, seq_idx=seq_idx,
        initial_state=initial_state,
    )
    check_shape(name, "u", u, "(B, D, L)", (None, None, None))
    batch, channels, length = u.shape
    check_shape(name, "delta", delta, "(B, D, L) like u", u.shape)
    check_shape(name, "A", A, "(D, N)", (channels, None))
    state = A.shape[1]
    for argument, weight in (("B", B), ("C", C)):
        columns = 2 * length if A.is_complex() else length
        check_shape(
            name, argument, weight, "(D, N) or (B, N, L) or (B, G, N, L), 2L for L with complex A",
            (channels, state), (batch, state, columns), (batch, None, state, columns),
        )
        if weight.dim() == 4 and (weight.shape[1] == 0 or channels % weight.shape[1]):
            raise ValueError(f"{name}: {argument} has {weight.shape[1]} groups, expected a divisor of D = {channels}")
        if weight.is_complex() != (A.is_complex() and weight.dim() == 2):
            raise TypeError(f"{name}: {argument} has dtype {weight.dtype}, complex only if (D, N) and A complex")
    check_shape(name, "D", D, "(D)", (channels,))
    check_shape(name, "z", z, "(B, D, L) like u", u.shape)
    check_shape(name, "delta_bias", delta_bias, "(D)", (channels,))
    check_shape(name, "seq_idx", seq_idx, "(B, L)", (batch, length))
    check_shape(name, "initial_state", initial_state, "(B, D, N)", (batch, channels, state))

"""One step of a whole mixer between its two projections, the states moved on in place: what imagination and acting run.

    Mamba-2:  (z, x, B, C, Δ) ← zxbcdt,   (x, B, C) ← silu(conv(x, B, C)),   Δ ← clamp(softplus(Δ + dt_bias)),
              h ← exp(Δ A) h + Δ x Bᵀ,   y = h C + D x,   out = rmsnorm(y · silu(z)) · w
    Mamba:    (x, z) ← xz,   x ← silu(conv(x)),   (Δ, B, C) ← x_proj x,   Δ ← softplus(dt_proj Δ + dt_bias),
              h ← exp(Δ A) ⊙ h + Δ x Bᵀ,   out = (h C + D x) · silu(z)
    with A = -exp(A_log).

Letters: B batch, H heads, P headdim, d_ssm = H · P, G groups, N state size, D channels, R rank of Δ, W convolution
width, S length of its rolling window (S >= W-1).
"""

import torch
import torch.nn.functional as F

from mamba_ssm.ops.causal_conv1d import causal_conv1d_update
from mamba_ssm.ops.checks import check_device, check_floating, check_shape
from mamba_ssm.ops.numerics import accumulate_dtype
from mamba_ssm.ops.tiers import implementation, register, register_operator
from mamba_ssm.ops.triton.launch import register_triton
from mamba_ssm.ops.triton.layernorm_gated import rmsnorm_fn
from mamba_ssm.ops.triton.selective_state_update import selective_state_update
from mamba_ssm.ops.triton.ssd_combined import NO_LIMIT

Tensor = torch.Tensor

register_operator("mamba2_step", cuda=("triton",))
register_operator("mamba_step", cuda=("triton",))


def mamba2_step(
    zxbcdt: Tensor,
    conv_state: Tensor,
    ssm_state: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    dt_bias: Tensor,
    A_log: Tensor,
    D: Tensor,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-5,
    norm_before_gate: bool = False,
    dt_limit: tuple[float, float] = NO_LIMIT,
) -> Tensor:
    """Mamba-2 from in_proj's output to out_proj's input, on the fastest tier there is.

    zxbcdt (B, 2 d_ssm + 2GN + H); conv_state (B, d_ssm + 2GN, S) and ssm_state (B, H, P, N) are overwritten;
    conv_weight (d_ssm + 2GN, W); conv_bias (d_ssm + 2GN); dt_bias, A_log (H); D (H) or (H, P); norm_weight (d_ssm): an
    RMSNorm over each group's channels, before or after the gate, None: the gate alone; dt_limit clamps Δ.
    Gradients reach all inputs of this step but the states.   -> (B, d_ssm) in zxbcdt's dtype"""
    _check_mamba2(zxbcdt, conv_state, ssm_state, conv_weight, conv_bias, dt_bias, A_log, D, norm_weight)
    return implementation("mamba2_step", zxbcdt.device)(
        zxbcdt, conv_state, ssm_state, conv_weight, conv_bias, dt_bias, A_log, D, norm_weight, norm_eps,
        norm_before_gate, dt_limit,
    )  # fmt: skip


def mamba_step(
    xz: Tensor,
    conv_state: Tensor,
    ssm_state: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    x_proj_weight: Tensor,
    dt_proj_weight: Tensor,
    dt_bias: Tensor,
    A_log: Tensor,
    D: Tensor,
) -> Tensor:
    """Mamba from in_proj's output to out_proj's input, on the fastest tier there is.

    xz (B, 2D); conv_state (B, D, S) and ssm_state (B, D, N) are overwritten; conv_weight (D, W); conv_bias (D);
    x_proj_weight (R + 2N, D); dt_proj_weight (D, R); dt_bias, D (D); A_log (D, N). Gradients reach all inputs of this
    step but the states.   -> (B, D) in xz's dtype, or autocast's"""
    _check_mamba(xz, conv_state, ssm_state, x_proj_weight, dt_proj_weight, A_log)
    return implementation("mamba_step", xz.device)(
        xz, conv_state, ssm_state, conv_weight, conv_bias, x_proj_weight, dt_proj_weight, dt_bias, A_log, D
    )


def _mamba2_step_reference(
    zxbcdt, conv_state, ssm_state, conv_weight, conv_bias, dt_bias, A_log, D, norm_weight, norm_eps, norm_before_gate,
    dt_limit,
):  # fmt: skip
    """From its parts, each on its own tier."""
    heads = ssm_state.shape[1:3]                                                          # H, P
    d_ssm, size = heads.numel(), ssm_state.shape[3]
    groups = (conv_weight.shape[0] - d_ssm) // (2 * size)
    z, xBC, dt = zxbcdt.split([d_ssm, conv_weight.shape[0], heads[0]], dim=-1)
    xBC = causal_conv1d_update(xBC, conv_state, conv_weight, conv_bias, "silu")
    x, B, C = xBC.split([d_ssm, groups * size, groups * size], dim=-1)
    limited = tuple(dt_limit) != NO_LIMIT
    if limited:
        dt = F.softplus(dt.to(accumulate_dtype(dt)) + dt_bias).clamp(*dt_limit)
    y = selective_state_update(
        ssm_state, x.unflatten(-1, heads), dt.unsqueeze(-1).expand(-1, *heads),
        negative_exponential(A_log)[:, None, None].expand(*heads, size),
        B.unflatten(-1, (groups, size)), C.unflatten(-1, (groups, size)),
        D=D if D.dim() == 2 else D[:, None].expand(heads),
        z=z.unflatten(-1, heads) if norm_weight is None else None,
        dt_bias=None if limited else dt_bias[:, None].expand(heads), dt_softplus=not limited,
    ).flatten(-2)  # fmt: skip
    if norm_weight is None:
        return y
    return rmsnorm_fn(y, norm_weight, None, z, norm_eps, d_ssm // groups, norm_before_gate)


def _mamba_step_reference(
    xz, conv_state, ssm_state, conv_weight, conv_bias, x_proj_weight, dt_proj_weight, dt_bias, A_log, D
):
    """From its parts, each on its own tier."""
    x, z = xz.chunk(2, dim=-1)                                                            # (B, D) each
    x = causal_conv1d_update(x, conv_state, conv_weight, conv_bias, "silu")
    dt, B, C = F.linear(x, x_proj_weight).split([dt_proj_weight.shape[1], A_log.shape[1], A_log.shape[1]], dim=-1)
    dt = F.linear(dt, dt_proj_weight)
    A = negative_exponential(A_log)
    return selective_state_update(ssm_state, x, dt, A, B, C, D, z=z, dt_bias=dt_bias, dt_softplus=True)


def negative_exponential(A_log: Tensor) -> Tensor:
    """A = -exp(A_log), in float32 at least."""
    return -torch.exp(A_log.to(accumulate_dtype(A_log)))


register("mamba2_step", "reference", _mamba2_step_reference)
register("mamba_step", "reference", _mamba_step_reference)
register_triton("mamba2_step", "recurrent_step_kernels", "mamba2_step")
register_triton("mamba_step", "recurrent_step_kernels", "mamba_step")


def _check_mamba2(zxbcdt, conv_state, ssm_state, conv_weight, conv_bias, dt_bias, A_log, D, norm_weight) -> None:
    name = "mamba2_step"
    parameters = {
        "conv_weight": conv_weight, "conv_bias": conv_bias, "dt_bias": dt_bias, "A_log": A_log, "D": D,
        "norm_weight": norm_weight,
    }  # fmt: skip
    check_floating(name, zxbcdt=zxbcdt, conv_state=conv_state, ssm_state=ssm_state, **parameters)
    check_device(name, zxbcdt.device, conv_state=conv_state, ssm_state=ssm_state, **parameters)
    check_shape(name, "zxbcdt", zxbcdt, "(B, 2 d_ssm + 2GN + H)", (None, None))
    check_shape(name, "ssm_state", ssm_state, "(B, H, P, N)", (zxbcdt.shape[0], None, None, None))
    batch, heads, headdim, size = ssm_state.shape
    d_ssm = heads * headdim
    channels = zxbcdt.shape[1] - d_ssm - heads
    groups = (channels - d_ssm) // (2 * size)
    if groups < 1 or channels != d_ssm + 2 * groups * size or heads % groups:
        raise ValueError(
            f"{name}: zxbcdt has {zxbcdt.shape[1]} columns, expected 2 d_ssm + 2GN + H with d_ssm = {d_ssm}, "
            f"N = {size}, H = {heads} and G a divisor of H"
        )
    check_shape(name, "conv_state", conv_state, "(B, d_ssm + 2GN, S)", (batch, channels, None))
    check_shape(name, "conv_weight", conv_weight, "(d_ssm + 2GN, W)", (channels, None))
    _check_window(name, conv_state, conv_weight)
    check_shape(name, "conv_bias", conv_bias, "(d_ssm + 2GN)", (channels,))
    check_shape(name, "dt_bias", dt_bias, "(H)", (heads,))
    check_shape(name, "A_log", A_log, "(H)", (heads,))
    check_shape(name, "D", D, "(H) or (H, P)", (heads,), (heads, headdim))
    check_shape(name, "norm_weight", norm_weight, "(d_ssm)", (d_ssm,))


def _check_mamba(xz, conv_state, ssm_state, x_proj_weight, dt_proj_weight, A_log) -> None:
    """What the parts can't tell by these names."""
    name = "mamba_step"
    check_floating(name, xz=xz, x_proj_weight=x_proj_weight, dt_proj_weight=dt_proj_weight, A_log=A_log)
    check_shape(name, "A_log", A_log, "(D, N)", (None, None))
    channels, size = A_log.shape
    check_shape(name, "xz", xz, "(B, 2D)", (None, 2 * channels))
    check_shape(name, "conv_state", conv_state, "(B, D, S)", (xz.shape[0], channels, None))
    check_shape(name, "ssm_state", ssm_state, "(B, D, N)", (xz.shape[0], channels, size))
    check_shape(name, "dt_proj_weight", dt_proj_weight, "(D, R)", (channels, None))
    rank = dt_proj_weight.shape[1]
    check_shape(name, "x_proj_weight", x_proj_weight, "(R + 2N, D)", (rank + 2 * size, channels))


def _check_window(name: str, conv_state: Tensor, conv_weight: Tensor) -> None:
    least = conv_weight.shape[1] - 1
    if conv_state.shape[2] < least:
        raise ValueError(f"{name}: conv_state has shape {tuple(conv_state.shape)}, expected S >= W-1 = {least}")

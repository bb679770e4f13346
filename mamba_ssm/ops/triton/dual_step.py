"""One step of Mamba-2 that looks back at all rows of its sequence instead of keeping a state, for short sequences.

With Δ and A as in `recurrent_step`, and row t after rows 0..t-1 of a sequence that started from zero, l_s is what is
left of row s in the state:

    l_t = Δ_t,   l_s ← exp(Δ_t A) l_s for s < t,   h_t = Σ_{s<=t} l_s x_s B_sᵀ,
    y_t = D x_t + Σ_{s<=t} (C_t · B_s) l_s x_s.

A step reads t rows x_s (H, P) where the recurrence reads and writes (H, P, N) in float32: less while t < 4N in
bfloat16. Nothing is left of rows before one that starts a new sequence.

Letters: B batch, L rows of the pass before the steps, S steps, T either, H heads, P headdim, d_ssm = H · P, G groups,
N state size, W convolution width, E = d_ssm + 2GN.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from mamba_ssm.ops.causal_conv1d import causal_conv1d_window
from mamba_ssm.ops.checks import check_device, check_floating, check_shape
from mamba_ssm.ops.numerics import accumulate_dtype, sequence_starts
from mamba_ssm.ops.tiers import implementation, register, register_operator
from mamba_ssm.ops.triton.launch import register_triton
from mamba_ssm.ops.triton.layernorm_gated import rmsnorm_fn
from mamba_ssm.ops.triton.recurrent_step import negative_exponential
from mamba_ssm.ops.triton.ssd_combined import NO_LIMIT

Tensor = torch.Tensor

register_operator("mamba2_dual_step", cuda=("triton",))


class Rows(NamedTuple):
    """Rows of sequences as later ones read them."""

    x_B: Tensor     # (B, T, at least d_ssm + GN), convolved and activated, behind one another
    left: Tensor    # (B, 2, T, H), float32 at least; step i reads half i mod 2 and writes the other


@dataclass
class KeptRows:
    """All rows of sequences, in place of a recurrent state; steps move it on in place."""

    passed: Rows    # T = L
    stepped: Rows   # T = S, of which `count` are there
    window: Tensor  # (B, W, E): the convolution's last inputs, that of step i at i mod W
    taps: Tensor    # (W, E): the convolution's weight, arranged once for all steps
    count: int = 0

    @property
    def room(self) -> int:
        """S."""
        return self.stepped.left.shape[2]


def keep_rows(
    xBC: Tensor,
    inputs: Tensor,
    dt: Tensor,
    conv_weight: Tensor,
    dt_bias: Tensor,
    A_log: Tensor,
    num_steps: int,
    seq_idx: Tensor | None = None,
    dt_limit: tuple[float, float] = NO_LIMIT,
) -> KeptRows:
    """What `num_steps` steps behind a pass over sequences that start need; nothing is differentiated through it.

    xBC (B, L, E) and inputs (B, E, L): behind and before convolution and activation; dt (B, L, H) as in_proj gives it;
    conv_weight (E, W); dt_bias, A_log (H); seq_idx (B, L) integers, rows of different index don't see each other."""
    xBC, inputs, dt, conv_weight = (tensor.detach() for tensor in (xBC, inputs, dt, conv_weight))
    window = causal_conv1d_window(inputs, conv_weight.shape[1], seq_idx).transpose(1, 2).contiguous()    # (B, W, E)
    dt = _step_sizes(dt, dt_bias.detach(), dt_limit)
    decay = torch.exp(dt * negative_exponential(A_log.detach()))
    if seq_idx is not None:
        decay = decay.masked_fill(sequence_starts(seq_idx).unsqueeze(-1), 0.0)
    later = F.pad(decay[:, 1:], (0, 0, 0, 1), value=1.0)                                  # decay of the row behind
    left = dt * later.flip(1).cumprod(1).flip(1)
    left = torch.stack([left, torch.empty_like(left)], dim=1)
    passed = Rows(xBC if xBC.stride(2) == 1 else xBC.contiguous(), left)
    batch, _, heads = dt.shape
    stepped = Rows(xBC.new_empty(batch, num_steps, xBC.shape[2]), left.new_empty(batch, 2, num_steps, heads))
    return KeptRows(passed, stepped, window, conv_weight.t().contiguous())


def mamba2_dual_step(
    zxbcdt: Tensor,
    kept: KeptRows,
    conv_bias: Tensor | None,
    dt_bias: Tensor,
    A_log: Tensor,
    D: Tensor,
    ngroups: int = 1,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-5,
    norm_before_gate: bool = False,
    dt_limit: tuple[float, float] = NO_LIMIT,
) -> Tensor:
    """`mamba2_step` on kept rows, to which it adds one, on the fastest tier there is. Nothing is differentiated.

    zxbcdt (B, 2 d_ssm + 2GN + H); conv_bias (E); dt_bias, A_log (H); D (H) or (H, P); norm_weight (d_ssm) or
    None, norm_before_gate and dt_limit as there.   -> (B, d_ssm) in zxbcdt's dtype"""
    _check(zxbcdt, kept, conv_bias, dt_bias, A_log, D, ngroups, norm_weight)
    out = implementation("mamba2_dual_step", zxbcdt.device)(
        zxbcdt, kept, conv_bias, dt_bias, A_log, D, ngroups, norm_weight, norm_eps, norm_before_gate,
        dt_limit,
    )  # fmt: skip
    kept.count += 1
    return out


@torch.no_grad()
def _dual_step_reference(
    zxbcdt, kept, conv_bias, dt_bias, A_log, D, ngroups, norm_weight, norm_eps, norm_before_gate, dt_limit
):
    (width, channels), heads = kept.taps.shape, dt_bias.shape[0]
    d_ssm = zxbcdt.shape[1] - channels - heads
    size = (channels - d_ssm) // (2 * ngroups)
    z, xBC, dt = zxbcdt.split([d_ssm, channels, heads], dim=-1)
    wide = accumulate_dtype(zxbcdt, kept.taps, A_log)
    kept.window[:, kept.count % width] = xBC
    order = [(kept.count + 1 + k) % width for k in range(width)]                          # oldest input first
    xBC = (kept.window[:, order].to(wide) * kept.taps).sum(1) + (0.0 if conv_bias is None else conv_bias)
    dt = _step_sizes(dt, dt_bias, dt_limit)
    decay = torch.exp(dt * negative_exponential(A_log))                                   # (B, H)
    now, then = kept.count % 2, 1 - kept.count % 2
    kept.stepped.left[:, then, kept.count] = dt
    for rows, rows_there in ((kept.passed, kept.passed.left.shape[2]), (kept.stepped, kept.count)):
        rows.left[:, then, :rows_there] = rows.left[:, now, :rows_there] * decay.unsqueeze(1)
    left = torch.cat([kept.passed.left[:, then], kept.stepped.left[:, then, : kept.count + 1]], dim=1)
    before = [kept.passed.x_B[..., :channels], kept.stepped.x_B[:, : kept.count]]
    newest = F.silu(xBC).unsqueeze(1)
    x_B = torch.cat([*(rows.to(wide) for rows in before), newest], dim=1)                 # (B, t+1, E)
    kept.stepped.x_B[:, kept.count] = newest.squeeze(1)
    x, B, C = x_B.split([d_ssm, ngroups * size, ngroups * size], dim=-1)
    x = x.unflatten(-1, (heads, -1))                                                      # (B, t+1, H, P)
    B, C = (rows.unflatten(-1, (ngroups, size)).repeat_interleave(heads // ngroups, dim=2) for rows in (B, C))
    weight = (B * C[:, -1:]).sum(-1) * left
    y = (weight.unsqueeze(-1) * x).sum(1) + x[:, -1] * (D if D.dim() == 2 else D[:, None])
    y = y.flatten(1)
    if norm_weight is None:
        return (y * F.silu(z)).to(zxbcdt.dtype)
    return rmsnorm_fn(y, norm_weight, None, z.to(wide), norm_eps, d_ssm // ngroups, norm_before_gate).to(zxbcdt.dtype)


register("mamba2_dual_step", "reference", _dual_step_reference)
register_triton("mamba2_dual_step", "dual_step_kernels", "mamba2_dual_step")


def _step_sizes(dt: Tensor, dt_bias: Tensor, dt_limit: tuple[float, float]) -> Tensor:
    return F.softplus(dt.to(accumulate_dtype(dt, dt_bias)) + dt_bias).clamp(*dt_limit)


def _check(zxbcdt, kept, conv_bias, dt_bias, A_log, D, ngroups, norm_weight) -> None:
    name = "mamba2_dual_step"
    parameters = {
        "conv_bias": conv_bias, "dt_bias": dt_bias, "A_log": A_log, "D": D, "norm_weight": norm_weight
    }  # fmt: skip
    check_floating(name, zxbcdt=zxbcdt, **parameters)
    check_device(name, zxbcdt.device, window=kept.window, **parameters)
    if kept.count >= kept.room:
        raise ValueError(f"{name}: the rows were kept for {kept.room} steps, expected none after the last of them")
    batch, _, channels = kept.window.shape
    heads = kept.stepped.left.shape[3]
    d_ssm = zxbcdt.shape[-1] - channels - heads
    check_shape(name, "zxbcdt", zxbcdt, "(B, 2 d_ssm + 2GN + H)", (batch, None))
    if d_ssm < heads or d_ssm % heads or channels <= d_ssm or heads % ngroups or (channels - d_ssm) % (2 * ngroups):
        raise ValueError(
            f"{name}: zxbcdt has {zxbcdt.shape[1]} columns, expected 2 d_ssm + 2GN + H with d_ssm + 2GN = {channels}, "
            f"H = {heads}, G = {ngroups}"
        )
    check_shape(name, "conv_bias", conv_bias, "(d_ssm + 2GN)", (channels,))
    check_shape(name, "dt_bias", dt_bias, "(H)", (heads,))
    check_shape(name, "A_log", A_log, "(H)", (heads,))
    check_shape(name, "D", D, "(H) or (H, P)", (heads,), (heads, d_ssm // heads))
    check_shape(name, "norm_weight", norm_weight, "(d_ssm)", (d_ssm,))

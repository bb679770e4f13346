"""RMSNorm and LayerNorm with a gate, over whole rows or groups of channels.

    norm_before_gate: norm(x) · w · silu(z),   else: norm(x · silu(z)) · w   (+ b inside the norm's affine part)

Letters: D channels; any number of leading axes.
"""

import torch
import torch.nn.functional as F
from torch import nn

from mamba_ssm.ops.checks import check_device, check_floating, check_shape
from mamba_ssm.ops.numerics import accumulate_dtype, without_autocast
from mamba_ssm.ops.tiers import implementation, register, register_operator
from mamba_ssm.ops.triton.launch import register_triton

Tensor = torch.Tensor

register_operator("layernorm_gated", cuda=("triton",))


def layernorm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
) -> Tensor:
    """Gated norm: x, z (..., D); weight, bias (D); group_size divides D, None takes whole rows.   -> like x"""
    _check_gated(x, weight, bias, z, group_size)
    run = implementation("layernorm_gated", x.device)
    return run(x, weight, bias, z, eps, group_size, norm_before_gate, is_rms_norm)


def rmsnorm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
) -> Tensor:
    """`layernorm_fn` with the mean square in place of mean and variance."""
    return layernorm_fn(x, weight, bias, z, eps, group_size, norm_before_gate, is_rms_norm=True)


def rms_norm_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    upcast: bool = True,
) -> Tensor:
    """The judge of `rmsnorm_fn`; with `upcast` false everything stays in x's dtype."""
    _check_gated(x, weight, bias, z, group_size)
    return _gated_norm_reference(x, weight, bias, z, eps, group_size, norm_before_gate, True, upcast)


def _gated_norm_reference(x, weight, bias, z, eps, group_size, norm_before_gate, is_rms_norm, upcast=True):
    with without_autocast(x):
        dtype = accumulate_dtype(x, weight, bias, z) if upcast else x.dtype
        out = x.to(dtype)
        gate = None if z is None else F.silu(z.to(dtype))
        if gate is not None and not norm_before_gate:
            out = out * gate
        grouped = out if group_size is None else out.unflatten(-1, (-1, group_size))
        if not is_rms_norm:
            grouped = grouped - grouped.mean(dim=-1, keepdim=True)
        grouped = grouped * torch.rsqrt(grouped.square().mean(dim=-1, keepdim=True) + eps)
        out = grouped.reshape(x.shape) * weight.to(dtype)
        out = out if bias is None else out + bias.to(dtype)
        if gate is not None and norm_before_gate:
            out = out * gate
        return out.to(x.dtype)


register("layernorm_gated", "reference", _gated_norm_reference)
register_triton("layernorm_gated", "norm_kernels", "gated_norm")


class LayerNorm(nn.Module):
    """Gated LayerNorm with weight and bias (D); x, z (..., D)."""

    is_rms_norm = False

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.eps, self.group_size, self.norm_before_gate = eps, group_size, norm_before_gate
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        bias = None if self.is_rms_norm else nn.Parameter(torch.zeros(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """x, z (..., D) -> like x; z None: no gate."""
        return layernorm_fn(
            x, self.weight, self.bias, z, self.eps, self.group_size, self.norm_before_gate, self.is_rms_norm
        )


class RMSNorm(LayerNorm):
    """Gated RMSNorm with weight (D), no bias; x, z (..., D)."""

    is_rms_norm = True


def _check_gated(x, weight, bias, z, group_size) -> None:
    name = "layernorm_gated"
    check_floating(name, x=x, weight=weight, bias=bias, z=z)
    check_device(name, x.device, weight=weight, bias=bias, z=z)
    check_shape(name, "weight", weight, "(D)", x.shape[-1:])
    check_shape(name, "bias", bias, "(D)", x.shape[-1:])
    check_shape(name, "z", z, "(..., D) like x", x.shape)
    if group_size is not None and (group_size < 1 or x.shape[-1] % group_size):
        raise ValueError(f"{name}: group_size is {group_size}, expected a divisor of D = {x.shape[-1]}")

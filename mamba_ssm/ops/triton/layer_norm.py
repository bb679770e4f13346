"""LayerNorm and RMSNorm, with the residual add before them.

    r = dropout((x + shift) · rowscale) + dropout(x1) + residual
    out = act(norm(r) · w + b),   out1 = act(norm(r) · w1 + b1)

A residual block reads x and the residual stream, and wants both the normed row and the new stream (`prenorm`).

Letters: D channels; any number of leading axes.
"""

import torch
import torch.nn.functional as F
from torch import nn

from mamba_ssm.ops.causal_conv1d import ACTIVATIONS
from mamba_ssm.ops.checks import check_choice, check_device, check_floating, check_shape
from mamba_ssm.ops.numerics import accumulate_dtype, without_autocast
from mamba_ssm.ops.tiers import implementation, register, register_operator
from mamba_ssm.ops.triton.launch import register_triton

Tensor = torch.Tensor

register_operator("layer_norm", cuda=("triton",))


def layer_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    zero_centered_weight: bool = False,
    is_rms_norm: bool = False,
    activation: str | None = None,
    shift: Tensor | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Norm of x plus residual.

    x, x1, residual (..., D); weight, bias, weight1, bias1 (D), weights counted from 1 with `zero_centered_weight`;
    rowscale (...), a factor for each row; dropout on x and x1 wherever dropout_p > 0; activation behind the norm: None,
    "silu" or "swish" (the same); shift (D), the bias of the linear layer that x comes from.
    -> out in x's dtype; with weight1 also out1; with `prenorm` also the residual stream: in float32 (or float64) with
    `residual_in_fp32`, else in residual's dtype, or x's."""
    _check_layer_norm(x, weight, bias, residual, x1, weight1, bias1, rowscale, shift)
    check_choice("layer_norm", "activation", activation, ACTIVATIONS)
    run = implementation("layer_norm", x.device)
    return run(
        x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale, prenorm, residual_in_fp32,
        zero_centered_weight, is_rms_norm, activation, shift,
    )  # fmt: skip


def rms_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    zero_centered_weight: bool = False,
    activation: str | None = None,
    shift: Tensor | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """`layer_norm_fn` with the mean square in place of mean and variance."""
    return layer_norm_fn(
        x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale, prenorm, residual_in_fp32,
        zero_centered_weight, True, activation, shift,
    )  # fmt: skip


def layer_norm_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    zero_centered_weight: bool = False,
    upcast: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """The judge of `layer_norm_fn`: in x's dtype throughout unless `upcast`."""
    _check_layer_norm(x, weight, bias, residual, x1, weight1, bias1, rowscale)
    return _layer_norm_reference(
        x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale, prenorm, False, zero_centered_weight,
        False, None, None, upcast,
    )  # fmt: skip


def rms_norm_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    zero_centered_weight: bool = False,
    upcast: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """The judge of `rms_norm_fn`: in x's dtype throughout unless `upcast`."""
    _check_layer_norm(x, weight, bias, residual, x1, weight1, bias1, rowscale)
    return _layer_norm_reference(
        x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale, prenorm, False, zero_centered_weight,
        True, None, None, upcast,
    )  # fmt: skip


def _layer_norm_reference(
    x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale, prenorm, residual_in_fp32,
    zero_centered_weight, is_rms_norm, activation=None, shift=None, upcast=True,
):  # fmt: skip
    with without_autocast(x):
        dtype = accumulate_dtype(x, weight, residual) if upcast else x.dtype
        stream = x.to(dtype) if shift is None else x.to(dtype) + shift.to(dtype)
        stream = stream if rowscale is None else stream * rowscale.to(dtype).unsqueeze(-1)
        stream = F.dropout(stream, dropout_p) if dropout_p > 0.0 else stream
        if x1 is not None:
            stream = stream + (F.dropout(x1.to(dtype), dropout_p) if dropout_p > 0.0 else x1.to(dtype))
        stream = stream if residual is None else stream + residual.to(dtype)
        centred = stream if is_rms_norm else stream - stream.mean(dim=-1, keepdim=True)
        normed = centred * torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + eps)
        results = [_affine(normed, weight, bias, zero_centered_weight)]
        if weight1 is not None:
            results.append(_affine(normed, weight1, bias1, zero_centered_weight))
        results = [(F.silu(out) if activation else out).to(x.dtype) for out in results]
        if prenorm:
            kept = accumulate_dtype(stream) if residual_in_fp32 else (x if residual is None else residual).dtype
            results.append(stream.to(kept))
    return results[0] if len(results) == 1 else tuple(results)


def _affine(normed: Tensor, weight: Tensor, bias: Tensor | None, zero_centered_weight: bool) -> Tensor:
    weight = weight.to(normed.dtype) + 1.0 if zero_centered_weight else weight.to(normed.dtype)
    return normed * weight if bias is None else torch.addcmul(bias.to(normed.dtype), normed, weight)


register("layer_norm", "reference", _layer_norm_reference)
register_triton("layer_norm", "norm_kernels", "layer_norm")


class RMSNorm(nn.Module):
    """RMSNorm with weight (D), optionally after adding x to a residual stream, with dropout on x in training, and an
    activation (None, "silu") behind it."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        dropout_p: float = 0.0,
        zero_centered_weight: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        activation: str | None = None,
    ):
        super().__init__()
        check_choice("RMSNorm", "activation", activation, ACTIVATIONS)
        self.eps, self.dropout_p, self.zero_centered_weight = eps, dropout_p, zero_centered_weight
        self.activation = activation
        make = torch.zeros if zero_centered_weight else torch.ones
        self.weight = nn.Parameter(make(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)

    def forward(
        self, x: Tensor, residual: Tensor | None = None, prenorm: bool = False, residual_in_fp32: bool = False,
        shift: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """x, residual (..., D), shift (D), the bias of the layer before -> normed row like x, and with `prenorm` the
        new residual stream."""
        return rms_norm_fn(
            x, self.weight, self.bias, residual, eps=self.eps, dropout_p=self.dropout_p if self.training else 0.0,
            prenorm=prenorm, residual_in_fp32=residual_in_fp32, zero_centered_weight=self.zero_centered_weight,
            activation=self.activation, shift=shift,
        )  # fmt: skip


def _check_layer_norm(x, weight, bias, residual, x1, weight1, bias1, rowscale, shift=None) -> None:
    name = "layer_norm"
    affine = {"weight": weight, "bias": bias, "weight1": weight1, "bias1": bias1, "shift": shift}
    rows = {"residual": residual, "x1": x1}
    check_floating(name, x=x, **affine, **rows, rowscale=rowscale)
    check_device(name, x.device, **affine, **rows, rowscale=rowscale)
    for argument, tensor in affine.items():
        check_shape(name, argument, tensor, "(D)", x.shape[-1:])
    for argument, tensor in rows.items():
        check_shape(name, argument, tensor, "(..., D) like x", x.shape)
    check_shape(name, "rowscale", rowscale, "x's shape without D", x.shape[:-1])

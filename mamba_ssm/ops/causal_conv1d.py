"""Causal depthwise convolution and its one-step update.

    out_t = act(bias + Σ_k weight[k] x_{t-W+1+k}),  k = 0..W-1

Rows before the first come from `initial_states`, or are zero. With `seq_idx` a row sees only rows of its own piece.

Letters: B batch, L length, D channels, W width, S length of the rolling window (S >= W-1).
"""

import torch
import torch.nn.functional as F

from mamba_ssm.ops import conv1d_package
from mamba_ssm.ops.checks import check_choice, check_device, check_floating, check_integer, check_shape
from mamba_ssm.ops.numerics import accumulate_dtype, sequence_pieces, without_autocast
from mamba_ssm.ops.tiers import implementation, register, register_operator
from mamba_ssm.ops.triton.launch import register_triton

Tensor = torch.Tensor

ACTIVATIONS = (None, "silu", "swish")

register_operator("causal_conv1d", cuda=("triton", "cuda") if conv1d_package.INSTALLED else ("triton",))
register_operator("causal_conv1d_update", cuda=("triton",))


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    activation: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal depthwise convolution over the last axis.

    x (B, D, L); weight (D, W); bias (D); seq_idx (B, L) integers; initial_states (B, D, W-1), the inputs before the
    first row, of the first row's seq_idx; activation None, "silu" or "swish" (the same).
    -> out (B, D, L) in x's dtype, and with `return_final_states` the last W-1 inputs (B, D, W-1) in x's dtype, zero
    where they belong to an earlier piece than the last row."""
    _check_conv(x, weight, bias, seq_idx, initial_states, activation)
    run = implementation("causal_conv1d", x.device)
    return run(x, weight, bias, seq_idx, initial_states, return_final_states, activation)


def causal_conv1d_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    activation: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The judge: one multiply-add for each tap, in plain PyTorch, as `causal_conv1d_fn` in all else."""
    _check_conv(x, weight, bias, seq_idx, initial_states, activation)
    return _conv_reference(x, weight, bias, seq_idx, initial_states, return_final_states, activation)


def causal_conv1d_update(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """One step of `causal_conv1d_fn`, or several: x (B, D) or (B, D, L), conv_state (B, D, S >= W-1) holds the last S
    inputs and is moved on in place. -> out of x's shape and dtype."""
    name = "causal_conv1d_update"
    check_floating(name, x=x, conv_state=conv_state, weight=weight, bias=bias)
    check_device(name, x.device, conv_state=conv_state, weight=weight, bias=bias)
    check_shape(name, "x", x, "(B, D) or (B, D, L)", (None, None), (None, None, None))
    check_shape(name, "weight", weight, "(D, W)", (x.shape[1], None))
    check_shape(name, "bias", bias, "(D)", (x.shape[1],))
    check_shape(name, "conv_state", conv_state, "(B, D, S)", (*x.shape[:2], None))
    least = weight.shape[1] - 1
    if conv_state.shape[2] < least:
        raise ValueError(f"{name}: conv_state has shape {tuple(conv_state.shape)}, expected S >= W-1 = {least}")
    check_choice(name, "activation", activation, ACTIVATIONS)
    return implementation(name, x.device)(x, conv_state, weight, bias, activation)


def causal_conv1d_window(
    x: Tensor, length: int, seq_idx: Tensor | None = None, initial_states: Tensor | None = None
) -> Tensor:
    """The last `length` inputs after a pass over x (B, D, L), as `causal_conv1d_update` keeps them: (B, D, length).

    initial_states (B, D, S) are the inputs before the first row; what is missing, or of an earlier piece than the last
    row, is zero."""
    batch, channels, seqlen = x.shape
    before = x.new_zeros(batch, channels, length) if initial_states is None else initial_states.to(x.dtype)
    before = F.pad(before, (length - before.shape[2], 0))                                 # cuts or pads on the left
    kept = min(length, seqlen)
    window = torch.cat([before[:, :, kept:], x[:, :, seqlen - kept :]], dim=2)            # (B, D, length)
    if seq_idx is None or seqlen == 0:
        return window
    pieces = F.pad(sequence_pieces(seq_idx), (length, 0))[:, seqlen:]                     # rows before: piece 0
    return window.masked_fill((pieces != pieces[:, -1:]).unsqueeze(1), 0.0)


def causal_conv1d_varlen_states(x: Tensor, cu_seqlens: Tensor, state_len: int) -> Tensor:
    """The last `state_len` inputs of each packed sequence, zeros where one is shorter.

    x (L, D); cu_seqlens (S+1) integers   -> (S, D, state_len)"""
    name = "causal_conv1d_varlen_states"
    check_shape(name, "x", x, "(L, D)", (None, None))
    check_shape(name, "cu_seqlens", cu_seqlens, "(S+1)", (None,))
    check_integer(name, cu_seqlens=cu_seqlens)
    rows = cu_seqlens[1:, None].long() + torch.arange(-state_len, 0, device=x.device)      # (S, state_len)
    before = rows < cu_seqlens[:-1, None]
    return x[rows.clamp(min=0)].masked_fill(before.unsqueeze(-1), 0.0).transpose(1, 2)


def _conv_reference(x, weight, bias, seq_idx, initial_states, return_final_states, activation):
    width, seqlen = weight.shape[1], x.shape[2]
    with without_autocast(x):
        dtype = accumulate_dtype(x, weight, bias, initial_states)
        padded = _prepend(x.to(dtype), initial_states, width)                             # (B, D, W-1 + L)
        pieces = None if seq_idx is None else F.pad(sequence_pieces(seq_idx), (width - 1, 0))
        out = None if bias is None else bias.to(dtype)[:, None]
        for k, tap in enumerate(weight.to(dtype).unbind(1)):
            rows = padded[:, :, k : k + seqlen]                                           # (B, D, L)
            if pieces is not None and k < width - 1:
                other = pieces[:, k : k + seqlen] != pieces[:, width - 1 :]
                rows = rows.masked_fill(other.unsqueeze(1), 0.0)
            out = rows * tap[:, None] if out is None else torch.addcmul(out, rows, tap[:, None])
        out = (F.silu(out) if activation else out).to(x.dtype)
    if not return_final_states:
        return out
    return out, causal_conv1d_window(x, width - 1, seq_idx, initial_states)


def _prepend(x: Tensor, initial_states: Tensor | None, width: int) -> Tensor:
    if initial_states is None:
        return F.pad(x, (width - 1, 0))
    return torch.cat([initial_states.to(x.dtype), x], dim=2)


def _update_reference(x, conv_state, weight, bias, activation):
    rows = x.unsqueeze(-1) if x.dim() == 2 else x                                         # (B, D, L)
    width = weight.shape[1]
    before = conv_state[:, :, conv_state.shape[2] - (width - 1) :]
    out = _conv_reference(rows, weight, bias, None, before, False, activation)
    conv_state.copy_(torch.cat([conv_state, rows.detach().to(conv_state.dtype)], dim=2)[:, :, rows.shape[2] :])
    return out.squeeze(-1) if x.dim() == 2 else out


def _conv_package(x, weight, bias, seq_idx, initial_states, return_final_states, activation):
    """Where Triton can't run: the package's kernel for what it takes, our reference for the rest."""
    if not conv1d_package.takes(x, weight, seq_idx, initial_states, return_final_states):
        return _conv_reference(x, weight, bias, seq_idx, initial_states, return_final_states, activation)
    return conv1d_package.run(x, weight, bias, activation)


register("causal_conv1d", "reference", _conv_reference)
register_triton("causal_conv1d", "causal_conv1d_kernels", "causal_conv1d")
if conv1d_package.INSTALLED:
    register("causal_conv1d", "cuda", _conv_package)
register("causal_conv1d_update", "reference", _update_reference)
register_triton("causal_conv1d_update", "causal_conv1d_kernels", "causal_conv1d_update")


def _check_conv(x, weight, bias, seq_idx, initial_states, activation) -> None:
    name = "causal_conv1d"
    check_floating(name, x=x, weight=weight, bias=bias, initial_states=initial_states)
    check_integer(name, seq_idx=seq_idx)
    check_device(name, x.device, weight=weight, bias=bias, seq_idx=seq_idx, initial_states=initial_states)
    check_shape(name, "x", x, "(B, D, L)", (None, None, None))
    batch, channels, seqlen = x.shape
    check_shape(name, "weight", weight, "(D, W)", (channels, None))
    check_shape(name, "bias", bias, "(D)", (channels,))
    check_shape(name, "seq_idx", seq_idx, "(B, L)", (batch, seqlen))
    check_shape(name, "initial_states", initial_states, "(B, D, W-1)", (batch, channels, weight.shape[1] - 1))
    check_choice(name, "activation", activation, ACTIVATIONS)

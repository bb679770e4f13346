"""Pre-norm residual block: stream ← stream + branch(norm(stream)) for the mixer, then for the MLP if there is one.

The add of one branch and the norm of the next are one operator: a block takes the previous branch and the stream, and
returns its own branch and the stream that the previous branch has been added to.

Letters: B batch, L length, M width.
"""

from collections.abc import Callable

import torch
from torch import nn

from mamba_ssm.ops.numerics import accumulate_dtype
from mamba_ssm.ops.triton.layer_norm import RMSNorm, layer_norm_fn
from mamba_ssm.utils.generation import InferenceParams

Tensor = torch.Tensor


class Block(nn.Module):
    """Norm and mixer, then norm2 and mlp unless mlp_cls makes an nn.Identity; dropout on each branch in training."""

    def __init__(
        self,
        dim: int,
        mixer_cls: Callable[[int], nn.Module],
        mlp_cls: Callable[[int], nn.Module],
        norm_cls: Callable[[int], nn.Module] = nn.LayerNorm,
        fused_add_norm: bool = False,
        residual_in_fp32: bool = False,
        dropout: float = 0.0,
    ):
        """norm_cls makes RMSNorms or nn.LayerNorms; residual_in_fp32 keeps the stream in float32 at least."""
        super().__init__()
        self.fused_add_norm, self.residual_in_fp32 = fused_add_norm, residual_in_fp32
        self.norm = norm_cls(dim)
        self.mixer = mixer_cls(dim)
        self.dropout = nn.Dropout(dropout)
        mlp = mlp_cls(dim)
        if isinstance(mlp, nn.Identity):
            self.mlp = None
        else:
            self.norm2 = norm_cls(dim)
            self.mlp = mlp
        if fused_add_norm and not isinstance(self.norm, (RMSNorm, nn.LayerNorm)):
            made = type(self.norm).__name__
            raise TypeError(f"Block: norm_cls makes {made}, expected RMSNorm or nn.LayerNorm with fused_add_norm")

    def forward(
        self,
        hidden_states: Tensor,
        residual: Tensor | None = None,
        inference_params: InferenceParams | None = None,
        normed: Tensor | None = None,
        **mixer_kwargs,
    ) -> tuple[Tensor, Tensor]:
        """hidden_states (B, L, M), the branch not added yet; residual (B, L, M), the stream, None in the first block;
        normed (B, L, M): what a first block's norm makes of hidden_states, where that is there already;
        mixer_kwargs go to the mixer (seq_idx, state, ...).   -> branch (B, L, M), stream (B, L, M)"""
        if normed is None:
            normed, residual = self._add_norm(self.norm, hidden_states, residual)
        else:
            residual = hidden_states
        hidden_states = self.dropout(self.mixer(normed, inference_params=inference_params, **mixer_kwargs))
        if self.mlp is not None:
            hidden_states, residual = self._add_norm(self.norm2, hidden_states, residual)
            hidden_states = self.dropout(self.mlp(hidden_states))
        return hidden_states, residual

    def allocate_inference_cache(self, batch_size: int, max_seqlen: int | None = None, **kwargs) -> object:
        """The mixer's."""
        return self.mixer.allocate_inference_cache(batch_size, max_seqlen, **kwargs)

    def _add_norm(self, norm: nn.Module, hidden_states: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.fused_add_norm:
            return add_norm(norm, hidden_states, residual, prenorm=True, residual_in_fp32=self.residual_in_fp32)
        residual = hidden_states if residual is None else hidden_states + residual
        normed = norm(residual.to(norm.weight.dtype))
        return normed, residual.to(accumulate_dtype(residual)) if self.residual_in_fp32 else residual


def add_norm(
    norm: nn.Module,
    hidden_states: Tensor,
    residual: Tensor | None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`norm` (RMSNorm or nn.LayerNorm) of hidden_states + residual in one operator, (B, L, M) each."""
    return layer_norm_fn(
        hidden_states, norm.weight, norm.bias, residual=residual, eps=norm.eps, prenorm=prenorm,
        residual_in_fp32=residual_in_fp32, is_rms_norm=isinstance(norm, RMSNorm),
    )  # fmt: skip

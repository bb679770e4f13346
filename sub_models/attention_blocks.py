"""Blocks of the Transformer core: causal attention with a key/value cache, and the feed-forward block.

Both are post-norm residual blocks as in STORM (arXiv 2310.09615): out = LayerNorm(x + dropout(f(x))).

Letters: B batch, L new time steps, T steps in the cache, M heads, D width.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LAYER_NORM_EPS = 1e-6


class SelfAttentionBlock(nn.Module):
    """Multi-head self-attention, four projections without bias, residual, LayerNorm.

    Args:
        d_model: width D.
        num_heads: heads M; must divide d_model.
        dropout: of the attention probabilities and of the output.
    """

    def __init__(self, d_model: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        if d_model % num_heads:
            raise ValueError(f"SelfAttentionBlock: d_model={d_model} is not a multiple of num_heads={num_heads}")
        self.num_heads, self.headdim, self.dropout = num_heads, d_model // num_heads, dropout
        self.query = nn.Linear(d_model, d_model, bias=False)
        self.key = nn.Linear(d_model, d_model, bias=False)
        self.value = nn.Linear(d_model, d_model, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)
        self.norm = nn.LayerNorm(d_model, eps=LAYER_NORM_EPS)

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, self.headdim)).transpose(1, 2)  # (B, M, L, D/M)

    def project_key_value(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x (B, L, D) -> keys and values, (B, M, L, D/M) each."""
        return self._split_heads(self.key(x)), self._split_heads(self.value(x))

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Attend from x to keys and values.

        x (B, L, D); keys, values (B, M, T, D/M); mask (B, 1, L, T) bool, True where a query may look, None for the
        plain causal mask of L = T -> (B, L, D).
        """
        mixed = F.scaled_dot_product_attention(
            self._split_heads(self.query(x)),
            keys.to(values.dtype),
            values,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=mask is None,
        )  # (B, M, L, D/M)
        mixed = F.dropout(self.out(mixed.transpose(1, 2).flatten(-2)), self.dropout, self.training)
        return self.norm(x + mixed)


class FeedForwardBlock(nn.Module):
    """Linear to d_hidden, ReLU, linear back, residual, LayerNorm.   (B, L, D) -> (B, L, D)."""

    def __init__(self, d_model: int, d_hidden: int, dropout: float) -> None:
        super().__init__()
        self.inner = nn.Linear(d_model, d_hidden)
        self.outer = nn.Linear(d_hidden, d_model)
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(d_model, eps=LAYER_NORM_EPS)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.dropout(self.outer(F.relu(self.inner(x)))))


def visible_pairs(query_segment: Tensor, key_segment: Tensor, query_slot: Tensor, key_slot: Tensor) -> Tensor:
    """Which keys a query may see: the same segment, and not later.

    query_segment (B, L), key_segment (B, T), query_slot (L,), key_slot (T,) -> (B, 1, L, T) bool.
    """
    same = query_segment.unsqueeze(-1) == key_segment.unsqueeze(-2)  # (B, L, T)
    past = key_slot.unsqueeze(0) <= query_slot.unsqueeze(-1)  # (L, T)
    return (same & past).unsqueeze(1)


def segment_positions(segment: Tensor, first_position: Tensor) -> Tensor:
    """Position of each step inside its segment, where the first segment goes on from an earlier pass.

    segment (B, L) changes value where a new piece begins; first_position (B,) int64 is the position of step 0
    -> (B, L) int64.
    """
    index = torch.arange(segment.shape[1], device=segment.device)
    begins = torch.zeros_like(segment, dtype=torch.bool)
    begins[:, 1:] = segment[:, 1:] != segment[:, :-1]
    last_begin = torch.where(begins, index, 0).cummax(dim=1).values  # (B, L), 0 while in the first segment
    in_first = begins.cumsum(dim=1) == 0
    return index - last_begin + in_first * first_position.unsqueeze(-1)

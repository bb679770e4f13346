"""The Transformer core of the world model, kept for comparison with the state-space cores (after STORM, arXiv
2310.09615).

It has the same interface as `mamba_ssm.MambaWrapperModel`: a parallel pass over a sequence, which may continue from a
state, and a single step that updates the state in place. The state here is a key/value cache.

Letters: B batch, L new time steps, T slots of the cache, M heads, D width, Z latent width, A action width.
"""

import torch
from torch import Tensor, nn

from mamba_ssm.modules.aligned_linear import AlignedLinear
from sub_models.attention_blocks import (
    LAYER_NORM_EPS,
    FeedForwardBlock,
    SelfAttentionBlock,
    segment_positions,
    visible_pairs,
)


class TransformerState:
    """Key/value cache of a Transformer core.

    `length` (a Python int) slots are in use. `segment` tells which piece each slot belongs to, `position` (B,) the
    position that the next step of the current piece takes.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values  # (n_layer, B, M, T, D/M)
        batch_size, max_seqlen = keys.shape[1], keys.shape[3]
        self.segment = torch.zeros(batch_size, max_seqlen, dtype=torch.int64, device=keys.device)
        self.current_segment = torch.zeros(batch_size, dtype=torch.int64, device=keys.device)
        self.position = torch.zeros(batch_size, dtype=torch.int64, device=keys.device)
        self.length = 0

    def reset_rows(self, mask: Tensor) -> None:
        """Begin a new sequence in the rows where mask (B,) bool is True; what they held stays but is not seen again."""
        self.current_segment.add_(mask)
        self.position.mul_(~mask)

    def claim(self, num_steps: int) -> slice:
        """The next free slots.   Raises ValueError when the cache is too short."""
        max_seqlen = self.keys.shape[3]
        if self.length + num_steps > max_seqlen:
            raise ValueError(
                f"TransformerState: {self.length} steps are held and {num_steps} more are asked for, but max_seqlen is "
                f"{max_seqlen}"
            )
        slots = slice(self.length, self.length + num_steps)
        self.length += num_steps
        return slots


class StochasticTransformer(nn.Module):
    """Transformer over (latent, action) pairs with learned positions.

    Args:
        stoch_dim: Z, width of the flattened latent.
        action_dim: A, width of the encoded action.
        d_model: width D.
        num_layers, num_heads: of the causal blocks; the feed-forward width is 2D.
        max_seqlen: number of learned positions: no piece may be longer.
        dropout: probability in attention, residual branches and behind the position sum.
    """

    def __init__(
        self,
        stoch_dim: int,
        action_dim: int,
        d_model: int,
        num_layers: int,
        num_heads: int,
        max_seqlen: int,
        dropout: float,
    ) -> None:
        super().__init__()
        self.d_model, self.max_seqlen = d_model, max_seqlen
        self.stem = nn.Sequential(
            AlignedLinear(stoch_dim + action_dim, d_model, bias=False),
            nn.LayerNorm(d_model, eps=LAYER_NORM_EPS),
            nn.ReLU(),
            nn.Linear(d_model, d_model, bias=False),
            nn.LayerNorm(d_model, eps=LAYER_NORM_EPS),
        )
        self.positions = nn.Embedding(max_seqlen, d_model)
        self.norm = nn.LayerNorm(d_model, eps=LAYER_NORM_EPS)
        self.dropout = nn.Dropout(dropout)
        self.attentions = nn.ModuleList(SelfAttentionBlock(d_model, num_heads, dropout) for _ in range(num_layers))
        self.feed_forwards = nn.ModuleList(FeedForwardBlock(d_model, 2 * d_model, dropout) for _ in range(num_layers))

    def init_state(
        self, batch_size: int, max_seqlen: int | None = None, device: torch.device | None = None
    ) -> TransformerState:
        """An empty cache for `max_seqlen` steps (default: all positions) of `batch_size` sequences."""
        weight = self.positions.weight
        block = self.attentions[0]
        shape = (len(self.attentions), batch_size, block.num_heads, max_seqlen or self.max_seqlen, block.headdim)
        keys = torch.zeros(shape, dtype=weight.dtype, device=device or weight.device)
        return TransformerState(keys, torch.zeros_like(keys))

    def _embed(self, stoch: Tensor, action: Tensor, position: Tensor) -> Tensor:
        x = self.stem(torch.cat((stoch, action.to(stoch.dtype)), dim=-1))  # (B, L, D)
        return self.dropout(self.norm(x + self.positions(position)))

    def forward(
        self, stoch: Tensor, action: Tensor, seq_idx: Tensor | None = None, state: TransformerState | None = None
    ) -> Tensor:
        """Parallel pass.

        stoch (B, L, Z); action (B, L, A); seq_idx (B, L) integers: steps of different index don't see each other, and
        positions restart where it changes; state: continue from it (its steps belong to the index of the first step)
        and leave the longer cache in it -> deter (B, L, D).

        Raises:
            ValueError: the sequence is longer than the learned positions or than the state's cache.
        """
        batch_size, seqlen = stoch.shape[:2]
        held = 0 if state is None else state.length
        if held + seqlen > self.max_seqlen:
            raise ValueError(
                f"StochasticTransformer: {held} held and {seqlen} new steps, but there are {self.max_seqlen} positions"
            )
        if state is not None:
            return self._continue(stoch, action, seq_idx, state)
        if seq_idx is None:
            position = torch.arange(seqlen, device=stoch.device).expand(batch_size, seqlen)
            mask = None
        else:
            start = torch.zeros(batch_size, dtype=torch.int64, device=stoch.device)
            slots = torch.arange(seqlen, device=stoch.device)
            position = segment_positions(seq_idx, start)
            mask = visible_pairs(seq_idx, seq_idx, slots, slots)
        x = self._embed(stoch, action, position)
        for attention, feed_forward in zip(self.attentions, self.feed_forwards, strict=True):
            keys, values = attention.project_key_value(x)
            x = feed_forward(attention(x, keys, values, mask))
        return x

    def start(
        self, stoch: Tensor, action: Tensor, seq_idx: Tensor | None = None, max_seqlen: int | None = None
    ) -> tuple[Tensor, TransformerState]:
        """`forward` of sequences that start, and a cache of `max_seqlen` steps that holds them."""
        state = self.init_state(stoch.shape[0], max_seqlen)
        return self(stoch, action, seq_idx, state), state

    def _continue(self, stoch: Tensor, action: Tensor, seq_idx: Tensor | None, state: TransformerState) -> Tensor:
        """The pass with a cache: L new steps after `state.length` held ones."""
        batch_size, seqlen = stoch.shape[:2]
        if seq_idx is None:
            segment = state.current_segment.unsqueeze(-1).expand(batch_size, seqlen)
        else:  # the state's numbering goes on: first step of the pass = the state's current piece
            begins = torch.zeros_like(seq_idx, dtype=torch.int64)
            begins[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
            segment = state.current_segment.unsqueeze(-1) + begins.cumsum(dim=1)
        position = segment_positions(segment, state.position)
        slots = state.claim(seqlen)
        state.segment[:, slots] = segment
        state.current_segment.copy_(segment[:, -1])
        state.position.copy_(position[:, -1] + 1)
        slot_index = torch.arange(slots.stop, device=stoch.device)
        mask = visible_pairs(segment, state.segment[:, : slots.stop], slot_index[slots], slot_index)

        x = self._embed(stoch, action, position)
        for layer, (attention, feed_forward) in enumerate(zip(self.attentions, self.feed_forwards, strict=True)):
            keys, values = attention.project_key_value(x)
            state.keys[layer, :, :, slots] = keys.to(state.keys.dtype)
            state.values[layer, :, :, slots] = values.to(state.values.dtype)
            held_keys = state.keys[layer, :, :, : slots.stop].to(values.dtype)
            held_values = state.values[layer, :, :, : slots.stop].to(values.dtype)
            x = feed_forward(attention(x, held_keys, held_values, mask))
        return x

    def step(self, stoch: Tensor, action: Tensor, state: TransformerState, reset: Tensor | None = None) -> Tensor:
        """One step; rows where reset (B,) bool is True begin a new sequence first.

        stoch (B, Z), action (B, A), state updated in place -> deter (B, D).
        """
        if reset is not None:
            state.reset_rows(reset)
        return self._continue(stoch.unsqueeze(1), action.unsqueeze(1), None, state).squeeze(1)

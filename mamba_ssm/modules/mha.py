"""Attention beside state-space layers: grouped queries, rotary positions, optional short convolution and parallel MLP.

    out = softmax(q kᵀ · scale) v,   key j visible to query i if j <= i (causal) and both are of one piece of seq_idx

Letters: B batch, L length, M embed_dim, H query heads, K key/value heads, P head_dim, T max_seqlen of the cache,
W convolution width, S packed sequences. With a process group every count but M is this rank's share.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import ProcessGroup

from mamba_ssm.distributed.tensor_parallel import column_linear, row_linear
from mamba_ssm.modules.cache import check_packed_prompts
from mamba_ssm.ops.causal_conv1d import (
    causal_conv1d_fn,
    causal_conv1d_update,
    causal_conv1d_varlen_states,
    causal_conv1d_window,
)
from mamba_ssm.ops.checks import check_shape
from mamba_ssm.ops.numerics import accumulate_dtype, packed_seq_idx, sequence_pieces
from mamba_ssm.utils.generation import InferenceParams

Tensor = torch.Tensor
AttentionCache = tuple[Tensor, Tensor | None]


class RotaryEmbedding(nn.Module):
    """Rotates pairs of the first `dim` channels of a head by position · base^(-2i/dim)."""

    def __init__(
        self, dim: int, base: float = 10000.0, interleaved: bool = False, device: torch.device | str | None = None
    ):
        """interleaved pairs channels (0, 1), (2, 3) ..., else channel i with i + dim/2."""
        super().__init__()
        if dim % 2:
            raise ValueError(f"RotaryEmbedding: dim is {dim}, expected an even number")
        self.dim, self.interleaved = dim, interleaved
        exponent = torch.arange(0, dim, 2, device=device, dtype=torch.float64) / dim
        self.register_buffer("inv_freq", (1.0 / base**exponent).float(), persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x (B, L, heads, P), positions (B or 1, L) -> like x"""
        dtype = accumulate_dtype(x)
        angle = positions.to(dtype).unsqueeze(-1) * self.inv_freq.to(dtype)               # (B, L, dim/2)
        cos, sin = angle.cos().unsqueeze(2), angle.sin().unsqueeze(2)
        rotated, rest = x[..., : self.dim].to(dtype), x[..., self.dim :]
        pairs = rotated.unflatten(-1, (-1, 2) if self.interleaved else (2, -1))
        first, second = pairs.unbind(-1 if self.interleaved else -2)
        turned = torch.stack(
            [first * cos - second * sin, first * sin + second * cos], dim=-1 if self.interleaved else -2
        )
        return torch.cat([turned.flatten(-2).to(x.dtype), rest], dim=-1)


class MHA(nn.Module):
    """Multi-head attention, (B, L, M) -> (B, L, M)."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_heads_kv: int | None = None,
        head_dim: int | None = None,
        mlp_dim: int = 0,
        qkv_proj_bias: bool = True,
        out_proj_bias: bool = True,
        softmax_scale: float | None = None,
        causal: bool = False,
        layer_idx: int | None = None,
        d_conv: int = 0,
        rotary_emb_dim: int = 0,
        rotary_emb_base: float = 10000.0,
        rotary_emb_interleaved: bool = False,
        process_group: ProcessGroup | None = None,
        sequence_parallel: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        """num_heads_kv divides num_heads (None: the same); head_dim None is M / num_heads; mlp_dim > 0 adds a gated MLP
        of half that width (rounded up to a multiple of 256) beside the heads; softmax_scale None is 1/√P; d_conv > 0
        puts a causal convolution over q, k and v; rotary_emb_dim 0 leaves positions out."""
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        world = 1 if process_group is None else dist.get_world_size(process_group)
        num_heads_kv = num_heads if num_heads_kv is None else num_heads_kv
        mlp_dim = -(-mlp_dim // 256) * 256
        _check_heads(embed_dim, num_heads, num_heads_kv, head_dim, mlp_dim // 2, world)
        self.embed_dim, self.layer_idx, self.d_conv = embed_dim, layer_idx, d_conv
        self.process_group, self.sequence_parallel = process_group, sequence_parallel
        self.num_heads, self.num_heads_kv, self.mlp_dim = num_heads // world, num_heads_kv // world, mlp_dim // world
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        self.softmax_scale, self.causal = softmax_scale, causal
        self.rotary_emb_dim = rotary_emb_dim
        if rotary_emb_dim > 0:
            self.rotary_emb = RotaryEmbedding(rotary_emb_dim, rotary_emb_base, rotary_emb_interleaved, device)
        qkv_dim = self.head_dim * (num_heads + 2 * num_heads_kv)
        self.in_proj = column_linear(
            embed_dim, qkv_dim + mlp_dim, process_group, sequence_parallel, bias=qkv_proj_bias, **factory
        )
        if d_conv > 0:
            local = qkv_dim // world
            self.conv1d = nn.Conv1d(local, local, d_conv, groups=local, padding=d_conv - 1, **factory)
        out_dim = self.head_dim * num_heads + mlp_dim // 2
        self.out_proj = row_linear(
            out_dim, embed_dim, process_group, sequence_parallel, bias=out_proj_bias, **factory
        )

    def parallel_parts(self) -> dict[str, list[int]]:
        """Widths along in_proj's, conv1d's and out_proj's axis that each rank of a group takes its own share of."""
        qkv = [heads * self.head_dim for heads in (self.num_heads, self.num_heads_kv, self.num_heads_kv)]
        half = self.mlp_dim // 2
        return {"in_proj": [*qkv, half, half], "conv1d": qkv, "out_proj": [qkv[0], half]}

    def allocate_inference_cache(
        self,
        batch_size: int,
        max_seqlen: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> AttentionCache:
        """(kv_cache (B, T, 2, K, P), conv_state (B, (H + 2K)P, W) or None without a convolution)."""
        weight = self.out_proj.weight
        dtype, device = weight.dtype if dtype is None else dtype, weight.device if device is None else device
        factory = {"dtype": dtype, "device": device}
        kv_cache = torch.zeros(batch_size, max_seqlen, 2, self.num_heads_kv, self.head_dim, **factory)
        if self.d_conv == 0:
            return kv_cache, None
        return kv_cache, torch.zeros(batch_size, self.conv1d.in_channels, self.d_conv, **factory)

    def forward(
        self,
        x: Tensor,
        inference_params: InferenceParams | None = None,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        seqlen: int | None = None,
    ) -> Tensor:
        """x (B, L, M), or with seqlen = L (B·L, M), of which each rank holds its B·L/W rows if it is sequence-parallel;
        seq_idx (B, L) integers, rows of different index don't see each other; cu_seqlens (S+1) integers: starts and end
        of sequences packed into B = 1 row. inference_params: the rows continue the cached ones; with cu_seqlens the S
        sequences start, and fill S rows of the cache, each with its own length.   -> like x"""
        flat = seqlen is not None
        check_shape("MHA", "x", x, "(B, L, M), (B·L, M) with seqlen", (None,) * (2 - flat) + (self.embed_dim,))
        rows = self.in_proj(x)
        rows = rows.unflatten(0, (-1, seqlen)) if flat else rows                          # (B, L, (H + 2K)P + MLP)
        qkv, mlp = rows.split([rows.shape[-1] - self.mlp_dim, self.mlp_dim], dim=-1)
        if inference_params is None:
            if cu_seqlens is not None and seq_idx is None:
                seq_idx = packed_seq_idx(cu_seqlens, rows.shape[1])
            context = self._attend_to_rows(qkv, seq_idx)
        else:
            self._check_cached(seq_idx)
            context = (
                self._attend_to_cache(qkv, inference_params)
                if cu_seqlens is None
                else self._attend_to_packed(qkv, cu_seqlens, inference_params)
            )
        if self.mlp_dim > 0:
            value, gate = mlp.chunk(2, dim=-1)
            context = torch.cat([context, value * F.silu(gate)], dim=-1)
        return self.out_proj(context.flatten(0, 1) if flat else context)

    def step(self, x: Tensor, inference_params: InferenceParams) -> Tensor:
        """The next row x (B, 1, M) behind the cached ones; as `forward`, which it is."""
        check_shape("MHA.step", "x", x, "(B, 1, M)", (None, 1, self.embed_dim))
        return self(x, inference_params)

    def _attend_to_rows(self, qkv: Tensor, seq_idx: Tensor | None) -> Tensor:
        if self.d_conv > 0:
            qkv = self._convolve(qkv.transpose(1, 2), seq_idx, None).transpose(1, 2)
        positions = torch.arange(qkv.shape[1], device=qkv.device).unsqueeze(0)            # (1, L)
        q, k, v = self._heads(qkv, positions)
        visible = None if seq_idx is None else self._visible(seq_idx)
        return self._attend(q, k, v, visible, is_causal=self.causal and visible is None)

    def _visible(self, seq_idx: Tensor) -> Tensor:
        """(B, L) -> (B, L, L), true where a row's query sees another's key."""
        pieces = sequence_pieces(seq_idx)
        visible = pieces.unsqueeze(2) == pieces.unsqueeze(1)
        return visible.tril() if self.causal else visible

    def _check_cached(self, seq_idx: Tensor | None) -> None:
        if seq_idx is not None:
            raise ValueError("MHA: seq_idx given with a cache, expected one sequence in each of its rows")
        if not self.causal:
            raise ValueError("MHA: causal is false, expected true with a cache: earlier rows can't see later ones")

    def _attend_to_packed(self, qkv: Tensor, cu_seqlens: Tensor, inference_params: InferenceParams) -> Tensor:
        seq_idx = packed_seq_idx(cu_seqlens, qkv.shape[1]).long()                         # (1, L)
        check_packed_prompts("MHA", qkv, cu_seqlens, inference_params)
        kv_cache, conv_state = self._cached(inference_params, cu_seqlens.shape[0] - 1)
        if self.d_conv > 0:
            conv_state.copy_(causal_conv1d_varlen_states(qkv[0].detach(), cu_seqlens, self.d_conv))
            qkv = self._convolve(qkv.transpose(1, 2), seq_idx, None).transpose(1, 2)
        positions = torch.arange(qkv.shape[1], device=qkv.device) - cu_seqlens[seq_idx]   # (1, L), in each sequence
        q, k, v = self._heads(qkv, positions)
        kv_cache[seq_idx, positions] = torch.stack([k, v], dim=2).detach().to(kv_cache.dtype)
        return self._attend(q, k, v, self._visible(seq_idx), is_causal=False)

    def _attend_to_cache(self, qkv: Tensor, inference_params: InferenceParams) -> Tensor:
        kv_cache, conv_state = self._cached(inference_params, qkv.shape[0])
        length, offset = qkv.shape[1], inference_params.seqlen_offset
        if self.d_conv > 0:
            qkv = self._convolve_cached(qkv.transpose(1, 2), conv_state, offset).transpose(1, 2)
        rows = torch.arange(length, device=qkv.device).unsqueeze(0)                       # (1, L)
        if inference_params.lengths_per_sample is not None and offset > 0:
            first = inference_params.batch_size_offset
            start = inference_params.lengths_per_sample[first : first + qkv.shape[0]].long().unsqueeze(1)
            end = kv_cache.shape[1]                          # read on the device: look at the whole cache, and mask
        else:
            start, end = offset, offset + length
            if end > kv_cache.shape[1]:
                raise ValueError(f"MHA: row {end} does not fit into the cache of {kv_cache.shape[1]} rows")
        positions = (rows + start).expand(qkv.shape[0], -1)                               # (B, L)
        q, k, v = self._heads(qkv, positions)
        batch = torch.arange(qkv.shape[0], device=qkv.device).unsqueeze(1)
        kv_cache[batch, positions] = torch.stack([k, v], dim=2).detach().to(kv_cache.dtype)
        k, v = kv_cache[:, :end].to(q.dtype).unbind(2)                                    # (B, T, K, P)
        visible = torch.arange(end, device=q.device) <= positions.unsqueeze(2)            # (B, L, T)
        return self._attend(q, k, v, visible, is_causal=False)

    def _cached(self, inference_params: InferenceParams, batch_size: int) -> AttentionCache:
        if self.layer_idx is None:
            raise ValueError("MHA: layer_idx is None, expected the layer's number to find its cache")
        cache = inference_params.key_value_memory_dict
        if self.layer_idx not in cache:
            cache[self.layer_idx] = self.allocate_inference_cache(
                inference_params.max_batch_size, inference_params.max_seqlen
            )
        first = inference_params.batch_size_offset
        kv_cache, conv_state = cache[self.layer_idx]
        kv_cache = kv_cache[first : first + batch_size]
        if kv_cache.shape[0] != batch_size:
            held = kv_cache.shape[0]
            raise ValueError(f"MHA: the cache holds {held} rows from row {first} on, expected {batch_size}")
        return kv_cache, None if conv_state is None else conv_state[first : first + batch_size]

    def _convolve(self, qkv: Tensor, seq_idx: Tensor | None, before: Tensor | None) -> Tensor:
        return causal_conv1d_fn(qkv, self.conv1d.weight.squeeze(1), self.conv1d.bias, seq_idx, before)

    def _convolve_cached(self, qkv: Tensor, conv_state: Tensor, offset: int) -> Tensor:
        if offset > 0 and qkv.shape[2] == 1:
            weight = self.conv1d.weight.squeeze(1)
            return causal_conv1d_update(qkv.squeeze(2), conv_state, weight, self.conv1d.bias).unsqueeze(2)
        before = conv_state.clone() if offset > 0 else torch.zeros_like(conv_state)
        conv_state.copy_(causal_conv1d_window(qkv.detach(), self.d_conv, None, before))
        return self._convolve(qkv, None, before[:, :, 1:])

    def _heads(self, qkv: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, L, (H + 2K)P) -> q (B, L, H, P), k and v (B, L, K, P), rotated."""
        q, k, v = qkv.unflatten(-1, (-1, self.head_dim)).split(
            [self.num_heads, self.num_heads_kv, self.num_heads_kv], dim=2
        )
        if self.rotary_emb_dim > 0:
            q, k = self.rotary_emb(q, positions), self.rotary_emb(k, positions)
        return q, k, v

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, is_causal: bool) -> Tensor:
        """q (B, L, H, P), k, v (B, T, K, P), visible (B, L, T) -> (B, L, H·P)"""
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
            attn_mask=None if visible is None else visible.unsqueeze(1), is_causal=is_causal,
            scale=self.softmax_scale, enable_gqa=self.num_heads != self.num_heads_kv,
        )  # fmt: skip
        return out.transpose(1, 2).flatten(2)


def _check_heads(
    embed_dim: int, num_heads: int, num_heads_kv: int, head_dim: int | None, mlp_hidden: int, world: int
) -> None:
    if num_heads % num_heads_kv:
        raise ValueError(f"MHA: num_heads_kv is {num_heads_kv}, expected a divisor of num_heads = {num_heads}")
    if head_dim is None and embed_dim % num_heads:
        raise ValueError(f"MHA: num_heads is {num_heads}, expected a divisor of embed_dim = {embed_dim}")
    if num_heads_kv % world or mlp_hidden % world:
        raise ValueError(
            f"MHA: num_heads_kv is {num_heads_kv} and the MLP's width {mlp_hidden}, expected multiples of {world} ranks"
        )

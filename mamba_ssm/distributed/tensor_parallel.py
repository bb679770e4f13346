"""Linear layers and embeddings whose weights are spread over the ranks of a process group.

Column-parallel: y_r = x W_rᵀ + b_r, each rank its own outputs. Row-parallel: y = Σ_r x_r W_rᵀ + b, its own inputs.
With sequence parallelism the tensors between them are spread over the rows too: the first axis of x holds B·L/W rows,
gathered before a column-parallel layer and summed and scattered after a row-parallel one.

Letters: B batch, L length, W ranks, M width.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import ProcessGroup

from mamba_ssm.distributed.distributed_utils import (
    all_gather,
    all_reduce,
    copy_to_group,
    get_dim_for_local_rank,
    reduce_scatter,
)

Tensor = torch.Tensor


def parallel_linear_func(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    process_group: ProcessGroup | None = None,
    sequence_parallel: bool = True,
) -> Tensor:
    """x (..., M), or this rank's rows (B·L/W, M) with sequence_parallel; weight (out, M) and bias (out) of this rank.
    -> (..., out), all rows"""
    if process_group is not None:
        x = (all_gather if sequence_parallel else copy_to_group)(x, process_group)
    return F.linear(x, weight, bias)


class ColumnParallelLinear(nn.Linear):
    """Linear layer that holds this rank's share of out_features."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        process_group: ProcessGroup,
        bias: bool = True,
        sequence_parallel: bool = True,
        multiple_of: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        """out_features counts all ranks together, and is split in multiples of multiple_of."""
        world, rank = dist.get_world_size(process_group), dist.get_rank(process_group)
        local = get_dim_for_local_rank(out_features, world, rank, multiple_of)
        super().__init__(in_features, local, bias=bias, device=device, dtype=dtype)
        self.process_group, self.sequence_parallel = process_group, sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in), or this rank's rows (B·L/W, in) with sequence_parallel -> (..., out) of this rank, all rows"""
        return parallel_linear_func(x, self.weight, self.bias, self.process_group, self.sequence_parallel)


class RowParallelLinear(nn.Linear):
    """Linear layer that holds this rank's share of in_features; the bias is the first rank's."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        process_group: ProcessGroup,
        bias: bool = True,
        sequence_parallel: bool = True,
        multiple_of: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        """in_features counts all ranks together, and is split in multiples of multiple_of."""
        world, rank = dist.get_world_size(process_group), dist.get_rank(process_group)
        local = get_dim_for_local_rank(in_features, world, rank, multiple_of)
        super().__init__(local, out_features, bias=bias and rank == 0, device=device, dtype=dtype)
        self.process_group, self.sequence_parallel = process_group, sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in) of this rank, all rows -> (..., out), or this rank's rows (B·L/W, out) with sequence_parallel"""
        out = F.linear(x, self.weight, self.bias)
        return (reduce_scatter if self.sequence_parallel else all_reduce)(out, self.process_group)


def column_linear(
    in_features: int,
    out_features: int,
    process_group: ProcessGroup | None,
    sequence_parallel: bool,
    **options,
) -> nn.Linear:
    """A column-parallel layer, or a plain one without a process group."""
    if process_group is None:
        return nn.Linear(in_features, out_features, **options)
    options |= {"process_group": process_group, "sequence_parallel": sequence_parallel}
    return ColumnParallelLinear(in_features, out_features, **options)


def row_linear(
    in_features: int,
    out_features: int,
    process_group: ProcessGroup | None,
    sequence_parallel: bool,
    **options,
) -> nn.Linear:
    """A row-parallel layer, or a plain one without a process group."""
    if process_group is None:
        return nn.Linear(in_features, out_features, **options)
    options |= {"process_group": process_group, "sequence_parallel": sequence_parallel}
    return RowParallelLinear(in_features, out_features, **options)


class VocabParallelEmbedding(nn.Embedding):
    """Embedding that holds this rank's share of the vocabulary: other entries come out as zeros, to be summed."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        process_group: ProcessGroup | None = None,
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        world = 1 if process_group is None else dist.get_world_size(process_group)
        if num_embeddings % world:
            raise ValueError(f"VocabParallelEmbedding: num_embeddings is {num_embeddings}, not a multiple of {world}")
        if process_group is not None and padding_idx is not None:
            raise ValueError("VocabParallelEmbedding: padding_idx can't be combined with a process group")
        super().__init__(num_embeddings // world, embedding_dim, padding_idx=padding_idx, device=device, dtype=dtype)
        self.process_group = process_group

    def forward(self, input: Tensor) -> Tensor:
        """input (...) integers below the whole vocabulary's size -> (..., M)"""
        if self.process_group is None:
            return super().forward(input)
        local = input - dist.get_rank(self.process_group) * self.num_embeddings
        foreign = (local < 0) | (local >= self.num_embeddings)
        return super().forward(local.masked_fill(foreign, 0)).masked_fill(foreign.unsqueeze(-1), 0.0)


class ColumnParallelEmbedding(nn.Embedding):
    """Embedding that holds this rank's share of the width."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        process_group: ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        world = 1 if process_group is None else dist.get_world_size(process_group)
        if embedding_dim % world:
            raise ValueError(f"ColumnParallelEmbedding: embedding_dim is {embedding_dim}, not a multiple of {world}")
        super().__init__(num_embeddings, embedding_dim // world, device=device, dtype=dtype)


class ParallelEmbeddings(nn.Module):
    """Token embedding spread over the vocabulary and position embedding spread over the width."""

    def __init__(
        self,
        embed_dim: int,
        vocab_size: int,
        max_position_embeddings: int,
        process_group: ProcessGroup,
        padding_idx: int | None = None,
        sequence_parallel: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        """max_position_embeddings 0 leaves the positions out."""
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        self.process_group, self.sequence_parallel = process_group, sequence_parallel
        self.word_embeddings = VocabParallelEmbedding(vocab_size, embed_dim, process_group, padding_idx, **factory)
        self.position_embeddings = (
            ColumnParallelEmbedding(max_position_embeddings, embed_dim, process_group, **factory)
            if max_position_embeddings > 0
            else None
        )

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, combine_batch_seqlen_dim: bool = False
    ) -> Tensor:
        """input_ids (B, L) integers; position_ids (B, L), None: 0..L-1.
        -> (B, L, M), or (B·L, M) with combine_batch_seqlen_dim, of which sequence parallelism leaves B·L/W rows"""
        embeddings = self.word_embeddings(input_ids)                                      # (B, L, M)
        if self.position_embeddings is not None:
            if position_ids is None:
                position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)
            embeddings = embeddings + self._widened(self.position_embeddings(position_ids))
        if combine_batch_seqlen_dim or self.sequence_parallel:
            embeddings = embeddings.flatten(0, 1)
        if self.process_group is None:
            return embeddings
        return (reduce_scatter if self.sequence_parallel else all_reduce)(embeddings, self.process_group)

    def _widened(self, part: Tensor) -> Tensor:
        """This rank's columns of the positions (..., M/W) in their place among zeros (..., M)."""
        if self.process_group is None:
            return part
        world, rank = dist.get_world_size(self.process_group), dist.get_rank(self.process_group)
        return F.pad(part, (rank * part.shape[-1], (world - 1 - rank) * part.shape[-1]))

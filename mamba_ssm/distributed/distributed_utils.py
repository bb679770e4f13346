"""Collectives with gradients over one axis of tensors, and keeping replicated parameters alike.

    all_gather      forward: concatenate the ranks' shards    backward: sum and scatter
    reduce_scatter  forward: sum and scatter                  backward: concatenate
    all_reduce      forward: sum                              backward: identity
    copy_to_group   forward: identity                         backward: sum

Shards lie along the first axis, in rank order. W is the number of ranks.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

Tensor = torch.Tensor


def all_gather_raw(shard: Tensor, process_group: ProcessGroup) -> Tensor:
    """(n, ...) on each rank -> (W·n, ...) on all, without gradient."""
    out = shard.new_empty(dist.get_world_size(process_group) * shard.shape[0], *shard.shape[1:])
    dist.all_gather_into_tensor(out, shard.contiguous(), group=process_group)
    return out


def reduce_scatter_raw(rows: Tensor, process_group: ProcessGroup) -> Tensor:
    """(W·n, ...) on each rank -> its shard (n, ...) of their sum, without gradient."""
    size = dist.get_world_size(process_group)
    if rows.shape[0] % size:
        raise ValueError(f"reduce_scatter: rows has shape {tuple(rows.shape)}, expected a multiple of {size} first")
    out = rows.new_empty(rows.shape[0] // size, *rows.shape[1:])
    dist.reduce_scatter_tensor(out, rows.contiguous(), group=process_group)
    return out


def all_reduce_raw(tensor: Tensor, process_group: ProcessGroup) -> Tensor:
    """(...) on each rank -> the sum over ranks (...) in a new tensor, without gradient."""
    out = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=process_group)
    return out


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard, process_group):
        ctx.process_group = process_group
        return all_gather_raw(shard, process_group)

    @staticmethod
    def backward(ctx, dout):
        return reduce_scatter_raw(dout, ctx.process_group), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, process_group):
        ctx.process_group = process_group
        return reduce_scatter_raw(rows, process_group)

    @staticmethod
    def backward(ctx, dout):
        return all_gather_raw(dout, ctx.process_group), None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, process_group):
        return all_reduce_raw(tensor, process_group)

    @staticmethod
    def backward(ctx, dout):
        return dout, None


class _CopyToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, process_group):
        ctx.process_group = process_group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, dout):
        return all_reduce_raw(dout, ctx.process_group), None


def all_gather(shard: Tensor, process_group: ProcessGroup) -> Tensor:
    """(n, ...) on each rank -> (W·n, ...) on all; the gradient of a shard is summed over the ranks."""
    return _AllGather.apply(shard, process_group)


def reduce_scatter(rows: Tensor, process_group: ProcessGroup) -> Tensor:
    """(W·n, ...) on each rank -> its shard (n, ...) of their sum; the gradient is the shards' gradients together."""
    return _ReduceScatter.apply(rows, process_group)


def all_reduce(tensor: Tensor, process_group: ProcessGroup) -> Tensor:
    """(...) on each rank -> the sum over ranks (...) on all of them; each rank's gradient is the result's."""
    return _AllReduce.apply(tensor, process_group)


def copy_to_group(tensor: Tensor, process_group: ProcessGroup) -> Tensor:
    """(...), the same on all ranks, before each computes its own part from it: gradients are summed.   -> (...)"""
    return _CopyToGroup.apply(tensor, process_group)


@torch.no_grad()
def sync_shared_params(model: nn.Module, process_group: ProcessGroup) -> None:
    """Give the parameters marked `_shared_params` the values that the group's first rank has."""
    source = dist.get_global_rank(process_group, 0)
    for _, parameter in sorted(model.named_parameters()):
        if getattr(parameter, "_shared_params", False):
            dist.broadcast(parameter, src=source, group=process_group)


@torch.no_grad()
def allreduce_sequence_parallel_grad(model: nn.Module, process_group: ProcessGroup) -> None:
    """Sum over ranks the gradients of parameters marked `_sequence_parallel`: each rank saw its rows only."""
    marked = [p for _, p in sorted(model.named_parameters()) if getattr(p, "_sequence_parallel", False)]
    grads = [parameter.grad for parameter in marked if parameter.grad is not None]
    if not grads:
        return
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat, group=process_group)
    for grad, summed in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(summed.view_as(grad))


def get_dim_for_local_rank(dim: int, world_size: int, local_rank: int, multiple_of: int = 1) -> int:
    """How much of an axis of `dim` a rank holds, in whole multiples of `multiple_of`, the first ranks one more."""
    if dim % multiple_of:
        raise ValueError(f"get_dim_for_local_rank: dim is {dim}, expected a multiple of multiple_of = {multiple_of}")
    share, rest = divmod(dim // multiple_of, world_size)
    return (share + (local_rank < rest)) * multiple_of

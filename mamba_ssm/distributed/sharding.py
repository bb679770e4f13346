"""From the weights of a whole layer to one rank's: what a tensor-parallel Mamba2, MHA or GatedMLP loads.

Parts of an axis that are split on their own (z, x, B, C, Δ of Mamba2's in_proj; q, k, v of MHA's; value and gate of the
MLP's) give each rank its slice, so that every rank holds whole heads and groups.   W ranks.
"""

import torch
from torch import nn

Tensor = torch.Tensor


def shard_state_dict(layer: nn.Module, rank: int, world_size: int) -> dict[str, Tensor]:
    """The state dict that rank `rank` of world_size loads into its part of `layer`, a whole Mamba2, MHA or GatedMLP."""
    if not hasattr(layer, "parallel_parts"):
        raise TypeError(f"shard_state_dict: layer is a {type(layer).__name__}, expected Mamba2, MHA or GatedMLP")
    parts = layer.parallel_parts()
    shard = {}
    for name, tensor in layer.state_dict().items():
        module, _, kind = name.rpartition(".")
        by_row = module in ("out_proj", "fc2")               # row-parallel: the bias is the first rank's
        if by_row and kind == "bias":
            if rank == 0:
                shard[name] = tensor
            continue
        axis = 1 if by_row else 0
        widths = parts.get(module, [tensor.shape[0]])        # others hold a value per head or channel
        slices = [_slice(part, axis, rank, world_size, name) for part in tensor.split(widths, dim=axis)]
        shard[name] = torch.cat(slices, dim=axis)
    return shard


def _slice(part: Tensor, axis: int, rank: int, world_size: int, name: str) -> Tensor:
    width, rest = divmod(part.shape[axis], world_size)
    if rest:
        raise ValueError(
            f"shard_state_dict: {name} has a part of width {part.shape[axis]}, expected a multiple of {world_size}"
        )
    return part.narrow(axis, rank * width, width)

"""A trained model in a small file: what acting and dreaming need, matrices in fp16.

The critics, which only training uses, are left out; biases, norms, decay rates and statistics stay in fp32. The file
has the format of a checkpoint's model.pt, so it describes itself and reading it executes nothing.
"""

import dataclasses
from pathlib import Path

import torch
from torch import Tensor, nn

from tools.checkpoints import CHECKPOINT_FORMAT, SavedModel, serialise, write_atomic

CRITICS = ("critic.", "slow_critic.")


def export_model(saved: SavedModel, path: str | Path) -> int:
    """Write `saved` to `path` without critics and with matrices in fp16; returns the number of bytes."""
    content = {
        "format": CHECKPOINT_FORMAT,
        "step": saved.step,
        "config": saved.config,
        "spaces": saved.spaces,
        "versions": saved.versions,
        "world_model": {name: _small(tensor) for name, tensor in saved.world_model.items()},
        "agent": {name: _small(tensor) for name, tensor in saved.agent.items() if not _is_critic(name)},
    }
    data = serialise(content, "model")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, data)
    return len(data)


def has_critics(saved: SavedModel) -> bool:
    """False for an exported model."""
    return any(_is_critic(name) for name in saved.agent)


def with_critics(saved: SavedModel, agent: nn.Module) -> SavedModel:
    """`saved`, and if it is an exported one with the untrained critics of `agent`: nothing that acts uses them."""
    if has_critics(saved):
        return saved
    critics = {name: tensor for name, tensor in agent.state_dict().items() if _is_critic(name)}
    return dataclasses.replace(saved, agent={**saved.agent, **critics})


def _is_critic(name: str) -> bool:
    return name.replace("_orig_mod.", "").startswith(CRITICS)


def _small(tensor: Tensor) -> Tensor:
    matrix = tensor.dtype == torch.float32 and tensor.dim() >= 2
    return tensor.half() if matrix and tensor.abs().max() < torch.finfo(torch.half).max else tensor

"""What a stack of mixers keeps of sequences between passes and steps, which move it on in place.   B batch."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from mamba_ssm.modules.cache import MixerState
from mamba_ssm.ops.triton.dual_step import KeptRows

Tensor = torch.Tensor


@dataclass(frozen=True)
class KeptSequences:
    """All rows of each layer in place of a state: for few steps, one row at a time."""

    layers: tuple[KeptRows, ...]


@dataclass(frozen=True)
class RecurrentState:
    """(conv_state, ssm_state) of each layer, batch first; all zero is the start of a sequence."""

    layers: tuple[MixerState, ...]

    @property
    def batch_size(self) -> int:
        """B."""
        return self.layers[0][0].shape[0]

    def tensors(self) -> list[Tensor]:
        """All tensors (B, ...), in a fixed order: what a checkpoint keeps."""
        return [tensor for layer in self.layers for tensor in layer]

    def reset_rows(self, mask: Tensor) -> None:
        """Start a new sequence in the rows that `mask` (B,) bool marks, in place and without a host sync."""
        for tensor in self.tensors():
            tensor.masked_fill_(mask.view(-1, *[1] * (tensor.dim() - 1)), 0.0)

    def zero_(self) -> None:
        """Start a new sequence in every row, in place."""
        for tensor in self.tensors():
            tensor.zero_()

    def copy_(self, tensors: "RecurrentState | Iterable[Tensor]") -> None:
        """Take over another state's values, or those of tensors (B, ...) in the order of `tensors()`, in place."""
        source = tensors.tensors() if isinstance(tensors, RecurrentState) else tensors
        for mine, theirs in zip(self.tensors(), source, strict=True):
            mine.copy_(theirs)

    def clone(self) -> "RecurrentState":
        """A state of its own with the same values."""
        return RecurrentState(tuple((conv.clone(), ssm.clone()) for conv, ssm in self.layers))

    def select(self, rows: Tensor) -> "RecurrentState":
        """A new state made of the given rows (B',) of this one."""
        return RecurrentState(tuple((conv[rows], ssm[rows]) for conv, ssm in self.layers))

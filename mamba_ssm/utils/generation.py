"""Generation with a recurrent state or key/value cache."""

from dataclasses import dataclass, field

import torch

Tensor = torch.Tensor


@dataclass
class InferenceParams:
    """What layers share while a sequence is generated: how far it is, and each layer's state by layer index."""

    max_seqlen: int
    max_batch_size: int
    seqlen_offset: int = 0                                  # rows consumed so far; 0: the next pass starts sequences
    batch_size_offset: int = 0
    key_value_memory_dict: dict = field(default_factory=dict)
    lengths_per_sample: Tensor | None = None                # (B), where sequences of a batch differ in length

    def reset(self, max_seqlen: int, max_batch_size: int) -> None:
        """Begin anew; the layers' tensors are kept, and overwritten by the next pass."""
        self.max_seqlen, self.max_batch_size, self.seqlen_offset = max_seqlen, max_batch_size, 0
        if self.lengths_per_sample is not None:
            self.lengths_per_sample.zero_()

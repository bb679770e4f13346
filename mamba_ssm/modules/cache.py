"""The recurrent state of a mixer, and where generation keeps it.

A mixer's state is (conv_state, ssm_state): the last W inputs of its convolution, and the state of its scan, which stays
in float32 (float64 for a float64 model) under autocast. Sequences start from zeros, unless the mixer says otherwise.

Letters: B batch, W convolution width.
"""

import torch
from torch import nn

from mamba_ssm.ops.numerics import accumulate_dtype
from mamba_ssm.utils.generation import InferenceParams

Tensor = torch.Tensor
MixerState = tuple[Tensor, Tensor]


class RecurrentMixer(nn.Module):
    """A mixer whose past fits into a state of fixed size; `conv1d` and `state_shapes` are the subclass's."""

    conv1d: nn.Conv1d
    layer_idx: int | None

    def state_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of conv_state and ssm_state without the batch axis."""
        raise NotImplementedError

    def start_state(self) -> Tensor | None:
        """The ssm_state that sequences start from, without the batch axis; None: zeros."""
        return None

    def allocate_inference_cache(
        self,
        batch_size: int,
        max_seqlen: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> MixerState:
        """The state of sequences that start: (conv_state (B, ., W), ssm_state (B, ...)), of a size that does not depend
        on max_seqlen.

        dtype None keeps the convolution's dtype for conv_state and at least float32 for ssm_state."""
        weight = self.conv1d.weight
        device = weight.device if device is None else device
        conv_shape, ssm_shape = self.state_shapes()
        ssm_dtype = accumulate_dtype(weight) if dtype is None else dtype
        conv_state = torch.zeros(batch_size, *conv_shape, dtype=weight.dtype if dtype is None else dtype, device=device)
        ssm_state = torch.zeros(batch_size, *ssm_shape, dtype=ssm_dtype, device=device)
        self._start(conv_state, ssm_state)
        return conv_state, ssm_state

    def _start(self, conv_state: Tensor, ssm_state: Tensor) -> None:
        conv_state.zero_()
        if (start := self.start_state()) is None:
            ssm_state.zero_()
        else:
            ssm_state.copy_(start.detach())

    def cached_state(self, inference_params: InferenceParams, batch_size: int) -> MixerState:
        """This layer's rows of the cache, made if missing; started anew at seqlen_offset 0."""
        if self.layer_idx is None:
            raise ValueError(f"{type(self).__name__}: layer_idx is None, expected the layer's number to find its cache")
        cache = inference_params.key_value_memory_dict
        if self.layer_idx not in cache:
            cache[self.layer_idx] = self.allocate_inference_cache(inference_params.max_batch_size)
        first = inference_params.batch_size_offset
        conv_state, ssm_state = (tensor[first : first + batch_size] for tensor in cache[self.layer_idx])
        if conv_state.shape[0] != batch_size:
            raise ValueError(
                f"{type(self).__name__}: the cache holds {conv_state.shape[0]} rows from row {first} on, "
                f"expected {batch_size} like the batch"
            )
        if inference_params.seqlen_offset == 0:
            self._start(conv_state, ssm_state)
        return conv_state, ssm_state


def readable(state: MixerState) -> MixerState:
    """The state as this pass reads it: a copy where backward will read it after it has been overwritten."""
    return tuple(tensor.clone() for tensor in state) if torch.is_grad_enabled() else state

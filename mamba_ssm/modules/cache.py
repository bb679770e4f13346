"""The recurrent state of a mixer, and where generation keeps it.

A mixer's state is (conv_state, ssm_state): the last W inputs of its convolution, and the state of its scan, which stays
in float32 (float64 for a float64 model) under autocast. Sequences start from zeros, unless the mixer says otherwise.

Letters: B batch, L length of a row, D channels, W convolution width, S packed sequences, T rows of the longest of them.
"""

import torch
from torch import nn

from mamba_ssm.ops.causal_conv1d import causal_conv1d_varlen_states
from mamba_ssm.ops.numerics import accumulate_dtype, packed_seq_idx
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
        conv_state = torch.empty(batch_size, *conv_shape, dtype=weight.dtype if dtype is None else dtype, device=device)
        ssm_state = torch.empty(batch_size, *ssm_shape, dtype=ssm_dtype, device=device)
        self._start(conv_state, ssm_state)
        return conv_state, ssm_state

    def _start(self, conv_state: Tensor, ssm_state: Tensor) -> None:
        conv_state.zero_()
        if (start := self.start_state()) is None:
            ssm_state.zero_()
        else:
            ssm_state.copy_(start.detach())

    def cached_state(self, inference_params: InferenceParams, batch_size: int) -> MixerState:
        """This layer's rows of the cache (B, ...), made if missing; started anew at seqlen_offset 0."""
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
    """The state (B, ...) as this pass reads it: a copy where backward will read it after it has been overwritten."""
    return tuple(tensor.clone() for tensor in state) if torch.is_grad_enabled() else state


def leave_state(state: MixerState | None, final_states: list[MixerState] | None, conv: Tensor, ssm: Tensor) -> None:
    """What a pass leaves: in `final_states` a state of its own, rows without gaps, else in `state`, in place."""
    if final_states is not None:
        final_states.append((conv.contiguous(), ssm.contiguous()))
    else:
        state[0].copy_(conv)
        state[1].copy_(ssm)


def check_final_states(name: str, final_states: list[MixerState] | None, *others: object) -> None:
    """Refuse `final_states` beside any of `others`, which say otherwise where states are left."""
    if final_states is not None and any(other is not None for other in others):
        raise ValueError(f"{name}: final_states comes with state, cu_seqlens or inference_params, expected it alone")


def check_packed_prompts(name: str, rows: Tensor, cu_seqlens: Tensor, inference_params: InferenceParams) -> None:
    """Refuse what can't fill a cache: rows (1, L, ...) must hold exactly the sequences that cu_seqlens (S+1) cuts, each
    of at most max_seqlen rows. What the values of cu_seqlens decide is asserted on the device, without waiting."""
    if rows.shape[0] != 1:
        raise ValueError(f"{name}: cu_seqlens given with a batch of {rows.shape[0]}, expected one row")
    if inference_params.seqlen_offset > 0:
        offset = inference_params.seqlen_offset
        raise ValueError(f"{name}: cu_seqlens given at seqlen_offset {offset}, expected 0: packed sequences start")
    lengths, longest = cu_seqlens.diff(), inference_params.max_seqlen
    fits = (lengths >= 0).all() & (lengths <= longest).all() & (cu_seqlens[0] == 0) & (cu_seqlens[-1] == rows.shape[1])
    expected = f"to rise from 0 to L = {rows.shape[1]} by at most max_seqlen = {longest} at a time"
    torch._assert_async(fits, f"{name}: cu_seqlens does not fit the row and the cache, expected it {expected}")


def rows_of_packed(packed: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
    """Packed sequences (1, D, L) in a row each, aligned to its end, zeros before them: (S, D, T = longest)."""
    return causal_conv1d_varlen_states(packed[0].transpose(0, 1), cu_seqlens, longest)


def packed_of_rows(rows: Tensor, cu_seqlens: Tensor, length: int) -> Tensor:
    """The inverse of `rows_of_packed`: (S, D, T) -> (1, D, L = length)."""
    sequence = packed_seq_idx(cu_seqlens, length).squeeze(0).long()                       # (L)
    to_end = cu_seqlens[sequence + 1] - torch.arange(length, device=rows.device)          # (L), 1 at a sequence's end
    return rows.transpose(1, 2)[sequence, rows.shape[2] - to_end].transpose(0, 1).unsqueeze(0)

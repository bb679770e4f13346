"""Part 3 of the chunked scan: the only sequential one, from chunk to chunk.

    h_k = exp(c_k) h_{k-1} + S_k,   the decay being 0 where a boundary lies between the two chunks' last rows

Letters: B batch, K chunks, Q chunk size, H heads, P headdim, N state size.
"""

import torch

from mamba_ssm.ops.triton.ssd_chunk_state import entering_pieces

Tensor = torch.Tensor


def state_passing(
    states: Tensor, dA_chunk: Tensor, initial_states: Tensor | None = None, pieces: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """states (B, K, H, P, N), what each chunk adds; dA_chunk (B, K, H), its whole log-decay; initial_states
    (B, H, P, N), zeros if None, of the first row's piece; pieces (B, K, Q).
    -> the state entering each chunk (B, K, H, P, N), the state after the last (B, H, P, N)."""
    if pieces is not None:
        broken = entering_pieces(pieces) != pieces[:, :, -1]                              # (B, K)
        dA_chunk = dA_chunk.masked_fill(broken.unsqueeze(-1), -torch.inf)
    decay = dA_chunk.exp().to(states.dtype)[..., None, None]                              # (B, K, H, 1, 1)
    batch, chunks, *rest = states.shape
    state = states.new_zeros(batch, *rest) if initial_states is None else initial_states.to(states.dtype)
    if chunks == 1:
        return state.unsqueeze(1), torch.addcmul(states[:, 0], decay[:, 0], state)
    entering = []
    for added, decay_k in zip(states.unbind(1), decay.unbind(1), strict=True):
        entering.append(state)
        state = torch.addcmul(added, decay_k, state)
    return (torch.stack(entering, dim=1) if entering else states), state


def state_passing_ref(
    states: Tensor, dA_chunk: Tensor, initial_states: Tensor | None = None, pieces: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The judge of `state_passing`: each entering state as a sum over all chunks before it."""
    batch, chunks, *rest = states.shape
    initial = states.new_zeros(batch, *rest) if initial_states is None else initial_states
    added = torch.cat([initial.unsqueeze(1), states], dim=1)                              # (B, 1+K, H, P, N)
    before = [] if pieces is None else entering_pieces(pieces)
    results = []
    for k in range(chunks + 1):
        total = added[:, k]
        for j in range(k):
            weight = dA_chunk[:, j:k].sum(dim=1).exp().to(states.dtype)                   # (B, H)
            if pieces is not None:
                now = pieces[:, -1, -1] if k == chunks else before[:, k]
                weight = weight * (before[:, j] == now).unsqueeze(-1)
            total = total + weight[..., None, None] * added[:, j]
        results.append(total)
    return torch.stack(results[:-1], dim=1), results[-1]

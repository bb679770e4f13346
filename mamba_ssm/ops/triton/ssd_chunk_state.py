"""Parts 1 and 2 of the chunked scan: the decay inside a chunk, and the state each chunk adds by its end.

    c_i = Σ_{k<=i} Δ_k A,     S = Σ_j exp(c_last - c_j) Δ_j x_j B_jᵀ   over the rows j of the last row's piece

Sums of log-decays are kept in float64: their differences are what counts, and after one huge step a float32 sum has no
digits left for the small ones. A step's log-decay is floored at -1000, where exp is 0 in value and slope.

Letters: B batch, K chunks, Q chunk size, H heads, P headdim, G groups, R = H/G, N state size, S sequences.
"""

import torch

Tensor = torch.Tensor

LOG_DECAY_FLOOR = -1000.0


def chunk_cumsum(dt: Tensor, A: Tensor) -> Tensor:
    """Running log-decay of each chunk: dt (B, K, Q, H), A (H) -> (B, K, H, Q) float64."""
    log_decay = (dt.double() * A.double()).clamp(min=LOG_DECAY_FLOOR)
    size = log_decay.shape[2]
    until = torch.ones(size, size, dtype=torch.float64, device=dt.device).triu()          # (j, i): 1 where j <= i
    return torch.matmul(log_decay.transpose(2, 3), until)    # torch.cumsum is not deterministic on every GPU


def chunk_state(B: Tensor, x: Tensor, dt: Tensor, dA_cumsum: Tensor, pieces: Tensor | None = None) -> Tensor:
    """What the rows of each chunk leave in the state at its end.

    B (B, K, Q, G, N); x (B, K, Q, H, P); dt (B, K, Q, H); dA_cumsum (B, K, H, Q) float64; pieces (B, K, Q), rows of
    other pieces than the chunk's last row leave nothing.   -> (B, K, H, P, N)"""
    log_weight = dA_cumsum[..., -1:] - dA_cumsum                                          # (B, K, H, Q)
    if pieces is not None:
        log_weight = log_weight.masked_fill((pieces != pieces[..., -1:]).unsqueeze(2), -torch.inf)
    return weighted_outer(B, x, dt, log_weight)


def weighted_outer(B: Tensor, x: Tensor, dt: Tensor, log_weight: Tensor) -> Tensor:
    """Σ_j exp(log_weight_j) Δ_j x_j B_jᵀ: (B, K, H, P, N), log_weight (B, K, H, Q), the rest as in `chunk_state`."""
    groups, (heads, headdim) = B.shape[3], x.shape[3:]
    weight = log_weight.to(x.dtype).exp().transpose(2, 3) * dt                            # (B, K, Q, H)
    rows = (weight.unsqueeze(-1) * x).unflatten(3, (groups, heads // groups)).flatten(4)  # (B, K, Q, G, R*P)
    states = torch.matmul(rows.permute(0, 1, 3, 4, 2), B.transpose(2, 3))                 # (B, K, G, R*P, N)
    return states.unflatten(3, (heads // groups, headdim)).flatten(2, 3)


def chunk_state_varlen(
    B: Tensor, x: Tensor, dt: Tensor, dA_cumsum: Tensor, pieces: Tensor, cu_seqlens: Tensor, entering: Tensor
) -> Tensor:
    """States at the ends of packed sequences, without a host sync.

    One batch row: B (1, K, Q, G, N), x (1, K, Q, H, P), dt (1, K, Q, H), dA_cumsum (1, K, H, Q) float64,
    pieces (1, K, Q); cu_seqlens (S+1) integers; entering (1, K, H, P, N), the state before each chunk.
    -> (S, H, P, N), zero for an empty sequence."""
    chunk_size = pieces.shape[2]
    last = (cu_seqlens[1:] - 1).clamp(min=0).long()                                       # (S) last rows
    chunk, row = last // chunk_size, last % chunk_size
    of_sequence = pieces[0, chunk].gather(1, row[:, None])                                # (S, 1), its piece
    cumsum = dA_cumsum[0, chunk]                                                          # (S, H, Q)
    at_last = cumsum.gather(2, row[:, None, None].expand(-1, cumsum.shape[1], 1))         # (S, H, 1)
    later = torch.arange(chunk_size, device=row.device) > row[:, None]                    # (S, Q)
    hidden = later | (pieces[0, chunk] != of_sequence)
    log_weight = (at_last - cumsum).masked_fill(hidden.unsqueeze(1), -torch.inf)          # (S, H, Q)
    states = weighted_outer(B[:, chunk], x[:, chunk], dt[:, chunk], log_weight.unsqueeze(0))[0]
    broken = entering_pieces(pieces)[0, chunk] != of_sequence[:, 0]                       # (S)
    carried = at_last.masked_fill(broken[:, None, None], -torch.inf).to(states.dtype).exp()
    states = states + carried.unsqueeze(-1) * entering[0, chunk]
    return states.masked_fill((cu_seqlens[1:] == cu_seqlens[:-1])[:, None, None, None], 0.0)


def entering_pieces(pieces: Tensor) -> Tensor:
    """The piece that the state before each chunk belongs to: pieces (B, K, Q) -> (B, K)."""
    return torch.cat([pieces[:, :1, 0], pieces[:, :-1, -1]], dim=1)


def chunk_state_ref(B: Tensor, x: Tensor, dt: Tensor, dA_cumsum: Tensor, pieces: Tensor | None = None) -> Tensor:
    """The judge: `chunk_state` as one sum of products."""
    weight = (dA_cumsum[..., -1:] - dA_cumsum).to(x.dtype).exp()                          # (B, K, H, Q)
    if pieces is not None:
        weight = weight * (pieces == pieces[..., -1:]).unsqueeze(2)
    B = B.repeat_interleave(x.shape[3] // B.shape[3], dim=3)                              # (B, K, Q, H, N)
    return torch.einsum("bkqhn,bkhq,bkqh,bkqhp->bkhpn", B, weight, dt, x)

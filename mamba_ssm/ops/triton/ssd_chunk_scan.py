"""Part 4 of the chunked scan: the outputs of each chunk from its own rows and from the state that entered it.

    Y = (M ⊙ C Bᵀ)(Δ X) + exp(c_i) C_i h,    M_ij = exp(c_i - c_j) for i >= j within one piece

Letters: B batch, K chunks, Q chunk size, H heads, P headdim, G groups, R = H/G, N state size.
"""

import torch

from mamba_ssm.ops.triton.ssd_chunk_state import entering_pieces

Tensor = torch.Tensor


def chunk_scan(
    CB: Tensor,
    x: Tensor,
    dt: Tensor,
    dA_cumsum: Tensor,
    C: Tensor,
    entering: Tensor | None,
    pieces: Tensor | None = None,
) -> Tensor:
    """CB (B, K, G, Q, Q); x (B, K, Q, H, P); dt (B, K, Q, H); dA_cumsum (B, K, H, Q) float64; C (B, K, Q, G, N);
    entering (B, K, H, P, N), None: zeros; pieces (B, K, Q).   -> (B, K, Q, H, P)"""
    groups, (heads, headdim) = C.shape[3], x.shape[3:]
    weight = _decay_between_rows(dA_cumsum, pieces, x.dtype)                              # (B, K, H, Q, Q)
    weight = weight.unflatten(2, (groups, heads // groups)) * CB.unsqueeze(3)             # (B, K, G, R, Q, Q)
    driven = (dt.unsqueeze(-1) * x).transpose(2, 3)                                       # (B, K, H, Q, P)
    inside = torch.matmul(weight.flatten(2, 3), driven).transpose(2, 3)                   # (B, K, Q, H, P)
    if entering is None:
        return inside
    rows = entering.unflatten(2, (groups, heads // groups)).flatten(3, 4)                 # (B, K, G, R*P, N)
    carried = torch.matmul(C.transpose(2, 3), rows.transpose(3, 4))                       # (B, K, G, Q, R*P)
    carried = carried.transpose(2, 3).unflatten(4, (heads // groups, headdim)).flatten(3, 4)
    reach = _decay_from_start(dA_cumsum, pieces, x.dtype)                              # (B, K, Q, H)
    return torch.addcmul(inside, reach.unsqueeze(-1), carried)


def chunk_scan_ref(
    CB: Tensor, x: Tensor, dt: Tensor, dA_cumsum: Tensor, C: Tensor, entering: Tensor, pieces: Tensor | None = None
) -> Tensor:
    """The judge: `chunk_scan` as two sums of products."""
    repeats = x.shape[3] // C.shape[3]
    weight = _decay_between_rows(dA_cumsum, pieces, x.dtype) * CB.repeat_interleave(repeats, dim=2)
    inside = torch.einsum("bkhij,bkjh,bkjhp->bkihp", weight, dt, x)
    reach = _decay_from_start(dA_cumsum, pieces, x.dtype)
    return inside + torch.einsum("bkqhn,bkhpn,bkqh->bkqhp", C.repeat_interleave(repeats, dim=3), entering, reach)


def _decay_between_rows(dA_cumsum: Tensor, pieces: Tensor | None, dtype: torch.dtype) -> Tensor:
    """M (B, K, H, Q, Q)."""
    size = dA_cumsum.shape[-1]
    row = torch.arange(size, device=dA_cumsum.device)
    hidden = row[:, None] < row                                                           # (Q, Q), j after i
    if pieces is not None:
        hidden = (hidden | (pieces.unsqueeze(3) != pieces.unsqueeze(2))).unsqueeze(2)     # (B, K, 1, Q, Q)
    log_decay = (dA_cumsum.unsqueeze(-1) - dA_cumsum.unsqueeze(-2)).to(dtype)
    return log_decay.masked_fill(hidden, -torch.inf).exp()


def _decay_from_start(dA_cumsum: Tensor, pieces: Tensor | None, dtype: torch.dtype) -> Tensor:
    """exp(c_i) (B, K, Q, H), 0 in the rows that the entering state does not reach."""
    log_reach = dA_cumsum.transpose(2, 3).to(dtype)
    if pieces is not None:
        log_reach = log_reach.masked_fill((pieces != entering_pieces(pieces).unsqueeze(2)).unsqueeze(3), -torch.inf)
    return log_reach.exp()

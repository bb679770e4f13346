"""State-space duality in its shortest form, for reading and for testing.

    h_t = exp(A_t) h_{t-1} + X_t B_tᵀ,   Y_t = h_t C_t

A_t and X_t have been multiplied by Δ_t already. Letters: B batch, L length, H heads, P headdim, N state size, K chunks,
Q block length.
"""

import torch
import torch.nn.functional as F

from mamba_ssm.ops.checks import check_shape

Tensor = torch.Tensor


def segsum(x: Tensor) -> Tensor:
    """x (..., Q) -> (..., Q, Q) with entry (i, j) = Σ_{j<k<=i} x_k for i >= j, else -inf."""
    size = x.shape[-1]
    row = torch.arange(size, device=x.device)
    terms = x.unsqueeze(-1).expand(*x.shape, size).masked_fill(row[:, None] <= row, 0.0)  # x_k where k > j
    return terms.cumsum(dim=-2).masked_fill(row[:, None] < row, -torch.inf)


def ssd_minimal_discrete(
    X: Tensor, A: Tensor, B: Tensor, C: Tensor, block_len: int, initial_states: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """X (B, L, H, P), A (B, L, H), B, C (B, L, H, N), block_len Q divides L, initial_states (B, 1, H, P, N) or None.
    -> Y (B, L, H, P), final state (B, H, P, N)"""
    name = "ssd_minimal_discrete"
    check_shape(name, "X", X, "(B, L, H, P)", (None, None, None, None))
    check_shape(name, "A", A, "(B, L, H)", X.shape[:3])
    check_shape(name, "B", B, "(B, L, H, N)", (*X.shape[:3], None))
    check_shape(name, "C", C, "(B, L, H, N) like B", B.shape)
    if X.shape[1] == 0 or X.shape[1] % block_len:
        raise ValueError(f"{name}: X has shape {tuple(X.shape)}, expected L a multiple of block_len = {block_len}")
    X, A, B, C = (rows.unflatten(1, (-1, block_len)) for rows in (X, A, B, C))  # (B, K, Q, H, ...)
    A = A.permute(0, 3, 1, 2)                                                              # (B, H, K, Q)
    A_cumsum = A.cumsum(dim=-1)
    inside = torch.einsum("bkihn,bkjhn,bhkij,bkjhp->bkihp", C, B, segsum(A).exp(), X)
    to_end = (A_cumsum[..., -1:] - A_cumsum).exp()
    states = torch.einsum("bkjhn,bhkj,bkjhp->bkhpn", B, to_end, X)
    initial = torch.zeros_like(states[:, :1]) if initial_states is None else initial_states
    between = segsum(F.pad(A_cumsum[..., -1], (1, 0))).exp()                               # (B, H, 1+K, 1+K)
    states = torch.einsum("bhij,bjhpn->bihpn", between, torch.cat([initial, states], dim=1))
    carried = torch.einsum("bkihn,bkhpn,bhki->bkihp", C, states[:, :-1], A_cumsum.exp())
    return (inside + carried).flatten(1, 2), states[:, -1]

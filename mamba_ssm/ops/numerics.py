"""What all reference tiers share: the accumulation dtype, sequence boundaries, autocast off.   B batch, L length."""

from contextlib import AbstractContextManager

import torch

from mamba_ssm.ops.checks import check_integer, check_shape

Tensor = torch.Tensor


def accumulate_dtype(*tensors: Tensor | None) -> torch.dtype:
    """float64 if one of the tensors holds float64 (or complex128), else float32: states and sums are kept in it."""
    wide = (torch.float64, torch.complex128)
    return torch.float64 if any(t is not None and t.dtype in wide for t in tensors) else torch.float32


def without_autocast(tensor: Tensor) -> AbstractContextManager:
    """Autocast off on the tensor's device: operators choose their own dtypes."""
    return torch.autocast(device_type=tensor.device.type, enabled=False)


def sequence_starts(seq_idx: Tensor) -> Tensor:
    """True where `seq_idx` (B, L) differs from the row before; False in row 0, which continues the entering state."""
    changes = seq_idx[:, 1:] != seq_idx[:, :-1]                                           # (B, L-1)
    return torch.cat([torch.zeros_like(seq_idx[:, :1], dtype=torch.bool), changes], dim=1)


def packed_seq_idx(cu_seqlens: Tensor, length: int) -> Tensor:
    """seq_idx (1, L) of sequences packed into one row: cu_seqlens (S+1) integers, their starts, and the end."""
    check_shape("packed_seq_idx", "cu_seqlens", cu_seqlens, "(S+1)", (None,))
    check_integer("packed_seq_idx", cu_seqlens=cu_seqlens)
    rows = torch.arange(length, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), rows, right=True).unsqueeze(0)


def sequence_pieces(seq_idx: Tensor) -> Tensor:
    """Number of the piece each row belongs to, counted from 0: (B, L) int32, whatever values `seq_idx` (B, L) takes."""
    return sequence_starts(seq_idx).cumsum(dim=1, dtype=torch.int32)

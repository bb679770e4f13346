"""The native tiers: loads the compiled extension, gives its operators fake implementations and registers them.

Operators in `torch.ops.mamba_ssm_native` (schemas and autograd in csrc/selective_scan/scan_ops.cpp):
`selective_scan` prepares dtypes and calls `selective_scan_forward`, whose backward is `selective_scan_backward`;
`selective_state_update` moves a state on in place. Letters: B batch, D channels, L length, N state size, Q chunk.
"""

import importlib.machinery
from collections.abc import Callable
from pathlib import Path

import torch

from mamba_ssm.ops.tiers import register, register_unavailable

Tensor = torch.Tensor

STATE_CHUNK = 32                       # rows between two saved states, kStateChunk in csrc/selective_scan/scan_ops.h
MAX_CUDA_STATE = 256                   # the widest state that the CUDA kernels hold in registers
_NOT_BUILT = "the native extension is not built: pip install -e . --no-build-isolation"


def _load() -> str | None:
    """Load the extension; why not, if it can't be."""
    folder = Path(__file__).parent
    names = [f"_native_ext{suffix}" for suffix in (*importlib.machinery.EXTENSION_SUFFIXES, ".so")]
    library = next((folder / name for name in names if (folder / name).exists()), None)
    if library is None:
        return _NOT_BUILT
    try:
        torch.ops.load_library(str(library))
    except OSError as error:           # built for another torch, or a library it needs is missing
        return f"{library.name} does not load ({error}): build it again, pip install -e . --no-build-isolation"
    return None


def _has_kernel(device: str) -> bool:
    key = {"cpu": "CPU", "cuda": "CUDA"}[device]
    return torch._C._dispatch_has_kernel_for_dispatch_key("mamba_ssm_native::selective_scan_forward", key)


why_not_loaded = _load()


def why_not(device: str) -> str | None:
    """Why there are no native operators for tensors on `device` ("cpu" or "cuda"), or None if there are."""
    if why_not_loaded is not None:
        return why_not_loaded
    if not _has_kernel(device):
        return "the native extension was built without CUDA"
    return None


def register_native(operator: str, **functions: Callable) -> None:
    """Register `functions` (tier "cpu" or "cuda" -> implementation) of `operator`, or why they can't be had."""
    for tier, function in functions.items():
        if (reason := why_not(tier)) is None:
            register(operator, tier, function)
        else:
            register_unavailable(operator, tier, reason)


def selective_scan(
    u, delta, A, B, C, D, z, delta_bias, delta_softplus, return_last_state, seq_idx, initial_state
) -> Tensor | tuple[Tensor, Tensor]:
    """`selective_scan_fn` on the native tier of the tensors' device; arguments are checked already."""
    out, last_state = torch.ops.mamba_ssm_native.selective_scan(
        u, delta, A, B, C, D, z, delta_bias, delta_softplus, seq_idx, initial_state
    )
    return (out, last_state) if return_last_state else out


def selective_state_update(
    state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, state_batch_indices
) -> Tensor:
    """`selective_state_update` in C++; nothing is differentiated, arguments are checked already."""
    return torch.ops.mamba_ssm_native.selective_state_update(
        state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, state_batch_indices
    )


def _fake_forward(u, delta, A, B, C, D, z, delta_bias, delta_softplus, seq_idx, initial_state, save_states):
    batch, channels, length = u.shape
    chunks = (length + STATE_CHUNK - 1) // STATE_CHUNK if save_states else 0
    size = A.shape[1]
    return u.new_empty(u.shape), A.new_empty(batch, channels, size), A.new_empty(batch, chunks, channels, size)


def _fake_backward(
    dout, dlast_state, u, delta, A, B, C, D, z, delta_bias, delta_softplus, seq_idx, initial_state, states
):
    def like(tensor: Tensor | None, other: Tensor) -> Tensor:
        return other.new_empty(0) if tensor is None else tensor.new_empty(tensor.shape)

    real = A.real if A.is_complex() else A
    return (
        u.new_empty(u.shape), delta.new_empty(delta.shape), A.new_empty(A.shape), B.new_empty(B.shape),
        C.new_empty(C.shape), like(D, real), like(z, u), like(delta_bias, real), like(initial_state, A),
    )  # fmt: skip


if why_not_loaded is None:
    torch.library.register_fake("mamba_ssm_native::selective_scan_forward", _fake_forward)
    torch.library.register_fake("mamba_ssm_native::selective_scan_backward", _fake_backward)
    torch.library.register_fake(
        "mamba_ssm_native::selective_state_update", lambda state, x, *others: x.new_empty(x.shape)
    )

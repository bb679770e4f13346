"""One step of the selective scan or of Mamba-2's scan, the state updated in place.

    h ← exp(Δ A) ⊙ h + Δ x B,   y = h C + D x,   out = y · silu(z),   Δ = softplus(dt + dt_bias) if asked

Letters: B batch, D channels, N state size; or H heads, P headdim, G groups; S rows of the state tensor.
"""

import torch
import torch.nn.functional as F

from mamba_ssm.ops._native import register_native
from mamba_ssm.ops._native import selective_state_update as native_state_update
from mamba_ssm.ops.checks import (
    are_real_on_one_device,
    check_device,
    check_floating,
    check_integer,
    check_shape,
    is_differentiated,
)
from mamba_ssm.ops.numerics import accumulate_dtype, without_autocast
from mamba_ssm.ops.tiers import implementation, register, register_operator
from mamba_ssm.ops.triton.launch import register_triton

Tensor = torch.Tensor

NATIVE_VECTOR = 16                                      # states that the C++ step takes at a time
NARROW_STATE = 1 << 14                                  # elements from which the reference's launches pay

register_operator("selective_state_update", cpu=("cpu",), cuda=("triton",))


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
) -> Tensor:
    """One recurrent step on the fastest tier there is; `state` is overwritten.

    Without heads: state (B, D, N), x, dt, z (B, D), A (D, N), B, C (B, N) or (B, G, N), D, dt_bias (D).
    With heads: state (B, H, P, N), x, dt, z (B, H, P), A (H, P, N), B, C (B, G, N) or (B, N), D, dt_bias (H, P). Values
    shared by a head's channels are given by `expand`, and cost nothing more.
    state_batch_indices (B) integers: the row of `state` (S, ...) that each batch row reads and writes.
    Sums are kept in float32 (float64 if an input is), whatever the state's dtype. Gradients
    reach all inputs of this step but the state.   -> out like x"""
    _check_update(state, x, dt, A, B, C, D, z, dt_bias, state_batch_indices)
    run = implementation("selective_state_update", x.device)
    return run(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, state_batch_indices)


def selective_state_update_ref(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
) -> Tensor:
    """The judge of every other tier, in plain PyTorch, as `selective_state_update` in all else."""
    _check_update(state, x, dt, A, B, C, D, z, dt_bias, state_batch_indices)
    return _update_reference(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, state_batch_indices)


def _update_reference(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, state_batch_indices):
    with without_autocast(x):
        dtype = accumulate_dtype(state, x, dt, A, B, C, D, z, dt_bias)
        before = state.detach() if state_batch_indices is None else state.detach()[state_batch_indices.long()]
        before = before.clone() if torch.is_grad_enabled() else before                    # backward reads it
        dt, A = _unexpanded(dt, 1).to(dtype), _unexpanded(A, 0).to(dtype)
        dt = dt if dt_bias is None else dt + _unexpanded(dt_bias, 0).to(dtype)
        dt = (F.softplus(dt) if dt_softplus else dt).unsqueeze(-1)                        # (B, H, P|1, 1)
        rows = x.to(dtype)
        B, C = _spread(B.to(dtype), x), _spread(C.to(dtype), x)                           # (B, H, 1, N)
        after = torch.exp(dt * A) * before.to(dtype) + (dt * rows.unsqueeze(-1)) * B      # (B, H, P, N)
        out = (after * C).sum(dim=-1)                                                     # (B, H, P)
        out = out if D is None else out + rows * D.to(dtype)
        out = out if z is None else out * F.silu(z.to(dtype))
        if state_batch_indices is None:
            state.copy_(after.detach())
        else:
            state.index_copy_(0, state_batch_indices.long(), after.detach().to(state.dtype))
        return out.to(x.dtype)


def _update_native(*arguments):
    """The C++ step, or the reference where a gradient is wanted, which the C++ step has none of, or where it is faster:
    a head that shares A takes one exponential there, but one for each element in C++, in vectors of 16 states. A batch
    of 128 with 4 heads of 32 channels and 8 states took 0.29 ms, was 0.89 ms, on a core with AVX-512."""
    state, A = arguments[0], arguments[3]
    wanted = is_differentiated(arguments)
    narrow = A.stride(-1) == 0 and state.shape[-1] < NATIVE_VECTOR and state.numel() >= NARROW_STATE
    return _update_reference(*arguments) if wanted or narrow else native_state_update(*arguments)


def _unexpanded(tensor: Tensor, first: int) -> Tensor:
    """Axes from `first` on that `expand` made (stride 0) back to size 1: one exp for all copies."""
    for axis in range(first, tensor.dim()):
        if tensor.stride(axis) == 0 and tensor.shape[axis] > 1:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor


def _spread(weight: Tensor, x: Tensor) -> Tensor:
    """B or C as something that multiplies a state (B, D, N) or (B, H, P, N)."""
    if weight.dim() == 2:
        weight = weight.unsqueeze(1)                                                      # (B, 1, N): one group
    if weight.shape[1] > 1:
        weight = weight.repeat_interleave(x.shape[1] // weight.shape[1], dim=1)           # (B, D|H, N)
    return weight if x.dim() == 2 else weight.unsqueeze(2)


register("selective_state_update", "reference", _update_reference)
register_native("selective_state_update", cpu=_update_native)
register_triton("selective_state_update", "selective_state_update_kernels", "selective_state_update")


def _is_usual(state, x, dt, A, B, C, D, z, dt_bias, state_batch_indices) -> bool:
    """Whether the arguments are right in the commonest way, B and C (B, N) or one group: a step waits for this."""
    sizes = tuple(state.shape)                                       # slices of it cost less than a torch.Size's
    shape = sizes[:-1]
    if len(shape) not in (2, 3) or state_batch_indices is not None or x.shape != shape:
        return False
    per_channel, projections = shape[1:], ((shape[0], sizes[-1]), (shape[0], 1, sizes[-1]))
    return (
        dt.shape == shape
        and A.shape == sizes[1:]
        and B.shape in projections
        and C.shape in projections
        and (z is None or z.shape == shape)
        and (D is None or D.shape == per_channel)
        and (dt_bias is None or dt_bias.shape == per_channel)
        and are_real_on_one_device((state, x, dt, A, B, C, D, z, dt_bias))
    )


def _check_update(state, x, dt, A, B, C, D, z, dt_bias, state_batch_indices) -> None:
    if _is_usual(state, x, dt, A, B, C, D, z, dt_bias, state_batch_indices):
        return
    name = "selective_state_update"
    check_floating(name, state=state, x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias)
    check_integer(name, state_batch_indices=state_batch_indices)
    check_device(name, state.device, x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias)
    check_device(name, state.device, state_batch_indices=state_batch_indices)
    check_shape(name, "state", state, "(B, D, N) or (B, H, P, N)", (None,) * 3, (None,) * 4)
    rows, *channels, size = state.shape
    batch = rows if state_batch_indices is None else x.shape[0]
    letters = "D" if len(channels) == 1 else "H, P"
    check_shape(name, "x", x, f"(B, {letters})", (batch, *channels))
    for argument, tensor in (("dt", dt), ("z", z)):
        check_shape(name, argument, tensor, f"(B, {letters}) like x", x.shape)
    check_shape(name, "A", A, f"({letters}, N)", (*channels, size))
    for argument, tensor in (("B", B), ("C", C)):
        check_shape(name, argument, tensor, "(B, N) or (B, G, N)", (batch, size), (batch, None, size))
        if tensor.dim() == 3 and (tensor.shape[1] == 0 or channels[0] % tensor.shape[1]):
            raise ValueError(f"{name}: {argument} has {tensor.shape[1]} groups, expected a divisor of {channels[0]}")
    for argument, tensor in (("D", D), ("dt_bias", dt_bias)):
        check_shape(name, argument, tensor, f"({letters})", channels)
    check_shape(name, "state_batch_indices", state_batch_indices, "(B)", (batch,))

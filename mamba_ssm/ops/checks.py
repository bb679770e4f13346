"""Refusing wrong arguments by name, before anything is allocated or launched."""

from collections.abc import Iterable, Sequence

import torch

Tensor = torch.Tensor

_REAL = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.float64))


def are_real_on_one_device(tensors: Iterable[Tensor | None]) -> bool:
    """Whether all tensors that are given hold real floating-point numbers and are on one device.

    Quick, for operators whose launch waits for their checks: where the usual case is right, none by name is needed."""
    device = None
    for tensor in tensors:
        if tensor is None:
            continue
        if tensor.dtype not in _REAL or (device is not None and tensor.device != device):
            return False
        device = tensor.device if device is None else device
    return device is not None


def is_differentiated(arguments: Iterable[object]) -> bool:
    """Whether autograd is to follow an operator with these arguments; those that are no tensors do not count."""
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in arguments)


def check_shape(operator: str, name: str, tensor: Tensor | None, letters: str, *shapes: Sequence[int | None]) -> None:
    """Raise ValueError unless `tensor` is None or has one of `shapes` (None in a shape: any size).

    `letters` says the expectation in letters, such as "(B, D, L)"."""
    if tensor is None or tensor.shape in shapes:                     # the second is quick, and ends most calls
        return
    if any(_fits(tensor.shape, shape) for shape in shapes):
        return
    wanted = " or ".join(
        "(" + ", ".join("any" if size is None else str(size) for size in shape) + ")" for shape in shapes
    )
    raise ValueError(f"{operator}: {name} has shape {tuple(tensor.shape)}, expected {letters} = {wanted}")


def _fits(have: Sequence[int], want: Sequence[int | None]) -> bool:
    return len(have) == len(want) and all(w is None or h == w for h, w in zip(have, want, strict=True))


def check_device(operator: str, device: torch.device, **tensors: Tensor | None) -> None:
    """Raise ValueError unless every tensor that is given is on `device`."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{operator}: {name} is on {tensor.device}, expected {device} like the first argument")


def check_floating(operator: str, **tensors: Tensor | None) -> None:
    """Raise TypeError unless every tensor that is given holds real floating-point numbers."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_floating_point():
            raise TypeError(f"{operator}: {name} has dtype {tensor.dtype}, expected a real floating-point dtype")


def check_integer(operator: str, **tensors: Tensor | None) -> None:
    """Raise TypeError unless every tensor that is given holds integers."""
    for name, tensor in tensors.items():
        if tensor is not None and (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool):
            raise TypeError(f"{operator}: {name} has dtype {tensor.dtype}, expected an integer dtype")


def check_choice(operator: str, name: str, value: object, choices: Sequence[object]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{operator}: {name} is {value!r}, expected one of {', '.join(map(repr, choices))}")

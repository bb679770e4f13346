"""The package `causal_conv1d` in place of our convolution: where it is installed, takes the arguments and is faster.

Which of the two is faster is measured once in a process for each class of arguments, at the first call of that class,
on random tensors of its sizes: some milliseconds that wait for the device. Nothing is measured while a CUDA graph is
captured or a compiler traces; the former goes by what was measured before, the latter takes ours.

Letters: B batch, L length, D channels, W width.
"""

import importlib
import importlib.util
import logging
from collections.abc import Callable
from typing import NamedTuple

import torch

from mamba_ssm.ops.checks import is_differentiated
from mamba_ssm.ops.timing import can_measure, launched_milliseconds

Tensor = torch.Tensor

PACKAGE = "causal_conv1d"
INSTALLED = importlib.util.find_spec(PACKAGE) is not None
MARGIN = 0.9                           # of our time: what differs less is left to chance, and ours repeats bit for bit

_log = logging.getLogger(__name__)


class ConvClass(NamedTuple):
    """What the choice depends on. Sizes are powers of two, so that other lengths need no new measurement."""

    device: torch.device
    dtype: torch.dtype
    weight_dtype: torch.dtype
    batch: int
    channels: int
    length: int
    width: int
    channels_last: bool
    has_bias: bool
    activation: str | None
    differentiated: bool


_package_wins: dict[ConvClass, bool] = {}


def takes(
    x: Tensor, weight: Tensor, seq_idx: Tensor | None, initial_states: Tensor | None, return_final_states: bool
) -> bool:
    """Whether every version of the package takes these: x (B, D, L), weight (D, W)."""
    if seq_idx is not None or initial_states is not None or return_final_states or x.numel() == 0:
        return False
    if torch.float64 in (x.dtype, weight.dtype) or not 2 <= weight.shape[1] <= 4:
        return False
    return x.stride(2) == 1 or (x.stride(1) == 1 and all(n % 8 == 0 for n in (x.shape[1], x.stride(0), x.stride(2))))


def run(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """The package's convolution of x (B, D, L)."""
    return importlib.import_module(PACKAGE).causal_conv1d_fn(x, weight, bias, activation=activation)


def is_faster(ours: Callable, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> bool:
    """Whether the package is to run in place of `ours(x, weight, bias, activation)`, for arguments that it `takes`."""
    if torch.compiler.is_compiling():                                                     # it can't be traced
        return False
    kind = _class_of(x, weight, bias, activation)
    if kind not in _package_wins:
        if not can_measure(x.device):
            return False
        _package_wins[kind] = _measure(kind, ours)
    return _package_wins[kind]


def _class_of(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> ConvClass:
    needed = is_differentiated((x, weight, bias))
    sizes = (1 << (size.bit_length() - 1) for size in x.shape)
    return ConvClass(
        x.device, x.dtype, weight.dtype, *sizes, weight.shape[1], x.stride(2) != 1, bias is not None, activation, needed
    )


def _measure(kind: ConvClass, ours: Callable) -> bool:
    try:
        importlib.import_module(PACKAGE)
    except ImportError as error:                         # built for another torch, say
        _log.warning("the package %s is installed but can't be imported, our kernels run: %s", PACKAGE, error)
        return False
    arguments = _arguments_of(kind)
    theirs, own = (launched_milliseconds(_call_of(function, kind, arguments)) for function in (run, ours))
    faster = theirs < MARGIN * own
    _log.info("causal_conv1d: package %.4f ms, ours %.4f ms, %s runs for %s", theirs, own, faster and PACKAGE, kind)
    return faster


def _arguments_of(kind: ConvClass) -> tuple[Tensor, Tensor, Tensor | None, str | None]:
    """Random x (B, D, L), weight (D, W), bias (D) and the activation."""
    generator = torch.Generator(kind.device).manual_seed(0)                               # leaves the global one alone

    def draw(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, device=kind.device, generator=generator).to(dtype)

    if kind.channels_last:
        x = draw(kind.batch, kind.length, kind.channels, dtype=kind.dtype).transpose(1, 2)
    else:
        x = draw(kind.batch, kind.channels, kind.length, dtype=kind.dtype)
    weight = draw(kind.channels, kind.width, dtype=kind.weight_dtype)
    bias = draw(kind.channels, dtype=kind.weight_dtype) if kind.has_bias else None
    tensors = (t if t is None else t.requires_grad_(kind.differentiated) for t in (x, weight, bias))
    return *tensors, kind.activation


def _call_of(function: Callable, kind: ConvClass, arguments: tuple) -> Callable[[], object]:
    """What is timed: the forward pass, or with gradients both passes."""

    def call() -> object:
        with torch.set_grad_enabled(kind.differentiated):
            out = function(*arguments)
            if not kind.differentiated:
                return out
            return torch.autograd.grad(out, [t for t in arguments[:3] if t is not None], torch.ones_like(out))

    return call

"""How Triton kernels enter: their modules are imported only where they can run, their operators registered with torch.

They run on CUDA devices, or through Triton's interpreter on a CPU with TRITON_INTERPRET=1, which is what tests do. A
module of kernels may import Triton at its top, since `register_triton` alone imports it. Operators are defined in
`torch.ops.mamba_ssm_triton`: torch.compile and CUDA graphs see them whole, and autocast leaves their arguments alone.
"""

import importlib
import importlib.util
import os
from collections.abc import Callable

import torch

from mamba_ssm.ops.checks import is_differentiated
from mamba_ssm.ops.tiers import register, register_unavailable

Tensor = torch.Tensor

NAMESPACE = "mamba_ssm_triton"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

_library = torch.library.Library(NAMESPACE, "FRAGMENT")


def why_not() -> str | None:
    """Why no Triton kernel can run here, or None if one can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install triton"
    if torch.version.cuda is None and not INTERPRETED:
        return f"torch {torch.__version__} was built without CUDA"
    return None


def register_triton(operator: str, module: str, function: str) -> None:
    """Make `function` of `module` (beside this one) the triton tier of `operator`, or record why it can't be had."""
    if (reason := why_not()) is None:
        kernels = importlib.import_module(f"{__package__}.{module}")
        register(operator, "triton", getattr(kernels, function))
    else:
        register_unavailable(operator, "triton", reason)


def define(schema: str, run: Callable, fake: Callable) -> Callable:
    """Register `run` as the operator of `schema`, "name(Tensor x, ...) -> ...", for CUDA tensors (CPU tensors where
    kernels are interpreted), and `fake`, which makes its outputs without values.   -> what calls it"""
    name = schema.split("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("CUDA", "CPU") if INTERPRETED else ("CUDA",):
        _library.impl(name, _on_device_of_arguments(run), key)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def differentiate(name: str, backward: Callable, setup_context: Callable) -> None:
    """Give the operator `name` its backward, with the functions that `torch.library.register_autograd` takes. Calls of
    what that registers take twice as long (`ssd_scan` on one CPU core: 0.129 ms, 0.065 so)."""
    operator = getattr(getattr(torch.ops, NAMESPACE), name).default

    def forward(ctx, *inputs):
        with torch._C._AutoDispatchBelowAutograd():
            output = operator(*inputs)
        setup_context(ctx, inputs, output)
        return output

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function = type(name, (torch.autograd.Function,), methods)

    def run(*inputs):
        if is_differentiated(inputs):
            return function.apply(*inputs)
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*inputs)

    _library.impl(name, run, "Autograd")


def ceil_div(count: int, size: int) -> int:
    """Blocks of `size` that cover `count`. Triton's own, made to run in kernels too, takes ten times as long."""
    return -(-count // size)


def next_power_of_two(count: int) -> int:
    """The least power of two that is at least `count` >= 1."""
    return 1 << (count - 1).bit_length()


def _on_device_of_arguments(run: Callable) -> Callable:
    """Triton launches on the current device, which need not be the tensors'."""

    def launch(*arguments):
        index = arguments[0].get_device()                            # -1 on a CPU
        if index < 0 or index == torch.cuda.current_device():
            return run(*arguments)
        with torch.cuda.device(index):
            return run(*arguments)

    return launch

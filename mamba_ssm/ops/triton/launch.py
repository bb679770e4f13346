"""How Triton kernels enter: their modules are imported only where they can run, their operators registered with torch.

They run on CUDA devices, or through Triton's interpreter on a CPU with TRITON_INTERPRET=1, which is what tests do. A
module of kernels may import Triton at its top, since `register_triton` alone imports it. Operators are defined in
`torch.ops.mamba_ssm_triton`: torch.compile and CUDA graphs see them whole, and autocast leaves their arguments alone.
"""

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterable, Sequence

import torch

from mamba_ssm.ops.checks import is_differentiated
from mamba_ssm.ops.tiers import register, register_unavailable

Tensor = torch.Tensor

NAMESPACE = "mamba_ssm_triton"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_runs: dict[str, Callable] = {}                          # name of an operator -> what launches its kernels
_PLAIN = (torch.Tensor, torch.nn.Parameter)


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
    launch = _runs[name] = _on_device_of_arguments(run)
    for key in ("CUDA", "CPU") if INTERPRETED else ("CUDA",):
        _library.impl(name, launch, key)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def differentiate(name: str, backward: Callable, setup_context: Callable) -> Callable:
    """Give the operator `name` its backward, with the functions that `torch.library.register_autograd` takes. Calls of
    what that registers take twice as long (`ssd_scan` on one CPU core: 0.129 ms, 0.065 so).   -> what calls the
    operator, past the dispatcher where nothing but autograd is to see it (without gradient 0.030 ms, was 0.042).
    """
    operator, run_kernels = getattr(getattr(torch.ops, NAMESPACE), name).default, _runs[name]

    def forward(ctx, *inputs):
        if is_direct(inputs):
            output = run_kernels(*inputs)
        else:
            with torch._C._AutoDispatchBelowAutograd():
                output = operator(*inputs)
        output = tuple(output) if isinstance(output, list) else output                    # of an operator -> Tensor[]
        setup_context(ctx, inputs, output)
        return output

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function = type(name, (torch.autograd.Function,), methods)

    def run(*inputs):
        if is_differentiated(inputs):
            return function.apply(*inputs)
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*inputs)

    def call(*inputs):
        if not is_direct(inputs):
            return operator(*inputs)
        return function.apply(*inputs) if is_differentiated(inputs) else run_kernels(*inputs)

    _library.impl(name, run, "Autograd")
    return call


def is_direct(arguments: Iterable[object]) -> bool:
    """Whether only autograd is to follow an operator with these arguments: no compiler, trace, mode or transformation,
    and no tensor of a class of its own."""
    return (
        not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._get_tracing_state() is None
        and not any(isinstance(x, Tensor) and type(x) not in _PLAIN for x in arguments)
    )


class Launch:
    """A kernel with its grid, warps, stages and all its arguments behind the tensors, to be launched often.

    Triton's own search for the compiled kernel takes longer than the launch. So the first call compiles for its
    tensors, and later ones, whose tensors have the same dtypes, alignments to 16 bytes and Nones, hand over addresses.
    """

    def __init__(self, kernel, grid: tuple[int, int, int], arguments: tuple, warps: int, stages: int) -> None:
        self.kernel, self.grid, self.arguments = kernel, grid, arguments
        self.options = {"num_warps": warps, "num_stages": stages}
        self.compiled = self.hooks = None

    def __call__(self, tensors: Sequence[Tensor | None]) -> None:
        compiled, hooks = self.compiled, self.hooks
        if compiled is None:
            self.compiled = self.kernel[self.grid](*tensors, *self.arguments, **self.options)   # None if interpreted
            self.hooks = _hooks_of_launches()
        elif _is_told(hooks.launch_enter_hook) or _is_told(hooks.launch_exit_hook):
            compiled[self.grid](*tensors, *self.arguments)
        else:
            addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
            stream = torch._C._cuda_getCurrentRawStream(tensors[0].get_device())
            compiled.run(
                *self.grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *addresses,
                *self.arguments,
            )  # fmt: skip


def _hooks_of_launches() -> object:
    from triton import knobs

    return knobs.runtime


def _is_told(hook: object) -> bool:
    """Whether anything, such as a profiler, is to hear of launches through this hook of Triton's."""
    return bool(getattr(hook, "calls", hook))


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

"""Which functions go through torch.compile, and how: the same for world model and agents.

Programs and kernels are kept in inductor's cache folder (TORCHINDUCTOR_CACHE_DIR, by default in the temporary folder):
a process that finds them there starts in a fraction of the time.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch

# Autocast's begin and end are nodes of the traced program, with all that they depend on: such a program may be cached.
CACHEABLE = {f"torch.amp.autocast_mode.{name}": "1" for name in ("_enter_autocast", "_exit_autocast")}


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` through torch.compile: one program for fixed shapes, with the random numbers of the plain function.

    Raises (when called): torch's own error, where the function can't become one program.
    """
    # The compiler says so once for each long reduction; nobody can act on it.
    warnings.filterwarnings("ignore", message=r"\s*Online softmax is disabled", category=UserWarning)
    # Combined: small kernels that do not wait for each other, such as the casts of the weights, share launches.
    options = {"fallback_random": True, "combo_kernels": True, "unsafe_marked_cacheable_functions": CACHEABLE}
    return torch.compile(_with_code_of_its_own(function), fullgraph=True, dynamic=False, options=options)


def _with_code_of_its_own(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls `function`. Torch keeps at most 8 programs with a piece of code: otherwise the methods of a
    class would share them, and all decorated functions, however many models a process trains."""

    def program(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    program.__code__ = program.__code__.replace()
    return program

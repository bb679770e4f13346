"""Which functions go through torch.compile, and how: the same for world model and agents."""

import warnings
from collections.abc import Callable
from typing import Any

import torch


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` through torch.compile: one program for fixed shapes, with the random numbers of the plain function.

    Raises (when called): torch's own error, where the function can't become one program.
    """
    # The compiler says so once for each long reduction; nobody can act on it.
    warnings.filterwarnings("ignore", message=r"\s*Online softmax is disabled", category=UserWarning)
    return torch.compile(function, fullgraph=True, dynamic=False, options={"fallback_random": True})

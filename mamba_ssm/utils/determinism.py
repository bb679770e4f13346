"""Bit-identical results from run to run, or a refusal: torch's own switch, and what CUDA needs beside it.

Operators without a deterministic implementation raise while the switch is on; those of this package have one.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
CUBLAS_CHOICES = (":4096:8", ":16:8")


def use_deterministic_mode() -> bool:
    """Whether operators must choose deterministic implementations."""
    return torch.are_deterministic_algorithms_enabled()


def set_deterministic_mode(value: bool) -> None:
    """Switch deterministic implementations on or off for the process.

    cuBLAS reads its setting when CUDA starts: raises RuntimeError if that has happened without it."""
    if value and os.environ.get(CUBLAS_VARIABLE) not in CUBLAS_CHOICES:
        if torch.cuda.is_initialized():
            raise RuntimeError(
                f"set_deterministic_mode: {CUBLAS_VARIABLE} is {os.environ.get(CUBLAS_VARIABLE)!r} and CUDA has "
                f"started, expected {' or '.join(CUBLAS_CHOICES)} in the environment before"
            )
        os.environ[CUBLAS_VARIABLE] = CUBLAS_CHOICES[0]
    torch.use_deterministic_algorithms(value)


@contextmanager
def deterministic_mode(value: bool = True) -> Iterator[None]:
    """`set_deterministic_mode` for a block; the switch is set back behind it."""
    before, warn_only = use_deterministic_mode(), torch.is_deterministic_algorithms_warn_only_enabled()
    set_deterministic_mode(value)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)

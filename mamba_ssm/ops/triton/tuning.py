"""Block sizes: from small tables, or with MAMBA_SSM_AUTOTUNE=1 the fastest of some, timed on the device that runs them.

The tables hold what was fastest on an H200 at the shapes of training and imagination, and cost nothing. Timing compiles
and runs every candidate at the first call of each kind of arguments, which takes seconds to minutes, and other block
sizes may change results in their last bits: so it is off by default. It is read when this module is imported.
"""

import logging
import os
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from triton.runtime.errors import OutOfResources

from mamba_ssm.ops.timing import can_measure, launched_milliseconds

Blocks = TypeVar("Blocks")

VARIABLE = "MAMBA_SSM_AUTOTUNE"
AUTOTUNE = os.environ.get(VARIABLE) == "1"

_log = logging.getLogger(__name__)
_fastest: dict[tuple, object] = {}                       # (name, device, kind) -> blocks


def tuned(
    name: str, device: torch.device, kind: tuple, table: Blocks, others: Iterable[Blocks],
    run: Callable[[Blocks], object],
) -> Blocks:  # fmt: skip
    """`table`, the blocks of the table, or with autotuning the fastest among it and `others` for arguments of `kind`,
    which is all that the choice depends on. `run` launches a kernel with given blocks and may be called often: what it
    overwrites must be copies. While a CUDA graph is captured, what was not timed before comes from the table."""
    if not AUTOTUNE:
        return table
    key = (name, device, kind)
    if key not in _fastest:
        if not can_measure(device):
            return table
        _fastest[key] = _time(name, kind, [table, *(blocks for blocks in others if blocks != table)], run)
    return _fastest[key]


def _time(name: str, kind: tuple, candidates: list[Blocks], run: Callable[[Blocks], object]) -> Blocks:
    times = {}
    for blocks in candidates:
        try:
            times[blocks] = launched_milliseconds(lambda blocks=blocks: run(blocks))
        except OutOfResources:                           # more shared memory or registers than this device has
            continue
    best = min(times, key=times.get)
    _log.info("%s %s: %s, %.4f ms, of the table %.4f ms", name, kind, best, times[best], times.get(candidates[0], 0.0))
    return best

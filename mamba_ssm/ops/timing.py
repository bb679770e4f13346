"""What choices between kernels are made by at run time: the time that launched calls take on the current device."""

from collections.abc import Callable

import torch

CALLS, REPEATS, WARM_UP = 10, 5, 3


def launched_milliseconds(call: Callable[[], object]) -> float:
    """The least of some means over calls, after a warm-up that compiles. It waits for the device."""
    for _ in range(WARM_UP):
        call()
    means = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(CALLS):
            call()
        end.record()
        end.synchronize()
        means.append(start.elapsed_time(end) / CALLS)
    return min(means)


def can_measure(device: torch.device) -> bool:
    """Whether a call can be timed now: on a GPU, and not while a CUDA graph is captured."""
    return device.type == "cuda" and not torch.cuda.is_current_stream_capturing()

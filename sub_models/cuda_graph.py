"""Capture of a whole training or acting step in one CUDA graph, so that Python launches one graph instead of thousands
of kernels."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

WARMUP_CALLS = 3


class CapturedStep:
    """A function that is captured in a CUDA graph after a few ordinary calls.

    The first `WARMUP_CALLS` calls run eagerly on a side stream, as CUDA asks for before a capture (libraries allocate
    and compile there); the next one captures, and from then on the graph is replayed. Every call does its work exactly
    once.

    Args:
        function: reads and writes tensors whose storage stays (modules, buffers); must not wait for the device. Its
            result is returned; once captured, always the same tensors with new contents.
        device: where it runs.
        enabled: False, or a device that is no GPU: every call is an ordinary call.
        inputs: makes the function's argument, a tuple of tensors, outside the graph, for instance from host memory;
            None for a function without argument.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        device: torch.device,
        enabled: bool,
        inputs: Callable[[], tuple[Tensor, ...]] | None = None,
    ) -> None:
        self.function, self.device, self.inputs = function, device, inputs
        self.enabled = enabled and device.type == "cuda"
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._static: tuple[Tensor, ...] | None = None
        self._result: Any = None

    def __call__(self) -> Any:
        arguments = () if self.inputs is None else (self._settle(self.inputs()),)
        self._calls += 1
        if not self.enabled:
            return self.function(*arguments)
        if self._graph is None and self._calls <= WARMUP_CALLS:
            return self._call_on_side_stream(arguments)
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._result = self.function(*arguments)
        self._graph.replay()
        return self._result

    @property
    def settled(self) -> bool:
        """Whether warm-up and capture are over: a further call does nothing but the step."""
        return self._calls > WARMUP_CALLS

    def _settle(self, fresh: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Fresh inputs at the addresses that the graph reads."""
        if not self.enabled:
            return fresh
        if self._static is None:
            self._static = fresh
        else:
            for static, tensor in zip(self._static, fresh, strict=True):
                static.copy_(tensor)
        return self._static

    def _call_on_side_stream(self, arguments: tuple[Any, ...]) -> Any:
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            result = self.function(*arguments)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        return result

"""Launching compiled kernels without Triton's search for them, and calling operators past the dispatcher."""

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mamba_ssm.ops.triton import launch


class Compiled:
    """Stands in for what Triton compiles; remembers how it was launched."""

    function, packed_metadata = "function", "metadata"

    def __init__(self):
        self.launched = []

    def run(self, *arguments):
        self.launched.append(arguments)

    def __getitem__(self, grid):
        return lambda *arguments: self.launched.append(("told", grid, *arguments))


class Kernel:
    """Stands in for a Triton function; counts searches for what it compiles to."""

    def __init__(self):
        self.compiled, self.searches = Compiled(), []

    def __getitem__(self, grid):
        def search(*arguments, **options):
            self.searches.append((grid, arguments, options))
            return self.compiled

        return search


@pytest.fixture
def hooks(monkeypatch):
    """Triton's hooks of launches, of which none listens.   -> them"""
    hooks = SimpleNamespace(launch_enter_hook=SimpleNamespace(calls=[]), launch_exit_hook=SimpleNamespace(calls=[]))
    monkeypatch.setattr(launch, "_hooks_of_launches", lambda: hooks)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    return hooks


def test_the_first_call_compiles_and_later_ones_hand_addresses_over(hooks):
    kernel, tensors, others = Kernel(), (torch.zeros(3), None), (torch.ones(3), None)
    run = launch.Launch(kernel, (2, 1, 1), (5, True), warps=4, stages=2)
    run(tensors)
    run(others)
    assert kernel.searches == [((2, 1, 1), (*tensors, 5, True), {"num_warps": 4, "num_stages": 2})]
    address = others[0].data_ptr()
    assert kernel.compiled.launched == [(2, 1, 1, 7, "function", "metadata", None, None, None, address, None, 5, True)]


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_a_profiler_is_told_of_every_launch(hook, hooks):
    """Triton's own way of launching calls its hooks."""
    kernel, tensors = Kernel(), (torch.zeros(3),)
    run = launch.Launch(kernel, (2, 1, 1), (), warps=4, stages=2)
    run(tensors)
    getattr(hooks, hook).calls.append(print)
    run(tensors)
    assert kernel.compiled.launched == [("told", (2, 1, 1), *tensors)]
    setattr(hooks, hook, None)
    run(tensors)
    assert kernel.compiled.launched[1][0] == 2


class OfAnotherClass(torch.Tensor):
    pass


@pytest.mark.filterwarnings("ignore:.torch.jit.trace. is deprecated")
def test_only_plain_calls_go_past_the_dispatcher():
    """Compilers, modes and transformations see operators only through it."""
    x = torch.zeros(3)
    assert launch.is_direct((x, None, torch.nn.Parameter(x), 5))
    assert not launch.is_direct((x, x.as_subclass(OfAnotherClass)))
    with FakeTensorMode() as mode:
        assert not launch.is_direct((x,))
        fake = mode.from_tensor(x)
    assert not launch.is_direct((fake,))
    seen = []
    torch.func.vmap(lambda row: seen.append(launch.is_direct((row,))) or row)(x)
    assert not torch.compile(lambda row: row + launch.is_direct((row,)), backend="eager", fullgraph=True)(x).any()
    torch.jit.trace(lambda row: seen.append(launch.is_direct((row,))) or row + 1, x, check_trace=False)
    assert seen == [False, False]

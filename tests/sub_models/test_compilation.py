"""Compiled functions: as the plain ones, however many of them a process makes."""

import pytest
import torch

from sub_models import compilation


class Scale:
    def __init__(self, factor):
        self.factor = factor

    def plain(self, x, *, shift=1.0):
        return x * self.factor + shift

    @torch.no_grad()
    def without_gradient(self, x, shift=1.0):
        with torch.autocast("cpu", torch.bfloat16, enabled=False):
            return x * self.factor + shift


@pytest.fixture
def only_traced(monkeypatch):
    """torch.compile without its minutes of machine code."""
    compile_with = torch.compile

    def traced(function, *, options, **arguments):
        assert options["fallback_random"]
        return compile_with(function, backend="eager", **arguments)

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", traced)


@pytest.mark.parametrize("name", ["plain", "without_gradient"])
def test_a_process_may_compile_the_same_method_of_many_objects(only_traced, name):
    """A sweep in one process trains model after model; torch gives up after eight programs of one piece of code."""
    functions = [compilation.compiled(getattr(Scale(factor), name)) for factor in range(12)]
    for factor, function in enumerate(functions):
        x = torch.ones(factor + 1, requires_grad=True)
        out = function(x, shift=2.0)
        assert torch.equal(out, torch.full((factor + 1,), factor + 2.0))
        assert out.requires_grad is (name == "plain")
    assert functions[3](torch.ones(4)).tolist() == [4.0] * 4


def test_closures_keep_what_they_close_over(only_traced):
    factor = 3.0
    assert compilation.compiled(lambda x, y=2.0: x * factor + y)(torch.ones(1)).item() == 5.0

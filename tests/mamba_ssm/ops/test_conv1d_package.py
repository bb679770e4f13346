"""The package `causal_conv1d` beside our kernels, with a stand-in for it: what it takes, and when it runs."""

import logging
import sys
import types

import pytest
import torch

from mamba_ssm.ops import causal_conv1d, conv1d_package
from mamba_ssm.ops.causal_conv1d import causal_conv1d_ref

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def package(monkeypatch):
    """A package that computes as the judge does, and the shapes and dtypes of its calls."""
    calls = []

    def package_fn(x, weight, bias, activation):
        calls.append((tuple(x.shape), x.dtype))
        return causal_conv1d_ref(x, weight, bias, activation=activation)

    monkeypatch.setitem(sys.modules, "causal_conv1d", types.SimpleNamespace(causal_conv1d_fn=package_fn))
    monkeypatch.setattr(conv1d_package, "_package_wins", {})
    return calls


def ours(x, weight, bias, activation):
    return causal_conv1d_ref(x, weight, bias, activation=activation)


def set_times(monkeypatch, theirs, own):
    """What the two are measured to take; every measured function is called once.   -> the list of measurements"""
    measured = []

    def milliseconds(call):
        call()
        measured.append((theirs, own)[len(measured) % 2])
        return measured[-1]

    monkeypatch.setattr(conv1d_package, "launched_milliseconds", milliseconds)
    monkeypatch.setattr(conv1d_package, "can_measure", lambda device: True)
    return measured


def plain(batch=2, channels=8, length=11, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = ((batch, channels, length), (channels, 4), (channels,))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def channels_last(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("theirs, own, faster", [(0.01, 0.02, True), (0.02, 0.01, False), (0.0095, 0.01, False)])
def test_the_faster_one_is_measured_once_for_a_class(theirs, own, faster, package, monkeypatch):
    """A slower package, or one as fast, never runs; other lengths of the class are not measured again."""
    measured = set_times(monkeypatch, theirs, own)
    for length in (8, 11, 15):
        assert conv1d_package.is_faster(ours, *plain(length=length), "silu") is faster
    assert measured == [theirs, own]
    assert package == [((2, 8, 8), torch.float32)]                           # the measurement, at the class's sizes
    assert conv1d_package.is_faster(ours, *plain(length=16), "silu") is faster
    assert len(measured) == 4


def test_what_changes_the_class(package, monkeypatch):
    """Layout, dtype, bias, activation and gradients are measured on their own."""
    measured = set_times(monkeypatch, 0.01, 0.02)
    x, weight, bias = plain()
    variants = [
        (x, weight, bias, "silu"), (channels_last(x), weight, bias, "silu"), (x, weight, None, "silu"),
        (x, weight, bias, None), (x.bfloat16(), weight, bias, "silu"),
        (x, weight.clone().requires_grad_(), bias, "silu"),
    ]  # fmt: skip
    for variant in variants:
        conv1d_package.is_faster(ours, *variant)
    assert len(measured) == 2 * len(variants)
    with torch.no_grad():
        conv1d_package.is_faster(ours, *variants[-1])
    assert len(measured) == 2 * len(variants)                                # the first class again


def test_measuring_leaves_the_random_numbers_alone(package, monkeypatch):
    set_times(monkeypatch, 0.01, 0.02)
    torch.manual_seed(0)
    want = torch.rand(3)
    torch.manual_seed(0)
    conv1d_package.is_faster(ours, *plain(), None)
    assert torch.equal(torch.rand(3), want)


def test_nothing_is_measured_while_a_compiler_traces(package, monkeypatch):
    measured = set_times(monkeypatch, 0.01, 0.02)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not conv1d_package.is_faster(ours, *plain(), None)
    assert not measured


def test_a_package_that_does_not_import_is_told(monkeypatch, caplog):
    set_times(monkeypatch, 0.01, 0.02)
    monkeypatch.setitem(sys.modules, "causal_conv1d", None)
    monkeypatch.setattr(conv1d_package, "_package_wins", {})
    with caplog.at_level(logging.WARNING):
        assert not conv1d_package.is_faster(ours, *plain(), None)
        assert not conv1d_package.is_faster(ours, *plain(), None)
    assert len(caplog.records) == 1
    assert "can't be imported" in caplog.text


def test_what_the_package_takes():
    x, weight, _ = plain()
    seq_idx, initial = torch.zeros(2, 11, dtype=torch.int32), torch.zeros(2, 8, 3)
    assert conv1d_package.takes(x, weight, None, None, False)
    assert conv1d_package.takes(channels_last(x), weight, None, None, False)
    assert not conv1d_package.takes(channels_last(x[:, :6]), weight[:6], None, None, False)
    assert not conv1d_package.takes(x[:, :, ::2], weight, None, None, False)
    assert not conv1d_package.takes(x[:, :, :0], weight, None, None, False)
    assert not conv1d_package.takes(x, weight[:, :1], None, None, False)
    assert not conv1d_package.takes(x.double(), weight, None, None, False)
    for others in ((seq_idx, None, False), (None, initial, False), (None, None, True)):
        assert not conv1d_package.takes(x, weight, *others)


def test_where_triton_cannot_run_it_runs_for_what_it_takes(package):
    x, weight, bias = plain()
    want = causal_conv1d_ref(x, weight, bias, activation="silu")
    assert torch.equal(causal_conv1d._conv_package(x, weight, bias, None, None, False, "silu"), want)
    seq_idx = torch.zeros(2, 11, dtype=torch.int32)
    assert torch.equal(causal_conv1d._conv_package(x, weight, bias, seq_idx, None, False, "silu"), want)
    assert len(package) == 1


@pytest.mark.parametrize("theirs, runs", [(0.01, 1), (0.03, 0)])
def test_the_triton_tier_gives_way_to_a_faster_package(theirs, runs, package, monkeypatch):
    kernels = pytest.importorskip("mamba_ssm.ops.triton.causal_conv1d_kernels")
    set_times(monkeypatch, theirs, 0.02)
    monkeypatch.setattr(conv1d_package, "INSTALLED", True)
    monkeypatch.setattr(kernels, "run_conv", lambda x, weight, bias, *others: ours(x, weight, bias, "silu"))
    x, weight, bias = plain()
    kernels.causal_conv1d(x, weight, bias, None, None, False, "silu")        # measures, then runs one of them
    assert len(package) == 1 + runs
    package.clear()
    out = kernels.causal_conv1d(x, weight, bias, None, None, False, "silu")
    assert len(package) == runs
    assert torch.equal(out, ours(x, weight, bias, "silu"))


@GPU
@pytest.mark.gpu
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("differentiated", [False, True])
def test_both_are_timed_on_a_gpu(last, differentiated, package, monkeypatch):
    """The judge stands in for the package, which is far slower than our kernels; in a capture nothing is measured."""
    kernels = pytest.importorskip("mamba_ssm.ops.triton.causal_conv1d_kernels")
    large = plain(8, 1024, 4096)                                             # so that launches are not what is timed
    x, weight, bias = (t.cuda().requires_grad_(differentiated) for t in large)
    x = channels_last(x) if last else x
    graph = torch.cuda.CUDAGraph()
    kernels._plain_conv(x, weight, bias, None)                               # compiles
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        assert not conv1d_package.is_faster(kernels._plain_conv, x, weight, bias, None)
    assert not package
    assert not conv1d_package.is_faster(kernels._plain_conv, x, weight, bias, None)
    assert package

"""Block sizes: the table's unless autotuning is asked for, which takes the fastest and changes no result."""

import pytest
import torch

pytest.importorskip("triton")
from triton.runtime.errors import OutOfResources

from mamba_ssm.ops.triton import launch, recurrent_step_kernels, tuning
from mamba_ssm.testing import assert_close

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
runs = pytest.mark.skipif(not (ON_GPU or launch.INTERPRETED), reason="runs on a GPU or interpreted")


@pytest.fixture
def autotuning(monkeypatch):
    """Asked for, without anything remembered; everywhere, with `times` in place of measurements, in order."""
    monkeypatch.setattr(tuning, "AUTOTUNE", True)
    monkeypatch.setattr(tuning, "_fastest", {})

    def with_times(*times):
        left = list(times)
        monkeypatch.setattr(tuning, "can_measure", lambda device: True)
        monkeypatch.setattr(tuning, "launched_milliseconds", lambda call: left.pop(0) if left else 9.0)

    return with_times


def choose(kind=("kind",), table="table", others=("first", "second"), run=None, device=DEVICE):
    return tuning.tuned("name", device, kind, table, others, run)


def test_without_the_flag_the_table_is_taken_and_nothing_runs():
    """`run` is None here: calling it would fail."""
    assert not tuning.AUTOTUNE
    assert choose() == "table"


def test_the_fastest_is_taken_and_remembered_for_its_kind_and_device(autotuning):
    autotuning(3.0, 2.0, 1.0, 1.0, 2.0, 3.0)
    assert choose() == "second"
    assert choose() == "second"
    assert choose(kind=("other",)) == "table"
    assert choose(device=torch.device("meta")) == "table"                    # 9 ms each: the first


def test_blocks_that_do_not_fit_are_left_out(autotuning, monkeypatch):
    autotuning()

    def measure(call):
        call()
        return 1.0

    def run(blocks):
        if blocks != "second":
            raise OutOfResources(300000, 232448, "shared memory")

    monkeypatch.setattr(tuning, "launched_milliseconds", measure)
    assert choose(run=run) == "second"


def test_nothing_is_timed_where_nothing_can_be(autotuning, monkeypatch):
    """While a graph is captured, say: the table for now, but not for good."""
    monkeypatch.setattr(tuning, "can_measure", lambda device: False)
    assert choose() == "table"
    autotuning(3.0, 2.0, 1.0)
    assert choose() == "second"


def step_inputs(batch=2, heads=2, headdim=16, state=16, width=4):
    generator = torch.Generator().manual_seed(0)
    dim, channels = heads * headdim, heads * headdim + 2 * state
    shapes = [
        (batch, dim + channels + heads), (batch, channels, width), (batch, heads, headdim, state), (channels, width),
        (channels,), (heads,), (heads,), (heads,), (dim,),
    ]  # fmt: skip
    return [torch.randn(shape, generator=generator).to(DEVICE) for shape in shapes]


@runs
def test_tuning_the_step_leaves_its_states_alone(autotuning, monkeypatch):
    """Candidates run on copies: the states move on by one step, whatever was tried before."""
    options = (1e-5, False, 0.0, float("inf"))
    plain, tuned = step_inputs(), step_inputs()
    with monkeypatch.context() as off:
        off.setattr(tuning, "AUTOTUNE", False)
        want = recurrent_step_kernels.run_mamba2_step(*plain, *options)
    tried = []

    def measure(call):
        call()
        tried.append(call)
        return 2.0 - len(tried) / 10

    autotuning()
    monkeypatch.setattr(tuning, "launched_milliseconds", measure)
    out = recurrent_step_kernels.run_mamba2_step(*tuned, *options)
    assert len(tried) > 3
    for got, wanted in zip((out, *tuned[1:3]), (want, *plain[1:3]), strict=True):
        assert_close(got, wanted, 1e-6)

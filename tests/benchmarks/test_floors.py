"""The floors of a step: counted work against torch's own count, parts that add up, a page that is up to date."""

from pathlib import Path

import gymnasium
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.floors import (
    REST,
    Part,
    Work,
    between,
    convolution_layers,
    count_parts,
    first_result,
    gap_table,
    group_kernels,
    loop_table,
    packing_table,
    part_table,
    products,
    read,
    scaling_table,
    tables,
    variant_table,
)
from sub_models.world_models import build_world_model
from utils import load_config

ROOT = Path(__file__).resolve().parents[2]
MEASURED = ROOT / "benchmarks" / "results" / "train_step_h200_mamba2_ac.json"


OTHERS = ("imagination", "agent_update", "acting", "environment_and_replay")


@pytest.fixture(scope="module")
def config():
    return load_config([], "train.py").config


@pytest.fixture(scope="module")
def world_model(config):
    return build_world_model(config, gymnasium.spaces.Discrete(6), torch.device("cpu"))


def counted(function):
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def test_convolutions_are_counted_as_torch_counts_them(world_model):
    frame, code = torch.rand(1, 3, 64, 64), torch.rand(1, 64, 4, 4)
    encoder, decoder = world_model.encoder, world_model.decoder
    assert sum(layer.flop for layer in convolution_layers(encoder, 3, 64)) == counted(lambda: encoder.layers(frame))
    layers = convolution_layers(decoder, 64, 4)
    assert sum(layer.flop for layer in layers) == counted(lambda: decoder.layers(code))
    assert layers[0].inputs == 64 * 4 * 4 and layers[-1].outputs == 3 * 64 * 64


@pytest.mark.parametrize("input_gradient", [True, False])
def test_products_are_counted_as_torch_counts_them(world_model, input_gradient):
    head, x = world_model.reward_head, torch.rand(5, 512, requires_grad=input_gradient)
    linear = 2 * 5 * (512 * 256 + 256 * 255)
    assert products(head, 5).flop == linear == counted(lambda: head(x))
    both = products(head, 5, backward=True, input_gradient=input_gradient).flop
    assert both == counted(lambda: head(x).sum().backward())


def test_a_floor_is_the_longer_of_two_times():
    assert Work(bytes=4.3e9).ms == pytest.approx(1.0) and Work(4.3e9, 2 * 790e9).ms == pytest.approx(2.0)
    assert Part("a", "", [Work(4.3e9), Work(flop=790e9)]).floor_ms == pytest.approx(2.0)


def test_every_kernel_is_in_one_part(config):
    """Parts that leave out kernels, or count them twice, would not add up to the phase."""
    result = first_result(MEASURED)
    for phase, parts in count_parts(config).items():
        groups = group_kernels(result[phase], parts)
        assert sum(group.kernels for group in groups.values()) == result[phase]["kernels"]
        assert sum(group.ms for group in groups.values()) == pytest.approx(result[phase]["busy_ms"])
        assert 0 <= groups[REST].ms < 0.1 * result[phase]["busy_ms"] or phase == "agent_update"


def test_kernels_that_no_part_names_are_the_rest():
    parts = [Part("a", "^_a_kernel", [Work(4.3e6)]), Part("b", "a_kernel", [])]
    measured = {"longest": [["_a_kernel", 2, 0.5], ["other", 1, 0.25]], "kernels": 5, "busy_ms": 1.0}
    groups = group_kernels(measured, parts)
    assert (groups["a"].kernels, groups["a"].ms) == (2, 0.5) and groups["b"].kernels == 0
    assert (groups[REST].kernels, groups[REST].ms) == (3, 0.5)  # two were left out of the list
    assert part_table(parts, measured).splitlines()[-1] == "| sum | 5 | 1.000 | 0.001 | 4 | 0 |"


def test_gaps_and_the_host_are_apart_where_they_were_measured_so():
    phase = {"kernels": 2, "busy_ms": 1.0, "median_ms": 1.5}
    others = {name: {"kernels": None} for name in OTHERS}
    row = gap_table({"world_model_update": phase} | others).splitlines()[-1]
    assert row == "| World-model update | 2 | 1.00 | 0.50 | 1.50 |"
    phase |= {"gaps_ms": 0.3, "host_ms": 0.2}
    row = gap_table({"world_model_update": phase} | others).splitlines()[-1]
    assert row == "| World-model update | 2 | 1.00 | 0.30 | 0.20 | 1.50 |"


def test_a_loops_traced_step_stands_below_its_medians():
    way = {"median_ms": 12.0, "min_ms": 11.0}
    traced = {"kernels": 800.4, "busy_ms": 10.0, "gaps_ms": 1.0, "idle_ms": 0.5, "step_ms": 11.5}
    lines = loop_table({"default": way, "overlapped": way, "traced": traced}).splitlines()
    assert lines[2] == "| as configured by default | 12.00 | 11.00 |"
    assert lines[-1] == "| a traced step | 800 | 10.00 | 1.00 | 0.50 | 11.50 |"
    assert "traced" not in loop_table({"default": way, "overlapped": way})


def test_what_lengths_cost_and_what_packing_gains():
    results = [
        {"backbone": "Mamba2", "length": 128, "median_ms": 2.0, "peak_MiB": 1000.0},
        {"backbone": "Mamba2", "length": 4096, "median_ms": 2.2, "peak_MiB": 1000.0},
        {"backbone": "Transformer", "length": 128, "median_ms": 1.0, "peak_MiB": 900.0},
    ]
    lines = scaling_table({"rows": 65536, "results": results}).splitlines()
    assert (
        lines[0] == "| L of 65,536 rows | Mamba2 | Transformer |" and lines[3] == "| 4,096 | 2.20 ms, 1,000 MiB | - |"
    )
    assert lines[-1] == "| longest / shortest | 1.10 | 1.00 |"
    row = {"mps": True, "runs": 2, "steps_per_second": 90.0, "gain": 1.2, "reserved_mib_of_one": 4096.0}
    assert packing_table({"results": [row]}).splitlines()[-1] == "| with | 2 | 90.0 | 45.0 | 1.20 | 4.0 |"


def test_the_page_has_the_tables_of_its_measurement(config):
    """A figure that was measured again, and a page that was not made again."""
    page = made = (ROOT / "docs" / "performance.md").read_text()
    folder = MEASURED.parent
    found = tables(config, first_result(MEASURED), first_result(folder / "train_step_loop_h200.json"))
    found["variants"] = variant_table(read(folder / "train_step_h200.json"))
    found["scaling"] = scaling_table(read(folder / "scaling_h200.json"))
    found["packing"] = packing_table(read(folder / "packing_h200_compiled.json"))
    for name, table in found.items():
        made = between(made, name, table)
    assert made == page, "the command at the top of the page makes its tables anew"

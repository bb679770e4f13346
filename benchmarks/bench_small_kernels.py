"""The kernels around the scans on a GPU: one recurrent step, norms, convolution, activations, beside plain PyTorch.

    python benchmarks/bench_small_kernels.py                # about a minute
    python benchmarks/bench_small_kernels.py --tune         # also the step's block sizes, a print-out

Shapes are those of imagination (B rows), acting (B = 1) and the world-model update (B16 L128) in the default
configuration: d_model 512, d_inner 1024, N 16, W 4, bfloat16 rows and windows of the convolution, which hold such rows,
float32 states and parameters. Figures are medians of at least 20 repeats after warm-up, with the 10th and 90th
percentile: launched from Python one call at a time, and ten calls captured in a CUDA graph, divided by ten. `floor` is
the time for reading every input and writing every output once at the bandwidth of a large copy measured in the same
run. Every output is compared with the reference in float64 first. Mamba-2's imagined step is there in both forms: it
moves a float32 state, or looks back at kept rows, as the first, eighth and last of 16 steps behind 8 rows do; calls of
the latter take turns between two layers, so that none finds its rows in the cache. Writes
benchmarks/results/small_kernels_<device>.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench_selective_scan import CALLS_IN_GRAPH, RESULTS, copy_bandwidth, device_time, in_graph

from mamba_ssm.ops.causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from mamba_ssm.ops.tiers import explain, use_tier
from mamba_ssm.ops.triton import recurrent_step_kernels
from mamba_ssm.ops.triton.dual_step import KeptRows, Rows, mamba2_dual_step
from mamba_ssm.ops.triton.k_activations import swiglu
from mamba_ssm.ops.triton.layer_norm import rms_norm_fn
from mamba_ssm.ops.triton.layernorm_gated import rmsnorm_fn
from mamba_ssm.ops.triton.recurrent_step import mamba2_step, mamba_step
from mamba_ssm.ops.triton.selective_state_update import selective_state_update
from mamba_ssm.testing import assert_close, to_float64

Tensor = torch.Tensor
HEADS, HEADDIM, STATE, WIDTH, D_MODEL, D_INNER, RANK = 16, 64, 16, 4, 512, 1024, 32
BATCH, ROWS = 16, 16 * 128                                           # of a world-model update
CONTEXT, IMAGINED = 8, (0, 7, 15)                                    # rows before imagined steps; steps before one
BLOCKS = [(2048, 4, 64), (4096, 4, None), (4096, 8, 64), (8192, 8, 80), (16384, 8, None), (16384, 8, 128)]
TOLERANCE = 6e-3                                                     # bfloat16 rows


class Case(NamedTuple):
    """An operator with its arguments by position; `changed` are those that it overwrites, read and written. Calls take
    turns between them and `others`, arguments of the same shapes."""

    name: str
    operator: str
    function: Callable
    arguments: tuple
    differentiated: tuple[int, ...] = ()
    changed: tuple[int, ...] = ()
    others: tuple[tuple, ...] = ()


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.float32).to(dtype)


def parameter(*shape: int) -> Tensor:
    return draw(*shape, dtype=torch.float32)


def step_cases(batch: int, state_dtype: torch.dtype = torch.float32) -> list[Case]:
    """Both mixers' steps and their parts."""
    channels, label = D_INNER + 2 * STATE, f"B{batch}" + ("" if state_dtype == torch.float32 else " bf16 states")
    mamba2 = (
        draw(batch, 2 * D_INNER + 2 * STATE + HEADS), draw(batch, channels, WIDTH),
        draw(batch, HEADS, HEADDIM, STATE, dtype=state_dtype), parameter(channels, WIDTH), parameter(channels),
        parameter(HEADS), parameter(HEADS), parameter(HEADS), parameter(D_INNER),
    )  # fmt: skip
    mamba = (
        draw(batch, 2 * D_INNER), draw(batch, D_INNER, WIDTH),
        draw(batch, D_INNER, STATE, dtype=state_dtype), parameter(D_INNER, WIDTH), parameter(D_INNER),
        0.03 * draw(RANK + 2 * STATE, D_INNER), 0.2 * draw(D_INNER, RANK), parameter(D_INNER),
        parameter(D_INNER, STATE), parameter(D_INNER),
    )  # fmt: skip
    x, dt, z, B, C = *(draw(batch, D_INNER) for _ in range(3)), *(draw(batch, STATE) for _ in range(2))
    update = (mamba[2].clone(), x, dt, -mamba[8].exp(), B, C, mamba[9], z, mamba[7], True)
    convolution = (x, mamba[1].clone(), *mamba[3:5], "silu")
    return [
        Case(f"mamba2_step {label}", "mamba2_step", mamba2_step, mamba2, changed=(1, 2)),
        Case(f"mamba_step {label}", "mamba_step", mamba_step, mamba, changed=(1, 2)),
        Case(f"selective_state_update {label}", "selective_state_update", selective_state_update, update, changed=(0,)),
        Case(f"causal_conv1d_update {label}", "causal_conv1d_update", causal_conv1d_update, convolution, changed=(1,)),
    ]  # fmt: skip


def dual_step_case(batch: int, steps_before: int) -> Case:
    """Mamba-2's step on kept rows, of which there are no more than it reads and writes: their sizes are its bytes."""
    channels = D_INNER + 2 * STATE
    parameters = (parameter(channels), *(parameter(HEADS) for _ in range(3)), 1, parameter(D_INNER))

    def layer() -> tuple:
        kept = [
            (draw(batch, rows, channels), parameter(batch, 2, rows, HEADS)) for rows in (CONTEXT, steps_before + 1)
        ]
        row, window = draw(batch, 2 * D_INNER + 2 * STATE + HEADS), draw(batch, WIDTH, channels)
        return (row, *kept[0], *kept[1], window, parameter(WIDTH, channels), *parameters)

    def step(row, passed_x_B, passed_left, stepped_x_B, stepped_left, window, taps, *rest) -> Tensor:
        passed, stepped = Rows(passed_x_B, passed_left), Rows(stepped_x_B, stepped_left)
        return mamba2_dual_step(row, KeptRows(passed, stepped, window, taps, steps_before), *rest)

    name = f"mamba2_dual_step B{batch}, row {CONTEXT + steps_before + 1}"
    return Case(name, "mamba2_dual_step", step, layer(), others=(layer(),))


def row_cases() -> list[Case]:
    """What the world-model update runs over its rows."""

    def leaf(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return draw(*shape, dtype=dtype).requires_grad_()

    weight = leaf(D_MODEL, dtype=torch.float32)
    stream = (leaf(ROWS, D_MODEL), weight, None, leaf(ROWS, D_MODEL, dtype=torch.float32))
    plain = (leaf(ROWS, D_MODEL), weight, None)
    gated = (leaf(ROWS, D_INNER), leaf(D_INNER, dtype=torch.float32), None, leaf(ROWS, D_INNER))
    channels = D_INNER + 2 * STATE
    taps = (leaf(channels, WIDTH, dtype=torch.float32), leaf(channels, dtype=torch.float32))
    projected = draw(BATCH, ROWS // BATCH, channels + 16).narrow(2, 16, channels)         # a slice of wider rows
    pieces = (torch.rand(BATCH, ROWS // BATCH, device="cuda") < 0.02).cumsum(dim=1, dtype=torch.int32)
    last = (projected.transpose(1, 2).requires_grad_(), *taps, pieces, None, False, "silu")
    first = (leaf(BATCH, channels, ROWS // BATCH), *taps, None, None, False, "silu")
    return [
        Case(
            "rms_norm residual prenorm", "layer_norm",
            lambda *t: rms_norm_fn(*t, prenorm=True, residual_in_fp32=True), stream, (0, 1, 3)),
        Case("rms_norm silu", "layer_norm", lambda *t: rms_norm_fn(*t, activation="silu"), plain, (0, 1)),
        Case(
            "gated rms_norm", "layernorm_gated", lambda *t: rmsnorm_fn(*t, norm_before_gate=False), gated, (0, 1, 3)),
        Case("causal_conv1d B16 L128 (B, L, D), seq_idx", "causal_conv1d", causal_conv1d_fn, last, (0, 1, 2)),
        Case("causal_conv1d B16 L128 (B, D, L)", "causal_conv1d", causal_conv1d_fn, first, (0, 1, 2)),
        Case("swiglu", "swiglu", swiglu, (leaf(ROWS, D_INNER), leaf(ROWS, D_INNER)), (0, 1)),
    ]  # fmt: skip


def outputs(result: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def passes(case: Case) -> dict[str, Callable[[], object]]:
    """The forward pass alone, and forward + backward where something is differentiated."""

    turns = itertools.cycle((case.arguments, *case.others))

    @torch.no_grad()
    def forward():
        return case.function(*next(turns))

    def forward_backward():
        found = outputs(case.function(*case.arguments))
        needing = [case.arguments[i] for i in case.differentiated]
        return torch.autograd.grad(found, needing, [torch.ones_like(out) for out in found])

    return {"forward": forward} | ({"forward_backward": forward_backward} if case.differentiated else {})


def check(case: Case) -> None:
    """The case agrees with the reference in float64, what it overwrites too."""
    narrow = [t.detach().clone() if isinstance(t, Tensor) else t for t in case.arguments]
    wide = [to_float64(t) for t in narrow]
    with torch.no_grad():
        found = outputs(case.function(*narrow))
        with use_tier("reference"):
            wanted = outputs(case.function(*wide))
    for out, want in zip(found, wanted, strict=True):
        assert_close(out, want, TOLERANCE, case.name)
    for i in case.changed:
        assert_close(narrow[i], wide[i], TOLERANCE, f"{case.name}, argument {i}")


def size_of(tensors: list) -> int:
    return sum(t.numel() * t.itemsize for t in tensors if isinstance(t, Tensor))


def least_bytes(case: Case) -> dict[str, int]:
    """Forward reads its arguments and writes its outputs; backward reads those and writes the gradients."""
    with torch.no_grad():
        found = outputs(case.function(*case.arguments))
    forward = size_of(list(case.arguments)) + size_of([case.arguments[i] for i in case.changed]) + size_of(found)
    gradients = size_of([case.arguments[i] for i in case.differentiated])
    return {"forward": forward, "forward_backward": 2 * forward + gradients}


def bench(case: Case, bandwidth: float, repeats: int) -> dict:
    if (report := explain(case.operator, "cuda")).missing:
        raise SystemExit(f"nothing to compare: {report}")
    check(case)
    result = {"case": case.name}
    for name, call in passes(case).items():
        with use_tier("reference"):
            reference = device_time(in_graph(call), 20, CALLS_IN_GRAPH)
        floor = least_bytes(case)[name] / bandwidth * 1e3
        graph = device_time(in_graph(call), repeats, CALLS_IN_GRAPH)
        result[name] = {
            "graph": graph, "launched": device_time(call, repeats), "reference_graph": reference,
            "floor_ms": round(floor, 5), "graph_over_floor": round(graph["median_ms"] / floor, 2),
        }  # fmt: skip
        print(
            f"{case.name:42} {name:17} graph {graph['median_ms']:.4f} launched "
            f"{result[name]['launched']['median_ms']:.4f} plain graph {reference['median_ms']:.4f} "
            f"floor {floor:.4f} ms", flush=True,
        )  # fmt: skip
    return result


def tune_step(repeats: int) -> None:
    """Blocks of Mamba-2's step at both ends: print-out for `SHARED` and `LONE` of `recurrent_step_kernels`."""
    chosen = recurrent_step_kernels.SHARED, recurrent_step_kernels.LONE
    for batch, state_dtype in ((1024, torch.float32), (1024, torch.bfloat16), (1, torch.float32)):
        call = passes(step_cases(batch, state_dtype)[0])["forward"]
        for blocks in BLOCKS:
            recurrent_step_kernels.SHARED = recurrent_step_kernels.LONE = blocks
            time = device_time(in_graph(call), repeats, CALLS_IN_GRAPH)["median_ms"]
            print(f"mamba2_step B{batch} {state_dtype} tile, warps, registers {blocks}: {time:.4f} ms", flush=True)
    recurrent_step_kernels.SHARED, recurrent_step_kernels.LONE = chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--tune", action="store_true", help="print the step's time for other block sizes")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("the kernels run on CUDA devices: there is none here")
    torch.manual_seed(0)
    bandwidth, name = copy_bandwidth(), torch.cuda.get_device_name()
    bf16_states = [case for case in step_cases(1024, torch.bfloat16) if "update" not in case.operator]
    dual_steps = [dual_step_case(1024, steps_before) for steps_before in IMAGINED]
    cases = [*step_cases(1024), *dual_steps, *bf16_states, *step_cases(1), *row_cases()]
    result = {
        "device": name, "torch": torch.__version__, "python": platform.python_version(),
        "copy_TB_s": round(bandwidth / 1e12, 2), "cases": [],
    }  # fmt: skip
    target = RESULTS / f"small_kernels_{name.lower().replace(' ', '_')}.json"
    for case in cases:
        result["cases"].append(bench(case, bandwidth, options.repeats))
        target.write_text(json.dumps(result, indent=1) + "\n")             # a run that is cut short leaves what it has
    print(f"written: {target}")
    if options.tune:
        tune_step(options.repeats)


if __name__ == "__main__":
    main()

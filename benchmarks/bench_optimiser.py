"""One optimiser step for the default world model: launch by launch, torch's fused AdamW, and the fused kernels.

    python benchmarks/bench_optimiser.py                        # on the GPU if there is one, else on the CPU

Parameters have the world model's shapes and memory orders, gradients are there already. `clipped` steps are those of
training: gradient norm, clipping, skipping, warm-up, update; bare ones are the optimiser's update alone. Figures are
medians of at least 20 repeats after warm-up, with the 10th and 90th percentile; on a GPU launched from Python one call
at a time, and ten calls captured in a CUDA graph, divided by ten. `floor` is the time to read the gradients twice
(once without clipping), parameters and moments once, and to write all but the gradients, at the bandwidth of a large
copy measured in the same run. Before anything is timed, fused and plain steps must agree. Writes
benchmarks/results/optimiser_<device>.json.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from gymnasium.spaces import Discrete

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.bench_selective_scan import CALLS_IN_GRAPH, copy_bandwidth, device_time, host_time, in_graph
from benchmarks.train_step import profiled
from mamba_ssm.testing import assert_close
from sub_models.laprop import LaProp, why_not_fused
from sub_models.optimiser import Optimiser
from sub_models.world_models import build_world_model
from tools.provenance import provenance
from utils import load_config

RESULTS = Path(__file__).parent / "results"
NAMES = ("Laprop", "Adam")
NUM_ACTIONS = 6  # Pong's


def make_params(device: torch.device) -> list[torch.nn.Parameter]:
    """The default world model's parameters, with gradients of size 1."""
    config = load_config([], "train.py").config
    torch.manual_seed(0)
    params = list(build_world_model(config, Discrete(NUM_ACTIONS), device).parameters())
    for p in params:
        p.grad = torch.randn_like(p)
    return params


def variants(device: torch.device, fused: bool) -> dict[str, Callable[[], object]]:
    """{what: a call that steps its own parameters once}."""
    loss, calls = torch.zeros((), device=device), {}
    for name in NAMES:
        for kind in ("plain", "fused") if fused else ("plain",):
            optimiser = Optimiser(make_params(device), name, 1e-4, 1e-8, 1000.0, 1000, fused=kind == "fused")
            calls[f"{name} clipped, {kind}"] = lambda optimiser=optimiser: optimiser.step(loss)
            if name == "Laprop":
                bare = LaProp(make_params(device), 1e-4, fused=kind == "fused")
                calls[f"{name} bare, {kind}"] = bare.step
    torch_adam = torch.optim.AdamW(make_params(device), 1e-4, fused=True, capturable=device.type == "cuda")
    calls["Adam bare, torch"] = torch_adam.step
    return calls


def check_first(device: torch.device) -> None:
    """Three fused steps end where three plain ones do."""
    for name in NAMES:
        ends = []
        for fused in (False, True):
            params = make_params(device)
            optimiser = Optimiser(params, name, 1e-4, 1e-8, 1000.0, 2, fused=fused)
            for _ in range(3):
                for p in params:  # the plain step scales them in place
                    p.grad = torch.cos(p.detach())
                optimiser.step(torch.zeros((), device=device))
            ends.append(params)
        for p, q in zip(*ends, strict=True):
            assert_close(q, p, 1e-6, f"parameter after three steps of {name}")


def measure(calls: dict[str, Callable[[], object]], numel: int, repeats: int) -> dict[str, dict]:
    """Times of every variant on a GPU, in ms, kernels of one launched call, and the floor."""
    bandwidth, results = copy_bandwidth(), {}
    for what, call in calls.items():
        figures = {"launched": device_time(call, repeats)}
        figures["graph"] = device_time(in_graph(call), repeats, CALLS_IN_GRAPH)
        figures |= profiled(call, top=4)
        figures["floor_ms"] = round(4 * numel * (8 if "clipped" in what else 7) / bandwidth * 1e3, 5)
        results[what] = figures
        print(f"{what:24} graph {figures['graph']['median_ms']:.4f} launched {figures['launched']['median_ms']:.4f} "
              f"floor {figures['floor_ms']:.4f} ms, {figures['kernels']} kernels and copies, busy "
              f"{figures['busy_ms']:.4f} ms", flush=True)  # fmt: skip
        for name, count, milliseconds in figures["longest"]:
            print(f"    {1e3 * milliseconds:8.1f} us in {count:3} of {name[:80]}", flush=True)
    return {"copy_TB_s": round(bandwidth / 1e12, 2), "results": results}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    device = torch.device(options.device)
    params = make_params(device)
    numel = sum(p.numel() for p in params)
    report = {**provenance(device), "parameters": numel, "tensors": len(params)}
    print(f"{numel} parameters in {len(params)} tensors, {report['hardware']['accelerator']}")
    if device.type == "cuda":
        if (reason := why_not_fused(params)) is not None:
            raise SystemExit(f"nothing to compare: {reason}")
        check_first(device)
        report |= measure(variants(device, fused=True), numel, options.repeats)
    else:
        report["results"] = {what: host_time(call, options.repeats) for what, call in variants(device, False).items()}
        print(json.dumps(report["results"], indent=1))
    out = options.out or RESULTS / f"optimiser_{device.type}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written: {out}")


if __name__ == "__main__":
    main()

"""Selective scan: the native tier against the reference on a CPU, against bytes moved and published times on a GPU.

    python benchmarks/bench_selective_scan.py                   # on the GPU if there is one, else on the CPU
    python benchmarks/bench_selective_scan.py --device cpu --threads 2
    python benchmarks/bench_selective_scan.py --profile         # also the time of each kernel

Figures are medians of at least 20 repeats after warm-up, with the 10th and 90th percentile, of the forward pass and of
forward + backward with D, z, delta_bias and softplus. On a GPU: launched from Python one call at a time, and ten calls
captured in a CUDA graph, divided by ten. `floor` is the time for reading every input and writing every output once at
the bandwidth of a large copy measured in the same run. Published: the best-known public kernels (version 2.3.2), same
shapes, one H200, launched. Writes benchmarks/results/selective_scan_<device>.json, on a GPU anew after each shape.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from mamba_ssm.ops.selective_scan_interface import selective_scan_fn, selective_scan_ref
from mamba_ssm.ops.tiers import explain, use_tier
from mamba_ssm.ops.triton.selective_state_update import selective_state_update
from mamba_ssm.testing import FORWARD_TOLERANCE, GRADIENT_TOLERANCE, compare, selective_scan_inputs

RESULTS = Path(__file__).parent / "results"
OPTIONAL = ("D", "z", "delta_bias")
CPU_SHAPE = (16, 256, 128, 16)                         # B, D, L, N
GPU_SHAPES = [                                         # B, D, L, N, dtype, published forward and forward + backward, ms
    (16, 1024, 128, 16, torch.bfloat16, 0.061, 0.39),
    (8, 1536, 2048, 16, torch.bfloat16, 0.45, 2.31),
    (4, 1536, 8192, 16, torch.bfloat16, 1.01, 4.86),
    (16, 1024, 128, 16, torch.float32, 0.060, 0.30),
    (8, 1536, 2048, 16, torch.float32, 0.88, 3.14),
    (4, 1536, 8192, 16, torch.float32, None, None),
]
MEMORY_SHAPE = (1, 1024, 65536, 16)
CALLS_IN_GRAPH = 10


def summary(milliseconds: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(milliseconds, n=10)
    figures = {"median_ms": statistics.median(milliseconds), "p10_ms": cuts[0], "p90_ms": cuts[-1]}
    return {name: round(value, 5) for name, value in figures.items()} | {"repeats": len(milliseconds)}


def host_time(call: Callable[[], object], repeats: int, warm_up: int = 3) -> dict[str, float]:
    """Wall clock of `call` on a CPU."""
    times = []
    for repeat in range(repeats + warm_up):
        start = time.perf_counter()
        call()
        if repeat >= warm_up:
            times.append((time.perf_counter() - start) * 1e3)
    return summary(times)


def device_time(call: Callable[[], object], repeats: int, calls: int = 1, warm_up: int = 5) -> dict[str, float]:
    """CUDA events around `call`, which stands for `calls` calls."""
    times = []
    for repeat in range(repeats + warm_up):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        call()
        end.record()
        end.synchronize()
        if repeat >= warm_up:
            times.append(start.elapsed_time(end) / calls)
    return summary(times)


def in_graph(call: Callable[[], object]) -> Callable[[], None]:
    """The replay of a CUDA graph that holds `call` ten times."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS_IN_GRAPH):
            call()
    return graph.replay


def passes(inputs: dict[str, torch.Tensor]) -> dict[str, Callable[[], object]]:
    """The forward pass alone, and forward + backward into every input."""
    needing = list(inputs.values())
    cotangent = torch.randn_like(inputs["u"])

    def forward():
        with torch.no_grad():
            return selective_scan_fn(**inputs, delta_softplus=True)

    def forward_backward():
        out = selective_scan_fn(**inputs, delta_softplus=True)
        return torch.autograd.grad(out, needing, cotangent)

    return {"forward": forward, "forward_backward": forward_backward}


def check_first(device: str) -> None:
    """The operator agrees with the reference before it is timed."""
    inputs = selective_scan_inputs(2, 64, 65, 16, optional=OPTIONAL, device=device)
    forward, backward = FORWARD_TOLERANCE[torch.float32], GRADIENT_TOLERANCE[torch.float32]
    compare(selective_scan_fn, selective_scan_ref, inputs, forward, backward, delta_softplus=True)


def bench_cpu(repeats: int) -> dict:
    """Native over reference, in one run: only the ratios mean anything on another machine."""
    batch, channels, length, state = CPU_SHAPE
    inputs = selective_scan_inputs(batch, channels, length, state, optional=OPTIONAL)
    shape, threads = dict(zip("BDLN", CPU_SHAPE, strict=True)), torch.get_num_threads()
    result = {"shape": shape, "dtype": "float32", "threads": threads}
    for name, call in passes(inputs).items():
        native = host_time(call, repeats)
        with use_tier("reference"):
            reference = host_time(call, 20, warm_up=1)
        result[name] = ratio_of(native, reference)
    result["step"] = bench_step(channels, state)
    return result


def bench_step(channels: int, state: int) -> dict:
    """One step for one batch item."""
    h, A = torch.zeros(1, channels, state), -torch.rand(channels, state)
    B, C = torch.randn(2, 1, state)
    x, dt, z, D, bias = (torch.randn(*shape, channels) for shape in ((1,), (1,), (1,), (), ()))

    def step():
        return selective_state_update(h, x, dt, A, B, C, D, z, bias, True)

    with torch.no_grad():                              # as acting does: entered once, not by every step
        native = host_time(step, 500, warm_up=50)
        with use_tier("reference"):
            reference = host_time(step, 500, warm_up=50)
    return ratio_of(native, reference)


def ratio_of(native: dict, reference: dict) -> dict:
    ratio = reference["median_ms"] / native["median_ms"]
    return {"native": native, "reference": reference, "ratio": round(ratio, 1)}


def copy_bandwidth() -> float:
    """Bytes read and written by a second of copying on the device."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / (device_time(lambda: target.copy_(source), 20)["median_ms"] * 1e-3)


def least_bytes(shape: tuple[int, int, int, int], dtype: torch.dtype) -> dict[str, int]:
    """Forward reads u, delta, z, B, C and writes out; backward reads those and dout and writes five gradients."""
    batch, channels, length, state = shape
    rows, projections = batch * channels * length * dtype.itemsize, 2 * batch * state * length * dtype.itemsize
    forward = 4 * rows + projections
    return {"forward": forward, "forward_backward": forward + 7 * rows + 2 * projections}


def bench_shape(
    shape: tuple, dtype: torch.dtype, published: dict, bandwidth: float, repeats: int, profile: bool
) -> dict:
    inputs = selective_scan_inputs(*shape, optional=OPTIONAL, dtype=dtype, device="cuda")
    result = {"shape": dict(zip("BDLN", shape, strict=True)), "dtype": str(dtype).removeprefix("torch.")}
    for name, call in passes(inputs).items():
        launched = device_time(call, repeats)
        graph = device_time(in_graph(call), repeats, CALLS_IN_GRAPH)
        floor = least_bytes(shape, dtype)[name] / bandwidth * 1e3
        result[name] = {
            "launched": launched, "graph": graph, "floor_ms": round(floor, 5), "published_ms": published[name],
            "graph_over_floor": round(graph["median_ms"] / floor, 2),
        }  # fmt: skip
        if profile:
            result[name]["kernels_us"] = kernel_times(call)
    return result


def bench_memory() -> dict:
    """What backward takes beyond the inputs, the result and the gradients, at a length of 65,536."""
    inputs = selective_scan_inputs(*MEMORY_SHAPE, optional=OPTIONAL, dtype=torch.bfloat16, device="cuda")
    call = passes(inputs)["forward_backward"]
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    grads = call()
    torch.cuda.synchronize()
    results = sum(grad.numel() * grad.itemsize for grad in grads) + inputs["u"].numel() * inputs["u"].itemsize
    batch, channels, length, state = MEMORY_SHAPE
    return {
        "shape": dict(zip("BDLN", MEMORY_SHAPE, strict=True)), "dtype": "bfloat16",
        "extra_MiB": round((torch.cuda.max_memory_allocated() - before - results) / 2**20, 1),
        "all_states_MiB": round(batch * channels * length * state * 4 / 2**20, 1),
    }  # fmt: skip


def bench_gpu(repeats: int, profile: bool) -> Iterator[dict]:
    """What is known, more of it each time."""
    bandwidth = copy_bandwidth()
    result = {"copy_TB_s": round(bandwidth / 1e12, 2), "memory": bench_memory(), "shapes": []}
    for *shape, dtype, forward, both in GPU_SHAPES:
        published = {"forward": forward, "forward_backward": both}
        result["shapes"].append(bench_shape(tuple(shape), dtype, published, bandwidth, repeats, profile))
        print_shape(result["shapes"][-1])
        yield result


def print_shape(result: dict) -> None:
    label = " ".join(f"{letter}{size}" for letter, size in result["shape"].items())
    for name in ("forward", "forward_backward"):
        figures = result[name]
        times = " ".join(f"{kind} {figures[kind]['median_ms']:.4f}" for kind in ("graph", "launched"))
        print(f"{label:24} {result['dtype']:9} {name:17} {times} floor {figures['floor_ms']:.4f} "
              f"published {figures['published_ms']} ms {figures.get('kernels_us', '')}", flush=True)  # fmt: skip


def event_times(call: Callable[[], object], repeats: int) -> list[tuple[str, float]]:
    """What the profiler sees on the device, and its microseconds in one call."""
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    return [(event.key, event.device_time_total / repeats) for event in profiler.key_averages()]


def kernel_times(call: Callable[[], object], repeats: int = 10) -> dict[str, float]:
    """Device microseconds of each kernel of the scan in one call."""
    matches = ((re.search(r"(\w+)_kernel<", key), microseconds) for key, microseconds in event_times(call, repeats))
    return {match[1]: round(microseconds, 1) for match, microseconds in matches if match}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--profile", action="store_true", help="also each kernel's time (GPU)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if (report := explain("selective_scan", options.device)).missing:
        raise SystemExit(f"nothing to compare: {report}")
    check_first(options.device)
    name = torch.cuda.get_device_name() if options.device == "cuda" else platform.machine()
    result = {"device": name, "torch": torch.__version__, "python": platform.python_version()}
    on_cpu = options.device == "cpu"
    RESULTS.mkdir(exist_ok=True)
    target = RESULTS / f"selective_scan_{name.lower().replace(' ', '_')}.json"
    for figures in [bench_cpu(options.repeats)] if on_cpu else bench_gpu(options.repeats, options.profile):
        result |= figures
        target.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result if on_cpu else result["memory"], indent=1))
    print(f"written: {target}")


if __name__ == "__main__":
    main()

"""State-space duality on a GPU: the Triton tier at the shapes of the goals, beside the reference tier and the floors.

    python benchmarks/bench_ssd.py                     # every shape, after a check against the reference
    python benchmarks/bench_ssd.py --profile           # also the time of each kernel
    python benchmarks/bench_ssd.py --shapes 0 1        # some of them

Figures are medians of at least 20 repeats after warm-up, with the 10th and 90th percentile, in bfloat16 with D, dt_bias
and softplus, of the forward pass and of forward + backward into every input: launched from Python one call at a time,
and ten calls captured in a CUDA graph, divided by ten. Floors: reading every input and writing every output once at the
bandwidth of a large copy, and the products of chunks of 64 rows at the rate of a large bfloat16 product, both measured
on such a device. Published: the best-known public kernels (version 2.3.2), same shapes, one H200, launched. Writes
benchmarks/results/ssd_<device>.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.bench_selective_scan import CALLS_IN_GRAPH, device_time, event_times, in_graph
from mamba_ssm.ops.tiers import explain, use_tier
from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan, mamba_chunk_scan_combined
from mamba_ssm.testing import FORWARD_TOLERANCE, GRADIENT_TOLERANCE, compare, ssd_inputs

RESULTS = Path(__file__).parent / "results"
OPTIONAL = ("D", "dt_bias")
OPTIONS = {"chunk_size": 256, "dt_softplus": True}
SHAPES = [            # B, L, H, P, N, then published and wanted (launched) ms, forward and forward + backward
    ((16, 128, 16, 64, 16), (0.76, 3.5), (0.15, 0.6)),
    ((8, 2048, 24, 64, 128), (1.04, 3.7), (0.5, 2.0)),
    ((4, 8192, 24, 64, 128), (0.77, 3.8), (0.6, 2.6)),
    ((1, 65536, 24, 64, 128), (1.1, 4.8), (1.0, 4.3)),
]
COPY_BYTES_PER_S, DOT_FLOP_PER_S = 4.3e12, 790e12      # measured on an H200
FLOOR_ROWS = 64
PASSES = ("forward", "forward_backward")


def passes(inputs: dict[str, torch.Tensor]):
    """The forward pass alone, and forward + backward into every input."""
    needing = list(inputs.values())
    cotangent = torch.randn_like(inputs["x"])

    def forward():
        with torch.no_grad():
            return mamba_chunk_scan_combined(**inputs, **OPTIONS)

    def forward_backward():
        out = mamba_chunk_scan_combined(**inputs, **OPTIONS)
        return torch.autograd.grad(out, needing, cotangent)

    return dict(zip(PASSES, (forward, forward_backward), strict=True))


def inputs_of(shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    batch, length, heads, headdim, state = shape
    return ssd_inputs(
        batch, length, heads, headdim, 1, state, optional=OPTIONAL, dtype=torch.bfloat16, device="cuda"
    )  # fmt: skip


def floors(shape: tuple[int, ...]) -> dict[str, dict[str, float]]:
    """ms for the bytes and for the products of each pass.

    Forward reads x, dt, B, C and writes out; backward reads those and dout and writes four gradients. Products of a
    chunk of Q rows and one head: CBᵀ, W x, C hᵀ, x Bᵀ; backward has x Bᵀ again, C Bᵀ, dy xᵀ, Wᵀ dy, two with dCB, and
    five of the size of a state."""
    batch, length, heads, headdim, state = shape
    rows, columns, steps = (2 * batch * length * width for width in (heads * headdim, state, heads))
    forward_bytes = 2 * rows + 2 * columns + steps
    both_bytes = forward_bytes + 3 * rows + 4 * columns + 2 * steps
    inside, through = FLOOR_ROWS, headdim * state
    forward = inside * (state + headdim) + 2 * through
    backward = inside * (3 * state + 2 * headdim) + 6 * through
    products = 2 * batch * length * heads
    return {
        name: {
            "bytes_ms": round(size / COPY_BYTES_PER_S * 1e3, 5),
            "flops_ms": round(products * each / DOT_FLOP_PER_S * 1e3, 5),
        }
        for name, size, each in zip(PASSES, (forward_bytes, both_bytes), (forward, forward + backward), strict=True)
    }


def check_first() -> None:
    """The tier agrees with the reference at the first shape's widths before it is timed."""
    for length in (128, 700):
        inputs = ssd_inputs(2, length, 4, 64, 1, 16, optional=OPTIONAL, dtype=torch.bfloat16, device="cuda")
        bounds = FORWARD_TOLERANCE[torch.bfloat16], GRADIENT_TOLERANCE[torch.bfloat16]
        compare(mamba_chunk_scan_combined, mamba_chunk_scan, inputs, *bounds, **OPTIONS)


def bench_shape(shape, published, wanted, repeats: int) -> dict:
    result = {"shape": dict(zip("BLHPN", shape, strict=True)), "dtype": "bfloat16"}
    calls, least = passes(inputs_of(shape)), floors(shape)
    for name, published_ms, goal in zip(PASSES, published, wanted, strict=True):
        result[name] = {
            "launched": device_time(calls[name], repeats),
            "graph": device_time(in_graph(calls[name]), repeats, CALLS_IN_GRAPH),
            **least[name], "published_ms": published_ms, "goal_launched_ms": goal,
        }  # fmt: skip
        if shape[0] * shape[1] <= 16384:
            with use_tier("reference"):
                result[name]["reference_launched"] = device_time(calls[name], 20, warm_up=2)
        print_figures(shape, name, result[name])
    return result


def print_figures(shape, name: str, figures: dict) -> None:
    label = " ".join(f"{letter}{size}" for letter, size in zip("BLHPN", shape, strict=True))
    times = " ".join(f"{kind} {figures[kind]['median_ms']:.4f}" for kind in ("graph", "launched"))
    reference = figures.get("reference_launched", {}).get("median_ms")
    least = f"floors {figures['bytes_ms']:.4f} {figures['flops_ms']:.4f}"
    beside = f"goal {figures['goal_launched_ms']} published {figures['published_ms']} reference {reference}"
    print(f"{label:26} {name:17} {times} {least} {beside} ms", flush=True)


def kernel_times(call, repeats: int = 5) -> dict[str, float]:
    """Device microseconds of each kernel in one call."""
    found = {}
    for key, microseconds in event_times(call, repeats):
        name = re.sub(r"<.*|void |at::native::", "", key)[:40]
        found[name] = round(found.get(name, 0.0) + microseconds, 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--shapes", type=int, nargs="*", default=range(len(SHAPES)), help="numbers of shapes")
    parser.add_argument("--profile", action="store_true", help="print the time of each kernel")
    options = parser.parse_args()
    if not torch.cuda.is_available() or explain("mamba_chunk_scan_combined", "cuda").missing:
        raise SystemExit("nothing to measure: the Triton tier needs a CUDA device and triton")
    check_first()
    name = torch.cuda.get_device_name()
    result = {"device": name, "torch": torch.__version__, "python": platform.python_version(), "shapes": []}
    RESULTS.mkdir(exist_ok=True)
    target = RESULTS / f"ssd_{name.lower().replace(' ', '_')}.json"
    for number in options.shapes:
        result["shapes"].append(bench_shape(*SHAPES[number], options.repeats))
        target.write_text(json.dumps(result, indent=1) + "\n")             # a run that is cut short leaves what it has
    print(f"written: {target}")
    for number in options.shapes if options.profile else ():
        shape = SHAPES[number][0]
        print(shape, kernel_times(passes(inputs_of(shape))["forward_backward"]), flush=True)


if __name__ == "__main__":
    main()

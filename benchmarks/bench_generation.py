"""Decoding throughput of a 130 M-parameter language model at batch 1 and 128, plain calls and CUDA graphs.

    python benchmarks/bench_generation.py                   # on the GPU if there is one, else small sizes on the CPU
    python benchmarks/bench_generation.py --layer Mamba2 --repeats 30

A figure is the time of one decoding step: that of generating PROMPT + STEPS tokens less that of generating PROMPT + 1,
divided by STEPS - 1; median, 10th and 90th percentile of at least 20 repeats after warm-up. Before anything is timed,
graph and plain calls must give the same greedy tokens. `floor` is the time to read every weight once at the
bandwidth of a large copy measured in the same run. Writes benchmarks/results/generation_<device>.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from mamba_ssm import MambaConfig, MambaLMHeadModel
from mamba_ssm.ops.tiers import explain, operators
from mamba_ssm.utils.torch import count_parameters

RESULTS = Path(__file__).parent / "results"
PROMPT, STEPS = 64, 65
SSM = {"Mamba": {"layer": "Mamba"}, "Mamba2": {"layer": "Mamba2"}}


def build(layer: str, device: torch.device) -> MambaLMHeadModel:
    """d_model 768 and 24 layers on a GPU (130 M parameters), a small model elsewhere."""
    sizes = {"d_model": 768, "n_layer": 24, "vocab_size": 50277}
    if device.type == "cpu":
        sizes = {"d_model": 128, "n_layer": 4, "vocab_size": 256}
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return MambaLMHeadModel(MambaConfig(**sizes, ssm_cfg=SSM[layer]), device=device, dtype=dtype).eval()


def seconds(call: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def step_time(model: MambaLMHeadModel, prompt: torch.Tensor, cg: bool, repeats: int) -> dict[str, float]:
    """Milliseconds of one decoding step, and tokens per second over the batch."""
    times = []
    for repeat in range(repeats + 2):
        short, long = (
            seconds(lambda n=n: model.generate(prompt, PROMPT + n, cg=cg), prompt.device) for n in (1, STEPS)
        )
        if repeat >= 2:
            times.append((long - short) / (STEPS - 1) * 1e3)
    cuts, median = statistics.quantiles(times, n=10), statistics.median(times)
    figures = {"median_ms": median, "p10_ms": cuts[0], "p90_ms": cuts[-1]}
    figures["tokens_per_s"] = prompt.shape[0] / median * 1e3
    return {name: round(value, 4) for name, value in figures.items()} | {"repeats": len(times)}


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written, of a copy of 1 GiB (64 MiB on a CPU)."""
    source = torch.empty((1 << 30) if device.type == "cuda" else (1 << 26), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = [seconds(lambda: target.copy_(source), device) for _ in range(10)]
    return 2 * source.numel() / statistics.median(times[2:])


def measure(layer: str, batches: list[int], device: torch.device, repeats: int) -> dict[str, object]:
    model = build(layer, device)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    result = {"parameters": count_parameters(model), "floor_ms": round(weights / copy_bandwidth(device) * 1e3, 4)}
    for batch in batches:
        prompt = torch.randint(0, model.config.vocab_size, (batch, PROMPT), device=device)
        plain, graph = (model.generate(prompt, PROMPT + STEPS, cg=cg) for cg in (False, True))
        if not torch.equal(plain, graph):
            raise AssertionError(f"{layer}, batch {batch}: graph and plain calls generate different tokens")
        for name, cg in (("plain", False), ("graph", True)):
            result[f"batch {batch} {name}"] = figures = step_time(model, prompt, cg, repeats)
            print(f"{layer:7s} batch {batch:4d} {name:5s} {figures}")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layer", choices=tuple(SSM), action="append", help="repeatable; both if left out")
    parser.add_argument("--batch", type=int, action="append", help="repeatable; 1 and 128 if left out")
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    device = torch.device(args.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    report = {
        "device": name, "torch": torch.__version__, "python": platform.python_version(), "prompt": PROMPT,
        "dtype": "bfloat16" if device.type == "cuda" else "float32",
        "tiers": {operator: explain(operator, device).tier for operator in operators()},
    }  # fmt: skip
    for layer in args.layer or SSM:
        report[layer] = measure(layer, args.batch or [1, 128], device, args.repeats)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"generation_{name.lower().replace(' ', '_')}.json"
    path.write_text(json.dumps(report, indent=2) + "\n")
    print(f"written: {path}")


if __name__ == "__main__":
    main()

"""Cost of the sequence core as sequences grow and their rows stay the same: Mamba-2, Mamba, Transformer.

    python benchmarks/scaling.py                                # 65,536 rows on a GPU, 4,096 on a CPU
    python benchmarks/scaling.py --lengths 128,1024 --backbones Mamba2 --rows 16384 [--config FILE] [--Section.Key V]

One pass is forward and backward of the core alone, at the width and precision of the configuration (bf16 autocast on a
GPU), on B = rows / L sequences of L rows without episode starts, in training mode, into parameters and inputs. Figures
are medians of at least 20 passes after warm-up, with the 10th and 90th percentile, on a GPU each the replay of a CUDA
graph; memory is the peak of an eager pass above what was held before it. A backbone whose scan has no kernel on the GPU
is left out and named. Writes benchmarks/results/scaling_<device>.json, a figure as soon as it is measured, and at the
end a table and a plot, scaling_<device>.png.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.bench_selective_scan import device_time, host_time
from mamba_ssm.ops.tiers import explain, operators, use_tier
from sub_models.cuda_graph import CapturedStep
from sub_models.world_models import build_sequence_model
from tools.provenance import provenance
from utils import Config, load_config, override_config, resolve_device

RESULTS = Path(__file__).parent / "results"
BACKBONES = ("Mamba2", "Mamba", "Transformer")
LENGTHS = {"cuda": (128, 256, 512, 1024, 2048, 4096), "cpu": (32, 64, 128, 256, 512, 1024)}
ROWS = {"cuda": 16 * 4096, "cpu": 4096}
NUM_ACTIONS = 6  # Pong's


def for_length(config: Config, backbone: str, length: int) -> Config:
    """A configuration whose core takes sequences of `length`: the Transformer has a position for each row."""
    enough = max(length + config.JointTrainAgent.BatchSize, config.JointTrainAgent.WorldModelWarmUp)
    given = {
        "Models.WorldModel.Backbone": backbone,
        "JointTrainAgent.BatchLength": str(length),
        "JointTrainAgent.WorldModelWarmUp": str(enough),
        "JointTrainAgent.BufferMaxLength": str(max(2 * enough, config.JointTrainAgent.BufferMaxLength)),
    }
    return override_config(config, given)


def make_pass(config: Config, length: int, rows: int, device: torch.device) -> Callable[[], object]:
    """Forward and backward of the configured core over `rows` rows in sequences of `length`."""
    section = config.Models.WorldModel
    stoch_dim = section.CategoricalDim * section.ClassDim
    torch.manual_seed(0)
    core = build_sequence_model(config, stoch_dim, NUM_ACTIONS).to(device).train()
    shape = (rows // length, length)
    stoch = torch.rand(*shape, stoch_dim, device=device, requires_grad=True)  # (B, L, Z)
    action = torch.rand(*shape, NUM_ACTIONS, device=device)  # (B, L, A)
    cotangent = torch.randn(*shape, section.HiddenStateDim, device=device)  # (B, L, D)
    needing = [stoch, *core.parameters()]

    def one_pass() -> object:
        with torch.autocast(
            device.type, torch.bfloat16, enabled=config.BasicSettings.Use_amp and device.type == "cuda"
        ):
            deter = core(stoch, action)
        return torch.autograd.grad(deter, needing, cotangent.to(deter.dtype), allow_unused=True)

    return one_pass


def why_not(backbone: str, device: torch.device) -> str | None:
    """Why a backbone is not measured, or None: Mamba's reference scan loops over rows in Python, minutes on a GPU."""
    report = explain("selective_scan", device)
    left_out = backbone == "Mamba" and device.type == "cuda" and report.tier == "reference"
    return str(report) if left_out else None


def measure(call: Callable[[], object], device: torch.device, repeats: int) -> dict[str, Any]:
    """Time of a pass, and on a GPU the memory that it takes."""
    if device.type == "cpu":
        return host_time(call, repeats)
    call()
    torch.cuda.synchronize(device)
    held = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - held
    return {**device_time(CapturedStep(call, device, enabled=True), repeats), "peak_MiB": round(peak / 2**20, 1)}


def table(results: list[dict[str, Any]]) -> str:
    """ms (and MiB) of every backbone by length, and how far each is from flat."""
    backbones = list(dict.fromkeys(result["backbone"] for result in results))
    lines = [f"{'L':>6}" + "".join(f"{backbone:>24}" for backbone in backbones)]
    for length in dict.fromkeys(result["length"] for result in results):
        cells = {result["backbone"]: _cell(result) for result in results if result["length"] == length}
        lines.append(f"{length:>6}" + "".join(f"{cells.get(backbone, '-'):>24}" for backbone in backbones))
    growth = (f"{flatness(results, backbone):.2f}" for backbone in backbones)
    lines.append("growth" + "".join(f"{value:>24}" for value in growth))
    return "\n".join(lines)


def _cell(result: dict[str, Any]) -> str:
    memory = f" {result['peak_MiB']:9.0f} MiB" if "peak_MiB" in result else ""
    return f"{result['median_ms']:.2f} ms{memory}"


def flatness(results: list[dict[str, Any]], backbone: str) -> float:
    """Time at the longest length over that at the shortest; 1 where cost does not depend on length."""
    times = {result["length"]: result["median_ms"] for result in results if result["backbone"] == backbone}
    return times[max(times)] / times[min(times)]


def plot(report: dict[str, Any], path: Path) -> None:
    """Time and memory over length, a line for each backbone."""
    from matplotlib.figure import Figure

    results = report["results"]
    panels = [("median_ms", "forward + backward, ms"), ("peak_MiB", "peak memory of a pass, MiB")]
    panels = [(key, label) for key, label in panels if key in results[0]]
    figure = Figure(figsize=(5 * len(panels), 3.6), layout="constrained")
    for axes, (key, label) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for backbone in dict.fromkeys(result["backbone"] for result in results):
            points = [(result["length"], result[key]) for result in results if result["backbone"] == backbone]
            axes.plot(*zip(*points, strict=True), marker="o", label=backbone)
        axes.set_xscale("log", base=2)
        lengths = sorted({result["length"] for result in results})
        axes.set_xticks(lengths, [str(length) for length in lengths])
        axes.set_ylim(bottom=0)
        axes.set_xlabel(f"L, rows of a sequence ({report['rows']:,} rows in all)")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=150)


def run(config: Config, backbones: list[str], lengths: list[int], rows: int, repeats: int, out: Path) -> dict[str, Any]:
    """Measure every backbone at every length; `out` has what is there after each of them."""
    device = resolve_device(config.BasicSettings.Device)
    report = {
        **provenance(device),
        "rows": rows,
        "width": config.Models.WorldModel.HiddenStateDim,
        "tiers": {operator: explain(operator, device).tier for operator in operators()},
        "results": [],
    }
    for backbone in backbones:
        if (reason := why_not(backbone, device)) is not None:
            print(f"{backbone}: not measured: {reason}", flush=True)
            continue
        for length in lengths:
            call = make_pass(for_length(config, backbone, length), length, rows, device)
            figures = measure(call, device, repeats)
            report["results"].append({"backbone": backbone, "length": length, **figures})
            out.write_text(json.dumps(report, indent=1) + "\n")
            print(f"{backbone} L {length}: {_cell(report['results'][-1])}", flush=True)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbones", default=",".join(BACKBONES), help="comma-separated")
    parser.add_argument("--lengths", help="comma-separated divisors of the rows")
    parser.add_argument("--rows", type=int)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, help="JSON file; the plot lies beside it")
    options, words = parser.parse_known_args()
    config = load_config(words, "train.py").config
    kind = resolve_device(config.BasicSettings.Device).type
    lengths = [int(length) for length in options.lengths.split(",")] if options.lengths else list(LENGTHS[kind])
    rows = options.rows or ROWS[kind]
    if any(rows % length for length in lengths):
        parser.error(f"--rows {rows} is not a multiple of every one of the lengths {lengths}")
    out = options.out or RESULTS / f"scaling_{kind}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    with use_tier(config.BasicSettings.Kernels):
        report = run(config, options.backbones.split(","), lengths, rows, options.repeats, out)
    print(table(report["results"]))
    plot(report, out.with_suffix(".png"))
    print(f"written: {out} and {out.with_suffix('.png')}")


if __name__ == "__main__":
    main()

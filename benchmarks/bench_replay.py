"""Cost of the replay buffer: append, both samplers, saving and loading, with a full ring of 100,000 rows of 64x64x3.

    python benchmarks/bench_replay.py                     # every placement that this machine has
    python benchmarks/bench_replay.py --capacity 10000 --num-envs 4

Each figure is the median and the 10th and 90th percentile of at least 20 repeats after warm-up, in microseconds: wall
clock for host work (on a GPU: until the call returns, its work still queued), CUDA events for the device's. On a GPU
the samplers are timed launched one operator at a time and replayed from a CUDA graph; the gather of the imagination
batch is also timed alone, by two operators and several word widths. Writes benchmarks/results/replay_<device>.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from replay_buffer import ReplayBuffer
from sub_models.cuda_graph import CapturedStep

RESULTS = Path(__file__).parent / "results"
OBS_SHAPE = (64, 64, 3)


def summary(microseconds: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(microseconds, n=10)
    figures = {"median_us": statistics.median(microseconds), "p10_us": cuts[0], "p90_us": cuts[-1]}
    return {name: round(value, 1) for name, value in figures.items()} | {"repeats": len(microseconds)}


def host_time(call: Callable[[], object], repeats: int, settle: Callable[[], None] = lambda: None) -> dict[str, float]:
    """Wall clock until `call` returns; `settle` (waiting for a GPU) is outside of the time."""
    times = []
    for repeat in range(repeats + 3):
        start = time.perf_counter()
        call()
        if repeat >= 3:
            times.append((time.perf_counter() - start) * 1e6)
        settle()
    return summary(times)


def device_time(call: Callable[[], object], repeats: int) -> dict[str, float]:
    """CUDA events around 5 calls in a row, per call, so that a launch-bound call shows its launches."""
    times = []
    for repeat in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(5):
            call()
        end.record()
        end.synchronize()
        if repeat >= 3:
            times.append(start.elapsed_time(end) * 1e3 / 5)
    return summary(times)


def graphed(call: Callable[[], object]) -> CapturedStep:
    """Captured within the warm-up of `device_time`."""
    return CapturedStep(call, torch.device("cuda"), enabled=True)


def build(capacity: int, num_envs: int, device: str, out_device: str) -> ReplayBuffer:
    """A full buffer with the default configuration's batches, all rows written (untouched memory reads too fast)."""
    replay = ReplayBuffer(
        capacity=capacity, num_envs=num_envs, obs_shape=OBS_SHAPE, action_shape=(),
        device=device, out_device=out_device,
        batch_size=16, batch_length=128, imagine_batch_size=1024, context_length=8,
        sampling="dynamic", tau=10.0, imagination_tau=10.0, alpha=1.0, beta=1.0,
    )
    row = make_row(num_envs)
    for _ in range(replay.ring_length):
        replay.append(*row)
    return replay


def make_row(num_envs: int) -> tuple[np.ndarray, ...]:
    obs = np.random.default_rng(0).integers(0, 256, (num_envs, *OBS_SHAPE), dtype=np.uint8)
    flag = np.zeros(num_envs, bool)
    return obs, np.zeros(num_envs, np.int64), np.ones(num_envs, np.float32), flag, flag


def bench_placement(args: argparse.Namespace, device: str, out_device: str) -> dict[str, object]:
    replay = build(args.capacity, args.num_envs, device, out_device)
    settle = torch.cuda.synchronize if out_device == "cuda" else (lambda: None)
    row = make_row(args.num_envs)
    figures = {"append": host_time(lambda: replay.append(*row), args.repeats * 10, settle)}
    for name in ("sample_sequences", "sample_contexts"):
        sample = getattr(replay, name)
        figures[f"{name}, until the call returns"] = host_time(sample, args.repeats, settle)
        if out_device == "cuda":
            figures[f"{name}, launched"] = device_time(sample, args.repeats)
        if device == "cuda":
            figures[f"{name}, CUDA graph"] = device_time(graphed(sample), args.repeats)
    if device == "cuda":
        figures |= bench_gather(replay, args.repeats)
    return figures | bench_files(replay, args.repeats, lambda: replay.append(*row))


def bench_gather(replay: ReplayBuffer, repeats: int) -> dict[str, object]:
    """1024 x 8 rows of obs by index_select and by indexing, as words of 4 to 16 bytes, each in a CUDA graph."""
    rows = torch.randint(replay.num_envs * replay.ring_length - 8, (1024, 1), device="cuda")
    rows = (rows + torch.arange(8, device="cuda")).flatten()
    obs = replay._data["obs"].view(replay.num_envs * replay.ring_length, -1)
    figures = {"bytes read and written by one gather": 2 * rows.numel() * obs.shape[1]}
    for word in (torch.int32, torch.int64, torch.complex128):
        words = obs.view(word)
        gathers = {
            "index_select": lambda words=words: words.index_select(0, rows),
            "indexing": lambda words=words: words[rows],
        }
        for operator, gather in gathers.items():
            figures[f"gather, {operator}, {word}"] = device_time(graphed(gather), repeats)
    return figures


def bench_files(replay: ReplayBuffer, repeats: int, append: Callable[[], None]) -> dict[str, object]:
    """Saving a full ring once, then every 2000 environment steps; loading once. Seconds, since a disk is in it."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        manifest = replay.save(folder)
        full = time.perf_counter() - start
        full_bytes = sum(path.stat().st_size for path in Path(folder).iterdir())
        increments = []
        for _ in range(min(5, repeats)):
            for _ in range(2000 // replay.num_envs):
                append()
            start = time.perf_counter()
            manifest = replay.save(folder)
            replay.prune(folder, [manifest])
            increments.append(time.perf_counter() - start)
        start = time.perf_counter()
        replay.load(folder, manifest)
        load = time.perf_counter() - start
    return {
        "save, full ring": {"seconds": round(full, 3), "bytes": full_bytes},
        "save and prune, 2000 new rows": {"seconds": round(statistics.median(increments), 3), "of": len(increments)},
        "load, full ring, digests checked": {"seconds": round(load, 3)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capacity", type=int, default=100_000, help="rows in all")
    parser.add_argument("--num-envs", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    placements = [("cpu", "cpu")]
    device_name = platform.processor() or platform.machine()
    if torch.cuda.is_available():
        placements = [("cuda", "cuda"), ("cpu", "cuda")]
        device_name = torch.cuda.get_device_name()
    report = {
        "device": device_name, "cores": torch.get_num_threads(), "torch": torch.__version__, "cuda": torch.version.cuda,
        "python": platform.python_version(), "capacity": args.capacity, "num_envs": args.num_envs,
    }
    for device, out_device in placements:
        report[f"{device} -> {out_device}"] = bench_placement(args, device, out_device)
    print(json.dumps(report, indent=2))
    RESULTS.mkdir(exist_ok=True)
    name = re.sub(r"\W+", "_", device_name).strip("_").lower()
    (RESULTS / f"replay_{name}.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""What a checkpoint costs: a full replay buffer of 100,000 rows and the default model, saved as train.py saves them.

    python benchmarks/bench_checkpoint.py
    python benchmarks/bench_checkpoint.py --capacity 10000 --folder /data    # on another disk

The first checkpoint writes every row, each later one the rows since then (here 2,000, JointTrainAgent.SaveEverySteps).
Everything is synced to the disk. Pictures, which train.py draws with each checkpoint, are given apart.
Writes benchmarks/results/checkpoint_<device>.json.
"""

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
from benchmarks.bench_replay import make_row
from envs.collector import Collector
from replay_buffer import Batch, ReplayBuffer
from sub_models.acting import build_actor
from sub_models.world_models import WorldModel
from tools.run import Run, open_run
from train import build, make_env_vector, restore, save
from utils import load_config, resolve_device

RESULTS = Path(__file__).parent / "results"


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def timed_checkpoints(run: Run) -> list[float]:
    """A list to which every checkpoint of the run adds its seconds."""
    times, write = [], run.save_checkpoint
    run.save_checkpoint = lambda *args, **state: times.append(seconds(lambda: write(*args, **state)))
    return times


def fill(replay: ReplayBuffer, rows: int) -> None:
    row = make_row(1)
    for _ in range(rows):
        replay.append(*row)


def make_moments(world_model: WorldModel, replay: ReplayBuffer) -> None:
    """One update on a few rows, after which the optimiser's state has its full size."""
    batch = replay.sample_sequences()
    world_model.update(Batch(*(field[:2, :8] for field in batch[:5])))


def measure(run: Run, capacity: int, new_rows: int, repeats: int) -> dict[str, object]:
    device = resolve_device(run.config.BasicSettings.Device)
    with make_env_vector(run.config, 0) as env:
        world_model, agent, replay = build(run.config, env, device)
        collector = Collector(env, build_actor(run.config, world_model, agent))
        fill(replay, capacity)
        make_moments(world_model, replay)
        parts = (world_model, agent, replay, collector)
        times, whole = timed_checkpoints(run), []
        save(run, capacity, *parts)
        size = bytes_in(run.folder)
        for repeat in range(1, repeats + 1):
            fill(replay, new_rows)
            step = capacity + repeat * new_rows
            whole.append(seconds(lambda step=step: save(run, step, *parts)))
        written = sum(path.stat().st_size for path in (run.folder / "replay").glob(f"rows-{step - new_rows}-*"))
        with open_again(run) as again:
            load = seconds(lambda: restore(again, *parts))
    return {
        "rows": capacity,
        "first checkpoint": {"seconds": round(times[0], 3), "bytes": size},
        f"checkpoint after {new_rows} new rows": {
            "seconds": round(statistics.median(times[1:]), 3),
            "longest": round(max(times[1:]), 3),
            "bytes of rows": written,
            "of": repeats,
        },
        "pictures with it": {"seconds": round(statistics.median(whole) - statistics.median(times[1:]), 3)},
        "restore": {"seconds": round(load, 3)},
    }


def open_again(run: Run) -> Run:
    run.close(picture=False)
    return open_run(None, run.folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capacity", type=int, default=100_000, help="rows of the buffer")
    parser.add_argument("--new-rows", type=int, default=2000, help="rows between two checkpoints")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", help="where to write, for another disk than that of temporary files")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        options = ["--BasicSettings.Env_name=Toy/Catch-v0", f"--BasicSettings.RunDir={folder}"]
        options.append("--BasicSettings.Compile=false")  # of no effect on what is stored
        config = load_config([*options, f"--JointTrainAgent.BufferMaxLength={args.capacity}"], "train.py").config
        with open_run(config) as run:
            figures = measure(run, args.capacity, args.new_rows, args.repeats)
    on_gpu = torch.cuda.is_available()
    device_name = torch.cuda.get_device_name() if on_gpu else platform.processor() or platform.machine()
    report = {"device": device_name, "torch": str(torch.__version__), "numpy": np.__version__, **figures}
    print(json.dumps(report, indent=2))
    name = re.sub(r"\W+", "_", device_name).strip("_").lower()
    (RESULTS / f"checkpoint_{name}.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()

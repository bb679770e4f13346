"""Whether a long run stays healthy: memory, file handles, threads and log bytes over 20,000 steps of training.

    python benchmarks/long_run_health.py                        # the quickstart with a quarter of its updates
    python benchmarks/long_run_health.py --full                 # the quickstart as it is: some 40 minutes on two cores
    python benchmarks/long_run_health.py --steps 3000 --label h200
    python benchmarks/long_run_health.py --attach PID --run-dir runs     # a training that goes on beside, until it ends

The run goes through everything that a run does: acting, both updates, metrics, checkpoints with replay files (the ring
wraps), evaluations with worker processes and videos, pictures. A thread looks once a second at this process: resident
memory, open file handles, threads, bytes of the logs (metrics.jsonl and TensorBoard's events), and on a GPU the memory
that torch has allocated and reserved (of a training beside, what its GPU has in use). Growth is a straight line fitted
to medians of equally many steps (an evaluation has handles and memory of its own for a moment), after the first
quarter, in which buffers fill and allocators warm up.
Writes benchmarks/results/long_run_<label>.json and .png; exit code 1 if memory or handles grew, or if a step costs the
logs more bytes at the end than before.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from train import main as train  # isort: skip  first: it sets how torch's threads wait

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results"
FEWER_UPDATES = ("--JointTrainAgent.TrainDynamicsEverySteps=8", "--JointTrainAgent.TrainAgentEverySteps=8")
EVALUATING = (
    "--Evaluate.DuringTraining=true",
    "--Evaluate.EverySteps=1000",
    "--Evaluate.EpisodeNum=2",
    "--Evaluate.NumEnvs=2",
)
SETTLED = 0.25  # share of the steps after which nothing has a reason to grow
MEMORY_GROWTH = 0.03  # of the mean: measured noise is 1 %, and a leak of one observation a step would be 10 %
HANDLE_GROWTH = 2.0
MEDIANS = 12
LOG_GROWTH = 1.25  # bytes a step in the last third over those in the second


def resident_mib(pid: int | str = "self") -> float:
    """Host memory of a process without its workers, MiB; 0 of one that ended and is still listed."""
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def gpu_used_mib() -> float | None:
    """Memory of the first GPU that is in use, by whomever; None without NVIDIA's tool."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return float(subprocess.run(query, capture_output=True, text=True, check=True).stdout)


class Watch:
    """Samples of a process, one dict each: of this one between `with` and its end, by a thread, or of another one."""

    def __init__(self, run_dir: Path, period: float) -> None:
        self.run_dir, self.period = run_dir, period
        self.samples: list[dict[str, float]] = []
        self._start = time.monotonic()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample_until_end)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def follow(self, pid: int) -> None:
        """Sample process `pid` until it ends."""
        while True:
            try:
                step = self._step()
                sample = {"step": step, **self._look_at(pid)}
            except (FileNotFoundError, ProcessLookupError):
                return
            if not sample["resident_mib"]:
                return
            self.samples += [sample] if step is not None else []
            time.sleep(self.period)

    def _sample_until_end(self) -> None:
        while not self._end.wait(self.period):
            step = self._step()
            if step is not None:
                self.samples.append({"step": step, **self._look()})

    def _step(self) -> int | None:
        """Of the newest metric line."""
        for path in self.run_dir.glob("*/metrics.jsonl"):
            with open(path, "rb") as file:
                file.seek(max(0, path.stat().st_size - 4096))
                lines = file.read().splitlines()
            return json.loads(lines[-1])["step"] if lines else None
        return None

    def _look_at(self, pid: int | str) -> dict[str, float]:
        logs = [*self.run_dir.glob("*/metrics.jsonl"), *self.run_dir.glob("*/tb/*")]
        used = gpu_used_mib() if pid != "self" else None
        return {
            "seconds": round(time.monotonic() - self._start, 1),
            "resident_mib": round(resident_mib(pid), 2),
            "handles": len(os.listdir(f"/proc/{pid}/fd")),
            "threads": threading.active_count() if pid == "self" else len(os.listdir(f"/proc/{pid}/task")),
            "log_bytes": sum(path.stat().st_size for path in logs),
        } | ({} if used is None else {"gpu_used_mib": used})

    def _look(self) -> dict[str, float]:
        sample = self._look_at("self")
        if torch.cuda.is_available():
            sample["gpu_allocated_mib"] = round(torch.cuda.memory_allocated() / 2**20, 2)
            sample["gpu_reserved_mib"] = round(torch.cuda.memory_reserved() / 2**20, 2)
        return sample


def growth(steps: Sequence[float], values: Sequence[float]) -> float:
    """Rise of a straight line through the settled samples' medians, from the first settled step to the last."""
    steps, values = np.asarray(steps, float), np.asarray(values, float)
    edges = np.linspace(SETTLED * steps[-1], steps[-1], MEDIANS + 1)
    part = np.clip(np.digitize(steps, edges) - 1, -1, MEDIANS - 1)  # -1: not settled yet
    parts = [i for i in range(MEDIANS) if (part == i).any()]
    slope = np.polyfit([edges[i] for i in parts], [np.median(values[part == i]) for i in parts], 1)[0]
    return float(slope * (edges[-1] - edges[0]))


def verdict(samples: list[dict[str, float]]) -> dict[str, dict[str, float | bool]]:
    """For each figure: where it stood, how much it grew, and whether that is healthy."""
    column = {name: np.array([sample[name] for sample in samples]) for name in samples[0]}
    steps = column["step"]
    settled = steps >= SETTLED * steps[-1]
    found = {}
    for name in ("resident_mib", "gpu_allocated_mib", "gpu_reserved_mib", "gpu_used_mib", "handles", "threads"):
        if name not in column:
            continue
        rise, mean = growth(steps, column[name]), float(column[name][settled].mean())
        limit = MEMORY_GROWTH * mean if name.endswith("mib") else HANDLE_GROWTH
        found[name] = {figure: round(x, 2) for figure, x in (("mean", mean), ("growth", rise), ("limit", limit))}
        found[name]["flat"] = rise <= limit
    thirds = np.interp(np.array([1, 2, 3]) / 3 * steps[-1], steps, column["log_bytes"])
    middle, last = np.diff(thirds) / (steps[-1] / 3)
    found["log_bytes"] = {
        "per_step": round(float(last), 2),
        "per_step_before": round(float(middle), 2),
        "mib_per_100000_steps": round(float(last) * 1e5 / 2**20, 2),
        "flat": bool(last <= LOG_GROWTH * middle),
    }
    return found


def draw(samples: list[dict[str, float]], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = [name for name in samples[0] if name not in ("step", "seconds", "threads")]
    figure = Figure(figsize=(9, 2.2 * len(names)), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    for axes, name in zip(figure.subplots(len(names), 1, sharex=True), names, strict=True):
        axes.plot([sample["step"] for sample in samples], [sample[name] for sample in samples], linewidth=1)
        axes.set(ylabel=name, ylim=(0, None))
        axes.grid(alpha=0.3)
    axes.set_xlabel("environment steps")
    canvas.print_png(path)


def train_and_watch(args: argparse.Namespace, words: Sequence[str]) -> tuple[Watch, list[str]]:
    """Train here; returns the samples and the options. SystemExit where training fails."""
    quickstart = ["--config", str(ROOT / "config_files" / "quickstart.yaml")]
    chosen = [*quickstart, *([] if args.full else FEWER_UPDATES), *EVALUATING, *words]
    with tempfile.TemporaryDirectory() as folder:
        own = [f"--JointTrainAgent.SampleMaxSteps={args.steps}", f"--BasicSettings.RunDir={folder}"]
        with Watch(Path(folder), args.period) as watch:
            code = train([*chosen, *own])
    if code:
        raise SystemExit(code)
    return watch, [Path(word).name if word.endswith(".yaml") else word for word in chosen]


def watch_beside(args: argparse.Namespace) -> tuple[Watch, list[str]]:
    """Samples of the process `--attach` until it ends."""
    watch = Watch(args.run_dir, args.period)
    watch.follow(args.attach)
    if len(watch.samples) < MEDIANS:
        raise SystemExit(f"{len(watch.samples)} samples of process {args.attach}, expected at least {MEDIANS}")
    return watch, ["attached"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--full", action="store_true", help="with the quickstart's own number of updates")
    parser.add_argument("--label", default=platform.machine())
    parser.add_argument("--period", type=float, default=1.0, help="seconds between two samples")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--attach", type=int, metavar="PID", help="watch this training instead of one of our own")
    parser.add_argument(
        "--run-dir", type=Path, default=Path("runs"), help="its BasicSettings.RunDir, with one run in it"
    )
    args, words = parser.parse_known_args()
    watch, options = train_and_watch(args, words) if args.attach is None else watch_beside(args)
    report = {
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "torch": str(torch.__version__),
        "options": options,
        "steps": args.steps if args.attach is None else watch.samples[-1]["step"],
        "verdict": verdict(watch.samples),
        "samples": watch.samples[:: max(1, len(watch.samples) // 200)],
    }
    print(json.dumps(report["verdict"], indent=1))
    args.results.mkdir(parents=True, exist_ok=True)
    (args.results / f"long_run_{args.label}.json").write_text(json.dumps(report, indent=1) + "\n")
    draw(watch.samples, args.results / f"long_run_{args.label}.png")
    return 0 if all(figure["flat"] for figure in report["verdict"].values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())

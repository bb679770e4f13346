"""Throughput of several training runs side by side on one device: where does another process stop to pay?

    python benchmarks/packing.py --runs 1,2,4,8 --seconds 8 [--mps off,on] [--config FILE] [--Section.Key value]

Each run is a process of its own with its own models, replay and environment, and does what a step of train.py does: an
environment step, a world-model update, an imagination with its agent update. All processes are started and warmed up
first, compiled with one another's help, for they share inductor's cache; then 1, 2, 4, ... of them work at the same
time while the others wait. With `--mps on` the processes share the
GPU through NVIDIA's Multi-Process Service, whose daemon is started for this benchmark and ended after it. JSON goes to
benchmarks/results/.
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch

from envs.collector import Collector
from mamba_ssm.ops.tiers import use_tier
from sub_models.acting import build_actor
from sub_models.cuda_graph import WARMUP_CALLS
from tools.provenance import provenance
from train import build, make_env_vector, training_steps
from utils import Config, load_config, resolve_device, seed_everything

MPS_DAEMON = "nvidia-cuda-mps-control"


# --------------------------------------------------------------------------------------------------------- one process


def work(config: Config) -> None:
    """A worker: says `ready`, then for each line `SECONDS` on stdin works so long and answers with a line of JSON."""
    device = resolve_device(config.BasicSettings.Device)
    seed_everything(config.BasicSettings.Seed, config.BasicSettings.Deterministic, device)
    with make_env_vector(config, start_step=0) as env:
        world_model, agent, replay = build(config, env, device)
        collector = Collector(env, build_actor(config, world_model, agent, fuse=config.BasicSettings.Compile))
        draw_sequences, update_world_model, update_agent = training_steps(config, world_model, agent, replay)

        def step(explore: bool) -> None:
            collector.send(explore)
            replay.open_row()
            if not explore:
                draw_sequences()
                if replay.reads_open_row():
                    replay.append(*collector.receive())
                update_world_model()
            if replay.row_is_open:
                replay.append(*collector.receive())
            if not explore:
                update_agent()

        training = config.JointTrainAgent
        while not replay.can_sample(max(training.WorldModelWarmUp, training.BehaviourWarmUp)):
            step(explore=True)
        for _ in range(WARMUP_CALLS + 2):
            step(explore=False)
        _wait_for(device)
        answer({"ready": True})
        for line in sys.stdin:
            answer(_measure(step, float(line), device))


def _measure(step: Callable[..., None], seconds: float, device: torch.device) -> dict[str, float]:
    steps, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        step(explore=False)
        steps += 1
    _wait_for(device)
    used = torch.cuda.max_memory_reserved(device) / 2**20 if device.type == "cuda" else 0.0
    return {"steps": steps, "seconds": time.perf_counter() - start, "reserved_mib": used}


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def answer(content: dict) -> None:
    print(json.dumps(content), flush=True)


# --------------------------------------------------------------------------------------------------------- all of them


class WorkerDied(RuntimeError):
    """A process, or the service that it needs, did not come up or did not last."""


class Workers:
    """Worker processes, warmed up; `measure(n, seconds)` lets the first n of them work at the same time."""

    def __init__(self, number: int, words: list[str], environment: dict[str, str]) -> None:
        threads = str(max(1, len(os.sched_getaffinity(0)) // number))
        environment = {"OMP_NUM_THREADS": threads, **environment}
        self.processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--worker", *words],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT,
            )
            for _ in range(number)
        ]  # fmt: skip
        try:
            for process in self.processes:
                self._read(process)
        except WorkerDied:
            self.close()
            raise

    def measure(self, number: int, seconds: float) -> dict[str, object]:
        """Steps a second of each of the first `number` workers and of all together."""
        for process in self.processes[:number]:
            process.stdin.write(f"{seconds}\n")
            process.stdin.flush()
        answers = [self._read(process) for process in self.processes[:number]]
        each = [found["steps"] / found["seconds"] for found in answers]
        memory = max(found["reserved_mib"] for found in answers)
        return {"runs": number, "steps_per_second": sum(each), "each": each, "reserved_mib_of_one": memory}

    def close(self) -> None:
        for process in self.processes:
            process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()

    @staticmethod
    def _read(process: subprocess.Popen) -> dict:
        line = process.stdout.readline()
        if not line:
            raise WorkerDied(f"a process ended with code {process.wait()}; its complaint is above")
        return json.loads(line)


@contextlib.contextmanager
def mps(wanted: bool) -> Iterator[dict[str, str]]:
    """The environment for the workers; if `wanted`, the Multi-Process Service runs meanwhile in its own folder."""
    if not wanted:
        yield dict(os.environ)
        return
    with tempfile.TemporaryDirectory(prefix="mps") as folder:
        environment = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        started = subprocess.run([MPS_DAEMON, "-d"], env=environment, capture_output=True, text=True, timeout=30)
        if started.returncode:
            raise WorkerDied(f"{MPS_DAEMON} did not start: {(started.stdout + started.stderr).strip()}")
        try:
            yield environment
        finally:
            subprocess.run([MPS_DAEMON], input="quit\n", text=True, env=environment, check=False, timeout=60)


def measure_all(runs: list[int], seconds: float, use_mps: bool, words: list[str]) -> list[dict[str, object]]:
    """A row for each number of runs, printed as it comes; `gain` is the throughput against the first row's."""
    rows: list[dict[str, object]] = []
    with mps(use_mps) as environment:
        start = time.monotonic()
        workers = Workers(max(runs), words, environment)
        warm_seconds = time.monotonic() - start
        print(f"MPS {'on' if use_mps else 'off'}: {max(runs)} runs warm after {warm_seconds:.1f} s", flush=True)
        try:
            for number in runs:
                row = {"mps": use_mps, **workers.measure(number, seconds)}
                row["gain"] = row["steps_per_second"] / (rows[0] if rows else row)["steps_per_second"]
                rows.append(row)
                slowest = min(row["each"])
                print(
                    f"{number:>3} runs  {row['steps_per_second']:8.2f} steps/s together  {slowest:8.2f} the slowest  "
                    f"gain {row['gain']:.2f}  {row['reserved_mib_of_one']:.0f} MiB each",
                    flush=True,
                )
        finally:
            workers.close()
    return rows


def why_no_mps(device: torch.device) -> str | None:
    """Why the Multi-Process Service can't be measured here; None if it can."""
    if device.type != "cuda":
        return f"the device is {device.type}"
    return None if shutil.which(MPS_DAEMON) else f"{MPS_DAEMON} is not on this machine's PATH"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", default="1,2,4,8", help="numbers of runs side by side, comma-separated")
    parser.add_argument("--seconds", type=float, default=8.0, help="how long each number of runs is measured")
    parser.add_argument("--mps", default="off,on", help="off, on or both")
    parser.add_argument("--out", default=None, help="JSON file, default: benchmarks/results/packing_<device>.json")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options, words = parser.parse_known_args()
    config = load_config(words, "train.py").config
    if options.worker:
        with use_tier(config.BasicSettings.Kernels):
            work(config)
        return
    device = resolve_device(config.BasicSettings.Device)
    runs = [int(number) for number in options.runs.split(",")]
    obstacle = why_no_mps(device)
    report = {**provenance(device), "env": config.BasicSettings.Env_name, "words": words, "seconds": options.seconds}
    report |= {"mps_missing": obstacle, "failed": {}, "results": []}
    out = Path(options.out or ROOT / "benchmarks" / "results" / f"packing_{device.type}.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    for setting in options.mps.split(","):
        if setting == "on" and obstacle is not None:
            print(f"MPS on: not measured, {obstacle}", flush=True)
            continue
        try:
            report["results"] += measure_all(runs, options.seconds, setting == "on", words)
        except WorkerDied as error:
            report["failed"][setting] = str(error)
            print(f"MPS {setting}: {error}", flush=True)
        out.write_text(json.dumps(report, indent=1) + "\n")
    raise SystemExit(1 if report["failed"] else 0)


if __name__ == "__main__":
    main()

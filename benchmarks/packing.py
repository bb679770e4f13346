"""Throughput of several training runs side by side on one device: where does another process stop to pay?

    python benchmarks/packing.py --runs 1,2,4,8 --seconds 8 [--mps off,on] [--config FILE] [--Section.Key value]

Each run is a process of its own with its own models, replay and environment, and does what a step of train.py does: an
environment step, a world-model update, an imagination with its agent update. All processes are started and warmed up
first, at the same time: what one of them has compiled the others find in inductor's cache. Then 1, 2, 4, ... of them
work while the others wait. With `--mps on` processes share the GPU through NVIDIA's Multi-Process Service, whose daemon
is started for this benchmark and ended after it; with `off,on` there are as many processes again, which wait while the
first are measured. JSON goes to benchmarks/results/, a row as soon as it is measured.
"""

import argparse
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch

from envs.collector import Collector
from mamba_ssm.ops.tiers import use_tier
from sub_models.acting import build_actor
from sub_models.cuda_graph import WARMUP_CALLS
from tools.provenance import provenance
from train import build, make_env_vector, training_steps, update_from_sequences
from utils import Config, load_config, resolve_device, seed_everything

MPS_DAEMON = "nvidia-cuda-mps-control"
ANSWER_SECONDS = 60.0  # for a step that began before the time was over, beside as many as there are


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
                update_from_sequences(replay, collector, draw_sequences, update_world_model)
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
    """Worker processes that have just been started; once warm, `measure(n, seconds)` lets the first n work at once.

    Use it as a context manager: all of them are ended with it.
    """

    def __init__(self, number: int, words: list[str], environment: dict[str, str]) -> None:
        threads = str(max(1, len(os.sched_getaffinity(0)) // number))
        self.processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--worker", *words],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
                env={"OMP_NUM_THREADS": threads, **environment},
            )
            for _ in range(number)
        ]  # fmt: skip

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()

    def warm_up(self, end: float) -> None:
        """Wait until all of them are warm, until the clock (time.monotonic) says `end` at most."""
        for process in self.processes:
            self._read(process, end)

    def measure(self, number: int, seconds: float) -> dict[str, object]:
        """Steps a second of each of the first `number` workers and of all together."""
        for process in self.processes[:number]:
            process.stdin.write(f"{seconds}\n")
            process.stdin.flush()
        end = time.monotonic() + seconds + ANSWER_SECONDS
        answers = [self._read(process, end) for process in self.processes[:number]]
        each = [found["steps"] / found["seconds"] for found in answers]
        memory = max(found["reserved_mib"] for found in answers)
        return {"runs": number, "steps_per_second": sum(each), "each": each, "reserved_mib_of_one": memory}

    @staticmethod
    def _read(process: subprocess.Popen, end: float) -> dict:
        if not select.select([process.stdout], [], [], max(0.0, end - time.monotonic()))[0]:
            raise WorkerDied("a process did not answer in time")
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
        try:
            started = subprocess.run([MPS_DAEMON, "-d"], env=environment, capture_output=True, text=True, timeout=30)
        except subprocess.TimeoutExpired:
            raise WorkerDied(f"{MPS_DAEMON} did not start in 30 s") from None
        if started.returncode:
            raise WorkerDied(f"{MPS_DAEMON} did not start: {(started.stdout + started.stderr).strip()}")
        try:
            yield environment
        finally:
            subprocess.run([MPS_DAEMON], input="quit\n", text=True, env=environment, check=False, timeout=60)


class Benchmark:
    """The report, written whenever something is added to it."""

    def __init__(self, content: dict[str, Any], out: Path) -> None:
        self.content, self.out = content, out
        out.parent.mkdir(parents=True, exist_ok=True)

    def run(self, runs: list[int], seconds: float, settings: list[str], words: list[str], patience: float) -> None:
        """Rows for every number of runs, without the Multi-Process Service, with it, or both."""
        begin = time.monotonic()
        with contextlib.ExitStack() as stack:
            teams = {}
            for setting in settings:
                with self._told(setting):
                    environment = stack.enter_context(mps(setting == "on"))
                    teams[setting] = stack.enter_context(Workers(max(runs), words, environment))
            for setting, workers in list(teams.items()):
                with self._told(setting):
                    workers.warm_up(begin + patience)
                    print(f"MPS {setting}: {max(runs)} runs warm after {time.monotonic() - begin:.1f} s", flush=True)
            for setting in [setting for setting in teams if setting not in self.content["failed"]]:
                with self._told(setting):
                    for number in runs:
                        self._add({"mps": setting == "on", **teams[setting].measure(number, seconds)})

    @contextlib.contextmanager
    def _told(self, setting: str) -> Iterator[None]:
        try:
            yield
        except WorkerDied as error:
            self.content["failed"][setting] = str(error)
            print(f"MPS {setting}: {error}", flush=True)
            self._write()

    def _add(self, row: dict[str, Any]) -> None:
        """Print and keep a row; its `gain` is the throughput against the first row's, whatever that one's setting."""
        rows = self.content["results"]
        rows.append(row)
        row["gain"] = row["steps_per_second"] / rows[0]["steps_per_second"]
        print(
            f"{row['runs']:>3} runs  {row['steps_per_second']:8.2f} steps/s together  {min(row['each']):8.2f} the "
            f"slowest  gain {row['gain']:.2f}  {row['reserved_mib_of_one']:.0f} MiB each",
            flush=True,
        )
        self._write()

    def _write(self) -> None:
        self.out.write_text(json.dumps(self.content, indent=1) + "\n")


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
    parser.add_argument("--patience", type=float, default=600.0, help="seconds in which all have to be warm")
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
    settings = options.mps.split(",")
    if "on" in settings and obstacle is not None:
        settings.remove("on")
        print(f"MPS on: not measured, {obstacle}", flush=True)
    out = Path(options.out or ROOT / "benchmarks" / "results" / f"packing_{device.type}.json")
    Benchmark(report, out).run(runs, options.seconds, settings, words, options.patience)
    raise SystemExit(1 if report["failed"] else 0)


if __name__ == "__main__":
    main()

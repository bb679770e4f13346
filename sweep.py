"""Train games × seeds × settings, several runs at a time, on one machine or on many.

    python sweep.py --games Pong Boxing --seeds 0 1 --out runs/two --config config_files/atari100k.yaml
    python sweep.py --games Pong --seeds 0 1 2 --set Models.WorldModel.Backbone=Mamba,Mamba2 --out runs/backbones
    python sweep.py --out runs/two                      # go on with a sweep that was stopped or killed

Everything that is not one of the options below goes to train.py as it is. Runs that are finished are not repeated;
others go on from their checkpoints. Where Ray is installed it places the runs (on a cluster too: --address), else they
are processes of this machine. docs/sweeps.md has the rest, Slurm included.
"""

import argparse
import contextlib
import os
import queue
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from env_wrapper import make_env
from envs.common import UnusableEnvironment
from tools.checkpoints import CheckpointError, resolve_checkpoint
from tools.provenance import provenance
from tools.run import check_trackers
from tools.sweeps import (
    FAILED,
    FINISHED,
    ROOT,
    RUNNING,
    WAITING,
    Outcome,
    Sweep,
    SweepError,
    SweepRun,
    attempt,
    config_file,
    locked,
    log_file,
    open_sweep,
    plan,
    progress_of,
    run_folder,
    stop_file,
    summary_rows,
    write_summary,
)
from utils import ConfigError, config_from_file

TERMINAL_SECONDS, LINES_SECONDS = 1.0, 30.0  # between two looks at the runs, on a terminal and elsewhere
OBJECT_STORE_BYTES = 100 * 2**20  # nothing but a name and an outcome passes through Ray


# ------------------------------------------------------------------------------------------------------- where runs run


class Place(Protocol):
    """Runs attempts, as many at a time as there is room for."""

    def submit(self, sweep: Sweep, run: SweepRun) -> Any: ...

    def collect(self, seconds: float) -> list[tuple[Any, Outcome]]:
        """The attempts that ended, waiting at most `seconds` for one."""

    def stop(self) -> None:
        """Give up attempts that have not begun; those that run see the sweep's stop file."""

    def close(self) -> None: ...


class LocalPlace:
    """Processes of this machine; each slot is a GPU's share, or a share of the cores where there is no GPU."""

    def __init__(self, options: argparse.Namespace, uses_gpu: bool) -> None:
        cores = os.cpu_count() or 1
        devices = _visible_gpus() if uses_gpu else []
        per_machine = len(devices) * options.runs_per_gpu if devices else max(1, cores // options.cpus_per_run)
        self._slots: queue.Queue[dict[str, str]] = queue.Queue()
        for i in range(per_machine):
            environment = {"OMP_NUM_THREADS": str(options.cpus_per_run)}
            self._slots.put(environment | ({"CUDA_VISIBLE_DEVICES": devices[i % len(devices)]} if devices else {}))
        self._pool = ThreadPoolExecutor(per_machine, thread_name_prefix="run")
        self._futures: set[Future] = set()
        self.description = f"{per_machine} at a time on {f'{len(devices)} GPU' if devices else f'{cores} cores'}"

    def submit(self, sweep: Sweep, run: SweepRun) -> Future:
        future = self._pool.submit(self._attempt, sweep, run)
        self._futures.add(future)
        return future

    def collect(self, seconds: float) -> list[tuple[Future, Outcome]]:
        done, self._futures = wait(self._futures, seconds, FIRST_COMPLETED)
        return [(future, future.result()) for future in done]

    def stop(self) -> None:
        """They all end by themselves once they begin."""

    def close(self) -> None:
        self._pool.shutdown()

    def _attempt(self, sweep: Sweep, run: SweepRun) -> Outcome:
        environment = self._slots.get()
        try:
            return attempt(str(sweep.folder), run.name, environment)
        except (ConfigError, CheckpointError, OSError) as error:  # of this run alone, as it would be through Ray
            return Outcome(False, 0.0, str(error))
        finally:
            self._slots.put(environment)


class RayPlace:
    """Tasks of Ray Core, on the cluster at --address (or RAY_ADDRESS), else on this machine alone."""

    def __init__(self, options: argparse.Namespace, uses_gpu: bool) -> None:
        import ray

        self._ray = ray
        address = _cluster(options)
        local = {} if address else {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
        ray.init(address or "local", log_to_driver=False, logging_level="warning", **local)
        resources = ray.cluster_resources()
        gpus = resources.get("GPU", 0) if uses_gpu else 0
        self._remote = ray.remote(attempt).options(
            num_cpus=options.cpus_per_run,
            num_gpus=1 / options.runs_per_gpu if gpus else 0,
            max_retries=0,
            runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
        )
        self._references: list[Any] = []
        nodes = sum(node["Alive"] for node in ray.nodes())
        self.description = (
            f"Ray {ray.__version__} on {nodes} node(s) with {resources.get('CPU', 0):g} CPU and {gpus:g} GPU"
        )

    def submit(self, sweep: Sweep, run: SweepRun) -> Any:
        reference = self._remote.remote(str(sweep.folder), run.name, {})
        self._references.append(reference)
        return reference

    def collect(self, seconds: float) -> list[tuple[Any, Outcome]]:
        done, self._references = self._ray.wait(self._references, timeout=seconds)
        return [(reference, self._outcome(reference)) for reference in done]

    def _outcome(self, reference: Any) -> Outcome:
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.TaskCancelledError:
            return Outcome(False, 0.0, stopped=True)
        except self._ray.exceptions.RayError as error:  # a node or a worker died
            return Outcome(False, 0.0, f"{type(error).__name__}: {str(error).strip().splitlines()[0]}")

    def stop(self) -> None:
        for reference in self._references:
            self._ray.cancel(reference)

    def close(self) -> None:
        self._ray.shutdown()


def _cluster(options: argparse.Namespace) -> str | None:
    """The address of the Ray cluster that runs are to go to; None: they stay on this machine."""
    return None if options.backend == "local" else options.address or os.environ.get("RAY_ADDRESS")


def _visible_gpus() -> list[str]:
    """Names for CUDA_VISIBLE_DEVICES of the GPUs that this process may use."""
    import torch

    given = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    count = torch.cuda.device_count()
    return given[:count] if given else [str(i) for i in range(count)]


def choose_place(options: argparse.Namespace, uses_gpu: bool) -> LocalPlace | RayPlace:
    """Ray where it is installed or asked for, else this machine's processes."""
    installed = find_spec("ray") is not None
    if options.backend == "ray" and not installed:
        raise SweepError("--backend ray: Ray is not installed; pip install -r requirements-sweep.txt")
    if options.address and not installed:
        raise SweepError(f"--address {options.address}: Ray is not installed; pip install -r requirements-sweep.txt")
    use_ray = options.backend == "ray" or (options.backend == "auto" and installed)
    return RayPlace(options, uses_gpu) if use_ray else LocalPlace(options, uses_gpu)


# ------------------------------------------------------------------------------------------------------------- the loop


def work_off(sweep: Sweep, place: Place, retries: int, display: "Display", stop: threading.Event) -> None:
    """Attempt every unfinished run, failed ones up to `retries` times more, until all are done or `stop` is set."""
    pending: dict[Any, SweepRun] = {}
    log_sizes: dict[str, int] = {}  # before the attempt: a log that grew tells that it has begun

    def submit(run: SweepRun) -> None:
        run.status, run.attempts = WAITING, run.attempts + 1
        log_sizes[run.name] = _size(log_file(sweep.folder, run.name))
        pending[place.submit(sweep, run)] = run

    for run in sweep.unfinished():
        submit(run)
    stopping = False
    while pending:
        if stop.is_set() and not stopping:
            stopping = True
            stop_file(sweep.folder).touch()
            place.stop()
        for ticket, outcome in place.collect(TERMINAL_SECONDS):
            run = pending.pop(ticket)
            run.seconds += outcome.seconds
            run.error = outcome.error
            if outcome.finished:
                run.status = FINISHED
            elif outcome.stopped or stopping:
                run.status = WAITING
            elif run.attempts <= retries:
                display.say(f"{run.name}: attempt {run.attempts} failed ({outcome.error}); it is tried again")
                submit(run)
            else:
                run.status = FAILED
            sweep.save()
        for run in pending.values():
            if run.status == WAITING and _size(log_file(sweep.folder, run.name)) > log_sizes[run.name]:
                run.status = RUNNING
                sweep.save()
        display.show(sweep)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


# -------------------------------------------------------------------------------------------------------- what is shown


class Display:
    """The runs as a table that is redrawn in place on a terminal; elsewhere a line for each run that changed."""

    def __init__(self, stream: Any = sys.stderr) -> None:
        self._stream = stream
        self._terminal = stream.isatty()
        self._drawn = 0  # lines of the table on the terminal
        self._told: dict[str, str] = {}
        self._time = -LINES_SECONDS

    def say(self, line: str) -> None:
        self._clear()
        print(line, file=self._stream, flush=True)

    def show(self, sweep: Sweep) -> None:
        if self._terminal:
            columns, rows = shutil.get_terminal_size()
            lines = [line[: columns - 1] for line in table(sweep)]
            self._clear()
            self._drawn = min(len(lines), rows - 2)
            print("\n".join(lines[: self._drawn]), file=self._stream, flush=True)
            return
        due = time.monotonic() - self._time >= LINES_SECONDS
        for run in sweep.runs:
            if self._told.get(run.name) != run.status or (due and run.status == RUNNING):
                print(_line(sweep, run), file=self._stream, flush=True)
                self._told[run.name] = run.status
        self._time = time.monotonic() if due else self._time

    def _clear(self) -> None:
        if self._drawn:
            self._stream.write(f"\x1b[{self._drawn}F\x1b[J")
        self._drawn = 0


def table(sweep: Sweep) -> list[str]:
    """A headline and a line for each run, running ones first."""
    order = {RUNNING: 0, FAILED: 1, WAITING: 2, FINISHED: 3}
    counts = ", ".join(f"{sum(run.status == status for run in sweep.runs)} {status}" for status in order)
    runs = sorted(sweep.runs, key=lambda run: order[run.status])
    return [f"{sweep.folder}: {counts}", *(_line(sweep, run) for run in runs)]


def _width(sweep: Sweep) -> int:
    return max([len(run.name) for run in sweep.runs], default=0)


def _line(sweep: Sweep, run: SweepRun) -> str:
    folder = run_folder(sweep.folder, run.name)
    step, score = progress_of(folder) if folder else (0, None)
    told = "no episode yet" if score is None else f"return {score:.4g}"
    again = f"  attempt {run.attempts}" if run.attempts > 1 else ""
    error = f"  {run.error}" if run.error else ""
    return f"{run.name:<{_width(sweep)}} {run.status:<9} step {step:>7}  {told}{again}{error}"


def print_summary(sweep: Sweep) -> None:
    """A row for each run at the end, for a terminal."""
    width = _width(sweep)
    print(
        f"{'run':<{width}} {'status':<9} {'step':>7} {'evaluation':>11} {'human-norm.':>11} {'attempts':>8} "
        f"{'seconds':>8}"
    )
    for row in summary_rows(sweep):
        score, normalised = row["evaluation_mean"], row["human_normalised_mean"]
        print(
            f"{row['run']:<{width}} {row['status']:<9} {row['step']:>7} {'-' if score is None else f'{score:.2f}':>11} "
            f"{'-' if normalised is None else f'{normalised:.3f}':>11} {row['attempts']:>8} {row['seconds']:>8.1f}"
        )


# --------------------------------------------------------------------------------------------------------- command line


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The sweep's own options, and the words for train.py."""
    parser = argparse.ArgumentParser(
        "sweep.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="the sweep's folder; one that has a sweep goes on with it")
    add("--games", nargs="+", default=[], metavar="GAME", help="Pong, Toy/Catch-v0, ...; atari100k: all 26")
    add("--seeds", nargs="+", type=int, default=[], metavar="SEED")
    add("--set", action="append", default=[], metavar="KEY=A,B", help="a key to vary; repeatable: every combination")
    add("--runs-per-gpu", type=int, default=1, help="runs that share a GPU (default 1; docs/sweeps.md: when more gain)")
    add("--cpus-per-run", type=int, default=2, help="cores of a run; without a GPU they limit how many run (default 2)")
    add("--retries", type=int, default=2, help="how often a failed run is tried again from its checkpoint (default 2)")
    add("--backend", choices=("auto", "ray", "local"), default="auto", help="auto: Ray if it is installed")
    add("--address", default=None, help="of a running Ray cluster (default: RAY_ADDRESS, else a local one)")
    options, words = parser.parse_known_args(argv)
    for name in ("runs_per_gpu", "cpus_per_run"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if bool(options.games) != bool(options.seeds) or ((words or options.set) and not options.games):
        parser.error("name --games and --seeds for new runs; --out alone goes on with a sweep as it was begun")
    return options, words


def run_sweep(options: argparse.Namespace, words: list[str]) -> Sweep:
    """Open or begin the sweep and work it off; SIGINT and SIGTERM save and leave, a second one leaves at once."""
    planned = plan(options.games, options.seeds, options.set, words)
    folder = options.out.resolve()
    if _cluster(options) is None:  # else this machine need not have what environments ask for
        for run, config in {run.env: (run, config) for run, config in planned}.values():
            make_env(run.env, config, run.seed).close()
            check_trackers(config)
        for path in {config.BasicSettings.SavePath for _, config in planned} - {None}:
            resolve_checkpoint(path)
    with locked(folder):
        sweep = open_sweep(folder, planned)
        sweep.origin = provenance()
        sweep.save()
        try:
            if sweep.unfinished():
                device = config_from_file(config_file(folder, sweep.runs[0].name)).BasicSettings.Device
                place = choose_place(options, uses_gpu=device != "cpu")
                display = Display()
                display.say(f"{len(sweep.unfinished())} of {len(sweep.runs)} runs to do; {place.description}")
                with contextlib.closing(place), stop_on_signals() as stop:
                    work_off(sweep, place, options.retries, display, stop)
        finally:
            write_summary(sweep)
    return sweep


@contextlib.contextmanager
def stop_on_signals() -> Iterator[threading.Event]:
    """An event that the first SIGINT or SIGTERM sets."""
    stop = threading.Event()

    def on_signal(number: int, frame: Any) -> None:
        if stop.is_set():
            raise SystemExit(128 + number)
        stop.set()
        os.write(2, b"\nrunning runs are saved, then the sweep ends; once more leaves at once\n")

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of sweeps; 0 if every run is finished, 2 for a fault of usage, 1 for anything else."""
    options, words = parse(argv)
    try:
        sweep = run_sweep(options, words)
    except (ConfigError, UnusableEnvironment, SweepError, CheckpointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError | UnusableEnvironment) else 1
    print_summary(sweep)
    print(f"report with: python eval.py --report {options.out}")
    if unfinished := sweep.unfinished():
        print(f"go on with: python sweep.py --out {options.out}", file=sys.stderr)
    return 1 if unfinished else 0


if __name__ == "__main__":
    raise SystemExit(main())

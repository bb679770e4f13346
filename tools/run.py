"""A run and its folder: metrics, progress, checkpoints, pictures.

    RUN/config.yaml     the resolved configuration
    RUN/origin.json     the command that began the run, versions, hardware and commit; `resumed`: those of each process
                        that went on with it, with the step and the wall time so far
    RUN/metrics.jsonl   the truth about the run: one JSON object a line, {"step": 1200, "world_model/loss": 3.1, ...};
                        numbers that are not finite are written as Python's json does (NaN, Infinity, -Infinity);
                        names that start with `time/` are wall-clock figures, all others repeat when a run is repeated
    RUN/tb/             TensorBoard events, a mirror of metrics.jsonl
    RUN/ckpt/           step_000002000/{model.pt, train.pt, replay.json, manifest.json}, the two newest complete ones
    RUN/replay/         the replay buffer's rows, in chunks that the checkpoints share
    RUN/pictures/, RUN/videos/, RUN/eval/
    RUN/faults/         rows and weights of updates that were not finite, where they ended the run (tools/divergence.py)
    RUN/lock            held while a process trains in the folder

A step of the loop logs first and saves last: on resume the metric lines past the checkpoint's step are cut. A run that
ends inside a log interval writes a line of it behind its last checkpoint; the first line of a run that goes on takes
its place, so that one which is at its end, or is refused, keeps it.
Letters: N sequences, T frames of a sequence, H×W pixels.
"""

import contextlib
import csv
import fcntl
import io
import json
import logging
import math
import os
import platform
import re
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from tqdm import tqdm

from tools.checkpoints import (
    CHECKPOINT_FORMAT,
    Checkpoint,
    CheckpointError,
    CheckpointFolder,
    error_reason,
    folder_listing,
    read_checkpoint,
    read_json,
    serialise,
    write_atomic,
)
from tools.pictures import save_mp4, save_png
from tools.provenance import ORIGIN, origin, resumed_origin
from utils import (
    RUN_CONFIG_NAME,
    ConfigError,
    config_from_file,
    config_to_dict,
    config_to_yaml,
    prepare_determinism,
    resolve_device,
    with_absolute_paths,
)

logger = logging.getLogger("drama.tools")

EPISODE_RETURN = "episode/return"  # logged once for each episode that ends
EVALUATION_RETURN = "evaluation/return_mean"
STEPS_PER_SECOND = "time/steps_per_second"
TOTAL_SECONDS = "time/total_seconds"  # wall time of all processes of the run so far
PARTIAL_INTERVAL = "time/partial_interval"  # marks the line of a log interval that the run ended in
REPORTED_EPISODES = 50  # episodes behind the score that the report at the end gives
RECENT_EPISODES = 20  # episodes behind the score that the progress line shows
HANGUP = (signal.SIGHUP,) if hasattr(signal, "SIGHUP") else ()  # the terminal is gone
LINE_SECONDS = 10.0  # between two progress lines where stderr is not a terminal
BAR_OF_WARM_UP = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<?, {rate_fmt}{postfix}]"  # tqdm's, but the time left
LARGEST = 2**63  # integers beyond it are not ours
UNWRITTEN_LINES = 10_000  # metric lines kept in memory while the disk is full
WANDB_SECONDS = 30  # how long the run waits at its start for Weights & Biases to answer
SUBFOLDERS = ("tb", "ckpt", "replay", "pictures", "videos", "eval")


class RunError(RuntimeError):
    """A run's folder that can't be made, opened or resumed; the message is one line."""


class StoredReplay(Protocol):
    """What a checkpoint needs of a replay buffer: rows go to chunk files, a manifest (plain JSON) says which."""

    def save(self, folder: Path) -> dict: ...

    def prune(self, folder: Path, kept_manifests: list[dict]) -> None: ...


# -------------------------------------------------------------------------------------------------------------- metrics


@dataclass
class _Sum:
    total: torch.Tensor  # (number of names,) float64, on the device of what is summed
    count: int


class MetricSums:
    """Means of metrics over many steps without a host sync in any of them.

    The tensors of one call are copied into one vector and added to a float64 sum: two kernels a call, and nothing that
    was passed in is kept, so that the outputs of a CUDA graph may be overwritten at once.
    """

    def __init__(self) -> None:
        self._sums: dict[tuple[str, ...], _Sum] = {}
        self._numbers: dict[str, tuple[float, int]] = {}

    @torch.no_grad()
    def add(self, metrics: Mapping[str, torch.Tensor | float]) -> None:
        """metrics: 0-d tensors (of one device) and plain numbers."""
        tensors = {name: value for name, value in metrics.items() if isinstance(value, torch.Tensor)}
        for name, value in metrics.items():
            if name not in tensors:
                total, count = self._numbers.get(name, (0.0, 0))
                self._numbers[name] = (total + float(value), count + 1)
            elif value.dim():
                raise ValueError(f"metric {name} has shape {tuple(value.shape)}, expected a 0-d tensor")
        if tensors:
            self._add_tensors(tuple(tensors), list(tensors.values()))

    def _add_tensors(self, names: tuple[str, ...], values: list[torch.Tensor]) -> None:
        if any(value.dtype != values[0].dtype for value in values):
            values = [value.double() for value in values]
        stacked = torch.stack(values)
        known = self._sums.get(names)
        if known is None:
            self._sums[names] = _Sum(stacked.double(), 1)
            return
        if known.total.device != stacked.device:  # sums that came from a checkpoint
            known.total = known.total.to(stacked.device)
        known.total.add_(stacked)
        known.count += 1

    def __bool__(self) -> bool:
        """Whether anything was added since the last `take`."""
        return bool(self._sums or self._numbers)

    def take(self) -> dict[str, float]:
        """The mean of each name since the last call, in one copy from the device."""
        sums = self._numbers
        self._numbers = {}
        groups, self._sums = self._sums, {}
        if groups:
            devices = [group.total.device for group in groups.values()]
            device = next((device for device in devices if device.type != "cpu"), devices[0])
            flat = iter(torch.cat([group.total.to(device, non_blocking=True) for group in groups.values()]).tolist())
            for names, group in groups.items():
                for name in names:
                    total, count = sums.get(name, (0.0, 0))
                    sums[name] = (total + next(flat), count + group.count)
        return {name: total / count for name, (total, count) in sums.items()}

    def state_dict(self) -> dict:
        return {
            "sums": [(list(names), group.total.cpu().clone(), group.count) for names, group in self._sums.items()],
            "numbers": {name: list(pair) for name, pair in self._numbers.items()},
        }

    def load_state_dict(self, state: dict) -> None:
        self._sums = {tuple(names): _Sum(total.clone(), count) for names, total, count in state["sums"]}
        self._numbers = {name: (total, count) for name, (total, count) in state["numbers"].items()}


class MetricsFile:
    """metrics.jsonl: whole lines only. While the disk is full, lines wait in memory and go out with one that fits.

    The line of an interval that the run ended in gives way to the first that is written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._gives_way = _start_of_partial_line(path)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._waiting: deque[bytes] = deque(maxlen=UNWRITTEN_LINES)
        self._full = False

    def write(self, line: Mapping[str, float]) -> None:
        self._waiting.append(json.dumps(line).encode() + b"\n")
        try:
            if self._gives_way is not None:
                os.ftruncate(self._descriptor, self._gives_way)
                self._gives_way = None
            self._drain()
        except OSError as error:
            if not self._full:
                logger.warning(
                    "%s can't be written (%s): its lines wait in memory, training goes on",
                    self.path,
                    error_reason(error),
                )
            self._full = True

    def sync(self) -> None:
        """All lines on the disk, or an OSError."""
        self._drain()
        os.fsync(self._descriptor)

    def close(self) -> None:
        try:
            self.sync()
        except OSError as error:
            logger.warning("%s lacks its last %d lines (%s)", self.path, len(self._waiting), error_reason(error))
        os.close(self._descriptor)

    def _drain(self) -> None:
        if not self._waiting:
            return
        size = os.fstat(self._descriptor).st_size
        data = memoryview(b"".join(self._waiting))
        try:
            while data:  # a disk that fills up takes a part first, and refuses the next with the reason
                data = data[os.write(self._descriptor, data) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, size)  # no half line stays behind
            raise
        self._waiting.clear()
        self._full = False


def _start_of_partial_line(path: Path) -> int | None:
    """Where in metrics.jsonl the line of an interval that the run ended in begins; None if its last line is none."""
    *before, last = (path.read_bytes() if path.exists() else b"").splitlines(keepends=True) or [b""]
    return sum(map(len, before)) if PARTIAL_INTERVAL in (_record_of(last) or {}) else None


def cut_metrics(path: str | Path, last_step: int) -> int:
    """Keep the whole lines of metrics.jsonl up to `last_step`; returns how many lines went."""
    path = Path(path)
    if not path.exists():
        return 0
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if (record := _record_of(line)) and record["step"] <= last_step]
    if len(kept) < len(lines):
        write_atomic(path, b"".join(kept))
    return len(lines) - len(kept)


def _record_of(line: bytes) -> dict[str, Any] | None:
    """None for a line that is not one of ours, as the half line that a killed process leaves."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
        step = record["step"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return record if isinstance(step, int) and abs(step) < LARGEST else None


def read_metrics(path: str | Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """name -> (steps int64, values float64), from metrics.jsonl or the run's folder; other lines are passed over."""
    path = Path(path)
    path = path / "metrics.jsonl" if path.is_dir() else path
    columns: dict[str, tuple[list[int], list[float]]] = {}
    with open(path, "rb") as file:
        for line in file:
            record = _record_of(line)
            if record is None:
                continue
            step = record.pop("step")
            for name, value in record.items():
                if isinstance(value, float) or (isinstance(value, int) and abs(value) < LARGEST):
                    steps, values = columns.setdefault(name, ([], []))
                    steps.append(step)
                    values.append(value)
    return {
        name: (np.array(steps, np.int64), np.array(values, np.float64)) for name, (steps, values) in columns.items()
    }


# ------------------------------------------------------------------------------------------------------------- trackers


class TensorBoardTracker:
    """Mirrors metrics.jsonl into TensorBoard; events from `purge_step` on that an earlier process wrote are hidden.

    Writes the records itself: torch's SummaryWriter does it in a thread, which dies on a full disk with a traceback,
    and which processes that are forked later would lack.
    """

    def __init__(self, folder: Path, purge_step: int | None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # takes a second
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        self._file = open(folder / f"events.out.tfevents.{time.time_ns()}.{platform.node()}.{os.getpid()}", "wb")  # noqa: SIM115  closed by close()
        self._records = RecordWriter(self._file)
        self._write(file_version="brain.Event:2")
        if purge_step is not None:
            self._write(step=purge_step, session_log=SessionLog(status=SessionLog.START))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._write(step=step, summary=self._summary(value=values))

    def close(self) -> None:
        self._file.close()

    def _write(self, **content: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **content).SerializeToString())
        self._file.flush()


class WandbTracker:
    """Mirrors metrics.jsonl into Weights & Biases, against the run's own step."""

    def __init__(self, folder: Path, config: Any) -> None:
        import wandb  # never imported unless asked for

        mode = config.Wandb.Init.Mode
        if mode == "online" and not wandb.login(prompt=False):  # wandb.init would stop and ask at the terminal
            raise RuntimeError("no account is set up here: `wandb login`, or Wandb.Init.Mode offline")
        self._run = wandb.init(
            project=config.Wandb.Init.Project,
            mode=mode,
            name=folder.name,
            id=folder.name[-128:],
            resume="allow",
            dir=str(folder),
            config=config_to_dict(config),
            settings=wandb.Settings(init_timeout=WANDB_SECONDS),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        self._run.finish()


def check_trackers(config: Any) -> None:
    """ConfigError where a mirror is asked for that isn't installed here."""
    mode = config.Wandb.Init.Mode
    if mode != "disabled" and find_spec("wandb") is None:
        raise ConfigError(
            f"Wandb.Init.Mode = {mode}: Weights & Biases is not installed here; pip install -r requirements-wandb.txt, "
            f"or --Wandb.Init.Mode disabled"
        )


class Trackers:
    """The mirrors of metrics.jsonl, started with the first line. One that fails costs a warning, never the run."""

    def __init__(self, folder: Path, config: Any, purge_step: int | None) -> None:
        self._waiting = {"TensorBoard": lambda: TensorBoardTracker(folder / "tb", purge_step)}
        if config.Wandb.Init.Mode != "disabled":
            self._waiting["Weights & Biases"] = lambda: WandbTracker(folder, config)
        self._started: dict[str, TensorBoardTracker | WandbTracker] = {}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        while self._waiting:
            name, start = self._waiting.popitem()
            with self._surviving(name):
                self._started[name] = start()
        for name, tracker in list(self._started.items()):
            with self._surviving(name):
                tracker.log(step, metrics)

    def close(self) -> None:
        for name, tracker in list(self._started.items()):
            with self._surviving(name):
                tracker.close()

    @contextlib.contextmanager
    def _surviving(self, name: str):
        try:
            yield
        except Exception as error:  # whatever a tracker, its network or its account raises
            self._started.pop(name, None)
            text = str(error).strip().splitlines()
            logger.warning(
                "%s is off for this run (%s: %s); metrics.jsonl has everything",
                name,
                type(error).__name__,
                text[0] if text else "no reason given",
            )


# ------------------------------------------------------------------------------------------------------------- progress


class Progress:
    """Where the run is, on stderr: a bar on a terminal, elsewhere a line every `line_seconds`.

    Steps before `trains_from` cost nothing beside those that train: before it, how long the run will take is not said.
    """

    def __init__(self, total: int, start: int, trains_from: int = 0, line_seconds: float = LINE_SECONDS) -> None:
        self._total, self._step, self._trains_from = total, start, trains_from
        self._line_seconds = line_seconds
        self._line_step, self._line_time = start, time.monotonic()
        self._bar = None
        if sys.stderr.isatty():
            self._bar = tqdm(total=total, initial=start, unit="step", dynamic_ncols=True, file=sys.stderr)
            if start < trains_from:
                self._bar.bar_format = BAR_OF_WARM_UP

    def update(self, step: int, status: Callable[[], str]) -> None:
        """`status` is called only where its text is shown."""
        if self._step < self._trains_from <= step:
            self._begin_training(step)
        if self._bar is not None:
            if self._bar.update(step - self._step):
                self._bar.set_postfix_str(status(), refresh=False)
        elif time.monotonic() - self._line_time >= self._line_seconds:
            self._print_line(step, status())
        self._step = step

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _begin_training(self, step: int) -> None:
        """From here on speed is measured anew."""
        self._line_step, self._line_time = step, time.monotonic()
        if self._bar is not None:
            self._bar.bar_format = None

    def _print_line(self, step: int, status: str) -> None:
        now = time.monotonic()
        rate = (step - self._line_step) / max(now - self._line_time, 1e-9)  # steps/s
        left = tqdm.format_interval((self._total - step) / rate) if rate > 0 else "?"
        if step < self._trains_from:
            left = f"? (trains from step {self._trains_from})"
        _say(f"step {step}/{self._total}  {rate:.1f} step/s  left {left}  {status}")
        self._line_step, self._line_time = step, now


def _write_nowhere(*streams: int) -> None:
    """What is still to be written to a full disk or to a terminal that is gone goes nowhere, instead of failing."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        os.dup2(nowhere, stream)
    os.close(nowhere)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # stderr may go to the disk that is full, and then there is nobody left to tell
        tqdm.write(text, file=sys.stderr)


class _BarHandler(logging.Handler):
    """Log lines to stderr without tearing the bar: ours, and warnings of everything else."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING or record.name.partition(".")[0] == "drama":
            level = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
            _say(f"{level}{record.getMessage()}")


# ------------------------------------------------------------------------------------------------------------------ run


def open_run(config: Any, resume: str | Path | None = None) -> "Run":
    """A new run's folder under RunDir; or with `resume` an existing one, which goes on at its newest checkpoint.

    config: with `resume` None means the folder's own config.yaml; a configuration that differs from it (overrides on
    the command line) replaces it and says so. Use the run as a context: inside, Ctrl-C and SIGTERM set
    `run.stop_requested`.
    """
    place = resume if resume is not None else f"BasicSettings.RunDir {config.BasicSettings.RunDir}"
    try:
        if resume is not None:
            _refuse_stored_result(Path(resume))
            return Run(Path(resume), config, resumed=True)
        device = resolve_device(config.BasicSettings.Device)
        prepare_determinism(config.BasicSettings.Deterministic, device)  # naming the GPU starts CUDA
        config = with_absolute_paths(config)
        folder = _new_folder(config)
        write_atomic(folder / RUN_CONFIG_NAME, config_to_yaml(config).encode())
        write_atomic(folder / ORIGIN, origin(device))
        return Run(folder, config, resumed=False)
    except OSError as error:
        raise RunError(f"{place}: no run can be stored there ({error_reason(error)})") from None


def _refuse_stored_result(folder: Path) -> None:
    """What `eval.py --store` made has a card and no checkpoints: a run that began again there would cut its metrics."""
    if (folder / "CARD.md").exists() and not any((folder / "ckpt").glob("*")):
        raise RunError(f"{folder}: a stored result has no checkpoint to go on from; python eval.py {folder} plays it")


def _settle_config(folder: Path, given: Any) -> Any:
    """The configuration that a resumed run goes on with: `given`, or for None the folder's."""
    stored = config_from_file(folder / RUN_CONFIG_NAME)
    if given is None or given == stored:
        return stored
    before, after = _flat(config_to_dict(stored)), _flat(config_to_dict(given))
    changed = [f"{key} {before.get(key)} -> {value}" for key, value in after.items() if before.get(key) != value]
    logger.warning("resumed with another configuration: %s", ", ".join(changed))
    return given


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in tree.items():
        flat.update(_flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value})
    return flat


def _new_folder(config: Any) -> Path:
    """Made here and by nobody else, however many runs start in one second."""
    parts = [
        config.BasicSettings.Env_name,
        config.Models.WorldModel.Backbone,
        config.Models.Agent.Policy,
        config.n,
        f"seed{config.BasicSettings.Seed}",
        time.strftime("%Y%m%d-%H%M%S"),
    ]
    name = "_".join(re.sub(r"[^A-Za-z0-9.+-]+", "-", str(part)) for part in parts)
    root = Path(config.BasicSettings.RunDir)
    root.mkdir(parents=True, exist_ok=True)
    repeat = 1
    while True:
        folder = root / (name if repeat == 1 else f"{name}-{repeat}")
        try:
            folder.mkdir()
        except FileExistsError:
            repeat += 1
            continue
        return folder


def _lock_folder(folder: Path) -> int:
    """A record lock, as worker processes don't inherit it: with flock an orphan would keep the run from resuming."""
    if not (folder / RUN_CONFIG_NAME).is_file():
        raise RunError(
            f"{folder}: not a run's folder, it has no {RUN_CONFIG_NAME}; {folder_listing(folder.absolute())}"
        )
    try:
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise RunError(f"{folder}: can't be written ({error_reason(error)})") from None
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.read(descriptor, 200).decode(errors="replace").strip() or "another process"
        os.close(descriptor)
        raise RunError(f"{folder}: in use by {holder}; stop that one first, or start a new run") from None
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"process {os.getpid()} on {platform.node()}\n".encode())
    return descriptor


def _read_origin(folder: Path) -> dict[str, Any]:
    """What origin.json says so far; a run goes on without it, too."""
    try:
        content = read_json(folder / ORIGIN)
    except FileNotFoundError:
        content = {}
    except CheckpointError as error:
        logger.warning("%s: how the run began is not known any more", error)
        content = {}
    if not isinstance(content, dict) or not isinstance(content.get("resumed", []), list):
        logger.warning("%s: not written by a run, it is replaced", folder / ORIGIN)
        return {}
    return content


def seconds_taken(folder: str | Path, origin: Mapping[str, Any]) -> float:
    """Wall time of the run's processes so far: up to the last metric line of each, work that was lost included."""
    path = Path(folder) / "metrics.jsonl"
    logged = read_metrics(path).get(TOTAL_SECONDS) if path.exists() else None
    pieces = [piece.get("seconds") for piece in origin.get("resumed", []) if isinstance(piece, dict)]
    known = [float(seconds) for seconds in pieces if isinstance(seconds, int | float)]
    return max([*known, *(logged[1].tolist() if logged else [])], default=0.0)


class Run:
    """One training run: see the module's docstring for the folder, `open_run` for how to get one.

    `start_step`: the step of the checkpoint that `load_checkpoint` will give, 0 without one.
    """

    def __init__(self, folder: Path, config: Any, resumed: bool) -> None:
        self._began = time.monotonic()
        self.folder = folder
        self._lock = _lock_folder(folder)
        self.config = _settle_config(folder, config)
        self._checkpoints = CheckpointFolder(folder / "ckpt")
        for subfolder in SUBFOLDERS:
            (folder / subfolder).mkdir(exist_ok=True)
        self._checkpoints.clean()
        for leftover in [path for place in ("", "pictures", "videos") for path in (folder / place).glob(".*.tmp*")]:
            leftover.unlink()  # of a killed process; eval/ may be in use by another
        self._resume_from = self._checkpoints.newest_sound()
        self.start_step = _manifest_step(self._resume_from) if self._resume_from else 0
        if resumed and self._resume_from is None:
            self._refuse_to_start_over()
        self._origin = _read_origin(folder) if resumed else {}
        self._seconds_before = seconds_taken(folder, self._origin) if resumed else 0.0
        if resumed:
            cut_metrics(folder / "metrics.jsonl", self.start_step if self._resume_from else -1)
        self._metrics = MetricsFile(folder / "metrics.jsonl")
        self._trackers = Trackers(folder, self.config, self.start_step + 1 if resumed else None)
        self._sums = MetricSums()
        self._returns: deque[float] = deque(maxlen=RECENT_EPISODES)
        self._losses: dict[str, float] = {}
        training = self.config.JointTrainAgent
        trains_from = max(training.WorldModelWarmUp, training.BehaviourWarmUp)
        self._progress = Progress(training.SampleMaxSteps, self.start_step, trains_from)
        self._flushed = (self.start_step, time.monotonic())
        self._handler = _BarHandler()
        self._old_level = logging.getLogger("drama").level
        # A library that logs at its import, like dm_control, gives the root a handler: every line would stand twice.
        root = logging.getLogger()
        self._muted = [handler for handler in root.handlers if type(handler) is logging.StreamHandler]
        for handler in self._muted:
            root.removeHandler(handler)
        root.addHandler(self._handler)
        logging.getLogger("drama").setLevel(logging.INFO)
        if resumed:
            logger.info("%s goes on at step %d", folder, self.start_step)
        else:
            logger.info("the run's folder is %s", folder)
        self._told_unsaved = False
        self._closed = False
        self._old_signals: dict[int, Any] = {}
        self._terminals: list[int] = []  # those of standard output and error, while signals are handled here
        self._process = os.getpid()
        self.stop_reason: str | None = None
        self._signal_code = 0  # 128 + the number of the signal that stopped the run
        self._unsaved: str | None = None  # what the newest attempt to save left unsaved, and why

    # ------------------------------------------------------------------ beginning and end

    def __enter__(self) -> "Run":
        self._terminals = [stream for stream in (1, 2) if os.isatty(stream)]
        hangup = [number for number in HANGUP if signal.getsignal(number) != signal.SIG_IGN]  # as under nohup
        for number in (signal.SIGINT, signal.SIGTERM, *hangup):
            try:
                self._old_signals[number] = signal.signal(number, self._on_signal)
            except ValueError:  # not the main thread: whoever runs that one handles its signals
                break
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        for number, old in self._old_signals.items():
            signal.signal(number, old)
        self._old_signals.clear()
        self.close(picture=kind is None)

    def close(self, picture: bool = True) -> None:
        """Flush and let go of everything; with `picture` the learning curve is drawn."""
        if self._closed:
            return
        self._closed = True
        self._progress.close()
        self._trackers.close()
        self._metrics.close()
        if picture and (self.folder / "metrics.jsonl").stat().st_size:
            with self._warning_if_full("the learning curve"):
                learning_curve(self.folder)
        root = logging.getLogger()
        root.removeHandler(self._handler)
        for handler in self._muted:
            root.addHandler(handler)
        logging.getLogger("drama").setLevel(self._old_level)
        os.close(self._lock)

    def _refuse_to_start_over(self) -> None:
        """A run that was to have checkpoints and was killed before the first may begin again; no other."""
        damaged = sorted(path.name for path in (self.folder / "ckpt").glob("damaged_*"))
        if damaged:
            problem = f"all its checkpoints are damaged ({', '.join(damaged)})"
        elif not self.config.JointTrainAgent.SaveModels and (self.folder / "metrics.jsonl").exists():
            problem = "it wrote none, because JointTrainAgent.SaveModels is false"
        else:
            return
        os.close(self._lock)
        raise RunError(f"{self.folder}: no checkpoint to go on from: {problem}; start a new run")

    def keep_config(self) -> None:
        """Write what a resumed run goes on with, configuration and machine, once its checkpoint has proved to fit."""
        write_atomic(self.folder / RUN_CONFIG_NAME, config_to_yaml(self.config).encode())
        device = resolve_device(self.config.BasicSettings.Device)
        went_on = resumed_origin(self._origin, self.start_step, self._seconds_before, device)
        write_atomic(self.folder / ORIGIN, went_on)

    def how_to_go_on(self) -> str:
        """What is saved, in words, for a run that ends early."""
        complete = self._checkpoints.complete()
        if not complete:
            return "nothing is saved, it cannot be resumed"
        return f"step {_manifest_step(complete[-1])} is saved, go on with --resume {self.folder}"

    def report(self) -> str:
        """What a user wants to know at the end: how the return developed, how long it took, and where to look."""
        pictures = self.folder / "pictures"
        lines = [self._score_report(), f"wall time: {duration(self._total_seconds())}"]
        lines.append(f"learning curve: {pictures / 'learning_curve.png'}")
        lines.append(f"reconstructions and open-loop predictions: {pictures}")
        if self._unsaved is not None:
            lines.append(f"{self._unsaved}: {self.how_to_go_on()}")
        elif self._checkpoints.complete():
            lines.append(f"evaluate with: python eval.py {self.folder}")
        return "\n".join(lines)

    def print_report(self) -> None:
        """`report` to standard output, where somebody is left to read it."""
        try:
            sys.stdout.write(self.report() + "\n")
            sys.stdout.flush()
        except OSError:
            _write_nowhere(1)

    def _score_report(self) -> str:
        steps, returns = read_metrics(self.folder).get(EPISODE_RETURN, (np.zeros(0), np.zeros(0)))
        if not len(returns):
            return "no episode ended"
        window = min(REPORTED_EPISODES, len(returns))
        means = _moving_mean(returns, window)
        shown = np.unique(np.linspace(0, len(means) - 1, 6).round().astype(int))
        points = ", ".join(f"{means[i]:.2f} at {steps[i + window - 1]}" for i in shown)
        return (
            f"return by step (mean of {window} episodes): {points}\n"
            f"mean return {means[-1]:.3f} over the last {window} of {len(returns)} episodes"
        )

    @property
    def exit_code(self) -> int:
        """Of the process: 128 + the number of the signal that stopped the run, else 1 if its last step is not saved."""
        return self._signal_code or int(self._unsaved is not None)

    @property
    def stop_requested(self) -> bool:
        return self.stop_reason is not None

    def stop(self, reason: str) -> None:
        """Ask the loop to save and leave after this step."""
        self.stop_reason = self.stop_reason or reason

    def _on_signal(self, number: int, frame: Any) -> None:
        if os.getpid() != self._process:  # a forked worker has this handler too: its parent ends it, not Ctrl-C
            if number != signal.SIGINT:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        name = signal.Signals(number).name
        if number in HANGUP:
            _write_nowhere(*self._terminals)
        if number == signal.SIGINT and self.stop_requested:
            raise SystemExit(128 + number)
        self.stop(name)
        self._signal_code = 128 + number
        text = f"\n{name}: this step is finished and saved, then the run ends; Ctrl-C (again) leaves at once\n"
        with contextlib.suppress(OSError):
            os.write(2, text.encode())  # print and logging may be in the middle of a line here

    # ------------------------------------------------------------------ metrics

    def accumulate(self, metrics: Mapping[str, torch.Tensor | float]) -> None:
        """Add to the means that the next `flush` writes; 0-d tensors are copied on their device, without a sync."""
        self._sums.add(metrics)

    def flush(self, step: int) -> dict[str, float]:
        """Write a line with the mean of everything accumulated since the last one (the only host sync of logging).

        Returns these means.
        """
        return self._flush(step, {})

    def flush_rest(self, step: int) -> None:
        """`flush` for the interval that the run ends in, after its last checkpoint: from there a run that goes on takes
        what was accumulated, and writes the interval as a whole in place of this line."""
        if self._sums:
            self._flush(step, {PARTIAL_INTERVAL: step - self._flushed[0]})

    def _flush(self, step: int, mark: Mapping[str, float]) -> dict[str, float]:
        means = self._sums.take()
        self._losses = {name: value for name, value in means.items() if name.endswith("loss")} or self._losses
        now = time.monotonic()
        last_step, last_time = self._flushed
        self._flushed = (step, now)
        rate = (step - last_step) / max(now - last_time, 1e-9)
        total = self._seconds_before + now - self._began
        self.log(step, {**means, "time/steps_per_second": rate, TOTAL_SECONDS: total, **mark})
        return means

    def _total_seconds(self) -> float:
        """Of all processes of the run so far."""
        return self._seconds_before + time.monotonic() - self._began

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a line at once: episode returns, evaluation scores. Host numbers: a tensor would cost a sync."""
        metrics = {name: _number(value) for name, value in metrics.items()}
        if EPISODE_RETURN in metrics:
            self._returns.append(metrics[EPISODE_RETURN])
        self._metrics.write({"step": step, **metrics})
        self._trackers.log(step, metrics)

    def progress(self, step: int) -> None:
        """Cheap; once a step."""
        self._progress.update(step, self.status)

    def status(self) -> str:
        """The score (mean return of the last episodes) and the losses, short."""
        score = f"score {sum(self._returns) / len(self._returns):.4g}" if self._returns else "no episode yet"
        losses = [f"{name.removesuffix('/loss')} {value:.4g}" for name, value in self._losses.items()]
        return "  ".join([score, *losses[:3]])

    def state_dict(self) -> dict:
        return {"sums": self._sums.state_dict(), "returns": list(self._returns), "losses": dict(self._losses)}

    def load_state_dict(self, state: dict) -> None:
        self._sums.load_state_dict(state["sums"])
        self._returns = deque(state["returns"], maxlen=RECENT_EPISODES)
        self._losses = dict(state["losses"])

    # ------------------------------------------------------------------ checkpoints

    def save_checkpoint(
        self, step: int, *, model: Mapping[str, Any], train: Mapping[str, Any], replay: StoredReplay | None = None
    ) -> Path | None:
        """Write a checkpoint; the state of the run's own logging goes with it.

        model: `world_model` and `agent` (state dicts) and `spaces` (plain dict). train: nested dicts and lists of
        tensors, arrays and plain values. Returns the folder; None when SaveModels is false or the disk refused, which
        is told and need not end the training: the checkpoints before it stay.
        """
        if not self.config.JointTrainAgent.SaveModels:
            if not self._told_unsaved:
                logger.info("JointTrainAgent.SaveModels is false: no checkpoints are written")
            self._told_unsaved = True
            self.log(step, {})  # no checkpoint says how far the run got: its last step is one of the log
            return None
        started = time.monotonic()
        files = {
            "model.pt": serialise(self.described(step, model), "model"),
            "train.pt": serialise({"train": train, "run": self.state_dict()}),
        }
        try:
            if not (self.folder / RUN_CONFIG_NAME).exists():
                raise RunError(
                    f"{self.folder}: was removed while it was in use, step {step} cannot be saved for --resume"
                )
            self._metrics.sync()
            manifest = replay.save(self.folder / "replay") if replay is not None else None
            files["replay.json"] = json.dumps(manifest).encode()
            folder = self._checkpoints.write(step, files)
        except OSError as error:
            self._unsaved = f"step {step} is not saved ({error_reason(error)})"
            logger.warning("%s: training goes on, %s", self._unsaved, self._last_saved())
            return None
        self._unsaved = None
        with self._warning_if_full("an old checkpoint's removal"):
            kept = self._checkpoints.prune()
            if replay is not None:
                replay.prune(self.folder / "replay", [read_json(entry / "replay.json") for entry in kept])
        megabytes = sum(len(data) for data in files.values()) / 2**20
        logger.info("checkpoint %s: %.1f MiB in %.2f s", folder, megabytes, time.monotonic() - started)
        return folder

    def load_checkpoint(self, map_location: str | torch.device = "cpu") -> Checkpoint | None:
        """The newest sound checkpoint of a resumed run, None for a new one; sets the state of the run's own logging."""
        if self._resume_from is None:
            return None
        checkpoint, logging_state = read_checkpoint(self._resume_from, map_location)
        self.load_state_dict(logging_state)
        return checkpoint

    def described(self, step: int, model: Mapping[str, Any]) -> dict:
        """The content of a model.pt; `model` as for `save_checkpoint`."""
        return {
            "format": CHECKPOINT_FORMAT,
            "step": step,
            "config": config_to_dict(self.config),
            "spaces": model["spaces"],
            "versions": {"python": platform.python_version(), "torch": str(torch.__version__), "numpy": np.__version__},
            "world_model": model["world_model"],
            "agent": model["agent"],
        }

    def _last_saved(self) -> str:
        complete = self._checkpoints.complete()
        return f"the last checkpoint is {complete[-1]}" if complete else "there is no checkpoint yet"

    # ------------------------------------------------------------------ pictures

    def save_picture(self, name: str, image: np.ndarray) -> None:
        """pictures/NAME.png from (H, W, 3) uint8; a full disk costs a warning."""
        with self._warning_if_full(f"picture {name}"):
            save_png(self.folder / "pictures" / f"{name}.png", image)

    def save_video(self, name: str, frames: np.ndarray, fps: float = 15) -> None:
        """videos/NAME.mp4 from (T, H, W, C) uint8; a full disk costs a warning."""
        with self._warning_if_full(f"video {name}"):
            save_mp4(self.folder / "videos" / f"{name}.mp4", frames, fps)

    def save_evaluation(self, name: str, files: Mapping[str, bytes]) -> None:
        """eval/NAME/ with `files`, {file name: content}; a full disk costs a warning."""
        with self._warning_if_full(f"evaluation {name}"):
            (self.folder / "eval" / name).mkdir(exist_ok=True)
            for file, data in files.items():
                write_atomic(self.folder / "eval" / name / file, data)

    @contextlib.contextmanager
    def _warning_if_full(self, what: str):
        try:
            yield
        except OSError as error:
            logger.warning("%s failed (%s); training goes on", what, error_reason(error))


def _manifest_step(folder: Path) -> int:
    return int(CheckpointFolder.NAME.fullmatch(folder.name)[1])


def _number(value: Any) -> float | int:
    return value if type(value) in (int, float) else float(value)


# ------------------------------------------------------------------------------------------------------- learning curve


def learning_curve(run_folder: str | Path) -> Path:
    """pictures/learning_curve.png of a run's folder, from metrics.jsonl: returns above, losses below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # half a second that only this function needs
    from matplotlib.figure import Figure

    run_folder = Path(run_folder)
    metrics = read_metrics(run_folder)
    figure = Figure(figsize=(10, 8), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    scores, losses = figure.subplots(2, 1, sharex=True)
    _draw_scores(scores, metrics)
    for name, (steps, values) in metrics.items():
        if "loss" in name.rpartition("/")[2]:
            losses.plot(steps, values, linewidth=1, label=name)
    losses.set(xlabel="environment steps", ylabel="loss", yscale="symlog")
    for axes in (scores, losses):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
    scores.set_title(run_folder.resolve().name, fontsize="medium")
    buffer = io.BytesIO()
    canvas.print_png(buffer)
    path = run_folder / "pictures" / "learning_curve.png"
    write_atomic(path, buffer.getbuffer())
    return path


def _moving_mean(values: np.ndarray, window: int) -> np.ndarray:
    """(n,) -> (n - window + 1,), element i over values[i : i + window]."""
    return np.convolve(values, np.ones(window) / window, mode="valid")


def _draw_scores(axes: Any, metrics: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> None:
    if EPISODE_RETURN in metrics:
        steps, returns = metrics[EPISODE_RETURN]
        window = min(RECENT_EPISODES, len(returns))
        smooth = _moving_mean(returns, window)
        axes.scatter(steps, returns, s=6, alpha=0.35, label="episode")
        axes.plot(steps[window - 1 :], smooth, label=f"mean of {window} episodes")
    if EVALUATION_RETURN in metrics:
        axes.plot(*metrics[EVALUATION_RETURN], "D", color="black", label="evaluation")
    axes.set_ylabel("return")


# --------------------------------------------------------------------------------------------------------------- tables


def episode_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One row for each episode -> csv text; the columns are the keys in the order in which they first appear."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def duration(seconds: float) -> str:
    """Wall time for a reader: 34 s, 16 min, 5 h 30 min."""
    minutes = round(seconds / 60)
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def bootstrap_interval(
    values: Sequence[float], level: float = 0.95, seed: int = 0, draws: int = 10_000
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean of `values`; NaN for none."""
    values = np.asarray(values, np.float64)
    if not values.size:
        return math.nan, math.nan
    picks = np.random.default_rng(seed).integers(0, values.size, (draws, values.size))
    low, high = np.quantile(values[picks].mean(axis=1), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)

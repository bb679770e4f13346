"""A sweep: games × seeds × settings, each combination one run of train.py and one of eval.py in a folder of its own.

    OUT/sweep.json          the manifest: every run, its status and attempts; written at each change
    OUT/configs/NAME.yaml   the complete configuration of that run, as it was planned
    OUT/runs/NAME/<run>/    RunDir of that run and in it the run's folder as train.py makes it
    OUT/logs/NAME.log       what train.py and eval.py printed, one attempt after another
    OUT/summary.csv, .json  the end: a row for each run

A run is finished when its last step is saved and evaluated. What is not goes on from its newest checkpoint.
"""

import contextlib
import ctypes
import fcntl
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from envs.my_atari import ATARI_100K_GAMES
from tools.checkpoints import CheckpointFolder, read_json, write_atomic
from tools.run import EPISODE_RETURN, RECENT_EPISODES, episode_table
from utils import (
    RUN_CONFIG_NAME,
    Config,
    config_from_file,
    config_to_yaml,
    flatten_config,
    load_config,
    with_absolute_paths,
)

ROOT = Path(__file__).resolve().parent.parent
MANIFEST = "sweep.json"
MANIFEST_FORMAT = 1
WAITING, RUNNING, FINISHED, FAILED = "waiting", "running", "finished", "failed"
OWN_KEYS = {  # what a sweep sets itself for each run, and what says it
    "BasicSettings.Env_name": "--games varies it",
    "BasicSettings.Seed": "--seeds varies it",
    "BasicSettings.RunDir": "each run has its place in the sweep's folder",
}
POLL_SECONDS = 0.2
LOCK_SECONDS = 120  # how long a run whose folder another process still holds is waited for
TAIL_BYTES = 1 << 16  # of metrics.jsonl that the table reads
PR_SET_PDEATHSIG = 1  # linux/prctl.h


class SweepError(RuntimeError):
    """A sweep that can't be planned or gone on with; the message is one line."""


# ----------------------------------------------------------------------------------------------------------------- plan


@dataclass
class SweepRun:
    """One run of a sweep and how far it is."""

    name: str
    env: str
    seed: int
    setting: str  # "default", or the keys that differ between runs: "Backbone=Mamba"
    status: str = WAITING
    attempts: int = 0
    seconds: float = 0.0  # of all attempts
    error: str | None = None


class PlannedRun(NamedTuple):
    """A run that is wanted, and its configuration."""

    run: SweepRun
    config: Config


@dataclass
class Outcome:
    """How an attempt ended. `stopped`: it was asked to, and is no failure."""

    finished: bool
    seconds: float
    error: str | None = None
    stopped: bool = False


def env_name(game: str) -> str:
    """`Pong` -> `ALE/Pong-v5`; a name with a family or a version is taken as it is."""
    return game if re.search(r"[/:]|-v\d+$", game) else f"ALE/{game}-v5"


def expand_games(games: Sequence[str]) -> list[str]:
    """Names of environments, each once; `atari100k` stands for the 26 games of the benchmark."""
    words = itertools.chain.from_iterable(ATARI_100K_GAMES if game == "atari100k" else [game] for game in games)
    return list(dict.fromkeys(env_name(word) for word in words))


def expand_settings(settings: Sequence[str]) -> list[dict[str, str]]:
    """`KEY=a,b` words -> every combination as {key: value}; a comma inside brackets belongs to a list."""
    choices: dict[str, list[str]] = {}
    for word in settings:
        key, given, values = word.partition("=")
        if not given or not key or not values:
            raise SweepError(f"--set {word}: expected KEY=value,value")
        if key in choices or key in OWN_KEYS:
            problem = OWN_KEYS.get(key, "it was varied already: name all its values in one --set")
            raise SweepError(f"--set {key}: {problem}")
        choices[key] = re.split(r",(?![^\[]*\])", values)
    return [dict(zip(choices, combination, strict=True)) for combination in itertools.product(*choices.values())]


def plan(games: Sequence[str], seeds: Sequence[int], settings: Sequence[str], words: Sequence[str]) -> list[PlannedRun]:
    """Every run of the sweep, its configuration checked.

    settings: `KEY=a,b`; words: what all runs have on their command line besides.

    Raises:
        ConfigError, SweepError: in one line, before anything is started.
    """
    planned = []
    for chosen, env, seed in itertools.product(expand_settings(settings), expand_games(games), dict.fromkeys(seeds)):
        setting = ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in chosen.items()) or "default"
        own = [f"--BasicSettings.Env_name={env}", f"--BasicSettings.Seed={seed}"]
        line = [*words, *(f"--{key}={value}" for key, value in chosen.items()), *own]
        command = load_config(line, "train.py")
        if command.doctor or command.debug_batch is not None or command.profile is not None:
            raise SweepError("a sweep only trains and evaluates: leave out --doctor, --debug-batch and --profile")
        if command.resume is not None or command.config.BasicSettings.Device.startswith("cuda:"):
            raise SweepError("a sweep resumes and places its runs itself: leave out --resume and the number of a GPU")
        parts = [env.removeprefix("ALE/"), *([] if setting == "default" else [setting]), f"seed{seed}"]
        name = "_".join(re.sub(r"[^A-Za-z0-9.+=-]+", "-", part) for part in parts)
        planned.append(PlannedRun(SweepRun(name, env, seed, setting), with_absolute_paths(command.config)))
    names = [run.name for run, _ in planned]
    repeated = {name for name in names if names.count(name) > 1}
    if repeated:
        raise SweepError(f"several runs would be called {min(repeated)}: give --set each key once, with other values")
    return planned


# ------------------------------------------------------------------------------------------------------------- manifest


@dataclass
class Sweep:
    """The manifest of a sweep's folder."""

    folder: Path
    runs: list[SweepRun]
    origin: dict[str, Any] = field(default_factory=dict)  # provenance of the last call

    def save(self) -> None:
        content = {"format": MANIFEST_FORMAT, **self.origin, "runs": [asdict(run) for run in self.runs]}
        write_atomic(self.folder / MANIFEST, json.dumps(content, indent=1).encode())

    def unfinished(self) -> list[SweepRun]:
        return [run for run in self.runs if run.status != FINISHED]


def read_sweep(folder: Path) -> Sweep | None:
    """The sweep that was begun in `folder`, None where none was."""
    if not (folder / MANIFEST).is_file():
        return None
    content = read_json(folder / MANIFEST)
    if not isinstance(content, dict) or content.get("format") != MANIFEST_FORMAT:
        raise SweepError(f"{folder / MANIFEST}: not a manifest of this version, which writes format {MANIFEST_FORMAT}")
    try:
        runs = [SweepRun(**run) for run in content.pop("runs")]
    except (KeyError, TypeError):
        raise SweepError(f"{folder / MANIFEST}: damaged, its list of runs can't be read") from None
    del content["format"]
    return Sweep(folder, runs, content)


def config_file(folder: Path, name: str) -> Path:
    return folder / "configs" / f"{name}.yaml"


def open_sweep(folder: Path, planned: Sequence[PlannedRun]) -> Sweep:
    """The sweep in `folder` with `planned` runs added to it; runs that it has keep their state.

    Raises:
        SweepError: a run of that name was begun with another configuration, or there is nothing to do.
    """
    sweep = read_sweep(folder) or Sweep(folder, [])
    known = {run.name for run in sweep.runs}
    (folder / "configs").mkdir(exist_ok=True)
    for run, config in planned:
        file = config_file(folder, run.name)
        if run.name in known:
            _refuse_another_config(file, config)
            continue
        write_atomic(file, config_to_yaml(config).encode())
        sweep.runs.append(run)
    if not sweep.runs:
        raise SweepError(f"{folder}: no sweep was begun there; name its --games and --seeds")
    for run in sweep.unfinished():
        run.status, run.attempts = WAITING, 0
    stop_file(folder).unlink(missing_ok=True)
    return sweep


def _refuse_another_config(file: Path, wanted: Config) -> None:
    begun, now = flatten_config(config_from_file(file)), flatten_config(wanted)
    changed = [f"{key} {begun[key]} -> {value}" for key, value in now.items() if begun[key] != value]
    if changed:
        raise SweepError(f"{file}: this run was begun with another configuration ({changed[0]}); use another --out")


@contextlib.contextmanager
def locked(folder: Path):
    """One process at a time works on a sweep's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SweepError(f"{folder}: another sweep.py works there; stop that one first") from None
        yield


# -------------------------------------------------------------------------------------------------------------- attempt


def attempt(folder: str, name: str, environment: Mapping[str, str]) -> Outcome:
    """Train the run, from its checkpoint if it has one, and evaluate it; blocks until that is done, failed or stopped.

    folder: the sweep's; environment: variables over those of this process. Ends early, after a checkpoint, once the
    sweep's stop file is there. Runs in whatever process or on whatever machine the run is to use.
    """
    out, start = Path(folder), time.monotonic()
    log, stop = log_file(out, name), stop_file(out)
    if stop.exists():
        return Outcome(False, 0.0, stopped=True)
    log.parent.mkdir(exist_ok=True)

    def call(*line: str) -> int:
        return _call([sys.executable, *line], log, environment, stop)

    before = run_folder(out, name)
    if before is None:
        place = f"--BasicSettings.RunDir={out / 'runs' / name}"
        code = call("train.py", "--config", str(config_file(out, name)), place)
    elif not is_trained(before):
        _wait_for_lock(before, stop)
        code = call("train.py", "--resume", str(before))
    else:
        code = 0
    after = run_folder(out, name)
    if code == 0 and after is not None and is_trained(after) and not is_evaluated(after):
        code = call("eval.py", str(after))
    finished = after is not None and is_evaluated(after)
    stopped = not finished and stop.exists()
    error = None if finished or stopped else _why(log, code)
    return Outcome(finished, time.monotonic() - start, error, stopped)


def log_file(out: Path, name: str) -> Path:
    return out / "logs" / f"{name}.log"


def stop_file(out: Path) -> Path:
    """Its presence asks all running attempts to save and end: it reaches every machine that the sweep's folder does."""
    return out / "stop"


def run_folder(out: Path, name: str) -> Path | None:
    """The run's folder as train.py made it: the newest one with a configuration."""
    found = [path.parent for path in (out / "runs" / name).glob(f"*/{RUN_CONFIG_NAME}")]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def is_trained(folder: Path) -> bool:
    """Whether the last step of the run is saved; of a run that keeps no checkpoints, whether it was logged."""
    config = config_from_file(folder / RUN_CONFIG_NAME)
    return saved_step(folder, config) >= config.JointTrainAgent.SampleMaxSteps


def saved_step(folder: Path, config: Config) -> int:
    """The step from which the run would go on; the newest one logged where no checkpoints are kept."""
    if not config.JointTrainAgent.SaveModels:
        return progress_of(folder)[0]
    return newest_checkpoint(folder)


def newest_checkpoint(folder: Path) -> int:
    """The step of the newest checkpoint, 0 without one."""
    complete = CheckpointFolder(folder / "ckpt").complete()
    return int(CheckpointFolder.NAME.fullmatch(complete[-1].name)[1]) if complete else 0


def is_evaluated(folder: Path) -> bool:
    """Whether the last checkpoint of a trained run has been evaluated; without checkpoints there is nothing to do."""
    config = config_from_file(folder / RUN_CONFIG_NAME)
    if not is_trained(folder):
        return False
    if not config.JointTrainAgent.SaveModels:
        return True
    newest = CheckpointFolder(folder / "ckpt").complete()[-1].name
    return (folder / "eval" / newest / "summary.json").is_file()


def _call(line: list[str], log: Path, environment: Mapping[str, str], stop: Path) -> int:
    """Run a command in the repository with its output in `log`, until it ends or `stop` exists."""
    with open(log, "ab") as file:
        file.write(f"$ {' '.join(line)}\n".encode())
        file.flush()
        process = subprocess.Popen(
            line, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, **environment}, preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        )  # fmt: skip
        try:
            while process.poll() is None and not stop.exists():
                time.sleep(POLL_SECONDS)
        finally:  # also when this process itself is interrupted
            if process.poll() is None:
                process.terminate()
            process.wait()
    return process.returncode


def _end_with_parent() -> None:
    """Have the kernel send SIGTERM when the parent dies, even by SIGKILL: no run goes on without its sweep."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait_for_lock(folder: Path, stop: Path) -> None:
    """Until no other process trains in the run's folder, like one that still saves because its sweep was killed."""
    end = time.monotonic() + LOCK_SECONDS
    while time.monotonic() < end and not stop.exists():
        with open(folder / "lock", "a") as file, contextlib.suppress(OSError):
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(POLL_SECONDS)


def _why(log: Path, code: int) -> str:
    """The last complaint in the log, in one line."""
    lines = log.read_text(errors="replace").splitlines()
    last = next((line for line in reversed(lines) if line.strip() and not line.startswith("$ ")), "no output")
    reason = f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"
    return f"{reason}: {last.strip()[:300]}"


# ------------------------------------------------------------------------------------------------- what is there to see


def progress_of(folder: Path) -> tuple[int, float | None]:
    """The newest step logged or saved, and the mean return of the last episodes; (0, None) at the start."""
    try:
        with open(folder / "metrics.jsonl", "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return 0, None
    step, returns = 0, []
    for line in lines:
        with contextlib.suppress(ValueError, KeyError, TypeError):  # the tail's first and last line may be cut
            record = json.loads(line)
            step = int(record["step"])
            returns += [record[EPISODE_RETURN]] if EPISODE_RETURN in record else []
    recent = returns[-RECENT_EPISODES:]
    return max(step, newest_checkpoint(folder)), sum(recent) / len(recent) if recent else None


def evaluation_of(folder: Path) -> dict[str, Any] | None:
    """The summary of the newest checkpoint's evaluation."""
    found = sorted((folder / "eval").glob("step_*/summary.json"))
    return read_json(found[-1]) if found else None


def summary_rows(sweep: Sweep) -> list[dict[str, Any]]:
    """One row for each run, for tables: how it went, and its evaluation where there is one."""
    rows = []
    for run in sweep.runs:
        folder = run_folder(sweep.folder, run.name)
        step, recent = progress_of(folder) if folder else (0, None)
        evaluation = (folder and evaluation_of(folder)) or {}
        rows.append(
            {
                "run": run.name,
                "env": run.env,
                "setting": run.setting,
                "seed": run.seed,
                "status": run.status,
                "step": step,
                "recent_return": recent,
                "evaluation_mean": evaluation.get("mean"),
                "evaluation_episodes": evaluation.get("episodes"),
                "human_normalised_mean": evaluation.get("human_normalised_mean"),
                "attempts": run.attempts,
                "seconds": round(run.seconds, 1),
                "error": run.error,
            }
        )
    return rows


def write_summary(sweep: Sweep) -> None:
    """summary.csv and summary.json."""
    rows = summary_rows(sweep)
    write_atomic(sweep.folder / "summary.csv", episode_table(rows).encode())
    write_atomic(sweep.folder / "summary.json", json.dumps({**sweep.origin, "runs": rows}, indent=1).encode())

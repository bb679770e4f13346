"""A run in one compressed file, to go on with on another machine.

    <run>/config.yaml, origin.json, metrics.jsonl, tb/, eval/
          ckpt/<newest>/      the newest sound checkpoint, no older one
          replay/             the rows and counters that it names
          pictures/           the newest of each kind

`tar xzf FILE -C runs` and `train.py --resume runs/<run>` go on from that checkpoint. The run may be training meanwhile:
what it then adds to the folder is not in the file. Frames of a game shrink to a few per cent, weights hardly.
"""

import contextlib
import itertools
import logging
import os
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from replay_buffer import manifest_files
from tools.checkpoints import CheckpointError, CheckpointFolder, check_files, read_json
from tools.provenance import ORIGIN
from utils import RUN_CONFIG_NAME

logger = logging.getLogger("drama.tools")

COMPRESSION = 6  # of gzip: 100,000 frames of Pong take 11 MB; 18 at level 1; 9 at level 9, four times as long
PICTURES = ("reconstruction_*", "open_loop_*", "final_obs_*", "learning_curve*")
KEPT = (RUN_CONFIG_NAME, ORIGIN, "metrics.jsonl", "tb/*", "eval/*/*")
ATTEMPTS = 3  # a run that trains may remove what is about to be read: its newest checkpoint is then another


class Archived(NamedTuple):
    """What is in the file: the checkpoint's name, and how many bytes went in and came out."""

    checkpoint: str
    before: int
    after: int


def archive_run(run: Path, path: Path) -> Archived:
    """Write the run's folder as described at the top of this file to `path`.

    Raises:
        CheckpointError: there is nothing in the folder that a run could go on from.
    """
    if not (run / RUN_CONFIG_NAME).is_file():
        raise CheckpointError(f"{run}: not a run's folder, it has no {RUN_CONFIG_NAME}")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with contextlib.ExitStack() as stack:
        checkpoint, files = _open_newest(run, stack)
        stack.callback(temporary.unlink, missing_ok=True)
        before = _write(temporary, run, files)
        os.replace(temporary, path)
    return Archived(checkpoint.name, before, path.stat().st_size)


def _open_newest(run: Path, stack: contextlib.ExitStack) -> tuple[Path, list[BinaryIO]]:
    """The newest sound checkpoint and all files to store, open: what is removed from now on can still be read."""
    for _ in range(ATTEMPTS):
        checkpoint = _newest_sound(run)
        with contextlib.suppress(FileNotFoundError):
            return checkpoint, [stack.enter_context(file.open("rb")) for file in _files(run, checkpoint)]
    raise CheckpointError(f"{checkpoint}: files of its replay are missing in {run / 'replay'}")


def _newest_sound(run: Path) -> Path:
    for checkpoint in reversed(CheckpointFolder(run / "ckpt").complete()):
        try:
            check_files(checkpoint)
            return checkpoint
        except (CheckpointError, FileNotFoundError) as error:
            logger.warning("%s is not what is archived: %s", checkpoint, error)
    raise CheckpointError(f"{run}: no sound checkpoint in it to go on from")


def _files(run: Path, checkpoint: Path) -> list[Path]:
    manifest = read_json(checkpoint / "replay.json")
    rows = [run / "replay" / name for name in manifest_files(manifest)] if manifest is not None else []
    pictures = [sorted((run / "pictures").glob(f"{kind}.png"))[-1:] for kind in PICTURES]
    others = [path for pattern in KEPT for path in sorted(run.glob(pattern)) if path.is_file()]
    return [*rows, *sorted(checkpoint.iterdir()), *others, *itertools.chain(*pictures)]


def _write(path: Path, run: Path, files: Sequence[BinaryIO]) -> int:
    """A compressed tar file of open files, under the name of the run's folder; returns how many bytes they have."""
    with tarfile.open(path, "w:gz", compresslevel=COMPRESSION) as archive:
        for file in files:
            info = archive.gettarinfo(arcname=str(run.resolve().name / Path(file.name).relative_to(run)), fileobj=file)
            archive.addfile(info, file)
    return sum(os.fstat(file.fileno()).st_size for file in files)

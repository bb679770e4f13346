"""Checkpoints: what is in them, how they reach the disk, and how files that nobody vouches for are read.

    step_000002000/model.pt       weights that describe themselves: the fields of `SavedModel` and a format number
                   train.pt       all else that the next step depends on: optimisers, random states, environments, ...
                   replay.json    the replay buffer's manifest; its rows lie in chunk files that checkpoints share
                   manifest.json  size and SHA-256 of the other three

A folder appears under its name complete or not at all. Reading executes nothing: tensors and plain values only.
"""

import contextlib
import hashlib
import io
import json
import logging
import os
import re
import shutil
import time
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from utils import ConfigError

logger = logging.getLogger("drama.checkpoints")

CHECKPOINT_FORMAT = 1
CHECKPOINTS_KEPT = 2
MAX_JSON_BYTES = 64 * 2**20  # a larger manifest is not ours


class CheckpointError(RuntimeError):
    """A checkpoint that is missing, damaged, unsafe or of another architecture; the message is one line."""


class NoCheckpoint(CheckpointError, ConfigError):
    """A path of the user's where nothing is: a fault of usage."""


# ---------------------------------------------------------------------------------------------------------------- files


def write_atomic(path: str | Path, data: bytes | memoryview) -> None:
    """The file is either the old one or the whole new one, also after a power cut; an OSError leaves nothing behind."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        _write_synced(temporary, data)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def _write_synced(path: Path, data: bytes | memoryview) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make renames and new files in a folder outlast a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def error_reason(error: OSError) -> str:
    """One line for a message."""
    return error.strerror or (str(error).splitlines() or [type(error).__name__])[0]


def folder_listing(folder: Path) -> str:
    """What is in the nearest existing folder, for messages about something that is missing from it."""
    while not folder.is_dir():
        folder = folder.parent
    names = sorted(entry.name for entry in folder.iterdir())
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return f"{folder} holds {shown or 'nothing'}"


# ----------------------------------------------------------------------------------------------- plain values on a disk

_ARRAY = "__numpy__"  # {_ARRAY: dtype, "shape": [...], "data": uint8 tensor} comes back as an array
_BYTES = "__bytes__"  # {_BYTES: uint8 tensor} comes back as bytes, which torch.load does not read in every case


def to_plain(value: Any, path: str = "checkpoint") -> Any:
    """`value` in the types that torch.load(weights_only=True) reads: tensors on the host, plain values, tagged arrays.

    Numpy scalars become Python numbers. Anything else is a TypeError that says where it sits.
    """
    if isinstance(value, torch.Tensor):
        return _plain_tensor(value)
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject or value.dtype.fields:
            raise TypeError(f"{path} is an array of {value.dtype}, which a checkpoint can't hold; use plain numbers")
        return {_ARRAY: value.dtype.str, "shape": list(value.shape), "data": _byte_tensor(value.tobytes())}
    if type(value) is bytes:
        return {_BYTES: _byte_tensor(value)}
    if isinstance(value, np.generic) and not isinstance(value, np.void):
        return to_plain(value.item(), path)
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (list, tuple):
        return type(value)(to_plain(item, f"{path}[{i}]") for i, item in enumerate(value))
    if isinstance(value, Mapping):
        for key in value:
            if type(key) not in (str, int, tuple) or key in (_ARRAY, _BYTES):
                raise TypeError(f"{path} has the key {key!r}, which a checkpoint can't hold")
        return {key: to_plain(item, f"{path}.{key}") for key, item in value.items()}
    raise TypeError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}; "
        "a checkpoint holds tensors, arrays and plain values only"
    )


def _plain_tensor(value: torch.Tensor) -> torch.Tensor:
    tensor = value.detach().cpu()
    whole = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
    return tensor if whole and tensor.is_contiguous() else tensor.contiguous().clone()  # a view would save all it views


def _byte_tensor(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(data), np.uint8))


def from_plain(value: Any) -> Any:
    """Inverse of `to_plain`; ValueError for tensors that claim more values than their data has (strides of 0 do)."""
    if isinstance(value, torch.Tensor) and value.numel() * value.element_size() > value.untyped_storage().nbytes():
        raise ValueError(f"a tensor of shape {tuple(value.shape)} over {value.untyped_storage().nbytes()} bytes")
    if isinstance(value, dict) and _ARRAY in value:
        dtype = np.dtype(value[_ARRAY])
        if dtype.hasobject:
            raise ValueError(f"an array of {dtype}")
        return np.frombuffer(from_plain(value["data"]).cpu().numpy().tobytes(), dtype).reshape(value["shape"]).copy()
    if isinstance(value, dict) and _BYTES in value:
        return from_plain(value[_BYTES]).cpu().numpy().tobytes()
    if isinstance(value, dict):
        return {key: from_plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(from_plain(item) for item in value)
    return value


def serialise(value: Any, path: str = "checkpoint") -> memoryview:
    """The bytes of a file that `torch.load` reads; path: the name of `value` in complaints about its parts."""
    # To memory first: a full disk is then an OSError of our own write and not an abort inside torch's zip writer.
    buffer = io.BytesIO()
    torch.save(to_plain(value, path), buffer)
    return buffer.getbuffer()


def _deserialise(data: bytes, path: Path, map_location: str | torch.device) -> Any:
    """Tensors and plain values out of a file nobody vouches for; CheckpointError for everything that isn't that."""
    try:
        _check_archive(data)
        return from_plain(torch.load(io.BytesIO(data), map_location=map_location, weights_only=True))
    except Exception as error:  # hostile or damaged bytes make the readers raise nearly anything
        text = str(error)
        if "Weights only load failed" in text:
            found = re.search(r"GLOBAL (\S+)|[Uu]nsupported \w+ (\S+)", text)
            what = f" ({next(filter(None, found.groups()))})" if found else ""
            raise CheckpointError(
                f"{path}: holds more than tensors and plain values{what}: refused, nothing in it was executed"
            ) from None
        first = text.strip().splitlines()
        raise CheckpointError(
            f"{path}: truncated or damaged ({first[0] if first else type(error).__name__}); use an earlier checkpoint"
        ) from None


def read_plain(path: Path) -> Any:
    """Tensors and plain values of one of our files, on the host; CheckpointError if it can't be read as such."""
    try:
        return _deserialise(path.read_bytes(), path, "cpu")
    except FileNotFoundError:
        raise NoCheckpoint(f"{path}: no such file; {folder_listing(path.absolute().parent)}") from None
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read ({error_reason(error)})") from None


def _check_archive(data: bytes) -> None:
    """A torch archive stores its members uncompressed: what they claim to hold can't exceed what the file has."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = archive.infolist()
        if any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise ValueError("compressed members")
        if sum(member.file_size for member in members) > len(data):
            raise ValueError("members larger than the file")
        broken = archive.testzip()
        if broken is not None:
            raise ValueError(f"checksum of {broken} is wrong")


def _refuse_large(path: Path) -> None:
    if path.stat().st_size > MAX_JSON_BYTES:
        raise CheckpointError(f"{path}: larger than {MAX_JSON_BYTES} bytes, not one of ours")


def read_json(path: Path) -> Any:
    """The content of a JSON file of sane size, else a CheckpointError."""
    _refuse_large(path)
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path}: truncated or damaged, not JSON") from None


# ---------------------------------------------------------------------------------------------------------- checkpoints


@dataclass(frozen=True)
class Checkpoint:
    """All that a run needs to go on: `train` as it was given to `save_checkpoint`, `replay` the buffer's manifest."""

    step: int
    folder: Path
    model: "SavedModel"
    train: dict
    replay: dict | None


@dataclass(frozen=True)
class SavedModel:
    """A model.pt: describes itself. `config` is the resolved configuration as plain dicts, `versions` what wrote it."""

    path: Path
    step: int
    config: dict
    spaces: dict
    versions: dict
    world_model: dict[str, torch.Tensor]
    agent: dict[str, torch.Tensor]

    def load_into(self, world_model: nn.Module, agent: nn.Module) -> None:
        """Copy weights and statistics into modules of the same architecture; CheckpointError names what differs."""
        load_state(world_model, self.world_model, "world model")
        load_state(agent, self.agent, "agent")
        logger.info("weights of step %d from %s", self.step, self.path)


class CheckpointFolder:
    """RUN/ckpt: complete checkpoints are folders `step_000002000`; everything else in it is a leftover."""

    NAME = re.compile(r"step_(\d{9,})(?:-(\d+))?")
    FILES = ("model.pt", "train.pt", "replay.json")

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def named(self) -> list[Path]:
        """All that has a checkpoint's name, oldest first."""
        found = []
        for entry in self.folder.iterdir() if self.folder.is_dir() else ():
            match = self.NAME.fullmatch(entry.name)
            if match:
                found.append((int(match[1]), int(match[2] or 0), entry))
        return [entry for *_, entry in sorted(found)]

    def complete(self) -> list[Path]:
        """Those with a manifest whose files are there with their sizes, oldest first."""
        return [entry for entry in self.named() if _is_complete(entry)]

    def newest_sound(self) -> Path | None:
        """The newest checkpoint whose checksums hold. Newer, damaged ones are renamed, with a warning."""
        for entry in reversed(self.named()):
            try:
                check_files(entry)
                return entry
            except (OSError, CheckpointError) as error:
                reason = error_reason(error) if isinstance(error, OSError) else error
                logger.warning("checkpoint %s is no good (%s): going back to the one before it", entry, reason)
                os.replace(entry, entry.with_name(f"damaged_{entry.name}_{time.time_ns()}"))
        return None

    def write(self, step: int, files: Mapping[str, bytes | memoryview]) -> Path:
        """All of the files or none: they appear under the final name by one rename, synced before it."""
        temporary = self.folder / f".tmp_{step}_{os.getpid()}"
        target = self._free_name(step)
        manifest = {
            "format": CHECKPOINT_FORMAT,
            "step": step,
            "files": {
                name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()
            },
        }
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            temporary.mkdir(parents=True)
            for name, data in {**files, "manifest.json": json.dumps(manifest, indent=1).encode()}.items():
                _write_synced(temporary / name, data)
            sync_folder(temporary)
            os.rename(temporary, target)
            sync_folder(self.folder)
        except OSError:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        return target

    def _free_name(self, step: int) -> Path:
        target, repeat = self.folder / f"step_{step:09d}", 0
        while target.exists():
            repeat += 1
            target = self.folder / f"step_{step:09d}-{repeat}"
        return target

    def prune(self) -> list[Path]:
        """Remove all but the newest complete ones; returns those kept."""
        complete = self.complete()
        for entry in complete[:-CHECKPOINTS_KEPT]:
            doomed = entry.with_name(f".tmp_old_{entry.name}")  # never a half-removed folder under a real name
            os.rename(entry, doomed)
            shutil.rmtree(doomed)
        return complete[-CHECKPOINTS_KEPT:]

    def clean(self) -> None:
        """Remove what a killed write left."""
        for entry in self.folder.glob(".tmp_*"):
            shutil.rmtree(entry, ignore_errors=True)


def check_files(folder: Path) -> None:
    """CheckpointError or OSError unless a checkpoint's files are there and as its manifest says."""
    _manifest_files(folder)
    for name in CheckpointFolder.FILES:
        _read_verified(folder / name)


def _manifest_files(folder: Path) -> dict[str, dict]:
    manifest = read_json(folder / "manifest.json")
    files = manifest.get("files") if isinstance(manifest, dict) else None
    entries = [files.get(name) for name in CheckpointFolder.FILES] if isinstance(files, dict) else [None]
    if not all(isinstance(entry, dict) and {"size", "sha256"} <= entry.keys() for entry in entries):
        raise CheckpointError(f"{folder / 'manifest.json'}: damaged, lacks the sizes and checksums")
    return files


def _is_complete(folder: Path) -> bool:
    try:
        files = _manifest_files(folder)
        return all((folder / name).stat().st_size == files[name]["size"] for name in CheckpointFolder.FILES)
    except (OSError, CheckpointError):
        return False


def _read_verified(path: Path) -> bytes:
    """The file's bytes, checked against the manifest beside it where there is one (a model.pt may travel alone)."""
    expected = _manifest_files(path.parent).get(path.name) if (path.parent / "manifest.json").exists() else None
    size = path.stat().st_size
    if expected and size != expected["size"]:
        raise CheckpointError(f"{path}: truncated or damaged, {size} bytes where its manifest says {expected['size']}")
    data = path.read_bytes()
    if expected and hashlib.sha256(data).hexdigest() != expected["sha256"]:
        raise CheckpointError(f"{path}: truncated or damaged, its checksum is not the manifest's")
    return data


def resolve_checkpoint(path: str | Path) -> Path:
    """The model.pt that `path` means: that file, the one of a checkpoint's folder, or the newest of a run's folder."""
    path = Path(path)
    if path.is_file():
        return path
    if (path / "model.pt").is_file():
        return path / "model.pt"
    checkpoints = CheckpointFolder(path / "ckpt")
    complete = checkpoints.complete()
    if complete:
        if checkpoints.named()[-1] != complete[-1]:
            logger.warning("checkpoint %s is damaged: %s is used", checkpoints.named()[-1], complete[-1])
        return complete[-1] / "model.pt"
    wanted = "no complete checkpoint in it" if path.is_dir() else "no such file or folder"
    raise (CheckpointError if path.exists() else NoCheckpoint)(
        f"{path}: {wanted}, expected a run's folder, a checkpoint's folder or a model.pt; "
        f"{folder_listing(path.absolute())}"
    )


def read_model(path: str | Path, map_location: str | torch.device = "cpu") -> SavedModel:
    """Weights and description from whatever `resolve_checkpoint` takes; executes nothing that is in the file."""
    path = resolve_checkpoint(path)
    try:
        content = _deserialise(_read_verified(path), path, map_location)
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read ({error_reason(error)})") from None
    kinds = {
        "format": int,
        "step": int,
        "config": dict,
        "spaces": dict,
        "versions": dict,
        "world_model": dict,
        "agent": dict,
    }
    content = content if isinstance(content, dict) else {}
    wrong = [name for name, kind in kinds.items() if not isinstance(content.get(name), kind)]
    if wrong:
        raise CheckpointError(f"{path}: not a Drama model, lacks {', '.join(wrong)}")
    if content["format"] != CHECKPOINT_FORMAT:
        raise CheckpointError(f"{path}: format {content['format']}, this version reads {CHECKPOINT_FORMAT}")
    return SavedModel(path, **{name: content[name] for name in kinds if name != "format"})


def read_checkpoint(folder: str | Path, map_location: str | torch.device = "cpu") -> tuple[Checkpoint, dict]:
    """A checkpoint's folder -> what it holds, and the state of the run's own logging."""
    folder = Path(folder)
    model = read_model(folder / "model.pt", map_location)
    try:
        content = _deserialise(_read_verified(folder / "train.pt"), folder / "train.pt", map_location)
        _refuse_large(folder / "replay.json")
        replay = json.loads(_read_verified(folder / "replay.json"))
    except OSError as error:
        raise CheckpointError(f"{folder}: can't be read ({error_reason(error)})") from None
    except (ValueError, RecursionError):
        raise CheckpointError(f"{folder / 'replay.json'}: truncated or damaged, not JSON") from None
    if not isinstance(content, dict) or not {"train", "run"} <= content.keys():
        raise CheckpointError(f"{folder / 'train.pt'}: not the training state of a run")
    return Checkpoint(model.step, folder, model, content["train"], replay), content["run"]


def load_state(module: nn.Module, state: Mapping[str, torch.Tensor], name: str) -> None:
    """Copy `state` into `module` in place; compilation's key prefix is of no account on either side."""
    own = {_bare(key): (key, value) for key, value in module.state_dict().items()}
    given = {_bare(key): value for key, value in state.items()}
    faults = {
        "missing": [key for key in own if key not in given],
        "unexpected": [key for key in given if key not in own],
        "of another shape": [
            f"{key} {_shape(given[key])} instead of {_shape(value)}"
            for key, (_, value) in own.items()
            if key in given and _shape(given[key]) != _shape(value)
        ],
    }
    if any(faults.values()):
        parts = [
            f"{len(keys)} {what}: {', '.join(keys[:3])}{', ...' if len(keys) > 3 else ''}"
            for what, keys in faults.items()
            if keys
        ]
        raise CheckpointError(f"{name}: the checkpoint is of another architecture; {'; '.join(parts)}")
    module.load_state_dict({own[key][0]: value for key, value in given.items()})


def _bare(key: str) -> str:
    return key.replace("_orig_mod.", "")


def _shape(value: Any) -> tuple[int, ...] | str:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__

"""Where a figure comes from: the versions, the machine and the commit that made it, as plain values for a JSON file."""

import json
import os
import platform
import shlex
import subprocess
import sys
import uuid
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "triton", "numpy", "gymnasium", "ale-py")  # what decides numbers, where it is installed
GIT_SECONDS = 10
ORIGIN = "origin.json"  # in a run's folder
ARCHIVED = "$Format:%H$"  # the commit itself in what `git archive` makes, see .gitattributes


def provenance(device: torch.device | None = None) -> dict[str, dict[str, str | int] | str | None]:
    """`versions`, `hardware` and `commit`; device None: the machine's first GPU, if there is one."""
    return {"versions": versions(), "hardware": hardware(device), "commit": commit()}


def origin(device: torch.device) -> bytes:
    """The content of a run's origin.json: a name that copies of the run share and no other run has, the command of this
    process and its provenance, on `device`."""
    return json.dumps({"run": uuid.uuid4().hex, "command": command(), **provenance(device)}, indent=1).encode()


def resumed_origin(before: Mapping[str, Any], step: int, seconds: float, device: torch.device) -> bytes:
    """The content of origin.json of a run that this process goes on with.

    before: its content so far; step: where this process begins; seconds: wall time of the processes before it.
    """
    piece = {"step": step, "seconds": round(seconds, 1), "command": command(), **provenance(device)}
    return json.dumps({**before, "resumed": [*before.get("resumed", []), piece]}, indent=1).encode()


def command() -> str:
    """What this process was started with, for a shell."""
    return shlex.join(["python", os.path.basename(sys.argv[0]), *sys.argv[1:]])


def versions() -> dict[str, str]:
    """Python's and those of the packages that are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def hardware(device: torch.device | None = None) -> dict[str, str | int]:
    """The device that computes, the processor and its cores, the operating system."""
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    accelerator = torch.cuda.get_device_name(device) if device.type == "cuda" else "none"
    return {
        "accelerator": accelerator,
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "system": f"{platform.system()} {platform.machine()}",
    }


def commit(root: Path = ROOT) -> str | None:
    """The commit that is checked out, with `+changes` where tracked files differ from it.

    Outside of git the one that `git archive` made this copy of, else None.
    """
    head = _git(root, "rev-parse", "HEAD")
    if head is None:
        return None if "$" in ARCHIVED else ARCHIVED
    changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    return f"{head}+changes" if changed else head


def _git(root: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, timeout=GIT_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _processor() -> str:
    """The processor's name as Linux tells it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())

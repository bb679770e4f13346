"""Which OpenGL backend mujoco renders with on a machine without a screen.

dm_control reads MUJOCO_GL once, when it is first imported, and a wrong choice ends in obscure errors or a crash. So
each candidate is tried in a process of its own before anything is imported here. A MUJOCO_GL that is set already stays.
"""

import importlib.util
import logging
import os
import subprocess
import sys
from typing import Any

from envs.common import EnvironmentUnavailable

DEBIAN_PACKAGES = {                                                    # in the order in which the backends are tried
    "egl": "libegl1 libegl-mesa0 libgl1-mesa-dri (Mesa, on the CPU), or libegl1 and an NVIDIA driver with EGL",
    "osmesa": "libosmesa6",
}
VARIABLE = "MUJOCO_GL"
PROBE_TIMEOUT_S = 120.0
HARMLESS_MESSAGES = (
    "Cannot set velocity on Entity with no free joint",                # Memory Maze, at every reset
    "compiler attribute 'settotalmass' is deprecated",                 # the suite's own cheetah
)
PROBE = """
from dm_control import mujoco
scene = "<mujoco><worldbody><light pos='0 0 3'/><camera name='top' pos='0 0 3'/><geom size='1'/></worldbody></mujoco>"
assert mujoco.Physics.from_xml_string(scene).render(32, 32, camera_id=0).any(), "the picture is black"
"""


def choose_backend(family: str) -> None:
    """Set MUJOCO_GL to a backend that works; EnvironmentUnavailable, naming `family` and the packages, if none does.

    Without dm_control there is nothing to try; its import then says what to install.
    """
    if VARIABLE in os.environ or sys.platform != "linux":              # elsewhere mujoco's own choice is the only one
        return
    if importlib.util.find_spec("dm_control") is None:
        return
    failures = {}
    for backend in DEBIAN_PACKAGES:
        failures[backend] = probe_backend(backend)
        if failures[backend] is None:
            os.environ[VARIABLE] = backend
            return
    problems = "; ".join(f"{backend}: {failure}" for backend, failure in failures.items())
    raise EnvironmentUnavailable(f"{family} cannot render here ({problems}). {install_hint()}")


def probe_backend(backend: str) -> str | None:
    """Render a small scene in a new process -> None, or what went wrong in one line."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROBE],
            env={**os.environ, VARIABLE: backend},
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no picture after {PROBE_TIMEOUT_S:g} s"
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"the process ended with code {done.returncode}"


def silence_absl() -> None:
    """Keep what dm_control says of its own models, and nothing else, out of the log."""
    logging.getLogger("absl").addFilter(_is_worth_reading)


def _is_worth_reading(record: logging.LogRecord) -> bool:
    return not any(message in record.getMessage() for message in HARMLESS_MESSAGES)


def install_hint() -> str:
    ways = " or ".join(f"{packages} ({VARIABLE}={backend})" for backend, packages in DEBIAN_PACKAGES.items())
    return f"Install one of the Debian packages {ways}"


def import_optional(module: str, family: str, requirements: str) -> Any:
    """Import a module of an optional package; EnvironmentUnavailable with the way to install it where that fails."""
    install = f"pip install {requirements}"
    root = module.partition(".")[0]
    if importlib.util.find_spec(root) is None:
        raise EnvironmentUnavailable(f"{family} needs the package {root}, which is not installed: {install}")
    try:
        return importlib.import_module(module)
    except Exception as error:                                         # a version that does not fit raises anything
        backend = os.environ.get(VARIABLE, "not set")
        raise EnvironmentUnavailable(
            f"{family}: importing {module} failed ({type(error).__name__}: {error}). Known to work: {install}. "
            f"{VARIABLE} is {backend}; if rendering is the cause, unset it. {install_hint()}"
        ) from error

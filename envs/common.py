"""What the environment families share: the errors a user can meet, and image resizing."""

import difflib
from collections.abc import Iterable

import cv2
import numpy as np

# OpenCV shares each image out among all cores, which for images as small as these costs more than it brings: an Atari
# frame takes 0.21 ms with 32 threads, 0.13 ms with one (32 cores beside an H200).
cv2.setNumThreads(1)


class UnusableEnvironment(ValueError):
    """An environment that cannot be built here, or not be used once built. One line that says why and what to do."""


class UnknownEnvironment(UnusableEnvironment):
    """A name that no family can build."""

    def __init__(self, name: str, problem: str, known: Iterable[str]):
        nearest = nearest_names(name, known)
        hint = f"; nearest: {', '.join(nearest)}" if nearest else ""
        super().__init__(f"Env_name {name!r}: {problem}{hint}")


class EnvironmentUnavailable(UnusableEnvironment):
    """A family that cannot run on this machine as it is. Says which package or graphics library to install."""


class EnvironmentOutputError(ValueError):
    """An environment broke its own contract (dtype, shape, range, NaN) or lacks a package. A restart would not help."""


def nearest_names(name: str, known: Iterable[str], count: int = 4) -> list[str]:
    """The `count` known names most like `name`, case ignored."""
    by_folded = {candidate.lower(): candidate for candidate in known}
    return [by_folded[match] for match in difflib.get_close_matches(name.lower(), by_folded, n=count, cutoff=0.5)]


def resize_image(image: np.ndarray, size: int) -> np.ndarray:
    """Average over each target pixel's area.   image (H, W, 3) uint8 -> (size, size, 3) uint8, always a new array."""
    if image.shape[:2] == (size, size):
        return image.copy()
    return cv2.resize(image, (size, size), interpolation=cv2.INTER_AREA)

"""Pictures and videos of frames.

Letters: N sequences, T frames of a sequence, R rows and C columns of a picture, H×W pixels of a frame.
"""

import contextlib
import math
import os
from collections.abc import Sequence
from pathlib import Path

import cv2
import imageio.v2 as imageio
import numpy as np
from imageio_ffmpeg import count_frames_and_secs, get_ffmpeg_exe

from tools.checkpoints import write_atomic

_GREY, _INK, _MARK, _BREAK = (40, 40, 40), (230, 230, 230), (255, 140, 0), (60, 200, 255)  # RGB
_CAPTION = 16  # pixels of a line of text
_SEPARATOR = 2  # pixels between frames
_VIEWABLE = 96  # pixels that a frame is enlarged to, at least
_COLUMNS = 16  # frames of a sequence that a picture shows
_PAGE_WIDTH = 1180  # pixels of a page's column, see tools/report.py
_WEBP_QUALITIES = (85, 60)
_PNG_LEVEL = 3  # of zlib: half the size of OpenCV's own choice for pictures like these, a tenth of a second each


def save_png(path: str | Path, image: np.ndarray) -> None:
    """image: (H, W, 3) uint8, RGB."""
    _check_frames(image, 3, "save_png")
    encoded, data = cv2.imencode(".png", image[..., ::-1], [cv2.IMWRITE_PNG_COMPRESSION, _PNG_LEVEL])
    if not encoded:
        raise ValueError(f"save_png: an image of shape {image.shape} can't be written as png")
    write_atomic(path, data.tobytes())


def small_webp(png: bytes, limit: int) -> bytes:
    """A picture's file as WebP of at most `limit` bytes: as wide as a page shows, then coarser, then smaller."""
    image = cv2.imdecode(np.frombuffer(png, np.uint8), cv2.IMREAD_COLOR) if png else None
    if image is None:
        raise ValueError("not a picture that can be read")
    width = min(image.shape[1], _PAGE_WIDTH)
    while True:
        height = max(1, round(image.shape[0] * width / image.shape[1]))
        shrunk = cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA)
        for quality in _WEBP_QUALITIES:
            data = cv2.imencode(".webp", shrunk, [cv2.IMWRITE_WEBP_QUALITY, quality])[1].tobytes()
            if len(data) <= limit or width == 1:
                return data
        width = max(1, width * 2 // 3)


def tile(
    frames: np.ndarray,
    scale: int | None = None,
    row_labels: Sequence[str] | None = None,
    column_labels: Sequence[str] | None = None,
    mark_column: int | None = None,
    breaks: np.ndarray | None = None,
) -> np.ndarray:
    """Frames (R, C, H, W, 3) uint8 -> one image (height, width, 3) uint8 with lines between them.

    scale: whole-number enlargement, None = enough to see small frames. row_labels stand above their rows, column_labels
    above the picture. mark_column: a coloured line stands before this column. breaks (R, C) bool: one of another colour
    before these frames.
    """
    _check_frames(frames, 5, "tile")
    rows, columns, height, width, _ = frames.shape
    scale = scale or max(1, math.ceil(_VIEWABLE / height))
    height, width = height * scale, width * scale
    above = _CAPTION if row_labels is not None else 0
    top = _CAPTION if column_labels is not None else 0
    step_y, step_x = above + height + _SEPARATOR, width + _SEPARATOR
    image = np.full((top + rows * step_y, columns * step_x, 3), _GREY, np.uint8)
    for row in range(rows):
        y = top + row * step_y + above
        for column in range(columns):
            frame = frames[row, column].repeat(scale, axis=0).repeat(scale, axis=1)
            image[y : y + height, column * step_x : column * step_x + width] = frame
        if row_labels is not None:
            _write_text(image, row_labels[row], 2, y - 4)
    for column, label in enumerate(column_labels or ()):
        _write_text(image, label, column * step_x + 2, _CAPTION - 4)
    if mark_column is not None:
        x = mark_column * step_x
        image[:, max(0, x - _SEPARATOR - 1) : x + 1] = _MARK
    for row, column in np.argwhere(breaks) if breaks is not None else ():
        y, x = top + row * step_y + above, column * step_x
        image[y : y + height, max(0, x - _SEPARATOR - 1) : x + 1] = _BREAK
    return image


def reconstruction_picture(obs: np.ndarray, reconstruction: np.ndarray, scale: int | None = None) -> np.ndarray:
    """Frames (N, T, H, W, C) uint8 -> an image: each sequence, what the decoder made of it, and how they differ."""
    labels = ("original", "reconstruction", "error")
    return _compare(obs, reconstruction, labels, scale)


def open_loop_picture(
    true: np.ndarray,
    predicted: np.ndarray,
    context_length: int,
    is_first: np.ndarray | None = None,
    scale: int | None = None,
) -> np.ndarray:
    """Frames (N, T, H, W, C) uint8 -> an image: what followed above what was predicted; a line ends the context.

    is_first (N, T) bool: where another episode begins, a line of another colour says so: what follows it can't be
    predicted. None: nowhere.
    """
    labels = ("what followed", "open-loop prediction", "error")
    return _compare(true, predicted, labels, scale, context_length, is_first)


def imagined_picture(context: np.ndarray, imagined: np.ndarray, scale: int | None = None) -> np.ndarray:
    """Real frames (N, T, H, W, C) and those that followed in imagination (N, T', H, W, C) uint8 -> an image.

    One row a sequence; a line stands where imagination begins. Of a long context the end is shown.
    """
    _check_frames(context, 5, "imagined_picture", channels=(1, 3))
    _check_frames(imagined, 5, "imagined_picture", channels=(1, 3))
    shown = min(context.shape[1], _COLUMNS // 4)
    frames = np.concatenate([context[:, context.shape[1] - shown :], imagined[:, : _COLUMNS - shown]], axis=1)
    times = range(-shown, frames.shape[1] - shown)
    labels = [f"t={time}" + (" real" if time < 0 else "") for time in times]
    return tile(np.broadcast_to(frames, (*frames.shape[:-1], 3)), scale, column_labels=labels, mark_column=shown)


def _compare(
    true: np.ndarray,
    made: np.ndarray,
    labels: tuple[str, str, str],
    scale: int | None,
    context_length: int | None = None,
    is_first: np.ndarray | None = None,
) -> np.ndarray:
    _check_frames(true, 5, labels[0], channels=(1, 3))
    _check_frames(made, 5, labels[1], channels=(1, 3))
    if true.shape != made.shape:
        raise ValueError(f"{labels[1]} has shape {made.shape}, expected {true.shape} like {labels[0]}")
    times = np.unique(np.linspace(0, true.shape[1] - 1, min(_COLUMNS, true.shape[1])).round().astype(int))
    true, made = true[:, times], made[:, times]
    error = np.abs(true.astype(np.int16) - made).astype(np.uint8)
    rows = np.stack([true, made, error], axis=1)  # (N, 3, T, H, W, C)
    rows = np.broadcast_to(rows, (*rows.shape[:-1], 3))
    mark = None if context_length is None else int(np.searchsorted(times, context_length))
    row_labels, breaks = [], np.zeros((len(true), len(times)), bool)
    for i in range(len(true)):
        starts = np.flatnonzero(is_first[i, 1:]) + 1 if is_first is not None else ()
        told = ", ".join(f"t={start}" for start in starts)
        row_labels += [f"{labels[0]} (an episode begins at {told})" if told else labels[0], *labels[1:]]
        breaks[i, np.searchsorted(times, starts)] = True  # before the first frame shown of that episode
    return tile(
        rows.reshape(-1, *rows.shape[2:]),
        scale,
        row_labels=row_labels,
        column_labels=[f"t={time}" + (" context" if time < (context_length or 0) else "") for time in times],
        mark_column=mark,
        breaks=breaks.repeat(3, axis=0),
    )


def _write_text(image: np.ndarray, text: str, x: int, y: int) -> None:
    cv2.putText(image, text, (x, y), cv2.FONT_HERSHEY_SIMPLEX, 0.4, _INK, 1, cv2.LINE_AA)


def _check_frames(frames: np.ndarray, dims: int, name: str, channels: tuple[int, ...] = (3,)) -> None:
    if frames.dtype != np.uint8 or frames.ndim != dims or frames.shape[-1] not in channels or 0 in frames.shape:
        allowed = " or ".join(map(str, channels))
        raise ValueError(
            f"{name}: frames are {frames.dtype} of shape {frames.shape}, "
            f"expected uint8, {dims} dimensions, {allowed} channels last"
        )


def save_mp4(path: str | Path, frames: np.ndarray, fps: float = 15, scale: int | None = None) -> None:
    """frames (T, H, W, C) uint8, C = 3 (RGB) or 1 (grey) -> H.264 that every player reads.

    Odd sizes grow by a row or a column. scale: whole-number enlargement, None = enough to see small frames.
    """
    _check_frames(frames, 4, "save_mp4", channels=(1, 3))
    try:
        get_ffmpeg_exe()
    except RuntimeError as error:  # which names no way out but imageio's own
        raise OSError("no ffmpeg: pip install imageio-ffmpeg brings one, or set IMAGEIO_FFMPEG_EXE") from error
    scale = scale or max(1, math.ceil(_VIEWABLE / frames.shape[1]))
    path = Path(path)
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.tmp.mp4")
    try:
        with imageio.get_writer(
            temporary, fps=fps, codec="libx264", pixelformat="yuv420p", macro_block_size=1, ffmpeg_log_level="error"
        ) as writer:
            for frame in frames:
                writer.append_data(_video_frame(frame, scale))
        if _count_frames(temporary) != len(frames):  # imageio overlooks that ffmpeg failed when it closed the file
            raise OSError(f"ffmpeg could not write all of {path.name}")
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _count_frames(path: Path) -> int:
    try:
        return count_frames_and_secs(str(path))[0]
    except RuntimeError:  # not a video
        return 0


def _video_frame(frame: np.ndarray, scale: int) -> np.ndarray:
    """(H, W, 1 or 3) -> (H', W', 3) with even sides, which yuv420p needs."""
    frame = np.broadcast_to(frame, (*frame.shape[:2], 3)).repeat(scale, axis=0).repeat(scale, axis=1)
    return np.pad(frame, ((0, frame.shape[0] % 2), (0, frame.shape[1] % 2), (0, 0)), mode="edge")

"""Pictures and videos: what was drawn can be seen where it belongs."""

import os
import resource

import cv2
import imageio.v2 as imageio
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.pictures import imagined_picture, open_loop_picture, reconstruction_picture, save_mp4, save_png, tile

MARK = np.array([255, 140, 0])
BREAK = np.array([60, 200, 255])


def random_frames(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 255, shape, dtype=np.uint8)


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 9), st.integers(1, 9), st.integers(1, 3), st.booleans())
@settings(deadline=None)
def test_tile_shows_every_frame_whole(rows, columns, height, width, scale, labelled):
    """A frame overwritten by a label or a line would be misread as a fault of the model."""
    frames = random_frames(rows, columns, height, width, 3)
    labels = {"row_labels": ["row"] * rows, "column_labels": ["t"] * columns} if labelled else {}
    image = tile(frames, scale, **labels)
    row_height, column_width = (image.shape[0] - 16 * labelled) // rows, image.shape[1] // columns
    for row in range(rows):
        for column in range(columns):
            y, x = (row + 1) * row_height + 16 * labelled - 2 - height * scale, column * column_width
            shown = image[y : y + height * scale : scale, x : x + width * scale : scale]
            np.testing.assert_array_equal(shown, frames[row, column])


def test_png_keeps_colours(tmp_path):
    """Red and blue are easily exchanged on the way through OpenCV."""
    image = random_frames(9, 7, 3)
    save_png(tmp_path / "a.png", image)
    np.testing.assert_array_equal(imageio.imread(tmp_path / "a.png"), image)


def test_reconstruction_picture_orders_original_reconstruction_error():
    """Per sequence three rows; the error is the absolute difference."""
    obs, made = random_frames(2, 5, 32, 32, 3), random_frames(2, 5, 32, 32, 3, seed=1)
    image = reconstruction_picture(obs, made, scale=1)
    step_y, step_x = 16 + 32 + 2, 32 + 2
    assert image.shape == (16 + 6 * step_y, 5 * step_x, 3)
    error = np.abs(obs.astype(int) - made).astype(np.uint8)
    for sequence in range(2):
        for row, frames in enumerate((obs, made, error)):
            y = 16 + (3 * sequence + row) * step_y + 16
            np.testing.assert_array_equal(image[y : y + 32, 3 * step_x : 3 * step_x + 32], frames[sequence, 3])


@pytest.mark.parametrize(("length", "context", "column"), [(12, 8, 8), (12, 1, 1), (40, 8, 3), (5, 5, 5)])
def test_open_loop_picture_marks_where_context_ends(length, context, column):
    """The eye must not take reconstructed context for prediction."""
    frames = np.zeros((1, length, 16, 16, 3), np.uint8)
    image = open_loop_picture(frames, frames, context, scale=1)
    marked = np.flatnonzero((image == MARK).all(axis=(0, 2)))
    assert column * 18 - 3 <= marked.min() <= marked.max() <= column * 18


@pytest.mark.parametrize(("length", "start", "column"), [(12, 9, 9), (24, 13, 9), (24, 23, 15), (12, 3, 3)])
def test_open_loop_picture_marks_where_an_episode_begins(length, start, column):
    """Frames of another episode would look like a wrong prediction. Of 24 frames 16 are shown."""
    frames, is_first = np.zeros((3, length, 16, 16, 3), np.uint8), np.zeros((3, length), bool)
    is_first[0, 0] = is_first[1, start] = True  # an episode that begins with the window breaks nothing
    image = open_loop_picture(frames, frames, 8, is_first, scale=1)
    marked = (image == BREAK).all(axis=2)
    height, rows = 16 + 16 + 2, np.flatnonzero(marked.any(axis=1)) - 16
    columns = np.flatnonzero(marked.any(axis=0))
    assert column * 18 - 3 <= columns.min() <= columns.max() <= column * 18
    assert set(rows // height) == {3, 4, 5} and set(rows % height) == set(range(16, 32))
    assert (open_loop_picture(frames, frames, 8, scale=1) != image).any(axis=2)[16 + 3 * height :][:16].any(), "said"


def test_png_are_smaller_than_by_default(tmp_path):
    """Two pictures with each checkpoint are most of a run's folder."""
    frames = np.random.default_rng(0).normal(128, 3, (2, 12, 64, 64, 3)).astype(np.uint8)
    image = reconstruction_picture(frames, frames[:, ::-1])
    save_png(tmp_path / "a.png", image)
    assert (tmp_path / "a.png").stat().st_size < 0.8 * len(cv2.imencode(".png", image)[1])


def test_pictures_say_what_they_expect():
    """Float frames or a lost axis are the usual slips."""
    frames = random_frames(1, 2, 8, 8, 3)
    with pytest.raises(ValueError, match="float32 of shape"):
        reconstruction_picture(frames.astype(np.float32), frames)
    with pytest.raises(ValueError, match="expected uint8, 5 dimensions"):
        open_loop_picture(frames[0], frames[0], 1)
    with pytest.raises(ValueError, match=r"reconstruction has shape \(1, 1, 8, 8, 3\), expected \(1, 2, 8, 8, 3\)"):
        reconstruction_picture(frames, frames[:, :1])
    with pytest.raises(ValueError, match="1 or 3 channels last"):
        save_mp4("never.mp4", random_frames(3, 8, 8, 2))


@pytest.mark.parametrize("shape", [(7, 64, 64, 3), (7, 64, 64, 1), (5, 33, 35, 3), (1, 3, 3, 1), (6, 210, 160, 3)])
def test_mp4_reads_back(tmp_path, shape):
    """Every frame is there, of an even size, with the picture in it; grey films and odd sizes too."""
    frames = np.zeros(shape, np.uint8)
    frames[:, : shape[1] // 2] = 200
    save_mp4(tmp_path / "a.mp4", frames, fps=15)
    with imageio.get_reader(tmp_path / "a.mp4") as reader:
        read = np.stack(list(reader.iter_data()))
    assert len(read) == shape[0]
    height, width = read.shape[1:3]
    assert height % 2 == 0 and width % 2 == 0 and min(height, width) >= 96
    if shape[1] > 3:
        assert abs(read[:, : height // 3].mean() - 200) < 8
        assert read[:, -height // 3 :].mean() < 8
    assert os.listdir(tmp_path) == ["a.mp4"]


@pytest.mark.parametrize("limit", [0, 2_000, 20_000])
def test_a_full_disk_is_an_error_and_leaves_no_half_video(tmp_path, limit):
    """ffmpeg fails in its own process, and most of a short film is only written when it closes."""
    frames = random_frames(30, 64, 64, 3)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old[1]))
    try:
        with pytest.raises(OSError):
            save_mp4(tmp_path / "a.mp4", frames)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert os.listdir(tmp_path) == []


def test_frames_are_enlarged_to_be_seen():
    """A 32-pixel frame of a picture is unreadable on a screen."""
    image = reconstruction_picture(random_frames(1, 2, 32, 32, 3), random_frames(1, 2, 32, 32, 3))
    assert image.shape[1] == 2 * (96 + 2)
    assert cv2.cvtColor(image, cv2.COLOR_RGB2GRAY).std() > 0


def test_grey_frames_are_compared_like_colour_ones_of_the_same_values():
    grey = np.random.default_rng(0).integers(0, 256, (2, 5, 8, 8, 1), dtype=np.uint8)
    made = grey // 2
    expected = reconstruction_picture(grey.repeat(3, axis=-1), made.repeat(3, axis=-1))
    np.testing.assert_array_equal(reconstruction_picture(grey, made), expected)


@pytest.mark.parametrize(("context_length", "shown"), [(2, 2), (9, 4)])
def test_imagination_follows_the_context_behind_a_line(context_length, shown):
    """Of a long context the end is shown: the frame before the line must be the one that imagination starts from."""
    context, imagined = random_frames(2, context_length, 96, 96, 3), random_frames(2, 5, 96, 96, 3, seed=1)
    image = imagined_picture(context, imagined)
    rows = [image[16 + row * 98 : 16 + row * 98 + 96] for row in range(2)]
    for row in range(2):
        line = shown * 98
        np.testing.assert_array_equal(rows[row][:, line - 98 : line - 3], context[row, -1][:, :95])
        np.testing.assert_array_equal(rows[row][:, line + 1 : line + 96], imagined[row, 0][:, 1:])
        assert (rows[row][:, line - 3 : line + 1] == MARK).all()
    assert image.shape[1] == (shown + 5) * 98

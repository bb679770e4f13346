"""Names and pictures that all families share."""

import numpy as np
import pytest

from envs.common import UnknownEnvironment, nearest_names, resize_image


@pytest.mark.parametrize("shape", [(64, 64, 3), (128, 96, 3), (210, 160, 3), (10, 10, 3)])
def test_a_resized_image_is_never_the_environments_own_array(shape):
    """Environments may write into the array that they returned; what was kept must not change with it."""
    image = np.zeros(shape, np.uint8)
    resized = resize_image(image, 64)
    image[:] = 9
    assert resized.shape == (64, 64, 3)
    assert (resized == 0).all()


def test_shrinking_averages_the_area():
    image = np.zeros((4, 4, 3), np.uint8)
    image[::2] = 200
    assert (resize_image(image, 2) == 100).all()


def test_nearest_names_ignore_case_and_keep_the_spelling():
    known = ["ALE/MsPacman-v5", "ALE/Pong-v5", "CartPole-v1"]
    assert nearest_names("ale/mspacman-v5", known)[0] == "ALE/MsPacman-v5"
    assert nearest_names("zzzzzz", known) == []


def test_no_hint_where_nothing_is_near():
    assert str(UnknownEnvironment("x", "no such thing", ["yyyyyy"])) == "Env_name 'x': no such thing"

"""Aggregates against values worked out by hand and against the library's own example of use."""

import numpy as np
import pytest

pytest.importorskip("rliable")

from rliable import library, metrics

from tools.aggregates import aggregates, performance_profile, probability_of_improvement, score_matrix


@pytest.fixture(autouse=True)
def few_draws(monkeypatch):
    monkeypatch.setattr("tools.aggregates.DRAWS", 400)


SCORES = np.array([[0.0, 1.0, 2.0], [0.4, 0.6, 4.0]])  # 2 seeds of 3 games: means 0.2, 0.8, 3.0


def test_values_by_hand():
    found = aggregates(SCORES)
    assert found["mean"].value == pytest.approx((0.2 + 0.8 + 3.0) / 3)
    assert found["median"].value == pytest.approx(0.8)
    # Sorted 0, 0.4, 0.6, 1, 2, 4; a quarter of six values is one and a half, of which one whole value is cut on a side.
    assert found["IQM"].value == pytest.approx((0.4 + 0.6 + 1 + 2) / 4)
    assert found["optimality gap"].value == pytest.approx((1 + 0.6 + 0.4) / 6)


def test_values_are_the_librarys():
    scores = np.random.default_rng(0).normal(0.5, 1, (5, 26))
    found = aggregates(scores)
    assert found["mean"].value == metrics.aggregate_mean(scores)
    assert found["median"].value == metrics.aggregate_median(scores)
    assert found["IQM"].value == metrics.aggregate_iqm(scores)
    assert found["optimality gap"].value == metrics.aggregate_optimality_gap(scores)


def test_intervals_are_stratified_and_repeat():
    """Seeds are drawn within games: where the seeds of a game agree nothing varies, however far games are apart."""
    same = np.tile([0.0, 5.0, 100.0], (4, 1))
    assert aggregates(same)["mean"] == pytest.approx((35.0, 35.0, 35.0))
    state = np.random.get_state()[1].copy()
    first, second = aggregates(SCORES), aggregates(SCORES)
    assert first == second
    assert np.array_equal(np.random.get_state()[1], state)
    # Each game's mean is one of its 2 values or their middle: with 3 games the extremes have chance 1/64 each.
    assert first["mean"].low == pytest.approx((0 + 0.6 + 2) / 3, abs=0.14)
    assert first["mean"].high == pytest.approx((0.4 + 1 + 4) / 3, abs=0.14)


def test_one_seed_has_no_interval():
    value, low, high = aggregates(SCORES[:1])["mean"]
    assert value == 1.0 and np.isnan(low) and np.isnan(high)


def test_profile_counts_values_above():
    profile, low, high = performance_profile(SCORES, np.array([-1.0, 0.7, 1.0, 10.0]))
    np.testing.assert_allclose(profile, [1, 3 / 6, 2 / 6, 0])
    assert (low <= profile).all() and (profile <= high).all() and high[1] > low[1]
    expected = library.score_distributions(SCORES, np.array([0.7, 1.0]))
    np.testing.assert_allclose(profile[1:3], expected)


def test_probability_of_improvement_by_hand():
    x, y = np.array([[1.0, 0.0], [3.0, 0.0]]), np.array([[2.0, 0.0], [0.0, 1.0]])
    # First game: of the pairs (1,2), (1,0), (3,2), (3,0) three are won; second: one tie and one loss, twice.
    value, low, high = probability_of_improvement(x, y)
    assert value == pytest.approx((3 / 4 + 1 / 4) / 2)
    assert 0 <= low <= value <= high <= 1
    assert probability_of_improvement(x, x).value == 0.5


def test_games_with_more_seeds_lose_the_surplus():
    np.testing.assert_array_equal(score_matrix({"a": [1, 2, 3], "b": [4, 5]}), [[1, 4], [2, 5]])

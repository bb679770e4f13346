"""Aggregates over games and seeds with intervals (Agarwal et al., 2021, arXiv 2108.13264), computed by rliable.

Scores are human-normalised: (score − random) / (human − random). Of a matrix of scores
    mean, median     over games of each game's mean over seeds
    IQM              mean of the middle half of all values, games and seeds alike
    optimality gap   mean of how much each value falls short of 1, values above 1 counted as 1
    profile(τ)       share of all values above τ
    P(X > Y)         mean over games of the chance that a run of X beats one of Y, ties counted half
Intervals: percentiles of a bootstrap that draws seeds anew within each game (stratified), games being fixed.

Letters: R runs (seeds) of each game, M games, T thresholds.
"""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np

from utils import isolated_rng

DRAWS = 2000
LEVEL = 0.95
SEED = 0
MEASURES = ("mean", "median", "IQM", "optimality gap")


class Estimate(NamedTuple):
    """A figure and its 95 % interval, NaN where there is one seed only."""

    value: float
    low: float
    high: float


def why_no_aggregates() -> str | None:
    """What is missing for this module; None if it can be used."""
    if find_spec("rliable") is None:
        return "rliable is not installed: pip install -r requirements-report.txt"
    return None


def score_matrix(scores: Mapping[str, Sequence[float]]) -> np.ndarray:
    """{game: a score for each seed} -> (R, M), R the number of seeds that every game has; surplus ones are left out."""
    runs = min(len(values) for values in scores.values())
    return np.array([list(values)[:runs] for values in scores.values()], np.float64).T


def aggregates(scores: np.ndarray) -> dict[str, Estimate]:
    """(R, M) -> an estimate of each of `MEASURES`."""
    from rliable import metrics

    def measures(matrix: np.ndarray) -> np.ndarray:
        return np.array(
            [
                metrics.aggregate_mean(matrix),
                metrics.aggregate_median(matrix),
                metrics.aggregate_iqm(matrix),
                metrics.aggregate_optimality_gap(matrix),
            ]
        )

    values, low, high = _with_interval(measures, scores)
    return {name: Estimate(*found) for name, found in zip(MEASURES, zip(values, low, high, strict=True), strict=True)}


def performance_profile(scores: np.ndarray, thresholds: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(R, M), (T,) -> share of values above each threshold and the ends of its interval, (T,) each."""
    return _with_interval(lambda matrix: (matrix[..., None] > thresholds).mean(axis=(0, 1)), scores)


def probability_of_improvement(x: np.ndarray, y: np.ndarray) -> Estimate:
    """(R, M), (R', M) of the same games -> P(X > Y)."""
    from rliable import metrics

    value, low, high = _with_interval(lambda a, b: np.array([metrics.probability_of_improvement(a, b)]), x, y)
    return Estimate(value[0], low[0], high[0])


def _with_interval(function, *scores: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The value of `function` (n,) and the ends of its interval."""
    from rliable import library

    value = function(*scores)
    if max(len(matrix) for matrix in scores) < 2:
        nothing = np.full_like(value, np.nan)
        return value, nothing, nothing
    given = scores[0] if len(scores) == 1 else scores
    with isolated_rng(SEED):  # rliable draws from numpy's global stream
        _, intervals = library.get_interval_estimates({"": given}, function, reps=DRAWS, confidence_interval_size=LEVEL)
    return value, *intervals[""]

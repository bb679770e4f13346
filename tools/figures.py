"""Figures of a report as PNG bytes: learning curves, bars by game, aggregates, performance profiles.

Letters: S seeds, P points of a curve.
"""

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from envs.my_atari import reference_scores
from tools.aggregates import MEASURES, Estimate
from tools.results import Result, grouped, how_far, setting_name
from tools.run import EPISODE_RETURN, EVALUATION_RETURN, RECENT_EPISODES, bootstrap_interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#2563a8", "#c2571a", "#3d8a4f", "#8a4fa3", "#a8324a", "#6b6b6b", "#1a8f8f", "#b08a1e")
PUBLISHED_COLOURS = {"drama_mamba2": "#9aa5b1", "dreamerv3_2025": "#c9ced4"}
POINTS = 60
CURVE_DRAWS = 1000
COLUMNS = 3
DPI = 110


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure, sizes in inches."""
    from matplotlib.figure import Figure  # half a second that only figures need

    return Figure(figsize=(width, height), layout="constrained", dpi=DPI)


def png(figure: "Figure") -> bytes:
    """The figure's file, the same bytes for the same figure."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _tidy(axes: "Axes") -> None:
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize="small")


def colours(names: Sequence[str]) -> dict[str, str]:
    """One colour for each name, in order of appearance."""
    return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(dict.fromkeys(names))}


# --------------------------------------------------------------------------------------------------------------- curves


def curve(results: Sequence[Result]) -> tuple[np.ndarray, np.ndarray] | None:
    """Return over steps of each seed: points (P,) in steps and values (S, P), each the mean of the last
    `RECENT_EPISODES` episodes then; only where every seed has data. None where no episode ended."""
    series = [result.metrics[EPISODE_RETURN] for result in results if EPISODE_RETURN in result.metrics]
    if not series:
        return None
    first, last = max(steps[0] for steps, _ in series), min(steps[-1] for steps, _ in series)
    points = np.linspace(first, max(first, last), POINTS)
    values = np.empty((len(series), POINTS))
    for row, (steps, returns) in zip(values, series, strict=True):
        sums = np.concatenate([[0.0], np.cumsum(returns)])
        ends = np.maximum(np.searchsorted(steps, points, side="right"), 1)
        starts = np.maximum(ends - RECENT_EPISODES, 0)
        row[:] = (sums[ends] - sums[starts]) / (ends - starts)
    return points, values


def learning_curves(results: Sequence[Result]) -> bytes:
    """A panel for each environment, a line for each setting; bands are 95 % bootstrap intervals over seeds."""
    groups = grouped(results)
    envs = list(dict.fromkeys(env for env, _ in groups))
    colour = colours([setting for _, setting in groups])
    columns = min(COLUMNS, len(envs))
    rows = -(-len(envs) // columns)
    figure = new_figure(max(7.0, 4.0 * columns), 3.0 * rows + 0.7)
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    labelled = {}  # one entry of the legend for each kind of line, whatever panel it is in
    for axes, env in zip(panels, envs, strict=False):
        for (group_env, setting), seeds in groups.items():
            if group_env == env:
                _draw_curve(axes, seeds, setting, colour[setting])
        _draw_references(axes, next(result.game for result in results if result.env == env))
        runs = [result for result in results if result.env == env]
        far = f"\n{how_far(runs)}" if any(run.unfinished for run in runs) else ""
        axes.set_title(env + far, fontsize="medium")
        axes.set_xlabel("environment steps", fontsize="small")
        axes.set_ylabel("return", fontsize="small")
        _tidy(axes)
        labelled |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    for axes in panels[len(envs) :]:
        axes.set_visible(False)
    figure.legend(
        labelled.values(), labelled.keys(), loc="outside lower center", ncols=3, fontsize="small", frameon=False
    )
    return png(figure)


def _draw_curve(axes: "Axes", seeds: Sequence[Result], setting: str, colour: str) -> None:
    found = curve(seeds)
    if found is not None:
        points, values = found
        axes.plot(points, values.mean(axis=0), color=colour, linewidth=1.6, label=setting_name(setting))
        if len(values) > 1:
            band = np.array([bootstrap_interval(column, draws=CURVE_DRAWS) for column in values.T])
            axes.fill_between(points, band[:, 0], band[:, 1], color=colour, alpha=0.2, linewidth=0)
        else:
            steps, returns = seeds[0].metrics[EPISODE_RETURN]
            axes.scatter(steps, returns, s=16, color=colour, alpha=0.4, linewidths=0)
    evaluations = [result.metrics[EVALUATION_RETURN] for result in seeds if EVALUATION_RETURN in result.metrics]
    for i, (steps, returns) in enumerate(evaluations):
        axes.plot(steps, returns, "D", color=colour, markersize=5, markeredgecolor="black", markeredgewidth=0.6,
                  label="evaluation during training" if i == 0 else None)  # fmt: skip


def _draw_references(axes: "Axes", game: str) -> None:
    """Random play, and the paper's score where it is known."""
    reference = reference_scores().get(game, {})
    for method, label, style in (("random", "random play", ":"), ("drama_mamba2", "paper, 100k steps", "--")):
        if method in reference:
            axes.axhline(reference[method], color="#555555", linestyle=style, linewidth=0.9, label=label)


# ----------------------------------------------------------------------------------------------------------------- bars


def game_bars(
    scores: Mapping[str, Mapping[str, float]],
    published: Sequence[str],
    names: Mapping[str, str],
    notes: Mapping[str, str],
) -> bytes:
    """Human-normalised scores by game.   scores: {setting: {game: score}}; published: reference columns, called
    `names`; notes: of games, what stands below their name."""
    games = list(dict.fromkeys(game for by_game in scores.values() for game in by_game))
    colour = colours(list(scores))
    series = [(setting_name(setting), by_game, colour[setting]) for setting, by_game in scores.items()]
    reference = reference_scores()
    for column in published:
        by_game = {game: _normalised(reference[game], column) for game in games if column in reference[game]}
        series += [(names[column], by_game, PUBLISHED_COLOURS[column])] if by_game else []
    figure = new_figure(8.0, max(2.0, 0.6 + len(games) * 0.2 * (len(series) + 1)))
    axes = figure.subplots()
    height = 0.8 / len(series)
    for i, (label, by_game, shade) in enumerate(series):
        places = [games.index(game) + (i - (len(series) - 1) / 2) * height for game in by_game]
        bars = axes.barh(places, list(by_game.values()), height * 0.92, color=shade, label=label)
        axes.bar_label(bars, [f"{value:.2f}" for value in by_game.values()], fontsize="x-small", padding=2)
    axes.axvline(0, color="#555555", linewidth=0.8)
    axes.axvline(1, color="#555555", linewidth=0.8, linestyle="--")
    axes.set_yticks(range(len(games)), [f"{game}\n{notes[game]}" if game in notes else game for game in games])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("human-normalised score (0 random play, 1 a human tester)", fontsize="small")
    _tidy(axes)
    axes.legend(fontsize="small", loc="best")
    return png(figure)


def _normalised(reference: Mapping[str, float], column: str) -> float:
    return (reference[column] - reference["random"]) / (reference["human"] - reference["random"])


# ----------------------------------------------------------------------------------------------------------- aggregates


def aggregate_intervals(estimates: Mapping[str, Mapping[str, Estimate]]) -> bytes:
    """A panel for each aggregate, a row for each setting.   estimates: {setting: {measure: estimate}}."""
    colour = colours(list(estimates))
    figure = new_figure(11.0, 1.0 + 0.4 * len(estimates))
    for axes, measure in zip(figure.subplots(1, len(MEASURES), sharey=True), MEASURES, strict=True):
        for i, (setting, found) in enumerate(estimates.items()):
            value, low, high = found[measure]
            if np.isfinite(low):
                axes.barh(i, high - low, 0.6, left=low, color=colour[setting], alpha=0.45)
            axes.plot([value, value], [i - 0.3, i + 0.3], color=colour[setting], linewidth=2.5)
        axes.set_title(measure, fontsize="medium")
        axes.set_yticks(range(len(estimates)), [setting_name(setting) for setting in estimates])
        axes.set_ylim(len(estimates) - 0.5, -0.5)
        axes.margins(x=0.2)
        _tidy(axes)
    figure.supxlabel("human-normalised score", fontsize="small")
    return png(figure)


def performance_profiles(profiles: Mapping[str, Any], thresholds: np.ndarray) -> bytes:
    """Share of runs above each score.   profiles: {setting: (profile, low, high)}, (P,) each."""
    colour = colours(list(profiles))
    figure = new_figure(7.0, 3.6)
    axes = figure.subplots()
    for setting, (profile, low, high) in profiles.items():
        axes.step(thresholds, profile, where="post", color=colour[setting], linewidth=1.6, label=setting_name(setting))
        if np.isfinite(low).all():
            axes.fill_between(thresholds, low, high, step="post", color=colour[setting], alpha=0.2, linewidth=0)
    axes.set_xlabel("human-normalised score τ", fontsize="small")
    axes.set_ylabel("share of runs above τ", fontsize="small")
    axes.set_ylim(-0.02, 1.02)
    _tidy(axes)
    axes.legend(fontsize="small")
    return png(figure)

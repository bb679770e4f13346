"""Report of runs: one HTML page with everything in it, a Markdown table with figures, the README's results section.

    python eval.py --report PATH... [--out FOLDER] [--title TEXT] [--readme FILE]...

PATH: a run's folder, a sweep's, a stored result, or a folder of such. The page refers to nothing outside of itself.
"""

import argparse
import base64
import html
import itertools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from envs.my_atari import game_of, human_normalised_score, reference_scores
from tools import figures
from tools.aggregates import (
    MEASURES,
    Estimate,
    aggregates,
    performance_profile,
    probability_of_improvement,
    score_matrix,
    why_no_aggregates,
)
from tools.checkpoints import write_atomic
from tools.pictures import small_webp
from tools.results import (
    CARD,
    DEFAULT_SETTING,
    Result,
    ResultError,
    Score,
    collect,
    grouped,
    how_far,
    machine,
    setting_name,
    write_card,
)
from tools.run import RECENT_EPISODES, bootstrap_interval, duration

# Columns of config_files/atari_scores.csv beside ours, and what they are called; that file names each one's source.
PUBLISHED = {
    "random": "random",
    "human": "human",
    "drama_mamba2": "Drama (paper)",
    "dreamerv3_2025": "DreamerV3",
    "storm": "STORM",
}
METHODS = [column for column in PUBLISHED if column not in ("random", "human")]
BARS = ("drama_mamba2", "dreamerv3_2025")
BEGIN, END = "<!-- results: made by eval.py, do not edit -->", "<!-- end of results -->"
LONG_CELL = 36  # characters
NAMED_RUNS = 6  # that are not finished; more are counted
PICTURED_RUNS = 6  # whose sample pictures go into the page
SAMPLE_BYTES = 2_400_000  # of all sample pictures together, before base64 makes them a third larger
THRESHOLDS = np.linspace(0, 2, 81)  # of the performance profile


# --------------------------------------------------------------------------------------------------------------- tables


@dataclass(frozen=True)
class Table:
    """Cells are text; `note` stands below."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def markdown(self) -> str:
        lines = ["| " + " | ".join(row) + " |" for row in (self.columns, ["---"] * len(self.columns), *self.rows)]
        return "\n".join(lines) + (f"\n\n{self.note}" if self.note else "")

    def html(self) -> str:
        head = "".join(f"<th>{_text(column)}</th>" for column in self.columns)
        body = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in self.rows)
        note = f"<p class=note>{_text(self.note)}</p>" if self.note else ""
        return f"<div class=wide><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{note}"


def _cell(text: str) -> str:
    """A cell of an HTML table, which may be broken into lines if it is long."""
    return f"<td{' class=long' if len(text) > LONG_CELL else ''}>{_text(text)}</td>"


def score_table(results: Sequence[Result]) -> Table:
    """A row for each environment and setting: our score, then the published ones."""
    groups = grouped(results)
    several = len({setting for _, setting in groups}) > 1
    reference = reference_scores()
    published = list(PUBLISHED) if any(game_of(env) in reference for env, _ in groups) else []
    rows = []
    for (env, setting), seeds in groups.items():
        row = [game_of(env), *([setting] if several else []), *_our_cells(seeds)]
        row += [_number(reference.get(game_of(env), {}).get(column)) for column in published]
        rows.append(row)
    columns = ["environment", *(["setting"] if several else []), "steps", "seeds", "score", "episodes"]
    columns += ["human-normalised", *(PUBLISHED[column] for column in published)]
    note = (
        "Score: mean over seeds of each seed's mean return, with a 95 % bootstrap interval over seeds; of one seed the "
        "interval is over its episodes. `eval`: episodes of the last checkpoint; `train`: the last training episodes, "
        "for a run that was not evaluated."
    )
    if published:
        note += " Published scores are of 100,000 steps (sources: config_files/atari_scores.csv)."
    return Table("Scores", columns, rows, note)


def _our_cells(seeds: Sequence[Result]) -> list[str]:
    """Steps, number of seeds, score with interval, what was averaged, human-normalised score."""
    shown_steps = how_far(seeds).removesuffix(" steps")
    scored = [(result, score) for result in seeds if (score := result.score()) is not None]
    scores = [score for _, score in scored]
    if not scores:
        return [shown_steps, _how_many(seeds), "no episode ended", "0", "-"]
    means = [score.mean for score in scores]
    low, high = bootstrap_interval(means) if len(means) > 1 else scores[0].interval
    kinds = sorted({_episodes(score) for score in scores})
    normalised = human_normalised_score(seeds[0].env, float(np.mean(means)))
    return [
        shown_steps,
        _how_many([result for result, _ in scored]),
        _with_interval(float(np.mean(means)), low, high),
        " / ".join(kinds),
        "-" if normalised is None else f"{normalised:.3f}",
    ]


def _how_many(runs: Sequence[Result]) -> str:
    """Seeds, and how many runs where one of them was run again."""
    seeds = len({result.seed for result in runs})
    return str(seeds) if seeds == len(runs) else f"{seeds} ({len(runs)} runs)"


def _with_interval(value: float, low: float, high: float) -> str:
    digits = 2 if abs(value) < 100 else 1 if abs(value) < 1000 else 0
    return f"{value:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


def _episodes(score: Score) -> str:
    return f"{score.episodes} {'eval' if score.evaluated else 'train'}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}".removesuffix(".0")


def seed_table(results: Sequence[Result]) -> Table:
    """A row for each run."""
    rows = []
    for result in results:
        score, normalised = result.score(), result.normalised()
        origin = {**(result.evaluation or {}), **result.origin}
        rows.append(
            [
                result.game,
                result.setting,
                str(result.seed),
                how_far([result]).removesuffix(" steps"),
                "-" if score is None else f"{score.mean:.2f} ({_episodes(score)})",
                "-" if normalised is None else f"{normalised:.3f}",
                "-" if result.wall_seconds() is None else duration(result.wall_seconds()),
                machine(origin.get("hardware", {})),
                (origin.get("commit") or "-")[:10],
            ]
        )
    columns = ["environment", "setting", "seed", "steps", "score", "human-normalised"]
    columns += ["wall time", "machine", "commit"]
    return Table("Runs", columns, rows, "Wall time is that of the training, pictures and checkpoints included.")


def config_table(results: Sequence[Result]) -> Table:
    """What describes the method in a few words, for each environment and setting that has another configuration."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for result in results:
        training, world_model = result.config.JointTrainAgent, result.config.Models.WorldModel
        batch = f"{training.BatchSize} × {training.BatchLength}"
        imagined = f"{training.ImagineBatchSize} × {training.ImagineBatchLength}"
        every = f"{training.TrainDynamicsEverySteps} / {training.TrainAgentEverySteps}"
        row = (world_model.Backbone, result.config.Models.Agent.Policy, batch, imagined, every, result.differences)
        games = rows.setdefault((result.setting, *row), [])
        games += [result.game] if result.game not in games else []
    numbered = any(result.setting != result.differences for result in results)
    shown = [[setting, ", ".join(games), *(row if numbered else row[:-1])] for (setting, *row), games in rows.items()]
    columns = ["setting", "environments", "backbone", "policy", "batch", "imagined", "steps per update"]
    note = "Batch and imagined: sequences × steps. Steps per update: environment steps, of world model / policy."
    return Table("Settings", columns + ["what differs"] * numbered, shown, note)


# ----------------------------------------------------------------------------------------------------------- aggregates


@dataclass(frozen=True)
class Benchmark:
    """Human-normalised scores of the Atari100k games among the results.   scores: {setting: {game: one a seed}}."""

    scores: Mapping[str, Mapping[str, Sequence[float]]]

    @classmethod
    def of(cls, results: Sequence[Result]) -> "Benchmark":
        scores: dict[str, dict[str, list[float]]] = {}
        for result in results:
            value = result.normalised()
            if value is not None:
                scores.setdefault(result.setting, {}).setdefault(result.game, []).append(value)
        games = dict.fromkeys(game for by_game in scores.values() for game in by_game)  # in one order for all settings
        return cls({name: {game: found[game] for game in games if game in found} for name, found in scores.items()})

    def games(self) -> list[str]:
        return list(dict.fromkeys(game for by_game in self.scores.values() for game in by_game))

    def matrices(self) -> dict[str, np.ndarray]:
        """{setting: (seeds, games)}."""
        return {setting: score_matrix(by_game) for setting, by_game in self.scores.items()}

    def means(self) -> dict[str, dict[str, float]]:
        return {
            setting: {game: float(np.mean(values)) for game, values in by_game.items()}
            for setting, by_game in self.scores.items()
        }

    def comparable(self) -> list[tuple[str, str]]:
        """Pairs of settings that were run on the same games, each pair once."""
        pairs = itertools.combinations(self.scores, 2)
        return [(a, b) for a, b in pairs if list(self.scores[a]) == list(self.scores[b])]


def aggregate_table(benchmark: Benchmark, estimates: Mapping[str, Mapping[str, Estimate]]) -> Table:
    """Aggregates of each setting, then mean and median of published methods over the same games."""
    rows = []
    for setting, found in estimates.items():
        runs, games = benchmark.matrices()[setting].shape
        name = setting_name(setting)
        name += " (this repository)" if setting != DEFAULT_SETTING else ""
        rows.append([name, str(games), str(runs), *(_estimate(found[m]) for m in MEASURES)])
    reference = reference_scores()
    games = benchmark.games()
    for column in METHODS:
        known = [game for game in games if column in reference[game]]
        if known:
            values = [human_normalised_score(game, reference[game][column]) for game in known]
            mean, median = f"{np.mean(values):.3f}", f"{np.median(values):.3f}"
            rows.append([PUBLISHED[column], f"{len(known)}", "-", mean, median, "-", "-"])
    note = (
        "Over these games only, human-normalised; 95 % stratified bootstrap intervals over seeds, none for one seed. "
        "Seeds: those that every game has. Published methods: from their mean scores, so IQM and optimality gap, which "
        "need each seed's, are not known; a row covers the games whose score was read."
    )
    return Table("Aggregates", ["method", "games", "seeds", *MEASURES], rows, note)


def _estimate(estimate: Estimate) -> str:
    interval = f" ({estimate.low:.3f} to {estimate.high:.3f})" if np.isfinite(estimate.low) else ""
    return f"{estimate.value:.3f}{interval}"


def improvement_table(benchmark: Benchmark) -> Table:
    """P(X > Y) of every pair of settings, and of each setting against published means."""
    matrices, reference = benchmark.matrices(), reference_scores()
    rows = [
        [x, y, str(matrices[x].shape[1]), _estimate(probability_of_improvement(matrices[x], matrices[y]))]
        for x, y in benchmark.comparable()
    ]
    for setting, by_game in benchmark.scores.items():
        for column in METHODS:
            known = [game for game in by_game if column in reference[game]]
            if known:
                ours = score_matrix({game: by_game[game] for game in known})
                theirs = np.array([[human_normalised_score(game, reference[game][column]) for game in known]])
                found = _estimate(probability_of_improvement(ours, theirs))
                rows.append([setting_name(setting), f"{PUBLISHED[column]}, mean", str(len(known)), found])
    note = "Chance that a run of X beats one of Y, mean over games. Of a published method only its mean is known."
    return Table("Probability of improvement", ["X", "Y", "games", "P(X > Y)"], rows, note)


# --------------------------------------------------------------------------------------------------------------- report


@dataclass(frozen=True)
class Picture:
    caption: str
    data: bytes
    file: str | None = None  # its name in the report's folder; None: it stands in the page alone
    kind: str = "png"


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it, in this order."""

    title: str
    text: str = ""
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture] = ()


def build_sections(results: Sequence[Result]) -> list[Section]:
    """The whole report, figures drawn."""
    curves = Picture("Return of training episodes", figures.learning_curves(results), "figures/learning_curves.png")
    sections = [
        Section("Scores", _honesty(results), [score_table(results)]),
        Section("Learning curves", _CURVES, [], [curves]),
        *_benchmark_sections(results),
        Section("Settings and runs", "", [config_table(results), seed_table(results)]),
    ]
    samples = _sample_pictures(results)
    return [*sections, Section("What the models see", _SAMPLES, [], samples)] if samples else sections


_CURVES = (
    f"Mean over seeds of the mean return of the last {RECENT_EPISODES} training episodes; bands are 95 % bootstrap "
    "intervals over seeds, dots the episodes of a single seed."
)
_SAMPLES = (
    "Reconstructions: frames, what the decoder made of them, the difference. Open-loop predictions: after the line the "
    "model gets the actions that were taken, and no frames; where another episode begins, which it can't foresee, a "
    "blue line says so. Imagined rollouts: after the line the policy plays inside the model alone. Shrunk to fit a "
    "page; the originals are in the folders of the runs."
)


_BARS_CAPTION = "Human-normalised scores; published ones are of 100,000 steps"


def _honesty(results: Sequence[Result]) -> str:
    """What a reader has to know before believing a score."""
    seeds = {len({result.seed for result in group}) for group in grouped(results).values()}
    least, most = min(seeds), max(seeds)
    number = f"{least}" if least == most else f"{least} to {most}"
    sentences = [f"{len(results)} run{'s' if len(results) > 1 else ''}, {number} seed{'s' if most > 1 else ''} each."]
    if unfinished := _unfinished(results):
        sentences.append(unfinished)
    short = sum(result.game in reference_scores() and result.steps < 100_000 for result in results)
    if short:
        sentences.append(
            f"{short} of {len(results)} played an Atari game for less than the 100,000 steps of published scores: a "
            "sample of what training does, not comparable with them."
        )
    early = [result.name for result in results if result.evaluated_at < result.steps]
    if early:
        sentences.append(f"Evaluated before their last step: {'; '.join(early)}.")
    unscored = sum((score := result.score()) is not None and not score.evaluated for result in results)
    if unscored:
        sentences.append(f"{unscored} of {len(results)} not evaluated: the score is of the last training episodes.")
    return " ".join(sentences)


def _unfinished(results: Sequence[Result]) -> str:
    """A sentence that names the runs that were not finished; empty where all were."""
    runs = [result for result in results if result.unfinished]
    if len(runs) > NAMED_RUNS:
        return f"Not finished: {len(runs)} of {len(results)} runs."
    return f"Not finished: {'; '.join(result.name for result in runs)}." if runs else ""


def _benchmark_sections(results: Sequence[Result]) -> list[Section]:
    """Bars, aggregates and profiles of the games that have reference scores."""
    benchmark = Benchmark.of(results)
    if not benchmark.scores:
        return []
    by_game = {game: [result for result in results if result.game == game] for game in benchmark.games()}
    far = {game: how_far(runs) for game, runs in by_game.items() if any(run.unfinished for run in runs)}
    bars = figures.game_bars(benchmark.means(), BARS, PUBLISHED, far)
    sections = [Section("By game", "", [], [Picture(_BARS_CAPTION, bars, "figures/games.png")])]
    if len(benchmark.games()) < 2:
        return sections
    obstacle = why_no_aggregates()
    if obstacle is not None:
        return [*sections, Section("Aggregates", f"Not computed: {obstacle}.")]
    matrices = benchmark.matrices()
    estimates = {setting: aggregates(matrix) for setting, matrix in matrices.items()}
    profiles = {setting: performance_profile(matrix, THRESHOLDS) for setting, matrix in matrices.items()}
    drawn = [
        Picture("Performance profiles", figures.performance_profiles(profiles, THRESHOLDS), "figures/profiles.png")
    ]
    if any(np.isfinite(estimate.low) for found in estimates.values() for estimate in found.values()):
        drawn.insert(0, Picture("Aggregates", figures.aggregate_intervals(estimates), "figures/aggregates.png"))
    tables = [aggregate_table(benchmark, estimates), improvement_table(benchmark)]
    unfinished = _unfinished([result for runs in by_game.values() for result in runs])
    text = f"{len(benchmark.games())} of the benchmark's {len(reference_scores())} games. {unfinished}".rstrip()
    return [*sections, Section("Aggregates", text, tables, drawn)]


def _sample_pictures(results: Sequence[Result]) -> list[Picture]:
    """Pictures of the first seed of each environment and setting, small enough to send the page by mail."""
    shown = [seeds[0] for seeds in grouped(results).values()][:PICTURED_RUNS]
    found = [(result, caption, path) for result in shown for caption, path in result.pictures().items()]
    several = len({result.setting for result in results}) > 1
    pictures = []
    for result, caption, path in found:
        where = ", ".join([result.name, *([result.setting] if several else [])]) + f": {caption.lower()}"
        try:
            data = small_webp(path.read_bytes(), SAMPLE_BYTES // len(found))
        except ValueError as error:
            raise ResultError(f"{path}: {error}") from None
        pictures.append(Picture(where, data, kind="webp"))
    return pictures


# --------------------------------------------------------------------------------------------------------------- output


def _text(text: str) -> str:
    """Escaped, with `code` marked up."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))


def html_page(title: str, sections: Sequence[Section]) -> str:
    """One page that needs nothing else: style and pictures are in it."""
    places = {section.title: f"section-{i}" for i, section in enumerate(sections, start=1)}
    links = "".join(f'<a href="#{place}">{_text(title)}</a> ' for title, place in places.items())
    parts = [f"<nav>{links}</nav>"]
    for section in sections:
        parts.append(f'<h2 id="{places[section.title]}">{_text(section.title)}</h2>')
        parts += [f"<p>{_text(section.text)}</p>"] if section.text else []
        for table in section.tables:
            parts += [f"<h3>{_text(table.title)}</h3>"] if len(section.tables) > 1 else []
            parts.append(table.html())
        for picture in section.pictures:
            data = base64.b64encode(picture.data).decode()
            caption = _text(picture.caption)
            image = f'<img alt="{caption}" src="data:image/{picture.kind};base64,{data}">'
            parts.append(f"<figure><figcaption>{caption}</figcaption><div class=wide>{image}</div></figure>")
    return _PAGE.format(title=_text(title), body="\n".join(parts))


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; color: #1c2530; background: #fff;
  max-width: 1180px; margin: 2rem auto; padding: 0 1.2rem; }}
h1 {{ font-size: 1.6rem; }}
h2 {{ font-size: 1.2rem; margin-top: 2.4rem; border-bottom: 1px solid #d8dee6; padding-bottom: .3rem; }}
h3 {{ font-size: 1rem; margin-bottom: .3rem; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .82rem; }}
th, td {{ padding: .28rem .6rem; border-bottom: 1px solid #e3e8ee; text-align: right; }}
td {{ white-space: nowrap; }}
td.long {{ white-space: normal; min-width: 14rem; }}
th {{ background: #f4f6f9; vertical-align: bottom; }}
th:first-child, td:first-child {{ text-align: left; }}
tbody tr:hover {{ background: #f8fafc; }}
.note, figcaption {{ color: #5a6675; font-size: .85rem; }}
nav a {{ margin-right: 1rem; white-space: nowrap; color: #2563a8; }}
figure {{ margin: 1.2rem 0; }}
img {{ max-width: 100%; height: auto; }}
code {{ background: #f1f3f6; padding: 0 .25em; border-radius: 3px; }}
@media (max-width: 700px) {{
  body {{ margin: 1rem auto; padding: 0 .8rem; }}
  figure img {{ max-width: none; width: 760px; }}
}}
</style>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""


def markdown_page(title: str, sections: Sequence[Section]) -> str:
    """The same in Markdown, with pictures in files beside it; sample pictures stay in the HTML page."""
    parts = [f"# {title}"]
    for section in sections:
        shown = [picture for picture in section.pictures if picture.file is not None]
        if section.pictures and not shown:  # samples
            continue
        parts.append(f"## {section.title}")
        parts += [section.text] if section.text else []
        for table in section.tables:
            parts += [f"### {table.title}"] if len(section.tables) > 1 else []
            parts.append(table.markdown())
        parts += [f"![{picture.caption}]({picture.file})" for picture in shown]
    return "\n\n".join(parts) + "\n"


def write_report(results: Sequence[Result], out: Path, title: str) -> None:
    """report.html, report.md and figures/ in `out`."""
    sections = build_sections(results)
    (out / "figures").mkdir(parents=True, exist_ok=True)
    for section in sections:
        for picture in section.pictures:
            if picture.file is not None:
                write_atomic(out / picture.file, picture.data)
    write_atomic(out / "report.html", html_page(title, sections).encode())
    write_atomic(out / "report.md", markdown_page(title, sections).encode())


def readme_section(results: Sequence[Result], out: Path, readme: Path) -> str:
    """What stands between the markers of a README: the score table and where the rest is."""
    table = score_table(results)

    def link(path: Path) -> str:
        return Path(os.path.relpath(path, readme.parent)).as_posix()

    cards = [result for result in results if (result.folder / CARD).is_file()]
    listed = ", ".join(f"[{result.name}]({link(result.folder / CARD)})" for result in cards)
    parts = [_honesty(results), table.markdown()]
    parts.append(f"Curves and figures: [report.md]({link(out / 'report.md')}), and `report.html` beside it.")
    parts += [f"Model cards: {listed}."] if cards else []
    return "\n\n".join(parts)


def update_readme(readme: Path, section: str) -> None:
    """Put `section` between the markers."""
    text = readme.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ResultError(f"{readme}: expected one line `{BEGIN}` and after it one `{END}`")
    before, after = text[: text.index(BEGIN)], text[text.index(END) :]
    write_atomic(readme, f"{before}{BEGIN}\n\n{section}\n\n{after}".encode())


# --------------------------------------------------------------------------------------------------------- command line


def report_command(words: Sequence[str], say: Callable[[str], Any] = print) -> None:
    """`eval.py --report ...`."""
    parser = argparse.ArgumentParser("eval.py --report", description="A page, a table and figures of runs and sweeps.")
    parser.add_argument("paths", nargs="+", type=Path, help="folders of runs, of sweeps, or that hold such")
    parser.add_argument("--out", type=Path, default=None, help="where to (default: `report` in the first path)")
    parser.add_argument("--title", default="Drama: results")
    parser.add_argument("--readme", type=Path, action="append", default=[], help="a file with a results section")
    options = parser.parse_args(words)
    results = collect(options.paths)
    out = options.out or options.paths[0] / "report"
    write_report(results, out, options.title)
    for readme in options.readme:
        for result in results:
            write_card(result.folder)
        update_readme(readme, readme_section(results, out, readme))
    say(f"{len(results)} run(s): {out / 'report.html'}, {out / 'report.md'}")

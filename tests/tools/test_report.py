"""Reports: one page without outside references, tables that say what was measured, README sections in step."""

import re
from html.parser import HTMLParser
from pathlib import Path

import cv2
import numpy as np
import pytest

from tests.tools.made_results import make_result
from tools import figures, report
from tools.report import (
    BEGIN,
    END,
    build_sections,
    config_table,
    html_page,
    markdown_page,
    readme_section,
    report_command,
    score_table,
    update_readme,
)
from tools.results import ResultError, card, collect

ROOT = Path(__file__).resolve().parents[2]


class References(HTMLParser):
    """Every address in a page that a browser could fetch, and the tags that could run something."""

    def __init__(self):
        super().__init__()
        self.found, self.tags = [], set()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.found += [value for name, value in attrs if name in ("src", "href", "srcset", "data", "action", "poster")]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Two games, two settings, two seeds, and a toy task with a single run that was not evaluated."""
    folder = tmp_path_factory.mktemp("results")
    goals = {"Pong": 10.0, "Boxing": 60.0}
    for game, goal in goals.items():
        for seed in (0, 1):
            for tau, lift in ((10, 0.0), (5, 1.0)):
                name = f"{game}_{seed}_{tau}"
                scores = [goal + lift + seed, goal + lift - seed]
                returns = np.linspace(0, goal, 30).tolist()
                make_result(folder / name, f"ALE/{game}-v5", seed, returns, scores, JointTrainAgent__Tau=tau)
    make_result(folder / "Toy", "Toy/Catch-v0", 0, [0.5, 1.0])
    return collect([folder])


@pytest.fixture(scope="module")
def sections(results):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tools.aggregates.DRAWS", 50)
        patch.setattr(figures, "CURVE_DRAWS", 50)
        return build_sections(results)


def test_the_page_needs_nothing_else(sections):
    page = html_page("A <title> & more", sections)
    references = References()
    references.feed(page)
    links = {value for value in references.found if value.startswith("#")}
    assert links == {f"#{place}" for place in re.findall(r'<h2 id="([^"]+)"', page)} and len(links) == len(sections)
    kinds = {value[: value.index(",")] for value in references.found if value not in links}
    assert kinds == {"data:image/png;base64", "data:image/webp;base64"}
    assert not references.tags & {"script", "link", "iframe", "object", "embed"}
    assert "url(" not in page and "@import" not in page and "http" not in re.sub(r'base64,[^"]+', "", page)
    assert "A &lt;title&gt; &amp; more" in page
    for title in ("Scores", "Learning curves", "By game", "Aggregates", "What the models see", "Settings and runs"):
        assert f">{title}</h2>" in page


def test_a_page_of_four_runs_can_be_sent_by_mail(tmp_path):
    """Pictures of noise, as an untrained model's are, compress worst."""
    rng = np.random.default_rng(0)
    kinds = ("pictures/reconstruction_9.png", "pictures/open_loop_9.png", "eval/step_000001000/imagined.png")
    cv2.imwrite(str(tmp_path / "noise.png"), rng.integers(0, 256, (360, 400, 3), dtype=np.uint8))
    noise = (tmp_path / "noise.png").read_bytes()
    assert len(noise) * 12 > 5_000_000
    for number, game in enumerate(("Pong", "Boxing", "Breakout", "Alien")):
        folder = make_result(tmp_path / str(number), f"ALE/{game}-v5", returns=[1.0, 2.0], evaluation=[3.0])
        for kind in kinds:
            (folder / kind).write_bytes(noise)
    sections = build_sections(collect([tmp_path]))
    assert len(html_page("Title", sections)) < 5_000_000
    pictures = next(section.pictures for section in sections if section.title == "What the models see")
    assert len(pictures) == 12
    shown = cv2.imdecode(np.frombuffer(pictures[0].data, np.uint8), cv2.IMREAD_COLOR)
    assert shown.shape[1] > 300 and shown.std() > 10, "still to be looked at"


def test_a_damaged_picture_is_named(tmp_path):
    folder = make_result(tmp_path / "run")
    for data in (b"", b"no picture"):
        (folder / "pictures" / "open_loop_000002000.png").write_bytes(data)
        with pytest.raises(ResultError, match=r"open_loop_000002000\.png: not a picture"):
            build_sections(collect([tmp_path]))


def test_scores_stand_beside_the_published_ones(results):
    table = score_table(results)
    rows = {(row[0], row[1]): dict(zip(table.columns, row, strict=True)) for row in table.rows}
    pong = rows["Pong", "Tau 5.0"]
    assert pong["score"].startswith("11.00 (") and pong["seeds"] == "2" and pong["episodes"] == "2 eval"
    assert pong["human-normalised"] == f"{(11 + 20.7) / 35.3:.3f}" and pong["random"] == "-20.7"
    assert pong["Drama (paper)"] == "-" and rows["Boxing", "Tau 10.0"]["Drama (paper)"] == "78"
    toy = rows["Toy/Catch-v0", "Tau 10.0"]
    assert toy["score"] == "0.75 (0.50 to 1.00)" and toy["episodes"] == "2 train" and toy["human-normalised"] == "-"


def test_what_a_reader_must_know_comes_first(sections):
    text = sections[0].text
    assert text.startswith("9 runs, 1 to 2 seeds each. Not finished: 9 of 9 runs. 8 of 9 played an Atari game for less")
    assert "1 of 9 not evaluated" in text


def test_a_run_that_is_not_finished_is_marked_wherever_its_score_stands(tmp_path):
    """A score beside published ones would be taken for one of as many steps."""
    pytest.importorskip("rliable")
    make_result(tmp_path / "a", "ALE/Boxing-v5", 3, [1.0], [50.0], JointTrainAgent__SampleMaxSteps=100_000)
    make_result(tmp_path / "b", "ALE/Pong-v5", 3, [1.0], [10.0], JointTrainAgent__SampleMaxSteps=1000)
    results = collect([tmp_path])
    sections = {section.title: section for section in build_sections(results)}
    assert [row[1] for row in sections["Scores"].tables[0].rows] == ["1,000 of 100,000", "1,000"]
    mark = "Boxing, seed 3 (1,000 of 100,000 steps)"
    for text in (sections["Scores"].text, sections["Aggregates"].text):
        assert f"Not finished: {mark}." in text and "Pong" not in text
    captions = [picture.caption for picture in sections["What the models see"].pictures]
    assert all(caption.startswith((mark, "Pong, seed 3: ")) for caption in captions)
    (tmp_path / "a" / "CARD.md").touch()
    assert f"[{mark}]" in readme_section(results, tmp_path / "report", tmp_path / "README.md")


def test_a_score_of_an_earlier_step_is_said_to_be_one(tmp_path):
    folder = make_result(tmp_path / "run", "ALE/Boxing-v5", 3, [1.0], [50.0], JointTrainAgent__SampleMaxSteps=2000)
    (folder / "ckpt" / "step_000002000").mkdir(parents=True)
    results = collect([tmp_path])
    assert "Evaluated before their last step: Boxing, seed 3." in build_sections(results)[0].text
    assert "over 1 episodes of the checkpoint at step 1,000" in card(results[0])


def test_one_seed_has_no_picture_of_intervals(tmp_path):
    pytest.importorskip("rliable")
    for game in ("Pong", "Boxing"):
        make_result(tmp_path / game, f"ALE/{game}-v5", 0, [1.0], [10.0])
    sections = {section.title: section for section in build_sections(collect([tmp_path]))}
    assert [picture.caption for picture in sections["Aggregates"].pictures] == ["Performance profiles"]


def test_aggregates_are_of_the_games_alone(sections):
    pytest.importorskip("rliable")
    section = next(section for section in sections if section.title == "Aggregates")
    table, improvement = section.tables
    ours = next(row for row in table.rows if row[0].startswith("Tau 5.0"))
    expected = np.mean([(11 + 20.7) / 35.3, (61 - 0.1) / 12])
    assert ours[1:3] == ["2", "2"] and ours[3].startswith(f"{expected:.3f}")
    paper = next(row for row in table.rows if row[0] == "Drama (paper)")
    assert paper[1] == "1" and paper[3] == f"{(78 - 0.1) / 12:.3f}" and paper[-1] == "-"
    first, *published = improvement.rows
    assert first[:3] == ["Tau 10.0", "Tau 5.0", "2"]  # means 60, 60 against 61, 61 and 10, 10 against 11, 11
    assert first[3].startswith("0.000 (")
    boxing = next(row for row in published if row[:2] == ["Tau 5.0", "Drama (paper), mean"])
    assert boxing[2:] == ["1", "0.000 (0.000 to 0.000)"]  # 61 against 78, the one game whose score is known


def test_settings_on_the_same_games_are_compared_in_whatever_order_they_were_found(tmp_path):
    for number, (game, tau) in enumerate([("Pong", 10), ("Boxing", 10), ("Boxing", 3), ("Pong", 3)]):
        make_result(tmp_path / str(number), f"ALE/{game}-v5", returns=[float(number)], JointTrainAgent__Tau=tau)
    benchmark = report.Benchmark.of(collect([tmp_path]))
    assert benchmark.comparable() == [("Tau 10.0", "Tau 3.0")]
    assert all(list(by_game) == ["Pong", "Boxing"] for by_game in benchmark.scores.values())


def test_without_the_library_the_rest_is_there(results, monkeypatch):
    monkeypatch.setattr(report, "why_no_aggregates", lambda: "rliable is not installed")
    monkeypatch.setattr(figures, "learning_curves", lambda _: b"")
    page = markdown_page("Title", build_sections(results))
    assert "Not computed: rliable is not installed." in page and "| Pong |" in page


def test_a_single_toy_run_makes_a_report(tmp_path):
    make_result(tmp_path / "run", "Toy/Catch-v0", returns=[])
    report_command([str(tmp_path / "run")], say=lambda _: None)
    text = (tmp_path / "run" / "report" / "report.md").read_text()
    assert "no episode ended" in text and "Aggregates" not in text
    assert (tmp_path / "run" / "report" / "figures" / "learning_curves.png").read_bytes().startswith(b"\x89PNG")


def test_curves_are_means_of_the_last_episodes(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "RECENT_EPISODES", 2)
    monkeypatch.setattr(figures, "POINTS", 3)
    make_result(tmp_path / "1", seed=0, returns=[0.0, 2.0, 4.0])
    make_result(tmp_path / "2", seed=1, returns=[1.0, 1.0, 1.0])
    points, values = figures.curve(collect([tmp_path]))
    np.testing.assert_array_equal(points, [1000, 2000, 3000])
    np.testing.assert_array_equal(values, [[0, 1, 3], [1, 1, 1]])


def test_settings_with_several_configurations_have_several_rows(results):
    rows = config_table(results).rows
    assert [row[:2] for row in rows] == [["Tau 10.0", "Boxing, Pong, Toy/Catch-v0"], ["Tau 5.0", "Boxing, Pong"]]


def test_the_readme_section_is_put_between_the_markers(tmp_path, results):
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    update_readme(readme, "new")
    assert readme.read_text() == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"
    update_readme(readme, "new")
    assert readme.read_text() == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"
    readme.write_text(f"{END}{BEGIN}")
    with pytest.raises(ResultError, match="expected one line"):
        update_readme(readme, "new")


@pytest.mark.parametrize("readme", ["README.md", "results/README.md"])
def test_the_readme_is_in_step_with_the_results(readme):
    """`python eval.py --report results --readme README.md --readme results/README.md` was forgotten otherwise."""
    path = ROOT / readme
    section = readme_section(collect([ROOT / "results"]), ROOT / "results" / "report", path)
    assert f"{BEGIN}\n\n{section}\n\n{END}" in path.read_text()


def test_every_stored_result_has_its_card():
    from tools.results import card, read_result

    for file in (ROOT / "results").glob("*/config.yaml"):
        assert (file.parent / "CARD.md").read_text() == card(read_result(file.parent)), file.parent


def test_a_seed_that_was_run_again_is_one_seed(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        make_result(tmp_path / name, seed=seed, evaluation=[float(seed)])
    table = score_table(collect([tmp_path]))
    assert table.rows[0][table.columns.index("seeds")] == "2 (3 runs)"

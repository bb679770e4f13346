"""Results: found in folders, labelled by what differs, stored small, described by a card."""

import json
import os
import shlex
import shutil

import numpy as np
import pytest

from tests.test_train import run_training
from tests.tools.made_results import make_result
from tools.checkpoints import read_model
from tools.results import ResultError, card, collect, grouped, machine, read_result, store_run
from train import main


def test_runs_are_found_below_a_folder_and_once(tmp_path):
    make_result(tmp_path / "sweep" / "runs" / "a" / "one", seed=0)
    make_result(tmp_path / "sweep" / "runs" / "b" / "two", seed=1)
    (tmp_path / "sweep" / "other").mkdir()
    (tmp_path / "sweep" / "other" / "metrics.jsonl").write_text("")
    results = collect([tmp_path / "sweep", tmp_path / "sweep" / "runs" / "a"])
    assert [(r.folder.name, r.seed, r.setting) for r in results] == [("one", 0, "default"), ("two", 1, "default")]
    (tmp_path / "link").symlink_to(tmp_path / "sweep" / "runs" / "a")
    assert len(collect([tmp_path / "sweep", tmp_path / "link", os.path.relpath(tmp_path / "sweep")])) == 2


def test_a_run_and_its_stored_copy_are_one_seed(tmp_path, caplog):
    """They would halve the interval. A copy that was made early gives way, another run of the same seed does not."""
    run = run_training(tmp_path / "runs", "--JointTrainAgent.SampleMaxSteps", 40)
    store_run(run, tmp_path / "stored")
    (result,) = collect([tmp_path / "stored", run])
    assert result.folder == tmp_path / "stored" and f"{run} is left out: it is the run of" in caplog.text
    assert main(["--resume", str(run), "--JointTrainAgent.SampleMaxSteps", "80"]) == 0
    other = run_training(tmp_path / "others", "--JointTrainAgent.SampleMaxSteps", 40)
    assert {result.folder for result in collect([tmp_path])} == {run, other}
    branch = tmp_path / "branch"
    shutil.copytree(run, branch)
    text = (branch / "config.yaml").read_text()
    (branch / "config.yaml").write_text(text.replace("Tau: 10.0", "Tau: 5.0"))
    assert {result.folder for result in collect([tmp_path])} == {run, other, branch}


def test_a_run_that_is_stored_again_leaves_no_older_pictures(tmp_path):
    """They would be most of what is published."""
    source = make_result(tmp_path / "run")
    store_run(source, tmp_path / "stored")
    (source / "pictures" / "open_loop_000002000.png").rename(source / "pictures" / "open_loop_000003000.png")
    (tmp_path / "stored" / "pictures" / "drawn_by_hand.png").write_bytes(b"")
    store_run(source, tmp_path / "stored")
    names = {path.name for path in (tmp_path / "stored" / "pictures").iterdir()}
    assert names == {"reconstruction_000002000.png", "open_loop_000003000.png", "drawn_by_hand.png"}


def test_a_copy_made_before_anything_was_logged_is_known_by_the_name_of_its_run(tmp_path):
    run, other = (run_training(tmp_path / name, "--JointTrainAgent.SampleMaxSteps", 1) for name in "ab")
    store_run(run, tmp_path / "stored")
    assert len(collect([tmp_path])) == 2
    assert read_result(tmp_path / "stored").origin["run"] == read_result(run).origin["run"]
    assert read_result(other).origin["run"] != read_result(run).origin["run"]


def test_runs_of_which_nothing_was_timed_are_kept(tmp_path):
    for name in "ab":
        make_result(tmp_path / name)
    assert len(collect([tmp_path])) == 2


def test_what_is_no_result_is_named(tmp_path):
    with pytest.raises(ResultError, match="nowhere: no such folder"):
        collect([tmp_path / "nowhere"])
    with pytest.raises(ResultError, match="no run in it"):
        collect([tmp_path])


def test_settings_are_the_keys_that_differ_within_an_environment(tmp_path):
    make_result(tmp_path / "1", "ALE/Pong-v5", JointTrainAgent__Tau=10, BasicSettings__Device="cpu")
    make_result(tmp_path / "2", "ALE/Pong-v5", JointTrainAgent__Tau=5, Evaluate__EpisodeNum=3)
    make_result(tmp_path / "3", "ALE/Boxing-v5", JointTrainAgent__Tau=10, JointTrainAgent__BatchSize=4)
    results = collect([tmp_path])
    assert [r.setting for r in results] == ["Tau 10.0", "Tau 5.0", "Tau 10.0"]
    assert list(grouped(results)) == [(r.env, r.setting) for r in results]


def test_keys_of_one_name_are_told_apart(tmp_path):
    keys = {"Models__WorldModel__Optimiser": "Adam", "Models__Agent__AC__Optimiser": "Adam"}
    make_result(tmp_path / "1")
    make_result(tmp_path / "2", **keys, JointTrainAgent__Tau=5)
    assert collect([tmp_path])[1].setting == "Tau 5.0, WorldModel.Optimiser Adam, AC.Optimiser Adam"


def test_many_differences_become_a_number(tmp_path):
    keys = {"JointTrainAgent__Tau": 5, "JointTrainAgent__Alpha": 2, "JointTrainAgent__Beta": 2}
    make_result(tmp_path / "1")
    make_result(tmp_path / "2", **keys, JointTrainAgent__ImaginationTau=3)
    first, second = collect([tmp_path])
    assert (first.setting, second.setting) == ("setting 1", "setting 2")
    assert second.differences == "Tau 5.0, ImaginationTau 3.0, Alpha 2.0, Beta 2.0"


def test_the_score_is_the_evaluations_else_that_of_the_last_training_episodes(tmp_path):
    trained = read_result(make_result(tmp_path / "1", returns=[-21.0, -19.0]))
    assert trained.score()[:3] == (-20.0, 2, False)
    assert trained.normalised() == pytest.approx(0.7 / 35.3)
    evaluated = read_result(make_result(tmp_path / "2", evaluation=[3.0, 5.0]))
    assert evaluated.score() == (4.0, 2, True, (3.0, 5.0))
    none = read_result(make_result(tmp_path / "3", returns=[]))
    assert none.score() is None and none.normalised() is None and none.steps == 0


def test_a_configuration_of_an_earlier_version_is_read(tmp_path):
    folder = make_result(tmp_path / "run")
    file = folder / "config.yaml"
    file.write_text("".join(line for line in file.read_text().splitlines(True) if "  Alpha:" not in line))
    assert read_result(folder).config.JointTrainAgent.Alpha == 1.0


def test_a_run_is_stored_without_what_only_resuming_needs(tmp_path, caplog):
    source = make_result(tmp_path / "run", evaluation=[1.0])
    (source / "replay").mkdir()
    (source / "replay" / "rows").write_bytes(b"0" * 1000)
    store_run(source, tmp_path / "stored")
    kept = {path.relative_to(tmp_path / "stored").as_posix() for path in (tmp_path / "stored").rglob("*.*")}
    assert kept == {
        "CARD.md",
        "config.yaml",
        "metrics.jsonl",
        "eval/step_000001000/summary.json",
        "pictures/open_loop_000002000.png",
        "pictures/reconstruction_000002000.png",
    }
    assert "no model is stored" in caplog.text
    assert collect([tmp_path / "stored"])[0].score().mean == 1.0
    with pytest.raises(ResultError, match="not a run's folder"):
        store_run(tmp_path, tmp_path / "other")


def test_a_run_is_not_stored_over_itself(tmp_path):
    """A model.pt in a run's folder would be taken for its newest checkpoint, its configuration would forget RunDir."""
    source = make_result(tmp_path / "run", BasicSettings__RunDir="/elsewhere")
    before = (source / "config.yaml").read_bytes()
    with pytest.raises(ResultError, match="the run's own folder"):
        store_run(source, tmp_path / "other" / ".." / "run")
    assert (source / "config.yaml").read_bytes() == before and not (source / "CARD.md").exists()


@pytest.mark.parametrize("summary", [[], {"mean": 1.0}, {"mean": 1.0, "config": 3}])
def test_an_evaluation_of_something_else_is_not_stored(tmp_path, summary):
    source = make_result(tmp_path / "run", evaluation=[1.0])
    (source / "eval" / "training_1").mkdir()
    (source / "eval" / "training_1" / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(ResultError, match=r"training_1/summary[.]json: not a result"):
        store_run(source, tmp_path / "stored")


def test_hardware_of_others_is_text():
    assert machine({"accelerator": 5, "processor": ["<b>"], "cores": None}) == "5, ['<b>'], None cores"


def test_a_stored_run_does_not_tell_where_it_lay(tmp_path):
    source = run_training(tmp_path / "secret", "--JointTrainAgent.SampleMaxSteps", 40)
    words = ["python", "train.py", "--config", f"{tmp_path}/secret/a.yaml", "--config", "/my secret/a b/c.yaml"]
    words += ["--config", "../secret/d.yaml", "--config", "here/e.yaml", "--BasicSettings.RunDir=/secret/b/c d/"]
    origin = {"command": shlex.join([*words, "--BasicSettings.Env_name=ALE/Pong-v5"])}
    again = {
        "step": 20,
        "command": "python train.py --resume /secret/run",
        "versions": {},
        "hardware": {},
        "commit": None,
    }
    origin["resumed"] = [again]
    (source / "origin.json").write_text(json.dumps(origin))
    store_run(source, tmp_path / "stored")
    for file in (path for path in (tmp_path / "stored").rglob("*") if path.is_file()):
        assert b"secret" not in file.read_bytes(), file
    stored = json.loads((tmp_path / "stored" / "origin.json").read_text())
    kept = "--config a.yaml --config c.yaml --config d.yaml --config here/e.yaml '--BasicSettings.RunDir=c d'"
    assert stored["command"] == f"python train.py {kept} --BasicSettings.Env_name=ALE/Pong-v5"
    assert stored["resumed"] == [{**again, "command": "python train.py --resume run"}]
    assert read_model(tmp_path / "stored").config["BasicSettings"]["RunDir"] == "runs"


def test_a_card_says_what_was_measured_and_what_not(tmp_path):
    folder = make_result(tmp_path / "run", "ALE/Boxing-v5", seed=7, returns=[1.0], evaluation=[70.0, 80.0])
    (folder / "origin.json").write_text(json.dumps({"note": "A note.", "command": "python train.py"}))
    text = card(read_result(folder))
    assert "fewer than" not in card(read_result(make_result(tmp_path / "other", "Toy/Catch-v0")))
    for part in (
        "# Drama on ALE/Boxing-v5, seed 7: 1,000 of 105,000 steps",
        "A note.",
        "75.00 over 2 episodes of the checkpoint at step 1,000 (95 % interval 74.00 to 76.00)",
        "| human-normalised | 6.242 (",
        "| paper (5 seeds, 100,000 steps) | 78 |",
        "| evaluation, hardware | GPU of a test |",
        "`abcdef012345`",
        "`python train.py`",
        "1,000 steps are fewer than the 100,000",
        "not stored",
    ):
        assert part in text, part
    unknown = card(read_result(make_result(tmp_path / "toy", "Toy/Catch-v0", returns=[])))
    assert "no episode ended" in unknown and "origin | not recorded" in unknown and "human-normalised" not in unknown


def test_a_card_says_in_how_many_pieces_and_where_a_run_was_made(tmp_path):
    """Wall time of one machine and another's name beside it would be a wrong claim."""
    here = {"hardware": {"accelerator": "GPU A"}, "versions": {"torch": "2.11"}, "commit": "abc"}
    there = {"hardware": {"accelerator": "GPU B"}, "versions": {"torch": "2.13"}, "commit": "def"}
    pieces = [{"step": 400, "command": "c", **here}, {"step": 900, "command": "c", **there}]
    folder = make_result(tmp_path / "run")
    (folder / "origin.json").write_text(json.dumps({"command": "c", **here, "resumed": pieces}))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2100, "time/total_seconds": 4000.0}\n')
    text = card(read_result(folder))
    assert "| training, wall time | 1 h 7 min in 3 pieces, resumed at step 400, 900;" in text
    assert "| training, hardware | GPU A |" in text and "| training from step 900, hardware | GPU B |" in text
    assert "| training from step 900, commit | `def` |" in text and "from step 400, " not in text
    unknown = card(read_result(make_result(tmp_path / "old")))
    assert "wall time" not in unknown


@pytest.mark.parametrize("resumed", [{}, [3], [{"step": 1}], [{"step": 1, "command": "c", "hardware": 3}]])
def test_pieces_of_something_else_are_refused(tmp_path, resumed):
    folder = make_result(tmp_path / "run")
    (folder / "origin.json").write_text(json.dumps({"resumed": resumed}))
    with pytest.raises(ResultError, match="resumed is no"):
        read_result(folder)


def test_metrics_are_read_once_as_arrays(tmp_path):
    steps, returns = read_result(make_result(tmp_path / "run")).metrics["episode/return"]
    np.testing.assert_array_equal(steps, [1000, 2000])
    np.testing.assert_array_equal(returns, [-21, -20])

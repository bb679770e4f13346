"""A run in one file goes on elsewhere as it would have here."""

import json
import os
import shutil
import subprocess
import tarfile

import pytest

from replay_buffer import manifest_files
from tests.test_train import assert_same_run, run_training
from tools import archive
from tools.archive import archive_run
from tools.checkpoints import CheckpointError
from train import main


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """40 steps of 80, with a checkpoint at 20 and one at 40."""
    options = ("--JointTrainAgent.SampleMaxSteps", 40, "--JointTrainAgent.SaveEverySteps", 20)
    return run_training(tmp_path_factory.mktemp("runs"), *options)


def names(path):
    with tarfile.open(path) as file:
        return file.getnames()


def test_a_run_that_moved_goes_on_as_if_it_had_stayed(half, tmp_path):
    """Under another path, with the newest checkpoint alone, by the commands of docs/reliability.md."""
    whole = run_training(tmp_path / "whole", "--JointTrainAgent.SaveEverySteps", 20)
    archived = archive_run(half, tmp_path / "run.tar.gz")
    assert archived.checkpoint == "step_000000040" and archived.after < archived.before
    elsewhere = tmp_path / "another machine" / "runs"
    elsewhere.mkdir(parents=True)
    subprocess.run(["tar", "xzf", tmp_path / "run.tar.gz", "-C", elsewhere], check=True)
    moved = elsewhere / half.name
    assert main(["--resume", str(moved), "--JointTrainAgent.SampleMaxSteps", "80"]) == 0
    assert_same_run(whole, moved)
    (piece,) = json.loads((moved / "origin.json").read_text())["resumed"]
    assert piece["step"] == 40 and piece["seconds"] > 0


def test_an_archive_has_what_a_run_goes_on_with_and_no_more(half, tmp_path):
    """Older checkpoints and every picture would be most of it."""
    run = tmp_path / "run"
    shutil.copytree(half, run)
    (run / "videos" / "evaluation_000000020.mp4").write_bytes(b"a film")
    for step in (20, 40):
        (run / "pictures" / f"final_obs_{step:09d}.png").write_bytes(b"a picture")
    (run / "eval" / "step_000000020").mkdir()
    (run / "eval" / "step_000000020" / "summary.json").write_text("{}")
    archive_run(run, tmp_path / "a.tar.gz")
    found = names(tmp_path / "a.tar.gz")
    folders = {name.split("/")[1] for name in found}
    assert all(name.startswith("run/") for name in found)
    assert folders == {"config.yaml", "origin.json", "metrics.jsonl", "ckpt", "replay", "tb", "eval", "pictures"}
    assert {name.split("/")[2] for name in found if "/ckpt/" in name} == {"step_000000040"}
    pictures = sorted(name.split("/")[2] for name in found if "/pictures/" in name)
    newest = [f"{kind}_000000040.png" for kind in ("final_obs", "open_loop", "reconstruction")]
    assert pictures == sorted([*newest, "learning_curve.png"])
    manifest = json.loads((run / "ckpt" / "step_000000040" / "replay.json").read_text())
    assert {name.split("/")[2] for name in found if "/replay/" in name} == set(manifest_files(manifest))
    assert set(manifest_files(manifest)) < set(os.listdir(run / "replay")), "the older checkpoint's are left out"


def test_a_damaged_checkpoint_is_not_what_is_archived(half, tmp_path, caplog):
    run = tmp_path / "run"
    shutil.copytree(half, run)
    train = run / "ckpt" / "step_000000040" / "train.pt"
    train.write_bytes(bytes(train.stat().st_size))
    assert archive_run(run, tmp_path / "a.tar.gz").checkpoint == "step_000000020"
    assert "step_000000040 is not what is archived" in caplog.text
    assert train.exists(), "the run may be training: nothing is renamed under it"
    shutil.rmtree(run / "ckpt" / "step_000000020")
    with pytest.raises(CheckpointError, match="no sound checkpoint"):
        archive_run(run, tmp_path / "b.tar.gz")


def test_a_checkpoint_that_is_pruned_meanwhile_gives_way_to_the_newest(half, tmp_path, monkeypatch):
    """A run that trains saves again while it is being archived."""
    files = archive._files
    looked = iter([half / "replay" / "rows-gone.bin"])
    monkeypatch.setattr(archive, "_files", lambda *place: [*files(*place), *looked])
    assert archive_run(half, tmp_path / "a.tar.gz").checkpoint == "step_000000040"
    monkeypatch.setattr(archive, "_files", lambda run, _: [run / "replay" / "rows-gone.bin"])
    with pytest.raises(CheckpointError, match="files of its replay are missing"):
        archive_run(half, tmp_path / "b.tar.gz")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar.gz"]


def test_what_is_no_run_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere: not a run's folder"):
        archive_run(tmp_path / "nowhere", tmp_path / "a.tar.gz")
    assert not (tmp_path / "a.tar.gz").exists()

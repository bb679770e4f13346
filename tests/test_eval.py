"""Evaluation: fixed quotas, the same scores before saving and after loading, files and errors."""

import csv
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import imageio.v2 as imageio
import numpy as np
import pytest
import torch

import eval as evaluation_script
from agents import build_agent
from eval import Episode, Evaluation, build_from, episode_quotas, evaluate, imagined_frames, load, main
from sub_models.world_models import build_world_model
from tests.test_train import run_training
from tools.checkpoints import read_model
from tools.results import read_result
from tools.run import read_metrics
from utils import config_from_dict, override_config

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    return run_training(tmp_path_factory.mktemp("runs"))


def test_saved_and_loaded_agents_score_the_same(run_folder):
    """Fault of published code: a loaded agent acted with other statistics than the one that was saved."""
    saved = read_model(run_folder)
    config = config_from_dict(saved.config)
    device = torch.device("cpu")
    world_model, agent = build_from(saved, config, device)
    agent.feature_norm.update(torch.randn(50, world_model.feature_dim) + 3, torch.ones(50))  # statistics that matter
    before = evaluate(world_model, agent, config, seed=1)
    actions = SimpleNamespace(n=world_model.num_actions)
    other_world_model = build_world_model(config, actions, device)
    other_agent = build_agent(config, other_world_model.feature_dim, actions, device)
    other_world_model.load_state_dict(world_model.state_dict())
    other_agent.load_state_dict(agent.state_dict())
    after = evaluate(other_world_model, other_agent, config, seed=1)
    assert before.episodes == after.episodes and np.array_equal(before.frames, after.frames)
    assert not np.array_equal(evaluate(world_model, agent, config, seed=2).frames, before.frames)


class ScriptedEnv:
    """Two environments: episodes of the first last 1 step and score 0, those of the second 5 steps and score 10."""

    num_envs = 2
    action_space = SimpleNamespace(n=3)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def reset(self):
        self.age = np.zeros(2, dtype=int)
        return np.zeros((2, 16, 16, 3), np.uint8)

    def step(self, action):
        self.age += 1
        ended = self.age == [1, 5]
        length = self.age.copy()
        self.age[ended] = 0
        obs = np.zeros((2, 16, 16, 3), np.uint8)
        return SimpleNamespace(
            obs=obs,
            finished=ended,
            is_first=ended,
            final_obs={int(i): obs[i] for i in np.flatnonzero(ended)},
            episode_return=np.array([0.0, 10.0]),
            episode_length=length,
        )


def test_short_episodes_do_not_count_more(run_folder, monkeypatch):
    """Fault of published code: averaging the first N episodes to finish would give 0 here instead of 5."""
    monkeypatch.setattr(evaluation_script, "make_vec_env", lambda *_: ScriptedEnv())
    actor = SimpleNamespace(act=lambda *_: (np.array([2, 1]), None))
    monkeypatch.setattr(evaluation_script, "build_actor", lambda *_, **__: actor)
    saved = read_model(run_folder)
    config = override_config(config_from_dict(saved.config), {"Evaluate.EpisodeNum": "4", "Evaluate.NumEnvs": "2"})
    world_model, agent = build_from(saved, config, torch.device("cpu"))
    result = evaluate(world_model, agent, config, seed=0)
    assert sorted(e.environment for e in result.episodes) == [0, 0, 1, 1]
    assert result.summary()["mean"] == 5.0
    assert result.actions.tolist() == [2] and len(result.frames) == 2  # the first episode of the first environment


@pytest.mark.parametrize(("episodes", "envs", "expected"), [(20, 10, [2] * 10), (7, 3, [3, 2, 2]), (1, 1, [1])])
def test_quotas_are_as_equal_as_can_be(episodes, envs, expected):
    assert episode_quotas(episodes, envs) == expected


def test_summary_by_hand():
    result = Evaluation([Episode(0, 1.0, 5, 0.1), Episode(1, 3.0, 5, 0.3)], np.zeros((1, 2, 2, 3), np.uint8))
    summary = result.summary()
    assert summary["mean"] == 2 and summary["median"] == 2 and summary["std"] == 1
    assert summary["human_normalised_mean"] == pytest.approx(0.2)
    low, high = summary["mean_interval_95"]
    assert 1 <= low < 2 < high <= 3


def test_command_line_writes_table_summary_and_video(run_folder, capsys):
    assert main([str(run_folder), "--BasicSettings.Device", "cpu"]) == 0
    printed = capsys.readouterr().out
    folder = run_folder / "eval" / "step_000000080"
    rows = list(csv.DictReader((folder / "episodes.csv").open()))
    summary = json.loads((folder / "summary.json").read_text())
    assert len(rows) == 3 and [float(row["score"]) in (-1.0, 1.0) for row in rows] == [True] * 3
    assert summary["mean"] == pytest.approx(np.mean([float(row["score"]) for row in rows]))
    assert summary["human_normalised_mean"] is None and summary["checkpoint_step"] == 80
    assert "results are in" in printed and "mean" in printed
    assert summary["config"]["BasicSettings"]["Env_name"] == "Toy/Catch-v0" and summary["greedy"] is True
    assert {"versions", "hardware", "commit", "environment_seed", "policy_seed"} <= summary.keys()
    assert imageio.imread(folder / "imagined.png").ndim == 3
    first = next(row for row in rows if row["environment"] == "0")
    frames = imageio.mimread(folder / "episode.mp4", memtest=False)
    assert len(frames) == int(first["length"]) + 1


def test_a_machine_without_ffmpeg_keeps_its_scores(run_folder, monkeypatch, caplog):
    """An evaluation of hours would be lost for want of a film."""

    def nothing():
        raise RuntimeError("No ffmpeg exe could be found.")

    monkeypatch.setattr("tools.pictures.get_ffmpeg_exe", nothing)
    folder = run_folder / "eval" / "step_000000080"
    shutil.rmtree(folder, ignore_errors=True)
    assert main([str(run_folder)]) == 0
    assert {path.name for path in folder.iterdir()} == {"episodes.csv", "summary.json", "imagined.png"}
    assert "episode.mp4 is not written: no ffmpeg" in caplog.text


def test_the_same_command_gives_the_same_scores(run_folder):
    """Another seed plays other episodes."""
    table = run_folder / "eval" / "step_000000080" / "episodes.csv"
    found = []
    for words in ([], [], ["--BasicSettings.Seed", "1"]):
        assert main([str(run_folder), "--Evaluate.SaveVideo", "false", "--Evaluate.Greedy", "false", *words]) == 0
        found.append(table.read_text())
    assert found[0] == found[1] != found[2]


def test_imagined_frames_follow_real_ones(run_folder):
    saved = read_model(run_folder)
    config = config_from_dict(saved.config)
    world_model, agent = build_from(saved, config, torch.device("cpu"))
    evaluation = evaluate(world_model, agent, config, seed=1)
    assert len(evaluation.actions) == len(evaluation.frames) - 1
    context, imagined = imagined_frames(world_model, agent, config, evaluation, seed=1)
    assert context.shape == (4, 3, 16, 16, 3) and imagined.shape == (4, 5, 16, 16, 3)
    assert context.dtype == imagined.dtype == np.uint8
    assert np.array_equal(context[0], evaluation.frames[:3]) and np.array_equal(context[-1], evaluation.frames[-4:-1])
    again = imagined_frames(world_model, agent, config, evaluation, seed=1)
    assert np.array_equal(again[1], imagined)
    short = Evaluation(evaluation.episodes, evaluation.frames[:2], evaluation.actions[:1])
    assert imagined_frames(world_model, agent, config, short, seed=1) is None


def test_evaluations_during_training_leave_tables(tmp_path):
    words = ("--Evaluate.DuringTraining", "true", "--Evaluate.EverySteps", 20, "--JointTrainAgent.SampleMaxSteps", 40)
    folder = run_training(tmp_path, *words)
    found = {path.parent.name: json.loads(path.read_text()) for path in folder.glob("eval/*/summary.json")}
    assert sorted(found) == ["training_000000020", "training_000000040"]
    means = read_metrics(folder)["evaluation/return_mean"][1]
    assert [found[name]["mean"] for name in sorted(found)] == means.tolist()
    origin = json.loads((folder / "origin.json").read_text())
    assert origin.keys() == {"run", "command", "versions", "hardware", "commit"}


def test_an_exported_model_plays_as_the_run_does(run_folder, tmp_path, capsys):
    exported = tmp_path / "folder" / "small.pt"
    assert main([str(run_folder), "--export", str(exported)]) == 0
    assert f"{exported}: 0.0" in capsys.readouterr().out
    assert main([str(exported), "--Evaluate.SaveVideo", "false"]) == 0
    summary = json.loads((exported.parent / "eval" / "small" / "summary.json").read_text())
    assert summary["checkpoint_step"] == 80 and summary["episodes"] == 3


def test_a_run_is_stored_with_its_weights(run_folder, tmp_path):
    assert main([str(run_folder), "--store", str(tmp_path / "stored")]) == 0
    assert "| weights | `model.pt`" in (tmp_path / "stored" / "CARD.md").read_text()
    _, agent = load(tmp_path / "stored", device="cpu")
    assert int(agent.act(np.zeros((16, 16, 3), np.uint8))[0]) in range(3)


def test_a_run_is_archived_from_the_command_line(run_folder, tmp_path, capsys):
    path = tmp_path / "folder" / "run.tar.gz"
    assert main([str(run_folder), "--archive", str(path)]) == 0
    assert re.match(rf"{re.escape(str(path))}: step_000000080, \d\.\d MB of \d\.\d; unpack", capsys.readouterr().out)
    assert [file.name for file in path.parent.iterdir()] == ["run.tar.gz"]


def test_a_report_from_the_command_line(run_folder, tmp_path, capsys):
    assert main(["--report", str(run_folder), "--out", str(tmp_path)]) == 0
    assert "1 run(s)" in capsys.readouterr().out and (tmp_path / "report.html").stat().st_size > 10_000


def test_the_help_names_all_uses(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    printed = capsys.readouterr().out
    for word in ("--report PATH", "--export FILE", "--store FOLDER", "--archive FILE", "--Evaluate.EpisodeNum"):
        assert word in printed


def test_the_readme_plays_an_episode(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    (example,) = re.findall(r"```python\n(.*?)```", Path("README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    assert float(capsys.readouterr().out) in (-1.0, 1.0)


def test_every_name_of_a_model_loads(run_folder):
    checkpoint = max((run_folder / "ckpt").glob("step_*"))
    for path in (run_folder, checkpoint, checkpoint / "model.pt"):
        world_model, agent = load(path, device="cpu")
        obs = np.zeros((16, 16, 3), np.uint8)
        action, state = agent.act(obs)
        action, state = agent.act(obs, state)
        assert int(action) in range(3) and world_model.num_actions == 3


def test_continuous_runs_evaluate(tmp_path):
    folder = run_training(tmp_path, "--BasicSettings.Env_name", "Toy/Reach-v0", "--JointTrainAgent.SampleMaxSteps", 40)
    assert main(["--BasicSettings.SavePath", str(folder), "--Evaluate.SaveVideo", "false"]) == 0
    assert not list((folder / "eval").glob("*/episode.mp4"))


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ([], 2, "python eval.py PATH"),
        (["--BasicSettings.SavePath", "no/such/run"], 2, "no/such/run"),
        (["--Evaluate.EpisodeNum", "0"], 2, "Evaluate.EpisodeNum"),
        (["some/run", "--export"], 2, "--export: needs a value"),
        (["some/run", "--export", "a.pt", "--store", "b"], 2, "one at a time"),
        (["some/run", "--archive", "a.tar.gz"], 1, "some/run: not a run's folder"),
        (["--report", "no/such/run"], 1, "no/such/run"),
    ],
)
def test_faults_are_one_line(arguments, code, text, capsys):
    assert main(arguments) == code
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1 and error[0].startswith("error: ") and text in error[0]


def test_episodes_of_another_environment_are_not_taken_for_the_runs_score(tmp_path):
    folder = run_training(tmp_path, "--JointTrainAgent.SampleMaxSteps", 40)
    few = ["--Evaluate.EpisodeNum", "1", "--Evaluate.SaveVideo", "false"]
    assert main([str(folder), *few, "--BasicSettings.Env_name", "Toy/Recall-v0"]) == 0
    assert (folder / "eval" / "step_000000040" / "in_Toy-Recall-v0" / "summary.json").is_file()
    assert read_result(folder).evaluation is None
    assert main([str(folder), *few]) == 0
    assert read_result(folder).evaluation["env"] == "Toy/Catch-v0"


def test_what_plays_otherwise_or_less_does_not_replace_the_runs_score(tmp_path, capsys):
    folder = run_training(tmp_path, "--JointTrainAgent.SampleMaxSteps", 40)
    kept = folder / "eval" / "step_000000040"
    silent = ["--Evaluate.SaveVideo", "false", "--Evaluate.NumEnvs", "1"]
    assert main([str(folder), *silent, "--Evaluate.EpisodeNum", "2", "--Env.WorkerTimeout", "50"]) == 0
    before = (kept / "summary.json").read_bytes()
    assert main([str(folder), *silent, "--JointTrainAgent.RealityContextLength", "3"]) == 0
    assert (kept / "with_RealityContextLength-3" / "summary.json").is_file()
    assert main([str(folder), *silent, "--Evaluate.EpisodeNum", "1"]) == 0
    assert "one episode: no interval" in capsys.readouterr().out
    assert (kept / "of_1_episodes" / "summary.json").is_file()
    assert (kept / "summary.json").read_bytes() == before
    assert read_result(folder).evaluation["episodes"] == 2
    (kept / "summary.json").write_text("{")
    assert main([str(folder), *silent, "--Evaluate.EpisodeNum", "1"]) == 0
    assert read_result(folder).evaluation["episodes"] == 1


def test_other_actions_are_refused(run_folder, capsys):
    assert main(["--BasicSettings.SavePath", str(run_folder), "--BasicSettings.Env_name", "ALE/Pong-v5"]) == 2
    assert "it has actions 6, but the agent was trained with 3" in capsys.readouterr().err


def test_a_truncated_checkpoint_is_refused(tmp_path, capsys):
    folder = run_training(tmp_path, "--JointTrainAgent.SampleMaxSteps", 40)
    model = max((folder / "ckpt").glob("step_*")) / "model.pt"
    model.write_bytes(model.read_bytes()[:1000])
    assert main(["--BasicSettings.SavePath", str(folder)]) == 1
    assert "model.pt" in capsys.readouterr().err

"""The whole loop: every combination runs, resumes bit for bit, and does what its schedule says."""

import json
import re
import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch

from replay_buffer import ReplayBuffer
from sub_models.cuda_graph import CapturedStep
from sweep import main as sweep_main
from tools.checkpoints import read_checkpoint, read_model
from tools.export import export_model
from tools.run import open_run
from train import Schedule, build, main, make_env_vector, train
from utils import config_to_dict, load_config, resolve_device, seed_everything

ROOT = Path(__file__).resolve().parents[1]
TINY = str(ROOT / "tests" / "tiny.yaml")
COMBINATIONS = [(b, p) for b in ("Mamba2", "Mamba", "Transformer") for p in ("AC", "PPO")]


def words(tmp_path, *extra):
    return [
        "--config",
        TINY,
        "--BasicSettings.RunDir",
        str(tmp_path),
        "--BasicSettings.Device",
        "cpu",
        *map(str, extra),
    ]


def run_training(tmp_path, *extra):
    """One run in this process; returns its folder."""
    with open_run(load_config(words(tmp_path, *extra), "train.py").config) as run:
        train(run)
    return run.folder


def metrics_of(folder):
    """metrics.jsonl without wall-clock figures and without lines that hold nothing else."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines = [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines]
    return [line for line in lines if len(line) > 1]


def newest_state(folder):
    return read_checkpoint(max((folder / "ckpt").glob("step_*")))[0]


def assert_same(a, b, path=""):
    """Equal bit for bit, through nested containers."""
    if isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            assert_same(a[key], b[key], f"{path}/{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{path}/{i}")
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b), path
    elif isinstance(a, np.ndarray):
        assert np.array_equal(a, b), path
    else:
        assert a == b, path


def assert_same_run(first, second):
    a, b = newest_state(first), newest_state(second)
    assert a.step == b.step
    for part in ("world_model", "agent"):
        assert_same(getattr(a.model, part), getattr(b.model, part), part)
    assert_same(a.train, b.train, "train")
    for count in ("rows_written", "finals_written", "finals_held"):
        assert_same(a.replay[count], b.replay[count], count)
    assert a.replay["finals_held"] > 0
    assert_same(metrics_of(first), metrics_of(second), "metrics")


@pytest.mark.parametrize(("backbone", "policy"), COMBINATIONS)
def test_every_combination_resumes_bit_for_bit(tmp_path, backbone, policy):
    """A run of 2·n steps equals n steps, a checkpoint, and n more: weights, optimisers, random states, metrics."""
    chosen = ("--Models.WorldModel.Backbone", backbone, "--Models.Agent.Policy", policy)
    whole = run_training(tmp_path, *chosen)
    half = run_training(tmp_path, *chosen, "--JointTrainAgent.SampleMaxSteps", 40)
    command = load_config(["--resume", str(half), "--JointTrainAgent.SampleMaxSteps", "80"], "train.py")
    with open_run(command.config, command.resume) as run:
        assert run.start_step == 40
        train(run)
    assert_same_run(whole, half)
    assert {path.name for path in (whole / "pictures").iterdir()} >= {
        "learning_curve.png",
        "reconstruction_000000080.png",
        "open_loop_000000080.png",
        "final_obs_000000080.png",
    }


@pytest.mark.parametrize(
    "options",
    [
        ("--JointTrainAgent.RealityContextLength", "0", "--JointTrainAgent.ActOn", "posterior"),
        ("--JointTrainAgent.NumEnvs", "2"),
        ("--BasicSettings.Env_name", "Toy/Reach-v0"),
        ("--JointTrainAgent.BufferMaxLength", "40"),
        ("--Models.WorldModel.Optimiser", "Adam", "--Models.Agent.AC.Optimiser", "Adam"),
    ],
    ids=["recurrent", "two_environments", "continuous", "ring_wraps", "adam"],
)
def test_a_new_process_resumes_bit_for_bit(tmp_path, options):
    whole = run_training(tmp_path, *options)
    half = run_training(tmp_path, *options, "--JointTrainAgent.SampleMaxSteps", 40)
    resumed = [sys.executable, "train.py", "--resume", str(half), "--JointTrainAgent.SampleMaxSteps", "80"]
    subprocess.run(resumed, cwd=ROOT, check=True, capture_output=True, timeout=250, env=None)
    assert_same_run(whole, half)


def test_a_checkpoint_of_an_earlier_version_is_gone_on_with(tmp_path, monkeypatch):
    """An update of the repository that adds a key must not end the runs that are under way."""

    def as_it_was(config):
        tree = config_to_dict(config)
        del tree["Wandb"]
        return tree

    with monkeypatch.context() as earlier:
        earlier.setattr("tools.run.config_to_dict", as_it_was)
        folder = run_training(tmp_path, "--JointTrainAgent.SampleMaxSteps", 40)
    assert main(["--resume", str(folder), "--JointTrainAgent.SampleMaxSteps", "60"]) == 0
    assert newest_state(folder).step == 60


def test_every_logged_name_is_explained(tmp_path):
    """docs/metrics.md lists what a run logs, no more and no less."""
    options = ("--Models.Agent.Policy", "PPO", "--Evaluate.DuringTraining", "true", "--Evaluate.EverySteps", 40)
    folder = run_training(tmp_path, *options, "--JointTrainAgent.SampleMaxSteps", 84)
    logged = {name for line in (folder / "metrics.jsonl").read_text().splitlines() for name in json.loads(line)}
    documented = set(re.findall(r"`([a-z_]+/[a-z_]+)`", (ROOT / "docs" / "metrics.md").read_text()))
    assert documented == logged - {"step"}


def test_same_seed_same_run_and_another_seed_another(tmp_path):
    first, second, other = (run_training(tmp_path, "--BasicSettings.Seed", seed) for seed in (1, 1, 2))
    assert_same_run(first, second)
    assert metrics_of(first) != metrics_of(other)


def test_evaluation_does_not_change_the_training_curve(tmp_path):
    """Fault of published code: evaluation moved random states or statistics."""
    plain = run_training(tmp_path)
    options = ("--Evaluate.DuringTraining", "true", "--Evaluate.EverySteps", 20)
    evaluated = run_training(tmp_path, *options)
    lines = metrics_of(evaluated)
    scores = [line["evaluation/return_mean"] for line in lines if "evaluation/return_mean" in line]
    assert len(scores) == 4 and np.isfinite(scores).all()
    assert len(list((evaluated / "videos").glob("evaluation_*.mp4"))) == 4
    assert [line for line in lines if not any(k.startswith("evaluation/") for k in line)] == metrics_of(plain)
    assert_same(newest_state(plain).train, newest_state(evaluated).train)


def test_a_profiled_run_is_the_same_run(tmp_path):
    plain = run_training(tmp_path)
    assert main([*words(tmp_path / "profiled"), "--profile", "4"]) == 0
    (profiled,) = (tmp_path / "profiled").iterdir()
    assert_same_run(plain, profiled)
    assert len(list(profiled.glob("profile_*.json"))) == 1


def test_updates_are_counted_in_environment_steps(tmp_path):
    """Fault of published code: EverySteps // NumEnvs became 0. 80 steps mean as many updates for 1, 2 or 8 envs."""
    for num_envs, every in ((1, 4), (2, 4), (2, 1), (4, 3)):
        folder = run_training(
            tmp_path,
            "--JointTrainAgent.NumEnvs",
            num_envs,
            "--JointTrainAgent.TrainDynamicsEverySteps",
            every,
            "--JointTrainAgent.WorldModelWarmUp",
            40,
            "--JointTrainAgent.BehaviourWarmUp",
            40,
        )
        updates = newest_state(folder).train["world_model_optimiser"]["updates"].item()
        expected = sum(1 for step in range(1, 81) if step % every == 0 and step > 40 - num_envs)
        assert updates == expected, (num_envs, every)


def test_freezing_ends_updates(tmp_path):
    folder = run_training(
        tmp_path,
        "--JointTrainAgent.FreezeWorldModelAfterSteps",
        40,
        "--JointTrainAgent.FreezeBehaviourAfterSteps",
        60,
        "--JointTrainAgent.TrainDynamicsEpoch",
        3,
    )
    state = newest_state(folder).train
    assert state["world_model_optimiser"]["updates"] == 3 * len(range(24, 41, 4))
    assert state["agent_optimiser"]["updates"] == len(range(32, 61, 4))


def test_schedule_counts_multiples_whatever_the_stride():
    for num_envs in (1, 3, 8):
        config = load_config(["--JointTrainAgent.NumEnvs", str(num_envs)], "train.py").config
        schedule = Schedule(config)
        for every in (1, 2, 5, 100):
            total = sum(schedule.times_due(every, step) for step in range(num_envs, 24 * num_envs + 1, num_envs))
            assert total == 24 * num_envs // every


def test_overlapped_environments_store_every_row(tmp_path):
    folder = run_training(tmp_path, "--JointTrainAgent.OverlapEnvironment", "true")
    checkpoint = newest_state(folder)
    assert checkpoint.step == 80 and checkpoint.replay["rows_written"] == 80


@pytest.mark.parametrize(("backbone", "num_envs"), [("Mamba2", 1), ("Transformer", 2)])
def test_updates_that_do_not_wait_for_the_environment_change_nothing(tmp_path, monkeypatch, backbone, num_envs):
    """An update may begin before the newest row is known, if it does not read it: else losses depend on timing."""
    words = ("--Models.WorldModel.Backbone", backbone, "--JointTrainAgent.NumEnvs", num_envs)
    words += ("--JointTrainAgent.SampleMaxSteps", 240, "--JointTrainAgent.BufferMaxLength", 100)
    words += ("--JointTrainAgent.TrainDynamicsEverySteps", 1, "--JointTrainAgent.TrainDynamicsEpoch", 2)
    reads_open_row, waited = ReplayBuffer.reads_open_row, []

    def noted(replay):
        if replay.row_is_open:
            waited.append(reads_open_row(replay))
        return reads_open_row(replay)

    monkeypatch.setattr(ReplayBuffer, "reads_open_row", noted)
    beside = run_training(tmp_path, *words)
    assert waited.count(False) > 100
    assert waited.count(True) > 5
    monkeypatch.setattr(ReplayBuffer, "reads_open_row", lambda replay: replay.row_is_open)  # each waits
    assert_same_run(beside, run_training(tmp_path, *words))


def test_weights_of_another_run_can_be_the_start(tmp_path):
    source = run_training(tmp_path)
    options = ["--BasicSettings.SavePath", source, "--JointTrainAgent.FreezeWorldModelAfterSteps", 1]
    folder = run_training(tmp_path, *options)
    assert_same(newest_state(source).model.world_model, newest_state(folder).model.world_model)


def test_an_exported_model_can_be_the_start(tmp_path, caplog):
    """Its critics, which only training needs, are those of a new agent."""
    exported = tmp_path / "small" / "model.pt"
    export_model(read_model(run_training(tmp_path / "source")), exported)
    frozen = ["--JointTrainAgent.FreezeWorldModelAfterSteps", 1, "--JointTrainAgent.FreezeBehaviourAfterSteps", 1]
    folder = run_training(tmp_path / "runs", "--BasicSettings.SavePath", exported, *frozen)
    assert "was exported without critics: they begin untrained" in caplog.text
    given, now = read_model(exported), read_model(folder)
    assert_same(
        {k: v.float() for k, v in given.world_model.items()}, {k: v.float() for k, v in now.world_model.items()}
    )
    assert not any(name.startswith("critic.") for name in given.agent)
    assert all(torch.equal(value.float(), now.agent[name].float()) for name, value in given.agent.items())


def test_sampled_rows_are_the_played_ones(tmp_path):
    """The rows in the buffer must be one unbroken history: is_first exactly where the previous row ended an episode."""
    config = load_config(words(tmp_path), "train.py").config
    with make_env_vector(config, 0) as env:
        world_model, agent, replay = build(config, env, torch.device("cpu"))
        from envs.collector import Collector
        from sub_models.acting import build_actor

        collector = Collector(env, build_actor(config, world_model, agent))
        ended = [True]
        for _ in range(40):
            collector.send(explore=True)
            row = collector.receive()
            replay.append(*row)
            assert bool(row.is_first[0]) == ended[-1]
            ended.append(bool(row.termination[0]))
        assert sum(ended) > 3


def test_atari_goes_through_every_phase(tmp_path):
    """The real emulator: random play, world model, behaviour, evaluation, checkpoint, pictures, and a resumed step."""
    options = (
        "--BasicSettings.Env_name", "ALE/Pong-v5", "--JointTrainAgent.SampleMaxSteps", 60, "--Evaluate.EpisodeNum", 1,
        "--JointTrainAgent.NumEnvs", 1,
    )  # fmt: skip
    folder = run_training(tmp_path, *options)
    assert main(["--resume", str(folder), "--JointTrainAgent.SampleMaxSteps", "64"]) == 0
    state = newest_state(folder)
    assert state.step == 64 and state.train["world_model_optimiser"]["updates"] == len(range(24, 65, 4))
    assert all(np.isfinite(list(line.values())).all() for line in metrics_of(folder))


ONE_STEP = """
import gymnasium, numpy as np

class OneStep(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 255, (16, 16, 3), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, terminated, fault_at=None):
        self.terminated, self.fault_at, self.steps = terminated, fault_at, 0

    def frame(self):
        return self.np_random.integers(256, size=(16, 16, 3), dtype=np.uint8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.frame(), {}

    def step(self, action):
        self.steps += 1
        reward = float("nan") if self.steps == self.fault_at else 1.0
        return self.frame(), reward, self.terminated, not self.terminated, {}

gymnasium.register("Mine/Terminated-v0", OneStep, kwargs={"terminated": True})
gymnasium.register("Mine/Truncated-v0", OneStep, kwargs={"terminated": False})
gymnasium.register("Mine/Nan-v0", OneStep, kwargs={"terminated": True, "fault_at": 17})
"""


@pytest.fixture
def one_step_module(tmp_path, monkeypatch):
    (tmp_path / "drama_one_step.py").write_text(ONE_STEP)
    monkeypatch.syspath_prepend(tmp_path)
    yield "drama_one_step"
    for name in [name for name in gymnasium.registry if name.startswith("Mine/")]:
        del gymnasium.registry[name]
    sys.modules.pop("drama_one_step", None)


@pytest.mark.parametrize(("ending", "context_length"), [("Terminated", 4), ("Truncated", 0)])
def test_episodes_of_one_step_go_through_every_phase(tmp_path, one_step_module, ending, context_length):
    """Nothing to predict, no context but its own row; only what ended by itself is stored as a termination, and what
    either led to is kept."""
    options = ("--JointTrainAgent.RealityContextLength", context_length, "--JointTrainAgent.NumEnvs", 1)
    folder = run_training(tmp_path, "--BasicSettings.Env_name", f"{one_step_module}:Mine/{ending}-v0", *options)
    lines = metrics_of(folder)
    assert all(np.isfinite(list(line.values())).all() for line in lines)
    assert [line["episode/length"] for line in lines if "episode/length" in line] == [1] * 80
    config = load_config(words(tmp_path), "train.py").config
    with make_env_vector(config, 0) as env:
        replay = build(config, env, torch.device("cpu"))[2]
    replay.load(folder / "replay", newest_state(folder).replay)
    rows = replay.recent_sequences(1, 80)
    assert rows.is_first.all()
    assert (rows.termination == float(ending == "Terminated")).all()
    finals = replay.final_obs(rows)
    assert finals.step.tolist() == list(range(80))
    assert not (finals.obs == rows.obs[0]).flatten(1).all(1).any()


@pytest.mark.parametrize("program", ["train", "sweep"])
def test_a_tracker_that_is_not_installed_is_told_before_anything_starts(tmp_path, monkeypatch, capsys, program):
    """A run of days without the curves that were asked for."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    given, place = ["--config", TINY, "--Wandb.Init.Mode", "online"], str(tmp_path / "runs")
    if program == "train":
        code = main([*given, "--BasicSettings.RunDir", place])
    else:
        code = sweep_main(["--out", place, "--games", "Toy/Catch-v0", "--seeds", "0", *given])
    assert code == 2 and not (tmp_path / "runs").exists()
    error = capsys.readouterr().err
    assert error.startswith("error: Wandb.Init.Mode = online: Weights & Biases is not installed here; pip install -r ")


def test_a_users_fault_ends_the_run_in_one_line_that_names_the_step(tmp_path, one_step_module, capsys):
    assert main(words(tmp_path, "--BasicSettings.Env_name", f"{one_step_module}:Mine/Nan-v0")) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: environment 0 of 1 ")
    assert "Mine/Nan-v0, step 17 (step 1 of its episode): reward is nan, expected a finite number" in error


@pytest.mark.parametrize(
    ("extra", "code", "text"),
    [
        (["--BasicSettings.Env_name", "ALE/Pongg-v5"], 2, "ALE/Pong-v5"),
        (["--JointTrainAgent.BatchSise", "3"], 2, "JointTrainAgent.BatchSize"),
        (["--BasicSettings.SavePath", "nowhere"], 2, "nowhere"),
        (["--resume", "nowhere"], 2, "nowhere"),
        (["--BasicSettings.Kernels", "triton"], 2, "BasicSettings.Kernels = triton"),
    ],
)
def test_bad_input_is_one_line_and_an_exit_code(tmp_path, capsys, extra, code, text):
    given = extra if extra[0] == "--resume" else words(tmp_path, *extra)
    assert main(given) == code
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and text in error
    assert not list(tmp_path.iterdir())  # nothing is left behind by a run that never began


def test_a_checkpoint_of_another_architecture_names_the_keys(tmp_path, capsys):
    folder = run_training(tmp_path)
    assert main(words(tmp_path, "--BasicSettings.SavePath", folder, "--Models.WorldModel.HiddenStateDim", 32)) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "another architecture" in error and "of another shape: sequence_model.layers.0" in error
    assert list(tmp_path.iterdir()) == [folder]  # no folder of a run that never began


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("Models.WorldModel.HiddenStateDim", "32"),
        ("JointTrainAgent.RealityContextLength", "0"),
        ("JointTrainAgent.BufferMaxLength", "300"),
        ("Models.WorldModel.Optimiser", "Adam"),
        ("BasicSettings.Env_name", "Toy/Recall-v0"),
    ],
)
def test_a_refused_change_leaves_the_run_as_it_was(tmp_path, capsys, key, value):
    folder = run_training(tmp_path, "--JointTrainAgent.SampleMaxSteps", 40)
    before = (folder / "config.yaml").read_text()
    assert main(["--resume", str(folder), f"--{key}", value]) == 1
    assert "error: " in capsys.readouterr().err
    assert (folder / "config.yaml").read_text() == before
    assert main(["--resume", str(folder), "--JointTrainAgent.SampleMaxSteps", "44"]) == 0


def test_a_run_without_a_usable_checkpoint_is_not_begun_again(tmp_path, capsys):
    """Beginning again would throw the metrics away."""
    unsaved = run_training(tmp_path, "--JointTrainAgent.SaveModels", "false", "--JointTrainAgent.SampleMaxSteps", 40)
    damaged = run_training(tmp_path, "--JointTrainAgent.SampleMaxSteps", 40)
    for model in (damaged / "ckpt").glob("*/model.pt"):
        model.write_bytes(model.read_bytes()[:500])
    for folder, reason in ((unsaved, "SaveModels is false"), (damaged, "damaged")):
        metrics = (folder / "metrics.jsonl").read_text()
        assert main(["--resume", str(folder)]) == 1
        assert reason in capsys.readouterr().err
        assert (folder / "metrics.jsonl").read_text() == metrics


def test_rings_too_short_for_a_picture_do_without(tmp_path):
    folder = run_training(
        tmp_path, "--JointTrainAgent.NumEnvs", 4, "--JointTrainAgent.ImagineBatchLength", 15,
        "--JointTrainAgent.WorldModelWarmUp", 36, "--JointTrainAgent.SampleMaxSteps", 40,
    )  # fmt: skip
    assert newest_state(folder).step == 40 and not list((folder / "pictures").glob("open_loop*"))


def test_metrics_do_not_depend_on_where_a_run_was_cut(tmp_path):
    """The mean over a log interval goes on across a stop that falls inside it."""
    whole = run_training(tmp_path)
    half = run_training(tmp_path, "--JointTrainAgent.SampleMaxSteps", 47)
    last = json.loads((half / "metrics.jsonl").read_text().splitlines()[-1])
    assert (last["step"], last["time/partial_interval"]) == (47, 7) and last["world_model/loss"] > 0
    assert main(["--resume", str(half), "--JointTrainAgent.SampleMaxSteps", "80"]) == 0
    assert metrics_of(whole) == metrics_of(half)


def test_a_finished_run_keeps_its_last_line(tmp_path):
    """Nothing replaces the line of its last interval: neither where it is resumed in vain nor where that is refused."""
    folder = run_training(tmp_path, "--JointTrainAgent.SampleMaxSteps", 47)
    before = (folder / "metrics.jsonl").read_bytes()
    for extra, code in (((), 0), (("--BasicSettings.Env_name", "Toy/Reach-v0"), 1)):
        assert main(["--resume", str(folder), *extra]) == code
        assert (folder / "metrics.jsonl").read_bytes() == before


def make_trainers(tmp_path, *extra):
    config = load_config([*words(tmp_path), "--BasicSettings.Device", "auto", *extra], "train.py").config
    device = resolve_device("auto")
    seed_everything(0, False, device)
    env = make_env_vector(config, 0)
    world_model, agent, replay = build(config, env, device)
    rng = np.random.default_rng(0)
    for t in range(120):
        replay.append(
            rng.integers(0, 256, (1, 16, 16, 3), dtype=np.uint8),
            rng.integers(0, 3, 1),
            rng.normal(size=1).astype(np.float32),
            np.array([t % 9 == 8]),
            np.array([t % 9 == 0]),
        )
    env.close()
    return config, world_model, agent, replay


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("backbone", "policy"), COMBINATIONS)
def test_captured_and_compiled_updates_equal_eager_ones(tmp_path, backbone, policy):
    """CUDA graphs and compilation change the time, not the losses: 50 updates from the same seed and batches, of which
    a draw that rounding decides may make one or two others."""
    losses = {}
    for captured, compiled in ((False, False), (True, False), (True, True)):
        torch.compiler.reset()
        chosen = ("--Models.WorldModel.Backbone", backbone, "--Models.Agent.Policy", policy)
        fast = ("--BasicSettings.Compile", str(compiled).lower(), "--BasicSettings.Use_amp", "false")
        config, world_model, agent, replay = make_trainers(tmp_path, *chosen, *fast)
        horizon, device = config.JointTrainAgent.ImagineBatchLength, world_model.device
        with torch.no_grad():  # an untrained logit lies so near to 0 that rounding decides where imagined steps end
            world_model.termination_head.layers[-1].bias.fill_(-4.0)
        update = CapturedStep(lambda w=world_model, r=replay: w.update(r.sample_sequences()), device, captured)
        learn = CapturedStep(
            lambda w=world_model, a=agent, r=replay, h=horizon: a.update(w.imagine(a, r.sample_contexts(), h)),
            device,
            captured,
        )
        torch.manual_seed(1)
        history = []
        for _ in range(50):
            metrics = {**update(), **learn()}
            history.append([float(metrics[name]) for name in sorted(metrics)])
        losses[captured, compiled] = np.array(history)
    for fast in ((True, False), (True, True)):
        assert np.isfinite(losses[fast]).all()
        differs = ~np.isclose(losses[fast], losses[False, False], rtol=5e-2, atol=5e-2).all(axis=1)  # (50,)
        # Where a random number falls upon the edge between two classes, rounding decides, and a row is another.
        assert differs.sum() <= 2, f"{fast}: updates {np.flatnonzero(differs)} differ"

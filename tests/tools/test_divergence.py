"""Updates that are not finite: what is kept of them, when the run stops, and how one is looked into later."""

import dataclasses
import math
import random
from types import SimpleNamespace

import pytest
import torch

import tools.divergence
from replay_buffer import ReplayBuffer
from tests.support import SIZE, A, make_agent_for, make_batch, make_world_model
from tests.tools.test_checkpoints import mutated
from tools.checkpoints import CheckpointError, serialise
from tools.divergence import Diverged, DivergenceWatch, Fault, check_fits, describe_values, examine, read_fault
from tools.run import open_run
from utils import load_config

LIMIT = 3
LOSS_IS_NAN = ("losses: world_model/loss nan", "anomaly detection: Function '")


@pytest.fixture
def run(tmp_path):
    words = ["--BasicSettings.RunDir", str(tmp_path), "--JointTrainAgent.MaxBadUpdates", str(LIMIT)]
    with open_run(load_config(words, "train.py").config) as run:
        yield run


def make_replay():
    replay = ReplayBuffer(
        capacity=40, num_envs=1, obs_shape=(SIZE, SIZE, 3), action_shape=(), device="cpu", out_device="cpu",
        batch_size=2, batch_length=6, imagine_batch_size=4, context_length=3, sampling="uniform", tau=1.0,
        imagination_tau=1.0, alpha=1.0, beta=1.0,
    )  # fmt: skip
    batch = make_batch(1, 40)
    for t in range(40):
        replay.append(*(getattr(batch, name)[:, t].numpy() for name in tools.divergence.ROWS))
    return replay


def make_watch(run):
    world_model = make_world_model()
    watch = DivergenceWatch(run, world_model, make_agent_for(world_model), make_replay(), {"action": A})
    return watch, world_model


def one_update(watch, world_model, bad):
    """Returns the batch."""
    batch = watch.replay.sample_sequences()
    loss, metrics = world_model.loss(batch)
    if bad:
        loss, metrics["world_model/reward"] = loss * math.nan, torch.tensor(math.nan)
    metrics |= {f"world_model/{name}": value for name, value in world_model.optimiser.update(loss).items()}
    assert watch.keep("world_model", batch, metrics) is metrics
    return batch


def test_the_run_stops_with_the_last_bad_batch_and_not_before_enough_in_a_row(run):
    """The report names loss, step and counts; the file holds exactly the rows of that update and its weights."""
    watch, world_model = make_watch(run)
    for bad in (True, True, False, True, True):
        one_update(watch, world_model, bad)
        watch.stop_if_diverged(7, {"world_model/skipped": 0.5})
    batch = one_update(watch, world_model, True)
    one_update(watch, world_model, False)  # the row is over, but it was long enough
    weights = {name: value.clone() for name, value in world_model.state_dict().items()}
    with pytest.raises(Diverged) as caught:
        watch.stop_if_diverged(8, {"world_model/skipped": 0.5, "agent/skipped": 0.0})
    report = str(caught.value)
    assert "step 8: 3 updates of world_model in a row were not finite" in report
    assert "in all: 5 left out, 2 made" in report
    assert report.endswith("\nnothing is saved, it cannot be resumed; a smaller learning rate may help")
    assert "not finite world_model/reward nan; finite world_model/loss" in report
    path = run.folder / "faults" / "step_000000008_world_model" / "batch.pt"
    assert f"--debug-batch {path}" in report
    fault = read_fault(path)
    assert (fault.part, fault.step, fault.model) == ("world_model", 8, path.with_name("model.pt"))
    for name in tools.divergence.ROWS:
        assert torch.equal(getattr(fault.batch, name), getattr(batch, name)), name
    assert math.isnan(fault.values["world_model/reward"]) and fault.values["world_model/skipped"] == 1
    saved = torch.load(fault.model, weights_only=True)["world_model"]
    assert all(torch.equal(saved[name], value) for name, value in weights.items())


def test_the_device_is_asked_only_where_something_was_left_out(run):
    """A healthy run pays no wait for it."""
    watch, _ = make_watch(run)
    for last in watch._last.values():
        last.optimiser = SimpleNamespace()  # has no count that could be asked for
    watch.stop_if_diverged(5, {"world_model/skipped": 0.0, "agent/skipped": 0.0})
    watch.stop_if_diverged(6, {"episode/return": 1.0})


def test_keeping_reads_nothing_back(run, monkeypatch):
    """Nor does any update wait for the device so that a bad one can be kept."""
    watch, world_model = make_watch(run)
    batch = watch.replay.sample_sequences()

    def refuse(tensor, *_):
        raise AssertionError("a tensor is read on the host")

    for name in ("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    for _ in range(2):
        watch.keep("world_model", batch, world_model.update(batch))
    monkeypatch.undo()
    assert watch._last["world_model"].seen == 0


def test_a_full_disk_does_not_hide_the_report(run, monkeypatch):
    """The run has to stop in any case, and say why."""
    watch, world_model = make_watch(run)
    for _ in range(LIMIT):
        one_update(watch, world_model, True)

    def full(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tools.divergence, "write_atomic", full)
    with pytest.raises(Diverged, match=r"(?s)3 updates .*could not be saved in .*No space left on device"):
        watch.stop_if_diverged(8, {"world_model/skipped": 1.0})


def test_overwritten_rows_do_not_pass_for_those_of_the_batch(run):
    watch, world_model = make_watch(run)
    for _ in range(LIMIT):
        one_update(watch, world_model, True)
    fresh = make_batch(1, 40, seed=9)
    for t in range(40):
        watch.replay.append(*(getattr(fresh, name)[:, t].numpy() for name in tools.divergence.ROWS))
    with pytest.raises(Diverged, match="2 of 2 sequences are overwritten by now"):
        watch.stop_if_diverged(8, {"world_model/skipped": 1.0})


def test_a_row_from_before_a_break_still_stops_the_run(run):
    """The counts are in the checkpoint; which rows they had is not."""
    watch, world_model = make_watch(run)
    world_model.optimiser.longest_row.fill_(LIMIT)
    with pytest.raises(Diverged, match="before the run was resumed"):
        watch.stop_if_diverged(8, {"world_model/skipped": 1.0})


def test_a_report_without_a_bad_loss_names_the_gradient():
    text = describe_values("agent", {"agent/value_loss": 2.5, "agent/skipped": 1.0})
    assert text == "every loss of agent was finite (agent/value_loss 2.5, agent/skipped 1), its gradient norm was not"


# ------------------------------------------------------------------------------------------------------ looking into it


def make_fault(tmp_path, part="world_model", batch=None):
    batch = make_batch() if batch is None else batch
    return Fault(tmp_path / "batch.pt", tmp_path / "model.pt", part, 9, {f"{part}/loss": math.nan}, batch)


@pytest.mark.parametrize("kind", ["AC", "PPO"])
@pytest.mark.filterwarnings("ignore:Error detected in")  # the traceback of the forward call, for standard error
@pytest.mark.parametrize(
    ("part", "spoil", "expected"),
    [
        ("world_model", "reward_head.layers.0.weight", ["world_model.reward_head.layers.0 (Linear)", *LOSS_IS_NAN]),
        ("world_model", "encoder.layers.0.weight", ["world_model.encoder.layers.0 (Conv2d)", *LOSS_IS_NAN]),
        ("agent", "prior_head.weight", ["world_model.prior_head (Linear)", "losses: nothing"]),
    ],
)
def test_spoilt_weights_are_found(tmp_path, kind, part, spoil, expected, monkeypatch):
    """Outputs, losses and gradients that are not finite are named, the first ones first; the weights are named too."""
    monkeypatch.setattr(tools.divergence, "SHOWN", 1000)
    world_model = make_world_model().float()
    agent = make_agent_for(world_model, kind)
    world_model.get_parameter(spoil).data.flatten()[0] = math.inf
    report = examine(make_fault(tmp_path, part), world_model, agent, 3)
    assert f"not finite in the weights: world_model.{spoil}: 1 of" in report
    assert "not finite in the rows: nothing" in report
    assert all(text in report[report.index("outputs:") :] for text in expected)


def test_a_finite_gradient_overflow_is_found(tmp_path):
    """Finite losses, and a gradient that is not: the parameters are named."""
    world_model = make_world_model()
    agent = make_agent_for(world_model)
    world_model.get_parameter("decoder.linear.weight").register_hook(lambda grad: grad * math.inf)
    report = examine(make_fault(tmp_path), world_model, agent, 3)
    assert "losses: nothing" in report and "gradients: world_model.decoder.linear.weight:" in report


@pytest.mark.parametrize("part", ["world_model", "agent"])
def test_a_sound_batch_is_told_and_the_weights_stay(tmp_path, part):
    world_model = make_world_model()
    agent = make_agent_for(world_model)
    before = {name: value.clone() for name, value in world_model.state_dict().items()}
    report = examine(make_fault(tmp_path, part), world_model, agent, 3)
    assert report.endswith("everything was finite; it hangs on what was drawn")
    assert all(torch.equal(value, before[name]) for name, value in world_model.state_dict().items())


# ----------------------------------------------------------------------------------------------------- files of others


def content(**changes):
    batch = make_batch()
    rows = {name: getattr(batch, name) for name in tools.divergence.ROWS}
    return {
        "format": 1, "part": "agent", "step": 3, "model": "model.pt", "values": {"agent/loss": math.nan}, "batch": rows,
    } | changes  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"format": 9}, "format 9, this version reads 1"),
        ({"part": "critic"}, "expected world_model or agent"),
        ({"model": "../../secret/model.pt"}, "expected 'model.pt' beside it"),
        ({"model": ""}, "expected 'model.pt' beside it"),
        ({"model": "m" * 5000}, "expected 'model.pt' beside it"),
        ({"batch": {}}, "lacks obs, action, reward, termination, is_first"),
        ({"batch": {**content()["batch"], "reward": torch.zeros(2, 5)}}, "not rows of a replay"),
        ({"batch": {**content()["batch"], "obs": torch.zeros(2, 6, 4, 4, 3)}}, "obs is torch.float32"),
        ({"values": 3}, "lacks values"),
    ],
)
def test_a_file_of_something_else_is_one_line(tmp_path, changes, text):
    (tmp_path / "batch.pt").write_bytes(serialise(content(**changes)))
    with pytest.raises(CheckpointError, match=text) as caught:
        read_fault(tmp_path / "batch.pt")
    assert "\n" not in str(caught.value)


def test_rows_of_another_model_are_refused(tmp_path):
    """An action that the model does not have would be a crash in a kernel."""
    world_model, fault, sizes = make_world_model(), make_fault(tmp_path), (SIZE, SIZE, 3)
    agent = make_agent_for(world_model)
    check_fits(fault, world_model, agent, sizes)
    fault.batch.action[0, 0] = A
    with pytest.raises(CheckpointError, match="not those of the model"):
        check_fits(fault, world_model, agent, sizes)
    moving = dataclasses.replace(fault, batch=make_batch(continuous=True))
    with pytest.raises(CheckpointError, match="not those of the model"):
        check_fits(moving, world_model, agent, sizes)
    world_model = make_world_model(continuous=True)
    agent = make_agent_for(world_model)
    check_fits(moving, world_model, agent, sizes)
    for action in (moving.batch.action[..., :1], moving.batch.action.double()):
        with pytest.raises(CheckpointError, match="not those of the model"):
            check_fits(
                dataclasses.replace(moving, batch=moving.batch._replace(action=action)), world_model, agent, sizes
            )


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_mutated_batches_give_clean_errors_only(tmp_path, count):
    path, rng, refused = tmp_path / "batch.pt", random.Random(2), 0
    original = bytes(serialise(content()))
    for _ in range(count):
        path.write_bytes(mutated(original, rng))
        try:
            read_fault(path)
        except CheckpointError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > count // 2

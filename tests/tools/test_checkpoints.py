"""Checkpoint files: what goes in comes out, and nothing else does harm."""

import errno
import io
import json
import math
import os
import pickle
import random
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import nn

import tools.checkpoints as checkpoints
from tools.checkpoints import (
    MAX_JSON_BYTES,
    CheckpointError,
    CheckpointFolder,
    from_plain,
    load_state,
    read_checkpoint,
    read_model,
    resolve_checkpoint,
    serialise,
    to_plain,
    write_atomic,
)

MODEL = {
    "format": checkpoints.CHECKPOINT_FORMAT,
    "step": 7,
    "config": {"a": 1},
    "spaces": {"obs": [4]},
    "versions": {"torch": "2"},
    "world_model": {"w": torch.arange(6.0).reshape(2, 3)},
    "agent": {"b": torch.ones(2, dtype=torch.bfloat16)},
}


def files(step=7):
    return {
        "model.pt": serialise({**MODEL, "step": step}),
        "train.pt": serialise({"train": {"count": step, "array": np.arange(5, dtype=np.uint32)}, "run": {}}),
        "replay.json": json.dumps({"rows": step}).encode(),
    }


@pytest.fixture
def store(tmp_path):
    return CheckpointFolder(tmp_path / "ckpt")


def same(a, b):
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return type(b) is dict and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (a == b or (a != a and b != b))


arrays = hnp.arrays(
    hnp.boolean_dtypes() | hnp.integer_dtypes() | hnp.unsigned_integer_dtypes() | hnp.floating_dtypes(),
    hnp.array_shapes(),
)
leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5) | arrays
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(trees)
def test_any_tree_of_plain_values_and_arrays_survives_the_file(tree):
    """Resume would act on another state than the one that was saved."""
    read = from_plain(torch.load(memory_file(serialise(tree)), weights_only=True))
    assert same(tree, read)


def memory_file(data):
    return io.BytesIO(bytes(data))


def test_random_states_survive_the_file():
    """Python's, numpy's and torch's generators must go on with the same draws."""
    generator = np.random.Generator(np.random.PCG64(3))
    state = {"python": random.getstate(), "numpy": generator.bit_generator.state, "torch": torch.get_rng_state()}
    read = from_plain(torch.load(memory_file(serialise(state)), weights_only=True))
    other = np.random.Generator(np.random.PCG64())
    other.bit_generator.state = read["numpy"]
    assert other.random() == generator.random()
    assert same(read["python"], random.getstate())
    assert torch.equal(read["torch"], state["torch"])


def test_scalars_of_numpy_become_numbers():
    """They are subclasses of float in part and would be pickled by reference."""
    assert same(to_plain([np.float64(0.5), np.int32(3), np.bool_(True)]), [0.5, 3, True])


@pytest.mark.parametrize(
    "tree",
    [
        {"actor": [0, {"env": object()}]},
        {"actor": [0, {"env": {1, 2}}]},
        {"actor": [0, {"env": np.array([object()])}]},
        {"actor": [0, {"env": torch.Generator()}]},
    ],
)
def test_what_can_not_be_stored_is_named_with_its_place(tree):
    """A developer has to find the culprit in a nested state."""
    with pytest.raises(TypeError, match=r"train\.actor\[1\]\.env"):
        serialise(tree, "train")


def test_a_view_is_saved_without_what_it_views():
    """A checkpoint would hold the whole replay ring for one row of it."""
    assert len(serialise({"row": torch.zeros(1_000_000)[3:5]})) < 5_000


def test_write_then_read(store):
    """The four files agree with each other."""
    folder = store.write(7, files())
    checkpoint, run_state = read_checkpoint(folder)
    assert (checkpoint.step, checkpoint.replay, run_state) == (7, {"rows": 7}, {})
    assert same(checkpoint.train, {"count": 7, "array": np.arange(5, dtype=np.uint32)})
    assert same(checkpoint.model.world_model, MODEL["world_model"])
    assert same(checkpoint.model.agent, MODEL["agent"])
    assert checkpoint.model.config == {"a": 1}


def test_the_two_newest_stay(store):
    """Older ones would fill the disk; fewer leave nothing to fall back on."""
    for step in (5, 900, 1_000_000_000, 2_000_000_000):
        store.write(step, files(step))
        store.prune()
    assert [entry.name for entry in store.complete()] == ["step_1000000000", "step_2000000000"]
    assert sorted(os.listdir(store.folder)) == ["step_1000000000", "step_2000000000"]


def test_a_second_checkpoint_of_one_step_replaces_nothing_before_it_is_complete(store):
    """Saving again at the same step must not touch the good one."""
    first, second = store.write(7, files()), store.write(7, files())
    assert first != second
    assert store.complete() == [first, second]


@pytest.mark.parametrize("name", ["model.pt", "train.pt", "replay.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing"])
def test_a_damaged_checkpoint_is_passed_over_and_told(store, name, damage, caplog):
    """Resume falls back to the one before it instead of failing or trusting it."""
    good, bad = store.write(5, files(5)), store.write(6, files(6))
    damage_file(bad / name, damage)
    assert store.newest_sound() == good
    assert "step_000000006" in caplog.text and "going back" in caplog.text
    assert store.complete() == [good]


def damage_file(path, damage):
    data = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(data[: len(data) // 2])
    else:
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


def test_leftovers_of_a_killed_write_are_no_checkpoints(store):
    """A half-written folder must neither be loaded nor stay for ever."""
    good = store.write(5, files(5))
    (store.folder / ".tmp_6_123").mkdir()
    (store.folder / ".tmp_6_123" / "model.pt").write_bytes(b"half")
    assert store.newest_sound() == good
    store.clean()
    assert os.listdir(store.folder) == [good.name]


@pytest.mark.parametrize("failing_call", range(5))
def test_a_failed_write_leaves_nothing(store, monkeypatch, failing_call):
    """Whichever file meets the full disk: the temporary folder goes, the good checkpoint stays."""
    good = store.write(5, files(5))
    calls = iter(range(100))
    real_fsync = os.fsync

    def fsync(descriptor):
        if next(calls) == failing_call:
            raise OSError(errno.ENOSPC, "No space left on device")
        real_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="No space left"):
        store.write(6, files(6))
    assert os.listdir(store.folder) == [good.name]


def test_write_atomic_keeps_the_old_file_when_it_fails(tmp_path, monkeypatch):
    """A picture or configuration would be lost to a full disk."""
    write_atomic(tmp_path / "a", b"old")

    def fsync(descriptor):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="quota"):
        write_atomic(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


# ----------------------------------------------------------------------------------------------------- untrusted files


class Evil:
    """Unpickling it would create the file that it names."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


def test_code_in_a_checkpoint_is_refused_and_not_executed(tmp_path):
    """A downloaded model must not be able to run anything."""
    torch.save({**MODEL, "agent": {"b": Evil(tmp_path / "executed")}}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"model\.pt: holds more than tensors .*mkdir.* refused") as caught:
        read_model(tmp_path / "model.pt")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "executed").exists()


def test_a_bare_pickle_is_refused_and_not_executed(tmp_path):
    """torch.load also reads old formats, which are pickles from the first byte on."""
    (tmp_path / "model.pt").write_bytes(pickle.dumps(Evil(tmp_path / "executed")))
    with pytest.raises(CheckpointError, match="damaged"):
        read_model(tmp_path / "model.pt")
    assert not (tmp_path / "executed").exists()


def test_a_model_that_claims_more_than_the_file_holds_is_refused(tmp_path):
    """A small file must not be able to fill the memory."""
    data = bytes(serialise(MODEL))
    with (
        zipfile.ZipFile(memory_file(data)) as old,
        zipfile.ZipFile(tmp_path / "model.pt", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for member in old.namelist():
            new.writestr(member, b"\0" * 10**7 if member.endswith("data/0") else old.read(member))
    with pytest.raises(CheckpointError, match="compressed"):
        read_model(tmp_path / "model.pt")


@pytest.mark.parametrize("place", ["weights", "array", "bytes"])
def test_a_tensor_that_claims_more_than_its_data_is_refused(tmp_path, place):
    """4 bytes in a file, a terabyte once somebody copies them: refused before anyone does."""
    huge = torch.zeros(1, dtype=torch.uint8).expand(2**40)
    state = {
        "weights": {"w": huge},
        "array": {"w": {"__numpy__": "|u1", "shape": [2**40], "data": huge}},
        "bytes": {"w": {"__bytes__": huge}},
    }[place]
    torch.save({**MODEL, "world_model": state}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"a tensor of shape \(1099511627776,\) over 1 bytes"):
        read_model(tmp_path)


@pytest.mark.parametrize("cut", [0, 1, 100, -1])
def test_a_truncated_model_that_travels_alone(tmp_path, cut):
    """Half a download must be told from a model, also without a manifest beside it."""
    (tmp_path / "model.pt").write_bytes(bytes(serialise(MODEL))[:cut])
    with pytest.raises(CheckpointError, match=r"model\.pt: truncated or damaged"):
        read_model(tmp_path / "model.pt")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([1, 2], "not a Drama model"),
        ({"format": 1, "step": 3}, "lacks config, spaces, versions, world_model, agent"),
        ({**MODEL, "format": 99}, "format 99, this version reads 1"),
        ({**MODEL, "agent": 5}, "lacks agent"),
    ],
)
def test_a_file_of_something_else(tmp_path, content, text):
    """Someone's other .pt file gets a sentence and not a KeyError."""
    (tmp_path / "model.pt").write_bytes(serialise(content))
    with pytest.raises(CheckpointError, match=text):
        read_model(tmp_path / "model.pt")


def mutated(data, rng):
    """One of: bits flipped, cut, a piece repeated, zeroed or replaced by large numbers."""
    data = bytearray(data)
    at, length = rng.randrange(len(data)), rng.randrange(1, 40)
    kind = rng.randrange(5)
    if kind == 0:
        data[at] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del data[at:]
    elif kind == 2:
        data[at:at] = data[at : at + length]
    elif kind == 3:
        data[at : at + length] = bytes(length)
    else:
        data[at : at + 4] = b"\xff\xff\xff\x7f"
    return bytes(data)


def fuzz(path, read, count, seed):
    original, rng = path.read_bytes(), random.Random(seed)
    refused = 0
    for _ in range(count):
        path.write_bytes(mutated(original, rng))
        try:
            read()
        except CheckpointError as error:
            assert "\n" not in str(error)
            refused += 1
    path.write_bytes(original)
    return refused


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_mutated_models_give_clean_errors_only(tmp_path, count):
    """Without a manifest the archive itself has to be judged: no other exception, no crash."""
    (tmp_path / "model.pt").write_bytes(serialise(MODEL))
    assert fuzz(tmp_path / "model.pt", lambda: read_model(tmp_path), count, seed=0) > count // 2


@pytest.mark.parametrize("count", [50, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["train.pt", "replay.json", "manifest.json"])
def test_mutated_checkpoints_give_clean_errors_only(store, name, count):
    """A damaged file of a checkpoint is one line, whichever file it is."""
    folder = store.write(7, files())
    assert fuzz(folder / name, lambda: read_checkpoint(folder), count, seed=1) > 0


@pytest.mark.parametrize("name", ["replay.json", "manifest.json"])
def test_json_of_absurd_size_is_refused_before_it_is_read(store, name):
    folder = store.write(7, files())
    os.truncate(folder / name, MAX_JSON_BYTES + 1)  # a hole: takes no disk
    with pytest.raises(CheckpointError, match=r"\.json: larger than 67108864 bytes"):
        read_checkpoint(folder)


# ------------------------------------------------------------------------------------------------------ finding a model


def test_every_way_to_name_a_checkpoint(store):
    """SavePath takes a run's folder, a checkpoint's folder or the file."""
    store.write(5, files(5))
    newest = store.write(6, files(6))
    for path in (store.folder.parent, newest, newest / "model.pt", str(newest)):
        assert resolve_checkpoint(path) == newest / "model.pt"
    assert read_model(store.folder.parent).step == 6


def test_a_missing_checkpoint_says_what_is_there(tmp_path):
    """The user sees the typo in the message."""
    (tmp_path / "Pong_run").mkdir()
    with pytest.raises(CheckpointError, match=r"Pong_rum: no such file or folder, .* holds Pong_run"):
        resolve_checkpoint(tmp_path / "Pong_rum")
    with pytest.raises(CheckpointError, match=r"Pong_run: no complete checkpoint in it, .* holds nothing"):
        resolve_checkpoint(tmp_path / "Pong_run")


def small_net(width=3):
    return nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width))


def test_load_state_copies_in_place():
    """Optimisers and captured graphs keep pointing at the parameters."""
    module, other = small_net(), small_net()
    pointers = [parameter.data_ptr() for parameter in module.parameters()]
    load_state(module, other.state_dict(), "agent")
    assert pointers == [parameter.data_ptr() for parameter in module.parameters()]
    assert all(
        torch.equal(a, b) for a, b in zip(module.state_dict().values(), other.state_dict().values(), strict=True)
    )


class Compiled(nn.Module):
    """Names its parameters as the result of torch.compile does, whose import takes seconds."""

    def __init__(self, module):
        super().__init__()
        self._orig_mod = module


@pytest.mark.parametrize("compiled_side", ["file", "module", "both", "inner"])
def test_compilation_does_not_show_in_a_checkpoint(compiled_side):
    """A compiled module's keys carry a prefix that the plain module lacks."""
    module, other = small_net(), small_net()
    state = other.state_dict()
    if compiled_side in ("file", "both"):
        state = {f"_orig_mod.{key}": value for key, value in state.items()}
    if compiled_side == "inner":
        state = {key.replace("0.", "0._orig_mod."): value for key, value in state.items()}
    load_state(Compiled(module) if compiled_side in ("module", "both") else module, state, "agent")
    assert torch.equal(module[0].weight, other[0].weight)


def test_another_architecture_is_told_by_its_keys():
    """Which keys differ, the first of each kind and how many."""
    state = {f"3.{name}": torch.zeros(1) for name in "abcde"}
    state["0.weight"] = torch.zeros(4, 2)
    with pytest.raises(CheckpointError) as caught:
        load_state(small_net(), state, "world model")
    text = str(caught.value)
    assert text.startswith("world model: the checkpoint is of another architecture; 6 missing: 0.bias, ")
    assert "5 unexpected: 3.a, 3.b, 3.c, ...; 1 of another shape: 0.weight (4, 2) instead of (3, 2)" in text
    assert "\n" not in text


def test_not_a_number_survives(tmp_path):
    """Infinite and undefined averages are states like any other."""
    tree = {"a": math.nan, "b": math.inf, "c": torch.tensor([math.nan])}
    read = from_plain(torch.load(memory_file(serialise(tree)), weights_only=True))
    assert math.isnan(read["a"]) and read["b"] == math.inf and read["c"].isnan().all()

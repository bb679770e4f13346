"""Layers of configuration, the command line, files that must be refused, devices, seeds and random states."""

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from config_files.schema import Config, walk_keys
from tests.tools.test_checkpoints import mutated
from utils import (
    DEFAULTS_FILE,
    CommandLine,
    ConfigError,
    config_from_dict,
    config_from_file,
    config_from_older,
    config_to_dict,
    config_to_yaml,
    default_values,
    get_rng_state,
    help_text,
    isolated_rng,
    key_comments,
    load_config,
    override_config,
    resolve_device,
    seed_everything,
    set_rng_state,
)

ROOT = DEFAULTS_FILE.parent.parent
KEYS = dict(walk_keys())
PRESETS = sorted(path for path in DEFAULTS_FILE.parent.glob("*.yaml") if path != DEFAULTS_FILE)


def load(*words: str) -> Config:
    return load_config(list(words), "train.py").config


def refusal(*words: str, program: str = "train.py") -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(list(words), program)
    message = str(caught.value)
    assert message.isprintable(), "one line"
    return message


@pytest.fixture
def write(tmp_path):
    def write_file(text: str | bytes, name: str = "preset.yaml") -> str:
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return write_file


# ----------------------------------------------------------------------------------------------------- layers and words


def test_defaults_are_those_of_the_file():
    config = load()
    assert config.JointTrainAgent.BatchLength == 128
    assert config.Models.WorldModel.Laprop.Epsilon == 1e-20
    assert config.BasicSettings.SavePath is None


@pytest.mark.parametrize("words", [["--JointTrainAgent.BatchSize", "8"], ["--JointTrainAgent.BatchSize=8"]])
def test_an_override_takes_both_spellings(words):
    assert load(*words).JointTrainAgent.BatchSize == 8


def test_later_files_win_and_words_win_over_files(write):
    first = write("JointTrainAgent: {BatchSize: 4, BatchLength: 64}\nn: first", "a.yaml")
    second = write("JointTrainAgent: {BatchSize: 5}", "b.yaml")
    config = load("--n", "word", "--config", first, f"--config={second}")
    assert (config.JointTrainAgent.BatchSize, config.JointTrainAgent.BatchLength, config.n) == (5, 64, "word")


def test_what_the_user_gave_is_told_apart_from_defaults(write):
    line = load_config(["--config", write("n: x"), "--BasicSettings.Seed", "1"], "train.py")
    assert line.given == {"n": "x", "BasicSettings.Seed": "1"}


def test_false_is_false():
    assert load("--Evaluate.Greedy", "False").Evaluate.Greedy is False


def test_no_words_means_the_words_of_the_process(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--n", "mine"])
    assert load_config(None, "train.py").config.n == "mine"


def test_doctor_and_resume_belong_to_training(tmp_path):
    (tmp_path / "config.yaml").write_text(config_to_yaml(load("--BasicSettings.Seed", "5")))
    line = load_config(["--resume", str(tmp_path), "--JointTrainAgent.SampleMaxSteps", "7"], "train.py")
    assert (line.resume, line.config.BasicSettings.Seed) == (str(tmp_path), 5)
    assert line.config.JointTrainAgent.SampleMaxSteps == 7
    assert load_config(["--doctor"], "train.py") == CommandLine(load(), doctor=True)
    assert "doctor" in refusal("--doctor", program="eval.py")
    assert "resume" in refusal("--resume", str(tmp_path), program="eval.py")


def test_resuming_a_folder_that_is_no_run(tmp_path):
    assert refusal("--resume", str(tmp_path)) == f"--resume {tmp_path}: not a run's folder, it has no config.yaml"
    assert refusal("--resume", str(tmp_path / "a")) == f"--resume {tmp_path / 'a'}: no such folder"


@pytest.mark.parametrize(
    "words, message",
    [
        (["--JointTrainAgent.BatchSiez", "8"], "JointTrainAgent.BatchSiez: unknown key.*JointTrainAgent.BatchSize"),
        (["--BatchLength", "8"], "BatchLength: unknown key.*JointTrainAgent.BatchLength"),
        (["--jointtrainagent.batchsize", "8"], "JointTrainAgent.BatchSize"),
        (["--BasicSettings.BatchSize", "8"], "JointTrainAgent.BatchSize"),
        (["--Models.WorldModel.Lap.LearningRate", "1"], r"Models\.WorldModel\.Laprop\.LearningRate"),
        (["--Models.Agent", "AC"], r"Models\.Agent: this is a section.*Models\.Agent\.Policy"),
        (["--n"], "--n: needs a value"),
        (["--Evaluate.Greedy", "--n", "x"], "--Evaluate.Greedy: needs a value"),
        (["--config"], "--config: needs a value"),
        (["--config", "/does/not/exist.yaml"], "/does/not/exist.yaml: No such file"),
        (["--config", "/"], "/: Is a directory"),
        (["BatchSize=8"], "expected --Section.Key value"),
        (["--"], "expected --Section.Key value"),
        (["--BasicSettings.Seed", "-1"], "BasicSettings.Seed = -1: must be integer from 0 to 4294967295"),
        (["--JointTrainAgent.BatchSize", "9999999999"], "integer >= 1 and <= 2147483647"),
    ],
)
def test_usage_faults(words, message):
    assert re.search(message, refusal(*words))


def test_help_lists_every_key_with_default_and_comment(capsys):
    with pytest.raises(SystemExit) as caught:
        load_config(["--help"], "train.py")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    comments = key_comments()
    for key in KEYS:
        [index] = [i for i, line in enumerate(lines) if line.split()[:1] == [f"--{key}"]]
        assert comments[key] in lines[index + 1]
    assert "--Models.WorldModel.Laprop.LearningRate 4e-5" in text
    assert "Mamba, Mamba2 or Transformer" in text
    assert "--resume" not in help_text("eval.py")


# ---------------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize(
    "text, message",
    [
        ("n: a\nn: b", "line 2: n stands here a second time"),
        ("Evaluate:\n  Greedy: true\nn: x\nEvaluate: {}", "line 4: Evaluate stands here a second time"),
        ("n: !!python/object/apply:os.system ['echo ran']", "tag"),
        ("n: !other x", "tag"),
        ("n: &a x\nBasicSettings: {Env_name: *a}", "aliases"),
        ("- a\n- b", "expected sections and keys"),
        ("just text", "expected sections and keys"),
        ("n: [", "not YAML"),
        ("n: 'a", "not YAML"),
        ("? [a]\n: b", "a key must be a word"),
        ("[" * 5000, "."),
        (b"\xff\xfe\x00n", "not UTF-8"),
        (b"n: \x00", "."),
        (b"#" * (2 << 20), "larger than"),
        ("BatchSize: 3", "nearest known one is JointTrainAgent.BatchSize"),
        ("JointTrainAgent: 3", "this is a section"),
        ("JointTrainAgent:", "this is a section"),
        ("JointTrainAgent: {BatchSize: {a: 1}}", "JointTrainAgent.BatchSize"),
    ],
)
def test_files_that_are_refused(write, text, message):
    assert re.search(message, refusal("--config", write(text)))


def test_a_python_tag_runs_nothing(write, tmp_path):
    mark = tmp_path / "ran"
    refusal("--config", write(f"n: !!python/object/apply:os.mkdir ['{mark}']"))
    assert not mark.exists()


@pytest.mark.parametrize("text", ["", "# only a comment\n", "{}"])
def test_an_empty_file_changes_nothing(write, text):
    assert load("--config", write(text)) == load()


def test_unknown_keys_in_a_file_name_the_file(write):
    path = write("Evaluate: {EpisodeNumber: 3}")
    assert refusal("--config", path).startswith(f"{path}: Evaluate.EpisodeNumber: unknown key")


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_mutated_files_give_only_clean_errors(tmp_path_factory, data):
    raw = bytearray((DEFAULTS_FILE.parent / "quickstart.yaml").read_bytes())
    for _ in range(data.draw(st.integers(1, 8))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "mutated.yaml"
    path.write_bytes(raw)
    try:
        load("--config", str(path))
    except ConfigError as error:
        assert str(error).isprintable()


@pytest.mark.parametrize("count", [50, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_mutated_run_configurations_give_only_clean_errors(tmp_path, count):
    """A run's config.yaml: one line that names the file, or a configuration."""
    original = yaml.safe_dump(config_to_dict(load()), default_flow_style=True).encode()  # read twice as fast as ours
    path, rng = tmp_path / "config.yaml", random.Random(4)
    refused = 0
    for _ in range(count):
        path.write_bytes(mutated(original, rng))
        try:
            config_from_file(path)
        except ConfigError as error:
            assert str(error).isprintable() and str(error).startswith(f"{path}: ")
            refused += 1
    assert refused > count // 4


# --------------------------------------------------------------------------------------------- configurations as values


def test_a_configuration_survives_dict_yaml_and_file(tmp_path):
    config = load("--Models.WorldModel.Encoder.Mults", "1,1,1", "--BasicSettings.SavePath", "a: b #c", "--n", "no")
    path = tmp_path / "config.yaml"
    path.write_text(config_to_yaml(config))
    assert config_from_dict(config_to_dict(config)) == config
    assert config_from_dict(yaml.safe_load(config_to_yaml(config))) == config
    assert config_from_file(path) == config
    assert load("--config", str(path)) == config


def test_a_written_configuration_keeps_types_and_comments():
    text = config_to_yaml(load())
    tree = yaml.safe_load(text)
    assert tree == config_to_dict(load())
    assert isinstance(tree["Models"]["WorldModel"]["Laprop"]["LearningRate"], float)
    for comment in key_comments().values():
        assert f"# {comment}" in text


def test_a_stored_configuration_is_held_in_plain_values():
    def plain(value: object) -> bool:
        if isinstance(value, dict):
            return all(isinstance(key, str) and plain(inner) for key, inner in value.items())
        return all(map(plain, value)) if isinstance(value, list) else type(value) in (bool, int, float, str, type(None))

    assert plain(config_to_dict(load()))


def test_a_stored_configuration_must_be_whole():
    tree = config_to_dict(load())
    del tree["Models"]["Agent"]["Policy"]
    with pytest.raises(ConfigError, match=r"Models.Agent.Policy: missing; must be AC or PPO"):
        config_from_dict(tree)
    tree["Models"]["Agent"]["Polic"] = "AC"
    with pytest.raises(ConfigError, match=r"nearest known one is Models\.Agent\.Policy"):
        config_from_dict(tree)
    with pytest.raises(ConfigError, match="expected sections"):
        config_from_dict([])


def test_an_earlier_versions_configuration_takes_new_keys_from_the_defaults():
    """Else a new key would make every published model unreadable."""
    config = load()
    tree = config_to_dict(override_config(config, {"JointTrainAgent.Tau": 3}))
    del tree["JointTrainAgent"]["Alpha"], tree["Evaluate"]
    older = config_from_older(tree)
    assert older.JointTrainAgent.Tau == 3 and older.JointTrainAgent.Alpha == config.JointTrainAgent.Alpha
    assert older.Evaluate == config.Evaluate
    with pytest.raises(ConfigError, match="unknown key"):
        config_from_older({"Removed": 1})


def test_a_run_with_a_key_that_was_removed_names_the_version_to_go_on_with(tmp_path):
    text = config_to_yaml(load_config([], "train.py").config)
    (tmp_path / "config.yaml").write_text(text.replace("  Tau: ", "  Warmth: 1\n  Tau: "))
    with pytest.raises(ConfigError, match=r"Warmth: unknown key; .*origin\.json beside it names the commit"):
        load_config(["--resume", str(tmp_path)], "train.py")


def test_a_run_of_an_earlier_version_goes_on_and_says_what_was_added(tmp_path, caplog):
    """A new key would make every run that is under way unresumable."""
    tree = config_to_dict(override_config(load(), {"JointTrainAgent.Tau": 3}))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    assert load("--resume", str(tmp_path)).JointTrainAgent.Tau == 3 and not caplog.records
    del tree["JointTrainAgent"]["Alpha"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    assert load("--resume", str(tmp_path)) == config_from_file(tmp_path / "config.yaml")
    assert caplog.messages[0].endswith("they take their defaults: JointTrainAgent.Alpha 1.0")


def test_override_config_names_unknown_keys():
    with pytest.raises(ConfigError, match=r"nearest known one is BasicSettings\.Seed"):
        override_config(load(), {"BasicSettings.Sed": 3})


@settings(max_examples=50, deadline=None)
@given(
    chosen=st.fixed_dictionaries(
        {},
        optional={
            "BasicSettings.Seed": st.integers(0, 2**32 - 1),
            "BasicSettings.SavePath": st.one_of(st.none(), st.text(min_size=1, max_size=30).filter(str.isprintable)),
            "BasicSettings.RunDir": st.text(min_size=1, max_size=30).filter(lambda s: s.isprintable() and s.strip()),
            "Models.WorldModel.Adam.LearningRate": st.floats(1e-30, 1e30),
            "Models.WorldModel.Dropout": st.floats(0, 0.999),
            "Evaluate.Greedy": st.booleans(),
            "JointTrainAgent.Sampling": st.sampled_from(["dynamic", "uniform"]),
            "Models.WorldModel.Encoder.Mults": st.lists(st.integers(1, 9), min_size=1, max_size=6),
        },
    )
)
def test_valid_values_round_trip_through_words_and_yaml(chosen):
    """Each value written as a word, and the whole written as YAML, come back equal."""
    typed = override_config(load(), chosen)
    words = [f"--{key}={'null' if value is None else value}" for key, value in chosen.items()]
    assert load(*words) == typed
    assert config_from_dict(yaml.safe_load(config_to_yaml(typed))) == typed


# -------------------------------------------------------------------------------------------------------------- presets


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_each_preset_loads_and_changes_something(preset):
    assert load("--config", str(preset)) != load()


@pytest.mark.parametrize("over", ["as_published", "laptop"])
@pytest.mark.parametrize("base", ["atari100k", "dmc_vision", "memory_maze"])
def test_presets_that_are_meant_to_be_laid_over_others(base, over):
    folder = DEFAULTS_FILE.parent
    assert load("--config", str(folder / f"{base}.yaml"), "--config", str(folder / f"{over}.yaml"))


@pytest.mark.parametrize("backbone", ["Mamba", "Mamba2", "Transformer"])
@pytest.mark.parametrize("policy", ["AC", "PPO"])
def test_the_quickstart_holds_for_every_backbone_and_policy(backbone, policy):
    config = load(
        "--config", str(DEFAULTS_FILE.parent / "quickstart.yaml"),
        "--Models.WorldModel.Backbone", backbone, "--Models.Agent.Policy", policy,
    )
    assert config.BasicSettings.Env_name == "Toy/Catch-v0"


def test_as_published_differs_from_the_defaults_where_it_says():
    config = load("--config", str(DEFAULTS_FILE.parent / "as_published.yaml"))
    train = config.JointTrainAgent
    assert not (train.MaskEpisodeStart or train.MaskAfterTermination or train.ResetStateAtEpisodeStart)
    assert (train.ActOn, config.Models.WorldModel.Dropout) == ("prior", 0.0)


# ----------------------------------------------------------------------------------------------------- device and seeds


def test_devices():
    assert resolve_device("cpu") == torch.device("cpu")
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(ConfigError, match=r"BasicSettings\.Device = cuda:77: this machine has .* use auto or cpu"):
        resolve_device("cuda:77")


def draw() -> tuple[float, float, float]:
    return random.random(), np.random.rand(), torch.rand(()).item()


def test_one_seed_gives_one_stream():
    seed_everything(3, False, torch.device("cpu"))
    first = draw()
    seed_everything(3, False, torch.device("cpu"))
    assert draw() == first
    seed_everything(4, False, torch.device("cpu"))
    assert all(a != b for a, b in zip(draw(), first, strict=True))


def test_random_states_survive_a_weights_only_file(tmp_path):
    random.gauss(0, 1)                                                  # leaves a cached second value behind
    np.random.randn()
    torch.save(get_rng_state(), tmp_path / "rng.pt")
    expected = draw(), random.gauss(0, 1), np.random.randn()
    draw()
    set_rng_state(torch.load(tmp_path / "rng.pt", weights_only=True))
    assert (draw(), random.gauss(0, 1), np.random.randn()) == expected


def test_isolated_streams_leave_the_outer_ones_alone():
    seed_everything(3, False, torch.device("cpu"))
    expected = draw()
    seed_everything(3, False, torch.device("cpu"))
    with isolated_rng(7):
        inside = draw()
    with pytest.raises(KeyError), isolated_rng(7):
        assert draw() == inside
        raise KeyError
    assert inside != expected
    assert draw() == expected


def test_deterministic_refuses_operations_that_are_not():
    try:
        seed_everything(0, True, torch.device("cpu"))
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark
    finally:
        seed_everything(0, False, torch.device("cpu"))
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_random_states_include_every_cuda_device():
    torch.rand(1, device="cuda")
    state = get_rng_state()
    expected = torch.rand(4, device="cuda")
    set_rng_state(state)
    assert torch.equal(torch.rand(4, device="cuda"), expected)


def test_importing_utils_reads_no_words_and_prints_nothing():
    """Importing must have no effect: worker processes import it too."""
    done = subprocess.run(
        [sys.executable, "-c", "import utils", "--nonsense"], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True,
    )
    assert done.stdout == done.stderr == ""


def test_defaults_hold_text_only():
    """Defaults are written once, as text in the file; the schema has none."""
    assert all(isinstance(value, str | list) for value in default_values().values())
    assert all(field.is_required() for field in KEYS.values())


def test_paths_of_presets_are_inside_the_repository():
    assert Path(DEFAULTS_FILE).is_file() and PRESETS

"""The schema: every key has a comment and a reader, every value is parsed or refused, every rule between keys bites."""

import ast
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from config_files.schema import Config, describe, is_continuous, walk_keys
from utils import ConfigError, default_values, key_comments, load_config, override_config

ROOT = Path(__file__).resolve().parents[2]
KEYS = dict(walk_keys())
READERS = ("train.py", "eval.py", "agents.py", "env_wrapper.py", "tools/*.py", "envs/*.py", "sub_models/*.py")


@pytest.fixture(scope="module")
def defaults() -> Config:
    return load_config([], "train.py").config


# -------------------------------------------------------------------------------------- every key is read and explained


class ConfigReads(ast.NodeVisitor):
    """Collects the schema's keys that a module reads, from its chains of attributes.

    A name assigned from a chain stands for that chain (`train = config.JointTrainAgent`), `getattr(section, name)` for
    any section in it, `section.model_dump()` for all its keys. A chain counts for every key that its longest known
    ending fits: `section.Adam.LearningRate` for each Adam's. Lower-case names, common elsewhere, need a section.
    """

    def __init__(self) -> None:
        self.read: set[str] = set()
        self._aliases: dict[str, list[str]] = {}

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outer = dict(self._aliases)
        for name in node.args.args:
            self._aliases.pop(name.arg, None)
        self.generic_visit(node)
        self._aliases = outer

    def visit_Assign(self, node: ast.Assign) -> None:
        targets = [node.targets[0]]
        values = [node.value]
        if isinstance(targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
            targets, values = targets[0].elts, node.value.elts
        for target, value in zip(targets, values, strict=True):
            chain = self._chain(value)
            if isinstance(target, ast.Name):
                self._aliases.pop(target.id, None)
                if chain:
                    self._aliases[target.id] = chain
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._count(node)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        self._count(node)
        self.generic_visit(node)

    def _count(self, node: ast.expr) -> None:
        chain = self._chain(node)
        if not chain or chain[-1] == "*":
            return
        whole_section = chain[-1] == "model_dump"
        if whole_section:
            chain = chain[:-1]
        fitting = {key: self._ending(key.split(".")[: -1 if whole_section else None], chain) for key in KEYS}
        longest = max(fitting.values())
        if longest and (longest > 1 or chain[-1][0].isupper() or chain == ["config", chain[-1]]):
            self.read |= {key for key, length in fitting.items() if length == longest}

    def _chain(self, node: ast.expr) -> list[str]:
        if isinstance(node, ast.Name):
            return self._aliases.get(node.id, [node.id])
        if isinstance(node, ast.Attribute):
            return [*self._chain(node.value), node.attr]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            member = node.args[1]
            return [*self._chain(node.args[0]), member.value if isinstance(member, ast.Constant) else "*"]
        return []

    @staticmethod
    def _ending(key: list[str], chain: list[str]) -> int:
        """How many last parts of `key` the end of `chain` names, 0 if not its very last."""
        length = 0
        for part, named in zip(reversed(key), reversed(chain), strict=False):
            if named not in (part, "*"):
                break
            length += 1
        return length


def reads_of(source: str) -> set[str]:
    visitor = ConfigReads()
    visitor.visit(ast.parse(source))
    return visitor.read


def test_every_key_is_read_somewhere():
    files = [file for name in READERS for file in ROOT.glob(name)]
    read = set().union(*(reads_of(file.read_text()) for file in files))
    assert sorted(set(KEYS) - read) == []


@pytest.mark.parametrize(
    "source, expected",
    [
        ("config.JointTrainAgent.Tau", {"JointTrainAgent.Tau"}),
        ("train = config.JointTrainAgent\ntrain.NumEnvs", {"JointTrainAgent.NumEnvs"}),
        ("a, b = config.Evaluate, 3\nb.x\na.NumEnvs", {"Evaluate.NumEnvs"}),
        ("section.NumEnvs", {"JointTrainAgent.NumEnvs", "Evaluate.NumEnvs"}),
        ("self.d_state\nx.n\nreplay.Other", set()),
        ("config.n", {"n"}),
        ("x.ssm_cfg.d_state", {"Models.WorldModel.Mamba.ssm_cfg.d_state"}),
        ("s = getattr(config.Models.Agent, p)\ns.Gamma", {"Models.Agent.AC.Gamma", "Models.Agent.PPO.Gamma"}),
        ("config.Models.Agent.AC.Actor.model_dump()", {"Models.Agent.AC.Actor.HiddenUnits"}),
        ("def f(train):\n    train.Seed\ndef g(other):\n    other.Mode", {"BasicSettings.Seed", "Wandb.Init.Mode"}),
        ("'BasicSettings.Seed'", set()),
    ],
)
def test_the_scan_for_reads_finds_exactly_what_is_read(source, expected):
    assert reads_of(source) == expected


def test_every_key_has_a_default_and_a_comment():
    assert list(default_values()) == list(KEYS), "configure.yaml and the schema list the same keys in the same order"
    assert sorted(set(KEYS) - set(key_comments())) == []


def test_every_key_says_what_it_accepts():
    assert all(describe(field) for field in KEYS.values())


# ------------------------------------------------------------------------------------------------ every value is parsed


def change(config: Config, *pairs: tuple[str, object]) -> Config:
    return override_config(config, dict(pairs))


def lookup(config: Config, key: str) -> object:
    value: object = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


@pytest.mark.parametrize(
    "text, value", [("true", True), ("Yes", True), ("1", True), ("false", False), ("no", False), ("0", False)]
)
def test_flags(defaults, text, value):
    assert change(defaults, ("Evaluate.Greedy", text)).Evaluate.Greedy is value


@pytest.mark.parametrize(
    "key, text, value",
    [
        ("Models.WorldModel.Laprop.LearningRate", "4e-5", 4e-5),
        ("Models.WorldModel.Max_grad_norm", "100", 100.0),
        ("JointTrainAgent.SampleMaxSteps", "2e5", 200000),
        ("JointTrainAgent.SampleMaxSteps", "200_000", 200000),
        ("Models.WorldModel.Encoder.Mults", "[2, 2, 2, 2, 2]", (2, 2, 2, 2, 2)),
        ("Models.WorldModel.Encoder.Mults", "2,2,2,2,2", (2, 2, 2, 2, 2)),
        ("Models.WorldModel.Encoder.Mults", "4", (4,)),
        ("BasicSettings.SavePath", "null", None),
        ("BasicSettings.SavePath", "", None),
        ("BasicSettings.SavePath", "runs/a b/ckpt", "runs/a b/ckpt"),
        ("BasicSettings.Device", "cuda:1", "cuda:1"),
        ("n", "no", "no"),
        ("n", "2026-01-01", "2026-01-01"),
    ],
)
def test_text_is_parsed_to_the_type_of_its_key(defaults, key, text, value):
    parsed = lookup(change(defaults, (key, text)), key)
    assert parsed == value
    assert type(parsed) is type(value)


ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.lists(st.one_of(st.integers(), st.text(max_size=3), st.lists(st.integers(), max_size=2)), max_size=6),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@settings(max_examples=400, deadline=None)
@example(key="JointTrainAgent.BatchSize", value=906)
@given(key=st.sampled_from(sorted(KEYS)), value=ANYTHING)
def test_any_value_builds_or_is_refused_in_one_line_that_names_its_key(key, value):
    check_one_value(load_config([], "train.py").config, key, value)


@pytest.mark.slow
@pytest.mark.parametrize("key", KEYS)
def test_any_of_many_values_for_each_key(defaults, key):
    """The same, a hundred times for every key of the schema."""

    @settings(max_examples=100, deadline=None, database=None)
    @given(value=ANYTHING)
    def try_values(value):
        check_one_value(defaults, key, value)

    try_values()


def check_one_value(config: Config, key: str, value: object) -> None:
    try:
        changed = change(config, (key, value))
    except ConfigError as error:
        message = str(error)
        assert message.isprintable()
        assert key.split(".")[-1] in message
        assert len(message) < 400
    else:
        assert lookup(change(changed, (key, lookup(changed, key))), key) == lookup(changed, key)


VALID = {
    "true or false": st.booleans(),
    "integer >= 1": st.integers(1, 2**31 - 1),
    "integer >= 2": st.integers(2, 2**31 - 1),
    "integer >= 0": st.integers(0, 2**31 - 1),
    "odd integer >= 1": st.integers(0, 2**30 - 1).map(lambda half: 2 * half + 1),
    "integer from 1 to 256": st.integers(1, 256),
    "integer from 0 to 4294967295": st.integers(0, 2**32 - 1),
    "number > 0": st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    "number >= 0": st.floats(min_value=0, allow_infinity=False),
    "number from 0 to 1": st.floats(0, 1),
    "number >= 0 and < 1": st.floats(0, 1, exclude_max=True),
    "number > 0 and < 1": st.floats(0, 1, exclude_min=True, exclude_max=True),
    "text": st.text(min_size=1, max_size=20).filter(lambda text: text.isprintable() and text.strip()),
    "path or null": st.sampled_from([None, "runs/a", "/tmp/x y.pt"]),
    "name of an environment, without blanks": st.sampled_from(["ALE/Boxing-v5", "dmc/walker-walk", "a:B-v0"]),
    "up to 64 letters, digits and . _ + = -": st.from_regex(r"[a-z0-9._+=-]{1,64}", fullmatch=True),
    "auto, cpu, cuda or cuda:N": st.sampled_from(["auto", "cpu", "cuda", "cuda:0", "cuda:12"]),
    "list of integers >= 1": st.lists(st.integers(1, 64), min_size=1, max_size=6),
    "list [channels, height, width] of integers >= 1": st.lists(st.integers(1, 512), min_size=3, max_size=3),
}


def valid_values(key: str) -> st.SearchStrategy:
    annotation = KEYS[key].annotation
    return st.sampled_from(get_args(annotation)) if get_origin(annotation) is Literal else VALID[describe(KEYS[key])]


@settings(max_examples=300, deadline=None)
@given(data=st.data(), key=st.sampled_from(sorted(KEYS)))
def test_any_allowed_value_is_taken_unless_a_rule_between_keys_forbids_it(data, key):
    """Typed and as a word. A rule's message is told from a type's by not saying what the key accepts."""
    config = load_config([], "train.py").config
    value = data.draw(valid_values(key))
    word = "null" if value is None else str(value)
    for written in (value, word):
        try:
            assert lookup(change(config, (key, written)), key) == (tuple(value) if isinstance(value, list) else value)
        except ConfigError as error:
            assert not str(error).startswith(f"{key} = {written}: must be {describe(KEYS[key])}"), error


WRONG = {
    bool: ["maybe", "2", 2, None, "", [True]],
    int: ["x", "1.5", 1.5, "nan", "inf", None, "", True, "-1", -1, [1], 2**40, "9" * 5000],
    float: ["x", "nan", "inf", float("nan"), None, "", True, "-1", [1.0], "1e999"],
    str: [None, 3, "", " ", "a\nb", "\x00", ["x"]],
    tuple: ["", "a", "[1, x]", [0], [-1, 2], None, 3.5, [[1]], "[[1]]", {}],
}


@pytest.mark.parametrize("key", KEYS)
def test_each_key_refuses_values_of_the_wrong_type_or_range(defaults, key):
    """The message starts with the key, shows the value and says what is allowed."""
    wrong = [3, "a\nb", ["x"]] if key == OPTIONAL else WRONG[type(lookup(defaults, key))]
    for value in wrong:
        with pytest.raises(ConfigError) as caught:
            change(defaults, (key, value))
        message = str(caught.value)
        assert message.startswith(f"{key} = ")
        assert f": must be {describe(KEYS[key])}" in message
        assert message.isprintable()


OPTIONAL = "BasicSettings.SavePath"                                     # null or any text
@pytest.mark.parametrize(
    "key, value",
    [
        ("Models.WorldModel.Encoder.Kernel", 4),
        ("Models.Agent.AC.Gamma", 1.01),
        ("Models.WorldModel.Dropout", 1),
        ("Models.Agent.PPO.EpsilonClip", 0),
        ("Models.WorldModel.Adam.LearningRate", 0),
        ("Models.WorldModel.ClassDim", 1),
        ("JointTrainAgent.BatchLength", 1),
        ("Models.WorldModel.Mamba.ssm_cfg.d_state", 257),
        ("BasicSettings.Seed", 2**32),
        ("BasicSettings.Env_name", "two words"),
        ("BasicSettings.Device", "cuda1"),
        ("n", "a/b"),
        ("n", "x" * 65),
    ],
)
def test_values_just_outside_their_range_are_refused(defaults, key, value):
    with pytest.raises(ConfigError) as caught:
        change(defaults, (key, value))
    assert str(caught.value).endswith(f": must be {describe(KEYS[key])}")


CHOICES = [key for key, field in KEYS.items() if get_origin(field.annotation) is Literal]


@pytest.mark.parametrize("key", CHOICES)
def test_a_choice_is_refused_with_the_list_of_choices(defaults, key):
    with pytest.raises(ConfigError) as caught:
        change(defaults, (key, "something-else"))
    assert all(str(choice) in str(caught.value) for choice in get_args(KEYS[key].annotation))


def test_a_configuration_is_frozen(defaults):
    with pytest.raises(ValueError, match="frozen"):
        defaults.BasicSettings.Seed = 3


# ----------------------------------------------------------------------------------------- rules that tie keys together

TRANSFORMER = ("Models.WorldModel.Backbone", "Transformer")


@pytest.mark.parametrize(
    "pairs, named",
    [
        ([("JointTrainAgent.BatchLength", 1033)], "WorldModelWarmUp = 1032.*BatchLength = 1033"),
        ([("JointTrainAgent.BatchLength", 1018)], "WorldModelWarmUp = 1032.*BatchSize = 16 .*1033 are enough"),
        ([("JointTrainAgent.NumEnvs", 8), ("JointTrainAgent.BatchLength", 130)], "NumEnvs = 8"),
        ([("JointTrainAgent.ImagineContextLength", 1033)], "BehaviourWarmUp = 1032.*1033 are enough"),
        ([("JointTrainAgent.BufferMaxLength", 1031)], "BufferMaxLength = 1031.*WorldModelWarmUp"),
        ([("JointTrainAgent.BehaviourWarmUp", 100001)], "BufferMaxLength.*BehaviourWarmUp = 100001"),
        ([("JointTrainAgent.RealityContextLength", 100001)], "RealityContextLength"),
        ([("BasicSettings.ImageSize", 32)], r"Encoder.InputSize = \[3, 64, 64\]: must be \[3, 32, 32\]"),
        ([("BasicSettings.ImageChannel", 1)], "InChannels = 3"),
        ([("Models.WorldModel.Decoder.InputSize", "[3, 32, 32]")], "Decoder.InputSize"),
        ([("Models.WorldModel.Encoder.Mults", [1] * 8)], "ImageSize = 64: must be a multiple of 128.*Encoder"),
        ([("Models.WorldModel.Decoder.Mults", [1] * 8)], "ImageSize = 64: must be a multiple of 128.*Decoder"),
        ([("Models.WorldModel.Mamba.ssm_cfg.headdim", 48)], "headdim = 48.*1024"),
        ([("Models.WorldModel.Mamba.ssm_cfg.ngroups", 3)], "ngroups = 3.*16 heads"),
        ([TRANSFORMER, ("Models.WorldModel.Transformer.NumHeads", 7)], "NumHeads = 7.*512"),
        ([TRANSFORMER, ("JointTrainAgent.BatchLength", 23)], "BatchLength = 23.*24"),
        ([TRANSFORMER, ("JointTrainAgent.RealityContextLength", 129)], "BatchLength = 128.*129"),
        ([("BasicSettings.Env_name", "dmc/walker-walk"), ("Models.Agent.Unimix_ratio", 0.01)], "Unimix.*continuous"),
        ([("BasicSettings.Device", "cpu"), ("BasicSettings.Kernels", "cuda")], "Kernels = cuda.*Device = cpu"),
        ([("BasicSettings.Device", "cpu"), ("BasicSettings.Kernels", "triton")], "Kernels = triton.*Device = cpu"),
        ([("BasicSettings.Device", "cuda:0"), ("BasicSettings.Kernels", "cpu")], "Kernels = cpu.*Device = cuda:0"),
    ],
)
def test_values_that_contradict_each_other_are_refused_by_name(defaults, pairs, named):
    with pytest.raises(ConfigError, match=named) as caught:
        change(defaults, *pairs)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "pairs",
    [
        [("JointTrainAgent.BatchLength", 1017)],
        [("JointTrainAgent.ImagineContextLength", 1032)],
        [("JointTrainAgent.BufferMaxLength", 1032)],
        [("Models.WorldModel.Backbone", "Mamba"), ("Models.WorldModel.Mamba.ssm_cfg.headdim", 48)],
        [("Models.WorldModel.Transformer.NumHeads", 7)],
        [TRANSFORMER, ("JointTrainAgent.BatchLength", 24)],
        [("BasicSettings.Env_name", "dmc/walker-walk")],
        [("Models.Agent.Unimix_ratio", 0.01)],
        [("Models.WorldModel.Encoder.FirstStrideOne", False), ("Models.WorldModel.Encoder.Mults", [1] * 6)],
    ],
)
def test_values_at_the_edge_of_a_rule_are_accepted(defaults, pairs):
    assert change(defaults, *pairs)


@pytest.mark.parametrize(
    "name, continuous",
    [
        ("dmc/walker-walk", True),
        ("dm_control/walker-walk-v0", True),
        ("dm_walker_walk", True),
        ("dmc_walker_walk", True),
        ("Toy/Reach-v0", True),
        ("ALE/Pong-v5", False),
        ("memory_maze:MemoryMaze-9x9-v0", False),
        ("Toy/Catch-v0", False),
    ],
)
def test_continuous_environments_are_known_by_name(name, continuous):
    assert is_continuous(name) is continuous

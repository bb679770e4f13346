"""Configuration, seeding and device: what every script needs before anything is built.

A configuration is layered: config_files/configure.yaml, then each `--config FILE` in turn, then `--Section.Key value`
words. All layers hold text; the schema (config_files/schema.py) parses it to each key's type, so `4e-5`, `no` or
`16,32` mean the same wherever they are written. Every fault is a ConfigError with one line.
"""

import difflib
import logging
import os
import random
import reprlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml
from pydantic import ValidationError

from config_files.schema import WHOLE_LIMIT, Config, Section, describe, section_of, walk_keys

logger = logging.getLogger("drama.config")

DEFAULTS_FILE = Path(__file__).resolve().parent / "config_files" / "configure.yaml"
RUN_CONFIG_NAME = "config.yaml"                                         # the resolved configuration in a run's folder
_FILE_LIMIT = 1 << 20                                                   # bytes; no configuration is near it


class ConfigError(ValueError):
    """A usage fault, in one line: the key, its value and what is allowed. Scripts exit with code 2."""


@dataclass(frozen=True)
class CommandLine:
    """What the words of a command line say. `given`: the keys that files and words set, as {dotted name: value}."""

    config: Config
    resume: str | None = None
    doctor: bool = False
    debug_batch: str | None = None
    profile: int | None = None
    given: dict[str, Any] = field(default_factory=dict)


# -------------------------------------------------------------------------------------------------------- reading files


class _TextLoader(yaml.BaseLoader):
    """YAML in which every scalar stays text; refuses tags, aliases and keys that are written twice."""

    def compose_node(self, parent: Any, index: Any) -> yaml.Node:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError(f"line {self.peek_event().start_mark.line + 1}: aliases are not allowed")
        node = super().compose_node(parent, index)
        if not node.tag.startswith("tag:yaml.org,2002:") or ":python/" in node.tag:
            raise yaml.YAMLError(f"line {node.start_mark.line + 1}: the tag {node.tag} is not allowed")
        if isinstance(node, yaml.MappingNode):
            _refuse_repeated_keys(node)
        return node


def _refuse_repeated_keys(node: yaml.MappingNode) -> None:
    seen = set()
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise yaml.YAMLError(f"line {key.start_mark.line + 1}: a key must be a word")
        if key.value in seen:
            raise yaml.YAMLError(f"line {key.start_mark.line + 1}: {key.value} stands here a second time")
        seen.add(key.value)


def _read_text(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            raw = file.read(_FILE_LIMIT + 1)
        text = raw.decode("utf-8")
    except OSError as error:
        expected = f"expected a file like {DEFAULTS_FILE.parent.name}/quickstart.yaml"
        raise ConfigError(f"{error.strerror}; {expected}") from error
    except UnicodeDecodeError as error:
        raise ConfigError("not UTF-8 text") from error
    if len(raw) > _FILE_LIMIT:
        raise ConfigError(f"larger than {_FILE_LIMIT} bytes, not a configuration")
    return text


@contextmanager
def _naming(path: str | Path) -> Iterator[None]:
    """Faults found inside name the file."""
    try:
        yield
    except ConfigError as error:
        raise type(error)(f"{path}: {error}") from error


def _read_tree(path: Path) -> dict[str, Any]:
    """The nested mapping in a YAML file, leaves as text or lists of text; an empty file is an empty mapping."""
    text = _read_text(path)
    try:
        tree = yaml.load(text, Loader=_TextLoader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(_one_line(error)) from error
    if tree is None or tree == "":
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"expected sections and keys, found {_short(tree)}")
    return tree


def _one_line(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: not YAML: {error.problem}"
    return " ".join(str(error).split()) or type(error).__name__


def _short(value: Any) -> str:
    return value if isinstance(value, str) and value.isprintable() and 0 < len(value) < 80 else reprlib.repr(value)


# --------------------------------------------------------------------------------------------------------------- layers

_FIELDS = dict(walk_keys())                                             # {dotted name: its field in the schema}
_PARTS = {part for dotted in _FIELDS for part in dotted.split(".")}


class UnknownKey(ConfigError):
    """A name that the schema does not have."""


def _unknown(name: str) -> UnknownKey:
    """An error that names the known key nearest to `name`: by its last part, then by the whole."""

    def likeness(known: str) -> float:
        whole = difflib.SequenceMatcher(None, name.lower(), known.lower()).ratio()
        last = difflib.SequenceMatcher(None, name.lower().split(".")[-1], known.lower().split(".")[-1]).ratio()
        return 2 * last + whole

    return UnknownKey(f"{name}: unknown key; the nearest known one is {max(_FIELDS, key=likeness)}")


def _section_hint(section: str) -> str:
    first = next(known for known in _FIELDS if known.startswith(section + "."))
    return f"this is a section; set one of its keys, like {first}"


def _flatten(tree: Mapping[str, Any], section: type[Section] = Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of each key in a nested mapping; refuses names that the schema does not have."""
    for name, value in tree.items():
        dotted = f"{prefix}{name}"
        if not isinstance(name, str) or name not in section.model_fields:
            raise _unknown(dotted)
        inner = section_of(section.model_fields[name])
        if inner is None:
            yield dotted, value
        elif isinstance(value, Mapping):
            yield from _flatten(value, inner, dotted + ".")
        else:
            raise ConfigError(f"{dotted} = {_short(value)}: {_section_hint(dotted)}")


def _read_layer(path: Path) -> dict[str, Any]:
    """{dotted name: text} of the keys that a YAML file sets."""
    with _naming(path):
        return dict(_flatten(_read_tree(path)))


def _build(values: Mapping[str, Any]) -> Config:
    """A checked Config from {dotted name: value}, which must hold every key."""
    tree: dict[str, Any] = {}
    for dotted, value in values.items():
        *sections, name = dotted.split(".")
        branch = tree
        for part in sections:
            branch = branch.setdefault(part, {})
        branch[name] = value
    for dotted in _FIELDS:
        if dotted not in values:
            raise ConfigError(f"{dotted}: missing; must be {describe(_FIELDS[dotted])}")
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_fault(error.errors()[0], values)) from None


def _fault(error: Mapping[str, Any], values: Mapping[str, Any]) -> str:
    if not error["loc"]:
        return str(error["ctx"]["error"])                               # a rule over several keys; it names them itself
    dotted = ".".join(part for part in error["loc"] if isinstance(part, str) and part in _PARTS)
    limit = f" and <= {WHOLE_LIMIT}" if error.get("ctx", {}).get("le") == WHOLE_LIMIT else ""
    return f"{dotted} = {_short(values[dotted])}: must be {describe(_FIELDS[dotted])}{limit}"


# --------------------------------------------------------------------------------------------- configurations as values


def config_to_dict(config: Config) -> dict[str, Any]:
    """Nested plain values (lists, not tuples), ready for a checkpoint or YAML."""
    return config.model_dump(mode="json")


def flatten_config(config: Config) -> dict[str, Any]:
    """{dotted name: value}."""
    return dict(_flatten(config_to_dict(config)))


def config_from_dict(tree: Mapping[str, Any]) -> Config:
    """The checked configuration of a nested mapping that holds every key, like a checkpoint's or a run folder's."""
    if not isinstance(tree, Mapping):
        raise ConfigError(f"configuration: expected sections and keys, found {_short(tree)}")
    return _build(dict(_flatten(tree)))


def config_from_file(path: str | Path) -> Config:
    """The checked configuration of config.yaml in a run's folder; keys that were added since take their defaults."""
    with _naming(path):
        return config_from_older(_read_tree(Path(path)))


def config_from_older(tree: Mapping[str, Any]) -> Config:
    """Like `config_from_dict`, for a configuration that an earlier version wrote: keys added since take their defaults.

    A user who resumes a run with such keys is told of them by `load_config`.
    """
    return _build({**default_values(), **dict(_flatten(tree))})


def override_config(config: Config, given: Mapping[str, Any]) -> Config:
    """A copy of `config` with {dotted name: value} laid over it, checked again."""
    for dotted in given:
        if dotted not in _FIELDS:
            raise _unknown(dotted)
    return _build({**dict(_flatten(config_to_dict(config))), **given})


def with_absolute_paths(config: Config) -> Config:
    """`config` with a SavePath that means the same model from whatever folder the run is started or gone on with."""
    path = config.BasicSettings.SavePath
    return config if path is None else override_config(config, {"BasicSettings.SavePath": os.path.abspath(path)})


def config_to_yaml(config: Config) -> str:
    """The configuration as YAML, each key with its comment; any YAML reader gets the same types back from it."""
    values, comments, lines = dict(_flatten(config_to_dict(config))), key_comments(), []
    opened: list[str] = []
    for dotted, value in values.items():
        *sections, name = dotted.split(".")
        for depth, section in enumerate(sections):
            if opened[: depth + 1] != sections[: depth + 1]:
                lines.append(f"{'  ' * depth}{section}:")
        opened = sections
        dumped = yaml.safe_dump([value], default_flow_style=True, allow_unicode=True, width=float("inf")).strip()[1:-1]
        lines.append(f"{'  ' * len(sections)}{name}: {dumped}  # {comments[dotted]}")
    return "\n".join(lines) + "\n"


def default_values() -> dict[str, Any]:
    """{dotted name: text} of config_files/configure.yaml."""
    return _read_layer(DEFAULTS_FILE)


def key_comments() -> dict[str, str]:
    """{dotted name: comment} of config_files/configure.yaml; a key without a comment is absent."""
    text = _read_text(DEFAULTS_FILE)
    lines = text.splitlines()

    def walk(node: yaml.MappingNode, prefix: str) -> Iterator[tuple[str, str]]:
        for key, value in node.value:
            if isinstance(value, yaml.MappingNode):
                yield from walk(value, f"{prefix}{key.value}.")
                continue
            rest = lines[value.end_mark.line][value.end_mark.column:].strip()
            if rest.startswith("#") and rest[1:].strip():
                yield prefix + key.value, rest[1:].strip()

    return dict(walk(yaml.compose(text, Loader=_TextLoader), ""))


# --------------------------------------------------------------------------------------------------------- command line


_TRAINING_WORDS = ("--resume", "--debug-batch", "--profile")            # words with a value that only train.py takes


class _Words(NamedTuple):
    files: list[str]
    overrides: dict[str, str]
    resume: str | None
    doctor: bool
    debug_batch: str | None
    profile: int | None
    show_help: bool


def _parse_words(argv: list[str], program: str) -> _Words:
    files: list[str] = []
    overrides: dict[str, str] = {}
    resume, doctor, debug_batch, profile, show_help = None, False, None, None, False
    trains = Path(program).stem == "train"                              # only training resumes and is doctored
    words = iter(argv)
    for word in words:
        if word in ("--help", "-h"):
            show_help = True
            continue
        if word == "--doctor" and trains:
            doctor = True
            continue
        name, given, value = word.partition("=")
        if not name.startswith("--") or name == "--":
            raise ConfigError(f"{_short(word)}: expected --Section.Key value, --config FILE or --help")
        known = name[2:] in _FIELDS or name == "--config" or (name in _TRAINING_WORDS and trains)
        if not known:
            raise _unknown_word(name[2:])
        if not given:
            value = next(words, None)
            if value is None or value.startswith("--"):
                raise ConfigError(f"{name}: needs a value")
        if name == "--config":
            files.append(value)
        elif name == "--resume":
            resume = value
        elif name == "--debug-batch":
            debug_batch = value
        elif name == "--profile":
            profile = _count(name, value)
        else:
            overrides[name[2:]] = value
    return _Words(files, overrides, resume, doctor, debug_batch, profile, show_help)


def _count(name: str, value: str) -> int:
    if not (value.isascii() and value.isdigit() and 0 < int(value) <= WHOLE_LIMIT):
        raise ConfigError(f"{name} = {_short(value)}: must be a whole number >= 1 and <= {WHOLE_LIMIT}")
    return int(value)


def _unknown_word(name: str) -> ConfigError:
    is_section = any(known.startswith(name + ".") for known in _FIELDS)
    return ConfigError(f"{name}: {_section_hint(name)}") if is_section else _unknown(name)


def _with_added_keys(path: Path) -> dict[str, Any]:
    """The keys of a run's own configuration; those that were added since take their defaults, which is told."""
    try:
        own, defaults = _read_layer(path), default_values()
    except UnknownKey as error:
        raise ConfigError(
            f"{error}. A run whose configuration has a key that was removed goes on with the version that wrote it: "
            "origin.json beside it names the commit"
        ) from None
    added = [f"{dotted} {value}" for dotted, value in defaults.items() if dotted not in own]
    if added:
        logger.warning("%s lacks keys that were added since; they take their defaults: %s", path, ", ".join(added))
    return {**defaults, **own}


def load_config(argv: Sequence[str] | None, program: str) -> CommandLine:
    """The checked configuration that a command line asks for.

    argv None: the process's own words. program: the script's name. With --resume the run's own configuration takes the
    place of the defaults. --help prints and leaves with exit code 0.
    """
    words = _parse_words(sys.argv[1:] if argv is None else list(argv), program)
    if words.show_help:
        sys.stdout.write(help_text(program) + "\n")
        raise SystemExit(0)
    if words.resume is None:
        base = default_values()
    else:
        path = Path(words.resume) / RUN_CONFIG_NAME
        if not path.is_file():
            why = f"not a run's folder, it has no {RUN_CONFIG_NAME}" if path.parent.is_dir() else "no such folder"
            raise ConfigError(f"--resume {words.resume}: {why}")
        base = _with_added_keys(path)
    given: dict[str, Any] = {}
    for path in words.files:
        given.update(_read_layer(Path(path)))
    given.update(words.overrides)
    return CommandLine(_build({**base, **given}), words.resume, words.doctor, words.debug_batch, words.profile, given)


def help_text(program: str) -> str:
    """Usage, then every key with its default, what it accepts and its comment."""
    lines = [f"usage: python {program} [--config FILE]... [--Section.Key value]...", ""]
    lines += ["  --config FILE   lay a preset (config_files/*.yaml) over the defaults; repeatable, the later one wins"]
    if Path(program).stem == "train":
        lines += ["  --resume DIR    continue the run in this folder, with its own configuration"]
        lines += ["  --debug-batch FILE  repeat an update that was not finite, from the batch.pt that the run named"]
        lines += ["  --profile N     trace N training steps, once both updates are warm, and say what takes their time"]
        lines += ["  --doctor        say what works on this machine for this configuration, and leave"]
    lines += ["  --help          print this and leave", "", "Keys, their defaults and what they accept:"]
    defaults, comments = default_values(), key_comments()
    for dotted, key_field in _FIELDS.items():
        default = defaults[dotted]
        shown = f"[{', '.join(default)}]" if isinstance(default, list) else default
        lines += [f"  --{dotted} {shown}", f"      {describe(key_field)}. {comments[dotted]}"]
    return "\n".join(lines)


# --------------------------------------------------------------------------------------------------- device and seeding


def resolve_device(name: str) -> torch.device:
    """The device that BasicSettings.Device names: auto is cuda if there is one, else cpu."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda", 0) if count else torch.device("cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= count:
        found = f"has only {count} CUDA device(s)" if count else "has no CUDA device that torch can use"
        raise ConfigError(f"BasicSettings.Device = {name}: this machine {found}; use auto or cpu")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def prepare_determinism(deterministic: bool, device: torch.device) -> None:
    """What has to be said before a process uses CUDA, for cuBLAS reads it then."""
    if deterministic and device.type == "cuda":
        if torch.cuda.is_initialized() and "CUBLAS_WORKSPACE_CONFIG" not in os.environ:
            raise RuntimeError("Deterministic: CUDA is in use already; set CUBLAS_WORKSPACE_CONFIG=:4096:8 before")
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def seed_everything(seed: int, deterministic: bool, device: torch.device) -> None:
    """Seed Python, numpy and torch. deterministic: operations without a deterministic form raise instead of running."""
    prepare_determinism(deterministic, device)
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.deterministic = deterministic
    torch.backends.cudnn.benchmark = not deterministic                  # fixed shapes: the search pays off once
    _seed_streams(seed)


def _seed_streams(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)                                             # every CUDA device too


def get_rng_state() -> dict[str, Any]:
    """States of every random stream, in tensors and plain values (torch.load reads them with weights_only=True)."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "numpy": {
            "name": name,
            "keys": torch.from_numpy(keys.astype(np.int64)),            # uint32 has no place in older torch files
            "position": position,
            "has_gauss": has_gauss,
            "cached": cached,
        },
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Restore what get_rng_state gave. CUDA streams that this machine does not have are left out."""
    python, numpy_state = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    keys = numpy_state["keys"].numpy().astype(np.uint32)
    np.random.set_state(
        (numpy_state["name"], keys, numpy_state["position"], numpy_state["has_gauss"], numpy_state["cached"])
    )
    torch.set_rng_state(state["torch"])
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index, cuda_state in enumerate(state["cuda"][:devices]):
        torch.cuda.set_rng_state(cuda_state, index)


@contextmanager
def isolated_rng(seed: int) -> Iterator[None]:
    """Inside, every random stream starts from `seed`; outside, they go on as if nothing had been drawn."""
    state = get_rng_state()
    _seed_streams(seed)
    try:
        yield
    finally:
        set_rng_state(state)

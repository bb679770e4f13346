"""Runs as results: found in folders, stored for publication, each with a model card.

    results/NAME/config.yaml, metrics.jsonl      as in a run's folder
                 eval/<checkpoint>/              episodes.csv, summary.json, imagined.png
                 pictures/                       learning curve, newest reconstruction and open-loop prediction
                 origin.json                     command, versions, hardware and commit of the training; `note`, by hand
                 model.pt                        weights for eval.py, if they fit in `MODEL_BYTES`
                 CARD.md                         made from the others

Every folder that has config.yaml and metrics.jsonl is a result: a run's, a stored one, each one below a sweep's.
"""

import json
import logging
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from envs.my_atari import game_of, human_normalised_score, reference_scores
from tools.checkpoints import CheckpointError, read_json, read_model, write_atomic
from tools.export import export_model
from tools.provenance import ORIGIN
from tools.run import (
    EPISODE_RETURN,
    REPORTED_EPISODES,
    STEPS_PER_SECOND,
    TOTAL_SECONDS,
    bootstrap_interval,
    duration,
    read_metrics,
)
from utils import (
    RUN_CONFIG_NAME,
    Config,
    config_from_older,
    config_to_dict,
    config_to_yaml,
    flatten_config,
    load_config,
    override_config,
)

logger = logging.getLogger("drama.results")

MODEL_BYTES = 16_000_000  # a larger model is not stored beside its figures
ANYWHERE = {"BasicSettings.RunDir": "runs", "BasicSettings.SavePath": None}  # what a stored configuration says
DEFAULT_SETTING = "default"
LABEL_KEYS = 3  # settings that differ in more keys are numbered
CARD = "CARD.md"
EVALUATION_FACTS = ("mean", "episodes", "mean_interval_95", "greedy")
FACTS = {  # what is read of summary.json and origin.json, with its types
    "checkpoint_step": (int, "integer"),
    "mean": (int | float, "number"),
    "episodes": (int, "integer"),
    "mean_interval_95": (list, "list"),
    "greedy": (bool, "true or false"),
    "hardware": (dict, "object"),
    "versions": (dict, "object"),
    "commit": (str | None, "text"),
    "config": (dict, "object"),
    "command": (str, "text"),
    "note": (str, "text"),
    "run": (str, "text"),
    "resumed": (list, "list"),
}
PIECE_FACTS = ("hardware", "versions", "commit", "command")  # of each process that went on with a run
# Keys in which runs may differ and still be the same setting: where and how fast they ran, what they showed.
SAME_SETTING = (
    "BasicSettings.Env_name", "BasicSettings.Seed", "BasicSettings.RunDir", "BasicSettings.SavePath",
    "BasicSettings.Device", "BasicSettings.Use_cg", "BasicSettings.Compile", "BasicSettings.ReplayBufferOnGPU",
    "BasicSettings.Kernels", "BasicSettings.Deterministic", "JointTrainAgent.SaveEverySteps",
    "JointTrainAgent.SaveModels", "JointTrainAgent.LogEverySteps", "n",
)  # fmt: skip
HOW_LONG = (  # keys in which a run that was extended differs from a copy that was made before
    "JointTrainAgent.SampleMaxSteps", "JointTrainAgent.FreezeWorldModelAfterSteps",
    "JointTrainAgent.FreezeBehaviourAfterSteps",
)  # fmt: skip
SAME_SETTING_SECTIONS = ("Evaluate.", "Wandb.")


class ResultError(RuntimeError):
    """Nothing to report on, or something that can't be stored; the message is one line."""


class Score(NamedTuple):
    """What a run reached: the mean over `episodes` episodes, of an evaluation or of the end of training."""

    mean: float
    episodes: int
    evaluated: bool
    interval: tuple[float, float]  # bootstrap over episodes, 95 %


@dataclass(frozen=True)
class Result:
    """One run: its folder's content, read."""

    folder: Path
    config: Config
    metrics: dict[str, tuple[np.ndarray, np.ndarray]]  # as read_metrics gives them
    evaluation: dict[str, Any] | None  # summary.json of the newest checkpoint's evaluation
    origin: dict[str, Any]
    setting: str = DEFAULT_SETTING  # a label
    differences: str = DEFAULT_SETTING  # the keys behind it

    @property
    def env(self) -> str:
        return self.config.BasicSettings.Env_name

    @property
    def game(self) -> str:
        return game_of(self.env)

    @property
    def seed(self) -> int:
        return self.config.BasicSettings.Seed

    @property
    def steps(self) -> int:
        """The newest environment step that was logged, saved or evaluated."""
        logged = [int(steps[-1]) for steps, _ in self.metrics.values() if len(steps)]
        named = [*self.folder.glob("ckpt/step_*"), *self.folder.glob("eval/step_*")]
        saved = [int(path.name[5:]) for path in named if path.name[5:].isdigit()]
        return max([*logged, *saved], default=0)

    @property
    def unfinished(self) -> bool:
        """Whether it stands at fewer steps than it was configured for."""
        return self.steps < self.config.JointTrainAgent.SampleMaxSteps

    @property
    def evaluated_at(self) -> int:
        """The step of the newest evaluated checkpoint; the newest step where none was evaluated."""
        return (self.evaluation or {}).get("checkpoint_step", self.steps)

    @property
    def name(self) -> str:
        """Game and seed, for links and lists, and how far it is where it is not finished."""
        far = f" ({how_far([self])})" if self.unfinished else ""
        return f"{self.game}, seed {self.seed}{far}"

    def score(self) -> Score | None:
        """Of the newest evaluation; without one the last training episodes', None before the first episode ended."""
        if self.evaluation is not None:
            interval = tuple(self.evaluation["mean_interval_95"])
            return Score(self.evaluation["mean"], self.evaluation["episodes"], True, interval)
        returns = self.metrics.get(EPISODE_RETURN, (None, np.zeros(0)))[1][-REPORTED_EPISODES:]
        if not len(returns):
            return None
        return Score(float(returns.mean()), len(returns), False, bootstrap_interval(returns))

    def normalised(self) -> float | None:
        """The human-normalised score; None for an environment without references, or without a score."""
        score = self.score()
        return None if score is None else human_normalised_score(self.env, score.mean)

    def wall_seconds(self) -> float | None:
        """Wall time of the training, all its processes together; None where it was not logged."""
        _, totals = self.metrics.get(TOTAL_SECONDS, (None, [math.nan]))
        return float(totals[-1]) if math.isfinite(totals[-1]) else None

    def pictures(self) -> dict[str, Path]:
        """The newest picture of each kind, by its caption."""
        kinds = {
            "Reconstructions": "pictures/reconstruction_*.png",
            "Open-loop predictions": "pictures/open_loop_*.png",
            "Imagined rollouts": "eval/*/imagined.png",
        }
        found = {caption: sorted(self.folder.glob(pattern)) for caption, pattern in kinds.items()}
        return {caption: paths[-1] for caption, paths in found.items() if paths}


def how_far(results: Sequence[Result]) -> str:
    """Steps of runs of one environment: `100,000 steps`, or `64,347 of 100,000 steps` where one is not finished."""
    reached, wanted = (sorted(set(numbers)) for numbers in zip(*map(_steps_of, results), strict=True))
    whole = f" of {_span(wanted)}" if any(result.unfinished for result in results) else ""
    return f"{_span(reached)}{whole} steps"


def _steps_of(result: Result) -> tuple[int, int]:
    return result.steps, result.config.JointTrainAgent.SampleMaxSteps


def _span(numbers: Sequence[int]) -> str:
    return f"{numbers[0]:,}" if len(numbers) == 1 else f"{numbers[0]:,} to {numbers[-1]:,}"


def setting_name(setting: str) -> str:
    """What a reader calls a setting that nothing tells from others."""
    return "this repository" if setting == DEFAULT_SETTING else setting


# ----------------------------------------------------------------------------------------------------------------- find


def collect(paths: Iterable[str | Path]) -> list[Result]:
    """The results in the folders and below them, each once, settings labelled; of a run and its copies the furthest.

    Raises:
        ResultError: a path does not exist, or there is no result at all.
    """
    folders: dict[Path, Path] = {}  # by where they really are
    for path in map(Path, paths):
        if not path.is_dir():
            raise ResultError(f"{path}: no such folder, expected a run's, a sweep's or one that holds such")
        found = sorted(file.parent for file in path.rglob("metrics.jsonl") if _is_result(file.parent))
        if not found:
            raise ResultError(f"{path}: no run in it or below it: none has {RUN_CONFIG_NAME} and metrics.jsonl")
        for folder in found:
            folders.setdefault(folder.resolve(), folder)
    return label_settings(without_copies([read_result(folder) for folder in folders.values()]))


def without_copies(results: Iterable[Result]) -> list[Result]:
    """One result for each run: a stored copy beside the run itself would count as another seed."""
    kept: dict[Any, Result] = {}
    for result in results:
        mark = _mark(result)
        known = kept.setdefault(mark, result)
        if known is not result:
            further = (result.steps, result.evaluation is not None) > (known.steps, known.evaluation is not None)
            kept[mark], other = (result, known) if further else (known, result)
            logger.warning("%s is left out: it is the run of %s", other.folder, kept[mark].folder)
    return list(kept.values())


def _mark(result: Result) -> Any:
    """Equal for copies of a run, also where one of them went on: a run that has no name of its own yet is known by how
    long its first lines took, which no other run repeats."""
    steps, rates = result.metrics.get(STEPS_PER_SECOND, ((), ()))
    if "run" in result.origin:
        begun = result.origin["run"]
    elif len(steps):
        begun = (int(steps[0]), float(rates[0]))
    else:
        return id(result)
    setting = tuple(value for key, value in _method_keys(result.config).items() if key not in HOW_LONG)
    return result.env, result.seed, str(setting), begun


def _is_result(folder: Path) -> bool:
    if (folder / RUN_CONFIG_NAME).is_file():
        return True
    logger.warning("%s is passed over: it has no %s", folder, RUN_CONFIG_NAME)
    return False


def read_result(folder: Path) -> Result:
    """A run's folder, or a stored one."""
    found = sorted((folder / "eval").glob("step_*/summary.json"))
    origin = _read_facts(folder / ORIGIN) if (folder / ORIGIN).is_file() else {}
    evaluation = _read_facts(found[-1], EVALUATION_FACTS) if found else None
    config = load_config(["--config", str(folder / RUN_CONFIG_NAME)], "eval.py").config  # over the defaults: may be old
    return Result(folder, config, read_metrics(folder), evaluation, origin)


def _read_facts(path: Path, required: Sequence[str] = ()) -> dict[str, Any]:
    """summary.json or origin.json; ResultError where what is used of it is missing or something else."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise ResultError(f"{path}: not a result, its content is no object")
    for name, (kind, expected) in FACTS.items():
        if (name in content or name in required) and not isinstance(content.get(name), kind):
            raise ResultError(f"{path}: not a result, {name} is no {expected}")
    for piece in content.get("resumed", []):
        known = isinstance(piece, dict) and isinstance(piece.get("step"), int)
        if not known or not all(isinstance(piece.get(name), FACTS[name][0]) for name in PIECE_FACTS):
            raise ResultError(f"{path}: not a result, resumed is no list of processes")
    interval = content.get("mean_interval_95", [0.0, 0.0])
    if len(interval) != 2 or not all(isinstance(bound, int | float) for bound in interval):
        raise ResultError(f"{path}: not a result, mean_interval_95 is no pair of numbers")
    return content


def label_settings(results: Sequence[Result]) -> list[Result]:
    """The results with `setting` and `differences` set, from the keys in which runs of one environment differ.

    `default` where none does; numbered settings where more than `LABEL_KEYS` do.
    """
    flat = [_method_keys(result.config) for result in results]
    first: dict[str, dict[str, Any]] = {}
    for result, keys in zip(results, flat, strict=True):
        first.setdefault(result.env, keys)
    varying = [
        key
        for key in flat[0]
        if any(keys[key] != first[result.env][key] for result, keys in zip(results, flat, strict=True))
    ]
    names = {key: _short_name(key, varying) for key in varying}
    differences = [", ".join(f"{name} {keys[key]}" for key, name in names.items()) or DEFAULT_SETTING for keys in flat]
    numbers = {text: f"setting {i}" for i, text in enumerate(dict.fromkeys(differences), start=1)}
    return [
        replace(result, setting=numbers[text] if len(varying) > LABEL_KEYS else text, differences=text)
        for result, text in zip(results, differences, strict=True)
    ]


def _short_name(key: str, keys: Sequence[str]) -> str:
    """As many of the last parts of `key` as tell it from the other `keys`: Optimiser, or AC.Optimiser."""
    parts = key.split(".")
    tails = (".".join(parts[i:]) for i in range(len(parts) - 1, 0, -1))
    return next((tail for tail in tails if sum(f".{other}".endswith(f".{tail}") for other in keys) == 1), key)


def _method_keys(config: Config) -> dict[str, Any]:
    return {
        key: value
        for key, value in flatten_config(config).items()
        if key not in SAME_SETTING and not key.startswith(SAME_SETTING_SECTIONS)
    }


def grouped(results: Iterable[Result]) -> dict[tuple[str, str], list[Result]]:
    """{(environment, setting): its seeds}, in the order in which they first appear."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.env, result.setting), []).append(result)
    return groups


# ---------------------------------------------------------------------------------------------------------------- store


def store_run(source: Path, folder: Path) -> None:
    """Copy what is published of a run, with a small model.pt if it fits, and write its card.

    Where the run lay on its machine does not go along: RunDir and SavePath are the defaults', paths in the command are
    names.
    """
    if not (source / RUN_CONFIG_NAME).is_file() or not (source / "metrics.jsonl").is_file():
        raise ResultError(f"{source}: not a run's folder, it has no {RUN_CONFIG_NAME} or no metrics.jsonl")
    if folder.resolve() == source.resolve():
        raise ResultError(f"{folder}: is the run's own folder, whose files would be replaced; store it elsewhere")
    result = read_result(source)
    copied = [source / "metrics.jsonl", *source.glob("eval/*/episodes.csv"), *result.pictures().values()]
    copied += [source / "pictures" / "learning_curve.png"]
    written = {source / RUN_CONFIG_NAME: config_to_yaml(override_config(result.config, ANYWHERE))}
    for file in source.glob("eval/*/summary.json"):
        summary = _read_facts(file, (*EVALUATION_FACTS, "config"))
        written[file] = json.dumps({**summary, "config": _anywhere(summary["config"])}, indent=2)
    if result.origin:
        written[source / ORIGIN] = json.dumps(_public(result.origin), indent=1)
    contents = {file: file.read_bytes() for file in copied if file.is_file()}
    contents |= {file: text.encode() for file, text in written.items()}
    for file, data in contents.items():
        target = folder / file.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(target, data)
    for picture in (folder / "pictures").glob("*_[0-9]*.png"):  # of an earlier step, stored before
        if source / picture.relative_to(folder) not in contents:
            picture.unlink()
    _store_model(source, folder / "model.pt")
    write_card(folder)


def _public(origin: Mapping[str, Any]) -> dict[str, Any]:
    """origin.json with commands that do not tell where the run lay."""
    public = {**origin, "command": _without_places(origin.get("command", ""))}
    if "resumed" in origin:
        public["resumed"] = [{**piece, "command": _without_places(piece["command"])} for piece in origin["resumed"]]
    return public


def _without_places(command: str) -> str:
    """A command whose paths, but those below the folder where it was given, are names alone."""
    try:
        words = shlex.split(command)
    except ValueError:  # not one that `origin` wrote
        words = command.split()
    for i, word in enumerate(words):
        option, equals, value = word.rpartition("=")
        if value.startswith(("/", "~", "../")):
            words[i] = option + equals + value.rstrip("/").rpartition("/")[2]
    return shlex.join(words)


def _anywhere(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as plain values, without the paths of its machine."""
    return config_to_dict(override_config(config_from_older(config), ANYWHERE))


def _store_model(source: Path, target: Path) -> None:
    try:
        saved = read_model(source)
    except CheckpointError as error:
        logger.warning("no model is stored: %s", error)
        return
    size = export_model(replace(saved, config=_anywhere(saved.config)), target)
    if size > MODEL_BYTES:
        target.unlink()
        logger.warning("no model is stored: it would take %.1f MB, more than %.1f", size / 1e6, MODEL_BYTES / 1e6)


# ----------------------------------------------------------------------------------------------------------------- card


def write_card(folder: Path) -> Path:
    """CARD.md of a stored result, from its files alone."""
    path = folder / CARD
    write_atomic(path, card(read_result(folder)).encode())
    return path


def card(result: Result) -> str:
    """The model card in Markdown."""
    score = result.score()
    sections = [
        f"# Drama on {result.env}, seed {result.seed}" + (f": {how_far([result])}" if result.unfinished else ""),
        result.origin.get("note", ""),
        _card_table("What it is", _what(result)),
        _card_table("Scores", _scores(result, score)),
        _card_table("Where it was made", _where(result)),
        _use(result, score),
    ]
    return "\n\n".join(part for part in sections if part) + "\n"


def _card_table(title: str, rows: Mapping[str, Any]) -> str:
    lines = [f"| {name} | {value} |" for name, value in rows.items()]
    return "\n".join([f"## {title}", "", "| | |", "| --- | --- |", *lines])


def _what(result: Result) -> dict[str, Any]:
    world_model, training = result.config.Models.WorldModel, result.config.JointTrainAgent
    return {
        "method": "Drama (arXiv 2410.08893): a world model of the game's pixels, a policy trained inside it alone",
        "sequence model, policy": f"{world_model.Backbone}, {result.config.Models.Agent.Policy}",
        "training": f"{how_far([result])} of the environment" + ("; not finished" if result.unfinished else "") + "; "
        f"an update of the world model every {_steps(training.TrainDynamicsEverySteps)}, "
        f"of the policy every {_steps(training.TrainAgentEverySteps)}",
        "seeds": f"one ({result.seed})",
        "configuration": f"[`{RUN_CONFIG_NAME}`]({RUN_CONFIG_NAME})",
        "weights": "`model.pt`, matrices in fp16, without critics: `python eval.py` takes this folder"
        if (result.folder / "model.pt").is_file()
        else "not stored",
    }


def _steps(number: int) -> str:
    return "step" if number == 1 else f"{number} steps"


def _scores(result: Result, score: Score | None) -> dict[str, Any]:
    if score is None:
        return {"score": "no episode ended"}
    low, high = score.interval
    final = not result.unfinished and result.evaluated_at == result.steps
    final = "the final checkpoint" if final else f"the checkpoint at step {result.evaluated_at:,}"
    kind = f"episodes of {final}" if score.evaluated else "last training episodes; not evaluated"
    rows = {"mean return": f"{score.mean:.2f} over {score.episodes} {kind} (95 % interval {low:.2f} to {high:.2f})"}
    if result.evaluation is not None:
        rows["actions"] = "the policy's mode" if result.evaluation["greedy"] else "sampled"
    reference = reference_scores().get(result.game)
    if reference is not None:
        rows["human-normalised"] = f"{result.normalised():.3f} (0 is random play, 1 a human tester)"
        rows["random, human"] = f"{reference['random']:g}, {reference['human']:g}"
        paper = f"{reference['drama_mamba2']:g}" if "drama_mamba2" in reference else "not known"
        rows["paper (5 seeds, 100,000 steps)"] = paper
    return rows


def _where(result: Result) -> dict[str, Any]:
    """Of the training where that is known, else of the evaluation, said as such."""
    rows = {"command": f"`{result.origin['command']}`"} if "command" in result.origin else {}
    seconds, resumed = result.wall_seconds(), result.origin.get("resumed", [])
    if seconds is not None:
        rows["training, wall time"] = duration(seconds) + _pieces(resumed)
    places = [("training", result.origin)]
    for piece in resumed:  # those that ran elsewhere than the one before
        if _place(piece) != _place(places[-1][1]):
            places.append((f"training from step {piece['step']:,}", piece))
    for kind, origin in (*places, ("evaluation", result.evaluation or {})):
        if "hardware" in origin:
            rows[f"{kind}, hardware"] = machine(origin["hardware"])
        if "versions" in origin:
            rows[f"{kind}, versions"] = ", ".join(f"{name} {version}" for name, version in origin["versions"].items())
        if origin.get("commit"):
            rows[f"{kind}, commit"] = f"`{origin['commit']}`"
    return rows or {"origin": "not recorded"}


def _place(origin: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(origin.get(name) for name in ("hardware", "versions", "commit"))


def _pieces(resumed: Sequence[Mapping[str, Any]]) -> str:
    """How often a run was broken off, in words."""
    if not resumed:
        return ""
    steps = ", ".join(f"{piece['step']:,}" for piece in resumed)
    return f" in {len(resumed) + 1} pieces, resumed at step {steps}; steps that were lost and repeated are counted"


def machine(hardware: Mapping[str, Any]) -> str:
    """Hardware as `provenance` gives it, in words; parts that are not known are left out."""
    accelerator = hardware.get("accelerator", "none")
    cores = f"{hardware['cores']} cores" if "cores" in hardware else None
    parts = [accelerator if accelerator != "none" else None, hardware.get("processor"), cores, hardware.get("system")]
    return ", ".join(str(part) for part in parts if part) or "-"


def _use(result: Result, score: Score | None) -> str:
    limits = ["One seed: how far other seeds differ is not known from this run."]
    if result.game in reference_scores() and result.steps < 100_000:
        limits.append(f"{result.steps:,} steps are fewer than the 100,000 of published Atari results: not comparable.")
    if score is not None and not score.evaluated:
        limits.append("The score is that of sampled actions during training, with the policy still changing.")
    lines = "\n".join(f"- {limit}" for limit in limits)
    return (
        "## Intended use and limits\n\n"
        f"For reproducing, comparing and teaching. The policy plays {result.env} as configured here and nothing else; "
        f"it was trained on no data but its own play.\n\n{lines}"
    )

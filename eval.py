"""Evaluate a trained agent in the real environment, and turn runs into tables and figures.

    python eval.py runs/<run> --Evaluate.EpisodeNum 100     play, and write the scores to the run's eval/
    python eval.py runs/<run> --export model.pt             what acting and dreaming need, in fp16, in one small file
    python eval.py runs/<run> --store results/<name>        keep a run for publication: no replay, no optimiser
    python eval.py runs/<run> --archive run.tar.gz          what `train.py --resume` needs on another machine
    python eval.py --report runs/<run> runs/<sweep> ...     a page, a table and figures

The configuration is the one that the checkpoint was trained with; keys on the command line are laid over it. In Python:

    from eval import load
    world_model, agent = load("runs/<run>")
    action, state = agent.act(obs)                  # an episode's first observation (height, width, 3) uint8
    action, state = agent.act(obs, state)           # every further one
"""

import os

# Before torch starts its threads: on few or shared cores, threads that spin at barriers cost up to 20 times the work
# itself (measured with the quickstart on two virtual cores).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import json
import logging
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import gymnasium
import numpy as np
import torch
from tqdm import tqdm

from agents import ActorCriticAgent, build_agent
from env_wrapper import make_vec_env
from envs.common import EnvironmentOutputError, UnusableEnvironment
from envs.my_atari import human_normalised_score
from envs.parallel import WorkerFailed
from envs.spaces import action_space_of
from mamba_ssm.ops.tiers import use_tier
from replay_buffer import Batch, ReplayFileError
from sub_models.acting import Actor, build_actor
from sub_models.world_models import WorldModel, build_world_model
from tools.archive import archive_run
from tools.checkpoints import CheckpointError, SavedModel, read_model, write_atomic
from tools.doctor import check_kernels
from tools.export import export_model, with_critics
from tools.pictures import imagined_picture, save_mp4, save_png
from tools.provenance import provenance
from tools.report import report_command
from tools.results import ResultError, store_run
from tools.run import EVALUATION_RETURN, bootstrap_interval, episode_table
from utils import (
    Config,
    ConfigError,
    config_from_older,
    config_to_dict,
    flatten_config,
    isolated_rng,
    load_config,
    override_config,
    resolve_device,
)

logger = logging.getLogger("drama.eval")

VIDEO_FPS = {"ALE": 15}  # agent steps a second of the real environment: 60 raw frames at frame skip 4
DEFAULT_FPS = 10
CONFIDENCE = 0.95
IMAGINED_SEQUENCES = 4
ENV_NAME = "BasicSettings.Env_name"
# Keys, or how they begin, that decide what is played and how well.
PLAYED_WITH = (ENV_NAME, "Env.", "Models.", "JointTrainAgent.RealityContextLength", "JointTrainAgent.ActOn")
WORKERS = ("Env.WorkerRestarts", "Env.WorkerTimeout")
LONGEST_NAME = 150  # of a folder, in characters


class Episode(NamedTuple):
    """One evaluated episode."""

    environment: int  # index in the vector of environments
    score: float  # sum of raw rewards, all lives
    length: int  # agent steps
    human_normalised: float | None  # (score − random) / (human − random); None where there is no reference


@dataclass(frozen=True)
class Evaluation:
    """Episodes in the order in which they ended, and the frames of one of them where a video is wanted."""

    episodes: list[Episode]
    frames: np.ndarray | None  # (T, H, W, C) uint8, the first episode of the first environment
    actions: np.ndarray | None = None  # (T-1,) int64 or (T-1, A) float32, what was done in those frames
    seeds: tuple[int, int] | None = None  # of the environments and of the policy

    def scores(self) -> np.ndarray:
        return np.array([episode.score for episode in self.episodes])

    def metrics(self) -> dict[str, float]:
        """Scalars for the log of a training run."""
        scores = self.scores()
        return {EVALUATION_RETURN: float(scores.mean()), "evaluation/return_median": float(np.median(scores))}

    def summary(self) -> dict[str, float | int | list[float] | None]:
        """Mean, median and bootstrap interval of the mean, of raw and of human-normalised scores."""
        scores = self.scores()
        normalised = [episode.human_normalised for episode in self.episodes]
        known = None not in normalised
        return {
            "episodes": len(scores),
            "mean": float(scores.mean()),
            "median": float(np.median(scores)),
            "std": float(scores.std()),
            "mean_interval_95": list(bootstrap_interval(scores, CONFIDENCE)),
            "human_normalised_mean": float(np.mean(normalised)) if known else None,
            "human_normalised_median": float(np.median(normalised)) if known else None,
            "human_normalised_interval_95": list(bootstrap_interval(normalised, CONFIDENCE)) if known else None,
        }


def episode_quotas(num_episodes: int, num_envs: int) -> list[int]:
    """Episodes that each environment has to finish: fixed before play, so that short episodes are not preferred."""
    return [num_episodes // num_envs + (i < num_episodes % num_envs) for i in range(num_envs)]


def evaluate(
    world_model: WorldModel,
    agent: ActorCriticAgent,
    config: Config,
    seed: int,
    watch: Callable[[Sequence[Episode]], None] | None = None,
) -> Evaluation:
    """Play `Evaluate.EpisodeNum` episodes. Neither the models' statistics nor any random stream of the caller moves.

    The first episodes of each environment count, as many as its quota; `seed` decides the environments' and the
    policy's randomness, together with `BasicSettings.Seed`. `watch` sees the finished episodes after each step.
    """
    section = config.Evaluate
    name = config.BasicSettings.Env_name
    num_envs = min(section.NumEnvs, section.EpisodeNum)
    actor = build_actor(config, world_model, agent, greedy=section.Greedy)
    missing = np.array(episode_quotas(section.EpisodeNum, num_envs))
    episodes: list[Episode] = []
    frames: list[np.ndarray] = []
    actions: list[np.ndarray] = []
    env_seed, policy_seed = np.random.SeedSequence([config.BasicSettings.Seed, seed, 1]).generate_state(2).tolist()
    with isolated_rng(policy_seed), make_vec_env(name, config, num_envs, env_seed) as env:
        refuse_other_actions(env.action_space, world_model, agent, name)
        obs, is_first, state = env.reset(), np.ones(num_envs, dtype=bool), None
        recording = section.SaveVideo
        while missing.any():
            if recording:
                frames.append(obs[0].copy())
            action, state = actor.act(obs, state, is_first)
            if recording:
                actions.append(action[0].copy())
            result = env.step(action)
            for i in np.flatnonzero(result.finished & (missing > 0)):
                score = float(result.episode_return[i])
                episodes.append(
                    Episode(int(i), score, int(result.episode_length[i]), human_normalised_score(name, score))
                )
                missing[i] -= 1
                if i == 0 and recording:
                    frames.append(result.final_obs[0])
                    recording = False
            obs, is_first = result.obs, result.is_first
            if watch is not None:
                watch(episodes)
    recorded = (np.stack(frames), np.stack(actions)) if frames else (None, None)
    return Evaluation(episodes, *recorded, seeds=(env_seed, policy_seed))


def refuse_other_actions(
    action_space: gymnasium.Space, world_model: WorldModel, agent: ActorCriticAgent, name: str
) -> None:
    """ConfigError where environment `name` has other actions than the agent was trained with."""
    given = int(action_space.n) if hasattr(action_space, "n") else action_space.shape
    trained = world_model.num_actions if world_model.num_actions is not None else (agent.actions.action_dim,)
    if given != trained:
        raise ConfigError(
            f"BasicSettings.Env_name = {name}: it has actions {given}, but the agent was trained with {trained}"
        )


def build_from(saved: SavedModel, config: Config, device: torch.device) -> tuple[WorldModel, ActorCriticAgent]:
    """World model and agent with the weights of a checkpoint."""
    action_space = action_space_of(saved.spaces)
    world_model = build_world_model(config, action_space, device)
    agent = build_agent(config, world_model.feature_dim, action_space, device)
    with_critics(saved, agent).load_into(world_model, agent)
    return world_model, agent


def load(path: str | Path, device: str = "auto", greedy: bool = True) -> tuple[WorldModel, Actor]:
    """A trained world model, and an actor whose `act(obs, state)` plays with it.

    path: a run's folder (its newest checkpoint), a checkpoint's folder, or a model.pt.

    Raises:
        CheckpointError: nothing usable is there; the message says why.
    """
    target = resolve_device(device)
    saved = read_model(path, target)
    config = config_from_older(saved.config)
    world_model, agent = build_from(saved, config, target)
    return world_model, build_actor(config, world_model, agent, greedy)


def evaluation_folder(saved: SavedModel, config: Config) -> Path:
    """RUN/eval/<checkpoint>; beside a file that travels alone `eval`, with its name if that is not model.pt.

    Below it one more folder, such as `with_RealityContextLength-16`, where `config` plays otherwise than the model was
    trained: that is not what the run's score is read from.
    """
    path = saved.path.resolve()
    checkpoint = path.parent
    if checkpoint.parent.name == "ckpt":
        folder = checkpoint.parent.parent / "eval" / checkpoint.name
    else:
        folder = checkpoint / "eval" if path.name == "model.pt" else checkpoint / "eval" / path.stem
    trained, now = flatten_config(config_from_older(saved.config)), flatten_config(config)
    other = [key for key in now if key.startswith(PLAYED_WITH) and now[key] != trained[key] and key not in WORKERS]
    words = [f"in_{now[key]}" if key == ENV_NAME else f"with_{key.split('.')[-1]}-{now[key]}" for key in other]
    return folder / re.sub(r"[^A-Za-z0-9_.]+", "-", "_".join(words))[:LONGEST_NAME] if words else folder


def largest_kept(folder: Path, num_episodes: int) -> Path:
    """`folder`, or one below it where it holds an evaluation of more episodes than `num_episodes`."""
    summary = folder / "summary.json"
    try:
        kept = int(json.loads(summary.read_text())["episodes"])
    except FileNotFoundError:
        return folder
    except (ValueError, KeyError, TypeError):
        logger.warning("%s is damaged and is replaced", summary)
        return folder
    return folder if num_episodes >= kept else folder / f"of_{num_episodes}_episodes"


def tables_of(evaluation: Evaluation, config: Config, step: int, device: torch.device) -> dict[str, bytes]:
    """episodes.csv, and summary.json: scores and all that is needed to get them again."""
    summary = {
        "env": config.BasicSettings.Env_name,
        "checkpoint_step": step,
        "greedy": config.Evaluate.Greedy,
        "num_envs": min(config.Evaluate.NumEnvs, config.Evaluate.EpisodeNum),
        "seed": config.BasicSettings.Seed,
        "environment_seed": evaluation.seeds and evaluation.seeds[0],
        "policy_seed": evaluation.seeds and evaluation.seeds[1],
        **evaluation.summary(),
        **provenance(device),
        "config": config_to_dict(config),
    }
    table = episode_table([episode._asdict() for episode in evaluation.episodes])
    return {"episodes.csv": table.encode(), "summary.json": json.dumps(summary, indent=2).encode()}


def write_video(path: Path, evaluation: Evaluation, config: Config) -> None:
    """The recorded episode; where it can't be written a warning, the scores stand without it."""
    fps = VIDEO_FPS.get(config.BasicSettings.Env_name.split("/")[0], DEFAULT_FPS)
    try:
        save_mp4(path, evaluation.frames, fps)
    except OSError as error:
        logger.warning("%s is not written: %s", path, error)


def print_table(evaluation: Evaluation) -> None:
    """The episodes and their summary, for a terminal."""
    print(f"{'episode':>7}  {'env':>3}  {'score':>10}  {'length':>7}  {'human-normalised':>16}")
    for number, episode in enumerate(evaluation.episodes, start=1):
        normalised = "-" if episode.human_normalised is None else f"{episode.human_normalised:.3f}"
        print(f"{number:>7}  {episode.environment:>3}  {episode.score:>10.2f}  {episode.length:>7}  {normalised:>16}")
    summary = evaluation.summary()
    low, high = summary["mean_interval_95"]
    many = len(evaluation.episodes) > 1
    interval = f"95 % bootstrap interval {low:.3f} to {high:.3f}" if many else "one episode: no interval"
    print(f"mean {summary['mean']:.3f} ({interval}), median {summary['median']:.3f}")
    if summary["human_normalised_mean"] is not None:
        print(
            f"human-normalised mean {summary['human_normalised_mean']:.3f}, "
            f"median {summary['human_normalised_median']:.3f}"
        )


def imagined_frames(
    world_model: WorldModel, agent: ActorCriticAgent, config: Config, evaluation: Evaluation, seed: int
) -> tuple[np.ndarray, np.ndarray] | None:
    """Real contexts (N, L, H, W, C) from the recorded episode and what model and policy make of them (N, H+1, ...).

    uint8 frames; None for an episode that is not recorded or shorter than a context.
    """
    training = config.JointTrainAgent
    length = training.ImagineContextLength
    if evaluation.frames is None or len(evaluation.actions) < length:
        return None
    starts = np.linspace(0, len(evaluation.actions) - length, IMAGINED_SEQUENCES).round().astype(int)
    rows = np.unique(starts)[:, None] + np.arange(length)  # (N, L)
    zeros = torch.zeros(rows.shape, device=world_model.device)
    contexts = Batch(
        torch.as_tensor(evaluation.frames[rows], device=world_model.device),
        torch.as_tensor(evaluation.actions[rows], device=world_model.device),
        zeros,
        zeros,
        torch.as_tensor(rows == 0, device=world_model.device),
    )
    with isolated_rng(seed):
        feature = world_model.imagine(agent, contexts, training.ImagineBatchLength).feature  # (N, H+1, F)
        with torch.no_grad(), world_model.autocast():
            image = world_model.decoder(feature[..., : world_model.stoch_dim].flatten(0, 1)).float()
    image = image.unflatten(0, feature.shape[:2]).movedim(-3, -1)
    return evaluation.frames[rows], (image.clamp(0, 1) * 255).round().byte().cpu().numpy()


USAGE = """usage: python eval.py PATH [--Section.Key value]...   evaluate a run's folder, a checkpoint or a model.pt
       python eval.py PATH --export FILE             write a small file with what acting needs
       python eval.py PATH --store FOLDER            copy what is published of a run
       python eval.py PATH --archive FILE            all that a run goes on with, compressed, for another machine
       python eval.py --report PATH...               a page, a table and figures of runs and sweeps; see --report --help
"""


class Words(NamedTuple):
    """What the words of the command line ask for."""

    path: str | None
    export: str | None
    store: str | None
    archive: str | None
    config: list[str]  # for the configuration


def split_words(words: Sequence[str]) -> Words:
    """The path comes first; the script's own options and keys of the configuration follow in any order."""
    path, words = (words[0], words[1:]) if words and not words[0].startswith("-") else (None, words)
    own: dict[str, str | None] = {"export": None, "store": None, "archive": None}
    rest: list[str] = []
    left = iter(words)
    for word in left:
        name, given, value = word.partition("=")
        if name.removeprefix("--") not in own:
            rest.append(word)
            continue
        value = value if given else next(left, "")
        if not value or value.startswith("--"):
            raise ConfigError(f"{name}: needs a value")
        own[name.removeprefix("--")] = value
    if sum(value is not None for value in own.values()) > 1:
        raise ConfigError("--export, --store and --archive: one at a time")
    return Words(path, **own, config=rest)


class EpisodeBar:
    """Steps of an evaluation, their rate, the finished episodes and their mean, where stderr is a terminal."""

    def __init__(self, num_episodes: int) -> None:
        self.num_episodes = num_episodes
        self._bar = tqdm(unit=" steps", disable=None, leave=False)

    def __enter__(self) -> "EpisodeBar":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def show(self, episodes: Sequence[Episode]) -> None:
        mean = f", mean {np.mean([episode.score for episode in episodes]):.2f}" if episodes else ""
        self._bar.set_description(f"{len(episodes)} of {self.num_episodes} episodes{mean}", refresh=False)
        self._bar.update()


def run_evaluation(saved: SavedModel, config: Config, device: torch.device) -> None:
    """Play, print the scores and write them with a video and a picture of imagination."""
    check_kernels(config)
    with use_tier(config.BasicSettings.Kernels):
        world_model, agent = build_from(saved, config, device)
        with EpisodeBar(config.Evaluate.EpisodeNum) as bar:
            evaluation = evaluate(world_model, agent, config, seed=saved.step, watch=bar.show)
        dreams = imagined_frames(world_model, agent, config, evaluation, seed=saved.step)
    print_table(evaluation)
    folder = largest_kept(evaluation_folder(saved, config), len(evaluation.episodes))
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in tables_of(evaluation, config, saved.step, device).items():
        write_atomic(folder / name, data)
    if dreams is not None:
        save_png(folder / "imagined.png", imagined_picture(*dreams))
    if evaluation.frames is not None:
        write_video(folder / "episode.mp4", evaluation, config)
    print(f"results are in {folder}")


def evaluation_command(argv: Sequence[str]) -> None:
    """`eval.py PATH ...`: evaluate, export, store or archive."""
    words = split_words(argv)
    if "--help" in words.config or "-h" in words.config:
        print(USAGE)
    command = load_config(words.config, "eval.py")
    path = words.path or command.config.BasicSettings.SavePath
    if path is None:
        raise ConfigError(
            "what to evaluate? python eval.py PATH: a run's folder, a checkpoint or a model.pt; see --help"
        )
    if words.store is not None:
        store_run(Path(path), Path(words.store))
        print(f"stored in {words.store}")
        return
    if words.archive is not None:
        archived = archive_run(Path(path), Path(words.archive))
        sizes = f"{archived.after / 1e6:.1f} MB of {archived.before / 1e6:.1f}"
        print(f"{words.archive}: {archived.checkpoint}, {sizes}; unpack it in runs/ and --resume the folder")
        return
    device = resolve_device(command.config.BasicSettings.Device)
    saved = read_model(path, device)
    if words.export is not None:
        print(f"{words.export}: {export_model(saved, words.export) / 1e6:.2f} MB")
        return
    run_evaluation(saved, override_config(config_from_older(saved.config), command.given), device)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of evaluation; returns the exit code: 0, 2 for a fault of usage, 1 for anything else."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if words[:1] == ["--report"]:
            report_command(words[1:])
        else:
            evaluation_command(words)
    except (ConfigError, UnusableEnvironment) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (CheckpointError, ReplayFileError, EnvironmentOutputError, WorkerFailed, ResultError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

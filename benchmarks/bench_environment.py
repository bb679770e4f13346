"""Where an agent step of an Atari game goes, from the emulator to a row of the replay buffer.

    python benchmarks/bench_environment.py [--games Pong,Breakout,Seaquest] [--repeats 500]

Each part is timed alone, in the process that trains. The last two are what train.py asks for at each step: the
environment behind gymnasium's vector interface, and the row's way into the buffer. Median, 10th and 90th percentile in
microseconds. Writes benchmarks/results/environment_<device>.json.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.bench_replay import host_time
from env_wrapper import make_env
from envs.common import resize_image
from tools.provenance import provenance
from train import build, make_env_vector
from utils import Config, load_config, override_config, resolve_device

RESULTS = Path(__file__).parent / "results"


def stepping(env: object, actions: int) -> Callable[[], None]:
    """One random step of a gymnasium environment, and a reset where it ended the episode."""
    rng = np.random.default_rng(0)
    env.reset()

    def step() -> None:
        _, _, terminated, truncated, _ = env.step(int(rng.integers(actions)))
        if terminated or truncated:
            env.reset()

    return step


def measure(config: Config, repeats: int) -> dict[str, dict[str, float]]:
    """The parts of a step of one game, from the inside out."""
    name = config.BasicSettings.Env_name
    episode = make_env(name, config, 0)
    game, actions = episode.env, int(episode.action_space.n)
    screens = np.zeros((2, *game.ale.getScreenDims(), 3), np.uint8)
    parts: dict[str, Callable[[], object]] = {
        "environment with its checks": stepping(episode, actions),
        "environment": stepping(game, actions),
        "one raw frame": lambda: (game.ale.game_over() and game.ale.reset_game()) or game.ale.act(0),
        "one screen in colour": lambda: game.ale.getScreenRGB(screens[0]),
        "maximum of two": lambda: screens.max(axis=0),
        "resize": lambda: resize_image(screens[0], game.image_size),
    }
    figures = {part: host_time(call, repeats) for part, call in parts.items()}
    episode.close()
    device = resolve_device(config.BasicSettings.Device)
    with make_env_vector(config, 0) as env:
        _, _, replay = build(config, env, device)
        env.reset()
        action = np.zeros(1, np.int64)
        result = env.step(action)
        row = (result.obs, action, result.reward, result.terminated, result.is_first)
        figures["vector environment"] = host_time(lambda: env.step(action), repeats)
        figures["row into the buffer"] = host_time(lambda: replay.append(*row), repeats)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--games", default="Pong,Breakout,Seaquest", help="comma-separated")
    parser.add_argument("--repeats", type=int, default=500)
    parser.add_argument("--out", type=Path, help="JSON file")
    options, words = parser.parse_known_args()
    config = load_config(words, "train.py").config
    device = resolve_device(config.BasicSettings.Device)
    report = {**provenance(device), "games": {}}
    for game in options.games.split(","):
        given = {"BasicSettings.Env_name": f"ALE/{game}-v5", "BasicSettings.Compile": "false"}
        report["games"][game] = measure(override_config(config, given), options.repeats)
        for part, figures in report["games"][game].items():
            print(f"{game:<12}{part:<36}{figures['median_us']:>9.1f} us", flush=True)
    out = options.out or RESULTS / f"environment_{device.type}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

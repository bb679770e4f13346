"""Atari 2600 games through the Arcade Learning Environment's own interface.

One agent step repeats the action for `frame_skip` raw frames (fewer when the game ends) and shows the pixelwise maximum
of the last two raw frames *of that step*, so that sprites which flicker every other frame stay visible and nothing of
an earlier step or episode shines through. A step of a single raw frame, and a reset, show that frame as it is.
"""

import csv
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np

from envs.common import UnknownEnvironment, resize_image

ATARI_100K_GAMES = (
    "Alien", "Amidar", "Assault", "Asterix", "BankHeist", "BattleZone", "Boxing", "Breakout", "ChopperCommand",
    "CrazyClimber", "DemonAttack", "Freeway", "Frostbite", "Gopher", "Hero", "Jamesbond", "Kangaroo", "Krull",
    "KungFuMaster", "MsPacman", "Pong", "PrivateEye", "Qbert", "RoadRunner", "Seaquest", "UpNDown",
)  # fmt: skip
MAX_RAW_FRAMES = 108_000                                               # 30 minutes of play at 60 frames/s
NOOP = 0                                                               # the emulator's number of the action
TWO_PLAYERS_ONLY = frozenset({"combat", "joust", "maze_craze", "warlords"})
SCORES_FILE = Path(__file__).resolve().parent.parent / "config_files" / "atari_scores.csv"


class Atari(gymnasium.Env):
    """One game.   obs (S, S, 3) uint8, S = image_size; minimal action set; info has `life_loss` and `lives`.

    repeat_action_probability: chance at each raw frame that the previous frame's action is repeated (sticky actions).
        Drawn here and not by the emulator, whose saved states lack the previous action.
    noop_max: with n > 0 each episode opens with 1..n raw frames of no-op, drawn uniformly.
    max_raw_frames: raw frames of an episode after which it is truncated.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}

    def __init__(
        self,
        rom: str,
        image_size: int,
        frame_skip: int,
        repeat_action_probability: float,
        noop_max: int,
        max_raw_frames: int = MAX_RAW_FRAMES,
    ):
        import ale_py
        from ale_py import roms

        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)     # before the first interface prints its banner
        self.ale = ale_py.ALEInterface()
        self.ale.setFloat("repeat_action_probability", 0.0)
        self._decode_state = ale_py.ALEState
        self._rom_path = roms.get_rom_path(rom)
        self._load_rom(seed=0)                                         # the action set is known only then
        self._seeded = False
        self.image_size, self.frame_skip = image_size, frame_skip
        self.repeat_action_probability = repeat_action_probability
        self.noop_max, self.max_raw_frames = noop_max, max_raw_frames
        self.actions = [action.value for action in self.ale.getMinimalActionSet()]
        self.action_space = gymnasium.spaces.Discrete(len(self.actions))
        self.observation_space = gymnasium.spaces.Box(0, 255, (image_size, image_size, 3), np.uint8)
        height, width = self.ale.getScreenDims()
        self._screens = np.zeros((2, height, width, 3), np.uint8)      # the last two raw frames, written in turn
        self._lives, self._last_action = 0, NOOP

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None or not self._seeded:
            self._load_rom(int(self.np_random.integers(2**31 - 1)))
            self._seeded = True
        self.ale.reset_game()
        self._last_action = NOOP
        self._play_noops()
        self._lives = self.ale.lives()
        self.ale.getScreenRGB(self._screens[0])
        return resize_image(self._screens[0], self.image_size), {"life_loss": False, "lives": self._lives}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        reward, terminated, frames = 0.0, False, 0
        while frames < self.frame_skip and not terminated:
            reward += self.ale.act(self._sticky(self.actions[action]))
            self.ale.getScreenRGB(self._screens[frames % 2])
            frames += 1
            terminated = self.ale.game_over(with_truncation=False)
        screen = self._screens[0] if frames == 1 else self._screens.max(axis=0)
        lives = self.ale.lives()
        info = {"life_loss": lives < self._lives, "lives": lives}
        self._lives = lives
        truncated = not terminated and self.ale.getEpisodeFrameNumber() >= self.max_raw_frames
        return resize_image(screen, self.image_size), reward, terminated, truncated, info

    def get_state(self) -> dict[str, Any]:
        emulator = self.ale.cloneState(include_rng=True).serialize()
        return {
            "emulator": emulator,
            "lives": self._lives,
            "last_action": self._last_action,
            "seeded": self._seeded,
            "rng": self.np_random.bit_generator.state,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        emulator = self._decode_state(state["emulator"])
        self.ale.reset_game()
        if emulator.getEpisodeFrameNumber() > 0:                       # Qbert's future depends on whether a frame was
            self.ale.act(NOOP)                                         # played since the reset: not in the saved state
        self.ale.restoreState(emulator)
        self._lives, self._last_action, self._seeded = state["lives"], state["last_action"], state["seeded"]
        self.np_random.bit_generator.state = state["rng"]

    def _sticky(self, action: int) -> int:
        if self.repeat_action_probability == 0.0 or self.np_random.random() >= self.repeat_action_probability:
            self._last_action = action
        return self._last_action

    def _load_rom(self, seed: int) -> None:
        self.ale.setInt("random_seed", seed)
        self.ale.loadROM(self._rom_path)                               # the emulator takes a seed only while loading

    def _play_noops(self) -> None:
        if self.noop_max == 0:
            return
        for _ in range(int(self.np_random.integers(1, self.noop_max + 1))):
            self.ale.act(NOOP)
            if self.ale.game_over(with_truncation=False):
                self.ale.reset_game()


def atari_games() -> dict[str, str]:
    """All playable games: name as in `ALE/<name>-v5` -> rom id (`MsPacman` -> `ms_pacman`)."""
    from ale_py import roms

    playable = sorted(set(roms.get_all_rom_ids()) - TWO_PLAYERS_ONLY)
    return {rom.title().replace("_", ""): rom for rom in playable}


def game_of(name: str) -> str:
    """`ALE/MsPacman-v5` or `ALE/MsPacman` -> `MsPacman`."""
    return name.removeprefix("ALE/").removesuffix("-v5")


def build_atari(
    name: str, image_size: int, frame_skip: int, repeat_action_probability: float, noop_max: int
) -> Atari:
    """`name` is `ALE/<game>-v5`."""
    games = atari_games()
    if game_of(name) not in games:
        raise UnknownEnvironment(name, "no such Atari game", [f"ALE/{game}-v5" for game in games])
    return Atari(games[game_of(name)], image_size, frame_skip, repeat_action_probability, noop_max)


def reference_scores() -> dict[str, dict[str, float]]:
    """Game -> {method: raw score} for the Atari100k games; a method without a known score for a game is left out."""
    with SCORES_FILE.open(newline="") as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        return {row.pop("game"): {method: float(cell) for method, cell in row.items() if cell} for row in rows}


def human_normalised_score(game: str, score: float) -> float | None:
    """(score - random) / (human - random).   `game` is `Pong` or `ALE/Pong-v5`; None where there is no reference."""
    reference = reference_scores().get(game_of(game))
    if reference is None:
        return None
    return (score - reference["random"]) / (reference["human"] - reference["random"])

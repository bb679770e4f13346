"""Toy tasks drawn in numpy, for the quickstart and the learning tests. Observations: uint8 (S, S, 3), S = image_size.

Catch   a ball falls through a 10 x 5 grid, a one-cell paddle on the bottom row moves left, stays or moves right;
        +1 if it is under the ball at the end, -1 otherwise. A paddle that ignores the ball catches one in five: -0.6.
Recall  the first frame is filled with one of 3 colours, `delay` frames of brightening grey follow, then a white square
        asks, for 4 frames: from the second on, each action with the colour's index pays 1/3. Whoever does not remember
        gets 1/3 in all.
Reach   a white point, anywhere in [-1, 1]^2 at first, moves by 0.2 x action in each axis; every step pays max(0, 1 -
        distance to the green target), which lies in one of four places; 20 steps, then the episode is truncated.
        Random actions and none at all earn about 4, the straight way to the target 17.8.
"""

from typing import Any, ClassVar

import gymnasium
import numpy as np

from envs.common import UnknownEnvironment

WHITE = (255, 255, 255)
RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)


class ToyEnv(gymnasium.Env):
    """A task whose whole state is the attributes named in `state_names` (plain values) and the random generator."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}
    state_names: tuple[str, ...] = ()

    def __init__(self, image_size: int, action_space: gymnasium.Space):
        self.image_size = image_size
        self.observation_space = gymnasium.spaces.Box(0, 255, (image_size, image_size, 3), np.uint8)
        self.action_space = action_space

    def get_state(self) -> dict[str, Any]:
        return {"rng": self.np_random.bit_generator.state, **{name: getattr(self, name) for name in self.state_names}}

    def set_state(self, state: dict[str, Any]) -> None:
        self.np_random.bit_generator.state = state["rng"]
        for name in self.state_names:
            setattr(self, name, state[name])

    def _blank(self) -> np.ndarray:
        return np.zeros((self.image_size, self.image_size, 3), np.uint8)


class Catch(ToyEnv):
    """Actions: 0 left, 1 stay, 2 right. An episode has ROWS - 1 = 9 steps."""

    ROWS, COLUMNS = 10, 5
    state_names = ("ball_row", "ball_column", "paddle")

    def __init__(self, image_size: int):
        super().__init__(image_size, gymnasium.spaces.Discrete(3))
        self.ball_row = self.ball_column = self.paddle = 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.ball_row = 0
        self.ball_column = int(self.np_random.integers(self.COLUMNS))
        self.paddle = self.COLUMNS // 2
        return self._draw(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.paddle = min(max(self.paddle + int(action) - 1, 0), self.COLUMNS - 1)
        self.ball_row += 1
        terminated = self.ball_row == self.ROWS - 1
        reward = (1.0 if self.paddle == self.ball_column else -1.0) if terminated else 0.0
        return self._draw(), reward, terminated, False, {}

    def _draw(self) -> np.ndarray:
        image = self._blank()
        self._fill(image, self.ROWS - 1, self.paddle, GREEN)
        self._fill(image, self.ball_row, self.ball_column, WHITE)
        return image

    def _fill(self, image: np.ndarray, row: int, column: int, colour: tuple[int, int, int]) -> None:
        size = self.image_size
        rows = slice(row * size // self.ROWS, (row + 1) * size // self.ROWS)
        columns = slice(column * size // self.COLUMNS, (column + 1) * size // self.COLUMNS)
        image[rows, columns] = colour


class Recall(ToyEnv):
    """Actions: the index in COLOURS. An episode has delay + QUESTION + 2 steps.

    With `varies` each episode draws its delay from 0 to `delay`: whoever has learned to keep the colour over a few
    steps keeps it a few more, which a fixed long delay does not let one begin with.

    Three more things make it learnable, and none says what the colour was. The wait brightens, so that a model can tell
    without counting when the question comes. The colour is shown again after the question: what a model has to predict
    there tells it that the colour is worth keeping; the reward alone, which only says whether colour and action met,
    takes far longer to do so. And the question lasts: before its first frame has been seen a model's state need not
    show what it remembers, while it waits, and a policy that acts on predictions hardly finds it there.
    """

    COLOURS = (RED, GREEN, BLUE)
    BRIGHTEST_WAIT, QUESTION = 127, 4
    state_names = ("delay", "colour", "time")

    def __init__(self, image_size: int, delay: int, varies: bool = False):
        super().__init__(image_size, gymnasium.spaces.Discrete(len(self.COLOURS)))
        self.delay = self.longest_delay = delay
        self.varies = varies
        self.colour = self.time = 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.colour = int(self.np_random.integers(len(self.COLOURS)))
        if self.varies:
            self.delay = int(self.np_random.integers(self.longest_delay + 1))
        self.time = 0
        return self._draw(), {}

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state({"delay": self.longest_delay, **state})  # states of earlier versions, which did not vary it

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        answers = self.delay + 1 < self.time <= self.delay + self.QUESTION
        reward = 1.0 / (self.QUESTION - 1) if answers and int(action) == self.colour else 0.0
        self.time += 1
        return self._draw(), reward, self.time == self.delay + self.QUESTION + 2, False, {}

    def _draw(self) -> np.ndarray:
        image = self._blank()
        image[:] = self.BRIGHTEST_WAIT * min(self.time, self.delay + 1) // (self.delay + 1)
        if self.time in (0, self.delay + self.QUESTION + 1):
            image[:] = self.COLOURS[self.colour]
        elif self.time > self.delay:
            quarter = self.image_size // 4
            image[quarter:-quarter, quarter:-quarter] = WHITE
        return image


class Reach(ToyEnv):
    """Continuous actions: the velocity in x and y, Box(-1, 1).

    Few targets, so that some dozens of episodes show a model all of them: with targets anywhere it would have to make
    sense of a new one in each episode, for which it takes thousands.
    """

    STEP, EPISODE_LENGTH, TARGET = 0.2, 20, 0.6                        # targets at (+-TARGET, +-TARGET)
    state_names = ("point", "target", "time")

    def __init__(self, image_size: int):
        super().__init__(image_size, gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32))
        self.point = self.target = [0.0, 0.0]                          # x, y in -1..1
        self.time = 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.point = self.np_random.uniform(-1.0, 1.0, 2).tolist()
        self.target = (self.TARGET * self.np_random.choice([-1.0, 1.0], 2)).tolist()
        self.time = 0
        return self._draw(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        moved = np.asarray(self.point) + self.STEP * np.clip(np.asarray(action, np.float64), -1.0, 1.0)
        self.point = np.clip(moved, -1.0, 1.0).tolist()
        self.time += 1
        distance = float(np.hypot(self.point[0] - self.target[0], self.point[1] - self.target[1]))
        return self._draw(), max(0.0, 1.0 - distance), False, self.time == self.EPISODE_LENGTH, {}

    def _draw(self) -> np.ndarray:
        image = self._blank()
        self._square(image, self.target, GREEN, self.image_size // 5)
        self._square(image, self.point, WHITE, self.image_size // 8)
        return image

    def _square(self, image: np.ndarray, centre: list[float], colour: tuple[int, int, int], side: int) -> None:
        left, top = (round((position + 1.0) / 2.0 * (self.image_size - side)) for position in centre)
        image[top : top + side, left : left + side] = colour


TOY_NAMES = ("Toy/Catch-v0", "Toy/Recall-v0", "Toy/Reach-v0")


def build_toy(name: str, image_size: int, recall_delay: int, recall_varies: bool) -> ToyEnv:
    """`name` is one of TOY_NAMES; `recall_delay` is the number of Recall's frames between colour and question, with
    `recall_varies` at most."""
    if name == "Toy/Catch-v0":
        return Catch(image_size)
    if name == "Toy/Recall-v0":
        return Recall(image_size, recall_delay, recall_varies)
    if name == "Toy/Reach-v0":
        return Reach(image_size)
    raise UnknownEnvironment(name, "no such toy task", TOY_NAMES)

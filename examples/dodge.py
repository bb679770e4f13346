"""An environment of one's own, and training on it. From the repository's root:

    python train.py --config config_files/quickstart.yaml --BasicSettings.Env_name examples.dodge:Dodge-v0
"""

import gymnasium
import numpy as np


class Dodge(gymnasium.Env):
    """Blocks fall in three lanes; every block that is dodged pays 1, a hit ends the episode."""

    observation_space = gymnasium.spaces.Box(0, 255, (32, 32, 3), np.uint8)
    action_space = gymnasium.spaces.Discrete(3)                        # left, stay, right

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.lane, self.block, self.height = 1, int(self.np_random.integers(3)), 0
        return self.picture(), {}

    def step(self, action):
        self.lane = min(max(self.lane + int(action) - 1, 0), 2)
        self.height += 1
        landed, hit = self.height == 3, self.height == 3 and self.lane == self.block
        if landed:
            self.block, self.height = int(self.np_random.integers(3)), 0
        return self.picture(), float(landed and not hit), hit, False, {}

    def picture(self):
        image = np.zeros((32, 32, 3), np.uint8)
        image[8 * self.height : 8 * self.height + 8, 11 * self.block : 11 * self.block + 10] = (255, 80, 0)
        image[24:, 11 * self.lane : 11 * self.lane + 10] = 255
        return image


gymnasium.register("Dodge-v0", Dodge, max_episode_steps=30)            # a time limit: the episode is truncated

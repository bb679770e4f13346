"""Result folders made up for tests: what a run leaves behind, with figures that a test chooses."""

import json

import numpy as np

from tools.pictures import save_png
from utils import config_to_dict, config_to_yaml, load_config


def make_result(folder, env="ALE/Pong-v5", seed=0, returns=(-21.0, -20.0), evaluation=None, **keys):
    """A run's folder. returns: of its training episodes; evaluation: scores of the final checkpoint's episodes."""
    words = [f"--BasicSettings.Env_name={env}", f"--BasicSettings.Seed={seed}"]
    words += [f"--{key.replace('__', '.')}={value}" for key, value in keys.items()]
    folder.mkdir(parents=True)
    config = load_config(words, "train.py").config
    (folder / "config.yaml").write_text(config_to_yaml(config))
    lines = [{"step": 1000 * (i + 1), "episode/return": value} for i, value in enumerate(returns)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "pictures").mkdir()
    for name in ("reconstruction_000000100", "reconstruction_000002000", "open_loop_000002000"):
        save_png(folder / "pictures" / f"{name}.png", np.full((8, 8, 3), seed, np.uint8))
    if evaluation is not None:
        target = folder / "eval" / "step_000001000"
        target.mkdir(parents=True)
        mean = float(np.mean(evaluation))
        summary = {"mean": mean, "episodes": len(evaluation), "mean_interval_95": [mean - 1, mean + 1], "greedy": True}
        summary["checkpoint_step"] = 1000
        summary |= {"hardware": {"accelerator": "GPU of a test"}, "versions": {"torch": "2"}, "commit": "abcdef012345"}
        summary["config"] = config_to_dict(config)
        (target / "summary.json").write_text(json.dumps(summary))
    return folder

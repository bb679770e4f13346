"""The environment benchmark: every part of a step is timed."""

from benchmarks.bench_environment import measure
from utils import load_config


def test_each_part_of_a_step_is_timed():
    words = ["--config", "tests/tiny.yaml", "--BasicSettings.Env_name", "ALE/Pong-v5", "--BasicSettings.Device", "cpu"]
    figures = measure(load_config(words, "train.py").config, repeats=3)
    assert list(figures)[-2:] == ["vector environment", "row into the buffer"]
    assert all(figure["median_us"] > 0 and figure["repeats"] == 3 for figure in figures.values())
    assert figures["environment"]["median_us"] > figures["one raw frame"]["median_us"]

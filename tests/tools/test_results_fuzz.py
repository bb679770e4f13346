"""Results that somebody else made, or that were damaged: one line, or figures, whatever is in their files."""

import json
import random

import pytest

import tools.results
from tests.tools.made_results import make_result
from tests.tools.test_checkpoints import mutated
from tools.checkpoints import CheckpointError
from tools.results import ResultError, card, read_result
from utils import load_config

PIECE = {"command": "train.py", "hardware": {"cpu": "x"}, "versions": {"torch": "2"}, "commit": None}
ORIGIN = {**PIECE, "note": "n", "resumed": [{"step": 3, "seconds": 1.5, **PIECE}]}
FILES = ["metrics.jsonl", "origin.json", "eval/step_000001000/summary.json"]


def other_value(content, rng):
    """The JSON with one value replaced by something of another type or size, or left out."""
    whole = tree = json.loads(content)
    while (name := rng.choice(sorted(tree))) == "resumed" and rng.random() < 0.7:
        tree = tree["resumed"][0]
    values = [None, True, -1, 1e308, "x", [], [1], ["a", "b"], {}, {"a": []}, 10**30]
    if rng.random() < 0.2:
        del tree[name]
    else:
        tree[name] = rng.choice(values)
    return json.dumps(whole).encode()


@pytest.mark.parametrize("count", [150, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FILES)
def test_mutated_results_give_clean_errors_or_a_card(tmp_path, monkeypatch, name, count):
    """config.yaml has such a test of its own; here it is read once, which takes long."""
    folder = make_result(tmp_path / "run", evaluation=[1.0, 2.0])
    (folder / "origin.json").write_text(json.dumps(ORIGIN))
    command = load_config(["--config", str(folder / "config.yaml")], "eval.py")
    monkeypatch.setattr(tools.results, "load_config", lambda words, program: command)
    path, rng, refused = folder / name, random.Random(5), 0
    with path.open("a") as file:
        file.write('{"step": 2000, "time/total_seconds": 90.0}\n' if name == "metrics.jsonl" else "")
    original = path.read_bytes()
    for _ in range(count):
        change = other_value if name.endswith(".json") and rng.random() < 0.5 else mutated
        path.write_bytes(change(original, rng))
        try:
            assert card(read_result(folder)).startswith("# Drama on ")
        except (CheckpointError, ResultError) as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > count // 20 or name == "metrics.jsonl"

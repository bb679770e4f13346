"""What a fresh clone needs is written down: requirements, the README's commands, one version."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DISTRIBUTIONS = {"cv2": "opencv-python-headless", "yaml": "PyYAML"}          # where they differ from the module
OPTIONAL = {"triton", "causal-conv1d", "huggingface-hub", "safetensors"}       # imported only where found
SOURCE = ("*.py", "envs/**/*.py", "tools/**/*.py", "sub_models/**/*.py", "mamba_ssm/**/*.py")
TESTS = ("tests/**/*.py", "benchmarks/**/*.py")


def pins(name: str) -> set[str]:
    """The distributions that a requirements file and those that it includes pin, in lower case."""
    found: set[str] = set()
    for line in (ROOT / name).read_text().splitlines():
        if line.startswith("-r "):
            found |= pins(line[3:])
        elif line and not line.startswith("#"):
            distribution, _ = line.split("==")
            found.add(distribution.partition("[")[0].lower())
    return found


def imported_distributions(*patterns: str) -> set[str]:
    """What the files import that is neither ours nor Python's, in lower case."""
    names = set()
    for path in {path for pattern in patterns for path in ROOT.glob(pattern)}:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names.add(node.module.split(".")[0])
    ours = {path.stem for pattern in ("*.py", "benchmarks/*.py") for path in ROOT.glob(pattern)}
    ours |= {path.name for path in ROOT.iterdir() if path.is_dir()}
    foreign = names - ours - set(sys.stdlib_module_names)
    return {DISTRIBUTIONS.get(name, name.replace("_", "-")).lower() for name in foreign}


def test_every_imported_package_is_pinned():
    """The program's own in requirements.txt, those of extras apart, the tests' besides."""
    wanted = imported_distributions(*SOURCE) - OPTIONAL
    files = {path.name for path in ROOT.glob("requirements-*.txt")} - {"requirements-dev.txt"}
    extras = set().union(*map(pins, files))
    assert sorted(wanted - pins("requirements.txt") - extras) == []
    assert sorted(imported_distributions(*TESTS) - OPTIONAL - pins("requirements-dev.txt") - extras) == []


def test_the_readme_opens_with_two_commands_of_one_line():
    blocks = re.findall(r"^```\w*\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.M | re.S)
    train, test = blocks[:2]
    for block in (train, test):
        assert block.count("\n") == 1
        assert block.startswith("python3 -m venv .venv && . .venv/bin/activate && pip install -r requirements")
    assert "python train.py --config config_files/quickstart.yaml" in train
    assert "-m pytest" in test


def test_the_readme_names_files_that_exist():
    text, presets = (ROOT / "README.md").read_text(), ROOT / "config_files"
    named = re.findall(r"`((?:[\w.]+/)*[\w-]+\.(?:py|yaml|txt|md))`", text)
    named += re.findall(r"config_files/\w+\.yaml", text)
    missing = {name for name in named if not ((ROOT / name).exists() or (presets / name).exists())}
    assert missing == {"config.yaml"}, "the one in a run's folder"
    assert all(path.name in text for path in presets.glob("*.yaml"))


@pytest.mark.skipif(not (ROOT / ".ci").is_dir(), reason="an image of the repository leaves it out")
def test_the_ci_script_parses():
    subprocess.run(["bash", "-n", str(ROOT / ".ci" / "run")], check=True)


def test_the_version_stands_in_the_package_alone():
    assert re.search(r"version=[\"']", (ROOT / "setup.py").read_text()) is None

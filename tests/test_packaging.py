"""What a fresh clone needs is written down: requirements, the README's commands, one version."""

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DISTRIBUTIONS = {"cv2": "opencv-python-headless", "yaml": "PyYAML", "ale_py": "ale-py"}
OPTIONAL = {"triton", "wandb", "causal_conv1d", "dm_control", "memory_maze", "safetensors"}  # imported only where found
SOURCES = {
    "requirements.txt": ("*.py", "envs/**/*.py", "sub_models/**/*.py", "mamba_ssm/**/*.py"),
    "requirements-dev.txt": ("tests/**/*.py",),
}


def pins(name: str) -> set[str]:
    """The distributions that a requirements file and those that it includes pin, in lower case."""
    found: set[str] = set()
    for line in (ROOT / name).read_text().splitlines():
        if line.startswith("-r "):
            found |= pins(line[3:])
        elif line and not line.startswith("#"):
            distribution, _ = line.split("==")
            found.add(distribution.lower())
    return found


def third_party_imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module.split(".")[0])
    ours = {path.stem for path in ROOT.glob("*.py")} | {path.name for path in ROOT.iterdir() if path.is_dir()}
    return names - ours - set(sys.stdlib_module_names) - OPTIONAL


def test_every_imported_package_is_pinned():
    for requirements, patterns in SOURCES.items():
        imported = {name for pattern in patterns for path in ROOT.glob(pattern) for name in third_party_imports(path)}
        wanted = {DISTRIBUTIONS.get(name, name).lower() for name in imported}
        assert sorted(wanted - pins(requirements)) == []


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
    named = re.findall(r"`((?:[\w.]+/)*[\w-]+\.(?:py|yaml|txt))`", text) + re.findall(r"config_files/\w+\.yaml", text)
    missing = {name for name in named if not ((ROOT / name).exists() or (presets / name).exists())}
    assert missing == {"config.yaml"}, "the one in a run's folder"
    assert all(path.name in text for path in presets.glob("*.yaml"))


def test_the_ci_script_parses():
    subprocess.run(["bash", "-n", str(ROOT / ".ci" / "run")], check=True)


def test_the_version_stands_in_the_package_alone():
    assert re.search(r"version=[\"']", (ROOT / "setup.py").read_text()) is None

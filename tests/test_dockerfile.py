"""The Dockerfile without a daemon: what its instructions name exists before it is used, and suits the build."""

import fnmatch
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
INSTRUCTIONS = {"ARG", "FROM", "SHELL", "RUN", "USER", "WORKDIR", "ENV", "COPY", "VOLUME", "CMD"}  # that it uses
# In the main and universe components of Ubuntu 24.04 (noble), looked up with apt-cache in a root that debootstrap made.
PACKAGES = {"g++", "libegl1", "libgl1", "libgles2", "libopengl0", "python3", "python3-dev", "python3-venv"}


class Instruction(NamedTuple):
    name: str
    text: str

    def words(self):
        return shlex.split(self.text, comments=True)


def read_dockerfile(text):
    """Instructions with continued lines joined; comment lines go, also those between continued lines."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return [Instruction(*line.split(maxsplit=1)) for line in joined.splitlines()]


@pytest.fixture(scope="module")
def instructions():
    return read_dockerfile((ROOT / "Dockerfile").read_text())


def named(instructions, name):
    return [instruction for instruction in instructions if instruction.name == name]


def ignored(path):
    """Whether .dockerignore keeps `path` out; it has plain patterns alone, `**/` stands for any depth."""
    patterns = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] not in "#!"]
    parents = [str(path), *(str(parent) for parent in path.parents if str(parent) != ".")]
    for pattern in patterns:
        bare = pattern.removeprefix("**/")
        places = [place.rpartition("/")[2] for place in parents] if bare != pattern else parents
        if any(fnmatch.fnmatchcase(place, bare) for place in places):
            return True
    return False


def test_every_instruction_is_one_that_docker_knows(instructions):
    assert {instruction.name for instruction in instructions} == INSTRUCTIONS
    assert [instruction.name for instruction in instructions[:2]] == ["ARG", "FROM"]


def test_what_is_run_parses(instructions):
    (shell,) = named(instructions, "SHELL")
    assert shell.text == '["/bin/bash", "-euo", "pipefail", "-c"]'
    for run in named(instructions, "RUN"):
        subprocess.run(["bash", "-n", "-c", run.text], check=True)


def test_everything_copied_is_in_the_build_context(instructions):
    for copy in named(instructions, "COPY"):
        *sources, target = [word for word in copy.words() if not word.startswith("--")]
        assert target.startswith(".") and sources
        for source in sources:
            assert (ROOT / source).exists() and not ignored(Path(source)), source


def test_requirements_are_copied_before_they_are_installed(instructions):
    """Those that an installed file includes, too."""
    there, installed = set(), []
    for instruction in instructions:
        if instruction.name == "COPY":
            words = [word for word in instruction.words() if not word.startswith("--")][:-1]
            there |= {path.name for path in ROOT.iterdir()} if words == ["."] else set(words)
        if instruction.name == "RUN":
            asked = re.findall(r"-r (\S+)", instruction.text)
            included = [name for file in asked for name in re.findall(r"^-r (\S+)", (ROOT / file).read_text(), re.M)]
            assert set(asked + included) <= there, instruction.text
            installed += asked
    assert installed == ["requirements.txt", "requirements-envs.txt"]


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_nothing_that_the_program_needs_is_left_out_of_the_image():
    """.dockerignore is about builds and caches; everything in git but what CI runs is to be in the image."""
    tracked = subprocess.run(["git", "-C", ROOT, "ls-files"], capture_output=True, text=True, check=False).stdout
    left_out = {name for name in tracked.splitlines() if ignored(Path(name))}
    assert all(name.startswith(".ci/") for name in left_out), left_out
    assert ignored(Path(".git")) and ignored(Path("a/b/__pycache__/c.pyc")) and ignored(Path("mamba_ssm/ops/x.so"))
    assert not ignored(Path("build_notes/a.py")) and not ignored(Path("csrc/build.cpp"))


def test_packages_are_those_that_the_release_has(instructions):
    (base,) = [word for word in instructions[0].words() if word.startswith("CUDA_IMAGE=")]
    assert base.endswith("-ubuntu24.04"), "another release: look PACKAGES up anew"
    (install,) = [run.text for run in named(instructions, "RUN") if "apt-get install" in run.text]
    steps = [shlex.split(step) for step in install.split("&&")]
    assert steps[0] == ["apt-get", "update"] and steps[-1] == ["rm", "-rf", "/var/lib/apt/lists/*"]
    words = steps[1][steps[1].index("install") + 1 :]
    assert {"-y", "--no-install-recommends"} <= set(words)
    assert {word for word in words if not word.startswith("-")} == PACKAGES


def test_cuda_is_of_the_major_version_that_torch_is_built_for(instructions):
    """Else setup.py refuses to build. PyPI's torch 2.13 asks for cuda-toolkit 13.0."""
    (pin,) = re.findall(r"^torch==(\S+)$", (ROOT / "requirements.txt").read_text(), re.M)
    assert pin.startswith("2.13."), "another torch: see which CUDA its metadata asks for"
    assert "nvidia/cuda:13." in instructions[0].text and "-devel-" in instructions[0].text


def test_the_user_is_made_before_it_is_used_and_owns_where_it_writes(instructions):
    names = [instruction.name for instruction in instructions]
    user = named(instructions, "USER")[0].text
    (made,) = [i for i, run in enumerate(instructions) if run.name == "RUN" and "useradd" in run.text]
    assert made < names.index("USER") and re.search(rf"useradd .*\b{user}\b", instructions[made].text)
    owned = re.search(rf"install -d -o {user} -g {user} (.*)$", instructions[made].text)[1].split()
    assert named(instructions, "WORKDIR")[0].text in owned
    environments = [run.text.split()[3] for run in named(instructions, "RUN") if "-m venv" in run.text]
    assert environments and set(environments) <= set(owned)
    assert f"{environments[0]}/bin:" in named(instructions, "ENV")[0].text
    assert all(copy.text.startswith(f"--chown={user}:{user} ") for copy in named(instructions, "COPY"))


def test_the_kernels_are_built_for_what_setup_builds(instructions):
    """There is no GPU to ask while an image is built."""
    setup = (ROOT / "setup.py").read_text()
    (default,) = re.findall(r'^DEFAULT_ARCHITECTURES = "(.*)"$', setup, re.M)
    arguments = dict(word.split("=", 1) for arg in named(instructions, "ARG") for word in arg.words())
    assert arguments["TORCH_CUDA_ARCH_LIST"] == default
    for name in ("TORCH_CUDA_ARCH_LIST", "MAX_JOBS", "MAMBA_FORCE_CUDA"):
        assert name in setup and any(name in instruction.text for instruction in instructions)


def test_the_image_starts_a_script_that_exists(instructions):
    command = re.findall(r'"([^"]+)"', named(instructions, "CMD")[0].text)
    assert command[0] == "python" and (ROOT / command[1]).is_file()


def test_the_readme_gives_the_same_commands():
    comments = re.findall(r"^# (?:Build|Train):\s+(docker .*)$", (ROOT / "Dockerfile").read_text(), re.M)
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert len(comments) == 2 and all(command in readme for command in comments)

"""Figures say where they come from, in and outside of a git checkout."""

import json
import shutil
import subprocess
import sys

import pytest
import torch

from tools.provenance import ROOT, commit, hardware, provenance, versions

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def test_everything_is_named_and_plain():
    found = provenance(torch.device("cpu"))
    assert json.loads(json.dumps(found)) == found
    assert found["versions"]["torch"].startswith(torch.__version__.split("+")[0])
    assert found["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["hardware"]["accelerator"] == "none" and found["hardware"]["cores"] >= 1
    assert "pytest" not in versions() and hardware(torch.device("cpu"))["processor"]


@needs_git
def test_the_commit_tells_of_changes(tmp_path):
    assert commit(tmp_path) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "file").write_text("1")
    subprocess.run([*git, "add", "file"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "first"], check=True)
    clean = commit(tmp_path)
    assert len(clean) == 40
    (tmp_path / "untracked").write_text("1")
    assert commit(tmp_path) == clean
    (tmp_path / "file").write_text("2")
    assert commit(tmp_path) == f"{clean}+changes"


@needs_git
def test_a_copy_without_git_knows_its_commit(tmp_path):
    """A machine that is given an archive of the repository would write results of an unknown commit."""
    repository, copy = tmp_path / "repository", tmp_path / "copy"
    (repository / "tools").mkdir(parents=True)
    copy.mkdir()
    git = ["git", "-C", str(repository), "-c", "user.name=n", "-c", "user.email=e"]
    subprocess.run([*git, "init", "-q"], check=True)
    for name in (".gitattributes", "tools/provenance.py"):
        (repository / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "first"], check=True)
    packed = subprocess.run([*git, "archive", "HEAD"], check=True, capture_output=True).stdout
    subprocess.run(["tar", "x", "-C", copy], input=packed, check=True)
    line = "from tools.provenance import commit; print(commit())"
    told = subprocess.run([sys.executable, "-c", line], cwd=copy, check=True, capture_output=True, text=True).stdout
    assert told.strip() == commit(repository)

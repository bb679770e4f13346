"""setup.py builds what a machine allows and says what: run as a user would, with a made-up torch and toolkit."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CPP_EXTENSION = """
import os
CUDA_HOME = os.environ.get("CUDA_HOME")
class BuildExtension:
    with_options = classmethod(lambda cls, **options: cls)
def CppExtension(name, files, **flags):
    print("C++:", *files)
def CUDAExtension(name, files, **flags):
    print("CUDA:", os.environ["TORCH_CUDA_ARCH_LIST"], *files)
"""


@pytest.fixture
def run_setup(tmp_path):
    """Runs setup.py beside a torch of CUDA `torch_cuda` and a toolkit of release `toolkit`; None: there is none."""

    def run(torch_cuda, toolkit, **variables):
        utilities = tmp_path / "torch" / "utils"
        utilities.mkdir(parents=True)
        version = f"class version: cuda = {torch_cuda!r}"
        (tmp_path / "torch" / "__init__.py").write_text(f'__version__ = "2.11.0"\n{version}\n')
        (utilities / "__init__.py").touch()
        (utilities / "cpp_extension.py").write_text(CPP_EXTENSION)
        if toolkit is not None:
            nvcc = tmp_path / "cuda" / "bin" / "nvcc"
            nvcc.parent.mkdir(parents=True)
            nvcc.write_text(f'#!/bin/sh\necho "Cuda compilation tools, release {toolkit}, V{toolkit}.1"\n')
            nvcc.chmod(0o755)
            variables = {"CUDA_HOME": str(tmp_path / "cuda"), **variables}
        ours = ("MAMBA_", "CUDA_HOME", "TORCH_CUDA_ARCH_LIST")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        environment = {**inherited, "PYTHONPATH": str(tmp_path), "CXX": sys.executable, **variables}
        command = [sys.executable, str(ROOT / "setup.py"), "--name"]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

    return run


@pytest.mark.parametrize(
    ("torch_cuda", "toolkit", "variables", "said"),
    [
        ("13.0", None, {"MAMBA_SKIP_NATIVE": "1"}, "native part: not built, MAMBA_SKIP_NATIVE is set"),
        ("13.0", None, {"CXX": "no-such-compiler"}, "native part: not built, no C++ compiler was found"),
        ("13.0", "13.0", {"MAMBA_SKIP_CUDA": "1"}, "CUDA part: not built, MAMBA_SKIP_CUDA is set"),
        (None, "13.0", {}, "CUDA part: not built, torch 2.11.0 was built without CUDA"),
        ("13.0", None, {}, "CUDA part: not built, no CUDA toolkit was found (set CUDA_HOME)"),
        ("13.0", "12.8", {}, "is CUDA 12.8, torch 2.11.0 was built for CUDA 13.0: install a toolkit"),
    ],
)
def test_what_cannot_be_built_is_said(run_setup, torch_cuda, toolkit, variables, said):
    done = run_setup(torch_cuda, toolkit, **variables)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
    whole = "native part" in said
    assert ("runs on its reference tier" in done.stdout) == whole
    assert (".cu" not in done.stdout) and (("C++: " in done.stdout) == (not whole))


def test_a_cuda_part_that_is_asked_for_is_built_or_refused(run_setup):
    done = run_setup("13.0", "12.8", MAMBA_FORCE_CUDA="1")
    assert done.returncode != 0
    assert "MAMBA_FORCE_CUDA is set, but the CUDA part can't be built: the toolkit in" in done.stderr


@pytest.mark.parametrize(("chosen", "built_for"), [({}, "8.0;8.6;8.9;9.0a"), ({"TORCH_CUDA_ARCH_LIST": "9.0"}, "9.0")])
def test_a_toolkit_that_fits_builds_each_dtype_and_direction_by_itself(run_setup, chosen, built_for):
    done = run_setup("13.0", "13.2", **chosen)
    files = next(line for line in done.stdout.splitlines() if line.startswith("CUDA: "))
    assert files.split()[1] == built_for
    for direction in ("forward", "backward"):
        for dtype in ("float32", "float16", "bfloat16"):
            assert f"csrc/selective_scan/cuda/scan_{direction}_{dtype}.cu" in files
    assert "csrc/selective_scan/cpu/scan_cpu.cpp" in files


def test_an_sdist_and_a_wheel_hold_the_sources(tmp_path):
    for name in ("csrc", "mamba_ssm"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    command = [sys.executable, "setup.py", "-q", "sdist", "bdist_wheel"]
    environment = {**os.environ, "MAMBA_SKIP_NATIVE": "1"}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
    with tarfile.open(next((tmp_path / "dist").glob("*.tar.gz"))) as archive:
        sdist = set(archive.getnames())
    wheel = set(zipfile.ZipFile(next((tmp_path / "dist").glob("*.whl"))).namelist())
    for source in (tmp_path / "csrc").rglob("*.*"):
        path = source.relative_to(tmp_path).as_posix()
        assert any(name.endswith(f"/{path}") for name in sdist), path
        assert any(name.endswith(f"/data/share/drama-mamba-ssm/{path}") for name in wheel), path
    for names in (sdist, wheel):
        assert any(name.endswith("mamba_ssm/ops/selective_scan_interface.py") for name in names)

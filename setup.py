"""Build of the native operators: C++ where there is a compiler, CUDA where there is a toolkit that fits torch.

    pip install -e . --no-build-isolation

Environment: MAMBA_SKIP_CUDA=1 builds for the CPU alone; MAMBA_FORCE_CUDA=1 builds CUDA or fails; MAMBA_SKIP_NATIVE=1
builds nothing; MAX_JOBS limits parallel compilers; TORCH_CUDA_ARCH_LIST picks GPU architectures, by default
8.0;8.6;8.9;9.0a; MAMBA_SANITIZE=address,undefined builds the C++ part for a run under those sanitizers.
What can't be built is said in one line, and the package then runs on its reference tier.
"""

import ctypes
import itertools
import os
import re
import shutil
import subprocess
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
SOURCES = Path("csrc")
EXTENSION = "mamba_ssm.ops._native_ext"
# 9.0a and not 9.0: the same GPUs, with the tensor cores' instructions for warpgroups.
DEFAULT_ARCHITECTURES = "8.0;8.6;8.9;9.0a"
SANITIZE = os.environ.get("MAMBA_SANITIZE", "")


def main() -> None:
    """Describe the package, with an extension if one can be built here."""
    extensions, commands = native_build()
    setup(
        name="drama-mamba-ssm",
        version=package_version(),
        description="State-space sequence models for model-based reinforcement learning",
        python_requires=">=3.11",
        install_requires=["torch>=2.11", "numpy>=1.26"],
        packages=find_packages(include=["mamba_ssm", "mamba_ssm.*"]),
        data_files=source_files(),
        ext_modules=extensions,
        cmdclass=commands,
    )


def package_version() -> str:
    """`__version__` of mamba_ssm, which is not imported for it: that would need what is about to be installed."""
    return re.search(r'^__version__ = "(.+)"$', (ROOT / "mamba_ssm" / "__init__.py").read_text(), re.MULTILINE)[1]


def source_files() -> list[tuple[str, list[str]]]:
    """Folder below the prefix and its files, for a wheel to hold csrc as an sdist does."""
    paths = (path.relative_to(ROOT) for path in (ROOT / SOURCES).rglob("*") if path.is_file())
    files = sorted(paths, key=lambda path: (path.parent, path.name))
    folders = itertools.groupby(files, lambda path: path.parent)
    return [(f"share/drama-mamba-ssm/{folder}", [str(path) for path in group]) for folder, group in folders]


def native_build() -> tuple[list, dict]:
    """The extensions to build on this machine and the command classes that build them; both empty if there are none."""
    if flag("MAMBA_SKIP_NATIVE"):
        return nothing("MAMBA_SKIP_NATIVE is set")
    try:
        import torch
        from torch.utils import cpp_extension
    except ImportError:
        return nothing("torch is not importable here (pip install torch, then pip install -e . --no-build-isolation)")
    if (compiler := find_compiler()) is None:
        return nothing("no C++ compiler was found (set CXX)")
    why_no_cuda = cuda_obstacle(torch, cpp_extension)
    if why_no_cuda and flag("MAMBA_FORCE_CUDA"):
        raise SystemExit(f"setup.py: MAMBA_FORCE_CUDA is set, but the CUDA part can't be built: {why_no_cuda}")
    say(f"C++ part: built with {compiler}")
    say(f"CUDA part: not built, {why_no_cuda}" if why_no_cuda else f"CUDA part: built with {cpp_extension.CUDA_HOME}")
    extension = cpu_extension(cpp_extension) if why_no_cuda else cuda_extension(cpp_extension)
    ninja = shutil.which("ninja") is not None
    builder = cpp_extension.BuildExtension.with_options(use_ninja=ninja, no_python_abi_suffix=True)
    return [extension], {"build_ext": builder}


def cpu_extension(cpp_extension):
    """The extension for the CPU alone."""
    flags, link = compiler_flags()
    files = sources(".cpp", without="cuda")
    return cpp_extension.CppExtension(EXTENSION, files, extra_compile_args=flags, extra_link_args=link)


def cuda_extension(cpp_extension):
    """The extension for both devices: one .cu file for each dtype and direction, so that they compile side by side."""
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", DEFAULT_ARCHITECTURES)
    flags, link = compiler_flags()
    nvcc = ["-O3", "--expt-relaxed-constexpr", "-lineinfo"]
    return cpp_extension.CUDAExtension(
        EXTENSION, sources(".cpp", None) + sources(".cu", None), extra_compile_args={"cxx": flags, "nvcc": nvcc},
        extra_link_args=link,
    )  # fmt: skip


def compiler_flags() -> tuple[list[str], list[str]]:
    """Compiler and linker flags of the C++ part.

    at::parallel_for is serial without -fopenmp. It is not given to the linker: OpenMP's functions then come from the
    library that torch itself has loaded, so that torch.set_num_threads holds here too."""
    if not SANITIZE:
        parallel = ["-fopenmp"] if is_gcc(find_compiler()) and torch_has_gnu_openmp() else []
        return ["-O3", "-Wno-psabi", "-Wno-ignored-attributes", *parallel], []
    sanitizer = f"-fsanitize={SANITIZE}"
    debug = ["-O1", "-g", "-fno-omit-frame-pointer", "-fno-sanitize-recover=undefined"]
    return [*debug, "-Wno-psabi", "-Wno-ignored-attributes", sanitizer], [sanitizer]


def sources(suffix: str, without: str | None) -> list[str]:
    """All sources with `suffix` under csrc but those in the folder `without`."""
    found = sorted(path.relative_to(ROOT) for path in (ROOT / SOURCES).rglob(f"*{suffix}"))
    return [str(path) for path in found if path.parent.name != without]


def cuda_obstacle(torch, cpp_extension) -> str | None:
    """Why the CUDA part can't be built here, or None if it can."""
    if flag("MAMBA_SKIP_CUDA"):
        return "MAMBA_SKIP_CUDA is set"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA"
    if cpp_extension.CUDA_HOME is None:
        return "no CUDA toolkit was found (set CUDA_HOME)"
    toolkit = toolkit_version(cpp_extension.CUDA_HOME)
    if toolkit is None:
        return f"{cpp_extension.CUDA_HOME}/bin/nvcc does not run"
    if toolkit.split(".")[0] != torch.version.cuda.split(".")[0]:
        return (
            f"the toolkit in {cpp_extension.CUDA_HOME} is CUDA {toolkit}, torch {torch.__version__} was built for "
            f"CUDA {torch.version.cuda}: install a toolkit of that major version and point CUDA_HOME to it"
        )
    return None


def toolkit_version(cuda_home: str) -> str | None:
    """The release of the toolkit's nvcc, such as "13.0"; None if it does not run."""
    try:
        told = subprocess.run([f"{cuda_home}/bin/nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    found = re.search(r"release (\d+\.\d+)", told)
    return found and found.group(1)


def find_compiler() -> str | None:
    """The C++ compiler that the build will call."""
    candidates = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    return next((name for name in candidates if shutil.which(name.split()[0])), None)


def is_gcc(compiler: str) -> bool:
    """Whether `compiler` is GCC, whatever its name."""
    told = subprocess.run([*compiler.split(), "--version"], capture_output=True, text=True, check=False).stdout
    return "Free Software Foundation" in told


def torch_has_gnu_openmp() -> bool:
    """Whether torch's own library brings what code that GCC compiled with -fopenmp calls."""
    import torch

    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    return library.exists() and hasattr(ctypes.CDLL(str(library)), "GOMP_parallel")


def nothing(reason: str) -> tuple[list, dict]:
    say(f"native part: not built, {reason}; the package runs on its reference tier")
    return [], {}


def flag(name: str) -> bool:
    return os.environ.get(name, "0").lower() in ("1", "true", "yes", "on")


def say(line: str) -> None:
    print(f"setup.py: {line}", flush=True)


main()

"""The native convolutions' operators on CPU tensors, by their kernels' own source built for the CPU."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from sub_models.native_convolutions import NO_KERNELS, register_fakes

SOURCES = Path(__file__).parents[2] / "csrc" / "convolutions"
BLOCKS = 2  # of threads, so that one takes several frames where there are more


@pytest.fixture(scope="session")
def emulated_convolutions(tmp_path_factory):
    """`torch.ops.drama_native` for CPU tensors; that no two rows of a matrix lie in the same banks is asserted on the
    way."""
    compiler = shutil.which("c++") or pytest.skip("needs a C++ compiler")
    path = tmp_path_factory.mktemp("emulated") / "emulated.so"
    flags = ["-O1", "-std=c++17", "-shared", "-fPIC", "-Wno-attributes", "-Wno-unknown-pragmas"]
    subprocess.run([compiler, *flags, "-o", path, SOURCES / "emulate.cc"], check=True)
    kernels = ctypes.CDLL(str(path))
    operators = torch.library.Library("drama_native", "FRAGMENT")

    def register(schema, kernel_of, out_of):
        def run(*tensors):
            tensors = [x.contiguous() for x in tensors]
            out = out_of(*tensors)
            pointers = [ctypes.c_void_p(x.data_ptr()) for x in (*tensors, out)]
            assert getattr(kernels, kernel_of(tensors[0]))(*pointers, len(tensors[0]), BLOCKS) == 0, "bank conflicts"
            return out.sum(0) if name.endswith("weight_gradient") else out

        name = schema.split("(")[0]
        if not hasattr(torch.ops.drama_native, name):
            operators.define(schema)
        operators.impl(name, run, "CPU")

    def empty(*shape, dtype=torch.bfloat16):
        return torch.full(shape, float("nan"), dtype=dtype)

    def strided_out(x, weights):
        return empty(*x.shape[:3], 32 if x.shape[1] == 32 else 48)

    register(
        "encoder_front(Tensor frames, Tensor weights, Tensor shifts) -> Tensor",
        lambda x: "encoder_front",
        lambda x, *_: empty(len(x), 16, 16, 128),
    )
    register(
        "encoder_third(Tensor rows, Tensor weights, Tensor shifts) -> Tensor",
        lambda x: "encoder_third",
        lambda x, *_: empty(len(x), 8, 8, 192),
    )
    register(
        "strided(Tensor rows, Tensor weights) -> Tensor",
        lambda x: "strided_second" if x.shape[1] == 32 else "strided_third",
        strided_out,
    )
    register(
        "spread(Tensor rows, Tensor weights) -> Tensor",
        lambda _: "spread_pixels",
        lambda x, _: empty(len(x), 32, 32, 64),
    )
    register(
        "to_colours(Tensor rows, Tensor weights) -> Tensor",
        lambda x: "to_colours",
        lambda x, _: empty(len(x), 32, 32, 16),
    )
    register(
        "from_colours(Tensor rows, Tensor weights) -> Tensor",
        lambda x: "from_colours",
        lambda x, _: empty(len(x), 32, 32, 64),
    )
    register(
        "colour_weight_gradient(Tensor grads, Tensor rows) -> Tensor",
        lambda x: "colour_weight_gradient",
        lambda *_: empty(BLOCKS, 64, 120, dtype=torch.float32),
    )
    register(
        "strided_weight_gradient(Tensor rows, Tensor grads) -> Tensor",
        lambda _: "second_weight_gradient",
        lambda *_: empty(BLOCKS, 25, 16, 32, dtype=torch.float32),
    )
    if NO_KERNELS is not None:
        register_fakes()
    return operators

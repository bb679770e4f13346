"""The native convolutions' operators on CPU tensors, by their kernels' own source built for the CPU."""

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from sub_models.native_convolutions import FAKES, NO_KERNELS, register_fakes

SOURCES = Path(__file__).parents[2] / "csrc" / "convolutions"
BLOCKS = 2  # of threads, so that one takes several frames where there are more
KERNELS = {  # of operators, where they go by another name or by the rows' height
    "strided": {32: "strided_second", 16: "strided_third"},
    "spread": {32: "spread_pixels"},
    "strided_weight_gradient": {32: "second_weight_gradient"},
}


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

    def register(name, schema):
        def run(*tensors):
            tensors = [x.contiguous() for x in tensors]
            out, sums = FAKES[name](*tensors), name.endswith("weight_gradient")
            if sums:  # each block of threads leaves its own
                out = out.new_empty(BLOCKS, *out.shape)
            pointers = [ctypes.c_void_p(x.data_ptr()) for x in (*tensors, out.fill_(float("nan")))]
            kernel = KERNELS[name][tensors[0].shape[1]] if name in KERNELS else name
            assert getattr(kernels, kernel)(*pointers, len(tensors[0]), BLOCKS) == 0, "bank conflicts"
            return out.sum(0) if sums else out

        if not hasattr(torch.ops.drama_native, name):
            operators.define(schema)
        operators.impl(name, run, "CPU")

    schemas = re.findall(r'm\.def\("((\w+)\(.*?)"\)', (SOURCES / "convolution_ops.cpp").read_text())
    assert {name for _, name in schemas} == set(FAKES)
    for schema, name in schemas:
        register(name, schema)
    if NO_KERNELS is not None:
        register_fakes()
    return operators

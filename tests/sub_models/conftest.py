"""The native convolutions' operators on CPU tensors, by their kernels' own source built for the CPU."""

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from sub_models.native_convolutions import FAKES, NO_KERNELS, UNTRACED, register_fakes

SOURCES = Path(__file__).parents[2] / "csrc" / "convolutions"
BLOCKS = 2  # of threads, so that one takes several frames where there are more
KERNELS = {  # of operators, where they go by another name or by the rows' height
    "strided": {32: "strided_second", 16: "strided_third"},
    "spread": {32: "spread_to_16", 16: "spread_to_32"},
    "strided_weight_gradient": {32: "second_weight_gradient", 16: "third_weight_gradient"},
}


class Norm(ctypes.Structure):
    """Of norm.h."""

    _fields_ = [*((name, ctypes.c_void_p) for name in ("x", "mean", "var", "weight", "bias")), ("eps", ctypes.c_float)]

    def __init__(self, *arguments):
        *self.kept, eps = (x.contiguous() if isinstance(x, torch.Tensor) else x for x in arguments)
        super().__init__(*(x.data_ptr() for x in self.kept), eps)


class NormGradient(ctypes.Structure):
    """Of norm.h."""

    _fields_ = [("norm", Norm), ("grad_weight", ctypes.c_void_p), ("grad_bias", ctypes.c_void_p)]

    def __init__(self, *arguments):
        *norm, grad_weight, grad_bias = arguments
        self.kept = Norm(*norm), grad_weight, grad_bias
        super().__init__(self.kept[0], grad_weight.data_ptr(), grad_bias.data_ptr())


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
        plain_name, _, with_sums = name.removesuffix("_through_norm").partition("_and_")
        sums = "weight_gradient" in name

        def run(*arguments):
            count = len(arguments) if name == plain_name else 2
            tensors = [x.contiguous() for x in arguments[:count]]
            norm = (NormGradient if sums else Norm)(*arguments[count:]) if arguments[count:] else None
            out = FAKES[plain_name](*tensors)
            if sums:  # each block of threads leaves its own
                out = out.new_empty(BLOCKS, *out.shape)
            outputs = [out.fill_(float("nan"))]
            if with_sums:  # by channel of a pixel; a block without tasks has none
                outputs.append(torch.zeros(BLOCKS, 2, out.shape[-1] // (1 if plain_name == "strided" else 4)))
            pointers = [ctypes.c_void_p(x.data_ptr()) for x in (*tensors, *outputs)]
            if norm is not None:
                pointers.insert(2, ctypes.byref(norm))
            kernel = KERNELS[plain_name][tensors[0].shape[1]] if plain_name in KERNELS else plain_name
            kernel += name.removeprefix(plain_name)
            assert getattr(kernels, kernel)(*pointers, len(tensors[0]), BLOCKS) == 0, "bank conflicts"
            return out.sum(0) if sums else out if len(outputs) == 1 else tuple(outputs)

        if not hasattr(torch.ops.drama_native, name):
            operators.define(schema)
        operators.impl(name, run, "CPU")

    source = (SOURCES / "convolution_ops.cpp").read_text()
    source = re.sub(r'" NORM\s+"', re.search(r'#define NORM "(.*)"', source)[1], source)
    schemas = re.findall(r'm\.def\("((\w+)\(.*?)"\)', source)
    assert {name for _, name in schemas} == {*FAKES, *UNTRACED}
    for schema, name in schemas:
        register(name, schema)
    if NO_KERNELS is not None:
        register_fakes()
    return operators

"""Machine code of the SSD kernels for an H200, built and looked through without a GPU.

A product of tiles takes the place of its operands in shared memory from descriptors of 64 bits in uniform registers.
Under high register pressure the ptxas of Triton 3.6 adds the carry of a descriptor's lower half to a register that does
not hold zero; the product is then of other memory than it should be, or the kernel ends in an illegal access. Small
changes of a kernel bring such code about or make it go away. Of 11 kernels that were run on an H200, the 5 with such
code gave wrong derivatives or failed, the others none.

As a script, `python test_ssd_machine_code.py CASE...`, it writes the suspicious instructions of each kernel as JSON.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

# batch, length, heads, headdim, groups, state, optional arguments
CASES = {
    "world model": (16, 128, 16, 64, 1, 16, ("D", "dt_bias")),
    "long": (1, 4096, 24, 64, 1, 128, ("D", "dt_bias")),
}
EVERYTHING = ("D", "z", "dt_bias", "initial_states", "seq_idx")
WIDTHS = {
    f"P{headdim} N{state}": (2, 300, 4, headdim, groups, state, EVERYTHING)
    for headdim, groups in ((16, 1), (32, 4), (64, 1), (64, 4), (128, 2)) for state in (1, 16, 64, 128, 256)
}  # fmt: skip
H200_MULTIPROCESSORS, H200_TARGET = 132, ("cuda", 90, 32)
DTYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64"}
INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\d\s+)?(\S+)\s+(.*?)\s*;")
GOOD = """
        /*0010*/                   UIADD3 UR6, UP0, UR4, 0x20, URZ ;
        /*0020*/                   UMOV UR4, URZ ;
        /*0030*/                   UIADD3.X UR7, UR4, -0x3ffffff0, URZ, UP0, !UPT ;
"""


def suspicious(listing: str) -> list[str]:
    """Instructions that add a carry and the constant half of a descriptor to a uniform register other than zero."""
    found, zeros = [], set()
    for line in listing.splitlines():
        instruction = INSTRUCTION.match(line)
        if instruction is None:
            continue
        name, operands = instruction.group(1), [operand.strip() for operand in instruction.group(2).split(",")]
        if name == "UIADD3.X" and re.fullmatch(r"-?0x[0-9a-f]+", operands[2]) and operands[3] == "URZ":
            found += [] if operands[1] in zeros | {"URZ"} else [line.strip()]
        if written := re.fullmatch(r"UR(\d+)", operands[0]):
            first = int(written.group(1))
            zeros -= {f"UR{first + i}" for i in range(4 if ".128" in name else 2 if ".64" in name else 1)}
        if name == "UMOV" and operands[1] == "URZ":
            zeros.add(operands[0])
    return found


def launches_of(batch, length, heads, headdim, groups, state, optional):
    """Kernels of a forward and backward pass with their tensors, which hold nothing, and their other arguments."""
    from mamba_ssm.ops.triton import ssd_triton

    launched = []

    class Recorded:
        def __init__(self, *description):
            self.description = description

        def __call__(self, tensors):
            launched.append((tensors, *self.description))

    def tensor(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device="meta")

    x, dt, B = (
        tensor(batch, length, *shape, dtype=torch.bfloat16) for shape in ((heads, headdim), (heads,), (groups, state))
    )
    extra = {
        "D": tensor(heads), "z": x, "dt_bias": tensor(heads), "initial_states": tensor(batch, heads, headdim, state),
        "seq_idx": tensor(batch, length, dtype=torch.int32),
    }  # fmt: skip
    arguments = (x, dt, tensor(heads), B, B, *(extra[name] if name in optional else None for name in extra))
    options = (256, True, 0.0, float("inf"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssd_triton, "Launch", Recorded)
        patch.setattr(ssd_triton, "_kinds", {})
        patch.setattr(ssd_triton, "_layout", lambda t: (t.shape, t.stride(), t.dtype))     # nothing has no address
        patch.setattr(ssd_triton, "_multiprocessors", lambda device: H200_MULTIPROCESSORS)
        _, *entering = ssd_triton._scan(*arguments, *options, False, True)
        ssd_triton._scan_backward(x, None, entering[0] if entering else None, *arguments, *options)
    return launched


def listing_of(tensors, kernel, grid, arguments, warps, stages) -> str:
    """The machine code of a kernel, as a launch would build it."""
    import triton
    from triton.backends import nvidia
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, attributes = {}, {}, {}
    for i, (parameter, value) in enumerate(zip(kernel.params, (*tensors, *arguments), strict=True)):
        kind = "constexpr"
        if isinstance(value, torch.Tensor) and not parameter.is_constexpr:
            kind, divisible = DTYPES[value.dtype], True
        elif isinstance(value, float) and not parameter.is_constexpr:
            kind, divisible = "fp32", False
        elif value is not None and value != 1 and not parameter.is_constexpr:
            kind, divisible = "i32" if abs(value) < 2**31 else "i64", value % 16 == 0
        signature[parameter.name] = kind
        if kind == "constexpr":
            constants[i,] = value
        elif divisible:
            attributes[i,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    options = {"num_warps": warps, "num_stages": stages}
    built = triton.compile(source, target=GPUTarget(*H200_TARGET), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        program = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
        return subprocess.run([program, "-sass", file.name], capture_output=True, text=True, check=True).stdout


def main(cases: list[str]) -> None:
    found = {}
    for case in cases:
        for tensors, kernel, *description in launches_of(*(CASES | WIDTHS)[case]):
            place = f"{case}: {kernel.fn.__name__}"
            found[place] = found.get(place, []) + suspicious(listing_of(tensors, kernel, *description))
    sys.stdout.write(json.dumps(found) + "\n")


def find_in(cases) -> dict[str, list[str]]:
    """`main` in a process of its own: in this one kernels may be interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = (str(Path(__file__).parents[3]), environment.get("PYTHONPATH", ""))
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    result = subprocess.run([sys.executable, __file__, *cases], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture
def tools():
    nvidia = pytest.importorskip("triton.backends.nvidia", exc_type=ImportError)
    if not (Path(nvidia.__file__).parent / "bin" / "cuobjdump").exists():
        pytest.skip("this Triton brings no cuobjdump")


@pytest.mark.parametrize("cases", [tuple(CASES), pytest.param(tuple(WIDTHS), marks=pytest.mark.slow)])
def test_no_descriptor_is_made_from_another_register(cases, tools):
    found = find_in(cases)
    assert any("_scan_backward_kernel" in kernel for kernel in found)
    assert not any(found.values()), found


def test_what_is_suspicious():
    """Both halves from one register, as was found; zero moved into it in between makes the difference."""
    zero = "UMOV UR4, URZ ;"
    assert not suspicious(GOOD)
    assert len(suspicious(GOOD.replace(zero, "UMOV UR5, URZ ;"))) == 1
    assert len(suspicious(GOOD.replace(zero, f"{zero}\n        /*0024*/  UIADD3.64 UR4, UR8, UR4, URZ ;"))) == 1


if __name__ == "__main__":
    main(sys.argv[1:])

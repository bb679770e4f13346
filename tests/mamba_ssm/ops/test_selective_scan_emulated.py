"""The CUDA kernels of the selective scan's forward pass, built for a CPU with a block's threads as fibers."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from mamba_ssm.ops.selective_scan_interface import selective_scan_ref
from mamba_ssm.testing import FORWARD_TOLERANCE, assert_close, selective_scan_inputs, to_float64

SOURCES = Path(__file__).parents[3] / "csrc" / "selective_scan"
OPTIONAL = ("D", "z", "delta_bias", "initial_state", "seq_idx")
ROWS = 32  # of a tile, whose entering state is kept
WALK, ONE_CHANNEL, TWO_CHANNELS = 11, 1, 0  # `Plan::index`


@pytest.fixture(scope="module")
def emulate_forward(tmp_path_factory):
    compiler = shutil.which("c++") or pytest.skip("needs a C++ compiler")
    path = tmp_path_factory.mktemp("emulated") / "emulated.so"
    flags = ["-O1", "-std=c++17", "-shared", "-fPIC", "-Wno-unknown-pragmas", f"-I{SOURCES / 'emulated'}"]
    subprocess.run([compiler, *flags, "-o", path, SOURCES / "emulate.cc"], check=True)
    return ctypes.CDLL(str(path)).emulate_forward


def run(emulate_forward, inputs, kernel, multiprocessors, delta_softplus=True):
    """out, last_state and the states that enter tiles (B, ceil(L / 32), D, N), all NaN before."""
    inputs = {name: x.detach() for name, x in inputs.items()}
    batch, channels, length = inputs["u"].shape
    state, groups = inputs["A"].shape[1], inputs["B"].shape[1]
    kept = (batch, -(-length // ROWS), channels, state)
    out, last_state, states = (
        torch.full(shape, float("nan"), dtype=dtype)
        for shape, dtype in (
            (inputs["u"].shape, inputs["u"].dtype), ((batch, channels, state), torch.float32), (kept, torch.float32)
        )
    )  # fmt: skip
    names = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias")
    pointers = [ctypes.c_void_p(inputs[name].data_ptr() if name in inputs else None) for name in names]
    pointers += [int(delta_softplus)]
    pointers += [ctypes.c_void_p(inputs[name].data_ptr() if name in inputs else None) for name in OPTIONAL[:2:-1]]
    pointers += [ctypes.c_void_p(x.data_ptr()) for x in (out, last_state, states)]
    sizes = (inputs["u"].dtype == torch.bfloat16, batch, channels, length, state, groups, multiprocessors)
    assert emulate_forward(*map(int, sizes), *pointers) == kernel
    return out, last_state, states


def check(emulate_forward, kernel, multiprocessors, sizes):
    channels, length, state, groups, optional, dtype = sizes
    inputs = selective_scan_inputs(1, channels, length, state, groups, optional=optional, dtype=dtype)
    softplus = bool(optional)
    if not softplus:
        inputs["delta"] = inputs["delta"].abs()
    out, last_state, states = run(emulate_forward, inputs, kernel, multiprocessors, softplus)
    wide = to_float64(inputs)
    want, want_last = selective_scan_ref(**wide, delta_softplus=softplus, return_last_state=True)
    assert_close(out, want, FORWARD_TOLERANCE[dtype])
    assert_close(last_state, want_last, FORWARD_TOLERANCE[torch.float32])
    long = [name for name in ("u", "delta", "B", "C", "z", "seq_idx") if name in wide]
    for chunk in range(1, states.shape[1]):
        cut = wide | {name: wide[name][..., : chunk * ROWS] for name in long}
        entering = selective_scan_ref(**cut, delta_softplus=softplus, return_last_state=True)[1]
        assert_close(states[:, chunk], entering, FORWARD_TOLERANCE[torch.float32])


@pytest.mark.parametrize(
    ("channels", "length", "state", "groups", "optional", "dtype"),
    [
        (48, 256, 16, 1, (), torch.float32),
        (50, 260, 13, 1, OPTIONAL, torch.float32),
        (130, 292, 16, 2, ("D", "seq_idx"), torch.float32),
        (48, 288, 5, 1, ("z",), torch.float32),
        (96, 264, 16, 1, OPTIONAL, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("kernel", [WALK, ONE_CHANNEL])
def test_long_rows(emulate_forward, kernel, channels, length, state, groups, optional, dtype):
    """Ends of tiles and blocks, padded states, groups, and every option, in the kernels for rows of whole vectors."""
    check(emulate_forward, kernel, 1 if kernel == WALK else 1000, (channels, length, state, groups, optional, dtype))


def test_what_is_not_finite_stays_in_its_channel(emulate_forward):
    inputs = selective_scan_inputs(1, 48, 256, 16, groups=1, optional=())
    inputs["delta"] = inputs["delta"].detach().abs()
    inputs["delta"][0, 9, 78] = float("nan")
    out, _, _ = run(emulate_forward, inputs, WALK, 1, delta_softplus=False)
    assert out[0, 9, 78:].isnan().all() and out[0, 9, :78].isfinite().all()
    assert out[0, [*range(9), *range(10, 48)]].isfinite().all()


@pytest.mark.parametrize("length", [4, 32, 100])
@pytest.mark.parametrize(("kernel", "multiprocessors"), [(TWO_CHANNELS, 1), (ONE_CHANNEL, 1000)])
def test_short_rows(emulate_forward, kernel, multiprocessors, length):
    """Fewer rows than the walk is for."""
    check(emulate_forward, kernel, multiprocessors, (96, length, 16, 1, OPTIONAL, torch.float32))

"""Runs the native operators, and nothing else, over a small grid: what a sanitizer watches.

    python csrc/selective_scan/exercise.py --device cpu
    compute-sanitizer --tool racecheck python csrc/selective_scan/exercise.py --device cuda

Shapes cover every instantiation of the kernels, ends of tiles, channels that don't fill a block, and constant B or C.
Exits with 1 if a result holds a value that is not finite.
"""

import argparse
import itertools
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from mamba_ssm.ops import _native
from mamba_ssm.ops.selective_scan_interface import selective_scan_fn
from mamba_ssm.ops.triton.selective_state_update import selective_state_update
from mamba_ssm.testing import outputs_and_gradients, selective_scan_inputs

OPTIONAL = ("D", "z", "delta_bias", "initial_state", "seq_idx")
STATES = (1, 4, 5, 16, 33, 128, 200)


def grid(device: str) -> list[dict]:
    """Keyword arguments of `selective_scan_inputs`."""
    cases = [{"state": n, "complex_A": c, "channels": 5} for n, c in itertools.product(STATES, (False, True))]
    cases += [
        {"state": 4, "constant_B": b, "constant_C": c, "complex_A": a}
        for a, b, c in itertools.product((False, True), repeat=3)
    ]
    cases += [{"state": 16, "channels": 70, "length": length, "groups": 2} for length in (1, 32, 40, 65)]
    cases += [{"state": 5, "channels": 70, "length": 72, "batch": 3}]
    cases += [{"state": 16, "channels": 1024, "batch": 17, "length": 40, "optional": ("z",)}]   # two channels a lane
    cases += [{"state": 13, "channels": 96, "batch": 66, "length": 264}]     # many channels, long rows
    cases += [{"state": 16, "dtype": dtype, "length": 72} for dtype in (torch.bfloat16, torch.float16)]
    cases += [{"state": 3, "dtype": torch.float64}] if device == "cpu" else []
    cases += [{"batch": 0}, {"channels": 0}, {"length": 0}]
    return [{"channels": 20, "length": 37, "optional": OPTIONAL, **case} for case in cases]


def step_inputs(batch: int, channels: int, state: int) -> list:
    row, projection = (batch, channels), (batch, state)
    shapes = ((*row, state), row, row, (channels, state), projection, projection, (channels,), row)
    return [torch.randn(shape) for shape in shapes] + [None, True]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    device = parser.parse_args().device
    if (reason := _native.why_not(device)) is not None:
        raise SystemExit(reason)
    bad = 0
    for case in grid(device):
        results = outputs_and_gradients(
            selective_scan_fn, selective_scan_inputs(device=device, **case), delta_softplus=True, return_last_state=True
        )
        bad += not all(torch.isfinite(x).all() for x in itertools.chain(*(part.values() for part in results)))
    for batch, channels, state in ((1, 5, 1), (3, 17, 16), (2, 4, 33), (2, 128, 7)) if device == "cpu" else ():
        with torch.no_grad():
            bad += not torch.isfinite(selective_state_update(*step_inputs(batch, channels, state))).all()
    sys.stdout.write(f"{len(grid(device))} scans on {device}, {bad} with values that are not finite\n")
    raise SystemExit(1 if bad else 0)


if __name__ == "__main__":
    main()

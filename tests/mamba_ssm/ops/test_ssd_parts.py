"""The four parts of the chunked scan against their judges, with and without boundaries."""

import pytest
import torch

from mamba_ssm.ops.triton.ssd_bmm import bmm_chunk, bmm_chunk_ref
from mamba_ssm.ops.triton.ssd_chunk_scan import chunk_scan, chunk_scan_ref
from mamba_ssm.ops.triton.ssd_chunk_state import chunk_cumsum, chunk_state, chunk_state_ref
from mamba_ssm.ops.triton.ssd_state_passing import state_passing, state_passing_ref
from mamba_ssm.testing import compare, ssd_inputs


@pytest.fixture(params=[False, True], ids=["whole", "pieces"])
def chunked(request):
    """Inputs of the parts in 3 chunks of 4 rows, boundaries at, before and after the edges if asked."""
    t = {k: v.detach() for k, v in ssd_inputs(length=12, dtype=torch.float64).items()}
    rows = {name: t[name].unflatten(1, (3, 4)) for name in ("x", "dt", "B", "C")}
    pieces = torch.tensor([[0] * 3 + [1] * 1 + [2] * 4 + [3] * 4, [0] * 5 + [1] * 7]).unflatten(1, (3, 4))
    rows["pieces"] = pieces if request.param else None
    rows["dA_cumsum"] = chunk_cumsum(rows["dt"].abs(), t["A"])
    rows["initial_states"] = t["initial_states"]
    return {k: v.requires_grad_() if v is not None and v.is_floating_point() else v for k, v in rows.items()}


def take(rows, *names, **more):
    return {name: rows[name] for name in names} | more


def test_bmm_chunk(chunked):
    compare(bmm_chunk, bmm_chunk_ref, {"a": chunked["C"], "b": chunked["B"]}, 1e-12, 1e-12)


def test_chunk_state(chunked):
    t = take(chunked, "B", "x", "dt", "dA_cumsum", "pieces")
    compare(chunk_state, chunk_state_ref, t, 1e-12, 1e-12)


def test_state_passing(chunked):
    states = chunk_state_ref(*(chunked[n].detach() for n in ("B", "x", "dt", "dA_cumsum"))).requires_grad_()
    dA_chunk = chunked["dA_cumsum"].detach()[..., -1].contiguous().requires_grad_()
    t = take(chunked, "initial_states", "pieces", states=states, dA_chunk=dA_chunk)
    compare(state_passing, state_passing_ref, t, 1e-12, 1e-12)


def test_chunk_scan(chunked):
    CB = bmm_chunk_ref(chunked["C"].detach(), chunked["B"].detach()).requires_grad_()
    entering = torch.randn(2, 3, 4, 3, 5, dtype=torch.float64, requires_grad=True)
    t = take(chunked, "x", "dt", "dA_cumsum", "C", "pieces", CB=CB, entering=entering)
    compare(chunk_scan, chunk_scan_ref, t, 1e-12, 1e-12)

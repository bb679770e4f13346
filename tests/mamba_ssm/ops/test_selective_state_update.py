"""One recurrent step: equal to the scans, in place, in both layouts, and its refusals."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_ssm.ops.selective_scan_interface import selective_scan_ref
from mamba_ssm.ops.tiers import use_tier
from mamba_ssm.ops.triton import selective_state_update as module
from mamba_ssm.ops.triton.selective_state_update import selective_state_update, selective_state_update_ref
from mamba_ssm.ops.triton.ssd_combined import ssd_chunk_scan_combined_ref
from mamba_ssm.testing import NoHostSync, assert_close, selective_scan_inputs, ssd_inputs


@pytest.fixture(autouse=True)
def reference_tier():
    with use_tier("reference"):
        yield


@settings(max_examples=20, deadline=None)
@given(
    optional=st.sets(st.sampled_from(("D", "z", "delta_bias"))), groups=st.sampled_from([None, 1, 2, 4]),
    softplus=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_steps_equal_the_selective_scan(optional, groups, softplus, seed):
    names = ("initial_state", *sorted(optional))
    t = {k: v.detach() for k, v in selective_scan_inputs(
        length=5, groups=groups, optional=names, dtype=torch.float64, seed=seed).items()}  # fmt: skip
    want, last = selective_scan_ref(**t, delta_softplus=softplus, return_last_state=True)
    state = t["initial_state"].clone()
    with use_tier("reference"):
        for i in range(5):
            out = selective_state_update(
                state, t["u"][..., i], t["delta"][..., i], t["A"], t["B"][..., i], t["C"][..., i], t.get("D"),
                t["z"][..., i] if "z" in t else None, t.get("delta_bias"), softplus,
            )  # fmt: skip
            assert_close(out, want[..., i], 1e-12)
    assert_close(state, last, 1e-12)


@pytest.mark.parametrize("expanded", [True, False])
def test_steps_equal_the_scan_with_heads(expanded):
    """Values shared by a head's channels may be given by expand or written out."""
    t = {k: v.detach() for k, v in ssd_inputs(length=5, dtype=torch.float64).items()}
    want, last = ssd_chunk_scan_combined_ref(**t, chunk_size=1, dt_softplus=True, return_final_states=True)
    state = t["initial_states"].clone()
    A, D, dt_bias = (t[name][:, None].expand(4, 3) for name in ("A", "D", "dt_bias"))
    A = A.unsqueeze(-1).expand(4, 3, 5)
    for i in range(5):
        dt = t["dt"][:, i, :, None].expand(2, 4, 3)
        shared = (dt, A) if expanded else (dt.clone(), A.clone())
        out = selective_state_update(
            state, t["x"][:, i], *shared, t["B"][:, i], t["C"][:, i], D, t["z"][:, i], dt_bias, dt_softplus=True
        )
        assert_close(out, want[:, i], 1e-12)
    assert_close(state, last, 1e-12)


def step_inputs(dtype=torch.float32, rows=3):
    t = selective_scan_inputs(batch=rows, length=1, groups=2, dtype=dtype)
    step = {n: t[n][..., 0].detach() for n in ("u", "delta", "B", "C", "z")}
    return {
        "state": t["initial_state"].detach(), "x": step["u"], "dt": step["delta"], "A": t["A"].detach(), "B": step["B"],
        "C": step["C"], "D": t["D"].detach(), "z": step["z"], "dt_bias": t["delta_bias"].detach(),
    }  # fmt: skip


def test_rows_of_a_larger_state():
    t = step_inputs(rows=2)
    pool = torch.randn(5, 4, 3)
    before, chosen = pool.clone(), torch.tensor([3, 0], dtype=torch.int32)
    alone = pool[chosen.long()].clone()
    want = selective_state_update_ref(**{**t, "state": alone})
    assert_close(selective_state_update(**{**t, "state": pool}, state_batch_indices=chosen), want, 0.0)
    assert torch.equal(pool[[3, 0]], alone)
    assert torch.equal(pool[[1, 2, 4]], before[[1, 2, 4]])


def test_state_keeps_its_dtype_and_memory():
    t = step_inputs(torch.bfloat16)
    state = t["state"].to(torch.bfloat16)
    address = state.data_ptr()
    out = selective_state_update(**{**t, "state": state})
    assert (out.dtype, state.dtype, state.data_ptr()) == (torch.bfloat16, torch.bfloat16, address)
    assert not torch.equal(state, t["state"].to(torch.bfloat16))


def test_gradients_of_one_step():
    t = {k: v.requires_grad_() for k, v in step_inputs(torch.float64).items() if k != "state"}
    start = torch.randn(3, 4, 3, dtype=torch.float64)
    named = lambda *v: selective_state_update(start.clone(), **dict(zip(t, v, strict=True)), dt_softplus=True)  # noqa: E731
    assert torch.autograd.gradcheck(named, tuple(t.values()))


def test_no_host_sync():
    t = step_inputs()
    with NoHostSync(), torch.no_grad():
        selective_state_update(**t, dt_softplus=True)
        selective_state_update(**t, state_batch_indices=torch.tensor([2, 1, 0]))


@pytest.mark.parametrize("change, error, message", [
    ({"state": torch.zeros(3, 4)}, ValueError, r"state has shape \(3, 4\), expected \(B, D, N\) or \(B, H, P, N\)"),
    ({"x": torch.zeros(2, 4)}, ValueError, r"x has shape \(2, 4\), expected \(B, D\) = \(3, 4\)"),
    ({"dt": torch.zeros(3, 4, 1)}, ValueError, r"dt has shape \(3, 4, 1\), expected \(B, D\) like x"),
    ({"A": torch.zeros(4, 2)}, ValueError, r"A has shape \(4, 2\), expected \(D, N\) = \(4, 3\)"),
    ({"B": torch.zeros(3, 3, 3)}, ValueError, "B has 3 groups, expected a divisor of 4"),
    ({"C": torch.zeros(3, 4)}, ValueError, r"C has shape \(3, 4\), expected \(B, N\) or \(B, G, N\)"),
    ({"D": torch.zeros(1)}, ValueError, r"D has shape \(1,\)"),
    ({"dt_bias": torch.zeros(4, 3)}, ValueError, r"dt_bias has shape \(4, 3\)"),
    ({"state_batch_indices": torch.zeros(3)}, TypeError, "state_batch_indices has dtype"),
])  # fmt: skip
def test_wrong_arguments_are_refused_by_name(change, error, message):
    for update in (selective_state_update, selective_state_update_ref):
        with pytest.raises(error, match=message):
            update(**{**step_inputs(), **change})


@pytest.mark.parametrize(("rows", "states", "takes_native"), [(1, 8, True), (128, 8, False), (128, 16, True)])
def test_the_cpu_takes_what_is_faster(rows, states, takes_native, monkeypatch):
    """Heads that share A have few exponentials, which the C++ step does not know; above its vector it wins anyway."""
    calls = []
    monkeypatch.setattr(module, "native_state_update", lambda *arguments: calls.append(arguments) or arguments[1])
    state, x = torch.zeros(rows, 4, 32, states), torch.randn(rows, 4, 32)
    A, row = torch.full((4, 1, 1), -1.0).expand(4, 32, states), torch.randn(rows, states)
    module._update_native(state, x, torch.ones(rows, 4, 1).expand_as(x), A, row, row, None, None, None, False, None)
    assert bool(calls) == takes_native and bool(state.any()) != takes_native

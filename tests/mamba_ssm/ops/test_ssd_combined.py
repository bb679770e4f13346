"""State-space duality: chunked = sequential in outputs, states and gradients, whatever chunk size and boundaries."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_ssm.modules.ssd_minimal import ssd_minimal_discrete
from mamba_ssm.ops.tiers import use_tier
from mamba_ssm.ops.triton.ssd_combined import (
    mamba_chunk_scan,
    mamba_chunk_scan_combined,
    mamba_split_conv1d_scan_combined,
    mamba_split_conv1d_scan_ref,
    ssd_chunk_scan_combined_ref,
    ssd_selective_scan,
)
from mamba_ssm.testing import (
    FORWARD_TOLERANCE,
    GRADIENT_TOLERANCE,
    NoHostSync,
    assert_close,
    compare,
    relative_error,
    ssd_inputs,
)

LENGTHS = [1, 2, 3, 17, 63, 64, 65, 127, 128, 129, 255, 257]
OPTIONAL = ("D", "z", "dt_bias", "initial_states", "seq_idx")


@pytest.fixture(autouse=True)
def reference_tier():
    with use_tier("reference"):
        yield


def test_judge_equals_a_loop_over_rows():
    """The recurrence written out for one batch row and one head at a time."""
    t = ssd_inputs(length=6, optional=("D", "z", "dt_bias", "initial_states"), dtype=torch.float64)
    options = {"chunk_size": 1, "dt_softplus": True, "dt_limit": (0.3, 0.9), "return_final_states": True}
    out, final = ssd_chunk_scan_combined_ref(**t, **options)
    for b in range(2):
        for head in range(4):
            h = t["initial_states"][b, head]
            for row in range(6):
                dt = F.softplus(t["dt"][b, row, head] + t["dt_bias"][head]).clamp(0.3, 0.9)
                x = t["x"][b, row, head]
                h = torch.exp(dt * t["A"][head]) * h + dt * torch.outer(x, t["B"][b, row, head // 2])
                y = h @ t["C"][b, row, head // 2] + t["D"][head] * x
                assert_close(out[b, row, head], y * F.silu(t["z"][b, row, head]), 1e-12)
            assert_close(final[b, head], h, 1e-12)


@pytest.mark.parametrize("length", LENGTHS)
def test_chunked_equals_sequential_with_gradients(length):
    chunk_size = {1: 256, 2: 1, 3: 2, 17: 5}.get(length, 64)
    t = ssd_inputs(1, length, heads=2, headdim=2, state=3, optional=OPTIONAL, dtype=torch.float64, seed=length)
    options = {"chunk_size": chunk_size, "dt_softplus": True, "return_final_states": True}
    compare(mamba_chunk_scan_combined, ssd_chunk_scan_combined_ref, t, 1e-10, 1e-10, **options)


@pytest.mark.parametrize("length", [64, 128, 192])
@pytest.mark.parametrize("chunk_size", [16, 32, 64])
def test_chunked_equals_minimal(length, chunk_size):
    t = ssd_inputs(length=length, groups=4, optional=("initial_states",), dtype=torch.float64)
    dt = F.softplus(t["dt"])
    y, final = ssd_minimal_discrete(
        t["x"] * dt.unsqueeze(-1), t["A"] * dt, t["B"], t["C"], chunk_size, t["initial_states"].unsqueeze(1)
    )
    out, last = mamba_chunk_scan_combined(**t, chunk_size=chunk_size, dt_softplus=True, return_final_states=True)
    assert_close(out, y, 1e-12)
    assert_close(last, final, 1e-12)


@settings(max_examples=40, deadline=None)
@given(
    length=st.integers(0, 40), chunk_size=st.integers(1, 48), groups=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 99), optional=st.sets(st.sampled_from(OPTIONAL)), D_has_hdim=st.booleans(),
    softplus=st.booleans(), final=st.booleans(), dt_limit=st.sampled_from([(0.0, math.inf), (0.2, 0.6)]),
)  # fmt: skip
def test_every_subset_of_options(length, chunk_size, groups, seed, optional, D_has_hdim, softplus, final, dt_limit):
    t = ssd_inputs(
        length=length, groups=groups, D_has_hdim=D_has_hdim, optional=sorted(optional), dtype=torch.float64, seed=seed
    )
    with use_tier("reference"):
        compare(
            mamba_chunk_scan_combined, ssd_chunk_scan_combined_ref, t, 1e-10, 1e-10, chunk_size=chunk_size,
            dt_softplus=softplus, dt_limit=dt_limit, return_final_states=final,
        )  # fmt: skip


@pytest.mark.parametrize("chunk_size", [1, 3, 8, 64])
def test_packed_sequences_equal_a_loop_over_them(chunk_size):
    t = ssd_inputs(batch=1, length=23, optional=("D", "z", "dt_bias"), dtype=torch.float64)
    starts = [0, 5, 5, 6, 16, 23]
    options = {"chunk_size": chunk_size, "dt_softplus": True, "return_final_states": True}
    out, final, states = mamba_chunk_scan_combined(
        **t, cu_seqlens=torch.tensor(starts), return_varlen_states=True, **options
    )
    rows = ("x", "dt", "B", "C", "z")
    for i, (a, b) in enumerate(itertools.pairwise(starts)):
        alone, last = mamba_chunk_scan_combined(**{k: v[:, a:b] if k in rows else v for k, v in t.items()}, **options)
        assert_close(out[:, a:b], alone, 1e-12)
        assert_close(states[i], last[0], 1e-12)
    assert_close(final, states[-1:], 1e-12)


def test_packed_states_have_gradients_and_take_the_first_initial_state():
    t = ssd_inputs(batch=1, length=12, dtype=torch.float64)
    options = {"chunk_size": 5, "dt_softplus": True, "return_varlen_states": True}
    options["cu_seqlens"] = torch.tensor([0, 7, 7, 9, 12], dtype=torch.int32)
    compare(mamba_chunk_scan_combined, ssd_chunk_scan_combined_ref, t, 1e-10, 1e-10, **options)
    options["seq_idx"] = torch.zeros(1, 12, dtype=torch.int32)               # states on the way through one sequence
    compare(mamba_chunk_scan_combined, ssd_chunk_scan_combined_ref, t, 1e-10, 1e-10, **options)


@pytest.mark.parametrize("optional", [(), OPTIONAL])
def test_gradcheck(optional):
    t = ssd_inputs(batch=1, length=5, heads=2, headdim=2, groups=1, state=2, optional=optional, dtype=torch.float64)

    def scan(*tensors):
        named = dict(zip(t, tensors, strict=True))
        return mamba_chunk_scan_combined(**named, chunk_size=2, dt_softplus=True, return_final_states=True)

    assert torch.autograd.gradcheck(scan, tuple(t.values()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision(dtype):
    t = ssd_inputs(length=129, headdim=8, optional=OPTIONAL, dtype=dtype)
    out, final = mamba_chunk_scan_combined(**t, chunk_size=64, dt_softplus=True, return_final_states=True)
    assert (out.dtype, final.dtype) == (dtype, torch.float32)
    bounds = FORWARD_TOLERANCE[dtype], GRADIENT_TOLERANCE[dtype]
    compare(mamba_chunk_scan_combined, ssd_chunk_scan_combined_ref, t, *bounds, chunk_size=64, dt_softplus=True)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length, state, headdim, groups", [
    (1000, 1, 16, 1), (2048, 4, 32, 2), (4099, 16, 64, 4), (256, 64, 128, 1), (257, 128, 64, 2), (129, 256, 16, 4),
])  # fmt: skip
def test_large_sizes(length, state, headdim, groups, dtype):
    """The corners of what models use, in every dtype, against the judge in float64."""
    t = ssd_inputs(1, length, headdim=headdim, groups=groups, state=state, optional=OPTIONAL, dtype=dtype)
    options = {"chunk_size": 64, "dt_softplus": True, "return_final_states": True}
    bounds = FORWARD_TOLERANCE[dtype], GRADIENT_TOLERANCE[dtype]
    compare(mamba_chunk_scan_combined, ssd_chunk_scan_combined_ref, t, *bounds, **options)


def test_autocast_changes_nothing():
    t = ssd_inputs(length=33)
    want = mamba_chunk_scan_combined(**t, chunk_size=16)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(mamba_chunk_scan_combined(**t, chunk_size=16), want)


@pytest.mark.parametrize("huge", [100.0, 1e20])
def test_small_decays_survive_a_huge_step(huge):
    """After Δ·A = -1600 a float32 running sum has no digits left for steps of 1e-3, after -1e21 a float64 sum."""
    t = ssd_inputs(length=64, optional=())
    t["dt"] = torch.full_like(t["dt"], 1e-3)
    t["dt"][:, ::9] = huge
    t["x"] = t["x"].detach().clone()
    t["x"][:, ::9] = 0.0
    t["A"] = torch.full_like(t["A"], -16.0)
    wide = {k: v.double() for k, v in t.items()}
    out = mamba_chunk_scan_combined(**t, chunk_size=64)
    assert relative_error(out, ssd_chunk_scan_combined_ref(**wide, chunk_size=1)) < 1e-6


@pytest.mark.parametrize("value", [1e30, 60.0, 1e-30, 0.0])
def test_extreme_steps_give_finite_values_and_gradients(value):
    t = ssd_inputs(length=33, optional=("D", "z", "seq_idx"))
    t["dt"] = torch.full_like(t["dt"], value, requires_grad=True)
    t["x"] = (t["x"].detach() * 1e-3).requires_grad_()
    out = mamba_chunk_scan_combined(**t, chunk_size=16)
    grads = torch.autograd.grad(out.sum(), [v for v in t.values() if v.requires_grad])
    assert all(torch.isfinite(v).all() for v in (out, *grads))


def test_causality():
    t = ssd_inputs(length=40, optional=(), dtype=torch.float64)
    out = mamba_chunk_scan_combined(**t, chunk_size=16)
    changed = {**t, "x": torch.cat([t["x"][:, :21], torch.full_like(t["x"][:, 21:], 1e6)], dim=1)}
    assert torch.equal(mamba_chunk_scan_combined(**changed, chunk_size=16)[:, :21], out[:, :21])


def test_other_names_of_the_same_scan():
    t = ssd_inputs(optional=("D", "z", "dt_bias"), dtype=torch.float64)
    want = ssd_chunk_scan_combined_ref(**t, chunk_size=4, dt_softplus=True)
    assert_close(mamba_chunk_scan(**t, chunk_size=4, dt_softplus=True), want, 1e-12)
    assert_close(ssd_selective_scan(**t, dt_softplus=True), want, 1e-12)


def test_no_host_sync():
    t = ssd_inputs(batch=1, optional=OPTIONAL)
    with NoHostSync():
        out, *_ = mamba_chunk_scan_combined(
            **t, chunk_size=5, cu_seqlens=torch.tensor([0, 9, 17]), return_varlen_states=True, return_final_states=True
        )
        out.sum().backward()


def test_compiles_without_graph_breaks():
    t = ssd_inputs(optional=OPTIONAL, dtype=torch.float64)
    compiled = torch.compile(mamba_chunk_scan_combined, fullgraph=True, backend="eager")
    assert_close(compiled(**t, chunk_size=5), mamba_chunk_scan_combined(**t, chunk_size=5), 1e-12)


def split_inputs(bypass=0, D_has_hdim=False, norm=True, projection=True):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    heads, headdim, groups, state = 4, 3, 2, 5
    dim, conv_dim = heads * headdim, heads * headdim + 2 * groups * state
    return {
        "zxbcdt": draw(2, 11, 2 * bypass + dim + conv_dim + heads), "conv1d_weight": draw(conv_dim, 4),
        "conv1d_bias": draw(conv_dim), "dt_bias": draw(heads), "A": -draw(heads).detach().exp(),
        "D": draw(heads, headdim) if D_has_hdim else draw(heads), "initial_states": draw(2, heads, headdim, state),
        "rmsnorm_weight": draw(dim) if norm else None, "outproj_weight": draw(7, bypass + dim) if projection else None,
        "outproj_bias": draw(7) if projection else None,
    }  # fmt: skip


@pytest.mark.parametrize("bypass", [0, 2])
@pytest.mark.parametrize("D_has_hdim", [False, True])
@pytest.mark.parametrize("norm, norm_before_gate", [(False, True), (True, True), (True, False)])
def test_inner_block_equals_its_judge(bypass, D_has_hdim, norm, norm_before_gate):
    t = split_inputs(bypass, D_has_hdim, norm, projection=norm)
    options = {"chunk_size": 4, "ngroups": 2, "headdim": 3, "norm_before_gate": norm_before_gate}
    options |= {"seq_idx": torch.tensor([[0] * 6 + [1] * 5, [0] * 11]), "return_final_states": True}
    compare(mamba_split_conv1d_scan_combined, mamba_split_conv1d_scan_ref, t, 1e-10, 1e-10, **options)


def test_inner_block_equals_its_formula():
    t = split_inputs(bypass=2)
    out = mamba_split_conv1d_scan_ref(**t, chunk_size=4, ngroups=2, headdim=3, norm_before_gate=False, rmsnorm_eps=1e-5)
    gate, value, z, xBC, dt = t["zxbcdt"].split([2, 2, 12, 32, 4], dim=-1)
    xBC = F.conv1d(xBC.transpose(1, 2), t["conv1d_weight"].unsqueeze(1), t["conv1d_bias"], padding=3, groups=32)
    x, B, C = F.silu(xBC[..., :11]).transpose(1, 2).split([12, 10, 10], dim=-1)
    y = ssd_chunk_scan_combined_ref(
        x.reshape(2, 11, 4, 3), dt, t["A"], B.reshape(2, 11, 2, 5), C.reshape(2, 11, 2, 5), 1, D=t["D"],
        dt_bias=t["dt_bias"], initial_states=t["initial_states"], dt_softplus=True,
    ).reshape(2, 11, 12)  # fmt: skip
    y = (y * F.silu(z)).reshape(2, 11, 2, 6)
    y = (y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt()).reshape(2, 11, 12) * t["rmsnorm_weight"]
    y = torch.cat([F.silu(gate) * value, y], dim=-1)
    assert_close(out, y @ t["outproj_weight"].T + t["outproj_bias"], 1e-12)


@pytest.mark.parametrize("change, error, message", [
    ({"x": torch.zeros(2, 17, 4)}, ValueError, r"x has shape \(2, 17, 4\), expected \(B, L, H, P\)"),
    ({"dt": torch.zeros(2, 17, 3)}, ValueError, r"dt has shape \(2, 17, 3\), expected \(B, L, H\) = \(2, 17, 4\)"),
    ({"A": torch.zeros(4, 3)}, ValueError, r"A has shape \(4, 3\), expected \(H\) = \(4\)"),
    ({"B": torch.zeros(2, 17, 3, 5)}, ValueError, r"B has 3 groups, expected a divisor of H = 4"),
    ({"C": torch.zeros(2, 17, 2, 4)}, ValueError, r"C has shape \(2, 17, 2, 4\), expected .* like B"),
    ({"D": torch.zeros(4, 2)}, ValueError, r"D has shape \(4, 2\), expected \(H\) or \(H, P\) = \(4\) or \(4, 3\)"),
    ({"z": torch.zeros(2, 17, 12)}, ValueError, r"z has shape \(2, 17, 12\)"),
    ({"dt_bias": torch.zeros(1)}, ValueError, r"dt_bias has shape \(1,\)"),
    ({"initial_states": torch.zeros(2, 4, 5, 3)}, ValueError, r"initial_states .* \(B, H, P, N\) = \(2, 4, 3, 5\)"),
    ({"seq_idx": torch.zeros(2, 17)}, TypeError, r"seq_idx has dtype torch\.float32"),
    ({"chunk_size": 0}, ValueError, "chunk_size is 0, expected at least 1"),
    ({"cu_seqlens": torch.tensor([0, 17])}, ValueError, "cu_seqlens packs sequences into one batch row"),
    ({"return_varlen_states": True}, ValueError, "return_varlen_states is true but cu_seqlens is None"),
])  # fmt: skip
def test_wrong_arguments_are_refused_by_name(change, error, message):
    for scan in (mamba_chunk_scan_combined, mamba_chunk_scan, ssd_chunk_scan_combined_ref):
        with pytest.raises(error, match=message):
            scan(**{**ssd_inputs(), "chunk_size": 8, **change})


def test_inner_block_refuses_widths_that_do_not_fit():
    t = split_inputs()
    with pytest.raises(ValueError, match="headdim is None, expected P because D has shape"):
        mamba_split_conv1d_scan_combined(**t, chunk_size=4, ngroups=2)
    with pytest.raises(ValueError, match=r"zxbcdt has shape \(2, 11, 47\) and conv1d_weight \(32, 4\)"):
        mamba_split_conv1d_scan_combined(**{**t, "zxbcdt": t["zxbcdt"][..., :47]}, chunk_size=4, ngroups=2, headdim=3)

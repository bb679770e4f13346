"""State-space duality in Triton, on a GPU or interpreted: each tile, option and layout agrees with the reference."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mamba_ssm.ops.tiers import explain, use_tier
from mamba_ssm.ops.triton import launch
from mamba_ssm.ops.triton.selective_state_update import selective_state_update
from mamba_ssm.ops.triton.ssd_combined import (
    mamba_chunk_scan,
    mamba_chunk_scan_combined,
    mamba_split_conv1d_scan_combined,
    mamba_split_conv1d_scan_ref,
    ssd_chunk_scan_combined_ref,
)
from mamba_ssm.testing import (
    FORWARD_TOLERANCE,
    GRADIENT_TOLERANCE,
    NoHostSync,
    assert_close,
    compare,
    in_case,
    outputs_and_gradients,
    relative_error,
    ssd_inputs,
    to_float64,
)

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
OPTIONAL = ("D", "z", "dt_bias", "initial_states", "seq_idx")
SCAN = {"chunk_size": 256, "dt_softplus": True, "return_final_states": True}
SMALL = {"heads": 2, "headdim": 16, "groups": 1, "state": 16}
# Examples are the same each time: by chance the derivative of dt_bias, a sum, cancels to 1/300 of its terms, and no
# float32 code then has the digits that are asked for.
REPRODUCIBLE = {"deadline": None, "derandomize": True}
LENGTHS = [1, 2, 3, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000, 2048, 4099]

runs = pytest.mark.skipif(not (ON_GPU or launch.INTERPRETED), reason="runs on a GPU or interpreted")
gpu = [pytest.mark.gpu, pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")]


def on_gpu(test):
    for mark in gpu:
        test = mark(test)
    return test


@pytest.fixture(autouse=True)
def kernels_run(monkeypatch, interpreted_loops):
    """The Triton tier for the tests' tensors, also where a CPU interprets it."""
    if launch.INTERPRETED and not ON_GPU:
        from mamba_ssm.ops import tiers
        from mamba_ssm.ops.triton import ssd_triton

        for operator in ("mamba_chunk_scan_combined", "mamba_split_conv1d_scan_combined"):
            monkeypatch.setitem(tiers._operators[operator].tiers_by_device, "cpu", ("triton",))
        monkeypatch.setitem(tiers._DEVICE_OF_TIER, "triton", "cpu")
        monkeypatch.setattr(ssd_triton, "_multiprocessors", lambda device: 1)
        monkeypatch.setattr(ssd_triton, "_kinds", {})
        interpret_bfloat16(monkeypatch)


def interpret_bfloat16(monkeypatch):
    """The interpreter keeps bfloat16 as 16 bits: its dot would multiply those, and its casts cut."""
    import triton.language as tl
    from triton.runtime import interpreter

    def widened(handle):
        return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self, a, b, *others, plain=interpreter.InterpreterBuilder.create_dot):
        if a.data.dtype == np.uint16:
            a, b = widened(a), widened(b)
        return plain(self, a, b, *others)

    def convert(values, source, target, *others, plain=interpreter._convert_float):
        if (source, target) == (tl.float32, tl.bfloat16):
            bits = np.ascontiguousarray(values).view(np.uint32)
            values = (bits + 0x7FFF + ((bits >> 16) & 1)).view(np.float32)
        return plain(values, source, target, *others)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
    monkeypatch.setattr(interpreter, "_convert_float", convert)


def inputs(batch=1, length=17, dtype=torch.float32, **sizes):
    return ssd_inputs(batch, length, dtype=dtype, device=DEVICE, **{**SMALL, "optional": OPTIONAL, **sizes})


def check(t, dtype=torch.float32, reference=mamba_chunk_scan, **options):
    compare(
        mamba_chunk_scan_combined, reference, t, FORWARD_TOLERANCE[dtype], GRADIENT_TOLERANCE[dtype],
        **{**SCAN, **options},
    )  # fmt: skip


@runs
def test_the_triton_tier_is_the_one_that_runs():
    assert explain("mamba_chunk_scan_combined", DEVICE).tier == "triton"


@runs
@pytest.mark.parametrize("length, chunk_size", [(1, 256), (17, 256), (33, 16), (65, 32)])
def test_lengths_around_the_chunk(length, chunk_size):
    check(inputs(length=length), reference=ssd_chunk_scan_combined_ref, chunk_size=chunk_size)


@runs
@settings(max_examples=100 if ON_GPU else 5, **REPRODUCIBLE)
@given(
    length=st.integers(1, 40), optional=st.sets(st.sampled_from(OPTIONAL)), D_has_hdim=st.booleans(),
    softplus=st.booleans(), final=st.booleans(), dt_limit=st.sampled_from([(0.0, float("inf")), (0.2, 0.6)]),
    groups=st.sampled_from([1, 2]), headdim=st.sampled_from([16, 20]), state=st.sampled_from([1, 5, 20]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_every_subset_of_options(length, optional, D_has_hdim, softplus, final, dt_limit, groups, headdim, state, seed):
    t = inputs(
        length=length, optional=sorted(optional), D_has_hdim=D_has_hdim, groups=groups, headdim=headdim, state=state,
        seed=seed,
    )  # fmt: skip
    judge = ssd_chunk_scan_combined_ref                     # row by row: exactly 0 where no row reaches another
    check(t, reference=judge, chunk_size=16, dt_softplus=softplus, dt_limit=dt_limit, return_final_states=final)


@runs
@pytest.mark.parametrize("spans", [1, 3])
def test_spans_of_chunks_change_nothing(spans, monkeypatch):
    """One program for all chunks, or a span each and a pass over their states."""
    from mamba_ssm.ops.triton import ssd_triton

    monkeypatch.setattr(ssd_triton, "units_in_span", lambda units, programs, device: -(-units // spans))
    check(inputs(length=140, heads=1), chunk_size=32)


@runs
@torch.no_grad()
def test_spans_without_a_backward_pass(monkeypatch):
    """What only backward needs of the states between spans is left out; asking for gradients then is refused."""
    from mamba_ssm.ops.triton import ssd_triton

    monkeypatch.setattr(ssd_triton, "units_in_span", lambda units, programs, device: 1)
    t = inputs(length=140, heads=1, dtype=torch.bfloat16)
    out = mamba_chunk_scan_combined(**t, chunk_size=64)
    wide = {name: to_float64(value) for name, value in t.items()}
    assert_close(out, mamba_chunk_scan(**wide, chunk_size=64), FORWARD_TOLERANCE[torch.bfloat16])
    arguments = (*(t[n] for n in ("x", "dt", "A", "B", "C", *OPTIONAL)), 16, False, 0.0, float("inf"), True)
    with torch.enable_grad(), pytest.raises(ValueError, match="for_backward is False"):
        torch.ops.mamba_ssm_triton.ssd_scan(*arguments, False)


@runs
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision(dtype):
    t = inputs(1, 40, dtype, optional=("D", "z", "dt_bias"))
    check(t, dtype, chunk_size=16)


@runs
@pytest.mark.parametrize("chunk_size", [16, 64])
def test_packed_sequences_equal_a_loop_over_them(chunk_size):
    t = inputs(length=41, optional=("D", "z", "dt_bias"))
    starts = [0, 9, 9, 10, 16, 33, 41]
    packed = {"cu_seqlens": torch.tensor(starts, device=DEVICE), "return_varlen_states": True}
    with torch.no_grad():
        out, final, states = mamba_chunk_scan_combined(**t, **{**SCAN, "chunk_size": chunk_size}, **packed)
        for i, (a, b) in enumerate(itertools.pairwise(starts)):
            piece = {k: v[:, a:b] if k in ("x", "dt", "B", "C", "z") else v for k, v in t.items()}
            with use_tier("reference"):
                alone, last = mamba_chunk_scan_combined(**piece, **SCAN)
            assert_close(out[:, a:b], alone, 1e-5) if b > a else None
            assert_close(states[i], last[0], 1e-5)
        assert_close(final, states[-1:], 1e-6)


def check_packed(t, starts, dtype=torch.float32, **options):
    packed = {"cu_seqlens": torch.tensor(starts, device=DEVICE), "return_varlen_states": True}
    check(t, dtype, **packed, **options)


@runs
@settings(max_examples=20 if ON_GPU else 4, **REPRODUCIBLE)
@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=4).filter(any), dt_softplus=st.booleans(),
    optional=st.sets(st.sampled_from(OPTIONAL[:4])), return_final_states=st.booleans(),
    dt_limit=st.sampled_from([(0.0, float("inf")), (0.2, 0.6)]), groups=st.sampled_from([1, 2]), seed=st.integers(0, 9),
)  # fmt: skip
@example(
    lengths=[35, 0, 18], dt_softplus=True, optional={"dt_bias", "initial_states"}, return_final_states=False,
    dt_limit=(0.0, float("inf")), groups=1, seed=0,
)  # fmt: skip
def test_states_of_packed_sequences_are_differentiated(lengths, optional, groups, seed, **options):
    """Outputs and end states together, empty sequences and one that the initial states enter among them."""
    starts = [0, *itertools.accumulate(lengths)]
    t = inputs(length=starts[-1], optional=sorted(optional), groups=groups, state=5, seed=seed)
    check_packed(t, starts, chunk_size=16, **options)


@runs
@pytest.mark.parametrize("starts, changes, optional", [
    ([0, 5, 60], (14, 50), ("dt_bias", "initial_states")), ([3, 3, 20, 20, 41, 57], (60, 60), ("initial_states",)),
    ([0, 0, 30, 60, 60], (2, 30), ()), ([20, 21, 33], (1, 60), ("dt_bias",)),
])  # fmt: skip
def test_states_of_sequences_that_seq_idx_joins_are_differentiated(starts, changes, optional):
    """A state then depends on rows of other sequences, on those ahead of the first sequence too, back to a change."""
    t = inputs(length=60, optional=optional, groups=2, state=5)
    joined = torch.tensor([[0] * changes[0] + [1] * (changes[1] - changes[0]) + [0] * (60 - changes[1])], device=DEVICE)
    check_packed(t, starts, seq_idx=joined, chunk_size=16, return_final_states=False)


@runs
def test_pieces_equal_each_alone():
    t = inputs(length=50, optional=("D", "dt_bias", "z"))
    edges = [0, 15, 16, 17, 33, 50]
    index = torch.zeros(1, 50, dtype=torch.int64, device=DEVICE)
    for i, (a, b) in enumerate(itertools.pairwise(edges)):
        index[:, a:b] = i % 2                                                # indices recur: only changes count
    with torch.no_grad():
        out = mamba_chunk_scan_combined(**t, seq_idx=index, chunk_size=16)
        for a, b in itertools.pairwise(edges):
            piece = {k: v[:, a:b] if k in ("x", "dt", "B", "C", "z") else v for k, v in t.items()}
            assert_close(out[:, a:b], mamba_chunk_scan_combined(**piece, chunk_size=16), 1e-5)


@runs
def test_layouts():
    """Transposed, expanded and sliced inputs, with gradients."""
    t = inputs(length=20)
    base = t["x"].detach()
    t["x"] = base.permute(1, 3, 0, 2).contiguous().permute(2, 0, 3, 1).requires_grad_()
    t["z"] = torch.cat([t["z"].detach(), base], dim=-1)[..., :16].requires_grad_()
    t["B"] = t["B"].detach()[:, :1].expand(-1, 20, -1, -1).requires_grad_()
    t["A"] = t["A"].detach()[:1].expand(2).requires_grad_()
    t["seq_idx"] = t["seq_idx"].T.contiguous().T
    check(t, chunk_size=16)


@runs
def test_what_is_kept_of_a_call_serves_none_of_another_kind():
    """Of one shape: other dtypes, layouts and options, one after the other."""
    plain = inputs(length=20, optional=("D", "dt_bias"))
    strided = {**plain, "x": torch.cat([plain["x"].detach()] * 2, dim=1)[:, ::2].requires_grad_()}
    expanded = {**plain, "D": plain["D"].detach()[:1].expand(2).requires_grad_()}
    by_channel = inputs(length=20, optional=("D", "dt_bias", "z"), D_has_hdim=True)
    low = inputs(length=20, optional=("D", "dt_bias"), dtype=torch.bfloat16)
    for softplus, final in ((True, False), (False, True), (True, False)):
        check(low, torch.bfloat16, chunk_size=16, dt_softplus=softplus, return_final_states=final)
    for t in 2 * [plain, strided, expanded, by_channel]:
        check(t, chunk_size=16, return_final_states=False)


@runs
@pytest.mark.parametrize("length, kernels", [
    (64, ["_scan", "_scan_backward", "_adding"]), (128, ["_scan", "_both_walks", "_scan_backward", "_adding"]),
])  # fmt: skip
def test_short_sequences_take_few_launches(length, kernels, monkeypatch):
    from mamba_ssm.ops.triton import ssd_triton

    launched = []

    class Recorded:
        def __init__(self, kernel, *arguments):
            self.name = kernel.fn.__name__

        def __call__(self, tensors):
            launched.append(self.name.removesuffix("_kernel"))

    monkeypatch.setattr(ssd_triton, "Launch", Recorded)
    t = ssd_inputs(2, length, 2, 64, 1, 16, optional=("D", "dt_bias"), dtype=torch.bfloat16, device=DEVICE)
    mamba_chunk_scan_combined(**t, chunk_size=256).sum().backward()
    assert launched == kernels


@runs
@pytest.mark.parametrize("huge", [1e4, 1e20])
def test_small_decays_survive_a_huge_step(huge):
    """After Δ·A = -1600 a float32 running sum has no digits left for steps of 1e-3."""
    t = inputs(length=40, optional=())
    t["dt"] = torch.full_like(t["dt"], 1e-3)
    t["dt"][:, ::9] = huge
    t["x"] = t["x"].detach().clone()
    t["x"][:, ::9] = 0.0
    t["A"] = torch.full_like(t["A"], -16.0)
    out = mamba_chunk_scan_combined(**t, chunk_size=64)
    wide = {k: to_float64(v) for k, v in t.items()}
    assert relative_error(out, ssd_chunk_scan_combined_ref(**wide, chunk_size=1)) < 2e-6


@runs
@pytest.mark.parametrize("value, rate", [(1e4, -1e4), (1e4, -1.0), (1e30, -1.0), (1e-30, -1e4), (0.0, -1.0)])
def test_extreme_steps_give_finite_values_and_gradients(value, rate):
    t = inputs(length=20, optional=("D", "z", "seq_idx"))
    t["dt"] = torch.full_like(t["dt"], value, requires_grad=True)
    t["A"] = torch.full_like(t["A"], rate, requires_grad=True)
    t["x"] = (t["x"].detach() * 1e-3).requires_grad_()
    out = mamba_chunk_scan_combined(**t, chunk_size=16)
    grads = torch.autograd.grad(out.sum(), [v for v in t.values() if v.requires_grad])
    assert all(torch.isfinite(v).all() for v in (out, *grads))


@runs
def test_gradients_of_the_decay_keep_their_digits_at_fast_decays():
    """A = -30 with steps that differ by four orders: sums over pairs, no differences of large numbers."""
    t = inputs(length=40, optional=("initial_states",))
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    t["dt"] = torch.logspace(-4, 0, 40)[order].view(1, -1, 1).expand(1, 40, 2).to(DEVICE).clone().requires_grad_()
    t["A"] = torch.full_like(t["A"], -30.0).requires_grad_()
    check(t, chunk_size=16, dt_softplus=False)


@runs
def test_repeats_bit_for_bit():
    t = inputs(batch=2, length=20)
    first = outputs_and_gradients(mamba_chunk_scan_combined, t, **SCAN)
    second = outputs_and_gradients(mamba_chunk_scan_combined, t, **SCAN)
    for a, b in zip(first, second, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)


@runs
def test_empty_inputs_and_float64_go_to_the_reference():
    t = inputs(length=0)
    out, final = mamba_chunk_scan_combined(**t, **SCAN)
    assert out.shape == (1, 0, 2, 16)
    assert_close(final, t["initial_states"], 1e-6)
    wide = {k: to_float64(v) for k, v in inputs(length=5).items()}
    assert_close(mamba_chunk_scan_combined(**wide, **SCAN)[0], mamba_chunk_scan(**wide, **SCAN)[0], 1e-12)


@runs
def test_opcheck():
    t = inputs(length=5, heads=1)
    arguments = (*(t[n] for n in ("x", "dt", "A", "B", "C", *OPTIONAL)), 16, True, 0.0, float("inf"))
    operators = torch.ops.mamba_ssm_triton
    torch.library.opcheck(operators.ssd_scan.default, (*arguments, True, True))
    detached = [v.detach() if isinstance(v, torch.Tensor) else v for v in arguments]
    dout, dfinal = torch.randn_like(detached[0]), torch.randn_like(detached[8])          # x, initial_states
    torch.library.opcheck(operators.ssd_scan_backward.default, (dout, dfinal, None, *detached))
    ends = torch.tensor([0, 3, 5], device=DEVICE)
    torch.library.opcheck(
        operators.ssd_packed_states.default, (*arguments[:4], *arguments[7:9], None, ends, True, *arguments[10:])
    )
    dstates = torch.randn(2, 1, 16, 16, device=DEVICE)
    torch.library.opcheck(
        operators.ssd_packed_states_backward.default,
        (dstates, None, *detached[:4], *detached[7:9], None, ends, *detached[10:]),
    )
    joined = operators.ssd_packed_states(*detached[:4], *detached[7:10], ends, False, *detached[10:])
    torch.library.opcheck(
        operators.ssd_packed_states_backward.default,
        (dstates, joined, *detached[:4], *detached[7:10], ends, *detached[10:]),
    )


@runs
def test_compiles_whole():
    t = inputs(length=20)
    compiled = torch.compile(mamba_chunk_scan_combined, fullgraph=True, backend="aot_eager")
    for got, want in zip(
        outputs_and_gradients(compiled, t, **SCAN), outputs_and_gradients(mamba_chunk_scan_combined, t, **SCAN),
        strict=True,
    ):  # fmt: skip
        assert all(torch.equal(got[name], want[name]) for name in want)


@runs
def test_autocast_and_host_sync():
    """Autocast changes nothing, and nothing waits for the device."""
    t = inputs(length=20)
    want = mamba_chunk_scan_combined(**t, chunk_size=16)
    with torch.autocast(DEVICE, torch.bfloat16), NoHostSync():
        out = mamba_chunk_scan_combined(**t, chunk_size=16)
        out.sum().backward()
    assert torch.equal(out, want)


@pytest.fixture
def tuned_passes(monkeypatch):
    """Autotuning, with nothing remembered.   -> the passes that were tuned, to look at"""
    from mamba_ssm.ops.triton import tuning

    monkeypatch.setattr(tuning, "AUTOTUNE", True)
    monkeypatch.setattr(tuning, "_fastest", {})
    return tuning._fastest


@runs
@pytest.mark.parametrize("fastest", [0, 3, 7])
def test_every_plan_gives_the_same(fastest, tuned_passes, monkeypatch):
    """Each pass runs with the plan that is made the fastest here, not that of the table."""
    from mamba_ssm.ops.triton import tuning

    numbers = itertools.count()
    monkeypatch.setattr(tuning, "can_measure", lambda device: True)
    monkeypatch.setattr(tuning, "launched_milliseconds", lambda call: abs(next(numbers) % 8 - fastest))
    check(inputs(length=40, headdim=32, state=32), chunk_size=32)
    assert {name for name, *_ in tuned_passes} == {"ssd_scan", "ssd_scan_backward"}


@runs
def test_plans_differ_and_keep_rows_together():
    """States and scan of one pass walk over the same chunks."""
    from mamba_ssm.ops.triton import ssd_triton

    plan = ssd_triton.plan_for(256, 64, 128, 256, "bf16")
    scans, backwards = list(ssd_triton.other_scans(plan)), list(ssd_triton.other_backwards(plan))
    assert len(set(scans)) == len(scans) == 16
    assert len(set(backwards)) == len(backwards) == 8
    assert all(other.scan.rows == other.states.rows for other in scans)
    assert all(other.backward.rows == other.backward_states.rows for other in backwards)


@on_gpu
def test_plans_are_timed_on_a_gpu(tuned_passes):
    check(inputs(2, 256, torch.bfloat16, heads=4, headdim=64, state=16), torch.bfloat16)
    assert {name for name, *_ in tuned_passes} == {"ssd_scan", "ssd_scan_backward"}


def inner_block_inputs(norm, projection, D_has_hdim=False, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape, dtype=torch.float32):
        return torch.randn(shape, generator=generator).to(DEVICE, dtype).requires_grad_()

    heads, headdim, groups, state = 2, 16, 2, 5
    dim, conv_dim = heads * headdim, heads * headdim + 2 * groups * state
    return {
        "zxbcdt": draw(2, 21, dim + conv_dim + heads, dtype=dtype), "conv1d_weight": draw(conv_dim, 4),
        "conv1d_bias": draw(conv_dim), "dt_bias": draw(heads),
        "A": (-draw(heads).detach().exp()).requires_grad_(),
        "D": draw(heads, headdim) if D_has_hdim else draw(heads), "initial_states": draw(2, heads, headdim, state),
        "rmsnorm_weight": draw(dim) if norm else None, "outproj_weight": draw(7, dim) if projection else None,
        "outproj_bias": draw(7) if projection else None,
    }  # fmt: skip


@runs
@pytest.mark.parametrize("norm, norm_before_gate, projection, D_has_hdim, final", [
    (False, True, False, False, False), (True, True, True, True, True), (True, False, False, False, True),
])  # fmt: skip
def test_inner_block_equals_its_judge(norm, norm_before_gate, projection, D_has_hdim, final):
    t = inner_block_inputs(norm, projection, D_has_hdim)
    options = {"chunk_size": 16, "ngroups": 2, "headdim": 16, "norm_before_gate": norm_before_gate}
    options |= {"seq_idx": torch.tensor([[0] * 6 + [1] * 15, [0] * 21], device=DEVICE), "return_final_states": final}
    compare(mamba_split_conv1d_scan_combined, mamba_split_conv1d_scan_ref, t, 1e-5, 2e-5, **options)
    assert explain("mamba_split_conv1d_scan_combined", DEVICE).tier == "triton"


@runs
def test_inner_block_compiles_whole():
    """Forward and backward, without a break; launched, it is one autograd function instead."""
    t = inner_block_inputs(norm=True, projection=True)
    options = {"chunk_size": 16, "ngroups": 2, "headdim": 16, "return_final_states": True}
    compiled = torch.compile(mamba_split_conv1d_scan_combined, fullgraph=True, backend="aot_eager")
    compare(compiled, mamba_split_conv1d_scan_combined, t, 1e-5, 2e-5, **options)


@runs
def test_inner_block_refuses_what_does_not_fit():
    t = inner_block_inputs(norm=True, projection=False)
    with pytest.raises(ValueError, match=r"initial_states has shape \(2, 2, 16, 4\), expected \(B, H, P, N\)"):
        mamba_split_conv1d_scan_combined(
            **{**t, "initial_states": t["initial_states"][..., :4]}, chunk_size=16, ngroups=2, headdim=16
        )


@runs
def test_wrong_arguments_are_refused_by_name():
    t = inputs()
    with pytest.raises(ValueError, match=r"dt has shape \(1, 17, 3\), expected \(B, L, H\) = \(1, 17, 2\)"):
        mamba_chunk_scan_combined(**{**t, "dt": torch.zeros(1, 17, 3, device=DEVICE)}, chunk_size=16)


# What only a GPU does in acceptable time.


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_lengths(length, dtype):
    t = inputs(2, length, dtype, heads=4, headdim=64, groups=2, state=16)
    check(t, dtype)


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("headdim", [16, 32, 64, 128])
@pytest.mark.parametrize("state", [1, 4, 16, 64, 128, 256])
def test_widths(headdim, state, dtype):
    for length, groups in ((130, 1), (300, 2)):
        check(inputs(1, length, dtype, heads=4, headdim=headdim, groups=groups, state=state, D_has_hdim=True), dtype)


@on_gpu
@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("headdim", [16, 32, 64, 128])
@pytest.mark.parametrize("state", [1, 4, 16, 64, 128, 256])
def test_grid(state, headdim, dtype, groups):
    """Every length at every width and number of groups, which is the last to change: kernels are built once for all
    groups. Every other length has its rows strided, and one or two batch rows."""
    for number, length in enumerate(LENGTHS):
        t = inputs(1 + number % 2, length, dtype, heads=4, headdim=headdim, groups=groups, state=state)
        if number % 2:
            for name in ("x", "B", "C", "z"):
                t[name] = torch.cat([t[name].detach()] * 2, dim=1)[:, ::2].requires_grad_()
        with in_case(f"length {length}"):
            check(t, dtype)


@on_gpu
@pytest.mark.parametrize("optional", [c for n in range(6) for c in itertools.combinations(OPTIONAL, n)], ids="-".join)
def test_all_subsets(optional):
    t = inputs(2, 200, torch.bfloat16, heads=4, headdim=64, groups=4, state=16, optional=optional)
    for final in (False, True):
        check(t, torch.bfloat16, return_final_states=final, dt_limit=(0.1, 2.0) if final else (0.0, float("inf")))


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("state", [16, 128])
def test_states_of_long_packed_sequences_are_differentiated(state, dtype):
    starts = [0, 1, 64, 65, 192, 192, 449, 600]
    check_packed(inputs(1, 600, dtype, heads=4, headdim=64, state=state, optional=OPTIONAL[:4]), starts, dtype)


@on_gpu
@pytest.mark.parametrize("chunk_size", [16, 32, 64, 128, 256])
def test_chunk_size_does_not_matter(chunk_size):
    t = inputs(2, 600, heads=4, headdim=64, groups=2, state=64)
    check(t, chunk_size=chunk_size)


@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("state", [16, 128])
def test_low_precision_is_as_good_as_the_reference_in_it(state, dtype):
    """Never more than half again as far from float64 as the parts in that dtype."""
    t = inputs(2, 512, dtype, heads=8, headdim=64, state=state, optional=("D", "dt_bias"))
    wide = {name: to_float64(value) for name, value in t.items()}
    ours = outputs_and_gradients(mamba_chunk_scan_combined, t, **SCAN)
    best = outputs_and_gradients(mamba_chunk_scan, wide, like=ours[0], **SCAN)
    low = outputs_and_gradients(scan_in_dtype, t, like=ours[0], **SCAN)
    for of_ours, of_low, of_best in zip(ours, low, best, strict=True):
        for name, want in of_best.items():
            error, allowed = relative_error(of_ours[name], want), 1.5 * relative_error(of_low[name], want)
            assert error <= max(allowed, 1e-5), f"{name}: {error:.2e}, allowed {allowed:.2e}"


def scan_in_dtype(x, dt, A, B, C, D, dt_bias, chunk_size, dt_softplus, return_final_states):
    """The four parts with every product in x's dtype; steps and decays in float32."""
    from mamba_ssm.ops.triton.ssd_bmm import bmm_chunk
    from mamba_ssm.ops.triton.ssd_chunk_scan import chunk_scan
    from mamba_ssm.ops.triton.ssd_chunk_state import chunk_cumsum, chunk_state
    from mamba_ssm.ops.triton.ssd_state_passing import state_passing

    steps = torch.nn.functional.softplus(dt.float() + dt_bias)
    rows = [v.unflatten(1, (-1, 64)) for v in (x, steps, B, C)]
    cumsum = chunk_cumsum(rows[1], A)
    chunks = [rows[0], rows[1].to(x.dtype), rows[2], rows[3]]
    states = chunk_state(chunks[2], chunks[0], chunks[1], cumsum)
    entering, final = state_passing(states, cumsum[..., -1])
    y = chunk_scan(bmm_chunk(chunks[3], chunks[2]), chunks[0], chunks[1], cumsum, chunks[3], entering)
    return y.flatten(1, 2) + D.to(x.dtype)[:, None] * x, final.float()


@on_gpu
def test_steps_equal_the_scan_over_300_rows():
    t = inputs(2, 300, heads=4, headdim=64, groups=2, state=16, optional=("D", "z", "dt_bias", "initial_states"))
    t = {k: v.detach() for k, v in t.items()}
    out, final = mamba_chunk_scan_combined(**t, **SCAN)
    state, heads = t["initial_states"].clone(), (4, 64)
    D, bias = (t[n][:, None].expand(heads) for n in ("D", "dt_bias"))
    A = t["A"][:, None, None].expand(*heads, 16)
    for i in range(300):
        dt = t["dt"][:, i, :, None].expand(2, *heads)
        y = selective_state_update(state, t["x"][:, i], dt, A, t["B"][:, i], t["C"][:, i], D, t["z"][:, i], bias, True)
        assert_close(out[:, i], y, 3e-5, f"row {i}")
    assert_close(final, state, 1e-5)


@on_gpu
def test_many_spans_and_long_sequences():
    t = inputs(1, 20000, torch.bfloat16, heads=2, headdim=64, state=64)
    check(t, torch.bfloat16)


@on_gpu
@pytest.mark.parametrize("length", [128, 1000])
def test_cuda_graph_replays(length):
    """Captured forward and backward give what launched ones give, also for new values in the same buffers."""
    t = inputs(4, length, torch.bfloat16, heads=4, headdim=64, state=16)
    call = lambda: outputs_and_gradients(mamba_chunk_scan_combined, t, **SCAN)  # noqa: E731
    dout = torch.randn_like(t["x"])
    needing = [v for v in t.values() if v.requires_grad]

    def step():
        out = mamba_chunk_scan_combined(**t, chunk_size=256, dt_softplus=True)
        return out, *torch.autograd.grad(out, needing, dout)

    call()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        t["x"].copy_(torch.randn_like(t["x"]))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))


@on_gpu
def test_compiles_on_a_gpu():
    t = inputs(2, 128, torch.bfloat16, heads=4, headdim=64, state=16)
    compiled = torch.compile(mamba_chunk_scan_combined, fullgraph=True)
    got, want = (outputs_and_gradients(f, t, **SCAN) for f in (compiled, mamba_chunk_scan_combined))
    for a, b in zip(got, want, strict=True):
        assert all(relative_error(a[name], b[name]) < 1e-6 for name in b)


@on_gpu
def test_second_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    t = {k: v.detach().to("cuda:1") for k, v in inputs(2, 100).items()}
    assert_close(mamba_chunk_scan_combined(**t, **SCAN)[0], mamba_chunk_scan(**t, **SCAN)[0], 1e-5)

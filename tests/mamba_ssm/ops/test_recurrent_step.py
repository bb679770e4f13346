"""One step of a whole mixer: the kernels (interpreted on a CPU) against the parts in float64, refusals, graphs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_ssm import Mamba, Mamba2
from mamba_ssm.ops.tiers import use_tier
from mamba_ssm.ops.triton.recurrent_step import NO_LIMIT, mamba2_step, mamba_step
from mamba_ssm.testing import FORWARD_TOLERANCE, NoHostSync, assert_close

kernels = pytest.importorskip("mamba_ssm.ops.triton.recurrent_step_kernels", exc_type=ImportError)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STATES = ("conv_state", "ssm_state")
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Draw:
    """Random tensors of one dtype from one seed; parameters stay in float32."""

    def __init__(self, dtype, seed):
        self.dtype, self.generator = dtype, torch.Generator().manual_seed(seed)

    def __call__(self, *shape, dtype=None):
        drawn = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return drawn.to(DEVICE, self.dtype if dtype is None else dtype)

    def parameter(self, *shape):
        return self(*shape, dtype=torch.float32)


def mamba2_inputs(
    batch=2, heads=4, headdim=3, groups=2, state=5, width=4, window=4, bias=True, norm=True, D_has_hdim=False,
    dtype=torch.float32, state_dtype=torch.float32, seed=0,
):  # fmt: skip
    draw, d_ssm = Draw(dtype, seed), heads * headdim
    channels = d_ssm + 2 * groups * state
    return {
        "zxbcdt": draw(batch, d_ssm + channels + heads),
        "conv_state": draw(batch, channels, window, dtype=state_dtype),
        "ssm_state": draw(batch, heads, headdim, state, dtype=state_dtype),
        "conv_weight": draw.parameter(channels, width),
        "conv_bias": draw.parameter(channels) if bias else None,
        "dt_bias": draw.parameter(heads), "A_log": draw.parameter(heads),
        "D": draw.parameter(heads, headdim) if D_has_hdim else draw.parameter(heads),
        "norm_weight": draw.parameter(d_ssm) if norm else None,
    }  # fmt: skip


def mamba_inputs(batch=2, channels=6, state=5, rank=2, width=4, dtype=torch.float32, seed=0):
    draw = Draw(dtype, seed)
    return {
        "xz": draw(batch, 2 * channels), "conv_state": draw.parameter(batch, channels, width),
        "ssm_state": draw.parameter(batch, channels, state), "conv_weight": draw.parameter(channels, width),
        "conv_bias": draw.parameter(channels), "x_proj_weight": draw(rank + 2 * state, channels),
        "dt_proj_weight": draw(channels, rank), "dt_bias": draw.parameter(channels),
        "A_log": draw.parameter(channels, state), "D": draw.parameter(channels),
    }  # fmt: skip


@torch.no_grad()
def check(kernel, step, inputs, tolerance, **options):
    """Output and both states against the parts on float64 copies."""
    wide = {name: None if tensor is None else tensor.double() for name, tensor in inputs.items()}
    states = {name: inputs[name].clone() for name in STATES}
    out = kernel(*{**inputs, **states}.values(), *options.values())
    with use_tier("reference"):
        want = step(**wide, **options)
    assert out.dtype == next(iter(inputs.values())).dtype
    assert_close(out, want, tolerance)
    for name in STATES:
        assert_close(states[name], wide[name], max(tolerance, FORWARD_TOLERANCE[states[name].dtype]), name)


def mamba2_options(norm_eps=1e-5, norm_before_gate=False, dt_limit=NO_LIMIT):
    return {"norm_eps": norm_eps, "norm_before_gate": norm_before_gate, "dt_limit": dt_limit}


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.sampled_from([(1, 1, 1, 1), (2, 4, 1, 3), (4, 3, 2, 5), (3, 5, 3, 16), (2, 33, 1, 2)]),
    width_window=st.sampled_from([(4, 4), (4, 3), (2, 1), (3, 5)]), bias=st.booleans(), norm=st.booleans(),
    D_has_hdim=st.booleans(), norm_before_gate=st.booleans(), dt_limit=st.sampled_from([NO_LIMIT, (0.01, 0.5)]),
    form=st.sampled_from(["one block", "kept blocks", "waiting blocks"]), batch=st.sampled_from([1, 3]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_mamba2_equals_its_parts(
    sizes, width_window, bias, norm, D_has_hdim, norm_before_gate, dt_limit, form, batch, seed
):
    heads, headdim, groups, state = sizes
    t = mamba2_inputs(batch, heads, headdim, groups, state, *width_window, bias, norm, D_has_hdim, seed=seed)
    options = mamba2_options(norm_before_gate=norm_before_gate, dt_limit=dt_limit)
    with pytest.MonkeyPatch.context() as patch:
        if form != "one block":
            patch.setattr(kernels, "LONE", (64, 4, None))
            patch.setattr(kernels, "MOST_KEPT", 8 if form == "kept blocks" else 0)
        check(kernels.mamba2_step, mamba2_step, t, FORWARD_TOLERANCE[torch.float32], **options)


@pytest.mark.parametrize("batch, seed", [(1, 0), (3, 1)])
def test_mamba_equals_its_parts(batch, seed):
    check(kernels.mamba_step, mamba_step, mamba_inputs(batch, seed=seed), FORWARD_TOLERANCE[torch.float32])


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_low_precision(state_dtype):
    t = mamba2_inputs(heads=4, headdim=16, state=8, dtype=torch.bfloat16, state_dtype=state_dtype)
    check(kernels.mamba2_step, mamba2_step, t, FORWARD_TOLERANCE[torch.bfloat16], **mamba2_options())


def test_extreme_steps_leave_no_nan():
    """Δ up to 1e4 and A down to -1e4: the old state is forgotten; Δ down to 1e-30: it stays as it is."""
    t = mamba2_inputs(bias=False)
    t["A_log"].fill_(9.2)
    huge = {**t, "zxbcdt": t["zxbcdt"].clone(), "dt_bias": torch.full_like(t["dt_bias"], 1e4)}
    check(kernels.mamba2_step, mamba2_step, huge, FORWARD_TOLERANCE[torch.float32], **mamba2_options())
    before, tiny = t["ssm_state"].clone(), torch.full_like(t["dt_bias"], -80.0)
    with torch.no_grad():
        out = kernels.mamba2_step(*{**t, "dt_bias": tiny}.values(), 1e-5, False, NO_LIMIT)
    assert out.isfinite().all()
    assert_close(t["ssm_state"], before, 1e-7)


def test_a_wanted_gradient_takes_the_parts():
    t = mamba2_inputs()
    t["zxbcdt"].requires_grad_()
    out = kernels.mamba2_step(*t.values(), 1e-5, False, NO_LIMIT)
    out.sum().backward()
    assert t["zxbcdt"].grad.abs().sum() > 0


def test_states_with_gaps_and_float64_take_the_parts():
    """States are moved on in place whatever their layout."""
    t = mamba2_inputs()
    spread = torch.empty(2, 4, 3, 10, device=DEVICE)[..., ::2].copy_(t["ssm_state"])
    check(kernels.mamba2_step, mamba2_step, {**t, "ssm_state": spread}, 1e-5, **mamba2_options())
    wide = {name: tensor.double() for name, tensor in t.items()}
    check(kernels.mamba2_step, mamba2_step, wide, 1e-12, **mamba2_options())


@torch.no_grad()
def test_rows_of_a_larger_projection_and_of_larger_states():
    """Views with a row stride of their own, as the gated MLP beside the heads and a cache's rows make them."""
    t = mamba2_inputs(batch=4)
    want = kernels.mamba2_step(*{k: v.clone() for k, v in t.items()}.values(), 1e-5, False, NO_LIMIT)
    padded = torch.cat([torch.full((4, 3), 9.0, device=DEVICE), t["zxbcdt"]], dim=1)[:, 3:]
    out = kernels.mamba2_step(*{
        **t, "zxbcdt": padded[1:3], "conv_state": t["conv_state"][1:3], "ssm_state": t["ssm_state"][1:3],
    }.values(), 1e-5, False, NO_LIMIT)  # fmt: skip
    assert torch.equal(out, want[1:3])


def test_empty_batch_and_no_host_sync():
    t = mamba2_inputs(batch=0)
    assert kernels.mamba2_step(*t.values(), 1e-5, False, NO_LIMIT).shape == (0, 12)
    with NoHostSync(), torch.no_grad():
        mamba2_step(**mamba2_inputs())
        mamba_step(**mamba_inputs())


@torch.no_grad()
def test_registration():
    torch.library.opcheck(kernels.run_mamba2_step, (*mamba2_inputs().values(), 1e-5, False, *NO_LIMIT))


@pytest.mark.parametrize("change, message", [
    ({"zxbcdt": torch.zeros(2, 3, 4)}, r"zxbcdt has shape \(2, 3, 4\), expected \(B, 2 d_ssm \+ 2GN \+ H\)"),
    ({"zxbcdt": torch.zeros(2, 49)}, "zxbcdt has 49 columns, expected 2 d_ssm"),
    ({"ssm_state": torch.zeros(3, 4, 3, 5)}, r"ssm_state has shape \(3, 4, 3, 5\), expected \(B, H, P, N\)"),
    ({"conv_state": torch.zeros(2, 31, 4)}, r"conv_state has shape \(2, 31, 4\), expected \(B, d_ssm \+ 2GN, S\)"),
    ({"conv_state": torch.zeros(2, 32, 2)}, r"conv_state has shape \(2, 32, 2\), expected S >= W-1 = 3"),
    ({"conv_weight": torch.zeros(12, 4)}, r"conv_weight has shape \(12, 4\)"),
    ({"conv_bias": torch.zeros(4)}, r"conv_bias has shape \(4,\)"),
    ({"dt_bias": torch.zeros(3)}, r"dt_bias has shape \(3,\), expected \(H\) = \(4\)"),
    ({"A_log": torch.zeros(4, 3)}, r"A_log has shape \(4, 3\)"),
    ({"D": torch.zeros(12)}, r"D has shape \(12,\), expected \(H\) or \(H, P\)"),
    ({"norm_weight": torch.zeros(4)}, r"norm_weight has shape \(4,\), expected \(d_ssm\) = \(12\)"),
])  # fmt: skip
def test_wrong_arguments_of_mamba2_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        mamba2_step(**{k: None if v is None else v.cpu() for k, v in mamba2_inputs().items()} | change)


@pytest.mark.parametrize("change, message", [
    ({"xz": torch.zeros(2, 11)}, r"xz has shape \(2, 11\), expected \(B, 2D\) = \(any, 12\)"),
    ({"ssm_state": torch.zeros(2, 6, 4)}, r"ssm_state has shape \(2, 6, 4\)"),
    ({"x_proj_weight": torch.zeros(11, 6)}, r"x_proj_weight has shape \(11, 6\), expected \(R \+ 2N, D\) = \(12, 6\)"),
    ({"dt_proj_weight": torch.zeros(5, 2)}, r"dt_proj_weight has shape \(5, 2\)"),
])  # fmt: skip
def test_wrong_arguments_of_mamba_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        mamba_step(**{k: v.cpu() for k, v in mamba_inputs().items()} | change)


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("batch", [1, 2, 16, 1024])
@pytest.mark.parametrize("heads, headdim, groups, state", [
    (16, 64, 1, 16), (4, 16, 4, 1), (4, 32, 2, 4), (8, 128, 1, 64), (24, 64, 1, 128), (2, 64, 2, 256), (3, 24, 1, 5),
])  # fmt: skip
def test_mamba2_on_a_gpu(dtype, batch, heads, headdim, groups, state):
    t = mamba2_inputs(batch, heads, headdim, groups, state, dtype=dtype)
    check(kernels.mamba2_step, mamba2_step, t, FORWARD_TOLERANCE[dtype], **mamba2_options())
    if batch == 1:
        t = {**t, "norm_weight": None, "conv_bias": None}
        check(kernels.mamba2_step, mamba2_step, t, FORWARD_TOLERANCE[dtype], **mamba2_options())


@gpu
@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("headdim", [16, 32, 64, 128])
@pytest.mark.parametrize("state", [1, 4, 16, 64, 128, 256])
def test_mamba2_grid(state, headdim, groups, dtype):
    """Every number of sequences at every width, normed after and before the gate, and not at all."""
    for batch in (1, 2, 16, 1024):
        t = mamba2_inputs(batch, 4, headdim, groups, state, dtype=dtype)
        for norm_before_gate in (False, True):
            options = mamba2_options(norm_before_gate=norm_before_gate)
            check(kernels.mamba2_step, mamba2_step, t, FORWARD_TOLERANCE[dtype], **options)
        t["norm_weight"] = None
        check(kernels.mamba2_step, mamba2_step, t, FORWARD_TOLERANCE[dtype], **mamba2_options())


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 2, 16, 1024])
@pytest.mark.parametrize("channels, state", [(1024, 16), (96, 1), (1536, 64), (40, 256)])
def test_mamba_on_a_gpu(batch, channels, state):
    """In float32 without TF32 in its two projections."""
    t = mamba_inputs(batch, channels, state, rank=32)
    check(kernels.mamba_step, mamba_step, t, FORWARD_TOLERANCE[torch.float32])


MIXERS = {
    "Mamba": lambda: Mamba(64, d_state=16),
    "Mamba2": lambda: Mamba2(64, d_state=16, headdim=32),
    "Mamba2, groups, MLP": lambda: Mamba2(
        64, d_state=16, headdim=16, d_ssm=64, ngroups=2, D_has_hdim=True, norm_before_gate=True, dt_limit=(0.01, 0.05)),
    "Mamba2, wide": lambda: Mamba2(256, d_state=128, headdim=64, rmsnorm=False),
}  # fmt: skip


@gpu
@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("name", MIXERS)
def test_three_hundred_steps_equal_the_pass(name):
    """In a CUDA graph, against the pass in float64 on a CPU; the same bits when it runs again."""
    torch.manual_seed(0)
    mixer = MIXERS[name]()
    width = mixer.d_model
    rows = torch.randn(4, 300, width, generator=torch.Generator().manual_seed(1))
    want = mixer.double()(rows.double())
    mixer.float().cuda()
    state, row = mixer.allocate_inference_cache(4), torch.zeros(4, 1, width, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        mixer.step(row, *state)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, *_ = mixer.step(row, *state)
    runs = []
    for _ in range(2):
        for tensor in state:
            tensor.zero_()
        outs = []
        for t in range(300):
            row.copy_(rows[:, t : t + 1])
            graph.replay()
            outs.append(out.clone())
        runs.append(torch.cat(outs, dim=1))
    assert_close(runs[0].cpu(), want, 1e-5)
    assert torch.equal(*runs)


@gpu
@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("name", MIXERS)
def test_compiles_into_one_graph(name):
    mixer = MIXERS[name]().cuda()
    rows = torch.randn(3, 1, mixer.d_model, device="cuda")
    eager, compiled = mixer.allocate_inference_cache(3), mixer.allocate_inference_cache(3)
    step = torch.compile(lambda row, *state: mixer.step(row, *state)[0], fullgraph=True)
    for _ in range(2):
        assert_close(step(rows, *compiled), mixer.step(rows, *eager)[0], 1e-5)
    for left, right in zip(compiled, eager, strict=True):
        assert_close(left, right, 1e-5)


@gpu
@pytest.mark.gpu
@torch.no_grad()
def test_on_the_second_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    t = mamba2_inputs()
    want = mamba2_step(**{k: v.clone() for k, v in t.items()})
    assert_close(mamba2_step(**{k: v.to("cuda:1") for k, v in t.items()}).cpu(), want.cpu(), 1e-6)

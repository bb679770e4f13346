"""Mamba and Mamba-2: parallel pass = steps, every way a state can enter, initial values, parameter names, refusals."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_ssm import InferenceParams, Mamba, Mamba2
from mamba_ssm.modules.mamba2_simple import Mamba2Simple
from mamba_ssm.modules.mha import MHA
from mamba_ssm.testing import NoHostSync, assert_close


def with_random_start(mixer):
    """Learnable start states that are not zero, so that forgetting them shows."""
    torch.nn.init.normal_(mixer.init_states)
    return mixer


LENGTHS = [1, 2, 15, 16, 17, 64, 200]
MIXERS = {
    "mamba": lambda **kw: Mamba(8, d_state=4, layer_idx=0, **kw),
    "mamba2": lambda **kw: Mamba2(8, d_state=4, headdim=4, chunk_size=16, layer_idx=0, **kw),
    "mamba2-all": lambda **kw: Mamba2(
        8, d_state=4, headdim=4, chunk_size=16, d_ssm=8, ngroups=2, D_has_hdim=True, norm_before_gate=True,
        dt_limit=(0.01, 0.05), layer_idx=0, d_conv=3, **kw),
    "mamba2-simple": lambda **kw: with_random_start(Mamba2Simple(
        8, d_state=4, headdim=4, learnable_init_states=True, layer_idx=0, **kw)),
    "mamba2-plain-gate": lambda **kw: Mamba2(8, d_state=4, headdim=8, rmsnorm=False, bias=True, layer_idx=0, **kw),
}  # fmt: skip


@pytest.fixture(params=MIXERS, scope="module")
def mixer(request):
    torch.manual_seed(0)
    return MIXERS[request.param]().double()


def zeros_like_state(state):
    return [torch.zeros_like(tensor) for tensor in state]


def draw(length, batch=2, width=8, seed=0):
    return torch.randn(batch, length, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def run_steps(mixer, rows, state):
    return torch.cat([mixer.step(row.unsqueeze(1), *state)[0] for row in rows.unbind(1)], dim=1)


@torch.no_grad()
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("prefix", [0, 5])
def test_pass_equals_steps(mixer, length, prefix):
    """From empty and from a prefilled state; the states agree too, and a pass without a state gives the same."""
    rows = draw(prefix + length)
    state, stepped = mixer.allocate_inference_cache(2, None), mixer.allocate_inference_cache(2, None)
    whole = mixer(rows)
    if prefix:
        assert_close(mixer(rows[:, :prefix], state=state), whole[:, :prefix], 1e-10)
        run_steps(mixer, rows[:, :prefix], stepped)
    out = mixer(rows[:, prefix:], state=state)
    assert_close(out, whole[:, prefix:], 1e-10)
    assert_close(run_steps(mixer, rows[:, prefix:], stepped), out, 1e-10)
    for left, right in zip(state, stepped, strict=True):
        assert_close(left, right, 1e-10)


def test_final_states_are_for_sequences_that_start(mixer):
    """Beside a state it would be left as it was, unnoticed."""
    with pytest.raises(ValueError, match="final_states comes with state"):
        mixer(draw(3), state=mixer.allocate_inference_cache(2, None), final_states=[])


@torch.no_grad()
@settings(max_examples=15, deadline=None)
@given(cuts=st.lists(st.integers(1, 6), min_size=1, max_size=5), seed=st.integers(0, 99))
@pytest.mark.parametrize("name", MIXERS)
def test_pieces_of_seq_idx_equal_pieces_alone(name, cuts, seed):
    """The first piece continues the entering state, later ones start anew; the state left is the last piece's."""
    torch.manual_seed(seed)
    mixer = MIXERS[name]().double()
    prefix, rows = draw(3, batch=1, seed=seed), draw(sum(cuts), batch=1, seed=seed + 1)
    seq_idx = torch.repeat_interleave(torch.arange(len(cuts)) % 2, torch.tensor(cuts)).unsqueeze(0)
    state = mixer.allocate_inference_cache(1, None)
    mixer(prefix, state=state)
    alone = [tensor.clone() for tensor in state]
    out = mixer(rows, seq_idx=seq_idx, state=state)
    pieces = []
    for i, piece in enumerate(rows.split(cuts, dim=1)):
        alone = alone if i == 0 else zeros_like_state(alone)
        pieces.append(mixer(piece, state=alone))
    assert_close(torch.cat(pieces, dim=1), out, 1e-10)
    for left, right in zip(state, alone, strict=True):
        assert_close(left, right, 1e-10)
    first, *later = rows.split(cuts, dim=1)
    fresh = [mixer(first)] + [mixer(piece, state=zeros_like_state(alone)) for piece in later]
    assert_close(mixer(rows, seq_idx=seq_idx), torch.cat(fresh, dim=1), 1e-10)


@torch.no_grad()
def test_inference_params_prefill_then_steps(mixer):
    rows = draw(12)
    params = InferenceParams(max_seqlen=12, max_batch_size=2)
    params.key_value_memory_dict[0] = tuple(t.fill_(9.0) for t in mixer.allocate_inference_cache(2, 12))  # stale values
    outs = []
    for piece in rows.split([5, 1, 1, 5], dim=1):
        outs.append(mixer(piece, inference_params=params))
        params.seqlen_offset += piece.shape[1]
    assert_close(torch.cat(outs, dim=1), mixer(rows), 1e-10)


@torch.no_grad()
def test_inference_params_of_part_of_a_batch(mixer):
    rows = draw(4, batch=3)
    params = InferenceParams(max_seqlen=4, max_batch_size=3)
    first, params.batch_size_offset = mixer(rows[:1], inference_params=params), 1
    rest = mixer(rows[1:], inference_params=params)
    assert_close(torch.cat([first, rest]), mixer(rows), 1e-10)
    with pytest.raises(ValueError, match="the cache holds 2 rows from row 1 on, expected 3 like the batch"):
        mixer(rows, inference_params=params)


@torch.no_grad()
@settings(max_examples=15, deadline=None)
@given(lengths=st.lists(st.integers(0, 19), min_size=1, max_size=4).filter(any), spare=st.integers(0, 9))
@pytest.mark.parametrize("name", [name for name in MIXERS if name != "mamba2-simple"])
def test_packed_prompts_then_steps_equal_each_alone(name, lengths, spare):
    """One row of S prompts fills S rows of the cache; a prompt may be empty, the cache larger than the longest."""
    torch.manual_seed(0)
    mixer = MIXERS[name]().double()
    rows, nexts = draw(sum(lengths), batch=1), draw(2, batch=len(lengths), seed=7)
    params = InferenceParams(max_seqlen=max(lengths) + spare, max_batch_size=len(lengths))
    stale = (t.fill_(9.0) for t in mixer.allocate_inference_cache(len(lengths), None))
    params.key_value_memory_dict[0] = tuple(stale)
    packed = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    out = mixer(rows, cu_seqlens=packed, inference_params=params)
    assert_close(mixer(rows, cu_seqlens=packed), out, 1e-10)
    params.advance(sum(lengths), packed)
    stepped = torch.cat([mixer(row, inference_params=params) for row in nexts.split(1, dim=1)], dim=1)
    for i, piece in enumerate(rows.split(lengths, dim=1)):
        alone = mixer(torch.cat([piece, nexts[i : i + 1]], dim=1))
        start = packed[i]
        assert_close(torch.cat([out[:, start : start + lengths[i]], stepped[i : i + 1]], dim=1), alone, 1e-10)


@pytest.mark.parametrize("name", [name for name in MIXERS if name != "mamba2-simple"])
def test_packed_prompts_have_the_gradients_of_each_alone(name):
    torch.manual_seed(0)
    mixer = MIXERS[name]().double()
    rows, packed = draw(9, batch=1).requires_grad_(), torch.tensor([0, 4, 5, 9])
    out = mixer(rows, cu_seqlens=packed, state=mixer.allocate_inference_cache(3, None))
    want = torch.cat([mixer(piece) for piece in rows.split([4, 1, 4], dim=1)], dim=1)
    wanted = [rows, *mixer.parameters()]
    for got, expected in zip(*(torch.autograd.grad(y.square().sum(), wanted) for y in (out, want)), strict=True):
        assert_close(got, expected, 1e-10)


@pytest.mark.parametrize("cuts, offset, batch, message", [
    ([0, 4, 9], 3, 1, r"cu_seqlens given at seqlen_offset 3, expected 0"),
    ([0, 4, 9], 0, 2, "cu_seqlens given with a batch of 2, expected one row"),
    ([[0, 9]], 0, 1, r"cu_seqlens has shape \(1, 2\), expected \(S\+1\)"),
    ([0, 2, 9], 0, 1, "cu_seqlens does not fit .* from 0 to L = 9 by at most max_seqlen = 6 at a time"),
    ([0, 4, 8], 0, 1, "cu_seqlens does not fit"),
    ([1, 4, 9], 0, 1, "cu_seqlens does not fit"),
    ([0, 5, 4, 9], 0, 1, "cu_seqlens does not fit"),
])  # fmt: skip
@pytest.mark.parametrize("name", ["mamba", "mamba2", "mha"])
def test_packed_prompts_that_do_not_fit_are_refused(name, cuts, offset, batch, message):
    layer = MHA(8, 2, causal=True, layer_idx=0).double() if name == "mha" else MIXERS[name]().double()
    params = InferenceParams(max_seqlen=6, max_batch_size=len(cuts) - 1, seqlen_offset=offset)
    with pytest.raises((ValueError, RuntimeError), match=message):
        layer(draw(9, batch=batch), cu_seqlens=torch.tensor(cuts), inference_params=params)
    with pytest.raises(TypeError, match=r"cu_seqlens has dtype torch\.float32, expected an integer"):
        layer(draw(9, batch=1), cu_seqlens=torch.tensor([0.0, 4.0, 9.0]), inference_params=params)


def test_one_operator_equals_parts_with_gradients(mixer):
    """The fast path (one operator) and the path in parts give the same outputs and parameter gradients."""
    rows, results = draw(9), []
    flag = "use_fast_path" if isinstance(mixer, Mamba) else "use_mem_eff_path"
    for fast in (True, False):
        setattr(mixer, flag, fast)
        mixer.zero_grad()
        out = mixer(rows, seq_idx=torch.tensor([[0] * 4 + [1] * 5] * 2))
        out.square().sum().backward()
        results.append([out.detach(), *(p.grad.clone() for p in mixer.parameters())])
    setattr(mixer, flag, True)
    for fast, parts in zip(*results, strict=True):
        assert_close(fast, parts, 1e-10)


def test_a_pass_from_a_state_has_gradients(mixer):
    """The state is overwritten by the pass, yet backward reads what it was."""
    state = mixer.allocate_inference_cache(2, None)
    mixer(draw(3), state=state)
    entering = [t.clone() for t in state]

    def loss(rows):
        return mixer(rows, state=[t.clone() for t in entering]).square().sum()

    rows = draw(4, seed=1).requires_grad_()
    mixer(rows, state=state).square().sum().backward()
    direction = draw(4, seed=2)
    slope = (loss(rows.detach() + 1e-6 * direction) - loss(rows.detach() - 1e-6 * direction)) / 2e-6
    assert_close((rows.grad * direction).sum(), slope, 1e-6)
    assert not any(t.requires_grad for t in state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_keeps_float32_states(dtype):
    torch.manual_seed(0)
    for make in MIXERS.values():
        mixer = make()
        state, stepped = mixer.allocate_inference_cache(2, None), mixer.allocate_inference_cache(2, None)
        rows = draw(20).float()
        want = mixer.double()(rows.double())
        mixer.float()
        with torch.autocast("cpu", dtype), torch.no_grad():
            out = mixer(rows, state=state)
            steps = run_steps(mixer, rows, stepped)
        assert out.dtype == dtype
        assert {t.dtype for t in (*state, *stepped)} == {torch.float32}
        assert_close(out, want, 3e-2)
        assert_close(steps, want, 3e-2)


@torch.no_grad()
def test_no_host_sync(mixer):
    state, rows = mixer.allocate_inference_cache(2, None), draw(6)
    with NoHostSync():
        mixer(rows, seq_idx=torch.zeros(2, 6, dtype=torch.int64), state=state)
        mixer.step(rows[:, :1], *state)
        params = InferenceParams(max_seqlen=6, max_batch_size=2)
        mixer(rows[:1], cu_seqlens=torch.tensor([0, 2, 6]), inference_params=params)
        params.advance(6, torch.tensor([0, 2, 6]))
        mixer(rows[:, :1], inference_params=params)
        with torch.enable_grad():
            mixer(rows).sum().backward()


def test_batch_rows_do_not_mix_and_time_is_causal(mixer):
    rows = draw(10, batch=3)
    out = mixer(rows)
    assert_close(mixer(rows.flip(0)), out.flip(0), 1e-12)
    changed = torch.cat([rows[:, :6], rows[:, 6:] + 1.0], dim=1)
    assert_close(mixer(changed)[:, :6], out[:, :6], 1e-12)
    assert mixer(rows[:, :0]).shape == (3, 0, 8)
    assert mixer(rows[:0]).shape == (0, 10, 8)


def test_names_shapes_and_counts_of_parameters():
    mamba = Mamba(512, d_state=16)
    assert {n: tuple(p.shape) for n, p in mamba.named_parameters()} == {
        "A_log": (1024, 16), "D": (1024,), "in_proj.weight": (2048, 512), "conv1d.weight": (1024, 1, 4),
        "conv1d.bias": (1024,), "x_proj.weight": (64, 1024), "dt_proj.weight": (1024, 32), "dt_proj.bias": (1024,),
        "out_proj.weight": (512, 1024),
    }  # fmt: skip
    assert sum(p.numel() for p in mamba.parameters()) == 1_694_720
    mamba2 = Mamba2(512, d_state=16)
    assert {n: tuple(p.shape) for n, p in mamba2.named_parameters()} == {
        "dt_bias": (16,), "A_log": (16,), "D": (16,), "in_proj.weight": (2096, 512), "conv1d.weight": (1056, 1, 4),
        "conv1d.bias": (1056,), "norm.weight": (1024,), "out_proj.weight": (512, 1024),
    }  # fmt: skip
    assert sum(p.numel() for p in mamba2.parameters()) == 1_603_792


def test_initial_values():
    torch.manual_seed(0)
    mamba, mamba2 = Mamba(64), Mamba2(512, headdim=4)
    assert torch.allclose(mamba.A_log.exp(), torch.arange(1.0, 17.0).expand(128, 16))
    A = mamba2.A_log.exp()
    assert A.min() >= 1.0 and A.max() <= 16.0 and 7.5 < A.mean() < 9.5
    for bias in (mamba.dt_proj.bias, mamba2.dt_bias):
        dt = F.softplus(bias)
        assert dt.min() >= 0.000999 and dt.max() <= 0.1001
        assert abs(dt.log().mean() - math.log(0.01)) < 0.3
    assert (mamba.D == 1).all() and (mamba2.D == 1).all()
    assert Mamba2(64, dt_min=1e-6, dt_max=1e-5).dt_bias.exp().min() >= 0.99e-4      # the floor of 1e-4
    assert mamba.dt_proj.weight.abs().max() <= 4**-0.5
    for parameter in (mamba.A_log, mamba.D, mamba2.A_log, mamba2.D, mamba2.dt_bias):
        assert parameter._no_weight_decay


def test_options_of_construction():
    assert (Mamba(16, dt_init="constant", dt_scale=2.0).dt_proj.weight == 2.0).all()
    assert Mamba2(16, headdim=8, conv_init=1e-3).conv1d.weight.abs().max() <= 1e-3
    assert not hasattr(Mamba2(16, headdim=8, rmsnorm=False), "norm")
    flat = Mamba2(8, headdim=4, d_state=4).double()
    assert_close(flat(draw(5).flatten(0, 1), seqlen=5).unflatten(0, (2, 5)), flat(draw(5)), 1e-14)


@pytest.mark.parametrize("call, message", [
    (lambda: Mamba(8, dt_init="other"), "dt_init is 'other', expected one of 'random', 'constant'"),
    (lambda: Mamba2(8, headdim=3), "headdim is 3, expected a divisor of d_ssm = 16"),
    (lambda: Mamba2(8, headdim=4, ngroups=3), "ngroups is 3, expected a divisor of the number of heads = 4"),
    (lambda: Mamba2(8, headdim=4, d_ssm=32), r"d_ssm is 32, expected at most expand \* d_model = 16"),
    (lambda: Mamba(8)(torch.zeros(2, 3, 7)), r"hidden_states has shape \(2, 3, 7\), expected \(B, L, d_model\)"),
    (lambda: Mamba2(8, headdim=4)(torch.zeros(2, 8)), r"u has shape \(2, 8\), expected \(B, L, M\)"),
    (lambda: Mamba(8).step(torch.zeros(2, 2, 8), None, None), r"hidden_states has shape \(2, 2, 8\)"),
    (lambda: Mamba(8)(torch.zeros(2, 3, 8), InferenceParams(3, 2)), "layer_idx is None"),
])  # fmt: skip
def test_wrong_arguments_are_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()

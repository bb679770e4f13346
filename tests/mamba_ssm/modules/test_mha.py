"""Attention against a loop over queries; cached rows = whole pass; pieces; refusals."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_ssm import InferenceParams
from mamba_ssm.modules.mha import MHA, RotaryEmbedding
from mamba_ssm.testing import NoHostSync, assert_close

CONFIGS = {
    "plain": {},
    "grouped": {"num_heads_kv": 2, "head_dim": 6, "softmax_scale": 0.3},
    "rotary": {"num_heads_kv": 1, "rotary_emb_dim": 4},
    "all": {
        "num_heads_kv": 2, "rotary_emb_dim": 2, "rotary_emb_interleaved": True, "d_conv": 3, "mlp_dim": 10,
        "qkv_proj_bias": False, "out_proj_bias": False,
    },
}  # fmt: skip


def make(name, causal=True):
    torch.manual_seed(0)
    return MHA(16, 4, causal=causal, layer_idx=0, **CONFIGS[name]).double()


def draw(length, batch=2, seed=0):
    return torch.randn(batch, length, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@torch.no_grad()
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ["plain", "grouped"])
def test_equals_a_loop_over_queries(name, causal):
    mha, x = make(name, causal), draw(5)
    qkv = mha.in_proj(x).unflatten(-1, (-1, mha.head_dim))
    q, k, v = qkv.split([4, mha.num_heads_kv, mha.num_heads_kv], dim=2)
    context = torch.zeros(2, 5, 4, mha.head_dim, dtype=torch.float64)
    scale = mha.softmax_scale or 1.0 / math.sqrt(mha.head_dim)
    for head in range(4):
        shared = head // (4 // mha.num_heads_kv)
        for i in range(5):
            last = i + 1 if causal else 5
            scores = (k[:, :last, shared] @ q[:, i, head].unsqueeze(-1)).squeeze(-1) * scale
            context[:, i, head] = (scores.softmax(-1).unsqueeze(1) @ v[:, :last, shared]).squeeze(1)
    assert_close(mha(x), mha.out_proj(context.flatten(2)), 1e-12)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_turns_pairs_and_depends_on_distance_only(interleaved):
    rotary = RotaryEmbedding(4, base=100.0, interleaved=interleaved)
    x = torch.tensor([1.0, 0.0, 0.0, 0.0, 7.0], dtype=torch.float64).view(1, 1, 1, 5)
    turned = rotary(x, torch.tensor([[3]]))[0, 0, 0]
    partner = 1 if interleaved else 2
    assert_close(turned[[0, partner]], torch.tensor([math.cos(3.0), math.sin(3.0)], dtype=torch.float64), 1e-7)
    assert turned[4] == 7.0
    q, k = torch.randn(2, 1, 1, 1, 5, dtype=torch.float64).unbind(0)
    products = [(rotary(q, torch.tensor([[i]])) * rotary(k, torch.tensor([[i + 2]]))).sum() for i in (0, 9)]
    assert_close(products[0], products[1], 1e-12)


@torch.no_grad()
@settings(max_examples=12, deadline=None)
@given(cuts=st.lists(st.integers(1, 4), min_size=1, max_size=6))
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("on_device", [False, True])
def test_cached_rows_equal_the_whole_pass(name, on_device, cuts):
    """A prompt, steps and longer pieces; positions known on the host, or read on the device as a CUDA graph does."""
    mha, x = make(name), draw(sum(cuts))
    params = InferenceParams(max_seqlen=sum(cuts) + 2, max_batch_size=2)
    params.lengths_per_sample = torch.zeros(2, dtype=torch.int32) if on_device else None
    outs = []
    for piece in x.split(cuts, dim=1):
        step = mha.step if piece.shape[1] == 1 else mha
        outs.append(step(piece, params))
        params.advance(piece.shape[1])
    assert_close(torch.cat(outs, dim=1), mha(x), 1e-12)


@torch.no_grad()
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_pieces_equal_pieces_alone(name, causal):
    mha, x = make(name, causal), draw(9, batch=1)
    want = torch.cat([mha(piece) for piece in x.split([4, 1, 4], dim=1)], dim=1)
    assert_close(mha(x, seq_idx=torch.tensor([[0] * 4 + [1] + [0] * 4])), want, 1e-12)
    assert_close(mha(x, cu_seqlens=torch.tensor([0, 4, 5, 9])), want, 1e-12)


@torch.no_grad()
@settings(max_examples=15, deadline=None)
@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any), first=st.integers(0, 2))
@pytest.mark.parametrize("name", CONFIGS)
def test_packed_prompts_then_steps_equal_each_alone(name, lengths, first):
    """Each prompt fills a row of the cache from its first place on, and goes on at its own length."""
    mha, count = make(name), len(lengths)
    rows, nexts = draw(sum(lengths), batch=1), draw(4, batch=count, seed=7)
    params = InferenceParams(max_seqlen=max(lengths) + 4, max_batch_size=first + count, batch_size_offset=first)
    cache = mha.allocate_inference_cache(first + count, params.max_seqlen)
    params.key_value_memory_dict[0] = tuple(None if t is None else t.fill_(9.0) for t in cache)  # stale values
    packed = torch.tensor([0, *lengths]).cumsum(0)
    out = mha(rows, params, cu_seqlens=packed)
    params.advance(sum(lengths), packed)
    params.lengths_per_sample = torch.cat([torch.full((first,), 99), params.lengths_per_sample])
    stepped = []
    for piece in nexts.split([1, 2, 1], dim=1):
        stepped.append(mha(piece, params))
        params.advance(piece.shape[1])
    stepped = torch.cat(stepped, dim=1)
    for i, piece in enumerate(rows.split(lengths, dim=1)):
        alone = mha(torch.cat([piece, nexts[i : i + 1]], dim=1))
        start = packed[i]
        assert_close(torch.cat([out[:, start : start + lengths[i]], stepped[i : i + 1]], dim=1), alone, 1e-12)


def test_gradients_reach_everything():
    mha, x = make("all"), draw(6).requires_grad_()
    mha(x).square().sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in (x, *mha.parameters()))
    changed = torch.cat([x[:, :3], x[:, 3:] + 1.0], dim=1)
    assert_close(mha(changed)[:, :3], mha(x)[:, :3], 1e-12)


@torch.no_grad()
def test_no_host_sync():
    mha, x = make("all"), draw(4)
    params = InferenceParams(8, 2, seqlen_offset=2, lengths_per_sample=torch.full((2,), 2))
    with NoHostSync():
        mha(x, seq_idx=torch.zeros(2, 4, dtype=torch.int32))
        mha.step(x[:, :1], params)
        params.seqlen_offset, packed = 0, torch.tensor([0, 1, 4])
        mha(x[:1], params, cu_seqlens=packed)
        params.advance(4, packed)
        mha.step(x[:, :1], params)


def test_names_and_widths():
    mha = MHA(16, 4, num_heads_kv=2, d_conv=3, mlp_dim=10)
    assert {n: tuple(p.shape) for n, p in mha.named_parameters()} == {
        "in_proj.weight": (32 + 256, 16), "in_proj.bias": (32 + 256,), "conv1d.weight": (32, 1, 3),
        "conv1d.bias": (32,), "out_proj.weight": (16, 16 + 128), "out_proj.bias": (16,),
    }  # fmt: skip


@pytest.mark.parametrize("call, message", [
    (lambda: MHA(16, 4, num_heads_kv=3), "num_heads_kv is 3, expected a divisor of num_heads = 4"),
    (lambda: MHA(16, 3), "num_heads is 3, expected a divisor of embed_dim = 16"),
    (lambda: MHA(16, 4, rotary_emb_dim=3), "dim is 3, expected an even number"),
    (lambda: make("plain")(torch.zeros(2, 3, 8)), r"x has shape \(2, 3, 8\), expected"),
    (lambda: make("plain", causal=False)(draw(1), InferenceParams(4, 2)), "causal is false, expected true"),
    (lambda: make("plain")(draw(5), InferenceParams(4, 2)), "row 5 does not fit into the cache of 4 rows"),
    (lambda: make("plain")(draw(2), InferenceParams(4, 1)), "the cache holds 1 rows from row 0 on, expected 2"),
    (lambda: make("plain")(draw(2), InferenceParams(4, 2), seq_idx=torch.zeros(2, 2).int()), "one sequence in each"),
    (lambda: MHA(16, 4, causal=True)(draw(2).float(), InferenceParams(4, 2)), "layer_idx is None"),
])  # fmt: skip
def test_wrong_arguments_are_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()

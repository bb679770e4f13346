"""Sampling filters against their definitions; cached decoding = decoding without a cache; graphs, streams, teachers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_ssm import MambaConfig, MambaLMHeadModel, update_graph_cache
from mamba_ssm.testing import assert_close
from mamba_ssm.utils.generation import (
    decode,
    modify_logit_for_repetition_penalty,
    modify_logits_for_min_p_filtering,
    modify_logits_for_top_k_filtering,
    modify_logits_for_top_p_filtering,
    sample,
)

CONFIGS = {
    "Mamba": {"ssm_cfg": {"layer": "Mamba", "d_state": 4}},
    "Mamba2": {"ssm_cfg": {"layer": "Mamba2", "d_state": 4, "headdim": 8}},
    "hybrid": {
        "ssm_cfg": {"layer": "Mamba2", "d_state": 4, "headdim": 8}, "attn_layer_idx": [1],
        "attn_cfg": {"num_heads": 4, "causal": True, "rotary_emb_dim": 4, "d_conv": 4},
    },
}  # fmt: skip


def make(name, device="cpu"):
    """Weights large enough that the likeliest token depends on the history."""
    torch.manual_seed(0)
    config = MambaConfig(d_model=16, n_layer=2, vocab_size=11, tie_embeddings=False, **CONFIGS[name])
    model = MambaLMHeadModel(config, initializer_cfg={"initializer_range": 1.0}).double()
    for layer in model.backbone.layers:
        torch.nn.init.normal_(layer.mixer.in_proj.weight, std=1.0)
        torch.nn.init.normal_(layer.mixer.out_proj.weight, std=1.0)
    return model.to(device)


@pytest.fixture(params=CONFIGS)
def model(request):
    return make(request.param)


def prompt(batch=3, length=4):
    return torch.randint(0, 11, (batch, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def decode_without_cache(model, ids, max_length, **sampling):
    while ids.shape[1] < max_length:
        ids = torch.cat([ids, sample(model(ids).logits[:, -1, :11], **sampling).unsqueeze(1)], dim=1)
    return ids


def test_cached_equals_uncached_token_for_token(model):
    greedy = model.generate(prompt(), 20)
    assert torch.equal(greedy, decode_without_cache(model, prompt(), 20))
    assert greedy[:, 4:].unique().numel() > 2                                # a model worth comparing
    sampling = {"top_k": 5, "top_p": 0.9, "min_p": 0.02, "temperature": 1.3}
    drawn = model.generate(prompt(), 20, generator=torch.Generator().manual_seed(3), **sampling)
    assert torch.equal(
        drawn, decode_without_cache(model, prompt(), 20, generator=torch.Generator().manual_seed(3), **sampling)
    )
    assert not torch.equal(drawn, greedy)


def test_graph_cache_falls_back_to_plain_calls_on_a_cpu(model):
    want = model.generate(prompt(), 20)
    assert torch.equal(model.generate(prompt(), 20, cg=True), want)
    cache = model._decoding_cache
    assert torch.equal(model.generate(prompt(2), 12, cg=True), want[:2, :12])           # smaller: the cache is used on
    assert model._decoding_cache is cache
    assert torch.equal(model.generate(prompt(3), 25, cg=True)[:, :20], want)            # longer: a new one
    assert model._decoding_cache is not cache


def test_several_tokens_at_a_time(model):
    ids = prompt(2, 9)
    cache = update_graph_cache(model, None, 2, 3, 9, decoding_seqlens=(1, 3))
    cache.inference_params.reset(9, 2)
    with torch.no_grad():
        want = model(ids).logits
        model(ids[:, :3], inference_params=cache.inference_params)
        outs = [cache.run(ids[:, a:b], ids[:, a:b], a) for a, b in ((3, 6), (6, 7), (7, 8))]
    assert_close(torch.cat(outs, dim=1), want[:, 3:8], 1e-10)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", CONFIGS)
def test_graph_equals_plain_on_a_gpu(name):
    model = make(name, "cuda")
    for batch, length in ((3, 40), (1, 17), (3, 30)):
        ids = prompt(batch).cuda()
        plain = model.generate(ids, length, return_dict_in_generate=True, output_scores=True)
        graph = model.generate(ids, length, return_dict_in_generate=True, output_scores=True, cg=True)
        assert torch.equal(plain.sequences, graph.sequences)
        for left, right in zip(plain.scores, graph.scores, strict=True):
            assert_close(right, left, 1e-10)


def test_eos_fills_the_row_and_ends_when_all_have_met_it(model):
    free = model.generate(prompt(), 20)
    eos = int(free[0, 6])
    ended = model.generate(prompt(), 20, eos_token_id=eos)
    for row, want in zip(ended.tolist(), free.tolist(), strict=True):
        first = next((i for i in range(4, len(want)) if want[i] == eos), len(want))
        assert row[:first] == want[: min(first, len(row))]
        assert all(token == eos for token in row[first:])
    alone = model.generate(prompt()[:1], 20, eos_token_id=eos)
    assert alone.shape[1] == free[0].tolist().index(eos, 4) + 1


def test_teacher_outputs_are_followed_while_scores_are_the_models(model):
    teacher = torch.randint(0, 11, (3, 9), generator=torch.Generator().manual_seed(2))
    teacher[:, :4] = prompt()
    output = model.generate(prompt(), 12, teacher_outputs=teacher, return_dict_in_generate=True, output_scores=True)
    assert torch.equal(output.sequences[:, :9], teacher)
    assert torch.equal(output.sequences, decode_without_cache(model, teacher, 12))
    with torch.no_grad():
        want = model(output.sequences).logits[:, 3:-1, :11]
    assert_close(torch.stack(output.scores, dim=1), want, 1e-10)


class Recorder:
    def __init__(self):
        self.tokens, self.ended = [], False

    def put(self, tokens):
        self.tokens.append(tokens)

    def end(self):
        self.ended = True


def test_streamer_sees_the_prompt_and_every_token(model):
    recorder = Recorder()
    out = model.generate(prompt(), 8, streamer=recorder)
    assert torch.equal(torch.cat([recorder.tokens[0], torch.stack(recorder.tokens[1:], dim=1)], dim=1), out)
    assert recorder.ended


def test_padding_of_the_vocabulary_is_never_chosen():
    model = make("Mamba")
    with torch.no_grad():
        model.lm_head.weight[11:] *= 100.0
    assert model.generate(prompt(), 30, top_k=0, temperature=5.0).max() < 11


def test_repetition_penalty_against_its_definition():
    logits = torch.tensor([[2.0, -1.0, 0.5], [1.0, 1.0, 1.0]])
    modify_logit_for_repetition_penalty(logits, torch.tensor([[0, 1, 1], [2, 2, 2]]), 2.0)
    assert logits.tolist() == [[1.0, -2.0, 0.5], [1.0, 1.0, 0.5]]
    model = make("Mamba")
    assert model.generate(prompt(1), 14, repetition_penalty=1e6)[0, 4:].unique().numel() > 6


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 999), top_k=st.integers(1, 12), top_p=st.floats(0.01, 0.99), min_p=st.floats(0.01, 1.0))
def test_filters_against_their_definitions(seed, top_k, top_p, min_p):
    logits = torch.randn(2, 9, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2
    probability = logits.softmax(-1)
    kept = []
    for modify, option in (
        (modify_logits_for_top_k_filtering, top_k), (modify_logits_for_top_p_filtering, top_p),
        (modify_logits_for_min_p_filtering, min_p),
    ):  # fmt: skip
        filtered = logits.clone()
        modify(filtered, option)
        assert torch.equal(filtered[filtered.isfinite()], logits[filtered.isfinite()])
        kept.append(filtered.isfinite())
    for row in range(2):
        order = probability[row].argsort(descending=True).tolist()
        assert set(kept[0][row].nonzero().flatten().tolist()) == set(order[:top_k])
        total, expected = 0.0, set()
        for token in order:
            if total >= top_p:
                break
            expected.add(token)
            total += probability[row, token].item()
        assert set(kept[1][row].nonzero().flatten().tolist()) == expected
        floor = min_p * probability[row].max() * (1 - 1e-9)
        assert kept[2][row].tolist() == (probability[row] >= floor).tolist()


def test_sampling_follows_the_distribution():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.2]])).expand(40_000, 3)
    for options, want in (
        ({}, (0.5, 0.3, 0.2)), ({"top_k": 2}, (0.625, 0.375, 0.0)), ({"top_p": 0.6}, (0.625, 0.375, 0.0)),
        ({"min_p": 0.5}, (0.625, 0.375, 0.0)), ({"temperature": 0.5}, (0.25 / 0.38, 0.09 / 0.38, 0.04 / 0.38)),
    ):  # fmt: skip
        drawn = sample(logits, **{"top_k": 0, **options}, generator=torch.Generator().manual_seed(0))
        counts = torch.bincount(drawn, minlength=3) / 40_000
        assert_close(counts, torch.tensor(want), 0.02)
    assert sample(logits).unique().tolist() == [0]


@pytest.mark.parametrize("options, message", [
    ({"top_k": -1}, "top_k is -1, expected 0"),
    ({"top_p": 1.5}, r"top_p is 1\.5, expected 0\.\.1"),
    ({"min_p": -0.1}, r"min_p is -0\.1"),
    ({"temperature": 0.0}, r"temperature is 0\.0, expected more than 0"),
    ({"repetition_penalty": 0.0}, r"repetition_penalty is 0\.0"),
])  # fmt: skip
def test_wrong_options_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        decode(prompt(), make("Mamba"), 8, **options)
    with pytest.raises(ValueError, match=r"input_ids has shape \(3, 0\), expected \(B, L\) with L >= 1"):
        decode(prompt()[:, :0], make("Mamba"), 8)

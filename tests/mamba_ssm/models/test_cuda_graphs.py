"""On a GPU: the sequence core captured in CUDA graphs gives what eager calls give, on every tier there is."""

import pytest
import torch

from mamba_ssm import InferenceParams, MambaConfig, MambaLMHeadModel, MambaWrapperModel
from mamba_ssm.ops.tiers import use_tier
from mamba_ssm.testing import assert_close

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CONFIGS = {
    "Mamba": {"layer": "Mamba", "d_state": 16},
    "Mamba2": {"layer": "Mamba2", "d_state": 16, "headdim": 32},
}
B, L, Z, A = 4, 40, 24, 6


@pytest.fixture(params=CONFIGS)
def layer(request):
    return request.param


@pytest.fixture(params=["reference", "auto"], autouse=True)
def tier(request):
    with use_tier(request.param):
        yield request.param


def make(layer):
    torch.manual_seed(0)
    return MambaWrapperModel(64, 2, Z, A, ssm_cfg=CONFIGS[layer], device="cuda")


def draw(seed=0, length=L):
    generator = torch.Generator().manual_seed(seed)
    stoch, action = (torch.randn(B, length, width, generator=generator).cuda() for width in (Z, A))
    seq_idx = (torch.rand(B, length, generator=generator) < 0.1).cumsum(1).int().cuda()
    return stoch, action, seq_idx


def capture(function):
    """`function` as a graph, after warm-up on another stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return graph, result


@pytest.mark.parametrize("autocast", [False, True])
def test_training_step(layer, autocast):
    core = make(layer)
    inputs = draw()
    # not the sum of squares, which the final norm fixes: its gradients would be noise
    dout = torch.randn(B, L, 64, generator=torch.Generator().manual_seed(2)).cuda()

    def step():
        for parameter in core.parameters():
            parameter.grad = None
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            out = core(*inputs)
        (out.float() * dout).sum().backward()
        return [out.detach(), *(p.grad for p in core.parameters())]

    graph, results = capture(step)
    for tensor, new in zip(inputs, draw(seed=1), strict=True):
        tensor.copy_(new)
    graph.replay()
    replayed = [t.clone() for t in results]
    tolerance = 2e-2 if autocast else 2e-5
    for got, want in zip(replayed, step(), strict=True):
        assert_close(got, want, tolerance)


@torch.no_grad()
def test_prefill_and_steps_with_resets(layer):
    core = make(layer)
    stoch, action, seq_idx = draw()
    state = core.init_state(B, device="cuda")
    reset = torch.zeros(B, dtype=torch.bool, device="cuda")
    row = [stoch[:, 0].clone(), action[:, 0].clone()]
    prefill, prefilled = capture(lambda: core(stoch, action, seq_idx, state))
    step, stepped = capture(lambda: core.step(*row, state, reset))

    state.zero_()
    new_stoch, new_action, new_seq_idx = draw(seed=1, length=L + 5)
    for target, source in ((stoch, new_stoch), (action, new_action), (seq_idx, new_seq_idx)):
        target.copy_(source[:, :L])
    prefill.replay()
    outs = [prefilled.clone()]
    for t in range(L, L + 5):
        row[0].copy_(new_stoch[:, t])
        row[1].copy_(new_action[:, t])
        reset.copy_(new_seq_idx[:, t] != new_seq_idx[:, t - 1])
        step.replay()
        outs.append(stepped.clone().unsqueeze(1))
    assert_close(torch.cat(outs, dim=1), core(new_stoch, new_action, new_seq_idx), 2e-5)


@torch.no_grad()
def test_packed_prompts_then_a_step(layer):
    """Where the prompts begin is read on the device: the captured pass takes others."""
    torch.manual_seed(0)
    attention = {"num_heads": 4, "causal": True, "rotary_emb_dim": 8, "d_conv": 4}
    config = MambaConfig(64, 0, 3, 32, CONFIGS[layer], attn_layer_idx=[1], attn_cfg=attention)
    model = MambaLMHeadModel(config, device="cuda")
    ids, nexts = torch.randint(0, 32, (1, 20)).cuda(), torch.randint(0, 32, (3, 1)).cuda()
    packed, params = torch.tensor([0, 7, 8, 20]).cuda(), InferenceParams(max_seqlen=16, max_batch_size=3)
    params.key_value_memory_dict = model.allocate_inference_cache(3, 16)
    graph, logits = capture(lambda: model(ids, inference_params=params, cu_seqlens=packed).logits)
    packed.copy_(torch.tensor([0, 3, 14, 20]))
    graph.replay()
    params.advance(20, packed)
    stepped = model(nexts, inference_params=params).logits
    for i, prompt in enumerate(ids.split([3, 11, 6], dim=1)):
        want = model(torch.cat([prompt, nexts[i : i + 1]], dim=1)).logits
        assert_close(torch.cat([logits[:, packed[i] : packed[i + 1]], stepped[i : i + 1]], dim=1), want, 2e-5)


@torch.no_grad()
def test_gpu_equals_cpu_in_float64(layer):
    core = make(layer)
    stoch, action, seq_idx = draw()
    got, state = core(stoch, action, seq_idx, core.init_state(B)), core.init_state(B)
    stepped = [core.step(stoch[:, t], action[:, t], state) for t in range(L)]
    whole = core(stoch, action)
    core.cpu().double()
    wide = [stoch.cpu().double(), action.cpu().double()]
    assert_close(got.cpu(), core(*wide, seq_idx.cpu()), 1e-5)
    assert_close(whole.cpu(), core(*wide), 1e-5)
    assert_close(torch.stack(stepped, dim=1).cpu(), core(*wide), 1e-5)

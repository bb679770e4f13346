"""Imagined steps by kernels against the plain ones: the same random numbers must give the same rollout."""

import copy

import pytest
import torch

import sub_models.world_models
from replay_buffer import Batch
from sub_models.fused_imagination import can_roll_out, roll_out
from sub_models.imagination_kernels import draw_latent, run_draw_one_hot
from tests.support import C, D, K, make_agent_for, make_batch, make_world_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU the kernels run through Triton's interpreter
B, H = 19, 3  # more rows than one program of the actor's kernel takes


def randomise(module, seed=0):
    """Weights that leave no probability near uniform and no norm's weight at one."""
    torch.manual_seed(seed)
    for parameter in module.parameters():
        parameter.data.add_(0.5 * torch.randn_like(parameter))


def prepare(backbone="Mamba2", dtype=torch.float32, **agent):
    world_model = make_world_model(backbone).to(DEVICE, dtype)
    agent = make_agent_for(world_model, **agent).to(DEVICE)
    for part in (world_model.prior_head, world_model.sequence_model, agent.actor):
        randomise(part)
    norm = agent.feature_norm
    norm.mean.copy_(torch.rand_like(norm.mean))
    norm.variance.copy_(torch.rand_like(norm.variance))
    return world_model.eval(), agent


def inputs_of(world_model, agent):
    torch.manual_seed(1)
    deter = torch.randn(B, D, device=DEVICE)
    state = world_model.sequence_model.init_state(B)
    for tensor in state.tensors():
        tensor.normal_()
    return deter, state, torch.rand(H + 1, B, K, device=DEVICE), agent.noise(H, B)


@pytest.mark.parametrize(
    ("backbone", "num_layers", "unimix_ratio"), [("Mamba2", 3, 0.0), ("Mamba2", 1, 0.3), ("Mamba", 2, 0.1)]
)
@torch.no_grad()
def test_steps_by_kernels_equal_plain_ones(backbone, num_layers, unimix_ratio):
    world_model, agent = prepare(backbone, num_layers=num_layers, unimix_ratio=unimix_ratio)
    deter, state, *tickets = inputs_of(world_model, agent)
    twin = state.clone()
    *expected, _ = world_model._roll_out(agent, deter, state, *tickets)
    expected.append(agent.feature_norm(expected[0]))
    got = roll_out(world_model, agent.actor_parts(), deter, twin, *tickets)
    for name, ours, plain in zip(("feature", "action", "log_prob", "normed"), got, expected, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
    for ours, plain in zip(twin.tensors(), state.tensors(), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)
    assert len(expected[1].unique()) > 1


@torch.no_grad()
def test_every_class_is_drawn_by_its_share():
    """Tickets that walk through 0..1 evenly count a class as often as its probability says, with unimix."""
    rows, ratio = 120, 0.2
    logits = torch.randn(1, K * C, device=DEVICE).mul(3).expand(rows, -1).contiguous()
    ticket = ((torch.arange(rows, device=DEVICE) + 0.5) / rows).unsqueeze(1).expand(-1, K).contiguous()
    feature = torch.full((rows, K * C + D), float("nan"), device=DEVICE)
    deter = torch.randn(rows, 2, D, device=DEVICE)[:, 1]  # rows with gaps, as the last one of a context has
    norm = torch.randn(2, K * C + D, device=DEVICE).square()  # mean and variance
    normed, index = torch.empty_like(feature), torch.empty_like(ticket, dtype=torch.int32)
    draw_latent(logits, ticket, deter, ratio, *norm, 0.1, feature, normed, index, C)
    share = (1 - ratio) * logits[0].view(K, C).softmax(-1) + ratio / C
    assert (feature[:, : K * C].view(rows, K, C).mean(0) - share).abs().max() < 1.5 / rows
    assert torch.equal(feature[:, K * C :], deter)
    assert torch.equal(feature[:, : K * C].view(rows, K, C).argmax(-1), index.long())
    assert torch.equal(run_draw_one_hot(logits, ticket, ratio), feature[:, : K * C])
    torch.testing.assert_close(normed, (feature - norm[0]) / (norm[1] + 0.1).sqrt())


def test_the_operator_is_registered_well():
    arguments = (torch.randn(3, K * C, device=DEVICE), torch.rand(3, K, device=DEVICE), 0.1)
    torch.library.opcheck(torch.ops.mamba_ssm_triton.draw_one_hot.default, arguments)


def test_what_is_rolled_out_by_kernels():
    world_model, agent = prepare()
    actor = agent.actor_parts()
    assert can_roll_out(world_model, actor) == (DEVICE == "cuda")
    assert not can_roll_out(make_world_model("Transformer").float().to(DEVICE), actor)
    assert not can_roll_out(copy.deepcopy(world_model).double(), actor)
    assert not can_roll_out(world_model, make_agent_for(make_world_model(continuous=True)).actor_parts())


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA device")
@torch.no_grad()
def test_bfloat16_steps_on_a_gpu():
    """One step under autocast: hardly a draw differs from the plain form's, and where none does the values agree."""
    world_model, agent = prepare(num_layers=3)
    world_model.autocast_dtype = agent.autocast_dtype = torch.bfloat16
    deter, state, latent_ticket, action_ticket = inputs_of(world_model, agent)
    tickets, twin = (latent_ticket[:2], action_ticket[:1]), state.clone()
    with world_model.autocast():
        expected = world_model._roll_out(agent, deter, state, *tickets)
        got = roll_out(world_model, agent.actor_parts(), deter, twin, *tickets)
    same = (got[0][:, 0] == expected[0][:, 0]).all(-1)
    assert same.float().mean() > 0.9 and (got[1][same] == expected[1][same]).float().mean() > 0.9
    same &= (got[1] == expected[1]).squeeze(-1)
    torch.testing.assert_close(got[2][same], expected[2][same], rtol=3e-2, atol=3e-2)
    torch.testing.assert_close(twin.layers[0][1][same], state.layers[0][1][same], rtol=5e-2, atol=5e-2)


def test_imagination_is_the_same_with_kernels(monkeypatch):
    """From contexts to weights, both forms draw the same random numbers in the same order."""
    monkeypatch.setattr(sub_models.world_models, "can_roll_out", lambda model, actor: actor is not None)
    monkeypatch.setattr(sub_models.world_models, "can_draw", lambda logits: world_model.fuses_imagination)
    world_model, agent = prepare()
    contexts = Batch(*(None if tensor is None else tensor.to(DEVICE) for tensor in make_batch(2, 4)))
    rollouts = []
    for fuses in (False, True):
        world_model.fuses_imagination = fuses
        torch.manual_seed(2)
        rollouts.append(world_model.imagine(agent, contexts, H))
    assert rollouts[1].normed is not None
    for plain, fused in zip(rollouts[0][:-1], rollouts[1][:-1], strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-4)

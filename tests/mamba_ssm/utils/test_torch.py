"""Autocast decorators on a CPU, counts and weight-decay groups."""

import torch

from mamba_ssm import MambaConfig, MambaLMHeadModel
from mamba_ssm.utils.torch import count_parameters, custom_bwd, custom_fwd, weight_decay_groups


class Double(torch.autograd.Function):
    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx, dout):
        x, weight = ctx.saved_tensors
        assert torch.is_autocast_enabled("cpu")
        return dout @ weight.T, x.T @ dout.to(x.dtype)


def test_backward_runs_under_the_autocast_state_of_forward():
    x, weight = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = Double.apply(x, weight)
    out.float().sum().backward()
    assert out.dtype == torch.bfloat16
    assert weight.grad is not None


def test_counts_and_groups_cover_every_parameter_once():
    model = MambaLMHeadModel(MambaConfig(d_model=16, n_layer=2, vocab_size=16))
    model.backbone.norm_f.weight.requires_grad_(False)
    assert count_parameters(model) == sum({id(p): p.numel() for p in model.parameters()}.values())
    assert count_parameters(model) - count_parameters(model, trainable_only=True) == 16
    decayed, kept = weight_decay_groups(model, 0.1)
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    assert {id(p) for p in decayed["params"]} | {id(p) for p in kept["params"]} == {id(p) for p in model.parameters()}
    mixer = model.backbone.layers[0].mixer
    assert any(p is mixer.in_proj.weight for p in decayed["params"])
    assert all(any(p is spared for p in kept["params"]) for spared in (mixer.A_log, mixer.D, mixer.dt_proj.bias))

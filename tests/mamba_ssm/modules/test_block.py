"""The residual block: fused = plain, a stream in float32, dropout on the branches only."""

from functools import partial

import pytest
import torch
from torch import nn

from mamba_ssm.modules.block import Block
from mamba_ssm.modules.mlp import GatedMLP
from mamba_ssm.ops.triton.layer_norm import RMSNorm
from mamba_ssm.testing import assert_close


class Scale(nn.Module):
    """A mixer that is easy to predict."""

    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.full((dim,), 3.0))

    def forward(self, x, inference_params=None):
        return self.weight.to(x.dtype) * x


def make(fused, norm=RMSNorm, mlp=nn.Identity, **options):
    torch.manual_seed(0)
    return Block(8, Scale, mlp, norm_cls=norm, fused_add_norm=fused, **options)


@pytest.mark.parametrize("norm", [RMSNorm, nn.LayerNorm])
@pytest.mark.parametrize("mlp", [nn.Identity, partial(GatedMLP, hidden_features=16, multiple_of=8)])
def test_fused_equals_plain_and_the_formula(norm, mlp):
    x, r = torch.randn(2, 3, 8, dtype=torch.float64), torch.randn(2, 3, 8, dtype=torch.float64)
    fused, plain = make(True, norm, mlp).double(), make(False, norm, mlp).double()
    for residual in (None, r):
        branch, stream = fused(x, residual)
        for got, want in zip((branch, stream), plain(x, residual), strict=True):
            assert_close(got, want, 1e-12)
        total = x if residual is None else x + residual
        after = total + 3.0 * fused.norm(total)
        if fused.mlp is not None:
            after = after + fused.mlp(fused.norm2(after))
        assert_close(branch + stream, after, 1e-12)


@pytest.mark.parametrize("fused", [True, False])
def test_stream_stays_in_float32(fused):
    block = make(fused, residual_in_fp32=True).bfloat16()
    branch, stream = block(torch.randn(2, 3, 8).bfloat16())
    assert (branch.dtype, stream.dtype) == (torch.bfloat16, torch.float32)
    _, stream = make(fused, residual_in_fp32=True).double()(torch.randn(2, 3, 8).double())
    assert stream.dtype == torch.float64


def test_dropout_acts_on_the_branch_in_training():
    block = make(True, dropout=0.5).double()
    x = torch.randn(4, 50, 8, dtype=torch.float64)
    branch, stream = block(x)
    assert_close(stream, x, 0.0)
    dropped = (branch == 0).double().mean().item()
    assert 0.4 < dropped < 0.6
    block.eval()
    assert (block(x)[0] != 0).all()


def test_norms_that_cannot_be_fused_are_refused():
    with pytest.raises(TypeError, match="norm_cls makes Identity, expected RMSNorm"):
        make(True, norm=lambda dim: nn.Identity())


def test_gated_mlp_widths_and_formula():
    assert GatedMLP(96).fc1.weight.shape == (512, 96)                  # 8/3 · 96 = 256, a multiple of 128
    assert GatedMLP(96, hidden_features=130).fc2.weight.shape == (96, 256)
    mlp = GatedMLP(6, 8, out_features=5, multiple_of=4, bias=True).double()
    x = torch.randn(3, 6, dtype=torch.float64)
    value, gate = mlp.fc1(x).chunk(2, dim=-1)
    assert_close(mlp(x), mlp.fc2(value * gate * torch.sigmoid(gate)), 1e-12)

"""On a GPU, on every tier there is: operators in each dtype against the float64 reference, outputs and gradients."""

import pytest
import torch

from mamba_ssm.ops.causal_conv1d import causal_conv1d_fn, causal_conv1d_ref
from mamba_ssm.ops.selective_scan_interface import selective_scan_fn, selective_scan_ref
from mamba_ssm.ops.tiers import use_tier
from mamba_ssm.ops.triton.layernorm_gated import rms_norm_ref, rmsnorm_fn
from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined, ssd_chunk_scan_combined_ref
from mamba_ssm.testing import FORWARD_TOLERANCE, GRADIENT_TOLERANCE, compare, selective_scan_inputs, ssd_inputs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(params=["reference", "auto"], autouse=True)
def tier(request):
    with use_tier(request.param):
        yield request.param


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=str)
def dtype(request):
    return request.param


def check(function, reference, inputs, dtype, **options):
    compare(function, reference, inputs, FORWARD_TOLERANCE[dtype], GRADIENT_TOLERANCE[dtype], **options)


@pytest.mark.parametrize("length", [1, 17, 64, 65, 257, 1000])
def test_ssd(length, dtype):
    optional = ("D", "z", "dt_bias", "initial_states", "seq_idx")
    t = ssd_inputs(2, length, heads=4, headdim=32, groups=2, state=16, optional=optional, dtype=dtype, device="cuda")
    options = {"chunk_size": 64, "dt_softplus": True, "return_final_states": True}
    check(mamba_chunk_scan_combined, ssd_chunk_scan_combined_ref, t, dtype, **options)


@pytest.mark.parametrize("length", [1, 17, 64, 257])
def test_selective_scan(length, dtype):
    optional = ("D", "z", "delta_bias", "initial_state", "seq_idx")
    t = selective_scan_inputs(2, 32, length, 16, optional=optional, dtype=dtype, device="cuda")
    check(selective_scan_fn, selective_scan_ref, t, dtype, delta_softplus=True, return_last_state=True)


def draw(dtype, *shape):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to("cuda", dtype).requires_grad_()


@pytest.mark.parametrize("seq_idx", [False, True])
def test_causal_conv1d(dtype, seq_idx):
    t = {"x": draw(dtype, 2, 32, 65), "weight": draw(torch.float32, 32, 4), "bias": draw(torch.float32, 32)}
    t["seq_idx"] = torch.arange(130, device="cuda").view(2, 65) // 9 if seq_idx else None
    check(causal_conv1d_fn, causal_conv1d_ref, t, dtype, activation="silu")


def test_gated_rmsnorm(dtype):
    t = {"x": draw(dtype, 3, 65, 64), "weight": draw(torch.float32, 64), "bias": None, "z": draw(dtype, 3, 65, 64)}
    check(rmsnorm_fn, rms_norm_ref, t, dtype, group_size=32, norm_before_gate=False)

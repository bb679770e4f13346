"""The kernel of one recurrent step (interpreted on a CPU) against the reference in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_ssm.ops.triton.selective_state_update import selective_state_update_ref
from mamba_ssm.testing import FORWARD_TOLERANCE, assert_close

kernels = pytest.importorskip("mamba_ssm.ops.triton.selective_state_update_kernels", exc_type=ImportError)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPTIONAL = ("D", "z", "dt_bias", "indices")


def kernel_inputs(batch, channels, state, B_groups, C_groups, tied, optional, dtype=torch.float32, seed=0):
    """Arguments in their order; channels (D,) or (H, P); groups None: B or C (B, N); `tied` shares A, dt, D and dt_bias
    within a head by expand. State rows are twice the batch's where indices choose among them."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape, dtype=dtype):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)

    def of_channels(*before, dtype=torch.float32):
        if tied:
            return draw(*before, channels[0], 1, dtype=dtype).expand(*before, *channels)
        return draw(*before, *channels, dtype=dtype)

    rows = torch.randperm(2 * batch, generator=generator)[:batch].to(DEVICE) if "indices" in optional else None
    A = -of_channels().abs()
    A = A.unsqueeze(-1).expand(*channels, state) if tied else -draw(*channels, state, dtype=torch.float32).abs()
    weights = [draw(batch, *([] if groups is None else [groups]), state) for groups in (B_groups, C_groups)]
    return [
        draw(batch if rows is None else 2 * batch, *channels, state, dtype=torch.float32), draw(batch, *channels),
        of_channels(batch, dtype=dtype), A, *weights, of_channels() if "D" in optional else None,
        draw(batch, *channels) if "z" in optional else None, of_channels() if "dt_bias" in optional else None, True,
        rows,
    ]  # fmt: skip


def check_kernel(arguments, tolerance):
    wide = [t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in arguments]
    wide[0] = wide[0].clone()
    out, want = kernels.selective_state_update(*arguments), selective_state_update_ref(*wide)
    assert out.dtype == arguments[1].dtype
    assert_close(out, want, tolerance)
    assert_close(arguments[0], wide[0], max(tolerance, FORWARD_TOLERANCE[arguments[0].dtype]), "state")


@settings(max_examples=30, deadline=None)
@given(
    channels=st.sampled_from([(4,), (12,), (2, 3), (4, 5)]), state=st.sampled_from([1, 3, 16]),
    groups=st.tuples(*[st.sampled_from([None, 1, 2])] * 2), tied=st.booleans(),
    optional=st.sets(st.sampled_from(OPTIONAL)), batch=st.sampled_from([1, 3]), seed=st.integers(0, 99),
)  # fmt: skip
def test_kernel_equals_the_reference(channels, state, groups, tied, optional, batch, seed):
    """Both layouts with every subset of options."""
    arguments = kernel_inputs(batch, channels, state, *groups, tied and len(channels) == 2, optional, seed=seed)
    check_kernel(arguments, FORWARD_TOLERANCE[torch.float32])


@torch.no_grad()
def test_kernel_keeps_a_strided_low_precision_state():
    arguments = kernel_inputs(2, (4,), 5, 1, 1, False, OPTIONAL[:3], dtype=torch.bfloat16)
    arguments[0] = torch.empty(2, 5, 8, device=DEVICE, dtype=torch.bfloat16)[..., ::2].copy_(arguments[0].mT).mT
    check_kernel(arguments, FORWARD_TOLERANCE[torch.bfloat16])


@torch.no_grad()
@pytest.mark.parametrize("dt, rate", [(1e4, -1e4), (1e4, -1.0), (1e-30, -1e4), (-1e4, -1.0)])
def test_extreme_steps_leave_no_nan(dt, rate):
    """A decay of 0 forgets the state, one of 1 keeps it."""
    arguments = kernel_inputs(2, (4, 5), 3, 1, 1, False, OPTIONAL[:2])
    arguments[2], arguments[3] = torch.full_like(arguments[2], dt), torch.full_like(arguments[3], rate)
    check_kernel(arguments, FORWARD_TOLERANCE[torch.float32])
    assert arguments[0].isfinite().all()


def test_kernel_leaves_gradients_and_float64_to_the_reference():
    arguments = kernel_inputs(2, (4,), 5, 1, 1, False, OPTIONAL)
    arguments[1].requires_grad_()
    kernels.selective_state_update(*arguments).sum().backward()
    assert arguments[1].grad.abs().sum() > 0
    wide = [t.detach().double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in arguments]
    check_kernel(wide, 1e-12)


def test_registration_of_the_kernel():
    torch.library.opcheck(kernels.run_state_update, (*kernel_inputs(2, (2, 3), 5, 1, 2, True, OPTIONAL), False))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("batch", [1, 1024])
@pytest.mark.parametrize("channels, state, groups", [
    ((1024,), 16, None), ((96,), 1, 2), ((64,), 4, 64), ((16, 64), 16, 1), ((8, 128), 64, 2), ((24, 64), 128, 1),
    ((2, 16), 256, 2), ((7,), 5, 7),
])  # fmt: skip
def test_kernel_on_a_gpu(dtype, batch, channels, state, groups):
    for tied in (False, True) if len(channels) == 2 else (False,):
        for optional in ((), OPTIONAL):
            arguments = kernel_inputs(batch, channels, state, groups, groups, tied, optional, dtype)
            check_kernel(arguments, FORWARD_TOLERANCE[dtype])

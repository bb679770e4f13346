"""Steps that look back at kept rows: kernel (interpreted on a CPU) and reference against recurrent steps in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_ssm.ops.causal_conv1d import causal_conv1d_fn
from mamba_ssm.ops.tiers import use_tier
from mamba_ssm.ops.triton.dual_step import NO_LIMIT, keep_rows, mamba2_dual_step
from mamba_ssm.ops.triton.recurrent_step import mamba2_step
from mamba_ssm.testing import FORWARD_TOLERANCE, NoHostSync, assert_close

kernels = pytest.importorskip("mamba_ssm.ops.triton.dual_step_kernels", exc_type=ImportError)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.usefixtures("interpreted_loops")
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SIZES = {"batch": 2, "heads": 4, "headdim": 3, "groups": 2, "state": 5, "width": 4}


class Case:
    """A pass over `length` rows and `steps` rows after it, float64; parameters of one mixer."""

    def __init__(
        self, batch, heads, headdim, groups, state, width, length=8, steps=3, bias=True, norm=True, D_has_hdim=False,
        seed=0,
    ):  # fmt: skip
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape):
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE)

        self.sizes, self.length, self.steps = (batch, heads, headdim, groups, state, width), length, steps
        d_ssm = heads * headdim
        self.channels = d_ssm + 2 * groups * state
        self.rows = draw(batch, length + steps, d_ssm + self.channels + heads)
        self.conv_weight, self.conv_bias = draw(self.channels, width), draw(self.channels) if bias else None
        self.dt_bias, self.A_log = draw(heads), draw(heads)
        self.D = draw(heads, headdim) if D_has_hdim else draw(heads)
        self.norm_weight = draw(d_ssm) if norm else None

    def parameters(self, dtype):
        """conv_weight, conv_bias, dt_bias, A_log, D, norm_weight."""
        names = ("conv_weight", "conv_bias", "dt_bias", "A_log", "D", "norm_weight")
        return [None if (tensor := getattr(self, name)) is None else tensor.to(dtype) for name in names]

    @torch.no_grad()
    def recurrent(self, seq_idx=None, **options):
        """(B, S, d_ssm): one step after the other over all rows, the states zeroed where seq_idx changes."""
        batch, heads, headdim, _, state, width = self.sizes
        conv = torch.zeros(batch, self.channels, width, dtype=torch.float64, device=DEVICE)
        ssm = torch.zeros(batch, heads, headdim, state, dtype=torch.float64, device=DEVICE)
        conv_weight, conv_bias, *others = self.parameters(torch.float64)
        outs = []
        for t, row in enumerate(self.rows.unbind(1)):
            if seq_idx is not None and 0 < t < self.length:
                starts = seq_idx[:, t] != seq_idx[:, t - 1]
                conv[starts], ssm[starts] = 0.0, 0.0
            with use_tier("reference"):
                outs.append(mamba2_step(row, conv, ssm, conv_weight, conv_bias, *others, **options))
        return torch.stack(outs[self.length :], dim=1)

    def keep(self, dtype=torch.float32, seq_idx=None, dt_limit=NO_LIMIT, parameters_dtype=torch.float32):
        """The rows of the pass."""
        _, heads, headdim, *_ = self.sizes
        rows = self.rows[:, : self.length].to(dtype)
        _, xBC, dt = rows.split([heads * headdim, self.channels, heads], dim=-1)
        conv_weight, conv_bias, dt_bias, A_log, *_ = self.parameters(parameters_dtype)
        inputs = xBC.transpose(1, 2)
        out = causal_conv1d_fn(inputs, conv_weight, conv_bias, seq_idx=seq_idx, activation="silu").transpose(1, 2)
        return keep_rows(out, inputs, dt, conv_weight, dt_bias, A_log, self.steps, seq_idx, dt_limit)

    @torch.no_grad()
    def dual(self, run, dtype=torch.float32, seq_idx=None, parameters_dtype=torch.float32, **options):
        """(B, S, d_ssm) by `run`, which is `mamba2_dual_step` or the kernel's function."""
        kept = self.keep(dtype, seq_idx, options.get("dt_limit", NO_LIMIT), parameters_dtype)
        _, conv_bias, dt_bias, A_log, D, norm_weight = self.parameters(parameters_dtype)
        rules = {"norm_eps": 1e-5, "norm_before_gate": False, "dt_limit": NO_LIMIT} | options
        outs = []
        for row in self.rows[:, self.length :].to(dtype).unbind(1):
            outs.append(run(row, kept, conv_bias, dt_bias, A_log, D, self.sizes[3], norm_weight, *rules.values()))
            assert outs[-1].dtype == dtype
            kept.count += run is kernels.mamba2_dual_step
        return torch.stack(outs, dim=1)


@settings(max_examples=15, deadline=None)
@given(
    sizes=st.sampled_from([(1, 1, 1, 1), (2, 4, 1, 3), (4, 3, 2, 5), (3, 5, 3, 16), (2, 33, 1, 2)]),
    length=st.sampled_from([1, 2, 7]), steps=st.sampled_from([1, 3, 6]), width=st.sampled_from([1, 2, 4]),
    bias=st.booleans(), norm=st.booleans(), D_has_hdim=st.booleans(), norm_before_gate=st.booleans(),
    dt_limit=st.sampled_from([NO_LIMIT, (0.01, 0.5)]), batch=st.sampled_from([1, 3]), pieces=st.booleans(),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_equals_the_recurrent_step(
    sizes, length, steps, width, bias, norm, D_has_hdim, norm_before_gate, dt_limit, batch, pieces, seed
):
    case = Case(batch, *sizes, width, length, steps, bias, norm, D_has_hdim, seed)
    seq_idx = None
    if pieces:
        starts = torch.rand(batch, length, generator=torch.Generator().manual_seed(seed)) < 0.3
        seq_idx = starts.int().cumsum(1, dtype=torch.int32).to(DEVICE)
    options = {"norm_before_gate": norm_before_gate, "dt_limit": dt_limit}
    want = case.recurrent(seq_idx, **options)
    wide = torch.float64
    assert_close(case.dual(mamba2_dual_step, wide, seq_idx, wide, **options), want, 1e-10)
    for run in (mamba2_dual_step, kernels.mamba2_dual_step):
        assert_close(case.dual(run, seq_idx=seq_idx, **options), want, FORWARD_TOLERANCE[torch.float32])


def test_low_precision():
    """Rows of the pass are rounded as the pass rounds them."""
    case = Case(2, 4, 16, 1, 8, 4, length=8, steps=16)
    case.rows = case.rows.bfloat16().double()
    out = case.dual(kernels.mamba2_dual_step, torch.bfloat16)
    assert_close(out, case.recurrent(), FORWARD_TOLERANCE[torch.bfloat16])


def test_forgotten_rows_leave_no_nan():
    """Δ up to 1e4 and A down to -1e4: decays are 0, and of the past nothing is left."""
    case = Case(**SIZES, length=3, steps=3, bias=False)
    case.A_log.fill_(9.2)
    case.dt_bias.fill_(1e4)
    assert_close(case.dual(kernels.mamba2_dual_step), case.recurrent(), FORWARD_TOLERANCE[torch.float32])


def test_float64_takes_the_reference_and_empty_batches_pass():
    case = Case(**SIZES)
    assert_close(case.dual(kernels.mamba2_dual_step, torch.float64, None, torch.float64), case.recurrent(), 1e-10)
    assert Case(**{**SIZES, "batch": 0}).dual(kernels.mamba2_dual_step).shape == (0, 3, 12)


def test_no_step_behind_the_room_and_no_host_sync():
    case = Case(**SIZES, steps=1)
    kept, (_, *parameters, norm) = case.keep(), case.parameters(torch.float32)
    row = case.rows[:, -1].float()
    with NoHostSync():
        mamba2_dual_step(row, kept, *parameters, 2, norm)
    with pytest.raises(ValueError, match="the rows were kept for 1 steps"):
        mamba2_dual_step(row, kept, *parameters, 2, norm)


@pytest.mark.parametrize("change, message", [
    ({"zxbcdt": torch.zeros(3, 48)}, r"zxbcdt has shape \(3, 48\), expected \(B, 2 d_ssm \+ 2GN \+ H\)"),
    ({"zxbcdt": torch.zeros(2, 49)}, "zxbcdt has 49 columns, expected 2 d_ssm"),
    ({"ngroups": 3}, "expected 2 d_ssm .*, G = 3"),
    ({"conv_bias": torch.zeros(4)}, r"conv_bias has shape \(4,\)"),
    ({"dt_bias": torch.zeros(3)}, r"dt_bias has shape \(3,\), expected \(H\) = \(4\)"),
    ({"A_log": torch.zeros(4, 3)}, r"A_log has shape \(4, 3\)"),
    ({"D": torch.zeros(12)}, r"D has shape \(12,\), expected \(H\) or \(H, P\)"),
    ({"norm_weight": torch.zeros(4)}, r"norm_weight has shape \(4,\), expected \(d_ssm\) = \(12\)"),
])  # fmt: skip
def test_wrong_arguments_are_refused_by_name(change, message):
    case = Case(**SIZES)
    _, conv_bias, dt_bias, A_log, D, norm_weight = case.parameters(torch.float32)
    arguments = {
        "zxbcdt": case.rows[:, -1].float(), "kept": case.keep(), "conv_bias": conv_bias, "dt_bias": dt_bias,
        "A_log": A_log, "D": D, "ngroups": 2, "norm_weight": norm_weight,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        mamba2_dual_step(**arguments | {k: v.to(DEVICE) if torch.is_tensor(v) else v for k, v in change.items()})


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("batch", [1, 1024])
@pytest.mark.parametrize("heads, headdim, groups, state", [
    (16, 64, 1, 16), (4, 32, 2, 4), (24, 64, 1, 128), (3, 24, 1, 5),
])  # fmt: skip
def test_on_a_gpu(dtype, batch, heads, headdim, groups, state):
    case = Case(batch, heads, headdim, groups, state, 4, length=8, steps=16)
    case.rows = case.rows.to(dtype).double()
    assert_close(case.dual(kernels.mamba2_dual_step, dtype), case.recurrent(), FORWARD_TOLERANCE[dtype])

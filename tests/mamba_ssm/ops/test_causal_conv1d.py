"""The causal convolution against torch's own, its steps, its boundaries and its refusals."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_ssm.ops.causal_conv1d import (
    causal_conv1d_fn,
    causal_conv1d_ref,
    causal_conv1d_update,
    causal_conv1d_varlen_states,
    causal_conv1d_window,
)
from mamba_ssm.testing import NoHostSync, assert_close


def conv_inputs(batch=2, channels=3, length=11, width=4, bias=True, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    return {
        "x": draw(batch, channels, length), "weight": draw(channels, width), "bias": draw(channels) if bias else None,
        "initial_states": draw(batch, channels, width - 1),
    }  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(
    length=st.sampled_from([0, 1, 2, 3, 17, 64]), width=st.integers(2, 4), bias=st.booleans(), initial=st.booleans(),
    activation=st.sampled_from([None, "silu", "swish"]), seed=st.integers(0, 9),
)  # fmt: skip
def test_equals_conv1d_of_torch(length, width, bias, initial, activation, seed):
    t = conv_inputs(length=length, width=width, bias=bias, seed=seed)
    t["initial_states"] = t["initial_states"] if initial else None
    out, final = causal_conv1d_fn(**t, return_final_states=True, activation=activation)
    before = t["x"].new_zeros(2, 3, width - 1) if t["initial_states"] is None else t["initial_states"]
    padded = torch.cat([before, t["x"]], dim=2)
    want = F.conv1d(padded, t["weight"].unsqueeze(1), t["bias"], groups=3) if length else t["x"]
    assert_close(out, F.silu(want) if activation else want, 1e-12)
    assert_close(final, padded[:, :, length:], 0.0)


def test_gradcheck():
    t = conv_inputs(length=5)
    seq_idx = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 2, 2, 0]])

    def conv(x, weight, bias, initial_states):
        return causal_conv1d_fn(x, weight, bias, seq_idx, initial_states, return_final_states=True, activation="silu")

    assert torch.autograd.gradcheck(conv, tuple(t.values()))


@pytest.mark.parametrize("width", [2, 3, 4])
def test_pieces_of_seq_idx_equal_pieces_alone(width):
    t = conv_inputs(batch=1, width=width)
    seq_idx = torch.tensor([[7, 7, 0, 7, 7, 7, 7, 2, 2, 2, 2]])
    out, final = causal_conv1d_fn(**t, seq_idx=seq_idx, return_final_states=True)
    pieces = []
    for a, b in ((0, 2), (2, 3), (3, 7), (7, 11)):
        initial = t["initial_states"] if a == 0 else None
        rows = t["x"][..., a:b]
        alone, last = causal_conv1d_fn(rows, t["weight"], t["bias"], None, initial, return_final_states=True)
        pieces.append(alone)
    assert_close(out, torch.cat(pieces, dim=2), 1e-14)
    assert_close(final, last, 0.0)


@pytest.mark.parametrize("length", [1, 2, 3, 9])
@pytest.mark.parametrize("window", [3, 4, 6])
def test_steps_equal_the_pass_and_leave_its_window(length, window):
    t = conv_inputs(length=length)
    start = F.pad(t["initial_states"].detach(), (window - 3, 0))
    stepped, whole = start.clone(), start.clone()
    rows = [causal_conv1d_update(x, stepped, t["weight"], t["bias"], "silu") for x in t["x"].unbind(2)]
    want = causal_conv1d_fn(**t, activation="silu")
    assert_close(torch.stack(rows, dim=2), want, 1e-14)
    assert_close(causal_conv1d_update(t["x"], whole, t["weight"], t["bias"], "silu"), want, 1e-14)
    assert_close(stepped, causal_conv1d_window(t["x"], window, None, t["initial_states"]), 0.0)
    assert_close(whole, stepped, 0.0)


def test_window_after_a_boundary_holds_only_the_last_piece():
    x = torch.arange(1.0, 7.0).view(1, 1, 6)
    window = causal_conv1d_window(x, 4, torch.tensor([[0, 0, 0, 0, 1, 1]]), torch.full((1, 1, 3), 9.0))
    assert window.tolist() == [[[0.0, 0.0, 5.0, 6.0]]]
    window = causal_conv1d_window(x[..., :2], 4, torch.tensor([[3, 3]]), torch.full((1, 1, 3), 9.0))
    assert window.tolist() == [[[9.0, 9.0, 1.0, 2.0]]]


def test_varlen_states_equal_windows_of_each_sequence():
    x = torch.randn(9, 2, dtype=torch.float64)
    starts = [0, 5, 5, 7, 9]
    states = causal_conv1d_varlen_states(x, torch.tensor(starts), 4)
    for i, (a, b) in enumerate(itertools.pairwise(starts)):
        assert_close(states[i], causal_conv1d_window(x[a:b].T.unsqueeze(0), 4)[0], 0.0)


def test_low_precision_and_autocast():
    t = conv_inputs(length=33, dtype=torch.bfloat16)
    want = causal_conv1d_ref(**{k: v.double() for k, v in t.items()}, activation="silu")
    with torch.autocast("cpu", torch.bfloat16):
        out = causal_conv1d_fn(**t, activation="silu")
    assert out.dtype == torch.bfloat16
    assert_close(out, want, 6e-3)


def test_no_host_sync():
    t = conv_inputs()
    with NoHostSync():
        out, final = causal_conv1d_fn(**t, seq_idx=torch.zeros(2, 11, dtype=torch.int32), return_final_states=True)
        (out.sum() + final.sum()).backward()
        causal_conv1d_update(t["x"][..., 0].detach(), torch.zeros(2, 3, 4), t["weight"])
        causal_conv1d_varlen_states(t["x"][0].T, torch.tensor([0, 4, 11]), 3)


@pytest.mark.parametrize("change, error, message", [
    ({"x": torch.zeros(2, 3)}, ValueError, r"x has shape \(2, 3\), expected \(B, D, L\)"),
    ({"weight": torch.zeros(4, 4)}, ValueError, r"weight has shape \(4, 4\), expected \(D, W\) = \(3, any\)"),
    ({"bias": torch.zeros(2)}, ValueError, r"bias has shape \(2,\), expected \(D\) = \(3\)"),
    ({"initial_states": torch.zeros(2, 3, 4)}, ValueError, r"initial_states .*expected \(B, D, W-1\) = \(2, 3, 3\)"),
    ({"seq_idx": torch.zeros(2, 10, dtype=torch.int64)}, ValueError, r"seq_idx has shape \(2, 10\)"),
    ({"seq_idx": torch.zeros(2, 11)}, TypeError, "seq_idx has dtype"),
    ({"activation": "relu"}, ValueError, "activation is 'relu', expected one of None, 'silu', 'swish'"),
])  # fmt: skip
def test_wrong_arguments_are_refused_by_name(change, error, message):
    with pytest.raises(error, match=message):
        causal_conv1d_fn(**{**conv_inputs(), **change})
    with pytest.raises(error, match=message):
        causal_conv1d_ref(**{**conv_inputs(), **change})


def test_short_window_is_refused():
    with pytest.raises(ValueError, match=r"conv_state has shape \(2, 3, 2\), expected S >= W-1 = 3"):
        causal_conv1d_update(torch.zeros(2, 3), torch.zeros(2, 3, 2), torch.zeros(3, 4))

"""The reference of the selective scan against loops over scalars, its properties, and its refusals."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_ssm.ops.selective_scan_interface import (
    mamba_inner_fn,
    mamba_inner_ref,
    selective_scan_fn,
    selective_scan_ref,
)
from mamba_ssm.ops.tiers import use_tier
from mamba_ssm.testing import (
    FORWARD_TOLERANCE,
    GRADIENT_TOLERANCE,
    NoHostSync,
    assert_close,
    compare,
    selective_scan_inputs,
)

OPTIONAL = ("D", "z", "delta_bias", "initial_state", "seq_idx")
LAYOUTS = [
    {"complex_A": c, "constant_B": b, "constant_C": k, "groups": g}
    for c, b, k, g in itertools.product((False, True), (False, True), (False, True), (None, 2))
]


@pytest.fixture(autouse=True)
def reference_tier():
    with use_tier("reference"):
        yield


def scan_by_scalars(u, delta, A, B, C, D=None, z=None, delta_bias=None, initial_state=None, seq_idx=None):
    """out (B, D, L) and last state (B, D, N), one number after the other."""
    (batch, channels, length), size = u.shape, A.shape[1]
    out, last = torch.zeros_like(u), torch.zeros(batch, channels, size, dtype=A.dtype)

    def entry(weight, b, d, n, t):
        if weight.dim() == 2:
            return weight[d, n].item()
        row = weight[b, n] if weight.dim() == 3 else weight[b, d // (channels // weight.shape[1]), n]
        return complex(row[2 * t], row[2 * t + 1]) if A.is_complex() else row[t].item()

    for b, d in itertools.product(range(batch), range(channels)):
        h = [0.0] * size if initial_state is None else [v.item() for v in initial_state[b, d]]
        for t in range(length):
            step = delta[b, d, t].item() + (0.0 if delta_bias is None else delta_bias[d].item())
            step = math.log1p(math.exp(step)) if step <= 20.0 else step
            if seq_idx is not None and t > 0 and seq_idx[b, t] != seq_idx[b, t - 1]:
                h = [0.0] * size
            x = u[b, d, t].item()
            decay = [torch.exp(step * A[d, n]).item() for n in range(size)]
            h = [decay[n] * h[n] + step * entry(B, b, d, n, t) * x for n in range(size)]
            y = sum(entry(C, b, d, n, t) * h[n] for n in range(size))
            y = 2.0 * y.real if A.is_complex() else y
            y = y if D is None else y + D[d].item() * x
            gate = 1.0 if z is None else z[b, d, t].item() / (1.0 + math.exp(-z[b, d, t].item()))
            out[b, d, t] = y * gate
        last[b, d] = torch.tensor(h, dtype=A.dtype)
    return out, last


@torch.no_grad()
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(map(str, layout.values())))
def test_equals_a_loop_over_scalars(layout):
    inputs = selective_scan_inputs(length=6, optional=OPTIONAL, dtype=torch.float64, **layout)
    out, last = selective_scan_fn(**inputs, delta_softplus=True, return_last_state=True)
    want, want_last = scan_by_scalars(**inputs)
    assert_close(out, want, 1e-12)
    assert_close(last, want_last, 1e-12)


@pytest.mark.parametrize("layout", LAYOUTS[::3], ids=lambda layout: "-".join(map(str, layout.values())))
def test_gradcheck(layout):
    inputs = selective_scan_inputs(1, 2, 5, 2, optional=OPTIONAL, dtype=torch.float64, **layout)

    def scan(*tensors):
        named = dict(zip(inputs, tensors, strict=True))
        return selective_scan_fn(**named, delta_softplus=True, return_last_state=True)

    assert torch.autograd.gradcheck(scan, tuple(inputs.values()))


@settings(max_examples=25, deadline=None)
@given(
    length=st.integers(0, 20), split=st.integers(0, 20), softplus=st.booleans(), complex_A=st.booleans(),
    optional=st.sets(st.sampled_from(("D", "z", "delta_bias", "initial_state"))), seed=st.integers(0, 99),
)  # fmt: skip
def test_splitting_and_carrying_the_state_changes_nothing(length, split, softplus, complex_A, optional, seed):
    split = min(split, length)
    inputs = selective_scan_inputs(
        length=length, complex_A=complex_A, constant_B=True, optional=optional, dtype=torch.float64, seed=seed
    )
    options = {"delta_softplus": softplus, "return_last_state": True}
    with use_tier("reference"):
        out, last = selective_scan_fn(**inputs, **options)
        pairs = 2 if complex_A else 1
        rows = {"u": 1, "delta": 1, "z": 1, "C": pairs}
        first = {k: v[..., : rows[k] * split] if k in rows else v for k, v in inputs.items()}
        second = {k: v[..., rows[k] * split :] if k in rows else v for k, v in inputs.items()}
        out1, carried = selective_scan_fn(**first, **options)
        out2, end = selective_scan_fn(**{**second, "initial_state": carried}, **options)
    assert_close(torch.cat([out1, out2], dim=-1), out, 1e-12)
    assert_close(end, last, 1e-12)


def test_pieces_of_seq_idx_equal_pieces_alone():
    inputs = selective_scan_inputs(batch=1, length=12, dtype=torch.float64)
    seq_idx = torch.tensor([[4] * 5 + [0] * 1 + [4] * 6])
    out, last = selective_scan_fn(**inputs, seq_idx=seq_idx, return_last_state=True)
    pieces, state = [], None
    for i, (a, b) in enumerate(((0, 5), (5, 6), (6, 12))):
        piece = {k: v[..., a:b] if k in ("u", "delta", "z", "B", "C") else v for k, v in inputs.items()}
        piece["initial_state"] = inputs["initial_state"] if i == 0 else None
        alone, state = selective_scan_fn(**piece, return_last_state=True)
        pieces.append(alone)
    assert_close(torch.cat(pieces, dim=-1), out, 1e-12)
    assert_close(state, last, 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_inputs_keep_float32_states(dtype):
    inputs = selective_scan_inputs(length=65, optional=OPTIONAL, dtype=dtype)
    out, last = selective_scan_fn(**inputs, delta_softplus=True, return_last_state=True)
    assert (out.dtype, last.dtype) == (dtype, torch.float32)
    bounds = FORWARD_TOLERANCE[dtype], GRADIENT_TOLERANCE[dtype]
    compare(selective_scan_fn, selective_scan_ref, inputs, *bounds, delta_softplus=True)


@pytest.mark.parametrize("value", [1e30, 60.0, 1e-30, 0.0])
def test_extreme_steps_give_finite_values_and_gradients(value):
    inputs = selective_scan_inputs(length=9, optional=("D", "z"))
    inputs["delta"] = torch.full_like(inputs["delta"], value, requires_grad=True)
    inputs["u"] = (inputs["u"].detach() * 1e-3).requires_grad_()
    out = selective_scan_fn(**inputs)
    grads = torch.autograd.grad(out.sum(), list(inputs.values()))
    assert all(torch.isfinite(t).all() for t in (out, *grads))


def test_strides_do_not_matter():
    inputs = selective_scan_inputs(dtype=torch.float64)
    want = selective_scan_fn(**inputs)
    strided = {k: v.transpose(-1, -2).contiguous().transpose(-1, -2) if v.dim() > 1 else v for k, v in inputs.items()}
    assert_close(selective_scan_fn(**strided), want, 1e-15)
    expanded = {**inputs, "u": inputs["u"][:1].expand(2, -1, -1)}
    assert_close(selective_scan_fn(**expanded), selective_scan_fn(**{**expanded, "u": expanded["u"].clone()}), 0.0)


def test_no_host_sync():
    inputs = selective_scan_inputs(optional=OPTIONAL)
    with NoHostSync():
        selective_scan_fn(**inputs, delta_softplus=True, return_last_state=True)[0].sum().backward()


def test_compiles_without_graph_breaks():
    inputs = selective_scan_inputs(optional=OPTIONAL, dtype=torch.float64)
    compiled = torch.compile(selective_scan_fn, fullgraph=True, backend="eager")
    assert_close(compiled(**inputs), selective_scan_fn(**inputs), 1e-12)


@pytest.mark.parametrize("name, shape, message", [
    ("u", (2, 4), r"u has shape \(2, 4\), expected \(B, D, L\)"),
    ("delta", (2, 4, 16), r"delta has shape \(2, 4, 16\), expected \(B, D, L\) like u = \(2, 4, 17\)"),
    ("A", (5, 3), r"A has shape \(5, 3\), expected \(D, N\) = \(4, any\)"),
    ("B", (2, 3, 16), r"B has shape \(2, 3, 16\), expected .*\(2, 3, 17\)"),
    ("C", (2, 3, 3, 17), r"C has 3 groups, expected a divisor of D = 4"),
    ("D", (3,), r"D has shape \(3,\), expected \(D\) = \(4\)"),
    ("z", (1, 4, 17), r"z has shape \(1, 4, 17\), expected"),
    ("delta_bias", (1,), r"delta_bias has shape \(1,\)"),
    ("initial_state", (2, 4, 4), r"initial_state has shape \(2, 4, 4\), expected \(B, D, N\) = \(2, 4, 3\)"),
])  # fmt: skip
def test_wrong_shapes_are_refused_by_name(name, shape, message):
    inputs = selective_scan_inputs()
    inputs[name] = torch.zeros(shape)
    for scan in (selective_scan_fn, selective_scan_ref):
        with pytest.raises(ValueError, match=message):
            scan(**inputs)


def test_wrong_dtypes_and_devices_are_refused_by_name():
    inputs = selective_scan_inputs()
    with pytest.raises(TypeError, match=r"u has dtype torch\.int64"):
        selective_scan_fn(**{**inputs, "u": inputs["u"].long()})
    with pytest.raises(TypeError, match=r"seq_idx has dtype torch\.float32, expected an integer"):
        selective_scan_fn(**inputs, seq_idx=torch.zeros(2, 17))
    with pytest.raises(TypeError, match=r"B has dtype torch\.complex64"):
        selective_scan_fn(**{**inputs, "B": torch.zeros(4, 3, dtype=torch.complex64)})
    with pytest.raises(ValueError, match="delta is on meta, expected cpu"):
        selective_scan_fn(**{**inputs, "delta": inputs["delta"].to("meta")})


def inner_inputs(complex_A=False, dtype=torch.float64):
    scan = selective_scan_inputs(length=7, complex_A=complex_A, optional=("D", "delta_bias"), dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    pairs = 2 if complex_A else 1

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=dtype).requires_grad_()

    return {
        "xz": draw(2, 8, 7), "conv1d_weight": draw(4, 1, 4), "conv1d_bias": draw(4),
        "x_proj_weight": draw(2 + 2 * 3 * pairs, 4), "delta_proj_weight": draw(4, 2), "out_proj_weight": draw(5, 4),
        "out_proj_bias": draw(5), "A": scan["A"], "D": scan["D"], "delta_bias": scan["delta_bias"],
        "B_proj_bias": draw(3 * pairs), "C_proj_bias": draw(3 * pairs), "dt_rms_weight": draw(2),
    }  # fmt: skip


@pytest.mark.parametrize("complex_A", [False, True])
def test_mamba_inner_equals_its_parts(complex_A):
    """Written out from torch's own convolution and projections."""
    t = inner_inputs(complex_A)
    x, z = t["xz"].chunk(2, dim=1)
    x = F.silu(F.conv1d(x, t["conv1d_weight"], t["conv1d_bias"], padding=3, groups=4)[..., :7])
    rows = torch.einsum("bdl,kd->blk", x, t["x_proj_weight"])
    columns = 6 if complex_A else 3
    dt, B, C = rows[..., :2], rows[..., 2 : 2 + columns] + t["B_proj_bias"], rows[..., 2 + columns :] + t["C_proj_bias"]
    dt = dt / (dt.square().mean(-1, keepdim=True) + 1e-6).sqrt() * t["dt_rms_weight"]
    if complex_A:
        B, C = (w.reshape(2, 7, 3, 2).permute(0, 2, 1, 3).reshape(2, 3, 14) for w in (B, C))
    else:
        B, C = B.transpose(1, 2), C.transpose(1, 2)
    delta = torch.einsum("blr,dr->bdl", dt, t["delta_proj_weight"])
    y = selective_scan_ref(x, delta, t["A"], B, C, t["D"], z, t["delta_bias"], delta_softplus=True)
    want = torch.einsum("bdl,md->blm", y, t["out_proj_weight"]) + t["out_proj_bias"]
    for inner in (mamba_inner_fn, mamba_inner_ref):
        assert_close(inner(**t), want, 1e-12)


def test_mamba_inner_gradcheck_and_refusals():
    t = inner_inputs()
    inner = lambda *tensors: mamba_inner_fn(**dict(zip(t, tensors, strict=True)))  # noqa: E731
    assert torch.autograd.gradcheck(inner, tuple(t.values()), atol=1e-4)
    with pytest.raises(ValueError, match=r"xz has shape \(2, 7, 7\), expected \(B, 2D, L\)"):
        mamba_inner_fn(**{**t, "xz": t["xz"][:, :7]})
    with pytest.raises(ValueError, match="checkpoint_lvl is 2, expected one of 0, 1"):
        mamba_inner_fn(**t, checkpoint_lvl=2)

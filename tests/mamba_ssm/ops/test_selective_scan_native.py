"""The native selective scan, C++ and CUDA, against the reference in float64, and how it behaves as a torch operator."""

import itertools
import os
import subprocess
import sys

import pytest
import torch

from mamba_ssm.ops import _native, selective_scan_interface
from mamba_ssm.ops.selective_scan_interface import (
    mamba_inner_fn,
    mamba_inner_ref,
    selective_scan_fn,
    selective_scan_ref,
)
from mamba_ssm.ops.tiers import explain, use_tier
from mamba_ssm.ops.triton.selective_state_update import selective_state_update, selective_state_update_ref
from mamba_ssm.testing import (
    FORWARD_TOLERANCE,
    GRADIENT_TOLERANCE,
    assert_close,
    compare,
    outputs_and_gradients,
    relative_error,
    selective_scan_inputs,
    to_float64,
)

OPTIONAL = ("D", "z", "delta_bias", "initial_state", "seq_idx")
LENGTHS = (1, 2, 3, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000, 2048, 4099)
STATES = (1, 4, 16, 64, 128, 256)
LAYOUTS = [
    {"complex_A": c, "constant_B": b, "constant_C": k, "groups": g}
    for c, b, k, g in itertools.product((False, True), (False, True), (False, True), (None, 2))
]
SCAN = {"delta_softplus": True, "return_last_state": True}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """A device with a native tier; skips with the reason where there is none."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if (reason := _native.why_not(request.param)) is not None:
        pytest.skip(reason)
    return request.param


@pytest.fixture
def cuda(device):
    """The tests that ask for this one run on a GPU alone."""
    if device != "cuda":
        pytest.skip("for a GPU")
    return device


def check(inputs, dtype, **options):
    forward, backward = FORWARD_TOLERANCE[dtype], GRADIENT_TOLERANCE[dtype]
    compare(selective_scan_fn, selective_scan_ref, inputs, forward, backward, **options)


def test_the_native_tier_is_the_one_that_runs(device):
    assert explain("selective_scan", device).tier == device


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 64, 65, 257])
def test_lengths_around_the_chunk(device, length):
    inputs = selective_scan_inputs(2, 37, length, 16, optional=OPTIONAL, device=device)
    check(inputs, torch.float32, **SCAN)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(map(str, layout.values())))
def test_layouts(device, dtype, layout):
    inputs = selective_scan_inputs(2, 20, 67, 5, optional=OPTIONAL, dtype=dtype, device=device, **layout)
    check(inputs, dtype, **SCAN)


@pytest.mark.parametrize("optional", [c for n in range(6) for c in itertools.combinations(OPTIONAL, n)], ids="-".join)
def test_every_subset_of_optional_arguments(device, optional):
    inputs = selective_scan_inputs(1, 18, 34, 4, optional=optional, device=device)
    check(inputs, torch.float32, delta_softplus=len(optional) % 2 == 0, return_last_state=True)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("complex_A", [False, True])
def test_state_sizes(device, state, complex_A):
    inputs = selective_scan_inputs(1, 5, 40, state, complex_A=complex_A, optional=OPTIONAL, device=device)
    check(inputs, torch.float32, **SCAN)


@pytest.mark.parametrize("groups", [1, 2, 5, 40])
def test_groups_that_split_a_vector_of_channels(device, groups):
    inputs = selective_scan_inputs(2, 40, 35, 3, groups=groups, optional=OPTIONAL, device=device)
    check(inputs, torch.float32, **SCAN)


def test_b_and_c_in_different_groups(device):
    inputs = selective_scan_inputs(2, 24, 35, 3, groups=2, optional=OPTIONAL, device=device)
    inputs["C"] = torch.randn(2, 3, 3, 35, device=device, requires_grad=True)
    check(inputs, torch.float32, **SCAN)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS[::5], ids=lambda layout: "-".join(map(str, layout.values())))
def test_low_precision_is_as_good_as_the_reference_in_it(device, dtype, layout):
    inputs = selective_scan_inputs(2, 40, 130, 16, optional=OPTIONAL, dtype=dtype, device=device, **layout)
    check(inputs, dtype, **SCAN)
    wide = {name: to_float64(value) for name, value in inputs.items()}
    best = outputs_and_gradients(selective_scan_ref, wide, **SCAN)
    native = outputs_and_gradients(selective_scan_fn, inputs, **SCAN)
    low = outputs_and_gradients(selective_scan_ref, inputs, **SCAN)
    for of_native, of_low, of_best in zip(native, low, best, strict=True):
        for name, want in of_best.items():
            allowed = max(1.5 * relative_error(of_low[name], want), 1e-5)
            assert relative_error(of_native[name], want) <= allowed, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("skip", [1.0, 1.0 / 3.0])
def test_every_number_of_sixteen_bits_is_read_and_rounded_as_torch_does(device, dtype, skip):
    """With B and C zero the output is D u: subnormal numbers and ties included."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    numbers = numbers[numbers.isfinite()]
    u = numbers[: numbers.numel() // 128 * 128].view(1, -1, 128).to(device)
    zeros, channels = torch.zeros(1, 4, 128, dtype=dtype, device=device), u.shape[1]
    D = torch.full((channels,), skip, device=device)
    out = selective_scan_fn(u, torch.zeros_like(u), -torch.ones(channels, 4, device=device), zeros, zeros, D)
    assert torch.equal(out, (u.float() * D[:, None]).to(dtype))


@pytest.mark.slow
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_whole_grid(device, dtype, length, state):
    batch = 16 if length <= 65 else 1
    for complex_A, groups in ((False, None), (True, 2)):
        inputs = selective_scan_inputs(
            batch, 10, length, state, groups, complex_A=complex_A, optional=OPTIONAL, dtype=dtype, device=device
        )
        check(inputs, dtype, **SCAN)


@pytest.mark.parametrize("layout", LAYOUTS[::3], ids=lambda layout: "-".join(map(str, layout.values())))
def test_gradcheck(device, layout):
    if device == "cuda":
        pytest.skip("float64 runs on the reference tier on a GPU")
    inputs = selective_scan_inputs(1, 4, 35, 2, optional=OPTIONAL, dtype=torch.float64, **layout)

    def scan(*tensors):
        return selective_scan_fn(**dict(zip(inputs, tensors, strict=True)), **SCAN)

    assert torch.autograd.gradcheck(scan, tuple(inputs.values()), fast_mode=True)


@pytest.mark.parametrize("layout", LAYOUTS[::5], ids=lambda layout: "-".join(map(str, layout.values())))
def test_opcheck(device, layout):
    inputs = selective_scan_inputs(2, 6, 33, 4, optional=OPTIONAL, device=device, **layout)
    order = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias")
    arguments = (*(inputs[n] for n in order), True, inputs["seq_idx"], inputs["initial_state"])
    operators = torch.ops.mamba_ssm_native
    torch.library.opcheck(operators.selective_scan.default, arguments)
    torch.library.opcheck(operators.selective_scan_forward.default, (*arguments, True))
    detached = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments]
    out, last_state, states = operators.selective_scan_forward(*detached, True)
    backward = (torch.randn_like(out), torch.randn_like(last_state), *detached, states)
    torch.library.opcheck(operators.selective_scan_backward.default, backward)


def test_opcheck_of_the_step():
    if (reason := _native.why_not("cpu")) is not None:
        pytest.skip(reason)
    arguments = (
        torch.randn(2, 6, 4), torch.randn(2, 6), torch.randn(2, 6), -torch.rand(6, 4), torch.randn(2, 4),
        torch.randn(2, 1, 4), torch.randn(6), torch.randn(2, 6), torch.randn(6), True, None,
    )  # fmt: skip
    torch.library.opcheck(torch.ops.mamba_ssm_native.selective_state_update.default, arguments)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_to_one_graph(device, dynamic):
    inputs = selective_scan_inputs(2, 6, 40, 4, optional=OPTIONAL, device=device)
    compiled = torch.compile(selective_scan_fn, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    plain, compiled = (outputs_and_gradients(f, inputs, **SCAN) for f in (selective_scan_fn, compiled))
    for want, have in zip(plain, compiled, strict=True):
        assert all(torch.equal(want[name], have[name]) for name in want)


def test_the_same_bits_on_every_run(device):
    inputs = selective_scan_inputs(3, 70, 130, 16, optional=OPTIONAL, device=device)
    first = outputs_and_gradients(selective_scan_fn, inputs, **SCAN)
    for _ in range(3):
        again = outputs_and_gradients(selective_scan_fn, inputs, **SCAN)
        for one, other in zip(first, again, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_number_of_threads_changes_no_bit():
    if (reason := _native.why_not("cpu")) is not None:
        pytest.skip(reason)
    inputs, threads, results = selective_scan_inputs(3, 150, 65, 4, optional=OPTIONAL), torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append(outputs_and_gradients(selective_scan_fn, inputs, **SCAN))
    finally:
        torch.set_num_threads(threads)
    for one, other in zip(*results, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_pieces_of_seq_idx_equal_pieces_alone(device):
    """Boundaries at, before and after the ends of chunks."""
    cuts = (0, 1, 31, 32, 33, 64, 96, 97, 100)
    inputs = selective_scan_inputs(1, 33, cuts[-1], 4, device=device)
    seq_idx = torch.zeros(1, cuts[-1], dtype=torch.int64, device=device)
    for i, (start, end) in enumerate(itertools.pairwise(cuts)):
        seq_idx[:, start:end] = i % 2
    out, last = selective_scan_fn(**inputs, seq_idx=seq_idx, **SCAN)
    pieces = []
    for start, end in itertools.pairwise(cuts):
        piece = {k: v[..., start:end] if k in ("u", "delta", "z", "B", "C") else v for k, v in inputs.items()}
        piece["initial_state"] = inputs["initial_state"] if start == 0 else None
        alone, state = selective_scan_fn(**piece, **SCAN)
        pieces.append(alone)
    assert_close(torch.cat(pieces, dim=-1), out, 1e-6)
    assert_close(state, last, 1e-6)


def test_strided_and_expanded_inputs(device):
    inputs = selective_scan_inputs(2, 20, 40, 4, device=device)
    views = {
        "u": inputs["u"].detach().transpose(1, 2).contiguous().transpose(1, 2),
        "delta": inputs["delta"].detach()[:1, :1].expand(2, 20, 40),
        "z": inputs["z"].detach().repeat(1, 2, 1)[:, ::2],
        "B": inputs["B"].detach()[:1].expand(2, 4, 40),
        "C": inputs["C"].detach().repeat_interleave(2, dim=-1)[..., ::2],
        "A": inputs["A"].detach()[:, :1].expand(20, 4),
        "D": inputs["D"].detach().repeat_interleave(2)[::2],
        "delta_bias": inputs["delta_bias"].detach()[:1].expand(20),
        "initial_state": inputs["initial_state"].detach().transpose(1, 2).contiguous().transpose(1, 2),
    }
    check(inputs | {name: view.requires_grad_() for name, view in views.items()}, torch.float32, **SCAN)


def test_conjugated_views(device):
    """`conj` of a complex tensor is a flag on the same memory."""
    inputs = selective_scan_inputs(
        2, 20, 40, 4, constant_B=True, constant_C=True, complex_A=True, optional=OPTIONAL, device=device
    )
    for name in ("A", "B", "C", "initial_state"):
        inputs[name] = inputs[name].detach().conj().requires_grad_()
        assert inputs[name].is_conj()
    check(inputs, torch.float32, **SCAN)


@pytest.mark.parametrize("shape", [(0, 4, 9, 3), (2, 0, 9, 3), (2, 4, 0, 3), (2, 4, 9, 0)], ids=str)
def test_empty_inputs(device, shape):
    inputs = selective_scan_inputs(*shape, device=device)
    check(inputs, torch.float32, **SCAN)


@pytest.mark.parametrize("value", [1e30, 60.0, 20.0, 1e-6, 0.0, -10.0, -100.0])
def test_extreme_steps(device, value):
    inputs = selective_scan_inputs(1, 17, 9, 4, optional=("D", "z"), device=device)
    inputs["delta"] = torch.full_like(inputs["delta"], value, requires_grad=True)
    inputs["u"] = (inputs["u"].detach() * 1e-3).requires_grad_()
    for options in ({}, {"delta_softplus": True}) if value >= 0.0 else ({"delta_softplus": True},):
        outs, grads = outputs_and_gradients(selective_scan_fn, inputs, **options)
        assert all(torch.isfinite(x).all() for x in (*outs.values(), *grads.values()))
        if abs(value) < 100.0:  # beyond it some gradients are smaller than float32 can hold
            check(inputs, torch.float32, **options)


def test_a_decay_that_underflows_forgets_everything(device):
    inputs = selective_scan_inputs(1, 17, 9, 4, optional=("initial_state",), device=device)
    inputs["delta"], inputs["u"] = torch.full_like(inputs["delta"], 5e3), torch.zeros_like(inputs["u"])
    inputs["initial_state"] = torch.full_like(inputs["initial_state"], 1e30)
    out, last = selective_scan_fn(**inputs, **SCAN)
    assert not out.any() and not last.any()


def test_nan_is_passed_on(device):
    inputs = selective_scan_inputs(1, 3, 9, 4, optional=(), device=device)
    inputs["delta"] = inputs["delta"].detach().clone()
    inputs["delta"][0, 1, 4] = float("nan")
    out = selective_scan_fn(**inputs)
    assert out[0, 1, 4:].isnan().all()
    assert torch.isfinite(out[0, [0, 2]]).all() and torch.isfinite(out[0, 1, :4]).all()


def test_mixed_dtypes_are_brought_together(device):
    inputs = selective_scan_inputs(2, 6, 33, 4, dtype=torch.bfloat16, device=device)
    inputs["delta"] = inputs["delta"].detach().float().requires_grad_()
    outs, grads = outputs_and_gradients(selective_scan_fn, inputs, **SCAN)
    assert outs["0"].dtype == torch.bfloat16 and grads["delta"].dtype == torch.float32
    check(inputs, torch.bfloat16, **SCAN)


@pytest.mark.parametrize("name", ["A", "D", "delta_bias", "initial_state"])
def test_a_float64_parameter_makes_states_and_sums_float64(device, name):
    inputs = selective_scan_inputs(2, 6, 33, 4, device=device)
    inputs[name] = inputs[name].detach().double().requires_grad_()
    out, last = selective_scan_fn(**inputs, **SCAN)
    want, want_last = selective_scan_ref(**{key: to_float64(value) for key, value in inputs.items()}, **SCAN)
    assert (out.dtype, last.dtype) == (torch.float32, torch.float64)
    assert_close(out, want, 1e-7)
    assert_close(last, want_last, 1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_changes_nothing(device, dtype):
    inputs = selective_scan_inputs(2, 6, 33, 4, device=device)
    plain = selective_scan_fn(**inputs)
    with torch.autocast(device, dtype):
        assert torch.equal(selective_scan_fn(**inputs), plain)


def test_no_gradient_keeps_no_states(device):
    inputs = selective_scan_inputs(2, 6, 64, 4, optional=(), device=device)
    arguments = [x.detach() for x in inputs.values()]
    for save, chunks in ((False, 0), (True, 2)):
        _, _, states = torch.ops.mamba_ssm_native.selective_scan_forward(
            *arguments, None, None, None, False, None, None, save
        )
        assert states.shape == (2, chunks, 6, 4)


def test_backward_without_states_is_refused(device):
    inputs = selective_scan_inputs(2, 6, 64, 4, optional=(), device=device)
    out, _, _ = torch.ops.mamba_ssm_native.selective_scan_forward(
        *inputs.values(), None, None, None, False, None, None, False
    )
    with pytest.raises(RuntimeError, match="backward needs save_states=True"):
        out.sum().backward()


@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_other_instruction_sets(capability):
    """The kernels that a machine with less would run; they are chosen once a process, so in a process of their own."""
    if (reason := _native.why_not("cpu")) is not None:
        pytest.skip(reason)
    ours = f"{__file__}::test_layouts"
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "--import-mode=importlib", "-p", "no:cacheprovider", ours]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-2000:]


# ---- one step ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("batch", "state", "channels"),
    [(1, 1, 6), (1, 16, 6), (2, 5, 6), (1024, 4, 6), (3, 33, 6), (2, 5, 128), (1, 3, 70)],
)
def test_step(batch, state, channels, dtype):
    if (reason := _native.why_not("cpu")) is not None:
        pytest.skip(reason)
    generator = torch.Generator().manual_seed(0)

    def make(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    h = make(batch, channels, state)
    rest = [make(batch, channels), make(batch, channels), -make(channels, state).abs()]
    rest += [make(batch, 2, state), make(batch, state), make(channels), make(batch, channels), make(channels), True]
    h_native, h_ref = h.clone(), h.clone()
    out = selective_state_update(h_native, *rest)
    want = selective_state_update_ref(h_ref, *rest)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-6
    assert out.dtype == want.dtype
    assert_close(out, want, tolerance)
    assert_close(h_native, h_ref, tolerance)


def test_step_with_heads_and_chosen_rows():
    if (reason := _native.why_not("cpu")) is not None:
        pytest.skip(reason)
    heads, headdim, size = 4, 18, 6
    h = torch.randn(7, heads, headdim, size)
    rest = [
        torch.randn(2, heads, headdim), torch.randn(2, heads, 1).expand(2, heads, headdim),
        -torch.rand(heads)[:, None, None].expand(heads, headdim, size), torch.randn(2, 2, size),
        torch.randn(2, 2, size),
        torch.randn(heads, 1).expand(heads, headdim), None, torch.randn(heads, 1).expand(heads, headdim), True,
    ]  # fmt: skip
    h_native, h_ref = h.clone(), h.clone()
    rows = torch.tensor([5, 2])
    out = selective_state_update(h_native, *rest, state_batch_indices=rows)
    assert_close(out, selective_state_update_ref(h_ref, *rest, state_batch_indices=rows), 1e-6)
    assert_close(h_native, h_ref, 1e-6)
    assert torch.equal(h_native[[0, 1, 3, 4, 6]], h[[0, 1, 3, 4, 6]])
    for row in (7, -1):
        with pytest.raises(IndexError, match=rf"state_batch_indices holds {row}, expected rows of state, 0 to 6"):
            selective_state_update(h_native, *rest, state_batch_indices=torch.tensor([row, 2]))


def test_a_scan_is_its_steps():
    if (reason := _native.why_not("cpu")) is not None:
        pytest.skip(reason)
    inputs = selective_scan_inputs(2, 18, 40, 5)
    with torch.no_grad():
        out, last = selective_scan_fn(**inputs, **SCAN)
        h, rows = inputs["initial_state"].clone(), []
        for t in range(40):
            x, dt, z, B, C = (inputs[n][..., t] for n in ("u", "delta", "z", "B", "C"))
            rows.append(selective_state_update(h, x, dt, inputs["A"], B, C, inputs["D"], z, inputs["delta_bias"], True))
    assert_close(torch.stack(rows, dim=-1), out, 1e-6)
    assert_close(h, last, 1e-6)


def test_a_step_that_needs_a_gradient_has_one():
    """Under autograd the step falls back to the reference instead of losing gradients in silence."""
    x = torch.randn(2, 6, requires_grad=True)
    rest = (torch.randn(2, 6), -torch.rand(6, 4), torch.randn(2, 4), torch.randn(2, 4))
    out = selective_state_update(torch.zeros(2, 6, 4), x, *rest)
    assert out.requires_grad


# ---- Mamba's inner block ----


def inner_inputs(complex_A=False, constant_B=False, norms=True, device="cpu", dtype=torch.float32):
    channels, rank, state, width, model = 6, 2, 3, 4, 5
    columns = state * (2 if complex_A else 1)
    generator = torch.Generator().manual_seed(0)

    def make(*shape, is_complex=False):
        drawn = torch.complex128 if is_complex else torch.float64
        values = torch.randn(shape, generator=generator, dtype=drawn) * 0.5
        return values.to(device, dtype.to_complex() if is_complex else dtype).requires_grad_()

    A = make(channels, state, is_complex=complex_A).detach()
    A = torch.complex(-A.real.abs(), A.imag) if complex_A else -A.abs()
    inputs = {
        "xz": make(2, 2 * channels, 37), "conv1d_weight": make(channels, 1, width), "conv1d_bias": make(channels),
        "x_proj_weight": make(rank + columns * (1 if constant_B else 2), channels),
        "delta_proj_weight": make(channels, rank),
        "out_proj_weight": make(model, channels), "out_proj_bias": make(model),
        "A": A.requires_grad_(), "B": make(channels, state, is_complex=complex_A) if constant_B else None,
        "D": make(channels), "delta_bias": make(channels), "C_proj_bias": make(columns),
    }  # fmt: skip
    if norms:
        inputs |= {"dt_rms_weight": make(rank), "c_rms_weight": make(columns)}
        inputs |= {} if constant_B else {"b_rms_weight": make(columns)}
    return inputs


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize(("complex_A", "constant_B", "norms"), [(0, 0, 1), (0, 1, 0), (1, 0, 1), (1, 1, 0)])
def test_inner_block_equals_its_parts(device, level, complex_A, constant_B, norms):
    inputs = inner_inputs(bool(complex_A), bool(constant_B), bool(norms), device)
    seq_idx = (torch.arange(37, device=device) // 9).expand(2, 37)
    with use_tier("reference"):
        wide = {name: to_float64(value) for name, value in inputs.items()}
        want = outputs_and_gradients(mamba_inner_ref, wide, seq_idx=seq_idx)
    have = outputs_and_gradients(mamba_inner_fn, inputs, checkpoint_lvl=level, seq_idx=seq_idx)
    for tolerance, of_have, of_want in zip((1e-5, 2e-5), have, want, strict=True):
        for name, tensor in of_want.items():
            assert_close(of_have[name], tensor, tolerance, name)


def test_inner_block_saves_only_its_inputs(device):
    inputs = inner_inputs(device=device)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        mamba_inner_fn(**inputs, checkpoint_lvl=1)
    given = {tensor.data_ptr() for tensor in inputs.values() if tensor is not None}
    assert kept and all(tensor.data_ptr() in given for tensor in kept)


@pytest.mark.parametrize("level", [0, 1])
def test_inner_block_under_autocast_equals_its_parts(device, level):
    inputs = inner_inputs(device=device)
    with torch.autocast(device, torch.bfloat16):
        out = mamba_inner_fn(**inputs, checkpoint_lvl=level)
        parts = mamba_inner_ref(**inputs)
    assert out.dtype == parts.dtype == torch.bfloat16
    assert torch.equal(out, parts)
    cotangent = torch.randn_like(out)
    needing = [tensor for tensor in inputs.values() if tensor is not None]
    for have, want in zip(*(torch.autograd.grad(y, needing, cotangent) for y in (out, parts)), strict=True):
        assert have.dtype == want.dtype
        assert_close(have, want, 6e-3)


def test_inner_block_with_some_inputs_fixed(device):
    inputs = inner_inputs(device=device)
    fixed = {n: x if n in ("xz", "A") or x is None else x.detach() for n, x in inputs.items()}
    plain, some = (outputs_and_gradients(mamba_inner_fn, x) for x in (inputs, fixed))
    assert set(some[1]) == {"xz", "A"}
    for name, grad in some[1].items():
        assert_close(grad, plain[1][name], 1e-6, name)


# ---- on a GPU alone ----


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_drama_shape(cuda, dtype):
    """The shape the kernels are tuned for, with two channels for each lane."""
    inputs = selective_scan_inputs(16, 1024, 128, 16, optional=("D", "z", "delta_bias"), dtype=dtype, device=cuda)
    check(inputs, dtype, delta_softplus=True)


ROWS_OF_WHOLE_VECTORS = [(5, 8, None), (8, 40, 2), (16, 72, 2), (13, 264, 2), (16, 256, None)]  # N, L, G


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [3, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("state", "length", "groups"), ROWS_OF_WHOLE_VECTORS)
def test_rows_of_whole_vectors(cuda, batch, dtype, state, length, groups):
    """Rows of a multiple of 16 bytes have kernels of their own, which fetch a tile ahead; large batches and long rows
    have theirs."""
    inputs = selective_scan_inputs(batch, 70, length, state, groups, optional=OPTIONAL, dtype=dtype, device=cuda)
    check(inputs, dtype, **SCAN)


@pytest.mark.gpu
def test_rows_that_start_between_vectors(cuda):
    inputs = selective_scan_inputs(2, 20, 65, 16, optional=OPTIONAL, device=cuda)
    cut = {name: inputs[name].detach()[..., 1:].requires_grad_() for name in ("u", "delta", "z", "B", "C")}
    inputs |= cut | {"seq_idx": inputs["seq_idx"][:, 1:]}
    check(inputs, torch.float32, **SCAN)
    whole = selective_scan_inputs(2, 20, 64, 16, optional=OPTIONAL, device=cuda)
    needing = [value for name, value in whole.items() if name != "seq_idx"]
    cotangent = torch.randn(2, 20, 65, device=cuda)[..., 1:]
    have, want = (
        torch.autograd.grad(selective_scan_fn(**whole, delta_softplus=True), needing, dout)
        for dout in (cotangent, cotangent.contiguous())
    )
    assert all(map(torch.equal, have, want))


@pytest.mark.gpu
def test_captured_in_a_graph_equals_launched(cuda):
    inputs = selective_scan_inputs(4, 64, 128, 16, device=cuda)
    needing = list(inputs.values())

    def run():
        out, last = selective_scan_fn(**inputs, **SCAN)
        return (out, last, *torch.autograd.grad(out.square().sum() + last.sum(), needing))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    with torch.no_grad():
        inputs["u"].copy_(torch.randn_like(inputs["u"]))
    graph.replay()
    for have, want in zip(captured, run(), strict=True):
        assert torch.equal(have, want)


@pytest.mark.gpu
def test_deterministic_algorithms_are_allowed(cuda):
    inputs = selective_scan_inputs(2, 64, 65, 16, device=cuda)
    torch.use_deterministic_algorithms(True)
    try:
        outputs_and_gradients(selective_scan_fn, inputs, **SCAN)
    finally:
        torch.use_deterministic_algorithms(False)


def test_what_a_gpu_leaves_to_the_reference_is_said(caplog):
    wide = selective_scan_inputs(1, 2, 3, 4, optional=(), dtype=torch.float64)
    large = selective_scan_inputs(1, 2, 3, _native.MAX_CUDA_STATE + 1, optional=())
    for inputs, reason in ((wide, "take no float64"), (large, "states up to N = 256")):
        arguments = (*inputs.values(), None, None, None, True, False, None, None)
        out = selective_scan_interface._selective_scan_on_gpu(*arguments)
        assert torch.equal(out, selective_scan_ref(**inputs, delta_softplus=True))
        assert reason in caplog.text


@pytest.mark.gpu
def test_a_second_device(cuda):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    inputs = selective_scan_inputs(2, 20, 33, 4, optional=OPTIONAL, device="cuda:1")
    check(inputs, torch.float32, **SCAN)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [70_001])
def test_a_length_beyond_65536(cuda, length):
    inputs = selective_scan_inputs(1, 4, length, 16, device=cuda)
    wide = {name: to_float64(value).detach() for name, value in inputs.items()}
    out, last = selective_scan_fn(**inputs, **SCAN)
    with torch.no_grad():
        pieces, state = [], wide["initial_state"]
        for start in range(0, length, 4096):
            of_rows, end = ("u", "delta", "z", "B", "C"), start + 4096
            rows = {k: v[..., start:end] if k in of_rows else v for k, v in wide.items()}
            piece, state = selective_scan_ref(**{**rows, "initial_state": state}, **SCAN)
            pieces.append(piece)
    assert_close(out, torch.cat(pieces, dim=-1), FORWARD_TOLERANCE[torch.float32])
    assert_close(last, state, FORWARD_TOLERANCE[torch.float32])

"""Drama's sequence core and the token model: counts, initial values, and the pass = the steps for the whole stack."""

import pytest
import torch

from mamba_ssm import InferenceParams, MambaWrapperModel
from mamba_ssm.models.mixer_seq_simple import MixerModel, create_block
from mamba_ssm.testing import NoHostSync, assert_close

LENGTHS = [1, 2, 15, 16, 17, 64, 200]
CONFIGS = {
    "Mamba": {"layer": "Mamba", "d_state": 4},
    "Mamba2": {"layer": "Mamba2", "d_state": 4, "headdim": 8, "chunk_size": 32},
}


@pytest.fixture(params=CONFIGS)
def core(request):
    torch.manual_seed(0)
    return MambaWrapperModel(16, 2, 6, 3, ssm_cfg=CONFIGS[request.param], dropout=0.1).double().eval()


def draw(length, batch=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(batch, length, width, generator=generator, dtype=torch.float64) for width in (6, 3))


def run_steps(core, stoch, action, state, resets=None):
    outs = []
    for t in range(stoch.shape[1]):
        outs.append(core.step(stoch[:, t], action[:, t], state, None if resets is None else resets[:, t]))
    return torch.stack(outs, dim=1)


@pytest.mark.parametrize("layer, count", [("Mamba2", 3_737_504), ("Mamba", 3_919_360)])
def test_parameter_counts(layer, count):
    core = MambaWrapperModel(512, 2, stoch_dim=1024, action_dim=6, ssm_cfg={"d_state": 16, "layer": layer})
    assert sum(p.numel() for p in core.parameters()) == count


@torch.no_grad()
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("prefix", [0, 7])
def test_pass_equals_steps(core, length, prefix):
    stoch, action = draw(prefix + length)
    whole = core(stoch, action)
    state = core.init_state(2)
    if prefix:
        assert_close(core(stoch[:, :prefix], action[:, :prefix], state=state), whole[:, :prefix], 1e-10)
    stepped = state.clone()
    out = core(stoch[:, prefix:], action[:, prefix:], state=state)
    assert_close(out, whole[:, prefix:], 1e-10)
    assert_close(run_steps(core, stoch[:, prefix:], action[:, prefix:], stepped), out, 1e-10)
    for left, right in zip(state.tensors(), stepped.tensors(), strict=True):
        assert_close(left, right, 1e-10)


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 2, 17])
@pytest.mark.parametrize("pieces", [False, True])
def test_start_equals_a_pass_over_a_state_of_zeros(core, length, pieces):
    stoch, action = draw(length)
    seq_idx = (torch.arange(length) > 0).int().expand(2, -1) if pieces else None
    state = core.init_state(2)
    want = core(stoch, action, seq_idx, state)
    out, left = core.start(stoch, action, seq_idx)
    assert_close(out, want, 1e-10)
    for ours, theirs in zip(left.tensors(), state.tensors(), strict=True):
        assert_close(ours, theirs, 1e-10)


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"ngroups": 2, "D_has_hdim": True}, {"d_ssm": 16, "rmsnorm": False}])
@pytest.mark.parametrize("pieces", [False, True])
def test_kept_rows_equal_a_state(options, pieces):
    """Sixteen rows behind eight, of which a sequence starts inside."""
    torch.manual_seed(0)
    ssm_cfg = {**CONFIGS["Mamba2"], "d_state": 8, **options}
    core = MambaWrapperModel(16, 2, 6, 3, ssm_cfg=ssm_cfg).double().eval()
    (stoch, action), rows = draw(8), torch.randn(2, 16, 16, dtype=torch.float64)
    seq_idx = torch.tensor([[0, 0, 1, 1, 1, 1, 2, 2], [0] * 8]).int() if pieces else None
    want, state = core.start(stoch, action, seq_idx)
    assert core.can_keep_rows(24) and not core.can_keep_rows(33)
    out, kept = core.start_keeping(stoch, action, seq_idx, 24)
    assert_close(out, want, 1e-10)
    for row in rows.split(1, dim=1):
        assert_close(core.run_blocks(row, state=kept), core.run_blocks(row, state=state), 1e-10)
    with pytest.raises(ValueError, match="the rows were kept for 16 steps"):
        core.run_blocks(row, state=kept)
    with pytest.raises(ValueError, match="u has 16 rows for kept rows, expected one at a time"):
        core.run_blocks(rows, state=kept)
    with pytest.raises(ValueError, match="steps_to_come is given, expected final_states with it"):
        core.run_blocks(rows, steps_to_come=3)


@torch.no_grad()
@pytest.mark.parametrize("d_intermediate", [0, 8])
def test_what_the_first_norm_makes_of_rows_may_be_there_already(d_intermediate):
    torch.manual_seed(0)
    core = MambaWrapperModel(16, 2, 6, 3, d_intermediate, ssm_cfg=CONFIGS["Mamba2"]).double().eval()
    rows = torch.randn(2, 5, 16, dtype=torch.float64)
    core.layers[0].norm.weight.uniform_()
    assert_close(core.run_blocks(rows, normed=core.layers[0].norm(rows)), core.run_blocks(rows), 1e-10)


def test_what_keeps_no_rows():
    assert not MambaWrapperModel(16, 2, 6, 3, ssm_cfg=CONFIGS["Mamba"]).can_keep_rows(2)


@pytest.mark.parametrize("layer", CONFIGS)
def test_under_autocast_start_leaves_what_steps_can_read(layer):
    """The convolution's window is kept in autocast's type, which its rows have anyway."""
    torch.manual_seed(0)
    core = MambaWrapperModel(16, 2, 6, 3, ssm_cfg=CONFIGS[layer])
    stoch, action = (t.float() for t in draw(9))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        state = core.init_state(2)
        core(stoch[:, :6], action[:, :6], state=state)
        _, left = core.start(stoch[:, :6], action[:, :6])
        for ours, theirs in zip(left.tensors(), state.tensors(), strict=True):
            assert_close(ours.float(), theirs, 1e-6)
        want = run_steps(core, stoch[:, 6:], action[:, 6:], state)
        assert_close(run_steps(core, stoch[:, 6:], action[:, 6:], left), want, 1e-2)


@torch.no_grad()
def test_reset_rows_equal_pieces_of_seq_idx(core):
    stoch, action = draw(23)
    resets = torch.rand(2, 23, generator=torch.Generator().manual_seed(1)) < 0.2
    resets[:, 0] = False
    state, stepped = core.init_state(2), core.init_state(2)
    core(*draw(4, seed=5), state=state)
    stepped.copy_(state)
    out = core(stoch, action, seq_idx=resets.cumsum(1), state=state)
    assert_close(run_steps(core, stoch, action, stepped, resets), out, 1e-10)
    for left, right in zip(state.tensors(), stepped.tensors(), strict=True):
        assert_close(left, right, 1e-10)


@torch.no_grad()
def test_seq_idx_equals_pieces_alone(core):
    stoch, action = draw(12, batch=1)
    out = core(stoch, action, seq_idx=torch.tensor([[3] * 5 + [9] * 1 + [3] * 6]))
    pieces = [core(stoch[:, a:b], action[:, a:b]) for a, b in ((0, 5), (5, 6), (6, 12))]
    assert_close(out, torch.cat(pieces, dim=1), 1e-10)


@torch.no_grad()
def test_resetting_a_row_makes_it_new_even_from_nan(core):
    stoch, action = draw(1, batch=3)
    state, fresh = core.init_state(3), core.init_state(3)
    for tensor in state.tensors():
        tensor.fill_(torch.nan)
    mask = torch.tensor([True, False, True])
    out = core.step(stoch[:, 0], action[:, 0], state, reset=mask)
    want = core.step(stoch[:, 0], action[:, 0], fresh)
    assert_close(out[mask], want[mask], 0.0)
    assert out[~mask].isnan().all()


@torch.no_grad()
def test_state_is_moved_on_in_place_and_can_be_kept(core):
    state = core.init_state(2)
    addresses = [tensor.data_ptr() for tensor in state.tensors()]
    core(*draw(5), state=state)
    stoch, action = draw(1, seed=3)
    kept, chosen = state.clone(), state.select(torch.tensor([1, 1, 0]))
    first = core.step(stoch[:, 0], action[:, 0], state)
    assert [tensor.data_ptr() for tensor in state.tensors()] == addresses
    state.copy_(kept.tensors())
    assert_close(core.step(stoch[:, 0], action[:, 0], state), first, 0.0)
    assert_close(core.step(stoch[[1, 1, 0], 0], action[[1, 1, 0], 0], chosen), first[[1, 1, 0]], 1e-12)
    state.zero_()
    assert not any(tensor.any() for tensor in state.tensors())


def test_step_costs_the_same_at_any_length(core):
    sizes = {length: [t.shape for t in core.init_state(2, max_seqlen=length).tensors()] for length in (1, 10_000)}
    assert sizes[1] == sizes[10_000]


@pytest.mark.parametrize("layer", CONFIGS)
def test_autocast_keeps_float32_states(layer):
    torch.manual_seed(0)
    core = MambaWrapperModel(16, 2, 6, 3, ssm_cfg=CONFIGS[layer])
    stoch, action = (t.float() for t in draw(20))
    want = core.double()(stoch.double(), action.double())
    core.float()
    state, stepped = core.init_state(2), core.init_state(2)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        out, steps = core(stoch, action, state=state), run_steps(core, stoch, action, stepped)
    assert {t.dtype for t in (*state.tensors(), *stepped.tensors())} == {torch.float32}
    assert_close(out, want, 3e-2)
    assert_close(steps, want, 3e-2)


def test_every_parameter_gets_a_gradient(core):
    dout = torch.randn(2, 9, 16, dtype=torch.float64)
    (core(*draw(9)) * dout).sum().backward()
    assert all(p.grad is not None and p.grad.norm() > 1e-6 for p in core.parameters())


def test_no_host_sync(core):
    stoch, action = draw(6)
    with NoHostSync():
        core(stoch, action, seq_idx=torch.zeros(2, 6, dtype=torch.int32)).sum().backward()
        with torch.no_grad():
            state = core.init_state(2)
            core(stoch, action, state=state)
            core.step(stoch[:, 0], action[:, 0], state, reset=torch.tensor([True, False]))


def test_compiles_without_graph_breaks(core):
    stoch, action = draw(6)
    compiled = torch.compile(core, fullgraph=True, backend="eager")
    assert_close(compiled(stoch, action), core(stoch, action), 1e-12)


def test_residual_writers_start_smaller_in_deeper_stacks():
    """out_proj is drawn within ±1/√fan_in and divided by √(branches): the largest entry shows the factor."""
    for n_layer, d_intermediate, branches in ((1, 0, 1), (4, 0, 4), (4, 64, 8)):
        torch.manual_seed(0)
        model = MambaWrapperModel(64, n_layer, 6, 3, d_intermediate=d_intermediate)
        for layer in model.layers:
            largest = layer.mixer.out_proj.weight.abs().max().item() * 128**0.5
            assert 0.99 * branches**-0.5 < largest <= branches**-0.5
        assert (model.stem[0].bias == 0).all()
        assert (model.layers[0].mixer.dt_proj.bias != 0).all()


@torch.no_grad()
def test_token_model_prefill_then_steps():
    torch.manual_seed(0)
    for cfg in CONFIGS.values():
        model = MixerModel(16, 2, 32, 11, ssm_cfg=cfg, rms_norm=True, fused_add_norm=True).double()
        ids = torch.randint(0, 11, (2, 13))
        params = InferenceParams(max_seqlen=13, max_batch_size=2)
        params.key_value_memory_dict = model.allocate_inference_cache(2, 13)
        outs = []
        for piece in ids.split([6, 1, 1, 5], dim=1):
            outs.append(model(piece, inference_params=params))
            params.seqlen_offset += piece.shape[1]
        assert_close(torch.cat(outs, dim=1), model(ids), 1e-10)


@torch.no_grad()
def test_fused_and_plain_stacks_agree():
    results = []
    for fused in (True, False):
        torch.manual_seed(0)
        core = MambaWrapperModel(16, 2, 6, 3, d_intermediate=8, fused_add_norm=fused, rms_norm=False).double()
        results.append(core(*draw(5)))
    assert_close(results[0], results[1], 1e-12)


@pytest.mark.parametrize("call, message", [
    (lambda core: core(torch.zeros(2, 5, 7), torch.zeros(2, 5, 3)), r"stoch has shape \(2, 5, 7\), expected"),
    (lambda core: core(torch.zeros(2, 5, 6), torch.zeros(2, 4, 3)), r"action .* expected \(B, L, A\) = \(2, 5, 3\)"),
    (lambda core: core.step(torch.zeros(2, 1, 6), torch.zeros(2, 3), core.init_state(2)), r"expected \(B, Z\)"),
    (lambda core: core(torch.zeros(2, 5, 6), torch.zeros(2, 5, 3), state=core.init_state(3)), "state has 3 rows"),
    (lambda core: create_block(8, ssm_cfg={"layer": "Mamba3"}), "'Mamba3', expected one of 'Mamba', 'Mamba1'"),
])  # fmt: skip
def test_wrong_arguments_are_refused_by_name(core, call, message):
    with pytest.raises(ValueError, match=message):
        call(core)

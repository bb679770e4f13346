"""The fused step against the plain one, for both optimisers: values, counts, state, memory layouts, CUDA graphs.

On a GPU the kernels run as they are, elsewhere in Triton's interpreter.
"""

import copy
import math

import gymnasium
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

import agents
from mamba_ssm.testing import assert_close
from sub_models import fused_optimiser
from sub_models.laprop import LaProp
from sub_models.optimiser import COUNTS, Optimiser
from utils import load_config

NAMES = ["Laprop", "Adam"]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = 1e-6  # relative, after a few steps: some ulps of float32
# torch's AdamW rounds β2 to float32 on a GPU, so that its 1 - β2 is 1.3e-5 too large; on a CPU it does not.
CUDA_ADAM = 2e-5
FACTORS = {"ok": 1.0, "nan": math.nan, "inf": math.inf, "off": 1.0}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Small parameters then have full chunks, partial ones, and several strips of sums."""
    monkeypatch.setattr(fused_optimiser, "CHUNK", 64)
    monkeypatch.setattr(fused_optimiser, "SUMS", 4)


def make_params(shapes):
    """Values of size 1 to 2; those with four dimensions are channels-last."""
    generator = torch.Generator().manual_seed(0)
    values = [(1.0 + torch.rand(shape, generator=generator)).to(DEVICE) for shape in shapes]
    return [torch.nn.Parameter(x.to(memory_format=torch.channels_last) if x.dim() == 4 else x) for x in values]


def loss_of(params, seed, factor=1.0):
    """A sum that gives every parameter a random gradient, the same for the same seed.

    Each element's gradient keeps its sign from seed to seed: a mean near zero would have few digits to compare.
    """
    terms = []
    for i, p in enumerate(params):
        size = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed + i)).abs()
        sign = torch.randn(p.shape, generator=torch.Generator().manual_seed(i)).sign()
        terms.append((p * (sign * size).to(DEVICE)).sum())
    return factor * torch.stack(terms).sum()


def make(shapes, name, fused, **options):
    params = make_params(shapes)
    if len(params) > 1:
        params[-1]._no_weight_decay = True
    arguments = {"learning_rate": 0.05, "epsilon": 1e-8, "max_grad_norm": 3.0, **options}
    return params, Optimiser(params, name, fused=fused, **arguments)


def assert_same_state(fused, plain, tolerance=TOLERANCE):
    """Parameters, moments and counts of two optimisers."""
    mixed = (fused.fused_step is None) != (plain.fused_step is None)
    for p, q in zip(fused.params, plain.params, strict=True):
        assert_close(p, q, tolerance, "parameter")
        state, expected = fused.inner.state[p], plain.inner.state[q]
        assert state.keys() == expected.keys()
        for name, value in state.items():
            loose = mixed and name == "exp_avg_sq" and plain.name == "Adam" and DEVICE.type == "cuda"
            assert_close(value, expected[name], max(tolerance, CUDA_ADAM * loose), name)
    for name in (*COUNTS, "lr"):
        assert_close(getattr(fused, name), getattr(plain, name), 1e-7, name)


@pytest.mark.parametrize("name", NAMES)
@given(
    shapes=st.lists(
        st.sampled_from([(), (1,), (0, 3), (63,), (64,), (65,), (3, 100), (4, 3, 3, 3), (2, 1, 5)]),
        min_size=1,
        max_size=4,
    ),
    kinds=st.lists(st.sampled_from(["ok", "ok", *FACTORS]), min_size=1, max_size=4),
    options=st.fixed_dictionaries(
        {
            "warmup_steps": st.sampled_from([0, 3]),
            "weight_decay": st.sampled_from([0.0, 0.1]),
            "max_grad_norm": st.sampled_from([1e-3, 5.0, 1e9]),
            "epsilon": st.sampled_from([1e-20, 1e-3]),
        }
    ),
)
@settings(deadline=None, max_examples=12)
def test_equals_the_plain_step(name, shapes, kinds, options):
    """Clipping, warm-up, weight decay, skips of every kind, in any order, with parameters of any size."""
    (params, fused), (others, plain) = (make(shapes, name, fused, **options) for fused in (True, False))
    for seed, kind in enumerate(kinds):
        enabled = None if kind == "ok" else torch.tensor(kind != "off", device=DEVICE)
        metrics, expected = (
            optimiser.update(loss_of(own, seed, FACTORS[kind]), enabled)
            for own, optimiser in ((params, fused), (others, plain))
        )
        assert metrics.keys() == expected.keys()
        for key, value in metrics.items():
            assert_close(value, expected[key], TOLERANCE, key)
    assert_same_state(fused, plain)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("saved_by", "resumed_by"), [(True, True), (True, False), (False, True)])
def test_state_of_either_continues_in_the_other(name, saved_by, resumed_by, tmp_path):
    """Through a file; the same kind of step goes on bit for bit, step counts and warm-up included."""
    shapes = [(70,), (4, 3, 3, 3)]
    params, optimiser = make(shapes, name, saved_by, warmup_steps=6, weight_decay=0.1)
    for seed in range(3):
        optimiser.update(loss_of(params, seed))
    torch.save({"params": [p.detach() for p in params], "optimiser": optimiser.state_dict()}, tmp_path / "state.pt")
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    others, resumed = make(shapes, name, resumed_by, warmup_steps=6, weight_decay=0.1)
    with torch.no_grad():
        for p, value in zip(others, saved["params"], strict=True):
            p.copy_(value)
    resumed.load_state_dict(saved["optimiser"])
    for seed in range(3, 5):
        optimiser.update(loss_of(params, seed))
        resumed.update(loss_of(others, seed))
    assert_same_state(resumed, optimiser, 0.0 if saved_by == resumed_by else TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
def test_parameters_without_gradient_are_left_out(name):
    """And with none at all nothing but the count of updates moves, as in the plain step."""
    (params, fused), (others, plain) = (make([(3,), (70,), (5,)], name, which) for which in (True, False))
    for used in ([1], [0, 1], []):
        for own, optimiser in ((params, fused), (others, plain)):
            loss = loss_of([own[i] for i in used], 0) if used else torch.zeros((), device=DEVICE, requires_grad=True)
            optimiser.update(loss)
    assert_same_state(fused, plain)
    assert fused.updates == 3 and "exp_avg" not in fused.inner.state[params[2]]


def test_laprop_alone_takes_groups_of_their_own():
    """Each group with its own numbers; a learning rate that is a number or a tensor, changed in between; found_inf."""

    def train(fused):
        params = make_params([(70,), (3, 5), (4, 3, 3, 3)])
        rate = torch.tensor(0.02, device=DEVICE)
        groups = [
            {"params": params[:2], "lr": 0.05, "betas": (0.0, 0.5), "weight_decay": 0.2},
            {"params": params[2:], "lr": rate, "eps": 1e-3},
        ]
        optimiser = LaProp(groups, fused=fused)
        for seed in range(5):
            optimiser.zero_grad()
            loss_of(params, seed).backward()
            optimiser.found_inf = torch.tensor(float(seed == 2), device=DEVICE) if seed else None
            optimiser.param_groups[0]["lr"] *= 0.5
            rate.mul_(0.9)
            optimiser.step()
        return params, optimiser

    for p, q in zip(*(train(fused)[0] for fused in (True, False)), strict=True):
        assert_close(p, q, TOLERANCE)
    params, optimiser = train(True)
    assert optimiser.state[params[0]]["step"] == 4 and "step" not in optimiser.state[params[1]]


def test_gradients_in_another_memory_order_are_paired_by_index():
    """The kernels pair elements by their place in memory."""

    def train(fused):
        p = make_params([(4, 3, 2, 2)])[0]
        optimiser = LaProp([p], 0.1, fused=fused)
        p.grad = torch.arange(48.0, device=DEVICE).reshape(4, 3, 2, 2)
        optimiser.step()
        return p, optimiser

    (p, fused), (q, _) = train(True), train(False)
    assert p.grad.stride() != p.stride()
    assert_close(p, q, TOLERANCE)
    state = copy.deepcopy(fused.state_dict())
    moments = state["state"][0]
    moments["exp_avg"] = moments["exp_avg"].contiguous()  # as a file holds it
    for optimiser in (fused, LaProp([q], 0.1)):
        optimiser.load_state_dict(copy.deepcopy(state))
        optimiser.step()
    assert_close(p, q, TOLERANCE)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (lambda: [torch.ones(2, dtype=torch.float64, device=DEVICE)], "torch.float64"),
        (lambda: [torch.ones(2, 4, device=DEVICE)[:, :3]], r"strides \(4, 1\) has gaps"),
        (lambda: [torch.ones(2, device=DEVICE), torch.ones(2, device="meta")], "on meta"),
    ],
)
def test_refuses_what_the_kernels_do_not_take(params, message):
    with pytest.raises(ValueError, match=f"fused LaProp: .*{message}"):
        LaProp([p.requires_grad_() for p in params()], fused=True)


def test_an_optimiser_on_a_cpu_is_plain_unless_asked():
    p = torch.nn.Parameter(torch.ones(2))
    assert Optimiser([p], "Laprop", 0.1, 1e-8, 1.0).fused_step is None


# ------------------------------------------------------------------------------------------------------- on a GPU alone

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def trained_in_graph(name, captured, steps=20, **options):
    """`steps` updates of a small network, eager or replayed; the third of the inputs is not finite."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 40, 5), torch.nn.SiLU(), torch.nn.Flatten(), torch.nn.Linear(640, 7))
    net = net.to(DEVICE, memory_format=torch.channels_last)
    optimiser = Optimiser(net.parameters(), name, 0.01, 1e-8, 1.0, 10, 0.1, **options)
    images = torch.randn(steps + 3, 4, 3, 8, 8, device=DEVICE)
    images[5] = math.nan
    static = images[0].clone(memory_format=torch.channels_last)

    def update():
        return optimiser.update(net(static.contiguous(memory_format=torch.channels_last)).square().mean())

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(3):
            static.copy_(images[i])
            update()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    if captured:
        with torch.cuda.graph(graph):
            captured_metrics = update()
    history = []
    for i in range(3, steps + 3):
        static.copy_(images[i])
        if captured:
            graph.replay()
        metrics = captured_metrics if captured else update()
        history.append({key: value.item() for key, value in metrics.items()})
    return optimiser, history


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", NAMES)
def test_a_graph_replays_what_the_eager_step_does(name, monkeypatch):
    """20 replays, while other pinned memory comes and goes: the table that the graph reads must stay."""
    monkeypatch.setattr(fused_optimiser, "CHUNK", 2048)
    torch.backends.cudnn.deterministic = True
    (graph, seen), (eager, expected) = (trained_in_graph(name, captured) for captured in (True, False))
    assert seen == expected
    assert [step["skipped"] for step in seen[:4]] == [0, 0, 1, 0] and graph.updates == 22
    assert_same_state(graph, eager, 0.0)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", NAMES)
def test_the_graph_of_the_fused_step_equals_the_plain_steps(name, monkeypatch):
    monkeypatch.setattr(fused_optimiser, "CHUNK", 2048)
    torch.backends.cudnn.deterministic = True
    (fused, seen), (plain, expected) = trained_in_graph(name, True), trained_in_graph(name, False, fused=False)
    assert fused.fused_step is not None and plain.fused_step is None
    for step, other in zip(seen, expected, strict=True):
        assert step == pytest.approx(other, rel=1e-3)
    assert_same_state(fused, plain, 1e-3)  # rounding grows in training; see the tests of single steps for its size


@pytest.mark.gpu
@needs_gpu
def test_graphs_hold_no_more_updates_than_memory_was_set_aside_for(monkeypatch):
    monkeypatch.setattr(fused_optimiser, "CAPTURED_UPDATES", 2)
    p = torch.nn.Parameter(torch.ones(4, device=DEVICE))
    optimiser = Optimiser([p], "Laprop", 0.1, 1e-8, 1.0)
    optimiser.update(p.sum())
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="hold 2 updates"), torch.cuda.graph(graph):
        for _ in range(3):
            optimiser.update(p.sum())


def test_a_graph_can_hold_every_update_of_a_ppo_step(monkeypatch):
    """Small minibatches make hundreds of updates in one captured step."""
    asked = []
    monkeypatch.setattr(agents, "Optimiser", lambda *_, updates_in_a_call: asked.append(updates_in_a_call))
    config = load_config(["--Models.Agent.Policy", "PPO", "--Models.Agent.PPO.Minibatch", "100"], "train.py").config
    agents.build_agent(config, 8, gymnasium.spaces.Discrete(2), torch.device("cpu"))
    assert asked == [3 * 164]  # 3 epochs over 1024 · 16 steps
    step = fused_optimiser.FusedStep(torch.optim.AdamW(make_params([(3,)])), captured_updates=2 * 492)
    assert step.captured_updates == 984

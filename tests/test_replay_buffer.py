"""Replay buffer: what is sampled, how often, and what survives a save."""

import copy
import hashlib
import itertools
import json
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import replay_buffer
from replay_buffer import (
    Batch,
    ReplayBuffer,
    ReplayFileError,
    draw_with_replacement,
    draw_without_replacement,
    imagination_logits,
    row_nbytes,
    world_model_logits,
)
from sub_models.cuda_graph import WARMUP_CALLS, CapturedStep
from tests.tools.test_checkpoints import mutated
from utils import get_rng_state, set_rng_state

CUDA = torch.cuda.is_available()
gpu = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a CUDA device")]
PLACEMENTS = [
    pytest.param("cpu", "cpu", id="cpu"),
    pytest.param("cuda", "cuda", id="cuda", marks=gpu),
    pytest.param("cpu", "cuda", id="host-to-cuda", marks=gpu),
]
OBS_SHAPE = (2, 2, 3)      # 12 bytes: room for the 8 of a tag
P_VALUE = 1e-6             # a right sampler fails a chi-square test once in a million runs


def make_replay(**changes) -> ReplayBuffer:
    arguments = {
        "capacity": 64,
        "num_envs": 1,
        "obs_shape": OBS_SHAPE,
        "action_shape": (),
        "device": "cpu",
        "out_device": "cpu",
        "batch_size": 4,
        "batch_length": 5,
        "imagine_batch_size": 16,
        "context_length": 3,
        "sampling": "dynamic",
        "tau": 10.0,
        "imagination_tau": 10.0,
        "alpha": 1.0,
        "beta": 1.0,
    }
    return ReplayBuffer(**(arguments | changes))


def tagged_row(first_tag: int, num_envs: int, obs_shape=OBS_SHAPE) -> dict[str, np.ndarray]:
    """One row for each environment, every field computed from its tag first_tag + env; the obs holds the tag itself."""
    tags = np.arange(first_tag, first_tag + num_envs, dtype=np.int64)
    obs = np.zeros((num_envs, int(np.prod(obs_shape))), np.uint8)
    obs[:, :8] = tags[:, None].view(np.uint8)
    return {
        "obs": obs.reshape(num_envs, *obs_shape),
        "action": tags % 7,
        "reward": tags * 0.5,
        "termination": tags % 5 == 0,
        "is_first": tags % 5 == 1,
    }


def fill(replay: ReplayBuffer, rows: int, start: int = 0) -> None:
    """Append tagged rows start..start+rows-1; row n of environment e has the tag 1000 n + e."""
    for n in range(start, start + rows):
        replay.append(**tagged_row(1000 * n, replay.num_envs))


def ends_episode(tag: int) -> bool:
    """Whether a tagged row ends an episode: three in seven, so that each environment has its own."""
    return tag % 7 < 3


def tagged_frame(tag: int, obs_shape=OBS_SHAPE) -> np.ndarray:
    """The final observation after a tagged row; it can be told from any row's."""
    return tagged_row(tag + 500, 1, obs_shape)["obs"][0]


def row_with_ends(n: int, num_envs: int) -> dict:
    """A tagged row and the final observations that are due; every other one becomes known one row late."""
    tags = {env: 1000 * n + env for env in range(num_envs)}
    final = {env: tagged_frame(tag) for env, tag in tags.items() if ends_episode(tag) and n % 2}
    late = {env: tagged_frame(tag - 1000) for env, tag in tags.items() if ends_episode(tag - 1000) and n % 2 and n}
    return {**tagged_row(1000 * n, num_envs), "final_obs": final, "abandoned_obs": late}


def fill_with_ends(replay: ReplayBuffer, rows: int, start: int = 0) -> None:
    """`fill` with the final observations that are due."""
    for n in range(start, start + rows):
        replay.append(**row_with_ends(n, replay.num_envs))


def tags_of(batch: Batch) -> torch.Tensor:
    """(B, L) tags, after checking that every other field belongs to the same row as the obs."""
    raw = batch.obs.cpu().flatten(2).numpy()
    tags = torch.from_numpy(raw[..., :8].copy().view(np.int64)[..., 0])
    assert torch.equal(batch.action.cpu(), tags % 7)
    assert torch.equal(batch.reward.cpu(), tags * 0.5)
    assert torch.equal(batch.termination.cpu(), (tags % 5 == 0).float())
    assert torch.equal(batch.is_first.cpu(), tags % 5 == 1)
    return tags


def set_counters(replay: ReplayBuffer, v, b) -> None:
    replay._counters.copy_(torch.stack([torch.as_tensor(v), torch.as_tensor(b)]).view(replay._counters.shape))


def assert_frequencies(drawn: torch.Tensor, probabilities) -> None:
    """Chi-square test of indices against probabilities; an index of probability 0 must never occur."""
    probabilities = np.asarray(probabilities, np.float64)
    counts = np.bincount(drawn.cpu().numpy(), minlength=len(probabilities))
    assert len(counts) == len(probabilities)
    assert counts[probabilities == 0].sum() == 0
    drawable = probabilities > 0
    expected = probabilities[drawable] / probabilities.sum() * drawn.numel()
    assert expected.min() > 40, "the test needs likelier rows"
    if drawable.sum() > 1:
        assert stats.chisquare(counts[drawable], expected).pvalue > P_VALUE


def softmax_list(logits) -> np.ndarray:
    weights = np.exp(np.asarray(logits, np.float64) - max(logits))
    return weights / weights.sum()


# --- which rows are sampled -------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    num_envs=st.integers(1, 4),
    ring_length=st.integers(2, 20),
    written=st.integers(1, 65),
    batch_length=st.integers(1, 20),
    context_length=st.integers(1, 20),
    sampling=st.sampled_from(["dynamic", "uniform"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_sequence_is_a_run_of_one_environment(
    num_envs, ring_length, written, batch_length, context_length, sampling, seed
):
    """Fails if a sequence crosses the seam, mixes environments or fields, or reads rows that were never written."""
    batch_length, context_length = min(batch_length, ring_length), min(context_length, ring_length)
    torch.manual_seed(seed)
    replay = make_replay(
        capacity=num_envs * ring_length,
        num_envs=num_envs,
        batch_size=1,
        batch_length=batch_length,
        context_length=context_length,
        imagine_batch_size=64,
        sampling=sampling,
    )
    fill(replay, written)
    held = min(written, ring_length)
    assert len(replay) == num_envs * held
    for sample, length in ((replay.sample_sequences, batch_length), (replay.sample_contexts, context_length)):
        if length > held:
            with pytest.raises(RuntimeError, match="append more rows first"):
                sample()
            continue
        tags = tags_of(sample())
        assert tags.shape[1] == length
        assert (tags.diff(dim=1) == 1000).all()
        assert (tags[:, 0] // 1000 >= written - held).all()
        assert (tags[:, -1] // 1000 < written).all()
        assert (tags % 1000 < num_envs).all()


@pytest.mark.parametrize(("device", "out_device"), PLACEMENTS)
@pytest.mark.parametrize("written", [5, 12, 19])
def test_every_valid_start_is_reached_once(device, out_device, written):
    """Fails if a valid start is masked out, or one is drawn twice without replacement."""
    held = min(written, 12)
    starts = 2 * (held - 5 + 1)
    replay = make_replay(
        capacity=24, num_envs=2, batch_size=starts, imagine_batch_size=5000, context_length=5,
        device=device, out_device=out_device,
    )
    fill(replay, written)
    expected = {1000 * n + env for n in range(written - held, written - 4) for env in range(2)}
    sequences = tags_of(replay.sample_sequences())[:, 0].tolist()
    assert len(sequences) == starts
    assert set(sequences) == expected
    assert set(tags_of(replay.sample_contexts())[:, 0].tolist()) == expected


@pytest.mark.parametrize(("device", "out_device"), PLACEMENTS)
@pytest.mark.parametrize("obs_shape", [(1, 1, 9), (1, 5, 2), (2, 2, 3), (4, 4, 3)])
def test_batch_has_documented_shapes_and_types(device, out_device, obs_shape):
    """Every width of the words that rows are moved in (1, 2, 4 and 8 bytes), discrete and continuous actions."""
    for action_shape, action_dtype in (((), torch.int64), ((3,), torch.float32)):
        replay = make_replay(obs_shape=obs_shape, action_shape=action_shape, device=device, out_device=out_device)
        rng = np.random.default_rng(0)
        obs = rng.integers(0, 256, (9, 1, *obs_shape), dtype=np.uint8)
        action = rng.uniform(-1, 1, (9, 1, *action_shape)) if action_shape else np.arange(9)[:, None]
        for i in range(9):
            replay.append(obs[i], action[i], [float(i)], [i == 4], [i == 5])
        batch = replay.sample_sequences()
        assert [(field.shape, field.dtype, field.device.type) for field in batch] == [
            ((4, 5, *obs_shape), torch.uint8, out_device),
            ((4, 5, *action_shape), action_dtype, out_device),
            ((4, 5), torch.float32, out_device),
            ((4, 5), torch.float32, out_device),
            ((4, 5), torch.bool, out_device),
            ((4, 2), torch.int64, out_device),
        ]
        rows = batch.reward.long().cpu()
        assert torch.equal(batch.obs.cpu(), torch.from_numpy(obs)[rows, 0])
        torch.testing.assert_close(batch.action.cpu(), torch.from_numpy(action)[rows, 0].to(action_dtype))
        assert torch.equal(batch.termination.cpu(), (rows == 4).float())
        assert torch.equal(batch.is_first.cpu(), rows == 5)
        assert replay.sample_contexts().obs.shape == (16, 3, *obs_shape)


def test_can_sample_waits_for_rows_and_for_starts():
    """Fails if a sampler is declared ready while it would refuse."""
    replay = make_replay(num_envs=2, batch_size=5, batch_length=6)
    for written in range(1, 12):
        fill(replay, 1, start=written - 1)
        assert replay.can_sample(rows=0) == (2 * (written - 5) >= 5)
        assert replay.can_sample(rows=20) == (written >= 10)
        if not replay.can_sample(rows=0):
            starts = 2 * max(0, written - 5)
            message = f"{starts} of the {2 * written} rows held can open 6 rows of one environment, expected at least 5"
            with pytest.raises(RuntimeError, match=message):
                replay.sample_sequences()
    replay.sample_sequences()


@pytest.mark.parametrize(("device", "out_device"), PLACEMENTS)
@pytest.mark.parametrize("num_envs", [1, 3])
def test_sequences_are_drawn_before_the_newest_row_is_known(device, out_device, num_envs):
    """Other draws than after the row was appended, or one that reads the open row unnoticed, would change the run."""
    places = {"device": device, "out_device": out_device}
    first, second = (make_replay(capacity=10 * num_envs, num_envs=num_envs, batch_size=2, **places) for _ in range(2))
    fill_with_ends(first, 7)
    fill_with_ends(second, 7)
    reads = []
    for number in range(7, 40):                            # several times round the ring
        row = row_with_ends(number, num_envs)
        random_state = get_rng_state()
        first.append(**row)
        expected = first.sample_sequences()
        set_rng_state(random_state)
        second.open_row()
        second.draw_sequences()
        reads.append(second.reads_open_row())
        assert reads[-1] == bool((tags_of(expected)[:, -1] // 1000 == number).any())
        if reads[-1]:
            second.append(**row)
        batch = second.drawn_sequences()
        for field, expected_field in zip(batch, expected, strict=True):
            assert torch.equal(field, expected_field)
        if second.row_is_open:
            second.append(**row)
        assert_same_content(second, first)
        assert not second.reads_open_row()
    assert any(reads)
    assert not all(reads)


def test_an_open_row_is_not_read():
    """Fails if what an open row does not hold yet could be taken for experience, or it could be passed over."""
    replay = make_replay()
    fill(replay, 9)
    replay.open_row()
    folder = Path("never-written")
    calls = (replay.open_row, replay.sample_sequences, replay.sample_contexts, lambda: replay.save(folder))
    for call, name in zip(calls, ("open_row", "sample_sequences", "sample_contexts", "save"), strict=True):
        with pytest.raises(RuntimeError, match=f"{name}: a row is open, whose contents are not known yet"):
            call()
    assert not folder.exists()
    with pytest.raises(ValueError, match="reward"):
        replay.append(**{**tagged_row(9000, 1), "reward": [float("nan")]})
    assert replay.row_is_open
    fill(replay, 1, start=9)
    assert len(replay) == 10
    replay.sample_contexts()


@pytest.mark.parametrize("written", [6, 12, 17])
def test_recent_sequences_are_the_newest_rows_and_leave_no_trace(written):
    """Fails if pictures show old rows, or if drawing them changes what is sampled next."""
    replay = make_replay(capacity=24, num_envs=2)
    fill(replay, written)
    before = copy.deepcopy(replay)
    random_state = torch.get_rng_state()
    for count, length in ((3, 2), (1, 6), (4, 5), (3, 6)):   # the last two have too few rows where 6 are held
        tags = tags_of(replay.recent_sequences(count, length))
        held, stride = min(written, 12), tags[:, 0].diff()
        assert tags.shape == (count, length)
        assert (tags.diff(dim=1) == 1000).all()
        assert tags[-1, -1] == 1000 * (written - 1)
        assert tags[0, 0] >= 1000 * (written - held)
        assert (stride == 1000 * min(length, (held - length) // max(count - 1, 1))).all()
    assert torch.equal(torch.get_rng_state(), random_state)
    assert_same_content(replay, before)
    with pytest.raises(RuntimeError, match="recent_sequences: 0 of the"):
        replay.recent_sequences(count=1, length=13)


@pytest.mark.parametrize(("device", "out_device"), PLACEMENTS)
@pytest.mark.parametrize(("num_envs", "written"), [(1, 20), (2, 50), (3, 100)])
def test_sequences_are_read_again_by_their_first_row(device, out_device, num_envs, written):
    """What a batch was made of must be found later; rows that were overwritten since may not pass for it."""
    replay = make_replay(capacity=60, num_envs=num_envs, device=device, out_device=out_device)
    fill(replay, written)
    batch = replay.sample_sequences()
    assert torch.equal(tags_of(batch)[:, 0], (batch.first_row[:, 1] * 1000 + batch.first_row[:, 0]).cpu())
    assert torch.equal(tags_of(replay.read_again(batch.first_row, 5)), tags_of(batch))
    oldest = batch.first_row[:, 1].min().item()
    fill(replay, oldest + replay.ring_length - written + 1, start=written)  # goes over the oldest row that was drawn
    kept = batch.first_row[:, 1].cpu() > oldest
    assert torch.equal(tags_of(replay.read_again(batch.first_row, 5)), tags_of(batch)[kept])


def test_appended_arrays_may_be_reused_and_tensors_are_taken():
    """Fails if the buffer keeps a view of the caller's memory, or treats tensors, lists and frozen arrays otherwise."""
    replay = make_replay(batch_size=1, batch_length=4)
    row = tagged_row(0, 1)
    replay.append(**row)
    row["obs"][:] = 255
    replay.append(**{name: torch.from_numpy(value) for name, value in tagged_row(1000, 1).items()})
    frozen = tagged_row(2000, 1)
    for value in frozen.values():
        value.setflags(write=False)
    replay.append(**frozen)
    row = tagged_row(3000, 1)
    replay.append(obs=row["obs"][:, :, ::-1][:, :, ::-1], **{name: row[name].tolist() for name in row if name != "obs"})
    assert tags_of(replay.sample_sequences()).tolist() == [[0, 1000, 2000, 3000]]


# --- how often they are sampled ---------------------------------------------------------------------------------------


V = [0, 3, 12, 7, 25, 1, 40, 9]
B = [0, 20, 2, 7, 30, 0, 10, 60]


def test_first_and_second_draw_of_the_world_model_follow_the_sequential_law():
    """10^6 draws of two starts: chi-square of the first, and of the ordered pairs, against p_i p_j / (1 - p_i)."""
    torch.manual_seed(0)
    valid = torch.tensor([True] * 8 + [False])
    logits = world_model_logits(torch.tensor([*V, 0], dtype=torch.int32), inverse_tau=1 / 10)
    drawn = draw_without_replacement(logits.expand(1_000_000, -1), valid, count=2)
    p = [*softmax_list([-v / 10 for v in V]), 0.0]
    assert_frequencies(drawn[:, 0], p)
    pairs = [p[i] * p[j] / (1 - p[i]) if i != j else 0.0 for i, j in itertools.product(range(9), repeat=2)]
    assert_frequencies(drawn[:, 0] * 9 + drawn[:, 1], pairs)


@pytest.mark.parametrize(("device", "out_device"), PLACEMENTS)
@pytest.mark.parametrize("sampling", ["dynamic", "uniform"])
@pytest.mark.parametrize("written", [9, 14])
def test_world_model_starts_follow_their_counters(device, out_device, sampling, written):
    """Fails if the sampler reads other rows' counters, the wrong temperature, or the wrong mask after a wrap-around."""
    torch.manual_seed(1)
    replay = make_replay(
        capacity=18, num_envs=2, batch_size=1, batch_length=6, tau=4.0, sampling=sampling,
        device=device, out_device=out_device,
    )
    fill(replay, written)
    v = torch.arange(18, dtype=torch.int32).view(2, 9) % 11
    probability = np.zeros(18)
    for env, n in itertools.product(range(2), range(written - 9, written - 5)):
        slot = n % 9
        probability[env * 9 + slot] = np.exp(-v[env, slot].item() / 4.0) if sampling == "dynamic" else 1.0
    batches = []
    for _ in range(3000):
        set_counters(replay, v, torch.zeros_like(v))
        batches.append(replay.sample_sequences())
    first = tags_of(Batch(*map(torch.cat, zip(*batches, strict=True))))[:, 0]
    assert_frequencies(first % 1000 * 9 + first // 1000 % 9, probability)


@pytest.mark.parametrize(("device", "out_device"), PLACEMENTS)
@pytest.mark.parametrize(
    ("sampling", "tau", "alpha", "beta"),
    [
        ("dynamic", 10.0, 1.0, 1.0),
        ("dynamic", 5.0, 0.5, 0.25),
        ("dynamic", 20.0, 1.5, 0.0),
        ("uniform", 10.0, 1.0, 1.0),
    ],
)
def test_contexts_follow_their_counters(device, out_device, sampling, tau, alpha, beta):
    """10^6 draws against the formula, b scaled by BatchSize / ImagineBatchSize; rows too near the end never occur."""
    torch.manual_seed(2)
    draws, batch_size = 1_000_000, 4
    replay = make_replay(
        capacity=8, obs_shape=(1, 1, 8), batch_size=batch_size, batch_length=2, imagine_batch_size=draws,
        context_length=2, sampling=sampling, imagination_tau=tau, alpha=alpha, beta=beta,
        device=device, out_device=out_device,
    )
    for n in range(11):                                      # row n is at slot n % 8; row 10, the newest, opens nothing
        replay.append(**tagged_row(1000 * n, 1, obs_shape=(1, 1, 8)))
    scaled = [x * batch_size / draws * 200_000 for x in B]   # 0.8 for each of B
    set_counters(replay, torch.tensor(V, dtype=torch.int32), torch.tensor(B, dtype=torch.int32) * 200_000)
    logits = [(v - alpha * b - beta * max(0.0, v - b)) / tau for v, b in zip(V, scaled, strict=True)]
    if sampling == "uniform":
        logits = [0.0] * 8
    probability = softmax_list([logit if slot != 2 else -np.inf for slot, logit in enumerate(logits)])
    slots = tags_of(replay.sample_contexts())[:, 0] // 1000 % 8
    assert_frequencies(slots, probability)
    counted = replay._counters[1, 0].cpu() - torch.tensor(B) * 200_000
    assert torch.equal(counted, torch.bincount(slots, minlength=8))


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.floats(-40, 40), min_size=1, max_size=12),
    invalid=st.integers(0, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_draws_follow_any_logits(sizes, invalid, seed):
    """Chi-square of 20,000 draws over rows likely enough to be counted; the rest are pooled."""
    torch.manual_seed(seed)
    logits = torch.tensor(sizes + [100.0] * invalid, dtype=torch.float64)
    valid = torch.arange(len(logits)) < len(sizes)
    p = softmax_list(sizes)
    order = np.argsort(-p)
    likely = [i for i in order if p[i] * 20_000 > 50]
    rest = 1 - p[likely].sum()
    pooled = np.append(p[likely], rest if rest * 20_000 > 50 else 0)
    place = torch.full((len(logits),), len(likely))
    place[torch.tensor(likely)] = torch.arange(len(likely))
    first = draw_without_replacement(logits.expand(20_000, -1), valid, 1)[:, 0]
    for drawn in (first, draw_with_replacement(logits, valid, 20_000)):
        assert valid[drawn].all()
        where = place[drawn]
        if pooled[-1] == 0:
            where = where[where < len(likely)]
        assert_frequencies(where, pooled)


@pytest.mark.parametrize("count", [10**6, 2**31 - 100])
def test_huge_counters_keep_the_right_limits(count):
    """exp(count) written as exp/sum is NaN; here the least trained row is certain, and differences still count."""
    valid = torch.ones(5, dtype=torch.bool)
    v = torch.tensor([count, count - 30, count, count - 30, count], dtype=torch.int32)
    b = torch.zeros(5, dtype=torch.float64)
    sequences = draw_without_replacement(world_model_logits(v, 1 / 0.01).expand(1000, -1), valid, 2)
    assert set(map(tuple, sequences.sort(dim=1).values.tolist())) == {(1, 3)}
    contexts = draw_with_replacement(imagination_logits(v, b, 1.0, 0.5, 1 / 0.01), valid, 1000)
    assert set(contexts.tolist()) == {0, 2, 4}
    logits = imagination_logits(v, v.double() + torch.arange(5), 1.0, 1.0, 1 / 10)   # v - b = 0, -1, -2, -3, -4
    assert_frequencies(draw_with_replacement(logits, valid, 100_000), softmax_list([-i / 10 for i in range(5)]))
    logits = imagination_logits(v, b + count * 1.0, 1e6, 1e6, 1 / 1e-3)
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize("extreme", [0.0, 1.0 - 2.0**-53])
def test_extreme_random_numbers_draw_rows_that_can_be_drawn(extreme, monkeypatch):
    """The ends of [0, 1) must not fall on rows of weight 0 before, between or after the others, nor on invalid rows."""
    monkeypatch.setattr(torch, "rand", lambda *size, dtype, device: torch.full(
        size[0] if isinstance(size[0], torch.Size) else size, extreme, dtype=dtype, device=device))
    logits = torch.full((100_000,), -1e9, dtype=torch.float64)
    logits[[7, 500, 99_990]] = torch.tensor([0.0, -0.5, -1.0], dtype=torch.float64)
    valid = torch.ones(100_000, dtype=torch.bool)
    valid[:3] = valid[-3:] = False
    expected = 7 if extreme == 0 else 99_990
    assert draw_with_replacement(logits, valid, 4).tolist() == [expected] * 4
    assert valid[draw_without_replacement(logits, valid, 5)].all()
    level = torch.zeros(100_000, dtype=torch.float64)
    assert draw_with_replacement(level, valid, 1).item() == (3 if extreme == 0 else 99_996)


@pytest.mark.parametrize(("device", "out_device"), PLACEMENTS)
def test_counters_count_draws_and_restart_with_new_rows(device, out_device):
    """Fails if repeated starts are counted once, or if a new row inherits the counts of the row that it overwrites."""
    replay = make_replay(capacity=32, num_envs=2, imagine_batch_size=200, device=device, out_device=out_device)
    fill(replay, 16)
    seen = torch.zeros(2, 2, 16, dtype=torch.int64)
    for _ in range(20):
        for kind, batch in enumerate((replay.sample_sequences(), replay.sample_contexts())):
            first = tags_of(batch)[:, 0]
            seen[kind].index_put_((first % 1000, first // 1000), torch.ones_like(first), accumulate=True)
        assert torch.equal(replay._counters.cpu().long(), seen)
    assert seen[0].sum() == 20 * 4
    assert seen[1].sum() == 20 * 200
    fill(replay, 3, start=16)
    seen[:, :, :3] = 0
    assert torch.equal(replay._counters.cpu().long(), seen)


def test_late_rows_catch_up():
    """The purpose of the law: in the long run every row has opened about as many sequences, however late it came."""
    torch.manual_seed(0)
    replay = make_replay(capacity=60, batch_length=2, tau=1.0)
    for rows, updates in ((20, 100), (40, 500)):
        fill(replay, rows, start=replay._written)
        for _ in range(updates):
            replay.sample_sequences()
    v = replay._counters[0, 0, :59]                          # the newest row opens no sequence of two
    assert v.max() - v.min() < 10
    assert v.sum() == 600 * 4


# --- final observations -----------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    num_envs=st.integers(1, 4),
    ring_length=st.integers(1, 20),
    written=st.integers(1, 65),
    length=st.integers(1, 20),
    seed=st.integers(0, 2**32 - 1),
)
def test_final_observations_of_a_batch_are_those_of_its_rows(num_envs, ring_length, written, length, seed):
    """Over the seam, in every environment, known at once or late; fails if one is lost, doubled, stale or another's."""
    length = min(length, ring_length, written)
    torch.manual_seed(seed)
    replay = make_replay(
        capacity=num_envs * ring_length, num_envs=num_envs, batch_size=1, batch_length=1, context_length=length
    )
    fill_with_ends(replay, written)
    batch = replay.sample_contexts()
    final = replay.final_obs(batch)
    known = tags_of(batch) // 1000 < written - (written % 2)  # an even row's ends are told with the row after it
    expected = torch.tensor([[ends_episode(tag) for tag in row] for row in tags_of(batch).tolist()]) & known
    assert torch.equal(torch.stack((final.sequence, final.step), 1), expected.nonzero())
    frames = [tagged_frame(tag) for tag in tags_of(batch)[expected].tolist()]
    assert torch.equal(final.obs, torch.from_numpy(np.array(frames, np.uint8).reshape(-1, *OBS_SHAPE)))


def test_final_observations_go_with_their_rows():
    """Memory is bounded: one frame for each ended episode that the rings still hold, in whatever order they end."""
    replay = make_replay(capacity=12, num_envs=2, batch_length=2)
    for n in range(40):
        fill_with_ends(replay, 1, start=n)
        held = range(max(0, n - 5), n + 1)
        due = {(env, row) for row in held for env in range(2) if ends_episode(1000 * row + env) and (row < n or n % 2)}
        assert set(replay._finals) == due
    assert replay._finals_written == sum(ends_episode(1000 * row + env) for row in range(40) for env in range(2))


@pytest.mark.parametrize(("device", "out_device"), PLACEMENTS)
def test_newest_final_observations(device, out_device):
    replay = make_replay(device=device, out_device=out_device)
    assert replay.recent_final_obs(3).shape == (0, *OBS_SHAPE)
    fill_with_ends(replay, 20)
    batch = replay.sample_sequences()
    assert {field.device.type for field in replay.final_obs(batch)} == {out_device}
    tags = [1000 * n for n in range(20) if ends_episode(1000 * n)]
    for count in (1, 3, 100):
        frames = replay.recent_final_obs(count)
        assert frames.device.type == out_device
        assert torch.equal(frames.cpu(), torch.from_numpy(np.stack([tagged_frame(tag) for tag in tags[-count:]])))


def test_final_observations_are_copied():
    """Environments may reuse their arrays."""
    replay, frame = make_replay(), tagged_frame(7)
    replay.append(**tagged_row(0, 1), final_obs={0: frame})
    frame[:] = 255
    assert torch.equal(replay.recent_final_obs(1)[0], torch.from_numpy(tagged_frame(7)))


@pytest.mark.parametrize(
    ("final", "abandoned", "message"),
    [
        ({1: tagged_frame(0)}, None, "final_obs names environment 1, which has no row whose episode ends now"),
        ({-1: tagged_frame(0)}, None, "final_obs names environment -1"),
        (None, {0: tagged_frame(0)}, "abandoned_obs names environment 0, which has no row"),
        ({0: tagged_frame(0)[:1]}, None, r"final_obs has shape \(1, 2, 3\), expected \(2, 2, 3\)"),
        ({0: tagged_frame(0).astype(np.float32)}, None, "final_obs is float32, expected uint8"),
    ],
)
def test_bad_final_observations_are_refused_and_leave_no_trace(final, abandoned, message):
    """`abandoned`: the row before has its final observation already."""
    replay = make_replay()
    replay.append(**tagged_row(0, 1), final_obs={0: tagged_frame(0)})
    before = copy.deepcopy(replay)
    with pytest.raises(ValueError, match=f"append: {message}"):
        replay.append(**tagged_row(1000, 1), final_obs=final, abandoned_obs=abandoned)
    assert_same_content(replay, before)
    with pytest.raises(ValueError, match="abandoned_obs names environment 0, which has no row"):
        make_replay().append(**tagged_row(0, 1), abandoned_obs={0: tagged_frame(0)})


def test_saves_from_before_final_observations_load(tmp_path):
    """Their manifests do not have the keys."""
    replay = make_replay()
    fill(replay, 20)
    manifest = {name: value for name, value in replay.save(tmp_path).items() if not name.startswith("finals")}
    loaded = make_replay()
    loaded.load(tmp_path, json_copy(manifest))
    assert_same_content(loaded, replay)
    fill_with_ends(loaded, 9, start=20)
    again = make_replay()
    again.load(tmp_path, loaded.save(tmp_path))
    assert_same_content(again, loaded)


# --- saving and loading -----------------------------------------------------------------------------------------------


def assert_same_content(loaded: ReplayBuffer, saved: ReplayBuffer) -> None:
    assert len(loaded) == len(saved)
    assert loaded._written == saved._written == loaded._written_on_device.item()
    assert torch.equal(loaded._counters.cpu(), saved._counters.cpu())
    held = min(saved._written, saved.ring_length)
    for name, data in saved._data.items():
        assert torch.equal(loaded._data[name][:, :held].cpu(), data[:, :held].cpu()), name
    assert list(loaded._finals) == list(saved._finals)
    assert loaded._finals_written == saved._finals_written
    for place, frame in saved._finals.items():
        assert np.array_equal(loaded._finals[place], frame), place


def named_files(manifest: dict) -> set[str]:
    return {file["name"] for file in [*manifest["chunks"], manifest["counters"], *manifest["finals"]]}


def json_copy(manifest: dict) -> dict:
    return json.loads(json.dumps(manifest))


@settings(max_examples=25, deadline=None)
@given(
    num_envs=st.integers(1, 3),
    ring_length=st.integers(5, 12),
    appended=st.lists(st.integers(0, 15), min_size=1, max_size=5),
    rows_per_file=st.integers(1, 20),
)
def test_every_save_of_a_history_loads_exactly(tmp_path_factory, num_envs, ring_length, appended, rows_per_file):
    """Over any pattern of appends, wrap-arounds and file sizes; each manifest as long as it is kept."""
    folder = tmp_path_factory.mktemp("replay")
    arguments = {"capacity": num_envs * ring_length, "num_envs": num_envs, "batch_size": 1}
    replay = make_replay(**arguments)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay_buffer, "MAX_CHUNK_BYTES", rows_per_file * num_envs * (row_nbytes(OBS_SHAPE, ()) - 8))
        history = []
        for rows in appended:
            fill_with_ends(replay, rows, start=replay._written)
            if replay.can_sample(rows=1):
                replay.sample_sequences(), replay.sample_contexts()
            history.append((json_copy(replay.save(folder)), copy.deepcopy(replay)))
    for manifest, saved in history:
        loaded = make_replay(**arguments)
        loaded.load(folder, manifest)
        assert_same_content(loaded, saved)
    kept, saved = history[-1]
    replay.prune(folder, [kept])
    assert {path.name for path in folder.iterdir()} == named_files(kept)
    loaded = make_replay(**arguments)
    loaded.load(folder, kept)
    assert_same_content(loaded, saved)


@pytest.mark.parametrize(("device", "out_device"), PLACEMENTS)
def test_resumed_buffer_goes_on_as_if_never_saved(device, out_device, tmp_path):
    """Same generator state, same appends: the same samples bit for bit, through two generations of saving."""
    arguments = {"capacity": 32, "num_envs": 2, "device": device, "out_device": out_device}

    def go_on(replay):
        torch.manual_seed(5)
        samples = []
        for step in range(23, 30):
            fill(replay, 1, start=step)
            samples += [*replay.sample_sequences(), *replay.sample_contexts()]
        return samples

    replay = make_replay(**arguments)
    fill(replay, 19)
    replay.sample_sequences(), replay.sample_contexts()
    first = replay.save(tmp_path)
    middle = make_replay(**arguments)
    middle.load(tmp_path, first)
    for buffer in (replay, middle):
        torch.manual_seed(6)
        fill(buffer, 4, start=19)
        buffer.sample_sequences()
    loaded = make_replay(**arguments)
    loaded.load(tmp_path, middle.save(tmp_path))
    assert_same_content(loaded, replay)
    for unsaved, resumed in zip(go_on(replay), go_on(loaded), strict=True):
        assert torch.equal(unsaved, resumed)


def written_bytes(folder: Path, before: dict[str, int]) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.name not in before)


def test_a_save_writes_new_rows_only(tmp_path):
    """Counted in bytes, also after loading in a new buffer; a second folder gets everything."""
    row_bytes, counter_bytes, final_bytes = row_nbytes(OBS_SHAPE, ()) - 8, 64 * 8, 16 + 12
    replay = make_replay()
    for resumed, rows in ((False, 30), (False, 10), (True, 7), (False, 0), (False, 24)):
        ended = replay._finals_written
        fill_with_ends(replay, rows, start=replay._written)
        new = rows * row_bytes + (replay._finals_written - ended) * final_bytes
        before = {path.name: 0 for path in tmp_path.iterdir()}
        manifest = replay.save(tmp_path)
        assert written_bytes(tmp_path, before) in {new + counter_bytes, new}, resumed
        replay = make_replay()
        replay.load(tmp_path, manifest)
    other = tmp_path / "other"
    replay.save(other)
    assert written_bytes(other, {}) == 64 * row_bytes + counter_bytes + len(replay._finals) * final_bytes


def test_prune_keeps_what_is_needed(tmp_path):
    """Fails if a file of a kept manifest goes, if stale ones stay, or if foreign files are touched."""
    replay = make_replay(capacity=16, batch_length=3)
    fill_with_ends(replay, 10)
    old = replay.save(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "replay.tmp").write_bytes(b"left by a crash")
    (tmp_path / f"rows-10-12-{'0' * 16}.bin").write_bytes(b"left by a crash")
    (tmp_path / f"finals-3-4-{'0' * 16}.bin").write_bytes(b"left by a crash")
    fill_with_ends(replay, 10, start=10)
    replay.save(tmp_path)
    fill_with_ends(replay, 10, start=20)                     # rows 0..9 are overwritten now
    new = replay.save(tmp_path)
    replay.prune(tmp_path, [old, new])
    for manifest in (old, new):
        make_replay(capacity=16, batch_length=3).load(tmp_path, manifest)
    replay.prune(tmp_path, [new])
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"notes.txt"} | named_files(new)
    replay.prune(tmp_path, [])                               # the next save still builds on this buffer's files
    needed = named_files(new) - {new["counters"]["name"]}
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt", *needed}
    fill(replay, 1, start=30)
    loaded = make_replay(capacity=16, batch_length=3)
    loaded.load(tmp_path, replay.save(tmp_path))
    assert_same_content(loaded, replay)


def test_a_crash_before_the_manifest_confuses_nobody(tmp_path):
    """Files newer than the manifest are ignored, and the same rows with other content get files of their own."""
    replay = make_replay()
    fill(replay, 10)
    manifest = replay.save(tmp_path)
    fill(replay, 5, start=10)
    lost = replay.save(tmp_path)                             # its manifest never reached the disk
    resumed = make_replay()
    resumed.load(tmp_path, manifest)
    fill(resumed, 5, start=500)
    again = resumed.save(tmp_path)
    for kept, expected in ((again, resumed), (lost, replay)):
        loaded = make_replay()
        loaded.load(tmp_path, kept)
        assert_same_content(loaded, expected)


class Killed(BaseException):
    """The process ends here: nothing may catch it, nothing after it runs."""


@pytest.mark.parametrize("moment", range(1, 9))
@pytest.mark.parametrize(("owner", "call"), [(os, "fsync"), (Path, "replace"), (Path, "open")])
def test_killed_at_any_moment_of_a_save(tmp_path, monkeypatch, owner, call, moment):
    """At each system call of a save in several files: the last manifest still loads, and saving goes on from it."""
    monkeypatch.setattr(replay_buffer, "MAX_CHUNK_BYTES", 4 * (row_nbytes(OBS_SHAPE, ()) - 8))
    replay = make_replay(capacity=16, batch_length=3)
    fill_with_ends(replay, 10)
    manifest = replay.save(tmp_path)
    saved = copy.deepcopy(replay)
    fill_with_ends(replay, 12, start=10)
    calls, original = itertools.count(1), getattr(owner, call)

    def killed_here(*args):
        if next(calls) == moment:
            raise Killed
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(owner, call, killed_here)
        try:
            replay.save(tmp_path)
        except Killed:
            pass
        else:
            assert moment > 4, "a save in several files has more calls than that"
    resumed = make_replay(capacity=16, batch_length=3)
    resumed.load(tmp_path, manifest)
    assert_same_content(resumed, saved)
    fill_with_ends(resumed, 12, start=30)
    manifest = resumed.save(tmp_path)
    resumed.prune(tmp_path, [manifest])
    assert {path.name for path in tmp_path.iterdir()} == named_files(manifest)
    loaded = make_replay(capacity=16, batch_length=3)
    loaded.load(tmp_path, manifest)
    assert_same_content(loaded, resumed)


def test_a_failing_disk_leaves_the_last_save_whole(tmp_path, monkeypatch):
    """Fails if a half-written file stays, or if the next save believes that the failed one was written."""
    replay = make_replay()
    fill(replay, 10)
    manifest = replay.save(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    fill(replay, 5, start=10)

    def full_disk(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk)
        with pytest.raises(OSError, match="No space left"):
            replay.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    make_replay().load(tmp_path, manifest)
    loaded = make_replay()
    loaded.load(tmp_path, replay.save(tmp_path))
    assert_same_content(loaded, replay)


def test_rows_whose_file_vanished_are_written_again(tmp_path):
    """While the rows are still held, a lost file costs one rewrite and not the run."""
    replay = make_replay()
    for start in (0, 10, 20):
        fill_with_ends(replay, 10, start=start)
        manifest = replay.save(tmp_path)
    for files in (manifest["chunks"], manifest["finals"]):
        (tmp_path / files[1]["name"]).unlink()
    loaded = make_replay()
    loaded.load(tmp_path, replay.save(tmp_path))
    assert_same_content(loaded, replay)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("victim", ["rows", "counters", "finals"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, r"has \d+ bytes, expected \d+"),
        (flip_bit, r"has sha256 \w+, expected \w+"),
        (Path.unlink, "cannot be read: No such file"),
        (lambda path: path.unlink() or path.mkdir(), "cannot be read: Is a directory"),
    ],
)
def test_damaged_files_are_refused(tmp_path, victim, damage, message):
    """One line that names the file; the buffer is empty afterwards and can load a good save."""
    replay = make_replay()
    fill_with_ends(replay, 10)
    good = replay.save(tmp_path / "good")
    manifest = replay.save(tmp_path)
    name = victim_entry(manifest, victim)["name"]
    damage(tmp_path / name)
    loaded = make_replay()
    fill(loaded, 20)
    with pytest.raises(ReplayFileError, match=message) as error:
        loaded.load(tmp_path, manifest)
    assert name in str(error.value)
    assert "\n" not in str(error.value)
    assert len(loaded) == 0
    loaded.load(tmp_path / "good", good)
    assert_same_content(loaded, replay)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"capacity": 32}, "ring_length is 64, expected 32"),
        ({"capacity": 128, "num_envs": 2}, "num_envs is 1, expected 2"),
        ({"obs_shape": (4, 2, 3)}, r"obs is uint8 \(2, 2, 3\), expected uint8 \(4, 2, 3\)"),
        ({"action_shape": (2,)}, r"action is int64 \(\), expected float32 \(2,\)"),
    ],
)
def test_another_kind_of_buffer_is_refused(tmp_path, changes, message):
    """What differs is named, with both values."""
    replay = make_replay()
    fill(replay, 10)
    manifest = replay.save(tmp_path)
    with pytest.raises(ReplayFileError, match=message):
        make_replay(**changes).load(tmp_path, manifest)


BAD_VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.lists(st.integers(), max_size=2),
    st.just("../../etc/passwd"), st.just(2**70), st.just({}),
)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_altered_manifests_are_refused_or_harmless(saved_replay, data):
    """Any value of a manifest replaced or dropped: a one-line ReplayFileError, or the same content as before."""
    folder, manifest, replay = saved_replay
    altered = json_copy(manifest)
    place = altered
    while True:
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    if data.draw(st.booleans()):
        del place[key]
    else:
        place[key] = data.draw(BAD_VALUES)
    loaded = make_replay(capacity=16, batch_length=3)
    try:
        loaded.load(folder, altered)
    except ReplayFileError as error:
        assert "\n" not in str(error)
        assert len(loaded) == 0
    else:
        assert_same_content(loaded, replay)


def victim_entry(manifest: dict, victim: str) -> dict:
    return {"rows": manifest["chunks"][0], "counters": manifest["counters"], "finals": manifest["finals"][0]}[victim]


def with_digest_of(manifest: dict, victim: str, content: bytes) -> dict:
    """The manifest as if `content` were what was saved: an attacker can compute checksums, too."""
    altered = json_copy(manifest)
    entry = victim_entry(altered, victim)
    entry |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    return altered


@pytest.mark.parametrize("count", [100, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "victim",
    ["rows", "counters", "finals", "rows, digest right", "counters, digest right", "finals, digest right", "manifest"],
)
def test_mutated_replay_files_give_clean_errors_or_possible_rows(saved_replay, tmp_path, victim, count):
    """Whatever is done to a file: one line, or a buffer whose every row could have been appended."""
    folder, manifest, _ = saved_replay
    kind, right_digest = victim.split(",")[0], victim.endswith("right")
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    path = tmp_path / victim_entry(manifest, "rows" if kind == "manifest" else kind)["name"]
    original = json.dumps(manifest).encode() if kind == "manifest" else path.read_bytes()
    rng, refused = random.Random(3), 0
    for _ in range(count):
        content, used = mutated(original, rng), manifest
        if kind == "manifest":
            try:
                used = json.loads(content)
            except ValueError:
                continue  # refused by who reads the checkpoint
        else:
            path.write_bytes(content)
            used = with_digest_of(manifest, kind, content) if right_digest else manifest
        loaded = make_replay(capacity=16, batch_length=3)
        try:
            loaded.load(tmp_path, used)
        except ReplayFileError as error:
            assert "\n" not in str(error) and len(loaded) == 0
            refused += 1
        else:
            assert len(loaded) == 16
            for name, field in loaded._fields.items():
                assert field.complaint(loaded._data[name].numpy()) is None
            numbers = [number for _, number in loaded._finals]
            assert numbers == sorted(numbers)
            assert all(ring == 0 and loaded._oldest() <= number < loaded._written for ring, number in loaded._finals)
    assert refused > count // 20


@pytest.fixture(scope="module")
def saved_replay(tmp_path_factory):
    """A wrapped buffer saved in two steps: folder, manifest, buffer."""
    folder = tmp_path_factory.mktemp("saved")
    replay = make_replay(capacity=16, batch_length=3)
    fill_with_ends(replay, 14)
    replay.save(folder)
    fill_with_ends(replay, 8, start=14)
    return folder, json_copy(replay.save(folder)), replay


def test_manifests_cannot_reach_outside_of_their_folder(tmp_path):
    """A sound file elsewhere is no file of this replay."""
    replay = make_replay()
    fill(replay, 10)
    manifest = replay.save(tmp_path / "elsewhere")
    manifest["counters"]["name"] = f"../elsewhere/{manifest['counters']['name']}"
    with pytest.raises(ReplayFileError, match=r"manifest names '\.\./elsewhere/.*', which is no replay file"):
        make_replay().load(tmp_path / "elsewhere", manifest)


def test_files_over_the_ring_end_are_refused(tmp_path):
    """Their rows would be written past the ring: a sound file of a longer ring, its manifest altered."""
    replay = make_replay(capacity=32, batch_length=3)
    fill(replay, 20)
    manifest = replay.save(tmp_path) | {"ring_length": 16}
    with pytest.raises(ReplayFileError, match=r"is 0\.\.20, over the ring's end"):
        make_replay(capacity=16, batch_length=3).load(tmp_path, manifest)


def test_row_numbers_beyond_the_counter_are_refused(saved_replay):
    """A manifest that is consistent but for numbers that no int64 holds."""
    folder, manifest, _ = saved_replay
    altered = json_copy(manifest)
    altered["rows_written"] += 2**70
    for chunk in altered["chunks"]:
        chunk["first"] += 2**70
        chunk["stop"] += 2**70
    with pytest.raises(ReplayFileError, match="malformed at rows_written: Input should be less than"):
        make_replay(capacity=16, batch_length=3).load(folder, altered)


@pytest.mark.parametrize("root", [None, [], "text", 3, {}, {"format": "drama-replay-1"}])
def test_what_is_no_manifest_is_refused(tmp_path, root):
    """Also where nothing of a manifest is there."""
    with pytest.raises(ReplayFileError, match="replay manifest is malformed at "):
        make_replay().load(tmp_path, root)


@pytest.mark.parametrize(("field", "value", "message"), [
    ("reward", float("nan"), "reward is nan at"),
    ("termination", 0.5, r"termination is 0\.5 at"),
    ("action", -1, "action is -1 at"),
    ("is_first", 2, "is_first is 2 at"),
])
def test_impossible_values_in_a_file_are_refused(tmp_path, field, value, message):
    """A file can be intact and still hold what no buffer would have accepted."""
    replay = make_replay()
    fill(replay, 10)
    data = replay._data[field]
    (data.view(torch.uint8) if data.dtype == torch.bool else data)[0, 4] = value
    manifest = replay.save(tmp_path)
    with pytest.raises(ReplayFileError, match=message):
        make_replay().load(tmp_path, manifest)


def test_negative_counters_in_a_file_are_refused(tmp_path):
    """They would make a row all but certain to be drawn."""
    replay = make_replay()
    fill(replay, 10)
    set_counters(replay, torch.full((64,), -1), torch.zeros(64, dtype=torch.int64))
    with pytest.raises(ReplayFileError, match="negative counter"):
        make_replay().load(tmp_path, replay.save(tmp_path))


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("obs", np.zeros((1, 2, 3, 3), np.uint8), r"obs has shape \(1, 2, 3, 3\), expected \(1, 2, 2, 3\)"),
        ("obs", np.zeros((2, 2, 3), np.uint8), r"obs has shape \(2, 2, 3\), expected \(1, 2, 2, 3\)"),
        ("obs", np.zeros((1, 2, 2, 3), np.float32), "obs is float32, expected uint8"),
        ("obs", np.zeros((1, 2, 2, 3), np.int8), "obs is int8, expected uint8"),
        ("action", [0.5], "action is float64, expected integers"),
        ("action", [-1], r"action is -1 at \(0,\), expected integers from 0"),
        ("action", np.array([2**63], np.uint64), r"action is 9223372036854775808 at \(0,\), expected integers from 0"),
        ("action", [[1]], r"action has shape \(1, 1\), expected \(1,\)"),
        ("reward", [float("nan")], "reward is nan at"),
        ("reward", [float("-inf")], "reward is -inf at"),
        ("reward", [1e39], r"reward is 1e\+39 at"),
        ("reward", [1j], "reward is complex128, expected finite"),
        ("reward", ["1"], "reward is <U1, expected finite"),
        ("reward", 1.0, r"reward has shape \(\), expected \(1,\)"),
        ("termination", [0.5], r"termination is 0\.5 at \(0,\), expected bool, or 0 and 1"),
        ("termination", [float("nan")], "termination is nan at"),
        ("is_first", [2], "is_first is 2 at"),
        ("is_first", [True, False], r"is_first has shape \(2,\), expected \(1,\)"),
    ],
)
def test_bad_rows_are_refused_and_leave_no_trace(field, value, message):
    """The argument, its value and what was expected; nothing of a refused row is written."""
    replay = make_replay()
    fill(replay, 3)
    before = copy.deepcopy(replay)
    with pytest.raises(ValueError, match=f"append: {message}"):
        replay.append(**(tagged_row(3000, 1) | {field: value}))
    assert_same_content(replay, before)


def test_bad_continuous_actions_are_refused():
    """The place of the first bad component is named."""
    replay = make_replay(action_shape=(2,), num_envs=2)
    row = tagged_row(0, 2) | {"action": np.array([[0.0, 1.0], [0.0, np.nan]])}
    with pytest.raises(ValueError, match=r"append: action is nan at \(1, 1\), expected finite"):
        replay.append(**row)
    with pytest.raises(ValueError, match="append: action is int64, expected finite"):
        replay.append(**(row | {"action": np.zeros((2, 2), np.int64)}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"capacity": 0}, "capacity is 0, expected an integer of at least 1"),
        ({"capacity": 64.0}, r"capacity is 64\.0, expected an integer"),
        ({"num_envs": 3}, "capacity is 64, expected a multiple of num_envs 3"),
        ({"batch_size": True}, "batch_size is True"),
        ({"imagine_batch_size": -1}, "imagine_batch_size is -1"),
        ({"obs_shape": (64, 64)}, r"obs_shape is \(64, 64\), expected \(H, W, C\)"),
        ({"obs_shape": (64, 0, 3)}, r"obs_shape is \(64, 0, 3\)"),
        ({"action_shape": (2, 2)}, r"action_shape is \(2, 2\), expected \(\) or \(A,\)"),
        ({"sampling": "random"}, "sampling is 'random', expected 'dynamic' or 'uniform'"),
        ({"tau": 0.0}, r"tau is 0\.0, expected"),
        ({"imagination_tau": float("nan")}, "imagination_tau is nan"),
        ({"alpha": float("inf")}, "alpha is inf"),
        ({"batch_length": 62}, "capacity is 64, .* leaves 3 starts for batch_length 62, expected at least 4"),
        ({"context_length": 65}, "capacity is 64, .* leaves 0 starts for context_length 65, expected at least 1"),
    ],
)
def test_bad_options_are_refused(changes, message):
    """Before any memory is allocated: the option, its value and what was expected."""
    with pytest.raises(ValueError, match=f"ReplayBuffer: {message}"):
        make_replay(**changes)


# --- GPU --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def forbid_sync():
    """Turns every hidden wait for the GPU into an error."""
    def forbid(forbidden: bool) -> None:
        torch.cuda.set_sync_debug_mode("error" if forbidden else "default")

    yield forbid
    forbid(False)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize(("device", "out_device"), [("cuda", "cuda"), ("cpu", "cuda")])
def test_no_hidden_wait_for_the_gpu(device, out_device, forbid_sync):
    """append with host arrays and with device tensors, and both samplers."""
    replay = make_replay(num_envs=2, device=device, out_device=out_device)
    fill(replay, 8)
    replay.sample_sequences(), replay.sample_contexts()
    row = tagged_row(8000, 2)
    stored = {name: torch.from_numpy(value).to(device, replay._data[name].dtype) for name, value in row.items()}
    torch.cuda.synchronize()
    forbid_sync(True)
    replay.append(**stored)
    fill(replay, 3, start=9)
    batches = [replay.sample_sequences(), replay.sample_contexts()]
    forbid_sync(False)
    for batch in batches:
        assert (tags_of(batch).diff(dim=1) == 1000).all()


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("deterministic", [False, True])
def test_samplers_run_in_a_cuda_graph(deterministic):
    """A replayed graph sees later appends and counts, draws afresh each time, and equals the eager sampler."""
    torch.use_deterministic_algorithms(deterministic)
    try:
        for name in ("sample_sequences", "sample_contexts"):
            replay = make_replay(capacity=32, num_envs=2, device="cuda", out_device="cuda")
            fill(replay, 10)
            step = CapturedStep(getattr(replay, name), torch.device("cuda"), enabled=True)
            for _ in range(WARMUP_CALLS + 1):
                step()
            eager = make_replay(capacity=32, num_envs=2, device="cuda", out_device="cuda")
            fill(eager, 10)
            eager._counters.copy_(replay._counters)
            replayed, expected = [], []
            for buffer, sample, tags in ((replay, step, replayed), (eager, getattr(eager, name), expected)):
                torch.cuda.manual_seed(3)
                for start in range(10, 30):
                    fill(buffer, 1, start=start)
                    tags.append(tags_of(sample()))
            assert torch.equal(torch.stack(replayed), torch.stack(expected))
            assert torch.equal(replay._counters, eager._counters)
            assert len({tuple(tags.flatten().tolist()) for tags in replayed}) > 10
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_first_draws_on_the_gpu_follow_the_sequential_law():
    """The law of test_first_and_second_draw on the CUDA generator and its top-k."""
    torch.cuda.manual_seed(0)
    v = torch.tensor(V, dtype=torch.int32, device="cuda")
    valid = torch.ones(8, dtype=torch.bool, device="cuda")
    drawn = draw_without_replacement(world_model_logits(v, 1 / 10).expand(1_000_000, -1), valid, count=2)
    p = softmax_list([-v / 10 for v in V])
    assert_frequencies(drawn[:, 0], p)
    pairs = [p[i] * p[j] / (1 - p[i]) if i != j else 0.0 for i, j in itertools.product(range(8), repeat=2)]
    assert_frequencies(drawn[:, 0] * 8 + drawn[:, 1], pairs)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize(("source", "target"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_a_save_moves_between_devices(tmp_path, source, target):
    """A run can go on with its replay stored elsewhere."""
    replay = make_replay(capacity=32, num_envs=2, device=source, out_device="cuda")
    fill(replay, 21)
    replay.sample_sequences(), replay.sample_contexts()
    loaded = make_replay(capacity=32, num_envs=2, device=target, out_device="cuda")
    loaded.load(tmp_path, replay.save(tmp_path))
    assert_same_content(loaded, replay)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_device_tensors_of_another_type_are_refused():
    """Their values cannot be looked at without waiting, so their type must already be right."""
    replay = make_replay(device="cuda", out_device="cuda")
    row = tagged_row(0, 1)
    with pytest.raises(ValueError, match=r"append: reward on cuda:0 is torch\.float64, expected torch\.float32"):
        replay.append(**(row | {"reward": torch.zeros(1, dtype=torch.float64, device="cuda")}))

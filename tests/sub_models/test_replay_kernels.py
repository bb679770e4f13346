"""Replay sampling in few launches draws the starts of the plain forms, and gathers the same rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replay_buffer import (
    ReplayBuffer,
    draw_with_replacement,
    draw_without_replacement,
    imagination_logits,
    weight_bits,
    world_model_logits,
)
from sub_models import replay_kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU the kernels run through Triton's interpreter
rings = st.tuples(st.integers(1, 3), st.integers(20, 700), st.integers(1, 1500), st.integers(1, 12))


def counters(num_envs, ring_length, most, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, most + 1, (2, num_envs * ring_length), dtype=torch.int32, generator=generator)


def valid_starts(num_envs, ring_length, written, length):
    held = torch.arange(max(0, written - ring_length), written)  # numbers of rows
    valid = torch.zeros(ring_length, dtype=torch.bool)
    valid[held[: max(0, len(held) - length + 1)] % ring_length] = True
    return valid.repeat(num_envs)


@given(rings, st.sampled_from([0.0, 0.1, 3.0]), st.sampled_from([1, 30, 2**31 - 50]), st.integers(0, 999))
@settings(deadline=None, max_examples=25)
def test_distinct_starts_are_the_plain_ones(ring, inverse_tau, most, seed):
    num_envs, ring_length, written, length = ring
    v, _ = counters(num_envs, ring_length, most, seed)
    valid = valid_starts(num_envs, ring_length, written, length)
    count = min(16, int(valid.sum()))
    if count == 0:
        return
    torch.manual_seed(seed)
    expected = draw_without_replacement(world_model_logits(v, inverse_tau), valid, count)
    torch.manual_seed(seed)
    uniform = torch.rand(len(v), dtype=torch.float64)
    law = torch.tensor([inverse_tau], dtype=torch.float64)
    got_v = v.to(DEVICE, copy=True)
    got = replay_kernels.draw_distinct(
        got_v, torch.tensor(written, device=DEVICE), law.to(DEVICE), uniform.to(DEVICE), ring_length, length, count
    )
    assert torch.equal(got.cpu(), expected)
    v[expected] += 1
    assert torch.equal(got_v.cpu(), v)


@given(rings, st.sampled_from([0.0, 0.1, 3.0]), st.sampled_from([1, 30, 2**31 - 50]), st.integers(0, 999))
@settings(deadline=None, max_examples=15)
def test_repeated_starts_are_the_plain_ones(ring, inverse_tau, most, seed):
    num_envs, ring_length, written, length = ring
    v, b = counters(num_envs, ring_length, most, seed)
    valid = valid_starts(num_envs, ring_length, written, length)
    if not valid.any():
        return
    alpha, beta, scale, count = 1.0, 0.5, 0.25, 16
    torch.manual_seed(seed)
    logits = imagination_logits(v, b.double() * scale, alpha, beta, inverse_tau)
    expected = draw_with_replacement(logits, valid, count)
    torch.manual_seed(seed)
    uniform = torch.rand(count, dtype=torch.float64)
    law = torch.tensor([alpha, beta, inverse_tau, scale, 2.0 ** weight_bits(len(v))], dtype=torch.float64)
    got_b = b.to(DEVICE, copy=True)
    got = replay_kernels.draw_repeated(
        v.to(DEVICE), got_b, torch.tensor(written, device=DEVICE), law.to(DEVICE), uniform.to(DEVICE), ring_length,
        length,
    )  # fmt: skip
    assert torch.equal(got.cpu(), expected)
    b.index_add_(0, expected, torch.ones(count, dtype=torch.int32))
    assert torch.equal(got_b.cpu(), b)


@pytest.mark.parametrize("extreme", [0.0, 1.0 - 2.0**-53])
@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")  # NumPy's, in Triton's interpreter
def test_extreme_random_numbers_draw_rows_that_can_be_drawn(extreme):
    v, b = counters(1, 40, 3, 0).to(DEVICE)
    law = torch.tensor([1.0, 1.0, 0.1, 1.0, 2.0**40], dtype=torch.float64, device=DEVICE)
    uniform = torch.full((40,), extreme, dtype=torch.float64, device=DEVICE)
    written = torch.tensor(30, device=DEVICE)
    distinct = replay_kernels.draw_distinct(v, written, law[2:3], uniform, 40, 4, 8)
    assert distinct.unique().numel() == 8 and distinct.max() < 27
    assert replay_kernels.draw_repeated(v, b, written, law, uniform, 40, 4).max() < 27


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8])
@pytest.mark.parametrize("width", [1, 3, 300, 2500])
def test_gathered_rows_go_over_the_end_of_their_ring(dtype, width):
    num_envs, ring_length, length = 2, 11, 5
    words = torch.randint(0, 100, (num_envs * ring_length, width), dtype=dtype)
    starts = torch.tensor([0, 9, 11, 21, 13])
    slots = (starts % ring_length)[:, None] + torch.arange(length)
    rows = (starts - starts % ring_length)[:, None] + slots % ring_length
    got = replay_kernels.gather_rows(words.to(DEVICE), starts.to(DEVICE), ring_length, length)
    assert torch.equal(got.cpu(), words[rows.flatten()])
    assert replay_kernels.gather_rows(words.to(DEVICE), starts[:0].to(DEVICE), ring_length, length).shape == (0, width)


@given(rings, st.integers(0, 99))
@settings(deadline=None, max_examples=10)
def test_a_buffer_samples_the_same_with_and_without_kernels(ring, seed):
    """Batches, counters and row numbers: only the launches differ."""
    num_envs, ring_length, written, length = ring
    written = max(length, min(written, 300))
    shape = {"capacity": num_envs * ring_length, "num_envs": num_envs, "obs_shape": (4, 4, 3), "action_shape": (2,)}
    law = {"sampling": "dynamic", "tau": 2.0, "imagination_tau": 3.0, "alpha": 1.0, "beta": 0.5}
    sizes = {"batch_size": 1, "batch_length": length, "imagine_batch_size": 8, "context_length": length}
    buffers = [ReplayBuffer(device=DEVICE, out_device=DEVICE, **shape, **law, **sizes) for _ in range(2)]
    generator = torch.Generator().manual_seed(seed)
    for buffer in buffers:
        for tensor in buffer._data.values():
            content = torch.randint(0, 2, tensor.shape, generator=generator.manual_seed(seed))
            tensor.copy_(content.to(tensor.dtype))
        buffer._set_written(written)
    buffers[0].uses_kernels, buffers[1].uses_kernels = True, False
    for name in ("sample_sequences", "sample_contexts", "sample_sequences", "sample_contexts"):
        batches = []
        for buffer in buffers:
            torch.manual_seed(seed)
            batches.append(getattr(buffer, name)())
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(*batches, strict=True))
        assert torch.equal(buffers[0]._counters, buffers[1]._counters)

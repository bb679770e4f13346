"""The Transformer core: parallel pass = steps, from empty and from a filled cache; pieces don't see each other."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sub_models.attention_blocks import SelfAttentionBlock, segment_positions, visible_pairs
from sub_models.transformer_model import StochasticTransformer

Z, A = 6, 3


def make_core(max_seqlen=256, dropout=0.0):
    torch.manual_seed(0)
    return StochasticTransformer(Z, A, 16, 2, 4, max_seqlen, dropout).double().eval()


def make_inputs(batch_size, seqlen, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(batch_size, seqlen, width, generator=generator, dtype=torch.float64) for width in (Z, A))


@pytest.mark.parametrize("seqlen", [1, 2, 15, 16, 17, 64, 200])
@pytest.mark.parametrize("prefilled", [0, 1, 5])
def test_parallel_pass_equals_steps(seqlen, prefilled):
    """Imagination steps what training ran in parallel; they must be one model."""
    core = make_core()
    stoch, action = make_inputs(2, prefilled + seqlen)
    parallel = core(stoch, action)
    state = core.init_state(2, prefilled + seqlen)
    if prefilled:
        held = core(stoch[:, :prefilled], action[:, :prefilled], state=state)
        torch.testing.assert_close(held, parallel[:, :prefilled], atol=1e-10, rtol=1e-10)
    for t in range(prefilled, prefilled + seqlen):
        torch.testing.assert_close(core.step(stoch[:, t], action[:, t], state), parallel[:, t], atol=1e-10, rtol=1e-10)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 100))
@settings(deadline=None, max_examples=25)
def test_pieces_of_different_index_equal_each_piece_alone(lengths, seed):
    core = make_core()
    stoch, action = make_inputs(2, sum(lengths), seed)
    seq_idx = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).expand(2, -1)
    together = core(stoch, action, seq_idx)
    state = core.init_state(2, sum(lengths))
    continued = core(stoch, action, seq_idx, state)
    start = 0
    for length in lengths:
        piece = slice(start, start + length)
        alone = core(stoch[:, piece], action[:, piece])
        torch.testing.assert_close(together[:, piece], alone, atol=1e-10, rtol=1e-10)
        torch.testing.assert_close(continued[:, piece], alone, atol=1e-10, rtol=1e-10)
        start += length


def test_a_reset_row_begins_anew_and_the_other_goes_on():
    core = make_core()
    stoch, action = make_inputs(2, 7)
    state = core.init_state(2, 7)
    stepped = [core.step(stoch[:, t], action[:, t], state, torch.tensor([t == 4, False])) for t in range(7)]
    stepped = torch.stack(stepped, 1)
    torch.testing.assert_close(stepped[1], core(stoch, action)[1], atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(stepped[0, 4:], core(stoch[:1, 4:], action[:1, 4:])[0], atol=1e-10, rtol=1e-10)


def test_a_context_that_crosses_an_episode_start_is_followed_by_steps_of_the_last_piece():
    core = make_core()
    stoch, action = make_inputs(1, 8)
    seq_idx = torch.tensor([[0, 0, 0, 1, 1, 1]])
    state = core.init_state(1, 8)
    core(stoch[:, :6], action[:, :6], seq_idx, state)
    stepped = torch.stack([core.step(stoch[:, t], action[:, t], state) for t in (6, 7)], 1)
    torch.testing.assert_close(stepped, core(stoch[:, 3:], action[:, 3:])[:, 3:], atol=1e-10, rtol=1e-10)


def test_no_step_sees_the_future():
    core = make_core()
    stoch, action = make_inputs(1, 10)
    stoch.requires_grad_()
    core(stoch, action)[:, 4].sum().backward()
    assert stoch.grad[:, :5].abs().sum() > 0 and not stoch.grad[:, 5:].any()


def test_dropout_is_active_in_training_only():
    core = make_core(dropout=0.5)
    stoch, action = make_inputs(1, 6)
    assert torch.equal(core(stoch, action), core(stoch, action))
    core.train()
    assert not torch.equal(core(stoch, action), core(stoch, action))


def test_sequences_longer_than_positions_or_cache_are_refused():
    core = make_core(max_seqlen=8)
    with pytest.raises(ValueError, match="0 held and 9 new steps, but there are 8 positions"):
        core(*make_inputs(1, 9))
    state = core.init_state(1, 4)
    core(*make_inputs(1, 4), state=state)
    with pytest.raises(ValueError, match="4 steps are held and 1 more"):
        core.step(*(x[:, 0] for x in make_inputs(1, 1)), state)
    with pytest.raises(ValueError, match="d_model=10 is not a multiple of num_heads=4"):
        SelfAttentionBlock(10, 4, 0.0)


def test_positions_restart_with_each_segment():
    segment = torch.tensor([[3, 3, 4, 4, 4, 9], [1, 1, 1, 1, 1, 1]])
    expected = torch.tensor([[5, 6, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5]])
    assert torch.equal(segment_positions(segment, torch.tensor([5, 0])), expected)


def test_visible_pairs_by_hand():
    slots = torch.arange(3)
    segment = torch.tensor([[0, 0, 1]])
    expected = torch.tensor([[[[True, False, False], [True, True, False], [False, False, True]]]])
    assert torch.equal(visible_pairs(segment, segment, slots, slots), expected)

"""Acting: window and recurrent state agree with the parallel pass, episodes start afresh, states can be saved."""

import numpy as np
import pytest
import torch

from envs.toy import Recall
from sub_models.acting import Actor
from tests.support import BACKBONES, SIZE, make_agent_for, make_world_model


def frames(num_steps, num_envs=2, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (num_steps, num_envs, SIZE, SIZE, 3), dtype=np.uint8)


class Spy:
    """An agent that notes the features it is shown and plays a fixed action."""

    def __init__(self, world_model, action=1):
        self.features, self.action = [], action
        self.actions = make_agent_for(world_model).actions
        self.continuous = world_model.num_actions is None

    def choose(self, feature, greedy):
        self.features.append(feature.clone())
        if self.continuous:
            return torch.full((len(feature), self.actions.action_dim), 0.25)
        return torch.full((len(feature),), self.action)


def constant_latents(world_model, monkeypatch):
    """Latents without randomness, so that two ways of acting can be compared."""

    def mode(log_probs):
        return torch.nn.functional.one_hot(log_probs.argmax(-1), log_probs.shape[-1]).to(log_probs.dtype)

    monkeypatch.setattr("sub_models.acting.sample_one_hot", mode)
    return mode


def expected_features(world_model, episode, actions, act_on, sample):
    """What the policy has to see at step t ≥ 1: the parallel pass over all earlier rows of the episode."""
    world_model.eval()
    log_q = world_model.posterior(world_model.to_image(torch.from_numpy(episode)))  # (T, K, C)
    stoch = sample(log_q).flatten(-2)
    encoded = world_model.encode_action(torch.as_tensor(np.stack(actions)))
    features = []
    for t in range(1, len(episode)):
        deter = world_model.sequence_model(stoch[None, :t], encoded[None, :t])[0, -1]
        latent = stoch[t] if act_on == "posterior" else sample(world_model.prior(deter)).flatten()
        features.append(torch.cat((latent, deter)))
    return torch.stack(features)


@pytest.mark.parametrize("continuous", [False, True])
@pytest.mark.parametrize("act_on", ["prior", "posterior"])
@pytest.mark.parametrize("context_length", [0, 9])
@pytest.mark.parametrize("backbone", BACKBONES)
def test_features_equal_the_parallel_pass_over_the_episode(backbone, context_length, act_on, continuous, monkeypatch):
    """The recurrent state, and a window that is long enough, must show the policy the same as the parallel pass."""
    world_model = make_world_model(backbone, continuous)
    sample = constant_latents(world_model, monkeypatch)
    spy = Spy(world_model)
    actor = Actor(world_model, spy, context_length, act_on)
    obs, state, taken = frames(8), None, []
    for t in range(8):
        action, state = actor.act(obs[t], state)
        taken.append(action)
    for e in range(2):
        expected = expected_features(world_model, obs[:, e], [a[e] for a in taken], act_on, sample)
        seen = torch.stack([f[e] for f in spy.features[1:]])
        torch.testing.assert_close(seen, expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize(
    ("context_length", "delay", "knows"), [(0, 20, True), (16, 15, True), (16, 16, False), (16, 20, False)]
)
def test_what_is_left_of_recalls_cue_when_it_is_asked_for(backbone, context_length, delay, knows, monkeypatch):
    """A window that ends after the cue shows the policy the same whatever it was: chance alone is left."""
    world_model = make_world_model(backbone)
    constant_latents(world_model, monkeypatch)
    env, last_features = Recall(SIZE, delay), {}
    for seed in range(12):
        spy = Spy(world_model)
        actor = Actor(world_model, spy, context_length)
        torch.manual_seed(0)                                           # of the first action
        (obs, _), state, ended = env.reset(seed=seed), None, False
        if env.colour in last_features:
            continue
        while not ended:
            action, state = actor.act(obs, state)
            obs, _, ended, _, _ = env.step(action)
        last_features[env.colour] = spy.features[-1 - Recall.QUESTION] # when the question comes
    assert len(last_features) == len(Recall.COLOURS)
    red, *others = last_features.values()
    assert all(torch.equal(red, other) != knows for other in others)


def test_a_window_sees_its_last_rows_only(monkeypatch):
    world_model = make_world_model("Mamba2")
    sample = constant_latents(world_model, monkeypatch)
    spy = Spy(world_model)
    actor = Actor(world_model, spy, 3)
    obs, state, taken = frames(7, 1), None, []
    for t in range(7):
        action, state = actor.act(obs[t], state)
        taken.append(action[0])
    expected = expected_features(world_model, obs[3:, 0], taken[3:], "prior", sample)[-1]  # rows 3, 4, 5 before step 6
    torch.testing.assert_close(spy.features[-1][0], expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("context_length", [0, 5])
@pytest.mark.parametrize("backbone", BACKBONES)
def test_a_new_episode_starts_from_nothing(backbone, context_length, monkeypatch):
    """Fault of published code: after a reset the old episode leaked into the new one. The other environment goes on."""
    world_model = make_world_model(backbone)
    constant_latents(world_model, monkeypatch)
    spies, obs = [Spy(world_model), Spy(world_model)], frames(8)
    whole, fresh = (Actor(world_model, spy, context_length) for spy in spies)
    state = None
    for t in range(8):
        torch.manual_seed(t)
        is_first = np.array([t in (0, 4), t == 0])
        _, state = whole.act(obs[t], state, is_first)
    state = None
    for t in range(4, 8):
        torch.manual_seed(t)
        _, state = fresh.act(obs[t], state, np.array([t == 4, t == 4]))
    for t in range(1, 4):
        torch.testing.assert_close(spies[0].features[4 + t][0], spies[1].features[t][0], atol=1e-9, rtol=1e-9)
        assert not torch.allclose(spies[0].features[4 + t][1], spies[1].features[t][1])


@pytest.mark.parametrize("context_length", [0, 4])
def test_the_first_action_is_random_and_later_ones_are_the_policys(context_length):
    world_model = make_world_model("Mamba2")
    actor = Actor(world_model, Spy(world_model), context_length)
    obs = frames(2, 300)
    first, state = actor.act(obs[0])
    assert set(first) == {0, 1, 2}
    second, state = actor.act(obs[1], state)
    assert set(second) == {1}
    explored, _ = actor.act(obs[1], state, explore=True)
    assert set(explored) == {0, 1, 2}


def test_random_play_fills_the_same_memory_as_the_policy(monkeypatch):
    world_model = make_world_model("Mamba2")
    constant_latents(world_model, monkeypatch)
    for context_length in (0, 4):
        actor = Actor(world_model, Spy(world_model), context_length)
        obs, state = frames(5), None
        for t in range(5):
            _, state = actor.act(obs[t], state, explore=True)
        assert state.length.tolist() == [min(5, context_length or 5)] * 2


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("context_length", [0, 4])
def test_a_saved_state_continues_bit_for_bit(backbone, context_length):
    world_model = make_world_model(backbone)
    agent = make_agent_for(world_model)
    actor, obs, state = Actor(world_model, agent, context_length), frames(10), None
    for t in range(5):
        _, state = actor.act(obs[t], state)
    saved = {name: tensor.clone() for name, tensor in state.tensors().items()}
    results = []
    for restored in (state, actor.init_state(obs[0])):
        restored.load(saved)
        torch.manual_seed(1)
        actions = [actor.act(obs[t], restored)[0] for t in range(5, 10)]
        results.append((np.stack(actions), restored.tensors()))
    assert np.array_equal(results[0][0], results[1][0])
    assert all(torch.equal(results[0][1][name], tensor) for name, tensor in results[1][1].items())


def test_single_observations_need_no_leading_axis():
    for continuous, shape in ((False, ()), (True, (3,))):
        world_model = make_world_model("Mamba2", continuous)
        actor = Actor(world_model, make_agent_for(world_model), 0, greedy=True)
        action, state = actor.act(frames(1, 1)[0, 0])
        action, _ = actor.act(frames(1, 1)[0, 0], state)
        assert np.shape(action) == shape


def test_unknown_act_on_is_refused():
    with pytest.raises(ValueError, match="act_on is 'both', expected 'prior' or 'posterior'"):
        Actor(make_world_model("Mamba2"), None, 0, "both")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("context_length", [0, 4])
def test_a_captured_actor_plays_the_same_actions_and_does_not_wait(context_length):
    """The graph reads each new observation, and what is launched behind it leaves the action alone."""
    episode, played = frames(12), []
    for capture in (False, True):
        world_model = make_world_model().float().cuda()
        actor = Actor(world_model, make_agent_for(world_model).cuda(), context_length, capture=capture)
        state = actor.init_state(episode[0])
        torch.manual_seed(1)
        actions = []
        for t, obs in enumerate(episode):
            chosen, state = actor.begin(obs, state, np.full(2, t in (0, 7)))
            assert chosen.is_known is not capture
            torch.zeros(1 << 24, device="cuda").sin_()
            actions.append(chosen.wait())
        played.append(np.stack(actions))
    assert np.array_equal(*played) and len(np.unique(played[0])) > 1

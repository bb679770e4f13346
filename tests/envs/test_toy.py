"""Toy tasks: their rules, their look, and that they are honest gymnasium environments."""

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from envs.common import UnknownEnvironment
from envs.toy import TOY_NAMES, Catch, Reach, Recall, build_toy


def play(env, actions, seed=None):
    """Everything an outsider sees of one episode: (observations, rewards, terminated, truncated of each step)."""
    obs, _ = env.reset(seed=seed)
    steps = [(obs, 0.0, False, False)]
    for action in actions:
        steps.append(env.step(action)[:4])
        if steps[-1][2] or steps[-1][3]:
            break
    return steps


@pytest.mark.filterwarnings("ignore:.*alternative render modes.*:UserWarning")
@pytest.mark.parametrize("image_size", [32, 64])
@pytest.mark.parametrize("name", TOY_NAMES)
def test_passes_the_checker(name, image_size):
    check_env(build_toy(name, image_size, recall_delay=3, recall_varies=True))


def test_random_catch_returns_minus_0_6():
    """The quickstart's promise 'above 0.9' is measured against this."""
    env = Catch(32)
    rng = np.random.default_rng(0)
    returns = [play(env, rng.integers(3, size=9), seed=0 if i == 0 else None)[-1][1] for i in range(4000)]
    assert abs(np.mean(returns) + 0.6) < 0.05                          # standard error 0.013


def test_catch_is_won_by_following_the_ball():
    env = Catch(64)
    for seed in range(20):
        env.reset(seed=seed)
        for step in range(9):
            obs, reward, terminated, truncated, _ = env.step(1 + np.sign(env.ball_column - env.paddle))
            assert terminated == (step == 8)
            assert not truncated
        assert reward == 1.0
        assert (obs[-1] != 0).any()


def test_catch_shows_ball_and_paddle():
    env = Catch(60)                                                    # 6 x 12 pixels for a cell
    obs, _ = env.reset(seed=1)
    column = slice(12 * env.ball_column, 12 * env.ball_column + 12)
    assert (obs[:6, column] == 255).all()
    assert (obs[54:, 24:36] == (0, 255, 0)).all()
    assert (obs > 0).any(axis=2).sum() == 2 * 6 * 12


@pytest.mark.parametrize("delay", [0, 1, 8, 40])
def test_recall_pays_for_the_remembered_colour_only(delay):
    env = Recall(32, delay)
    for answer in range(3):
        steps = play(env, [answer] * 100, seed=answer)
        colour = [tuple(c) for c in Recall.COLOURS].index(tuple(steps[0][0][0, 0]))
        assert (steps[0][0] == steps[0][0][0, 0]).all()
        assert len(steps) == delay + 7                                 # colour, wait, question, colour, after the end
        waiting = [obs for obs, *_ in steps[1 : delay + 1]]
        assert all((obs == obs[0, 0, 0]).all() for obs in waiting)     # grey, whatever the colour
        levels = [int(obs[0, 0, 0]) for obs in waiting]
        assert levels == sorted(levels) and len(set(levels)) == delay
        questions = [obs for obs, *_ in steps[delay + 1 : delay + 5]]
        assert all((obs == questions[0]).all() and (obs[16, 16] == 255).all() for obs in questions)
        assert (steps[delay + 5][0] == steps[0][0]).all()              # the colour again, once it is answered
        rewards = [step[1] for step in steps]
        assert rewards == [0.0] * (delay + 3) + [(answer == colour) / 3] * 3 + [0.0]
        assert [step[2] for step in steps] == [False] * (delay + 6) + [True]


def test_recalls_delay_varies_up_to_the_longest():
    """Each length as often as any other, and no random number more than before where it does not vary."""
    env, fixed = Recall(8, 4, varies=True), Recall(8, 4)
    lengths = [len(play(env, [0] * 100, seed=0 if i == 0 else None)) - 7 for i in range(1000)]
    counts = np.bincount(lengths)
    assert len(counts) == 5 and (abs(counts - 200) < 60).all()         # 4.7 standard deviations
    rng, _ = gymnasium.utils.seeding.np_random(0)
    episodes = [(fixed.reset(seed=0 if i == 0 else None) and fixed.delay, fixed.colour) for i in range(9)]
    assert episodes == [(4, int(rng.integers(3))) for _ in range(9)]


def test_recall_colours_are_even():
    env = Recall(8, 0)
    env.reset(seed=0)
    counts = np.bincount([env.reset() and env.colour for _ in range(3000)], minlength=3)
    assert (abs(counts - 1000) < 120).all()                            # 4.6 standard deviations


def test_reach_rewards_closeness_and_ends_by_truncation():
    env = Reach(64)
    env.reset(seed=3)
    for step in range(20):
        error = np.subtract(env.target, env.point)
        _, reward, terminated, truncated, _ = env.step((error / 0.2).astype(np.float32))
        assert not terminated
        assert truncated == (step == 19)
    assert reward > 0.999                                              # float32 actions: not exactly 1
    assert np.allclose(env.point, env.target, atol=1e-6)


def test_reach_starts_anywhere_and_asks_for_each_of_four_places():
    env = Reach(16)
    env.reset(seed=0)
    starts, targets = zip(*((env.point, tuple(env.target)) for _ in range(400) if env.reset()), strict=True)
    places, counts = np.unique(targets, axis=0, return_counts=True)
    assert places.tolist() == [[-0.6, -0.6], [-0.6, 0.6], [0.6, -0.6], [0.6, 0.6]]
    assert (abs(counts - 100) < 40).all()                              # 4.6 standard deviations
    assert np.histogram2d(*np.transpose(starts), bins=3, range=[[-1, 1]] * 2)[0].min() > 10


def test_reach_clips_wild_actions():
    env = Reach(32)
    env.reset(seed=0)
    before = env.point
    env.step(np.array([100.0, 0.0], np.float32))
    assert np.isclose(env.point[0], min(before[0] + 0.2, 1.0))


@pytest.mark.parametrize("name", TOY_NAMES)
def test_state_restores_the_future(name):
    """A resumed run must meet the same episodes, this one's rest and the ones after."""
    first, second = build_toy(name, 32, 4, True), build_toy(name, 32, 4, True)
    first.action_space.seed(0)
    first.reset(seed=5)
    first.step(first.action_space.sample())
    second.set_state(first.get_state())
    for _ in range(60):
        action = first.action_space.sample()
        (obs, *rest, _), (other_obs, *other_rest, _) = first.step(action), second.step(action)
        assert np.array_equal(obs, other_obs)
        assert rest == other_rest
        if rest[1] or rest[2]:
            assert np.array_equal(first.reset()[0], second.reset()[0])


def test_recall_goes_on_from_a_state_that_knows_no_delay():
    """A run that was begun before the delay could vary."""
    first, second = build_toy("Toy/Recall-v0", 32, 4, False), build_toy("Toy/Recall-v0", 32, 4, False)
    first.reset(seed=5)
    first.step(0)
    second.set_state({name: value for name, value in first.get_state().items() if name != "delay"})
    assert second.get_state() == first.get_state()


def test_unknown_toy_names_the_nearest():
    with pytest.raises(UnknownEnvironment, match="nearest: Toy/Catch-v0"):
        build_toy("Toy/Cach-v0", 32, 0, False)


def test_spaces():
    assert isinstance(Reach(32).action_space, gymnasium.spaces.Box)
    assert Reach(32).action_space.shape == (2,)
    assert Recall(48, 2).observation_space.shape == (48, 48, 3)

"""Atari on the real emulator: what one step shows, pays and ends, judged by raw frames played in parallel."""

import os
import subprocess
import sys

import ale_py
import cv2
import numpy as np
import pytest
from ale_py import roms
from gymnasium.utils.env_checker import check_env

from envs.common import UnknownEnvironment
from envs.my_atari import (
    ATARI_100K_GAMES,
    Atari,
    atari_games,
    build_atari,
    human_normalised_score,
    reference_scores,
)


def make(rom="breakout", image_size=64, frame_skip=4, repeat_action_probability=0.0, noop_max=0, **kwargs):
    return Atari(rom, image_size, frame_skip, repeat_action_probability, noop_max, **kwargs)


def raw_twin(env, rom):
    """A bare emulator in the same state as `env`, to be stepped frame by frame."""
    ale = ale_py.ALEInterface()
    ale.setFloat("repeat_action_probability", 0.0)
    ale.loadROM(roms.get_rom_path(rom))
    ale.restoreState(env.ale.cloneState(include_rng=True))
    return ale


def shown(frames):
    """What the specification says of a step that played these raw frames."""
    image = frames[-1] if len(frames) == 1 else np.maximum(frames[-1], frames[-2])
    return cv2.resize(image, (64, 64), interpolation=cv2.INTER_AREA)


@pytest.mark.parametrize(("rom", "frame_skip"), [("breakout", 1), ("breakout", 4), ("road_runner", 3), ("seaquest", 4)])
def test_shows_the_maximum_of_the_steps_last_two_raw_frames(rom, frame_skip):
    """Through lost lives, the game's end (early in a step) and resets: never a frame of another step."""
    env = make(rom, frame_skip=frame_skip)
    rng = np.random.default_rng(frame_skip)
    env.reset(seed=1)
    twin = raw_twin(env, rom)
    lost = 0
    for _ in range(1600 // frame_skip):
        action = int(rng.integers(env.action_space.n))
        frames, reward = [], 0.0
        while len(frames) < frame_skip and not twin.game_over():
            reward += twin.act(env.actions[action])
            frames.append(twin.getScreenRGB())
        obs, got_reward, terminated, truncated, info = env.step(action)
        assert np.array_equal(obs, shown(frames))
        assert got_reward == reward
        assert terminated == twin.game_over()
        assert not truncated
        lost += info["life_loss"]
        if terminated:
            obs, info = env.reset()
            assert np.array_equal(obs, shown([env.ale.getScreenRGB()]))
            assert not info["life_loss"]
            twin.restoreState(env.ale.cloneState(include_rng=True))
    assert lost > 0


def test_game_over_within_a_step_shows_no_older_frame():
    """A game that ends on the first raw frame of a step: that frame alone, not the one before the step."""
    env = make("breakout", frame_skip=1)
    rng = np.random.default_rng(0)
    env.reset(seed=0)
    actions, terminated = [], False
    while not terminated:                                              # how many raw frames until the end
        actions.append(int(rng.integers(4)))
        terminated = env.step(actions[-1])[2]
    env.reset(seed=0)
    for action in actions[:-1]:
        env.step(action)
    twin = raw_twin(env, "breakout")
    twin.act(env.actions[actions[-1]])
    env.frame_skip = 4
    obs, _, terminated, _, _ = env.step(actions[-1])
    assert terminated
    assert np.array_equal(obs, shown([twin.getScreenRGB()]))


def test_a_lost_life_is_neither_an_end_nor_a_reset():
    env = make("breakout")
    env.reset(seed=0)
    rng = np.random.default_rng(0)
    lives, losses, terminated = [env.ale.lives()], [], False
    while not terminated:
        _, _, terminated, _, info = env.step(int(rng.integers(4)))
        lives.append(info["lives"])
        losses.append(info["life_loss"])
        assert info["life_loss"] == (lives[-1] < lives[-2])
    assert sum(losses) == 5                                            # Breakout has five
    assert losses[-1]


def test_frame_limit_truncates():
    env = make("pong", max_raw_frames=100)
    env.reset(seed=0)
    ends = [env.step(0)[2:4] for _ in range(25)]
    assert ends == [(False, False)] * 24 + [(False, True)]
    env.reset()
    assert env.step(0)[2:4] == (False, False)
    assert make("pong").max_raw_frames == 108_000


def test_game_over_at_the_limit_is_a_termination():
    env = make("breakout", max_raw_frames=1)
    env.reset(seed=0)
    rng = np.random.default_rng(0)
    while not (end := env.step(int(rng.integers(4)))[2:4])[0]:
        assert end == (False, True)
    assert end == (True, False)


def rollout(env, steps, seed):
    rng = np.random.default_rng(0)
    trace = [env.reset(seed=seed)[0]]
    for _ in range(steps):
        obs, _, terminated, truncated, _ = env.step(int(rng.integers(env.action_space.n)))
        trace.append(env.reset()[0] if terminated or truncated else obs)
    return np.stack(trace)


def test_same_seed_same_trajectory_with_sticky_actions_and_noops():
    kwargs = {"repeat_action_probability": 0.5, "noop_max": 30}
    first, again, other = (rollout(make(**kwargs), 300, seed) for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_reseeding_a_used_environment_starts_over():
    env = make(repeat_action_probability=0.5)
    assert np.array_equal(rollout(env, 100, 3), rollout(env, 100, 3))


def test_without_sticky_actions_every_action_is_played():
    """Same state, same action, any emulator seed: same future."""
    first, second = rollout(make(), 200, 1), rollout(make(), 200, 2)
    assert np.array_equal(first, second)


def test_noops_play_1_to_n_raw_frames():
    env = make("pong", noop_max=3)
    env.reset(seed=0)
    counts = {(env.reset(), env.ale.getEpisodeFrameNumber())[1] for _ in range(40)}
    assert counts == {1, 2, 3}


def game_cases():
    """A few benchmark games by default (Qbert is the one whose future depends on more than its saved state)."""
    fast = ("Breakout", "Pong", "Qbert", "UpNDown")
    return [pytest.param(game, marks=() if game in fast else pytest.mark.slow) for game in ATARI_100K_GAMES]


@pytest.mark.parametrize("played", [0, 1, 40])
@pytest.mark.parametrize("game", game_cases())
def test_state_restores_the_future(game, played):
    """In a fresh emulator, from an episode's start and from its midst, with sticky actions and no-op starts."""
    name = f"ALE/{game}-v5"
    first, second = (build_atari(name, 64, 1 if played == 1 else 4, 0.25, 5 if played else 0) for _ in range(2))
    rng = np.random.default_rng(0)
    first.reset(seed=1)
    for _ in range(played):
        if first.step(int(rng.integers(first.action_space.n)))[2]:
            first.reset()
    second.set_state(first.get_state())
    for _ in range(50):
        action = int(rng.integers(first.action_space.n))
        (obs, *rest), (other_obs, *other_rest) = first.step(action), second.step(action)
        assert np.array_equal(obs, other_obs)
        assert rest == other_rest
        if rest[1]:
            first.reset(), second.reset()
    assert np.array_equal(first.reset()[0], second.reset()[0])


@pytest.mark.filterwarnings("ignore:.*alternative render modes.*:UserWarning")
def test_passes_the_checker():
    check_env(make("pong"))


def test_minimal_action_set_and_image_size():
    assert make("pong").action_space.n == 6
    assert make("breakout", image_size=32).reset(seed=0)[0].shape == (32, 32, 3)


def test_the_26_games_exist():
    assert len(ATARI_100K_GAMES) == 26
    assert set(ATARI_100K_GAMES) <= set(atari_games())


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_game_loads():
    for name in atari_games():
        env = build_atari(f"ALE/{name}-v5", 64, 4, 0.0, 0)
        env.reset(seed=0)
        env.step(0)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("ALE/Pongg-v5", "ALE/Pong-v5"), ("ALE/mspacman-v5", "ALE/MsPacman-v5"), ("ALE/Pong-v4", "ALE/Pong-v5")],
)
def test_unknown_game_names_the_nearest(name, nearest):
    with pytest.raises(UnknownEnvironment, match=f"no such Atari game; nearest: .*{nearest}"):
        build_atari(name, 64, 4, 0.0, 0)


def test_is_silent_and_writes_no_files(tmp_path):
    script = (
        "from envs.my_atari import build_atari; e = build_atari('ALE/Breakout-v5', 64, 4, 0.25, 3); e.reset(seed=0);"
        "[e.step(i % 4) for i in range(50)]; e.set_state(e.get_state()); e.close()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.getcwd(), "HOME": str(tmp_path)},
        capture_output=True,
        check=True,
    )
    assert (done.stdout, done.stderr) == (b"", b"")
    assert list(tmp_path.iterdir()) == []


def test_reference_scores():
    scores = reference_scores()
    assert tuple(scores) == ATARI_100K_GAMES
    assert scores["Pong"]["random"] == -20.7
    assert scores["Pong"]["human"] == 14.6
    assert "drama_mamba2" not in scores["Pong"]                        # an unknown score is absent, not zero
    means = np.mean([human_normalised_score(game, scores[game]["dreamerv3_2025"]) for game in scores])
    assert abs(means - 1.247) < 0.0005                                 # as the table's source gives it


def test_human_normalised_score():
    assert human_normalised_score("ALE/Pong-v5", -20.7) == 0.0
    assert human_normalised_score("Pong", 14.6) == 1.0
    assert human_normalised_score("Toy/Catch-v0", 1.0) is None

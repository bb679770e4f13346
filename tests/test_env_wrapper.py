"""Building any environment by its name, and what the wrapper around it promises and refuses."""

import importlib.metadata
import importlib.util
import io
import subprocess
import sys

import gymnasium
import numpy as np
import pytest
import torch

from env_wrapper import Episode, environment_report, make_env, make_vec_env
from envs import rendering
from envs.common import EnvironmentOutputError, EnvironmentUnavailable, UnknownEnvironment, UnusableEnvironment
from envs.parallel import EPISODE_KEYS, WorkerFailed
from utils import load_config


@pytest.fixture(scope="module")
def config():
    return load_config(["--Env.Toy.RecallDelay", "2"], "train.py").config


BUILT_IN = ["ALE/Pong-v5", "ALE/Breakout-v5", "Toy/Catch-v0", "Toy/Recall-v0", "Toy/Reach-v0"]


@pytest.mark.parametrize("name", BUILT_IN)
def test_one_interface_for_all(name, config):
    env = make_env(name, config, seed=0)
    assert env.observation_space == gymnasium.spaces.Box(0, 255, (64, 64, 3), np.uint8)
    obs, info = env.reset()
    assert env.observation_space.contains(obs)
    assert {key: info[key] for key in EPISODE_KEYS} == dict(zip(EPISODE_KEYS, (True, False, 0.0, 0), strict=True))
    env.action_space.seed(0)
    total, length, ended = 0.0, 0, False
    while not ended and length < 50:
        obs, reward, terminated, truncated, info = env.step(env.action_space.sample())
        total, length, ended = total + reward, length + 1, terminated or truncated
        assert env.observation_space.contains(obs)
        assert (info["is_first"], info["episode_return"], info["episode_length"]) == (False, total, length)
        assert isinstance(info["life_loss"], bool)
    assert ended == name.startswith("Toy/")


def test_configuration_reaches_the_environments(config):
    words = ["--Env.Atari.FrameSkip", "2", "--Env.Atari.NoopMax", "7", "--Env.Atari.RepeatActionProbability", "0.25"]
    atari = make_env("ALE/Pong-v5", load_config(words, "train.py").config, 0).unwrapped
    assert (atari.frame_skip, atari.noop_max, atari.repeat_action_probability) == (2, 7, 0.25)
    default = make_env("ALE/Pong-v5", config, 0).unwrapped
    assert (default.frame_skip, default.noop_max, default.repeat_action_probability) == (4, 0, 0.0)
    recall = make_env("Toy/Recall-v0", config, 0).unwrapped
    assert (recall.delay, recall.varies) == (2, False)


@pytest.mark.parametrize("name", BUILT_IN)
def test_seed_is_given_once(name, config):
    """Same seed, same stream of episodes; the second episode is not the first one over again."""

    def first_observations(env):
        frames = []
        for _ in range(4):
            frames.append(env.reset()[0])
            frames.extend(env.step(env.action_space.sample())[0] for _ in range(4))
        return np.stack(frames)

    envs = [make_env(name, config, seed) for seed in (3, 3, 4)]
    for env in envs:
        env.action_space.seed(0)
    one, same, other = (first_observations(env) for env in envs)
    assert np.array_equal(one, same)
    if name.startswith("Toy/"):
        assert not np.array_equal(one, other)
        assert not all(np.array_equal(one[:5], one[5 * i : 5 * i + 5]) for i in range(1, 4))


@pytest.mark.parametrize("name", BUILT_IN)
def test_state_is_plain_and_restores_everything(name, config):
    """Checkpoints hold plain values only (torch.load with weights_only), accounts included."""
    first, second = make_env(name, config, 0), make_env(name, config, 1)
    first.action_space.seed(0)
    first.reset()
    first.step(first.action_space.sample())
    file = io.BytesIO()
    torch.save(first.get_state(), file)
    file.seek(0)
    second.set_state(torch.load(file, weights_only=True))
    for _ in range(12):
        action = first.action_space.sample()
        (obs, *rest), (other_obs, *other_rest) = first.step(action), second.step(action)
        assert np.array_equal(obs, other_obs)
        assert rest == other_rest
        if rest[1] or rest[2]:
            assert np.array_equal(first.reset()[0], second.reset()[0])


# --------------------------------------------------------------------------------------- environments of a user's own


class Frames(gymnasium.Env):
    """Image observations from `frame`, then whatever `outcome` says."""

    def __init__(self, frame=None, space=None, action_space=None, outcome=(1.0, False, False)):
        self.frame = np.full((20, 30, 3), 7, np.uint8) if frame is None else frame
        self.observation_space = gymnasium.spaces.Box(0, 255, (20, 30, 3), np.uint8) if space is None else space
        self.action_space = gymnasium.spaces.Discrete(2) if action_space is None else action_space
        self.outcome, self.actions = outcome, []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.frame, {}

    def step(self, action):
        self.actions.append(action)
        return self.frame, *self.outcome, {}


class Numbers(gymnasium.Env):
    """No images, but frames to render."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012
    observation_space = gymnasium.spaces.Box(-1, 1, (4,))
    action_space = gymnasium.spaces.Discrete(3, start=5)

    def __init__(self, render_mode=None):
        self.render_mode, self.time = render_mode, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return np.zeros(4, np.float32), {}

    def step(self, action):
        assert action in (5, 6, 7)
        self.time += 1
        return np.zeros(4, np.float32), 0.0, False, False, {}

    def render(self):
        return np.full((100, 80, 3), self.time, np.uint8)


@pytest.fixture
def register():
    """register(entry_point, **kwargs of gymnasium.register) -> id, forgotten after the test."""
    names = []

    def add(entry_point, **kwargs):
        names.append(f"Mine/Test{len(names)}-v0")
        gymnasium.register(names[-1], entry_point=entry_point, **kwargs)
        return names[-1]

    yield add
    for name in names:
        del gymnasium.registry[name]


def uint8_box(*shape):
    return gymnasium.spaces.Box(0, 255, shape, np.uint8)


@pytest.mark.parametrize("shape", [(20, 30, 3), (20, 30, 1), (20, 30), (3, 20, 30), (1, 20, 30)])
def test_images_of_any_layout(shape, register, config):
    frame = np.full(shape, 7, np.uint8)
    env = make_env(register(lambda: Frames(frame, uint8_box(*shape))), config, 0)
    obs, _ = env.reset()
    assert obs.shape == (64, 64, 3)
    assert (obs == 7).all()
    assert (env.step(0)[0] == 7).all()


def test_render_frames_in_place_of_numbers(register, config):
    """And actions that do not start at 0 do from here."""
    env = make_env(register(Numbers), config, 0)
    assert env.action_space == gymnasium.spaces.Discrete(3)
    assert (env.reset()[0] == 0).all()
    assert [env.step(action)[0][0, 0, 0] for action in range(3)] == [1, 2, 3]


def test_classic_control_by_frames(config):
    pytest.importorskip("pygame")
    env = make_env("CartPole-v1", config, 0)
    assert len(np.unique(env.reset()[0])) > 1
    assert env.step(1)[0].shape == (64, 64, 3)


def test_a_missing_package_is_one_line_without_restarts(register, config):
    """Whether the environment notices when it is built or when it draws."""

    class Undrawn(Numbers):
        def render(self):
            raise gymnasium.error.DependencyNotInstalled("brush is not installed, run `pip install brush`")

    def unbuilt(**arguments):
        raise gymnasium.error.DependencyNotInstalled("box is not installed, run `pip install box`")

    with pytest.raises(EnvironmentUnavailable, match=r"^Mine/.*: box is not installed, run `pip install box`$"):
        make_env(register(unbuilt), config, 0)
    one_line = r"^environment 0 of 1 .*, step 0 .*: brush is not installed, run `pip install brush`$"
    with (
        make_vec_env(register(Undrawn), config, 1, 0, asynchronous=False) as envs,
        pytest.raises(WorkerFailed, match=one_line),
    ):
        envs.reset()


def test_registered_time_limit_truncates(register, config):
    env = make_env(register(Frames, max_episode_steps=3), config, 0)
    env.reset()
    assert [env.step(0)[2:4] for _ in range(3)] == [(False, False), (False, False), (False, True)]


def test_box_actions_are_scaled_and_clipped(register, config):
    mine = Frames(action_space=gymnasium.spaces.Box(np.array([0.0, -4.0]), np.array([2.0, 0.0]), dtype=np.float64))
    env = make_env(register(lambda: mine), config, 0)
    assert env.action_space == gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    env.reset()
    for action in ([-1, -1], [1, 1], [0, 0.5], [9, -9]):
        env.step(np.array(action, np.float32))
    assert np.allclose(mine.actions, [[0, -4], [2, 0], [1, -1], [2, -4]])


def test_episodes_of_length_one(register, config):
    with make_vec_env(register(lambda: Frames(outcome=(2.0, True, False))), config, 2, 0, asynchronous=False) as envs:
        envs.reset()
        for _ in range(3):
            result = envs.step(np.array([0, 1]))
            assert result.terminated.all()
            assert result.is_first.all()
            assert (result.episode_length == 1).all()
            assert (result.episode_return == 2.0).all()


def slow_if_installed(name, package):
    absent = pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")
    return pytest.param(name, marks=[pytest.mark.slow, absent])


FAMILIES = [
    "ALE/Pong-v5",
    "Toy/Recall-v0",
    "Toy/Reach-v0",
    "examples.dodge:Dodge-v0",
    slow_if_installed("CartPole-v1", "pygame"),
    slow_if_installed("dmc/walker-walk", "dm_control"),
    slow_if_installed("memory_maze:MemoryMaze-9x9-v0", "memory_maze"),
]


@pytest.mark.parametrize("name", FAMILIES)
def test_same_seed_same_trajectory_for_any_number_of_workers(name, config):
    """Environment i plays the same episodes alone, beside others, in this process and in one of its own."""

    def play(num_envs, asynchronous):
        rng = np.random.default_rng(0)
        with make_vec_env(name, config, num_envs, 11, asynchronous) as envs:
            trajectory = [envs.reset()]
            for _ in range(24):
                if hasattr(envs.action_space, "n"):
                    actions = rng.integers(envs.action_space.n, size=3)
                else:
                    actions = rng.uniform(-1, 1, (3, *envs.action_space.shape)).astype(np.float32)
                result = envs.step(actions[:num_envs])
                trajectory += [result.obs, result.reward, result.terminated, result.truncated]
        return trajectory

    expected = play(2, False)
    for num_envs in (1, 3):
        common = min(num_envs, 2)
        for one, other in zip(expected, play(num_envs, True), strict=True):
            assert np.array_equal(one[:common], other[:common])


def test_workers_know_what_the_script_registered(register, config):
    """Registered in this process only; the workers start from a clean one."""
    with make_vec_env(register(lambda: Frames()), config, 2, 0) as envs:
        assert (envs.reset() == 7).all()
        assert (envs.step(np.array([0, 1])).reward == 1.0).all()


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        ((float("nan"), False, False), "reward is nan, expected a finite number"),
        ((np.inf, False, False), "reward is inf, expected a finite number"),
        ((1e39, False, False), r"reward is 1e\+39, expected a finite number of at most 3.4e\+38"),
        ((None, False, False), "reward is None, expected a number"),
        (("1", False, False), "reward is '1', expected a number"),
        ((np.zeros(2), False, False), r"reward has shape \(2,\), expected one number"),
        ((0.0, 1, False), "terminated is 1, expected True or False"),
        ((0.0, False, None), "truncated is None, expected True or False"),
        ((0.0, False), r"step\(\) returned a tuple of 4 values, expected a tuple of observation, reward, terminated,"),
    ],
)
def test_bad_outcome_names_environment_and_step(outcome, words, register, config):
    mine = Frames()
    name = register(lambda: mine)
    env = make_env(name, config, 0)
    env.reset()
    env.step(0)
    mine.outcome = outcome
    with pytest.raises(EnvironmentOutputError, match=rf"^{name}, step 2 \(step 2 of its episode\): {words}"):
        env.step(0)


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (np.zeros((20, 30, 3), np.float32), r"observation is an array of float32 \(20, 30, 3\), expected a uint8"),
        (np.zeros((30, 20, 3), np.uint8), r"observation is an array of uint8 \(30, 20, 3\), its space says Box"),
        ([[1, 2]], r"observation is list \[\[1, 2\]\], its space says Box"),
        (None, "observation is NoneType None, its space says Box"),
    ],
)
def test_bad_observation_names_environment_and_step(frame, words, register, config):
    mine = Frames()
    name = register(lambda: mine)
    env = make_env(name, config, 0)
    env.reset()
    mine.frame = frame
    with pytest.raises(EnvironmentOutputError, match=rf"^{name}, step 1 .*: {words}"):
        env.step(0)


def test_a_range_that_the_space_denies_is_refused(register, config):
    """Images in 0..1 that claim to be bytes, say: the agent would see black."""
    mine = Frames(np.full((20, 30, 3), 7, np.uint8), gymnasium.spaces.Box(3, 9, (20, 30, 3), np.uint8))
    name = register(lambda: mine)
    env = make_env(name, config, 0)
    env.reset()
    for wrong in (2, 10):
        mine.frame = np.full((20, 30, 3), wrong, np.uint8)
        words = rf"observation is an array of uint8 \(20, 30, 3\) in {wrong}\.\.{wrong}, its space says Box\(3, 9"
        with pytest.raises(EnvironmentOutputError, match=rf"^{name}, step {wrong // 8 + 1} .*: {words}"):
            env.step(0)


class BadReset(Frames):
    """reset() answers whatever `answer` is."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def reset(self, *, seed=None, options=None):
        return self.answer


@pytest.mark.parametrize("limit", [None, 5])
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (np.zeros((20, 30, 3), np.uint8), r"reset\(\) returned an array of uint8 .*, expected a tuple of obs"),
        ((np.zeros((20, 30, 3), np.uint8), 0.0, True, False, {}), r"reset\(\) returned a tuple of 5 values"),
        ((np.zeros((20, 30, 3), np.uint8), None), r"reset\(\) returned NoneType None as info, expected a dict"),
        ((np.zeros((20, 30, 3)), {}), r"observation is an array of float64 \(20, 30, 3\), expected a uint8 image"),
    ],
)
def test_a_reset_that_answers_otherwise_is_refused(answer, words, limit, register, config):
    """Among them: one that says that the episode is over already."""
    name = register(lambda: BadReset(answer), max_episode_steps=limit, order_enforce=limit is not None)
    with pytest.raises(EnvironmentOutputError, match=rf"^{name}, step 0 .*: {words}"):
        make_env(name, config, 0).reset()


def test_a_life_loss_that_is_no_flag_is_refused(register, config):
    class Lives(Frames):
        def step(self, action):
            return self.frame, 0.0, False, False, {"life_loss": np.zeros(2, bool)}

    env = make_env(register(Lives), config, 0)
    env.reset()
    with pytest.raises(EnvironmentOutputError, match=r"step 1 .*: info\['life_loss'\] is array.*expected True"):
        env.step(0)


def test_an_exception_is_noted_with_environment_and_step(register, config):
    class Breaks(Frames):
        def step(self, action):
            raise ZeroDivisionError("a bug of its own")

    name = register(Breaks)
    env = make_env(name, config, 0)
    env.reset()
    with pytest.raises(ZeroDivisionError, match="a bug of its own") as caught:
        env.step(0)
    assert caught.value.__notes__ == [f"raised by environment {name}, step 1 (step 1 of its episode)"]


def test_step_without_an_episode_is_refused(config):
    env = make_env("Toy/Catch-v0", config, 0)
    with pytest.raises(RuntimeError, match=r"no episode under way; call reset\(\)"):
        env.step(1)
    env.reset()
    while not env.step(1)[2]:
        pass
    with pytest.raises(RuntimeError, match="no episode under way"):
        env.step(1)


@pytest.mark.parametrize(
    ("name", "action", "words"),
    [
        ("Toy/Catch-v0", 3, r"action 3 is not one of 0\.\.2"),
        ("Toy/Catch-v0", 0.5, r"action 0.5 is not one of 0\.\.2"),
        ("Toy/Reach-v0", np.zeros(3), r"has to be \(2,\) finite numbers"),
        ("Toy/Reach-v0", np.array([0.0, np.nan]), r"has to be \(2,\) finite numbers"),
    ],
)
def test_bad_action_is_refused(name, action, words, config):
    env = make_env(name, config, 0)
    env.reset()
    with pytest.raises(ValueError, match=words):
        env.step(action)


@pytest.mark.parametrize(
    ("action_space", "words"),
    [
        (gymnasium.spaces.MultiBinary(3), "its action space is MultiBinary"),
        (gymnasium.spaces.Box(-np.inf, np.inf, (2,)), "expected Discrete, or a vector Box"),
        (gymnasium.spaces.Box(-1, 1, (2, 2)), "expected Discrete, or a vector Box"),
    ],
)
def test_unusable_action_space_is_refused(action_space, words, register, config):
    name = register(lambda: Frames(action_space=action_space))
    with pytest.raises(UnusableEnvironment, match=rf"{name}: .*{words}"):
        make_env(name, config, 0)


def test_no_images_and_no_frames_is_refused(register, config):
    name = register(lambda: Frames(space=gymnasium.spaces.Box(-1, 1, (4,))))
    with pytest.raises(UnusableEnvironment, match=rf"{name}: its observations are Box.*cannot render 'rgb_array'"):
        make_env(name, config, 0)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ALE/Pnog-v5", "no such Atari game; nearest: .*ALE/Pong-v5"),
        ("Toy/Ctach-v0", "no such toy task; nearest: Toy/Catch-v0"),
        ("CartPoel-v1", "not an environment that this machine knows; nearest: .*CartPole-v1"),
        ("", "not an environment that this machine knows"),
        ("no_such_module:Thing-v0", "cannot import the module before the colon"),
    ],
)
def test_unknown_name_is_one_clear_line(name, words, config):
    for build in (lambda: make_env(name, config, 0), lambda: make_vec_env(name, config, 2, 0)):
        with pytest.raises(UnknownEnvironment, match=f"^Env_name '{name}': {words}") as caught:
            build()
        assert "\n" not in str(caught.value)


def test_module_before_the_colon_is_imported(config, tmp_path, monkeypatch):
    (tmp_path / "drama_test_game.py").write_text(
        "import gymnasium\nfrom envs.toy import Catch\n"
        "gymnasium.register('Mine/Caught-v0', entry_point=lambda: Catch(64))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert make_env("drama_test_game:Mine/Caught-v0", config, 0).reset()[0].any()
    with make_vec_env("drama_test_game:Mine/Caught-v0", config, 1, 0, asynchronous=True) as envs:
        assert envs.reset().any()
    del gymnasium.registry["Mine/Caught-v0"]


def test_unsupported_state_says_so(register, config):
    env = make_env(register(Frames), config, 0)
    env.reset()
    with pytest.raises(NotImplementedError, match=r"Mine/Test0-v0: its class has no get_state\(\)"):
        env.get_state()


class Stateful(Frames):
    def get_state(self):
        return {"pixel": int(self.frame[0, 0, 0]), "rng": self.np_random.bit_generator.state}

    def set_state(self, state):
        self.frame = np.full((20, 30, 3), state["pixel"], np.uint8)
        self.np_random.bit_generator.state = state["rng"]

    def step(self, action):
        self.frame = self.np_random.integers(256, size=(20, 30, 3), dtype=np.uint8)
        return super().step(action)


def test_state_of_a_registered_class_and_its_time_limit(register, config):
    name = register(Stateful, max_episode_steps=5)
    first, second = make_env(name, config, 0), make_env(name, config, 1)
    first.reset()
    for _ in range(2):
        first.step(0)
    second.set_state(first.get_state())
    for step in range(3):
        (obs, *rest), (other_obs, *other_rest) = first.step(0), second.step(0)
        assert np.array_equal(obs, other_obs)
        assert rest == other_rest
        assert rest[2] == (step == 2)


def test_report_says_what_to_install(monkeypatch):
    missing = {"dm_control", "pygame"}
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else found(name))
    report = {line.family: line for line in environment_report()}
    assert report["ALE/<Game>-v5"].ok
    assert not report["dmc/<domain>-<task>"].ok
    assert report["dmc/<domain>-<task>"].detail == "not installed: dm_control"
    assert report["gymnasium ids that pygame draws"].fix == "pip install pygame==2.6.1"
    assert "rendering" not in report


@pytest.mark.parametrize("failure", [None, "no EGL"])
def test_report_probes_rendering(failure, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1")
    monkeypatch.setattr(rendering, "probe_backend", lambda backend: failure)
    monkeypatch.setenv("MUJOCO_GL", "egl")
    status = environment_report()[-1]
    assert (status.family, status.ok) == ("rendering", failure is None)
    assert ("libosmesa6" in status.fix) == (failure is not None)


def test_does_not_import_what_it_does_not_need():
    """The control suite and Memory Maze are optional, and mujoco wants a rendering backend chosen first."""
    script = "import env_wrapper, sys; print([m for m in ('mujoco', 'dm_control', 'gym', 'torch') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_wrapper_stands_alone():
    env = Episode(Frames(np.zeros((8, 8, 3), np.uint8), uint8_box(8, 8, 3)), "Plain", None)
    assert env.reset(seed=4)[1]["is_first"]
    assert env.step(np.int64(1))[1] == 1.0

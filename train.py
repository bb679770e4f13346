"""Train Drama (arXiv 2410.08893): act in the real environment, learn a world model of it, learn to behave inside the
model.

    python train.py --config config_files/quickstart.yaml
    python train.py --BasicSettings.Env_name ALE/Boxing-v5 --Models.WorldModel.Backbone Mamba
    python train.py --resume runs/<run>
    python train.py --debug-batch runs/<run>/faults/<step>/batch.pt
    python train.py --profile 10

`python train.py --help` lists every key of the configuration.
"""

import os

# Before torch starts its threads: on few or shared cores, threads that spin at barriers cost up to 20 times the work
# itself (measured with the quickstart on two virtual cores).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from agents import ActorCriticAgent, build_agent
from env_wrapper import make_env, make_vec_env
from envs.collector import Collector
from envs.common import EnvironmentOutputError, UnusableEnvironment
from envs.parallel import VectorEnv, WorkerFailed
from envs.spaces import describe_spaces
from eval import build_from, evaluate, tables_of
from mamba_ssm.ops.tiers import use_tier
from replay_buffer import Batch, ReplayBuffer, ReplayFileError
from sub_models.acting import build_actor
from sub_models.cuda_graph import CapturedStep
from sub_models.world_models import WorldModel, build_world_model
from tools.checkpoints import Checkpoint, CheckpointError, SavedModel, read_model
from tools.divergence import Diverged, DivergenceWatch, check_fits, examine, read_fault
from tools.doctor import check_kernels, doctor
from tools.export import has_critics, with_critics
from tools.pictures import open_loop_picture, reconstruction_picture
from tools.profiling import StepProfiler
from tools.run import EPISODE_RETURN, Run, RunError, check_trackers, open_run
from utils import (
    Config,
    ConfigError,
    config_from_older,
    flatten_config,
    get_rng_state,
    isolated_rng,
    load_config,
    override_config,
    resolve_device,
    seed_everything,
    set_rng_state,
)

logger = logging.getLogger("drama.train")

PICTURE_SEQUENCES, PICTURE_FINAL_FRAMES = 4, 16
FIXED_KEYS = (
    "BasicSettings.Env_name",
    "JointTrainAgent.NumEnvs",
    "JointTrainAgent.BufferMaxLength",
    "JointTrainAgent.RealityContextLength",
    "Models.WorldModel.Backbone",
    "Models.WorldModel.Optimiser",
    "Models.Agent.Policy",
    "Models.Agent.AC.Optimiser",
    "Models.Agent.PPO.Optimiser",
)


class Schedule:
    """What is due after an environment step: depends on the configuration, the step and the rows held alone.

    `every` counts environment steps, however many environments are stepped at once: `times_due` says how many multiples
    of it the last `num_envs` steps passed.
    """

    def __init__(self, config: Config) -> None:
        self.training, self.evaluation = config.JointTrainAgent, config.Evaluate
        self.num_envs = self.training.NumEnvs
        self.total_steps = self.training.SampleMaxSteps

    def times_due(self, every: int, step: int) -> int:
        return step // every - (step - self.num_envs) // every

    def world_model_updates(self, step: int, replay: ReplayBuffer) -> int:
        training = self.training
        if not replay.can_sample(training.WorldModelWarmUp) or step > training.FreezeWorldModelAfterSteps:
            return 0
        return training.TrainDynamicsEpoch * self.times_due(training.TrainDynamicsEverySteps, step)

    def agent_updates(self, step: int, replay: ReplayBuffer) -> int:
        training = self.training
        if not replay.can_sample(training.BehaviourWarmUp) or step > training.FreezeBehaviourAfterSteps:
            return 0
        return self.times_due(training.TrainAgentEverySteps, step)

    def log(self, step: int) -> bool:
        return self.times_due(self.training.LogEverySteps, step) > 0

    def evaluate(self, step: int) -> bool:
        return self.evaluation.DuringTraining and self.times_due(self.evaluation.EverySteps, step) > 0

    def save(self, step: int) -> bool:
        return self.times_due(self.training.SaveEverySteps, step) > 0


def train(run: Run, profile_steps: int | None = None) -> None:
    """The whole run, from the step where it starts or resumes; `profile_steps` of its steps are traced."""
    config, device = run.config, resolve_device(run.config.BasicSettings.Device)
    seed_everything(config.BasicSettings.Seed, config.BasicSettings.Deterministic, device)
    profiler = StepProfiler(run.folder, profile_steps, device)
    with make_env_vector(config, start_step=run.start_step) as env, profiler:
        world_model, agent, replay = build(config, env, device)
        actor = build_actor(config, world_model, agent, fuse=config.BasicSettings.Compile)
        collector = Collector(env, actor)
        watch = DivergenceWatch(run, world_model, agent, replay, spaces_of(env))
        draw_sequences, update_world_model, update_agent = training_steps(config, world_model, agent, replay, watch)
        step = restore(run, world_model, agent, replay, collector)
        training, schedule = config.JointTrainAgent, Schedule(config)
        finished = step >= schedule.total_steps
        if finished:
            logger.warning("%s has all its %d steps: JointTrainAgent.SampleMaxSteps would extend it", run.folder, step)

        while not finished:
            step += env.num_envs
            collector.send(explore=not replay.can_sample(training.WorldModelWarmUp))
            if not training.OverlapEnvironment:
                replay.open_row()  # its place is enough to draw sequences; those that reach it wait for the row
            for _ in range(schedule.world_model_updates(step, replay)):
                run.accumulate(update_from_sequences(replay, collector, draw_sequences, update_world_model))
            if replay.row_is_open:
                replay.append(*collector.receive())
            for _ in range(schedule.agent_updates(step, replay)):
                run.accumulate(update_agent())
            if training.OverlapEnvironment:
                replay.append(*collector.receive())

            for episode in collector.finished:
                run.log(step, {EPISODE_RETURN: episode.episode_return, "episode/length": episode.episode_length})
            finished = step >= schedule.total_steps or run.stop_requested
            if schedule.log(step):
                run.accumulate({"environment/restarts": env.restarts})
                watch.stop_if_diverged(step, run.flush(step))
            if schedule.evaluate(step):
                evaluation = evaluate(world_model, agent, config, seed=step)
                run.log(step, evaluation.metrics())
                run.save_evaluation(f"training_{step:09d}", tables_of(evaluation, config, step, device))
                if evaluation.frames is not None:
                    run.save_video(f"evaluation_{step:09d}", evaluation.frames)
            if schedule.save(step) or finished:
                save(run, step, world_model, agent, replay, collector)
            if finished:
                run.flush_rest(step)
            run.progress(step)
            profiler.after_step(step, settled=update_world_model.settled and update_agent.settled)
    if run.stop_requested:
        logger.warning("stopped by %s at step %d; %s", run.stop_reason, step, run.how_to_go_on())
    run.print_report()


def make_env_vector(config: Config, start_step: int) -> VectorEnv:
    """The training environments. Where their state cannot be restored, a resumed run goes on with fresh episodes.

    A lone environment needs no worker to step beside training that is captured: this process only launches it, and is
    free while the GPU works; to take a worker's answer would cost it 0.3 to 1 ms.
    """
    basic, training = config.BasicSettings, config.JointTrainAgent
    captured = basic.Use_cg and resolve_device(basic.Device).type == "cuda"
    in_workers = training.NumEnvs > 1 or (training.OverlapEnvironment and not captured)
    seed = config.BasicSettings.Seed + start_step
    return make_vec_env(config.BasicSettings.Env_name, config, training.NumEnvs, seed, asynchronous=in_workers)


def build(config: Config, env: VectorEnv, device: torch.device) -> tuple[WorldModel, ActorCriticAgent, ReplayBuffer]:
    """World model, agent and replay, as they are before any training."""
    basic, training = config.BasicSettings, config.JointTrainAgent
    world_model = build_world_model(config, env.action_space, device)
    agent = build_agent(config, world_model.feature_dim, env.action_space, device)
    replay = ReplayBuffer(
        capacity=training.BufferMaxLength - training.BufferMaxLength % env.num_envs,
        num_envs=env.num_envs,
        obs_shape=env.observation_space.shape,
        action_shape=env.action_space.shape,
        device=device if basic.ReplayBufferOnGPU else torch.device("cpu"),
        out_device=device,
        batch_size=training.BatchSize,
        batch_length=training.BatchLength,
        imagine_batch_size=training.ImagineBatchSize,
        context_length=training.ImagineContextLength,
        sampling=training.Sampling,
        tau=training.Tau,
        imagination_tau=training.ImaginationTau,
        alpha=training.Alpha,
        beta=training.Beta,
    )
    if basic.Compile and device.type == "cuda":
        world_model.compile_parts()
        agent.compile_parts()
    return world_model, agent, replay


def training_steps(
    config: Config,
    world_model: WorldModel,
    agent: ActorCriticAgent,
    replay: ReplayBuffer,
    watch: DivergenceWatch | None = None,
) -> tuple[CapturedStep, CapturedStep, CapturedStep]:
    """The draw of sequences, the update of the world model from them, and that of the agent with its own sampling; on a
    GPU each is one CUDA graph. `watch` None: none looks on."""
    horizon, graphs = config.JointTrainAgent.ImagineBatchLength, config.BasicSettings.Use_cg

    def watched(part: str, batch: Batch, metrics: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return metrics if watch is None else watch.keep(part, batch, metrics)

    def learn_world_model(batch: Batch) -> dict[str, torch.Tensor]:
        return watched("world_model", batch, world_model.update(batch))

    def learn_behaviour(contexts: Batch) -> dict[str, torch.Tensor]:
        return watched("agent", contexts, agent.update(world_model.imagine(agent, contexts, horizon)))

    def captured(learn: Callable[[Batch], dict[str, torch.Tensor]], sample: Callable[[], Batch]) -> CapturedStep:
        if replay.device == world_model.device:  # sampling is part of the graph
            return CapturedStep(lambda: learn(sample()), world_model.device, graphs)
        return CapturedStep(lambda batch: learn(Batch(*batch)), world_model.device, graphs, inputs=sample)

    draw_sequences = CapturedStep(replay.draw_sequences, replay.device, graphs)
    update_world_model = captured(learn_world_model, replay.drawn_sequences)
    return draw_sequences, update_world_model, captured(learn_behaviour, replay.sample_contexts)


def update_from_sequences(
    replay: ReplayBuffer, collector: Collector, draw_sequences: CapturedStep, update_world_model: CapturedStep
) -> dict[str, torch.Tensor]:
    """Draw sequences and learn from them, once the environment has answered if they reach the row that is open."""
    draw_sequences()
    if replay.reads_open_row():
        replay.append(*collector.receive())
    return update_world_model()


def spaces_of(env: VectorEnv) -> dict:
    """What a saved model says about its environment."""
    return describe_spaces(env.observation_space, env.action_space)


def save(
    run: Run, step: int, world_model: WorldModel, agent: ActorCriticAgent, replay: ReplayBuffer, collector: Collector
) -> None:
    """A checkpoint with everything that the next step depends on, and pictures of what the model sees."""
    run.save_checkpoint(
        step,
        model={
            "world_model": world_model.state_dict(),
            "agent": agent.state_dict(),
            "spaces": spaces_of(collector.env),
        },
        train={
            "world_model_optimiser": world_model.optimiser.state_dict(),
            "agent_optimiser": agent.optimiser.state_dict(),
            "collector": collector.state_dict(),
            "rng": get_rng_state(),
        },
        replay=replay,
    )
    training = run.config.JointTrainAgent
    length = training.ImagineContextLength + training.ImagineBatchLength
    if replay.can_sample(training.WorldModelWarmUp) and replay.holds_run(length):
        with isolated_rng(step):
            batch = replay.recent_sequences(PICTURE_SEQUENCES, length)
            reconstruction = world_model.reconstruct(batch.obs).cpu().numpy()
            prediction = world_model.predict_open_loop(batch, training.ImagineContextLength).cpu().numpy()
            final_obs = replay.recent_final_obs(PICTURE_FINAL_FRAMES).unsqueeze(0)
            final_reconstruction = world_model.reconstruct(final_obs).cpu().numpy() if final_obs.numel() else None
        obs, is_first = batch.obs.cpu().numpy(), batch.is_first.cpu().numpy()
        open_loop = open_loop_picture(obs, prediction, training.ImagineContextLength, is_first)
        run.save_picture(f"reconstruction_{step:09d}", reconstruction_picture(obs, reconstruction))
        run.save_picture(f"open_loop_{step:09d}", open_loop)
        if final_reconstruction is not None:
            final = reconstruction_picture(final_obs.cpu().numpy(), final_reconstruction)
            run.save_picture(f"final_obs_{step:09d}", final)


def restore(
    run: Run, world_model: WorldModel, agent: ActorCriticAgent, replay: ReplayBuffer, collector: Collector
) -> int:
    """Load the run's newest checkpoint, else the weights of `SavePath`; returns the step to go on from."""
    checkpoint: Checkpoint | None = run.load_checkpoint()
    save_path = run.config.BasicSettings.SavePath
    if checkpoint is None:
        if save_path is not None:
            load_weights(read_model(save_path, world_model.device), world_model, agent)
        return 0
    refuse_changes(config_from_older(checkpoint.model.config), run.config)
    checkpoint.model.load_into(world_model, agent)
    world_model.optimiser.load_state_dict(checkpoint.train["world_model_optimiser"])
    agent.optimiser.load_state_dict(checkpoint.train["agent_optimiser"])
    replay.load(run.folder / "replay", checkpoint.replay)
    if not collector.load_state_dict(checkpoint.train["collector"]):
        logger.warning("%s cannot restore its state: a new episode begins", run.config.BasicSettings.Env_name)
    set_rng_state(checkpoint.train["rng"])
    run.keep_config()
    return checkpoint.step


def load_weights(saved: SavedModel, world_model: WorldModel, agent: ActorCriticAgent) -> None:
    """Start from another run's weights; those that were exported for acting have no critics."""
    if not has_critics(saved):
        logger.warning("%s was exported without critics: they begin untrained", saved.path)
    with_critics(saved, agent).load_into(world_model, agent)


def refuse_changes(before: Config, now: Config) -> None:
    """A resumed run may change much, but not what its saved state is made of."""
    flat_before, flat_now = flatten_config(before), flatten_config(now)
    for key in FIXED_KEYS:
        if flat_before[key] != flat_now[key]:
            raise CheckpointError(
                f"{key} was {flat_before[key]} when this run was saved and cannot become {flat_now[key]}; "
                f"start a new run from its weights with --BasicSettings.SavePath instead"
            )


def check_start(config: Config) -> None:
    """Find what would stop a new run at once, before its folder is made."""
    env = make_env(config.BasicSettings.Env_name, config, config.BasicSettings.Seed)
    env.reset()  # some cannot draw themselves, which shows here first
    env.close()
    check_kernels(config)
    check_trackers(config)
    if config.BasicSettings.SavePath is not None:
        device = torch.device("cpu")
        world_model = build_world_model(config, env.action_space, device)
        agent = build_agent(config, world_model.feature_dim, env.action_space, device)
        with_critics(read_model(config.BasicSettings.SavePath), agent).load_into(world_model, agent)


def debug_batch(path: str, given: Mapping[str, Any]) -> None:
    """Repeat the update that ended a run, and print which tensors are not finite."""
    fault = read_fault(path)
    saved = read_model(fault.model)
    config = override_config(config_from_older(saved.config), given)
    basic = config.BasicSettings
    world_model, agent = build_from(saved, config, resolve_device(basic.Device))
    check_fits(fault, world_model, agent, (basic.ImageSize, basic.ImageSize, basic.ImageChannel))
    print(examine(fault, world_model, agent, config.JointTrainAgent.ImagineBatchLength))


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of training; returns the exit code: 0, 2 for a fault of usage, 1 for any other, 130 after Ctrl-C and
    143 after SIGTERM, 129 after its terminal was closed."""
    try:
        command = load_config(argv, "train.py")
        if command.doctor:
            return doctor(command.config)
        if command.debug_batch is not None:
            debug_batch(command.debug_batch, command.given)
            return 0
        if command.resume is None:
            check_start(command.config)
        with use_tier(command.config.BasicSettings.Kernels), open_run(command.config, command.resume) as run:
            train(run, command.profile)
        return run.exit_code
    except (ConfigError, UnusableEnvironment) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (RunError, CheckpointError, ReplayFileError, EnvironmentOutputError, WorkerFailed, Diverged) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before the run's folder was made; afterwards it ends in order
        print("stopped by Ctrl-C before the first step", file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(main())

"""`python train.py --doctor`: whether this machine can run a configuration, and what to do where it can't.

Each check yields findings: ok, note (it runs, but not as well as it could) or fail (it does not run), with the fix.
"""

import importlib
import logging
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

from agents import build_agent
from env_wrapper import environment_report, make_env
from envs.common import UnusableEnvironment
from mamba_ssm.ops import tiers
from replay_buffer import row_nbytes
from sub_models.world_models import build_sequence_model, build_world_model
from tools.checkpoints import CheckpointError, read_model
from utils import Config, ConfigError, isolated_rng, resolve_device

SELF_TEST_TOLERANCE = 1e-3                       # relative, fp32; a wrong kernel is off by far more, tf32 by less
STORED_ACTIVATIONS = 3                           # of each layer: before the norm, after it, after the activation
OPTIMISER_COPIES = 4                             # weight, gradient and two moments
MIB, GIB = 2.0**20, 2.0**30


@dataclass(frozen=True)
class Finding:
    """One line of the report. `fix` is empty where there is nothing to do."""

    status: str                                  # ok, note or fail
    subject: str
    text: str
    fix: str = ""


def check_kernels(config: Config) -> None:
    """ConfigError where `BasicSettings.Kernels` asks for a tier that an operator cannot have on the chosen device."""
    requested, device = config.BasicSettings.Kernels, resolve_device(config.BasicSettings.Device)
    try:
        with tiers.use_tier(requested):
            for operator in tiers.operators():
                tiers.explain(operator, device.type)
    except RuntimeError as error:
        raise ConfigError(f"BasicSettings.Kernels = {requested}: {error}") from None


def doctor(config: Config, out: TextIO | None = None) -> int:
    """Report on every check; returns 0 if the configuration can run here, else 1."""
    out = sys.stdout if out is None else out
    failures = 0
    for check in (_software, _device, _kernels, _families, _checkpoint, _run_folder, _environment, _resources):
        for finding in _guarded(check, config):
            failures += finding.status == "fail"
            print(f"{finding.status:>4}  {finding.subject}: {finding.text}", file=out)
            if finding.fix:
                print(f"      -> {finding.fix}", file=out)
    verdict = f"{failures} point(s) to fix before this can run" if failures else "this configuration can run here"
    print(verdict, file=out)
    return 1 if failures else 0


def _guarded(check: Any, config: Config) -> Iterator[Finding]:
    """A check that breaks is a finding too: a report that stops half-way helps nobody."""
    try:
        yield from check(config)
    except Exception as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        yield Finding("fail", check.__name__.strip("_"), text, "not foreseen: report it with your configuration")


# ------------------------------------------------------------------------------------------------ software and hardware


def _software(config: Config) -> Iterator[Finding]:
    yield Finding("ok", "python", f"{platform.python_version()} on {platform.platform()}")
    yield Finding("ok", "torch", f"{torch.__version__}, {torch.get_num_threads()} CPU threads")
    built_for = torch.version.cuda
    if torch.cuda.is_available():
        yield Finding("ok", "cuda", f"{built_for}, {torch.cuda.device_count()} device(s)")
    elif built_for is None:
        yield Finding("note", "cuda", "this torch is built for the CPU alone", "for a GPU: a CUDA build of torch")
    else:
        yield Finding("note", "cuda", f"torch is built for {built_for} but finds no device", "check `nvidia-smi`")
    on_cuda = config.BasicSettings.Device != "cpu" and torch.cuda.is_available()
    if on_cuda:
        yield _imports("triton", "fail", "pip install triton (a CUDA build of torch brings it)")
    else:
        yield Finding("ok", "triton", "not needed without a GPU")
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    if compiler:
        yield Finding("ok", "compiler", compiler)
    else:
        yield Finding("fail" if on_cuda else "note", "compiler", "none, kernels need one", "apt-get install g++")
    if config.Wandb.Init.Mode != "disabled":
        yield _imports("wandb", "fail", "pip install -r requirements-wandb.txt, or --Wandb.Init.Mode disabled")
    yield _imports("imageio_ffmpeg", "note", "pip install -r requirements.txt; without it no video is written")


def _imports(module: str, otherwise: str, fix: str) -> Finding:
    try:
        loaded = importlib.import_module(module)
    except ImportError as error:
        return Finding(otherwise, module, f"does not import: {error}", fix)
    return Finding("ok", module, getattr(loaded, "__version__", "imports"))


def _device(config: Config) -> Iterator[Finding]:
    basic = config.BasicSettings
    try:
        device = resolve_device(basic.Device)
    except ConfigError as error:
        yield Finding("fail", "device", str(error), "--BasicSettings.Device auto")
        return
    if device.type == "cpu":
        yield Finding("ok", "device", "cpu (bf16, CUDA graphs and compilation stay off)")
        return
    properties = torch.cuda.get_device_properties(device)
    capability = f"{properties.major}.{properties.minor}"
    yield Finding("ok", "device", f"{device}, {properties.name}, compute capability {capability}")
    if basic.Use_amp and properties.major < 8:
        yield Finding("note", "bf16", f"is slow on compute capability {capability}", "--BasicSettings.Use_amp false")


# -------------------------------------------------------------------------------------------------------------- kernels


def _kernels(config: Config) -> Iterator[Finding]:
    """The tier of every operator, then the sequence model on these tiers against the reference tier."""
    device, kernels = _chosen_device(config), config.BasicSettings.Kernels
    with tiers.use_tier(kernels):
        for operator in tiers.operators():
            try:
                report = tiers.explain(operator, device)
            except RuntimeError as error:
                yield Finding("fail", "kernels", str(error), "--BasicSettings.Kernels auto")
                return
            fix = "pip install -e . --no-build-isolation" if report.missing and kernels == "auto" else ""
            yield Finding("note" if report.missing else "ok", "kernels", str(report), fix)
    off = _sequence_model_error(config, device)
    backbone = config.Models.WorldModel.Backbone
    text = f"{backbone}, outputs and gradients, off from the reference by {off:.1e}"
    if off <= SELF_TEST_TOLERANCE:
        yield Finding("ok", "self-test", text)
    else:
        yield Finding("fail", "self-test", text, "--BasicSettings.Kernels reference")


def _sequence_model_error(config: Config, device: torch.device) -> float:
    """Largest relative error of output and gradients, chosen tier against reference tier, over one short batch."""
    section = config.Models.WorldModel
    with isolated_rng(0), _silenced(logging.getLogger(tiers.__name__)):
        stoch_dim, action_dim = section.CategoricalDim * section.ClassDim, 6
        model = build_sequence_model(config, stoch_dim, action_dim).to(device).eval()
        length = min(19, config.JointTrainAgent.BatchLength)
        stoch = torch.randn(2, length, stoch_dim, device=device)              # (B, L, Z)
        action = torch.randn(2, length, action_dim, device=device)            # (B, L, A)
        seq_idx = torch.arange(length, device=device).ge(length // 2).int().expand(2, length).contiguous()
        weights = torch.randn(2, length, section.HiddenStateDim, device=device)
        results = []
        for tier in (config.BasicSettings.Kernels, "reference"):
            model.zero_grad()
            with tiers.use_tier(tier):
                deter = model(stoch, action, seq_idx)                         # (B, L, D)
                (deter * weights).sum().backward()                            # a plain sum is fixed by the last norm
            results.append([deter.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    return max(((a - b).norm() / b.norm().clamp_min(1e-12)).item() for a, b in zip(*results, strict=True))


@contextmanager
def _silenced(log: logging.Logger) -> Iterator[None]:
    """The self-test asks for the slow tier on purpose; no warning about that."""
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _chosen_device(config: Config) -> torch.device:
    """The device that will be used; the CPU where the one asked for is missing (`_device` says so)."""
    try:
        return resolve_device(config.BasicSettings.Device)
    except ConfigError:
        return torch.device("cpu")


# --------------------------------------------------------------------------------------------------------- environments


def _environment(config: Config) -> Iterator[Finding]:
    """The configured environment: made, reset and stepped once."""
    name = config.BasicSettings.Env_name
    try:
        env = make_env(name, config, seed=0)
    except (UnusableEnvironment, ImportError) as error:
        yield Finding("fail", "environment", str(error), "another --BasicSettings.Env_name, or install what is missing")
        return
    try:
        env.reset()
        env.step(env.action_space.sample())
        yield Finding("ok", "environment", f"{name}: {env.observation_space.shape} frames, actions {env.action_space}")
    finally:
        env.close()


def _families(config: Config) -> Iterator[Finding]:
    """Every family of environments; one that is not installed matters only to who wants it."""
    for report in environment_report():
        yield Finding("ok" if report.ok else "note", report.family, report.detail, report.fix)


def _checkpoint(config: Config) -> Iterator[Finding]:
    path = config.BasicSettings.SavePath
    if path is None:
        return
    try:
        saved = read_model(path)
    except CheckpointError as error:
        yield Finding("fail", "checkpoint", str(error), "--BasicSettings.SavePath takes a run's folder or a checkpoint")
    else:
        yield Finding("ok", "checkpoint", f"{saved.path}, step {saved.step}")


# ------------------------------------------------------------------------------------------------------ memory and disk


@dataclass(frozen=True)
class Needs:
    """What a run will hold at most, in bytes."""

    replay: int
    weights: int                                 # of world model and agent, fp32
    training: int                                # weights, gradients, moments and activations of one update


def needs_of(config: Config) -> Needs | None:
    """An estimate from the configuration and the environment's spaces; None where the environment can't be made.

    Activations: of every convolution, in both stacks, over all frames of a batch, before the norm, after it and after
    the activation; the rollouts' features. The rest is small beside them.
    """
    train, section = config.JointTrainAgent, config.Models.WorldModel
    try:
        env = make_env(config.BasicSettings.Env_name, config, seed=0)
    except (UnusableEnvironment, ImportError):
        return None
    spaces = env.observation_space, env.action_space
    env.close()
    cpu = torch.device("cpu")
    with isolated_rng(0):
        world_model = build_world_model(config, spaces[1], cpu)
        agent = build_agent(config, world_model.feature_dim, spaces[1], cpu)
    weights = sum(4 * p.numel() for module in (world_model, agent) for p in module.parameters())
    half = config.BasicSettings.Use_amp and _chosen_device(config).type == "cuda"
    frames = train.BatchSize * train.BatchLength
    per_frame = sum(_layer_values(part) for part in (section.Encoder, section.Decoder))
    rollouts = train.ImagineBatchSize * (train.ImagineBatchLength + 1) * world_model.feature_dim * 4
    activations = frames * per_frame * STORED_ACTIVATIONS * (2 if half else 4) + rollouts
    replay = train.BufferMaxLength * row_nbytes(spaces[0].shape, spaces[1].shape)
    return Needs(replay, weights, weights * OPTIMISER_COPIES + activations)


def _layer_values(part: Any) -> int:
    """Values behind all layers of an encoder (a decoder is its mirror image), for one frame."""
    _, height, width = part.InputSize
    values = 0
    for i, mult in enumerate(part.Mults):
        if i or not part.FirstStrideOne:
            height, width = height // 2, width // 2
        values += part.Depth * mult * height * width
    return values


def _run_folder(config: Config) -> Iterator[Finding]:
    existing = _existing_folder(config)
    try:
        with tempfile.NamedTemporaryFile(dir=existing):
            pass
    except OSError as error:
        yield Finding("fail", "run folder", f"{existing}: {error.strerror}", "--BasicSettings.RunDir, a writable one")
    else:
        yield Finding("ok", "run folder", f"{existing} can be written to")


def _existing_folder(config: Config) -> Path:
    folder = Path(config.BasicSettings.RunDir).absolute()
    return next(path for path in (folder, *folder.parents) if path.exists())


def _resources(config: Config) -> Iterator[Finding]:
    needs, device = needs_of(config), _chosen_device(config)
    if needs is None:                                                         # `_environment` says why
        return
    on_gpu = config.BasicSettings.ReplayBufferOnGPU and device.type == "cuda"
    fix = "--JointTrainAgent.BatchSize or BufferMaxLength lower"
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        gpu_fix = "--BasicSettings.ReplayBufferOnGPU false" if on_gpu and needs.training <= free else fix
        yield _room(f"memory of {device}", needs.training + on_gpu * needs.replay, free, gpu_fix)
    host = needs.replay * (not on_gpu) + needs.training * (device.type == "cpu")
    yield _room("host memory", host, _free_host_memory(), fix)
    checkpoints = 2 * needs.weights * (OPTIMISER_COPIES - 1)                  # one stays until the next is whole
    disk = (checkpoints + needs.replay) * config.JointTrainAgent.SaveModels
    free = shutil.disk_usage(_existing_folder(config)).free
    yield _room("disk", disk, free, "--BasicSettings.RunDir on a larger disk")


def _room(subject: str, wanted: float, free: float, fix: str) -> Finding:
    text = f"needs about {_size(wanted)}, {_size(free)} are free"
    return Finding("ok", subject, text) if wanted <= free else Finding("fail", subject, text, fix)


def _size(count: float) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.0f} MiB"


def _free_host_memory() -> int:
    """Bytes that programs can still take: MemAvailable on Linux, unused pages elsewhere."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

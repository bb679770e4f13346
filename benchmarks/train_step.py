"""Time of one environment step of training, part by part: acting, world-model update, imagination, agent update.

    python benchmarks/train_step.py --steps 20 [--modes eager,compile,graph,graph+compile] [--config FILE]
    [--Section.Key V]
    python benchmarks/train_step.py --loop 300 [...]

Variants are compared in one run: `eager` launches every kernel from Python, `graph` replays captured CUDA graphs,
`compile` re-lays the convolutions and compiles the parts of an update and of an imagined step; on a CPU there is only
`eager`. Figures are medians over `--steps` repeats after warm-up, launched from Python and waited for; `prepare_s` is
the time that warm-up, compilation and capture took. On a GPU a part's median is the sum of

    busy_ms   its kernels and copies, in a trace of one call (with --profile)
    gaps_ms   between the events around it, where the GPU has nothing to do until the next kernel is launched
    host_ms   before the first event and after the last: Python, and the wait for the end

With `--loop` nothing is taken apart: the loop of train.py runs, with and without `OverlapEnvironment`, with its log
lines and without checkpoints; the time of a step is the median over log intervals once everything is captured. With
--profile it runs once more and `TRACED_STEPS` of its steps are traced: their time is the sum of kernels and copies
(`busy_ms`), of what lies between them in a graph (`gaps_ms`), and of longer waits for the host (`idle_ms`). JSON goes
to benchmarks/results/, as soon as a variant is measured.
"""

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from envs.collector import Collector
from mamba_ssm.ops.tiers import use_tier
from sub_models.acting import build_actor
from sub_models.cuda_graph import WARMUP_CALLS, CapturedStep
from tools.profiling import STEP_MARK
from tools.run import Run, open_run, read_metrics
from train import build, make_env_vector, train
from utils import Config, load_config, override_config, resolve_device, seed_everything

MODES = {
    "eager": {"BasicSettings.Use_cg": "false", "BasicSettings.Compile": "false"},
    "compile": {"BasicSettings.Use_cg": "false", "BasicSettings.Compile": "true"},
    "graph": {"BasicSettings.Use_cg": "true", "BasicSettings.Compile": "false"},
    "graph+compile": {"BasicSettings.Use_cg": "true", "BasicSettings.Compile": "true"},
}
LOOP_INTERVAL = 50  # steps between two log lines of a whole loop
TRACED_STEPS = 20
LONGEST_GAP_US = 20.0  # between two kernels of a graph; what is longer waits for the host
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # of a trace
PARTS = ("world_model_update", "imagination", "agent_update", "acting", "environment_and_replay")
VARIANTS = [(backbone, policy) for policy in ("AC", "PPO") for backbone in ("Mamba2", "Mamba", "Transformer")]


class Clock:
    """Times calls in ms: on the host, until the device is done, and on a GPU between events around them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else []

    def __call__(self, function: Callable[[], object]) -> tuple[float, float]:
        """-> on the host, and on the device (the same on a CPU)"""
        if not self.events:
            start = time.perf_counter()
            function()
            milliseconds = 1e3 * (time.perf_counter() - start)
            return milliseconds, milliseconds
        first, last = self.events
        torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        first.record()
        function()
        last.record()
        torch.cuda.synchronize(self.device)
        return 1e3 * (time.perf_counter() - start), first.elapsed_time(last)


def timed(function: Callable[[], object], device: torch.device, steps: int) -> dict[str, float]:
    """Median, fastest and slowest of `steps` calls in ms, each waited for, after warm-up and capture, which take
    `prepare_s` seconds."""
    start = time.perf_counter()
    for _ in range(WARMUP_CALLS + 2):
        function()
    prepare = time.perf_counter() - start
    clock = Clock(device)
    samples, on_device = zip(*(clock(function) for _ in range(steps)), strict=True)
    median = statistics.median(samples)
    result = {"median_ms": median, "min_ms": min(samples), "max_ms": max(samples), "prepare_s": prepare}
    return result | {"host_ms": median - statistics.median(on_device)} if device.type == "cuda" else result


def profiled(function: Callable[[], object]) -> dict[str, object]:
    """Kernels of one call: how many, how long the GPU was busy (ms), and all by name, the longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    kernels = [event for event in profile.key_averages() if event.self_device_time_total > 0]
    kernels.sort(key=lambda event: -event.self_device_time_total)
    return {
        "kernels": sum(event.count for event in kernels),
        "busy_ms": sum(event.self_device_time_total for event in kernels) / 1e3,
        "longest": [[event.key[:100], event.count, event.self_device_time_total / 1e3] for event in kernels],
    }


def measure(config: Config, steps: int, profile: bool) -> dict[str, dict[str, float] | float]:
    """Times of every part of a step under one configuration."""
    torch.compiler.reset()
    device = resolve_device(config.BasicSettings.Device)
    seed_everything(config.BasicSettings.Seed, config.BasicSettings.Deterministic, device)
    training, graphs = config.JointTrainAgent, config.BasicSettings.Use_cg
    env = make_env_vector(config, 0)
    world_model, agent, replay = build(config, env, device)
    actor = build_actor(config, world_model, agent, fuse=config.BasicSettings.Compile)
    collector = Collector(env, actor)
    while not replay.can_sample(training.WorldModelWarmUp):
        collector.send(explore=True)
        replay.append(*collector.receive())
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    held = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0

    horizon = training.ImagineBatchLength
    update = CapturedStep(lambda: world_model.update(replay.sample_sequences()), device, graphs)
    imagine = CapturedStep(lambda: world_model.imagine(agent, replay.sample_contexts(), horizon), device, graphs)
    rollout = world_model.imagine(agent, replay.sample_contexts(), horizon)
    learn = CapturedStep(lambda: agent.update(rollout), device, graphs)
    obs = torch.zeros((1, *env.observation_space.shape), dtype=torch.uint8).numpy()
    state = actor.init_state(obs)
    parts = {
        "world_model_update": update,
        "imagination": imagine,
        "agent_update": learn,
        "acting": lambda: actor.act(obs, state),
    }
    result = {name: timed(function, device, steps) for name, function in parts.items()}
    if device.type == "cuda" and profile:
        for name, function in parts.items():
            result[name] |= profiled(function)
            result[name]["gaps_ms"] = result[name]["median_ms"] - result[name]["busy_ms"] - result[name]["host_ms"]

    def environment() -> None:
        collector.send(explore=True)
        replay.append(*collector.receive())

    result["environment_and_replay"] = timed(environment, device, steps)
    result["sum_ms"] = sum(part["median_ms"] for part in result.values())
    if device.type == "cuda":
        result["peak_memory_besides_replay_mib"] = (torch.cuda.max_memory_allocated(device) - held) / 2**20
    env.close()
    return result


def measure_loop(config: Config, steps: int, profile: bool) -> dict[str, dict[str, float]]:
    """Time of a step of train.py's own loop over `steps` steps, once both updates are captured, in both ways to step
    the environment; with `profile` also what the steps of a loop are the sum of."""
    training = config.JointTrainAgent
    warm = max(training.WorldModelWarmUp, training.BehaviourWarmUp) + 2 * LOOP_INTERVAL
    result = {}
    for overlap in ("false", "true"):
        with loop(config, warm + steps, overlap) as run:
            at, speeds = read_metrics(run.folder)["time/steps_per_second"]
        samples = [1e3 / speed for step, speed in zip(at, speeds, strict=True) if step >= warm + LOOP_INTERVAL]
        result["overlapped" if overlap == "true" else "default"] = {
            "median_ms": statistics.median(samples),
            "min_ms": min(samples),
            "max_ms": max(samples),
        }
    if profile:
        with loop(config, warm, "false", TRACED_STEPS) as run:
            (path,) = run.folder.glob("profile_*.json")
            result["traced"] = parts_of_trace(json.loads(path.read_text())["traceEvents"], TRACED_STEPS)
    return result


@contextmanager
def loop(config: Config, steps: int, overlap: str, traced: int | None = None) -> Iterator[Run]:
    """A run after its training, whose folder goes with the context."""
    torch.compiler.reset()
    with tempfile.TemporaryDirectory() as folder:
        given = {
            "BasicSettings.RunDir": folder,
            "JointTrainAgent.OverlapEnvironment": overlap,
            "JointTrainAgent.SampleMaxSteps": steps,
            "JointTrainAgent.LogEverySteps": LOOP_INTERVAL,
            "JointTrainAgent.SaveModels": "false",
        }
        with open_run(override_config(config, given)) as run:
            train(run, traced)
        yield run


def parts_of_trace(events: list[dict], steps: int) -> dict[str, float]:
    """What a step is the sum of, in a trace of so many that begins and ends with a device that is done."""
    spans = [(e["ts"], e["ts"] + e["dur"], e["name"], e["cat"]) for e in events if "dur" in e and "cat" in e]
    marks = [span for span in spans if span[2].startswith(STEP_MARK) and span[3] == "user_annotation"]
    begin, end = min(mark[0] for mark in marks), max(mark[1] for mark in marks)
    kernels = sorted(span[:2] for span in spans if span[3] in ON_DEVICE)
    idle, at = [], begin
    for first, last in kernels:
        idle.append(max(first - at, 0.0))
        at = max(at, last)
    idle.append(max(end - at, 0.0))
    gaps = sum(piece for piece in idle if piece <= LONGEST_GAP_US)
    whole = max(end, at) - begin
    return {
        "step_ms": whole / 1e3 / steps,
        "busy_ms": (whole - sum(idle)) / 1e3 / steps,
        "gaps_ms": gaps / 1e3 / steps,
        "idle_ms": (sum(idle) - gaps) / 1e3 / steps,
        "kernels": len(kernels) / steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--loop", type=int, default=0, help="time whole steps of train.py's loop instead, so many")
    parser.add_argument("--modes", default=None, help="comma-separated, default: all on a GPU, eager on a CPU")
    parser.add_argument("--variants", default=None, help="comma-separated Backbone-Policy, default: six")
    parser.add_argument("--profile", action="store_true", help="count kernels and their time on a GPU, too")
    parser.add_argument("--out", default=None, help="JSON file, default: one in benchmarks/results/")
    options, words = parser.parse_known_args()
    base = load_config(words, "train.py").config
    device = resolve_device(base.BasicSettings.Device)
    modes = options.modes.split(",") if options.modes else (list(MODES) if device.type == "cuda" else ["eager"])
    variants = [tuple(v.split("-")) for v in options.variants.split(",")] if options.variants else VARIANTS
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu"
    report = {"device": name, "torch": torch.__version__, "python": platform.python_version(), "results": []}
    print(f"{name}, torch {torch.__version__}; median ms of {options.steps}")
    header = ("default", "overlapped") if options.loop else (*PARTS, "sum")
    print(f"{'variant':<18}{'mode':<15}" + "".join(f"{column:>24}" for column in header))
    what = "loop" if options.loop else "step"
    out = Path(options.out or Path(__file__).parent / "results" / f"train_{what}_{device.type}.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    for backbone, policy in variants:
        for mode in modes:
            given = {"Models.WorldModel.Backbone": backbone, "Models.Agent.Policy": policy, **MODES[mode]}
            config = override_config(base, given)
            with use_tier(config.BasicSettings.Kernels):
                if options.loop:
                    result = measure_loop(config, options.loop, options.profile and device.type == "cuda")
                else:
                    result = measure(config, options.steps, options.profile)
            report["results"].append({"backbone": backbone, "policy": policy, "mode": mode, **result})
            out.write_text(json.dumps(report, indent=1) + "\n")
            columns = [result["sum_ms"] if name == "sum" else result[name]["median_ms"] for name in header]
            print(
                f"{backbone + ' + ' + policy:<18}{mode:<15}" + "".join(f"{value:>24.3f}" for value in columns),
                flush=True,
            )


if __name__ == "__main__":
    main()

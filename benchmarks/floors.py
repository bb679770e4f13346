"""What a training step of the default configuration must cost at least, part by part, beside what was measured.

    python benchmarks/floors.py                                             the floors alone
    python benchmarks/floors.py --measured FILE --page docs/performance.md  tables of the page, between its markers;
           also --loop FILE --variants FILE --scaling FILE --packing FILE, of the benchmarks of these names

FILE: JSON of `benchmarks/train_step.py --profile`; that of `--loop` is made with `--loop`, too. The floor of
a product, a convolution or a pass over rows is the longer of two times: its bytes, each moved once, at the rate of a
copy, and its operations at the rate of a large product, both rates as measured on an H200. Activations, norms of images
and copies are free, as if they were part of the convolution or product beside them; what has to be complete before it
is used, such as batch statistics, makes its input be read again. Kernels are assigned to parts by their names.

Letters: R rows of an update (sequences x steps), F frames of a batch, S rollouts, C context steps, H imagined steps.
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from agents import ActorCriticAgent, build_agent
from benchmarks.scaling import flatness
from mamba_ssm.modules.mamba2 import Mamba2
from sub_models.world_models import WorldModel, build_world_model
from utils import Config, load_config

COPY_BYTES_PER_S, DOT_FLOP_PER_S = 4.3e12, 790e12  # measured on an H200
HALF, SINGLE = 2, 4  # bytes of bfloat16 and float32
NUM_ACTIONS = 6  # Pong's
REST = "other compiled and torch kernels"
# The first pattern that a kernel's name has decides.
CONVOLUTIONS = ("convolutions", r"drama::cuda|sm90_xmma|cutlass_tensorop|cutlass__5x_cudnn|cask_plugin")
BATCH_NORM = ("batch norm and SiLU", r"^(_backward_apply|_apply|_backward_sums|_moments|_finish_\w+)_kernel")
PRODUCTS = ("products of layers", r"nvjet|splitKreduce|gemvx|gemm")
ROW_NORMS = ("norms of rows", r"^(_norm_forward|_norm_backward|_add_programs)_kernel")
CORE = (
    "convolution and scan of Mamba-2",
    r"^(_scan|_scan_backward|_both_walks|_adding|_forward|_weight_gradient|_input_gradient)_kernel",
)
STATISTICS = ("statistics of the features", r"^(_moments|_finish_moments)_kernel")
OPTIMISER = ("optimiser with clipping", r"^(_update|_square_sums|_clip)_kernel")
REPLAY = ("sampling and gathering rows", r"^(_gather|_leaders|_block_\w+|_tickets|_count)_kernel")
FRAME_ERROR = ("frames as blocks, frames' error", r"^(_error|_error_backward|_blocks)_kernel")
LATENT = ("latent and losses", r"^(_terms|_gradients|_loss|_loss_backward|_draw_one_hot)_kernel")
STEPS = ("steps of Mamba-2", r"^_dual_step_kernel")
DRAWS = ("drawing latents and actions, stem", r"^(_draw_latent|_draw_action|_draw_one_hot|_embed)_kernel")
RETURNS = (
    "returns, percentiles, two-hot losses",
    r"^(_masked_quantiles|_lambda_return|_decode|_loss|_loss_backward)_ker",
)
PHASES = {
    "world_model_update": "World-model update",
    "imagination": "Imagination",
    "agent_update": "Agent update (AC)",
    "acting": "Acting",
    "environment_and_replay": "Environment and replay",
}
PHASES_SHORT = ("world model", "imagination", "agent", "acting", "environment")
PUBLISHED = {"world_model_update": 87.7, "imagination": 79.0, "agent_update": 21.2, "acting": 11.0}  # ms, same machine
GOALS = {"world_model_update": 5.0, "imagination": 1.5, "agent_update": 0.7, "acting": 0.3}
PUBLISHED_STEP, GOAL_STEP = 198.9, 8.0


class Work(NamedTuple):
    """Bytes moved and operations done, at least."""

    bytes: float = 0.0
    flop: float = 0.0

    @property
    def ms(self) -> float:
        return 1e3 * max(self.bytes / COPY_BYTES_PER_S, self.flop / DOT_FLOP_PER_S)


class Part(NamedTuple):
    """A row of a table. Works that cannot run at the same time, each with a floor of its own, are a list of several."""

    name: str
    kernels: str  # pattern of their names
    works: list[Work]

    @property
    def floor_ms(self) -> float:
        return sum(work.ms for work in self.works)


# --------------------------------------------------------------------------------------------------------------- counts


class Layer(NamedTuple):
    """A convolution: operations of a pass over one frame, and the numbers that go in and come out."""

    flop: float
    inputs: int
    outputs: int


def convolution_layers(stack: nn.Module, channels: int, size: int) -> list[Layer]:
    """The layers of an encoder or decoder, from (channels, size, size) on."""
    layers = []
    for module in stack.modules():
        if not isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
            continue
        stride, before, inputs = module.stride[0], size, channels * size * size
        size = size * stride if isinstance(module, nn.ConvTranspose2d) else size // stride
        pixels, channels = min(before, size) ** 2, module.out_channels  # each is a product with the whole kernel
        flop = 2.0 * pixels * module.weight.numel()
        layers.append(Layer(flop, inputs, channels * size * size))
    return layers


def linear_sizes(module: nn.Module) -> list[tuple[int, int]]:
    """(outputs, inputs) of the linear layers below."""
    return [tuple(found.weight.shape) for found in module.modules() if isinstance(found, nn.Linear)]


def products(module: nn.Module, rows: int, backward: bool = False, input_gradient: bool = True) -> Work:
    """Products of the linear layers for so many rows, forward or with both gradients; `input_gradient`: of the first
    layer, too. Weights and rows are moved once for each product."""
    flop = moved = 0.0
    for i, (outputs, inputs) in enumerate(linear_sizes(module)):
        passes = (3 if input_gradient or i else 2) if backward else 1
        flop += passes * 2.0 * rows * outputs * inputs
        moved += passes * HALF * (rows * (outputs + inputs) + outputs * inputs)
    return Work(moved, flop)


def added(works: Iterable[Work]) -> Work:
    works = list(works)
    return Work(sum(work.bytes for work in works), sum(work.flop for work in works))


def training_convolutions(layers: list[Layer], frames: int, bytes_in: int) -> list[Work]:
    """Forward and backward of convolutions with batch norm between them, each layer's floor by itself.

    An output is written and read once forward, since its statistics come first. Backward it is read for the sums of its
    norm's gradient and once more for both gradients of its layer; its own gradient is written and read.
    bytes_in: of a number of the first layer's input; its gradient is wanted if that is no byte.
    """
    works = []
    for i, layer in enumerate(layers):
        first = i == 0
        size = bytes_in if first else HALF
        differentiated = not first or bytes_in > 1
        works.append(Work(frames * (size * layer.inputs + HALF * layer.outputs), frames * layer.flop))
        moved = size * layer.inputs + 2 * HALF * layer.outputs + HALF * layer.inputs * differentiated
        works.append(Work(frames * moved, (1 + differentiated) * frames * layer.flop))
    return works


def row_norm_numbers(module: nn.Module) -> int:
    """Numbers in a row of all RMSNorms below."""
    return sum(found.weight.numel() for found in module.modules() if type(found).__name__ == "RMSNorm")


def world_model_parts(world_model: WorldModel, config: Config) -> list[Part]:
    training = config.JointTrainAgent
    rows = training.BatchSize * training.BatchLength  # R
    size, channels = config.BasicSettings.ImageSize, config.BasicSettings.ImageChannel
    pixels = size * size * channels
    decoder_channels = world_model.decoder.layers[0].num_features
    start = math.isqrt(world_model.decoder.linear.out_features // decoder_channels)
    layers = training_convolutions(convolution_layers(world_model.encoder, channels, size), rows, bytes_in=1)
    layers += training_convolutions(convolution_layers(world_model.decoder, decoder_channels, start), rows, HALF)
    latent = world_model.stoch_dim
    mixers = [module for module in world_model.modules() if isinstance(module, Mamba2)]
    core = [Work(HALF * rows * (5 * mixer_columns(mixer) + 5 * mixer.d_inner)) for mixer in mixers]
    parameters = sum(parameter.numel() for parameter in world_model.parameters())
    return [
        Part(*CONVOLUTIONS, layers),
        Part(*BATCH_NORM, []),
        Part(*FRAME_ERROR, [Work(rows * pixels * 3.0), Work(rows * pixels * 5.0)]),
        Part(*PRODUCTS, [products(world_model, rows, backward=True)]),
        Part(*CORE, core),
        Part(*ROW_NORMS, [Work(5.0 * HALF * rows * row_norm_numbers(world_model))]),
        Part(*LATENT, [Work(7.0 * HALF * rows * latent)]),
        Part(*OPTIMISER, [Work(SINGLE * parameters), Work(7.0 * SINGLE * parameters)]),
        Part(*REPLAY, [Work(2.0 * rows * pixels)]),
    ]


def mixer_columns(mixer: Mamba2) -> int:
    """Numbers of a row of (x, B, C)."""
    return mixer.d_inner + 2 * mixer.ngroups * mixer.d_state


def imagination_parts(world_model: WorldModel, agent: ActorCriticAgent, config: Config) -> list[Part]:
    training = config.JointTrainAgent
    rollouts, context, horizon = training.ImagineBatchSize, training.ImagineContextLength, training.ImagineBatchLength
    frames, steps = rollouts * context, rollouts * horizon
    size, channels = config.BasicSettings.ImageSize, config.BasicSettings.ImageChannel
    encoder = convolution_layers(world_model.encoder, channels, size)
    # Statistics are those of training, so that a norm is known beforehand; the first two layers are one kernel.
    front = [Work(frames * (encoder[0].inputs + HALF * encoder[1].outputs), frames * sum(x.flop for x in encoder[:2]))]
    behind = [Work(frames * HALF * (x.inputs + x.outputs), frames * x.flop) for x in encoder[2:]]
    core, mixers = world_model.sequence_model, [m for m in world_model.modules() if isinstance(m, Mamba2)]
    in_context = added([products(core, frames), products(world_model.posterior_head, frames)])
    in_steps = [products(module, steps) for module in (core.layers, world_model.prior_head)]
    heads = [products(module, steps) for module in (world_model.reward_head, world_model.termination_head)]
    first, *others = linear_sizes(agent.actor)
    actor = Work(HALF * steps * sum(first), 2.0 * steps * math.prod(first))
    kept = sum(context + i + 1 for i in range(horizon))  # rows that a sequence looks back at, of all steps
    looked_back = [
        Work(HALF * rollouts * (kept * mixer_columns(m) + horizon * (m.d_inner + m.d_inner))) for m in mixers
    ]
    scans = [Work(HALF * frames * (2 * mixer_columns(m) + 2 * m.d_inner)) for m in mixers]
    feature = world_model.stoch_dim + config.Models.WorldModel.HiddenStateDim
    drawn = Work(steps * (HALF * world_model.stoch_dim + (SINGLE + HALF) * feature))
    acted = Work(flop=2.0 * steps * sum(math.prod(sizes) for sizes in others))
    return [
        Part(*CONVOLUTIONS, [*front, *behind]),
        Part(*STEPS, looked_back),
        Part(*DRAWS, [drawn, acted]),
        Part(*PRODUCTS, [in_context, *in_steps, *heads, actor]),
        Part(*ROW_NORMS, [Work(2.0 * HALF * (frames + steps) * row_norm_numbers(core))]),
        Part(*CORE, scans),
        Part(*BATCH_NORM, []),
        Part(*REPLAY, [Work(2.0 * frames * encoder[0].inputs)]),
    ]


def agent_parts(agent: ActorCriticAgent, config: Config) -> list[Part]:
    training = config.JointTrainAgent
    states = training.ImagineBatchSize * (training.ImagineBatchLength + 1)
    networks = [
        products(network, states, backward=True, input_gradient=False) for network in (agent.actor, agent.critic)
    ]
    networks.append(products(agent.slow_critic, states))
    normed = 5.0 * (row_norm_numbers(agent.actor) + row_norm_numbers(agent.critic)) + 2 * row_norm_numbers(
        agent.slow_critic
    )
    logits = states * agent.value_code.num_bins * HALF
    parameters = sum(parameter.numel() for parameter in agent.trained_parameters())
    width = linear_sizes(agent.critic)[0][1]
    return [
        Part(*PRODUCTS, networks),
        Part(*ROW_NORMS, [Work(HALF * states * normed)]),
        Part(*RETURNS, [Work(5.0 * logits)]),
        Part(*OPTIMISER, [Work(SINGLE * parameters), Work(8.0 * SINGLE * parameters)]),
        Part(*STATISTICS, [Work(SINGLE * states * width)]),
    ]


def count_parts(config: Config) -> dict[str, list[Part]]:
    """{phase: its parts}, from modules that are built on a CPU and never run."""
    device, actions = torch.device("cpu"), gymnasium.spaces.Discrete(NUM_ACTIONS)
    world_model = build_world_model(config, actions, device)
    agent = build_agent(config, world_model.feature_dim, actions, device)
    return {
        "world_model_update": world_model_parts(world_model, config),
        "imagination": imagination_parts(world_model, agent, config),
        "agent_update": agent_parts(agent, config),
    }


# --------------------------------------------------------------------------------------------------------------- tables


@dataclass
class Group:
    """Measured kernels of a part."""

    kernels: int = 0
    ms: float = 0.0


def group_kernels(measured: Mapping[str, Any], parts: Iterable[Part]) -> dict[str, Group]:
    """{name of a part: its kernels}; those that no part names or the list leaves out for being short are the rest."""
    parts = [part for part in parts if part.kernels]
    groups = {part.name: Group() for part in parts}
    for name, count, ms in measured["longest"]:
        found = next((part.name for part in parts if re.search(part.kernels, name)), None)
        if found is not None:
            groups[found].kernels += count
            groups[found].ms += ms
    named = list(groups.values())
    kernels, ms = sum(group.kernels for group in named), sum(group.ms for group in named)
    return {**groups, REST: Group(measured["kernels"] - kernels, measured["busy_ms"] - ms)}


def part_table(parts: list[Part], measured: Mapping[str, Any] | None) -> str:
    """Kernels, time, floor and what bounds it of each part, in Markdown."""
    groups = group_kernels(measured, parts) if measured else {}
    rows = []
    for part in [*parts, Part(REST, "", [])]:
        group = groups.get(part.name, Group())
        work = added(part.works)
        floor = f"{part.floor_ms:.3f}" if part.works else "in others"
        count, ms = (str(group.kernels), f"{group.ms:.3f}") if measured else ("-", "-")
        rows.append([part.name, count, ms, floor, f"{work.bytes / 1e6:,.0f}", f"{work.flop / 1e9:,.0f}"])
    rows.sort(key=lambda row: -float(row[2]) if measured else 0)
    total = [str(sum(g.kernels for g in groups.values())), f"{sum(g.ms for g in groups.values()):.3f}"]
    floor = f"{sum(part.floor_ms for part in parts):.3f}"
    works = added(work for part in parts for work in part.works)
    rows.append(["sum", *(total if measured else "--"), floor, f"{works.bytes / 1e6:,.0f}", f"{works.flop / 1e9:,.0f}"])
    return markdown(["part", "kernels", "ms", "floor, ms", "MB", "GFLOP"], rows)


def markdown(columns: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (columns, ["---"] * len(columns), *rows))


def phase_table(result: Mapping[str, Any], parts: Mapping[str, list[Part]]) -> str:
    """Published, measured, floor and goal of each phase."""
    rows = []
    for phase, title in PHASES.items():
        floor = f"{sum(part.floor_ms for part in parts[phase]):.2f}" if phase in parts else "-"
        before, goal = (f"{table[phase]:g}" if phase in table else "-" for table in (PUBLISHED, GOALS))
        rows.append([title, before, f"{result[phase]['median_ms']:.2f}", floor, goal])
    rows.append(["sum, one after another", f"{PUBLISHED_STEP:g}", f"{result['sum_ms']:.2f}", "-", f"{GOAL_STEP:g}"])
    return markdown(["ms", "published code", "here", "floor", "goal"], rows)


def gap_table(result: Mapping[str, Any]) -> str:
    """How the parts of a phase's time add up; a measurement that has no `host_ms` cannot tell gaps from the host."""
    rows = []
    for phase, title in PHASES.items():
        found = result[phase]
        if not found.get("kernels"):
            continue
        rest = found["median_ms"] - found["busy_ms"]
        apart = [found["gaps_ms"], found["host_ms"]] if "host_ms" in found else []
        figures = (found["busy_ms"], *(apart or [rest]), found["median_ms"])
        rows.append([title, str(found["kernels"]), *(f"{figure:.2f}" for figure in figures)])
    split = ["gaps, ms", "host, ms"] if "host_ms" in result["world_model_update"] else ["gaps and host, ms"]
    return markdown(["phase", "kernels", "kernel time, ms", *split, "sum, ms"], rows)


def loop_table(result: Mapping[str, Any]) -> str:
    """A step of train.py's loop, and what traced steps are the sum of."""
    names = {"default": "as configured by default", "overlapped": "with `OverlapEnvironment`"}
    rows = [[names[way], *(f"{result[way][x]:.2f}" for x in ("median_ms", "min_ms"))] for way in names]
    table = markdown(["a step of the loop, ms", "median interval", "fastest"], rows)
    if "traced" not in result:
        return table
    parts = ("kernels", "busy_ms", "gaps_ms", "idle_ms", "step_ms")
    row = ["a traced step", *(f"{result['traced'][part]:.{0 if part == 'kernels' else 2}f}" for part in parts)]
    columns = ["", "kernels", "kernel time, ms", "gaps, ms", "waits for the host, ms", "sum, ms"]
    return f"{table}\n\n{markdown(columns, [row])}"


def variant_table(report: Mapping[str, Any]) -> str:
    """Every backbone and policy, launched kernel by kernel and as captured, compiled steps."""
    rows = []
    for result in report["results"]:
        phases = [result[phase] for phase in PHASES]
        measured = [phase for phase in phases if phase.get("kernels")]
        busy, kernels = sum(phase["busy_ms"] for phase in measured), sum(phase["kernels"] for phase in measured)
        name = f"{result['backbone']} + {result['policy']}, {result['mode'].replace('+', ' + ')}"
        times = [*(phase["median_ms"] for phase in phases), result["sum_ms"], busy]
        peak = f"{result['peak_memory_besides_replay_mib'] / 1024:.1f}"
        rows.append([name, *(f"{time:.2f}" for time in times), str(kernels), peak])
    return markdown(["ms", *PHASES_SHORT, "sum", "kernel time", "kernels", "GiB"], rows)


def scaling_table(report: Mapping[str, Any]) -> str:
    """Time and memory of the sequence cores by length, and the longest against the shortest."""
    results = report["results"]
    backbones = list(dict.fromkeys(result["backbone"] for result in results))
    cells = {(result["backbone"], result["length"]): result for result in results}
    rows = [
        [f"{length:,}", *(_ms_and_memory(cells.get((backbone, length))) for backbone in backbones)]
        for length in dict.fromkeys(result["length"] for result in results)
    ]
    rows.append(["longest / shortest", *(f"{flatness(results, backbone):.2f}" for backbone in backbones)])
    return markdown([f"L of {report['rows']:,} rows", *backbones], rows)


def _ms_and_memory(result: Mapping[str, Any] | None) -> str:
    if result is None:
        return "-"
    memory = f", {result['peak_MiB']:,.0f} MiB" if "peak_MiB" in result else ""
    return f"{result['median_ms']:.2f} ms{memory}"


def packing_table(report: Mapping[str, Any]) -> str:
    """Throughput of runs side by side."""
    rows = [
        [
            "with" if row["mps"] else "without",
            str(row["runs"]),
            f"{row['steps_per_second']:.1f}",
            f"{row['steps_per_second'] / row['runs']:.1f}",
            f"{row['gain']:.2f}",
            f"{row['reserved_mib_of_one'] / 1024:.1f}",
        ]
        for row in report["results"]
    ]
    columns = ["Multi-Process Service", "runs", "steps/s together", "steps/s each", "against one run", "GiB each"]
    return markdown(columns, rows)


def between(text: str, name: str, content: str) -> str:
    """`text` with `content` between the markers of `name`."""
    begin, end = f"<!-- {name}: made by benchmarks/floors.py -->", f"<!-- end of {name} -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise SystemExit(f"expected one line `{begin}` and one `{end}`")
    return f"{text[: text.index(begin)]}{begin}\n\n{content}\n\n{text[text.index(end) :]}"


def tables(config: Config, result: Mapping[str, Any] | None, loop: Mapping[str, Any] | None) -> dict[str, str]:
    """Every table of the page by the name of its markers; without what was not measured."""
    parts = count_parts(config)
    found = {phase: part_table(parts[phase], result and result[phase]) for phase in parts}
    if result is not None:
        found |= {"phases": phase_table(result, parts), "gaps": gap_table(result)}
    return found if loop is None else {**found, "loop": loop_table(loop)}


def first_result(path: Path) -> dict[str, Any]:
    """Of a JSON of train_step.py."""
    return read(path)["results"][0]


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", type=Path, help="JSON of train_step.py --profile; its first result is taken")
    parser.add_argument("--loop", type=Path, help="JSON of train_step.py --loop --profile, likewise")
    parser.add_argument("--variants", type=Path, help="JSON of train_step.py --profile, all its results")
    parser.add_argument("--scaling", type=Path, help="JSON of scaling.py")
    parser.add_argument("--packing", type=Path, help="JSON of packing.py")
    parser.add_argument("--page", type=Path, help="Markdown whose tables are replaced")
    options = parser.parse_args()
    measured, loop = (path and first_result(path) for path in (options.measured, options.loop))
    made = tables(load_config([], "train.py").config, measured, loop)
    made |= {"variants": variant_table(read(options.variants))} if options.variants else {}
    made |= {"scaling": scaling_table(read(options.scaling))} if options.scaling else {}
    made |= {"packing": packing_table(read(options.packing))} if options.packing else {}
    for name, table in made.items():
        print(f"{name}\n\n{table}\n")
    if options.page:
        text = options.page.read_text()
        for name, table in made.items():
            text = between(text, name, table)
        options.page.write_text(text)


if __name__ == "__main__":
    main()

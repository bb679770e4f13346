"""Encoder and decoder of the default configuration: plain, compiled, on blocks of pixels, with fused batch norm, and
with the native extension's convolutions.

    python benchmarks/bench_convolutions.py [--variants plain "blocks, fused"]

On a GPU, bfloat16 autocast, channels-last. `learning` is forward + backward of both stacks on a batch of `--frames`;
`imagination` the encoder alone on four times as many frames of bytes, in eval mode and without gradients. Each is
captured in a CUDA graph; figures are medians in ms with the 10th and 90th percentile, and the kernels of one pass by
the profiler. Variants are compared in one run and must agree. `layers`: the longest kernel of each convolution on
blocks and of each of its gradients, cuDNN's and, where there is one, the native. Floors are those of
`benchmarks/floors.py`. Writes benchmarks/results/convolutions_<device>.json after every figure.
"""

import argparse
import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import sub_models.space_to_depth
from benchmarks.bench_selective_scan import CALLS_IN_GRAPH, device_time, in_graph
from benchmarks.floors import HALF, Layer, Work, convolution_layers, training_convolutions
from benchmarks.train_step import profiled
from sub_models.compilation import compiled
from sub_models.fused_batch_norm import can_fuse
from sub_models.fused_encoder import fusible_layers
from sub_models.native_convolutions import Plan, convolve, plan_of
from sub_models.space_to_depth import CHANNEL_MULTIPLE, relaid_weight
from sub_models.world_models import Decoder, Encoder
from tools.provenance import provenance

RESULTS = Path(__file__).parent / "results"
STACK = {"image_size": (3, 64, 64), "depth": 16, "mults": [1, 2, 3, 4, 4], "kernel": 5, "padding": "same"}
STACK |= {"norm": "batch", "act": "SiLU", "first_stride_one": True}
STOCH_DIM = 1024
DEVICE = "cuda"
KERNELS = 20  # of a pass that are listed
VARIANTS = {  # re-laid, fused batch norm, native convolutions, compiled
    "plain": (False, False, False, False),
    "plain, compiled": (False, False, False, True),
    "blocks, compiled": (True, False, False, True),
    "blocks, fused": (True, True, False, False),
    "blocks, fused, compiled": (True, True, False, True),
    "blocks, fused, native": (True, True, True, False),
    "blocks, fused, native, compiled": (True, True, True, True),
}


def passes(encoder: Encoder, decoder: Decoder, frames: int, compile_them: bool) -> dict[str, Callable[[], object]]:
    """{what: one pass}, on the same images each time."""
    torch.manual_seed(1)
    image = torch.rand(frames, 64, 64, 3, device=DEVICE).permute(0, 3, 1, 2)
    many = torch.randint(0, 256, (4 * frames, 64, 64, 3), dtype=torch.uint8, device=DEVICE).permute(0, 3, 1, 2)
    stoch = torch.rand(frames, STOCH_DIM, device=DEVICE)
    params = [*encoder.parameters(), *decoder.parameters()]

    def stacks(image: Tensor, stoch: Tensor) -> Tensor:
        return encoder(image).float().square().mean() + (decoder(stoch).float() - image).square().mean()

    def encode(image: Tensor) -> Tensor:
        return encoder(image)

    if compile_them:
        stacks, encode = compiled(stacks), compiled(encode)

    def learning() -> tuple[Tensor, ...]:
        encoder.train()
        decoder.train()
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = stacks(image, stoch)
        return loss.detach(), *torch.autograd.grad(loss, params, allow_unused=True)

    @torch.no_grad()
    def imagination() -> Tensor:
        encoder.eval()
        with torch.autocast(DEVICE, torch.bfloat16):
            return encode(many)

    return {"learning": learning, "imagination": imagination}


def layers_of(stack: Encoder | Decoder) -> list[tuple[nn.Conv2d | nn.ConvTranspose2d, Layer]]:
    """Its convolutions and what each has to do."""
    modules = [module for module in stack.modules() if isinstance(module, nn.Conv2d | nn.ConvTranspose2d)]
    side = STACK["image_size"][1] if isinstance(stack, Encoder) else STACK["image_size"][1] // 16
    return list(zip(modules, convolution_layers(stack, modules[0].in_channels, side), strict=True))


def floors(encoder: Encoder, decoder: Decoder, frames: int) -> dict[str, float]:
    """Least ms of both passes, each layer and direction by itself."""
    encoding, decoding = ([layer for _, layer in layers_of(stack)] for stack in (encoder, decoder))
    learning = training_convolutions(encoding, frames, HALF) + training_convolutions(decoding, frames, HALF)
    front = Work(encoding[0].inputs + HALF * encoding[1].outputs, encoding[0].flop + encoding[1].flop)
    imagination = [front, *(Work(HALF * (layer.inputs + layer.outputs), layer.flop) for layer in encoding[2:])]
    return {
        "learning": sum(work.ms for work in learning),
        "imagination": 4 * frames * sum(work.ms for work in imagination),
    }


def directions(
    module: nn.Conv2d | nn.ConvTranspose2d, inputs: int, frames: int, native: bool
) -> dict[str, Callable[[], object]] | None:
    """{direction: one pass} of a convolution on blocks; None if there are no native kernels. inputs: numbers of a
    frame."""
    weight = relaid_weight(module).detach()
    spare_out, spare_in = (-channels % CHANNEL_MULTIPLE for channels in weight.shape[:2])
    blocks = weight.shape[1] // module.in_channels  # pixels in one
    side = round((inputs / module.in_channels / blocks) ** 0.5)
    weight = F.pad(weight, (0, 0, 0, 0, 0, spare_in, 0, spare_out)).bfloat16().requires_grad_()
    x = torch.randn(frames, side, side, weight.shape[1], device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    plan = None
    if native and (plan := plan_of(module, x)) is None:
        return None
    of_x, of_weight = convolved(x, weight.detach(), plan), convolved(x.detach(), weight, plan)
    grad = torch.randn_like(of_x)
    return {  # an operator of our own makes the gradients of all that could have one
        "forward": lambda: convolved(x.detach(), weight.detach(), plan),
        "input": lambda: torch.autograd.grad(of_x, x, grad, retain_graph=True),
        "weight": lambda: torch.autograd.grad(of_weight, weight, grad, retain_graph=True),
    }


def convolved(x: Tensor, weight: Tensor, plan: Plan | None) -> Tensor:
    """(B, height, width, C) by (O, C, T, T) -> (B, height, width, O)."""
    if plan is not None:
        return convolve(x, weight, plan).rows
    weight = weight.contiguous(memory_format=torch.channels_last)
    return F.conv2d(x.permute(0, 3, 1, 2), weight, padding=weight.shape[-1] // 2).permute(0, 2, 3, 1)


def measure_layers(stacks: list[Encoder | Decoder], frames: int, results: dict[str, object], save: Callable) -> None:
    """Adds for each layer and direction the floor, and cuDNN's and the native longest kernel, to results."""
    torch.backends.cudnn.benchmark = True
    for module, layer in (pair for stack in stacks for pair in layers_of(stack)):
        name = f"{type(module).__name__} {module.in_channels} -> {module.out_channels}, {layer.inputs} numbers in"
        work = Work(HALF * frames * (layer.inputs + layer.outputs), frames * layer.flop)
        figures: dict[str, object] = {"floor_ms": work.ms}
        with torch.autocast(DEVICE, torch.bfloat16):
            for variant, native in (("cuDNN", False), ("native", True)):
                for direction, run in (directions(module, layer.inputs, frames, native) or {}).items():
                    run()
                    figures.setdefault(direction, {})[variant] = round(profiled(run)["longest"][0][2], 5)
        results[name] = figures
        print(f"{name:48} floor {work.ms:.3f}  " + "  ".join(f"{k} {v}" for k, v in figures.items() if k != "floor_ms"))
        sys.stdout.flush()
        save()


def measure(
    stacks: list[Encoder | Decoder],
    variants: list[str],
    frames: int,
    repeats: int,
    results: dict[str, object],
    save: Callable,
) -> None:
    """Adds both passes of every variant to results, which have the floors."""
    torch.backends.cudnn.benchmark = True
    expected = {}
    for variant in variants:
        relaid, fused, native, compile_them = VARIANTS[variant]
        torch.compiler.reset()
        sub_models.space_to_depth.can_fuse = can_fuse if fused else lambda *_: False
        sub_models.space_to_depth.plan_of = plan_of if native else lambda *_: None
        encoder, decoder = (copy.deepcopy(module) for module in stacks)
        encoder.relaid = decoder.relaid = relaid
        encoder.fused = fusible_layers(encoder.layers, *encoder.size, torch.device(DEVICE)) if native else 0
        results[variant] = {}
        for what, run in passes(encoder, decoder, frames, compile_them).items():
            value = run()
            loss = (value[0] if what == "learning" else value.float().norm()).item()
            torch.testing.assert_close(loss, expected.setdefault(what, loss), rtol=2e-2, atol=0)
            figure = device_time(in_graph(run), repeats, CALLS_IN_GRAPH)
            profile = profiled(run)
            profile["longest"] = profile["longest"][:KERNELS]
            results[variant][what] = figure | {"profile": profile}
            floor = results["floor"][what]
            print(f"{variant:32}{what:14}{figure['median_ms']:9.3f} ms   floor {floor:.3f} ms", flush=True)
            save()
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--out", default=None, help="JSON file, default: benchmarks/results/convolutions_<device>.json")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_convolutions: needs a CUDA device")
    torch.manual_seed(0)
    stacks = [Encoder(**STACK), Decoder(STOCH_DIM, final_sigmoid=True, **STACK)]
    stacks = [stack.to(DEVICE, memory_format=torch.channels_last) for stack in stacks]
    name = torch.cuda.get_device_name().lower().replace(" ", "_")
    out = Path(options.out or RESULTS / f"convolutions_{name}.json")
    results: dict[str, object] = {"floor": floors(*stacks, options.frames)}
    layers: dict[str, object] = {}
    report = {**provenance(), "frames": options.frames, "results": results, "layers": layers}

    def save() -> None:
        out.write_text(json.dumps(report, indent=1) + "\n")

    measure(stacks, options.variants, options.frames, options.repeats, results, save)
    measure_layers(stacks, options.frames, layers, save)
    print(f"written: {out}")


if __name__ == "__main__":
    main()

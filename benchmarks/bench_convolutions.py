"""Encoder and decoder of the default configuration: plain, compiled, on blocks of pixels, with fused batch norm, and
with the native extension's convolutions.

    python benchmarks/bench_convolutions.py [--variants plain "blocks, fused"]

On a GPU, bfloat16 autocast, channels-last. `learning` is forward + backward of both stacks on a batch of `--frames`;
`imagination` the encoder alone on four times as many frames of bytes, in eval mode and without gradients. Each is
captured in a CUDA graph; figures are medians in ms with the 10th and 90th percentile, and the kernels of one pass by
the profiler. Variants are compared in one run and must agree. `floor`: the plain layers' operations at the rate of a
large bfloat16 product, 790 TFLOP/s on an H200. Writes benchmarks/results/convolutions_<device>.json.
"""

import argparse
import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import sub_models.space_to_depth
from benchmarks.bench_selective_scan import CALLS_IN_GRAPH, device_time, in_graph
from benchmarks.train_step import profiled
from sub_models.compilation import compiled
from sub_models.fused_batch_norm import can_fuse
from sub_models.fused_encoder import fusible_layers
from sub_models.native_convolutions import plan_of
from sub_models.world_models import Decoder, Encoder
from tools.provenance import provenance

RESULTS = Path(__file__).parent / "results"
STACK = {"image_size": (3, 64, 64), "depth": 16, "mults": [1, 2, 3, 4, 4], "kernel": 5, "padding": "same"}
STACK |= {"norm": "batch", "act": "SiLU", "first_stride_one": True}
STOCH_DIM = 1024
DEVICE = "cuda"
FLOP_PER_S = 790e12  # measured on an H200
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


def operations(stack: nn.Module, inputs: Tensor) -> float:
    """Multiplications and additions of the forward pass of a plain stack."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        stack(inputs)
    return counter.get_total_flops()


def floors(encoder: Encoder, decoder: Decoder, frames: int) -> dict[str, float]:
    """Least ms by operations: forward counts once, backward twice."""
    encode = operations(encoder, torch.rand(1, 3, 64, 64, device=DEVICE))
    decode = operations(decoder, torch.rand(1, STOCH_DIM, device=DEVICE))
    scale = 1e3 * frames / FLOP_PER_S
    return {"learning": 3 * (encode + decode) * scale, "imagination": 4 * encode * scale}


def measure(variants: list[str], frames: int, repeats: int) -> dict[str, dict[str, object]]:
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    modules = [Encoder(**STACK), Decoder(STOCH_DIM, final_sigmoid=True, **STACK)]
    modules = [module.to(DEVICE, memory_format=torch.channels_last) for module in modules]
    results: dict[str, dict[str, object]] = {"floor": floors(*(copy.deepcopy(m).eval() for m in modules), frames)}
    expected = {}
    for variant in variants:
        relaid, fused, native, compile_them = VARIANTS[variant]
        torch.compiler.reset()
        sub_models.space_to_depth.can_fuse = can_fuse if fused else lambda *_: False
        sub_models.space_to_depth.plan_of = plan_of if native else lambda *_: None
        encoder, decoder = (copy.deepcopy(module) for module in modules)
        encoder.relaid = decoder.relaid = relaid
        encoder.fused = fusible_layers(encoder.layers, *encoder.size, torch.device(DEVICE)) if native else 0
        results[variant] = {}
        for what, run in passes(encoder, decoder, frames, compile_them).items():
            value = run()
            loss = (value[0] if what == "learning" else value.float().norm()).item()
            torch.testing.assert_close(loss, expected.setdefault(what, loss), rtol=2e-2, atol=0)
            figure = device_time(in_graph(run), repeats, CALLS_IN_GRAPH)
            results[variant][what] = figure | {"profile": profiled(run, 20)}
            floor = results["floor"][what]
            print(f"{variant:32}{what:14}{figure['median_ms']:9.3f} ms   floor {floor:.3f} ms", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--out", default=None, help="JSON file, default: benchmarks/results/convolutions_<device>.json")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_convolutions: needs a CUDA device")
    results = measure(options.variants, options.frames, options.repeats)
    report = {**provenance(), "frames": options.frames, "results": results}
    name = torch.cuda.get_device_name().lower().replace(" ", "_")
    out = Path(options.out or RESULTS / f"convolutions_{name}.json")
    out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written: {out}")


if __name__ == "__main__":
    main()

"""The convolution benchmark without a GPU: what it counts, and that every layer and direction gets a figure."""

import pytest
import torch

from benchmarks import bench_convolutions
from benchmarks.bench_convolutions import STACK, STOCH_DIM, convolved, directions, floors, layers_of, measure_layers
from sub_models.space_to_depth import relaid_weight
from sub_models.world_models import Decoder, Encoder


@pytest.fixture
def stacks(monkeypatch):
    monkeypatch.setattr(bench_convolutions, "DEVICE", "cpu")
    return [Encoder(**STACK), Decoder(STOCH_DIM, final_sigmoid=True, **STACK)]


def test_floors_of_a_pass_over_both_stacks(stacks):
    """Forward + backward of 2,048 frames is 0.83 TFLOP; 8,192 frames through the encoder are 0.56."""
    found = floors(*stacks, 2048)
    assert 1.2 < found["learning"] < 2.0
    assert 564e9 / 790e12 * 1e3 * 0.99 < found["imagination"] < 0.8


def test_passes_compute_the_layer(stacks):
    """What is timed as a layer on blocks is that layer's convolution and both of its gradients."""
    module, layer = layers_of(stacks[0])[1]
    found = directions(module, layer.inputs, 1, native=False)
    y, (dx,), (dw,) = (found[name]() for name in ("forward", "input", "weight"))
    assert y.shape == (1, 32, 32, 32) and dx.shape == (1, 32, 32, 64) and dw.shape == (32, 64, 3, 3)
    assert directions(module, layer.inputs, 1, native=True) is None


def test_convolved_is_the_convolution(stacks):
    module, _ = layers_of(stacks[1])[0]
    image = torch.randn(1, 4, 4, 64)
    got = convolved(image, relaid_weight(module).detach(), None).unflatten(3, (2, 2, -1)).transpose(2, 3)
    expected = module(image.permute(0, 3, 1, 2)).detach() - module.bias.detach()[:, None, None]
    torch.testing.assert_close(got.flatten(3, 4).flatten(1, 2).permute(0, 3, 1, 2), expected, rtol=1e-3, atol=1e-4)


def test_every_layer_has_its_figures(stacks, monkeypatch):
    monkeypatch.setattr(bench_convolutions, "profiled", lambda run: (run(), {"longest": [["kernel", 1, 0.25]]})[1])
    results, saved = {}, []
    measure_layers(stacks, 1, results, lambda: saved.append(len(results)))
    assert saved == list(range(1, 11))
    for figures in results.values():
        assert figures["floor_ms"] > 0 and {"forward", "input", "weight"} < set(figures)
        assert figures["weight"] == {"cuDNN": 0.25}

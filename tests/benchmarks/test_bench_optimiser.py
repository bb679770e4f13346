"""The optimiser's benchmark: every variant of it makes a step."""

import torch

from benchmarks.bench_optimiser import make_params, variants


def test_every_variant_steps(monkeypatch):
    """A variant that did nothing would look fast."""
    made = []

    def small(device):
        made.append([p[:3].detach().clone().requires_grad_() for p in full if p.dim() == 1][:4])
        for p in made[-1]:
            p.grad = torch.ones_like(p)
        return made[-1]

    full = make_params(torch.device("cpu"))
    monkeypatch.setattr("benchmarks.bench_optimiser.make_params", small)
    calls = variants(torch.device("cpu"), fused=False)
    before = [[p.detach().clone() for p in params] for params in made]
    for call in calls.values():
        call()
    assert len(made) == len(calls) == 4
    assert all(not torch.equal(p, q) for ps, qs in zip(made, before, strict=True) for p, q in zip(ps, qs, strict=True))

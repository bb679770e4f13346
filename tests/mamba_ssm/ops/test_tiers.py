"""The choice of a tier: fastest available, loud about a slower one, refusing what can't run."""

import logging

import pytest
import torch

from mamba_ssm.ops import tiers


@pytest.fixture
def operator(monkeypatch):
    """An operator with a CPU tier declared but not built, in a registry of its own."""
    monkeypatch.setattr(tiers, "_operators", {})
    tiers.register_operator("op", cpu=("cpu",), cuda=("cuda", "triton"))
    tiers.register("op", "reference", lambda: "reference")
    return "op"


def run(operator: str, device: str = "cpu") -> str:
    return tiers.implementation(operator, torch.device(device))()


def test_slower_tier_is_logged_once_with_the_reason(operator, caplog):
    tiers.register_unavailable(operator, "cpu", "no compiler")
    with caplog.at_level(logging.WARNING):
        assert run(operator) == run(operator) == "reference"
    assert [r.getMessage() for r in caplog.records] == [
        "slower tier: op on cpu runs on the reference tier (cpu: no compiler)"
    ]


def test_fastest_available_tier_runs_silently(operator, caplog):
    tiers.register(operator, "cpu", lambda: "cpu")
    with caplog.at_level(logging.WARNING):
        assert run(operator) == "cpu"
    assert not caplog.records


def test_asking_for_a_slower_tier_is_obeyed_and_logged(operator, caplog):
    tiers.register(operator, "cpu", lambda: "cpu")
    with tiers.use_tier("reference"), caplog.at_level(logging.WARNING):
        assert run(operator) == "reference"
    assert "tier 'reference' was asked for" in caplog.text
    assert run(operator) == "cpu"


def test_triton_request_takes_triton_and_not_cuda(operator):
    tiers.register(operator, "triton", lambda: "triton")
    tiers.register(operator, "cuda", lambda: "cuda")
    assert run(operator, "cuda") == "cuda"
    with tiers.use_tier("triton"):
        assert run(operator, "cuda") == "triton"
        assert tiers.explain(operator, "cuda").missing == {"cuda": "tier 'triton' was asked for"}


def test_unavailable_request_raises_with_the_reason(operator):
    tiers.register_unavailable(operator, "cpu", "no compiler")
    with tiers.use_tier("cpu"), pytest.raises(RuntimeError, match=r"tier 'cpu' was asked for.*no compiler"):
        run(operator)


def test_request_for_another_device_raises(operator):
    with tiers.use_tier("cuda"), pytest.raises(RuntimeError, match="'cuda' was asked for, but the tensors are on cpu"):
        run(operator)


def test_operator_without_the_tier_takes_its_fastest_slower_one(monkeypatch):
    monkeypatch.setattr(tiers, "_operators", {})
    tiers.register_operator("plain")
    tiers.register("plain", "reference", lambda: "reference")
    with tiers.use_tier("cpu"):
        assert run("plain") == "reference"


@pytest.mark.parametrize("call, message", [
    (lambda: tiers.use_tier("fast").__enter__(), "tier is 'fast', expected one of auto, reference"),
    (lambda: tiers.explain("absent", "cpu"), "operator 'absent' is unknown"),
    (lambda: tiers.register("op", "triton_", None), "has not declared tier 'triton_'"),
    (lambda: tiers.register_operator("op"), "registered already"),
    (lambda: tiers.register_operator("other", cpu=("cuda",)), "names tier 'cuda' for cpu tensors"),
])  # fmt: skip
def test_wrong_names_are_refused(operator, call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_every_operator_of_the_package_has_a_reference():
    import mamba_ssm  # noqa: F401  registers them

    with tiers.use_tier("reference"):
        assert {tiers.explain(name, "cpu").tier for name in tiers.operators()} == {"reference"}

"""Which implementation of an operator runs: the reference in plain PyTorch, C++ on a CPU, Triton or CUDA on a GPU.

An operator names the tiers it can have on a device; its implementations register themselves (or say why they can't
be had). `implementation(operator, device)` picks one. A slower tier than the device could run is logged once.

    register_operator("selective_scan", cpu=("cpu",), cuda=("cuda",))
    register("selective_scan", "reference", selective_scan_ref)
    register_unavailable("selective_scan", "cpu", "not built: pip install -e . --no-build-isolation")
    with use_tier("reference"):
        implementation("selective_scan", u.device)(u, delta, ...)
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch

TIERS = ("reference", "cpu", "triton", "cuda")          # slowest first
CHOICES = ("auto", *TIERS)
_DEVICE_OF_TIER = {"cpu": "cpu", "triton": "cuda", "cuda": "cuda"}

_log = logging.getLogger(__name__)
_requested: ContextVar[str] = ContextVar("mamba_ssm_tier", default="auto")


@dataclass
class _Operator:
    tiers_by_device: dict[str, tuple[str, ...]]                             # device type -> faster tiers, fastest first
    functions: dict[str, Callable] = field(default_factory=dict)            # tier -> implementation
    reasons: dict[str, str] = field(default_factory=dict)                   # tier -> why it can't be had
    told: set[tuple[str, str]] = field(default_factory=set)                 # (device type, text) already logged
    chosen: dict[tuple, str] = field(default_factory=dict)                  # what `_choose` decided from -> tier

    def why_not(self, tier: str) -> str | None:
        """Why `tier` can't run, or None if it can."""
        return None if tier in self.functions else self.reasons.get(tier, "not built")


@dataclass(frozen=True)
class TierReport:
    """What an operator runs on a device; `missing` maps each faster tier to why it does not run."""

    operator: str
    device: str
    tier: str
    missing: dict[str, str]

    def __str__(self) -> str:
        missing = "; ".join(f"{tier}: {why}" for tier, why in self.missing.items())
        return f"{self.operator} on {self.device} runs on the {self.tier} tier" + (f" ({missing})" if missing else "")


_operators: dict[str, _Operator] = {}


def register_operator(operator: str, cpu: tuple[str, ...] = (), cuda: tuple[str, ...] = ()) -> None:
    """Declare an operator and the tiers beyond the reference that exist for it on a CPU and on a GPU, fastest first."""
    if operator in _operators:
        raise ValueError(f"tiers: operator '{operator}' is registered already")
    for device_type, tiers in (("cpu", cpu), ("cuda", cuda)):
        for tier in tiers:
            if _DEVICE_OF_TIER.get(tier) != device_type:
                raise ValueError(f"tiers: operator '{operator}' names tier '{tier}' for {device_type} tensors")
    _operators[operator] = _Operator({"cpu": cpu, "cuda": cuda})


def register(operator: str, tier: str, function: Callable) -> None:
    """Make `function` the implementation of `operator` on `tier`; it takes what the operator's reference takes."""
    entry = _declared(operator, tier)
    entry.functions[tier] = function
    entry.chosen.clear()


def register_unavailable(operator: str, tier: str, reason: str) -> None:
    """Record why `operator` has no implementation on `tier` on this machine."""
    _declared(operator, tier).reasons[tier] = reason


def operators() -> tuple[str, ...]:
    """The names of all registered operators."""
    return tuple(_operators)


@contextmanager
def use_tier(tier: str) -> Iterator[None]:
    """Run every operator on `tier` ("auto": the fastest there is). An operator that has no such tier by design takes
    its fastest slower one; one whose tier can't be had here raises when it is called. Compiled or captured functions
    keep the tier they were traced with."""
    if tier not in CHOICES:
        raise ValueError(f"use_tier: tier is {tier!r}, expected one of {', '.join(CHOICES)}")
    token = _requested.set(tier)
    try:
        yield
    finally:
        _requested.reset(token)


def requested_tier() -> str:
    """The tier asked for by the innermost `use_tier`, "auto" outside of one."""
    return _requested.get()


def explain(operator: str, device: torch.device | str) -> TierReport:
    """Which tier `operator` runs on for tensors on `device` under the current `use_tier`, and why no faster one does.

    Raises RuntimeError if the tier that was asked for can't run."""
    entry, requested, device_type = _find(operator), _requested.get(), torch.device(device).type
    faster = entry.tiers_by_device.get(device_type, ())
    allowed = _allowed_tiers(operator, entry, requested, device_type, faster)
    tier = next(tier for tier in (*allowed, "reference") if entry.why_not(tier) is None)
    missing = {}
    for candidate in faster:
        if candidate == tier:
            break
        missing[candidate] = entry.why_not(candidate) or f"tier '{requested}' was asked for"
    return TierReport(operator, device_type, tier, missing)


def implementation(operator: str, device: torch.device) -> Callable:
    """The function that runs `operator` on tensors on `device`."""
    return _operators[operator].functions[_choose(operator, device.type)]


def reference_instead(operator: str, device: torch.device, reason: str) -> Callable:
    """The reference of `operator`, for arguments its tier on `device` does not take; each reason is logged once."""
    _tell_once(operator, device.type, f"{operator} on {device.type} runs on the reference tier ({reason})")
    return _operators[operator].functions["reference"]


@torch.compiler.assume_constant_result
def _choose(operator: str, device_type: str) -> str:
    entry = _operators[operator]
    asked = (device_type, _requested.get(), entry.tiers_by_device.get(device_type))
    if asked not in entry.chosen:                            # on every call of an operator: explained only once
        report = explain(operator, device_type)
        if report.missing:
            _tell_once(operator, device_type, str(report))
        entry.chosen[asked] = report.tier
    return entry.chosen[asked]


@torch.compiler.assume_constant_result
def _tell_once(operator: str, device_type: str, what: str) -> None:
    told = _operators[operator].told
    if (device_type, what) not in told:
        told.add((device_type, what))
        _log.warning("slower tier: %s", what)


def _allowed_tiers(
    operator: str, entry: _Operator, requested: str, device_type: str, faster: tuple[str, ...]
) -> tuple[str, ...]:
    if requested == "auto":
        return faster
    if requested == "reference":
        return ()
    if _DEVICE_OF_TIER[requested] != device_type:
        raise RuntimeError(
            f"{operator}: tier '{requested}' was asked for, but the tensors are on {device_type}: "
            f"move them to {_DEVICE_OF_TIER[requested]} or choose another tier"
        )
    if requested in faster and (reason := entry.why_not(requested)):
        raise RuntimeError(f"{operator}: tier '{requested}' was asked for, but can't run here: {reason}")
    return tuple(tier for tier in faster if TIERS.index(tier) <= TIERS.index(requested))


def _find(operator: str) -> _Operator:
    if operator not in _operators:
        raise ValueError(f"tiers: operator '{operator}' is unknown, expected one of {', '.join(_operators)}")
    return _operators[operator]


def _declared(operator: str, tier: str) -> _Operator:
    entry = _find(operator)
    if tier != "reference" and all(tier not in tiers for tiers in entry.tiers_by_device.values()):
        raise ValueError(f"tiers: operator '{operator}' has not declared tier '{tier}'")
    return entry

"""What happens to updates whose loss or gradient is not finite: each is left out and counted on the device; many in a
row end the run with a report, with files to look into it, and `python train.py --debug-batch FILE` looks.

    RUN/faults/step_000001300_world_model/batch.pt   the rows of the last such update, what it gave, which model
                                         /model.pt   the weights that it was to change (it did not)

Letters: B sequences, L rows of each, V metrics of an update.
"""

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from agents import ActorCriticAgent
from replay_buffer import Batch, ReplayBuffer
from sub_models.optimiser import Optimiser
from sub_models.world_models import WorldModel
from tools.checkpoints import CheckpointError, error_reason, read_plain, serialise, write_atomic
from tools.run import Run

logger = logging.getLogger("drama.tools")

FAULT_FORMAT = 1
MODEL_FILE = "model.pt"
SHOWN = 6  # names in one line of a report
REPEATS = 5  # times that a batch is tried: latents and actions are drawn anew, and may or may not meet the fault
ROWS = ("obs", "action", "reward", "termination", "is_first")


class Diverged(RuntimeError):
    """Too many updates in a row were not finite; the message is the report."""


# ----------------------------------------------------------------------------------------------------- during training


class _LastBad:
    """The newest update of one part that was left out, kept on the device without asking it anything."""

    def __init__(self, part: str, optimiser: Optimiser, batch_size: int, batch_length: int) -> None:
        device = optimiser.updates.device
        self.part, self.optimiser, self.batch_length = part, optimiser, batch_length
        self.seen = torch.zeros((), device=device)  # since this process began
        self.first_row = torch.zeros(batch_size, 2, dtype=torch.int64, device=device)
        self.names: list[str] = []
        self.values: Tensor | None = None  # (V,) float32, in the order of `names`

    @torch.no_grad()
    def keep(self, batch: Batch, metrics: dict[str, Tensor]) -> None:
        bad = metrics[f"{self.part}/skipped"] > 0
        fresh = torch.stack([value.float() for value in metrics.values()])
        if self.values is None:
            self.names, self.values = list(metrics), torch.zeros_like(fresh)
        self.seen.add_(bad)
        self.first_row.copy_(torch.where(bad, batch.first_row, self.first_row))
        self.values.copy_(torch.where(bad, fresh, self.values))


class DivergenceWatch:
    """Sees every update of a run, and stops it after `JointTrainAgent.MaxBadUpdates` bad ones in a row.

    `keep` belongs into the (captured) training step. `stop_if_diverged` takes the means that were logged, and asks the
    device for the count only if something was left out since the line before.
    """

    def __init__(
        self, run: Run, world_model: WorldModel, agent: ActorCriticAgent, replay: ReplayBuffer, spaces: dict
    ) -> None:
        self.run, self.replay, self.spaces = run, replay, spaces
        self.modules = {"world_model": world_model, "agent": agent}
        self.limit = run.config.JointTrainAgent.MaxBadUpdates
        self._last = {
            "world_model": _LastBad("world_model", world_model.optimiser, replay.batch_size, replay.batch_length),
            "agent": _LastBad("agent", agent.optimiser, replay.imagine_batch_size, replay.context_length),
        }

    def keep(self, part: str, batch: Batch, metrics: dict[str, Tensor]) -> dict[str, Tensor]:
        """After an update of 'world_model' or 'agent' on `batch`; returns its metrics as they are."""
        self._last[part].keep(batch, metrics)
        return metrics

    def stop_if_diverged(self, step: int, means: Mapping[str, float]) -> None:
        """Raises Diverged, after saving what it takes to find the cause."""
        for part, last in self._last.items():
            share = means.get(f"{part}/skipped", 0.0)
            if not share:
                continue
            if last.optimiser.longest_row.item() >= self.limit:
                raise Diverged(self._report(step, last))
            logger.warning("step %d: %.0f %% of the last updates of %s were not finite", step, 100 * share, part)

    def _report(self, step: int, last: _LastBad) -> str:
        counts = last.optimiser
        lines = [
            f"step {step}: {int(counts.longest_row)} updates of {last.part} in a row were not finite and left out "
            f"(JointTrainAgent.MaxBadUpdates = {self.limit})",
            f"in all: {int(counts.skipped)} left out, {int(counts.updates)} made",
        ]
        if last.seen:
            values = dict(zip(last.names, last.values.tolist(), strict=True))
            lines += [f"the last of them: {describe_values(last.part, values)}", self._save(step, last, values)]
        else:
            lines.append("they were before the run was resumed: which rows they had is not known any more")
        return "\n".join([*lines, f"{self.run.how_to_go_on()}; a smaller learning rate may help"])

    def _save(self, step: int, last: _LastBad, values: dict[str, float]) -> str:
        """Write rows and weights; returns the line that says so."""
        batch = self.replay.read_again(last.first_row, last.batch_length)
        folder = self.run.folder / "faults" / f"step_{step:09d}_{last.part}"
        model = {name: module.state_dict() for name, module in self.modules.items()}
        content = {
            "format": FAULT_FORMAT,
            "part": last.part,
            "step": step,
            "model": MODEL_FILE,
            "values": values,
            "batch": {name: getattr(batch, name) for name in ROWS},
        }
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomic(folder / MODEL_FILE, serialise(self.run.described(step, {**model, "spaces": self.spaces})))
            write_atomic(folder / "batch.pt", serialise(content))
        except OSError as error:
            return f"its rows could not be saved in {folder} ({error_reason(error)})"
        gone = len(last.first_row) - len(batch.obs)
        missing = f" ({gone} of {len(last.first_row)} sequences are overwritten by now)" if gone else ""
        return f"its rows{missing}: python train.py --debug-batch {folder / 'batch.pt'}"


def describe_values(part: str, values: Mapping[str, float]) -> str:
    """Which losses were not finite, or that only the gradient was not."""
    bad = [f"{name} {value}" for name, value in values.items() if not math.isfinite(value)]
    good = [f"{name} {value:.4g}" for name, value in values.items() if math.isfinite(value)]
    if bad:
        return f"not finite {_some(bad)}; finite {_some(good)}"
    return f"every loss of {part} was finite ({_some(good)}), its gradient norm was not"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return (", ".join(names[:SHOWN]) or "nothing") + more


# ------------------------------------------------------------------------------------------------------ the saved batch


@dataclass(frozen=True)
class Fault:
    """A batch.pt: `part` was to be updated at `step` from `batch` and gave `values`; `model` is the file of weights."""

    path: Path
    model: Path
    part: str
    step: int
    values: dict[str, float]
    batch: Batch


def read_fault(path: str | Path) -> Fault:
    """What `DivergenceWatch` saved; executes nothing that is in the file. CheckpointError for anything else."""
    path = Path(path)
    content = read_plain(path)
    content = content if isinstance(content, dict) else {}
    kinds = {"format": int, "part": str, "step": int, "model": str, "values": dict, "batch": dict}
    wrong = [name for name, kind in kinds.items() if not isinstance(content.get(name), kind)]
    if wrong:
        raise CheckpointError(f"{path}: not the batch of an update, lacks {', '.join(wrong)}")
    if content["format"] != FAULT_FORMAT:
        raise CheckpointError(f"{path}: format {content['format']}, this version reads {FAULT_FORMAT}")
    if content["part"] not in ("world_model", "agent"):
        raise CheckpointError(f"{path}: a batch of {content['part']!r}, expected world_model or agent")
    if content["model"] != MODEL_FILE:
        raise CheckpointError(f"{path}: names the model {content['model'][:80]!r}, expected {MODEL_FILE!r} beside it")
    values = {str(name): float(value) for name, value in content["values"].items() if isinstance(value, int | float)}
    batch = _checked_batch(path, content["batch"])
    return Fault(path, path.with_name(content["model"]), content["part"], content["step"], values, batch)


def _checked_batch(path: Path, rows: dict[str, Any]) -> Batch:
    shapes = {name: tuple(rows[name].shape) for name in ROWS if isinstance(rows.get(name), Tensor)}
    if shapes.keys() != set(ROWS):
        raise CheckpointError(f"{path}: its batch lacks {', '.join(name for name in ROWS if name not in shapes)}")
    leading = shapes["reward"]
    types = {"obs": (torch.uint8,), "action": (torch.int64, torch.float32), "is_first": (torch.bool,)}
    for name in ROWS:
        extra = {"obs": (3,), "action": (0, 1)}.get(name, (0,))
        fits = shapes[name][:2] == leading and len(shapes[name]) - 2 in extra and len(leading) == 2
        if not fits or 0 in shapes[name] or rows[name].dtype not in types.get(name, (torch.float32,)):
            raise CheckpointError(f"{path}: {name} is {rows[name].dtype} of shape {shapes[name]}, not rows of a replay")
    return Batch(**{name: rows[name].contiguous() for name in ROWS})


def check_fits(fault: Fault, world_model: WorldModel, agent: ActorCriticAgent, image_shape: tuple[int, ...]) -> None:
    """CheckpointError where the batch was not made for a model with these observations (H, W, C) and actions."""
    obs, action, actions = fault.batch.obs, fault.batch.action, world_model.num_actions
    fits = tuple(obs.shape[2:]) == image_shape and (action.dim() == 2) == (actions is not None)
    if fits and actions is None:
        fits = action.dtype == torch.float32 and action.shape[2] == agent.actions.action_dim
    elif fits:
        fits = action.dtype == torch.int64 and int(action.min()) >= 0 and int(action.max()) < actions
    if not fits:
        raise CheckpointError(f"{fault.path}: its rows are not those of the model {fault.model}")


# ----------------------------------------------------------------------------------------------------- looking into it


@dataclass
class _Findings:
    """What was not finite, in the order in which it appeared."""

    forward: list[str] = field(default_factory=list)
    backward: list[str] = field(default_factory=list)
    values: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.forward or self.backward or self.values)


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor) and value.is_floating_point():
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(f"{name}.{key}", item)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _tensors(f"{name}[{i}]", item)


def not_finite(name: str, value: Any) -> list[str]:
    """'name: 3 of 512 values' for each tensor in (nested) `value` that is not finite everywhere."""
    found = []
    for place, tensor in _tensors(name, value):
        count = int((~torch.isfinite(tensor)).sum())
        if count:
            found.append(f"{place}: {count} of {tensor.numel()} values")
    return found


@contextmanager
def _observed(modules: Mapping[str, nn.Module], findings: _Findings) -> Iterator[None]:
    """Inside, every module's (first bad) output and every parameter's gradient (before clipping) is looked at."""
    with ExitStack() as hooks:
        for part, root in modules.items():
            for name, module in root.named_modules(prefix=part):
                label = f"{name} ({type(module).__name__})"
                hooks.callback(module.register_forward_hook(_note_output(label, findings)).remove)
            for name, parameter in root.named_parameters(prefix=part):
                if parameter.requires_grad:
                    hook = parameter.register_post_accumulate_grad_hook(_note_gradient(name, findings))
                    hooks.callback(hook.remove)
        yield


def _note_output(label: str, findings: _Findings) -> Any:
    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        if not any(known.startswith(label) for known in findings.forward):  # imagination calls modules at every step
            findings.forward.extend(not_finite(label, output))

    return note


def _note_gradient(name: str, findings: _Findings) -> Any:
    return lambda parameter: findings.backward.extend(not_finite(name, parameter.grad))


def repeat_update(fault: Fault, world_model: WorldModel, agent: ActorCriticAgent, horizon: int) -> _Findings:
    """The update once more, eagerly."""
    findings = _Findings()
    with _observed({"world_model": world_model, "agent": agent}, findings):
        metrics = _update(fault, world_model, agent, horizon, findings)
    findings.values = [f"{name} {float(value)}" for name, value in metrics.items() if not torch.isfinite(value)]
    if metrics[f"{fault.part}/skipped"] and not findings:
        findings.backward.append("the gradient norm, of gradients that are each finite")
    return findings


def find_function(fault: Fault, world_model: WorldModel, agent: ActorCriticAgent, horizon: int) -> str:
    """What autograd's anomaly detection says about the update; where the forward call was goes to standard error."""
    with torch.autograd.set_detect_anomaly(True):
        try:
            _update(fault, world_model, agent, horizon, _Findings())
        except RuntimeError as error:
            if "nan values" not in str(error):
                raise
            return str(error).splitlines()[0]
    return "nothing"


def _update(
    fault: Fault, world_model: WorldModel, agent: ActorCriticAgent, horizon: int, findings: _Findings
) -> dict[str, Tensor]:
    batch = Batch(*(getattr(fault.batch, name).to(world_model.device) for name in ROWS))
    if fault.part == "world_model":
        return world_model.update(batch)
    rollout = world_model.imagine(agent, batch, horizon)
    findings.forward.extend(not_finite("rollout", rollout._asdict()))
    return agent.update(rollout)


def examine(fault: Fault, world_model: WorldModel, agent: ActorCriticAgent, horizon: int) -> str:
    """Repeat a bad update and say which tensors are not finite. The modules hold its weights, also afterwards."""
    modules = {"world_model": world_model, "agent": agent}
    before = {part: {k: v.clone() for k, v in module.state_dict().items()} for part, module in modules.items()}
    shape = tuple(fault.batch.reward.shape)
    lines = [
        f"{fault.part} at step {fault.step}, {shape[0]} sequences of {shape[1]} rows, weights of {fault.model}",
        f"when the run stopped: {describe_values(fault.part, fault.values)}",
        f"not finite in the rows: {_some(not_finite('batch', dict(zip(ROWS, fault.batch, strict=False))))}",
        f"not finite in the weights: {_some([place for part in before for place in not_finite(part, before[part])])}",
    ]
    for seed in range(REPEATS):
        torch.manual_seed(seed)
        findings = repeat_update(fault, world_model, agent, horizon)
        _restore(modules, before)
        if findings:
            torch.manual_seed(seed)
            function = find_function(fault, world_model, agent, horizon)
            _restore(modules, before)
            return "\n".join([*lines, *_described(findings, seed, function)])
    return "\n".join([*lines, f"repeated with {REPEATS} seeds: everything was finite; it hangs on what was drawn"])


def _restore(modules: Mapping[str, nn.Module], states: Mapping[str, dict[str, Tensor]]) -> None:
    for part, module in modules.items():
        module.load_state_dict(states[part])


def _described(findings: _Findings, seed: int, function: str) -> list[str]:
    return [
        f"repeated with seed {seed}, not finite in the order of their appearance:",
        f"  outputs: {_some(findings.forward)}",
        f"  losses: {_some(findings.values)}",
        f"  gradients: {_some(findings.backward)}",
        f"  anomaly detection: {function}",
    ]

"""A trace of some consecutive training steps, and a short table of what takes their time.

    RUN/profile_000000310_000000319.json   for chrome://tracing or ui.perfetto.dev, with the first and last step traced
"""

import logging
import time
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

logger = logging.getLogger("drama.tools")

SHOWN = 15  # lines of the table
STEP_MARK = "ProfilerStep"  # torch's name for the span of a whole step


class StepProfiler:
    """Traces the `num_steps` training steps after the first at which both updates are past warm-up and capture.

    Use it as a context manager; None: traces nothing. One more step runs between: torch's profiler starts in it, which
    takes seconds on a GPU.
    """

    def __init__(self, folder: Path, num_steps: int | None, device: torch.device) -> None:
        self.folder, self.num_steps, self.device = folder, num_steps, device
        self._profile: torch.profiler.profile | None = None
        self._steps: list[int] = []  # those that ended since the profiler was started
        self._begun = 0.0
        self._done = num_steps is None

    def __enter__(self) -> "StepProfiler":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        if self._done:
            return
        if self._profile is not None:
            self._profile.stop()
        logger.warning("--profile %d: no trace, the run ended before so many steps were traced", self.num_steps)

    def after_step(self, step: int, settled: bool) -> None:
        """Once at the end of each environment step; `settled`: both updates are past warm-up and capture."""
        if self._done:
            return
        if self._profile is not None:
            self._advance(step)
        elif settled:
            self._start()

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self.device.type == "cuda")
        schedule = torch.profiler.schedule(wait=0, warmup=1, active=self.num_steps, repeat=1)
        self._profile = torch.profiler.profile(activities=activities, schedule=schedule, acc_events=True)
        self._profile.start()

    def _advance(self, step: int) -> None:
        self._steps.append(step)
        last = len(self._steps) == 1 + self.num_steps
        if last or len(self._steps) == 1:
            self._synchronise()
        milliseconds = 1e3 * (time.perf_counter() - self._begun)
        if last:
            self._profile.stop()
            self._write(milliseconds)
        else:
            self._profile.step()
        if len(self._steps) == 1:
            self._begun = time.perf_counter()

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _write(self, milliseconds: float) -> None:
        first, last = self._steps[1], self._steps[-1]
        path = self.folder / f"profile_{first:09d}_{last:09d}.json"
        self._profile.export_chrome_trace(str(path))
        logger.info("%s", table(self._profile.key_averages(), self.num_steps, milliseconds, self.device))
        logger.info("trace of steps %d to %d, for chrome://tracing or ui.perfetto.dev: %s", first, last, path)
        self._done, self._profile = True, None


def table(events: Any, num_steps: int, milliseconds: float, device: torch.device) -> str:
    """What took the time of `num_steps` steps, longest first: kernels on a GPU, torch's operations on a CPU.

    events: the profiler's averages by name. milliseconds: wall clock of all steps.
    """
    on_gpu = device.type == "cuda"
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    rows = [
        ((event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e3 / num_steps, event)
        for event in events
        if event.device_type == kind and not event.key.startswith(STEP_MARK)
    ]
    rows.sort(key=lambda row: -row[0])
    busy, whole = sum(time for time, _ in rows), milliseconds / num_steps
    count = sum(event.count for _, event in rows) / num_steps
    what = "kernels and copies" if on_gpu else "operations"
    lines = [
        f"{num_steps} steps of {whole:.3f} ms while traced: {busy:.3f} ms in {count:.0f} {what} each",
        f"{'ms':>10}{'share':>8}{'calls':>9}  each step",
    ]
    lines += [
        f"{time:>10.3f}{time / whole:>8.1%}{event.count / num_steps:>9.1f}  {event.key[:80]}"
        for time, event in rows[:SHOWN]
    ]
    return "\n".join(lines)

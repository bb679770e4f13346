"""Replay of real experience with dynamic frequency-based sampling.

Row t holds obs_t, action_t, reward_t (what action_t earned), termination_t (action_t ended the life or the episode) and
is_first_t (obs_t opens an episode). Two counters belong to a row that opens sequences: v_t, how often it opened a
world-model sequence, and b_t, how often it opened an imagination context, brought to the scale of v_t by
BatchSize / ImagineBatchSize. Start rows are drawn

    for the world model, without replacement, p_t ∝ exp(-v_t / Tau)
    for imagination, with replacement, p_t ∝ exp((v_t - Alpha b_t - Beta max(0, v_t - b_t)) / ImaginationTau)

E environments write one ring each, of T = capacity / E rows, all at the same slot; n rows have been written to each
ring. A start is the flat index env * T + slot. Everything that sampling needs (n, counters, rows) lives on the storage
device and every shape is fixed, so a sampler neither waits for the device nor depends on how full the rings are, and
can be captured in a CUDA graph.

For the same reason a row's place can be given (`open_row`) and drawn before it is known what the row holds (`append`):
an update whose sequences do not reach it (`reads_open_row`) need not wait for it.

What an episode's last action led to is no row: nothing was done there. These final observations are kept beside the
rings, in host memory, one for each ended episode whose last row is still held. No sampler reads them; `final_obs` finds
those of a batch. A row that has one and termination 0 was cut off, by a time limit or a fault.

Letters: E environments, T ring length, N = E T starts, B batch, L time, A action width.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, NamedTuple

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationError
from torch import Tensor

from mamba_ssm.ops.triton.launch import why_not
from tools.checkpoints import sync_folder

if (NO_KERNELS := why_not()) is None:                      # why there are none
    from sub_models.replay_kernels import can_draw_distinct, draw_distinct, draw_repeated, gather_rows

WEIGHT_BITS = 40               # rows less than 2^-40 = 1e-12 times as likely as the likeliest are never drawn
MAX_CHUNK_BYTES = 256 << 20    # bounds the host memory that saving and loading take besides the rings
_OWN_FILES = re.compile(r"((?:rows|finals)-\d+-\d+|counters-\d+)-[0-9a-f]{16}\.bin|replay\.tmp")
_TEMPORARY = "replay.tmp"
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class Batch(NamedTuple):
    """Rows of experience, B sequences of L consecutive rows of one environment each."""

    obs: Tensor          # (B, L, H, W, C) uint8
    action: Tensor       # (B, L) int64, or (B, L, A) fp32
    reward: Tensor       # (B, L) fp32
    termination: Tensor  # (B, L) fp32, 0 or 1
    is_first: Tensor     # (B, L) bool
    first_row: Tensor | None = None    # (B, 2) int64: ring, and how many rows it had before; None: not from a replay


class FinalObs(NamedTuple):
    """Observations after the last actions of the episodes that end in a batch, n of them, sequence by sequence."""

    sequence: Tensor  # (n,) int64, which of the batch's B sequences
    step: Tensor      # (n,) int64, which of its L rows is the episode's last
    obs: Tensor       # (n, H, W, C) uint8


class ReplayFileError(Exception):
    """A file or manifest of a saved replay that cannot be trusted; the message is one line."""


# --- drawing start rows ---------------------------------------------------------------------------------------------


def world_model_logits(v: Tensor, inverse_tau: float) -> Tensor:
    """-v / Tau, fp64: counts stay exact.   v (N,) int32 -> (N,)."""
    return v.double() * -inverse_tau


def imagination_logits(v: Tensor, b: Tensor, alpha: float, beta: float, inverse_tau: float) -> Tensor:
    """(v - Alpha b - Beta max(0, v - b)) / ImaginationTau, fp64.   v (N,) counts, b (N,) on the scale of v -> (N,)."""
    v = v.double()
    return (v - alpha * b - beta * (v - b).clamp(min=0)) * inverse_tau


def draw_without_replacement(logits: Tensor, valid: Tensor, count: int) -> Tensor:
    """`count` distinct indices in the order of drawing, each with p ∝ exp(logits) among the valid ones not yet drawn.

    The `count` largest of logits + Gumbel noise follow exactly that law. The noise is fp64: with the 24 bits of fp32
    the leaders of 100,000 rows would tie. At least `count` entries must be valid.
    logits (..., N), valid (N,) bool -> (..., count).
    """
    uniform = torch.rand(logits.shape, dtype=torch.float64, device=logits.device)
    gumbel = -torch.log(-torch.log1p(-uniform))              # +inf, never -inf, in the one extreme case uniform = 0
    return (logits + gumbel).masked_fill_(~valid, -torch.inf).topk(count).indices


def draw_with_replacement(logits: Tensor, valid: Tensor, count: int) -> Tensor:
    """`count` independent indices with p ∝ exp(logits) among the valid ones, of which there must be one.

    Weights relative to the largest are cut to integers, whose partial sums are exact and so the same in any order of
    summation: a floating-point scan on a GPU is neither. Weights below 2^-WEIGHT_BITS become 0 and are never drawn.
    logits (N,), valid (N,) bool -> (count,).
    """
    logits = logits.masked_fill(~valid, -torch.inf)
    weights = torch.exp(logits - logits.max()).mul_(2.0 ** weight_bits(logits.numel())).long()    # (N,) floor
    cumulative = weights.cumsum(0)
    total = cumulative[-1:]
    uniform = torch.rand(count, dtype=torch.float64, device=logits.device)
    ticket = torch.minimum((uniform * total).long(), total - 1)               # inside, however the product rounds
    return torch.searchsorted(cumulative, ticket, right=True)                 # first index whose sum exceeds the ticket


def weight_bits(rows: int) -> int:
    """Bits of the largest integer weight: the sum of so many such weights fits int64."""
    return min(WEIGHT_BITS, 62 - math.ceil(math.log2(rows + 1)))


# --- what a row holds -----------------------------------------------------------------------------------------------


class _Field(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    accepts: tuple[type, ...]                              # numpy scalar types that are converted to dtype
    is_valid: Callable[[np.ndarray], np.ndarray] | None    # of each element; None: every value of the dtype is
    expected: str

    def complaint(self, array: np.ndarray) -> str | None:
        """What is wrong with an array of this field's values; None if nothing is."""
        if not any(np.issubdtype(array.dtype, accepted) for accepted in self.accepts):
            return f"is {array.dtype}, expected {self.expected}"
        valid = True if self.is_valid is None else self.is_valid(array)
        if np.all(valid):
            return None
        index = np.unravel_index(np.argmin(valid), array.shape)
        return f"is {array[index]} at {tuple(map(int, index))}, expected {self.expected}"

    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _row_fields(obs_shape: Sequence[int], action_shape: Sequence[int]) -> dict[str, _Field]:
    largest = float(np.finfo(np.float32).max)

    def finite(x: np.ndarray) -> np.ndarray:
        return np.abs(x) <= largest                        # False for NaN too

    def flag(x: np.ndarray) -> np.ndarray:
        return (x == 0) | (x == 1)

    def index(x: np.ndarray) -> np.ndarray:
        return (x >= 0) & (x <= np.iinfo(np.int64).max)

    numbers, flags = "finite fp32 numbers", "bool, or 0 and 1"
    if action_shape:
        action = _Field(tuple(action_shape), torch.float32, (np.floating,), finite, numbers)
    else:
        action = _Field((), torch.int64, (np.integer,), index, "integers from 0 to 2^63 - 1")
    return {
        "obs": _Field(tuple(obs_shape), torch.uint8, (np.uint8,), None, "uint8"),
        "action": action,
        "reward": _Field((), torch.float32, (np.floating, np.integer), finite, numbers),
        "termination": _Field((), torch.float32, (np.bool_, np.floating, np.integer), flag, flags),
        "is_first": _Field((), torch.bool, (np.bool_, np.floating, np.integer), flag, flags),
    }


def row_nbytes(obs_shape: Sequence[int], action_shape: Sequence[int]) -> int:
    """Bytes that one row takes in the buffer and on disk, with its two int32 counters, without a final observation."""
    return sum(field.nbytes() for field in _row_fields(obs_shape, action_shape).values()) + 8


# --- what a manifest holds ------------------------------------------------------------------------------------------


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class _File(_Record):
    name: str
    bytes: NonNegativeInt
    sha256: str


class _Chunk(_File):
    first: NonNegativeInt
    stop: PositiveInt


class _Manifest(_Record):
    format: Literal["drama-replay-1"]
    num_envs: PositiveInt
    ring_length: PositiveInt
    row: dict[str, str]     # field -> "dtype shape"
    rows_written: Annotated[int, Field(ge=0, lt=2**62)]    # to each ring, ever
    chunks: list[_Chunk]    # ascending, each of rows first..stop-1 of every ring
    counters: _File
    finals_written: Annotated[int, Field(ge=0, lt=2**62)] = 0    # final observations, ever; older manifests know none
    finals_held: NonNegativeInt = 0    # the newest of them, whose rows are held
    finals: list[_Chunk] = Field(default_factory=list)    # ascending, each of final observations first..stop-1

    def files(self) -> list[_File]:
        return [*self.chunks, self.counters, *self.finals]


def _parse_manifest(manifest: Any) -> _Manifest:
    try:
        parsed = _Manifest.model_validate(manifest)
    except ValidationError as error:
        fault = error.errors()[0]
        place = ".".join(map(str, fault["loc"])) or "its root"
        raise ReplayFileError(f"replay manifest is malformed at {place}: {fault['msg']}") from None
    for file in parsed.files():
        if not _OWN_FILES.fullmatch(file.name):
            raise ReplayFileError(f"replay manifest names {file.name!r}, which is no replay file")
    return parsed


def manifest_files(manifest: Any) -> list[str]:
    """Names of the files that a buffer is made of which `save` described by `manifest`."""
    return [file.name for file in _parse_manifest(manifest).files()]


def _each_in_order(chunks: Sequence[_Chunk], oldest: int, written: int, what: str) -> Iterator[tuple[_Chunk, int]]:
    """Chunks that hold oldest..written-1 without a gap, each with the first number that it is needed for."""
    covered = oldest
    for chunk in chunks:
        if not (chunk.first <= covered < chunk.stop <= written):
            raise ReplayFileError(f"replay manifest: {chunk.name} gives no {what} {covered}, the next one expected")
        yield chunk, covered
        covered = chunk.stop
    if covered != written:
        raise ReplayFileError(f"replay manifest: its files end at {what} {covered}, expected {written}")


# --- files ----------------------------------------------------------------------------------------------------------


def _as_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous host tensor, shared with it."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def _write_file(folder: Path, stem: str, tensors: Sequence[Tensor]) -> _File:
    """Write the bytes of host tensors one after another; the file takes its name once it is complete and on disk.

    The name carries the content's digest: a file with other content never replaces one that a manifest relies on.
    """
    temporary = folder / _TEMPORARY
    digest = hashlib.sha256()
    try:
        with temporary.open("wb") as file:
            for tensor in tensors:
                content = _as_bytes(tensor.contiguous())
                digest.update(content)
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        name = f"{stem}-{digest.hexdigest()[:16]}.bin"
        temporary.replace(folder / name)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return _File(name=name, bytes=size, sha256=digest.hexdigest())


def _is_stored(folder: Path, file: _File) -> bool:
    path = folder / file.name
    return path.is_file() and path.stat().st_size == file.bytes


def _missing(stored: Sequence[_Chunk], first: int, stop: int, longest: int, period: int) -> Iterator[tuple[int, int]]:
    """Ranges of first..stop-1 that no stored chunk covers, cut at multiples of `period` and to `longest`."""
    for next_stored, resume in [*((chunk.first, chunk.stop) for chunk in stored), (stop, stop)]:
        while first < next_stored:
            cut = min(next_stored, first - first % period + period, first + longest)
            yield first, cut
            first = cut
        first = resume


def _complete(
    folder: Path,
    chunks: Sequence[_Chunk],
    first: int,
    stop: int,
    item_bytes: int,
    write: Callable[[Path, int, int], _Chunk],
    period: int,
) -> list[_Chunk]:
    """Those of `chunks` that `folder` has of first..stop-1, and new ones, written, of what they lack."""
    stored = [chunk for chunk in chunks if chunk.stop > first and _is_stored(folder, chunk)]
    longest = max(1, MAX_CHUNK_BYTES // item_bytes)
    added = [write(folder, *numbers) for numbers in _missing(stored, first, stop, longest, period)]
    return sorted(stored + added, key=lambda chunk: chunk.first)


@contextmanager
def _open_verified(folder: Path, file: _File, expected_bytes: int) -> Iterator[BinaryIO]:
    """A file whose size and digest have been checked, open at its start."""
    path = folder / file.name
    try:
        with path.open("rb") as stream:
            found = os.fstat(stream.fileno()).st_size
            if found != expected_bytes:
                raise ReplayFileError(f"replay file {path} has {found} bytes, expected {expected_bytes}")
            digest = hashlib.sha256()
            while block := stream.read(1 << 20):
                digest.update(block)
            if digest.hexdigest() != file.sha256:
                found = digest.hexdigest()[:16]
                raise ReplayFileError(f"replay file {path} has sha256 {found}, expected {file.sha256[:16]}")
            stream.seek(0)
            yield stream
    except OSError as error:
        raise ReplayFileError(f"replay file {path} cannot be read: {error.strerror}") from error


def _read_tensor(stream: BinaryIO, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    if stream.readinto(_as_bytes(tensor)) != tensor.nbytes:
        raise ReplayFileError(f"replay file {stream.name} changed while it was read")
    return tensor


# --- the buffer -----------------------------------------------------------------------------------------------------


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        if not _is_count(value):
            raise ValueError(f"ReplayBuffer: {name} is {value!r}, expected an integer of at least 1")


def _check_shapes(obs_shape: Sequence[int], action_shape: Sequence[int]) -> None:
    if len(obs_shape) != 3 or not all(map(_is_count, obs_shape)):
        raise ValueError(f"ReplayBuffer: obs_shape is {tuple(obs_shape)}, expected (H, W, C)")
    if len(action_shape) > 1 or not all(map(_is_count, action_shape)):
        raise ValueError(f"ReplayBuffer: action_shape is {tuple(action_shape)}, expected () or (A,)")


def _check_law(sampling: str, **numbers: float) -> None:
    if sampling not in ("dynamic", "uniform"):
        raise ValueError(f"ReplayBuffer: sampling is {sampling!r}, expected 'dynamic' or 'uniform'")
    for name, value in numbers.items():
        if not math.isfinite(value) or (name.endswith("tau") and value <= 0):
            raise ValueError(f"ReplayBuffer: {name} is {value!r}, expected a finite number, above 0 for a temperature")


class ReplayBuffer:
    """Rings of experience on `device`, sampled there and handed out on `out_device`.

    `obs_shape` (H, W, C); `action_shape` () for discrete actions, (A,) for continuous ones. `sampling` is "dynamic"
    (the law at the top of this file) or "uniform" (every start alike; both counters are kept all the same). Randomness
    comes from torch's default generator of the storage device. With the storage on the host and `out_device` a GPU,
    batches are gathered in pinned memory and copied without waiting. With both on one GPU `sub_models.replay_kernels`
    draw the same starts in few launches (`uses_kernels`).
    """

    def __init__(
        self,
        *,
        capacity: int,
        num_envs: int,
        obs_shape: Sequence[int],
        action_shape: Sequence[int],
        device: torch.device | str,
        out_device: torch.device | str,
        batch_size: int,
        batch_length: int,
        imagine_batch_size: int,
        context_length: int,
        sampling: str,
        tau: float,
        imagination_tau: float,
        alpha: float,
        beta: float,
    ) -> None:
        _check_sizes(capacity=capacity, num_envs=num_envs, batch_size=batch_size, batch_length=batch_length)
        _check_sizes(imagine_batch_size=imagine_batch_size, context_length=context_length)
        _check_shapes(obs_shape, action_shape)
        _check_law(sampling, tau=tau, imagination_tau=imagination_tau, alpha=alpha, beta=beta)
        if capacity % num_envs:
            raise ValueError(f"ReplayBuffer: capacity is {capacity}, expected a multiple of num_envs {num_envs}")
        self.num_envs, self.ring_length = num_envs, capacity // num_envs
        self.batch_size, self.batch_length = batch_size, batch_length
        self.imagine_batch_size, self.context_length = imagine_batch_size, context_length
        for name, length, needed in (("batch_length", batch_length, batch_size), ("context_length", context_length, 1)):
            starts = num_envs * max(0, self.ring_length - length + 1)
            if starts < needed:
                raise ValueError(
                    f"ReplayBuffer: capacity is {capacity}, which with num_envs {num_envs} leaves {starts} starts "
                    f"for {name} {length}, expected at least {needed}"
                )

        self.device, self.out_device = torch.device(device), torch.device(out_device)
        self._pin_batches = self.device.type == "cpu" and self.out_device.type == "cuda"
        self._inverse_tau = 1.0 / tau if sampling == "dynamic" else 0.0
        self._inverse_imagination_tau = 1.0 / imagination_tau if sampling == "dynamic" else 0.0
        self._alpha, self._beta = float(alpha), float(beta)
        on_one_gpu = self.device.type == self.out_device.type == "cuda"
        self.uses_kernels = on_one_gpu and NO_KERNELS is None and can_draw_distinct(capacity, batch_size)

        self._fields = _row_fields(obs_shape, action_shape)
        rings = (num_envs, self.ring_length)
        self._data = {
            name: torch.zeros(*rings, *field.shape, dtype=field.dtype, device=self.device)
            for name, field in self._fields.items()
        }
        self._counters = torch.zeros(2, *rings, dtype=torch.int32, device=self.device)  # v and b of each row
        self._written = 0                                                               # n, on the host
        self._written_on_device = torch.zeros((), dtype=torch.int64, device=self.device)
        # In float64 on the device, where kernels would take Python's numbers as float32.
        scale, bits = batch_size / imagine_batch_size, weight_bits(capacity)
        law = (self._inverse_tau, self._alpha, self._beta, self._inverse_imagination_tau, scale, 2.0**bits)
        self._law = torch.tensor(law, dtype=torch.float64, device=self.device)
        self._slots = torch.arange(self.ring_length, device=self.device)
        self._starts = torch.zeros(batch_size, dtype=torch.int64, device=self.device)    # of the sequences drawn last
        self._reads_newest = torch.zeros((), dtype=torch.bool, pin_memory=self.device.type == "cuda")    # do they
        self._row_is_open = False                                  # the newest row has its place, and nothing in it yet
        self._ones = torch.ones(max(batch_size, imagine_batch_size), dtype=torch.int32, device=self.device)
        self._chunks: list[_Chunk] = []
        self._finals: OrderedDict[tuple[int, int], np.ndarray] = OrderedDict()    # (ring, row's number) -> (H, W, C)
        self._finals_written = 0                                                  # ever; those held are the newest
        self._final_chunks: list[_Chunk] = []

    def __len__(self) -> int:
        """Rows held, all environments together."""
        return self.num_envs * min(self._written, self.ring_length)

    @property
    def row_is_open(self) -> bool:
        """Whether the newest row of every environment waits for what it is to hold."""
        return self._row_is_open

    def open_row(self) -> None:
        """Give the next row of every environment its place: it counts as held from now on, and `append` fills it."""
        self._require_complete("open_row")
        self._set_written(self._written + 1)
        self._counters[:, :, self._newest_slot()].zero_()
        self._row_is_open = True

    def append(
        self,
        obs: Any,
        action: Any,
        reward: Any,
        termination: Any,
        is_first: Any,
        final_obs: Mapping[int, np.ndarray] | None = None,
        abandoned_obs: Mapping[int, np.ndarray] | None = None,
    ) -> None:
        """Write the next row of every environment: arrays or tensors of E rows, obs (E, H, W, C) uint8. It is the row
        that is open, if one is.

        Host arrays are checked in full and may be reused at once. A tensor on a GPU must have the stored dtype; its
        values are not looked at, since that would wait for the device.

        final_obs: environment -> the observation (H, W, C) after its action, where that ended the episode.
        abandoned_obs: the same for the row before, where only now it turned out that its episode does not go on.
        """
        values = dict(zip(self._fields, (obs, action, reward, termination, is_first), strict=True))
        rows = {name: self._check_row(name, value) for name, value in values.items()}
        number = self._written - 1 if self._row_is_open else self._written
        finals = self._check_finals("abandoned_obs", abandoned_obs, number - 1)
        finals |= self._check_finals("final_obs", final_obs, number)
        if not self._row_is_open:
            self.open_row()
        slot = self._newest_slot()
        for name, row in rows.items():
            self._data[name][:, slot].copy_(row, non_blocking=True)
        self._finals |= finals
        self._finals_written += len(finals)
        self._drop_overwritten_finals()
        self._row_is_open = False

    def can_sample(self, rows: int) -> bool:
        """Whether at least `rows` rows are held and both samplers have enough starts among them (known on the host)."""
        return (
            len(self) >= rows
            and self._num_starts(self.batch_length) >= self.batch_size
            and self._num_starts(self.context_length) >= 1
        )

    def sample_sequences(self) -> Batch:
        """`batch_size` sequences of `batch_length` rows with distinct starts, for the world model; counts them in v."""
        self._require_complete("sample_sequences")
        self.draw_sequences()
        return self.drawn_sequences()

    def draw_sequences(self) -> None:
        """The first half of `sample_sequences`: which rows open its sequences. None of them is read yet."""
        self._require_starts("draw_sequences", self.batch_length, self.batch_size)
        v, _ = self._counters.flatten(1)
        length, count = self.batch_length, self.batch_size
        if self.uses_kernels:
            counts = (v, self._written_on_device, self._law[:1])
            starts = draw_distinct(*counts, self._uniform(len(v)), self.ring_length, length, count)
        else:
            logits = world_model_logits(v, self._inverse_tau)
            starts = draw_without_replacement(logits, self._valid_starts(length), count)
            v.index_add_(0, starts, self._ones[:count])
        self._starts.copy_(starts)
        reaches_newest = (self._written_on_device - starts % self.ring_length - length) % self.ring_length == 0
        self._reads_newest.copy_(reaches_newest.any(), non_blocking=True)

    def reads_open_row(self) -> bool:
        """Whether a row is open and the sequences drawn last reach it. Then, on a GPU, this waits for the draw."""
        if not self._row_is_open:
            return False
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return bool(self._reads_newest)

    def drawn_sequences(self) -> Batch:
        """The second half of `sample_sequences`: the rows of the sequences that were drawn last, none of which may be
        open (`reads_open_row`)."""
        return self._gather(self._starts, self.batch_length)

    def sample_contexts(self) -> Batch:
        """`imagine_batch_size` independent contexts of `context_length` rows, to imagine from; counts them in b."""
        self._require_complete("sample_contexts")
        self._require_starts("sample_contexts", self.context_length, 1)
        v, b = self._counters.flatten(1)
        length, count = self.context_length, self.imagine_batch_size
        if self.uses_kernels:
            counts = (v, b, self._written_on_device, self._law[1:])
            return self._gather(draw_repeated(*counts, self._uniform(count), self.ring_length, length), length)
        scaled_b = b.double() * (self.batch_size / self.imagine_batch_size)
        logits = imagination_logits(v, scaled_b, self._alpha, self._beta, self._inverse_imagination_tau)
        starts = draw_with_replacement(logits, self._valid_starts(length), count)
        b.index_add_(0, starts, self._ones[:count])        # adds up where a start repeats
        return self._gather(starts, length)

    def _uniform(self, count: int) -> Tensor:
        return torch.rand(count, dtype=torch.float64, device=self.device)

    def holds_run(self, length: int) -> bool:
        """Whether the rings hold `length` consecutive rows of one environment (known on the host)."""
        return self._num_starts(length) >= 1

    def recent_sequences(self, count: int, length: int) -> Batch:
        """The newest `count` runs of `length` rows of the first environment, oldest first.

        For pictures: draws nothing at random and counts nothing. Runs overlap where there are too few rows.
        """
        self._require_starts("recent_sequences", length, 1)
        held = min(self._written, self.ring_length)
        stride = min(length, (held - length) // max(count - 1, 1))
        first = self._written - length - stride * (count - 1)
        starts = torch.arange(first, first + stride * count, stride) if stride else torch.full((count,), first)
        return self._gather((starts % self.ring_length).to(self.device), length)

    def read_again(self, first_row: Tensor, length: int) -> Batch:
        """The sequences of an earlier batch, by its `first_row`, as far as all their rows are still held."""
        ring, number = first_row.to(self.device).unbind(1)
        held = (number >= self._oldest()) & (number + length <= self._written)
        return self._gather((ring * self.ring_length + number % self.ring_length)[held], length)

    def final_obs(self, batch: Batch) -> FinalObs:
        """The final observations of the episodes that end in a batch of this buffer, as far as they are still held.

        To bootstrap from them, or to look at them. Not for a captured step: it waits for the device.
        """
        found = [
            (sequence, step, self._finals[ring, number + step])
            for sequence, (ring, number) in enumerate(batch.first_row.tolist())
            for step in range(batch.obs.shape[1])
            if (ring, number + step) in self._finals
        ]
        places = torch.tensor([place for *place, _ in found], dtype=torch.int64, device=self.out_device).view(-1, 2)
        return FinalObs(*places.unbind(1), self._stacked([frame for *_, frame in found]))

    def recent_final_obs(self, count: int) -> Tensor:
        """The newest final observations, at most `count`, oldest first.   -> (n, H, W, C) uint8."""
        return self._stacked(list(self._finals.values())[-count:])

    def save(self, folder: str | os.PathLike) -> dict[str, Any]:
        """Write what `folder` lacks of the rows held, and all counters; return the manifest for `load` (plain data).

        Rows and final observations already in the folder from an earlier save (or the load that this buffer came from)
        are not written again.
        Files that older manifests name stay as they are, see `prune`. If writing fails, OSError is raised and the
        folder still serves every manifest returned before.
        """
        self._require_complete("save")
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        chunks, finals = self._save_rows(folder), self._save_finals(folder)
        counters = _write_file(folder, f"counters-{self._written}", [self._counters.cpu()])
        sync_folder(folder)
        self._chunks, self._final_chunks = chunks, finals
        return _Manifest(
            format="drama-replay-1",
            num_envs=self.num_envs,
            ring_length=self.ring_length,
            row=self._row_description(),
            rows_written=self._written,
            chunks=self._chunks,
            counters=counters,
            finals_written=self._finals_written,
            finals_held=len(self._finals),
            finals=self._final_chunks,
        ).model_dump()

    def load(self, folder: str | os.PathLike, manifest: Any) -> None:
        """Become the buffer that `save` described by `manifest`: rows, positions and counters, on any storage device.

        Raises ReplayFileError if the manifest belongs to another kind of buffer or a file is missing or altered. Each
        file is verified before its content is used; after a refusal the buffer is empty.
        """
        folder = Path(folder)
        self._set_written(0)
        self._row_is_open = False
        self._chunks, self._final_chunks = [], []
        self._finals, self._finals_written = OrderedDict(), 0
        saved = _parse_manifest(manifest)
        self._check_same_layout(saved)
        oldest = max(0, saved.rows_written - self.ring_length)
        for chunk, first_used in _each_in_order(saved.chunks, oldest, saved.rows_written, "row"):
            self._load_chunk(folder, chunk, first_used)
        self._load_counters(folder, saved.counters)
        self._finals = self._load_finals(folder, saved, oldest)
        self._finals_written = saved.finals_written
        self._chunks, self._final_chunks = list(saved.chunks), list(saved.finals)
        self._set_written(saved.rows_written)

    def prune(self, folder: str | os.PathLike, kept_manifests: Sequence[Any]) -> None:
        """Remove replay files from `folder` that neither a kept manifest nor this buffer's next save relies on.

        That includes what a crash left behind. Call it once the kept manifests are safely on disk.
        """
        needed = {chunk.name for chunk in self._chunks if chunk.stop > self._oldest()}
        needed.update(chunk.name for chunk in self._final_chunks if chunk.stop > self._oldest_final())
        needed.update(name for manifest in kept_manifests for name in manifest_files(manifest))
        for path in Path(folder).iterdir():
            if _OWN_FILES.fullmatch(path.name) and path.name not in needed:
                path.unlink()

    # rows in and out

    def _set_written(self, written: int) -> None:
        self._written = written
        self._written_on_device.fill_(written)
        self._drop_overwritten_finals()

    def _newest_slot(self) -> int:
        return (self._written - 1) % self.ring_length

    def _require_complete(self, method: str) -> None:
        if self._row_is_open:
            raise RuntimeError(f"{method}: a row is open, whose contents are not known yet; append them first")

    def _drop_overwritten_finals(self) -> None:
        while self._finals and next(iter(self._finals))[1] < self._oldest():
            self._finals.popitem(last=False)

    def _check_row(self, name: str, value: Any) -> Tensor:
        """One field's new row as a tensor that can be copied to the storage without waiting."""
        field = self._fields[name]
        shape = (self.num_envs, *field.shape)
        on_device = isinstance(value, Tensor) and value.device.type != "cpu"
        array = value if on_device else np.asarray(value)
        if tuple(array.shape) != shape:
            raise ValueError(f"append: {name} has shape {tuple(array.shape)}, expected {shape}")
        if on_device:
            if value.dtype != field.dtype:
                raise ValueError(f"append: {name} on {value.device} is {value.dtype}, expected {field.dtype}")
            return value
        if complaint := field.complaint(array):
            raise ValueError(f"append: {name} {complaint}")
        row = torch.from_numpy(np.require(array, requirements=["C", "W"])).to(field.dtype)
        return row.pin_memory() if self.device.type == "cuda" else row

    def _check_finals(
        self, name: str, frames: Mapping[int, np.ndarray] | None, number: int
    ) -> dict[tuple[int, int], np.ndarray]:
        """Copies of final observations (H, W, C) under the place of their row: (ring, number)."""
        checked: dict[tuple[int, int], np.ndarray] = {}
        for ring, frame in (frames or {}).items():
            place = (int(ring), number)
            if not 0 <= ring < self.num_envs or number < 0 or place in self._finals:
                raise ValueError(f"append: {name} names environment {ring}, which has no row whose episode ends now")
            field = self._fields["obs"]
            if frame.shape != field.shape:
                raise ValueError(f"append: {name} has shape {frame.shape}, expected {field.shape}")
            if complaint := field.complaint(frame):
                raise ValueError(f"append: {name} {complaint}")
            checked[place] = frame.copy()
        return checked

    def _stacked(self, frames: Sequence[np.ndarray]) -> Tensor:
        stacked = np.stack(frames) if frames else np.zeros((0, *self._fields["obs"].shape), np.uint8)
        return torch.from_numpy(stacked).to(self.out_device)

    def _num_starts(self, length: int) -> int:
        return self.num_envs * max(0, min(self._written, self.ring_length) - length + 1)

    def _require_starts(self, sampler: str, length: int, needed: int) -> None:
        starts = self._num_starts(length)
        if starts < needed:
            raise RuntimeError(
                f"{sampler}: {starts} of the {len(self)} rows held can open {length} rows of one environment, "
                f"expected at least {needed}; append more rows first"
            )

    def _valid_starts(self, length: int) -> Tensor:
        """True where `length` rows that follow each other begin: (N,) bool, N = E T."""
        size = self._written_on_device.clamp(max=self.ring_length)
        age_order = (self._slots - (self._written_on_device - size)) % self.ring_length   # 0 is the oldest row
        return (age_order + length <= size).repeat(self.num_envs)

    def _gather(self, starts: Tensor, length: int) -> Batch:
        slot = starts % self.ring_length
        numbers = self._numbers(starts, slot)
        if self.uses_kernels:
            fields = {name: self._take_runs(name, starts, length) for name in self._fields}
        else:
            slots = (slot[:, None] + self._slots[:length]) % self.ring_length             # (B, L), over the ring's end
            rows = (starts - slot)[:, None] + slots
            fields = {name: self._take(name, rows) for name in self._fields}
        return Batch(**fields, first_row=numbers)

    def _numbers(self, starts: Tensor, slot: Tensor) -> Tensor:
        """(B,) starts and their slots -> (B, 2) ring, and how many rows it was given before that one; on out_device."""
        newest = self._written_on_device - 1
        number = newest - (newest - slot) % self.ring_length
        numbers = torch.empty(len(starts), 2, dtype=torch.int64, device=self.device, pin_memory=self._pin_batches)
        torch.stack((starts // self.ring_length, number), dim=1, out=numbers)
        return numbers.to(self.out_device, non_blocking=True)

    def _words(self, name: str) -> Tensor:
        """A field's rows (N, W) as the widest words that fit: bytes are slow."""
        nbytes = self._fields[name].nbytes()
        word = next(word for word in _WORDS if nbytes % word.itemsize == 0)
        return self._data[name].view(self.num_envs * self.ring_length, -1).view(word)

    def _take_runs(self, name: str, starts: Tensor, length: int) -> Tensor:
        """`length` rows of a field from each of the starts (B,) on, on the storage device -> (B, L, ...)."""
        taken = gather_rows(self._words(name), starts, self.ring_length, length)
        return taken.view(self._fields[name].dtype).view(len(starts), length, *self._fields[name].shape)

    def _take(self, name: str, rows: Tensor) -> Tensor:
        """Rows (B, L) of a field -> (B, L, ...) on out_device."""
        field, words = self._fields[name], self._words(name)
        shape, pinned = (rows.numel(), words.shape[1]), self._pin_batches
        taken = torch.empty(shape, dtype=words.dtype, device=self.device, pin_memory=pinned)
        torch.index_select(words, 0, rows.flatten(), out=taken)
        return taken.view(field.dtype).view(*rows.shape, *field.shape).to(self.out_device, non_blocking=True)

    # files

    def _oldest(self) -> int:
        return max(0, self._written - self.ring_length)

    def _oldest_final(self) -> int:
        return self._finals_written - len(self._finals)

    def _row_nbytes(self) -> int:
        return self.num_envs * sum(field.nbytes() for field in self._fields.values())

    def _final_nbytes(self) -> int:
        return 2 * torch.int64.itemsize + self._fields["obs"].nbytes()

    def _save_rows(self, folder: Path) -> list[_Chunk]:
        """Files never go over the ring's end."""
        numbers = (self._oldest(), self._written)
        return _complete(folder, self._chunks, *numbers, self._row_nbytes(), self._write_chunk, self.ring_length)

    def _save_finals(self, folder: Path) -> list[_Chunk]:
        first, stop = self._oldest_final(), self._finals_written
        return _complete(folder, self._final_chunks, first, stop, self._final_nbytes(), self._write_finals, stop + 1)

    def _ring_slice(self, name: str, first: int, stop: int) -> Tensor:
        start = first % self.ring_length
        return self._data[name][:, start : start + stop - first]

    def _write_chunk(self, folder: Path, first: int, stop: int) -> _Chunk:
        content = [self._ring_slice(name, first, stop).cpu() for name in self._fields]
        file = _write_file(folder, f"rows-{first}-{stop}", content)
        return _Chunk(first=first, stop=stop, **file.model_dump())

    def _load_chunk(self, folder: Path, chunk: _Chunk, first_used: int) -> None:
        """Copy rows first_used..stop-1 of a verified file into the rings."""
        length = chunk.stop - chunk.first
        if chunk.first // self.ring_length != (chunk.stop - 1) // self.ring_length:
            raise ReplayFileError(f"replay manifest: {chunk.name} is {chunk.first}..{chunk.stop}, over the ring's end")
        with _open_verified(folder, chunk, length * self._row_nbytes()) as stream:
            for name, field in self._fields.items():
                raw_dtype = torch.uint8 if field.dtype == torch.bool else field.dtype     # a byte of 2 is no bool
                rows = _read_tensor(stream, (self.num_envs, length, *field.shape), raw_dtype)
                if complaint := field.complaint(rows.numpy()):
                    raise ReplayFileError(f"replay file {stream.name}: {name} {complaint}")
                self._ring_slice(name, first_used, chunk.stop).copy_(rows[:, first_used - chunk.first :])

    def _write_finals(self, folder: Path, first: int, stop: int) -> _Chunk:
        oldest = self._oldest_final()
        places, frames = zip(*islice(self._finals.items(), first - oldest, stop - oldest), strict=True)
        content = [torch.tensor(places), torch.from_numpy(np.stack(frames))]    # (n, 2) int64, (n, H, W, C) uint8
        file = _write_file(folder, f"finals-{first}-{stop}", content)
        return _Chunk(first=first, stop=stop, **file.model_dump())

    def _load_finals(self, folder: Path, saved: _Manifest, oldest: int) -> OrderedDict[tuple[int, int], np.ndarray]:
        """The final observations of rows from number `oldest` on, in their order."""
        finals: OrderedDict[tuple[int, int], np.ndarray] = OrderedDict()
        first, newest = saved.finals[0].first if saved.finals else saved.finals_written, oldest
        for chunk, _ in _each_in_order(saved.finals, first, saved.finals_written, "final observation"):
            count = chunk.stop - chunk.first
            with _open_verified(folder, chunk, count * self._final_nbytes()) as stream:
                places = _read_tensor(stream, (count, 2), torch.int64)
                frames = _read_tensor(stream, (count, *self._fields["obs"].shape), torch.uint8).numpy()
            for (ring, number), frame in zip(places.tolist(), frames, strict=True):
                if number < oldest:    # overwritten since its file was written
                    continue
                possible = 0 <= ring < self.num_envs and newest <= number < saved.rows_written
                if not possible or (ring, number) in finals:
                    raise ReplayFileError(f"replay file {stream.name}: no episode can end here at row {number}")
                finals[ring, number], newest = frame.copy(), number
        if len(finals) != saved.finals_held:
            found, expected = len(finals), saved.finals_held
            raise ReplayFileError(f"replay manifest: its files hold {found} final observations, expected {expected}")
        return finals

    def _load_counters(self, folder: Path, file: _File) -> None:
        with _open_verified(folder, file, self._counters.nbytes) as stream:
            counters = _read_tensor(stream, self._counters.shape, torch.int32)
        if counters.min() < 0:
            raise ReplayFileError(f"replay file {folder / file.name} holds a negative counter, expected counts")
        self._counters.copy_(counters)

    def _row_description(self) -> dict[str, str]:
        return {name: f"{field.dtype} {field.shape}".removeprefix("torch.") for name, field in self._fields.items()}

    def _check_same_layout(self, saved: _Manifest) -> None:
        own = {"num_envs": self.num_envs, "ring_length": self.ring_length, **self._row_description()}
        found = {"num_envs": saved.num_envs, "ring_length": saved.ring_length, **saved.row}
        for name in own | found:
            if own.get(name) != found.get(name):
                raise ReplayFileError(
                    f"replay manifest: {name} is {found.get(name)}, expected {own.get(name)} as in this buffer"
                )

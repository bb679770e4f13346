"""A whole optimiser step in three launches: LaProp or AdamW over all parameters, with clipping, skipping and warm-up.

    1  s_c = Σ g² over each chunk c of a gradient
    2  norm = √Σ s_c, whether all is finite, clip = min(1, max_norm / (norm + 1e-6)), the counts, the learning rate
    3  with g ← clip · g, element by element (t counts the updates of the parameter, this one included)
       LaProp  v ← β2 v + (1-β2) g²,  m ← β1 m + (1-β1) g / (√(v / (1-β2^t)) + ε),  θ ← θ (1 - lr·wd) - lr m / (1-β1^t)
       AdamW   m ← β1 m + (1-β1) g,  v ← β2 v + (1-β2) g²,  θ ← θ (1 - lr·wd) - lr m / (1-β1^t) / (√(v / (1-β2^t)) + ε)

Gradients are read twice, everything else once; nothing waits for the device. The kernels find the tensors through a
table with a row for each parameter that has a gradient. It is copied to the device before launch 1, because gradients
lie elsewhere in every eager step. In a CUDA graph they stay where they are, and the copy is a node that reads the same
host memory in each replay: that memory is kept, and never written again.

Letters: p parameter, g gradient, m mean and v mean of squares; R rows of the table, C chunks of all parameters. State
is that of the optimiser it steps for, in its own format. All tensors are float32; m, v and g lie in memory like p.
"""

import math
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

# Elements that one program works on. A step of 7.2 M parameters takes 0.077 ms in a CUDA graph on an H200, 0.082 ms
# with 1024, 0.094 ms with 4096.
CHUNK = 2048
SUMS = 1024  # chunks that launch 2 adds up at once
CAPTURED_UPDATES = 256  # updates that CUDA graphs may hold in all, unless more are asked for

ROW = np.dtype(
    [
        ("first_chunk", "i8"),  # chunks of the rows before
        ("numel", "i8"),
        ("p", "i8"),  # addresses
        ("g", "i8"),
        ("m", "i8"),
        ("v", "i8"),
        ("count", "i8"),  # address of t, before this step
        ("counts", "i8"),  # 1 in the one row of all that share t that moves it, else 0
        ("lr_tensor", "i8"),  # address of what is added to lr, or 0
        ("lr", "f8"),
        ("beta1", "f8"),
        ("beta2", "f8"),
        ("log2_beta1", "f8"),
        ("log2_beta2", "f8"),
        ("eps", "f8"),
        ("weight_decay", "f8"),
    ]
)
_FIELDS = tl.constexpr(len(ROW.names))
_FIRST_CHUNK, _NUMEL, _P, _G, _M, _V, _COUNT, _COUNTS, _LR_TENSOR, _LR = map(tl.constexpr, range(10))
_BETA1, _BETA2, _LOG2_BETA1, _LOG2_BETA2, _EPS, _WEIGHT_DECAY = map(tl.constexpr, range(10, 16))


class Clipping(Protocol):
    """What launch 2 decides by, and the 0-d tensors that it moves."""

    max_grad_norm: float
    learning_rate: float
    warmup_steps: int
    lr: Tensor
    updates: Tensor
    skipped: Tensor
    skipped_in_a_row: Tensor
    longest_row: Tensor


# ------------------------------------------------------------------------------------------------------------- kernels


@triton.jit
def _field(row_ptr, FIELD: tl.constexpr):
    return tl.load(row_ptr + FIELD)


@triton.jit
def _real(row_ptr, FIELD: tl.constexpr):
    return tl.load((row_ptr + FIELD).to(tl.pointer_type(tl.float64)))


@triton.jit
def _tensor(row_ptr, FIELD: tl.constexpr, ALIGNED: tl.constexpr):
    """Pointer to a tensor; aligned ones are read 16 bytes at a time."""
    pointer = _field(row_ptr, FIELD).to(tl.pointer_type(tl.float32))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _find_row(table_ptr, num_rows, chunk, ROWS: tl.constexpr):
    """The row whose parameter has this chunk."""
    rows = tl.arange(0, ROWS)
    firsts = tl.load(table_ptr + rows * _FIELDS + _FIRST_CHUNK, mask=rows < num_rows, other=1 << 62)  # (ROWS,)
    return table_ptr + (tl.sum((firsts <= chunk).to(tl.int32), axis=0) - 1) * _FIELDS


@triton.jit
def _count_steps(table_ptr, num_rows, going, ROWS: tl.constexpr):
    """t ← t + 1 for every count, if the step is made."""
    rows = tl.arange(0, ROWS)
    row_ptr = table_ptr + rows * _FIELDS
    moves = tl.load(row_ptr + _COUNTS, mask=rows < num_rows, other=0) > 0  # (ROWS,)
    count_ptr = tl.load(row_ptr + _COUNT, mask=moves, other=0).to(tl.pointer_type(tl.float32))
    tl.store(count_ptr, tl.load(count_ptr, mask=moves, other=0.0) + going.to(tl.float32), mask=moves)


@triton.jit
def _square_sum(row_ptr, first, CHUNK: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr):
    offsets = first + tl.arange(0, CHUNK)  # (CHUNK,) int64
    g_ptr = _tensor(row_ptr, _G, ALIGNED) + offsets
    g = tl.load(g_ptr, mask=offsets < _field(row_ptr, _NUMEL), other=0.0) if MASKED else tl.load(g_ptr)
    return tl.sum(g * g, axis=0)


@triton.jit
def _square_sums_kernel(table_ptr, sums_ptr, num_rows, ROWS: tl.constexpr, CHUNK: tl.constexpr, ALIGNED: tl.constexpr):
    chunk = tl.program_id(0)
    row_ptr = _find_row(table_ptr, num_rows, chunk, ROWS)
    first = (chunk - _field(row_ptr, _FIRST_CHUNK)) * CHUNK
    if first + CHUNK <= _field(row_ptr, _NUMEL):  # without masks loads are wide
        total = _square_sum(row_ptr, first, CHUNK, ALIGNED, False)
    else:
        total = _square_sum(row_ptr, first, CHUNK, ALIGNED, True)
    tl.store(sums_ptr + chunk, total)


@triton.jit
def _clip_kernel(
    table_ptr, num_rows, sums_ptr, num_chunks, loss_ptr, enabled_ptr, lr_ptr, updates_ptr, skipped_ptr, in_a_row_ptr,
    longest_row_ptr, decision_ptr, metrics_ptr, max_norm, learning_rate, warmup_steps, ROWS: tl.constexpr,
    SUMS: tl.constexpr, STRIPS: tl.constexpr, HAS_ENABLED: tl.constexpr,
):  # fmt: skip
    """decision: whether the step is made (1 or 0) and the gradients' factor; metrics: norm, clipped, skipped."""
    total = tl.zeros((SUMS,), tl.float32)
    index = tl.arange(0, SUMS)
    for _ in range(STRIPS):
        total += tl.load(sums_ptr + index, mask=index < num_chunks, other=0.0)
        index += SUMS
    norm = tl.sqrt_rn(tl.sum(total, axis=0))
    loss = tl.load(loss_ptr)
    finite = (norm < float("inf")) & (tl.abs(loss) < float("inf"))  # false for NaN
    going = finite
    if HAS_ENABLED:
        going = finite & (tl.load(enabled_ptr) != 0)
    made, missed = going.to(tl.float32), 1.0 - finite.to(tl.float32)

    updates = tl.load(updates_ptr) + made
    tl.store(updates_ptr, updates)
    tl.store(skipped_ptr, tl.load(skipped_ptr) + missed)
    in_a_row = tl.load(in_a_row_ptr) * (1.0 - made) + missed
    tl.store(in_a_row_ptr, in_a_row)
    tl.store(longest_row_ptr, tl.maximum(tl.load(longest_row_ptr), in_a_row))
    warmth = tl.where(updates < warmup_steps, tl.div_rn(updates, tl.maximum(warmup_steps, 1.0)), 1.0)
    tl.store(lr_ptr, learning_rate * warmth)
    _count_steps(table_ptr, num_rows, going, ROWS)

    tl.store(decision_ptr, made)
    tl.store(decision_ptr + 1, tl.minimum(tl.div_rn(max_norm, norm + 1e-6), 1.0))
    tl.store(metrics_ptr, tl.where(finite, norm, 0.0))
    tl.store(metrics_ptr + 1, (finite & (norm > max_norm)).to(tl.float32))
    tl.store(metrics_ptr + 2, missed)


@triton.jit
def _count_kernel(table_ptr, num_rows, found_inf_ptr, decision_ptr, ROWS: tl.constexpr, HAS_FOUND_INF: tl.constexpr):
    """Launch 2 of a step without clipping."""
    going = tl.program_id(0) == 0  # true
    if HAS_FOUND_INF:
        going = tl.load(found_inf_ptr) == 0.0
    _count_steps(table_ptr, num_rows, going, ROWS)
    tl.store(decision_ptr, going.to(tl.float32))
    tl.store(decision_ptr + 1, 1.0)


@triton.jit
def _update_chunk(
    row_ptr, first, factor, ADAM: tl.constexpr, CHUNK: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr
):
    """Launch 3 for the elements from `first` on of one parameter."""
    beta1, beta2 = _real(row_ptr, _BETA1), _real(row_ptr, _BETA2)
    t = tl.load(_tensor(row_ptr, _COUNT, False)).to(tl.float64)
    lr_ptr = _tensor(row_ptr, _LR_TENSOR, False)
    lr = tl.load(lr_ptr, mask=_field(row_ptr, _LR_TENSOR) != 0, other=0.0) + _real(row_ptr, _LR).to(tl.float32)
    # 1 - β^t in float64, because β2^t is near 1
    correction1 = (1.0 - tl.exp2(t * _real(row_ptr, _LOG2_BETA1))).to(tl.float32)
    correction2 = (1.0 - tl.exp2(t * _real(row_ptr, _LOG2_BETA2))).to(tl.float32)
    keep1, keep2 = beta1.to(tl.float32), beta2.to(tl.float32)
    share1, share2 = (1.0 - beta1).to(tl.float32), (1.0 - beta2).to(tl.float32)
    eps = _real(row_ptr, _EPS).to(tl.float32)
    shrink = 1.0 - lr * _real(row_ptr, _WEIGHT_DECAY).to(tl.float32)
    step_size = tl.div_rn(lr, correction1)

    offsets = first + tl.arange(0, CHUNK)  # (CHUNK,) int64
    p_ptr, g_ptr = _tensor(row_ptr, _P, ALIGNED) + offsets, _tensor(row_ptr, _G, ALIGNED) + offsets
    m_ptr, v_ptr = _tensor(row_ptr, _M, ALIGNED) + offsets, _tensor(row_ptr, _V, ALIGNED) + offsets
    mask = offsets < _field(row_ptr, _NUMEL) if MASKED else None
    g = tl.load(g_ptr, mask=mask) * factor
    m, v, p = tl.load(m_ptr, mask=mask), tl.load(v_ptr, mask=mask), tl.load(p_ptr, mask=mask)
    v = v * keep2 + g * g * share2
    if ADAM:
        m = m * keep1 + g * share1
        direction = tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), tl.sqrt_rn(correction2)) + eps)
    else:
        m = m * keep1 + tl.div_rn(g, tl.sqrt_rn(tl.div_rn(v, correction2)) + eps) * share1
        direction = m
    tl.store(m_ptr, m, mask=mask)
    tl.store(v_ptr, v, mask=mask)
    tl.store(p_ptr, p * shrink - direction * step_size, mask=mask)


@triton.jit
def _update_kernel(
    table_ptr, decision_ptr, num_rows, ADAM: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    if tl.load(decision_ptr) > 0:
        factor = tl.load(decision_ptr + 1)
        chunk = tl.program_id(0)
        row_ptr = _find_row(table_ptr, num_rows, chunk, ROWS)
        first = (chunk - _field(row_ptr, _FIRST_CHUNK)) * CHUNK
        if first + CHUNK <= _field(row_ptr, _NUMEL):
            _update_chunk(row_ptr, first, factor, ADAM, CHUNK, ALIGNED, False)
        else:
            _update_chunk(row_ptr, first, factor, ADAM, CHUNK, ALIGNED, True)


# ------------------------------------------------------------------------------------------------------------- launches


class _Table(NamedTuple):
    """The table on the device, and what a launch has to know of it."""

    rows: Tensor  # (R, fields) int64
    num_chunks: int  # C
    aligned: bool
    held: list[Tensor | None]  # gradients and learning rates, which may be copies: must live until the launches

    @property
    def block(self) -> int:
        """R rounded up to a power of two."""
        return triton.next_power_of_2(max(len(self.rows), 1))


class FusedStep:
    """Steps for a `LaProp` or `torch.optim.AdamW`, whose groups, state and gradients it uses.

    Args:
        optimiser: float32 parameters on one CUDA device (or on the CPU, in Triton's interpreter), each without gaps in
            its memory. State that it lacks is made as its own `step` makes it.
        clipping: what `clipped_step` needs; None if only `step` is called.
        captured_updates: updates that CUDA graphs may hold in all, `CAPTURED_UPDATES` if that is more.
    """

    def __init__(
        self, optimiser: torch.optim.Optimizer, clipping: Clipping | None = None, captured_updates: int = 0
    ) -> None:
        self.optimiser, self.clipping = optimiser, clipping
        self.captured_updates = max(captured_updates, CAPTURED_UPDATES)
        self.is_adam = isinstance(optimiser, torch.optim.AdamW)
        params = [p for group in optimiser.param_groups for p in group["params"]]
        self._first_param, self.device = params[0], params[0].device
        # Pinned memory cannot be had while a graph is captured: what captured copies read is set aside here.
        self._pinned, self._pinned_used = torch.empty(0, dtype=torch.int64), 0
        if self.device.type == "cuda":
            size = self.captured_updates * len(params) * len(ROW.names)
            self._pinned = torch.empty(size, dtype=torch.int64, pin_memory=True)

    def step(self, found_inf: Tensor | None = None) -> None:
        """One update with the gradients as they are, unless `found_inf` (0-d) is not 0."""
        with torch.cuda.device_of(self._first_param):
            table, decision = self._table(), torch.empty(2, device=self.device)
            found = decision if found_inf is None else found_inf.to(self.device)
            _count_kernel[(1,)](
                table.rows, len(table.rows), found, decision, ROWS=table.block, HAS_FOUND_INF=found_inf is not None
            )
            self._launch_update(table, decision)

    def clipped_step(self, loss: Tensor, enabled: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """One update with the gradients scaled down to the norm allowed, unless `enabled` (0-d) is False or loss or
        norm are not finite; `.grad` stays unscaled.   -> norm (0 if not finite), 1 if clipped, 1 if not finite; 0-d."""
        with torch.cuda.device_of(self._first_param):
            table = self._table()
            sums = torch.empty(table.num_chunks, device=self.device)
            decision, metrics = torch.empty(2, device=self.device), torch.empty(3, device=self.device)
            if table.num_chunks:
                _square_sums_kernel[(table.num_chunks,)](
                    table.rows, sums, len(table.rows), ROWS=table.block, CHUNK=CHUNK, ALIGNED=table.aligned, num_warps=8
                )
            clip = self.clipping
            _clip_kernel[(1,)](
                table.rows, len(table.rows), sums, table.num_chunks, loss.float(),
                clip.updates if enabled is None else enabled, clip.lr, clip.updates, clip.skipped,
                clip.skipped_in_a_row, clip.longest_row, decision, metrics, float(clip.max_grad_norm),
                float(clip.learning_rate), float(clip.warmup_steps), ROWS=table.block, SUMS=SUMS,
                STRIPS=-(-table.num_chunks // SUMS), HAS_ENABLED=enabled is not None, num_warps=8,
            )  # fmt: skip
            self._launch_update(table, decision)
        return metrics[0], metrics[1], metrics[2]

    def _launch_update(self, table: _Table, decision: Tensor) -> None:
        if table.num_chunks:
            _update_kernel[(table.num_chunks,)](
                table.rows, decision, len(table.rows), ADAM=self.is_adam, ROWS=table.block, CHUNK=CHUNK,
                ALIGNED=table.aligned, num_warps=8,
            )  # fmt: skip

    def _table(self) -> _Table:
        rows, held, counts, chunks = [], [], set(), 0
        for group in self.optimiser.param_groups:
            settings, rate = self._settings(group)
            held.append(rate)
            for p in group["params"]:
                if p.grad is None:
                    continue
                held.append(like_memory_of(p, p.grad))
                addresses = [tensor.data_ptr() for tensor in (p, held[-1], *self._state(group, p))]
                moves = addresses[-1] not in counts
                counts.add(addresses[-1])
                rows.append((chunks, p.numel(), *addresses, moves, *settings))
                chunks += -(-p.numel() // CHUNK)
        table = np.array(rows, dtype=ROW)
        aligned = all(not (table[name] % 16).any() for name in ("p", "g", "m", "v"))
        return _Table(self._to_device(table), chunks, aligned, held)

    def _settings(self, group: dict[str, Any]) -> tuple[tuple[float, ...], Tensor | None]:
        """The last fields of a group's rows, and the tensor that one of them points to, if any."""
        lr, betas = group["lr"], group["betas"]
        logs = [math.log2(beta) if beta > 0 else -math.inf for beta in betas]
        if isinstance(lr, Tensor):
            rate = lr.to(self.device, torch.float32)
            return (rate.data_ptr(), 0.0, *betas, *logs, group["eps"], group["weight_decay"]), rate
        return (0, lr, *betas, *logs, group["eps"], group["weight_decay"]), None

    def _state(self, group: dict[str, Any], p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """m, v and t of a parameter; LaProp has one t for a group, kept with its first parameter."""
        state = self.optimiser.state[p]
        for name in ("exp_avg", "exp_avg_sq"):
            if name in state:
                state[name] = like_memory_of(p, state[name])
            else:
                state[name] = torch.zeros_like(p, memory_format=torch.preserve_format)
        counting = state if self.is_adam else self.optimiser.state[group["params"][0]]
        if "step" not in counting:
            counting["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
        return state["exp_avg"], state["exp_avg_sq"], counting["step"]

    def _to_device(self, table: np.ndarray) -> Tensor:
        """(R,) rows -> (R, fields) int64 on the device, without waiting for it."""
        host = torch.from_numpy(table.view(np.int64).reshape(len(table), len(ROW.names)))
        if self.device.type != "cuda":
            return host
        if not torch.cuda.is_current_stream_capturing():
            return host.pin_memory().to(self.device, non_blocking=True)
        end = self._pinned_used + host.numel()
        if end > self._pinned.numel():
            raise RuntimeError(f"FusedStep: CUDA graphs hold {self.captured_updates} updates of this optimiser already")
        kept = self._pinned[self._pinned_used : end].view_as(host).copy_(host)
        self._pinned_used = end
        return kept.to(self.device, non_blocking=True)


def like_memory_of(p: Tensor, tensor: Tensor) -> Tensor:
    """`tensor` with its elements in the memory order of `p`, which has the same shape: itself, or a copy."""
    ours, theirs = p.stride(), tensor.stride()
    same = ours == theirs or all(a == b or size == 1 for a, b, size in zip(ours, theirs, p.shape, strict=True))
    return tensor if same else torch.empty_like(p, memory_format=torch.preserve_format).copy_(tensor)

"""The Triton tier of state-space duality: tile sizes, launches and operators. Mathematics and kernels: ssd_kernels.py.

Operators in `torch.ops.mamba_ssm_triton`, with the arguments of `mamba_chunk_scan_combined`: `ssd_scan` gives out and
the final state, `ssd_scan_backward` all derivatives (backward keeps the inputs and the states that enter spans of
chunks, and walks over the states inside spans again),
`ssd_packed_states` the states at the ends of packed sequences, `ssd_packed_states_backward` their derivatives. Same
input, same bits: no sum is left to the order in which programs end. Autocast leaves them alone: tiles are multiplied in
the inputs' own precision (float32 in tf32 only if torch.backends.cuda.matmul.allow_tf32).

Letters: B batch, L length, H heads, P headdim, G groups, N state size, Q rows of a chunk (tile), K chunks, S spans of
chunks, or packed sequences.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F

from mamba_ssm.ops.checks import is_differentiated
from mamba_ssm.ops.numerics import accumulate_dtype, packed_seq_idx, sequence_starts
from mamba_ssm.ops.tiers import reference_instead
from mamba_ssm.ops.triton.launch import Launch, ceil_div, define, differentiate, is_direct, next_power_of_two
from mamba_ssm.ops.triton.ssd_kernels import (
    BOUNDARY,
    LOG_DECAY_FLOOR,
    _adding_kernel,
    _both_walks_kernel,
    _packed_backward_kernel,
    _passing_kernel,
    _scan_backward_kernel,
    _scan_kernel,
    _states_kernel,
)
from mamba_ssm.ops.triton.tuning import tuned

Tensor = torch.Tensor
Outputs = Tensor | list[Tensor]

MAX_STATE, MAX_HEADDIM = 256, 128      # what the tiles hold
PASSING_BLOCK = 1024
ADDING_BLOCK, ADDING_TILE = 512, (64, 16)
PROGRAMS_PER_SM = 4                    # spans are split until the walk has about so many programs
SPAN_UNIT, MIN_UNITS_IN_SPAN = 64, 4   # rows; every plan's chunks divide the unit, so that both passes share spans


class Tiles(NamedTuple):
    """Shape of one kernel's tiles, and its warps."""

    rows: int                          # Q
    p: int                             # BLOCK_P
    n: int                             # BLOCK_N
    warps: int
    stages: int


PLAIN = Tiles(0, 0, 0, 4, 2)           # of kernels without tiles


class Plan(NamedTuple):
    """How the kernels cut up one call: tiles of each kernel, and chunks in a span of forward and backward."""

    dot: str                           # "bf16", "tf32" or "tf32x3"
    scan: Tiles
    states: Tiles                      # the states alone, ahead of the scan
    backward_states: Tiles             # the same in backward, over chunks of `backward`
    backward: Tiles


@lru_cache(maxsize=256)
def plan_for(length: int, headdim: int, state: int, chunk_size: int, dot: str) -> Plan:
    """Tile sizes, a small table; chunk_size caps the rows of a chunk (16 at least)."""
    full_p, full_n = _power_of_two(headdim), _power_of_two(state)
    cap = min(_power_of_two(chunk_size + 1) // 2, _power_of_two(length))
    narrow = dot == "bf16"
    scan_p = min(full_p, 64 if full_n <= (128 if narrow else 64) else 32)
    states_n = min(full_n, 128 if narrow else 64)
    backward_n = min(full_n, 64 if narrow else 32)
    scan_rows = backward_rows = 64
    if not narrow:                                       # else thousands of bytes a thread go to local memory
        scan_rows, backward_rows = (32, 32) if full_n <= 64 else (16, 32 if full_n * full_p <= 128 * 128 else 16)
    scan_rows, backward_rows = (max(16, min(rows, cap)) for rows in (scan_rows, backward_rows))
    # one warp, 1024 sequences of 8 rows with N 16 on an H200: 0.092 ms, four 0.111
    warps, stages = (1, 1) if narrow and scan_rows == 16 and full_n == 16 else (4, 2)
    return Plan(
        dot, Tiles(scan_rows, scan_p, full_n, warps, stages), Tiles(scan_rows, min(full_p, 64), states_n, 4, 2),
        Tiles(backward_rows, min(full_p, 64), states_n, 4, 2), Tiles(backward_rows, full_p, backward_n, 4, 2),
    )  # fmt: skip


def _power_of_two(size: int) -> int:
    return max(16, next_power_of_two(size))


def other_scans(plan: Plan) -> Iterator[Plan]:
    """What autotuning tries for the forward pass."""
    for rows in {plan.scan.rows, max(16, plan.scan.rows // 2)}:
        for p in {plan.scan.p, max(16, plan.scan.p // 2)}:
            for warps in (1, 2, 4, 8):
                yield plan._replace(
                    scan=plan.scan._replace(rows=rows, p=p, warps=warps), states=plan.states._replace(rows=rows)
                )


def other_backwards(plan: Plan) -> Iterator[Plan]:
    """What autotuning tries for the backward pass."""
    for rows in {plan.backward.rows, max(16, plan.backward.rows // 2)}:
        for n in {plan.backward.n, max(16, plan.backward.n // 2)}:
            for warps in (4, 8):
                yield plan._replace(
                    backward=plan.backward._replace(rows=rows, n=n, warps=warps),
                    backward_states=plan.backward_states._replace(rows=rows),
                )


def dot_precision(*tensors: Tensor) -> str:
    """What tiles of these dtypes are multiplied in. float16's range holds no states and large steps, so it is wide."""
    if all(tensor.dtype == torch.bfloat16 for tensor in tensors):
        return "bf16"
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3"


@lru_cache(maxsize=16)
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def units_in_span(units: int, programs: int, device: torch.device) -> int:
    """Units of rows that one program walks over, where `programs` would walk over all of them each."""
    wanted = ceil_div(PROGRAMS_PER_SM * _multiprocessors(device), programs)
    return max(min(units, MIN_UNITS_IN_SPAN), ceil_div(units, wanted))


def rows_in_span(x: Tensor) -> int:
    """Of x (B, L, H, P)."""
    batch, length, heads, headdim = x.shape
    units = ceil_div(length, SPAN_UNIT)
    return SPAN_UNIT * units_in_span(units, batch * heads * ceil_div(headdim, SPAN_UNIT), x.device)


class _Kind:
    """What follows from the layouts and options of the inputs of a call, and the kernels built for it. `inputs` are
    dense; options begin with chunk_size, dt_softplus, dt_min and dt_max."""

    def __init__(self, inputs: Sequence[Tensor | None], options: tuple) -> None:
        x, dt, _, B, C, D, z, dt_bias, initial, seq_idx = inputs[:10]
        chunk_size, dt_softplus, dt_min, dt_max = options[:4]
        self.limits = (dt_min, dt_max)
        self.batch, self.length, self.heads, self.headdim = x.shape
        self.groups, self.state = B.shape[2:]
        self.rows_in_span = rows_in_span(x)
        self.spans = ceil_div(self.length, self.rows_in_span)
        self.plan = plan_for(self.length, self.headdim, self.state, chunk_size, dot_precision(x, B, C))
        limited = dt_min > 0.0 or dt_max < float("inf") or not dt_softplus                # softplus is above 0
        self.sizes = (self.heads, self.headdim, self.heads // self.groups, self.state)    # H, P, R, N
        self.rules = (self.plan.dot, dt_softplus, limited)                                # DOT, SOFTPLUS, LIMITED
        self.has = (dt_bias is not None, seq_idx is not None)                             # HAS_BIAS, HAS_SEQ
        self.row_strides = (*x.stride()[:3], *dt.stride(), *B.stride()[:3], *C.stride()[:3])
        self.z_strides, self.seq_strides, self.D_strides = _strides(z, 3), _strides(seq_idx, 1), _D_strides(D)
        self.tuning = (
            self.batch.bit_length(), self.length.bit_length(), *self.sizes, *self.rules, *self.has, z is not None,
            initial is not None,
        )  # fmt: skip
        self.launches: dict[Plan, dict[str, Launch]] = {}

    def states_size(self, spans: int) -> int:
        """Numbers in (B, S, H, P, N)."""
        return self.batch * spans * self.heads * self.headdim * self.state


_kinds: dict[tuple, tuple[_Kind, tuple[int, ...]]] = {}          # and which of the inputs are to be made dense
_MOST_KINDS = 1024
_DENSE_AXES = (1, 0, 1, 1, 1, 0, 1, 1, 2, 1)                     # of x, dt, A, B, C, D, z, dt_bias, initial, seq_idx


class _Call:
    """One call's tensors as the kernels take them, with their last axes dense, and its kind.

    inputs: x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, then others, of which so many axes are made dense.
    What a kernel is launched with but for addresses follows from the kind and the place in the code: it is kept."""

    def __init__(self, operator: str, inputs: tuple, options: tuple, others_dense: tuple[int, ...] = ()) -> None:
        key = (operator, inputs[0].get_device(), options, *[None if t is None else _layout(t) for t in inputs])
        found = _kinds.get(key)
        if found is None:
            axes = _DENSE_AXES + others_dense
            dense = [_dense(tensor, count) for tensor, count in zip(inputs, axes, strict=True)]
            loose = tuple(i for i, tensor in enumerate(inputs) if dense[i] is not tensor)
            if len(_kinds) >= _MOST_KINDS:
                _kinds.clear()
            found = _kinds[key] = (_Kind(dense, options), loose)
        self.operator, (self.kind, loose) = operator, found
        if loose:
            inputs = tuple(tensor.contiguous() if i in loose else tensor for i, tensor in enumerate(inputs))
        (self.x, self.dt, self.A, self.B, self.C, self.D, self.z, self.dt_bias, self.initial, self.seq_idx,
         *self.others) = inputs  # fmt: skip

    def run_tuned(self, others: Callable[[Plan], Iterator[Plan]], run: Callable[[], Outputs]) -> Outputs:
        """`run`, which goes by this call's plan, with the table's plan or the fastest found."""
        kind = self.kind

        def run_with(plan: Plan) -> Outputs:
            self.plan, self.launches = plan, kind.launches.setdefault(plan, {})
            return run()

        return run_with(tuned(self.operator, self.x.device, kind.tuning, kind.plan, others(kind.plan), run_with))

    def state_like(self, spans: int) -> Tensor:
        """Room for (B, S, H, P, N) float32."""
        kind = self.kind
        return self.x.new_empty(kind.batch, spans, kind.heads, kind.headdim, kind.state, dtype=torch.float32)

    def scratch(self, *sizes: int) -> tuple[Tensor, ...]:
        """Room for so many float32 numbers each, in one piece of memory."""
        sizes = [ceil_div(size, 4) * 4 for size in sizes]                                 # of 16 bytes
        return torch.split_with_sizes(self.x.new_empty(sum(sizes), dtype=torch.float32), sizes)

    def launch(self, place: str, kernel, tensors: tuple, describe: Callable[[], tuple]) -> None:
        """Launch a kernel on tensors. describe() -> the grid, its numbers, its constants and tiles, which follow from
        the kind, the plan and the place."""
        launch = self.launches.get(place)
        if launch is None:
            grid, numbers, constants, tiles = describe()
            launch = self.launches[place] = Launch(kernel, grid, (*numbers, *constants), tiles.warps, tiles.stages)
        launch(tensors)

    def states(self, place, tiles, rows, z, columns, entering, *, reverse=False, ends=None, each=None, last=None,
               decay=None, precise=True):  # fmt: skip
        """Launch `_states_kernel` over chunks of `tiles.rows` rows; entering (B, S or 1, H, P, N)."""
        kind = self.kind
        tensors = (
            rows, z, columns, self.dt, self.A, self.dt_bias, self.seq_idx, ends, entering, each, last, decay
        )

        def describe():
            spans = kind.spans if ends is None else ends.shape[0] - 1
            blocks = ceil_div(kind.headdim, tiles.p) * ceil_div(kind.state, tiles.n)
            numbers = (
                *kind.limits, kind.length, kind.rows_in_span // tiles.rows, *rows.stride()[:3], *_strides(z, 3),
                *columns.stride()[:3], *self.dt.stride(), *kind.seq_strides, *_state_strides(entering),
            )  # fmt: skip
            constants = (
                *kind.sizes, *tiles[:3], *kind.rules, z is not None, *kind.has, entering is not None, reverse,
                ends is not None, each is not None, last is not None, decay is not None, precise,
            )  # fmt: skip
            return (kind.heads * blocks, spans, kind.batch), numbers, constants, tiles

        self.launch(place, _states_kernel, tensors, describe)

    def both_walks(self, tiles, dout, dfinal, entering, leaving, dinitial):
        """Launch `_both_walks_kernel`."""
        kind, z, initial = self.kind, self.z, self.initial
        tensors = (
            self.x, self.B, dout, z, self.C, self.dt, self.A, self.dt_bias, self.seq_idx, initial, dfinal, entering,
            leaving, dinitial,
        )  # fmt: skip

        def describe():
            blocks = ceil_div(kind.headdim, tiles.p) * ceil_div(kind.state, tiles.n)
            numbers = (
                *kind.limits, kind.length, ceil_div(kind.length, tiles.rows), *self.x.stride()[:3],
                *self.B.stride()[:3], *dout.stride()[:3], *kind.z_strides, *self.C.stride()[:3], *self.dt.stride(),
                *kind.seq_strides, *_strides(initial, 2), *_strides(dfinal, 2),
            )  # fmt: skip
            constants = (
                *kind.sizes, *tiles[:3], *kind.rules, z is not None, *kind.has, initial is not None,
                dfinal is not None,
            )  # fmt: skip
            return (kind.heads * blocks, 2, kind.batch), numbers, constants, tiles

        self.launch("both walks", _both_walks_kernel, tensors, describe)

    def pass_on(self, place, states, decay, initial, *, reverse=False, last=None):
        """Launch `_passing_kernel` on states (B, S, H, P, N), in place; initial, last (B, H, P, N)."""
        kind = self.kind

        def describe():
            size = kind.headdim * kind.state
            constants = (kind.heads, size, PASSING_BLOCK, initial is not None, reverse, last is not None)
            grid = (ceil_div(size, PASSING_BLOCK), kind.heads, kind.batch)
            return grid, (states.shape[1], *_strides(initial, 2)), constants, PLAIN

        self.launch(place, _passing_kernel, (states, decay, initial, last), describe)

    def walk_start(self, tiles, rows, z, columns, first, *, reverse=False, last=None, precise=True):
        """What enters each span: (B, S, H, P, N), or for one span `first` (B, H, P, N) as (B, 1, H, P, N), or None.

        `last` (B, H, P, N), if given, gets what is left after all spans, where there is more than one."""
        spans = self.kind.spans
        if spans == 1:
            return None if first is None else first.unsqueeze(1)
        states = self.state_like(spans)
        decay = self.x.new_empty(self.kind.batch, spans, self.kind.heads, dtype=torch.float32)
        self.states(
            "states of spans", tiles, rows, z, columns, None, reverse=reverse, last=states, decay=decay,
            precise=precise,
        )  # fmt: skip
        self.pass_on("passing", states, decay, first, reverse=reverse, last=last)
        return states


def _layout(tensor: Tensor) -> tuple:
    """All that a compiled kernel and what it is launched with depend on, but the address."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr() % 16 == 0


def _dense(tensor: Tensor | None, axes: int = 1) -> Tensor | None:
    """The tensor with its last axes contiguous."""
    if tensor is None:
        return None
    expected = 1
    for axis in range(tensor.dim() - 1, tensor.dim() - 1 - axes, -1):
        if tensor.stride(axis) != expected and tensor.shape[axis] != 1:
            return tensor.contiguous()
        expected *= tensor.shape[axis]
    return tensor


def _strides(tensor: Tensor | None, axes: int) -> tuple[int, ...]:
    return (0,) * axes if tensor is None else tensor.stride()[:axes]


def _state_strides(states: Tensor | None) -> tuple[int, ...]:
    """Of batch, span (0 if there is one) and head."""
    if states is None:
        return (0, 0, 0)
    return states.stride(0), states.stride(1) if states.shape[1] > 1 else 0, states.stride(2)


def _D_strides(D: Tensor | None) -> tuple[int, int]:
    if D is None:
        return (0, 0)
    return (D.stride(0), D.stride(1) if D.dim() == 2 else 0)


def _scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None, dt_bias: Tensor | None,
    initial_states: Tensor | None, seq_idx: Tensor | None, chunk_size: int, dt_softplus: bool, dt_min: float,
    dt_max: float, final_state: bool, for_backward: bool,
) -> list[Tensor]:  # fmt: skip
    """-> out (B, L, H, P) like x, with final_state that state (B, H, P, N) float32, and if there is more than one span
    and for_backward, which needs digits of them that the scan does not use, the states that enter spans
    (B, S, H, P, N) float32."""
    inputs = (x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx)
    call = _Call("ssd_scan", inputs, (chunk_size, dt_softplus, dt_min, dt_max, final_state, for_backward))
    return call.run_tuned(other_scans, lambda: _run_scan(call, final_state, for_backward))


def _run_scan(call: _Call, final_state: bool, for_backward: bool) -> list[Tensor]:
    kind, x, tiles = call.kind, call.x, call.plan.scan
    out = x.new_empty(x.shape)
    final = call.state_like(1).squeeze(1) if final_state else None
    entering = call.walk_start(call.plan.states, x, None, call.B, call.initial, precise=for_backward)
    tensors = (
        x, call.dt, call.A, call.B, call.C, call.D, call.z, call.dt_bias, call.seq_idx, entering, out, final
    )

    def describe():
        grid = (kind.heads * ceil_div(kind.headdim, tiles.p), kind.spans, kind.batch)
        numbers = (
            *kind.limits, kind.length, kind.rows_in_span // tiles.rows, *kind.row_strides, *kind.D_strides,
            *kind.z_strides, *kind.seq_strides, *_state_strides(entering),
        )  # fmt: skip
        constants = (
            *kind.sizes, *tiles[:3], *kind.rules, call.D is not None, call.z is not None, *kind.has,
            entering is not None, kind.length > tiles.rows, final_state,
        )  # fmt: skip
        return grid, numbers, constants, tiles

    call.launch("scan", _scan_kernel, tensors, describe)
    kept = entering if for_backward and kind.spans > 1 else None
    return [tensor for tensor in (out, final, kept) if tensor is not None]


def _packed_states(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, dt_bias: Tensor | None, initial_states: Tensor | None,
    seq_idx: Tensor | None, cu_seqlens: Tensor, follows: bool, chunk_size: int, dt_softplus: bool, dt_min: float,
    dt_max: float,
) -> Tensor:  # fmt: skip
    """States after the last rows of packed sequences (S, H, P, N) float32, 0 for empty ones. follows: seq_idx is what
    follows from cu_seqlens, so that each state depends on its own sequence alone; else the first is to start at row 0
    for a backward pass."""
    inputs = (x, dt, A, B, B, None, None, dt_bias, initial_states, seq_idx, cu_seqlens)
    call = _Call("ssd_packed_states", inputs, (chunk_size, dt_softplus, dt_min, dt_max), others_dense=(1,))
    return call.run_tuned(lambda plan: (), lambda: _run_packed_states(call))


def _run_packed_states(call: _Call) -> Tensor:
    kind, tiles, (ends,) = call.kind, call.plan.states, call.others
    entering = call.walk_start(tiles, call.x, None, call.B, call.initial)
    states = call.x.new_empty(
        ends.shape[0] - 1, kind.heads, kind.headdim, kind.state, dtype=torch.float32
    )
    if states.numel():
        call.states("ends", tiles, call.x, None, call.B, entering, ends=ends, last=states)
    return states


def _packed_states_backward(
    dstates: Tensor, states: Tensor | None, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, dt_bias: Tensor | None,
    initial_states: Tensor | None, seq_idx: Tensor | None, cu_seqlens: Tensor, chunk_size: int, dt_softplus: bool,
    dt_min: float, dt_max: float,
) -> list[Tensor]:  # fmt: skip
    """Derivatives of x, dt, A, B, dt_bias, initial_states, of those that there are. states, what `_packed_states` gave,
    and seq_idx are given unless the latter follows from cu_seqlens."""
    inputs = (x, dt, A, B, B, None, None, dt_bias, initial_states, seq_idx, cu_seqlens, dstates, states)
    options = (chunk_size, dt_softplus, dt_min, dt_max)
    call = _Call("ssd_packed_states_backward", inputs, options, others_dense=(1, 4, 4))
    return call.run_tuned(lambda plan: (), lambda: _run_packed_backward(call, initial_states))


def _run_packed_backward(call: _Call, initial_states: Tensor | None) -> list[Tensor]:
    kind, tiles, (ends, dstates, states) = call.kind, call.plan.backward, call.others
    x, dt, A, B, dt_bias, entering = call.x, call.dt, call.A, call.B, call.dt_bias, call.initial
    if states is not None:
        entering, dstates = _across_sequences(call, states, dstates)
    sequences, heads = ends.shape[0] - 1, kind.heads
    dx, ddt = torch.zeros_like(x, memory_format=torch.contiguous_format), dt.new_zeros(dt.shape)
    shares = B.new_zeros((kind.batch, kind.length, heads, kind.state), dtype=_dtype_of_shares(kind, B))
    dA, dbias, direct = call.scratch(sequences * heads, sequences * heads, kind.length * heads)
    dinitial = None if initial_states is None else initial_states.new_zeros(initial_states.shape)

    def describe():
        numbers = (*kind.limits, *x.stride()[1:3], *dt.stride()[1:], *B.stride()[1:3], *_strides(entering, 2))
        constants = (
            *kind.sizes, *tiles[:3], *kind.rules, *kind.has, entering is not None, initial_states is not None
        )
        return (heads, sequences, 1), numbers, constants, tiles

    if sequences:
        tensors = (
            x, dt, A, B, dt_bias, call.seq_idx, entering, ends, dstates, dx, ddt, shares, dinitial, direct, dA,
            None if dt_bias is None else dbias,
        )  # fmt: skip
        call.launch("backward", _packed_backward_kernel, tensors, describe)
    dB = shares if kind.groups == heads else B.new_empty(B.shape)
    sums = tuple(None if t is None else t.new_empty(t.shape) for t in (A, dt_bias))
    _add_shares(call, sequences, (dA, dbias, None, shares, None), (*sums, None, dB, None))
    return [grad for grad in (dx, ddt, sums[0], dB, sums[1], dinitial) if grad is not None]


def _across_sequences(call: _Call, states: Tensor, dstates: Tensor) -> tuple[Tensor, Tensor]:
    """What enters each packed sequence, and the derivative of the state after it, through later ones too, both
    (S, H, P, N) float32, where seq_idx may join sequences. Few numbers, and rarely needed: mostly plain PyTorch."""
    ends, (dt_min, dt_max), (_, softplus, limited) = call.others[0].long(), call.kind.limits, call.kind.rules
    step = call.dt[0].double() if call.dt_bias is None else call.dt[0].double() + call.dt_bias.double()
    step = F.softplus(step) if softplus else step
    step = step.clamp(dt_min, dt_max) if limited else step
    log_decay = (step * call.A.double()).clamp(min=LOG_DECAY_FLOOR.value)                 # (L, H)
    log_decay = log_decay.masked_fill(sequence_starts(call.seq_idx)[0].unsqueeze(-1), BOUNDARY.value)
    until = F.pad(log_decay.cumsum(0), (0, 0, 1, 0))                                      # (1+L, H)
    log_decay = until[ends[1:]] - until[ends[:-1]]                                        # (S, H)
    empty = ends[1:] == ends[:-1]
    own = dstates.float().masked_fill(empty[:, None, None, None], 0.0)
    later = own * log_decay.exp().float()[:, :, None, None]                               # becomes that of later ones
    call.pass_on("later", later.unsqueeze(0), log_decay.float().unsqueeze(0), None, reverse=True)
    number = torch.arange(ends.shape[0] - 1, device=ends.device)
    last = F.pad(number.masked_fill(empty, -1), (1, -1), value=-1).cummax(0).values       # the one before with rows
    first = states.new_zeros(states.shape[1:]) if call.initial is None else call.initial[0].float()
    entering = torch.where((last < 0)[:, None, None, None], first, states[last.clamp(min=0)])
    return entering, own + later


def _scan_backward(
    dout: Tensor, dfinal: Tensor | None, entering: Tensor | None, x: Tensor, dt: Tensor, A: Tensor, B: Tensor,
    C: Tensor, D: Tensor | None, z: Tensor | None, dt_bias: Tensor | None, initial_states: Tensor | None,
    seq_idx: Tensor | None, chunk_size: int, dt_softplus: bool, dt_min: float, dt_max: float,
) -> list[Tensor]:  # fmt: skip
    """Derivatives of x, dt, A, B, C, D, z, dt_bias, initial_states, of those that there are. entering: what `_scan`
    kept."""
    inputs = (x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, dout, dfinal, entering)
    call = _Call("ssd_scan_backward", inputs, (chunk_size, dt_softplus, dt_min, dt_max), others_dense=(1, 2, 3))
    return call.run_tuned(other_backwards, lambda: _run_backward(call, initial_states))


def _run_backward(call: _Call, initial_states: Tensor | None) -> list[Tensor]:
    """`_scan_backward` by the call's plan."""
    kind, tiles, dout = call.kind, call.plan.backward, call.others[0]
    x, dt, A, B, C, D, z, dt_bias = call.x, call.dt, call.A, call.B, call.C, call.D, call.z, call.dt_bias
    chunks, heads = ceil_div(kind.length, tiles.rows), kind.heads
    rows, states = kind.batch * chunks, kind.states_size(chunks) if chunks > 1 else 0
    columns = 0 if D is None else D.numel()
    dA, dbias, dD, *around = call.scratch(rows * heads, rows * heads, rows * columns, states, states)
    dinitial = None if initial_states is None else call.state_like(1)                     # (B, 1, H, P, N)
    entering, leaving = _states_around_chunks(call, chunks, around, dinitial)
    dx, ddt = x.new_empty(x.shape), dt.new_empty(dt.shape)
    dz = None if z is None else z.new_empty(z.shape)
    dB, dC, B_shares, C_shares = _room_for_columns(kind, B, C)
    tensors = (
        x, dt, A, B, C, D, z, dt_bias, call.seq_idx, entering, leaving, dout, dx, ddt, B_shares, C_shares, dz, dA,
        None if D is None else dD, None if dt_bias is None else dbias,
    )  # fmt: skip

    def describe():
        numbers = (
            *kind.limits, kind.length, *kind.row_strides, *kind.D_strides, *kind.z_strides, *kind.seq_strides,
            *_around_strides(kind, entering, chunks), *_around_strides(kind, leaving, chunks), *dout.stride()[:3],
        )  # fmt: skip
        constants = (
            *kind.sizes, *tiles[:3], *kind.rules, D is not None, D is not None and D.dim() == 2, z is not None,
            *kind.has, entering is not None, leaving is not None,
        )  # fmt: skip
        return (heads, chunks, kind.batch), numbers, constants, tiles

    call.launch("backward", _scan_backward_kernel, tensors, describe)
    sums = tuple(None if t is None else t.new_empty(t.shape) for t in (A, dt_bias, D))
    _add_shares(call, rows, (dA, dbias, dD, B_shares, C_shares), (*sums, dB, dC))
    if dinitial is not None:
        dinitial = dinitial.squeeze(1).to(initial_states.dtype)
    grads = (dx, ddt, sums[0], dB, dC, sums[2], dz, sums[1], dinitial)
    return [grad for grad in grads if grad is not None]


def _dtype_of_shares(kind: _Kind, *columns: Tensor) -> torch.dtype:
    """Of each head's share of dB or dC; in bfloat16, like the sum, it takes half the bytes."""
    exact = kind.groups == kind.heads or all(tensor.dtype == torch.bfloat16 for tensor in columns)
    return columns[0].dtype if exact else torch.float32


def _room_for_columns(kind: _Kind, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dB, dC like B, C (B, L, G, N), and each head's share of them (B, L, H, N): the same if no heads share a group."""
    dB, dC = B.new_empty(B.shape), C.new_empty(C.shape)
    if kind.groups == kind.heads:
        return dB, dC, dB, dC
    shape = (2, kind.batch, kind.length, kind.heads, kind.state)
    return dB, dC, *B.new_empty(shape, dtype=_dtype_of_shares(kind, B, C)).unbind()


def _add_shares(call: _Call, rows: int, shares: tuple, sums: tuple) -> None:
    """Launch `_adding_kernel`: dA, ddt_bias and dD from `rows` shares each, dB and dC where heads share groups."""
    kind = call.kind
    _, dbias, dD, dB, dC = sums

    def describe():
        grouped = kind.groups < kind.heads
        columns, size = 0 if dD is None else dD.numel(), dB.numel() if grouped else 0
        constants = (
            kind.heads, columns, kind.heads // kind.groups, kind.state, dbias is not None, dD is not None,
            grouped and dB is not None, grouped and dC is not None, *ADDING_TILE, ADDING_BLOCK,
        )  # fmt: skip
        blocks = 2 * ceil_div(kind.heads, ADDING_TILE[1]) + ceil_div(columns, ADDING_TILE[1])
        sums_of_heads = (dB is not None) + (dC is not None)
        return (blocks + sums_of_heads * ceil_div(size, ADDING_BLOCK), 1, 1), (rows, size), constants, PLAIN

    call.launch("adding", _adding_kernel, (*shares, *sums), describe)


def _states_around_chunks(call: _Call, chunks: int, around: tuple[Tensor, Tensor], dinitial: Tensor | None):
    """What enters each chunk of backward and the derivative of what leaves it: `around` (B, K, H, P, N) flat, or
    for one chunk (B, 1, H, P, N) or None; dinitial (B, 1, H, P, N) is written."""
    kind, tiles, first, (dout, dfinal, entering_spans) = (
        call.kind, call.plan.backward_states, call.initial, call.others
    )
    entering = None if first is None else first.unsqueeze(1)
    leaving = None if dfinal is None else dfinal.unsqueeze(1)
    if chunks == 1:
        if first is not None:
            call.states("dinitial", tiles, dout, call.z, call.C, leaving, reverse=True, last=dinitial)
        return entering, leaving
    each_entering, each_leaving = around
    if kind.spans == 1:
        call.both_walks(tiles, dout, dfinal, each_entering, each_leaving, dinitial)
    else:
        call.states("entering", tiles, call.x, None, call.B, entering_spans, each=each_entering)
        start = call.walk_start(tiles, dout, call.z, call.C, dfinal, reverse=True, last=dinitial)
        call.states("leaving", tiles, dout, call.z, call.C, start, reverse=True, each=each_leaving)
    return each_entering, each_leaving


def _around_strides(kind: _Kind, states: Tensor | None, chunks: int) -> tuple[int, ...]:
    """Of batch, chunk and head in (B, K, H, P, N), flat for more than one chunk."""
    if chunks == 1:
        return _state_strides(states)
    size = kind.headdim * kind.state
    return chunks * kind.heads * size, kind.heads * size, size


def _fake_scan(x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, chunk_size, dt_softplus, dt_min, dt_max,
               final_state, for_backward):  # fmt: skip
    batch, _, heads, headdim = x.shape
    spans = ceil_div(x.shape[1], rows_in_span(x))
    outputs = [x.new_empty(x.shape)]
    if final_state:
        outputs.append(x.new_empty(batch, heads, headdim, B.shape[3], dtype=torch.float32))
    if for_backward and spans > 1:
        outputs.append(x.new_empty(batch, spans, heads, headdim, B.shape[3], dtype=torch.float32))
    return outputs


def _fake_scan_backward(dout, dfinal, entering, *inputs):
    return [t.new_empty(t.shape) for t in inputs[:9] if t is not None]


def _fake_packed_states(x, dt, A, B, dt_bias, initial_states, seq_idx, cu_seqlens, *options):
    return x.new_empty(cu_seqlens.shape[0] - 1, *x.shape[2:], B.shape[3], dtype=torch.float32)


def _fake_packed_states_backward(dstates, *inputs):
    return [t.new_empty(t.shape) for t in inputs[1:7] if t is not None]


_INPUTS = (
    "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? dt_bias, Tensor? initial_states, "
    "Tensor? seq_idx"
)
_OPTIONS = "int chunk_size, bool dt_softplus, float dt_min, float dt_max"

define(
    f"ssd_scan({_INPUTS}, {_OPTIONS}, bool final_state, bool for_backward)"
    " -> Tensor[]",
    _scan, _fake_scan,
)  # fmt: skip
_scan_backward_op = define(
    f"ssd_scan_backward(Tensor dout, Tensor? dfinal, Tensor? entering, {_INPUTS}, {_OPTIONS}) -> Tensor[]",
    _scan_backward, _fake_scan_backward,
)  # fmt: skip
define(
    "ssd_packed_states(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor? dt_bias, Tensor? initial_states, "
    f"Tensor? seq_idx, Tensor cu_seqlens, bool follows, {_OPTIONS}) -> Tensor", _packed_states, _fake_packed_states,
)  # fmt: skip
_packed_states_backward_op = define(
    "ssd_packed_states_backward(Tensor dstates, Tensor? states, Tensor x, Tensor dt, Tensor A, Tensor B, "
    f"Tensor? dt_bias, Tensor? initial_states, Tensor? seq_idx, Tensor cu_seqlens, {_OPTIONS}) -> Tensor[]",
    _packed_states_backward, _fake_packed_states_backward,
)  # fmt: skip


def _save(ctx, inputs, output) -> None:
    *tensors, chunk_size, dt_softplus, dt_min, dt_max, final_state, for_backward = inputs
    if not for_backward:
        raise ValueError("ssd_scan: for_backward is False, but an input requires a gradient")
    kept = output[-1] if len(output) > 1 + final_state else None
    if kept is not None:
        ctx.mark_non_differentiable(kept)
    ctx.save_for_backward(*tensors, kept)
    ctx.options, ctx.has_final = (chunk_size, dt_softplus, dt_min, dt_max), final_state
    ctx.set_materialize_grads(False)


def _backward(ctx, dout, *others):
    *tensors, entering = ctx.saved_tensors
    dfinal = others[0] if ctx.has_final else None
    if dout is None and dfinal is None:
        return (None,) * 16
    dout = torch.zeros_like(tensors[0]) if dout is None else dout
    run = _scan_backward if is_direct((dout, dfinal, *tensors)) else _scan_backward_op
    grads = iter(run(dout, dfinal, entering, *tensors, *ctx.options))
    return *[None if tensor is None else next(grads) for tensor in tensors[:9]], *[None] * 7


def _save_packed(ctx, inputs, output) -> None:
    *tensors, seq_idx, cu_seqlens, follows = inputs[:9]
    joined = None if follows or seq_idx is None else (output, seq_idx)
    ctx.save_for_backward(*(joined or (None, None)), *tensors, cu_seqlens)
    ctx.options = inputs[9:]


def _backward_of_packed(ctx, dstates):
    states, seq_idx, *tensors, cu_seqlens = ctx.saved_tensors
    grads = iter(_packed_states_backward_op(dstates, states, *tensors, seq_idx, cu_seqlens, *ctx.options))
    return *[None if tensor is None else next(grads) for tensor in tensors], *[None] * 7


_run_scan_op = differentiate("ssd_scan", _backward, _save)
_run_packed_states_op = differentiate("ssd_packed_states", _backward_of_packed, _save_packed)


def chunk_scan_on_gpu(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Tensor | None, z: Tensor | None,
    dt_bias: Tensor | None, initial_states: Tensor | None, seq_idx: Tensor | None, cu_seqlens: Tensor | None,
    dt_softplus: bool, dt_limit: tuple[float, float], return_final_states: bool, return_varlen_states: bool,
) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    """`mamba_chunk_scan_combined` in Triton for arguments checked there, or the reference for what it does not take."""
    needed = (x, dt, A, B, C, D, z, dt_bias, initial_states)
    options = (chunk_size, dt_softplus, float(dt_limit[0]), float(dt_limit[1]))
    follows = seq_idx is None and cu_seqlens is not None
    if (reason := _why_reference(needed)) is not None:
        run = reference_instead("mamba_chunk_scan_combined", x.device, reason)
        return run(
            x, dt, A, B, C, chunk_size, D, z, dt_bias, initial_states, seq_idx, cu_seqlens, dt_softplus, dt_limit,
            return_final_states, return_varlen_states,
        )  # fmt: skip
    if follows:
        seq_idx = packed_seq_idx(cu_seqlens, x.shape[1])
    outputs = _run_scan_op(*needed, seq_idx, *options, return_final_states, is_differentiated(needed))
    out = outputs[0]
    if not return_final_states and not return_varlen_states:
        return out
    results = outputs[: 1 + return_final_states]
    if return_varlen_states:
        edges = cu_seqlens if follows else F.pad(cu_seqlens, (1, 0))                      # seq_idx may join all rows
        states = _run_packed_states_op(x, dt, A, B, dt_bias, initial_states, seq_idx, edges, follows, *options)
        results = [*results, states if follows else states[1:]]
    return tuple(results)


def _why_reference(needed: tuple[Tensor | None, ...]) -> str | None:
    x, B = needed[0], needed[3]
    if accumulate_dtype(*needed) == torch.float64:
        return "the Triton kernels take no float64"
    if B.shape[3] > MAX_STATE or x.shape[3] > MAX_HEADDIM:
        return f"the Triton kernels take states up to N = {MAX_STATE} and heads up to P = {MAX_HEADDIM}"
    if x.numel() == 0 or B.numel() == 0:
        return "an input is of size 0"
    return None

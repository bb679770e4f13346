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

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

import torch

from mamba_ssm.ops.checks import is_differentiated
from mamba_ssm.ops.numerics import accumulate_dtype, packed_seq_idx
from mamba_ssm.ops.tiers import reference_instead
from mamba_ssm.ops.triton.launch import INTERPRETED, ceil_div, define, differentiate, next_power_of_two
from mamba_ssm.ops.triton.ssd_kernels import (
    _add_chunks_kernel,
    _add_heads_kernel,
    _packed_backward_kernel,
    _passing_kernel,
    _scan_backward_kernel,
    _scan_kernel,
    _states_kernel,
)
from mamba_ssm.ops.triton.tuning import tuned

Tensor = torch.Tensor

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


class _Call:
    """One call's tensors as the kernels take them: last axes dense, strides of the others, the plan, common flags."""

    def __init__(self, x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, chunk_size, dt_softplus, dt_min, dt_max):
        self.x, self.B, self.C, self.z = _dense(x), _dense(B), _dense(C), _dense(z)
        self.dt, self.A, self.dt_bias, self.seq_idx = dt, _dense(A), _dense(dt_bias), _dense(seq_idx)
        self.D, self.initial = D, _dense(initial_states, 2)
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

    def run_tuned(self, name: str, others: Callable[[Plan], Iterator[Plan]], run: Callable[[], tuple]) -> tuple:
        """`run`, which goes by this call's plan, with the table's plan or the fastest found."""

        def run_with(plan: Plan) -> tuple:
            self.plan = plan
            return run()

        sizes = (self.batch.bit_length(), self.length.bit_length(), *self.sizes)
        kind = (*sizes, *self.rules, *self.has, self.z is not None, self.initial is not None)
        return run_with(tuned(name, self.x.device, kind, self.plan, others(self.plan), run_with))

    def row_strides(self) -> tuple[int, ...]:
        """Of x, dt, B and C."""
        return (*self.x.stride()[:3], *self.dt.stride(), *self.B.stride()[:3], *self.C.stride()[:3])

    def state_like(self, spans: int) -> Tensor:
        """Room for (B, S, H, P, N) float32."""
        return self.x.new_empty(self.batch, spans, self.heads, self.headdim, self.state, dtype=torch.float32)

    def shares_of_heads(self, columns: Tensor) -> Tensor:
        """Room for each head's share of dB or dC (B, L, H, N); in bfloat16, like the sum, it takes half the bytes."""
        exact = self.groups == self.heads or columns.dtype == torch.bfloat16
        dtype = columns.dtype if exact else torch.float32
        return columns.new_empty(self.batch, self.length, self.heads, self.state, dtype=dtype)

    def states(self, tiles, rows, z, columns, entering, *, reverse=False, ends=None, each=None, last=None,
               decay=None, precise=True):  # fmt: skip
        """Launch `_states_kernel` over chunks of `tiles.rows` rows; entering (B, S or 1, H, P, N)."""
        spans = self.spans if ends is None else ends.shape[0] - 1
        blocks = ceil_div(self.headdim, tiles.p) * ceil_div(self.state, tiles.n)
        tensors = (
            rows, z, columns, self.dt, self.A, self.dt_bias, self.seq_idx, ends, entering, each, last, decay
        )
        numbers = (
            *self.limits, self.length, self.rows_in_span // tiles.rows, *rows.stride()[:3], *_strides(z, 3),
            *columns.stride()[:3], *self.dt.stride(), *_strides(self.seq_idx, 1), *_state_strides(entering),
        )  # fmt: skip
        constants = (
            *self.sizes, *tiles[:3], *self.rules, z is not None, *self.has, entering is not None, reverse,
            ends is not None, each is not None, last is not None, decay is not None, precise,
        )  # fmt: skip
        _launch(_states_kernel, (self.heads * blocks, spans, self.batch), tensors, numbers, constants, tiles)

    def pass_on(self, states, decay, initial, *, reverse=False, last=None):
        """Launch `_passing_kernel` on states (B, S, H, P, N), in place; initial, last (B, H, P, N)."""
        size = self.headdim * self.state
        numbers = (states.shape[1], *_strides(initial, 2))
        constants = (self.heads, size, PASSING_BLOCK, initial is not None, reverse, last is not None)
        grid = (ceil_div(size, PASSING_BLOCK), self.heads, self.batch)
        _launch(_passing_kernel, grid, (states, decay, initial, last), numbers, constants, PLAIN)

    def walk_start(self, tiles, rows, z, columns, first, *, reverse=False, last=None, precise=True):
        """What enters each span: (B, S, H, P, N), or for one span `first` (B, H, P, N) as (B, 1, H, P, N), or None.

        `last` (B, H, P, N), if given, gets what is left after all spans, where there is more than one."""
        if self.spans == 1:
            return None if first is None else first.unsqueeze(1)
        states = self.state_like(self.spans)
        decay = self.x.new_empty(self.batch, self.spans, self.heads, dtype=torch.float32)
        self.states(tiles, rows, z, columns, None, reverse=reverse, last=states, decay=decay, precise=precise)
        self.pass_on(states, decay, first, reverse=reverse, last=last)
        return states


_compiled: dict[tuple, object] = {}
_MOST_COMPILED = 4096


def _launch(kernel, grid, tensors, numbers, constants, tiles) -> None:
    """`kernel[grid](*tensors, *numbers, *constants)`, without Triton's own search for the compiled kernel, which takes
    longer than the launch: all that it depends on is in our key."""
    if INTERPRETED:
        kernel[grid](*tensors, *numbers, *constants, num_warps=tiles.warps, num_stages=tiles.stages)
        return
    kinds = tuple([None if t is None else (t.dtype, t.data_ptr() % 16 == 0) for t in tensors])
    key = (kernel.fn.__name__, tensors[0].get_device(), kinds, numbers, constants, tiles.warps, tiles.stages)
    compiled = _compiled.get(key)
    if compiled is not None:
        compiled[grid](*tensors, *numbers, *constants)
        return
    if len(_compiled) >= _MOST_COMPILED:
        _compiled.clear()
    _compiled[key] = kernel[grid](
        *tensors, *numbers, *constants, num_warps=tiles.warps, num_stages=tiles.stages
    )


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
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """-> out (B, L, H, P) like x, the final state (B, H, P, N) float32, empty if it is not asked for, and for backward
    the states that enter spans (B, S, H, P, N) float32, empty if there is one span, or none for_backward, which needs
    digits of them that the scan does not use."""
    call = _Call(x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, chunk_size, dt_softplus, dt_min, dt_max)
    return call.run_tuned("ssd_scan", other_scans, lambda: _run_scan(call, D, final_state, for_backward))


def _run_scan(
    call: _Call, D: Tensor | None, final_state: bool, for_backward: bool
) -> tuple[Tensor, Tensor, Tensor]:
    x, z, plan = call.x, call.z, call.plan
    tiles = plan.scan
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    final = call.state_like(1).squeeze(1) if final_state else x.new_empty(0, dtype=torch.float32)
    entering = call.walk_start(plan.states, call.x, None, call.B, call.initial, precise=for_backward)
    grid = (call.heads * ceil_div(call.headdim, tiles.p), call.spans, call.batch)
    tensors = (
        call.x, call.dt, call.A, call.B, call.C, D, call.z, call.dt_bias, call.seq_idx, entering, out,
        final if final_state else None,
    )  # fmt: skip
    numbers = (
        *call.limits, call.length, call.rows_in_span // tiles.rows, *call.row_strides(), *_D_strides(D),
        *_strides(call.z, 3), *_strides(call.seq_idx, 1), *_state_strides(entering),
    )  # fmt: skip
    constants = (
        *call.sizes, *tiles[:3], *call.rules, D is not None, z is not None, *call.has, entering is not None,
        call.length > tiles.rows, final_state,
    )  # fmt: skip
    _launch(_scan_kernel, grid, tensors, numbers, constants, tiles)
    kept = for_backward and call.spans > 1
    return out, final, entering if kept else x.new_empty(0, dtype=torch.float32)


def _packed_states(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, dt_bias: Tensor | None, initial_states: Tensor | None,
    seq_idx: Tensor | None, cu_seqlens: Tensor, follows: bool, chunk_size: int, dt_softplus: bool, dt_min: float,
    dt_max: float,
) -> Tensor:  # fmt: skip
    """States after the last rows of packed sequences (S, H, P, N) float32, 0 for empty ones. follows: seq_idx is what
    follows from cu_seqlens, so that each state depends on its own sequence alone; else there is no backward."""
    call = _Call(x, dt, A, B, B, None, None, dt_bias, initial_states, seq_idx, chunk_size, dt_softplus, dt_min, dt_max)
    tiles = call.plan.states
    entering = call.walk_start(tiles, call.x, None, call.B, call.initial)
    states = x.new_empty(cu_seqlens.shape[0] - 1, *call.state_like(0).shape[2:], dtype=torch.float32)
    if states.numel():
        call.states(tiles, call.x, None, call.B, entering, ends=cu_seqlens.contiguous(), last=states)
    return states


def _packed_states_backward(
    dstates: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, dt_bias: Tensor | None,
    initial_states: Tensor | None, cu_seqlens: Tensor, chunk_size: int, dt_softplus: bool, dt_min: float,
    dt_max: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Derivatives of x, dt, A, B, dt_bias, initial_states, empty where there is no such input."""
    call = _Call(x, dt, A, B, B, None, None, dt_bias, initial_states, None, chunk_size, dt_softplus, dt_min, dt_max)
    tiles, sequences, heads = call.plan.backward, cu_seqlens.shape[0] - 1, call.heads
    dx, ddt = torch.zeros_like(x, memory_format=torch.contiguous_format), dt.new_zeros(dt.shape)
    dB = call.shares_of_heads(B).zero_()
    direct = x.new_empty(call.length, heads, dtype=torch.float32)
    dA, dbias = (None if t is None else x.new_empty(sequences, heads, dtype=torch.float32) for t in (A, dt_bias))
    dinitial = None if call.initial is None else initial_states.new_zeros(initial_states.shape)
    if sequences:
        tensors = (
            call.x, call.dt, call.A, call.B, call.dt_bias, call.initial, cu_seqlens.contiguous(), _dense(dstates, 4),
            dx, ddt, dB, dinitial, direct, dA, dbias,
        )  # fmt: skip
        numbers = (
            dt_min, dt_max, *call.x.stride()[1:3], *call.dt.stride()[1:], *call.B.stride()[1:3],
            0 if call.initial is None else call.initial.stride(1),
        )  # fmt: skip
        constants = (*call.sizes, *tiles[:3], *call.rules, dt_bias is not None, call.initial is not None)
        _launch(_packed_backward_kernel, (heads, sequences, 1), tensors, numbers, constants, tiles)
    if call.groups < heads:
        dB, _ = _add_heads(dB, dB, B, B)
    dA, dbias, _ = _add_chunks((dA, dbias, None), (A, dt_bias, None))
    return tuple(x.new_empty(0) if grad is None else grad for grad in (dx, ddt, dA, dB, dbias, dinitial))


def _scan_backward(
    dout: Tensor, dfinal: Tensor | None, entering: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
    D: Tensor | None, z: Tensor | None, dt_bias: Tensor | None, initial_states: Tensor | None, seq_idx: Tensor | None,
    chunk_size: int, dt_softplus: bool, dt_min: float, dt_max: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Derivatives of x, dt, A, B, C, D, z, dt_bias, initial_states, empty where there is no such input. entering: what
    `_scan` gave."""
    call = _Call(x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, chunk_size, dt_softplus, dt_min, dt_max)
    given = (_dense(dout), _dense(dfinal, 2), entering, x, dt, A, B, C, D, dt_bias)
    return call.run_tuned("ssd_scan_backward", other_backwards, lambda: _run_backward(call, *given))


def _run_backward(
    call: _Call, dout: Tensor, dfinal: Tensor | None, entering: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor,
    C: Tensor, D: Tensor | None, dt_bias: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """`_scan_backward` by the call's plan; derivatives are like the inputs as they were given."""
    z = call.z
    entering, leaving, dinitial = _states_around_chunks(call, dout, dfinal, entering)
    tiles, batch, length, heads = call.plan.backward, call.batch, call.length, call.heads
    chunks = ceil_div(length, tiles.rows)
    dx, ddt = torch.empty_like(x, memory_format=torch.contiguous_format), dt.new_empty(dt.shape)
    dz = None if z is None else z.new_empty(z.shape)
    dB, dC = call.shares_of_heads(B), call.shares_of_heads(C)
    dA, dbias, dD = (
        None if t is None else x.new_empty(batch * chunks, *t.shape, dtype=torch.float32) for t in (A, dt_bias, D)
    )
    tensors = (
        call.x, call.dt, call.A, call.B, call.C, D, call.z, call.dt_bias, call.seq_idx, entering, leaving, dout,
        dx, ddt, dB, dC, dz, dA, dD, dbias,
    )  # fmt: skip
    numbers = (
        *call.limits, length, *call.row_strides(), *_D_strides(D), *_strides(call.z, 3),
        *_strides(call.seq_idx, 1), *_state_strides(entering), *_state_strides(leaving), *dout.stride()[:3],
    )  # fmt: skip
    constants = (
        *call.sizes, *tiles[:3], *call.rules, D is not None, D is not None and D.dim() == 2, z is not None, *call.has,
        entering is not None, leaving is not None,
    )  # fmt: skip
    _launch(_scan_backward_kernel, (heads, chunks, batch), tensors, numbers, constants, tiles)
    if call.groups < heads:
        dB, dC = _add_heads(dB, dC, B, C)
    dA, dbias, dD = _add_chunks((dA, dbias, dD), (A, dt_bias, D))
    grads = (dx, ddt, dA, dB, dC, dD, dz, dbias, dinitial)
    return tuple(x.new_empty(0) if grad is None else grad for grad in grads)


def _add_heads(dB_shares: Tensor, dC_shares: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
    """dB, dC (B, L, G, N) from the heads' shares (B, L, H, N)."""
    dB, dC = B.new_empty(B.shape), C.new_empty(C.shape)
    grid = (ceil_div(B.numel(), ADDING_BLOCK), 2, 1)
    constants = (dB_shares.shape[2] // B.shape[2], B.shape[3], ADDING_BLOCK)
    _launch(_add_heads_kernel, grid, (dB_shares, dC_shares, dB, dC), (B.numel(),), constants, PLAIN)
    return dB, dC


def _add_chunks(shares: tuple[Tensor | None, ...], parameters: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """dA (H), ddt_bias (H) and dD like D, from a row of shares for each chunk or sequence; None where there is none."""
    sums = tuple(None if t is None else t.new_empty(t.shape) for t in parameters)
    A, dt_bias, D = parameters
    columns = 0 if D is None else D.numel()
    constants = (A.numel(), columns, dt_bias is not None, D is not None, *ADDING_TILE)
    grid = (ceil_div(max(A.numel(), columns), ADDING_TILE[1]), 3, 1)
    _launch(_add_chunks_kernel, grid, (*shares, *sums), (shares[0].shape[0],), constants, PLAIN)
    return sums


def _states_around_chunks(call: _Call, dout: Tensor, dfinal: Tensor | None, entering_spans: Tensor):
    """What enters each chunk of backward, the derivative of what leaves it (both (B, K, H, P, N), or (B, 1, H, P, N)
    for one chunk, or None), and the derivative of the initial states (empty if there are none)."""
    tiles, first = call.plan.backward_states, call.initial
    chunks = ceil_div(call.length, tiles.rows)
    dinitial = call.x.new_empty(0) if first is None else call.state_like(1)               # (B, 1, H, P, N)
    entering = None if first is None else first.unsqueeze(1)
    leaving = None if dfinal is None else dfinal.unsqueeze(1)
    if chunks > 1:
        start = entering if call.spans == 1 else entering_spans
        entering = call.state_like(chunks)
        call.states(tiles, call.x, None, call.B, start, each=entering)
    if chunks > 1 or first is not None:
        one_span = call.spans == 1
        last = None if one_span or first is None else dinitial.squeeze(1)
        start = call.walk_start(tiles, dout, call.z, call.C, dfinal, reverse=True, last=last)
        each = None if chunks == 1 else call.state_like(chunks)
        leaving = leaving if each is None else each
        last = dinitial if one_span and first is not None else None
        call.states(tiles, dout, call.z, call.C, start, reverse=True, each=each, last=last)
    if first is not None:
        dinitial = dinitial.squeeze(1).to(first.dtype)
    return entering, leaving, dinitial


def _fake_scan(x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, chunk_size, dt_softplus, dt_min, dt_max,
               final_state, for_backward):  # fmt: skip
    batch, _, heads, headdim = x.shape
    shape = (batch, heads, headdim, B.shape[3]) if final_state else (0,)
    spans = ceil_div(x.shape[1], rows_in_span(x))
    entering = (0,) if spans == 1 or not for_backward else (batch, spans, heads, headdim, B.shape[3])
    return x.new_empty(x.shape), *(x.new_empty(sizes, dtype=torch.float32) for sizes in (shape, entering))


def _fake_scan_backward(dout, dfinal, entering, *inputs):
    x, others, nothing = inputs[0], inputs[1:9], inputs[0].new_empty(0)
    return tuple(nothing if t is None else t.new_empty(t.shape) for t in (x, *others))


def _fake_packed_states(x, dt, A, B, dt_bias, initial_states, seq_idx, cu_seqlens, *options):
    return x.new_empty(cu_seqlens.shape[0] - 1, *x.shape[2:], B.shape[3], dtype=torch.float32)


def _fake_packed_states_backward(dstates, *inputs):
    nothing = inputs[0].new_empty(0)
    return tuple(nothing if t is None else t.new_empty(t.shape) for t in inputs[:6])


_INPUTS = (
    "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? dt_bias, Tensor? initial_states, "
    "Tensor? seq_idx"
)
_OPTIONS = "int chunk_size, bool dt_softplus, float dt_min, float dt_max"

_scan_op = define(
    f"ssd_scan({_INPUTS}, {_OPTIONS}, bool final_state, bool for_backward)"
    " -> (Tensor, Tensor, Tensor)",
    _scan, _fake_scan,
)  # fmt: skip
_scan_backward_op = define(
    f"ssd_scan_backward(Tensor dout, Tensor? dfinal, Tensor entering, {_INPUTS}, {_OPTIONS})"
    f" -> ({', '.join(['Tensor'] * 9)})",
    _scan_backward, _fake_scan_backward,
)  # fmt: skip
_packed_states_op = define(
    "ssd_packed_states(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor? dt_bias, Tensor? initial_states, "
    f"Tensor? seq_idx, Tensor cu_seqlens, bool follows, {_OPTIONS}) -> Tensor", _packed_states, _fake_packed_states,
)  # fmt: skip
_packed_states_backward_op = define(
    "ssd_packed_states_backward(Tensor dstates, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor? dt_bias, "
    f"Tensor? initial_states, Tensor cu_seqlens, {_OPTIONS}) -> ({', '.join(['Tensor'] * 6)})",
    _packed_states_backward, _fake_packed_states_backward,
)  # fmt: skip


def _save(ctx, inputs, output) -> None:
    *tensors, chunk_size, dt_softplus, dt_min, dt_max, _, for_backward = inputs
    if not for_backward:
        raise ValueError("ssd_scan: for_backward is False, but an input requires a gradient")
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(*tensors, output[2])
    ctx.options = (chunk_size, dt_softplus, dt_min, dt_max)
    ctx.set_materialize_grads(False)


def _backward(ctx, dout, dfinal, _):
    *tensors, entering = ctx.saved_tensors
    if dout is None and dfinal is None:
        return (None,) * 16
    dout = torch.zeros_like(tensors[0]) if dout is None else dout
    if dfinal is not None and dfinal.numel() == 0:
        dfinal = None                                                                     # it was not asked for
    grads = _scan_backward_op(dout, dfinal, entering, *tensors, *ctx.options)
    grads = [None if tensor is None else grad for grad, tensor in zip(grads, tensors[:9], strict=True)]
    return (*grads, *[None] * 7)


def _save_packed(ctx, inputs, output) -> None:
    *tensors, seq_idx, cu_seqlens, follows = inputs[:9]
    if seq_idx is not None and not follows:
        raise ValueError("ssd_packed_states: seq_idx does not follow from cu_seqlens, expected so for a backward pass")
    ctx.save_for_backward(*tensors, cu_seqlens)
    ctx.options = inputs[9:]


def _backward_of_packed(ctx, dstates):
    tensors = ctx.saved_tensors
    grads = _packed_states_backward_op(dstates, *tensors, *ctx.options)
    grads = [None if tensor is None else grad for grad, tensor in zip(grads, tensors[:6], strict=True)]
    return (*grads, *[None] * 7)


differentiate("ssd_scan", _backward, _save)
differentiate("ssd_packed_states", _backward_of_packed, _save_packed)


def chunk_scan_on_gpu(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Tensor | None, z: Tensor | None,
    dt_bias: Tensor | None, initial_states: Tensor | None, seq_idx: Tensor | None, cu_seqlens: Tensor | None,
    dt_softplus: bool, dt_limit: tuple[float, float], return_final_states: bool, return_varlen_states: bool,
) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    """`mamba_chunk_scan_combined` in Triton for arguments checked there, or the reference for what it does not take."""
    needed = (x, dt, A, B, C, D, z, dt_bias, initial_states)
    options = (chunk_size, dt_softplus, float(dt_limit[0]), float(dt_limit[1]))
    follows = seq_idx is None and cu_seqlens is not None
    if (reason := _why_reference(needed, return_varlen_states and not follows)) is not None:
        run = reference_instead("mamba_chunk_scan_combined", x.device, reason)
        return run(
            x, dt, A, B, C, chunk_size, D, z, dt_bias, initial_states, seq_idx, cu_seqlens, dt_softplus, dt_limit,
            return_final_states, return_varlen_states,
        )  # fmt: skip
    if follows:
        seq_idx = packed_seq_idx(cu_seqlens, x.shape[1])
    out, final, _ = _scan_op(*needed, seq_idx, *options, return_final_states, is_differentiated(needed))
    if not return_final_states and not return_varlen_states:
        return out
    results = [out, final] if return_final_states else [out]
    if return_varlen_states:
        inputs = (x, dt, A, B, dt_bias, initial_states, seq_idx, cu_seqlens)
        results.append(_packed_states_op(*inputs, follows, *options))
    return tuple(results)


def _why_reference(needed: tuple[Tensor | None, ...], states_of_others: bool) -> str | None:
    """states_of_others: states at the ends of packed sequences are asked for, and seq_idx may join those."""
    x, B = needed[0], needed[3]
    if accumulate_dtype(*needed) == torch.float64:
        return "the Triton kernels take no float64"
    if B.shape[3] > MAX_STATE or x.shape[3] > MAX_HEADDIM:
        return f"the Triton kernels take states up to N = {MAX_STATE} and heads up to P = {MAX_HEADDIM}"
    if x.numel() == 0 or B.numel() == 0:
        return "an input is of size 0"
    if states_of_others and is_differentiated(needed):
        return "the Triton kernels differentiate the states of packed sequences for the seq_idx of cu_seqlens alone"
    return None

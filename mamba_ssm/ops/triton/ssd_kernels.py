"""Triton kernels of state-space duality, forward and backward. Host side and operators: ssd_triton.py.

A chunk is one tile of Q rows, small enough that all its products stay on chip. With c the running log-decay inside a
chunk (c_i = Σ_{k<=i} Δ_k A), h the state that enters it and M_ij = exp(c_i - c_j) for i >= j, for one head:

    W = M ⊙ C Bᵀ ⊙ Δ_j,    y = W x + exp(c) C hᵀ + D x,    h <- exp(c_last) h + Σ_j exp(c_last - c_j) Δ_j x_j B_jᵀ

Consecutive chunks form a span; one program walks over a span with the state in registers. Where one span for each
batch row and head would leave the GPU idle, the spans' own contributions come first (`_states_kernel`), then the
states that enter them (`_passing_kernel`), then `_scan_kernel`. Backward, with g the derivative of the state that
leaves a chunk (the same walk from the end, in dy and C) and V = dy xᵀ:

    dx = Wᵀ dy + D dy + w ⊙ B gᵀ,   w_j = exp(c_last - c_j) Δ_j       dC = (V ⊙ M ⊙ Δ_j) B + exp(c) dy h
    dB = (V ⊙ M ⊙ Δ_j)ᵀ C + w ⊙ x g,                                  dh = exp(c_last) g + Σ_i exp(c_i) dy_i C_iᵀ

The log-decay of step k is part of every M_ij with j < k <= i and of every path through the state over it, so its
derivative is the sum over exactly those pairs: nothing is subtracted, and no digits are lost after a huge step.
Differences of c come from float64 sums (kept as two float32 numbers where they fill a tile). A boundary of `seq_idx`
is a step with log-decay -10,000: its decay is 0 in value and slope, so that no kernel needs a mask for it.

Letters: B batch, L length, H heads, P headdim, G groups, R = H/G, N state size, Q rows of a chunk (tile), K chunks,
S spans, BLOCK_P, BLOCK_N tiles of P and N.   All sums are float32; `DOT` says in what the tensor cores multiply:
"bf16", "tf32" (rounded to nearest), "tf32x3" (three tf32 products, float32 in effect).
"""

import triton
import triton.language as tl

from mamba_ssm.ops.triton.jit_math import silu, silu_slope, softplus

LOG_DECAY_FLOOR = tl.constexpr(-1000.0)          # exp is 0 there, in value and slope
BOUNDARY = tl.constexpr(-10000.0)


@triton.jit
def _operand(v, DOT: tl.constexpr):
    """A tile as tensor cores take it."""
    if DOT == "bf16":
        v = v.to(tl.bfloat16)
    else:
        v = v.to(tl.float32)
    if DOT == "tf32":                            # the hardware cuts the last 13 bits off
        v = ((v.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return v


@triton.jit
def _dot(a, b, DOT: tl.constexpr):
    a, b = _operand(a, DOT), _operand(b, DOT)
    if DOT == "bf16":
        product = tl.dot(a, b)
    else:
        product = tl.dot(a, b, input_precision=DOT)
    return product


@triton.jit
def _cut_off(v, DOT: tl.constexpr):
    """What of a float32 tile an operand leaves out. With both, sums that nearly cancel (dA, ddt_bias) keep digits."""
    return v - _operand(v, DOT).to(tl.float32)


@triton.jit
def _tile(ptr, rows, stride, columns, L, WIDTH: tl.constexpr):
    """The rows and columns of a matrix at `ptr`, zeros behind its ends."""
    at = rows[:, None].to(tl.int64) * stride + columns[None, :]
    return tl.load(ptr + at, mask=(rows[:, None] < L) & (columns[None, :] < WIDTH), other=0.0)


@triton.jit
def _store_tile(ptr, rows, stride, columns, L, WIDTH: tl.constexpr, values):
    at = rows[:, None].to(tl.int64) * stride + columns[None, :]
    mask = (rows[:, None] < L) & (columns[None, :] < WIDTH)
    tl.store(ptr + at, values.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _raw_steps(dt_ptr, bias_ptr, rows, stride, h, L, HAS_BIAS: tl.constexpr):
    raw = tl.load(dt_ptr + rows.to(tl.int64) * stride, mask=rows < L, other=0.0).to(tl.float32)
    if HAS_BIAS:
        raw += tl.load(bias_ptr + h).to(tl.float32)
    return raw                                                                            # (Q)


@triton.jit
def _steps(raw, rows, L, dt_min, dt_max, SOFTPLUS: tl.constexpr, LIMITED: tl.constexpr):
    """Δ (Q), 0 behind the last row."""
    step = raw
    if SOFTPLUS:
        step = softplus(step)
    if LIMITED:
        step = tl.minimum(tl.maximum(step, dt_min), dt_max)
    return tl.where(rows < L, step, 0.0)


@triton.jit
def _slope_of_steps(dstep, raw, dt_min, dt_max, SOFTPLUS: tl.constexpr, LIMITED: tl.constexpr):
    """The derivative of raw steps (Q) from that of Δ."""
    if LIMITED:
        unlimited = raw
        if SOFTPLUS:
            unlimited = softplus(raw)
        dstep = tl.where((unlimited >= dt_min) & (unlimited <= dt_max), dstep, 0.0)
    if SOFTPLUS:
        dstep *= tl.where(raw > 20.0, 1.0, 1.0 / (1.0 + tl.exp(-raw)))
    return dstep


@triton.jit
def _log_decay(step, A, seq_ptr, rows, stride, b, L, HAS_SEQ: tl.constexpr):
    """log-decay of each step (Q) in float64."""
    log_decay = tl.maximum(step * A, LOG_DECAY_FLOOR)
    if HAS_SEQ:
        seq_ptr += b * stride
        inside = (rows > 0) & (rows < L)
        now = tl.load(seq_ptr + rows, mask=inside, other=0)
        before = tl.load(seq_ptr + rows - 1, mask=inside, other=0)
        log_decay = tl.where(now != before, BOUNDARY, log_decay)
    return log_decay.to(tl.float64)


@triton.jit
def _decay_matrix(c, Q: tl.constexpr):
    """M (Q, Q), from c (Q) float64."""
    high = c.to(tl.float32)
    low = (c - high.to(tl.float64)).to(tl.float32)
    row = tl.arange(0, Q)
    log_decay = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
    return tl.exp(tl.where(row[:, None] >= row[None, :], log_decay, float("-inf")))


@triton.jit
def _scan_kernel(
    x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, bias_ptr, seq_ptr, entering_ptr, out_ptr, final_ptr,
    dt_min, dt_max, L, chunks_in_span,
    x_b, x_l, x_h, dt_b, dt_l, dt_h, B_b, B_l, B_g, C_b, C_l, C_g, D_h, D_p, z_b, z_l, z_h, seq_b, in_b, in_s, in_h,
    H: tl.constexpr, P: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
    Q: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, DOT: tl.constexpr,
    SOFTPLUS: tl.constexpr, LIMITED: tl.constexpr, HAS_D: tl.constexpr, HAS_Z: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_SEQ: tl.constexpr, HAS_ENTERING: tl.constexpr, LATER: tl.constexpr, FINAL: tl.constexpr,
):  # fmt: skip
    """out and the final state. One program: a span, BLOCK_P columns of one head; grid (H * P blocks, S, B).

    LATER: there are chunks after the first."""
    p_blocks: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    h, span, b = (tl.program_id(0) // p_blocks).to(tl.int64), tl.program_id(1), tl.program_id(2).to(tl.int64)
    ps = (tl.program_id(0) % p_blocks) * BLOCK_P + tl.arange(0, BLOCK_P)
    ns = tl.arange(0, BLOCK_N)
    g = h // R
    x_ptr += b * x_b + h * x_h
    dt_ptr += b * dt_b + h * dt_h
    B_ptr += b * B_b + g * B_g
    C_ptr += b * C_b + g * C_g
    out_ptr += (b * L * H + h) * P
    A = tl.load(A_ptr + h).to(tl.float32)
    if HAS_D:
        D = tl.load(D_ptr + h * D_h + ps * D_p, mask=ps < P, other=0.0).to(tl.float32)
    if HAS_ENTERING:
        state = _tile(entering_ptr + b * in_b + span.to(tl.int64) * in_s + h * in_h, ps, N, ns, P, N).to(tl.float32)
    else:
        state = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    start = span * chunks_in_span
    for k in range(start, tl.minimum(start + chunks_in_span, tl.cdiv(L, Q))):
        rows = k * Q + tl.arange(0, Q)
        x = _tile(x_ptr, rows, x_l, ps, L, P)                                             # (Q, BLOCK_P)
        B = _tile(B_ptr, rows, B_l, ns, L, N)                                             # (Q, BLOCK_N)
        C = _tile(C_ptr, rows, C_l, ns, L, N)
        step = _steps(_raw_steps(dt_ptr, bias_ptr, rows, dt_l, h, L, HAS_BIAS), rows, L, dt_min, dt_max,
                      SOFTPLUS, LIMITED)  # fmt: skip
        log_decay = _log_decay(step, A, seq_ptr, rows, seq_b, b, L, HAS_SEQ)
        c = tl.cumsum(log_decay, 0)
        weight = _decay_matrix(c, Q) * _dot(C, tl.trans(B), DOT) * step[None, :]          # (Q, Q)
        y = _dot(weight, x, DOT)                                                          # (Q, BLOCK_P)
        if HAS_ENTERING or LATER:
            y += tl.exp(c.to(tl.float32))[:, None] * _dot(C, tl.trans(state), DOT)
        if HAS_D:
            y += D[None, :] * x.to(tl.float32)
        if HAS_Z:
            z = _tile(z_ptr + b * z_b + h * z_h, rows, z_l, ps, L, P).to(tl.float32)
            y *= silu(z)
        _store_tile(out_ptr, rows, H * P, ps, L, P, y)
        if FINAL or LATER:
            total = tl.sum(log_decay, 0)
            reach = tl.exp((total - c).to(tl.float32)) * step                             # (Q)
            added = _dot(tl.trans(x * reach[:, None]), B, DOT)
            if HAS_ENTERING or LATER:
                state = state * tl.exp(total.to(tl.float32)) + added
            else:
                state = added
    if FINAL:                                    # noqa: SIM102  decided when compiling
        if span == tl.num_programs(1) - 1:
            _store_tile(final_ptr + (b * H + h) * P * N, ps, N, ns, P, N, state)


@triton.jit
def _walk(
    rows_ptr, z_ptr, columns_ptr, dt_ptr, A_ptr, bias_ptr, seq_ptr, ends_ptr, entering_ptr,
    states_ptr, last_ptr, decay_ptr, dt_min, dt_max, L, chunks_in_span, span, spans,
    r_b, r_l, r_h, z_b, z_l, z_h, c_b, c_l, c_g, dt_b, dt_l, dt_h, seq_b, in_b, in_s, in_h,
    H: tl.constexpr, P: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
    Q: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, DOT: tl.constexpr,
    SOFTPLUS: tl.constexpr, LIMITED: tl.constexpr, HAS_Z: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SEQ: tl.constexpr,
    HAS_ENTERING: tl.constexpr, REVERSE: tl.constexpr, ENDS: tl.constexpr, EACH: tl.constexpr, LAST: tl.constexpr,
    DECAY: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """The walk of the state over one of `spans` spans alone: rows x, columns B; REVERSE: its derivative from the end,
    dy and C. This program's block of the state of one head: axis 0 of the grid is H * P blocks * N blocks, axis 2 B.

    EACH stores what enters each chunk (reversed: the derivative of what leaves it) into (B, K, H, P, N), LAST what is
    left after the span into (B, S, H, P, N), DECAY the span's log-decay into (B, S, H). ENDS: the span is a packed
    sequence instead, and what is left is the state after its last row. PRECISE keeps the digits that bfloat16 products
    cut off."""
    p_blocks: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    n_blocks: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    block, b = tl.program_id(0), tl.program_id(2).to(tl.int64)
    h = (block // (p_blocks * n_blocks)).to(tl.int64)
    ps = (block // n_blocks) % p_blocks * BLOCK_P + tl.arange(0, BLOCK_P)
    ns = block % n_blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    left = (b * spans + span) * H + h                                                     # index into (B, S, H)
    if ENDS:
        begin, end = tl.load(ends_ptr + span), tl.load(ends_ptr + span + 1)
        L = tl.where(begin == end, 0, end).to(tl.int32)                                   # rows behind: Δ = 0
        span = (tl.maximum(L, 1) - 1) // (Q * chunks_in_span)
    rows_ptr += b * r_b + h * r_h
    columns_ptr += b * c_b + (h // R) * c_g
    dt_ptr += b * dt_b + h * dt_h
    A = tl.load(A_ptr + h).to(tl.float32)
    if HAS_ENTERING:
        state = _tile(entering_ptr + b * in_b + span.to(tl.int64) * in_s + h * in_h, ps, N, ns, P, N).to(tl.float32)
    else:
        state = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    log_decay_of_span = 0.0
    start = span * chunks_in_span
    all_chunks = tl.cdiv(L, Q)
    stop = tl.minimum(start + chunks_in_span, all_chunks)
    for i in range(start, stop):
        k = i
        if REVERSE:
            k = start + stop - 1 - i
        if EACH:
            here = states_ptr + ((b * all_chunks + k) * H + h) * P * N
            _store_tile(here, ps, N, ns, P, N, state)
        rows = k * Q + tl.arange(0, Q)
        row_tile = _tile(rows_ptr, rows, r_l, ps, L, P)                                   # (Q, BLOCK_P)
        column_tile = _tile(columns_ptr, rows, c_l, ns, L, N)                             # (Q, BLOCK_N)
        if HAS_Z:
            z = _tile(z_ptr + b * z_b + h * z_h, rows, z_l, ps, L, P).to(tl.float32)
            row_tile = row_tile * silu(z)
        step = _steps(_raw_steps(dt_ptr, bias_ptr, rows, dt_l, h, L, HAS_BIAS), rows, L, dt_min, dt_max,
                      SOFTPLUS, LIMITED)  # fmt: skip
        log_decay = _log_decay(step, A, seq_ptr, rows, seq_b, b, L, HAS_SEQ)
        c = tl.cumsum(log_decay, 0)
        total = tl.sum(log_decay, 0)
        if REVERSE:
            weight = tl.exp(c.to(tl.float32))                                             # (Q)
        else:
            weight = tl.exp((total - c).to(tl.float32)) * step
        total = total.to(tl.float32)
        weighted = row_tile * weight[:, None]
        state = state * tl.exp(total) + _dot(tl.trans(weighted), column_tile, DOT)
        if PRECISE and DOT == "bf16":
            state += _dot(tl.trans(_cut_off(weighted, DOT)), column_tile, DOT)
        log_decay_of_span += total
    if ENDS:
        state = tl.where(L == 0, 0.0, state)
    if LAST:
        _store_tile(last_ptr + left * P * N, ps, N, ns, P, N, state)
    if DECAY:                                    # noqa: SIM102  decided when compiling
        if block % (p_blocks * n_blocks) == 0:
            tl.store(decay_ptr + left, log_decay_of_span)


@triton.jit
def _states_kernel(
    rows_ptr, z_ptr, columns_ptr, dt_ptr, A_ptr, bias_ptr, seq_ptr, ends_ptr, entering_ptr,
    states_ptr, last_ptr, decay_ptr, dt_min, dt_max, L, chunks_in_span,
    r_b, r_l, r_h, z_b, z_l, z_h, c_b, c_l, c_g, dt_b, dt_l, dt_h, seq_b, in_b, in_s, in_h,
    H: tl.constexpr, P: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
    Q: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, DOT: tl.constexpr,
    SOFTPLUS: tl.constexpr, LIMITED: tl.constexpr, HAS_Z: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SEQ: tl.constexpr,
    HAS_ENTERING: tl.constexpr, REVERSE: tl.constexpr, ENDS: tl.constexpr, EACH: tl.constexpr, LAST: tl.constexpr,
    DECAY: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """`_walk` over spans, or with ENDS packed sequences: grid (H * P blocks * N blocks, S, B)."""
    _walk(
        rows_ptr, z_ptr, columns_ptr, dt_ptr, A_ptr, bias_ptr, seq_ptr, ends_ptr, entering_ptr,
        states_ptr, last_ptr, decay_ptr, dt_min, dt_max, L, chunks_in_span, tl.program_id(1), tl.num_programs(1),
        r_b, r_l, r_h, z_b, z_l, z_h, c_b, c_l, c_g, dt_b, dt_l, dt_h, seq_b, in_b, in_s, in_h,
        H, P, R, N, Q, BLOCK_P, BLOCK_N, DOT, SOFTPLUS, LIMITED, HAS_Z, HAS_BIAS, HAS_SEQ, HAS_ENTERING, REVERSE, ENDS,
        EACH, LAST, DECAY, PRECISE,
    )  # fmt: skip


@triton.jit
def _both_walks_kernel(
    x_ptr, B_ptr, dout_ptr, z_ptr, C_ptr, dt_ptr, A_ptr, bias_ptr, seq_ptr, initial_ptr, dfinal_ptr,
    entering_ptr, leaving_ptr, dinitial_ptr, dt_min, dt_max, L, chunks,
    x_b, x_l, x_h, B_b, B_l, B_g, do_b, do_l, do_h, z_b, z_l, z_h, C_b, C_l, C_g, dt_b, dt_l, dt_h, seq_b,
    initial_b, initial_h, dfinal_b, dfinal_h,
    H: tl.constexpr, P: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
    Q: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, DOT: tl.constexpr,
    SOFTPLUS: tl.constexpr, LIMITED: tl.constexpr, HAS_Z: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SEQ: tl.constexpr,
    HAS_INITIAL: tl.constexpr, HAS_DFINAL: tl.constexpr,
):  # fmt: skip
    """What backward needs of a single span: the state that enters each chunk and the derivative of the one that leaves
    it, both (B, K, H, P, N), and that of the initial state. Grid (H * P blocks * N blocks, 2 directions, B)."""
    direction = tl.program_id(1)
    if direction == 0:
        _walk(
            x_ptr, x_ptr, B_ptr, dt_ptr, A_ptr, bias_ptr, seq_ptr, x_ptr, initial_ptr, entering_ptr, entering_ptr,
            entering_ptr, dt_min, dt_max, L, chunks, direction, 1, x_b, x_l, x_h, 0, 0, 0, B_b, B_l, B_g, dt_b, dt_l,
            dt_h, seq_b, initial_b, 0, initial_h, H, P, R, N, Q, BLOCK_P, BLOCK_N, DOT, SOFTPLUS, LIMITED, False,
            HAS_BIAS, HAS_SEQ, HAS_INITIAL, False, False, True, False, False, True,
        )  # fmt: skip
    else:
        _walk(
            dout_ptr, z_ptr, C_ptr, dt_ptr, A_ptr, bias_ptr, seq_ptr, x_ptr, dfinal_ptr, leaving_ptr, dinitial_ptr,
            leaving_ptr, dt_min, dt_max, L, chunks, direction - 1, 1, do_b, do_l, do_h, z_b, z_l, z_h, C_b, C_l, C_g,
            dt_b, dt_l, dt_h, seq_b, dfinal_b, 0, dfinal_h, H, P, R, N, Q, BLOCK_P, BLOCK_N, DOT, SOFTPLUS, LIMITED,
            HAS_Z, HAS_BIAS, HAS_SEQ, HAS_DFINAL, True, False, True, HAS_INITIAL, False, True,
        )  # fmt: skip


@triton.jit
def _passing_kernel(
    states_ptr, decay_ptr, initial_ptr, last_ptr, spans, in_b, in_h,
    H: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    HAS_INITIAL: tl.constexpr, REVERSE: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Turns what each span adds (B, S, H, P*N) into what enters it, in place; REVERSE from the last span to the first.

    LAST: what is left in the end goes to (B, H, P*N). Grid (blocks of P*N, H, B)."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    mask = at < SIZE
    state = tl.zeros((BLOCK,), tl.float32)
    if HAS_INITIAL:
        state = tl.load(initial_ptr + b * in_b + h * in_h + at, mask=mask, other=0.0).to(tl.float32)
    for i in range(spans):
        s = i
        if REVERSE:
            s = spans - 1 - i
        index = (b * spans + s) * H + h
        added = tl.load(states_ptr + index * SIZE + at, mask=mask, other=0.0)
        decay = tl.exp(tl.load(decay_ptr + index))
        tl.store(states_ptr + index * SIZE + at, state, mask=mask)
        state = state * decay + added
    if LAST:
        tl.store(last_ptr + (b * H + h) * SIZE + at, state, mask=mask)


@triton.jit
def _scan_backward_kernel(
    x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, bias_ptr, seq_ptr, entering_ptr, leaving_ptr, dout_ptr,
    dx_ptr, ddt_ptr, dB_ptr, dC_ptr, dz_ptr, dA_ptr, dD_ptr, dbias_ptr, dt_min, dt_max, L,
    x_b, x_l, x_h, dt_b, dt_l, dt_h, B_b, B_l, B_g, C_b, C_l, C_g, D_h, D_p, z_b, z_l, z_h, seq_b,
    in_b, in_k, in_h, out_b, out_k, out_h, do_b, do_l, do_h,
    H: tl.constexpr, P: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
    Q: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, DOT: tl.constexpr,
    SOFTPLUS: tl.constexpr, LIMITED: tl.constexpr, HAS_D: tl.constexpr, D_HAS_P: tl.constexpr, HAS_Z: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SEQ: tl.constexpr, HAS_ENTERING: tl.constexpr, HAS_LEAVING: tl.constexpr,
):  # fmt: skip
    """Every derivative of one chunk of one head, from the state that enters it and the derivative of the one that
    leaves it. Grid (H, K, B). BLOCK_P covers P; N goes in blocks of BLOCK_N.

    dB, dC (B, L, H, N): each head's share; dA, dbias (B, K, H) and dD (B, K, H) or (B, K, H, P): each chunk's."""
    h, k, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    g = h // R
    ps = tl.arange(0, BLOCK_P)
    row = tl.arange(0, Q)
    rows = tl.program_id(1) * Q + row
    B_ptr += b * B_b + g * B_g
    C_ptr += b * C_b + g * C_g
    if HAS_ENTERING:
        entering_ptr += b * in_b + k * in_k + h * in_h
    if HAS_LEAVING:
        leaving_ptr += b * out_b + k * out_k + h * out_h
    rows_of_head = b * L * H + h                                                          # row 0 in (B, L, H)
    A = tl.load(A_ptr + h).to(tl.float32)
    raw = _raw_steps(dt_ptr + b * dt_b + h * dt_h, bias_ptr, rows, dt_l, h, L, HAS_BIAS)
    step = _steps(raw, rows, L, dt_min, dt_max, SOFTPLUS, LIMITED)
    log_decay = _log_decay(step, A, seq_ptr, rows, seq_b, b, L, HAS_SEQ)
    c = tl.cumsum(log_decay, 0)
    total = tl.sum(log_decay, 0)
    from_start = tl.exp(c.to(tl.float32))                                                 # (Q)
    to_end = tl.exp((total - c).to(tl.float32))

    x = _tile(x_ptr + b * x_b + h * x_h, rows, x_l, ps, L, P)                             # (Q, BLOCK_P)
    dout_ptr += b * do_b + h * do_h
    dy = _tile(dout_ptr, rows, do_l, ps, L, P)
    if HAS_Z:
        z_ptr += b * z_b + h * z_h
        dy = dy * silu(_tile(z_ptr, rows, z_l, ps, L, P).to(tl.float32))
        dy_cut_off = _operand(_cut_off(dy, DOT), DOT)
    chunk_of_head = (b * tl.num_programs(1) + k) * H + h                                  # into (B, K, H)
    if HAS_D:
        dD = tl.sum(dy.to(tl.float32) * x.to(tl.float32), 0)                              # (BLOCK_P)
        if D_HAS_P:
            tl.store(dD_ptr + chunk_of_head * P + ps, dD, mask=ps < P)
        else:
            tl.store(dD_ptr + chunk_of_head, tl.sum(dD, 0))
    dy = _operand(dy, DOT)
    CB = tl.zeros((Q, Q), tl.float32)
    across = tl.zeros((Q, BLOCK_P), tl.float32)                                           # C h
    back = tl.zeros((Q, BLOCK_P), tl.float32)                                             # B g
    over = 0.0                                                                            # <h, g>
    for n in range(0, N, BLOCK_N):
        ns = n + tl.arange(0, BLOCK_N)
        B = _tile(B_ptr, rows, B_l, ns, L, N)
        C = _tile(C_ptr, rows, C_l, ns, L, N)
        CB += _dot(C, tl.trans(B), DOT)
        if HAS_ENTERING:
            entering = _tile(entering_ptr, ps, N, ns, P, N).to(tl.float32)                # (BLOCK_P, BLOCK_N)
            across += _dot(C, tl.trans(entering), DOT)
            if DOT == "bf16":
                across += _dot(C, tl.trans(_cut_off(entering, DOT)), DOT)
        if HAS_LEAVING:
            leaving = _tile(leaving_ptr, ps, N, ns, P, N).to(tl.float32)
            back += _dot(B, tl.trans(leaving), DOT)
            if DOT == "bf16":
                back += _dot(B, tl.trans(_cut_off(leaving, DOT)), DOT)
        if HAS_ENTERING and HAS_LEAVING:
            over += tl.sum(tl.sum(entering * leaving, 1), 0)
    y = across * from_start[:, None]                                                      # so far; so is dx
    dx = back * to_end[:, None]
    from_entering = tl.sum(dy.to(tl.float32) * y, 1)                                      # (Q)
    if HAS_Z:
        from_entering += tl.sum(dy_cut_off.to(tl.float32) * y, 1)
    into_leaving = tl.sum(x.to(tl.float32) * dx, 1)
    dx *= step[:, None]
    if HAS_D:
        D = tl.load(D_ptr + h * D_h + ps * D_p, mask=ps < P, other=0.0).to(tl.float32)
        y += D[None, :] * x.to(tl.float32)
        dx += D[None, :] * dy.to(tl.float32)

    M = _decay_matrix(c, Q)                                                               # (Q, Q)
    weight = M * CB * step[None, :]
    dx += _dot(_operand(tl.trans(weight), DOT), dy, DOT)                                  # (Q, BLOCK_P)
    _store_tile(dx_ptr + rows_of_head * P, rows, H * P, ps, L, P, dx)
    if HAS_Z:
        y += _dot(weight, x, DOT)
        dout = _tile(dout_ptr, rows, do_l, ps, L, P)                 # read again: registers are short
        z = _tile(z_ptr, rows, z_l, ps, L, P).to(tl.float32)
        _store_tile(dz_ptr + rows_of_head * P, rows, H * P, ps, L, P, dout * y * silu_slope(z))
    VM = _dot(dy, tl.trans(x), DOT)                                                       # (Q, Q)
    if HAS_Z and DOT == "bf16":
        VM += _dot(dy_cut_off, tl.trans(x), DOT)
    VM *= M
    slope = VM * CB                                                                       # (Q, Q), for d step_j
    # d log-decay of step k: pairs (i, j) with j < k <= i; rows i >= k that h reaches, rows j < k that reach g, h to g
    before = _operand((row[:, None] < row[None, :]).to(tl.float32), DOT)                  # (j, k)
    pairs = slope * step[None, :]
    straddling = _dot(pairs, before, DOT)                                                 # (i, k), summed over j < k
    if DOT == "bf16":
        straddling += _dot(_cut_off(pairs, DOT), before, DOT)
    straddling = tl.where(
        row[:, None] >= row[None, :], straddling + from_entering[:, None], (into_leaving * step)[:, None]
    )
    d_log_decay = tl.sum(straddling, 0) + over * tl.exp(total.to(tl.float32))             # (Q)
    dstep = tl.sum(slope, 0) + into_leaving + A * d_log_decay
    dCB = _operand(VM * step[None, :], DOT)
    for n in range(0, N, BLOCK_N):
        ns = n + tl.arange(0, BLOCK_N)
        dC = _dot(dCB, _tile(B_ptr, rows, B_l, ns, L, N), DOT)                            # (Q, BLOCK_N)
        dB = _dot(tl.trans(dCB), _tile(C_ptr, rows, C_l, ns, L, N), DOT)
        if HAS_ENTERING:
            dC += from_start[:, None] * _dot(dy, _tile(entering_ptr, ps, N, ns, P, N), DOT)
        if HAS_LEAVING:
            dB += (to_end * step)[:, None] * _dot(x, _tile(leaving_ptr, ps, N, ns, P, N), DOT)
        _store_tile(dC_ptr + rows_of_head * N, rows, H * N, ns, L, N, dC)
        _store_tile(dB_ptr + rows_of_head * N, rows, H * N, ns, L, N, dB)

    dstep = tl.where(rows < L, _slope_of_steps(dstep, raw, dt_min, dt_max, SOFTPLUS, LIMITED), 0.0)
    tl.store(ddt_ptr + rows_of_head + rows.to(tl.int64) * H, dstep.to(ddt_ptr.dtype.element_ty), mask=rows < L)

    tl.store(dA_ptr + chunk_of_head, tl.sum(d_log_decay * step, 0))
    if HAS_BIAS:
        tl.store(dbias_ptr + chunk_of_head, tl.sum(dstep, 0))


@triton.jit
def _packed_backward_kernel(
    x_ptr, dt_ptr, A_ptr, B_ptr, bias_ptr, seq_ptr, entering_ptr, ends_ptr, dstates_ptr,
    dx_ptr, ddt_ptr, dB_ptr, dinitial_ptr, direct_ptr, dA_ptr, dbias_ptr, dt_min, dt_max,
    x_l, x_h, dt_l, dt_h, B_l, B_g, in_s, in_h,
    H: tl.constexpr, P: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
    Q: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, DOT: tl.constexpr,
    SOFTPLUS: tl.constexpr, LIMITED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SEQ: tl.constexpr,
    HAS_ENTERING: tl.constexpr, HAS_INITIAL: tl.constexpr,
):  # fmt: skip
    """Derivatives of one head of one packed sequence, from that of the state after its last row. Grid (H, sequences).
    entering (sequences, H, P, N): what enters every sequence, or without seq_idx the one that begins at row 0.

    With r_j the log-decay from row j to the end: dx_j = exp(r_j) Δ_j G B_j, dB_j = exp(r_j) Δ_j x_j G, and the
    log-decay of step k is part of every row j < k: so the rows are walked over from the end, then from the start.
    dB (L, H, N): each head's share; direct (L, H): what Δ_j gets for row j itself; dA, dbias (sequences, H)."""
    h, s = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    begin, end = tl.load(ends_ptr + s).to(tl.int32), tl.load(ends_ptr + s + 1).to(tl.int32)
    chunks = tl.cdiv(end - begin, Q)
    ps = tl.arange(0, BLOCK_P)
    x_ptr += h * x_h
    B_ptr += (h // R) * B_g
    dt_ptr += h * dt_h
    dstates_ptr += (s * H + h) * P * N
    A = tl.load(A_ptr + h).to(tl.float32)
    after = tl.zeros((), tl.float64)                                                      # behind this chunk
    for i in range(chunks):
        rows = begin + (chunks - 1 - i) * Q + tl.arange(0, Q)
        step = _steps(_raw_steps(dt_ptr, bias_ptr, rows, dt_l, h, end, HAS_BIAS), rows, end, dt_min, dt_max,
                      SOFTPLUS, LIMITED)  # fmt: skip
        log_decay = _log_decay(step, A, seq_ptr, rows, 0, 0, end, HAS_SEQ)
        total = tl.sum(log_decay, 0)
        reach = tl.exp((after + (total - tl.cumsum(log_decay, 0))).to(tl.float32))        # (Q)
        after += total
        x = _tile(x_ptr, rows, x_l, ps, end, P)                                           # (Q, BLOCK_P)
        dx = tl.zeros((Q, BLOCK_P), tl.float32)
        for n in range(0, N, BLOCK_N):
            ns = n + tl.arange(0, BLOCK_N)
            B = _tile(B_ptr, rows, B_l, ns, end, N)
            dstate = _tile(dstates_ptr, ps, N, ns, P, N).to(tl.float32)                   # (BLOCK_P, BLOCK_N)
            dx += _dot(B, tl.trans(dstate), DOT)
            if DOT == "bf16":
                dx += _dot(B, tl.trans(_cut_off(dstate, DOT)), DOT)
            dB = (reach * step)[:, None] * _dot(x, dstate, DOT)
            _store_tile(dB_ptr + h * N, rows, H * N, ns, end, N, dB)
        dx *= reach[:, None]
        tl.store(direct_ptr + rows.to(tl.int64) * H + h, tl.sum(x.to(tl.float32) * dx, 1), mask=rows < end)
        _store_tile(dx_ptr + h * P, rows, H * P, ps, end, P, dx * step[:, None])
    before = tl.zeros((), tl.float64)                            # the derivative of the next row's log-decay
    if HAS_ENTERING:                             # noqa: SIM102  decided when compiling
        if (end > begin) & (HAS_SEQ | (begin == 0)):
            whole = tl.exp(after.to(tl.float32))
            over = 0.0
            for n in range(0, N, BLOCK_N):
                ns = n + tl.arange(0, BLOCK_N)
                dstate = _tile(dstates_ptr, ps, N, ns, P, N).to(tl.float32)
                entering = _tile(entering_ptr + s * in_s + h * in_h, ps, N, ns, P, N).to(tl.float32)
                over += tl.sum(tl.sum(entering * dstate, 1), 0)
                if HAS_INITIAL:                  # noqa: SIM102  decided when compiling
                    if begin == 0:
                        _store_tile(dinitial_ptr + h * P * N, ps, N, ns, P, N, whole * dstate)
            before += (whole * over).to(tl.float64)
    tl.debug_barrier()                           # what the first walk wrote is read by other threads
    dA = 0.0
    dbias = 0.0
    for i in range(chunks):
        rows = begin + i * Q + tl.arange(0, Q)
        raw = _raw_steps(dt_ptr, bias_ptr, rows, dt_l, h, end, HAS_BIAS)
        step = _steps(raw, rows, end, dt_min, dt_max, SOFTPLUS, LIMITED)
        direct = tl.load(direct_ptr + rows.to(tl.int64) * H + h, mask=rows < end, other=0.0)
        through = (direct * step).to(tl.float64)
        d_log_decay = (before + (tl.cumsum(through, 0) - through)).to(tl.float32)
        before += tl.sum(through, 0)
        dstep = _slope_of_steps(direct + A * d_log_decay, raw, dt_min, dt_max, SOFTPLUS, LIMITED)
        dstep = tl.where(rows < end, dstep, 0.0)
        tl.store(ddt_ptr + rows.to(tl.int64) * H + h, dstep.to(ddt_ptr.dtype.element_ty), mask=rows < end)
        dA += tl.sum(d_log_decay * step, 0)
        dbias += tl.sum(dstep, 0)
    tl.store(dA_ptr + s * H + h, dA)
    if HAS_BIAS:
        tl.store(dbias_ptr + s * H + h, dbias)


@triton.jit
def _add_heads(shares_ptr, sum_ptr, block, size, R: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):
    """A block of (B, L, G, N), flat, from the shares of its heads (B, L, G, R, N)."""
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    share = at // N * (R * N) + at % N
    total = tl.zeros((BLOCK,), tl.float32)
    for r in range(R):
        total += tl.load(shares_ptr + share + r * N, mask=mask, other=0.0)
    tl.store(sum_ptr + at, total.to(sum_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _add_rows(shares_ptr, sum_ptr, block, rows, COLUMNS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK: tl.constexpr):
    """A block of the sum (COLUMNS) of shares (rows, COLUMNS)."""
    at = block * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK_R, BLOCK), tl.float32)
    for first in range(0, rows, BLOCK_R):
        row = (first + tl.arange(0, BLOCK_R)).to(tl.int64)
        mask = (row < rows)[:, None] & (at < COLUMNS)[None, :]
        total += tl.load(shares_ptr + row[:, None] * COLUMNS + at[None, :], mask=mask, other=0.0)
    tl.store(sum_ptr + at, tl.sum(total, 0).to(sum_ptr.dtype.element_ty), mask=at < COLUMNS)


@triton.jit
def _adding_kernel(
    dA_shares_ptr, dbias_shares_ptr, dD_shares_ptr, dB_shares_ptr, dC_shares_ptr,
    dA_ptr, dbias_ptr, dD_ptr, dB_ptr, dC_ptr, rows, size,
    H: tl.constexpr, D_COLUMNS: tl.constexpr, R: tl.constexpr, N: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_D: tl.constexpr, HAS_B: tl.constexpr, HAS_C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """dA, ddt_bias (H) and dD (D_COLUMNS) from shares of `rows` chunks each, and where heads share groups dB and dC
    (B, L, G, N) from their heads' shares. Programs: blocks of dA, ddt_bias and dD, then of dB, then of dC."""
    column_blocks: tl.constexpr = (H + BLOCK_C - 1) // BLOCK_C
    D_blocks: tl.constexpr = (D_COLUMNS + BLOCK_C - 1) // BLOCK_C
    block = tl.program_id(0)
    heads_block = block - 2 * column_blocks - D_blocks
    if block < column_blocks:
        _add_rows(dA_shares_ptr, dA_ptr, block, rows, H, BLOCK_R, BLOCK_C)
    elif block < 2 * column_blocks:
        if HAS_BIAS:
            _add_rows(dbias_shares_ptr, dbias_ptr, block - column_blocks, rows, H, BLOCK_R, BLOCK_C)
    elif heads_block < 0:
        if HAS_D:
            _add_rows(dD_shares_ptr, dD_ptr, block - 2 * column_blocks, rows, D_COLUMNS, BLOCK_R, BLOCK_C)
    elif heads_block < tl.cdiv(size, BLOCK):
        if HAS_B:
            _add_heads(dB_shares_ptr, dB_ptr, heads_block, size, R, N, BLOCK)
    else:
        if HAS_C:
            _add_heads(dC_shares_ptr, dC_ptr, heads_block - tl.cdiv(size, BLOCK), size, R, N, BLOCK)

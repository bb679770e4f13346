"""Triton kernels for sampling from the replay, a few launches for each batch instead of sixty.

    draw_distinct   the K greatest of -v_i / τ - ln(-ln(1 - u_i)), u uniform: K starts without replacement, drawn with
                    p ∝ exp(-v / τ)
    draw_repeated   the start on which a ticket falls, p ∝ exp((v - α b - β max(0, v - b)) / τ): weights relative to the
                    greatest are cut to integers w_i = ⌊2^bits exp(l_i - max l)⌋, whose sums are exact
    gather_rows     K runs of L consecutive rows of a field, over the ring's end

The plain forms, and what laws and counters mean, stand in `replay_buffer.py`. Laws are in float64. Rows of E rings of T
slots are numbered env · T + slot; a row opens L rows if as many that follow each other are held from it on.
Letters: N = E T rows, v, b counters, K starts, G blocks of rows, W words of a field's row.
"""

import torch
import triton
import triton.language as tl

from mamba_ssm.ops.triton.launch import ceil_div, next_power_of_two

Tensor = torch.Tensor

# Rows whose K greatest keys a program finds. Of 100,000 rows an H200 takes 0.029 ms for 16 starts, 0.033 with 256.
LEADER_BLOCK = 512
WEIGHT_BLOCK = 1024  # rows whose weights a program adds up
MOST_CANDIDATES = 2**15  # keys that one program chooses from
MOST_WORDS = 2048  # of a row that one program copies at once
TILE = 256  # words that a program copies of rows of one word


@triton.jit
def _opens(row, written, T, LENGTH):
    """Whether LENGTH held rows that follow each other begin at `row`."""
    size = tl.minimum(written, T)
    age = (row % T - (written - size)) % T
    age = tl.where(age < 0, age + T, age)  # 0 is the oldest
    return age + LENGTH <= size


@triton.jit
def _block_leaders_kernel(
    uniform_ptr, v_ptr, written_ptr, law_ptr, key_ptr, row_ptr, N, T, LENGTH, K: tl.constexpr, BLOCK: tl.constexpr
):
    """The K greatest keys of a block, in order, and their rows."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < N
    uniform = tl.load(uniform_ptr + row, mask=inside, other=0.5)
    gumbel = -tl.log(-tl.log(1.0 - uniform))  # 1 - u is exact: u has 53 bits
    key = gumbel - tl.load(v_ptr + row, mask=inside, other=0).to(tl.float64) * tl.load(law_ptr)
    key = tl.where(inside & _opens(row, tl.load(written_ptr), T, LENGTH), key, -float("inf"))
    place, first = tl.arange(0, BLOCK), tl.program_id(0).to(tl.int64)
    for i in range(K):
        greatest, leader = tl.max(key, axis=0, return_indices=True)
        tl.store(key_ptr + first * K + i, greatest)
        tl.store(row_ptr + first * K + i, first * BLOCK + leader)
        key = tl.where(place == leader, -float("inf"), key)


@triton.jit
def _leaders_kernel(
    key_ptr, row_ptr, v_ptr, starts_ptr, candidates, K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr
):
    """The K greatest of all blocks' keys; their rows are counted in v."""
    at, k = tl.arange(0, BLOCK), tl.arange(0, BLOCK_K)
    key = tl.load(key_ptr + at, mask=at < candidates, other=-float("inf"))
    leaders = tl.zeros((BLOCK_K,), tl.int32)
    for i in range(K):
        leader = tl.argmax(key, axis=0)
        leaders = tl.where(k == i, leader, leaders)
        key = tl.where(at == leader, -float("inf"), key)
    row = tl.load(row_ptr + leaders, mask=k < K, other=0)
    tl.store(starts_ptr + k, row, mask=k < K)
    tl.atomic_add(v_ptr + row, tl.full((BLOCK_K,), 1, tl.int32), mask=k < K)


def can_draw_distinct(rows: int, count: int) -> bool:
    """Whether `draw_distinct` serves so many rows and starts."""
    return ceil_div(rows, LEADER_BLOCK) * count <= MOST_CANDIDATES


def draw_distinct(
    v: Tensor, written: Tensor, law: Tensor, uniform: Tensor, ring_length: int, length: int, count: int
) -> Tensor:
    """Starts (count,) int64 in the order of drawing, counted in v.

    v (N,) int32; written () int64: rows that were written to each ring; law (1,) float64: 1 / τ; uniform (N,) float64.
    """
    blocks = ceil_div(len(v), LEADER_BLOCK)
    keys = torch.empty(blocks * count, dtype=torch.float64, device=v.device)
    rows = torch.empty(blocks * count, dtype=torch.int64, device=v.device)
    starts = torch.empty(count, dtype=torch.int64, device=v.device)
    with torch.cuda.device_of(v):
        _block_leaders_kernel[(blocks,)](
            uniform, v, written, law, keys, rows, len(v), ring_length, length, K=count, BLOCK=LEADER_BLOCK, num_warps=1
        )
        block = next_power_of_two(len(keys))
        _leaders_kernel[(1,)](
            keys, rows, v, starts, len(keys), K=count, BLOCK_K=next_power_of_two(count), BLOCK=block,
            num_warps=min(8, max(1, block // 256)),
        )  # fmt: skip
    return starts


@triton.jit
def _logit(row, v_ptr, b_ptr, written, law_ptr, N, T, LENGTH):
    """law: α, β, 1 / τ, scale of b."""
    inside = row < N
    v = tl.load(v_ptr + row, mask=inside, other=0).to(tl.float64)
    b = tl.load(b_ptr + row, mask=inside, other=0).to(tl.float64) * tl.load(law_ptr + 3)
    lead = tl.where(v > b, v - b, 0.0)
    logit = (v - tl.load(law_ptr) * b - tl.load(law_ptr + 1) * lead) * tl.load(law_ptr + 2)
    return tl.where(inside & _opens(row, written, T, LENGTH), logit, -float("inf"))


@triton.jit
def _block_peaks_kernel(v_ptr, b_ptr, written_ptr, law_ptr, peak_ptr, N, T, LENGTH, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    logit = _logit(row, v_ptr, b_ptr, tl.load(written_ptr), law_ptr, N, T, LENGTH)
    tl.store(peak_ptr + tl.program_id(0), tl.max(logit, axis=0))


@triton.jit
def _weight(
    block, v_ptr, b_ptr, written, law_ptr, peak_ptr, N, T, LENGTH, G, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):
    """w (BLOCK,) of a block's rows."""
    index = tl.arange(0, BLOCKS)
    peak = tl.max(tl.load(peak_ptr + index, mask=index < G, other=-float("inf")), axis=0)
    row = block * BLOCK + tl.arange(0, BLOCK)
    logit = _logit(row, v_ptr, b_ptr, written, law_ptr, N, T, LENGTH)
    return (tl.exp(logit - peak) * tl.load(law_ptr + 4)).to(tl.int64)


@triton.jit
def _block_weights_kernel(
    v_ptr, b_ptr, written_ptr, law_ptr, peak_ptr, sum_ptr, N, T, LENGTH, G, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):
    block = tl.program_id(0).to(tl.int64)
    written = tl.load(written_ptr)
    weight = _weight(block, v_ptr, b_ptr, written, law_ptr, peak_ptr, N, T, LENGTH, G, BLOCK, BLOCKS)
    tl.store(sum_ptr + block, tl.sum(weight, axis=0))


@triton.jit
def _tickets_kernel(
    v_ptr, b_ptr, written_ptr, law_ptr, peak_ptr, sum_ptr, uniform_ptr, starts_ptr, N, T, LENGTH, G,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The row that each ticket falls on: first its block, then the row in it."""
    index = tl.arange(0, BLOCKS)
    up_to = tl.cumsum(tl.load(sum_ptr + index, mask=index < G, other=0), axis=0)  # (BLOCKS,)
    total = tl.max(up_to, axis=0)
    ticket = (tl.load(uniform_ptr + tl.program_id(0)) * total.to(tl.float64)).to(tl.int64)
    ticket = tl.minimum(ticket, total - 1)  # inside, however the product rounds
    passed = up_to <= ticket
    block = tl.sum(passed.to(tl.int64), axis=0)
    ticket -= tl.max(tl.where(passed, up_to, 0), axis=0)
    weight = _weight(block, v_ptr, b_ptr, tl.load(written_ptr), law_ptr, peak_ptr, N, T, LENGTH, G, BLOCK, BLOCKS)
    place = tl.sum((tl.cumsum(weight, axis=0) <= ticket).to(tl.int64), axis=0)
    tl.store(starts_ptr + tl.program_id(0), block * BLOCK + place)


@triton.jit
def _count_kernel(counter_ptr, starts_ptr, K, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(starts_ptr + i, mask=i < K, other=0)
    tl.atomic_add(counter_ptr + row, tl.full((BLOCK,), 1, tl.int32), mask=i < K)


def draw_repeated(
    v: Tensor, b: Tensor, written: Tensor, law: Tensor, uniform: Tensor, ring_length: int, length: int
) -> Tensor:
    """A start for each of the tickets `uniform` (K,) float64: (K,) int64, counted in b.

    v, b (N,) int32; written () int64, as in `draw_distinct`; law (5,) float64: α, β, 1 / τ, what brings b to the scale
    of v, 2^bits.
    """
    rows = len(v)
    blocks = ceil_div(rows, WEIGHT_BLOCK)
    peaks = torch.empty(blocks, dtype=torch.float64, device=v.device)
    sums = torch.empty(blocks, dtype=torch.int64, device=v.device)
    starts = torch.empty(len(uniform), dtype=torch.int64, device=v.device)
    counters, sizes = (v, b, written, law, peaks), (rows, ring_length, length)
    shape = {"G": blocks, "BLOCK": WEIGHT_BLOCK, "BLOCKS": next_power_of_two(blocks)}
    with torch.cuda.device_of(v):
        _block_peaks_kernel[(blocks,)](*counters, *sizes, BLOCK=WEIGHT_BLOCK)
        _block_weights_kernel[(blocks,)](*counters, sums, *sizes, **shape)
        _tickets_kernel[(len(uniform),)](*counters, sums, uniform, starts, *sizes, **shape)
        _count_kernel[(ceil_div(len(uniform), TILE),)](b, starts, len(uniform), BLOCK=TILE)
    return starts


@triton.jit
def _gather_kernel(words_ptr, starts_ptr, out_ptr, rows, T, LENGTH, W, ROWS: tl.constexpr, WORDS: tl.constexpr):
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    start = tl.load(starts_ptr + r // LENGTH, mask=r < rows, other=0)
    slot = start % T
    row = start - slot + (slot + r % LENGTH) % T  # over the ring's end
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    mask = (r < rows)[:, None] & (word < W)[None, :]  # (ROWS, WORDS)
    words = tl.load(words_ptr + row[:, None] * W + word[None, :], mask=mask)
    tl.store(out_ptr + r[:, None] * W + word[None, :], words, mask=mask)


def gather_rows(words: Tensor, starts: Tensor, ring_length: int, length: int) -> Tensor:
    """words (N, W) of any integers, starts (K,) int64 -> (K · length, W)."""
    rows, width = len(starts) * length, words.shape[1]
    out = torch.empty((rows, width), dtype=words.dtype, device=words.device)
    if rows == 0:
        return out
    block = min(MOST_WORDS, next_power_of_two(width))
    at_once = max(1, TILE // block)
    with torch.cuda.device_of(words):
        _gather_kernel[(ceil_div(rows, at_once), ceil_div(width, block))](
            words, starts, out, rows, ring_length, length, width, ROWS=at_once, WORDS=block
        )
    return out

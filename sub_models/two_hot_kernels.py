"""Triton kernels of `SymlogTwoHot`: loss and decoded value in one pass over the logits each.

    loss = Σ_q (log Σ_n exp z_n - Σ_n c_qn z_n),   dz_n = dloss (Q softmax(z)_n - Σ_q c_qn),
    decoded = symexp(Σ_n softmax(z)_n bin_n)
with c_q the code of target q: shares of the two bins around symlog(x_q).

A GPU reads rows of 255 numbers one by one, unless it may read to a multiple of 8: rows that an `AlignedLinear` wrote
have room there, and so have those of the gradient.

Letters: B, T leading axes, N bins, W width that may be read (at least N), Q targets of each row, R rows of a block.
"""

import torch
import triton
import triton.language as tl

from mamba_ssm.ops.triton.launch import ceil_div, define, differentiate, next_power_of_two

Tensor = torch.Tensor

TILE = 2048  # elements of the logits that a program holds
MULTIPLE = 8  # bfloat16 numbers in 16 bytes


@triton.jit
def _rows(
    logits_ptr, rows, stride_b, stride_t, T: tl.constexpr, N: tl.constexpr, W: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Row numbers (R), bins (N), which cells are in memory, and the logits (R, N), -inf where there is none."""
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    n = tl.arange(0, BLOCK_N)
    inside = (row < rows)[:, None] & (n < W)[None, :]
    start = (row // T).to(tl.int64) * stride_b + (row % T).to(tl.int64) * stride_t
    logits = tl.load(logits_ptr + start[:, None] + n[None, :], mask=inside, other=0.0).to(tl.float32)
    return row.to(tl.int64), n, inside, tl.where((n < N)[None, :], logits, -float("inf"))


@triton.jit
def _codes(target_ptr, row, n, rows, low, high, N: tl.constexpr, Q: tl.constexpr):
    """Σ_q c_q of each row (R, N); NaN where a target is."""
    width = (high - low) / (N - 1)
    total = tl.zeros((row.shape[0], n.shape[0]), tl.float32)
    for q in tl.static_range(Q):
        x = tl.load(target_ptr + q * rows + row, mask=row < rows, other=0.0)
        symlog = tl.where(x < 0, -1.0, 1.0) * tl.log(1.0 + tl.abs(x))
        position = (tl.minimum(tl.maximum(symlog, low), high) - low) / width
        lower = tl.where(x == x, tl.minimum(tl.floor(position), N - 2.0), 0.0)
        share = tl.where(x == x, position - lower, x)[:, None]
        bin_number = n.to(tl.float32)[None, :]
        total += tl.where(bin_number == lower[:, None], 1.0 - share, 0.0)
        total += tl.where(bin_number == lower[:, None] + 1.0, share, 0.0)
    return total


@triton.jit(do_not_specialize=["rows"])
def _loss_kernel(
    logits_ptr, target_ptr, loss_ptr, norm_ptr, rows, stride_b, stride_t, low, high,
    T: tl.constexpr, N: tl.constexpr, W: tl.constexpr, Q: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row, n, _, logits = _rows(logits_ptr, rows, stride_b, stride_t, T, N, W, BLOCK_R, BLOCK_N)
    greatest = tl.max(logits, axis=1)
    norm = greatest + tl.log(tl.sum(tl.exp(logits - greatest[:, None]), axis=1))
    codes = _codes(target_ptr, row, n, rows, low, high, N, Q)
    coded = tl.sum(codes * tl.where((n < N)[None, :], logits, 0.0), axis=1)
    tl.store(loss_ptr + row, Q * norm - coded, mask=row < rows)
    tl.store(norm_ptr + row, norm, mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def _loss_backward_kernel(
    grad_ptr, logits_ptr, target_ptr, norm_ptr, out_ptr, rows, stride_b, stride_t, low, high,
    ROW: tl.constexpr, T: tl.constexpr, N: tl.constexpr, W: tl.constexpr, Q: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    row, n, _, logits = _rows(logits_ptr, rows, stride_b, stride_t, T, N, W, BLOCK_R, BLOCK_N)
    norm = tl.load(norm_ptr + row, mask=row < rows, other=0.0)
    grad = tl.load(grad_ptr + row, mask=row < rows, other=0.0)
    codes = _codes(target_ptr, row, n, rows, low, high, N, Q)
    out = grad[:, None] * (Q * tl.exp(logits - norm[:, None]) - codes)
    inside = (row < rows)[:, None] & (n < ROW)[None, :]
    tl.store(out_ptr + row[:, None] * ROW + n[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _decode_kernel(
    logits_ptr, bins_ptr, out_ptr, rows, stride_b, stride_t,
    T: tl.constexpr, N: tl.constexpr, W: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row, n, _, logits = _rows(logits_ptr, rows, stride_b, stride_t, T, N, W, BLOCK_R, BLOCK_N)
    weight = tl.exp(logits - tl.max(logits, axis=1)[:, None])
    bins = tl.load(bins_ptr + n, mask=n < N, other=0.0)
    mean = tl.sum(weight * bins[None, :], axis=1) / tl.sum(weight, axis=1)
    value = tl.where(mean < 0, -1.0, 1.0) * (tl.exp(tl.abs(mean)) - 1.0)
    tl.store(out_ptr + row, value, mask=row < rows)


def _options(logits: Tensor) -> tuple[int, tuple[int, ...], dict[str, int]]:
    """Programs, the arguments that say where rows lie, and sizes of a block."""
    (batch, length, bins), block_n = logits.shape, next_power_of_two(logits.shape[2])
    block_r = max(1, TILE // block_n)
    where = (batch * length, logits.stride(0), logits.stride(1))
    sizes = {"T": length, "N": bins, "W": _readable_width(logits), "BLOCK_R": block_r, "BLOCK_N": block_n}
    return ceil_div(batch * length, block_r), where, sizes


def _padded(bins: int) -> int:
    return ceil_div(bins, MULTIPLE) * MULTIPLE


def _readable_width(logits: Tensor) -> int:
    """N rounded up, if all of the storage that this reads is there; else N."""
    (batch, length, bins), width = logits.shape, _padded(logits.shape[2])
    end = logits.storage_offset() + (batch - 1) * logits.stride(0) + (length - 1) * logits.stride(1) + width
    return width if end * logits.element_size() <= logits.untyped_storage().nbytes() else bins


def _launch_loss(logits: Tensor, targets: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    loss, norm = _fake_loss(logits, targets, low, high)
    programs, where, sizes = _options(logits)
    if programs:
        _loss_kernel[(programs,)](logits, targets.contiguous(), loss, norm, *where, low, high, Q=len(targets), **sizes)
    return loss, norm


def _fake_loss(logits, targets, low, high):
    return tuple(torch.empty(logits.shape[:2], dtype=torch.float32, device=logits.device) for _ in range(2))


def _launch_loss_backward(
    grad: Tensor, logits: Tensor, targets: Tensor, norm: Tensor, low: float, high: float
) -> Tensor:
    out = _fake_loss_backward(grad, logits, targets, norm, low, high)
    programs, where, sizes = _options(logits)
    if programs:
        _loss_backward_kernel[(programs,)](
            grad.contiguous(), logits, targets.contiguous(), norm, out, *where, low, high, ROW=out.stride(1),
            Q=len(targets), **sizes,
        )  # fmt: skip
    return out


def _fake_loss_backward(grad, logits, targets, norm, low, high):
    batch, length, bins = logits.shape
    return torch.empty((batch, length, _padded(bins)), dtype=logits.dtype, device=logits.device)[..., :bins]


def _launch_decode(logits: Tensor, bins: Tensor) -> Tensor:
    out = torch.empty(logits.shape[:2], dtype=torch.float32, device=logits.device)
    programs, where, sizes = _options(logits)
    if programs:
        _decode_kernel[(programs,)](logits, bins, out, *where, **sizes)
    return out


# logits (B, T, N) with bins side by side, targets (Q, B, T) float32 -> loss (B, T) and log Σ exp z (B, T), float32
run_loss = define(
    "two_hot_loss(Tensor logits, Tensor targets, float low, float high) -> (Tensor, Tensor)", _launch_loss, _fake_loss
)
_run_loss_backward = define(
    "two_hot_loss_backward(Tensor grad, Tensor logits, Tensor targets, Tensor norm, float low, float high) -> Tensor",
    _launch_loss_backward,
    _fake_loss_backward,
)
# logits (B, T, N) with bins side by side, bins (N) float32 -> (B, T) float32, without gradient
run_decode = define(
    "two_hot_decode(Tensor logits, Tensor bins) -> Tensor",
    _launch_decode,
    lambda logits, bins: torch.empty(logits.shape[:2], dtype=torch.float32, device=logits.device),
)


def _setup_context(ctx, inputs, output) -> None:
    logits, targets, *ctx.limits = inputs
    ctx.save_for_backward(logits, targets, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, grad, _):
    logits, targets, norm = ctx.saved_tensors
    return _run_loss_backward(grad, logits, targets, norm, *ctx.limits), None, None, None


differentiate("two_hot_loss", _backward, _setup_context)

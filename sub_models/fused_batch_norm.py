"""Batch norm followed by SiLU in as few passes over memory as there can be, for images held as rows of channels.

Forward: one pass for the statistics, where the convolution before does not bring them, one that norms, activates and,
where the next convolution wants them otherwise, moves pixels between lines and 2×2 blocks. Backward: one pass for the
sums, one for the gradient; nothing but the convolution's output is kept for it. The kernels are Triton's
(`batch_norm_kernels`) and run on a GPU.

Letters: B batch, C channels.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from mamba_ssm.ops.triton.launch import why_not

if (NO_KERNELS := why_not()) is None:  # why there are none
    from sub_models.batch_norm_kernels import apply_operator, moments_operator, train_operator

FUSED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Normed(NamedTuple):
    """What `norm_rows` was made from in training; `move` as the kernels name it: 0 none, 1 blocks to lines, 2 lines to
    blocks."""

    x: Tensor  # (B, height, width, C) or in blocks
    mean: Tensor  # (C), of x
    var: Tensor  # (C), biased
    weight: Tensor
    bias: Tensor
    conv_bias: Tensor  # of the convolution before, which gets a gradient of zero
    eps: float
    width: int
    move: int
    source: tuple[Tensor, Tensor] | None  # of the convolution before: x and weight, whose gradient the next may make


def can_fuse(norm: nn.Module, act: nn.Module | None, rows: Tensor) -> bool:
    """Whether `batch_norm_silu` computes norm and act: a batch norm with running statistics, SiLU, on a GPU; outside of
    training only where nothing is differentiated."""
    return (
        isinstance(norm, nn.BatchNorm2d)
        and norm.affine
        and norm.track_running_stats
        and norm.momentum is not None
        and isinstance(act, nn.SiLU)
        and (norm.training or not torch.is_grad_enabled())
        and rows.is_cuda
        and rows.dtype in FUSED_DTYPES
        and NO_KERNELS is None
    )


def batch_norm_silu(
    rows: Tensor, norm: nn.BatchNorm2d, bias: Tensor | None, in_blocks: bool, out_blocks: bool
) -> Tensor:
    """silu(norm(rows + bias)).   rows (B, height, width, C) or, in blocks, (B, height/2, width/2, 4C); bias (C) of the
    convolution before, None for none -> the same pixels, in blocks or not.

    In training the running statistics move as in `nn.BatchNorm2d`; the bias cancels in what is returned, so that its
    gradient is zero. Outside of training nothing is differentiated.
    """
    return norm_rows(rows, norm, bias, in_blocks, out_blocks)[0]


def norm_rows(
    rows: Tensor,
    norm: nn.BatchNorm2d,
    bias: Tensor | None,
    in_blocks: bool,
    out_blocks: bool,
    moments: tuple[Tensor, Tensor] | None = None,
    source: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Normed | None]:
    """`batch_norm_silu`, and in training what it was made from. moments: mean and biased variance (C) of rows, where
    they are known; source: see `Normed`."""
    batch, height, width, _ = rows.shape
    channels, move, normed = norm.num_features, _move(in_blocks, out_blocks), None
    rows = rows.contiguous()
    if norm.training:
        bias = torch.zeros_like(norm.bias) if bias is None else bias
        mean, var = moments_operator(rows.detach(), channels) if moments is None else moments
        normed = Normed(rows, mean, var, norm.weight, norm.bias, bias, norm.eps, width, move, source)
        out = train_operator(*normed[:-1])
        _move_statistics(norm, mean + bias.detach(), var, rows.numel() // channels)
    else:
        mean = norm.running_mean if bias is None else norm.running_mean - bias
        out = apply_operator(rows, mean, norm.running_var, norm.weight, norm.bias, norm.eps, width, move)
    if in_blocks and not out_blocks:
        return out.view(batch, 2 * height, 2 * width, channels), normed
    if out_blocks and not in_blocks:
        return out.view(batch, height // 2, width // 2, 4 * channels), normed
    return out.view(rows.shape), normed


@torch.no_grad()
def _move_statistics(norm: nn.BatchNorm2d, mean: Tensor, var: Tensor, count: int) -> None:
    norm.num_batches_tracked.add_(1)
    norm.running_mean.lerp_(mean, norm.momentum)
    norm.running_var.lerp_(var * (count / max(1, count - 1)), norm.momentum)


def _move(in_blocks: bool, out_blocks: bool) -> int:
    """The kernels' name for a change of order: 0 none, 1 blocks to lines, 2 lines to blocks."""
    if in_blocks == out_blocks:
        return 0
    return 1 if in_blocks else 2

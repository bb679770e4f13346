"""A linear layer of any width that a GPU's matrix units take whole.

Tensor cores read rows of 16 bytes: a layer with 1,027 inputs or 255 outputs falls back to kernels that read element by
element, three to ten times as slow. Here the rows are filled up with zeros for the product.
"""

import torch.nn.functional as F
from torch import Tensor, nn

MULTIPLE = 8  # bfloat16 numbers in 16 bytes


class AlignedLinear(nn.Linear):
    """`nn.Linear` with the same parameters and results.   (..., in_features) -> (..., out_features)."""

    def forward(self, x: Tensor) -> Tensor:
        spare_in, spare_out = -self.in_features % MULTIPLE, -self.out_features % MULTIPLE
        if not x.is_cuda or not (spare_in or spare_out):
            return super().forward(x)
        return self.padded(x, spare_in, spare_out)

    def padded(self, x: Tensor, spare_in: int, spare_out: int) -> Tensor:
        """The layer with `spare_in` more inputs and `spare_out` more outputs, all zero; only the true outputs come
        back."""
        bias = None if self.bias is None else F.pad(self.bias, (0, spare_out))
        out = F.linear(F.pad(x, (0, spare_in)), F.pad(self.weight, (0, spare_in, 0, spare_out)), bias)
        return out[..., : self.out_features]

"""Settings for all tests, before torch starts its threads."""

import os

# The tests' tensors are small: more threads cost more than they bring, above all on shared cores. Processes that tests
# start inherit it, so that sums have the same order on both sides of a comparison.
os.environ["OMP_NUM_THREADS"] = "1"

import torch

# Without a GPU Triton's kernels run through its interpreter, which Triton asks for when a kernel is defined.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

"""Settings for all tests."""

import torch

# The tests' tensors are small: more threads cost more than they bring, above all on shared cores.
torch.set_num_threads(1)

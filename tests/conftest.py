"""Settings for all tests, before torch starts its threads."""

import os

# The tests' tensors are small: more threads cost more than they bring, above all on shared cores. Processes that tests
# start inherit it, so that sums have the same order on both sides of a comparison.
os.environ["OMP_NUM_THREADS"] = "1"

"""Settings for all tests, before torch starts its threads."""

import os

# The tests' tensors are small: more threads cost more than they bring, above all on shared cores. Processes that tests
# start inherit it, so that sums have the same order on both sides of a comparison.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch

# Without a GPU Triton's kernels run through its interpreter, which Triton asks for when a kernel is defined.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def interpreted_loops():
    """Triton 3.6's bounds of loops are arrays of one number, of which numpy 2.4 makes no int."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")

    def patch(tensor, scope, plain=interpreter._patch_lang_tensor):
        plain(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    with pytest.MonkeyPatch.context() as session:
        session.setattr(interpreter, "_patch_lang_tensor", patch)
        yield

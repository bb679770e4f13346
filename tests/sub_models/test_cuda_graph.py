"""Steps that may be captured: on a CPU every call is an ordinary one."""

import torch

from sub_models.cuda_graph import WARMUP_CALLS, CapturedStep


def test_each_call_does_the_work_once_and_the_warm_ones_are_told():
    """`--profile` waits for `settled`, so that a trace shows neither warm-up nor capture."""
    total = torch.zeros(())
    step = CapturedStep(lambda inputs: total.add_(inputs[0]), torch.device("cpu"), True, lambda: (torch.ones(()),))
    seen = []
    for calls in range(1, WARMUP_CALLS + 3):
        assert step() == calls
        seen.append(step.settled)
    assert seen == [False] * WARMUP_CALLS + [True] * 2

"""Running one function in a group of processes on this machine, the whole group ending with the first error."""

import datetime
import os
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import ProcessGroup


def run_group(
    function: Callable[..., None], world_size: int, *arguments: object, backend: str = "gloo", timeout_s: float = 60.0
) -> None:
    """Run `function(process_group, *arguments)` in world_size new processes.

    function must be importable by name; with backend "nccl" each rank's current device is the GPU of its number. The
    first rank that raises ends all others, and its traceback is raised here
    (torch.multiprocessing.ProcessRaisedException); a collective that waits longer than timeout_s fails."""
    with tempfile.TemporaryDirectory() as folder:
        address = "file://" + os.path.join(folder, "rendezvous")
        mp.spawn(_member, (world_size, address, backend, timeout_s, function, arguments), nprocs=world_size)


def _member(
    rank: int, world_size: int, address: str, backend: str, timeout_s: float, function: Callable, arguments: tuple
) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    timeout = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=world_size, timeout=timeout)
    group: ProcessGroup = dist.group.WORLD
    function(group, *arguments)
    dist.destroy_process_group()                             # not on errors: leaving would wait for the others

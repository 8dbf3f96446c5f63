"""Set up scripts that torchrun starts. Each rank selects its own GPU, and NCCL connects the ranks."""

import os
import sys

import torch
import torch.distributed as dist


def join_group() -> torch.device:
    """Join the process group of all ranks, and return the GPU of this rank.

    Raises:
        SystemExit: torchrun did not start the script, or this machine has fewer GPUs than ranks. Local rank 0 prints the
            reason.
    """
    if "LOCAL_RANK" not in os.environ:
        sys.exit("error: start this script with torchrun and one rank per GPU: torchrun --nproc_per_node=2 -m ...")
    local_rank, local_ranks = (int(os.environ[name]) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    require_gpus(local_ranks, local_rank)
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def world_group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def new_group(backend: str | None = None) -> dist.ProcessGroup:
    group = dist.new_group(backend=backend)
    assert isinstance(group, dist.ProcessGroup)
    return group


def require_gpus(ranks: int, local_rank: int = 0) -> None:
    """Exit unless this machine has one GPU for each of `ranks` ranks. Local rank 0 prints the reason."""
    count = torch.cuda.device_count()
    if count < ranks:
        text = f"error: {ranks} ranks require one GPU each, but this machine has {count}: start at most one rank per GPU"
        sys.exit(text if local_rank == 0 else 1)

"""How scripts under torchrun start: a GPU for every rank, and NCCL between them."""

import os
import sys

import torch
import torch.distributed as dist


def join() -> torch.device:
    """This rank's GPU, once all ranks have joined. Where there is none for each, the process ends, one of them saying so."""
    if "LOCAL_RANK" not in os.environ:
        sys.exit("error: start it by torchrun, a rank a GPU: torchrun --nproc-per-node 2 ...")
    local_rank, local_ranks = (int(os.environ[name]) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    require(local_ranks, local_rank)
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def require(ranks: int, local_rank: int = 0) -> None:
    """End the process, rank 0 saying so, where this machine has no GPU for each of `ranks`."""
    found = torch.cuda.device_count()
    if found < ranks:
        text = f"error: {ranks} ranks need a GPU each, and this machine has {found}: start as many ranks as there are GPUs"
        sys.exit(text if local_rank == 0 else 1)

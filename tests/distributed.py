"""Run a function on P ranks: processes of this machine, joined by gloo or NCCL."""

import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_ranks(function: Callable, ranks: int, directory: Path, *args: object, backend: str = "gloo") -> None:
    """Call `function(*args)` on every rank; a failure on any fails the caller. `directory`: new or empty."""
    directory.mkdir(parents=True, exist_ok=True)
    mp.spawn(_rank, args=(ranks, str(directory / "store"), backend, function, args), nprocs=ranks)


def _rank(rank: int, ranks: int, store: str, backend: str, function: Callable, args: tuple) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks)
    try:
        function(*args)
    finally:
        dist.destroy_process_group()
    os._exit(0)  # gloo's threads sometimes abort a process that ends in the usual way

"""Allocate pinned host memory, which a GPU can copy to and from while it computes."""

import mmap
import os
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ringattn.train.parallel.memory.capacity import GIB, InsufficientMemory
from ringattn.train.parallel.ranks import ranks_per_host

# The number of cores per rank for the thread that launches kernels and for the data loader.
OTHER_CORES = 2

T = TypeVar("T")


def empty_pinned(count: int, device: torch.device) -> Tensor:
    """Return an fp32 tensor (count,) of zeros in host memory, which is pinned if `device` is a GPU.

    PyTorch's own pinned allocator would round the size up to a power of two.

    Raises:
        InsufficientMemory: the memory cannot be pinned.
    """
    # Allocate separate pages, because a page cannot be pinned twice.
    memory = mmap.mmap(-1, 4 * count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(memory, dtype=torch.float32)
    if device.type == "cuda":
        # Allocate the pages on several cores, because `cudaHostRegister` uses only one.
        run_with_cores(tensor.zero_, device)
        cudart: Any = torch.cuda.cudart()
        address = tensor.data_ptr()
        if error := int(cudart.cudaHostRegister(address, tensor.nbytes, 0)):
            raise InsufficientMemory(
                f"{tensor.nbytes / GIB:.1f} GiB of host memory cannot be pinned (CUDA error {error}): free host memory, raise "
                "the limit of locked memory (ulimit -l), or leave out memory.activations=offload and memory.optimizer=offload"
            )
        weakref.finalize(tensor.untyped_storage(), cudart.cudaHostUnregister, address)
    return tensor


def run_with_cores(function: Callable[[], T], device: torch.device) -> T:
    """Run a function in a thread whose operations on host memory use several cores."""
    with host_thread("host-memory", device) as thread:
        return thread.submit(function).result()


def host_thread(name: str, device: torch.device) -> ThreadPoolExecutor:
    """Return an executor with one thread, whose operations on host memory use several cores.

    The current device of the thread is `device`. If `device` has no index, the thread uses the caller's current device.
    """
    if device.type != "cuda":
        return ThreadPoolExecutor(1, name)  # On CPUs, the ranks of a host already divide its cores.
    # The current device of a new thread is GPU 0.
    index = torch.cuda.current_device() if device.index is None else device.index
    # In a run on a GPU, other threads use one core by default.
    cores = max(len(os.sched_getaffinity(0)) // ranks_per_host() - OTHER_CORES, 1)

    def begin() -> None:
        torch.cuda.set_device(index)
        torch.set_num_threads(cores)

    return ThreadPoolExecutor(1, name, begin)


def resident_bytes() -> int:
    """Return the bytes of host memory in use by this process, or 0 if unknown."""
    with suppress(OSError):  # The file exists only on Linux.
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0

"""Allocate pinned host memory, which a GPU can copy to and from while it computes."""

import mmap
import weakref
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from ringattn.train.parallel.memory.capacity import GIB, InsufficientMemory


def empty_pinned(count: int, device: torch.device) -> Tensor:
    """Return an fp32 tensor (count,) of zeros in host memory, which is pinned if `device` is a GPU.

    PyTorch's own pinned allocator would round the size up to a power of two.

    Raises:
        InsufficientMemory: the memory cannot be pinned.
    """
    # The mapping has pages of its own, because no page can be pinned twice.
    memory = mmap.mmap(-1, 4 * count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)  # Pinning and updating fewer, larger pages takes less time.
    tensor = torch.frombuffer(memory, dtype=torch.float32)
    if device.type == "cuda":
        cudart: Any = torch.cuda.cudart()
        address = tensor.data_ptr()
        if error := int(cudart.cudaHostRegister(address, tensor.nbytes, 0)):
            raise InsufficientMemory(
                f"{tensor.nbytes / GIB:.1f} GiB of host memory cannot be pinned (CUDA error {error}): free host memory, raise "
                "the limit of locked memory (ulimit -l), or leave out memory.activations=offload and memory.optimizer=offload"
            )
        weakref.finalize(tensor.untyped_storage(), cudart.cudaHostUnregister, address)
    return tensor

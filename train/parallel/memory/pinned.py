"""Allocate pinned host memory, which a GPU can copy to and from while it computes."""

import weakref
from typing import Any

import torch
from torch import Tensor


def empty_pinned(count: int, device: torch.device) -> Tensor:
    """Return an uninitialised fp32 tensor (count,) in host memory, which is pinned if `device` is a GPU.

    PyTorch's own pinned allocator would round the size up to a power of two.
    """
    memory = torch.empty(count, dtype=torch.float32, device="cpu")
    if device.type == "cuda" and count > 0:
        cudart: Any = torch.cuda.cudart()
        address = memory.data_ptr()
        torch.cuda.check_error(int(cudart.cudaHostRegister(address, memory.nbytes, 0)))
        weakref.finalize(memory.untyped_storage(), cudart.cudaHostUnregister, address)
    return memory

"""Keep scratch memory between calls, because an allocation takes as long on the host as half a launch."""

import torch
from torch import Tensor

MAX_KEPT_BYTES = 32 * 2**20  # larger scratch memory belongs to long calls, in which an allocation takes no noticeable time

Key = tuple[int, int]  # the index of a GPU and the address of one of its streams


class ScratchPool:
    """Scratch memory for kernels that write and read it on one stream. The pool keeps at most one tensor per stream.

    A call takes the scratch memory of its stream, launches all kernels that use it, and gives it back. Kernels of one stream
    run one after the other, so the next call on this stream may overwrite the memory. Two streams never share memory. While
    one thread has the memory of a stream, another thread that launches on the same stream receives new memory.

    A CUDA graph may be replayed on any stream, so a call that is being captured always receives new memory, which belongs to
    the graph. Memory on other devices than GPUs is not kept.
    """

    def __init__(self) -> None:
        self._kept: dict[Key, Tensor] = {}

    def take(self, size: int, like: Tensor, stream: int | None) -> tuple[Key | None, Tensor]:
        """Return at least `size` uninitialised fp32 numbers on the device of `like`, with the key that `give_back` expects.

        `stream` is the address of the current stream of this device, or None if the device is not a GPU.
        """
        key = None
        if stream is not None and not torch.cuda.is_current_stream_capturing():
            key = like.get_device(), stream
            # `pop` is atomic, so no other thread receives the same memory.
            scratch = self._kept.pop(key, None)
            if scratch is not None and scratch.numel() >= size:
                return key, scratch
        return key, like.new_empty(size, dtype=torch.float32)

    def give_back(self, key: Key | None, scratch: Tensor) -> None:
        """Keep the memory for the next call on its stream. All kernels that use it must have been launched."""
        if key is not None and scratch.nbytes <= MAX_KEPT_BYTES:
            self._kept[key] = scratch

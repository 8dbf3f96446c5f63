"""Keep scratch memory between calls, because an allocation takes the host half as long as a launch."""

import threading
from typing import NamedTuple

import torch
from torch import Tensor

MAX_KEPT_BYTES = 32 * 2**20  # larger memory is not kept
MAX_COUNTERS = 4096  # per call
CHUNK_COUNTERS = 2**18  # the counters of captured calls are allocated in chunks of this size (1 MiB)

Key = tuple[int, int]  # the index of a GPU and the address of one of its streams


class Scratch(NamedTuple):
    """The fp32 numbers are uninitialised. The int32 counters are zeros, and the kernels must set them to 0 again."""

    numbers: Tensor
    counters: Tensor | None


class ScratchPool:
    """A `ScratchPool` provides scratch memory for kernels on one stream.

    Each call reuses the scratch memory of its stream, or allocates new memory if another thread is using it. During CUDA graph
    capture, a call always receives new memory, because the graph may be replayed on any stream.
    """

    def __init__(self) -> None:
        self._kept: dict[Key, Scratch] = {}
        self._chunks = CounterChunks()

    def take(self, size: int, num_counters: int, like: Tensor, stream: int | None) -> tuple[Key | None, Scratch]:
        """The argument `stream` is the address of the current stream, or None on a CPU."""
        if stream is None:
            counters = like.new_zeros(num_counters, dtype=torch.int32) if num_counters else None
            return None, Scratch(like.new_empty(size, dtype=torch.float32), counters)
        if torch.cuda.is_current_stream_capturing():
            counters = self._chunks.take(num_counters, like) if num_counters else None
            return None, Scratch(like.new_empty(size, dtype=torch.float32), counters)
        key = like.get_device(), stream
        # No other thread receives the same memory, because `pop` is atomic.
        scratch = self._kept.pop(key, None)
        if scratch is None or scratch.numbers.numel() < size:
            counters = like.new_zeros(MAX_COUNTERS, dtype=torch.int32)
            scratch = Scratch(like.new_empty(size, dtype=torch.float32), counters)
        return key, scratch

    def reserve_counters(self, like: Tensor) -> None:
        if not torch.cuda.is_current_stream_capturing():
            self._chunks.reserve(like)

    def give_back(self, key: Key | None, scratch: Scratch) -> None:
        if key is not None and scratch.numbers.nbytes <= MAX_KEPT_BYTES:
            self._kept[key] = scratch


class CounterChunks:
    """A `CounterChunks` object provides counters to calls that are captured in a CUDA graph. All counters are zeros before and
    after every replay of the graph.

    Each captured call receives its own counters, because resetting counters in every replay would be slow. Chunks are never
    freed, because this module does not know when a graph is deleted.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunks: list[Tensor] = []
        self._unused: dict[int, Tensor] = {}  # by GPU: the unused counters of the newest chunk

    def reserve(self, like: Tensor) -> None:
        with self._lock:
            unused = self._unused.get(like.get_device())
            if unused is None or 2 * len(unused) < CHUNK_COUNTERS:
                chunk = like.new_zeros(CHUNK_COUNTERS, dtype=torch.int32)
                self._chunks.append(chunk)
                self._unused[like.get_device()] = chunk

    def take(self, count: int, like: Tensor) -> Tensor:
        padded = -(-count // 4) * 4  # kernels are launched faster if all addresses are multiples of 16 bytes
        with self._lock:
            unused = self._unused.get(like.get_device())
            if unused is None or len(unused) < padded:
                return like.new_zeros(count, dtype=torch.int32)  # every replay sets these counters to 0
            self._unused[like.get_device()] = unused[padded:]
            return unused[:count]

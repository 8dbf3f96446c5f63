"""Keep the inputs and the attention results of blocks in host memory between the forward and the backward pass.

Copies have their own stream. The copy of a block to the GPU overlaps with the backward pass of the next block:

    forward pass    compute   block 0   block 1     block 2
                    copy                0 to host   1 to host
    backward pass   compute   block 2   block 1     block 0
                    copy      1 to GPU  0 to GPU
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ringattn import save_attention
from ringattn.checkpointing import SavedAttention
from ringattn.train.parallel.memory.pinned import empty_pinned

# The size in bytes of each host buffer, which must be a multiple of 4.
BUFFER_BYTES = 2**28

# Smaller tensors stay on the GPU, because the launch of a small copy takes longer than the copy.
MIN_BYTES = 2**20

Results = tuple[Tensor, Tensor | None]  # of `Block.forward`
Forward = Callable[..., Results]


class HostActivations:
    """Holds the tensors of consecutive blocks in host memory. Every micro-step uses the same memory.

    The host never waits for a copy to finish. The compute stream waits for the copy of a GPU tensor before the tensor is freed.

    Args:
        device: the device of the blocks. On CPUs, copies are synchronous, and host memory is not pinned.
    """

    def __init__(self, device: torch.device, buffer_bytes: int = BUFFER_BYTES) -> None:
        self._device, self._is_cuda, self._buffer_bytes = device, device.type == "cuda", buffer_bytes
        self._streams: Any = torch.get_device_module(device)
        self._copy_stream = self._streams.Stream()
        self._buffers: list[Tensor] = []
        self._ends = [0]  # Block i occupies the bytes _ends[i] to _ends[i + 1].
        self._stored: dict[int, list[Tensor]] = {}  # A meta tensor stands for a tensor on the host.
        self._leaving: tuple[list[Tensor], Any] | None = None  # the tensors being copied to the host, and the end of the copy
        self._arriving: dict[int, tuple[list[Tensor], Any]] = {}

    def reserve(self, num_bytes: float) -> None:
        """Allocate buffers for at least `num_bytes` bytes. Pinning memory takes about 0.4 s per GiB."""
        while len(self._buffers) * self._buffer_bytes < num_bytes:
            self._buffers.append(empty_pinned(self._buffer_bytes // 4, self._device).view(torch.uint8))

    def store(self, block: int, tensors: Sequence[Tensor]) -> None:
        """Start to copy the tensors of a block to the host. Every micro-step stores blocks 0, 1, 2, ... in this order."""
        self.finish_storing()
        kept = [x.detach().contiguous() for x in tensors]
        leaving = [x for x in kept if self._is_large(x)]
        start = self._ends[block]
        self._ends[block + 1 :] = [start + sum(x.nbytes for x in leaving)]
        self.reserve(self._ends[-1])
        self._stored[block] = [torch.empty_like(x, device="meta") if self._is_large(x) else x for x in kept]
        self._leaving = leaving, self._copy(leaving, start, to_host=True)

    def finish_storing(self) -> None:
        """Free the GPU memory of the block that was stored last."""
        if self._leaving is not None:
            self._leaving[1].wait()
            self._leaving = None

    def prefetch(self, block: int) -> None:
        """Start to copy the tensors of a block to the GPU, unless the copy has started already."""
        if block not in self._stored:
            return
        self.finish_storing()
        # Allocate on the compute stream, because the tensors are also freed there.
        tensors = [torch.empty_like(x, device=self._device) if x.is_meta else x for x in self._stored.pop(block)]
        arriving = [x for x in tensors if self._is_large(x)]
        self._arriving[block] = tensors, self._copy(arriving, self._ends[block], to_host=False)

    def fetch(self, block: int) -> list[Tensor]:
        """Return the tensors of a block. Call `fetch` once per `store`."""
        self.prefetch(block)
        tensors, arrived = self._arriving.pop(block)
        arrived.wait()
        return tensors

    def _is_large(self, x: Tensor) -> bool:
        return not self._is_cuda or x.nbytes >= MIN_BYTES

    def _copy(self, tensors: list[Tensor], start: int, to_host: bool) -> Any:
        """Start to copy `tensors` to or from the host memory that begins at byte `start`. Return the final event."""
        # The compute stream may still use the memory of the copy's source or destination.
        self._copy_stream.wait_stream(self._streams.current_stream())
        end = self._streams.Event()
        with self._streams.stream(self._copy_stream):
            for part, host in self._parts(tensors, start):
                target, source = (host, part) if to_host else (part, host)
                target.copy_(source, non_blocking=True)
            end.record()
        return end

    def _parts(self, tensors: list[Tensor], start: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Split the tensors into parts that fit into one buffer. Yield each part and its host memory, both as bytes."""
        for x in tensors:
            remaining = x.view(-1).view(torch.uint8)
            while len(remaining):
                index, offset = divmod(start, self._buffer_bytes)
                host = self._buffers[index][offset : offset + len(remaining)]
                yield remaining[: len(host)], host
                remaining, start = remaining[len(host) :], start + len(host)


def offload_blocks(blocks: Sequence[Any], count: int, host: HostActivations, attention_blocks: int = 0) -> None:
    """Keep the inputs and the attention results of the first `count` blocks in host memory. Recompute everything else.

    The first `attention_blocks` blocks also recompute attention. The argument `count` must be at least 1 and less than the
    number of blocks. Call this function after activation checkpointing has wrapped the other blocks.
    """
    for index, block in enumerate(blocks[:count]):
        block.forward = partial(_run_offloaded, block.forward, index, host, index >= attention_blocks)
    blocks[count].forward = partial(_run_after_offloaded, blocks[count].forward, count, host)


def _run_offloaded(
    forward: Forward, index: int, host: HostActivations, keeps_attention: bool, x: Tensor, *rest: Any
) -> Results:
    if not torch.is_grad_enabled():
        return forward(x, *rest)
    saved, inputs = SavedAttention(keeps_attention), [x]

    def run() -> Results:
        if inputs:
            return forward(inputs.pop(), *rest)
        # The block is being recomputed.
        fetched, *attention = host.fetch(index)
        saved.put(attention)
        return forward(fetched.requires_grad_(), *rest)

    context_fn = partial(save_attention, saved)
    results = checkpoint(run, use_reentrant=False, preserve_rng_state=False, context_fn=context_fn)
    host.store(index, [x, *saved.take()])
    _prefetch_in_backward(results[0], index - 1, host)
    return results


def _run_after_offloaded(forward: Forward, index: int, host: HostActivations, *args: Any) -> Results:
    results = forward(*args)
    host.finish_storing()
    _prefetch_in_backward(results[0], index - 1, host)
    return results


def _prefetch_in_backward(x: Tensor, index: int, host: HostActivations) -> None:
    def prefetch(_: Tensor) -> None:
        host.prefetch(index)

    if x.requires_grad:
        x.register_hook(prefetch)

"""Save checkpoints in a background thread, while training continues.

A step waits only while its tensors are copied to host memory. A background thread passes the copies to `storage.save`. The
thread has its own process group, so that its collectives never mix with the collectives of a step.

If a save fails, the thread requests a stop, which all ranks notice in the same step. All ranks then wait for the save and raise
its error.
"""

import logging
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ringattn.train import preemption
from ringattn.train.checkpoint import storage
from ringattn.train.parallel.memory.capacity import InsufficientMemory, copies_error, copies_problem, format_size, host_memory
from ringattn.train.parallel.memory.pinned import empty_pinned, host_thread
from ringattn.train.parallel.ranks import ranks_per_host, sync_errors
from ringattn.train.parallel.shard import local_shard
from ringattn.train.settings.config import round_up

log = logging.getLogger(__name__)

# The alignment of each copy, in bytes. It suits every dtype.
ALIGNMENT = 64

# Additional bytes for small tensors and for the alignment.
SLACK = 2**22


def choose(wanted: bool | None, size: int, saves_early: bool, planned: float = 0) -> bool:
    """Decide whether a run saves its checkpoints in the background. All ranks call this function.

    Args:
        wanted: `trainer.background_saves`.
        size: the bytes of this rank's tensors in a checkpoint.
        saves_early: whether the run saves before its last step.
        planned: the bytes of host memory in this rank's memory plan.

    Raises:
        InsufficientMemory: on every rank, if `wanted` is True and some rank lacks host memory.
    """
    # MemAvailable includes memory that the plan will allocate later, and may exceed the memory limit of a container.
    available = min(_available_memory() / ranks_per_host(), host_memory() / ranks_per_host() - planned)
    problem = copies_problem(size, available)
    with sync_errors():
        if wanted and problem:
            raise copies_error(problem)
    all_fit = torch.tensor(int(not problem), device="cpu")
    dist.all_reduce(all_fit, dist.ReduceOp.MIN)
    chosen = saves_early if wanted is None else wanted
    if chosen and not all_fit:
        log.info(f"{'checkpoint':<12}steps wait for saves, because {problem or 'another rank lacks host memory'}")
    return chosen and bool(all_fit)


def _available_memory() -> float:
    with suppress(OSError, StopIteration):  # The file exists only on Linux.
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1])
    return float("inf")


class Saver:
    """Saves checkpoints, at most one at a time. All ranks create the object and call its methods together.

    Leaving the context waits for the last save.

    Args:
        size: the number of bytes to reserve for copies in host memory. With None, saves run in the foreground, without copies.
        timeout_s: the timeout of collectives.
    """

    def __init__(self, device: torch.device, size: int | None, timeout_s: int) -> None:
        self._device, self._is_background, self._in_flight = device, size is not None, _nothing()
        timeout = timedelta(seconds=timeout_s)
        self._group: Any = dist.new_group(backend="gloo", timeout=timeout) if self._is_background else None
        self._thread = host_thread("checkpoint", device)
        self._copies = HostCopies(device)
        # Pinning 32 GiB takes 13 s, during which torch.compile is usually busy with the first step.
        self._reserved: Any = None if size is None else self._thread.submit(self._copies.reserve, size + SLACK)

    def save(self, directory: Path, step: int, tensors: dict[str, Tensor], meta: dict[str, Any], keep: int) -> None:
        """Save a checkpoint after the previous save has ended. Arguments and errors as in `storage.save`.

        A background save first copies the tensors, so they may change after this function returns. The method `wait` raises the
        errors of the save.
        """
        self.wait()
        if not self._is_background:
            storage.save(directory, step, tensors, meta, keep)
            return
        with sync_errors():
            self._reserved.result()
            copies = self._copies.copy(tensors)
        self._in_flight = self._thread.submit(self._write, directory, step, copies, meta, keep)

    def wait(self) -> None:
        """Wait for the save that is running, and raise its error."""
        in_flight, self._in_flight = self._in_flight, _nothing()
        in_flight.result()

    def _write(self, directory: Path, step: int, tensors: dict[str, Tensor], meta: dict[str, Any], keep: int) -> Path:
        try:
            if self._device.type != "cuda":
                return storage.save(directory, step, tensors, meta, keep, self._group)
            # DCP synchronises the current stream. The thread has its own stream, so that DCP does not wait for training steps.
            with torch.cuda.stream(torch.cuda.Stream(self._device)):
                return storage.save(directory, step, tensors, meta, keep, self._group)
        except BaseException:
            preemption.request_stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._thread.shutdown()
        self._copies.reserve(0)
        if self._is_background:
            dist.destroy_process_group(self._group)
        if kind is None:
            self.wait()
        elif error := self._in_flight.exception():
            log.error(f"{'checkpoint':<12}{error}")


def _nothing() -> Future[Path | None]:
    result = Future[Path | None]()
    result.set_result(None)
    return result


class HostCopies:
    """Holds copies of tensors in one block of host memory. Every `copy` reuses this block, which is pinned if the tensors are
    on a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._block = device, torch.empty(0, dtype=torch.uint8, device="cpu")

    def reserve(self, size: int) -> None:
        """Allocate `size` bytes, and invalidate all copies."""
        self._block = self._block.new_empty(0)
        try:
            self._block = empty_pinned(-(-size // 4), self._device).view(torch.uint8) if size else self._block
        except InsufficientMemory:
            log.warning(f"{'checkpoint':<12}{format_size(size)} of host memory cannot be pinned, so copies to it take longer")
            self._block = self._block.new_empty(size)

    def copy(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copy tensors, and this rank's shards of DTensors, to host memory. The next call overwrites the copies."""
        shards = {name: local_shard(x) for name, x in tensors.items()}
        if (size := sum(round_up(shard.nbytes, ALIGNMENT) for shard in shards.values())) > len(self._block):
            self.reserve(size)
        copies, start = dict[str, Tensor](), 0
        for name, shard in shards.items():
            copy = self._block[start : start + shard.nbytes].view(shard.dtype).view(shard.shape)
            copy.copy_(shard.detach(), non_blocking=True)
            start += round_up(shard.nbytes, ALIGNMENT)
            copies[name] = _with_shard(tensors[name], copy)
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return copies


def _with_shard(tensor: Tensor, shard: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor):
        return shard
    create: Any = DTensor
    return create(shard, tensor._spec, requires_grad=False)

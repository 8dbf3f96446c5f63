"""Show the progress of saves, loads and other long work on the console."""

import logging
import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

from ringattn.train import preemption
from ringattn.train.parallel.memory.capacity import format_size
from ringattn.train.parallel.memory.pinned import resident_bytes
from ringattn.train.parallel.shard import local_shard

log = logging.getLogger(__name__)
Work = TypeVar("Work")

# The seconds between two progress messages. A shorter save or load shows no message.
INTERVAL_S = 5.0
# The seconds between two checks for a stop signal.
POLL_S = 0.5


@contextmanager
def show_progress(
    verbs: tuple[str, str],
    path: Path | str,
    size: int,
    fraction: Callable[[], float],
    if_killed: Callable[[], str] | None = None,
    unit: str | None = None,
) -> Generator[None]:
    """Show the progress of a `with` statement on rank 0. At the end, show the size, the time and the rate.

    Args:
        verbs: the words for the body while it runs and when it has ended, such as ("saving", "saved").
        path: what the body processes, such as the file or the folder that it reads or writes.
        size: the number of bytes that all ranks together read or write, or the amount of other work.
        fraction: returns the completed part of the work, from 0 to 1. A thread calls `fraction`.
        unit: the unit of `size`; None for bytes.
        if_killed: returns the consequence of a kill, which is logged after a stop signal.
    """
    if dist.is_initialized() and dist.get_rank() != 0:
        yield
        return
    show = format_size if unit is None else lambda count: f"{count:,.0f} {unit}"
    start, is_done = time.monotonic(), threading.Event()

    def watch() -> None:
        shown, done, has_warned = start, 0.0, False
        while not is_done.wait(POLL_S):
            seconds = time.monotonic() - start
            if if_killed is not None and not has_warned and preemption.stop_requested(None):
                has_warned = True
                log.warning(f"{'signal':<12}{path} is incomplete, and torchrun kills its ranks after 30 s: {if_killed()}")
            if start + seconds - shown >= INTERVAL_S:
                shown, done = start + seconds, max(min(fraction(), 1.0) * size, done)
                rate = f"{show(done / seconds)}/s"
                log.info(f"{verbs[0]:<12}{path}: {show(done)} of {show(size)} after {seconds:.0f} s, {rate}")

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()
    if (seconds := time.monotonic() - start) >= INTERVAL_S:
        log.info(f"{verbs[1]:<12}{path}: {show(size)} in {seconds:.1f} s, {show(size / seconds)}/s")


def progress_bar(work: Iterable[Work], unit: str) -> Iterable[Work]:
    """Yield the parts of an evaluation. Rank 0 shows a progress bar, which counts in `unit`."""
    from datasets.utils import tqdm  # This import is slow.

    return tqdm(work, desc="evaluate", unit=f" {unit}", disable=dist.get_rank() != 0)


def show_allocation(size: int) -> AbstractContextManager[None]:
    """Show the progress of a `with` statement that allocates `size` bytes of host memory on rank 0."""
    if not size:
        return nullcontext()
    before, verbs = resident_bytes(), ("allocating", "allocated")
    return show_progress(verbs, "host memory", size, lambda: (resident_bytes() - before) / size)


def bytes_on_disk(folder: Path, pattern: str = "*") -> int:
    total = 0
    with suppress(OSError):  # The checkpoint's folder may be renamed during the loop.
        for file in folder.glob(pattern):
            total += file.stat().st_size
    return total


def local_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors. Of DTensors, count only this rank's shards."""
    return sum(local_shard(tensor).nbytes for tensor in tensors)

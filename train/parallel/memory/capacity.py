"""Check that a rank has the memory that it needs."""

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from ringattn.train.parallel.ranks import ranks_per_host
from ringattn.train.settings.config import ConfigError

GIB = 2**30

# The fraction of GPU memory above which blocks are recomputed or offloaded. The estimate leaves out fragmentation.
COMFORTABLE_FRACTION = 0.85

# The largest fraction of the memory that the estimate of a run may reach. CUDA and NCCL use 2 to 4 GiB of a GPU.
USABLE_FRACTION = 0.95

# The host memory in bytes that Python, CUDA and the data loader of a rank need
PROCESS_BYTES = 5 * GIB

# The largest fraction of the available host memory for copies of a checkpoint. The data loader and the page cache also need
# host memory.
COPIES_FRACTION = 0.5

# The files to which Linux may write the memory limit of a container
LIMITS = "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"

Bytes = dict[str, float]  # by purpose

COPIES = "copies for background saves"
RECEIVE_BUFFERS = "receive buffers"


class InsufficientMemory(ConfigError):
    """The memory of the ranks is too small for a job."""


class Needs(NamedTuple):
    """Holds the bytes that a rank needs on its device and in host memory, by purpose."""

    device: Bytes
    host: Bytes

    @property
    def offloaded(self) -> float:
        return sum(count for purpose, count in self.host.items() if purpose != COPIES)

    @property
    def allocated(self) -> float:
        """The estimated peak of torch's allocator on the device."""
        return sum(self.device.values()) - self.device.get(RECEIVE_BUFFERS, 0)

    @property
    def copies(self) -> float:
        return self.host.get(COPIES, 0)


class Capacity(NamedTuple):
    """Holds the bytes of GPU memory and host memory that a rank has."""

    gpu: float | None  # None on CPUs, where `host` is the only memory
    host: float  # the rank's share of its host
    fraction: float = USABLE_FRACTION  # the usable fraction of the GPU's memory

    @classmethod
    def of(cls, device: torch.device) -> "Capacity":
        gpu = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
        return cls(gpu, host_memory() / ranks_per_host())

    @property
    def usable_host(self) -> float:
        return max(USABLE_FRACTION * self.host - (0 if self.gpu is None else PROCESS_BYTES), 0)

    def share(self, needs: Needs) -> float:
        """Return the largest used fraction of GPU memory, host memory, and memory for copies."""
        device = sum(needs.device.values()) / self.gpu if self.gpu else 0
        copies = needs.copies / max(COPIES_FRACTION * (self.host - needs.offloaded), 1)
        return max(device, sum(self._host_bytes(needs).values()) / max(self.usable_host, 1), copies)

    def fits_device(self, needs: Needs) -> bool:
        return self.gpu is None or sum(needs.device.values()) <= self.fraction * self.gpu

    def fits(self, needs: Needs) -> bool:
        problem = copies_problem(needs.copies, self.host - needs.offloaded)
        return self.fits_device(needs) and sum(self._host_bytes(needs).values()) <= self.usable_host and not problem

    def check(self, needs: Needs) -> None:
        if self.fits(needs):
            return
        if problem := copies_problem(needs.copies, self.host - needs.offloaded):
            raise copies_error(problem)
        if self.gpu is not None and not self.fits_device(needs):
            raise _error(needs.device, self.fraction * self.gpu, "its GPU")
        raise _error(self._host_bytes(needs), self.usable_host, "its share of this host")

    def _host_bytes(self, needs: Needs) -> Bytes:
        if self.gpu is not None:
            return needs.host
        return {name: needs.device.get(name, 0) + needs.host.get(name, 0) for name in (*needs.device, *needs.host)}


def describe_bytes(needed: Bytes) -> str:
    parts = ", ".join(f"{name} {count / GIB:.1f}" for name, count in needed.items() if count >= 0.05 * GIB)
    total = f"{sum(needed.values()) / GIB:.{1 if sum(needed.values()) > GIB else 2}f} GiB"
    return "" if not any(needed.values()) else total + f" ({parts})" * bool(parts)


def _error(needed: Bytes, usable: float, owner: str) -> InsufficientMemory:
    return InsufficientMemory(
        f"each rank would need about {describe_bytes(needed)}, but {owner} has {usable / GIB:.1f} usable: use "
        "more ranks, a shorter data.seq_len, fewer tokens, a smaller model or batch, or leave out the settings memory.*, "
        "trainer.background_saves=true and trainer.cuda_graphs=true"
    )


def copies_problem(size: float, available: float) -> str:
    """Return why `available` bytes of host memory are too few for copies of `size` bytes, or ""."""
    available = max(available, 0)
    if size <= COPIES_FRACTION * available:
        return ""
    return (
        f"background saves need {format_size(size)} of host memory per rank, which is more than half of the "
        f"{format_size(available)} available"
    )


def copies_error(problem: str) -> InsufficientMemory:
    return InsufficientMemory(f"trainer.background_saves=true: {problem}; use more ranks, or leave the setting out")


def format_size(count: float) -> str:
    return f"{count / GIB:,.1f} GiB" if count >= GIB else f"{count / 2**20:,.1f} MiB"


def host_memory() -> float:
    """Return the memory of this host, or the memory limit of its container, in bytes."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in LIMITS:
        with suppress(OSError, ValueError):  # A file may be missing, or contain "max".
            total = min(total, int(Path(path).read_text()))
    return total

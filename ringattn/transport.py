"""How a hop moves: point-to-point over torch.distributed (NCCL on GPUs, gloo on CPUs), or between threads of one process.

A transport knows its rank and the ring's size, and exchanges lists of tensors. Nothing here knows what they mean.
"""

import itertools
import queue
import threading
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

T = TypeVar("T")
Addressed = list[tuple[Tensor, int]]  # a contiguous tensor and the rank of the ring it goes to or comes from


class Pending(Protocol):
    """Messages under way."""

    def wait(self) -> None:
        """Return when every tensor received holds its data, and every tensor sent may be changed."""


class Transport(Protocol):
    """One rank's end of a ring."""

    rank: int
    size: int

    def exchange(self, sends: Addressed, receives: Addressed) -> Pending:
        """Start all of them at once. Two ranks match their messages in the order in which both list them."""


class _Works:
    def __init__(self, works: list[dist.Work]) -> None:
        self.works = works

    def wait(self) -> None:
        for work in self.works:
            work.wait()


class Alone:
    """A ring of one rank."""

    rank, size = 0, 1

    def exchange(self, sends: Addressed, receives: Addressed) -> Pending:
        assert not sends and not receives, "a ring of one rank has nobody to exchange with"
        return _Works([])


class PointToPoint:
    """isend and irecv of a torch.distributed process group, in one batch a step: NCCL launches it as one kernel."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = group.rank(), group.size()

    def exchange(self, sends: Addressed, receives: Addressed) -> Pending:
        operations = [
            dist.P2POp(start, tensor, dist.get_global_rank(self.group, peer), self.group)
            for start, messages in ((dist.isend, sends), (dist.irecv, receives))
            for tensor, peer in messages
        ]
        return _Works(dist.batch_isend_irecv(operations) if operations else [])


class SimulatedRing:
    """P ranks as threads of one process, for tests and for studying schedules without a cluster."""

    _ids = itertools.count()

    def __init__(self, size: int) -> None:
        self.size = size
        self.name = f"simulated-{next(self._ids)}"
        self.mail: dict[tuple[int, int], queue.SimpleQueue] = {
            (src, dst): queue.SimpleQueue() for src in range(size) for dst in range(size)
        }

    def abort(self) -> None:
        """Wake every rank that waits for a message."""
        for box in self.mail.values():
            box.put(None)


class SimulatedRank:
    """One rank of a simulated ring: its transport, and what stands for a process group in `ring_attention`."""

    def __init__(self, ring: SimulatedRing, rank: int) -> None:
        self.ring, self.rank, self.size = ring, rank, ring.size
        self.group_name = f"{ring.name}/{rank}"

    def exchange(self, sends: Addressed, receives: Addressed) -> Pending:
        for tensor, dst in sends:
            self.ring.mail[self.rank, dst].put(tensor.clone())
        return _Mail([(tensor, self.ring.mail[src, self.rank]) for tensor, src in receives])


class _Mail:
    def __init__(self, expected: list[tuple[Tensor, queue.SimpleQueue]]) -> None:
        self.expected = expected

    def wait(self) -> None:
        for tensor, box in self.expected:
            message = box.get()
            if message is None:
                raise RuntimeError("another rank of the simulated ring failed")
            tensor.copy_(message)


_simulated: dict[str, SimulatedRank] = {}


def simulate(ranks: int, function: Callable[[int, SimulatedRank], T]) -> list[T]:
    """Run `function(rank, group)` on every rank of a simulated ring at once; the results, by rank.

    Raises:
        Exception: the first one that a rank raised, once all have ended.
    """
    ring = SimulatedRing(ranks)
    results: list = [None] * ranks
    failures: list[Exception] = []

    def run(rank: int) -> None:
        group = SimulatedRank(ring, rank)
        _simulated[group.group_name] = group
        try:
            results[rank] = function(rank, group)
        except Exception as failure:
            failures.append(failure)
            ring.abort()
        finally:
            del _simulated[group.group_name]

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results


def resolve(group_name: str) -> Transport:
    """The transport of a process group by its name; "" is a ring of one."""
    if not group_name:
        return Alone()
    return _simulated.get(group_name) or PointToPoint(_resolve_process_group(group_name))

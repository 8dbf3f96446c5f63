"""A ring of any size in one process, whose ranks are threads: for tests, and to study schedules without a cluster."""

import itertools
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from ringattn.comm.transport import Addressed, Messenger, Pending, simulated
from ringattn.planning.cost_model import fabric

T = TypeVar("T")


class SimulatedRing:
    """What P ranks share: who computes, and the mail between them."""

    _ids = itertools.count()

    def __init__(self, size: int, all_pairs: bool = False, in_turns: bool = True) -> None:
        self.size, self.all_pairs = size, all_pairs
        self.turn = threading.Semaphore(1 if in_turns else size)  # held by the ranks that compute
        self.name = f"simulated-{next(self._ids)}"
        self.mail: dict[tuple[int, int], queue.SimpleQueue] = {
            (src, dst): queue.SimpleQueue() for src in range(size) for dst in range(size)
        }

    def receive(self, src: int, dst: int) -> Tensor:
        """The next message from `src` to `dst`; while it is awaited, others compute."""
        box = self.mail[src, dst]
        try:
            message = box.get_nowait()
        except queue.Empty:
            self.turn.release()
            try:
                message = box.get()
            finally:
                self.turn.acquire()
        if message is None:
            raise RuntimeError(f"rank {src} of the simulated ring failed, or ended without what rank {dst} waits for")
        return message

    def leave(self, rank: int) -> None:
        """Wake who waits for a message of a rank that has ended."""
        for dst in range(self.size):
            self.mail[rank, dst].put(None)

    def abort(self) -> None:
        """Wake every rank that waits for a message."""
        for box in self.mail.values():
            box.put(None)


class SimulatedRank(Messenger):
    """One rank of a simulated ring: its transport, and what stands for a process group in `ring_attention`."""

    def __init__(self, ring: SimulatedRing, rank: int) -> None:
        self.ring, self.rank, self.size = ring, rank, ring.size
        self.group_name = f"{ring.name}/{rank}"
        self.fabric = fabric("simulated")._replace(all_pairs=ring.all_pairs)
        self.expected = [itertools.count() for _ in range(ring.size)]  # numbers of the messages from each rank
        self.arrived = [itertools.count() for _ in range(ring.size)]
        self.early: dict[tuple[int, int], Tensor] = {}  # by sender and number

    def exchange(self, sends: Addressed, receives: Addressed) -> Pending:
        for tensor, dst in sends:
            self.ring.mail[self.rank, dst].put(tensor.clone())
        return _Mail(self, receives)

    def receive(self, src: int, number: int) -> Tensor:
        """A message from `src`, by its number; those before it are kept."""
        while (src, number) not in self.early:
            message = self.ring.receive(src, self.rank)
            self.early[src, next(self.arrived[src])] = message
        return self.early.pop((src, number))


class _Mail:
    def __init__(self, end: SimulatedRank, expected: Addressed) -> None:
        self.end, self.expected = end, [(tensor, src, next(end.expected[src])) for tensor, src in expected]

    def wait(self) -> None:
        for tensor, src, number in self.expected:
            tensor.copy_(self.end.receive(src, number))


def simulate(
    ranks: int, function: Callable[[int, SimulatedRank], T], all_pairs: bool = False, in_turns: bool = True
) -> list[T]:
    """Run `function(rank, group)` on every rank of a simulated ring; the results, by rank.

    Args:
        function: runs in threads, in which contexts of the caller, as torch.no_grad or torch.autocast, do not hold: enter
            them in there.
        all_pairs: whether every rank can reach every other directly, or only its neighbours.
        in_turns: whether one rank computes while the others wait for messages, or for their turn. Many threads at once take
            several times as long, and not all kernels can bear them; but only then may ranks wait for each other otherwise.

    Raises:
        BaseException: the first one that a rank raised, once all have ended.
    """
    ring = SimulatedRing(ranks, all_pairs, in_turns)
    results: list = [None] * ranks
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        group = SimulatedRank(ring, rank)
        simulated[group.group_name] = group
        try:
            with ring.turn:
                results[rank] = function(rank, group)
            ring.leave(rank)
        except BaseException as failure:  # SystemExit too: else the others would wait for ever
            failures.append(failure)
            ring.abort()
        finally:
            del simulated[group.group_name]

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results

"""Simulate a ring of any size in threads of one process, for tests and for studies of schedules."""

import itertools
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch import Tensor

from ringattn.comm.transport import Addressed, MessageTransport, Wait
from ringattn.kernels.validation import as_integer, check_flag, shown
from ringattn.planning.cost_model import interconnect

T = TypeVar("T")


class SimulatedRing:
    _ids = itertools.count()

    def __init__(self, size: int, all_pairs: bool = False, in_turns: bool = True) -> None:
        self.size, self.all_pairs = size, all_pairs
        # A rank holds the semaphore while it computes.
        self.compute_slots = threading.Semaphore(1 if in_turns else size)
        self.name = f"simulated-{next(self._ids)}"
        self.messages: dict[tuple[int, int, int], Tensor] = {}  # messages in flight, by (sender, receiver, number)
        self.ended: set[int] = set()  # ranks that send no more messages
        # One per receiver: notified when the receiver gets a message, or `ended` changes.
        self.changed = [threading.Condition() for _ in range(size)]

    def send(self, src: int, dst: int, number: int, message: Tensor) -> None:
        with self.changed[dst]:
            self.messages[src, dst, number] = message
            self.changed[dst].notify_all()

    def receive(self, src: int, dst: int, number: int) -> Tensor:
        """Return message `number` from `src` to `dst`. Other ranks compute while this rank waits."""
        key = src, dst, number
        if key not in self.messages:
            self.compute_slots.release()
            try:
                with self.changed[dst]:
                    self.changed[dst].wait_for(lambda: key in self.messages or src in self.ended)
            finally:
                self.compute_slots.acquire()
        if key not in self.messages:
            raise RuntimeError(f"rank {src} of the simulated ring failed, or ended without a message that rank {dst} waits for")
        return self.messages.pop(key)

    def end(self, ranks: Iterable[int]) -> None:
        """Record that `ranks` will send no more messages, and wake the ranks that wait for messages."""
        self.ended.update(ranks)
        for changed in self.changed:
            with changed:
                changed.notify_all()


class SimulatedRank(MessageTransport):
    """One rank of a simulated ring. A `SimulatedRank` serves as the transport, and as the process group in public calls."""

    def __init__(self, ring: SimulatedRing, rank: int) -> None:
        self.ring, self.rank, self.size = ring, rank, ring.size
        self.group_name = f"{ring.name}/{rank}"
        self.interconnect = interconnect("simulated")._replace(all_pairs=ring.all_pairs)
        # Messages have numbers, because exchanges may complete in any order.
        self.sent, self.expected = ([itertools.count() for _ in range(ring.size)] for _ in range(2))

    def exchange(self, sends: Addressed, receives: Addressed) -> Wait:
        """Send copies, so that the caller may modify the tensors. The returned function receives the messages."""
        for tensor, dst in sends:
            self.ring.send(self.rank, dst, next(self.sent[dst]), tensor.clone())
        expected = [(tensor, src, next(self.expected[src])) for tensor, src in receives]

        def wait() -> None:
            for tensor, src, number in expected:
                tensor.copy_(self.ring.receive(src, self.rank, number))

        return wait


SIMULATED_RANKS: dict[str, SimulatedRank] = {}


def simulate(
    ranks: int, function: Callable[[int, SimulatedRank], T], all_pairs: bool = False, in_turns: bool = True
) -> list[T]:
    """Run `function(rank, group)` on every rank of a simulated ring and return the results by rank.

    Args:
        function: runs in one thread per rank. Contexts of the caller, such as torch.no_grad, do not apply to the threads.
        all_pairs: whether every rank can reach all other ranks directly, and not only its neighbours.
        in_turns: whether only one rank computes at a time, which takes less time than concurrent threads. Pass in_turns=False
            if `function` contains other synchronisation, such as a barrier. Some kernels require True.

    Raises:
        ValueError: an argument is invalid.
        BaseException: the first exception of a rank, raised after all ranks have ended.
    """
    ranks = as_integer("ranks", ranks, 1)
    check_flag("all_pairs", all_pairs)
    check_flag("in_turns", in_turns)
    if not callable(function):
        raise ValueError(f"function={shown(function)}: it must be a function of (rank, group)")
    ring = SimulatedRing(ranks, all_pairs, in_turns)
    results: list[Any] = [None] * ranks
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        group = SimulatedRank(ring, rank)
        SIMULATED_RANKS[group.group_name] = group
        try:
            with ring.compute_slots:
                results[rank] = function(rank, group)
            ring.end([rank])
        except BaseException as failure:  # including SystemExit, or the other ranks would wait forever
            failures.append(failure)
            ring.end(range(ranks))
        finally:
            del SIMULATED_RANKS[group.group_name]

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results

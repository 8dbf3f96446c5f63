"""Define the interface of all transports, and the base class of the transports that exchange single tensors.

A transport is one rank's connection to the other ranks of a ring. The transport sends and receives the messages of a schedule
step by step:

    ring_pass = transport.begin(schedule, templates)
    for t in range(steps):
        wait = ring_pass.exchange(t, outgoing)   # starts all sends and receives of step t
        ...                                      # attention of step t runs at the same time
        incoming = wait()                        # blocks that the next step computes with
    ring_pass.end()

`MessageTransport` turns each step into one exchange of tensors. `ringattn.comm.p2p` implements this class for NCCL and gloo,
and `ringattn.comm.simulated` implements this class for threads of one process. `ringattn.comm.nvlink` does not exchange
messages, because it writes directly into the memory of other GPUs. `ringattn.comm.connect` chooses the transport for a process
group.
"""

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from ringattn.comm.watchdog import Hop, NoWatchdog, Watchdog
from ringattn.planning.cost_model import Interconnect
from ringattn.planning.schedule import Message, RankStep, Schedule

T = TypeVar("T")
Tensors = tuple[Tensor, ...]  # a block or a result: tensors whose dimension 1 contains the same tokens of one rank
Templates = dict[str, Tensors]  # examples of a block and of a result; they determine the shapes and dtypes of receive buffers
WaitForBlocks = Callable[[], list[Tensors]]  # a function that waits for the messages of a step and returns their blocks
Wait = Callable[[], None]  # a function that waits until all messages have arrived and all sent tensors may be modified
Addressed = list[tuple[Tensor, int]]  # (contiguous tensor, receiver) for sends, and (contiguous tensor, sender) for receives

# The maximum number of results that a pass keeps until its end. If more results return to a rank, each result is merged when it
# arrives, because every kept result needs memory.
MAX_KEPT_RESULTS = 3


def take_rows(block: Tensors, rows: range) -> Tensors:
    """Return views of the given rows (dimension 1) of each tensor.

    A tensor that has only len(rows) rows already contains exactly the given rows, and is returned unchanged.
    """
    return tuple(x if len(rows) == x.shape[1] else x[:, rows.start : rows.stop] for x in block)


class RingPass(Protocol):
    """One run of a schedule on one rank."""

    keeps_results: bool  # whether all results that return to this rank remain valid until `end`

    def exchange(self, t: int, outgoing: list[Tensors]) -> WaitForBlocks:
        """Start the sends and receives of step t, and return a function that waits for the incoming blocks and returns them.

        `outgoing` contains one block for each outgoing message of the step, in the order of the messages. A block to send must
        be contiguous. It contains either exactly the rows of its message or all rows of its owner. A block must not be modified
        between the start of this exchange and the start of exchange t + 2. The received blocks remain valid until exchange t +
        2 starts.
        """

    def end(self) -> None:
        """Wait, on the host or on the current CUDA stream, until all sent tensors may be modified."""


class Transport(Protocol):
    """One rank's connection to the other ranks of a ring."""

    rank: int
    size: int
    interconnect: Interconnect
    watchdog: Watchdog | NoWatchdog = NoWatchdog()

    def begin(self, schedule: Schedule, templates: Templates) -> RingPass:
        """Start a pass of `schedule`. All ranks of the ring must call this method."""


def report_faults(communicate: Callable[[], T], transport: Transport, hop: Hop | None) -> T:
    """Return communicate(). If the network raises an error, raise a `RingFault` that names the missing rank instead."""
    try:
        return communicate()
    # OutOfMemoryError is a RuntimeError, but it is not an error of the network.
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        fault = transport.watchdog.fault(hop)
        if fault is None:
            raise
        raise fault from error


def complete_hop(wait: Callable[[], T], transport: Transport, hop: Hop | None) -> T:
    """Wait for the messages of a hop, record in the watchdog that the hop is finished, and return the received tensors."""
    result = report_faults(wait, transport, hop)
    transport.watchdog.finished(hop)
    return result


class MessageTransport(Transport):
    """A transport that sends and receives single tensors. Subclasses implement the method `exchange`."""

    def exchange(self, sends: Addressed, receives: Addressed) -> Wait:
        """Start all sends and receives at once, and return a function that waits until they are complete.

        Two ranks must list the messages between them in the same order.
        """
        raise NotImplementedError

    def all_gather(self, own: Tensor) -> tuple[Tensor, Wait]:
        """Start to gather a contiguous tensor of equal shape from each rank.

        Returns:
            A tensor (ranks, *own.shape) with the tensors in the order of the ranks, and a function that waits for them.
        """
        gathered = own.new_empty(self.size, *own.shape)
        gathered[self.rank] = own
        others = [peer for peer in range(self.size) if peer != self.rank]
        return gathered, self.exchange([(own, peer) for peer in others], [(gathered[peer], peer) for peer in others])

    def begin(self, schedule: Schedule, templates: Templates) -> RingPass:
        """Start a pass of `schedule`, see `Transport.begin`."""
        return _MessagePass(self, schedule.by_rank[self.rank], templates)


class _MessagePass:
    """A ring pass in which every step is one exchange of messages."""

    def __init__(self, transport: MessageTransport, steps: tuple[RankStep, ...], templates: Templates) -> None:
        self.transport, self.steps, self.templates = transport, steps, templates
        incoming = [message for step in steps for message in step.incoming]
        returning = [message for message in incoming if message.kind == "result" and message.owner == transport.rank]
        self.keeps_results = len(returning) <= MAX_KEPT_RESULTS

    def exchange(self, t: int, outgoing: list[Tensors]) -> WaitForBlocks:
        step = self.steps[t]
        # Every step receives into new tensors. A message therefore never overwrites tensors that kernels still read.
        received = [self._allocate(message) for message in step.incoming]
        # The tensors of a message are sent one after the other. The receiver lists these tensors in the same order.
        sends = [
            (x.contiguous(), message.dst)
            for message, block in zip(step.outgoing, outgoing, strict=True)
            for x in take_rows(block, message.rows)
        ]
        receives = [(x, message.src) for message, block in zip(step.incoming, received, strict=True) for x in block]
        wait_for_messages = self.transport.exchange(sends, receives)

        def wait() -> list[Tensors]:
            wait_for_messages()
            return received

        return wait

    def _allocate(self, message: Message) -> Tensors:
        return tuple(x.new_empty(x.shape[0], len(message.rows), *x.shape[2:]) for x in self.templates[message.kind])

    def end(self) -> None: ...

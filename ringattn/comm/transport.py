"""Define the interface of all transports, and the base class of transports that exchange messages.

A transport is one rank's connection to the other ranks of a ring:

    ring_pass = transport.begin(schedule, templates)
    for t in range(steps):
        wait = ring_pass.exchange(t, outgoing)   # starts all sends and receives of step t
        ...                                      # attention of step t runs at the same time
        incoming = wait()                        # the blocks for the next step
    ring_pass.end()

`ringattn.comm.connect` chooses the transport. The module `nvlink` writes into the memory of other GPUs. `p2p` (NCCL and gloo)
and `simulated` send messages. A rank packs its own block once per pass, and relays received blocks without a copy.
"""

from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from ringattn.comm.packing import Memory, Packing, Shapes
from ringattn.comm.watchdog import Hop, NoWatchdog, Watchdog
from ringattn.planning.cost_model import Interconnect
from ringattn.planning.schedule import Message, Schedule

T = TypeVar("T")
Tensors = tuple[Tensor, ...]  # a block or a result, with rows in dimension 1
Templates = dict[str, Tensors]  # examples of a block and of a result
WaitForBlocks = Callable[[], list[Tensors]]
Wait = Callable[[], object]  # waits until messages have arrived and sent tensors may be modified
Addressed = list[tuple[Tensor, int]]  # (contiguous tensor, receiver or sender)

# A pass with more than MAX_KEPT_RESULTS results merges each result when it arrives, to save memory.
MAX_KEPT_RESULTS = 3


def take_rows(block: Tensors, rows: range) -> Tensors:
    """Return views of the given rows (dimension 1) of each tensor."""
    return tuple(x if len(rows) == x.shape[1] else x[:, rows.start : rows.stop] for x in block)


class RingPass(Protocol):
    """A `RingPass` executes a schedule once on one rank."""

    keeps_results: bool  # whether returned results remain valid until `end`

    def exchange(self, t: int, outgoing: list[Tensors]) -> WaitForBlocks:
        """Start the sends and receives of step t. Return a function that waits for the incoming blocks and returns them.

        Outgoing blocks are contiguous. A block contains only the rows to send, or all rows of its owner. Until exchange t + 2
        starts, outgoing blocks must not be modified, and received blocks remain valid.
        """

    def end(self) -> None:
        """Wait, on the host or on the current CUDA stream, until all sent tensors may be modified."""


class NoRecovery:
    """Rings of one rank and simulated rings are never reset, so their transports have a `NoRecovery` object."""

    call, left = 0, None

    def enter(self) -> None: ...

    def exit(self, error: BaseException | None) -> None: ...


class Transport:
    rank: int
    size: int
    interconnect: Interconnect
    watchdog: Watchdog | NoWatchdog = NoWatchdog()
    recovery: Any = NoRecovery()  # or the `ringattn.comm.recovery.Recovery` of the transport
    messages: "MessageTransport"  # a transport between the same ranks that sends plain messages
    waits_on_gpu: bool = False  # whether the GPU waits for messages, instead of the host
    graphs: Any = None  # the `ringattn.comm.pass_graphs.PassGraphs` of the transport, if it has any

    def begin_replay(self) -> None:
        """Prepare the replay of a pass from a CUDA graph."""

    def close(self) -> None:
        """End the transport, because its process group has been destroyed."""
        self.watchdog.stop()

    def begin(self, schedule: Schedule, templates: Templates) -> RingPass:
        """Start a pass of `schedule`. All ranks of the ring must call this method."""
        raise NotImplementedError

    def mark(self) -> tuple[Any, ...]:
        """After an exception, record an event on every stream that may wait for another rank."""
        return ()

    def release(self, events: tuple[Any, ...], meet: Callable[[], None]) -> None:
        """After all ranks have left a failed call, let the work of this rank's streams finish.

        Args:
            events: the result of `mark`.
            meet: a function that waits until all ranks have called it.
        """

    def reset(self, generation: int) -> None:
        """Forget all messages of earlier calls. The number `generation` counts the resets.

        All ranks call this method at the same time, after their streams have finished.
        """


class in_call:
    """Every attention call runs inside the context manager `in_call(*transports)`. After an exception, each transport is reset
    before its next call.

    Nested `in_call` contexts belong to the same call.
    """

    __slots__ = ("transports",)

    def __init__(self, *transports: Transport) -> None:
        self.transports = transports

    def __enter__(self) -> None:
        for transport in self.transports:
            if transport.recovery.left is not None:
                transport.recovery.prepare()
        for transport in self.transports:
            transport.recovery.enter()

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: object) -> None:
        for transport in self.transports:
            transport.recovery.exit(error)


def report_faults(communicate: Callable[[], T], transport: Transport, hop: Hop | None) -> T:
    """Return communicate(). After a network error, raise a `RingFault` that names the missing rank."""
    try:
        return communicate()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        fault = transport.watchdog.fault(hop)
        if fault is None:
            raise
        raise fault from error


def complete_hop(wait: Callable[[], T], transport: Transport, hop: Hop | None) -> T:
    result = report_faults(wait, transport, hop)
    transport.watchdog.finished(hop)
    return result


class _Outgoing(NamedTuple):
    dst: int
    rows: range
    packing: Packing
    is_own: bool  # whether it is this rank's own block
    is_last: bool


class _PlannedStep(NamedTuple):
    sends: tuple[_Outgoing, ...]
    # (sender, packing, whether the message is a result for this rank)
    receives: tuple[tuple[int, Packing, bool], ...]


class _MessagePlan(NamedTuple):
    steps: tuple[_PlannedStep, ...]
    keeps_results: bool  # whether the pass keeps all returned results


@lru_cache(maxsize=64)  # all layers of a model use the same plan
def _plan_messages(schedule: Schedule, rank: int, block: Shapes, result: Shapes) -> _MessagePlan:
    own_rows = [[m.rows for m in step.outgoing if m.kind == "block" and m.owner == rank] for step in schedule.by_rank[rank]]
    packings: dict[tuple[str, int], Packing] = {}

    def packing(message: Message) -> Packing:
        key = message.kind, len(message.rows)
        if key not in packings:
            packings[key] = Packing.of(block if message.kind == "block" else result, len(message.rows))
        return packings[key]

    def outgoing(t: int, message: Message) -> _Outgoing:
        is_own = message.kind == "block" and message.owner == rank
        is_last = all(message.rows not in later for later in own_rows[t + 1 :])
        return _Outgoing(message.dst, message.rows, packing(message), is_own, is_last)

    steps = tuple(
        _PlannedStep(
            tuple(outgoing(t, m) for m in step.outgoing),
            tuple((m.src, packing(m), m.kind == "result" and m.owner == rank) for m in step.incoming),
        )
        for t, step in enumerate(schedule.by_rank[rank])
    )
    returning = sum(returns for step in steps for *_, returns in step.receives)
    return _MessagePlan(steps, returning <= MAX_KEPT_RESULTS)


class MessageTransport(Transport):
    """A `MessageTransport` sends every message as one contiguous tensor. Subclasses implement `exchange`."""

    # The number of exchanges over NCCL so far. If two ranks start different exchanges, NCCL waits forever.
    num_exchanges = 0
    waiting_since: float | None = None  # start of the host's current wait, or None

    @property
    def messages(self) -> "MessageTransport":  # pyrefly: ignore[bad-override]  # an attribute would be a reference cycle
        return self

    def exchange(self, sends: Addressed, receives: Addressed) -> Wait:
        """Start all sends and receives. Return a function that waits until all messages are complete. Sender and receiver must
        list their messages in the same order.
        """
        raise NotImplementedError

    def all_gather(self, own: Tensor) -> tuple[Tensor, Wait]:
        """Start to gather one contiguous tensor per rank, all of the same shape.

        Returns:
            A tensor (ranks, *own.shape), and a function that waits for it.
        """
        gathered = own.new_empty(self.size, *own.shape)
        gathered[self.rank] = own
        others = [peer for peer in range(self.size) if peer != self.rank]
        return gathered, self.exchange([(own, peer) for peer in others], [(gathered[peer], peer) for peer in others])

    def begin(self, schedule: Schedule, templates: Templates) -> RingPass:
        block, result = (tuple((x.shape[0], x.shape[2:], x.dtype) for x in templates[kind]) for kind in ("block", "result"))
        plan, device = _plan_messages(schedule, self.rank, block, result), templates["block"][0].device
        return _MessagePass(self, plan, device, self._spare_memory(plan, device))

    # the plan, the stream and the memory of the latest pass
    _spare: tuple[_MessagePlan | None, int, dict[Packing, list[Memory]]] = None, 0, {}

    def interrupt(self) -> None:
        """End the current wait of the host with an error. The transport cannot be used afterwards."""

    def reset(self, generation: int) -> None:
        self.free_messages()

    def free_messages(self) -> None:
        self._spare = None, 0, {}

    def _spare_memory(self, plan: _MessagePlan, device: torch.device) -> dict[Packing, list[Memory]]:
        """Return the free message buffers of earlier passes with the same plan and stream. A new pass may reuse the buffers at
        once, because messages wait for all earlier work of the stream.
        """
        stream = 0
        if device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                return {}
            stream = torch._C._cuda_getCurrentRawStream(device.index)
        if self._spare[0] is not plan or self._spare[1] != stream:
            self._spare = plan, stream, {}
        return self._spare[2]


class _MessagePass:
    def __init__(
        self, transport: MessageTransport, plan: _MessagePlan, device: torch.device, spare: dict[Packing, list[Memory]]
    ) -> None:
        self.transport, self.device, self.spare = transport, device, spare
        self.steps, self.keeps_results = plan
        self._own_messages: dict[range, Tensor] = {}  # own packed messages that a later step sends again
        self._kept: list[tuple[Packing, Memory]] = []  # used until the end of the pass
        self._in_use: deque[list[tuple[Packing, Memory]]] = deque()  # used by the latest two steps

    def exchange(self, t: int, outgoing: list[Tensors]) -> WaitForBlocks:
        step = self.steps[t]
        self._in_use.append([])
        if len(self._in_use) > 2:
            self._release(self._in_use.popleft())
        sends = [(self._pack(message, block), message.dst) for message, block in zip(step.sends, outgoing, strict=True)]
        receives: Addressed = []
        received: list[Tensors] = []
        for src, packing, is_kept in step.receives:
            message, block = self._allocate(packing, until_end=is_kept and self.keeps_results)
            receives.append((message, src))
            received.append(block)
        wait_for_messages = self.transport.exchange(sends, receives)

        def wait() -> list[Tensors]:
            wait_for_messages()
            return received

        return wait

    def _pack(self, message: _Outgoing, block: Tensors) -> Tensor:
        packed = self._own_messages.pop(message.rows, None) if message.is_own else None
        if packed is None:
            block = take_rows(block, message.rows)
            packed = message.packing.packed(block)
            if packed is None:
                packed, views = self._allocate(message.packing, until_end=message.is_own)
                torch._foreach_copy_(views, block)
        if message.is_own and not message.is_last:
            self._own_messages[message.rows] = packed
        return packed

    def _allocate(self, packing: Packing, until_end: bool) -> Memory:
        memory = self.spare[packing].pop() if self.spare.get(packing) else packing.new_message(self.device)
        (self._kept if until_end else self._in_use[-1]).append((packing, memory))
        return memory

    def _release(self, messages: list[tuple[Packing, Memory]]) -> None:
        for packing, memory in messages:
            self.spare.setdefault(packing, []).append(memory)

    def end(self) -> None:
        for messages in (self._kept, *self._in_use):
            self._release(messages)

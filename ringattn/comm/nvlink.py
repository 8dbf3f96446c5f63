"""Ring passes over NVLink: copy engines write into the memory of other GPUs, and flags next to the data tell when it has
arrived.

Every rank has one *receive buffer*, which all layers and calls use, in memory that the other ranks have mapped (torch symmetric
memory). One message from rank A to rank B:

    A's side stream                                         B's main stream
      wait until the slot is free (wait flags)                ...
      copy the rows into a slot of B's receive buffer         wait for B's "arrived" flag, and clear it
      set B's "arrived" flag  ----------------------------->  kernels read the slot
                                                              set A's "credit" flag: the slot may be reused

No kernel communicates, no SM is occupied, and the host waits for nothing.

Two kinds of flags prevent a slot from being overwritten while it is read. The slots of one kind of message are used in turn,
and before a sender reuses a slot it waits for the *credit* that the reader has given. At the beginning of a pass every rank
sets a *ready* flag for those ranks that will send it blocks: it no longer reads the messages of the previous pass. Results need
no such flag, since a result goes to the rank that the block came from, and there the pass has begun.

Flags are 0 or 1, there is one for each message, and whoever waits for a flag clears it. They mean the same in a pass that is
issued and in a pass that a CUDA graph replays.

No deadlock is possible: a rank issues its work step by step, and everything it waits for in a step was issued by the other
ranks in or before that step. This holds even if a GPU runs all its streams one after the other.
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

from ringattn.comm import cuda_driver
from ringattn.comm.transport import Templates, Tensors, WaitForBlocks
from ringattn.comm.watchdog import Watchdog
from ringattn.planning.cost_model import Interconnect
from ringattn.planning.schedule import Message, Schedule

log = logging.getLogger(__name__)

KINDS = ("block", "result")
ARRIVED, CREDIT = range(2)  # purposes of flags; there is one flag of each for every kind of message and step

# Results get a slot each, and are summed at the end of the pass in one go, as long as all of them need at most 1 GiB.
MAX_KEPT_RESULT_BYTES = 1 << 30
# Up to this size a kind of message has three slots, so that a message may arrive two steps early. Larger slots come in pairs.
MAX_TRIPLE_SLOT_BYTES = 128 << 20
MAX_CACHED_ROUTES = 64  # packed documents bring a new schedule with every step of training
ALIGNMENT = 256  # bytes; the start of every tensor in a receive buffer


def padded_bytes(x: Tensor, rows: int) -> int:
    """Return the space that `rows` rows of a tensor like `x` (B, N, ...) take in a receive buffer."""
    size = x.shape[0] * rows * x.shape[2:].numel() * x.element_size()
    return -(-size // ALIGNMENT) * ALIGNMENT


class ReceiveBuffer:
    """Memory of this rank that other ranks write into, with the addresses of all ranks' buffers as mapped here.

    All ranks make the same requests in the same order, so their buffers grow at the same time.

    Args:
        transport: the transport between the ranks.
        purpose: what the buffer is for, in log messages.
        not_run: what has not happened yet if the buffer is too small during the capture of a CUDA graph, for the error.
        before_release: called before the memory is released.
    """

    def __init__(
        self, transport: "NvlinkTransport", purpose: str, not_run: str, before_release: Callable[[], None] = lambda: None
    ) -> None:
        self.transport, self.purpose, self.not_run, self.before_release = transport, purpose, not_run, before_release
        self.memory: Tensor | None = None
        self.addresses: list[int] = []  # by rank
        self._kept: dict[int, Tensor] = {}  # by address: memory whose address is part of a CUDA graph

    @property
    def nbytes(self) -> int:
        return 0 if self.memory is None else self.memory.numel()

    def reserve(self, count: int, capturing: bool) -> None:
        """Make the buffer at least `count` bytes long.

        Raises:
            RuntimeError: the buffer is too small and a CUDA graph is being captured, in which nothing can be allocated.
        """
        if self.memory is not None and self.nbytes >= count:
            return
        if capturing:
            raise RuntimeError(
                f"{self.not_run} with these shapes yet, so its memory cannot be part of a CUDA graph: call it once before the "
                "capture"
            )
        self.transport.synchronise()  # after this no rank writes to the old memory
        self.before_release()
        self.memory = None
        count = max(1, -(-count >> 21)) << 21  # whole pages of 2 MiB
        log.info("rank %d: %d MiB of receive buffer for %s over NVLink", self.transport.rank, count >> 20, self.purpose)
        self.memory, self.addresses = self.transport.share(torch.uint8, count)

    def keep(self) -> None:
        """Never release the current memory, even if the buffer grows: a CUDA graph contains its address."""
        self._kept.setdefault(self.memory.data_ptr(), self.memory)


@dataclass(frozen=True)
class Send:
    """One outgoing message: the addresses that its tensors are copied to, and the flags that belong to it."""

    message: Message
    # The ready flag of the receiver, for the first block sent to it; the credit flag of the slot, if the slot was used before.
    wait_flags: list[int]
    targets: tuple[int, ...]
    arrived: int


@dataclass(frozen=True)
class Receive:
    """One incoming message: its tensors in the receive buffer, and the flag that is set when they have arrived."""

    block: Tensors
    arrived: int


@dataclass
class RouteStep:
    """One step of a pass on this rank."""

    credits: list[int] = field(default_factory=list)  # flags to set when the local steps before this step are done
    sends: list[Send] = field(default_factory=list)
    receives: list[Receive] = field(default_factory=list)
    sends_results_next: bool = False  # whether the next step sends results that this step computes


@dataclass
class Route:
    """Everything that one rank sends, receives and signals in a pass."""

    steps: list[RouteStep]
    ready_flags: list[int]  # flags to set at the beginning
    keeps_results: bool


class Slots:
    """The position of each message of a schedule in the receive buffers, in bytes. It is the same on all ranks."""

    def __init__(self, schedule: Schedule, templates: Templates) -> None:
        self.templates = templates
        self.arrivals: dict[tuple[int, str], list[tuple[int, Message]]] = {}  # by (rank, kind): (step, message), in order
        self.offsets: dict[Message, int] = {}
        self.counts: dict[str, int] = {}  # slots by kind
        self.keeps_results = False
        for t, step in enumerate(schedule.steps):
            for message in step.messages:
                self.arrivals.setdefault((message.dst, message.kind), []).append((t, message))
        self.total_bytes = 0
        for kind in KINDS:
            queues = [queue for (_, of_kind), queue in self.arrivals.items() if of_kind == kind]
            size = max((self.tensor_offsets(message)[-1] for queue in queues for _, message in queue), default=0)
            longest = max(map(len, queues), default=0)
            if kind == "result" and longest * size <= MAX_KEPT_RESULT_BYTES:
                self.counts[kind], self.keeps_results = longest, True
            else:
                self.counts[kind] = min(longest, 3 if size <= MAX_TRIPLE_SLOT_BYTES else 2)
            for queue in queues:
                for i, (_, message) in enumerate(queue):
                    self.offsets[message] = self.total_bytes + i % self.counts[kind] * size
            self.total_bytes += self.counts[kind] * size

    def tensor_offsets(self, message: Message) -> list[int]:
        """Return where each tensor of a message starts in its slot, and where the last one ends."""
        ends = [0]
        for x in self.templates[message.kind]:
            ends.append(ends[-1] + padded_bytes(x, len(message.rows)))
        return ends


class NvlinkTransport:
    """A ring of GPUs of one host that can all write into each other's memory. It runs direct schedules.

    Creating one waits for all ranks of the group.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, joined: Interconnect, watchdog: Watchdog) -> None:
        self.group, self.device, self.interconnect, self.watchdog = group, device, joined, watchdog
        self.rank, self.size = group.rank(), group.size()
        self.streams = {kind: torch.cuda.Stream(device, priority=-1) for kind in KINDS}
        self._ready, self._sent = torch.cuda.Event(), torch.cuda.Event()
        self._allocate()

    def _allocate(self) -> None:
        """Create what all passes use: routes, receive buffer and flags."""
        self._routes: dict[tuple, Route] = {}
        self.receive_buffer = ReceiveBuffer(self, "the ring", "the ring has not run", before_release=self._routes.clear)
        self.all_to_all_buffers: Any = None  # created by `ringattn.comm.nvlink_all_to_all` when it is first used
        self._flags, self._flag_addresses = self.share(torch.int32, (1 + 2 * len(KINDS) * self._max_steps) * self.size)

    @property
    def _max_steps(self) -> int:
        """The largest number of steps of a direct schedule."""
        return self.size + 2

    def share(self, dtype: torch.dtype, count: int) -> tuple[Tensor, list[int]]:
        """Return zeros that all ranks have mapped, and the address of each rank's zeros as mapped here. Waits for all ranks."""
        shared = symmetric.empty(count, dtype=dtype, device=self.device).zero_()
        handle = symmetric.rendezvous(shared, self.group.group_name)
        addresses = [handle.get_buffer(rank, (count,), dtype).data_ptr() for rank in range(self.size)]
        self.synchronise()
        return shared, addresses

    def synchronise(self) -> None:
        """Wait until the GPUs of all ranks have finished all their work."""
        torch.cuda.synchronize(self.device)
        dist.barrier(self.group)
        torch.cuda.synchronize(self.device)

    @property
    def others(self) -> list[int]:
        """The other ranks, in ascending order."""
        return [rank for rank in range(self.size) if rank != self.rank]

    def _ready_flag(self, rank: int, writer: int) -> int:
        """Return the address of the flag of `rank` that tells whether the receive buffer of `writer` is ready."""
        return self._flag_addresses[rank] + 4 * writer

    def _flag(self, rank: int, purpose: int, kind: str, t: int, writer: int) -> int:
        """Return the address of the flag of `rank` for the message of a kind that `writer` sends, or reads, at step `t`."""
        row = 1 + (2 * KINDS.index(kind) + purpose) * self._max_steps + t
        return self._flag_addresses[rank] + 4 * (row * self.size + writer)

    def begin(self, schedule: Schedule, templates: Templates) -> "_NvlinkPass":
        """Start a pass of a direct schedule, see `ringattn.comm.transport.Transport.begin`."""
        capturing = torch.cuda.is_current_stream_capturing()
        assert len(schedule.steps) <= self._max_steps, "a direct schedule has at most two steps more than there are ranks"
        shapes = tuple((x.shape[0], x.shape[2:], x.dtype) for kind in KINDS for x in templates[kind])
        route = self._routes.get((schedule, shapes))
        if route is None:
            slots = Slots(schedule, templates)
            self.receive_buffer.reserve(slots.total_bytes, capturing)
            if len(self._routes) >= MAX_CACHED_ROUTES:
                self._routes.clear()
            route = self._routes[schedule, shapes] = self._plan_route(schedule, slots)
        if capturing:
            self.receive_buffer.keep()
        return _NvlinkPass(self, route)

    def _plan_route(self, schedule: Schedule, slots: Slots) -> Route:
        steps = [RouteStep() for _ in range(len(schedule.steps) + 2)]
        receivers: set[int] = set()  # ranks that were sent a block
        for t, step in enumerate(schedule.by_rank[self.rank]):
            for message in step.outgoing:
                first = message.kind == "block" and message.dst not in receivers
                if first:
                    receivers.add(message.dst)
                steps[t].sends.append(self._plan_send(t, message, slots, first))
            steps[t].receives = [self._plan_receive(t, message, slots) for message in step.incoming]
            steps[t - 1].sends_results_next = any(message.kind == "result" for message in step.outgoing)
        for kind in KINDS:
            queue = slots.arrivals.get((self.rank, kind), [])
            for (t, _), (next_t, message) in zip(queue, queue[slots.counts[kind] :], strict=False):
                # Kernels read a block in the step after its arrival. A result is merged at the end of the step it arrives in.
                done = t + (2 if kind == "block" else 1)
                steps[done].credits.append(self._flag(message.src, CREDIT, kind, next_t, self.rank))
        sources = sorted({message.src for _, message in slots.arrivals.get((self.rank, "block"), [])})
        return Route(steps, [self._ready_flag(src, self.rank) for src in sources], slots.keeps_results)

    def _plan_send(self, t: int, message: Message, slots: Slots, first: bool) -> Send:
        kind, dst = message.kind, message.dst
        queue = [other for _, other in slots.arrivals[dst, kind]]
        wait_flags = [self._ready_flag(self.rank, dst)] if first else []
        if queue.index(message) >= slots.counts[kind]:
            wait_flags.append(self._flag(self.rank, CREDIT, kind, t, dst))
        address = self.receive_buffer.addresses[dst] + slots.offsets[message]
        targets = tuple(address + start for start in slots.tensor_offsets(message)[:-1])
        return Send(message, wait_flags, targets, self._flag(dst, ARRIVED, kind, t, self.rank))

    def _plan_receive(self, t: int, message: Message, slots: Slots) -> Receive:
        block = []
        for start, x in zip(slots.tensor_offsets(message), slots.templates[message.kind], strict=False):
            shape = x.shape[0], len(message.rows), *x.shape[2:]
            start += slots.offsets[message]
            end = start + torch.Size(shape).numel() * x.element_size()
            block.append(self.receive_buffer.memory[start:end].view(x.dtype).view(shape))
        return Receive(tuple(block), self._flag(self.rank, ARRIVED, message.kind, t, message.src))


class _NvlinkPass:
    """One ring pass in progress, see `ringattn.comm.transport.RingPass`."""

    def __init__(self, transport: NvlinkTransport, route: Route) -> None:
        self.transport, self.route = transport, route
        self.keeps_results = route.keeps_results
        self.main = torch.cuda.current_stream(transport.device)
        self.handle = self.main.cuda_stream
        self.ready = transport._ready  # recorded when everything that the next sends read has been computed
        self.ready.record(self.main)
        transport.streams["block"].wait_event(self.ready)
        if route.ready_flags:
            cuda_driver.set_flags(route.ready_flags, self.handle)
        # Results in flight, each with the event after which its memory may be reused.
        self.sending: deque[tuple[torch.cuda.Event, Tensors]] = deque()

    def exchange(self, t: int, outgoing: list[Tensors]) -> WaitForBlocks:
        step = self.route.steps[t]
        if step.credits:
            cuda_driver.set_flags(step.credits, self.handle)
        while len(self.sending) > 1:
            self.main.wait_event(self.sending[0][0])
            self.sending.popleft()
        for send, block in zip(step.sends, outgoing, strict=True):
            self._send(send, block)
        return partial(self._wait, t)

    def _send(self, send: Send, block: Tensors) -> None:
        is_result = send.message.kind == "result"
        stream = self.transport.streams[send.message.kind]
        handle = stream.cuda_stream
        if is_result:
            stream.wait_event(self.ready)
        if send.wait_flags:
            cuda_driver.wait_and_clear_flags(send.wait_flags, handle)
        for x, target in zip(block, send.targets, strict=True):
            _copy_message(x, target, send.message.rows, handle)
        cuda_driver.set_flags([send.arrived], handle)
        if is_result:
            sent = torch.cuda.Event()
            sent.record(stream)
            self.sending.append((sent, block))

    def _wait(self, t: int) -> list[Tensors]:
        step = self.route.steps[t]
        if step.sends_results_next:
            self.ready.record(self.main)
        if step.receives:
            cuda_driver.wait_and_clear_flags([receive.arrived for receive in step.receives], self.handle)
        return [receive.block for receive in step.receives]

    def end(self) -> None:
        for event, _ in self.sending:
            self.main.wait_event(event)
        self.sending.clear()
        self.transport._sent.record(self.transport.streams["block"])
        self.main.wait_event(self.transport._sent)


def _copy_message(x: Tensor, target: int, rows: range, stream: int) -> None:
    """Copy the given rows of x (B, N, ...) to address `target`; all of x if it has no other rows."""
    assert x.is_contiguous(), "copy engines copy contiguous rows"
    if x.shape[1] == len(rows):
        return cuda_driver.copy(target, x.data_ptr(), x.nbytes, stream)
    entry_bytes = x.nbytes // x.shape[0]
    row_bytes = entry_bytes // x.shape[1]
    for i in range(x.shape[0]):
        source = x.data_ptr() + i * entry_bytes + rows.start * row_bytes
        cuda_driver.copy(target + i * len(rows) * row_bytes, source, len(rows) * row_bytes, stream)

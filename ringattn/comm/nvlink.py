"""Ring passes over NVLink: copy engines write into the memory of other GPUs, and flags signal the arrival of the data.

Every rank has one *receive buffer*, which all layers and calls use. The buffer lies in memory that the other ranks have mapped
(torch symmetric memory). The following diagram shows one message from rank A to rank B:

    A's side stream                                         B's main stream
      wait until the slot is free (wait flags)                ...
      copy the rows into a slot of B's receive buffer         wait for B's "arrived" flag, and clear it
      set B's "arrived" flag  ----------------------------->  kernels read the slot
                                                              set A's "credit" flag: the slot may be reused

No kernel communicates, no SM is occupied by communication, and the host never waits.

Two kinds of flags prevent a slot from being overwritten while it is read. The slots of one kind of message are used in turn,
and before a sender reuses a slot, it waits for the *credit* flag that the reader sets. At the beginning of a pass, every rank
sets a *ready* flag for the ranks that will send blocks to it. This flag means that the rank has finished reading the messages
of the previous pass. Results need no such flag. A result goes to the rank that the block came from, and that rank has already
begun the pass.

Flags are 0 or 1, and there is one flag for each message. The stream that waits for a flag also clears the flag. Flags therefore
work in the same way when a pass is issued and when a CUDA graph replays the pass.

No deadlock is possible. Each rank issues its work step by step, and the other ranks issue all work that a step waits for in the
same step or in an earlier step. This argument holds even if a GPU runs all its streams one after the other.
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

from ringattn.comm import cuda_driver
from ringattn.comm.transport import Templates, Tensors, WaitForBlocks
from ringattn.comm.watchdog import Watchdog
from ringattn.planning.cost_model import Interconnect
from ringattn.planning.schedule import Message, Schedule
from ringattn.planning.ulysses_degree import MAX_HEAD_CHUNKS

log = logging.getLogger(__name__)

KINDS = ("block", "result")
# The purposes of flags. Every kind of message has one flag of each purpose in every step, but only the ready flags of blocks
# in the first step are used.
PURPOSES = ARRIVED, CREDIT, READY = range(3)

# If all results of a pass need at most 1 GiB, every result gets its own slot, and one kernel sums all results at the end of the
# pass.
MAX_KEPT_RESULT_BYTES = 1 << 30
# A kind of message has three slots if its messages have at most this size, so that a message may arrive two steps early. Larger
# messages have two slots.
MAX_TRIPLE_SLOT_BYTES = 128 << 20
MAX_SENDS = 2 * MAX_HEAD_CHUNKS  # sends of one all-to-all call: every chunk of heads is sent to other ranks and returned
MAX_CACHED_ROUTES = 64  # packed documents create a new schedule in every training step
ALIGNMENT = 256  # bytes; every tensor in a receive buffer starts at a multiple of this number


def padded_bytes(x: Tensor, rows: int) -> int:
    """Return the bytes that `rows` rows of a tensor like `x` (B, N, ...) occupy in a receive buffer."""
    size = x.shape[0] * rows * x.shape[2:].numel() * x.element_size()
    return -(-size // ALIGNMENT) * ALIGNMENT


class ReceiveBuffer:
    """Memory of this rank that other ranks write into, and the addresses at which this rank has mapped all ranks' buffers.

    All ranks make the same requests in the same order, so their buffers grow at the same time.

    Args:
        transport: the transport between the ranks.
        user: what the buffer is used for, such as "the ring", in log messages and error messages.
        before_release: a function that is called before the memory is released.
    """

    def __init__(self, transport: "NvlinkTransport", user: str, before_release: Callable[[], None] = lambda: None) -> None:
        self.transport, self.user, self.before_release = transport, user, before_release
        self.memory: Tensor | None = None
        self.addresses: list[int] = []  # by rank
        self._kept: set[Tensor] = set()  # memory whose address is part of a CUDA graph

    def reserve(self, count: int) -> None:
        """Make the buffer at least `count` bytes long.

        Raises:
            RuntimeError: the buffer is too small and a CUDA graph is being captured, in which nothing can be allocated.
        """
        if self.memory is not None and self.memory.numel() >= count:
            return
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{self.user} has not run with these shapes yet, so its memory cannot be part of a CUDA graph: call it once "
                "before the capture"
            )
        self.transport.synchronise()  # after this no rank writes to the old memory
        self.before_release()
        self.memory = None
        # -(-n >> 21) rounds up, as -(-n // 2**21) does.
        count = max(1, -(-count >> 21)) << 21  # whole pages of 2 MiB
        log.info("rank %d: %d MiB of receive buffer for %s over NVLink", self.transport.rank, count >> 20, self.user)
        self.memory, self.addresses = self.transport.share(torch.uint8, count)

    def keep_for_graph(self) -> None:
        """Never release the current memory, even if the buffer grows, if a CUDA graph that contains its address is captured."""
        if torch.cuda.is_current_stream_capturing():
            self._kept.add(self.memory)


class Send(NamedTuple):
    """One outgoing message: the addresses that its tensors are copied to, and the flags that belong to it."""

    message: Message
    # A block waits for the ready flag of its receiver. A message whose slot was used before waits for the credit flag of the
    # slot.
    wait_flags: list[int]
    targets: list[int]
    arrived: int


@dataclass
class RouteStep:
    """One step of a pass on this rank."""

    # The flags to set when the local steps of all earlier steps are done: ready flags in the first step, credits in the others.
    flags: list[int] = field(default_factory=list)
    sends: list[Send] = field(default_factory=list)
    received: list[Tensors] = field(default_factory=list)  # the tensors of each incoming message in the receive buffer
    arrived: list[int] = field(default_factory=list)  # the flags that are set when they have arrived

    @property
    def sends_results(self) -> bool:
        return any(send.message.kind == "result" for send in self.sends)


Route = tuple[list[RouteStep], bool]  # what one rank sends, receives and signals in a pass; whether it keeps all results


class Slots:
    """The position of each message of a schedule in the receive buffers, in bytes. It is the same on all ranks."""

    def __init__(self, schedule: Schedule, templates: Templates) -> None:
        self.templates = templates
        self.arrivals: dict[tuple[int, str], list[tuple[int, Message]]] = {}  # by (rank, kind): (step, message), in order
        self.offsets: dict[Message, int] = {}
        self.counts: dict[str, int] = {}  # number of slots for each kind of message
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
        """Return the offset of each tensor of a message in its slot, followed by the end of the last tensor."""
        sizes = (padded_bytes(x, len(message.rows)) for x in self.templates[message.kind])
        return list(accumulate(sizes, initial=0))


class NvlinkTransport:
    """The transport of a ring of GPUs of one host that can write into each other's memory. It runs direct schedules.

    The constructor waits for all ranks of the group.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, joined: Interconnect, watchdog: Watchdog) -> None:
        self.group, self.device, self.interconnect, self.watchdog = group, device, joined, watchdog
        self.rank, self.size = group.rank(), group.size()
        # Blocks and results use separate streams, so that a block does not wait behind a result that is not yet computed.
        self.streams = {kind: torch.cuda.Stream(device, priority=-1) for kind in KINDS}
        self._allocate()

    def _allocate(self) -> None:
        """Create the routes, the receive buffers and the flags, which all calls use."""
        self._routes: dict[tuple, Route] = {}
        self.receive_buffer = ReceiveBuffer(self, "the ring", before_release=self._routes.clear)
        self.all_to_all_buffer = ReceiveBuffer(self, "the all-to-all")
        # Recorded when everything that the next sends of a pass read has been computed.
        self.computed = torch.cuda.Event()
        self._max_steps = self.size + 2  # the largest number of steps of a direct schedule
        # Each row contains one flag per writer: first the rows of the ring, then one row for each send of an all-to-all, and at
        # last the ready flags of the all-to-all.
        self._ring_rows = len(PURPOSES) * len(KINDS) * self._max_steps
        self._flags, self._flag_addresses = self.share(torch.int32, (self._ring_rows + MAX_SENDS + 1) * self.size)
        # All buffers are ready before the first all-to-all, which waits for
        # the ready flags without an earlier call that could set them.
        self._flags[-self.size :] = 1
        self.synchronise()

    def share(self, dtype: torch.dtype, count: int) -> tuple[Tensor, list[int]]:
        """Allocate zeros that all ranks map. Return them, and the address at which this rank has mapped each rank's zeros.

        The method waits for all ranks.
        """
        shared = symmetric.empty(count, dtype=dtype, device=self.device).zero_()
        handle = symmetric.rendezvous(shared, self.group.group_name)
        addresses = [handle.get_buffer(rank, (count,), dtype).data_ptr() for rank in range(self.size)]
        self.synchronise()
        return shared, addresses

    def synchronise(self) -> None:
        """Wait until the GPUs of all ranks have finished all their work."""
        # The first synchronisation completes the work of this rank before the barrier.
        # The second one completes the barrier itself, which NCCL runs on the GPU.
        torch.cuda.synchronize(self.device)
        dist.barrier(self.group)
        torch.cuda.synchronize(self.device)

    @property
    def others(self) -> list[int]:
        """The other ranks, in ascending order."""
        return [rank for rank in range(self.size) if rank != self.rank]

    def _flag(self, rank: int, purpose: int, kind: str, t: int, writer: int) -> int:
        """Return the address of a flag in the memory of `rank`, for the message of `kind` that `writer` sends or reads at step
        `t`.
        """
        row = (len(PURPOSES) * KINDS.index(kind) + purpose) * self._max_steps + t
        return self._flag_addresses[rank] + 4 * (row * self.size + writer)

    def all_to_all_flag(self, rank: int, number: int, writer: int) -> int:
        """Return the address of a flag in the memory of `rank` that `writer` sets for send `number` of an all-to-all.

        The number MAX_SENDS stands for the ready flag.
        """
        return self._flag_addresses[rank] + 4 * ((self._ring_rows + number) * self.size + writer)

    def begin(self, schedule: Schedule, templates: Templates) -> "_NvlinkPass":
        """Start a pass of a direct schedule, see `ringattn.comm.transport.Transport.begin`."""
        assert len(schedule.steps) <= self._max_steps, "a direct schedule has at most two steps more than there are ranks"
        # The number of tokens is not a part of the key, because the
        # schedule already determines the rows of every message.
        shapes = tuple((x.shape[0], x.shape[2:], x.dtype) for kind in KINDS for x in templates[kind])
        if (schedule, shapes) not in self._routes:
            slots = Slots(schedule, templates)
            self.receive_buffer.reserve(slots.total_bytes)
            # Routes are cheap to rebuild, so the whole cache is
            # cleared instead of tracking which route was used last.
            if len(self._routes) >= MAX_CACHED_ROUTES:
                self._routes.clear()
            self._routes[schedule, shapes] = self._plan_steps(schedule, slots), slots.keeps_results
        self.receive_buffer.keep_for_graph()
        return _NvlinkPass(self, *self._routes[schedule, shapes])

    def _plan_steps(self, schedule: Schedule, slots: Slots) -> list[RouteStep]:
        # Credits of the last messages belong to up to two steps after the last step of the schedule.
        steps = [RouteStep() for _ in range(len(schedule.steps) + 2)]
        for t, step in enumerate(schedule.by_rank[self.rank]):
            steps[t].sends = [self._plan_send(t, message, slots) for message in step.outgoing]
            steps[t].received = [self._received(message, slots) for message in step.incoming]
            steps[t].arrived = [self._flag(self.rank, ARRIVED, message.kind, t, message.src) for message in step.incoming]
        for kind in KINDS:
            queue = slots.arrivals.get((self.rank, kind), [])
            for (t, _), (next_t, message) in zip(queue, queue[slots.counts[kind] :], strict=False):
                # Kernels read a block in the step after its arrival. A result is merged at the end of the step it arrives in.
                done = t + (2 if kind == "block" else 1)
                steps[done].flags.append(self._flag(message.src, CREDIT, kind, next_t, self.rank))
        sources = [message.src for _, message in slots.arrivals.get((self.rank, "block"), [])]
        steps[0].flags = [self._flag(src, READY, "block", 0, self.rank) for src in sources]
        return steps

    def _plan_send(self, t: int, message: Message, slots: Slots) -> Send:
        kind, dst = message.kind, message.dst
        queue = [other for _, other in slots.arrivals[dst, kind]]
        # In a direct schedule, a rank sends at most one block to each other rank.
        wait_flags = [self._flag(self.rank, READY, kind, 0, dst)] if kind == "block" else []
        if queue.index(message) >= slots.counts[kind]:
            wait_flags.append(self._flag(self.rank, CREDIT, kind, t, dst))
        address = self.receive_buffer.addresses[dst] + slots.offsets[message]
        targets = [address + start for start in slots.tensor_offsets(message)[:-1]]
        return Send(message, wait_flags, targets, self._flag(dst, ARRIVED, kind, t, self.rank))

    def _received(self, message: Message, slots: Slots) -> Tensors:
        """Return the tensors of an incoming message in the receive buffer."""
        block = []
        for start, x in zip(slots.tensor_offsets(message), slots.templates[message.kind], strict=False):
            shape = x.shape[0], len(message.rows), *x.shape[2:]
            start += slots.offsets[message]
            end = start + torch.Size(shape).numel() * x.element_size()
            block.append(self.receive_buffer.memory[start:end].view(x.dtype).view(shape))
        return tuple(block)


class _NvlinkPass:
    """One ring pass in progress, see `ringattn.comm.transport.RingPass`."""

    def __init__(self, transport: NvlinkTransport, steps: list[RouteStep], keeps_results: bool) -> None:
        self.transport, self.steps, self.keeps_results = transport, steps, keeps_results
        self.main = torch.cuda.current_stream(transport.device)
        # Blocks were computed by earlier work of the main stream, so
        # the side stream must wait for that work before it copies them.
        transport.computed.record(self.main)
        transport.streams["block"].wait_event(transport.computed)
        # Results in flight, each with the event after which its memory may be reused.
        self.sending: deque[tuple[torch.cuda.Event, Tensors]] = deque()

    def exchange(self, t: int, outgoing: list[Tensors]) -> WaitForBlocks:
        step = self.steps[t]
        cuda_driver.set_flags(step.flags, self.main.cuda_stream)
        # The memory of a sent result may be reused once the copy has finished.
        # Waiting for all but the newest result keeps one copy in flight.
        while len(self.sending) > 1:
            event, _ = self.sending.popleft()
            self.main.wait_event(event)
        for send, block in zip(step.sends, outgoing, strict=True):
            self._send(send, block)
        return partial(self._wait, t)

    def _send(self, send: Send, block: Tensors) -> None:
        is_result = send.message.kind == "result"
        stream = self.transport.streams[send.message.kind]
        handle = stream.cuda_stream
        if is_result:
            stream.wait_event(self.transport.computed)
        cuda_driver.wait_and_clear_flags(send.wait_flags, handle)
        for x, target in zip(block, send.targets, strict=True):
            _copy_message(x, target, send.message.rows, handle)
        cuda_driver.set_flags([send.arrived], handle)
        if is_result:
            sent = torch.cuda.Event()
            sent.record(stream)
            self.sending.append((sent, block))

    def _wait(self, t: int) -> list[Tensors]:
        # The event is recorded after the kernels of this step, because the next step sends their results.
        if self.steps[t + 1].sends_results:
            self.transport.computed.record(self.main)
        cuda_driver.wait_and_clear_flags(self.steps[t].arrived, self.main.cuda_stream)
        return self.steps[t].received

    def end(self) -> None:
        # After the pass, the caching allocator may give the memory of sent tensors to
        # later work of the main stream. Therefore the main stream waits for all copies.
        for event, _ in self.sending:
            self.main.wait_event(event)
        self.sending.clear()
        self.main.wait_stream(self.transport.streams["block"])


def _copy_message(x: Tensor, target: int, rows: range, stream: int) -> None:
    """Copy the given rows of x (B, N, ...) to address `target`. If x has no other rows, copy x as a whole."""
    assert x.is_contiguous(), "copy engines copy contiguous rows"
    if x.shape[1] == len(rows):
        return cuda_driver.copy(target, x.data_ptr(), x.nbytes, stream)
    entry_bytes = x.nbytes // x.shape[0]
    row_bytes = entry_bytes // x.shape[1]
    for i in range(x.shape[0]):
        source = x.data_ptr() + i * entry_bytes + rows.start * row_bytes
        cuda_driver.copy(target + i * len(rows) * row_bytes, source, len(rows) * row_bytes, stream)

"""Run ring passes over NVLink. Copy engines write into the memory of other GPUs, and flags signal the arrival of data.

Every rank has one *receive buffer*, which the other ranks have mapped (torch symmetric memory). One message from rank A to rank
B:

    A's side stream                                         B's main stream
      wait until the slot is free (wait flags)                ...
      copy the rows into a slot of B's receive buffer         wait for B's "arrived" flag, and clear it
      set B's "arrived" flag  ----------------------------->  kernels read the slot
                                                              set A's "credit" flag: the slot may be reused

Communication uses no kernels and no SMs, and the host never waits. Blocks and results have separate slots, which messages use
in turn. A *credit* flag tells the sender that the receiver has read a slot. A *ready* flag tells the sender that the receiver
has read all messages of the previous pass. Senders wait for ready flags before the first block of a pass.

Every message has its own flag, which is 0 or 1. The stream that waits for a flag also clears the flag, so CUDA graphs can be
replayed. In step t, a rank waits only for work that other ranks issue in step t or earlier. Therefore no deadlock is possible,
even if a GPU runs its streams one after the other.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

from ringattn.comm import cuda_driver
from ringattn.comm.p2p import P2PTransport
from ringattn.comm.pass_graphs import PassGraphs
from ringattn.comm.transport import Templates, Tensors, Transport, WaitForBlocks
from ringattn.comm.watchdog import Watchdog
from ringattn.planning.cost_model import Interconnect
from ringattn.planning.schedule import Message, Schedule
from ringattn.planning.ulysses_degree import MAX_HEAD_CHUNKS

log = logging.getLogger(__name__)

KINDS = ("block", "result")
# Ready flags are used only for blocks in step 0.
PURPOSES = ARRIVED, CREDIT, READY = range(3)

# Results with at most MAX_KEPT_RESULT_BYTES in total stay in the receive buffer, until one kernel sums them at the end of the
# pass.
MAX_KEPT_RESULT_BYTES = 1 << 30
# Messages of at most MAX_TRIPLE_SLOT_BYTES use three slots in turn, and may arrive two steps early. Larger messages use two
# slots.
MAX_TRIPLE_SLOT_BYTES = 128 << 20
MAX_SENDS = 2 * MAX_HEAD_CHUNKS  # each chunk of heads is sent and returned
MAX_CACHED_ROUTES = 64  # packed documents create a new schedule in every training step
_POLL = 0.001  # polling interval after an exception, in seconds
ALIGNMENT = 256  # bytes; every tensor in a receive buffer starts at a multiple


def padded_bytes(x: Tensor, rows: int) -> int:
    """Return the bytes of `rows` rows of a tensor like `x` (B, N, ...) in a receive buffer."""
    size = x.shape[0] * rows * x.shape[2:].numel() * x.element_size()
    return -(-size // ALIGNMENT) * ALIGNMENT


class ReceiveBuffer:
    """A `ReceiveBuffer` is memory of this rank into which other ranks write.

    `user` names the buffer's user in errors and in the log. `before_release` is called before the memory is released.
    """

    def __init__(self, transport: "NvlinkTransport", user: str, before_release: Callable[[], None] = lambda: None) -> None:
        self.transport, self.user, self.before_release = transport, user, before_release
        self.memory: Tensor | None = None
        self.addresses: list[int] = []  # addresses of all ranks' buffers
        self._kept: set[Tensor] = set()  # memory that CUDA graphs use

    def reserve(self, count: int) -> None:
        """Make the buffer at least `count` bytes long. All ranks must make the same calls in the same order."""
        if self.memory is not None and self.memory.numel() >= count:
            return
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{self.user} has not run with these shapes yet, so its memory cannot be part of a CUDA graph: call it once "
                "before the capture"
            )
        self.transport.synchronise()
        self.before_release()
        self.memory = None
        count = max(1, -(-count >> 21)) << 21  # a whole number of pages of 2 MiB
        log.info("rank %d: %d MiB of receive buffer for %s over NVLink", self.transport.rank, count >> 20, self.user)
        self.memory, self.addresses = self.transport.share(torch.uint8, count)

    def keep_for_graph(self) -> None:
        """During the capture of a CUDA graph, keep the current memory forever, because replays of the graph use it."""
        if torch.cuda.is_current_stream_capturing():
            assert self.memory is not None
            self._kept.add(self.memory)


class Send(NamedTuple):
    message: Message
    wait_flags: list[int]
    targets: list[int]
    arrived: int


@dataclass
class RouteStep:
    # flags to set first: ready flags in step 0, credit flags in later steps
    flags: list[int] = field(default_factory=list)
    sends: list[Send] = field(default_factory=list)
    received: list[Tensors] = field(default_factory=list)  # views of the receive buffer
    arrived: list[int] = field(default_factory=list)  # flags of the incoming messages

    @property
    def sends_results(self) -> bool:
        return any(send.message.kind == "result" for send in self.sends)


Route = tuple[list[RouteStep], bool]  # the steps of one rank, and the value of `RingPass.keeps_results`


class Slots:
    """A `Slots` object gives each message of a schedule a byte offset in the receive buffer. All ranks use the same offsets."""

    def __init__(self, schedule: Schedule, templates: Templates) -> None:
        self.templates = templates
        self.arrivals: dict[tuple[int, str], list[tuple[int, Message]]] = {}  # (step, message) in order, by (rank, kind)
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
        """Return each tensor's offset in the slot, followed by the end of the last tensor."""
        sizes = (padded_bytes(x, len(message.rows)) for x in self.templates[message.kind])
        return list(accumulate(sizes, initial=0))


class NvlinkTransport(Transport):
    """An `NvlinkTransport` connects the GPUs of one host, for direct schedules. The constructor waits for all ranks."""

    waits_on_gpu = True

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, store: dist.Store, joined: Interconnect, watchdog: Watchdog
    ) -> None:
        self.group, self.device, self.interconnect, self.watchdog = group, device, joined, watchdog
        self.rank, self.size = group.rank(), group.size()
        self.messages = P2PTransport(group, device, store, joined, watchdog)
        self.streams = {kind: torch.cuda.Stream(device, priority=-1) for kind in KINDS}
        self._flag_stream = torch.cuda.Stream(device)
        self._allocate()

    def _allocate(self) -> None:
        self._routes: dict[tuple[Any, ...], Route] = {}
        self.graphs = PassGraphs(self)
        self.receive_buffer = ReceiveBuffer(self, "the ring", before_release=self._forget_addresses)
        self.all_to_all_buffer = ReceiveBuffer(self, "the all-to-all")
        # recorded when the tensors to send have been computed
        self.computed = torch.cuda.Event()
        # recorded at the start of call `_started_call`
        self.started, self._started_call = torch.cuda.Event(), -1
        # Keep filled tensors alive, because an unfinished all-to-all may still write into them after an exception.
        self.filled: list[Tensors] = []
        self._max_steps = self.size + 2  # the largest number of steps in a direct schedule
        # The table of flags has one column per rank that writes flags.
        self._ring_rows = len(PURPOSES) * len(KINDS) * self._max_steps
        self._flags, self._flag_addresses = self.share(torch.int32, (self._ring_rows + MAX_SENDS + 1) * self.size)
        self._flags[-self.size :] = 1
        self._initial_flags, self._all_set = self._flags.clone(), torch.ones_like(self._flags)
        self.synchronise()

    def _forget_addresses(self) -> None:
        self._routes.clear()
        self.graphs.clear()

    def begin_replay(self) -> None:
        self._started_call = self.recovery.call
        self.started.record(torch.cuda.current_stream(self.device))

    def start_event(self) -> torch.cuda.Event:
        if self._started_call == self.recovery.call:
            return self.computed
        self._started_call = self.recovery.call
        return self.started

    def mark(self) -> tuple[Any, ...]:
        events = []
        for stream in (torch.cuda.current_stream(self.device), *self.streams.values()):
            events.append(torch.cuda.Event())
            events[-1].record(stream)
        return tuple(events)

    def release(self, events: tuple[Any, ...], meet: Callable[[], None]) -> None:
        # This rank's streams may wait for flags that another rank never sets. If this rank sets all flags, its streams
        # continue, but send invalid messages. Invalid messages must not overwrite messages of earlier calls. Therefore, first
        # wait until every rank's main stream is idle or has begun the failed call.
        main, began_call = events[0], self._started_call == self.recovery.call
        while not (main.query() or (began_call and self.started.query())) and not self.watchdog.is_stopped():
            time.sleep(_POLL)
        meet()
        while not all(event.query() for event in events) and not self.watchdog.is_stopped():
            self._write_flags(self._all_set)
            time.sleep(_POLL)

    def reset(self, generation: int) -> None:
        self.messages.reset(generation)
        self.graphs.clear()
        self._write_flags(self._initial_flags)
        self.filled.clear()

    @torch.inference_mode()  # the flags may be inference tensors
    def _write_flags(self, values: Tensor) -> None:
        # Use copies, because loading a kernel could block while streams wait for flags.
        with torch.cuda.stream(self._flag_stream):
            self._flags.copy_(values)
        self._flag_stream.synchronize()

    def share(self, dtype: torch.dtype, count: int) -> tuple[Tensor, list[int]]:
        """Allocate a tensor of zeros on every rank. Return this rank's tensor, and the addresses of all ranks' tensors."""
        shared = symmetric.empty(count, dtype=dtype, device=self.device).zero_()
        handle = symmetric.rendezvous(shared, self.group.group_name)
        addresses = [handle.get_buffer(rank, (count,), dtype).data_ptr() for rank in range(self.size)]
        self.synchronise()
        return shared, addresses

    def synchronise(self) -> None:
        """Wait until the GPUs of all ranks are idle."""
        torch.cuda.synchronize(self.device)
        dist.barrier(self.group)
        torch.cuda.synchronize(self.device)

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def _flag(self, rank: int, purpose: int, kind: str, t: int, writer: int) -> int:
        row = (len(PURPOSES) * KINDS.index(kind) + purpose) * self._max_steps + t
        return self._flag_addresses[rank] + 4 * (row * self.size + writer)

    def all_to_all_flag(self, rank: int, number: int, writer: int) -> int:
        """`number` is the number of a send, or MAX_SENDS for the ready flag."""
        return self._flag_addresses[rank] + 4 * ((self._ring_rows + number) * self.size + writer)

    def begin(self, schedule: Schedule, templates: Templates) -> "_NvlinkPass":
        assert len(schedule.steps) <= self._max_steps, "a direct schedule has at most two steps more than there are ranks"
        shapes = tuple((x.shape[0], x.shape[2:], x.dtype) for kind in KINDS for x in templates[kind])
        if (schedule, shapes) not in self._routes:
            slots = Slots(schedule, templates)
            self.receive_buffer.reserve(slots.total_bytes)
            if len(self._routes) >= MAX_CACHED_ROUTES:
                self._routes.clear()
            self._routes[schedule, shapes] = self._plan_steps(schedule, slots), slots.keeps_results
        self.receive_buffer.keep_for_graph()
        return _NvlinkPass(self, *self._routes[schedule, shapes])

    def _plan_steps(self, schedule: Schedule, slots: Slots) -> list[RouteStep]:
        steps = [RouteStep() for _ in range(len(schedule.steps) + 2)]
        for t, step in enumerate(schedule.by_rank[self.rank]):
            steps[t].sends = [self._plan_send(t, message, slots) for message in step.outgoing]
            steps[t].received = [self._received(message, slots) for message in step.incoming]
            steps[t].arrived = [self._flag(self.rank, ARRIVED, message.kind, t, message.src) for message in step.incoming]
        for kind in KINDS:
            queue = slots.arrivals.get((self.rank, kind), [])
            for (t, _), (next_t, message) in zip(queue, queue[slots.counts[kind] :], strict=False):
                done = t + (2 if kind == "block" else 1)
                steps[done].flags.append(self._flag(message.src, CREDIT, kind, next_t, self.rank))
        sources = [message.src for _, message in slots.arrivals.get((self.rank, "block"), [])]
        steps[0].flags = [self._flag(src, READY, "block", 0, self.rank) for src in sources]
        return steps

    def _plan_send(self, t: int, message: Message, slots: Slots) -> Send:
        kind, dst = message.kind, message.dst
        queue = [other for _, other in slots.arrivals[dst, kind]]
        wait_flags = [self._flag(self.rank, READY, kind, 0, dst)] if kind == "block" else []
        if queue.index(message) >= slots.counts[kind]:
            wait_flags.append(self._flag(self.rank, CREDIT, kind, t, dst))
        address = self.receive_buffer.addresses[dst] + slots.offsets[message]
        targets = [address + start for start in slots.tensor_offsets(message)[:-1]]
        return Send(message, wait_flags, targets, self._flag(dst, ARRIVED, kind, t, self.rank))

    def _received(self, message: Message, slots: Slots) -> Tensors:
        block: list[Tensor] = []
        memory = self.receive_buffer.memory
        assert memory is not None
        for start, x in zip(slots.tensor_offsets(message), slots.templates[message.kind], strict=False):
            shape = x.shape[0], len(message.rows), *x.shape[2:]
            start += slots.offsets[message]
            end = start + torch.Size(shape).numel() * x.element_size()
            block.append(memory[start:end].view(x.dtype).view(shape))
        return tuple(block)


class _NvlinkPass:
    def __init__(self, transport: NvlinkTransport, steps: list[RouteStep], keeps_results: bool) -> None:
        self.transport, self.steps, self.keeps_results = transport, steps, keeps_results
        self.main = torch.cuda.current_stream(transport.device)
        begun = transport.start_event()
        begun.record(self.main)
        transport.streams["block"].wait_event(begun)
        self.sending: deque[tuple[torch.cuda.Event, Tensors]] = deque()

    def exchange(self, t: int, outgoing: list[Tensors]) -> WaitForBlocks:
        step = self.steps[t]
        cuda_driver.set_flags(step.flags, self.main.cuda_stream)
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
        if self.steps[t + 1].sends_results:
            self.transport.computed.record(self.main)
        cuda_driver.wait_and_clear_flags(self.steps[t].arrived, self.main.cuda_stream)
        return self.steps[t].received

    def end(self) -> None:
        for event, _ in self.sending:
            self.main.wait_event(event)
        self.sending.clear()
        self.main.wait_stream(self.transport.streams["block"])


def _copy_message(x: Tensor, target: int, rows: range, stream: int) -> None:
    assert x.is_contiguous(), "copy engines copy contiguous rows"
    if not x.numel():
        return  # for an empty batch, only the flag is sent
    if x.shape[1] == len(rows):
        return cuda_driver.copy(target, x.data_ptr(), x.nbytes, stream)
    entry_bytes = x.nbytes // x.shape[0]
    row_bytes = entry_bytes // x.shape[1]
    for i in range(x.shape[0]):
        source = x.data_ptr() + i * entry_bytes + rows.start * row_bytes
        cuda_driver.copy(target + i * len(rows) * row_bytes, source, len(rows) * row_bytes, stream)

"""Hops over NVLink: copy engines write straight into the memory of peers, and flags beside the data say what has arrived.

Every rank has one *inbox*, which all layers and calls share, in memory that its peers have mapped (torch symmetric memory). A
sender copies rows into a slot of the receiver's inbox and then raises the receiver's flag; the receiver's stream waits for the
flag and the kernels read the slot. No kernel communicates, nothing takes an SM, and the host waits for nothing.

What keeps a slot from being overwritten while it is read: the slots of a kind of message are used in turn, and before a sender
uses one again the reader has raised the sender's *credit*. At the beginning of a pass every rank tells those whose travellers
will come that its inbox is *open*: it reads no more of the last one. (A result goes where a traveller came from: there the pass
has begun.) Flags are 0 or 1, one for each message, and whoever waits for one puts it back: they say the same in a pass that is
issued and in one that a CUDA graph replays.

Nothing can wait in a circle: a rank issues its work step by step, and everything it waits for at a step was issued by its peers
at or before that step. That holds even if a device runs all its streams one after the other.
"""

from collections import deque
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

from ringattn.comm import cuda_driver
from ringattn.comm.inbox import Inbox, padded_bytes
from ringattn.comm.nvlink_all_to_all import PeerMailbox, PeerSwap
from ringattn.comm.transport import Arrive, Block, Like
from ringattn.comm.watchdog import Watchdog
from ringattn.planning.cost_model import Fabric
from ringattn.planning.schedule import Message, Schedule

KINDS = ("traveller", "result")
ARRIVED, CREDIT = range(2)  # flags, for each kind and step
HELD_BYTES = 1 << 30  # bytes of results that all have a slot of their own, so that they can be added up at the end, in one go
SMALL_SLOT = 128 << 20  # up to here a kind has three slots, so that messages may come two steps early; else two


@dataclass(frozen=True)
class Push:
    """One message out: where its tensors go, and the addresses of the flags that go with it."""

    message: Message
    gates: list[int]  # to wait for: the inbox is open, for the first traveller to a rank; the slot is free, if it was in use
    targets: tuple[int, ...]
    arrived: int


@dataclass(frozen=True)
class Landing:
    """One message in: its tensors in the inbox, and the flag that says that they are there."""

    block: Block
    arrived: int


@dataclass
class RouteStep:
    """One step of a pass on this rank."""

    credits: list[int] = field(default_factory=list)  # flags to raise when the visits before it are done
    pushes: list[Push] = field(default_factory=list)
    landings: list[Landing] = field(default_factory=list)
    results_follow: bool = False  # whether the next step sends results of this one's visits


@dataclass
class Route:
    """One rank's way through a pass."""

    steps: list[RouteStep]
    opens: list[int]  # flags to raise at the beginning
    holds_results: bool


class Slots:
    """Where in every rank's inbox each message of a schedule lands, counted in bytes; the same on all ranks."""

    def __init__(self, schedule: Schedule, like: Like) -> None:
        self.like = like
        self.arrivals: dict[tuple[int, str], list[tuple[int, Message]]] = {}  # (rank, kind): (step, message), in order
        self.places: dict[Message, int] = {}
        self.counts: dict[str, int] = {}
        self.holds_results = False
        for t, step in enumerate(schedule.steps):
            for message in step.messages:
                self.arrivals.setdefault((message.dst, message.kind), []).append((t, message))
        self.total = 0
        for kind in KINDS:
            queues = [queue for (_, of_kind), queue in self.arrivals.items() if of_kind == kind]
            size = max((self.extents(message)[-1] for queue in queues for _, message in queue), default=0)
            most = max(map(len, queues), default=0)
            if kind == "result" and most * size <= HELD_BYTES:
                self.counts[kind], self.holds_results = most, True
            else:
                self.counts[kind] = min(most, 3 if size <= SMALL_SLOT else 2)
            for queue in queues:
                for i, (_, message) in enumerate(queue):
                    self.places[message] = self.total + i % self.counts[kind] * size
            self.total += self.counts[kind] * size

    def extents(self, message: Message) -> list[int]:
        """Where the tensors of a message start in its slot, and where the last one ends."""
        ends = [0]
        for x in self.like[message.kind]:
            ends.append(ends[-1] + padded_bytes(x, len(message.rows)))
        return ends


class PeerCopies:
    """A ring of GPUs of one host that can all write into each other's memory. Runs direct schedules."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, fabric: Fabric, watchdog: Watchdog) -> None:
        self.group, self.device, self.fabric, self.watchdog = group, device, fabric, watchdog
        self.rank, self.size = group.rank(), group.size()
        self.streams = {kind: torch.cuda.Stream(device, priority=-1) for kind in KINDS}
        self._ready, self._sent = torch.cuda.Event(), torch.cuda.Event()
        self._prepare()

    def _prepare(self) -> None:
        """What passes and swaps share. Waits for all ranks."""
        self._routes: dict[tuple, Route] = {}
        self._inbox = Inbox(self, "the hops", "the ring has not been run", let_go=self._routes.clear)
        self._mailbox: PeerMailbox | None = None
        self._flags, self._flag_addresses = self.share(torch.int32, (1 + 4 * self._most_steps) * self.size)

    @property
    def _most_steps(self) -> int:
        """Of a direct schedule."""
        return self.size + 2

    def share(self, dtype: torch.dtype, count: int) -> tuple[Tensor, list[int]]:
        """Zeros that all ranks have mapped, and their address of each rank. Waits for all ranks."""
        shared = symmetric.empty(count, dtype=dtype, device=self.device).zero_()
        handle = symmetric.rendezvous(shared, self.group.group_name)
        addresses = [handle.get_buffer(rank, (count,), dtype).data_ptr() for rank in range(self.size)]
        self.synchronise()
        return shared, addresses

    def synchronise(self) -> None:
        """Wait for all that the GPUs of all ranks have been given to do."""
        torch.cuda.synchronize(self.device)
        dist.barrier(self.group)
        torch.cuda.synchronize(self.device)

    @property
    def inbox_bytes(self) -> int:
        """Memory of the inboxes, which torch's allocator does not count."""
        return self._inbox.nbytes + (self._mailbox.inbox.nbytes if self._mailbox else 0)

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def _open(self, rank: int, writer: int) -> int:
        """Address of the flag of `rank` that says whether the inbox of `writer` is open."""
        return self._flag_addresses[rank] + 4 * writer

    def _flag(self, rank: int, purpose: int, kind: str, t: int, writer: int) -> int:
        """Address of the flag of `rank` for the message of a kind that `writer` sends, or reads, at step `t`."""
        row = 1 + (2 * KINDS.index(kind) + purpose) * self._most_steps + t
        return self._flag_addresses[rank] + 4 * (row * self.size + writer)

    def begin(self, schedule: Schedule, like: Like) -> "_Pass":
        """Start a pass of a direct schedule, see `Transport`."""
        capturing = torch.cuda.is_current_stream_capturing()
        assert len(schedule.steps) <= self._most_steps, "a direct schedule has a step for each rank, and two"
        shapes = tuple((x.shape[0], x.shape[2:], x.dtype) for kind in KINDS for x in like[kind])
        route = self._routes.get((schedule, shapes))
        if route is None:
            slots = Slots(schedule, like)
            self._inbox.reserve(slots.total, capturing)
            if len(self._routes) >= 64:  # packed documents bring new schedules all the time
                self._routes.clear()
            route = self._routes[schedule, shapes] = self._plan(schedule, slots)
        if capturing:
            self._inbox.keep()
        return _Pass(self, route)

    def swap(self) -> PeerSwap:
        """An exchange of heads, see `ringattn.comm.all_to_all.Swap`. The first one waits for all ranks."""
        if self._mailbox is None:
            self._mailbox = PeerMailbox(self)
        return PeerSwap(self._mailbox)

    def _plan(self, schedule: Schedule, slots: Slots) -> Route:
        steps = [RouteStep() for _ in range(len(schedule.steps) + 2)]
        told: set[int] = set()
        for t, step in enumerate(schedule.by_rank[self.rank]):
            for message in step.outgoing:
                first = message.kind == "traveller" and message.dst not in told
                if first:
                    told.add(message.dst)
                steps[t].pushes.append(self._push(t, message, slots, first))
            steps[t].landings = [self._landing(t, message, slots) for message in step.incoming]
            steps[t - 1].results_follow = any(message.kind == "result" for message in step.outgoing)
        for kind in KINDS:
            queue = slots.arrivals.get((self.rank, kind), [])
            for (t, _), (next_t, message) in zip(queue, queue[slots.counts[kind] :], strict=False):
                # a traveller is computed with in the step after it came, a result merged at the end of its own
                done = t + (2 if kind == "traveller" else 1)
                steps[done].credits.append(self._flag(message.src, CREDIT, kind, next_t, self.rank))
        sources = sorted({message.src for _, message in slots.arrivals.get((self.rank, "traveller"), [])})
        return Route(steps, [self._open(src, self.rank) for src in sources], slots.holds_results)

    def _push(self, t: int, message: Message, slots: Slots, first: bool) -> Push:
        kind, dst = message.kind, message.dst
        queue = [other for _, other in slots.arrivals[dst, kind]]
        gates = [self._open(self.rank, dst)] if first else []
        if queue.index(message) >= slots.counts[kind]:
            gates.append(self._flag(self.rank, CREDIT, kind, t, dst))
        place = self._inbox.addresses[dst] + slots.places[message]
        targets = tuple(place + start for start in slots.extents(message)[:-1])
        return Push(message, gates, targets, self._flag(dst, ARRIVED, kind, t, self.rank))

    def _landing(self, t: int, message: Message, slots: Slots) -> Landing:
        block = []
        for start, x in zip(slots.extents(message), slots.like[message.kind], strict=False):
            shape = x.shape[0], len(message.rows), *x.shape[2:]
            start += slots.places[message]
            end = start + torch.Size(shape).numel() * x.element_size()
            block.append(self._inbox.memory[start:end].view(x.dtype).view(shape))
        return Landing(tuple(block), self._flag(self.rank, ARRIVED, message.kind, t, message.src))


class _Pass:
    """One ring pass under way."""

    def __init__(self, line: PeerCopies, route: Route) -> None:
        self.line, self.route = line, route
        self.holds_results = route.holds_results
        self.main = torch.cuda.current_stream(line.device)
        self.handle = self.main.cuda_stream
        self.ready = line._ready  # after it, what is sent next is computed
        self.ready.record(self.main)
        line.streams["traveller"].wait_event(self.ready)
        if route.opens:
            cuda_driver.raise_flags(route.opens, self.handle)
        # results being sent, each with the event after which its memory may be used again
        self.sending: deque[tuple[torch.cuda.Event, Block]] = deque()

    def exchange(self, t: int, departing: list[Block]) -> Arrive:
        step = self.route.steps[t]
        if step.credits:
            cuda_driver.raise_flags(step.credits, self.handle)
        while len(self.sending) > 1:
            self.main.wait_event(self.sending[0][0])
            self.sending.popleft()
        for push, block in zip(step.pushes, departing, strict=True):
            self._send(push, block)
        return partial(self._arrive, t)

    def _send(self, push: Push, block: Block) -> None:
        is_result = push.message.kind == "result"
        stream = self.line.streams[push.message.kind]
        handle = stream.cuda_stream
        if is_result:
            stream.wait_event(self.ready)
        if push.gates:
            cuda_driver.take_flags(push.gates, handle)
        rows = push.message.rows
        for x, target in zip(block, push.targets, strict=True):
            assert x.is_contiguous(), "copy engines take whole rows"
            if x.shape[1] == len(rows):
                cuda_driver.copy(target, x.data_ptr(), x.nbytes, handle)
            else:  # some rows of every batch row
                pitch = x.nbytes // x.shape[0]
                row = pitch // x.shape[1]
                for i in range(x.shape[0]):
                    source = x.data_ptr() + i * pitch + rows.start * row
                    cuda_driver.copy(target + i * len(rows) * row, source, len(rows) * row, handle)
        cuda_driver.raise_flags([push.arrived], handle)
        if is_result:
            sent = torch.cuda.Event()
            sent.record(stream)
            self.sending.append((sent, block))

    def _arrive(self, t: int) -> list[Block]:
        step = self.route.steps[t]
        if step.results_follow:
            self.ready.record(self.main)
        if step.landings:
            cuda_driver.take_flags([landing.arrived for landing in step.landings], self.handle)
        return [landing.block for landing in step.landings]

    def end(self) -> None:
        line = self.line
        for event, _ in self.sending:
            self.main.wait_event(event)
        self.sending.clear()
        line._sent.record(line.streams["traveller"])
        self.main.wait_event(line._sent)

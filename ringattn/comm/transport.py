"""How a hop moves: point-to-point over torch.distributed (NCCL on GPUs, gloo on CPUs), and which transport a ring has.

A transport is one rank's end of a ring: it carries out the messages of a schedule, step by step. Most do it with exchanges of
tensors between ranks; `ringattn.comm.nvlink`, over NVLink, has ways of its own, and the ranks of `ringattn.comm.simulated` are threads of
one process. `resolve` picks one.
"""

import json
import logging
import os
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_process_group_store, _resolve_process_group

from ringattn.comm.watchdog import Hop, RingFault, Unwatched, Watchdog, timeout_seconds
from ringattn.planning.cost_model import Fabric, attention_flops, fabric
from ringattn.planning.schedule import Message, RankStep, Schedule

T = TypeVar("T")
Block = tuple[Tensor, ...]  # tensors of one rank's rows, which stand in dimension 1
Like = dict[str, Block]  # by kind of message: a block of that kind, for its shapes and dtypes
Arrive = Callable[[], list[Block]]  # wait for what was exchanged; the blocks received
Addressed = list[tuple[Tensor, int]]  # a contiguous tensor and the rank of the ring it goes to or comes from

TRANSPORTS = ("auto", "nvlink", "p2p")
HELD_RESULTS = 3  # results that have come home, each in memory of its own
CHOICE = "RINGATTN_TRANSPORT"  # environment: what "auto" means
log = logging.getLogger(__name__)


def cut(block: Block, rows: range) -> Block:
    """Rows of a whole block, without a copy; a block that has been cut to as many rows is taken as it is."""
    return tuple(x if len(rows) == x.shape[1] else x[:, rows.start : rows.stop] for x in block)


class Pending(Protocol):
    """Messages under way."""

    def wait(self) -> None:
        """Return when every tensor received holds its data, and every tensor sent may be changed."""


class Pass(Protocol):
    """One ring pass on one rank."""

    holds_results: bool  # whether results that have come home stay as they are until `end`, however many follow

    def exchange(self, t: int, departing: list[Block]) -> Arrive:
        """Start step t: send the blocks of its outgoing messages, receive those of its incoming ones, in their order.

        A block to be sent has the rows of its message, or all of its owner's; it is contiguous. What `Arrive` returns may be
        used until the exchange after next is started; what is sent may not be changed until then.
        """

    def end(self) -> None:
        """Return, or let the stream go on, when all that was sent may be changed."""


class Transport(Protocol):
    """One rank's end of a ring."""

    rank: int
    size: int
    fabric: Fabric
    watchdog: Watchdog | Unwatched

    def begin(self, schedule: Schedule, like: Like) -> Pass:
        """Start a pass of `schedule`, on every rank of the ring."""


def watched(talk: Callable[[], T], line: Transport, hop: Hop | None) -> T:
    """What a part of a hop returns; an error of the network is told as what is known of the ranks."""
    try:
        return talk()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        fault = line.watchdog.fault(hop, error)
        if fault is error:
            raise
        raise fault from error


def completed(arrive: Callable[[], T], line: Transport, hop: Hop | None) -> T:
    """What a watched hop brings."""
    result = watched(arrive, line, hop)
    line.watchdog.passed(hop)
    return result


class Messenger:
    """A transport that exchanges single tensors."""

    rank: int
    size: int
    watchdog: Watchdog | Unwatched = Unwatched()

    def exchange(self, sends: Addressed, receives: Addressed) -> Pending:
        """Start all of them at once. Two ranks match their messages in the order in which both list them."""
        raise NotImplementedError

    def begin(self, schedule: Schedule, like: Like) -> Pass:
        """See `Transport`."""
        return _Exchanges(self, schedule.by_rank[self.rank], like)


class _Exchanges:
    """A pass in which every step is one exchange."""

    def __init__(self, line: Messenger, steps: tuple[RankStep, ...], like: Like) -> None:
        self.line, self.steps, self.like = line, steps, like
        incoming = [message for step in steps for message in step.incoming]
        self.holds_results = (
            sum(message.kind == "result" and message.owner == line.rank for message in incoming) <= HELD_RESULTS
        )

    def exchange(self, t: int, departing: list[Block]) -> Arrive:
        step = self.steps[t]
        received = [self._landing(message) for message in step.incoming]
        pending = self.line.exchange(
            [(x.contiguous(), m.dst) for m, block in zip(step.outgoing, departing, strict=True) for x in cut(block, m.rows)],
            [(x, m.src) for m, block in zip(step.incoming, received, strict=True) for x in block],
        )

        def arrive() -> list[Block]:
            pending.wait()
            return received

        return arrive

    def _landing(self, message: Message) -> Block:
        return tuple(x.new_empty(x.shape[0], len(message.rows), *x.shape[2:]) for x in self.like[message.kind])

    def end(self) -> None: ...


class _Works:
    def __init__(self, works: list[dist.Work]) -> None:
        self.works = works

    def wait(self) -> None:
        for work in self.works:
            work.wait()


class Alone(Messenger):
    """A ring of one rank."""

    rank, size = 0, 1
    fabric = fabric("alone")

    def exchange(self, sends: Addressed, receives: Addressed) -> Pending:
        assert not sends and not receives, "a ring of one rank has nobody to exchange with"
        return _Works([])


class PointToPoint(Messenger):
    """isend and irecv of a torch.distributed process group, in one batch a step: NCCL launches it as one kernel."""

    def __init__(self, group: dist.ProcessGroup, joined: Fabric | None = None, watchdog: Watchdog | None = None) -> None:
        self.group, self.fabric, self.watchdog = group, joined, watchdog or self.watchdog
        self.rank, self.size = group.rank(), group.size()

    def exchange(self, sends: Addressed, receives: Addressed) -> Pending:
        operations = [
            dist.P2POp(start, tensor, dist.get_global_rank(self.group, peer), self.group)
            for start, messages in ((dist.isend, sends), (dist.irecv, receives))
            for tensor, peer in messages
        ]
        return _Works(dist.batch_isend_irecv(operations) if operations else [])


simulated: dict[str, Transport] = {}  # the ends of `ringattn.comm.simulated`, by the names of their groups


def resolve(
    group_name: str,
    device: torch.device | None = None,
    transport: str = "auto",
    call: Callable[[], dict[str, object]] | None = None,
) -> Transport:
    """The transport of a process group, by its name; "" is a ring of one.

    The first call for a group and device asks all its ranks, and must be made by all of them. Without a device it asks nobody,
    and the transport is the plain `Messenger` of the group.

    Args:
        transport: "nvlink": copy engines write into the memory of peers; "p2p": sends and receives of the process group;
            "auto": NVLink where all ranks are GPUs of one host that can reach each other's memory, or what the environment
            variable RINGATTN_TRANSPORT says.
        call: what this call is, by name, which must be the same on all ranks. Asked for and compared at the first call alone.

    Raises:
        ValueError: a transport that is unknown, or that the group or its hardware does not have; first calls that differ.
        RingFault: a rank that makes no first call.
    """
    if transport not in TRANSPORTS:
        raise ValueError(f"unknown transport {transport!r}: choose one of {', '.join(TRANSPORTS)}")
    if not group_name:
        return Alone()
    if group_name in simulated:
        if transport != "auto":
            raise ValueError(f"transport = {transport!r}: a simulated ring has a transport of its own; use 'auto'")
        return simulated[group_name]
    group = _resolve_process_group(group_name)
    if device is None:
        return PointToPoint(group)
    key = group_name, device, transport
    with _resolving:  # one lock a key: who waits for the ranks of one group holds up no other
        lock = _locks.setdefault(key, threading.Lock())
    with lock:
        if key not in _resolved or _resolved[key][0] is not group:
            if key in _resolved:  # of a group that has been destroyed
                _resolved[key][1].watchdog.stop()
            _resolved[key] = group, _choose(group, device, transport, call() if call else {})
        return _resolved[key][1]


def compare_first(group_name: str, what: str, call: Callable[[], dict[str, object]]) -> None:
    """Refuse first calls of this kind that differ among the ranks of a process group, all of which must make one.

    Raises:
        ValueError: calls that differ.
        RingFault: a rank that makes none.
    """
    if not group_name or group_name in simulated:
        return
    group = _resolve_process_group(group_name)
    if _compared.get((group_name, what)) is not group:
        _compare(_own_store(group, what), group, call())
        _compared[group_name, what] = group


_compared: dict[tuple[str, str], dist.ProcessGroup] = {}
_resolving = threading.Lock()
_locks: dict[tuple, threading.Lock] = {}
_resolved: dict[tuple, tuple[dist.ProcessGroup, Transport]] = {}


def _choose(group: dist.ProcessGroup, device: torch.device, transport: str, call: dict[str, object]) -> Transport:
    if group.size() == 1:
        return Alone()
    wanted = os.environ.get(CHOICE, "auto") if transport == "auto" else transport
    if wanted not in TRANSPORTS:
        raise ValueError(f"{CHOICE}={wanted}: choose one of {', '.join(TRANSPORTS)}")
    store = _own_store(group, f"{device.type}/{transport}")
    ranks = _introduce(store, group, device)
    _compare(store, group, call)
    one_host = len({host for host, _, _ in ranks}) == 1
    obstacle = _agree(store, group, _obstacle(ranks, device))
    if wanted == "nvlink" and obstacle:
        raise ValueError(f"transport 'nvlink' is not to be had: {obstacle}; use 'p2p', or 'auto'")
    flops = min(float(speed) for _, _, speed in ranks)
    name = "nvlink" if wanted != "p2p" and not obstacle else "nccl" if device.type == "cuda" else "gloo"
    why = "asked for" if wanted != "auto" else obstacle or "all GPUs stand in one host and reach each other's memory"
    joined = fabric(name, one_host, flops)
    way = "direct" if joined.all_pairs else "relayed"
    log.info("ring of %d ranks over %s (%s), hops %s", group.size(), name, why, way)
    watchdog = Watchdog(store, group.rank(), group.size(), device)
    if name == "nvlink":
        from ringattn.comm.nvlink import PeerCopies

        return PeerCopies(group, device, joined, watchdog)
    line = PointToPoint(group, joined, watchdog)
    if device.type == "cuda":
        _warm(line, device)
    return line


def _own_store(group: dist.ProcessGroup, what: str) -> dist.Store:
    """The group's store, of keys of our own."""
    store = _get_process_group_store(group)
    store = store.clone() if hasattr(store, "clone") else store  # its own connection: the watchdog never holds up others
    return dist.PrefixStore(f"ringattn/{what}", store)


def _warm(line: PointToPoint, device: torch.device) -> None:
    """Let NCCL make the connections that a ring will use: it takes seconds, and would count as the first hop's."""
    for distance in range(1, line.size) if line.fabric.all_pairs else (1, line.size - 1):
        sent, received = torch.zeros(1, device=device), torch.empty(1, device=device)
        after, before = ((line.rank + sign * distance) % line.size for sign in (1, -1))
        line.exchange([(sent, after)], [(received, before)]).wait()
    torch.cuda.synchronize(device)


def _introduce(store: dist.Store, group: dist.ProcessGroup, device: torch.device) -> list[tuple[str, str, str]]:
    """(host, GPU, attention flops) of every rank."""
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "none"
    texts = _tell_all(store, group, "rank", "|".join((_host(), gpu, str(attention_flops(device)))))
    return [tuple(text.split("|")) for text in texts]


def _compare(store: dist.Store, group: dist.ProcessGroup, call: dict[str, object]) -> None:
    """Tell all ranks this one's call, and refuse calls that differ; of {} nothing is known."""
    calls = [json.loads(text) for text in _tell_all(store, group, "call", json.dumps(call))]
    known = [(rank, call) for rank, call in enumerate(calls) if call]
    for rank, call in known[1:]:
        for name, value in call.items():
            if value != (expected := known[0][1][name]):
                raise ValueError(
                    f"rank {known[0][0]} of the group calls attention with {name} = {_shortened(expected)} and rank {rank} "
                    f"with {_shortened(value)}: all ranks must make the same call"
                )


def _shortened(value: object) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _tell_all(store: dist.Store, group: dist.ProcessGroup, what: str, text: str) -> list[str]:
    """The texts of all ranks.

    Raises:
        RingFault: a rank says nothing.
    """
    keys, patience = [f"{what}/{rank}" for rank in range(group.size())], timeout_seconds()
    store.set(keys[group.rank()], text)
    try:
        store.wait(keys, timedelta(seconds=patience))
    except RuntimeError as error:  # each kind of store has its own
        missing = ", ".join(str(rank) for rank, key in enumerate(keys) if not store.check([key]))
        if not missing:
            raise
        raise RingFault(
            f"ringattn: rank {missing} made no call in the {patience:.0f} s since the first one of rank {group.rank()}: all "
            "ranks of a ring make the same calls"
        ) from error
    return [store.get(key).decode() for key in keys]


def _agree(store: dist.Store, group: dist.ProcessGroup, obstacle: str) -> str:
    """The first obstacle that any rank sees: all must choose alike."""
    return next((text for text in _tell_all(store, group, "obstacle", obstacle or " ") if text.strip()), "")


def _host() -> str:
    """A name that two machines do not share: containers of one image may have one host name."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{socket.gethostname()}-{file.read().strip()}"
    except OSError:
        return socket.gethostname()


def _obstacle(ranks: list[tuple[str, str, str]], device: torch.device) -> str:
    """Why the ranks cannot write into each other's memory, as far as this one sees; "" if they can."""
    hosts, gpus = {host for host, _, _ in ranks}, [gpu for _, gpu, _ in ranks]
    if device.type != "cuda":
        return f"the tensors are on {device.type}"
    if torch.version.cuda is None:
        return "this torch is not built for CUDA"
    if len(hosts) > 1:
        return f"the ranks stand on {len(hosts)} hosts"
    if len(set(gpus)) < len(gpus):
        return "two ranks share a GPU"
    here = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    if not set(gpus) <= set(here):
        return "not every rank sees the GPUs of all others"
    if not all(a == b or torch.cuda.can_device_access_peer(here[a], here[b]) for a in gpus for b in gpus):
        return "not every pair of GPUs has access to each other's memory"
    return ""

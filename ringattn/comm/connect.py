"""Choose the transport for a process group, and compare the first calls of its ranks.

The first call for a group is a handshake. Every rank writes its host, GPU and settings to the job's key-value store. All ranks
read the same information and choose the same transport. If the calls differ, every rank raises an error, instead of hanging or
returning wrong results.
"""

import hashlib
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store, _resolve_process_group, _world

from ringattn.comm.all_to_all import AllToAll, PointToPointAllToAll
from ringattn.comm.calls import Call, shorten
from ringattn.comm.p2p import P2PTransport, SingleRankTransport, backend_name
from ringattn.comm.recovery import Recovery
from ringattn.comm.shared_gpus import SHARE_GPUS, allow_shared_memory, sharing_is_allowed
from ringattn.comm.simulated import SIMULATED_RANKS, SimulatedRank
from ringattn.comm.transport import MessageTransport, Transport
from ringattn.comm.watchdog import RingFault, TransportError, Watchdog, timeout_seconds
from ringattn.planning.cost_model import attention_flops, interconnect

Group = dist.ProcessGroup | SimulatedRank

TRANSPORTS = ("auto", "nvlink", "p2p")
TRANSPORT_VARIABLE = "RINGATTN_TRANSPORT"  # name of the environment variable that replaces transport="auto"
# name of the environment variable that overrides this host's name, so that tests can simulate several hosts on one
HOST_VARIABLE = "RINGATTN_HOST"
_POLL = 0.005  # seconds between two reads of the store
log = logging.getLogger(__name__)


def rank_and_size(group: Group | None) -> tuple[int, int]:
    """Return the index of this rank in `group` and the number of ranks, or (0, 1) for None."""
    if group is None:
        return 0, 1
    if isinstance(group, SimulatedRank):
        return group.rank, group.size
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"group is a {type(group).__name__}: it must be a torch.distributed.ProcessGroup that contains this rank (for a "
            "DeviceMesh use mesh.get_group(dim)), or None for this process alone"
        )
    return group.rank(), group.size()


def connect(
    group_name: str,
    device: torch.device,
    transport: str = "auto",
    call: Callable[[], Call] | None = None,
    relays: bool = False,
) -> Transport:
    """Return the transport of a process group. The name "" means a ring of one rank.

    The first call for a group, device and transport performs a handshake of all ranks.

    Args:
        group_name: `ProcessGroup.group_name`; a string, because torch.compile cannot trace groups.
        device: the device of the tensors.
        transport: "nvlink" (copy engines write into the memory of the other GPUs), "p2p" (messages of the process group) or
            "auto". The environment variable RINGATTN_TRANSPORT replaces "auto". Without RINGATTN_TRANSPORT, "auto" means
            "nvlink" if all GPUs are in one host and can access each other. In all other cases, "auto" means "p2p".
        call: returns the settings of this call. The handshake compares the settings of all ranks.
        relays: whether ranks relay received blocks to their neighbours. If True, "auto" means "p2p".

    Raises:
        ValueError: the group has been destroyed, the transport is unavailable, two ranks share a GPU, or the settings differ.
        RingFault: a rank of the group did not make its first call within the timeout.
    """
    if not group_name:
        return SingleRankTransport()
    if group_name in SIMULATED_RANKS:
        if transport != "auto":
            raise ValueError(f"transport={transport!r}: a simulated ring has a transport of its own and requires 'auto'")
        return SIMULATED_RANKS[group_name]
    try:
        group = _resolve_process_group(group_name)  # pyrefly: ignore[bad-argument-type]  # a private NewType of str
    except (RuntimeError, LookupError):
        raise ValueError(f"the process group {group_name!r} has been destroyed: create a new group") from None
    if relays and transport == "auto":
        transport = "p2p"
    key = group_name, device, transport
    with _locks.setdefault(key, threading.Lock()):
        if key not in _connections or _connections[key][0] is not group:
            if key in _connections:  # a destroyed group had the same name
                _connections[key][1].close()
            # If another rank uses a different connection, the logs differ, so the watchdog ends the run.
            for known, other in list(_connections.values()):
                if known is group:
                    name = f"the first call with transport={transport!r} on {device.type}"
                    other.watchdog.record_call((name,), partial(dict[str, object], {"the call": name}))
            _connections[key] = group, _handshake(group, device, transport, call() if call else {})
        return _connections[key][1]


_locks: dict[tuple[Any, ...], threading.Lock] = {}
_connections: dict[tuple[Any, ...], tuple[dist.ProcessGroup, Transport]] = {}


def free_messages() -> None:
    """Free the message buffers that transports keep for later passes."""
    for _, transport in _connections.values():
        if isinstance(transport, MessageTransport):
            transport.free_messages()


def open_all_to_all(transport: Transport) -> AllToAll:
    if isinstance(transport, MessageTransport):
        return PointToPointAllToAll(transport)
    from ringattn.comm.nvlink import NvlinkTransport  # requires a torch build with symmetric memory
    from ringattn.comm.nvlink_all_to_all import NvlinkAllToAll

    assert isinstance(transport, NvlinkTransport)
    return NvlinkAllToAll(transport)


class _Identity(NamedTuple):
    host: str
    gpu: str  # the UUID of the rank's GPU, or "none"
    flops: float  # speed of attention, FLOP/s
    device: str
    transport: str  # as requested


def _handshake(group: dist.ProcessGroup, device: torch.device, transport: str, call: Call) -> Transport:
    if group.size() == 1:
        return SingleRankTransport()
    wanted = os.environ.get(TRANSPORT_VARIABLE, "auto") if transport == "auto" else transport
    if wanted not in TRANSPORTS:
        raise TransportError(f"{TRANSPORT_VARIABLE}={wanted}: it must be one of {', '.join(TRANSPORTS)}")
    store = _group_store(group)
    store = dist.PrefixStore(_name_handshake(store, group), store)
    ranks = [_Identity(*fields) for fields in _all_gather(store, group, "rank", _identity(device, wanted))]
    _compare_calls(store, group, call)
    choices = [f"transport={rank.transport!r} on {rank.device}" for rank in ranks]
    for rank, choice in enumerate(choices):
        if choice != choices[0]:
            raise TransportError(
                f"rank 0 of the group calls attention with {choices[0]} and rank {rank} with {choice}: all ranks must use the "
                "same transport, on the same type of device"
            )
    shares_gpus = _check_shared_gpus(ranks, group)
    reasons = _all_gather(store, group, "obstacle", _why_not_nvlink(ranks, device))
    reason = next(filter(None, reasons), "")
    if wanted == "nvlink" and reason:
        raise TransportError(f"transport='nvlink' is unavailable: {reason}; use transport='p2p' or 'auto'")
    backend = "nccl" if device.type == "cuda" and backend_name(group, "cuda") != "gloo" else "gloo"
    name = "nvlink" if wanted != "p2p" and not reason else backend
    why = "requested" if wanted != "auto" else reason or "all GPUs are in one host and can access each other's memory"
    one_host = len({rank.host for rank in ranks}) == 1
    # All ranks must assume the same speed, so that they choose the same schedule.
    joined = interconnect(name, one_host, min(rank.flops for rank in ranks))
    log.info("group of %d ranks over %s (%s)", group.size(), name, why)
    watchdog = Watchdog(store, group.rank(), group.size(), device, lambda: group in _world.pg_map)
    if name == "nvlink":
        from ringattn.comm.nvlink import NvlinkTransport  # requires a torch build with symmetric memory

        if shares_gpus:
            allow_shared_memory()
        connection = NvlinkTransport(group, device, store, joined, watchdog)
    else:
        connection = P2PTransport(group, device, store, joined, watchdog)
        if name == "nccl":
            connection.open_communicator()
        if device.type == "cuda":
            connection.warm_up(device)
    connection.recovery = Recovery(store, connection)
    return connection


def _group_store(group: dist.ProcessGroup) -> dist.Store:
    store = _get_process_group_store(group)
    # If the store's server has died, `check` raises an error at once. `clone` would try to connect for up to 30 minutes.
    store.check(["handshake"])
    # A clone of the store has its own connection, so the watchdog's waits do not delay other users.
    return dist.PrefixStore("ringattn/handshake", store.clone() if hasattr(store, "clone") else store)


def _name_handshake(store: dist.Store, group: dist.ProcessGroup) -> str:
    """Return a unique name for the keys of this handshake, the same on all ranks. The store may contain keys of earlier
    handshakes.
    """
    numbers, lists = ([f"{name}/{rank}" for rank in range(group.size())] for name in ("number", "numbers"))
    own, end = uuid.uuid4().hex, time.monotonic() + timeout_seconds()
    store.set(numbers[group.rank()], own)
    while True:
        seen = [store.get(key).decode() if store.check([key]) else "" for key in numbers]
        store.set(lists[group.rank()], text := json.dumps(seen))
        others = [store.get(key).decode() if store.check([key]) else "" for key in lists]
        if set(others) == {text}:
            return hashlib.sha256(text.encode()).hexdigest()
        if time.monotonic() > end:
            raise _no_call([rank for rank, other in enumerate(others) if own not in other], group)
        time.sleep(_POLL)


def _no_call(missing: list[int], group: dist.ProcessGroup) -> RingFault:
    return RingFault(
        f"ringattn: rank {', '.join(map(str, missing))} made no call within {timeout_seconds():.0f} s after the first call of "
        f"rank {group.rank()}: all ranks of a ring must make the same calls"
    )


def _identity(device: torch.device, transport: str) -> _Identity:
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    name = f"{socket.gethostname()}-{boot_id.read_text().strip()}" if boot_id.exists() else socket.gethostname()
    host = os.environ.get(HOST_VARIABLE, name)
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "none"
    return _Identity(host, gpu, attention_flops(device), device.type, transport)


def _compare_calls(store: dist.Store, group: dist.ProcessGroup, call: Call) -> None:
    """Raise ValueError if the attention calls of the ranks differ. Ranks that run `explain` have no call to compare."""
    known = [(rank, call) for rank, call in enumerate(_all_gather(store, group, "call", call)) if call]
    for rank, call in known[1:]:
        for name, value in call.items():
            if value != (expected := known[0][1].get(name)):
                raise ValueError(
                    f"rank {known[0][0]} of the group calls attention with {name} = {shorten(expected)} and rank {rank} with "
                    f"{shorten(value)}: all ranks must make the same call"
                )


def _check_shared_gpus(ranks: list[_Identity], group: dist.ProcessGroup) -> bool:
    """Return whether two ranks share a GPU. With NCCL, shared GPUs raise ValueError."""
    users: dict[tuple[str, str], list[int]] = {}  # the ranks that use each GPU
    for number, rank in enumerate(ranks):
        if rank.gpu != "none":
            users.setdefault((rank.host, rank.gpu), []).append(number)
    shared = next((numbers for numbers in users.values() if len(numbers) > 1), None)
    if shared is None:
        return False
    if backend_name(group, "cuda") == "nccl":
        raise ValueError(
            f"ranks {shared[0]} and {shared[1]} use the same GPU, which NCCL rejects: give every rank its own GPU, or set "
            f"{SHARE_GPUS}=1 and create the process group with backend='cpu:gloo,cuda:gloo'"
        )
    if group.rank() == 0 and all(known is not group for known, _ in _connections.values()):
        gpus = "one GPU" if len(users) == 1 else f"{len(users)} GPUs"
        log.warning("%d ranks share %s: measured speeds are meaningless", len(ranks), gpus)
    return True


def _all_gather(store: dist.Store, group: dist.ProcessGroup, key: str, value: object) -> list[Any]:
    keys, timeout = [f"{key}/{rank}" for rank in range(group.size())], timeout_seconds()
    store.set(keys[group.rank()], json.dumps(value))
    try:
        store.wait(keys, timedelta(seconds=timeout))
    except RuntimeError as error:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        if not missing:
            raise
        raise _no_call(missing, group) from error
    return [json.loads(store.get(key)) for key in keys]


def _why_not_nvlink(ranks: list[_Identity], device: torch.device) -> str:
    """Return the reason why the transport "nvlink" is unavailable on this rank, or ""."""
    hosts, gpus = {rank.host for rank in ranks}, [rank.gpu for rank in ranks]
    if device.type != "cuda":
        return f"the tensors are on {device.type}"
    if torch.version.cuda is None:
        return "this torch is not built for CUDA"
    if len(hosts) > 1:
        return f"the ranks are on {len(hosts)} hosts"
    if len(set(gpus)) < len(gpus) and not sharing_is_allowed():
        return f"two ranks use the same GPU and {SHARE_GPUS} is not 1"
    # Indices of GPUs depend on CUDA_VISIBLE_DEVICES, so compare UUIDs.
    local = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    if not set(gpus) <= set(local):
        return "not every rank can see the GPUs of all others"
    if not all(a == b or torch.cuda.can_device_access_peer(local[a], local[b]) for a in gpus for b in gpus):
        return "not every pair of GPUs can access each other's memory"
    return ""

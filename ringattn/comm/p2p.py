"""Send messages with torch.distributed, over NCCL between GPUs and over gloo between CPUs.

With gloo, messages between GPUs pass through host memory. Messages through host memory are slow, and useful only for ranks that
share a GPU.
"""

import atexit
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions

from ringattn.comm.pass_graphs import PassGraphs
from ringattn.comm.transport import Addressed, MessageTransport, Wait
from ringattn.comm.watchdog import Watchdog, timeout_seconds
from ringattn.planning.cost_model import Interconnect, interconnect

_UNUSED_TAG = 1  # a tag that no message has
# The minimum timeout of gloo, in seconds. The watchdog enforces a shorter RINGATTN_TIMEOUT.
MIN_GLOO_TIMEOUT = 60
CLOSE_TIMEOUT = 10  # seconds that a process waits for its last messages when it ends
ALLOCATOR_VARIABLES = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"


def backend_name(group: dist.ProcessGroup, device_type: str) -> str:
    """Return the backend of `group` for devices of the given type, or ""."""
    # The text has the form "cpu:gloo,cuda:nccl".
    backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return backends.get(device_type, "")


class P2PTransport(MessageTransport):
    """A `P2PTransport` uses the sends and receives of a process group. NCCL runs all messages of a step in one kernel.

    After an exception, gloo cannot reuse a connection with unfinished messages. The transport therefore has its own gloo
    connections, which `reset` replaces.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        store: dist.Store,
        joined: Interconnect,
        watchdog: Watchdog,
    ) -> None:
        self.device, self.store, self.interconnect, self.watchdog = device, store, joined, watchdog
        self.group: Any = group  # or a ProcessGroupGloo, with the same methods
        self.rank, self.size = group.rank(), group.size()
        self._communicator: Any = None
        self._uses_gloo = backend_name(group, device.type) == "gloo"
        self.waits_on_gpu = device.type == "cuda" and not self._uses_gloo
        self.reset(0)

    def open_communicator(self) -> None:
        """Create an NCCL communicator that only this transport uses.

        If CUDA graphs used the communicator of the user's process group, destroying that group would hang.
        """
        # By default, an NCCL kernel needs four neighbouring free SMs, but attention fills all SMs.
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options.config.cga_cluster_size = 1
        options._timeout = self.group._get_backend(self.device).options._timeout
        store = dist.PrefixStore("nccl", self.store)
        self._communicator = dist.ProcessGroupNCCL(store, self.rank, self.size, options)
        self.group = dist.ProcessGroup(store, self.rank, self.size)
        self.group._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
        self.group._register_backend(self.device, dist.ProcessGroup.BackendType.NCCL, self._communicator)
        # With expandable segments, a rank that captures a graph cannot exchange messages with a rank that captures none.
        if "expandable_segments:True" not in "".join(os.environ.get(name, "") for name in ALLOCATOR_VARIABLES):
            self.graphs = PassGraphs(self)
        atexit.register(self.close)

    def close(self) -> None:
        super().close()
        if self.graphs is not None:
            self.graphs.clear()
        if self._communicator is None:
            return
        communicator, self._communicator = self._communicator, None

        def send_and_close() -> None:
            torch.cuda.synchronize(self.device)
            communicator.abort()

        # If another rank has ended, the last messages never arrive.
        thread = threading.Thread(target=send_and_close, daemon=True)
        thread.start()
        thread.join(CLOSE_TIMEOUT)
        atexit.unregister(self.close)

    def reset(self, generation: int) -> None:
        super().reset(generation)
        self.waiting_since = None
        if self.graphs is not None:
            self.graphs.clear()
        if self._uses_gloo:
            store = dist.PrefixStore(f"gloo/{generation}", self.store)
            timeout = timedelta(seconds=max(MIN_GLOO_TIMEOUT, timeout_seconds()))
            self.group = dist.ProcessGroupGloo(store, self.rank, self.size, timeout)

    def mark(self) -> tuple[Any, ...]:
        if not self.waits_on_gpu:
            return ()
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return (event,)

    def release(self, events: tuple[Any, ...], meet: Callable[[], None]) -> None:
        while not events[0].query() and not self.watchdog.is_stopped():
            time.sleep(1e-3)

    def interrupt(self) -> None:
        if self._uses_gloo:
            # No rank sends this message. When one wait times out, gloo ends all waits of the group.
            with suppress(RuntimeError):
                self.group.recv([torch.empty(1, device="cpu")], (self.rank + 1) % self.size, _UNUSED_TAG).wait(
                    timedelta(milliseconds=1)
                )

    def exchange(self, sends: Addressed, receives: Addressed) -> Wait:
        if self._uses_gloo and any(x.is_cuda for x, _ in (*sends, *receives)):
            return self._exchange_through_host(sends, receives)
        wait = self._exchange(sends, receives)
        self.num_exchanges += self.waits_on_gpu
        return wait

    def all_gather(self, own: torch.Tensor) -> tuple[torch.Tensor, Wait]:
        if self._uses_gloo:  # without tags, gloo's collectives cannot detect ranks that make different calls
            return super().all_gather(own)
        gathered = own.new_empty(self.size, *own.shape)
        options = AllgatherOptions()
        options.asyncOp = True
        work = self.group._allgather_base(gathered.view(-1), own.view(-1), options)
        self.num_exchanges += self.waits_on_gpu

        def wait(own: torch.Tensor = own) -> None:  # the default argument keeps the sent tensor alive
            self._wait([work])

        return gathered, wait

    def _exchange_through_host(self, sends: Addressed, receives: Addressed) -> Wait:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "messages of GPUs over gloo pass through host memory, so they cannot be part of a CUDA graph: use "
                "transport='nvlink', or give every rank its own GPU and create the process group with NCCL"
            )
        sent, received = ([(_empty_on_host(x), peer) for x, peer in messages] for messages in (sends, receives))
        for (x, _), (copy, _) in zip(sends, sent, strict=True):
            copy.copy_(x, non_blocking=True)
        # Waits are slow on a shared GPU, so wait only once for all copies.
        if any(x.is_cuda for x, _ in sends):
            torch.cuda.current_stream().synchronize()
        wait_for_messages = self._exchange(sent, received)

        def wait(sent: Addressed = sent) -> None:  # the default argument keeps the sent tensors alive
            wait_for_messages()
            for (x, _), (copy, _) in zip(receives, received, strict=True):
                x.copy_(copy, non_blocking=True)

        return wait

    def _exchange(self, sends: Addressed, receives: Addressed) -> Wait:
        sends, receives = ([(x, peer) for x, peer in messages if x.numel()] for messages in (sends, receives))
        if not sends and not receives:
            return lambda: None
        # `dist.batch_isend_irecv` is slower, because it checks and wraps every message in Python.
        group, device = self.group, (sends or receives)[0][0].device
        # gloo ends a process that receives a message of a wrong size. A receiver gets only messages with the expected tag.
        tag = self.watchdog.tag
        backend = group if self._uses_gloo else group._get_backend(device)
        if not backend.supports_coalescing:  # NCCL does
            works = [group.send([x], peer, tag) for x, peer in sends]
            works += [group.recv([x], peer, tag) for x, peer in receives]
            return partial(self._wait, works)
        group._start_coalescing(device)
        try:
            for x, peer in sends:
                group.send([x], peer, tag)
            for x, peer in receives:
                group.recv([x], peer, tag)
        except BaseException:
            # After an exception, NCCL has sent only some messages. Set an impossible number of exchanges, so that the next call
            # raises an error.
            self.num_exchanges = -1 - self.rank
            raise
        finally:
            work = group._end_coalescing(device)
        return work.wait

    def _wait(self, works: list[dist.Work]) -> None:
        self.waiting_since = time.monotonic()
        for work in works:
            work.wait()
        self.waiting_since = None

    def warm_up(self, device: torch.device) -> None:
        """Make NCCL open the connections of a ring, which takes seconds."""
        for distance in range(1, self.size) if self.interconnect.all_pairs else (1, self.size - 1):
            sent, received = torch.zeros(1, device=device), torch.empty(1, device=device)
            after, before = ((self.rank + sign * distance) % self.size for sign in (1, -1))
            self.exchange([(sent, after)], [(received, before)])()
        torch.cuda.synchronize(device)


def _empty_on_host(x: torch.Tensor) -> torch.Tensor:
    """Return a new host tensor like x. For a GPU tensor, the memory is pinned, so that copies are asynchronous."""
    return torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=x.is_cuda)


class SingleRankTransport(MessageTransport):
    """The transport of a ring of one rank, in which no messages are exchanged."""

    rank, size = 0, 1
    interconnect = interconnect("alone")

    def exchange(self, sends: Addressed, receives: Addressed) -> Wait:
        assert not [*sends, *receives], "a ring of one rank has nobody to exchange with"
        return lambda: None

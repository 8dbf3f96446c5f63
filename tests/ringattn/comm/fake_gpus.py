"""Fake GPUs of one host: their memory is in this process, and their streams are threads.

The kernels of a rank run in the rank's own thread, which plays the role of the main stream. Side streams run their queues in
threads of their own, with random delays. Every order of copies and kernels that flags and events allow may therefore occur. An
order that must not occur causes wrong numbers, or a test that never ends.
"""

import ctypes
import itertools
import queue
import random
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist

from ringattn import simulate
from ringattn.comm import connect, nvlink, nvlink_all_to_all
from ringattn.comm.nvlink import NvlinkTransport
from ringattn.comm.recovery import Recovery
from ringattn.comm.watchdog import Watchdog
from ringattn.planning.cost_model import interconnect

# If `rank_state.runs_ahead` is True on a rank, its main stream does not wait forever for other ranks. In the same way, the host
# of a GPU issues work before the GPU carries it out. The results of the rank are then meaningless.
# `rank_state.host` is the `Host` of the rank.
rank_state = threading.local()


class Stream:
    """A queue of work that a thread carries out in order. The main stream has no thread and works at once."""

    streams: ClassVar[dict[int, "Stream"]] = {}

    def __init__(self, device: object = None, priority: int = 0, main: bool = False) -> None:
        self.cuda_stream, self.host = id(self), rank_state.host
        self.streams[self.cuda_stream] = self
        self.work: queue.SimpleQueue | None = None if main else queue.SimpleQueue()
        self.log: list[str] = []  # the names of all operations, in the order in which they were issued
        if not main:
            self.thread = threading.Thread(target=self._run, daemon=True)
            self.thread.start()
            self.host.streams.append(self)

    def _run(self) -> None:
        while not self.host.is_closed:
            time.sleep(random.random() * 1e-3)
            self.work.get()()

    def do(self, name: str, action: Callable[[], None]) -> None:
        """Carry out an operation after everything that was issued before."""
        self.log.append(name)
        action() if self.work is None else self.work.put(action)

    def wait_event(self, event: "Event") -> None:
        """Wait until the event has occurred."""
        # The rank may record the event again, so the stream waits for the present state of the event.
        state = event.state

        def wait() -> None:
            while not state.wait(0.02) and not self.host.is_closed:
                if self.work is None and getattr(rank_state, "runs_ahead", False):
                    return

        self.do(f"wait for event {event.number}", wait)

    def wait_stream(self, other: "Stream") -> None:
        """Wait for everything that was issued on another stream."""
        event = Event()
        event.record(other)
        self.wait_event(event)


class Event:
    """An event that occurs when a stream reaches it. Each recording gives it a new number."""

    numbers = itertools.count()

    def record(self, stream: Stream) -> None:
        """Record the event on a stream."""
        self.state, self.number = threading.Event(), next(self.numbers)
        stream.do("record event", self.state.set)

    def query(self) -> bool:
        """Whether the event has occurred."""
        return self.state.is_set()


class Driver:
    """The functions of `ringattn.comm.cuda_driver`, on the memory of this process."""

    @staticmethod
    def copy(target: int, source: int, count: int, stream: int) -> None:
        """Copy bytes."""
        Stream.streams[stream].do("copy", lambda: ctypes.memmove(target, source, count))

    @staticmethod
    def copy_rows(target: int, target_pitch: int, source: int, source_pitch: int, width: int, rows: int, stream: int) -> None:
        """Copy rows of `width` bytes, which must not overlap, as the real driver requires."""
        assert rows == 1 or min(target_pitch, source_pitch) >= width, "rows overlap"

        def copy() -> None:
            for i in range(rows):
                ctypes.memmove(target + i * target_pitch, source + i * source_pitch, width)

        Stream.streams[stream].do("copy", copy)

    @staticmethod
    def set_flags(addresses: list[int], stream: int) -> None:
        """Set flags to 1. Setting a flag twice is a fault, because its last message was not read."""

        host = Stream.streams[stream].host

        def write(flag: ctypes.c_uint32) -> None:
            if flag.value:
                host.faults.append("a flag was set twice before it was cleared")
            flag.value = 1

        for address in addresses:
            Stream.streams[stream].do("set flag", partial(write, ctypes.c_uint32.from_address(address)))

    @staticmethod
    def wait_and_clear_flags(addresses: list[int], stream: int) -> None:
        """Wait until each flag is 1, and clear it."""

        main, host = Stream.streams[stream].work is None, Stream.streams[stream].host

        def take(flag: ctypes.c_uint32) -> None:
            start = time.monotonic()
            while flag.value != 1 and not host.is_closed:
                if main and host.ended:
                    raise ProcessEnded(*host.ended)
                if main and getattr(rank_state, "runs_ahead", False) and time.monotonic() > start + 0.02:
                    return
                time.sleep(1e-5)
            flag.value = 0

        for address in addresses:
            Stream.streams[stream].do("wait for flag", partial(take, ctypes.c_uint32.from_address(address)))


class Host:
    """The shared memory and the barrier of the ranks of one host."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks)
        self.shared: dict[tuple[int, int], torch.Tensor] = {}
        self.counts = [0] * ranks
        self.ranks = ranks
        self.store = dist.HashStore()
        self.ended: list[str] = []  # the message with which a watchdog would have ended all processes
        self.faults: list[str] = []  # of all streams
        self.streams: list[Stream] = []  # the side streams of all ranks
        self.is_closed = False

    def close(self) -> None:
        """End all side streams, even if a call was abandoned. Side streams must not write to memory of a later test."""
        self.is_closed = True
        for stream in self.streams:
            stream.work.put(lambda: None)
            stream.thread.join()
        self.shared.clear()

    def share(self, rank: int, dtype: torch.dtype, count: int) -> tuple[torch.Tensor, list[int]]:
        """Allocate memory on every rank, and return this rank's memory and the addresses of all ranks."""
        key, self.counts[rank] = self.counts[rank], self.counts[rank] + 1
        fill = 0xFF if dtype == torch.uint8 else 0  # bytes of 0xFF read as NaN, so that missing messages show
        self.shared[key, rank] = torch.full((count,), fill, dtype=dtype)
        self.barrier.wait()
        return self.shared[key, rank], [self.shared[key, peer].data_ptr() for peer in range(self.ranks)]


class ProcessEnded(BaseException):
    """The process of a rank has been ended by its watchdog while the rank waited for the GPU."""


class FakeWatchdog(Watchdog):
    """A watchdog that ends all ranks' waits for flags, but not the process."""

    def __init__(self, host: Host, rank: int) -> None:
        self.host = host
        super().__init__(host.store, rank, host.ranks, torch.device("cpu"))

    def _exit(self, text: str) -> None:
        self.host.ended[:] = [text]


class FakeNvlinkTransport(NvlinkTransport):
    """The transport with the memory of a `Host` in place of symmetric memory."""

    def __init__(self, host: Host, rank: int, messages: object) -> None:
        self.host, self.rank, self.size, self.device = host, rank, host.ranks, torch.device("cpu")
        self.interconnect, self.messages = interconnect("nvlink"), messages
        self.watchdog = FakeWatchdog(host, rank)
        self.streams = {kind: Stream() for kind in nvlink.KINDS}
        self._allocate()
        self.recovery = Recovery(host.store, self)

    def share(self, dtype: torch.dtype, count: int) -> tuple[torch.Tensor, list[int]]:
        return self.host.share(self.rank, dtype, count)

    def _write_flags(self, values: torch.Tensor) -> None:
        self._flags.copy_(values)
        self.host.faults.clear()  # flags that are set twice in an abandoned call

    def synchronise(self) -> None:
        for stream in self.streams.values():
            Stream(main=True).wait_stream(stream)
        self.host.barrier.wait()


def every_message_waits_for_an_event(log: list[str]) -> bool:
    """Whether each message in the log of a side stream waits for a new event before its copies. Flags end a message.

    Kernels of the fake host have finished when they return. On a GPU, kernels may still be running, so copies must wait for the
    event.
    """
    waited, latest = False, -1
    for before, name in itertools.pairwise(["", *log]):
        if name == "copy" and not waited:
            return False
        if name.startswith("wait for event"):
            number = int(name.split()[-1])
            waited, latest = waited or number > latest, max(number, latest)
        elif (before, name) == ("copy", "set flag"):
            waited = False
    return True


RunOnHost = Callable[[int, Callable[[int, object], object]], list]


class Capture(threading.local):
    """Whether the current rank captures a CUDA graph."""

    active = False


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Capture:
    """Set `capture.active` on a rank to make it believe that it captures a CUDA graph."""
    capture = Capture()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capture.active)
    return capture


@pytest.fixture
def run_on_host(monkeypatch: pytest.MonkeyPatch, capture: Capture) -> RunOnHost:
    """Return run_on_host(ranks, function), which calls function(rank, group) on every rank and returns the results."""
    main_streams = threading.local()

    def current_stream(device: object = None) -> Stream:
        if not hasattr(main_streams, "stream"):
            main_streams.stream = Stream(main=True)
        return main_streams.stream

    for name, replacement in (("current_stream", current_stream), ("Event", Event), ("Stream", Stream)):
        monkeypatch.setattr(torch.cuda, name, replacement)
    for module in (nvlink, nvlink_all_to_all):
        monkeypatch.setattr(module, "cuda_driver", Driver)

    transports: dict[str, FakeNvlinkTransport] = {}  # by the name of a simulated rank
    original = connect.connect

    def connect_to_host(name: str, device: torch.device | None = None, *options: object, **relays: bool) -> object:
        return transports[name] if device is not None and name in transports else original(name, device, *options, **relays)

    monkeypatch.setattr(connect, "connect", connect_to_host)

    def run(ranks: int, function: Callable[[int, object], object]) -> list:
        host = Host(ranks)

        def on_rank(rank: int, group: object) -> object:
            rank_state.host = host
            transports[group.group_name] = transport = FakeNvlinkTransport(host, rank, group)
            try:
                return function(rank, group)
            finally:
                transport.watchdog.stop()

        try:
            # Ranks wait for the flags of others, so they must not take turns.
            results = simulate(ranks, on_rank, in_turns=False)
            assert not host.faults
        finally:
            host.close()
        return results

    return run

"""End the whole run if a rank dies or hangs. The error message names the rank, the hop and the operation.

The watchdog records when every hop is issued and finished. On a GPU, the stream writes the number of the last finished hop to
host memory. A thread on each rank writes heartbeats to the job's store. A heartbeat contains the number of finished hops. If a
hop does not finish in time, the thread prints which rank is behind, and ends the process.
"""

import atexit
import ctypes
import json
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ringattn.comm import cuda_driver
from ringattn.comm.calls import Call, CallLog, decode_log, describe_difference
from ringattn.planning.schedule import Message

log = logging.getLogger(__name__)

TIMEOUT = "RINGATTN_TIMEOUT"  # name of the environment variable with the seconds that a hop may take
DEFAULT_TIMEOUT = "600"
HEARTBEAT_INTERVAL = 0.5  # seconds between two heartbeats of a rank
DEAD_AFTER = 4.0  # seconds without a heartbeat after which a rank counts as dead
GRACE = 5.0  # seconds in which a process may end by itself after a fault
DIFFERENCE = "ringattn: the ranks make different calls: "  # start of the message if calls differ
_COUNTER_RANGE = 1 << 32  # range of the counter of finished hops


def timeout_seconds() -> float:
    """Return the timeout of a hop: the environment variable RINGATTN_TIMEOUT, or 600 seconds.

    Raises:
        TransportError: the value is not a positive, finite number.
    """
    text = os.environ.get(TIMEOUT, DEFAULT_TIMEOUT)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise TransportError(f"{TIMEOUT}={text}: it must be a positive number, the seconds that a hop may take")
    return seconds


class TransportError(ValueError):
    """The required transport is unavailable, or an environment variable of the transports is invalid."""


class RingFault(RuntimeError):
    """A `RingFault` is raised if a rank of the ring does not respond."""


class Hop:
    __slots__ = ("incoming", "label", "number", "since", "step", "steps")

    def __init__(self, number: int, label: str, step: int, steps: int, incoming: tuple[Message, ...]) -> None:
        self.number, self.label, self.step, self.steps, self.incoming = number, label, step, steps, incoming
        self.since = time.monotonic()

    def __str__(self) -> str:
        sources = " and ".join(f"the {x.kind} of rank {x.owner} from rank {x.src}" for x in self.incoming)
        return f"{self.label}, hop {self.step + 1} of {self.steps}" + (f", receiving {sources}" if sources else "")


class NoWatchdog:
    """A `NoWatchdog` does nothing, and is used for rings that cannot lose a rank."""

    def start(self, label: str, step: int, steps: int, incoming: tuple[Message, ...]) -> None: ...

    def finished(self, hop: Hop | None) -> None: ...

    def cancel(self, hop: Hop | None) -> None: ...

    def record_call(self, key: tuple[Any, ...], describe: Callable[[], Call], cached: int = 0) -> None: ...

    tag = 0

    def fault(self, hop: Hop | None) -> None: ...

    def stop(self) -> None: ...

    def is_stopped(self) -> bool:
        return False


class _Heartbeat(NamedTuple):
    clock: float = 0.0  # on the rank's clock; every heartbeat has a different value
    issued: int = 0  # number of issued hops
    finished: int = 0
    latest: str = "its start"  # the hop that was issued last


class Watchdog:
    """A `Watchdog` watches the hops of one rank in a thread. The thread ends when `stop` is called or `group_exists` returns
    False.
    """

    recovery: Any = None  # the `ringattn.comm.recovery.Recovery` of the transport

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        device: torch.device,
        group_exists: Callable[[], bool] = lambda: True,
    ) -> None:
        self.store, self.rank, self.size, self.group_exists = store, rank, size, group_exists
        timeout_seconds()  # rejects an invalid timeout early
        self.in_flight: deque[Hop] = deque()
        self.issued = 0
        self.latest: Hop | str = _Heartbeat().latest
        self.on_gpu = device.type == "cuda" and torch.version.cuda is not None
        self.device = device.index if device.index is not None or not self.on_gpu else torch.cuda.current_device()
        self._memory = torch.zeros(1, dtype=torch.int32, pin_memory=self.on_gpu, device="cpu")
        self._last_finished = ctypes.c_uint32.from_address(self._memory.data_ptr())  # number of the last finished hop
        self._progress = (0, time.monotonic())  # the latest `_last_finished`, and when it changed
        self._calls = CallLog()
        self._generation = 0  # number of resets after exceptions
        self._lock = threading.Lock()  # held while hops are removed from `in_flight`
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ringattn-watchdog", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def start(self, label: str, step: int, steps: int, incoming: tuple[Message, ...]) -> Hop | None:
        """Record that a hop is issued, and return the hop. While a CUDA graph is being captured, return None, because the hops
        of a replay are not watched.
        """
        if self.is_capturing():
            return None
        self.issued += 1
        self.latest = hop = Hop(self.issued, label, step, steps, incoming)
        self.in_flight.append(hop)
        return hop

    def is_capturing(self) -> bool:
        return self.on_gpu and torch.cuda.is_current_stream_capturing()

    def finished(self, hop: Hop | None) -> None:
        """Record the end of the hop. On a GPU, the hop ends when all earlier work of the current stream has finished."""
        if hop is None:
            return
        if self.on_gpu:
            stream = torch._C._cuda_getCurrentRawStream(self.device)
            cuda_driver.write_flag(ctypes.addressof(self._last_finished), hop.number, stream)
        else:
            self._last_finished.value = hop.number % _COUNTER_RANGE

    def record_call(self, key: tuple[Any, ...], describe: Callable[[], Call], cached: int = 0) -> None:
        self._calls.record(key, describe, cached)

    @property
    def tag(self) -> int:
        return self._calls.tag

    def cancel(self, hop: Hop | None) -> None:
        """Stop watching a hop for which this rank no longer waits."""
        with self._lock, suppress(ValueError):  # the hop may have finished already
            if hop is not None:
                self.in_flight.remove(hop)

    def forget_hops(self) -> None:
        with self._lock:
            self.in_flight.clear()

    def restart(self) -> None:
        """Count the hops and the calls from 0 again, after all ranks have reset the ring."""
        with self._lock:
            self.issued, self._last_finished.value, self._progress = 0, 0, (0, time.monotonic())
            self._calls = CallLog()
            self._generation += 1  # last, so that the thread cannot publish the old log for the new generation

    def fault(self, hop: Hop | None) -> RingFault | None:
        """Return an exception that names the rank that caused an error in `hop`, or None if `hop` is None."""
        if hop is None:
            return None
        with suppress(Exception):  # if the store is gone, `_diagnose` reports this
            if self.recovery is not None and (explanation := self.recovery.explain()):
                return RingFault(explanation)
        return RingFault(self._diagnose(hop))

    def is_stopped(self) -> bool:
        return self._stopped.is_set()

    def stop(self) -> None:
        """Stop the thread and wait for it. If Python exits while a thread is inside a call of the store, the process aborts."""
        self._stopped.set()
        for thread in (self._thread, self.recovery and self.recovery.draining):
            if thread is not None and thread is not threading.current_thread():
                thread.join(GRACE)
        atexit.unregister(self.stop)

    def _watch(self) -> None:
        while not self._stopped.wait(HEARTBEAT_INTERVAL):
            if not self.group_exists():  # the group has been destroyed
                self.stop()
                return
            with self._lock:
                hop = self._overdue_hop()
            with suppress(Exception):
                self._send_heartbeat()
                self._publish_calls()
                if self.rank and (difference := self._find_difference([0])):
                    self.store.compare_set("verdict", "", f"{difference}; the run ends here")
                if self.recovery is not None:
                    self.recovery.look()
                if self.store.check(["verdict"]):
                    verdict = self.store.get("verdict").decode()
                    # The main thread has GRACE seconds to raise its own exception.
                    time.sleep(0 if verdict.startswith(DIFFERENCE) else GRACE)
                    if self.group_exists():
                        self._exit(verdict)
            if hop is not None:
                self._exit(self._diagnose(hop))

    def _overdue_hop(self) -> Hop | None:
        last, now = self._last_finished.value, time.monotonic()
        while self.in_flight and (last - self.in_flight[0].number) % _COUNTER_RANGE < _COUNTER_RANGE // 2:
            self.in_flight.popleft()
        if last != self._progress[0] or not self.in_flight:
            self._progress = last, now
            return None
        hop = self.in_flight[0]
        return hop if now - max(self._progress[1], hop.since) > timeout_seconds() else None

    def _send_heartbeat(self) -> None:
        heartbeat = _Heartbeat(time.monotonic(), self.issued, self._last_finished.value, str(self.latest))
        self.store.set(f"life/{self.rank}", json.dumps(heartbeat))

    def _publish_calls(self) -> None:
        self.store.set(f"calls/{self._generation}/{self.rank}", self._calls.encode())

    def _find_difference(self, ranks: Iterable[int]) -> str | None:
        generation, own = self._generation, self._calls.entries
        for rank in ranks:
            if self.store.check([key := f"calls/{generation}/{rank}"]):
                difference = describe_difference((rank, self.rank), (decode_log(self.store.get(key)), own))
                if difference is not None:
                    return f"{DIFFERENCE}{difference}"
        return None

    def _diagnose(self, hop: Hop) -> str:
        """Return a sentence about the rank that is behind. All ranks return the diagnosis that reached the store first."""
        waiting = f"rank {self.rank} waited {time.monotonic() - hop.since:.0f} s in {hop}; the run ends here"
        try:
            if self.store.check(["verdict"]):
                return self.store.get("verdict").decode()
            # `compare_set` keeps and returns the first text.
            difference = self._find_difference(range(self.size))
            text = f"{difference or f'ringattn: {self._find_culprit(hop)}'}; {waiting}"
            return self.store.compare_set("verdict", "", text).decode() or text
        except Exception:
            return f"ringattn: the job's store does not respond, so the rank that hosts it is gone; {waiting}"

    def _find_culprit(self, hop: Hop) -> str:
        # A rank is alive if the clock in its heartbeats changes. Clocks of different hosts are never compared.
        before = self._read_heartbeats()
        deadline = time.monotonic() + DEAD_AFTER
        alive: set[int] = set()
        while time.monotonic() < deadline and len(alive) < len(before):
            time.sleep(HEARTBEAT_INTERVAL)
            self._send_heartbeat()  # `_watch` sends no heartbeats during this loop
            alive |= {rank for rank, heartbeat in enumerate(self._read_heartbeats()) if heartbeat.clock != before[rank].clock}
        dead = [rank for rank in range(self.size) if rank not in alive and rank != self.rank]
        if dead:
            return "; ".join(f"rank {rank} gives no sign of life, last seen in {before[rank].latest}" for rank in dead)
        progress = [(heartbeat.issued, heartbeat.finished) for heartbeat in self._read_heartbeats()]
        slowest = progress.index(min(progress))
        if len(set(progress)) == 1:
            sources = sorted({message.src for message in hop.incoming})
            return "all ranks are stuck at the same hop" + (f"; this rank is waiting for rank {sources}" if sources else "")
        issued, finished = progress[slowest]
        if issued == finished:
            return f"rank {slowest} makes no other call after {before[slowest].latest}"
        return f"rank {slowest} is stuck in {before[slowest].latest}"

    def _read_heartbeats(self) -> list[_Heartbeat]:
        keys = [f"life/{rank}" for rank in range(self.size)]
        return [_Heartbeat(*json.loads(self.store.get(key))) if self.store.check([key]) else _Heartbeat() for key in keys]

    def _exit(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)
        # sys.exit would end only this thread.
        os._exit(1)

"""A rank that dies or sticks ends the whole run, with one message that names the rank, the hop and the operation.

Every hop is noted when it is issued and when it is over; on a GPU the device itself writes the number of the last hop that is
over into host memory, so that looking costs no call. A thread on each rank tells the others, through the job's store, that it
is alive and how far it is. If a hop is not over in time, the thread asks who is behind, prints it and ends the process.
"""

import atexit
import ctypes
import logging
import os
import sys
import threading
import time
from collections import deque
from contextlib import suppress

import torch
import torch.distributed as dist

from ringattn.comm import cuda_driver
from ringattn.planning.schedule import Message

log = logging.getLogger(__name__)

TIMEOUT = "RINGATTN_TIMEOUT"  # environment: seconds that a hop may take
BEAT = 0.5  # seconds between two signs of life
SILENCE = 4.0  # seconds without one after which a rank counts as dead
GRACE = 5.0  # seconds that a process has to end by itself once the reason is known
_WORD = 1 << 32


def timeout_seconds() -> float:
    """What the environment says, 600 by default.

    Raises:
        ValueError: a value that is no positive number.
    """
    text = os.environ.get(TIMEOUT, "600")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ValueError(f"{TIMEOUT}={text}: give the seconds that a hop may take, a positive number")
    return seconds


class RingFault(RuntimeError):
    """A rank of the ring does not answer."""


class Hop:
    """A hop under way: what its rank is doing, told only when somebody asks."""

    __slots__ = ("number", "label", "step", "steps", "incoming", "since")

    def __init__(self, number: int, label: str, step: int, steps: int, incoming: tuple[Message, ...]) -> None:
        self.number, self.label, self.step, self.steps, self.incoming = number, label, step, steps, incoming
        self.since = time.monotonic()

    def __str__(self) -> str:
        waits = " and ".join(f"the {message.kind} of rank {message.owner} from rank {message.src}" for message in self.incoming)
        return f"{self.label}, hop {self.step + 1} of {self.steps}" + (f", receiving {waits}" if waits else "")


class Unwatched:
    """For rings that cannot lose a rank."""

    def start(self, label: str, step: int, steps: int, incoming: tuple[Message, ...]) -> None: ...

    def passed(self, hop: None) -> None: ...

    def withdraw(self, hop: None) -> None: ...

    def fault(self, hop: None, error: Exception) -> Exception:
        return error

    def stop(self) -> None: ...


class Watchdog:
    """One rank's thread, and what it watches. Ends with the process."""

    def __init__(self, store: dist.Store, rank: int, size: int, device: torch.device) -> None:
        self.store, self.rank, self.size = store, rank, size
        timeout_seconds()  # a senseless one is refused before there is a ring
        self.under_way: deque[Hop] = deque()
        self.issued = 0
        self.latest: Hop | str = "its start"
        self.on_gpu = device.type == "cuda" and torch.version.cuda is not None
        self.device = device.index if device.index is not None or not self.on_gpu else torch.cuda.current_device()
        self._word = torch.zeros(1, dtype=torch.int32, pin_memory=self.on_gpu, device="cpu")
        self._over = ctypes.c_uint32.from_address(self._word.data_ptr())  # number of the last hop that is over
        self._seen = (0, time.monotonic())
        self._looking = threading.Lock()  # held where hops are taken out
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ringattn-watchdog", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def start(self, label: str, step: int, steps: int, incoming: tuple[Message, ...]) -> Hop | None:
        """A hop is issued. None: one in a CUDA graph, whose replays nobody counts."""
        if self.on_gpu and torch.cuda.is_current_stream_capturing():
            return None
        self.issued += 1
        self.latest = hop = Hop(self.issued, label, step, steps, incoming)
        self.under_way.append(hop)
        return hop

    def passed(self, hop: Hop | None) -> None:
        """Everything issued so far, on the current stream of a GPU, ends the hop."""
        if hop is None:
            return
        if self.on_gpu:
            # at every hop, so by the handle alone: torch.cuda.current_stream would make an object of it
            stream = torch._C._cuda_getCurrentRawStream(self.device)
            cuda_driver.write_flag(ctypes.addressof(self._over), hop.number, stream)
        else:
            self._over.value = hop.number % _WORD

    def withdraw(self, hop: Hop | None) -> None:
        """An exception ends the pass: this rank does not wait for the hop any more."""
        with self._looking, suppress(ValueError):  # it may be over
            self.under_way.remove(hop)

    def fault(self, hop: Hop | None, error: Exception) -> Exception:
        """What to raise for an error that a hop ended with: once it is known who is missing."""
        if hop is None:
            return error
        return RingFault(self._verdict(hop, time.monotonic() - hop.since))

    def stop(self) -> None:
        """Watch no more. A thread that Python's end finds in a call of the store aborts the process: it is waited for."""
        self._ended.set()
        self._thread.join(GRACE)
        atexit.unregister(self.stop)

    def _watch(self) -> None:
        while not self._ended.wait(BEAT):
            with self._looking:
                hop = self._late()
            try:
                self._tell()
                if self.store.check(["verdict"]):
                    time.sleep(GRACE)
                    self._end(self.store.get("verdict").decode())
            except Exception:  # the store ends with the rank that keeps it: whatever its client raises, there is no news
                pass
            if hop is not None:
                self._end(self._verdict(hop, time.monotonic() - hop.since))

    def _late(self) -> Hop | None:
        """The oldest hop under way, if nothing has moved for too long."""
        over, now = self._over.value, time.monotonic()
        while self.under_way and (over - self.under_way[0].number) % _WORD < _WORD // 2:
            self.under_way.popleft()
        if over != self._seen[0] or not self.under_way:
            self._seen = over, now
            return None
        hop = self.under_way[0]
        return hop if now - max(self._seen[1], hop.since) > timeout_seconds() else None

    def _tell(self) -> None:
        self.store.set(f"life/{self.rank}", f"{time.monotonic()}|{self.issued}|{self._over.value}|{self.latest}")

    def _verdict(self, hop: Hop, seconds: float) -> str:
        """Who is behind, in one sentence; the first rank to ask decides for all."""
        mine = f"rank {self.rank} waited {seconds:.0f} s in {hop}"
        try:
            if self.store.check(["verdict"]):
                return self.store.get("verdict").decode()
            text = f"ringattn: {self._behind(hop)}; {mine}; the run ends here"
            return self.store.compare_set("verdict", "", text).decode() or text
        except Exception:
            return f"ringattn: the job's store does not answer, so the rank that keeps it is gone; {mine}; the run ends here"

    def _behind(self, hop: Hop) -> str:
        """The rank that is dead, or else the one that has issued or done the least."""
        lives = self._ask()
        until = time.monotonic() + SILENCE
        moved: set[int] = set()
        while time.monotonic() < until and len(moved) < len(lives):
            time.sleep(BEAT)
            self._tell()  # this may be the very thread that does so
            moved |= {rank for rank, life in self._ask().items() if life[0] != lives[rank][0]}
        dead = [rank for rank in range(self.size) if rank not in moved and rank != self.rank]
        if dead:
            return "; ".join(f"rank {rank} gives no sign of life, last seen in {lives[rank][3]}" for rank in dead)
        progress = {rank: (int(life[1]), int(life[2])) for rank, life in self._ask().items()}
        slowest = min(progress, key=progress.get)
        if len(set(progress.values())) == 1:
            sources = sorted({message.src for message in hop.incoming})
            return f"every rank is at the same hop and none moves, here for want of rank {sources}"
        if progress[slowest][0] == progress[slowest][1]:
            return f"rank {slowest} makes no other call after {lives[slowest][3]}"
        return f"rank {slowest} is stuck in {lives[slowest][3]}"

    def _ask(self) -> dict[int, list[str]]:
        """(its clock, hops issued, hops over, where) of every rank."""
        unknown = ["0", "0", "0", "its start"]
        keys = [f"life/{rank}" for rank in range(self.size)]
        return {
            rank: self.store.get(key).decode().split("|", 3) if self.store.check([key]) else unknown
            for rank, key in enumerate(keys)
        }

    def _end(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)
        os._exit(1)

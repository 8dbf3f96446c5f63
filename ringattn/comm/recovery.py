"""Reset a ring after an exception inside a call, so that the next call returns exact results.

After the exception, messages and flags of the failed call are still in flight, and later calls must not receive them.
Therefore:

1. A rank whose call raises an exception publishes the call's number and the exception in the job's store.
2. Before its next call, the rank waits until all ranks have published an exception.
3. If every rank has raised an exception in the same call, every rank resets its transport.
4. If only some ranks have raised an exception, every rank raises a `RingFault`, also in later calls.

A rank that raises an exception sends no more messages, so another rank may wait forever. With gloo, the watchdog of the waiting
rank interrupts the wait. On a GPU, the watchdog ends the waiting process.
"""

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, cast

import torch.distributed as dist

from ringattn.comm.transport import Transport
from ringattn.comm.watchdog import RingFault, Watchdog, timeout_seconds

# After an exception on another rank, wait up to PATIENCE seconds for the messages of that rank.
PATIENCE = 10.0
_POLL = 0.002  # seconds between two reads of the store


class Record(NamedTuple):
    rank: int
    call: int
    reason: str  # the exception
    is_own: bool  # False if the exception is a `RingFault` that names another rank
    num_exchanges: int  # see `ringattn.comm.transport.MessageTransport.num_exchanges`

    def __str__(self) -> str:
        return f"rank {self.rank} left call {self.call} of the group because of {self.reason}"


class Recovery:
    def __init__(self, store: dist.Store, transport: Transport) -> None:
        self.store, self.transport, self.watchdog = store, transport, cast(Watchdog, transport.watchdog)
        self.rank, self.size = transport.rank, transport.size
        self.generation = 0  # number of resets
        self.call = 0  # number of begun calls
        self.depth = 0  # number of open `in_call` contexts
        self.left: Record | None = None  # the record of this rank, until the transport is reset
        self.fault: str | None = None  # why the transport cannot be used any more
        self._seen = 0.0  # when another rank's record was first seen
        self.draining: threading.Thread | None = None
        self._lock = threading.Lock()  # held by `look` while it decides
        self.watchdog.recovery = self

    def prepare(self) -> None:
        """Reset the transport before a call, because an exception has ended the previous call."""
        if self.watchdog.is_capturing():
            raise RuntimeError(
                "an exception has ended the latest call, and a CUDA graph cannot contain the reset of the ring: call attention "
                "once before the capture"
            )
        if not self.depth:
            self._reset()

    def enter(self) -> None:
        self.depth += 1  # before `call`, because `look` reads both
        if self.depth == 1:
            self.call += 1

    def exit(self, error: BaseException | None) -> None:
        """End a call. If `error` is an exception, publish it."""
        with self._lock:
            if error is not None and self.left is None and not self.watchdog.is_capturing():
                self._publish(error)
                with suppress(Exception):  # after an error of CUDA, no event can be recorded
                    if events := self.transport.mark():
                        self.draining = threading.Thread(target=self._drain, args=(events,), daemon=True)
                        self.draining.start()
            self.depth -= 1

    def look(self) -> None:
        """Look for a call in which another rank raised an exception. Declare a fault if this rank has finished the call or
        hangs in the call.
        """
        generation = self.generation
        other = self._first_record() if self.left is None else None
        if other is None or not other.is_own or other.call > self.call:
            return
        with self._lock:
            if self.left is not None or self.generation != generation:
                return
            now = time.monotonic()
            self._seen = self._seen or now
            since = self.transport.messages.waiting_since
            is_stuck = since is not None and now - max(since, self._seen) > min(PATIENCE, timeout_seconds() / 2)
            if other.call < self.call or not self.depth or is_stuck or now - self._seen > timeout_seconds():
                self._declare_fault(other)

    def explain(self) -> str | None:
        """If a wait failed because another rank left the call, return the reason, and otherwise None."""
        other = self._first_record() if self.fault is None else None
        if other is not None and other.is_own:
            self._declare_fault(other)
        return self.fault

    def _first_record(self) -> Record | None:
        key = f"left/{self.generation}"
        return Record(*json.loads(self.store.get(key))) if self.store.check([key]) else None

    def _publish(self, error: BaseException) -> None:
        lines = str(error).strip().splitlines()
        reason = f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
        self.left = Record(
            self.rank, self.call, reason, not isinstance(error, RingFault), self.transport.messages.num_exchanges
        )
        record = json.dumps(self.left)
        with suppress(Exception):  # keep the exception of the call if the store is gone
            self.store.compare_set(f"left/{self.generation}", "", record)
            self.store.set(f"left/{self.generation}/{self.rank}", record)
        self.watchdog.forget_hops()

    def _declare_fault(self, other: Record, why: str = "") -> None:
        why = why or f"rank {self.rank} did not"
        advice = "the ranks no longer make the same calls; create a new process group, or start the job again"
        self.fault = f"ringattn: {other}, but {why}: {advice}"
        with suppress(Exception):  # the store is gone
            self.fault = self.store.compare_set("fault", "", self.fault).decode() or self.fault
            if self.transport.waits_on_gpu:
                self.store.compare_set("verdict", "", self.fault)
        if self.left is None:
            self._publish(RingFault(self.fault))
        if not self.transport.waits_on_gpu:
            self.transport.messages.interrupt()

    def _reset(self) -> None:
        if self.fault is None:
            self._check(self._read_records())
        if self.fault is not None:
            raise RingFault(self.fault)
        try:
            self._meet("drained", self.draining)
            self.transport.reset(self.generation + 1)
            self.watchdog.restart()
            self._meet("reset")
        except BaseException as error:
            if self.fault is None:
                self._declare_fault(
                    cast(Record, self.left), f"rank {self.rank} could not reset the ring ({type(error).__name__}: {error})"
                )
            raise
        with self._lock:
            self.generation, self.left, self._seen = self.generation + 1, None, 0.0

    def _drain(self, events: tuple[Any, ...]) -> None:
        # Another thread runs this method, because the main thread may be waiting for the GPU.
        with suppress(Exception):  # the next call raises it
            if self._is_same_exception(self._read_records()):
                self.transport.release(events, lambda: self._meet("past"))

    def _is_same_exception(self, records: list[Record]) -> bool:
        return (
            all(record.is_own for record in records) and len({(record.call, record.num_exchanges) for record in records}) == 1
        )

    def _check(self, records: list[Record]) -> None:
        if self._is_same_exception(records):
            return
        # The exception in the earliest call caused the exceptions of the other ranks.
        first, *rest = sorted(records, key=lambda record: (not record.is_own, record.call, record.rank))
        other = next(x for x in rest if (x.call, x.num_exchanges, x.is_own) != (first.call, first.num_exchanges, True))
        how = f"{other}" if other.is_own and other.call != first.call else f"rank {other.rank} did not"
        if other.is_own and other.call == first.call:
            how = f"rank {other.rank} left it at another place, so NCCL waits for messages that are never sent"
        self._declare_fault(first, how)

    def _meet(self, name: str, thread: threading.Thread | None = None) -> None:
        if thread is not None:
            self._wait_until(lambda: not thread.is_alive(), [])
        self.store.set(f"{name}/{self.generation}/{self.rank}", "")
        self._wait_for_keys(name)

    def _read_records(self) -> list[Record]:
        return [Record(*json.loads(self.store.get(key))) for key in self._wait_for_keys("left")]

    def _wait_for_keys(self, name: str) -> list[str]:
        keys = [f"{name}/{self.generation}/{rank}" for rank in range(self.size)]
        self._wait_until(lambda: self.store.check(keys), keys)
        return keys

    def _wait_until(self, condition: Callable[[], bool], keys: list[str]) -> None:
        end = time.monotonic() + timeout_seconds()
        while True:
            for key in ("fault", "verdict"):
                if self.store.check([key]):
                    self.fault = self.store.get(key).decode()
                    raise RingFault(self.fault)
            if condition():
                return
            if self.watchdog.is_stopped():
                raise RingFault("ringattn: the process ends, or the process group has been destroyed")
            if time.monotonic() > end:
                missing = ", ".join(str(rank) for rank, key in enumerate(keys) if not self.store.check([key]))
                other = cast(Record, self._first_record())
                self._declare_fault(other, f"rank {missing} did not within {timeout_seconds():.0f} s")
                raise RingFault(self.fault)
            time.sleep(_POLL)

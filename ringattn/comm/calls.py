"""Record the attention calls of each rank, to detect ranks that make different calls.

Every rank publishes its newest calls in the job's key-value store, where `ringattn.comm.watchdog` compares them. With gloo, the
tag of a message depends on all earlier calls of its sender. Ranks that make different calls use different tags, so no rank
receives a message of a wrong size.
"""

import json
import zlib
from collections import deque
from collections.abc import Callable
from typing import Any

Call = dict[str, object]  # settings by name
Entry = tuple[int, int, str, int]  # number of the call, fingerprint of all calls so far, settings as JSON, tokens in the cache

WINDOW = 128  # number of the newest calls that a rank publishes
# A rank also publishes up to 64 older calls, for comparison with a rank that is far behind.
MILESTONES = 64
MAX_SETTINGS = 64  # maximum number of cached settings


class CallLog:
    """A `CallLog` contains the calls of one rank. The method `record` takes about 2 us for settings that it has seen before."""

    def __init__(self) -> None:
        self._recent: deque[Entry] = deque(maxlen=WINDOW)
        self._milestones: deque[Entry] = deque(maxlen=MILESTONES)
        self._count = self._fingerprint = 0
        self._settings: dict[tuple[Any, ...], tuple[str, int]] = {}  # by key: the settings as JSON, and their checksum

    def record(self, key: tuple[Any, ...], describe: Callable[[], Call], cached: int = 0) -> None:
        """Append a call to the log. Equal keys mean equal settings, so `describe` is called only for a new key.

        `cached` is the number of tokens in a KV cache.
        """
        settings = self._settings.get(key)
        if settings is None:
            if len(self._settings) >= MAX_SETTINGS:
                del self._settings[next(iter(self._settings))]
            text = json.dumps(describe())
            settings = self._settings[key] = text, zlib.crc32(text.encode())
        text, checksum = settings
        self._count += 1
        self._fingerprint = zlib.crc32(b"%d %d" % (checksum, cached), self._fingerprint)
        entry = self._count, self._fingerprint, text, cached
        self._recent.append(entry)
        if self._count % WINDOW == 0:
            self._milestones.append(entry)

    @property
    def tag(self) -> int:
        """Return a 31-bit number that is equal on ranks that have made the same calls."""
        return self._fingerprint & 0x7FFFFFFF

    @property
    def entries(self) -> list[Entry]:
        """Return the older milestones (every 128th call), followed by the newest WINDOW calls."""
        recent = list(self._recent)
        return [entry for entry in list(self._milestones) if entry[0] < recent[0][0]] + recent

    def encode(self) -> str:
        entries = self.entries
        settings = list(dict.fromkeys(text for _, _, text, _ in entries))
        return json.dumps([settings, [(*call, settings.index(text), cached) for *call, text, cached in entries]])


def decode_log(log: str | bytes) -> list[Entry]:
    settings, entries = json.loads(log)
    return [(number, fingerprint, settings[i], cached) for number, fingerprint, i, cached in entries]


def describe_difference(ranks: tuple[int, int], logs: tuple[list[Entry], list[Entry]]) -> str | None:
    """Return one sentence about the first call that differs between the logs of two ranks, or None."""
    others = {entry[0]: entry for entry in logs[1]}
    for own in logs[0]:
        number, fingerprint, *_ = own
        if fingerprint == (other := others.get(number, own))[1]:
            continue
        calls = [json.loads(text) | {"tokens in the cache": cached} for _, _, text, cached in (own, other)]
        for name in calls[0] | calls[1]:
            values = [shorten(call.get(name)) for call in calls]
            if values[0] != values[1]:
                where = [f"{name} = {value} on rank {rank}" for value, rank in zip(values, ranks, strict=True)]
                return f"call {number} of the group has {' and '.join(where)}: all ranks must make the same calls"
        # A call's fingerprint also covers all earlier calls.
        return (
            f"an earlier call differs between rank {ranks[0]} and rank {ranks[1]}, before call {number} of the group: all "
            "ranks must make the same calls"
        )
    return None


def shorten(value: object) -> str:
    """Return the value as text, in which a checksum replaces all characters after the first 80."""
    text = str(value)
    return text if len(text) <= 80 else f"{text[:80]}... (checksum {zlib.crc32(text.encode()):08x})"

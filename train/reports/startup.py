"""Measure the parts of a job's start, from the launch to the end of the first step."""

import time

from torch._dynamo.utils import calculate_time_spent

from ringattn.train.preemption import LAUNCH_TIME

_parts: dict[str, float] = {}  # the duration of each part of the current job's start, in seconds
_latest = LAUNCH_TIME  # the time at which the newest entry of `_parts` ended
_num_jobs = 0  # the number of jobs that have begun
_compiled_before = 0.0  # the seconds that torch.compile took before the current job


def begin_job() -> None:
    """Begin to measure the startup time of a job. The startup time of a launch's first job includes the launch."""
    global _latest, _num_jobs, _compiled_before
    if _num_jobs > 0:
        _parts.clear()
        _latest = time.monotonic()
    _num_jobs += 1
    _compiled_before = calculate_time_spent()["total_wall_time"]


def end_part(name: str, end: float | None = None) -> None:
    """Record that the part `name` ended at time `end`, by default now. A part begins at the end of the previous part."""
    global _latest
    now = time.monotonic() if end is None else end
    _parts[name] = now - _latest
    _latest = now


def seconds() -> dict[str, float]:
    """Return the seconds that each part of the current job's startup took.

    "torch.compile" is the share of these seconds that compilation took.
    """
    compilation = calculate_time_spent()["total_wall_time"] - _compiled_before
    return _parts | ({"torch.compile": compilation} if compilation > 0 else {})


def describe() -> str:
    parts = ", ".join(f"{name} {spent:.1f}" for name, spent in seconds().items())
    return f"{sum(_parts.values()):.1f} s: {parts.replace(', torch.compile', ', of which torch.compile')}"

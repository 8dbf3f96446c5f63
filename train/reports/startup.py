"""Measure how long the parts of a start take, from the launch of a job to the end of its first step."""

import time

from torch._dynamo.utils import calculate_time_spent

from ringattn.train.preemption import LAUNCH_TIME

# The seconds of each part of the start of the current job, and the end of the latest part.
_parts: dict[str, float] = {}
_latest = LAUNCH_TIME
# The number of jobs so far, and the seconds of torch.compile before the current one.
_num_jobs = 0
_compiled_before = 0.0


def begin_job() -> None:
    """Begin the start of a job. The start of the first job began with the launch."""
    global _latest, _num_jobs, _compiled_before
    if _num_jobs > 0:
        _parts.clear()
        _latest = time.monotonic()
    _num_jobs += 1
    _compiled_before = calculate_time_spent()["total_wall_time"]


def end_part(name: str, end: float | None = None) -> None:
    """Record the time since the end of the previous part as the part `name`. The part ended at the time `end`, or now."""
    global _latest
    now = time.monotonic() if end is None else end
    _parts[name] = now - _latest
    _latest = now


def seconds() -> dict[str, float]:
    """Return the seconds of each part of the start of the current job, in order.

    "torch.compile" is the share of these seconds that compilation took.
    """
    compilation = calculate_time_spent()["total_wall_time"] - _compiled_before
    return _parts | ({"torch.compile": compilation} if compilation > 0 else {})


def describe() -> str:
    """Return the seconds of the start and of its parts as text."""
    parts = ", ".join(f"{name} {spent:.1f}" for name, spent in seconds().items())
    return f"{sum(_parts.values()):.1f} s: {parts.replace(', torch.compile', ', of which torch.compile')}"

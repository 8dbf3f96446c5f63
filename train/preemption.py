"""A run that is asked to end does so after the step it is in, with a checkpoint: by SIGTERM, or by its own time limit."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

LAUNCHED = time.monotonic()
_terminated = False  # for ever: it is the launch that is asked to end, not the job of a sweep that it is in


class Stopped(SystemExit):
    """The run was asked to end, and is saved. No mistake: as one of Python's own ways to end, it has exit status 0."""


@contextmanager
def listening() -> Iterator[None]:
    """In here SIGTERM asks, which `is_asked` tells; elsewhere it ends the process at once.

    It may come again, as torchrun hands on what its ranks have had themselves.
    """

    def ask(*_) -> None:
        global _terminated
        _terminated = True

    before = signal.signal(signal.SIGTERM, ask) or signal.SIG_DFL
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def is_asked(time_limit_s: float | None) -> bool:
    """Whether this rank has heard SIGTERM, or so many seconds have passed since the launch."""
    return _terminated or (time_limit_s is not None and time.monotonic() - LAUNCHED > time_limit_s)


def any_asked(time_limit_s: float | None) -> bool:
    """Whether any rank is asked to end; all take part."""
    asked = torch.tensor(int(is_asked(time_limit_s)))
    dist.all_reduce(asked, dist.ReduceOp.MAX)
    return bool(asked)

"""A run that is asked to end does so after the step it is in, with a checkpoint: by SIGTERM, or by its own time limit."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LAUNCHED = time.monotonic()


class Stopped(SystemExit):
    """The run was asked to end, and is saved. No mistake: as one of Python's own ways to end, it has exit status 0."""


@contextmanager
def requests(time_limit_s: float | None) -> Iterator[Callable[[], bool]]:
    """Whether this process is asked to stop: by SIGTERM in this block, or as so many seconds have passed since the launch.

    A second SIGTERM ends the process at once, and so does one outside the block.
    """
    asked = False

    def ask(*_) -> None:
        nonlocal asked
        asked = True
        signal.signal(signal.SIGTERM, before)

    before = signal.signal(signal.SIGTERM, ask) or signal.SIG_DFL
    try:
        yield lambda: asked or (time_limit_s is not None and time.monotonic() - LAUNCHED > time_limit_s)
    finally:
        signal.signal(signal.SIGTERM, before)

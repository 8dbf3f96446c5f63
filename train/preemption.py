"""Stop a run cleanly, and keep two processes from training in the same directory.

A run stops on SIGTERM or at its time limit. It then completes its current step, saves a checkpoint and exits, so that launching
it again resumes it.
"""

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from filelock import FileLock, Timeout

from ringattn.train.config import ConfigError
from ringattn.train.parallel.ranks import sync_errors

LAUNCH_TIME = time.monotonic()
# The signals that this process has received. No signal is ever removed: SIGTERM stops the whole launch, not only the current
# job of a sweep.
_received_signals: set[int] = set()


class TrainingStopped(SystemExit):
    """A run stopped on SIGTERM or at its time limit, and its progress is saved.

    This is not an error. As a SystemExit without a code it ends the process with exit status 0.
    """


@contextmanager
def handle_sigterm() -> Iterator[None]:
    """Record SIGTERM in this context, for `stop_requested`. Outside this context, SIGTERM ends the process at once.

    SIGTERM may arrive several times, because torchrun forwards it to ranks that have received it themselves.
    """
    previous = signal.signal(signal.SIGTERM, lambda number, _: _received_signals.add(number)) or signal.SIG_DFL
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def stop_requested(time_limit_s: float | None) -> bool:
    """Return whether this rank has received SIGTERM, or more than `time_limit_s` seconds have passed since the launch."""
    return bool(_received_signals) or (time_limit_s is not None and time.monotonic() - LAUNCH_TIME > time_limit_s)


def any_rank_stop_requested(time_limit_s: float | None) -> bool:
    """Return, on every rank, whether `stop_requested` is true on any rank. All ranks must call this function."""
    requested = torch.tensor(int(stop_requested(time_limit_s)))
    dist.all_reduce(requested, dist.ReduceOp.MAX)
    return bool(requested)


@contextmanager
def acquire_run_directory(directory: Path) -> Iterator[None]:
    """Lock the directory of a run, because two launches would overwrite each other's metrics and checkpoints.

    Rank 0 holds the lock on behalf of all ranks. The operating system releases the lock when the process of rank 0 ends,
    however it ends.

    Raises:
        ConfigError: on every rank, if another process holds the lock.
    """
    with ExitStack() as lock:
        with sync_errors():
            if dist.get_rank() == 0:
                directory.mkdir(parents=True, exist_ok=True)
                try:
                    # Without flock, filelock would fall back to a marker file, which outlives a process that is killed.
                    lock.enter_context(FileLock(directory / ".lock", blocking=False, fallback_to_soft=False))
                except Timeout:
                    raise ConfigError(f"another process trains in {directory}: wait for it, or choose another name") from None
                except OSError:
                    pass  # The file system does not support locks, which must not prevent training.
        yield

"""Stop a run cleanly, and keep two processes from training in the same directory.

A run stops on SIGTERM, on Ctrl-C or at its time limit. It then completes its current step, saves a checkpoint and exits, so
that launching it again resumes it.
"""

import os
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

# The signals that this process has received. No signal is ever removed: a signal stops the whole launch, not only the current
# job of a sweep.
_received_signals: set[int] = set()
HANDLED_SIGNALS = (signal.SIGTERM, signal.SIGINT)
INTERRUPTED = "Ctrl-C: the run saves a checkpoint after this step and ends; a second Ctrl-C ends it without saving\n"


def _launch_time() -> float:
    """Return when the launch began, on the clock of `time.monotonic`: the start of torchrun, or else of this process."""
    process = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()
    try:
        # The 22nd field is the start of the process in clock ticks since the machine was booted. The second field, the name of
        # the process in brackets, may contain spaces.
        ticks = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:  # only Linux has this file
        return time.monotonic()
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - age


LAUNCH_TIME = _launch_time()


class TrainingStopped(SystemExit):
    """A run stopped on a signal or at its time limit, and its progress is saved.

    This is not an error. As a SystemExit without a code it ends the process with exit status 0.
    """


@contextmanager
def handle_stop_signals() -> Iterator[None]:
    """Record SIGTERM and SIGINT in this context, for `stop_requested`. Outside this context, they end the process at once.

    SIGTERM may arrive several times, because torchrun forwards it to ranks that have received it themselves. Ctrl-C sends
    SIGINT. After the first SIGINT, a second one ends the process at once, even if it is waiting for another rank. SIGTERM does
    the same then, because a torchrun that is interrupted twice dies, and its death sends SIGTERM to the ranks.
    """

    def record(number: int, _: object) -> None:
        _received_signals.add(number)
        if number == signal.SIGINT:
            for each in HANDLED_SIGNALS:
                signal.signal(each, signal.SIG_DFL)
            if dist.get_rank() == 0:
                # print() must not be used here, because the signal may have interrupted another print().
                os.write(2, INTERRUPTED.encode())

    previous = {number: signal.signal(number, record) or signal.SIG_DFL for number in HANDLED_SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def stop_requested(time_limit_s: float | None) -> bool:
    """Return whether this rank has received a signal, or more than `time_limit_s` seconds have passed since the launch."""
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

"""Stop a run cleanly, and prevent two processes from training in the same directory.

A run stops on SIGTERM, SIGHUP or Ctrl-C, or at its time limit. The run then completes its step, saves a checkpoint and exits.
However, an evaluation, or a step with several micro-steps, is interrupted. The next launch resumes from the checkpoint, and
repeats the interrupted work.
"""

import errno
import logging
import os
import signal
import threading
import time
from collections.abc import Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from filelock import FileLock, Timeout

from ringattn.train.files import replace_link
from ringattn.train.parallel.ranks import sync_errors
from ringattn.train.settings.config import ConfigError

log = logging.getLogger(__name__)

NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL)

# Received signals are never removed, so that they stop all jobs of a sweep.
_received_signals: set[int] = set()
# A flag with which other parts of the run request a stop
_is_stop_requested = False
HANDLED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
REQUESTED = "{}: the run ends after this step or micro-step, and saves a checkpoint{}\n"


def _launch_time() -> float:
    """Return the start time of torchrun, or else of this process, on the clock of `time.monotonic`."""
    process = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()
    try:
        # Field 22 of the file is the process's start time in clock ticks since boot.
        ticks = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:  # The file exists only on Linux.
        return time.monotonic()
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - age


LAUNCH_TIME = _launch_time()


class TrainingStopped(SystemExit):
    """Raised after a run has stopped on request and saved its progress. If SystemExit has no code, the exit status is 0."""


class StoppedEarly(Exception):
    """Raised on all ranks if any rank was asked to stop during a step or an evaluation."""


@contextmanager
def handle_stop_signals() -> Generator[None]:
    """Record SIGTERM, SIGHUP and SIGINT for `stop_requested` inside the context.

    Outside the context, a stop signal ends the process at once. A process that ignores SIGHUP, as under nohup, keeps ignoring
    SIGHUP. The same SIGTERM may arrive several times from torchrun. After the first Ctrl-C, another Ctrl-C or a SIGTERM from
    torchrun ends the process at once.
    """

    announced = set[int]()

    def receive() -> None:
        """Record signals and print a message. This thread also works while the main thread is in a call that never returns."""
        while data := os.read(pipe, 1):
            (number,) = data
            if number not in handled:
                continue
            _received_signals.add(number)
            if signal.SIGINT in announced and number != signal.SIGHUP:
                os._exit(130)  # The main thread has not called `record`.
            if number not in announced and dist.get_rank() == 0:
                is_interrupt = number == signal.SIGINT
                name = "Ctrl-C" if is_interrupt else signal.Signals(number).name
                text = REQUESTED.format(name, "; a second Ctrl-C ends it without saving" if is_interrupt else "")
                with suppress(OSError):  # The terminal may be closed.
                    os.write(2, text.encode())
            announced.add(number)

    def record(number: int, _: object) -> None:
        _received_signals.add(number)
        if number == signal.SIGINT:
            for each in (signal.SIGINT, signal.SIGTERM):
                signal.signal(each, signal.SIG_DFL)

    global _is_stop_requested
    handled = [each for each in HANDLED_SIGNALS if each != signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN]
    pipe, end = os.pipe()
    os.set_blocking(end, False)
    previous = {number: signal.signal(number, record) or signal.SIG_DFL for number in handled}
    previous_end = signal.set_wakeup_fd(end, warn_on_full_buffer=False)
    receiver = threading.Thread(target=receive, daemon=True)
    receiver.start()
    # torchrun also signals the children of each rank. Block the signals in the main thread: compilers such as ptxas inherit the
    # mask, so they are not killed. (Up to torch 2.14, torch.compile waits forever for compiler processes that have died.) The
    # thread above still receives the signals.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, handled)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.set_wakeup_fd(previous_end)
        for number, handler in previous.items():
            signal.signal(number, handler)
        _is_stop_requested = False
        os.close(end)
        receiver.join()
        os.close(pipe)


def request_stop() -> None:
    """Make `stop_requested` true on this rank until `handle_stop_signals` ends. Any thread may call this function."""
    global _is_stop_requested
    _is_stop_requested = True


def stop_requested(time_limit_s: float | None) -> bool:
    """Return whether this rank must stop: after a signal, after `request_stop`, or `time_limit_s` seconds after the launch.

    Any thread may call this function. The function notices signals even during a long system call of the main thread.
    """
    is_requested = _is_stop_requested or bool(_received_signals)
    return is_requested or (time_limit_s is not None and time.monotonic() - LAUNCH_TIME > time_limit_s)


def any_rank_stop_requested(time_limit_s: float | None) -> bool:
    """Return whether `stop_requested` is true on any rank. All ranks call this function."""
    requested = torch.tensor(int(stop_requested(time_limit_s)), device="cpu")
    dist.all_reduce(requested, dist.ReduceOp.MAX)
    return bool(requested)


@contextmanager
def acquire_run_directory(directory: Path) -> Generator[None]:
    """Lock the directory of a run, so that two launches do not overwrite each other's files.

    Rank 0 holds the lock for all ranks. The operating system releases the lock when the process ends, even if the process is
    killed.

    Raises:
        ConfigError: on every rank, if another process holds the lock, or if the file `.lock` cannot be used.
    """
    with ExitStack() as lock:
        with sync_errors():
            if dist.get_rank() == 0:
                lock.enter_context(_lock(directory))
        yield


def _lock(directory: Path) -> AbstractContextManager[Any]:
    directory.mkdir(parents=True, exist_ok=True)
    path = replace_link(directory / ".lock")
    try:
        # By default, filelock falls back to a marker file, which would survive a kill.
        return FileLock(path, fallback_to_soft=False).acquire(blocking=False)
    except Timeout:
        raise ConfigError(f"another process trains in {directory}: wait for it, or choose another name") from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            reason = "it is a folder" if path.is_dir() else error.strerror
            raise ConfigError(f"{path} cannot be locked ({reason}): remove it, or choose another name") from None
        log.warning(f"{'lock':<12}none, because the file system has no locks: do not launch this run twice")
        return nullcontext()

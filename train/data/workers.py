"""Run a function on many parts of a corpus, in one or several processes, and show the progress."""

import logging
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from types import ModuleType
from typing import Any, TypeVar

from ringattn.train.settings.config import ConfigError

log = logging.getLogger(__name__)
Task = TypeVar("Task")
Result = TypeVar("Result")
Add = Callable[[int], None]  # counts bytes that have been processed

# Fewer bytes per process would take less time than the start of the processes.
MIN_BYTES = 2**22
# Computing checksums, or tokenising to bytes, is about FAST times as fast as other tokenisation.
FAST = 16
SHOW_EVERY = 10.0  # seconds between two lines of progress
FLUSH_BYTES = 2**20  # after so many bytes, a process updates the shared counter


class Stopped(Exception):
    """Another process has failed, so stop."""


class Progress:
    """Logs the amount of data that has been processed, its speed and the remaining time."""

    def __init__(self, name: str, total: int):
        self._name, self._total, self._begin = name, total, time.monotonic()
        self._shown, self._done = self._begin, 0

    def add(self, size: int) -> None:
        self.show(self._done + size)

    def show(self, done: int, at_end: bool = False) -> None:
        """Log the progress at most every SHOW_EVERY seconds. Short work is never logged."""
        self._done, now = done, time.monotonic()
        if now - self._shown < SHOW_EVERY and not (at_end and self._shown > self._begin):
            return
        self._shown, seconds = now, now - self._begin
        left = seconds * max(self._total - done, 0) / max(done, 1)
        amount = f"{done / 1e9:.2f} of {self._total / 1e9:.2f} GB" if self._total > done else f"{done / 1e9:.2f} GB"
        log.info(f"{self._name:<12}{amount}, {done / 1e6 / seconds:.1f} MB/s, {_duration(left)} left")


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


@cache
def log_once(message: str, level: int = logging.INFO) -> None:
    """Log a message once, and only on rank 0."""
    if rank() == 0:
        log.log(level, message)


def rank() -> int:
    """Return the rank without importing torch. Without a process group, read RANK, which torchrun or the loader sets."""
    dist: Any = sys.modules.get("torch.distributed")
    return dist.get_rank() if dist and dist.is_initialized() else int(os.environ.get("RANK", "0"))


def default_processes(ranks: int) -> int:
    """By default, each rank uses an equal share of the host's cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(cores // ranks, 1)


def run_tasks(
    name: str,
    function: Callable[[Any, Task, Add], Result],
    state: Any,
    tasks: Sequence[Task],
    sizes: Sequence[int],
    num_proc: int,
    is_fast: bool = False,
) -> list[Result]:
    """Return `function(state, task, add)` for all tasks, in their order.

    Args:
        name: the name of the work in messages.
        function: a module-level function, which calls `add` with the number of bytes that it has processed.
        state: data for all tasks, which each process receives once.
        sizes: the number of bytes of each task.
        num_proc: the largest number of processes.
        is_fast: whether tasks are so fast that only large corpora need several processes.

    Raises:
        ConfigError: a process has ended. Errors of `function` are raised as well.
    """
    progress = Progress(name, sum(sizes))
    num_proc = min(num_proc, len(tasks), 1 + sum(sizes) // (MIN_BYTES * (FAST if is_fast else 1)))
    if num_proc <= 1:
        results = [_run_counted(function, state, task, size, progress.add) for task, size in zip(tasks, sizes, strict=True)]
    else:
        results = _run_in_processes(progress, function, state, tasks, sizes, num_proc)
    progress.show(sum(sizes), at_end=True)
    return results


def _run_counted(function: Callable[..., Result], state: Any, task: Any, size: int, add: Add) -> Result:
    counted = 0

    def count(number: int) -> None:
        nonlocal counted
        counted += number
        add(number)

    result = function(state, task, count)
    add(size - counted)
    return result


def _run_in_processes(
    progress: Progress, function: Callable[..., Any], state: Any, tasks: Sequence[Any], sizes: Sequence[int], num_proc: int
) -> list[Any]:
    pickled = pickle.dumps(state)  # The pool would pickle a large tokenizer for every process.
    with _start_without_main_module():
        context = start_server(function.__module__)
        counter, stop = context.Value("q", 0), context.Event()
        pool = ProcessPoolExecutor(num_proc, context, _begin_process, (pickled, counter, stop))
    processes = pool._processes
    try:
        with _start_without_main_module():
            futures = [pool.submit(_run_in_process, function, task, size) for task, size in zip(tasks, sizes, strict=True)]
        pending = set(futures)
        while pending:
            done, pending = wait(pending, timeout=1, return_when=FIRST_EXCEPTION)
            progress.show(counter.value)
            if any(future.exception() for future in done):
                break
        # If several tasks failed, the first error is raised.
        results = [future.result() for future in futures if future.done()]
    except BrokenProcessPool:
        pool.shutdown(cancel_futures=True)
        raise ConfigError(_describe_death([process.exitcode for process in processes.values()])) from None
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)
    for message in dict.fromkeys(message for _, messages in results for message in messages):
        log.warning(message)
    return [result for result, _ in results]


def start_server(module: str) -> ForkServerContext:
    """Start a fork server, a process that imports `module` once and then forks worker processes.

    A fork of this process would copy locks that its threads hold. The fork server has no threads.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([module])
    forkserver.ensure_running()
    return context


@contextmanager
def _start_without_main_module() -> Generator[None]:
    """Hide the main module from processes that start in the `with` block.

    The main module may lack `if __name__ == "__main__"`.

    Raises:
        ConfigError: a process could not start.
    """
    main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    try:
        yield
    except (OSError, EOFError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"a process that reads the corpus could not start ({reason}): see its last lines above, or lower data.num_proc"
        ) from error
    finally:
        sys.modules["__main__"] = main


def _describe_death(statuses: Sequence[int | None]) -> str:
    # The pool ends all other processes with SIGTERM.
    status = next((each for each in statuses if each not in (None, 0, -signal.SIGTERM)), 0)
    if status == -signal.SIGKILL:
        reason = "was killed, perhaps because the host has too little memory: lower data.num_proc"
    else:
        reason = f"ended with exit status {status}: see its last lines above"
    return f"a process that reads the corpus {reason}, and launch again, which continues the work"


_shared: tuple[Any, Any, Any] = (None, None, None)
_messages = list[str]()


class _Collector(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        _messages.append(record.getMessage())


def _begin_process(state: bytes, *shared: Any) -> None:
    global _shared
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    logging.getLogger().handlers[:] = [_Collector(logging.WARNING)]
    _shared = (pickle.loads(state), *shared)
    # Exit if the parent process is killed, instead of waiting forever for a task.
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run_in_process(function: Callable[..., Any], task: Any, size: int) -> tuple[Any, list[str]]:
    state, counter, stop = _shared
    waiting = 0

    def add(number: int, is_last: bool = False) -> None:
        nonlocal waiting
        waiting += number
        if waiting >= FLUSH_BYTES or is_last:
            with counter.get_lock():
                counter.value += waiting
            waiting = 0
            if stop.is_set():
                raise Stopped

    result = _run_counted(function, state, task, size, add)
    add(0, is_last=True)
    messages = _messages[:]
    _messages.clear()
    return result, messages

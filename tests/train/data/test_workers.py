"""Tasks in one process and in several."""

import logging
import os
import signal
import subprocess
import sys
import time
from unittest.mock import Mock

import pytest

from ringattn.train.data import workers
from ringattn.train.data.workers import Progress, run_tasks
from ringattn.train.settings.config import ConfigError
from tests.train.launch import environment

TASKS = list(range(6))


def square(state: int, task: int, add: workers.Add) -> int:
    add(10)
    logging.getLogger("a").warning("seen once")
    return state * task**2


def fail(state: str, task: int, add: workers.Add) -> int:
    """Fail at task 1. The other tasks would take long."""
    if task == 1:
        if state == "exit":
            end(7)
        if state == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ConfigError("task 1 is faulty")
    for _ in range(1000):
        time.sleep(0.1)
        add(workers.FLUSH_BYTES)
    return task


@pytest.fixture(params=[1, 2])
def num_proc(request, monkeypatch) -> int:
    monkeypatch.setattr(workers, "MIN_BYTES", 1)
    return request.param


def test_results_are_in_the_order_of_the_tasks(num_proc, caplog):
    assert run_tasks("square", square, 2, TASKS, [100] * 6, num_proc) == [2 * task**2 for task in TASKS]
    assert caplog.messages.count("seen once") == (1 if num_proc == 2 else 6)


def test_an_error_ends_the_other_processes(monkeypatch):
    monkeypatch.setattr(workers, "MIN_BYTES", 1)
    begin = time.monotonic()
    with pytest.raises(ConfigError, match="task 1 is faulty"):
        run_tasks("fail", fail, "raise", TASKS, [100] * 6, 2)
    with pytest.raises(ConfigError, match=r"was killed.*lower data\.num_proc"):
        run_tasks("fail", fail, "kill", TASKS, [100] * 6, 2)
    with pytest.raises(ConfigError, match="ended with exit status 7: see its last lines"):
        run_tasks("fail", fail, "exit", TASKS, [100] * 6, 2)
    assert time.monotonic() - begin < 60, "the other tasks were not stopped"


def test_a_script_needs_no_guard(tmp_path):
    """The processes do not run the script again, although it does not check `__name__`."""
    script, main = tmp_path / "script.py", "print('main')\nfrom ringattn.train.data import tokenisation, workers\n"
    call = f"workers.run_tasks('read', tokenisation._hash_part, None, {[(__file__, 0, 5)] * 2}, [1, 1], 2)"
    script.write_text(f"{main}workers.MIN_BYTES = 1\nprint(len({call}))\n")
    shown = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, env=environment(tmp_path))
    assert (shown.stdout, shown.stderr) == ("main\n2\n", "")


class Unreadable:
    """Unpickling this state ends the process."""

    def __reduce__(self) -> tuple[object, ...]:
        return end, (5,)


def end(status: int) -> None:
    os._exit(status)


def test_a_process_that_cannot_start_is_an_error(monkeypatch):
    monkeypatch.setattr(workers, "MIN_BYTES", 1)
    with pytest.raises(ConfigError, match=r"a process that reads the corpus (ended with exit status 5|could not start)"):
        run_tasks("square", square, Unreadable(), TASKS, [100] * 6, 2)
    monkeypatch.setattr(workers.ProcessPoolExecutor, "submit", Mock(side_effect=BrokenPipeError("Broken pipe")))
    with pytest.raises(ConfigError, match=r"could not start \(BrokenPipeError: Broken pipe\).*lower data.num_proc"):
        run_tasks("square", square, 2, TASKS, [100] * 6, 2)


def test_progress_shows_the_speed_and_the_remaining_time(monkeypatch, caplog):
    now = [0.0]
    monkeypatch.setattr(workers.time, "monotonic", lambda: now[0])
    caplog.set_level(logging.INFO)
    progress = Progress("tokenise", 4 * 10**9)
    for now[0], size in ((1.0, 10**8), (20.0, 9 * 10**8), (21.0, 10**8)):
        progress.add(size)
    now[0] = 80.0
    progress.show(4 * 10**9, at_end=True)
    assert caplog.messages == [
        "tokenise    1.00 of 4.00 GB, 50.0 MB/s, 0:01:00 left",
        "tokenise    4.00 GB, 50.0 MB/s, 0:00:00 left",
    ]

"""Tests of the helper that runs a function on several ranks."""

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests import distributed
from tests.distributed import RankPool, run_ranks


def sum_of_ranks(expected: int) -> None:
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total)
    assert total.item() == expected


def raise_on_rank_1() -> None:
    dist.barrier()  # afterwards, all ranks are in this function
    if dist.get_rank() == 1:
        raise RuntimeError("rank 1 was told to fail")
    time.sleep(1000)  # a barrier would raise an exception on this rank, too


def die_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1000)


def sleep_forever(directory: Path) -> None:
    (directory / f"{dist.get_rank()}.pid").write_text(str(os.getpid()))
    time.sleep(1000)


def check_environment(value: str) -> None:
    assert os.environ["RINGATTN_TEST"] == value
    assert torch.get_num_threads() == 1


def connect_again(directory: Path, failing: int) -> None:
    """Create the group again. The first attempt fails on one rank."""
    rank, ranks, create = dist.get_rank(), dist.get_world_size(), dist.init_process_group
    dist.destroy_process_group()
    distributed.CONNECT_TIMEOUT = timedelta(seconds=2)

    def fail(*arguments: object, **options: object) -> None:
        dist.init_process_group = create
        raise RuntimeError("Gloo connectFullMesh failed")

    if rank == failing:
        dist.init_process_group = fail
    distributed._connect("gloo", dist.FileStore(str(directory / "second"), ranks), rank, ranks)
    sum_of_ranks(3)


def exit_with_a_key(directory: Path) -> None:
    store = dist.FileStore(str(directory / "store"), dist.get_world_size())
    assert not store.check(["key"])
    dist.barrier()
    store.set("key", "value")
    os._exit(0)


def test_ranks_ignore_the_store_of_earlier_ranks(tmp_path: Path) -> None:
    """Ranks that exit at once do not delete their store."""
    for _ in range(2):
        run_ranks(exit_with_a_key, 2, tmp_path, tmp_path)
        assert (tmp_path / "store").exists()


@pytest.mark.slow
def test_ranks_connect_again_if_gloo_fails_on_one_rank(tmp_path: Path) -> None:
    run_ranks(connect_again, 3, tmp_path / "ranks", tmp_path, 1)


def test_ranks_work_after_a_rank_failed(tmp_path: Path) -> None:
    """The error names the rank's own exception, and a later call is not affected."""
    run_ranks(sum_of_ranks, 3, tmp_path / "before", 3)
    with pytest.raises(mp.ProcessRaisedException, match=r"in raise_on_rank_1(.|\n)*RuntimeError: rank 1 was told to fail"):
        run_ranks(raise_on_rank_1, 2, tmp_path / "raises")
    with pytest.raises(mp.ProcessExitedException, match="SIGKILL"):
        run_ranks(die_on_rank_1, 2, tmp_path / "dies")
    run_ranks(sum_of_ranks, 4, tmp_path / "after", 6)


def test_ranks_that_hang_report_their_stacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a rank exceeds the timeout, the caller fails, and the error names the rank's current function."""
    for timeout in (0.5, 5, 50):  # on a busy machine, the ranks need longer until they call the function
        monkeypatch.setattr(distributed, "TIMEOUT", timeout)
        with pytest.raises(mp.ProcessExitedException) as failure:
            run_ranks(sleep_forever, 2, tmp_path / str(timeout), tmp_path)
        stacks = "".join(failure.value.__notes__)
        assert "Timeout (0:00:" in stacks
        if "in sleep_forever" in stacks:
            return
    raise AssertionError(stacks)


def test_an_interrupted_caller_leaves_no_rank_behind(tmp_path: Path) -> None:
    """If pytest's timeout interrupts the caller, the ranks are killed."""
    pids: list[str] = []

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def interrupt_when_both_run() -> None:
        while len(pids) < 2 or not all(pids):
            pids[:] = [path.read_text() for path in tmp_path.glob("*.pid")]
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGALRM)

    previous = signal.signal(signal.SIGALRM, interrupt)
    threading.Thread(target=interrupt_when_both_run, daemon=True).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run_ranks(sleep_forever, 2, tmp_path, tmp_path)
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert not any(Path("/proc", pid).exists() for pid in pids)


def check_process(directory: Path) -> None:
    """Check that every call reaches the same process."""
    path = directory / f"{dist.get_rank()}.pid"
    if path.exists():
        assert path.read_text() == str(os.getpid())
    path.write_text(str(os.getpid()))
    sum_of_ranks(3)


def test_a_pool_runs_several_functions_on_the_same_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a rank fails, exits or hangs, the error contains its traceback or stack, and the next function runs on new ranks."""
    monkeypatch.setattr(distributed, "GRACE", 0.2)
    pool = RankPool(3, tmp_path, "gloo")
    for _ in range(2):
        pool.run(check_process, tmp_path)
    for function, report in (
        (raise_on_rank_1, "rank 1: Traceback(.|\n)*was told to fail(.|\n)*rank 0 did not return(.|\n)*in raise_on_rank_1"),
        (die_on_rank_1, "rank 1: exited with status -9"),
    ):
        with pytest.raises(AssertionError, match=report):
            pool.run(function)
        pool.run(sum_of_ranks, 3)
    pool.close()
    assert pool.starts == 3


@pytest.mark.parametrize("value", ["first", "second"])
def test_ranks_get_the_environment_of_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """The environment of each call reaches the ranks, although the server is started only once."""
    monkeypatch.setenv("RINGATTN_TEST", value)
    run_ranks(check_environment, 1, tmp_path, value)

"""Tests of the attempts of a job that torchrun restarts."""

import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from ringattn.train.parallel.launcher import begin_attempt, launch_time
from tests.train.launch import SMALL, descendants, start, wait_until, write_corpus


def begin_on_all_ranks(store: dist.Store, ranks: int) -> list[tuple[dist.Store, int]]:
    """Call `begin_attempt` at the same time on several ranks, which are threads."""
    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(lambda rank: begin_attempt(store, rank, ranks), range(ranks)))


def test_every_attempt_has_a_number_and_keys_of_its_own() -> None:
    store = dist.HashStore()
    for attempt in (1, 2, 3):
        begun = begin_on_all_ranks(store, 3)
        assert [number for _, number in begun] == [attempt] * 3
        assert not any(own.check(["key"]) for own, _ in begun)
        begun[attempt - 1][0].set("key", "value")
        assert all(own.get("key") == b"value" for own, _ in begun)


def check_that_one_rank_waits(store: dist.Store, rank: int, attempt: int) -> None:
    """The first of two ranks must wait for the second, and both must agree on the number of the attempt."""
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(begin_attempt, store, rank, 2)
        time.sleep(0.2)
        assert not first.done()
        assert threads.submit(begin_attempt, store, 1 - rank, 2).result(60)[1] == first.result(60)[1] == attempt


def test_a_rank_that_was_killed_while_it_waited_does_not_mislead_the_next_attempt() -> None:
    """The name of a dead process is in the store, and rank 0 of the next attempt starts before the other rank."""
    store = dist.HashStore()
    store.set("name/1", "a dead process")
    check_that_one_rank_waits(store, rank=0, attempt=1)


def test_a_rank_waits_for_the_reply_of_its_own_attempt() -> None:
    """The store still contains the reply to the previous process of the same rank."""
    store = dist.HashStore()
    begin_on_all_ranks(store, 2)
    check_that_one_rank_waits(store, rank=1, attempt=2)


def test_the_time_of_the_launch_is_that_of_the_first_attempt() -> None:
    store = dist.HashStore()
    first = launch_time(store)
    time.sleep(1.1)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", first)
    assert launch_time(store) == first


@pytest.mark.slow
def test_a_restarted_run_without_a_name_continues_in_its_directory(tmp_path) -> None:
    """One worker is killed. torchrun restarts all ranks, which resume from the newest checkpoint."""
    settings = [*SMALL, f"data.path={write_corpus(tmp_path / 'corpus')}", "trainer.steps=40", "trainer.checkpoint_every=5"]
    with start(2, tmp_path, *settings, options=["--max-restarts=3"]) as process:
        wait_until(lambda: any(tmp_path.glob("outputs/*/checkpoints/step_*")), process, tmp_path)
        os.kill(max(descendants(process.pid)), signal.SIGKILL)
        assert process.wait(200) == 0
    output = (tmp_path / "output.log").read_text()
    (directory,) = tmp_path.glob("outputs/*")
    assert re.search(r"^attempt +2\b", output, re.MULTILINE)
    assert re.search(rf"^resumed +\S*{directory.name}", output, re.MULTILINE)
    steps = [int(step) for step in re.findall(r'"step": (\d+)', (directory / "metrics.jsonl").read_text())]
    assert steps == list(range(1, 41))

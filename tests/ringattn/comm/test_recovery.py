"""Tests of calls after an exception: they are exact, or all ranks raise an error that names the rank and its exception."""

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from ringattn import ulysses
from ringattn.comm import connect, recovery, watchdog
from ringattn.comm.transport import NoRecovery, in_call
from ringattn.comm.watchdog import RingFault
from scripts.check.exceptions import OPERATIONS, Injected, Injector, Problem
from tests.distributed import RankPool
from tests.ringattn.comm.fake_gpus import Capture, ProcessEnded, RunOnHost, rank_state

CPU = torch.device("cpu")
ERRORS = Injected, KeyboardInterrupt, RuntimeError


def run(problem: Problem, group: object, injector: Injector, in_backward: bool = False, position: int | None = None) -> None:
    """Run both passes, and check the results. Raise an exception at a kernel of one of the passes."""
    error = ERRORS[(position or 0) % 3]
    rank_state.runs_ahead = position is not None and not in_backward
    injector.arm(None if in_backward else position, error)
    results = problem.forward(group, "auto")
    if in_backward:
        rank_state.runs_ahead = position is not None
        injector.arm(position, error)
    results[1:] = problem.backward(results[0], results[1:])
    assert problem.error([x.detach() for x in results]) < 1e-4


def fail_at_every_kernel(rank: int, ranks: int, group: object, operation: str, injector: Injector, shift: int = 0) -> None:
    """On all ranks, raise an exception at each kernel of each pass in turn. The following call must be exact.

    Rank r fails `shift` * r kernels later than rank 0. The number of kernels is the same on all ranks.
    """
    problems = [Problem(operation, rank, ranks, CPU, seed) for seed in range(2)]
    for in_backward in (False, True)[: 1 + (operation != "decoding")]:
        run(problems[0], group, injector, in_backward)
        if not in_backward:
            injector.arm(None)
            problems[0].forward(group, "auto")
        count = injector.count
        assert count >= 2
        for i in range(count):
            position = 1 + (i + shift * rank) % count
            with pytest.raises(ERRORS[position % 3], match="injected"):
                run(problems[0], group, injector, in_backward, position)
            rank_state.runs_ahead = False
            run(problems[1], group, injector)


# Decoding sends plain messages, for which the host of a fake GPU waits, so its ranks cannot fail at different kernels.
@pytest.mark.parametrize(
    ("operation", "shift"),
    [(x, 0) for x in OPERATIONS] + [("kv", 1), *(pytest.param(x, 1, marks=pytest.mark.slow) for x in ("state", "ulysses"))],
)
def test_calls_over_nvlink_are_exact_after_an_exception(
    operation: str, shift: int, run_on_host: RunOnHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flags and messages of the abandoned call are discarded, even if the ranks fail at different kernels."""
    monkeypatch.setattr(ulysses, "head_chunks_for_overlap", lambda *_: 2)
    injector = Injector(threading.local())
    with injector.installed():
        run_on_host(3, lambda rank, group: fail_at_every_kernel(rank, 3, group, operation, injector, shift))


def test_an_exception_over_nvlink_on_one_rank_ends_all_ranks(run_on_host: RunOnHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank waits for the GPU, so its watchdog ends the process."""
    monkeypatch.setattr(watchdog, "HEARTBEAT_INTERVAL", 0.02)
    monkeypatch.setattr(watchdog, "GRACE", 0.5)
    injector, message = Injector(threading.local()), "rank 1 left call 3 of the group because of Injected: injected, but rank 0"

    def on_rank(rank: int, group: object) -> None:
        problem = Problem("kv", rank, 2, CPU, 0)
        run(problem, group, injector)
        if rank == 0:
            with pytest.raises(ProcessEnded, match=message):
                run(problem, group, injector)
        else:
            injector.arm(1)
            with pytest.raises(Injected):
                problem.forward(group, "auto")
            with pytest.raises(RingFault, match=message):
                run(problem, group, injector)

    with injector.installed():
        run_on_host(2, on_rank)


def test_an_exception_in_a_capture_resets_nothing(run_on_host: RunOnHost, capture: Capture) -> None:
    """A capture only records work, so the next capture need not and could not wait for other ranks."""
    injector = Injector(threading.local())

    def on_rank(rank: int, group: object) -> None:
        problem = Problem("kv", rank, 2, CPU, 0)
        run(problem, group, injector)
        transport = connect.connect(group.group_name, CPU)
        transport.watchdog.on_gpu = capture.active = True
        with pytest.raises(Injected), in_call(transport):
            raise Injected
        assert transport.recovery.left is None
        assert not transport.recovery.depth
        capture.active = False
        with pytest.raises(Injected), in_call(transport):
            raise Injected
        capture.active = True
        with pytest.raises(RuntimeError, match="call attention once before the capture"), in_call(transport):
            pass
        transport.watchdog.on_gpu = capture.active = False
        run(problem, group, injector)

    run_on_host(2, on_rank)


@pytest.fixture(scope="module")
def gloo_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Two processes that are connected by gloo, for all tests of this module."""
    pool = RankPool(2, tmp_path_factory.mktemp("ranks"), "gloo")
    yield pool
    pool.close()


def check_every_kernel(operation: str) -> None:
    """Run `fail_at_every_kernel` over gloo."""
    injector = Injector(SimpleNamespace())
    with injector.installed(), patch.object(ulysses, "head_chunks_for_overlap", lambda *_: 2):
        fail_at_every_kernel(dist.get_rank(), 2, dist.group.WORLD, operation, injector)
    x = torch.ones(1)
    dist.all_reduce(x)  # messages of abandoned calls must not disturb the group of the caller
    assert x == 2


@pytest.mark.parametrize("operation", OPERATIONS)
def test_calls_over_gloo_are_exact_after_an_exception(operation: str, gloo_ranks: RankPool) -> None:
    """The messages of the abandoned call are discarded."""
    gloo_ranks.run(check_every_kernel, operation)


def check_fault(operation: str, in_backward: bool) -> None:
    """Raise an exception on rank 1 only, at each kernel of a pass. Every rank must raise one error. A new group is exact."""
    rank, injector, count = dist.get_rank(), Injector(SimpleNamespace()), 1
    problem, position = Problem(operation, rank, 2, CPU, 0), 0
    waits = patch.object(recovery, "PATIENCE", 0.3), patch.object(watchdog, "HEARTBEAT_INTERVAL", 0.05)
    with injector.installed(), waits[0], waits[1]:
        while position < count:
            position += 1
            group = dist.new_group()
            run(problem, group, injector, in_backward)
            count = injector.count if in_backward else 2
            errors = []
            for is_faulty in (True, False, False):
                injector.arm(None)
                try:
                    run(problem, group, injector, in_backward, position if is_faulty and rank else None)
                except (*ERRORS, RingFault) as error:
                    errors.append(error)
            faults = [str(error) for error in errors if isinstance(error, RingFault)]
            assert [type(error) for error in errors][: len(errors) - len(faults)] == [ERRORS[position % 3]] * rank
            name = ERRORS[position % 3].__name__
            assert re.match(
                rf"ringattn: rank 1 left call \d of the group because of {name}: injected, but rank 0 did not", faults[0]
            )
            assert len(faults) >= 2 - rank
            assert len(set(faults)) == 1
            dist.destroy_process_group(group)  # its watchdog ends


@pytest.mark.parametrize(
    ("operation", "in_backward"),
    [
        pytest.param(operation, in_backward, marks=[pytest.mark.slow] * ((i + in_backward) % 2))
        for i, operation in enumerate(OPERATIONS)
        for in_backward in (False, True)
        if (operation, in_backward) != ("decoding", True)
    ],
)
def test_an_exception_over_gloo_on_one_rank_raises_an_error_on_all(
    operation: str, in_backward: bool, gloo_ranks: RankPool
) -> None:
    """The error names the rank and its exception. Later calls of the group raise the same error, and a new group works."""
    gloo_ranks.run(check_fault, operation, in_backward)


def test_a_ring_of_one_rank_needs_no_reset() -> None:
    """Calls of such a ring are not counted."""
    transport = connect.connect("", CPU)
    with pytest.raises(KeyError), in_call(transport):
        raise KeyError
    with in_call(transport):
        assert isinstance(transport.recovery, NoRecovery)


def stub_recovery(store: dist.Store, rank: int, num_exchanges: int = 0) -> recovery.Recovery:
    """The recovery of one of two ranks, whose transport does nothing."""
    dog = SimpleNamespace(is_capturing=lambda: False, is_stopped=lambda: False, forget_hops=lambda: None, restart=lambda: None)
    messages = SimpleNamespace(num_exchanges=num_exchanges, waiting_since=None, interrupt=lambda: None)
    transport = SimpleNamespace(
        rank=rank, size=2, watchdog=dog, messages=messages, waits_on_gpu=False, mark=tuple, reset=lambda generation: None
    )
    transport.recovery = recovery.Recovery(store, transport)
    return transport.recovery


def leave_call(rank: recovery.Recovery, calls: int = 1, error: BaseException | None = None) -> None:
    """Make calls, and leave the last one with an exception."""
    for i in range(calls):
        rank.enter()
        rank.exit((error or Injected("injected")) if i == calls - 1 else None)


@pytest.mark.parametrize(
    ("calls", "num_exchanges", "message"),
    [
        (1, 1, "rank 0 left call 1 .* but rank 1 left it at another place, so NCCL waits"),
        (2, 0, "rank 0 left call 1 .* but rank 1 left call 2 of the group because of Injected: injected"),
    ],
)
def test_ranks_that_leave_at_different_places_raise_an_error(calls: int, num_exchanges: int, message: str) -> None:
    """NCCL must have sent the same messages on all ranks, and no rank may have made more calls than another one."""
    store = dist.HashStore()
    ranks = stub_recovery(store, 0), stub_recovery(store, 1, num_exchanges)
    leave_call(ranks[0])
    leave_call(ranks[1], calls)
    for rank in ranks:
        with pytest.raises(RingFault, match=message):
            rank.prepare()


def test_a_rank_that_never_leaves_its_call_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank waits no longer than for a hop, and its next call raises the same error."""
    monkeypatch.setenv(watchdog.TIMEOUT, "0.1")
    rank = stub_recovery(dist.HashStore(), 0)
    leave_call(rank)
    for _ in range(2):
        with pytest.raises(RingFault, match=r"rank 0 left call 1 .*: injected, but rank 1 did not within 0 s"):
            rank.prepare()


def test_a_rank_may_come_to_the_call_later() -> None:
    """Before and during the call, it may still raise an exception of its own. Afterwards, it cannot."""
    store = dist.HashStore()
    first, second = stub_recovery(store, 0), stub_recovery(store, 1)
    leave_call(first, calls=2)
    for _ in range(2):
        second.look()
        assert second.fault is None
        second.enter()
        second.look()
        assert second.fault is None
        second.exit(None)
    second.look()
    assert "rank 0 left call 2" in second.fault
    assert "rank 1 did not" in second.fault
    for rank in (second, first):
        with pytest.raises(RingFault, match=second.fault):
            rank.prepare()


@pytest.mark.parametrize("is_reset", [False, True], ids=["leaves", "leaves-and-resets"])
def test_a_rank_may_leave_its_call_while_its_watchdog_reads_a_record(is_reset: bool) -> None:
    """The rank has an exception of its own, so the watchdog must not declare a fault."""
    store = dist.HashStore()
    first, second = stub_recovery(store, 0), stub_recovery(store, 1)
    leave_call(first)
    second.enter()
    read = second._first_record

    def read_and_leave() -> recovery.Record | None:
        record = read()
        second.exit(Injected("injected"))
        if is_reset:
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(recovery.Recovery.prepare, (first, second)))
            second.enter()
        return record

    second._first_record = read_and_leave
    second.look()
    assert second.fault is None
    assert second.generation == is_reset


def test_a_rank_that_leaves_because_of_a_verdict_is_no_cause() -> None:
    """All ranks report the verdict of the watchdog, and none of them reports that another rank has left the call."""
    store = dist.HashStore()
    first, second = stub_recovery(store, 0), stub_recovery(store, 1)
    leave_call(first, error=RingFault("ringattn: rank 2 gives no sign of life"))
    second.enter()
    second.exit(None)
    second.look()
    assert second.explain() is None

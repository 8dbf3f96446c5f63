"""Tests of the watchdog: a rank that dies or hangs ends all ranks of a job, soon and with one message."""

import fcntl
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ringattn import Layout, Mask, ring_attention, simulate, ulysses_attention
from ringattn.comm import connect, watchdog
from ringattn.comm.watchdog import TIMEOUT, RingFault, TransportError, Watchdog, timeout_seconds
from tests.distributed import gpu_backend, run_ranks, start_ranks

RANKS, VICTIM = 3, 1
OPERATIONS = "ring", "all-to-all"
FAULTS = "dies during the call", "dies before the call", "hangs"
ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")


def stopped_watchdog() -> Watchdog:
    """The watchdog of rank 0 of 2, whose thread has ended, so that a test can call its methods."""
    dog = Watchdog(dist.HashStore(), rank=0, size=2, device=CPU)
    dog.stop()
    return dog


def fail_in_third_call(directory: Path, operation: str, fault: str, transport: str, timeout: float) -> None:
    """Call attention again and again on every rank of a job. The victim fails at its third call."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    os.dup2(os.open(directory / f"stderr_of_rank_{rank}", os.O_CREAT | os.O_WRONLY), sys.stderr.fileno())
    watchdog.HEARTBEAT_INTERVAL, watchdog.GRACE = 0.1, 1.0
    # A rank that is alive must send a heartbeat in this time. If all ranks are alive, the next heartbeats end the wait.
    watchdog.DEAD_AFTER = 60.0 if fault == "hangs" else 5.0
    lock = open(directory / "lock", "w")  # noqa: SIM115 - the victim locks this file until it dies
    if rank == VICTIM:
        fcntl.flock(lock, fcntl.LOCK_EX)
    on_gpu, seq_len, head_dim = transport != "gloo", 8 * ranks, 16
    device = torch.device("cpu")
    if on_gpu:
        device, head_dim = torch.device("cuda", torch.cuda.current_device()), 64
    options = {"mask": Mask.causal(), "transport": transport if on_gpu else "auto"}
    if operation == "ring":
        options |= {"layout": Layout.zigzag(seq_len, ranks), "group": dist.group.WORLD, "schedule": "kv"}
    else:
        options |= {"layout": Layout.contiguous(seq_len, 1).split(ranks), "ulysses_group": dist.group.WORLD}
    attend = ring_attention if operation == "ring" else ulysses_attention
    q, k, v = (torch.ones(1, 8, ranks, head_dim, device=device) for _ in range(3))
    dog = connect.connect(dist.group.WORLD.group_name, device, options["transport"]).watchdog
    try:
        for call in range(1000):
            if call == 2:  # the first calls load or compile kernels, so only later calls have the short timeout
                if on_gpu:
                    torch.cuda.synchronize()
                os.environ[TIMEOUT] = str(timeout)
            if rank == VICTIM and call == 2:
                while dog._read_heartbeats()[rank].issued < dog.issued:  # the message names the latest hop in a heartbeat
                    time.sleep(0.01)
                if fault == "is stopped":
                    os.kill(os.getpid(), signal.SIGSTOP)
                elif fault != "hangs":
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(1000)
            if fault == "dies before the call" and call == 2:
                fcntl.flock(lock, fcntl.LOCK_EX)
                fcntl.flock(lock, fcntl.LOCK_UN)
            attend(q, k, v, **options)
        if on_gpu:
            torch.cuda.synchronize()  # the kernels wait for flags of the victim, and the watchdog ends the process
    except RingFault:
        traceback.print_exc()
        os._exit(1)


def check_fault(
    directory: Path, ranks: int, operation: str, fault: str, transport: str, timeout: float, backend: str = "gloo"
) -> None:
    """Run `fail_in_third_call` on all ranks.

    The message must name the failed rank, its last hop, and the rank and hop that waited for it.
    """
    start = time.monotonic()
    arguments = directory, operation, fault, transport, timeout
    processes = start_ranks(fail_in_third_call, ranks, directory, *arguments, backend=backend).processes
    try:
        others = [process for rank, process in enumerate(processes) if rank != VICTIM]
        for process in others:
            process.join(max(0, start + 200 - time.monotonic()))
        if fault == "is stopped":
            processes[VICTIM].kill()
        processes[VICTIM].join(60)
    finally:
        statuses = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
            process.join()
    texts = [(directory / f"stderr_of_rank_{rank}").read_text() for rank in range(ranks)]
    assert all(statuses), (statuses, texts)
    found = {match.group() for text in texts for match in re.finditer(r"ringattn: rank .* the run ends here", text)}
    assert len(found) == 1, texts
    how = "makes no other call after" if fault == "hangs" else "gives no sign of life, last seen in"
    where = "forward of the KV ring" if operation == "ring" else "all-to-all"
    message = rf"ringattn: rank {VICTIM} {how} {where}, hop \d of \d.*; rank \d waited \d+ s in {where}"
    (text,) = found
    assert re.match(message, text), texts
    assert timeout <= int(re.search(r"waited (\d+) s", text)[1]) < timeout + 90 or fault != "hangs"
    assert all("the run ends here" in text for rank, text in enumerate(texts) if rank != VICTIM)


QUICK_FAULTS = {("ring", "hangs")}


@pytest.mark.parametrize(
    ("operation", "fault"),
    [
        pytest.param(operation, fault, marks=() if (operation, fault) in QUICK_FAULTS else pytest.mark.slow)
        for operation in OPERATIONS
        for fault in FAULTS
    ],
)
def test_all_ranks_end_with_the_same_message(
    operation: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three processes over gloo."""
    monkeypatch.setenv(TIMEOUT, "100")
    check_fault(tmp_path, RANKS, operation, fault, "gloo", 3)


# If a rank dies, kernels of the other ranks wait forever for flags that this rank would have set.
FAULTS_ON_GPUS = (
    (2, "dies during the call", "ring", "p2p"),
    (2, "dies before the call", "ring", "nvlink"),
    (2, "hangs", "all-to-all", "nvlink"),
    (4, "dies during the call", "ring", "nvlink"),
    (4, "is stopped", "all-to-all", "nvlink"),
    (8, "dies during the call", "all-to-all", "nvlink"),
    (8, "hangs", "ring", "nvlink"),
    (8, "is stopped", "ring", "nvlink"),
)


@pytest.mark.gpu
@pytest.mark.parametrize(("ranks", "fault", "operation", "transport"), FAULTS_ON_GPUS)
def test_all_ranks_on_gpus_end_with_the_same_message(
    ranks: int, fault: str, operation: str, transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If there are too few GPUs, several ranks share a GPU."""
    monkeypatch.setenv(TIMEOUT, "60")
    check_fault(tmp_path, ranks, operation, fault, transport, 2, gpu_backend(ranks))


def call_on_rank_0_only() -> None:
    """Rank 0 makes the first call of a ring of three, and the other ranks make none."""
    if dist.get_rank() == 0:
        layout, q = Layout.zigzag(24, RANKS), torch.ones(1, 8, 1, 16)
        with pytest.raises(RingFault, match=r"rank 1, 2 made no call within 1 s .* rank 0"):
            ring_attention(q, q, q, layout=layout, mask=Mask.causal(), group=dist.group.WORLD)
    dist.barrier()


@pytest.mark.slow
def test_ranks_that_make_no_first_call_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The handshake of the first call ends after the timeout."""
    monkeypatch.setenv(TIMEOUT, "1")
    run_ranks(call_on_rank_0_only, RANKS, tmp_path)


EXIT = """
import atexit, threading, time
atexit.register(lambda: print("alive:", [t.name for t in threading.enumerate() if "ringattn" in t.name]))
import torch, torch.distributed as dist
from ringattn.comm import connect, watchdog
watchdog.HEARTBEAT_INTERVAL = 0.01
in_call = threading.Event()
dog = watchdog.Watchdog(dist.HashStore(), 0, 2, torch.device("cpu"))
dog._send_heartbeat = lambda: (in_call.set(), time.sleep(0.5))
assert in_call.wait(100)
"""


@pytest.mark.slow
def test_the_thread_ends_before_python_exits() -> None:
    """A thread that is inside a call of the store when Python exits would abort the process."""
    done = subprocess.run([sys.executable, "-c", EXIT], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "alive: []\n"), done.stderr


def test_a_hop_may_be_cancelled_while_the_thread_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock keeps the hop in the queue until the thread has finished reading."""

    class Hops(deque):
        def __getitem__(self, index: int) -> watchdog.Hop:
            if not is_read.is_set():
                cancellation.start()
                cancellation.join(0.2)
                is_read.set()
            return super().__getitem__(index)

    is_read = threading.Event()
    monkeypatch.setattr(watchdog, "HEARTBEAT_INTERVAL", 0.01)
    dog = Watchdog(dist.HashStore(), 0, 1, CPU)
    hop = dog.start("forward", 0, 1, ())
    cancellation = threading.Thread(target=dog.cancel, args=(hop,))
    with dog._lock:
        dog.in_flight = Hops(dog.in_flight)
    assert is_read.wait(100)
    cancellation.join(100)
    heartbeat, dog._send_heartbeat = threading.Event(), lambda: heartbeat.set()
    assert heartbeat.wait(100)
    assert not dog.in_flight
    dog.stop()


@pytest.mark.parametrize("value", ["soon", "0", "-1", "inf"])
def test_an_invalid_timeout_raises_an_error(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the variable and the value."""
    monkeypatch.setenv(TIMEOUT, value)
    with pytest.raises(TransportError, match=f"{TIMEOUT}={value}"):
        timeout_seconds()


def test_the_timeout_may_change_between_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The jobs of a sweep use the same processes and rings."""
    monkeypatch.setenv(TIMEOUT, "600")
    dog = stopped_watchdog()
    hop = dog.start("forward", 0, 1, ())
    dog._progress = (0, hop.since)
    assert dog._overdue_hop() is None
    monkeypatch.setenv(TIMEOUT, "1e-9")
    assert dog._overdue_hop() is hop


def test_a_hop_that_waits_for_earlier_hops_is_not_overdue(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timeout of a hop starts when the hop before it has finished."""
    monkeypatch.setenv(TIMEOUT, "50")
    dog = stopped_watchdog()
    hops = [dog.start("forward", t, 2, ()) for t in range(2)]
    for hop in hops:
        hop.since -= 100
    dog.finished(hops[0])
    assert dog._overdue_hop() is None
    assert dog._overdue_hop() is None
    dog._progress = (hops[0].number, time.monotonic() - 60)
    assert dog._overdue_hop() is hops[1]


def test_the_counter_of_finished_hops_may_wrap_around(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counter has 32 bits, and the hop after 2**32 - 1 has the number 2**32."""
    monkeypatch.setenv(TIMEOUT, "1e-9")
    dog = stopped_watchdog()
    dog.issued = 2**32 - 2
    hops = [dog.start("forward", t, 3, ()) for t in range(3)]
    dog.finished(hops[1])  # number 2**32
    dog._overdue_hop()
    assert list(dog.in_flight) == [hops[2]]


def test_a_pass_that_raises_an_exception_is_not_watched_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog must not end a process that has handled the exception."""
    dog = stopped_watchdog()

    def fail(*_args: object, **_options: object) -> None:
        raise MemoryError("out of memory")

    def call(rank: int, group) -> None:
        q = torch.ones(1, 4, 1, 8)
        if rank == 0:
            group.watchdog = dog
            with pytest.raises(MemoryError, match="out of memory"):
                ring_attention(q, q, q, layout=Layout.contiguous(8, 2), mask=Mask.causal(), group=group)

    monkeypatch.setattr("ringattn.kernels.dispatch.forward", fail)
    simulate(2, call)
    assert dog.issued == 1
    assert not dog.in_flight


def test_calls_are_counted_from_0_after_a_reset() -> None:
    """An exception may occur before or after an inner call, so the logs of the ranks may have different lengths."""
    store = dist.HashStore()
    dogs = [Watchdog(store, rank, 2, CPU) for rank in range(2)]
    for dog in dogs:
        dog.stop()
    for calls in ((1, 2), (1, 1)):
        for dog, count in zip(dogs, calls, strict=True):
            dog.restart()
            for i in range(count):
                dog.record_call((i, count), lambda i=i, count=count: {"window": i + count})
                dog.start("forward", 0, 1, ())
            dog._publish_calls()
    assert dogs[1]._find_difference([0]) is None
    assert [dog.issued for dog in dogs] == [1, 1]

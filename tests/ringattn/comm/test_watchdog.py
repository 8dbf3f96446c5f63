"""A rank that dies or sticks ends all ranks of a job, soon and with one message."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ringattn import KVCache, Layout, Mask, decode_attention, ring_attention, ulysses_attention
from ringattn.comm.watchdog import RingFault
from tests.distributed import run_ranks

RANKS, VICTIM = 3, 1
ROOT = Path(__file__).parents[3]


def run_rings(rank: int, store: str, what: str, fault: str, transport: str) -> None:
    """What a rank of the job does: one ring, or exchange, after the other, until at the third the victim is out."""
    device, backend = ("cpu", "gloo") if transport == "gloo" else (f"cuda:{rank}", "nccl")
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=RANKS)
    options = {"mask": Mask.causal(), "transport": "auto" if transport == "gloo" else transport}
    if what == "ring":
        options |= {"layout": Layout.zigzag(24, RANKS), "group": dist.group.WORLD, "schedule": "kv"}
    else:
        options |= {"layout": Layout.contiguous(24, 1).split(RANKS), "ulysses_group": dist.group.WORLD}
    attend = ring_attention if what == "ring" else ulysses_attention
    q, k, v = (torch.ones(1, 24 // RANKS, RANKS, 16, device=device) for _ in range(3))
    for ring in range(1000):
        if rank == VICTIM and ring == 2:
            time.sleep(2)  # long enough to have been seen alive
            if fault in ("dead", "gone"):
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(1000)
        if fault == "gone" and ring == 2:
            time.sleep(4)  # the victim is out before the others call
        attend(q, k, v, **options)
        if backend == "nccl" and ring < 2:
            torch.cuda.synchronize()  # the first ones compile kernels


def _on_gpus(transport: str):
    too_few = pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason=f"needs {RANKS} GPUs")
    return pytest.param(transport, marks=[pytest.mark.gpu, too_few])


@pytest.mark.parametrize("transport", ("gloo", _on_gpus("nvlink"), _on_gpus("p2p")))
@pytest.mark.parametrize("fault", ("dead", "gone", "stuck"))
@pytest.mark.parametrize("what", ("ring", "exchange"))
def test_everybody_ends_and_says_why(what: str, fault: str, transport: str, tmp_path: Path) -> None:
    command = [sys.executable, str(Path(__file__)), str(tmp_path / "store"), what, fault, transport]
    patience = 5 if transport == "gloo" else 25  # the first rings on GPUs compile kernels
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RINGATTN_TIMEOUT": str(patience), "OMP_NUM_THREADS": "1"}
    start = time.monotonic()
    ranks = [
        subprocess.Popen([*command, str(rank)], env=environment, stderr=subprocess.PIPE, text=True) for rank in range(RANKS)
    ]
    texts = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert time.monotonic() - start < patience + 60
    assert all(rank.returncode for rank in ranks)
    how = "makes no other call after" if fault == "stuck" else "gives no sign of life, last seen in"
    where = "forward of the KV ring" if what == "ring" else "exchange of heads"
    message = rf"ringattn: rank {VICTIM} {how} {where}, hop \d of \d.*; rank \d waited \d+ s in {where}"
    said = {match.group() for text in texts for match in re.finditer(r"ringattn: rank .* the run ends here", text)}
    assert len(said) == 1, texts
    assert re.match(message, said.pop()), texts
    survivors = [text for rank, text in enumerate(texts) if rank != VICTIM]
    assert all("the run ends here" in text for text in survivors)


def call_alone(rank: int, store: str) -> None:
    """The first call of a ring of three, by rank 0 alone."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    if rank == 0:
        layout, q = Layout.zigzag(24, RANKS), torch.ones(1, 8, 1, 16)
        with pytest.raises(RingFault, match="rank 1, 2 made no call in the 2 s since the first one of rank 0: all ranks"):
            ring_attention(q, q, q, layout=layout, mask=Mask.causal(), group=dist.group.WORLD)
    dist.barrier()
    dist.destroy_process_group()


def test_a_rank_that_never_calls_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RINGATTN_TIMEOUT", "2")
    torch.multiprocessing.spawn(call_alone, args=(str(tmp_path / "store"),), nprocs=RANKS)


def first_calls_are_refused(differences: tuple[str, ...], call: Callable[[str, dist.ProcessGroup], object]) -> None:
    """In a group of its own for each difference: rank 2's first call is another one than the others'."""
    for differs in differences:
        message = f"rank 0 of the group calls attention with {differs} = .* and rank 2 with "
        with pytest.raises(ValueError, match=message):
            call(differs if dist.get_rank() == 2 else "", dist.new_group())


def call_otherwise(differs: str, group: dist.ProcessGroup) -> None:
    options = {"layout": Layout.zigzag(24, 3), "mask": Mask.causal(documents=[20, 4]), "dropout_p": 0.1, "seed": 1}
    options["schedule"] = "state" if differs == "schedule" else "kv"
    options |= {
        "layout": {"layout": Layout.striped(24, 3)},
        "documents": {"mask": Mask.causal(documents=[4, 20])},
        "seed": {"seed": 2},
    }.get(differs, {})
    shape = {"batch size": (1, 8, 4, 16), "heads": (2, 8, 2, 16)}.get(differs, (2, 8, 4, 16))
    q = torch.ones(shape, dtype=torch.float64 if differs == "dtype" else torch.float32)
    k = q[:, :, :2] if differs == "key heads" else q
    ring_attention(q, k, k[..., :8] if differs == "value head dim" else k, group=group, **options)


def exchange_otherwise(differs: str, group: dist.ProcessGroup) -> None:
    """Of ranks that exchange heads, with no ring around them."""
    q, documents = torch.ones(1, 8, 6, 16), [4, 20] if differs == "documents" else [20, 4]
    options = {"layout": Layout.zigzag(24, 1).split(RANKS), "mask": Mask.causal(documents=documents)}
    ulysses_attention(q, q, q[..., :8] if differs == "value head dim" else q, ulysses_group=group, **options)


def decode_otherwise(differs: str, group: dist.ProcessGroup) -> None:
    cache = KVCache(24, dist.get_rank(), RANKS, block=2 if differs == "block" else 4)
    cache.append(*torch.ones(2, 1, 20, 2, 16))
    q = torch.ones(1, 2 if differs == "queries" else 1, 2, 16)
    decode_attention(q, cache, group=group, window=5 if differs == "window" else None)


RING = "layout", "documents", "seed", "schedule", "batch size", "heads", "key heads", "value head dim", "dtype"
FIRST_CALLS = {
    "ring": (RING, call_otherwise),
    "exchange": (("documents", "value head dim"), exchange_otherwise),
    "decoding": (("window", "block", "queries"), decode_otherwise),
}


@pytest.mark.parametrize("what", FIRST_CALLS)
def test_first_calls_that_differ_are_refused(what: str, tmp_path: Path) -> None:
    run_ranks(first_calls_are_refused, RANKS, tmp_path / "ranks", *FIRST_CALLS[what])


ENDS = """
import atexit, threading
atexit.register(lambda: print("still there:", [t.name for t in threading.enumerate() if "ringattn" in t.name]))
import torch, torch.distributed as dist
from ringattn import watchdog
watch = watchdog.Watchdog(dist.HashStore(), 0, 2, torch.device("cpu"))
assert watch._thread.is_alive()
"""


def test_the_watchdog_ends_before_python_does() -> None:
    """Found in a call of the store at Python's end, it would abort the process."""
    done = subprocess.run([sys.executable, "-c", ENDS], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "still there: []\n"), done.stderr


def test_a_hop_may_be_withdrawn_while_the_watchdog_looks_at_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from ringattn.comm import watchdog

    class Hops(deque):
        def __getitem__(self, index: int) -> watchdog.Hop:
            if not looked_at.is_set():
                withdrawal.start()
                withdrawal.join(0.2)
                looked_at.set()
            return super().__getitem__(index)

    looked_at = threading.Event()
    monkeypatch.setattr(watchdog, "HEARTBEAT_INTERVAL", 0.01)
    watch = watchdog.Watchdog(dist.HashStore(), 0, 1, torch.device("cpu"))
    hop = watch.start("forward", 0, 1, ())
    withdrawal = threading.Thread(target=watch.cancel, args=(hop,))
    with watch._lock:
        watch.in_flight = Hops(watch.in_flight)
    assert looked_at.wait(10)
    withdrawal.join(10)
    beats, watch._send_heartbeat = threading.Event(), lambda: beats.set()
    assert beats.wait(10) and not watch.in_flight
    watch.stop()


def test_a_senseless_timeout_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from ringattn.comm.watchdog import timeout_seconds

    monkeypatch.setenv("RINGATTN_TIMEOUT", "soon")
    with pytest.raises(ValueError, match="RINGATTN_TIMEOUT=soon"):
        timeout_seconds()


def test_hops_that_wait_in_line_are_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    from ringattn.comm.watchdog import TIMEOUT, Watchdog

    monkeypatch.setenv(TIMEOUT, "50")
    watch = Watchdog(dist.HashStore(), rank=0, size=2, device=torch.device("cpu"))
    watch.stop()
    hops = [watch.start("forward", t, 2, ()) for t in range(2)]
    for hop in hops:
        hop.since -= 100
    watch.finished(hops[0])
    assert watch._overdue_hop() is None and watch._overdue_hop() is None
    watch._progress = (hops[0].number, time.monotonic() - 60)
    assert watch._overdue_hop() is hops[1]


if __name__ == "__main__":
    run_rings(int(sys.argv[5]), *sys.argv[1:5])

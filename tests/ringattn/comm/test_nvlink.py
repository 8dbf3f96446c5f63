"""Tests of ring passes over NVLink, with copies, flags and streams of a fake host."""

import random
import threading
import time

import pytest
import torch

from ringattn import Layout, Mask, ring_attention
from ringattn.comm import connect, nvlink
from ringattn.comm.nvlink import Slots, padded_bytes
from ringattn.planning.schedule import direct
from tests.covering import every_value
from tests.ringattn.comm.fake_gpus import Capture, Event, RunOnHost, every_message_waits_for_an_event
from tests.ringattn.rings import Case, assert_close, masks, unshard_results


@every_value(ranks=(2, 3, 4), schedule=("state", "kv", "auto"), results=("kept", "merged"))
def test_passes_one_after_the_other(
    ranks: int, schedule: str, results: str, run_on_host: RunOnHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls with different data, masks, layouts, lengths and batch sizes reuse the slots of the receive buffer."""
    monkeypatch.setattr(nvlink, "MAX_KEPT_RESULT_BYTES", 1 << 30 if results == "kept" else 0)
    kinds = [("causal", 33, "zigzag"), ("full", 33, "zigzag"), ("causal", 70, "zigzag"), ("window", 41, "contiguous")] * 2
    kinds += [("documents", 33, "striped"), ("window+documents", 50, "contiguous"), ("causal", 9, "zigzag")]
    calls = [
        (
            Case.random(seq_len=seq_len, batch=(1, 2, 0)[i % 3], seed=i, dtype=torch.float32),
            masks(seq_len)[mask],
            Layout(kind, seq_len, ranks),
        )
        for i, (mask, seq_len, kind) in enumerate(kinds)
    ]

    def on_rank(rank: int, group: object) -> list:
        shards = []
        for case, mask, layout in calls:
            time.sleep(random.choice((0.0, 0.0, 0.02)))  # some ranks are a whole pass behind the others
            shards.append(case.on_rank(layout, mask, rank, group, schedule=schedule))
        return shards

    shards = run_on_host(ranks, on_rank)
    for i, (case, mask, layout) in enumerate(calls):
        got = unshard_results(layout, [shard[i] for shard in shards])
        assert_close(got, case.to(torch.float64).unsharded(mask), 1e-5)


@pytest.mark.parametrize("schedule", ["state", "kv"])
@pytest.mark.parametrize("ranks", [2, 4, pytest.param(6, marks=pytest.mark.slow)], ids=lambda n: f"P{n}")
def test_passes_in_graphs(ranks: int, schedule: str, run_on_host: RunOnHost, capture: Capture) -> None:
    """Passes that a CUDA graph would replay, with other passes between the replays."""
    calls = [
        (Case.random(40, seed=0, dtype=torch.float32), masks(40)["causal"], Layout.zigzag(40, ranks)),
        (Case.random(40, seed=1, dtype=torch.float32), masks(40)["full"], Layout.zigzag(40, ranks)),
        (Case.random(40, seed=2, dtype=torch.float32), masks(40)["window"], Layout.contiguous(40, ranks)),
    ]
    order = [(call, in_graph) for in_graph in (False, True, True, False, True) for call in range(3)]

    def on_rank(rank: int, group: object) -> list:
        shards = []
        for call, capture.active in order:
            case, mask, layout = calls[call]
            shards.append(case.on_rank(layout, mask, rank, group, schedule=schedule))
        return shards

    shards = run_on_host(ranks, on_rank)
    for i, (call, _) in enumerate(order):
        case, mask, layout = calls[call]
        got = unshard_results(layout, [shard[i] for shard in shards])
        assert_close(got, case.to(torch.float64).unsharded(mask), 1e-5)


def test_a_graph_of_a_pass_that_never_ran_raises_an_error(run_on_host: RunOnHost, capture: Capture) -> None:
    """The receive buffer cannot grow during a capture. The message says what to do."""
    layout = Layout.zigzag(8, 2)

    def on_rank(rank: int, group: object) -> None:
        q = torch.zeros(1, 4, 1, 8)
        capture.active = True
        ring_attention(q, q, q, layout=layout, mask=Mask.causal(), group=group)

    with pytest.raises(RuntimeError, match="CUDA graph: call it once before the capture"):
        run_on_host(2, on_rank)


@pytest.mark.parametrize("schedule", ["state", "kv"])
def test_results_are_copied_after_they_are_computed(schedule: str, run_on_host: RunOnHost) -> None:
    """The stream that sends partial results waits for the kernels before every message.

    With six ranks, several steps of a pass send a block and a result.
    """
    case, layout = Case.random(seq_len=24, dtype=torch.float32), Layout.zigzag(24, 6)

    def on_rank(rank: int, group) -> list[str]:
        case.on_rank(layout, Mask.full(), rank, group, schedule=schedule)
        return connect.connect(group.group_name, torch.device("cpu")).streams["result"].log

    for log in run_on_host(6, on_rank):
        assert "copy" in log
        assert every_message_waits_for_an_event(log)


def test_dtypes_one_after_the_other(run_on_host: RunOnHost) -> None:
    """Messages of several dtypes share one receive buffer."""
    layout, case, dtypes = Layout.zigzag(33, 2), Case.random(seq_len=33), (torch.float64, torch.float32, torch.float64)
    shards = run_on_host(2, lambda rank, group: [case.to(d).on_rank(layout, Mask.causal(), rank, group) for d in dtypes])
    for i in range(3):
        got = unshard_results(layout, [shard[i] for shard in shards])
        assert_close(got, case.unsharded(Mask.causal()), 1e-5)


def test_the_number_of_slots_does_not_grow_with_the_ring() -> None:
    """A large kind of message has two slots, and a small one has three."""
    need = ((range(1024),) * 8,) * 8
    small, large = (torch.empty(1, 1024, heads, 1, device="meta", dtype=torch.bfloat16) for heads in (8, 2**17))
    slots = Slots(direct(need, True), {"block": (small,), "result": (large,)})
    assert slots.counts == {"block": 3, "result": 2}
    assert slots.total_bytes == 3 * small.nbytes + 2 * large.nbytes


def test_small_results_get_a_slot_each() -> None:
    """Small results are kept until the end of the pass, so that one kernel can sum them."""
    need = ((range(4),) * 4,) * 4
    x = torch.empty(1, 4, 8, 8, device="meta")
    slots = Slots(direct(need, True), {"block": (x,), "result": (x,)})
    assert slots.keeps_results
    assert slots.counts == {"block": 3, "result": 3}
    offsets = sorted(offset for message, offset in slots.offsets.items() if message.dst == 0)
    assert len(set(offsets)) == len(offsets) == 6


def test_tensors_are_aligned() -> None:
    """The space of a tensor is rounded up to 256 bytes."""
    x = torch.empty(2, 10, 3, dtype=torch.float16)
    assert padded_bytes(x, rows=10) == 256
    assert padded_bytes(x, rows=43) == 768  # 516 bytes


def test_flags_are_set_only_when_all_earlier_calls_are_done(run_on_host: RunOnHost) -> None:
    """After an exception, a rank sets the flags that it waits for, but not while another rank still reads messages."""

    def on_rank(rank: int, group: object) -> None:
        transport, log = connect.connect(group.group_name, torch.device("cpu")), []
        main, side = Event(), Event()
        main.state, side.state, meet = threading.Event(), threading.Event(), threading.Event()
        transport._write_flags = lambda values: (log.append("flags"), side.state.set())
        thread = threading.Thread(target=transport.release, args=((main, side), lambda: (log.append("meet"), meet.wait())))
        thread.start()
        time.sleep(0.05)
        assert log == []
        main.state.set()
        while not log:
            time.sleep(0.01)
        assert log == ["meet"]
        meet.set()
        thread.join()
        assert log == ["meet", "flags"]

    run_on_host(1, on_rank)

"""The transport over NVLink without a GPU: its copies and flags on the memory of threads, its streams as threads of their own.

The kernels of a rank run in the rank's thread, which stands for the main stream; side streams run their queues beside it, with
random delays. So every order of copies and kernels that the flags and events allow may happen, and one that they should not
allow would show: as wrong rows, or as a test that never ends.
"""

import ctypes
import queue
import random
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch

from ringattn import Layout, Mask, ring_attention, simulate, ulysses
from ringattn.comm import connect, nvlink, nvlink_all_to_all
from ringattn.comm.nvlink import NvlinkTransport, Slots
from ringattn.comm.watchdog import NoWatchdog
from ringattn.planning.cost_model import interconnect
from ringattn.planning.schedule import direct
from tests.ringattn.rings import Case, assert_close, masks

CPU = torch.device("cpu")


class Stream:
    """A queue of work, carried out in order by its own thread; the main stream has none and works at once."""

    streams: dict[int, "Stream"] = {}
    faults: list[str] = []

    def __init__(self, device: object = None, priority: int = 0, main: bool = False) -> None:
        self.cuda_stream = id(self)
        self.streams[self.cuda_stream] = self
        self.work: queue.SimpleQueue | None = None if main else queue.SimpleQueue()
        if not main:
            threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(random.random() * 1e-3)
            self.work.get()()

    def do(self, action: Callable[[], None]) -> None:
        action() if self.work is None else self.work.put(action)

    def wait_event(self, event: "Event") -> None:
        self.do(event.state.wait)

    def wait_stream(self, other: "Stream") -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)


class Event:
    def record(self, stream: Stream) -> None:
        self.state = state = threading.Event()
        stream.do(state.set)


class Driver:
    """What `ringattn.comm.cuda_driver` does, on the memory of this process."""

    @staticmethod
    def copy(target: int, source: int, count: int, stream: int) -> None:
        Stream.streams[stream].do(lambda: ctypes.memmove(target, source, count))

    @staticmethod
    def copy_rows(target: int, target_pitch: int, source: int, source_pitch: int, width: int, rows: int, stream: int) -> None:
        def copy() -> None:
            for i in range(rows):
                ctypes.memmove(target + i * target_pitch, source + i * source_pitch, width)

        Stream.streams[stream].do(copy)

    @staticmethod
    def set_flags(addresses: list[int], stream: int) -> None:
        def write(flag: ctypes.c_uint32) -> None:
            if flag.value:
                Stream.faults.append("a flag was raised twice before it was put back")
            flag.value = 1

        for address in addresses:
            Stream.streams[stream].do(partial(write, ctypes.c_uint32.from_address(address)))

    @staticmethod
    def wait_and_clear_flags(addresses: list[int], stream: int) -> None:
        def take(flag: ctypes.c_uint32) -> None:
            while flag.value != 1:
                time.sleep(1e-5)
            flag.value = 0

        for address in addresses:
            Stream.streams[stream].do(partial(take, ctypes.c_uint32.from_address(address)))


class Node:
    """GPUs of one host: the memory they share, a barrier, and each rank's main stream."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks)
        self.shared: dict[tuple[int, int], torch.Tensor] = {}
        self.counts = [0] * ranks
        self.ranks = ranks

    def share(self, rank: int, dtype: torch.dtype, count: int) -> tuple[torch.Tensor, list[int]]:
        key, self.counts[rank] = self.counts[rank], self.counts[rank] + 1
        fill = 0xFF if dtype == torch.uint8 else 0  # NaN, where nobody has written
        self.shared[key, rank] = torch.full((count,), fill, dtype=dtype)
        self.barrier.wait()
        return self.shared[key, rank], [self.shared[key, peer].data_ptr() for peer in range(self.ranks)]


class Linked(NvlinkTransport):
    """The transport with `Node` in the place of symmetric memory."""

    def __init__(self, node: Node, rank: int) -> None:
        self.node, self.rank, self.size, self.device = node, rank, node.ranks, CPU
        self.interconnect, self.watchdog = interconnect("nvlink"), NoWatchdog()
        self.streams = {kind: Stream() for kind in nvlink.KINDS}
        self._ready, self._sent = Event(), Event()
        self._allocate()

    def share(self, dtype: torch.dtype, count: int) -> tuple[torch.Tensor, list[int]]:
        return self.node.share(self.rank, dtype, count)

    def synchronise(self) -> None:
        for stream in self.streams.values():
            Stream(main=True).wait_stream(stream)
        self.node.barrier.wait()


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """NvlinkTransport talks to `Stream`, `Event` and `Driver`."""
    mains = threading.local()

    def current_stream(device: object = None) -> Stream:
        if not hasattr(mains, "stream"):
            mains.stream = Stream(main=True)
        return mains.stream

    for name, stand_in in (("current_stream", current_stream), ("Event", Event), ("Stream", Stream)):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for module in (nvlink, nvlink_all_to_all):
        monkeypatch.setattr(module, "cuda_driver", Driver)


@pytest.fixture
def resolve(monkeypatch: pytest.MonkeyPatch) -> dict[str, Linked]:
    """By the name of a simulated rank, the transport that it gets."""
    linked: dict[str, Linked] = {}
    honest = connect.connect

    def resolved(name: str, device: torch.device | None = None, *options: str) -> object:
        return linked[name] if device is not None and name in linked else honest(name, device, *options)

    monkeypatch.setattr(connect, "connect", resolved)
    return linked


def run_node(ranks: int, function: Callable[[int, object], object], resolve: dict[str, Linked]) -> list:
    """`function(rank, group)` on every rank of a node."""
    node = Node(ranks)

    def on_rank(rank: int, group: object) -> object:
        resolve[group.group_name] = Linked(node, rank)
        return function(rank, group)

    results = simulate(ranks, on_rank, in_turns=False)
    assert not Stream.faults
    return results


@pytest.mark.parametrize("schedule", ("state", "kv", "auto"))
@pytest.mark.parametrize("ranks", (2, 3, 4, 6), ids=lambda n: f"P{n}")
@pytest.mark.parametrize("held", (True, False), ids=("results-held", "results-merged"))
def test_rings_one_after_the_other(
    held: bool, ranks: int, schedule: str, no_gpu: None, resolve: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers back to back with other data, masks, layouts and sizes, larger and smaller, of one and of two batch rows."""
    monkeypatch.setattr(nvlink, "MAX_KEPT_RESULT_BYTES", 1 << 30 if held else 0)
    plans = []
    for i, (name, seq_len, kind) in enumerate(
        [("causal", 33, "zigzag"), ("full", 33, "zigzag"), ("causal", 70, "zigzag"), ("window", 41, "contiguous")] * 2
        + [("documents", 33, "striped"), ("window+documents", 50, "contiguous"), ("causal", 9, "zigzag")]
    ):
        case, mask = Case.random(seq_len=seq_len, batch=1 + i % 2, seed=i, dtype=torch.float32), masks(seq_len)[name]
        plans.append((case, mask, Layout(kind, seq_len, ranks)))

    def on_rank(rank: int, group: object) -> list:
        shards = []
        for case, mask, layout in plans:
            time.sleep(random.choice((0.0, 0.0, 0.02)))  # some ranks are a pass behind others
            shards.append(case.on_rank(layout, mask, rank, group, schedule=schedule))
        return shards

    shards = run_node(ranks, on_rank, resolve)
    for i, (case, mask, layout) in enumerate(plans):
        got = [layout.unshard([shard[i][j] for shard in shards]) for j in range(5)]
        assert_close(got, case.to(torch.float64).unsharded(mask), 1e-5)


def test_few_slots_serve_a_long_ring() -> None:
    """Memory for messages does not grow with the number of ranks: two slots of a large kind, three of a small one."""
    everyone = ((range(1024),) * 8,) * 8
    small, large = (torch.empty(1, 1024, heads, 1, device="meta", dtype=torch.bfloat16) for heads in (8, 2**17))
    slots = Slots(direct(everyone, True), {"block": (small,), "result": (large,)})
    assert slots.counts == {"block": 3, "result": 2}
    assert slots.total_bytes == 3 * small.nbytes + 2 * large.nbytes


@pytest.mark.parametrize("schedule", ("state", "kv"))
@pytest.mark.parametrize("ranks", (2, 4, 6), ids=lambda n: f"P{n}")
def test_rings_in_graphs(ranks: int, schedule: str, no_gpu: None, resolve: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a CUDA graph would hold and replay, with rings outside of graphs between the replays."""
    capturing = threading.local()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing.now)
    rings = [
        (Case.random(40, seed=0, dtype=torch.float32), masks(40)["causal"], Layout.zigzag(40, ranks)),
        (Case.random(40, seed=1, dtype=torch.float32), masks(40)["full"], Layout.zigzag(40, ranks)),
        (Case.random(40, seed=2, dtype=torch.float32), masks(40)["window"], Layout.contiguous(40, ranks)),
    ]
    order = [(ring, in_graph) for in_graph in (False, True, True, False, True) for ring in range(3)]

    def on_rank(rank: int, group: object) -> list:
        shards = []
        for ring, capturing.now in order:
            case, mask, layout = rings[ring]
            shards.append(case.on_rank(layout, mask, rank, group, schedule=schedule))
        return shards

    shards = run_node(ranks, on_rank, resolve)
    for i, (ring, _) in enumerate(order):
        case, mask, layout = rings[ring]
        got = [layout.unshard([shard[i][j] for shard in shards]) for j in range(5)]
        assert_close(got, case.to(torch.float64).unsharded(mask), 1e-5)


def test_a_graph_of_a_ring_that_never_ran_is_refused(no_gpu: None, resolve: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    layout = Layout.zigzag(8, 2)

    def on_rank(rank: int, group: object) -> None:
        q = torch.zeros(1, 4, 1, 8)
        ring_attention(q, q, q, layout=layout, mask=Mask.causal(), group=group)

    with pytest.raises(RuntimeError, match="call it once before it is captured in a CUDA graph"):
        run_node(2, on_rank, resolve)


@pytest.mark.parametrize("again", (False, True), ids=("kept", "exchanged-again"))
@pytest.mark.parametrize("parts", (1, 2), ids=("at-once", "in-parts"))
@pytest.mark.parametrize("ranks", (2, 3, 4), ids=lambda n: f"P{n}")
def test_exchanges_of_heads_in_graphs_and_outside(
    ranks: int, parts: int, again: bool, no_gpu: None, resolve: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers back to back with other data, masks and sizes, larger and smaller, uneven rows, and rings between them."""
    monkeypatch.setattr(ulysses, "head_chunks_for_overlap", lambda *_: parts)
    capturing = threading.local()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing.now)
    calls = []
    for i, (name, seq_len, in_graph) in enumerate(
        [("causal", 70, False), ("full", 33, True), ("window", 41, True), ("documents", 33, False), ("causal", 70, True)] * 2
    ):
        case = Case.random(seq_len, 1 + i % 2, heads=4 * ranks, key_heads=2 * ranks, value_dim=5, seed=i, dtype=torch.float32)
        calls.append((case, masks(seq_len)[name], Layout.contiguous(seq_len, 1).split(ranks), in_graph))

    def on_rank(rank: int, group: object) -> list:
        shards = []
        for i, (case, mask, layout, capturing.now) in enumerate(calls):
            q, k, v = (layout.shard(x, rank) for x in (case.q, case.k, case.v))
            if i % 3 == 0:  # parts of a wider tensor, as of one product
                k, v = torch.cat([k.flatten(2), v.flatten(2)], 2).split([k[0, 0].numel(), v[0, 0].numel()], 2)
                k, v = k.unflatten(2, (2 * ranks, -1)), v.unflatten(2, (2 * ranks, -1))
            q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
            options = dict(layout=layout, mask=mask, ulysses_group=group, return_lse=True, recompute_all_to_all=again)
            out, lse = ulysses.ulysses_attention(q, k, v, **options)
            upstream = layout.shard(case.dout, rank), layout.shard(case.dlse, rank).to(lse.dtype)
            shards.append([out.detach(), lse.detach(), *torch.autograd.grad((out, lse), (q, k, v), upstream)])
            if i % 4 == 1:
                capturing.now = False
                ring = Case.random(40, dtype=torch.float32)
                ring.on_rank(Layout.zigzag(40, ranks), Mask.causal(), rank, group)
        return shards

    shards = run_node(ranks, on_rank, resolve)
    for i, (case, mask, layout, _) in enumerate(calls):
        got = [layout.unshard([shard[i][j] for shard in shards]) for j in range(5)]
        assert_close(got, case.to(torch.float64).unsharded(mask), 1e-5)


def test_a_graph_of_an_exchange_that_never_ran_is_refused(no_gpu: None, resolve: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)

    def on_rank(rank: int, group: object) -> None:
        q = torch.zeros(1, 4, 2, 8)
        ulysses.ulysses_attention(q, q, q, layout=Layout.contiguous(8, 1).split(2), mask=Mask.causal(), ulysses_group=group)

    with pytest.raises(RuntimeError, match="call it once before it is captured in a CUDA graph"):
        run_node(2, on_rank, resolve)


def test_dtypes_one_after_the_other(no_gpu, resolve) -> None:
    layout, case, dtypes = Layout.zigzag(33, 2), Case.random(seq_len=33), (torch.float64, torch.float32, torch.float64)
    shards = run_node(2, lambda rank, group: [case.to(d).on_rank(layout, Mask.causal(), rank, group) for d in dtypes], resolve)
    for i in range(3):
        got = [layout.unshard([shard[i][j] for shard in shards]) for j in range(5)]
        assert_close(got, case.unsharded(Mask.causal()), 1e-5)

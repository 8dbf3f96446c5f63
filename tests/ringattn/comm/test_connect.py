"""Tests of the handshake in which the ranks of a group compare their calls and choose a transport."""

import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ringattn import KVCache, Layout, Mask, decode_attention, flash_attention, ring_attention, simulate, ulysses_attention
from ringattn.comm import connect, nvlink, watchdog
from ringattn.comm.all_to_all import PointToPointAllToAll
from ringattn.comm.connect import HOST_VARIABLE, TRANSPORT_VARIABLE, _Identity, _why_not_nvlink, rank_and_size
from ringattn.comm.p2p import P2PTransport, SingleRankTransport
from ringattn.comm.shared_gpus import SHARE_GPUS
from ringattn.comm.watchdog import RingFault, TransportError
from tests.distributed import run_ranks

CPU = torch.device("cpu")


def test_no_group_is_a_ring_of_one_rank() -> None:
    """For this process alone, public calls pass the group None, whose name is empty."""
    assert rank_and_size(None) == (0, 1)
    assert isinstance(connect.connect("", CPU), SingleRankTransport)


def test_a_simulated_rank_is_its_own_transport() -> None:
    """The rank and the size are those of the simulated ring."""

    def check(rank: int, group) -> None:
        assert rank_and_size(group) == (rank, 3)
        assert connect.connect(group.group_name, CPU) is group
        assert isinstance(connect.open_all_to_all(group), PointToPointAllToAll)

    simulate(3, check)


def check_handshake() -> None:
    """All ranks of a job choose gloo on CPUs, once per group, and the environment variable replaces "auto"."""
    group = dist.group.WORLD
    transport = connect.connect(group.group_name, CPU)
    assert isinstance(transport, P2PTransport)
    assert transport.interconnect.name == "gloo"
    assert transport.interconnect.all_pairs
    assert connect.connect(group.group_name, CPU) is transport
    assert connect.connect(group.group_name, CPU, "p2p") is not transport
    os.environ[TRANSPORT_VARIABLE] = "pigeon"
    with pytest.raises(TransportError, match=f"{TRANSPORT_VARIABLE}=pigeon"):
        connect.connect(dist.new_group().group_name, CPU)
    os.environ[TRANSPORT_VARIABLE] = "nvlink"
    with pytest.raises(ValueError, match="'nvlink' is unavailable: the tensors are on cpu"):
        connect.connect(dist.new_group().group_name, CPU)


def check_nvlink_is_chosen() -> None:
    """If NVLink is available, "auto" chooses it, unless neighbours relay the blocks. "p2p" never chooses it."""
    connect._why_not_nvlink = lambda *_: ""
    nvlink.NvlinkTransport = lambda group, device, store, joined, dog: SimpleNamespace(
        interconnect=joined, watchdog=dog, rank=group.rank(), size=group.size()
    )
    name = dist.group.WORLD.group_name
    # The call must not use the NVLink connection, which cannot send messages here.
    x, layout = torch.ones(1, 2, 1, 8), Layout.contiguous(4, 2)
    ring_attention(x, x, x, layout=layout, mask=Mask.full(), group=dist.group.WORLD, route="relay")
    assert connect.connect(name, CPU).interconnect.name == "nvlink"
    assert isinstance(connect.connect(name, CPU, "p2p"), P2PTransport)
    assert isinstance(connect.connect(name, CPU, relays=True), P2PTransport)


def test_nvlink_is_chosen_where_it_is_available(tmp_path: Path) -> None:
    """Two processes that pretend to have GPUs."""
    run_ranks(check_nvlink_is_chosen, 2, tmp_path)


def test_all_ranks_choose_the_same_transport(tmp_path: Path) -> None:
    """Two processes on CPUs."""
    run_ranks(check_handshake, 2, tmp_path)


def test_a_new_group_with_an_old_name_is_connected_anew() -> None:
    """A process group may be destroyed, and a new one gets the same name."""
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        name = dist.group.WORLD.group_name
        connect.connect(name, CPU)
        group_of_connection = connect._connections[name, CPU, "auto"][0]
        current = dist.group.WORLD
        dist.destroy_process_group()
        assert group_of_connection is current


@pytest.mark.parametrize(
    ("hosts", "gpus", "reason"),
    [
        (("a", "b"), ("x", "y"), "2 hosts"),
        (("a", "a"), ("x", "x"), "same GPU"),
        (("a", "a"), ("x", "y"), "not every rank can see"),
    ],
)
def test_reasons_against_nvlink(hosts: tuple, gpus: tuple, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks must be on one host, each with its own GPU, and every rank must see all GPUs."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    ranks = [_Identity(host, gpu, 1.0, "cuda", "auto") for host, gpu in zip(hosts, gpus, strict=True)]
    assert reason in _why_not_nvlink(ranks, torch.device("cuda"))


@pytest.mark.parametrize("value", ["0", "1", "yes"])
def test_ranks_share_a_gpu_only_if_the_user_allows_it(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable must be 0 or 1."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="x"))
    monkeypatch.setenv(SHARE_GPUS, value)
    arguments = [_Identity("a", "x", 1.0, "cuda", "auto")] * 2, torch.device("cuda")
    if value == "yes":
        with pytest.raises(ValueError, match=f"{SHARE_GPUS}=yes"):
            _why_not_nvlink(*arguments)
    else:
        assert (_why_not_nvlink(*arguments) == "") == (value == "1")


def check_shared_gpu() -> None:
    """Three ranks pretend that ranks 0 and 2 share a GPU. Rank 0 logs this once, and makes torch allow it."""
    rank, messages = dist.get_rank(), []
    connect._identity = lambda *choice: _Identity("host", "y" if dist.get_rank() == 1 else "x", 1.0, "cuda", choice[1])
    connect._why_not_nvlink = lambda *_: ""
    connect.log.warning = lambda message, *values: messages.append(message % values)
    nvlink.NvlinkTransport = lambda group, device, store, joined, dog: SimpleNamespace(watchdog=dog, rank=rank, size=3)
    connect.connect(dist.group.WORLD.group_name, CPU, "nvlink")
    assert os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] == "1"
    assert connect.connect(dist.group.WORLD.group_name, CPU, "p2p").interconnect.name == "gloo"
    assert messages == ["3 ranks share 2 GPUs: measured speeds are meaningless"] * (rank == 0)
    connect.backend_name = lambda *_: "nccl"
    with pytest.raises(ValueError, match=r"ranks 0 and 2 use the same GPU, which NCCL rejects.*RINGATTN_SHARE_GPUS=1.*gloo"):
        connect.connect(dist.group.WORLD.group_name, CPU)


def test_ranks_that_share_a_gpu(tmp_path: Path) -> None:
    """Processes that pretend to have GPUs."""
    run_ranks(check_shared_gpu, 3, tmp_path)


def check_first_calls(differences: tuple[str, ...], call: Callable[[str, dist.ProcessGroup], object]) -> None:
    """In a new group for each difference, the first call of rank 2 differs from those of the other ranks."""
    for differs in differences:
        message = f"rank 0 of the group calls attention with {differs} = .* and rank 2 with "
        with pytest.raises(ValueError, match=message):
            call(differs if dist.get_rank() == 2 else "", dist.new_group())


def call_ring(differs: str, group: dist.ProcessGroup) -> None:
    """Call ring_attention. `differs` names the argument with another value."""
    options = {"layout": Layout.zigzag(24, 3), "mask": Mask.causal(documents=[20, 4]), "dropout_p": 0.1, "seed": 1}
    options["schedule"] = "state" if differs == "schedule" else "kv"
    options |= {
        "layout": {"layout": Layout.striped(24, 3)},
        "documents": {"mask": Mask.causal(documents=[4, 20])},
        "seed": {"seed": 2},
    }.get(differs, {})
    shape = {"batch size": (1, 8, 4, 16), "heads": (2, 8, 2, 16)}.get(differs, (2, 8, 4, 16))
    options["route"] = "direct" if differs == "route" else "relay"
    q = torch.ones(shape, dtype=torch.float64 if differs == "dtype" else torch.float32)
    k = q[:, :, :2] if differs == "key heads" else q
    ring_attention(q, k, k[..., :8] if differs == "value head dim" else k, group=group, **options)


def call_ulysses(differs: str, group: dist.ProcessGroup) -> None:
    """Call ulysses_attention without a ring."""
    q, documents = torch.ones(1, 8, 6, 16), [4, 20] if differs == "documents" else [20, 4]
    options = {"layout": Layout.zigzag(24, 1).split(3), "mask": Mask.causal(documents=documents)}
    options |= {differs: True} if differs in ("return_lse", "recompute_all_to_all") else {}
    ulysses_attention(q, q, q[..., :8] if differs == "value head dim" else q, ulysses_group=group, **options)


def call_decode(differs: str, group: dist.ProcessGroup) -> None:
    """Call decode_attention. The caches may differ, too."""
    cache = KVCache(24, dist.get_rank(), 3, block=2 if differs == "block" else 4)
    cache.prefill(*torch.ones(2, 1, 6, 2, 16), Layout("striped" if differs == "layout of prefill" else "zigzag", 18, 3))
    q = torch.ones(1, 2 if differs == "queries" else 1, 2, 16)
    options = {"window": 5 if differs == "window" else None}
    if differs == "sinks":
        options = {"bounds": tuple(torch.tensor([[[0]], [[6]]], dtype=torch.int32)), "sinks": torch.ones(1, dtype=torch.int32)}
    decode_attention(q, cache, group=group, **options)


RING = "layout", "documents", "seed", "schedule", "batch size", "heads", "key heads", "value head dim", "dtype", "route"
FIRST_CALLS = {
    "ring": (RING, call_ring),
    "ulysses": (("documents", "value head dim", "return_lse", "recompute_all_to_all"), call_ulysses),
    "decoding": (("window", "block", "queries", "sinks", "layout of prefill"), call_decode),
}


@pytest.mark.parametrize("operation", FIRST_CALLS)
def test_first_calls_that_differ_raise_an_error(operation: str, tmp_path: Path) -> None:
    """Every rank raises the error, which names the argument and both values."""
    run_ranks(check_first_calls, 3, tmp_path, *FIRST_CALLS[operation])


def check_destroyed_group() -> None:
    group, q = dist.new_group(), torch.ones(1, 8, 1, 4)
    dist.destroy_process_group(group)
    with pytest.raises(ValueError, match=r"the process group '.*' has been destroyed"):
        ring_attention(q, q, q, layout=Layout.zigzag(8, 1), mask=Mask.causal(), group=group)


def test_a_destroyed_group_raises_an_error(tmp_path: Path) -> None:
    """This project raises an error of one line."""
    run_ranks(check_destroyed_group, 1, tmp_path)


def check_transports() -> None:
    """Rank 1 requests another transport, in its argument or in the environment variable. Both handshakes report this."""
    message = "rank 0 of the group calls attention with transport='auto' on cpu and rank 1 with transport='p2p' on cpu"
    with pytest.raises(ValueError, match=message):
        connect.connect(dist.new_group().group_name, CPU, "p2p" if dist.get_rank() else "auto")
    os.environ[TRANSPORT_VARIABLE] = "p2p" if dist.get_rank() else "auto"
    with pytest.raises(ValueError, match=message):
        connect.connect(dist.new_group().group_name, CPU)


def test_transports_that_differ_raise_an_error(tmp_path: Path) -> None:
    """The ranks find this difference in the first handshake of the group."""
    run_ranks(check_transports, 2, tmp_path)


def test_a_host_has_a_name_and_a_boot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks whose machines have different names are on different hosts. The environment variable replaces this name."""
    names = []
    for name in ("a", "b"):
        monkeypatch.setattr(socket, "gethostname", lambda name=name: name)
        names.append(connect._identity(CPU, "auto").host)
    assert names[0] != names[1]
    assert names[0].startswith("a")
    monkeypatch.setenv(HOST_VARIABLE, "first")
    assert connect._identity(CPU, "auto").host == "first"


def call_small_ring(window: int = 9) -> None:
    """Call ring_attention on the default group, and compare the output with one rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    layout, mask = Layout.zigzag(12 * ranks, ranks), Mask.causal(window=window)
    q, k, v = torch.randn(3, 1, 12 * ranks, 2, 8, generator=torch.Generator().manual_seed(ranks)).unbind()
    out = ring_attention(*(layout.shard(x, rank) for x in (q, k, v)), layout=layout, mask=mask, group=dist.group.WORLD)
    expected = layout.shard(flash_attention(q, k, v, mask=mask), rank)
    assert (out - expected).abs().max() < 1e-5


def correct_the_first_call() -> None:
    """The windows of the first calls differ, and those of the second calls are equal."""
    with pytest.raises(ValueError, match="window = 9 and rank 1 with 5"):
        call_small_ring(window=5 if dist.get_rank() else 9)
    if dist.get_rank():
        time.sleep(0.2)  # rank 0 must not read what rank 1 has published in the first call
    call_small_ring()


def init_again(store: dist.Store, rank: int, ranks: int, name: str) -> None:
    """Destroy the process group, and create another one. All handshakes use the same store.

    `name` separates Torch's own keys, because gloo might connect to the addresses of a destroyed group.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore(name, store), rank=rank, world_size=ranks)
    connect._get_process_group_store = lambda group: store


def create_the_group_again(directory: Path) -> None:
    """Destroy the process group, and create another one over the same store. Its first call differs from the earlier one."""
    rank, store = dist.get_rank(), dist.FileStore(str(directory / "second_store"), 2)
    for window in (9, 5):
        init_again(store, rank, 2, str(window))
        if rank:
            time.sleep(0.2)
        call_small_ring(window)


def go_on_without_a_dead_rank(directory: Path) -> None:
    """Rank 2 dies, and the other ranks create a smaller group over the same store. The old watchdogs must not end them."""
    watchdog.HEARTBEAT_INTERVAL, watchdog.DEAD_AFTER, watchdog.GRACE = 0.05, 2.0, 4.0
    rank, store = dist.get_rank(), dist.FileStore(str(directory / "second_store"), 3)
    init_again(store, rank, 3, "first")
    call_small_ring()
    if rank == 2:
        os._exit(0)
    dog = connect.connect(dist.group.WORLD.group_name, CPU).watchdog
    with pytest.raises(RingFault, match="rank 2 gives no sign of life"):
        call_small_ring()
    dist.destroy_process_group()
    init_again(store, rank, 2, "second")
    call_small_ring()
    dog._thread.join()
    call_small_ring()


@pytest.mark.parametrize(
    ("function", "ranks"),
    [
        (correct_the_first_call, 2),
        (create_the_group_again, 2),
        pytest.param(go_on_without_a_dead_rank, 3, marks=pytest.mark.slow),
    ],
)
def test_every_handshake_has_keys_of_its_own(function: Callable, ranks: int, tmp_path: Path) -> None:
    """A handshake never reads what an earlier handshake has left in the store."""
    run_ranks(function, ranks, tmp_path / "ranks", *[tmp_path] * (function is not correct_the_first_call))


def retry_after_a_timeout() -> None:
    """Rank 0 makes its first call alone, which raises an error after the timeout. Then both ranks make a call."""
    os.environ[watchdog.TIMEOUT] = "0.5"
    if dist.get_rank() == 0:
        with pytest.raises(RingFault, match="rank 1 made no call within 0 s after the first call of rank 0"):
            call_small_ring()
    dist.barrier()
    os.environ[watchdog.TIMEOUT] = "60"
    call_small_ring()


def test_a_store_whose_server_has_died_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun may be killed before the first call. Its ranks must raise an error at once instead of waiting for the store."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=15))
    monkeypatch.setattr(connect, "_get_process_group_store", lambda group: client)
    del server
    start = time.monotonic()
    with pytest.raises(dist.DistNetworkError):
        connect._group_store(None)
    assert time.monotonic() - start < 10


def test_a_handshake_may_be_repeated_after_a_timeout(tmp_path: Path) -> None:
    """The ranks have then begun different numbers of handshakes."""
    run_ranks(retry_after_a_timeout, 2, tmp_path)

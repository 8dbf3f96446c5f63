"""Tests of rings in real processes over gloo on CPUs. `test_gpus` runs the same checks on GPUs."""

import threading
import time
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ringattn import Layout, Mask, flash_attention, ring_attention
from ringattn.comm import connect
from ringattn.comm.p2p import P2PTransport, backend_name
from ringattn.layout import KINDS
from tests.covering import pairs
from tests.distributed import run_ranks
from tests.ringattn.rings import MASK_NAMES, Case, assert_close, masks


def check_rings(
    seq_len: int,
    dim: int,
    dtype: torch.dtype,
    backend: str,
    tolerance: float,
    device: str = "cpu",
    quick: bool = False,
    mask_names: tuple[str, ...] = MASK_NAMES,
    kinds: tuple[str, ...] = KINDS,
    **options: object,
) -> None:
    """On every rank of a job, compare masks, layouts and schedules with fp64 results of one rank.

    With `quick`, every pair of values occurs, and otherwise every combination.
    """
    rank, ranks, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    case = Case.random(seq_len=seq_len, batch=2, dim=dim, value_dim=dim).to(dtype)
    choices = dict(mask=mask_names, kind=kinds, schedule=("state", "kv"))
    exact = {}
    for name, kind, schedule in pairs(**choices) if quick else product(*choices.values()):
        mask, layout = masks(seq_len)[name], Layout(kind, seq_len, ranks)
        if name not in exact:
            exact[name] = [x.cpu() for x in case.to(torch.float64).to(device).unsharded(mask)]
        shards = case.to(device).on_rank(layout, mask, rank, group, schedule=schedule, backend=backend, **options)
        assert_close([layout.unshard(shard.cpu(), group=group) for shard in shards], exact[name], tolerance)


def check_subgroups(device: str = "cpu", dtype: torch.dtype = torch.float64, tolerance: float = 1e-10, **options) -> None:
    """Two rings in one job: a rank has another number in its ring than in the job."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group(range(first, ranks, 2)) for first in (0, 1)]
    group, layout = groups[rank % 2], Layout.zigzag(101, ranks // 2)
    case = Case.random(seq_len=101, dim=64, value_dim=64, seed=rank % 2, dtype=dtype)
    mask = masks(101)["causal"]
    shards = case.to(device).on_rank(layout, mask, group.rank(), group, **options)
    exact = case.to(torch.float64).unsharded(mask)
    assert_close([layout.unshard(shard.cpu(), group=group) for shard in shards], exact, tolerance)


def check_gloo(quick: bool) -> None:
    """Rings over all ranks of a job on CPUs, and on four ranks also rings of two."""
    check_rings(33, 8, torch.float64, "reference", 1e-10, quick=quick)
    check_rings(33, 8, torch.float32, "auto", 1e-5, quick=quick)
    if dist.get_world_size() == 4:
        check_subgroups()


def check_groups_of_unshard() -> None:
    """Unshard a layout over two of the four ranks of a job."""
    layout, rank = Layout.zigzag(21, 2), dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    x = torch.arange(21.0)[None]
    shard = layout.shard(x, rank // 2)
    assert torch.equal(layout.unshard(shard, group=groups[rank % 2]), x)
    for group, found in ((None, "4 ranks"), (groups[1 - rank % 2], "group"), (dist.group.WORLD, "4 ranks")):
        with pytest.raises(ValueError, match=f"{found}.*2 ranks"):
            layout.unshard(shard, group=group)


@pytest.mark.slow
def test_unshard_requires_the_group_of_the_layout(tmp_path: Path) -> None:
    """Another group raises an error instead of mixing up tokens."""
    run_ranks(check_groups_of_unshard, 4, tmp_path / "ranks")


@pytest.mark.parametrize("ranks", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 4))], ids=lambda n: f"P{n}")
def test_gloo(ranks: int, tmp_path: Path) -> None:
    """Every pair of mask, layout and schedule."""
    run_ranks(check_gloo, ranks, tmp_path / "ranks", True)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4], ids=lambda n: f"P{n}")
def test_gloo_with_every_combination(ranks: int, tmp_path: Path) -> None:
    """Every combination of mask, layout and schedule."""
    run_ranks(check_gloo, ranks, tmp_path / "ranks", False)


def check_nvlink_on_cpus() -> None:
    """Every rank raises the error, with the reason and the transports that are available."""
    case, layout = Case.random(seq_len=8), Layout.zigzag(8, dist.get_world_size())
    with pytest.raises(ValueError, match=r"transport='nvlink' is unavailable: the tensors are on cpu.*'p2p' or 'auto'"):
        case.on_rank(layout, Mask.causal(), dist.get_rank(), dist.group.WORLD, transport="nvlink")


def test_nvlink_is_unavailable_on_cpus(tmp_path: Path) -> None:
    """No rank waits for another one."""
    run_ranks(check_nvlink_on_cpus, 2, tmp_path / "ranks")


def start_two_rings() -> None:
    """Two threads use a ring each, and the ranks start the threads in different orders."""
    groups, layout = [dist.new_group([0, 1]) for _ in range(2)], Layout.zigzag(8, 2)
    case, order, done = Case.random(seq_len=8), (0, 1) if dist.get_rank() == 0 else (1, 0), []

    def attend(ring: int) -> None:
        shards = case.on_rank(layout, Mask.causal(), dist.get_rank(), groups[ring])
        done.append([layout.unshard(shard, group=groups[ring]) for shard in shards])

    threads = [threading.Thread(target=attend, args=(ring,), daemon=True) for ring in order]
    for thread in threads:
        thread.start()
        time.sleep(0.3)
    for thread in threads:
        thread.join(60)
    assert len(done) == 2, "the threads block each other"
    for results in done:
        assert_close(results, case.unsharded(Mask.causal()), 1e-10)


def test_two_threads_use_two_rings(tmp_path: Path) -> None:
    """The handshake of one group does not block a thread with another group."""
    run_ranks(start_two_rings, 2, tmp_path / "ranks")


def pass_sharded_tensors() -> None:
    """Pass DTensors to attention."""
    mesh = init_device_mesh("cpu", (1,))
    x = distribute_tensor(torch.randn(1, 8, 2, 4), mesh, [Shard(1)])
    calls = (
        lambda: flash_attention(x, x, x),
        lambda: ring_attention(x, x, x, layout=Layout.zigzag(8, 1), mask=Mask.causal()),
    )
    for call in calls:
        with pytest.raises(ValueError, match="DTensor"):
            call()


def test_dtensors_raise_an_error(tmp_path: Path) -> None:
    """A rank must pass its own tokens as plain tensors."""
    run_ranks(pass_sharded_tensors, 1, tmp_path / "ranks")


class RecordingGroup:
    """A process group that records its calls. With `coalesces`, it starts calls together, like NCCL."""

    def __init__(self, group: dist.ProcessGroup, coalesces: bool) -> None:
        self.group, self.supports_coalescing = group, coalesces
        self.calls: list[tuple[object, ...]] = []
        self.works: list[dist.Work] = []

    def _get_backend(self, device: torch.device) -> "RecordingGroup":
        return self

    def _start_coalescing(self, device: torch.device) -> None:
        self.calls.append(("start",))

    def _end_coalescing(self, device: torch.device) -> "RecordingGroup":
        self.calls.append(("end",))
        return self

    def wait(self) -> None:
        self.calls.append(("wait",))
        for work in self.works:
            work.wait()
        self.works.clear()

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> dist.Work:
        return self._record("send", tensors, peer, tag)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> dist.Work:
        return self._record("recv", tensors, peer, tag)

    def _record(self, name: str, tensors: list[torch.Tensor], peer: int, tag: int) -> dist.Work:
        self.calls.append((name, peer))
        self.works.append(getattr(self.group, name)(tensors, peer, tag))
        return self.works[-1]


def check_calls_per_hop(coalesces: bool) -> None:
    """Every pass of a ring of two makes one call per message, in one group of calls per hop if the backend supports it."""
    rank, layout = dist.get_rank(), Layout.zigzag(64, 2)
    case, peer = Case.random(64, batch=2, dtype=torch.float32), 1 - rank
    transport = connect.connect(dist.group.WORLD.group_name, torch.device("cpu"))
    transport.group = group = RecordingGroup(transport.group, coalesces)
    for schedule, hops in (
        # The forward pass of the KV ring has no results. In all other passes, a block comes first and a result comes last.
        ("kv", 1 + 2),
        ("state", 2 + 2),
    ):
        group.calls.clear()
        results = case.on_rank(layout, Mask.full(), rank, dist.group.WORLD, schedule=schedule)
        exact = case.to(torch.float64).unsharded(Mask.full())
        assert_close([layout.unshard(x, group=dist.group.WORLD) for x in results], exact, 1e-5)
        hop = [("send", peer), ("recv", peer)]
        assert group.calls == hops * ([("start",), *hop, ("end",), ("wait",)] if coalesces else hop)


@pytest.mark.parametrize("coalesces", [False, True])
def test_a_hop_is_one_send_and_one_receive(coalesces: bool, tmp_path: Path) -> None:
    """Blocks of two to four tensors and results of one to three tensors are single messages."""
    run_ranks(check_calls_per_hop, 2, tmp_path / "ranks", coalesces)


def check_messages_through_host_memory() -> None:
    """Run rings with the copies that ranks on GPUs make for gloo."""
    assert backend_name(dist.group.WORLD, "cpu") == backend_name(dist.group.WORLD, "cuda") == "gloo"
    assert backend_name(dist.group.WORLD, "xpu") == ""
    transport = connect.connect(dist.group.WORLD.group_name, torch.device("cpu"))
    torch.cuda.is_current_stream_capturing = lambda: True
    with pytest.raises(RuntimeError, match="cannot be part of a CUDA graph"):
        transport._exchange_through_host([], [])
    torch.cuda.is_current_stream_capturing = lambda: False
    P2PTransport.exchange = P2PTransport._exchange_through_host
    check_rings(33, 8, torch.float64, "reference", 1e-10, quick=True)


def test_messages_through_host_memory(tmp_path: Path) -> None:
    """gloo cannot read the memory of GPUs, so ranks that share a GPU send copies in host memory."""
    run_ranks(check_messages_through_host_memory, 2, tmp_path / "ranks")


class InterruptedGroup(RecordingGroup):
    """A process group in which the user presses Ctrl-C between the send and the receive of a hop."""

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> dist.Work:
        raise KeyboardInterrupt


def check_interrupted_hop() -> None:
    """The hop must end the group of calls that it has started. Afterwards, all ranks have different numbers of exchanges."""
    transport = connect.connect(dist.group.WORLD.group_name, torch.device("cpu"))
    transport.group = InterruptedGroup(transport.group, coalesces=True)
    peer, x = 1 - dist.get_rank(), torch.zeros(1)
    with pytest.raises(KeyboardInterrupt):
        transport.exchange([(x, peer)], [(x, peer)])
    assert transport.group.calls == [("start",), ("send", peer), ("end",)]
    places = [None, None]
    dist.all_gather_object(places, transport.num_exchanges)
    assert places == [-1, -2]


def test_an_exception_ends_the_calls_that_nccl_coalesces(tmp_path: Path) -> None:
    """If the group stayed open, NCCL would add all later calls of the process to it, and never start them."""
    run_ranks(check_interrupted_hop, 2, tmp_path / "ranks")

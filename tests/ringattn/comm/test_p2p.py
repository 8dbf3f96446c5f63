"""Tests of rings in real processes: over gloo on CPUs, and over NCCL and NVLink on GPUs."""

import random
import threading
import time
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ringattn import Layout, Mask, flash_attention, ring_attention, ulysses
from ringattn.layout import KINDS
from tests.covering import pairs
from tests.distributed import run_ranks
from tests.ringattn.rings import MASK_NAMES, Case, assert_close, masks
from tests.ringattn.test_ulysses import on_rank

GPUS = torch.cuda.device_count()


def _param(ranks: int):
    too_few = pytest.mark.skipif(ranks > GPUS, reason=f"needs {ranks} GPUs")
    return pytest.param(ranks, id=f"P{ranks}", marks=[pytest.mark.gpu, too_few])


on_gpus = pytest.mark.parametrize("ranks", [_param(2), _param(4)])


def check_rings(
    seq_len: int,
    dim: int,
    dtype: torch.dtype,
    backend: str,
    tolerance: float,
    device: str = "cpu",
    transport: str = "auto",
    quick: bool = False,
) -> None:
    """On every rank of a job: masks, layouts and schedules over all ranks, compared with fp64 on one rank.

    With `quick` every pair of values occurs, and otherwise every combination.
    """
    rank, ranks, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    case = Case.random(seq_len=seq_len, batch=2, dim=dim, value_dim=dim).to(dtype)
    choices = dict(mask=MASK_NAMES, kind=KINDS, schedule=("state", "kv"))
    exact = {}
    for name, kind, schedule in pairs(**choices) if quick else product(*choices.values()):
        mask, layout = masks(seq_len)[name], Layout(kind, seq_len, ranks)
        if name not in exact:
            exact[name] = case.to(torch.float64).unsharded(mask)
        options = {"schedule": schedule, "backend": backend, "transport": transport}
        shards = case.to(device).on_rank(layout, mask, rank, group, **options)
        assert_close([layout.unshard(shard, group=group).cpu() for shard in shards], exact[name], tolerance)


def check_subgroups() -> None:
    """Two rings of two ranks in one job: a rank has another number in its ring than in the job."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group, case, layout = groups[rank % 2], Case.random(seq_len=21, seed=rank % 2), Layout.zigzag(21, 2)
    mask = masks(21)["causal"]
    shards = case.on_rank(layout, mask, group.rank(), group)
    assert_close([layout.unshard(shard, group=group) for shard in shards], case.unsharded(mask), 1e-10)


def check_gloo(quick: bool) -> None:
    """Rings over all ranks of a job on CPUs, and on four ranks also rings of two."""
    check_rings(33, 8, torch.float64, "reference", 1e-10, quick=quick)
    check_rings(33, 8, torch.float32, "auto", 1e-5, quick=quick)
    if dist.get_world_size() == 4:
        check_subgroups()


def check_groups_of_unshard() -> None:
    """Join a layout over two of the four ranks of a job."""
    layout, rank = Layout.zigzag(21, 2), dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    x = torch.arange(21.0)[None]
    shard = layout.shard(x, rank // 2)
    assert torch.equal(layout.unshard(shard, group=groups[rank % 2]), x)
    for group, found in ((None, "4 ranks"), (groups[1 - rank % 2], "group"), (dist.group.WORLD, "4 ranks")):
        with pytest.raises(ValueError, match=f"{found}.*2 ranks"):
            layout.unshard(shard, group=group)


def test_unshard_requires_the_group_of_the_layout(tmp_path: Path) -> None:
    """Another group raises an error instead of mixing up tokens."""
    run_ranks(check_groups_of_unshard, 4, tmp_path / "ranks")


@pytest.mark.parametrize("ranks", (1, 2, 3, 4), ids=lambda n: f"P{n}")
def test_gloo(ranks: int, tmp_path: Path) -> None:
    """Every pair of mask, layout and schedule."""
    run_ranks(check_gloo, ranks, tmp_path / "ranks", True)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", (2, 3, 4), ids=lambda n: f"P{n}")
def test_gloo_with_every_combination(ranks: int, tmp_path: Path) -> None:
    """Every combination of mask, layout and schedule."""
    run_ranks(check_gloo, ranks, tmp_path / "ranks", False)


def check_nvlink_on_cpus() -> None:
    """Every rank raises the error, with the reason and the transports that are available."""
    case, layout = Case.random(seq_len=8), Layout.zigzag(8, dist.get_world_size())
    with pytest.raises(ValueError, match="transport='nvlink' is unavailable: the tensors are on cpu.*'p2p' or 'auto'"):
        case.on_rank(layout, Mask.causal(), dist.get_rank(), dist.group.WORLD, transport="nvlink")


def test_nvlink_is_unavailable_on_cpus(tmp_path: Path) -> None:
    """No rank waits for another one."""
    run_ranks(check_nvlink_on_cpus, 2, tmp_path / "ranks")


def check_gpus(transport: str) -> None:
    """Rings over all ranks of a job on GPUs, in fp32 and in bf16."""
    device = f"cuda:{dist.get_rank()}"
    check_rings(515, 64, torch.float32, "triton", 1e-5, device, transport)
    check_rings(515, 64, torch.bfloat16, "auto", 2e-2, device, transport)


@pytest.mark.parametrize("transport", ("nvlink", "p2p"))
@on_gpus
def test_gpus(ranks: int, transport: str, tmp_path: Path) -> None:
    """Every combination of mask, layout and schedule."""
    run_ranks(check_gpus, ranks, tmp_path / "ranks", transport, backend="nccl")


def check_ulysses(transport: str) -> None:
    """On every rank of a job: all-to-alls among all ranks or among two of them, in one chunk and in several."""
    rank, ranks, device = dist.get_rank(), dist.get_world_size(), f"cuda:{dist.get_rank()}"
    original = ulysses.head_chunks_for_overlap
    for size, most in product({ranks, 2}, (1, 2)):
        ulysses.head_chunks_for_overlap = lambda rows, heads, key_heads, most=most: min(most, key_heads)
        mesh = dist.init_device_mesh("cuda", (ranks // size, size), mesh_dim_names=("ring", "ulysses"))
        groups = dict(ulysses_group=mesh.get_group("ulysses"), ring_group=mesh.get_group("ring"))
        layout = Layout.zigzag(1031, ranks // size).split(size)
        case = Case.random(1031, batch=2, heads=16, key_heads=8, dim=64, value_dim=64, dtype=torch.bfloat16)
        for recompute, mask in product((False, True), masks(1031).values()):
            options = groups | dict(transport=transport, recompute_all_to_all=recompute)
            got = on_rank(case.to(device), layout, mask, rank, **options)
            exact = case.to(torch.float64).to(device).unsharded(mask)
            assert_close([layout.unshard(x) for x in got], exact, 2e-2)
    ulysses.head_chunks_for_overlap = original


@pytest.mark.parametrize("transport", ("nvlink", "p2p"))
@on_gpus
def test_ulysses_on_gpus(ranks: int, transport: str, tmp_path: Path) -> None:
    """Every mask, with and without repeating the all-to-all in the backward."""
    run_ranks(check_ulysses, ranks, tmp_path / "ranks", transport, backend="nccl")


def check_ulysses_with_delays() -> None:
    """Calls follow each other while ranks are delayed at random, outside of a CUDA graph and in one.

    The bits equal those of calls that run one at a time.
    """
    rank, ranks, delays = dist.get_rank(), dist.get_world_size(), random.Random(dist.get_rank())
    layout, mask = Layout.contiguous(16384, 1).split(ranks), Mask.causal()
    cases = [Case.random(16384, heads=16, key_heads=16, dim=64, value_dim=64, dtype=torch.bfloat16, seed=i) for i in range(3)]
    cases = [case.to(f"cuda:{rank}") for case in cases]
    options = dict(layout=layout, mask=mask, ulysses_group=dist.group.WORLD, transport="nvlink", backend="triton")
    shards = [[layout.shard(x, rank) for x in (case.q, case.k, case.v, case.dout)] for case in cases]
    q, k, v, dout = (x.clone().requires_grad_(i < 3) for i, x in enumerate(shards[0]))

    def attend() -> list[torch.Tensor]:
        out = ulysses.ulysses_attention(q, k, v, **options)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]

    def take(i: int) -> None:
        with torch.no_grad():
            for x, y in zip((q, k, v, dout), shards[i], strict=True):
                x.copy_(y)

    alone = []
    for i in range(3):
        take(i)
        torch.cuda.synchronize()
        dist.barrier()
        alone.append(attend())
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend()
    differ = []
    for i in range(24):
        torch.cuda._sleep(delays.choice([0, 0, 20_000, 200_000, 2_000_000]))
        take(i % 3)
        if i % 4 < 2:
            got = attend()
        else:
            graph.replay()
            got = captured
        differ += [(x != y).any() for x, y in zip(got, alone[i % 3], strict=True)]
    assert not torch.stack(differ).any()


@on_gpus
def test_ulysses_with_delays(ranks: int, tmp_path: Path) -> None:
    """No rank overwrites a slot that another rank still reads."""
    run_ranks(check_ulysses_with_delays, ranks, tmp_path / "ranks", backend="nccl")


def check_rings_with_delays() -> None:
    """Ring passes follow each other while ranks are delayed at random. The bits equal those of passes one at a time."""
    rank, ranks, delays = dist.get_rank(), dist.get_world_size(), random.Random(dist.get_rank())
    layout, mask = Layout.zigzag(2048 * ranks, ranks), Mask.causal()
    cases = [Case.random(2048 * ranks, heads=4, dim=64, value_dim=64, dtype=torch.bfloat16, seed=i) for i in range(3)]
    cases = [case.to(f"cuda:{rank}") for case in cases]
    for schedule in ("state", "kv"):
        options = {"schedule": schedule, "transport": "nvlink", "backend": "triton"}  # whose bits are the same every time
        alone = []
        for case in cases:
            torch.cuda.synchronize()
            dist.barrier()
            alone.append(case.on_rank(layout, mask, rank, dist.group.WORLD, **options))
            torch.cuda.synchronize()
        differ = []
        for i in range(24):
            torch.cuda._sleep(delays.choice([0, 0, 20_000, 200_000, 2_000_000]))
            got = cases[i % 3].on_rank(layout, mask, rank, dist.group.WORLD, **options)
            differ += [(x != y).any() for x, y in zip(got, alone[i % 3], strict=True)]
        assert not torch.stack(differ).any()


@on_gpus
def test_nvlink_with_delays(ranks: int, tmp_path: Path) -> None:
    """No rank overwrites a slot that another rank still reads."""
    run_ranks(check_rings_with_delays, ranks, tmp_path / "ranks", backend="nccl")


def check_graph() -> None:
    """Forward and backward are captured in a CUDA graph and replayed with other data, between passes outside of it."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    layout, mask = Layout.zigzag(1024 * ranks, ranks), Mask.causal()
    cases = [Case.random(1024 * ranks, heads=4, dim=64, value_dim=64, dtype=torch.bfloat16, seed=i) for i in range(3)]
    cases = [case.to(f"cuda:{rank}") for case in cases]
    for schedule in ("state", "kv"):
        options = {"schedule": schedule, "transport": "nvlink", "backend": "triton"}
        alone = [case.on_rank(layout, mask, rank, dist.group.WORLD, **options) for case in cases]
        inputs = [layout.shard(x, rank) for x in (cases[0].q, cases[0].k, cases[0].v, cases[0].dout, cases[0].dlse.float())]
        q, k, v, *upstream = (x.requires_grad_(i < 3) for i, x in enumerate(inputs))
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        dist.barrier()
        with torch.cuda.graph(graph):
            outputs = ring_attention(q, k, v, layout=layout, mask=mask, group=dist.group.WORLD, return_lse=True, **options)
            grads = torch.autograd.grad(outputs, (q, k, v), upstream)
        for i in (0, 1, 2, 1):
            case = cases[i]
            with torch.no_grad():
                for x, whole in zip(inputs, (case.q, case.k, case.v, case.dout, case.dlse), strict=True):
                    x.copy_(layout.shard(whole, rank))
            graph.replay()
            replayed = [x.detach().clone() for x in (*outputs, *grads)]
            repeated = case.on_rank(layout, mask, rank, dist.group.WORLD, **options)
            assert all(torch.equal(x, y) for x, y in zip(replayed, alone[i], strict=True))
            assert all(torch.equal(x, y) for x, y in zip(repeated, alone[i], strict=True))


@on_gpus
def test_nvlink_in_a_cuda_graph(ranks: int, tmp_path: Path) -> None:
    """Replays return the same bits as calls outside of a graph."""
    run_ranks(check_graph, ranks, tmp_path / "ranks", backend="nccl")


def start_two_rings() -> None:
    """Two threads use a ring each, and the ranks start them in different order."""
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

"""Tests of 2, 4 and 8 ranks on GPUs: rings, all-to-alls, decoding and CUDA graphs, compared with float64.

If the machine has fewer GPUs than ranks, several ranks share a GPU. The ranks of a pool run all tests of this file, because a
new process needs seconds to initialise CUDA.

Most tests use fp32 and the portable kernels. The results have small errors and the same bits in every call, so that small
faults exceed the tolerance. All these tests run kernels with 4 query heads, 2 key heads and a head dim of 64, so that few
kernels are compiled.
"""

import logging
import random
import time
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ringattn import Layout, Mask, ring_attention, ulysses, ulysses_attention
from ringattn.comm import connect, pass_graphs
from ringattn.comm.nvlink import NvlinkTransport
from ringattn.comm.p2p import CLOSE_TIMEOUT, P2PTransport, backend_name
from ringattn.ring import free_plans
from tests.covering import pairs
from tests.distributed import RankPool, gpu_backend, gpu_ranks
from tests.ringattn.comm.test_p2p import check_rings, check_subgroups
from tests.ringattn.rings import MASK_NAMES, NAMES, Case, assert_close, masks
from tests.ringattn.test_decode import assert_rows_close, decode
from tests.ringattn.test_operands import expected_results
from tests.ringattn.test_ulysses import on_rank

__all__ = ["gpu_ranks"]

pytestmark = pytest.mark.gpu

# The largest error of a row relative to the largest row. In bf16, rounding alone causes errors of about 1e-2. Leaving out a key
# changes a row by more than 1e-3, and losing a message changes all rows.
FP32_TOLERANCE, BF16_TOLERANCE = 1e-5, 2e-2
# A kernel for FP8 inputs also rounds the probabilities, by up to 1/16.
FP8_TOLERANCE = 0.15
HEADS, KEY_HEADS = 4, 2  # the numbers of heads of every launch
DELAYS = 0, 0, 20_000, 200_000, 2_000_000  # the clock cycles for which a rank is delayed
on_both_transports = pytest.mark.parametrize("transport", ["nvlink", "p2p"])


def this_gpu() -> torch.device:
    """The GPU of this rank."""
    return torch.device("cuda", torch.cuda.current_device())


def float64_results(case: Case, mask: Mask, layout: Layout) -> list[Tensor]:
    """Return this rank's tokens of (out, lse, dq, dk, dv), computed in float64 on the whole sequence."""
    whole = case.to(torch.float64).to(this_gpu()).unsharded(mask)
    return [layout.shard(x, dist.get_rank()) for x in whole]


def fp32_case(seq_len: int, batch: int = 1, shares: int = 1, seed: int = 0) -> Case:
    """A problem in fp32 on this GPU. Its heads can be divided among `shares` launches."""
    heads = dict(heads=shares * HEADS, key_heads=shares * KEY_HEADS, dim=64, value_dim=64)
    return Case.random(seq_len, batch, **heads, dtype=torch.float32, seed=seed).to(this_gpu())


def check_connection() -> None:
    """Both transports are available. If ranks share a GPU, rank 0 logs this once per group."""
    group, messages = dist.new_group(), []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    connect.log.addHandler(handler)
    for transport, kind in (("nvlink", NvlinkTransport), ("p2p", P2PTransport)):
        assert isinstance(connect.connect(group.group_name, this_gpu(), transport), kind)
    connect.log.removeHandler(handler)
    shares_gpu = backend_name(group, "cuda") == "gloo"
    assert len(messages) == int(shares_gpu and dist.get_rank() == 0), messages
    assert all("measured speeds are meaningless" in message for message in messages)


def test_connection(gpu_ranks: RankPool) -> None:
    """The other tests use these transports."""
    gpu_ranks.run(check_connection)


def check_all_rings(dtype: torch.dtype, options: dict[str, object]) -> None:
    """Every pair of mask, layout and schedule."""
    backend, tolerance = ("triton", FP32_TOLERANCE) if dtype == torch.float32 else ("auto", BF16_TOLERANCE)
    check_rings(128 * dist.get_world_size() + 3, 64, dtype, backend, tolerance, str(this_gpu()), quick=True, **options)


def test_rings(gpu_ranks: RankPool) -> None:
    """Masks, layouts and both schedules over all ranks."""
    gpu_ranks.run(check_all_rings, torch.float32, {"transport": "nvlink"})


SOME = {"mask_names": ("causal", "window+documents"), "kinds": ("zigzag", "striped")}


@pytest.mark.parametrize("options", [{"transport": "p2p"}, {"route": "relay"}], ids=str)
def test_rings_of_messages(options: dict[str, str], gpu_ranks: RankPool) -> None:
    """Messages go directly to the ranks that need them, or neighbours relay them."""
    gpu_ranks.run(check_all_rings, torch.float32, SOME | options)


def test_rings_with_the_kernels_for_this_gpu(gpu_ranks: RankPool) -> None:
    """The kernels that "auto" chooses for bf16."""
    gpu_ranks.run(check_all_rings, torch.bfloat16, SOME | {"transport": "nvlink"})


def check_fp8_rings(dtype: torch.dtype, transport: str) -> None:
    """Every pair of mask, layout and schedule, compared with float64 results of the rounded inputs."""
    rank, ranks, seq_len = dist.get_rank(), dist.get_world_size(), 300 * dist.get_world_size() + 3
    case = fp32_case(seq_len).to(dtype)
    tolerance = FP32_TOLERANCE if dtype == torch.float32 else FP8_TOLERANCE
    for name, kind, schedule in pairs(mask=MASK_NAMES, kind=("zigzag", "striped"), schedule=("state", "kv")):
        mask, layout = masks(seq_len)[name], Layout(kind, seq_len, ranks)
        options = dict(schedule=schedule, transport=transport, precision="fp8")
        got = case.on_rank(layout, mask, rank, dist.group.WORLD, **options)
        assert_close(got, [layout.shard(x, rank) for x in expected_results(case, layout, mask)], tolerance)


@on_both_transports
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fp8_rings(dtype: torch.dtype, transport: str, gpu_ranks: RankPool) -> None:
    """In fp32, the portable kernels compute with the rounded inputs. In bf16, a Hopper GPU has a kernel for FP8 inputs."""
    gpu_ranks.run(check_fp8_rings, dtype, transport)


def check_two_rings(transport: str) -> None:
    """Two rings in one job."""
    check_subgroups(str(this_gpu()), torch.float32, FP32_TOLERANCE, backend="triton", transport=transport)


@on_both_transports
def test_two_rings_in_one_job(transport: str, gpu_ranks: RankPool) -> None:
    """The even ranks form a ring, and so do the odd ranks."""
    gpu_ranks.run(check_two_rings, transport)


def check_unshard() -> None:
    """Gather tensors that are on GPUs."""
    layout = Layout.zigzag(101, dist.get_world_size())
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(1, 101, 2, 8, generator=torch.Generator().manual_seed(0)).to(this_gpu(), dtype)
        assert torch.equal(layout.unshard(layout.shard(x, dist.get_rank())), x)


def test_unshard(gpu_ranks: RankPool) -> None:
    """`Layout.unshard` gathers the tokens of all ranks."""
    gpu_ranks.run(check_unshard)


def passes_with_delays(passes: list[Callable[[], list[Tensor]]], expected: list[list[Tensor]]) -> None:
    """Run passes one after the other while ranks are delayed at random.

    The bits must equal `expected`, the results of passes that ran one at a time. The host never waits between the passes.
    """
    delays, differences = random.Random(dist.get_rank()), []
    for i in range(12):
        torch.cuda._sleep(delays.choice(DELAYS))
        got = passes[i % len(passes)]()
        differences += [(x != y).any() for x, y in zip(got, expected[i % len(passes)], strict=True)]
    assert not torch.stack(differences).any()


def run_alone(function: Callable[[], list[Tensor]]) -> list[Tensor]:
    """Return the results of a pass that runs alone on all ranks."""
    torch.cuda.synchronize()
    dist.barrier()
    results = [x.clone() for x in function()]
    torch.cuda.synchronize()
    return results


def check_rings_with_delays(schedule: str, transport: str) -> None:
    """Passes with other data reuse the slots of the receive buffer, or the memory of messages."""
    ranks = dist.get_world_size()
    layout, mask = Layout.zigzag(256 * ranks, ranks), Mask.causal()
    cases = [fp32_case(256 * ranks, seed=i) for i in range(3)]
    # The kernels of this backend return the same bits in every call.
    options = {"schedule": schedule, "transport": transport, "backend": "triton"}
    rank, group = dist.get_rank(), dist.group.WORLD
    passes = [lambda case=case: case.on_rank(layout, mask, rank, group, **options) for case in cases]
    alone = [run_alone(run_pass) for run_pass in passes]
    for case, results in zip(cases, alone, strict=True):
        assert_close(results, float64_results(case, mask, layout), FP32_TOLERANCE)
    passes_with_delays(passes, alone)


@on_both_transports
@pytest.mark.parametrize("schedule", ["state", "kv"])
def test_rings_with_delays(schedule: str, transport: str, gpu_ranks: RankPool) -> None:
    """No rank overwrites memory that another rank or one of its own kernels still reads."""
    gpu_ranks.run(check_rings_with_delays, schedule, transport)


def capture(function: Callable[[], list[Tensor]]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """Return a CUDA graph of a pass, and the tensors into which every replay writes its results."""
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function()
    return graph, results


def check_graph(options: dict[str, str]) -> None:
    """Capture a forward and a backward pass, and replay the graph with other data, between passes outside of the graph."""
    rank, ranks, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    layout, mask = Layout.zigzag(256 * ranks, ranks), Mask.causal()
    cases = [fp32_case(256 * ranks, seed=i) for i in range(3)]
    options = options | {"backend": "triton"}
    alone = [run_alone(lambda case=case: case.on_rank(layout, mask, rank, group, **options)) for case in cases]
    for case, results in zip(cases, alone, strict=True):
        assert_close(results, float64_results(case, mask, layout), FP32_TOLERANCE)
    first = cases[0]
    inputs = [layout.shard(x, rank).clone() for x in (first.q, first.k, first.v, first.dout, first.dlse)]
    q, k, v, *upstream = (x.requires_grad_(i < 3) for i, x in enumerate(inputs))

    def run_pass() -> list[Tensor]:
        outputs = ring_attention(q, k, v, layout=layout, mask=mask, group=group, return_lse=True, **options)
        return [x.detach() for x in (*outputs, *torch.autograd.grad(outputs, (q, k, v), upstream))]

    graph, captured = capture(run_pass)
    for i in (0, 1, 2, 1):
        case = cases[i]
        with torch.no_grad():
            for x, whole in zip(inputs, (case.q, case.k, case.v, case.dout, case.dlse), strict=True):
                x.copy_(layout.shard(whole, rank))
        graph.replay()
        replayed = [x.clone() for x in captured]
        repeated = case.on_rank(layout, mask, rank, group, **options)
        for name, x, y, z in zip(NAMES, replayed, repeated, alone[i], strict=True):
            assert torch.equal(x, z), f"{name} of replay {i} differs from the pass outside of the graph"
            assert torch.equal(y, z), f"{name} of a pass after replay {i} differs from the same pass before"


@pytest.mark.parametrize("schedule", ["state", "kv"])
def test_rings_in_a_cuda_graph(schedule: str, gpu_ranks: RankPool) -> None:
    """Replays return the same bits as passes outside of a graph."""
    gpu_ranks.run(check_graph, {"schedule": schedule, "transport": "nvlink"})


@pytest.mark.parametrize("route", ["direct", "relay"])
@pytest.mark.parametrize("schedule", ["state", "kv"])
def test_rings_over_nccl_in_a_cuda_graph(schedule: str, route: str, gpu_ranks: RankPool) -> None:
    """NCCL sends the messages from inside the graph."""
    if gpu_backend(gpu_ranks.ranks) != "nccl":
        pytest.skip("NCCL requires one GPU per rank, and messages over gloo cannot be part of a graph")
    gpu_ranks.run(check_graph, {"schedule": schedule, "transport": "p2p", "route": route})


def mesh_of(ulysses_ranks: int) -> dict[str, dist.ProcessGroup]:
    """Return the groups of this rank in a mesh of rings and Ulysses groups, as arguments of `ulysses_attention`."""
    shape = dist.get_world_size() // ulysses_ranks, ulysses_ranks
    mesh = dist.init_device_mesh("cuda", shape, mesh_dim_names=("ring", "ulysses"))
    return dict(ulysses_group=mesh.get_group("ulysses"), ring_group=mesh.get_group("ring"))


def ulysses_sizes() -> list[int]:
    """The numbers of ranks per all-to-all: all ranks without a ring, and two ranks with a ring across the pairs."""
    return sorted({2, dist.get_world_size()})


def check_replays(options: dict[str, str]) -> None:
    """Passes are replayed after two calls. The receive buffer grows, a rank forgets its plans, and an exception ends a call."""
    rank, ranks, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    layout, mask = Layout.zigzag(256 * ranks, ranks), Mask.causal()
    cases = [fp32_case(256 * ranks, seed=i) for i in range(3)]
    options = options | {"backend": "triton"}
    transport = connect.connect(group.group_name, this_gpu(), options["transport"])
    alone = [run_alone(lambda case=case: case.on_rank(layout, mask, rank, group, **options)) for case in cases]

    def captured() -> int:
        passes = [x for of_plan in transport.graphs._by_plan.values() for x in of_plan.values()]
        return sum(isinstance(x, pass_graphs.CapturedPass) for x in passes)

    free_plans()  # an earlier test may have kept the plan, and therefore its graphs, until the end of the process
    transport.graphs.clear()
    with mock.patch.object(pass_graphs, "CALLS_BEFORE_CAPTURE", 2):
        for repetition in range(3):
            for i in (0, 1, 2, 1, 0):
                results = cases[i].on_rank(layout, mask, rank, group, **options)
                for name, x, y in zip(NAMES, results, alone[i], strict=True):
                    assert torch.equal(x, y), f"{name} of pass {i} differs in repetition {repetition}"
            if repetition == 0:
                assert captured() == 2, "the forward and the backward pass are captured"
            if repetition == 0 and isinstance(transport, NvlinkTransport):
                transport.receive_buffer.reserve(transport.receive_buffer.memory.numel() + 1)
                assert not captured(), "the graphs contain the old addresses"
            if repetition == 1 and rank == 0:
                free_plans()
        assert captured() == 2, f"{captured()} passes are captured"
        with mock.patch.object(pass_graphs.CapturedPass, "replay", side_effect=MemoryError), pytest.raises(MemoryError):
            cases[0].on_rank(layout, mask, rank, group, **options)
        for x, y in zip(cases[1].on_rank(layout, mask, rank, group, **options), alone[1], strict=True):
            assert torch.equal(x, y), "a pass differs after an exception"
        assert not captured(), "all ranks start again after an exception"


@on_both_transports
@pytest.mark.parametrize("schedule", ["kv", "state"])
def test_replayed_passes(schedule: str, transport: str, gpu_ranks: RankPool) -> None:
    """Replays return the same bits as other passes, and some ranks may replay a pass that others do not replay."""
    if transport == "p2p" and gpu_backend(gpu_ranks.ranks) != "nccl":
        pytest.skip("messages over gloo cannot be part of a CUDA graph")
    gpu_ranks.run(check_replays, {"transport": transport, "schedule": schedule})


def check_end_after_replays() -> None:
    """A communicator whose messages are part of CUDA graphs can be closed."""
    group = dist.new_group()
    transport = connect.connect(group.group_name, this_gpu(), "p2p")
    layout, case = Layout.zigzag(256 * group.size(), group.size()), fp32_case(256 * group.size())
    with mock.patch.object(pass_graphs, "CALLS_BEFORE_CAPTURE", 1):
        for _ in range(3):
            case.on_rank(layout, Mask.causal(), group.rank(), group, transport="p2p", backend="triton")
    dist.destroy_process_group(group)
    start = time.monotonic()
    transport.close()
    assert time.monotonic() - start < CLOSE_TIMEOUT


def test_end_after_replays(gpu_ranks: RankPool) -> None:
    if gpu_backend(gpu_ranks.ranks) != "nccl":
        pytest.skip("messages over gloo cannot be part of a CUDA graph")
    gpu_ranks.run(check_end_after_replays)


def check_ulysses(transport: str, mask_names: tuple[str, ...]) -> None:
    """All-to-alls in one head chunk and in two, with and without repeating the all-to-all in the backward."""
    ranks, original = dist.get_world_size(), ulysses.head_chunks_for_overlap
    seq_len = 64 * ranks + 7
    try:
        for size in ulysses_sizes():
            groups, layout = mesh_of(size), Layout.zigzag(seq_len, ranks // size).split(size)
            for name, chunks, recompute in pairs(mask=mask_names, chunks=(1, 2), recompute=(False, True)):
                ulysses.head_chunks_for_overlap = lambda *_, chunks=chunks: chunks
                mask, case = masks(seq_len)[name], fp32_case(seq_len, batch=2, shares=size * chunks)
                options = dict(transport=transport, recompute_all_to_all=recompute, backend="triton")
                got = on_rank(case, layout, mask, dist.get_rank(), **groups, **options)
                assert_close(got, float64_results(case, mask, layout), FP32_TOLERANCE)
    finally:
        ulysses.head_chunks_for_overlap = original


@on_both_transports
def test_ulysses(transport: str, gpu_ranks: RankPool) -> None:
    """All-to-alls among all ranks, and among two ranks with a ring across the pairs."""
    gpu_ranks.run(check_ulysses, transport, MASK_NAMES if transport == "nvlink" else ("documents",))


def check_ulysses_with_delays(size: int) -> None:
    """Calls follow each other while ranks are delayed at random, outside and inside a CUDA graph."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    layout, mask = Layout.zigzag(128 * ranks, ranks // size).split(size), Mask.causal()
    options = dict(layout=layout, mask=mask, transport="nvlink", backend="triton", **mesh_of(size))
    cases = [fp32_case(128 * ranks, shares=size, seed=i) for i in range(3)]
    cases = [replace(case, dlse=torch.zeros_like(case.dlse)) for case in cases]  # the calls return no lse
    shards = [[layout.shard(x, rank) for x in (case.q, case.k, case.v, case.dout)] for case in cases]
    q, k, v, dout = (x.clone().requires_grad_(i < 3) for i, x in enumerate(shards[0]))

    def set_inputs(i: int) -> None:
        with torch.no_grad():
            for x, y in zip((q, k, v, dout), shards[i], strict=True):
                x.copy_(y)

    def run_pass() -> list[Tensor]:
        out = ulysses_attention(q, k, v, **options)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]

    alone = []
    for i, case in enumerate(cases):
        set_inputs(i)
        alone.append(run_alone(run_pass))
        out, lse, *grads = float64_results(case, mask, layout)
        assert_close([alone[i][0], lse, *alone[i][1:]], [out, lse, *grads], FP32_TOLERANCE)
    graph, captured = capture(run_pass)

    def replay() -> list[Tensor]:
        graph.replay()
        return captured

    def with_inputs(i: int) -> list[Tensor]:
        set_inputs(i % 3)
        return run_pass() if i % 4 < 2 else replay()

    passes_with_delays([lambda i=i: with_inputs(i) for i in range(12)], [alone[i % 3] for i in range(12)])


@pytest.mark.parametrize("mesh", ["all ranks", "pairs"])
def test_ulysses_with_delays(mesh: str, gpu_ranks: RankPool) -> None:
    """No rank overwrites a region of a receive buffer that another rank still reads."""
    gpu_ranks.run(check_ulysses_with_delays, 2 if mesh == "pairs" else gpu_ranks.ranks)


def check_decoding() -> None:
    """Decode with a cache that is sharded over all ranks. All ranks must get the same bits."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    prompt = 300 * ranks + 5
    case = fp32_case(prompt + 6, batch=2)
    for window, kind in ((None, "zigzag"), (400, "contiguous")):
        out = decode(case, prompt, 2, dist.group.WORLD, rank, Layout(kind, prompt, ranks), window, backend="triton")
        exact = case.to(torch.float64).unsharded(Mask.causal(window))[0][:, prompt:]
        assert_rows_close(out, exact, FP32_TOLERANCE)
        of_all = [torch.empty_like(out, device="cpu") for _ in range(ranks)]
        dist.all_gather(of_all, out.cpu())
        assert all(torch.equal(x, of_all[0]) for x in of_all)


def test_decoding(gpu_ranks: RankPool) -> None:
    """Every rank sends its partial state to all other ranks."""
    gpu_ranks.run(check_decoding)

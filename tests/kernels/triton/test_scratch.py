"""Scratch memory is reused on one stream, and never shared by two calls that may run at the same time."""

import weakref
from types import SimpleNamespace

import pytest
import torch

from ringattn import KVCache, Layout, decode_attention
from ringattn.kernels.triton import scratch as module
from ringattn.kernels.triton.scratch import ScratchPool


class OnGPU(SimpleNamespace):
    """Stands for a GPU tensor, but has memory on the CPU."""

    def get_device(self) -> int:
        return self.device

    def new_empty(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype)

    def new_zeros(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The state of the GPUs, which a test can change: whether the current stream is being captured."""
    state = SimpleNamespace(capturing=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    return state


def test_the_next_call_on_a_stream_reuses_the_memory(gpu):
    pool = ScratchPool()
    key, first = pool.take(100, 3, OnGPU(device=0), 7)
    assert first.numbers.dtype == torch.float32
    assert first.numbers.shape == (100,)
    assert first.counters.dtype == torch.int32
    assert len(first.counters) >= 3
    assert not first.counters.any()
    pool.give_back(key, first)
    key, smaller = pool.take(60, module.MAX_COUNTERS, OnGPU(device=0), 7)
    assert smaller is first
    assert len(first.counters) == module.MAX_COUNTERS
    pool.give_back(key, smaller)
    key, larger = pool.take(101, 0, OnGPU(device=0), 7)
    assert larger.numbers.numel() == 101
    pool.give_back(key, larger)
    assert pool.take(1, 0, OnGPU(device=0), 7)[1] is larger


def test_other_streams_and_other_gpus_have_their_own_memory(gpu):
    pool = ScratchPool()
    key, first = pool.take(10, 1, OnGPU(device=0), 7)
    pool.give_back(key, first)
    assert pool.take(10, 1, OnGPU(device=1), 7)[1] is not first
    assert pool.take(10, 1, OnGPU(device=0), 8)[1] is not first
    assert pool.take(10, 1, OnGPU(device=0), 7)[1] is first


def test_two_threads_on_one_stream_have_their_own_memory(gpu):
    """The second thread launches after the first thread has launched only some of its kernels."""
    pool = ScratchPool()
    pool.give_back(*pool.take(10, 1, OnGPU(device=0), 7))
    first, second = (pool.take(10, 1, OnGPU(device=0), 7) for _ in range(2))
    assert first[1] is not second[1]
    pool.give_back(*second)
    pool.give_back(*first)
    assert pool.take(10, 1, OnGPU(device=0), 7)[1] is first[1]


def test_a_captured_graph_has_its_own_memory(gpu):
    pool = ScratchPool()
    key, first = pool.take(10, 1, OnGPU(device=0), 7)
    pool.give_back(key, first)
    gpu.capturing = True
    key, captured = pool.take(10, 1, OnGPU(device=0), 7)
    assert captured is not first
    assert captured.counters.data_ptr() != first.counters.data_ptr()
    pool.give_back(key, captured)
    gpu.capturing = False
    assert pool.take(10, 1, OnGPU(device=0), 7)[1] is first


def test_captured_calls_share_a_chunk_of_counters(gpu, monkeypatch):
    """The counters of two captured calls never overlap. If the chunk is used up, every replay initialises the counters."""
    monkeypatch.setattr(module, "CHUNK_COUNTERS", 16)
    pool, like = ScratchPool(), OnGPU(device=0)
    pool.reserve_counters(like)
    gpu.capturing = True
    first, second, third = (pool.take(10, count, like, 7)[1].counters for count in (5, 8, 1))
    assert second.data_ptr() == first.data_ptr() + 8 * 4
    assert (len(first), len(second)) == (5, 8)
    assert third.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
    gpu.capturing = False
    earlier = [weakref.ref(chunk) for chunk in pool._chunks._chunks]
    del first, second
    pool.reserve_counters(like)
    gpu.capturing = True
    assert pool.take(10, 16, like, 7)[1].counters.untyped_storage().nbytes() == 64
    # The graph still refers to the memory of the first two calls.
    assert all(chunk() is not None for chunk in earlier)


def test_large_memory_and_memory_of_cpus_is_not_kept(gpu, monkeypatch):
    pool = ScratchPool()
    monkeypatch.setattr(module, "MAX_KEPT_BYTES", 400)
    for like, stream, size, kept in (
        (OnGPU(device=0), 7, 101, False),
        (OnGPU(device=0), 7, 100, True),
        (torch.empty(0), None, 10, False),
    ):
        key, scratch = pool.take(size, 1, like, stream)
        pool.give_back(key, scratch)
        assert (pool.take(1, 1, like, stream)[1] is scratch) == kept


@pytest.mark.gpu
def test_concurrent_streams_and_graphs_do_not_share_memory():
    """Calls on two streams, with a replayed graph between them, give the same results as calls one after the other."""
    generator = torch.Generator("cuda").manual_seed(0)
    options = {"generator": generator, "device": "cuda", "dtype": torch.bfloat16}
    cache = KVCache(8192)
    cache.prefill(*(torch.randn(2, 8192, 2, 128, **options) for _ in range(2)), Layout.contiguous(8192, 1))
    queries = [torch.randn(2, 1, 8, 128, **options) for _ in range(3)]
    hi = torch.full((1, 1), 8192, dtype=torch.int32, device="cuda")
    expected = [decode_attention(q, cache, bounds=(torch.zeros_like(hi), hi)) for q in queries]
    streams, graph = [torch.cuda.Stream() for _ in range(2)], torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = decode_attention(queries[2], cache, bounds=(torch.zeros_like(hi), hi))
    found = [[], []]
    for _ in range(50):
        for stream, q, results in zip(streams, queries, found, strict=False):
            with torch.cuda.stream(stream):
                results.append(decode_attention(q, cache, bounds=(torch.zeros_like(hi), hi)))
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, expected[2])
    assert all(torch.equal(out, exact) for results, exact in zip(found, expected, strict=False) for out in results)

"""Caches of GPU tensors: other streams wait for the tensors, and a cache never keeps what a CUDA graph computes.

Most tests run without a GPU. `FakeGpu` replaces the streams and events of a GPU, and tensors on the CPU count as its tensors.
"""

import ast
import timeit
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ringattn import BlockMask, KVCache, Layout, Mask, decode, decode_attention, flash, flash_attention, ring, ring_attention
from ringattn.kernels import blocks, caching, fp8
from ringattn.kernels.caching import SharedTensors, cached_on_device
from ringattn.kernels.triton import quantize
from ringattn.planning import rank_plan

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def forget() -> None:
    """Empty all caches of tensors."""
    flash._block_masks.clear()
    for cache in (
        flash._intervals, flash._positions, rank_plan._positions, rank_plan._plans, ring._cached_plan, fp8.rotation,
        fp8.key_order, quantize._matrices, decode._rows_of_lengths, decode._upload,
    ):  # fmt: skip
        cache.cache_clear()


def memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


class FakeStream:
    """A stream that knows which memory is written and which memory is not yet reused when its next kernel runs."""

    def __init__(self, address: int) -> None:
        self.cuda_stream = address
        self.written: set[int] = set()
        self.kept: set[int] = set()
        self.num_waits = 0

    def wait_event(self, event: "FakeEvent") -> None:
        self.num_waits += 1
        self.written |= event.written

    def may_read(self, x: Tensor) -> bool:
        return memory(x) in self.written and memory(x) in self.kept


class FakeEvent:
    """When the event occurs, all earlier writes of its stream are complete."""

    def record(self, stream: FakeStream) -> None:
        self.written = set(stream.written)


class FakeGpu:
    """A GPU to which all tensors belong. A tensor is written on the stream that is current when the tensor enters a cache."""

    def __init__(self) -> None:
        self.streams = [FakeStream(address) for address in range(4)]
        self.current = self.streams[0]
        self.capturing = False
        self.tensors: dict[int, Tensor] = {}  # all tensors of caches; they stay alive, so that no two have the same address

    def owns(self, x: Tensor) -> bool:
        if memory(x) not in self.tensors:
            self.tensors[memory(x)] = x
            self.current.written.add(memory(x))
            self.current.kept.add(memory(x))
        return True

    def run_on(self, number: int, function: Callable[[], object]) -> object:
        self.current = self.streams[number]
        return function()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    gpu = FakeGpu()
    forget()
    for name, replacement in (
        ("current_stream", lambda device: gpu.current),
        ("is_current_stream_capturing", lambda: gpu.capturing),
        ("Event", FakeEvent),
    ):
        monkeypatch.setattr(torch.cuda, name, replacement)
    for module in (caching, blocks, flash):
        monkeypatch.setattr(module, "is_capturing", lambda device: gpu.capturing)
    monkeypatch.setattr(caching, "_on_gpu", gpu.owns)
    monkeypatch.setattr(caching, "_stream_address", lambda device: gpu.current.cuda_stream)
    monkeypatch.setattr(Tensor, "record_stream", lambda x, stream: stream.kept.add(memory(x)))
    yield gpu
    forget()


def test_a_cache_of_one_stream_never_waits(gpu, monkeypatch):
    """On the stream that has written the tensors, a read neither waits nor asks for an event."""
    tensors = SharedTensors()
    tensors["x"], tensors["y"] = torch.ones(1), (torch.ones(1), None)
    for name in ("current_stream", "is_current_stream_capturing", "Event"):
        monkeypatch.setattr(torch.cuda, name, None)
    assert all(tensors["x"] is tensors["x"] and tensors["y"][1] is None for _ in range(3))
    assert gpu.current.num_waits == 0


def test_another_stream_waits_once(gpu):
    tensors = SharedTensors()
    tensors["x"] = torch.ones(1)
    tensors.update({"y": torch.ones(1)})
    tensors.add(added := torch.ones(1))
    for _ in range(3):
        x, y = gpu.run_on(1, lambda: (tensors["x"], tensors["y"]))
    stream = gpu.streams[1]
    assert stream.num_waits == 1
    assert all(map(stream.may_read, (x, y, added)))
    assert not gpu.streams[2].may_read(x)
    gpu.run_on(2, tensors.use)
    assert gpu.streams[2].may_read(x)
    assert gpu.streams[2].may_read(added)


def test_every_stream_may_read_the_tensors_of_all_streams(gpu):
    """A stream that has waited already waits again for a tensor that another stream adds later."""
    tensors, found = SharedTensors(), []
    for number in range(3):
        gpu.current = gpu.streams[number]
        tensors[number] = torch.ones(1)
        found.append(tensors[number])
    for number, stream in enumerate(gpu.streams):
        assert gpu.run_on(number, lambda: tensors[0]) is found[0]
        assert all(stream.may_read(x) for x in found), number


def test_nothing_is_cached_during_a_capture(gpu):
    """A function that would compute a tensor for its cache raises an error. Existing tensors are returned."""
    calls = []

    @cached_on_device(maxsize=4)
    def compute(size: int, device: torch.device) -> Tensor:
        calls.append(size)
        return torch.ones(size)

    known = compute(1, CPU)
    gpu.capturing = True
    assert gpu.run_on(1, lambda: compute(1, CPU)) is known
    assert gpu.streams[1].num_waits == 0, "a captured stream cannot wait for work outside of the graph"
    with pytest.raises(RuntimeError, match="call it once before capturing"):
        compute(2, CPU)
    gpu.capturing = False
    assert gpu.run_on(1, lambda: compute(1, CPU)) is known
    assert gpu.streams[1].may_read(known)
    assert compute(2, CPU) is compute(2, CPU)
    assert calls == [1, 2]
    gpu.capturing = True
    with pytest.raises(RuntimeError, match="call it once before capturing"):
        SharedTensors()["x"] = torch.ones(1)


def random_inputs(num_tokens: int, dim: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, num_tokens, 2, dim, generator=generator).requires_grad_() for _ in range(3)]


def attend(attention: Callable[..., Tensor], **options: object) -> Callable[[], object]:
    q, k, v = random_inputs(10)
    return lambda: torch.autograd.grad(attention(q, k, v, **options).sum(), (q, k, v))


def decode_one_token() -> Callable[[], object]:
    q, k, v = (x.detach() for x in random_inputs(9))
    cache = KVCache(capacity=9)
    cache.append(k, v)
    return lambda: decode_attention(q[:, -1:], cache, backend="triton")


def attend_on_a_ring(**options: object) -> Callable[[], object]:
    options |= dict(layout=Layout.contiguous(10, 1), mask=Mask.causal(documents=[7, 3]))
    return attend(ring_attention, **options)


# Calls that together use all caches of tensors.
CALLS = {
    "intervals": lambda: attend(flash_attention, mask=Mask.causal(window=5), backend="triton"),
    "intervals of PyTorch": lambda: attend(flash_attention, mask=Mask.causal(window=5), backend="reference"),
    "dropout": lambda: attend(flash_attention, dropout_p=0.5, seed=1, backend="reference"),
    "block mask": lambda: attend(flash_attention, blocks=BlockMask(torch.ones(1, 1, 1, 1).bool(), 64), backend="triton"),
    "fp8": lambda: attend(flash_attention, precision="fp8", backend="reference"),
    "matrices of fp8": lambda: lambda: (fp8.rotation(64, CPU), quantize._matrices(64, torch.bfloat16, CPU)),
    "ring": lambda: attend_on_a_ring(backend="triton"),
    "dropout of a ring": lambda: attend_on_a_ring(dropout_p=0.5, seed=1, backend="reference"),
    "decoding": decode_one_token,
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_on_a_second_stream_waits_for_all_cached_tensors(name, gpu):
    """The second call needs all tensors that the first call has cached."""
    call = CALLS[name]()
    gpu.run_on(0, call)
    first, num_tensors = gpu.streams[0], len(gpu.tensors)
    assert num_tensors > 0
    gpu.run_on(0, call)
    assert first.num_waits == 0
    gpu.run_on(1, call)
    assert len(gpu.tensors) == num_tensors, "the second stream must not compute the tensors again"
    assert all(gpu.streams[1].may_read(x) for x in gpu.tensors.values())


# For each cache of tensors: a call that uses the cache, and the functions whose results must be forgotten to empty it.
CACHES = {
    "intervals": ("intervals", [flash._intervals]),
    "positions": ("dropout", [flash._positions]),
    "rotation": ("fp8", [fp8.rotation]),
    "order of keys": ("fp8", [fp8.key_order]),
    "matrices": ("matrices of fp8", [quantize._matrices]),
    "plan": ("ring", [ring._cached_plan, rank_plan._plans]),
}


@pytest.mark.parametrize("name", CACHES)
def test_a_call_that_would_cache_tensors_of_a_capture_raises_an_error(name, gpu):
    """All other caches contain the tensors of an earlier call."""
    name, caches = CACHES[name]
    call = CALLS[name]()
    call()
    for cache in caches:
        cache.cache_clear()
    gpu.capturing = True
    with pytest.raises(RuntimeError, match="call it once before capturing"):
        call()
    gpu.capturing = False
    call()
    gpu.capturing = True
    call()


def test_the_lists_of_a_block_mask_in_a_capture_are_part_of_the_graph(gpu):
    """Every replay computes the lists again, so no cache receives them. A capture reads lists that exist already."""
    mask = BlockMask(torch.ones(1, 2, 3, 3).bool())
    gpu.capturing = True
    captured = mask.query_lists, mask.key_lists(2)
    assert mask.query_lists is not captured[0]
    assert mask.key_lists(2) is not captured[1]
    assert not gpu.tensors
    gpu.capturing = False
    eager = mask.query_lists, mask.key_lists(2)
    gpu.capturing = True
    assert mask.query_lists is eager[0]
    assert mask.key_lists(2) is eager[1]
    assert all(map(torch.equal, eager, captured))


def test_a_captured_dropout_requires_a_seed(gpu):
    q, k, v = random_inputs(10)
    flash_attention(q, k, v, dropout_p=0.5, backend="triton")
    gpu.capturing = True
    with pytest.raises(ValueError, match="seed=None: every replay of this CUDA graph would drop the same entries"):
        flash_attention(q, k, v, dropout_p=0.5, backend="triton")
    flash_attention(q, k, v, dropout_p=0.5, seed=1, backend="triton")
    flash_attention(q, k, v, backend="triton")


def test_tensors_of_functions_with_a_device_are_shared_tensors():
    """A cached function that returns tensors on a device must use `cached_on_device`."""
    found = set()
    for path in (path for package in ("kernels", "ringattn", "train") for path in (ROOT / package).rglob("*.py")):
        text = path.read_text()
        for function in ast.walk(ast.parse(text)) if "cache" in text else ():
            if not isinstance(function, ast.FunctionDef) or function.returns is None or not function.decorator_list:
                continue
            decorators = " ".join(map(ast.unparse, function.decorator_list))
            has_device = any(argument.arg == "device" for argument in function.args.args)
            if has_device and "cache" in decorators and "Tensor" in ast.unparse(function.returns):
                assert "cached_on_device" in decorators, f"{path}: {function.name}"
                assert function.args.args[-1].arg == "device", f"{path}: {function.name}"
                found.add(function.name)
    assert {"_positions", "rotation", "key_order", "_matrices", "_upload"} <= found


SLEEP = 500_000_000  # clock cycles, about 0.3 s


def on_cuda(dtype: torch.dtype, num_tokens: int = 1024) -> list[Tensor]:
    return [torch.randn(1, num_tokens, 4, 128, device="cuda", dtype=dtype) for _ in range(3)]


def block_mask() -> BlockMask:
    return BlockMask(torch.ones(1, 1, 8, 8, dtype=torch.bool, device="cuda").tril(), 128)


# Calls whose first run writes cached tensors, with the shapes and the dtype of memory that these tensors are likely to get.
GPU_CALLS = {
    "dropout": (lambda q: dict(is_causal=True, dropout_p=0.5, seed=3, backend="triton"), torch.float32, [(1024,)]),
    "fp8": (lambda q: dict(is_causal=True, precision="fp8"), torch.bfloat16, [(2, 64, 64), (64, 64), (128, 128)]),
    "block mask": (lambda q: dict(blocks=block_mask(), backend="triton"), torch.float32, [(1, 1, 8, 9, 2), (1, 1, 8, 9)]),
    "ring": (
        lambda q: dict(mask=Mask.causal(documents=[1000, 24]), layout=Layout.contiguous(1024, 1), backend="triton"),
        torch.float32,
        [(1, 1024), (1, 16, 6), (1, 32, 6)],
    ),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_CALLS)
def test_a_second_stream_reads_tensors_that_the_first_stream_writes_late(name):
    """The first stream is busy for 0.3 s before it writes the tensors. Free memory contains garbage."""
    options, dtype, shapes = GPU_CALLS[name]
    q, k, v = on_cuda(dtype)
    options = options(q)
    attention = ring_attention if "layout" in options else flash_attention
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    for _ in range(2):  # the first call compiles the kernels
        expected = attention(q, k, v, **options)
    torch.cuda.synchronize()
    forget()
    with torch.cuda.stream(first):
        garbage = [torch.full(shape, 7, device="cuda", dtype=torch.int32) for shape in shapes for _ in range(64)]
        torch.cuda.synchronize()
        del garbage
        torch.cuda._sleep(SLEEP)
        attention(q, k, v, **options)
    with torch.cuda.stream(second):
        found = attention(q, k, v, **options)
    second.synchronize()
    assert torch.equal(found, expected)
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_evicted_tensors_live_until_all_streams_have_read_them():
    """The cache drops the intervals of a mask, and later masks would receive their memory, before a stream has read them."""
    q, k, v = on_cuda(torch.float32)
    masks, stream = [Mask.causal(window=50 + 60 * i) for i in range(14)], torch.cuda.Stream()
    expected = [flash_attention(q, k, v, mask=mask, backend="triton") for mask in masks]
    forget()
    flash_attention(q, k, v, mask=masks[0], backend="triton")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP)
        found = flash_attention(q, k, v, mask=masks[0], backend="triton")
    for mask in masks[1:]:
        flash_attention(q, k, v, mask=mask, backend="triton")
    torch.cuda.synchronize()
    assert torch.equal(found, expected[0])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["positions", "matrices", "plan"])
def test_a_capture_does_not_fill_the_caches_of_a_gpu(name):
    """After the error, eager calls and replays return the right values."""
    _, caches = CACHES[name]
    options, dtype, _ = GPU_CALLS[{"positions": "dropout", "matrices": "fp8", "plan": "ring"}[name]]
    q, k, v = on_cuda(dtype)
    options = options(q)
    attention = ring_attention if "layout" in options else flash_attention
    expected = attention(q, k, v, **options)
    torch.cuda.synchronize()
    for cache in caches:
        cache.cache_clear()
    with pytest.raises(RuntimeError, match="call it once before capturing"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        attention(q, k, v, **options)
    assert torch.equal(attention(q, k, v, **options), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attention(q, k, v, **options)
    for cache in (flash._intervals, flash._positions, ring._cached_plan, rank_plan._plans):
        cache.cache_clear()  # these caches drop old entries, and the graph must keep its tensors
    garbage = [torch.full((1024,), 7, device="cuda", dtype=torch.int32) for _ in range(256)]
    graph.replay()
    assert torch.equal(captured, expected)
    del garbage


@pytest.mark.gpu
def test_a_captured_dropout_without_a_seed_raises_an_error_on_a_gpu():
    q, k, v = on_cuda(torch.float32)
    flash_attention(q, k, v, dropout_p=0.5, backend="triton")
    with pytest.raises(ValueError, match="seed=None: every replay"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        flash_attention(q, k, v, dropout_p=0.5, backend="triton")


@pytest.mark.gpu
def test_every_replay_reads_a_block_mask_that_the_graph_has_captured():
    """A block mask that no earlier call has used becomes part of the graph."""
    q, k, v = on_cuda(torch.float32)
    keep = torch.ones(1, 1, 8, 8, dtype=torch.bool, device="cuda")
    flash_attention(q, k, v, blocks=BlockMask(keep.clone()), backend="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = flash_attention(q, k, v, blocks=BlockMask(keep), backend="triton")
    for kept in (keep.clone(), keep.tril()):
        keep.copy_(kept)
        graph.replay()
        assert torch.equal(captured, flash_attention(q, k, v, blocks=BlockMask(kept), backend="triton"))


@pytest.mark.gpu
def test_a_read_on_the_same_stream_takes_less_than_a_microsecond():
    tensors, plain = SharedTensors(), {"x": torch.zeros(1, device="cuda")}
    tensors["x"] = plain["x"]
    seconds = [min(timeit.repeat("x['x']", globals={"x": x}, number=10_000)) / 10_000 for x in (plain, tensors)]
    assert seconds[1] - seconds[0] < 1e-6


def test_a_captured_graph_keeps_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph is replayed with the addresses of tensors that a plan holds. CPU plans are not affected."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(caching, "_kept_for_graphs", {})
    plan = object()
    caching.keep_for_graph(plan, torch.device("cuda"))
    caching.keep_for_graph(object(), torch.device("cpu"))
    assert list(caching._kept_for_graphs.values()) == [plan]

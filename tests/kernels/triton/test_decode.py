"""The split-KV decoding kernel equals float64 attention, for any lengths, windows and numbers of queries."""

import dataclasses
import itertools
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels import dispatch, reference
from ringattn.kernels.triton import decode as kernel
from tests.covering import pairs
from tests.kernels.compare import TOLERANCE, assert_rows_close, assert_states_close
from tests.kernels.conftest import ON_GPU
from tests.kernels.problems import STRIDED, spread_heads, strided
from tests.kernels.triton.problems import DTYPES

LENGTHS = {  # the number of tokens of each batch entry
    "one-token": (1,),
    "not-divisible": (67,),
    "empty-entries": (0, 45, 0, 70),
    "one-long": (1, 62),
}


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make runs so short that entries have several runs, and that runs cover several entries."""
    if not ON_GPU:
        monkeypatch.setattr(kernel, "choose_tile", lambda dtype, dim: kernel.Tile(16, 16, 4, 1))
        monkeypatch.setattr(kernel, "MIN_RUN_KEYS", 32)
        kernel._plan.cache_clear()


def causal_bounds(lengths: tuple[int, ...], num_queries: int, window: int | None) -> tuple[Tensor, Tensor]:
    """The bounds of the newest tokens of caches with these lengths, int32 (B, Nq). Tokens before the first one see no keys."""
    hi = (torch.tensor(lengths)[:, None] - num_queries + 1 + torch.arange(num_queries)).clamp(min=0)
    lo = torch.zeros_like(hi) if window is None else (hi - window).clamp(min=0)
    return lo.int(), hi.int()


def random_call(
    bounds, capacity, heads=(4, 2), dims=(16, 16), dtype=torch.float32, device="cpu", sinks=None
) -> SimpleNamespace:
    """Random queries and a random cache whose unused rows are NaN, and the float64 state."""
    generator = torch.Generator().manual_seed(0)
    lo, hi = bounds
    batch, num_queries = len(lo), lo.shape[1]
    q = torch.randn(batch, num_queries, heads[0], dims[0], generator=generator).to(dtype)
    k, v = (torch.randn(batch, capacity, heads[1], dim, generator=generator).to(dtype) for dim in dims)
    scale = dims[0] ** -0.5
    state = reference.decode(q.double(), k.double(), v.double(), lo, hi, scale, sinks=sinks)
    rows = torch.arange(capacity)
    unused = (rows >= hi[:, -1:])[..., None, None]
    k, v = (x.masked_fill(unused, float("nan")) for x in (k, v))
    tensors = {name: x.to(device) for name, x in dict(q=q, k=k, v=v, lo=lo, hi=hi).items()}
    return SimpleNamespace(**tensors, scale=scale, state=state, sinks=None if sinks is None else sinks.to(device))


def dispatched(call: SimpleNamespace, backend: str, page_table: Tensor | None = None) -> Tensor:
    """The output that `dispatch` computes with a backend."""
    compute = dispatch.prepare_decode(call.q, call.k, call.v, call.lo, call.scale, True, backend, call.sinks, page_table)
    return compute(call.q, call.lo, call.hi, call.sinks)


def check(call: SimpleNamespace, dtype: torch.dtype) -> None:
    """Check the state and the output of the kernel."""
    arguments = call.q, call.k, call.v, call.lo, call.hi, call.scale
    state = tuple(x.cpu() for x in kernel.decode(*arguments, sinks=call.sinks))
    assert all(x.dtype == torch.float32 and x.is_contiguous() for x in state)
    assert_states_close(state, call.state, TOLERANCE[dtype])
    out, lse = kernel.decode(*arguments, final=True, sinks=call.sinks, return_lse=True)
    expected, expected_lse = reference.finalize(call.state, torch.float64)
    # The kernel is compiled separately for calls that return no lse.
    for x in (out, kernel.decode(*arguments, final=True, sinks=call.sinks)):
        assert x.dtype == dtype
        assert_rows_close("out", x.cpu(), expected, TOLERANCE[dtype])
    torch.testing.assert_close(lse.cpu().double(), expected_lse, atol=TOLERANCE[dtype], rtol=0.0)


CASES = pairs(
    lengths=LENGTHS,
    window=(None, 1, 20),
    queries=(1, 2, 5),
    group=(1, 4, 8),
    dims=((64, 64), (80, 80), (128, 64), (256, 256)),
    dtype=DTYPES,
)


@pytest.mark.slow
@pytest.mark.parametrize(("lengths", "window", "queries", "group", "dims", "dtype"), CASES)
def test_state_and_output_match_float64(lengths, window, queries, group, dims, dtype, device):
    """Every pair of values of two parameters occurs."""
    bounds = causal_bounds(LENGTHS[lengths], queries, window)
    check(random_call(bounds, 100, (group, 1), dims, dtype, device), dtype)


@pytest.mark.parametrize(
    "lengths", ["empty-entries", *(pytest.param(name, marks=pytest.mark.slow) for name in ("not-divisible", "one-long"))]
)
def test_any_lengths(lengths, device):
    """Two key heads and a head dim that is padded. Runs begin inside entries, and cover the ends of entries."""
    bounds, capacity = causal_bounds(LENGTHS[lengths], 2, None), max(LENGTHS[lengths]) + 2
    check(random_call(bounds, capacity, (2, 2), (20, 36), torch.float32, device), torch.float32)


@pytest.mark.parametrize(
    "lengths",
    ["one-token", "one-long", *(pytest.param(name, marks=pytest.mark.slow) for name in ("empty-entries", "not-divisible"))],
)
def test_one_launch_computes_the_same_as_two(lengths, device, monkeypatch):
    """The program of the last part merges like the second launch. Only the order of the sums may differ."""
    call = random_call(causal_bounds(LENGTHS[lengths], 1, None), max(LENGTHS[lengths]) + 2, (4, 2), device=device)
    arguments = call.q, call.k, call.v, call.lo, call.hi, call.scale
    one_launch = kernel.decode(*arguments, final=True, return_lse=True), kernel.decode(*arguments)
    monkeypatch.setattr(kernel, "MAX_MERGED_ELEMENTS", 0)
    kernel._plan.cache_clear()
    two_launches = kernel.decode(*arguments, final=True, return_lse=True), kernel.decode(*arguments)
    kernel._plan.cache_clear()
    for results, expected in zip(one_launch, two_launches, strict=True):
        for x, y in zip(results, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_sixteen_queries(dtype, device):
    """With 128 query rows, every key head has several tiles of rows."""
    check(random_call(causal_bounds((50,), 16, None), 100, (8, 1), (128, 128), dtype, device), dtype)


@pytest.mark.slow
def test_documents_and_shared_bounds(device):
    """Bounds may start anywhere, and one row of bounds may serve all batch entries."""
    lo, hi = torch.tensor([[3, 3, 40]], dtype=torch.int32), torch.tensor([[4, 40, 75]], dtype=torch.int32)
    call = random_call((lo.expand(2, -1), hi.expand(2, -1)), 80, (2, 1), device=device)
    call.lo, call.hi = lo.to(device), hi.to(device)
    check(call, torch.float32)


SINKS = pairs(
    lengths=((67,), (0, 45, 3, 70)), window=(None, 1, 20), queries=(1, 3), sinks=((0,), (1,), (4,), (16,), (33,), (90,)),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("lengths", "window", "queries", "sinks"), SINKS)
def test_sinks(lengths, window, queries, sinks, device):
    """Sinks before, across and inside the window, on the borders of tiles, and beyond the end of the cache."""
    lo, hi = causal_bounds(lengths, queries, window)
    call = random_call((lo, hi), 80, (4, 2), device=device, sinks=torch.tensor(sinks, dtype=torch.int32))
    check(call, torch.float32)
    assert_rows_close("reference", reference.finalize(call.state, torch.float64)[0], dense_output(call, sinks[0]), 1e-12)


def dense_output(call: SimpleNamespace, sinks: int) -> Tensor:
    """The float64 output under a dense mask."""
    q, k, v, lo, hi = (x.cpu() for x in (call.q, call.k.nan_to_num(), call.v.nan_to_num(), call.lo, call.hi))
    group, rows = q.shape[2] // k.shape[2], torch.arange(k.shape[1])
    mask = ((rows < sinks) | (rows >= lo[..., None])) & (rows < hi[..., None])  # (B, Nq, Nk)
    k, v = (x.double().repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k) * call.scale
    p = scores.masked_fill(~mask[:, None], float("-inf")).softmax(-1).nan_to_num()
    return torch.einsum("bhqk,bkhd->bqhd", p, v)


@pytest.mark.parametrize("page_size", [16, pytest.param(48, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sinks", [pytest.param(None, marks=pytest.mark.slow), 40])
def test_pages(page_size, sinks, device):
    """Pages in any order, with NaN in all pages and rows that no entry uses."""
    lo, hi = causal_bounds((90, 0, 33, 96), 2, 20)
    sinks = None if sinks is None else torch.tensor([sinks], dtype=torch.int32)
    call = random_call((lo, hi), 96, (4, 2), device=device, sinks=sinks)
    pages = 96 // page_size
    page_table = (4 * pages - 1 - torch.arange(4 * pages)).view(4, pages).int()  # the last page comes first, as in the stack
    pool = [torch.full((4 * pages + 1, page_size, *x.shape[2:]), float("nan"), device=device) for x in (call.k, call.v)]
    for x, paged in zip((call.k, call.v), pool, strict=True):
        paged[page_table.long().to(device)] = x.unflatten(1, (pages, page_size))
    call.k, call.v = pool
    expected = reference.finalize(call.state, torch.float64)[0]
    for backend in ("triton", "reference"):
        out = dispatched(call, backend, page_table.to(device))
        assert_rows_close(backend, out.cpu(), expected, TOLERANCE[torch.float32])


@pytest.mark.slow
def test_every_entry_has_its_own_sinks(device):
    lo, hi = causal_bounds((50, 70), 1, 8)
    check(random_call((lo, hi), 80, device=device, sinks=torch.tensor([3, 40], dtype=torch.int32)), torch.float32)


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_bounds_are_limited_to_the_cache(backend, device):
    """Bounds on a GPU are not checked, so rows outside the cache must not be read."""
    call = random_call((torch.zeros(2, 1, dtype=torch.int32), torch.tensor([[40], [40]], dtype=torch.int32)), 40, device=device)
    bounds = ([[-5], [-7]], [[41], [1000]], [90, -3])
    call.lo, call.hi, call.sinks = (torch.tensor(x, dtype=torch.int32, device=device) for x in bounds)
    out = dispatched(call, backend)
    assert_rows_close("out", out.cpu(), reference.finalize(call.state, torch.float64)[0], TOLERANCE[torch.float32])
    call.lo, call.hi = call.hi + 50, call.hi * 0 - 3
    assert not dispatched(call, backend).any()


@pytest.mark.parametrize("layout", [STRIDED[0], *(pytest.param(layout, marks=pytest.mark.slow) for layout in STRIDED[1:])])
def test_strided_caches(layout, device):
    call = random_call(causal_bounds((40, 23), 1, None), 48, (2, 2), device=device)
    call.k, call.v = strided(call.k, layout), strided(call.v, layout)
    check(call, torch.float32)


def test_caches_with_heads_beyond_32_bits(device):
    call = random_call(causal_bounds((40,), 1, None), 48, (3, 3), dtype=torch.float16, device=device)
    call.k, call.v = spread_heads(call.k), spread_heads(call.v)
    check(call, torch.float16)


@triton.jit
def _copy_entry_kernel(q, bounds, parts, out, entry, num_part_rows, CONFIG: tl.constexpr):
    row, columns = tl.arange(0, 16), tl.arange(0, CONFIG.dim)
    tile, _lo, _hi = kernel._load_queries(q, (bounds, bounds, None, 0, 0, 1), entry, 0, row, CONFIG)
    ones = tl.full([16], 1.0, tl.float32)
    kernel._store_part(parts, num_part_rows, (ones, ones, tile), entry, 0, row, CONFIG)
    tl.debug_barrier()
    state = kernel._load_parts(parts, num_part_rows, entry, 1, 0, row, columns, CONFIG)
    kernel._store_results((None, None, out, None), state, entry, 0, row, columns, CONFIG)


def test_queries_parts_and_outputs_beyond_32_bits(device):
    """A kernel copies the query of the last of 2**25 + 1 batch entries to a part, and from there to the output."""
    shape = torch.Size((1, 1, 1, 64))
    plan = kernel._plan(shape, shape, 64, shape, shape, 0, 1, 0, 1.0, torch.float16, device)
    config = dataclasses.replace(plan.config, parts=1, rows=16)
    query = torch.randn(1, 1, 2, 64, device=device).half()
    # The part has the same offset as the query. The m and the l of the part come after the o of all parts.
    q, parts, out = (spread_heads(x, 2**31) for x in (query, query.new_zeros(1, 2, 3, 64), torch.zeros_like(query)))
    bounds = torch.zeros(4, dtype=torch.int32, device=device)
    _copy_entry_kernel[(1,)](q, bounds, parts, out, 2**25, 2**25 + 1, CONFIG=config)
    assert torch.equal(out[0, 0, 1], query[0, 0, 1])
    assert torch.equal(parts[0, 0, 1], query[0, 0, 1])


@pytest.mark.parametrize("shape", [(0, 1), (2, 0)])
def test_no_queries(shape, device):
    batch, num_queries = shape
    q, k = torch.zeros(batch, num_queries, 4, 16, device=device), torch.zeros(batch, 8, 2, 24, device=device)
    bounds = torch.zeros(batch, num_queries, dtype=torch.int32, device=device)
    m, l, o = kernel.decode(q, k[..., :16], k, bounds, bounds, 1.0)
    assert m.shape == l.shape == (batch, num_queries, 4)
    assert o.shape == (batch, num_queries, 4, 24)
    assert kernel.decode(q, k[..., :16], k, bounds, bounds, 1.0, final=True).shape == o.shape


def test_no_rows(device):
    """A cache without rows gives the empty state."""
    q, k = torch.zeros(2, 1, 4, 16, device=device), torch.zeros(2, 0, 2, 16, device=device)
    bounds = torch.zeros(2, 1, dtype=torch.int32, device=device)
    m, l, o = kernel.decode(q, k, k, bounds, bounds, 1.0)
    assert (m == float("-inf")).all()
    assert not l.any()
    assert not o.any()


@pytest.mark.parametrize(("programs", "runs"), {1: 132, 8: 16, 32: 4, 64: 2, 70: 3, 132: 1, 200: 1}.items())
def test_runs_fill_the_gpu(programs, runs):
    """One program per SM of an H100, or two if one would leave a quarter of the SMs idle."""
    assert kernel.choose_num_runs(132, programs) == runs


@pytest.mark.parametrize(
    ("clock_rate", "width", "fast"), [(2_619_000, 5120, False), (3_201_000, 6016, True)], ids=["H100", "H200"]
)
def test_fast_memory_is_faster_than_that_of_an_h100(clock_rate, width, fast, monkeypatch):
    properties = SimpleNamespace(memory_clock_rate=clock_rate, memory_bus_width=width)
    monkeypatch.setattr(kernel, "supports_pdl", lambda device: device.type == "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert kernel.has_fast_memory(torch.device("cuda", 0)) is fast
    assert not kernel.has_fast_memory(torch.device("cpu"))


@pytest.mark.parametrize(
    ("batch", "keys", "key_heads", "runs", "stages"),
    [(1, 131072, 8, 16, 4), (1, 2048, 8, 16, 3), (8, 8192, 32, 8, 3), (4, 32768, 32, 8, 3), (17, 8192, 8, 33, 3)],
)
def test_fast_memory_needs_more_loads_in_flight(batch, keys, key_heads, runs, stages, monkeypatch):
    """Long sequences have one more stage, and with many entries, two programs share an SM."""
    monkeypatch.setattr(kernel, "choose_tile", lambda dtype, dim: kernel.TILES_16_BIT[128])
    monkeypatch.setattr(kernel, "has_fast_memory", lambda device: True)
    monkeypatch.setattr(kernel, "_num_sms", lambda device: 132)
    q_shape, k_shape = torch.Size((batch, 1, 32, 128)), torch.Size((batch, keys, key_heads, 128))
    strides, device = torch.empty(k_shape, device="meta").stride(), torch.device("cpu")
    kernel._plan.cache_clear()
    plan = kernel._plan(q_shape, k_shape, 128, strides, strides, 0, 1, 0, 1.0, torch.bfloat16, device)
    kernel._plan.cache_clear()
    attend = plan.attend["out"]
    assert (attend.grid[1], attend.options["num_stages"]) == (runs, stages)


@pytest.mark.parametrize(
    ("cuda", "capability", "supported"),
    [("12.8", (9, 0), True), ("12.8", (12, 0), True), ("12.8", (8, 0), False), (None, (9, 4), False)],
)
def test_programmatic_dependent_launch_requires_hopper(cuda, capability, supported, monkeypatch):
    """An AMD MI300 reports a capability of 9.4, but only NVIDIA GPUs have programmatic dependent launch."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert kernel.supports_pdl(torch.device("cuda", 0)) is supported
    assert not kernel.supports_pdl(torch.device("cpu"))


def test_every_backend_decodes(device):
    """`dispatch.prepare_decode` gives the same result with all backends. "hopper" selects the Triton kernel."""
    call = random_call(causal_bounds((21, 21), 1, 9), 21, device=device)
    expected = reference.finalize(call.state, torch.float64)[0]
    for backend in ("auto", "hopper", "triton", "blockwise", "reference"):
        out = dispatched(call, backend)
        assert_rows_close(backend, out.cpu(), expected, TOLERANCE[torch.float32])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("batch", "queries", "heads", "dim"), [(1, 1, (32, 8), 128), (3, 4, (8, 1), 64), (2, 16, (16, 16), 256)]
)
def test_long_caches(batch, queries, heads, dim, dtype):
    lengths = tuple(itertools.islice((30011, 4097, 129), batch))
    check(random_call(causal_bounds(lengths, queries, None), 30016, heads, (dim, dim), dtype, "cuda"), dtype)


@pytest.mark.gpu
def test_a_replayed_graph_reads_the_current_bounds():
    """One graph serves all lengths and numbers of sinks, and repeated calls return the same bits."""
    sinks = torch.zeros(2, dtype=torch.int32)
    call = random_call(causal_bounds((500, 500), 1, None), 512, (32, 8), (128, 128), torch.bfloat16, "cuda", sinks)
    arguments = call.q, call.k, call.v, call.lo, call.hi, call.scale, True, call.sinks
    kernel.decode(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernel.decode(*arguments)
    for lengths in ((1, 500), (64, 65), (0, 0), (499, 3)):
        for x, bound in zip((call.lo, call.hi), causal_bounds(lengths, 1, 100), strict=True):
            x.copy_(bound)
        call.sinks.copy_(torch.tensor((lengths[0] // 5, 1)))
        expected = kernel.decode(*arguments)
        graph.replay()
        assert torch.equal(out, expected)
        exact = reference.decode(*(x.double() for x in (call.q, call.k.nan_to_num(), call.v.nan_to_num())), *arguments[3:])
        assert_rows_close("out", out, exact, TOLERANCE[torch.bfloat16])

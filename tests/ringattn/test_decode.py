"""Tests of decoding with a cache that is sharded over ranks: the results equal attention over the whole sequence."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from ringattn import KVCache, Layout, Mask, PagedKVCache, decode_attention, flash_attention, ring_attention, simulate
from ringattn.comm.connect import Group
from ringattn.layout import KINDS
from tests.covering import every_pair
from tests.distributed import run_ranks
from tests.ringattn.rings import Case

# Relative error of a row in fp64. A key that is dropped, or counted twice, changes rows by more than 1e-3.
TOLERANCE = 1e-12
RANKS = (1, 2, 3, 4, 5, 7, 8)


def decode(case: Case, prompt: int, step: int, group, rank: int, layout: Layout, window: int | None, **options) -> torch.Tensor:
    """Prefill a cache with the first `prompt` tokens, then append `step` tokens at a time. Return the outputs of the latter."""
    seq_len = case.q.shape[1]
    cache, rows = KVCache(seq_len, rank, layout.ranks, block=2), []
    if prompt:
        cache.prefill(*(layout.shard(x[:, :prompt], rank) for x in (case.k, case.v)), layout)
    for begin in range(prompt, seq_len, step):
        new = slice(begin, begin + step)
        cache.append(case.k[:, new], case.v[:, new])
        rows.append(decode_attention(case.q[:, new], cache, group=group, window=window, **options))
    assert sum(cache.rows) == cache.length == seq_len
    return torch.cat(rows, 1)


def on_ring(case: Case, prompt: int, step: int, layout: Layout, window: int | None, **options) -> list[torch.Tensor]:
    """Return the outputs of every rank of a simulated ring."""
    return simulate(layout.ranks, lambda rank, group: decode(case, prompt, step, group, rank, layout, window, **options))


def assert_rows_close(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Check the error of the worst row relative to the largest row."""
    error = (got.double() - expected).norm(dim=-1).max() / expected.norm(dim=-1).max()
    assert got.shape == expected.shape, error
    assert error <= tolerance, error


@every_pair(ranks=RANKS, kind=KINDS, window=(None, 1, 7))
def test_every_rank_gets_the_same_result(ranks: int, kind: str, window: int | None) -> None:
    """A batch with grouped heads and another value dim. Three tokens are appended at a time, and two at the end."""
    case = Case.random(seq_len=40, batch=2, heads=6, key_heads=2, value_dim=5)
    expected = case.unsharded(Mask.causal(window))[0][:, 29:]
    by_rank = on_ring(case, 29, 3, Layout(kind, 29, ranks), window)
    assert_rows_close(by_rank[0], expected, TOLERANCE)
    assert all(torch.equal(one, by_rank[0]) for one in by_rank)


@pytest.mark.parametrize("ranks", [1, 4])
def test_decoding_without_a_prompt(ranks: int) -> None:
    """The first tokens go to one rank, so that other ranks have no key."""
    case = Case.random(seq_len=9)
    by_rank = on_ring(case, 0, 1, Layout.contiguous(9, ranks), None)
    assert_rows_close(by_rank[-1], case.unsharded(Mask.causal())[0], TOLERANCE)


@pytest.mark.parametrize("batch", [1, 2])
def test_a_long_shard(batch: int) -> None:
    """Thousands of keys on one rank, with a window that begins inside the cache."""
    case = Case.random(seq_len=5000, batch=batch, heads=2, key_heads=1, dim=4, value_dim=4)
    expected = flash_attention(case.q[:, 4998:], case.k, case.v, mask=Mask.causal(window=3000), backend="reference")
    by_rank = on_ring(case, 4998, 2, Layout.zigzag(4998, 1), 3000)
    assert_rows_close(by_rank[0], expected, TOLERANCE)


def test_fp32_error_does_not_grow_with_the_ranks() -> None:
    """Partial results of up to 16 ranks are merged within 1e-6 of the fp64 result."""
    case = Case.random(seq_len=203, dim=16, value_dim=16)
    expected, single = case.unsharded(Mask.causal())[0][:, 200:], case.to(torch.float32)
    for ranks in (1, 3, 16):
        by_rank = on_ring(single, 200, 1, Layout.zigzag(200, ranks), None)
        assert_rows_close(by_rank[0], expected, 1e-6)
        assert all(torch.equal(one, by_rank[0]) for one in by_rank)


def test_triton_kernel(device: torch.device) -> None:
    """Triton's interpreter runs the GPU kernel on a CPU."""
    case = Case.random(seq_len=70, heads=4, key_heads=2, dim=16, value_dim=16)
    expected = case.unsharded(Mask.causal(window=50))[0][:, 68:]
    single = case.to(torch.float32).to(device)
    assert_rows_close(on_ring(single, 68, 2, Layout.zigzag(68, 1), 50, backend="triton")[0].cpu(), expected, 1e-5)


@given(st.integers(1, 6), st.integers(1, 5), st.lists(st.integers(1, 40), min_size=1, max_size=6))
@settings(max_examples=60)
def test_each_block_goes_to_the_rank_with_the_fewest_tokens(ranks: int, block: int, numbers: list[int]) -> None:
    """The owners do not depend on how many tokens one call appends."""
    cache = KVCache(sum(numbers), 0, ranks, block)
    rows, expected = [0] * ranks, []
    for token in range(sum(numbers)):
        owner = expected[-1] if token % block else rows.index(min(rows))
        expected.append(owner)
        rows[owner] += 1
    for n in numbers:
        cache.append(*torch.zeros(2, 1, n, 1, 4))
    assert cache.rows == rows
    assert cache.shard[2][: rows[0]].tolist() == [i for i, owner in enumerate(expected) if owner == 0]


@every_pair(ranks=(1, 2, 5), kind=KINDS, sinks=(0, 1, 9, 50), window=(1, 7))
def test_sinks(ranks: int, kind: str, sinks: int, window: int) -> None:
    """The first tokens stay visible, on whichever ranks they are."""
    case = Case.random(seq_len=40, batch=2, heads=4, key_heads=2)
    by_rank = on_ring(case, 29, 3, Layout(kind, 29, ranks), window, sinks=sinks)
    query, key = torch.arange(29, 40)[:, None], torch.arange(40)
    mask = (key <= query) & ((key > query - window) | (key < sinks))
    q, k, v = (x.transpose(1, 2) for x in (case.q[:, 29:], case.k, case.v))
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)
    assert_rows_close(by_rank[0], expected, TOLERANCE)
    assert all(torch.equal(one, by_rank[0]) for one in by_rank)


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_rows_and_bounds_on_the_device(backend: str, device: torch.device) -> None:
    """Every batch entry appends its tokens at its own rows and has its own length and window."""
    dtype = torch.float64 if backend == "auto" else torch.float32
    case = Case.random(seq_len=30, batch=2, heads=4, key_heads=2, dim=16, value_dim=16)
    single = case.to(dtype).to(device)
    cache, lengths = KVCache(30), torch.tensor([11, 28])
    cache.append(torch.zeros_like(single.k[:, :1]), torch.zeros_like(single.v[:, :1]))
    garbage = (torch.ones_like(x[:, :20]) for x in (single.k, single.v))
    cache.append(*garbage, rows=torch.arange(20, device=device))
    rows = (lengths[:, None] + torch.arange(-28, 0)).clamp(min=0).to(device)
    tokens = torch.arange(2, device=device)[:, None], rows
    cache.append(single.k[tokens], single.v[tokens], rows=rows)
    hi = (lengths[:, None] + torch.tensor([-1, 0])).int()
    queries = torch.arange(2)[:, None], (hi - 1).long()
    out = decode_attention(single.q[queries], cache, bounds=((hi - 9).to(device), hi.to(device)), backend=backend)
    expected = case.unsharded(Mask.causal(9))[0][queries]
    assert_rows_close(out.cpu(), expected, TOLERANCE if backend == "auto" else 1e-5)
    assert cache.length == 1


def test_bounds_of_every_shard() -> None:
    """Every rank passes the rows of its own shard, as a CUDA graph over several ranks requires."""
    case, layout = Case.random(seq_len=40), Layout.striped(40, 3)

    def last(rank: int, group: Group) -> torch.Tensor:
        cache = KVCache(40, rank, 3)
        cache.prefill(*(layout.shard(x, rank) for x in (case.k, case.v)), layout)
        positions = layout.positions(rank)
        lo, hi, sinks = (torch.searchsorted(positions, position).int() for position in (25, 40, 4))
        return decode_attention(case.q[:, 39:], cache, group=group, bounds=(lo.view(1, 1), hi.view(1, 1)), sinks=sinks.view(1))

    expected = on_ring(case, 36, 4, Layout.contiguous(36, 1), 15, sinks=4)[0][:, 3:]
    assert_rows_close(simulate(3, last)[2], expected, TOLERANCE)


def test_prefill_after_a_ring_pass_in_any_layout() -> None:
    """Generation computes the prompt on a ring, whose keys stay where they are."""
    case = Case.random(seq_len=30)
    layout = Layout.striped(25, 4)

    def run(rank: int, group):
        q, k, v = (layout.shard(x[:, :25], rank) for x in (case.q, case.k, case.v))
        out = ring_attention(q, k, v, layout=layout, mask=Mask.causal(), group=group)
        return out, decode(case, 25, 1, group, rank, layout, None)

    shards, rows = zip(*simulate(4, run), strict=True)
    expected = case.unsharded(Mask.causal())[0]
    assert_rows_close(torch.cat((layout.unshard(list(shards)), rows[0]), 1), expected, TOLERANCE)


@given(st.sampled_from(KINDS), st.integers(0, 40), st.integers(1, 9), st.integers(1, 5), st.integers(0, 60))
@settings(max_examples=60)
def test_shards_stay_sorted_and_balanced(kind: str, prompt: int, ranks: int, block: int, new: int) -> None:
    """Every key is on exactly one rank, and ranks differ by at most one block of new tokens."""
    caches = [KVCache(prompt + new + 1, rank, ranks, block) for rank in range(ranks)]
    x = torch.arange(prompt + new + 1.0).view(1, -1, 1, 1)
    layout = Layout(kind, max(prompt, 1), ranks)
    for cache in caches:
        if prompt:
            shard = layout.shard(x[:, :prompt], cache.rank)
            cache.prefill(shard, shard, layout)
        cache.append(x[:, prompt:], x[:, prompt:])
    before = [layout.rows(rank) for rank in range(ranks)] if prompt else [0]
    rows = caches[0].rows
    assert max(rows) - min(rows) <= max(block, max(before) - min(before))
    positions_of_all = []
    for cache in caches:
        k, _, positions = cache.shard
        mine = positions[: rows[cache.rank]]
        assert cache.rows == rows
        assert (mine.diff() > 0).all()
        assert torch.equal(k[0, : len(mine), 0, 0].long(), mine)
        positions_of_all.append(mine)
    assert torch.cat(positions_of_all).sort().values.tolist() == list(range(prompt + new + 1))


@given(
    st.sampled_from(KINDS), st.integers(0, 20), st.integers(1, 5), st.integers(1, 3), st.lists(st.integers(0, 12), max_size=5)
)
@settings(max_examples=60)
def test_a_truncated_cache_equals_a_new_one(kind: str, prompt: int, ranks: int, block: int, lengths: list[int]) -> None:
    """After tokens were appended and removed in random numbers, results depend only on the tokens that remain."""
    case = Case.random(seq_len=40)
    layout = Layout(kind, max(prompt, 1), ranks)

    def run(rank: int, group) -> torch.Tensor:
        cache, shard = KVCache(40, rank, ranks, block), layout.shard
        if prompt:
            cache.prefill(*(shard(x[:, :prompt], rank) for x in (case.k, case.v)), layout)
        for length in lengths:
            wrong = torch.full_like(case.k[:, :7], float("nan")), torch.full_like(case.v[:, :7], float("nan"))
            cache.append(*wrong)
            cache.truncate(min(length, prompt))
            begin, end = cache.length, prompt + length
            cache.append(case.k[:, begin:end], case.v[:, begin:end])
        begin = cache.length
        cache.append(case.k[:, begin : begin + 2], case.v[:, begin : begin + 2])
        mine = cache.shard[2][: cache.rows[rank]]
        assert sum(cache.rows) == cache.length == begin + 2
        assert (mine.diff() > 0).all()
        assert (cache.shard[2][cache.rows[rank] :] > 40).all()
        return decode_attention(case.q[:, begin : begin + 2], cache, group=group)

    begin = prompt + lengths[-1] if lengths else prompt
    expected = case.unsharded(Mask.causal())[0][:, begin : begin + 2]
    for rows in simulate(ranks, run):
        assert_rows_close(rows, expected, TOLERANCE)


def test_tokens_after_truncation_go_to_the_rank_with_fewest() -> None:
    """After truncation, a rank does not continue an unfinished block of tokens."""
    caches = [KVCache(20, rank, 2, block=4) for rank in range(2)]
    for cache in caches:
        cache.append(*torch.zeros(2, 1, 9, 1, 4))
        assert cache.rows == [5, 4]
        cache.truncate(4)
        cache.append(*torch.zeros(2, 1, 3, 1, 4))
        assert cache.rows == [4, 3]


@pytest.mark.parametrize("length", [-1, 4, 2.0])
def test_truncate_requires_a_length_that_the_cache_has(length: int) -> None:
    """The message names the length that was given, and the valid lengths."""
    cache = KVCache(9)
    cache.append(*torch.randn(2, 1, 3, 2, 8))
    with pytest.raises(ValueError, match=f"length={length}.* from 0 to 3"):
        cache.truncate(length)
    cache.truncate(0)
    cache.append(*torch.randn(2, 1, 9, 2, 8))


def test_an_emptied_cache_accepts_a_longer_shard() -> None:
    """The memory of a rank grows if a layout assigns it more keys than its share."""
    k, v = torch.randn(2, 1, 200, 2, 8)
    cache, layout = KVCache(200, 0, 2), Layout.assigned([0] * 25, 8, 200, 2)
    cache.append(k[:, :3], v[:, :3])
    cache.truncate(0)
    cache.prefill(k, v, layout)
    assert cache.rows == [200, 0]
    assert torch.equal(cache.shard[0][:, :200], k)


def check_processes() -> None:
    """Run on every rank of a job: all ranks get the same bits."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    case = Case.random(seq_len=23, batch=2)
    out = decode(case, 17, 2, dist.group.WORLD, rank, Layout.zigzag(17, ranks), 9)
    assert_rows_close(out, case.unsharded(Mask.causal(9))[0][:, 17:], TOLERANCE)
    first = out.clone()
    dist.broadcast(first, 0)
    assert torch.equal(out, first)


@pytest.mark.parametrize("ranks", [2, 3], ids=lambda n: f"P{n}")
def test_processes_over_gloo(ranks: int, tmp_path: Path) -> None:
    """Real processes give the same results as a simulated ring."""
    run_ranks(check_processes, ranks, tmp_path / "ranks")


def test_the_widest_window_equals_no_window() -> None:
    """A window of 2**64 - 1 does not overflow."""
    cache = KVCache(5)
    cache.append(*torch.randn(2, 1, 5, 2, 8))
    q = torch.randn(1, 2, 2, 8)
    assert torch.equal(decode_attention(q, cache, window=2**64 - 1), decode_attention(q, cache))


def test_a_copied_cache_has_its_own_memory() -> None:
    cache = filled_cache()
    before = decode_attention(X, cache)
    copied = copy.deepcopy(cache)
    copied.truncate(3)
    copied.append(X[:, :1], X[:, :1] + 1.0)
    assert torch.equal(decode_attention(X, cache), before)
    assert not torch.equal(decode_attention(X, copied), before)


@pytest.mark.parametrize("new_cache", [KVCache, partial(PagedKVCache, pages=2, batch=1)], ids=("KVCache", "PagedKVCache"))
@pytest.mark.parametrize("is_prefilled", [False, True], ids=("append", "prefill"))
def test_autocast_casts_queries_and_new_tokens(new_cache: Callable, is_prefilled: bool) -> None:
    """The result has the same bits as with inputs in the autocast dtype. fp64 stays fp64."""
    case = Case.random(seq_len=20)

    def run(case: Case) -> torch.Tensor:
        cache = new_cache(capacity=20)
        if is_prefilled and new_cache is KVCache:
            cache.prefill(case.k[:, :10], case.v[:, :10], Layout.zigzag(10, 1))
        else:
            cache.append(case.k[:, :10], case.v[:, :10])
        cache.append(case.k[:, 10:], case.v[:, 10:])
        return decode_attention(case.q[:, 17:], cache)

    expected = run(case.to(torch.bfloat16)), run(case)
    with torch.autocast("cpu", torch.bfloat16):
        found = run(case.to(torch.float32)), run(case)
    assert all(map(torch.equal, found, expected))
    assert [x.dtype for x in found] == [torch.bfloat16, torch.float64]


def test_an_empty_batch() -> None:
    """The result has the shape of the queries."""
    cache = KVCache(5)
    cache.append(*torch.zeros(2, 0, 5, 2, 8))
    assert decode_attention(torch.zeros(0, 2, 2, 8), cache).shape == (0, 2, 2, 8)


X = torch.zeros(1, 4, 2, 8)
BOUNDS = torch.zeros(1, 4, dtype=torch.int32), torch.ones(1, 4, dtype=torch.int32)


def filled_cache(capacity: int = 5) -> KVCache:
    """A cache of one rank that holds four tokens."""
    cache = KVCache(capacity)
    cache.prefill(X, X, Layout.contiguous(4, 1))
    return cache


def decode_on_rank_1_of_2() -> torch.Tensor:
    """Decode without a group, with a cache that was created for the second of two ranks."""
    cache = KVCache(4, 1, 2)
    cache.append(X, X)
    return decode_attention(X, cache)


# For each mistake: a function that makes it, and a part of the message.
INVALID = {
    "no-capacity": (lambda: KVCache(0), "capacity=0: .*integer of at least 1"),
    "fractional-capacity": (lambda: KVCache(10.5), "capacity=10.5: .*integer"),
    "empty-cache": (lambda: decode_attention(X, KVCache(4)), "empty"),
    "prefill-twice": (lambda: filled_cache().prefill(X, X, Layout.contiguous(4, 1)), "holds 4 tokens"),
    "fewer-values-than-keys": (lambda: KVCache(4).prefill(X, X[:, :3], Layout.contiguous(4, 1)), "(1, 3, 2, 8)"),
    "fewer-value-heads": (lambda: KVCache(4).prefill(X, X[:, :, :1], Layout.contiguous(4, 1)), "(1, 4, 1, 8)"),
    "two-dtypes": (lambda: KVCache(4).append(X, X.half()), "float32.*float16.*one dtype"),
    "integers": (lambda: KVCache(4).append(X.int(), X.int()), "int32.*fp16"),
    "one-dimension": (lambda: KVCache(4).append(X[0, 0, 0], X[0, 0, 0]), "1 dimensions.* four"),
    "no-heads": (lambda: KVCache(4).append(X[:, :, :0], X[:, :, :0]), "0 key heads"),
    "beyond-capacity": (lambda: filled_cache().append(X, X), "4 . 4 tokens exceed .* 5"),
    "another-dtype": (lambda: filled_cache().append(X[:, :1].double(), X[:, :1].double()), "float64.*float32"),
    "layout-of-another-ring": (lambda: KVCache(4).prefill(X, X, Layout.contiguous(4, 2)), "2 ranks"),
    "prompt-beyond-capacity": (lambda: KVCache(7, 0, 2).prefill(X, X, Layout.contiguous(8, 2)), "exceed .* 7"),
    "more-queries-than-keys": (lambda: decode_attention(torch.zeros(1, 5, 2, 8), filled_cache()), "5 queries .* 4 tokens"),
    "fewer-query-heads": (lambda: decode_attention(X[:, :, :1], filled_cache()), "1 query heads and 2 key heads"),
    "queries-of-another-dtype": (lambda: decode_attention(X.double(), filled_cache()), "float64.*float32"),
    "gradient": (lambda: decode_attention(X.clone().requires_grad_(), filled_cache()), "gradient"),
    "window-of-zero": (lambda: decode_attention(X, filled_cache(), window=0), "window=0"),
    "fractional-window": (lambda: decode_attention(X, filled_cache(), window=2.5), "window=2.5"),
    "window-of-true": (lambda: decode_attention(X, filled_cache(), window=True), "window=True"),
    "unknown-backend": (lambda: decode_attention(X, filled_cache(), backend="fast"), "'fast'"),
    "cache-of-another-rank": (decode_on_rank_1_of_2, "rank 1 of 2 .* rank 0 of 1"),
    "rows-without-memory": (lambda: KVCache(4).append(X, X, rows=torch.arange(4)), "rows.*one rank"),
    "rows-on-two-ranks": (lambda: KVCache(4, 0, 2).append(X, X, rows=torch.arange(4)), "rows.*one rank"),
    "fewer-rows": (lambda: filled_cache().append(X, X, rows=torch.arange(3)), "rows is torch.int64 .3,.*int64, .4,."),
    "32-bit-rows": (lambda: filled_cache().append(X, X, rows=torch.arange(4).int()), "rows is torch.int32"),
    "bounds-and-window": (lambda: decode_attention(X, filled_cache(), bounds=BOUNDS, window=3), "window=3"),
    "64-bit-bounds": (lambda: decode_attention(X, filled_cache(), bounds=(BOUNDS[0].long(), BOUNDS[1])), "lo is torch.int64"),
    "sinks-of-half": (lambda: decode_attention(X, filled_cache(), window=1, sinks=0.5), "sinks=0.5"),
    "negative-sinks": (lambda: decode_attention(X, filled_cache(), window=1, sinks=-1), "sinks=-1"),
    "sinks-on-the-gpu": (lambda: decode_attention(X, filled_cache(), sinks=BOUNDS[0][0, :1]), "sinks=tensor.*integer"),
    "bounds-and-host-sinks": (lambda: decode_attention(X, filled_cache(), bounds=BOUNDS, sinks=3), "sinks=3 with bounds"),
    "more-sinks-than-entries": (
        lambda: decode_attention(X, filled_cache(), bounds=BOUNDS, sinks=BOUNDS[0][0]),
        "sinks is .*(4,)",
    ),
    "fewer-bounds": (lambda: decode_attention(X, filled_cache(), bounds=(BOUNDS[0], BOUNDS[1][:, 1:])), "hi is .*(1, 3)"),
}


@pytest.mark.parametrize(("call", "message"), INVALID.values(), ids=INVALID)
def test_invalid_arguments_raise_an_error(call: Callable[[], object], message: str) -> None:
    """The message names the value that was given."""
    with pytest.raises(ValueError, match=message):
        call()


def test_a_later_rank_may_hold_more_keys_than_the_first() -> None:
    """Rank 0 holds 64 keys and rank 1 holds 65."""
    case, layout = Case.random(seq_len=129), Layout.contiguous(129, 2)

    def last(rank: int, group: Group) -> torch.Tensor:
        cache = KVCache(129, rank, 2)
        cache.prefill(layout.shard(case.k, rank), layout.shard(case.v, rank), layout)
        return decode_attention(case.q[:, 128:], cache, group=group)

    assert_rows_close(simulate(2, last)[0], case.unsharded(Mask.causal())[0][:, 128:], TOLERANCE)


def test_a_cache_created_in_inference_mode_works_outside() -> None:
    """The cache's memory is not an inference tensor, which could not be modified later."""
    case, cache = Case.random(seq_len=9), KVCache(9)
    with torch.inference_mode():
        cache.append(case.k[:, :4], case.v[:, :4])
    cache.append(case.k[:, 4:], case.v[:, 4:])
    got = decode_attention(case.q[:, 8:], cache, group=None)
    assert_rows_close(got, case.unsharded(Mask.causal())[0][:, 8:], TOLERANCE)

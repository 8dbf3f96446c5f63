"""One token after another against a cache spread over ranks: the rows of attention over the whole sequence."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from ringattn import KVCache, Layout, Mask, decode_attention, ring_attention, simulate
from ringattn.comm.connect import Group
from ringattn.decode import _num_splits
from ringattn.layout import KINDS
from tests.distributed import run_ranks
from tests.ringattn.rings import Case

TOLERANCE = 1e-12  # of float64; a key that is dropped, or counted twice, changes rows by more than 1e-3
RANKS = (1, 2, 3, 4, 5, 7, 8)


def decoded(
    case: Case, prompt: int, step: int, group, rank: int, layout: Layout, window: int | None, **options
) -> torch.Tensor:
    """Rows from `prompt` on: the cache is prefilled with the rows before, and takes `step` tokens at a time."""
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
    return simulate(layout.ranks, lambda rank, group: decoded(case, prompt, step, group, rank, layout, window, **options))


def assert_rows_close(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    error = (got.double() - expected).norm(dim=-1).max() / expected.norm(dim=-1).max()
    assert got.shape == expected.shape and error <= tolerance, error


@pytest.mark.parametrize("window", (None, 1, 7))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", RANKS, ids=lambda n: f"P{n}")
def test_every_rank_gets_the_rows_of_the_whole(ranks: int, kind: str, window: int | None) -> None:
    """Grouped heads, a batch, a value dim of its own; three tokens at a time, of which the last time two."""
    case = Case.random(seq_len=40, batch=2, heads=6, key_heads=2, value_dim=5)
    expected = case.unsharded(Mask.causal(window))[0][:, 29:]
    everyone = on_ring(case, 29, 3, Layout(kind, 29, ranks), window)
    assert_rows_close(everyone[0], expected, TOLERANCE)
    assert all(torch.equal(one, everyone[0]) for one in everyone)


@pytest.mark.parametrize("ranks", (1, 4))
def test_an_empty_cache_and_ranks_without_a_key(ranks: int) -> None:
    case = Case.random(seq_len=9)
    everyone = on_ring(case, 0, 1, Layout.contiguous(9, ranks), None)
    assert_rows_close(everyone[-1], case.unsharded(Mask.causal())[0], TOLERANCE)


@pytest.mark.parametrize("batch, splits", ((1, 16), (2, 16)))
def test_a_long_shard_is_split(batch: int, splits: int) -> None:
    """Thousands of keys in one rank: several splits, the last of which are partly or wholly empty."""
    case = Case.random(seq_len=5000, batch=batch, heads=2, key_heads=1, dim=4, value_dim=4)
    assert _num_splits(batch, 5056) == splits
    expected = case.unsharded(Mask.causal(window=3000))[0][:, 4998:]
    everyone = on_ring(case, 4998, 2, Layout.zigzag(4998, 1), 3000)
    assert_rows_close(everyone[0], expected, TOLERANCE)


def test_fp32_error_does_not_grow_with_the_ranks() -> None:
    case = Case.random(seq_len=203, dim=16, value_dim=16)
    expected, single = case.unsharded(Mask.causal())[0][:, 200:], case.to(torch.float32)
    for ranks in (1, 3, 16):
        everyone = on_ring(single, 200, 1, Layout.zigzag(200, ranks), None)
        assert_rows_close(everyone[0], expected, 1e-6)
        assert all(torch.equal(one, everyone[0]) for one in everyone)


def test_triton_kernel(device: torch.device) -> None:
    case = Case.random(seq_len=70, heads=4, key_heads=2, dim=16, value_dim=16)
    expected = case.unsharded(Mask.causal(window=50))[0][:, 68:]
    single = case.to(torch.float32).to(device)
    assert_rows_close(on_ring(single, 68, 2, Layout.zigzag(68, 1), 50, backend="triton")[0].cpu(), expected, 1e-5)


def test_prefill_after_a_ring_pass_in_any_layout() -> None:
    """What generation does: the ring attends to the prompt and leaves its keys where they are."""
    case = Case.random(seq_len=30)
    layout = Layout.striped(25, 4)

    def run(rank: int, group):
        q, k, v = (layout.shard(x[:, :25], rank) for x in (case.q, case.k, case.v))
        out = ring_attention(q, k, v, layout=layout, mask=Mask.causal(), group=group)
        return out, decoded(case, 25, 1, group, rank, layout, None)

    shards, rows = zip(*simulate(4, run), strict=True)
    expected = case.unsharded(Mask.causal())[0]
    assert_rows_close(torch.cat((layout.unshard(list(shards)), rows[0]), 1), expected, TOLERANCE)


@given(st.sampled_from(KINDS), st.integers(0, 40), st.integers(1, 9), st.integers(1, 5), st.integers(0, 60))
@settings(max_examples=60)
def test_shards_stay_sorted_and_within_a_block(kind: str, prompt: int, ranks: int, block: int, new: int) -> None:
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
    held = []
    for cache in caches:
        k, _, positions = cache.shard
        mine = positions[: rows[cache.rank]]
        assert cache.rows == rows and (mine.diff() > 0).all() and torch.equal(k[0, : len(mine), 0, 0].long(), mine)
        held.append(mine)
    assert torch.cat(held).sort().values.tolist() == list(range(prompt + new + 1))


@given(
    st.sampled_from(KINDS), st.integers(0, 20), st.integers(1, 5), st.integers(1, 3), st.lists(st.integers(0, 12), max_size=5)
)
@settings(max_examples=60)
def test_a_truncated_cache_is_one_that_never_held_more(
    kind: str, prompt: int, ranks: int, block: int, lengths: list[int]
) -> None:
    """Tokens come and go; what is left, and the rows of the next queries, are those of the tokens that stayed."""
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
        assert sum(cache.rows) == cache.length == begin + 2 and (mine.diff() > 0).all()
        assert (cache.shard[2][cache.rows[rank] :] > 40).all()
        return decode_attention(case.q[:, begin : begin + 2], cache, group=group)

    begin = prompt + lengths[-1] if lengths else prompt
    expected = case.unsharded(Mask.causal())[0][:, begin : begin + 2]
    for rows in simulate(ranks, run):
        assert_rows_close(rows, expected, TOLERANCE)


@pytest.mark.parametrize("length", (-1, 4, 2.0))
def test_a_cache_cannot_be_truncated_to_what_it_does_not_hold(length: int) -> None:
    cache = KVCache(9)
    cache.append(*torch.randn(2, 1, 3, 2, 8))
    with pytest.raises(ValueError, match="truncate it to 0 to 3"):
        cache.truncate(length)
    cache.truncate(0)
    cache.append(*torch.randn(2, 1, 9, 2, 8))


def test_an_empty_cache_takes_a_longer_shard_than_it_was_made_for() -> None:
    k, v = torch.randn(2, 1, 200, 2, 8)
    cache, layout = KVCache(200, 0, 2), Layout.assigned([0] * 25, 8, 200, 2)
    cache.append(k[:, :3], v[:, :3])
    cache.truncate(0)
    cache.prefill(k, v, layout)
    assert cache.rows == [200, 0] and torch.equal(cache.shard[0][:, :200], k)


def check_processes() -> None:
    """On every rank of a job: the same rows, to the bit."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    case = Case.random(seq_len=23, batch=2)
    out = decoded(case, 17, 2, dist.group.WORLD, rank, Layout.zigzag(17, ranks), 9)
    assert_rows_close(out, case.unsharded(Mask.causal(9))[0][:, 17:], TOLERANCE)
    first = out.clone()
    dist.broadcast(first, 0)
    assert torch.equal(out, first)


@pytest.mark.parametrize("ranks", (2, 3), ids=lambda n: f"P{n}")
def test_gloo(ranks: int, tmp_path: Path) -> None:
    run_ranks(check_processes, ranks, tmp_path / "ranks")


def test_a_window_may_be_as_wide_as_it_likes() -> None:
    cache = KVCache(5)
    cache.append(*torch.randn(2, 1, 5, 2, 8))
    q = torch.randn(1, 2, 2, 8)
    assert torch.equal(decode_attention(q, cache, window=2**64 - 1), decode_attention(q, cache))


def test_a_batch_of_none() -> None:
    cache = KVCache(5)
    cache.append(*torch.zeros(2, 0, 5, 2, 8))
    assert decode_attention(torch.zeros(0, 2, 2, 8), cache).shape == (0, 2, 2, 8)


def test_what_is_refused() -> None:
    x, layout = torch.zeros(1, 4, 2, 8), Layout.contiguous(4, 1)
    with pytest.raises(ValueError, match="capacity = 0, rank = 0, ranks = 1"):
        KVCache(0)
    with pytest.raises(ValueError, match="capacity = 10.5, .* give integers"):
        KVCache(10.5)
    with pytest.raises(ValueError, match="the cache is empty"):
        decode_attention(x, KVCache(4))
    cache = KVCache(5)
    cache.prefill(x, x, layout)
    with pytest.raises(ValueError, match="holds 4 tokens already"):
        cache.prefill(x, x, layout)
    for values in (x[:, :3], x[:, :, :1]):
        with pytest.raises(ValueError, match="give k .B, N, Hkv, D. and v .B, N, Hkv, Dv."):
            KVCache(4).prefill(x, values, layout)
    for keys, values in ((x, x.half()), (x.int(), x.int())):
        with pytest.raises(ValueError, match="one dtype of fp16"):
            KVCache(4).append(keys, values)
    for shape in ((1,), (1, 4, 0, 8)):
        with pytest.raises(ValueError, match="give k .B, N, Hkv, D. and v .B, N, Hkv, Dv."):
            KVCache(4).append(torch.zeros(shape), torch.zeros(shape))
    with pytest.raises(ValueError, match="exceed the cache's capacity of 5"):
        cache.append(x, x)
    with pytest.raises(ValueError, match="batch, heads, head dim and dtype"):
        cache.append(x[:, :1].double(), x[:, :1].double())
    with pytest.raises(ValueError, match="but the layout is over 2 ranks"):
        KVCache(4).prefill(x, x, Layout.contiguous(4, 2))
    with pytest.raises(ValueError, match="exceed the cache's capacity of 7"):
        KVCache(7, 0, 2).prefill(x, x, Layout.contiguous(8, 2))
    with pytest.raises(ValueError, match="5 queries of a cache of 4 tokens"):
        decode_attention(torch.zeros(1, 5, 2, 8), cache)
    with pytest.raises(ValueError, match="give q .B, N, Hq, D."):
        decode_attention(x[:, :, :1], cache)
    with pytest.raises(ValueError, match="give one dtype and device"):
        decode_attention(x.double(), cache)
    with pytest.raises(ValueError, match="decoding passes no gradient"):
        decode_attention(x.clone().requires_grad_(), cache)
    for window in (0, 2.5, True):
        with pytest.raises(ValueError, match=f"window = {window}"):
            decode_attention(x, cache, window=window)
    with pytest.raises(ValueError, match="unknown kernel backend"):
        decode_attention(x, cache, backend="fast")
    with pytest.raises(ValueError, match="in the group this is rank 0 of 1"):
        other = KVCache(4, 1, 2)
        other.append(x, x)
        decode_attention(x, other)


def test_a_rank_uses_more_rows_than_the_first() -> None:
    case, layout = Case.random(seq_len=129), Layout.contiguous(129, 2)  # of 64 and of 65 rows

    def last(rank: int, group: Group) -> torch.Tensor:
        cache = KVCache(129, rank, 2)
        cache.prefill(layout.shard(case.k, rank), layout.shard(case.v, rank), layout)
        return decode_attention(case.q[:, 128:], cache, group=group)

    assert_rows_close(simulate(2, last)[0], case.unsharded(Mask.causal())[0][:, 128:], TOLERANCE)


def test_a_cache_begun_in_an_evaluation_goes_on_outside() -> None:
    case, cache = Case.random(seq_len=9), KVCache(9)
    with torch.inference_mode():
        cache.append(case.k[:, :4], case.v[:, :4])
    cache.append(case.k[:, 4:], case.v[:, 4:])
    got = decode_attention(case.q[:, 8:], cache, group=None)
    assert_rows_close(got, case.unsharded(Mask.causal())[0][:, 8:], TOLERANCE)

"""The caches of layers in generation: how many rows they have, and which tokens they contain."""

import pytest
import torch

from ringattn import KVCache, Layout
from ringattn.train.inference.layer_cache import new_cache, places, prefill


@pytest.mark.parametrize(
    ("window", "ranks", "capacity", "is_local"),
    [(None, 1, 100, True), (7, 1, 7, True), (500, 1, 100, True), (None, 4, 100, False), (25, 4, 25, True), (26, 4, 100, False)],
)
def test_a_cache_has_as_few_rows_as_possible(window: int | None, ranks: int, capacity: int, is_local: bool) -> None:
    """A shard of 100 tokens on four ranks has 25 rows."""
    cache = new_cache(window, 100, ranks - 1, ranks)
    assert (cache.capacity, cache.ranks) == (capacity, 1 if is_local else ranks)


@pytest.mark.parametrize("length", [3, 8, 29])
def test_a_local_cache_keeps_the_newest_tokens(length: int) -> None:
    """Token p is in row p % 8, after a prompt and after new tokens."""
    k = torch.arange(1.0, length + 1)[None, :, None, None].expand(1, length, 2, 4).contiguous()
    cache = KVCache(8)
    prefill(cache, k, -k, Layout.contiguous(length, 1), None)
    for position in range(length, length + 3):
        (place,) = places([cache], torch.tensor([position])).values()
        cache.append(*(torch.full((1, 1, 2, 4), x) for x in (position + 1.0, -position - 1.0)), rows=place.rows)
        stored, values, _ = cache.shard
        expected = torch.zeros(8)
        for p in range(max(position - 7, 0), position + 1):
            expected[p % 8] = p + 1
        assert torch.equal(stored[0, :, 1, 3], expected)
        assert torch.equal(values, -stored)
        assert [int(x) for x in place.bounds] == [0, min(position + 1, 8)]


def test_a_sharded_cache_has_no_place() -> None:
    assert list(places([KVCache(9, 1, 2), KVCache(5)], torch.tensor([0]))) == [5]

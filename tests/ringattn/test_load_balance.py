"""Tests of layouts that are chosen for a mask: every rank gets equal work and about the same number of tokens."""

import math
import random
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringattn import Layout, Mask, balanced_layout, load_balance
from ringattn.kernels import interval_mask
from ringattn.layout import KINDS
from ringattn.load_balance import TILE, always_has_equal_shards, work
from tests.ringattn.rings import Case, assert_close

S = 65536


def packing(seed: int, seq_len: int = S) -> list[int]:
    """Return random document lengths that fill a sequence. Their logarithms are uniform between 1 and the sequence length."""
    generator, lengths = random.Random(seed), []
    while left := seq_len - sum(lengths):
        lengths.append(min(left, int(math.exp(generator.uniform(0, math.log(seq_len))))))
    return lengths


def excess(x: torch.Tensor) -> float:
    """Return by how much the largest element exceeds the mean, relative to the mean."""
    return float(x.max() / x.double().mean()) - 1


@pytest.mark.parametrize("ranks", [4, 8])
def test_work_of_packed_documents_is_within_5_percent_of_the_mean(ranks: int) -> None:
    """Work is counted in tiles of queries, tiles of keys, and (query, key) pairs, for sixty random packings."""
    for seed in range(60):
        mask = Mask.causal(documents=packing(seed))
        layout = balanced_layout(mask, S, ranks)
        tiles = work(mask, layout)
        lo, hi = mask.intervals(S)
        pairs = torch.stack([(hi - lo)[0, layout.positions(rank)].sum() for rank in range(ranks)])
        assert max(excess(tiles.sum(1)), excess(tiles.sum(0)), excess(pairs)) <= 0.05, (seed, layout.name)
        rows = [layout.rows(rank) for rank in range(ranks)]
        assert max(rows) - min(rows) <= 2 * TILE


@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
def test_fixed_layouts_are_not_balanced(kind: str) -> None:
    """For half of the same packings, a rank of a fixed layout has more than 1.3 times the mean work."""
    worst = [excess(work(Mask.causal(documents=packing(seed)), Layout(kind, S, 4)).sum(1)) for seed in range(20)]
    assert sorted(worst)[10] > 0.3


def test_one_rank_needs_no_count_of_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting takes up to 0.06 s, during which the GPU would be idle."""
    monkeypatch.setattr(load_balance, "work", Mock(side_effect=AssertionError))
    assert balanced_layout(Mask.causal(documents=[1, 4095]), 4096, 1) == Layout.contiguous(4096, 1)


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=4),
    st.integers(1, 4),
    st.sampled_from(KINDS),
    st.booleans(),
    st.none() | st.integers(1, 200),
)
@settings(max_examples=40)
def test_work_counts_every_tile_with_a_visible_pair(
    documents: list[int], ranks: int, kind: str, is_causal: bool, window: int | None
) -> None:
    """The count equals that of a dense mask. On several ranks, kernels may also compute tiles between visible ones."""
    seq_len = sum(documents)
    mask, layout = Mask(is_causal, window, (tuple(documents),)), Layout(kind, seq_len, ranks)
    allowed = interval_mask.dense(*mask.intervals(seq_len), seq_len)[0]
    tiles = work(mask, layout)
    for query_rank in range(ranks):
        for key_rank in range(ranks):
            local = allowed[layout.positions(query_rank)][:, layout.positions(key_rank)]
            visible = sum(bool(tile.any()) for rows in local.split(TILE) for tile in rows.split(TILE, 1))
            assert tiles[query_rank, key_rank] == visible if ranks == 1 else tiles[query_rank, key_rank] >= visible


def test_the_simplest_of_equally_good_layouts_is_chosen() -> None:
    """Chunks are assigned one by one only if no fixed layout is as balanced."""
    assert balanced_layout(Mask.full(), S, 8).kind == "contiguous"
    assert balanced_layout(Mask.causal(), S, 8).kind == "zigzag"
    assert balanced_layout(Mask.causal(window=4096), S, 8).kind == "contiguous"
    assert balanced_layout(Mask.causal(documents=[S // 8] * 8), S, 8).kind == "contiguous"
    assert balanced_layout(Mask.causal(documents=packing(0)), S, 8).name == "assigned-128"
    # The striped layout would also be balanced.
    assert balanced_layout(Mask.causal(documents=[36_431, 23_700, 5405]), 65_536, 4).name == "assigned-256"
    assert balanced_layout(Mask.causal(), 1, 4) == Layout.contiguous(1, 4)


@pytest.mark.parametrize("ranks", [4, 8])
def test_the_work_of_several_masks_is_balanced_separately(ranks: int) -> None:
    """Three layers with a window and one without. Ranks wait for each other in every layer, so the busiest rank counts."""
    for seed in range(20):
        layers = {Mask.causal(window, packing(seed)): count for window, count in ((1024, 3), (None, 1))}
        tiles = {mask: work(mask, balanced_layout(layers, S, ranks)) for mask in layers}
        busiest = sum(count * tiles[mask].sum(1).max() for mask, count in layers.items())
        mean = sum(count * tiles[mask].sum() / ranks for mask, count in layers.items())
        assert busiest <= 1.05 * mean, seed
    mask = Mask.causal(documents=packing(1))
    assert balanced_layout({mask: 3}, S, ranks) == balanced_layout(mask, S, ranks)


def test_work_of_batch_entries_is_added() -> None:
    """One layout serves all batch entries, so their work is balanced in total."""
    packings = [packing(1), packing(2)]
    mask = Mask.causal(documents=packings)
    alone = [Mask.causal(documents=lengths) for lengths in packings]
    layout = balanced_layout(mask, S, 4)
    assert torch.equal(work(mask, layout), work(alone[0], layout) + work(alone[1], layout))
    assert excess(work(mask, layout).sum(1)) <= 0.05


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["state", "kv"])
def test_attention_with_an_assigned_layout(schedule: str) -> None:
    """A ring whose layout was chosen for its documents, and whose last chunk is short, equals one rank in fp64."""
    seq_len = 2 * 8 * TILE + 37
    mask = Mask.causal(documents=[1, 1000, 1, 500, seq_len - 1502])
    layout = balanced_layout(mask, seq_len, 2)
    assert layout.name == "assigned-128"
    case = Case.random(seq_len=seq_len, heads=2, key_heads=1, dim=4, value_dim=4)
    assert_close(case.on_ring(layout, mask, schedule=schedule), case.unsharded(mask), 1e-10)


def test_invalid_arguments_raise_an_error() -> None:
    """The message names the value that was given."""
    with pytest.raises(ValueError, match=r"7 .* 8"):
        balanced_layout(Mask.causal(documents=[7]), 8, 2)
    with pytest.raises(ValueError, match=r"ranks=0: .*at least 1"):
        balanced_layout(Mask.causal(), 8, 0)
    with pytest.raises(ValueError, match="number of layers with a mask=0"):
        balanced_layout({Mask.causal(): 0}, 8, 2)
    with pytest.raises(ValueError, match=r"mask=\{\}"):
        balanced_layout({}, 8, 2)
    for wrong, kind in ((None, "NoneType"), ([5, 3], "list")):
        with pytest.raises(ValueError, match=f"mask is a {kind}"):
            balanced_layout(wrong, 8, 2)


@pytest.mark.parametrize(
    ("seq_len", "ranks", "expected"),
    [(4096, 2, True), (4096, 3, False), (4095, 1, True), (4098, 2, False), (1000, 4, True), (6144, 4, True), (8320, 2, False)],
)
def test_shards_are_equal_for_all_masks(seq_len: int, ranks: int, expected: bool) -> None:
    """4,098 positions are an even number, but the last chunk of an assigned layout would be shorter than the others."""
    assert always_has_equal_shards(seq_len, ranks) == expected
    rows = set()
    for seed in range(40):
        cuts = sorted(random.Random(seed).sample(range(1, seq_len), seed % 12))
        mask = Mask.causal(documents=[end - start for start, end in zip([0, *cuts], [*cuts, seq_len], strict=True)])
        layout = balanced_layout(mask, seq_len, ranks)
        rows.add(len({layout.rows(rank) for rank in range(ranks)}))
    assert (rows == {1}) == expected

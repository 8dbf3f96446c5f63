"""Tests of the all-to-all by messages: which slices of tensors move, and where they are written."""

import pytest
import torch
from torch import Tensor

from ringattn import simulate
from ringattn.comm.all_to_all import HeadSlice, PointToPointAllToAll, TokenSlice, expected_messages


def test_head_slices_select_one_chunk_of_one_rank() -> None:
    """12 heads: rank 1 of 2 has heads 6 to 11, in 3 chunks of two heads."""
    x = torch.arange(12).expand(1, 4, 12)
    assert HeadSlice(ranks=2, chunks=3, chunk=2)(x, 1)[0, 0].tolist() == [10, 11]
    assert HeadSlice(ranks=2, chunks=1, chunk=0)(x, 1)[0, 0].tolist() == [6, 7, 8, 9, 10, 11]


def test_token_slices_follow_the_order_of_ranks() -> None:
    """Ranks may hold different numbers of tokens, or none."""
    x = torch.arange(5)[None]
    assert [TokenSlice((2, 0, 3))(x, rank)[0].tolist() for rank in range(3)] == [[0, 1], [], [2, 3, 4]]


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("counts", [(3, 3), (4, 0, 1)], ids=str)
def test_tokens_become_heads_and_return(counts: tuple[int, ...], chunks: int) -> None:
    """Every element reaches the rank of its head, and a second all-to-all returns it."""
    ranks, total, heads = len(counts), sum(counts), 2 * len(counts) * chunks
    whole = torch.arange(2.0 * total * heads * 3).view(2, total, heads, 3)
    tokens = TokenSlice(counts)

    def run(rank: int, group) -> None:
        all_to_all = PointToPointAllToAll(group)
        shard = tokens(whole, rank).clone()
        into = [(torch.full((2, total, 2, 3), torch.nan),) for _ in range(chunks)]
        exchanges = [all_to_all.start(block, (total,) * ranks) for block in into]
        back = all_to_all.start((torch.full_like(shard, torch.nan),), counts, chunks)
        for chunk, exchange in enumerate(exchanges):
            exchange.send((shard,), HeadSlice(ranks, chunks, chunk), tokens)
        for chunk, exchange in enumerate(exchanges):
            (gathered,) = exchange.wait()
            assert torch.equal(gathered, HeadSlice(ranks, chunks, chunk)(whole, rank))
            back.send((gathered,), tokens, HeadSlice(ranks, chunks, chunk))
        assert torch.equal(back.wait()[0], shard)
        all_to_all.finish()

    simulate(ranks, run)


def test_several_tensors_move_together() -> None:
    """q, k and v are exchanged by one call, and may have different numbers of heads and dims."""
    tensors = torch.randn(1, 4, 4, 2), torch.randn(1, 4, 2, 3)

    def run(rank: int, group) -> list[Tensor]:
        block = tuple(TokenSlice((1, 3))(x, rank) for x in tensors)
        into = tuple(torch.empty(1, 4, x.shape[2] // 2, x.shape[3]) for x in tensors)
        exchange = PointToPointAllToAll(group).start(into, (4, 4))
        exchange.send(block, HeadSlice(2, 1, 0), TokenSlice((1, 3)))
        return list(exchange.wait())

    for rank, results in enumerate(simulate(2, run)):
        for x, y in zip(tensors, results, strict=True):
            assert torch.equal(HeadSlice(2, 1, 0)(x, rank), y)


def test_a_rank_expects_messages_of_all_others() -> None:
    """The watchdog names these ranks if one of them does not send."""
    assert [(m.src, m.dst, len(m.rows)) for m in expected_messages(1, (4, 5, 6))] == [(0, 1, 4), (2, 1, 6)]

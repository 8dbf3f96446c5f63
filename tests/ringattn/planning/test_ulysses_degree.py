"""How many ranks exchange heads: counted by hand, and what a forecast of time makes of it."""

import pytest
import torch

from ringattn import Mask
from ringattn.planning import ulysses_degree
from ringattn.planning.cost_model import ALL_TO_ALL_FACTOR, interconnect
from ringattn.planning.ulysses_degree import all_to_all_seconds, best_ulysses_degree, bytes_per_row, exposed_seconds

NEAR, FAR = interconnect("nvlink", flops=5.8e14), interconnect("nccl", one_host=False, flops=5.8e14)


def test_bytes_by_hand() -> None:
    """16 heads of 128 in bf16 on 8 ranks, by the counts of docs: 4 d a hop forward, 8 d + 8 backward, a head."""
    assert bytes_per_row(1, 8, 16, 16, 128, 128) == 7 * 16 * (4 * 128 + 8 * 128 + 8)
    assert bytes_per_row(8, 1, 16, 16, 128, 128) == 2 * 7 * 16 * 4 * 128 * 2 // 8
    assert bytes_per_row(2, 4, 16, 16, 128, 128) == 16 * 4 * 128 * 2 + 3 * 16 * (12 * 128 + 8)
    # one key head: the ring sends 16 d bytes a hop, all of it; the exchange sends that head to every rank
    assert bytes_per_row(1, 8, 32, 1, 128, 128) == 7 * 16 * 128
    assert bytes_per_row(8, 1, 32, 1, 128, 128) == 2 * 7 * (2 * 32 + 2 * 8) * 128 * 2 // 8


def best(ranks: int, seq_len: int = 65536, heads: int = 16, key_heads: int = 16, mask: Mask | None = None, **options) -> int:
    """`best_ulysses_degree` of H200s, eight a host, bf16, D = 128, causal."""
    q, k = (torch.empty(1, seq_len, n, 128, dtype=torch.bfloat16, device="meta") for n in (heads, key_heads))
    options = dict(host=8, near=NEAR, far=FAR) | options
    return best_ulysses_degree(q, k, k, mask=mask or Mask.causal(), ranks=ranks, **options)


def test_heads_are_exchanged_where_that_is_faster() -> None:
    assert [best(ranks) for ranks in (1, 4, 8)] == [1, 4, 8]
    assert best(8, heads=12, key_heads=12) == 4  # no more ranks than divide the heads
    assert best(8, heads=7, key_heads=7) == 1
    # a window keeps to its neighbours
    assert [best(ranks, 262144, mask=Mask.causal(4096)) for ranks in (4, 8)] == [1, 1]
    assert best(16, 262144, mask=Mask.causal(4096), layout="auto") == 1
    # beside so much work nothing counts
    assert best(4, 2**22) == 1


def test_heads_stay_inside_a_host() -> None:
    assert [best(16, n) for n in (4096, 16384, 65536, 262144)] == [8, 8, 8, 8]
    assert best(16, 262144, host=4) == 4
    # but for a network so slow that a ring is late however few ranks it has, heads are fewer bytes
    assert best(16, far=FAR._replace(bytes_per_second=1e9)) == 16


def test_many_ranks_by_bytes() -> None:
    assert best(128) == best(1024, 2**20) == 8
    assert best(128, host=4) == 4
    assert best(128, heads=32, key_heads=1) == 1


def test_a_long_sequence_is_planned_as_a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.empty(2, 1, 4, 64, dtype=torch.bfloat16, device="meta")
    for mask, kind in ((Mask.causal(), "zigzag"), (Mask.full(), "contiguous"), (Mask.causal(2048), "auto")):
        seconds = []
        for positions in (2**15, 2**17):
            monkeypatch.setattr(ulysses_degree, "MAX_PLANNED_POSITIONS", positions)
            seconds.append(ulysses_degree._ring_seconds((q, q, q), mask, (kind, 2**17, 4), NEAR, "auto"))
        assert seconds[0] == pytest.approx(seconds[1], rel=0.01)


def test_the_exchange_by_hand() -> None:
    """Of 1 MB to each: three copies in a host, or beside them four over a slower link."""
    inside = 3 * (ALL_TO_ALL_FACTOR * 1e6 / NEAR.bytes_per_second + 2 * NEAR.latency)
    across = 4 * (1e6 / FAR.bytes_per_second + 2 * FAR.latency)
    assert all_to_all_seconds(1e6, 4, 8, NEAR, FAR) == pytest.approx(inside)
    assert all_to_all_seconds(1e6, 8, 4, NEAR, FAR) == pytest.approx(max(inside, across))
    assert all_to_all_seconds(1e6, 1, 8, NEAR, FAR) == 0
    # one part hides nothing; of four one is exposed, or all but what three times attention hides
    assert exposed_seconds(1, attention=5.0, all_to_all=2.0) == 2
    assert exposed_seconds(4, attention=5.0, all_to_all=2.0) == 2
    assert exposed_seconds(4, attention=1.0, all_to_all=2.0) == 5

"""Tests of the choice of the Ulysses degree: bytes and times computed by hand, and the degrees that follow from them."""

import pytest
import torch

from ringattn import Mask
from ringattn.planning import ulysses_degree
from ringattn.planning.cost_model import ALL_TO_ALL_FACTOR, interconnect
from ringattn.planning.ulysses_degree import (
    all_to_all_seconds,
    best_ulysses_degree,
    bytes_per_row,
    exposed_seconds,
    head_chunks_for_overlap,
    key_copies,
)

NEAR, FAR = interconnect("nvlink", flops=5.8e14), interconnect("nccl", one_host=False, flops=5.8e14)


def test_bytes_per_row() -> None:
    """Computed by hand for 16 heads of 128 in bf16 on 8 ranks: per hop and head 4d bytes forward and 8d + 8 backward."""
    q, k = (torch.empty(1, 1, heads, 128, dtype=torch.bfloat16, device="meta") for heads in (16, 16))
    assert bytes_per_row(q, k, k, 1, 8) == 7 * 16 * (4 * 128 + 8 * 128 + 8)
    assert bytes_per_row(q, k, k, 8, 1) == 2 * 7 * 16 * 4 * 128 * 2 // 8
    assert bytes_per_row(q, k, k, 2, 4) == 16 * 4 * 128 * 2 + 3 * 16 * (12 * 128 + 8)
    # With one key head, the ring sends 16d bytes per hop, and the all-to-all sends that head to every rank.
    q, k = (torch.empty(1, 1, heads, 128, dtype=torch.bfloat16, device="meta") for heads in (32, 1))
    assert bytes_per_row(q, k, k, 1, 8) == 7 * 16 * 128
    assert bytes_per_row(q, k, k, 8, 1) == 2 * 7 * (2 * 32 + 2 * 8) * 128 * 2 // 8


def best(ranks: int, seq_len: int = 65536, heads: int = 16, key_heads: int = 16, mask: Mask | None = None, **options) -> int:
    """Return `best_ulysses_degree` for H200s, eight per host, with bf16, D = 128 and a causal mask."""
    q, k = (torch.empty(1, seq_len, n, 128, dtype=torch.bfloat16, device="meta") for n in (heads, key_heads))
    options = dict(host=8, near=NEAR, far=FAR) | options
    return best_ulysses_degree(q, k, k, layers={mask or Mask.causal(): 1}, ranks=ranks, **options)


def test_one_host_uses_ulysses_unless_a_ring_is_faster() -> None:
    """The degree divides the number of heads. With a window a ring needs its neighbours only."""
    assert [best(ranks) for ranks in (1, 4, 8)] == [1, 4, 8]
    assert best(8, heads=12, key_heads=12) == 4
    assert best(8, heads=7, key_heads=7) == 1
    assert [best(ranks, 262144, mask=Mask.causal(4096)) for ranks in (4, 8)] == [1, 1]
    assert best(16, 262144, mask=Mask.causal(4096), layout="auto") == 1
    # With this much work per rank, messages change the time by less than 1%, so the smallest degree wins.
    assert best(4, 2**22) == 1


def test_the_all_to_all_stays_inside_a_host() -> None:
    """The ring goes across hosts, because it can hide slow links."""
    assert [best(16, n) for n in (4096, 16384, 65536, 262144)] == [8, 8, 8, 8]
    assert best(16, 262144, host=4) == 4
    # On a network so slow that no ring hides it, the all-to-all is faster because it sends fewer bytes.
    assert best(16, far=FAR._replace(bytes_per_second=1e9)) == 16


def test_many_ranks_are_compared_by_bytes() -> None:
    """Above 64 ranks, the degree inside a host that sends the fewest bytes wins."""
    assert best(128) == best(1024, 2**20) == 8
    assert best(128, host=4) == 4
    assert best(128, heads=32, key_heads=1) == 1


def test_a_long_sequence_is_planned_as_a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The predicted time of a scaled-down sequence is within 1% of that of the full one."""
    q = torch.empty(2, 1, 4, 64, dtype=torch.bfloat16, device="meta")
    for mask, kind in ((Mask.causal(), "zigzag"), (Mask.full(), "contiguous"), (Mask.causal(2048), "auto")):
        seconds = []
        for positions in (2**15, 2**17):
            monkeypatch.setattr(ulysses_degree, "MAX_PLANNED_POSITIONS", positions)
            seconds.append(ulysses_degree._ring_seconds((q, q, q), mask, {mask: 1}, (kind, 2**17, 4), NEAR, "auto"))
        assert seconds[0] == pytest.approx(seconds[1], rel=0.01)


def test_all_to_all_seconds() -> None:
    """Each rank sends 1 MB to every other rank: three copies inside a host, and at the same time four over a slower link."""
    inside = 3 * (ALL_TO_ALL_FACTOR * 1e6 / NEAR.bytes_per_second + 2 * NEAR.latency)
    across = 4 * (1e6 / FAR.bytes_per_second + 2 * FAR.latency)
    assert all_to_all_seconds(1e6, 4, 8, NEAR, FAR) == pytest.approx(inside)
    assert all_to_all_seconds(1e6, 8, 4, NEAR, FAR) == pytest.approx(max(inside, across))
    assert all_to_all_seconds(1e6, 1, 8, NEAR, FAR) == 0
    # One chunk hides nothing. Of four chunks, one is exposed. The other three are exposed if attention is shorter than
    # all-to-alls.
    assert exposed_seconds(1, attention=5.0, all_to_all=2.0) == 2
    assert exposed_seconds(4, attention=5.0, all_to_all=2.0) == 2
    assert exposed_seconds(4, attention=1.0, all_to_all=2.0) == 5


@pytest.mark.parametrize(
    ("heads", "key_heads", "ulysses", "copies"),
    [(8, 8, 4, 1), (8, 4, 4, 1), (8, 2, 4, 2), (4, 1, 4, 4), (12, 3, 2, 2), (12, 3, 4, 4)],
)
def test_every_query_head_finds_its_key_head(heads: int, key_heads: int, ulysses: int, copies: int) -> None:
    """On every rank, local query head h must use local key head h // (query heads per key head of the rank)."""
    assert key_copies(heads, key_heads, ulysses) == copies
    sent = torch.arange(key_heads).repeat_interleave(copies).view(ulysses, -1)
    for rank in range(ulysses):
        local = torch.arange(heads // ulysses) // (heads // ulysses // sent.shape[1])
        queries = rank * (heads // ulysses) + torch.arange(heads // ulysses)
        assert torch.equal(sent[rank][local], queries // (heads // key_heads))


def test_head_chunks_for_overlap() -> None:
    """Chunks are large enough to occupy a GPU, contain whole key heads, and are at most as many as one call can send."""
    assert head_chunks_for_overlap(2**14, 4, 4) == 2
    assert head_chunks_for_overlap(2**16, 4, 4) == 4
    assert head_chunks_for_overlap(2**16, 8, 2) == 2
    assert head_chunks_for_overlap(2**16, 6, 3) == 3
    assert head_chunks_for_overlap(2**10, 4, 4) == 1
    assert head_chunks_for_overlap(2**20, 64, 64) == 32

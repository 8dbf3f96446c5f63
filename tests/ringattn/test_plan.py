"""What a mask and a layout mean for one rank."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import intervals
from ringattn import Layout, Mask
from ringattn.layout import KINDS
from ringattn.plan import backward_bytes, forward_bytes, plan

CPU = torch.device("cpu")


@given(st.sampled_from(KINDS), st.integers(1, 5), st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 9))
def test_local_intervals_are_the_global_mask(kind: str, ranks: int, documents: list[int], window: int) -> None:
    seq_len = sum(documents)
    layout, mask = Layout(kind, seq_len, ranks), Mask.causal(window, documents)
    lo, hi = mask.intervals(seq_len)
    allowed = intervals.dense(lo, hi, seq_len)[0]
    for rank in range(ranks):
        planned = plan(mask, layout, rank, CPU)
        for other in range(ranks):
            for query_rank, key_rank in ((rank, other), (other, rank)):
                local = intervals.dense(*planned.intervals(query_rank, key_rank), layout.rows(key_rank))[0]
                expected = allowed[layout.positions(query_rank)][:, layout.positions(key_rank)]
                assert torch.equal(local, expected)
                assert planned.need[query_rank][key_rank] == bool(expected.any())


@pytest.mark.parametrize(
    "heads, key_heads, forward, backward",
    ((16, 16, "kv", "state"), (32, 8, "kv", "kv"), (16, 4, "kv", "kv"), (2, 2, "kv", "state")),
    ids=("multi-head", "grouped-32-8", "grouped-16-4", "two-heads"),
)
def test_auto_moves_the_smaller_operand(heads: int, key_heads: int, forward: str, backward: str) -> None:
    """4d beside 6d + 8 bytes a row and head forward, 12d beside 8d + 8 backward; grouped heads shrink the first of each."""
    q, k = torch.empty(1, 4, heads, 128, dtype=torch.bfloat16), torch.empty(1, 4, key_heads, 128, dtype=torch.bfloat16)
    planned = plan(Mask.causal(), Layout.zigzag(64, 4), 0, CPU)
    assert forward_bytes(q, k, k).state == (heads * 2 * 128, heads * (4 * 128 + 8))
    assert sum(forward_bytes(q, k, k).kv) == key_heads * 4 * 128
    assert sum(backward_bytes(q, k, k).state) == heads * (8 * 128 + 8)
    assert sum(backward_bytes(q, k, k).kv) == key_heads * 12 * 128
    assert planned.choose("auto", forward_bytes(q, k, k), "forward") == forward
    assert planned.choose("auto", backward_bytes(q, k, k), "backward") == backward
    assert planned.choose("state", backward_bytes(q, k, k), "backward") == "state"

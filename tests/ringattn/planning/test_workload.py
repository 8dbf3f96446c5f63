"""Tests of the bytes and FLOPs of one call, computed by hand."""

import pytest
import torch
from torch import Tensor

from ringattn.planning import workload
from ringattn.planning.workload import (
    backward_work,
    chunk_work,
    forward_work,
    head_chunk,
    head_chunks_for_memory,
)


def inputs(dtype: torch.dtype) -> list[Tensor]:
    """q, k and v of a batch of 3 with 8 query heads and 2 key heads, head dim 192 and value dim 128."""
    return [torch.empty(3, 4, heads, dim, dtype=dtype, device="meta") for heads, dim in ((8, 192), (2, 192), (2, 128))]


def test_bytes_of_the_forward() -> None:
    """The state ring sends q in 16 bits and (m, l, o) in fp32. The KV ring sends k and v and has no results."""
    found = forward_work(*inputs(torch.bfloat16)).row_bytes
    assert found.state == (8 * 192 * 2, 8 * (128 + 2) * 4)
    assert found.kv == (2 * (192 + 128) * 2, 0)


def test_bytes_of_the_backward() -> None:
    """The state ring sends q and dout in 16 bits and lse, delta and dq in fp32; the KV ring returns dk and dv in fp32."""
    found = backward_work(*inputs(torch.bfloat16)).row_bytes
    assert found.state == (8 * (192 + 128) * 2 + 8 * 2 * 4, 8 * 192 * 4)
    assert found.kv == (2 * (192 + 128) * 2, 2 * (192 + 128) * 4)


def test_states_of_fp64_inputs_are_fp64() -> None:
    """Partial results have at least 4 bytes per element, and 8 for fp64 inputs."""
    assert forward_work(*inputs(torch.float64)).row_bytes.state == (8 * 192 * 8, 8 * (128 + 2) * 8)
    assert backward_work(*inputs(torch.float64)).row_bytes.kv == (2 * 320 * 8, 2 * 320 * 8)


def test_flops_per_pair() -> None:
    """The forward has one product with the head dim and one with the value dim, and the backward has three and two."""
    forward, backward = (work(*inputs(torch.float32)) for work in (forward_work, backward_work))
    assert (forward.direction, forward.batch, forward.pair_flops) == ("forward", 3, 2 * 8 * (192 + 128))
    assert (backward.direction, backward.batch, backward.pair_flops) == ("backward", 3, 2 * 8 * (3 * 192 + 2 * 128))


def test_scaled_work() -> None:
    """Twice the tokens have twice the bytes and four times the pairs."""
    work = forward_work(*inputs(torch.float32))
    scaled = work.scaled(2.0)
    assert scaled.pair_flops == 4 * work.pair_flops
    assert scaled.row_bytes.state == tuple(2 * x for x in work.row_bytes.state)
    assert scaled.row_bytes.kv == tuple(2 * x for x in work.row_bytes.kv)
    assert scaled.query_bytes(False, True) == 2 * work.query_bytes(False, True) > 0


def test_traffic_of_the_merges() -> None:
    """Every rank merges a relayed state. The owner reads a direct state once. The epilogue merges the state of own queries."""
    forward, backward = (work(*inputs(torch.float32)) for work in (forward_work, backward_work))
    state, dq = forward.row_bytes.state[1], backward.row_bytes.state[1]
    cases = [(own, relays) for own in (True, False) for relays in (True, False)]
    assert [forward.query_bytes(*case) for case in cases] == [0, 0, 3 * state, state]
    assert [backward.query_bytes(*case) for case in cases] == 4 * [4 * dq]


@pytest.mark.parametrize(("limit", "chunks"), [(1.0, 1), (1.9, 1), (2.0, 2), (3.9, 3), (5.9, 3), (6.0, 6), (99.0, 6)])
def test_head_chunks_divide_the_key_heads(limit: float, chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of chunks is the largest divisor of the key heads that the FLOPs of the call allow."""
    q = torch.empty(1, 1, 12, 4, device="meta")
    k = torch.empty(1, 1, 6, 4, device="meta")
    monkeypatch.setattr(workload, "HEAD_CHUNK_FLOPS", forward_work(q, k, k).pair_flops * 100 / limit)
    assert head_chunks_for_memory(q, k, k, pairs=100) == chunks
    count, passes = chunk_work(q, k, k, 100)
    assert count == chunks
    assert [chunks * work.pair_flops for work in passes] == [work(q, k, k).pair_flops for work in (forward_work, backward_work)]


def test_head_chunks_are_views() -> None:
    """Chunk i has the i-th share of the heads."""
    x = torch.arange(6).view(1, 1, 6)
    assert [head_chunk(x, 3, i)[0, 0].tolist() for i in range(3)] == [[0, 1], [2, 3], [4, 5]]

"""The bytes and FLOPs of one attention call, independent of how they are distributed over the ranks."""

from typing import NamedTuple

from torch import Tensor

# A call is split into chunks of heads if its forward pass costs more FLOPs than this number (about 0.1 s on an H200). Peak
# memory falls with the number of chunks, and at this size the cost of starting and draining one more ring pass is negligible.
HEAD_CHUNK_FLOPS = 5e13


class RowBytes(NamedTuple):
    """Bytes per row (token) of a circulating block and of its result, (block, result), for each schedule."""

    state: tuple[float, float]
    kv: tuple[float, float]


class Work(NamedTuple):
    """The work of the forward pass or of the backward pass of one call.

    The numbers do not depend on which operand circulates.
    """

    direction: str  # "forward" or "backward"
    batch: int
    row_bytes: RowBytes  # per batch entry
    pair_flops: float  # per (query, key) pair of a batch entry

    @property
    def query_bytes(self) -> float:
        """Bytes of HBM traffic per row of circulating queries, in addition to the traffic per (query, key) pair.

        In the forward pass, a new state is written, then read and merged with an existing state. In the backward pass, sums of
        dq are cleared, read, and written or accumulated.
        """
        return 4 * self.row_bytes.state[1]

    def scaled(self, scale: float) -> "Work":
        """Return the work in which each row stands for `scale` rows."""
        state, kv = ((scale * block, scale * result) for block, result in (self.row_bytes.state, self.row_bytes.kv))
        return self._replace(row_bytes=RowBytes(state, kv), pair_flops=scale**2 * self.pair_flops)


def _forward_pair_flops(q: Tensor, v: Tensor) -> int:
    """Return the FLOPs per pair: two matrix products per (query, key) pair and head."""
    return 2 * q.shape[2] * (q.shape[3] + v.shape[3])


def forward_work(q: Tensor, k: Tensor, v: Tensor) -> Work:
    """Return the work of the forward pass: two matrix products per (query, key) pair and head.

    q and (m, l, o) circulate in the state ring, and k and v circulate in the KV ring.
    """
    heads, size = q.shape[2], q.element_size()
    queries, keys = q.shape[2:].numel(), k.shape[2:].numel() + v.shape[2:].numel()
    # Partial results are fp32, or fp64 for fp64 inputs.
    states = heads * (v.shape[3] + 2) * max(size, 4)
    row_bytes = RowBytes(state=(queries * size, states), kv=(keys * size, 0))
    return Work("forward", q.shape[0], row_bytes, _forward_pair_flops(q, v))


def backward_work(q: Tensor, k: Tensor, v: Tensor) -> Work:
    """Return the work of the backward pass: five matrix products per (query, key) pair and head.

    q, dout, lse, delta and dq circulate in the state ring, and k, v, dk and dv in the KV ring.
    """
    heads, size = q.shape[2], q.element_size()
    queries, outputs, keys = q.shape[2:].numel(), heads * v.shape[3], k.shape[2:].numel() + v.shape[2:].numel()
    state_size = max(size, 4)
    blocks = (queries + outputs) * size + heads * 2 * state_size
    row_bytes = RowBytes(state=(blocks, queries * state_size), kv=(keys * size, keys * state_size))
    # Three of the five products (scores, dq and dk) have the head dim of q, and two (dp
    # and dv) have the head dim of v. A product costs 2 FLOPs per pair and dimension.
    return Work("backward", q.shape[0], row_bytes, 6 * queries + 4 * outputs)


def head_chunks_for_memory(q: Tensor, k: Tensor, v: Tensor, pairs: float) -> int:
    """Return the number of chunks of heads that a call is processed in, one ring pass each, to bound its memory.

    Args:
        q, k, v: the tensors of the call; only their shapes matter.
        pairs: the number of (query, key) pairs per batch entry and head, as the mean over all ranks.
    """
    # Chunks consist of whole key heads with all their query heads,
    # so the number of chunks must divide the number of key heads.
    key_heads, limit = k.shape[2], max(1, q.shape[0] * _forward_pair_flops(q, v) * pairs / HEAD_CHUNK_FLOPS)
    return max(count for count in range(1, key_heads + 1) if key_heads % count == 0 and count <= limit)


def head_chunk(x: Tensor, count: int, i: int = 0) -> Tensor:
    """Return chunk i of `count` of the heads of x (B, N, H, ...), as a view."""
    return x.unflatten(2, (count, -1))[:, :, i]

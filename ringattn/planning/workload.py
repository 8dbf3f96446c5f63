"""Count the bytes and FLOPs of one attention call. The counts do not depend on how the work is distributed over the ranks."""

from typing import NamedTuple

from torch import Tensor

from ringattn.kernels import fp8

# The forward pass of a chunk of heads has at least HEAD_CHUNK_FLOPS FLOPs, about 0.1 s on an H200. More chunks need less
# memory, and the time to start one more ring pass is negligible.
HEAD_CHUNK_FLOPS = 5e13


class RowBytes(NamedTuple):
    """For each schedule, `RowBytes` contains the bytes per row of a circulating block and of its result."""

    state: tuple[float, float]
    kv: tuple[float, float]


class Work(NamedTuple):
    direction: str  # "forward" or "backward"
    batch: int
    row_bytes: RowBytes  # per batch entry
    pair_flops: float  # per (query, key) pair of a batch entry
    row_multiple: int = 1  # see `Plan.schedule`

    def query_bytes(self, own: bool, relays: bool) -> float:
        """Return the HBM traffic that a local step of the state ring adds to attention, in bytes per query row.

        The kernel's epilogue merges the results of a rank's own queries, and matrix products hide this traffic. A separate
        kernel merges the results for other ranks. With direct messages, the merge kernel reads each result once. With relays,
        each merge reads two states and writes one. The backward pass zeroes the sums of dq, reads the sums, and adds the sums
        to dq.
        """
        tensors_of_forward = 0 if own else 3 if relays else 1
        return (4 if self.direction == "backward" else tensors_of_forward) * self.row_bytes.state[1]

    def scaled(self, scale: float) -> "Work":
        state, kv = ((scale * block, scale * result) for block, result in (self.row_bytes.state, self.row_bytes.kv))
        return self._replace(row_bytes=RowBytes(state, kv), pair_flops=scale**2 * self.pair_flops)


def _forward_pair_flops(q: Tensor, v: Tensor) -> int:
    return 2 * q.shape[2] * (q.shape[3] + v.shape[3])


def forward_work(q: Tensor, k: Tensor, v: Tensor, precision: str = "ieee") -> Work:
    """Return the work of the forward pass: two matrix products per (query, key) pair and head.

    With "fp8", circulating tensors have one byte per element. Each row of a head also has one byte for its scale.
    """
    heads, size = q.shape[2], q.element_size()
    queries, keys = q.shape[2:].numel(), k.shape[2:].numel() + v.shape[2:].numel()
    states = heads * (v.shape[3] + 2) * max(size, 4)
    if precision == "fp8":
        row_bytes = RowBytes(state=(queries + heads, states), kv=(keys + 2 * k.shape[2], 0))
        return Work("forward", q.shape[0], row_bytes, _forward_pair_flops(q, v), fp8.BLOCK)
    row_bytes = RowBytes(state=(queries * size, states), kv=(keys * size, 0))
    return Work("forward", q.shape[0], row_bytes, _forward_pair_flops(q, v))


def backward_work(q: Tensor, k: Tensor, v: Tensor) -> Work:
    """Return the work of the backward pass: five matrix products per (query, key) pair and head."""
    heads, size = q.shape[2], q.element_size()
    queries, outputs, keys = q.shape[2:].numel(), heads * v.shape[3], k.shape[2:].numel() + v.shape[2:].numel()
    state_size = max(size, 4)
    blocks = (queries + outputs) * size + heads * 2 * state_size
    row_bytes = RowBytes(state=(blocks, queries * state_size), kv=(keys * size, keys * state_size))
    return Work("backward", q.shape[0], row_bytes, 6 * queries + 4 * outputs)


def head_chunks_for_memory(q: Tensor, k: Tensor, v: Tensor, pairs: float) -> int:
    """Return the number of head chunks. The argument `pairs` counts (query, key) pairs per batch entry, head and rank."""
    key_heads, limit = k.shape[2], max(1, q.shape[0] * _forward_pair_flops(q, v) * pairs / HEAD_CHUNK_FLOPS)
    return max(count for count in range(1, key_heads + 1) if key_heads % count == 0 and count <= limit)


def chunk_work(q: Tensor, k: Tensor, v: Tensor, pairs: float, precision: str = "ieee") -> tuple[int, tuple[Work, Work]]:
    """Return the number of head chunks, and the work of both passes of one chunk."""
    count = head_chunks_for_memory(q, k, v, pairs)
    q, k, v = (head_chunk(x, count) for x in (q, k, v))
    return count, (forward_work(q, k, v, precision), backward_work(q, k, v))


def head_chunk(x: Tensor, count: int, i: int = 0) -> Tensor:
    """Return chunk i of `count` chunks of heads, a view of x (B, N, H, ...)."""
    return x.unflatten(2, (count, -1))[:, :, i]

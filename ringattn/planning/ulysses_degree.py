"""Choose the Ulysses degree U for which attention on U x R ranks is predicted to be fastest.

All-to-alls have U ranks, and rings have R ranks. The prediction uses no measurements, so all ranks and runs choose the same
degree.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ringattn.layout import Layout
from ringattn.load_balance import balanced_layout
from ringattn.mask import UNLIMITED, Mask
from ringattn.planning.cost_model import ALL_TO_ALL_FACTOR, MERGE_FLOPS_PER_BYTE, STEP_OVERHEAD, Interconnect
from ringattn.planning.rank_plan import Plan
from ringattn.planning.workload import backward_work, forward_work

# A chunk of heads with fewer than MIN_CHUNK_ROWS rows (tokens x heads) would leave SMs idle.
MIN_CHUNK_ROWS = 2**15
MAX_HEAD_CHUNKS = 32  # per call
EQUAL_TIMES = 1.01
MAX_PLANNED_RANKS, MAX_PLANNED_POSITIONS = 64, 2**15


def key_copies(heads: int, key_heads: int, ulysses: int) -> int:
    """Return how many copies of each key head the all-to-all sends."""
    # Each key head of a rank must have the same number of query heads.
    per_key, per_rank = heads // key_heads, heads // ulysses
    return per_key // math.gcd(per_key, per_rank)


def head_chunks_for_overlap(rows: int, heads: int, key_heads: int) -> int:
    """Return the number of chunks into which the heads are split. The all-to-all of one chunk overlaps with attention of
    another chunk.

    `rows` counts the tokens of all batch entries after the all-to-all.
    """
    limit = min(key_heads, MAX_HEAD_CHUNKS)
    counts = [n for n in range(1, limit + 1) if key_heads % n == 0 and rows * heads >= n * MIN_CHUNK_ROWS]
    return max(counts, default=1)


def bytes_per_row(q: Tensor, k: Tensor, v: Tensor, ulysses: int, ring: int) -> float:
    """Return the bytes per token that a rank sends in a forward and a backward pass. The estimate assumes that every rank needs
    all blocks.
    """
    copies = key_copies(q.shape[2], k.shape[2], ulysses)
    k, v = (x.to("meta").repeat_interleave(copies, 2) for x in (k, v))
    # q, out, k, v and their gradients are sent.
    elements = (q.shape[2] + k.shape[2]) * (q.shape[3] + v.shape[3])
    all_to_all_bytes = 2 * elements * q.element_size() * (ulysses - 1) // ulysses
    directions = forward_work(q, k, v).row_bytes, backward_work(q, k, v).row_bytes
    return all_to_all_bytes + (ring - 1) * sum(min(sum(row.state), sum(row.kv)) for row in directions)


def best_ulysses_degree(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layers: Mapping[Mask, int],
    ranks: int,
    host: int,
    near: Interconnect,
    far: Interconnect,
    layout: str = "zigzag",
    schedule: str = "auto",
) -> int:
    """Return the smallest U whose predicted time of both passes is at most 1% above the minimum.

    U must divide `ranks` and Hq. The predicted time includes the ring, and the time in which attention waits for
    all-to-alls. For 64 ranks, the prediction takes about a second. For more than MAX_PLANNED_RANKS ranks, the choice minimises
    `bytes_per_row`, and U divides the number of ranks per host.

    Args:
        q: (B, S, Hq, D), k: (B, S, Hkv, D), v: (B, S, Hkv, Dv): tensors of the whole sequence, which may be on the "meta"
            device.
        layers: the number of layers with each mask.
        ranks: U x R.
        host: the number of ranks per host; the ranks of a host, and of an all-to-all, have consecutive numbers.
        near: the interconnect inside a host.
        far: the interconnect between hosts.
        layout: the kind of the layout of the ring, one of `KINDS`, or "auto" for `balanced_layout`.
        schedule: as for `ring_attention`.
    """
    candidates = [u for u in range(1, ranks + 1) if ranks % u == 0 and q.shape[2] % u == 0]
    if ranks > MAX_PLANNED_RANKS:
        inside = [u for u in candidates if min(ranks, host) % u == 0]
        return min(inside, key=lambda u: bytes_per_row(q, k, v, u, ranks // u))
    options = dict(layers=layers, ranks=ranks, host=host, near=near, far=far, layout=layout, schedule=schedule)
    seconds = {
        u: sum(count * sum(attention_seconds(q, k, v, mask=mask, ulysses=u, **options)) for mask, count in layers.items())
        for u in candidates
    }
    return min(u for u in candidates if seconds[u] <= EQUAL_TIMES * min(seconds.values()))


def attention_seconds(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask,
    layers: Mapping[Mask, int],
    ranks: int,
    ulysses: int,
    host: int,
    near: Interconnect,
    far: Interconnect,
    layout: str = "zigzag",
    schedule: str = "auto",
) -> tuple[float, float]:
    """Predict the seconds of a forward and of a backward pass of one layer with `mask`.

    Other arguments as for `best_ulysses_degree`.
    """
    joined, host = (near, ranks) if ranks <= host else (far, host)
    chunks, (*chunk, out) = chunk_of_heads(q, k, v, ranks, ulysses)
    attention = _ring_seconds(chunk, mask, layers, (layout, q.shape[1], ranks // ulysses), joined, schedule)
    bytes_to_each = q.shape[1] / ranks * sum(x.nbytes for x in (*chunk, out))
    all_to_all = all_to_all_seconds(bytes_to_each, ulysses, host, near, far)
    forward, backward = (chunks * x + exposed_seconds(chunks, x, all_to_all) for x in attention)
    return forward, backward


def chunk_of_heads(q: Tensor, k: Tensor, v: Tensor, ranks: int, ulysses: int) -> tuple[int, list[Tensor]]:
    """Return the number of head chunks per rank, and [q, k, v, out] of one chunk. The four tensors of a chunk are "meta"
    tensors with one row.

    Arguments as for `attention_seconds`.
    """
    key_heads = k.shape[2] * key_copies(q.shape[2], k.shape[2], ulysses)
    rows = q.shape[0] * q.shape[1] * ulysses // ranks
    chunks = head_chunks_for_overlap(rows, q.shape[2] // ulysses, key_heads // ulysses) if ulysses > 1 else 1
    shapes = (q.shape[2], q.shape[3]), (key_heads, k.shape[3]), (key_heads, v.shape[3]), (q.shape[2], v.shape[3])
    return chunks, [q.new_empty(q.shape[0], 1, n // (ulysses * chunks), d, device="meta") for n, d in shapes]


def all_to_all_seconds(bytes_to_each: float, ulysses: int, host: int, near: Interconnect, far: Interconnect) -> float:
    """Predict the seconds for sending one chunk of heads and returning its outputs. Each rank sends `bytes_to_each` bytes to
    every other rank.
    """
    inside = math.gcd(ulysses, host)  # smallest number of ranks of a Ulysses group in one host
    links = (inside - 1, ALL_TO_ALL_FACTOR, near), (ulysses - inside, 1, far)
    return max(n * (factor * bytes_to_each / link.bytes_per_second + 2 * link.latency) for n, factor, link in links)


def exposed_seconds(chunks: int, attention: float, all_to_all: float) -> float:
    """Predict the seconds that the all-to-alls add to attention. Both `attention` and `all_to_all` are seconds per chunk. The
    arrival of the first chunk and the return of the last chunk are never hidden.
    """
    return all_to_all + (chunks - 1) * max(0.0, all_to_all - attention)


def _ring_seconds(
    chunk: Sequence[Tensor],
    mask: Mask,
    layers: Mapping[Mask, int],
    ring: tuple[str, int, int],
    joined: Interconnect,
    schedule: str,
) -> tuple[float, ...]:
    """Predict the seconds of a forward and of a backward pass for a chunk (q, k, v). The argument `ring` is (kind of layout,
    number of positions, number of ranks). Other arguments as for `attention_seconds`.
    """
    plan, scale = scaled_plan(mask, layers, ring)
    ranks = plan.layout.ranks
    names = ("kv", "state") if schedule == "auto" else (schedule,)
    seconds: list[float] = []
    q, k, v = chunk
    for work in (forward_work(q, k, v), backward_work(q, k, v)):
        work, overhead = work.scaled(scale), STEP_OVERHEAD[work.direction]
        costs = [[plan.costs(name, work, joined, rank) for rank in range(ranks)] for name in names]
        hops = min(max(sum(hop.seconds + overhead for hop in hops) for hops in by_rank) for by_rank in costs)
        seconds.append(hops + plan.merge_bytes(work) * MERGE_FLOPS_PER_BYTE[work.direction] / joined.flops)
    return tuple(seconds)


def scaled_plan(mask: Mask, layers: Mapping[Mask, int], ring: tuple[str, int, int]) -> tuple[Plan, float]:
    """Return a plan, and the factor by which its sequence is scaled down. Arguments as for `_ring_seconds`.

    To save time, a sequence without documents is scaled down to MAX_PLANNED_POSITIONS positions.
    """
    kind, seq_len, ranks = ring
    length = seq_len if any(x.totals for x in layers) else min(seq_len, max(MAX_PLANNED_POSITIONS, ranks))
    scale = seq_len / length
    scaled = {x: _scale(x, scale) for x in layers}
    balanced = {scaled[x]: count for x, count in layers.items()}
    layout = balanced_layout(balanced, length, ranks) if kind == "auto" else Layout(kind, length, ranks)
    return Plan(scaled[mask], layout, 0, torch.device("cpu")), scale


def _scale(mask: Mask, scale: float) -> Mask:
    if scale == 1:
        return mask
    left, right = (None if x == UNLIMITED else round(x / scale) for x in mask.reach)
    return Mask(window=(left, right))

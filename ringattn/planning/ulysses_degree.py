"""How many ranks should exchange heads: what attention on U x R ranks is expected to take.

As the choice of a schedule in `ringattn.planning.rank_plan`, a forecast from the table of speeds in `ringattn.planning.cost_model`, so that all ranks, and
all runs, choose alike.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ringattn.layout import Layout
from ringattn.load_balance import balanced_layout
from ringattn.mask import Mask
from ringattn.planning.cost_model import EXCHANGE_TIMES, STEP_SECONDS, SUM_FLOPS_A_BYTE, Fabric
from ringattn.planning.rank_plan import Plan, backward_bytes, backward_work, forward_bytes, forward_work
from ringattn.ulysses import key_copies, parts_of

MOST_PLANNED, MOST_POSITIONS = 64, 2**15  # ranks and positions that `best_ulysses` plans


def bytes_per_row(ulysses: int, ring: int, heads: int, key_heads: int, dim: int, value_dim: int, size: int = 2) -> int:
    """Bytes that a rank sends for each of its rows of a batch row, forward and backward, where every rank needs all keys.

    Args:
        ulysses, ring: U and R.
        heads, key_heads, dim, value_dim: Hq, Hkv, D, Dv.
        size: bytes of an element of q, k and v.
    """
    copies = key_copies(heads, key_heads, ulysses)
    key_heads *= copies
    exchanged = heads * (dim + value_dim) + key_heads * (dim + value_dim)  # q and out, k and v; and their gradients
    exchange_bytes = 2 * exchanged * size * (ulysses - 1) // ulysses
    dtype = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[size]
    shapes = (heads, dim), (key_heads, dim), (key_heads, value_dim)
    q, k, v = (torch.empty(1, 1, n // ulysses, d, dtype=dtype, device="meta") for n, d in shapes)
    passes = forward_bytes(q, k, v), backward_bytes(q, k, v)
    hop = sum(min(sum(row.state), sum(row.kv)) for row in passes)
    return exchange_bytes + ulysses * (ring - 1) * hop


def best_ulysses(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask,
    ranks: int,
    host: int,
    near: Fabric,
    far: Fabric,
    layout: str = "zigzag",
    schedule: str = "auto",
) -> int:
    """The U, a divisor of `ranks` and of Hq, with which a forward and a backward are expected to take least time.

    The time of the ring of R = `ranks` / U, hop by hop (`Plan.costs`), with the ends of its steps and the adding up of what
    they earn; and what attention does not hide of the exchange (`exposed_seconds`). Times within a hundredth are equal: the
    smaller U is taken. A forecast from the speeds in `ringattn.planning.cost_model`: the same arguments give the same U on every rank.

    It takes about a second for 64 ranks. For more the answer is the U inside a host that moves fewest bytes, by
    `bytes_per_row`, which knows neither masks nor speeds.

    Args:
        q: (B, S, Hq, D), k: (B, S, Hkv, D), v: (B, S, Hkv, Dv), of all ranks together. Only shapes and dtypes matter: tensors
            on the "meta" device will do.
        mask: a long sequence without documents is planned at a fraction of its length.
        host: how many ranks a host has. They are neighbours by rank, as are those that exchange heads.
        near, far: what joins the ranks of one host, and of several.
        layout: of the ring: one of `layout.KINDS`, or "auto" for `balanced_layout`.
        schedule: as for `ring_attention`.
    """
    joined, host = (near, ranks) if ranks <= host else (far, host)
    candidates = [u for u in range(1, ranks + 1) if ranks % u == 0 and q.shape[2] % u == 0]
    if ranks > MOST_PLANNED:
        shape = q.shape[2], k.shape[2], q.shape[3], v.shape[3], q.element_size()
        inside = [u for u in candidates if host % u == 0]
        return min(inside, key=lambda u: bytes_per_row(u, ranks // u, *shape))
    seconds = {}
    for u in candidates:
        key_heads = k.shape[2] * key_copies(q.shape[2], k.shape[2], u)
        parts = parts_of(q.shape[0] * q.shape[1] * u // ranks, q.shape[2] // u, key_heads // u) if u > 1 else 1
        shapes = (q.shape[2], q.shape[3]), (key_heads, k.shape[3]), (key_heads, v.shape[3]), (q.shape[2], v.shape[3])
        *part, out = [q.new_empty(q.shape[0], 1, n // (u * parts), d, device="meta") for n, d in shapes]
        attention = _ring_seconds(part, mask, (layout, q.shape[1], ranks // u), joined, schedule)
        to_each = q.shape[1] / ranks * sum(x.nbytes for x in (*part, out))
        exchange = exchange_seconds(to_each, u, host, near, far)
        seconds[u] = sum(parts * x + exposed_seconds(parts, x, exchange) for x in attention)
    return min(u for u in candidates if seconds[u] <= 1.01 * min(seconds.values()))


def exchange_seconds(to_each: float, ulysses: int, host: int, near: Fabric, far: Fabric) -> float:
    """Both ways of a part of the heads, in which a rank sends `to_each` bytes to every other of `ulysses`; 0 for one rank."""
    inside = math.gcd(ulysses, host)  # at least so many of a group are in one host
    ways = (inside - 1, EXCHANGE_TIMES, near), (ulysses - inside, 1, far)
    return max(n * (times * to_each / way.bytes_per_second + 2 * way.latency) for n, times, way in ways)


def exposed_seconds(parts: int, attention: float, exchange: float) -> float:
    """What a direction takes besides the attention of its parts, where each takes `attention` and `exchange` seconds.

    The first part's arrival and the last part's return, together one exchange; and of the others what attention, which takes
    place at the same time, does not hide.
    """
    return exchange + (parts - 1) * max(0.0, exchange - attention)


def _ring_seconds(
    part: Sequence[Tensor], mask: Mask, ring: tuple[str, int, int], joined: Fabric, schedule: str
) -> tuple[float, ...]:
    """The forward and the backward of a part of the heads, q, k, v, on a `ring` of (kind of layout, positions, ranks).

    A long sequence without documents is planned as a shorter one, each of whose positions stands for `scale`.
    """
    kind, seq_len, ranks = ring
    length = seq_len if mask.documents else min(seq_len, max(MOST_POSITIONS, ranks))
    scale = seq_len / length
    mask = replace(mask, window=mask.window and max(1, round(mask.window / scale)))
    layout = balanced_layout(mask, length, ranks) if kind == "auto" else Layout(kind, length, ranks)
    own = Plan(mask, layout, 0, torch.device("cpu"))
    names = ("kv", "state") if schedule == "auto" else (schedule,)
    seconds = []
    for work in (forward_work(*part), backward_work(*part)):
        work, step = work.scaled(scale), STEP_SECONDS[work.direction]
        costs = [[own.costs(name, work, joined, rank) for rank in range(ranks)] for name in names]
        hops = min(max(sum(hop.seconds + step for hop in hops) for hops in of_ranks) for of_ranks in costs)
        seconds.append(hops + own.sum_bytes(work) * SUM_FLOPS_A_BYTE[work.direction] / joined.flops)
    return tuple(seconds)

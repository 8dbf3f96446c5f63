"""Ulysses x ring: heads are exchanged inside groups of U ranks, the ring goes across R groups (Jacobs et al. 2023).

A rank holds N rows of all heads. Its group of U ranks exchanges them, so that each holds the rows of all U, a shard of the
ring's layout, for Hq / U heads. Those attend on a ring of R ranks, and the outputs are exchanged back:

    (B, N, Hq, D)  --exchange-->  (B, about U N, Hq / U, D)  --ring-->  the same  --exchange-->  (B, N, Hq, D)

The exchange moves less than a ring as long as heads are many, and the ring goes on where heads run out. Heads are exchanged in
parts: attention works on one while the next comes and the last goes home.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ringattn import custom_op
from ringattn.attention import (
    SETTINGS,
    autocast,
    call_of,
    check_choices,
    check_inputs,
    check_layout,
    pairs_a_rank,
    ring_attention,
    ring_of,
    scale_of,
)
from ringattn.comm.all_to_all import Heads, Landing, Rows, begin
from ringattn.comm.group import Group, rank_and_size
from ringattn.comm.nvlink_all_to_all import MOST_SENDS
from ringattn.comm.transport import Block, Transport, resolve
from ringattn.kernels.reference import state_dtype
from ringattn.layout import Layout
from ringattn.mask import Mask
from ringattn.ring import Ring

FULL_ROWS = 2**15  # rows in all heads of a part: with fewer, its kernels leave processors idle
MOST_PARTS = MOST_SENDS // 2  # a part is sent there and back


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: Layout,
    mask: Mask,
    ulysses_group: Group | None = None,
    ring_group: Group | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    schedule: str = "auto",
    transport: str = "auto",
    backend: str = "auto",
    precision: str = "ieee",
    return_lse: bool = False,
    exchange_again: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * q k^T + mask) v over the whole sequence, as `ring_attention`, on U x R ranks; with autograd.

    Rank r * U + u of the layout is rank r of its `ring_group` and rank u of its `ulysses_group`.

    Key heads that are fewer than U, or shared by query heads of several ranks, are sent to each rank that needs them. Their
    gradients come back in the inputs' dtype and are summed then.

    Args:
        q: (B, N, Hq, D), this rank's rows in layout order; U divides Hq.
        k: (B, N, Hkv, D), v: (B, N, Hkv, Dv); Hkv divides Hq. Dtypes and devices as for `ring_attention`.
        layout: of the R x U ranks: `Layout.zigzag(S, R).split(U)`, or another kind.
        mask: which keys a position may see, the same on all ranks.
        ulysses_group: the U ranks that exchange heads. None: this rank alone, U = 1.
        ring_group: the R ranks of the ring. None: this rank alone, R = 1.
        scale, dropout_p, seed, schedule, transport, backend, precision: as for `ring_attention`; `transport` is that of the
            exchange, too.
        return_lse: also return the log of the softmax's denominator.
        exchange_again: keep q, k, v as they are and exchange them once more in the backward. That takes longer, and where
            something else keeps or recomputes q, k, v anyway it takes less memory: by default what was exchanged is kept.

    Returns:
        out (B, N, Hq, Dv) in q's dtype; with `return_lse` (out, lse), lse (B, N, Hq) in fp32 (fp64 for fp64 inputs).

    Raises:
        ValueError: query heads that U does not divide, a layout split for another U, and what `ring_attention` refuses.
    """
    (ring_rank, ring), (rank, size) = rank_and_size(ring_group), rank_and_size(ulysses_group)
    q, k, v = autocast(q, k, v)
    check_layout(layout)
    scale = scale_of(q, scale)
    check_choices(schedule, transport)
    check_inputs(q, k, v, mask, layout.seq_len, scale, dropout_p, seed, backend, precision)
    _check_ranks(q, k, layout, (ring_rank, ring), (rank, size))
    if size == 1:
        options = dict(mask=mask, group=ring_group, scale=scale, dropout_p=dropout_p, seed=seed, return_lse=return_lse)
        options |= dict(schedule=schedule, transport=transport, backend=backend, precision=precision)
        return ring_attention(q, k, v, layout=layout, **options)
    copies = key_copies(q.shape[2], k.shape[2], size)
    k, v = (x.repeat_interleave(copies, 2) for x in (k, v)) if copies > 1 else (k, v)
    whole = layout.whole
    rows = [layout.rows(ring_rank * size + peer) for peer in range(size)]
    # by the mean rows of a rank of the ring: all of them must work in as many parts, whatever rows each has
    parts = parts_of(q.shape[0] * (layout.seq_len // ring), q.shape[2] // size, k.shape[2] // size)
    settings = rows, ulysses_group.group_name, transport, return_lse, exchange_again, parts
    settings += mask.lengths, mask.is_causal, mask.window or 0, whole.kind, whole.seq_len, whole.ranks
    settings += "" if ring_group is None else ring_group.group_name, schedule, transport, scale, float(dropout_p), seed
    settings += rank * (q.shape[2] // size), backend, precision
    out, lse, _ = _attention(q, k, v, *settings)
    return (out, lse) if return_lse else out


def key_copies(heads: int, key_heads: int, ulysses: int) -> int:
    """How often a key head is sent, so that each of `ulysses` ranks has those of its `heads` / `ulysses` query heads."""
    per_key, per_rank = heads // key_heads, heads // ulysses
    return per_key // math.gcd(per_key, per_rank)


def _check_ranks(q: Tensor, k: Tensor, layout: Layout, ring: tuple[int, int], ulysses: tuple[int, int]) -> None:
    """`ring`, `ulysses`: this rank and the size of each group."""
    if q.shape[2] % ulysses[1]:
        raise ValueError(
            f"{q.shape[2]} query heads do not divide among the {ulysses[1]} ranks of the Ulysses group: use a smaller group "
            "and a larger ring"
        )
    if (layout.whole.ranks, layout.parts) != (ring[1], ulysses[1]):
        raise ValueError(
            f"the layout is over {layout.whole.ranks} x {layout.parts} ranks but there are a ring of {ring[1]} and a Ulysses "
            f"group of {ulysses[1]}: make it over {ring[1]} ranks, then .split({ulysses[1]})"
        )
    rank = ring[0] * ulysses[1] + ulysses[0]
    if not q.shape[1] == k.shape[1] == layout.rows(rank):
        raise ValueError(
            f"q has {q.shape[1]} rows and k {k.shape[1]}, but the shard of rank {rank} has {layout.rows(rank)}: use "
            "layout.shard"
        )


def parts_of(rows: int, heads: int, key_heads: int) -> int:
    """In how many parts a rank's heads are exchanged and worked off, so that all but the first and last exchange are hidden.

    Args:
        rows, heads, key_heads: those that a rank attends with; rows of all batch rows.
    """
    counts = [n for n in range(1, min(key_heads, MOST_PARTS) + 1) if key_heads % n == 0 and rows * heads >= n * FULL_ROWS]
    return max(counts, default=1)


class _Exchange:
    """What one call exchanges among the ranks of `line`, which have `rows` rows each; heads go in `parts` parts."""

    def __init__(self, rows: Sequence[int], line: Transport, parts: int) -> None:
        self.rows, self.ranks, self.rank, self.parts = Rows(tuple(rows)), line.size, line.rank, parts
        self.swap = begin(line)

    def to_heads(self, *tensors: Tensor) -> list[Landing]:
        """For each part a landing of all rows of its heads, for tensors like these."""
        total, shares = sum(self.rows.counts), self.ranks * self.parts
        blocks = [tuple(_sized(x, total, x.shape[2] // shares) for x in tensors) for _ in range(self.parts)]
        return [self.swap.land(block, (total,) * self.ranks) for block in blocks]

    def arrive(self, landings: list[Landing], *tensors: Tensor) -> Iterator[Block]:
        """Send the parts of the tensors, one ahead of the one that is waited for."""
        for part in range(self.parts + 1):
            if part < self.parts:
                landings[part].send(tensors, Heads(self.ranks, self.parts, part), self.rows)
            if part > 0:
                yield landings[part - 1].wait()

    def to_rows(self, *tensors: Tensor) -> Landing:
        """A landing of this rank's rows of all heads, for tensors like these."""
        counts = self.rows.counts
        return self.swap.land(tuple(_sized(x, counts[self.rank], x.shape[2]) for x in tensors), counts, self.parts)

    def send_rows(self, landing: Landing, part: int, *tensors: Tensor) -> None:
        landing.send(tensors, self.rows, Heads(self.ranks, self.parts, part))


def _sized(x: Tensor, rows: int, heads: int) -> Tensor:
    return x.new_empty(x.shape[0], rows, heads, *x.shape[3:])


# A call is one operator, as the ring is one: what a compiler sees as a node. It keeps what each part attended with, or, where
# that is exchanged again, the inputs and the parts' results.
_SETTINGS = f"SymInt[] rows, str ulysses_group, str exchange, bool with_lse, bool exchange_again, SymInt parts, {SETTINGS}"


def _forward(q, k, v, rows, group, transport, with_lse, again, parts, *settings):
    call = partial(call_of, q, k, v, *settings)
    ring, schedule = ring_of(q, *settings, call=call)
    line = resolve(group, q.device, transport, call)
    exchange = _Exchange(rows, line, parts)
    inputs, outputs = exchange.to_heads(q, k, v), exchange.to_rows(_like_output(q, v))
    kept, lses = [], []
    for part, block in enumerate(exchange.arrive(inputs, q, k, v)):
        out, lse = _of_part(ring, part, block[0], line).forward(*block, schedule=schedule)
        exchange.send_rows(outputs, part, out)
        kept += [out, lse] if again else [*block, out, lse]
        lses.append(lse)
    (out,) = outputs.wait()
    exchange.swap.end()
    lse = _swap_rows(torch.cat(lses, 2), rows, group) if with_lse else lses[0].new_empty(0)
    return out, lse, kept


def _backward(kept, dout, dlse, rows, group, transport, with_lse, again, parts, *settings):
    inputs, kept = (tuple(kept[:3]), kept[3:]) if again else ((), kept)
    size = 2 if again else 5
    saved = [kept[i : i + size] for i in range(0, len(kept), size)]
    ring, schedule = ring_of(dout, *settings)
    dlses = [None] * parts
    if with_lse:
        # on some ranks lse may have a gradient and on others none
        dlse = dout.new_zeros(dout.shape[:3], dtype=saved[0][-1].dtype) if dlse is None else dlse
        dlses = _swap_heads(dlse, rows, group).chunk(parts, 2)
    line = resolve(group, dout.device, transport)
    exchange = _Exchange(rows, line, parts)
    outputs = exchange.to_heads(*inputs, dout)
    grads = exchange.to_rows(*(inputs or _like_inputs(saved[0], dout)))
    for part, (*block, upstream) in enumerate(exchange.arrive(outputs, *inputs, dout)):
        *own, out, lse = saved[part]
        block = block or own
        dlse = dlses[part] if dlses[part] is None else dlses[part].contiguous()
        ours = _of_part(ring, part, block[0], line).backward(*block, out, lse, upstream, dlse, schedule=schedule)
        exchange.send_rows(grads, part, *ours)
    results = grads.wait()
    exchange.swap.end()
    return results


def _of_part(ring: Ring, part: int, q: Tensor, line: Transport) -> Ring:
    """The ring of one part of the heads, which attends while `line` moves others."""
    return replace(ring, first_head=ring.first_head + part * q.shape[2], beside_kernels=line.fabric.on_processors)


def _like_output(q: Tensor, v: Tensor) -> Tensor:
    """A tensor with the shape of the output, of no memory."""
    return q.new_empty(()).expand(*q.shape[:3], v.shape[3])


def _like_inputs(kept: Sequence[Tensor], dout: Tensor) -> tuple[Tensor, ...]:
    """Tensors with the shapes of q, k, v, of no memory."""
    shares = dout.shape[2] // kept[0].shape[2]
    return tuple(dout.new_empty(()).expand(*dout.shape[:2], shares * x.shape[2], x.shape[3]) for x in kept[:3])


def _swap_rows(x: Tensor, rows: Sequence[int], group: str) -> Tensor:
    """(B, sum of rows, Hq / U) to (B, N, Hq): pieces of a few bytes are packed, and go point to point."""
    exchange = _Exchange(rows, resolve(group), 1)
    landing = exchange.to_rows(x.new_empty(()).expand(*x.shape[:2], x.shape[2] * len(rows)))
    exchange.send_rows(landing, 0, x)
    return landing.wait()[0]


def _swap_heads(x: Tensor, rows: Sequence[int], group: str) -> Tensor:
    """The inverse of `_swap_rows`."""
    exchange = _Exchange(rows, resolve(group), 1)
    landings = exchange.to_heads(x)
    ((heads,),) = exchange.arrive(landings, x)
    return heads


def _fake_results(q, k, v, rows, group, transport, with_lse, again, parts, *settings):
    ranks, total = len(rows), sum(rows)
    block = [_sized(x, total, x.shape[2] // (ranks * parts)) for x in (q, k, v)]
    lse_dtype = state_dtype(q.dtype)
    results = [_like_output(block[0], v).contiguous(), block[0].new_empty(block[0].shape[:3], dtype=lse_dtype)]
    one = results if again else [*block, *results]
    lse = q.new_empty(q.shape[:3] if with_lse else 0, dtype=lse_dtype)
    return _like_output(q, v).contiguous(), lse, [x.clone() for _ in range(parts) for x in one]


def _fake_gradients(kept, dout, dlse, rows, group, transport, with_lse, again, *settings):
    inputs = kept[:3] if again else _like_inputs(kept, dout)
    return tuple(dout.new_empty(x.shape) for x in inputs)


def _pairs(batch, num_queries, num_keys, rows, group, transport, with_lse, again, parts, *settings):
    return pairs_a_rank(batch, num_queries, num_keys, *settings) / len(rows)


_attention = custom_op.register(
    "ulysses_attention",
    _SETTINGS,
    _forward,
    _backward,
    _pairs,
    custom_op.Keeping(_fake_results, _fake_gradients, inputs_too=lambda settings: settings[4]),
)

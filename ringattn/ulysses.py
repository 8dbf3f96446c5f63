"""Ulysses x ring: heads are exchanged inside groups of U ranks, the ring goes across R groups (Jacobs et al. 2023).

A rank holds N rows of all heads. Its group of U ranks exchanges them, so that each holds the rows of all U, a shard of the
ring's layout, for Hq / U heads. Those attend on a ring of R ranks, and the outputs are exchanged back:

    (B, N, Hq, D)  --exchange-->  (B, about U N, Hq / U, D)  --ring-->  the same  --exchange-->  (B, N, Hq, D)

The exchange moves less than a ring as long as heads are many, and the ring goes on where heads run out.
"""

import math

import torch
from torch import Tensor

from ringattn.attention import check_inputs, ring_attention
from ringattn.layout import Layout
from ringattn.mask import Mask
from ringattn.messages import Group, exchange, find, rank_and_size
from ringattn.plan import backward_bytes, forward_bytes


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
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * q k^T + mask) v over the whole sequence, as `ring_attention`, on U x R ranks; with autograd.

    Rank r * U + u of the layout is rank r of its `ring_group` and rank u of its `ulysses_group`.

    Key heads that are fewer than U, or shared by query heads of several ranks, are sent to each rank that needs them. Their
    gradients come back in the inputs' dtype and are summed then.

    Args:
        q: (B, N, Hq, D), this rank's rows in layout order; U divides Hq.
        k: (B, N, Hkv, D), v: (B, N, Hkv, Dv); Hkv divides Hq. All of one dtype (fp16, bf16, fp32, fp64) and device.
        layout: of the R x U ranks: `Layout.zigzag(S, R).split(U)`, or another kind.
        mask: which keys a position may see, the same on all ranks.
        ulysses_group: the U ranks that exchange heads. None: this rank alone, U = 1.
        ring_group: the R ranks of the ring. None: this rank alone, R = 1.
        scale, dropout_p, seed, schedule, transport, backend, precision: as for `ring_attention`; the exchange of heads is point
            to point.
        return_lse: also return the log of the softmax's denominator.

    Returns:
        out (B, N, Hq, Dv) in q's dtype; with `return_lse` (out, lse), lse (B, N, Hq) in fp32 (fp64 for fp64 inputs).

    Raises:
        ValueError: query heads that U does not divide, a layout split for another U, and what `ring_attention` refuses.
    """
    (ring_rank, ring), (rank, size) = rank_and_size(ring_group), rank_and_size(ulysses_group)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    check_inputs(q, k, v, mask, layout.seq_len, scale, dropout_p, seed, backend, precision)
    _check_ranks(q, k, layout, (ring_rank, ring), (rank, size))
    options = dict(mask=mask, group=ring_group, scale=scale, schedule=schedule, transport=transport)
    options |= dict(dropout_p=dropout_p, seed=seed, backend=backend, precision=precision)
    if size == 1:
        return ring_attention(q, k, v, layout=layout, return_lse=return_lse, **options)
    heads = q.shape[2] // size
    copies = key_copies(q.shape[2], k.shape[2], size)
    k, v = (x.repeat_interleave(copies, 2) for x in (k, v)) if copies > 1 else (k, v)
    widths = [heads * q.shape[3], *(k.shape[2] // size * x.shape[3] for x in (k, v))]
    # one message to each rank: its heads of q, k and v, side by side
    outgoing = torch.cat([x.unflatten(2, (size, -1)).flatten(3) for x in (q, k, v)], -1)
    rows = [layout.rows(ring_rank * size + peer) for peer in range(size)]
    name = ulysses_group.group_name
    gathered = torch.ops.ringattn.gather_rows(outgoing, rows, name)
    q, k, v = (part.unflatten(2, (-1, x.shape[3])) for part, x in zip(gathered.split(widths, -1), (q, k, v), strict=True))
    out, lse = ring_attention(q, k, v, layout=layout.whole, first_head=rank * heads, return_lse=True, **options)
    out = torch.ops.ringattn.scatter_rows(out.flatten(2), rows, name).unflatten(3, (heads, -1)).flatten(2, 3)
    return (out, torch.ops.ringattn.scatter_rows(lse, rows, name).flatten(2)) if return_lse else out


def key_copies(heads: int, key_heads: int, ulysses: int) -> int:
    """How often a key head is sent, so that each of `ulysses` ranks has those of its `heads` / `ulysses` query heads."""
    per_key, per_rank = heads // key_heads, heads // ulysses
    return per_key // math.gcd(per_key, per_rank)


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


def fewest_bytes(ranks: int, heads: int, key_heads: int, dim: int, value_dim: int | None = None, size: int = 2) -> int:
    """The U, a divisor of `ranks` and of `heads`, with which a rank sends fewest bytes; the ring has `ranks` / U. See above."""
    candidates = [u for u in range(1, ranks + 1) if ranks % u == 0 and heads % u == 0]
    return min(candidates, key=lambda u: bytes_per_row(u, ranks // u, heads, key_heads, dim, value_dim or dim, size))


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


# Operators, as the ring is one: a compiler sees a node, and no tensor of a message is ever saved or recomputed by itself.


@torch.library.custom_op("ringattn::gather_rows", mutates_args=())
def gather_rows(x: Tensor, rows: list[int], group: str) -> Tensor:
    """(B, N, U, F) -> (B, sum of rows, F): part u of the rows goes to rank u, where those of all ranks stand in order of rank.

    `rows`: how many rows each rank has.
    """
    batch, _, _, width = x.shape
    sent = [part.contiguous() for part in x.unbind(2)]
    return torch.cat(_all_to_all(sent, [x.new_empty(batch, n, width) for n in rows], find(group)), 1)


@torch.library.custom_op("ringattn::scatter_rows", mutates_args=())
def scatter_rows(x: Tensor, rows: list[int], group: str) -> Tensor:
    """(B, sum of rows, F) -> (B, N, U, F): the inverse of `gather_rows`, and its derivative."""
    ends = find(group)
    own, size = rank_and_size(ends)
    sent = [part.contiguous() for part in x.split(rows, 1)]
    return torch.stack(_all_to_all(sent, [x.new_empty(x.shape[0], rows[own], x.shape[2]) for _ in range(size)], ends), 2)


def _all_to_all(sent: list[Tensor], received: list[Tensor], group: Group) -> list[Tensor]:
    """received[u] becomes what rank u sends here. Point to point: any backend can, NCCL as one kernel."""
    own, size = rank_and_size(group)
    peers = [peer for peer in range(size) if peer != own]
    received[own] = sent[own]
    sends, receives = ([(x[peer], peer) for peer in peers if x[peer].numel()] for x in (sent, received))
    exchange(group, sends, receives)
    return received


@gather_rows.register_fake
def _(x, rows, group):
    return x.new_empty(x.shape[0], sum(rows), x.shape[3])


@scatter_rows.register_fake
def _(x, rows, group):
    own, size = rank_and_size(find(group))
    return x.new_empty(x.shape[0], rows[own], size, x.shape[2])


def _keep_settings(ctx, inputs, output):
    _, ctx.rows, ctx.group = inputs


gather_rows.register_autograd(
    lambda ctx, grad: (torch.ops.ringattn.scatter_rows(grad, ctx.rows, ctx.group), None, None), setup_context=_keep_settings
)
scatter_rows.register_autograd(
    lambda ctx, grad: (torch.ops.ringattn.gather_rows(grad, ctx.rows, ctx.group), None, None), setup_context=_keep_settings
)

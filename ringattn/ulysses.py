"""Combine Ulysses attention (Jacobs et al. 2023) in groups of U ranks with rings across R groups.

After the first all-to-all, each rank of a group holds all tokens of the group for Hq / U heads. The tokens of one group form
one shard of the ring. The second all-to-all sends the outputs back:

    (B, N, Hq, D)  --all-to-all-->  (B, about U N, Hq / U, D)  --ring-->  same shape  --all-to-all-->  (B, N, Hq, D)

Attention computes one chunk of heads at a time. Meanwhile, the next chunk arrives, and the previous output returns.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringattn import custom_op
from ringattn.attention import pairs_per_rank, ring_attention
from ringattn.comm import connect
from ringattn.comm.all_to_all import Exchange, HeadSlice, TokenSlice
from ringattn.comm.calls import Call
from ringattn.comm.connect import Group, rank_and_size
from ringattn.comm.transport import Tensors, Transport, in_call
from ringattn.kernels.reference import state_dtype
from ringattn.kernels.validation import as_integer, as_number, check_dense, check_flag
from ringattn.layout import Layout
from ringattn.mask import Mask
from ringattn.planning.ulysses_degree import head_chunks_for_overlap, key_copies
from ringattn.ring import Ring
from ringattn.sinks import check_sink_logits, with_sinks
from ringattn.spec import AttentionSpec, autocast, check_attention, check_choices, check_layout, check_shard, resolve_scale


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
    route: str = "auto",
    transport: str = "auto",
    backend: str = "auto",
    precision: str = "ieee",
    return_lse: bool = False,
    recompute_all_to_all: bool = False,
    sink_logits: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute softmax(scale * q k^T + mask) v over the whole sequence, like `ring_attention`, on U x R ranks.

    The rank with number r in `ring_group` and u in `ulysses_group` is rank r * U + u of the layout. If several ranks need the
    same key head, each of them receives a copy. The gradients of the copied key heads are summed in the dtype of the inputs.

    Args:
        q: (B, N, Hq, D), this rank's tokens in layout order; U divides Hq.
        k: (B, N, Hkv, D), v: (B, N, Hkv, Dv); Hkv divides Hq. dtypes as for `ring_attention`.
        layout: the layout over the R x U ranks, such as `Layout.zigzag(S, R).split(U)`.
        mask, scale, dropout_p, seed, schedule, route, transport, backend, return_lse, sink_logits: as for `ring_attention`.
        ulysses_group: the U ranks of the all-to-all; None for this rank alone (U = 1).
        ring_group: the R ranks of the ring; None for this rank alone (R = 1).
        precision: as for `ring_attention`; the all-to-all sends the unrounded inputs, which the backward pass needs.
        recompute_all_to_all: whether to save q, k and v instead of the results of the all-to-all, and repeat the all-to-all in
            the backward pass. This saves memory only if the model saves or recomputes q, k and v anyway.

    Returns:
        As `ring_attention`.

    Raises:
        ValueError: U does not divide Hq, the layout does not have U parts, or `ring_attention` would reject an argument.
    """
    check_flag("recompute_all_to_all", recompute_all_to_all)
    (ring_rank, ring_size), (rank, size) = rank_and_size(ring_group), rank_and_size(ulysses_group)
    options: dict[str, Any] = dict(scale=scale, dropout_p=dropout_p, seed=seed, backend=backend, precision=precision)
    choices = dict(schedule=schedule, route=route, transport=transport)
    if size == 1 and getattr(layout, "parts", 1) == 1:
        options |= dict(return_lse=return_lse, sink_logits=sink_logits)
        return ring_attention(q, k, v, layout=layout, mask=mask, group=ring_group, **options, **choices)
    check_dense(q, k, v)
    q, k, v = autocast(q, k, v)
    check_layout(layout)
    options |= dict(scale=resolve_scale(q, scale), dropout_p=as_number("dropout_p", dropout_p), seed=as_integer("seed", seed))
    check_flag("return_lse", return_lse)
    check_choices(**choices)
    check_attention(q, k, v, mask=mask, seq_len=layout.seq_len, **options)
    check_sink_logits(sink_logits, q)
    _check_ranks(q, k, layout, (ring_rank, ring_size), (rank, size))
    options |= choices
    assert ulysses_group is not None
    # autograd adds the gradients of the copies.
    copies = key_copies(q.shape[2], k.shape[2], size)
    k, v = (x.repeat_interleave(copies, 2) for x in (k, v)) if copies > 1 else (k, v)
    attention = AttentionSpec.create(
        mask,
        layout.whole,
        group="" if ring_group is None else ring_group.group_name,
        # Rank u computes the Hq / U heads that start at head u * Hq / U.
        first_head=rank * (q.shape[2] // size),
        **options,
    )
    spec = UlyssesSpec(
        tokens=[layout.rows(ring_rank * size + peer) for peer in range(size)],
        ulysses_group=ulysses_group.group_name,
        with_lse=return_lse or sink_logits is not None,
        recompute_all_to_all=recompute_all_to_all,
        # All ranks need the same number of chunks, so use the mean number of tokens per rank.
        chunks=head_chunks_for_overlap(q.shape[0] * (layout.seq_len // ring_size), q.shape[2] // size, k.shape[2] // size),
        key_heads=k.shape[2] // copies,
        attention=attention,
    )
    out, lse, _ = _attention(q, k, v, spec)
    return with_sinks(out, lse, sink_logits, return_lse)


class UlyssesSpec(NamedTuple):
    tokens: list[int]  # number of tokens of each rank of the Ulysses group
    ulysses_group: str
    with_lse: bool  # whether this rank receives lse
    recompute_all_to_all: bool
    chunks: int  # head chunks per rank
    key_heads: int  # number of key heads before they were copied
    attention: AttentionSpec

    @property
    def settings(self) -> Call:
        """Return the additional settings that must be equal on all ranks of a Ulysses group."""
        settings: Call = {"key heads": self.key_heads, "first_head": None, "return_lse": self.with_lse}
        return settings | {"recompute_all_to_all": self.recompute_all_to_all}


def _check_ranks(q: Tensor, k: Tensor, layout: Layout, ring: tuple[int, int], ulysses: tuple[int, int]) -> None:
    """Check the heads, the layout and the tokens. `ring` and `ulysses` are (this rank, number of ranks)."""
    if (layout.whole.ranks, layout.parts) != (ring[1], ulysses[1]):
        raise ValueError(
            f"the layout is for {layout.whole.ranks} x {layout.parts} ranks, but there is a ring of {ring[1]} and a Ulysses "
            f"group of {ulysses[1]}: create it for {ring[1]} ranks and call .split({ulysses[1]})"
        )
    check_shard(q, k, layout, ring[0] * ulysses[1] + ulysses[0])
    if q.shape[2] % ulysses[1]:
        raise ValueError(
            f"{q.shape[2]} query heads cannot be divided among the {ulysses[1]} ranks of the Ulysses group: use a smaller "
            "Ulysses group and a larger ring"
        )


class _HeadChunks:
    def __init__(self, tokens: Sequence[int], transport: Transport, chunks: int) -> None:
        self.tokens, self.ranks, self.rank, self.chunks = TokenSlice(tuple(tokens)), transport.size, transport.rank, chunks
        self.all_to_all = connect.open_all_to_all(transport)

    def to_heads(self, *tensors: Tensor) -> list[Exchange]:
        """Create one exchange per chunk of heads to collect all tokens. The method reads only the shapes and dtypes of the
        tensors.
        """
        total, shares = sum(self.tokens.counts), self.ranks * self.chunks
        blocks = [tuple(_resized(x, total, x.shape[2] // shares) for x in tensors) for _ in range(self.chunks)]
        return [self.all_to_all.start(block, (total,) * self.ranks) for block in blocks]

    def receive(self, exchanges: list[Exchange], *tensors: Tensor) -> Iterator[Tensors]:
        # Chunk i + 1 is in flight while attention computes chunk i.
        for chunk in range(self.chunks + 1):
            if chunk < self.chunks:
                exchanges[chunk].send(tensors, HeadSlice(self.ranks, self.chunks, chunk), self.tokens)
            if chunk > 0:
                yield exchanges[chunk - 1].wait()

    def to_tokens(self, *tensors: Tensor) -> Exchange:
        """Create the exchange that collects all heads of this rank's tokens. Only shapes and dtypes matter."""
        counts = self.tokens.counts
        return self.all_to_all.start(tuple(_resized(x, counts[self.rank], x.shape[2]) for x in tensors), counts, self.chunks)

    def send_back(self, exchange: Exchange, chunk: int, *tensors: Tensor) -> None:
        exchange.send(tensors, self.tokens, HeadSlice(self.ranks, self.chunks, chunk))


def _resized(x: Tensor, tokens: int, heads: int) -> Tensor:
    return x.new_empty(x.shape[0], tokens, heads, *x.shape[3:])


def _forward(q: Tensor, k: Tensor, v: Tensor, spec: UlyssesSpec) -> custom_op.Results:
    """Return out, lse and the tensors to save for the backward pass. Each head chunk saves out and lse. Without
    `recompute_all_to_all`, each chunk also saves q, k and v.
    """
    arguments = "forward of ulysses_attention", q, k, v
    ring = Ring.of(spec.attention, q.device, partial(spec.attention.as_call, *arguments))
    call = partial(spec.attention.as_call, *arguments, **spec.settings)
    transport = connect.connect(spec.ulysses_group, q.device, spec.attention.transport, call)
    with in_call(ring.transport, transport):
        spec.attention.record_call(transport, *arguments, **spec.settings)
        return _forward_in_chunks(q, k, v, spec, ring, transport)


def _forward_in_chunks(
    q: Tensor, k: Tensor, v: Tensor, spec: UlyssesSpec, ring: Ring, transport: Transport
) -> custom_op.Results:
    heads = _HeadChunks(spec.tokens, transport, spec.chunks)
    inputs, outputs = heads.to_heads(q, k, v), heads.to_tokens(_like_output(q, v))
    saved: list[Tensor] = []
    lses: list[Tensor] = []
    for chunk, block in enumerate(heads.receive(inputs, q, k, v)):
        # While attention of one chunk runs, the transport sends other chunks, and may occupy SMs.
        chunk_ring = ring.of_heads(chunk * block[0].shape[2], transport.interconnect.uses_sms)
        out, lse = chunk_ring.forward(*block)
        heads.send_back(outputs, chunk, out)
        saved += [out, lse] if spec.recompute_all_to_all else [*block, out, lse]
        lses.append(lse)
    (out,) = outputs.wait()
    heads.all_to_all.finish()
    lse = _lse_to_tokens(torch.cat(lses, 2), spec, transport) if spec.with_lse else lses[0].new_empty(0)
    return out, lse, saved


def _backward(saved: list[Tensor], dout: Tensor, dlse: Tensor | None, spec: UlyssesSpec) -> Tensors:
    ring = Ring.of(spec.attention, dout.device)
    transport = connect.connect(spec.ulysses_group, dout.device, spec.attention.transport)
    with in_call(ring.transport, transport):
        spec.attention.record_call(transport, "backward of ulysses_attention", dout, dout, dout, **spec.settings)
        return _backward_in_chunks(saved, dout, dlse, spec, ring, transport)


def _backward_in_chunks(
    saved: list[Tensor], dout: Tensor, dlse: Tensor | None, spec: UlyssesSpec, ring: Ring, transport: Transport
) -> Tensors:
    inputs: Tensors = ()
    if spec.recompute_all_to_all:
        inputs, saved = tuple(saved[:3]), saved[3:]
    per_chunk = 2 if spec.recompute_all_to_all else 5
    chunks = [saved[i : i + per_chunk] for i in range(0, len(saved), per_chunk)]
    dlses: list[Tensor | None] = [None] * spec.chunks
    if spec.with_lse:
        # All ranks must exchange dlse, so replace None by zeros.
        dlse = dout.new_zeros(dout.shape[:3], dtype=chunks[0][-1].dtype) if dlse is None else dlse
        dlses = [x.contiguous() for x in _lse_to_heads(dlse, spec, transport).chunk(spec.chunks, 2)]
    heads = _HeadChunks(spec.tokens, transport, spec.chunks)
    outputs = heads.to_heads(*inputs, dout)
    grads = heads.to_tokens(*(inputs or _like_inputs(chunks[0], dout)))
    for chunk, (*block, upstream) in enumerate(heads.receive(outputs, *inputs, dout)):
        *saved_block, out, lse = chunks[chunk]
        block = block or saved_block
        chunk_ring = ring.of_heads(chunk * block[0].shape[2], transport.interconnect.uses_sms)
        results = chunk_ring.backward(*block, out, lse, upstream, dlses[chunk])
        heads.send_back(grads, chunk, *results)
    dq_dk_dv = grads.wait()
    heads.all_to_all.finish()
    return dq_dk_dv


def _like_output(q: Tensor, v: Tensor) -> Tensor:
    return q.new_empty(()).expand(*q.shape[:3], v.shape[3])


def _like_inputs(saved: Sequence[Tensor], dout: Tensor) -> Tensors:
    shares = dout.shape[2] // saved[0].shape[2]
    return tuple(dout.new_empty(()).expand(*dout.shape[:2], shares * x.shape[2], x.shape[3]) for x in saved[:3])


def _lse_to_tokens(lse: Tensor, spec: UlyssesSpec, transport: Transport) -> Tensor:
    """Send lse of this rank's heads (B, tokens of the group, Hq / U). Return lse of this rank's tokens (B, N, Hq)."""
    heads = _HeadChunks(spec.tokens, transport.messages, 1)
    exchange = heads.to_tokens(lse.new_empty(()).expand(*lse.shape[:2], lse.shape[2] * len(spec.tokens)))
    heads.send_back(exchange, 0, lse)
    return exchange.wait()[0]


def _lse_to_heads(lse: Tensor, spec: UlyssesSpec, transport: Transport) -> Tensor:
    """The inverse of `_lse_to_tokens`."""
    heads = _HeadChunks(spec.tokens, transport.messages, 1)
    ((gathered,),) = heads.receive(heads.to_heads(lse), lse)
    return gathered


def _fake_results(q: Tensor, k: Tensor, v: Tensor, spec: UlyssesSpec) -> custom_op.Results:
    shares, total = len(spec.tokens) * spec.chunks, sum(spec.tokens)
    block = [_resized(x, total, x.shape[2] // shares) for x in (q, k, v)]
    lse_dtype = state_dtype(q.dtype)
    results = [_like_output(block[0], v).contiguous(), block[0].new_empty(block[0].shape[:3], dtype=lse_dtype)]
    chunk = results if spec.recompute_all_to_all else [*block, *results]
    lse = q.new_empty(q.shape[:3] if spec.with_lse else 0, dtype=lse_dtype)
    return _like_output(q, v).contiguous(), lse, [x.clone() for _ in range(spec.chunks) for x in chunk]


def _fake_gradients(saved: list[Tensor], dout: Tensor, dlse: Tensor | None, spec: UlyssesSpec) -> Tensors:
    inputs = saved[:3] if spec.recompute_all_to_all else _like_inputs(saved, dout)
    return tuple(dout.new_empty(x.shape) for x in inputs)


def _pairs(batch: int, num_queries: int, num_keys: int, spec: UlyssesSpec) -> float:
    return pairs_per_rank(batch, num_queries, num_keys, spec.attention) / len(spec.tokens)


def _to_save(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, extra: list[Tensor], spec: UlyssesSpec) -> list[Tensor]:
    return [q, k, v, *extra] if spec.recompute_all_to_all else extra


_functions = _forward, _backward, _pairs, _to_save, _fake_results, _fake_gradients
_attention = custom_op.register("ulysses_attention", UlyssesSpec, *_functions)

"""Decoding: a few new queries against a cache of keys and values that is spread over the ranks.

The queries are the same on all ranks. Every rank computes their partial state (m, l, o) against its shard of the cache, in
several splits so that few queries fill a GPU, and all partial states are folded with `merge`: the splits as a tree in one rank,
then the ranks as a tree, in log2(P) exchanges of one state (Flash-Decoding, Dao et al. 2023, over GPUs). No key ever moves.
"""

from functools import lru_cache, partial

import torch
from torch import Tensor

from ringattn.comm import connect
from ringattn.comm.connect import Group, rank_and_size
from ringattn.comm.transport import Addressed
from ringattn.kernels import dispatch
from ringattn.kernels.interval_mask import Intervals
from ringattn.kernels.validation import FLOAT_DTYPES
from ringattn.layout import Layout
from ringattn.spec import resolve_scale
from ringattn.state import PartialState

MAX_SPLITS = 64  # of a shard; its length is a multiple of this, so that any power of two up to it split_points it evenly
SPLIT_ROWS = 256  # keys of a split at least: fewer do not repay the merge
NOWHERE = torch.iinfo(torch.int64).max  # the position of a row that is not in use
PROGRAMS = 256  # tiles of queries, heads and splits that fill a GPU


class KVCache:
    """One rank's shard of the keys and values of a sequence that grows.

    Keys that a ring pass has left on this rank stay there, whatever its layout (`prefill`). New tokens (`append`) go to the
    rank that holds fewest, a block at a time: with equal shards before, ranks stay within a block of each other. Every rank
    can tell who holds what, so nothing is sent. Memory is allocated once, by the first keys that come; what `truncate` drops
    leaves room for others.
    """

    def __init__(self, capacity: int, rank: int = 0, ranks: int = 1, block: int = 16) -> None:
        """An empty cache.

        Args:
            capacity: tokens of the whole sequence, over all ranks.
            rank, ranks: of the group that the sequence is spread over.
            block: consecutive new tokens that one rank takes, and by how many rows shards may differ.

        Raises:
            ValueError: no capacity, no such rank, or a block without tokens.
        """
        whole = all(isinstance(x, int) for x in (capacity, rank, ranks, block))
        if not whole or capacity < 1 or block < 1 or not 0 <= rank < ranks:
            raise ValueError(
                f"capacity = {capacity}, rank = {rank}, ranks = {ranks}, block = {block}: give integers: at least 1 token, a "
                "rank from 0 to ranks - 1, and a block of at least 1"
            )
        self.capacity, self.rank, self.ranks, self.block = capacity, rank, ranks, block
        self.length = 0  # tokens in the caches of all ranks
        self.rows = [0] * ranks  # and in that of each
        self._taker, self._taken = 0, block  # who takes new tokens, and how many of its block it has: full, so far
        self._layout: Layout | None = None
        self._prompt = 0  # tokens, the first, that lie as in this layout
        self._takers: list[int] = []  # of each token after those
        self._k = self._v = self._positions = None

    def prefill(self, k: Tensor, v: Tensor, layout: Layout) -> None:
        """Keep this rank's rows of a whole sequence, the first in this cache. No gradient passes.

        Args:
            k: (B, N, Hkv, D), v: (B, N, Hkv, Dv): this rank's rows in `layout`, as ring attention takes them.

        Raises:
            ValueError: a cache that is not empty, a layout of other ranks or over capacity, or rows that are not its own.
        """
        _check_pair(k, v)
        if self.length:
            raise ValueError(f"the cache holds {self.length} tokens already: prefill a new one")
        if layout.ranks != self.ranks or k.shape[1] != layout.rows(self.rank):
            raise ValueError(
                f"{k.shape[1]} rows for rank {self.rank} of {self.ranks}, but the layout is over {layout.ranks} ranks"
                + (f" and its shard has {layout.rows(self.rank)}" if layout.ranks == self.ranks else "")
                + ": give the rows of this rank's shard"
            )
        rows = k.shape[1]
        self._reserve(k, v, layout.seq_len, rows)
        self._k[:, :rows], self._v[:, :rows] = k.detach(), v.detach()
        self._positions[:rows] = layout.positions(self.rank)
        self.rows = [layout.rows(rank) for rank in range(self.ranks)]
        self.length = self._prompt = layout.seq_len
        self._layout = layout

    def append(self, k: Tensor, v: Tensor) -> None:
        """Add the next tokens: k (B, N, Hkv, D), v (B, N, Hkv, Dv), the same on all ranks, of which each keeps its part.

        Raises:
            ValueError: more tokens than the capacity, another shape or dtype than before, or none that attention takes.
        """
        _check_pair(k, v)
        self._reserve(k, v, k.shape[1], 0)
        k, v = k.detach(), v.detach()
        for i in range(k.shape[1]):
            if (taker := self._next_taker()) == self.rank:
                row = self.rows[taker]
                self._k[:, row], self._v[:, row], self._positions[row] = k[:, i], v[:, i], self.length
            self.rows[taker] += 1
            self.length += 1
            self._takers.append(taker)

    def truncate(self, length: int) -> None:
        """Drop the newest tokens, so that the first `length` remain; the same on all ranks, which send nothing.

        For tokens that were only proposed, or an answer that is to be written anew.

        Raises:
            ValueError: no integer, or a length below 0 or beyond what the cache holds.
        """
        if not isinstance(length, int) or not 0 <= length <= self.length:
            raise ValueError(f"the cache holds {self.length} tokens: truncate it to 0 to {self.length}, not {length}")
        before, self.length = self.rows[self.rank], length
        self._prompt = min(self._prompt, length)
        self._takers = self._takers[: length - self._prompt]
        self.rows = [self._takers.count(rank) for rank in range(self.ranks)]
        if self._prompt:
            held = [int((self._layout.positions(rank) < self._prompt).sum()) for rank in range(self.ranks)]
            self.rows = [prompt + new for prompt, new in zip(held, self.rows, strict=True)]
        self._taken = self.block
        if self._k is not None:
            dropped = slice(self.rows[self.rank], before)
            self._k[:, dropped] = self._v[:, dropped] = 0
            self._positions[dropped] = NOWHERE

    @property
    def shard(self) -> tuple[Tensor, Tensor, Tensor]:
        """(k, v, positions) of this rank, allocated rows and all: the first `rows[rank]` are in use, by ascending position.

        Positions are int64 on the CPU.

        Raises:
            ValueError: nothing was kept yet.
        """
        if self._k is None:
            raise ValueError("the cache is empty: prefill it or append to it first")
        return self._k, self._v, self._positions

    def _next_taker(self) -> int:
        """The rank that takes the next token."""
        if self._taken == self.block:
            self._taker, self._taken = self.rows.index(min(self.rows)), 0
        self._taken += 1
        return self._taker

    def _reserve(self, k: Tensor, v: Tensor, num_tokens: int, rows: int) -> None:
        """Refuse tokens that do not fit; allocate at least `rows` rows on the first call, or while the cache is empty."""
        if self.length + num_tokens > self.capacity:
            raise ValueError(
                f"{self.length} + {num_tokens} tokens exceed the cache's capacity of {self.capacity}: make it larger"
            )
        if self._k is None or (self.length == 0 and rows > self._k.shape[1]):
            rows = max(rows, -(-self.capacity // self.ranks) + self.block)
            rows = -(-rows // MAX_SPLITS) * MAX_SPLITS
            # zeros: a kernel may load rows beyond those in use before it masks them, and 0 * NaN is no 0
            with torch.inference_mode(False):  # a cache made under it may be appended to outside
                self._k, self._v = (x.new_zeros(x.shape[0], rows, *x.shape[2:]) for x in (k, v))
                self._positions = torch.full((rows,), NOWHERE, device="cpu")
        for new, kept in ((k, self._k), (v, self._v)):
            if (new.shape[0], *new.shape[2:], new.dtype) != (kept.shape[0], *kept.shape[2:], kept.dtype):
                raise ValueError(
                    f"new keys or values {tuple(new.shape)} {new.dtype} in a cache of {tuple(kept.shape)} {kept.dtype}: batch, "
                    "heads, head dim and dtype must be the same"
                )


def _check_pair(k: Tensor, v: Tensor) -> None:
    """Refuse keys and values that no attention could take."""
    if k.ndim != 4 or v.ndim != 4 or k.shape[:3] != v.shape[:3] or not k.shape[2]:
        raise ValueError(f"keys {tuple(k.shape)} and values {tuple(v.shape)}: give k (B, N, Hkv, D) and v (B, N, Hkv, Dv)")
    if (k.dtype, k.device) != (v.dtype, v.device) or k.dtype not in FLOAT_DTYPES:
        raise ValueError(
            f"keys are {k.dtype} on {k.device}, values {v.dtype} on {v.device}: give one device, and one dtype of fp16, "
            "bf16, fp32 and fp64"
        )


def decode_attention(
    q: Tensor,
    cache: KVCache,
    *,
    group: Group | None = None,
    window: int | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Causal attention of the newest tokens to a cache that holds them and all before; every rank of `group` calls it.

    Exact, and the same bits on all ranks: states are fp32 and merged in the order of the ranks. No gradients. The first calls
    of a group are compared; what the queries are, never: ranks that sample must do so from the same seed.

    Args:
        q: (B, N, Hq, D), queries of the last N tokens of the cache, the same on all ranks; Hkv divides Hq. fp16, bf16,
            fp32 or fp64, as the cache.
        cache: this rank's shard; its own keys are in it already.
        group: the ranks that the cache is spread over; None: this process alone.
        window: keys that a query may see, itself included; None: all before it.
        scale: positive factor on the scores; None: D ** -0.5.
        backend: the kernels, see `ringattn.kernels.dispatch`.

    Returns:
        out (B, N, Hq, Dv) in q's dtype, on every rank.

    Raises:
        ValueError: a group of another size, queries that do not fit the cache, settings that make no sense, or first calls
            that differ among the ranks.
    """
    scale = resolve_scale(q, scale)
    _check(q, cache, group, window, scale, backend)
    k, v, positions = cache.shard
    if group is not None:
        connect.compare_first_calls(group.group_name, "decode", partial(_call, q, cache, window, scale))
    if not len(q):
        return q.new_zeros(*q.shape[:3], v.shape[3])
    at = torch.arange(cache.length - q.shape[1], cache.length, device="cpu")
    first = at - min(window or cache.length, cache.length) + 1  # int64 holds less than any window
    bounds = torch.searchsorted(positions, first), torch.searchsorted(positions, at, right=True)
    if len(q) == 1:  # a batch can only be cut evenly with what is allocated and not in use
        used = max(1, -(-cache.rows[cache.rank] // MAX_SPLITS)) * MAX_SPLITS
        k, v = k[:, :used], v[:, :used]
    with torch.no_grad():
        return _merge_ranks(_attend(q, k, v, bounds, scale, backend), group).finalize(q.dtype)[0]


def _call(q: Tensor, cache: KVCache, window: int | None, scale: float) -> dict[str, object]:
    """What must be the same on all ranks, by the names that callers know."""
    k, v, _ = cache.shard
    shape = {"queries": list(q.shape), "key heads": k.shape[2], "value head dim": v.shape[3], "dtype": str(q.dtype)}
    held = {"tokens in the cache": cache.length, "block": cache.block, "rows of each rank": cache.rows}
    return shape | held | {"window": window, "scale": scale}


def _check(q: Tensor, cache: KVCache, group: Group | None, window: int | None, scale: float, backend: str) -> None:
    k, _, _ = cache.shard
    rank, size = rank_and_size(group)
    if (rank, size) != (cache.rank, cache.ranks):
        raise ValueError(
            f"the cache is of rank {cache.rank} of {cache.ranks} but in the group this is rank {rank} of {size}: they "
            "must agree"
        )
    if q.ndim != 4 or (len(q), q.shape[3]) != (len(k), k.shape[3]) or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"q {tuple(q.shape)} and keys {tuple(k.shape)}: give q (B, N, Hq, D), k (B, N, Hkv, D), Hq a multiple of Hkv"
        )
    if not 1 <= q.shape[1] <= cache.length:
        raise ValueError(f"{q.shape[1]} queries of a cache of {cache.length} tokens: append the keys of new tokens first")
    if (q.dtype, q.device) != (k.dtype, k.device):
        raise ValueError(f"q is {q.dtype} on {q.device}, keys are {k.dtype} on {k.device}: give one dtype and device")
    if not 0 < scale < float("inf") or (window is not None and (isinstance(window, float | bool) or window < 1)):
        raise ValueError(
            f"scale = {scale}, window = {window}: give a positive, finite scale and a window of 1 key or more, or None"
        )
    if q.requires_grad and torch.is_grad_enabled():
        raise ValueError("decoding passes no gradient: detach q, or call it under torch.no_grad()")
    dispatch.choose_backend(q.device, q.dtype, backend)


def _attend(q: Tensor, k: Tensor, v: Tensor, bounds: tuple[Tensor, Tensor], scale: float, backend: str) -> PartialState:
    """The state of q (B, N, Hq, D) against rows of k, v, of which query i sees [bounds[0][i], bounds[1][i]), on the CPU."""
    batch, num_rows, key_heads = k.shape[:3]
    # query heads that share a key head become rows: its keys are then read once, and fill a tile better
    grouped = q.unflatten(2, (key_heads, -1)).transpose(2, 3)
    num_splits = _num_splits(batch * key_heads, num_rows)
    length = num_rows // num_splits
    lo, hi = (tuple(x.tolist()) for x in bounds)
    intervals = _intervals(lo, hi, grouped.shape[2], batch, num_splits, length, q.device)
    rows = grouped.flatten(1, 2).repeat_interleave(num_splits, 0)
    k, v = (x.unflatten(1, (num_splits, length)).flatten(0, 1) for x in (k, v))
    state = dispatch.forward(rows, k, v, intervals, scale, backend=backend)
    merged = _merge_splits(PartialState(*(x.unflatten(0, (batch, num_splits)) for x in state)))
    return PartialState(*(x.unflatten(1, grouped.shape[1:3]).transpose(2, 3).flatten(2, 3).contiguous() for x in merged))


@lru_cache(maxsize=8)  # for the layers of a model, which ask for the same one after the other
def _intervals(
    lo: tuple[int, ...], hi: tuple[int, ...], group: int, batch: int, num_splits: int, length: int, device: torch.device
) -> Intervals:
    """Of `group` rows a query, against each of `num_splits` splits of `length` keys, for each of `batch` entries."""
    begin = torch.arange(num_splits, device="cpu")[:, None] * length
    bounds = (torch.tensor(x, device="cpu").repeat_interleave(group) - begin for x in (lo, hi))
    return Intervals.of(*(x.clamp(0, length).repeat(batch, 1) for x in bounds), length, device)


def _num_splits(programs: int, rows: int) -> int:
    """The power of two that fills a GPU with splits of at least SPLIT_ROWS rows, `programs` tiles being there without any."""
    wanted = min(PROGRAMS // programs, rows // SPLIT_ROWS, MAX_SPLITS)
    return 1 << max(wanted.bit_length() - 1, 0)


def _merge_splits(state: PartialState) -> PartialState:
    """Fold the dimension 1 of states, a power of two, as a tree of neighbours."""
    while state.m.shape[1] > 1:
        state = PartialState(*(x[:, 0::2] for x in state)).merge(PartialState(*(x[:, 1::2] for x in state)))
    return PartialState(*(x[:, 0] for x in state))


def _merge_ranks(state: PartialState, group: Group | None) -> PartialState:
    """The merge of all ranks' states, on every rank: recursive doubling, log2(P) exchanges.

    Of P ranks that are no power of two, those beyond it hand their state to a partner first and get the result back last. Both
    sides of an exchange merge lower rank first, so that all end with the same bits.
    """
    rank, size = rank_and_size(group)
    packed = torch.cat((state.o, state.m[..., None], state.l[..., None]), -1)
    other = torch.empty_like(packed)
    power = 1 << (size.bit_length() - 1)
    partner = rank - power if rank >= power else rank + power
    if rank >= power:
        _exchange(group, [(packed, partner)], [])
        _exchange(group, [], [(other, partner)])
        return _unpack(other)
    if partner < size:
        _exchange(group, [], [(other, partner)])
        packed = _merge_packed(packed, other)
    for peer in (rank ^ (1 << i) for i in range(power.bit_length() - 1)):
        _exchange(group, [(packed, peer)], [(other, peer)])
        packed = _merge_packed(packed, other) if rank < peer else _merge_packed(other, packed)
    if partner < size:
        _exchange(group, [(packed, partner)], [])
    return _unpack(packed)


def _exchange(group: Group, sends: Addressed, receives: Addressed) -> None:
    """All of them at once; on return the received tensors hold their data, or will for what follows on the GPU's stream.

    Two ranks match their messages in the order in which both list them.
    """
    connect.connect(group.group_name).exchange(sends, receives).wait()


def _unpack(packed: Tensor) -> PartialState:
    return PartialState(packed[..., -2], packed[..., -1], packed[..., :-2])


def _merge_packed(lower: Tensor, higher: Tensor) -> Tensor:
    m, l, o = _unpack(lower).merge(_unpack(higher))
    return torch.cat((o, m[..., None], l[..., None]), -1)

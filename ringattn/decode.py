"""Decoding: attention of a few new queries to a cache of keys and values that is sharded over the ranks.

The queries are the same on all ranks. Every rank computes their partial state (m, l, o) against its shard of the cache. The
shard is divided into several splits, so that few queries can fill a GPU. Then all partial states are merged. Each rank first
merges the states of its splits as a tree. Then the ranks merge their states in log2(P) steps, in which each message contains
one state (Flash-Decoding, Dao et al. 2023, extended to several GPUs). Keys and values never move.
"""

from functools import lru_cache, partial, reduce

import torch
from torch import Tensor

from ringattn.comm import connect
from ringattn.comm.connect import Call, Group, rank_and_size
from ringattn.kernels import dispatch
from ringattn.kernels.interval_mask import Intervals
from ringattn.kernels.validation import check_scale, check_tensors
from ringattn.layout import Layout
from ringattn.mask import check_window
from ringattn.spec import resolve_scale
from ringattn.state import PartialState

MAX_SPLITS = 64  # per shard; the length of a shard is a multiple of MAX_SPLITS, so that every number of splits divides it
MIN_SPLIT_ROWS = 256  # keys per split; with fewer keys, merging the splits takes longer than it saves
UNUSED = torch.iinfo(torch.int64).max  # the position of a row that is not in use
PROGRAMS = 256  # number of tiles, over queries, heads and splits, that fill a GPU


class KVCache:
    """One rank's shard of the keys and values of a growing sequence.

    `prefill` keeps the keys that a ring pass has computed on this rank, in any layout. `append` adds each new block of tokens
    to the rank that holds the fewest tokens. If the shards had equal lengths before, their lengths differ by at most one block
    afterwards. Every rank can compute which rank holds which tokens, so no messages are needed. Memory is allocated once, when
    the first keys arrive. The memory of tokens that `truncate` removes is reused.
    """

    def __init__(self, capacity: int, rank: int = 0, ranks: int = 1, block: int = 16) -> None:
        """Create an empty cache.

        Args:
            capacity: the maximum number of tokens in the caches of all ranks together.
            rank, ranks: this rank, and the number of ranks that the sequence is sharded over.
            block: the number of consecutive new tokens that one rank holds. Shards differ by at most this many tokens.

        Raises:
            ValueError: the capacity or the block is less than one token, or there is no such rank.
        """
        whole = all(isinstance(x, int) for x in (capacity, rank, ranks, block))
        if not whole or capacity < 1 or block < 1 or not 0 <= rank < ranks:
            raise ValueError(
                f"capacity={capacity}, rank={rank}, ranks={ranks}, block={block}: all must be integers, capacity and block at "
                "least 1, and rank between 0 and ranks - 1"
            )
        self.capacity, self.rank, self.ranks, self.block = capacity, rank, ranks, block
        self.length = 0  # tokens in the caches of all ranks together
        self.rows = [0] * ranks  # tokens in the cache of each rank
        self._received = block  # tokens of the current block that were appended already; the next token starts a new block
        self._owners: list[int] = []  # the rank that holds each token
        self._k = self._v = self._positions = None

    def prefill(self, k: Tensor, v: Tensor, layout: Layout) -> None:
        """Store this rank's keys and values of a whole sequence as the first tokens of this cache.

        The cache passes no gradients.

        Args:
            k: (B, N, Hkv, D), v: (B, N, Hkv, Dv): this rank's tokens, as `ring_attention` receives them.
            layout: the layout of the sequence.

        Raises:
            ValueError: the cache is not empty, the layout has a different number of ranks than the cache, the sequence exceeds
                the capacity, or k and v do not have as many tokens as this rank's shard.
        """
        check_tensors(k, k, v)  # the queries will have the dtype and the head dim of the keys
        if self.length:
            raise ValueError(f"the cache holds {self.length} tokens, but prefill requires an empty cache: create a new one")
        if layout.ranks != self.ranks or k.shape[1] != layout.rows(self.rank):
            raise ValueError(
                f"k has {k.shape[1]} tokens for rank {self.rank} of {self.ranks}, but the layout has {layout.ranks} ranks"
                + (f" and the shard has {layout.rows(self.rank)} tokens" if layout.ranks == self.ranks else "")
                + ": pass the tokens of this rank's shard"
            )
        rows = k.shape[1]
        self._reserve(k, v, layout.seq_len, rows)
        self._k[:, :rows], self._v[:, :rows] = k.detach(), v.detach()
        self._positions[:rows] = layout.positions(self.rank)
        self.rows, self.length = [layout.rows(rank) for rank in range(self.ranks)], layout.seq_len
        owners = torch.empty(layout.seq_len, dtype=torch.int32, device="cpu")
        for rank in range(self.ranks):
            owners[layout.positions(rank)] = rank
        self._owners = owners.tolist()

    def append(self, k: Tensor, v: Tensor) -> None:
        """Add the next tokens: k (B, N, Hkv, D) and v (B, N, Hkv, Dv).

        The tokens are the same on all ranks, and each rank stores its own part.

        Raises:
            ValueError: the tokens exceed the capacity, they have a different shape or dtype than the earlier tokens, or
                attention does not support their shape or dtype.
        """
        check_tensors(k, k, v)
        self._reserve(k, v, k.shape[1], 0)
        k, v = k.detach(), v.detach()
        for i in range(k.shape[1]):
            # Every rank runs this loop over all tokens, also over the
            # tokens of other ranks, so that all ranks count the same rows.
            if self._received < self.block:
                owner = self._owners[-1]
            else:  # On a tie, index() picks the lowest rank, so that all ranks choose the same one.
                owner, self._received = self.rows.index(min(self.rows)), 0
            if owner == self.rank:
                row = self.rows[owner]
                self._k[:, row], self._v[:, row], self._positions[row] = k[:, i], v[:, i], self.length
            self.rows[owner] += 1
            self.length += 1
            self._received += 1
            self._owners.append(owner)

    def truncate(self, length: int) -> None:
        """Remove the newest tokens, so that the first `length` remain. All ranks must make the same call; no messages are sent.

        Use this method to remove tokens that speculative decoding has proposed and then rejected, or to generate an answer a
        second time.

        Raises:
            ValueError: the length is not an integer between 0 and the number of tokens in the cache.
        """
        if not isinstance(length, int) or not 0 <= length <= self.length:
            raise ValueError(f"length={length}: it must be an integer from 0 to {self.length}, the tokens of the cache")
        before, self.length = self.rows[self.rank], length
        for owner in self._owners[length:]:
            self.rows[owner] -= 1
        del self._owners[length:]
        # The next token starts a new block, because the block of the removed tokens may have been incomplete.
        self._received = self.block
        if self._k is not None:
            # A kernel may load unused rows before it masks them, so removed rows must be zeros again.
            removed = slice(self.rows[self.rank], before)
            self._k[:, removed] = self._v[:, removed] = 0
            self._positions[removed] = UNUSED

    @property
    def shard(self) -> tuple[Tensor, Tensor, Tensor]:
        """(k, v, positions) of this rank, including allocated rows that are not in use.

        The first `rows[rank]` rows are in use, in the order of their positions. Positions are int64 on the CPU.

        Raises:
            ValueError: the cache has never held a token.
        """
        if self._k is None:
            raise ValueError("the cache is empty: call prefill or append first")
        return self._k, self._v, self._positions

    def _reserve(self, k: Tensor, v: Tensor, num_tokens: int, rows: int) -> None:
        """Check that new tokens fit. On the first call, and while the cache is empty, allocate at least `rows` rows."""
        if self.length + num_tokens > self.capacity:
            raise ValueError(f"{self.length} + {num_tokens} tokens exceed the capacity {self.capacity}: create a larger cache")
        if self._k is None or (self.length == 0 and rows > self._k.shape[1]):
            # -(-n // m) rounds up. One block is added, because shards may differ in length
            # by one block. Then the length is rounded up to a multiple of MAX_SPLITS.
            rows = max(rows, -(-self.capacity // self.ranks) + self.block)
            rows = -(-rows // MAX_SPLITS) * MAX_SPLITS
            # A kernel may load unused rows before it masks them. They must be zeros, because 0 * NaN is not 0.
            with torch.inference_mode(False):  # inference tensors could not be modified outside of inference mode
                self._k, self._v = (x.new_zeros(x.shape[0], rows, *x.shape[2:]) for x in (k, v))
                self._positions = torch.full((rows,), UNUSED, device="cpu")
        for new, stored in ((k, self._k), (v, self._v)):
            if (new.shape[0], *new.shape[2:], new.dtype) != (stored.shape[0], *stored.shape[2:], stored.dtype):
                raise ValueError(
                    f"new keys or values have shape {tuple(new.shape)} and dtype {new.dtype}, but the cache has "
                    f"{tuple(stored.shape)} and {stored.dtype}: batch, heads, head dim and dtype must be the same"
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
    """Compute causal attention of the newest tokens to a cache that already contains them. Every rank of `group` calls it.

    The result is exact and has the same bits on all ranks, because states are fp32 and are merged in the order of the ranks.
    This function computes no gradients. The settings of a group's first calls are compared between the ranks. The queries
    themselves are never compared. If the ranks sample tokens, all ranks must use the same seed.

    Args:
        q: (B, N, Hq, D), the queries of the last N tokens of the cache, which are the same on all ranks; Hkv divides Hq. The
            dtype is fp16, bf16, fp32 or fp64, and is the dtype of the cache.
        cache: this rank's shard of the cache.
        group: the ranks that the cache is sharded over; None for this process alone.
        window: the number of keys that a query attends to, counted back from its own position, which is included; None for all
            keys.
        scale: positive factor on the scores before the softmax; None for D ** -0.5.
        backend: the kernels, see `ringattn.kernels.dispatch`.

    Returns:
        out (B, N, Hq, Dv) in q's dtype, on every rank.

    Raises:
        ValueError: the group has a different number of ranks than the cache, the queries do not fit the cache, a setting is
            invalid, or the first calls differ between ranks.
    """
    scale = resolve_scale(q, scale)
    _check(q, cache, group, window, scale, backend)
    k, v, positions = cache.shard
    if group is not None:
        connect.compare_first_calls(group.group_name, "decode", partial(_as_call, q, cache, window, scale))
    # An empty batch needs no kernels and no messages. All ranks see the same q, so all ranks return here.
    if not len(q):
        return q.new_zeros(*q.shape[:3], v.shape[3])
    at = torch.arange(cache.length - q.shape[1], cache.length, device="cpu")
    # Positions are sorted, and unused rows have the largest possible position. Two binary
    # searches therefore find the rows whose positions lie in the window of each query.
    first = at - min(window or cache.length, cache.length) + 1  # a window may be larger than int64
    bounds = torch.searchsorted(positions, first), torch.searchsorted(positions, at, right=True)
    if len(q) == 1:
        # Leave out rows that are not in use. This is possible only for one batch entry, because the remaining rows of several
        # batch entries would not be contiguous.
        used = max(1, -(-cache.rows[cache.rank] // MAX_SPLITS)) * MAX_SPLITS
        k, v = k[:, :used], v[:, :used]
    with torch.no_grad():
        return _merge_ranks(_attend(q, k, v, bounds, scale, backend), group).finalize(q.dtype)[0]


def _as_call(q: Tensor, cache: KVCache, window: int | None, scale: float) -> Call:
    """Return all settings that must be the same on all ranks. The keys are the names of the settings in error messages."""
    k, v, _ = cache.shard
    shape = {"queries": list(q.shape), "key heads": k.shape[2], "value head dim": v.shape[3], "dtype": str(q.dtype)}
    settings = {"tokens in the cache": cache.length, "block": cache.block, "rows of each rank": cache.rows}
    return shape | settings | {"window": window, "scale": scale}


def _check(q: Tensor, cache: KVCache, group: Group | None, window: int | None, scale: float, backend: str) -> None:
    k, v, _ = cache.shard
    rank, size = rank_and_size(group)
    if (rank, size) != (cache.rank, cache.ranks):
        raise ValueError(
            f"the cache was created for rank {cache.rank} of {cache.ranks} but this is rank {rank} of {size} in the group: the "
            "two must be equal"
        )
    check_tensors(q, k, v)
    check_scale(scale)
    check_window(window)
    if not 1 <= q.shape[1] <= cache.length:
        raise ValueError(f"q has {q.shape[1]} queries but the cache has {cache.length} tokens: append the new keys first")
    if q.requires_grad and torch.is_grad_enabled():
        raise ValueError("q requires a gradient, which decoding does not compute: detach q, or use torch.no_grad()")
    dispatch.choose_backend(q.device, q.dtype, backend)


def _attend(q: Tensor, k: Tensor, v: Tensor, bounds: tuple[Tensor, Tensor], scale: float, backend: str) -> PartialState:
    """Return the state of q (B, N, Hq, D) after attending to rows of k and v.

    Query i attends to the rows from bounds[0][i] to bounds[1][i] - 1.
    """
    batch, num_rows, key_heads = k.shape[:3]
    # Treat the query heads of a key head as rows of queries. The kernel then reads each key only once for all of these heads,
    # and a tile of queries contains more rows that are in use.
    grouped = q.unflatten(2, (key_heads, -1)).transpose(2, 3)
    num_splits = _num_splits(batch * key_heads, num_rows)
    length = num_rows // num_splits
    lo, hi = (tuple(x.tolist()) for x in bounds)
    intervals = _intervals(lo, hi, grouped.shape[2], batch, num_splits, length, q.device)
    # Splits become batch entries, so that one launch of the ordinary kernel computes all splits.
    rows = grouped.flatten(1, 2).repeat_interleave(num_splits, 0)
    k, v = (x.unflatten(1, (num_splits, length)).flatten(0, 1) for x in (k, v))
    state = dispatch.forward(rows, k, v, intervals, scale, backend=backend)
    merged = _merge_splits(PartialState(*(x.unflatten(0, (batch, num_splits)) for x in state)))
    return PartialState(*(x.unflatten(1, grouped.shape[1:3]).transpose(2, 3).flatten(2, 3).contiguous() for x in merged))


@lru_cache(maxsize=8)  # all layers of a model use the same intervals
def _intervals(
    lo: tuple[int, ...], hi: tuple[int, ...], group: int, batch: int, num_splits: int, length: int, device: torch.device
) -> Intervals:
    """Return the intervals of each split, for `batch` entries and `group` rows per query; a split has `length` keys."""
    # Every split counts its keys from 0, so the start of the split is subtracted from the
    # bounds. Clamping leaves an empty interval if a query attends to no key of the split.
    begin = torch.arange(num_splits, device="cpu")[:, None] * length
    bounds = (torch.tensor(x, device="cpu").repeat_interleave(group) - begin for x in (lo, hi))
    return Intervals.of(*(x.clamp(0, length).repeat(batch, 1) for x in bounds), length, device)


def _num_splits(programs: int, rows: int) -> int:
    """Return the number of splits, a power of two, with which `programs` tiles per split fill a GPU.

    A split has at least MIN_SPLIT_ROWS rows if there is more than one split.
    """
    # bit_length() - 1 is the exponent of the largest power of two
    # that is not above `wanted`. If `wanted` is 0, one split remains.
    wanted = min(PROGRAMS // programs, rows // MIN_SPLIT_ROWS, MAX_SPLITS)
    return 1 << max(wanted.bit_length() - 1, 0)


def _merge_splits(state: PartialState) -> PartialState:
    """Merge the states along dimension 1, whose size is a power of two, by merging pairs of neighbours until one is left."""
    while state.m.shape[1] > 1:
        state = PartialState(*(x[:, 0::2] for x in state)).merge(PartialState(*(x[:, 1::2] for x in state)))
    return PartialState(*(x[:, 0] for x in state))


def _merge_ranks(state: PartialState, group: Group | None) -> PartialState:
    """Return the merged state of all ranks, on every rank.

    Every rank sends its state to all other ranks in one exchange. All ranks then merge the states in the order of the ranks, so
    they compute the same bits.
    """
    rank, size = rank_and_size(group)
    if size == 1:
        return state
    # A state is packed into one tensor, so that there is one message per pair of ranks. With few queries, the latency of
    # messages dominates.
    own = torch.cat((state.o, state.m[..., None], state.l[..., None]), -1)
    packed = [own if peer == rank else torch.empty_like(own) for peer in range(size)]
    others = [peer for peer in range(size) if peer != rank]
    connect.connect(group.group_name).exchange([(own, peer) for peer in others], [(packed[peer], peer) for peer in others])()
    return reduce(PartialState.merge, (PartialState(x[..., -2], x[..., -1], x[..., :-2]) for x in packed))

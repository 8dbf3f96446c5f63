"""Decoding: attention of a few new queries to a cache of keys and values that is sharded over the ranks.

The queries are the same on all ranks. Every rank computes the partial state (m, l, o) of the queries for its shard of the
cache. The shard is divided into several splits, so that there are enough tiles to fill a GPU even if there are only a few
queries. Each rank first merges the states of its splits as a tree. Then every rank sends its merged state to all other ranks,
and merges the states of all ranks (Flash-Decoding, Dao et al. 2023, extended to several GPUs). Keys and values are never sent.
"""

from functools import lru_cache, partial, reduce

import torch
from torch import Tensor

from ringattn.comm import connect
from ringattn.comm.calls import Call
from ringattn.comm.connect import Group, rank_and_size
from ringattn.comm.transport import Transport, complete_hop, report_faults
from ringattn.kernels import dispatch
from ringattn.kernels.interval_mask import Intervals
from ringattn.kernels.validation import check_scale, check_tensors
from ringattn.layout import Layout
from ringattn.mask import check_window
from ringattn.spec import resolve_scale
from ringattn.state import PartialState

MAX_SPLITS = 64  # splits per shard; every number of splits divides MAX_SPLITS, which divides the length of a shard
MIN_SPLIT_ROWS = 256  # minimum keys per split; with fewer keys, merging the splits would take longer than splitting saves
UNUSED = torch.iinfo(torch.int64).max  # the position of a row that is not in use
PROGRAMS = 256  # the number of tiles (of all queries, heads and splits together) that fill a GPU


class KVCache:
    """One rank's shard of the keys and values of a growing sequence.

    `prefill` stores the keys and values of this rank's shard, in any layout. `append` adds each new block of tokens to the rank
    that holds the fewest tokens. If the shards had equal lengths before `append`, their lengths differ by at most one block
    afterwards. Every rank can compute which rank holds which tokens, so no messages are needed. The cache allocates its memory
    once, when it receives the first keys. New tokens reuse the memory of the tokens that `truncate` has removed.
    """

    def __init__(self, capacity: int, rank: int = 0, ranks: int = 1, block: int = 16) -> None:
        """Create an empty cache.

        Args:
            capacity: the maximum number of tokens in the caches of all ranks together.
            rank, ranks: this rank, and the number of ranks over which the sequence is sharded.
            block: the number of consecutive new tokens that `append` adds to one rank before it chooses the next rank.

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
        self.length = 0  # number of tokens in the caches of all ranks together
        self.rows = [0] * ranks  # number of tokens in the cache of each rank
        self._received = block  # number of tokens in the current block; the first token starts a new block
        self._owner = 0  # the rank that holds the current block
        self._owners = None  # int32 (capacity,) on the CPU: the rank that holds each token; None if there is only one rank
        self._k = self._v = self._positions = None

    def prefill(self, k: Tensor, v: Tensor, layout: Layout) -> None:
        """Store this rank's keys and values of a whole sequence as the first tokens of this cache.

        No gradients flow through the cache.

        Args:
            k: (B, N, Hkv, D), v: (B, N, Hkv, Dv): this rank's tokens, as for `ring_attention`.
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
        if self.ranks > 1:
            for rank in range(self.ranks):
                self._owners[layout.positions(rank)] = rank

    def append(self, k: Tensor, v: Tensor) -> None:
        """Add the next tokens of the sequence. All ranks pass the same tokens, and each rank stores its own part of the tokens.

        Args:
            k: (B, N, Hkv, D), v: (B, N, Hkv, Dv): the keys and values of the next N tokens.

        Raises:
            ValueError: the tokens exceed the capacity, they have a different shape or dtype than the earlier tokens, or
                attention does not support their shape or dtype.
        """
        check_tensors(k, k, v)
        k, v, num_tokens = k.detach(), v.detach(), k.shape[1]
        self._reserve(k, v, num_tokens, 0)
        # Every rank assigns all tokens, including the tokens of other ranks, so that `rows` and `length` are the same on all
        # ranks.
        begin, end = self.rows[self.rank], self.length + num_tokens
        if self.ranks == 1:
            self.rows[0] = end
            positions = torch.arange(self.length, end, device="cpu")
        else:
            owners = self._owners[self.length : end]
            self._assign(owners)
            new = (owners == self.rank).nonzero()[:, 0]
            positions = new + self.length
            if len(new) < num_tokens:
                k, v = (x.index_select(1, new.to(x.device)) for x in (k, v))
        self.length = end
        if len(positions):
            stored = slice(begin, begin + len(positions))
            self._k[:, stored], self._v[:, stored], self._positions[stored] = k, v, positions

    def _assign(self, owners: Tensor) -> None:
        """Choose the ranks of the next tokens, and write them to `owners`, int32 (N,)."""
        continued = min(len(owners), self.block - self._received)
        owners[:continued] = self._owner
        self.rows[self._owner] += continued
        self._received += continued
        num_tokens = len(owners) - continued
        if num_tokens == 0:
            return
        # Each block goes to the rank that holds the fewest tokens, and in case of a tie to the lowest of these ranks. Rank r
        # holds rows[r] + j * block tokens when it receives its j-th block. The blocks are therefore assigned in the order of
        # these numbers.
        num_blocks = -(-num_tokens // self.block)
        tokens_before = torch.tensor(self.rows, device="cpu")[:, None] + self.block * torch.arange(num_blocks, device="cpu")
        order = tokens_before.flatten().argsort(stable=True)[:num_blocks]
        owners[continued:] = (order // num_blocks).repeat_interleave(self.block)[:num_tokens]
        counts = torch.bincount(owners[continued:], minlength=self.ranks).tolist()
        self.rows = [rows + count for rows, count in zip(self.rows, counts, strict=True)]
        self._owner, self._received = int(owners[-1]), num_tokens - (num_blocks - 1) * self.block

    def truncate(self, length: int) -> None:
        """Remove the newest tokens, so that the first `length` tokens remain.

        All ranks must make the same call. The ranks exchange no messages. Use this method to remove tokens that speculative
        decoding has proposed and then rejected, or to generate an answer a second time.

        Raises:
            ValueError: the length is not an integer between 0 and the number of tokens in the cache.
        """
        if not isinstance(length, int) or not 0 <= length <= self.length:
            raise ValueError(f"length={length}: it must be an integer from 0 to {self.length}, the tokens of the cache")
        before, self.length = self.rows[self.rank], length
        if self.ranks == 1:
            self.rows = [length]
        elif self._owners is not None:
            self.rows = torch.bincount(self._owners[:length], minlength=self.ranks).tolist()
        # The next token starts a new block. The current block may be incomplete, and the number of its remaining tokens is
        # unknown.
        self._received = self.block
        if self._k is not None:
            # A kernel may load unused rows before it masks these rows, so the removed rows must become zeros again.
            removed = slice(self.rows[self.rank], before)
            self._k[:, removed] = self._v[:, removed] = 0
            self._positions[removed] = UNUSED

    @property
    def shard(self) -> tuple[Tensor, Tensor, Tensor]:
        """The tensors (k, v, positions) of this rank, including allocated rows that are not in use.

        The first `rows[rank]` rows are in use, and are sorted by position. `positions` is int64 on the CPU.

        Raises:
            ValueError: the cache has never held a token.
        """
        if self._k is None:
            raise ValueError("the cache is empty: call prefill or append first")
        return self._k, self._v, self._positions

    def _reserve(self, k: Tensor, v: Tensor, num_tokens: int, rows: int) -> None:
        """Check that new tokens suit the cache, and allocate its memory if necessary.

        Memory is allocated on the first call. If the cache is empty but its memory has fewer than `rows` rows, new memory is
        allocated.
        """
        if self.length + num_tokens > self.capacity:
            raise ValueError(f"{self.length} + {num_tokens} tokens exceed the capacity {self.capacity}: create a larger cache")
        if self._k is None or (self.length == 0 and rows > self._k.shape[1]):
            # -(-n // m) is n / m rounded up. One block is added, because the lengths of the shards may differ by one block. The
            # second line rounds the length up to a multiple of MAX_SPLITS.
            rows = max(rows, -(-self.capacity // self.ranks) + self.block)
            rows = -(-rows // MAX_SPLITS) * MAX_SPLITS
            # Some backends load unused rows before they mask these rows. The unused rows must be zeros, because 0 * NaN is not
            # 0.
            with torch.inference_mode(False):  # inference tensors could not be modified outside of inference mode
                self._k, self._v = (x.new_zeros(x.shape[0], rows, *x.shape[2:]) for x in (k, v))
                self._positions = torch.full((rows,), UNUSED, device="cpu")
                if self.ranks > 1:
                    self._owners = torch.zeros(self.capacity, dtype=torch.int32, device="cpu")
        self._check_like(k, v)

    def _check_like(self, k: Tensor, v: Tensor) -> None:
        """Raise ValueError unless new keys and values have the shape and the dtype of the earlier ones."""
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
    """Compute causal attention of the newest tokens. The cache must already contain the keys and values of these tokens.

    Every rank of `group` must call this function. The result is exact attention. States are fp32 (fp64 for fp64 inputs). All
    ranks merge the states in the order of the ranks, so the result has the same bits on all ranks. This function computes no
    gradients. In the first call for a group, the ranks compare their settings. The ranks never compare the queries. If the
    ranks sample tokens, all ranks must use the same seed.

    Args:
        q: (B, N, Hq, D), the queries of the last N tokens of the cache. All ranks pass the same queries. Hkv must divide Hq.
            The dtype is fp16, bf16, fp32 or fp64, and must be the dtype of the cache.
        cache: this rank's shard of the cache.
        group: the ranks over which the cache is sharded; None for this process alone.
        window: the number of keys that a query attends to: the key at the position of the query and the window - 1 keys before
            this position; None for all keys.
        scale: positive factor on the scores before the softmax; None for D ** -0.5.
        backend: the kernels, see `ringattn.kernels.dispatch`.

    Returns:
        out (B, N, Hq, Dv) in q's dtype, on every rank.

    Raises:
        ValueError: the group has a different number of ranks than the cache, the queries do not suit the cache, a setting is
            invalid, or the settings of the first call differ between the ranks.
    """
    scale = resolve_scale(q, scale)
    _check(q, cache, group, window, scale, backend)
    k, v, positions = cache.shard
    describe = partial(_as_call, q, cache, window, scale)
    transport = connect.connect("" if group is None else group.group_name, q.device, call=describe)
    key = q.shape, k.shape[2:], v.shape, q.dtype, window, scale, cache.block
    transport.watchdog.record_call(key, describe, cached=cache.length)
    # An empty batch needs no kernels and no messages. All ranks pass the same q, so all ranks return here.
    if not len(q):
        return q.new_zeros(*q.shape[:3], v.shape[3])
    at = torch.arange(cache.length - q.shape[1], cache.length, device="cpu")
    # Positions are sorted, and unused rows have the largest possible position. Two binary searches therefore find the rows
    # whose positions lie in the window of each query.
    first = at - min(window or cache.length, cache.length) + 1  # min() is necessary, because a window may exceed int64
    bounds = torch.searchsorted(positions, first), torch.searchsorted(positions, at, right=True)
    if len(q) == 1:
        # The kernels skip most of the rows that are not in use, because k and v are shortened here. k and v can be shortened
        # only if there is one batch entry, because the remaining rows of several batch entries would not be contiguous.
        used = max(1, -(-cache.rows[cache.rank] // MAX_SPLITS)) * MAX_SPLITS
        k, v = k[:, :used], v[:, :used]
    with torch.no_grad():
        return _merge_ranks(_attend(q, k, v, bounds, scale, backend), group, transport).finalize(q.dtype)[0]


def _as_call(q: Tensor, cache: KVCache, window: int | None, scale: float) -> Call:
    """Return all settings that must be the same on all ranks. The keys are the names of the settings in error messages."""
    k, v, _ = cache.shard
    shape = {
        "the call": "decode_attention",
        "queries": list(q.shape),
        "key heads": k.shape[2],
        "value head dim": v.shape[3],
        "dtype": str(q.dtype),
    }
    return shape | {"block": cache.block, "window": window, "scale": scale}


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
    """Return the state of the queries q (B, N, Hq, D) after they have attended to rows of k and v.

    Query i attends to the rows from bounds[0][i] to bounds[1][i] - 1.
    """
    batch, num_rows, key_heads = k.shape[:3]
    # All query heads that use the same key head become rows of queries. The kernel then reads each key only once for all of
    # these heads, and a tile of queries contains fewer unused rows.
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
    """Return the intervals of each split.

    Args:
        lo, hi: the interval of each query, whose bounds are row numbers of the shard.
        group: the number of rows per query, which is the number of query heads per key head.
        batch, num_splits: the numbers of batch entries and of splits.
        length: the number of keys of a split.
        device: the device of the intervals.
    """
    # Every split counts its keys from 0, so the start of the split is subtracted from the bounds. If a query attends to no key
    # of a split, clamping makes both bounds equal, so the interval is empty.
    begin = torch.arange(num_splits, device="cpu")[:, None] * length
    bounds = (torch.tensor(x, device="cpu").repeat_interleave(group) - begin for x in (lo, hi))
    return Intervals.of(*(x.clamp(0, length).repeat(batch, 1) for x in bounds), length, device)


def _num_splits(programs: int, rows: int) -> int:
    """Return the number of splits into which `rows` rows are divided.

    The number is a power of two and at most MAX_SPLITS. Each split has `programs` tiles. If there is more than one split, all
    splits together have at most PROGRAMS tiles, and each split has at least MIN_SPLIT_ROWS rows.
    """
    # bit_length() - 1 is the exponent of the largest power of two that is at most `wanted`. If `wanted` is 0, the function
    # returns one split.
    wanted = min(PROGRAMS // programs, rows // MIN_SPLIT_ROWS, MAX_SPLITS)
    return 1 << max(wanted.bit_length() - 1, 0)


def _merge_splits(state: PartialState) -> PartialState:
    """Merge the states along dimension 1, whose size must be a power of two.

    Each iteration merges pairs of neighbours, until one state remains.
    """
    while state.m.shape[1] > 1:
        state = PartialState(*(x[:, 0::2] for x in state)).merge(PartialState(*(x[:, 1::2] for x in state)))
    return PartialState(*(x[:, 0] for x in state))


def _merge_ranks(state: PartialState, group: Group | None, transport: Transport) -> PartialState:
    """Return the merged state of all ranks, on every rank.

    Every rank sends its state to all other ranks in one exchange, which the watchdog of `transport` observes. All ranks then
    merge the states in the order of the ranks, so all ranks compute the same bits.
    """
    rank, size = rank_and_size(group)
    if size == 1:
        return state
    # m, l and o are packed into one tensor, so that each rank sends one message to each other rank. If there are few queries,
    # the time of the exchange depends mainly on the number of messages.
    own = torch.cat((state.o, state.m[..., None], state.l[..., None]), -1)
    packed = [own if peer == rank else torch.empty_like(own) for peer in range(size)]
    others = [peer for peer in range(size) if peer != rank]
    sends, receives = [(own, peer) for peer in others], [(packed[peer], peer) for peer in others]
    hop = transport.watchdog.start("decoding", 0, 1, ())
    exchange = partial(connect.connect(group.group_name).exchange, sends, receives)
    complete_hop(report_faults(exchange, transport, hop), transport, hop)
    return reduce(PartialState.merge, (PartialState(x[..., -2], x[..., -1], x[..., :-2]) for x in packed))

"""Let a few new queries attend to a cache that is sharded over the ranks. All ranks have the same queries.

Each rank computes attention of all queries to its own shard. The ranks exchange and merge their partial results
(Flash-Decoding, Dao et al. 2023, extended to several GPUs). Keys and values are never sent.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ringattn.comm import connect
from ringattn.comm.calls import Call
from ringattn.comm.connect import Group, rank_and_size
from ringattn.comm.transport import Transport, complete_hop, in_call, report_faults
from ringattn.kernels import backends, dispatch
from ringattn.kernels.caching import cached_on_device, is_capturing
from ringattn.kernels.reference import State
from ringattn.kernels.validation import (
    as_integer,
    check_bounds,
    check_dense,
    check_fit,
    check_new_tokens,
    check_rows,
    check_scale,
    check_tensors,
    shown,
)
from ringattn.layout import Layout
from ringattn.mask import Window, causal_window
from ringattn.paged_cache import PagedKVCache
from ringattn.sinks import check_sink_logits, sink_state
from ringattn.spec import autocast, check_layout, resolve_scale

Bounds = tuple[Tensor, Tensor]  # lo and hi, int32 (1 or B, N)

UNUSED = torch.iinfo(torch.int64).max  # the position of an unused row


class KVCache:
    """A `KVCache` holds one rank's shard of the keys and values of a growing sequence.

    `prefill` stores a shard in any layout. Then `append` adds each new block of tokens to the rank with the fewest tokens.
    Every rank knows which rank holds which tokens, so no messages are needed. The first tokens allocate the memory of the whole
    cache.

    On one rank, a CUDA graph can append tokens at positions that it reads from GPU memory:

        rows = torch.zeros(1, dtype=torch.int64, device="cuda")  # the position of the new token
        with torch.cuda.graph(graph):
            hi = (rows + 1).int()[None]
            cache.append(k, v, rows=rows)
            out = decode_attention(q, cache, bounds=(torch.zeros_like(hi), hi))
            rows += 1

    `length` does not count tokens that a graph appends. A later `append` without `rows` may overwrite the tokens of a graph.
    """

    def __init__(self, capacity: int, rank: int = 0, ranks: int = 1, block: int = 16) -> None:
        """Create an empty cache.

        Args:
            capacity: the maximum number of tokens over all ranks.
            rank, ranks: this rank, and the number of ranks that share the sequence.
            block: the number of consecutive new tokens that `append` adds to one rank.

        Raises:
            ValueError: an argument is invalid.
        """
        capacity, block = as_integer("capacity", capacity, 1), as_integer("block", block, 1)
        ranks = as_integer("ranks", ranks, 1)
        rank = as_integer("rank", rank, high=ranks - 1)
        self.capacity, self.rank, self.ranks, self.block = capacity, rank, ranks, block
        self.length = 0  # of all ranks together
        self.rows = [0] * ranks  # number of tokens in the cache of each rank
        self.layout = ""  # `Layout.kind` of `prefill`; "" if `append` has stored all tokens
        self._received = block  # number of tokens in the current block
        self._owner = 0  # the rank that holds the current block
        self._owners = torch.empty(0, dtype=torch.int32, device="cpu")  # (capacity,): the rank of each token if ranks > 1
        self._k: Tensor | None = None  # None until the cache has memory
        self._v = self._positions = self._owners
        # `_checked` holds the valid arguments of the latest call. `_decode` is the prepared function for calls with equal
        # arguments.
        self._checked: tuple[Any, ...] = ()
        self._decode: Any = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the prepared decoding function, which uses the memory of this cache."""
        return self.__dict__ | {"_checked": (), "_decode": None}

    def prefill(self, k: Tensor, v: Tensor, layout: Layout) -> None:
        """Fill an empty cache with this rank's keys (B, N, Hkv, D) and values (B, N, Hkv, Dv), without gradients.

        Raises:
            ValueError: the cache is not empty, the sequence exceeds the capacity, or the layout does not fit.
        """
        check_dense(k, k, v)
        k, v = autocast(k, v)
        check_fit(k, k, v)
        check_layout(layout)
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
        self.shard[0][:, :rows], self._v[:, :rows] = k.detach(), v.detach()
        self._positions[:rows] = layout.positions(self.rank)
        self.rows, self.length = [layout.rows(rank) for rank in range(self.ranks)], layout.seq_len
        self.layout = layout.kind
        if self.ranks > 1:
            for rank in range(self.ranks):
                self._owners[layout.positions(rank)] = rank

    def append(self, k: Tensor, v: Tensor, *, rows: Tensor | None = None) -> None:
        """Add the next tokens, without gradients. Each new block goes to the rank that holds the fewest tokens.

        Args:
            k: (B, N, Hkv, D), v: (B, N, Hkv, Dv): the next N tokens, the same on all ranks.
            rows: int64 (N,) or (B, N), on the cache's device: the rows of the cache that receive the tokens. Each row must be
                below the capacity. Only a cache on one rank supports `rows`. With `rows`, the call does not wait for the GPU,
                and does not change `length`.

        Raises:
            ValueError: the tokens exceed the capacity, their shape or dtype has changed, or `rows` is not supported.
        """
        check_dense(k, k, v)
        k, v = autocast(k, v)
        check_fit(k, k, v)
        k, v, num_tokens = k.detach(), v.detach(), k.shape[1]
        if rows is not None:
            self._write(k, v, rows)
            return
        self._reserve(k, v, num_tokens, 0)
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
            self.shard[0][:, stored], self._v[:, stored], self._positions[stored] = k, v, positions

    def _assign(self, owners: Tensor) -> None:
        """Choose a rank for each of the next N tokens, and write the ranks to `owners`, int32 (N,)."""
        continued = min(len(owners), self.block - self._received)
        owners[:continued] = self._owner
        self.rows[self._owner] += continued
        self._received += continued
        num_tokens = len(owners) - continued
        if num_tokens == 0:
            return
        # Before rank r receives its j-th new block, the rank holds rows[r] + j * block tokens. If several ranks hold equally
        # few tokens, the lowest rank is next.
        num_blocks = -(-num_tokens // self.block)
        tokens_before = torch.tensor(self.rows, device="cpu")[:, None] + self.block * torch.arange(num_blocks, device="cpu")
        order = tokens_before.flatten().argsort(stable=True)[:num_blocks]
        owners[continued:] = (order // num_blocks).repeat_interleave(self.block)[:num_tokens]
        counts = torch.bincount(owners[continued:], minlength=self.ranks).tolist()
        self.rows = [rows + count for rows, count in zip(self.rows, counts, strict=True)]
        self._owner, self._received = int(owners[-1]), num_tokens - (num_blocks - 1) * self.block

    def _write(self, k: Tensor, v: Tensor, rows: Tensor) -> None:
        if self.ranks > 1 or self._k is None:
            raise ValueError("rows requires a cache on one rank that holds tokens: call prefill or append without rows first")
        check_new_tokens((k, v), (self._k, self._v), self._k.shape[0])
        check_rows(rows, k, self._k.shape[1])
        for new, stored in ((k, self._k), (v, self._v)):
            if rows.ndim == 1:
                stored.index_copy_(1, rows, new)
            else:
                stored[torch.arange(len(rows), device=rows.device)[:, None], rows] = new

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens. All ranks must make the same call.

        Raises:
            ValueError: the length is not an integer between 0 and the number of tokens in the cache.
        """
        length = as_integer("length", length, high=self.length, remedy=", the tokens of the cache")
        before, self.length, self.layout = self.rows[self.rank], length, self.layout if length else ""
        if self.ranks == 1:
            self.rows = [length]
        elif len(self._owners):
            self.rows = torch.bincount(self._owners[:length], minlength=self.ranks).tolist()
        self._received = self.block
        if self._k is not None:
            removed = slice(self.rows[self.rank], before)
            self._k[:, removed] = self._v[:, removed] = 0
            self._positions[removed] = UNUSED

    @property
    def shard(self) -> tuple[Tensor, Tensor, Tensor]:
        """This rank's keys, values and positions (int64, CPU). The first `rows[rank]` rows of the shard are in use, sorted by
        position.

        Raises:
            ValueError: the cache has never held a token.
        """
        if self._k is None:
            raise ValueError("the cache is empty: call prefill or append first")
        return self._k, self._v, self._positions

    @property
    def lengths(self) -> list[int]:
        """Return the number of tokens of each batch entry, or one number for all batch entries."""
        return [self.length]

    @property
    def operands(self) -> tuple[Tensor, Tensor, None]:
        return *self.shard[:2], None

    def _reserve(self, k: Tensor, v: Tensor, num_tokens: int, rows: int) -> None:
        if self.length + num_tokens > self.capacity:
            raise ValueError(f"{self.length} + {num_tokens} tokens exceed the capacity {self.capacity}: create a larger cache")
        if self._k is None or (self.length == 0 and rows > self._k.shape[1]):
            rows = max(rows, self.capacity if self.ranks == 1 else -(-self.capacity // self.ranks) + self.block)
            # Unused rows must not contain NaN, because some backends load them before masking.
            with torch.inference_mode(False):  # inference tensors could not be modified outside of inference mode
                self._k, self._v = (x.new_zeros(x.shape[0], rows, *x.shape[2:]) for x in (k, v))
                self._positions = torch.full((rows,), UNUSED, device="cpu")
                if self.ranks > 1:
                    self._owners = torch.zeros(self.capacity, dtype=torch.int32, device="cpu")
            self._checked, self._decode = (), None
        check_new_tokens((k, v), (self._k, self._v), self._k.shape[0])


Cache = KVCache | PagedKVCache


def decode_attention(
    q: Tensor,
    cache: Cache,
    *,
    group: Group | None = None,
    window: Window = None,
    bounds: Bounds | None = None,
    sinks: int | Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Compute causal attention of the newest tokens, without gradients. First append the keys and values of the newest tokens
    to the cache. Under `torch.autocast`, this function casts q, and `append` casts keys and values.

    Every rank of `group` calls this function. The result has the same bits on all ranks. The ranks do not compare their
    queries, so all ranks must sample tokens with the same seed.

    Args:
        q: (B, N, Hq, D), the queries of the last N tokens, in the dtype of the cache. All ranks pass the same q. Hkv divides
            Hq.
        cache: this rank's shard. In a `PagedKVCache`, the output of a sequence without tokens is 0.
        group: the ranks over which the cache is sharded; None for this process alone.
        window: how many of the newest keys a query attends to, including its own, or (left, 0) as in `Mask`. None means all
            keys.
        bounds: (lo, hi), which replace the causal mask and the window. Query i attends to rows lo[i] to hi[i] - 1 of this
            rank's cache. The tensors lo and hi are int32 (1 or B, N), contiguous and on the device of the queries. Neither lo
            nor hi may decrease from one query to the next. The GPU reads lo and hi, so a CUDA graph can capture the call. The
            values of lo and hi are not checked. Rows outside the cache are ignored.
        sinks: the number of first tokens that are attention sinks (Xiao et al. 2023). Later tokens attend to the sinks even
            outside the window. With `bounds`, pass an int32 tensor (1 or B,) on the device of q. Query i then also attends to
            the first min(sinks, hi[i]) rows.
        scale, backend: as for `flash_attention`.
        sink_logits: (Hq,), as for `ring_attention`.

    Returns:
        out (B, N, Hq, Dv) in the dtype of the cache, on every rank.

    Raises:
        ValueError: an argument is invalid, does not suit the cache, or differs between the ranks in the first call.
    """
    if not isinstance(q, Tensor) or q.is_nested:
        raise ValueError(f"q is a {type(q).__name__}: it must be a dense tensor (batch, tokens, heads, head dim)")
    if not isinstance(cache, Cache):
        raise ValueError(f"cache is a {type(cache).__name__}: it must be a ringattn.KVCache or PagedKVCache")
    (q,) = autocast(q)
    newest = causal_window(window)
    row_sinks: Tensor | None = None
    if bounds is not None:
        row_sinks = _check_kinds(bounds, newest, sinks)
    elif isinstance(sinks, Tensor):
        raise ValueError(f"sinks={sinks}: without bounds, it must be an integer of at least 0, or None")
    num_sinks = None if sinks is None or bounds is not None else as_integer("sinks", sinks, high=None)
    factor: Any = None if scale is None else resolve_scale(q, scale)
    call = type(q), q.shape, q.dtype, q.device, group, newest, factor, backend, sink_logits is None
    call += (num_sinks,) if bounds is None else (bounds[0].shape, getattr(sinks, "shape", sinks))
    is_new = call != cache._checked
    if is_new or cache.ranks > 1:
        factor = resolve_scale(q, scale)
    if is_new:
        _check(q, cache, group, factor, backend)
    check_sink_logits(sink_logits, q)
    if q.requires_grad and torch.is_grad_enabled():
        raise ValueError("q requires a gradient, which decoding does not compute: detach q, or use torch.no_grad()")
    if bounds is None:
        lo, hi, row_sinks = _rows_of_window(cache, q.shape[1], newest, num_sinks, q.device)
    else:
        lo, hi = bounds
        check_bounds(q, lo, hi, row_sinks)
    if is_new:
        k, v, page_table = cache.operands
        options = cache.ranks == 1 and sink_logits is None, backend, row_sinks, page_table
        cache._decode, cache._checked = dispatch.prepare_decode(q, k, v, lo, factor, *options), call
    if cache.ranks == 1:
        result = cache._decode(q, lo, hi, row_sinks)
        if sink_logits is None:
            return result
        return dispatch.merge_states(result, [(0, sink_state(sink_logits, result[2].shape, q.dtype))], q.dtype)[0]
    assert isinstance(cache, KVCache)  # a PagedKVCache is never sharded
    assert group is not None
    k, v, _ = cache.operands
    described_sinks: Any = num_sinks if bounds is None else f"{'no' if sinks is None else 'a'} tensor, with bounds"
    described_sinks = described_sinks if sink_logits is None else [described_sinks, "sink_logits"]
    describe = partial(_as_call, q, cache, newest, described_sinks, factor)
    transport = connect.connect(group.group_name, q.device, call=describe)
    key = q.shape, k.shape[2:], v.shape, q.dtype, newest, f"{described_sinks}", factor, cache.block, cache.layout
    with in_call(transport):
        transport.watchdog.record_call(key, describe, cached=cache.length)
        if not len(q):
            return q.new_zeros(*q.shape[:3], v.shape[3])
        return _merge_ranks(cache._decode(q, lo, hi, row_sinks), q.dtype, transport, sink_logits)


def _as_call(q: Tensor, cache: KVCache, window: int | None, sinks: Any, scale: float) -> Call:
    k, v, _ = cache.shard
    shape: Call = {
        "the call": "decode_attention",
        "queries": list(q.shape),
        "key heads": k.shape[2],
        "value head dim": v.shape[3],
        "dtype": str(q.dtype),
    }
    placement = {"block": cache.block, "layout of prefill": cache.layout}
    return shape | placement | {"window": window, "sinks": sinks, "scale": scale}


def _check(
    q: Tensor,
    cache: Cache,
    group: Group | None,
    scale: float,
    backend: str,
) -> None:
    k, v, page_table = cache.operands
    rank, size = rank_and_size(group)
    if (rank, size) != (cache.rank, cache.ranks):
        raise ValueError(
            f"the cache was created for rank {cache.rank} of {cache.ranks} but this is rank {rank} of {size} in the group: the "
            "two must be equal"
        )
    if page_table is None:
        check_tensors(q, k, v)
    else:
        check_tensors(q, *(x[:1].expand(len(page_table), *x.shape[1:]) for x in (k, v)))
    check_scale(scale)
    backends.check_backend(backend)


def _check_kinds(bounds: Bounds, window: int | None, sinks: object) -> Tensor | None:
    if not isinstance(bounds, (tuple, list)) or len(bounds) != 2 or not all(isinstance(x, Tensor) for x in bounds):
        raise ValueError(f"bounds={shown(bounds)}: it must be a tuple of two int32 tensors (lo, hi)")
    if window is not None:
        raise ValueError(f"bounds with window={window}: bounds replaces the window, so pass window=None")
    if sinks is not None and not isinstance(sinks, Tensor):
        raise ValueError(f"sinks={shown(sinks)} with bounds: it must be an int32 tensor on the device of the queries, or None")
    return sinks


def _rows_of_window(
    cache: Cache, num_queries: int, window: int | None, sinks: int | None, device: torch.device
) -> tuple[Tensor, Tensor, Tensor | None]:
    if is_capturing(device):
        raise ValueError("bounds=None: every replay of this CUDA graph would attend to the same keys; pass bounds on the GPU")
    if cache.ranks == 1:
        return _rows_of_lengths(tuple(cache.lengths), num_queries, window, sinks, device)
    assert isinstance(cache, KVCache)
    length, positions = cache.length, cache.shard[2]
    _check_num_queries(num_queries, length)
    sinks, window = _limit(sinks, window, length)
    at = torch.arange(length - num_queries, length, device="cpu")
    lo, hi = torch.searchsorted(positions, at - window + 1), torch.searchsorted(positions, at, right=True)
    if sinks is not None:
        sinks = int(torch.searchsorted(positions, sinks))
    return _upload(tuple(lo.tolist()), tuple(hi.tolist()), 1, sinks, device)


@cached_on_device(maxsize=8)  # all layers of a model use the same bounds
def _rows_of_lengths(
    lengths: tuple[int, ...], num_queries: int, window: int | None, sinks: int | None, device: torch.device
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Like `_rows_of_window`, but for a cache on one rank, whose row i has position i."""
    _check_num_queries(num_queries, min((length for length in lengths if length), default=0))
    sinks, window = _limit(sinks, window, max(lengths))
    ends = [end for length in lengths for end in range(length - num_queries + 1, length + 1)]
    lo, hi = tuple(max(end - window, 0) for end in ends), tuple(max(end, 0) for end in ends)
    return _upload(lo, hi, len(lengths), sinks, device)


def _check_num_queries(num_queries: int, num_tokens: int) -> None:
    if not 1 <= num_queries <= num_tokens:
        raise ValueError(f"q has {num_queries} queries but the cache has {num_tokens} tokens: append the new keys first")


def _limit(sinks: int | None, window: int | None, length: int) -> tuple[int | None, int]:
    """Limit the sinks and the window to `length`, because both may exceed int64."""
    return min(sinks, length) if sinks and window else None, min(window or length, length)


@cached_on_device(maxsize=8)  # shared by all layers
def _upload(
    lo: tuple[int, ...], hi: tuple[int, ...], batch: int, sinks: int | None, device: torch.device
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return lo and hi, int32 (batch, N), and sinks, int32 (1,) or None. One copy moves lo, hi and sinks to `device`."""
    # Kernels launch faster with addresses that are multiples of 16 bytes.
    numbers = torch.zeros(3, -(-len(lo) // 4) * 4, dtype=torch.int32, device="cpu")
    numbers[:2, : len(lo)] = torch.tensor((lo, hi), device="cpu")
    numbers[2] = sinks or 0
    numbers = numbers.to(device)
    rows = [row[: len(lo)].view(batch, -1) for row in numbers[:2]]
    return rows[0], rows[1], None if sinks is None else numbers[2, :1]


def _merge_ranks(state: State, dtype: torch.dtype, transport: Transport, sink_logits: Tensor | None) -> Tensor:
    own, shape = _packed(*state), state[2].shape
    hop = transport.watchdog.start("decoding", 0, 1, ())
    gather = partial(transport.messages.all_gather, own)
    gathered, wait = report_faults(gather, transport, hop)
    complete_hop(wait, transport, hop)
    if sink_logits is not None:
        gathered = torch.cat((gathered, _packed(*sink_state(sink_logits, shape, dtype))[None]))
    return dispatch.merge_packed(gathered, shape, dtype)


def _packed(m: Tensor, l: Tensor, o: Tensor) -> Tensor:
    return torch.cat((o.flatten(), m.flatten(), l.flatten()))

"""Fuzz the public calls with good and hostile arguments, on one rank and on two ranks.

Every call must either return the right result, which dense attention in float64 defines, or raise an error of this project: one
line, raised by a `raise` statement of this repository. On two ranks, one rank may make another call. All ranks must then end
with an error that names the difference, and no rank may hang.
"""

import itertools
import json
import linecache
import os
import re
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

import ringattn
from ringattn import (
    BlockMask,
    KVCache,
    Layout,
    Mask,
    PagedKVCache,
    PartialState,
    balanced_layout,
    decode_attention,
    explain,
    flash_attention,
    plan_ahead,
    ring_attention,
    simulate,
    ulysses_attention,
)
from ringattn.comm import connect, watchdog
from tests.distributed import RankPool

pytestmark = pytest.mark.slow

ROOTS = tuple(str(Path(path).resolve()) for path in ringattn.__path__)
OPTIONS = dict(deadline=None, suppress_health_check=list(HealthCheck))
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}
counts: Counter[str] = Counter()  # how the examples of this module ended


# ---------------------------------------------------------------------------------------------------------------------------
# The reference: dense attention in float64.


def allowed_pairs(mask: Mask | None, num_queries: int, num_keys: int, entry: int) -> Tensor:
    """Return which keys each query of a batch entry may attend to, as the documentation of `Mask` defines it: (Nq, Nk)."""
    if mask is None:
        return torch.ones(num_queries, num_keys, dtype=torch.bool)
    query, key = torch.arange(num_keys - num_queries, num_keys)[:, None], torch.arange(num_keys)[None]
    allowed = torch.ones(num_queries, num_keys, dtype=torch.bool)
    if isinstance(mask.window, tuple):
        left, right = (num_queries + num_keys if x is None else x for x in mask.window)
        return allowed & (query - left <= key) & (key <= query + right) & _same_document(mask, query, key, entry)
    if mask.is_causal:
        allowed &= key <= query
    if mask.window is not None:
        allowed &= (query - key).abs() < mask.window
    return allowed & _same_document(mask, query, key, entry)


def _same_document(mask: Mask, query: Tensor, key: Tensor, entry: int) -> Tensor:
    allowed = torch.ones(len(query), key.shape[1], dtype=torch.bool)
    if mask.documents is not None:
        lengths = mask.documents[entry % len(mask.documents)]
        document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        allowed &= document[query] == document[key]
    return allowed


def dense(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """Return (out, lse) in float64. `allowed` is (B, 1 or Hq, Nq, Nk)."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (max(q.shape[3], 1) ** -0.5 if scale is None else float(scale))
    scores = scores.masked_fill(~allowed, float("-inf"))
    lse = scores.logsumexp(-1) if scores.shape[-1] else scores.new_full(scores.shape[:3], float("-inf"))
    probabilities = torch.exp(scores - lse.nan_to_num(neginf=0.0)[..., None])
    return torch.einsum("bhqk,bkhd->bqhd", probabilities, v), lse.transpose(1, 2)


def assert_close(got: Tensor, expected: Tensor, dtype: torch.dtype, factor: float = 1.0) -> None:
    tolerance = factor * TOLERANCE[dtype]
    torch.testing.assert_close(got.detach().double(), expected.detach(), atol=tolerance, rtol=tolerance)


# ---------------------------------------------------------------------------------------------------------------------------
# Hostile values by kind of argument. None of them is a valid value.

X = torch.ones(1, 4, 2, 4)
HOSTILE: dict[str, list] = {
    "tensor": [
        *(None, "q", 3.0, X.numpy(), [1.0], X[0], X.int(), X.to(torch.complex64), X.to_sparse(), X.bool(), X.to("meta")),
        *(torch.nested.nested_tensor([X[0], X[0]]), X[..., None], torch.ones(())),
    ],
    "integer": [
        *(True, -1, 1.5, "3", float("nan"), [3], (3,), torch.tensor([1, 2]), torch.tensor(1.5), np.array([1, 2]), object()),
        *(3 + 0j, np.bool_(True), b"3", np.float64(2), {}, torch.tensor(True), -(2**70)),
    ],
    "number": [
        *(0, -1.0, float("nan"), float("inf"), "1", [1.0], True, torch.ones(2), 1j, object(), b"1", np.array([0.5, 0.5])),
        *(torch.ones((), requires_grad=True), {}, np.bool_(True), -(10**400)),
    ],
    "probability": [1.0, -0.1, float("nan"), "0.1", [0.1], True, None, torch.ones(2), 1j, 2, object(), b"0"],
    "flag": [0, 1, None, "yes", np.bool_(True), [True], torch.tensor(True), 1.0],
    "name": ["x", None, 3, ["auto"], np.array(["auto"]), b"auto", True, torch.ones(1), ""],
    "mask": ["causal", True, 5, torch.ones(3, 3), object(), [4], Mask.causal(documents=[10**6])],
    "dim": [True, 7, -5, 1.5, "3", [3], torch.tensor([1, 2]), object(), None, np.bool_(True), 2**70],
    "layout": [None, "zigzag", 3, object(), Layout.zigzag(1000, 1), Layout.zigzag(4, 17), Layout.contiguous(4, 1).split(3)],
    "group": ["world", 0, True, object(), [0], torch.distributed.ProcessGroup],
    "documents": [
        *(5, "abc", [-1, 5], [1.5], [True, 3], [None], object(), [[1, 2], 3], torch.tensor([1.5]), [2**70]),
        *([[1, 2], 3], torch.ones(2, 2, 2), [[[4]]], 1.0, [object()]),
    ],
    "blocks": [
        torch.ones(1, 1, 1, 1, dtype=torch.bool),
        True,
        "x",
        [1],
        BlockMask(torch.ones(3, 1, 9, 9, dtype=torch.bool), 64),
    ],
    "keep": [None, [[True]], torch.ones(1, 1, 1, 1), torch.ones(1, 1, dtype=torch.bool), "x", np.ones((1, 1, 1, 1), bool)],
    "pair": [None, 3, "ab", (), (Mask.causal(),), (Mask.causal(), "zigzag"), ("causal", Layout.zigzag(4, 1)), [1, 2, 3]],
    "device": [None, 3.5, "gpu", object(), "cpu:x", []],
    "cache": [None, "cache", X, object(), {}, KVCache, KVCache(4, 1, 3)],
    "bounds": [3, "lo", (X, X), (None, None), [torch.zeros(1, 1, dtype=torch.int32)], torch.zeros(2, 1, 1), (1, 2), ()],
    "rows": [3, "x", [0], torch.tensor([0.0]), torch.tensor([[[0]]]), torch.tensor([10**6]), torch.tensor([-1]), (0,)],
    "function": [None, 3, "x", X],
    "dtype": [None, "float32", torch.int64, 3, float],
    "state": [None, X, (X, X), "x", (1, 2, 3)],
    "kind": ["spiral", None, 3, "", "zigzag/x", "assigned-1:", b"zigzag", "assigned-2:0,9"],
    "owners": [[], None, 3, "ab", [0, 99], [0.5, 0], [True, False], [None], {}, [-1]],
    "lengths": [None, 3, [], [1], [1.5, 2], ["a", "b"], [-1, 2], [True, 2], [10**9, 1], "ab"],
}
HOSTILE["queries"] = [x for x in HOSTILE["tensor"] if not getattr(x, "is_meta", False)]
# A valid integer, number or flag, as users of numpy and torch pass them.
WRAPPERS = (lambda x: x, np.int64, lambda x: torch.tensor(x), np.int32)


def integers(low: int, high: int) -> st.SearchStrategy:
    return st.builds(lambda x, wrap: wrap(x), st.integers(low, high), st.sampled_from(WRAPPERS))


SCALES = st.sampled_from([None, 0.5, 1, np.float32(0.25), np.float64(0.3), torch.tensor(0.5), torch.tensor(0.7).double()])
SHAPES = st.tuples(  # batch size, heads of queries and keys, head dim, head dim of values
    st.integers(0, 2), st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 3)]), st.sampled_from([1, 3, 4, 8]), st.sampled_from([1, 5])
)
DTYPES = st.sampled_from(list(TOLERANCE))


@st.composite
def documents_of(draw: st.DrawFn, total: int) -> object:
    """Draw the lengths of documents that sum to `total`, as a list, a tensor or an array."""
    cuts = sorted(draw(st.sets(st.integers(1, total - 1), max_size=3))) if total > 1 else []
    lengths = [b - a for a, b in itertools.pairwise([0, *cuts, total])]
    return draw(st.sampled_from([list, tuple, torch.tensor, np.array]))(lengths)


@st.composite
def masks_of(draw: st.DrawFn, total: int, batch: int) -> Mask:
    """Draw a mask of a sequence of `total` tokens."""
    window = draw(st.none() | integers(1, total + 3) | st.sampled_from([2**40, 2**62, 2**70]))
    documents = None
    if total and draw(st.booleans()):
        entries = [draw(documents_of(total)) for _ in range(draw(st.sampled_from([1, max(batch, 1)])))]
        documents = entries[0] if len(entries) == 1 else entries
    side = st.none() | integers(0, total + 3) | st.just(2**70)
    kind = draw(st.sampled_from(["causal", "full", "both"]))
    window = (draw(side), draw(side)) if kind == "both" else window
    return (Mask.causal if kind == "causal" else Mask.full)(window=window, documents=documents)


def random_tensors(seed: int, dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


class Call:
    """A call with good arguments, the kinds of its arguments, and a check of its result."""

    def __init__(self, function: Callable, arguments: dict, kinds: dict[str, str], check: Callable[[object], None]) -> None:
        self.function, self.arguments, self.kinds, self.check = function, arguments, kinds, check
        self.broken: tuple[str, ...] = ()

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={_short(x)}" for name, x in self.arguments.items())
        return f"{getattr(self.function, '__name__', self.function)}({arguments}) with hostile {self.broken}"

    def break_arguments(self, draw: st.DrawFn) -> "Call":
        """Replace up to two arguments by hostile values."""
        number = min(draw(st.sampled_from([0, 1, 1, 2])), len(self.kinds))
        self.broken = tuple(draw(st.lists(st.sampled_from(sorted(self.kinds)), min_size=number, max_size=number, unique=True)))
        for name in self.broken:
            values = HOSTILE[self.kinds[name]]
            # If all tensors of a call are on the meta device, the call is valid.
            values = values if number == 1 else [x for x in values if not getattr(x, "is_meta", False)]
            self.arguments[name] = draw(st.sampled_from(values))
        return self


def _short(x: object) -> str:
    return f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) and not x.is_nested and x.numel() > 4 else repr(x)


TENSOR_KINDS = dict(q="tensor", k="tensor", v="tensor", scale="number", dropout_p="probability", seed="integer")
TENSOR_KINDS |= dict(mask="mask", backend="name", precision="name", return_lse="flag")
RING_KINDS = TENSOR_KINDS | dict(layout="layout", schedule="name", route="name", transport="name")


@st.composite
def options_of(draw: st.DrawFn) -> dict:
    """Draw the options that all attention calls have."""
    options = dict(scale=draw(SCALES), backend=draw(st.sampled_from(["auto", "blockwise", "reference"])))
    options |= dict(precision=draw(st.sampled_from(["ieee", "ieee", "tf32"])), return_lse=draw(st.booleans()))
    options["seed"] = draw(integers(0, 2**31 - 1) | st.just(2**63 - 1))
    options["dropout_p"] = draw(st.sampled_from([0.0, 0, np.float64(0), torch.tensor(0.0), 0.5, np.float32(0.25)]))
    return options


def dense_with_dropout(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, options: dict, first_head: int = 0
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of a call with dropout, from the reference kernel in float64."""
    same = {name: options[name] for name in ("scale", "dropout_p", "seed")} | dict(backend="reference", return_lse=True)
    inputs = [x.double() for x in (q, k, v)]
    if first_head:
        layout = Layout.contiguous(q.shape[1], 1)
        return ring_attention(*inputs, layout=layout, mask=mask, first_head=int(first_head), **same)
    return flash_attention(*inputs, mask=mask, **same)


def check_attention(inputs: list[Tensor], options: dict, expected: tuple[Tensor, Tensor], result: object) -> None:
    """Check out, lse and, for fp64 and fp32, the gradients."""
    out, lse = result if options["return_lse"] else (result, None)
    dtype = inputs[0].dtype
    assert out.dtype == dtype
    assert_close(out, expected[0], dtype)
    if lse is not None:
        assert_close(lse, expected[1], dtype)
    if out.requires_grad and out.numel() and dtype in (torch.float64, torch.float32):
        weights = torch.arange(out.numel(), dtype=torch.float64).view(out.shape) % 3 - 1
        got = torch.autograd.grad((out.double() * weights).sum(), inputs)
        for x, y in zip(got, torch.autograd.grad((expected[0] * weights).sum(), inputs), strict=True):
            assert_close(x, y.double(), dtype, factor=10)


@st.composite
def flash_calls(draw: st.DrawFn) -> Call:
    batch, (heads, key_heads), dim, value_dim = draw(SHAPES)
    num_queries, num_keys, dtype = draw(st.integers(0, 70)), draw(st.integers(0, 70)), draw(DTYPES)
    shapes = (batch, num_queries, heads, dim), (batch, num_keys, key_heads, dim), (batch, num_keys, key_heads, value_dim)
    inputs = [x.requires_grad_() for x in random_tensors(draw(st.integers(0, 99)), dtype, *shapes)]
    options, kinds = draw(options_of()), TENSOR_KINDS | dict(is_causal="flag", blocks="blocks")
    mask = (
        draw(st.none() | masks_of(num_keys, batch))
        if num_queries <= num_keys
        else draw(st.sampled_from([None, Mask.causal(5)]))
    )
    is_causal = mask is None and draw(st.booleans())
    blocks = None
    if draw(st.booleans()) and num_queries and num_keys:
        shape = (
            draw(st.sampled_from([1, batch])),
            draw(st.sampled_from([1, heads])),
            -(-num_queries // 64),
            -(-num_keys // 64),
        )
        generator = torch.Generator().manual_seed(draw(st.integers(0, 9)))
        blocks = BlockMask(torch.rand(shape, generator=generator) < 0.7, draw(st.sampled_from([64, np.int64(64)])))
    if blocks is not None:
        options |= dict(backend="auto", dropout_p=0.0)
    arguments = dict(zip("qkv", inputs, strict=True), mask=mask, is_causal=is_causal, blocks=blocks) | options

    def check(result: object) -> None:
        shown = Mask.causal() if is_causal else mask
        if options["dropout_p"]:
            expected = dense_with_dropout(*inputs, shown or Mask.full(), options)
            return check_attention(inputs, options, expected, result)
        allowed = [allowed_pairs(shown, num_queries, num_keys, entry) for entry in range(batch)]
        allowed = torch.stack(allowed)[:, None] if allowed else torch.ones(0, 1, num_queries, num_keys, dtype=torch.bool)
        if blocks is not None:
            allowed = allowed & blocks.dense(num_queries, num_keys)
        return check_attention(inputs, options, dense(*inputs, allowed, options["scale"]), result)

    return Call(flash_attention, arguments, kinds, check).break_arguments(draw)


def on_ring(operation: Callable, ranks: int, group_name: str, layout: object, q: object, k: object, v: object, **options):
    """Call `operation` on every rank of a simulated ring, and return the results of the whole sequence."""

    def run(rank: int, group: object) -> object:
        groups = {group_name: options.get(group_name, group)} if ranks > 1 else {}
        shards = q, k, v
        if isinstance(layout, Layout) and layout.seq_len == N and layout.ranks == ranks:
            shards = [layout.shard(x, rank) if _is_whole(x) else x for x in shards]
        return operation(*shards, layout=layout, **options | groups)

    results = simulate(ranks, run)
    if isinstance(results[0], tuple):
        return tuple(layout.unshard([x.detach() for x in part]) for part in zip(*results, strict=True))
    return layout.unshard([x.detach() for x in results])


N = 13  # number of tokens of the fuzzed sequences


def _is_whole(x: object) -> bool:
    return isinstance(x, Tensor) and not x.is_nested and x.layout is torch.strided and x.ndim > 1 and x.shape[1] == N


@st.composite
def layouts_of(draw: st.DrawFn, seq_len: int, ranks: int) -> Layout:
    kind = draw(st.sampled_from(["contiguous", "zigzag", "striped", "assigned"]))
    if kind != "assigned":
        return getattr(Layout, kind)(draw(st.sampled_from(WRAPPERS))(seq_len), draw(st.sampled_from(WRAPPERS))(ranks))
    rows = draw(st.integers(1, 5))
    owners = draw(st.lists(st.integers(0, ranks - 1), min_size=-(-seq_len // rows), max_size=-(-seq_len // rows)))
    return Layout.assigned(draw(st.sampled_from([list, tuple, np.array, torch.tensor]))(owners), rows, seq_len, ranks)


@st.composite
def ring_calls(draw: st.DrawFn) -> Call:
    ulysses, ranks = draw(st.booleans()), draw(st.integers(1, 3))
    batch, (heads, key_heads), dim, value_dim = draw(SHAPES)
    heads, key_heads = (heads * ranks, key_heads) if ulysses else (heads, key_heads)
    dtype = draw(DTYPES)
    shapes = (batch, N, heads, dim), (batch, N, key_heads, dim), (batch, N, key_heads, value_dim)
    inputs, mask = random_tensors(draw(st.integers(0, 99)), dtype, *shapes), draw(masks_of(N, batch))
    layout = draw(layouts_of(N, 1)).split(ranks) if ulysses else draw(layouts_of(N, ranks))
    options = draw(options_of()) | dict(schedule=draw(st.sampled_from(["auto", "state", "kv"])))
    options["route"] = draw(st.sampled_from(["auto", "direct", "relay"]))
    kinds = RING_KINDS | (dict(recompute_all_to_all="flag") if ulysses else dict(first_head="integer"))
    group_name = "ulysses_group" if ulysses else "group"
    if ranks > 1:
        kinds[group_name] = "group"
    arguments = dict(zip("qkv", inputs, strict=True), mask=mask, layout=layout) | options
    arguments |= dict(recompute_all_to_all=draw(st.booleans())) if ulysses else dict(first_head=draw(integers(0, 99)))
    allowed = [allowed_pairs(mask, N, N, entry) for entry in range(batch)]
    allowed = torch.stack(allowed)[:, None] if allowed else torch.ones(0, 1, N, N, dtype=torch.bool)
    if options["dropout_p"]:
        expected = dense_with_dropout(*inputs, mask, options, arguments.get("first_head", 0))
    else:
        expected = dense(*inputs, allowed, options["scale"])
    check = partial(check_attention, inputs, options, expected)
    function = partial(on_ring, ulysses_attention if ulysses else ring_attention, ranks, group_name)
    return Call(function, arguments, kinds, check).break_arguments(draw)


@st.composite
def decode_calls(draw: st.DrawFn) -> Call:
    """Prefill, append, truncate and decode, on up to three simulated ranks, and compare with dense attention."""
    ranks, (heads, key_heads), dim, value_dim = draw(st.integers(1, 3)), *draw(SHAPES)[1:]
    batch, dtype, total = draw(st.integers(1, 2)), draw(DTYPES), draw(st.integers(1, 20))
    queries = draw(st.integers(1, total))
    q, k, v = random_tensors(
        draw(st.integers(0, 99)),
        dtype,
        (batch, queries, heads, dim),
        (batch, total, key_heads, dim),
        (batch, total, key_heads, value_dim),
    )
    window, sinks = draw(st.none() | integers(1, 25)), draw(st.none() | st.sampled_from([0, 2, np.int64(3), 2**70]))
    prefilled = draw(st.integers(0, total))
    rejected, block = draw(st.integers(0, 3)), draw(integers(1, 5))
    layout = draw(layouts_of(prefilled, ranks)) if prefilled else None
    arguments = dict(q=q, window=window, sinks=sinks, scale=draw(SCALES), backend=draw(st.sampled_from(["auto", "reference"])))
    kinds = dict(q="tensor", window="integer", sinks="integer", scale="number", backend="name", cache="cache")
    kinds |= dict(bounds="bounds") | (dict(group="group") if ranks > 1 else {})

    def function(**options) -> Tensor:
        def run(rank: int, group: object) -> Tensor:
            cache = KVCache(40, rank, ranks, block)
            if layout is not None:
                cache.prefill(layout.shard(k[:, :prefilled], rank), layout.shard(v[:, :prefilled], rank), layout)
            for step in range(prefilled, total):
                cache.append(k[:, step : step + 1], v[:, step : step + 1])
            if rejected:
                cache.append(*(torch.ones_like(x[:, :1]).expand(-1, rejected, -1, -1) for x in (k, v)))
                cache.truncate(total)
            return decode_attention(**dict(cache=cache, group=group if ranks > 1 else None) | options)

        outs = simulate(ranks, run)
        assert all(torch.equal(out, outs[0]) for out in outs)
        return outs[0]

    def check(out: Tensor) -> None:
        allowed = allowed_pairs(Mask.causal(window=window), queries, total, 0)
        if sinks is not None:
            allowed = allowed | (allowed_pairs(Mask.causal(), queries, total, 0) & (torch.arange(total) < min(int(sinks), 99)))
        assert_close(out, dense(q, k, v, allowed[None, None], arguments["scale"])[0], dtype)

    return Call(function, arguments, kinds, check).break_arguments(draw)


def filled_cache() -> KVCache:
    cache = KVCache(16)
    cache.append(X, X)
    return cache


def filled_pages() -> PagedKVCache:
    cache = PagedKVCache(4, 2, 64)
    cache.append(X.expand(2, -1, -1, -1), X.expand(2, -1, -1, -1))
    return cache


def identity(x: object) -> object:
    return x


MASK, LAYOUT = Mask.causal(documents=[3, 5]), Layout.zigzag(8, 2)
STATE = PartialState.empty(X)
RANK = ("rank", "integer")
# For every other public function and method: the function, its good arguments, and their kinds.
SMALL_CALLS: list[tuple[Callable, dict, dict]] = [
    (Mask, dict(is_causal=True, window=3, documents=[3, 5]), dict(is_causal="flag", window="integer", documents="documents")),
    (Mask.causal, dict(window=np.int64(3), documents=((3, 5),)), dict(window="integer", documents="documents")),
    (Mask.full, dict(window=None, documents=torch.tensor([3, 5])), dict(window="integer", documents="documents")),
    (MASK.intervals, dict(seq_len=8, num_queries=2), dict(seq_len="integer", num_queries="integer")),
    (MASK.pairs, dict(seq_len=8, num_queries=None), dict(seq_len="integer", num_queries="integer")),
    (MASK.check, dict(seq_len=8, batch=2), dict(seq_len="integer", batch="integer")),
    (Layout, dict(kind="zigzag", seq_len=8, ranks=2), dict(kind="kind", seq_len="integer", ranks="integer")),
    (Layout.striped, dict(seq_len=np.int32(8), ranks=2), dict(seq_len="integer", ranks="integer")),
    (Layout.assigned, dict(owners=[0, 1], rows=4, seq_len=8, ranks=2), dict(owners="owners", rows="integer", ranks="integer")),
    (LAYOUT.split, dict(parts=2), dict(parts="integer")),
    (LAYOUT.rows, dict(rank=1), dict([RANK])),
    (LAYOUT.shard, dict(x=torch.ones(8, 3), rank=1, dim=0), dict(x="tensor", rank="integer", dim="dim")),
    (LAYOUT.unshard, dict(x=[X, X], group=None, dim=1), dict(x="tensor", dim="dim")),
    (BlockMask, dict(keep=torch.ones(1, 1, 2, 2, dtype=torch.bool), size=64), dict(keep="keep", size="integer")),
    (balanced_layout, dict(mask=MASK, seq_len=8, ranks=2), dict(mask="mask", seq_len="integer", ranks="integer")),
    (
        plan_ahead,
        dict(mask=MASK, layout=Layout.zigzag(8, 1), like=(Mask.full(), Layout.zigzag(8, 1)), group=None, device="cpu"),
        dict(mask="mask", layout="layout", like="pair", group="group", device="device"),
    ),
    (
        explain,
        dict(q=X, k=X, v=X, layout=LAYOUT, mask=MASK, group=None, rank=1, schedule="kv", route="auto", transport="auto"),
        dict(q="tensor", k="tensor", v="tensor", layout="layout", mask="mask", group="group", rank="integer")
        | dict(schedule="name", route="name", transport="name", precision="name"),
    ),
    (simulate, dict(ranks=2, function=lambda rank, group: rank), dict(ranks="integer", function="function", in_turns="flag")),
    (
        KVCache,
        dict(capacity=8, rank=1, ranks=np.int64(2), block=4),
        dict.fromkeys(("capacity", "rank", "ranks", "block"), "integer"),
    ),
    (
        PagedKVCache,
        dict(pages=4, batch=np.int64(2), capacity=8, page_size=64),
        dict.fromkeys(("pages", "batch", "capacity", "page_size"), "integer"),
    ),
    (PartialState.empty, dict(q=X, value_dim=3), dict(q="queries", value_dim="integer")),
    (STATE.merge, dict(other=STATE), dict(other="state")),
    (STATE.finalize, dict(dtype=torch.float32), dict(dtype="dtype")),
]
# Methods of caches change the cache, so every call gets a new one.
CACHE_CALLS: list[tuple[Callable, str, dict, dict]] = [
    (KVCache, "prefill", dict(k=X, v=X, layout=Layout.zigzag(4, 1)), dict(k="tensor", v="tensor", layout="layout")),
    (filled_cache, "append", dict(k=X, v=X), dict(k="tensor", v="tensor")),
    (filled_cache, "append", dict(k=X[:, :1], v=X[:, :1], rows=torch.tensor([4])), dict(k="tensor", v="tensor", rows="rows")),
    (filled_cache, "truncate", dict(length=np.int64(2)), dict(length="integer")),
    (filled_pages, "append", dict(k=X, v=X, entry=1), dict(k="tensor", v="tensor", entry="integer")),
    (
        filled_pages,
        "append",
        dict(k=X[:, :1].expand(2, -1, -1, -1), v=X[:, :1].expand(2, -1, -1, -1), rows=torch.tensor([[4], [4]])),
        dict(k="tensor", v="tensor", rows="rows"),
    ),
    (filled_pages, "reserve", dict(lengths=[5, np.int64(6)]), dict(lengths="lengths")),
    (filled_pages, "truncate", dict(entry=np.int64(1), length=2), dict(entry="integer", length="integer")),
]


@st.composite
def small_calls(draw: st.DrawFn) -> Call:
    if draw(st.booleans()):
        function, arguments, kinds = draw(st.sampled_from(SMALL_CALLS))
    else:
        create, name, arguments, kinds = draw(st.sampled_from(CACHE_CALLS))
        function = getattr(create() if create is not KVCache else KVCache(16), name)
    return Call(function, dict(arguments), kinds, lambda result: None).break_arguments(draw)


def is_ours(error: BaseException) -> bool:
    """Whether a `raise` statement of this repository has raised the error, with a message of one line."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    is_raised = linecache.getline(frame.filename, frame.lineno).strip().startswith("raise ")
    return isinstance(error, ValueError) and "\n" not in str(error) and is_raised and frame.filename.startswith(ROOTS)


@pytest.fixture(scope="module", autouse=True)
def print_counts() -> Iterator[None]:
    """Print how the examples ended."""
    yield
    print("\n".join(f"{count} examples with {end}" for end, count in sorted(counts.items())))


@settings(max_examples=700, **OPTIONS)
@given(st.one_of(flash_calls(), ring_calls(), decode_calls(), small_calls()))
def test_calls_on_one_rank(call: Call) -> None:
    """A call with good arguments returns the right result, and a call with a hostile argument raises an error of ours."""
    try:
        result = call.function(**call.arguments)
    except Exception as error:
        if not is_ours(error):
            raise
        assert call.broken, f"good arguments were rejected: {error}"
        counts["one rank: error of ours"] += 1
        return
    assert not call.broken, f"{call} was accepted"
    call.check(result)
    counts["one rank: right result"] += 1


# ---------------------------------------------------------------------------------------------------------------------------
# Two ranks. An example consists of plain values, because it is sent to the ranks.

CHOICES: dict[str, list] = dict(
    is_causal=[True, False],
    window=[None, 5, np.int64(3)],
    documents=[None, [5, 8], [1, 11, 1], [13]],
    scale=[None, 0.3],
    dropout_p=[0.0, 0.5],
    seed=[1, np.int64(2)],
    batch=[1, 2],
    heads=[4, 8],
    key_heads=[4, 2, 1],
    dim=[4, 8],
    value_dim=[4, 3],
    dtype=["float64", "float32", "bfloat16"],
    kind=["zigzag", "contiguous", "striped"],
    schedule=["auto", "kv", "state"],
    route=["auto", "direct", "relay"],
    transport=["auto", "p2p"],
    precision=["ieee", "tf32"],
    backend=["auto", "blockwise"],
    return_lse=[False, True],
    backward=[False, True],
)
OPERATIONS: dict[str, dict[str, list]] = {
    "ring": CHOICES | dict(first_head=[0, np.int64(4)]),
    "ulysses": CHOICES | dict(recompute_all_to_all=[False, True], kind=["contiguous"]),
    "decode": {name: CHOICES[name] for name in ("scale", "batch", "heads", "dim", "value_dim", "dtype", "backend")}
    | dict(queries=[1, 3], cached=[9, 12], block=[1, 2], window=[None, 4], sinks=[None, 2], kind=["", "zigzag", "contiguous"]),
}
# Settings that may differ between ranks, because they change neither the messages nor the meaning of the results.
FREE = {"ring": {"precision", "backend", "return_lse"}, "ulysses": {"precision", "backend"}, "decode": {"backend"}}
HOSTILE_OPTIONS = {"scale": "0.5", "dropout_p": 2, "seed": 1.5, "window": "3", "backend": 7, "schedule": "x", "return_lse": 1}


@st.composite
def examples(draw: st.DrawFn) -> dict:
    """Draw an operation, its options on rank 0, and the differences on rank 1."""
    operation = draw(st.sampled_from(list(OPERATIONS)))
    options = {name: draw(st.sampled_from(values)) for name, values in OPERATIONS[operation].items()}
    example = dict(operation=operation, options=options, other={}, is_first=draw(st.booleans()), expected="right")
    kind = draw(st.sampled_from(["same", "same", "same", "difference", "difference", "hostile", "operation"]))
    if kind == "difference":
        name = draw(st.sampled_from([name for name, values in OPERATIONS[operation].items() if len(values) > 1]))
        example["other"] = {name: draw(st.sampled_from([x for x in OPERATIONS[operation][name] if x != options[name]]))}
        is_free = name in FREE[operation] or (name in ("seed", "first_head") and not options["dropout_p"])
        # A ring that relays blocks always uses "p2p".
        is_free |= operation == "ring" and name == "transport" and options["route"] == "relay"
        example["expected"] = "right" if is_free else "missing" if name == "backward" else "difference"
    elif kind == "operation":
        example["other"], example["expected"] = {"operation": next(x for x in OPERATIONS if x != operation)}, "difference"
    elif kind == "hostile":
        name = draw(st.sampled_from([name for name in HOSTILE_OPTIONS if name in options]))
        example["other"], example["expected"] = {name: HOSTILE_OPTIONS[name]}, "hostile"
    return example


def call_on_rank(operation: str, options: dict, group: dist.ProcessGroup) -> None:
    """Make one call on this rank, and check its results."""
    options, rank = dict(options), dist.get_rank()
    take = {name: options.pop(name) for name in ("batch", "heads", "dim", "value_dim", "dtype", "kind") if name in options}
    dtype, key_heads = getattr(torch, take["dtype"]), options.pop("key_heads", 2)
    if operation == "decode":
        return decode_on_rank(take, dtype, group, **options)
    backward, shapes = (
        options.pop("backward"),
        ((take["heads"], take["dim"]), (key_heads, take["dim"]), (key_heads, take["value_dim"])),
    )
    inputs = random_tensors(1, dtype, *((take["batch"], N, *shape) for shape in shapes))
    mask = (Mask.causal if options.pop("is_causal") else Mask.full)(options.pop("window"), options.pop("documents"))
    if operation == "ulysses":
        layout, groups, attend = Layout(take["kind"], N, 1).split(2), {"ulysses_group": group}, ulysses_attention
    else:
        layout, groups, attend = Layout(take["kind"], N, 2), {"group": group}, ring_attention
    shards = [layout.shard(x, rank).requires_grad_() for x in inputs]
    result = attend(*shards, layout=layout, mask=mask, **groups, **options)
    inputs = [x.double().requires_grad_() for x in inputs]
    if options["dropout_p"]:
        expected = dense_with_dropout(*inputs, mask, options, options.get("first_head", 0))
    else:
        allowed = torch.stack([allowed_pairs(mask, N, N, entry) for entry in range(take["batch"])])[:, None]
        expected = dense(*inputs, allowed, options["scale"])
    result = result if options["return_lse"] else (result,)
    shards_of_result = tuple(x.detach() for x in result)
    expected_shards = tuple(layout.shard(x, rank) for x in expected)
    check_attention(shards, {"return_lse": True}, expected_shards, (*shards_of_result, expected_shards[1])[:2])
    if backward:
        grads = torch.autograd.grad(result[0].double().sum(), shards)
        for x, y in zip(grads, torch.autograd.grad(expected[0].sum(), inputs), strict=True):
            assert_close(x, layout.shard(y, rank), dtype, factor=10)


def decode_on_rank(take, dtype, group, queries, cached, block, window, sinks, scale, backend) -> None:
    """Fill a cache, decode, and check the output."""
    rank, shape = dist.get_rank(), (take["batch"], cached, 2)
    q, k, v = random_tensors(
        1, dtype, (take["batch"], queries, take["heads"], take["dim"]), (*shape, take["dim"]), (*shape, take["value_dim"])
    )
    cache, stored = KVCache(20, rank, 2, block), 0
    if take["kind"]:
        stored = 8
        layout = Layout(take["kind"], stored, 2)
        cache.prefill(layout.shard(k[:, :stored], rank), layout.shard(v[:, :stored], rank), layout)
    cache.append(k[:, stored:], v[:, stored:])
    out = decode_attention(q, cache, group=group, window=window, sinks=sinks, scale=scale, backend=backend)
    allowed = allowed_pairs(Mask.causal(window), queries, cached, 0)
    if sinks is not None:
        allowed = allowed | (allowed_pairs(Mask.causal(), queries, cached, 0) & (torch.arange(cached) < sinks))
    assert_close(out, dense(q, k, v, allowed[None, None], scale)[0], dtype)


def attempt(example: dict, directory: Path) -> None:
    """Run an example on this rank, in a new group, and write how it ended to a file."""
    watchdog.HEARTBEAT_INTERVAL, watchdog.DEAD_AFTER, watchdog.GRACE = 0.1, 1.0, 0.5
    rank, group = dist.get_rank(), dist.new_group()
    operation, options = example["operation"], example["options"]
    if not example["is_first"]:
        call_on_rank(operation, options, group)
    dist.barrier()  # the group is connected, and the first call has ended
    if rank == 1:
        other = dict(example["other"])
        operation = other.pop("operation", operation)
        if operation != example["operation"]:
            options = {name: values[0] for name, values in OPERATIONS[operation].items()}
        options = options | other
    outcome = "right"
    try:
        call_on_rank(operation, options, group)
    except (ValueError, watchdog.RingFault) as error:
        outcome = f"{'ours' if is_ours(error) or isinstance(error, watchdog.RingFault) else 'unclear'}: {error}"
    (directory / str(rank)).write_text(json.dumps(outcome))
    if example["expected"] != "right" and (not example["is_first"] or outcome == "right"):
        time.sleep(20)  # the watchdog ends the process
    if outcome == "right":
        dist.barrier()  # the other rank may still receive messages over the group
    for known, transport in list(connect._connections.values()):
        if known is group:
            transport.watchdog.stop()
    dist.destroy_process_group(group)


# What every rank must report, by the expected end of an example. A rank reports in its file, or on stderr if its watchdog has
# ended it.
REPORTS = {
    "right": "right",
    "difference": "ours: .*(calls attention with|make different calls|makes no other call)|"
    "ringattn: (the ranks make different calls|rank . makes no other call)",
    "hostile": "ours: |ringattn: rank 1 makes no other call",
    # Only one rank makes a backward pass. The other rank has the right output, until the first rank ends the run.
    "missing": "right|rank . makes no other call",
}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    os.environ[watchdog.TIMEOUT] = "2"
    pool = RankPool(2, tmp_path_factory.mktemp("ranks"), "gloo")
    yield pool
    pool.close()
    del os.environ[watchdog.TIMEOUT]


# Examples are not shrunk, because every example takes up to a few seconds.
@settings(max_examples=60, phases=(Phase.reuse, Phase.generate), **OPTIONS)
@given(example=examples())
def test_calls_on_two_ranks(example: dict, pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Equal calls return the right results. If the calls differ, both ranks end with an error that names the difference."""
    directory, failure, reports = tmp_path_factory.mktemp("example"), "", []
    try:
        pool.run(attempt, example, directory)
    except AssertionError as error:
        failure = str(error)
    assert "did not return" not in failure, failure
    assert "Traceback" not in failure, failure
    for rank in range(2):
        path = directory / str(rank)
        outcome = json.loads(path.read_text()) if path.exists() else ""
        exited = re.search(f"rank {rank}: exited with status 1\n(.*)", failure, re.DOTALL)
        reports.append(outcome or (exited[1] if exited else ""))
        assert re.search(REPORTS[example["expected"]], reports[rank]), (rank, reports, failure)
    assert example["expected"] != "missing" or reports != ["right", "right"]
    counts[f"two ranks: {example['expected']}"] += 1

"""Tests of the paged cache: sequences of different lengths share pages, and the results equal attention of each sequence."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ringattn import PagedKVCache, decode_attention
from tests.ringattn.test_decode import TOLERANCE, assert_rows_close


class Sequences:
    """Random keys and values of several sequences, the part of them that a cache should hold, and the expected outputs."""

    def __init__(self, batch: int, capacity: int, dtype: torch.dtype = torch.float64, device: str = "cpu") -> None:
        generator = torch.Generator().manual_seed(0)
        self.k, self.v = (
            torch.randn(batch, capacity, 2, dim, generator=generator, dtype=torch.float64).to(dtype).to(device)
            for dim in (8, 12)
        )
        self.q = torch.randn(batch, 2, 4, 8, generator=generator, dtype=torch.float64).to(dtype).to(device)
        self.lengths = [0] * batch

    def append(self, cache: PagedKVCache, num_tokens: int, entry: int | None = None) -> None:
        """Append the next tokens of one sequence or of all sequences."""
        entries = range(len(self.lengths)) if entry is None else [entry]
        k, v = (torch.stack([x[i, self.lengths[i] : self.lengths[i] + num_tokens] for i in entries]) for x in (self.k, self.v))
        cache.append(k, v, entry=entry)
        for i in entries:
            self.lengths[i] += num_tokens

    def expected(self, queries: int, window: int | None = None, sinks: int = 0) -> Tensor:
        """The outputs of the newest tokens in float64; zeros for sequences without tokens."""
        outputs = []
        for q, k, v, length in zip(self.q, self.k, self.v, self.lengths, strict=True):
            key, query = torch.arange(length, device=q.device), torch.arange(length - queries, length, device=q.device)[:, None]
            mask = (key <= query) & ((key > query - (window or length)) | (key < sinks))
            q, k, v = (x.double().transpose(0, 1)[None] for x in (q[:queries], k[:length], v[:length]))
            out = (
                F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
                if length
                else q.new_zeros(1, 4, queries, 12)
            )
            outputs.append(out[0].transpose(0, 1))
        return torch.stack(outputs)

    def check(
        self, cache: PagedKVCache, queries: int = 1, backend: str = "auto", tolerance: float = TOLERANCE, **options
    ) -> None:
        """Compare `decode_attention` with the expected outputs."""
        assert cache.lengths == self.lengths
        out = decode_attention(self.q[:, :queries], cache, backend=backend, **options)
        assert_rows_close(out, self.expected(queries, options.get("window"), options.get("sinks") or 0), tolerance)


actions = st.tuples(st.sampled_from(("append", "truncate", "append_all")), st.integers(0, 2), st.integers(1, 150))


@given(st.lists(actions, min_size=1, max_size=12), st.sampled_from((64, 128)))
@example([("append", 0, n) for n in (149, 150, 150, 150, 2)], 64)  # one token beyond the capacity
@settings(max_examples=40, deadline=None)
def test_sequences_grow_and_shrink(steps: list[tuple[str, int, int]], page_size: int) -> None:
    """After any calls, results depend only on the tokens that remain, and every page has at most one owner."""
    pages = 12 * 64 // page_size
    cache, sequences = PagedKVCache(pages, 3, 600, page_size), Sequences(3, 750)
    sequences.append(cache, 1, 0)
    for action, entry, n in steps:
        if action == "truncate":
            sequences.lengths[entry] = min(sequences.lengths[entry], n)
            cache.truncate(entry, sequences.lengths[entry])
        else:
            entry = None if action == "append_all" else entry
            grown = [length + n * (entry in (None, i)) for i, length in enumerate(sequences.lengths)]
            if sum(-(-length // page_size) for length in grown) > pages or max(grown) > 600:
                with pytest.raises(ValueError, match=r"pages are free|exceed the capacity"):
                    sequences.append(cache, n, entry)
                continue
            sequences.append(cache, n, entry)
        used = [-(-length // page_size) for length in sequences.lengths]
        owned = [cache.page_table[i, :n].tolist() for i, n in enumerate(used)]
        assert len(set().union(*owned)) == sum(used)
        assert cache.free_pages == pages - sum(used)
    sequences.check(cache)


@pytest.mark.parametrize(
    ("backend", "dtype", "tolerance"), [("auto", torch.float64, TOLERANCE), ("triton", torch.float32, 1e-5)]
)
@pytest.mark.parametrize(("window", "sinks"), [(None, None), (20, None), (20, 70)])
def test_windows_and_sinks(backend, dtype, tolerance, window, sinks, device) -> None:
    """Two queries per sequence. One sequence is empty, and one is longer than a page."""
    cache, sequences = PagedKVCache(6, 4, 200), Sequences(4, 200, dtype, device)
    for entry, length in ((2, 130), (0, 2), (3, 64)):
        sequences.append(cache, length, entry)
    sequences.check(cache, 2, backend, tolerance, window=window, sinks=sinks)


@pytest.mark.parametrize(("backend", "dtype"), [("auto", torch.float64), ("triton", torch.float32)])
def test_rows_on_the_device(backend, dtype, device) -> None:
    """Tokens are appended at rows in reserved pages. Tokens without a page do not change other sequences."""
    cache, sequences = PagedKVCache(4, 3, 128), Sequences(3, 128, dtype, device)
    sequences.append(cache, 63)
    sequences.append(cache, 1, 0)
    cache.reserve([65, 64, 63])
    rows = torch.tensor([[64], [63], [64]], device=device)  # the last sequence has no page for this row
    tokens = torch.arange(3, device=device)[:, None], rows
    cache.append(sequences.k[tokens], sequences.v[tokens], rows=rows)
    assert cache.lengths == [64, 63, 63]
    hi = torch.tensor([[65], [64], [63]], dtype=torch.int32, device=device)
    sequences.lengths = hi[:, 0].tolist()
    out = decode_attention(sequences.q[:, :1], cache, bounds=(torch.zeros_like(hi), hi), backend=backend)
    assert_rows_close(out, sequences.expected(1), TOLERANCE if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("backend", ["blockwise", "reference"])
def test_a_page_is_used_again(backend: str) -> None:
    """NaN in the tokens of an earlier sequence does not reach the sequence that gets its page."""
    cache, sequences = PagedKVCache(1, 2, 64), Sequences(2, 64)
    nan = torch.full((1, 60, 2, 12), float("nan"), dtype=torch.float64)
    cache.append(nan[..., :8], nan, entry=1)
    with pytest.raises(ValueError, match="need 1 more pages, but only 0 of 1"):
        sequences.append(cache, 5, 0)
    cache.truncate(1, 0)
    sequences.append(cache, 5, 0)
    sequences.check(cache, backend=backend)
    # A graph may still append tokens to the sequence that has returned the page.
    cache.append(nan[:, :1, :, :8].expand(2, -1, -1, -1), nan[:, :1].expand(2, -1, -1, -1), rows=torch.tensor([[60], [2]]))
    sequences.check(cache, backend=backend)


def test_a_cache_created_in_inference_mode_works_outside() -> None:
    with torch.inference_mode():
        cache, sequences = PagedKVCache(3, 1, 128), Sequences(1, 128)
        sequences.append(cache, 60)
    sequences.append(cache, 60)
    assert cache.free_pages == 1
    cache.truncate(0, 3)
    sequences.lengths = [3]
    sequences.check(cache)
    assert cache.free_pages == 2


@pytest.mark.gpu
def test_a_graph_appends_tokens_to_pages() -> None:
    """Every replay appends one token to each sequence, also after `reserve` has added pages."""
    cache, sequences = PagedKVCache(10, 2, 200), Sequences(2, 200, torch.float32, "cuda")
    sequences.append(cache, 62)
    sequences.append(cache, 20, 1)
    rows = torch.tensor(cache.lengths, device="cuda")[:, None]
    tokens = torch.arange(2, device="cuda")[:, None], rows

    def step() -> Tensor:
        hi = (rows + 1).int()
        cache.append(sequences.k[tokens], sequences.v[tokens], rows=rows)
        out = decode_attention(sequences.q[:, :1], cache, bounds=(torch.zeros_like(hi), hi))
        rows.add_(1)
        return out

    step()
    rows.sub_(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for _ in range(70):
        sequences.lengths = [length + 1 for length in sequences.lengths]
        cache.reserve(sequences.lengths)
        graph.replay()
        assert_rows_close(out, sequences.expected(1), 1e-5)


X = torch.zeros(2, 4, 2, 8)


def filled_cache() -> PagedKVCache:
    """A cache of two sequences with four tokens each, and no free page."""
    cache = PagedKVCache(2, 2, 128)
    cache.append(X, X)
    return cache


INVALID = {  # a function that makes a mistake, and what the message says
    "no-pages": (lambda: PagedKVCache(0, 2, 128), "pages=0"),
    "small-pages": (lambda: PagedKVCache(2, 2, 128, 16), "page_size=16.*multiple of 64"),
    "empty-cache": (lambda: decode_attention(X[:, :1], PagedKVCache(2, 2, 128)), "empty"),
    "another-batch": (lambda: filled_cache().append(X[:1], X[:1]), "k has 1 batch entries.* 2"),
    "two-for-one": (lambda: filled_cache().append(X, X, entry=0), "k has 2 batch entries.* 1"),
    "no-such-entry": (lambda: filled_cache().append(X[:1], X[:1], entry=2), "entry=2.* 0 to 1"),
    "another-dtype": (lambda: filled_cache().append(X.double(), X.double()), "float64.*float32"),
    "beyond-capacity": (lambda: PagedKVCache(9, 2, 3).append(X, X), "4 tokens exceed the capacity 3"),
    "no-free-page": (lambda: filled_cache().append(X.repeat(1, 16, 1, 1), X.repeat(1, 16, 1, 1)), "need 2 more pages.*0 of 2"),
    "reserve-one-of-two": (lambda: filled_cache().reserve([4]), "lengths=.4.: .*2 lengths"),
    "truncate-too-long": (lambda: filled_cache().truncate(0, 5), "length=5.* 0 to 4"),
    "rows-without-memory": (lambda: PagedKVCache(2, 2, 128).append(X, X, rows=torch.arange(4)), "rows"),
    "32-bit-rows": (lambda: filled_cache().append(X, X, rows=torch.arange(4).int()), "rows is torch.int32"),
    "queries-of-one-sequence": (lambda: decode_attention(X[:1], filled_cache()), "q .1, 4, 2, 8.*k .2,"),
    "more-queries-than-keys": (lambda: decode_attention(torch.zeros(2, 5, 2, 8), filled_cache()), "5 queries .* 4 tokens"),
}


@pytest.mark.parametrize(("call", "message"), INVALID.values(), ids=INVALID)
def test_invalid_arguments_raise_an_error(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()

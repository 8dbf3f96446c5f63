"""Tests of masks: their intervals equal dense masks that are computed from the definition."""

import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.utils import _apply_to_tensors

from ringattn import Mask
from ringattn.kernels import interval_mask
from ringattn.mask import intervals_at, kinks


def dense_mask(seq_len: int, left: int, right: int, documents: list[int]) -> Tensor:
    """Return allowed[query, key], computed pair by pair."""
    document = [d for d, length in enumerate(documents) for _ in range(length)]
    allowed = torch.zeros(seq_len, seq_len, dtype=torch.bool)
    for i in range(seq_len):
        for j in range(seq_len):
            allowed[i, j] = document[i] == document[j] and i - left <= j <= i + right
    return allowed


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=6),
    st.none() | st.integers(0, 8),
    st.none() | st.integers(0, 8),
)
def test_intervals_equal_the_definition(documents: list[int], left: int | None, right: int | None) -> None:
    """Intervals never decrease from one query to the next, and `pairs` counts the allowed pairs."""
    seq_len = sum(documents)
    mask = Mask(window=(left, right), documents=documents)
    lo, hi = mask.intervals(seq_len)
    expected = dense_mask(seq_len, 99 if left is None else left, 99 if right is None else right, documents)
    clipped = lo.clamp(0, seq_len), hi.clamp(0, seq_len)
    assert torch.equal(interval_mask.dense(*clipped, seq_len)[0], expected)
    assert (lo.diff() >= 0).all()
    assert (hi.diff() >= 0).all()
    assert mask.pairs(seq_len) == [int(expected.sum())]


@st.composite
def any_intervals(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Draw ascending lo and hi, which are often constant or grow by 1."""
    seq_len = draw(st.integers(1, 24))
    steps = st.lists(st.sampled_from([0, 0, 0, 1, 1, 1, 2, 5]), min_size=seq_len, max_size=seq_len)
    lo, hi = (np.cumsum(draw(steps)).clip(0, seq_len) for _ in range(2))
    return lo, np.maximum(lo, hi)


@given(any_intervals())
def test_any_intervals_make_a_mask(intervals: tuple[np.ndarray, np.ndarray]) -> None:
    """The pieces contain the intervals of all queries, of all keys, and the number of pairs."""
    lo, hi = intervals
    seq_len = len(lo)
    mask = Mask.from_intervals(lo, hi)
    assert [x[0].tolist() for x in mask.intervals(seq_len)] == [lo.tolist(), hi.tolist()]
    assert mask.pairs(seq_len) == [(hi - lo).sum()]
    assert Mask.from_numbers(mask.reach, mask.numbers.tolist(), seq_len) == mask
    allowed = (lo[:, None] <= np.arange(seq_len)) & (np.arange(seq_len) < hi[:, None])
    first, end = intervals_at(mask, seq_len, np.arange(seq_len), transposed=True)
    queries = np.arange(seq_len)
    assert np.array_equal((first[0][:, None] <= queries) & (queries < end[0][:, None]), allowed.T)
    for transposed in (False, True):
        (starts,) = kinks(mask, seq_len, transposed)
        for begin, stop in pairwise(starts):
            ends = np.stack(intervals_at(mask, seq_len, np.arange(begin, stop), transposed))[:, 0]
            assert np.isin(np.diff(ends), (0, 1)).all()
            assert (np.diff(ends, 2) == 0).all()


def test_equal_windows_are_equal_masks() -> None:
    """A window of W keys of a causal mask has W - 1 keys before the query, and a full one also W - 1 keys after it."""
    assert Mask(window=(4, 0)) == Mask.causal(5) == Mask.causal((4, 0))
    assert Mask(window=(4, 4)) == Mask.full(5) == Mask.full((4, 4))
    assert Mask(window=(None, None)) == Mask.full()
    assert Mask(window=(None, 0)) == Mask.causal()
    assert Mask(window=(2, 1)).window == (2, 1)
    assert Mask(window=(0, 3)) != Mask(window=(3, 0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0, 1], [1, 3]), r"0 <= lo <= hi <= 2"),
        (([0, 1], [1, 0]), r"0 <= lo <= hi"),
        (([1, 0], [1, 2]), "neither may decrease"),
        (([0.5, 1], [1, 2]), "integers"),
        (([], []), "S > 0"),
        (([0, 1], [1, 1, 1]), "integers of shape"),
        ((None, [1]), "integers of shape"),
    ],
    ids=str,
)
def test_invalid_intervals_raise_an_error(arguments: tuple, message: str) -> None:
    """Queries may attend to a part of the keys only if both ends never decrease."""
    with pytest.raises(ValueError, match=message):
        Mask.from_intervals(*arguments)


def test_intervals_must_fill_the_sequence() -> None:
    """Intervals describe the queries of one length, and replace windows and documents."""
    mask = Mask.from_intervals([[0, 0], [0, 1]], [[1, 2], [2, 2]])
    mask.check(2, 2)
    with pytest.raises(ValueError, match="intervals of 2 queries, but the sequence has 3 tokens"):
        mask.check(3)
    with pytest.raises(ValueError, match="intervals for 2 batch entries, but the batch has 3"):
        mask.check(2, 3)
    with pytest.raises(ValueError, match="no window and no documents"):
        Mask(window=3, pieces=mask.pieces)


@pytest.mark.parametrize("num_queries", [1, 2, 5, 6])
def test_fewer_queries_are_the_last_ones(num_queries: int) -> None:
    """There are three documents. The queries see only the last ones."""
    mask = Mask.causal(window=2, documents=[3, 1, 2])
    lo, hi = (x[:, -num_queries:] for x in mask.intervals(6))
    assert torch.equal(torch.cat(mask.intervals(6, num_queries)), torch.cat((lo, hi)))
    assert mask.pairs(6, num_queries) == [int((hi - lo).sum())]


def test_queries_before_the_first_key_see_no_key() -> None:
    """The first two of four queries have the positions -2 and -1."""
    lo, hi = Mask.causal(window=2).intervals(2, 4)
    assert (lo.tolist(), hi.tolist()) == ([[0, 0, 0, 0]], [[0, 0, 1, 2]])
    assert Mask.causal(window=2).pairs(2, 4) == [3]
    with pytest.raises(ValueError, match="4 queries, but 2 keys in documents"):
        Mask.causal(documents=[2]).intervals(2, 4)


def test_intervals_of_packed_documents() -> None:
    """Three documents of 3, 1 and 2 tokens, and a window of 2."""
    lo, hi = Mask.causal(window=2, documents=[3, 1, 2]).intervals(6)
    assert lo.tolist() == [[0, 0, 1, 3, 4, 4]]
    assert hi.tolist() == [[1, 2, 3, 4, 5, 6]]


def test_each_batch_entry_has_its_own_documents() -> None:
    """A list of lists gives the documents of every batch entry."""
    mask = Mask.causal(documents=[[2, 1], [3]])
    assert mask.intervals(3)[0].tolist() == [[0, 0, 2], [0, 0, 0]]
    assert mask.pairs(3) == [4, 6]


@pytest.mark.parametrize("documents", [None, [3, 1, 2], [[3, 1, 2], [6], [1] * 6]], ids=("none", "one", "per-entry"))
def test_a_mask_can_be_rebuilt_from_its_lengths(documents: list | None) -> None:
    """Operators carry the documents of a mask as one tensor of lengths."""
    mask = Mask.causal(window=4, documents=documents)
    assert Mask.from_numbers(mask.reach, mask.numbers.tolist(), 6) == mask


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_widest_window_equals_no_window(is_causal: bool) -> None:
    """A window of sys.maxsize does not overflow."""
    wide, none = Mask(is_causal, window=sys.maxsize), Mask(is_causal)
    assert all(map(torch.equal, wide.intervals(9), none.intervals(9)))
    assert all(map(torch.equal, wide.intervals(9, 12), none.intervals(9, 12)))


@pytest.mark.parametrize(
    "documents", [torch.tensor([2, 3]), [torch.tensor([2, 3]), torch.tensor([5])]], ids=("one", "per-entry")
)
def test_documents_may_be_tensors(documents) -> None:
    """Tensors of lengths give the same mask as lists."""
    lists = [2, 3] if isinstance(documents, torch.Tensor) else [[2, 3], [5]]
    assert Mask.causal(documents=documents) == Mask.causal(documents=lists) == Mask(True, None, lists)


@pytest.mark.parametrize(
    ("documents", "expected"),
    [
        (torch.tensor([0, 0, 3, 3, 3, 5, 5], dtype=torch.int32).diff(), [3, 2]),
        (np.diff([0, 3, 5, 5]), [3, 2]),
        (torch.tensor([[0, 3, 5, 5], [0, 0, 0, 5]]).diff(), [[3, 2], [5]]),
        ([[3, 0, 2], [5]], [[3, 2], [5]]),
        ([0, 5, 0], [5]),
        ([0, 0], []),
    ],
    ids=str,
)
def test_empty_documents_have_no_effect(documents: object, expected: list) -> None:
    """Collators pad cu_seqlens by repeating its last entry."""
    mask = Mask.causal(documents=documents)
    assert mask == Mask.causal(documents=expected)
    assert mask.numbers.equal(Mask.causal(documents=expected).numbers)


def test_offsets_instead_of_lengths_raise_an_error() -> None:
    with pytest.raises(ValueError, match=r"sum to 8 tokens but the sequence has 5: .* pass cu_seqlens\.diff"):
        Mask.causal(documents=torch.tensor([0, 3, 5])).check(5)


def test_a_mask_holds_integers_of_python() -> None:
    """The ranks exchange the window as JSON, and operators receive it as an integer of 64 bits."""
    for window in (np.int64(5), torch.tensor(5)):
        assert type(Mask.causal(window).window) is int
        assert Mask.causal(window) == Mask.causal(5)
    assert Mask.causal(2**70) == Mask.causal(2**62)
    with pytest.raises(ValueError, match="is_causal=1: it must be True or False"):
        Mask(1)


@pytest.mark.parametrize("window", [0, True, 2.5, (4, 1), (4,), (-1, 0), (1.5, 0), "12"], ids=str)
def test_an_invalid_window_raises_an_error(window: object) -> None:
    """The message names the value, and how to request no window."""
    with pytest.raises(ValueError, match=r"window=.*(window=None|None means|\(left, right\)|Mask\(window)"):
        Mask.causal(window=window)


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([3, -1, 0], "length -1: lengths must not be negative"),
        ([[], [2], [-3, 4]], "length -3"),
        (torch.tensor(16), "integer"),
        (np.array(16), "integer"),
        (torch.tensor([[[3]]]), "integer"),
        ({3, 2}, "integer"),
        ({3: 2}, "integer"),
        ([None], "integer"),
        ([2.7, 3.9], "2.7"),
        ("34", "34"),
        ([5, [3, 2]], "integer"),
        (5, "integer"),
        ([True, 3], "integer"),
    ],
)
def test_invalid_documents_raise_an_error(documents: object, message: str) -> None:
    """Documents are lengths, not offsets."""
    with pytest.raises(ValueError, match=message):
        Mask.causal(documents=documents)


@pytest.mark.parametrize("method", ["intervals", "pairs"])
def test_documents_must_fill_the_sequence(method: str) -> None:
    """The message names the sum of the lengths and the length of the sequence."""
    for mask in (Mask.full(documents=[3, 4]), Mask.causal(documents=[7])):
        with pytest.raises(ValueError, match=r"7 .* 9"):
            getattr(mask, method)(9)


def test_a_caller_may_modify_the_intervals() -> None:
    """The returned tensors are not in a cache."""
    _, hi = Mask.causal().intervals(7)
    hi.fill_(7)
    assert Mask.causal().intervals(7)[1].tolist() == [list(range(1, 8))]


def test_fsdp_may_copy_a_mask() -> None:
    """FSDP copies the arguments of a module field by field, to cast the tensors in them."""
    mask = Mask.causal(window=3, documents=[[2, 3], [5]])
    copy = _apply_to_tensors(lambda x: x, {"mask": mask})["mask"]
    assert copy == mask
    assert copy.numbers.tolist() == [2, 3, 5]
    assert copy.totals == (5, 5)

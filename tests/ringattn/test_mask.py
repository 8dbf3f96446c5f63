"""Masks as intervals, against masks written out from their definition."""

import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.utils import _apply_to_tensors

from ringattn import Mask
from ringattn.kernels import interval_mask


def by_definition(seq_len: int, is_causal: bool, window: int | None, documents: list[int]) -> Tensor:
    """allowed[i, j], from the words of the docstring."""
    document = [d for d, length in enumerate(documents) for _ in range(length)]
    allowed = torch.zeros(seq_len, seq_len, dtype=torch.bool)
    for i in range(seq_len):
        for j in range(seq_len):
            near = window is None or abs(i - j) < window
            allowed[i, j] = document[i] == document[j] and near and (j <= i or not is_causal)
    return allowed


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=6),
    st.booleans(),
    st.none() | st.integers(1, 8),
)
def test_intervals_are_the_definition(documents: list[int], is_causal: bool, window: int | None) -> None:
    seq_len = sum(documents)
    mask = Mask.causal(window, documents) if is_causal else Mask.full(window, documents)
    lo, hi = mask.intervals(seq_len)
    expected = by_definition(seq_len, is_causal, window, documents)
    clipped = lo.clamp(0, seq_len), hi.clamp(0, seq_len)
    assert torch.equal(interval_mask.dense(*clipped, seq_len)[0], expected)
    assert (lo.diff() >= 0).all() and (hi.diff() >= 0).all()
    assert mask.pairs(seq_len) == [int(expected.sum())]


def test_intervals_of_packed_documents() -> None:
    lo, hi = Mask.causal(window=2, documents=[3, 1, 2]).intervals(6)
    assert lo.tolist() == [[0, 0, 1, 3, 4, 4]]
    assert hi.tolist() == [[1, 2, 3, 4, 5, 6]]


def test_each_batch_row_has_its_own_documents() -> None:
    mask = Mask.causal(documents=[[2, 1], [3]])
    assert mask.intervals(3)[0].tolist() == [[0, 0, 2], [0, 0, 0]]
    assert mask.pairs(3) == [4, 6]


@pytest.mark.parametrize("documents", (None, [3, 1, 2], [[3, 1, 2], [6], [1] * 6]), ids=("none", "one", "per-row"))
def test_a_mask_survives_its_lengths(documents: list | None) -> None:
    mask = Mask.causal(window=4, documents=documents)
    assert Mask.from_lengths(True, 4, mask.lengths, 6) == mask


@pytest.mark.parametrize("is_causal", (False, True))
def test_a_window_may_be_as_wide_as_an_integer_can_be(is_causal: bool) -> None:
    wide, none = Mask(is_causal, window=sys.maxsize), Mask(is_causal)
    assert all(map(torch.equal, wide.intervals(9), none.intervals(9)))
    assert all(map(torch.equal, wide.intervals(9, 12), none.intervals(9, 12)))


@pytest.mark.parametrize("documents", (torch.tensor([2, 3]), [torch.tensor([2, 3]), torch.tensor([5])]), ids=("one", "per-row"))
def test_documents_may_be_tensors(documents) -> None:
    lists = [2, 3] if isinstance(documents, torch.Tensor) else [[2, 3], [5]]
    assert Mask.causal(documents=documents) == Mask.causal(documents=lists)


def test_bad_masks_are_refused() -> None:
    with pytest.raises(ValueError, match="window = 0"):
        Mask.causal(window=0)
    with pytest.raises(ValueError, match="window = True"):
        Mask.causal(window=True)
    with pytest.raises(ValueError, match="window = 2.5"):
        Mask.causal(window=2.5)
    with pytest.raises(ValueError, match=r"window = \(4, 0\)"):
        Mask.causal(window=(4, 0))
    with pytest.raises(ValueError, match=r"a document of 0 tokens: give lengths, .*cu_seqlens.diff\(\)"):
        Mask.causal(documents=[3, 0])
    for ask in (Mask.full(documents=[3, 4]).intervals, Mask.causal(documents=[3, 4]).intervals, Mask.full(documents=[7]).pairs):
        with pytest.raises(ValueError, match="documents sum to 7 tokens but the sequence has 9"):
            ask(9)
    for documents in ([2.7, 3.9], "34", [5, [3, 2]]):
        with pytest.raises(ValueError, match="give lengths, which are integers"):
            Mask.causal(documents=documents)


def test_intervals_are_the_callers_own() -> None:
    _, hi = Mask.causal().intervals(7)
    hi.fill_(7)
    assert Mask.causal().intervals(7)[1].tolist() == [list(range(1, 8))]


def test_a_copy_field_by_field_is_whole() -> None:
    """As FSDP makes of what a module is called with, to cast tensors in it."""
    mask = Mask.causal(window=3, documents=[[2, 3], [5]])
    copy = _apply_to_tensors(lambda x: x, {"mask": mask})["mask"]
    assert copy == mask and copy.lengths.tolist() == [2, 3, 5] and copy.totals == (5, 5)

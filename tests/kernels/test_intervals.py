import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import intervals
from tests.kernels.masks import MASKS, intervals_of, random_intervals


def test_full_sees_every_key():
    assert intervals.dense(*intervals.full(3, 5), 5).all()


def test_dense_of_a_window():
    lo, hi = torch.tensor([[0, 0, 1]], dtype=torch.int32), torch.tensor([[1, 2, 3]], dtype=torch.int32)
    assert intervals.dense(lo, hi, 4).int().tolist() == [[[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0]]]


def test_transpose_of_a_window():
    lo, hi = torch.tensor([[0, 0, 1]], dtype=torch.int32), torch.tensor([[1, 2, 3]], dtype=torch.int32)
    query_lo, query_hi = intervals.transpose(lo, hi, 4)
    assert query_lo.tolist() == [[0, 1, 2, 3]]
    assert query_hi.tolist() == [[2, 3, 3, 3]]  # key 3 is seen by no query: [3, 3)


@pytest.mark.parametrize("shape", [(50, 50), (33, 70), (70, 33), (1, 9), (9, 1)], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_named_masks_are_valid(mask, shape):
    lo, hi = intervals_of(mask, *shape)
    for bound in (lo, hi):
        assert bound.dtype == torch.int32
        assert bound.min() >= 0 and bound.max() <= shape[1]
        assert (bound.diff() >= 0).all()


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 3), st.integers(0, 2**32))
def test_transpose_matches_dense(num_queries, num_keys, batch, seed):
    lo, hi = random_intervals(num_queries, num_keys, seed, batch)
    query_lo, query_hi = intervals.transpose(lo, hi, num_keys)
    assert query_lo.dtype == query_hi.dtype == torch.int32
    assert (query_lo.diff() >= 0).all() and (query_hi.diff() >= 0).all()
    transposed = intervals.dense(query_lo, query_hi, num_queries)
    assert torch.equal(transposed.mT, intervals.dense(lo, hi, num_keys))

"""Block masks: their lists of kept blocks, their dense form, and masks that keep everything or nothing."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.utils import _apply_to_tensors

from ringattn.kernels import dispatch
from ringattn.kernels.blocks import BlockMask
from tests.kernels.compare import assert_rows_close, assert_states_close
from tests.kernels.masks import intervals_of
from tests.kernels.problems import make_problem


def random_keep(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.5


def test_dense_form_ends_with_the_sequence():
    blocks = BlockMask(torch.tensor([[True, False], [False, True]])[None, None], 64)
    dense = blocks.dense(70, 100)
    assert dense.shape == (1, 1, 70, 100)
    assert dense[0, 0, :64, :64].all()
    assert dense[0, 0, 64:, 64:].all()
    assert dense.sum() == 64 * 64 + 6 * 36


@settings(max_examples=30)
@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from([(1, 1), (2, 1), (4, 1), (4, 2), (4, 4)]), st.integers(0, 2**32))
def test_lists_contain_the_kept_blocks_in_order(num_query_blocks, num_key_blocks, heads, seed):
    num_heads, group = heads
    blocks = BlockMask(random_keep(2, num_heads, num_query_blocks, num_key_blocks, seed=seed))
    for row, keep in zip(blocks.query_lists.flatten(0, 2), blocks.keep.flatten(0, 2), strict=True):
        counts, columns = row.unbind(-1)
        assert counts.tolist() == [keep[:c].sum() for c in range(num_key_blocks + 1)]
        assert columns[: counts[-1]].tolist() == keep.nonzero()[:, 0].tolist()
    keys = blocks.key_lists(group)
    assert keys is blocks.key_lists(group)
    assert keys.shape[1] == max(1, num_heads // group)
    for b, h, j in torch.cartesian_prod(*(torch.arange(n) for n in keys.shape[:3])).tolist():
        counts, columns = keys[b, h, j].unbind(-1)
        pairs = [(column // group, column % group) for column in columns[: counts[-1]].tolist()]
        head = 0 if num_heads == 1 else h * group
        expected = [(i, g) for i in range(num_query_blocks) for g in range(group) if blocks.keep[b, head + g, i, j]]
        assert pairs == expected
        assert counts[::group].tolist() == [sum(pair[0] < i for pair in pairs) for i in range(num_query_blocks + 1)]


def test_key_lists_of_a_mask_for_all_heads_equal_those_of_its_copies():
    keys = BlockMask(random_keep(1, 1, 5, 3)).key_lists(2)
    same = BlockMask(random_keep(1, 1, 5, 3).expand(1, 2, 5, 3)).key_lists(2)
    assert torch.equal(keys, same)


def test_key_lists_are_cached_for_each_group_size():
    blocks = BlockMask(random_keep(1, 1, 5, 3))
    for group in (1, 2, 1):
        assert torch.equal(blocks.key_lists(group), BlockMask(blocks.keep).key_lists(group))


@pytest.mark.parametrize(("mask", "backend"), [("full", "blockwise"), ("documents", "triton")])
def test_mask_that_keeps_everything_equals_no_mask(mask, backend, device):
    problem = make_problem(*intervals_of(mask, 70, 90), 90, heads=(2, 1), device=device)
    expected = *problem.forward(dispatch, final=True, backend=backend), *problem.gradients(dispatch, backend=backend)
    problem.options["blocks"] = BlockMask(torch.ones(1, 1, 2, 2, dtype=torch.bool, device=device), 64)
    assert_states_close(problem.forward(dispatch, final=True, backend=backend), expected[:2], 1e-5)
    for x, y in zip(problem.gradients(dispatch, backend=backend), expected[2:], strict=True):
        assert_rows_close("gradient", x, y, 1e-5)


@pytest.mark.parametrize("backend", ["blockwise", "triton"])
def test_mask_that_keeps_nothing_gives_zero(backend, device):
    blocks = BlockMask(torch.zeros(1, 2, 2, 2, dtype=torch.bool, device=device), 64)
    problem = make_problem(*intervals_of("causal", 70, 90), 90, device=device, blocks=blocks)
    out, lse = problem.forward(dispatch, final=True, backend=backend)
    assert (out == 0).all()
    assert (lse == float("-inf")).all()
    assert all((gradient == 0).all() for gradient in problem.gradients(dispatch, backend=backend))


BAD_MASKS = {
    "dtype": (torch.ones(1, 1, 2, 2), 64, "the block mask is torch.float32"),
    "dimensions": (torch.ones(2, 2, dtype=torch.bool), 64, "must be torch.bool (batch or 1"),
    "size": (torch.ones(1, 1, 2, 2, dtype=torch.bool), 100, "size=100: must be a multiple of 64"),
    "no size": (torch.ones(1, 1, 2, 2, dtype=torch.bool), 0, "size=0: must be a multiple of 64"),
    "float": (torch.ones(1, 1, 2, 2, dtype=torch.bool), 128.0, "size=128.0: must be an integer, a multiple of 64"),
    "no tensor": (None, 64, "the block mask is a NoneType"),
}


@pytest.mark.parametrize("case", BAD_MASKS)
def test_mask_must_be_a_bool_tensor_with_a_valid_size(case):
    keep, size, message = BAD_MASKS[case]
    with pytest.raises(ValueError, match=re.escape(message)):
        BlockMask(keep, size)


def test_restriction_must_start_at_a_block():
    blocks = BlockMask(random_keep(1, 1, 3, 3), 64)
    assert torch.equal(blocks.restrict(slice(64, 128), slice(64, 150)).keep, blocks.keep[:, :, 1:2, 1:3])
    with pytest.raises(ValueError, match=r"from 0 and 32.*multiples of the block size 64"):
        blocks.restrict(slice(0, 64), slice(32, 64))


def test_copy_field_by_field_has_lists_of_its_own() -> None:
    """FSDP copies the arguments of a module field by field to cast the tensors in them. The cached lists must not be copied."""
    mask = BlockMask(torch.ones(1, 2, 2, 2, dtype=torch.bool).tril())
    expected = mask.key_lists(2)
    copy = _apply_to_tensors(lambda x: ~x, {"mask": _apply_to_tensors(lambda x: ~x, {"mask": mask})["mask"]})["mask"]
    assert torch.equal(copy.key_lists(2), expected)
    assert torch.equal(copy.keep, mask.keep)

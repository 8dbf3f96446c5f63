"""Block masks: their lists, and dense, empty and refused ones; `test_features.py` compares random ones."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.utils import _apply_to_tensors

from ringattn.kernels import blockwise, dispatch
from ringattn.kernels.blocks import BlockMask
from ringattn.kernels.triton import backward as triton_backward
from ringattn.kernels.triton import forward as triton_forward
from tests.kernels.compare import assert_rows_close, assert_states_close
from tests.kernels.masks import intervals_of
from tests.kernels.problems import make_problem

MODULES = {"triton": (triton_forward, triton_backward), "tiled": (blockwise, blockwise)}


def random_keep(*shape: int, seed: int = 0, fraction: float = 0.5) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < fraction


def test_dense():
    blocks = BlockMask(torch.tensor([[True, False], [False, True]])[None, None], 64)
    dense = blocks.dense(70, 100)
    assert dense.shape == (1, 1, 70, 100)
    assert dense[0, 0, :64, :64].all() and dense[0, 0, 64:, 64:].all() and dense.sum() == 64 * 64 + 6 * 36


@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from([(1, 1), (2, 1), (4, 1), (4, 2), (4, 4)]), st.integers(0, 2**32))
def test_lists_hold_the_kept_blocks_in_order(num_query_blocks, num_key_blocks, heads, seed):
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


def test_lists_of_a_mask_that_all_heads_share():
    keys = BlockMask(random_keep(1, 1, 5, 3)).key_lists(2)
    same = BlockMask(random_keep(1, 1, 5, 3).expand(1, 2, 5, 3)).key_lists(2)
    assert torch.equal(keys, same)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("mask", ["full", "causal", "documents"])
def test_all_kept_is_dense(mask, module, device):
    module_forward, module_backward = MODULES[module]
    problem = make_problem(*intervals_of(mask, 130, 150), 150, heads=(2, 1), device=device)
    expected = problem.forward(module_forward, final=True), problem.backward(module_backward)
    problem.features["blocks"] = BlockMask(torch.ones(1, 1, 3, 3, dtype=torch.bool, device=device), 64)
    assert_states_close(problem.forward(module_forward, final=True), expected[0], 1e-5)
    for x, y in zip(problem.backward(module_backward), expected[1], strict=True):
        assert_rows_close("gradient", x, y, 1e-5)


@pytest.mark.parametrize("module", MODULES)
def test_none_kept_is_empty(module, device):
    module_forward, module_backward = MODULES[module]
    blocks = BlockMask(torch.zeros(1, 2, 3, 3, dtype=torch.bool, device=device), 64)
    problem = make_problem(*intervals_of("causal", 130, 150), 150, device=device, blocks=blocks)
    out, lse = problem.forward(module_forward, final=True)
    assert (out == 0).all() and (lse == float("-inf")).all()
    assert all((gradient == 0).all() for gradient in problem.backward(module_backward))


REFUSED = {
    "dtype": (torch.ones(1, 1, 2, 2), 64, "block mask is torch.float32"),
    "dimensions": (torch.ones(2, 2, dtype=torch.bool), 64, "must be torch.bool (batch or 1"),
    "size": (torch.ones(1, 1, 2, 2, dtype=torch.bool), 100, "multiple of 64"),
    "no size": (torch.ones(1, 1, 2, 2, dtype=torch.bool), 0, "multiple of 64"),
    "a float as size": (torch.ones(1, 1, 2, 2, dtype=torch.bool), 128.0, "multiple of 64"),
    "no tensor": (None, 64, "block mask is a NoneType"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_masks_are_refused(case):
    keep, size, message = REFUSED[case]
    with pytest.raises(ValueError, match=re.escape(message)):
        BlockMask(keep, size)


@pytest.mark.parametrize("backend", ["reference", "tiled", "triton"])
@pytest.mark.parametrize("shape", [(1, 1, 2, 3), (1, 1, 3, 2), (3, 1, 2, 2), (1, 3, 2, 2)], ids=str)
def test_masks_of_other_shapes_are_refused(shape, backend):
    problem = make_problem(*intervals_of("full", 70, 128), 128, batch=2)
    blocks = BlockMask(torch.ones(shape, dtype=torch.bool), 64)
    with pytest.raises(ValueError, match="the block mask has shape"):
        problem.forward(dispatch, backend=backend, blocks=blocks)


def test_only_whole_blocks_can_be_cut():
    blocks = BlockMask(random_keep(1, 1, 3, 3), 64)
    assert torch.equal(blocks.cut(slice(64, 128), slice(64, 150)).keep, blocks.keep[:, :, 1:2, 1:3])
    with pytest.raises(ValueError, match="do not start at a block"):
        blocks.cut(slice(0, 64), slice(32, 64))


def test_one_mask_for_several_groups_of_heads():
    blocks = BlockMask(random_keep(1, 1, 5, 3))
    for group in (1, 2, 1):
        assert torch.equal(blocks.key_lists(group), BlockMask(blocks.keep).key_lists(group))


def test_a_copy_field_by_field_is_whole() -> None:
    """As FSDP makes of what a module is called with, to cast tensors in it; what was derived is derived anew."""
    mask = BlockMask(torch.ones(1, 2, 2, 2, dtype=torch.bool).tril())
    expected = mask.key_lists(2)
    copy = _apply_to_tensors(lambda x: ~x, {"mask": _apply_to_tensors(lambda x: ~x, {"mask": mask})["mask"]})["mask"]
    assert torch.equal(copy.key_lists(2), expected) and torch.equal(copy.keep, mask.keep)

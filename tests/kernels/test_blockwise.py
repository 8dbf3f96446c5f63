"""The blockwise backend against the float64 reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringattn import flash_attention
from ringattn.kernels import blockwise, reference
from scripts.labs import measure
from scripts.labs.blockwise_bytes import TileSize, tile_size
from tests.covering import every_pair
from tests.kernels.compare import assert_states_close
from tests.kernels.contract import (
    check_accumulators,
    check_chain,
    check_fresh_gradients,
    check_kernels,
    check_strided,
)
from tests.kernels.masks import MASKS, intervals_of, random_intervals
from tests.kernels.problems import STRIDED, make_blocks, make_dropout, make_problem

SIZES = (90, 140)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use small tiles, whose sizes divide no sequence length."""
    monkeypatch.setattr(blockwise, "QUERY_TILE", 25)
    monkeypatch.setattr(blockwise, "KEY_TILE", 33)


@every_pair(
    mask=MASKS,
    dropout=[False, True],
    blocks=[None, (1, 1), (2, 4)],
    heads=[(4, 2), (4, 4)],
    dtype=[torch.float32, torch.float16],
)
def test_results_match_the_reference(mask, dropout, blocks, heads, dtype):
    options = {"dropout": make_dropout(*SIZES)} if dropout else {}
    options |= {"blocks": make_blocks(*SIZES, shape=blocks)} if blocks else {}
    problem = make_problem(*intervals_of(mask, *SIZES), SIZES[1], dtype, 2, heads, (16, 24), **options)
    check_kernels(problem, blockwise, blockwise)


@pytest.mark.parametrize("tiles", [(256, 512), (7, 90)], ids=str)
def test_results_do_not_depend_on_the_tiles(tiles, monkeypatch):
    monkeypatch.setattr(blockwise, "QUERY_TILE", tiles[0])
    monkeypatch.setattr(blockwise, "KEY_TILE", tiles[1])
    check_kernels(make_problem(*random_intervals(*SIZES, seed=1, batch=2), SIZES[1], batch=2), blockwise, blockwise, floor=1.0)


@pytest.mark.parametrize("sizes", [(0, 20), (20, 0), (1, 63), (63, 1)], ids=str)
def test_sequences_without_or_with_one_token(sizes):
    check_kernels(make_problem(*intervals_of("full", *sizes), sizes[1]), blockwise, blockwise, floor=1.0)


@pytest.mark.parametrize("layout", STRIDED)
def test_inputs_may_have_any_strides(layout):
    check_strided(make_problem(*intervals_of("causal", 70, 70), 70, batch=2), layout, blockwise, blockwise)


@every_pair(mask=["causal", "documents", "empty-rows"], final=[False, True])
def test_chain_over_pieces_of_the_keys_equals_one_call(mask, final):
    check_chain(make_problem(*intervals_of(mask, 90, 110), 110), [0, 17, 60, 61, 110], final, blockwise)


def test_state_is_updated_in_place():
    problem = make_problem(*intervals_of("causal", 40, 40), 40)
    state = reference.empty_state(problem.q, problem.v.shape[-1])
    result = problem.forward(blockwise, state=state)
    assert all(x is y for x, y in zip(result, state, strict=True))
    assert_states_close(result, problem.double().forward(reference), 2e-5)


def test_gradients_are_added_to_the_accumulators():
    check_accumulators(make_problem(*intervals_of("causal", 40, 40), 40), blockwise)


def test_new_gradients_have_the_requested_dtype():
    check_fresh_gradients(make_problem(*intervals_of("causal", 40, 40), 40, torch.float16), blockwise)


@pytest.mark.parametrize("module", [reference, blockwise], ids=["reference", "blockwise"])
def test_precision_does_not_change_the_results_of_pytorch(module):
    problem = make_problem(*intervals_of("causal", 40, 40), 40)
    expected = problem.forward(module)
    problem.options["precision"] = "tf32"
    assert all(torch.equal(x, y) for x, y in zip(problem.forward(module), expected, strict=True))


def test_blocks_that_are_not_kept_are_not_computed(monkeypatch):
    """The reference is called once for each kept pair of blocks within the intervals."""
    blocks = make_blocks(256, 256)
    problem = make_problem(*intervals_of("causal", 256, 256), 256, blocks=blocks)
    calls = []
    forward = reference.forward
    monkeypatch.setattr(reference, "forward", lambda *args, **options: calls.append(1) or forward(*args, **options))
    problem.forward(blockwise)
    assert len(calls) == blocks.keep[0, 0].tril().sum()


@pytest.mark.slow
@settings(max_examples=50)
@given(st.integers(1, 140), st.integers(1, 140), st.integers(1, 2), st.sampled_from([(1, 1), (2, 1)]), st.integers(0, 2**32))
def test_random_intervals_match_the_reference(num_queries, num_keys, batch, heads, seed):
    lo, hi = random_intervals(num_queries, num_keys, seed, batch)
    check_kernels(make_problem(lo, hi, num_keys, batch=batch, heads=heads), blockwise, blockwise, floor=1.0)


def peak_memory(num_tokens: int, tile: int) -> int:
    """Return the peak memory of a causal forward and backward of `flash_attention` in bytes, without the inputs.

    Args:
        num_tokens: the length of the sequence.
        tile: the numbers of queries and of keys of a tile.
    """
    *inputs, dout = (torch.randn(1, num_tokens, 1, 8) for _ in range(4))
    for x in inputs:
        x.requires_grad_()

    def call() -> None:
        torch.autograd.grad(flash_attention(*inputs, is_causal=True, backend="blockwise"), inputs, dout)

    with tile_size(TileSize(tile, tile)):
        return measure.peak_bytes(call, torch.device("cpu"))


@pytest.mark.parametrize(("tile", "is_linear"), [(64, True), (10**9, False)], ids=("tile-of-64", "tile-of-10^9"))
def test_memory_is_linear_in_the_number_of_tokens(tile, is_linear):
    """Four times as many tokens need four times the memory, or 16 times the memory if one tile contains all tokens."""
    assert (peak_memory(512, tile) < 5 * peak_memory(128, tile)) == is_linear

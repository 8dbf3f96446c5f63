"""The Triton forward against the float64 reference: on a GPU, or in Triton's interpreter."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ringattn.kernels import interval_mask, reference
from ringattn.kernels.triton import backward as triton_backward
from ringattn.kernels.triton import forward as triton_forward
from tests.covering import every_pair, every_value
from tests.kernels.compare import SCALAR_TOLERANCE, TOLERANCE, assert_scalars_close, assert_states_close, max_row_error
from tests.kernels.contract import (
    check_chain,
    check_faults_are_caught,
    check_forward,
    check_heads_beyond_32_bits,
    check_kernels,
    check_offsets_beyond_32_bits,
    make_strided,
    without_keys,
)
from tests.kernels.masks import MASKS, intervals_of, packed_intervals, random_intervals
from tests.kernels.problems import STRIDED, make_blocks, make_dropout, make_problem
from tests.kernels.triton.problems import DTYPES, HEADS, QUICK_SHAPES, SHAPES, SIZES, SMALL_TILE, masked_problem, shaped_problem

pytestmark = pytest.mark.usefixtures("small_tiles")


@every_value(mask=MASKS, heads=HEADS, dropout=[False, True], blocks=[False, True], dtype=DTYPES)
def test_state_and_output_match_the_reference(mask, heads, dropout, blocks, dtype, device):
    problem = masked_problem(mask, heads, dropout, blocks, dtype, device)
    state, expected = problem.forward(triton_forward), problem.double().forward(reference)
    assert_states_close(state, expected, TOLERANCE[dtype])
    assert_scalars_close("m", state[0], expected[0], SCALAR_TOLERANCE)
    expected = reference.finalize(expected, torch.float64)
    assert_states_close(problem.forward(triton_forward, final=True), expected, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [pytest.param(x, marks=() if x in QUICK_SHAPES else pytest.mark.slow) for x in SHAPES])
def test_shapes_match_the_reference(shape, dtype, device):
    check_forward(shaped_problem(shape, dtype, device), triton_forward)


@pytest.mark.parametrize("layout", [STRIDED[0], *(pytest.param(layout, marks=pytest.mark.slow) for layout in STRIDED[1:])])
def test_inputs_may_have_any_strides(layout, device):
    problem = make_strided(make_problem(*intervals_of("causal", *SIZES), SIZES[1], batch=2, device=device), layout)
    check_forward(problem, triton_forward)


def test_batch_entries_may_have_different_intervals(device):
    bounds = random_intervals(*SIZES, seed=1, batch=2)
    check_forward(make_problem(*bounds, SIZES[1], batch=2, heads=(4, 2), device=device), triton_forward)


def test_tiles_end_where_documents_end(device, monkeypatch):
    """The first of two batch entries has more tiles than the second."""
    monkeypatch.setattr(interval_mask, "DOCUMENT_JUMP", 1)
    size = SMALL_TILE.queries
    bounds = packed_intervals([[size + 2, 5, size + 7], [2 * size + 14]])
    problem = make_problem(*bounds, 2 * size + 14, torch.float16, 2, heads=(1, 1), device=device)
    table = problem.intervals.tiles(SMALL_TILE.queries, SMALL_TILE.keys)
    assert table[0, -1, 1] > 0
    assert table[1, -1, 1] == 0
    check_forward(problem, triton_forward)


@every_pair(mask=["causal", "documents", "empty-rows"], final=[False, True])
def test_chain_over_pieces_of_the_keys_equals_one_call(mask, final, device):
    problem = make_problem(*intervals_of(mask, 40, 70), 70, device=device)
    check_chain(problem, [0, 17, 40, 41, 70], final, triton_forward)


@pytest.mark.slow
def test_chain_with_dropout_and_blocks_equals_one_call(device):
    sizes = (70, 200)
    options = dict(dropout=make_dropout(*sizes, device=device), blocks=make_blocks(*sizes, (1, 2), device=device))
    whole = make_problem(*intervals_of("window", *sizes), sizes[1], device=device, **options)
    state, queries = None, slice(0, sizes[0])
    for keys in (slice(0, 64), slice(64, 192), slice(192, 200)):
        part = {name: option.restrict(queries, keys) for name, option in options.items()}
        operands = whole.q, whole.k[:, keys], whole.v[:, keys], whole.intervals.restrict(queries, keys), whole.scale
        state = triton_forward.forward(*operands, state, keys.stop == sizes[1], **part)
    assert_states_close(state, whole.double().forward(reference, final=True), TOLERANCE[torch.float32])


def test_state_is_updated_in_place(device):
    problem = make_problem(*intervals_of("causal", 40, 40), 40, device=device)
    state = reference.empty_state(problem.q, problem.v.shape[-1])
    result = problem.forward(triton_forward, state=state)
    assert all(x.data_ptr() == y.data_ptr() for x, y in zip(result, state, strict=True))
    assert_states_close(result, problem.double().forward(reference), TOLERANCE[torch.float32])


@pytest.mark.parametrize("factor", [pytest.param(1e-3, marks=pytest.mark.slow), 30.0])
def test_large_and_small_scores_keep_their_precision(factor, device):
    """Scores reach some hundreds. The kernel must exponentiate only differences from the maximum."""
    problem = make_problem(*intervals_of("causal", *SIZES), SIZES[1], device=device)
    problem.q *= factor
    tolerances = (x * max(1.0, factor) for x in (TOLERANCE[torch.float32], SCALAR_TOLERANCE))
    expected = problem.double().forward(reference, final=True)
    assert_states_close(problem.forward(triton_forward, final=True), expected, *tolerances)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fault", ["one-key", "one-tile"])
def test_comparison_notices_missing_keys(fault, dtype, device):
    """Without the last key of one query, or without one tile of keys, out, lse and a gradient must differ."""
    problem = make_problem(*intervals_of("causal", 130, 130), 130, dtype, dims=(64, 64), device=device)
    faulty = without_keys(problem, fault, 96, 16)
    check_faults_are_caught(problem, faulty, triton_forward, triton_backward)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_comparison_notices_a_missing_rescale(dtype, device):
    """Write the final maximum of one query into its state between two calls, so that its state is not rescaled."""
    problem = make_problem(*intervals_of("full", 130, 130), 130, dtype, dims=(64, 64), device=device)
    expected, tolerance = problem.double(), TOLERANCE[dtype]
    errors = []
    for skip_rescale in (False, True):
        keys = slice(0, 65), slice(65, 130)
        first, second = (problem.intervals.restrict(slice(0, 130), part) for part in keys)
        state = triton_forward.forward(problem.q, problem.k[:, keys[0]], problem.v[:, keys[0]], first, problem.scale)
        if skip_rescale:
            maxima = expected.forward(reference)[0].float()
            growth = maxima - state[0]
            query = growth == growth[growth > 0].median()
            state[0][query] = maxima[query]
        out, _ = triton_forward.forward(
            problem.q, problem.k[:, keys[1]], problem.v[:, keys[1]], second, problem.scale, state, True
        )
        errors.append(max_row_error(out, expected.forward(reference, final=True)[0]))
    assert errors[0] <= tolerance < errors[1]


@pytest.mark.slow
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    *(st.integers(1, 100), st.integers(1, 100), st.integers(1, 2), st.sampled_from([(1, 1), (2, 1), (2, 2)])),
    *(st.booleans(), st.booleans(), st.booleans(), st.integers(0, 2**32)),
)
def test_random_problems_match_the_reference(
    device, num_queries, num_keys, batch, heads, dropout, blocks, one_block_mask, seed
):
    sizes = num_queries, num_keys
    options = {"dropout": make_dropout(*sizes, seed, device)} if dropout else {}
    if blocks:
        options["blocks"] = make_blocks(*sizes, (1, 1) if one_block_mask else (batch, heads[0]), seed=seed, device=device)
    lo, hi = random_intervals(*sizes, seed, batch)
    problem = make_problem(lo, hi, num_keys, batch=batch, heads=heads, device=device, **options)
    check_kernels(problem, triton_forward, triton_backward, floor=1.0)


@pytest.mark.gpu
def test_offsets_beyond_32_bits(device):
    check_offsets_beyond_32_bits(triton_forward, device)


def test_heads_beyond_32_bits(device):
    check_heads_beyond_32_bits(triton_forward, triton_backward, 16, device)


class TestUsualTiles:
    """The tile sizes that training uses."""

    @pytest.fixture
    def small_tiles(self) -> None:
        """Replace the fixture of the same name, which this module uses."""

    @every_pair(dim=[16, 64, 128, 256], dtype=DTYPES)
    def test_every_head_dim_matches_the_reference(self, dim, dtype, device):
        sizes = (150, 150)
        check_forward(make_problem(*intervals_of("causal", *sizes), 150, dtype, 1, (1, 1), (dim, dim), device), triton_forward)

    @pytest.mark.slow
    @pytest.mark.parametrize("size", [64, 192, 256])
    def test_every_block_size_matches_the_reference(self, size, device):
        options = dict(dropout=make_dropout(300, 300, device=device), blocks=make_blocks(300, 300, size=size, device=device))
        problem = make_problem(*intervals_of("causal", 300, 300), 300, torch.float16, 1, (1, 1), device=device, **options)
        check_kernels(problem, triton_forward, triton_backward)

    @pytest.mark.gpu
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_long_odd_lengths_match_the_reference(self, dtype, device):
        problem = make_problem(*intervals_of("causal", 2049, 3001), 3001, dtype, 1, (4, 2), (128, 128), device)
        check_kernels(problem, triton_forward, triton_backward)

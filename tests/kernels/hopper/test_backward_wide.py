"""The Hopper backward for head dims above 128 against the float64 reference on an sm_90 GPU.

Without a GPU, the source of the kernels runs in an emulator, see `tests.kernels.gluon_emulator`.
"""

import pytest
import torch

from ringattn.kernels import reference
from ringattn.kernels.hopper import backward as hopper_backward
from ringattn.kernels.hopper import backward_common, backward_rows, backward_wide, column_parts
from ringattn.kernels.interval_mask import DOCUMENT_JUMP
from tests.covering import every_pair
from tests.kernels.compare import TOLERANCE, assert_rows_close
from tests.kernels.contract import (
    check_accumulators,
    check_backward,
    check_delta_as_out,
    check_fresh_gradients,
    check_incremental,
    make_strided,
)
from tests.kernels.gluon_emulator import emulated
from tests.kernels.hopper.conftest import DTYPES
from tests.kernels.masks import MASKS, intervals_of, packed_intervals, random_intervals
from tests.kernels.problems import GRADIENTS, STRIDED, make_problem

# Head dims (D, Dv): those of the two kinds of tiles, and some that are padded.
TILES = [(256, 256), (192, 128)]
DIMS = [*TILES, (136, 72), (200, 136), (64, 160), (160, 8)]

SHAPES = [(1, 63), (63, 1), (63, 63), (130, 111), (129, 129), (300, 1000), (1000, 300)]  # (Nq, Nk)


@pytest.mark.parametrize("given", ["delta", "out", "out and dlse"])
def test_prepare_packs_lse_and_delta(given, device):
    batch, num_queries, heads, dims = 2, 150, 3, (192, 72)
    config = hopper_backward.configure(dims, (heads, heads), (False, False, False))
    padded = -(-num_queries // config.queries) * config.queries
    generator = torch.Generator().manual_seed(0)
    shape = batch, num_queries, heads
    out, dout = (torch.randn(*shape, dims[1], generator=generator, dtype=torch.float16).to(device) for _ in range(2))
    lse, dlse = (torch.randn(shape, generator=generator).to(device) for _ in range(2))
    lse[:, 7] = float("-inf")
    delta = reference.row_delta(out, dout, dlse if given == "out and dlse" else None)
    rows = {"delta": (delta, None, None, None), "out": (None, out, dout, None), "out and dlse": (None, out, dout, dlse)}
    packed = [torch.full((batch * heads, padded), float("nan"), device=device) for _ in range(2)]
    num_blocks = padded // backward_rows.PREPARED_ROWS.value
    backward_rows._prepare_wide_kernel[(batch * heads * num_blocks,)](
        lse, *rows[given], *packed, num_blocks, num_queries, CONFIG=config
    )

    log2_lse, row_delta = (x.view(batch, heads, padded).transpose(1, 2) for x in packed)
    expected = torch.where(lse == float("-inf"), float("inf"), lse / torch.log(torch.tensor(2.0)))
    torch.testing.assert_close(log2_lse[:, :num_queries], expected)
    torch.testing.assert_close(row_delta[:, :num_queries], delta, rtol=1e-4, atol=1e-4)
    # Queries that do not exist get lse = inf, so that their probabilities are 0.
    assert (log2_lse[:, num_queries:] == float("inf")).all()


def test_head_dims_are_padded_to_the_nearest_tiles():
    padded = [(x.dim, x.padded_value_dim) for x in (hopper_backward.configure(dims, (4, 2), (False,) * 3) for dims in DIMS)]
    assert padded == [(256, 256), (192, 128), (192, 128), (256, 256), (256, 256), (192, 128)]


# Masks and the heads of each.
EMULATED = {
    "causal": (intervals_of("causal", 150, 230), (4, 2)),
    "random": (random_intervals(170, 200, seed=1, batch=2), (2, 1)),
    "documents": (packed_intervals([[300, 37, 2], [339]]), (2, 2)),
}


@every_pair(mask=EMULATED, dims=TILES, add=[False, True])
def test_source_of_the_kernels_computes_the_gradients(mask, dims, add):
    """In float64, a missing key or a tile that is overwritten too early would change a gradient by far more than 1e-9."""
    (lo, hi), heads = EMULATED[mask]
    num_keys = 230 if mask == "causal" else 339 if mask == "documents" else 200
    problem = make_problem(lo, hi, num_keys, torch.float16, lo.shape[0], heads, dims).double()
    start = [torch.randn_like(x) if add else torch.zeros_like(x) for x in (problem.q, problem.k, problem.v)]
    accumulators = dict(zip(GRADIENTS, [x.clone() for x in start], strict=True)) if add else {}
    with emulated(hopper_backward, 3, [backward_common, column_parts, backward_wide]):
        actual = problem.gradients(hopper_backward, grad_dtype=torch.float64, **accumulators)
    for name, x, y, expected in zip(GRADIENTS, actual, start, problem.backward(reference), strict=True):
        torch.testing.assert_close(x - y, expected, rtol=0, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}")


@every_pair(mask=MASKS, dims=TILES, dtype=DTYPES, heads=[(2, 2), (6, 2)])
def test_masks(mask, dims, dtype, heads, hopper):
    check_backward(make_problem(*intervals_of(mask, 500, 630), 630, dtype, 2, heads, dims, hopper), hopper_backward)


@every_pair(sizes=SHAPES, dims=DIMS)
def test_shapes(sizes, dims, hopper):
    problem = make_problem(*intervals_of("window", *sizes), sizes[1], torch.bfloat16, 1, (2, 1), dims, hopper)
    check_backward(problem, hopper_backward, floor=1.0 if sizes[1] == 1 else 1e-30)


@pytest.mark.parametrize("dims", TILES, ids=str)
def test_each_batch_entry_has_its_own_intervals(dims, hopper):
    bounds = random_intervals(370, 490, seed=1, batch=3)
    check_backward(make_problem(*bounds, 490, torch.float16, 3, (6, 2), dims, hopper), hopper_backward, floor=1.0)


@pytest.mark.parametrize("dims", TILES, ids=str)
def test_tiles_end_at_document_boundaries(dims, hopper):
    size = DOCUMENT_JUMP * 192
    documents = [[size + 2, 37, size + 139, 1], [2 * size + 179], [1, size + 70, 2, size + 106]]
    problem = make_problem(*packed_intervals(documents), 2 * size + 179, torch.bfloat16, 3, (4, 2), dims, hopper)
    check_backward(problem, hopper_backward)


@pytest.mark.parametrize("dims", TILES, ids=str)
def test_many_work_tiles_per_program(dims, hopper):
    """Programs have several work tiles of all lengths. One work tile per program gives the same bits, as does a second run."""
    documents = [[700, 2, 130, 65, 1800, 31], [2728], [1, 1, 1000, 900, 826]]
    problem = make_problem(*packed_intervals(documents), 2728, torch.bfloat16, 3, (18, 9), dims, hopper)
    first, second, one_each = (
        problem.gradients(hopper_backward, grad_dtype=torch.float32, shares_sms=shares) for shares in (False, False, True)
    )
    for name, x, y, z, expected in zip(GRADIENTS, first, second, one_each, problem.double().backward(reference), strict=True):
        assert_rows_close(name, x, expected, TOLERANCE[torch.bfloat16])
        assert torch.equal(x, y)
        assert torch.equal(x, z)


@pytest.mark.parametrize("all_keys", [False, True], ids=["some-keys", "all-keys"])
def test_rows_with_empty_intervals_have_gradient_zero(all_keys, hopper):
    """The gradient is 0 even where such a key is NaN."""
    hi = torch.zeros(1, 300, dtype=torch.int32) if all_keys else (torch.arange(300, dtype=torch.int32)[None] - 50).clamp(min=0)
    problem = make_problem(torch.zeros_like(hi), hi, 700, torch.float16, dims=(192, 128), device=hopper)
    problem.k[:, 384:] = problem.v[:, 384:] = float("nan")
    dq, dk, dv = problem.backward(hopper_backward)
    assert not dq.isnan().any()
    assert not dq[:, :51].any()
    assert not dk[:, 300:].any()
    assert not dv[:, 300:].any()


@pytest.mark.parametrize("layout", STRIDED)
def test_strided_inputs(layout, hopper):
    problem = make_problem(*intervals_of("causal", 270, 270), 270, torch.float16, 2, dims=(256, 256), device=hopper)
    check_backward(make_strided(problem, layout), hopper_backward)


@pytest.mark.parametrize("dims", TILES, ids=str)
def test_gradients_are_added_to_accumulators(dims, hopper):
    check_accumulators(
        make_problem(*intervals_of("causal", 340, 340), 340, torch.float16, dims=dims, device=hopper), hopper_backward
    )


def test_new_gradients_have_the_requested_dtype(hopper):
    problem = make_problem(*intervals_of("causal", 340, 340), 340, torch.float16, dims=(192, 128), device=hopper)
    check_fresh_gradients(problem, hopper_backward)


@every_pair(mask=MASKS, dims=TILES)
def test_incremental_backward_over_blocks_of_keys(mask, dims, hopper):
    problem = make_problem(*intervals_of(mask, 410, 410), 410, torch.bfloat16, 2, (4, 2), dims, hopper)
    queries = problem.q, problem.dout, problem.lse, problem.delta
    check_incremental(problem, [0, 17, 160, 161, 410], hopper_backward.incremental(*queries, problem.scale))


def test_delta_may_be_given_as_out_and_dlse(hopper):
    problem = make_problem(*intervals_of("causal", 340, 340), 340, torch.bfloat16, 2, (4, 2), (256, 256), hopper)
    check_delta_as_out(problem, hopper_backward, with_dlse=True)


def test_incremental_backward_rejects_dropout():
    q, lse = torch.zeros(1, 2, 1, 256), torch.zeros(1, 2, 1)
    with pytest.raises(ValueError, match="plain=False"):
        hopper_backward.incremental(q, q, lse, lse, 1.0).add(q, q, None, dropout=object())

"""The Triton backward against the float64 reference: on a GPU, or in Triton's interpreter."""

import math

import pytest
import torch
import triton
import triton.language as tl

from ringattn.kernels import interval_mask, reference
from ringattn.kernels.triton import backward as triton_backward
from tests.covering import every_pair, every_value
from tests.kernels.compare import TOLERANCE, assert_rows_close
from tests.kernels.contract import check_accumulators, check_backward, check_fresh_gradients, make_strided
from tests.kernels.masks import MASKS, intervals_of, packed_intervals, random_intervals
from tests.kernels.problems import GRADIENTS, STRIDED, make_blocks, make_dropout, make_problem, spread_heads
from tests.kernels.triton.problems import DTYPES, HEADS, QUICK_SHAPES, SHAPES, SIZES, SMALL_TILE, masked_problem, shaped_problem

pytestmark = pytest.mark.usefixtures("small_tiles")


@every_value(mask=MASKS, heads=HEADS, dropout=[False, True], blocks=[False, True], dtype=DTYPES)
def test_gradients_match_the_reference(mask, heads, dropout, blocks, dtype, device):
    check_backward(masked_problem(mask, heads, dropout, blocks, dtype, device), triton_backward)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [pytest.param(x, marks=() if x in QUICK_SHAPES else pytest.mark.slow) for x in SHAPES])
def test_shapes_match_the_reference(shape, dtype, device):
    problem = shaped_problem(shape, dtype, device)
    check_backward(problem, triton_backward, floor=1.0 if problem.k.shape[1] == 1 else 1e-30)


@pytest.mark.parametrize("layout", [STRIDED[0], *(pytest.param(layout, marks=pytest.mark.slow) for layout in STRIDED[1:])])
def test_inputs_may_have_any_strides(layout, device):
    problem = make_strided(make_problem(*intervals_of("causal", *SIZES), SIZES[1], batch=2, device=device), layout)
    check_backward(problem, triton_backward)


def test_batch_entries_may_have_different_intervals(device):
    bounds = random_intervals(*SIZES, seed=1, batch=2)
    problem = make_problem(*bounds, SIZES[1], batch=2, heads=(4, 2), device=device)
    check_backward(problem, triton_backward, floor=1.0)


@pytest.mark.slow
def test_tiles_end_where_documents_end(device, monkeypatch):
    """The first of two batch entries has more tiles than the second."""
    monkeypatch.setattr(interval_mask, "DOCUMENT_JUMP", 1)
    size = SMALL_TILE.queries
    bounds = packed_intervals([[size + 2, 5, size + 7], [2 * size + 14]])
    problem = make_problem(*bounds, 2 * size + 14, torch.float16, 2, heads=(1, 1), device=device)
    table = problem.intervals.transposed.tiles(SMALL_TILE.keys, SMALL_TILE.queries)
    assert table[0, -1, 1] > 0
    assert table[1, -1, 1] == 0
    check_backward(problem, triton_backward)


def test_gradients_are_added_to_the_accumulators(device):
    check_accumulators(make_problem(*intervals_of("causal", *SIZES), SIZES[1], device=device), triton_backward)


def test_new_gradients_have_the_requested_dtype(device):
    problem = make_problem(*intervals_of("causal", *SIZES), SIZES[1], torch.float16, device=device)
    check_fresh_gradients(problem, triton_backward)


def test_gradients_have_the_same_bits_in_every_run(device):
    problem = make_problem(*intervals_of("documents", *SIZES), SIZES[1], torch.float16, heads=(2, 1), device=device)
    for x, y in zip(problem.backward(triton_backward), problem.backward(triton_backward), strict=True):
        assert torch.equal(x, y)


@pytest.mark.slow
def test_gradients_of_pieces_with_dropout_and_blocks_add_up(device):
    sizes = (70, 200)
    options = dict(dropout=make_dropout(*sizes, device=device), blocks=make_blocks(*sizes, (1, 2), device=device))
    whole = make_problem(*intervals_of("window", *sizes), sizes[1], device=device, **options)
    gradients, queries = [torch.zeros_like(x) for x in (whole.q, whole.k, whole.v)], slice(0, sizes[0])
    for keys in (slice(0, 64), slice(64, 192), slice(192, 200)):
        part = {name: option.restrict(queries, keys) for name, option in options.items()}
        operands = whole.q, whole.k[:, keys].contiguous(), whole.v[:, keys].contiguous()
        intervals = whole.intervals.restrict(queries, keys)
        dq, gradients[1][:, keys], gradients[2][:, keys] = triton_backward.backward(
            *operands, whole.dout, whole.lse, whole.delta, intervals, whole.scale, **part
        )
        gradients[0] += dq
    for name, x, y in zip(GRADIENTS, gradients, whole.double().backward(reference), strict=True):
        assert_rows_close(name, x, y, TOLERANCE[torch.float32])


@pytest.mark.gpu
def test_tf32_keeps_eleven_bits_of_the_operands(device):
    problem = make_problem(*intervals_of("causal", 300, 300), 300, dims=(64, 64), device=device)
    expected = problem.double().backward(reference)
    problem.options["precision"] = "tf32"
    for x, y in zip(problem.backward(triton_backward), expected, strict=True):
        assert_rows_close("gradient", x, y, 16 * 2**-10)  # the hardware truncates the operands instead of rounding them


@pytest.mark.parametrize(
    ("tokens", "heads", "batch"), [(1, 1, 1), pytest.param(700, 3, 2, marks=pytest.mark.slow), (64, 16, 1), (127, 40, 2)]
)
def test_stats_hold_lse_and_delta_side_by_side(tokens, heads, batch, device):
    lse, delta = torch.randn(2, batch, tokens, heads, device=device)
    expected = torch.stack([lse / math.log(2), delta], -1).transpose(1, 2).contiguous()
    torch.testing.assert_close(triton_backward._interleave(lse, delta), expected)


@triton.jit
def _add_ones_kernel(x, NUM_HEADS: tl.constexpr):
    triton_backward._store_rows(x, tl.full([32, 16], 1.0, tl.float32), tl.program_id(0), 17, NUM_HEADS, 32, 16, True)


def test_rows_of_many_heads_beyond_32_bits(device):
    """The last of 17 rows of one head lies 2**31 elements behind the first row."""
    x = spread_heads(torch.zeros(1, 1, 17, 16, device=device), 2**27)
    x[..., 0] += torch.arange(17, device=device)
    before = x.clone()
    _add_ones_kernel[(1,)](x, NUM_HEADS=2**23)
    torch.testing.assert_close(x, before + 1, rtol=0, atol=0)


@every_pair(dtype=DTYPES, value_dim=[16, 48, 128], with_dlse=[True, False])
def test_row_delta_matches_the_reference(with_dlse, value_dim, dtype, device):
    """The last tile of 57 queries and 3 heads is not full, and out is not contiguous."""
    out, dout = (torch.randn(1, 3, 57, value_dim, device=device).to(dtype).transpose(1, 2) for _ in range(2))
    dlse = torch.randn(1, 57, 3, device=device) if with_dlse else None
    exact = reference.row_delta(out.double(), dout.double(), dlse)
    torch.testing.assert_close(triton_backward.row_delta(out, dout, dlse), exact.float(), rtol=1e-5, atol=1e-5)


class TestUsualTiles:
    """The tile sizes that training uses."""

    @pytest.fixture
    def small_tiles(self) -> None:
        """Replace the fixture of the same name, which this module uses."""

    @every_pair(dim=[16, 64, 128, 256], dtype=DTYPES)
    def test_every_head_dim_matches_the_reference(self, dim, dtype, device):
        problem = make_problem(*intervals_of("causal", 150, 150), 150, dtype, 1, (1, 1), (dim, dim), device)
        check_backward(problem, triton_backward)

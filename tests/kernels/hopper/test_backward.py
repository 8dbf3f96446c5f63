"""The Hopper backward against the float64 reference on an sm_90 GPU.

Without a GPU, its plain Triton kernels run in Triton's interpreter, and its Gluon kernel runs in an emulator, see
`tests.kernels.gluon_emulator`.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ringattn.kernels import reference
from ringattn.kernels.hopper import backward as hopper_backward
from ringattn.kernels.hopper import backward_common, backward_narrow, backward_rows, column_parts, dq_order
from ringattn.kernels.interval_mask import DOCUMENT_JUMP
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
from tests.kernels.hopper.conftest import DTYPES, SHAPES
from tests.kernels.masks import MASKS, intervals_of, packed_intervals, random_intervals
from tests.kernels.problems import GRADIENTS, STRIDED, make_problem

BATCH, HEADS = 2, 3
KEYS = hopper_backward.KEYS.value


def configure(dims: tuple[int, int], add_dq: bool = False) -> hopper_backward.NarrowConfig:
    return hopper_backward.configure(dims, (HEADS, HEADS), (add_dq, False, False))


def prepare(config: hopper_backward.NarrowConfig, lse: Tensor, *rows: Tensor | None) -> tuple[Tensor, Tensor]:
    """Run `_prepare_kernel` on memory filled with NaN.

    Returns:
        scalars (B, H, tiles, 2, queries of a tile), and dq_sums, flat, with the spare chunk first.
    """
    num_queries = lse.shape[1]
    num_tiles = -(-num_queries // config.queries)
    scalars = torch.full((BATCH, HEADS, num_tiles, 2, config.queries), float("nan"), device=lse.device)
    size = config.chunk_size + BATCH * HEADS * num_tiles * config.queries * config.dim
    dq_sums = torch.full((size,), float("nan"), device=lse.device)
    backward_rows._prepare_kernel[(BATCH * HEADS * num_tiles,)](
        lse, *rows, scalars, dq_sums, num_tiles, num_queries, CONFIG=config
    )
    return scalars, dq_sums


@pytest.mark.parametrize("given", ["delta", "out", "out and dlse"])
@pytest.mark.parametrize("dims", [(128, 120), (80, 96), (64, 64)], ids=str)
def test_prepare_packs_scalars_and_clears_the_sums(dims, given, device):
    num_queries = 150
    config = configure(dims)
    generator = torch.Generator().manual_seed(0)
    shape = BATCH, num_queries, HEADS
    out, dout = (torch.randn(*shape, dims[1], generator=generator, dtype=torch.float16).to(device) for _ in range(2))
    lse, dlse = (torch.randn(shape, generator=generator).to(device) for _ in range(2))
    lse[:, 7] = float("-inf")
    delta = reference.row_delta(out, dout, dlse if given == "out and dlse" else None)
    rows = {"delta": (delta, None, None, None), "out": (None, out, dout, None), "out and dlse": (None, out, dout, dlse)}
    scalars, dq_sums = prepare(config, lse, *rows[given])

    by_row = scalars.transpose(2, 3).flatten(3)[..., :num_queries].permute(2, 0, 3, 1)
    expected = torch.where(lse == float("-inf"), float("inf"), lse / torch.log(torch.tensor(2.0)))
    torch.testing.assert_close(by_row[0], expected)
    torch.testing.assert_close(by_row[1], delta, rtol=1e-4, atol=1e-4)
    # Queries that do not exist get lse = inf, so that their probabilities are 0.
    assert (scalars[:, :, -1, 0, num_queries % config.queries :] == float("inf")).all()
    sums = dq_sums[config.chunk_size :].view(-1, 2 * config.chunk_size)
    assert dq_sums[: config.chunk_size].isnan().all()
    assert (sums[:, : config.used_size] == 0).all()
    # If the head dim is at most 96, the last columns of a tile are unused.
    assert sums[:, config.used_size :].isnan().all()


def register_order(columns: int) -> Tensor:
    """Return (row, column) of each element of a dQ (64, columns), as (size, 2), in the order in which the registers hold them.

    The order is that of a wgmma accumulator: a lane has two neighbouring columns of two rows at a distance of 8.
    """
    sizes = (columns // 8, 4, 8, 4, 2, 2)
    group, warp, row, lane, row_half, column = torch.meshgrid(*map(torch.arange, sizes), indexing="ij")
    return torch.stack((16 * warp + 8 * row_half + row, 8 * group + 2 * lane + column), -1).view(-1, 2)


@pytest.mark.parametrize("columns", [32, 64])
def test_tma_restores_the_order_of_registers(columns):
    """The staging layout contains the swizzle that TMA removes on the way to global memory.

    TMA's 128-byte swizzle stores element i of a tile in fp32 at i ^ ((i >> 5 & 7) << 2), counted in elements.
    """
    bases = torch.tensor(backward_narrow.staging_layout(columns).offset_bases)
    elements = torch.arange(64 * columns)
    offsets = elements ^ ((elements >> 5 & 7) << 2)
    positions = torch.zeros(64 * columns, 2, dtype=torch.int64)
    for bit, basis in enumerate(bases):
        positions ^= (offsets >> bit & 1)[:, None] * basis
    assert torch.equal(positions, register_order(columns))


@pytest.mark.parametrize(("dims", "columns"), [((96, 80), (64, 32)), ((104, 96), (64, 64)), ((64, 64), (64, 64))], ids=str)
def test_only_the_chunk_with_unused_columns_is_narrower(dims, columns):
    """The narrow chunk is the first half of a whole chunk, so that `_finish_kernel` reads both in the same way."""
    config = configure(dims)
    assert tuple(backward_narrow.dq_columns(config, consumer) for consumer in (0, 1)) == columns
    narrow = register_order(32)
    assert torch.equal(register_order(64)[: len(narrow)], narrow)


@pytest.mark.parametrize("add", [False, True], ids=["write", "add"])
@pytest.mark.parametrize("dims", [(128, 128), (120, 64), (96, 96), (64, 64)], ids=str)
def test_finish_restores_the_order_of_rows(dims, add, device):
    num_queries, scale = 150, 0.125
    config = configure(dims, add)
    num_tiles = -(-num_queries // config.queries)
    expected = torch.randn(BATCH, HEADS, num_tiles * config.queries, config.dim, device=device)
    # The two chunks of a query tile are its halves: by columns if it has 64 rows, by rows if it has 128.
    tiles = expected.unflatten(2, (num_tiles, config.queries))
    halves = tiles.split(config.chunk_columns, -1) if config.queries == 64 else tiles.split(64, -2)
    rows, columns = register_order(config.chunk_columns).to(device).unbind(-1)
    chunks = torch.stack(halves, 3)[..., rows, columns].flatten(3)
    chunks[..., config.used_size :] = float("nan")
    dq_sums = torch.cat((torch.full((config.chunk_size,), float("nan"), device=device), chunks.flatten()))
    start = torch.randn(BATCH, num_queries, HEADS, dims[0], device=device)
    dq = start.clone()
    backward_rows._finish_kernel[(2 * BATCH * HEADS * num_tiles,)](
        dq_sums, dq, num_tiles, num_queries, scale, CONFIG=config
    )  # fmt: skip

    expected = scale * expected[:, :, :num_queries, : dims[0]].transpose(1, 2) + (start if add else 0)
    torch.testing.assert_close(dq, expected)


@pytest.mark.parametrize(("dim", "mask", "most_queries"), [(64, "window", 100), (96, "documents", 0), (128, "causal", 1000)])
def test_source_of_the_kernels_computes_the_gradients(dim, mask, most_queries, monkeypatch):
    """In float64, a missing key or a tile that is overwritten too early would change a gradient by far more than 1e-9."""
    monkeypatch.setattr(hopper_backward, "MOST_QUERIES_TO_SKIP", most_queries)
    problem = make_problem(*intervals_of(mask, 140, 260), 260, torch.float16, 1, (4, 2), (dim, dim)).double()
    with emulated(hopper_backward, 3, [column_parts, dq_order, backward_common, backward_narrow]):
        actual = problem.gradients(hopper_backward, grad_dtype=torch.float64)
    for name, x, expected in zip(GRADIENTS, actual, problem.backward(reference), strict=True):
        torch.testing.assert_close(x, expected, rtol=0, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64], ids=str)
def test_descriptors_do_not_depend_on_the_default_dtype(default):
    create = hopper_backward._scratch_descriptors.__wrapped__, hopper_backward._scalar_descriptor.__wrapped__
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        descriptors = *create[0](4, configure((64, 64))), create[1](1024, 64)
    finally:
        torch.set_default_dtype(before)
    assert {x.base.dtype for x in descriptors} == {torch.float32}


def test_short_sequences_have_many_heads_per_group():
    """The sums of dq of a group then stay in the L2 cache."""
    assert [hopper_backward._heads_per_group(n) for n in (1024, 8192, 16384)] == [32, 4, 1]


@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask, dtype, dim, hopper):
    check_backward(make_problem(*intervals_of(mask, 500, 630), 630, dtype, dims=(dim, dim), device=hopper), hopper_backward)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape, dtype, hopper):
    sizes, heads, dims, batch = SHAPES[shape]
    problem = make_problem(*intervals_of("window", *sizes), sizes[1], dtype, batch, heads, dims, hopper)
    check_backward(problem, hopper_backward, floor=1.0 if sizes[1] == 1 else 1e-30)


@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize("length", [1000, 1536, 4097])
def test_lengths(length, dim, hopper):
    mask = intervals_of("causal", length, length)
    check_backward(make_problem(*mask, length, torch.bfloat16, dims=(dim, dim), device=hopper), hopper_backward)


@pytest.mark.parametrize("batch", [1, 3])
def test_each_batch_entry_has_its_own_intervals(batch, hopper):
    bounds = random_intervals(370, 490, seed=1, batch=batch)
    problem = make_problem(*bounds, 490, torch.float16, batch, (6, 2), (64, 64), hopper)
    check_backward(problem, hopper_backward, floor=1.0)


@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tiles_end_at_document_boundaries(dtype, dim, hopper):
    """The three batch entries have different numbers of tiles. Some tiles end within the first keys of a consumer."""
    size = DOCUMENT_JUMP * 192
    documents = [[size + 2, 37, size + 139, 1], [2 * size + 179], [1, size + 70, 2, size + 106]]
    problem = make_problem(*packed_intervals(documents), 2 * size + 179, dtype, 3, (4, 2), (dim, dim), hopper)
    check_backward(problem, hopper_backward)


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("dim", [64, 96, 128])
def test_many_work_tiles_per_program(dim, group, hopper, num_sms):
    """Programs have more than three work tiles each, of all lengths. One work tile per program gives the same result."""
    documents = [[700, 2, 130, 65, 1800, 31], [2728], [1, 1, 1000, 900, 826]]
    mask = packed_intervals(documents)
    problem = make_problem(*mask, 2728, torch.bfloat16, 3, (9 * group, 9), (dim, dim), hopper)
    assert 3 * 9 * problem.intervals.transposed.tiles(KEYS, configure((dim, dim)).queries).shape[1] > 3 * num_sms
    expected = problem.double().backward(reference)
    for shares_sms in (False, True):
        actual = problem.gradients(hopper_backward, grad_dtype=torch.float32, shares_sms=shares_sms)
        for name, x, y in zip(GRADIENTS, actual, expected, strict=True):
            assert_rows_close(name, x, y, TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("dim", [64, 96, 128])
def test_many_work_tiles_of_one_step(dim, hopper, num_sms):
    """The keys of a work tile are read until the next work tile has finished its only step. Their slot must wait."""
    num_keys = num_sms * KEYS + 40
    mask = intervals_of("full", 60, num_keys)
    check_backward(make_problem(*mask, num_keys, torch.bfloat16, 1, (4, 4), (dim, dim), hopper), hopper_backward)


@pytest.mark.parametrize("all_keys", [False, True], ids=["some-keys", "all-keys"])
def test_keys_that_no_query_sees_have_gradient_zero(all_keys, hopper):
    """The gradient is 0 even where such a key is NaN."""
    hi = torch.zeros(1, 300, dtype=torch.int32) if all_keys else torch.arange(1, 301, dtype=torch.int32)[None]
    problem = make_problem(torch.zeros_like(hi), hi, 700, torch.float16, dims=(64, 64), device=hopper)
    problem.k[:, 384:] = problem.v[:, 384:] = float("nan")
    dq, dk, dv = problem.backward(hopper_backward)
    assert not dq.isnan().any()
    assert not dk[:, 300:].any()
    assert not dv[:, 300:].any()


@pytest.mark.parametrize("layout", STRIDED)
def test_strided_inputs(layout, hopper):
    problem = make_problem(*intervals_of("causal", 270, 270), 270, torch.float16, 2, dims=(64, 64), device=hopper)
    check_backward(make_strided(problem, layout), hopper_backward)


def test_gradients_are_added_to_accumulators(hopper):
    problem = make_problem(*intervals_of("causal", 340, 340), 340, torch.float16, dims=(128, 128), device=hopper)
    check_accumulators(problem, hopper_backward)


def test_new_gradients_have_the_requested_dtype(hopper):
    problem = make_problem(*intervals_of("causal", 340, 340), 340, torch.float16, dims=(64, 64), device=hopper)
    check_fresh_gradients(problem, hopper_backward)


@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize("mask", MASKS)
def test_incremental_backward_over_blocks_of_keys(mask, dim, hopper):
    problem = make_problem(*intervals_of(mask, 410, 410), 410, torch.bfloat16, 2, (4, 2), (dim, dim), hopper)
    queries = problem.q, problem.dout, problem.lse, problem.delta
    check_incremental(problem, [0, 17, 160, 161, 410], hopper_backward.incremental(*queries, problem.scale))


@pytest.mark.parametrize("dim", [64, 120])
@pytest.mark.parametrize("with_dlse", [False, True], ids=["out", "out-and-dlse"])
def test_delta_may_be_given_as_out_and_dlse(with_dlse, dim, hopper):
    problem = make_problem(*intervals_of("causal", 340, 340), 340, torch.bfloat16, 2, (4, 2), (dim, dim), hopper)
    check_delta_as_out(problem, hopper_backward, with_dlse)


def test_incremental_backward_rejects_dropout():
    q, lse = torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1)
    with pytest.raises(ValueError, match="plain=False"):
        hopper_backward.incremental(q, q, lse, lse, 1.0).add(q, q, None, dropout=object())


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(1, 700),
    st.integers(1, 700),
    st.integers(1, 2),
    st.sampled_from([(1, 1), (2, 1)]),
    st.sampled_from(DTYPES),
    st.integers(0, 2**32),
)
def test_random_intervals(hopper, num_queries, num_keys, batch, heads, dtype, seed):
    lo, hi = random_intervals(num_queries, num_keys, seed, batch)
    check_backward(make_problem(lo, hi, num_keys, dtype, batch, heads, (64, 64), hopper), hopper_backward, floor=1.0)

"""The Triton kernels against the float64 reference: on the GPU, or in Triton's interpreter."""

import math
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ringattn.kernels import reference
from ringattn.kernels.interval_mask import CUT, Intervals, full
from ringattn.kernels.triton import backward as triton_backward
from ringattn.kernels.triton import common as triton_common
from ringattn.kernels.triton import forward as triton_forward
from tests.kernels.compare import SCALAR_TOLERANCE, TOLERANCE, assert_scalars_close, assert_states_close, max_row_error
from tests.kernels.conftest import SMALL_TILE
from tests.kernels.contract import (
    check_accumulators,
    check_chain,
    check_faults_are_caught,
    check_fresh_gradients,
    check_kernels,
    check_offsets_beyond_32_bits,
    check_strided,
)
from tests.kernels.masks import MASKS, intervals_of, packed_intervals, random_intervals
from tests.kernels.problems import STRIDED, Problem, make_problem

ON_GPU = torch.cuda.is_available()
# the interpreter computes bf16 wrongly
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * ON_GPU

SHAPES = {  # (Nq, Nk), (Hq, Hkv), (D, Dv), batch
    "one-query": ((1, 63), (2, 1), (64, 64), 1),
    "one-key": ((63, 1), (2, 1), (64, 64), 1),
    "63": ((63, 63), (4, 2), (16, 16), 2),
    "111x130": ((111, 130), (3, 1), (80, 80), 1),
    "130x111": ((130, 111), (2, 2), (64, 48), 1),
    "128": ((128, 128), (2, 1), (128, 128), 1),
    "value-dim-wider": ((65, 65), (2, 1), (16, 96), 1),
    "many-heads": ((40, 40), (10, 5), (16, 16), 2),
}


def check_all(problem: Problem, floor: float = 1e-30) -> None:
    check_kernels(problem, triton_forward, triton_backward, floor)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask, dtype, device):
    check_all(make_problem(*intervals_of(mask, 100, 130), 130, dtype, device=device))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape, dtype, device):
    rows, heads, dims, batch = SHAPES[shape]
    problem = make_problem(*intervals_of("window", *rows), rows[1], dtype, batch, heads, dims, device)
    check_all(problem, floor=1.0 if rows[1] == 1 else 1e-30)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [16, 64, 128, 256])
def test_tiles_of_the_table(dim, dtype, device):
    check_all(make_problem(*intervals_of("causal", 150, 150), 150, dtype, heads=(1, 1), dims=(dim, dim), device=device))


@pytest.mark.parametrize(("rows", "heads", "batch"), [(1, 1, 1), (700, 3, 2), (64, 16, 1), (127, 40, 2)])
def test_what_the_backward_prepares(rows, heads, batch, device):
    lse, delta = torch.randn(2, batch, rows, heads, device=device)
    expected = torch.stack([lse / math.log(2), delta], -1).transpose(1, 2).contiguous()
    torch.testing.assert_close(triton_backward._prepare(lse, delta), expected)


@pytest.mark.usefixtures("small_tiles")
def test_each_batch_entry_has_its_own_intervals(device):
    check_all(make_problem(*random_intervals(70, 90, seed=1, batch=2), 90, batch=2, heads=(2, 2), device=device))


@pytest.mark.usefixtures("small_tiles")
def test_tiles_that_end_where_documents_do(device):
    """Two batch entries, of which one has fewer tiles."""
    size = CUT * SMALL_TILE.queries
    bounds = packed_intervals([[size + 2, 37, size + 7], [2 * size + 46]])
    problem = make_problem(*bounds, 2 * size + 46, torch.float16, 2, device=device)
    table = problem.intervals.tiles(SMALL_TILE.queries, SMALL_TILE.keys)
    assert table[0, -1, 1] > 0 and table[1, -1, 1] == 0
    check_all(problem)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("rows", [(0, 20), (20, 0), (0, 0)], ids=str)
def test_no_rows(rows, device):
    check_all(make_problem(*intervals_of("full", *rows), rows[1], device=device))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("layout", STRIDED)
def test_strided_inputs(layout, device):
    check_strided(
        make_problem(*intervals_of("causal", 70, 70), 70, batch=2, device=device), layout, triton_forward, triton_backward
    )


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("final", [False, True], ids=["state", "final"])
@pytest.mark.parametrize("mask", MASKS)
def test_chain_over_pieces_of_the_keys(mask, final, device):
    check_chain(make_problem(*intervals_of(mask, 90, 110), 110, device=device), [0, 17, 60, 61, 110], final, triton_forward)


@pytest.mark.usefixtures("small_tiles")
def test_the_state_is_updated_in_place(device):
    problem = make_problem(*intervals_of("causal", 40, 40), 40, device=device)
    state = reference.empty_state(problem.q, problem.v.shape[-1])
    result = problem.forward(triton_forward, state=state)
    assert all(x.data_ptr() == y.data_ptr() for x, y in zip(result, state, strict=True))
    assert_states_close(result, problem.double().forward(reference), TOLERANCE[torch.float32])


@pytest.mark.usefixtures("small_tiles")
def test_gradients_are_added_to_the_accumulators(device):
    check_accumulators(make_problem(*intervals_of("causal", 40, 40), 40, device=device), triton_backward)


@pytest.mark.usefixtures("small_tiles")
def test_fresh_gradients_have_the_dtype_asked_for(device):
    problem = make_problem(*intervals_of("causal", 40, 40), 40, torch.float16, device=device)
    check_fresh_gradients(problem, triton_backward)
    with pytest.raises(ValueError, match="grad_dtype"):
        problem.gradients(triton_backward, grad_dtype=torch.float64)


@pytest.mark.usefixtures("small_tiles")
def test_the_backward_is_deterministic(device):
    problem = make_problem(*intervals_of("documents", 90, 90), 90, torch.float16, heads=(4, 2), device=device)
    for x, y in zip(problem.backward(triton_backward), problem.backward(triton_backward), strict=True):
        assert torch.equal(x, y)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("mask", MASKS)
def test_states_are_relative_to_the_row_maximum(mask, device):
    problem = make_problem(*intervals_of(mask, 60, 75), 75, device=device)
    m, expected = problem.forward(triton_forward)[0], problem.double().forward(reference)[0]
    assert_scalars_close("m", m, expected, SCALAR_TOLERANCE)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("factor", [1e-3, 30.0])
def test_scores_of_any_size(factor, device):
    """Scores up to some hundreds: only differences to the row maximum may be exponentiated."""
    problem = make_problem(*intervals_of("causal", 60, 60), 60, device=device)
    problem.q *= factor
    tolerances = (x * max(1.0, factor) for x in (TOLERANCE[torch.float32], SCALAR_TOLERANCE))
    assert_states_close(
        problem.forward(triton_forward, final=True), problem.double().forward(reference, final=True), *tolerances
    )


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fault", ["one-key", "one-tile"])
def test_the_comparison_catches_a_fault(fault, dtype, device):
    """Drop the last key of one row, or one tile of keys of one tile of rows: out, lse and a gradient must fail."""
    problem = make_problem(*intervals_of("causal", 130, 130), 130, dtype, dims=(64, 64), device=device)
    lo, hi = problem.intervals.host
    if fault == "one-key":
        hi = torch.where(hi == 101, 100, hi)
    else:
        lo = torch.where(hi > 96, 16, lo)
    faulty = replace(problem, intervals=Intervals.of(lo, hi, 130, device))
    check_faults_are_caught(problem, faulty, triton_forward, triton_backward)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_comparison_catches_a_dropped_alpha(dtype, device):
    """One row, whose maximum grows as usual, has the maximum to come written into its state: its alpha is then 1."""
    problem = make_problem(*intervals_of("full", 130, 130), 130, dtype, dims=(64, 64), device=device)
    expected, tolerance = problem.double(), TOLERANCE[dtype]
    errors = []
    for drop in (False, True):
        keys = slice(0, 65), slice(65, 130)
        first, second = (problem.intervals.cut(slice(0, 130), part) for part in keys)
        state = triton_forward.forward(problem.q, problem.k[:, keys[0]], problem.v[:, keys[0]], first, problem.scale)
        if drop:
            maxima = expected.forward(reference)[0].float()
            growth = maxima - state[0]
            row = growth == growth[growth > 0].median()
            state[0][row] = maxima[row]
        out, _ = triton_forward.forward(
            problem.q, problem.k[:, keys[1]], problem.v[:, keys[1]], second, problem.scale, state, True
        )
        errors.append(max_row_error(out, expected.forward(reference, final=True)[0]))
    assert errors[0] <= tolerance < errors[1]


@pytest.mark.usefixtures("small_tiles")
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 70), st.integers(1, 70), st.integers(1, 2), st.sampled_from([(1, 1), (2, 1)]), st.integers(0, 2**32))
def test_random_intervals(device, num_queries, num_keys, batch, heads, seed):
    lo, hi = random_intervals(num_queries, num_keys, seed, batch)
    check_all(make_problem(lo, hi, num_keys, batch=batch, heads=heads, device=device), floor=1.0)


def batch_of(batch: int, intervals: Intervals) -> Intervals:
    """The same mask for every entry."""
    return Intervals.of(*(x.repeat(batch, 1) for x in intervals.host), intervals.num_keys, intervals.device)


REFUSED = {  # changed argument -> part of the message
    "mixed dtypes": (lambda p: dict(k=p.k.half()), "k is torch.float16, but must be torch.float32"),
    "fp64": (lambda p: vars(p.double()), "use ringattn.kernels.reference"),
    "head dim": (lambda p: dict(q=p.q.repeat(1, 1, 1, 17), k=p.k.repeat(1, 1, 1, 17)), "query head dim 272"),
    "value head dim": (lambda p: dict(v=p.v.repeat(1, 1, 1, 17)), "value head dim 272"),
    "heads": (lambda p: dict(q=p.q[:, :, :3]), "3 query heads"),
    "keys and values": (lambda p: dict(v=p.v[:, 1:]), "v has shape"),
    "three dimensions": (lambda p: dict(q=p.q[0]), "must be (batch, rows, heads, head dim)"),
    "interval rows": (lambda p: dict(intervals=full(4, 7, p.q.device)), "of 4 queries and 7 keys, but q and k have 5 and 7"),
    "interval keys": (lambda p: dict(intervals=full(5, 8, p.q.device)), "of 5 queries and 8 keys, but q and k have 5 and 7"),
    "interval batch": (lambda p: dict(intervals=batch_of(3, p.intervals)), "3 intervals of"),
    "interval device": (lambda p: dict(intervals=full(5, 7, "meta")), "the intervals are on meta"),
    "scale": (lambda p: dict(scale=-1.0), "must be positive"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_inputs_are_refused(case, device):
    problem = make_problem(*intervals_of("full", 5, 7), 7, heads=(4, 2), device=device)
    change, message = REFUSED[case]
    problem = Problem(**vars(problem) | change(problem))
    for function, module in ((problem.forward, triton_forward), (problem.backward, triton_backward)):
        with pytest.raises(ValueError, match=re.escape(message)):
            function(module)


@pytest.mark.skipif(ON_GPU, reason="about the interpreter")
def test_bf16_is_refused_by_the_interpreter():
    with pytest.raises(ValueError, match="interpreter"):
        make_problem(*intervals_of("full", 5, 7), 7, torch.bfloat16).forward(triton_forward)


def test_bad_states_and_accumulators_are_refused(device):
    problem = make_problem(*intervals_of("full", 5, 7), 7, heads=(2, 2), device=device)
    m, l, o = reference.empty_state(problem.q, 16)
    for state in ((m, l, o.half()), (m, l[:, 1:], o), (m, l, o.mT.contiguous().mT)):
        with pytest.raises(ValueError, match="must be|has shape"):
            problem.forward(triton_forward, state=state)
    arguments = (problem.q, problem.k, problem.v, problem.dout, problem.lse, problem.delta, problem.intervals)
    dq, dk, dv = (torch.zeros_like(x) for x in (problem.q, problem.k, problem.v))
    for gradients in ((dq.half(), dk, dv), (dq, dk[:, 1:], dv), (dq, dk, dv.mT.contiguous().mT)):
        with pytest.raises(ValueError, match="must be|has shape"):
            triton_backward.backward(*arguments, problem.scale, *gradients)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long_odd_length(dtype, device):
    rows = (2049, 3001)
    check_all(make_problem(*intervals_of("causal", *rows), rows[1], dtype, heads=(4, 2), dims=(128, 128), device=device))


@pytest.mark.gpu
def test_offsets_beyond_32_bits(device):
    check_offsets_beyond_32_bits(triton_forward, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value_dim", (16, 48, 128))
@pytest.mark.parametrize("with_dlse", (True, False), ids=("dlse", "no-dlse"))
def test_row_delta(with_dlse: bool, value_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    """57 rows of 3 heads end in mid-tile; out is not contiguous."""
    out, dout = (torch.randn(1, 3, 57, value_dim, device=device).to(dtype).transpose(1, 2) for _ in range(2))
    dlse = torch.randn(1, 57, 3, device=device) if with_dlse else None
    exact = reference.row_delta(out.double(), dout.double(), dlse)
    torch.testing.assert_close(triton_backward.row_delta(out, dout, dlse), exact.float(), rtol=1e-5, atol=1e-5)


def test_rows_too_far_apart_for_32_bits_are_copied():
    near = torch.empty(1, 2, 1, 16, device="meta")
    assert triton_common.as_rows(near) is near
    far = torch.empty_strided((1, 2, 1, 16), (2**23, 2**22, 16, 1), device="meta")
    assert triton_common.as_rows(far).is_contiguous()

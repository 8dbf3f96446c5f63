"""The Hopper kernels against the float64 reference, on a Hopper GPU."""

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ringattn.kernels import reference
from ringattn.kernels.interval_mask import DOCUMENT_JUMP, Intervals, full
from tests.kernels.compare import SCALAR_TOLERANCE, TOLERANCE, assert_rows_close, assert_states_close
from tests.kernels.contract import (
    check_accumulators,
    check_chain,
    check_faults_are_caught,
    check_fresh_gradients,
    check_incremental,
    check_kernels,
    check_offsets_beyond_32_bits,
    check_strided,
)
from tests.kernels.masks import MASKS, intervals_of, packed_intervals, random_intervals
from tests.kernels.problems import STRIDED, Problem, make_problem, strided

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not ON_HOPPER, reason="needs an sm_90 GPU")]
if ON_HOPPER:
    from ringattn.kernels.hopper import backward as hopper_backward
    from ringattn.kernels.hopper import forward as hopper_forward

DTYPES = [torch.float16, torch.bfloat16]
SHAPES = {  # (Nq, Nk), (Hq, Hkv), (D, Dv), batch
    "one-query": ((1, 63), (2, 1), (64, 64), 1),
    "one-key": ((63, 1), (2, 1), (64, 64), 1),
    "one-pair": ((1, 1), (1, 1), (128, 128), 2),
    "63": ((63, 63), (4, 2), (16, 16), 2),
    "111x130": ((111, 130), (3, 1), (80, 80), 1),
    "130x111": ((130, 111), (2, 2), (64, 48), 3),
    "129": ((129, 129), (8, 2), (128, 128), 1),
    "385x1000": ((385, 1000), (2, 1), (64, 64), 1),
    "1000x385": ((1000, 385), (2, 1), (128, 128), 1),
    "value-dim-wider": ((65, 65), (2, 1), (16, 96), 1),
    "value-dim-narrower": ((165, 65), (2, 1), (96, 8), 1),
}
DIMS = {"64": (64, False), "128": (128, False), "128-few-rows": (128, True)}  # head dim, tiles of few rows


@pytest.fixture
def dim(request, monkeypatch) -> int:
    """A head dim, with the forward's tiles for few rows or for many, whatever the number of rows."""
    dim, few = DIMS[request.param]
    monkeypatch.setattr(hopper_forward, "FEW_ROWS", 2**62 if few else 0)
    return dim


def check_all(problem: Problem, floor: float = 1e-30) -> None:
    check_kernels(problem, hopper_forward, hopper_backward, floor)


@pytest.mark.parametrize("dim", DIMS, indirect=True)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask, dtype, dim, device):
    check_all(make_problem(*intervals_of(mask, 500, 630), 630, dtype, dims=(dim, dim), device=device))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape, dtype, device):
    rows, heads, dims, batch = SHAPES[shape]
    problem = make_problem(*intervals_of("window", *rows), rows[1], dtype, batch, heads, dims, device)
    check_all(problem, floor=1.0 if rows[1] == 1 else 1e-30)


@pytest.mark.parametrize("dim", DIMS, indirect=True)
@pytest.mark.parametrize("length", [1000, 1536, 4097])
def test_lengths(length, dim, device):
    problem = make_problem(*intervals_of("causal", length, length), length, torch.bfloat16, dims=(dim, dim), device=device)
    check_all(problem)


@pytest.mark.parametrize("batch", [1, 3])
def test_each_batch_entry_has_its_own_intervals(batch, device):
    bounds = random_intervals(370, 490, seed=1, batch=batch)
    check_all(make_problem(*bounds, 490, torch.float16, batch, heads=(6, 2), dims=(64, 64), device=device), floor=1.0)


@pytest.mark.parametrize("dim", DIMS, indirect=True)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tiles_that_end_where_documents_do(dtype, dim, device):
    """Three batch entries with a different number of tiles; some end within the first rows or keys of a consumer."""
    size = DOCUMENT_JUMP * hopper_forward.TILES[dim]["consumers"] * hopper_forward.ROWS.value
    documents = [[size + 2, 37, size + 139, 1], [2 * size + 179], [1, size + 70, 2, size + 106]]
    problem = make_problem(*packed_intervals(documents), 2 * size + 179, dtype, 3, (4, 2), (dim, dim), device)
    assert problem.intervals.tiles(128, 128).shape[1] > (2 * size + 179) / 128 + 1
    check_all(problem)


@pytest.mark.parametrize("dim", DIMS, indirect=True)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("final", [False, True], ids=["state", "final"])
def test_one_item_a_program(final, dtype, dim, device):
    problem = make_problem(*intervals_of("window", 1000, 1000), 1000, dtype, 2, (4, 2), (dim, dim), device)
    expected = problem.double().forward(reference, final=final)
    assert_states_close(problem.forward(hopper_forward, final=final, shares_sms=True), expected, TOLERANCE[dtype])


@pytest.mark.parametrize("dim", DIMS, indirect=True)
@pytest.mark.parametrize("final", [False, True], ids=["state", "final"])
def test_items_of_a_last_round_are_split(final, dim, device):
    """A third of the processors would have one item more than the others."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    rows = (processors + processors // 3) * hopper_forward.TILES[dim]["consumers"] * hopper_forward.ROWS.value
    problem = make_problem(*intervals_of("full", rows, 200), 200, torch.bfloat16, 1, (1, 1), (dim, dim), device)
    expected = problem.double().forward(reference, final=final)
    assert_states_close(problem.forward(hopper_forward, final=final), expected, TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("dim", [64, 128])
def test_many_items_a_program_in_the_backward(dim, group, device):
    """Three rounds of items of all lengths and more; beside them one item a program."""
    documents = [[700, 2, 130, 65, 1800, 31], [2728], [1, 1, 1000, 900, 826]]
    mask = packed_intervals(documents)
    problem = make_problem(*mask, 2728, torch.bfloat16, 3, (9 * group, 9), (dim, dim), device)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    assert 3 * 9 * problem.intervals.transposed.tiles(128, hopper_backward.query_tile(dim)).shape[1] > 3 * processors
    expected = problem.double().backward(reference)
    for shares_sms in (False, True):
        found = problem.gradients(hopper_backward, grad_dtype=torch.float32, shares_sms=shares_sms)
        for name, x, y in zip(("dq", "dk", "dv"), found, expected, strict=True):
            assert_rows_close(name, x, y, TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("dim", [64, 128])
def test_many_items_of_one_step_in_the_backward(dim, device):
    """Keys of the item before the last are read until the last item, too, is done."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    num_keys = processors * 128 + 40
    problem = make_problem(*intervals_of("full", 60, num_keys), num_keys, torch.bfloat16, 1, (4, 4), (dim, dim), device)
    expected = problem.double().backward(reference)
    for name, x, y in zip(("dq", "dk", "dv"), problem.backward(hopper_backward), expected, strict=True):
        assert_rows_close(name, x, y, TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("nobody", [False, True])
def test_keys_that_nobody_sees_have_no_gradient(nobody, device):
    """Not even where a key is NaN."""
    hi = torch.zeros(1, 300, dtype=torch.int32) if nobody else torch.arange(1, 301, dtype=torch.int32)[None]
    problem = make_problem(torch.zeros_like(hi), hi, 700, torch.float16, dims=(64, 64), device=device)
    problem.k[:, 384:] = problem.v[:, 384:] = float("nan")
    dq, dk, dv = problem.backward(hopper_backward)
    assert not dq.isnan().any() and not dk[:, 300:].any() and not dv[:, 300:].any()


@pytest.mark.parametrize("layout", STRIDED)
def test_strided_inputs(layout, device):
    problem = make_problem(*intervals_of("causal", 270, 270), 270, torch.float16, batch=2, dims=(64, 64), device=device)
    check_strided(problem, layout, hopper_forward, hopper_backward)


@pytest.mark.parametrize("dim", DIMS, indirect=True)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("final", [False, True], ids=["state", "final"])
@pytest.mark.parametrize("mask", MASKS)
def test_chain_over_pieces_of_the_keys(mask, final, dtype, dim, device):
    problem = make_problem(*intervals_of(mask, 290, 410), 410, dtype, dims=(dim, dim), device=device)
    check_chain(problem, [0, 17, 160, 161, 410], final, hopper_forward)


def test_gradients_are_added_to_the_accumulators(device):
    problem = make_problem(*intervals_of("causal", 340, 340), 340, torch.float16, dims=(128, 128), device=device)
    check_accumulators(problem, hopper_backward)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("mask", MASKS)
def test_one_block_of_keys_after_the_other(mask, dim, device):
    problem = make_problem(*intervals_of(mask, 410, 410), 410, torch.bfloat16, 2, (4, 2), (dim, dim), device=device)
    rows = problem.q, problem.dout, problem.lse, problem.delta
    check_incremental(problem, [0, 17, 160, 161, 410], hopper_backward.IncrementalBackward(*rows, problem.scale))


def test_rows_that_see_nothing_keep_their_state(device):
    """Tiles of such rows are left out where a state comes in and goes out, all of them here."""
    nothing = Intervals.of(*torch.zeros(2, 1, 300, dtype=torch.int32), 200, device)
    problem = make_problem(*intervals_of("causal", 300, 200), 200, torch.float16, dims=(64, 64), device=device)
    state = problem.forward(hopper_forward)
    before = [x.clone() for x in state]
    after = hopper_forward.forward(problem.q, problem.k, problem.v, nothing, problem.scale, state=state)
    assert all(torch.equal(x, y) for x, y in zip(after, before, strict=True))


@pytest.mark.parametrize("dim", DIMS, indirect=True)
def test_a_state_that_tma_cannot_address(dim, device):
    """Its o begins four bytes into its memory."""
    problem = make_problem(*intervals_of("full", 300, 200), 200, torch.bfloat16, dims=(dim, dim), device=device)
    m, l, o = problem.forward(hopper_forward)
    shifted = torch.empty(o.numel() + 1, device=device)[1:].view_as(o).copy_(o)
    expected = m.clone(), 2 * l, 2 * o
    state = hopper_forward.forward(problem.q, problem.k, problem.v, problem.intervals, problem.scale, state=(m, l, shifted))
    assert state[2] is shifted
    assert_states_close(state, expected, TOLERANCE[torch.bfloat16])


def test_fresh_gradients_have_the_dtype_asked_for(device):
    problem = make_problem(*intervals_of("causal", 340, 340), 340, torch.float16, dims=(64, 64), device=device)
    check_fresh_gradients(problem, hopper_backward)


@pytest.mark.parametrize("dim", [64, 120])
@pytest.mark.parametrize("with_dlse", [False, True], ids=["out", "out-and-dlse"])
def test_delta_is_made_on_the_way(with_dlse, dim, device):
    problem = make_problem(*intervals_of("causal", 340, 340), 340, torch.bfloat16, 2, (4, 2), (dim, dim), device=device)
    out, lse = problem.forward(hopper_forward, final=True)
    dlse = torch.randn_like(lse) if with_dlse else None
    problem.dout = strided(problem.dout, "heads-first")
    problem.delta = reference.row_delta(out, problem.dout, dlse)
    expected = problem.double().backward(reference)
    problem.delta = out, dlse
    for name, x, y in zip(("dq", "dk", "dv"), problem.backward(hopper_backward), expected, strict=True):
        assert_rows_close(name, x, y, TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("dim", DIMS, indirect=True)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("factor", [1e-3, 30.0])
def test_scores_of_any_size(factor, dtype, dim, device):
    """Scores up to some hundreds: the maximum of a row moves on by more than the slack many times (bf16: in a second round)."""
    problem = make_problem(*intervals_of("causal", 600, 600), 600, dtype, dims=(dim, dim), device=device)
    problem.q *= factor
    scalars = SCALAR_TOLERANCE * max(1.0, factor)
    for final in (False, True):
        expected = problem.double().forward(reference, final=final)
        assert_states_close(problem.forward(hopper_forward, final=final), expected, TOLERANCE[dtype], scalars)


GROWTHS = {  # q and k, by rows: scores that outgrow the first tile of a row in various ways
    "everywhere": lambda q, k: k[:, 200:].mul_(60),
    "in one row": lambda q, k: q[:, -100].mul_(40),
    "in the rows of one head": lambda q, k: q[:, :, 1].mul_(30),
    "at one key": lambda q, k: k[:, 70].mul_(100),
    "step by step": lambda q, k: k.mul_(torch.linspace(0.01, 60, k.shape[1], device=k.device).to(k.dtype)[:, None, None]),
}
AWAY = dict(tolerance=TOLERANCE[torch.bfloat16], scalars=1e-3)  # for scores of some hundreds


@pytest.mark.parametrize("dim", DIMS, indirect=True)
@pytest.mark.parametrize("mask, rows", [("causal", 450), ("documents", 450), ("full", 9000)])
@pytest.mark.parametrize("growth", GROWTHS)
def test_origins_that_cannot_stay(growth, mask, rows, dim, device):
    """A program goes through its items once more, and rows that came out well the first time are not added to a state twice.

    With 9,000 rows programs have several items, of which some hold no row that failed. Under documents rows fail that have
    seen nothing before.
    """
    problem = make_problem(*intervals_of(mask, rows, 450), 450, torch.bfloat16, 2, (4, 2), (dim, dim), device)
    GROWTHS[growth](problem.q, problem.k)
    for final in (False, True):
        expected = problem.double().forward(reference, final=final)
        assert_states_close(problem.forward(hopper_forward, final=final), expected, **AWAY)
        check_chain(problem, [0, 64, 210, 450], final, hopper_forward, **AWAY)


@pytest.mark.parametrize("dim", DIMS, indirect=True)
@pytest.mark.parametrize("growth", GROWTHS)
def test_rows_that_fail_after_nothing(growth, dim, device):
    """The state that comes in is empty: its l is 0, and has a sign all the same."""
    problem = make_problem(*intervals_of("full", 400, 450), 450, torch.bfloat16, 1, (4, 2), (dim, dim), device)
    GROWTHS[growth](problem.q, problem.k)
    state = problem.forward(hopper_forward, state=reference.empty_state(problem.q, dim))
    assert_states_close(state, problem.double().forward(reference), **AWAY)


@pytest.mark.parametrize("dim", DIMS, indirect=True)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("final", [False, True], ids=["state", "final"])
def test_a_state_that_is_far_ahead(final, dtype, dim, device):
    """Origins start with its m, which the scores of later keys come nowhere near."""
    problem = make_problem(*intervals_of("causal", 450, 450), 450, dtype, 2, (4, 2), (dim, dim), device)
    problem.k[:, :70] *= 60
    check_chain(problem, [0, 64, 210, 450], final, hopper_forward, TOLERANCE[dtype], 1e-3)


@pytest.mark.parametrize("dim", DIMS, indirect=True)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_origin_that_stays_is_the_same_bits(dtype, dim, device):
    """Or the m of a state would drift from hop to hop."""
    problem = make_problem(*intervals_of("causal", 450, 450), 450, dtype, dims=(dim, dim), device=device)
    problem.q *= 10
    state = problem.forward(hopper_forward)
    m = state[0].clone()
    for _ in range(3):
        state = problem.forward(hopper_forward, state=state)
    assert torch.equal(state[0], m)


@pytest.mark.parametrize("dims", [(96, 8), (128, 64), (16, 96), (64, 24)], ids=str)
def test_states_of_values_of_another_width(dims, device):
    """Columns that the tiles have and the state has not are neither read nor written."""
    problem = make_problem(*intervals_of("causal", 300, 300), 300, torch.bfloat16, 2, (4, 2), dims, device)
    for final in (False, True):
        check_chain(problem, [0, 64, 210, 300], final, hopper_forward)


def test_rows_that_see_nothing_beside_rows_that_fail(device):
    """Rows without a key have no origin to the end, and neither fail nor differ from the reference."""
    lo, hi = intervals_of("causal", 400, 400)
    lo[:, 100:260], lo[:, 260:] = hi[:, 100:260], 260
    problem = make_problem(lo, hi, 400, torch.bfloat16, dims=(128, 128), device=device)
    problem.k[:, 300:] *= 100
    for final in (False, True):
        expected = problem.double().forward(reference, final=final)
        assert_states_close(problem.forward(hopper_forward, final=final), expected, TOLERANCE[torch.bfloat16], 1e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fault", ["one-key", "one-tile"])
def test_the_comparison_catches_a_fault(fault, dtype, device):
    """Drop the last key of one row, or some keys of a tile of rows: out, lse and a gradient must fail."""
    problem = make_problem(*intervals_of("causal", 330, 330), 330, dtype, dims=(64, 64), device=device)
    lo, hi = problem.intervals.host
    if fault == "one-key":
        hi = torch.where(hi == 101, 100, hi)
    else:
        lo = torch.where(hi > 256, 128, lo)
    faulty = replace(problem, intervals=Intervals.of(lo, hi, 330, device))
    check_faults_are_caught(problem, faulty, hopper_forward, hopper_backward)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(1, 700),
    st.integers(1, 700),
    st.integers(1, 2),
    st.sampled_from([(1, 1), (2, 1)]),
    st.sampled_from(DTYPES),
    st.integers(0, 2**32),
)
def test_random_intervals(device, num_queries, num_keys, batch, heads, dtype, seed):
    lo, hi = random_intervals(num_queries, num_keys, seed, batch)
    check_all(make_problem(lo, hi, num_keys, dtype, batch, heads, (64, 64), device=device), floor=1.0)


REFUSED = {  # changed argument -> part of the message
    "fp32": (lambda p: vars(p.double()) | dict(q=p.q.float(), k=p.k.float(), v=p.v.float()), "not fp16 or bf16"),
    "head dim": (lambda p: dict(q=p.q.repeat(1, 1, 1, 3), k=p.k.repeat(1, 1, 1, 3)), "query head dim 192"),
    "value head dim": (lambda p: dict(v=p.v[..., :12]), "value head dim 12"),
    "no keys": (lambda p: dict(k=p.k[:, :0], v=p.v[:, :0], intervals=full(5, 0, p.q.device)), "no keys"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_only_the_portable_kernels_do_is_refused(case, device):
    problem = make_problem(*intervals_of("full", 5, 7), 7, torch.float16, heads=(4, 2), dims=(64, 64), device=device)
    change, message = REFUSED[case]
    problem = Problem(**vars(problem) | change(problem))
    for function, module in ((problem.forward, hopper_forward), (problem.backward, hopper_backward)):
        with pytest.raises(ValueError, match=re.escape(message)):
            function(module)


def test_offsets_beyond_32_bits(device):
    check_offsets_beyond_32_bits(hopper_forward, device)

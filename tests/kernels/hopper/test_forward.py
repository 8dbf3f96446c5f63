"""The Hopper forward against the float64 reference on an sm_90 GPU, and the choice of its constants without one."""

import re

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ringattn.kernels import dispatch, reference
from ringattn.kernels.hopper import backward as hopper_backward
from ringattn.kernels.hopper import forward as hopper_forward
from ringattn.kernels.interval_mask import DOCUMENT_JUMP
from tests.kernels.compare import TOLERANCE, assert_states_close
from tests.kernels.contract import (
    check_chain,
    check_faults_are_caught,
    check_forward,
    check_heads_beyond_32_bits,
    check_offsets_beyond_32_bits,
    make_strided,
    without_keys,
)
from tests.kernels.hopper.conftest import DIMS, DTYPES, SHAPES
from tests.kernels.masks import MASKS, full, intervals_of, packed_intervals, random_intervals
from tests.kernels.problems import STRIDED, Problem, make_problem
from tests.worked_examples import EXAMPLES
from tests.worked_examples import check_forward as check_worked_example


def configure(dims=(128, 128), dtype=torch.bfloat16, has_state=False, final=True, few_rows=False):
    return hopper_forward.configure(dims, (8, 2), dtype, has_state, final, few_rows)


def work_tile_rows(dims: tuple[int, int]) -> int:
    """Return the number of rows of a work tile, for head dims of DIMS and many rows."""
    return hopper_forward.configure(dims, (1, 1), torch.bfloat16, False, True).queries


def test_the_constants_follow_from_the_call():
    config = configure((96, 40))
    assert (config.dim, config.columns, config.value_dim, config.num_heads, config.group) == (128, 96, 40, 8, 4)
    assert (configure((64, 40)).dim, configure((64, 40)).columns) == (64, 64)
    assert [configure((dim, dim)).columns for dim in (72, 80, 96, 104, 128)] == [96, 96, 96, 128, 128]
    # With two slots of Q, an output is stored from one slot while the next Q arrives in the other.
    assert configure(final=True).q_slots == 2
    assert configure(final=False).q_slots == 1
    assert configure(has_state=True, final=False).updates_state
    assert not configure(has_state=True, final=True).updates_state


def test_only_bf16_starts_with_an_optimistic_reference_max():
    """fp16 cannot represent the probabilities that a reference max may produce if it is not updated."""
    assert configure(dtype=torch.float16).update_ref_max
    assert not configure(dtype=torch.bfloat16).update_ref_max


def test_few_rows_have_smaller_work_tiles():
    assert configure(few_rows=False).queries == 192
    assert configure(few_rows=True).queries == 128


# 64 copies of each key fill several tiles of keys. The kernel requires a head dim that is a multiple of 8.
@pytest.mark.parametrize("copies", [1, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
def test_worked_examples_give_the_known_answers(example, dtype, copies, hopper):
    check_worked_example(example.padded(8).repeated(copies), hopper_forward, dtype, hopper, TOLERANCE[dtype])


@pytest.mark.parametrize("dims", DIMS, indirect=True)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask, dtype, dims, hopper):
    check_forward(make_problem(*intervals_of(mask, 500, 630), 630, dtype, dims=dims, device=hopper), hopper_forward)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape, dtype, hopper):
    sizes, heads, dims, batch = SHAPES[shape]
    check_forward(make_problem(*intervals_of("window", *sizes), sizes[1], dtype, batch, heads, dims, hopper), hopper_forward)


@pytest.mark.parametrize("dims", DIMS, indirect=True)
@pytest.mark.parametrize("length", [1000, 1536, 4097])
def test_lengths(length, dims, hopper):
    mask = intervals_of("causal", length, length)
    check_forward(make_problem(*mask, length, torch.bfloat16, dims=dims, device=hopper), hopper_forward)


@pytest.mark.parametrize("batch", [1, 3])
def test_each_batch_entry_has_its_own_intervals(batch, hopper):
    bounds = random_intervals(370, 490, seed=1, batch=batch)
    check_forward(make_problem(*bounds, 490, torch.float16, batch, (6, 2), (64, 64), hopper), hopper_forward)


@pytest.mark.parametrize("dims", DIMS, indirect=True)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tiles_end_at_document_boundaries(dtype, dims, hopper):
    """The three batch entries have different numbers of tiles. Some tiles end within the first rows of a consumer."""
    size = DOCUMENT_JUMP * work_tile_rows(dims)
    documents = [[size + 2, 37, size + 139, 1], [2 * size + 179], [1, size + 70, 2, size + 106]]
    problem = make_problem(*packed_intervals(documents), 2 * size + 179, dtype, 3, (4, 2), dims, hopper)
    assert problem.intervals.tiles(128, 128).shape[1] > (2 * size + 179) / 128 + 1
    check_forward(problem, hopper_forward)


@pytest.mark.parametrize("dims", DIMS, indirect=True)
def test_consumers_skip_steps_of_other_consumers(dims, hopper):
    """Each consumer attends to other keys than the other consumers of its work tile, in more steps than there are stages.

    There are more work tiles than SMs, so the first steps that a consumer skips follow a previous work tile.
    """
    lo = (torch.arange(24 * 64) // 64 * 450)[None].int()
    problem = make_problem(lo, lo + 450, 24 * 450, torch.bfloat16, 1, (24, 4), dims, hopper)
    check_forward(problem, hopper_forward)
    check_chain(problem, [0, 5000, 24 * 450], False, hopper_forward)
    check_chain(problem, [0, 5000, 24 * 450], True, hopper_forward)


@pytest.mark.parametrize("dims", DIMS, indirect=True)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("final", [False, True], ids=["state", "final"])
def test_one_work_tile_per_program(final, dtype, dims, hopper):
    problem = make_problem(*intervals_of("window", 1000, 1000), 1000, dtype, 2, (4, 2), dims, hopper)
    expected = problem.double().forward(reference, final=final)
    assert_states_close(problem.forward(hopper_forward, final=final, shares_sms=True), expected, TOLERANCE[dtype])


@pytest.mark.parametrize("dims", DIMS, indirect=True)
@pytest.mark.parametrize("final", [False, True], ids=["state", "final"])
def test_work_tiles_of_the_last_wave_are_split(final, dims, hopper, num_sms):
    """Without the split, a third of the SMs would have one more work tile than the others."""
    num_queries = (num_sms + num_sms // 3) * work_tile_rows(dims)
    problem = make_problem(
        *intervals_of("full", num_queries, 200), 200, torch.bfloat16, 1, (1, 1), dims, hopper
    )  # fmt: skip
    expected = problem.double().forward(reference, final=final)
    assert_states_close(problem.forward(hopper_forward, final=final), expected, TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("layout", STRIDED)
def test_strided_inputs(layout, hopper):
    problem = make_problem(*intervals_of("causal", 270, 270), 270, torch.float16, 2, dims=(64, 64), device=hopper)
    check_forward(make_strided(problem, layout), hopper_forward)


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
    check_forward(make_problem(lo, hi, num_keys, dtype, batch, heads, (64, 64), hopper), hopper_forward)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fault", ["one-key", "one-tile"])
def test_the_comparison_notices_a_fault(fault, dtype, hopper):
    """If one query misses its last key, or a tile of queries misses some keys, then out, lse and a gradient must not match."""
    problem = make_problem(*intervals_of("causal", 330, 330), 330, dtype, dims=(64, 64), device=hopper)
    faulty = without_keys(problem, fault, 256, 128)
    check_faults_are_caught(problem, faulty, hopper_forward, hopper_backward)


UNSUPPORTED = {  # changed arguments, part of the message
    "fp32": (lambda p: vars(p.double()) | dict(q=p.q.float(), k=p.k.float(), v=p.v.float()), "not fp16 or bf16"),
    "head dim": (lambda p: dict(q=p.q.repeat(1, 1, 1, 5), k=p.k.repeat(1, 1, 1, 5)), "query head dim 320"),
    "value head dim": (lambda p: dict(v=p.v[..., :12], dout=p.dout[..., :12]), "value head dim 12"),
    "no keys": (lambda p: dict(k=p.k[:, :0], v=p.v[:, :0], intervals=full(5, 0, p.q.device)), "at least one key"),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_a_request_for_the_hopper_kernels_names_what_they_do_not_support(case, hopper):
    problem = make_problem(*intervals_of("full", 5, 7), 7, torch.float16, heads=(4, 2), dims=(64, 64), device=hopper)
    change, message = UNSUPPORTED[case]
    problem = Problem(**vars(problem) | change(problem))
    if case == "fp32":
        problem.dout, problem.lse, problem.delta = (x.float() for x in (problem.dout, problem.lse, problem.delta))
    for call in (problem.forward, problem.gradients):
        with pytest.raises(ValueError, match=re.escape(message)):
            call(dispatch, backend="hopper")


def test_offsets_beyond_32_bits(hopper):
    check_offsets_beyond_32_bits(hopper_forward, hopper)


@pytest.mark.parametrize("dim", [64, 256])
def test_heads_beyond_32_bits(dim, hopper):
    check_heads_beyond_32_bits(hopper_forward, hopper_backward, dim, hopper)

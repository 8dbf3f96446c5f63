"""The softmax of the Hopper forward: its assembly, and scores that are difficult for the reference max."""

import re

import pytest
import torch

from ringattn.kernels import reference
from ringattn.kernels.hopper import forward as hopper_forward
from ringattn.kernels.hopper import softmax
from tests.kernels.compare import SCALAR_TOLERANCE, TOLERANCE, assert_states_close
from tests.kernels.contract import check_chain
from tests.kernels.hopper.conftest import DIMS, DTYPES
from tests.kernels.masks import intervals_of
from tests.kernels.problems import make_problem

# Rounding errors of scores of some hundreds are relative to the scores, so m, l and lse have larger errors than usual.
LARGE_SCORES = dict(tolerance=TOLERANCE[torch.bfloat16], scalars=1e-3)


@pytest.mark.parametrize("count", [32, 64, 128])
def test_rescaling_multiplies_every_register_by_the_alpha_of_its_row(count):
    """A thread has two rows: of every four registers, the first two belong to one row and the last two to the other."""
    assembly = softmax._rescale_assembly(count)
    products = re.findall(r"mul\.f32 \$(\d+), \$(\d+), \$(\d+);", assembly)
    rows = [i // 2 % 2 for i in range(count)]
    # The operands are o (output), o (input), and an alpha for every register. Alphas 0 and 2 are those of the two rows.
    assert products == [(str(i), str(i), str(2 * count + 2 * row)) for i, row in enumerate(rows)]
    constraints = softmax.in_place_constraints(count, "f").split(",")
    assert constraints == ["=f"] * count + [str(i) for i in range(count)] + ["f"] * count


def test_a_row_without_keys_has_probability_zero():
    """exp2(-inf - UNSET_REF_MAX) must be 0, and not NaN."""
    assert torch.tensor(float("-inf")).sub(softmax.UNSET_REF_MAX.value).exp2() == 0
    assert softmax.UNSET_REF_MAX.value == torch.finfo(torch.float32).min


@pytest.mark.parametrize("dims", DIMS, indirect=True)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("factor", [1e-3, 30.0])
def test_scores_of_any_size(factor, dtype, dims, hopper):
    """With scores up to some hundreds, the maximum of a row exceeds the rescale threshold many times.

    In bf16, that happens in the retry pass.
    """
    problem = make_problem(*intervals_of("causal", 600, 600), 600, dtype, dims=dims, device=hopper)
    problem.q *= factor
    scalars = SCALAR_TOLERANCE * max(1.0, factor)
    for final in (False, True):
        expected = problem.double().forward(reference, final=final)
        assert_states_close(problem.forward(hopper_forward, final=final), expected, TOLERANCE[dtype], scalars)


GROWTHS = {  # functions of q and k that make scores exceed those of the first tile of a row, in various ways
    "everywhere": lambda q, k: k[:, 200:].mul_(60),
    "in one row": lambda q, k: q[:, -100].mul_(40),
    "in the rows of one head": lambda q, k: q[:, :, 1].mul_(30),
    "at one key": lambda q, k: k[:, 70].mul_(100),
    "step by step": lambda q, k: k.mul_(torch.linspace(0.01, 60, k.shape[1], device=k.device).to(k.dtype)[:, None, None]),
}


@pytest.mark.parametrize("dims", DIMS, indirect=True)
@pytest.mark.parametrize(("mask", "num_queries"), [("causal", 450), ("documents", 450), ("full", 9000)])
@pytest.mark.parametrize("growth", GROWTHS)
def test_rows_that_overflow_are_repeated(growth, mask, num_queries, dims, hopper):
    """A program repeats its work tiles, but adds rows without overflow to a state only once.

    With 9,000 queries, programs have several work tiles, and some of them contain no row that overflows. Under the document
    mask, some overflowing rows have seen no key in earlier calls.
    """
    problem = make_problem(*intervals_of(mask, num_queries, 450), 450, torch.bfloat16, 2, (4, 2), dims, hopper)
    GROWTHS[growth](problem.q, problem.k)
    for final in (False, True):
        expected = problem.double().forward(reference, final=final)
        assert_states_close(problem.forward(hopper_forward, final=final), expected, **LARGE_SCORES)
        check_chain(problem, [0, 64, 210, 450], final, hopper_forward, **LARGE_SCORES)


@pytest.mark.parametrize("dims", DIMS, indirect=True)
@pytest.mark.parametrize("growth", GROWTHS)
def test_rows_that_overflow_with_an_empty_incoming_state(growth, dims, hopper):
    """The l of an empty state is 0, but its sign bit must still mark an overflow."""
    problem = make_problem(*intervals_of("full", 400, 450), 450, torch.bfloat16, 1, (4, 2), dims, hopper)
    GROWTHS[growth](problem.q, problem.k)
    state = problem.forward(hopper_forward, state=reference.empty_state(problem.q, dims[1]))
    assert_states_close(state, problem.double().forward(reference), **LARGE_SCORES)


def test_rows_without_keys_next_to_rows_that_overflow(hopper):
    """Rows without a key keep an unset reference max. They do not overflow, and they match the reference."""
    lo, hi = intervals_of("causal", 400, 400)
    lo[:, 100:260], lo[:, 260:] = hi[:, 100:260], 260
    problem = make_problem(lo, hi, 400, torch.bfloat16, dims=(128, 128), device=hopper)
    problem.k[:, 300:] *= 100
    for final in (False, True):
        expected = problem.double().forward(reference, final=final)
        assert_states_close(problem.forward(hopper_forward, final=final), expected, **LARGE_SCORES)

"""The Hopper backward with deterministic algorithms: the gradients are correct, and they have the same bits in every run.

The tests on a GPU compare with the float64 reference. Without a GPU, the source of the kernel runs in an emulator, see
`tests.kernels.gluon_emulator`.
"""

import itertools

import pytest
import torch

from ringattn.kernels import reference
from ringattn.kernels.hopper import backward as hopper_backward
from ringattn.kernels.hopper import backward_common, backward_narrow, column_parts, dq_order
from scripts.bench.peers import deterministic
from tests.kernels import gluon_emulator
from tests.kernels.compare import TOLERANCE, assert_rows_close
from tests.kernels.gluon_emulator import emulated
from tests.kernels.masks import MASKS, intervals_of, packed_intervals
from tests.kernels.problems import GRADIENTS, Problem, make_problem

# Masks, the number of keys, and the heads of each.
EMULATED = {
    "causal": (intervals_of("causal", 150, 300), 300, (4, 2)),
    "full": (intervals_of("full", 130, 260), 260, (2, 2)),
    "documents": (packed_intervals([[300, 37, 2], [339]]), 339, (2, 1)),
}


@pytest.mark.parametrize(("mask", "dim", "shares_sms"), [("causal", 64, False), ("full", 96, False), ("documents", 128, True)])
def test_source_of_the_kernel_sums_in_a_fixed_order(mask, dim, shares_sms):
    """In float64, a missing key would change a gradient by far more than 1e-9.

    Partitions pause at random times, so the second run would have other bits if the order of the sums were not fixed. With
    `shares_sms`, the emulator runs one program after another.
    """
    (lo, hi), num_keys, heads = EMULATED[mask]
    problem = make_problem(lo, hi, num_keys, torch.float16, lo.shape[0], heads, (dim, dim)).double()
    with emulated(hopper_backward, 3, [column_parts, dq_order, backward_common, backward_narrow]), deterministic():
        actual, again = (problem.gradients(hopper_backward, grad_dtype=torch.float64, shares_sms=shares_sms) for _ in range(2))
    for name, x, y, expected in zip(GRADIENTS, actual, again, problem.backward(reference), strict=True):
        torch.testing.assert_close(x, expected, rtol=0, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}")
        assert torch.equal(x, y), name


def test_an_odd_number_of_steps_of_several_query_heads(monkeypatch):
    """With one step per query head, the writers exchange their counts after each head. Additions may take several steps."""
    monkeypatch.setattr(gluon_emulator, "LONGEST_ADDITION", 0.05)
    problem = make_problem(*intervals_of("full", 60, 384), 384, torch.float16, 1, (4, 1), (128, 128)).double()
    with emulated(hopper_backward, 3, [column_parts, dq_order, backward_common, backward_narrow]), deterministic():
        sums = [problem.gradients(hopper_backward, grad_dtype=torch.float64)[0] for _ in range(8)]
    assert all(torch.equal(sums[0], x) for x in sums)


def check_bits(problem: Problem, repeats: int = 20, **options) -> None:
    """Check the deterministic gradients, and that repetitions return the same bits, also while another stream is busy."""
    other, x = torch.cuda.Stream(), torch.randn(2048, 2048, device=problem.q.device)
    with deterministic():
        first = problem.gradients(hopper_backward, grad_dtype=torch.float32, **options)
    for name, actual, expected in zip(GRADIENTS, first, problem.double().backward(reference), strict=True):
        assert_rows_close(name, actual, expected, TOLERANCE[problem.q.dtype])
    for repeat in range(repeats):
        with torch.cuda.stream(other):
            for _ in range(repeat % 4):
                x @ x
        with deterministic():
            again = problem.gradients(hopper_backward, grad_dtype=torch.float32, **options)
        assert all(map(torch.equal, first, again))


@pytest.mark.parametrize("shares_sms", [False, True])
@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize("mask", MASKS)
def test_deterministic_gradients_have_the_same_bits(mask, dim, shares_sms, hopper):
    mask = intervals_of(mask, 1100, 1500)
    check_bits(make_problem(*mask, 1500, torch.bfloat16, 2, (4, 4), (dim, dim), hopper), shares_sms=shares_sms)


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("dim", [64, 96, 128])
def test_deterministic_gradients_of_many_work_tiles_per_program(dim, group, hopper):
    """With these causal masks and documents, programs have several work tiles, in both directions."""
    for lengths in ([[4097]], [[700, 2, 130, 65, 1800, 31], [2728], [1, 1, 1000, 900, 826]]):
        mask = packed_intervals(lengths)
        problem = make_problem(*mask, sum(lengths[0]), torch.bfloat16, len(lengths), (9 * group, 9), (dim, dim), hopper)
        check_bits(problem)


@pytest.mark.parametrize("mask", ["causal", "documents"])
def test_deterministic_incremental_backward(mask, hopper):
    problem = make_problem(*intervals_of(mask, 410, 410), 410, torch.bfloat16, 2, (4, 2), (128, 128), hopper)
    queries = problem.q, problem.dout, problem.lse, problem.delta
    edges, results = [0, 17, 160, 161, 410], []
    for _ in range(5):
        with deterministic():
            kernels = hopper_backward.incremental(*queries, problem.scale)
            for start, stop in itertools.pairwise(edges):
                block = slice(start, stop)
                part = problem.intervals.restrict(slice(0, 410), block)
                kernels.add(problem.k[:, block], problem.v[:, block], part)
            results.append(kernels.finish(grad_dtype=torch.float32))
    assert all(torch.equal(results[0], x) for x in results)
    assert_rows_close("dq", results[0], problem.double().backward(reference)[0], TOLERANCE[torch.bfloat16])

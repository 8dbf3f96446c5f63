"""What every forward and backward must do, in the words of tests: one body for the portable and for the Hopper kernels."""

from types import ModuleType

import pytest
import torch

from ringattn.kernels import reference
from ringattn.kernels.dispatch import BlockwiseBackward
from ringattn.kernels.interval_mask import Intervals, full
from tests.kernels.compare import (
    SCALAR_TOLERANCE,
    TOLERANCE,
    assert_rows_close,
    assert_scalars_close,
    assert_states_close,
    max_row_error,
)
from tests.kernels.problems import Problem, strided

GRADIENTS = ("dq", "dk", "dv")


def check_kernels(problem: Problem, forward: ModuleType, backward: ModuleType, floor: float = 1e-30) -> None:
    """State, output, lse and gradients of two kernel modules; `floor` is the least scale of a gradient row.

    It is 1, the scale of the inputs, where rows may see one key only: then dq and dk are differences of equal numbers.
    """
    tolerance, exact = TOLERANCE[problem.q.dtype], problem.double()
    for final in (False, True):
        assert_states_close(problem.forward(forward, final=final), exact.forward(reference, final=final), tolerance)
    for name, x, y in zip(GRADIENTS, problem.backward(backward), exact.backward(reference), strict=True):
        assert_rows_close(name, x, y, tolerance, floor)


def check_strided(problem: Problem, layout: str, forward: ModuleType, backward: ModuleType) -> None:
    """`check_kernels` of inputs that are parts of larger tensors, see `problems.strided`."""
    for name in ("q", "k", "v", "dout"):
        setattr(problem, name, strided(getattr(problem, name), layout))
    assert not problem.q.is_contiguous()
    check_kernels(problem, forward, backward)


def check_chain(
    whole: Problem,
    bounds: list[int],
    final: bool,
    forward: ModuleType,
    tolerance: float | None = None,
    scalars: float = SCALAR_TOLERANCE,
) -> None:
    """A chain of calls over the pieces of the keys between `bounds` equals one call."""
    state, num_keys = None, whole.k.shape[1]
    for first, last in zip(bounds, bounds[1:], strict=False):
        part = whole.intervals.cut(slice(0, whole.q.shape[1]), slice(first, last))
        state = forward.forward(
            *(whole.q, whole.k[:, first:last], whole.v[:, first:last], part, whole.scale),
            state=state,
            final=final and last == num_keys,
        )
    expected = whole.double().forward(reference, final=final)
    assert_states_close(state, expected, tolerance or TOLERANCE[whole.q.dtype], scalars)


def check_accumulators(problem: Problem, backward: ModuleType) -> None:
    """Gradients are added to given ones, in place."""
    start = [torch.randn(x.shape, device=x.device) for x in (problem.q, problem.k, problem.v)]
    total = [x.clone() for x in start]
    given = dict(zip(GRADIENTS, total, strict=True))
    assert all(x is y for x, y in zip(problem.gradients(backward, **given), total, strict=True))
    for x, y, z in zip(total, start, problem.double().backward(reference), strict=True):
        assert_rows_close("accumulator", x, y + z, TOLERANCE[problem.q.dtype])


def check_blockwise(problem: Problem, bounds: list[int], backward: BlockwiseBackward) -> None:
    """Over pieces of the keys between `bounds`, every other one with accumulators, a blockwise backward equals one call."""
    rows, keys = slice(0, problem.q.shape[1]), []
    for i, (first, last) in enumerate(zip(bounds, bounds[1:], strict=False)):
        k, v = problem.k[:, first:last], problem.v[:, first:last]
        given = [torch.full_like(x, i, dtype=torch.float32).contiguous() if i % 2 else None for x in (k, v)]
        dk, dv = backward.add(k, v, problem.intervals.cut(rows, slice(first, last)), *given)
        assert dk.dtype == dv.dtype == torch.float32 and all(x is None or x is y for x, y in zip(given, (dk, dv), strict=True))
        keys.append([x - i % 2 * i for x in (dk, dv)])
    dq = backward.finish()
    assert dq.dtype == problem.q.dtype
    gradients = dq, *(torch.cat(x, 1) for x in zip(*keys, strict=True))
    for name, x, y in zip(GRADIENTS, gradients, problem.double().backward(reference), strict=True):
        assert_rows_close(name, x, y, TOLERANCE[problem.q.dtype])


def check_fresh_gradients(problem: Problem, backward: ModuleType) -> None:
    """Beside an accumulator for dq, dk and dv are fresh and of the inputs' dtype."""
    total = torch.zeros_like(problem.q, dtype=torch.float32)
    dq, dk, dv = problem.gradients(backward, dq=total)
    assert dq is total and dk.dtype == dv.dtype == problem.q.dtype
    for name, x, y in zip(GRADIENTS, (dq, dk, dv), problem.double().backward(reference), strict=True):
        assert_rows_close(name, x, y, TOLERANCE[problem.q.dtype])


def check_faults_are_caught(problem: Problem, faulty: Problem, forward: ModuleType, backward: ModuleType) -> None:
    """The comparison fails where the kernels are given the intervals of `faulty`: out, lse, and a gradient."""
    expected, tolerance = problem.double(), TOLERANCE[problem.q.dtype]
    out, lse = faulty.forward(forward, final=True)
    correct_out, correct_lse = expected.forward(reference, final=True)
    assert max_row_error(out, correct_out) > tolerance
    with pytest.raises(AssertionError, match="lse"):
        assert_scalars_close("lse", lse, correct_lse, SCALAR_TOLERANCE)
    gradients, correct = faulty.backward(backward), expected.backward(reference)
    assert any(max_row_error(x, y) > tolerance for x, y in zip(gradients, correct, strict=True))


def check_offsets_beyond_32_bits(forward: ModuleType, device: torch.device) -> None:
    """Rows whose first element lies past 2**31: only the last rows are compared."""
    num_keys, num_heads, dim = 2**17 + 5, 128, 128
    q = torch.randn(1, 3, num_heads, dim, device=device).half()
    k, v = (torch.randn(1, num_keys, num_heads, dim, device=device, dtype=torch.float16) for _ in range(2))
    hi = torch.full((1, 3), num_keys)
    intervals = Intervals.of(hi - 200, hi, num_keys, device)
    out, _ = forward.forward(q, k, v, intervals, dim**-0.5, final=True)
    tail = (x[:, -200:].double() for x in (k, v))
    expected, _ = reference.forward(q.double(), *tail, full(3, 200, device), dim**-0.5, final=True)
    assert_rows_close("out", out, expected, TOLERANCE[torch.float16])

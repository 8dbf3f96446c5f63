"""Checks of every forward and backward, which the tests of the portable and of the Hopper kernels share."""

import itertools
from dataclasses import replace
from types import ModuleType
from typing import Protocol

import pytest
import torch
from torch import Tensor

from ringattn.kernels import reference
from ringattn.kernels.interval_mask import Intervals
from tests.kernels.compare import (
    SCALAR_TOLERANCE,
    TOLERANCE,
    assert_rows_close,
    assert_scalars_close,
    assert_states_close,
    max_row_error,
)
from tests.kernels.masks import full, intervals_of
from tests.kernels.problems import GRADIENTS, Problem, make_problem, spread_heads, strided


class Incremental(Protocol):
    """The methods of `ringattn.kernels.dispatch.IncrementalBackward`."""

    def add(
        self, k: Tensor, v: Tensor, intervals: Intervals, dk: Tensor | None, dv: Tensor | None
    ) -> tuple[Tensor, Tensor]: ...

    def finish(self) -> Tensor: ...


def check_forward(problem: Problem, forward: ModuleType) -> None:
    """Check that the state, the output and the lse of a kernel module match the float64 reference."""
    for final in (False, True):
        expected = problem.double().forward(reference, final=final)
        assert_states_close(problem.forward(forward, final=final), expected, TOLERANCE[problem.q.dtype])


def check_backward(problem: Problem, backward: ModuleType, floor: float = 1e-30) -> None:
    """Check that the gradients of a kernel module match the float64 reference. `floor` is the smallest scale of a gradient row.

    If a query may attend to a single key, pass 1, the scale of the inputs: dq and dk are then differences of equal numbers.
    """
    for name, x, y in zip(GRADIENTS, problem.backward(backward), problem.double().backward(reference), strict=True):
        assert_rows_close(name, x, y, TOLERANCE[problem.q.dtype], floor)


def check_kernels(problem: Problem, forward: ModuleType, backward: ModuleType, floor: float = 1e-30) -> None:
    """Run `check_forward` and `check_backward`."""
    check_forward(problem, forward)
    check_backward(problem, backward, floor)


def make_strided(problem: Problem, layout: str) -> Problem:
    """Replace the inputs by parts of larger tensors, see `tests.kernels.problems.strided`."""
    for name in ("q", "k", "v", "dout"):
        setattr(problem, name, strided(getattr(problem, name), layout))
    assert not problem.q.is_contiguous()
    return problem


def check_strided(problem: Problem, layout: str, forward: ModuleType, backward: ModuleType) -> None:
    """Run `check_kernels` with inputs that are parts of larger tensors."""
    check_kernels(make_strided(problem, layout), forward, backward)


def check_chain(
    whole: Problem,
    bounds: list[int],
    final: bool,
    forward: ModuleType,
    tolerance: float | None = None,
    scalars: float = SCALAR_TOLERANCE,
) -> None:
    """Check that a chain of calls over the pieces of the keys between `bounds` equals one call over all keys."""
    state, num_keys = None, whole.k.shape[1]
    for first, last in itertools.pairwise(bounds):
        part = whole.intervals.restrict(slice(0, whole.q.shape[1]), slice(first, last))
        state = forward.forward(
            *(whole.q, whole.k[:, first:last], whole.v[:, first:last], part, whole.scale),
            state=state,
            final=final and last == num_keys,
        )
    expected = whole.double().forward(reference, final=final)
    assert_states_close(state, expected, tolerance or TOLERANCE[whole.q.dtype], scalars)


def check_accumulators(problem: Problem, backward: ModuleType) -> None:
    """Check that gradients are added to given accumulators, in place."""
    start = [torch.randn(x.shape, device=x.device) for x in (problem.q, problem.k, problem.v)]
    accumulators = [x.clone() for x in start]
    given = dict(zip(GRADIENTS, accumulators, strict=True))
    assert all(x is y for x, y in zip(problem.gradients(backward, **given), accumulators, strict=True))
    for x, y, z in zip(accumulators, start, problem.double().backward(reference), strict=True):
        assert_rows_close("accumulator", x, y + z, TOLERANCE[problem.q.dtype])


def check_incremental(problem: Problem, bounds: list[int], backward: Incremental) -> None:
    """Check that an incremental backward over the pieces of the keys between `bounds` equals one call over all keys.

    Every second piece has accumulators.
    """
    queries, grads = slice(0, problem.q.shape[1]), []
    for i, (first, last) in enumerate(itertools.pairwise(bounds)):
        k, v = problem.k[:, first:last], problem.v[:, first:last]
        given = [torch.full_like(x, i, dtype=torch.float32).contiguous() if i % 2 else None for x in (k, v)]
        dk, dv = backward.add(k, v, problem.intervals.restrict(queries, slice(first, last)), *given)
        assert dk.dtype == dv.dtype == torch.float32
        assert all(x is None or x is y for x, y in zip(given, (dk, dv), strict=True))
        grads.append([x - i % 2 * i for x in (dk, dv)])
    dq = backward.finish()
    assert dq.dtype == problem.q.dtype
    gradients = dq, *(torch.cat(x, 1) for x in zip(*grads, strict=True))
    for name, x, y in zip(GRADIENTS, gradients, problem.double().backward(reference), strict=True):
        assert_rows_close(name, x, y, TOLERANCE[problem.q.dtype])


def check_fresh_gradients(problem: Problem, backward: ModuleType) -> None:
    """Check that dk and dv are new tensors in the dtype of the inputs if only dq has an accumulator."""
    accumulator = torch.zeros_like(problem.q, dtype=torch.float32)
    dq, dk, dv = problem.gradients(backward, dq=accumulator)
    assert dq is accumulator
    assert dk.dtype == dv.dtype == problem.q.dtype
    for name, x, y in zip(GRADIENTS, (dq, dk, dv), problem.double().backward(reference), strict=True):
        assert_rows_close(name, x, y, TOLERANCE[problem.q.dtype])


def check_delta_as_out(problem: Problem, backward: ModuleType, with_dlse: bool) -> None:
    """Check that (out, dlse) may replace delta, with a dout of other strides."""
    out, lse = problem.forward(reference, final=True)
    dlse = torch.randn_like(lse) if with_dlse else None
    problem.dout = strided(problem.dout, "heads-first")
    problem.delta = reference.row_delta(out, problem.dout, dlse)
    expected = problem.double().backward(reference)
    problem.delta = out, dlse
    for name, x, y in zip(GRADIENTS, problem.backward(backward), expected, strict=True):
        assert_rows_close(name, x, y, TOLERANCE[problem.q.dtype])


def without_keys(problem: Problem, fault: str, first_query: int, first_key: int) -> Problem:
    """Return a causal problem in which one query misses its last key, or all queries from `first_query` miss some keys."""
    lo, hi = problem.intervals.host
    if fault == "one-key":
        hi = torch.where(hi == 101, 100, hi)
    else:
        lo = torch.where(hi > first_query, first_key, lo)
    return replace(problem, intervals=Intervals.of(lo, hi, problem.k.shape[1], problem.q.device))


def check_faults_are_caught(problem: Problem, faulty: Problem, forward: ModuleType, backward: ModuleType) -> None:
    """Check that the comparison notices the fault in `faulty`: in out, in lse and in at least one gradient."""
    expected, tolerance = problem.double(), TOLERANCE[problem.q.dtype]
    out, lse = faulty.forward(forward, final=True)
    correct_out, correct_lse = expected.forward(reference, final=True)
    assert max_row_error(out, correct_out) > tolerance
    with pytest.raises(AssertionError, match="lse"):
        assert_scalars_close("lse", lse, correct_lse, SCALAR_TOLERANCE)
    gradients, correct = faulty.backward(backward), expected.backward(reference)
    assert any(max_row_error(x, y) > tolerance for x, y in zip(gradients, correct, strict=True))


def check_offsets_beyond_32_bits(forward: ModuleType, device: torch.device) -> None:
    """Check the last keys of a tensor with more than 2**31 elements. Only these keys are attended to."""
    num_keys, num_heads, dim = 2**17 + 5, 128, 128
    q = torch.randn(1, 3, num_heads, dim, device=device).half()
    k, v = (torch.randn(1, num_keys, num_heads, dim, device=device, dtype=torch.float16) for _ in range(2))
    hi = torch.full((1, 3), num_keys)
    intervals = Intervals.of(hi - 200, hi, num_keys, device)
    out, _ = forward.forward(q, k, v, intervals, dim**-0.5, final=True)
    tail = (x[:, -200:].double() for x in (k, v))
    expected, _ = reference.forward(q.double(), *tail, full(3, 200, device), dim**-0.5, final=True)
    assert_rows_close("out", out, expected, TOLERANCE[torch.float16])


def check_heads_beyond_32_bits(forward: ModuleType, backward: ModuleType, dim: int, device: torch.device) -> None:
    """Check inputs whose last head lies 2**31 elements behind the first head."""
    problem = make_problem(*intervals_of("causal", 40, 50), 50, torch.float16, 1, (3, 3), (dim, dim), device)
    for name in ("q", "k", "v", "dout"):
        setattr(problem, name, spread_heads(getattr(problem, name)))
    check_kernels(problem, forward, backward)

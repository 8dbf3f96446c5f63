"""The reference against a softmax written out over dense float64 scores, with autograd for the gradients."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ringattn.kernels import blockwise, reference
from ringattn.kernels.interval_mask import dense, full
from tests.kernels.compare import assert_rows_close, assert_states_close
from tests.kernels.masks import MASKS, intervals_of, random_intervals
from tests.kernels.problems import Problem, make_problem

TOLERANCE = 1e-11
HEADS = {"multi-head": (2, 2), "grouped": (4, 2), "multi-query": (3, 1)}


def dense_attention(p: Problem) -> tuple[Tensor, Tensor]:
    """(out, lse) by torch.softmax over dense scores; rows that see no key give (0, -inf)."""
    group = p.q.shape[2] // p.k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (p.k, p.v))
    mask = dense(p.intervals.lo, p.intervals.hi, p.k.shape[1])[:, None]
    scores = (p.scale * torch.einsum("bqhd,bkhd->bhqk", p.q, k)).masked_fill(~mask, float("-inf"))
    seen = mask.any(-1, keepdim=True)
    out = torch.softmax(scores.masked_fill(~seen, 0.0), -1).masked_fill(~seen, 0.0)
    lse = torch.logsumexp(scores.masked_fill(~seen, 0.0), -1).masked_fill(~seen[..., 0], float("-inf"))
    return torch.einsum("bhqk,bkhd->bqhd", out, v), lse.transpose(1, 2)


def double_problem(mask: str, rows: tuple[int, int] = (50, 60), heads: tuple[int, int] = (4, 2), **options) -> Problem:
    return make_problem(*intervals_of(mask, *rows), rows[1], torch.float64, heads=heads, dims=(8, 6), **options)


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("mask", MASKS)
def test_output(mask, heads):
    problem = double_problem(mask, heads=heads, batch=2)
    assert_states_close(problem.forward(reference, final=True), dense_attention(problem), TOLERANCE)


@pytest.mark.parametrize("with_dlse", [False, True], ids=["dout", "dout+dlse"])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("mask", MASKS)
def test_gradients(mask, heads, with_dlse):
    problem = double_problem(mask, heads=heads)
    inputs = [x.requires_grad_() for x in (problem.q, problem.k, problem.v)]
    out, lse = dense_attention(problem)
    dlse = torch.randn_like(lse) * (lse > float("-inf")) if with_dlse else torch.zeros_like(lse)
    loss = (out * problem.dout).sum() + (lse.clamp(min=-1e6) * dlse).sum()
    expected = torch.autograd.grad(loss, inputs)

    problem.q, problem.k, problem.v = (x.detach() for x in inputs)
    problem.lse = lse.detach()
    problem.delta = reference.row_delta(out.detach(), problem.dout, dlse if with_dlse else None)
    for name, x, y in zip(("dq", "dk", "dv"), problem.backward(reference), expected, strict=True):
        assert_rows_close(name, x, y, TOLERANCE)


@pytest.mark.parametrize("mask", MASKS)
def test_gradients_of_pieces_add_up(mask):
    """With lse and delta of the whole row, the gradients over pieces of the keys sum to those over all."""
    problem = double_problem(mask)
    problem.lse, problem.delta = problem.lse.double(), problem.delta.double()
    expected = problem.backward(reference)
    dq, dk, dv = (torch.zeros_like(x) for x in expected)
    for first, last in ((0, 7), (7, 40), (40, 60)):
        piece = slice(first, last)
        seen = problem.intervals.cut(slice(0, problem.q.shape[1]), piece)
        part = replace(problem, k=problem.k[:, piece], v=problem.v[:, piece], intervals=seen)
        part_dq, dk[:, piece], dv[:, piece] = part.backward(reference)
        dq += part_dq
    for name, x, y in zip(("dq", "dk", "dv"), (dq, dk, dv), expected, strict=True):
        assert_rows_close(name, x, y, TOLERANCE)


@pytest.mark.parametrize("mask", MASKS)
def test_chain_over_pieces_of_the_keys(mask):
    problem = double_problem(mask)
    state = None
    for first, last in ((0, 7), (7, 7), (7, 40), (40, 60)):
        seen = problem.intervals.cut(slice(0, problem.q.shape[1]), slice(first, last))
        keys, values = problem.k[:, first:last], problem.v[:, first:last]
        state = reference.forward(problem.q, keys, values, seen, problem.scale, state)
    assert_states_close(state, problem.forward(reference), TOLERANCE)
    assert_states_close(reference.finalize(state, torch.float64), dense_attention(problem), TOLERANCE)


@pytest.mark.parametrize("rows", [(0, 5), (5, 0)], ids=str)
def test_no_rows(rows):
    problem = double_problem("full", rows=rows)
    out, lse = problem.forward(reference, final=True)
    assert out.shape == (1, rows[0], 4, 6) and (out == 0).all()
    assert lse.shape == (1, rows[0], 4) and (lse == float("-inf")).all()
    assert all((gradient == 0).all() for gradient in problem.backward(reference))


@pytest.mark.parametrize("module", [reference, blockwise], ids=["reference", "tiled"])
def test_what_contradicts_itself_is_refused(module):
    problem = double_problem("full", rows=(5, 7))
    wrong = {
        "scale is -1.0": dict(scale=-1.0),
        "of 5 queries and 8 keys": dict(intervals=full(5, 8)),
        "3 query heads": dict(q=problem.q[:, :, :3]),
    }
    for message, change in wrong.items():
        for function in (replace(problem, **change).forward, replace(problem, **change).backward):
            with pytest.raises(ValueError, match=message):
                function(module)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_states_are_fp32(dtype):
    problem = make_problem(*intervals_of("causal", 9, 9), 9, dtype)
    assert all(x.dtype == torch.float32 and x.is_contiguous() for x in problem.forward(reference))
    out, lse = problem.forward(reference, final=True)
    assert out.dtype == dtype and lse.dtype == torch.float32


@st.composite
def states(draw, count: int) -> list[reference.State]:
    """States of the same queries over disjoint random sets of keys; about a third of the rows are empty."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    spread = draw(st.sampled_from([1.0, 100.0]))

    def state() -> reference.State:
        empty = torch.rand(1, 5, 2, generator=generator) < 0.3
        m = spread * torch.randn(1, 5, 2, generator=generator, dtype=torch.float64)
        l = 1 + torch.rand(1, 5, 2, generator=generator, dtype=torch.float64)
        o = torch.randn(1, 5, 2, 3, generator=generator, dtype=torch.float64)
        return m.masked_fill(empty, float("-inf")), l.masked_fill(empty, 0.0), o.masked_fill(empty[..., None], 0.0)

    return [state() for _ in range(count)]


def assert_same_state(a: reference.State, b: reference.State) -> None:
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@given(states(3))
def test_merge_is_associative(abc):
    a, b, c = abc
    assert_same_state(reference.merge(reference.merge(a, b), c), reference.merge(a, reference.merge(b, c)))


@given(states(2))
def test_merge_is_commutative(ab):
    a, b = ab
    for x, y in zip(reference.merge(a, b), reference.merge(b, a), strict=True):
        assert torch.equal(x, y)


@given(states(1))
def test_the_empty_state_is_the_identity_of_merge(a):
    (state,) = a
    empty = reference.empty_state(torch.zeros(1, 5, 2, 3, dtype=torch.float64), 3)
    for x, y in zip(reference.merge(state, empty), state, strict=True):
        assert torch.equal(x, y)
    assert all(x.isfinite().all() for x in reference.merge(empty, empty)[1:])


@settings(max_examples=50)
@given(st.integers(1, 30), st.integers(0, 30), st.integers(0, 2**32))
def test_random_intervals(num_queries, num_keys, seed):
    lo, hi = random_intervals(num_queries, num_keys, seed, batch=2)
    problem = make_problem(lo, hi, num_keys, torch.float64, batch=2, dims=(4, 4))
    expected = dense_attention(problem) if num_keys else problem.forward(reference, final=True)
    assert_states_close(problem.forward(reference, final=True), expected, TOLERANCE)


def test_autocast_rounds_nothing():
    problem = make_problem(*intervals_of("causal", 9, 9), 9, torch.float32)
    exact = problem.forward(reference), problem.backward(reference)
    with torch.autocast("cpu", torch.bfloat16):
        under = problem.forward(reference), problem.backward(reference)
    assert all(torch.equal(x, y) for side, other in zip(exact, under, strict=True) for x, y in zip(side, other, strict=True))

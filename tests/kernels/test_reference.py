"""The reference against a softmax over dense float64 scores, with autograd for the gradients."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ringattn.kernels import reference
from ringattn.kernels.dropout import keep_mask
from ringattn.kernels.interval_mask import dense
from tests.covering import every_pair
from tests.kernels.compare import assert_rows_close, assert_states_close
from tests.kernels.masks import MASKS, intervals_of, random_intervals
from tests.kernels.problems import GRADIENTS, Problem, make_blocks, make_dropout, make_problem

# All computations are in float64. A wrong mask or a missing factor would change results by more than 1e-3.
TOLERANCE = 1e-11
HEADS = [(2, 2), (4, 2), (3, 1)]  # multi-head, grouped and multi-query attention
SIZES = (90, 140)  # two blocks of queries and three blocks of keys


def dense_attention(p: Problem) -> tuple[Tensor, Tensor]:
    """Return (out, lse) by `torch.softmax` over dense scores; queries that attend to no key give (0, -inf)."""
    (batch, num_queries, heads), num_keys = p.q.shape[:3], p.k.shape[1]
    k, v = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (p.k, p.v))
    mask = dense(p.intervals.lo, p.intervals.hi, num_keys)[:, None].expand(batch, heads, -1, -1)
    if "blocks" in p.options:
        mask = mask & p.options["blocks"].dense(num_queries, num_keys)
    scores = (p.scale * torch.einsum("bqhd,bkhd->bhqk", p.q, k)).masked_fill(~mask, float("-inf"))
    nonempty = mask.any(-1, keepdim=True)
    probabilities = torch.softmax(scores.masked_fill(~nonempty, 0.0), -1).masked_fill(~nonempty, 0.0)
    lse = torch.logsumexp(scores.masked_fill(~nonempty, 0.0), -1).masked_fill(~nonempty[..., 0], float("-inf"))
    if "dropout" in p.options:
        dropout = p.options["dropout"]
        probabilities = probabilities * keep_mask(dropout, batch, heads) / (1 - dropout.p)
    return torch.einsum("bhqk,bkhd->bqhd", probabilities, v), lse.transpose(1, 2)


def double_problem(mask: str, sizes: tuple[int, int] = SIZES, heads: tuple[int, int] = (4, 2), **options) -> Problem:
    return make_problem(*intervals_of(mask, *sizes), sizes[1], torch.float64, 2, heads, (8, 6), **options)


@every_pair(mask=MASKS, heads=HEADS, dropout=[False, True], blocks=[False, True], with_dlse=[False, True])
def test_results_and_gradients_match_autograd(mask, heads, dropout, blocks, with_dlse):
    options = {"dropout": make_dropout(*SIZES)} if dropout else {}
    options |= {"blocks": make_blocks(*SIZES, shape=(2, heads[0]))} if blocks else {}
    problem = double_problem(mask, heads=heads, **options)
    inputs = [x.requires_grad_() for x in (problem.q, problem.k, problem.v)]
    out, lse = dense_attention(problem)
    dlse = torch.randn_like(lse) * (lse > float("-inf")) if with_dlse else torch.zeros_like(lse)
    expected = torch.autograd.grad((out * problem.dout).sum() + (lse.clamp(min=-1e6) * dlse).sum(), inputs)

    problem.q, problem.k, problem.v = (x.detach() for x in inputs)
    problem.lse, out = lse.detach(), out.detach()
    problem.delta = reference.row_delta(out, problem.dout, dlse if with_dlse else None)
    assert_states_close(problem.forward(reference, final=True), (out, problem.lse), TOLERANCE)
    for name, x, y in zip(GRADIENTS, problem.backward(reference), expected, strict=True):
        assert_rows_close(name, x, y, TOLERANCE)


@pytest.mark.parametrize("mask", MASKS)
def test_gradients_of_pieces_of_the_keys_add_up(mask):
    """With the lse and the delta over all keys, the gradients of pieces of the keys add up to those of all keys."""
    problem = double_problem(mask, (50, 60))
    problem.lse, problem.delta = problem.lse.double(), problem.delta.double()
    expected = problem.backward(reference)
    dq, dk, dv = (torch.zeros_like(x) for x in expected)
    for keys in (slice(0, 7), slice(7, 40), slice(40, 60)):
        intervals = problem.intervals.restrict(slice(0, 50), keys)
        part = replace(problem, k=problem.k[:, keys], v=problem.v[:, keys], intervals=intervals)
        part_dq, dk[:, keys], dv[:, keys] = part.backward(reference)
        dq += part_dq
    for name, x, y in zip(GRADIENTS, (dq, dk, dv), expected, strict=True):
        assert_rows_close(name, x, y, TOLERANCE)


@pytest.mark.parametrize("mask", MASKS)
def test_chain_over_pieces_of_the_keys_equals_one_call(mask):
    problem = double_problem(mask, (50, 60))
    state = None
    for first, last in ((0, 7), (7, 7), (7, 40), (40, 60)):
        intervals = problem.intervals.restrict(slice(0, 50), slice(first, last))
        state = reference.forward(
            problem.q, problem.k[:, first:last], problem.v[:, first:last], intervals, problem.scale, state
        )
    assert_states_close(state, problem.forward(reference), TOLERANCE)
    assert_states_close(reference.finalize(state, torch.float64), dense_attention(problem), TOLERANCE)


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0)], ids=str)
def test_without_queries_or_keys_results_are_empty_or_zero(sizes):
    problem = double_problem("full", sizes)
    out, lse = problem.forward(reference, final=True)
    assert out.shape == (2, sizes[0], 4, 6)
    assert (out == 0).all()
    assert lse.shape == (2, sizes[0], 4)
    assert (lse == float("-inf")).all()
    assert all((gradient == 0).all() for gradient in problem.backward(reference))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_states_are_contiguous_fp32(dtype):
    problem = make_problem(*intervals_of("causal", 9, 9), 9, dtype)
    assert all(x.dtype == torch.float32 and x.is_contiguous() for x in problem.forward(reference))
    out, lse = problem.forward(reference, final=True)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32


def test_gradients_are_added_to_accumulators_and_rounded_only_if_new():
    problem = make_problem(*intervals_of("causal", 9, 9), 9, torch.float16)
    exact = problem.backward(reference)
    accumulator = torch.ones_like(problem.q, dtype=torch.float32)
    dq, dk, dv = problem.gradients(reference, dq=accumulator)
    assert dq is accumulator
    assert torch.equal(dq, 1 + exact[0])
    assert torch.equal(dk, exact[1].half())
    assert torch.equal(dv, exact[2].half())


@st.composite
def states(draw, count: int) -> list[reference.State]:
    """Draw states of the same queries over disjoint random sets of keys; about a third of the queries are empty."""
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


@settings(max_examples=25)
@given(states(3))
def test_merge_is_associative(abc):
    a, b, c = abc
    assert_same_state(reference.merge(reference.merge(a, b), c), reference.merge(a, reference.merge(b, c)))


@settings(max_examples=25)
@given(states(2))
def test_merge_is_commutative(ab):
    a, b = ab
    for x, y in zip(reference.merge(a, b), reference.merge(b, a), strict=True):
        assert torch.equal(x, y)


@settings(max_examples=25)
@given(states(1))
def test_empty_state_is_the_identity_of_merge(a):
    (state,) = a
    empty = reference.empty_state(torch.zeros(1, 5, 2, 3, dtype=torch.float64), 3)
    for x, y in zip(reference.merge(state, empty), state, strict=True):
        assert torch.equal(x, y)
    assert all(x.isfinite().all() for x in reference.merge(empty, empty)[1:])


@settings(max_examples=20)
@given(st.integers(1, 30), st.integers(0, 30), st.integers(0, 2**32))
def test_random_intervals_match_dense_softmax(num_queries, num_keys, seed):
    lo, hi = random_intervals(num_queries, num_keys, seed, batch=2)
    problem = make_problem(lo, hi, num_keys, torch.float64, batch=2, dims=(4, 4))
    expected = dense_attention(problem) if num_keys else problem.forward(reference, final=True)
    assert_states_close(problem.forward(reference, final=True), expected, TOLERANCE)


def test_sum_of_partials_is_rounded_once():
    """Each of three parts would round to 1 in fp16, but their sum rounds to more than 3."""
    base, part = torch.zeros(1, 4, 1, 2), torch.full((1, 2, 1, 2), 1 + 2**-11)
    out = reference.sum_partials(base, [(1, part), (1, part), (1, part), (2, part)], torch.float16)
    assert out.dtype == torch.float16
    assert out[0, :, 0, 0].tolist() == [0.0, 3 + 2**-9, 4.0, 1.0]

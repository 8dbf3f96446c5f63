"""Tests of partial states: merging is associative and commutative, and the empty state is its identity."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from ringattn import PartialState


def state_of(scores: list[float]) -> PartialState:
    """Return the state of one query after keys with these scores, whose values are 1, 2, 3, ..."""
    if not scores:
        return PartialState.empty(torch.zeros(1, 1, 1, 1, dtype=torch.float64))
    s = torch.tensor(scores, dtype=torch.float64)
    p = torch.exp(s - s.max())
    values = torch.arange(1, len(scores) + 1, dtype=torch.float64)
    return PartialState(s.max().view(1, 1, 1), p.sum().view(1, 1, 1), (p @ values).view(1, 1, 1, 1))


def close(a: PartialState, b: PartialState) -> bool:
    return all(torch.allclose(x, y, rtol=1e-12, atol=1e-12) for x, y in zip(a, b, strict=True))


states = st.lists(st.floats(-50, 50), max_size=5).map(state_of)


@given(states, states, states)
def test_merge_is_associative_and_commutative(a: PartialState, b: PartialState, c: PartialState) -> None:
    """Ranks may merge their partial results in any order."""
    assert close(a.merge(b).merge(c), a.merge(b.merge(c)))
    assert close(a.merge(b), b.merge(a))


@given(states)
def test_the_empty_state_is_the_identity(a: PartialState) -> None:
    """Merging with the empty state changes nothing and yields no NaN."""
    merged = a.merge(state_of([]))
    assert all(torch.equal(x, y) for x, y in zip(merged, a, strict=True))
    assert not any(x.isnan().any() for x in (*merged, *merged.finalize(torch.float64)))


def test_a_query_without_keys_yields_zero_and_minus_infinity() -> None:
    """The output has the requested dtype, and lse is fp32."""
    out, lse = PartialState.empty(torch.zeros(2, 3, 4, 5), value_dim=6).finalize(torch.bfloat16)
    assert out.shape == (2, 3, 4, 6)
    assert out.dtype == torch.bfloat16
    assert (out == 0).all()
    assert lse.shape == (2, 3, 4)
    assert lse.dtype == torch.float32
    assert (lse == float("-inf")).all()


def test_scores_far_apart_do_not_overflow() -> None:
    """The larger of two scores that differ by 2,000 determines the result."""
    out, lse = state_of([-1000.0]).merge(state_of([1000.0])).finalize(torch.float64)
    assert out.item() == 1.0
    assert lse.item() == 1000.0


def test_merging_two_states_by_hand() -> None:
    """Scores [1, 3] and then [2, 5]: the first sum is scaled by exp(3 - 5)."""
    first = state_of([1.0, 3.0])
    both = first.merge(state_of([2.0, 5.0]))
    assert round(first.m.item(), 3) == 3
    assert round(first.l.item(), 3) == 1.135
    assert both.m.item() == 5
    assert round(both.l.item(), 3) == 1.203

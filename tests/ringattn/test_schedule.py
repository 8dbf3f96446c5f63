"""Schedules are data: literal expectations, and a walk that checks that every block gets where it is needed and home."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringattn import Layout, Mask
from ringattn.plan import needs
from ringattn.schedule import Message, Need, Schedule, Step, circulate


def travel(owner: int, src: int, dst: int) -> Message:
    return Message("traveller", owner, src, dst)


def result(owner: int, src: int, dst: int) -> Message:
    return Message("result", owner, src, dst)


def test_full_ring_of_three_with_results() -> None:
    """Queries one hop ahead, states one behind, the own block last: P - 1 hops of each."""
    everyone = ((True,) * 3,) * 3
    assert circulate(everyone, results=True).steps == (
        Step((), (travel(0, 0, 1), travel(1, 1, 2), travel(2, 2, 0))),
        Step(((1, 0), (2, 1), (0, 2)), (travel(0, 1, 2), travel(1, 2, 0), travel(2, 0, 1))),
        Step(((2, 0), (0, 1), (1, 2)), (result(0, 1, 2), result(1, 2, 0), result(2, 0, 1))),
        Step(((0, 0), (1, 1), (2, 2)), (result(0, 2, 0), result(1, 0, 1), result(2, 1, 2))),
    )


def test_full_ring_of_three_without_results() -> None:
    """The own block first, while the first hop is under way."""
    everyone = ((True,) * 3,) * 3
    assert circulate(everyone, results=False).steps == (
        Step(((0, 0), (1, 1), (2, 2)), (travel(0, 0, 1), travel(1, 1, 2), travel(2, 2, 0))),
        Step(((1, 0), (2, 1), (0, 2)), (travel(0, 1, 2), travel(1, 2, 0), travel(2, 0, 1))),
        Step(((2, 0), (0, 1), (1, 2)), ()),
    )


def test_a_window_talks_to_its_neighbour_only() -> None:
    """Queries of rank r need the keys of r and r - 1: they travel backwards, one hop, and the result comes straight home."""
    need = needs(Mask.causal(window=3), Layout.contiguous(12, 3))
    assert need == ((True, False, False), (True, True, False), (False, True, True))
    assert circulate(need, results=True).steps == (
        Step((), (travel(1, 1, 0), travel(2, 2, 1))),
        Step(((0, 1), (1, 2)), ()),
        Step(((0, 0), (1, 1), (2, 2)), (result(1, 0, 1), result(2, 1, 2))),
    )


def test_one_rank_sends_nothing() -> None:
    for results in (True, False):
        assert circulate(((True,),), results).steps == (Step(((0, 0),)),)


def walk(need: Need, schedule: Schedule, results: bool) -> None:
    """Carry out a schedule with names for blocks: everything sent is in hand, every visit happens once, all come home."""
    ranks = range(len(need))
    held = [{rank} for rank in ranks]
    earned: list[dict[int, set[int]]] = [{} for _ in ranks]
    visited = []
    for step in schedule.steps:
        for message in step.messages:
            assert message.owner in (held if message.kind == "traveller" else earned)[message.src]
        leaving = [(m, earned[m.src].pop(m.owner)) for m in step.messages if m.kind == "result"]
        for rank, owner in step.visits:
            assert owner in held[rank]
            visited.append((owner, rank))
            earned[rank].setdefault(owner, set()).add(rank)
        held = [{rank} | {m.owner for m in step.messages if (m.kind, m.dst) == ("traveller", rank)} for rank in ranks]
        for message, ranks_seen in leaving:
            earned[message.dst].setdefault(message.owner, set()).update(ranks_seen)
    wanted = [(owner, rank) for owner in ranks for rank in ranks if need[owner][rank]]
    assert sorted(visited) == wanted
    if results:
        for owner in ranks:
            assert earned[owner] == ({owner: {r for r in ranks if need[owner][r]}} if any(need[owner]) else {})


needs_of_any_ring = st.integers(1, 7).flatmap(
    lambda n: st.tuples(*[st.tuples(*[st.booleans()] * n)] * n),
)


@given(needs_of_any_ring, st.booleans())
def test_every_block_gets_where_it_is_needed_and_home(need: Need, results: bool) -> None:
    walk(need, circulate(need, results), results)


@pytest.mark.parametrize("results", (True, False), ids=("results", "no-results"))
def test_no_rank_sends_more_than_the_formula(results: bool) -> None:
    """P - 1 hops a traveller and, with results, P - 1 a result: the bytes of the design, for every rank alike."""
    schedule = circulate(((True,) * 5,) * 5, results)
    assert schedule.bytes_sent([10] * 5, traveller_row=3, result_row=7) == [4 * 10 * (3 + 7 * results)] * 5


def test_causal_contiguous_sends_half() -> None:
    """Keys of rank r are needed by the ranks after it only: P (P - 1) / 2 hops in all."""
    need = needs(Mask.causal(), Layout.contiguous(16, 4))
    keys_travel = circulate(tuple(zip(*need, strict=True)), results=False)
    assert sum(len(step.messages) for step in keys_travel.steps) == 6

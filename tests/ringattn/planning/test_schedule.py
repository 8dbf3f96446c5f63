"""Schedules are data: literal expectations, and a walk that checks that every block gets where it is needed and home."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringattn import Layout, Mask
from ringattn.planning.rank_plan import needs
from ringattn.planning.schedule import LocalStep, Message, Need, Schedule, Step, build_schedule, direct, relay

ALL = range(4)  # the rows of a whole block in these tests


def travel(owner: int, src: int, dst: int, rows: range = ALL) -> Message:
    return Message("block", owner, src, dst, rows)


def result(owner: int, src: int, dst: int, rows: range = ALL) -> Message:
    return Message("result", owner, src, dst, rows)


def local_steps(*pairs: tuple[int, int], rows: range = ALL) -> tuple[LocalStep, ...]:
    return tuple(LocalStep(rank, owner, rows) for rank, owner in pairs)


def everyone(ranks: int, rows: range = ALL) -> Need:
    return ((rows,) * ranks,) * ranks


def test_relay_of_three_with_results() -> None:
    """Queries one hop ahead, states one behind, the own block last: P - 1 hops of each."""
    assert relay(everyone(3), results=True).steps == (
        Step((), (travel(0, 0, 1), travel(1, 1, 2), travel(2, 2, 0))),
        Step(local_steps((1, 0), (2, 1), (0, 2)), (travel(0, 1, 2), travel(1, 2, 0), travel(2, 0, 1))),
        Step(local_steps((2, 0), (0, 1), (1, 2)), (result(0, 1, 2), result(1, 2, 0), result(2, 0, 1))),
        Step(local_steps((0, 0), (1, 1), (2, 2)), (result(0, 2, 0), result(1, 0, 1), result(2, 1, 2))),
    )


def test_relay_of_three_without_results() -> None:
    """The own block first, while the first hop is under way."""
    assert relay(everyone(3), results=False).steps == (
        Step(local_steps((0, 0), (1, 1), (2, 2)), (travel(0, 0, 1), travel(1, 1, 2), travel(2, 2, 0))),
        Step(local_steps((1, 0), (2, 1), (0, 2)), (travel(0, 1, 2), travel(1, 2, 0), travel(2, 0, 1))),
        Step(local_steps((2, 0), (0, 1), (1, 2)), ()),
    )


def test_direct_of_three_with_results() -> None:
    """By rotation: from the owner to each visitor, and straight home; a part of the own block hides either end."""
    assert direct(everyone(3), results=True, split_points=(1, 1, 1)).steps == (
        Step(local_steps((0, 0), (1, 1), (2, 2), rows=range(1)), (travel(2, 2, 0), travel(0, 0, 1), travel(1, 1, 2))),
        Step(local_steps((0, 2), (1, 0), (2, 1)), (travel(1, 1, 0), travel(2, 2, 1), travel(0, 0, 2))),
        Step(local_steps((0, 1), (1, 2), (2, 0)), (result(2, 0, 2), result(0, 1, 0), result(1, 2, 1))),
        Step(local_steps((0, 0), (1, 1), (2, 2), rows=range(1, 4)), (result(1, 0, 1), result(2, 1, 2), result(0, 2, 0))),
    )


def test_direct_of_four_without_results() -> None:
    """By rank XOR s: every hop is an exchange of two ranks."""
    steps = direct(everyone(4), results=False).steps
    assert steps[0] == Step(
        local_steps((0, 0), (1, 1), (2, 2), (3, 3)), (travel(1, 1, 0), travel(0, 0, 1), travel(3, 3, 2), travel(2, 2, 3))
    )
    assert [[local_step.owner for local_step in step.local_steps] for step in steps] == [
        [0, 1, 2, 3],
        [1, 0, 3, 2],
        [2, 3, 0, 1],
        [3, 2, 1, 0],
    ]
    assert steps[3].messages == ()


def test_zigzag_moves_half_of_the_lower_ranks_keys() -> None:
    """Chunks 0 and 3 on rank 0, 1 and 2 on rank 1: rank 1 sees the first half of rank 0, rank 0's second half all of rank 1."""
    mask, layout = Mask.causal(), Layout.zigzag(8, 2)
    keys = needs(mask, layout, "keys")
    assert keys == ((range(4), range(2)), (range(4), range(4)))
    assert needs(mask, layout, "queries") == ((range(4), range(2, 4)), (range(4), range(4)))
    assert direct(keys, results=False).steps == (
        Step(local_steps((0, 0), (1, 1)), (travel(1, 1, 0), travel(0, 0, 1, range(2)))),
        Step((LocalStep(0, 1, ALL), LocalStep(1, 0, range(2)))),
    )


@pytest.mark.parametrize("all_pairs", (False, True), ids=("relay", "direct"))
def test_a_window_talks_to_its_neighbour_only(all_pairs: bool) -> None:
    """Queries of rank r need the keys of r and r - 1: those that do travel backwards, one hop, and the result comes home."""
    need = needs(Mask.causal(window=3), Layout.contiguous(12, 3))
    assert need == ((ALL, range(0), range(0)), (range(2), ALL, range(0)), (range(0), range(2), ALL))
    half = range(2)
    assert build_schedule(need, True, all_pairs).steps == (
        Step((), (travel(1, 1, 0, half), travel(2, 2, 1, half))),
        Step(local_steps((0, 1), (1, 2), rows=half), ()),
        Step(local_steps((0, 0), (1, 1), (2, 2)), (result(1, 0, 1, half), result(2, 1, 2, half))),
    )


@pytest.mark.parametrize("all_pairs", (False, True), ids=("relay", "direct"))
def test_one_rank_sends_nothing(all_pairs: bool) -> None:
    for results in (True, False):
        assert build_schedule(((ALL,),), results, all_pairs, (2,)).steps == (Step(local_steps((0, 0))),)


def walk(need: Need, schedule: Schedule, results: bool) -> None:
    """Carry out a schedule with names for rows: what is sent is in hand, every row needed is met once, and all come home."""
    ranks = range(len(need))
    held: list[dict[int, range]] = [{} for _ in ranks]
    earned: list[dict[int, list[tuple[int, range]]]] = [{} for _ in ranks]
    met: list[tuple[int, int, int]] = []
    for step in schedule.steps:
        for m in step.messages:
            if m.kind == "block":
                assert m.src == m.owner or held[m.src][m.owner] == m.rows
        leaving = [(m, earned[m.src].pop(m.owner)) for m in step.messages if m.kind == "result"]
        for rank, owner, rows in step.local_steps:
            assert rank == owner or held[rank][owner] == rows
            met += [(owner, rank, row) for row in rows if row in need[owner][rank]]
            earned[rank].setdefault(owner, []).append((rank, rows))
        held = [{m.owner: m.rows for m in step.messages if (m.kind, m.dst) == ("block", rank)} for rank in ranks]
        for m, seen in leaving:
            assert all(rows == m.rows for _, rows in seen)
            earned[m.dst].setdefault(m.owner, []).extend(seen)
    assert sorted(met) == [(owner, rank, row) for owner in ranks for rank in ranks for row in need[owner][rank]]
    if results:
        for owner in ranks:
            assert set(earned[owner]) <= {owner}
            home = {rank for rank, _ in earned[owner].get(owner, [])}
            assert home >= {rank for rank in ranks if need[owner][rank]}


spans = st.tuples(st.integers(0, 4), st.integers(0, 4)).map(lambda x: range(*x) if x[0] < x[1] else range(0))
needs_of_any_ring = st.integers(1, 7).flatmap(
    lambda n: st.tuples(*[st.tuples(*[spans] * n)] * n),
)


@given(needs_of_any_ring, st.booleans(), st.booleans(), st.integers(0, 4))
def test_every_block_gets_where_it_is_needed_and_home(need: Need, results: bool, all_pairs: bool, cut: int) -> None:
    walk(need, build_schedule(need, results, all_pairs, (cut,) * len(need)), results)


@given(needs_of_any_ring, st.booleans())
def test_direct_hops_never_share_a_link(need: Need, results: bool) -> None:
    """In no step does a rank send, or receive, two messages of a kind; and the owner sends, the owner receives."""
    for step in direct(need, results).steps:
        for kind in ("block", "result"):
            messages = [m for m in step.messages if m.kind == kind]
            for ends in ([m.src for m in messages], [m.dst for m in messages]):
                assert len(ends) == len(set(ends))
            assert all(m.owner == (m.src if kind == "block" else m.dst) for m in messages)


@pytest.mark.parametrize("all_pairs", (False, True), ids=("relay", "direct"))
@pytest.mark.parametrize("results", (True, False), ids=("results", "no-results"))
def test_no_rank_sends_more_than_the_formula(results: bool, all_pairs: bool) -> None:
    """P - 1 hops a traveller and, with results, P - 1 a result: the bytes of the design, for every rank alike."""
    schedule = build_schedule(everyone(5, range(10)), results, all_pairs)
    assert schedule.bytes_sent(block_row=3, result_row=7) == [4 * 10 * (3 + 7 * results)] * 5


@pytest.mark.parametrize("all_pairs", (False, True), ids=("relay", "direct"))
def test_causal_contiguous_sends_half(all_pairs: bool) -> None:
    """Keys of rank r are needed by the ranks after it only: P (P - 1) / 2 hops in all."""
    keys_travel = build_schedule(needs(Mask.causal(), Layout.contiguous(16, 4), "keys"), False, all_pairs)
    assert sum(len(step.messages) for step in keys_travel.steps) == 6

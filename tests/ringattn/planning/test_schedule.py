"""Tests of schedules, which are plain data: expected values written out in full, and a simulation of any schedule."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringattn import Layout, Mask
from ringattn.planning.rank_plan import needs
from ringattn.planning.schedule import LocalStep, Message, Need, Schedule, Step, build_schedule, direct, relay
from scripts.tools.plan_ring import bytes_sent

ALL = range(4)  # the rows of a whole block in these tests


def block(owner: int, src: int, dst: int, rows: range = ALL) -> Message:
    return Message("block", owner, src, dst, rows)


def result(owner: int, src: int, dst: int, rows: range = ALL) -> Message:
    return Message("result", owner, src, dst, rows)


def local_steps(*pairs: tuple[int, int], rows: range = ALL) -> tuple[LocalStep, ...]:
    return tuple(LocalStep(rank, owner, rows) for rank, owner in pairs)


def everyone(ranks: int, rows: range = ALL) -> Need:
    return ((rows,) * ranks,) * ranks


def test_relay_of_three_with_results() -> None:
    """Queries are sent one hop ahead and states one hop behind, P - 1 hops each. Each rank computes its own block last."""
    assert relay(everyone(3), results=True).steps == (
        Step((), (block(0, 0, 1), block(1, 1, 2), block(2, 2, 0))),
        Step(local_steps((1, 0), (2, 1), (0, 2)), (block(0, 1, 2), block(1, 2, 0), block(2, 0, 1))),
        Step(local_steps((2, 0), (0, 1), (1, 2)), (result(0, 1, 2), result(1, 2, 0), result(2, 0, 1))),
        Step(local_steps((0, 0), (1, 1), (2, 2)), (result(0, 2, 0), result(1, 0, 1), result(2, 1, 2))),
    )


def test_relay_of_three_without_results() -> None:
    """Each rank computes its own block first, which hides the first hop."""
    assert relay(everyone(3), results=False).steps == (
        Step(local_steps((0, 0), (1, 1), (2, 2)), (block(0, 0, 1), block(1, 1, 2), block(2, 2, 0))),
        Step(local_steps((1, 0), (2, 1), (0, 2)), (block(0, 1, 2), block(1, 2, 0), block(2, 0, 1))),
        Step(local_steps((2, 0), (0, 1), (1, 2)), ()),
    )


def test_direct_of_three_with_results() -> None:
    """Ranks are paired by rotation. Parts of each rank's own block hide the first and the last hop."""
    assert direct(everyone(3), results=True, split_points=(1, 1, 1)).steps == (
        Step(local_steps((0, 0), (1, 1), (2, 2), rows=range(1)), (block(2, 2, 0), block(0, 0, 1), block(1, 1, 2))),
        Step(local_steps((0, 2), (1, 0), (2, 1)), (block(1, 1, 0), block(2, 2, 1), block(0, 0, 2))),
        Step(local_steps((0, 1), (1, 2), (2, 0)), (result(2, 0, 2), result(0, 1, 0), result(1, 2, 1))),
        Step(local_steps((0, 0), (1, 1), (2, 2), rows=range(1, 4)), (result(1, 0, 1), result(2, 1, 2), result(0, 2, 0))),
    )


def test_direct_of_four_without_results() -> None:
    """Ranks are paired by rank XOR s, so that two ranks exchange their blocks in every hop."""
    steps = direct(everyone(4), results=False).steps
    assert steps[0] == Step(
        local_steps((0, 0), (1, 1), (2, 2), (3, 3)), (block(1, 1, 0), block(0, 0, 1), block(3, 3, 2), block(2, 2, 3))
    )
    assert [[local_step.owner for local_step in step.local_steps] for step in steps] == [
        [0, 1, 2, 3],
        [1, 0, 3, 2],
        [2, 3, 0, 1],
        [3, 2, 1, 0],
    ]
    assert steps[3].messages == ()


def test_zigzag_sends_half_of_the_keys_of_rank_0() -> None:
    """Rank 0 holds chunks 0 and 3, and rank 1 holds 1 and 2. Rank 1 attends to the first half of rank 0's keys only."""
    mask, layout = Mask.causal(), Layout.zigzag(8, 2)
    keys = needs(mask, layout, "keys")
    assert keys == ((range(4), range(2)), (range(4), range(4)))
    assert needs(mask, layout, "queries") == ((range(4), range(2, 4)), (range(4), range(4)))
    assert direct(keys, results=False).steps == (
        Step(local_steps((0, 0), (1, 1)), (block(1, 1, 0), block(0, 0, 1, range(2)))),
        Step((LocalStep(0, 1, ALL), LocalStep(1, 0, range(2)))),
    )


@pytest.mark.parametrize("all_pairs", [False, True], ids=("relay", "direct"))
def test_a_window_needs_only_the_neighbour(all_pairs: bool) -> None:
    """Queries of rank r need the keys of ranks r and r - 1, so the queries are sent one hop back, and their results return."""
    need = needs(Mask.causal(window=3), Layout.contiguous(12, 3))
    assert need == ((ALL, range(0), range(0)), (range(2), ALL, range(0)), (range(0), range(2), ALL))
    half = range(2)
    assert build_schedule(need, True, all_pairs).steps == (
        Step((), (block(1, 1, 0, half), block(2, 2, 1, half))),
        Step(local_steps((0, 1), (1, 2), rows=half), ()),
        Step(local_steps((0, 0), (1, 1), (2, 2)), (result(1, 0, 1, half), result(2, 1, 2, half))),
    )


@pytest.mark.parametrize("all_pairs", [False, True], ids=("relay", "direct"))
def test_one_rank_sends_nothing(all_pairs: bool) -> None:
    """A ring of one rank computes its own block in one step."""
    for results in (True, False):
        assert build_schedule(((ALL,),), results, all_pairs, (2,)).steps == (Step(local_steps((0, 0))),)


def carry_out(need: Need, schedule: Schedule, results: bool) -> None:
    """Simulate a schedule with sets of rows in place of tensors.

    Checks that a rank sends only what it holds, that every row that is needed is computed exactly once, and that every result
    returns to its owner.
    """
    ranks = range(len(need))
    blocks: list[dict[int, range]] = [{} for _ in ranks]  # by rank and owner: rows of the block at the rank
    partial_results: list[dict[int, list[tuple[int, range]]]] = [{} for _ in ranks]  # likewise: (computing rank, rows)
    computed: list[tuple[int, int, int]] = []
    for step in schedule.steps:
        for m in step.messages:
            if m.kind == "block":
                assert m.src == m.owner or blocks[m.src][m.owner] == m.rows
        in_flight = [(m, partial_results[m.src].pop(m.owner)) for m in step.messages if m.kind == "result"]
        for rank, owner, rows in step.local_steps:
            assert rank == owner or blocks[rank][owner] == rows
            computed += [(owner, rank, row) for row in rows if row in need[owner][rank]]
            partial_results[rank].setdefault(owner, []).append((rank, rows))
        blocks = [{m.owner: m.rows for m in step.messages if (m.kind, m.dst) == ("block", rank)} for rank in ranks]
        for m, contributions in in_flight:
            assert all(rows == m.rows for _, rows in contributions)
            partial_results[m.dst].setdefault(m.owner, []).extend(contributions)
    assert sorted(computed) == [(owner, rank, row) for owner in ranks for rank in ranks for row in need[owner][rank]]
    if results:
        for owner in ranks:
            assert set(partial_results[owner]) <= {owner}
            returned = {rank for rank, _ in partial_results[owner].get(owner, [])}
            assert returned >= {rank for rank in ranks if need[owner][rank]}


spans = st.tuples(st.integers(0, 4), st.integers(0, 4)).map(lambda x: range(*x) if x[0] < x[1] else range(0))
needs_of_any_ring = st.integers(1, 7).flatmap(
    lambda n: st.tuples(*[st.tuples(*[spans] * n)] * n),
)


@given(needs_of_any_ring, st.booleans(), st.booleans(), st.integers(0, 4))
def test_every_block_is_computed_where_it_is_needed(need: Need, results: bool, all_pairs: bool, split: int) -> None:
    """Needs, rings, and the points at which the ranks split their own blocks are random."""
    schedule = build_schedule(need, results, all_pairs, (split,) * len(need))
    for rank in range(len(need)):
        for step, own in zip(schedule.steps, schedule.by_rank[rank], strict=True):
            assert own.local_steps == tuple(x for x in step.local_steps if x.rank == rank)
            assert own.outgoing == tuple(x for x in step.messages if x.src == rank)
            assert own.incoming == tuple(x for x in step.messages if x.dst == rank)
    carry_out(need, schedule, results)


def test_a_rank_does_not_create_the_steps_of_other_ranks():
    schedule = direct(everyone(64), results=True)
    assert len(schedule.by_rank[3]) == 65
    assert "steps" not in vars(schedule)


@given(needs_of_any_ring, st.booleans())
def test_a_rank_sends_at_most_one_direct_message_of_a_kind(need: Need, results: bool) -> None:
    """In every step a rank sends and receives at most one message of each kind, either from or to its owner."""
    for step in direct(need, results).steps:
        for kind in ("block", "result"):
            messages = [m for m in step.messages if m.kind == kind]
            for peers in ([m.src for m in messages], [m.dst for m in messages]):
                assert len(peers) == len(set(peers))
            assert all(m.owner == (m.src if kind == "block" else m.dst) for m in messages)


@pytest.mark.parametrize("all_pairs", [False, True], ids=("relay", "direct"))
@pytest.mark.parametrize("results", [True, False], ids=("results", "no-results"))
def test_no_rank_sends_more_than_the_formula(results: bool, all_pairs: bool) -> None:
    """Every rank sends P - 1 times the bytes of a block and, with results, P - 1 times the bytes of a result."""
    schedule = build_schedule(everyone(5, range(10)), results, all_pairs)
    assert bytes_sent(schedule, block_row=3, result_row=7) == [4 * 10 * (3 + 7 * results)] * 5


@pytest.mark.parametrize("all_pairs", [False, True], ids=("relay", "direct"))
def test_a_causal_mask_halves_the_hops_of_a_contiguous_layout(all_pairs: bool) -> None:
    """Only the ranks after rank r need its keys, which makes P (P - 1) / 2 hops in total."""
    schedule = build_schedule(needs(Mask.causal(), Layout.contiguous(16, 4), "keys"), False, all_pairs)
    assert sum(len(step.messages) for step in schedule.steps) == 6

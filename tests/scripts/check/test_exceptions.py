"""Tests of the script that raises exceptions at random kernels."""

import subprocess
import sys

import pytest

from scripts import command
from scripts.check.exceptions import DIFFERENT, KINDS, NONE, SAME, SOME, draw_events, judge


def test_events_are_drawn_as_the_kinds_say() -> None:
    """Every kind occurs, and only a limited number of calls may end in a fault."""
    events = draw_events(300, ranks=3, faults=20, few_different=True, seed=0)
    assert {event.kind for event in events} == set(KINDS)
    assert sum(event.kind in (SOME, DIFFERENT) for event in events) == 20
    for event in events:
        failing = sum(position >= 0 for position in event.positions)
        assert (failing == 0) == (event.kind == NONE)
        assert (0 < failing < 3) == (event.kind == SOME)
        assert len(set(event.positions)) == 1 or event.kind in (SOME, DIFFERENT)


FAULT = "fault: ringattn: rank 1 left call 3 of the group because of Injected: injected, but rank 0 did not"


@pytest.mark.parametrize(
    ("kind", "by_rank", "endings", "result"),
    [
        (NONE, [["exact"], ["exact"]], {}, "as expected"),
        (NONE, [["exact"], ["wrong: error 1"]], {}, "wrong"),
        (NONE, [["exact"], []], {}, "wrong"),
        (SAME, [["injected"], ["injected"]], {}, "as expected"),
        (SAME, [["exact"], ["injected"]], {}, "wrong"),
        (SOME, [["exact", FAULT], ["injected", FAULT]], {}, "all ranks raised"),
        (SOME, [["exact", "exact"], ["injected", FAULT]], {}, "wrong"),
        (SOME, [[], ["injected", FAULT]], {0: FAULT}, "all ranks raised"),
        (SOME, [["fault: rank 1 is gone"], ["injected", FAULT]], {}, "wrong error"),
        (NONE, [[FAULT], [FAULT]], {}, "wrong error"),
    ],
)
def test_a_call_is_judged_over_all_ranks(kind: str, by_rank: list[list[str]], endings: dict[int, str], result: str) -> None:
    """A wrong number, a missing outcome and an error that names no rank are faults."""
    (event,) = [event for event in draw_events(100, 2, 50, False, 0) if event.kind == kind][:1]
    positions = {NONE: [-1, -1], SAME: [5, 5], SOME: [-1, 5]}[kind]
    assert judge(event._replace(positions=positions), by_rank, endings) == result


@pytest.mark.slow
def test_random_exceptions() -> None:
    """40 calls on two ranks."""
    arguments = [sys.executable, "-m", "scripts.check.exceptions", "--calls", "40", "--faults", "4"]
    done = subprocess.run(arguments, cwd=command.ROOT, env=command.child_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "40 of 40 calls, " in done.stdout, done.stdout
    assert " 0 processes left" in done.stdout, done.stdout

"""Tests of the choice of parameters."""

from itertools import combinations, product

import pytest

from tests.covering import every_pair, pairs

SIZES = [(2, 2), (5, 3, 2, 2), (5, 3, 2, 10), (2, 2, 2, 2, 2, 2), (4, 1, 3)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_two_values_occur_together(sizes: tuple[int, ...]) -> None:
    """The array holds every pair of values, and is at most 1.6 times as long as the two longest parameters require."""
    parameters = {f"p{i}": range(size) for i, size in enumerate(sizes)}
    cases = pairs(**parameters)
    for a, b in combinations(range(len(sizes)), 2):
        assert {(case[a], case[b]) for case in cases} == set(product(range(sizes[a]), range(sizes[b])))
    longest, second = sorted(sizes)[:-3:-1]
    assert len(cases) <= 1.6 * longest * second + 2
    assert cases == pairs(**parameters)


def test_combinations_outside_the_array_are_slow() -> None:
    """All combinations are tested, and those of the covering array are the quick tests."""
    sizes = {"mask": ("causal", "full", "window"), "layout": ("zigzag", "striped"), "ranks": (1, 2)}
    mark = every_pair(**sizes).mark
    names, cases = mark.args
    assert names == "mask,layout,ranks"
    assert [case.values for case in cases] == list(product(*sizes.values()))
    assert [case.values for case in cases if not case.marks] == sorted(
        pairs(**sizes), key=lambda case: list(product(*sizes.values())).index(case)
    )
    assert all(mark.name == "slow" for case in cases for mark in case.marks)

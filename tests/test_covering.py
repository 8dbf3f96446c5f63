"""Tests of the choice of parameters."""

from itertools import combinations, product

import pytest

from tests.covering import covering_array, every_pair, pairs

SIZES = [(2, 2), (5, 3, 2, 2), (5, 3, 2, 10), (2, 2, 2, 2, 2, 2), (4, 1, 3)]


@pytest.mark.parametrize("strength", [2, 3])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_choice_of_values_occurs(sizes: tuple[int, ...], strength: int) -> None:
    """The array contains every choice for 2 or 3 parameters, and is at most twice as long as the longest parameters require."""
    cases = covering_array(list(sizes), strength)
    for chosen in combinations(range(len(sizes)), min(strength, len(sizes))):
        assert {tuple(case[i] for i in chosen) for case in cases} == set(product(*(range(sizes[i]) for i in chosen)))
    required = 1
    for size in sorted(sizes, reverse=True)[:strength]:
        required *= size
    assert len(cases) <= 2 * required
    assert cases == covering_array(list(sizes), strength)


def test_cases_outside_the_pairs_are_slow() -> None:
    """All combinations of three parameters are tested. Those that contain every pair are quick."""
    sizes = {"mask": ("causal", "full", "window"), "layout": ("zigzag", "striped"), "ranks": (1, 2)}
    mark = every_pair(**sizes).mark
    names, cases = mark.args
    assert names == "mask,layout,ranks"
    assert [case.values for case in cases] == list(product(*sizes.values()))
    assert {case.values for case in cases if not case.marks} == set(pairs(**sizes))
    assert all(mark.name == "slow" for case in cases for mark in case.marks)

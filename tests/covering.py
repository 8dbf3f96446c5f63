"""Choose a few combinations of parameters that contain every pair or triple of values.

Most faults need a particular value of one parameter or of two, for example one mask under one schedule. A covering array finds
such faults with far fewer tests than all combinations: 5 masks, 3 layouts, 2 schedules and 2 transports have 60 combinations,
and 16 of them contain every pair of values.
"""

from collections.abc import Iterable
from itertools import combinations, product

import pytest


def pairs(**parameters: Iterable) -> list[tuple]:
    """Return combinations of values in which every pair of values of two parameters occurs at least once.

    Args:
        parameters: the values of each parameter, by its name.

    Returns:
        Combinations, each with one value for each parameter in the order of the arguments; the same ones at every call.
    """
    values = [list(choices) for choices in parameters.values()]
    cases = covering_array([len(choices) for choices in values], 2)
    return [tuple(choices[index] for choices, index in zip(values, case, strict=True)) for case in cases]


def covering_array(sizes: list[int], strength: int) -> list[tuple[int, ...]]:
    """Return a covering array: combinations in which every choice of values for `strength` parameters occurs at least once.

    Args:
        sizes: the number of values of each parameter.
        strength: how many parameters are combined: 2 for all pairs, 3 for all triples.

    Returns:
        Combinations, each with the index of one value for each parameter.
    """
    # A choice is (parameter, index of its value). Dictionaries serve as ordered sets, so that the result is deterministic.
    choices = [[(parameter, index) for index in range(size)] for parameter, size in enumerate(sizes)]
    groups = combinations(choices, min(strength, len(sizes)))
    missing = {frozenset(chosen): None for group in groups for chosen in product(*group)}
    cases = []
    while missing:
        # Begin with choices that are still missing. For every other parameter take the value that adds most missing ones.
        case = dict(next(iter(missing)))
        for options in choices:
            if options[0][0] not in case:
                others = list(combinations(case.items(), strength - 1))
                case |= [max(options, key=lambda option: sum(frozenset((option, *other)) in missing for other in others))]
        for chosen in combinations(case.items(), min(strength, len(sizes))):
            missing.pop(frozenset(chosen), None)
        cases.append(tuple(case[parameter] for parameter in range(len(sizes))))
    return cases


def every_pair(**parameters: Iterable) -> pytest.MarkDecorator:
    """Parametrize a test over combinations that contain every pair of values, and over slow ones that contain every triple."""
    return _parametrize(parameters, 2, 3)


def every_value(slow: int = 2, **parameters: Iterable) -> pytest.MarkDecorator:
    """Parametrize a test over combinations that contain every value, and over slow ones.

    The slow ones contain every choice of values for `slow` parameters, which are pairs by default.
    """
    return _parametrize(parameters, 1, slow)


def _parametrize(parameters: dict[str, Iterable], quick: int, slow: int) -> pytest.MarkDecorator:
    values = [list(choices) for choices in parameters.values()]
    sizes = [len(choices) for choices in values]
    quick_cases, slow_cases = (set(covering_array(sizes, strength)) for strength in (quick, slow))
    cases = []
    for case in sorted(quick_cases | slow_cases):
        marks = () if case in quick_cases else (pytest.mark.slow,)
        chosen = [choices[i] for choices, i in zip(values, case, strict=True)]
        cases.append(pytest.param(*chosen, marks=marks, id="-".join(map(str, chosen)).replace("torch.", "")))
    return pytest.mark.parametrize(",".join(parameters), cases)

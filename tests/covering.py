"""Choose few combinations of parameters in which every two values of different parameters occur together.

Most faults need a particular value of one parameter, or of two at once, for example one mask under one schedule. A covering
array finds such faults with far fewer tests than all combinations: 5 masks, 3 layouts, 2 schedules and 2 transports have 60
combinations, and 16 of them contain every pair of values.
"""

from collections.abc import Iterable
from itertools import combinations, product

import pytest


def pairs(**parameters: Iterable) -> list[tuple]:
    """Return a covering array: combinations of values in which every pair of values of two parameters occurs at least once.

    Args:
        parameters: the values of each parameter, by its name.

    Returns:
        Combinations, each with one value for each parameter in the order of the arguments; the same ones at every call.
    """
    values = [list(choices) for choices in parameters.values()]
    # A choice is (parameter, index of its value). Dictionaries serve as ordered sets, so that the result is deterministic.
    choices = [[(parameter, index) for index in range(len(values[parameter]))] for parameter in range(len(values))]
    missing = {frozenset(pair): None for a, b in combinations(choices, 2) for pair in product(a, b)}
    cases = []
    while missing:
        # Begin with a pair that is still missing. For every other parameter take the value that adds most missing pairs.
        case = dict(next(iter(missing)))
        for options in choices:
            if options[0][0] not in case:
                case |= [max(options, key=lambda option: sum(frozenset((option, other)) in missing for other in case.items()))]
        for pair in combinations(case.items(), 2):
            missing.pop(frozenset(pair), None)
        cases.append(tuple(values[parameter][case[parameter]] for parameter in range(len(values))))
    return cases


def every_pair(**parameters: Iterable) -> pytest.MarkDecorator:
    """Parametrize a test over all combinations of values, and mark those as slow that are not in the covering array."""
    values = [list(choices) for choices in parameters.values()]
    indices = [range(len(choices)) for choices in values]
    quick = set(pairs(**dict(zip(parameters, indices, strict=True))))
    cases = []
    for case in product(*indices):
        marks = () if case in quick else (pytest.mark.slow,)
        chosen = [choices[i] for choices, i in zip(values, case, strict=True)]
        cases.append(pytest.param(*chosen, marks=marks, id="-".join(map(str, chosen)).replace("torch.", "")))
    return pytest.mark.parametrize(",".join(parameters), cases)

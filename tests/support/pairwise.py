"""Few fast tests in place of full products: every pair of values, or every value, meets in one; the others are slow."""

import itertools
from collections.abc import Iterable

import pytest


def pairwise(**axes: Iterable) -> pytest.MarkDecorator:
    """Parametrizes over the product of some axes, where only enough combinations stay fast for every pair to occur.

    Chosen greedily and always the same: the next is the combination with the most pairs that have not occurred yet.

    Args:
        axes: the argument's name and its values.
    """
    return _covering(2, axes)


def singly(**axes: Iterable) -> pytest.MarkDecorator:
    """The same for every value to occur: as many fast combinations as the longest axis has values."""
    return _covering(1, axes)


def _covering(together: int, axes: dict[str, Iterable]) -> pytest.MarkDecorator:
    combinations = list(itertools.product(*(list(values) for values in axes.values())))
    numbered = list(itertools.product(*(range(len(list(values))) for values in axes.values())))
    pairs = [set(itertools.combinations(enumerate(one), together)) or {one} for one in numbered]
    missing, fast = set().union(*pairs), set()
    while missing:
        best = max(range(len(pairs)), key=lambda number: len(pairs[number] & missing))
        fast.add(best)
        missing -= pairs[best]
    return pytest.mark.parametrize(
        tuple(axes),
        [
            pytest.param(*values, marks=[] if number in fast else [pytest.mark.slow])
            for number, values in enumerate(combinations)
        ],
    )

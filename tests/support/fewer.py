"""Which cases of a test `make test` runs: of a product, only as many as it takes for every value to occur once.

Of a test that takes long, `pytest.mark.few` says how many.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable
from typing import Any

import pytest


def leave_products_to_the_slow_run(items: Iterable[pytest.Item]) -> None:
    """Marks as slow what a test's other cases cover value by value, and what exceeds its mark `few`.

    The axes of a product are the test's `parametrize` decorators and parametrized fixtures. A decorator that lists
    combinations of several arguments is one axis, so without a mark `few` none of them is left out; neither is a case
    that has a value which no other has.
    """
    cases: defaultdict[tuple, list[Any]] = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and item.get_closest_marker("slow") is None:
            cases[item.path, item.parent, item.originalname].append(item)  # type: ignore[attr-defined]
    for product in cases.values():
        few = product[0].get_closest_marker("few")
        for case in _dispensable(product, len(product) if few is None else few.args[0]):
            case.add_marker(pytest.mark.slow)


def _dispensable(product: list[Any], limit: int) -> list[Any]:
    """All but a cover, which is chosen greedily and always the same: next is the case with the most new values."""
    values = [_values(case) for case in product]
    missing, chosen = set().union(*values), set()
    while missing and len(chosen) < limit:
        best = max(range(len(values)), key=lambda number: len(values[number] & missing))
        chosen.add(best)
        missing -= values[best]
    return [case for number, case in enumerate(product) if number not in chosen]


def _values(case: Any) -> set[Hashable]:
    """Every axis of the case with its value."""
    given = dict(case.callspec.params)
    axes = []
    for mark in case.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        axes.append(tuple(name.strip() for name in names))
    together = {name for axis in axes for name in axis}
    axes += [(name,) for name in given if name not in together]
    return {(axis, *(_identity(given[name]) for name in axis)) for axis in axes}


def _identity(value: Any) -> Hashable:
    """Values of one list are the same objects in all cases; plain ones are compared, as they may be made anew."""
    return (type(value), value) if isinstance(value, str | int | float | bool | None) else id(value)

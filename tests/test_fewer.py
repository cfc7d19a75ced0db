"""What `make test` leaves out of a product of parameters."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from support.fewer import leave_products_to_the_slow_run


class Case:
    """What the rule reads of a case that pytest has collected."""

    path, parent, originalname = "test_a.py", None, "test_a"

    def __init__(self, axes: list[str], slow: bool = False, few: int | None = None, **params: Any):
        self.callspec, self.axes, self.slow, self.few = SimpleNamespace(params=params), axes, slow, few

    def iter_markers(self, name: str) -> list[Any]:
        return [pytest.mark.parametrize(axis, []).mark for axis in self.axes]

    def get_closest_marker(self, name: str) -> Any:
        if name == "slow":
            return pytest.mark.slow.mark if self.slow else None
        return None if self.few is None else pytest.mark.few(self.few).mark

    def add_marker(self, marker: pytest.MarkDecorator) -> None:
        assert marker.name == "slow"
        self.slow = True


def fast(cases: list[Case]) -> list[dict[str, Any]]:
    leave_products_to_the_slow_run(cases)  # type: ignore[arg-type]
    return [case.callspec.params for case in cases if not case.slow]


def test_every_value_of_a_product_stays_in_as_few_cases_as_the_longest_axis_has_values():
    shapes = [object() for _ in range(4)]  # compared as objects
    product = itertools.product(shapes, ["sft", "ppo"], [True, False])
    left = fast([Case(["shape", "loss", "lora"], shape=a, loss=b, lora=c) for a, b, c in product])
    assert len(left) == 4
    for axis, values in (("shape", shapes), ("loss", ["sft", "ppo"]), ("lora", [True, False])):
        assert all(any(case[axis] is value for case in left) for value in values)


def test_a_list_of_combinations_loses_none_and_a_fixture_is_an_axis():
    listed = [(1, 2), (2, 1), (1, 1), (2, 2)]
    left = fast([Case(["a, b"], a=a, b=b, backend=x) for a, b in listed for x in ("triton", "torch")])
    assert sorted((case["a"], case["b"]) for case in left) == sorted(listed)
    assert {case["backend"] for case in left} == {"triton", "torch"}


def test_what_is_slow_already_covers_nothing_and_true_is_not_one():
    cases = [Case(["n"], slow=True, n=1), Case(["n"], n=True), Case(["n"], n=1)]
    assert fast(cases) == [{"n": True}, {"n": 1}]


def test_of_a_test_with_few_cases_the_first_stay_that_have_the_most_values_together():
    product = list(itertools.product("abc", "xy"))
    assert fast([Case(["n"], few=2, n=n) for n in range(5)]) == [{"n": 0}, {"n": 1}]
    assert fast([Case(["n", "m"], few=2, n=n, m=m) for n, m in product]) == [{"n": "a", "m": "x"}, {"n": "b", "m": "y"}]
    assert len(fast([Case(["n"], few=9, n=n) for n in range(5)])) == 5

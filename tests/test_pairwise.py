"""`make test` covers every pair of values, and `make test-full` every combination."""

import itertools

from support.pairwise import pairwise


def test_every_pair_of_values_meets_in_a_fast_test_and_every_combination_in_some():
    axes = {"a": "abcdefg", "b": [1, 2, 3], "c": [True, False], "d": "xy"}
    names, given = pairwise(**axes).args
    assert names == tuple(axes)
    assert {one.values for one in given} == set(itertools.product(*axes.values()))
    fast = [one.values for one in given if not one.marks]
    for (i, first), (j, second) in itertools.combinations(enumerate(axes.values()), 2):
        assert {(one[i], one[j]) for one in fast} == set(itertools.product(first, second))
    assert 21 <= len(fast) <= 28 < len(given)

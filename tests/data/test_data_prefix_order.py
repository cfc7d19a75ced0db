"""Rows sorted on disk are those sorted in memory, and give the tree of all rows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treetrain.data import prefix_order as module
from treetrain.data.prefix_order import PrefixSorter, merge_runs, prefix_order
from treetrain.data.trajectory import Trajectory
from treetrain.tree.build import build_tree

rows_of_files = st.lists(
    st.builds(
        Trajectory,
        st.lists(st.sampled_from([0, 1, 256, 2**31 - 1]), max_size=7),
        group=st.sampled_from([None, None, None, "g"]),
        key=st.sampled_from([None, None, "adapter", 1]),
    ),
    max_size=25,
)


def as_lists(order) -> list[list[int]]:
    return [array.tolist() for array in order]


@pytest.mark.parametrize(("run_bytes", "most"), [(1, 2), (60, 2), (200, 100)])
def test_many_runs_merged_in_several_rounds_are_one_sort(run_bytes, most, monkeypatch, tmp_path_factory) -> None:
    monkeypatch.setattr(module, "RUN_BYTES", run_bytes)
    monkeypatch.setattr(module, "MOST_RUNS", most)

    @settings(max_examples=40, deadline=None)
    @given(rows=rows_of_files, cut=st.integers(0, 25))
    def check(rows, cut) -> None:
        folder = tmp_path_factory.mktemp("runs")
        runs = []
        for base, share in ((0, rows[:cut]), (cut, rows[cut:])):  # two processes, each with its own numbers
            sorter = PrefixSorter(folder)
            for number, row in enumerate(share):
                if row.group is None:
                    sorter.add(row, number)
            runs += [(path, base) for path in sorter.close()]
        assert as_lists(merge_runs(runs, folder)) == as_lists(prefix_order(rows))

    check()


@settings(max_examples=150, deadline=None)
@given(rows=rows_of_files, keep=st.lists(st.booleans(), min_size=25, max_size=25))
def test_the_order_of_some_rows_follows_from_that_of_all(rows, keep) -> None:
    numbers = np.flatnonzero(keep[: len(rows)])
    found = prefix_order(rows).of(numbers, len(rows))
    assert as_lists(found) == as_lists(prefix_order([rows[number] for number in numbers.tolist()]))


@settings(max_examples=150, deadline=None)
@given(rows=rows_of_files)
def test_what_neighbours_share_counts_the_tokens_of_the_tree(rows) -> None:
    loose = [row for row in rows if row.group is None]
    order = prefix_order(loose)
    lengths = np.array([len(row) for row in loose], np.int64)
    assert sorted(order.rows.tolist()) == np.flatnonzero(lengths).tolist()
    assert int((lengths[order.rows] - order.shared).sum()) == build_tree(loose).num_tokens

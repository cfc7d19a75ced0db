"""Sorted rows and what neighbours share give the tree of all rows."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treetrain.core.tree.token_tree import build_tree
from treetrain.layers.trajectory import Trajectory
from treetrain.logs import columns as module
from treetrain.logs.columns import RowColumns, prefix_order

rows_of_files = st.lists(
    st.builds(
        Trajectory,
        st.lists(st.sampled_from([0, 1, 256, 2**31 - 1]), max_size=7),
        group=st.sampled_from([None, None, None, "g"]),
        key=st.sampled_from([None, None, "adapter", 1]),
    ),
    max_size=25,
)


def test_no_rows_have_an_order():
    assert list(module.sorted_by_prefix([], [].__getitem__)) == []


@pytest.mark.few(2)
@pytest.mark.parametrize("tokens", [1, 6, 25, 1024])
def test_neighbours_share_what_they_have_in_common_whatever_is_read_at_once(tokens, monkeypatch):
    monkeypatch.setattr(module, "TOKENS_AT_ONCE", tokens)

    @settings(max_examples=60, deadline=None)
    @given(rows=rows_of_files)
    def check(rows) -> None:
        order, shares = prefix_order(rows, RowColumns(rows))
        loose = [number for number, row in enumerate(rows) if row.group is None and len(row)]
        assert sorted(order.tolist()) == loose
        entries = [(repr(rows[number].key), rows[number].ids.tolist()) for number in order.tolist()]
        assert shares.tolist()[:1] == [0] * bool(loose)
        for (before, after), shared in zip(pairwise(entries), shares.tolist()[1:], strict=True):
            common = np.cumprod([a == b for a, b in zip(before[1], after[1])]).sum() if before[0] == after[0] else 0
            assert shared == common

    check()


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(rows=rows_of_files)
def test_what_neighbours_share_counts_the_tokens_of_the_tree(rows) -> None:
    loose = [row for row in rows if row.group is None]
    order, shared = prefix_order(loose, RowColumns(loose))
    lengths = np.array([len(row) for row in loose], np.int64)
    assert sorted(order.tolist()) == np.flatnonzero(lengths).tolist()
    assert int((lengths[order] - shared).sum()) == build_tree(loose).num_tokens

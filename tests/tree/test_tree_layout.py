import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treetrain.core.tree.layout import cut, flat_reads, pack
from treetrain.core.tree.token_tree import build_tree
from treetrain.layers.trajectory import Trajectory

ROWS = st.lists(st.lists(st.integers(0, 2), max_size=7), max_size=10)


@st.composite
def used_rows(draw) -> tuple[list[list[int]], np.ndarray]:
    rows = draw(ROWS)
    flat = sum(map(len, rows))
    return rows, np.array(draw(st.lists(st.booleans(), min_size=flat, max_size=flat)), bool)


def lay_out(rows, used: np.ndarray, *, trim: bool = True):
    """The layout of the used predictions, and who reads which edge."""
    tree = build_tree(rows)
    predicted = np.zeros(tree.num_tokens, bool)
    predicted[tree.paths()[1][used]] = True
    layout = pack(tree, predicted, trim=trim)
    return layout, flat_reads(tree, layout, used)


def brute_force(rows: list[list[int]], used: np.ndarray):
    """Prefixes that must be computed, edges (prefix, token), and what each used prediction reads."""
    needed, edges, reads = set(), set(), []
    at = prediction = 0
    for row in rows:
        for t, token in enumerate(row):
            if t and used[at + t]:
                edges.add((tuple(row[:t]), token))
                reads.append((prediction + t - 1, tuple(row[:t]), token))
                needed |= {tuple(row[:n]) for n in range(1, t + 1)}
        at += len(row)
        prediction += max(len(row) - 1, 0)
    return needed, edges, reads


@settings(max_examples=100, deadline=None)
@given(used_rows(), st.booleans())
def test_the_layout_is_what_a_brute_force_over_prefixes_says(case, trim):
    rows, used = case
    used = used & np.concatenate([np.zeros(0, bool), *(np.arange(len(row)) > 0 for row in rows)])
    layout, reads_of = lay_out(rows, used, trim=trim)
    needed, edges, reads = brute_force(rows, used)
    if not trim:
        needed = {tuple(row[:n]) for row in rows for n in range(1, len(row) + 1)}
    prefixes = []
    for i in range(layout.num_tokens):
        visible = [j for j in range(i + 1) if i < layout.ends[j]]
        prefixes.append(tuple(layout.input_ids[visible].tolist()))
        assert layout.positions[i] == len(visible) - 1
    assert len(set(prefixes)) == len(prefixes) and set(prefixes) == needed
    ours = [(prefixes[r], t) for r, t in zip(layout.edge_rows, layout.edge_targets.tolist())]
    assert len(set(ours)) == len(ours) and set(ours) == edges
    assert (np.diff(layout.edge_rows) >= 0).all()
    assert layout.rows.tolist() == sorted(set(layout.edge_rows.tolist()))
    assert (layout.rows[layout.edge_row_index] == layout.edge_rows).all()
    assert [(i, *ours[e]) for i, e in zip(reads_of[1].tolist(), reads_of[0])] == reads
    assert layout.pairs == sum(map(len, prefixes))


@settings(max_examples=50, deadline=None)
@given(used_rows())
def test_segments_are_the_maximal_runs_without_a_fork(case):
    rows, used = case
    layout, _ = lay_out(rows, used)
    start, above = layout.segment_start, layout.segment_parent
    parent = [max((j for j in range(i) if i < layout.ends[j]), default=-1) for i in range(layout.num_tokens)]
    children = [parent.count(i) for i in range(layout.num_tokens)]
    expected = [i for i, p in enumerate(parent) if p < 0 or children[p] > 1]
    assert start.tolist() == [*expected, layout.num_tokens]
    for s, p in enumerate(above):
        assert parent[start[s]] == (start[p + 1] - 1 if p >= 0 else -1)


@settings(max_examples=40, deadline=None)
@given(ROWS)
def test_an_untrimmed_layout_is_the_tree_itself(rows):
    tree = build_tree(rows)
    layout = pack(tree, trim=False)
    assert layout.input_ids.tolist() == tree.tokens.tolist()
    assert layout.ends.tolist() == tree.end.tolist()
    assert layout.segment_start.tolist() == tree.segment_start.tolist()
    assert layout.segment_parent.tolist() == tree.segment_parent.tolist()


def test_childless_tails_and_untrained_context_behind_the_last_use_are_trimmed():
    rows = [
        Trajectory([1, 2, 3, 4, 5], loss_weights=[0, 1, 0, 0, 0]),
        Trajectory([1, 2, 6, 7], loss_weights=[0, 0, 1, 0]),
        Trajectory([8, 9], loss_weights=0),
    ]
    layout, reads = lay_out(rows, build_tree(rows).trained_predictions)
    assert layout.input_ids.tolist() == [1, 2]
    assert layout.edge_targets.tolist() == [2, 6]
    assert reads[1].tolist() == [0, 5]


def test_one_edge_is_read_by_every_trajectory_that_holds_it():
    layout, reads = lay_out([[1, 2, 3], [1, 2, 4], [1, 2, 3]], np.array([False, True, True] * 3))
    assert layout.edge_rows.tolist() == [0, 1, 1]
    assert layout.edge_targets.tolist() == [2, 3, 4]
    assert reads[0].tolist() == [0, 1, 0, 2, 0, 1]


def test_masks_of_another_length_are_refused_and_the_one_given_is_not_changed():
    tree = build_tree([[1, 2, 3]])
    used = np.ones(3, bool)
    flat_reads(tree, pack(tree, used), used)
    assert used.all()
    with pytest.raises(ValueError, match=r"predicted has shape \(2,\), the tree 3 tokens"):
        pack(tree, np.ones(2, bool))
    with pytest.raises(ValueError, match=r"used has shape \(2,\), the trajectories have 3 tokens"):
        flat_reads(tree, pack(tree), np.ones(2, bool))


@settings(max_examples=50, deadline=None)
@given(used_rows(), st.data())
def test_a_piece_is_the_layout_seen_from_its_tokens(case, data):
    layout, _ = lay_out(*case)
    chosen = data.draw(st.lists(st.booleans(), min_size=layout.num_tokens, max_size=layout.num_tokens))
    tokens = np.flatnonzero(np.array(chosen, bool)) if layout.num_tokens else np.zeros(0, np.int64)
    piece, edges, rows = cut(layout, tokens)
    place = {int(token): i for i, token in enumerate(tokens)}
    assert piece.input_ids.tolist() == layout.input_ids[tokens].tolist()
    assert piece.positions.tolist() == layout.positions[tokens].tolist()
    assert piece.parent.tolist() == [place.get(int(layout.parent[t]), -1) for t in tokens]
    for i, t in enumerate(tokens.tolist()):
        seen = [place[j] for j in range(t + 1) if t < layout.ends[j] and j in place]
        assert [j for j in range(i + 1) if i < piece.ends[j]] == seen
    own = [e for e in range(layout.num_edges) if int(layout.edge_rows[e]) in place]
    assert edges.tolist() == own
    assert piece.edge_rows.tolist() == [place[int(layout.edge_rows[e])] for e in own]
    assert piece.edge_targets.tolist() == layout.edge_targets[own].tolist()
    assert rows.tolist() == [r for r in range(len(layout.rows)) if int(layout.rows[r]) in place]

"""Which trajectories use a token, as an interval of places in a given order of the trajectories."""

from typing import NamedTuple

import numpy as np

from treetrain.tree.assemble import Int64s
from treetrain.tree.nodes import NodeRows
from treetrain.tree.token_tree import TokenTree

NOBODY = -1


class Users(NamedTuple):
    """Of every token, the first and the last place that uses it; both NOBODY where none does."""

    first: Int64s
    """int64 [N]."""
    last: Int64s
    """int64 [N]."""


def last_computed(tree: TokenTree, lengths: Int64s) -> Int64s:
    """int64 [K]: the token at which each trajectory's computation ends, -1 for lengths of 0.

    Args:
        tree: K trajectories.
        lengths: int64 [K]: how many of its first tokens a trajectory needs; at most its length.
    """
    found = np.full(tree.num_trajectories, -1, np.int64)
    for row, segment in tree.climb(np.where(lengths > 0, tree.trajectory_last, -1), lengths - 1):
        start = tree.segment_start[segment]
        found[row] = start + lengths[row] - 1 - tree.depth[start]  # the last write is the segment that holds it
    return found


def token_users(tree: TokenTree, ends: Int64s, places: Int64s) -> Users:
    """Who needs each token: the trajectories that end at it or below it.

    Args:
        tree: N tokens.
        ends: int64 [C], ascending: the last needed token of each trajectory that counts.
        places: int64 [C]: its place in the order that is asked about.
    """
    before = np.searchsorted(ends, np.arange(tree.num_tokens + 1))
    low, high = before[:-1], before[tree.end]
    if (places == np.arange(len(places))).all():
        return Users(np.where(low < high, low, NOBODY), np.where(low < high, high - 1, NOBODY))
    used = np.flatnonzero(low < high)
    first, last = np.full((2, tree.num_tokens), NOBODY, np.int64)
    first[used] = _over_ranges(np.minimum, places, low[used], high[used])
    last[used] = _over_ranges(np.maximum, places, low[used], high[used])
    return Users(first, last)


def row_users(tree: TokenTree, places: Int64s, *, whole_rows: bool = False) -> Users:
    """Who needs each token's hidden state for the LM head: the trajectories that train a prediction from it.

    Exact for a tree made from rows. In a tree made from nodes a trained prediction counts for every trajectory through
    it, which is what nodes mean, unless equal siblings with unlike weights were merged: then it is an upper bound.

    Args:
        tree: N tokens, K trajectories.
        places: int64 [K]: each trajectory's place in the order that is asked about; NOBODY for those that do not count.
        whole_rows: all predictions of all rows, instead of the trained ones.
    """
    edges = np.flatnonzero(tree.parent >= 0 if whole_rows else tree.trained_edges()[0] > 0)
    if not isinstance(tree.rows, NodeRows) and not whole_rows and _has_weights(tree):
        users = _training_rows(tree, places)
    else:
        counted = np.flatnonzero((places >= 0) & (tree.trajectory_last >= 0))
        counted = counted[np.argsort(tree.trajectory_last[counted], kind="stable")]
        users = token_users(tree, tree.trajectory_last[counted], places[counted])
    edges = edges[users.last[edges] >= 0]
    none = int(places.max(initial=0)) + 1
    found = Users(np.full(tree.num_tokens, none, np.int64), np.full(tree.num_tokens, NOBODY, np.int64))
    np.minimum.at(found.first, tree.parent[edges], users.first[edges])
    np.maximum.at(found.last, tree.parent[edges], users.last[edges])
    found.first[found.last < 0] = NOBODY
    return found


def _has_weights(tree: TokenTree) -> bool:
    return any(row is not None and row.loss_weights is not None for row in tree.rows)


def _training_rows(tree: TokenTree, places: Int64s) -> Users:
    """First and last place of the rows that train the prediction of each token."""
    used = tree.trained_predictions & np.repeat(places >= 0, tree.trajectory_length)
    place = np.repeat(places, tree.trajectory_length)[used]
    token = tree.paths()[1][used]
    first = np.full(tree.num_tokens, int(places.max(initial=0)) + 1, np.int64)
    last = np.full(tree.num_tokens, NOBODY, np.int64)
    np.minimum.at(first, token, place)
    np.maximum.at(last, token, place)
    return Users(first, last)


def _over_ranges(pick: np.ufunc, values: Int64s, low: Int64s, high: Int64s) -> Int64s:
    """pick(values[low:high]) for many non-empty ranges, each from two that overlap and cover it."""
    level = np.frexp((high - low).astype(np.float64))[1] - 1  # floor(log2(length))
    found = np.empty(len(low), np.int64)
    table, width = values, 1
    for number in range(int(level.max(initial=-1)) + 1):
        here = level == number
        found[here] = pick(table[low[here]], table[high[here] - width])
        table, width = pick(table[:-width], table[width:]), 2 * width
    return found

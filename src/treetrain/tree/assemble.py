"""From runs of tokens and where they attach to a token tree's arrays: cut at forks, heaviest child first.

Rows and nodes both end here, so that the same rollouts give the same tree, array for array.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]


class TreeArrays(NamedTuple):
    """The arrays of a TokenTree (shapes there), and where a buffer position went: see `moved`."""

    tokens: Int32s
    parent: Int64s
    depth: Int32s
    end: Int64s
    segment_start: Int64s
    segment_parent: Int64s
    piece_source: Int64s
    piece_target: Int64s

    def moved(self, positions: Int64s) -> Int64s:
        """Tree indices of buffer positions (-1 stays -1)."""
        piece = np.searchsorted(self.piece_source, positions, side="right") - 1
        inside = positions >= 0
        shift = np.zeros(len(positions), np.int64)
        shift[inside] = self.piece_target[piece[inside]] - self.piece_source[piece[inside]]
        return positions + shift


class Pieces(NamedTuple):
    """Runs cut behind every token that another run attaches to; parents come before children."""

    source: Int64s  # first buffer position
    length: Int64s
    parent: Int64s  # piece, -1 at roots; a child attaches at the last token of its parent


def assemble(
    buffer: Int32s, run_start: Int64s, run_length: Int64s, run_attach: Int64s, last: Int64s
) -> TreeArrays:
    """Lay runs of tokens out as one tree in depth-first pre-order, heaviest child first.

    Args:
        buffer: int32 [B]; run r is buffer[run_start[r] : run_start[r] + run_length[r]]; gaps are allowed.
        run_start: int64 [R], increasing.
        run_length: int64 [R], each >= 1.
        run_attach: int64 [R], the buffer position that the run continues (of an earlier run), -1 for a root.
        last: int64 [K], the buffer position of every trajectory's last token, -1 for an empty one.

    Two runs that attach to one position must begin with different tokens or keys: nothing is merged here.
    """
    pieces = _cut(run_start, run_length, run_attach)
    tokens_below, weight, number = _subtree_sums(pieces, last)
    target, depth = _positions(pieces, tokens_below, _sibling_order(pieces.parent, weight, number))
    return _lay_out(buffer, pieces, target, depth, tokens_below)


def _cut(run_start: Int64s, run_length: Int64s, run_attach: Int64s) -> Pieces:
    attach = np.unique(run_attach[run_attach >= 0])
    owner = np.searchsorted(run_start, attach, side="right") - 1
    inner = attach[attach + 1 < run_start[owner] + run_length[owner]]
    source = np.concatenate([run_start, inner + 1])
    before = np.concatenate([run_attach, inner])
    stop = np.concatenate([run_start + run_length, inner + 1])
    order = np.argsort(source, kind="stable")
    source, before = source[order], before[order]
    stop = np.sort(stop)  # runs are disjoint and increasing, so the k-th piece stops at the k-th stop
    parent = np.where(before >= 0, np.searchsorted(source, before, side="right") - 1, -1)
    return Pieces(source, stop - source, parent)


def _subtree_sums(pieces: Pieces, last: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """Per piece, over its subtree: tokens, (leaves, tokens) as one comparable number, smallest trajectory."""
    count = len(pieces.source)
    own = np.full(count, len(last), np.int64)
    holder = np.searchsorted(pieces.source, last, side="right") - 1
    ends = np.flatnonzero(last >= 0)[::-1]
    own[holder[ends]] = ends  # the last write wins: the smallest number
    is_leaf = np.ones(count, np.int64)
    is_leaf[pieces.parent[pieces.parent >= 0]] = 0
    tokens, leaves, number = pieces.length.tolist(), is_leaf.tolist(), own.tolist()
    parents = pieces.parent.tolist()
    for piece in range(count - 1, -1, -1):
        above = parents[piece]
        if above >= 0:
            tokens[above] += tokens[piece]
            leaves[above] += leaves[piece]
            if number[piece] < number[above]:
                number[above] = number[piece]
    below = np.array(tokens, np.int64)
    weight = np.array(leaves, np.int64) * (int(pieces.length.sum()) + 1) + below
    return below, weight, np.array(number, np.int64)


def _sibling_order(parent: Int64s, weight: Int64s, number: Int64s) -> Int64s:
    """Pieces grouped by parent; in a group more leaves first, then more tokens, then the smaller number."""
    return np.lexsort((number, -weight, parent))


def _positions(pieces: Pieces, tokens_below: Int64s, order: Int64s) -> tuple[Int64s, Int64s]:
    """Tree index and depth of every piece's first token."""
    count = len(order)
    if count == 0:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    above = pieces.parent[order]
    before = np.cumsum(tokens_below[order]) - tokens_below[order]
    first = np.flatnonzero(np.diff(above, prepend=-2))
    before -= np.repeat(before[first], np.diff(first, append=count))
    ahead = np.empty(count, np.int64)
    ahead[order] = before
    lengths, parents = pieces.length.tolist(), pieces.parent.tolist()
    target, depth = ahead.tolist(), [0] * count
    for piece, up in enumerate(parents):
        if up >= 0:
            target[piece] += target[up] + lengths[up]
            depth[piece] = depth[up] + lengths[up]
    return np.array(target, np.int64), np.array(depth, np.int64)


def _lay_out(
    buffer: Int32s, pieces: Pieces, target: Int64s, depth: Int64s, tokens_below: Int64s
) -> TreeArrays:
    order = np.argsort(target, kind="stable")
    start, length, above = target[order], pieces.length[order], pieces.parent[order]
    total = int(length.sum())
    index = np.arange(total, dtype=np.int64)
    tokens = buffer[index + np.repeat(pieces.source[order] - start, length)]
    depths = (index + np.repeat(depth[order] - start, length)).astype(np.int32)
    end = np.repeat(start + tokens_below[order], length)
    before = np.where(above >= 0, target[above] + pieces.length[above] - 1, -1)
    index -= 1
    index[start] = before
    children = np.bincount(above[above >= 0], minlength=len(order))
    # A piece that is the only child of its parent continues the parent's segment.
    opens = (above < 0) | (children[above] > 1)
    segment_start = np.append(start[opens], total)
    before = before[opens]
    segment_parent = np.where(before >= 0, np.searchsorted(segment_start, before, side="right") - 1, -1)
    return TreeArrays(tokens, index, depths, end, segment_start, segment_parent, pieces.source, target)

"""The token tree: a batch of trajectories as one forest of tokens, stored as numpy arrays in pre-order.

`build_tree` makes it from rows of token ids. Rows are sorted and compared with their neighbours: in sorted order, no
earlier row shares a longer prefix with a row than its predecessor does, so one comparison finds the shared prefix. The
rest of the row is one run of tokens, attached where the shared prefix ends. Then `assemble` lays out the runs.
"""

from array import array
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int32, Int64
from numpy.typing import NDArray

from treetrain.core.errors import DataError, quoted
from treetrain.core.tree.token_ids import MAX_TOKEN_ID, IdSets, first_bool
from treetrain.core.tree.trajectory import Trajectory

Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]
Bools = NDArray[np.bool_]
Row = Trajectory | Sequence[int] | NDArray[np.integer]

_BLOCK = 1 << 18  # tokens compared at once: bounds the temporaries, and fits the cache
_THIN = 64  # with fewer pieces a Python loop is faster than a numpy call


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenTree:
    """A prefix forest of N tokens, S segments and K trajectories, in depth-first pre-order.

    Siblings are ordered heaviest first: more leaves, then more tokens, then the smallest trajectory number below.
    Token i is j or an ancestor of j exactly when `i <= j < end[i]`: the attention mask.

        a b c d e        index     0  1  2  3  4  5
        a b c f          tokens    a  b  c  d  e  f        a b c ┬ d e
                         parent   -1  0  1  2  3  2              └ f
                         end       6  6  6  5  5  6
    """

    tokens: Int32[np.ndarray, " N"]
    parent: Int64[np.ndarray, " N"]
    """The token before it on its path; -1 at roots."""
    depth: Int32[np.ndarray, " N"]
    """Number of tokens before it on its path (its rotary position)."""
    end: Int64[np.ndarray, " N"]
    """One past the last token of its subtree."""
    segment_start: Int64[np.ndarray, " _"]
    """S + 1 entries: segment s is tokens [segment_start[s], segment_start[s + 1]), a run without a fork."""
    segment_parent: Int64[np.ndarray, " S"]
    """The segment whose last token it continues; -1 at roots."""
    trajectory_last: Int64[np.ndarray, " K"]
    """Each trajectory's last token; -1 for an empty one."""
    trajectory_length: Int64[np.ndarray, " K"]
    """Tokens of each trajectory."""
    rows: Sequence[Trajectory | None] = field(repr=False)
    """The K trajectories with their facts, None for a row given as ids only."""
    special: Mapping[str, object] = field(default_factory=dict, repr=False)
    """What its tokens carry besides their ids, by name, such as "images"; see `SpecialTokens`."""
    asked: Sequence[IdSets | None] | None = field(default=None, repr=False)
    """For each trajectory, ids whose log-probabilities are wanted beside those of its tokens; None for none."""

    def __repr__(self) -> str:
        return (
            f"TokenTree(trajectories={self.num_trajectories}, flat={self.num_flat_tokens}, "
            f"unique={self.num_tokens}, segments={self.num_segments})"
        )

    @property
    def num_tokens(self) -> int:
        """The number of unique tokens, N."""
        return len(self.tokens)

    @property
    def num_segments(self) -> int:
        """The number of segments, S."""
        return len(self.segment_parent)

    @property
    def num_trajectories(self) -> int:
        """The number of trajectories, K."""
        return len(self.trajectory_last)

    @cached_property
    def num_flat_tokens(self) -> int:
        """Tokens summed over the trajectories."""
        return int(self.trajectory_length.sum())

    @cached_property
    def trajectories(self) -> list[Trajectory]:
        """The K trajectories with their facts."""
        ids = self.tokens
        return [Trajectory(ids[self.path(k)]) if row is None else row for k, row in enumerate(self.rows)]

    @cached_property
    def id_sets(self) -> dict[str, IdSets]:
        """The ids that are scored beside tokens, over the concatenated trajectories: those `asked` for, and those that
        samplers kept ("kept")."""
        kept = [None if row is None else row.sampling_mask for row in self.rows]
        given = {"kept": None if all(sets is None for sets in kept) else kept, "asked": self.asked}
        lengths = self.trajectory_length.tolist()
        return {name: IdSets.joined(sets, lengths) for name, sets in given.items() if sets is not None}

    def rebuilt(self, *, merge: bool, apart: Int64[np.ndarray, " K"] | None = None) -> "TokenTree":
        """The tree of the same trajectories, merged otherwise; see `build_tree`."""
        return replace(build_tree(self.trajectories, merge=merge, apart=apart), asked=self.asked)

    def path(self, number: int) -> Int64[np.ndarray, " L_k"]:
        """Tree indices of one trajectory, from its first token to its last."""
        return path_to(int(self.trajectory_last[number]), self.segment_start, self.segment_parent)

    def climb(
        self, tokens: Int64[np.ndarray, " k"], depth: Int64[np.ndarray, " k"] | int = 0
    ) -> Iterator[tuple[Int64s, Int64s]]:
        """Go from tokens up their paths, all at once, one segment per step.

        Args:
            tokens: -1 is skipped.
            depth: stop at the segment that holds this depth; 0 goes to the root.

        Yields:
            Indices of the tokens that have not stopped, and the current segment of each.
        """
        at = np.flatnonzero(tokens >= 0)
        goal = np.broadcast_to(depth, len(tokens))
        segment = np.searchsorted(self.segment_start, tokens[at], side="right") - 1
        while len(at):
            yield at, segment
            on = self.depth[self.segment_start[segment]] > goal[at]
            at, segment = at[on], self.segment_parent[segment[on]]

    def paths(self) -> tuple[Int64s, Int64s]:
        """All paths concatenated: (offsets int64 [K + 1], tree indices int64 [flat]). Cached."""
        return self._paths

    @cached_property
    def _paths(self) -> tuple[Int64s, Int64s]:
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.trajectory_length)])
        # A path takes steps of +1, and a jump at each segment's first token: write the jumps, then cumsum.
        index = np.ones(int(offsets[-1]), np.int64)
        ended = self.trajectory_last[self.trajectory_last >= 0]
        previous = np.zeros(self.num_trajectories, np.int64)  # last token of the previous path
        previous[self.trajectory_last >= 0] = np.append(0, ended[:-1])[: len(ended)]
        for row, segment in self.climb(self.trajectory_last):
            start, above = self.segment_start[segment], self.segment_parent[segment]
            before = np.where(above >= 0, self.segment_start[above + 1] - 1, previous[row])
            index[offsets[row] + self.depth[start]] = start - before
        return offsets, np.cumsum(index, out=index)

    @cached_property
    def trained_predictions(self) -> Bool[np.ndarray, " flat"]:
        """Tokens whose prediction has a loss weight, over the concatenated trajectories."""
        trained = np.ones(self.num_flat_tokens, bool)
        start = np.cumsum(self.trajectory_length) - self.trajectory_length
        for first, length, row in zip(start.tolist(), self.trajectory_length.tolist(), self.rows, strict=True):
            if row is not None and row.loss_weights is not None:
                trained[first : first + length] = row.loss_weights != 0
        trained[start[self.trajectory_length > 0]] = False
        return trained

    def trained_edges(self, rows: Bool[np.ndarray, " K"] | None = None) -> tuple[Int64s, Int64s]:
        """Count the trained predictions of the tree.

        Args:
            rows: the trajectories that count; None counts all (and is cached).

        Returns:
            uses: int64 [N], how many trajectories train the prediction of each token (0 at roots).
            deepest: int64 [K], the depth of each trajectory's last trained token, which is also the number of its
                tokens to compute (0 if none is trained).
        """
        if rows is None:
            return self._all_trained_edges
        offsets, index = self.paths()
        at = np.flatnonzero(self.trained_predictions & np.repeat(rows, self.trajectory_length))
        owner = np.repeat(np.arange(self.num_trajectories), self.trajectory_length)[at]
        deepest = np.zeros(self.num_trajectories, np.int64)
        deepest[owner] = at - offsets[owner]  # the last write wins, so the deepest is kept
        return np.bincount(index[at], minlength=self.num_tokens), deepest

    @cached_property
    def _all_trained_edges(self) -> tuple[Int64s, Int64s]:
        return self.trained_edges(np.ones(self.num_trajectories, bool))


def segments(parent: Int64[np.ndarray, " M"]) -> tuple[Int64s, Int64s]:
    """Split a forest in pre-order into maximal runs without a fork: (start int64 [S + 1], parent segment int64 [S]).

    Args:
        parent: each token's parent, -1 at roots.
    """
    count = len(parent)
    children = np.bincount(parent + 1, minlength=count + 1)[1:]
    opens = (parent < 0) | (children[parent] > 1) if count else np.zeros(0, bool)
    start = np.flatnonzero(opens)
    of = np.cumsum(opens) - 1
    before = parent[start]
    return np.append(start, count), np.where(before >= 0, of[before], -1)


def path_to(token: int, segment_start: Int64s, segment_parent: Int64s) -> Int64[np.ndarray, " _"]:
    """Depth + 1 entries: the tokens from the root to `token`; empty for -1. Segments are a tree's or a layout's."""
    pieces, stop = [np.zeros(0, np.int64)], token + 1
    segment = int(np.searchsorted(segment_start, token, side="right")) - 1
    while segment >= 0:
        pieces.append(np.arange(segment_start[segment], stop, dtype=np.int64))
        segment = int(segment_parent[segment])
        stop = int(segment_start[segment + 1])
    return np.concatenate(pieces[::-1])


def ranges(first: Int64s, count: Int64s) -> Int64s:
    """Concatenate the ranges first[i], ..., first[i] + count[i] - 1: int64 [count.sum()]."""
    before = np.cumsum(count) - count
    return np.arange(int(count.sum()), dtype=np.int64) + np.repeat(first - before, count)


# ---- merging rows


def build_tree(
    sequences: Sequence[Row], *, merge: bool = True, apart: Int64[np.ndarray, " K"] | None = None
) -> TokenTree:
    """Merge rows into one prefix forest: each shared prefix is stored once.

    Args:
        sequences: K rows, each a Trajectory or a list, 1-D integer array or tensor of token ids; duplicates, rows
            that are prefixes of other rows, empty rows and rows of one token are allowed.
            Trajectories with different `key` share no token; tokens that carry something else (recorded experts,
            images) are not merged.
            One array [K, L] is refused, since padding would count as tokens: `from_padded` takes it with its mask.
        merge: False keeps every row as a separate tree, as in the linear baseline.
        apart: rows with different numbers (from 0) share no token.

    Raises:
        DataError: an id that is negative, above int32 or not an integer; rows that carry what does not fit
            together. The message names the row (from 0).

    Children are ordered heaviest first: more leaves, then more tokens, then the smaller row number.
    Time is about linear in the tokens of all rows (memcmp sort); memory is linear.
    """
    _check_rows(sequences)
    rows = sequences if isinstance(sequences, list | tuple) else list(sequences)
    given = [row if isinstance(row, Trajectory) else None for row in rows]
    flat, lengths = _token_ids(rows)
    restore = {}
    for kind in dict.fromkeys(kind for of in dict.fromkeys(map(type, given)) for kind in getattr(of, "special", ())):
        if (numbered := kind.number(given, flat, lengths)) is not None:
            flat, restore[kind.name] = numbered
    blob = flat.tobytes()
    del flat
    stops = (4 * np.cumsum(lengths)).tolist()
    blobs = [blob[start:stop] for start, stop in zip([0, *stops], stops)]
    del blob
    ranks = _key_ranks(given, apart)
    order = np.arange(len(rows))
    if merge:
        # Byte order is not numeric order, but any order that keeps equal prefixes adjacent works.
        order = np.array(sorted(range(len(blobs)), key=blobs.__getitem__), np.int64)
        order = order if ranks is None else order[np.argsort(ranks[order], kind="stable")]
    flat = np.frombuffer(b"".join(map(blobs.__getitem__, order.tolist())), np.int32)
    del blobs

    length = lengths[order]
    start = np.cumsum(length) - length
    shared = np.zeros(len(rows), np.int64)
    if merge:
        shared = shared_prefixes(flat, length)
        if ranks is not None:
            shared[np.flatnonzero(np.diff(ranks[order], prepend=-1))] = 0
    attach = _attach_points(start, shared)
    adds = length > shared
    last = np.empty(len(rows), np.int64)
    last[order] = np.where(adds, start + length - 1, attach)
    arrays, moved = assemble(flat, (start + shared)[adds], (length - shared)[adds], attach[adds], last)
    special = {}
    for name in reversed(restore):
        tokens, special[name] = restore[name](arrays.tokens)
        arrays = arrays._replace(tokens=tokens)
    return TokenTree(
        **arrays._asdict(),
        trajectory_last=moved(last),
        trajectory_length=lengths,
        rows=given,
        special=special,
    )


def as_tree(rows: Sequence[Row] | TokenTree, *, merge: bool = True) -> TokenTree:
    """Build the tree of rows; a tree is returned unchanged."""
    return rows if isinstance(rows, TokenTree) else build_tree(rows, merge=merge)


def _check_rows(rows: object) -> None:
    """Raise DataError or TypeError unless this is a sequence of rows."""
    if not hasattr(rows, "__iter__"):
        shown = f"{quoted(rows)}, " if isinstance(rows, int | float) else ""
        raise TypeError(
            f"rows is {shown}a {type(rows).__name__}; give a list of rows, each a Trajectory or a list of token ids"
        )
    if isinstance(rows, Mapping | str):
        raise DataError(
            f"rows are given as one {type(rows).__name__}; give a list of rows, each a list of token ids, or "
            "tt.from_padded(batch['input_ids'], batch['attention_mask']) for a padded batch"
        )
    if getattr(rows, "ndim", 1) > 1:
        shape: Sequence[int] = getattr(rows, "shape", ())
        raise DataError(
            f"rows are given as one array {list(shape)}: if it is padded, its padding would count as tokens. Give "
            "tt.from_padded(input_ids, attention_mask), or list(rows) if every entry is a token of its row"
        )


def _token_ids(rows: Sequence[Row]) -> tuple[Int32s, Int64s]:
    """Concatenate the rows, int32 [flat]; also return their lengths, int64 [K]."""
    if set(map(type, rows)) == {list} and (joined := _joined_lists(rows)) is not None:
        return joined, np.fromiter(map(len, rows), np.int64, len(rows))
    arrays = [row.ids if isinstance(row, Trajectory) else _as_array(number, row) for number, row in enumerate(rows)]
    lengths = np.fromiter(map(len, arrays), np.int64, len(arrays))
    narrow = {ids.dtype for ids in arrays} <= {np.dtype(np.int32)}
    # Ids beyond int64 wrap to negative numbers, which are rejected below.
    flat = np.concatenate([np.zeros(0, np.int32), *arrays], dtype=np.int32 if narrow else np.int64, casting="unsafe")
    if flat.min(initial=0) < 0 or (not narrow and flat.max(initial=0) > MAX_TOKEN_ID):
        at = int(np.flatnonzero((flat < 0) | (flat > MAX_TOKEN_ID))[0])
        row = int(np.searchsorted(np.cumsum(lengths), at, side="right"))
        raise DataError(_bad_id(row, int(arrays[row][at - int(lengths[:row].sum())])))
    return flat.astype(np.int32, copy=False), lengths


def _joined_lists(rows: Sequence[Any]) -> Int32s | None:
    """Concatenate lists of ids without an array for each (twice as fast); None if any entry is not a token id."""
    joined = array("i")
    try:
        for row in rows:
            joined.fromlist(row)
    except (OverflowError, TypeError):
        return None
    flat = np.frombuffer(joined, np.int32)
    if flat.min(initial=0) < 0:
        return None
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    low, ends = np.flatnonzero(flat < 2), np.cumsum(lengths)
    in_row = np.searchsorted(ends, low, side="right")
    places = zip(in_row.tolist(), (low - (ends - lengths)[in_row]).tolist())
    return None if any(isinstance(rows[row][at], bool) for row, at in places) else flat  # true would be 1


def _as_array(number: int, row: Any) -> NDArray[Any]:
    if isinstance(row, list | tuple):
        try:
            ids = np.frombuffer(array("i", row), np.int32)
        except (OverflowError, TypeError):
            bad = next(i for i in row if not (hasattr(i, "__index__") and 0 <= i <= MAX_TOKEN_ID))
            raise DataError(_bad_id(number, bad)) from None
        if (at := first_bool(row, ids)) is not None:
            raise DataError(_bad_id(number, row[at]))
        return ids
    ids = np.asarray(row.cpu() if hasattr(row, "cpu") else row)  # a tensor may be on another device
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise DataError(
            f"row {number}: token ids must be a 1-D array of integers, found shape {ids.shape} of {ids.dtype} (a "
            f"{type(row).__name__}); pass a list of rows, each a list of token ids or a Trajectory"
        )
    return ids


def _bad_id(number: int, token: object) -> str:
    return (
        f"row {number}: token id {quoted(token)} is no whole number from 0 to {MAX_TOKEN_ID}; pass one flat list of "
        "ids per row, and check the tokenizer that wrote it"
    )


def _key_ranks(rows: Sequence[Trajectory | None], apart: Int64s | None) -> Int64s | None:
    """Number the distinct pairs of key and `apart`, a number for each row; None if all rows may share tokens.

    Rows given as ids alone have the key None.
    """
    numbers: dict[Hashable, int] = {}
    keys = [numbers.setdefault(None if row is None else row.key, len(numbers)) for row in rows]
    if len(numbers) < 2:
        return apart
    return np.array(keys, np.int64) + (0 if apart is None else apart * len(numbers))


def shared_prefixes(flat: Int32[np.ndarray, " B"], length: Int64[np.ndarray, " K"]) -> Int64s:
    """Number of leading tokens that each row shares with the row before it.

    Args:
        flat: the rows concatenated.
    """
    count = len(length)
    shared = np.zeros(count, np.int64)
    start = np.concatenate([[0], np.cumsum(length)])
    row = 1
    while row < count:
        stop = max(int(np.searchsorted(start, start[row] + _BLOCK, side="right")) - 1, row + 1)
        low, high = int(start[row]), int(start[stop])
        here = np.arange(low, high, dtype=np.int64)
        back = np.repeat(length[row - 1 : stop - 1], length[row:stop])
        differs = flat[here] != flat[here - back]
        # Past the end of a shorter previous row, the shifted position is in this row itself.
        offset = here - np.repeat(start[row:stop], length[row:stop])
        differs |= offset >= back
        at = np.append(np.flatnonzero(differs) + low, high)
        first = at[np.searchsorted(at, start[row:stop])] - start[row:stop]
        shared[row:stop] = np.minimum(first, length[row:stop])
        row = stop
    return shared


def _attach_points(start: Int64s, shared: Int64s) -> Int64s:
    """Find the flat position that each row continues: where its last shared token was first stored; -1 for none.

    Depth d of a row's path was first stored by the nearest earlier row that shares at most d tokens with the row before
    it: each row in between shares more, so it has the same token there. This is a "previous smaller value" search,
    amortised constant per row.
    """
    values = shared.tolist()
    smaller = [-1] * len(values)
    for row, value in enumerate(values):
        if value:
            above = row - 1
            while values[above] >= value:
                above = smaller[above]
            smaller[row] = above
    owner = np.array(smaller, np.int64)
    return np.where(owner >= 0, start[owner] + shared - 1, -1) if len(values) else owner


# ---- laying out runs

# Turn runs of tokens and their attach positions into a token tree's arrays: cut at forks, heaviest child first.
#
#     runs     a b c d e     attach to                pieces    a b c ── d e
#              f             the c of the first run                   └─ f
#
# 1. A run is cut after every token that another run attaches to. The pieces form a tree, parents before children.
# 2. A bottom-up pass aggregates each subtree: tokens, leaves, smallest trajectory number. This orders siblings by
#    weight, and gives their distances in pre-order.
# 3. A top-down pass gives positions: a piece starts after the last token of its parent and after the subtrees of its
#    heavier siblings. Depths are computed the same way, without the siblings.
# 4. Tokens are copied piece by piece. A piece that is its parent's only child continues the parent's segment, so
#    segments are maximal runs without a fork.


class TreeArrays(NamedTuple):
    """The arrays of a TokenTree of N tokens and S segments; `TokenTree` documents them."""

    tokens: Int32s
    parent: Int64s
    depth: Int32s
    end: Int64s
    segment_start: Int64s
    segment_parent: Int64s


class Pieces(NamedTuple):
    """Runs cut after every token that another run attaches to; parents come before children."""

    source: Int64s  # first buffer position
    length: Int64s
    parent: Int64s  # parent piece, -1 at roots; a piece attaches to the last token of its parent


def assemble(
    buffer: Int32[np.ndarray, " B"],
    run_start: Int64[np.ndarray, " R"],
    run_length: Int64[np.ndarray, " R"],
    run_attach: Int64[np.ndarray, " R"],
    last: Int64[np.ndarray, " K"],
) -> tuple[TreeArrays, Callable[[Int64s], Int64s]]:
    """Lay out runs of tokens as one tree in depth-first pre-order, heaviest child first.

    Args:
        buffer: run r is buffer[run_start[r] : run_start[r] + run_length[r]]; gaps are allowed.
        run_start: first buffer positions, increasing.
        run_length: tokens of each run, at least 1.
        run_attach: the buffer position, in an earlier run, that the run continues; -1 for a root.
        last: the buffer position of every trajectory's last token, -1 for an empty one.

    Runs that attach to the same position must start with different tokens or keys: nothing is merged here.

    Returns:
        The arrays, and a function from buffer positions to tree indices (-1 stays -1).
    """
    pieces = _cut(run_start, run_length, run_attach)
    levels = _leaves_first(pieces.parent)
    tokens_below, weight, number = _subtree_sums(pieces, levels, last)
    # Sort siblings: more leaves first, then more tokens, then the smaller trajectory number.
    order = np.lexsort((number, -weight, pieces.parent))
    target, depth = _positions(pieces, levels, tokens_below, order)

    def moved(positions: Int64s) -> Int64s:
        piece = np.searchsorted(pieces.source, positions, side="right") - 1
        inside = positions >= 0
        shift = np.zeros(len(positions), np.int64)
        shift[inside] = target[piece[inside]] - pieces.source[piece[inside]]
        return positions + shift

    return _lay_out(buffer, pieces, target, depth, tokens_below), moved


def _cut(run_start: Int64s, run_length: Int64s, run_attach: Int64s) -> Pieces:
    attach = np.unique(run_attach[run_attach >= 0])
    owner = np.searchsorted(run_start, attach, side="right") - 1
    inner = attach[attach + 1 < run_start[owner] + run_length[owner]]
    source = np.concatenate([run_start, inner + 1])
    before = np.concatenate([run_attach, inner])
    stop = np.concatenate([run_start + run_length, inner + 1])
    order = np.argsort(source, kind="stable")
    source, before = source[order], before[order]
    stop = np.sort(stop)  # runs are disjoint and increasing, so the k-th piece ends at the k-th stop
    parent = np.where(before >= 0, np.searchsorted(source, before, side="right") - 1, -1)
    return Pieces(source, stop - source, parent)


class _Levels(NamedTuple):
    """Orders the pieces for bottom-up and top-down passes without recursion, vectorised over layers of leaves."""

    layers: list[Int64s]  # outermost leaves first; parents are in later layers or in `core`
    core: list[int]  # the rest, once layers are small (long chains of forks); children before parents


def _leaves_first(parent: Int64s) -> _Levels:
    pending = np.bincount(parent + 1, minlength=len(parent) + 1)[1:]
    left = np.ones(len(parent), bool)
    layers: list[Int64s] = []
    ready = np.flatnonzero(pending == 0)
    while len(ready) >= _THIN:
        layers.append(ready)
        left[ready] = False
        above = parent[ready]
        above = above[above >= 0]
        np.subtract.at(pending, above, 1)
        ready = np.unique(above[pending[above] == 0])
    return _Levels(layers, np.flatnonzero(left)[::-1].tolist())


def _subtree_sums(pieces: Pieces, levels: _Levels, last: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """Sum up each piece's subtree: tokens; (leaves, tokens) encoded as one integer; smallest trajectory number."""
    parent, count = pieces.parent, len(pieces.source)
    number = np.full(count, len(last), np.int64)
    holder = np.searchsorted(pieces.source, last, side="right") - 1
    ends = np.flatnonzero(last >= 0)[::-1]
    number[holder[ends]] = ends  # the last write wins, so the smallest number is kept
    tokens, leaves = pieces.length.copy(), np.ones(count, np.int64)
    leaves[parent[parent >= 0]] = 0
    for layer in levels.layers:
        layer = layer[parent[layer] >= 0]
        np.add.at(tokens, parent[layer], tokens[layer])
        np.add.at(leaves, parent[layer], leaves[layer])
        np.minimum.at(number, parent[layer], number[layer])
    for piece in levels.core:
        above = parent[piece]
        if above >= 0:
            tokens[above] += tokens[piece]
            leaves[above] += leaves[piece]
            number[above] = min(number[above], number[piece])
    return tokens, leaves * (int(pieces.length.sum()) + 1) + tokens, number


def _positions(pieces: Pieces, levels: _Levels, tokens_below: Int64s, order: Int64s) -> tuple[Int64s, Int64s]:
    """Find the tree index and the depth of every piece's first token."""
    parent, length = pieces.parent, pieces.length
    target, depth = np.zeros(len(order), np.int64), np.zeros(len(order), np.int64)
    if len(order) == 0:
        return target, depth
    # First the offset from the first sibling; then, top down, add the end of the parent.
    before = np.cumsum(tokens_below[order]) - tokens_below[order]
    first = np.flatnonzero(np.diff(parent[order], prepend=-2))
    target[order] = before - np.repeat(before[first], np.diff(first, append=len(order)))
    for piece in reversed(levels.core):
        above = parent[piece]
        if above >= 0:
            target[piece] += target[above] + length[above]
            depth[piece] = depth[above] + length[above]
    for layer in reversed(levels.layers):
        layer = layer[parent[layer] >= 0]
        above = parent[layer]
        target[layer] += target[above] + length[above]
        depth[layer] = depth[above] + length[above]
    return target, depth


def _lay_out(buffer: Int32s, pieces: Pieces, target: Int64s, depth: Int64s, tokens_below: Int64s) -> TreeArrays:
    order = np.argsort(target, kind="stable")
    start, length, above = target[order], pieces.length[order], pieces.parent[order]
    total = int(length.sum())
    index = np.arange(total, dtype=np.int64)
    tokens = buffer[index + np.repeat(pieces.source[order] - start, length)]
    depths = (index + np.repeat(depth[order] - start, length)).astype(np.int32)
    end = np.repeat(start + tokens_below[order], length)
    parent = np.subtract(index, 1, out=index)  # in place: the token before, except for the first token of a piece
    parent[start] = np.where(above >= 0, target[above] + pieces.length[above] - 1, -1)
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    # Pieces form a forest too. One that is the only child of its parent continues the parent's segment.
    first_piece, segment_parent = segments(np.where(above >= 0, place[above], -1))
    return TreeArrays(tokens, parent, depths, end, np.append(start, total)[first_piece], segment_parent)


def trajectories_through(tree: TokenTree) -> Int64[np.ndarray, " N"]:
    """Count the trajectories through each token."""
    ends = np.bincount(tree.trajectory_last[tree.trajectory_last >= 0] + 1, minlength=tree.num_tokens + 1)
    before = np.cumsum(ends)
    return before[tree.end] - before[:-1]

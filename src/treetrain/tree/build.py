"""Rows of token ids to a token tree: sort, compare neighbours, keep what each row adds."""

from array import array
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treetrain.data.trajectory import Trajectory
from treetrain.errors import DataError
from treetrain.tree.assemble import Int32s, Int64s, assemble
from treetrain.tree.identity import identities
from treetrain.tree.token_tree import RowTrajectories, TokenTree

LARGEST_ID = np.iinfo(np.int32).max
_INT32 = np.dtype(np.int32)
_BLOCK = 1 << 18  # tokens compared at once: bounds the temporaries and stays in cache

Row = Trajectory | Sequence[int] | NDArray[Any]


def build_tree(sequences: Sequence[Row], *, merge: bool = True, apart: Int64s | None = None) -> TokenTree:
    """Merge rows that begin alike into one forest: each shared prefix is stored once.

    Args:
        sequences: K rows, each a Trajectory or a list, 1-D integer array or tensor of token ids; duplicates, rows
            that are prefixes of other rows, empty rows and rows of one token are all welcome.
            Trajectories whose `key` differs never share a token, nor do tokens whose recorded `experts` differ.
        merge: False keeps every row as a tree of its own (what the linear baseline runs).
        apart: int64 [K], from 0: rows of different numbers share no token.

    Raises:
        DataError: an id that is negative, above int32 or no integer; recorded experts of different shapes; the
            message names the row (from 0).

    The order of children is heaviest first: more leaves, then more tokens, then the smaller row number.
    Time is about linear in the tokens of all rows (memcmp sort), memory strictly.
    """
    rows = sequences if isinstance(sequences, list | tuple) else list(sequences)
    given = _given(rows)
    ranks = _key_ranks(given, apart)
    blobs = _row_bytes(rows)
    named = identities(given, blobs) if any(row is not None and row.experts is not None for row in given) else None
    blobs = blobs if named is None else named.rows
    lengths = np.fromiter(map(len, blobs), np.int64, len(blobs)) >> 2
    order = _sorted_rows(blobs, ranks) if merge else np.arange(len(rows))
    flat = np.frombuffer(b"".join(map(blobs.__getitem__, order.tolist())), np.int32)
    del blobs
    length = lengths[order]
    start = np.cumsum(length) - length
    _refuse_negative(flat if named is None else named.tokens[flat], start, order)
    shared = np.zeros(len(rows), np.int64)
    if merge:
        shared = shared_prefixes(flat, length)
        if ranks is not None:
            shared[np.flatnonzero(np.diff(ranks[order], prepend=-1))] = 0
    attach = _attach_points(start, shared)
    adds = length > shared
    last_sorted = np.where(adds, start + length - 1, attach)
    last = np.empty(len(rows), np.int64)
    last[order] = last_sorted
    arrays = assemble(flat, (start + shared)[adds], (length - shared)[adds], attach[adds], last)
    return TokenTree(
        tokens=arrays.tokens if named is None else named.tokens[arrays.tokens],
        parent=arrays.parent,
        depth=arrays.depth,
        end=arrays.end,
        segment_start=arrays.segment_start,
        segment_parent=arrays.segment_parent,
        trajectory_last=arrays.moved(last),
        trajectory_length=lengths,
        source=RowTrajectories(given),
        experts=None if named is None else named.experts[arrays.tokens],
    )


def as_tree(rows: Sequence[Row] | TokenTree, *, merge: bool = True) -> TokenTree:
    """Rows as their tree; a tree that is given is taken as it is."""
    return rows if isinstance(rows, TokenTree) else build_tree(rows, merge=merge)


def shared_prefixes(flat: Int32s, length: Int64s) -> Int64s:
    """How many leading tokens each row has in common with the row before it.

    Args:
        flat: int32 [B], all rows one after the other.
        length: int64 [K].
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
        # Beyond the end of the shorter previous row the shifted position lies in this row itself.
        offset = here - np.repeat(start[row:stop], length[row:stop])
        differs |= offset >= back
        at = np.append(np.flatnonzero(differs) + low, high)
        first = at[np.searchsorted(at, start[row:stop])] - start[row:stop]
        shared[row:stop] = np.minimum(first, length[row:stop])
        row = stop
    return shared


def _attach_points(start: Int64s, shared: Int64s) -> Int64s:
    """The flat position each row continues: the last shared token, where it was first stored; -1 for none.

    Depth d of a row's path was added by the nearest earlier row that shares fewer than d + 1 tokens with its
    own predecessor, which is a walk over previous smaller values: amortised constant per row.
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


def _sorted_rows(blobs: list[bytes], ranks: Int64s | None) -> Int64s:
    # Byte order is not numeric order, but any order that keeps equal prefixes together will do.
    order = np.array(sorted(range(len(blobs)), key=blobs.__getitem__), np.int64)
    return order if ranks is None else order[np.argsort(ranks[order], kind="stable")]


def _given(rows: Sequence[Row]) -> list[Trajectory | None]:
    """The rows that come with facts, None for bare ids."""
    if Trajectory not in set(map(type, rows)):
        return [None] * len(rows)
    return [row if isinstance(row, Trajectory) else None for row in rows]


def _key_ranks(rows: Sequence[Trajectory | None], apart: Int64s | None) -> Int64s | None:
    """One number per distinct key, None when all are alike; bare rows have the key None."""
    if {row.key for row in rows if row is not None} <= {None}:
        return apart
    numbers: dict[Hashable, int] = {}
    keys = np.array([numbers.setdefault(None if row is None else row.key, len(numbers)) for row in rows], np.int64)
    return keys if apart is None else apart * len(numbers) + keys


def _row_bytes(rows: Sequence[Row]) -> list[bytes]:
    """Every row as the bytes of its int32 ids."""
    if (blobs := _alike_row_bytes(rows)) is not None:
        return blobs
    blobs = []
    wide: list[tuple[int, NDArray[Any]]] = []
    for number, row in enumerate(rows):
        if isinstance(row, Trajectory):
            blobs.append(row.ids.tobytes())
        elif isinstance(row, list | tuple):
            blobs.append(_list_bytes(number, row))
        else:
            ids = _integer_array(number, row)
            blobs.append(ids.tobytes() if ids.dtype == np.int32 else b"")
            if ids.dtype != np.int32 and ids.size:
                wide.append((number, ids))
    _narrow(wide, blobs)
    return blobs


def _alike_row_bytes(rows: Sequence[Any]) -> list[bytes] | None:
    """The common case in few numpy calls: int32 arrays or trajectories alone; None when it is another one."""
    kinds = set(map(type, rows))
    if kinds == {list}:
        return [_list_bytes(number, row) for number, row in enumerate(rows)]
    if kinds not in ({np.ndarray}, {Trajectory}):
        return None
    arrays: Sequence[NDArray[Any]] = [row.ids for row in rows] if kinds == {Trajectory} else rows
    if {(ids.dtype, ids.ndim) for ids in arrays} != {(_INT32, 1)}:
        return None
    blob = np.concatenate(arrays).tobytes()
    stops = (4 * np.cumsum(np.fromiter(map(len, arrays), np.int64))).tolist()
    return [blob[start:stop] for start, stop in zip([0, *stops], stops)]


def _list_bytes(number: int, row: Sequence[int]) -> bytes:
    try:
        return array("i", row).tobytes()
    except OverflowError:
        bad = next(i for i in row if not -LARGEST_ID - 1 <= i <= LARGEST_ID)
        raise DataError(_bad_id(number, int(bad))) from None
    except TypeError:
        bad = next(i for i in row if not hasattr(i, "__index__"))
        raise DataError(
            f"row {number}: token ids must be integers, found {bad!r} ({type(bad).__name__}); "
            "pass one flat list of ids per row"
        ) from None


def _integer_array(number: int, row: Any) -> NDArray[Any]:
    ids = np.asarray(row.cpu() if hasattr(row, "cpu") else row)  # a tensor may lie on another device
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise DataError(
            f"row {number}: token ids must be a 1-D array of integers, found shape {ids.shape} of "
            f"{ids.dtype}; pass one row per sequence"
        )
    return ids


def _narrow(wide: list[tuple[int, NDArray[Any]]], blobs: list[bytes]) -> None:
    """Check the ids of other integer types and store them as int32 bytes, many rows per numpy call."""
    begin = 0
    while begin < len(wide):
        stop, held = begin, 0
        while stop < len(wide) and (stop == begin or held + len(wide[stop][1]) <= _BLOCK):
            held += len(wide[stop][1])
            stop += 1
        block = wide[begin:stop]
        ids = np.concatenate([row for _, row in block], dtype=np.int64, casting="unsafe")
        if ids.min() < 0 or ids.max() > LARGEST_ID:
            number, row = next((n, r) for n, r in block if r.min() < 0 or r.max() > LARGEST_ID)
            raise DataError(_bad_id(number, int(row[(row < 0) | (row > LARGEST_ID)][0])))
        narrow, at = ids.astype(np.int32).tobytes(), 0
        for number, row in block:
            blobs[number] = narrow[at : at + 4 * len(row)]
            at += 4 * len(row)
        begin = stop


def _refuse_negative(flat: Int32s, start: Int64s, order: Int64s) -> None:
    if len(flat) and flat.min() < 0:
        at = np.flatnonzero(flat < 0)
        rows = order[np.searchsorted(start, at, side="right") - 1]
        number = int(rows.min())
        raise DataError(_bad_id(number, int(flat[at[int(np.argmin(rows))]])))


def _bad_id(number: int, token: int) -> str:
    return f"row {number}: token id {token} is outside 0..{LARGEST_ID}; check the tokenizer that wrote it"

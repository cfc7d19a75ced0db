"""Build a token tree from rows of token ids.

Rows are sorted and compared with their neighbours; each row adds its new tokens.

In sorted order, no earlier row shares a longer prefix with a row than its predecessor does, so one comparison finds the
shared prefix. The rest of the row is one run of tokens, attached where the shared prefix ends; `assemble` lays out the
runs.
"""

from array import array
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int32, Int64
from numpy.typing import NDArray

from treetrain.data.images import Image, image_runs
from treetrain.data.trajectory import MAX_TOKEN_ID, Trajectory, first_bool
from treetrain.errors import DataError, quoted
from treetrain.tree.token_tree import Int32s, Int64s, TokenTree, TreeImages, assemble

_BLOCK = 1 << 18  # tokens compared at once: bounds the temporaries, and fits the cache

Row = Trajectory | Sequence[int] | NDArray[np.integer]


def build_tree(
    sequences: Sequence[Row], *, merge: bool = True, apart: Int64[np.ndarray, " K"] | None = None
) -> TokenTree:
    """Merge rows into one prefix forest: each shared prefix is stored once.

    Args:
        sequences: K rows, each a Trajectory or a list, 1-D integer array or tensor of token ids; duplicates, rows
            that are prefixes of other rows, empty rows and rows of one token are allowed.
            Trajectories with different `key` share no token; tokens with different recorded `experts`, or of different
            images, are not merged.
            One array [K, L] is refused, since padding would count as tokens: `from_padded` takes it with its mask.
        merge: False keeps every row as a separate tree, as in the linear baseline.
        apart: rows with different numbers (from 0) share no token.

    Raises:
        DataError: an id that is negative, above int32 or not an integer; recorded experts of different shapes. The
            message names the row (from 0).

    Children are ordered heaviest first: more leaves, then more tokens, then the smaller row number.
    Time is about linear in the tokens of all rows (memcmp sort); memory is linear.
    """
    _check_rows(sequences)
    rows = sequences if isinstance(sequences, list | tuple) else list(sequences)
    given = [row if isinstance(row, Trajectory) else None for row in rows]
    flat, lengths = _token_ids(rows)
    images = None
    if any(row is not None and row.images for row in given):
        flat, images = _name_by_features(given, flat, lengths)
    # With recorded experts, rows are merged by one number for each distinct (id, experts) pair.
    routed = any(row is not None and row.experts is not None for row in given)
    named = _name_by_experts(given, flat, lengths) if routed else None
    blob = (flat if named is None else named[0]).tobytes()
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
    experts = None
    if named is not None:
        _, ids, experts_of = named
        arrays, experts = arrays._replace(tokens=ids[arrays.tokens]), experts_of[arrays.tokens]
    if images is not None:
        named_tokens = arrays.tokens
        arrays = arrays._replace(tokens=np.where(named_tokens < 0, np.int32(images.token), named_tokens))
        images = images._replace(feature=np.where(named_tokens < 0, -1 - named_tokens.astype(np.int64), -1))
    return TokenTree(
        **arrays._asdict(),
        trajectory_last=moved(last),
        trajectory_length=lengths,
        rows=given,
        experts=experts,
        images=images,
    )


def as_tree(rows: Sequence[Row] | TokenTree, *, merge: bool = True, ids_alone: bool = False) -> TokenTree:
    """Build the tree of rows; a tree is returned unchanged.

    Args:
        ids_alone: the caller reads nothing but token ids, so rows with images are refused by a DataError.
    """
    tree = rows if isinstance(rows, TokenTree) else build_tree(rows, merge=merge)
    if ids_alone and tree.images is not None:
        raise DataError(
            "the rows have images, which tt.pack does not hand to a model of your own; give rows of text, or a Hugging "
            "Face model to tt.TreeEngine"
        )
    return tree


def _check_rows(rows: Any) -> None:
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
        raise DataError(
            f"rows are given as one array {list(rows.shape)}: if it is padded, its padding would count as tokens. Give "
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


def _name_by_experts(
    rows: Sequence[Trajectory | None], ids: Int32[np.ndarray, " flat"], lengths: Int64[np.ndarray, " K"]
) -> tuple[Int32s, Int32s, NDArray[np.int16]]:
    """Number every distinct pair of a token id and its recorded experts (-1 where none are recorded).

    Args:
        ids: the rows concatenated.

    Returns:
        names: int32 [flat], the first position of every token's pair.
        ids: int32 [flat], the token id of every name.
        experts: int16 [flat, layers, k], the experts of every name.

    Raises:
        DataError: experts whose shape differs from an earlier row's.
    """
    recorded = {
        k: row.experts for k, row in enumerate(rows) if row is not None and row.experts is not None and len(row)
    }
    shapes = {number: experts.shape[1:] for number, experts in recorded.items()}
    first, shape = next(iter(shapes.items()), (0, (0, 0)))
    for number, other in shapes.items():
        if other != shape:
            raise DataError(
                f"row {number}: experts have {other[0]} layers of {other[1]}, row {first} has {shape[0]} of "
                f"{shape[1]}; all rows of a batch are routed by one model"
            )
    choices = np.full((len(ids), *shape), -1, np.int16)
    ends = np.cumsum(lengths)
    for number, experts in recorded.items():
        choices[ends[number] - len(experts) : ends[number]] = experts
    pairs = np.concatenate([ids.view(np.int16).reshape(-1, 2), choices.reshape(len(ids), -1)], axis=1)
    blob, width = pairs.tobytes(), 2 * pairs.shape[1]
    del pairs  # as large as the recorded experts
    seen: dict[bytes, int] = {}
    names = [seen.setdefault(blob[width * at : width * (at + 1)], at) for at in range(len(ids))]
    return np.array(names, np.int32), ids, choices


def _name_by_features(
    rows: Sequence[Trajectory | None], flat: Int32[np.ndarray, " flat"], lengths: Int64[np.ndarray, " K"]
) -> tuple[Int32s, TreeImages]:
    """Put a number below 0, one for each feature of each distinct image, in the place of the images' tokens.

    Args:
        flat: the rows concatenated.

    Returns:
        names: int32 [flat]; -1 - f at a token that stands for feature f.
        images: without the features of the tree's tokens.

    Raises:
        DataError: rows with different placeholder tokens, or a row with this token and without images.
    """
    names, ends = flat.copy(), np.cumsum(lengths)
    token = next(row.image_token for row in rows if row is not None and row.images)
    assert token is not None
    first, distinct, seen = [0], list[Image](), dict[tuple[bytes, int], int]()
    for number, (row, end, length) in enumerate(zip(rows, ends.tolist(), lengths.tolist())):
        ids = flat[end - length : end]
        if row is None or not row.images:
            if (ids == token).any():
                raise DataError(
                    f"row {number} has the token {token}, which stands for images in other rows, at position "
                    f"{int((ids == token).argmax())}, and no images; give its images, or leave the row out"
                )
            continue
        if row.image_token != token:
            raise DataError(
                f"row {number} has image_token {row.image_token}, an earlier row {token}; all rows of a batch are "
                "read by one model"
            )
        for image, start, stop in zip(row.images, *image_runs(ids, token)):
            key = image.digest, int(stop - start)
            if key not in seen:
                seen[key] = len(distinct)
                distinct.append(image)
                first.append(first[-1] + key[1])
            begins = first[seen[key]]
            names[end - length + start : end - length + stop] = -1 - np.arange(begins, begins + key[1])
    return names, TreeImages(token, distinct, np.array(first, np.int64), np.zeros(0, np.int64))


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

    Depth d of a row's path was added by the nearest earlier row that shares at most d tokens with its own
    predecessor. This is a "previous smaller value" search, amortised constant per row.
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

"""Cuts the visible pairs of a forest into calls where tokens see their nearest ancestors only (windows and chunks).

Queries are cut into tiles of consecutive tokens in pre-order. A tile's keys are its own tokens and the path of its
first token, from the least depth that any of its tokens sees on. The stretch of that path that all of its tokens see in
full is a rectangle of its own where that pays; the rest is gathered and masked, tiles of like length in one call. So
the work is proportional to tokens times window, whatever the length of the paths, and so is what the masks take.

Keys are numbered with the last tokens of the carried path first (`LocalSchedule.tail` of them), then the forest's own.
"""

from typing import NamedTuple

import numpy as np

from treetrain.attention.forks import path_tops
from treetrain.attention.schedule import (
    KEY_PAIRS,
    MAX_BATCH_SCORES,
    QUERY_PAIRS,
    TILE,
    TILE_PAIR,
    Batch,
    Forest,
    Schedule,
)
from treetrain.tree.attention_range import AttentionRange

MOST_QUERIES = 256
"""Queries in a tile, at most: masks take up to three times as many entries per query."""
QUERIES_PER_WINDOW = 8
"""A tile has an eighth of the window's queries: what a tile computes in vain is about its own square."""
MOST_GATHERED = 1024
"""A stretch that all of a tile sees is a rectangle at the latest when it has so many keys."""


class LocalSchedule(NamedTuple):
    """Calls over `tail` keys of the path above and then the forest's own."""

    schedule: Schedule
    tail: int


class _Tile(NamedTuple):
    start: int
    stop: int
    path: np.ndarray
    """Gathered keys before the tile, shallowest first."""


def local_schedule(
    forest: Forest, visible_range: AttentionRange, *, path_tokens: int = 0, call_pairs: float = 8192.0
) -> LocalSchedule:
    """Choose the calls.

    Args:
        forest: whose roots lie at depth `path_tokens`.
        path_tokens: tokens above the forest, all of them ancestors of all of it.
        call_pairs: cost of one more call, in query-key pairs.
    """
    lowest = visible_range.lowest(forest.depth)
    tail = max(0, path_tokens - int(lowest.min()))
    whole = _below_tail(forest, tail)
    lowest = np.concatenate([np.zeros(tail, np.int64), lowest])
    size = visible_range.window or visible_range.chunk or TILE
    queries = min(max(TILE, size // QUERIES_PER_WINDOW), MOST_QUERIES)
    paths = _Paths(whole)
    schedule, tiles = Schedule(num_tokens=len(forest.ends)), []
    start = tail
    while start < len(whole.ends):
        stop = _tile_stop(whole.depth, lowest, start, queries)
        tiles.append(_tile(paths, lowest, start, stop, tail, call_pairs, schedule.rectangles))
        start = stop
    schedule.batches.extend(_batches(whole, lowest, tiles, tail))
    return LocalSchedule(schedule, tail)


def _below_tail(forest: Forest, tail: int) -> Forest:
    """The forest below the last `tail` tokens of the path above it, as one forest."""
    if not tail:
        return forest
    count, first = len(forest.ends), int(forest.depth[0])
    return Forest(
        ends=np.concatenate([np.full(tail, tail + count), forest.ends + tail]),
        depth=np.concatenate([np.arange(first - tail, first), forest.depth]),
        segment_start=np.concatenate([[0], forest.segment_start + tail]),
        segment_parent=np.concatenate([[-1], forest.segment_parent + 1]),
    )


def _tile_stop(depth: np.ndarray, lowest: np.ndarray, start: int, queries: int) -> int:
    """How far a tile from `start` goes before its tokens lie, or see, too far apart."""
    near, low = depth[start : start + queries], lowest[start : start + queries]
    shallow = np.minimum.accumulate(near) < near[0] - queries
    spread = np.maximum.accumulate(low) - np.minimum.accumulate(low) > queries
    too_far = shallow | spread
    return start + (int(too_far.argmax()) if too_far.any() else len(near))


class _Paths:
    """Looks ancestors up by depth."""

    def __init__(self, forest: Forest):
        self.depth, self._start, self._parent = forest.depth, forest.segment_start, forest.segment_parent
        self._top = path_tops(forest.segment_parent)

    def between(self, token: int, low: int, high: int) -> list[tuple[int, int]]:
        """The proper ancestors of `token` at depths from `low` to below `high`, as ranges, shallowest first."""
        found: list[tuple[int, int]] = []
        segment, stop = int(np.searchsorted(self._start, token, side="right")) - 1, token
        while segment >= 0:
            # A path of first children is contiguous: one step, however many forks it has.
            top = int(self._top[segment])
            start = int(self._start[top])
            depth = int(self.depth[start])
            piece = max(start, start + low - depth), min(stop, start + high - depth)
            if piece[0] < piece[1]:
                found.append(piece)
            if depth <= low:
                break
            segment = int(self._parent[top])
            stop = int(self._start[segment + 1])
        return found[::-1]


def _tile(
    paths: _Paths,
    lowest: np.ndarray,
    start: int,
    stop: int,
    tail: int,
    call_pairs: float,
    rectangles: list[tuple[int, int, int, int]],
) -> _Tile:
    """What a tile gathers; the stretches that are calls of their own go to `rectangles`."""
    depth, low = paths.depth[start:stop], lowest[start:stop]
    own, shallowest, least, most = int(depth[0]), int(depth.min()), int(low.min()), int(low.max())
    queries = stop - start
    gathered = []
    for piece in paths.between(start, most, shallowest):
        keys = piece[1] - piece[0]
        saved = (TILE_PAIR - 1) * queries * keys - call_pairs - QUERY_PAIRS * queries - KEY_PAIRS * keys
        if saved > 0 or keys > MOST_GATHERED:
            rectangles.append((start - tail, stop - tail, *piece))
        else:
            gathered.append(piece)
    above = paths.between(start, least, min(most, own))
    below = paths.between(start, max(shallowest, most), own)
    pieces = [np.arange(*piece) for piece in above + gathered + below]
    return _Tile(start, stop, np.concatenate([np.zeros(0, np.int64), *pieces]))


def _batches(forest: Forest, lowest: np.ndarray, tiles: list[_Tile], tail: int) -> list[Batch]:
    """Tiles of like shape in one call each, a quarter of it wasted at most."""
    tiles = sorted(tiles, key=lambda tile: (tile.stop - tile.start, len(tile.path)))
    batches, first = [], 0
    while first < len(tiles):
        width = _step(tiles[first].stop - tiles[first].start)
        most = max(32, len(tiles[first].path) + (len(tiles[first].path) + width) // 4)
        stop, longest = first, 0
        while stop < len(tiles) and tiles[stop].stop - tiles[stop].start <= width and len(tiles[stop].path) <= most:
            longest = max(longest, len(tiles[stop].path))
            if stop > first and (stop - first + 1) * width * (longest + width) > MAX_BATCH_SCORES:
                break
            stop += 1
        batches.append(_batch(forest, lowest, tiles[first:stop], tail))
        first = stop
    return batches


def _step(length: int) -> int:
    """A call takes tiles of between half so many queries and so many, a power of two."""
    return 1 << (length - 1).bit_length()


def _batch(forest: Forest, lowest: np.ndarray, tiles: list[_Tile], tail: int) -> Batch:
    width = max(tile.stop - tile.start for tile in tiles)
    paths = max(len(tile.path) for tile in tiles)
    slot = np.arange(width)
    start = np.array([tile.start for tile in tiles])
    length = np.array([tile.stop - tile.start for tile in tiles])
    filled = slot < length[:, None]
    query = np.where(filled, start[:, None] + slot, tail)
    key = np.full((len(tiles), paths + width), tail)
    is_key = np.zeros(key.shape, bool)
    for number, tile in enumerate(tiles):
        key[number, : len(tile.path)] = tile.path
        is_key[number, : len(tile.path)] = True
    key[:, paths:], is_key[:, paths:] = query, filled
    mask = (key[:, None, :] <= query[:, :, None]) & (query[:, :, None] < forest.ends[key][:, None, :])
    mask &= (forest.depth[key][:, None, :] >= lowest[query][:, :, None]) & is_key[:, None, :]
    # A padded query must see something, or its softmax is undefined; its output is dropped.
    mask[:, slot, paths + slot] |= ~filled
    return Batch(query_index=query - tail, query_length=length, key_index=key, mask=mask)

"""Lists the pairs of a query tile and a key tile in which any query sees any key, on the host.

Keys are numbered from the path above the forest (``path`` tokens, which every token of the forest sees); the forest's
own tokens follow in pre-order, so query i is key ``path + i``. Tiles of keys are counted from key 0, tiles of queries
from query 0. The query tiles that see any of a key tile are consecutive: from the tile's own position to the end of the
furthest subtree. So the work is proportional to the number of pairs; nothing of size N x N or tiles x tiles is built.

Shape letters: N queries, K = path + N keys, T tiles of one side, P pairs of tiles.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int32, Int64

from treetrain.core.tree.layout import FULL, AttentionRange, ranges

TILE = 128
"""Tokens in a tile."""


class Lists(NamedTuple):
    """For every tile of one side (queries or keys), the tiles of the other side that it is paired with."""

    bounds: Int32[np.ndarray, "T 3"]
    """Start of a tile's entries, end of its unmasked entries, end of all its entries."""
    tiles: Int32[np.ndarray, " P"]
    """The other side's tiles; the unmasked in ascending order, then the masked in ascending order."""
    order: Int32[np.ndarray, " T"]
    """Tiles with the most work first, so that no long one starts when all others are done."""


class TileLists(NamedTuple):
    """The pairs of tiles, listed by query tile and by key tile."""

    by_query: Lists
    by_key: Lists


class Keys(NamedTuple):
    """The arrays from which a kernel decides whether a query sees a key."""

    ends: Int32[np.ndarray, " K"]
    """One past the last query (by its key number) that sees the key."""
    depth: Int32[np.ndarray, " K"] | None
    """Positions on the path; None if every token sees its whole path."""
    lowest: Int32[np.ndarray, " N"] | None
    """The least depth that each query sees; None if every token sees its whole path."""
    path: int
    """The number of last tokens of the path that are keys; no query sees the earlier ones."""


def keys_of(
    ends: Int64[np.ndarray, " N"],
    depth: Int64[np.ndarray, " N"] | None,
    path: int = 0,
    visible_range: AttentionRange = FULL,
) -> Keys:
    """The arrays of a forest below a path.

    Args:
        ends: the exclusive end of every token's subtree in pre-order.
        depth: the position of every token on its path, `path` at roots. Only needed for a bounded range.
        path: number of tokens above the forest.
    """
    count, lowest = len(ends), None
    if visible_range != FULL and count:
        assert depth is not None, "a bounded range needs the tokens' depths"
        lowest = np.asarray(visible_range.lowest(depth))
    if depth is None or lowest is None or not lowest.any():  # no path is longer than the range
        return Keys(_ends_below(path, ends), None, None, path)
    tail = max(0, path - int(lowest.min()))
    depths = np.concatenate([np.arange(path - tail, path), depth]).astype(np.int32)
    return Keys(_ends_below(tail, ends), depths, lowest.astype(np.int32), tail)


def _ends_below(path: int, ends: np.ndarray) -> np.ndarray:
    return np.concatenate([np.full(path, path + len(ends)), ends + path]).astype(np.int32)


def make_tile_lists(keys: Keys, tile: int = TILE) -> TileLists:
    """The pairs of tiles in which any query sees any key.

    Args:
        tile: tokens in a tile, of queries and of keys.
    """
    path, total = keys.path, len(keys.ends)
    count = total - path
    starts = np.arange(0, total, tile)
    stops = np.minimum(starts + tile, total)
    furthest, nearest = (f.reduceat(keys.ends, starts).astype(np.int64) for f in (np.maximum, np.minimum))
    # Query tile q starts at key path + q * tile. First: the query tile that contains the start of the key tile. Last:
    # the last query tile that starts before the furthest end. Overlapping tiles form a pair: a token sees itself.
    first = np.maximum(starts - path, 0) // tile
    last = -(-(furthest - path) // tile) - 1
    meetings = np.maximum(last - first + 1, 0)
    key_tile = np.repeat(np.arange(len(starts)), meetings)
    query_tile = ranges(first, meetings)
    query_start = query_tile * tile + path
    query_stop = np.minimum(query_start + tile, total)
    whole = (stops[key_tile] <= query_start) & (query_stop <= nearest[key_tile])
    if keys.lowest is not None:
        key_tile, query_tile, whole = _in_sight(keys, key_tile, query_tile, whole, starts, tile)
    tiles = -(-count // tile)
    return TileLists(_lists(query_tile, key_tile, whole, tiles), _lists(key_tile, query_tile, whole, len(starts)))


def _in_sight(keys: Keys, key_tile, query_tile, whole, key_starts, tile: int):
    """Drop the pairs of tiles whose keys are all at lesser depths than the queries see."""
    assert keys.depth is not None and keys.lowest is not None
    query_starts = np.arange(0, len(keys.lowest), tile)
    deepest, shallowest = (f.reduceat(keys.depth, key_starts) for f in (np.maximum, np.minimum))
    least, most = (f.reduceat(keys.lowest, query_starts) for f in (np.minimum, np.maximum))
    reached = deepest[key_tile] >= least[query_tile]
    whole = whole & (shallowest[key_tile] >= most[query_tile])
    return key_tile[reached], query_tile[reached], whole[reached]


def _lists(own: np.ndarray, other: np.ndarray, whole: np.ndarray, tiles: int) -> Lists:
    """Group the pairs by `own`, unmasked ones first. The input has ascending `other` for each `own`."""
    group = 2 * own + ~whole
    # Sorting 16-bit numbers takes linear time.
    order = np.argsort(group.astype(np.uint16) if 2 * tiles <= 1 << 16 else group, kind="stable")
    count = np.bincount(own, minlength=tiles)
    unmasked = np.bincount(own, weights=whole, minlength=tiles).astype(np.int64)
    begin = np.cumsum(count) - count
    bounds = np.stack([begin, begin + unmasked, begin + count], axis=1).astype(np.int32)
    return Lists(bounds, other[order].astype(np.int32), np.argsort(-count, kind="stable").astype(np.int32))

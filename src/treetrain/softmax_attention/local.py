"""Cuts the visible pairs of a forest into calls for layers with a window or chunks.

Queries are cut into tiles of consecutive tokens in pre-order. A tile's keys are its own tokens and the path of its
first token, from the least depth that any of its tokens sees. All tokens of a tile see some stretch of that path in
full; it becomes a rectangle where that pays. The other keys are gathered and masked, tiles of similar length in one
call. So work and masks are proportional to tokens times window, whatever the length of the paths.

Keys are numbered from the last `LocalSchedule.tail` tokens of the path above; the forest's own tokens follow.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

from treetrain.softmax_attention.fork_blocks import Ancestors, tokens_in
from treetrain.softmax_attention.schedule import (
    KEY_PAIRS,
    QUERY_PAIRS,
    TILE,
    TILE_PAIR,
    Forest,
    Schedule,
    Tile,
    tile_batches,
)
from treetrain.tree.attention_range import AttentionRange

MOST_QUERIES = 256
"""Most queries in a tile; a mask has up to three times as many entries per query."""
QUERIES_PER_WINDOW = 8
"""The window divided by this is the number of queries in a tile: masked-out work is about the square of a tile."""
MOST_GATHERED = 1024
"""A stretch of more keys than this that the whole tile sees is always a rectangle."""


class LocalSchedule(NamedTuple):
    """Calls over the last `tail` keys of the path above, followed by the forest's own keys."""

    schedule: Schedule
    tail: int


def local_schedule(
    forest: Forest, visible_range: AttentionRange, *, path_tokens: int = 0, call_pairs: float = 8192.0
) -> LocalSchedule:
    """Choose the calls.

    Args:
        forest: its roots are at depth `path_tokens`.
        path_tokens: number of tokens above the forest; all are ancestors of every token of it.
        call_pairs: cost of one more call, in query-key pairs.
    """
    lowest = visible_range.lowest(forest.depth)
    tail = max(0, path_tokens - int(lowest.min()))
    whole = _below_tail(forest, tail)
    lowest = np.concatenate([np.zeros(tail, np.int64), lowest])
    size = visible_range.window or visible_range.chunk or TILE
    queries = min(max(TILE, size // QUERIES_PER_WINDOW), MOST_QUERIES)
    ancestors = Ancestors(whole.segment_parent, whole.segment_start, whole.depth)
    schedule, tiles = Schedule(num_tokens=len(forest.ends)), []
    start = tail
    while start < len(whole.ends):
        stop = _tile_stop(whole.depth, lowest, start, queries)
        tiles.append(_tile(whole.depth, ancestors, lowest, start, stop, tail, call_pairs, schedule.rectangles))
        start = stop
    # Tiles share a call if their number of queries rounds up to the same power of two.
    batches = tile_batches(whole, tiles, lambda queries: 1 << (queries - 1).bit_length(), lowest=lowest, tail=tail)
    schedule.batches.extend(batches)
    return LocalSchedule(schedule, tail)


def _below_tail(forest: Forest, tail: int) -> Forest:
    """The forest with the last `tail` tokens of the path above it put in front."""
    if not tail:
        return forest
    count, first = len(forest.ends), int(forest.depth[0])
    return Forest(
        ends=np.concatenate([np.full(tail, tail + count), forest.ends + tail]),
        depth=np.concatenate([np.arange(first - tail, first), forest.depth]),
        segment_start=np.concatenate([[0], forest.segment_start + tail]),
        segment_parent=np.concatenate([[-1], forest.segment_parent + 1]),
    )


def _tile_stop(depth: Int64[np.ndarray, "N"], lowest: Int64[np.ndarray, "N"], start: int, queries: int) -> int:
    """The end of the tile from `start`: at most `queries` tokens, whose depths and lowest visible depths are close."""
    near, low = depth[start : start + queries], lowest[start : start + queries]
    shallow = np.minimum.accumulate(near) < near[0] - queries
    spread = np.maximum.accumulate(low) - np.minimum.accumulate(low) > queries
    too_far = shallow | spread
    return start + (int(too_far.argmax()) if too_far.any() else len(near))


def _tile(
    depth: Int64[np.ndarray, "N"],
    ancestors: Ancestors,
    lowest: Int64[np.ndarray, "N"],
    start: int,
    stop: int,
    tail: int,
    call_pairs: float,
    rectangles: list[tuple[int, int, int, int]],
) -> Tile:
    """A tile with the keys that it gathers; appends the stretches that are computed unmasked to `rectangles`."""
    depth, low = depth[start:stop], lowest[start:stop]
    own, shallowest, least, most = int(depth[0]), int(depth.min()), int(low.min()), int(low.max())
    queries = stop - start
    gathered = []
    for piece in ancestors.between(start, most, shallowest):
        keys = piece[1] - piece[0]
        saved = (TILE_PAIR - 1) * queries * keys - call_pairs - QUERY_PAIRS * queries - KEY_PAIRS * keys
        if saved > 0 or keys > MOST_GATHERED:
            rectangles.append((start - tail, stop - tail, *piece))
        else:
            gathered.append(piece)
    above = ancestors.between(start, least, min(most, own))
    below = ancestors.between(start, max(shallowest, most), own)
    return Tile(start, stop, tokens_in(above + gathered + below))

"""Cuts the visible (query, key) pairs of a forest into few stock attention calls.

Every visible pair lands in exactly one call. Three kinds of call are used (docs/design.md):

- a *chain*: a run of first children, contiguous in pre-order; one causal call;
- a *rectangle*: everything that hangs off a chain at one fork, against the chain down to that fork; no mask needed;
- *tiles*: a bushy region is cut into runs of up to ``TILE`` consecutive tokens. A token of the run sees, inside its
  region, only the run itself and the path of the run's first token (a token that is an ancestor of any later one in
  pre-order and stands before the run is an ancestor of the first one too). Tiles are padded to one size and computed
  by a single masked call, however many small segments there are. Short unforked rows are batched likewise, causally.

Which of them a subtree gets is decided bottom-up by predicted cost, measured in query-key pairs; a call costs as much
as ``call_pairs`` pairs on top of its own.
"""

from dataclasses import dataclass, field

import numpy as np

TILE = 64
"""Queries in a tile."""
MAX_TILE_PATH = 1024
"""A region whose paths are longer than this is never tiled: masks would grow with depth."""
QUERY_PAIRS = 50
"""What one query costs in a batch or a rectangle besides its pairs (copies, merging), in query-key pairs; measured."""
CAUSAL_BLOCK = 512
"""The stock causal kernel skips hidden keys in blocks of this many."""
MAX_BATCH_SCORES = 1 << 22
"""Padded query-key pairs in one batched call; bounds its mask and its copies."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Forest:
    """Where the segments of a packed run lie: the attention layer's view of a layout (int64 arrays)."""

    ends: np.ndarray
    """[N] exclusive subtree end of every token."""
    depth: np.ndarray
    """[N] position of every token on its path."""
    segment_start: np.ndarray
    """[S + 1] offsets of the segments in pre-order."""
    segment_parent: np.ndarray
    """[S] parent segment, -1 at roots; a child hangs below the last token of its parent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Equal-shaped small pieces computed by one call. Padding repeats token 0 and is masked or dropped."""

    query_index: np.ndarray
    """int64 [C, Q]: packed index of every query slot."""
    query_length: np.ndarray
    """int64 [C]: filled query slots of each piece."""
    key_index: np.ndarray
    """int64 [C, K]: packed index of every key slot."""
    mask: np.ndarray | None
    """bool [C, Q, K] (True = visible), or None for a causal call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The calls of one layer. Chains and batches cover each query once; rectangles are merged into them afterwards."""

    num_tokens: int
    chains: list[tuple[int, int]] = field(default_factory=list)
    """(start, stop): causal calls."""
    rectangles: list[tuple[int, int, int, int]] = field(default_factory=list)
    """(query start, query stop, key start, key stop): unmasked calls."""
    batches: list[Batch] = field(default_factory=list)


@dataclass(slots=True)
class _Cut:
    """Pieces chosen so far, before small ones are batched."""

    chains: list[tuple[int, int]] = field(default_factory=list)
    rectangles: list[tuple[int, int, int, int]] = field(default_factory=list)
    regions: list[tuple[int, int]] = field(default_factory=list)
    rows: list[tuple[int, int]] = field(default_factory=list)


def make_schedule(forest: Forest, *, call_pairs: float = 8192.0) -> Schedule:
    """Choose the calls that cover ``forest`` at the least predicted cost.

    Args:
        call_pairs: cost of one more call, in query-key pairs (forward and backward together).
    """
    cut = _emit(forest, *_decide(forest, call_pairs))
    batches = _tile_batches(forest, cut.regions) + _row_batches(cut.rows)
    return Schedule(num_tokens=len(forest.ends), chains=cut.chains, rectangles=cut.rectangles, batches=batches)


_REGION, _ROW, _CHAIN = -1, -2, 0  # a decision >= 0 is a chain of that many segments below its first


class _Costs:
    """Predicted cost of the pieces, in query-key pairs."""

    def __init__(self, forest: Forest, call_pairs: float):
        self.call = call_pairs
        self.depth_sum = np.concatenate([[0], np.cumsum(forest.depth)])
        self.max_depth = _subtree_max_depth(forest)

    def region(self, start: int, stop: int, base_depth: int, max_depth: int) -> float:
        if max_depth - base_depth >= MAX_TILE_PATH:
            return float("inf")
        tokens = stop - start
        return float(self.depth_sum[stop] - self.depth_sum[start]) + tokens * (TILE + QUERY_PAIRS - base_depth)

    def chain(self, length: int) -> float:
        return self.call + length * min(length, length / 2 + CAUSAL_BLOCK / 2)

    def rectangle(self, queries: int, keys: int) -> float:
        return self.call + queries * (keys + QUERY_PAIRS)

    def row(self, length: int) -> float:
        return float(length * (_padded(length) + QUERY_PAIRS)) if length <= 2 * TILE else float("inf")


def _subtree_max_depth(forest: Forest) -> np.ndarray:
    """[S] deepest position in each segment's subtree."""
    last = forest.segment_start[1:] - 1
    deepest = forest.depth[last].astype(np.int64)
    for s in range(len(deepest) - 1, 0, -1):
        parent = forest.segment_parent[s]
        if parent >= 0 and deepest[s] > deepest[parent]:
            deepest[parent] = deepest[s]
    return deepest


def _heavy_paths(parent: list[int]) -> list[int]:
    """Segments that are not the first child of their parent: each is the top of one path of first children."""
    return [s for s, p in enumerate(parent) if p < 0 or p != s - 1]


def _decide(forest: Forest, call_pairs: float) -> tuple[list[int], list[int]]:
    """Tops of the first-child paths and, for each segment that is a top, how its subtree is computed."""
    costs = _Costs(forest, call_pairs)
    start, parent = forest.segment_start.tolist(), forest.segment_parent.tolist()
    count = len(parent)
    segment_end = forest.ends[forest.segment_start[:-1]].tolist()
    segment_of_start = dict(zip(start, range(count)))
    top_depth = forest.depth[forest.segment_start[:-1]].tolist()
    max_depth = costs.max_depth.tolist()
    best, decision = [0.0] * count, [_REGION] * count
    tops = _heavy_paths(parent)
    for top in reversed(tops):
        base = top_depth[top]
        cheapest, choice = costs.region(start[top], segment_end[top], base, max_depth[top]), _REGION
        if start[top + 1] == segment_end[top]:
            row = costs.row(segment_end[top] - start[top])
            if row < cheapest:
                cheapest, choice = row, _ROW
        hanging = 0.0
        s, steps = top, 0
        while True:
            length = start[s + 1] - start[top]
            cost = hanging + costs.chain(length)
            below = segment_end[s] - start[s + 1]
            if below:
                cost += costs.rectangle(below, length)
                cost += costs.region(start[s + 1], segment_end[s], base + length, max_depth[s])
            if cost < cheapest:
                cheapest, choice = cost, _CHAIN + steps
            if not below:
                break
            light_start = segment_end[s + 1]
            if light_start < segment_end[s]:
                hanging += costs.rectangle(segment_end[s] - light_start, length)
                hanging += sum(best[c] for c in _siblings(light_start, segment_end[s], segment_of_start, segment_end))
            s, steps = s + 1, steps + 1
        best[top], decision[top] = cheapest, choice
    return tops, decision


def _siblings(start: int, stop: int, segment_of_start: dict[int, int], segment_end: list[int]) -> list[int]:
    """Segments whose subtrees tile the token range [start, stop)."""
    found = []
    while start < stop:
        s = segment_of_start[start]
        found.append(s)
        start = segment_end[s]
    return found


def _emit(forest: Forest, tops: list[int], decision: list[int]) -> _Cut:
    """Walk the decisions down from the roots and collect the pieces."""
    start, parent = forest.segment_start.tolist(), forest.segment_parent.tolist()
    segment_end = forest.ends[forest.segment_start[:-1]].tolist()
    segment_of_start = dict(zip(start, range(len(parent))))
    cut = _Cut()
    pending = [top for top in tops if parent[top] < 0]
    while pending:
        top = pending.pop()
        choice = decision[top]
        if choice == _REGION:
            cut.regions.append((start[top], segment_end[top]))
            continue
        if choice == _ROW:
            cut.rows.append((start[top], segment_end[top]))
            continue
        last = top + choice
        for s in range(top, last):
            light_start = segment_end[s + 1]
            if light_start < segment_end[s]:
                cut.rectangles.append((light_start, segment_end[s], start[top], start[s + 1]))
                pending += _siblings(light_start, segment_end[s], segment_of_start, segment_end)
        cut.chains.append((start[top], start[last + 1]))
        if start[last + 1] < segment_end[last]:
            cut.rectangles.append((start[last + 1], segment_end[last], start[top], start[last + 1]))
            cut.regions.append((start[last + 1], segment_end[last]))
    return cut


def _padded(length: int) -> int:
    """Row lengths are padded to steps of about an eighth, so that a batch wastes little and batches stay few."""
    step = 4
    while step * 16 <= length:
        step *= 2
    return -(-length // step) * step


def _row_batches(rows: list[tuple[int, int]]) -> list[Batch]:
    by_size: dict[int, list[tuple[int, int]]] = {}
    for start, stop in rows:
        by_size.setdefault(_padded(stop - start), []).append((start, stop))
    batches = []
    for size, members in sorted(by_size.items()):
        per_batch = max(1, MAX_BATCH_SCORES // (size * size))
        for first in range(0, len(members), per_batch):
            span = np.array(members[first : first + per_batch], dtype=np.int64)
            length = span[:, 1] - span[:, 0]
            slot = np.arange(size)
            index = np.where(slot < length[:, None], span[:, :1] + slot, 0)
            batches.append(Batch(query_index=index, query_length=length, key_index=index, mask=None))
    return batches


def _tile_batches(forest: Forest, regions: list[tuple[int, int]]) -> list[Batch]:
    tiles = _cut_tiles(forest, regions)
    tiles.sort(key=lambda tile: len(tile[2]))
    batches, first = [], 0
    while first < len(tiles):
        # Tiles sorted by path length share a batch while the longest path wastes less than a quarter of the keys.
        limit = max(32, int(1.25 * (len(tiles[first][2]) + TILE)) - TILE)
        stop = first
        while stop < len(tiles) and len(tiles[stop][2]) <= limit:
            size = (stop - first + 1) * TILE * (len(tiles[stop][2]) + TILE)
            if stop > first and size > MAX_BATCH_SCORES:
                break
            stop += 1
        batches.append(_tile_batch(forest, tiles[first:stop]))
        first = stop
    return batches


def _cut_tiles(forest: Forest, regions: list[tuple[int, int]]) -> list[tuple[int, int, np.ndarray]]:
    """(start, stop, path of the first token inside its region) of every tile; adjacent regions share tiles."""
    regions = sorted(regions)
    region_start = np.array([r[0] for r in regions], dtype=np.int64)
    tiles, i = [], 0
    while i < len(regions):
        run_start, run_stop = regions[i]
        i += 1
        while i < len(regions) and regions[i][0] == run_stop:
            run_stop = regions[i][1]
            i += 1
        for start in range(run_start, run_stop, TILE):
            region = region_start[np.searchsorted(region_start, start, side="right") - 1]
            tiles.append((start, min(start + TILE, run_stop), _path_inside(forest, start, int(region))))
    return tiles


def _path_inside(forest: Forest, token: int, region_start: int) -> np.ndarray:
    """Packed indices of the proper ancestors of ``token`` that are not before ``region_start``, shallowest first."""
    s = int(np.searchsorted(forest.segment_start, token, side="right")) - 1
    pieces, stop = [], token
    while s >= 0 and stop > region_start:
        start = max(int(forest.segment_start[s]), region_start)
        pieces.append(np.arange(start, stop, dtype=np.int64))
        s = int(forest.segment_parent[s])
        stop = int(forest.segment_start[s + 1]) if s >= 0 else 0
    return np.concatenate(pieces[::-1]) if pieces else np.empty(0, dtype=np.int64)


def _tile_batch(forest: Forest, tiles: list[tuple[int, int, np.ndarray]]) -> Batch:
    paths = max(len(path) for _, _, path in tiles)
    slot = np.arange(TILE)
    start = np.array([tile[0] for tile in tiles], dtype=np.int64)
    length = np.array([tile[1] - tile[0] for tile in tiles], dtype=np.int64)
    filled = slot < length[:, None]
    query = np.where(filled, start[:, None] + slot, 0)
    key = np.zeros((len(tiles), paths + TILE), dtype=np.int64)
    key_end = np.zeros_like(key)
    for c, (_, _, path) in enumerate(tiles):
        key[c, : len(path)] = path
        key_end[c, : len(path)] = forest.ends[path]
    key[:, paths:] = query
    key_end[:, paths:] = np.where(filled, forest.ends[query], 0)
    mask = (key[:, None, :] <= query[:, :, None]) & (query[:, :, None] < key_end[:, None, :])
    # A padded query must see something, or its softmax is undefined; its output is dropped.
    mask[:, slot, paths + slot] |= ~filled
    return Batch(query_index=query, query_length=length, key_index=key, mask=mask)

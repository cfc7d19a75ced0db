"""Cuts the visible (query, key) pairs of a forest into few stock attention calls.

Every visible pair is in exactly one call. There are four kinds of calls (docs/design.md):

- a *chain*: a run of first children, contiguous in pre-order; one causal call;
- a *rectangle*: all subtrees that leave a chain at one fork, against the chain down to that fork; no mask needed;
- *tiles*: a region with many small segments is cut into runs of up to ``TILE`` consecutive tokens. Inside its region, a
  token of a run sees only the run itself and the path of the run's first token. (In pre-order, a token before the run
  that is an ancestor of any token of the run is an ancestor of the first one too.) Tiles of similar size are padded and
  computed by one masked call;
- a *block*: one rectangle for the light subtrees of consecutive forks of a chain, and tiles that also gather the chain
  below the first of these forks (`fork_blocks`). It serves many small subtrees along a chain.

The kind is chosen for each subtree, bottom-up, by predicted cost in query-key pairs; a call costs ``call_pairs`` pairs
on top of its own.

Shape letters: N tokens, S segments, B candidate blocks of forks, C pieces in a batch, Q query slots and K key slots of
a piece.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int64
from numpy.typing import NDArray

from treetrain.core.tree.layout import FULL, AttentionRange, PackedLayout
from treetrain.core.tree.token_tree import Int64s

Floats = NDArray[np.float64]

TILE = 64
"""Queries in a tile."""
MAX_TILE_PATH = 1024
"""Longest path of a region that is tiled; masks grow with depth."""
QUERY_PAIRS = 50
"""Measured cost of one query in a batch or a rectangle besides its pairs (copies, merging), in query-key pairs."""
KEY_PAIRS = 7
"""Measured cost of one key in a rectangle besides its pairs (adding up its gradients), in query-key pairs."""
TILE_PAIR = 1.25
"""Cost of one query-key pair in a block's tiles, where keys are gathered and masked; measured as 1.1 to 1.3."""
CAUSAL_BLOCK = 512
"""Block size in which the stock causal kernel skips hidden keys."""
MAX_BATCH_SCORES = 1 << 22
"""Most padded query-key pairs in one batched call; bounds its mask and its copies."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Forest:
    """The segments of a packed run, as attention needs them."""

    ends: Int64[np.ndarray, " N"]
    """Exclusive subtree end of every token."""
    depth: Int64[np.ndarray, " N"]
    segment_parent: Int64[np.ndarray, " S"]
    """Parent segment, -1 at roots; a child continues the last token of its parent."""
    segment_start: Int64[np.ndarray, " S+1"]
    """Offsets of the segments in pre-order."""

    @classmethod
    def of(cls, layout: PackedLayout) -> "Forest":
        return cls(
            ends=layout.ends,
            depth=layout.positions,
            segment_parent=layout.segment_parent,
            segment_start=layout.segment_start,
        )


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The visible range of a layer and its cap on scores. Layers with the same range share schedules and masks."""

    visible_range: AttentionRange = FULL
    softcap: float | None = None
    """Scores s become softcap * tanh(s / softcap) before the softmax."""


PLAIN_ATTENTION = AttentionSpec()


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Small pieces of equal shape, computed by one call. Padding repeats token 0 and is masked or dropped."""

    query_index: Int64[np.ndarray, "C Q"]
    """The token in every query slot."""
    query_length: Int64[np.ndarray, " C"]
    """Filled query slots of each piece."""
    key_index: Int64[np.ndarray, "C K"]
    """The token in every key slot."""
    mask: Bool[np.ndarray, "C Q K"]
    """True where a query sees a key."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The calls of one layer. Chains and batches contain each query once; rectangles are merged into their result."""

    num_tokens: int
    chains: list[tuple[int, int]] = field(default_factory=list)
    """(start, stop): causal calls."""
    rectangles: list[tuple[int, int, int, int]] = field(default_factory=list)
    """(query start, query stop, key start, key stop): unmasked calls."""
    batches: list[Batch] = field(default_factory=list)


def make_schedule(forest: Forest, *, call_pairs: float = 8192.0) -> Schedule:
    """Choose the calls that cover ``forest`` at the least predicted cost.

    Args:
        call_pairs: cost of one more call, in query-key pairs (forward and backward together).
    """
    segments, schedule = _Segments(forest), Schedule(num_tokens=len(forest.ends))
    regions = _emit(segments, _decide(forest, segments, _Costs(forest, call_pairs)), schedule)
    schedule.batches.extend(tile_batches(forest, _cut_tiles(forest, regions), lambda _: TILE))
    return schedule


Region = tuple[int, int, int]
"""(start, stop, floor): tokens [start, stop). The keys of their tiles include ancestors from token ``floor`` on."""


class _Segments:
    """The forest's segments as lists, which Python reads faster than arrays."""

    def __init__(self, forest: Forest):
        first = forest.segment_start[:-1]
        self.start: list[int] = forest.segment_start.tolist()
        self.parent: list[int] = forest.segment_parent.tolist()
        self.end: list[int] = forest.ends[first].tolist()
        self.depth: list[int] = forest.depth[first].tolist()
        self.max_depth: list[int] = forest.depth[forest.segment_start[1:] - 1].tolist()
        """Largest depth in each segment's subtree."""
        for segment in range(len(self.parent) - 1, 0, -1):
            above = self.parent[segment]
            if above >= 0:
                self.max_depth[above] = max(self.max_depth[above], self.max_depth[segment])
        self.at = dict(zip(self.start, range(len(self.parent))))

    def siblings(self, start: int, stop: int) -> list[int]:
        """Segments whose subtrees together are the token range [start, stop)."""
        found = []
        while start < stop:
            found.append(self.at[start])
            start = self.end[found[-1]]
        return found


class _Costs:
    """Predicts the cost of pieces, in query-key pairs."""

    def __init__(self, forest: Forest, call_pairs: float):
        self.call = call_pairs
        self.depth_sum: list[int] = np.concatenate([[0], np.cumsum(forest.depth)]).tolist()

    def region(self, start: int, stop: int, base_depth: int, max_depth: int) -> float:
        if max_depth - base_depth >= MAX_TILE_PATH:
            return float("inf")
        tokens = stop - start
        return float(self.depth_sum[stop] - self.depth_sum[start]) + tokens * (TILE + QUERY_PAIRS - base_depth)

    def chain(self, length: int) -> float:
        return self.call + length * min(length, length / 2 + CAUSAL_BLOCK / 2)

    def rectangle(self, queries: Any, keys: Any) -> Any:
        """Args: numbers or arrays."""
        return self.call + queries * (keys + QUERY_PAIRS) + keys * KEY_PAIRS

    def tiles(self, slots: Any, path: Any) -> Any:
        """Args: slots: query slots with padding; path: keys that each tile of a block gathers. Numbers or arrays."""
        return slots * (TILE_PAIR * path + TILE + QUERY_PAIRS)


_REGION = -1  # a decision n >= 0 is a chain of 1 + n segments


@dataclass(slots=True)
class _Decision:
    how: list[int]
    """[S]: how the subtree is computed, for each segment at the top of a path of first children."""
    opens: list[int]
    """[S]: the first fork of the block that ends at this fork; the fork itself if it is in no block."""


def _decide(forest: Forest, segments: _Segments, costs: _Costs) -> _Decision:
    """Find the cheapest way to compute every subtree, from the last to the first."""
    start, end, count = segments.start, segments.end, len(segments.parent)
    blocks = fork_blocks(
        start=forest.segment_start,
        parent=forest.segment_parent,
        end=forest.ends[forest.segment_start[:-1]],
        depth=forest.depth,
        max_depth=np.array(segments.max_depth, dtype=np.int64),
        rectangle_cost=costs.rectangle,
        tiles_cost=costs.tiles,
    )
    best = [0.0] * count  # cost of each subtree at the top of a path of first children
    above = [0.0] * count  # cost of all subtrees that leave the chain at forks above this segment
    decision = _Decision(how=[_REGION] * count, opens=list(range(count)))
    for top in np.unique(path_tops(forest.segment_parent))[::-1].tolist():
        cheapest, choice = costs.region(start[top], end[top], segments.depth[top], segments.max_depth[top]), _REGION
        hanging = 0.0  # cost of all subtrees that leave the chain above its last segment
        s = top  # the chain's last segment; each round adds its first child, s + 1
        while True:
            length, below = start[s + 1] - start[top], end[s] - start[s + 1]
            cost = hanging + costs.chain(length)
            if below:
                cost += costs.rectangle(below, length)
                cost += costs.region(start[s + 1], end[s], segments.depth[top] + length, segments.max_depth[s])
            if cost < cheapest:
                cheapest, choice = cost, s - top
            if not below:
                break
            above[s] = hanging
            if end[s + 1] < end[s]:
                hanging += costs.rectangle(end[s] - end[s + 1], length)
                hanging += sum(best[c] for c in segments.siblings(end[s + 1], end[s]))
            for b in range(blocks.offset[s], blocks.offset[s + 1]):
                together = above[blocks.first[b]] + blocks.cost[b]
                if together < hanging:
                    hanging, decision.opens[s] = together, blocks.first[b]
            s += 1
        best[top], decision.how[top] = cheapest, choice
    return decision


def _emit(segments: _Segments, decision: _Decision, schedule: Schedule) -> list[Region]:
    """Follow the decisions from the roots down; add chains and rectangles to the schedule, return regions of tiles."""
    start, end, regions = segments.start, segments.end, []
    pending = [s for s, parent in enumerate(segments.parent) if parent < 0]
    while pending:
        top = pending.pop()
        if decision.how[top] == _REGION:
            regions.append((start[top], end[top], start[top]))  # the whole subtree in tiles
            continue
        last = top + decision.how[top]  # the chain's last segment
        below = start[last + 1]  # where the subtrees behind the chain begin
        schedule.chains.append((start[top], below))
        if below < end[last]:
            schedule.rectangles.append((below, end[last], start[top], below))  # all of them see the whole chain
            regions.append((below, end[last], below))
        s = last - 1
        while s >= top:  # subtrees that leave the chain above its last segment
            first = decision.opens[s]
            if end[s + 1] < end[first]:
                schedule.rectangles.append((end[s + 1], end[first], start[top], start[first + 1]))
                if first < s:  # a block of forks; its paths begin below the first
                    regions.append((end[s + 1], end[first], start[first + 1]))
                else:
                    pending += segments.siblings(end[s + 1], end[s])  # one fork: its subtrees decide by themselves
            s = first - 1  # above the block
    return regions


class Tile(NamedTuple):
    """A run of queries [start, stop), and the keys before it that are gathered for it."""

    start: int
    stop: int
    path: Int64[np.ndarray, " path"]
    """Gathered keys, shallowest first."""


def tile_batches(
    forest: Forest,
    tiles: list[Tile],
    width: Callable[[int], int],
    *,
    lowest: Int64[np.ndarray, " N"] | None = None,
    tail: int = 0,
) -> list[Batch]:
    """Batch tiles of similar shape; padding wastes at most about a quarter of a call.

    Args:
        width: maps a number of queries to a number of query slots; tiles with equal slots may share a call.
        lowest: the least depth that each token sees; None if every token sees its whole path.
        tail: the first `tail` tokens of the forest are keys only; queries are numbered from `tail`.
    """
    tiles = sorted(tiles, key=lambda tile: (width(tile.stop - tile.start), len(tile.path)))
    batches, first = [], 0
    while first < len(tiles):
        slots, path = width(tiles[first].stop - tiles[first].start), len(tiles[first].path)
        most, stop = max(32, path + (path + slots) // 4), first  # tiles are padded to the longest of their call
        while stop < len(tiles) and width(tiles[stop].stop - tiles[stop].start) == slots:
            keys = len(tiles[stop].path) + slots
            if keys - slots > most or (stop > first and (stop - first + 1) * slots * keys > MAX_BATCH_SCORES):
                break
            stop += 1
        batches.append(_tile_batch(forest, tiles[first:stop], lowest, tail))
        first = stop
    return batches


def _cut_tiles(forest: Forest, regions: list[Region]) -> list[Tile]:
    """Cut all regions into tiles. A tile gathers the path of its first token from its region's floor on.

    Adjacent regions share tiles unless the floor of the later one is before its start.
    """
    regions = sorted(regions)
    region_start = np.array([r[0] for r in regions], dtype=np.int64)
    ancestors = Ancestors(forest.segment_parent, forest.segment_start, forest.depth)
    tiles, i = [], 0
    while i < len(regions):
        run_start, run_stop, _ = regions[i]
        i += 1
        while i < len(regions) and regions[i][0] == run_stop == regions[i][2]:  # it sees nothing before its start
            run_stop = regions[i][1]
            i += 1
        for start in range(run_start, run_stop, TILE):
            floor = regions[int(np.searchsorted(region_start, start, side="right")) - 1][2]
            path = ancestors.between(start, int(forest.depth[floor]), int(forest.depth[start]))
            tiles.append(Tile(start, min(start + TILE, run_stop), tokens_in(path)))
    return tiles


def _tile_batch(forest: Forest, tiles: list[Tile], lowest: Int64[np.ndarray, " N"] | None, tail: int) -> Batch:
    width, paths = max(tile.stop - tile.start for tile in tiles), max(len(tile.path) for tile in tiles)
    slot = np.arange(width)
    start = np.array([tile.start for tile in tiles])
    length = np.array([tile.stop - tile.start for tile in tiles])
    filled = slot < length[:, None]
    query = np.where(filled, start[:, None] + slot, tail)
    key = np.full((len(tiles), paths + width), tail)
    end = np.zeros_like(key)  # 0 hides a padded key
    for number, tile in enumerate(tiles):
        key[number, : len(tile.path)] = tile.path
        end[number, : len(tile.path)] = forest.ends[tile.path]
    key[:, paths:] = query
    end[:, paths:] = np.where(filled, forest.ends[query], 0)
    mask = (key[:, None, :] <= query[:, :, None]) & (query[:, :, None] < end[:, None, :])
    if lowest is not None:
        mask &= forest.depth[key][:, None, :] >= lowest[query][:, :, None]
    # A padded query must see something, or its softmax is undefined; its output is dropped.
    mask[:, slot, paths + slot] |= ~filled
    return Batch(query_index=query - tail, query_length=length, key_index=key, mask=mask)


# ---- blocks of forks

MAX_BLOCK_PATH = 512
"""Longest path of a block's tokens below its first fork. Blocks with longer paths save little and need large masks."""
BLOCK_TILES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Sizes of the blocks to try at each fork, in tiles; larger ones would save almost nothing."""


class ForkBlocks(NamedTuple):
    """Candidate blocks, ordered by their last (deepest) fork. A fork is numbered by the segment that ends in it."""

    offset: list[int]
    """[S + 1]: the last fork of blocks [offset[s], offset[s + 1]) is s."""
    first: list[int]
    """[B]: the first (shallowest) fork of each block; less than the last."""
    cost: list[float]
    """[B]: predicted cost of the rectangle and the tiles, in query-key pairs."""


def path_tops(parent: Int64[np.ndarray, " S"]) -> Int64[np.ndarray, " S"]:
    """For each segment, the top segment of its path of first children."""
    index = np.arange(len(parent))
    return np.maximum.accumulate(np.where(parent != index - 1, index, 0))


class Ancestors:
    """Looks up the ancestors of tokens by depth, the position of every token on its path."""

    def __init__(
        self, parent: Int64[np.ndarray, " S"], start: Int64[np.ndarray, " S+1"], depth: Int64[np.ndarray, " N"]
    ):
        self._start, self._parent, self._depth, self._top = start, parent, depth, path_tops(parent)

    def between(self, token: int, low: int, high: int) -> list[tuple[int, int]]:
        """The proper ancestors of `token` at depths [low, high), as token ranges, shallowest first."""
        found: list[tuple[int, int]] = []
        segment, stop = int(np.searchsorted(self._start, token, side="right")) - 1, token
        while segment >= 0:
            # A path of first children is contiguous, so it takes one step however many forks it has.
            top = int(self._top[segment])
            start = int(self._start[top])
            depth = int(self._depth[start])
            piece = max(start, start + low - depth), min(stop, start + high - depth)
            if piece[0] < piece[1]:
                found.append(piece)
            if depth <= low:
                break
            segment = int(self._parent[top])
            stop = int(self._start[segment + 1])
        return found[::-1]


def tokens_in(pieces: list[tuple[int, int]]) -> Int64[np.ndarray, " tokens"]:
    return np.concatenate([np.zeros(0, np.int64), *(np.arange(*piece) for piece in pieces)])


def fork_blocks(
    *,
    parent: Int64[np.ndarray, " S"],
    start: Int64[np.ndarray, " S+1"],
    end: Int64[np.ndarray, " S"],
    depth: Int64[np.ndarray, " N"],
    max_depth: Int64[np.ndarray, " S"],
    rectangle_cost: Callable[[Int64s, Int64s], Floats],
    tiles_cost: Callable[[Int64s, Floats], Floats],
) -> ForkBlocks:
    """The candidate blocks, in O(S log S) time: for each last fork a few first forks.

    The *light* subtrees of a fork are those of all its children but the first. Take forks i..j of a chain, i above j.
    In pre-order their light subtrees are adjacent, the deepest fork's first, and form one token range R. All of R sees
    the chain down to fork i: this is one unmasked rectangle. R also sees the chain between forks i and j and its own
    tokens: these are tiles over R with short paths. So a chain of 100,000 forks needs a few hundred calls.

    Args:
        parent, start, end: segments and the exclusive ends of their subtrees.
        depth: position of every token on its path.
        max_depth: largest depth in each subtree.
        rectangle_cost: of (queries, keys).
        tiles_cost: of (query slots, mean keys outside the tile).
    """
    count = len(parent)
    top = path_tops(parent)
    forks = np.flatnonzero(top[1:] == top[:-1])  # segments whose first child continues their path
    if len(forks) < 2:
        return ForkBlocks([0] * (count + 1), [], [])
    stop, bottom = end[forks], end[forks + 1]  # light subtrees of a fork: tokens [bottom, stop)
    below = depth[start[forks + 1]]  # first position on the chain below the fork
    keys = start[forks + 1] - start[top[forks]]
    path = np.cumsum(np.diff(top[forks], prepend=top[forks[0]]) != 0)  # numbers the chains
    highest = _highest_first(path, below, _light_depth(parent, max_depth)[forks])
    # Ends decrease along a chain; negated and offset by chain number they increase overall, as searchsorted needs.
    falling = path * (int(end.max()) + 1) - stop
    depth_sum = np.concatenate([[0], np.cumsum(depth, dtype=np.int64)])
    last = np.arange(len(forks))
    first = np.empty((len(forks), len(BLOCK_TILES)), dtype=np.int64)
    cost = np.empty(first.shape)
    for column, length in enumerate(BLOCK_TILES):
        # The highest fork from which a block that ends at each fork has at most this many tiles.
        top_fork = np.searchsorted(falling, path * (int(end.max()) + 1) - (bottom + length * TILE))
        first[:, column] = np.maximum(top_fork, highest)
        top_fork = np.minimum(first[:, column], last)  # forks without a block are dropped below
        # R is the tokens [bottom, stop[top_fork]); their depths below the top fork are the lengths of the tiles' paths.
        queries = stop[top_fork] - bottom
        near = depth_sum[stop[top_fork]] - depth_sum[bottom] - queries * below[top_fork]
        tiles = -(-queries // TILE)
        # A tile gathers the path of its first token; its later tokens branch off higher up and see less of that path.
        slack = (below - below[top_fork]) / (2 * np.maximum(tiles, 1))
        mean_path = near / np.maximum(queries, 1) + slack
        cost[:, column] = rectangle_cost(queries, keys[top_fork]) + tiles_cost(tiles * TILE, mean_path)
    # A longer block that begins at the same fork as a shorter one is the same block.
    tried = first < last[:, None]
    tried[:, 1:] &= first[:, 1:] < first[:, :-1]
    per_segment = np.zeros(count, dtype=np.int64)
    per_segment[forks] = tried.sum(axis=1)
    offset = np.concatenate([[0], np.cumsum(per_segment)])
    return ForkBlocks(offset.tolist(), forks[first[tried]].tolist(), cost[tried].tolist())


def _light_depth(parent: Int64[np.ndarray, " S"], max_depth: Int64[np.ndarray, " S"]) -> Int64[np.ndarray, " S"]:
    """Find the largest depth in the light subtrees of each segment's fork; -1 if it has none."""
    found = np.full(len(parent), -1, dtype=np.int64)
    light = np.flatnonzero((parent >= 0) & (parent != np.arange(len(parent)) - 1))
    np.maximum.at(found, parent[light], max_depth[light])
    return found


def _highest_first(
    path: Int64[np.ndarray, " forks"], below: Int64[np.ndarray, " forks"], deepest: Int64[np.ndarray, " forks"]
) -> Int64[np.ndarray, " forks"]:
    """For each fork, the highest fork where a block ending here may begin with no path over ``MAX_BLOCK_PATH``.

    If there is none, the fork after it.
    """
    size = int(max(below.max(), deepest.max())) + 1
    # below[i] > deepest - MAX_BLOCK_PATH, i on the same chain; positions rise along a chain.
    needed = np.clip(deepest - MAX_BLOCK_PATH + 1, 0, size)
    least = np.searchsorted(path * (size + 1) + below, path * (size + 1) + needed)
    # A block includes all forks between, so the strictest limit counts; a fork that fits in no block separates blocks.
    return np.maximum.accumulate(np.minimum(least, np.arange(len(path)) + 1))


# ---- windows and chunks

MOST_QUERIES = 256
"""Most queries in a tile; a mask has up to three times as many entries per query."""
QUERIES_PER_WINDOW = 8
"""A tile has window / this many queries: masked-out work grows about with the square of a tile."""
MOST_GATHERED = 1024
"""A longer stretch of keys that the whole tile sees is always a rectangle."""


def local_schedule(
    forest: Forest, visible_range: AttentionRange, *, path_tokens: int = 0, call_pairs: float = 8192.0
) -> tuple[Schedule, int]:
    """Choose the calls of layers with a window or chunks.

    Queries are cut into tiles of consecutive tokens in pre-order. A tile's keys are its own tokens and the path of its
    first token, from the least depth that any of its tokens sees. All tokens of a tile see some stretch of that path in
    full; it becomes a rectangle where that is cheaper. The other keys are gathered and masked, tiles of similar length
    in one call. So work and masks are proportional to tokens times window for paths of any length.

    Args:
        forest: its roots are at depth `path_tokens`.
        path_tokens: number of tokens above the forest, ancestors of all its tokens.
        call_pairs: cost of one more call, in query-key pairs.

    Returns:
        The calls over the last `tail` keys of the path above, followed by the forest's own keys; and `tail`.
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
    return schedule, tail


def _below_tail(forest: Forest, tail: int) -> Forest:
    """Put the last `tail` tokens of the path above the forest in front of it."""
    if not tail:
        return forest
    count, first = len(forest.ends), int(forest.depth[0])
    return Forest(
        ends=np.concatenate([np.full(tail, tail + count), forest.ends + tail]),
        depth=np.concatenate([np.arange(first - tail, first), forest.depth]),
        segment_start=np.concatenate([[0], forest.segment_start + tail]),
        segment_parent=np.concatenate([[-1], forest.segment_parent + 1]),
    )


def _tile_stop(depth: Int64[np.ndarray, " N"], lowest: Int64[np.ndarray, " N"], start: int, queries: int) -> int:
    """Find the end of the tile from `start`: at most `queries` tokens of similar depth and lowest visible depth."""
    near, low = depth[start : start + queries], lowest[start : start + queries]
    shallow = np.minimum.accumulate(near) < near[0] - queries
    spread = np.maximum.accumulate(low) - np.minimum.accumulate(low) > queries
    too_far = shallow | spread
    return start + (int(too_far.argmax()) if too_far.any() else len(near))


def _tile(
    depth: Int64[np.ndarray, " N"],
    ancestors: Ancestors,
    lowest: Int64[np.ndarray, " N"],
    start: int,
    stop: int,
    tail: int,
    call_pairs: float,
    rectangles: list[tuple[int, int, int, int]],
) -> Tile:
    """Make a tile with the keys that it gathers; append stretches that are computed unmasked to `rectangles`."""
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

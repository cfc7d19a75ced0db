"""Cuts a forest into tiles for a chunked recurrence: small connected pieces that start from one state each.

The chunk rule of a linear recurrence works on any set of tokens whose "comes before" is a forest, not on chains alone:
a triangular mask of ancestors takes the place of the causal one. So a tile is a piece of the tree (or sibling pieces
that continue one token), forks inside it cost nothing, and states are made only where other tiles attach: at *exits*.
Tiles of one depth in the tree of tiles form a *level*; only levels have to run one after the other.
"""

from dataclasses import dataclass

import numpy as np

from treetrain.planning.partition import uniform
from treetrain.tree.assemble import Int64s
from treetrain.tree.layout import PackedLayout

TILE = 64
"""Most tokens of a tile: the chunk of the stock rules."""
TILE_SIDE = 128
"""What one slot of a tile costs besides its pairs with the tile's other slots, in such pairs."""
CLASS_PAIRS = 12_000
"""What one more size of tiles costs, in pairs of slots: some dozens of small calls."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TileClass:
    """Tiles padded to one size: n tiles of C slots. Padding repeats token 0."""

    index: Int64s
    """int64 [n, C]: the token of every slot."""
    length: Int64s
    """int64 [n]: filled slots."""
    entry: Int64s
    """int64 [n]: which state each tile starts from; 0 is the state before the roots, 1 + e that of exit e."""
    exit_tile: Int64s
    """int64 [x]: the tile of every exit that lies in this class."""
    exit_slot: Int64s
    """int64 [x]: its slot."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """All tiles of a forest of N tokens, and its E exits in the order of their levels."""

    classes: list[TileClass]
    slot: Int64s
    """int64 [N]: where each token lies among the slots of all classes, one class after the other."""
    exit_order: Int64s
    """int64 [E]: where each exit lies among those of all classes, one class after the other."""
    levels: list[tuple[int, int]]
    """(first exit, end) of every level that has exits; the tiles of the next level start from these."""
    exit_entry: Int64s
    """int64 [E]: which exit of the level before each exit's tile starts from (0 in the first level)."""
    exported: Int64s
    """int64 [x]: the exit of every exported token."""
    tokens: int
    """N."""

    @property
    def from_states(self) -> bool:
        """Whether any tile starts from another one's exit."""
        return any((tiles.entry > 0).any() for tiles in self.classes)


def make_tiles(layout: PackedLayout, exported: Int64s, *, tile: int = TILE) -> Tiles:
    """Cut a forest.

    Args:
        layout: N tokens, N > 0.
        exported: int64 [x]: tokens whose state is wanted besides.
        tile: most tokens of a tile.
    """
    plan = uniform(layout, tile)
    level = levels_of(plan.parent)
    exits = np.unique(np.concatenate([plan.attach[plan.attach >= 0], exported]))
    exit_level = level[plan.part_of[exits]]
    exits = exits[np.argsort(exit_level, kind="stable")]
    number = np.full(layout.num_tokens, -1, np.int64)
    number[exits] = np.arange(len(exits))
    entry = np.where(plan.attach >= 0, 1 + number[plan.attach], 0)

    order = np.argsort(plan.part_of, kind="stable")
    offset = np.cumsum(plan.sizes) - plan.sizes
    place = np.empty(layout.num_tokens, np.int64)  # of a token within its tile
    place[order] = np.arange(layout.num_tokens) - np.repeat(offset, plan.sizes)

    slot = np.empty(layout.num_tokens, np.int64)
    classes, exit_order, before = [], [], 0
    size_of = _padded_sizes(plan.sizes)
    for size in np.unique(size_of).tolist():
        members = np.flatnonzero(size_of == size)
        within = np.full(plan.num_parts, -1, np.int64)
        within[members] = np.arange(len(members))
        tokens = np.flatnonzero(within[plan.part_of] >= 0)
        at = within[plan.part_of[tokens]] * size + place[tokens]
        index = np.zeros(len(members) * size, np.int64)
        index[at] = tokens
        slot[tokens] = before + at
        before += len(index)
        own = np.flatnonzero(within[plan.part_of[exits]] >= 0)
        exit_order.append(own)
        classes.append(
            TileClass(
                index=index.reshape(-1, size),
                length=plan.sizes[members],
                entry=entry[members],
                exit_tile=within[plan.part_of[exits[own]]],
                exit_slot=place[exits[own]],
            )
        )
    counts = np.bincount(exit_level, minlength=0)
    stops = np.cumsum(counts)
    levels = list(zip((stops - counts).tolist(), stops.tolist()))
    first = np.concatenate([np.zeros(1, np.int64), stops - counts])[level[plan.part_of[exits]]]  # of the level before
    exit_entry = entry[plan.part_of[exits]]
    return Tiles(
        classes=classes,
        slot=slot,
        exit_order=np.argsort(np.concatenate([np.zeros(0, np.int64), *exit_order]), kind="stable"),
        levels=levels,
        exit_entry=np.where(exit_entry > 0, exit_entry - 1 - first, 0),
        exported=number[exported],
        tokens=layout.num_tokens,
    )


def levels_of(parent: Int64s) -> Int64s:
    """int64 [P]: how many lie above each; `parent` [P] is the one right above, which stands earlier, or -1."""
    level = [0] * len(parent)
    for part, above in enumerate(parent.tolist()):
        if above >= 0:
            level[part] = level[above] + 1
    return np.array(level, np.int64)


def _padded_sizes(sizes: Int64s) -> Int64s:
    """int64 [P]: the size each tile is padded to: few different ones, at the least predicted cost."""
    found, counts = np.unique(sizes, return_counts=True)
    best, cut = [0.0], [0]
    for stop in range(1, len(found) + 1):
        size = int(found[stop - 1])
        tiles = np.cumsum(counts[:stop][::-1])[::-1]  # tiles in found[start:stop], by start
        costs = np.array(best[:stop]) + tiles * size * (size + TILE_SIDE) + CLASS_PAIRS
        cut.append(int(np.argmin(costs)))
        best.append(float(costs[cut[-1]]))
    padded, stop = np.empty_like(found), len(found)
    while stop:
        padded[cut[stop] : stop] = found[stop - 1]
        stop = cut[stop]
    return padded[np.searchsorted(found, sizes)]

"""The gated delta rule over a forest, tile by tile.

Along a path the state S [K, V] of a head decays, removes the value stored under a key, and stores a new one:
    S <- exp(g) S;   S <- S + k (beta (v - k^T S))^T;   out = scale q^T S
(Gated Delta Networks, https://arxiv.org/abs/2412.06464). The chunked form of such a recurrence works on forests, not
only on chains: a triangular mask of ancestors replaces the causal mask. So a *tile* is a small connected piece of the
tree (or sibling pieces that continue one token), and forks inside it cost nothing. Within a tile the rule is one
unit-triangular system whose matrix is masked to ancestors. The tile is linear in the state S that it starts from:
    out = P S + R,   S at an exit = A S + B.
States are computed only at *exits*: tokens where other tiles attach, or whose state is exported. P, R, A and B are
computed for all tiles at once. Tiles of one depth in the tree of tiles form a *level*; only S <- A S + B runs level by
level, one small product each.

Shape letters: N tokens, J key heads, H value heads (a multiple of J), K and V sizes of keys and values; n tiles of C
slots, E exits.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from treetrain.device_arrays import on_device
from treetrain.planning.partition import uniform
from treetrain.tree.assemble import Int64s
from treetrain.tree.layout import PackedLayout

TILE = 64
"""Most tokens in a tile: the chunk size of the stock implementations."""
TILE_SIDE = 128
"""Cost of one slot of a tile besides its pairs with the tile's other slots, in pairs of slots."""
CLASS_PAIRS = 12_000
"""Cost of one more tile class (a few dozen small calls), in pairs of slots."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TileClass:
    """Tiles padded to one size: n tiles of C slots. Padding repeats token 0."""

    index: Int64s
    """int64 [n, C]: the token in every slot."""
    length: Int64s
    """int64 [n]: number of filled slots."""
    entry: Int64s
    """int64 [n]: the state each tile starts from; 0 is the state before the roots, 1 + e that of exit e."""
    exit_tile: Int64s
    """int64 [x]: the tile of every exit in this class."""
    exit_slot: Int64s
    """int64 [x]: the slot of every exit in this class."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """All tiles of a forest of N tokens, and its E exits, numbered by level."""

    classes: list[TileClass]
    slot: Int64s
    """int64 [N]: index of each token among the concatenated slots of all classes."""
    exit_order: Int64s
    """int64 [E]: index of each exit among the concatenated exits of all classes."""
    levels: list[tuple[int, int]]
    """(first exit, end) of every level that has exits; the tiles of the next level start from these."""
    exit_entry: Int64s
    """int64 [E]: the exit of the level before from which each exit's tile starts (0 in the first level)."""
    exported: Int64s
    """int64 [x]: the number of the exit at every exported token."""
    tokens: int
    """N."""

    @property
    def from_states(self) -> bool:
        """Whether any tile starts from the exit of another tile."""
        return any((tiles.entry > 0).any() for tiles in self.classes)


def make_tiles(layout: PackedLayout, exported: Int64s, *, tile: int = TILE) -> Tiles:
    """Cut a forest.

    Args:
        layout: N tokens, N > 0.
        exported: int64 [x]: tokens whose state is exported.
        tile: most tokens in a tile.
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
    place = np.empty(layout.num_tokens, np.int64)  # index of a token within its tile
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
    """int64 [P]: the number of ancestors of each item; `parent` [P] is the index of an earlier item, or -1."""
    level = [0] * len(parent)
    for part, above in enumerate(parent.tolist()):
        if above >= 0:
            level[part] = level[above] + 1
    return np.array(level, np.int64)


def _padded_sizes(sizes: Int64s) -> Int64s:
    """int64 [P]: the padded size of each tile: few different sizes, at the least predicted cost."""
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


KEY_EPSILON = 1e-6
"""Added to the squared norm of queries and keys before they are normalised, as in the stock implementations."""


@dataclass(frozen=True, slots=True)
class _Class:
    """A tile class on the device."""

    index: Tensor  # int64 [n * C]
    shape: tuple[int, int]  # (n, C)
    hidden: Tensor  # bool [n, C, C]: slot j is neither slot i nor an ancestor of it
    entry: Tensor  # int64 [n]
    exit_tile: Tensor  # int64 [x]
    exit_slot: Tensor  # int64 [x]
    exit_hidden: Tensor  # bool [x, C]: the row of `hidden` at each exit
    one_each: bool  # every tile has one exit, in order


class DeltaTiles:
    """The tiles of a forest on a device, shared by all layers of a run.

    Args:
        ends: int64 [N]: subtree ends.
    """

    def __init__(self, tiles: Tiles, ends: Tensor):
        self.tiles = tiles
        device = ends.device
        self.classes = [_on_device(c, ends) for c in tiles.classes]
        self.slot = on_device(tiles.slot, device)
        self.exit_order = on_device(tiles.exit_order, device)
        self.exit_entry = on_device(tiles.exit_entry, device)
        self.exported = on_device(tiles.exported, device)
        self.straight = _straight(tiles)


def _straight(tiles: Tiles) -> list[bool]:
    """[levels]: whether exit i starts from exit i of the level before, for all i, as along a chain."""
    found, before = [], 1
    for first, stop in tiles.levels:
        found.append(np.array_equal(tiles.exit_entry[first:stop], np.arange(before)))
        before = stop - first
    return found


def _on_device(tiles: TileClass, ends: Tensor) -> _Class:
    device = ends.device
    count, size = tiles.index.shape
    index = on_device(tiles.index, device)
    filled = torch.arange(size, device=device) < on_device(tiles.length, device)[:, None]
    seen = (index[:, None, :] <= index[:, :, None]) & (index[:, :, None] < ends[index][:, None, :])
    seen &= filled[:, None, :] & filled[:, :, None]
    tile, slot = on_device(tiles.exit_tile, device), on_device(tiles.exit_slot, device)
    return _Class(
        index=index.flatten(),
        shape=(count, size),
        hidden=~seen,
        entry=on_device(tiles.entry, device),
        exit_tile=tile,
        exit_slot=slot,
        exit_hidden=~seen[tile, slot],
        one_each=np.array_equal(tiles.exit_tile, np.arange(count)),
    )


class _Linear(NamedTuple):
    """The linear maps of one class, from the state that a tile starts from to its outputs and exit states."""

    out: Tensor  # [n, H, C, V]: R
    of_state: Tensor | None  # [n, H, C, K]: P; None if every tile starts from zero
    exit_out: Tensor | None  # [x, H, K, V]: B
    exit_of_state: Tensor | None  # [x, H, K, K]: A


def gated_delta(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, forest: DeltaTiles, state: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Run the rule along every path.

    Args:
        query, key: [N, J, K]; normalised here.
        value: [N, H, V].
        decay: [N, H], logarithms, at most 0.
        beta: [N, H], from 0 to 1 (to 2 with negative eigenvalues).
        state: [H, K, V] before the roots; None is zero.

    Returns:
        [N, H, V], and the states of the exported tokens [x, H, K, V] (None if there are none); both computed and
        returned in at least float32.
    """
    wide = torch.promote_types(torch.promote_types(query.dtype, decay.dtype), torch.float32)
    with torch.autocast(query.device.type, enabled=False):
        query, key, value, decay, beta = (x.to(wide) for x in (query, key, value, decay, beta))
        query, key = _unit(query) * query.shape[-1] ** -0.5, _unit(key)
        stateless = state is None and not forest.tiles.from_states
        made = [_tile(query, key, value, decay, beta, tiles, stateless=stateless) for tiles in forest.classes]
        states = None
        if len(forest.exit_order):
            before = value.new_zeros(value.shape[1], key.shape[2], value.shape[2]) if state is None else state.to(wide)
            states = _states(made, forest, before, stateless=stateless)
        elif state is not None:
            states = state.to(wide)[None]
        outs = []
        for tiles, linear in zip(forest.classes, made):
            out = linear.out
            if linear.of_state is not None and states is not None:
                entry = states.index_select(0, tiles.entry)
                out = _product_plus(out, linear.of_state, entry)
            outs.append(out.transpose(1, 2).flatten(0, 1))
        out = torch.cat(outs).index_select(0, forest.slot)
    exported = None
    if len(forest.exported):
        assert states is not None
        exported = states.index_select(0, forest.exported + 1)
    return out, exported


def _tile(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, tiles: _Class, *, stateless: bool
) -> _Linear:
    """The linear maps of the tiles of one class."""
    n, size = tiles.shape
    q, k, v = (x.index_select(0, tiles.index).view(n, size, *x.shape[1:]).transpose(1, 2) for x in (query, key, value))
    decay, beta = (x.index_select(0, tiles.index).view(n, size, -1) for x in (decay, beta))
    beta = beta.transpose(1, 2)[..., None]
    since = ((~tiles.hidden).to(decay.dtype) @ decay).transpose(1, 2)  # [n, H, C]: log decay from entry to each slot
    between = since[..., :, None] - since[..., None, :]
    between = between.masked_fill_(tiles.hidden[:, None], float("-inf")).exp()
    products = torch.cat([k, q], 2) @ k.transpose(-1, -2)
    own, seen = (_spread(x, between) for x in products.split(size, 2))
    since, so_far = since.exp()[..., None], since
    repeat = v.shape[1] // k.shape[1]
    if repeat > 1:
        q, k = q.repeat_interleave(repeat, 1), k.repeat_interleave(repeat, 1)
    known = v * beta if stateless else torch.cat([v * beta, k * (beta * since)], -1)
    # The columns are what each token stores, and what it removes of the entry state under its key.
    stored = torch.linalg.solve_triangular(own * beta, known, upper=False, unitriangular=True)
    read = seen @ stored
    if stateless:
        out, of_state = read, None
    else:
        out, taken = read.split([v.shape[-1], k.shape[-1]], -1)
        of_state = q * since - taken
    if not len(tiles.exit_slot):
        return _Linear(out, of_state, None, None)
    at, until = so_far, so_far[tiles.exit_tile, :, tiles.exit_slot]  # [n, H, C], [x, H]
    if not tiles.one_each:
        k, stored, at = (x.index_select(0, tiles.exit_tile) for x in (k, stored, at))
    left = (until[..., None] - at).masked_fill(tiles.exit_hidden[:, None], float("-inf")).exp()[..., None]
    at_exit = (k * left).transpose(-1, -2) @ stored
    if stateless:
        return _Linear(out, of_state, at_exit, None)
    exit_out, taken = at_exit.split([v.shape[-1], k.shape[-1]], -1)
    kept = until.exp()[..., None, None] * torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
    return _Linear(out, of_state, exit_out, kept - taken)


def _states(made: list[_Linear], forest: DeltaTiles, before: Tensor, *, stateless: bool) -> Tensor:
    """[1 + E, H, K, V]: the state before the roots, then those at the exits, by level."""
    exit_out = torch.cat([x.exit_out for x in made if x.exit_out is not None]).index_select(0, forest.exit_order)
    found = [before[None]]
    if stateless:
        return torch.cat([*found, exit_out])
    exit_of_state = torch.cat([x.exit_of_state for x in made if x.exit_of_state is not None])
    exit_of_state = exit_of_state.index_select(0, forest.exit_order)
    counts = [stop - first for first, stop in forest.tiles.levels]
    for number, (out, of_state, entry) in enumerate(
        zip(exit_out.split(counts), exit_of_state.split(counts), forest.exit_entry.split(counts))
    ):
        above = found[-1] if forest.straight[number] else found[-1].index_select(0, entry)
        found.append(_product_plus(out, of_state, above))
    return torch.cat(found)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + KEY_EPSILON)


def _spread(products: Tensor, between: Tensor) -> Tensor:
    """Products [n, J, C, C] of the key heads times decays [n, H, C, C] of the value heads -> [n, H, C, C]."""
    n, heads, size, _ = between.shape
    grouped = between.view(n, products.shape[1], -1, size, size)
    return (grouped * products[:, :, None]).view(n, heads, size, size)


def _product_plus(out: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """out + left @ right, over the first two dimensions."""
    flat = torch.baddbmm(out.flatten(0, 1), left.flatten(0, 1), right.flatten(0, 1))
    return flat.view(out.shape)

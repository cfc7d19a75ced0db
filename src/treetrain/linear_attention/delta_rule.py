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
level, one small product per level.

Shape letters: N tokens, J key heads, H value heads (a multiple of J), K and V sizes of keys and values; n tiles of C
slots, E exits, x exported tokens or exits of a class, P tiles of all classes.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from treetrain.device_arrays import on_device
from treetrain.tree.layout import PackedLayout
from treetrain.tree.token_tree import Int64s

TILE = 64
"""Maximum tokens in a tile: the chunk size of the stock implementations."""
TILE_SIDE = 128
"""Cost of a slot besides its pairs with the slots of its tile. The unit is one pair."""
CLASS_PAIRS = 12_000
"""Cost of one more tile class (a few dozen small calls), in the same unit."""


@dataclass(frozen=True, slots=True)
class TileClass:
    """Tiles padded to one size, on the device: n tiles of C slots, x exits. Padding repeats token 0."""

    index: Int64[Tensor, " slots"]  # the token in every slot
    shape: tuple[int, int]  # (n, C)
    hidden: Bool[Tensor, "n C C"]  # slot j is neither slot i nor an ancestor of it
    entry: Int64[Tensor, " n"]  # the state a tile starts from; 0 is the one before the roots, 1 + e that of exit e
    exit_tile: Int64[Tensor, " x"]  # the tile of every exit
    exit_slot: Int64[Tensor, " x"]  # its slot
    exit_hidden: Bool[Tensor, "x C"]  # the row of `hidden` at each exit
    one_each: bool  # every tile has one exit, in order


class DeltaTiles:
    """The tiles of a forest on a device, and its E exits, numbered by level. Shared by all layers of a run.

    Args:
        layout: N tokens, N > 0.
        exported: tokens whose state is exported.
    """

    def __init__(
        self, layout: PackedLayout, exported: Int64[np.ndarray, " x"], device: torch.device, *, tile: int = TILE
    ):
        tile_of = _tile_of(layout, tile)
        sizes = np.bincount(tile_of)
        order = np.argsort(tile_of, kind="stable")
        offset = np.cumsum(sizes) - sizes
        place = np.empty(layout.num_tokens, np.int64)  # index of a token within its tile
        place[order] = np.arange(layout.num_tokens) - np.repeat(offset, sizes)
        attach = layout.parent[order[offset]]  # the token that a tile continues
        level = levels_of(np.where(attach >= 0, tile_of[attach], -1))
        exits = np.unique(np.concatenate([attach[attach >= 0], exported]))
        exits = exits[np.argsort(level[tile_of[exits]], kind="stable")]
        number = np.full(layout.num_tokens, -1, np.int64)
        number[exits] = np.arange(len(exits))
        entry = np.where(attach >= 0, 1 + number[attach], 0)

        self.classes: list[TileClass] = []
        slot = np.empty(layout.num_tokens, np.int64)  # the slot of each token, counted over all classes
        ends, before = on_device(layout.ends, device), 0
        exit_order = [np.zeros(0, np.int64)]
        size_of = _padded_sizes(sizes)
        for size in np.unique(size_of).tolist():
            members = np.flatnonzero(size_of == size)
            within = np.full(len(sizes), -1, np.int64)
            within[members] = np.arange(len(members))
            tokens = np.flatnonzero(within[tile_of] >= 0)
            at = within[tile_of[tokens]] * size + place[tokens]
            index = np.zeros(len(members) * size, np.int64)
            index[at] = tokens
            slot[tokens] = before + at
            before += len(index)
            own = np.flatnonzero(within[tile_of[exits]] >= 0)
            exit_order.append(own)
            exit_tile, exit_slot = within[tile_of[exits[own]]], place[exits[own]]
            self.classes.append(
                _tile_class(index.reshape(-1, size), sizes[members], entry[members], exit_tile, exit_slot, ends)
            )
        self.counts = np.bincount(level[tile_of[exits]]).tolist()
        """Number of exits of every level that has exits; the tiles of the next level start from these."""
        first = np.cumsum([0, 0, *self.counts])[level[tile_of[exits]]]  # first exit of the level before
        entry = entry[tile_of[exits]]
        exit_entry = np.where(entry > 0, entry - 1 - first, 0)
        self.straight = _straight(exit_entry, self.counts)
        self.slot = on_device(slot, device)
        self.exit_order = on_device(np.argsort(np.concatenate(exit_order), kind="stable"), device)
        """int64 [E]: index of each exit among the concatenated exits of all classes."""
        self.exit_entry = on_device(exit_entry, device)
        """int64 [E]: index in the level before of the exit that each exit's tile starts from (0 in the first level)."""
        self.exported = on_device(number[exported], device)
        """int64 [x]: the number of the exit at every exported token."""


def _tile_class(
    index: Int64[np.ndarray, "n C"],
    length: Int64[np.ndarray, " n"],
    entry: Int64[np.ndarray, " n"],
    exit_tile: Int64[np.ndarray, " x"],
    exit_slot: Int64[np.ndarray, " x"],
    ends: Int64[Tensor, " N"],
) -> TileClass:
    """Build a class from the token in every slot, the filled slots of each tile, the layout's ends, and its fields."""
    device, (count, size) = ends.device, index.shape
    tokens, tile, slot = on_device(index, device), on_device(exit_tile, device), on_device(exit_slot, device)
    filled = torch.arange(size, device=device) < on_device(length, device)[:, None]
    seen = (tokens[:, None, :] <= tokens[:, :, None]) & (tokens[:, :, None] < ends[tokens][:, None, :])
    seen &= filled[:, None, :] & filled[:, :, None]
    return TileClass(
        index=tokens.flatten(),
        shape=(count, size),
        hidden=~seen,
        entry=on_device(entry, device),
        exit_tile=tile,
        exit_slot=slot,
        exit_hidden=~seen[tile, slot],
        one_each=np.array_equal(exit_tile, np.arange(count)),
    )


def _straight(exit_entry: Int64s, counts: list[int]) -> list[bool]:
    """Say of each level whether exit i starts from exit i of the level before, for all i, as along a chain."""
    own = np.split(exit_entry, np.cumsum(counts)[:-1])
    return [np.array_equal(entries, np.arange(above)) for entries, above in zip(own, [1, *counts])]


def _tile_of(layout: PackedLayout, tile: int) -> Int64s:
    """int64 [N]: the tile of every token. Tiles are numbered in the order of their first tokens.

    Tiles are cut from the leaves up, so that all but the topmost are nearly full. A subtree of at most `tile` tokens is
    never cut. Siblings are packed into few tiles; the last of these also takes tokens above the siblings.
    """
    above, starts = layout.segment_parent, layout.segment_start[:-1]
    length, size = np.diff(layout.segment_start), layout.ends[starts] - starts
    inner = np.clip(size - tile, 0, length)  # leading tokens whose subtree exceeds `tile` tokens
    is_inner = np.append(inner == length, True)  # -1, the segment above the roots, reads the appended entry
    whole = np.flatnonzero((inner == 0) & is_inner[above])
    cut = np.flatnonzero((inner > 0) & (inner < length))
    first = np.concatenate([starts[whole], (starts + inner)[cut]])
    owner = np.concatenate([above[whole], cut])
    # A piece: its number of tokens, and the starts of its runs of consecutive tokens. A run ends where the next starts.
    below: dict[int, list[tuple[int, list[int]]]] = defaultdict(list)
    for segment, start, tokens in zip(owner.tolist(), first.tolist(), (layout.ends[first] - first).tolist()):
        below[segment].append((tokens, [start]))
    tiles: list[list[int]] = []
    segments = np.flatnonzero(inner)[::-1]
    for segment, start, count, parent in zip(
        *(x.tolist() for x in (segments, starts[segments], inner[segments], above[segments]))
    ):
        tokens, runs = _packed(below.pop(segment, []), tile, tiles)
        stop = start + count
        while tokens + stop - start > tile:
            if tokens < tile:
                stop -= tile - tokens
                runs.append(stop)
            tiles.append(runs)
            tokens, runs = 0, []
        below[parent].append((tokens + stop - start, [*runs, start]))
    tiles.append(_packed(below[-1], tile, tiles)[1])
    tiles.sort(key=min)
    run_starts = np.array([start for runs in tiles for start in runs], np.int64)
    tile_of_run = np.repeat(np.arange(len(tiles)), [len(runs) for runs in tiles])
    order = np.argsort(run_starts)
    return np.repeat(tile_of_run[order], np.diff(run_starts[order], append=layout.num_tokens))


def _packed(pieces: list[tuple[int, list[int]]], tile: int, tiles: list[list[int]]) -> tuple[int, list[int]]:
    """Pack siblings into tiles, the largest first; append all but the last tile to `tiles`, and return the last."""
    tokens, runs = 0, []
    for more, starts in sorted(pieces, key=lambda piece: -piece[0]):
        if tokens + more > tile:
            tiles.append(runs)
            tokens, runs = 0, []
        tokens, runs = tokens + more, runs + starts
    return tokens, runs


def levels_of(parent: Int64[np.ndarray, " P"]) -> Int64[np.ndarray, " P"]:
    """The number of ancestors of each item; `parent` is the index of an earlier item, or -1."""
    level = [0] * len(parent)
    for part, above in enumerate(parent.tolist()):
        if above >= 0:
            level[part] = level[above] + 1
    return np.array(level, np.int64)


def _padded_sizes(sizes: Int64[np.ndarray, " P"]) -> Int64[np.ndarray, " P"]:
    """Choose the padded size of each tile: few different sizes, at the least predicted cost."""
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


class _Linear(NamedTuple):
    """Maps the state that a tile starts from to its outputs and exit states, for all tiles of one class."""

    out: Float[Tensor, "n H C V"]  # R
    of_state: Float[Tensor, "n H C K"]  # P
    exit_out: Float[Tensor, "x H K V"] | None  # B
    exit_of_state: Float[Tensor, "x H K K"] | None  # A


def gated_delta(
    query: Float[Tensor, "N J K"],
    key: Float[Tensor, "N J K"],
    value: Float[Tensor, "N H V"],
    decay: Float[Tensor, "N H"],
    beta: Float[Tensor, "N H"],
    forest: DeltaTiles,
    state: Float[Tensor, "H K V"] | None,
) -> tuple[Float[Tensor, "N H V"], Float[Tensor, "x H K V"] | None]:
    """Run the rule along every path.

    Args:
        query, key: normalised here.
        decay: logarithms, at most 0.
        beta: from 0 to 1 (to 2 with negative eigenvalues).
        state: before the roots; None is zero.

    Returns:
        The output and the states of the exported tokens (None if there are none), in at least float32.
    """
    wide = torch.promote_types(torch.promote_types(query.dtype, decay.dtype), torch.float32)
    with torch.autocast(query.device.type, enabled=False):
        query, key, value, decay, beta = (x.to(wide) for x in (query, key, value, decay, beta))
        query, key = _unit(query) * query.shape[-1] ** -0.5, _unit(key)
        made = [_tile(query, key, value, decay, beta, tiles) for tiles in forest.classes]
        before = value.new_zeros(value.shape[1], key.shape[2], value.shape[2]) if state is None else state.to(wide)
        states = _states(made, forest, before)
        outs = []
        for tiles, linear in zip(forest.classes, made):
            out = _product_plus(linear.out, linear.of_state, states.index_select(0, tiles.entry))
            outs.append(out.transpose(1, 2).flatten(0, 1))
        out = torch.cat(outs).index_select(0, forest.slot)
    return out, states.index_select(0, forest.exported + 1) if len(forest.exported) else None


def _tile(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, tiles: TileClass) -> _Linear:
    """Compute the linear maps of the tiles of one class."""
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
    # The WY form (see the top of this file). Along a path with states S, token i adds k_i u_i^T to the state, where
    #     u_i = beta_i (v_i - S_i^T k_i),    S_i = since_i S_entry + sum over j above i of between_ij k_j u_j^T
    # with S_i the decayed state that it reads. Put into one another, all u of a tile solve one triangular system:
    #     u_i + beta_i sum_j between_ij (k_i . k_j) u_j = beta_i v_i - beta_i since_i S_entry^T k_i
    # Its matrix does not depend on S_entry, so it is solved once for both terms on the right: U = stored_v - W S_entry.
    # The triangular solve reads only what is below the diagonal; tokens on other branches have between = 0.
    known = torch.cat([v * beta, k * (beta * since)], -1)
    stored = torch.linalg.solve_triangular(own * beta, known, upper=False, unitriangular=True)
    # A query sees its own token too: o_i = since_i S_entry^T q_i + sum over j up to i of between_ij (q_i . k_j) u_j.
    out, taken = (seen @ stored).split([v.shape[-1], k.shape[-1]], -1)
    of_state = q * since - taken
    if not len(tiles.exit_slot):
        return _Linear(out, of_state, None, None)
    at, until = so_far, so_far[tiles.exit_tile, :, tiles.exit_slot]  # [n, H, C], [x, H]
    if not tiles.one_each:
        k, stored, at = (x.index_select(0, tiles.exit_tile) for x in (k, stored, at))
    # An exit state: S_exit = until S_entry + sum over j up to the exit of (decay from j to the exit) k_j u_j^T.
    left = (until[..., None] - at).masked_fill(tiles.exit_hidden[:, None], float("-inf")).exp()[..., None]
    exit_out, taken = ((k * left).transpose(-1, -2) @ stored).split([v.shape[-1], k.shape[-1]], -1)
    kept = until.exp()[..., None, None] * torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
    return _Linear(out, of_state, exit_out, kept - taken)


def _states(made: list[_Linear], forest: DeltaTiles, before: Float[Tensor, "H K V"]) -> Float[Tensor, "_ H K V"]:
    """Compute the states at the exits, level by level; the state before the roots stands first."""
    found = [before[None]]
    if not len(forest.exit_order):
        return found[0]
    exit_out = torch.cat([x.exit_out for x in made if x.exit_out is not None]).index_select(0, forest.exit_order)
    exit_of_state = torch.cat([x.exit_of_state for x in made if x.exit_of_state is not None])
    exit_of_state = exit_of_state.index_select(0, forest.exit_order)
    for number, (out, of_state, entry) in enumerate(
        zip(*(x.split(forest.counts) for x in (exit_out, exit_of_state, forest.exit_entry)))
    ):
        above = found[-1] if forest.straight[number] else found[-1].index_select(0, entry)
        found.append(_product_plus(out, of_state, above))
    return torch.cat(found)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + KEY_EPSILON)


def _spread(products: Float[Tensor, "n J C C"], between: Float[Tensor, "n H C C"]) -> Float[Tensor, "n H C C"]:
    """Multiply the products of the key heads by the decays of the value heads."""
    n, heads, size, _ = between.shape
    grouped = between.view(n, products.shape[1], -1, size, size)
    return (grouped * products[:, :, None]).view(n, heads, size, size)


def _product_plus(out: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return out + left @ right, over the first two dimensions."""
    flat = torch.baddbmm(out.flatten(0, 1), left.flatten(0, 1), right.flatten(0, 1))
    return flat.view(out.shape)

"""Tiles of a forest, on which the chunked forms of linear recurrences run.

A recurrence whose state changes linearly has a chunked form: within a chunk every token reads the tokens before it
directly, and only one state per chunk is handed on. This works on forests, not only on chains: a triangular mask of
ancestors replaces the causal mask. So a *tile* is a small connected piece of the tree (or sibling pieces that continue
one token), and forks inside it cost nothing. States are computed only at *exits*: tokens where other tiles attach, or
whose state is exported. Tiles of one depth in the tree of tiles form a *level*: what reads no state is computed for all
tiles at once, and states go from level to level.

Shape letters: N tokens, x of them exported, H heads, E exits, P tiles; of one class of tiles: n tiles of C slots, e
exits.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable

from treetrain.core.device_arrays import on_device
from treetrain.core.tree.layout import PackedLayout
from treetrain.core.tree.token_tree import Int64s

TILE = 64
"""Maximum tokens in a tile: the chunk size of the stock implementations."""
TILE_SIDE = 128
"""Cost of a slot besides its pairs with the slots of its tile. The unit is one pair."""
CLASS_PAIRS = 12_000
"""Cost of one more tile class (a few dozen small calls), in the same unit."""


@dataclass(frozen=True, slots=True)
class TileClass:
    """Tiles padded to one size, on the device: n tiles of C slots, e exits. Padding repeats token 0."""

    index: Int64[Tensor, " slots"]  # the token in every slot
    shape: tuple[int, int]  # (n, C)
    hidden: Bool[Tensor, "n C C"]  # slot j is neither slot i nor an ancestor of it
    entry: Int64[Tensor, " n"]  # the state a tile starts from; 0 is the one before the roots, 1 + e that of exit e
    exit_tile: Int64[Tensor, " e"]  # the tile of every exit
    exit_slot: Int64[Tensor, " e"]  # its slot
    exit_hidden: Bool[Tensor, "e C"]  # the row of `hidden` at each exit
    one_each: bool  # every tile has one exit, in order


class Tiles:
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

    def states_at_exits(
        self,
        before: Float[Tensor, "..."],
        maps: Sequence[tuple[Tensor | None, Tensor | None]],
        advance: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> Float[Tensor, "..."]:
        """Compute the states at the exits, level by level; the state before the roots stands first.

        Args:
            before: the state before the roots; the result has a dimension of exits before its own.
            maps: for each class, what its exits add to a state and how they carry one on; None without exits.
            advance: (added, carried, states that the tiles start from) -> states at the exits.
        """
        found = [before[None]]
        if not len(self.exit_order):
            return found[0]
        added, carried = (
            torch.cat([x for x in of_classes if x is not None]).index_select(0, self.exit_order)
            for of_classes in zip(*maps)
        )
        levels = zip(*(x.split(self.counts) for x in (added, carried, self.exit_entry)), self.straight)
        for add, carry, entry, straight in levels:
            found.append(advance(add, carry, found[-1] if straight else found[-1].index_select(0, entry)))
        return torch.cat(found)


def _tile_class(
    index: Int64[np.ndarray, "n C"],
    length: Int64[np.ndarray, " n"],
    entry: Int64[np.ndarray, " n"],
    exit_tile: Int64[np.ndarray, " e"],
    exit_slot: Int64[np.ndarray, " e"],
    ends: Int64[Tensor, " N"],
) -> TileClass:
    """Build a class.

    Args:
        index: the token in every slot.
        length: the number of filled slots of each tile.
        entry, exit_tile, exit_slot: as in `TileClass`.
        ends: those of the layout.
    """
    device, (count, size) = ends.device, index.shape
    tokens = on_device(index, device)
    tile = on_device(exit_tile, device)
    slot = on_device(exit_slot, device)
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
    for item, above in enumerate(parent.tolist()):
        if above >= 0:
            level[item] = level[above] + 1
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


# ---- what the rules share


def decays(decay: Float[Tensor, "N H"], tiles: TileClass) -> tuple[Float[Tensor, "n H C"], Float[Tensor, "n H C C"]]:
    """Decays within the tiles of a class.

    Strong decays add up to large logarithms, of whose differences float32 would leave few digits: sums are in float64.

    Args:
        decay: logarithms, at most 0.

    Returns:
        the logarithm of the decay from the state that a tile starts from to each slot, in float64; and the decay from
        slot j to slot i, 0 where i does not see j, in the dtype of `decay`.
    """
    n, size = tiles.shape
    logs = decay.index_select(0, tiles.index).view(n, size, -1).double()
    since = ((~tiles.hidden).double() @ logs).transpose(1, 2)
    return since, _Between.apply(since, tiles.hidden, decay)  # type: ignore[return-value]


class _Between(torch.autograd.Function):
    """Takes the exponential of differences, and differentiates without large terms that cancel."""

    @staticmethod
    def forward(ctx, since: Tensor, hidden: Tensor, like: Tensor):
        logs = (since[..., :, None] - since[..., None, :]).type_as(like)
        between = logs.masked_fill_(hidden[:, None], float("-inf")).exp_()
        ctx.save_for_backward(between)
        return between

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        (between,) = ctx.saved_tensors
        of_logs = grad * between
        of_logs.diagonal(dim1=-2, dim2=-1).zero_()  # a slot's own decay is 1; where decays are strong it is the largest
        return (of_logs.sum(-1) - of_logs.sum(-2)).double(), None, None


def spread(products: Float[Tensor, "n J C C"], between: Float[Tensor, "n H C C"]) -> Float[Tensor, "n H C C"]:
    """Multiply the products of the key heads by the decays of the value heads."""
    n, heads, size, _ = between.shape
    grouped = between.view(n, products.shape[1], -1, size, size)
    return (grouped * products[:, :, None]).view(n, heads, size, size)

"""The gated delta rule over a forest, tile by tile.

Along a path the state S [K, V] of a head decays, forgets what it holds under a key, and stores a value under it:
    S <- exp(g) S;   S <- S + k (beta (v - k^T S))^T;   out = scale q^T S
(Gated Delta Networks, https://arxiv.org/abs/2412.06464). Within a tile the rule is one unit-triangular system whose
matrix is masked to ancestors, and the tile as a whole is linear in the state S that it starts from:
    out = P S + R,   S at an exit = A S + B.
So all of P, R, A, B are made for all tiles at once, and only S <- A S + B runs level by level: one small product.

Shape letters: N tokens, J key heads, H value heads (a multiple of J), K and V sizes of keys and values; n tiles of C
slots, E exits.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from treetrain.device_arrays import on_device
from treetrain.linear_attention.tiles import TileClass, Tiles

KEY_EPSILON = 1e-6
"""Added to the squared length of queries and keys before they are scaled to length one, as the stock rules do."""


@dataclass(frozen=True, slots=True)
class _Class:
    """A tile class on the device."""

    index: Tensor  # int64 [n * C]
    shape: tuple[int, int]  # (n, C)
    hidden: Tensor  # bool [n, C, C]: slot j is not slot i or before it on its path
    entry: Tensor  # int64 [n]
    exit_tile: Tensor  # int64 [x]
    exit_slot: Tensor  # int64 [x]
    exit_hidden: Tensor  # bool [x, C]: the row of `hidden` at each exit
    one_each: bool  # every tile has one exit, in order


class DeltaTiles:
    """The tiles of a forest on a device, for every layer of a run.

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
    """Of every level, whether its exits follow those of the level before one for one, as along a chain."""
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
    """What tiles of one class make of the state that they start from."""

    out: Tensor  # [n, H, C, V]: R
    of_state: Tensor | None  # [n, H, C, K]: P; None where no state comes in
    exit_out: Tensor | None  # [x, H, K, V]: B
    exit_of_state: Tensor | None  # [x, H, K, K]: A


def gated_delta(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, forest: DeltaTiles, state: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Run the rule along every path.

    Args:
        query, key: [N, J, K], scaled to length one here.
        value: [N, H, V].
        decay: [N, H], logarithms, at most 0.
        beta: [N, H], from 0 to 1 (2 with negative eigenvalues).
        state: [H, K, V] before the roots; None is zero.

    Returns:
        [N, H, V] in the dtype of `query` and the states of the exported tokens [x, H, K, V] (None if there are none),
        both computed in at least float32, the states returned in it.
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
    """Everything within the tiles of one class."""
    n, size = tiles.shape
    q, k, v = (x.index_select(0, tiles.index).view(n, size, *x.shape[1:]).transpose(1, 2) for x in (query, key, value))
    decay, beta = (x.index_select(0, tiles.index).view(n, size, -1) for x in (decay, beta))
    beta = beta.transpose(1, 2)[..., None]
    since = ((~tiles.hidden).to(decay.dtype) @ decay).transpose(1, 2)  # [n, H, C]: from the state before to each slot
    between = since[..., :, None] - since[..., None, :]
    between = between.masked_fill_(tiles.hidden[:, None], float("-inf")).exp()
    products = torch.cat([k, q], 2) @ k.transpose(-1, -2)
    own, seen = (_spread(x, between) for x in products.split(size, 2))
    since, so_far = since.exp()[..., None], since
    repeat = v.shape[1] // k.shape[1]
    if repeat > 1:
        q, k = q.repeat_interleave(repeat, 1), k.repeat_interleave(repeat, 1)
    known = v * beta if stateless else torch.cat([v * beta, k * (beta * since)], -1)
    # Column by column: what each token stores, and how much of the state before it takes back from under its key.
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
    """[1 + E, H, K, V]: the state before the roots and at every exit, in the order of the levels."""
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
    """[n, J, C, C] products of the key heads times [n, H, C, C] decays of the value heads -> [n, H, C, C]."""
    n, heads, size, _ = between.shape
    grouped = between.view(n, products.shape[1], -1, size, size)
    return (grouped * products[:, :, None]).view(n, heads, size, size)


def _product_plus(out: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """out + left @ right, over the first two dimensions."""
    flat = torch.baddbmm(out.flatten(0, 1), left.flatten(0, 1), right.flatten(0, 1))
    return flat.view(out.shape)

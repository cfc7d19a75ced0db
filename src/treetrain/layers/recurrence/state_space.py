"""The state-space dual form of Mamba-2 over a forest, tile by tile.

Along a path the state S [K, V] of a head decays and takes in a new value under a key:
    S <- exp(g) S + k v^T;   out = q^T S
(Transformers are SSMs, https://arxiv.org/abs/2405.21060, where q, k and v are called C, B and the discretised x). This
is the gated delta rule without its erasure (`delta_rule.py`), so nothing has to be solved, and a state passes through a
tile (`tiles.py`) by a decay alone. Heads of a group share queries and keys. With the decay from the state S that a tile
starts from to slot i, and from slot j to slot i:
    out_i = decay_i q_i^T S + sum over j up to i of decay_ij (q_i . k_j) v_j
    S at an exit e = decay_e S + sum over j up to e of decay_ej k_j v_j^T.
The sums are computed for all tiles at once; only the states go from level to level.

Shape letters: N tokens, J groups (heads of queries and keys), H heads (a multiple of J), G = H / J heads of a group, K
and V sizes of keys and values; E exits, x exported tokens; of one class of tiles: n tiles of C
slots, e exits.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from treetrain.layers.recurrence.tiles import TileClass, Tiles, decays, spread


class _Tile(NamedTuple):
    """Holds the sums of the tiles of one class, which do not depend on the states that the tiles start from."""

    out: Float[Tensor, "n H C V"]
    query: Float[Tensor, "n J C K"]
    reach: Float[Tensor, "n H C"]
    """The decay from the state that a tile starts from to each slot."""
    exit_out: Float[Tensor, "e J K G V"] | None
    exit_decay: Float[Tensor, "e J 1 G 1"] | None


def state_space(
    query: Float[Tensor, "N J K"],
    key: Float[Tensor, "N J K"],
    value: Float[Tensor, "N H V"],
    decay: Float[Tensor, "N H"],
    forest: Tiles,
    state: Float[Tensor, "H K V"] | None,
) -> tuple[Float[Tensor, "N H V"], Float[Tensor, "x H K V"] | None]:
    """Run the dual form along every path.

    Args:
        value: the inputs times their steps.
        decay: logarithms, at most 0.
        state: before the roots; None is zero.

    Returns:
        The output and the states of the exported tokens (None if there are none), in at least float32.
    """
    wide = torch.promote_types(torch.promote_types(value.dtype, decay.dtype), torch.float32)
    groups, per_group = query.shape[1], value.shape[1] // query.shape[1]
    with torch.autocast(query.device.type, enabled=False):
        query, key, value, decay = (x.to(wide) for x in (query, key, value, decay))
        made = [_tile(query, key, value, decay, tiles) for tiles in forest.classes]
        # A state is [J, K, G, V] here, so that the heads of a group are columns of one matrix.
        if state is None:
            before = value.new_zeros(groups, key.shape[2], per_group, value.shape[2])
        else:
            before = state.to(wide).unflatten(0, (groups, per_group)).transpose(1, 2)
        maps = [(x.exit_out, x.exit_decay) for x in made]
        states = forest.states_at_exits(before, maps, lambda out, decay, state: torch.addcmul(out, state, decay))
        outs = []
        for tiles, tile in zip(forest.classes, made):
            read = tile.query @ states.index_select(0, tiles.entry).flatten(3)
            read = read.unflatten(3, (per_group, -1)).permute(0, 2, 1, 3, 4).flatten(2, 3)  # [n, C, H, V]
            out = torch.addcmul(tile.out.transpose(1, 2), read, tile.reach.transpose(1, 2)[..., None])
            outs.append(out.flatten(0, 1))
        out = torch.cat(outs).index_select(0, forest.slot)
        if not len(forest.exported):
            return out, None
        return out, states.index_select(0, forest.exported + 1).transpose(2, 3).flatten(1, 2)


def _tile(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, tiles: TileClass) -> _Tile:
    """Compute the sums of the tiles of one class."""
    n, size = tiles.shape
    q, k, v = (x.index_select(0, tiles.index).view(n, size, *x.shape[1:]).transpose(1, 2) for x in (query, key, value))
    since, between = decays(decay, tiles)
    out, reach = spread(q @ k.transpose(-1, -2), between) @ v, since.exp().type_as(v)
    if not len(tiles.exit_slot):
        return _Tile(out, q, reach, None, None)
    at, until = since, since[tiles.exit_tile, :, tiles.exit_slot]  # [n, H, C], [e, H]
    if not tiles.one_each:
        k, v, at = (x.index_select(0, tiles.exit_tile) for x in (k, v, at))
    to_exit = (until[..., None] - at).masked_fill(tiles.exit_hidden[:, None], float("-inf")).exp()[..., None]
    # Heads of a group become columns: [e, H, C, V] -> [e, J, C, G * V].
    columns = (v * to_exit.type_as(v)).unflatten(1, (k.shape[1], -1)).transpose(2, 3)
    exit_out = (k.transpose(-1, -2) @ columns.flatten(3)).unflatten(3, columns.shape[3:])
    return _Tile(out, q, reach, exit_out, until.exp().type_as(v).view(len(until), k.shape[1], 1, -1, 1))

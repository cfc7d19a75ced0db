"""The gated delta rule over a forest, tile by tile.

Along a path the state S [K, V] of a head decays, removes the value stored under a key, and stores a new one:
    S <- exp(g) S;   S <- S + k (beta (v - k^T S))^T;   out = scale q^T S
(Gated Delta Networks, https://arxiv.org/abs/2412.06464). Within a tile (`tiles.py`) the rule is one unit-triangular
system whose matrix is masked to ancestors. The tile is linear in the state S that it starts from:
    out = P S + R,   S at an exit = A S + B.
P, R, A and B are computed for all tiles at once. Only S <- A S + B runs level by level, one small product per level.

Shape letters: N tokens, J key heads, H value heads (a multiple of J), K and V sizes of keys and values; E exits, x
exported tokens; of one class of tiles: n tiles of C slots, e exits.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from treetrain.layers.recurrence.tiles import TileClass, Tiles, decays, spread

KEY_EPSILON = 1e-6
"""Added to the squared norm of queries and keys before they are normalised, as in the stock implementations."""


class _Linear(NamedTuple):
    """Maps the state that a tile starts from to its outputs and exit states, for all tiles of one class."""

    out: Float[Tensor, "n H C V"]  # R
    of_state: Float[Tensor, "n H C K"]  # P
    exit_out: Float[Tensor, "e H K V"] | None  # B
    exit_of_state: Float[Tensor, "e H K K"] | None  # A


def gated_delta(
    query: Float[Tensor, "N J K"],
    key: Float[Tensor, "N J K"],
    value: Float[Tensor, "N H V"],
    decay: Float[Tensor, "N H"],
    beta: Float[Tensor, "N H"],
    forest: Tiles,
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
        maps = [(x.exit_out, x.exit_of_state) for x in made]
        states = forest.states_at_exits(before, maps, _product_plus)
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
    beta = beta.index_select(0, tiles.index).view(n, size, -1).transpose(1, 2)[..., None]
    since, between = decays(decay, tiles)
    products = torch.cat([k, q], 2) @ k.transpose(-1, -2)
    own, seen = (spread(x, between) for x in products.split(size, 2))
    since, so_far = since.exp().type_as(v)[..., None], since
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
    left = (until[..., None] - at).masked_fill(tiles.exit_hidden[:, None], float("-inf")).exp().type_as(v)[..., None]
    exit_out, taken = ((k * left).transpose(-1, -2) @ stored).split([v.shape[-1], k.shape[-1]], -1)
    kept = until.exp().type_as(v)[..., None, None] * torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
    return _Linear(out, of_state, exit_out, kept - taken)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + KEY_EPSILON)


def _product_plus(out: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return out + left @ right, over the first two dimensions."""
    flat = torch.baddbmm(out.flatten(0, 1), left.flatten(0, 1), right.flatten(0, 1))
    return flat.view(out.shape)

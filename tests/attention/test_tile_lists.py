"""The lists of tiles that meet, made on the host for the GPU kernels, against the dense mask."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.plans import attention_forest, nested_forks, star
from treetrain.check.forests import bushy_rows, forests, runs
from treetrain.core.attention.reference import visible
from treetrain.core.device_arrays import to_device
from treetrain.core.tree.layout import FULL, AttentionRange
from treetrain.kernels.tile_lists import Keys, Lists, TileLists, keys_of, make_tile_lists

RANGES = st.one_of(
    st.just(FULL),
    st.builds(AttentionRange, window=st.integers(1, 40)),
    st.builds(AttentionRange, chunk=st.integers(1, 40)),
)


def pairs(lists: TileLists) -> tuple[int, int]:
    """All pairs of tiles, and those in which every query sees every key."""
    begin, middle, _ = lists.by_query.bounds.T.astype(int)
    return len(lists.by_query.tiles), int((middle - begin).sum())


def truth(forest, path: int, visible_range: AttentionRange, kept: int) -> np.ndarray:
    """bool [N, kept + N]: which of the last `kept` tokens of the path, and of its own, each token sees."""
    n, depth = len(forest.ends), forest.depth + path
    ends = torch.from_numpy(np.concatenate([np.full(path, path + n), forest.ends + path]))
    depths = torch.from_numpy(np.concatenate([np.arange(path), depth]))
    seen = visible(ends, depths, visible_range.window, visible_range.chunk)[path:].numpy()
    assert not seen[:, : path - kept].any(), "a token of the path that is seen was dropped"
    return seen[:, path - kept :]


def by_rule(keys: Keys) -> np.ndarray:
    """The same from what a kernel is given."""
    query, key = np.arange(keys.path, len(keys.ends))[:, None], np.arange(len(keys.ends))[None]
    seen = (key <= query) & (query < keys.ends[None])
    if keys.depth is not None and keys.lowest is not None:
        seen &= keys.depth[None] >= keys.lowest[:, None]
    return seen


def tiles_of(grid: np.ndarray, tile: int) -> np.ndarray:
    """bool [n, m] -> [A, B, tile, tile]; cells beyond the grid are None's stand-in, taken from `grid`'s padding."""
    rows, columns = (-(-size // tile) * tile for size in grid.shape)
    padded = np.zeros((rows, columns), grid.dtype)
    padded[: grid.shape[0], : grid.shape[1]] = grid
    return padded.reshape(rows // tile, tile, columns // tile, tile).swapaxes(1, 2)


def listed(lists: Lists, others: int) -> tuple[np.ndarray, np.ndarray]:
    """(met in full, met in part), bool [T, others]."""
    full, part = np.zeros((2, len(lists.bounds), others), bool)
    for own, (begin, middle, stop) in enumerate(lists.bounds.tolist()):
        for grid, first, last in ((full, begin, middle), (part, middle, stop)):
            met = lists.tiles[first:last]
            assert (np.diff(met) > 0).all(), "tiles in the order in which they lie"
            grid[own, met] = True
    assert sorted(lists.order.tolist()) == list(range(len(lists.bounds)))
    count = lists.bounds[:, 2] - lists.bounds[:, 0]
    assert (np.diff(count[lists.order]) <= 0).all(), "the longest lists first"
    return full, part


def check(forest, path: int, visible_range: AttentionRange, tile: int) -> None:
    keys = keys_of(forest.ends, forest.depth + path, path, visible_range)
    visits = make_tile_lists(keys, tile)
    seen = truth(forest, path, visible_range, keys.path)
    assert (by_rule(keys) == seen).all()
    grid, real = tiles_of(seen, tile), tiles_of(np.ones_like(seen), tile)
    some = grid.any((2, 3))
    full, part = listed(visits.by_query, grid.shape[1])
    assert not (full & part).any()
    assert (some <= (full | part)).all(), "a tile that is seen is missing"
    every = (grid == real).all((2, 3))
    assert (full <= every).all(), "a tile is said to be seen in full and is not"
    # Tiles visited without masks hold no rows beyond the last key: kernels read them without looking.
    assert not full[:, (np.arange(grid.shape[1]) + 1) * tile > len(keys.ends)].any()
    if visible_range == FULL:
        assert ((full | part) == some).all(), "a tile that nobody sees is visited"
        before = (np.arange(grid.shape[1])[None] + 1) * tile <= np.arange(grid.shape[0])[:, None] * tile + path
        assert (full == (every & before)).all()
    for mine, other in zip((full, part), listed(visits.by_key, grid.shape[0])):
        assert (mine == other.T).all(), "both sides list the same pairs"
    assert pairs(visits) == ((full | part).sum(), full.sum())


@pytest.mark.slow
@runs(150)
@given(forests(max_rows=12, max_length=30), RANGES, st.sampled_from([1, 2, 4, 16]), st.integers(0, 40))
def test_every_visible_pair_of_tiles_is_listed_and_no_pair_is_without_mask_that_needs_one(
    rows, visible_range, tile, path
):
    forest = attention_forest(rows)
    if len(forest.ends):
        check(forest, path, visible_range, tile)


@pytest.mark.parametrize("path", [0, 1, 127, 128, 129, 300])
@pytest.mark.parametrize("trunk", [1, 127, 128, 129])
def test_tiles_of_the_size_that_kernels_use(trunk, path):
    rng = np.random.default_rng(trunk)
    rows = [[*(list(range(37)) * 9)[:trunk], i, *rng.integers(0, 37, 150).tolist()] for i in range(3)]
    for visible_range in (FULL, AttentionRange(window=100), AttentionRange(chunk=130)):
        check(attention_forest(rows), path, visible_range, 128)


@pytest.mark.slow
def test_lists_grow_with_what_is_visible_and_not_with_the_square_of_the_tokens():
    leaves = star(4000, 128)  # half a million tokens, every one of which sees 129 at most
    visits = make_tile_lists(keys_of(leaves.ends, leaves.positions))
    tiles = -(-leaves.num_tokens // 128)
    assert tiles == 4001 and len(visits.by_query.tiles) <= 3 * tiles
    window = make_tile_lists(keys_of(np.full(128_000, 128_000), np.arange(128_000), 0, AttentionRange(window=512)))
    assert len(window.by_query.tiles) <= 6 * 1000
    nested = nested_forks(100_000)
    assert make_tile_lists(keys_of(nested.ends, nested.positions)).by_query.tiles.size <= (200_000 // 128 + 1) ** 2


def test_rows_without_common_tokens_visit_as_many_tiles_as_causal_attention():
    rows = attention_forest(bushy_rows(np.random.default_rng(0), rows=1, segment=640, levels=2))
    tiles = -(-len(rows.ends) // 128)
    visits = make_tile_lists(keys_of(rows.ends, rows.depth))
    assert pairs(visits) == (tiles * (tiles + 1) // 2, tiles * (tiles - 1) // 2)


def test_a_long_path_out_of_sight_is_no_key():
    forest = attention_forest([[1, 2, 3]])
    assert keys_of(forest.ends, forest.depth + 1000, 1000, AttentionRange(window=10)).path == 9
    assert keys_of(forest.ends, forest.depth + 1000, 1000, AttentionRange(window=2000)).path == 1000
    assert keys_of(forest.ends, forest.depth + 1000, 1000).path == 1000


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_arrays_arrive_in_their_shapes_and_equally_aligned(device):
    arrays = [np.arange(5, dtype=np.int32), np.zeros((0, 3), np.int32), np.arange(6, dtype=np.int32).reshape(2, 3)]
    sent = to_device(arrays, torch.device(device))
    assert [tuple(t.shape) for t in sent] == [a.shape for a in arrays]
    if device == "cpu":
        assert all((a == b.numpy()).all() for a, b in zip(arrays, sent))
    else:
        assert [t.storage_offset() for t in sent] == [0, 16, 16], "parts of one tensor"

"""The schedule covers every visible pair exactly once, whatever it decides."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedules import calls, check, first_pass, forest_from_parents, pairs_computed

from support.plans import attention_forest
from treetrain.check.forests import bushy_rows, forests, runs
from treetrain.core.attention import schedule as schedule_module
from treetrain.core.attention.schedule import Forest, make_schedule
from treetrain.core.tree.token_tree import segments

CALL_PAIRS = (0.0, 1.0, 64.0, 2e3, 1e5, 1e9)


@runs(60)
@given(forests(max_rows=12, max_length=30), st.sampled_from(CALL_PAIRS))
def test_every_visible_pair_is_in_exactly_one_call(rows, call_pairs):
    forest = attention_forest(rows)
    check(forest, make_schedule(forest, call_pairs=call_pairs))


@pytest.mark.few(2)
@pytest.mark.parametrize("tile", [1, 3, 8, 64])
@pytest.mark.parametrize("path", [0, 4, 512])
def test_every_visible_pair_is_in_exactly_one_call_for_any_tile(monkeypatch, tile, path):
    monkeypatch.setattr(schedule_module, "TILE", tile)
    monkeypatch.setattr(schedule_module, "MAX_TILE_PATH", path)
    rng = np.random.default_rng(tile)
    for call_pairs in CALL_PAIRS:
        for rows in (
            bushy_rows(rng, rows=25, segment=5, levels=4),
            bushy_rows(rng, rows=8, segment=20, levels=3, branch=2),
            rng.integers(0, 3, (12, 9)).tolist(),
        ):
            forest = attention_forest(rows)
            check(forest, make_schedule(forest, call_pairs=call_pairs))


def random_tree(rng: np.random.Generator, count: int, depth_bias: float) -> Forest:
    """A random forest of single tokens in pre-order: each hangs below a random token of the last path."""
    parent, path = [], []
    for token in range(count):
        keep = len(path) - int(min(rng.geometric(depth_bias) - 1, len(path)))
        path = path[:keep]
        parent.append(path[-1] if path else -1)
        path.append(token)
    return forest_from_parents(np.array(parent))


@pytest.mark.few(1)
@pytest.mark.parametrize("depth_bias", [0.4, 0.6, 0.9])
def test_order_of_siblings_does_not_matter_for_exactness(depth_bias):
    # Trimming untrained tails can leave a first child that is not the heaviest.
    rng = np.random.default_rng(7)
    for count in (1, 2, 3, 17, 150, 400):
        forest = random_tree(rng, count, depth_bias)
        for call_pairs in CALL_PAIRS:
            check(forest, make_schedule(forest, call_pairs=call_pairs))


def test_every_kind_of_call_is_reached_by_these_tests():
    rng = np.random.default_rng(0)
    forest = attention_forest(bushy_rows(rng, rows=40, segment=6, levels=5))
    kinds = [make_schedule(forest, call_pairs=c) for c in CALL_PAIRS]
    assert any(s.rectangles for s in kinds)
    assert any(s.batches for s in kinds)
    assert make_schedule(forest, call_pairs=0.0).batches == [] or make_schedule(forest, call_pairs=0.0).chains


def test_dear_calls_make_few_of_them():
    forest = attention_forest(bushy_rows(np.random.default_rng(1), rows=60, segment=5, levels=5))

    dear, usual, cheap = (calls(make_schedule(forest, call_pairs=c)) for c in (1e9, 2e3, 1.0))
    assert dear <= 2 and dear <= usual < cheap


@pytest.mark.slow
def test_no_batch_is_larger_than_its_bound(monkeypatch):
    monkeypatch.setattr(schedule_module, "MAX_BATCH_SCORES", 20_000)
    rng = np.random.default_rng(2)
    rows = bushy_rows(rng, rows=80, segment=7, levels=5) + rng.integers(0, 37, (60, 30)).tolist()
    forest = attention_forest(rows)
    for call_pairs in CALL_PAIRS:
        schedule = make_schedule(forest, call_pairs=call_pairs)
        check(forest, schedule)
        for batch in schedule.batches:
            pieces, queries = batch.query_index.shape
            assert pieces == 1 or pieces * queries * batch.key_index.shape[1] <= 20_000


def nested_forks(levels: int) -> Forest:
    """One deep path with a fork at every token: the deeper child first, a leaf beside it."""
    # Pre-order: the path 0..levels, then the leaves, deepest first.
    path = np.arange(levels + 1)
    parent = np.concatenate([path - 1, path[:-1][::-1]])
    depth = np.concatenate([path, path[1:][::-1]])
    # Token t of the path has the deeper path and one leaf for every path token from t on below it.
    ends = np.concatenate([2 * levels + 1 - path, np.arange(levels + 1, 2 * levels + 1) + 1])
    start, above = segments(parent)
    return Forest(ends=ends, depth=depth, segment_start=start, segment_parent=above)


def test_the_nested_forks_are_what_they_should_be():
    small = nested_forks(30)
    parent = np.concatenate([np.arange(31) - 1, np.arange(30)[::-1]])
    np.testing.assert_array_equal(small.ends, forest_from_parents(parent).ends)
    np.testing.assert_array_equal(small.depth, forest_from_parents(parent).depth)
    for call_pairs in CALL_PAIRS:
        check(small, make_schedule(small, call_pairs=call_pairs))


@pytest.mark.few(1)
@pytest.mark.parametrize("call_pairs", [0.0, 2e3, 1e9])
def test_twenty_thousand_nested_forks_are_scheduled_in_seconds_without_recursion(call_pairs):
    forest = nested_forks(20_000)
    started = time.process_time()
    schedule = make_schedule(forest, call_pairs=call_pairs)
    assert time.process_time() - started < 20
    assert pairs_computed(schedule) == int((forest.depth + 1).sum())
    assert (first_pass(schedule) == 1).all()


def test_a_layout_and_its_forest_agree():
    from treetrain.core.tree.layout import pack
    from treetrain.core.tree.token_tree import build_tree

    rows = [[1, 2, 3, 4], [1, 2, 5], [1, 2, 3, 4, 6]]
    forest = Forest.of(pack(build_tree(rows)))
    # [.., 4, 6]: the last token predicts nothing and is left out, so 5 too.
    assert forest.ends.tolist() == [4, 4, 4, 4]

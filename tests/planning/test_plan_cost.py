"""FLOPs and sizes of model shapes against published figures and sums by hand, and the ideal speed-up made of them."""

import dataclasses

import numpy as np
import pytest

from treetrain.core.errors import UnsupportedModel
from treetrain.core.tree.layout import FULL, AttentionRange
from treetrain.core.tree.token_tree import build_tree
from treetrain.models.work import ideal_speedup, linear_work, tree_stats, tree_work
from treetrain.shapes import ModelShape


@pytest.mark.parametrize(
    ("name", "published"),
    [  # parameter counts of the published checkpoints, norms included
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-1.7b", 1_720_574_976),
        ("qwen3-4b", 4_022_468_096),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-14b", 14_768_307_200),
        ("qwen3-32b", 32_762_123_264),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("qwen3-235b-a22b", 235_093_634_560),
        ("Llama-3.1-8B", 8_030_261_248),
    ],
)
def test_named_shapes_have_the_published_number_of_parameters_but_for_the_norms(name, published):
    shape = ModelShape.named(name)
    norms = shape.layers * 2 * shape.hidden + shape.hidden
    if name.startswith("qwen3"):
        norms += shape.layers * 2 * shape.head_dim
    assert shape.parameters + norms == published


@pytest.mark.parametrize(
    "reach",
    [FULL, AttentionRange(window=1), AttentionRange(window=5), AttentionRange(window=99), AttentionRange(chunk=4)],
    ids=str,
)
def test_pairs_of_tree_and_rows_are_counted_by_reach(reach):
    rows = [[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 8, 9], [1, 2, 3, 8, 9], [5], list(range(30, 50))]
    depths = [n for row in rows for n in range(len(row) - 1)]
    by_hand = sum(int(reach.seen(np.array([d]))[0]) for d in depths)
    tree = build_tree(rows)
    assert linear_work(tree, (FULL, reach)).pairs[reach] == by_hand
    distinct = {tuple(row[: n + 1]) for row in rows for n in range(len(row) - 1)}
    assert tree_work(tree, (FULL, reach)).pairs[reach] == sum(
        int(reach.seen(np.array([len(prefix) - 1]))[0]) for prefix in distinct
    )


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'qwen9'; known: qwen3-0\.6b, "):
        ModelShape.named("qwen9")


def test_step_flops_are_three_forwards_counted_by_hand():
    shape = ModelShape(layers=2, hidden=8, intermediate=12, heads=4, kv_heads=2, head_dim=3, vocab=50, tied=False)
    layer = 8 * 12 + 2 * 8 * 6 + 12 * 8 + 3 * 8 * 12
    assert shape.layer_parameters == layer
    forward = 2 * (10 * 2 * layer + 55 * 4 * (2 * 3 + 2 * 3)) + 7 * 2 * 8 * 50
    assert shape.counts().flops(tokens=10, pairs={FULL: 55}, head_rows=7) == 3 * forward


def test_the_ideal_of_a_tree_is_the_ratio_of_its_works():
    shape = ModelShape.named("qwen3-0.6b").counts()
    tree = build_tree([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 5]])
    ours = shape.flops(3, {FULL: 6}, 3)
    assert ideal_speedup(tree, shape) == shape.flops(9, {FULL: 18}, 9) / ours == tree_stats(tree, shape).flop_speedup
    assert ideal_speedup(build_tree([[1], []]), shape) == 1


def test_the_ideal_of_a_model_with_windows_counts_the_pairs_it_sees():
    wide = ModelShape.named("qwen3-0.6b").counts()
    window = AttentionRange(window=5)
    counts = dataclasses.replace(wide, flops_by_range={window: wide.flops_by_range[FULL]})
    trunk = list(range(20))
    tree = build_tree([[*trunk, 30, 31], [*trunk, 32, 33]])
    pairs = {d: min(d + 1, 5) for d in range(21)}
    ours = counts.flops(22, {window: sum(pairs.values()) + pairs[20]}, 22)
    linear = counts.flops(42, {window: 2 * sum(pairs.values())}, 42)
    assert ideal_speedup(tree, counts) == linear / ours != ideal_speedup(tree, wide)


def test_rows_that_share_nothing_gain_nothing():
    assert ideal_speedup(build_tree([[1, 2], [3, 4, 5]]), ModelShape.named("qwen3-8b").counts()) == 1


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden": 0}, "hidden is 0"),
        ({"vocab": "96"}, "vocab is '96'"),
        ({"kv_heads": 3}, "4 heads on 3 key/value heads"),
    ],
)
def test_sizes_that_cannot_be_are_refused_by_name(changes, says):
    sizes = {"layers": 2, "hidden": 8, "intermediate": 12, "heads": 4, "kv_heads": 2, "head_dim": 3, "vocab": 50}
    with pytest.raises(UnsupportedModel, match=says):
        ModelShape(**sizes | changes, tied=True)

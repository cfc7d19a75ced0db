"""benchmarks/rivals.py: every rival computes the same gradients, so their times can be compared."""

import sys
from pathlib import Path

import numpy as np
import pytest

import treetrain as tt

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def rivals(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    import rivals

    return rivals


@pytest.fixture
def rows(rivals):
    """Rows that fork twice, one that another extends, and one of its own; trained at their ends."""
    from tree_shapes import rows_of

    shape = [[-1, 0, 40, 10], [0, 30, 20, 20], [0, 12, 25, 5], [1, 41, 9, 9], [0, 35, 0, 5], [-1, 0, 17, 16]]
    return rows_of(shape, 500)


@pytest.mark.parametrize("name", ["rows", "each row", "dense mask", "prefix groups", "segments", "tree"])
def test_every_rival_gives_the_gradients_of_every_row_by_itself(rivals, rows, name):
    from workloads import qwen3_model

    model = qwen3_model(layers=2, vocab_size=500)
    exact = rivals.reference_gradients(qwen3_model(layers=2, vocab_size=500), rows)
    rivals.RIVALS[name](model, rows).step()
    found = rivals.gradients(model)
    assert float((found - exact).norm() / exact.norm()) < 1e-5


def test_groups_of_depth_one_are_those_that_compute_the_fewest_tokens(rivals):
    stem, left, right = [1] * 10, [2] * 8, [3] * 8
    rows = [stem + left + [n] for n in (4, 5, 6)] + [stem + right + [n] for n in (7, 8)] + [[9] * 5]
    tree = tt.build_tree([tt.Trajectory(np.array(row)) for row in rows])
    depth = {-1: 0} | {at: int(tree.depth[at]) + 1 for at in range(tree.num_tokens)}
    found = {tuple(sorted(members)): depth[at] for at, members in rivals.fewest_tokens(tree)}
    assert found == {(0, 1, 2): 18, (3, 4): 18, (5,): 0}  # 21 + 20 + 5 tokens; one group of all five has 10 + 45


def test_a_speed_up_is_against_merged_rows_and_stands_beside_that_against_every_row(rivals, rows, monkeypatch):
    """With a clock that counts the tokens of a step, so that the figures are known."""
    from workloads import qwen3_model

    model = qwen3_model(layers=1, vocab_size=500)

    def tokens(ways, rounds):
        of_tree = {"tree": rows_tree.num_tokens}
        return {name: [of_tree.get(name) or sum(map(len, way.rows))] * rounds for name, way in ways.items()}

    rows_tree = tt.build_tree(rows)
    monkeypatch.setattr(rivals, "take_turns", tokens)
    found = rivals.compare(model, rows, {"tree": rivals.Ours(model, rows)}, 5)["tree"]
    merged, unique = 40 + 50 + 37 + 50 + 17, 40 + 20 + 25 + 9 + 17  # the row of 35 tokens is a prefix of the first
    assert (found["rows"], found["merged_rows"], found["unique_tokens"], found["rounds"]) == (6, 5, unique, 5)
    assert float(found["speedup"]) == pytest.approx(merged / unique, abs=1e-3)
    assert float(found["each_row_speedup"]) == pytest.approx(sum(map(len, rows)) / unique, abs=1e-3)
    assert float(found["ideal"]) < float(found["each_row_ideal"])


def test_flex_attention_says_why_it_does_not_run_on_a_cpu(rivals, rows):
    from workloads import qwen3_model

    with pytest.raises(NotImplementedError, match="no backward on a CPU"):
        rivals.Flex(qwen3_model(layers=1, vocab_size=500), rows)

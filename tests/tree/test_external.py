"""The external merge gives the statistics of the tree in memory, number by number."""

import numpy as np
import pytest

from treetrain.data.trajectory import Trajectory
from treetrain.errors import DataError
from treetrain.planning.cost import ModelShape
from treetrain.tree.build import build_tree
from treetrain.tree.external import ExternalTree
from treetrain.tree.stats import tree_stats

SHAPE = ModelShape.named("qwen3-0.6b").counts()


def some_rows(seed: int, count: int, vocabulary: int = 2, most: int = 12) -> list[Trajectory]:
    """Rows that share, repeat and extend each other, under three keys, trained here and there."""
    drawn = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        ids = drawn.integers(0, vocabulary, drawn.integers(0, most)) * 70_000
        weights = None if drawn.random() < 0.1 else (drawn.random(len(ids)) < drawn.random()).astype(float)
        rows.append(Trajectory(ids, loss_weights=weights, key=[None, "a", "b"][drawn.integers(0, 3)]))
    return rows


@pytest.mark.parametrize(("seed", "count", "run_tokens"), [(0, 60, 10), (1, 200, 100), (2, 7, 1), (3, 90, 10**6)])
def test_every_number_is_that_of_the_tree_in_memory(seed: int, count: int, run_tokens: int) -> None:
    rows, seen = some_rows(seed, count), []
    external = ExternalTree(run_tokens=run_tokens, progress=lambda done, of: seen.append((done, of)))
    for row in rows:
        external.add(row)
    assert external.stats(SHAPE) == tree_stats(build_tree(rows), SHAPE)
    assert seen[0] == (0, count)


def test_rows_that_are_longer_than_a_buffer_and_nothing_at_all(monkeypatch) -> None:
    monkeypatch.setattr("treetrain.tree.external.BUFFER", 5)
    rows = [Trajectory([*range(100), *range(tail)]) for tail in (3, 0, 30, 3)]
    external, empty = ExternalTree(run_tokens=150), ExternalTree()
    for row in rows:
        external.add(row)
    assert external.stats(SHAPE) == tree_stats(build_tree(rows), SHAPE)
    assert empty.stats(SHAPE) == tree_stats(build_tree([]), SHAPE)


def test_recorded_experts_are_refused() -> None:
    with pytest.raises(DataError, match="recorded experts, which are compared only if all rows fit in memory"):
        ExternalTree().add(Trajectory([1, 2], experts=np.zeros((2, 1, 1), int)))

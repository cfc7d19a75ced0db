"""Files that do not fit in memory: exact statistics of all rows, and whole groups as a sample."""

import numpy as np
import pytest

from treetrain.data.trajectory import Trajectory
from treetrain.inspection.sample import Sampler, overlap_within
from treetrain.planning.cost import ModelShape
from treetrain.tree.build import build_tree
from treetrain.tree.stats import tree_stats

SHAPE = ModelShape.named("qwen3-0.6b").counts()


def some_rows(groups: int) -> list[Trajectory]:
    """Groups of one to five rows, interleaved."""
    drawn = np.random.default_rng(0)
    rows = []
    for group in range(groups):
        prompt = [7] * 5 + [group] * int(drawn.integers(1, 30))
        for number in range(int(drawn.integers(1, 6))):
            ids = [*prompt, *drawn.integers(0, 9, 8)]
            rows.append(Trajectory(ids, group=group, id=f"{group}/{number}", reward=1.0))
    return [rows[number] for number in drawn.permutation(len(rows))]


def test_rows_that_fit_are_all_kept() -> None:
    rows = some_rows(4)
    sampler = Sampler(SHAPE)
    assert sampler(iter(rows)) == rows and sampler.stats is None and sampler.note == ""


@pytest.mark.parametrize("size", [300, 3000])
def test_a_sample_has_whole_groups_in_order_and_the_figures_are_those_of_all_rows(size: int) -> None:
    rows = some_rows(200)
    sampler = Sampler(SHAPE, memory_tokens=1000, sample_tokens=size)
    kept = sampler(iter(rows))
    assert sampler.stats == tree_stats(build_tree(rows), SHAPE)
    assert size / 2 < sum(map(len, kept)) <= size
    groups = {row.group for row in kept}
    assert kept == [row for row in rows if row.group in groups]
    assert f"{len(kept)} of {len(rows)} rows, in {len(groups)} of 200 whole groups" in sampler.note


def test_the_sampling_error_covers_the_overlap_of_all_groups() -> None:
    def by_group(rows: list[Trajectory]) -> list[list[Trajectory]]:
        return [[row for row in rows if row.group == group] for group in {row.group for row in rows}]

    rows = some_rows(400)
    whole, _ = overlap_within(by_group(rows))
    kept = Sampler(SHAPE, memory_tokens=1000, sample_tokens=4000)(iter(rows))
    found, error = overlap_within(by_group(kept))
    assert 0 < error < 0.1 and abs(found - whole) < 3 * error

"""Files that do not fit in memory: whole groups as a sample, and estimates of what all rows share."""

import numpy as np
import pytest

from treetrain.data.trajectory import Trajectory
from treetrain.errors import DataError
from treetrain.inspection.sample import Sampler
from treetrain.planning.cost import ModelShape
from treetrain.tree.build import build_tree
from treetrain.tree.stats import tree_stats

SHAPE = ModelShape.named("qwen3-0.6b").counts()


def some_rows(groups: int, system: int = 0, named: bool = True) -> list[Trajectory]:
    """Groups of one to five rows, interleaved: a system prompt, their own prompt, an answer each."""
    drawn = np.random.default_rng(0)
    rows = []
    for group in range(groups):
        prompt = [7] * system + [100 + group] * int(drawn.integers(1, 30))
        for number in range(int(drawn.integers(1, 6))):
            ids = [*prompt, *drawn.integers(0, 9, 8)]
            rows.append(Trajectory(ids, group=group if named else None, id=f"{group}/{number}"))
    return [rows[number] for number in drawn.permutation(len(rows))]


def test_rows_that_fit_are_all_kept() -> None:
    rows = some_rows(4)
    sampler = Sampler(SHAPE)
    assert sampler(iter(rows)) == rows and sampler.estimate is None


@pytest.mark.parametrize("size", [300, 3000])
@pytest.mark.parametrize("asked", [True, False])
def test_a_sample_has_whole_groups_in_order_and_rows_are_left_out_before_they_are_made(size: int, asked: bool) -> None:
    rows, made = some_rows(200), []

    def read(sampler):
        for row in rows:
            if not asked or sampler.wants(row.group, None):
                made.append(row)
                yield row

    sampler = Sampler(SHAPE, memory_tokens=1000, sample_tokens=size)
    kept = sampler(read(sampler))
    assert size / 2 < sum(map(len, kept)) <= size
    groups = {row.group for row in kept}
    assert kept == [row for row in rows if row.group in groups]
    assert sampler.estimate.groups == len(groups) and sampler.estimate.share == len(kept) / len(rows)
    assert len(made) < 0.7 * len(rows) if asked else len(made) == len(rows)


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("system", [0, 100])
def test_the_estimate_of_all_rows_is_within_its_error_also_where_groups_share_a_prompt(system, named) -> None:
    rows = some_rows(600, system, named)
    whole, sampler = tree_stats(build_tree(rows), SHAPE), Sampler(SHAPE, memory_tokens=9000, sample_tokens=8000)
    kept = sampler(iter(rows))
    found = sampler.estimate
    for name in ("flat", "unique", "overlap", "flop_speedup"):
        value, error, exact = getattr(found, name), getattr(found, f"{name}_error"), getattr(whole, name)
        assert 0 < error < 0.2 * exact and abs(value - exact) < 3 * error, name
    if system:  # the sample's own tree shares less: its system prompt is shared by fewer rows
        own = tree_stats(build_tree(kept), SHAPE)
        assert whole.flop_speedup - own.flop_speedup > 2 * abs(whole.flop_speedup - found.flop_speedup)


def test_a_group_that_is_larger_than_memory_is_refused_by_name() -> None:
    rows = (Trajectory(range(100), group="all", id=number) for number in range(20))
    with pytest.raises(DataError, match="group 'all' of row 0 is too large for a sample"):
        Sampler(SHAPE, memory_tokens=1000, sample_tokens=500)(rows)

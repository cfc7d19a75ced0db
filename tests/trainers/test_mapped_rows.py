"""A run on memory-mapped rows is the run on the same rows in memory."""

import pytest

from support.tree_runs import apart, branching_rows, run, small_model, steps
from treetrain.data.arrow import MappedTrajectories, write_trajectories


@pytest.mark.parametrize(
    ("loss", "groups", "more"),
    [
        ("sft", True, {}),
        ("sft", False, {}),
        ("grpo", True, {"updates_per_batch": 2, "dataloader_num_workers": 1}),
    ],
)
def test_a_run_on_memory_mapped_rows_is_the_run_on_rows_in_memory(tmp_path, loss, groups, more):
    rows = branching_rows()
    rows = rows if groups else [row.replace(group=None) for row in rows]
    write_trajectories(tmp_path / "rows.arrow", rows, dict)
    mapped = MappedTrajectories(tmp_path / "rows.arrow")
    found, expected = (run(small_model(), data, loss=loss, max_steps=6, **more) for data in (mapped, rows))
    assert len(steps(found)) == 6
    assert max(apart(found, expected).values()) == 0, apart(found, expected)

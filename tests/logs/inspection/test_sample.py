"""Files that do not fit in memory: whole groups as a sample."""

import numpy as np
import pytest

from treetrain.core.errors import DataError
from treetrain.layers.trajectory import Trajectory
from treetrain.logs.inspection.sample import Sampler


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
    sampler = Sampler()
    assert sampler(iter(rows)) == rows and sampler.share == 1


@pytest.mark.parametrize("size", [300, 3000])
@pytest.mark.parametrize("asked", [True, False])
def test_a_sample_has_whole_groups_in_order_and_rows_are_left_out_before_they_are_made(size: int, asked: bool) -> None:
    rows, made = some_rows(200), []

    def read(sampler):
        for row in rows:
            if not asked or sampler.wants(row.group, None):
                made.append(row)
                yield row

    sampler = Sampler(memory_tokens=3000, sample_tokens=size)
    kept = sampler(read(sampler))
    assert 0.4 * size < sum(map(len, kept)) <= size
    groups = {row.group for row in kept}
    assert kept == [row for row in rows if row.group in groups]
    assert abs(sampler.share - len(groups) / 200) < 0.05
    assert len(made) < 0.7 * len(rows) if asked else len(made) == len(rows)


def test_progress_never_goes_back_where_a_record_has_several_rows() -> None:
    told: list[int] = []
    sampler = Sampler(progress=told.append)

    def read():
        for row in some_rows(3):
            sampler.wants(None, None)
            yield from (row, row)

    sampler(read())
    assert told == sorted(told) and told[-1] == 2 * len(some_rows(3))


@pytest.mark.parametrize("system", [0, 100])
def test_rows_without_names_are_drawn_by_their_prompts(system) -> None:
    rows = some_rows(600, system, named=False)
    sampler = Sampler(memory_tokens=20_000, sample_tokens=12_000)
    kept = {row.id for row in sampler(iter(rows))}
    groups = {name.split("/")[0] for name in kept}
    assert kept == {row.id for row in rows if row.id.split("/")[0] in groups} and len(groups) < 400


def test_a_group_that_is_larger_than_memory_is_refused_by_name() -> None:
    rows = (Trajectory(range(100), group="all", id=number) for number in range(20))
    with pytest.raises(DataError, match="group 'all' of row 0 is too large for a sample"):
        Sampler(memory_tokens=1000, sample_tokens=500)(rows)

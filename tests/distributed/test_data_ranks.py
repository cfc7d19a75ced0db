"""Real processes read disjoint rows and see the same steps as one; what fails on one of them ends all."""

import json
from pathlib import Path
from typing import Any

import pytest

from support.rank_rows import steps_on_rank


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def rows_of_groups() -> list[dict[str, Any]]:
    loose = [{"input_ids": [1, 2, number % 3, 4 + number, *range(10, 20)]} for number in range(30)]
    grouped = [
        {"input_ids": [5, number, *range(number)], "reward": number % 3, "group": f"g{number % 4}"}
        for number in range(1, 21)
    ]
    return loose + grouped


@pytest.mark.parametrize("size", [2, 4])
def test_processes_read_disjoint_rows_and_see_the_steps_of_one(run_on_ranks, tmp_path, size) -> None:
    rows = rows_of_groups()
    files = [write(tmp_path / "a.jsonl", rows[:22]), write(tmp_path / "b.jsonl", rows[22:])]
    alone = steps_on_rank(None, files, str(tmp_path / "alone"))
    found = run_on_ranks(steps_on_rank, files, str(tmp_path / "shared"), size=size)
    assert len(alone.steps) > 4 and len(alone.read) == len(rows)
    for rank in found:
        assert (rank.steps, rank.ids, rank.digest, rank.notes) == (alone.steps, alone.ids, alone.digest, alone.notes)
    read = [line for rank in found for line in rank.read]
    assert sorted(read) == sorted(alone.read), "every line is read by one process, once"
    assert all(rank.read for rank in found)


def test_a_bad_row_in_the_share_of_one_process_ends_all(run_on_ranks, tmp_path) -> None:
    rows = rows_of_groups()
    rows[-1] = {"input_ids": [-1]}
    found = run_on_ranks(steps_on_rank, [write(tmp_path / "a.jsonl", rows)], str(tmp_path / "out"), size=4)
    assert [type(error).__name__ for error in found] == ["RanksDisagree"] * 3 + ["DataError"]
    assert all("a.jsonl line 50" in str(error) for error in found)

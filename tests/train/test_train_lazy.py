"""A run whose rows stay in their files is the run of rows in memory; what needs all rows at once is refused."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from branching import branching_rows, write_rows
from small_runs import records

from support.thread_ranks import on_ranks
from treetrain.data.lazy_rows import LazyRows
from treetrain.engine.free_bytes import free_bytes
from treetrain.errors import DataError
from treetrain.train import run_rows
from treetrain.train.config import TrainConfig
from treetrain.train.prepare import prepare
from treetrain.train.same_run import data_digests
from treetrain.train.trainer import train

pytestmark = pytest.mark.usefixtures("one_thread")


def without_groups(rows: list[dict]) -> list[dict]:
    return [{name: value for name, value in row.items() if name != "group_id"} for row in rows]


def pairs(rows: list[dict], **facts: Any) -> list[dict]:
    """Neighbours become chosen and rejected rows with log-probabilities of a reference."""
    reference = {"ref_logprobs": [-1.0] * len(rows[0]["input_ids"])} | facts
    return [
        {name: row[name] for name in ("input_ids", "loss_mask")}
        | {"pair": f"pair {number // 2}", "chosen": number % 2 == 0}
        | {name: value for name, value in reference.items() if value is not None}
        for number, row in enumerate(rows)
    ]


def steps_of(config: TrainConfig, ranks: Any = None) -> tuple[dict[str, str], list[list[list[int]]], tuple[str, ...]]:
    prepared = prepare(config, ranks)
    assert isinstance(prepared.rows, LazyRows) == (config.data_in_memory is False)
    epochs = [[rows.tolist() for rows in prepared.plan.epoch(number)] for number in range(2)]
    return data_digests(prepared), epochs, prepared.notes


@pytest.mark.parametrize(
    ("rows", "changes"),
    [
        (branching_rows(), {"loss": "grpo", "updates_per_batch": 2, "minibatches": 2, "steps": 4}),
        (without_groups(branching_rows()), {"eval_fraction": 0.3, "epochs": 1}),
        (pairs(branching_rows(samples=2)), {"loss": "dpo", "steps": 2}),
    ],
    ids=["grpo", "sft", "dpo"],
)
def test_losses_are_those_of_rows_in_memory_bit_for_bit(make_config, tmp_path, rows, changes) -> None:
    data = write_rows(tmp_path / "own.jsonl", rows)
    runs = {
        where: make_config(data=data, output=str(tmp_path / f"{where}"), data_in_memory=where, **changes)
        for where in (True, False)
    }
    memory, files = (train(config) for config in runs.values())
    assert memory.losses == files.losses and len(files.losses) > 1
    evaluations = [[record["nll"] for record in records(config.output, "eval")] for config in runs.values()]
    assert evaluations[0] == evaluations[1] and bool(evaluations[0]) == ("eval_fraction" in changes)
    for name in ("rows", "row_tokens", "eval_rows", "data"):
        starts = [records(config.output, "start")[0].get(name) for config in runs.values()]
        assert starts[0] == starts[1], name


@pytest.mark.parametrize("changes", [{}, {"eval_fraction": 0.25}, {"loss": "grpo", "tokens_per_step": 50}])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_steps_are_the_same_for_any_number_of_ranks_and_in_memory(make_config, tmp_path, size, changes) -> None:
    rows = branching_rows(groups=9, samples=4)
    if "loss" not in changes:
        rows = without_groups(rows[:20]) + rows[20:]
    files = [write_rows(tmp_path / "a.jsonl", rows[:7]), write_rows(tmp_path / "b.jsonl", rows[7:])]
    expected = steps_of(make_config(data=files, data_in_memory=True, **changes))
    lazy = make_config(data=files, data_in_memory=False, **changes)
    for _ in range(2):  # the second time from the index that was kept
        assert on_ranks(size, lambda ranks: steps_of(lazy, ranks)) == [expected] * size


def broken(rows: list[dict], number: int, **facts: Any) -> list[dict]:
    changed = {name: value for name, value in (rows[number] | facts).items() if value is not None}
    return [*rows[:number], changed, *rows[number + 1 :]]


@pytest.mark.parametrize(
    ("rows", "loss", "message"),
    [
        (broken(branching_rows(), 4, reward=None), "grpo", "no reward"),
        (broken(branching_rows(), 4, group_id=None), "grpo", "no group"),
        (broken(branching_rows(), 4, logprobs=[-1.0] * 20), "grpo", "would mix two policies"),
        (broken(pairs(branching_rows(samples=2)), 3, chosen=True), "dpo", "pair 'pair 1' has 2 chosen"),
        (broken(pairs(branching_rows(samples=2)), 3, pair=None), "dpo", "has no pair"),
        (broken(pairs(branching_rows(samples=2)), 3, chosen=None), "kto", "does not say whether it is desirable"),
        ([row | {"loss_mask": [0] * 20} for row in branching_rows()], "sft", "nothing to train"),
    ],
)
def test_what_a_loss_refuses_is_refused_in_the_same_words(make_config, tmp_path, rows, loss, message) -> None:
    data = write_rows(tmp_path / "own.jsonl", rows)
    told = []
    for where in (True, False):
        with pytest.raises(DataError, match=message) as refused:
            prepare(make_config(data=data, loss=loss, data_in_memory=where))
        told.append(str(refused.value))
    assert told[0] == told[1] or loss == "sft"


def test_distillation_from_rows_without_a_teacher_names_the_row(make_config, data_file) -> None:
    with pytest.raises(DataError, match="line 1' has no teacher_logprobs"):
        prepare(make_config(loss="distill", data_in_memory=False))


def test_a_reference_policy_of_the_whole_run_needs_all_rows_in_memory(make_config, tmp_path) -> None:
    data = write_rows(tmp_path / "own.jsonl", pairs(branching_rows(samples=2), ref_logprobs=None))
    prepare(make_config(data=data, loss="dpo", data_in_memory=True))
    with pytest.raises(DataError, match="needs all rows in memory: give the rows ref_logprobs"):
        prepare(make_config(data=data, loss="dpo", data_in_memory=False))


@pytest.mark.parametrize(("free", "lazy"), [(10**9, False), (1000, True)])
def test_rows_stay_in_their_files_where_memory_is_short(make_config, monkeypatch, free, lazy) -> None:
    monkeypatch.setattr(run_rows, "_free_bytes", lambda: free)
    for prepared in on_ranks(2, lambda ranks: prepare(make_config(), ranks)):
        assert isinstance(prepared.rows, LazyRows) == lazy
        assert any("the rows stay in their files" in note for note in prepared.notes) == lazy


def test_what_is_free_is_asked_of_the_system() -> None:
    import torch

    assert 0 < run_rows._free_bytes() <= 2 * free_bytes(torch.device("cpu"))


def test_held_out_rows_that_do_not_fit_in_memory_are_refused(make_config, monkeypatch) -> None:
    monkeypatch.setattr(run_rows, "_free_bytes", lambda: 1000)
    with pytest.raises(DataError, match="6 held-out rows are kept in memory"):
        prepare(make_config(eval_fraction=0.3, data_in_memory=False))


def test_a_folder_that_cannot_be_written_to_is_told(make_config, tmp_path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / run_rows.FOLDER).write_text("in the way")
    with pytest.raises(DataError, match=r"sorting them in .* fails"):
        prepare(make_config(data_in_memory=False))


def test_a_run_goes_on_in_the_other_way_of_reading(make_config, tmp_path) -> None:
    shared = {"output": str(tmp_path / "parts"), "schedule": "constant", "warmup_steps": 0}
    whole = train(make_config(**shared | {"output": str(tmp_path / "whole")}, epochs=2))
    train(make_config(**shared, epochs=1, checkpoint_every_steps=1, data_in_memory=False))
    more = train(make_config(**shared, epochs=2, checkpoint_every_steps=1, resume="auto", data_in_memory=True))
    assert more.losses == whole.losses


MEASURE = """
import re, sys
from pathlib import Path
from treetrain.data import prefix_order
from treetrain.data.exchange import Alone
from treetrain.data.lazy_rows import LazyRows, RowStore
from treetrain.data.load import load
from treetrain.data.row_index import build_index
from treetrain.data.row_maker import RowMaker
from treetrain.train.batches import plan_batches

def resident(what):
    return 1024 * int(re.search(what + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text()).group(1))

path, before = sys.argv[1], resident("VmRSS")
if sys.argv[2] == "memory":
    rows = load(path).trajectories
else:
    prefix_order.RUN_BYTES = int(sys.argv[3])
    maker = RowMaker(format="tokens")
    index = build_index([path], maker, folder=Path(path).parent / "index", exchange=Alone())
    rows = LazyRows.all_of(RowStore(index, maker, Alone()))
    plan = plan_batches(rows, tokens_per_step=32768)
    for step in plan.epoch(0)[:20]:
        assert len(rows.take(step.tolist())) == len(step)
    assert sum(map(len, plan.units)) == len(rows)
print(len(rows), resident("VmHWM") - before)
"""


def peak_of(path: Path, *how: str) -> int:
    """Bytes that a process needs at most, above what it has after its imports."""
    if not Path("/proc/self/status").exists():
        pytest.skip("the system does not tell how much memory a process has taken")
    found = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path), *how], capture_output=True, text=True, timeout=900
    )
    assert found.returncode == 0, found.stderr
    return int(found.stdout.split()[1])


def many_rows(path: Path, count: int, tokens: int) -> Path:
    """Rows without a group that differ in their first token."""
    text = json.dumps(np.random.default_rng(0).integers(0, 30_000, tokens - 1).tolist())
    with path.open("w") as file:
        for number in range(count):
            file.write(f'{{"input_ids": [{number}, {text[1:]}}}\n')
    return path


def test_memory_is_a_few_numbers_per_row_and_the_tokens_of_a_few_steps(tmp_path) -> None:
    path = many_rows(tmp_path / "rows.jsonl", 1500, 4000)
    lazy, memory = peak_of(path, "lazy", str(1 << 20)), peak_of(path, "memory")
    assert memory > 20 * 2**20, "the rows themselves"
    assert lazy < 10 * 2**20


@pytest.mark.slow
def test_two_hundred_thousand_rows_take_a_small_part_of_their_file(tmp_path) -> None:
    path = many_rows(tmp_path / "rows.jsonl", 200_000, 500)
    lazy = peak_of(path, "lazy", str(1 << 24))
    size = path.stat().st_size
    print(f"{lazy / 2**20:.0f} MiB of {size / 2**20:.0f} MiB")
    assert size > 500 * 2**20 and lazy < 200 * 2**20

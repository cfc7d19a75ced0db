"""Streams: groups stay whole, no row is lost, little is read ahead, and processes get even work and the same result."""

import os
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState
from datasets import Dataset, load_dataset
from transformers import Trainer, TrainingArguments

import treetrain as tt
from support.models import VOCAB, make_model
from treetrain.core.errors import DataError
from treetrain.core.tree.token_tree import build_tree
from treetrain.trainers.streams import STEPS_AHEAD, GroupStream


class Rows:
    """A stream of rows that counts how many were read."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows, self.read = rows, 0

    def __iter__(self):
        for row in self.rows:
            self.read += 1
            yield row


def games(count: int, calls: int = 4, seed: int = 0) -> list[dict[str, Any]]:
    """Rows of games one after another: a prompt of the game, and an answer of another length in each."""
    draws = np.random.default_rng(seed)
    rows = []
    for game in range(count):
        prompt = draws.integers(3, VOCAB, int(draws.integers(4, 20))).tolist()
        for _ in range(calls):
            answer = draws.integers(3, VOCAB, int(draws.integers(1, 12))).tolist()
            labels = [-100] * len(prompt) + answer
            rows.append({"input_ids": prompt + answer, "labels": labels, "game": f"game {game}"})
    return rows


def number(row: dict[str, Any]) -> tuple:
    return tuple(row["input_ids"])


@pytest.mark.parametrize("key", ["game", "input_ids"])
def test_groups_stay_within_a_step_and_every_row_comes_once_in_an_epoch_on_one_process(key) -> None:
    rows = games(101)
    steps = [list(GroupStream(rows, 4, key=key, processes=3).steps()) for _ in range(2)]
    assert steps[0] == steps[1] and all(len(step) == 12 for step in steps[0][:-1])
    places = Counter(game for step in steps[0] for game in {row["game"] for row in step})
    # Columns name the groups; ids of games that begin alike by chance may be one.
    assert sum(count > 1 for count in places.values()) <= (0 if key == "game" else 8)
    orders = []
    for epoch in range(2):
        found = []
        for process in range(3):
            stream = GroupStream(rows, 2, key=key, accumulation=2, processes=3, process=process)
            stream.set_epoch(epoch)
            batches = list(stream)
            assert len(batches) % 2 == 0
            found += [number(row) for batch in batches if batch.trained for row in batch.rows]
        assert Counter(found) == Counter(map(number, rows))
        orders.append(found)
    assert orders[0] != orders[1]


def test_no_more_is_read_than_a_few_steps_ahead() -> None:
    source = Rows(games(500))
    steps = GroupStream(source, 2, key="game", processes=2).steps()
    next(steps)
    assert source.read == STEPS_AHEAD * 4
    assert sum(1 for _ in steps) == 500 * 4 // 4 - 1 and source.read == 2000


def test_the_work_of_processes_is_even_though_rows_differ_in_length_and_sharing() -> None:
    stream = GroupStream(games(400), 50, key="game", processes=8)
    for rows in stream.steps():
        work = [build_tree([rows[k]["input_ids"] for k in own]).num_tokens for own in stream.divide(rows)]
        assert max(work) / np.mean(work) < 1.05, work
    # By number, as accelerate deals them out, a process with long prompts has more.
    by_number = [build_tree([row["input_ids"] for row in rows[k : k + 50]]).num_tokens for k in range(0, 400, 50)]
    assert max(by_number) / np.mean(by_number) > 1.05


def test_a_process_without_rows_has_one_that_is_not_trained() -> None:
    rows = games(1, calls=2)
    found = [list(GroupStream(rows, 2, key="game", processes=4, process=process)) for process in range(4)]
    assert [len(batches) for batches in found] == [1] * 4
    assert sum(len(batch.rows) for batches in found for batch in batches if batch.trained) == 2
    idle = [batch for batches in found for batch in batches if not batch.trained]
    assert idle and all(batch.rows == [min(rows, key=lambda row: len(row["input_ids"]))] for batch in idle)
    assert not list(GroupStream(rows, 2, key="game", processes=4, drop_last=True))


def padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    width = max(len(row["input_ids"]) for row in rows)

    def tensor(name: str, fill: int) -> torch.Tensor:
        return torch.tensor([row[name] + [fill] * (width - len(row[name])) for row in rows])

    return {
        "input_ids": tensor("input_ids", 0),
        "labels": tensor("labels", -100),
        "attention_mask": torch.tensor([[k < len(row["input_ids"]) for k in range(width)] for row in rows]).long(),
    }


def stream_of(folder: Path) -> Any:
    """Parquet files, read as a stream by an address of fsspec."""
    for shard in range(3):
        path = folder / f"{shard}.parquet"
        if not path.exists():
            Dataset.from_list(games(9, seed=shard)).to_parquet(str(path))
    files = [f"file://{folder}/{shard}.parquet" for shard in range(3)]
    return load_dataset("parquet", data_files=files, split="train", streaming=True)


def trained(group: Any, folder: Path, share: bool, accumulation: int) -> Any:
    """Weights after six steps, and how many rows this process trained."""
    if group is not None:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    model = make_model("qwen3", torch.float64)
    args = TrainingArguments(
        str(folder / "out"),
        max_steps=6,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=accumulation,
        learning_rate=0.1,
        optim="sgd",
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        ddp_backend=None if group is None else "gloo",
    )
    seen = []

    def collator(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        seen.append(len(rows))
        return padded(rows)

    trainer = Trainer(model, args, train_dataset=stream_of(folder), data_collator=collator)
    tt.group_batches(trainer, key="game")
    if share:
        tt.share_prefixes(trainer)
    trainer.train()
    return {name: p.detach() for name, p in model.named_parameters()}, seen


@pytest.mark.parametrize("share", [True, False])
def test_two_processes_train_what_one_trains(share, two, tmp_path) -> None:
    stream_of(tmp_path)
    whole, _ = trained(None, tmp_path, False, 4)
    found = two.run(trained, tmp_path, share, 2)
    for weights, seen in found:
        assert max((whole[name] - weights[name]).abs().max() for name in whole) < 1e-7  # the loss is float32
        assert len(seen) in (12, 13)  # accelerate's loader is a micro-batch ahead
    assert any(a != b for a, b in zip(*(seen for _, seen in found)))  # numbers of rows differ


def test_trainers_whose_loss_is_not_per_token_of_the_step_are_refused_by_name(tmp_path) -> None:
    trainer = Trainer.__new__(Trainer)
    args = SimpleNamespace(world_size=2, average_tokens_across_devices=True, dataloader_num_workers=0)
    vars(trainer).update(
        args=args,
        train_dataset=iter([]),
        model_accepts_loss_kwargs=False,
        compute_loss_func=None,
        accelerator=SimpleNamespace(split_batches=False),
    )
    with pytest.raises(DataError, match=r"Trainer cannot divide a stream by work: .* its loss is a mean over micro-b"):
        tt.group_batches(trainer)
    trainer.model_accepts_loss_kwargs, args.average_tokens_across_devices = True, False
    with pytest.raises(DataError, match="average_tokens_across_devices is False: set it"):
        tt.group_batches(trainer)
    args.average_tokens_across_devices, args.dataloader_num_workers = True, 2
    with pytest.raises(DataError, match="dataloader_num_workers is 2; a stream is read in its order"):
        tt.group_batches(trainer)
    with pytest.raises(DataError, match="no column 'input_ids', only 'text'"):
        list(GroupStream([{"text": "a", "game": 1}], 1, key="game"))

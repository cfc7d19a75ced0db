"""Streams: groups stay whole, no row is lost, little is read ahead, and processes get even work and the same result."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
import trainer_runs as runs
from accelerate.state import AcceleratorState, GradientState, PartialState
from datasets import Dataset, load_dataset
from transformers import Trainer, TrainingArguments

import treetrain as tt
from support.hub import hub
from support.models import VOCAB, make_model
from support.processes import free_port
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


def write_rows(address: str) -> None:
    """Write three Parquet files below an address of fsspec."""
    for shard in range(3):
        Dataset.from_list(games(9, seed=shard)).to_parquet(f"{address}/{shard}.parquet")


def stream_of(address: str) -> Any:
    """These files, read as a stream."""
    files = [f"{address}/{shard}.parquet" for shard in range(3)]
    return load_dataset("parquet", data_files=files, split="train", streaming=True)


def make(kind: str, address: str, out: Path, accumulation: int, backend: str | None, seen: list[int]) -> Any:
    """A trainer of six steps; `seen` gets the number of rows of every micro-batch."""
    settings: dict[str, Any] = {
        "output_dir": str(out),
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": accumulation,
        "learning_rate": 0.1,
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "lr_scheduler_type": "constant",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        "ddp_backend": backend,
    }

    def collator(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        seen.append(len(rows))
        return padded(rows)

    model, rows = make_model("qwen3", torch.float64), stream_of(address)
    if kind == "plain":
        return Trainer(model, TrainingArguments(**settings), train_dataset=rows, data_collator=collator)
    from trl import SFTConfig, SFTTrainer

    args = SFTConfig(**settings, bf16=False, gradient_checkpointing=False, max_length=None)
    given = {"train_dataset": rows, "data_collator": collator, "processing_class": runs.tokenizer()}
    return SFTTrainer(model, args, **given)


def trained(group: Any, address: str, out: Path, share: bool, accumulation: int, kind: str = "plain") -> Any:
    """Weights after six steps, and how many rows each micro-batch of this process had.

    Args:
        group: of processes that torchrun did not start; None for one process, or those that it did.
    """
    if group is not None:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    seen: list[int] = []
    trainer = make(kind, address, out, accumulation, "gloo" if "RANK" in os.environ else None, seen)
    tt.group_batches(trainer, key="game")
    if share:
        tt.share_prefixes(trainer)
    trainer.train()
    return {name: p.detach() for name, p in trainer.model.named_parameters()}, seen


def are_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return max((one[name] - other[name]).abs().max() for name in one) < 1e-7  # the loss is float32


@pytest.mark.parametrize("share", [True, False])
def test_two_processes_train_what_one_trains(share, two, tmp_path) -> None:
    write_rows(address := f"file://{tmp_path}")
    whole, _ = trained(None, address, tmp_path / "one", False, 4)
    found = two.run(trained, address, tmp_path / "two", share, 2)
    for weights, seen in found:
        assert are_equal(whole, weights)
        assert len(seen) in (12, 13)  # accelerate's loader is a micro-batch ahead
    assert any(a != b for a, b in zip(*(seen for _, seen in found)))  # numbers of rows differ


@pytest.mark.parametrize("kind", ["plain", "sft"])
def test_files_in_memory_are_trained_as_those_of_a_disk(kind, tmp_path) -> None:
    for address in (f"file://{tmp_path}", f"memory://{tmp_path.name}"):
        write_rows(address)
    whole, seen = trained(None, f"file://{tmp_path}", tmp_path / "disk", False, 4, kind)
    weights, found = trained(None, f"memory://{tmp_path.name}", tmp_path / "memory", True, 4, kind)
    assert are_equal(whole, weights) and found == seen and len(seen) in (24, 25)


@contextmanager
def bucket(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """A bucket of moto's server: an address, and the environment in which it is read."""
    reason = "is not installed: make test-hosts"
    pytest.importorskip("s3fs", reason=f"s3fs {reason}")
    moto = pytest.importorskip("moto.server", reason=f"moto {reason}")
    server = moto.ThreadedMotoServer(port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        given = {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_DEFAULT_REGION": "us-east-1"}
        given |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
        with pytest.MonkeyPatch.context() as patch:
            for name, value in given.items():
                patch.setenv(name, value)
            fsspec.filesystem("s3").mkdir("rows")
            write_rows("s3://rows/of/games")
        yield "s3://rows/of/games", given
    finally:
        server.stop()


@contextmanager
def on_hub(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """A data set on a stand-in of the hub."""
    (place := folder / "hub" / "tester" / "games").mkdir(parents=True)
    write_rows(f"file://{place}")
    with hub(folder / "hub") as endpoint:
        yield "hf://datasets/tester/games", {"HF_ENDPOINT": endpoint, "HF_HOME": str(folder), "HF_HUB_OFFLINE": "0"}


@pytest.mark.slow
@pytest.mark.parametrize("place", [bucket, on_hub])
def test_two_processes_of_torchrun_read_files_of_a_server(place, tmp_path) -> None:
    write_rows(f"file://{tmp_path}")
    whole, _ = trained(None, f"file://{tmp_path}", tmp_path / "one", False, 4)
    with place(tmp_path) as (address, environment):
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
        command += [str(free_port()), __file__, address, str(tmp_path)]
        path = os.pathsep.join(str(Path(__file__).parents[part]) for part in (0, 1))
        given = {"PYTHONPATH": f"{path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, env=os.environ | given | environment, capture_output=True, text=True, timeout=300
        )
    assert done.returncode == 0, done.stderr[-6000:]
    found = [torch.load(tmp_path / f"rank{rank}") for rank in range(2)]
    assert all(are_equal(whole, weights) for weights, _ in found)
    assert any(a != b for a, b in zip(*(seen for _, seen in found)))


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


if __name__ == "__main__":  # a process of torchrun
    torch.save(
        trained(None, sys.argv[1], Path(sys.argv[2], "two"), True, 2), Path(sys.argv[2], f"rank{os.environ['RANK']}")
    )

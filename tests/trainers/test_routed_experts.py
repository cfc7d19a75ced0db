"""Recorded experts in trainers: they replace the routers' choices in every micro-batch, and fill never does."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trainer_runs as runs
from datasets import Dataset
from transformers import Trainer, TrainingArguments, default_data_collator
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import treetrain as tt
from support import moe
from treetrain.core.errors import DataError
from treetrain.trainers.batches import experts_of_rows, padded_spans

LAYERS, EXPERTS = 2, 4


def record(ids: list[int]) -> np.ndarray:
    """What a rollout records for these tokens: a function of each of them, none for every fifth id."""
    found = np.full((len(ids), LAYERS, 2), -1)
    for at, token in enumerate(ids):
        for layer in range(LAYERS if token % 5 else 0):
            first = (token + layer) % EXPERTS
            found[at, layer] = first, (first + 1 + token % 3) % EXPERTS
    return found


def padded(rows: list[list[int]], fill: int) -> dict[str, torch.Tensor]:
    """A batch padded on the right, with records padded with `fill`; the last record ends a token early."""
    width = max(map(len, rows))
    ids, mask = (torch.zeros(len(rows), width, dtype=torch.long) for _ in range(2))
    routed = torch.full((len(rows), width, LAYERS, 2), fill)
    for k, row in enumerate(rows):
        ids[k, : len(row)], mask[k, : len(row)] = torch.tensor(row), 1
        own = record(row)[: -1 if k == len(rows) - 1 else None]
        routed[k, : len(own)] = torch.from_numpy(own)
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, "routed_experts": routed}


ROWS = [[2, 3, 4, 6, 7], [2, 3, 4, 8], [2, 3, 4, 6, 9, 11], [2, 3, 4, 6, 7]]


class Own(Trainer):
    """A loss of the user's own."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        return -tt.token_logprobs(model, inputs).sum() / num_items_in_batch


def collator(fill: int) -> Any:
    return lambda rows: padded([row["input_ids"] for row in rows], fill)


@pytest.mark.parametrize(("kind", "fill", "budget"), [(Trainer, -1, None), (Own, 0, 4)])
def test_a_step_is_that_of_each_row_with_its_own_record(kind, fill, budget, tmp_path):
    model, rate = runs.experts(0, torch.float64), 0.5
    args = TrainingArguments(
        output_dir=str(tmp_path), max_steps=1, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        learning_rate=rate, lr_scheduler_type="constant", optim="sgd", save_strategy="no", use_cpu=True, bf16=False,
        report_to=[], disable_tqdm=True, max_grad_norm=0.0, remove_unused_columns=False, dataloader_pin_memory=False,
        train_sampling_strategy="sequential",
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in ROWS]
    trainer = kind(model, args, train_dataset=data, data_collator=collator(fill))
    tt.share_prefixes(trainer, budget)
    with runs.double():
        trainer.train()
    plain = runs.experts(0, torch.float64)
    rows = [tt.Trajectory(row, experts=record(row)) for row in ROWS]
    for k in (1, 3):  # the last of each micro-batch ends a token early
        own = record(ROWS[k])
        own[-1] = -1
        rows[k] = tt.Trajectory(ROWS[k], experts=own)
    with runs.double():
        (logprobs, _), _ = moe.score_rows(plain, rows)
        loss = -sum(x.sum() for x in logprobs) / sum(len(x) for x in logprobs)
        loss.backward()
    assert trainer.state.log_history[0]["train_loss"] == pytest.approx(loss.item(), rel=1e-6)
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        expected = p.detach() - (0 if p.grad is None else rate * p.grad)
        torch.testing.assert_close(q.detach(), expected, rtol=0, atol=1e-12, msg=name)


def grpo(folder: Path, rollout: Any) -> Any:
    """GRPO on a mixture of experts whose completions come from a function."""
    args = GRPOConfig(
        output_dir=str(folder), max_steps=2, per_device_train_batch_size=4, gradient_accumulation_steps=2, bf16=False,
        num_generations=4, max_completion_length=8, use_cpu=True, report_to=[], disable_tqdm=True, num_iterations=2,
        learning_rate=1e-2, optim="sgd", save_strategy="no", dataloader_pin_memory=False, beta=0.1,
        gradient_checkpointing=False,
    )  # fmt: skip
    model = runs.experts(0, torch.float32)
    model.save_pretrained(folder / "start")
    started = type(model).from_pretrained(folder / "start", dtype=torch.float32)
    return GRPOTrainer(
        started, reward_funcs=runs.word_reward, args=args, train_dataset=runs.prompts(16),
        processing_class=runs.tokenizer(), rollout_func=rollout,
    )  # fmt: skip


def rollout(prompts: list[Any], trainer: Any, *, short: int = 0) -> dict[str, Any]:
    """Random completions with the experts that they were routed to, but those of the last token."""
    words = trainer.processing_class
    ids = [words(prompt)["input_ids"] for prompt in prompts]
    draw = torch.Generator().manual_seed(len(prompts))
    made = [torch.randint(2, 40, (3 + k % 3,), generator=draw).tolist() for k in range(len(ids))]
    routed = [record([*p, *c])[: -1 - short].tolist() for p, c in zip(ids, made)]
    routed[0] = None
    logprobs = [[-1.0] * len(c) for c in made]
    return {"prompt_ids": ids, "completion_ids": made, "logprobs": logprobs, "routed_experts": routed}


def test_grpo_routes_each_completion_as_its_rollout_did_in_every_micro_batch(tmp_path, monkeypatch):
    seen: list[tuple[bool, Any]] = []
    score = tt.TreeEngine.score

    def watched(self: Any, rows: Any, **options: Any) -> Any:
        seen.append((self.model is trainer.model, rows))
        return score(self, rows, **options)

    trainer = tt.share_prefixes(grpo(tmp_path, rollout), check=False)
    monkeypatch.setattr(tt.TreeEngine, "score", watched)
    trainer.train()
    policy = [row for own, tree in seen for row in tree.trajectories if own]
    reference = [row for own, tree in seen for row in tree.trajectories if not own]
    assert reference and all(row.experts is None for row in reference)
    without = [row for row in policy if row.experts is None]
    assert 0 < len(without) < len(policy) / 2  # the first row of a generation has no record
    for row in policy:
        if row.experts is not None:
            expected = record(row.ids.tolist())
            expected[-1] = -1
            assert np.array_equal(row.experts, expected)


def test_records_of_other_tokens_are_refused_with_both_numbers(tmp_path):
    trainer = tt.share_prefixes(grpo(tmp_path, lambda prompts, own: rollout(prompts, own, short=2)))
    with pytest.raises(DataError, match=r"routed_experts of row 1 of the rollout has \d+ tokens, and its prompt and"):
        trainer.train()


def padded_columns(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A collator that reads the column, if it is still there."""
    batch = padded([row["input_ids"] for row in rows], -1)
    return batch if "routed_experts" in rows[0] else {name: batch[name] for name in batch if name != "routed_experts"}


def of_columns(folder: Path, data: Any, collate: Any, **own: Any) -> Any:
    """A plain Trainer with the default of `remove_unused_columns`."""
    args = TrainingArguments(
        output_dir=str(folder), max_steps=1, per_device_train_batch_size=4, use_cpu=True, bf16=False, report_to=[],
        disable_tqdm=True, save_strategy="no", dataloader_pin_memory=False, **own,
    )  # fmt: skip
    model = runs.experts(0, torch.float32)
    return tt.share_prefixes(Trainer(model, args, train_dataset=data, data_collator=collate), check=False)


@pytest.mark.parametrize("kind", [Dataset.from_list, list, lambda rows: Dataset.from_list(rows).to_iterable_dataset()])
def test_a_column_of_records_stays_in_the_data(kind, tmp_path, monkeypatch):
    """Though `remove_unused_columns`, which is True by default, takes out what the model's forward does not name."""
    seen: list[Any] = []
    score = tt.TreeEngine.score
    watched = lambda self, tree, **options: seen.extend(tree.trajectories) or score(self, tree, **options)  # noqa: E731
    monkeypatch.setattr(tt.TreeEngine, "score", watched)
    rows = [{"input_ids": row, "labels": row, "routed_experts": record(row).tolist()} for row in ROWS]
    of_columns(tmp_path, kind(rows), padded_columns).train()
    assert len(seen) == len(ROWS) and all(row.experts is not None for row in seen)


@pytest.mark.parametrize("name", ["routed_experts", "sampling_mask", "adapter_names"])
def test_a_column_that_the_collator_drops_is_refused(name, tmp_path):
    rows = [{"input_ids": [2, 3, 4], "labels": [2, 3, 4], name: "dropped"} for _ in range(4)]
    with pytest.raises(ValueError, match=f"train_dataset has a column {name}, and its batch has none: the data_coll"):
        of_columns(tmp_path, rows, default_data_collator).train()  # it leaves out strings
    for remove in (True, False):
        config = SFTConfig(
            output_dir=str(tmp_path), max_steps=1, report_to=[], use_cpu=True, bf16=False, max_length=None,
            remove_unused_columns=remove, gradient_checkpointing=False,
        )  # fmt: skip
        model = runs.model()
        trainer = SFTTrainer(model, config, train_dataset=Dataset.from_list(rows), processing_class=runs.tokenizer())
        with pytest.raises(ValueError, match=f"SFTTrainer drops the column {name} of its train_dataset"):
            tt.share_prefixes(trainer)
    from test_other_trl_trainers import build_stable_distillation, made

    trainer = made(build_stable_distillation, tmp_path)
    trainer.train_dataset = trainer.train_dataset.map(lambda _: {name: 1})
    trainer.data_collator = default_data_collator
    with pytest.raises(ValueError, match=f"DistillationTrainer and the column {name} of train_dataset, which it does"):
        tt.share_prefixes(trainer)


def test_records_are_laid_out_as_the_batch_is():
    batch = padded(ROWS, 0)
    spans = padded_spans(batch["attention_mask"])
    found = experts_of_rows(batch["routed_experts"], spans, batch["input_ids"])
    for k, (own, row) in enumerate(zip(found, ROWS)):
        expected = record(row)
        expected[-1:] = -1 if k == 3 else expected[-1:]
        assert own is not None and np.array_equal(own, expected)
    listed = [record(row) for row in ROWS[:3]]
    assert experts_of_rows([*listed, None], spans, batch["input_ids"])[3] is None
    with pytest.raises(DataError, match="records of 3 rows, and the batch 4"):
        experts_of_rows(listed, spans, batch["input_ids"])
    with pytest.raises(DataError, match=r"shape \(4, 5, 2, 2\) and input_ids \(4, 6\)"):
        experts_of_rows(batch["routed_experts"][:, 1:], spans, batch["input_ids"])
    with pytest.raises(ValueError, match=r"only in a trainer with tt.share_prefixes"):
        tt.token_logprobs(runs.experts(0, torch.float32), batch)

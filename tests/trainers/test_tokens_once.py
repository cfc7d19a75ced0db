"""count="once" in trainers: a step is that of one row for each sampled token, by a formula written out row by row."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import trainer_runs as runs
from datasets import Dataset
from transformers import DataCollatorForLanguageModeling, DataCollatorForSeq2Seq, Trainer, TrainingArguments
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import treetrain as tt
from support import images
from treetrain.core.errors import DataError
from treetrain.trainers.once import data_counted_once

# Calls of two episodes that begin alike. In each the answers 5 6 and 8 come again, in a later call or another branch.
IDS = [
    [2, 3, 4, 5, 6],
    [2, 3, 4, 5, 6, 7, 8],
    [2, 3, 4, 5, 6, 7, 8, 9, 10, 11],
    [2, 3, 4, 5, 6, 12, 13],
    [2, 3, 4, 5, 6],
    [2, 3, 4, 5, 6, 7, 8],
    [2, 3, 4, 5, 7, 8, 9],
    [20, 3, 4, 5, 6],
]
TRAINED = [{3, 4}, {3, 4, 6}, {3, 4, 6, 8, 9}, {3, 4, 6}, {3, 4}, {3, 4, 6}, {3, 5, 6}, {3, 4}]
EPISODES = [0, 0, 0, 0, 1, 1, 1, 1]
RATE = 0.5


def data(*, episodes: bool = True, **columns: Any) -> Dataset:
    """The rows with labels."""
    labels = [[x if at in on else -100 for at, x in enumerate(ids)] for ids, on in zip(IDS, TRAINED)]
    own = {"episode": EPISODES} if episodes else {}
    return Dataset.from_dict({"input_ids": IDS, "labels": labels, **own, **columns})


def by_hand(*, episodes: bool = True) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of a step and the weights after it, from each row alone and a set of the tokens that have been seen."""
    model = runs.model(dtype=torch.float64)
    seen, total = set(), torch.zeros((), dtype=torch.float64)
    with runs.double():
        for ids, on, episode in zip(IDS, TRAINED, EPISODES):
            logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            for at in sorted(on):
                name = (episode if episodes else None, *ids[: at + 1])
                if name not in seen:
                    seen.add(name)
                    total = total - logprobs[at - 1, ids[at]]
        (total / len(seen)).backward()
    grads = {name: p - RATE * p.grad for name, p in model.named_parameters()}
    return total.item() / len(seen), {name: p.detach() for name, p in grads.items()}


def trained(name: str, folder: Path, dataset: Any, *, budget: int | None = None, size: int = 1, **options: Any) -> Any:
    """A trainer after one step of all eight rows, in two micro-batches."""
    settings: dict[str, Any] = {
        "output_dir": str(folder), "max_steps": 1, "per_device_train_batch_size": 4 // size, "report_to": [],
        "gradient_accumulation_steps": 2, "learning_rate": RATE, "lr_scheduler_type": "constant", "optim": "sgd",
        "logging_steps": 1, "save_strategy": "no", "use_cpu": True, "bf16": False, "disable_tqdm": True,
        "max_grad_norm": 0.0, "gradient_checkpointing": False, "dataloader_pin_memory": False,
        "ddp_backend": "gloo" if size > 1 else None,
    }  # fmt: skip
    model, words = runs.model(dtype=torch.float64), runs.tokenizer()
    if name == "sft":
        args = SFTConfig(**{"max_length": None, **settings})
        trainer: Any = SFTTrainer(model, args, train_dataset=dataset, processing_class=words)
    else:
        model.loss_function = runs._mean_in_float64
        collator = DataCollatorForSeq2Seq(words, padding=True)
        trainer = Trainer(model, TrainingArguments(**settings), train_dataset=dataset, data_collator=collator)
    tt.share_prefixes(trainer, budget, count="once", **options)
    with runs.double():
        trainer.train()
    return trainer


def check(trainer: Any, expected: tuple[float, dict[str, torch.Tensor]]) -> None:
    loss, weights = expected
    assert trainer.state.log_history[0]["loss"] == pytest.approx(loss, rel=1e-6)  # logs are of float32
    for name, p in trainer.model.named_parameters():
        torch.testing.assert_close(p.detach(), weights[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize(("name", "budget"), [("sft", None), ("plain", 4), ("sft", 4), ("plain", None)])
def test_a_step_trains_each_sampled_token_once(name, budget, tmp_path):
    check(trained(name, tmp_path, data(), budget=budget), by_hand())


def test_rows_without_episodes_repeat_any_earlier_row(tmp_path):
    expected = by_hand(episodes=False)
    assert expected[0] != pytest.approx(by_hand()[0], rel=1e-6)
    check(trained("sft", tmp_path, data(episodes=False)), expected)
    check(trained("plain", tmp_path, [dict(row) for row in data(episodes=False)], check=False), expected)


def of_ranks(group: Any, folder: str) -> tuple[float, dict[str, torch.Tensor]]:
    """The logged loss and the weights of a rank after one step of all rows."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    rank, size = dist.get_rank(group), dist.get_world_size(group)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    trainer = trained("sft", Path(folder), data(), size=size)
    weights = {name: p.detach() for name, p in trainer.accelerator.unwrap_model(trainer.model).named_parameters()}
    return trainer.state.log_history[0]["loss"], weights


def test_two_processes_count_a_token_once_between_them(two, tmp_path):
    loss, weights = by_hand()
    for logged, found in two.run(of_ranks, str(tmp_path), timeout=400):
        assert logged == pytest.approx(loss, rel=1e-6)
        for name, p in found.items():
            torch.testing.assert_close(p, weights[name], rtol=0, atol=1e-12)


def test_facts_of_one_token_that_differ_are_an_error_with_both_values(tmp_path):
    advantages = [[1.0 + (n == 1)] * len(ids) for n, ids in enumerate(IDS)]
    with pytest.raises(
        DataError, match=r"rows 0 and 1 both train token 3 .*advantages 1 and 2; count='once' needs one"
    ):
        trained("plain", tmp_path, data(advantages=advantages))
    check(trained("plain", tmp_path, data(advantages=[[1.0] * len(ids) for ids in IDS])), by_hand())


def plain(folder: Path, dataset: Any, *, kind: Any = Trainer, model: Any = None, **settings: Any) -> Trainer:
    """A trainer whose collator gets all columns."""
    settings = {"report_to": [], "use_cpu": True, "bf16": False, "remove_unused_columns": False} | settings
    collator = DataCollatorForSeq2Seq(runs.tokenizer(), padding=True)
    args = TrainingArguments(output_dir=str(folder), **settings)
    return kind(model or runs.model(), args, train_dataset=dataset, data_collator=collator)


def labelled(trainer: Trainer) -> list[list[int]]:
    """Places of the labels that count."""
    found: Any = data_counted_once(trainer)
    return [[at for at, label in enumerate(row["labels"]) if label != -100] for row in found]


def own(ids: tuple[int, ...] = (2, 9, 3, 4), **columns: list[Any]) -> list[dict[str, Any]]:
    """Rows of these ids, the last two trained, that differ in some columns."""
    rows = max(map(len, columns.values()))
    labels = [-100] * (len(ids) - 2) + list(ids[-2:])
    return [
        {"input_ids": list(ids), "labels": labels} | {name: column[k] for name, column in columns.items()}
        for k in range(rows)
    ]


def test_rows_with_other_images_or_experts_sampled_other_tokens(tmp_path):
    seen = [images.image(seed).inputs for seed in (0, 1, 0)]
    ids = images.row(5, images.image(0), 7, 8).ids.tolist()
    pictured = own(ids=tuple(ids), **{name: [one[name] for one in seen] for name in seen[0]})
    vision = images.image_model("Qwen3-VL")
    last = [len(ids) - 2, len(ids) - 1]
    collator = images_of_rows
    with_images = plain(tmp_path, pictured, model=vision)
    with_images.data_collator = collator
    assert labelled(with_images) == [last, last, []]
    refused(plain(tmp_path, pictured), "train_dataset has pixel_values, image_grid_thw, and the configuration of Qwen3")
    records = [np.tile([0, 1], (4, 2, 1)) for _ in range(3)]
    records[1][2], records[2] = (
        2 + records[1][2] % 2,
        records[2][:3],
    )  # another expert at token 2; a record that ends early
    routed = own(routed_experts=records)
    for row, record in zip(routed, records):
        row["routed_experts"] = record.tolist()
    trainer = plain(tmp_path, routed)
    trainer.data_collator = images_of_rows
    assert labelled(trainer) == [[2, 3], [3], []]
    assert labelled(plain(tmp_path, Dataset.from_list(routed), remove_unused_columns=True)) == [[2, 3], [], []]


def images_of_rows(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A collator of rows of one length."""
    return {name: torch.tensor([row[name] for row in rows]) for name in ("input_ids", "labels")}


def test_columns_that_a_model_or_a_loss_may_read_must_agree(tmp_path):
    for columns in (
        {"adapter_names": ["a", "b"]},
        {"weights": [[0, 0, 1, 1], [0, 0, 2, 1]]},
        {"spans": [[[1], [2, 3]], []]},
    ):
        (name,) = columns
        with pytest.raises(DataError, match=rf"rows 0 and 1 of train_dataset both train token 2 .*columns {name} are"):
            labelled(plain(tmp_path, own(**columns)))
        same = {name: [values[0]] * 2 for name, values in columns.items()}
        trainer = plain(tmp_path, own(**same))
        trainer.data_collator = images_of_rows
        assert labelled(trainer) == [[2, 3], []]
        apart = own(**columns, episode=["a", "b"])
        assert labelled(plain(tmp_path, apart)) == [[2, 3], [2, 3]]
    longer = own(weights=[[0, 0, 1, 1]]) + own(ids=(2, 9, 3, 4, 5), weights=[[0, 0, 1, 1, 7]])
    longer[1]["labels"] = [-100, -100, 3, 4, 5]
    trainer = plain(tmp_path, longer)
    trainer.data_collator = images_of_rows
    assert labelled(trainer) == [[2, 3], [4]]
    padded = own(attention_mask=[[1] * 4, [0, 1, 1, 1]])
    with pytest.raises(DataError, match="row 1 of train_dataset begins with padding"):
        labelled(plain(tmp_path, padded))


class Own(Trainer):
    """A loss of the user's own."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        return -tt.token_logprobs(model, inputs).sum() / num_items_in_batch


def test_a_loss_of_ones_own_counts_once_if_it_says_that_it_sums_tokens(tmp_path):
    refused(plain(tmp_path, data(), kind=Own), r"Own\.compute_loss is a loss of your own.*trainer\.sums_tokens = True")
    set_later = plain(tmp_path, data())
    set_later.compute_loss = lambda *args, **kwargs: 0.0  # type: ignore[method-assign]
    refused(set_later, r"Trainer\.compute_loss is a loss of your own")
    function = plain(tmp_path, data())
    function.compute_loss_func = lambda outputs, labels, num_items_in_batch: 0.0
    refused(function, "compute_loss_func is a loss of your own.*the function.sums_tokens = True")
    function.compute_loss_func.sums_tokens = True  # type: ignore[attr-defined]
    assert labelled(function)[0] == [3, 4]
    settings = {"max_steps": 1, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "optim": "sgd"}
    settings |= {"learning_rate": RATE, "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "logging_steps": 1}
    settings |= {"save_strategy": "no", "disable_tqdm": True}
    model = runs.model(dtype=torch.float64)
    trainer = plain(tmp_path, data(), kind=Own, model=model, **settings, remove_unused_columns=True)
    trainer.sums_tokens = True  # type: ignore[attr-defined]
    tt.share_prefixes(trainer, count="once")
    with runs.double():
        trainer.train()
    check(trainer, by_hand())


def test_means_over_a_part_of_a_step_are_refused(tmp_path):
    mean = plain(tmp_path, data(), gradient_accumulation_steps=2)
    mean.model_accepts_loss_kwargs = False
    refused(mean, "the model takes no num_items_in_batch, so that its loss is a mean over a micro-batch")
    alone = plain(tmp_path, data(), remove_unused_columns=True)
    alone.model_accepts_loss_kwargs = False
    assert labelled(alone)[0] == [3, 4]


def test_rows_that_only_repeat_are_counted_in_the_log(tmp_path, caplog):
    labelled(plain(tmp_path, data(), remove_unused_columns=True))
    assert caplog.messages == ["count='once': 10 of 23 trained tokens repeat one of an earlier row"]
    caplog.clear()
    labelled(plain(tmp_path, Dataset.from_list([*data(), data()[0]])))
    assert "12 of 25 trained tokens repeat" in caplog.text and "; 1 rows only repeat: a step of such" in caplog.text


def refused(trainer: Any, message: str) -> None:
    kind, dataset = type(trainer), trainer.train_dataset
    with pytest.raises((ValueError, DataError), match=message):
        tt.share_prefixes(trainer, count="once")
    assert type(trainer) is kind and trainer.train_dataset is dataset
    assert not hasattr(trainer, "prefix_sharing")


def test_completions_of_a_rollout_that_branch_count_a_turn_once_by_their_env_mask(tmp_path):
    """GRPO's own normaliser counts what the mask leaves: a step is that of one row for each sampled token."""
    turn, ends = [5, 6, 7, 8], ([10, 11], [12], [13, 14, 15], [16, 17])

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        encoded = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        masks = [[int(k == 0)] * len(turn) + [1] * len(end) for k, end in enumerate(ends)]
        made = [turn + end for end in ends]
        none = [[0.0] * len(row) for row in made]
        return {"prompt_ids": encoded, "completion_ids": made, "logprobs": none, "env_mask": masks}

    rewards = [0.0, 1.0, 3.0, 4.0]
    settings: dict[str, Any] = {
        "output_dir": str(tmp_path), "max_steps": 1, "per_device_train_batch_size": 2, "report_to": [],
        "gradient_accumulation_steps": 2, "learning_rate": RATE, "lr_scheduler_type": "constant", "optim": "sgd",
        "logging_steps": 1, "save_strategy": "no", "use_cpu": True, "bf16": False, "disable_tqdm": True,
        "max_grad_norm": 0.0, "gradient_checkpointing": False, "num_generations": 4, "max_completion_length": 8,
        "loss_type": "dapo", "beta": 0.0, "temperature": 1.0,
    }  # fmt: skip
    questions = runs.prompts(1)
    trainer = GRPOTrainer(
        runs.model(dtype=torch.float64), reward_funcs=lambda completions, **_: rewards, args=GRPOConfig(**settings),
        train_dataset=questions, processing_class=runs.tokenizer(), rollout_func=rollout,
    )  # fmt: skip
    tt.share_prefixes(trainer, check=False)
    with runs.double():
        trainer.train()
    model, prompt = runs.model(dtype=torch.float64), runs.tokenizer()(questions[0]["prompt"])["input_ids"]
    given = torch.tensor(rewards)  # TRL computes advantages in float32
    advantages = ((given - given.mean()) / (given.std() + 1e-4)).double()
    seen, total = set(), torch.zeros((), dtype=torch.float64)
    with runs.double():
        for end, advantage in zip(ends, advantages):
            ids = prompt + turn + end
            logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            for at in range(len(prompt), len(ids)):
                if (name := tuple(ids[: at + 1])) not in seen:
                    seen.add(name)
                    total = total - advantage * logprobs[at - 1, ids[at]]
        (total / len(seen)).backward()
    for (name, p), q in zip(trainer.model.named_parameters(), model.parameters()):
        torch.testing.assert_close(p.detach(), (q - RATE * q.grad).detach(), rtol=0, atol=1e-12, msg=name)


REFUSED = {"grpo": "draws every row by itself.*env_mask", "dpo": "compares whole rows", "reward": "trains no tokens"}


@pytest.mark.parametrize("name", REFUSED)
def test_trainers_whose_rows_do_not_repeat_samples_are_refused_by_name(name, tmp_path):
    settings = {"output_dir": str(tmp_path), "report_to": [], "use_cpu": True, "bf16": False}
    refused(runs.BUILDERS[name](settings, torch.float32, tmp_path), rf"Trainer {REFUSED[name]}.*SFTTrainer and a plain")


def test_data_that_cannot_be_counted_are_refused(tmp_path):
    def plain(dataset: Any, collator: Any = None) -> Trainer:
        args = TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True, bf16=False)
        collator = collator or DataCollatorForSeq2Seq(runs.tokenizer(), padding=True)
        return Trainer(runs.model(), args, train_dataset=dataset, data_collator=collator)

    with pytest.raises(ValueError, match="count='twice' is neither"):
        tt.share_prefixes(plain(data()), count="twice")  # type: ignore[arg-type]
    refused(plain(Dataset.from_dict({"text": ["a"]})), "rows of input_ids, and train_dataset has text")
    refused(plain(data().add_column("seq_lengths", [[3]] * 8)), "packing=False")
    refused(plain(None), "give a train_dataset with a length")
    refused(plain(data().map(lambda row: {"labels": row["labels"][1:]})), "row 0 .* 5 input_ids and 4 labels")
    sft = SFTTrainer(
        runs.model(), SFTConfig(str(tmp_path), max_length=None, use_cpu=True, bf16=False, report_to=[]),
        train_dataset=data(), processing_class=runs.tokenizer(),
    )  # fmt: skip
    sft.train_dataset = (
        data().map(lambda row: {"completion_mask": [1] * len(row["input_ids"])}).remove_columns("labels")
    )
    refused(sft, "train_dataset has completion_mask without labels; give labels")
    makes_labels = DataCollatorForLanguageModeling(runs.tokenizer(), mlm=False)
    refused(plain(data(), makes_labels), "DataCollatorForLanguageModeling.*makes labels of its own|cannot take them")

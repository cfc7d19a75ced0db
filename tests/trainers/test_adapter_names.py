"""Batches whose rows each name an adapter of peft: one tree for each adapter, whose gradients are those of its rows."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trainer_runs as runs
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

import treetrain as tt
from treetrain.core.errors import DataError
from treetrain.trainers.step_scores import TreeScores

RATE = 0.5
NAMES = ("one", "two")
ROWS = [
    ([2, 3, 4, 5, 9], "one"),
    ([2, 3, 4, 6], "two"),
    ([2, 3, 4, 5, 8, 8], "one"),
    ([2, 3, 4, 5, 9], "two"),
    ([2, 3, 7], "two"),
    ([2, 3, 7, 8], "two"),
    ([2, 3, 4, 5, 7], "two"),
    ([2, 3, 7, 9], "two"),
]
"""In batches of four, the first has rows of both adapters, the second of one."""


def adapted(dtype: torch.dtype = torch.float64) -> Any:
    """A model with two adapters that have learned something, both of which are trained."""
    config = LoraConfig(r=2, lora_dropout=0.0, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(runs.model(dtype=dtype), config, adapter_name="one")
    model.add_adapter("two", config)
    model.set_requires_grad(list(NAMES), True)
    model.to(dtype)
    draw = torch.Generator().manual_seed(3)
    for p in model.parameters():
        if p.requires_grad:
            p.data.add_(0.3 * torch.randn(p.shape, generator=draw).to(p))
    return model


def batch(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Rows padded on their right, the first token without a label."""
    width = max(len(row["input_ids"]) for row in rows)
    ids, mask = (torch.zeros(len(rows), width, dtype=torch.long) for _ in range(2))
    for k, row in enumerate(rows):
        ids[k, : len(row["input_ids"])], mask[k, : len(row["input_ids"])] = torch.tensor(row["input_ids"]), 1
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, 0] = -100
    labels[[k for k, row in enumerate(rows) if not row["labels"]]] = -100
    return {
        "input_ids": ids, "attention_mask": mask, "labels": labels,
        "adapter_names": [row["adapter_names"] for row in rows],
    }  # fmt: skip


class Own(Trainer):
    """A loss of the user's own: log-probabilities, those of a further id, entropies, a reference without adapters."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        ids = (inputs["input_ids"][:, 1:, None] + 7) % 40
        adapters = self.accelerator.unwrap_model(model)
        with torch.no_grad(), adapters.disable_adapter():
            reference = tt.token_logprobs(model, inputs)
        adapters.set_requires_grad(list(NAMES), True)  # peft has frozen all but the active one
        logprobs, entropies, others = tt.token_logprobs(model, inputs, return_entropy=True, ids=ids)
        loss = -(logprobs + 0.1 * entropies + 0.2 * others[..., 0]) + 0.3 * (logprobs - reference) ** 2
        return loss.sum() / num_items_in_batch * self.accelerator.num_processes


def own_loss(model: Any, row: list[int]) -> torch.Tensor:
    """The sum of `Own` for a row by itself, from logits."""
    ids = torch.tensor([row])
    scores, target = model(input_ids=ids).logits[0, :-1].log_softmax(-1), ids[0, 1:, None]
    with torch.no_grad(), model.disable_adapter():
        reference = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(-1, target)[:, 0]
    logprobs, other = scores.gather(-1, target)[:, 0], scores.gather(-1, (target + 7) % 40)[:, 0]
    entropies = -(scores.exp() * scores).sum(-1)
    return (-(logprobs + 0.1 * entropies + 0.2 * other) + 0.3 * (logprobs - reference) ** 2).sum()


def plain_loss(model: Any, row: list[int]) -> torch.Tensor:
    """The negative log-likelihood of a row by itself."""
    ids = torch.tensor([row])
    return -model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None]).sum()


def of_outputs(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """A function for `compute_loss_func`."""
    return -tt.token_logprobs(outputs, labels).sum() / num_items_in_batch


def made(folder: Path, kind: type[Trainer] = Trainer, model: Any = None, budget: Any = None, **own: Any) -> Any:
    """A trainer of one step of all rows, in two micro-batches."""
    settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    function = own.pop("compute_loss_func", None)
    rows, without_labels = own.pop("rows", ROWS), own.pop("without_labels", ())
    args = TrainingArguments(
        output_dir=str(folder), max_steps=1, learning_rate=RATE, lr_scheduler_type="constant", optim="sgd",
        save_strategy="no", use_cpu=True, bf16=False, report_to=[], disable_tqdm=True, max_grad_norm=0.0,
        remove_unused_columns=False, dataloader_pin_memory=False, train_sampling_strategy="sequential",
        **{**settings, **own},
    )  # fmt: skip
    data = [
        {"input_ids": ids, "labels": [] if k in without_labels else ids, "adapter_names": name}
        for k, (ids, name) in enumerate(rows)
    ]
    model = adapted() if model is None else model
    return tt.share_prefixes(
        kind(model, args, train_dataset=data, data_collator=batch, compute_loss_func=function), budget
    )


def check(trained: Any, loss_of: Any, rows: list[tuple[list[int], str]]) -> float:
    """Compare the weights after a step with those by the gradients of every row by itself; returns the loss."""
    plain, total = adapted(), 0.0
    plain.eval()
    count = sum(len(ids) - 1 for ids, _ in rows)
    for ids, name in rows:
        plain.set_adapter(name)
        plain.set_requires_grad(list(NAMES), True)
        loss = loss_of(plain, ids) / count
        loss.backward()
        total += loss.item()
    moved = set()
    for (name, p), q in zip(plain.named_parameters(), trained.parameters(), strict=True):
        expected = p.detach() - (0 if p.grad is None else RATE * p.grad)
        torch.testing.assert_close(q.detach(), expected, rtol=0, atol=1e-12, msg=name)
        moved |= {own for own in NAMES if f".{own}." in name and not torch.equal(p, q)}
    assert moved == {name for _, name in rows}
    return total


def trees_of(trainer: Any) -> list[tuple[str, int]]:
    """Train; the trees that were scored: the active adapter, and the number of rows."""
    trees: list[tuple[str, int]] = []
    score = TreeScores.score

    def watched(self: TreeScores, *args: Any) -> Any:
        without = "" if torch.is_grad_enabled() else " without gradient"
        trees.append((trainer.model.active_adapter + without, len(self.tree.trajectories)))
        return score(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TreeScores, "score", watched)
        trainer.train()
    return trees


@pytest.mark.parametrize("budget", [None, 4])
@pytest.mark.parametrize(
    ("kind", "function", "loss_of"),
    [(Trainer, None, plain_loss), (Trainer, of_outputs, plain_loss), (Own, None, own_loss)],
)
def test_each_adapter_gets_the_gradients_of_its_own_rows(kind, function, loss_of, budget, tmp_path):
    trainer = made(tmp_path, kind, budget=budget, compute_loss_func=function)
    with runs.double():
        trees = trees_of(trainer)
        loss = check(trainer.model, loss_of, ROWS)
    assert trainer.state.log_history[0]["train_loss"] == pytest.approx(loss, rel=1e-6)
    # A tree for each adapter of a micro-batch; without adapters one for all rows of the step.
    assert [tree for tree in trees if "without" not in tree[0]] == [("one", 2), ("two", 2), ("two", 4)]
    assert [rows for name, rows in trees if "without" in name] == ([8] if kind is Own else [])
    assert trainer.model.active_adapter == "one"
    assert all(p.requires_grad for name, p in trainer.model.named_parameters() if "lora" in name)


def test_micro_batches_of_one_adapter_each_share_nothing_with_those_of_the_other(tmp_path):
    rows = sorted(ROWS, key=lambda row: row[1])
    trainer = made(tmp_path, rows=rows, per_device_train_batch_size=2, gradient_accumulation_steps=4)
    with runs.double():
        assert trees_of(trainer) == [("one", 2), ("two", 2), ("two", 2), ("two", 2)]
        check(trainer.model, plain_loss, rows)


def test_gradient_checkpointing_runs_layers_again_through_the_adapter_of_their_rows(tmp_path):
    trainer = made(tmp_path, gradient_checkpointing=True)
    with runs.double():
        trainer.train()
        check(trainer.model, plain_loss, ROWS)


def test_an_evaluation_scores_each_row_through_its_adapter(tmp_path):
    trainer = made(tmp_path, prediction_loss_only=True, per_device_eval_batch_size=4)
    held_out = [{"input_ids": ids, "labels": ids, "adapter_names": name} for ids, name in ROWS[:4]]
    with runs.double():
        found = trainer.evaluate(held_out)["eval_loss"]
        plain = adapted().eval()
        expected = []
        for ids, name in ROWS[:4]:
            plain.set_adapter(name)
            expected.append(plain_loss(plain, ids).item())
    assert found == pytest.approx(sum(expected) / sum(len(ids) - 1 for ids, _ in ROWS[:4]), rel=1e-6)


def on_ranks(group: Any, folder: str, silent: bool) -> list[float]:
    """Train on these processes: the first micro-batch of one of them has rows of both adapters, all others of one.

    Args:
        silent: only one row has labels, and its adapter is not the first of its micro-batch.
    """
    from accelerate.state import AcceleratorState, GradientState, PartialState

    rank, size = dist.get_rank(group), dist.get_world_size(group)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    rows, trained = [ROWS[k] for k in (0, 1, 3, 4, 2, 5, 6, 7)], range(8)
    settings: dict[str, Any] = {"per_device_train_batch_size": 2}
    if silent:
        rows, trained = rows[:4], [1]
        settings |= {"without_labels": (0, 2, 3), "gradient_accumulation_steps": 1}
    trainer = made(Path(folder), Own, rows=rows, ddp_backend="gloo", **settings)
    with runs.double():
        trainer.train()
        check(trainer.model, own_loss, [rows[k] for k in trained])
    assert trainer.accelerator.num_processes == size
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()]).tolist()


@pytest.mark.parametrize("silent", [False, True])
def test_two_processes_with_rows_of_different_adapters_train_as_each_row_by_itself(two, silent, tmp_path):
    ranks = two.run(on_ranks, str(tmp_path), silent, timeout=100)
    assert ranks[0] == ranks[1]


def test_what_names_no_adapter_is_refused_with_the_row(tmp_path):
    with pytest.raises(DataError, match=r"row 1 has the adapter 'three'; .*one, two"):
        made(tmp_path, rows=[ROWS[0], (ROWS[1][0], "three")]).train()
    with pytest.raises(TypeError, match=r"adapter_names is for a peft\.PeftModel, and the model is a Qwen3ForCausalLM"):
        made(tmp_path, model=runs.model(dtype=torch.float64)).train()
    frozen = adapted()
    frozen.set_requires_grad("two", False)
    with pytest.raises(ValueError, match="row 1 has the adapter 'two', whose weights are all frozen"):
        made(tmp_path, model=frozen).train()
    rows = batch([{"input_ids": ids, "labels": ids, "adapter_names": name} for ids, name in ROWS])
    trainer = made(tmp_path)
    with pytest.raises(DataError, match="there are 8 rows and 7 adapter_names"):
        tt.token_logprobs(trainer.model, {**rows, "adapter_names": rows["adapter_names"][1:]})
    with pytest.raises(ValueError, match="the batch has adapter_names, which chooses each row's adapter only in"):
        tt.token_logprobs(adapted(), rows)


class Forgets(Trainer):
    """Calls its model without the names."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        return model(input_ids=inputs["input_ids"], labels=inputs["labels"]).loss


def test_a_trainer_that_does_not_hand_the_names_to_its_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="Forgets trains all of its rows through the active adapter"):
        made(tmp_path, Forgets).train()
    config = SFTConfig(
        output_dir=str(tmp_path), max_steps=1, report_to=[], use_cpu=True, bf16=False, disable_tqdm=True,
        save_strategy="no", max_length=None, gradient_checkpointing=False,
    )  # fmt: skip
    trainer = SFTTrainer(
        adapted(torch.float32), config, train_dataset=runs.answers(8), processing_class=runs.tokenizer()
    )
    collate = trainer.data_collator
    trainer.data_collator = lambda rows: {**collate(rows), "adapter_names": ["two"] * len(rows)}
    with pytest.raises(ValueError, match="SFTTrainer trains all of its rows through the active adapter"):
        tt.share_prefixes(trainer).train()

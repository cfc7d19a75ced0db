"""After its first steps a trainer says what sharing gains, and once what would gain more."""

import warnings

import pytest
import torch
import trainer_runs as runs
from trainer_runs import BUILDERS, train

import treetrain as tt
from support.tree_runs import branching_rows, run, small_model
from treetrain.trainers import gains


@pytest.mark.slow
def test_a_line_says_what_the_first_steps_gained(tmp_path, capsys):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="share_prefixes")
        train(BUILDERS["grpo"], tmp_path, shared=True, steps=4)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("share_prefixes")]
    assert "in the first 3 steps" in line and "tokens were computed" in line and "times fewer" in line
    assert "times as fast by FLOPs" in line and " measured" in line


def shuffled(settings, dtype, folder):
    trainer = BUILDERS["plain"](settings, dtype, folder)
    trainer.train_dataset = runs.tokens(400)
    return trainer


def test_rows_that_were_shuffled_apart_are_told_of_group_batches(tmp_path):
    few = {"per_device_train_batch_size": 4, "seed": 1}
    with pytest.warns(
        UserWarning, match=r"different steps.*could be shared.*tt\.group_batches\(trainer, key=\"input_ids\"\)"
    ):
        train(shuffled, tmp_path, shared=True, steps=3, **few)

    def grouped(*args):
        return tt.group_batches(shuffled(*args))

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="share_prefixes")
        train(grouped, tmp_path, shared=True, steps=3, **few)


class ReadsLogits(runs.GRPOTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
        logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        return -(logprobs.mean(-1) * inputs["advantages"]).mean()


def test_a_loss_that_reads_logits_is_told_how_to_share(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "GRPOTrainer", ReadsLogits)
    with pytest.warns(UserWarning, match=r"3 calls .* asked for logits.*% could be shared.*token_logprobs") as said:
        train(BUILDERS["grpo"], tmp_path, shared=True, steps=5, num_iterations=1)
    (line,) = [str(each.message) for each in said if "share_prefixes" in str(each.message)]
    assert "no call of the model was answered from a tree" in line and len(line) <= 400


# ---- hints


def test_generations_that_are_trained_in_several_steps_are_told_to_accumulate(tmp_path):
    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 8}
    with pytest.warns(UserWarning, match=r"could be shared\. Set gradient_accumulation_steps=8"):
        train(BUILDERS["grpo"], tmp_path, shared=True, steps=3, num_iterations=1, **settings)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="share_prefixes")
        train(BUILDERS["grpo"], tmp_path, shared=True, steps=3, **settings | {"gradient_accumulation_steps": 8})


def line_of(capsys):
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("share_prefixes")]
    return line


def test_a_tree_that_is_slower_is_told_what_to_try(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gains.Gains, "add_backward", lambda self, scored: setattr(self, "_measured", 0.4))
    train(BUILDERS["grpo"], tmp_path, shared=True, steps=3)
    line = line_of(capsys)
    assert "0.4 measured. That is slower than without" in line and "which can be more" not in line
    assert "more rows in a step" in line and "leave share_prefixes out" in line


def test_rows_without_common_prefixes_are_told_so(tmp_path, capsys):
    def apart(*args):
        trainer = BUILDERS["plain"](*args)
        rows = [{"input_ids": [2 + k, *range(20, 30)], "labels": [-100, *range(20, 30)]} for k in range(32)]
        trainer.train_dataset = runs.Dataset.from_list(rows)
        return trainer

    train(apart, tmp_path, shared=True, steps=3)
    line = line_of(capsys)
    assert "The rows of a step have no prefixes in common: leave share_prefixes out" in line
    assert "treetrain inspect" in line


def test_a_run_without_a_tree_is_told_what_asks_for_one(tmp_path, capsys, monkeypatch):
    class OwnOutput(runs.SFTTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return model(inputs_embeds=self.model.get_input_embeddings()(inputs["input_ids"])).logits.square().mean()

    monkeypatch.setattr(runs, "SFTTrainer", OwnOutput)
    train(BUILDERS["sft"], tmp_path, shared=True, steps=3)
    line = line_of(capsys)
    assert "no call of the model was answered from a tree. Take log-probabilities" in line


def test_rows_of_a_stream_are_not_looked_at(tmp_path):
    def streamed(*args):
        trainer = shuffled(*args)
        trainer.train_dataset = trainer.train_dataset.to_iterable_dataset()
        assert "input_ids" in trainer.train_dataset.column_names
        return trainer

    train(streamed, tmp_path, shared=True, steps=4, per_device_train_batch_size=1)


class ReadsLogitsOfSquareMasks(runs.GRPOTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1).bool()
        own = torch.eye(ids.shape[1], dtype=torch.bool)
        square = (torch.ones_like(own).tril() & mask[:, None, None]) | own
        logits = model(input_ids=ids, attention_mask=square).logits[:, :-1]
        return -(logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0].mean(-1) * inputs["advantages"]).mean()


def test_calls_with_arguments_of_another_meaning_are_not_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "GRPOTrainer", ReadsLogitsOfSquareMasks)
    train(BUILDERS["grpo"], tmp_path, shared=True, steps=4, num_iterations=1)


# ---- TreeTrainer


def numbers(flat: int, unique: int, **more: float) -> dict[str, float]:
    """The numbers of a step that computes its whole tree as one part."""
    return {"flat_tokens": flat, "unique_tokens": unique, "computed_tokens": unique, "recomputed_tokens": 0} | {
        "parts": 1,
        "tree_flops": float(unique),
        "linear_flops": float(flat),
        **more,
    }


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (
            numbers(4000, 1000),
            "3,000 of 12,000 tokens were in the tree, 4.0 times fewer, in 1.0 parts a step",
        ),
        (numbers(4000, 3990), "no prefixes in common: treetrain inspect says what prevents it"),
        (numbers(4000, 3700), "That is little: treetrain inspect says what would share more."),
        (numbers(90, 40), "Parts of 40 tokens are slow, with or without a tree: raise tokens_per_step."),
        (numbers(900, 400, parts=20), "Parts of 20 tokens are slow, with or without a tree: raise tokens_per_step or"),
        (numbers(4000, 1000, recomputed_tokens=500), "1,500 tokens ran forward twice to fit the budget: a larger one"),
    ],
    ids=["gain", "nothing", "little", "small", "small parts", "twice"],
)
def test_the_line_of_a_tree_trainer_says_what_to_do(step, words) -> None:
    line = gains.line_of_steps([step] * 3)
    assert words in line
    if words.startswith("3,000"):
        assert line.endswith("by FLOPs."), "a run that gains needs no advice"


@pytest.mark.parametrize("execution", ["tree", "linear"])
def test_a_tree_trainer_prints_its_line_once_after_three_steps(execution, capsys) -> None:
    run(small_model(torch.float32), branching_rows(), max_steps=7, execution=execution)
    lines = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("treetrain: in the first 3 steps")
    ]
    assert len(lines) == (execution == "tree")

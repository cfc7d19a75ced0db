"""A plain transformers.Trainer, with shared prefixes computed once.

    python -m examples.hf_trainer
    python -m examples.hf_trainer --focus 2    # with a loss of its own

The rows are single calls of an agent: the conversation so far and its next reply. The calls of a game share prefixes of
growing length, and all calls share the rules.
"""

import argparse

import torch
from datasets import Dataset
from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments

import treetrain as tt
from examples.countdown.agent import RECORDED, TASKS, TEMPLATE


class FocalTrainer(Trainer):
    """The cross-entropy, with more weight on tokens that the model finds unlikely (a focal loss)."""

    focus = 2.0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Compute the loss from log-probabilities, 0 where a label is -100; the same with and without shared
        prefixes."""
        logprobs = tt.token_logprobs(model, inputs)
        loss = -((1 - logprobs.exp()) ** self.focus * logprobs).sum() / num_items_in_batch
        return (loss, {}) if return_outputs else loss


def main(steps: int = 30, seed: int = 0, share: bool = True, focus: float = 0.0) -> Trainer:
    """Train the built-in model; returns the trainer.

    Args:
        steps: optimizer steps.
        seed: random seed of the model and of the order of rows.
        focus: how much unlikely tokens count more; 0 trains the model's own loss.
        share: False trains as transformers alone does, on the same batches with the same losses.
    """
    model, tokenizer = tt.load_model("tiny", seed=seed), tt.load_tokenizer("tiny")
    calls = tt.load(RECORDED, tokenizer=tokenizer, chat_template=TEMPLATE, tools="none", view="calls").trajectories
    calls = [call for call in calls if call.group in TASKS]
    rows = {
        "input_ids": [call.ids.tolist() for call in calls],
        "labels": [[id if weight else -100 for id, weight in zip(call.ids.tolist(), call.weights)] for call in calls],
        "game": [str(call.episode) for call in calls],
    }
    args = TrainingArguments(
        "runs/hf_trainer",
        max_steps=steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=4,  # the 32 calls of a step are still one tree
        learning_rate=3e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        seed=seed,
    )
    collator = DataCollatorForSeq2Seq(tokenizer)
    kind = FocalTrainer if focus else Trainer
    trainer = kind(model, args, train_dataset=Dataset.from_dict(rows), data_collator=collator)
    if isinstance(trainer, FocalTrainer):
        trainer.focus = focus
    tt.group_batches(trainer, key="game")  # the calls of a game are in one step
    if share:
        tt.share_prefixes(trainer)
    trainer.train()
    return trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A plain transformers.Trainer.")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--focus", type=float, default=0.0, help="how much unlikely tokens count more")
    main(**vars(parser.parse_args())).accelerator.end_training()  # ends the process group

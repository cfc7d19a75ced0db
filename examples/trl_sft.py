"""Supervised fine-tuning in TRL, with shared prefixes computed once: two lines added to an ordinary SFTTrainer.

    python -m examples.trl_sft --output runs/warm
    accelerate launch --config_file examples/accelerate_zero3.yaml -m examples.trl_sft

The rows are recorded games of four countdown tasks. All begin with the rules, and the trials of a task share more.
"""

import argparse
import gzip
import json
from pathlib import Path

import torch
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

import treetrain as tt
from examples.countdown.agent import RECORDED, TASKS, TEMPLATE


def tokenizer_of_games():
    """The built-in tokenizer, with a template that omits the tools' schemas and marks the agent's text."""
    tokenizer = tt.load_tokenizer("tiny")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def recorded_games(tasks=TASKS) -> list[dict]:
    """Games of these tasks as conversations that end with the agent's last turn."""
    with gzip.open(RECORDED, "rt", encoding="utf-8") as lines:
        games = [game for game in map(json.loads, lines) if game["task_id"] in tasks]
    for game in games:
        game["messages"].append({"role": "assistant", "content": "Done."})
        for message in game["messages"]:
            message["content"] = message["content"] or ""
    return games


def make(
    steps: int = 110,
    seed: int = 0,
    output: str = "runs/trl_sft",
    share: bool = True,
    model=None,
    logging_steps: int = 10,
) -> SFTTrainer:
    """Make a trainer.

    Args:
        steps: optimizer steps.
        seed: random seed of the model and of the order of rows.
        output: folder for the model.
        share: False trains as TRL alone does, with the same losses.
        model: the model to train; None is the built-in one.
        logging_steps: steps from one log entry to the next.
    """
    games = recorded_games()
    columns = {"messages": [game["messages"] for game in games], "task": [game["task_id"] for game in games]}
    args = SFTConfig(
        output,
        max_steps=steps,
        per_device_train_batch_size=10,
        learning_rate=3e-3,
        adam_beta2=0.98,
        warmup_steps=steps // 10,
        assistant_only_loss=True,
        max_length=None,
        logging_steps=logging_steps,
        save_strategy="no",
        report_to=[],
        bf16=False,
        use_cpu=not torch.cuda.is_available(),
        seed=seed,
    )
    trainer = SFTTrainer(
        tt.load_model("tiny", seed=seed) if model is None else model,
        args,
        train_dataset=Dataset.from_dict(columns),
        processing_class=tokenizer_of_games(),
    )
    if share:
        tt.share_prefixes(trainer)
    return trainer


def main(**options) -> SFTTrainer:
    """Train the built-in model, with the options of `make`; returns the trainer."""
    trainer = make(**options)
    trainer.train()
    return trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Supervised fine-tuning in TRL.")
    parser.add_argument("--steps", type=int, default=110)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default="runs/trl_sft", help="folder for the model")
    options = parser.parse_args()
    trainer = main(**vars(options))
    trainer.save_model()
    trainer.accelerator.end_training()  # ends the process group

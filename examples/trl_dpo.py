"""DPO in TRL, with shared prefixes computed once, for the policy and for the reference.

    python -m examples.trl_dpo                     # warm start (examples/trl_sft.py), then 12 steps
    python -m examples.trl_dpo --model runs/warm   # from a saved warm start

A pair is two games of one puzzle: one that failed and one that earned more. They share the rules, the puzzle and often
the first calls, and so do the pairs of a puzzle; `tt.group_batches` puts those in one step.
"""

import argparse
import copy
import random

import torch
from datasets import Dataset
from trl import DPOConfig, DPOTrainer

import treetrain as tt
from examples import trl_sft


def pairs_of(games: list[dict], draws: random.Random) -> list[dict]:
    """Every failed game with a random one of its task that earned more."""
    pairs = []
    for worse in games:
        better = [game for game in games if game["task_id"] == worse["task_id"] and game["reward"] > worse["reward"]]
        if better:
            prompt, chosen = worse["messages"][:2], draws.choice(better)["messages"][2:]
            pair = {"prompt": prompt, "chosen": chosen, "rejected": worse["messages"][2:], "task": worse["task_id"]}
            pairs.append(pair)
    return pairs


def main(steps: int = 12, warm_steps: int = 110, seed: int = 0, model=None, share: bool = True) -> DPOTrainer:
    """Train the model; returns the trainer.

    Args:
        steps: optimizer steps.
        warm_steps: steps of supervised fine-tuning first, if no model is given.
        seed: random seed of the run.
        model: a trained model, or its folder.
        share: False trains as TRL alone does, on the same batches with the same losses.
    """
    if model is None:
        model = trl_sft.main(steps=warm_steps).model
    elif isinstance(model, str):
        model = tt.load_model(model)
    args = DPOConfig(
        "runs/trl_dpo",
        max_steps=steps,
        per_device_train_batch_size=8,
        learning_rate=1e-4,
        max_length=None,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        bf16=False,
        use_cpu=not torch.cuda.is_available(),
        seed=seed,
    )
    pairs = pairs_of(trl_sft.recorded_games(), random.Random(seed))
    trainer = DPOTrainer(
        model,
        ref_model=copy.deepcopy(model),
        args=args,
        train_dataset=Dataset.from_list(pairs),
        processing_class=trl_sft.tokenizer_of_games(),
    )
    tt.group_batches(trainer, key="task")
    if share:
        tt.share_prefixes(trainer)
    trainer.train()
    return trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="DPO in TRL.")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warm-steps", type=int, default=110, help="of supervised fine-tuning, without --model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", help="folder of a trained model, such as examples.trl_sft --output writes")
    main(**vars(parser.parse_args())).accelerator.end_training()  # ends the process group

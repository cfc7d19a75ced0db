"""DPO in a flat loop: pairs of a better and a worse game of one puzzle, by the environment's rewards.

    python -m examples.dpo                     # warm start (examples/sft.py), then 12 steps
    python -m examples.dpo --model runs/warm   # from a saved warm start

The two rows of a pair share the rules, the puzzle and often the first calls; so do the pairs of a puzzle. All of that
is computed once. The reference policy is the model as it is at the start; it scores all pairs before the first step.
"""

import argparse
import random
from itertools import groupby

import torch

import treetrain as tt
from examples import sft
from examples.countdown.agent import RECORDED, TASKS, TEMPLATE


def pairs_of(rows: list[tt.Trajectory], draws: random.Random) -> list[list[tt.Trajectory]]:
    """Pairs of one task: every failed game with a random one that earned more."""
    pairs = []
    for worse in rows:
        better = [row for row in rows if row.reward > worse.reward]
        if better:
            name = f"{worse.group} {len(pairs)}"
            pairs.append([draws.choice(better).replace(pair=name, chosen=True), worse.replace(pair=name, chosen=False)])
    return pairs


def main(
    steps: int = 12,
    pairs_per_step: int = 8,
    lr: float = 1e-4,
    beta: float = 0.1,
    warm_steps: int = sft.STEPS,
    seed: int = 0,
    model: str | torch.nn.Module | None = None,
) -> list[dict[str, float]]:
    """Train the model; returns loss, accuracy and margin of every step.

    Args:
        steps: optimiser steps.
        pairs_per_step: pairs in each step.
        lr: learning rate.
        beta: strength of the pull towards the reference.
        warm_steps: steps of supervised fine-tuning first, if no model is given.
        seed: random seed of the run.
        model: a trained model, or its folder.
    """
    tokenizer = tt.load_tokenizer("tiny")
    if model is None:
        model, _ = sft.main(steps=warm_steps)
    elif isinstance(model, str):
        model = tt.load_model(model)
    rows = tt.load(
        RECORDED, tokenizer=tokenizer, chat_template=TEMPLATE, tools="none"
    ).trajectories  # one row is one game
    draws = random.Random(seed)
    pairs = [
        pair
        for task, games in groupby(rows, key=lambda row: row.group)
        if task in TASKS
        for pair in pairs_of(list(games), draws)
    ]

    engine = tt.TreeEngine(model, budget=8192)
    both = [row for pair in pairs for row in pair]
    reference = engine.logprobs(both)  # without gradient; each is [L - 1], data of a row are [L]
    both = [row.replace(ref_logprobs=[0.0, *scores.tolist()]) for row, scores in zip(both, reference)]
    pairs = list(zip(both[0::2], both[1::2]))

    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    loss_fn = tt.losses.dpo(beta=beta)
    history = []
    for step in range(steps):
        drawn = draws.sample(pairs, min(pairs_per_step, len(pairs)))
        result = engine.forward_backward([row for pair in drawn for row in pair], loss_fn)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        history.append({"loss": result.loss, **result.metrics})
        print(
            f"step {step}: loss {result.loss:.3f}, accuracy {result.metrics['accuracy']:.0%}, "
            f"margin {result.metrics['margin']:+.3f}, {result.computed_tokens} of {result.flat_tokens} tokens computed"
        )
    return history


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="DPO in a flat loop.")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--pairs-per-step", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--warm-steps", type=int, default=sft.STEPS, help="of supervised fine-tuning, without --model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", help="folder of a trained model, such as examples.sft --output writes")
    main(**vars(parser.parse_args()))

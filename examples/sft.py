"""Supervised fine-tuning in a flat loop: rows, engine, optimiser.

    python -m examples.sft --output runs/warm

The rows are recorded games of four countdown tasks. Trials of a task share their beginning, and all rows share the
rules, so a step computes half of the tokens of its rows. The loss is on what the agents wrote; with ``--count once``
on every move once, where games of a task begin with the same ones.
"""

import argparse
import random
from pathlib import Path
from typing import Literal

import torch

import treetrain as tt
from examples.countdown.agent import RECORDED, TASKS, TEMPLATE

STEPS, ROWS_PER_STEP = 110, 10


def main(
    steps: int = STEPS,
    rows_per_step: int = ROWS_PER_STEP,
    lr: float = 3e-3,
    seed: int = 0,
    count: Literal["per trajectory", "once"] = "per trajectory",
    output: Path | None = None,
):
    """Train the built-in model; returns the model and the loss of every step, in nats."""
    # The model is a plain Hugging Face one; any other causal LM and its tokenizer work too.
    model, tokenizer = tt.load_model("tiny", seed=seed), tt.load_tokenizer("tiny")
    loaded = tt.load(RECORDED, tokenizer=tokenizer, chat_template=TEMPLATE, tools="none", count=count)
    rows = [row for row in loaded.trajectories if row.group in TASKS and row.weights.any()]
    print(f"{len(rows)} rows train {sum(int((row.weights > 0).sum()) for row in rows)} tokens")

    engine = tt.TreeEngine(model, budget=8192)  # tokens whose graph is alive at once: bounds memory, not the batch
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.0)
    warmup = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min((s + 1) / warmup, 1.0, 1.1 - s / steps))
    loss_fn = tt.losses.sft()
    drawn = random.Random(seed)

    losses = []
    for step in range(steps):
        batch = drawn.sample(rows, min(rows_per_step, len(rows)))
        result = engine.forward_backward(batch, loss_fn)  # gradients are in .grad now
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(result.loss)
        if step % 10 == 0 or step == steps - 1:
            print(
                f"step {step}: loss {result.loss:.3f}, {result.computed_tokens} of {result.flat_tokens} tokens computed"
            )

    if output is not None:
        model.save_pretrained(output)
        tokenizer.save_pretrained(output)
    return model, losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Supervised fine-tuning in a flat loop.")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--rows-per-step", type=int, default=ROWS_PER_STEP)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", choices=("per trajectory", "once"), default="per trajectory")
    parser.add_argument("--output", type=Path, help="folder for the model")
    main(**vars(parser.parse_args()))

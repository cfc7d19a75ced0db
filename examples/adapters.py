"""Two adapters of one model trained in one step: rows of won and of lost games, on the recorded countdown games.

    python -m examples.adapters

Every row names its adapter. Rows share prefixes with rows of their own adapter, whose gradients they alone make, and
one optimizer steps both. Here one adapter imitates the winners and the other the losers.
"""

import argparse
import random
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

import treetrain as tt
from examples.countdown.agent import RECORDED, TASKS, TEMPLATE


def main(steps: int = 20, rows_per_step: int = 6, lr: float = 1e-2, seed: int = 0) -> tuple[Any, list[float]]:
    """Train both adapters; returns the model and the loss of every step, in nats."""
    model, tokenizer = tt.load_model("tiny", seed=seed), tt.load_tokenizer("tiny")
    loaded = tt.load(RECORDED, tokenizer=tokenizer, chat_template=TEMPLATE, tools="none")
    rows = [row for row in loaded.trajectories if row.group in TASKS and row.reward is not None]
    lora = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, lora, adapter_name="winner")
    model.add_adapter("loser", lora)
    model.set_requires_grad(["winner", "loser"], True)  # peft freezes all but the active one

    def adapter_of(row: tt.Trajectory) -> str:
        return "winner" if row.reward and row.reward > 0 else "loser"

    engine = tt.TreeEngine(model, budget=8192)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, weight_decay=0.0)
    drawn, loss_fn, losses = random.Random(seed), tt.losses.sft(), []
    for step in range(steps):
        batch = drawn.sample(rows, min(rows_per_step, len(rows)))
        names = [adapter_of(row) for row in batch]
        result = engine.forward_backward(batch, loss_fn, adapter_names=names)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(result.loss)
        if step % 10 == 0 or step == steps - 1:
            print(
                f"step {step}: loss {result.loss:.3f}, {result.computed_tokens} of {result.flat_tokens} tokens computed"
            )

    return model, losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Two adapters of one model trained in one step.")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rows-per-step", type=int, default=6)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))

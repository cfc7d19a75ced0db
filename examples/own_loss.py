"""A loss of your own in a flat loop, on log-probabilities that are live in autograd: `tt.logprobs`.

    python -m examples.own_loss --steps 10
    python -m examples.own_loss --bfloat16      # the model in autocast

The loss compares all games of a puzzle: the score of a game is its mean log-probability, and the softmax over the
scores should equal the softmax over the rewards (a listwise ranking loss). No trainer is needed, and no prefix is
computed twice.
"""

import argparse
import random
from itertools import groupby

import torch

import treetrain as tt
from examples.countdown.agent import RECORDED, TASKS, TEMPLATE


def ranking_loss(logps: list[torch.Tensor], rows: list[tt.Trajectory], sharpness: float = 4.0) -> torch.Tensor:
    """KL divergence between the softmax of the rows' mean log-probabilities and that of the rewards."""
    scores = []
    for row, row_logps in zip(rows, logps):
        said = torch.as_tensor(row.weights[1:]).to(row_logps)  # 1 on what the agent wrote, 0 elsewhere: [L - 1]
        scores.append((row_logps * said).sum() / said.sum())
    wanted = torch.tensor([row.reward for row in rows]).to(scores[0])
    have, want = (torch.log_softmax(sharpness * of, 0) for of in (torch.stack(scores), wanted))
    return torch.nn.functional.kl_div(have, want, reduction="sum", log_target=True)


def main(steps: int = 10, games: int = 8, lr: float = 3e-4, seed: int = 0, bfloat16: bool = False) -> list[float]:
    """Train the model, each step on some games of every task; returns the loss of every step."""
    model, tokenizer = tt.load_model("tiny", seed=seed), tt.load_tokenizer("tiny")
    loaded = tt.load(RECORDED, tokenizer=tokenizer, chat_template=TEMPLATE, tools="none")
    tasks = [list(rows) for task, rows in groupby(loaded.trajectories, key=lambda row: row.group) if task in TASKS]
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    draws = random.Random(seed)

    losses = []
    for step in range(steps):
        drawn = [draws.sample(rows, min(games, len(rows))) for rows in tasks]
        sequences = [row.ids for rows in drawn for row in rows]
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            logps = iter(tt.logprobs(model, sequences, budget=8192))  # one tensor [L - 1] for every row
        loss = torch.stack([ranking_loss([next(logps) for _ in rows], rows) for rows in drawn]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"step {step}: loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A loss of your own in a flat loop.")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--games", type=int, default=8, help="games of every task in a step")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bfloat16", action="store_true", help="run the model in autocast")
    main(**vars(parser.parse_args()))

"""GRPO in a flat loop: a model plays countdown, is rewarded by the environment, and learns from its own games.

    python -m examples.grpo                        # warm start (examples/sft.py), then 20 iterations
    python -m examples.grpo --model runs/warm      # from a saved warm start

Every call of the model is a row (prompt, reply), as agent frameworks log them. The calls of a game, and the games of a
puzzle, share prefixes; the rules are shared by all rows. Training computes each of them once.
"""

import argparse
import random

import torch

import treetrain as tt
from examples import sft
from examples.countdown.agent import TASKS, Game, play, recorded_puzzle


def rows_of(game: Game, number: int, task: str) -> list[tt.Trajectory]:
    """One row per call, with the game's reward; only the model's own tokens are trained."""
    return [
        tt.Trajectory(
            [*prompt, *reply],
            loss_weights=[0.0] * len(prompt) + [1.0] * len(reply),
            reward=game.reward,
            group=task,  # games of one task are compared with each other
            episode=number,  # calls of one game count as one game in this comparison
        )
        for prompt, reply in game.calls
    ]


def main(
    iterations: int = 20,
    games: int = 8,
    updates: int = 2,
    lr: float = 5e-5,
    warm_steps: int = sft.STEPS,
    seed: int = 0,
    model: str | torch.nn.Module | None = None,
) -> list[dict[str, float]]:
    """Play and update; returns a record of every iteration.

    Args:
        iterations: rounds of playing and learning.
        games: games per task in a round, which form a group.
        updates: optimiser steps on the games of a round.
        lr: learning rate.
        warm_steps: steps of supervised fine-tuning first, if no model is given.
        seed: random seed of the run.
        model: a trained model, or its folder.
    """
    tokenizer = tt.load_tokenizer("tiny")
    if model is None:
        model, _ = sft.main(steps=warm_steps)
    elif isinstance(model, str):
        model = tt.load_model(model)
    engine = tt.TreeEngine(model, budget=8192)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.0)
    loss_fn = tt.losses.grpo(clip_low=0.2, clip_high=0.28)
    tasks = [task for task in TASKS for _ in range(games)]
    puzzles = {task: recorded_puzzle(task) for task in TASKS}
    torch.manual_seed(seed)
    shuffled = random.Random(seed)

    history = []
    for iteration in range(iterations):
        played = play(model, tokenizer, [puzzles[task] for task in tasks])
        rows = [row for number, game in enumerate(played) for row in rows_of(game, number, tasks[number])]
        rows = [row for row in tt.group_advantages(rows) if row.advantages.any()]  # equal rewards teach nothing
        shuffled.shuffle(rows)  # the order of rows does not matter, and rows need not be sorted by prefix

        tokens = computed = 0
        if rows:
            # Several updates on the same games need the log-probabilities from before the first.
            old = engine.logprobs(rows)
            rows = [row.replace(old_logprobs=[0.0, *scores.tolist()]) for row, scores in zip(rows, old)]
            for _ in range(updates):
                result = engine.forward_backward(rows, loss_fn)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            tokens, computed = result.flat_tokens, result.computed_tokens

        reward = sum(game.reward for game in played) / len(played)
        solved = sum(game.reward == 1 for game in played) / len(played)
        entry = {"iteration": iteration, "reward": reward, "solved": solved, "rows": len(rows)}
        history.append(entry | {"tokens": tokens, "computed": computed})
        print(
            f"iteration {iteration}: reward {reward:.2f}, solved {solved:.0%}, {computed} of {tokens} tokens computed"
        )
    return history


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="GRPO in a flat loop.")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--games", type=int, default=8, help="games of every task in an iteration")
    parser.add_argument("--updates", type=int, default=2, help="optimiser steps on the games of an iteration")
    parser.add_argument("--lr", type=float, default=5e-5)
    parser.add_argument("--warm-steps", type=int, default=sft.STEPS, help="of supervised fine-tuning, without --model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", help="folder of a trained model, such as examples.sft --output writes")
    main(**vars(parser.parse_args()))

"""Distillation in a flat loop: a teacher and a student run over the same tree.

    python -m examples.distill --divergence reverse
    python -m examples.distill --ids 8

The teacher is the built-in model after supervised steps on recorded games; the student begins anew, with other weights.
Without ``--ids`` their whole distributions are compared, a few states at a time: neither model's logits of a batch are
ever in memory. With ``--ids K`` the teacher's K most likely ids at each trained token are recorded once, as a server
would record them, and the student learns from these rows without the teacher.
"""

import argparse
import random

import torch

import treetrain as tt
from examples import sft
from examples.countdown.agent import RECORDED, TASKS, TEMPLATE

STEPS, TEACHER_STEPS, ROWS_PER_STEP = 25, 25, 10


def main(
    steps: int = STEPS,
    divergence: str = "forward",
    ids: int | None = None,
    teacher_steps: int = TEACHER_STEPS,
    seed: int = 0,
):
    """Train a student; returns it and the divergence of every step, in nats."""
    teacher, _ = sft.main(steps=teacher_steps, seed=seed)
    student, tokenizer = tt.load_model("tiny", seed=seed + 1), tt.load_tokenizer("tiny")
    loaded = tt.load(RECORDED, tokenizer=tokenizer, chat_template=TEMPLATE, tools="none")
    rows = [row for row in loaded.trajectories if row.group in TASKS]

    taught, engine = tt.TreeEngine(teacher), tt.TreeEngine(student)
    if ids is not None:
        rows = taught.teach(rows, ids)  # the teacher's ids and log-probabilities, in teacher_topk
    optimizer = torch.optim.AdamW(student.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0)
    drawn, divergences = random.Random(seed), []
    for step in range(steps):
        batch = drawn.sample(rows, min(ROWS_PER_STEP, len(rows)))
        if ids is None:
            result = engine.distill(batch, taught, divergence)  # gradients are in .grad now
        else:
            result = engine.forward_backward(batch, tt.losses.distill_topk(divergence=divergence))
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        divergences.append(result.loss)
        if step % 10 == 0 or step == steps - 1:
            computed = f"{result.computed_tokens} of {result.flat_tokens} tokens computed"
            print(f"step {step}: divergence {result.loss:.3f}, {computed}")
    return student, divergences


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Distillation in a flat loop.")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--divergence", choices=("forward", "reverse", "jensen_shannon"), default="forward")
    parser.add_argument("--ids", type=int, help="learn from so many recorded ids of the teacher at each token")
    parser.add_argument("--teacher-steps", type=int, default=TEACHER_STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))

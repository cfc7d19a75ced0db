"""Five small trainings whose losses and gradient norms are kept in files.

    python tests/golden/runs.py          # trains, compares with the files, says what differs
    python tests/golden/runs.py --write  # writes the files anew, and says what changed

A run takes STEPS steps of AdamW in float32 on rows that branch: forks at the first token, duplicates, prefixes of other
rows, untrained tokens. Steps go through a budget that cuts the tree into parts. The files hold what the runs gave when
they were written; a difference means that the numerics of training have changed since.
"""

import argparse
import functools
import json
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import treetrain as tt
from support.models import make_model
from treetrain.check.forests import VOCAB

FOLDER = Path(__file__).parent / "values"
TOLERANCE = {"dense_sft": 5e-5, "grpo": 4e-4, "dpo_lora": 5e-6, "moe_sft": 2e-4, "hybrid_sft": 1e-2}
"""Largest relative difference of a loss or gradient norm: about ten times what another plan (the whole tree, a budget
of 7) changed by rounding alone. AdamW lets rounding grow over the steps, most in the hybrid's gated states."""
MEAN = 0.05
"""Largest mean of all relative differences, in units of the tolerance: rounding has no direction."""
STEPS, ROWS, BUDGET, RATE, TEMPERATURE = 50, 8, 24, 3e-3, 1.25


class Curve(NamedTuple):
    """What a training logged at every step."""

    losses: list[float]
    gradient_norms: list[float]


def batch(seed: int) -> list[tt.Trajectory]:
    """Rows of four prompts, two answers each: rewards, groups, pairs; the last two rows branch at the first token."""
    drawn = np.random.default_rng(seed)
    rows = []
    stem = drawn.integers(0, VOCAB, 6).tolist()
    for number in range(ROWS):
        group = number // 2
        prompt = [*(stem if group < 3 else []), *np.random.default_rng([seed, group]).integers(0, VOCAB, 5).tolist()]
        answer = drawn.integers(0, VOCAB, int(drawn.integers(3, 9))).tolist()
        if number == 3:
            answer = rows[2].ids[len(prompt) : len(prompt) + 2].tolist()  # a prefix of the row before
        weights = [0.0] * len(prompt) + [1.0] * len(answer)
        rows.append(
            tt.Trajectory(
                [*prompt, *answer],
                loss_weights=weights,
                reward=float(drawn.random()),
                group=group,
                pair=group,
                chosen=number % 2 == 0,
            )
        )
    return rows


def train(
    model: torch.nn.Module, batches: Sequence[Sequence[tt.Trajectory]], loss: object, budget: int | None
) -> Curve:
    """Train on the batches in turn."""
    engine = tt.TreeEngine(model, budget=budget, temperature=TEMPERATURE)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE)
    curve = Curve([], [])
    for step in range(STEPS):
        result = engine.forward_backward(batches[step % len(batches)], loss)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        curve.losses.append(float(result.loss))
        curve.gradient_norms.append(float(norm))
    return curve


def batches_of(count: int = 4) -> list[list[tt.Trajectory]]:
    return [batch(seed) for seed in range(count)]


def with_policy(model: torch.nn.Module, batches: list[list[tt.Trajectory]], fact: str) -> list[list[tt.Trajectory]]:
    """The batches with the model's log-probabilities as a fact."""
    engine = tt.TreeEngine(model, temperature=TEMPERATURE)
    return [
        [
            row.replace(**{fact: torch.cat([torch.zeros(1), logps.cpu()]).tolist()})
            for row, logps in zip(rows, engine.logprobs(rows))
        ]
        for rows in batches
    ]


def sft(family: str, budget: int | None) -> Curve:
    """Cross-entropy, any family."""
    return train(make_model(family), batches_of(), tt.losses.sft(), budget)


def grpo(budget: int | None) -> Curve:
    """GRPO with clipping, several updates on each batch."""
    model = make_model("qwen3")
    rows = [tt.group_advantages(rows) for rows in batches_of()]
    return train(model, with_policy(model, rows, "old_logprobs"), tt.losses.grpo(kl=0.0), budget)


def dpo_lora(budget: int | None) -> Curve:
    """DPO of an adapter; the reference is the model without it."""
    from peft import LoraConfig, get_peft_model

    model = make_model("llama")
    rows = with_policy(model, batches_of(), "ref_logprobs")
    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["q_proj", "v_proj", "up_proj"])
    return train(get_peft_model(model, config), rows, tt.losses.dpo(), budget)


RUNS: dict[str, Callable[[int | None], Curve]] = {
    "dense_sft": functools.partial(sft, "llama"),
    "grpo": grpo,
    "dpo_lora": dpo_lora,
    "moe_sft": functools.partial(sft, "qwen3_moe"),
    "hybrid_sft": functools.partial(sft, "qwen3_5_text"),
}


def run(name: str, budget: int | None = BUDGET) -> Curve:
    """One training, with one thread: sums do not depend on the machine's cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        torch.manual_seed(0)
        return RUNS[name](budget)
    finally:
        torch.set_num_threads(threads)


def residuals(curve: Curve, kept: Curve) -> np.ndarray:
    """Relative differences [2, STEPS] of losses and gradient norms."""
    now, then = np.array(curve), np.array(kept)
    return (now - then) / np.maximum(np.abs(then), 1e-3)


def faults(name: str, curve: Curve) -> str | None:
    """Say how far a training is from its file; None if within the tolerance."""
    off = residuals(curve, kept(name))
    limit = TOLERANCE[name]
    if np.abs(off).max() <= limit and abs(off.mean()) <= MEAN * limit:
        return None
    step = int(np.argmax(np.abs(off).max(0) > limit)) + 1 if np.abs(off).max() > limit else STEPS
    return (
        f"{name} differs from tests/golden/values by {np.abs(off).max():.1e} (at most {limit:g}), on average by "
        f"{off.mean():+.1e} (at most {MEAN * limit:g}), first at step {step}. If this is meant, run make golden "
        "and say in the changelog what changed"
    )


def kept(name: str) -> Curve:
    """The values in the file."""
    data = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return Curve(data["losses"], data["gradient_norms"])


def main(*, write: bool) -> None:
    """Train all, print the differences, and write the files if asked."""
    import transformers

    for name in RUNS:
        curve, path = run(name), FOLDER / f"{name}.json"
        if path.exists():
            off = residuals(curve, kept(name))
            verdict = "differs" if faults(name, curve) else "as kept"
            print(f"{name:<12}{verdict}: largest difference {np.abs(off).max():.1e}, mean {off.mean():+.1e}")
        else:
            print(f"{name:<12}new")
        if write:
            versions = f"treetrain {tt.__version__}, torch {torch.__version__}, transformers {transformers.__version__}"
            made = {"made_with": f"{versions}, {platform.machine()}", **curve._asdict()}
            FOLDER.mkdir(exist_ok=True)
            path.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the files anew")
    main(write=parser.parse_args().write)

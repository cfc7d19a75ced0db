"""Samples of the real trajectories, cut and renumbered so that a small model can run them."""

import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers

import treetrain as tt
from treetrain.testing import linear
from treetrain.testing.contract import PPO, Rows, clear_of_bounds

VOCABULARY = 320
LONGEST = 150
"""Tokens of a row."""


def tau_airline(folder, tokenizer) -> Rows:
    """LLM calls of all trials of one task: trials part at their first answer, and the next call extends the last."""
    with open(folder / "tau_airline" / "trajectories.jsonl", encoding="utf-8") as lines:
        trials = [line for line in lines if json.loads(line)["task_id"] == "2"]
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl", encoding="utf-8") as file:
        file.writelines(trials)
        file.flush()
        rows = tt.load(file.name, tokenizer=tokenizer, view="calls", chat_template="chatml").trajectories
    shortest = min(len(row) for row in rows)
    return around_the_fork([row for row in rows if len(row) < shortest + 120], head=20, length=150)


def tot_game24(folder, tokenizer) -> Rows:
    """Leaves of one search tree, which part again and again."""
    file = folder / "tot_game24_bfs" / "trajectories.jsonl"
    return around_the_fork(
        tt.load(file, tokenizer=tokenizer, chat_template="chatml", limit=14).trajectories[4:], head=12, length=60
    )


def codet_humaneval(folder, tokenizer) -> Rows:
    """Samples of one prompt, which part at any depth."""
    with open(folder / "codet_humaneval100" / "upstream.jsonl", encoding="utf-8") as lines:
        problem = json.loads(next(lines))
    prompt = tokenizer(problem["prompt"])["input_ids"]
    rows = []
    for sample in problem["samples"][:8]:
        ids = [*prompt, *tokenizer(sample)["input_ids"]]
        rows.append(tt.Trajectory(ids, loss_weights=np.arange(len(ids)) >= len(prompt)))
    return around_the_fork(rows, head=16, length=60)


SOURCES: dict[str, Callable[..., Rows]] = {f.__name__: f for f in (tau_airline, tot_game24, codet_humaneval)}


def around_the_fork(rows: Rows, head: int, length: int) -> Rows:
    """`length` tokens of every row from `head` tokens above the first fork on: what all share is long and alike."""
    shortest = min(len(row) for row in rows)
    stacked = np.stack([row.ids[:shortest] for row in rows])
    start = max(int((stacked != stacked[0]).any(axis=0).argmax()) - head, 0)
    stop = start + length
    return [tt.Trajectory(row.ids[start:stop], loss_weights=row.weights[start:stop]) for row in rows]


def renumbered(rows: Rows) -> Rows:
    """The same trees over the ids that occur in them, so that a small vocabulary does."""
    ids = np.unique(np.concatenate([row.ids for row in rows]))
    assert len(ids) <= VOCABULARY
    return [row.replace(ids=np.searchsorted(ids, row.ids)) for row in rows]


def loader(folder: Path) -> Callable[[str], Rows]:
    """Gives a source's rows, made when they are first asked for.

    Args:
        folder: of the real data.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "tokenizer-qwen3")
    return functools.cache(lambda source: renumbered(SOURCES[source](folder, tokenizer)))


def with_facts(model, rows: Rows) -> Rows:
    """Advantages of both signs, and ratios around 1: some beyond the bounds of PPO, none where rounding decides."""
    rng = np.random.default_rng(0)
    with torch.no_grad():
        scores, _ = linear.score_rows(model, [row.ids.tolist() for row in rows], PPO.temperature)
    noisy = [np.concatenate([[0.0], logp.numpy() + rng.normal(0, 0.15, len(logp))]) for logp in scores]
    dressed = [row.replace(advantages=float(rng.normal()), old_logprobs=old) for row, old in zip(rows, noisy)]
    return clear_of_bounds(dressed, scores)

"""Rows that branch, for tests of the trainer."""

import json
from pathlib import Path

import numpy as np

VOCABULARY = 64


def branching_rows(
    groups: int = 6, samples: int = 3, *, prompt: int = 12, answer: int = 8, seed: int = 0
) -> list[dict]:
    """Token rows: `samples` answers with rewards to each of `groups` prompts; answers use few tokens, to be learnt."""
    random = np.random.default_rng(seed)
    rows = []
    for group in range(groups):
        asked = random.integers(8, VOCABULARY, prompt).tolist()
        for _ in range(samples):
            ids = asked + random.integers(1, 4, answer).tolist()
            mask = [0] * prompt + [1] * answer
            rows.append({"input_ids": ids, "loss_mask": mask, "reward": float(random.random()), "group_id": group})
    return rows


def write_rows(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)

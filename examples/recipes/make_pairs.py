"""Writes `pairs.jsonl.gz`, the data of `dpo.yaml`: of every held-out puzzle the best recorded game and the worst.

    python -m examples.recipes.make_pairs

A pair is a record with `prompt`, `chosen` and `rejected`, lists of messages as TRL has them, and `tools`.
"""

import gzip
import json
from itertools import groupby
from pathlib import Path

GAMES = Path(__file__).parents[1] / "countdown" / "heldout.jsonl.gz"
PAIRS = Path(__file__).with_name("pairs.jsonl.gz")
PROMPT = 2
"""Messages that all games of a puzzle begin with: the rules, and the numbers."""


def main(path: Path = PAIRS) -> int:
    """Write the file; returns the number of pairs."""
    with gzip.open(GAMES, "rt", encoding="utf-8") as file:
        games = [json.loads(line) for line in file]
    pairs = []
    for _, trials in groupby(games, key=lambda game: game["task_id"]):
        ranked = sorted(trials, key=lambda game: game["reward"])
        worst, best = ranked[0], ranked[-1]
        if best["reward"] > worst["reward"]:
            prompt = best["messages"][:PROMPT]
            assert prompt == worst["messages"][:PROMPT], "two games of a puzzle begin alike"
            answers = {"chosen": best["messages"][PROMPT:], "rejected": worst["messages"][PROMPT:]}
            pairs.append({"prompt": prompt, **answers, "tools": best["tools"]})
    with path.open("wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", filename="", mtime=0) as file:  # the same bytes
        file.writelines((json.dumps(pair) + "\n").encode() for pair in pairs)
    return len(pairs)


if __name__ == "__main__":
    print(main(), "pairs")

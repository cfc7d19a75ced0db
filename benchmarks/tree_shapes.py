"""Trees of real trajectories without their text: the earlier row that each row shares most with, and how many tokens.

A training step's time and memory depend on the shape of the tree and not on the words in it, so a benchmark on
another machine needs only the shape. Run: python benchmarks/tree_shapes.py, where the data is, to write them anew, in
tokens of Qwen3's tokenizer: calls of a tool agent (tau_airline, one row per LLM call, by a chat template that keeps
prefixes, and by Qwen3's own, which drops earlier think blocks), search trees (tot_game24) and sampled answers (codet).
A row is trained from its first trained token to its end.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import treetrain as tt

FOLDER = Path(__file__).parent / "shapes"
TASKS = ("48", "2", "21", "33")


def shape_of(rows: Sequence[tt.Trajectory]) -> list[list[int]]:
    """Per row: the row most is shared with (-1: none), how much, tokens of its own, trained tokens at the end."""
    found: list[list[int]] = []
    for number, row in enumerate(rows):
        ids = np.asarray(row.ids)
        shared = [_common(ids, np.asarray(other.ids)) for other in rows[:number]]
        best = int(np.argmax(shared)) if shared and max(shared) else -1
        common = shared[best] if best >= 0 else 0
        weights = np.ones(len(ids)) if row.loss_weights is None else np.asarray(row.loss_weights)
        trained = len(ids) - int(np.argmax(weights > 0)) if (weights > 0).any() else 0
        found.append([best, common, len(ids) - common, trained])
    return found


def _common(a: np.ndarray, b: np.ndarray) -> int:
    least = min(len(a), len(b))
    differ = np.flatnonzero(a[:least] != b[:least])
    return int(differ[0]) if len(differ) else least


def rows_of(shape: Sequence[Sequence[int]], vocabulary: int, seed: int = 0) -> list[tt.Trajectory]:
    """Rows of random tokens that share exactly what the shape says."""
    rng = np.random.default_rng(seed)
    ids: list[np.ndarray] = []
    rows = []
    for number, (other, shared, own, trained) in enumerate(shape):
        fresh = rng.integers(len(shape), vocabulary, own)
        fresh[:1] = number  # no two rows continue alike by accident
        ids.append(np.concatenate([ids[other][:shared] if other >= 0 else fresh[:0], fresh]).astype(np.int32))
        weights = (np.arange(len(ids[-1])) >= len(ids[-1]) - trained).astype(np.float32)
        rows.append(tt.Trajectory(ids[-1], loss_weights=weights, id=str(number), group=str(number % 4)))
    return rows


def load(name: str) -> list[list[int]]:
    """A shape that is in the repository."""
    return json.loads((FOLDER / f"{name}.json").read_text())["rows"]


def synthetic(overlap: float, path: int, leaves: int = 0, segment: int = 128) -> list[list[int]]:
    """Rows of `path` tokens that leave an earlier one at multiples of `segment`, for about so much overlap.

    Args:
        leaves: rows; 0 takes enough for four times the shared part.
    """
    rng = np.random.default_rng(0)
    leaves = leaves or max(4, round(4 / (1 - overlap)))
    shape = [[-1, 0, path, path // 2]]
    # overlap = (leaves - 1) / leaves * mean share of what is shared
    mean = min(0.98, overlap * leaves / (leaves - 1))
    for number in range(1, leaves):
        share = np.clip(mean + rng.uniform(-1, 1) * min(mean, 1 - mean) * 0.9, 0.0, 0.98)
        shared = int(share * path) // segment * segment
        shape.append([int(rng.integers(number)), shared, path - shared, path - shared])
    return shape


# ---- The trajectories themselves


def tot_game24() -> list[tt.Trajectory]:
    """All leaves of the search trees of puzzles 900 to 905; assistant text trained."""
    from workloads import DATA, tokenizer

    path = DATA / "tot_game24_bfs" / "trajectories.jsonl"
    wanted = {f"game24-{number}" for number in range(900, 906)}
    loaded = tt.load(path, tokenizer=tokenizer(), chat_template="chatml", limit=600)
    return [row for row in loaded.trajectories if row.group in wanted]


def codet_rows(number: int) -> list[tt.Trajectory]:
    """All samples of a prompt of codet_humaneval100; samples trained."""
    from workloads import DATA, tokenizer

    if not _LINES:
        _LINES.extend((DATA / "codet_humaneval100" / "upstream.jsonl").read_text().splitlines())
        _TOKENIZER.append(tokenizer())
    entry, encode = json.loads(_LINES[number]), _TOKENIZER[0]
    prompt = encode(entry["prompt"])["input_ids"]
    rows = []
    for k, sample in enumerate(entry["samples"]):
        answer = encode(sample)["input_ids"]
        weights = [0.0] * len(prompt) + [1.0] * len(answer)
        rows.append(tt.Trajectory(prompt + answer, loss_weights=weights, group=number, id=f"{number}/{k}"))
    return rows


_LINES: list[str] = []
_TOKENIZER: list = []


def main() -> None:
    from workloads import DATA, tokenizer

    FOLDER.mkdir(exist_ok=True)

    def write(name: str, source: str, rows: Sequence[tt.Trajectory]) -> None:
        flat, longest, unique = sum(map(len, rows)), max(map(len, rows)), tt.build_tree(rows).num_tokens
        print(f"{name}: {len(rows)} rows, {flat} tokens, longest {longest}, {unique} unique")
        (FOLDER / f"{name}.json").write_text(json.dumps({"source": source, "rows": shape_of(rows)}) + "\n")

    for kind, template, words in (
        ("calls", "chatml", "one row per call"),
        ("think", None, "one row per call, by a template that drops earlier think blocks"),
    ):
        loaded = tt.load(
            DATA / "tau_airline" / "trajectories.jsonl", tokenizer=tokenizer(), view="calls", chat_template=template
        )
        groups: dict[str, list[tt.Trajectory]] = {}
        for row in loaded.trajectories:
            groups.setdefault(str(row.group), []).append(row)
        for task in TASKS if kind == "calls" else TASKS[:1]:
            write(f"tau_airline_{kind}_{task}", f"tau_airline task {task}, {words}", groups[task])
    write("tot_game24", "tot_game24 puzzles 900 to 905, every leaf", tot_game24())
    both = [*codet_rows(2), *codet_rows(9)]
    write("codet_humaneval", "codet_humaneval prompts 2 and 9, every sample", both)
    write("unrelated", "codet_humaneval, the first sample of every prompt", [codet_rows(n)[0] for n in range(164)])


if __name__ == "__main__":
    main()

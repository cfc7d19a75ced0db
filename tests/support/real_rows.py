"""Samples of the real trajectories, cut and renumbered so that a small model can run them."""

import json
import tempfile

import numpy as np

import treetrain as tt


def tau_airline(shared_data, tokenizer) -> list[tt.Trajectory]:
    """The first LLM calls of four trials of one task, 60 tokens of their common head and the 160 after it."""
    folder = shared_data / "tau_airline"
    with open(folder / "trajectories.jsonl", encoding="utf-8") as lines:
        trials = [line for line in lines if json.loads(line)["task_id"] == "2"]
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl", encoding="utf-8") as file:
        file.writelines(trials)
        file.flush()
        rows = tt.load(
            file.name, tokenizer=tokenizer, view="calls", tools=folder / "tools.json", chat_template="chatml"
        ).trajectories
    # Whole policies and tools are thousands of tokens that train nothing; what follows them is kept.
    start = min(len(row) - row.weights.sum() for row in rows) - 60
    return [cut(row, int(start), int(start) + 220) for row in rows if len(row) < start + 300]


def tot_game24_bfs(shared_data, tokenizer) -> list[tt.Trajectory]:
    """The first leaves of one puzzle's search tree."""
    file = shared_data / "tot_game24_bfs" / "trajectories.jsonl"
    return tt.load(file, tokenizer=tokenizer, chat_template="chatml", limit=14).trajectories


def codet_humaneval100(shared_data, tokenizer) -> list[tt.Trajectory]:
    """One prompt with some of its samples, duplicates included, as rows of ids."""
    with open(shared_data / "codet_humaneval100" / "upstream.jsonl") as lines:
        problem = json.loads(next(lines))
    prompt = tokenizer(problem["prompt"])["input_ids"]
    rows = []
    for number, sample in enumerate(problem["samples"][:8]):
        ids = [*prompt, *tokenizer(sample)["input_ids"][:40]]
        weights = np.arange(len(ids)) >= len(prompt)
        rows.append(tt.Trajectory(ids, loss_weights=weights, reward=float(number % 3 == 0), group=0))
    return rows


def cut(row: tt.Trajectory, start: int, stop: int) -> tt.Trajectory:
    return tt.Trajectory(row.ids[start:stop], loss_weights=row.weights[start:stop], reward=row.reward, group=row.group)


SETS = {"tau_airline": tau_airline, "tot_game24_bfs": tot_game24_bfs, "codet_humaneval100": codet_humaneval100}


def around_the_fork(rows: list[tt.Trajectory], head: int, length: int) -> list[tt.Trajectory]:
    """`length` tokens of every row from `head` tokens above the first fork on: what all share is long and alike."""
    shortest = min(len(row) for row in rows)
    stacked = np.stack([row.ids[:shortest] for row in rows])
    start = max(int((stacked != stacked[0]).any(axis=0).argmax()) - head, 0)
    return [cut(row, start, start + length) for row in rows]


def renumbered(rows: list[tt.Trajectory], vocabulary: int) -> list[tt.Trajectory]:
    """The same trees over the ids that occur in them, so that a small vocabulary does."""
    ids = np.unique(np.concatenate([row.ids for row in rows]))
    assert len(ids) <= vocabulary
    return [row.replace(ids=np.searchsorted(ids, row.ids)) for row in rows]

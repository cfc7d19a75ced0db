"""The rows in a page: each with its trained parts marked, what was said when it was read, and the rewards of its group.

Rows that share a prefix share its text. The tree is cut into pieces where it forks and where the weight of a row
changes; a row is its last piece, and a weight for each piece of its path.
"""

import json
from collections.abc import Sequence

import numpy as np

from treetrain.core.tree.token_tree import Int64s, TokenTree
from treetrain.logs.columns import codes_of
from treetrain.logs.inspection.picture import LABEL, shortened
from treetrain.logs.inspection.prepared import Decodes

ROWS, BYTES = 3000, 1_200_000
"""Most rows in a page, the first of every group before the second of any, and bytes of their data."""
TEXTS = (24_000, 12_000, 6000, 3000, 1500, 800, 400, 200, 120)
"""Bytes of a trained piece that are shown, a third of it of others; the first that leaves room for all rows."""
SHARED = 20
"""So many rows of a piece are reason for more of its text, up to 60 times as much."""
WEIGHTS = 8
"""A row with more different loss weights shows only what is trained."""


def page_rows(tree: TokenTree, tokenizer: Decodes | None, remarks: Sequence[tuple[str, ...]] = ()) -> dict[str, object]:
    """The data of the row view.

    Args:
        tree: all rows as one batch.
        tokenizer: anything with `decode`; None shows ids.
        remarks: what was said of each row's record.
    """
    rows = tree.trajectories
    group = codes_of(row.group for row in rows)
    by_group = np.argsort(group, kind="stable")
    starts = np.flatnonzero(np.diff(group[by_group], prepend=-2))
    place = np.empty_like(by_group)  # of each row within its group
    place[by_group] = np.arange(len(rows)) - np.repeat(starts, np.diff(np.append(starts, len(rows))))
    order, count = np.argsort(place, kind="stable"), min(ROWS, len(rows))
    while True:
        found = _data(tree, group, np.sort(order[:count]), tokenizer, remarks)
        size = BYTES if found is None else len(json.dumps(found, ensure_ascii=False).encode(errors="replace"))
        if found is not None and (size <= BYTES or count <= 1):
            return found
        count = max(count * BYTES * 4 // (size * 5), 1)


def _data(
    tree: TokenTree, group: Int64s, chosen: Int64s, tokenizer: Decodes | None, remarks: Sequence[tuple[str, ...]]
) -> dict[str, object] | None:
    """The data of some rows; None if their texts are too many."""
    rows, total = [tree.trajectories[number] for number in chosen.tolist()], tree.num_tokens
    opens, used = np.zeros(total + 1, bool), np.zeros(total, bool)
    opens[tree.segment_start[:-1]] = True
    opens[tree.trajectory_last[tree.trajectory_last >= 0] + 1] = True
    trained = np.zeros(total, bool)
    paths, weights = [tree.path(number) for number in chosen.tolist()], []
    kinds: set[float] = set()
    for row, path in zip(rows, paths):
        own = row.weights
        if (different := np.unique(own)).size > WEIGHTS:
            own, different = (own != 0).astype(float), np.array([0.0, 1.0])
        weights.append(own)
        kinds.update(different.tolist())
        opens[path[np.flatnonzero(np.diff(own)) + 1]] = True
        trained[path[own != 0]] = True
        used[path] = True
    start = np.flatnonzero(opens[:-1] & used)
    ends = np.append(np.flatnonzero(opens[:-1]), total)
    stop = ends[np.searchsorted(ends, start, side="right")]
    through = np.zeros(total, np.int64)
    for path in paths:
        through[path[opens[path]]] += 1
    most = np.maximum(np.where(trained[start], 3, 1), np.minimum(through[start] // SHARED, 60))
    texts = _texts(tree, start, stop, most, tokenizer, few=len(chosen) <= 1)
    if texts is None:
        return None
    above = tree.parent[start]
    parent = np.where(above >= 0, np.searchsorted(start, above, side="right") - 1, -1)
    mark = {weight: chr(48 + number) for number, weight in enumerate(sorted(kinds))}
    reward = np.array([np.nan if row.reward is None else row.reward for row in tree.trajectories], np.float64)
    names, said = [], {}
    for code in dict.fromkeys(group[chosen].tolist()):
        members = np.flatnonzero(group == code) if len(names) < ROWS else chosen[:0]
        given = reward[members][np.isfinite(reward[members])]
        name = "no group" if code < 0 else str(tree.trajectories[int(members[0])].group)[:LABEL]
        names.append((code, name, len(members), float(f"{given.mean():.4g}") if given.size else None))
    numbers = {code: number for number, (code, *_) in enumerate(names)}
    marks = []
    for path, own in zip(paths, weights):
        at = np.flatnonzero(opens[path])
        marks.append("".join(mark[weight] for weight in own[at].tolist()))
    return {
        "all": tree.num_trajectories,
        "above": np.where(parent < 0, 0, np.arange(len(start)) - parent).tolist(),  # so many pieces before; 0 for none
        "text": texts,
        "weights": list(mark),
        "groups": [each[1:] for each in names] if (group >= 0).any() else [],
        "number": (chosen + 1).tolist(),
        "group": [numbers[code] for code in group[chosen].tolist()],
        "last": [int(np.searchsorted(start, path[-1], side="right")) - 1 if len(path) else -1 for path in paths],
        "marks": marks,
        "tokens": [len(row) for row in rows],
        "trained": [int(np.count_nonzero(own)) for own in weights],
        "id": ["" if row.id is None else str(row.id)[:LABEL] for row in rows],
        "reward": [None if row.reward is None else float(f"{row.reward:.6g}") for row in rows],
        "notes": [[said.setdefault(text, len(said)) for text in remarks[n]] for n in chosen.tolist()]
        if remarks
        else [],
        "said": list(said),
    }


def _texts(
    tree: TokenTree, start: Int64s, stop: Int64s, most: Int64s, tokenizer: Decodes | None, *, few: bool
) -> list[str] | None:
    """The text of each piece, its middle left out where it is long; None if that is still too much."""
    size = (4 if tokenizer is not None else 7) * (stop - start)  # bytes, about
    fitting = (each for each in TEXTS if np.minimum(size, most * each // 3).sum() <= 0.7 * BYTES)
    if (limit := next(fitting, TEXTS[-1] if few else None)) is None:
        return None
    return [
        shortened(tree.tokens[first:last], tokenizer, room)
        for first, last, room in zip(start.tolist(), stop.tolist(), (most * limit // 3).tolist())
    ]

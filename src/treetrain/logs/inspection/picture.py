"""A token tree as an icicle: blocks whose width is their tokens and whose height is the trajectories through them.

So the area of a block is the tokens that separate rows compute for it, and its width is what the tree computes. A block
is a run of tokens without a fork, of one kind (context or trained), on the same trajectories. Pre-order gives both
coordinates: a block begins at the depth of its first token, and above it lie the trajectories that end earlier.

Large trees are folded. The blocks with most flat tokens at and below them stay, so a block's parent stays if it does.
What hangs below becomes one block for each run of siblings, with the same flat tokens. The page folds blocks that are
too thin to be drawn in the same way, and opens them when it is zoomed.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treetrain.core.tree.token_tree import Int64s, TokenTree, trajectories_through
from treetrain.logs.columns import codes_of
from treetrain.logs.inspection.diagnosis import Diagnosis
from treetrain.logs.inspection.prepared import Decodes

BLOCKS = 24_000
"""Blocks that are drawn before the rest is folded."""
TEXTS, TEXT_BYTES = 5000, 700_000
"""Most blocks with text, those with most flat tokens, and the text of all together."""
FORKS = 4000
"""Most places of lost sharing that are marked."""
KINDS = ("context", "trained", "folded")
LABEL = 80
"""Characters of a group or an id."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Picture:
    """B blocks in pre-order; below them, folded ones."""

    tree: TokenTree
    x: Int64s
    """int64 [B]: tokens above the block on its path."""
    width: NDArray[np.float64]
    """[B]: tokens of the block; of a folded one the mean over its trajectories of the tokens that follow."""
    y: Int64s
    """int64 [B]: trajectories above the block in the picture."""
    height: Int64s
    """int64 [B]: trajectories through the block."""
    parent: Int64s
    """int64 [B]: the block that it continues; -1 at roots."""
    kind: NDArray[np.int8]
    """[B]: index into KINDS."""
    start: Int64s
    """int64 [B]: tree index of the block's first token."""
    unique: Int64s
    """int64 [B]: tree tokens of the block, or of all that is folded into it."""
    branches: Int64s
    """int64 [B]: siblings that are folded into it; 0 for other blocks."""
    hidden: Int64s
    """int64 [B]: blocks that are folded into it."""
    trained: NDArray[np.float64]
    """[B]: share of its flat tokens that are trained."""
    row_at: Int64s
    """int64 [rows]: the trajectory at each place from the top."""

    @property
    def rows(self) -> int:
        """Trajectories that are drawn: all but empty ones."""
        return int((self.tree.trajectory_last >= 0).sum())

    @property
    def longest(self) -> int:
        """Tokens of the longest path."""
        return int(self.tree.trajectory_length.max(initial=0))

    def headline(self) -> str:
        """The picture in one sentence."""
        return (
            f"{self.rows:,} trajectories with {self.tree.num_flat_tokens:,} tokens, as one tree of "
            f"{self.tree.num_tokens:,}, up to {self.longest:,} deep"
        )

    def folded(self) -> str:
        """Describe what is folded; empty if nothing is."""
        hidden, shown = int(self.hidden.sum()), int((self.hidden == 0).sum())
        if not hidden:
            return ""
        flat = float((self.width * self.height)[self.hidden > 0].sum())
        return (
            f"The {shown:,} blocks with most tokens at and below them can be opened; {hidden:,} smaller ones, with "
            f"{flat / self.tree.num_flat_tokens:.1%} of the flat tokens, are folded into strips of the same area."
        )

    def means(self, values: NDArray[np.float64]) -> list[float | None]:
        """The mean of a number per trajectory, float64 [K] with NaN for none, over each block's trajectories."""
        values = values[self.row_at]
        given = np.isfinite(values)
        sums, counts = (np.append(0, np.cumsum(each)) for each in (np.where(given, values, 0.0), given))
        stop = self.y + self.height
        count = counts[stop] - counts[self.y]
        mean = (sums[stop] - sums[self.y]) / np.maximum(count, 1)
        return [float(f"{value:.4g}") if some else None for value, some in zip(mean.tolist(), count.tolist())]

    @cached_property
    def read(self) -> Int64s:
        """Numbers of the blocks whose text is shown, in order."""
        order = np.argsort(-self.width * self.height * (self.branches == 0), kind="stable")[:TEXTS]
        return np.sort(order[self.branches[order] == 0])

    def texts(self, tokenizer: Decodes | None = None, total: int = TEXT_BYTES) -> list[str]:
        """Each block's text, its middle left out where it is long, or ""; token ids if there is no tokenizer."""
        most = min(max(total // max(len(self.read), 1), 80), 2400)
        texts = [""] * len(self.x)
        for block, start, count in zip(self.read.tolist(), self.start[self.read], self.unique[self.read]):
            texts[block] = shortened(self.tree.tokens[start : start + count], tokenizer, most)
        return texts

    def ids(self) -> list[str]:
        """The id of the first trajectory of each block that has a text, else ""."""
        found = [""] * len(self.x)
        for block, row in zip(self.read.tolist(), self.row_at[self.y[self.read]].tolist()):
            name = self.tree.trajectories[row].id
            found[block] = "" if name is None else str(name)[:LABEL]
        return found

    def bands(self) -> list[tuple[str, int]]:
        """(group, trajectories) of each run of trajectories of one group from the top; empty if none has a group."""
        rows = self.tree.trajectories
        groups = [rows[number].group for number in self.row_at.tolist()]
        if all(group is None for group in groups):
            return []
        starts = np.flatnonzero(np.diff(codes_of(groups), prepend=-2)).tolist()
        names = ("no group" if groups[start] is None else str(groups[start])[:LABEL] for start in starts)
        return [(name, stop - start) for name, start, stop in zip(names, starts, [*starts[1:], len(groups)])]

    def forks(self, diagnosis: Diagnosis) -> list[tuple[int, int, int]]:
        """(number of the cause, token of the row, place of the row from the top) of rows that lose sharing."""
        at = np.full(self.tree.num_trajectories, -1)
        at[self.row_at] = np.arange(len(self.row_at))
        numbers = {lost.cause: number for number, lost in enumerate(diagnosis.causes)}
        known = [(numbers[cause], token, int(at[row])) for cause, row, token in diagnosis.forks if cause in numbers]
        return known[:: max(-(-len(known) // FORKS), 1)]

    def lines(self, columns: int, lines: int) -> list[list[tuple[str, str]]]:
        """The picture as lines of (characters, kind) for a terminal; nothing may be folded."""
        lines = min(lines, self.rows)
        first = np.round(self.x * columns / max(self.longest, 1)).astype(int)
        last = np.round((self.x + self.width) * columns / max(self.longest, 1)).astype(int)
        found = []
        for line in range(lines):
            row = int((line + 0.5) * self.rows / lines)
            cells = [" "] * columns
            for block in np.flatnonzero((self.y <= row) & (row < self.y + self.height)).tolist():
                mark = MARKS[KINDS[self.kind[block]]][int(self.height[block] > 1)]
                cells[first[block] : last[block]] = mark * (last[block] - first[block])
            text = "".join(cells).rstrip()
            kinds = [next((kind for kind, marks in MARKS.items() if mark in marks), "") for mark in text]
            cuts = [0, *(n for n in range(1, len(text)) if kinds[n] != kinds[n - 1]), len(text)]
            found.append([(text[a:b], kinds[a]) for a, b in pairwise(cuts) if b > a])
        return found


MARKS = {"context": "░▒", "trained": "▓█"}
"""Characters of a terminal by kind: on one trajectory, on several."""


def draw(tree: TokenTree, *, blocks: int = BLOCKS) -> Picture:
    """Lay out a tree, folded to the `blocks` blocks with most tokens.

    Args:
        tree: the batch.
        blocks: how many to draw before the rest is folded.
    """
    whole = _all_blocks(tree)
    if len(whole.x) <= blocks:
        return _by_group(whole)
    end = tree.end[whole.start]
    last = np.searchsorted(whole.start, end)
    flat, trained = (np.append(0, np.cumsum(whole.unique * whole.height * many)) for many in (1, whole.kind))
    area, trained = flat[last] - flat[:-1], trained[last] - trained[:-1]
    kept = np.zeros(len(area), bool)
    kept[np.argsort(-area, kind="stable")[:blocks]] = True
    # The topmost folded blocks, in pre-order; those of one parent that touch become one.
    top = np.flatnonzero(~kept & ((whole.parent < 0) | kept[whole.parent]))
    touches = (np.diff(whole.parent[top], prepend=-2) == 0) & (
        np.append(-1, (whole.y + whole.height)[top][:-1]) == whole.y[top]
    )
    first = np.flatnonzero(~touches)
    lead = top[first]

    def sums(values: Int64s) -> Int64s:
        return np.add.reduceat(values, first)

    height = sums(whole.height[top])
    number = np.cumsum(kept) - 1
    at = np.flatnonzero(kept)
    joined: dict[str, Any] = {
        "x": whole.x[lead],
        "width": sums(area[top]) / height,
        "y": whole.y[lead],
        "height": height,
        "parent": whole.parent[lead],
        "kind": np.full(len(lead), KINDS.index("folded"), np.int8),
        "start": whole.start[lead],
        "unique": sums(end[top] - whole.start[top]),
        "branches": np.diff(np.append(first, len(top))),
        "hidden": sums((last - np.arange(len(last)))[top]),
        "trained": sums(trained[top]) / sums(area[top]),
    }
    order = np.argsort(np.append(whole.start[at], joined["start"]), kind="stable")
    merged = {name: np.append(getattr(whole, name)[at], values)[order] for name, values in joined.items()}
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    above = merged["parent"]
    merged["parent"] = np.where(above >= 0, place[number[above]], -1)
    return _by_group(replace(whole, **merged))


def _all_blocks(tree: TokenTree) -> Picture:
    trained = tree.trained_edges()[0] > 0
    # Nothing predicts the first token of a row: it is drawn like the one after it.
    roots = tree.segment_start[:-1][tree.segment_parent < 0]
    longer = roots[tree.end[roots] > roots + 1]
    trained[longer] = trained[longer + 1]
    through = trajectories_through(tree)
    opens = np.zeros(tree.num_tokens, bool)
    opens[tree.segment_start[:-1]] = True
    for values in (trained, through):
        opens[1:] |= values[1:] != values[:-1]
    start = np.flatnonzero(opens)
    above = tree.parent[start]
    ends = np.bincount(tree.trajectory_last[tree.trajectory_last >= 0] + 1, minlength=tree.num_tokens + 1)
    length = np.diff(np.append(start, tree.num_tokens))
    return Picture(
        tree=tree,
        x=tree.depth[start].astype(np.int64),
        width=length.astype(np.float64),
        y=np.cumsum(ends)[start],
        height=through[start],
        parent=np.where(above >= 0, np.searchsorted(start, above, side="right") - 1, -1),
        kind=trained[start].astype(np.int8),
        start=start,
        unique=length,
        branches=np.zeros(len(start), np.int64),
        hidden=np.zeros(len(start), np.int64),
        trained=trained[start].astype(np.float64),
        row_at=np.argsort(tree.trajectory_last, kind="stable")[int((tree.trajectory_last < 0).sum()) :],
    )


def _by_group(picture: Picture) -> Picture:
    """The picture with the trajectories of each group together, in the order in which groups appear.

    Within a group the order stays. So a block of one group stays whole; others are cut into pieces with the same text.
    """
    rows = picture.tree.trajectories
    group = codes_of(rows[number].group for number in picture.row_at.tolist())
    changes = np.cumsum(np.diff(group, prepend=-2) != 0)
    if not len(changes) or changes[-1] == len(np.unique(group)):
        return picture
    moved = np.argsort(group, kind="stable")
    place = np.empty_like(moved)
    place[moved] = np.arange(len(moved))
    stop = picture.y + picture.height
    mixed = changes[picture.y] != changes[stop - 1]
    whole = np.flatnonzero(~mixed)
    numbers = [whole]
    tops = [place[picture.y[whole]]]
    heights = [picture.height[whole]]
    for block in np.flatnonzero(mixed).tolist():
        at = np.sort(place[picture.y[block] : stop[block]])
        first = np.flatnonzero(np.diff(at, prepend=-2) != 1)
        numbers.append(np.full(len(first), block))
        tops.append(at[first])
        heights.append(np.diff(np.append(first, len(at))))
    number, y, height = (np.concatenate(each) for each in (numbers, tops, heights))
    order = np.lexsort((picture.x[number], y))
    number = number[order]
    y = y[order]
    height = height[order]
    each = ("x", "width", "kind", "start", "unique", "branches", "hidden", "trained")
    # A piece's parent is the last piece of the parent block that begins at its top or above.
    key = picture.parent[number] * (len(place) + 1) + y
    known = number * (len(place) + 1) + y
    by_block = np.argsort(known, kind="stable")
    found = by_block[np.maximum(np.searchsorted(known[by_block], key, side="right") - 1, 0)]
    return replace(
        picture,
        **{name: getattr(picture, name)[number] for name in each},
        y=y,
        height=height,
        parent=np.where(picture.parent[number] < 0, -1, found),
        row_at=picture.row_at[moved],
    )


def shortened(ids: NDArray[np.int32], tokenizer: Decodes | None, most: int) -> str:
    """The text of these tokens in about `most` bytes: two thirds from the start, one third from the end."""
    # No token is decoded that cannot be shown: a token is at least a byte of text.
    head, tail = 2 * most // 3, most // 3
    if len(ids) <= most and len(whole := _written(ids, tokenizer)) <= most:
        return whole.decode()
    ends = _written(ids[:head], tokenizer)[:head], _written(ids[-tail:], tokenizer)[-tail:]
    return " … ".join(each.decode(errors="ignore") for each in ends)


def _written(ids: NDArray[np.int32], tokenizer: Decodes | None) -> bytes:
    words = ids.tolist()
    return (" ".join(map(str, words)) if tokenizer is None else tokenizer.decode(words)).encode()

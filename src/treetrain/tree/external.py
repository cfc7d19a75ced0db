"""Exact tree statistics of more rows than fit in memory, by an external merge sort.

Rows are sorted in runs of bounded size, which are written to temporary files and merged. Sorted rows are the paths of
the prefix tree in depth-first order, and a row shares the most tokens with the row just before it. So one path is
enough: for every token of the last row, the number of rows through it, and what they train. When the next row
shares p tokens, the tokens from depth p on are complete and are counted. Memory is bounded by a run, a buffer
per run, one path, and three numbers per row.
"""

import heapq
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from treetrain.data.trajectory import Trajectory
from treetrain.errors import DataError, quoted
from treetrain.tree.assemble import Int32s
from treetrain.tree.attention_range import FULL, Pairs, pairs_of_rows
from treetrain.tree.build import shared_prefixes
from treetrain.tree.stats import FlopCounter, TreeStats, Work

RUN_TOKENS = 1 << 25
"""Tokens that are sorted at once; a run takes about 12 bytes for each."""
BUFFER = 1 << 17
"""Integers of a run that are read at once."""
_HEAD = 3  # numbers before a row's spans and new tokens: tokens shared with the row before it, tokens, spans

Bools = NDArray[np.bool_]


class _Row(NamedTuple):
    ids: bytes
    """The key as 4 bytes, then the token ids: equal prefixes are neighbours in the order of these bytes."""
    spans: Int32s
    """The ranges of trained tokens, as depths: start, stop, start, stop, ..."""


class ExternalTree:
    """Collects rows, and computes the statistics of their tree.

    Args:
        run_tokens: tokens that are sorted in memory at once.
        progress: called with (rows merged so far, all rows).
    """

    def __init__(self, *, run_tokens: int = RUN_TOKENS, progress: Callable[[int, int], None] | None = None) -> None:
        self._run_tokens = run_tokens
        self._progress = progress
        self._folder = tempfile.TemporaryDirectory(prefix="treetrain-")
        self._runs: list[str] = []
        self._pending: list[_Row] = []
        self._tokens = 0
        self._keys: dict[Any, int] = {}
        self.rows = 0
        """Rows added, empty ones included."""
        self.flat = 0
        """Their tokens."""

    def add(self, row: Trajectory) -> None:
        """Add a row.

        Raises:
            DataError: the row has recorded experts, which are only supported in memory.
        """
        if row.experts is not None:
            raise DataError(
                f"row {quoted(row.id)} has recorded experts, which are compared only if all rows fit in memory; "
                "inspect fewer rows at a time, or rows without experts"
            )
        self.rows += 1
        self.flat += len(row)
        if len(row) == 0:
            return
        key = np.int32(self._keys.setdefault(row.key, len(self._keys)))
        if row.loss_weights is None:
            spans = np.array([1, len(row)], np.int32)
        else:
            trained = np.zeros(len(row) + 2, np.int8)
            trained[2:-1] = row.loss_weights[1:] != 0
            spans = np.flatnonzero(np.diff(trained)).astype(np.int32)
        self._pending.append(_Row(key.tobytes() + row.ids.tobytes(), spans))
        self._tokens += len(row)
        if self._tokens >= self._run_tokens:
            self._write_run()

    def stats(self, shape: FlopCounter | None = None) -> TreeStats:
        """The statistics of `tree_stats`; call this only once."""
        runs: list[Iterator[_Row]] = [_read(path) for path in self._runs]
        runs.append(iter(sorted(self._pending, key=lambda row: row.ids)))
        path = _Path()
        with self._folder:
            for number, row in enumerate(heapq.merge(*runs, key=lambda row: row.ids)):
                path.add(row)
                if self._progress is not None and number % 4096 == 0:
                    self._progress(number, self.rows)
            path.close()
        return path.stats(self.rows, self.flat, shape)

    def _write_run(self) -> None:
        rows = sorted(self._pending, key=lambda row: row.ids)
        flat = np.frombuffer(b"".join(row.ids for row in rows), np.int32)
        lengths = np.array([len(row.ids) // 4 for row in rows], np.int64)
        # Every row keeps only the tokens that it does not share with the row before it.
        shared = shared_prefixes(flat, lengths)
        start = np.cumsum(lengths) - lengths
        pieces: list[NDArray[Any]] = []
        for row, first, length, common in zip(rows, start.tolist(), lengths.tolist(), shared.tolist()):
            pieces.append(np.array([common, length, len(row.spans)], np.int32))
            pieces += [row.spans, flat[first + common : first + length]]
        path = os.path.join(self._folder.name, f"{len(self._runs)}")
        try:
            with open(path, "wb") as file:
                np.concatenate(pieces, dtype=np.int32).tofile(file)
        except OSError as error:
            raise DataError(
                f"{path}: the sorted rows cannot be written there ({error.strerror or error}); make room, or set TMPDIR"
            ) from error
        self._runs.append(path)
        self._pending, self._tokens = [], 0


def _read(path: str) -> Iterator[_Row]:
    """The rows of a run, in order."""
    ids, buffer, at = b"", np.zeros(0, np.int32), 0
    with open(path, "rb") as file:

        def fill(count: int) -> bool:
            nonlocal buffer, at
            if len(buffer) - at < count:
                buffer = np.concatenate([buffer[at:], np.fromfile(file, np.int32, max(BUFFER, count))])
                at = 0
            return len(buffer) - at >= count

        while fill(_HEAD):
            common, length, spans = buffer[at : at + _HEAD].tolist()
            fill(_HEAD + spans + length - common)
            at += _HEAD
            ids = ids[: 4 * common] + buffer[at + spans : at + spans + length - common].tobytes()
            yield _Row(ids, buffer[at : at + spans])
            at += spans + length - common


class _Path:
    """The path to the last row, and the counts of all tokens that are complete."""

    def __init__(self) -> None:
        self.ids = np.zeros(0, np.int32)
        self.length = 0
        self.capacity = 0
        self.through = np.zeros(0, np.int64)
        self.trained, self.needed, self.predicts = (np.zeros(0, bool) for _ in range(3))
        self.needed_at = np.zeros(0, np.int64)
        # Tokens of the path that later rows branch off from: [depth, children, most forks on any path below].
        self.branches: list[list[int]] = []
        self.counts = dict.fromkeys(("unique", "trained", "saved", "saved_trained"), 0)
        self.trees = self.forks = self.fork_children = self.most_children = self.most_forks = 0
        self.leaves = self.duplicates = self.head_rows = self.longest = self.trained_flat = 0
        self.deepest: list[int] = []
        self.dedup: list[tuple[int, int]] = []

    def add(self, row: _Row) -> None:
        """Add the next row of the sorted order."""
        ids = np.frombuffer(row.ids, np.int32)
        common = self._common(ids)
        length = len(ids) - 1
        spans = row.spans.reshape(-1, 2)
        count, deepest = int((spans[:, 1] - spans[:, 0]).sum()), int(spans[-1, 1]) - 1 if len(spans) else 0
        self.deepest.append(deepest)
        self.trained_flat += count
        if common == length == self.length:
            self.duplicates += 1
            if deepest > self.dedup[-1][0]:
                self.dedup[-1] = deepest, count
        else:
            self.dedup.append((deepest, count))
            self._leave(common)
            below = self._pop(common - 1)
            if common:
                self._branch(common - 1, below)
            self.trees += common == 0
            self.ids, self.length = ids, length
            self.longest = max(self.longest, length)
            self._grow(length)
        self.through[:length] += 1
        self.needed[:deepest] = True
        for first, stop in spans.tolist():
            self.trained[first:stop] = True
            self.predicts[first - 1 : stop - 1] = True

    def close(self) -> None:
        """Count the tokens of the last path."""
        self._leave(0)
        self._pop(-1)

    def _common(self, ids: Int32s) -> int:
        """Tokens shared with the last row; the first number is the key."""
        length = min(len(ids), len(self.ids))
        if length == 0 or ids[0] != self.ids[0]:
            return 0
        different = ids[:length] != self.ids[:length]
        at = int(different.argmax())
        return (at if different[at] else length) - 1

    def _grow(self, length: int) -> None:
        if length > self.capacity:
            more = max(length, 2 * self.capacity) - self.capacity
            for name in ("through", "trained", "needed", "predicts", "needed_at"):
                values = getattr(self, name)
                setattr(self, name, np.append(values, np.zeros(more, values.dtype)))
            self.capacity += more

    def _leave(self, depth: int) -> None:
        """Count and drop the tokens of the path from a depth on."""
        here = slice(depth, self.length)
        if self.length > depth:
            self.leaves += 1
            own, through, trained = self.counts, self.through[here] - 1, self.trained[here]
            own["unique"] += self.length - depth
            own["trained"] += int(np.count_nonzero(trained))
            own["saved"] += int(through.sum())
            own["saved_trained"] += int(through @ trained)
            self.head_rows += int(np.count_nonzero(self.predicts[here]))
            self.needed_at[here] += self.needed[here]
        for values in (self.through, self.trained, self.needed, self.predicts):
            values[here] = 0

    def _branch(self, depth: int, below: int) -> None:
        """A row continues the token at this depth, which has `below` forks on a path below it."""
        if not self.branches or self.branches[-1][0] < depth:
            # If the last row ends there, this is the token's first child.
            self.branches.append([depth, int(depth + 1 < self.length), 0])
        top = self.branches[-1]
        top[1] += 1
        top[2] = max(top[2], below)

    def _pop(self, depth: int) -> int:
        """Drop the branching tokens below a depth; returns the most forks on any path below it."""
        below = 0
        while self.branches and self.branches[-1][0] > depth:
            _, children, most = self.branches.pop()
            below = max(below, most)
            if children > 1:
                below += 1
                self.forks += 1
                self.fork_children += children
                self.most_children = max(self.most_children, children)
        self.most_forks = max(self.most_forks, below)
        return below

    def stats(self, rows: int, flat: int, shape: FlopCounter | None) -> TreeStats:
        counts, unique = self.counts, self.counts["unique"]
        speedup = dedup = None
        if shape is not None:
            ranges = shape.attention_ranges
            depths = np.arange(len(self.needed_at))
            pairs: Pairs = {one: int(one.seen(depths) @ self.needed_at) for one in ranges}
            pairs = pairs[FULL] if tuple(ranges) == (FULL,) else pairs
            ours = shape.flops(*Work(int(self.needed_at.sum()), pairs, self.head_rows))

            def ratio(lengths: NDArray[np.int64], head_rows: int) -> float:
                linear = Work(int(lengths.sum()), pairs_of_rows(lengths, ranges), head_rows)
                return shape.flops(*linear) / ours if ours else 1.0

            once = np.array(self.dedup, np.int64).reshape(-1, 2)
            speedup = ratio(np.array(self.deepest, np.int64), self.trained_flat)
            dedup = ratio(once[:, 0], int(once[:, 1].sum()))
        return TreeStats(
            trajectories=rows,
            trees=self.trees,
            flat=flat,
            unique=unique,
            overlap=1 - unique / flat if flat else 0.0,
            token_speedup=flat / unique if unique else 1.0,
            flop_speedup=speedup,
            flop_speedup_dedup=dedup,
            longest_path=self.longest,
            segments=self.trees + self.fork_children,
            forks=self.forks,
            max_out_degree=max(self.most_children, int(self.longest > 1)),
            max_forks_on_path=self.most_forks,
            leaves=self.leaves,
            duplicates=self.duplicates,
            trained_flat=self.trained_flat,
            trained_unique=counts["trained"],
            saved_trained=counts["saved_trained"],
            saved_context=counts["saved"] - counts["saved_trained"],
        )

"""Rows as they are read: all of them, or exact statistics of all and a sample of whole groups.

A sample by the hash of the group's name is uniform over groups, the same in every run, and needs one pass: when the
sample has grown too large, the groups with the largest hash are dropped, and so are later rows with a larger one.
"""

import heapq
import zlib
from collections.abc import Callable, Iterator
from itertools import chain

import numpy as np

from treetrain.data.trajectory import Trajectory
from treetrain.tree.build import build_tree
from treetrain.tree.external import ExternalTree
from treetrain.tree.stats import FlopCounter, TreeStats

MEMORY_TOKENS = 1 << 25
"""Flat tokens up to which all rows are kept."""
SAMPLE_TOKENS = 1 << 22
"""Flat tokens of a sample."""
TOGETHER = 64
"""Consecutive rows that stay together if they have no group and no episode."""


class Sampler:
    """Keeps the rows that are read if they fit in memory, else a sample. A `collect` of `tt.load`.

    Args:
        shape: the model that FLOPs are counted for.
        memory_tokens: the largest number of flat tokens that are kept.
        sample_tokens: the size of a sample.
        progress: called with what is done, and the rows done and their number (0 if it is not known yet).
    """

    def __init__(
        self,
        shape: FlopCounter,
        *,
        memory_tokens: int = MEMORY_TOKENS,
        sample_tokens: int = SAMPLE_TOKENS,
        progress: Callable[[str, int, int], None] = lambda doing, done, total: None,
    ) -> None:
        self._shape = shape
        self._memory_tokens = memory_tokens
        self._sample_tokens = sample_tokens
        self._progress = progress
        self.stats: TreeStats | None = None
        """Statistics of all rows; None if all rows are kept."""
        self.note = ""
        """What is exact and what is sampled, in words."""

    def __call__(self, rows: Iterator[Trajectory]) -> list[Trajectory]:
        """The rows to keep, in order."""
        kept, tokens = [], 0
        for row in rows:
            kept.append(row)
            tokens += len(row)
            if len(kept) % 1024 == 0:
                self._progress("reading", len(kept), 0)
            if tokens > self._memory_tokens:
                return self._sampled(kept, rows)
        return kept

    def _sampled(self, first: list[Trajectory], rest: Iterator[Trajectory]) -> list[Trajectory]:
        first.reverse()
        external = ExternalTree(progress=lambda done, of: self._progress("merging", done, of))
        # Groups are known by their hash: two with the same one are kept or dropped together.
        groups: dict[int, list[tuple[int, Trajectory]]] = {}
        largest: list[int] = []
        threshold, tokens = 1 << 32, 0
        seen: set[int] = set()

        def add(number: int, row: Trajectory) -> None:
            nonlocal threshold, tokens
            external.add(row)
            name = row.group if row.group is not None else row.episode
            name = ("rows", number // TOGETHER) if name is None else name
            place = zlib.crc32(repr(name).encode(errors="replace"))
            seen.add(place)
            if place < threshold:
                if place not in groups:
                    groups[place] = []
                    heapq.heappush(largest, -place)
                groups[place].append((number, row))
                tokens += len(row)
            while tokens > self._sample_tokens and len(groups) > 1:
                threshold = -heapq.heappop(largest)
                tokens -= sum(len(dropped) for _, dropped in groups.pop(threshold))
            if number % 1024 == 0:
                self._progress("reading", number, 0)

        while first:
            add(external.rows, first.pop())
        for row in rest:
            add(external.rows, row)
        rows = [row for _, row in sorted(chain.from_iterable(groups.values()), key=lambda found: found[0])]
        self.stats = external.stats(self._shape)
        overlap, error = overlap_within([[row for _, row in own] for own in groups.values()])
        self.note = (
            f"{self.stats.flat:,} tokens are more than {self._memory_tokens:,}, so the rows were not kept. The figures "
            "of all rows are exact (an external merge). Groups, batches, causes, the picture and the plan are of a "
            f"sample: {len(rows):,} of {external.rows:,} rows, in {len(groups):,} of {len(seen):,} whole groups (runs "
            f"of {TOGETHER} rows where there are none); overlap within them {overlap:.4f}, standard error {error:.4f}"
        )
        return rows


def overlap_within(groups: list[list[Trajectory]]) -> tuple[float, float]:
    """The overlap within groups, and its standard error where they are a sample (a ratio estimator)."""
    sizes = [(tree.num_flat_tokens, tree.num_tokens) for tree in map(build_tree, groups)]
    flat, unique = np.array(sizes, np.float64).T
    ratio = unique.sum() / max(flat.sum(), 1.0)
    apart = unique - ratio * flat
    count = len(sizes)
    error = np.sqrt((apart @ apart) / max(count - 1, 1) / count) / max(flat.mean(), 1.0)
    return float(1 - ratio), float(error)

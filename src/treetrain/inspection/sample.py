"""Keep rows as they are read: all of them, or a sample of whole groups with an estimate of how much all rows share.

Groups are drawn by the hash of their name. So the sample is uniform over groups, the same in every run, and needs one
pass: when it grows too large, the groups with the largest hashes are dropped, and later rows with such hashes are
skipped. Skipped rows that name a group or episode are not even tokenised.

Why the estimate is right: a token of the sample's tree that only one sampled group uses also stands for tokens of the
groups left out, so it is scaled up as rows are. A token that several sampled groups share, such as one of a common
system prompt, is assumed to be in most groups and counts once. This is the Good-Turing estimate of the tokens that
another group would add. It overcounts tokens that few groups share, so all rows share at least about as much as
estimated.
"""

import dataclasses
import heapq
import zlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from treetrain.data.trajectory import Trajectory
from treetrain.errors import DataError, quoted
from treetrain.tree.build import build_tree
from treetrain.tree.stats import FlopCounter, linear_work, trajectories_through, tree_work
from treetrain.tree.token_tree import TokenTree

MEMORY_TOKENS = 1 << 25
"""All rows are kept up to this many flat tokens."""
SAMPLE_TOKENS = 1 << 22
"""Flat tokens of a sample."""
TOGETHER = 64
"""Number of neighbouring rows that a sample of a tree keeps together."""
PLACES = 1 << 32
"""Number of possible hashes."""
PARTS = 16
"""Number of parts of a sample. The spread of their estimates gives the errors."""
COMMON = 1 / 32
"""Rows without a group are grouped by their first tokens, by so many that no group has more of the rows than this."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Figures of all rows, estimated from a sample. Each error is one standard error."""

    groups: int
    """Groups in the sample."""
    share: float
    """The sample's share of the rows."""
    flat: float
    flat_error: float
    unique: float
    unique_error: float
    overlap: float
    overlap_error: float
    flop_speedup: float
    flop_speedup_error: float

    def words(self) -> str:
        """The figures in one line."""
        return (
            f"about {self.flat:,.0f} flat and {self.unique:,.0f} unique tokens, overlap {self.overlap:.4f} ± "
            f"{self.overlap_error:.4f}, FLOP-ideal speed-up {self.flop_speedup:.2f}x ± {self.flop_speedup_error:.2f}"
        )


def rows_of_tree(
    tree: TokenTree, *, memory_tokens: int = MEMORY_TOKENS, sample_tokens: int = SAMPLE_TOKENS
) -> list[Trajectory]:
    """The rows to keep of a batch given as a tree: all, or random runs of neighbouring rows."""
    if tree.num_flat_tokens <= memory_tokens:
        return list(tree.trajectories)
    order = np.argsort(tree.trajectory_last, kind="stable")
    runs = np.split(order, range(TOGETHER, len(order), TOGETHER))
    picked, tokens = [], 0
    for run in np.random.default_rng(0).permutation(len(runs)).tolist():
        picked += runs[run].tolist()
        tokens += int(tree.trajectory_length[runs[run]].sum())
        if tokens > sample_tokens:
            break
    return [tree.trajectories[row] for row in sorted(picked)]


class Sampler:
    """Keeps the rows that are read if they fit in memory, else a sample. Pass it to `tt.load` as `collect`.

    Args:
        counts: the model that FLOPs are counted for.
        memory_tokens: the largest number of flat tokens that are kept.
        sample_tokens: the target size of a sample, in flat tokens.
        progress: called with the number of rows read so far.
    """

    def __init__(
        self,
        counts: FlopCounter,
        *,
        memory_tokens: int = MEMORY_TOKENS,
        sample_tokens: int = SAMPLE_TOKENS,
        progress: Callable[[int], None] = lambda rows: None,
    ) -> None:
        self._counts = counts
        self._memory_tokens = memory_tokens
        self._sample_tokens = sample_tokens
        self._progress = progress
        self._threshold = PLACES
        self._prefix = 0  # leading tokens that make rows without group and episode one group
        self._named: Counter[int] = Counter()  # rows of each group in the sample, before conversion
        self._rows = 0  # of all groups
        self.estimate: Estimate | None = None
        """Figures of all rows; None if all rows are kept."""

    def wants(self, group: Hashable, episode: Hashable) -> bool:
        """Whether a row may be in the sample; `tt.load` calls this before it converts the row."""
        self._rows += 1
        self._progress(self._rows)
        if group is None and episode is None:
            return True
        place = _place(episode if group is None else group)
        wanted = place < self._threshold
        if wanted:
            self._named[place] += 1
        return wanted

    def __call__(self, rows: Iterator[Trajectory]) -> list[Trajectory]:
        """The rows to keep, in order.

        Raises:
            DataError: two groups alone have more than `memory_tokens` tokens.
        """
        kept, tokens = [], 0
        for row in rows:
            kept.append(row)
            self._progress(max(self._rows, len(kept)))
            tokens += len(row)
            if tokens > self._memory_tokens:
                return self._sampled(kept, rows)
        return kept

    def _sampled(self, first: list[Trajectory], rest: Iterator[Trajectory]) -> list[Trajectory]:
        self._prefix = _prefix([row for row in first if row.group is None and row.episode is None])
        # Groups with the same hash are kept or dropped together.
        groups: dict[int, list[tuple[int, Trajectory]]] = {}
        largest: list[int] = []
        number = tokens = 0
        first.reverse()
        while (row := first.pop() if first else next(rest, None)) is not None:
            number += 1
            self._progress(max(self._rows, number))
            name = row.group if row.group is not None else row.episode
            place = _place(row.ids[: self._prefix].tobytes() if name is None else name)
            if place >= self._threshold:
                continue
            if place not in groups:
                groups[place] = []
                heapq.heappush(largest, -place)
            groups[place].append((number, row))
            tokens += len(row)
            if tokens > self._memory_tokens and len(groups) <= 2:
                most = max(groups.values(), key=lambda own: sum(len(row) for _, row in own))[0][1]
                raise DataError(
                    f"group {quoted(most.group)} of row {quoted(most.id)} is too large for a sample of whole groups: "
                    f"two groups have more than {self._memory_tokens:,} tokens; name smaller groups (--map "
                    "group_id=KEY), or inspect fewer rows"
                )
            while tokens > self._sample_tokens and len(groups) > 2:
                self._threshold = -heapq.heappop(largest)
                tokens -= sum(len(dropped) for _, dropped in groups.pop(self._threshold))
                del self._named[self._threshold]
        # Rows without names or calls of `wants` are counted after conversion.
        sizes = [self._named[place] or len(own) for place, own in groups.items()]
        self.estimate = _estimate(
            [[row for _, row in own] for own in groups.values()], sizes, max(self._rows, number), self._counts
        )
        return [row for _, row in sorted((one for own in groups.values() for one in own), key=lambda one: one[0])]


def _place(name: Hashable) -> int:
    return zlib.crc32(name if isinstance(name, bytes) else repr(name).encode(errors="replace"))


def _prefix(rows: list[Trajectory]) -> int:
    """The shortest prefix length that at most a share of `COMMON` of the rows, or one row, have in common."""

    def splits(count: int) -> bool:
        alike = Counter(row.ids[:count].tobytes() for row in rows).values()
        return max(alike, default=0) <= max(COMMON * len(rows), 1)

    return bisect_left(range(max(map(len, rows), default=0)), True, key=splits)


def _estimate(groups: Sequence[list[Trajectory]], sizes: list[int], rows: int, counts: FlopCounter) -> Estimate:
    """Estimate the figures of all rows.

    Args:
        groups: the rows of each sampled group.
        sizes: the number of rows of each sampled group, counted as in `rows`.
        rows: number of all rows.
    """

    tree = build_tree([row for group in groups for row in group])
    group_of = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    only = _only_group(tree, group_of)
    ranges, shared = counts.attention_ranges, only < 0
    shared_flops = counts.flops(*tree_work(tree, ranges, shared))

    def figures(part: NDArray[np.bool_]) -> NDArray[np.float64]:
        """The estimate from some of the groups, bool [G]."""
        times = rows / np.array(sizes)[part].sum()
        mine, own = part[group_of], part[only] & ~shared
        flat = times * int(tree.trajectory_length[mine].sum())
        unique = times * int(own.sum()) + int(shared.sum())
        ours = times * counts.flops(*tree_work(tree, ranges, own)) + shared_flops
        linear = times * counts.flops(*linear_work(tree, ranges, mine))
        return np.array([flat, unique, 1 - unique / max(flat, 1), linear / ours if ours else 1.0])

    parts = min(PARTS, len(groups))
    values = figures(np.ones(len(groups), bool))
    apart = np.array([figures(np.arange(len(groups)) % parts == part) for part in range(parts)])
    errors = apart.std(axis=0, ddof=1) / np.sqrt(parts)
    names = ("flat", "unique", "overlap", "flop_speedup")
    given = dict(zip(names, values.tolist())) | dict(zip((f"{name}_error" for name in names), errors.tolist()))
    return Estimate(groups=len(groups), share=sum(sizes) / rows, **given)


def _only_group(tree: TokenTree, group: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64 [N]: the group of all trajectories through each token; -1 if they have several.

    Args:
        group: [K], ascending: the group of each trajectory.
    """
    last = tree.trajectory_last
    order = np.argsort(last, kind="stable")[int((last < 0).sum()) :]
    changes = np.append(0, np.cumsum(np.diff(group[order]) != 0))
    ends = np.bincount(last[order] + 1, minlength=tree.num_tokens + 1)
    first = np.cumsum(ends)[:-1]
    one = changes[first] == changes[first + trajectories_through(tree) - 1]
    return np.where(one, group[order][first], -1)

"""Keep rows as they are read: all of them if they fit in memory, else a random sample of whole groups.

Groups are drawn by the hash of their name. So the sample is uniform over groups, the same in every run, and needs one
pass: when it grows too large, the groups with the largest hashes are dropped, and later rows with such hashes are
skipped. Skipped rows that name a group or episode are not even tokenised.
"""

import zlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from itertools import compress

import numpy as np

from treetrain.core.errors import DataError, quoted
from treetrain.layers.trajectory import Trajectory

MEMORY_TOKENS = 1 << 25
"""All rows are kept up to this many flat tokens."""
SAMPLE_TOKENS = 1 << 22
"""Most flat tokens of a sample, unless one group is large. A larger one is cut to half of this."""
HASHES = 1 << 32
"""Number of possible hashes."""
COMMON = 1 / 32
"""Rows without a group are grouped by a prefix long enough that no group has more than this share of the rows."""

REMARKS = 10_000
"""Different remarks on records that are kept once."""


class Sampler:
    """Keeps the rows that are read if they fit in memory, else a sample. Pass it to `tt.load` as `collect`.

    Args:
        memory_tokens: all rows are kept up to this many flat tokens.
        sample_tokens: see `SAMPLE_TOKENS`.
        progress: called with the number of rows read so far.
    """

    def __init__(
        self,
        *,
        memory_tokens: int = MEMORY_TOKENS,
        sample_tokens: int = SAMPLE_TOKENS,
        progress: Callable[[int], None] = lambda rows: None,
    ) -> None:
        self._memory_tokens = memory_tokens
        self._sample_tokens = sample_tokens
        self._progress = progress
        self._threshold = HASHES
        self._prefix = 0  # leading tokens that make rows without group and episode one group
        self.remarks: list[tuple[str, ...]] = []
        """Remarks on the record of each row that is kept."""
        self._said: tuple[str, ...] = ()
        self._known: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._asked = self._read = 0  # rows, before they are converted and after: a conversation has several calls

    @property
    def share(self) -> float:
        """The share of the groups that is kept: 1 if all rows are."""
        return self._threshold / HASHES

    def wants(self, group: Hashable, episode: Hashable) -> bool:
        """Whether a row may be in the sample; `tt.load` calls this before it converts the row."""
        self._asked += 1
        self._progress(max(self._asked, self._read))
        return (group is None and episode is None) or _hash(episode if group is None else group) < self._threshold

    def hear(self, remarks: tuple[str, ...]) -> None:
        """Called with the remarks on a record before its rows come; equal ones are kept once."""
        if len(self._known) < REMARKS:
            self._known.setdefault(remarks, remarks)
        self._said = self._known.get(remarks, remarks)

    def __call__(self, rows: Iterator[Trajectory]) -> list[Trajectory]:
        """The rows to keep, in order.

        Raises:
            DataError: a group alone has more than `memory_tokens` tokens.
        """
        kept: list[Trajectory] = []
        tokens, most = 0, self._memory_tokens
        for self._read, row in enumerate(rows, 1):
            self._progress(max(self._asked, self._read))
            if self._threshold < HASHES and self._place(row) >= self._threshold:
                continue
            kept.append(row)
            self.remarks.append(self._said)
            tokens += len(row)
            if tokens > most:
                self._prefix = self._prefix or _prefix(
                    [row for row in kept if row.group is None and row.episode is None]
                )
                kept = self._cut(kept)
                tokens = sum(map(len, kept))
                if tokens > self._memory_tokens:
                    raise DataError(
                        f"group {quoted(kept[0].group)} of row {quoted(kept[0].id)} is too large for a sample of whole "
                        f"groups: it has more than {self._memory_tokens:,} tokens; name smaller groups (--map "
                        "group_id=KEY), or inspect fewer rows"
                    )
                most = max(self._sample_tokens, min(2 * tokens, self._memory_tokens))
        return kept

    def _place(self, row: Trajectory) -> int:
        name = row.episode if row.group is None else row.group
        return _hash(row.ids[: self._prefix].tobytes() if name is None else name)

    def _cut(self, rows: list[Trajectory]) -> list[Trajectory]:
        """The rows of the groups with the smallest hashes: half of a sample's tokens, and at least one group."""
        places = [self._place(row) for row in rows]
        sizes: Counter[int] = Counter()
        for place, row in zip(places, rows):
            sizes[place] += len(row)
        order = sorted(sizes)
        enough = np.cumsum([sizes[place] for place in order]) <= self._sample_tokens / 2
        self._threshold = next((place for place, fits in zip(order[1:], enough[1:]) if not fits), self._threshold)
        fits = [place < self._threshold for place in places]
        self.remarks = list(compress(self.remarks, fits))
        return list(compress(rows, fits))


def _hash(name: Hashable) -> int:
    return zlib.crc32(name if isinstance(name, bytes) else repr(name).encode(errors="replace"))


def _prefix(rows: list[Trajectory]) -> int:
    """The shortest prefix length at which at most a share of `COMMON` of the rows (or one row) have equal prefixes."""

    def splits(count: int) -> bool:
        alike = Counter(row.ids[:count].tobytes() for row in rows).values()
        return max(alike, default=0) <= max(COMMON * len(rows), 1)

    return bisect_left(range(max(map(len, rows), default=0)), True, key=splits)

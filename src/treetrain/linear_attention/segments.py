"""Cuts a forest into runs without a fork, for kernels that scan many sequences at once, each from a state of its own.

Such a kernel gives the state after a sequence's last token and no other. So a run ends at every fork and wherever a
state is handed on, and a run starts from the state at the end of the one before it. Runs of one depth in the tree of
runs form a *level*, and a level is one call; runs that nothing continues need no level: they are one last call.
"""

from dataclasses import dataclass

import numpy as np

from treetrain.linear_attention.tiles import levels_of
from treetrain.tree.assemble import Int64s
from treetrain.tree.layout import PackedLayout


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """Runs that are scanned at once: n runs of t tokens in all."""

    offsets: Int64s
    """int64 [n + 1]: where each run begins among the call's tokens."""
    entry: Int64s
    """int64 [n]: the state each run starts from, counted among those of the call before (0 is the state before the
    roots in the first call); in the last call among all: 0 is the one before the roots, 1 + e that of end e."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Segments:
    """The runs of a forest of N tokens by call, and the E states at the ends of those that go on."""

    order: Int64s
    """int64 [N]: the token at every place, the calls one after the other."""
    levels: tuple[Call, ...]
    """Runs whose last state is needed. Ends are counted in this order, from 0."""
    last: Call | None
    """Runs whose last state nobody needs."""
    exported: Int64s
    """int64 [x]: the end of every exported token."""

    @property
    def calls(self) -> int:
        """Calls of the kernel in a forward."""
        return len(self.levels) + (self.last is not None)

    @property
    def runs(self) -> int:
        """Runs of all calls."""
        return sum(len(call.entry) for call in self._calls)

    def slots(self, chunk: int) -> int:
        """Tokens with every run filled up to whole chunks, as kernels compute them."""
        return sum(int((-(-np.diff(call.offsets) // chunk)).sum()) * chunk for call in self._calls)

    @property
    def _calls(self) -> tuple[Call, ...]:
        return self.levels if self.last is None else (*self.levels, self.last)


def make_segments(layout: PackedLayout, exported: Int64s) -> Segments:
    """Cut a forest.

    Args:
        layout: N tokens, N > 0.
        exported: int64 [x]: tokens whose state is wanted.
    """
    tokens = np.arange(layout.num_tokens)
    children = np.bincount(layout.parent[layout.parent >= 0], minlength=len(tokens))
    wanted = np.zeros(len(tokens), bool)
    wanted[exported] = True
    begins = (layout.parent != tokens - 1) | np.append(True, (children[:-1] != 1) | wanted[:-1])
    start = np.flatnonzero(begins)
    length = np.diff(start, append=len(tokens))
    run_of = np.cumsum(begins) - 1
    above = np.where(layout.parent[start] >= 0, run_of[layout.parent[start]], -1)
    end = start + length - 1
    level = levels_of(above)
    goes_on = (children[end] > 0) | wanted[end]

    inner = np.flatnonzero(goes_on)[np.argsort(level[goes_on], kind="stable")]
    number = np.full(len(start), -1, np.int64)  # of a run's end
    number[inner] = np.arange(len(inner))
    counts = np.bincount(level[inner])
    first = np.cumsum(counts) - counts
    levels = []
    for depth, (begin, count) in enumerate(zip(first.tolist(), counts.tolist())):
        runs = inner[begin : begin + count]
        entry = number[above[runs]] - first[depth - 1] if depth else np.zeros(count, np.int64)
        levels.append(Call(offsets=_offsets(length[runs]), entry=entry))
    rest = np.flatnonzero(~goes_on)
    last = None
    if len(rest):
        entry = np.where(above[rest] >= 0, 1 + number[above[rest]], 0)
        last = Call(offsets=_offsets(length[rest]), entry=entry)
    return Segments(
        order=_tokens_of(np.concatenate([inner, rest]), start, length),
        levels=tuple(levels),
        last=last,
        exported=number[run_of[exported]],
    )


def _tokens_of(runs: Int64s, start: Int64s, length: Int64s) -> Int64s:
    """The tokens of these runs, one run after the other."""
    before = np.cumsum(length[runs]) - length[runs]
    return np.arange(int(length[runs].sum())) + np.repeat(start[runs] - before, length[runs])


def _offsets(length: Int64s) -> Int64s:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(length)])

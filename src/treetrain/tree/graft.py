"""Merge the nodes of a tree by token: siblings that begin alike share what they have in common."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from treetrain.tree.assemble import Int32s, Int64s


class Grafts(NamedTuple):
    """Runs of tokens for `assemble`, and where each node went."""

    buffer: Int32s
    run_start: Int64s
    run_length: Int64s
    run_attach: Int64s
    last: list[int]
    """Per node, the buffer position of the last token of its path (-1: an empty path)."""
    range_start: Int64s
    range_length: Int64s
    """The nodes' tokens one after the other, in the order given, as ranges of buffer positions."""


class _Runs:
    """Runs that only grow at the end; a child of a position is found by (position, key, token)."""

    def __init__(self, capacity: int) -> None:
        self.buffer = np.zeros(capacity, np.int32)
        self.start: list[int] = []
        self.stop: list[int] = []
        self.attach: list[int] = []
        self.key: list[int] = []
        self.child: dict[tuple[int, int, int], int] = {}
        self.filled = 0

    def add(self, at: int, key: int, ids: Int32s) -> int:
        run, start = len(self.start), self.filled
        self.filled = start + len(ids)
        self.buffer[start : self.filled] = ids
        self.start.append(start)
        self.stop.append(self.filled)
        self.attach.append(at)
        self.key.append(key)
        self.child[at, key, int(ids[0])] = run
        return run

    def shared(self, position: int, stop: int, ids: Int32s) -> int:
        """How many leading ids equal the buffer from `position` on, before `stop`."""
        count = min(stop - position, len(ids))
        if count <= 0 or self.buffer[position] != ids[0]:
            return 0
        differs = self.buffer[position : position + count] != ids[:count]
        return int(differs.argmax()) if differs.any() else count


def graft(contents: Sequence[Int32s], parents: list[int], keys: list[int], order: list[int]) -> Grafts:
    """Insert nodes one by one, parents first, into a set of runs.

    Args:
        contents: every node's ids.
        parents: every node's parent, -1 at roots.
        keys: a number per node; nodes of different key share no token.
        order: the nodes to insert, parents before children.

    Work is one lookup per run that a node's tokens pass through, plus its tokens.
    """
    runs = _Runs(sum(len(contents[node]) for node in order))
    last, held_by = [-1] * len(parents), [-1] * len(parents)
    range_start: list[int] = []
    range_length: list[int] = []
    for node in order:
        ids, key, above = contents[node], keys[node], parents[node]
        at, run = (last[above], held_by[above]) if above >= 0 else (-1, -1)
        done = 0
        while done < len(ids):
            rest = ids[done:]
            if at >= 0 and runs.key[run] == key and (count := runs.shared(at + 1, runs.stop[run], rest)):
                begin = at + 1
            elif (child := runs.child.get((at, key, int(rest[0])))) is not None:
                run, begin = child, runs.start[child]
                count = runs.shared(begin, runs.stop[run], rest)
            else:
                run, begin, count = runs.add(at, key, rest), runs.filled - len(rest), len(rest)
            range_start.append(begin)
            range_length.append(count)
            at = begin + count - 1
            done += count
        last[node], held_by[node] = at, run
    start, stop = np.array(runs.start, np.int64), np.array(runs.stop, np.int64)
    return Grafts(
        buffer=runs.buffer,
        run_start=start,
        run_length=stop - start,
        run_attach=np.array(runs.attach, np.int64),
        last=last,
        range_start=np.array(range_start, np.int64),
        range_length=np.array(range_length, np.int64),
    )

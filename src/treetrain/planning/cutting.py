"""From crown, late tokens and light subtrees to parts: as few as fit."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from treetrain.planning.bins import pack_bins, pack_evenly
from treetrain.planning.crown import Crown, Ground
from treetrain.tree.assemble import Int64s

Bools = NDArray[np.bool_]


class Cut(NamedTuple):
    """A partition of the tokens."""

    part_of: Int64s
    """int64 [M]: the part of every token, numbered 0..P-1."""
    kept: Bools
    """bool [P]: parts that are kept."""


class Pieces:
    """Runs of tokens and the pieces they belong to; pieces are joined as the cut proceeds."""

    def __init__(self) -> None:
        self._start: list[int] = []
        self._piece: list[int] = []
        self._joined: list[int] = []
        self._kept: list[int] = []

    def new(self, start: int | None = None, *, kept: bool = False) -> int:
        """A piece, with a run from `start` to where the next run begins if that is given."""
        piece = len(self._joined)
        self._joined.append(piece)
        if start is not None:
            self.add(start, piece)
        if kept:
            self._kept.append(piece)
        return piece

    def add(self, start: int, piece: int) -> None:
        """A run from `start` to where the next run begins."""
        self._start.append(start)
        self._piece.append(piece)

    def join(self, piece: int, other: int) -> None:
        """Make two pieces one."""
        self._joined[self._find(other)] = self._find(piece)

    def _find(self, piece: int) -> int:
        joined = self._joined
        while joined[piece] != piece:
            joined[piece] = joined[joined[piece]]
            piece = joined[piece]
        return piece

    def cut(self, tokens: int) -> Cut:
        """The parts; the runs must cover all tokens."""
        start = np.array(self._start, np.int64)
        order = np.argsort(start, kind="stable")
        piece = np.array([self._find(piece) for piece in self._piece], np.int64)[order]
        names, part = np.unique(piece, return_inverse=True)
        kept = np.isin(names, np.array([self._find(piece) for piece in self._kept], np.int64))
        return Cut(np.repeat(part, np.diff(start[order], append=tokens)), kept)

    def pack(self, subtrees: list[tuple[int, int]], capacity: int) -> None:
        """Siblings share parts: (tokens, first token) of each."""
        packed = pack_evenly([size for size, _ in subtrees], capacity)
        pieces = [self.new() for _ in packed.loads]
        for (_, start), number in zip(subtrees, packed.bin_of):
            self.add(start, pieces[number])

    def pack_open(
        self, entries: list[tuple[int, int]], subtrees: list[tuple[int, int]], capacity: int
    ) -> tuple[int, int]:
        """Join siblings into parts; returns the emptiest, which is not finished yet.

        Args:
            entries: (tokens, piece) of each piece.
            subtrees: (tokens, first token) of each light subtree.

        Returns: (tokens, piece), or (0, -1) where there are none.
        """
        total = sum(size for size, _ in entries) + sum(size for size, _ in subtrees)
        if total <= capacity:
            held = [entries[0][1] if entries else self.new()] if total else [-1]
            loads, bin_of = [total], [0] * (len(entries) + len(subtrees))
        else:
            bin_of, loads = pack_bins([size for size, _ in entries] + [size for size, _ in subtrees], capacity)
            held = [-1] * len(loads)
        for (_, piece), number in zip(entries, bin_of):
            if held[number] < 0:
                held[number] = piece
            elif held[number] != piece:
                self.join(held[number], piece)
        for (_, start), number in zip(subtrees, bin_of[len(entries) :]):
            if held[number] < 0:
                held[number] = self.new()
            self.add(start, held[number])
        emptiest = min(range(len(held)), key=loads.__getitem__)
        return loads[emptiest], held[emptiest]


def cut_late(ground: Ground, crown: Crown, pieces: Pieces) -> None:
    """Parts of all late tokens and of the light subtrees below them, and of whole light trees.

    Bottom up: the light subtrees that continue a late token and what is left of the late pieces that do are packed
    into parts, and the emptiest of these goes on upwards with the token. What a late part takes in is not exported,
    so that this costs no recomputation.
    """
    budget = ground.budget
    waiting: dict[int, list[tuple[int, int]]] = {-1: []}  # by owner: (tokens, piece)
    segments = np.flatnonzero(crown.late)
    facts = (segments, crown.late[segments], crown.count[segments], ground.start[segments], ground.above[segments])
    for segment, late, count, start, above in zip(*(fact[::-1].tolist() for fact in facts)):
        subtrees = crown.owned(segment) if late == count else []
        load, piece = pieces.pack_open(waiting.pop(segment, []), subtrees, budget)
        stop = start + late
        while load + stop - start > budget:  # a full part at the bottom, and on with the rest
            if budget > load:
                stop -= budget - load
                piece = pieces.new() if piece < 0 else piece
                pieces.add(stop, piece)
            load, piece = 0, -1
        piece = pieces.new() if piece < 0 else piece
        pieces.add(start, piece)
        waiting.setdefault(above, []).append((load + stop - start, piece))
    if waiting[-1]:
        pieces.pack_open(waiting[-1], crown.owned(-1), ground.target)
    else:
        pieces.pack(crown.owned(-1), ground.target)

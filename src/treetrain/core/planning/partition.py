"""Cut a tree into parts for the least predicted time, with at most `budget` tokens whose graph is alive at once.

    recomputed      kept         leaves: small subtrees, or several that share a part
    a a a a a a     b b b -+---- c c c c c
                           +---- d d d
                           +---- d d d

Why it is right. The *height* of a token is the number of tokens on the longest path from it down. While a leaf runs,
the kept tokens above it are alive too.

1. A token whose height exceeds the budget cannot stay alive until the leaves below it have run: every plan recomputes
   it. Heights decrease along a path, so these tokens are the top of the tree. Below them are *regions*: maximal
   subtrees whose height is within the budget.
2. A region with more tokens than a leaf may have is cut. One number decides how: a subtree of at most `small` tokens
   is a leaf, or shares one. The tokens above them are *inner*. Subtree sizes also decrease along a path, so the inner
   tokens of a segment are its first ones, and one count per segment identifies them.
3. An inner token can be kept if all inner tokens on any path from it down, plus the largest small subtree there, are
   within the budget. The other inner tokens, again the top, are recomputed. One try recomputes all inner tokens.
4. Tokens are grouped into parts so that this bound holds. Recomputed parts are packed bottom up: the pieces that
   continue a token go into as few parts as fit, and the emptiest of these parts also takes the token. The pieces that
   it absorbs are not exported, so this adds no recomputation. Kept parts are cut top down: each takes in pieces as long
   as enough room is left below.

Large small subtrees leave no room for kept tokens; tiny ones make many parts. No formula gives the best size, so
several are tried, and the plan of the least predicted time is taken. Every try is within the budget.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Sequence
from heapq import heappop, heappush, heapreplace

import numpy as np
from jaxtyping import Int64

from treetrain.core.planning.plan import Bools, Plan, segment_heights
from treetrain.core.tree.layout import PackedLayout
from treetrain.core.tree.token_tree import Int64s

Seconds = Callable[[Plan], float]
_Item = tuple[int, int]  # an item to pack: number of tokens, and its piece or (for a small subtree) its first token

PREFILL_BUDGETS = 4
"""A prefill may have this many times the budget in tokens: its KV cache is small compared with a graph."""
_NEAR, _LITTLE = 0.02, 0.1
"""Plans within `_NEAR` of the fastest count as equally fast; one that recomputes at most `_LITTLE` more than the least
possible is then preferred."""
_FEW_BINS = 64
"""Siblings that share at most this many leaves fill them evenly."""
_SEGMENTS_TRIED, _TOKENS_TRIED = 500_000, 10_000_000
"""Most segments and tokens of all tries together, which bounds the time of planning. The first two are always made."""


def partition(
    layout: PackedLayout,
    budget_tokens: int | None,
    seconds: Seconds,
    *,
    part_tokens: int | None = None,
) -> Plan:
    """Find a fast plan in which at most `budget_tokens` are alive at once.

    Args:
        layout: M tokens.
        budget_tokens: most tokens whose graph is alive at once, kept ancestors included; None for no bound.
        seconds: returns the predicted time of a step under a plan.
        part_tokens: target size of parts, used only if it needs no recomputation; paths stay whole.

    Raises:
        ValueError: a number of tokens below 1.
    """
    for name, value in (("budget", budget_tokens), ("part_tokens", part_tokens)):
        if value is not None and value < 1:
            raise ValueError(f"{name} of {value} tokens: give 1 or more")
    budget = max(layout.num_tokens, 1) if budget_tokens is None else int(budget_tokens)
    limit = PREFILL_BUDGETS * budget
    if part_tokens is not None and part_tokens < budget:
        cutter = _Cutter(layout, budget, part_tokens, limit)
        plan = cutter.plan(cutter.largest_small())
        if plan.recomputed_tokens == 0:
            return plan
    if layout.num_tokens <= budget:
        return Plan.of_parts(layout, np.zeros(layout.num_tokens, np.int64))
    return _fastest(_Cutter(layout, budget, budget, limit), seconds)


def whole_trees(layout: PackedLayout, target: int) -> Plan:
    """Group neighbouring trees into parts of at most `target` tokens, uncut; a larger tree is a part alone."""
    first = np.flatnonzero(layout.parent < 0)
    sizes = np.diff(first, append=layout.num_tokens)
    group, filled, groups = 0, 0, []
    for size in sizes.tolist():
        if filled and filled + size > target:
            group, filled = group + 1, 0
        filled += size
        groups.append(group)
    return Plan.of_parts(layout, np.repeat(np.array(groups, np.int64), sizes))


def _fastest(cutter: "_Cutter", seconds: Seconds) -> Plan:
    """Cut the regions with small subtrees of several sizes, and take the fastest plan."""
    all_kept, target, tokens = cutter.largest_small(), cutter.target, cutter.layout.num_tokens
    if not cutter.is_big.any():
        return cutter.plan(all_kept)
    # Larger small subtrees make fewer parts but leave no room to keep all inner tokens. Smaller ones make kept parts
    # grow, and pack better. Further sizes between these gained nothing (docs/log.md).
    sizes = [all_kept, (all_kept + target) // 2, all_kept // 2]
    cut_segments = int(((cutter.too_tall > 0) | cutter.in_big).sum())
    tries = min(_SEGMENTS_TRIED // max(1, cut_segments), _TOKENS_TRIED // tokens)
    if cutter.region_size[cutter.is_big].sum() < _NEAR * tokens:
        tries = 0  # these regions are too small to matter
    plans = [cutter.plan(np.full_like(all_kept, target), recompute=True)]
    plans += [cutter.plan(small) for small in sizes[: max(1, tries - 1)]]
    timed = [(seconds(plan), plan) for plan in plans]
    fastest = min(timed, key=lambda way: way[0])
    little = (1 + _LITTLE) * int(cutter.too_tall.sum())
    near = [way for way in timed if way[0] <= (1 + _NEAR) * fastest[0] and way[1].recomputed_tokens <= little]
    return min(near, key=lambda way: way[0], default=fastest)[1]


class _Cutter:
    """Cuts a tree of S segments and R regions into plans under a budget.

    Args:
        budget: the most tokens that may be alive at once.
        target: size that leaves need not exceed.
        prefill_limit: see `Plan.of_parts`.
    """

    def __init__(self, layout: PackedLayout, budget: int, target: int, prefill_limit: int):
        self.layout, self.budget, self.prefill_limit = layout, budget, prefill_limit
        self.target = min(budget, target)  # a leaf must fit the budget too
        self.above, self.start = layout.segment_parent, layout.segment_start[:-1]
        self.length = np.diff(layout.segment_start)
        self.size = layout.ends[self.start] - self.start
        self.too_tall = np.clip(segment_heights(layout) - budget, 0, self.length)
        """int64 [S]: number of each segment's first tokens whose height is above the budget."""
        is_leaf = np.ones(len(self.start), bool)
        is_leaf[self.above[self.above >= 0]] = False
        inside = self.too_tall < self.length
        root = np.flatnonzero(inside & ~np.append(inside, False)[self.above])  # -1 (roots) reads the appended entry
        self.region_of = np.where(inside, np.searchsorted(root, np.arange(len(inside)), side="right") - 1, -1)
        """int64 [S]: -1 if all tokens of a segment are too tall."""
        self.region_start = (self.start + self.too_tall)[root]
        self.region_size = (self.size - self.too_tall)[root]
        self.is_big = (self.region_size > self.target) & ~is_leaf[root]  # a single path is never cut without need
        """bool [R]: regions that are cut."""
        self.in_big = np.append(self.is_big, False)[self.region_of]
        self._cut = np.flatnonzero(self.in_big & ~is_leaf)
        self._above, self._start = self.above.tolist(), self.start.tolist()

    def largest_small(self) -> Int64[np.ndarray, " R"]:
        """The largest size of small subtrees for which all inner tokens of a region can be kept.

        Bisection works, since paths of inner tokens get shorter as small subtrees get larger. Small subtrees that are a
        single path never matter: a whole path is within the budget.
        """
        segments, region = self._cut, self.region_of[self._cut]
        above = self.layout.positions[self.start[segments]] - self.layout.positions[self.region_start[region]]
        low, high = np.zeros(len(self.is_big), np.int64), np.where(self.is_big, self.target, 0)
        firsts = np.flatnonzero(np.diff(region, prepend=-1))
        big = region[firsts]
        while (low < high).any():
            middle = (low + high + 1) >> 1
            inner = np.minimum(self.size[segments] - middle[region], self.length[segments])
            longest = np.maximum.reduceat(np.where(inner > 0, above + inner, 0), firsts)
            fits = longest + middle[big] <= self.budget
            low[big], high[big] = np.where(fits, middle[big], low[big]), np.where(fits, high[big], middle[big] - 1)
        return low

    def plan(self, small: Int64[np.ndarray, " R"], *, recompute: bool = False) -> Plan:
        """Cut every region.

        Args:
            small: largest size of a small subtree in each region.
            recompute: whether to recompute all inner tokens, even those that could be kept.
        """
        inner, region = self.too_tall.copy(), self.region_of[self._cut]
        inner[self._cut] = np.clip(self.size[self._cut] - small[region], 0, self.length[self._cut])
        # A small subtree continues the last inner token of its owner segment; whole trees have the owner -1.
        full = np.append(inner == self.length, True)
        whole = np.flatnonzero((inner == 0) & full[self.above])
        rest = np.flatnonzero((inner > 0) & ~full[:-1])
        start = np.concatenate([self.start[whole], (self.start + inner)[rest]])
        owner = np.concatenate([self.above[whole], rest])
        size = self.layout.ends[start] - start
        need = self._need(inner, owner, size)
        # From a segment's first inner token down, need + inner tokens are alive. The excess over the budget is
        # recomputed: the segment's first tokens, since those above are alive with all of them.
        recomputed = inner if recompute else np.clip(need + inner - self.budget, 0, inner)
        order = np.argsort(owner, kind="stable")
        items = list(zip(size[order].tolist(), start[order].tolist()))
        owners, first = np.unique(owner[order], return_index=True)
        stops = [*first[1:].tolist(), len(items)]
        subtrees = {at: items[i:j] for at, i, j in zip(owners.tolist(), first.tolist(), stops)}
        pieces = _Pieces()
        self._cut_recomputed(pieces, inner, recomputed, subtrees)
        self._cut_kept(pieces, inner - recomputed, recomputed, need, subtrees)
        part_of, kept = pieces.parts(self.layout.num_tokens)
        return Plan.of_parts(self.layout, part_of, kept, prefill_limit=self.prefill_limit)

    def _need(self, inner: Int64s, owner: Int64s, size: Int64s) -> Int64[np.ndarray, " S"]:
        """Count the most tokens alive below each segment's last inner token if all inner tokens below are kept."""
        largest = np.zeros(len(inner) + 1, np.int64)  # the last entry is for owner -1
        np.maximum.at(largest, owner, size)
        need, count, above = largest.tolist(), inner.tolist(), self._above
        for segment in np.flatnonzero(inner)[::-1].tolist():
            need[above[segment]] = max(need[above[segment]], count[segment] + need[segment])
        return np.array(need[:-1], np.int64)

    def _cut_recomputed(
        self, pieces: "_Pieces", inner: Int64s, recomputed: Int64s, subtrees: dict[int, list[_Item]]
    ) -> None:
        """Pack all recomputed tokens, the small subtrees below them, and small whole trees, from the bottom up."""
        waiting: dict[int, list[_Item]] = defaultdict(list)  # by segment: the open pieces below it
        segments = np.flatnonzero(recomputed)[::-1]
        for segment, count, all_inner in zip(*(x.tolist() for x in (segments, recomputed[segments], inner[segments]))):
            below = subtrees.get(segment, []) if count == all_inner else []
            load, piece = pieces.pack(waiting.pop(segment, []), below, self.budget)
            start = self._start[segment]
            stop = start + count
            while load + stop - start > self.budget:  # fill a part at the bottom, and continue with the rest
                if self.budget > load:
                    stop -= self.budget - load
                    pieces.add(stop, pieces.new() if piece < 0 else piece)
                load, piece = 0, -1
            piece = pieces.new() if piece < 0 else piece
            pieces.add(start, piece)
            waiting[self._above[segment]].append((load + stop - start, piece))
        pieces.pack(waiting[-1], subtrees.get(-1, []), self.target, even=not waiting[-1])

    def _cut_kept(
        self,
        pieces: "_Pieces",
        kept_tokens: Int64s,
        recomputed: Int64s,
        need: Int64s,
        subtrees: dict[int, list[_Item]],
    ) -> None:
        """Cut all kept tokens, and the small subtrees below them, from the top down.

        A kept piece starts with one segment's kept tokens. It takes in kept children, then small subtrees, the smallest
        first, while everything below still fits, and while that saves more parts than the lost room below costs.
        """
        children: dict[int, list[int]] = defaultdict(list)
        pending = []  # (segment where a piece starts, tokens that may be alive from there down)
        hanging = [0] * len(kept_tokens)  # tokens of a segment's small subtrees
        largest = [0] * len(kept_tokens)  # tokens of the largest of them
        kept, starts = kept_tokens.tolist(), (self.start + recomputed).tolist()
        alone = (kept_tokens + need).tolist()  # tokens alive from a segment down if it is a piece by itself
        for segment in np.flatnonzero(kept_tokens).tolist():
            sizes = [size for size, _ in subtrees.get(segment, [])]
            hanging[segment], largest[segment] = sum(sizes), max(sizes, default=0)
            parent = self._above[segment]
            if parent >= 0 and kept[parent] and not recomputed[segment]:
                children[parent].append(segment)
            else:  # use no more of the budget than large enough parts need
                pending.append((segment, min(self.budget, max(self.target, alone[segment]))))
        while pending:
            top, room = pending.pop()
            inside, below, room = _take_children(top, room, kept, alone, children, hanging, largest)
            piece = pieces.new(kept=True)
            for segment in inside:
                pieces.add(starts[segment], piece)
            groups = sorted((hanging[segment], segment) for segment in inside if hanging[segment])
            must = max((alone[segment] for segment in below), default=0)
            tokens = [size for size, _ in groups]
            taken = _groups_taken(tokens, [largest[segment] for _, segment in groups], room, must, self.target)
            for _, segment in groups[:taken]:
                for _, start in subtrees[segment]:
                    pieces.add(start, piece)
            room -= sum(tokens[:taken])
            # The groups left out become leaves, as large as the room that is left allows.
            for _, segment in groups[taken:]:
                pieces.pack([], subtrees[segment], min(room, self.target), even=True)
            pending += [(segment, room) for segment in below]


def _take_children(
    top: int,
    room: int,
    kept: list[int],
    alone: list[int],
    children: dict[int, list[int]],
    hanging: list[int],
    largest: list[int],
) -> tuple[list[int], list[int], int]:
    """Return the segments of a kept piece, the kept segments directly below it, and the room left."""
    inside: list[int] = []
    below: list[int] = []
    needs: list[tuple[int, int]] = []  # ascending: (tokens that must fit below the piece, child segment or -1)
    ready: list[tuple[int, int]] = []  # a heap of children: (tokens, segment)
    owned = 0

    def take(segment: int) -> None:
        nonlocal room, owned
        inside.append(segment)
        room, owned = room - kept[segment], owned + hanging[segment]
        insort(needs, (largest[segment], -1))
        for child in children[segment]:
            heappush(ready, (kept[child], child))
            insort(needs, (alone[child], child))

    take(top)
    while ready:
        tokens, child = heappop(ready)
        own, left = (alone[child], child), room - tokens
        others = needs[-1] if needs[-1] != own else needs[-2]
        fits = max(others[0], alone[child] - tokens) <= left  # what hangs below the piece, and below the child
        # Taking the child saves a part. But its tokens stay alive while all small subtrees of the piece run, so these
        # fill leaves of `left` tokens instead of `room`: (owned + hanging) (1 / left - 1 / room) leaves more. The
        # child is taken if that is at most one leaf.
        if not fits or (owned + hanging[child]) * tokens > room * left:
            below.append(child)
        else:
            needs.pop(bisect_left(needs, own))
            take(child)
    return inside, below, room


def _groups_taken(sizes: Sequence[int], largest: Sequence[int], room: int, must: int, target: int) -> int:
    """The number of groups of small subtrees that a kept piece takes in, for the fewest parts.

    A group that is taken in needs no part. Its tokens stay alive, so the parts below have less room and are more.

    Args:
        sizes: tokens of each group, ascending; a group continues one token.
        largest: tokens of the largest subtree of each group.
        room: tokens that may be alive below the piece before it takes in any group.
        must: tokens that must stay free for the kept segments below.
        target: size that leaves need not exceed.
    """
    count, tokens = len(sizes), np.array(sizes, np.int64)
    left = room - np.concatenate([[0], np.cumsum(tokens)])
    rest = np.maximum.accumulate(np.array([0, *largest[::-1]], np.int64))[::-1]
    fits = np.maximum(rest, must) <= left  # what is left must hold the largest subtree that is not taken
    last = int(np.flatnonzero(fits)[-1])
    choices = []
    # Small groups come first, so a few powers of two are enough to see how the number of parts changes.
    for taken in sorted({0, last, *(2**k for k in range(count.bit_length()) if 2**k <= last)}):
        if fits[taken]:
            parts = -(-tokens[taken:] // max(1, min(target, int(left[taken]))))
            choices.append((int(parts.sum()), taken))
    return min(choices)[1]


class _Pieces:
    """Assigns ranges of tokens to pieces. Pieces can be joined (union-find); each piece at the end is a part."""

    def __init__(self) -> None:
        self._start: list[int] = []
        self._piece: list[int] = []
        self._joined: list[int] = []
        self._kept: list[int] = []

    def new(self, *, kept: bool = False) -> int:
        """Add an empty piece and return its number."""
        piece = len(self._joined)
        self._joined.append(piece)
        if kept:
            self._kept.append(piece)
        return piece

    def add(self, start: int, piece: int) -> None:
        """Give a piece the tokens from `start` up to the next start that is added."""
        self._start.append(start)
        self._piece.append(piece)

    def pack(
        self, open_pieces: list[_Item], subtrees: list[_Item], capacity: int, *, even: bool = False
    ) -> tuple[int, int]:
        """Pack siblings into few pieces; returns (tokens, number) of the emptiest, (0, -1) if there is none."""
        bin_of, loads = pack_bins([tokens for tokens, _ in (*open_pieces, *subtrees)], capacity, even=even)
        if not loads:
            return 0, -1
        held = [-1] * len(loads)
        for (_, piece), number in zip(open_pieces, bin_of):
            if held[number] < 0:
                held[number] = piece
            else:
                self._joined[self._find(piece)] = self._find(held[number])
        for (_, start), number in zip(subtrees, bin_of[len(open_pieces) :]):
            if held[number] < 0:
                held[number] = self.new()
            self.add(start, held[number])
        emptiest = min(range(len(held)), key=loads.__getitem__)
        return loads[emptiest], held[emptiest]

    def _find(self, piece: int) -> int:
        joined = self._joined
        while joined[piece] != piece:
            joined[piece] = joined[joined[piece]]
            piece = joined[piece]
        return piece

    def parts(self, tokens: int) -> tuple[Int64s, Bools]:
        """Part of every token, int64 [M], and whether each part is kept, bool [P]. A start must be at token 0."""
        start = np.array(self._start, np.int64)
        order = np.argsort(start)
        piece = np.array([self._find(piece) for piece in self._piece], np.int64)[order]
        names, part = np.unique(piece, return_inverse=True)
        kept = np.isin(names, np.array(self._kept, np.int64))  # kept pieces are never joined
        return np.repeat(part, np.diff(start[order], append=tokens)), kept


def pack_bins(sizes: Sequence[int], capacity: int, *, even: bool = False) -> tuple[list[int], list[int]]:
    """Pack bins by best fit decreasing: each item, largest first, goes where it leaves the least room.

    Args:
        sizes: n items, each > 0; equal items keep their order. An item above the capacity gets its own bin.
        capacity: capacity of each bin.
        even: fill a small number of bins about equally if all items still fit. Under FSDP ranks run their parts
            together, and wait less for parts of equal size.

    Returns: the bin of every item, and the load of every bin. Time is about n log n.
    """
    total = sum(sizes)
    if total <= capacity:
        return [0] * len(sizes), [total] if sizes else []
    smallest = min(sizes)
    bin_of, loads = [0] * len(sizes), []
    room: list[tuple[int, int]] = []  # (room, bin) of bins that can still take the smallest item
    largest_first = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    for item in largest_first:
        size = sizes[item]
        at = bisect_left(room, (size, -1))
        if at < len(room):
            left, number = room.pop(at)
            loads[number] += size
        else:
            left, number = capacity, len(loads)
            loads.append(size)
        bin_of[item] = number
        if left - size >= smallest:
            insort(room, (left - size, number))
    if even and len(loads) <= _FEW_BINS:
        heap, evened = [(0, number) for number in range(len(loads))], bin_of.copy()
        for item in largest_first:  # into the emptiest bin
            load, evened[item] = heap[0]
            heapreplace(heap, (load + sizes[item], evened[item]))
        if max(heap)[0] < max(loads):
            return evened, [load for load, _ in sorted(heap, key=lambda entry: entry[1])]
    return bin_of, loads

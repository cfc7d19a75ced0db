"""Parts of tokens that are kept, and of the light subtrees below them."""

from heapq import heappop, heappush

import numpy as np

from treetrain.planning.crown import Crown, Ground
from treetrain.planning.cutting import Pieces


def cut_kept(ground: Ground, crown: Crown, pieces: Pieces) -> None:
    """Parts of all kept tokens and of the light subtrees below them. Top down.

    A kept piece begins as the crown tokens of one segment. It takes in kept children, then light subtrees, the
    smallest first, while everything below still fits and this saves more parts than it costs by leaving less room to
    those below. Light subtrees that continue one token share closed parts.
    """
    keeper = _Keeper(ground, crown)
    for top in keeper.tops:
        limit = ground.budget
        if ground.target < limit:  # parts need not be large: no more alive than it takes
            limit = min(limit, max(ground.target, keeper.alive(top)))
        pending = [(top, limit)]
        while pending:
            segment, room = pending.pop()
            left, below = keeper.cut_piece(segment, room, pieces)
            pending += [(child, left) for child in below]


class _Keeper:
    """What is kept, per segment, and the steps of the cut."""

    def __init__(self, ground: Ground, crown: Crown) -> None:
        self.ground, self.crown = ground, crown
        kept = crown.count > crown.late
        keeps = np.flatnonzero(kept)
        above = ground.above[keeps]
        inner = (above >= 0) & (crown.late[keeps] == 0) & kept[above]
        segments = keeps.tolist()
        self.size = dict(zip(segments, (crown.count - crown.late)[keeps].tolist()))
        self.start = dict(zip(segments, (ground.start + crown.late)[keeps].tolist()))
        self.need = dict(zip(segments, crown.need[keeps].tolist()))
        self.owned = dict.fromkeys(segments, 0)
        self.most = dict.fromkeys(segments, 0)
        self.children: dict[int, list[int]] = {segment: [] for segment in segments}
        for segment, parent in zip(keeps[inner].tolist(), above[inner].tolist()):
            self.children[parent].append(segment)
        of_kept = (crown.item_owner >= 0) & kept[crown.item_owner]
        for owner, size in zip(crown.item_owner[of_kept].tolist(), crown.item_size[of_kept].tolist()):
            self.owned[owner] += size
            self.most[owner] = max(self.most[owner], size)
        self.tops: list[int] = keeps[~inner].tolist()

    def alive(self, segment: int) -> int:
        """Tokens alive from a segment down when its crown alone is kept."""
        return self.size[segment] + self.need[segment]

    def cut_piece(self, segment: int, room: int, pieces: Pieces) -> tuple[int, list[int]]:
        """Cut one kept piece and the closed parts that hang off it.

        Args:
            segment: where it begins.
            room: tokens that may be alive, the piece's own included.

        Returns: what it leaves of the room, and the segments where the kept pieces below it begin.
        """
        inside, below = self._join_children(segment, room)
        piece = pieces.new(kept=True)
        for part in inside:
            pieces.add(self.start[part], piece)
            room -= self.size[part]
        groups = sorted((self.owned[part], part) for part in inside if self.owned[part])
        must = max(map(self.alive, below), default=0)
        largest = [self.most[part] for _, part in groups]
        absorbed = _how_many([tokens for tokens, _ in groups], largest, room, must, self.ground.target)
        for tokens, part in groups[:absorbed]:
            room -= tokens
            for _, start in self.crown.owned(part):
                pieces.add(start, piece)
        for _, part in groups[absorbed:]:
            pieces.pack(self.crown.owned(part), min(room, self.ground.target))
        return room, below

    def _join_children(self, segment: int, room: int) -> tuple[list[int], list[int]]:
        """The segments of the piece that begins with one, and the kept segments right below the piece."""
        inside, below = [segment], []
        room -= self.size[segment]
        hanging = self.owned[segment]
        needs = _Largest()
        needs.push(self.most[segment], -1)
        ready: list[tuple[int, int]] = []  # (tokens, segment), smallest first
        for child in self.children[segment]:
            heappush(ready, (self.size[child], child))
            needs.push(self.alive(child), child)
        while ready:
            tokens, child = heappop(ready)
            left = room - tokens
            fits = max(needs.besides(child), self.need[child]) <= left
            if not fits or (hanging + self.owned[child]) * tokens > room * left:
                below.append(child)
                continue
            inside.append(child)
            room = left
            hanging += self.owned[child]
            needs.drop(child)
            needs.push(self.most[child], -1)
            for grandchild in self.children[child]:
                heappush(ready, (self.size[grandchild], grandchild))
                needs.push(self.alive(grandchild), grandchild)
        return inside, below


class _Largest:
    """The largest of some named numbers, besides one of them."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []
        self._dropped: set[int] = set()

    def push(self, number: int, name: int) -> None:
        heappush(self._heap, (-number, name))

    def drop(self, name: int) -> None:
        self._dropped.add(name)

    def besides(self, name: int) -> int:
        """The largest number of another name; 0 if there is none."""
        held = None
        while self._heap and (self._heap[0][1] == name or self._heap[0][1] in self._dropped):
            entry = heappop(self._heap)
            held = entry if entry[1] == name else held
        largest = -self._heap[0][0] if self._heap else 0
        if held is not None:
            heappush(self._heap, held)
        return largest


def _how_many(owned: list[int], most: list[int], room: int, must: int, target: int) -> int:
    """How many of the groups of light subtrees below a kept piece it takes in, so that parts are fewest.

    Args:
        owned: tokens of each group, ascending; a group continues one token.
        most: the largest subtree of each.
        room: tokens that may be alive below the piece as it is.
        must: tokens that must stay free for what else is below.
        target: closed parts need not be larger.
    """
    count = len(owned)
    tokens, largest = np.array(owned, np.int64), np.array([*most, 0], np.int64)
    left = room - np.concatenate([[0], np.cumsum(tokens)])
    fits = np.maximum(np.maximum.accumulate(largest[::-1])[::-1], must) <= left
    last = int(np.flatnonzero(fits)[-1])
    best, fewest = 0, -1
    for taken in sorted({0, last, *(2**k for k in range(count.bit_length()) if 2**k <= last)}):
        if fits[taken]:
            parts = int((-(-tokens[taken:] // max(1, min(target, int(left[taken]))))).sum())
            if fewest < 0 or parts < fewest:
                best, fewest = taken, parts
    return best

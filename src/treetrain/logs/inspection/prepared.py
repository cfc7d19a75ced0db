"""Rows as they are compared: what a row loses by itself is repaired before rows are compared with each other.

Four causes concern a row by itself: padding, a token in front of some rows, a beginning that was cut off, and tools in
another order. Without them rows line up, so that every other difference shows. A beginning that was cut off is taken
from the call before. Padding, which lies before all others, is repaired with any other
cause; `undo` takes the other three back in rows that are repaired otherwise.
"""

from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from treetrain.core.tree.trajectory import common_prefix
from treetrain.layers.trajectory import Trajectory
from treetrain.logs.inspection.alignment import RUN, Ids, find_run
from treetrain.logs.inspection.tools import ToolOrder, Tools, called, find_tools

Bools = NDArray[np.bool_]
LEFT = 8
"""Most tokens at the beginning of a row that was cut off which its partner does not have there."""
BEGIN, SOME = 4, 12
"""A token stands in front of rows that go on with `BEGIN` tokens with which one of `SOME` rows begins."""
PADDING = 4
"""The longest padding must have so many tokens."""


class Decodes(Protocol):
    """A tokenizer, as far as texts are shown."""

    def decode(self, ids: list[int] | Ids, /) -> Any: ...


class Place(NamedTuple):
    """Where a row differs from its partner, in tokens of the rows as they are shown."""

    cause: str
    row: int
    partner: int
    ours: tuple[Ids, int, int]
    """The row's tokens, and the first of those that differ and one past the last."""
    theirs: tuple[Ids, int, int]


class Prepared:
    """K rows of at least `RUN` tokens: shorter ones cannot agree with another one behind a difference.

    Args:
        rows: all rows.
        tokenizer: anything with `decode`, or None.
    """

    def __init__(self, rows: Sequence[Trajectory], tokenizer: Decodes | None) -> None:
        self.tokenizer = tokenizer
        self.numbers = [number for number, row in enumerate(rows) if len(row) >= RUN]
        """The number of each row among all rows."""
        self.rows = [rows[number] for number in self.numbers]
        self.ids: list[Ids] = [row.ids for row in self.rows]
        self.trained: list[Bools] = [row.weights != 0 for row in self.rows]
        self.start = [0] * len(self.ids)
        """Tokens of a row before its first one here; less than 0 if the beginning was put back."""
        self.places: list[Place] = []
        """Differences repaired here, with the rows to show for them."""
        self._words: dict[int, str] = {}
        self._ends: dict[int, list[int]] = {}
        self.fronted: dict[int, Ids] = {}
        """The token in front of rows that others begin without."""
        self._cut_padding(getattr(tokenizer, "pad_token_id", None))
        self._cut_front()
        first = [int(marks.argmax()) if marks.any() else marks.size for marks in self.trained]
        self.masked = [count > 1 for count in first]
        """Whether the row begins with tokens that are not trained; else its context is unknown."""
        self.context = [count if masked else ids.size for count, masked, ids in zip(first, self.masked, self.ids)]
        """Tokens before the first trained one; all of them if that is unknown."""
        lasts = Counter(int(ids[marks][-1]) for ids, marks in zip(self.ids, self.trained) if marks.any())
        ends = [token for token, count in lasts.items() if count >= 0.1 * len(self.rows)]
        self.turn_ends = np.array(ends, np.int32)
        """Tokens that end a message."""
        self.completed: dict[int, tuple[int, Ids]] = {}
        """Rows whose beginning was put back: its tokens, and those of the row that it stands for."""
        self._complete()
        self.given = list(self.ids)
        """The rows with their tools in their own order."""
        self.tools: dict[int, tuple[int, int]] = {}
        """First token of the tools and one past the last."""
        self.tool_names: dict[int, frozenset[str]] = {}
        """The names of the tools."""
        self.unsorted: dict[int, Tools] = {}
        """The tools of rows that have them in another order."""
        if tokenizer is not None:
            self._sort_tools()

    def word(self, token: int) -> str:
        """The text of one token."""
        if token not in self._words:
            assert self.tokenizer is not None
            self._words[token] = self.tokenizer.decode([token])
        return self._words[token]

    def turns(self, row: int) -> list[int]:
        """Tokens of a row before the ends of its first two turns: the system prompt and the first question."""
        if row not in self._ends:
            ids = self.ids[row][: self.context[row]]
            ends = np.flatnonzero(np.isin(ids, self.turn_ends))[:2].tolist() if self.turn_ends.size else []
            self._ends[row] = (ends + [0, ids.size][len(ends) :])[:2] if ends else [0, ids.size]
        return self._ends[row]

    def other_tools(self, row: int, partner: int) -> bool:
        """Whether fewer than half of the tools of two rows are called alike: those of two agents."""
        ours, theirs = (self.tool_names.get(number, frozenset()) for number in (row, partner))
        return 2 * len(ours & theirs) < len(ours | theirs)

    def _cut_padding(self, known: int | None) -> None:
        """Take padding away on either side.

        A token that begins or ends many rows, repeated different numbers of times, is padding; the tokenizer's
        (`known`) is tried first. On the right, rows with loss weights keep it up to their last trained token.
        """
        padded: dict[int, tuple[int, int]] = {}
        for left in (True, False):
            facing = [row if left else row[::-1] for row in self.ids]
            doubled = Counter(int(row[0]) for row in facing if row.size > 1 and row[0] == row[1])
            pad = known if known in doubled else doubled.most_common(1)[0][0] if doubled else None
            if pad is None or doubled[pad] < 2:
                continue
            count = [_repeats(row, pad) for row in facing]
            if not left:
                free = [_repeats(marks[::-1], False) for marks in self.trained]
                count = [
                    min(each) if row.loss_weights is not None else each[0] for *each, row in zip(count, free, self.rows)
                ]
            if len(set(count)) < 2 or (pad != known and max(count) < PADDING):
                continue
            if left and set(count) == {1, 2}:  # a doubled first token, though it may also be what pads
                continue
            for number, cut in enumerate(count):
                size = self.ids[number].size
                if 0 < cut < size:
                    kept = slice(cut, size) if left else slice(0, size - cut)
                    padded[number] = (0, cut) if left else (size - cut, size)
                    self.ids[number], self.trained[number] = self.ids[number][kept], self.trained[number][kept]
                    self.start[number] += cut * left
        least = int(np.argmin([len(row) - ids.size for row, ids in zip(self.rows, self.ids)])) if padded else 0
        for number, (start, stop) in padded.items():
            at = min(start, self.ids[least].size)
            same = (self.ids[least], at, at)
            self.places.append(Place("padding", number, least, (self.rows[number].ids, start, stop), same))

    def _cut_front(self) -> None:
        """Take a token away with which some rows begin, and others with what follows it."""
        begins = Counter(ids[:BEGIN].tobytes() for ids in self.ids)
        common = {begin for begin, count in begins.items() if count * SOME >= len(self.ids)}
        behind = [ids[1 : BEGIN + 1].tobytes() for ids in self.ids]
        repeated = [ids.size > 2 and ids[0] == ids[1] == ids[2] for ids in self.ids]  # that is no token in front
        fronts = [number for number, more in enumerate(repeated) if behind[number] in common and not more]
        if not fronts:
            return
        # A doubled token (BOS twice) stands in front of itself.
        begun = Counter(
            (int(self.ids[number][0]), bool(self.ids[number][0] == self.ids[number][1])) for number in fronts
        )
        (token, doubled), count = begun.most_common(1)[0]

        def has_it(ids: Ids) -> bool:
            return bool(ids[0] == token and (ids[1] == token or not doubled))

        if count * SOME < sum(map(has_it, self.ids)):
            return
        same = behind[next(number for number in fronts if has_it(self.ids[number]))]
        partner = next(number for number, ids in enumerate(self.ids) if ids[:BEGIN].tobytes() == same)
        for number, ids in enumerate(self.ids):
            if has_it(ids):
                self.places.append(Place("front", number, partner, (ids, 0, 1), (self.ids[partner], 0, 0)))
                self.fronted[number] = ids[:1]
                self.ids[number], self.trained[number] = ids[1:], self.trained[number][1:]
                self.start[number] += 1

    def _complete(self) -> None:
        """Put the beginning back in front of rows that were cut off on the left."""
        fronts = Counter(ids[:RUN].tobytes() for ids in self.ids)
        usual = fronts.most_common(1)[0][0] if fronts else b""
        longest = max(
            (n for n, ids in enumerate(self.ids) if ids[:RUN].tobytes() == usual),
            key=self.context.__getitem__,
            default=0,
        )
        before: dict[Hashable, int] = {}  # by conversation
        for number, row in enumerate(self.rows):
            ids, name = self.ids[number], (row.key, row.group, row.episode)
            partner = before.get(name, longest)
            before[name] = number
            other = self.ids[partner]
            if partner == number or row.key != self.rows[partner].key or common_prefix(ids[:2], other) == 2:
                continue
            certain = row.episode is not None and partner != longest
            missing, lacking, agreed = find_run(other[: self.context[partner]] if not certain else other, ids, LEFT)
            if agreed < (RUN if certain else 4 * RUN) or missing <= 1 + 8 * lacking:
                continue
            self.completed[number] = (missing, ids[:lacking])
            self.ids[number] = np.concatenate([other[:missing], ids[lacking:]])
            marks = np.full(missing, not self.masked[number])
            self.trained[number] = np.concatenate([marks, self.trained[number][lacking:]])
            self.context[number] += missing - lacking
            self.start[number] -= missing - lacking
            self.places.append(Place("truncation", number, partner, (ids, 0, lacking), (other, 0, missing)))

    def _sort_tools(self) -> None:
        """Bring the tools of all prompts into one order."""
        found: dict[int, Tools] = {}
        same: dict[bytes, Tools | None] = {}
        for number, ids in enumerate(self.ids):
            system = ids[: self.turns(number)[0]]
            name = system.tobytes()
            if name not in same:
                same[name] = find_tools(system, self.word)
            if (tools := same[name]) is not None:
                found[number] = tools
        order = ToolOrder(tools for tools in same.values() if tools is not None)
        written: dict[int, Ids] = {}  # by the identity of the tools, which `same` keeps alive
        names: dict[int, frozenset[str]] = {}
        for number, tools in found.items():
            if id(tools) not in written:
                written[id(tools)] = order.sorted(tools)
                names[id(tools)] = frozenset(called(schema) for schema in tools.names)
            self.tool_names[number] = names[id(tools)]
            ids, new = self.ids[number], written[id(tools)]
            self.tools[number] = (tools.start, tools.start + new.size)
            if np.array_equal(ids[tools.start : tools.stop], new):
                continue
            self.unsorted[number] = tools
            trained, marks = self.trained[number], np.full(new.size, not self.masked[number])
            self.ids[number] = np.concatenate([ids[: tools.start], new, ids[tools.stop :]])
            self.trained[number] = np.concatenate([trained[: tools.start], marks, trained[tools.stop :]])
            self.context[number] += self.ids[number].size - ids.size
            del self._ends[number]
        # A row is shown with one that has the same tools in that order, else in the most usual one.
        given = {number: np.concatenate(tools.pieces) for number, tools in found.items()} if self.unsorted else {}
        ordered = [number for number in given if number not in self.unsorted] or list(given)
        usual = Counter(given[number].tobytes() for number in ordered)
        partners: dict[tuple[str, ...], int] = {}
        for number in sorted(ordered, key=lambda number: -usual[given[number].tobytes()]):
            partners.setdefault(tuple(sorted(found[number].names)), number)
        for number in self.unsorted:
            partner = partners.get(tuple(sorted(found[number].names)), next(iter(partners.values())))
            tools, others = given[number], given[partner]
            start = found[number].start
            stop = found[number].stop
            other = found[partner].start
            equal = common_prefix(tools, others)
            if min(equal, tools.size) < max(tools.size, others.size):
                ours, theirs = (self.given[number], start + equal, stop), self.given[partner]
                self.places.append(Place("order", number, partner, ours, (theirs, other + equal, found[partner].stop)))

    def undo(
        self, row: int, causes: Collection[str], ids: Ids, trained: Bools, place: NDArray[np.int64]
    ) -> tuple[Ids, Bools]:
        """A repaired row with its own tools and its own beginning, as far as these are not among the causes repaired.

        Args:
            row: its number.
            causes: those that are repaired.
            ids, trained: the repaired row.
            place: int64 [L + 1]: where each token of the row before the repair, and its end, is now.
        """
        missing, own = self.completed.get(row, (0, self.ids[row][:0]))
        first, last = (int(place[each]) for each in self.tools.get(row, (0, 0)))
        inside = self.tools.get(row, (0, 0))[0] < missing < self.tools.get(row, (0, 0))[1]
        at = min(first + missing - self.tools[row][0], last) if inside else int(place[missing])
        if row in self.unsorted and "order" not in causes:
            tools = np.concatenate(self.unsorted[row].pieces)
            ids = np.concatenate([ids[:first], tools, ids[last:]])
            trained = np.concatenate([trained[:first], np.full(tools.size, not self.masked[row]), trained[last:]])
            at += (at >= last) * (tools.size - (last - first))
        if missing and "truncation" not in causes:
            ids = np.concatenate([own, ids[at:]])
            trained = np.concatenate([np.full(own.size, not self.masked[row]), trained[at:]])
        if row in self.fronted and "front" not in causes:
            ids, trained = np.concatenate([self.fronted[row], ids]), np.concatenate([[False], trained])
        return ids, trained


def _repeats(values: Ids | Bools, value: int) -> int:
    other = values != value
    return int(other.argmax()) if other.any() else values.size

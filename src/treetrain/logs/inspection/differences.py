"""The causes of a difference between two rows, read from its tokens and its text.

A difference is cut where both sides agree for a few tokens, at the ends of messages, and behind think blocks, so that
several causes are told apart. Each piece has one cause.
"""

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from treetrain.core.tree.trajectory import common_prefix
from treetrain.logs.inspection.alignment import RUN, Alignment, Gap, Ids, align
from treetrain.logs.inspection.prepared import Prepared

SHOWN = 24
"""Tokens shown at either end of a long difference; twice as many are decoded to find its cause."""
AROUND = 6
"""Tokens shown before a difference; after it, twice as many."""
WIDEST = 4096
"""A longer difference is not searched for think blocks."""
PIECE = 4
"""Equal tokens that cut a difference in two."""
HEADER = 8
"""Most tokens between the end of a message and the text of the next one."""

_THINK = re.compile(r"</?(?:think|thinking|reasoning|thought)>|\[/?THINK\]|<\|channel\|>|<\|(?:START|END)_THINKING\|>")
_MONTH = "(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)"
_DATE = re.compile(
    r"\d{4}[-/]\d{1,2}(?:[-/]\d{1,2})?|\d{1,2}(?::\d{2})+(?:[.,]\d+)?(?: ?[AaPp]\.?[Mm]\b)?"
    r"|\d{1,2}[/.]\d{1,2}[/.]\d{2,4}|\b\d{1,2}(?: ?[AaPp]\.?[Mm]\b|h\d{2}\b| o.clock\b)"
    rf"|\b(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day\b|\b{_MONTH}[a-z]*\.? \d|\d {_MONTH}"
)
_IN_JSON = re.compile(r'(?:[{\[]|":)[^{}\[\]<]*$|[}\]],$')
"""A text that ends inside a JSON object or list."""
_HEX = re.compile("[0-9a-fA-F-]{14,}")  # part of one looks like a date
_ID = re.compile(r"(?=[\w-]*\d)[\w-]{8,}|\d{5,}")


class Edit(NamedTuple):
    """A difference from the partner, which is the first row of the gap, and its cause."""

    gap: Gap
    cause: str


class Differences:
    """Finds the causes of gaps between prepared rows."""

    def __init__(self, prepared: Prepared) -> None:
        self.prepared = prepared
        self._known: dict[tuple[bytes, bytes], set[str]] = {}

    def classify(self, row: int, partner: int, found: Alignment, *, later: bool) -> list[Edit]:
        """The gaps with their causes, up to the first gap that is not lost sharing.

        Args:
            row, partner: numbers of prepared rows.
            found: how the partner (first) and the row agree.
            later: whether the row is a later call of its partner's conversation.
        """
        if not later and self.prepared.other_tools(row, partner):
            return []  # two agents
        edits: list[Edit] = []
        masked = self.prepared.masked[row]
        sizes = [max(gap.first_stop - gap.first_start, gap.second_stop - gap.second_start) for gap in found.gaps]
        runs = [found.run_after(number) for number in range(len(sizes))]
        for number, gap in enumerate(found.gaps):
            causes = self._causes(row, partner, gap, later=later)
            if not later:
                # Different questions in the same words agree by chance: require much more agreement than difference,
                # behind this gap or behind some of the next ones.
                unsure = bool({"dates", "ids", "values"}.intersection(edit.cause for edit in causes))
                behind = zip(accumulate(runs[number:]), accumulate(sizes[number:]))
                agrees = any(run >= (max(2 * RUN, 4 * size) if unsure else RUN) for run, size in behind)
                # Behind the first question are the answers of two conversations.
                if not agrees or not masked or (unsure and gap.second_start > self.prepared.turns(row)[1]):
                    break
            edits += causes
        return edits

    def _causes(self, row: int, partner: int, gap: Gap, *, later: bool) -> list[Edit]:
        """The pieces of a gap, each with its cause; neighbours of the same cause are one piece."""
        ours, theirs = self._sides(row, partner, gap)
        ends = [np.flatnonzero(np.isin(side, self.prepared.turn_ends)) + 1 for side in (theirs, ours)]
        if len(ends[0]) == len(ends[1]):
            cuts = [(0, 0), *zip(*(each.tolist() for each in ends)), (theirs.size, ours.size)]
            a, b = gap.first_start, gap.second_start
            messages = [Gap(a + one[0], a + other[0], b + one[1], b + other[1]) for one, other in pairwise(cuts)]
        else:
            messages = [gap]
        # Whole messages that are dropped or replaced are one piece.
        whole = later and len(ends[0]) != len(ends[1])
        edits: list[Edit] = []
        for piece in (
            messages if whole else (each for message in messages for each in self._pieces(row, partner, message))
        ):
            cause = self._cause(row, partner, piece, later=later)
            if edits and edits[-1].cause == cause:
                before = edits.pop().gap
                piece = Gap(before.first_start, piece.first_stop, before.second_start, piece.second_stop)
            edits.append(Edit(piece, cause))
        return edits

    def _pieces(self, row: int, partner: int, gap: Gap) -> Iterator[Gap]:
        """A gap cut behind a think block or the same text at its beginning, and where both agree for a few tokens."""
        ours, theirs = self._sides(row, partner, gap)
        same = common_prefix(theirs, ours)
        tail = common_prefix(theirs[same:][::-1], ours[same:][::-1])
        first, last, second, end = (
            gap.first_start + same,
            gap.first_stop - tail,
            gap.second_start + same,
            gap.second_stop - tail,
        )
        ours, theirs = self._sides(row, partner, Gap(first, last, second, end))
        blocks = [self._block(side) for side in (theirs, ours)]
        heads = blocks if bool(blocks[0]) != bool(blocks[1]) else self._same_text(theirs, ours)
        if any(heads):
            cut = Gap(first, first + heads[0], second, second + heads[1])
            yield cut
            yield from self._pieces(row, partner, Gap(cut.first_stop, last, cut.second_stop, end))
            return
        found = align(theirs, ours, run=PIECE)
        for a, b, c, d in (*found.gaps, Gap(found.first_end, theirs.size, found.second_end, ours.size)):
            if a < b or c < d:
                yield Gap(first + a, first + b, second + c, second + d)

    def _block(self, ids: Ids) -> int:
        """Tokens of the think block at the beginning, with the white space behind it; 0 if there is none."""
        word = self.prepared.word
        if self.prepared.tokenizer is None or not 0 < ids.size <= WIDEST or not _THINK.search(word(int(ids[0]))):
            return 0
        words = [word(token) for token in ids.tolist()]
        stop = next((at + 1 for at, text in enumerate(words) if at and _THINK.search(text)), 0)
        while 0 < stop < len(words) and not words[stop].strip():
            stop += 1
        return stop

    def _same_text(self, theirs: Ids, ours: Ids) -> list[int]:
        """Tokens of each side that write the same text at its beginning: at least `PIECE` of one, and not of both all.

        An answer that was tokenised again may be written differently later on.
        """
        if self.prepared.tokenizer is None:
            return [0, 0]
        words = [[self.prepared.word(token) for token in side[: 2 * SHOWN].tolist()] for side in (theirs, ours)]
        letters = [np.array(list("".join(each).partition("\ufffd")[0])) for each in words]  # whole characters
        same = common_prefix(*letters)
        ends = [list(accumulate(map(len, each))) for each in words]
        end = max((end for end in set(ends[0]).intersection(ends[1]) if end <= same), default=0)
        counts = [bisect_right(each, end) for each in ends]
        return [0, 0] if max(counts) < PIECE or counts == [theirs.size, ours.size] else counts

    def _cause(self, row: int, partner: int, gap: Gap, *, later: bool) -> str:
        """The cause of a difference, the surest sign of one first.

        In the system prompt, and where prompts of several conversations are compared (not `later`), tools and values
        may differ. Behind it a later call differs only by what its harness or the template has changed.
        """
        prepared = self.prepared
        ours, theirs = self._sides(row, partner, gap)
        in_system_prompt = not later or gap.second_start < prepared.turns(row)[0]
        signs = set() if prepared.tokenizer is None else self._textual(row, partner, gap)
        for cause in ("retokenised", "whitespace"):
            if cause in signs:
                return "history" if "arguments" in signs and not in_system_prompt else cause
        if not in_system_prompt:
            turns_dropped = int(np.isin(theirs, prepared.turn_ends).sum())
            if turns_dropped != int(np.isin(ours, prepared.turn_ends).sum()):
                before = prepared.ids[partner][max(gap.first_start - HEADER, 0) : gap.first_start]
                whole_turns = not ours.size and turns_dropped > 1 and np.isin(before, prepared.turn_ends).any()
                return "truncation" if whole_turns else "history"
        if "think" in signs:
            return "think"
        if not in_system_prompt:
            return self._rewritten(partner, gap, "arguments" in signs)
        for number, (start, stop) in ((partner, gap[:2]), (row, gap[2:])):
            first, last = prepared.tools.get(number, (0, -1))
            if start <= last and stop >= first and (start == stop or (start < last and stop > first)):
                return "tool list"
        return next((cause for cause in ("dates", "ids") if cause in signs), "values")

    def _rewritten(self, partner: int, gap: Gap, arguments: bool) -> str:
        """Who changed the history: the chat template changes answers and their headers, the harness everything."""
        prepared = self.prepared
        if prepared.tokenizer is None:
            return "changed"
        start, stop = gap.first_start, max(gap.first_stop, gap.first_start + 1)
        message = np.isin(prepared.ids[partner][start : prepared.context[partner]], prepared.turn_ends).any()
        trained = prepared.trained[partner][start:stop].any()
        return "history" if arguments or (prepared.masked[partner] and message and not trained) else "rewritten"

    def _textual(self, row: int, partner: int, gap: Gap) -> set[str]:
        """The signs of causes that the text of a difference shows; equal differences are decoded once."""
        # With the tokens around, the same on both sides, so that dates and characters of several tokens are whole.
        ids = self.prepared.ids[row]
        left, right = (
            ids[max(gap.second_start - 2 * AROUND, 0) : gap.second_start],
            ids[gap.second_stop :][: 2 * AROUND],
        )
        sides = [np.concatenate([left, _ends(side), right]) for side in self._sides(row, partner, gap)[::-1]]
        name = (sides[0].tobytes(), sides[1].tobytes())
        if name not in self._known:
            signs = self._known[name] = set()
            assert self.prepared.tokenizer is not None
            one, other = texts = [self.prepared.tokenizer.decode(side) for side in sides]
            plain = [re.sub(r"\s", "", text) for text in texts]
            if plain[0] == plain[1]:
                signs.add("retokenised" if one == other else "whitespace")
            if len(_THINK.findall(one)) != len(_THINK.findall(other)):
                signs.add("think")
            letters = [np.array(list(text)) for text in texts]
            start = common_prefix(*letters)
            behind = common_prefix(*(each[start:][::-1] for each in letters))
            again = [Counter(re.sub(r'[\\"]', "", text)) for text in plain]
            inside = "whitespace" not in signs or _IN_JSON.search(one[:start].rstrip())  # not in front of a call
            if one != other and again[0] == again[1] and '":' in one and '":' in other and inside:
                signs.add("arguments")
            for sign, pattern in (("ids", _HEX), ("dates", _DATE), ("ids", _ID)):
                spans = [[found.span() for found in pattern.finditer(text)] for text in texts]
                if all(
                    any(a <= len(text) - behind and b >= start for a, b in each) for text, each in zip(texts, spans)
                ):
                    signs.add(sign)
                    break
        return self._known[name]

    def _sides(self, row: int, partner: int, gap: Gap) -> tuple[Ids, Ids]:
        ids = self.prepared.ids
        return ids[row][gap.second_start : gap.second_stop], ids[partner][gap.first_start : gap.first_stop]


def _ends(ids: Ids) -> Ids:
    """Only both ends of a long difference."""
    return ids if ids.size <= 4 * SHOWN else np.concatenate([ids[: 2 * SHOWN], ids[-2 * SHOWN :]])

"""The earlier row that each row should share with, and how the two differ.

- A later call of a conversation is compared with the call that it continues.
- The prompt of any other row is compared with a prompt of its group, one with the same end, or the one with the longest
  common prefix.

Sampled tokens are the policy's own choice, so two rows that diverge at a sampled token have nothing to repair. A
difference in the context is lost sharing if the rows agree again after it (`alignment.py`). Each row has one partner,
so the time is linear in the number of rows.

A call that does not contain the answer of the call before it starts a new context: a sub-agent has its own system
prompt, and that is no value that varies. It is compared with other new contexts only. Rows without `episode` are calls
of one conversation if the answer reappears. A row that begins with the whole prompt of another but not with its answer
may belong to a third: it is repaired from nobody, and the report asks for the episodes.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Hashable
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from treetrain.core.tree.trajectory import common_prefix
from treetrain.logs.inspection.alignment import RUN, Alignment, align, earlier_partners
from treetrain.logs.inspection.differences import HEADER, PIECE, Differences, Edit
from treetrain.logs.inspection.prepared import Prepared

TRIALS = 16
"""Rows with the same prompt that a row without an episode is compared with."""
ANSWER = 4
"""Tokens of an answer that must reappear in a later call."""

SHORTER = 4
"""A message that a harness clears or cuts becomes so many times shorter."""


class Link(NamedTuple):
    """A row, the partner it should share with, and how."""

    row: int
    partner: int
    edits: list[Edit]
    partner_end: int
    """Position from which the two rows differ for good."""
    row_end: int


class Partners:
    """Compares every prepared row with its partner."""

    def __init__(self, prepared: Prepared) -> None:
        self.prepared, self.differences = prepared, Differences(prepared)
        self.links: list[Link] = []
        """Partners come before the rows that refer to them."""
        self.successive = self.broken = self.unrelated = self.unclear = 0
        conversations: dict[tuple[Hashable, ...], list[int]] = {}
        for number, row in enumerate(prepared.rows):
            conversations.setdefault((row.key, row.group, row.episode), []).append(number)
        heads: dict[tuple[Hashable, bool], list[int]] = {}
        later: list[Link] = []
        for (key, _, episode), members in conversations.items():
            links, loose = self._later_calls(members, certain=episode is not None)
            # The first call of a conversation, and new contexts in it, are different agents.
            heads.setdefault((key, False), []).extend(loose[:1] if episode is not None else loose)
            heads.setdefault((key, True), []).extend(loose[1:] if episode is not None else [])
            later += links
        for (_, agents), members in heads.items():
            self._prompts(sorted(members), agents=agents)
        self.links += sorted(later, key=lambda link: link.row)

    def _later_calls(self, calls: list[int], *, certain: bool) -> tuple[list[Link], list[int]]:
        """Links from calls to the calls that they continue, including unbroken ones, and the calls that start anew.

        Args:
            calls: row numbers in order.
            certain: whether the rows are known to be calls of one conversation; otherwise only rows that contain
                an earlier row with its answer are taken for later calls.
        """
        if len(calls) < 2:
            return [], calls
        all_ids, context, masked = self.prepared.ids, self.prepared.context, self.prepared.masked
        partners = earlier_partners(calls, all_ids.__getitem__)
        prompts: dict[bytes, list[int]] = {}  # earlier rows by their prompts
        lengths: list[int] = []  # of these prompts, in order
        found, loose = [], calls[:1]
        for before, row in pairwise(calls):
            if not certain and masked[before]:
                size = context[before]
                prompts.setdefault(all_ids[before][:size].tobytes(), []).append(before)
                at = bisect_left(lengths, size)
                lengths[at:at] = [size] * (lengths[at : at + 1] != [size])
            shared = common_prefix(all_ids[before], all_ids[row])
            partner, most = partners[row]
            if most < shared + RUN:
                partner, most = before, shared
            link = None
            if partner != before and shared < all_ids[before].size:
                # A row may continue the call before it and still share more with an older one.
                link = self._later_call(row, before, shared, certain=False, least=most)
            if link is None:
                link = self._later_call(row, partner, most, certain=certain)
            if link is None and not certain and masked[row]:
                # Other rows with a prompt that this one begins with may be of this conversation.
                ids, place = all_ids[row], bisect_right(lengths, min(most, context[row] - 1))
                sizes = lengths[max(place - TRIALS, 0) : place][::-1]
                mates = next(filter(None, (prompts.get(ids[:size].tobytes()) for size in sizes)), [])
                links = (self._later_call(row, mate, most, certain=False) for mate in mates[-TRIALS:])
                link = next(filter(None, links), None)
                if mates and link is None:
                    self.unclear += 1
                    continue
            if link is None:
                loose.append(row)
            else:
                found.append(link)
        self.successive += len(calls) - 1 if certain else len(found)
        return found, loose

    def _later_call(self, row: int, partner: int, shared: int, *, certain: bool, least: int = 0) -> Link | None:
        """The link from a call to the call that it continues; None if it does not.

        Args:
            shared: leading tokens that both share.
            certain: as in `_later_calls`.
            least: the least number of tokens that must agree, if not `certain`.
        """
        prepared = self.prepared
        masked = prepared.masked[partner]
        context = prepared.context[partner]
        answer = prepared.trained[partner]
        first = prepared.ids[partner]
        second = prepared.ids[row][: prepared.context[row]]
        if not certain and not (prepared.masked[row] and answer.any()):
            return None
        if shared >= first.size:
            # Duplicates and rows that are prefixes of others are no calls.
            link = Link(row, partner, [], first.size, first.size) if certain or second.size >= first.size else None
            self.broken += link is not None and row in prepared.completed
            return link
        if shared >= second.size:
            # Another answer to the same prompt.
            return Link(row, partner, [], second.size, second.size) if certain else None

        # The last message of the row is new, unless this is another answer to a prompt that was changed.
        ends = np.flatnonzero(np.isin(second, prepared.turn_ends))
        found = align(first, second[: ends[-2] + 1] if ends.size > 1 else second, to_end=True)
        if (again := _reappearing(answer, found)) < ANSWER:
            found = align(first, second, to_end=True)
            again = _reappearing(answer, found)
        reappears = again >= min(ANSWER, int(answer.sum()))
        if certain:
            # The episode says so already: it is enough that the answer, or what follows the context, can be recognised.
            begins = bool(found.gaps) and found.gaps[0].first_start >= context - 2
            continues = not masked or reappears or begins or found.second_end == second.size
        else:
            whole = found.first_end == first.size and found.agreed >= max(context // 2, RUN, least)
            continues = whole and reappears and self._one_conversation(row, partner, found, again)
        edits = self.differences.classify(row, partner, found, later=True) if continues and found.gaps else []
        if not certain and not edits:
            return None
        self.broken += 1
        if edits:
            return _linked(row, partner, found, edits)
        self.unrelated += 1
        # The whole prompt reappears, but not the answer: no agent with a prompt of its own.
        same = found.first_end >= context - 2 and masked
        return Link(row, partner, [], found.first_end, found.second_end) if same and not found.gaps else None

    def _one_conversation(self, row: int, partner: int, found: Alignment, again: int) -> bool:
        """Whether rows without an episode agree in more than an answer that many give, such as "Done.".

        Another customer says other things: no message of the context may be replaced by another of about its size (one
        that is cleared or cut becomes much shorter), the first question by none at all, nor most of the answer.

        Args:
            row, partner, found: the later row, the earlier one, and how they agree.
            again: tokens of the answer that reappear.
        """
        prepared = self.prepared
        answer, (_, question) = prepared.trained[partner], prepared.turns(partner)
        context = prepared.ids[partner][: prepared.context[partner]]
        ends = np.append(np.flatnonzero(np.isin(context, prepared.turn_ends)) + 1, context.size)
        for start, stop in pairwise([0, *ends.tolist()]):
            lost = new = 0.0
            for gap in found.gaps:
                size, there = gap.first_stop - gap.first_start, gap.second_stop - gap.second_start
                here = max(min(gap.first_stop, stop) - max(gap.first_start, start), 0)
                lost, new = lost + here, new + (there * here / size if size else 0)
            if 2 * lost > max(stop - start - HEADER, 0) and (start <= question or SHORTER * new > lost):
                return False
        replaced = 0
        for a, b, c, d in found.gaps:
            if given := int(answer[a:b].sum()):  # written anew, arguments of a call agree in short pieces
                theirs, ours = prepared.ids[partner][b - given : b], prepared.ids[row][c:d]
                same = align(theirs, ours, run=PIECE).agreed
                replaced, again = replaced + min(given, d - c) - same, again + same
        return replaced <= again

    def _prompts(self, members: list[int], *, agents: bool) -> None:
        """Link the prompts of rows that continue no other row, each distinct prompt once.

        Args:
            members: row numbers.
            agents: whether these are new contexts inside conversations: agents with prompts of their own.
        """
        prepared = self.prepared
        prompts: dict[Hashable, list[int]] = {}
        for number in members:
            prompt = prepared.ids[number][: prepared.context[number]]
            name = (prepared.rows[number].group, prepared.masked[number], prompt.tobytes())
            prompts.setdefault(name, []).append(number)
        # The longest first: others are compared with it.
        order = sorted(
            (same[0] for same in prompts.values() if prepared.context[same[0]]),
            key=lambda number: (-prepared.context[number], number),
        )
        same_as = {same[0]: same for same in prompts.values()}
        context = {number: prepared.ids[number][: prepared.context[number]] for number in order}
        nearest = earlier_partners(order, context.__getitem__) if len(order) > 1 else {}
        of_group: dict[Hashable, int] = {}
        of_ending: dict[Hashable, int] = {}
        for number in order:
            group, ending = prepared.rows[number].group, context[number][-2 * RUN :].tobytes()
            partner, shared = nearest.get(number, (-1, 0))
            candidates = {partner, of_ending.setdefault(ending, number), order[0] if shared < RUN else partner}
            if group is not None:
                candidates.add(of_group.setdefault(group, number))
            best: Link | None = None
            most = 0
            for candidate in sorted(candidates - {-1, number}):
                found = align(context[candidate], context[number])
                if found.gaps and found.agreed > max(most, shared):
                    edits = self.differences.classify(number, candidate, found, later=False)
                    if edits and not (agents and any(edit.cause == "values" for edit in edits)):
                        best, most = _linked(number, candidate, found, edits), found.agreed
            if best is None and shared:
                best = Link(number, partner, [], shared, shared)
            if best is not None:
                self.links += [best._replace(row=row) for row in same_as[number]]


def _reappearing(answer: NDArray[np.bool_], found: Alignment) -> int:
    """How many tokens of an answer, [L] of the earlier row, the later row has again."""
    inside = (answer[gap.first_start : gap.first_stop].sum() for gap in found.gaps)
    return int(answer[: found.first_end].sum() - sum(inside))


def _linked(row: int, partner: int, found: Alignment, edits: list[Edit]) -> Link:
    """A link up to the first gap that is not lost sharing."""
    last = edits[-1].gap
    later = [gap for gap in found.gaps if gap.second_start >= max(last.second_start + 1, last.second_stop)]
    if later:
        return Link(row, partner, edits, later[0].first_start, later[0].second_start)
    return Link(row, partner, edits, found.first_end, found.second_end)

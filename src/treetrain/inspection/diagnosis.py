"""Why rows do not share more: the causes, what each costs, and what to change.

Every row is compared with the one earlier row that it should share with:

- a later call of a conversation with the call that it continues;
- the prompt of any other row with a prompt of its group, one with the same end, or the one with the longest common
  prefix.

Sampled tokens are the policy's own choice, so two rows that diverge at a sampled token have nothing to repair. A
difference in the context is lost sharing if the rows agree again after it. Its cause is read from the tokens and the
text of the difference.

Why no difference is missed (`align`). Rows that agree again hold a run of `RUN` equal tokens. All runs of the row's
next tokens are looked up by a rolling hash among those of the partner, and the pair that skips fewest tokens is taken,
verified token by token. So a difference is found whatever it is: tokens that are missing in one row, added or replaced.
The same tokens in another order are found by sums of hashes. A comparison takes tens of microseconds where rows agree
and about a millisecond where they differ for thousands of tokens. Each row has one partner, so the time is linear in
the number of rows.

The cost of a cause is measured, not estimated: its differences are replaced by the tokens of the partners, and the tree
is built again. Partners are rewritten first, so a row that continues its partner still does so afterwards. Causes are
repaired one after the other, those nearest to the start of rows first, because a difference hides those behind it. So
the costs add up to the total loss.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from treetrain.data.columns import sorted_by_prefix
from treetrain.data.trajectory import Trajectory, common_prefix
from treetrain.errors import quoted
from treetrain.planning.cost import ModelCounts
from treetrain.tree.build import build_tree
from treetrain.tree.stats import linear_work, tree_work
from treetrain.tree.token_tree import TokenTree

Ids = NDArray[np.int32]
RUN = 16
"""Equal tokens in a row after which two rows count as agreeing again."""
WINDOWS = (512, 1 << 14)
"""How far ahead to look for a run: the second number only where the first finds none."""
SHOWN = 24
"""Tokens shown at either end of a long difference; twice as many are decoded to find its cause."""
AROUND = 6
"""Tokens shown before a difference; after it, twice as many."""
LEAST = 0.001
"""Share of the unique tokens that a cause must cost to be reported."""

CAUSES: dict[str, tuple[str, str]] = {
    "padding": (
        "padding inside the rows",
        "give an attention_mask with the rows, or cut the padding off; it is no part of a trajectory",
    ),
    "front": (
        "one token at the front",
        "begin every row alike: add the token (often BOS) to all rows or to none",
    ),
    "truncation": (
        "older tokens cut off on the left",
        "raise the context length of the rollouts, or drop whole conversations that are too long instead of their "
        "beginnings",
    ),
    "think": (
        "think blocks of earlier turns dropped or added by the chat template",
        "use a template that keeps every turn as it was sampled (--chat-template chatml), in the rollouts too; if the "
        "policy really saw these prompts, train on them as they are",
    ),
    "rewritten": (
        "earlier turns written differently by the chat template",
        "use a template that writes a message the same way whatever follows it (--chat-template chatml), in the "
        "rollouts too; if the policy really saw these prompts, train on them as they are",
    ),
    "retokenised": (
        "the same text tokenised differently",
        "pass token ids on from call to call; do not decode a completion and tokenise it again with the next prompt",
    ),
    "whitespace": (
        "stripped or added white space",
        "pass messages on unchanged: no strip() between sampling, logging and the next prompt",
    ),
    "order": (
        "the same tools, or other parts of the prompt, in another order",
        "sort the tools, and the keys of their schemas, before the prompt is rendered",
    ),
    "tool list": (
        "different tools, or different schemas of the same tools",
        "offer all rows the same tools, or put the tools that vary last",
    ),
    "values": (
        "dates, ids or other values that differ inside the prompt",
        "fix the value for all rows of a batch, or move it behind the text that all rows share",
    ),
    "changed": (
        "earlier tokens changed",
        "give --tokenizer: the text tells a chat template from tokens that were decoded and tokenised again",
    ),
}
"""Every cause: its name in reports, and what to change."""

_THINK = re.compile(r"</?(?:think|thinking|reasoning|thought)>|\[/?THINK\]|<\|channel\|>|<\|(?:START|END)_THINKING\|>")
_TOOL_SCHEMA = re.compile(r'"(?:parameters|properties|description|function|input_schema)"')


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LostSharing:
    """One cause of lost sharing, with the first example."""

    cause: str
    """A key of `CAUSES`."""
    title: str
    """The cause in words."""
    change: str
    """The advice to the user."""
    rows: int
    """Rows with this difference from their partner, or that share it with their partner."""
    tokens: int
    """Unique tokens that repairing it saves, once the causes listed before it are repaired."""
    flops: float
    """FLOPs of a step that this saves."""
    flop_speedup: float
    """FLOPs of every row by itself, as is / FLOPs of the tree with this cause and those before it repaired."""
    row: Hashable
    """id of the row that loses sharing in the example; its number if it has no id."""
    partner: Hashable
    """id of the row that it should share with."""
    position: int
    """Token of the row, from 0, where they differ."""
    row_text: str
    """The row around the difference, which stands between ⟦ and ⟧; token ids if no tokenizer was given."""
    partner_text: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """The causes of lost sharing of a set of rows."""

    causes: tuple[LostSharing, ...]
    """In the order in which they are repaired; empty if nothing is lost."""
    successive: int
    """Calls with an earlier call of the same conversation."""
    broken: int
    """Those that neither extend an earlier call nor answer its prompt again."""
    unrelated: int
    """Broken calls that match no earlier call after the difference: a new context, such as a sub-agent's."""
    unique: int
    """Tokens of the tree as the rows are."""
    repaired_unique: int
    """The same with all causes repaired."""
    flop_speedup: float
    """FLOPs of every row by itself / FLOPs of the tree, as the rows are."""
    repaired_flop_speedup: float
    """FLOPs of every row by itself, as is / FLOPs of the tree with all causes repaired."""

    def sections(self) -> list[tuple[str, str]]:
        """(title, text) of a summary, which has no title, and of each cause."""
        lines = []
        if self.successive:
            kept = self.successive - self.broken
            lines.append(f"{kept:,} of {self.successive:,} later calls extend an earlier call of their conversation.")
        if self.unrelated:
            lines.append(f"{self.unrelated:,} start a new context (a sub-agent, a summary): nothing to repair.")
        lines.append(
            f"{self.unique - self.repaired_unique:,} of {self.unique:,} unique tokens are lost sharing."
            if self.causes
            else "No sharing is lost."
        )
        sections = [("", " ".join(lines))]
        before = self.flop_speedup
        for number, lost in enumerate(self.causes, 1):
            where = f"{quoted(lost.row)} differs from {quoted(lost.partner)} at token {lost.position:,}"
            text = [
                f"Rows: {lost.rows:,}. Lost: {lost.tokens:,} tokens, {lost.flops:.3g} FLOPs.",
                f"First: {where}:",
                f"  {lost.partner_text}",
                f"  {lost.row_text}",
                f"Change: {lost.change}.",
                f"Gain: {lost.flop_speedup:.2f}x by FLOPs in place of {before:.2f}x, all rows at once"
                + (", with the changes above." if number > 1 else "."),
            ]
            sections.append((f"{number}. {lost.title}", "\n".join(text)))
            before = lost.flop_speedup
        return sections

    def explain(self) -> str:
        """The diagnosis in words."""
        (_, summary), *causes = self.sections()
        indented = (f"{title}\n   {text}".replace("\n", "\n   ").replace("   " * 2, "   ") for title, text in causes)
        return "\n\n".join([summary, *indented])


class Gap(NamedTuple):
    """A difference between two rows that agree before and after it."""

    first_start: int
    first_stop: int
    """Tokens [start, stop) of the first row."""
    second_start: int
    second_stop: int
    """Those of the second row; either may be empty."""


class Alignment(NamedTuple):
    """How two rows agree from their beginnings on."""

    gaps: list[Gap]
    first_end: int
    """Tokens of the first row up to where they part for good, or one of them ends."""
    second_end: int

    @property
    def agreed(self) -> int:
        """Equal tokens before, between and after the gaps."""
        return self.first_end - sum(gap.first_stop - gap.first_start for gap in self.gaps)

    def run_after(self, number: int) -> int:
        """Equal tokens between a gap and the next one, or the end."""
        later = self.gaps[number + 1].first_start if number + 1 < len(self.gaps) else self.first_end
        return later - self.gaps[number].first_stop


class _Edit(NamedTuple):
    """A gap to the partner, and its cause."""

    gap: Gap
    cause: str


class _Link(NamedTuple):
    """A row, the partner it should share with, and how."""

    row: int
    partner: int
    edits: list[_Edit]
    partner_end: int
    """Position from which the two rows differ for good."""
    row_end: int


def diagnose(
    rows: Sequence[Trajectory], counts: ModelCounts, tokenizer: Any = None, *, tree: TokenTree | None = None
) -> Diagnosis:
    """Find why rows do not share more.

    Args:
        rows: K rows; each conversation's calls in order.
        counts: the model that FLOPs are counted for.
        tokenizer: anything with `decode`. Without one, the same text in other tokens, white space and think blocks
            cannot be told apart, and examples show token ids.
        tree: the tree of all rows, if already built.

    Returns:
        The causes, with counts, cost, gain and an example of each.
    """
    search = _Search(rows, tokenizer)
    search.run()
    first = dict(search.examples())
    found = search.affected()
    places = {cause: search.mean_position(cause) for cause in found}
    # Recorded experts keep equal tokens apart; repaired rows have none, so the tree is compared without them too.
    if tree is None or tree.experts is not None:
        tree = build_tree(search.repaired(()))
    rows_flops = counts.flops(*linear_work(tree, counts.attention_ranges))
    flops = start = counts.flops(*tree_work(tree, counts.attention_ranges))
    unique = as_is = tree.num_tokens
    causes: list[LostSharing] = []
    repaired: list[str] = []
    for cause in sorted(found, key=places.__getitem__):
        repaired.append(cause)
        tree = build_tree(search.repaired(repaired))
        less = counts.flops(*tree_work(tree, counts.attention_ranges))
        if less > 1.01 * flops:  # a repair that adds cost is undone
            repaired.pop()
            continue
        if unique - tree.num_tokens > LEAST * as_is:
            causes.append(
                LostSharing(
                    cause=cause,
                    title=CAUSES[cause][0],
                    change=CAUSES[cause][1],
                    rows=found[cause],
                    tokens=unique - tree.num_tokens,
                    flops=max(flops - less, 0.0),
                    flop_speedup=rows_flops / less if less else 1.0,
                    **first[cause],
                )
            )
        unique, flops = tree.num_tokens, less
    return Diagnosis(
        causes=tuple(causes),
        successive=search.successive,
        broken=search.broken,
        unrelated=search.unrelated,
        unique=as_is,
        repaired_unique=unique,
        flop_speedup=rows_flops / start if start else 1.0,
        repaired_flop_speedup=rows_flops / flops if flops else 1.0,
    )


class _Search:
    """The rows without padding, and the links found so far."""

    def __init__(self, rows: Sequence[Trajectory], tokenizer: Any) -> None:
        self.rows, self.tokenizer = rows, tokenizer
        self.padded, self.ids, self.start = _without_padding(rows, getattr(tokenizer, "pad_token_id", None))
        weights = [row.weights != 0 for row in rows]
        self.trained = [
            marks[start : start + ids.size] for marks, start, ids in zip(weights, self.start, self.ids, strict=True)
        ]
        # Tokens before the first trained one; if a row trains (almost) all its tokens, its context is unknown.
        first = [int(marks.argmax()) if marks.any() else marks.size for marks in self.trained]
        self.masked = [count > 1 for count in first]
        self.context = [count if masked else ids.size for count, masked, ids in zip(first, self.masked, self.ids)]
        lasts = Counter(int(ids[marks][-1]) for ids, marks in zip(self.ids, self.trained) if marks.any())
        self.turn_ends = {token for token, count in lasts.items() if count >= 0.1 * len(rows)}
        self.links: list[_Link] = []
        self.successive = self.broken = self.unrelated = 0
        self.known: dict[Hashable, str | None] = {}

    # Partners

    def run(self) -> None:
        """Compare every row with its partner. `links` lists partners before the rows that refer to them."""
        conversations: dict[tuple[Hashable, ...], list[int]] = {}
        for number, row in enumerate(self.rows):
            conversations.setdefault((row.key, row.group, row.episode), []).append(number)
        heads: dict[Hashable, list[int]] = {}
        later: list[_Link] = []
        for (key, _, episode), members in conversations.items():
            links = self._later_calls(members, certain=episode is not None)
            continuing = {link.row for link in links} if episode is None else set(members[1:])
            heads.setdefault(key, []).extend(number for number in members if number not in continuing)
            later += links
        for members in heads.values():
            self._prompts(sorted(members))
        self.links += sorted(later)

    def _later_calls(self, calls: list[int], *, certain: bool) -> list[_Link]:
        """Links from calls to the calls that they continue, including unbroken ones.

        Args:
            calls: row numbers in order.
            certain: whether the rows are known to be calls of one conversation; otherwise only rows that contain
                an earlier row with its answer are taken for later calls.
        """
        if len(calls) < 2:
            return []
        partners = earlier_partners(calls, self.ids.__getitem__)
        found = []
        for before, row in pairwise(calls):
            shared = common_prefix(self.ids[before], self.ids[row])
            partner, most = partners[row]
            if most < shared + RUN:
                partner, most = before, shared
            link = None
            if partner != before and shared < self.ids[before].size:
                # A row may continue the call before it and still share more with an older one.
                link = self._later_call(row, before, shared, certain=False, least=most)
            if link is None:
                link = self._later_call(row, partner, most, certain=certain)
            if link is not None:
                found.append(link)
        self.successive += len(calls) - 1 if certain else len(found)
        return found

    def _later_call(self, row: int, partner: int, shared: int, *, certain: bool, least: int = 0) -> _Link | None:
        """The link from a call to the call that it continues; None if it does not.

        Args:
            shared: leading tokens that both share.
            certain: as in `_later_calls`.
            least: the least number of tokens that must agree, if not `certain`.
        """
        first, second = self.ids[partner], self.ids[row][: self.context[row]]
        if not certain and not (self.masked[row] and self.trained[partner].any()):
            return None
        if shared >= first.size:
            # Duplicates and rows that are prefixes of others are no calls.
            grown = self.context[row] >= first.size
            return _Link(row, partner, [], first.size, first.size) if certain or grown else None
        if shared >= second.size:
            # Another answer to the same prompt.
            return _Link(row, partner, [], second.size, second.size) if certain else None
        found = align(first, second, to_end=True)
        edits = self._classified(row, partner, found, later=True)
        if not certain:
            if not found.gaps:
                return None
            whole = found.first_end == first.size and found.agreed >= max(self.context[partner] // 2, RUN, least)
            # Answers to two different prompts are not one conversation: the partner's answer must reappear.
            answer = self.trained[partner].sum()
            for gap in found.gaps:
                answer -= self.trained[partner][gap.first_start : gap.first_stop].sum()
            begins = found.gaps[0].first_start >= self.context[partner] - 2
            if not (whole and len(edits) == len(found.gaps) and (begins or answer >= RUN // 2)):
                return None
        self.broken += 1
        if not edits:
            self.unrelated += 1
            return None
        return _linked(row, partner, found, edits)

    def _prompts(self, members: list[int]) -> None:
        """Link the prompts of rows that continue no other row, each distinct prompt once."""
        prompts: dict[Hashable, list[int]] = {}
        for number in members:
            prompt = self.ids[number][: self.context[number]]
            name = (self.rows[number].group, self.masked[number], prompt.tobytes())
            prompts.setdefault(name, []).append(number)
        fronts = Counter(int(self.ids[number][0]) for number in members if self.ids[number].size)
        # Others are compared with the prompts of the most common first token, the longest of them first.
        order = sorted(
            (same[0] for same in prompts.values() if self.context[same[0]]),
            key=lambda number: (-fronts[int(self.ids[number][0])], -self.context[number], number),
        )
        same_as = {same[0]: same for same in prompts.values()}
        context = {number: self.ids[number][: self.context[number]] for number in order}
        nearest = earlier_partners(order, context.__getitem__) if len(order) > 1 else {}
        of_group: dict[Hashable, int] = {}
        of_ending: dict[Hashable, int] = {}
        for number in order:
            group, ending = self.rows[number].group, context[number][-2 * RUN :].tobytes()
            partner, shared = nearest.get(number, (-1, 0))
            candidates = {partner, of_ending.setdefault(ending, number), order[0] if shared < RUN else partner}
            if group is not None:
                candidates.add(of_group.setdefault(group, number))
            best: _Link | None = None
            most = 0
            for candidate in sorted(candidates - {-1, number}):
                found = align(context[candidate], context[number])
                if found.gaps and found.agreed > max(most, shared):
                    edits = self._classified(number, candidate, found, later=False)
                    if edits:
                        best, most = _linked(number, candidate, found, edits), found.agreed
            if best is None and shared:
                best = _Link(number, partner, [], shared, shared)
            if best is not None:
                self.links += [best._replace(row=row) for row in same_as[number]]

    # Causes

    def _classified(self, row: int, partner: int, found: Alignment, *, later: bool) -> list[_Edit]:
        """The gaps with their causes, up to the first gap that is not lost sharing."""
        edits = self._tools(row, partner, found, later=later)
        done = edits[-1].gap.second_stop if edits else -1
        for number, gap in enumerate(found.gaps):
            if gap.second_stop <= done:
                continue
            cause = self._cause(row, partner, gap, later=later)
            run = found.run_after(number)
            if not later:
                # Different questions in the same words agree by chance: require much more agreement than difference.
                size = max(gap.first_stop - gap.first_start, gap.second_stop - gap.second_start)
                least = max(2 * RUN, 4 * size) if cause == "values" or not self.masked[row] else RUN
                if run < least or (not self.masked[row] and cause not in ("front", "truncation")):
                    break
            edits.append(_Edit(gap, cause))
        return edits

    def _cause(self, row: int, partner: int, gap: Gap, *, later: bool) -> str:
        ours = self.ids[row][gap.second_start : gap.second_stop]
        theirs = self.ids[partner][gap.first_start : gap.first_stop]
        at_front = gap.first_start == gap.second_start == 0
        if at_front and max(ours.size, theirs.size) == 1:
            return "front"
        kind = None if self.tokenizer is None else self._textual(row, partner, gap)
        if kind in ("retokenised", "whitespace"):
            return kind
        if self._is_cut(gap) or (ours.size == 0 and (later and not self.turn_ends.isdisjoint(theirs.tolist()))):
            return "truncation"
        if kind is not None:
            return kind
        if ours.size == theirs.size > 1 and np.array_equal(np.sort(ours), np.sort(theirs)):
            return "order"
        if not later or gap.second_start < self._system_end(partner):
            return "values"
        return "changed" if self.tokenizer is None else "rewritten"

    def _is_cut(self, gap: Gap) -> bool:
        """Whether a row lacks the beginning of its partner, apart from up to three equal tokens."""
        return gap.second_start == gap.second_stop < 4 and gap.first_stop - gap.first_start > 1

    def _system_end(self, row: int) -> int:
        """Tokens before the first end of a turn: the system prompt, if there is one."""
        ends = np.flatnonzero(np.isin(self.ids[row][: self.context[row]], list(self.turn_ends)))
        return int(ends[0]) if ends.size else 0

    def _textual(self, row: int, partner: int, gap: Gap) -> str | None:
        """The cause that the text of a difference shows, if any; equal differences are decoded once."""
        # Decode with equal neighbouring tokens, so that characters of several tokens are whole in both.
        before = min(gap.first_start, gap.second_start, 2)
        after = min(self.ids[partner].size - gap.first_stop, self.ids[row].size - gap.second_stop, 2)
        ours = self._ends(self.ids[row], gap.second_start - before, gap.second_stop + after)
        theirs = self._ends(self.ids[partner], gap.first_start - before, gap.first_stop + after)
        name = (ours.tobytes(), theirs.tobytes())
        if name not in self.known:
            one, other = self.tokenizer.decode(ours), self.tokenizer.decode(theirs)
            self.known[name] = None
            if one == other:
                self.known[name] = "retokenised"
            elif "".join(one.split()) == "".join(other.split()):
                self.known[name] = "whitespace"
            elif len(_THINK.findall(one)) != len(_THINK.findall(other)):
                self.known[name] = "think"
        return self.known[name]

    def _ends(self, ids: Ids, start: int, stop: int) -> Ids:
        """A range of tokens of a row; only both ends of a long one."""
        if stop - start <= 4 * SHOWN:
            return ids[start:stop]
        return np.concatenate([ids[start : start + 2 * SHOWN], ids[stop - 2 * SHOWN : stop]])

    def _tools(self, row: int, partner: int, found: Alignment, *, later: bool) -> list[_Edit]:
        """The gaps in the tools of a prompt as one difference; empty if the tools are the same."""
        if self.tokenizer is None or not found.gaps or self._is_cut(found.gaps[0]):
            return []
        end = self._system_end(partner) if later else self.context[partner]
        gaps = [gap for gap in found.gaps if gap.first_start < end]
        if not gaps or found.run_after(len(gaps) - 1) < RUN:
            return []
        gap = Gap(gaps[0].first_start, gaps[-1].first_stop, gaps[0].second_start, gaps[-1].second_stop)
        decode, ours, theirs = self.tokenizer.decode, self.ids[row], self.ids[partner]
        spans = ((theirs, gap.first_start, gap.first_stop), (ours, gap.second_start, gap.second_stop))
        around = (ours[max(gap.second_start - SHOWN, 0) : gap.second_start], ours[gap.second_stop :][:SHOWN])
        if not any(_TOOL_SCHEMA.search(decode(self._ends(*span))) for span in spans) and not all(
            _TOOL_SCHEMA.search(decode(ids)) for ids in around
        ):
            return []
        texts = [decode(ids[start : stop + AROUND]) for ids, start, stop in spans]
        one, other = texts
        if "".join(one.split()) == "".join(other.split()):
            return []
        return [_Edit(gap, "order" if Counter(one) == Counter(other) else "tool list")]

    # Repairs

    def repaired(self, causes: Collection[str]) -> list[Trajectory]:
        """The rows without the differences of these causes; without any cause, as they are.

        Padding is repaired with any cause, since every difference lies behind it. In a row with several differences,
        those behind the first one that stays are not repaired.
        """
        if not causes:
            return [
                Trajectory(row.ids, loss_weights=row.loss_weights, key=row.key) if row.experts is not None else row
                for row in self.rows
            ]
        ids, trained = list(self.ids), list(self.trained)
        # For each position of a rewritten row: where it is now, -1 inside differences that are gone.
        places: dict[int, NDArray[np.int64]] = {}
        for link in self.links:
            row, partner, edits = link.row, link.partner, link.edits
            if partner not in places and not any(edit.cause in causes for edit in edits):
                continue
            # Up to the first difference that stays, the row gets its partner's rewritten tokens.
            stays = next((edit.gap for edit in edits if edit.cause not in causes), None)
            stop, at = (link.partner_end, link.row_end) if stays is None else (stays.first_start, stays.second_start)
            moved = places.get(partner, np.arange(self.ids[partner].size + 1))
            theirs, i, j = np.full(at + 1, -1), 0, 0  # the partner's positions of the row's first tokens
            for gap, _ in edits:
                if gap.second_stop <= at:
                    theirs[j : gap.second_start + 1] = np.arange(i, i + gap.second_start + 1 - j)
                    i, j = gap.first_stop, gap.second_stop
            theirs[j:] = np.arange(i, i + at + 1 - j)
            while moved[stop] < 0:
                stop, at = stop - 1, at - 1
            head, theirs = int(moved[stop]), theirs[:at]
            copied = np.where(theirs < 0, -1, moved[theirs])
            places[row] = np.append(copied, np.arange(at, self.ids[row].size + 1) + head - at)
            ids[row] = np.concatenate([ids[partner][:head], self.ids[row][at:]])
            # The copied tokens are context; trained if the row's context is unknown.
            trained[row] = np.concatenate([np.full(head, not self.masked[row]), self.trained[row][at:]])
        return [
            Trajectory(ids[number], loss_weights=trained[number].astype(np.float64), key=row.key)
            if number in places or ids[number].size < len(row) or row.experts is not None
            else row
            for number, row in enumerate(self.rows)
        ]

    def affected(self) -> Counter[str]:
        """For each cause, the rows that differ from their partner or share such a difference with it."""
        places: dict[int, dict[str, int]] = {}  # about where a row's differences end, in its tokens
        for link in self.links:
            shared = {cause: end for cause, end in places.get(link.partner, {}).items() if end <= link.partner_end}
            own = {edit.cause: edit.gap.second_stop for edit in link.edits}
            if shared or own:
                places[link.row] = shared | own
        found = Counter(cause for causes in places.values() for cause in causes)
        return found + Counter({"padding": self.padded})

    def mean_position(self, cause: str) -> float:
        """Mean position of the differences of a cause."""
        at = [edit.gap.second_start for link in self.links for edit in link.edits if edit.cause == cause]
        return float(np.mean(at)) if at else -1.0  # padding

    # Examples

    def examples(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """(cause, example) of the first row with each cause."""
        if self.padded:
            removed = [len(row) - ids.size for row, ids in zip(self.rows, self.ids, strict=True)]
            row, partner = next(number for number, count in enumerate(removed) if count), int(np.argmin(removed))
            ids, start = self.rows[row].ids, self.start[row]
            low, high = (0, start) if start else (self.ids[row].size, ids.size)
            yield "padding", self._example(row, partner, ids, (low, high), (low, low))
        seen: set[str] = set()
        for link in sorted(self.links):
            for gap, cause in link.edits:
                if cause not in seen:
                    seen.add(cause)
                    ours, theirs = (gap.second_start, gap.second_stop), (gap.first_start, gap.first_stop)
                    split = cause == "retokenised"
                    yield cause, self._example(link.row, link.partner, self.ids[link.row], ours, theirs, split)

    def _example(
        self, row: int, partner: int, ids: Ids, ours: tuple[int, int], theirs: tuple[int, int], split: bool = False
    ) -> dict[str, Any]:
        names = (number if self.rows[number].id is None else self.rows[number].id for number in (row, partner))
        return {
            "row": next(names),
            "partner": next(names),
            "position": ours[0],
            "row_text": self._marked(ids, *ours, split),
            "partner_text": self._marked(self.ids[partner], *theirs, split),
        }

    def _marked(self, ids: Ids, start: int, stop: int, split: bool) -> str:
        """The tokens around a difference, which is in ⟦⟧, shortened if long; `split` puts ¦ between its tokens."""
        inside = [ids[start:stop]]
        if stop - start > 2 * SHOWN:
            inside = [ids[start : start + SHOWN], ids[stop - SHOWN : stop]]
        left = f" …{stop - start - 2 * SHOWN:,} more tokens… "
        return (
            ("…" if start > AROUND else "")
            + self._text(ids[max(start - AROUND, 0) : start])
            + f"⟦{left.join(self._text(piece, split) for piece in inside)}⟧"
            + self._text(ids[stop : stop + 2 * AROUND])
            + ("…" if stop + 2 * AROUND < ids.size else "")
        )

    def _text(self, ids: Ids, split: bool = False) -> str:
        if split:
            return "¦".join(self._text(ids[at : at + 1]) for at in range(ids.size))
        if self.tokenizer is None:
            return " ".join(map(str, ids.tolist())).join("  " if ids.size else ["", ""])
        return self.tokenizer.decode(ids).replace("\n", "\\n")


def _without_padding(rows: Sequence[Trajectory], known: int | None) -> tuple[int, list[Ids], list[int]]:
    """Rows that had padding, the ids of all rows without it, and the number of tokens taken away on the left.

    A token that begins or ends many rows, repeated different numbers of times, is padding; the tokenizer's (`known`) is
    tried first. On the right, rows with loss weights keep it up to their last trained token.
    """
    ids = [row.ids for row in rows]
    start = [0] * len(ids)
    padded: set[int] = set()
    for left in (True, False):
        facing = [row if left else row[::-1] for row in ids]
        doubled = Counter(int(row[0]) for row in facing if row.size > 1 and row[0] == row[1])
        pad = known if known in doubled else doubled.most_common(1)[0][0] if doubled else None
        if pad is None or doubled[pad] < 2:
            continue
        count = [_repeats(row, pad) for row in facing]
        for number, row in enumerate(rows):
            if not left and row.loss_weights is not None:
                trained = np.flatnonzero(row.weights)
                free = len(row) - 1 - int(trained[-1]) if trained.size else len(row)
                count[number] = min(count[number], free)
        if len(set(count)) < 2:
            continue
        for number, cut in enumerate(count):
            if 0 < cut < ids[number].size:
                padded.add(number)
                ids[number] = ids[number][cut:] if left else ids[number][: ids[number].size - cut]
                start[number] += cut if left else 0
    return len(padded), ids, start


def _repeats(ids: Ids, token: int) -> int:
    """How often a token is repeated at the beginning."""
    other = ids != token
    return int(other.argmax()) if other.any() else ids.size


def _linked(row: int, partner: int, found: Alignment, edits: list[_Edit]) -> _Link:
    """A link up to the first gap that is not lost sharing."""
    last = edits[-1].gap
    later = [gap for gap in found.gaps if gap.second_start >= max(last.second_start + 1, last.second_stop)]
    if later:
        return _Link(row, partner, edits, later[0].first_start, later[0].second_start)
    return _Link(row, partner, edits, found.first_end, found.second_end)


def align(first: Ids, second: Ids, *, to_end: bool = False) -> Alignment:
    """Follow two rows through their differences.

    Args:
        first: int32 [L].
        second: int32 [M].
        to_end: whether the second row is expected to contain all of the first: then fewer than `RUN` tokens at the
            end of the first row are an agreement too.
    """
    gaps: list[Gap] = []
    i = j = 0
    while True:
        same = common_prefix(first[i:], second[j:])
        i, j = i + same, j + same
        if i == first.size or j == second.size:
            return Alignment(gaps, i, j)
        found = _reordered(first[i:], second[j:]) or _agreement(first[i:], second[j:])
        if found is None and to_end:
            found = _ending(first[i:], second[j:])
        if found is None:
            return Alignment(gaps, i, j)
        gaps.append(Gap(i, i + found[0], j, j + found[1]))
        i, j = i + found[0], j + found[1]


def _reordered(first: Ids, second: Ids) -> tuple[int, int] | None:
    """The least number of tokens that both begin with in another order, with `RUN` equal tokens behind."""
    count = max(min(first.size, second.size, WINDOWS[-1]), RUN)
    # Sums of hashes are equal where both have had the same tokens so far, in any order.
    same = np.flatnonzero(np.equal(*(np.cumsum(_hashes(ids[: count - RUN])) for ids in (first, second))))
    for end in (same[:4] + 1).tolist():
        if np.array_equal(first[end : end + RUN], second[end : end + RUN]):
            return end, end
    return None


def _hashes(ids: Ids) -> NDArray[np.uint64]:
    """A hash of every token, not linear in its id."""
    mixed = (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    return mixed * np.uint64(0xBF58476D1CE4E5B9)


def _agreement(first: Ids, second: Ids) -> tuple[int, int] | None:
    """Where both agree again: how many tokens to skip in each.

    This is the place that skips fewest tokens, unless it may be a phrase that is repeated: if fewer tokens agree there
    than are skipped, or a quarter of those that agree where tokens are only missing in one of the two.
    """
    one, other = (_run_hashes(ids[: WINDOWS[-1]]) for ids in (first, second))
    if not one.size or not other.size:
        return None
    missing = [(int(i), 0) for i in np.flatnonzero(one == other[0])[:4]]
    missing += [(0, int(j)) for j in np.flatnonzero(other == one[0])[:4]]
    best = max(((common_prefix(first[i:], second[j:]), i, j) for i, j in missing), default=(0, 0, 0))
    for window in WINDOWS:
        values, at = np.unique(one[:window], return_index=True)  # the first position of each run
        place = np.minimum(np.searchsorted(values, other[:window]), values.size - 1)
        hits = np.flatnonzero(values[place] == other[:window])
        near = hits[np.argsort(hits + at[place[hits]], kind="stable")[:4]].tolist()
        found = [(common_prefix(first[at[place[j]] :], second[j:]), int(at[place[j]]), j) for j in near]
        for run, i, j in found:
            if run >= max(RUN, i, j) and 4 * run >= best[0]:
                return i, j
        best = max([best, *found])
        if max(one.size, other.size) <= window:
            break
    return best[1:] if best[0] >= RUN else None


def _run_hashes(ids: Ids) -> NDArray[np.uint64]:
    """A hash of every run of `RUN` tokens, uint64 [L - RUN + 1]."""
    hashes = ids.astype(np.uint64) + np.uint64(1)
    width, factor = 1, 0x9E3779B97F4A7C15
    while width < RUN:
        hashes = hashes[:-width] * np.uint64(factor) + hashes[width:]
        width, factor = 2 * width, factor * factor % (1 << 64)
    return hashes


def _ending(first: Ids, second: Ids) -> tuple[int, int] | None:
    """As `_agreement`, for the longest of the last tokens of `first`, fewer than `RUN`, that stand in `second`."""
    near = second[: first.size + RUN]
    for count in range(min(RUN - 1, first.size, near.size), 0, -1):
        tail = first[-count:]
        starts = np.flatnonzero(near[: near.size - count + 1] == tail[0])
        for j in starts.tolist():
            if np.array_equal(near[j : j + count], tail):
                return first.size - count, j
    return None


def earlier_partners(numbers: Sequence[int], ids: Callable[[int], NDArray[Any]]) -> dict[int, tuple[int, int]]:
    """For every row but the first: the row before it in `numbers` that shares the longest prefix, and its length.

    Args:
        numbers: row numbers, in the order in which they count as earlier.
        ids: the token ids of a row.
    """
    when = {number: place for place, number in enumerate(numbers)}
    ordered, shared = map(list, zip(*sorted_by_prefix(list(numbers), ids)))
    best: dict[int, tuple[int, int]] = {}
    for row, partner, length in (*_nearest(ordered, shared, when), *_nearest(ordered[::-1], [0, *shared[:0:-1]], when)):
        if row not in best or length > best[row][1]:
            best[row] = (partner, length)
    return best


def _nearest(ordered: list[int], shared: list[int], when: dict[int, int]) -> Iterator[tuple[int, int, int]]:
    """(row, the nearest row before it in the order that is also earlier, tokens they share)."""
    stack: list[tuple[int, int]] = []  # (row, tokens it shares with the row below it on the stack); ascending `when`
    for row, length in zip(ordered, shared):
        while stack and when[stack[-1][0]] > when[row]:
            length = min(length, stack.pop()[1])
        if stack:
            yield row, stack[-1][0], length
        stack.append((row, length))

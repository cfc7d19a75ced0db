"""Why rows do not share more: the causes, what each costs, and what to change.

Every row is compared with the one earlier row that it should share with:

- a later call of a conversation with the call that it continues;
- the prompt of any other row with a prompt of its group, one with the same end, or the one with the longest common
  prefix.

Sampled tokens are the policy's own choice, so two rows that diverge at a sampled token have nothing to repair. A
difference in the context is lost sharing if the rows agree again after it (`alignment.py`). Each row has one partner,
so the time is linear in the number of rows.

**Several causes at once.** A difference is cut where both sides agree for a few tokens, at the ends of messages, and at
think blocks. Each piece has one cause, read from its tokens and its text. Tools in another order are undone in every
row by itself, before rows are compared (`tools.py`), so that what is left of a difference has other causes.

The cost of a cause is measured, not estimated: its differences are replaced by the tokens of the partners, and the tree
is built again. Partners are rewritten first, so a row that continues its partner still does so afterwards. Causes are
repaired one after the other, those nearest to the start of rows first, because a difference hides those behind it. So
the costs add up to the total loss, and each cause has the share that it costs once those in front are repaired.

**What is no cause.** A call that does not contain the answer of the call before it starts a new context: a sub-agent
has its own system prompt, and that is no value that varies. It is compared with other new contexts only. Rows without
`episode` are calls of one conversation if the answer reappears. A row that begins with the whole prompt of another but
not with its answer may belong to a third: it is repaired from nobody, and the report asks for the episodes.
"""

import dataclasses
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from treetrain.data.trajectory import Trajectory, common_prefix
from treetrain.errors import quoted
from treetrain.inspection.alignment import RUN, Alignment, Gap, Ids, align, earlier_partners
from treetrain.inspection.tools import TOOL, ToolOrder, Tools, find_tools
from treetrain.planning.cost import ModelCounts
from treetrain.tree.build import build_tree
from treetrain.tree.stats import linear_work, tree_work
from treetrain.tree.token_tree import TokenTree

SHOWN = 24
"""Tokens shown at either end of a long difference; twice as many are decoded to find its cause."""
AROUND = 6
"""Tokens shown before a difference; after it, twice as many."""
LEAST = 0.001
"""Share of the unique tokens and FLOPs, once the causes in front are repaired, that a reported cause costs."""
TRIALS = 16
"""Rows with the same prompt that a row without an episode is compared with."""
WIDEST = 1024
"""A difference of more than four times as many tokens is not searched for think blocks."""
PIECE = 4
"""Equal tokens that cut a difference in two."""
HEADER = 8
"""Most tokens between the end of a message and the text of the next one."""
ANSWER = 4
"""Tokens of an answer that must reappear in a later call."""
PADDING = 4
"""The longest padding must have so many tokens."""

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
        "earlier answers written differently by the chat template",
        "use a template that writes a message the same way whatever follows it (--chat-template chatml), in the "
        "rollouts too; if the policy really saw these prompts, train on them as they are",
    ),
    "history": (
        "history that the harness rewrites between calls",
        "let the harness append only: no compaction, cleared tool results, reminders or re-serialised arguments inside "
        "the history; if the policy really saw these prompts, train on them as they are",
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
    "dates": (
        "dates or times that differ inside the prompt",
        "fix the date for all rows of a batch, or move it behind the text that all rows share",
    ),
    "ids": (
        "ids that differ inside the prompt",
        "leave the id out of the prompt, or move it behind the text that all rows share",
    ),
    "values": (
        "values that differ inside the prompt",
        "fix the value for all rows of a batch, or move it behind the text that all rows share",
    ),
    "changed": (
        "earlier tokens changed",
        "give --tokenizer: the text tells a chat template from tokens that were decoded and tokenised again",
    ),
}
"""Every cause: its name in reports, and what to change."""

_THINK = re.compile(r"</?(?:think|thinking|reasoning|thought)>|\[/?THINK\]|<\|channel\|>|<\|(?:START|END)_THINKING\|>")
_MONTH = "(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)"
_DATE = re.compile(
    r"\d{4}[-/]\d{1,2}(?:[-/]\d{1,2})?|\d{1,2}:\d{2}|\d{1,2}[/.]\d{1,2}[/.]\d{2,4}"
    rf"|\b(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day\b|\b{_MONTH}[a-z]*\.? \d|\d {_MONTH}"
)
_ID = re.compile(r"[0-9a-fA-F]{8}-[0-9a-fA-F-]{9,}|(?=[\w-]*\d)[\w-]{8,}|\d{5,}")


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

    def example(self) -> str:
        """The two rows around the difference."""
        where = f"{quoted(self.row)} differs from {quoted(self.partner)} at token {self.position:,}"
        return f"First: {where}:\n  {self.partner_text}\n  {self.row_text}"


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
    """Broken calls that do not contain an earlier call's answer: a new context, such as a sub-agent's."""
    unclear: int
    """Rows without `episode` that begin with the prompt of an earlier row, but with no such row's answer."""
    unique: int
    """Tokens of the tree as the rows are."""
    repaired_unique: int
    """The same with all causes repaired."""
    flop_speedup: float
    """FLOPs of every row by itself / FLOPs of the tree, as the rows are."""
    repaired_flop_speedup: float
    """FLOPs of every row by itself, as is / FLOPs of the tree with all causes repaired."""

    forks: tuple[tuple[str, int, int], ...] = dataclasses.field(repr=False)
    """(cause, row, token) of every place where a row differs from its partner."""

    def sections(self) -> list[tuple[str, str]]:
        """(title, text) of a summary, which has no title, and of each cause."""
        lines = []
        if self.successive:
            kept = self.successive - self.broken
            lines.append(f"{kept:,} of {self.successive:,} later calls extend an earlier call of their conversation.")
        if self.unrelated:
            lines.append(f"{self.unrelated:,} start a new context (a sub-agent, a summary): nothing to repair.")
        if self.unclear:
            lines.append(
                f"{self.unclear:,} rows begin with the prompt of an earlier row but not with its answer. Name the "
                "conversations (--map episode=KEY) to have them compared: nothing is repaired across conversations."
            )
        lines.append(
            f"{self.unique - self.repaired_unique:,} of {self.unique:,} unique tokens are lost sharing."
            if self.causes
            else "No sharing is lost."
        )
        sections = [("", " ".join(lines))]
        before = self.flop_speedup
        for number, lost in enumerate(self.causes, 1):
            lost_here, gain = "nothing alone", "only together with others, which differ at the same places."
            if lost.tokens > 0 < lost.flops:
                lost_here = f"{lost.tokens:,} tokens, {lost.flops:.3g} FLOPs"
                gain = f"{lost.flop_speedup:.2f}x by FLOPs in place of {before:.2f}x, all rows at once"
                gain += ", with the changes above." if number > 1 else "."
            text = [
                f"Rows: {lost.rows:,}. Lost: {lost_here}.",
                lost.example(),
                f"Change: {lost.change}.",
                f"Gain: {gain}",
            ]
            sections.append((f"{number}. {lost.title}", "\n".join(text)))
            before = lost.flop_speedup
        return sections

    def explain(self) -> str:
        """The diagnosis in words."""
        (_, summary), *causes = self.sections()
        indented = (f"{title}\n   {text}".replace("\n", "\n   ").replace("   " * 2, "   ") for title, text in causes)
        return "\n\n".join([summary, *indented])


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
    steps: list[tuple[str, int, int, float, float]] = []  # a cause, tokens before, tokens saved, FLOPs before and after
    todo, later = sorted(found, key=places.__getitem__), []
    while todo:
        cause = todo.pop(0)
        tree = build_tree(search.repaired([*(step[0] for step in steps), cause]))
        less = counts.flops(*tree_work(tree, counts.attention_ranges))
        if less > 1.01 * flops:  # a repair that adds cost now may gain once others are repaired; else it is left out
            later.append(cause)
            continue
        steps.append((cause, unique, unique - tree.num_tokens, flops, less))
        unique, flops = tree.num_tokens, less
        todo, later = todo + later, []

    def gains(before: int, tokens: int, more: float, less: float) -> bool:
        shown = {f"{rows_flops / each:.2f}" for each in (more, less) if each}
        return tokens > LEAST * before and more > less * (1 + LEAST) and len(shown) == 2

    causes: list[LostSharing] = []
    for cause, before, tokens, more, less in steps:
        if not gains(before, tokens, more, less):
            # It may gain only together with others, which differ at the same places.
            without = build_tree(search.repaired([step[0] for step in steps if step[0] != cause]))
            work = counts.flops(*tree_work(without, counts.attention_ranges))
            if len(steps) == 1 or not gains(without.num_tokens, without.num_tokens - unique, work, flops):
                continue
        causes.append(
            LostSharing(
                cause=cause,
                title=CAUSES[cause][0],
                change=CAUSES[cause][1],
                rows=found[cause],
                tokens=tokens,
                flops=more - less,
                flop_speedup=rows_flops / less if less else 1.0,
                **first[cause],
            )
        )
    return Diagnosis(
        causes=tuple(causes),
        successive=search.successive,
        broken=search.broken,
        unrelated=search.unrelated,
        unclear=search.unclear,
        unique=as_is,
        repaired_unique=unique,
        flop_speedup=rows_flops / start if start else 1.0,
        repaired_flop_speedup=rows_flops / flops if flops else 1.0,
        forks=tuple(
            (edit.cause, link.row, edit.gap.second_start + search.start[link.row])
            for link in search.links
            for edit in link.edits
        ),
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
        self.turn_ends = np.array([token for token, count in lasts.items() if count >= 0.1 * len(rows)], np.int32)
        self.links: list[_Link] = []
        self.successive = self.broken = self.unrelated = self.unclear = 0
        self.known: dict[Hashable, list[str]] = {}
        self.words: dict[int, str] = {}
        self.ends: dict[int, list[int]] = {}
        self.unsorted: dict[int, Tools] = {}
        self.tools: dict[int, tuple[int, int]] = {}
        if tokenizer is not None:
            self._sort_tools()

    def _sort_tools(self) -> None:
        """Bring the tools of all prompts into one order; `unsorted` keeps those of rows that this changes."""
        found, same = {}, {}
        for number, ids in enumerate(self.ids):
            system = ids[: self._turns(number)[0]]
            name = system.tobytes()
            if name not in same:
                same[name] = find_tools(system, self._word)
            if same[name] is not None:
                found[number] = same[name]
        order = ToolOrder(tools for tools in same.values() if tools is not None)
        written: dict[int, Ids] = {}  # by the identity of the tools, which `same` keeps alive
        for number, tools in found.items():
            if id(tools) not in written:
                written[id(tools)] = order.sorted(tools)
            ids, new = self.ids[number], written[id(tools)]
            self.tools[number] = (tools.start, tools.start + new.size)
            if np.array_equal(ids[tools.start : tools.stop], new):
                continue
            self.unsorted[number] = tools
            self.ids[number] = np.concatenate([ids[: tools.start], new, ids[tools.stop :]])
            marks = np.full(new.size, not self.masked[number])
            trained = self.trained[number]
            self.trained[number] = np.concatenate([trained[: tools.start], marks, trained[tools.stop :]])
            self.context[number] += self.ids[number].size - ids.size
            del self.ends[number]

    def _word(self, token: int) -> str:
        if token not in self.words:
            self.words[token] = self.tokenizer.decode([token])
        return self.words[token]

    def _turns(self, row: int) -> list[int]:
        """Tokens of a row before the ends of its first two turns: the system prompt and the first question."""
        if row not in self.ends:
            ids = self.ids[row][: self.context[row]]
            ends = np.flatnonzero(np.isin(ids, self.turn_ends))[:2].tolist() if self.turn_ends.size else []
            self.ends[row] = (ends + [0, ids.size][len(ends) :])[:2] if ends else [0, ids.size]
        return self.ends[row]

    # Partners

    def run(self) -> None:
        """Compare every row with its partner. `links` lists partners before the rows that refer to them."""
        conversations: dict[tuple[Hashable, ...], list[int]] = {}
        for number, row in enumerate(self.rows):
            conversations.setdefault((row.key, row.group, row.episode), []).append(number)
        heads: dict[tuple[Hashable, bool], list[int]] = {}
        later: list[_Link] = []
        for (key, _, episode), members in conversations.items():
            links, loose = self._later_calls(members, certain=episode is not None)
            # The first call of a conversation, and new contexts in it, are different agents.
            heads.setdefault((key, False), []).extend(loose[:1] if episode is not None else loose)
            heads.setdefault((key, True), []).extend(loose[1:] if episode is not None else [])
            later += links
        for (_, agents), members in heads.items():
            self._prompts(sorted(members), agents=agents)
        self.links += sorted(later, key=lambda link: link.row)
        if self.unsorted:
            self.links = [self._with_order(link) for link in self.links]

    def _with_order(self, link: _Link) -> _Link:
        """The link with the difference in the order of the tools, if there is one."""
        span, other = (self.tools.get(row) for row in (link.row, link.partner))
        if span is None or other is None or span[0] >= link.row_end or other[0] >= link.partner_end:
            return link
        ours, theirs = (self._given_tools(row) for row in (link.row, link.partner))
        if np.array_equal(ours, theirs):
            return link
        edit = _Edit(Gap(other[0], other[0], span[0], span[0]), "order")
        return link._replace(
            edits=sorted([*link.edits, edit], key=lambda each: (each.gap.second_start, each.cause != "order"))
        )

    def _given_tools(self, row: int) -> Ids:
        """The tools of a row in their own order."""
        start, stop = self.tools[row]
        return np.concatenate(self.unsorted[row].pieces) if row in self.unsorted else self.ids[row][start:stop]

    def _later_calls(self, calls: list[int], *, certain: bool) -> tuple[list[_Link], list[int]]:
        """Links from calls to the calls that they continue, including unbroken ones, and the calls that start anew.

        Args:
            calls: row numbers in order.
            certain: whether the rows are known to be calls of one conversation; otherwise only rows that contain
                an earlier row with its answer are taken for later calls.
        """
        if len(calls) < 2:
            return [], calls
        partners = earlier_partners(calls, self.ids.__getitem__)
        prompts: dict[bytes, list[int]] = {}  # earlier rows by their prompts
        lengths: list[int] = []  # of these prompts, in order
        found, loose = [], calls[:1]
        for before, row in pairwise(calls):
            if not certain and self.masked[before]:
                size = self.context[before]
                prompts.setdefault(self.ids[before][:size].tobytes(), []).append(before)
                at = bisect_left(lengths, size)
                lengths[at:at] = [size] * (lengths[at : at + 1] != [size])
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
            if link is None and not certain and self.masked[row]:
                # Other rows with a prompt that this one begins with may be of this conversation.
                ids, place = self.ids[row], bisect_right(lengths, min(most, self.context[row] - 1))
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
        answer = self.trained[partner]

        def reappearing(found: Alignment) -> int:
            inside = (answer[gap.first_start : gap.first_stop].sum() for gap in found.gaps)
            return int(answer[: found.first_end].sum() - sum(inside))

        # The last message of the row is new, unless this is another answer to a prompt that was changed.
        ends = np.flatnonzero(np.isin(second, self.turn_ends))
        found = align(first, second[: ends[-2] + 1] if ends.size > 1 else second, to_end=True)
        if (again := reappearing(found)) < ANSWER:
            found = align(first, second, to_end=True)
            again = reappearing(found)
        context = self.context[partner]
        reappears = again >= min(ANSWER, int(answer.sum()))
        if certain:
            begins = bool(found.gaps) and found.gaps[0].first_start >= context - 2
            continues = not self.masked[partner] or reappears or begins or found.second_end == second.size
        else:
            whole = found.first_end == first.size and found.agreed >= max(context // 2, RUN, least)
            continues = whole and reappears
        edits = self._classified(row, partner, found, later=True) if continues and found.gaps else []
        if not certain and not edits:
            return None
        self.broken += 1
        if edits:
            return _linked(row, partner, found, edits)
        self.unrelated += 1
        # The whole prompt reappears, but not the answer: no agent with a prompt of its own.
        same = found.first_end >= context - 2 and self.masked[partner]
        return _Link(row, partner, [], found.first_end, found.second_end) if same and not found.gaps else None

    def _prompts(self, members: list[int], *, agents: bool) -> None:
        """Link the prompts of rows that continue no other row, each distinct prompt once.

        Args:
            members: row numbers.
            agents: whether these are new contexts inside conversations: agents with prompts of their own.
        """
        prompts: dict[Hashable, list[int]] = {}
        for number in members:
            prompt = self.ids[number][: self.context[number]]
            tools = self._given_tools(number).tobytes() if number in self.tools else b""
            name = (self.rows[number].group, self.masked[number], tools, prompt.tobytes())
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
                    if edits and not (agents and any(edit.cause == "values" for edit in edits)):
                        best, most = _linked(number, candidate, found, edits), found.agreed
            if best is None and shared:
                best = _Link(number, partner, [], shared, shared)
            if best is not None:
                self.links += [best._replace(row=row) for row in same_as[number]]

    # Causes

    def _classified(self, row: int, partner: int, found: Alignment, *, later: bool) -> list[_Edit]:
        """The gaps with their causes, up to the first gap that is not lost sharing."""
        edits: list[_Edit] = []
        sizes = [max(gap.first_stop - gap.first_start, gap.second_stop - gap.second_start) for gap in found.gaps]
        runs = [found.run_after(number) for number in range(len(sizes))]
        for number, gap in enumerate(found.gaps):
            causes = self._causes(row, partner, gap, later=later)
            if not later:
                # Different questions in the same words agree by chance: require much more agreement than difference,
                # behind this gap or behind some of the next ones.
                unsure = {"dates", "ids", "values"}.intersection(edit.cause for edit in causes) or not self.masked[row]
                known = self.masked[row] or {edit.cause for edit in causes} <= {"front", "truncation"}
                behind = zip(accumulate(runs[number:]), accumulate(sizes[number:]))
                agrees = any(run >= (max(2 * RUN, 4 * size) if unsure else RUN) for run, size in behind)
                # Behind the first question are the answers of two conversations.
                if not agrees or not known or (unsure and gap.second_start > self._turns(row)[1]):
                    break
            edits += causes
        return edits

    def _causes(self, row: int, partner: int, gap: Gap, *, later: bool) -> list[_Edit]:
        """The pieces of a gap, each with its cause; neighbours of the same cause are one piece."""
        ours = self.ids[row][gap.second_start : gap.second_stop]
        theirs = self.ids[partner][gap.first_start : gap.first_stop]
        if self._is_cut(gap):
            return [_Edit(gap, "truncation")]
        moved = ours.size == theirs.size and np.array_equal(np.sort(ours), np.sort(theirs))
        ends = [np.flatnonzero(np.isin(side, self.turn_ends)) + 1 for side in (theirs, ours)]
        pieces = [gap]  # in another order, or whole messages dropped or replaced
        if not moved and not (later and len(ends[0]) != len(ends[1])):
            messages = _cut_at(gap, *ends) if len(ends[0]) == len(ends[1]) else [gap]
            pieces = [piece for message in messages for piece in self._pieces(message, partner, row)]
        edits: list[_Edit] = []
        for piece in pieces:
            cause = self._cause(row, partner, piece, later=later)
            if edits and edits[-1].cause == cause:
                piece = Gap(
                    edits[-1].gap.first_start, piece.first_stop, edits.pop().gap.second_start, piece.second_stop
                )
            edits.append(_Edit(piece, cause))
        return edits

    def _pieces(self, gap: Gap, partner: int, row: int) -> Iterator[Gap]:
        """A gap cut at a think block at either end of one side, and where both sides agree for a few tokens."""
        first, last, second, end = gap
        theirs, ours = self.ids[partner][first:last], self.ids[row][second:end]
        same = common_prefix(theirs, ours)
        tail = common_prefix(theirs[same:][::-1], ours[same:][::-1])
        first, last, second, end = first + same, last - tail, second + same, end - tail
        theirs, ours = theirs[same : theirs.size - tail], ours[same : ours.size - tail]
        if not theirs.size and not ours.size:
            return
        sides = [self._blocks(side) for side in (theirs, ours)]
        if bool(sides[0]) != bool(sides[1]):
            (start, stop), longer = (sides[0] or sides[1])[0], bool(sides[0])
            if start == 0:
                cut = Gap(first, first + stop, second, second) if longer else Gap(first, first, second, second + stop)
                yield cut
                yield from self._pieces(Gap(cut.first_stop, last, cut.second_stop, end), partner, row)
                return
            if stop == len(theirs if longer else ours):
                cut = Gap(first + start, last, end, end) if longer else Gap(last, last, second + start, end)
                yield from self._pieces(Gap(first, cut.first_start, second, cut.second_start), partner, row)
                yield cut
                return
        found = align(theirs, ours, run=PIECE)
        for a, b, c, d in (*found.gaps, Gap(found.first_end, theirs.size, found.second_end, ours.size)):
            if a < b or c < d:
                yield Gap(first + a, first + b, second + c, second + d)

    def _blocks(self, ids: Ids) -> list[tuple[int, int]]:
        """The think blocks among tokens, with the white space behind them."""
        if self.tokenizer is None or not ids.size or ids.size > 4 * WIDEST:
            return []
        words = [self._word(token) for token in ids.tolist()]
        marks = [at for at, word in enumerate(words) if _THINK.search(word)]
        blocks = []
        for opening, closing in zip(marks[::2], marks[1::2]):
            stop = closing + 1
            while stop < len(words) and not words[stop].strip():
                stop += 1
            blocks.append((opening, stop))
        return blocks

    def _cause(self, row: int, partner: int, gap: Gap, *, later: bool) -> str:
        ours = self.ids[row][gap.second_start : gap.second_stop]
        theirs = self.ids[partner][gap.first_start : gap.first_stop]
        if gap.first_start == gap.second_start == 0 and max(ours.size, theirs.size) == 1:
            return "front"
        system = not later or gap.second_start < self._turns(row)[0]
        kinds = [] if self.tokenizer is None else self._textual(row, partner, gap)
        if kinds and kinds[0] in ("retokenised", "whitespace"):
            return "history" if "arguments" in kinds and not system else kinds[0]
        if not system:
            dropped = int(np.isin(theirs, self.turn_ends).sum())
            if dropped != int(np.isin(ours, self.turn_ends).sum()):
                start = self.ids[partner][max(gap.first_start - HEADER, 0) : gap.first_start]
                whole = not ours.size and dropped > 1 and np.isin(start, self.turn_ends).any()
                return "truncation" if whole else "history"
        if "think" in kinds:
            return "think"
        if not system:
            return self._rewritten(partner, gap, "arguments" in kinds)
        if any(self._within_tools(*each) for each in ((partner, *gap[:2]), (row, *gap[2:]))) or "schema" in kinds:
            return "tool list"
        if ours.size == theirs.size > 1 and np.array_equal(np.sort(ours), np.sort(theirs)):
            return "order"
        return next((kind for kind in kinds if kind in ("dates", "ids")), "values")

    def _rewritten(self, partner: int, gap: Gap, arguments: bool) -> str:
        """Who changed the history: the chat template changes answers and their headers, the harness everything."""
        if self.tokenizer is None:
            return "changed"
        start, stop = gap.first_start, max(gap.first_stop, gap.first_start + 1)
        message = int(np.isin(self.ids[partner][start : self.context[partner]], self.turn_ends).sum())
        if arguments or (self.masked[partner] and message and not self.trained[partner][start:stop].any()):
            return "history"
        return "rewritten"

    def _is_cut(self, gap: Gap) -> bool:
        """Whether a row lacks the beginning of its partner, apart from up to three tokens."""
        size = gap.second_stop - gap.second_start
        return gap.second_stop < 4 and gap.first_stop - gap.first_start > 1 + 8 * size

    def _within_tools(self, row: int, start: int, stop: int) -> bool:
        first, last = self.tools.get(row, (0, -1))
        return first <= start and stop <= last

    def _textual(self, row: int, partner: int, gap: Gap) -> list[str]:
        """The kinds of difference that its text shows; equal differences are decoded once."""
        # Decode with equal neighbouring tokens, so that characters of several tokens are whole in both.
        one, other = self.ids[partner], self.ids[row]
        fronts = (ids[max(start - 2, 0) : start][::-1] for ids, start in ((one, gap[0]), (other, gap[2])))
        before = common_prefix(*fronts)
        after = common_prefix(one[gap.first_stop :][:2], other[gap.second_stop :][:2])
        ours = self._ends(self.ids[row], gap.second_start - before, gap.second_stop + after)
        theirs = self._ends(self.ids[partner], gap.first_start - before, gap.first_stop + after)
        # A date or an id is read with the words around the tokens that differ.
        left = self.ids[row][max(gap.second_start - before - AROUND, 0) : gap.second_start - before]
        right = self.ids[row][gap.second_stop + after :][: 2 * AROUND]
        name = tuple(ids.tobytes() for ids in (left, ours, theirs, right))
        if name not in self.known:
            decode = self.tokenizer.decode
            one, other = decode(ours), decode(theirs)
            kinds = self.known[name] = []
            if one == other:
                kinds.append("retokenised")
            elif "".join(one.split()) == "".join(other.split()):
                kinds.append("whitespace")
            if len(_THINK.findall(one)) != len(_THINK.findall(other)):
                kinds.append("think")
            plain, again = (Counter(re.sub(r'[\s\\"]', "", text)) for text in (one, other))
            if plain == again and one != other and '":' in one and '":' in other:
                kinds.append("arguments")
            spans = (self.ids[row], *gap[2:]), (self.ids[partner], *gap[:2])
            if any(TOOL.search(decode(self._ends(*span))) for span in spans):
                kinds.append("schema")
            full = [decode(np.concatenate([left, ids, right])) for ids in (ours, theirs)]
            inside = (len(decode(left)), len(decode(right)))
            for kind, pattern in (("dates", _DATE), ("ids", _ID)):
                if all(_touches(pattern, text, inside[0], len(text) - inside[1]) for text in full):
                    kinds.append(kind)
        return self.known[name]

    def _ends(self, ids: Ids, start: int, stop: int) -> Ids:
        """A range of tokens of a row; only both ends of a long one."""
        if stop - start <= 4 * SHOWN:
            return ids[start:stop]
        return np.concatenate([ids[start : start + 2 * SHOWN], ids[stop - 2 * SHOWN : stop]])

    # Repairs

    def repaired(self, causes: Collection[str]) -> list[Trajectory]:
        """The rows without the differences of these causes; without any cause, as they are.

        Padding is repaired with any cause, since every difference lies behind it. A repaired row has its partner's
        tokens, repaired before it, wherever both agree and inside repaired differences.
        """
        if not causes:
            return [
                Trajectory(row.ids, loss_weights=row.loss_weights, key=row.key) if row.experts is not None else row
                for row in self.rows
            ]
        ids, trained = list(self.ids), list(self.trained)
        # For each position of a rewritten row: where it is now; behind what replaces it if it is gone.
        places: dict[int, NDArray[np.int64]] = {}
        if "order" not in causes:
            for row, tools in self.unsorted.items():
                ids[row], trained[row], places[row] = self._as_given(row, tools)
        for link in self.links:
            row, partner = link.row, link.partner
            if partner not in places and not any(edit.cause in causes for edit in link.edits):
                continue
            moved = places.get(partner, np.arange(self.ids[partner].size + 1))
            own = places.get(row, np.arange(self.ids[row].size + 1))
            place, pieces, size, low, i, j = own.copy(), [], 0, 0, 0, 0
            rest = _Edit(Gap(link.partner_end, link.partner_end, link.row_end, self.ids[row].size), "")
            for (first, first_stop, second, second_stop), cause in [*self._steps(link, causes), rest]:
                if cause and (first < i or second < j):
                    continue  # inside tools in their own order
                first, second = max(first, i), max(second, j)
                copied = ids[partner][low : moved[first]]
                pieces.append((copied, np.full(copied.size, not self.masked[row])))
                place[j : second + 1] = moved[i : first + 1] - low + size
                size += copied.size
                stays = cause not in causes
                source, span, at = (row, (second, second_stop), own) if stays else (partner, (first, first_stop), moved)
                new = slice(at[span[0]], at[span[1]])
                marks = trained[row][new] if stays else np.full(new.stop - new.start, not self.masked[row])
                pieces.append((ids[source][new], marks))
                if stays:
                    place[second : second_stop + 1] = own[second : second_stop + 1] - own[second] + size
                size += new.stop - new.start
                if not stays:
                    place[second + 1 : second_stop + 1] = place[second_stop] = size
                low, i, j = int(moved[first_stop]), first_stop, second_stop
            ids[row], trained[row] = (np.concatenate(each) for each in zip(*pieces))
            places[row] = place
        return [
            Trajectory(ids[number], loss_weights=trained[number].astype(np.float64), key=row.key)
            if number in places or number in self.unsorted or ids[number].size < len(row) or row.experts is not None
            else row
            for number, row in enumerate(self.rows)
        ]

    def _steps(self, link: _Link, causes: Collection[str]) -> Iterator[_Edit]:
        """The differences of a link; tools in their own order are one difference, whatever else differs in them."""
        for edit in link.edits:
            if edit.cause == "order" and edit.gap.second_start == edit.gap.second_stop and "order" not in causes:
                yield _Edit(Gap(*self.tools[link.partner], *self.tools[link.row]), "order")
            else:
                yield edit

    def _as_given(self, row: int, tools: Tools) -> tuple[Ids, NDArray[np.bool_], NDArray[np.int64]]:
        """A row with its tools in their own order: its tokens, which are trained, and where each sorted token is."""
        start, stop = self.tools[row]
        ids, trained, given = self.ids[row], self.trained[row], np.concatenate(tools.pieces)
        place = np.arange(ids.size + 1)
        place[stop:] += given.size - (stop - start)
        place[start + 1 : stop] = place[stop]
        marks = np.full(given.size, not self.masked[row])
        return (
            np.concatenate([ids[:start], given, ids[stop:]]),
            np.concatenate([trained[:start], marks, trained[stop:]]),
            place,
        )

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
                    if cause == "order" and ours[0] == ours[1]:
                        yield cause, self._order_example(link)
                    else:
                        yield cause, self._example(link.row, link.partner, self.ids[link.row], ours, theirs, split)

    def _order_example(self, link: _Link) -> dict[str, Any]:
        """The tools of both rows in their own order."""
        texts, spans = [], []
        for row in (link.row, link.partner):
            start, stop = self.tools[row]
            given = self._given_tools(row)
            texts.append(np.concatenate([self.ids[row][:start], given, self.ids[row][stop:]]))
            spans.append((start, start + given.size))
        same = common_prefix(*(ids[start:stop] for ids, (start, stop) in zip(texts, spans)))
        spans = [(start + same, stop) for start, stop in spans]
        names = self._example(link.row, link.partner, texts[0], spans[0], spans[0])
        return names | {"partner_text": self._marked(texts[1], *spans[1], False)}

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
        if len(set(count)) < 2 or (pad != known and max(count) < PADDING):
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


def _cut_at(gap: Gap, first: NDArray[np.int64], second: NDArray[np.int64]) -> list[Gap]:
    """A gap cut after equally many places of both sides."""
    cuts = [
        (0, 0),
        *zip(first.tolist(), second.tolist()),
        (gap.first_stop - gap.first_start, gap.second_stop - gap.second_start),
    ]
    a, b = gap.first_start, gap.second_start
    return [Gap(a + one[0], a + other[0], b + one[1], b + other[1]) for one, other in pairwise(cuts)]


def _touches(pattern: re.Pattern[str], text: str, start: int, stop: int) -> bool:
    """Whether a match overlaps or touches characters [start, stop) of a text."""
    return any(found.start() <= stop and found.end() >= start for found in pattern.finditer(text))


def _linked(row: int, partner: int, found: Alignment, edits: list[_Edit]) -> _Link:
    """A link up to the first gap that is not lost sharing."""
    last = edits[-1].gap
    later = [gap for gap in found.gaps if gap.second_start >= max(last.second_start + 1, last.second_stop)]
    if later:
        return _Link(row, partner, edits, later[0].first_start, later[0].second_start)
    return _Link(row, partner, edits, found.first_end, found.second_end)

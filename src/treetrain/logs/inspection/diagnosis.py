"""Why rows do not share more: the causes, what each costs, and what to change.

Every row is prepared by itself (`prepared.py`) and compared with the one earlier row that it should share with
(`partners.py`); `differences.py` reads the causes of what differs.

The cost of a cause is measured, not estimated: its differences are replaced by the tokens of the partners, and the tree
is built again. Partners are rewritten first, so a row that continues its partner still does so afterwards. Causes are
repaired one after the other, those nearest to the start of rows first, because a difference hides those behind it. So
the costs add up to the total loss, and each cause has the share that it costs once those in front are repaired. A
repair that makes sharing worse is not counted, so the repaired figures are never worse than those of the rows as is.
"""

import dataclasses
from collections.abc import Collection, Hashable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treetrain.core.errors import quoted
from treetrain.core.planning.cost import ModelCounts
from treetrain.core.tree.token_tree import TokenTree, build_tree
from treetrain.layers.experts.recorded import recorded_experts
from treetrain.layers.trajectory import Trajectory
from treetrain.logs.inspection.alignment import Gap, Ids
from treetrain.logs.inspection.causes import CAUSES
from treetrain.logs.inspection.differences import AROUND, SHOWN, Edit
from treetrain.logs.inspection.partners import Partners
from treetrain.logs.inspection.prepared import Decodes, Place, Prepared
from treetrain.models.work import linear_work, tree_work

LEAST = 0.001
"""Share of the unique tokens and FLOPs, once the causes in front are repaired, that a reported cause costs."""
FRONT = ("padding", "front")
"""Causes in front of all others."""


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


def diagnose(
    rows: Sequence[Trajectory], counts: ModelCounts, tokenizer: Decodes | None = None, *, tree: TokenTree | None = None
) -> Diagnosis:
    """Find why rows do not share more.

    Args:
        rows: K rows; each conversation's calls in order.
        counts: the model that FLOPs are counted for.
        tokenizer: anything with `decode`. Without one, the same text in other tokens, white space, think blocks and
            tools cannot be told apart, and examples show token ids.
        tree: the tree of all rows, if already built.

    Returns:
        The causes, with counts, cost, gain and an example of each.
    """
    # Recorded experts keep equal tokens apart; repaired rows have none, so the tree is compared without them too.
    if tree is None or recorded_experts(tree) is not None:
        tree = build_tree([_without_experts(row) for row in rows])
    search = _Search(rows, tokenizer)
    rows_flops = counts.flops(*linear_work(tree, counts.attention_ranges))
    as_is, start = tree.num_tokens, counts.flops(*tree_work(tree, counts.attention_ranges))
    known: dict[frozenset[str], tuple[int, float]] = {frozenset(): (as_is, start)}

    def figures(causes: Collection[str]) -> tuple[int, float]:
        """Unique tokens and FLOPs with these causes repaired."""
        if (name := frozenset(causes)) not in known:
            repaired = build_tree(search.repaired(name))
            known[name] = repaired.num_tokens, counts.flops(*tree_work(repaired, counts.attention_ranges))
        return known[name]

    def gains(before: tuple[int, float], after: tuple[int, float]) -> bool:
        """Whether a repair that leads from the first figures to the second is worth a line."""
        shown = {f"{rows_flops / flops:.2f}" for _, flops in (before, after) if flops}
        saved = before[0] - after[0] > LEAST * before[0] and before[1] > after[1] * (1 + LEAST)
        return saved and len(shown) == 2

    steps: list[str] = []
    todo, later = sorted(search.rows_of, key=search.depth), []
    while todo:
        cause = todo.pop(0)
        if figures([*steps, cause])[1] > 1.01 * figures(steps)[1]:
            later.append(cause)  # it may gain once others are repaired; else it is left out
            continue
        steps.append(cause)
        todo, later = todo + later, []
    # A cause may gain only together with others, which differ at the same places. What gains nothing is not repaired.
    while idle := [
        cause
        for number, cause in enumerate(steps)
        if not gains(figures(steps[:number]), figures(steps[: number + 1]))
        and not gains(figures([each for each in steps if each != cause]), figures(steps))
    ]:
        steps.remove(idle[-1])
    if not gains(figures([]), figures(steps)):
        steps = []
    causes: list[LostSharing] = []
    for number, cause in enumerate(steps):
        (before, more), (after, less) = (figures(steps[:count]) for count in (number, number + 1))
        causes.append(
            LostSharing(
                cause=cause,
                title=CAUSES[cause][0],
                change=CAUSES[cause][1],
                rows=len(search.rows_of[cause]),
                tokens=before - after,
                flops=more - less,
                flop_speedup=rows_flops / less if less else 1.0,
                **search.example(cause),
            )
        )
    unique, flops = figures(steps)
    partners = search.partners
    return Diagnosis(
        causes=tuple(causes),
        successive=partners.successive,
        broken=partners.broken,
        unrelated=partners.unrelated,
        unclear=partners.unclear,
        unique=as_is,
        repaired_unique=unique,
        flop_speedup=rows_flops / start if start else 1.0,
        repaired_flop_speedup=rows_flops / flops if flops else 1.0,
        forks=tuple(search.forks()),
    )


class _Search:
    """The rows with their partners: what differs, the rows without it, and examples."""

    def __init__(self, rows: Sequence[Trajectory], tokenizer: Decodes | None) -> None:
        self.all, self.tokenizer = rows, tokenizer
        self.prepared = Prepared(rows, tokenizer)
        self.partners = Partners(self.prepared)
        self.rows_of: dict[str, set[int]] = {}
        """For each cause, the prepared rows that differ from their partner, or share such a difference with it."""
        for place in self.prepared.places:
            self.rows_of.setdefault(place.cause, set()).add(place.row)
        ends: dict[int, dict[str, int]] = {}  # about where a row's differences end, in its tokens
        for link in self.partners.links:
            shared = {cause: end for cause, end in ends.get(link.partner, {}).items() if end <= link.partner_end}
            ends[link.row] = shared | {edit.cause: edit.gap.second_stop for edit in link.edits}
            for cause in ends[link.row]:
                self.rows_of.setdefault(cause, set()).add(link.row)

    def depth(self, cause: str) -> float:
        """The mean position of the differences of a cause; less than 0 for those in front of all others."""
        if cause in FRONT:
            return FRONT.index(cause) - len(FRONT)
        if cause == "order":
            return float(np.mean([self.prepared.tools[row][0] for row in self.prepared.unsorted]))
        at = [place.ours[1] for place in self.prepared.places if place.cause == cause]
        at += [edit.gap.second_start for link in self.partners.links for edit in link.edits if edit.cause == cause]
        return float(np.mean(at))

    def forks(self) -> Iterator[tuple[str, int, int]]:
        """(cause, row, token) of every place where a row differs from its partner."""
        numbers, start = self.prepared.numbers, self.prepared.start
        for cause, row, _, (_, token, _), _ in self.prepared.places:
            yield cause, numbers[row], token + (start[row] if cause == "order" else 0)
        for link in self.partners.links:
            for gap, cause in link.edits:
                yield cause, numbers[link.row], max(gap.second_start + start[link.row], 0)

    def repaired(self, causes: Collection[str]) -> list[Trajectory]:
        """All rows without the differences of these causes.

        A repaired row has its partner's tokens, repaired before it, where both agree and in repaired differences.
        """
        prepared = self.prepared
        ids, trained = list(prepared.ids), list(prepared.trained)
        places: dict[int, NDArray[np.int64]] = {}  # where each token of a rewritten row is now, behind what replaces it
        for link in self.partners.links:
            row, partner = link.row, link.partner
            if partner not in places and not any(edit.cause in causes for edit in link.edits):
                continue
            own = prepared.ids[row].size
            moved = places.get(partner, np.arange(prepared.ids[partner].size + 1))
            place = np.empty(own + 1, np.int64)
            pieces = []
            size = 0
            i = 0
            j = 0
            rest = Edit(Gap(link.partner_end, link.partner_end, link.row_end, own), "")
            for (first, first_stop, second, second_stop), cause in [*link.edits, rest]:
                place[j:second] = moved[i:first] - moved[i] + size
                size += moved[first] - moved[i]
                # The partner's tokens, where both agree and where the row is repaired; else the row's.
                copied = ids[partner][moved[i] : moved[first_stop if cause in causes else first]]
                pieces.append((copied, np.full(copied.size, not prepared.masked[row])))
                if cause in causes:
                    place[second:second_stop] = size + moved[first_stop] - moved[first]
                    place[second : second + 1] = size
                    size += moved[first_stop] - moved[first]
                else:
                    place[second:second_stop] = np.arange(size, size + second_stop - second)
                    pieces.append((prepared.ids[row][second:second_stop], prepared.trained[row][second:second_stop]))
                    size += second_stop - second
                i, j = first_stop, second_stop
            place[own] = size
            ids[row], trained[row] = (np.concatenate(each) for each in zip(*pieces))
            places[row] = place
        found = [_without_experts(row) for row in self.all]
        for row, number in enumerate(prepared.numbers):
            place = places.get(row, np.arange(prepared.ids[row].size + 1))
            made = prepared.undo(row, causes, ids[row], trained[row], place)
            if made[0].size != len(self.all[number]) or row in places or row in prepared.unsorted:
                key = self.all[number].key
                found[number] = Trajectory(made[0], loss_weights=made[1].astype(np.float64), key=key)
        return found

    def example(self, cause: str) -> dict[str, Any]:
        """The first row with a cause, and its partner."""
        found = [place for place in self.prepared.places if place.cause == cause]
        for link in self.partners.links:
            for gap, named in link.edits:
                if named == cause:
                    theirs, ours = self.prepared.ids[link.partner], self.prepared.ids[link.row]
                    found.append(Place(cause, link.row, link.partner, (ours, *gap[2:]), (theirs, *gap[:2])))
        _, row, partner, ours, theirs = min(found, key=lambda place: place.row)
        numbers = (self.prepared.numbers[each] for each in (row, partner))
        names = [number if self.all[number].id is None else self.all[number].id for number in numbers]
        split = cause == "retokenised"
        return {
            "row": names[0],
            "partner": names[1],
            "position": ours[1],
            "row_text": self._marked(*ours, split),
            "partner_text": self._marked(*theirs, split),
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


def _without_experts(row: Trajectory) -> Trajectory:
    return row if row.experts is None else Trajectory(row.ids, loss_weights=row.loss_weights, key=row.key)

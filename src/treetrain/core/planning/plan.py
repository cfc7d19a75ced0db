"""A plan: the parts of a packed tree, the order they run in, and which graphs are kept.

A part is a connected piece of the tree, or sibling pieces that continue one token (its attach token). Its tokens see
the path down to that token through the KV cache. A part with parts below it is *kept* (its graph stays alive while
they run) or *recomputed* (a prefill, a pass without graph, fills the cache; the part runs with graph after all parts
below it). A part with no parts below it is a *leaf*. Tokens with descendants in other parts are *exported*: the cache
holds their keys and values.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol, Self, TypeVar

import numpy as np
from jaxtyping import Bool, Int64
from numpy.typing import NDArray

from treetrain.core.tree.layout import PackedLayout
from treetrain.core.tree.token_tree import Int64s, path_to

Bools = NDArray[np.bool_]
Number = TypeVar("Number", bound=np.number)


_LETTERS = {"prefill": "P", "score": "P", "forward": "F", "backward": "B"}


class Event(NamedTuple):
    """One pass of the model."""

    kind: Literal["prefill", "score", "forward", "backward"]
    """A "prefill" runs exported tokens of recomputed parts without graph, a "score" a whole part. A "forward" runs a
    part with graph."""
    number: int
    """The number of the prefill or of the part."""


@dataclass(frozen=True, slots=True)
class Bytes:
    """A number of bytes."""

    count: int

    def __str__(self) -> str:
        size, unit = float(self.count), "B"
        for larger in ("KiB", "MiB", "GiB", "TiB"):
            if size < 1024:
                break
            size, unit = size / 1024, larger
        return f"{self.count} B" if unit == "B" else f"{size:.1f} {unit}"


class Passes(NamedTuple):
    """A rank's sequence of passes."""

    kinds: str
    """One letter per pass, as in `Plan.kinds`."""
    seconds: list[float]


class Costs(Protocol):
    """Predicts a plan's seconds and bytes: `planning.cost.CostModel`."""

    def seconds(self, plan: "Plan") -> float: ...
    def peak_bytes(self, plan: "Plan") -> float: ...
    def passes(self, plan: "Plan") -> Passes: ...
    def token_seconds(self, depth: Int64s) -> NDArray[np.floating]: ...
    @property
    def row_seconds(self) -> float: ...
    @property
    def pass_seconds(self) -> float: ...


@dataclass(frozen=True, kw_only=True)
class Purpose:
    """The costs and the budget that a plan was made for."""

    cost: Costs
    budget: int | Bytes | None
    """The budget that the caller gave."""
    tokens: int | None
    """The budget in tokens that follows from it; None if tokens are not bounded."""

    def explain(self, plan: "Plan") -> str:
        """See `Plan.explain`; `explain.py` has the words."""
        return f"{plan.num_parts:,} parts, {self.cost.seconds(plan):.3g} s, {Bytes(round(self.cost.peak_bytes(plan)))}"

    def explanation(self, plan: "Plan") -> dict[str, Any]:
        """See `Plan.explanation`."""
        return {"parts": plan.num_parts, "seconds": self.cost.seconds(plan), "peak_bytes": self.cost.peak_bytes(plan)}


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """The P parts of a batch with M tokens in all, and whether each graph is kept, recomputed or neither.

    Parts are numbered in depth-first pre-order: all parts below a part directly follow it. `make_plan` and
    `TreeEngine.plan` make plans.
    """

    layout: PackedLayout
    """The tokens and edges that are computed."""
    part_of: Int64[np.ndarray, " M"]
    parent: Int64[np.ndarray, " P"]
    """The part that holds the attach token; -1 at roots."""
    attach: Int64[np.ndarray, " P"]
    """The token that all pieces of the part continue; -1 at roots."""
    kept: Bool[np.ndarray, " P"]
    """Inner parts whose graph stays alive while the parts below run. If all parts are scored first: parts of any kind
    whose graph stays alive from then until their backward."""
    exported: Bool[np.ndarray, " M"]
    """Tokens with descendants in another part."""
    prefill: Int64[np.ndarray, " P"]
    """The prefill that runs a recomputed part's exported tokens; -1 for kept parts and leaves."""
    scores_first: Literal["no", "kept", "recomputed"] = "no"
    """When the loss is evaluated. "no": for each trajectory as soon as its last prediction is scored. "kept": after all
    parts have run forward once. The `kept` ones keep their graphs until then, the others run again; the caches of all
    parts are held. "recomputed": after all parts have run once without graph, in the memory of one path; they then run
    again as this plan says."""
    purpose: Purpose | None = None
    """The costs and the budget given to `make_plan`; None for a plan made otherwise."""

    @classmethod
    def of_parts(
        cls,
        layout: PackedLayout,
        part_of: Int64[np.ndarray, " M"],
        kept: Bool[np.ndarray, " P"] | None = None,
        *,
        prefill_limit: int = 0,
    ) -> Self:
        """Create the plan of a given partition.

        Args:
            layout: M tokens.
            part_of: any numbering 0..P-1 of the parts.
            kept: in that numbering; ignored for leaves. None keeps none.
            prefill_limit: a recomputed part shares the prefill of the recomputed part directly above it while the
                prefill has at most this many tokens; 0 gives each part a prefill of its own.

        Raises:
            ValueError: an empty part, or one whose pieces continue different tokens.
        """
        count = int(part_of.max(initial=-1)) + 1
        before = layout.parent
        roots = np.flatnonzero((before < 0) | (part_of[before] != part_of)) if len(before) else before
        attach = np.full(count, -2, np.int64)  # -2: no token of the part has been seen
        attach[part_of[roots]] = before[roots]
        wrong = roots[attach[part_of[roots]] != before[roots]]
        if len(wrong):
            raise ValueError(
                f"part {part_of[wrong[0]]} continues token {attach[part_of[wrong[0]]]} and token {before[wrong[0]]}; "
                "the pieces of a part must continue one token"
            )
        if (attach == -2).any():
            raise ValueError(f"part {int(np.argmax(attach == -2))} of {count} has no tokens")
        parent = np.where(attach >= 0, part_of[attach], -1)
        first = np.zeros(count, np.int64)
        first[part_of[::-1]] = np.arange(len(part_of))[::-1]  # the last write wins, so the first token is kept
        order = depth_first(parent, first)  # the caller's numbers may be any
        number = np.empty(count, np.int64)
        number[order] = np.arange(count)
        part_of, attach = number[part_of], attach[order]
        parent = np.where(parent[order] >= 0, number[parent[order]], -1)
        # A part's exported tokens are those at or above an attach token in it.
        attached = np.zeros(len(before) + 1, np.int64)
        attached[np.unique(attach[attach >= 0]) + 1] = 1
        attached = np.cumsum(attached)
        exported = attached[layout.ends] > attached[:-1]  # whether an attach token is in the token's subtree
        is_inner = np.zeros(count, bool)
        is_inner[parent[parent >= 0]] = True
        stays = np.zeros(count, bool) if kept is None else kept[order] & is_inner
        sizes = np.bincount(part_of[exported], minlength=count)
        return cls(
            layout=layout,
            part_of=part_of,
            parent=parent,
            attach=attach,
            kept=stays,
            exported=exported,
            prefill=_prefills(parent, is_inner & ~stays, sizes, prefill_limit),
        )

    @property
    def num_parts(self) -> int:
        """Number of parts."""
        return len(self.parent)

    @property
    def num_prefills(self) -> int:
        """Number of prefills. Other passes without graph, which only score, are not counted."""
        return int(self.prefill.max(initial=-1)) + 1

    @cached_property
    def sizes(self) -> Int64[np.ndarray, " P"]:
        """Tokens of each part."""
        return np.bincount(self.part_of, minlength=self.num_parts)

    @cached_property
    def is_inner(self) -> Bool[np.ndarray, " P"]:
        """Parts with parts below them."""
        inner = np.zeros(self.num_parts, bool)
        inner[self.parent[self.parent >= 0]] = True
        return inner

    @property
    def runs_twice(self) -> Bool[np.ndarray, " P"]:
        """Parts that are scored without graph and then run again."""
        return ~self.kept if self.scores_first == "kept" else np.full(self.num_parts, self.scores_first != "no")

    @cached_property
    def _by_part(self) -> tuple[Int64s, Int64s]:
        order = np.argsort(self.part_of, kind="stable")
        return order, np.concatenate([np.zeros(1, np.int64), np.cumsum(self.sizes)])

    def tokens(self, part: int) -> Int64[np.ndarray, " m"]:
        """A part's tokens, ascending."""
        order, offsets = self._by_part
        return order[offsets[part] : offsets[part + 1]]

    @cached_property
    def _members(self) -> list[list[int]]:
        members: list[list[int]] = [[] for _ in range(self.num_prefills)]
        for part in np.flatnonzero(self.prefill >= 0).tolist():
            members[self.prefill[part]].append(part)
        return members

    def prefill_tokens(self, number: int) -> Int64[np.ndarray, " m"]:
        """Tokens of a prefill, ascending."""
        tokens = np.concatenate([self.tokens(part) for part in self._members[number]])
        return np.sort(tokens[self.exported[tokens]])

    def prefill_parts(self, number: int) -> list[int]:
        """The recomputed parts of a prefill; the first one is above the others."""
        return self._members[number]

    def path(self, token: int) -> Int64[np.ndarray, " _"]:
        """Depth + 1 entries: the tokens from the root down to one."""
        return path_to(token, self.layout.segment_start, self.layout.segment_parent)

    def traverse(self) -> Iterator[tuple[Literal["enter", "leave"], int]]:
        """Traverse the parts depth first: each is entered before, and left after, all parts below it."""
        stack: list[int] = []
        for part, parent in enumerate(self.parent.tolist()):
            while stack and stack[-1] != parent:  # pre-order: all below the top of the stack have been seen
                yield "leave", stack.pop()
            stack.append(part)
            yield "enter", part
        while stack:
            yield "leave", stack.pop()

    def keeping_graphs(self, kept: Bool[np.ndarray, " P"] | None = None) -> Self:
        """The same parts; all are scored before the first runs backward, and these (None: all) keep their graphs."""
        kept = np.ones(self.num_parts, bool) if kept is None else kept
        return replace(self, kept=kept, prefill=np.full_like(self.prefill, -1), scores_first="kept")

    def events(self) -> Iterator[Event]:
        """Yield the passes of a training step in order. Passes that only score parts beforehand are left out."""
        if self.scores_first == "kept":
            kept = self.kept.tolist()
            yield from (Event("forward" if stays else "score", part) for part, stays in enumerate(kept))
            for part in reversed(range(self.num_parts)):  # so that all parts below a part precede it
                if not kept[part]:
                    yield Event("forward", part)
                yield Event("backward", part)
            return
        for visit, part in self.traverse():
            if visit == "leave":
                if not self.kept[part]:
                    yield Event("forward", part)
                yield Event("backward", part)
            elif self.kept[part]:
                yield Event("forward", part)
            elif self.prefill[part] >= 0 and self._members[self.prefill[part]][0] == part:
                yield Event("prefill", int(self.prefill[part]))

    @property
    def kinds(self) -> str:
        """One letter for each event: F(orward), B(ackward), or P for a pass without graph."""
        return "".join(_LETTERS[event.kind] for event in self.events())

    @property
    def phases(self) -> tuple[str, str]:
        """The letters of `kinds` before the loss is known and after it, if it is known after all parts are scored."""
        split = self.num_parts if self.scores_first == "kept" else 0
        return self.kinds[:split], self.kinds[split:]

    def exported_tokens(self, part: int) -> Int64[np.ndarray, " x"]:
        """A part's tokens that have descendants in other parts, ascending."""
        tokens = self.tokens(part)
        return tokens[self.exported[tokens]]

    @cached_property
    def cached_tokens(self) -> int:
        """Largest number of exported tokens whose keys and values are held at once."""
        return self._most_held(self.exported)

    @cached_property
    def cached_states(self) -> int:
        """Largest number of attach tokens whose recurrent states are held at once."""
        attached = np.zeros(self.layout.num_tokens, bool)
        attached[self.attach[self.attach >= 0]] = True
        return self._most_held(attached)

    def _most_held(self, handed_on: Bools) -> int:
        """Count the most of these tokens (bool [M]) whose caches are held at once."""
        if self.scores_first == "kept":  # no cache is released before the backwards
            return int(handed_on.sum())
        exports = np.bincount(self.part_of[handed_on], minlength=self.num_parts)
        filled = np.where(self.kept, exports, 0)
        for parts in self._members:  # a prefill fills the cache of all its parts when the first is entered
            filled[parts[0]] = exports[parts].sum()
        return int((self._above(filled) + filled).max(initial=0))

    @cached_property
    def is_recomputed_token(self) -> Bool[np.ndarray, " M"]:
        """Tokens that run forward in a prefill and again in their part."""
        return self.exported & (self.prefill >= 0)[self.part_of] if self.num_parts else self.exported

    @cached_property
    def recomputed_tokens(self) -> int:
        """Tokens that run forward twice: once without graph, and again with it."""
        again = int(self.is_recomputed_token.sum())
        return again + int(self.sizes[self.runs_twice].sum())

    def graphs_beside(self, per_part: NDArray[Number]) -> NDArray[Number]:
        """Sum `per_part` [P] over the other parts whose graph is alive while each part runs; returns [P]."""
        if self.scores_first == "kept":
            stays = np.where(self.kept, per_part, 0)
            return np.cumsum(stays) - stays
        return self._above(np.where(self.kept, per_part, 0))

    def _above(self, per_part: NDArray[Number]) -> NDArray[Number]:
        """Sum `per_part` [P] over the parts on the path to each part; returns [P]."""
        above, total = [], [0] * (self.num_parts + 1)  # the last entry is read at roots, whose parent is -1
        for part, (parent, own) in enumerate(zip(self.parent.tolist(), per_part.tolist())):
            above.append(total[parent])
            total[part] = total[parent] + own
        return np.array(above, per_part.dtype)

    @cached_property
    def alive(self) -> Int64[np.ndarray, " P"]:
        """Tokens whose graph is alive while each part runs: its own and those of the kept parts above it."""
        return self.sizes + self.graphs_beside(self.sizes)

    @property
    def peak_tokens(self) -> int:
        """Most tokens whose graph is alive at once."""
        return int(self.alive.max(initial=0))

    def explain(self) -> str:
        """Describe parts, recomputation, predicted memory and time, with a table of other budgets.

        The call makes the plans of the table, which takes time.

        Raises:
            ValueError: a plan that `make_plan` did not make.
        """
        return self._given_purpose().explain(self)

    def explanation(self) -> dict[str, object]:
        """The contents of `explain` as plain JSON data."""
        return self._given_purpose().explanation(self)

    def _given_purpose(self) -> Purpose:
        if self.purpose is None:
            raise ValueError("this plan knows no budget and no cost model; plans of make_plan can be explained")
        return self.purpose


def segment_heights(layout: PackedLayout) -> Int64[np.ndarray, " S"]:
    """Tokens on the longest path down from each segment's first token."""
    above = layout.segment_parent.tolist()
    top = np.diff(layout.segment_start).tolist()
    below = [0] * (len(above) + 1)
    for segment in range(len(above) - 1, -1, -1):
        top[segment] += below[segment]
        below[above[segment]] = max(below[above[segment]], top[segment])
    return np.array(top, np.int64)


def depth_first(parent: Int64s, key: NDArray[np.number]) -> Int64s:
    """Part numbers in depth-first order, siblings by ascending key."""
    children: list[list[int]] = [[] for _ in range(len(parent) + 1)]
    above = parent.tolist()
    for part in np.argsort(-key, kind="stable").tolist():  # reversed, since the stack pops the last first
        children[above[part]].append(part)
    order, pending = [], children[-1]
    while pending:
        part = pending.pop()
        order.append(part)
        pending += children[part]
    return np.array(order, np.int64)


def _prefills(parent: Int64s, recomputed: Bools, exported: Int64s, limit: int) -> Int64s:
    """Number the prefills: each recomputed part shares the prefill of the one directly above it, or gets a new one."""
    prefill = np.full(len(parent), -1, np.int64)
    filled: list[int] = []
    for part in np.flatnonzero(recomputed).tolist():
        above = int(prefill[parent[part]]) if parent[part] >= 0 else -1
        if above >= 0 and filled[above] + exported[part] <= limit:
            prefill[part] = above
            filled[above] += int(exported[part])
        else:
            prefill[part] = len(filled)
            filled.append(int(exported[part]))
    return prefill

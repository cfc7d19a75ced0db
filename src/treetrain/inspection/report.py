"""The report on the rows of a file, from which the text, the JSON object and the page are made."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from treetrain.data.trajectory import Trajectory
from treetrain.inspection.diagnosis import PrefixReport, diagnose_prefixes
from treetrain.planning.cost import ModelCounts
from treetrain.planning.plan import Plan
from treetrain.tree.build import build_tree
from treetrain.tree.stats import TreeStats, tree_stats
from treetrain.tree.token_tree import TokenTree


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The model that FLOPs are counted for."""

    counts: ModelCounts
    name: str
    assumed: bool
    """Whether it is the default, since none was named."""

    @property
    def words(self) -> str:
        """The name in messages."""
        return f"{self.name} (assumed; --model or --shape names another)" if self.assumed else self.name


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GroupStats:
    """The rows of one group as a tree by themselves."""

    group: str
    stats: TreeStats


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """What the rows of a file share, and why they do not share more."""

    files: tuple[str, ...]
    format: str
    view: str | None
    """"calls" or "transcript"; None for token rows."""
    notes: tuple[str, ...]
    rows: Sequence[Trajectory]
    tokenizer: Any
    """None if the rows are shown as token ids."""
    shape: Shape
    tree: TokenTree
    """All rows as one batch."""
    stats: TreeStats
    """Those of `tree`."""
    groups: tuple[GroupStats, ...]
    """Every group of rows, most flat tokens first."""
    prefixes: PrefixReport | None
    """For the calls view."""
    plan: Plan | None = None
    """The plan of `tree`, if one was asked for."""

    def within_groups(self) -> dict[str, Any] | None:
        """Sums over the groups, each a tree by itself; None without groups."""
        if not self.groups:
            return None
        flat, unique = (sum(getattr(group.stats, name) for group in self.groups) for name in ("flat", "unique"))
        return {
            "count": len(self.groups),
            "trajectories": sum(group.stats.trajectories for group in self.groups),
            "flat": flat,
            "unique": unique,
            "overlap": 1 - unique / flat if flat else 0.0,
            "token_speedup": flat / unique if unique else 1.0,
        }

    def as_dict(self, groups: int | None = None) -> dict[str, Any]:
        """Plain JSON data.

        Args:
            groups: how many of the largest groups to list; None lists all.
        """
        summary = self.within_groups()
        if summary is not None:
            listed = self.groups[:groups]
            summary["largest"] = [{"group": one.group, **dataclasses.asdict(one.stats)} for one in listed]
        prefixes = self.prefixes
        return {
            "files": list(self.files),
            "format": self.format,
            "view": self.view,
            "shape": {"name": self.shape.name, "assumed": self.shape.assumed},
            "file": dataclasses.asdict(self.stats),
            "groups": summary,
            "prefixes": prefixes
            and {name: getattr(prefixes, name) for name in ("calls", "successive", "broken")}
            | {"explanation": prefixes.explain()},
            "notes": list(self.notes),
            "plan": None if self.plan is None else self.plan.explanation(),
        }


def inspect_rows(
    rows: Sequence[Trajectory],
    shape: Shape,
    *,
    files: Sequence[str] = (),
    format: str = "tokens",
    view: str | None = None,
    notes: Sequence[str] = (),
    tokenizer: Any = None,
) -> Inspection:
    """Measure what rows share.

    Args:
        rows: the rows; in the calls view each conversation's calls in order.
        shape: the model that FLOPs are counted for.
        files: where the rows come from.
        format: the format of the files.
        view: "calls" or "transcript"; None for token rows.
        notes: remarks on the rows.
        tokenizer: anything with `decode`; examples then show text instead of ids.
    """
    tree = build_tree(rows)
    members: dict[Any, list[Trajectory]] = {}
    for row in rows:
        if row.group is not None:
            members.setdefault(row.group, []).append(row)
    groups = [
        GroupStats(group=str(name), stats=tree_stats(build_tree(own), shape.counts)) for name, own in members.items()
    ]
    return Inspection(
        files=tuple(files),
        format=format,
        view=view,
        notes=tuple(notes),
        rows=rows,
        tokenizer=tokenizer,
        shape=shape,
        tree=tree,
        stats=tree_stats(tree, shape.counts),
        groups=tuple(sorted(groups, key=lambda one: -one.stats.flat)),
        prefixes=diagnose_prefixes(rows, tokenizer) if view == "calls" else None,
    )

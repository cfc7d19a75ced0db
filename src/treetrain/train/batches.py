"""What a step is made of: whole groups (else whole trees), so that rows which share a prefix meet in one step.

A *unit* is what shuffling never tears apart. Rows of one `group` are a unit; rows without a group are one if they are
of one tree, and a tree that is larger than a step is cut at its forks. Rows of one `pair` are always of one unit.
Nothing here knows how a step is executed, so tree and linear runs of one seed see the same steps.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treetrain.data.trajectory import Trajectory
from treetrain.errors import DataError
from treetrain.tree.build import build_tree
from treetrain.tree.stats import trajectories_through
from treetrain.tree.token_tree import TokenTree

Int64s = NDArray[np.int64]
WORTH_KEEPING = 0.1  # a cut keeps subtrees whole that save this share of their own tokens


@dataclass(frozen=True, slots=True, eq=False)
class BatchPlan:
    """Which rows every step of a run holds; the same for every execution, found again from the seed alone."""

    units: list[Int64s]
    """Row numbers of every unit."""
    unit_tokens: Int64s
    """Flat tokens of every unit."""
    tokens_per_step: int
    """Flat tokens a step is filled up to."""
    seed: int

    def epoch(self, number: int, *, shuffle: bool = True) -> list[Int64s]:
        """Row numbers of every step of one pass over the data (from 0). Every row is in exactly one step."""
        order = np.arange(len(self.units))
        if shuffle:
            order = np.random.default_rng([self.seed, number]).permutation(order)
        steps: list[list[int]] = []
        filled = 0
        for unit in order.tolist():
            size = int(self.unit_tokens[unit])
            if not steps or (filled and filled + size > self.tokens_per_step):
                steps.append([])
                filled = 0
            steps[-1].append(unit)
            filled += size
        # Rows in the order of the file: the order within a step must not depend on the shuffle.
        return [np.sort(np.concatenate([self.units[unit] for unit in step])) for step in steps]

    def unit_of_rows(self) -> Int64s:
        """The unit of every row."""
        found = np.zeros(sum(map(len, self.units)), np.int64)
        for number, unit in enumerate(self.units):
            found[unit] = number
        return found

    def steps_per_epoch(self, number: int = 0) -> int:
        """Steps of one pass; passes may differ by a few, since units fill steps in another order."""
        return len(self.epoch(number))

    def total_steps(self, epochs: int) -> int:
        """Steps of so many passes."""
        return sum(self.steps_per_epoch(number) for number in range(epochs))

    def steps(self, total: int, *, skip: int = 0) -> Iterator[tuple[int, Int64s]]:
        """(epoch, row numbers) of the first `total` steps, passing over the data as often as that takes.

        Args:
            skip: so many of them are left out at the beginning: they were taken before.
        """
        epoch = given = 0
        while given < total:
            for rows in self.epoch(epoch)[: total - given]:
                given += 1
                if given > skip:
                    yield epoch, rows
            epoch += 1


def plan_batches(trajectories: Sequence[Trajectory], *, tokens_per_step: int, seed: int = 0) -> BatchPlan:
    """Group rows into units and plan the steps.

    Args:
        trajectories: all rows of the run.
        tokens_per_step: flat tokens a step is filled up to; a larger unit becomes a step of its own.
        seed: of the shuffle.

    Raises:
        DataError: no row has anything to train.
    """
    units = make_units(trajectories, tokens_per_step=tokens_per_step)
    units = _join_untrained(units, trajectories)
    sizes = np.array([len(row) for row in trajectories], np.int64)
    tokens = np.array([sizes[unit].sum() for unit in units], np.int64)
    return BatchPlan(units, tokens, tokens_per_step, seed)


def make_units(trajectories: Sequence[Trajectory], *, tokens_per_step: int | None = None) -> list[Int64s]:
    """Row numbers of every unit, in the order of each unit's first row.

    Args:
        trajectories: the rows.
        tokens_per_step: trees of rows without a group are cut down to this many flat tokens; None: never.
    """
    groups: dict[Hashable, list[int]] = {}
    loose: list[int] = []
    for number, row in enumerate(trajectories):
        if row.group is None:
            loose.append(number)
        else:
            groups.setdefault(row.group, []).append(number)
    units = [np.array(numbers, np.int64) for numbers in groups.values()]
    if loose:
        units += _tree_units(trajectories, np.array(loose, np.int64), tokens_per_step)
    units = [np.sort(unit) for unit in _joined(units, [row.pair for row in trajectories])]
    return sorted(units, key=lambda unit: int(unit[0]))


def sample_units(trajectories: Sequence[Trajectory], count: int) -> tuple[list[Trajectory], bool]:
    """The first rows of a file, whole units of them, up to `count` rows.

    Returns:
        The rows, and whether a unit had to be cut because the first alone has more rows than that. Pairs stay
        whole even then: where the first rows are of one, there may be more than `count`.
    """
    chosen: list[Int64s] = []
    taken = 0
    for unit in make_units(trajectories):
        if taken + len(unit) <= count:
            chosen.append(unit)
            taken += len(unit)
        elif not chosen:
            return [trajectories[number] for number in _first_pairs(trajectories, unit, count).tolist()], True
    return [trajectories[number] for number in np.sort(np.concatenate(chosen)).tolist()], False


def _first_pairs(trajectories: Sequence[Trajectory], unit: Int64s, count: int) -> Int64s:
    """The first rows of a unit, whole pairs of them, up to `count` rows but at least one row or pair."""
    rows = [trajectories[number].pair for number in unit.tolist()]
    pieces = _joined([np.array([place]) for place in range(len(unit))], rows)
    taken = [pieces[0]]
    for piece in pieces[1:]:
        if sum(map(len, taken)) + len(piece) <= count:
            taken.append(piece)
    return np.sort(unit[np.concatenate(taken)])


def split_units(
    trajectories: Sequence[Trajectory], fraction: float, *, seed: int, tokens_per_step: int | None = None
) -> tuple[list[Trajectory], list[Trajectory]]:
    """(kept, held out): at least one unit each, whole units, drawn by the seed.

    Raises:
        DataError: there is only one unit, so nothing can be held out without tearing it apart.
    """
    if fraction == 0:
        return list(trajectories), []
    units = make_units(trajectories, tokens_per_step=tokens_per_step)
    if len(units) < 2:
        raise DataError(
            f"eval_fraction is {fraction}, but the {len(trajectories)} rows are one group or tree, which is never torn "
            "apart; give eval_data, a file of its own"
        )
    count = min(max(round(fraction * len(units)), 1), len(units) - 1)
    drawn = np.random.default_rng([seed, len(units)]).permutation(len(units))[:count]
    held = np.zeros(len(trajectories), bool)
    held[np.concatenate([units[unit] for unit in drawn.tolist()])] = True
    rows = list(zip(trajectories, held.tolist(), strict=True))
    return [row for row, out in rows if not out], [row for row, out in rows if out]


def _tree_units(trajectories: Sequence[Trajectory], loose: Int64s, target: int | None) -> list[Int64s]:
    """Units of rows that have no group."""
    rows = [trajectories[number] for number in loose.tolist()]
    tree = build_tree(rows)
    pieces = _cut(tree, target)
    empty = np.flatnonzero(tree.trajectory_last < 0)
    pieces += [empty] if len(empty) else []
    # Calls of one conversation belong together, though their prompts may differ early.
    return [np.sort(loose[piece]) for piece in _joined(pieces, [row.episode for row in rows])]


def _cut(tree: TokenTree, target: int | None) -> list[Int64s]:
    """Whole trees; those with more than `target` flat tokens cut at forks where little sharing is lost.

    Most chat files are one tree, since every row begins with the same template. Cut into subtrees that fit a step
    and save a share of their own tokens worth keeping; what lies above is shared again by whatever meets in a step.
    """
    last_order = np.argsort(tree.trajectory_last, kind="stable")
    last = tree.trajectory_last[last_order]
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(trajectories_through(tree))])
    children = _children(tree)
    units: list[Int64s] = []
    stack = np.flatnonzero(tree.segment_parent < 0)[::-1].tolist()
    roots = set(stack)
    while stack:
        segment = stack.pop()
        start = int(tree.segment_start[segment])
        end = int(tree.end[start])
        low, high = np.searchsorted(last, (start, end))
        below = int(before[end] - before[start])
        flat = below + int(tree.depth[start]) * int(high - low)
        fits = target is None or flat <= target
        worth = segment in roots or below - (end - start) >= WORTH_KEEPING * below
        if (fits and worth) or high - low == 1 or not len(children[segment]):
            units.append(last_order[low:high])
            continue
        stop = int(np.searchsorted(last, tree.segment_start[segment + 1]))
        if stop > low:  # rows that end above the fork
            units.append(last_order[low:stop])
        stack += children[segment][::-1].tolist()
    return units


def _children(tree: TokenTree) -> list[Int64s]:
    """Child segments of every segment, in order."""
    inner = np.flatnonzero(tree.segment_parent >= 0)
    order = inner[np.argsort(tree.segment_parent[inner], kind="stable")]
    counts = np.bincount(tree.segment_parent[inner], minlength=tree.num_segments)
    return np.split(order, np.cumsum(counts)[:-1]) if tree.num_segments else []


def _joined(pieces: list[Int64s], labels: Sequence[Hashable]) -> list[Int64s]:
    """Pieces that hold rows of one label become one.

    Args:
        pieces: numbers of rows.
        labels: of all rows; None joins nothing.
    """
    joined: dict[int, int] = {}  # piece -> the piece it went into

    def find(piece: int) -> int:
        while piece in joined:
            piece = joined[piece]
        return piece

    first: dict[Hashable, int] = {}
    for number, piece in enumerate(pieces):
        for row in piece.tolist():
            if labels[row] is not None:
                one, other = find(first.setdefault(labels[row], number)), find(number)
                if one != other:
                    joined[max(one, other)] = min(one, other)
    members: dict[int, list[Int64s]] = {}
    for number, piece in enumerate(pieces):
        members.setdefault(find(number), []).append(piece)
    return [np.concatenate(parts) for parts in members.values()]


def _join_untrained(units: list[Int64s], trajectories: Sequence[Trajectory]) -> list[Int64s]:
    """Rows without anything to train go with the first unit that has something: no step may be without."""
    trained = [any(trajectories[number].weights.any() for number in unit.tolist()) for unit in units]
    if not any(trained):
        raise DataError(
            f"nothing to train: no token of the {len(trajectories)} rows has a loss weight; "
            "conversations need assistant messages, token rows labels or a loss_mask that is not all 0"
        )
    idle = [unit for unit, has in zip(units, trained) if not has]
    busy = [unit for unit, has in zip(units, trained) if has]
    return [np.sort(np.concatenate([busy[0], *idle])), *busy[1:]]

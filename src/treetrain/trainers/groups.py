"""Groups of rows that belong together: how they are found, and a sampler that keeps them in one step.

Rows of one `group` stay together. Rows without a group stay together if they are of one tree, and a tree that is larger
than a step is cut at its forks. Rows of one `pair` are always in one group. Trees here compare token ids and keys only:
recorded experts limit what rows can share, but do not say which rows belong together.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterator, Sequence, Sized
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from treetrain.data.columns import codes_of, columns_of
from treetrain.data.prefix_order import prefix_order, sorted_by_prefix
from treetrain.data.trajectory import Trajectory
from treetrain.errors import DataError

if TYPE_CHECKING:
    from transformers import Trainer

Int64s = NDArray[np.int64]
TrainerT = TypeVar("TrainerT", bound="Trainer")
Key = str | Callable[[Any], Hashable | Sequence[int]]
WORTH_KEEPING = 0.1
"""Rows stay together if that saves this share of their tokens, apart from the prefix that neighbours share too."""


def make_groups(trajectories: Sequence[Trajectory], *, tokens_per_step: int | None = None) -> list[Int64s]:
    """Row numbers of every group, ascending, in the order of the groups' first rows.

    Args:
        trajectories: the rows, in memory or not.
        tokens_per_step: trees of rows without a group are cut down to this many flat tokens; None: never.
    """
    columns = columns_of(trajectories)
    labels = columns.group.copy()
    loose = np.flatnonzero(labels < 0)
    if len(loose):
        order, own = prefix_order(trajectories), np.zeros(len(labels), np.int64)  # rows without tokens stay at 0
        length = columns.tokens[order.rows]
        for number, (low, high) in enumerate(cut_trees(order.shared, length, length, tokens_per_step), start=1):
            own[order.rows[low:high]] = number
        # Calls of one conversation belong together, though their prompts may differ early.
        labels[loose] = _joined(own[loose], columns.episode[loose]) + labels.max() + 1
    return _by_label(_joined(labels, columns.pair))


def group_rows(values: Sequence[Any], most: int) -> list[Int64s]:
    """Row numbers of every group.

    Args:
        values: one for each row: token ids, or anything hashable.
        most: rows of an optimizer step; a tree of more rows is cut at its forks.
    """
    if len(values) == 0:
        raise DataError("the data set has no rows")
    if np.ndim(values[0]) != 1 or not np.issubdtype(np.asarray(values[0]).dtype, np.integer):
        return _by_label(codes_of(values))
    ids = [np.asarray(value) for value in values]
    order, shared = np.array(list(sorted_by_prefix(list(range(len(ids))), ids.__getitem__)), np.int64).T
    length = np.array([len(ids[number]) for number in order], np.int64)
    return [order[low:high] for low, high in cut_trees(shared, length, np.ones_like(length), most)]


def _by_label(labels: Int64s) -> list[Int64s]:
    """The rows of every label, in the order of their first rows."""
    rows = np.argsort(labels, kind="stable")
    groups = np.split(rows, np.flatnonzero(np.diff(labels[rows])) + 1) if len(rows) else []
    return sorted(groups, key=lambda group: group[0])


def _joined(labels: Int64s, codes: Int64s) -> Int64s:
    """Merge the labels of rows that have the same code; code -1 merges nothing. Labels count from 0."""
    coded = codes >= 0
    while True:
        least = np.full(codes.max(initial=-1) + 1, np.iinfo(np.int64).max)
        np.minimum.at(least, codes[coded], labels[coded])
        into = np.arange(labels.max(initial=-1) + 1)
        np.minimum.at(into, labels[coded], least[codes[coded]])
        if (into[labels] == labels).all():
            return labels
        labels = into[labels]


def cut_trees(shared: Int64s, length: Int64s, size: Int64s, limit: int | None) -> Iterator[tuple[int, int]]:
    """Ranges of sorted rows that stay together: whole trees that fit the limit, and pieces of larger ones.

    Most chat files are one tree, since every row begins with the same template. Every batch shares that prefix, so it
    is no reason to keep rows together: a range counts only the tokens that it saves below `above`, the depth to which
    it agrees with the rows around it. A range is kept if it fits and saves `WORTH_KEEPING` of its tokens below that
    depth; otherwise it is split where its rows first diverge:

        a b c d        The fork is at depth 3; its children are d, e and f.
        a b c e        They are joined up to the limit if a b c alone is worth keeping,
        a b c f        else split further with above = 3. A single row is always kept.

    Args:
        shared: int64 [R]: leading tokens that each row shares with the one before it; 0 for the first.
        length: int64 [R]: tokens of each row.
        size: int64 [R]: how much of the limit each row takes, such as its tokens, or 1.
        limit: the largest size of a range of several rows; None leaves trees whole.
    """
    total = np.append(0, np.cumsum(size))
    limit = int(total[-1]) if limit is None else limit
    trees = [*np.flatnonzero(shared == 0).tolist(), len(shared)]
    for first, behind in pairwise(trees):
        pending = [(first, behind, 0)]
        if total[behind] - total[first] <= limit:
            yield pending.pop()[:2]
        elif len(trees) == 2 and behind - first > 1:  # all rows are of this tree
            pending = [(first, behind, int(shared[1:].min()))]
        while pending:
            low, high, above = pending.pop()
            rows, inner = high - low, shared[low + 1 : high]
            if rows == 1:
                yield low, high
                continue
            fork, tokens = int(inner.min()), int(length[low:high].sum()) - above * rows
            saved = int(inner.sum()) - above * (rows - 1)
            if total[high] - total[low] <= limit and saved >= WORTH_KEEPING * tokens:
                yield low, high
                continue
            borders = [low, *(low + 1 + np.flatnonzero(inner == fork)).tolist(), high]
            joins = (fork - above) * (rows - 1) >= WORTH_KEEPING * tokens
            start = low
            for begin, end in pairwise(borders):
                large = total[end] - total[begin] > limit
                if joins and start < begin and (large or total[end] - total[start] > limit):
                    yield start, begin
                    start = begin
                if large or not joins:
                    pending.append((begin, end, fork))
                    start = end
            if start < high:
                yield start, high


def sample_groups(trajectories: Sequence[Trajectory], count: int) -> tuple[list[Trajectory], bool]:
    """Whole groups (else whole trees) from the start of a file, up to `count` rows. Those that do not fit are skipped.

    Returns:
        the rows, and whether the first group was cut because it alone has more than `count` rows.
    """
    groups = make_groups(trajectories)
    cut = bool(groups) and len(groups[0]) > count
    chosen: list[int] = groups[0][:count].tolist() if cut else []
    for group in groups:
        if len(chosen) + len(group) <= count:
            chosen += group.tolist()
    return [trajectories[number] for number in sorted(chosen)], cut


def hold_out(
    trajectories: Sequence[Trajectory], fraction: float, *, seed: int
) -> tuple[list[Trajectory], list[Trajectory]]:
    """Split rows into kept and held out: whole groups (else whole trees), drawn with the seed, at least one each.

    Raises:
        DataError: there is only one group, so nothing can be held out without splitting it.
    """
    groups = make_groups(trajectories)
    if len(groups) < 2:
        raise DataError(
            f"eval_fraction is {fraction}, but the {len(trajectories)} rows are one group or tree, which is never torn "
            "apart; give eval_data, files of their own"
        )
    count = min(max(round(fraction * len(groups)), 1), len(groups) - 1)
    drawn = np.random.default_rng([seed, len(groups)]).permutation(len(groups))[:count]
    held = {number for group in drawn.tolist() for number in groups[group].tolist()}
    kept = [row for number, row in enumerate(trajectories) if number not in held]
    return kept, [trajectories[number] for number in sorted(held)]


class PrefixGroupSampler(Sampler[int]):
    """Orders a data set so that rows which share a prefix meet in one optimizer step on one process.

    A prefix is computed once for the rows of one optimizer step on one process. A random order spreads the rows of a
    prompt over many steps, and nothing is shared. This sampler draws whole groups instead: a group stays within one
    step of one process wherever it fits, and groups are reshuffled in every epoch.

    `batch_size * accumulation` should be a multiple of the group size, and large enough for one group. If
    `share_prefixes` scores the micro-batches of a step together, only their product matters; otherwise a group should
    fit one micro-batch. The engine's budget bounds memory, these sizes do not.

    The order depends only on the seed and the epoch, so training resumes in the same place. Every process draws the
    same order, and accelerate gives batch i to process i modulo `processes`; the sampler orders the rows accordingly.

    Args:
        dataset: rows; a `datasets.Dataset`, or any sequence of mappings.
        batch_size: rows of a micro-batch on one process, `per_device_train_batch_size`.
        key: a column, or a function of a row. Token ids (a list of integers) group rows by their longest common
            prefixes; anything else groups rows of equal value, such as the name of a task.
        accumulation: micro-batches of an optimizer step, `gradient_accumulation_steps`.
        processes: how many processes share a step.
        seed: the seed of the order.

    Raises:
        DataError: the data set has no such column, or no rows.
    """

    def __init__(
        self,
        dataset: Sized,
        batch_size: int,
        *,
        key: Key = "input_ids",
        accumulation: int = 1,
        processes: int = 1,
        seed: int = 0,
    ) -> None:
        self.batch_size, self.accumulation, self.processes = batch_size, accumulation, processes
        self.seed, self.epoch = seed, 0
        self.groups = group_rows(_values(dataset, key), batch_size * accumulation)
        self._count = len(dataset)

    def set_epoch(self, epoch: int) -> None:
        """Use the order of this epoch, counted from 0."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        draws = np.random.default_rng([self.seed, self.epoch])
        blocks = self._blocks(draws)
        for first in range(0, len(blocks), self.processes):
            yield from self._across_processes(np.concatenate(blocks[first : first + self.processes]))

    def _blocks(self, draws: np.random.Generator) -> list[Int64s]:
        """One array of rows for each optimizer step on each process; all but the last are full."""
        size = self.batch_size * self.accumulation
        open_blocks: list[tuple[int, list[Int64s]]] = []  # (free places, groups so far), ascending by the places
        full: list[list[Int64s]] = []
        for number in draws.permutation(len(self.groups)).tolist():
            rows = self.groups[number]
            if len(rows) > size:
                rows = np.roll(rows, draws.integers(len(rows)))  # cut elsewhere in every epoch
            for piece in np.split(rows, range(size, len(rows), size)):
                # The block that the piece fills best, so that few groups are cut in the end.
                place = bisect_left(open_blocks, len(piece), key=lambda block: block[0])
                free, block = open_blocks.pop(place) if place < len(open_blocks) else (size, [])
                block.append(piece)
                if free == len(piece):
                    full.append(block)
                else:
                    insort(open_blocks, (free - len(piece), block), key=lambda block: block[0])
        blocks = [np.concatenate(block) for block in full]
        if open_blocks:
            rest = np.concatenate([piece for _, block in open_blocks for piece in block])
            blocks += np.split(rest, range(size, len(rest), size))
        last = [blocks.pop()] if len(blocks[-1]) < size else []
        return [blocks[number] for number in draws.permutation(len(blocks)).tolist()] + last

    def _across_processes(self, rows: Int64s) -> list[int]:
        """Reorder a step's rows from process after process to the order in which accelerate deals micro-batches."""
        batches = -(-len(rows) // self.batch_size)
        # Micro-batch i goes to process i % processes, so a process has every processes-th of them.
        owner_first = sorted(range(batches), key=lambda batch: (batch % self.processes, batch))
        sizes = np.full(batches, self.batch_size)
        sizes[-1] = len(rows) - self.batch_size * (batches - 1)
        dealt = dict(zip(owner_first, np.split(rows, np.cumsum(sizes[owner_first])[:-1]), strict=True))
        return np.concatenate([dealt[batch] for batch in range(batches)]).tolist()


def _values(dataset: Any, key: Key) -> Sequence[Any]:
    """The key of every row."""
    if callable(key):
        return [key(dataset[number]) for number in range(len(dataset))]
    columns = getattr(dataset, "column_names", None)
    names = columns or (list(dataset[0]) if len(dataset) else [key])
    if key not in names:
        raise DataError(
            f"the data set has no column {key!r}, only {', '.join(map(repr, names))}; "
            "name the one that says what belongs together with key="
        )
    return dataset[key][:] if columns else [dataset[number][key] for number in range(len(dataset))]


def group_batches(trainer: "TrainerT", key: Key = "input_ids") -> "TrainerT":
    """Bring rows that share a prefix together in a trainer's batches; returns the trainer.

    The rows of an optimizer step change, so losses differ from those of the trainer's own random order. Trainers that
    generate (GRPO, RLOO) draw whole groups themselves and need no sampler.

    Args:
        trainer: a constructed `transformers.Trainer`, or one of TRL's on top of it.
        key: a column of its training data, or a function of a row; see `PrefixGroupSampler`.

    Raises:
        DataError: the training data has no length, no such column or no rows, or the trainer generates.
    """
    dataset, args = trainer.train_dataset, trainer.args
    if hasattr(trainer, "num_generations"):
        raise DataError(
            f"{type(trainer).__name__} draws whole groups of completions itself, which another order would tear apart; "
            "leave group_batches out"
        )
    if not isinstance(dataset, Sized):
        raise DataError("the training data is a stream without a length, so that its rows cannot be grouped; load it")
    sampler = PrefixGroupSampler(
        dataset,
        args.train_batch_size // (args.world_size if trainer.accelerator.split_batches else 1),
        key=key,
        accumulation=args.gradient_accumulation_steps,
        processes=args.world_size,
        seed=args.seed if args.data_seed is None else args.data_seed,
    )
    # Trainer has no public way to set a sampler. `train_dataset` is unused: it lacks columns that the model ignores.
    trainer._get_train_sampler = lambda train_dataset=None: sampler
    return trainer

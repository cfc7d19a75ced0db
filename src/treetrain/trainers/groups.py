"""Samplers that keep the rows of a group (`data.groups`) in one step."""

import dataclasses
from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterator, Sequence, Sized
from operator import itemgetter
from typing import Any, NotRequired, TypedDict

import numpy as np
from jaxtyping import Bool
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from treetrain.core.errors import DataError
from treetrain.core.tree.token_tree import TokenTree, as_tree
from treetrain.layers.trajectory import Trajectory
from treetrain.logs.columns import Int64s, RowColumns
from treetrain.logs.groups import RowNumbers, batches_of_pass, cut_evenly, group_rows, make_groups
from treetrain.models.costs import cost_if_countable
from treetrain.models.work import linear_work, tree_work
from treetrain.parallel.balance import dispatch
from treetrain.trainers.arguments import TreeArguments

Key = str | Callable[[Any], Hashable | Sequence[int]]


def sample_groups(trajectories: Sequence[Trajectory], count: int) -> tuple[list[Trajectory], bool]:
    """Whole groups (or trees) from the start of a file, up to `count` rows. Groups that do not fit are skipped.

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


class PrefixGroupSampler(Sampler[int]):
    """Orders a data set so that rows which share a prefix are in one optimizer step on one process.

    Only rows in the same optimizer step on the same process share the computation of a prefix. A random order spreads
    the rows of a prompt over many steps, so nothing is shared. This sampler draws whole groups instead: a group stays
    within one step of one process if it fits, and groups are reshuffled in every epoch.

    `batch_size * accumulation` should be a multiple of the group size, and large enough for one group. If
    `share_prefixes` scores the micro-batches of a step together, only their product matters; otherwise a group should
    fit one micro-batch. The engine's budget bounds memory; these sizes do not.

    The order depends only on the seed and the epoch, so training resumes in the same place. Every process draws the
    same order, and accelerate gives batch i to process i modulo `processes`; the sampler orders the rows accordingly.

    Args:
        dataset: rows; a `datasets.Dataset`, or any sequence of mappings.
        batch_size: rows of a micro-batch on one process, `per_device_train_batch_size`.
        key: a column, or a function of a row. Token ids (a list of integers) group rows by their longest common
            prefixes; anything else groups rows of equal value, such as the name of a task. A row whose value is None,
            or without tokens, is a group by itself.
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
        for name, value in (("batch_size", batch_size), ("accumulation", accumulation), ("processes", processes)):
            if not value >= 1:
                raise ValueError(f"{name} is {value}; give a whole number from 1")
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
        blocks = self.blocks(draws)
        for first in range(0, len(blocks), self.processes):
            yield from self._across_processes(np.concatenate(blocks[first : first + self.processes]))

    def blocks(self, draws: np.random.Generator) -> list[RowNumbers]:
        """One array of rows for each optimizer step on each process; all but the last are full."""
        size = self.batch_size * self.accumulation
        open_blocks: list[tuple[int, list[RowNumbers]]] = []  # (free places, groups so far), ascending by the places
        full: list[list[RowNumbers]] = []
        for number in draws.permutation(len(self.groups)).tolist():
            rows = self.groups[number]
            for piece in np.split(rows, range(size, len(rows), size)):
                # Choose the block that the piece fills best, so that few groups are cut at the end.
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

    def _across_processes(self, rows: RowNumbers) -> list[int]:
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


# ---- Steps of a TreeTrainer


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Call:
    """The rows of one forward and backward, and the place of their step in the run."""

    batch: int
    """Number of the batch in the whole run, from 0."""
    batch_rows: RowNumbers
    """Row numbers of the batch, ascending."""
    rows: RowNumbers
    """Row numbers of this call, ascending; empty if the step has fewer groups than calls."""


class StepSampler(Sampler[list[Call]]):
    """The calls of one pass over the data. They depend on the seed, not on `execution`.

    A *batch* is filled with whole groups to about `tokens_per_step` flat tokens. It is used `updates_per_batch` times,
    each time in `minibatches` optimiser steps. A step runs `calls` times forward and backward. Every pass over the data
    has the same number of steps, as `transformers.Trainer` expects: the groups are shuffled by the seed and cut into
    batches of about equal size.

    Args:
        rows: all rows, in memory or not; only their columns are read.
        seed: the seed of the shuffle; None keeps the order of the rows.

    Raises:
        DataError: no row has anything to train.
        ValueError: fewer groups than minibatches.
    """

    def __init__(
        self,
        rows: Sequence[Trajectory],
        *,
        tokens_per_step: int,
        updates_per_batch: int = 1,
        minibatches: int = 1,
        calls: int = 1,
        seed: int | None = None,
    ) -> None:
        columns = RowColumns(rows)
        self.groups = _with_something_to_train(make_groups(rows, tokens_per_step=tokens_per_step), columns.trained)
        self.tokens = np.array([columns.tokens[group].sum() for group in self.groups])
        """Flat tokens of every group."""
        self._updates, self._minibatches, self._calls, self._seed = updates_per_batch, minibatches, calls, seed
        self._epoch = 0
        if minibatches > len(self.groups):
            raise ValueError(
                f"minibatches is {minibatches}, but the rows are {len(self.groups)} groups (or trees), which are never "
                "torn apart; lower minibatches"
            )
        self.batches = batches_of_pass(self.tokens, tokens_per_step, minibatches)
        self.steps = self.batches * updates_per_batch * minibatches

    def __len__(self) -> int:
        """Calls of one pass over the data."""
        return self.steps * self._calls

    def set_epoch(self, epoch: int) -> None:
        """Set the pass over the data, from 0, for the next iterator."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[list[Call]]:
        epoch = self._epoch
        batches = self._cut(self._shuffled(np.arange(len(self.groups)), epoch), self.batches, self._minibatches)
        for number, groups in enumerate(batches, start=epoch * self.batches):
            rows = self._rows(groups)
            for update in range(1, self._updates + 1):
                # The seed has one word more than that of a pass's shuffle, so that the two are independent.
                order = groups if self._minibatches == 1 else self._shuffled(np.sort(groups), 1, number, update)
                for members in self._cut(order, self._minibatches):
                    calls = self._cut(np.sort(members), min(self._calls, len(members)))
                    # The last call of a step must have rows: it reduces gradients over the ranks.
                    for call in [members[:0]] * (self._calls - len(calls)) + calls:
                        own = self._rows(call)
                        yield [Call(batch=number, batch_rows=rows, rows=own)]

    def _rows(self, groups: RowNumbers) -> RowNumbers:
        return np.sort(np.concatenate([np.zeros(0, np.int64), *(self.groups[group] for group in groups.tolist())]))

    def _shuffled(self, groups: RowNumbers, *words: int) -> RowNumbers:
        return groups if self._seed is None else np.random.default_rng([self._seed, *words]).permutation(groups)

    def _cut(self, groups: RowNumbers, count: int, at_least: int = 1) -> list[RowNumbers]:
        return cut_evenly(groups, self.tokens[groups], count, at_least)


def _with_something_to_train(groups: list[RowNumbers], trained: Bool[np.ndarray, " rows"]) -> list[RowNumbers]:
    """Merge groups with nothing to train into the first that has something, since every step must train."""
    busy = [group for group in groups if trained[group].any()]
    if not busy:
        raise DataError(
            f"nothing to train: no token of the {len(trained)} rows has a loss weight; "
            "conversations need assistant messages, token rows labels or a loss_mask that is not all 0"
        )
    idle = [group for group in groups if not trained[group].any()]
    return [np.sort(np.concatenate([busy[0], *idle])), *busy[1:]]


class CallInputs(TypedDict):
    """The inputs of `TreeTrainer.training_step`."""

    call: Call
    rows: list[Trajectory]
    """All rows of the call, over all ranks."""
    tree: TokenTree
    """The tree of those that this rank computes."""
    own: Int64s
    """Their places among the rows."""
    unique_tokens: int
    """Tokens of the tree of all rows."""
    tree_flops: NotRequired[float]
    linear_flops: NotRequired[float]
    left_out: NotRequired[bool]
    """Whether the batch was stopped before this call."""


class StepDataset(Dataset[CallInputs]):
    """Gives the rows of a call and the tree of those that this rank computes.

    Args:
        rows: all rows.
        model: gives costs to balance rows over the ranks, and FLOPs if its shape is known.
        args: the run's arguments.
    """

    def __init__(self, rows: Sequence[Trajectory], model: nn.Module, args: TreeArguments) -> None:
        self.rows, self._merge, self._cost = rows, args.execution == "tree", cost_if_countable(model)
        self._rank, self._ranks = args.process_index, args.world_size

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, call: Call) -> CallInputs:
        """The inputs of `TreeTrainer.training_step`."""
        rows = [self.rows[number] for number in call.rows.tolist()]
        tree = own = as_tree(rows, merge=self._merge)
        numbers = np.arange(len(rows))
        if self._ranks > 1 and rows:
            numbers = dispatch(tree, self._cost, self._ranks)[self._rank]
            own = as_tree([rows[number] for number in numbers.tolist()], merge=self._merge)
        inputs: CallInputs = {"call": call, "rows": rows, "tree": own, "own": numbers, "unique_tokens": tree.num_tokens}
        if self._cost is not None:
            counts = self._cost.counts
            ranges = counts.attention_ranges
            inputs["tree_flops"] = counts.flops(*tree_work(tree, ranges)) if rows else 0.0
            inputs["linear_flops"] = counts.flops(*linear_work(tree, ranges)) if rows else 0.0
        return inputs


def step_loader(
    rows: Sequence[Trajectory], sampler: StepSampler, model: nn.Module, args: TreeArguments, **options: Any
) -> DataLoader:
    """A `DataLoader` of the calls of a pass over the rows, each with its tree."""
    loader = DataLoader(StepDataset(rows, model, args), batch_sampler=sampler, collate_fn=itemgetter(0), **options)
    loader.set_epoch = sampler.set_epoch  # type: ignore[attr-defined]  # Trainer calls it
    return loader

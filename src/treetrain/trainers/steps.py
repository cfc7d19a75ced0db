"""The rows of every optimiser step, and their trees, built while the device works on the step before.

A *batch* is filled with whole groups, pairs and episodes (else whole trees) to about `tokens_per_step` flat tokens. It
is passed over `updates_per_batch` times, each time in `minibatches` parts, each an optimiser step; a step is run in
`calls` of forward and backward. Every pass over the data has the same number of steps, as `transformers.Trainer`
expects: the groups are shuffled by the seed and cut into batches of about equal size.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, Sampler

from treetrain.data.columns import columns_of
from treetrain.data.trajectory import Trajectory
from treetrain.engine.costs import cost_if_countable
from treetrain.errors import DataError
from treetrain.planning.balance import dispatch
from treetrain.trainers.arguments import TreeArguments
from treetrain.trainers.groups import Int64s, make_groups
from treetrain.tree.build import as_tree
from treetrain.tree.stats import linear_work, tree_work


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Call:
    """The rows of one forward and backward, and the place of their step in the run."""

    batch: int
    """Number of the batch in the whole run, from 0."""
    update: int
    """Pass over the batch, from 1."""
    minibatch: int
    """Part of that pass, from 1."""
    batch_rows: Int64s
    """Row numbers of the batch, ascending."""
    rows: Int64s
    """Row numbers of this call, ascending; empty if the step has fewer groups than calls."""


class StepSampler(Sampler[list[Call]]):
    """The calls of one pass over the data. They depend on the seed, not on `execution`.

    Args:
        rows: all rows, in memory or not; only their columns are read.
        tokens_per_step: flat tokens of a batch, about.
        updates_per_batch, minibatches: see the module.
        calls: number of calls per step.
        seed: of the shuffle; None keeps the order of the rows.

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
        columns = columns_of(rows)
        self.groups = _with_something_to_train(make_groups(rows, tokens_per_step=tokens_per_step), columns.trained)
        self._tokens = np.array([columns.tokens[group].sum() for group in self.groups])
        self._updates, self._minibatches, self._calls, self._seed = updates_per_batch, minibatches, calls, seed
        self._epoch = 0
        if minibatches > len(self.groups):
            raise ValueError(
                f"minibatches is {minibatches}, but the rows are {len(self.groups)} groups (or trees), which are never "
                "torn apart; lower minibatches"
            )
        wanted = -(-int(self._tokens.sum()) // tokens_per_step)
        self.batches = min(wanted, len(self.groups) // minibatches)
        self.steps = self.batches * updates_per_batch * minibatches

    def __len__(self) -> int:
        """Calls of one pass over the data."""
        return self.steps * self._calls

    def set_epoch(self, epoch: int) -> None:
        """Set the pass, from 0, that the next iterator goes through."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[list[Call]]:
        epoch = self._epoch
        batches = self._cut(self._shuffled(np.arange(len(self.groups)), epoch), self.batches, self._minibatches)
        for number, groups in enumerate(batches, start=epoch * self.batches):
            rows = self._rows(groups)
            for update in range(1, self._updates + 1):
                # One more seed word than in the shuffle of a pass, so that the two never draw the same numbers.
                order = groups if self._minibatches == 1 else self._shuffled(np.sort(groups), 1, number, update)
                for part, members in enumerate(self._cut(order, self._minibatches), start=1):
                    calls = self._cut(np.sort(members), min(self._calls, len(members)))
                    # The last call of a step must have rows: it reduces gradients over the ranks.
                    for call in [members[:0]] * (self._calls - len(calls)) + calls:
                        own = self._rows(call)
                        yield [Call(batch=number, update=update, minibatch=part, batch_rows=rows, rows=own)]

    def _rows(self, groups: Int64s) -> Int64s:
        return np.sort(np.concatenate([np.zeros(0, np.int64), *(self.groups[group] for group in groups.tolist())]))

    def _shuffled(self, groups: Int64s, *words: int) -> Int64s:
        return groups if self._seed is None else np.random.default_rng([self._seed, *words]).permutation(groups)

    def _cut(self, groups: Int64s, count: int, at_least: int = 1) -> list[Int64s]:
        """Groups in `count` parts of about equal size, each with `at_least` groups or more."""
        size = self._tokens[groups]
        middle, places = np.cumsum(size) - size / 2, np.arange(1, count) * at_least
        cuts = np.searchsorted(middle, size.sum() * np.arange(1, count) / count)  # a group goes where most of it lies
        cuts = np.maximum.accumulate(np.maximum(cuts - places, 0)) + places
        return np.split(groups, np.minimum(cuts, len(groups) - count * at_least + places))


def _with_something_to_train(groups: list[Int64s], trained: NDArray[np.bool_]) -> list[Int64s]:
    """Merge groups with nothing to train into the first that has something, since every step must train."""
    busy = [group for group in groups if trained[group].any()]
    if not busy:
        raise DataError(
            f"nothing to train: no token of the {len(trained)} rows has a loss weight; "
            "conversations need assistant messages, token rows labels or a loss_mask that is not all 0"
        )
    idle = [group for group in groups if not trained[group].any()]
    return [np.sort(np.concatenate([busy[0], *idle])), *busy[1:]]


class StepDataset(Dataset[dict[str, Any]]):
    """Gives the rows of a call and the tree of those that this rank computes.

    Args:
        rows: all rows.
        model: gives costs to balance rows over the ranks, and FLOPs if its shape is known.
        args: of the run.
    """

    def __init__(self, rows: Sequence[Trajectory], model: Any, args: TreeArguments) -> None:
        self.rows, self._merge, self._cost = rows, args.execution == "tree", cost_if_countable(model)
        self._rank, self._ranks = args.process_index, args.world_size
        self._count_tokens = args.include_num_input_tokens_seen != "no"

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, call: Call) -> dict[str, Any]:
        """The inputs of `TreeTrainer.training_step`."""
        rows = [self.rows[number] for number in call.rows.tolist()]
        tree = own = as_tree(rows, merge=self._merge)
        numbers = np.arange(len(rows))
        if self._ranks > 1 and rows:
            numbers = dispatch(tree, self._cost, self._ranks)[self._rank]
            own = as_tree([rows[number] for number in numbers.tolist()], merge=self._merge)
        inputs = {"call": call, "rows": rows, "tree": own, "own": numbers, "unique_tokens": tree.num_tokens}
        if self._cost is not None:
            counts = self._cost.counts
            ranges = counts.attention_ranges
            inputs["tree_flops"] = counts.flops(*tree_work(tree, ranges)) if rows else 0.0
            inputs["linear_flops"] = counts.flops(*linear_work(tree, ranges)) if rows else 0.0
        if self._count_tokens:  # Trainer counts this
            inputs["input_ids"] = torch.from_numpy(np.concatenate([np.zeros(0, np.int32), *(row.ids for row in rows)]))
        return inputs


def step_loader(
    rows: Sequence[Trajectory], sampler: StepSampler, model: Any, args: TreeArguments, **options: Any
) -> Any:
    """A `DataLoader` of the calls of a pass over the rows, each with its tree."""
    loader = DataLoader(StepDataset(rows, model, args), batch_sampler=sampler, collate_fn=itemgetter(0), **options)
    loader.set_epoch = sampler.set_epoch  # type: ignore[attr-defined]  # Trainer calls it
    return loader

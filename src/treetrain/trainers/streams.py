"""Batches of whole groups from a stream, divided over the processes by the cost of their trees.

accelerate deals the rows of a stream out by their number: equally many to each process, whatever they share. Here every
process reads the same stream, a few steps ahead, and finds the same division of each step (`parallel/balance.py`), so
nothing is exchanged and no process holds more than these rows. What a process does not train it reads in vain, as with
accelerate's `IterableDatasetShard`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from treetrain.core.errors import DataError
from treetrain.core.planning.cost import CostModel
from treetrain.core.tree.token_tree import as_tree
from treetrain.core.tree.trajectory import Trajectory
from treetrain.models.costs import cost_if_countable
from treetrain.parallel.balance import dispatch
from treetrain.trainers.batches import IGNORED
from treetrain.trainers.groups import Key, PrefixGroupSampler

if TYPE_CHECKING:
    from transformers import Trainer

Row = dict[str, Any]
STEPS_AHEAD = 8
"""Steps that are read before the first of them is trained: groups are found, and shuffled, among their rows."""


class MicroBatch(NamedTuple):
    """Rows of one forward of the trainer."""

    rows: list[Row]
    trained: bool
    """False for a copy of a row that stands in on a process without rows, and is not trained."""


class GroupStream(IterableDataset[MicroBatch]):
    """The micro-batches of one process, from a stream of rows with `input_ids`.

    A step is `batch_size * accumulation * processes` rows in whole groups; the last one may be smaller. A group whose
    rows follow one another in the stream, and fit a step, is in one step. Every process has `accumulation`
    micro-batches in each step, of as many rows as make the work of all processes even.

    Args:
        source: rows; reading it again gives the next epoch.
        cost: a cost model, for the division of a step; None counts tokens.
        batch_size, accumulation, processes, key, seed: as for `PrefixGroupSampler`.
        process: the number of this process.
        drop_last: leave out a last step of fewer rows.

    Raises:
        DataError: a row without `input_ids`, when it is read; no column `key`.
    """

    def __init__(
        self,
        source: Iterable[Row],
        batch_size: int,
        *,
        cost: CostModel | None = None,
        key: Key = "input_ids",
        accumulation: int = 1,
        processes: int = 1,
        process: int = 0,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        super().__init__()
        self._source, self._cost, self._key, self._seed, self._drop_last = source, cost, key, seed, drop_last
        self._accumulation, self._processes, self._process = accumulation, processes, process
        self.rows_of_step = batch_size * accumulation * processes
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Use the order of this epoch, counted from 0."""
        self._epoch = epoch
        if callable(begin := getattr(self._source, "set_epoch", None)):
            begin(epoch)

    def __iter__(self) -> Iterator[MicroBatch]:
        for rows in self.steps():
            yield from self._own(rows)

    def steps(self) -> Iterator[list[Row]]:
        """The rows of every step, over all processes."""
        source, waiting, ended, size = iter(self._source), [], False, self.rows_of_step
        for reading in range(2**62):
            wanted = STEPS_AHEAD * size - len(waiting)
            waiting += (more := list(islice(source, wanted)))
            ended = len(more) < wanted
            if not waiting:
                return
            sampler = PrefixGroupSampler(waiting, size, key=self._key, seed=self._seed)
            last = next(number for number, group in enumerate(sampler.groups) if len(waiting) - 1 in group)
            if not ended and len(sampler.groups[last]) < size:  # more of its rows may come
                del sampler.groups[last]
            blocks = [
                block
                for block in sampler.blocks(np.random.default_rng([self._seed, self._epoch, reading]))
                if len(block) == size or (ended and not self._drop_last)
            ]
            yield from ([waiting[number] for number in block.tolist()] for block in blocks)
            if ended:
                return
            done = set(np.concatenate(blocks).tolist())
            waiting = [row for number, row in enumerate(waiting) if number not in done]

    def divide(self, rows: Sequence[Row]) -> list[list[int]]:
        """The numbers of each process's rows of a step, those that share beside one another."""
        tree = as_tree([trajectory(row) for row in rows])
        divided = dispatch(tree, self._cost, self._processes)
        return [numbers[np.argsort(tree.trajectory_last[numbers], kind="stable")].tolist() for numbers in divided]

    def _own(self, rows: Sequence[Row]) -> Iterator[MicroBatch]:
        own = [rows[number] for number in self.divide(rows)[self._process]]
        bounds = np.linspace(0, len(own), self._accumulation + 1).astype(int).tolist()
        for first, behind in pairwise(bounds):
            part = own[first:behind]
            yield MicroBatch(part or [min(rows, key=lambda row: len(row["input_ids"]))], bool(part))


def trajectory(row: Row) -> Trajectory:
    """A row, with loss weights by its labels or masks if it has some. Raises DataError without `input_ids`."""
    if "input_ids" not in row:
        raise DataError(
            f"a row of the stream has no column 'input_ids', only {', '.join(map(repr, row))}: its work is not known; "
            "tokenise the rows before (dataset.map)"
        )
    ids = row["input_ids"]
    given = next((row[name] for name in ("completion_mask", "assistant_masks") if row.get(name) is not None), None)
    if row.get("labels") is not None:
        given = np.asarray(row["labels"]) != IGNORED
    return Trajectory(ids, loss_weights=1.0 if given is None else np.asarray(given, float))


def stream_loader(trainer: "Trainer", key: Key) -> Callable[[], DataLoader]:
    """A function that makes the training loader of a trainer whose data set is a stream; arguments as `group_batches`.

    Raises:
        DataError: settings under which processes cannot have different numbers of rows; the message names them.
    """
    from accelerate.data_loader import prepare_data_loader

    args, name = trainer.args, type(trainer).__name__
    counted = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    if args.world_size > 1 and not (counted and args.average_tokens_across_devices):
        why = "average_tokens_across_devices is False: set it" if counted else "its loss is a mean over micro-batches"
        raise DataError(
            f"{name} cannot divide a stream by work: processes get different numbers of rows, which a loss per token "
            f"of the whole step allows, but {why}; load the data set, or leave group_batches out"
        )
    if args.dataloader_num_workers > 1:
        raise DataError(
            f"dataloader_num_workers is {args.dataloader_num_workers}; a stream is read in its order by one process: "
            "give 0 or 1"
        )
    if trainer.accelerator.split_batches:
        raise DataError("split_batches is True, under which batches of different sizes cannot be divided: set it False")
    stream = GroupStream(
        trainer.train_dataset,  # type: ignore[arg-type]
        args.per_device_train_batch_size,
        cost=cost_if_countable(trainer.model),  # type: ignore[arg-type]
        key=key,
        accumulation=args.gradient_accumulation_steps,
        processes=args.world_size,
        process=args.process_index,
        seed=args.seed if args.data_seed is None else args.data_seed,
        drop_last=args.dataloader_drop_last,
    )
    collator = trainer._get_collator_with_removed_columns(trainer.data_collator, description="training")

    def collated(batch: Any) -> dict[str, Any]:
        inputs: Any = collator(batch.rows)
        if not batch.trained:
            inputs["labels"] = torch.full_like(inputs["labels"], IGNORED)
        return inputs

    def loader() -> DataLoader:
        made = DataLoader(
            stream,
            batch_size=None,
            collate_fn=collated,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
        )
        # Its micro-batches are this process's own: as one process of one, accelerate divides them no further.
        ready: Any = prepare_data_loader(
            made,
            trainer.accelerator.device,
            num_processes=1,
            process_index=0,
            put_on_device=True,
            dispatch_batches=False,
        )
        trainer.accelerator._dataloaders.append(ready)
        return ready

    return loader

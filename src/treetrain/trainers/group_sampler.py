"""Batches that bring together rows that share a prefix, for transformers and TRL trainers."""

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterator, Sequence, Sized
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from treetrain.data.prefix_order import sorted_by_prefix
from treetrain.errors import DataError
from treetrain.trainers.groups import cut_trees

if TYPE_CHECKING:
    from transformers import Trainer

Int64s = NDArray[np.int64]
TrainerT = TypeVar("TrainerT", bound="Trainer")
Key = str | Callable[[Any], Hashable | Sequence[int]]


class PrefixGroupSampler(Sampler[int]):
    """Orders a data set so that rows which share a prefix meet in one optimizer step on one process.

    A prefix is computed once for the rows of one optimizer step on one process. A random order spreads the rows of a
    prompt over many steps, and nothing is shared. This sampler draws whole groups instead: a group stays within one
    step of one process wherever it fits, and groups are reshuffled in every epoch.

    `batch_size * accumulation` should be a multiple of the group size, and large enough for one group. The split
    between the two does not matter where `share_prefixes` scores the micro-batches of a step together; elsewhere a
    group should fit one micro-batch. The engine's budget bounds memory, not these.

    The order depends on the seed and the epoch alone, so that training resumes in the same place. Every process draws
    the same order, and accelerate gives batch i to process i modulo `processes`; the sampler orders the rows to fit.

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
        if min(batch_size, accumulation, processes) < 1:
            raise DataError(
                f"batch_size is {batch_size}, accumulation {accumulation}, processes {processes}; the least is 1"
            )
        self.batch_size, self.accumulation, self.processes = batch_size, accumulation, processes
        self.seed, self.epoch = seed, 0
        self.groups = group_rows(_values(dataset, key), batch_size * accumulation)
        self._count = len(dataset)

    def set_epoch(self, epoch: int) -> None:
        """Use the order of this epoch, counted from 0, from now on."""
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
        last = blocks.pop() if len(blocks[-1]) < size else None
        shuffled = [blocks[number] for number in draws.permutation(len(blocks)).tolist()]
        return shuffled if last is None else [*shuffled, last]

    def _across_processes(self, rows: Int64s) -> list[int]:
        """The rows of a step, process after process, in the order in which micro-batches are dealt to processes."""
        batches = -(-len(rows) // self.batch_size)
        # Micro-batch i goes to process i % processes, so a process has every processes-th of them.
        owner_first = sorted(range(batches), key=lambda batch: (batch % self.processes, batch))
        sizes = np.full(batches, self.batch_size)
        sizes[-1] = len(rows) - self.batch_size * (batches - 1)
        pieces = np.split(rows, np.cumsum(sizes[owner_first])[:-1])
        dealt = dict(zip(owner_first, pieces, strict=True))
        return np.concatenate([dealt[batch] for batch in range(batches)]).tolist()


def group_rows(values: Sequence[Any], most: int) -> list[Int64s]:
    """Row numbers of every group.

    Args:
        values: one for each row: token ids, or anything hashable.
        most: rows of an optimizer step; a tree of more rows is cut at its forks.
    """
    if len(values) == 0:
        raise DataError("the data set has no rows")
    if np.ndim(values[0]) != 1 or not np.issubdtype(np.asarray(values[0]).dtype, np.integer):
        labels: dict[Hashable, list[int]] = {}
        for number, value in enumerate(values):
            labels.setdefault(value, []).append(number)
        return [np.array(rows, np.int64) for rows in labels.values()]
    ids = [np.asarray(value) for value in values]
    order, shared = np.array(list(sorted_by_prefix(list(range(len(ids))), ids.__getitem__)), np.int64).T
    length = np.array([len(ids[number]) for number in order], np.int64)
    return [order[low:high] for low, high in cut_trees(shared, length, np.ones_like(length), most)]


def _values(dataset: Any, key: Key) -> Sequence[Any]:
    """One value for each row."""
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
        DataError: the training data has no length, no such column, or no rows; a trainer that generates.
    """
    dataset, args = trainer.train_dataset, trainer.args
    if hasattr(trainer, "num_generations"):
        raise DataError(
            f"{type(trainer).__name__} draws whole groups of completions itself, which another order would tear apart; "
            "leave group_batches out"
        )
    if not isinstance(dataset, Sized):
        raise DataError("the training data is a stream without a length, so that its rows cannot be grouped; load it")
    processes = args.world_size
    batch_size = args.train_batch_size // (processes if trainer.accelerator.split_batches else 1)
    sampler = PrefixGroupSampler(
        dataset,
        batch_size,
        key=key,
        accumulation=args.gradient_accumulation_steps,
        processes=processes,
        seed=args.seed if args.data_seed is None else args.data_seed,
    )
    # Trainer has no public method for a sampler. It passes its data set without the columns that the model ignores.
    trainer._get_train_sampler = lambda train_dataset=None: sampler
    return trainer

"""Whole groups in one step of another trainer, from a data set or a stream."""

from collections.abc import Sized
from typing import TYPE_CHECKING, TypeVar

from treetrain.core.errors import DataError, expect
from treetrain.trainers.groups import Key, PrefixGroupSampler
from treetrain.trainers.streams import stream_loader

if TYPE_CHECKING:
    from transformers import Trainer

TrainerT = TypeVar("TrainerT", bound="Trainer")


def group_batches(trainer: "TrainerT", key: Key = "input_ids") -> "TrainerT":
    """Bring rows that share a prefix together in a trainer's batches; returns the trainer.

    The rows of an optimizer step change, so losses differ from those of the trainer's own random order. Trainers that
    generate (GRPO, RLOO) draw whole groups themselves and need no sampler.

    A stream (an `IterableDataset`, of torch or `datasets`) is read a few steps ahead. Its groups stay within a step,
    whose rows are divided over the processes by the cost of their trees; see `streams.GroupStream`.

    Args:
        trainer: a constructed `transformers.Trainer`, or one of TRL's on top of it.
        key: a column of its training data, or a function of a row; see `PrefixGroupSampler`.

    Raises:
        DataError: the training data has no such column or no rows, or the trainer generates, or it has a stream and a
            loss that is not per token of the whole step.
    """
    from transformers import Trainer

    expect("trainer", trainer, Trainer, "a constructed transformers.Trainer, or one of TRL's")
    dataset, args = trainer.train_dataset, trainer.args
    if hasattr(trainer, "num_generations"):
        raise DataError(
            f"{type(trainer).__name__} draws whole groups of completions itself, which another order would tear apart; "
            "leave group_batches out"
        )
    if not isinstance(dataset, Sized):
        trainer.get_train_dataloader = stream_loader(trainer, key)
        return trainer
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

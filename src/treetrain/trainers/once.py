"""Each sampled token trained once in another trainer: labels of training data that repeat earlier ones are left out.

The rule is that of files (`logs/once.py`): a token counts in the first row of the data that trains it. Here a label
says whether a token is trained, so the labels of later rows become -100, before training. The trainer's own normaliser
counts what is left, and the result depends on no order of rows, micro-batches or ranks.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from transformers import Trainer

from treetrain.core.errors import DataError
from treetrain.core.tree.trajectory import GIVEN
from treetrain.layers.trajectory import Trajectory
from treetrain.logs.once import count_once
from treetrain.trainers.batches import IGNORED
from treetrain.trainers.settings import classes_of_trl

logger = logging.getLogger(__name__)

REASONS = {
    "GRPOTrainer": "draws every row by itself: equal tokens of two rows were sampled twice, and both count",
    "RLOOTrainer": "draws every row by itself: equal tokens of two rows were sampled twice, and both count",
    "AsyncGRPOTrainer": "gets rows of which each trains the tokens of its own turns alone, so none counts twice",
    "DPOTrainer": "compares whole rows",
    "KTOTrainer": "compares whole rows",
    "RewardTrainer": "trains no tokens",
}
"""Trainers of TRL whose rows do not repeat sampled tokens, or whose loss is no sum over tokens."""

MASKS = ("completion_mask", "assistant_masks")
"""Columns by which a collator of TRL may leave out tokens of rows without labels."""


def data_counted_once(trainer: Trainer) -> Any:
    """The training data of a trainer with each sampled token labelled in the first row that trains it.

    Rows with an `episode` (a column) repeat tokens of their own episode only; rows without one any earlier row's.

    Raises:
        ValueError: a trainer whose loss does not read labels of single tokens, or data without rows of ids.
        DataError: two rows give one token different facts, such as `advantages` or `rollout_logprobs`.
    """
    names = classes_of_trl(trainer)
    if names and "SFTTrainer" not in names:
        why = next((REASONS[name] for name in names if name in REASONS), "has a loss that is not known here")
        raise ValueError(
            f"count='once' leaves out labels of single tokens, and {names[0]} {why}. Take count='per trajectory' here; "
            "'once' is for SFTTrainer and a plain transformers.Trainer"
        )
    dataset: Any = trainer.train_dataset
    if dataset is None or not hasattr(dataset, "__len__"):
        raise ValueError("count='once' compares all rows before training; give a train_dataset with a length")
    columns = getattr(dataset, "column_names", None) or (list(dataset[0]) if len(dataset) else [])
    if "seq_lengths" in columns:
        raise ValueError("count='once' compares rows, which packing has joined; set packing=False: padding is free")
    if "input_ids" not in columns:
        given = ", ".join(columns) or "no columns"
        raise ValueError(f"count='once' compares rows of input_ids, and train_dataset has {given}; tokenise it before")
    if names and "labels" not in columns and (masks := [name for name in MASKS if name in columns]):
        raise ValueError(
            f"count='once' reads which tokens are trained from labels, and train_dataset has {' and '.join(masks)} "
            "without labels; give labels, -100 where the mask is 0"
        )
    rows = list(_rows(dataset, columns))
    counted = count_once(rows)
    labels, changed = [], []
    for number, (before, after) in enumerate(zip(rows, counted)):
        own = np.asarray(dataset[number]["labels"] if "labels" in columns else before.ids, np.int64)
        dropped = before.weights != after.weights
        labels.append(np.where(dropped, IGNORED, own).tolist())
        changed += [number] if dropped.any() else []
    trained, left = (sum(int((row.weights != 0).sum()) for row in kept) for kept in (rows, counted))
    if trainer.is_world_process_zero():
        logger.warning("count='once': %d of %d trained tokens repeat one of an earlier row", trained - left, trained)
    if hasattr(dataset, "add_column"):  # datasets.Dataset
        kept = dataset.remove_columns("labels") if "labels" in columns else dataset
        found = kept.add_column("labels", labels)
    else:
        found = [{**dataset[number], "labels": kept} for number, kept in enumerate(labels)]
    if changed:
        _check_collator(trainer, found, changed[0], labels[changed[0]])
    return found


def _rows(dataset: Any, columns: Sequence[str]) -> Iterator[Trajectory]:
    facts = [name for name in GIVEN if name in columns]
    for number in range(len(dataset)):
        row: Mapping[str, Any] = dataset[number]
        ids, labels = np.asarray(row["input_ids"]), row.get("labels")
        if labels is not None and np.shape(labels) != ids.shape:
            raise DataError(
                f"row {number} of train_dataset has {ids.size} input_ids and {np.size(labels)} labels; give one for "
                "each token"
            )
        weights = np.ones(ids.shape) if labels is None else np.asarray(labels) != IGNORED
        given = {name: row[name] for name in facts if row[name] is not None}
        yield Trajectory(ids, loss_weights=weights, episode=row.get("episode"), **given)


def _check_collator(trainer: Trainer, dataset: Any, number: int, labels: Sequence[int]) -> None:
    """Raise ValueError if the trainer's collator trains tokens of a row that its labels leave out."""
    collator: Any = trainer.data_collator
    if hasattr(dataset, "select"):
        row = trainer._remove_unused_columns(dataset.select([number]), description="training")[0]
    else:
        row, collator = dataset[number], trainer._get_collator_with_removed_columns(collator, description="training")
    try:
        made = collator([dict(row)])
        found = made["shift_labels"] if "shift_labels" in made else made["labels"][:, 1:]
        trained = int((found != IGNORED).sum())
    except Exception as error:
        raise ValueError(
            f"count='once' sets labels of train_dataset, and the data_collator ({type(collator).__name__}) cannot take "
            f"them: {type(error).__name__}: {error}. Take one that pads labels, such as DataCollatorForSeq2Seq"
        ) from error
    if trained > (left := int((np.asarray(labels[1:]) != IGNORED).sum())):
        raise ValueError(
            f"count='once' leaves {left} trained tokens in row {number} of train_dataset, and the data_collator "
            f"({type(collator).__name__}) trains {trained}: it makes labels of its own. Take one that keeps labels, "
            "such as DataCollatorForSeq2Seq"
        )

"""Each sampled token trained once in another trainer: labels of training data that repeat earlier ones are left out.

The rule is that of files (`logs/once.py`): a token counts in the first row of the data that trains it. Here a label
says whether a token is trained, so the labels of later rows become -100, before training. The trainer's own normaliser
counts what is left, and the result depends on no order of rows, micro-batches or ranks. Rows keep their places, since
samplers know them by number; one that only repeats trains nothing.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import Trainer

from treetrain.core.errors import DataError, quoted
from treetrain.core.hf.capability import causal_lm
from treetrain.core.tree.trajectory import GIVEN
from treetrain.layers.images.image_rows import IMAGE_INPUTS
from treetrain.layers.trajectory import Trajectory
from treetrain.logs.once import count_once, repeats
from treetrain.trainers.batches import IGNORED, ROUTED, TOKEN_TYPES, Span, experts_of_rows
from treetrain.trainers.settings import classes_of_trl

logger = logging.getLogger(__name__)

REASONS = {
    "GRPOTrainer": "draws every row by itself: equal tokens of two rows were sampled twice, and both count. A "
    "rollout_func whose completions repeat a turn returns env_mask with 0 there in all but one of them",
    "RLOOTrainer": "draws every row by itself: equal tokens of two rows were sampled twice, and both count",
    "AsyncGRPOTrainer": "gets rows of which each trains the tokens of its own turns alone, so none counts twice",
    "DPOTrainer": "compares whole rows",
    "KTOTrainer": "compares whole rows",
    "RewardTrainer": "trains no tokens",
}
"""Trainers of TRL whose data are no sampled tokens, whose rows do not repeat them, or whose loss does not sum them."""

MASKS = ("completion_mask", "assistant_masks")
"""Columns by which a collator of TRL may leave out tokens of rows without labels."""

READ = {"input_ids", "labels", "attention_mask", "episode", "group", "id", ROUTED}
READ |= {*MASKS, *TOKEN_TYPES, *IMAGE_INPUTS, *GIVEN}
"""Columns of which it is known whether they tell sampled tokens apart."""


def data_counted_once(trainer: Trainer) -> Any:
    """The training data of a trainer with each sampled token labelled in the first row that trains it.

    Rows with an `episode` (a column) repeat tokens of their own episode only; rows without one any earlier row's.

    Raises:
        ValueError: a trainer whose loss is not known to be a sum over labelled tokens, divided by their number in the
            step, or data without rows of ids.
        DataError: two rows give one token different facts, such as `advantages` or `rollout_logprobs`, or differ in a
            column that the model or a loss may read.
    """
    names = classes_of_trl(trainer)
    if names and "SFTTrainer" not in names:
        why = next((REASONS[name] for name in names if name in REASONS), "has a loss that is not known here")
        raise ValueError(
            f"count='once' leaves out labels of single tokens, and {names[0]} {why}. Take count='per trajectory' here; "
            "'once' is for SFTTrainer and a plain transformers.Trainer"
        )
    _check_sums_tokens(trainer)
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
    rows = list(_rows(trainer, dataset, columns))
    counted = count_once(rows)
    _check_columns(trainer, dataset, columns, rows)
    labels, changed = [], []
    for number, (before, after) in enumerate(zip(rows, counted)):
        own = np.asarray(dataset[number]["labels"] if "labels" in columns else before.ids, np.int64)
        dropped = before.weights != after.weights
        labels.append(np.where(dropped, IGNORED, own).tolist())
        changed += [number] if dropped.any() else []
    empty = sum(bool(before.weights.any()) and not after.weights.any() for before, after in zip(rows, counted))
    trained, left = (sum(int((row.weights != 0).sum()) for row in kept) for kept in (rows, counted))
    if trainer.is_world_process_zero():
        said = f"count='once': {trained - left} of {trained} trained tokens repeat one of an earlier row"
        if empty:
            said += f"; {empty} rows only repeat: a step of such rows alone has gradient 0, and counts as a step"
        logger.warning(said)
    if hasattr(dataset, "add_column"):  # datasets.Dataset
        kept = dataset.remove_columns("labels") if "labels" in columns else dataset
        found = kept.add_column("labels", labels)
    else:
        found = [{**dataset[number], "labels": kept} for number, kept in enumerate(labels)]
    if changed:
        _check_collator(trainer, found, changed[0], labels[changed[0]])
    return found


def _check_sums_tokens(trainer: Trainer) -> None:
    """Raise ValueError unless the loss is a sum over labelled tokens that is divided by their number in the step."""
    args, name = trainer.args, type(trainer).__name__
    kind = next(kind for kind in (trainer, *type(trainer).__mro__) if "compute_loss" in vars(kind))
    own: list[tuple[str, object]] = []
    if kind is trainer or not kind.__module__.startswith(("transformers.", "trl.")):
        own.append((f"{name}.compute_loss", trainer))
    function = trainer.compute_loss_func
    if function is not None and not getattr(function, "__module__", "").startswith("trl."):
        own.append(("compute_loss_func", function))
    for loss, holder in own:
        if not getattr(holder, "sums_tokens", False):
            raise ValueError(
                f"count='once' leaves out labels of single tokens, and {loss} is a loss of your own, such as a mean "
                "over rows may be. If it is a sum over labelled tokens, divided by num_items_in_batch, say so: "
                f"{'trainer' if holder is trainer else 'the function'}.sums_tokens = True. Or take count='per "
                "trajectory'"
            )
    counted = bool(own) or trainer.model_accepts_loss_kwargs or function is not None
    several = args.gradient_accumulation_steps * args.world_size > 1
    why = None
    if several and not counted:
        why = "the model takes no num_items_in_batch, so that its loss is a mean over a micro-batch: take one in a step"
    elif args.world_size > 1 and not args.average_tokens_across_devices:
        why = "average_tokens_across_devices=False divides the loss by those of one process: set it to True"
    if why is not None:
        raise ValueError(f"count='once' counts the tokens of a step, and {why}, or take count='per trajectory'")


def _reaching(trainer: Trainer, columns: Sequence[str]) -> list[str]:
    """The columns that the collator gets."""
    if not trainer.args.remove_unused_columns:
        return list(columns)
    trainer._set_signature_columns_if_needed()
    return [name for name in columns if name in trainer._signature_columns]  # type: ignore[operator]


def _rows(trainer: Trainer, dataset: Any, columns: Sequence[str]) -> Iterator[Trajectory]:
    facts, reaching = [name for name in GIVEN if name in columns], _reaching(trainer, columns)
    pictured = [name for name in IMAGE_INPUTS if name in reaching]
    token = getattr(causal_lm(trainer.model).config, "image_token_id", None)  # type: ignore[arg-type]
    if pictured and token is None:
        raise ValueError(
            f"train_dataset has {', '.join(pictured)}, and the configuration of {type(trainer.model).__name__} no "
            "image_token_id, by which count='once' finds images in rows: remove the columns from data of text"
        )
    for number in range(len(dataset)):
        row: Mapping[str, Any] = dataset[number]
        ids, labels = np.asarray(row["input_ids"]), row.get("labels")
        if labels is not None and np.shape(labels) != ids.shape:
            raise DataError(
                f"row {number} of train_dataset has {ids.size} input_ids and {np.size(labels)} labels; give one for "
                "each token"
            )
        if (mask := row.get("attention_mask")) is not None and len(mask) and not mask[0]:
            raise DataError(
                f"row {number} of train_dataset begins with padding (attention_mask 0), and count='once' compares rows "
                "from their first token on: give rows without padding"
            )
        weights = np.ones(ids.shape) if labels is None else np.asarray(labels) != IGNORED
        given = {name: row[name] for name in facts if row[name] is not None}
        if images := {name: row[name] for name in pictured if row[name] is not None and len(row[name])}:
            given |= {"images": images, "image_token": token}
        if ROUTED in reaching and row[ROUTED] is not None:
            record = [np.asarray(row[ROUTED])]
            (given["experts"],) = experts_of_rows(record, [Span(0, 0, ids.size)], torch.from_numpy(ids[None]))
        yield Trajectory(ids, loss_weights=weights, episode=row.get("episode"), **given)


def _check_columns(trainer: Trainer, dataset: Any, columns: Sequence[str], rows: Sequence[Trajectory]) -> None:
    """Raise DataError if rows that repeat each other differ in a column that the model or a loss may read."""
    others = [name for name in _reaching(trainer, columns) if name not in READ]
    for number, other, at in repeats(rows) if others else ():
        for name in others:
            pair = [dataset[one].get(name) for one in (other, number)]
            if all(hasattr(x, "__len__") and len(x) == len(rows[k]) for x, k in zip(pair, (other, number))):
                pair = [value[: at[-1] + 1] for value in pair]  # per token
            if not _equal(*pair):
                raise DataError(
                    f"rows {other} and {number} of train_dataset both train token {at[0]} of one path, and their "
                    f"columns {name} are {quoted(pair[0])} and {quoted(pair[1])}, which the model or a loss may read. "
                    "If not, remove the column; otherwise give rows that differ each its own `episode`, or take "
                    "count='per trajectory'"
                )


def _equal(one: Any, other: Any) -> bool:
    try:
        return np.array_equal(np.asarray(one), np.asarray(other))
    except ValueError:  # lists of different lengths in a list
        return bool(one == other)


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

"""Everything that can be wrong with a run before its model is loaded: files, rows, loss, steps, output folder."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treetrain.data.rendering import chat_template_text
from treetrain.data.trajectory import Trajectory
from treetrain.errors import DataError
from treetrain.losses import Loss
from treetrain.models.loading import load_tokenizer
from treetrain.train.adapters import check_adapter
from treetrain.train.batches import BatchPlan, plan_batches, split_units
from treetrain.train.config import TrainConfig
from treetrain.train.objective import make_objective
from treetrain.train.optim import check_optimizer
from treetrain.train.rows import RowSource, read_rows
from treetrain.train.save import check_output


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A run that can begin."""

    rows: list[Trajectory]
    plan: BatchPlan
    eval_rows: list[Trajectory]
    eval_steps: list[NDArray[np.int64]]
    """Row numbers of every call of an evaluation."""
    eval_loss: Loss | None
    """Of the held-out rows; None where they lack a fact that it needs."""
    loss: Loss
    tokenizer: Any
    """Saved with the model; None where there is none."""
    notes: tuple[str, ...]
    """What the user should know."""


def prepare(config: TrainConfig) -> Prepared:
    """Read and check all that the run needs besides the model's weights. Writes nothing.

    Raises:
        DataError, ValueError: what is wrong, where, and what to do.
    """
    # What a run that is resumed finds in its folder is looked at when its rows are known.
    check_output(Path(config.output), overwrite=config.overwrite or config.resume != "never")
    check_optimizer(config)
    check_adapter(config)
    source = RowSource(
        format=config.format,
        view=config.view,
        tools=config.tools,
        chat_template=config.chat_template,
        tokenizer=config.tokenizer,
        model=config.model,
    )
    read = read_rows(config.data, source)
    notes = list(read.notes)
    if config.eval_data:
        held = read_rows(config.eval_data, source)
        rows, eval_rows = read.rows, held.rows
        notes += [note for note in held.notes if note not in notes]
    else:
        rows, eval_rows = split_units(
            read.rows, config.eval_fraction, seed=config.seed, tokens_per_step=config.tokens_per_step
        )
    loss, rows, more = _objective(config, rows)
    eval_loss, eval_rows, held_notes = _eval_objective(config, eval_rows)
    plan = plan_batches(rows, tokens_per_step=config.tokens_per_step, seed=config.seed)
    eval_steps = _eval_steps(eval_rows, config)
    tokenizer, missing = _tokenizer_to_save(config, read.tokenizer)
    return Prepared(
        rows=rows,
        plan=plan,
        eval_rows=eval_rows,
        eval_steps=eval_steps,
        eval_loss=eval_loss,
        loss=loss,
        tokenizer=tokenizer,
        notes=(*notes, *more, *held_notes, *missing),
    )


def _objective(config: TrainConfig, rows: list[Trajectory]) -> tuple[Loss, list[Trajectory], tuple[str, ...]]:
    return make_objective(
        config.loss,
        config.loss_options,
        rows,
        subtract_mean=config.advantage_mean,
        divide_by_std=config.advantage_std,
        sft_weight=config.sft_weight,
    )


def _eval_objective(
    config: TrainConfig, rows: list[Trajectory]
) -> tuple[Loss | None, list[Trajectory], tuple[str, ...]]:
    """The loss of the held-out rows, where they have the facts that it needs; training needs none of it."""
    if not rows:
        return None, rows, ()
    if not any(row.weights.any() for row in rows):
        raise DataError(
            f"nothing to evaluate: no token of the {len(rows)} held-out rows has a loss weight; hold out other rows"
        )
    try:
        loss, rows, _ = _objective(config, rows)
    except DataError as error:
        if config.follows_best and config.best_metric == "loss":
            raise DataError(
                f"best_metric is loss, which the held-out rows cannot tell ({error}); hold out others, or give "
                "best_metric nll"
            ) from error
        return None, rows, (f"held-out rows are evaluated by their log-likelihood alone: {error}",)
    return loss, rows, ()


def _eval_steps(rows: list[Trajectory], config: TrainConfig) -> list[NDArray[np.int64]]:
    if not rows:
        return []
    return plan_batches(rows, tokens_per_step=config.tokens_per_step).epoch(0, shuffle=False)


def _tokenizer_to_save(config: TrainConfig, used: Any) -> tuple[Any, tuple[str, ...]]:
    """What belongs beside the model, with the template it was trained on; token rows can do without any."""
    try:
        tokenizer = load_tokenizer(config.tokenizer or config.model) if used is None else used
        if config.chat_template is not None:
            tokenizer.chat_template = chat_template_text(config.chat_template)
        return tokenizer, ()
    except DataError as error:
        if config.tokenizer is not None:
            raise
        return None, (f"no tokenizer is saved with the model: {error}",)

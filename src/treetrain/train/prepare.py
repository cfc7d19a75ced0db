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
from treetrain.train.batches import BatchPlan, plan_batches, split_units
from treetrain.train.config import TrainConfig
from treetrain.train.objective import make_objective
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
    loss, rows, more = make_objective(
        config.loss,
        config.loss_options,
        rows,
        subtract_mean=config.advantage_mean,
        divide_by_std=config.advantage_std,
    )
    plan = plan_batches(rows, tokens_per_step=config.tokens_per_step, seed=config.seed)
    eval_steps = _eval_steps(eval_rows, config)
    tokenizer, missing = _tokenizer_to_save(config, read.tokenizer)
    return Prepared(
        rows=rows,
        plan=plan,
        eval_rows=eval_rows,
        eval_steps=eval_steps,
        loss=loss,
        tokenizer=tokenizer,
        notes=(*notes, *more, *missing),
    )


def _eval_steps(rows: list[Trajectory], config: TrainConfig) -> list[NDArray[np.int64]]:
    if not rows:
        return []
    if not any(row.weights.any() for row in rows):
        raise DataError(
            f"nothing to evaluate: no token of the {len(rows)} held-out rows has a loss weight; hold out other rows"
        )
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

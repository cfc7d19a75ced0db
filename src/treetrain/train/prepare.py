"""Everything that can be wrong with a run before its model is loaded: files, rows, loss, steps, output folder."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from treetrain.data.columns import columns_of
from treetrain.data.load import no_file
from treetrain.data.rendering import chat_template_text
from treetrain.data.trajectory import Trajectory
from treetrain.engine.ranks import Ranks
from treetrain.errors import DataError
from treetrain.losses import Loss, by_name
from treetrain.models.loading import load_tokenizer
from treetrain.models.rows import RowSource, read_config, read_rows
from treetrain.train.adapters import check_adapter
from treetrain.train.batches import BatchPlan, plan_batches, split_units
from treetrain.train.config import TrainConfig
from treetrain.train.objective import OLD, Objective, ObjectiveSettings, check_advantages_used, make_objective
from treetrain.train.optim import check_optimizer
from treetrain.train.save import check_output
from treetrain.train.updates import update_plan
from treetrain.trainers.watch import Watch


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A run that can begin."""

    rows: Sequence[Trajectory]
    plan: BatchPlan
    eval_rows: list[Trajectory]
    eval_steps: list[NDArray[np.int64]]
    """Row numbers of every call of an evaluation."""
    eval_loss: Loss | None
    """Of the held-out rows; None where they lack a fact that it needs."""
    loss: Loss
    computed: frozenset[str]
    """Facts of the rows that the run computes itself: old_logprobs, ref_logprobs."""
    eval_computed: frozenset[str]
    """Of the held-out rows: ref_logprobs."""
    watch: Watch | None
    """What the loss tells besides its metrics."""
    tokenizer: Any
    """Saved with the model; None where there is none."""
    notes: tuple[str, ...]
    """What the user should know."""


def prepare(config: TrainConfig, ranks: Ranks | None = None) -> Prepared:
    """Read and check all that the run needs besides the model's weights. Writes nothing.

    Args:
        config: of the run.
        ranks: the processes that share the run, all of which call this; None: this one alone.

    Raises:
        DataError, ValueError: what is wrong, where, and what to do; RanksDisagree on the other processes.
    """
    if ranks is None:
        return _prepared(config, _read(config, _checked(config)))
    source, _ = ranks.agree("checking the settings", lambda: (_checked(config), None))
    read, _ = ranks.agree("reading the rows", lambda: (_read(config, source), None))
    return ranks.agree("preparing the run", lambda: (_prepared(config, read), None))[0]


def _checked(config: TrainConfig) -> RowSource:
    """How the files are to be read, when all is well that needs no rows."""
    # What a run that is resumed finds in its folder is looked at when its rows are known.
    check_output(Path(config.output), overwrite=config.overwrite or config.resume != "never")
    check_optimizer(config)
    check_adapter(config)
    return RowSource(
        format=config.format,
        view=config.view,
        tools=config.tools,
        chat_template=config.chat_template,
        tokenizer=config.tokenizer,
        model=config.model,
    )


class _Read(NamedTuple):
    rows: Sequence[Trajectory]
    eval_rows: list[Trajectory]
    tokenizer: Any
    notes: tuple[str, ...]


def _read(config: TrainConfig, source: RowSource) -> _Read:
    if not config.data:
        raise no_file()
    read = read_rows(config.data, source)
    if config.eval_data:
        held = read_rows(config.eval_data, source)
        more = tuple(note for note in held.notes if note not in read.notes)
        return _Read(read.rows, list(held.rows), read.tokenizer, read.notes + more)
    kept, held_out = split_units(
        read.rows, config.eval_fraction, seed=config.seed, tokens_per_step=config.tokens_per_step
    )
    kept_rows, eval_rows = ([read.rows[number] for number in numbers.tolist()] for numbers in (kept, held_out))
    return _Read(kept_rows, eval_rows, read.tokenizer, read.notes)


def _prepared(config: TrainConfig, read: _Read) -> Prepared:
    """What this process finds by itself, and every other one too."""
    settings = ObjectiveSettings.of(config)
    objective = make_objective(config.loss, config.loss_options, read.rows, settings)
    held_objective, held_notes = _eval_objective(config, read.eval_rows)
    rows, eval_rows = objective.rows, read.eval_rows if held_objective is None else list(held_objective.rows)
    if config.reference_model is not None:
        read_config(config.reference_model)
    plan = plan_batches(rows, tokens_per_step=config.tokens_per_step, seed=config.seed)
    check_advantages_used(settings, objective, config.loss)
    eval_steps = _eval_steps(eval_rows, config)
    _check_mismatched(config, rows, plan, eval_rows, eval_steps)
    tokenizer, missing = _tokenizer_to_save(config, read.tokenizer)
    return Prepared(
        rows=rows,
        plan=plan,
        eval_rows=eval_rows,
        eval_steps=eval_steps,
        eval_loss=None if held_objective is None else held_objective.loss,
        loss=objective.loss,
        computed=objective.computed,
        eval_computed=frozenset() if held_objective is None else held_objective.computed,
        watch=objective.watch,
        tokenizer=tokenizer,
        notes=(*read.notes, *objective.notes, *held_notes, *missing),
    )


def _eval_objective(config: TrainConfig, rows: list[Trajectory]) -> tuple[Objective | None, tuple[str, ...]]:
    """The loss of the held-out rows, where they have the facts that it needs; training needs none of it.

    Where they have no old log-probabilities the policy is measured as it is (ratio 1): it never updates on them.
    """
    if not rows:
        return None, ()
    if not any(row.weights.any() for row in rows):
        raise DataError(
            f"nothing to evaluate: no token of the {len(rows)} held-out rows has a loss weight; hold out other rows"
        )
    try:
        settings = dataclasses.replace(ObjectiveSettings.of(config), several_updates=False)
        objective = make_objective(config.loss, config.loss_options, rows, settings)
    except DataError as error:
        if config.follows_best and config.best_metric == "loss":
            raise DataError(
                f"best_metric is loss, which the held-out rows cannot tell ({error}); hold out others, or give "
                "best_metric nll"
            ) from error
        return None, (f"held-out rows are evaluated by their log-likelihood alone: {error}",)
    return objective, _check_tells(config, objective)


def _check_tells(config: TrainConfig, objective: Objective) -> tuple[str, ...]:
    """A note where the held-out loss has no probability ratio; an error where it is to tell the best weights.

    At ratio 1 the policy term is minus the mean advantage whatever the weights are, so that no evaluation could be
    better than the one before the first step.
    """
    ratio = OLD in by_name(config.loss, **config.loss_options).needs_facts
    if not ratio or OLD in objective.loss.needs_facts:
        return ()
    told = "held-out rows have no old log-probabilities to compare with, so the policy term of their loss is a constant"
    if config.follows_best and config.best_metric == "loss":
        raise DataError(
            f"best_metric is loss, but {told}, and the weights before the first step would count as the best; give "
            "the held-out rows old_logprobs (and old_logprobs 'auto' or 'recorded'), or give best_metric nll"
        )
    return (told,)


def _eval_steps(rows: list[Trajectory], config: TrainConfig) -> list[NDArray[np.int64]]:
    if not rows:
        return []
    return plan_batches(rows, tokens_per_step=config.tokens_per_step).epoch(0, shuffle=False)


def _check_mismatched(
    config: TrainConfig,
    rows: Sequence[Trajectory],
    plan: BatchPlan,
    eval_rows: list[Trajectory],
    eval_steps: list[NDArray[np.int64]],
) -> None:
    """Raise DataError where a step of KTO would lack rows for its reference point, or rows that are labelled."""
    if config.loss != "kto" or config.reference_point != "mismatched":
        return
    steps = update_plan(config, plan)
    batches = config.steps or plan.total_steps(config.epochs or 1)
    updates = (
        each.rows
        for number, (epoch, batch) in enumerate(plan.steps(batches))
        for each in steps.of_batch(number, epoch, batch)
    )
    kinds = ((columns_of(rows), updates), (columns_of(eval_rows), eval_steps))
    for columns, numbers in ((columns, numbers) for columns, found in kinds for numbers in found):
        labels = set((columns.chosen[numbers][columns.trained[numbers]] < 0).tolist())
        if labels != {True, False}:
            only = "none without `chosen`, which its reference point is made of" if labels == {False} else "no other"
            raise DataError(
                f"a step of kto with reference_point mismatched would have {len(numbers)} rows and among them {only}; "
                "give every mismatched row the group (group_id) of labelled ones, or raise tokens_per_step"
            )


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

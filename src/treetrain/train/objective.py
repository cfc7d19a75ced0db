"""The loss of a run, and the facts it needs in its rows."""

from collections.abc import Sequence
from typing import Any

from treetrain import losses
from treetrain.data.advantages import group_advantages
from treetrain.data.trajectory import Trajectory
from treetrain.losses import Loss


def make_objective(
    name: str,
    options: dict[str, Any],
    rows: Sequence[Trajectory],
    *,
    subtract_mean: bool = True,
    divide_by_std: bool = True,
    sft_weight: float | None = None,
) -> tuple[Loss, list[Trajectory], tuple[str, ...]]:
    """A loss by name, and the rows with what it needs.

    Rewards become group advantages where the loss needs advantages and no row has any. Where no row has old
    log-probabilities, every update counts as on-policy: a batch is updated once per pass, so the log-probabilities
    before the update are those of the update itself, and computing them first would give the same gradient.

    Args:
        name: of the loss.
        options: its keyword arguments.
        rows: all rows of the run.
        subtract_mean, divide_by_std: see `group_advantages`.
        sft_weight: of the cross-entropy of the same rows, added to the loss; None adds none.

    Returns:
        The loss, the rows, and what was decided, in words.

    Raises:
        ValueError: an unknown loss or option, or one out of its range.
        DataError: nothing to train, or a fact that the loss needs and a row lacks.
    """
    loss, rows, notes = losses.by_name(name, **options), list(rows), []
    without_advantages = "advantages" in loss.needs_facts and all(row.advantages is None for row in rows)
    if without_advantages and any(row.reward is not None for row in rows):
        rows = group_advantages(rows, subtract_mean=subtract_mean, divide_by_std=divide_by_std)
        notes.append("advantages: the rewards, normalised within each group")
        notes += _groups_without_signal(rows)
        if name == "dr_grpo" and divide_by_std:
            notes.append("dr_grpo was published without division by the standard deviation: advantage_std false")
    if "old_logprobs" in loss.needs_facts and all(row.old_logprobs is None for row in rows):
        loss = losses.by_name(name, **options, on_policy=True)
        notes.append("the rows have no old log-probabilities: every update counts as on-policy (ratio 1)")
    if sft_weight is not None:
        loss = losses.mix({name: loss, "cross_entropy": losses.sft()}, weights={"cross_entropy": sft_weight})
    loss.normaliser(rows)
    return loss, rows, tuple(notes)


def _groups_without_signal(rows: Sequence[Trajectory]) -> list[str]:
    """A note where groups have nothing to compare: a run on them alone would change nothing, silently."""
    groups = {row.group for row in rows}
    told = {row.group for row in rows if row.advantages is not None and row.advantages.any()}
    if len(told) == len(groups):
        return []
    return [
        f"{len(groups) - len(told)} of {len(groups)} groups have one episode or equal rewards: their advantages are 0, "
        "so the policy term learns nothing from them"
    ]

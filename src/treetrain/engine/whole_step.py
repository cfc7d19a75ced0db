"""What a step must know of all its trajectories, wherever they are: its loss's constants and its normaliser.

A step over several ranks is one step: what each rank tells of its own rows is put together here, in the order of ranks,
so that all of them come to the same numbers.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from treetrain import __version__
from treetrain.data.trajectory import Trajectory
from treetrain.engine.loss import PackedLoss, check_normaliser, step_loss, step_normaliser
from treetrain.engine.ranks import Ranks, check_same
from treetrain.errors import DataError
from treetrain.tree.token_tree import TokenTree


class Share(NamedTuple):
    """What a rank tells of its part of a step before it begins."""

    settings: dict[str, Any]
    """What must be the same on every rank."""
    weight: float | None
    """What its rows add to the normaliser; None where that is no sum, or was given."""
    rows: list[Trajectory] | None
    """All its rows, where the loss must see those of the whole step."""


def share_of(
    tree: TokenTree, merged: Any, loss: PackedLoss, normaliser: float | None, settings: dict[str, Any], ranks: Ranks
) -> Share:
    """This rank's. Raises DataError for a row that lacks what the loss needs.

    Args:
        merged: rows put together by prediction, or None.
    """
    if ranks.alone:
        return Share({}, None, None)
    settings |= {"treetrain": __version__, "torch": torch.__version__, "loss": loss.identity}
    settings |= {"what the loss needs": {"scope": loss.scope, "needs": sorted(loss.needs), "step": loss.needs_step}}
    settings |= {"a normaliser": None if normaliser is None else float(normaliser)}
    if loss.scope == "batch" or loss.needs_step or (normaliser is None and "step" in loss.needs):
        return Share(settings, None, list(tree.trajectories))
    rows = list(tree.trajectories) if merged is None else merged
    loss.check(rows)
    return Share(settings, loss.total_weight(rows) if normaliser is None else None, None)


def whole_step(
    tree: TokenTree, merged: Any, loss: PackedLoss, normaliser: float | None, shares: Sequence[Share], ranks: Ranks
) -> tuple[PackedLoss, float]:
    """The loss with what it must know of the step, and what the step's sum is divided by.

    Raises:
        DataError: nothing to train on any rank.
        RanksDisagree: other settings on another rank.
        ValueError: a normaliser that is not above 0, or a part of a step that was not told of the whole.
    """
    if ranks.alone and merged is not None:
        return loss, step_normaliser(loss, merged, normaliser)
    if ranks.alone:
        loss = step_loss(loss, list(tree.trajectories), normaliser)
        return loss, step_normaliser(loss, list(tree.trajectories), normaliser)
    for name in shares[0].settings:
        check_same(name, [share.settings[name] for share in shares])
    if shares[0].rows is None:
        whole = _some(sum(share.weight or 0.0 for share in shares), ranks) if normaliser is None else normaliser
        return step_loss(loss, [], normaliser), check_normaliser(whole)
    rows = every_row(shares)
    loss = step_loss(loss, rows, normaliser)
    return loss, step_normaliser(loss, rows, normaliser)


def every_row(shares: Sequence[Share]) -> list[Trajectory]:
    """The rows of all ranks, by rank, where they were told."""
    return [row for share in shares for row in share.rows or []]


def _some(weight: float, ranks: Ranks) -> float:
    if weight > 0:
        return weight
    raise DataError(
        f"nothing to train: the loss weights of all rows on all {ranks.size} ranks sum to 0 (entry 0 of a row is never "
        "trained); give loss_weights that are not 0, or rows of two tokens and more"
    )

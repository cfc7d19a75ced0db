"""What a step must know of all its trajectories, wherever they are: its loss's constants and its normaliser.

A step over several ranks is one step: what each rank tells of its own rows is put together here, in the order of ranks,
so that all of them come to the same numbers.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from treetrain import __version__
from treetrain.data.trajectory import Trajectory
from treetrain.engine.checks import check_normaliser, step_loss, step_normaliser
from treetrain.engine.ranks import Ranks, check_same
from treetrain.errors import DataError
from treetrain.tree.token_tree import TokenTree

SAID = "scope", "mergeable", "needs_entropy", "needs_values", "needs_logprobs", "needs_step"
"""What a loss says of itself."""


class Share(NamedTuple):
    """What a rank tells of its part of a step before it begins."""

    settings: dict[str, Any]
    """What must be the same on every rank."""
    weight: float | None
    """What its rows add to the normaliser; None where that is no sum, or was given."""
    rows: list[Trajectory] | None
    """All its rows, where the loss must see those of the whole step."""


def share_of(
    tree: TokenTree, merged: Any, loss: Any, normaliser: float | None, settings: dict[str, Any], ranks: Ranks
) -> Share:
    """This rank's. Raises DataError for a row that lacks what the loss needs.

    Args:
        merged: rows put together by prediction, or None.
    """
    if ranks.alone:
        return Share({}, None, None)
    settings |= {"treetrain": __version__, "torch": torch.__version__, "loss": _named(loss)}
    settings |= {"what the loss needs": {name: _says(loss, name) for name in SAID}}
    settings |= {"a normaliser": None if normaliser is None else float(normaliser)}
    if _sees_all_rows(loss, normaliser):
        return Share(settings, None, list(tree.trajectories))
    if merged is not None:
        loss.check_merged(merged)
    else:
        loss.check(list(tree.trajectories))
    if normaliser is not None:
        return Share(settings, None, None)
    if merged is None:
        return Share(settings, loss.total_weight(list(tree.trajectories)), None)
    loss.check_signs(merged)
    return Share(settings, loss.merged_weight(merged), None)


def whole_step(
    tree: TokenTree, merged: Any, loss: Any, normaliser: float | None, shares: Sequence[Share], ranks: Ranks
) -> tuple[Any, float]:
    """The loss with what it must know of the step, and what the step's sum is divided by.

    Raises:
        DataError: nothing to train on any rank.
        RanksDisagree: other settings on another rank.
        ValueError: a normaliser that is not above 0, or a part of a step that was not told of the whole.
    """
    if ranks.alone and merged is not None:
        loss.check_merged(merged)
        return loss, check_normaliser(loss.merged_normaliser(merged) if normaliser is None else normaliser)
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


def _named(loss: Any) -> str:
    """A loss of ours with its options (ranks must not differ in them), or the name of another."""
    if _is_ours(loss):
        return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(loss))  # every process has a function at another address
    named = loss if hasattr(loss, "__qualname__") else type(loss)
    return f"{named.__module__}.{named.__qualname__}"


def _says(loss: Any, name: str) -> Any:
    found = getattr(loss, name, None)
    return found if isinstance(found, str) else bool(found)


def _sees_all_rows(loss: Any, normaliser: float | None) -> bool:
    """Whether a loss, or its normaliser, is of the whole step's rows and no sum over those of the ranks.

    Of a loss of the user's own nothing is known.
    """
    if getattr(loss, "scope", "trajectory") == "batch" or getattr(loss, "needs_step", False) or not _is_ours(loss):
        return True
    return normaliser is None and type(_within(loss)).for_step.__qualname__ != "Loss.for_step"


def _is_ours(loss: Any) -> bool:
    """Whether a loss counts its rows as the losses of this library do: the normaliser is a sum over rows."""
    found = [getattr(type(one), "normaliser", None) for one in (loss, _within(loss))]
    return all(own is not None and own.__module__.startswith("treetrain.losses") for own in found)


def _within(loss: Any) -> Any:
    """The loss whose normaliser is taken: that of the policy, where a critic's is beside it."""
    return getattr(loss, "policy", loss)

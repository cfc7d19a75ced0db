"""The loss of a run, and the facts it needs in its rows: given, made from rewards, or computed by the run itself."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, Self

import numpy as np

from treetrain import losses
from treetrain.data.advantages import advantages_of_groups
from treetrain.data.columns import columns_of
from treetrain.data.trajectory import Trajectory
from treetrain.errors import DataError
from treetrain.losses import Loss
from treetrain.losses.facts import describe
from treetrain.losses.kto import KTOLoss
from treetrain.losses.policy import ClippedLoss, PolicyLoss
from treetrain.losses.preference import PairLoss
from treetrain.losses.sft import ChosenSFTLoss
from treetrain.train.config import TrainConfig
from treetrain.trainers.watch import Watch, WatchedLoss

OLD, REFERENCE = "old_logprobs", "ref_logprobs"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveSettings:
    """What a loss is made with besides its own options; the settings of a run of these names."""

    advantage_mean: bool = True
    advantage_std: bool = True
    advantage_leave_one_out: bool = False
    advantage_clip: float | None = None
    sft_weight: float | None = None
    old_logprobs: Literal["auto", "recorded", "recompute"] = "auto"
    reference_model: str | None = None
    log_entropy: bool = False
    several_updates: bool = False
    target_kl: float | None = None

    @classmethod
    def of(cls, config: TrainConfig) -> Self:
        """Those of a run."""
        return cls(**{field.name: getattr(config, field.name) for field in dataclasses.fields(cls)})


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """A loss and its rows."""

    loss: Loss
    rows: Sequence[Trajectory]
    notes: tuple[str, ...] = ()
    """What was decided, in words."""
    computed: frozenset[str] = frozenset()
    """Facts that the loss needs and that the run must compute: old_logprobs, ref_logprobs. What the rows have of them
    is not used."""
    watch: Watch | None = None
    """Of a policy loss."""
    from_rewards: bool = False
    """The rows' advantages are made of their rewards."""


def make_objective(
    name: str, options: dict[str, Any], rows: Sequence[Trajectory], settings: ObjectiveSettings | None = None
) -> Objective:
    """A loss by name, and the rows with what it needs.

    Rewards become group advantages where the loss needs advantages and no row has any. Where no row has old
    log-probabilities and a batch is updated once, every update counts as on-policy: the log-probabilities before the
    update are those of the update itself, and computing them first would give the same gradient.

    Args:
        name: of the loss.
        options: its keyword arguments.
        rows: all rows of the run.
        settings: see there.

    Raises:
        ValueError: an unknown loss or option, one out of its range, or a setting that the loss has no use for.
        DataError: nothing to train; a fact that the loss needs and a row lacks, or that only some rows have.
    """
    settings = settings or ObjectiveSettings()
    loss, rows, notes = losses.by_name(name, **options), list(rows), []
    if loss.needs_values:
        raise ValueError(f"the loss {name}, as it is set, needs values, and a run trains no value head")
    _check_use(name, loss, settings)
    columns = columns_of(rows)
    without_advantages = "advantages" in loss.needs_facts and not columns.given["advantages"].any()
    from_rewards = without_advantages and not np.isnan(columns.reward).all()
    if from_rewards:
        rows = _with_advantages(rows, settings)
        notes += _advantage_notes(name, rows, settings)
    computed: set[str] = set()
    if OLD in loss.needs_facts and not _uses_recorded_old(rows, settings):
        if settings.several_updates:
            computed.add(OLD)
            notes.append("old log-probabilities are computed before the first update of every batch")
        else:
            loss = losses.by_name(name, **options, on_policy=True)
            notes.append(f"{_not_used(rows, OLD)}: every update counts as on-policy (ratio 1)")
    elif settings.several_updates and isinstance(loss, PolicyLoss) and OLD not in loss.needs_facts:
        notes.append(f"{name} has no probability ratio: updates after a batch's first one are off-policy, uncorrected")
    if REFERENCE in loss.needs_facts and not _uses_recorded_reference(rows, settings):
        computed.add(REFERENCE)
        policy = settings.reference_model or "the weights that the run begins with"
        notes.append(f"{_not_used(rows, REFERENCE)}: the reference policy is {policy}")
    watch = Watch() if isinstance(loss, PolicyLoss) else None
    loss = _watched(loss, watch, rows, settings) if isinstance(loss, PolicyLoss) and watch is not None else loss
    if settings.sft_weight is not None:
        loss, added_notes = _with_cross_entropy(name, loss, settings.sft_weight)
        notes += added_notes
    loss.normaliser(_filled(rows, computed))
    return Objective(
        loss=loss,
        rows=rows,
        notes=tuple(notes),
        computed=frozenset(computed),
        watch=watch,
        from_rewards=from_rewards,
    )


def _with_cross_entropy(name: str, loss: Loss, weight: float) -> tuple[Loss, list[str]]:
    """A loss with so much cross-entropy beside it, and what is to be said of that."""
    preferences = isinstance(loss, PairLoss | KTOLoss)
    added = ChosenSFTLoss(reduction="token") if preferences else losses.sft()
    mixed = losses.mix({name: loss, "cross_entropy": added}, weights={"cross_entropy": weight})
    return mixed, ["sft_weight: the cross-entropy is that of the chosen rows"] if preferences else []


def _check_use(name: str, loss: Loss, settings: ObjectiveSettings) -> None:
    """Raise ValueError for a setting that would do nothing."""
    if settings.old_logprobs != "auto" and OLD not in loss.needs_facts:
        raise ValueError(
            f"old_logprobs is {settings.old_logprobs!r}, but the loss {name} reads no old log-probabilities"
        )
    if settings.reference_model is not None and REFERENCE not in loss.needs_facts:
        hint = "; give kl above 0" if isinstance(loss, PolicyLoss) else ""
        raise ValueError(
            f"reference_model is {settings.reference_model!r}, but the loss {name}, as it is set, has no reference "
            f"policy{hint}"
        )
    if settings.log_entropy and not isinstance(loss, PolicyLoss):
        raise ValueError(f"log_entropy is true, but {name} is no policy loss, whose metrics have an entropy")
    if settings.target_kl is not None and not isinstance(loss, ClippedLoss):
        raise ValueError(f"target_kl is {settings.target_kl}, but the loss {name} measures no KL from an old policy")


def check_advantages_used(settings: ObjectiveSettings, objective: Objective, name: str) -> None:
    """Raise ValueError for a setting of advantages in a run that makes none of rewards."""
    if objective.from_rewards:
        return
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if field.name.startswith("advantage_") and value != field.default:
            given = columns_of(objective.rows).given["advantages"].any()
            why = "the rows have advantages of their own" if given else f"the loss {name} has none"
            raise ValueError(f"{field.name} is {value!r}, but no advantages are made of rewards: {why}")


def _with_advantages(rows: Sequence[Trajectory], settings: ObjectiveSettings) -> Sequence[Trajectory]:
    advantages = advantages_of_groups(
        rows,
        subtract_mean=settings.advantage_mean,
        divide_by_std=settings.advantage_std,
        leave_one_out=settings.advantage_leave_one_out,
        clip=settings.advantage_clip,
    )
    return [row.replace(advantages=value) for row, value in zip(rows, advantages.tolist(), strict=True)]


def _advantage_notes(name: str, rows: Sequence[Trajectory], settings: ObjectiveSettings) -> list[str]:
    baseline = "less the mean of the group's other episodes" if settings.advantage_leave_one_out else "normalised"
    notes = [f"advantages: the rewards, {baseline} within each group"]
    notes += _groups_without_signal(rows)
    for method, used in (("dr_grpo", name == "dr_grpo"), ("RLOO", settings.advantage_leave_one_out)):
        if used and settings.advantage_std:
            notes.append(f"{method} was published without division by the standard deviation: advantage_std false")
    return notes


def _groups_without_signal(rows: Sequence[Trajectory]) -> list[str]:
    """A note where groups have nothing to compare: a run on them alone would change nothing, silently."""
    columns = columns_of(rows)
    groups, told = len(np.unique(columns.group)), len(np.unique(columns.group[columns.signal]))
    if told == groups:
        return []
    return [
        f"{groups - told} of {groups} groups have one episode or equal rewards: their advantages are 0, "
        "so the policy term learns nothing from them"
    ]


def _uses_recorded_old(rows: Sequence[Trajectory], settings: ObjectiveSettings) -> bool:
    """Whether the rows' own old log-probabilities are used."""
    if settings.old_logprobs == "recompute":
        return False
    recorded = _recorded(rows, OLD, "old_logprobs='recompute' (--old-logprobs recompute) computes those of all rows")
    if not recorded and settings.old_logprobs == "recorded":
        raise DataError(
            "old_logprobs is 'recorded', but no row has old_logprobs; give them, or old_logprobs 'auto', which "
            "computes them where they are needed"
        )
    return recorded


def _uses_recorded_reference(rows: Sequence[Trajectory], settings: ObjectiveSettings) -> bool:
    """Whether the rows' own reference log-probabilities are used."""
    if settings.reference_model is not None:
        return False
    return _recorded(rows, REFERENCE, "a reference_model computes those of all rows")


def _recorded(rows: Sequence[Trajectory], fact: str, remedy: str) -> bool:
    """Whether all trained rows have a fact. Raises DataError where only some have: they would be of two policies."""
    columns = columns_of(rows)
    with_it = np.flatnonzero(columns.trained & columns.given[fact])
    without = np.flatnonzero(columns.trained & ~columns.given[fact])
    if not len(with_it) or not len(without):
        return bool(len(with_it))
    one, other = (describe(rows[number], number) for number in (int(with_it[0]), int(without[0])))
    raise DataError(
        f"{one} has {fact}, {other} has none: {len(with_it)} of {len(with_it) + len(without)} rows have them, and "
        f"computing the others would mix two policies. Give all rows theirs, or none; {remedy}"
    )


def _not_used(rows: Sequence[Trajectory], fact: str) -> str:
    given = columns_of(rows).given[fact].any()
    return f"the rows' {fact} are not used" if given else f"the rows have no {fact}"


def _watched(loss: PolicyLoss, watch: Watch, rows: Sequence[Trajectory], settings: ObjectiveSettings) -> WatchedLoss:
    columns = columns_of(rows)
    return WatchedLoss(
        reduction=loss.reduction,
        inner=loss,
        watch=watch,
        log_entropy=settings.log_entropy,
        log_reference=bool(columns.given[REFERENCE][columns.trained].all()),
    )


def _filled(rows: Sequence[Trajectory], computed: set[str]) -> Sequence[Trajectory]:
    """The rows as they will be, for the loss to check before there is a model."""
    if not computed:
        return rows
    return [row.replace(**{fact: np.zeros(len(row)) for fact in computed}) for row in rows]

"""Dr. GRPO: every token counts the same, in long and in short answers, in easy and in hard groups."""

import dataclasses
from collections.abc import Sequence

from treetrain.data.trajectory import Trajectory
from treetrain.losses.base import check_positive
from treetrain.losses.facts import MergedRows, Reduction
from treetrain.losses.importance import ImportanceMode
from treetrain.losses.kl import KLEstimator
from treetrain.losses.policy import ClippedLoss, clip_bounds


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DrGRPOLoss(ClippedLoss):
    """The clipped surrogate summed over tokens, divided by rows times a constant length. Made by `dr_grpo`."""

    reduction: Reduction = dataclasses.field(default="token", init=False, repr=False)

    length: float
    """What every trained row counts in the normaliser."""

    def __post_init__(self) -> None:
        ClippedLoss.__post_init__(self)
        check_positive("length", self.length)

    @property
    def sums_tokens(self) -> bool:
        return False  # it divides by the number of rows

    def total_weight(self, trajectories: Sequence[Trajectory]) -> float:
        """Trained rows times `length`. Raises DataError for a negative weight."""
        ClippedLoss.total_weight(self, trajectories)
        return self.length * sum(bool(row.weights.any()) for row in trajectories)

    def merged_weight(self, merged: MergedRows) -> float:
        """As `total_weight`."""
        return self.length * merged.num_trained


def dr_grpo(
    *,
    length: float,
    clip: float = 0.2,
    clip_low: float | None = None,
    clip_high: float | None = None,
    kl: float = 0.0,
    kl_estimator: KLEstimator = "k3",
    entropy: float = 0.0,
    importance_cap: float | None = None,
    importance_mode: ImportanceMode = "token_truncate",
    on_policy: bool = False,
) -> DrGRPOLoss:
    """GRPO done right (arXiv 2503.20783, section 3): no division by an answer's length, nor by a group's deviation.

    The sum over all weighted tokens of the clipped surrogate (and of KL and entropy), divided by the number of trained
    rows times `length`. The advantages should be rewards less the mean of the group, not divided by its standard
    deviation: `group_advantages(..., divide_by_std=False)`.

    Args:
        length: the most tokens that an answer may have, the same number in every step of a run.
        clip, clip_low, clip_high, kl, kl_estimator, entropy, importance_cap, importance_mode, on_policy: as `ppo`.

    Metrics: as `ppo`, means over tokens.

    Raises:
        ValueError: an argument out of its range.
    """
    low, high = clip_bounds(clip, clip_low, clip_high)
    return DrGRPOLoss(
        length=length,
        clip_low=low,
        clip_high=high,
        kl=kl,
        kl_estimator=kl_estimator,
        entropy=entropy,
        importance_cap=importance_cap,
        importance_mode=importance_mode,
        on_policy=on_policy,
    )

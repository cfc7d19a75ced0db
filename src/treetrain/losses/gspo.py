"""GSPO: the probability ratio of a whole answer in place of its tokens'."""

import dataclasses
from typing import ClassVar, Literal, get_args

from torch import Tensor

from treetrain.losses.base import check_choice
from treetrain.losses.facts import Facts, PackedFacts, Reduction
from treetrain.losses.kl import KLEstimator
from treetrain.losses.policy import ClippedLoss

Level = Literal["sequence", "token"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GSPOLoss(ClippedLoss):
    """The clipped surrogate with r = exp(mean of l - old over the row's tokens). Made by `gspo`."""

    mergeable: ClassVar[bool] = False
    reduction: Reduction = dataclasses.field(default="trajectory", init=False, repr=False)

    level: Level
    """Whether the gradient goes through the row's r, or through each token's own l with r as its factor."""

    def __post_init__(self) -> None:
        ClippedLoss.__post_init__(self)
        check_choice("level", self.level, get_args(Level))

    def log_ratio(self, differences: Tensor, facts: Facts) -> Tensor:
        assert isinstance(facts, PackedFacts)
        mean = facts.sum_by_row(facts.shares("trajectory") * differences)[facts.rows]
        if self.level == "sequence":
            return mean
        return mean.detach() + (differences - differences.detach())

    def credit(self, facts: Facts) -> Tensor:
        if self.level == "token":
            return facts.advantages
        assert isinstance(facts, PackedFacts)
        return facts.sum_by_row(facts.shares("trajectory") * facts.advantages)[facts.rows]


def gspo(
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    kl: float = 0.0,
    kl_estimator: KLEstimator = "k3",
    entropy: float = 0.0,
    on_policy: bool = False,
    level: Level = "sequence",
) -> GSPOLoss:
    """Group sequence policy optimisation (arXiv 2507.18071, eq. 5 to 7): -min(s A, clip(s) A), the mean over rows.

    s = exp(sum of w (l - old) / sum of w) over the row's tokens, w being the loss weights: the likelihood ratio of
    the row, to the power of 1 / length. KL and entropy are means over the row's tokens, then over rows.

    Args:
        clip_low, clip_high: s is followed from 1 - clip_low to 1 + clip_high; much narrower than a token's ratio,
            since s is a mean. The defaults are the paper's (section 5.1).
        kl, kl_estimator, entropy, on_policy: as `ppo`.
        level: "sequence", or "token" (GSPO-token, eq. 13 to 17): s has the same value, but each token's gradient is
            weighted by its own advantage. Both are equal where a row's tokens have one advantage.

    Metrics: as `ppo`; ratio and clip_fraction are those of rows.

    Raises:
        ValueError: an argument out of its range.
    """
    return GSPOLoss(
        clip_low=clip_low,
        clip_high=clip_high,
        kl=kl,
        kl_estimator=kl_estimator,
        entropy=entropy,
        on_policy=on_policy,
        level=level,
    )

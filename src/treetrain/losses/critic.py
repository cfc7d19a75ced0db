"""Losses on values that the model predicts: a critic by itself, and a policy with a critic on the same trunk.

v = the value predicted for the state before a token, R = its return, both in the unit of the rewards.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from treetrain.data.trajectory import Trajectory
from treetrain.losses.base import Loss, Metrics, check_number, check_positive
from treetrain.losses.facts import Facts, MergedRows, Reduction
from treetrain.losses.value import value_loss


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ValueLoss(Loss):
    """The clipped value loss alone. Made by `value`."""

    clip: float | None
    """How far a value may move from the old one; None for the plain square."""

    def __post_init__(self) -> None:
        Loss.__post_init__(self)
        if self.clip is not None:
            check_number("clip", self.clip, 0.0, math.inf)

    @property
    def mergeable(self) -> bool:
        return True  # it does not read the advantage

    @property
    def needs_logprobs(self) -> bool:
        return False

    @property
    def needs_values(self) -> bool:
        return True

    @property
    def needs_facts(self) -> tuple[str, ...]:
        return ("returns",) if self.clip is None else ("returns", "values")

    def evaluate(self, logprobs: Tensor, entropies: Tensor | None, facts: Facts) -> tuple[Tensor, Metrics]:
        raise AssertionError("a loss on values is evaluated with values")

    def evaluate_valued(
        self, logprobs: Tensor, entropies: Tensor | None, values: Tensor, facts: Facts
    ) -> tuple[Tensor, Metrics]:
        return value_loss(values, facts, clip=self.clip, reduction=self.reduction)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ActorCriticLoss(Loss):
    """A loss of the policy plus a coefficient times a value loss. Made by `actor_critic`, and by `ppo`."""

    reduction: Reduction = dataclasses.field(default="token", init=False)
    policy: Loss
    critic: ValueLoss
    coefficient: float
    """Of the value loss."""

    def __post_init__(self) -> None:
        check_positive("value_coefficient", self.coefficient)
        object.__setattr__(self, "reduction", self.policy.reduction)

    @property
    def scope(self) -> Literal["trajectory", "batch"]:
        return self.policy.scope

    @property
    def mergeable(self) -> bool:
        return self.policy.mergeable

    @property
    def sums_tokens(self) -> bool:
        return self.policy.sums_tokens

    @property
    def needs_entropy(self) -> bool:
        return self.policy.needs_entropy

    @property
    def needs_values(self) -> bool:
        return True

    @property
    def needs_facts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.policy.needs_facts, *self.critic.needs_facts)))

    @property
    def needs_step(self) -> bool:
        return self.policy.needs_step

    def for_step(self, trajectories: Sequence[Trajectory]) -> "ActorCriticLoss":
        return dataclasses.replace(self, policy=self.policy.for_step(trajectories))

    def total_weight(self, trajectories: Sequence[Trajectory]) -> float:
        return self.policy.total_weight(trajectories)

    def merged_weight(self, merged: MergedRows) -> float:
        return self.policy.merged_weight(merged)

    def check(self, trajectories: Sequence[Trajectory]) -> None:
        """Raise DataError for a row that lacks what the policy's loss or the value loss needs."""
        self.policy.check(trajectories)
        self.critic.check(trajectories)

    def normaliser(self, trajectories: Sequence[Trajectory]) -> float:
        """That of the policy's loss."""
        self.critic.check(trajectories)
        return self.policy.normaliser(trajectories)

    def evaluate(self, logprobs: Tensor, entropies: Tensor | None, facts: Facts) -> tuple[Tensor, Metrics]:
        raise AssertionError("a loss on values is evaluated with values")

    def evaluate_valued(
        self, logprobs: Tensor, entropies: Tensor | None, values: Tensor, facts: Facts
    ) -> tuple[Tensor, Metrics]:
        policy, seen = self.policy.evaluate(logprobs, entropies, facts)
        critic, watched = self.critic.evaluate_valued(logprobs, entropies, values, facts)
        return policy + self.coefficient * critic, seen | watched


def value(*, clip: float | None = 0.2, reduction: Reduction = "token") -> ValueLoss:
    """A critic's loss: PPO's clipped value loss (see `value_loss`) on values that the model predicts.

    For a model for token classification with one label, or a value head on a causal LM (`TreeEngine(model,
    value_head=...)`). A row's entry t is about the state before its token t: the value is predicted from the hidden
    state of token t - 1, `returns[t]` is what it should be, `values[t]` what it was when the row was sampled.

    Args:
        clip: how far a value may move from the old one, 0 or more; None for (v - R)^2 / 2, without `values`.
        reduction: "token" (default), the mean over all tokens; "trajectory", over each row's tokens first.

    Metrics: those of `value_loss`.

    Raises:
        ValueError: an argument out of its range.
    """
    return ValueLoss(clip=clip, reduction=reduction)


def actor_critic(policy: Loss, *, value_coefficient: float = 0.5, value_clip: float | None = 0.2) -> ActorCriticLoss:
    """A loss of the policy with a value loss beside it, both from one pass through a shared trunk.

    Args:
        policy: such as `ppo()`, `reinforce()` (advantage actor-critic), `grpo()`: one whose rows are weighed by token
            or by trajectory; the value loss is weighed and divided likewise.
        value_coefficient: what the value loss is multiplied by, above 0.
        value_clip: see `value`.

    Metrics: those of the policy's loss and of `value_loss`.

    Raises:
        ValueError: an argument out of its range, or a loss that needs values already or is no mean over predictions.
    """
    if not isinstance(policy, Loss) or policy.needs_values or not hasattr(policy, "policy_term"):
        raise ValueError(
            f"actor_critic was given {type(policy).__name__}; give a policy loss such as ppo() or reinforce()"
        )
    return ActorCriticLoss(
        policy=policy,
        critic=ValueLoss(clip=value_clip, reduction=policy.reduction),
        coefficient=value_coefficient,
    )

"""How a batch spreads over experts, and whether a model means the same by its auxiliary loss.

Shape letters: n tokens of a pass, E experts.
"""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from treetrain.errors import UnsupportedModel

FORMULA_TOLERANCE = 1e-2
"""Relative, between the model's own auxiliary loss of a pass and this one of the same logits: as far apart as two
orders of summation may be in bfloat16, and much closer than another formula would be. So for its gradient."""
ROUNDINGS = 8
"""Roundings of the gradient of a probability, which nearly cancel in the gradient of a logit where all experts are
chosen about as often."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RouterBalance:
    """How a batch spreads over the experts, summed over layers and trajectories; batches add up."""

    choices: Tensor
    """float64 [E]: how often each expert is chosen."""
    probabilities: Tensor
    """float64 [E]: sums of the routers' probabilities."""
    tokens: float
    """Tokens of all rows times layers with experts."""

    def __add__(self, other: Self) -> "RouterBalance":
        return RouterBalance(
            choices=self.choices + other.choices,
            probabilities=self.probabilities + other.probabilities,
            tokens=self.tokens + other.tokens,
        )

    def to(self, device: torch.device | str) -> "RouterBalance":
        """The same on another device."""
        return RouterBalance(
            choices=self.choices.to(device), probabilities=self.probabilities.to(device), tokens=self.tokens
        )

    @property
    def loss(self) -> Tensor:
        """The auxiliary loss of a step of these tokens, before its coefficient; float64."""
        return self.share_of(self)

    def share_of(self, whole: "RouterBalance") -> Tensor:
        """What these tokens contribute to the auxiliary loss of a step that they are a part of."""
        spread = (whole.choices / whole.tokens) @ (self.probabilities / whole.tokens)
        return spread * len(self.choices)

    @classmethod
    def of(
        cls, probabilities: Tensor, top_k: int, weights: Tensor | None = None, tokens: float | None = None
    ) -> "RouterBalance":
        """Of one router's pass.

        Args:
            probabilities: [n, E].
            weights: [n]: how often each token counts; None: once.
            tokens: the sum of the weights: asking a GPU for it would wait for all that it has to do.
        """
        assert (weights is None) == (tokens is None)
        chosen = probabilities.topk(top_k, dim=-1).indices
        weights = probabilities.new_ones(len(probabilities)) if weights is None else weights
        weights = weights.double()
        return cls(
            choices=weights.new_zeros(probabilities.shape[-1]).index_add_(
                0, chosen.flatten(), weights.repeat_interleave(top_k)
            ),
            probabilities=weights @ probabilities.double(),
            tokens=float(len(probabilities)) if tokens is None else tokens,
        )


class OwnAuxiliary:
    """The model's own auxiliary loss of one pass, held against the formula: its value and its gradient.

    A value alone does not tell: a loss that is detached, or scaled in its gradient only, trains otherwise. There is no
    gradient to compare without a graph, under reentrant checkpoints (which hide it), and where somebody waits for the
    step's backward at the model's outputs (FSDP, which would take this for it).
    """

    def __init__(self) -> None:
        self._whole: RouterBalance | None = None
        self._live: list[tuple[Tensor, Tensor]] = []

    def note(self, logits: Tensor, probabilities: Tensor, top_k: int) -> Tensor:
        """One router's [n, E]; every token counts once.

        Returns:
            The logits that the model's own loss must be given: a node of the graph that nothing else hangs on, so that
            the gradient found there is that of the loss alone and not also by way of the layers above.
        """
        found = RouterBalance.of(probabilities.detach(), top_k)
        self._whole = found if self._whole is None else self._whole + found
        if not (torch.is_grad_enabled() and logits.requires_grad):
            return logits
        alone = logits.view_as(logits)
        self._live.append((alone, probabilities.detach()))
        return alone

    def check(self, own: Any) -> None:
        """Compare.

        Args:
            own: what the model's forward returned as its auxiliary loss.

        Raises:
            UnsupportedModel: there is none, or it is another one.
        """
        assert self._whole is not None, "no router was called"
        ours, theirs = float(self._whole.loss), None if own is None else float(own.detach())
        if own is None or theirs is None or abs(ours - theirs) > FORMULA_TOLERANCE * abs(theirs):
            raise UnsupportedModel(
                f"the model's own auxiliary loss of a pass is {theirs}, by the formula of the Switch Transformer it is "
                f"{ours:.6g}; this one is not supported: set config.output_router_logits=False to train without it."
            )
        if self._live and not own._backward_hooks:
            self._check_slope(own)

    def _check_slope(self, own: Tensor) -> None:
        logits = [logits for logits, _ in self._live]
        theirs = _gradients(own, logits)
        distance, size, terms = (torch.zeros((), dtype=torch.float64, device=own.device) for _ in range(3))
        assert self._whole is not None
        slope = len(self._whole.choices) * self._whole.choices / self._whole.tokens**2
        for (_, probabilities), found in zip(self._live, theirs, strict=True):
            share = probabilities.double() * slope
            ours = share - probabilities.double() * share.sum(-1, keepdim=True)
            distance += (ours - found.double()).square().sum()
            size += ours.square().sum()
            terms += share.square().sum()
        rounding = ROUNDINGS * max(torch.finfo(x.dtype).eps for x in logits)
        bound = FORMULA_TOLERANCE * float(size.sqrt()) + rounding * float(terms.sqrt())
        if not float(distance.sqrt()) <= bound:
            raise UnsupportedModel(
                "the model's own auxiliary loss has the value of the Switch Transformer's formula, but another "
                f"gradient: off by {float(distance.sqrt()):.3g} of {float(size.sqrt()):.3g} at the routers' logits; "
                "this one is not supported: set config.output_router_logits=False to train without it."
            )


def _gradients(own: Tensor, logits: list[Tensor]) -> list[Tensor]:
    """Of the model's own auxiliary loss, by its routers' logits; zeros where it has none."""
    if not own.requires_grad:
        return [torch.zeros_like(x) for x in logits]
    found = torch.autograd.grad(own, logits, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(x) if grad is None else grad for x, grad in zip(logits, found, strict=True)]

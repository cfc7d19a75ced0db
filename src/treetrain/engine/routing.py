"""What a step does with the routers of a mixture of experts: the auxiliary loss, and choices that were recorded.

The auxiliary loss is E * sum over experts of f_e * P_e over all tokens of all rows and all layers with experts at once:
f_e is how often an expert is chosen, P_e its mean probability. A token of the tree counts once per trajectory through
it. The choices have no gradient, so with them known, the gradient of every probability is E * f_e / tokens times that
count, whatever else is in the pass; it is added where the router's weights get theirs, so that it needs no graph of its
own and survives activation checkpointing.

Shape letters: n tokens of a pass, N of the tree, E experts, k of them per token.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from treetrain.device_arrays import on_device
from treetrain.engine.results import Metrics, add_metrics
from treetrain.engine.router_balance import OwnAuxiliary, RouterBalance
from treetrain.errors import UnsupportedModel
from treetrain.models.moe import MixtureOfExperts, Router, as_routed, routers_switched
from treetrain.tree.stats import trajectories_through
from treetrain.tree.token_tree import TokenTree

METRIC = "router_aux_loss"


class Routing:
    """One step over a tree.

    Args:
        balanced: whether there is an auxiliary loss.
        whole: the balance of the whole step, where this is a part of it.
        scale: of the auxiliary loss's gradient.
    """

    def __init__(
        self,
        experts: MixtureOfExperts,
        tree: TokenTree,
        device: torch.device,
        *,
        balanced: bool,
        whole: RouterBalance | None = None,
        scale: float | Tensor = 1.0,
    ):
        self._experts, self._device = experts, device
        self._recorded = by_place(experts, tree.experts)
        self._counts = trajectories_through(tree) if balanced else None
        self.scale, self._given = scale, whole
        self.whole, self.found = whole, None
        self._collects, self._to_verify, self._slope_to_verify = True, balanced, balanced
        self.needed = balanced or self._recorded is not None

    @property
    def balanced(self) -> bool:
        """Whether there is an auxiliary loss."""
        return self._counts is not None

    @property
    def in_parts(self) -> bool:
        """Whether a pass may go backward before all others have been forward."""
        return not self.balanced or self.whole is not None

    def begin(self) -> None:
        """Forget what was found: the passes start over."""
        self.found, self.whole, self._collects = None, self._given, True

    def settle(self) -> None:
        """All tokens have been through the routers: what was found is the whole, if no other was given."""
        self.whole, self._collects = self.whole or self.found, False

    def run(self, tree_index: np.ndarray, *, final: bool) -> "RouterPass":
        """What is done with the routers of one pass.

        Args:
            tree_index: int64 [n]: its tokens.
            final: whether these tokens are counted by no other pass of the same kind.
        """
        recorded = None if self._recorded is None else on_device(self._recorded[tree_index], self._device)
        own = None if self._counts is None else self._counts[tree_index]
        counts = None if own is None else on_device(own, self._device)
        collects = final and self._collects and counts is not None
        tokens = 0.0 if own is None else float(own.sum())
        return RouterPass(self, self._experts, recorded, counts, tokens=tokens, collects=collects)

    def own_auxiliary(self, *, collects: bool) -> OwnAuxiliary | None:
        """What compares the model's own auxiliary loss of a pass that begins now; None where there is nothing left
        to compare: its value in the first pass, its gradient in the first that has one."""
        slope = self._slope_to_verify and torch.is_grad_enabled()
        return OwnAuxiliary() if slope or (collects and self._to_verify) else None

    def verified(self) -> None:
        """A pass's own auxiliary loss was the one that is computed here."""
        self._to_verify = False
        self._slope_to_verify = self._slope_to_verify and not torch.is_grad_enabled()

    def idle_run(self, tokens: int) -> "RouterPass":
        """What is done with the routers of a pass over so many tokens that count for nothing."""
        counts = None if self._counts is None else torch.zeros(tokens, dtype=torch.int64, device=self._device)
        return RouterPass(self, self._experts, None, counts, tokens=0.0, collects=False)

    def add(self, found: RouterBalance | None) -> None:
        """Take note of a pass that fitted."""
        if found is not None:
            self.found = found if self.found is None else self.found + found

    @property
    def balance(self) -> RouterBalance:
        """What was found."""
        if self.found is None:
            none = torch.zeros(self._experts.experts or 0, dtype=torch.float64, device=self._device)
            return RouterBalance(choices=none, probabilities=none, tokens=0.0)
        return self.found

    @property
    def loss(self) -> Tensor:
        """float64: these tokens' share of the auxiliary loss, before its coefficient."""
        if self.found is None:
            return torch.zeros((), dtype=torch.float64)
        return self.found.share_of(self.whole or self.found)

    def added_to(self, total: Any, sums: Metrics) -> tuple[Any, Metrics]:
        """A step's loss and metrics with the auxiliary loss."""
        if not self.balanced:
            return total, sums
        # Parts and ranks have shares of one loss, so their weights add up to 1.
        part = 1.0 if self.whole is None or self.found is None else self.found.tokens / self.whole.tokens
        return total + self.scale * self.loss, add_metrics(sums, {METRIC: (self.loss, part)})

    def slope(self, counts: Tensor) -> Tensor:
        """[n, E]: d loss / d probability of some tokens, float64."""
        whole = self.whole or self.found
        assert whole is not None, "a backward before any token was counted"
        factor = self.scale * len(whole.choices) / whole.tokens**2
        return counts.double()[:, None] * (factor * whole.choices)


def check_auxiliary(experts: MixtureOfExperts | None, wanted: bool) -> None:
    """Raise ValueError where a model's auxiliary loss would be forgotten, or one is wanted that there is none of."""
    if wanted and experts is None:
        raise ValueError("return_aux=True, but the model has no experts; leave it out")
    if not wanted and experts is not None and experts.auxiliary:
        raise ValueError(
            "the model's configuration asks for its routers' auxiliary loss (output_router_logits=True, "
            f"router_aux_loss_coef={experts.auxiliary:g}), which log-probabilities do not hold: pass return_aux=True "
            "and add the coefficient times what it gives to your loss, or set config.output_router_logits=False"
        )


def switched(
    model: nn.Module, experts: MixtureOfExperts | None, routing: Routing | None
) -> AbstractContextManager[None]:
    """Routers in the hands of a step that needs them, for the length of a block."""
    if experts is None or routing is None or not routing.needed:
        return nullcontext()
    return routers_switched(model, experts)


def by_place(experts: MixtureOfExperts, recorded: np.ndarray | None) -> np.ndarray | None:
    """int64 [N, places, k]: recorded experts by layer with experts; None where there are none.

    Args:
        recorded: [N, layers, k] of the layers with experts or of all, or None.
    """
    if recorded is None or not (recorded >= 0).any():
        return None
    recorded = recorded.astype(np.int64)
    return recorded if recorded.shape[1] == experts.places else recorded[:, list(experts.layer_numbers)]


class RouterPass:
    """One pass: what its routers do."""

    def __init__(
        self,
        routing: Routing,
        experts: MixtureOfExperts,
        recorded: Tensor | None,
        counts: Tensor | None,
        *,
        tokens: float,
        collects: bool,
    ):
        self._routing, self._experts, self._recorded, self._counts = routing, experts, recorded, counts
        self._tokens, self._collects = tokens, collects
        self._found: RouterBalance | None = None
        self._own: OwnAuxiliary | None = None
        self._seen: set[int] = set()

    def begin(self) -> dict[str, Any]:
        """Arguments of the model's forward, which follows: whether it should compute its own auxiliary loss."""
        if self._counts is None:
            return {}
        self._own = self._routing.own_auxiliary(collects=self._collects)
        return {"output_router_logits": self._own is not None}

    def route(self, router: Router, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """In place of a router's forward, also when activation checkpointing runs it again."""
        self._seen.add(router.place)
        if self._recorded is None:
            output = forward(*args, **kwargs)
        else:
            output = route_as_recorded(router, self._recorded[:, router.place], self._experts, forward, *args, **kwargs)
        if self._counts is None:
            return output
        routed = as_routed(router, output, len(self._counts))
        probabilities = routed.logits.softmax(-1)
        top_k = routed.chosen.shape[-1]
        logits = routed.logits if self._own is None else self._own.note(routed.logits, probabilities, top_k)
        if self._collects:
            found = RouterBalance.of(probabilities.detach(), top_k, self._counts, self._tokens)
            self._found = found if self._found is None else self._found + found
        if not (torch.is_grad_enabled() and probabilities.requires_grad):
            return output
        weights = _Balanced.apply(routed.weights, probabilities, self._counts, self._routing)
        return logits, weights, routed.chosen

    def close(self, outputs: Any) -> None:
        """The forward is done: what it found counts, and what is run again from now on does not.

        Raises:
            UnsupportedModel: a router that was not called, or another auxiliary loss than this one.
        """
        self._collects = False
        if len(self._seen) != self._experts.places:
            raise UnsupportedModel(
                f"{len(self._seen)} of {self._experts.places} routers were called; something (a fused kernel?) goes "
                "past the others, so their auxiliary loss and recorded experts are not supported."
            )
        if self._own is not None:
            own, self._own = self._own, None
            own.check(getattr(outputs, "aux_loss", None))
            self._routing.verified()
        self._routing.add(self._found)


class _Balanced(torch.autograd.Function):
    """A router's weights as they are; their backward gives its probabilities the auxiliary loss's gradient."""

    @staticmethod
    def forward(ctx, weights: Tensor, probabilities: Tensor, counts: Tensor, routing: Routing):
        ctx.counts, ctx.routing, ctx.dtype = counts, routing, probabilities.dtype
        return weights.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return grad, ctx.routing.slope(ctx.counts).to(ctx.dtype), None, None


def route_as_recorded(
    router: Router,
    recorded: Tensor,
    experts: MixtureOfExperts,
    forward: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """What a router's forward gives where it takes recorded experts.

    Args:
        recorded: int64 [n, k]; -1 leaves a token to the router.

    Raises:
        UnsupportedModel: a router that does not choose by one torch.topk.
    """
    with _Recorded(recorded, experts.experts or 0) as choice:
        output = forward(*args, **kwargs)
    choice.check(router)
    return output


class _Recorded(TorchFunctionMode):
    """The choice of the k best of E experts gives the recorded ones; what a router does with them is its own.

    Args:
        recorded: int64 [n, k]; -1 leaves a token to the router.
        experts: E.
    """

    def __init__(self, recorded: Tensor, experts: int):
        super().__init__()
        self._recorded, self._experts, self._times = recorded, experts, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if func not in (torch.topk, torch.Tensor.topk):
            return found
        source = args[0] if args else kwargs["input"]
        if found.indices.shape != self._recorded.shape or source.shape[-1] != self._experts:
            return found
        self._times += 1
        chosen = torch.where(self._recorded < 0, found.indices, self._recorded)
        return torch.return_types.topk((source.gather(-1, chosen), chosen))

    def check(self, router: Router) -> None:
        """Raise UnsupportedModel unless there was one such choice."""
        if self._times != 1:
            k = self._recorded.shape[-1]
            raise UnsupportedModel(
                f"{router.name} ({type(router.module).__name__}) makes {self._times} choices of {k} out of "
                f"{self._experts} experts by torch.topk, where one was expected: its recorded experts cannot be used. "
                "Leave `experts` out."
            )

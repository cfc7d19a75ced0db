"""The routers of a mixture of experts in a step: their auxiliary loss, and recorded choices.

The auxiliary loss is E times the sum of f_e * P_e over the experts. f_e is how often an expert is chosen and P_e its
mean probability, both over all tokens of all rows and all layers with experts at once (Switch Transformer, arXiv
2101.03961, equation 4). A token of the tree counts once per trajectory through it.

The loss is over all tokens, but the choices have no gradient. So once all choices are known, the gradient of every
probability is E * f_e / tokens times the token's count, in whichever pass the token is. The backward of the router's
output weights adds it, so it needs no graph of its own and works with activation checkpointing.

Shape letters: n tokens of a pass, N of the tree, E experts, k of them per token, P layers with experts.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float, Float64, Int, Int64
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode
from transformers.utils.generic import ModelOutput

from treetrain.core.device_arrays import on_device
from treetrain.core.engine.extension import LossExtension, ModelPass
from treetrain.core.engine.loss_gradients import name_through
from treetrain.core.errors import DataError, UnsupportedModel
from treetrain.core.head.lm_head import Scores
from treetrain.core.hf.tree_mode import TreeRun, instance_of, replaced
from treetrain.core.losses.facts import Metrics, add_metrics
from treetrain.core.planning.plan import Plan
from treetrain.core.tree.token_tree import TokenTree, trajectories_through
from treetrain.layers.enclosing_runs import enclosing_runs
from treetrain.layers.experts.recorded import recorded_experts
from treetrain.layers.experts.routers import MixtureOfExperts, Router
from treetrain.parallel.context_parallel import Share

METRIC = "router_aux_loss"
FORMULA_TOLERANCE = 1e-2
"""Allowed relative difference between the model's own auxiliary loss of a pass and this module's loss of the same
logits. Another order of summation in bfloat16 stays within it; another formula does not."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RouterBalance:
    """Counts how a batch spreads over the experts, over all layers and trajectories. Balances of batches add up."""

    choices: Float64[Tensor, " E"]
    """How often each expert is chosen."""
    probabilities: Float64[Tensor, " E"]
    """Sums of the routers' probabilities."""
    tokens: float
    """Tokens of all rows times layers with experts."""

    def compared(self) -> object:
        """See `StepBalance`."""
        return self.tokens, self.choices.tolist()

    def __add__(self, other: "RouterBalance") -> "RouterBalance":
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
    def loss(self) -> Float64[Tensor, ""]:
        """The auxiliary loss of a step of these tokens, before its coefficient."""
        return self.share_of(self)

    def share_of(self, whole: "RouterBalance") -> Float64[Tensor, ""]:
        """Return these tokens' share of the auxiliary loss of a whole step."""
        return (whole.choices / whole.tokens) @ (self.probabilities / whole.tokens) * len(self.choices)

    @property
    def slope(self) -> Float64[Tensor, " E"]:
        """The gradient of the loss with respect to a token's probabilities; 0 without tokens (a rank without rows)."""
        return (len(self.choices) / max(self.tokens, 1) ** 2) * self.choices

    @classmethod
    def of(
        cls,
        probabilities: Float[Tensor, "n E"],
        top_k: int,
        weights: Int[Tensor, " n"] | None = None,
        tokens: float | None = None,
    ) -> "RouterBalance":
        """The balance of one router's pass.

        Args:
            weights: how often each token counts; None: once.
            tokens: the sum of the weights; computing it here would wait for a GPU's queued work.
        """
        assert (weights is None) == (tokens is None)
        chosen = probabilities.topk(top_k, dim=-1).indices
        weights = (probabilities.new_ones(len(probabilities)) if weights is None else weights).double()
        return cls(
            choices=weights.new_zeros(probabilities.shape[-1]).index_add_(
                0, chosen.flatten(), weights.repeat_interleave(top_k)
            ),
            probabilities=weights @ probabilities.double(),
            tokens=float(len(probabilities)) if tokens is None else tokens,
        )


class Experts(LossExtension):
    """The routers during one call over a tree.

    Args:
        balanced: whether there is an auxiliary loss.
        whole: the balance of the whole step, if this is a part of it.
        scale: multiplies the auxiliary loss and its gradient.
    """

    verified = False
    """Whether the model's own auxiliary loss of a pass agreed with the formula."""

    def __init__(
        self,
        model: nn.Module,
        experts: MixtureOfExperts,
        tree: TokenTree,
        device: torch.device,
        *,
        balanced: bool,
        whole: RouterBalance | None = None,
        scale: float | Tensor = 1.0,
    ):
        self.experts = experts
        self._model = model
        self._device = device
        self._recorded = by_place(experts, recorded_experts(tree))
        self._counts = trajectories_through(tree) if balanced else None
        self.balanced = self.adds = balanced
        self.scale, self.whole = scale, whole
        zeros = [torch.zeros(experts.experts or 0, dtype=torch.float64, device=device) for _ in range(2)]
        self.balance = RouterBalance(choices=zeros[0], probabilities=zeros[1], tokens=0.0)
        """The balance of the passes so far."""
        self._collects = True
        self._gradients = False
        self._scored_first = False

    def begin(self, plan: Plan, *, gradients: bool, idle_pass: Callable[[], Scores]) -> None:
        self._gradients, self._scored_first = gradients, plan.scores_first == "kept"

    @contextmanager
    def around(self, *, graph: bool, backward: bool) -> Iterator[None]:
        """Inside the block, pass every router call to the current run.

        Raises:
            UnsupportedModel: within the block, when a router is called outside of any run.
        """
        routers = self.experts.routers
        with enclosing_runs(self._model, [router.module for router in routers]) as run, ExitStack() as stack:
            for router in routers:
                forward = partial(_in_run, run, router, router.module.forward)
                stack.enter_context(replaced(router.module, forward=forward))
            yield

    def before_forward(self, model_pass: ModelPass) -> None:
        part = model_pass.part
        # A token may pass twice in a run, and is counted once. A recomputed part counts when it runs with graph, not in
        # its prefill. Where all parts are scored before the loss is known, the balance is needed by then, so the first
        # pass counts, whether it keeps a graph or not.
        counts = part.graph or not self._gradients or self._scored_first
        routers = (
            self._idle(part.piece.layout.num_tokens)
            if model_pass.idle
            else self._pass_over(part.piece.layout.tree_index, counts=counts)
        )
        share = instance_of(Share, model_pass.extras)
        routers = routers if share is None else routers.of_share(share)
        model_pass.extras.append(routers)
        model_pass.keywords |= routers.begin()

    def after_forward(self, model_pass: ModelPass, outputs: ModelOutput, scores: Scores) -> Scores:
        routers = instance_of(RouterPass, model_pass.extras)
        assert routers is not None
        routers.close(outputs)
        return scores

    def _pass_over(self, tree_index: Int[np.ndarray, " n"], *, counts: bool) -> "RouterPass":
        recorded = None if self._recorded is None else on_device(self._recorded[tree_index], self._device)
        if self._counts is None:
            return RouterPass(self, recorded, None)
        rows = self._counts[tree_index]  # a token counts as often as rows go through it
        collects = counts and self._collects
        return RouterPass(self, recorded, on_device(rows, self._device), float(rows.sum()), collects)

    def _idle(self, tokens: int) -> "RouterPass":
        counts = torch.zeros(tokens, dtype=torch.int64, device=self._device) if self.balanced else None
        return RouterPass(self, None, counts)

    # ---- the auxiliary loss

    @property
    def known(self) -> bool:
        return not self.balanced or self.whole is not None

    def settle(self) -> None:
        self._collects = False
        if self.whole is None and self.balance.tokens:
            self.whole = self.balance

    @property
    def loss(self) -> Float64[Tensor, ""]:
        """These tokens' share of the auxiliary loss, before its coefficient."""
        return self.balance.share_of(self.whole or self.balance) if self.balance.tokens else self.balance.choices.sum()

    def added_to(self, total: Tensor | float, sums: Metrics) -> tuple[Tensor | float, Metrics]:
        if not self.balanced:
            return total, sums
        # Parts and ranks have shares of one loss, so their weights add up to 1.
        part = 1.0 if self.whole is None else self.balance.tokens / self.whole.tokens
        return total + self.scale * self.loss, add_metrics(sums, {METRIC: (self.loss, part)})

    def slope(self, counts: Int[Tensor, " n"]) -> Float64[Tensor, "n E"]:
        """d loss / d probability for some tokens."""
        return counts.double()[:, None] * (self.scale * (self.whole or self.balance).slope)


def check_recorded(tree: TokenTree, experts: MixtureOfExperts | None) -> None:
    """Check that recorded experts are those of the model.

    Raises:
        DataError: naming the trajectory, both values and what to do.
    """
    recorded = recorded_experts(tree)
    if recorded is None or not (recorded >= 0).any():
        return
    if experts is None:
        raise DataError(
            "rows have recorded experts, but no router of the model returns the experts it chose; leave `experts` out"
        )
    if experts.ambiguous:
        raise DataError(
            "rows have recorded experts, but the model chooses experts more than once in a layer, and no tool says in "
            "which order it records these choices; leave `experts` out"
        )
    layers, each = recorded.shape[1:]
    if layers not in (experts.places, experts.layers) or each != experts.top_k:
        raise DataError(
            f"rows have {each} recorded experts in {layers} layers; the model has {experts.layers} layers, of which "
            f"{experts.places} choose {experts.top_k} experts: give [L, {experts.places} or {experts.layers}, "
            f"{experts.top_k}]"
        )
    if experts.experts is None or int(recorded.max()) >= experts.experts:
        name, token = name_through(tree, np.any(recorded >= (experts.experts or 0), axis=(1, 2)))
        raise DataError(
            f"{name}: recorded expert {recorded.max()} at position {tree.depth[token]}, but the model "
            f"has {experts.experts} experts, numbered from 0; were the rows sampled by another model?"
        )


def has_work(experts: MixtureOfExperts, tree: TokenTree, *, balanced: bool) -> bool:
    """Whether routers must be watched or told something: for an auxiliary loss, or recorded choices."""
    return balanced or by_place(experts, recorded_experts(tree)) is not None


def _in_run(
    current_run: Callable[[], TreeRun | None],
    router: Router,
    forward: Callable[..., object],
    *args: object,
    **kwargs: object,
) -> object:
    run = current_run()
    if run is None:
        raise UnsupportedModel(
            f"{router.name} was called outside of a layer that is told the tree run (by activation checkpointing of a "
            "part of a layer?), so its recorded experts and auxiliary loss are not known; put the checkpointing around "
            "whole layers."
        )
    routers = instance_of(RouterPass, run.extras)
    return forward(*args, **kwargs) if routers is None else routers.route(router, forward, *args, **kwargs)


def by_place(
    experts: MixtureOfExperts, recorded: Int[np.ndarray, "N layers k"] | None
) -> Int64[np.ndarray, "N P k"] | None:
    """Recorded experts for the layers with experts only; None if nothing is recorded.

    Args:
        recorded: for the layers with experts, or for all layers.
    """
    if recorded is None or not (recorded >= 0).any():
        return None
    recorded = recorded.astype(np.int64)
    return recorded if recorded.shape[1] == experts.places else recorded[:, list(experts.layer_numbers)]


@dataclass
class RouterPass:
    """The routers during one pass."""

    routing: Experts
    recorded: Int64[Tensor, "n P k"] | None
    """Recorded experts."""
    counts: Int64[Tensor, " n"] | None
    """Trajectories through each token; None without an auxiliary loss."""
    tokens: float = 0.0
    """The sum of the counts."""
    collects: bool = False
    """Whether these tokens are counted."""
    compares: bool = False
    """Whether the model's own auxiliary loss is compared with the formula."""
    own: RouterBalance | None = None
    """The balance behind the model's own loss, where every token counts once."""
    seen: set[int] = field(default_factory=set)
    """The places of the routers that were called."""
    share: Share | None = None
    """This rank's tokens, where context-parallel ranks divide the pass."""
    balance: RouterBalance | None = None
    """The balance of the tokens counted in this pass so far."""

    def of_share(self, share: Share) -> "RouterPass":
        """Make this pass for one rank's tokens only; padding tokens count 0."""
        return replace(
            self, recorded=share.of_tokens(self.recorded, -1), counts=share.of_tokens(self.counts, 0), share=share
        )

    def begin(self) -> dict[str, bool]:
        """Call before the model's forward. Returns arguments for it: whether it computes its own auxiliary loss."""
        if self.counts is None:
            return {}
        self.compares = self.collects and not self.routing.verified
        return {"output_router_logits": self.compares}

    def route(self, router: Router, forward: Callable[..., object], *args: object, **kwargs: object) -> object:
        """Replaces a router's forward, also when activation checkpointing runs it again."""
        self.seen.add(router.place)
        if self.recorded is None:
            output = forward(*args, **kwargs)
        else:
            output = route_as_recorded(
                router, self.recorded[:, router.place], self.routing.experts, forward, *args, **kwargs
            )
        if self.counts is None:
            return output
        logits, weights, chosen = _checked(router, output, len(self.counts))
        probabilities = logits.softmax(-1)
        top_k = chosen.shape[-1]
        if self.compares:
            own = RouterBalance.of(probabilities.detach(), top_k)
            self.own = own if self.own is None else self.own + own
        if self.collects:
            found = RouterBalance.of(probabilities.detach(), top_k, self.counts, self.tokens)
            self.balance = found if self.balance is None else self.balance + found
        if not (torch.is_grad_enabled() and probabilities.requires_grad):
            return output
        copies = 1 if self.share is None else self.share.ranks.size  # as all gradients of a share
        return logits, _Balanced.apply(weights, probabilities, self.counts * copies, self.routing), chosen

    def close(self, outputs: ModelOutput) -> None:
        """End the forward and add its balance. Layers that run again later are not counted.

        Raises:
            UnsupportedModel: a router was not called, or the model's auxiliary loss differs.
        """
        self.collects = False
        if self.balance is not None:
            if self.share is not None:
                for own in (self.balance.choices, self.balance.probabilities):
                    dist.all_reduce(own, group=self.share.ranks.group)
            self.routing.balance += self.balance
        if len(self.seen) != self.routing.experts.places:
            raise UnsupportedModel(
                f"{len(self.seen)} of {self.routing.experts.places} routers were called; something (a fused kernel?) "
                "goes past the others, so their auxiliary loss and recorded experts are not supported."
            )
        if self.compares and self.own is not None:
            found = getattr(outputs, "aux_loss", None)
            ours, theirs = float(self.own.loss), None if found is None else float(found.detach())
            if theirs is None or abs(ours - theirs) > FORMULA_TOLERANCE * abs(theirs):
                raise UnsupportedModel(
                    f"the model's own auxiliary loss of a pass is {theirs}, by the formula of the Switch Transformer "
                    f"it is {ours:.6g}; this one is not supported: set config.output_router_logits=False to train "
                    "without it."
                )
            self.compares, self.routing.verified = False, True


def _checked(router: Router, output: object, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """A router's output: logits [n, E], weights [n, k] of the chosen experts, and their numbers, int64 [n, k].

    Raises:
        UnsupportedModel: the output has another form.
    """
    if isinstance(output, tuple) and len(output) == 3 and all(isinstance(x, Tensor) for x in output):
        logits, weights, chosen = output
        usual = logits.dim() == chosen.dim() == 2 and weights.shape == chosen.shape and not chosen.is_floating_point()
        if usual and len(logits) == len(chosen) == tokens:
            return logits, weights, chosen
    parts = output if isinstance(output, tuple | list) else [output]
    form = [tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__ for x in parts]
    raise UnsupportedModel(
        f"{router.name} ({type(router.module).__name__}) returns {form}; logits [{tokens}, experts], weights and "
        f"numbers of the chosen experts [{tokens}, k] were expected, so its auxiliary loss is not supported."
    )


class _Balanced(torch.autograd.Function):
    """A router's weights, unchanged; backward gives its probabilities the auxiliary loss's gradient."""

    @staticmethod
    def forward(ctx, weights: Tensor, probabilities: Tensor, counts: Tensor, routing: Experts):
        ctx.counts = counts
        ctx.routing = routing
        ctx.dtype = probabilities.dtype
        return weights.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return grad, ctx.routing.slope(ctx.counts).to(ctx.dtype), None, None


def route_as_recorded(
    router: Router,
    recorded: Int64[Tensor, "n k"],
    experts: MixtureOfExperts,
    forward: Callable[..., object],
    *args: object,
    **kwargs: object,
) -> object:
    """The output of a router that uses recorded experts.

    Args:
        recorded: -1 leaves a token to the router.

    Raises:
        UnsupportedModel: a router that does not choose by one torch.topk.
    """
    with _RecordedTopK(recorded, experts.experts or 0) as choice:
        output = forward(*args, **kwargs)
    if choice.times != 1:
        raise UnsupportedModel(
            f"{router.name} ({type(router.module).__name__}) makes {choice.times} choices of {recorded.shape[-1]} out "
            f"of {experts.experts or 0} experts by torch.topk, where one was expected: its recorded experts cannot be "
            "used. Leave `experts` out."
        )
    return output


class _RecordedTopK(TorchFunctionMode):
    """Makes torch.topk over E experts return the recorded ones; the router's other operations run as they are."""

    def __init__(self, recorded: Tensor, experts: int):
        super().__init__()
        self._recorded = recorded
        self._experts = experts
        self.times = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        top = func(*args, **kwargs)
        if func not in (torch.topk, torch.Tensor.topk):
            return top
        source = args[0] if args else kwargs["input"]
        if top.indices.shape != self._recorded.shape or source.shape[-1] != self._experts:
            return top
        self.times += 1
        chosen = torch.where(self._recorded < 0, top.indices, self._recorded)
        return torch.return_types.topk((source.gather(-1, chosen), chosen))

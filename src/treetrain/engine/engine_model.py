"""A model as an engine sees it: what it can do, what a pass costs, which plans fit into its memory."""

import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from treetrain.engine import lm_head
from treetrain.engine.extension import Extension, Reduces
from treetrain.engine.loss_gradients import ScoreTable
from treetrain.engine.memory import Rollback, Try, free_bytes, tries
from treetrain.engine.ranks import Sharing
from treetrain.models.capability import Capabilities, Fingerprint, check_model, fingerprint, model_device
from treetrain.planning.cost import CostModel
from treetrain.planning.devices import MEMORY_MARGIN
from treetrain.planning.make import PART_TOKENS, Bytes, make_plan
from treetrain.planning.partition import partition
from treetrain.planning.plan import Plan
from treetrain.tree.layout import PackedLayout
from treetrain.tree.token_tree import TokenTree

if TYPE_CHECKING:
    from treetrain.engine.extensions.experts import RouterBalance

LAST_RESORT_TOKENS = 256
"""The token budget that is tried if no plan is predicted to fit into free memory."""
PASS_TOKENS, FORWARD_SHARE = 40.0, 0.35
"""For a model that cannot be counted: the fixed cost of a pass in tokens, and a forward's share of a step. Every plan
within a budget is exact, so a wrong guess costs time only."""


def plan_of_any_model(layout: PackedLayout, budget: int | None, device: torch.device) -> Plan:
    """The plan of a model that cannot be counted; without a budget in tokens, parts are of a size that runs well."""

    def seconds(plan: Plan) -> float:
        passes = plan.num_parts + FORWARD_SHARE * plan.num_prefills
        return PASS_TOKENS * passes + plan.layout.num_tokens + FORWARD_SHARE * plan.recomputed_tokens

    size = PART_TOKENS["cuda" if device.type == "cuda" else "cpu"]
    tokens, target = (max(layout.num_tokens, 1), size) if budget is None else (budget, None)
    return partition(layout, tokens, seconds, part_tokens=target)


class EngineModel:
    """A model, its value head, and the settings of an engine that its passes depend on.

    Args:
        budget: tokens whose graph may be alive at once, bytes of peak memory, or None for what is free.
        temperature: divides the logits before the softmax.
        compile_layers: whether decoder layers run compiled; None: on a GPU, if they can.

    Raises:
        UnsupportedModel: the model or its value head would not be exact on a tree.
    """

    def __init__(
        self,
        model: nn.Module,
        value_head: nn.Module | None,
        *,
        budget: int | Bytes | None,
        temperature: float,
        sharing: Sharing,
        compile_layers: bool | None = None,
    ):
        self.model, self.value_head, self.sharing = model, value_head, sharing
        self.budget, self.temperature = budget, temperature
        self.compile_layers = compile_layers
        self._compiled: dict[nn.Module, Callable[..., Any]] = {}
        """See `compiled_layers`."""
        self.fingerprint = Fingerprint([], [], [])
        """That of the latest call."""
        self._cost: tuple[object, CostModel | None] = None, None
        self.device: torch.device
        """The device that the model takes its input on."""
        self.wide_dtype: torch.dtype
        """The dtype of log-probabilities and entropies: float32, or float64 for a float64 model."""
        self.free: int | None = None
        """Bytes that plans of the current call may use; ranks that run the same plan agree on them. None with a budget
        in bytes."""
        self.capabilities = self._all = self.check()
        """The part of the model's capabilities that the current call asks for."""

    def check(self) -> Capabilities:
        """Check the model if it has changed since the last call (a dropout may have been switched on), and read how
        much memory is free."""
        now = fingerprint(self.model, self.value_head)
        if now.settings != self.fingerprint.settings:
            self._all = check_model(self.model, critics=True, value_head=self.value_head)
            self._cost = None, None
        self.fingerprint = now
        self.device = model_device(self.model)
        self.wide_dtype = torch.promote_types(self.model.dtype, torch.float32)  # type: ignore[arg-type]
        self.free = None if isinstance(self.budget, Bytes) else self.free_bytes()
        return self._all

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of the model and the value head, each once."""
        modules = [self.model] if self.value_head is None else [self.model, self.value_head]
        return list({p: None for module in modules for p in module.parameters()})

    @property
    def live(self) -> bool:
        """Whether scores computed now can have gradients."""
        return torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters)

    def table(self, layout: PackedLayout, *, entropy: bool, statistics: bool = False) -> ScoreTable:
        """An empty table for the scores of a layout."""
        sizes = layout.num_edges, len(layout.rows)
        return ScoreTable(*sizes, self.wide_dtype, self.device, entropy=entropy, statistics=statistics)

    # ---- plans

    @property
    def cost(self) -> CostModel | None:
        """The cost model, counted without running the model; None for a model that cannot be counted."""
        autocast = torch.is_autocast_enabled(self.device.type)
        dtype = torch.get_autocast_dtype(self.device.type) if autocast else self.model.dtype
        key = self.device, dtype, os.environ.get(lm_head.ENVIRONMENT)  # `check` sees everything else
        if self._cost[0] != key:
            from treetrain.engine.costs import cost_if_countable  # once for a model

            self._cost = key, cost_if_countable(self.model)
        return self._cost[1]

    def plan(self, layout: PackedLayout, budget: int | Bytes | None) -> Plan:
        """The fastest plan within a budget: tokens, bytes, or None for what the device has free.

        Raises:
            ValueError: bytes that no plan fits into.
            UnsupportedModel: bytes, and a model that cannot be counted.
        """
        if isinstance(budget, Bytes):
            from treetrain.engine.costs import cost_of

            return make_plan(layout, self.cost or cost_of(self.model), budget=budget)
        cost = self.cost
        if cost is None:
            return plan_of_any_model(layout, budget, self.device)
        try:
            return make_plan(layout, cost, budget=budget, free_bytes=self.free if budget is None else None)
        except ValueError as error:
            if budget is not None:
                raise
            # The user set no bound and predictions can be wrong, so small parts are tried; out of memory is handled.
            warnings.warn(f"more memory is predicted than is free ({error}); small parts are tried", stacklevel=2)
            return make_plan(layout, cost, budget=LAST_RESORT_TOKENS)

    def free_bytes(self) -> int:
        """Bytes that plans of this process may use now, minus gradients not yet allocated (``.grad`` is None)."""
        free, absent = free_bytes(self.device), 0
        if self.device.type == "cpu":
            free //= self.sharing.processes_on_host
        for p in self.parameters:
            grad = getattr(p.grad, "beneath", p.grad)  # of a `DeferredGradient`
            if p.requires_grad and grad is None:
                own = getattr(p, "_local_tensor", p)  # the part that this process holds of a sharded parameter
                absent += own.numel() * own.element_size()
        return max(free - absent, 0)

    def has_room(self, plan: Plan, extra: float | None = None) -> bool:
        """Whether a plan's predicted peak fits the budget or free memory; False if the model cannot be counted.

        Args:
            extra: further bytes that are optional; `MEMORY_MARGIN` times peak and extra must be free.
        """
        if self.cost is None:
            return False
        peak = self.cost.peak_bytes(plan)
        room = self.budget.count if isinstance(self.budget, Bytes) else self.free
        return room is not None and (peak <= room if extra is None else MEMORY_MARGIN * (peak + extra) <= room)

    def scored_first(self, plan: Plan) -> Plan | None:
        """The plan for a loss that is known after all parts are scored, with the graphs kept that fit until then.

        They fit into the budget or into free memory. None if the caches of all parts do not fit.
        """
        whole = plan.scored_first()
        if plan.num_parts <= 1:
            return whole
        tokens, cost = self.budget if isinstance(self.budget, int) else None, self.cost
        if whole.peak_tokens <= tokens if tokens is not None else self.has_room(whole):
            return whole
        from treetrain.planning.scored_first import FINER, MOST_PARTS, keeping_most

        room = self.budget.count if isinstance(self.budget, Bytes) else self.free_bytes()
        found = [keeping_most(plan, cost, tokens=tokens, room=room)]
        if cost is not None:
            smaller = plan
            for share in FINER:
                if smaller.num_parts > MOST_PARTS:
                    break
                most = max((tokens or plan.peak_tokens) // share, 1)
                smaller = replace(partition(plan.layout, most, cost.seconds), purpose=plan.purpose)
                found.append(keeping_most(smaller, cost, tokens=tokens, room=room))
        plans = [each for each in found if each is not None]
        return min(plans, key=cost.seconds if cost is not None else lambda each: each.recomputed_tokens, default=None)

    def keeps_logits(self, plan: Plan) -> bool:
        """Whether the logits of kept parts fit in addition to the graphs of a plan, with room to spare.

        Keeping them saves a second product of the head's matrix with every row.
        """
        rows = int(plan.kept[plan.part_of[plan.layout.rows]].sum())
        return self.has_room(plan, extra=rows * self.capabilities.vocab_size * self.wide_dtype.itemsize)

    def keeps_gradients(self, plan: Plan) -> bool:
        """Whether unsharded gradients fit in addition to a plan, with room to spare, until the step's last backward.

        Where weights are sharded, they are then reduced once instead of after every part.
        """
        trained = sum(p.numel() for p in self.parameters if p.requires_grad)
        return self.has_room(plan, extra=trained * self.wide_dtype.itemsize)

    # ---- runs

    def tries(self, plan: Plan, rollback: Rollback | None = None) -> Iterator[Try]:
        """Tries of a plan, and of smaller ones while memory runs out; see `memory.tries`."""
        first = "no" if plan.scores_first == "no" else "recomputed"

        def smaller(tokens: int) -> Plan:
            return replace(self.plan(plan.layout, tokens), scores_first=first)

        together = not self.sharing.passes_with.alone
        return tries(plan, None if together else smaller, self.device, rollback)

    @property
    def compiles(self) -> bool:
        """Whether decoder layers run compiled."""
        default = self.device.type == "cuda" and self.sharing.may_compile
        return default if self.compile_layers is None else self.compile_layers

    def extensions(
        self,
        tree: TokenTree,
        *,
        balanced: bool,
        whole: "RouterBalance | None" = None,
        scale: float = 1.0,
        reduces: Reduces = "each",
    ) -> list[Extension]:
        """The extensions of a try, outermost first; none for a dense model in one process.

        Args:
            balanced: whether the routers' auxiliary loss is added, with this balance of the whole step and this scale.
            reduces: which backwards reduce gradients over processes.
        """
        capabilities, model = self.capabilities, self.model
        extensions, innermost = self.sharing.extensions(capabilities)
        if capabilities.experts is not None:
            from treetrain.engine.extensions.experts import Experts, has_work

            if has_work(capabilities.experts, tree, balanced=balanced):
                extensions.append(
                    Experts(
                        model,
                        capabilities.experts,
                        tree,
                        self.device,
                        balanced=balanced,
                        whole=whole,
                        scale=scale,
                    )
                )
        if capabilities.recurrent_layers:
            from treetrain.engine.extensions.recurrence import Recurrence

            extensions.append(Recurrence(model))
        if self.compiles:  # last of those that change the model's modules
            from treetrain.engine.extensions.compiled import CompiledLayers

            extensions.append(CompiledLayers(model, self._compiled))
        extensions += innermost
        if tree.images is not None:  # last, since the gradients that it adds are reduced and hooked by those around it
            from treetrain.engine.extensions.images import Images

            extensions.append(Images(model, tree))
        for extension in extensions:
            extension.reduces = reduces
        self.attach_hooks(extensions)
        return extensions

    def attach_hooks(self, extensions: list[Extension]) -> None:
        """Run the hooks that parameters have now once in a run. Some may be set between score and backward."""
        if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in self.parameters):
            from treetrain.engine.extensions.parameter_hooks import HooksOnce

            if not any(isinstance(extension, HooksOnce) for extension in extensions):
                place = sum(not extension.within_hooks for extension in extensions)
                extensions.insert(place, HooksOnce(self.parameters, self.sharing.shards(self.parameters)))

"""A model as an engine sees it, and a call of the engine on it: what it asks for, the memory it may use, its plans."""

import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from treetrain.core.attention.attention import STOCK, Backends
from treetrain.core.engine.extension import Extension, Reduces
from treetrain.core.engine.loss_gradients import ScoreTable
from treetrain.core.engine.memory import Rollback, Try, free_bytes, may_pass, tries
from treetrain.core.engine.model_state import ModelState
from treetrain.core.engine.parameter_hooks import HooksOnce
from treetrain.core.engine.ranks import Ranks
from treetrain.core.engine.snapshot import Snapshot
from treetrain.core.errors import UnsupportedModel
from treetrain.core.head.lm_head import PLAIN, HeadKernels
from treetrain.core.hf.capability import Capabilities, check_model, model_device
from treetrain.core.hf.frozen_layers import frozen_layers
from treetrain.core.losses.protocol import Loss
from treetrain.core.planning.cost import Beside, CostModel, ModelCounts
from treetrain.core.planning.devices import MEMORY_MARGIN
from treetrain.core.planning.make import PART_TOKENS, Bytes, make_plan
from treetrain.core.planning.partition import partition
from treetrain.core.planning.plan import Plan, Purpose
from treetrain.core.tree.layout import PackedLayout
from treetrain.core.tree.token_tree import TokenTree
from treetrain.core.tree.trajectory import Trajectory

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


# ---- what stands beside the core


class Sharing:
    """Says how processes share the steps of an engine. In this class one process has everything to itself.

    `parallel/sharing.py` has processes that share steps, hold the same rows, or each hold a part of the weights.
    """

    ranks = Ranks()
    """The processes whose rows make up a step."""
    same_rows = Ranks()
    """The processes among `ranks` that hold the same rows and run the same plan (context or tensor parallel)."""
    passes_with = Ranks()
    """The processes that run every pass together with this one: they wait for one another in it."""
    collective = False
    """Whether passes are collective calls, in an order that all ranks share: each holds a shard of the weights."""
    divides_parts = 1
    """The number of processes that divide the tokens of every part; their budgets add up."""

    processes_on_host = 1
    """The number of processes that share the memory of this host."""
    may_compile = True
    """Whether layers may run compiled: not where they communicate by hooks."""

    def check_model(self, capabilities: Capabilities) -> None:
        """Raise UnsupportedModel for a model that these processes cannot divide."""

    def extensions(
        self, capabilities: Capabilities, within: Sequence[Extension]
    ) -> tuple[list[Extension], list[Extension]]:
        """The extensions of sharing, for a call: those around all others, and those around none but `within`."""
        return [], []

    def agree_on_plan(self, ranks: Ranks, layout: PackedLayout, free: int | None) -> int | None:
        """Return the bytes that a plan of this layout may use, from those that this process has free (None: unknown).

        Processes that run the same plan must have the same layout, and get the same bytes. A collective call of these
        ranks within `Ranks.together`.

        Raises:
            RanksDisagree: on all of these ranks; some that run the same plan have other layouts.
        """
        return free

    def check_hooks(self, parameters: Sequence[nn.Parameter]) -> None:
        """Raise UnsupportedModel if hooks would see a rank's own gradients, before these are averaged."""

    def shards(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """The parameters whose gradients come into ``.grad`` from a reduction over processes, not from autograd."""
        return []

    def average_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Average the gradients of weights that several ranks hold as a whole, over these ranks."""

    @property
    def has_unreduced(self) -> bool:
        """Whether gradients wait to be reduced over processes, outside of ``.grad``."""
        return False

    def drop_unreduced(self) -> None:
        """Drop gradients that are not reduced yet: the next reduction would add them to another step."""

    def why_not_live(self) -> str | None:
        """The fault of gradients through autograd, in words that follow "they would"; None if there is none."""
        return None

    def rows_of_all_ranks(
        self, call: "Call", kind: str, rows: list[Trajectory], loss: Loss, normaliser: float | None
    ) -> tuple[list[Trajectory] | None, float]:
        """Compare the ranks' settings, and exchange what they must know of one another's rows.

        Args:
            kind: the class of the engine.

        Returns:
            the rows of all ranks if the loss must see them, else None; the sum of the ranks' loss weights, 0 if it is
            not needed.
        """
        return rows, 0.0

    def plan_together(
        self, call: "Call", tree: TokenTree, plan: Plan, *, weighted: bool, apart: bool
    ) -> tuple[TokenTree, Plan, Reduces]:
        """Choose this rank's tree and plan, and say which of its backwards reduce gradients; a collective call.

        Args:
            tree, plan: this rank's own.
            weighted: whether only predictions with a loss weight are computed.
            apart: whether plans that share nothing may be chosen.
        """
        return tree, plan, "each"


class StepBalance(Protocol):
    """The facts that a loss over all tokens of a step needs of the tokens in other calls."""

    def compared(self) -> object:
        """The part that all ranks must agree on."""


class Feature:
    """Something that some models, rows or devices have and a dense model in one process lacks. Here, nothing.

    An engine has its own objects of these, and asks each of them in every call.
    """

    takes: frozenset[str] = frozenset()
    """The fields of a tree, such as "images", that only this feature knows what to do with."""
    within_sharing = False
    """Whether its extension runs within those of several processes."""

    def check_rows(self, call: "Call", tree: TokenTree) -> None:
        """Check the rows of a call, and note in ``call.beside`` what they need besides the parts.

        Raises:
            DataError: rows that the model cannot read.
            UnsupportedModel: a model or a setting that would not be exact with them.
        """

    def before_plan(self, call: "Call", passes_type: type) -> None:
        """A call is about to be planned."""

    def counts(self, model: "EngineModel", counts: ModelCounts) -> ModelCounts:
        """The counts of a model under this feature."""
        return counts

    def extension(
        self, call: "Call", tree: TokenTree, *, balanced: bool, scale: float, balance: StepBalance | None
    ) -> Extension | None:
        """The extension of a try; None if there is nothing to do.

        Args:
            balanced: whether special layers add a loss over all tokens of a step, times `scale`.
            balance: of the whole step, if the call is a part of it.
        """
        return None


@dataclass(frozen=True, kw_only=True)
class Registry:
    """Everything outside the core that an engine uses. An empty one runs dense models, planned in tokens."""

    check_model: Callable[..., Capabilities] = check_model
    """Describes a model, as `core.hf.capability.check_model` does; it may know more layers."""
    features: Sequence[Feature] = ()
    """Their extensions are nested in this order, the first outermost."""
    cost_of: Callable[[nn.Module], CostModel] | None = None
    """Counts what a model costs; raises UnsupportedModel for one that cannot be counted."""
    purpose: type[Purpose] = Purpose
    """Says what plans were made for."""
    attention: Backends = STOCK
    head: HeadKernels = PLAIN


# ---- the model


class EngineModel:
    """A model, its value head, and the settings of an engine that its passes depend on.

    Args:
        budget: tokens whose graph may be alive at once, bytes of peak memory, or None for what is free.
        temperature: divides the logits before the softmax.

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
        registry: Registry,
    ):
        self.model, self.value_head, self.sharing, self.registry = model, value_head, sharing, registry
        self.budget, self.temperature = budget, temperature
        self.state = ModelState({}, {}, {}, {}, {}, [])
        """Its settings in the latest call."""
        self._latest = Snapshot(()), self.state
        """The model as it was read last."""
        self.hooked: list[nn.Module] = []
        """The modules with forward hooks, as they were read last."""
        self.undrawn: list[nn.Module] = []
        """Adapters (LoHa, LoKr) that draw a random number in training mode although their dropout is 0."""
        self._cost: tuple[object, CostModel | None] = None, None
        self._frozen_layers: int | None = None
        self.device: torch.device
        """The device that the model takes its input on."""
        self.wide_dtype: torch.dtype
        """The dtype of log-probabilities and entropies: float32, or float64 for a float64 model."""
        self.capabilities: Capabilities
        self.check()

    def check(self) -> None:
        """Check the model if it has changed since the last call; a dropout may have been switched on."""
        now = self.read()
        if now[:3] != self.state[:3]:  # its hooks are checked elsewhere
            self.capabilities = self.registry.check_model(self.model, critics=True, value_head=self.value_head)
            self._cost, self._frozen_layers = (None, None), None
            rates = [(m, vars(m).get("module_dropout")) for m in self.model.modules()]
            self.undrawn = [m for m, dropouts in rates if dropouts and not any(dropouts.values())]
        if now is not self.state:
            self._dtype: torch.dtype = self.model.dtype  # type: ignore[assignment]
        self.state = now
        self.device = model_device(self.model)
        self.wide_dtype = torch.promote_types(self._dtype, torch.float32)

    def call(self, *, logprobs: bool | None = None, values: bool = False) -> "Call":
        """Begin a call.

        Args:
            logprobs: whether it scores tokens; None: if the model has an LM head.
            values: whether it asks for values.

        Raises:
            UnsupportedModel: the model has no head for one of them, or would not be exact on a tree.
        """
        self.check()
        wanted = self.capabilities.scores_tokens if logprobs is None else logprobs
        return Call(self, self.capabilities.asked(logprobs=wanted, values=values))

    def read(self) -> ModelState:
        """The settings of the model and the value head as they are now."""
        snapshot, state = self._latest
        if not snapshot.modules or not snapshot.unchanged():
            snapshot, state = Snapshot((self.model, self.value_head)), ModelState.of(self.model, self.value_head)
            self._latest = snapshot, state
            self.hooked = [m for m in snapshot.modules if m._forward_pre_hooks or m._forward_hooks]
        return state

    @property
    def modules(self) -> list[nn.Module]:
        """The modules of the model and the value head, each once, as they were read last."""
        return self._latest[0].modules

    @property
    def configured(self) -> list[nn.Module]:
        """The modules with a configuration, as they were read last."""
        return self._latest[0].configured

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of the model and the value head, each once, as they were read last."""
        return self._latest[0].parameters

    @property
    def trained(self) -> list[nn.Parameter]:
        """Those that require a gradient, as they were read last."""
        return self._latest[0].trained

    @property
    def live(self) -> bool:
        """Whether scores computed now can have gradients."""
        return torch.is_grad_enabled() and bool(self.trained)

    def may_need_gradients(self, layer: Hashable) -> bool:
        """Whether something trained may come before the keys or states of a layer, in some token of some row."""
        if self._frozen_layers is None:
            self._frozen_layers = frozen_layers(self.model, self.capabilities)
        return not (isinstance(layer, int) and layer < self._frozen_layers)

    # ---- costs

    @property
    def counted(self) -> CostModel | None:
        """The cost model of the model, counted without running it; None if it cannot be counted."""
        autocast = torch.is_autocast_enabled(self.device.type)
        dtype = torch.get_autocast_dtype(self.device.type) if autocast else self._dtype
        key = self.device, dtype, self.registry.head.setting  # `check` sees everything else
        if self._cost[0] != key:
            try:
                self._cost = key, self.count()
            except UnsupportedModel:
                self._cost = key, None
            except Exception as error:
                if not may_pass(error):
                    raise
                return None  # the next call counts again
        return self._cost[1]

    def count(self) -> CostModel:
        """The cost model of the model, counted now.

        Raises:
            UnsupportedModel: the model cannot be counted.
        """
        if self.registry.cost_of is None:
            raise UnsupportedModel("nothing here counts what a model costs: give the budget in tokens")
        return self.registry.cost_of(self.model)

    def counts(self, counts: ModelCounts) -> ModelCounts:
        """Counts of the plain model as they are under the features."""
        for feature in self.registry.features:
            counts = feature.counts(self, counts)
        return counts

    @property
    def cost(self) -> CostModel | None:
        """The cost model under the features; None if the model cannot be counted."""
        cost = self.counted
        return None if cost is None else replace(cost, counts=self.counts(cost.counts))

    def free_bytes(self) -> int:
        """Bytes that plans of this process may use now, minus gradients not yet allocated (``.grad`` is None)."""
        free, absent = free_bytes(self.device), 0
        if self.device.type == "cpu":
            free //= self.sharing.processes_on_host
        for p in self.trained:
            grad = p.grad
            if grad is not None and type(grad) is not Tensor:
                grad = getattr(grad, "beneath", grad)  # of a `DeferredGradient`
            if grad is None:
                # Of a sharded parameter, the part that this process holds.
                absent += p.nbytes if type(p) is nn.Parameter else getattr(p, "_local_tensor", p).nbytes
        return max(free - absent, 0)


class Call:
    """A call of an engine on its model.

    A score keeps it until its backward, so that this sees the temperature, heads and budget of the score, whatever is
    set or called in between.

    Attributes:
        prepared: the model and its state.
        capabilities: those that the call asks for.
        free: bytes that its plans may use; ranks that run the same plan agree on them. None with a budget in bytes, or
            if a rank does not know.
        beside: memory that its rows need besides the parts, if any; an error if that cannot be counted.
    """

    def __init__(self, prepared: EngineModel, capabilities: Capabilities):
        self.prepared, self.capabilities = prepared, capabilities
        self.model, self.device = prepared.model, prepared.device
        self.sharing, self.registry = prepared.sharing, prepared.registry
        self.budget, self.temperature, self.wide_dtype = prepared.budget, prepared.temperature, prepared.wide_dtype
        self.free = None if isinstance(self.budget, Bytes) else prepared.free_bytes()
        self.beside: Beside | UnsupportedModel | None = None

    @property
    def cost(self) -> CostModel | None:
        """The cost model of this call; None if it cannot be counted."""
        cost = None if isinstance(self.beside, UnsupportedModel) else self.prepared.cost
        return None if cost is None else replace(cost, beside=self.beside)

    def table(self, layout: PackedLayout, *, entropy: bool, statistics: bool = False) -> ScoreTable:
        """An empty table for the scores of a layout."""
        sizes = layout.num_edges, len(layout.rows)
        return ScoreTable(*sizes, self.wide_dtype, self.device, entropy=entropy, statistics=statistics)

    def plan(self, layout: PackedLayout, budget: int | Bytes | None) -> Plan:
        """The fastest plan within a budget: tokens, bytes, or None for what the device has free.

        Raises:
            ValueError: bytes that no plan fits into.
            UnsupportedModel: bytes, and a model that cannot be counted.
        """
        purpose = self.registry.purpose
        if isinstance(budget, Bytes):
            if isinstance(self.beside, UnsupportedModel):
                raise self.beside
            cost = self.cost or self.prepared.count()
            cost.check_beside(budget)
            return make_plan(layout, cost, budget=budget, purpose=purpose)
        cost = self.cost
        if cost is None:
            return plan_of_any_model(layout, budget, self.device)
        try:
            free = self.free if budget is None else None
            return make_plan(layout, cost, budget=budget, free_bytes=free, purpose=purpose)
        except ValueError as error:
            if budget is not None:
                raise
            # The user set no bound and predictions can be wrong, so small parts are tried; out of memory is handled.
            warnings.warn(f"more memory is predicted than is free ({error}); small parts are tried", stacklevel=2)
            return make_plan(layout, cost, budget=LAST_RESORT_TOKENS, purpose=purpose)

    def has_room(self, plan: Plan, extra: float = 0.0, margin: float = 1.0) -> bool:
        """Whether `margin` times a plan's predicted peak and `extra` bytes fits the budget or free memory.

        False if the model cannot be counted.
        """
        if self.cost is None:
            return False
        room = self.budget.count if isinstance(self.budget, Bytes) else self.free
        return room is not None and margin * (self.cost.peak_bytes(plan) + extra) <= room

    def plan_keeping_graphs(self, plan: Plan) -> Plan | None:
        """The plan for a loss that is known after all parts are scored, with the graphs kept that fit until then.

        They fit into the budget or into free memory. None if the caches of all parts do not fit.
        """
        whole = plan.keeping_graphs()
        if plan.num_parts <= 1:
            return whole
        tokens, cost = self.budget if isinstance(self.budget, int) else None, self.cost
        fits = self.has_room(whole) if tokens is None else whole.peak_tokens <= tokens
        if fits:
            return whole
        from treetrain.core.planning.kept_graphs import FINER, MOST_PARTS, keeping_most

        room = self.budget.count if isinstance(self.budget, Bytes) else self.prepared.free_bytes()
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
        """Whether the logits of graphs that are alive together fit beside a plan, with room to spare.

        Keeping them saves a second product of the head's matrix with every row. Where a step runs part by part, only a
        plan of one part keeps them: smaller ones are made to save memory.
        """
        rows = len(plan.layout.rows)
        if plan.num_parts > 1:
            if plan.scores_first == "no":
                return False
            rows = int(plan.kept[plan.part_of[plan.layout.rows]].sum())
        logits = rows * self.capabilities.vocab_size * self.wide_dtype.itemsize
        return self.has_room(plan, extra=logits, margin=MEMORY_MARGIN)

    def keeps_gradients(self, plan: Plan) -> bool:
        """Whether unsharded gradients fit in addition to a plan, with room to spare, until the step's last backward.

        Where weights are sharded, they are then reduced once instead of after every part.
        """
        trained = sum(p.numel() for p in self.prepared.trained)
        return self.has_room(plan, extra=trained * self.wide_dtype.itemsize, margin=MEMORY_MARGIN)

    def tries(self, plan: Plan, rollback: Rollback | None = None) -> Iterator[Try]:
        """Tries of a plan, and of smaller ones while memory runs out; see `memory.tries`."""
        first = "no" if plan.scores_first == "no" else "recomputed"

        def smaller(tokens: int) -> Plan:
            return replace(self.plan(plan.layout, tokens), scores_first=first)

        together = not self.sharing.passes_with.alone
        return tries(plan, None if together else smaller, self.device, rollback)

    def extensions(
        self,
        tree: TokenTree,
        *,
        balanced: bool,
        balance: StepBalance | None = None,
        scale: float = 1.0,
        reduces: Reduces = "each",
    ) -> list[Extension]:
        """The extensions of a try, outermost first; none for a dense model in one process.

        Args:
            balanced, balance, scale: see `Feature.extension`.
            reduces: which backwards reduce gradients over processes.
        """
        within, others = list[Extension](), list[Extension]()
        for feature in self.registry.features:
            made = feature.extension(self, tree, balanced=balanced, scale=scale, balance=balance)
            if made is not None:
                (within if feature.within_sharing else others).append(made)
        outer, inner = self.sharing.extensions(self.capabilities, within)
        extensions = [*outer, *others, *inner, *within]
        for extension in extensions:
            extension.reduces = reduces
        self.attach_hooks(extensions)
        return extensions

    def attach_hooks(self, extensions: list[Extension]) -> None:
        """Run the hooks that parameters have now once in a run. Some may be set between score and backward."""
        hooked = any(p._backward_hooks or p._post_accumulate_grad_hooks for p in self.prepared.trained)
        if hooked and not any(isinstance(extension, HooksOnce) for extension in extensions):
            place = sum(not extension.within_hooks for extension in extensions)
            extensions.insert(place, HooksOnce(self.prepared.parameters, self.sharing.shards(self.prepared.parameters)))

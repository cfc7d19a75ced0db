"""The engine: gradients of any loss over branching trajectories, every shared prefix computed once."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from treetrain.attention.dispatch import Choice, choose_backend
from treetrain.data.trajectory import Trajectory
from treetrain.engine.batch import Batch, as_tree, check_batch
from treetrain.engine.calibrate import cost_model
from treetrain.engine.checks import check_normaliser, check_temperature, check_trainable, step_loss, step_normaliser
from treetrain.engine.evaluate import MetricSums, evaluate, linear_coefficients, means
from treetrain.engine.feed import Board, Known, Stream
from treetrain.engine.memory import Passes, StepOutOfMemory, cannot_start_over, why_not_again, within_memory
from treetrain.engine.merged import MergedBatch
from treetrain.engine.packed import PackedRun, model_device, wide_dtype
from treetrain.engine.planning import formula_cost, plan_within
from treetrain.engine.routing import RouterBalance, Routing
from treetrain.engine.sharing import rows_if_faster
from treetrain.engine.walk import Walk
from treetrain.models.capability import Capabilities, check_model
from treetrain.plan.budget import Bytes, parse_budget
from treetrain.plan.plan import Plan
from treetrain.plan.price import CostModel
from treetrain.tree.layout import PackedLayout, pack
from treetrain.tree.token_tree import TokenTree


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What one `forward_backward` did."""

    loss: float
    """Sum over all trajectories divided by the normaliser."""
    metrics: dict[str, float]
    """Means of what the loss reports."""
    metric_sums: MetricSums = field(repr=False)
    """The same as (weighted sum, weight), to be added over calls."""
    flat_tokens: int
    """Tokens summed over the trajectories."""
    unique_tokens: int
    """Tokens of the tree."""
    computed_tokens: int
    """Tokens that went through the model: the tree's, less what no wanted prediction depends on."""
    recomputed_tokens: int
    """Tokens of the passes without graph: what was run forward once more to stay within the budget."""
    parts: int
    """Forward-backward passes it took."""


class TreeEngine:
    """Runs batches of trajectories on a Hugging Face causal LM as prefix trees.

    Args:
        model: a causal LM, plain or wrapped by peft; it is left as it was found after every call.
        budget: an int bounds the tokens whose graph is alive at once, a string such as "8GiB" the peak of memory above
            model, gradients and optimiser state; any tree fits any budget. None fits to what the device has free.
        temperature: divides the logits before the softmax.
        value_head: maps the hidden states that a causal LM hands to its head, [n, hidden], to values [n] (or [n, c]),
            for losses that need values. A model for token or sequence classification has its own head, and no
            log-probabilities.

    Raises:
        UnsupportedModel: the model, its value head or a setting would not be exact on a tree.
        ValueError: a temperature that is not above 0, or a budget that is neither tokens nor bytes.
    """

    _merge = True
    _run_type: type[Any] = PackedRun

    def __init__(
        self,
        model: nn.Module,
        *,
        budget: int | str | Bytes | None = None,
        temperature: float = 1.0,
        value_head: nn.Module | None = None,
    ):
        self.model, self.budget, self.temperature = model, parse_budget(budget), check_temperature(temperature)
        self.value_head = value_head
        self.capabilities = self._checked()

    def _checked(self) -> Capabilities:
        """What the model is now: a dropout may have been switched on since."""
        return check_model(self.model, critics=True, value_head=self.value_head)

    def prepare(self, *, logprobs: bool, values: bool) -> None:
        """Check the model for a call that wants these. Raises UnsupportedModel."""
        self.capabilities = self._checked().asked(logprobs=logprobs, values=values)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Of the model and the value head, each once."""
        modules = [self.model] if self.value_head is None else [self.model, self.value_head]
        return list({p: None for module in modules for p in module.parameters()})

    @property
    def attention(self) -> Choice:
        """Which tree attention runs on the model's device, and why."""
        return choose_backend(model_device(self.model))

    @property
    def cost(self) -> CostModel:
        """What passes cost on this model as it is now, on its device: measured when first asked for, and cached."""
        found = self._checked()
        # With the model's own head, whatever the present call asks of it: what is measured is cached.
        return cost_model(self.model, found.asked(logprobs=found.scores_tokens, values=not found.scores_tokens))

    def plan(self, trajectories: Sequence[Trajectory] | TokenTree) -> Plan:
        """The plan of a training step on these trajectories under the engine's budget."""
        tree = as_tree(trajectories, merge=self._merge)
        plan = self.plan_of(pack(tree, tree.trained_edges()[0] > 0, trim=not self._balanced))
        return (self._row_by_row(tree, plan) or (tree, plan))[1]

    @property
    def _balanced(self) -> bool:
        """Whether the model adds an auxiliary loss, of all tokens of a step."""
        return self.capabilities.experts is not None and self.capabilities.experts.auxiliary != 0

    def forward_backward(
        self,
        trajectories: Sequence[Trajectory] | TokenTree,
        loss: Any,
        normaliser: float | None = None,
        balance: RouterBalance | None = None,
    ) -> StepResult:
        """Accumulate d loss / d parameters into ``.grad``, exactly as if every row were trained by itself.

        Args:
            loss: called with log-probabilities [L - 1], entropies and a trajectory; returns an unnormalised sum
                and metrics; one that says ``needs_values`` is also given ``values``, [L - 1]. The losses of this
                library compute only what has a loss weight; a loss of your own gets every row and every prediction,
                whatever the weights.
            normaliser: what the sum is divided by; pass that of the whole step when accumulating over calls.
                None asks the loss.
            balance: of the routers over the whole step, the sum of `router_balance` over its calls; None takes each
                call for a step of its own. Where the model's configuration asks for an auxiliary loss of its routers
                (``output_router_logits`` and ``router_aux_loss_coef``), it is that of all tokens of all rows.

        Raises:
            DataError: an id outside the vocabulary, a row longer than the model's positions, nothing to train,
                a fact that the loss needs and a row lacks.
            ValueError: no parameter to train, gradients switched off, a normaliser that is not above 0.
            UnsupportedModel: see the class.
            RuntimeError: memory ran out in a backward while gradients of earlier calls lay in ``.grad``.
        """
        values, entropy = bool(getattr(loss, "needs_values", False)), bool(getattr(loss, "needs_entropy", False))
        self.prepare(logprobs=entropy or getattr(loss, "needs_logprobs", True), values=values)
        check_trainable(self.parameters)
        tree = as_tree(trajectories, merge=self._merge)
        check_batch(tree, self.capabilities)
        batch, loss, normaliser = _batch(tree, loss, normaliser, every_token=self._balanced)
        plan = self.plan_of(batch.layout)
        if isinstance(batch, Batch) and batch.weighted and (rows := self._row_by_row(tree, plan)):
            batch, plan = Batch.of(rows[0], weighted=True), rows[1]
        never = why_not_again(self.parameters)
        step, _, passes = within_memory(
            self.model,
            plan,
            lambda plan, passes: self._try(plan, batch, loss, normaliser, passes, never, balance),
            partial(self.smaller_plan, batch.layout),
        )
        return StepResult(
            loss=float(step.total),
            metrics=means(step.sums),
            metric_sums=step.sums,
            flat_tokens=tree.num_flat_tokens,
            unique_tokens=tree.num_tokens,
            computed_tokens=batch.layout.num_tokens,
            recomputed_tokens=sum(tokens for _, tokens in passes.published + passes.scored),
            parts=len(passes.graph),
        )

    def plan_of(self, layout: PackedLayout) -> Plan:
        """The plan of what is computed of a batch."""
        return plan_within(layout, self.budget, self.model, lambda: self.cost)

    def _row_by_row(self, tree: TokenTree, plan: Plan) -> tuple[TokenTree, Plan] | None:
        """The batch with nothing shared, and its plan, where sharing does not pay."""
        cost = formula_cost(self.model)
        if not self._merge or self._balanced or isinstance(self.budget, Bytes) or cost is None:
            return None
        return rows_if_faster(tree, plan, self.budget, cost.seconds)

    def smaller_plan(self, layout: PackedLayout, tokens: int) -> Plan:
        """The plan under a budget of tokens, whatever the engine's own."""
        return plan_within(layout, tokens, self.model, lambda: self.cost)

    def _try(
        self,
        plan: Plan,
        batch: Batch | MergedBatch,
        loss: Any,
        normaliser: float,
        passes: Passes,
        never: str | None,
        balance: RouterBalance | None,
    ) -> "_Step":
        """A step whose failure leaves gradients as they were, or says that it does not.

        Args:
            never: why gradients cannot be put back.
        """
        try:
            coefficient = self.capabilities.experts.auxiliary if self.capabilities.experts else 0.0
            routing = self.routing(batch.tree, balanced=self._balanced, whole=balance, scale=coefficient)
            step = self._step(plan, batch, loss, normaliser, passes, routing)
            return step if routing is None else _Step(*routing.added_to(*step))
        except BaseException as error:
            if isinstance(error, StepOutOfMemory) and not error.begun:
                raise
            if never is None:
                for parameter in self.parameters:
                    parameter.grad = None
            elif isinstance(error, StepOutOfMemory):
                raise cannot_start_over(error, never) from error
            else:
                error.add_note(f"{never}; what this step has added to them is incomplete")
            raise

    def _step(
        self,
        plan: Plan,
        batch: Batch | MergedBatch,
        loss: Any,
        normaliser: float,
        passes: Passes,
        routing: Routing | None,
    ) -> "_Step":
        device, wide = model_device(self.model), wide_dtype(self.model)
        rows, need_entropy = batch.everything(), bool(getattr(loss, "needs_entropy", False))
        board = Board(batch.layout.num_edges, len(batch.layout.rows), device=device, dtype=wide, entropy=need_entropy)
        if plan.num_parts == 0:
            return _without_predictions(board, batch, loss, normaliser)
        walk = self._walk(plan, passes, routing, gradients=True)
        at_once = getattr(loss, "scope", "trajectory") == "batch" and plan.num_parts > 1
        if routing is not None and plan.num_parts > 1 and not routing.in_parts and not at_once:
            self._walk(plan, passes, routing, gradients=False).route()
            routing.settle()
        known = linear_coefficients(loss, rows, batch.layout.num_edges, device, wide)
        if known is not None:
            walk.train(Known(board, known / normaliser))
            with torch.no_grad():
                total, sums = evaluate(loss, rows.per_prediction(board.logprobs), None, rows)
            return _Step(total / normaliser, sums)
        if at_once:
            self._walk(plan, passes, routing, gradients=False).score(board, need_entropy=need_entropy)
            if routing is not None:
                routing.settle()
            stream = Stream(board, batch, loss, normaliser)
            stream.finish()
            walk.train(stream.known())
            return _Step(stream.total, stream.sums)
        stream = Stream(board, batch, loss, normaliser)
        walk.train(stream)
        stream.finish()
        return _Step(stream.total, stream.sums)

    def routing(self, tree: TokenTree, *, balanced: bool, **options: Any) -> Routing | None:
        """What a call does with the routers of experts; None where there is nothing to do."""
        experts = self.capabilities.experts
        if experts is None:
            return None
        return Routing(experts, tree, model_device(self.model), balanced=balanced, **options)

    def router_balance(self, trajectories: Sequence[Trajectory] | TokenTree) -> RouterBalance:
        """How the routers spread these rows over the experts, without gradient; calls of one step add up.

        Raises:
            ValueError: a model without experts.
        """
        self.capabilities = self._checked()
        tree = as_tree(trajectories, merge=self._merge)
        check_batch(tree, self.capabilities)
        routing = self.routing(tree, balanced=True)
        if routing is None:
            raise ValueError(f"{type(self.model).__name__} has no experts, so there is no balance between them")
        layout = pack(tree, trim=False)

        def route(plan: Plan, passes: Passes) -> None:
            routing.begin()
            self._walk(plan, passes, routing, gradients=False).route()

        within_memory(self.model, self.plan_of(layout), route, partial(self.smaller_plan, layout), trains=False)
        return routing.balance

    def _walk(self, plan: Plan, passes: Passes, routing: Routing | None, *, gradients: bool) -> Walk:
        return Walk(
            self.model,
            self.capabilities,
            plan,
            temperature=self.temperature,
            gradients=gradients,
            run_type=self._run_type,
            passes=passes,
            routing=routing,
        )

    def logprobs(self, trajectories: Sequence[Trajectory] | TokenTree, *, return_entropy: bool = False) -> Any:
        """Log-probabilities of every token but the first of every row, without gradient, with training's numerics.

        Returns:
            K tensors [L_k - 1], in nats; with ``return_entropy`` a second list of K tensors of entropies.
        """
        self.prepare(logprobs=True, values=False)
        tree = as_tree(trajectories, merge=self._merge)
        check_batch(tree, self.capabilities)
        batch = Batch.of(tree, weighted=False)
        return rows_of(batch, self.board(tree, batch.layout, return_entropy), return_entropy)

    def board(self, tree: TokenTree, layout: PackedLayout, need_entropy: bool) -> Board:
        """All scores of a layout (those that `prepare` was told), without gradient, in the memory of one path."""
        sizes = layout.num_edges, len(layout.rows)
        board = Board(*sizes, wide_dtype(self.model), model_device(self.model), entropy=need_entropy)
        routing = self.routing(tree, balanced=False)

        def score(plan: Plan, passes: Passes) -> None:
            self._walk(plan, passes, routing, gradients=False).score(board, need_entropy=need_entropy)

        within_memory(self.model, self.plan_of(layout), score, partial(self.smaller_plan, layout), trains=False)
        return board


def _batch(
    tree: TokenTree, loss: Any, normaliser: float | None, *, every_token: bool
) -> tuple[Batch | MergedBatch, Any, float]:
    """What a step computes, its loss, and what that is divided by.

    A tree of nodes stays unflattened where the loss can bear it.
    """
    merged = tree.merged(loss.reduction) if getattr(loss, "mergeable", False) else None
    if merged is None:
        loss = step_loss(loss, list(tree.trajectories), normaliser)
        normaliser = step_normaliser(loss, list(tree.trajectories), normaliser)
        return Batch.of(tree, weighted=hasattr(loss, "packed"), every_token=every_token), loss, normaliser
    loss.check_merged(merged)
    normaliser = check_normaliser(loss.merged_normaliser(merged) if normaliser is None else normaliser)
    return MergedBatch.of(tree, merged, every_token=every_token), loss, normaliser


class _Step(NamedTuple):
    """What a step's loss came to."""

    total: Any
    sums: MetricSums


def _without_predictions(board: Board, batch: Batch | MergedBatch, loss: Any, normaliser: float) -> _Step:
    """A batch of which nothing is computed: a loss of the user's own is called all the same."""
    stream = Stream(board, batch, loss, normaliser)
    stream.finish()
    return _Step(stream.total, stream.sums)


def rows_of(batch: Batch, board: Board, entropies: bool) -> Any:
    """Scores as one tensor per trajectory, and the entropies as a second list if asked for."""
    rows = batch.everything()
    logprobs = rows.per_trajectory(rows.per_prediction(board.logprobs))
    if not entropies:
        return logprobs
    assert board.entropies is not None
    return logprobs, rows.per_trajectory(rows.per_prediction_entropy(board.entropies))

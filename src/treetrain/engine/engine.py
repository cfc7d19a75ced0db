"""The engine: gradients of any loss over branching trajectories, every shared prefix computed once."""

import functools
import operator
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from treetrain.attention.backends import Choice, choose_backend
from treetrain.data.trajectory import Trajectory
from treetrain.engine.aligned import agreed_plan
from treetrain.engine.batch import Batch, check_batch, predictions_of, rewards_layout
from treetrain.engine.begin import Begun, begin, check_hooks
from treetrain.engine.calibrate import cost_model
from treetrain.engine.checks import check_temperature
from treetrain.engine.executor import Executor
from treetrain.engine.lockstep import Reduces, lockstep_of
from treetrain.engine.loss_gradients import ScoreTable
from treetrain.engine.out_of_memory import PassCounts, StepOutOfMemory, cannot_start_over, why_not_again, within_memory
from treetrain.engine.packed import PackedRun, model_device, wide_dtype
from treetrain.engine.planning import (
    AMPLE,
    device_free_bytes,
    formula_cost,
    formula_cost_of,
    gradient_bytes_to_come,
    plan_within,
)
from treetrain.engine.ranks import drop_waiting_gradients, is_shard, is_sharded, ranks_of, unwrapped, waiting_gradients
from treetrain.engine.results import StepResult, summed
from treetrain.engine.routing import RouterBalance, Routing
from treetrain.engine.score import Scored, Scoring, is_live
from treetrain.engine.sharing import rows_if_faster
from treetrain.engine.step import Step, StepRun, Way, result_of
from treetrain.errors import RanksDisagree
from treetrain.models.capability import Capabilities, check_model
from treetrain.planning.budget import Bytes, parse_budget
from treetrain.planning.plan import Plan
from treetrain.planning.price import CostModel
from treetrain.tree.build import Row, as_tree
from treetrain.tree.layout import PackedLayout, pack
from treetrain.tree.token_tree import TokenTree

T = TypeVar("T")


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
        group: of torch.distributed: processes that share each step, each with rows of its own (or none) and the same
            model. Loss, metrics and gradients are those of all rows together. None: the ranks that a model in the hands
            of FSDP2 (`fully_shard`) or `DistributedDataParallel` is spread over; a plain model's process is alone.
        reduce: when FSDP2 reduces gradients: after every part, once per step (they are whole until then), or "auto":
            once where there is ample room for that.

    Raises:
        UnsupportedModel: the model, its value head or a setting would not be exact on a tree.
        ValueError: a temperature that is not above 0, or a budget that is neither tokens nor bytes.
    """

    _merge = True
    run_type: type[Any] = PackedRun

    def __init__(
        self,
        model: nn.Module,
        *,
        budget: int | str | Bytes | None = None,
        temperature: float = 1.0,
        value_head: nn.Module | None = None,
        group: Any = None,
        reduce: Literal["auto", "part", "step"] = "auto",
    ):
        if reduce not in ("auto", "part", "step"):
            raise ValueError(f"reduce={reduce!r}: known are auto, part and step")
        model, group = unwrapped(model, group)
        if value_head is not None:
            value_head, group = unwrapped(value_head, group)
        self.ranks, self.reduce = ranks_of(model, group, value_head), reduce
        self.in_lockstep = is_sharded(model)
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
        """What passes cost on this model as it is now, on its device: measured when first asked for, and cached.

        By formula for a sharded model, whose passes no rank can run by itself.
        """
        if self.in_lockstep:
            return formula_cost_of(self.model)
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
        return self.capabilities.auxiliary != 0

    def forward_backward(
        self,
        trajectories: Sequence[Trajectory] | TokenTree,
        loss: Any,
        normaliser: float | None = None,
        balance: RouterBalance | None = None,
        *,
        sync: bool = True,
        mask: Sequence[Any] | None = None,
    ) -> StepResult:
        """Accumulate d loss / d parameters into ``.grad``, exactly as if every row were trained by itself.

        Args:
            loss: called with log-probabilities [L - 1], entropies and a trajectory; returns an unnormalised sum
                and metrics; one whose ``needs`` list "predicted_values" is also given ``values``, [L - 1]. The losses
                of this library compute only what has a loss weight; a loss of your own gets every row and every
                prediction, whatever the weights.
            normaliser: what the sum is divided by; pass that of the whole step when accumulating over calls.
                None asks the loss.
            balance: of the routers over the whole step, the sum of `router_balance` over its calls; None takes each
                call for a step of its own. Where the model's configuration asks for an auxiliary loss of its routers
                (``output_router_logits`` and ``router_aux_loss_coef``), it is that of all tokens of all rows.
            sync: over several ranks: False leaves every rank its own gradients (sharded ones: unreduced), for all calls
                of a step but the last.
            mask: K rows [L_k - 1], bools or weights: predictions whose entry is 0 are not computed; a loss of your own
                sees 0 there. None: losses of this library compute what has a loss weight, others everything.

        Returns:
            loss, metrics and counts of the rows of all ranks. On a GPU without other ranks this returns when the work
            is queued, so that the next batch can be prepared meanwhile; reading loss or metrics waits for it.

        Raises:
            RanksDisagree: another rank makes another step, or could not make its own.
            DataError: an id outside the vocabulary, a row longer than the model's positions, nothing to train,
                a fact that the loss needs and a row lacks.
            ValueError: no parameter to train, gradients switched off, a normaliser that is not above 0.
            TypeError: the loss is no loss, or does not return a scalar and metrics.
            UnsupportedModel: see the class.
            RuntimeError: memory ran out in a backward while gradients of earlier calls lay in ``.grad``.
        """
        begun = begin(self, trajectories, loss, normaliser, merge=self._merge, mask=mask)
        if self._balanced and balance is None and not self.ranks.alone:
            balance = self.router_balance(begun.tree)
        begun, plan = self._planned(begun, sync=sync, balance=balance)
        never = why_not_again(self.parameters, waiting_gradients(self.model, self.value_head))

        def step() -> tuple[None, StepResult]:
            done, _, counts = self._within_memory(begun, plan, never, balance)
            result = result_of(done, begun, counts)
            return None, result if self.ranks.alone else result.on_host()

        try:
            _, results = self.ranks.agree("the step", step)
        except RanksDisagree as error:
            self.take_back(never, error)
            raise
        if sync:
            self.ranks.average_gradients([p for p in self.parameters if not is_shard(p)])
        return summed(results, over=len(results))

    def _planned(self, begun: Begun, *, sync: bool, balance: RouterBalance | None) -> tuple[Begun, Plan]:
        """The plan of this rank's part of a step, and when sharded gradients are reduced."""

        def planned() -> tuple[Begun, Plan]:
            batch, plan = begun.batch, self.plan_of(begun.batch.layout)
            if isinstance(batch, Batch) and batch.weighted and (rows := self._row_by_row(begun.tree, plan)):
                return begun._replace(batch=Batch.of(rows[0], weighted=True)), rows[1]
            return begun, plan

        # Not where all tokens of a step are counted: apart, some are computed twice.
        apart = self._merge and not self._balanced
        return agreed_plan(self, planned, apart=apart, sync=sync, balance=balance)

    def _within_memory(
        self, begun: Begun, plan: Plan, never: str | None, balance: RouterBalance | None
    ) -> tuple[Step, Plan, PassCounts]:
        def run(plan: Plan, counts: PassCounts) -> Step:
            return self._try(plan, begun, counts, never, balance)

        if self.in_lockstep:
            counts = PassCounts()
            return run(plan, counts), plan, counts
        return within_memory(self.model, plan, run, partial(self.smaller_plan, begun.batch.layout))

    def plan_of(self, layout: PackedLayout) -> Plan:
        """The plan of what is computed of a batch."""
        free = self.free_bytes() if self.budget is None else None
        return plan_within(layout, self.budget, self.model, lambda: self.cost, free=free)

    def free_bytes(self) -> int | None:
        """What plans may use of the device now, less gradients to come; processes on one host share its memory."""
        free = device_free_bytes(self.model)
        if free is None:
            return None
        if not self.ranks.alone and model_device(self.model).type == "cpu":
            free //= int(os.environ.get("LOCAL_WORLD_SIZE", self.ranks.size))
        return max(free - gradient_bytes_to_come(self.parameters), 0)

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
        begun: Begun,
        counts: PassCounts,
        never: str | None,
        balance: RouterBalance | None,
    ) -> Step:
        """A step whose failure leaves gradients as they were, or says that it does not.

        Args:
            never: why gradients cannot be put back.
        """

        def run() -> Step:
            scale = self.capabilities.auxiliary * self.ranks.size
            routing = self.routing(begun.batch.tree, balanced=self._balanced, whole=balance, scale=scale)
            step = self._step(begun, plan, counts, routing)
            return step if routing is None else Step(*routing.added_to(*step))

        return self.undone_if_it_fails(never, run)

    def undone_if_it_fails(self, never: str | None, run: Callable[[], T]) -> T:
        """Call something whose failure leaves gradients as they were, or says that it does not.

        Args:
            never: why gradients cannot be put back.
        """
        try:
            return run()
        except BaseException as error:
            if isinstance(error, StepOutOfMemory) and not error.backward_begun:
                raise
            if never is not None and isinstance(error, StepOutOfMemory):
                raise cannot_start_over(error, never) from error
            self.take_back(never, error)
            raise

    def take_back(self, never: str | None, error: BaseException) -> None:
        """Leave the gradients as they were before a step that failed, or say that they are not."""
        drop_waiting_gradients(self.model, self.value_head)
        if never is not None:
            note = f"{never}; what this step has added to them is incomplete"
            if note not in getattr(error, "__notes__", []):
                error.add_note(note)
            return
        for parameter in self.parameters:
            parameter.grad = None

    def _step(self, begun: Begun, plan: Plan, counts: PassCounts, routing: Routing | None) -> Step:
        entropy, layout = "entropies" in begun.loss.needs, begun.batch.layout
        sizes = layout.num_edges, len(layout.rows)
        table = ScoreTable(*sizes, device=model_device(self.model), dtype=wide_dtype(self.model), entropy=entropy)

        def executor(way: Way) -> Executor | None:
            if way != "keeping all":
                return self.executor(plan, counts, routing, gradients=way == "training", reduces=begun.reduces)
            kept = plan.with_all_kept()
            # Ranks in lockstep would have to agree on it; a step that starts over has run out of memory.
            if self.in_lockstep or counts.starts_over or not self._fits(kept):
                return None
            keep_logits = self.has_room_for_logits(kept)
            return self.executor(kept, counts, routing, gradients=True, keep_logits=keep_logits)

        return StepRun(
            begun,
            plan,
            table,
            executor,
            routing,
            self.ranks,
            in_lockstep=self.in_lockstep,
        ).run()

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

        def prepared() -> tuple[tuple[Routing, PackedLayout, Plan], None]:
            self.capabilities = self._checked()
            tree = as_tree(trajectories, merge=self._merge)
            check_batch(tree, self.capabilities)
            routing = self.routing(tree, balanced=True)
            if routing is None:
                raise ValueError(f"{type(self.model).__name__} has no experts, so there is no balance between them")
            layout = pack(tree, trim=False)
            return (routing, layout, self.plan_of(layout)), None

        (routing, layout, plan), _ = self.ranks.agree("router_balance", prepared)

        def route(plan: Plan, counts: PassCounts) -> None:
            routing.begin()
            self.executor(plan, counts, routing, gradients=False).route()

        def balance() -> tuple[None, RouterBalance]:
            self._without_gradients(plan, layout, route)
            return None, routing.balance.to("cpu")

        _, found = self.ranks.agree("counting choices", balance)
        return functools.reduce(operator.add, found).to(model_device(self.model))

    def _without_gradients(self, plan: Plan, layout: PackedLayout, run: Callable[[Plan, PassCounts], None]) -> None:
        """A run that starts over in smaller parts where memory runs out and no other rank waits."""
        if self.in_lockstep:
            run(plan, PassCounts())
        else:
            within_memory(self.model, plan, run, partial(self.smaller_plan, layout))

    def executor(
        self,
        plan: Plan,
        counts: PassCounts,
        routing: Routing | None,
        *,
        gradients: bool,
        reduces: Reduces = "each",
        statistics: bool = False,
        keep_logits: bool = False,
    ) -> Executor:
        """What runs a plan on the model; under FSDP2 a collective call. See `Executor`."""
        return Executor(
            self.model,
            self.capabilities,
            plan,
            temperature=self.temperature,
            gradients=gradients,
            run_type=self.run_type,
            counts=counts,
            routing=routing,
            lockstep=lockstep_of(self, plan, routing, gradients=gradients, reduces=reduces),
            statistics=statistics,
            keep_logits=keep_logits,
        )

    def score(
        self,
        rows: Sequence[Row] | TokenTree,
        *,
        entropies: bool = False,
        values: bool = False,
        rewards: bool = False,
        statistics: bool = False,
        mask: Sequence[Any] | None = None,
    ) -> Scored:
        """Run the batch as a tree and hand out leaf tensors, one per row, for a loss of anybody's own.

        Call ``backward`` on a loss that is computed from the leaves, then ``backward`` on what this returns. Where the
        graphs of all parts fit into the budget they are kept in between; else the parts run again (``.plan`` says so).
        Under ``torch.no_grad`` nothing is kept. Under FSDP2 every rank must make the call, be it without rows.

        Args:
            rows: K lists, arrays or tensors of token ids, trajectories, or a tree.
            entropies: also give the entropies of the distributions that tokens were drawn from.
            values: also give the value of the state before each token (see ``value_head``).
            rewards: give what a reward model says of every row, and nothing else.
            statistics: also give what trainers log, without gradient: is_top1, mean_logits, log_sum_sq_probs.
            mask: K rows [L_k - 1], bools or weights: predictions whose entry is 0 are not computed; they hold 0 and get
                no gradient. None computes all.

        Raises:
            DataError: an id outside the vocabulary, a row longer than the model's positions, a mask of another shape.
            UnsupportedModel: see the class; values or rewards of a model that has no head for them.
        """

        def prepared() -> tuple[TokenTree, Any]:
            found = self._checked()
            logprobs = not rewards and (found.scores_tokens or not values)
            self.capabilities = found.asked(logprobs=logprobs, values=values or rewards)
            if is_live(self):
                check_hooks(self)
            tree = as_tree(rows, merge=self._merge)
            check_batch(tree, self.capabilities)
            if rewards:
                return tree, rewards_layout(tree, self.capabilities)
            predicted = predictions_of(tree, mask)
            return tree, Batch.of(tree, weighted=False, every_token=self._balanced, mask=predicted)

        tree, batch = self.together("score", prepared)
        if rewards:
            layout, last = batch
            scoring = Scoring(self, tree, layout)
            scoring.forward()
            return Scored.of_rewards(scoring, tree, last)
        scoring = Scoring(
            self,
            tree,
            batch.layout,
            entropy=entropies,
            statistics=statistics,
            balanced=self._balanced,
        )
        scoring.forward()
        return Scored.of_predictions(scoring, batch, values=values, aux=self._balanced)

    def plan_to_score(self, layout: PackedLayout, *, keep: bool = True) -> Plan:
        """The plan of a batch whose loss is known when all of it has been scored.

        Args:
            keep: False: parts are recomputed, also where their graphs fit beside each other.
        """
        plan = self.plan_of(layout)
        kept = plan.with_all_kept()
        if keep and (plan.num_parts <= 1 or self._fits(kept)):
            return kept
        return replace(plan, scores_first="recomputed")

    def _fits(self, plan: Plan) -> bool:
        """Whether a plan stays within the budget, or without one within what the device has free."""
        if isinstance(self.budget, int):
            return plan.peak_tokens <= self.budget
        formula = formula_cost(self.model)
        if formula is None:
            return False
        if isinstance(self.budget, Bytes):
            return self.cost.peak_bytes(plan) <= self.budget.count
        free = self.free_bytes()
        return free is None or AMPLE * formula.peak_bytes(plan) <= free or self.cost.peak_bytes(plan) <= free

    def has_room_for_logits(self, plan: Plan) -> bool:
        """Whether the logits of all scored rows fit beside the graphs of a plan, with room to spare.

        Kept, they save a second product of the head's matrix with every row.
        """
        formula = formula_cost(self.model)
        room = self.budget.count if isinstance(self.budget, Bytes) else self.free_bytes()
        if formula is None or room is None:
            return False
        logits = len(plan.layout.rows) * self.capabilities.vocab_size * wide_dtype(self.model).itemsize
        return AMPLE * (formula.peak_bytes(plan) + logits) <= room

    def smaller_plan_to_score(self, layout: PackedLayout, tokens: int, *, live: bool) -> Plan:
        """As `smaller_plan`, where memory ran out."""
        plan = self.smaller_plan(layout, tokens)
        return replace(plan, scores_first="recomputed") if live else plan

    def logprobs(
        self,
        trajectories: Sequence[Row] | TokenTree,
        *,
        return_entropy: bool = False,
        mask: Sequence[Any] | None = None,
    ) -> Any:
        """Log-probabilities of every token but the first of every row, without gradient, with training's numerics.

        Args:
            trajectories, mask: as `score`.

        Returns:
            K tensors [L_k - 1], in nats; with ``return_entropy`` a second list of K tensors of entropies.
        """
        with torch.no_grad():
            scored = self.score(trajectories, entropies=return_entropy, mask=mask)
        return (scored.logprobs, scored.entropies) if return_entropy else scored.logprobs

    def together(self, what: str, make: Callable[[], T]) -> T:
        """Prepare a call, on every rank where ranks make it together; see `Ranks.agree`."""
        return self.ranks.agree(what, lambda: (make(), None))[0] if self.in_lockstep else make()

"""The engine: gradients of any loss over branching trajectories; every shared prefix is computed once.

One step: check the rows and pack their tree, plan its parts, run each part forward and backward, and add up the loss.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, SupportsFloat

import numpy as np
import torch
from torch import Tensor, nn

from treetrain.core.engine.engine_model import Call, EngineModel, Registry, Sharing, StepBalance
from treetrain.core.engine.executor import Executor
from treetrain.core.engine.extension import Extension, LossExtension, Reduces
from treetrain.core.engine.loss_gradients import (
    Batch,
    KnownGradients,
    Mask,
    StreamedGradients,
    check_batch,
    last_states,
    predictions_of,
    sum_by_place,
)
from treetrain.core.engine.memory import Rollback, Try
from treetrain.core.engine.model_passes import ModelPasses
from treetrain.core.engine.ranks import Ranks
from treetrain.core.engine.score import Scored, Scoring, States, run_batch_loss
from treetrain.core.errors import DataError, UnsupportedModel
from treetrain.core.hf.capability import Capabilities
from treetrain.core.hf.tree_mode import instance_of
from treetrain.core.losses.facts import Metrics
from treetrain.core.losses.protocol import Loss, LossProtocol, StepResult, as_loss, needs_logprobs, summed
from treetrain.core.planning.cost import CostModel
from treetrain.core.planning.make import PART_TOKENS, Bytes, parse_budget
from treetrain.core.planning.partition import whole_trees
from treetrain.core.planning.plan import Plan
from treetrain.core.tree.layout import PackedLayout, pack, pack_states
from treetrain.core.tree.token_ids import IdSets
from treetrain.core.tree.token_tree import Row, TokenTree, as_tree
from treetrain.core.tree.trajectory import Trajectory

WORTH_A_LOOK = 1.05
"""If rows have more than this many times the tree's tokens, sharing wins, and no plan without sharing is tried."""


class Step(NamedTuple):
    """A step that has been checked on every rank."""

    call: Call
    tree: TokenTree
    """The tree of all rows. That of the batch is the one that runs, whose rows may share nothing (`_faster`)."""
    batch: Batch
    loss: Loss
    normaliser: float
    """The step's normaliser, divided by the number of data-parallel ranks, since gradients are averaged over them."""
    rows: Sequence[Trajectory]
    """The rows of all ranks, if the loss needs them."""
    masked: bool
    """Whether the caller gave a mask of predictions."""


def checked_temperature(value: float) -> float:
    """The temperature; raises ValueError unless it is above 0 and finite."""
    if isinstance(value, bool | str) or not isinstance(value, SupportsFloat) or not 0 < float(value) < float("inf"):
        raise ValueError(f"temperature={value!r}: it divides the logits, so it must be above 0 and finite")
    return float(value)


def id_sets_of(tree: TokenTree, ids: Sequence[object]) -> list[IdSets | None]:
    """Ids that are given for the predictions of each row, as sets for its tokens. Raises DataError."""
    if len(ids) != tree.num_trajectories:
        raise DataError(
            f"ids has {len(ids)} rows, the batch {tree.num_trajectories}; give one for each, None for no ids"
        )
    sets: list[IdSets | None] = []
    for number, (row, length) in enumerate(zip(ids, tree.trajectory_length.tolist())):
        found = None if row is None else IdSets.of(row, f"ids[{number}]", max(length - 1, 0))
        sets.append(None if found is None else IdSets(np.append(0, found.starts)[: length + 1], found.ids))
    return sets


class TreeEngine:
    """Runs batches of trajectories on a Hugging Face causal LM as prefix trees.

    This is the engine of a dense model in one process. `treetrain.TreeEngine` adds what other models, rows and devices
    need.

    Args:
        model, budget, temperature, value_head: see `treetrain.TreeEngine`.
        sharing: how processes share its steps.
        registry: what it uses from outside the core.

    Raises:
        UnsupportedModel: the model, its value head or a setting would not be exact on a tree.
        ValueError: a temperature that is not above 0, or a budget that is neither tokens nor bytes.
    """

    merge = True
    """Whether rows that share a prefix are computed together; False for the linear baseline."""
    passes_type: type[ModelPasses] = ModelPasses

    def __init__(
        self,
        model: nn.Module,
        *,
        budget: int | str | Bytes | None = None,
        temperature: float = 1.0,
        value_head: nn.Module | None = None,
        sharing: Sharing | None = None,
        registry: Registry | None = None,
    ):
        self.sharing = Sharing() if sharing is None else sharing
        self.ranks: Ranks = self.sharing.ranks
        """The processes that share each step."""
        temperature = checked_temperature(temperature)
        parsed, shares = parse_budget(budget), self.sharing.divides_parts
        if isinstance(parsed, Bytes):
            parsed = Bytes(parsed.count * shares)
        elif parsed is not None:
            parsed *= shares
        self.prepared = EngineModel(
            model,
            value_head,
            budget=parsed,
            temperature=temperature,
            sharing=self.sharing,
            registry=Registry() if registry is None else registry,
        )
        self.sharing.check_model(self.prepared.capabilities)

    # ---- the model and its plans

    @property
    def model(self) -> nn.Module:
        """The model, without a wrapper of `DistributedDataParallel`."""
        return self.prepared.model

    @property
    def value_head(self) -> nn.Module | None:
        """The head that makes values, if one was given."""
        return self.prepared.value_head

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of the model and the value head, each once."""
        self.prepared.read()
        return self.prepared.parameters

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the model, as they were checked last."""
        return self.prepared.capabilities

    @property
    def budget(self) -> int | Bytes | None:
        """The budget; of all processes together that divide the tokens of parts."""
        return self.prepared.budget

    @property
    def temperature(self) -> float:
        """Divides the logits before the softmax; it may be set between calls.

        Raises:
            ValueError: a temperature that is not above 0.
        """
        return self.prepared.temperature

    @temperature.setter
    def temperature(self, value: float) -> None:
        self.prepared.temperature = checked_temperature(value)

    @property
    def balanced(self) -> bool:
        """Whether the model adds an auxiliary loss of its routers, over all tokens of a step."""
        return self.prepared.capabilities.auxiliary != 0

    @property
    def cost(self) -> CostModel:
        """The cost model of this model as it is now: counted without running it, with published speeds.

        Raises:
            UnsupportedModel: a model that cannot be counted.
        """
        cost = self.prepared.count()
        return replace(cost, counts=self.prepared.counts(cost.counts))

    def tree_of(self, rows: Sequence[Row] | TokenTree) -> TokenTree:
        """The tree of a batch; raises DataError for rows that are no token ids."""
        return as_tree(rows, merge=self.merge)

    def plan_of(self, call: Call, layout: PackedLayout) -> Plan:
        """The plan of a layout under the engine's budget."""
        return call.plan(layout, call.budget)

    def plan(self, trajectories: Sequence[Trajectory] | TokenTree) -> Plan:
        """The plan of a training step on these trajectories under the engine's budget.

        Raises:
            DataError: rows that the model cannot read.
            UnsupportedModel: the model has changed and would not be exact on a tree now.
        """
        call = self.prepared.call()
        tree = self.tree_of(trajectories)
        self._before_plan(call, tree)
        plan = self.plan_of(call, pack(tree, tree.trained_edges()[0] > 0, trim=not self.balanced))
        return self._faster(call, tree, plan)[1]

    # ---- a training step

    def forward_backward(
        self,
        trajectories: Sequence[Trajectory] | TokenTree,
        loss: LossProtocol | Callable[..., object],
        normaliser: float | None = None,
        balance: StepBalance | None = None,
        *,
        sync: bool = True,
        mask: Mask | None = None,
    ) -> StepResult:
        """Accumulate d loss / d parameters into ``.grad``, exactly as if every row were trained by itself.

        `treetrain.TreeEngine.forward_backward` says what the arguments are, what is returned, and what errors rise.
        """
        ranks = self.ranks
        with ranks.together("forward_backward"):
            step = self._prepare(trajectories, loss, normaliser, mask)
            if self.balanced and balance is None and ranks.data_size > 1:
                balance = self._balance_of(step.tree)
            step, plan, reduces = self._plan_step(step, sync=sync, balance=balance)
            self._compare_first_use(step.call, step.tree)  # before any gradient is accumulated
            with Rollback(self.prepared.parameters, self.sharing) as rollback:
                result = self._run(step, plan, reduces, balance, rollback)
                if ranks.data_size > 1:
                    result = summed(ranks.per_data_rank(ranks.exchange(result.on_host())), over=ranks.data_size)
        if sync:
            self.sharing.average_gradients(self.prepared.parameters)
        return result

    def _prepare(
        self,
        trajectories: Sequence[Trajectory] | TokenTree,
        loss: object,
        normaliser: float | None,
        mask: Mask | None,
    ) -> Step:
        """Check a step on all ranks before any rank runs it, and pack its rows.

        Raises:
            DataError, TypeError, ValueError, UnsupportedModel: something is wrong on this rank.
            RanksDisagree: something is wrong on another rank, or settings differ.
        """
        ranks = self.ranks
        loss = as_loss(loss, normaliser)
        call = self.prepared.call(logprobs=needs_logprobs(loss), values="predicted_values" in loss.needs)
        if not torch.is_grad_enabled():
            raise ValueError("gradients are switched off (torch.no_grad); use .logprobs, or leave that block")
        if not self.prepared.trained:
            raise ValueError("every parameter of the model is frozen (requires_grad=False); nothing can be trained")
        self.sharing.check_hooks(self.prepared.parameters)
        self._check_device()
        tree = self.tree_of(trajectories)
        if "id_logprobs" in loss.needs:
            tree = replace(tree, asked=[row.teacher_topk for row in tree.trajectories])
        self._before_plan(call, tree)
        predicted = predictions_of(tree, mask)
        rows, weight = self.sharing.rows_of_all_ranks(call, type(self).__name__, tree.trajectories, loss, normaliser)
        if rows is not None:
            loss.check(rows)
            whole = loss.normaliser(rows) if normaliser is None else normaliser
        else:
            whole = weight if normaliser is None else normaliser
            if normaliser is None and whole <= 0:
                raise DataError(
                    f"nothing to train: the loss weights of all rows on all {ranks.data_size} ranks sum to 0 (entry 0 "
                    "of a row is never trained); give loss_weights that are not 0, or rows of two tokens and more"
                )
        number = isinstance(whole, SupportsFloat) and not isinstance(whole, bool | str)
        if not number or not 0 < float(whole) < float("inf"):
            given = float(whole) if number else repr(whole)
            raise ValueError(
                f"the normaliser is {given}; a step's loss is divided by it, so it must be above 0 and finite"
            )
        whole = float(whole)
        batch = Batch.of(tree, weighted=not loss.reads_untrained, every_token=self.balanced, mask=predicted)
        ranks.exchange(None)  # ranks with the same tokens may have different facts: one may fail here and others not
        call.free = self.sharing.agree_on_plan(ranks, batch.layout, call.free)
        return Step(call, tree, batch, loss, whole / ranks.data_size, rows or [], masked=mask is not None)

    def _check_device(self) -> None:
        """Refuse a model without weights, and a default device on which tensors would be made beside the model's."""
        own, default = self.prepared.device, torch.get_default_device()
        if own.type == "meta":
            raise UnsupportedModel(
                f"{type(self.model).__name__} is on the meta device, which holds no weights: load them "
                "(from_pretrained), or give it some (model.to_empty(device=...) and an initialisation)"
            )
        if default.type not in ("cpu", own.type):
            raise ValueError(
                f"the default device is {default} (with torch.device(...), or torch.set_default_device) and the model "
                f"is on {own}: tensors would be made beside it. Call this outside of that block"
            )

    def _before_plan(self, call: Call, tree: TokenTree) -> None:
        """Raise DataError for rows that the model cannot read; note what they need besides the parts of a plan."""
        features = call.registry.features
        check_batch(tree, call.capabilities)
        for name in tree.special:
            if not any(name in feature.takes for feature in features):
                raise UnsupportedModel(f"rows have {name}, which this engine does not know; take treetrain.TreeEngine")
        for feature in features:
            feature.check_rows(call, tree)
        for feature in features:
            feature.before_plan(call, self.passes_type)

    def _plan_step(self, step: Step, *, sync: bool, balance: StepBalance | None) -> tuple[Step, Plan, Reduces]:
        """Plan this rank's passes, and say which backwards reduce sharded gradients."""
        batch, ranks = step.batch, self.ranks
        tree, plan = batch.tree, self.plan_of(step.call, batch.layout)
        if not step.masked and batch.weighted:
            tree, plan = self._faster(step.call, step.tree, plan)
        reduces: Reduces = "each"
        if not ranks.alone:
            ranks.same(
                {
                    "sync": sync,
                    "the normaliser that the loss gives": step.normaliser * ranks.data_size,
                    "the balance of the routers": None if balance is None else balance.compared(),
                }
            )
        if self.sharing.collective:
            # Runs that share nothing compute some tokens twice, which an auxiliary loss would count twice.
            apart = not step.masked and self.merge and not self.balanced
            tree, plan, reduces = self.sharing.plan_together(
                step.call, tree, plan, weighted=batch.weighted, apart=apart
            )
        if tree is not batch.tree:
            step = step._replace(batch=Batch.of(tree, weighted=batch.weighted))
        return step, plan, reduces if sync else "never"

    def _faster(self, call: Call, tree: TokenTree, plan: Plan) -> tuple[TokenTree, Plan]:
        """The faster of two: the tree under its plan, or its rows without sharing, as many whole rows a part as fit.

        Where a tree is cut, a shared prefix may be a part by itself. A pass costs something whatever its size, so a
        prefix of a token or two costs less if every row computes it again.
        """
        budget, cost = call.budget, call.cost
        if not self.merge or self.balanced or isinstance(budget, Bytes) or cost is None or plan.num_parts < 2:
            return tree, plan
        # Where rows share much, sharing wins; looking at a second plan would only take time.
        if int(tree.trained_edges()[1].sum()) > WORTH_A_LOOK * plan.layout.num_tokens:
            return tree, plan
        rows = tree.rebuilt(merge=False)
        layout = pack(rows, rows.trained_edges()[0] > 0)
        if budget is not None and int(layout.positions.max(initial=0)) >= budget:
            return tree, plan  # a row that does not fit as a whole has to be cut, as in the tree
        alone = whole_trees(layout, min(PART_TOKENS[cost.device], budget or sys.maxsize))
        return (rows, alone) if cost.seconds(alone) < cost.seconds(plan) else (tree, plan)

    def _run(
        self, step: Step, plan: Plan, reduces: Reduces, balance: StepBalance | None, rollback: Rollback
    ) -> StepResult:
        """Accumulate the gradients of this rank's part of a step."""
        call, scale = step.call, step.call.capabilities.auxiliary * self.ranks.data_size
        attach = functools.partial(
            call.extensions, step.batch.tree, balanced=self.balanced, balance=balance, scale=scale, reduces=reduces
        )
        if step.loss.scope == "batch":  # it needs all scores before the first gradient
            scoring = Scoring(call, plan, attach, entropy="entropies" in step.loss.needs, passes_type=self.passes_type)
            total, sums = run_batch_loss(
                step.loss, step.normaliser, step.batch, step.rows, scoring, scale, reduces, rollback
            )
            parts, without_graph, attention = scoring.plan.num_parts, scoring.tokens_without_graph, scoring.attention
            added = scoring.added_loss
        else:
            for attempt in call.tries(plan, rollback):  # the last, read below, has enough memory
                with attempt:
                    extensions = attach()
                    total, sums = self._stream(step, attempt, extensions)
            counts, added = attempt.counts, instance_of(LossExtension, extensions)
            parts, without_graph, attention = counts.parts, counts.tokens_without_graph, counts.attention
        if added is not None:
            total, sums = added.added_to(total, sums)
        return StepResult(
            loss_tensor=total,
            metric_sums=sums,
            flat_tokens=step.tree.num_flat_tokens,
            unique_tokens=step.tree.num_tokens,
            computed_tokens=step.batch.layout.num_tokens,
            recomputed_tokens=without_graph,
            parts=parts,
            attention=attention,
        )

    def _stream(self, step: Step, attempt: Try, extensions: list[Extension]) -> tuple[Tensor | float, Metrics]:
        """Run the plan once for a loss that sums over trajectories; each is evaluated when its last edge is scored."""
        call, plan, counts = step.call, attempt.plan, attempt.counts
        batch, loss, normaliser = step.batch, step.loss, step.normaliser
        table = call.table(batch.layout, entropy="entropies" in loss.needs)
        has_passes = plan.num_parts > 0 or self.sharing.collective  # ranks without rows run along with the others
        added = instance_of(LossExtension, extensions)
        # A loss over all tokens of a step has no gradients before the last token has passed. A single part has passed
        # when its backward begins; of several, all run forward once before.
        if has_passes and added is not None and plan.num_parts > 1 and not added.known:
            first = self.passes_type(call, extensions, counts, None)
            Executor(plan, first, gradients=False).score()
            added.settle()
        facts = coefficients = None
        if has_passes and "entropies" not in loss.needs and batch.kept is None:
            facts = batch.facts(table.logprobs)
            coefficients = loss.coefficients(facts)
        # A loss that is linear in the log-probabilities has gradients before any pass: the head makes its own in the
        # same pass over the logits. Any other loss is evaluated row by row, as the rows end.
        if coefficients is not None:
            known = sum_by_place(table.logprobs, batch.edges, coefficients) / normaliser
            gradients = KnownGradients(table, known)
        else:
            gradients = StreamedGradients(table, batch, loss, normaliser)
        if has_passes:
            logits = coefficients is None and call.keeps_logits(plan)  # else the head makes them again in backward
            passes = self.passes_type(call, extensions, counts, table, gradients, keep_logits=logits)
            Executor(plan, passes, gradients=True).train()
        if isinstance(gradients, StreamedGradients):
            gradients.finish()
            return gradients.total, gradients.sums
        assert facts is not None
        with torch.no_grad():
            total, sums = loss.packed(batch.at_edges(table.logprobs), None, facts, None)
        return total / normaliser, sums

    def _balance_of(self, tree: TokenTree) -> StepBalance | None:
        """The balance of special layers over all tokens of a step; a collective call."""
        return None

    # ---- scores

    def score(
        self,
        rows: Sequence[Row] | TokenTree,
        *,
        entropies: bool = False,
        values: bool = False,
        rewards: bool = False,
        statistics: bool = False,
        mask: Mask | None = None,
        ids: Sequence[object] | None = None,
    ) -> Scored:
        """Run the batch as a tree and return leaf tensors, one per row, for any loss.

        `treetrain.TreeEngine.score` says what the arguments are, and what errors rise.
        """
        wanted: bool | None = not rewards
        if values:
            wanted = None  # log-probabilities too, if the model has an LM head
        return self._scored(
            "TreeEngine.score",
            rows,
            logprobs=wanted,
            values="rewards" if rewards else "predictions" if values else None,
            entropies=entropies,
            statistics=statistics,
            mask=mask,
            ids=ids,
        )

    def _scored(
        self,
        name: str,
        rows: Sequence[Row] | TokenTree,
        *,
        logprobs: bool | None,
        values: Literal["predictions", "states", "rewards"] | None,
        in_autograd: bool = False,
        entropies: bool = False,
        statistics: bool = False,
        mask: Mask | None = None,
        ids: Sequence[object] | None = None,
    ) -> Scored:
        """Run the batch as a tree; see `score`.

        Args:
            name: the call, for messages.
            logprobs: whether to score tokens; None: if the model has an LM head.
            values: the values of predictions, of every token's state, or of every row.
            in_autograd: whether gradients go through autograd, and not through `Scored.backward`.
        """
        ranks = self.sharing.passes_with
        with ranks.together(name):
            call = self.prepared.call(logprobs=logprobs, values=values is not None)
            if in_autograd:
                self._check_live(name)
            if self.prepared.live:
                self.sharing.check_hooks(self.prepared.parameters)
            self._check_device()
            tree = self.tree_of(rows)
            if ids is not None:
                tree = replace(tree, asked=id_sets_of(tree, ids))
            self._before_plan(call, tree)
            reads: Batch | States
            if values == "rewards":
                layout, last = last_states(tree, call.capabilities)
                reads = States(last, None)
            elif values == "states":
                offsets, index = tree.paths()
                layout, reads = pack_states(tree), States(index, np.diff(offsets).tolist())
            else:
                reads = Batch.of(tree, weighted=False, every_token=self.balanced, mask=predictions_of(tree, mask))
                layout = reads.layout
            call.free = self.sharing.agree_on_plan(ranks, layout, call.free)
            plan = self.plan_of(call, layout)
            self._compare_first_use(call, tree)
            ranks.exchange(None)  # all ranks have a plan, or none runs a pass
            tokens = isinstance(reads, Batch)
            attach = functools.partial(call.extensions, tree, balanced=tokens and self.balanced)
            scoring = Scoring(
                call,
                plan,
                attach,
                entropy=entropies and tokens,
                statistics=statistics and tokens,
                passes_type=self.passes_type,
            )
            return Scored(name, scoring, tree, reads, values=values is not None)

    def logprobs(
        self,
        trajectories: Sequence[Row] | TokenTree,
        *,
        return_entropy: bool = False,
        mask: Mask | None = None,
    ) -> Any:
        """Log-probabilities of every token but the first of every row, without gradient, with training's numerics.

        Args:
            trajectories, mask: as `score`.

        Returns:
            K tensors [L_k - 1], in nats; with ``return_entropy`` a second list of K tensors of entropies.
        """
        with torch.no_grad():
            scored = self.score(trajectories, entropies=return_entropy, mask=mask)
        return (list(scored.logprobs), list(scored.entropies or ())) if return_entropy else list(scored.logprobs)

    def _check_live(self, what: str) -> None:
        """Raise UnsupportedModel if gradients through autograd would lack what only a step of the engine adds."""
        if not self.prepared.live:
            return
        added = [layers.loss_name for layers in self.prepared.capabilities.special if layers.auxiliary]
        why = f"lack the gradient of {' and '.join(added)}" if added else self.sharing.why_not_live()
        if why is None:
            return
        raise UnsupportedModel(
            f"{what} with gradients is refused: they would {why}. Use scored = TreeEngine(model).score(rows), "
            "loss.backward() and scored.backward(), which averages gradients over the ranks (sync=False leaves that to "
            "you) and has scored.aux_loss, or TreeEngine(model).forward_backward; or call this under torch.no_grad()."
        )

    def _compare_first_use(self, call: Call, tree: TokenTree) -> None:
        """Called before the passes of a call; may compare the model with its rows one by one."""

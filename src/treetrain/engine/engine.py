"""The engine: gradients of any loss over branching trajectories; every shared prefix is computed once."""

import functools
import hashlib
import operator
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from treetrain import __version__
from treetrain.data.trajectory import Trajectory
from treetrain.engine.costs import cost_if_countable
from treetrain.engine.distributed import check_same
from treetrain.engine.executor import Executor, Reduces, gradients_of
from treetrain.engine.loss import (
    Loss,
    LossProtocol,
    Metrics,
    RowLoss,
    StepResult,
    as_loss,
    needs_logprobs,
    summed,
)
from treetrain.engine.loss_gradients import (
    Batch,
    KnownGradients,
    Selection,
    StreamedGradients,
    added_up,
    check_batch,
    evaluate_gradients,
    last_states,
    predictions_of,
)
from treetrain.engine.packed import model_device
from treetrain.engine.probe import token_mixing_checked
from treetrain.engine.routing import RouterBalance, Routing
from treetrain.engine.runtime import PassCounts, Rollback, Runtime
from treetrain.engine.score import Scored, Scoring, States
from treetrain.errors import DataError, UnsupportedModel
from treetrain.planning.collective_order import Candidate, candidates, choose, offers_of
from treetrain.planning.devices import AMPLE
from treetrain.planning.make import PART_TOKENS, Bytes
from treetrain.planning.partition import whole_trees
from treetrain.planning.plan import Plan
from treetrain.tree.build import Row, as_tree, build_tree
from treetrain.tree.layout import PackedLayout, pack, pack_states
from treetrain.tree.stats import linear_work
from treetrain.tree.token_tree import TokenTree


class TreeEngine(Runtime):
    """Runs batches of trajectories on a Hugging Face causal LM as prefix trees.

    Args:
        model: a causal LM, plain or wrapped by peft; calls change only its ``.grad``.
        budget: an int bounds the tokens whose graph is alive at once; any tree runs at any int. A string such as "8GiB"
            bounds the peak memory above model, gradients and optimiser state. None takes what the device has free.
        temperature: divides the logits before the softmax.
        value_head: maps the inputs of a causal LM's head, [n, hidden], to values [n] (or [n, c]),
            for losses that need values. A model for token or sequence classification has its own head, and no
            log-probabilities.
        group: a torch.distributed group whose processes share each step, with the same model and their own rows (or
            none). Loss, metrics and gradients are those of all rows together. None: the ranks of a model in FSDP2
            (`fully_shard`) or `DistributedDataParallel`; with a plain model, this process alone.
        context: a group whose processes all pass the same rows, and divide the tokens of every part among them (context
            parallel; see docs/distributed.md). ``budget`` applies to each process. The processes that share a step
            include every context group as a whole.
        compile_layers: run decoder layers compiled (`torch.compile`), except attention, routers and recurrences. This
            takes a minute in the first step. None: on a GPU, unless in FSDP2 or tensor parallel.

    Raises:
        UnsupportedModel: the model, its value head or a setting would not be exact on a tree.
        ValueError: a temperature that is not above 0, or a budget that is neither tokens nor bytes.
    """

    def plan(self, trajectories: Sequence[Trajectory] | TokenTree) -> Plan:
        """The plan of a training step on these trajectories under the engine's budget."""
        tree = self.tree_of(trajectories)
        plan = self.plan_of(pack(tree, tree.trained_edges()[0] > 0, trim=not self.balanced))
        instead = rows_instead(self, tree, plan)
        return plan if instead is None else instead.plan

    def forward_backward(
        self,
        trajectories: Sequence[Trajectory] | TokenTree,
        loss: LossProtocol | Callable[..., Any],
        normaliser: float | None = None,
        balance: RouterBalance | None = None,
        *,
        sync: bool = True,
        mask: Sequence[Any] | None = None,
    ) -> StepResult:
        """Accumulate d loss / d parameters into ``.grad``, exactly as if every row were trained by itself.

        Args:
            loss: called with log-probabilities [L - 1], entropies and a trajectory; returns an unnormalised sum and
                metrics. If its ``needs`` list "predicted_values", it also gets ``values``, [L - 1]. For losses of this
                library, only predictions with a loss weight are computed; a loss of your own gets every row and every
                prediction.
            normaliser: divides the sum; when accumulating over calls, pass that of the whole step. None takes
                ``loss.normaliser``.
            balance: the routers' balance over the whole step: the sum of `router_balance` over its calls. None treats
                each call as a step. If the model's configuration asks for the routers' auxiliary loss
                (``output_router_logits`` and ``router_aux_loss_coef``), that loss is over all tokens of all rows.
            sync: with several ranks, False leaves gradients local (sharded ones unreduced); pass it in all calls of a
                step but the last.
            mask: K rows [L_k - 1], bools or weights: predictions whose entry is 0 are not computed; a loss of your own
                sees 0 there. None computes those with a loss weight for losses of this library, and all for your own.

        Returns:
            loss, metrics and counts of the rows of all ranks. A single process on a GPU returns when the work is
            queued, so it can prepare the next batch meanwhile; reading loss or metrics waits.

        Raises:
            RanksDisagree: another rank failed, or its settings differ.
            DataError: an id outside the vocabulary, a row longer than the model's positions, nothing to train,
                a fact that the loss needs and a row lacks.
            ValueError: no parameter to train, gradients switched off, a normaliser that is not above 0, bytes that no
                plan fits into.
            TypeError: the loss cannot be called as one, or does not return a scalar and metrics.
            UnsupportedModel: see the class.
            RuntimeError: memory ran out in a backward while ``.grad`` held gradients of earlier calls.
        """
        ranks = self.ranks
        step = prepare_step(self, trajectories, loss, normaliser, mask)
        if self.balanced and balance is None and ranks.data_size > 1:
            balance = self.router_balance(step.tree)
        step, plan, reduces = plan_step(self, step, sync=sync, balance=balance)

        def run() -> tuple[StepResult, StepResult | None]:
            result = run_step(self, step, plan, reduces, balance, rollback)
            return result, None if ranks.data_size == 1 else result.on_host()

        with self.rollback() as rollback, token_mixing_checked(self):
            result, results = ranks.agree("the step", run)
        if sync:
            self.average_gradients()
        return result if ranks.data_size == 1 else summed(ranks.of_data(results), over=ranks.data_size)

    def router_balance(self, trajectories: Sequence[Trajectory] | TokenTree) -> RouterBalance:
        """How the routers spread these rows over the experts, without gradient. The results of a step's calls add up.

        Raises:
            ValueError: a model without experts.
        """

        def prepared() -> tuple[tuple[Routing, Plan], None]:
            self.capabilities = self.checked()
            tree = self.tree_of(trajectories)
            check_batch(tree, self.capabilities)
            routing = self.routing(tree, balanced=True)
            if routing is None:
                raise ValueError(f"{type(self.model).__name__} has no experts, so there is no balance between them")
            return (routing, self.plan_of(pack(tree, trim=False))), None

        (routing, plan), _ = self.ranks.agree("router_balance", prepared)
        self.check_same_rows(self.ranks, plan.layout)

        def route(plan: Plan, counts: PassCounts) -> None:
            routing.begin()
            Executor(self, plan, counts, routing, gradients=False).score(None)

        def balance() -> tuple[None, RouterBalance]:
            self.within_memory(plan, route)
            return None, routing.balance.to("cpu")

        _, balances = self.ranks.agree("counting choices", balance)
        return functools.reduce(operator.add, self.ranks.of_data(balances)).to(model_device(self.model))

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
        """Run the batch as a tree and return leaf tensors, one per row, for any loss.

        Call ``backward`` on a loss computed from the leaves, then ``backward`` on the result. If the graphs of all
        parts fit into the budget, they are kept in between; else the parts run again (see ``.plan``). Under
        ``torch.no_grad`` nothing is kept. Under FSDP2 every rank must make the call, even without rows.

        Args:
            rows: K lists, arrays or tensors of token ids, trajectories, or a tree.
            entropies: also give the entropies of the distributions that tokens were drawn from.
            values: also give the value of the state before each token (see ``value_head``).
            rewards: give a reward model's value of every row, and nothing else.
            statistics: also give statistics for logs, without gradient: is_top1, mean_logits, log_sum_sq_probs.
            mask: K rows [L_k - 1], bools or weights: predictions whose entry is 0 are not computed; they hold 0 and get
                no gradient. None computes all.

        Raises:
            DataError: an id outside the vocabulary, a row longer than the model's positions, a mask of another shape.
            UnsupportedModel: see the class; values or rewards of a model that has no head for them.
        """
        return self._scored(
            "TreeEngine.score",
            rows,
            logprobs=False if rewards else None if values else True,
            values="rewards" if rewards else "predictions" if values else None,
            entropies=entropies,
            statistics=statistics,
            mask=mask,
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
        mask: Sequence[Any] | None = None,
    ) -> Scored:
        """Run the batch as a tree; see `score`.

        Args:
            name: the call, for messages.
            logprobs: whether to score tokens; None: if the model has an LM head.
            values: the values of predictions, of every token's state, or of every row.
            in_autograd: whether gradients go through autograd, and not through `Scored.backward`.
        """

        def prepared() -> tuple[tuple[TokenTree, PackedLayout, Batch | States], None]:
            capabilities = self.checked()
            wanted = capabilities.scores_tokens if logprobs is None else logprobs
            self.capabilities = capabilities.asked(logprobs=wanted, values=values is not None)
            if in_autograd:
                _check_live(self, name)
            if self.live:
                self.check_hooks()
            tree = self.tree_of(rows)
            check_batch(tree, self.capabilities)
            if values == "rewards":
                layout, last = last_states(tree, self.capabilities)
                return (tree, layout, States(last, None)), None
            if values == "states":
                offsets, index = tree.paths()
                return (tree, pack_states(tree), States(index, np.diff(offsets).tolist())), None
            batch = Batch.of(tree, weighted=False, every_token=self.balanced, mask=predictions_of(tree, mask))
            return (tree, batch.layout, batch), None

        (tree, layout, reads), _ = self.passes_with.agree(name, prepared)
        self.check_same_rows(self.passes_with, layout)
        tokens = isinstance(reads, Batch)
        scoring = Scoring(
            self,
            self.plan_of(layout),
            self.routing(tree, balanced=tokens and self.balanced),
            entropy=entropies and tokens,
            statistics=statistics and tokens,
        )
        with token_mixing_checked(self):
            return Scored(name, scoring, tree, reads, values=values is not None)

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
        return (list(scored.logprobs), list(scored.entropies or ())) if return_entropy else list(scored.logprobs)


WORTH_A_LOOK = 1.05
"""If rows have more than this many times the tree's tokens, sharing wins, and no plan without sharing is tried."""


class Step(NamedTuple):
    """A step that has been checked on every rank."""

    tree: TokenTree
    batch: Batch
    loss: Loss
    normaliser: float
    """The step's normaliser, divided by the number of data-parallel ranks, since gradients are averaged over them."""
    rows: Sequence[Trajectory]
    """The rows of all ranks, if the loss needs them."""
    masked: bool
    """Whether the caller gave a mask of predictions."""


# ---- a training step: checks

# Ranks share one step. Each sends the others the facts that they need about its rows. All ranks combine these in rank
# order, so they get the same loss constants and the same normaliser.


def prepare_step(
    runtime: Runtime,
    trajectories: Sequence[Trajectory] | TokenTree,
    loss: Any,
    normaliser: float | None,
    mask: Sequence[Any] | None,
) -> Step:
    """Check a step on all ranks before any rank runs it; a collective call.

    Raises:
        DataError, TypeError, ValueError, UnsupportedModel: something is wrong on this rank.
        RanksDisagree: something is wrong on another rank, or settings differ.
    """
    ranks = runtime.ranks

    def checked() -> tuple[tuple[TokenTree, Loss, Any], Any]:
        packed = as_loss(loss, normaliser)
        asked = runtime.checked().asked(logprobs=needs_logprobs(packed), values="predicted_values" in packed.needs)
        runtime.capabilities = asked
        if not torch.is_grad_enabled():
            raise ValueError("gradients are switched off (torch.no_grad); use .logprobs, or leave that block")
        if not any(p.requires_grad for p in runtime.parameters):
            raise ValueError("every parameter of the model is frozen (requires_grad=False); nothing can be trained")
        runtime.check_hooks()
        tree = runtime.tree_of(trajectories)
        check_batch(tree, runtime.capabilities)
        announced = None if ranks.alone else _announcement(runtime, tree.trajectories, packed, normaliser)
        return (tree, packed, predictions_of(tree, mask)), announced

    (tree, loss, predicted), answers = ranks.agree("forward_backward", checked)
    rows: Sequence[Trajectory] | None = tree.trajectories
    if not ranks.alone:
        for name in answers[0][0]:
            check_same(name, [settings[name] for settings, *_ in answers])
    weights: Any = ()
    if ranks.data_size > 1:
        _, all_rows, weights = zip(*ranks.of_data(answers))
        rows = None if all_rows[0] is None else [row for own in all_rows for row in own]

    def of_all_rows() -> tuple[Step, None]:
        if rows is not None:
            loss.check(rows)
            whole = loss.normaliser(rows) if normaliser is None else normaliser
        else:
            whole = sum(weights) if normaliser is None else normaliser
            if normaliser is None and whole <= 0:
                raise DataError(
                    f"nothing to train: the loss weights of all rows on all {ranks.data_size} ranks sum to 0 (entry 0 "
                    "of a row is never trained); give loss_weights that are not 0, or rows of two tokens and more"
                )
        whole = float(whole)
        if not 0 < whole < float("inf"):
            raise ValueError(
                f"the normaliser is {whole}; a step's loss is divided by it, so it must be above 0 and finite"
            )
        weighted = not loss.reads_untrained
        batch = Batch.of(tree, weighted=weighted, every_token=runtime.balanced, mask=predicted)
        return Step(tree, batch, loss, whole / ranks.data_size, rows or [], masked=mask is not None), None

    # Ranks with the same tokens may have different facts, so one rank may fail here and others not.
    step, _ = ranks.agree("preparing the loss", of_all_rows)
    runtime.check_same_rows(ranks, step.batch.layout)
    return step


def _announcement(
    runtime: Runtime, rows: list[Trajectory], loss: Loss, normaliser: float | None
) -> tuple[dict[str, Any], list[Trajectory] | None, float]:
    """Collect the settings that must be the same on all ranks, and this rank's rows (if the loss needs the rows of the
    whole step) or its part of the normaliser."""
    weights = [(tuple(p.shape), str(p.dtype), p.requires_grad) for p in runtime.parameters]
    settings = {
        "treetrain": __version__,
        "torch": torch.__version__,
        "the temperature": runtime.temperature,
        "the kind of engine": type(runtime).__name__,
        "the model": f"{type(runtime.model).__name__} of {len(weights)} weights",
        # Python's own hash differs between processes.
        "the weights' shapes and kinds": hashlib.sha256(repr(weights).encode()).hexdigest()[:16],
        "the auxiliary loss": runtime.capabilities.auxiliary,
        "loss": repr(loss),
        "what the loss needs": {"scope": loss.scope, "needs": sorted(loss.needs)},
        "a normaliser": None if normaliser is None else float(normaliser),
    }
    if runtime.ranks.data_size == 1:
        return settings, None, 0.0
    # A user's normaliser need not be a sum over rows, so it gets the rows of all ranks.
    if loss.scope == "batch" or (normaliser is None and isinstance(loss, RowLoss)):
        return settings, rows, 0.0
    loss.check(rows)
    return settings, None, loss.total_weight(rows) if normaliser is None else 0.0


# ---- a training step: its plan


def plan_step(runtime: Runtime, step: Step, *, sync: bool, balance: RouterBalance | None) -> tuple[Step, Plan, Reduces]:
    """Plan this rank's passes, and which backwards reduce sharded gradients; a collective call.

    Under FSDP2 every rank offers several plans, and the combination with the fastest common order is run.

    Raises:
        RanksDisagree: ranks differ in `sync`, normaliser or the routers' balance.
    """
    ranks = runtime.ranks

    def offered() -> tuple[list[Candidate], Any]:
        batch, plan = step.batch, runtime.plan_of(step.batch.layout)
        own = [Candidate(plan, batch.tree, "")]
        free_to_choose = not step.masked
        if free_to_choose and batch.weighted:
            own = [rows_instead(runtime, step.tree, plan) or own[0]]
        if runtime.collective:
            free = runtime.free_bytes() if runtime.budget is None else None
            own = candidates(
                own[0].tree,
                own[0].plan,
                partial(_laid_out, weighted=batch.weighted),
                whole_rows=not batch.weighted,
                # Runs that share nothing compute some tokens twice, which an auxiliary loss would count twice.
                apart=free_to_choose and runtime.merge and not runtime.balanced,
                free_bytes=None if free is None else free / AMPLE,
            )
        room = [runtime.collective and runtime.keeps_gradients(way.plan) for way in own]
        routers = None
        if balance is not None and not ranks.alone:  # alone, no need to wait for the GPU
            routers = balance.tokens, balance.choices.tolist()
        same = {
            "sync": sync,
            "the normaliser that the loss gives": step.normaliser * ranks.data_size,
            "the balance of the routers": routers,
        }
        return own, (same, room, offers_of(own) if runtime.collective else [])

    own, answers = ranks.agree("planning", offered)
    same, room, offers = zip(*answers)
    for name in same[0]:
        check_same(name, [settings[name] for settings in same])
    numbers = choose(ranks.of_data(list(offers))) if runtime.collective else [0] * ranks.data_size
    chosen, at_last = numbers[ranks.data_rank], all(has[number] for has, number in zip(ranks.of_data(room), numbers))
    way, batch = own[chosen], step.batch
    if way.tree is not batch.tree:
        step = step._replace(batch=Batch.of(way.tree, weighted=batch.weighted))
    return step, way.plan, "never" if not sync else "last" if at_last else "each"


def rows_instead(runtime: Runtime, tree: TokenTree, plan: Plan) -> Candidate | None:
    """The rows without sharing and their plan, if predicted to be faster than `plan`; else None.

    A shared prefix of a token or two may need a pass of its own, which costs more than computing it in every row.
    """
    budget, cost = runtime.budget, cost_if_countable(runtime.model)
    if not runtime.merge or runtime.balanced or isinstance(budget, Bytes) or cost is None:
        return None
    if plan.num_parts < 2 or linear_work(tree).tokens > WORTH_A_LOOK * plan.layout.num_tokens:
        return None
    rows = build_tree(tree.trajectories, merge=False)
    layout = _laid_out(rows, weighted=True)
    if budget is not None and int(layout.positions.max(initial=0)) >= budget:
        return None
    alone = whole_trees(layout, min(PART_TOKENS[cost.device], budget or sys.maxsize))
    return Candidate(alone, rows, "") if cost.seconds(alone) < cost.seconds(plan) else None


def _laid_out(tree: TokenTree, *, weighted: bool) -> PackedLayout:
    """The layout, as `Batch.of` makes it."""
    return pack(tree, tree.trained_edges()[0] > 0) if weighted else pack(tree)


# ---- a training step: its passes


def run_step(
    runtime: Runtime, step: Step, plan: Plan, reduces: Reduces, balance: RouterBalance | None, rollback: Rollback
) -> StepResult:
    """Accumulate the gradients of this rank's part of a step."""
    scale = runtime.capabilities.auxiliary * runtime.ranks.data_size
    routing = runtime.routing(step.batch.tree, balanced=runtime.balanced, whole=balance, scale=scale)
    if step.loss.scope == "batch":
        scoring = Scoring(runtime, plan, routing, entropy="entropies" in step.loss.needs)
        total, sums = _compare(runtime, step, scoring, reduces, scale, rollback)
        parts, without_graph, attention = scoring.plan.num_parts, scoring.tokens_without_graph, scoring.attention
    else:

        def run(plan: Plan, counts: PassCounts) -> tuple[Any, Metrics]:
            if routing is not None:
                routing.begin()
            return _stream(runtime, step, plan, counts, routing, reduces)

        (total, sums), _, counts = runtime.within_memory(plan, run, rollback)
        parts, without_graph, attention = counts.parts, counts.tokens_without_graph, counts.attention
    if routing is not None:
        total, sums = routing.added_to(total, sums)
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


def _stream(
    runtime: Runtime, step: Step, plan: Plan, counts: PassCounts, routing: Routing | None, reduces: Reduces
) -> tuple[Any, Metrics]:
    """Run the plan once for a loss that sums over trajectories; each is evaluated when its last edge is scored."""
    batch, loss, normaliser = step.batch, step.loss, step.normaliser
    table = runtime.table(batch.layout, entropy="entropies" in loss.needs)
    streamed = StreamedGradients(table, batch, loss, normaliser)
    if plan.num_parts or runtime.collective:
        if routing is not None and plan.num_parts > 1 and not routing.in_parts:
            Executor(runtime, plan, counts, routing, gradients=False, reduces=reduces).score(None)
            routing.settle()
        logprobs = table.logprobs
        coefficients = None if "entropies" in loss.needs else loss.coefficients(batch.facts(logprobs))
        executor = Executor(runtime, plan, counts, routing, gradients=True, reduces=reduces)
        if coefficients is not None:
            executor.train(KnownGradients(table, added_up(logprobs, batch.edges, coefficients) / normaliser))
            with torch.no_grad():
                facts = batch.facts(logprobs)
                total, sums = loss.packed(batch.at_edges(logprobs), None, facts, None)
            return total / normaliser, sums
        executor.train(streamed)
    streamed.finish()
    return streamed.total, streamed.sums


def _compare(
    runtime: Runtime, step: Step, scoring: Scoring, reduces: Reduces, scale: float, rollback: Rollback
) -> tuple[Any, Metrics]:
    """Run a batch-scope loss: all trajectories are scored, on every rank, before the first backward.

    Every rank evaluates the loss on the rows of all ranks, and runs backward from its own predictions.
    """
    ranks, batch, table = runtime.ranks, step.batch, scoring.forward()
    own: list[Any] = [batch.used, batch.at_edges(table.logprobs)]
    own += [None if x is None else batch.at_rows(x) for x in (table.entropies, table.values)]
    of_ranks: list[Any] = [own]
    if ranks.data_size > 1:
        on_host = [x.cpu() if isinstance(x, Tensor) else x for x in own]
        of_ranks = ranks.of_data(ranks.agree("comparing rows", lambda: (None, on_host))[1])
    used, *columns = zip(*of_ranks)
    # A rank without rows may have no values.
    present = [[x for x in column if x is not None] for column in columns]
    logprobs, entropies, values = (torch.cat(x).to(table.device) if x else None for x in present)
    assert logprobs is not None
    everything = np.arange(len(logprobs))
    rows = batch.rows if ranks.data_size == 1 else step.rows
    selection = Selection(rows=rows, used=np.concatenate(used), edges=everything, edge_rows=everything)
    given = (step.loss, step.normaliser, selection, logprobs, entropies, values)
    (total, sums, gradients), _ = ranks.agree("the loss", lambda: (evaluate_gradients(*given), None))
    before = sum(len(one[1]) for one in of_ranks[: ranks.data_rank])
    edges, entropy, value = (None if x is None else x[before : before + len(batch.edges)] for x in gradients)
    scoring.backward(
        added_up(table.logprobs, batch.edges, edges),
        None if table.entropies is None or entropy is None else added_up(table.entropies, batch.edge_rows, entropy),
        None if table.values is None or value is None else added_up(table.values, batch.edge_rows, value),
        scale,
        reduces,
        rollback,
    )
    return (total, sums) if ranks.data_rank == 0 else (0.0, {})


# ---- the linear baseline


class LinearEngine(TreeEngine):
    """The linear baseline: a `TreeEngine` that shares no prefix.

    It is the reference for speed and results, so it is as fast as we can make it. Rows are packed without padding in
    the projections. Short rows share batched attention calls; long ones get one causal call each. Tokens after the
    last trained one are left out, as in a tree.

    Args:
        pack_tokens: maximum tokens of a packed part (a longer row runs alone); None packs the whole batch.
        sharing: ``group``, ``context`` and ``compile_layers``, as for `TreeEngine`.
    """

    merge = False

    def __init__(
        self,
        model: nn.Module,
        *,
        pack_tokens: int | None = None,
        temperature: float = 1.0,
        value_head: nn.Module | None = None,
        **sharing: Any,
    ):
        super().__init__(model, budget=pack_tokens, temperature=temperature, value_head=value_head, **sharing)
        self.pack_tokens = pack_tokens

    def tree_of(self, rows: Sequence[Row] | TokenTree) -> TokenTree:
        """See `Runtime.tree_of`; a tree that shares tokens is cut into its rows."""
        if isinstance(rows, TokenTree) and rows.num_tokens != rows.num_flat_tokens:
            rows = rows.trajectories
        return as_tree(rows, merge=False)

    def plan_of(self, layout: PackedLayout) -> Plan:
        return whole_trees(layout, self.pack_tokens or max(layout.num_tokens, 1))


# ---- live in autograd


def logprobs(
    model: nn.Module,
    sequences: Sequence[Row] | TokenTree,
    budget: int | str | Bytes | None = None,
    temperature: float = 1.0,
    *,
    return_entropy: bool = False,
    return_values: bool = False,
    value_head: nn.Module | None = None,
    mask: Sequence[Any] | None = None,
) -> Any:
    """Log-probability of every token but the first of every sequence; every shared prefix is computed once.

    Args:
        model: a Hugging Face causal LM, plain or wrapped by peft.
        sequences: K lists or arrays of token ids (or trajectories, or a tree).
        budget: tokens whose graph is alive at once, or bytes ("8GiB") of peak memory; None takes the free memory. A
            batch that fits runs as a whole, a larger one in parts. If the graphs of all parts do not fit, the forward
            keeps none and backward runs each part again. Existing ``.grad`` stays allocated in backward; a budget in
            bytes does not count it.
        temperature: divides the logits before the softmax.
        return_entropy: also give the entropy of the distribution each token was drawn from.
        return_values: also give the value of the state before each of these tokens, by `value_head` on the same
            forward. `tt.values` gives values only.
        value_head: maps the inputs of the model's LM head, [n, hidden], to values [n] or [n, c].
        mask: K rows [L_k - 1], bools or weights: predictions whose entry is 0 are not computed; they hold 0 and get no
            gradient. None computes all.

    Returns:
        K tensors [L_k - 1], in nats, float32 or wider, with gradients to the model's parameters (and the value
        head's); ``return_entropy`` and ``return_values`` each add a list ([L_k - 1, c] for several values); the
        result is then a tuple. ``.backward()`` and ``torch.autograd.grad`` both work, once.

    Raises:
        DataError: an id outside the vocabulary or a row longer than the model's positions.
        UnsupportedModel: the model, or a setting of it, would not be exact on a tree; or gradients are wanted and
            several processes train together, which autograd would not synchronise, or the model's configuration asks
            for the routers' auxiliary loss (use `TreeEngine.score` in both cases).
        ValueError: a budget that is neither tokens nor bytes, or bytes that no plan fits into.
        RuntimeError: in a second backward, or if weights, the active adapter or ``requires_grad`` changed since the
            forward.
    """
    engine = TreeEngine(model, budget=budget, temperature=temperature, value_head=value_head)
    scored = engine._scored(
        "treetrain.logprobs",
        sequences,
        in_autograd=True,
        logprobs=True,
        values="predictions" if return_values else None,
        entropies=return_entropy,
        mask=mask,
    )
    rest, results = _within_autograd(scored), []
    for leaves in (scored.logprobs, scored.entropies, scored.values):
        if leaves is not None:
            results.append(rest[: len(leaves)])
            rest = rest[len(leaves) :]
    return results[0] if len(results) == 1 else tuple(results)


def values(
    model: nn.Module,
    sequences: Sequence[Row] | TokenTree,
    budget: int | str | Bytes | None = None,
    *,
    head: nn.Module | None = None,
) -> list[Float[Tensor, " _ *c"]]:
    """The value of every token's state, for every sequence; every shared prefix is computed once.

    Entry t of a row is the value of the state after its tokens 0 to t, before token t + 1 is known. `values` and
    `returns` of a `Trajectory` are indexed by the predicted token instead: ``values[t + 1]`` there is entry t here.

    Args:
        model: a model for token classification (a critic) or sequence classification (a reward model), plain or wrapped
            by peft; or, with `head`, a causal LM.
        sequences, budget: as for `treetrain.logprobs`.
        head: maps the inputs of a causal LM's head, [n, hidden], to values [n] or [n, c].

    Returns:
        K tensors [L_k], or [L_k, c] for a head of several labels, float32 or wider, with gradients to the parameters of
        model and head. ``.backward()`` and ``torch.autograd.grad`` both work, once.

    Raises:
        DataError, UnsupportedModel, ValueError, RuntimeError: as `treetrain.logprobs`.
    """
    return _within_autograd(_scored_values("treetrain.values", model, sequences, budget, head, "states"))


def rewards(
    model: nn.Module,
    sequences: Sequence[Row] | TokenTree,
    budget: int | str | Bytes | None = None,
    *,
    head: nn.Module | None = None,
) -> Float[Tensor, " K *c"]:
    """Rewards of sequences by a reward model: the value at the last token; every shared prefix is computed once.

    A sequence-classification model reads the last token that is not its ``pad_token_id`` (the first token if all are),
    as it does in transformers. Any other model reads the last token.

    Args:
        model, sequences, budget, head: as `values`.

    Returns:
        One value for each sequence, or c of them for a head of c labels; differentiable like `values`.

    Raises:
        DataError: a sequence without tokens; otherwise as `values`.
    """
    return _within_autograd(_scored_values("treetrain.rewards", model, sequences, budget, head, "rewards"))[0]


def _scored_values(
    name: str,
    model: nn.Module,
    sequences: Sequence[Row] | TokenTree,
    budget: int | str | Bytes | None,
    head: nn.Module | None,
    values: Literal["states", "rewards"],
) -> Scored:
    engine = TreeEngine(model, budget=budget, value_head=head)
    return engine._scored(name, sequences, logprobs=False, values=values, in_autograd=True)


def _check_live(engine: TreeEngine, what: str) -> None:
    """Raise UnsupportedModel if gradients through autograd would lack something that only a step of the engine adds."""
    if not engine.live:
        return
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if engine.balanced:
        why = (
            "lack the gradient of the routers' auxiliary loss, which the model's configuration asks for "
            f"(output_router_logits=True, router_aux_loss_coef={engine.capabilities.auxiliary:g})"
        )
    elif engine.collective:
        why = "make passes of a sharded model (fully_shard), which autograd does not order over ranks"
    elif several and engine.tensor.alone:
        why = f"not be synchronised over the {dist.get_world_size()} processes, not by DistributedDataParallel either"
    else:
        return
    raise UnsupportedModel(
        f"{what} with gradients is refused: they would {why}. Use scored = TreeEngine(model).score(rows), "
        "loss.backward() and scored.backward(), which averages gradients over the ranks (sync=False leaves that to "
        "you) and has scored.aux_loss, or TreeEngine(model).forward_backward; or call this under torch.no_grad()."
    )


def _within_autograd(scored: Scored) -> list[Tensor]:
    """The leaves as outputs of one autograd node whose inputs are the parameters."""
    if not scored.live or not scored.computed_tokens:
        return scored.leaves
    parameters = [p for p in scored.parameters if p.requires_grad]
    return list(_TreeScores.apply(scored, parameters, *parameters))  # type: ignore[call-overload]


class _TreeScores(torch.autograd.Function):
    """A whole batch as one autograd node whose inputs are the parameters.

    The tree's own graph is not part of the outer graph. So its backward can run in tree mode, which activation
    checkpointing needs when it recomputes layers.
    """

    @staticmethod
    def forward(ctx, scored: Scored, parameters: list[nn.Parameter], *_: Tensor):
        ctx.given = scored, parameters
        ctx.set_materialize_grads(False)
        return tuple(leaf.detach().clone() for leaf in scored.leaves)  # the caller may write into them

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: Tensor | None):
        scored, parameters = ctx.given
        for leaf, gradient in zip(scored.leaves, gradients):
            leaf.grad = gradient
        return None, None, *gradients_of(parameters, partial(scored.backward, sync=False))

"""One training step: what is checked before it, how the ranks agree on it, and the passes that make its gradients.

Ranks share one step. Each sends the others what they need to know about its rows. All combine the answers in rank
order, so they get the same loss constants and the same normaliser.
"""

import hashlib
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from treetrain import __version__
from treetrain.data.trajectory import Trajectory
from treetrain.engine.collective_passes import Reduces
from treetrain.engine.costs import cost_if_countable
from treetrain.engine.distributed import check_same
from treetrain.engine.executor import Executor
from treetrain.engine.gradients import Rollback
from treetrain.engine.loss import Loss, Metrics, StepResult, as_loss, name_of, needs_logprobs
from treetrain.engine.loss_gradients import (
    Batch,
    KnownGradients,
    Selection,
    StreamedGradients,
    added_up,
    check_batch,
    evaluate_gradients,
    predictions_of,
)
from treetrain.engine.memory import PassCounts
from treetrain.engine.packed import wide_dtype
from treetrain.engine.routing import RouterBalance, Routing
from treetrain.engine.runtime import AMPLE, Runtime
from treetrain.engine.score import Scoring
from treetrain.errors import DataError
from treetrain.planning.budget import Bytes
from treetrain.planning.collective_order import Candidate, candidates, choose, offers_of
from treetrain.planning.make import PART_TOKENS
from treetrain.planning.partition import whole_trees
from treetrain.planning.plan import Plan
from treetrain.tree.build import build_tree
from treetrain.tree.layout import PackedLayout, pack
from treetrain.tree.stats import linear_work
from treetrain.tree.token_tree import TokenTree

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
    """The rows of all ranks, if the loss must see them."""
    masked: bool
    """Whether the caller's mask says which predictions are computed."""


# ---- before the step


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

    def checked() -> tuple[tuple[TokenTree, Loss, Any, Any], Any]:
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
        if tree.count == "once" and not packed.sums_tokens:
            raise ValueError(
                f"the tree counts each node's tokens once (count='once'), but {name_of(packed)} is no sum over tokens "
                "by themselves, each with its weight, divided by the sum of weights. Take a loss that is (sft, "
                "reinforce, ppo or distill with reduction='token', dapo, value), or count='per trajectory'; a loss of "
                "your own that is one says sums_tokens = True"
            )
        # A tree of nodes stays unflattened if the loss allows it.
        merged = tree.merged(packed.reduction) if mask is None and packed.mergeable else None
        announced = None if ranks.alone else _announcement(runtime, tree, merged, packed, normaliser)
        return (tree, packed, merged, predictions_of(tree, mask)), announced

    (tree, packed, merged, predicted), answers = ranks.agree("forward_backward", checked)
    if not ranks.alone:
        for name in answers[0][0]:
            check_same(name, [settings[name] for settings, *_ in answers])
    rows: Any = list(tree.trajectories) if merged is None else merged
    weights: Any = ()
    if ranks.data_size > 1:
        _, all_rows, weights = zip(*ranks.of_data(answers))
        rows = None if all_rows[0] is None else [row for own in all_rows for row in own]

    def of_all_rows() -> tuple[Step, None]:
        loss = packed
        if "step" in packed.needs and normaliser is None:
            loss = packed.for_step(rows)
        elif "step" in packed.needs:
            raise ValueError(
                f"{name_of(packed)} was given a normaliser, so a part of a step, but was not told of the whole step: "
                "call loss = loss.for_step(all trajectories of the step) first, and pass loss.normaliser(the same)"
            )
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
        if merged is None:
            weighted = not loss.reads_untrained
            batch = Batch.of(tree, weighted=weighted, every_token=runtime.balanced, mask=predicted)
        else:
            batch = Batch.of_merged(tree, merged, every_token=runtime.balanced)
        seen = rows if merged is None and rows is not None else []
        return Step(tree, batch, loss, whole / ranks.data_size, seen, masked=mask is not None), None

    # Ranks with the same tokens may have other facts, so one of them may fail alone here.
    step, _ = ranks.agree("preparing the loss", of_all_rows)
    runtime.check_same_rows(ranks, step.batch.layout)
    return step


def _announcement(
    runtime: Runtime, tree: TokenTree, merged: Any, loss: Loss, normaliser: float | None
) -> tuple[dict[str, Any], list[Trajectory] | None, float]:
    """Collect what the other ranks need: settings that must be the same, and all rows if the loss needs those of the
    whole step, else this rank's part of the normaliser."""
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
        "loss": loss.identity,
        "what the loss needs": {"scope": loss.scope, "needs": sorted(loss.needs)},
        "a normaliser": None if normaliser is None else float(normaliser),
    }
    if runtime.ranks.data_size == 1:
        return settings, None, 0.0
    if loss.scope == "batch" or "step" in loss.needs:
        return settings, list(tree.trajectories), 0.0
    rows = list(tree.trajectories) if merged is None else merged
    loss.check(rows)
    return settings, None, loss.total_weight(rows) if normaliser is None else 0.0


# ---- its plan


def plan_step(runtime: Runtime, step: Step, *, sync: bool, balance: RouterBalance | None) -> tuple[Step, Plan, Reduces]:
    """Plan this rank's passes, and which backwards reduce sharded gradients; a collective call.

    Under FSDP2 every rank offers several plans, and the combination with the fastest common order is run.

    Raises:
        RanksDisagree: another rank has another `sync`, normaliser or balance of the routers.
    """
    ranks = runtime.ranks

    def offered() -> tuple[list[Candidate], Any]:
        batch, plan = step.batch, runtime.plan_of(step.batch.layout)
        own = [Candidate(plan, batch.tree, "")]
        free_to_choose = isinstance(batch.rows, list) and not step.masked  # a tree of nodes is never flattened
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
        # Whether unsharded gradients fit into memory until the last backward.
        room = [runtime.reduce == "step"] * len(own)
        if runtime.collective and runtime.reduce == "auto":
            whole = sum(p.numel() for p in runtime.parameters if p.requires_grad) * wide_dtype(runtime.model).itemsize
            room = [runtime.has_room(way.plan, extra=whole) for way in own]
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
    numbers = choose(ranks.of_data(offers)) if runtime.collective else [0] * ranks.data_size
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
    rows = build_tree(list(tree.trajectories), merge=False)
    layout = _laid_out(rows, weighted=True)
    if budget is not None and int(layout.positions.max(initial=0)) >= budget:
        return None
    alone = whole_trees(layout, min(PART_TOKENS[cost.device], budget or sys.maxsize))
    return Candidate(alone, rows, "") if cost.seconds(alone) < cost.seconds(plan) else None


def _laid_out(tree: TokenTree, *, weighted: bool) -> PackedLayout:
    """The layout, as `Batch.of` makes it."""
    return pack(tree, tree.trained_edges()[0] > 0) if weighted else pack(tree)


# ---- its passes


def run_step(
    runtime: Runtime, step: Step, plan: Plan, reduces: Reduces, balance: RouterBalance | None, rollback: Rollback
) -> StepResult:
    """Accumulate the gradients of this rank's part of a step."""
    scale = runtime.capabilities.auxiliary * runtime.ranks.data_size
    routing = runtime.routing(step.batch.tree, balanced=runtime.balanced, whole=balance, scale=scale)
    if step.loss.scope == "batch":
        scoring = Scoring(runtime, plan, routing, entropy="entropies" in step.loss.needs)
        total, sums = rollback.attempt(lambda: _compare(runtime, step, scoring, reduces, scale, rollback))
        parts, without_graph, attention = scoring.plan.num_parts, scoring.tokens_without_graph, scoring.attention
    else:

        def run(plan: Plan, counts: PassCounts) -> tuple[Any, Metrics]:
            if routing is not None:
                routing.begin()
            return rollback.attempt(lambda: _stream(runtime, step, plan, counts, routing, reduces))

        (total, sums), _, counts = runtime.within_memory(plan, run)
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
        several = plan.num_parts > 1 or runtime.ranks.data_size > 1
        if routing is not None and several and not routing.in_parts:
            Executor(runtime, plan, counts, routing, gradients=False, reduces=reduces).score(None)
            routing.settle()
        coefficients, logprobs = None, table.logprobs
        if table.entropies is None:  # a mixture may have coefficients here and still need entropies
            coefficients = loss.coefficients(batch.facts(logprobs))
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
        rollback.attempt,
    )
    return (total, sums) if ranks.data_rank == 0 else (0.0, {})

"""One try of a training step: which runs over the plan it takes, and what the loss came to."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from treetrain.engine.batch import Batch, Selection
from treetrain.engine.begin import Begun
from treetrain.engine.evaluate import added_up, evaluate, evaluate_gradients, linear_coefficients
from treetrain.engine.executor import Executor
from treetrain.engine.loss_gradients import KnownGradients, ScoreTable, StreamedGradients
from treetrain.engine.out_of_memory import PassCounts
from treetrain.engine.ranks import Ranks
from treetrain.engine.results import Metrics, StepResult
from treetrain.engine.routing import Routing
from treetrain.planning.plan import Plan

Way = Literal["scoring", "training", "keeping all"]
"""How an executor goes over a plan."""


class Step(NamedTuple):
    """What a step's loss came to."""

    total: Any
    sums: Metrics


def result_of(step: Step, begun: Begun, counts: PassCounts) -> StepResult:
    """This rank's part of a step."""
    return StepResult(
        loss_tensor=step.total,
        metric_sums=step.sums,
        flat_tokens=begun.tree.num_flat_tokens,
        unique_tokens=begun.tree.num_tokens,
        computed_tokens=begun.batch.layout.num_tokens,
        recomputed_tokens=counts.tokens_without_graph,
        parts=counts.parts,
    )


class StepRun:
    """A step on a plan.

    Args:
        table: where its scores go.
        executor: makes an executor of the plan: one that scores, one that trains, or one that keeps all graphs in
            between (None where they do not fit).
        ranks: that share the step.
        in_lockstep: whether ranks without anything to compute take part in the walks of the others.
    """

    def __init__(
        self,
        begun: Begun,
        plan: Plan,
        table: ScoreTable,
        executor: Callable[[Way], Any],
        routing: Routing | None,
        ranks: Ranks,
        *,
        in_lockstep: bool,
    ):
        self._batch, self._loss, self._normaliser = begun.batch, begun.loss, begun.normaliser
        self._rows, self._told = begun.rows, begun.told
        self._plan, self._table, self._executor, self._routing, self._ranks = plan, table, executor, routing, ranks
        self._in_lockstep, self._entropy = in_lockstep, table.entropies is not None

    def run(self) -> Step:
        """Accumulate the gradients."""
        several = self._plan.num_parts > 1 or not self._ranks.alone
        at_once = self._loss.scope == "batch" and several
        if self._plan.num_parts == 0 and not self._in_lockstep and not at_once:
            return self._without_predictions()
        if at_once:
            return self._compared()
        if self._routing is not None and several and not self._routing.in_parts:
            self._executor("scoring").route()
            self._routing.settle()
        return self._linear() or self._streamed()

    def _without_predictions(self) -> Step:
        """A batch of which nothing is computed: a loss of the user's own is called all the same."""
        stream = StreamedGradients(self._table, self._batch, self._loss, self._normaliser)
        stream.finish()
        return Step(stream.total, stream.sums)

    def _linear(self) -> Step | None:
        """A loss that states its gradients beforehand; None for any other."""
        if self._entropy:
            return None  # a mixture that takes none of these rows could still say that it is linear
        table, rows = self._table, self._batch.everything()
        known = linear_coefficients(self._loss, rows, len(table.logprobs), table.device, table.logprobs.dtype)
        if known is None:
            return None
        self._executor("training").train(KnownGradients(table, known / self._normaliser))
        with torch.no_grad():
            total, sums = evaluate(self._loss, rows.per_prediction(table.logprobs), None, rows)
        return Step(total / self._normaliser, sums)

    def _streamed(self) -> Step:
        """A loss that is a sum over trajectories, or sees all of them in one part."""
        stream = StreamedGradients(self._table, self._batch, self._loss, self._normaliser)
        self._executor("training").train(stream)
        stream.finish()
        return Step(stream.total, stream.sums)

    def _compared(self) -> Step:
        """A loss over several trajectories at once: all are scored before gradients are asked for."""
        kept: Executor | None = self._executor("keeping all")
        if kept is None:
            self._executor("scoring").score(self._table, need_entropy=self._entropy)
        else:
            kept.forward_all(self._table, need_entropy=self._entropy)
        if self._routing is not None:
            self._routing.settle()

        def train(known: KnownGradients) -> None:
            if kept is None:
                self._executor("training").train(known)
            else:
                kept.backward_all(known)

        if not self._ranks.alone:
            return self._compared_over_ranks(train)
        stream = StreamedGradients(self._table, self._batch, self._loss, self._normaliser)
        stream.finish()
        train(stream.known())
        return Step(stream.total, stream.sums)

    def _compared_over_ranks(self, train: Callable[[KnownGradients], None]) -> Step:
        """The same with the rows of all ranks: each evaluates the loss on all of them, and keeps what is its own."""
        table, batch = self._table, self._batch
        assert isinstance(batch, Batch)
        own = batch.everything()
        given = own.per_prediction(table.logprobs)
        entropies = None if table.entropies is None else own.per_prediction_entropy(table.entropies)
        values = None if table.values is None else own.per_prediction_entropy(table.values)
        if not self._told:  # else this rank starts over, by itself: the others have gone on with what it told
            mine_told = (batch.used, *(None if x is None else x.detach().cpu() for x in (given, entropies, values)))
            self._told += self._ranks.agree("comparing rows", lambda: (None, mine_told))[1]
        told = self._told
        used, *columns = zip(*told)
        logprobs, entropies, values = (_joined(column, table.device) for column in columns)
        everything = np.arange(0 if logprobs is None else len(logprobs))
        rows = Selection(trajectories=self._rows, used=np.concatenate(used), edges=everything, rows=everything)
        assert logprobs is not None
        found = evaluate_gradients(self._loss, self._normaliser, logprobs, entropies, rows, values)
        before = sum(len(one[1]) for one in told[: self._ranks.rank])
        mine = slice(before, before + len(given))
        edges, spread, valued = (None if x is None else x[mine] for x in (found.edges, found.rows, found.values))
        train(
            KnownGradients(
                table,
                added_up(table.logprobs, own.edges, edges),
                None if spread is None or table.entropies is None else added_up(table.entropies, own.rows, spread),
                None if valued is None or table.values is None else added_up(table.values, own.rows, valued),
            )
        )
        return Step(found.total, found.sums) if self._ranks.rank == 0 else Step(0.0, {})


def _joined(column: Sequence[Any], device: torch.device) -> Any:
    """What the ranks have told of their predictions, one after the other; None where no rank has it."""
    present = [x for x in column if x is not None]
    return torch.cat(present).to(device) if present else None

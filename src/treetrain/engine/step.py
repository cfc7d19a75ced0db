"""One try of a training step: which walks it takes, and what the loss came to."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from treetrain.engine.batch import Batch, Selection
from treetrain.engine.begin import Begun
from treetrain.engine.evaluate import added_up, evaluate, evaluate_gradients, linear_coefficients
from treetrain.engine.feed import Board, Known, Stream
from treetrain.engine.memory import Passes
from treetrain.engine.ranks import Ranks
from treetrain.engine.results import MetricSums, StepResult
from treetrain.engine.routing import Routing
from treetrain.engine.walk import Walk
from treetrain.planning.plan import Plan

Way = Literal["scoring", "training", "keeping all"]
"""How a walk goes over a plan."""


class Step(NamedTuple):
    """What a step's loss came to."""

    total: Any
    sums: MetricSums


def result_of(step: Step, begun: Begun, passes: Passes) -> StepResult:
    """This rank's part of a step."""
    return StepResult(
        loss_tensor=step.total,
        metric_sums=step.sums,
        flat_tokens=begun.tree.num_flat_tokens,
        unique_tokens=begun.tree.num_tokens,
        computed_tokens=begun.batch.layout.num_tokens,
        recomputed_tokens=sum(tokens for _, tokens in passes.published + passes.scored),
        parts=len(passes.graph),
    )


class StepRun:
    """A step on a plan.

    Args:
        board: where its scores go.
        walk: makes a walk over the plan: one that scores, one that trains, or one that keeps all graphs in between
            (None where they do not fit).
        ranks: that share the step.
        in_lockstep: whether ranks without anything to compute take part in the walks of the others.
    """

    def __init__(
        self,
        begun: Begun,
        plan: Plan,
        board: Board,
        walk: Callable[[Way], Any],
        routing: Routing | None,
        ranks: Ranks,
        *,
        in_lockstep: bool,
    ):
        self._batch, self._loss, self._normaliser = begun.batch, begun.loss, begun.normaliser
        self._rows, self._told = begun.rows, begun.told
        self._plan, self._board, self._walk, self._routing, self._ranks = plan, board, walk, routing, ranks
        self._in_lockstep, self._entropy = in_lockstep, board.entropies is not None

    def run(self) -> Step:
        """Accumulate the gradients."""
        several = self._plan.num_parts > 1 or not self._ranks.alone
        at_once = getattr(self._loss, "scope", "trajectory") == "batch" and several
        if self._plan.num_parts == 0 and not self._in_lockstep and not at_once:
            return self._without_predictions()
        if at_once:
            return self._compared()
        if self._routing is not None and several and not self._routing.in_parts:
            self._walk("scoring").route()
            self._routing.settle()
        return self._linear() or self._streamed()

    def _without_predictions(self) -> Step:
        """A batch of which nothing is computed: a loss of the user's own is called all the same."""
        stream = Stream(self._board, self._batch, self._loss, self._normaliser)
        stream.finish()
        return Step(stream.total, stream.sums)

    def _linear(self) -> Step | None:
        """A loss that states its gradients beforehand; None for any other."""
        if self._entropy:
            return None  # a mixture that takes none of these rows could still say that it is linear
        board, rows = self._board, self._batch.everything()
        known = linear_coefficients(self._loss, rows, len(board.logprobs), board.device, board.logprobs.dtype)
        if known is None:
            return None
        self._walk("training").train(Known(board, known / self._normaliser))
        with torch.no_grad():
            total, sums = evaluate(self._loss, rows.per_prediction(board.logprobs), None, rows)
        return Step(total / self._normaliser, sums)

    def _streamed(self) -> Step:
        """A loss that is a sum over trajectories, or sees all of them in one part."""
        stream = Stream(self._board, self._batch, self._loss, self._normaliser)
        self._walk("training").train(stream)
        stream.finish()
        return Step(stream.total, stream.sums)

    def _compared(self) -> Step:
        """A loss over several trajectories at once: all are scored before gradients are asked for."""
        kept: Walk | None = self._walk("keeping all")
        if kept is None:
            self._walk("scoring").score(self._board, need_entropy=self._entropy)
        else:
            kept.forward_all(self._board, need_entropy=self._entropy)
        if self._routing is not None:
            self._routing.settle()

        def train(known: Known) -> None:
            if kept is None:
                self._walk("training").train(known)
            else:
                kept.backward_all(known)

        if not self._ranks.alone:
            return self._compared_over_ranks(train)
        stream = Stream(self._board, self._batch, self._loss, self._normaliser)
        stream.finish()
        train(stream.known())
        return Step(stream.total, stream.sums)

    def _compared_over_ranks(self, train: Callable[[Known], None]) -> Step:
        """The same with the rows of all ranks: each evaluates the loss on all of them, and keeps what is its own."""
        board, batch = self._board, self._batch
        assert isinstance(batch, Batch)
        own = batch.everything()
        given = own.per_prediction(board.logprobs)
        entropies = None if board.entropies is None else own.per_prediction_entropy(board.entropies)
        values = None if board.values is None else own.per_prediction_entropy(board.values)
        if not self._told:  # else this rank starts over, by itself: the others have gone on with what it told
            mine_told = (batch.used, *(None if x is None else x.detach().cpu() for x in (given, entropies, values)))
            self._told += self._ranks.agree("comparing rows", lambda: (None, mine_told))[1]
        told = self._told
        used, *columns = zip(*told)
        logprobs, entropies, values = (_joined(column, board.device) for column in columns)
        everything = np.arange(0 if logprobs is None else len(logprobs))
        rows = Selection(trajectories=self._rows, used=np.concatenate(used), edges=everything, rows=everything)
        assert logprobs is not None
        found = evaluate_gradients(self._loss, self._normaliser, logprobs, entropies, rows, values)
        before = sum(len(one[1]) for one in told[: self._ranks.rank])
        mine = slice(before, before + len(given))
        edges, spread, valued = (None if x is None else x[mine] for x in (found.edges, found.rows, found.values))
        train(
            Known(
                board,
                added_up(board.logprobs, own.edges, edges),
                None if spread is None or board.entropies is None else added_up(board.entropies, own.rows, spread),
                None if valued is None or board.values is None else added_up(board.values, own.rows, valued),
            )
        )
        return Step(found.total, found.sums) if self._ranks.rank == 0 else Step(0.0, {})


def _joined(column: Sequence[Any], device: torch.device) -> Any:
    """What the ranks have told of their predictions, one after the other; None where no rank has it."""
    present = [x for x in column if x is not None]
    return torch.cat(present).to(device) if present else None

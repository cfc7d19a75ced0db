"""Takes the scores of parts from the executor, and gives it the gradients of the loss with respect to them.

`KnownGradients` holds gradients known beforehand (the loss is linear in the log-probabilities, or already evaluated).
`StreamedGradients` evaluates a loss as the parts run: each trajectory when its last prediction is scored. A part's
gradients are complete when everything below it has run, and the executor reads them after that.
"""

from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from treetrain.device_arrays import on_device
from treetrain.engine.batch import Batch, MergedBatch, Reads
from treetrain.engine.lm_head import Scores, Statistics
from treetrain.engine.loss import PackedLoss
from treetrain.engine.results import Metrics, add_metrics
from treetrain.tree.layout import Piece, ranges


class ScoreGradients(NamedTuple):
    """Gradients of the loss with respect to the scores of a part."""

    edges: Tensor
    """[e]: with respect to the log-probabilities."""
    rows: Tensor | None
    """[r]: with respect to the entropies."""
    values: Tensor | None = None
    """[r] or [r, c]: with respect to the values."""


class LossGradients(Protocol):
    """A loss as the executor uses it."""

    needs_entropy: bool
    needs_scores_early: bool
    """Whether a pass without graph must score its edges, since trajectories that end below read them."""

    def coefficients(self, piece: Piece) -> Tensor | None:
        """[e] d loss / d log-probability where it is known before the piece is scored; else None."""
        ...

    def scored(self, piece: Piece, scores: Scores) -> None:
        """Take the scores of a piece."""
        ...

    def gradients_of(self, piece: Piece) -> ScoreGradients:
        """Gradients of a piece, after everything below it has run."""
        ...


class ScoreTable:
    """Log-probabilities of the E edges, entropies and values of the R rows of a batch, 0 until scored."""

    def __init__(
        self,
        num_edges: int,
        num_rows: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        entropy: bool,
        statistics: bool = False,
    ):
        self.device, self.num_rows = device, num_rows
        self.logprobs = torch.zeros(num_edges, dtype=dtype, device=device)
        self.entropies = torch.zeros(num_rows, dtype=dtype, device=device) if entropy else None
        self.values: Tensor | None = None
        """[R] or [R, c]; None until a value is written, since only a value head knows c."""
        self.statistics = Statistics.empty(num_edges, num_rows, dtype, device) if statistics else None

    @property
    def values_or_zeros(self) -> Tensor:
        """[R] or [R, c]: the values; zeros [R] if none was written."""
        return self.logprobs.new_zeros(self.num_rows) if self.values is None else self.values

    def write(self, piece: Piece, scores: Scores) -> None:
        """Put a piece's scores in their places."""
        self.logprobs[self.index(piece.edges)] = scores.logprobs.detach()
        if self.entropies is not None and scores.entropies is not None:
            self.entropies[self.index(piece.rows)] = scores.entropies.detach()
        if self.statistics is not None and scores.statistics is not None:
            for whole, part in zip(self.statistics, scores.statistics):
                whole[self.index(piece.edges if whole is self.statistics.is_top1 else piece.rows)] = part
        if scores.values is not None:
            if self.values is None:
                shape = (self.num_rows, *scores.values.shape[1:])
                self.values = torch.zeros(shape, dtype=self.logprobs.dtype, device=self.device)
            self.values[self.index(piece.rows)] = scores.values.detach().to(self.values.dtype)

    def index(self, numbers: np.ndarray) -> Tensor | slice:
        """Places on the device; a slice where they are consecutive."""
        if len(numbers) and numbers[-1] - numbers[0] + 1 == len(numbers):
            return slice(int(numbers[0]), int(numbers[-1]) + 1)
        return on_device(numbers, self.device)


class KnownGradients:
    """Gives gradients that are known beforehand, and collects the scores.

    Args:
        edges: [E] d loss / d log-probability.
        rows: [R] d loss / d entropy, or None.
        values: [R] or [R, c] d loss / d value, or None.
    """

    needs_scores_early = False

    def __init__(self, table: ScoreTable, edges: Tensor, rows: Tensor | None = None, values: Tensor | None = None):
        self.table, self._edges, self._rows, self._values = table, edges, rows, values
        self.needs_entropy = rows is not None

    def coefficients(self, piece: Piece) -> Tensor | None:
        """See `LossGradients`."""
        return None if self.needs_entropy else self._edges[self.table.index(piece.edges)]

    def scored(self, piece: Piece, scores: Scores) -> None:
        """See `LossGradients`."""
        self.table.write(piece, scores)

    def gradients_of(self, piece: Piece) -> ScoreGradients:
        """See `LossGradients`."""
        edges, at, dtype = self.table.index(piece.edges), self.table.index(piece.rows), self.table.logprobs.dtype
        rows, values = (None if x is None else x[at].to(dtype) for x in (self._rows, self._values))
        return ScoreGradients(self._edges[edges].to(dtype), rows, values)


class StreamedGradients(KnownGradients):
    """Evaluates a loss over trajectories as they end.

    A batch-scope loss is evaluated when all of them have ended, so the plan must have one part only.
    """

    needs_scores_early = True

    def __init__(self, table: ScoreTable, batch: Batch | MergedBatch, loss: PackedLoss, normaliser: float):
        # Float64: thousands of rows may add to a shared edge.
        zeros = torch.zeros_like(table.logprobs, dtype=torch.float64)
        rows = None if table.entropies is None else torch.zeros_like(table.entropies, dtype=torch.float64)
        super().__init__(table, zeros, rows)
        self._batch, self._loss, self._normaliser = batch, loss, normaliser
        self._order = np.argsort(batch.deepest_row, kind="stable")
        self._ends = batch.deepest_row[self._order]
        self._seen = np.zeros(batch.layout.num_edges and len(batch.layout.rows), bool)
        self._at_once = loss.scope == "batch"
        self._pending = True
        self.total: Any = 0.0
        self.sums: Metrics = {}

    def coefficients(self, piece: Piece) -> Tensor | None:
        """Known for a piece that is scored a second time: every trajectory that reads it has ended."""
        if self.needs_entropy or not self._seen[piece.rows].all():
            return None
        return self._edges[self.table.index(piece.edges)].to(self.table.logprobs.dtype)

    def scored(self, piece: Piece, scores: Scores) -> None:
        """Take scores, and evaluate the trajectories that end here."""
        new = piece.rows[~self._seen[piece.rows]]
        self.table.write(piece, scores)
        self._seen[new] = True
        if self._at_once:
            if self._seen.all() and self._pending:
                self._evaluate(self._batch.everything())
            return
        first = np.searchsorted(self._ends, new)
        ended = self._order[ranges(first, np.searchsorted(self._ends, new, side="right") - first)]
        if len(ended):
            self._evaluate(self._batch.select(np.sort(ended)))

    def finish(self) -> None:
        """Evaluate trajectories without predictions: a loss of the user's own is called with every row."""
        if self._at_once:
            if self._pending:
                self._evaluate(self._batch.everything())
            return
        idle = self._order[: np.searchsorted(self._ends, 0)]
        if len(idle) and self._loss.reads_untrained:
            self._evaluate(self._batch.select(np.sort(idle)))

    def known(self) -> KnownGradients:
        """The gradients, for a second run, once the whole batch has been evaluated."""
        assert not self._pending
        dtype = self.table.logprobs.dtype
        rows, values = (None if x is None else x.to(dtype) for x in (self._rows, self._values))
        return KnownGradients(self.table, self._edges.to(dtype), rows, values)

    def gradients_of(self, piece: Piece) -> ScoreGradients:
        """See `LossGradients`."""
        assert not (self._at_once and self._pending), "gradients asked for before the loss has seen the batch"
        return super().gradients_of(piece)

    def _evaluate(self, rows: Reads) -> None:
        self._pending = False
        table = self.table
        found = evaluate_gradients(self._loss, self._normaliser, table.logprobs, table.entropies, rows, table.values)
        self.total = self.total + found.total
        self.sums = add_metrics(self.sums, found.sums)
        if found.edges is not None:
            self._edges.index_add_(0, on_device(rows.edges, self.table.device), found.edges.double())
        if self._rows is not None and found.rows is not None:
            self._rows.index_add_(0, on_device(rows.rows, self.table.device), found.rows.double())
        if found.values is not None and table.values is not None:
            if self._values is None:
                self._values = torch.zeros_like(table.values, dtype=torch.float64)
            self._values.index_add_(0, on_device(rows.rows, table.device), found.values.double())


def linear_coefficients(
    loss: PackedLoss, rows: Reads, num_edges: int, device: torch.device, dtype: torch.dtype
) -> Tensor | None:
    """[E] d sum / d log-probability of every edge, for a loss that states it beforehand; else None."""
    per_prediction = loss.coefficients(rows.facts(loss, device, dtype))
    if per_prediction is None:
        return None
    return added_up(torch.empty(num_edges, dtype=dtype, device=device), rows.edges, per_prediction)


def added_up(like: Tensor, places: np.ndarray, found: Tensor | None) -> Tensor:
    """Gradients, summed at the places that their scores came from, in the shape and dtype of `like`.

    Args:
        places: int64 [T]: indices into `like`.
        found: [T] or [T, c]; None: zeros.
    """
    # Summed in float64: thousands of rows may add to a place.
    total = torch.zeros_like(like, dtype=torch.float64)
    if found is not None:
        total.index_add_(0, on_device(places, like.device), found.double())
    return total.to(like.dtype)


class Evaluation(NamedTuple):
    """A loss over some trajectories with its gradients."""

    total: Tensor
    """The sum divided by the normaliser, detached."""
    sums: Metrics
    edges: Tensor | None
    """[T] d loss / d log-probability of each used prediction; None where the loss does not depend on them."""
    rows: Tensor | None
    """[T] d loss / d entropy, likewise."""
    values: Tensor | None = None
    """[T] or [T, c] d loss / d value, likewise."""


def evaluate_gradients(
    loss: PackedLoss,
    normaliser: float,
    logprobs: Tensor,
    entropies: Tensor | None,
    rows: Reads,
    values: Tensor | None = None,
) -> Evaluation:
    """A loss over some trajectories and its gradients, computed outside the model's graph.

    Args:
        logprobs: [E] of all edges.
        entropies: [R] of all rows, or None.
        values: [R] or [R, c] of all rows; None where no row has been scored, or the loss needs none.
    """
    if values is None and "predicted_values" in loss.needs:
        values = logprobs.new_zeros(len(rows.rows) and int(rows.rows.max()) + 1)
    with torch.enable_grad():
        given = rows.per_prediction(logprobs).requires_grad_()
        spread = None if entropies is None else rows.per_prediction_entropy(entropies).requires_grad_()
        valued = None if values is None else rows.per_prediction_entropy(values).requires_grad_()
        total, sums = loss.packed(given, spread, rows.facts(loss, given.device, given.dtype), valued)
        inputs = (given, spread, valued)
        grads: list[Tensor | None] = [None] * 3
        if total.requires_grad:
            live = [number for number, x in enumerate(inputs) if x is not None]
            found = torch.autograd.grad(total / normaliser, [inputs[n] for n in live], allow_unused=True)  # type: ignore[misc]
            for number, grad in zip(live, found):
                grads[number] = grad
    return Evaluation(total.detach() / normaliser, sums, *grads)

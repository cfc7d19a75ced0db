"""Takes the scores of parts from the executor, and gives it the gradients of the loss with respect to them.

`KnownGradients` holds gradients known beforehand (the loss is linear in the log-probabilities, or already evaluated).
`StreamedGradients` evaluates a loss as the parts run: each trajectory when its last prediction is scored. A part's
gradients are complete when everything below it has run, and the executor reads them after that.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from treetrain.data.trajectory import Trajectory
from treetrain.device_arrays import on_device
from treetrain.engine.lm_head import Scores, Statistics
from treetrain.engine.loss import Metrics, PackedLoss, add_metrics, split_by_trajectory
from treetrain.errors import DataError
from treetrain.models.capability import Capabilities
from treetrain.tree.layout import FlatReads, PackedLayout, Piece, flat_reads, pack, pack_states, ranges
from treetrain.tree.merged import MergedPredictions
from treetrain.tree.token_tree import TokenTree


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """K trajectories, the layout that computes them, and the T used predictions that read its edges."""

    tree: TokenTree
    layout: PackedLayout
    trajectories: Sequence[Trajectory]
    used: np.ndarray
    """bool [sum of L_k - 1]: the predictions that are computed."""
    reads: FlatReads
    weighted: bool
    """Whether only predictions with a loss weight are computed."""

    @classmethod
    def of(
        cls, tree: TokenTree, *, weighted: bool, every_token: bool = False, mask: np.ndarray | None = None
    ) -> "Batch":
        """Select what is computed of a tree.

        Args:
            weighted: compute only predictions whose loss weight is not 0; otherwise all of them.
            every_token: also compute tokens that no such prediction depends on.
            mask: bool [sum of L_k], indexed by predicted token: compute only these; see `predictions_of`.
        """
        rows = list(tree.trajectories)
        offsets, index = tree.paths()
        if mask is not None:
            wanted = mask & tree.trained_predictions if weighted else mask
            predicted = np.zeros(tree.num_tokens, bool)
            predicted[index[wanted]] = True
            layout = pack(tree, predicted, trim=not every_token)
        elif weighted:
            layout = pack(tree, tree.trained_edges()[0] > 0, trim=not every_token)
            wanted = tree.trained_predictions
        else:
            layout = pack(tree, trim=not every_token)
            wanted = np.ones(tree.num_flat_tokens, dtype=bool)
        used = np.delete(wanted, offsets[:-1][tree.trajectory_length > 0])
        return cls(
            tree=tree,
            layout=layout,
            trajectories=rows,
            used=used,
            reads=flat_reads(tree, layout, wanted),
            weighted=weighted,
        )

    @cached_property
    def prediction_offsets(self) -> np.ndarray:
        """int64 [K + 1]: start of each trajectory's L_k - 1 predictions, used or not."""
        return np.concatenate([[0], np.cumsum(np.maximum(self.tree.trajectory_length - 1, 0))])

    @cached_property
    def read_offsets(self) -> np.ndarray:
        """int64 [K + 1]: start of each trajectory's used predictions among the T."""
        return np.searchsorted(self.reads.index, self.prediction_offsets)

    @cached_property
    def deepest_row(self) -> np.ndarray:
        """int64 [K]: the row (0 to R - 1) that makes each trajectory's last used prediction; -1 where it has none."""
        last = self.read_offsets[1:] - 1
        has = last >= self.read_offsets[:-1]
        rows = np.full(len(last), -1, np.int64)
        rows[has] = self.layout.edge_row_index[self.reads.edges[last[has]]]
        return rows

    def select(self, numbers: np.ndarray) -> "Selection":
        """Some of the trajectories."""
        reads = ranges(self.read_offsets[numbers], np.diff(self.read_offsets)[numbers])
        places = ranges(self.prediction_offsets[numbers], np.diff(self.prediction_offsets)[numbers])
        return Selection(
            trajectories=[self.trajectories[k] for k in numbers.tolist()],
            used=self.used[places],
            edges=self.reads.edges[reads],
            rows=self.layout.edge_row_index[self.reads.edges[reads]],
        )

    def everything(self) -> "Selection":
        """All trajectories, in order."""
        return Selection(
            trajectories=self.trajectories,
            used=self.used,
            edges=self.reads.edges,
            rows=self.layout.edge_row_index[self.reads.edges],
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Reads:
    """T predictions and the edges they read."""

    edges: np.ndarray
    """int64 [T]: the edge that each prediction reads."""
    rows: np.ndarray
    """int64 [T]: the row that makes it."""

    def facts(self, loss: PackedLoss, device: torch.device, dtype: torch.dtype) -> Any:
        """The per-prediction tensors that a `PackedLoss` reads."""
        raise NotImplementedError

    def per_prediction(self, per_edge: Tensor) -> Tensor:
        """[E] -> [T]."""
        return per_edge.index_select(0, on_device(self.edges, per_edge.device))

    def per_prediction_entropy(self, per_row: Tensor) -> Tensor:
        """[R] entropies (or [R, c] values) of predicting rows -> [T] (or [T, c])."""
        return per_row.index_select(0, on_device(self.rows, per_row.device))


@dataclass(frozen=True, kw_only=True, eq=False)
class Selection(Reads):
    """Some trajectories of a batch, and their T used predictions."""

    trajectories: Sequence[Trajectory]
    used: np.ndarray
    """bool [sum of L_k - 1]."""

    def facts(self, loss: PackedLoss, device: torch.device, dtype: torch.dtype) -> Any:
        """See `Reads`."""
        return loss.pack(self.trajectories, device=device, dtype=dtype, used=self.used)

    def of_edges(self, per_edge: Tensor) -> list[Tensor]:
        """[E] -> one [L_k - 1] tensor per trajectory; see `per_trajectory`."""
        return self.per_trajectory(self.per_prediction(per_edge))

    def of_rows(self, per_row: Tensor) -> list[Tensor]:
        """[R] or [R, c] -> one [L_k - 1] or [L_k - 1, c] tensor per trajectory; see `per_trajectory`."""
        return self.per_trajectory(self.per_prediction_entropy(per_row))

    def per_trajectory(self, per_prediction: Tensor) -> list[Tensor]:
        """[T] -> one [L_k - 1] tensor per trajectory; predictions that were not computed hold 0. [T, c] likewise."""
        return split_by_trajectory(per_prediction, self.trajectories, self.used)


def predictions_of(tree: TokenTree, mask: Sequence[Any] | None) -> np.ndarray | None:
    """bool [sum of L_k]: the predictions that a mask selects, indexed by predicted token; False at first tokens.

    Args:
        mask: for every trajectory [L_k - 1] bools or weights, as arrays, tensors or lists; None selects all.

    Raises:
        DataError: the number or the length of the rows is wrong.
    """
    if mask is None:
        return None
    if len(mask) != tree.num_trajectories:
        raise DataError(f"mask has {len(mask)} rows, the batch {tree.num_trajectories}; give one row for each")
    pieces = [np.zeros(0, bool)]
    for number, (row, length) in enumerate(zip(mask, tree.trajectory_length.tolist())):
        wanted = row.detach().cpu().numpy() if isinstance(row, Tensor) else np.asarray(row)
        if wanted.shape != (max(length - 1, 0),):
            raise DataError(
                f"{_name(tree, number)} has {length} tokens, its mask the shape {wanted.shape}; give "
                f"{max(length - 1, 0)} entries, one for the prediction of every token but the first"
            )
        pieces += [np.zeros(min(length, 1), bool), wanted != 0]
    return np.concatenate(pieces)


def rewards_layout(tree: TokenTree, capabilities: Capabilities) -> tuple[PackedLayout, np.ndarray]:
    """The layout that reads one token's state for each trajectory, and the row of each, int64 [K].

    The token is the last one; for a sequence-classification model the last that is not padding, as in transformers.

    Raises:
        DataError: a trajectory without tokens.
    """
    if tree.num_trajectories and int(tree.trajectory_length.min()) == 0:
        number = int(tree.trajectory_length.argmin())
        raise DataError(f"sequence number {number} (from 0) has no tokens, so no last one; leave it out")
    scalar, last = capabilities.scalar, tree.trajectory_last.astype(np.int64)
    if scalar is not None and scalar.pooled and scalar.pad_token is not None:
        while True:
            above = tree.parent[last]
            climbs = (tree.tokens[last] == scalar.pad_token) & (above >= 0)
            if not climbs.any():
                break
            last = np.where(climbs, above, last)
    wanted = np.zeros(tree.num_tokens, bool)
    wanted[last] = True
    return pack_states(tree, wanted), (np.cumsum(wanted) - 1)[last]


def check_batch(tree: TokenTree, capabilities: Capabilities) -> None:
    """Check that ids are in the vocabulary, rows within the model's positions, recorded experts in the model.

    Raises:
        DataError: naming the trajectory, both values and what to do.
    """
    if tree.num_tokens and int(tree.tokens.max()) >= capabilities.vocab_size:
        name, token = _through(tree, tree.tokens >= capabilities.vocab_size)
        raise DataError(
            f"{name}: token id {tree.tokens[token]} at position {tree.depth[token]} is outside the "
            f"model's vocabulary of {capabilities.vocab_size}; use the tokenizer that belongs to the model."
        )
    longest = int(tree.trajectory_length.max(initial=0))
    if capabilities.max_positions is not None and longest > capabilities.max_positions:
        raise DataError(
            f"{_name(tree, int(tree.trajectory_length.argmax()))} has {longest} tokens, the model "
            f"{capabilities.max_positions} positions; shorten the row or use a model with more positions."
        )
    if capabilities.rotary_positions is not None and longest > capabilities.rotary_positions:
        raise DataError(
            f"{_name(tree, int(tree.trajectory_length.argmax()))} has {longest} tokens, but the model's rotary "
            f"frequencies change for rows of more than {capabilities.rotary_positions}: rows on both sides cannot "
            "share a prefix. Shorten the row, or give the model a rotary scaling that does not depend on the length "
            "(yarn, linear, llama3)."
        )
    recorded, found = tree.experts, capabilities.experts
    if recorded is None or not (recorded >= 0).any():
        return
    if found is None:
        raise DataError("rows have recorded experts, but the model has none; leave `experts` out")
    layers, each = recorded.shape[1:]
    if layers not in (found.places, found.layers) or each != found.top_k:
        raise DataError(
            f"rows have {each} recorded experts in {layers} layers; the model has {found.layers} layers, of which "
            f"{found.places} choose {found.top_k} experts: give [L, {found.places} or {found.layers}, {found.top_k}]"
        )
    if found.experts is None or int(recorded.max()) >= found.experts:
        name, token = _through(tree, np.any(recorded >= (found.experts or 0), axis=(1, 2)))
        raise DataError(
            f"{name}: recorded expert {recorded.max()} at position {tree.depth[token]}, but the model "
            f"has {found.experts} experts, numbered from 0; were the rows sampled by another model?"
        )


def _through(tree: TokenTree, wrong: np.ndarray) -> tuple[str, int]:
    """The name of a trajectory through the first of these tokens, bool [N], and that token."""
    token = int(np.argmax(wrong))
    return _name(
        tree, int(np.argmax((tree.trajectory_last >= token) & (tree.trajectory_last < tree.end[token])))
    ), token


def _name(tree: TokenTree, number: int) -> str:
    row_id = tree.trajectories[number].id
    return f"trajectory {row_id!r}" if row_id is not None else f"trajectory number {number}"


@dataclass(frozen=True, kw_only=True, eq=False)
class MergedBatch:
    """A `Batch` of T merged predictions in place of trajectories; each is complete when it is scored."""

    tree: TokenTree
    layout: PackedLayout
    merged: MergedPredictions
    edges: np.ndarray
    """int64 [T]: the edge that each prediction reads."""

    @classmethod
    def of(cls, tree: TokenTree, merged: MergedPredictions, *, every_token: bool = False) -> "MergedBatch":
        """Lay out the tokens of a tree of nodes that training needs; see `Batch.of`."""
        layout = pack(tree, tree.trained_edges()[0] > 0, trim=not every_token)
        edges, index = merged.reads(layout.edge_tokens)
        of_prediction = np.empty(len(merged), np.int64)
        of_prediction[index] = edges
        return cls(tree=tree, layout=layout, merged=merged, edges=of_prediction)

    @cached_property
    def deepest_row(self) -> np.ndarray:
        """int64 [T]: the row that makes each prediction."""
        return self.layout.edge_row_index[self.edges]

    def select(self, numbers: np.ndarray) -> "MergedSelection":
        """Some of the predictions."""
        edges = self.edges[numbers]
        rows = self.layout.edge_row_index[edges]
        return MergedSelection(merged=self.merged, index=numbers, edges=edges, rows=rows)

    def everything(self) -> "MergedSelection":
        """All predictions."""
        return self.select(np.arange(len(self.merged)))


@dataclass(frozen=True, kw_only=True, eq=False)
class MergedSelection(Reads):
    """Some of the merged predictions of a batch."""

    merged: MergedPredictions
    index: np.ndarray
    """int64 [T]: their indices."""

    def facts(self, loss: PackedLoss, device: torch.device, dtype: torch.dtype) -> Any:
        """See `Reads`."""
        return loss.pack(self.merged, device=device, dtype=dtype, used=self.index)


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

"""The predictions of a batch, their scores, and the gradients of a loss with respect to the scores.

`Batch` lists the predictions that are computed, and the edge of the layout that each reads. `ScoreTable` holds the
scores of edges and rows as the executor computes them. The executor then asks for the gradients of each part:
`KnownGradients` has them beforehand (the loss is linear in the log-probabilities, or already evaluated), and
`StreamedGradients` evaluates a loss as the parts run, each trajectory when its last prediction is scored. A part's
gradients are complete when everything below it has run, and the executor reads them after that.

Shape letters: K trajectories, T predictions in use, E edges and R rows of the layout, N tokens of the tree.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64, Shaped
from numpy.typing import ArrayLike
from torch import Tensor

from treetrain.core.device_arrays import on_device
from treetrain.core.errors import DataError
from treetrain.core.head.lm_head import Scores, Statistics
from treetrain.core.hf.capability import Capabilities
from treetrain.core.losses.facts import Facts, Metrics, add_metrics, describe, split_by_trajectory
from treetrain.core.losses.protocol import Loss
from treetrain.core.tree.layout import PackedLayout, Piece, flat_reads, pack, pack_states, ranges, set_reads
from treetrain.core.tree.token_ids import IdSets
from treetrain.core.tree.token_tree import TokenTree
from treetrain.core.tree.trajectory import Trajectory

Mask = Sequence[ArrayLike | Tensor]
"""For every trajectory [L_k - 1] bools or weights, as arrays, tensors or lists: predictions that are 0 are left out."""

# ---- predictions


@dataclass(frozen=True, kw_only=True, eq=False)
class Selection:
    """Some rows, and the T predictions of theirs that are computed.

    Beside its token, a prediction may read the ids of two sets: those that a sampler kept, m in all, and those that
    were asked for, n in all.
    """

    rows: Sequence[Trajectory]
    used: Bool[np.ndarray, " _"]
    """Which of the rows' predictions are computed."""
    edges: Int64[np.ndarray, " reads"]
    """The edge that each prediction reads; then the m of kept ids, and the n of asked ones."""
    edge_rows: Int64[np.ndarray, " T"]
    """The row of the layout that makes it."""
    kept: IdSets | None = None
    """For each prediction the ids that the sampler kept, its own token first."""
    asked: IdSets | None = None
    """For each prediction the ids whose log-probabilities are asked for."""

    def facts(self, like: Tensor) -> Facts:
        """Facts of the predictions that a loss reads, in the dtype and on the device of their log-probabilities."""
        return Facts(self.rows, device=like.device, dtype=like.dtype, used=self.used)

    def scores(
        self, reads: Float[Tensor, " reads"], entropies: Float[Tensor, " T"] | None
    ) -> tuple[Float[Tensor, " T"], Float[Tensor, " T"] | None, Float[Tensor, " n"] | None]:
        """Log-probabilities and entropies of predictions, over the kept ids where there are some, and log-probabilities
        of asked ids; differentiable.

        Args:
            reads: log-probabilities at `edges`.
        """
        count = len(self.edge_rows)
        logprobs, asked = reads[:count], None if self.asked is None else reads[len(reads) - len(self.asked.ids) :]
        if self.kept is None:
            return logprobs, entropies, asked
        device, sizes = reads.device, self.kept.counts
        of, has = on_device(self.kept.places, device), on_device(sizes > 0, device)
        own = np.zeros(len(self.kept.ids), bool)
        own[self.kept.starts[:-1][sizes > 0]] = True
        above = reads[count : count + len(own)] - logprobs[of]
        # Minus log-sum-exp of all over the token's own, whose share is 1: a token that is all but certain keeps its
        # digits. The sum is taken from the highest, m, so that nothing overflows.
        others = above.masked_fill(on_device(own, device), -torch.inf)
        m = torch.zeros_like(logprobs).scatter_reduce(0, of, others.detach(), "amax")
        rest = torch.zeros_like(logprobs).index_add(0, of, (others - m[of]).exp())
        over_kept = -(m + (torch.expm1(-m) + rest).log1p())
        if entropies is not None:
            log_p = above + over_kept[of]
            entropies = torch.where(has, torch.zeros_like(entropies).index_add(0, of, -log_p.exp() * log_p), entropies)
        return torch.where(has, over_kept, logprobs), entropies, asked

    def pull_back(
        self, table: "ScoreTable", logprobs: Tensor | None, entropies: Tensor | None, asked: Tensor | None = None
    ) -> tuple[Float[Tensor, " E"], Float[Tensor, " R"] | None]:
        """Gradients by edge and by row, from those by the results of `scores`."""
        of_rows = None if table.entropies is None else entropies
        if self.kept is not None or self.asked is not None:
            given = [self.at_edges(table.logprobs).requires_grad_()]
            logprobs = torch.zeros_like(given[0][: len(self.edge_rows)]) if logprobs is None else logprobs
            if table.entropies is not None and of_rows is not None:
                given.append(self.at_rows(table.entropies).requires_grad_())
            with torch.enable_grad():
                scores = self.scores(given[0], given[1] if of_rows is not None else None)
            pairs = [(x, g) for x, g in zip(scores, (logprobs, of_rows, asked)) if x is not None and g is not None]
            grads = torch.autograd.grad([x for x, _ in pairs], given, [g.to(x.dtype) for x, g in pairs])
            logprobs, of_rows = grads[0], None if of_rows is None else grads[1]
        of_edges = sum_by_place(table.logprobs, self.edges, logprobs)
        if table.entropies is None or of_rows is None:
            return of_edges, None
        return of_edges, sum_by_place(table.entropies, self.edge_rows, of_rows)

    def at_edges(self, per_edge: Shaped[Tensor, " E"]) -> Shaped[Tensor, " reads"]:
        return per_edge.index_select(0, on_device(self.edges, per_edge.device))

    def at_rows(self, per_row: Float[Tensor, " R *c"]) -> Float[Tensor, " T *c"]:
        return per_row.index_select(0, on_device(self.edge_rows, per_row.device))

    def per_trajectory(self, per_prediction: Shaped[Tensor, " T *c"]) -> list[Shaped[Tensor, " _ *c"]]:
        """One tensor per trajectory; predictions that were not computed hold 0."""
        return split_by_trajectory(per_prediction, self.rows, self.used)


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch(Selection):
    """All K rows of a batch and the layout that computes them."""

    tree: TokenTree
    layout: PackedLayout
    predicted: Int64[np.ndarray, " _"]
    """The place of each prediction's token among the rows' concatenated tokens."""
    offsets: Int64[np.ndarray, " K_plus_1"]
    """Start of each row's entries in `used`."""
    starts: Int64[np.ndarray, " K_plus_1"]
    """Start of each row's predictions among the T."""
    weighted: bool
    """Whether only predictions with a loss weight are computed."""

    @classmethod
    def of(
        cls,
        tree: TokenTree,
        *,
        weighted: bool,
        every_token: bool = False,
        mask: Bool[np.ndarray, " _"] | None = None,
    ) -> "Batch":
        """Select what is computed of a tree.

        Args:
            weighted: compute only predictions whose loss weight is not 0; otherwise all of them.
            every_token: also compute tokens that no such prediction depends on.
            mask: compute only these, indexed by predicted token; see `predictions_of`.
        """
        wanted = tree.trained_predictions if weighted else np.ones(tree.num_flat_tokens, bool)
        predicted = tree.trained_edges()[0] > 0 if weighted else None
        firsts, index = tree.paths()
        if mask is not None:
            wanted = mask & wanted
            predicted = np.zeros(tree.num_tokens, bool)
            predicted[index[wanted]] = True  # a prediction that any row wants is computed once
        layout = pack(tree, predicted, trim=not every_token)  # a loss of the routers is over every token
        edges, places = flat_reads(tree, layout, wanted)
        places_of = np.delete(np.arange(len(wanted)), firsts[:-1][tree.trajectory_length > 0])  # none predicts a first
        used = wanted[places_of]
        at = places_of[used]
        sets = {name: every.select(at) for name, every in tree.id_sets.items()}
        offsets = np.concatenate([[0], np.cumsum(np.maximum(tree.trajectory_length - 1, 0))])
        return cls(
            rows=tree.trajectories,
            used=used,
            predicted=places_of,
            edges=np.concatenate([edges, *(set_reads(tree, layout, x, at) for x in tree.id_sets.values())]),
            edge_rows=layout.edge_row_index[edges],
            **sets,
            tree=tree,
            layout=layout,
            offsets=offsets,
            starts=np.searchsorted(places, offsets),
            weighted=weighted,
        )

    @cached_property
    def deepest_row(self) -> Int64[np.ndarray, " K"]:
        """The row (0 to R - 1) of the layout that makes each row's last prediction; -1 where it has none."""
        last = self.starts[1:] - 1
        has = last >= self.starts[:-1]
        rows = np.full(len(last), -1, np.int64)
        rows[has] = self.edge_rows[last[has]]
        return rows

    def select(self, numbers: Int64[np.ndarray, " k"]) -> Selection:
        reads = ranges(self.starts[numbers], np.diff(self.starts)[numbers])
        places = ranges(self.offsets[numbers], np.diff(self.offsets)[numbers])
        edges, sets, start = [self.edges[reads]], {}, len(self.edge_rows)
        for name, every in (("kept", self.kept), ("asked", self.asked)):
            if every is not None:
                edges.append(self.edges[start + every.entries(reads)])
                sets[name], start = every.select(reads), start + len(every.ids)
        return Selection(
            rows=[self.rows[k] for k in numbers.tolist()],
            used=self.used[places],
            edges=np.concatenate(edges),
            edge_rows=self.edge_rows[reads],
            **sets,
        )


def predictions_of(tree: TokenTree, mask: Mask | None) -> Bool[np.ndarray, " _"] | None:
    """The predictions that a mask selects, indexed by predicted token over all rows; False at first tokens.

    Args:
        mask: None selects all.

    Raises:
        DataError: the number or the length of the rows is wrong, or an entry is NaN.
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
                f"{describe(tree.trajectories[number], number)} has {length} tokens, its mask the shape "
                f"{wanted.shape}; give {max(length - 1, 0)} entries, one for the prediction of every token but the "
                "first"
            )
        if wanted.dtype.kind == "f" and np.isnan(wanted).any():
            at = int(np.isnan(wanted).argmax())
            raise DataError(f"mask[{number}][{at}] is nan; give 0 for a prediction that is not wanted, 1 for another")
        pieces += [np.zeros(min(length, 1), bool), wanted != 0]
    return np.concatenate(pieces)


def last_states(tree: TokenTree, capabilities: Capabilities) -> tuple[PackedLayout, Int64[np.ndarray, " K"]]:
    """The layout that reads one token's state for each trajectory, and the row of each.

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
    """Check that ids are in the vocabulary and rows within the model's positions.

    Raises:
        DataError: naming the trajectory, both values and what to do.
    """
    if tree.num_tokens and int(tree.tokens.max()) >= capabilities.vocab_size:
        name, token = name_through(tree, tree.tokens >= capabilities.vocab_size)
        raise DataError(
            f"{name}: token id {tree.tokens[token]} at position {tree.depth[token]} is outside the "
            f"model's vocabulary of {capabilities.vocab_size}; use the tokenizer that belongs to the model."
        )
    for name, sets in tree.id_sets.items():
        if int(sets.ids.max(initial=0)) >= capabilities.vocab_size:
            at, ends = int(sets.ids.argmax()), np.cumsum(tree.trajectory_length)
            place = int(sets.places[at])
            number = int(np.searchsorted(ends, place, side="right"))
            raise DataError(
                f"{describe(tree.trajectories[number], number)}: id {sets.ids[at]}, {name} at position "
                f"{place - ends[number] + tree.trajectory_length[number]}, is outside the model's vocabulary of "
                f"{capabilities.vocab_size}; use the tokenizer that belongs to the model."
            )
    longest = int(tree.trajectory_length.max(initial=0))
    most = min(capabilities.max_positions or longest, capabilities.rotary_positions or longest)
    if longest > most:
        number = int(tree.trajectory_length.argmax())
        has = f"{describe(tree.trajectories[number], number)} has {longest} tokens, "
        if capabilities.max_positions is not None and longest > capabilities.max_positions:
            raise DataError(
                f"{has}the model {capabilities.max_positions} positions; shorten the row or use a model with more "
                "positions."
            )
        raise DataError(
            f"{has}but the model's rotary frequencies change for rows of more than {capabilities.rotary_positions}: "
            "rows on both sides cannot share a prefix. Shorten the row, or give the model a rotary scaling that does "
            "not depend on the length (yarn, linear, llama3)."
        )


def name_through(tree: TokenTree, wrong: Bool[np.ndarray, " N"]) -> tuple[str, int]:
    """The name of a trajectory through the first of these tokens, and that token."""
    token = int(np.argmax(wrong))
    number = int(np.argmax((tree.trajectory_last >= token) & (tree.trajectory_last < tree.end[token])))
    return describe(tree.trajectories[number], number), token


# ---- scores


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
    def values_or_zeros(self) -> Float[Tensor, " R *c"]:
        return self.logprobs.new_zeros(self.num_rows) if self.values is None else self.values

    def write(self, piece: Piece, scores: Scores) -> None:
        self.logprobs[self.index(piece.edges)] = scores.logprobs.detach()
        if self.entropies is not None and scores.entropies is not None:
            self.entropies[self.index(piece.rows)] = scores.entropies.detach()
        if self.statistics is not None and scores.statistics is not None:
            self.statistics.write(self.index(piece.edges), self.index(piece.rows), scores.statistics)
        if scores.values is not None:
            if self.values is None:  # the head's first call says how many it gives
                shape = (self.num_rows, *scores.values.shape[1:])
                self.values = torch.zeros(shape, dtype=self.logprobs.dtype, device=self.device)
            self.values[self.index(piece.rows)] = scores.values.detach().to(self.values.dtype)

    def index(self, numbers: Int64[np.ndarray, " n"]) -> Int64[Tensor, " n"] | slice:
        """Places on the device; a slice where they are consecutive."""
        if len(numbers) and numbers[-1] - numbers[0] + 1 == len(numbers):
            return slice(int(numbers[0]), int(numbers[-1]) + 1)
        return on_device(numbers, self.device)


# ---- gradients


class ScoreGradients(NamedTuple):
    """Gradients of a loss with respect to scores."""

    edges: Float[Tensor, " E"] | None
    """By log-probabilities; None, here and below, where the loss does not depend on them."""
    rows: Float[Tensor, " R"] | None
    """By entropies."""
    values: Float[Tensor, " R *c"] | None


class KnownGradients:
    """Gives gradients by log-probability, entropy and value that are known beforehand, and collects the scores."""

    needs_scores_early = False
    """Whether a pass without graph must score its edges, since trajectories that end below read them."""

    def __init__(
        self,
        table: ScoreTable,
        edges: Float[Tensor, " E"],
        rows: Float[Tensor, " R"] | None = None,
        values: Float[Tensor, " R *c"] | None = None,
    ):
        self.table, self._edges, self._rows, self._values = table, edges, rows, values
        self.needs_entropy = rows is not None

    def coefficients(self, piece: Piece) -> Float[Tensor, " e"] | None:
        """d loss / d log-probability where it is known before the piece is scored; else None."""
        return None if self.needs_entropy else self._edges[self.table.index(piece.edges)]

    def scored(self, piece: Piece, scores: Scores) -> None:
        self.table.write(piece, scores)

    def gradients_of(self, piece: Piece) -> ScoreGradients:
        """Gradients of a piece's scores, after everything below it has run."""
        edges, at, dtype = self.table.index(piece.edges), self.table.index(piece.rows), self.table.logprobs.dtype
        rows, values = (None if x is None else x[at].to(dtype) for x in (self._rows, self._values))
        return ScoreGradients(self._edges[edges].to(dtype), rows, values)


class StreamedGradients(KnownGradients):
    """Evaluates a loss over trajectories as they end."""

    needs_scores_early = True

    def __init__(self, table: ScoreTable, batch: Batch, loss: Loss, normaliser: float):
        # Float64: thousands of rows may add to a shared edge.
        zeros = torch.zeros_like(table.logprobs, dtype=torch.float64)
        rows = None if table.entropies is None else torch.zeros_like(table.entropies, dtype=torch.float64)
        super().__init__(table, zeros, rows)
        self._batch, self._loss, self._normaliser = batch, loss, normaliser
        # A row ends where its last prediction is scored: parts run top down, so all others are in the table by then.
        self._order = np.argsort(batch.deepest_row, kind="stable")
        self._ends = batch.deepest_row[self._order]
        self._seen = np.zeros(len(batch.layout.rows), bool)
        self.total: Tensor | float = 0.0
        self.sums: Metrics = {}

    def coefficients(self, piece: Piece) -> Float[Tensor, " e"] | None:
        """Known for a piece that is scored a second time: every trajectory that reads it has ended."""
        if self.needs_entropy or not self._seen[piece.rows].all():
            return None
        return self._edges[self.table.index(piece.edges)].to(self.table.logprobs.dtype)

    def scored(self, piece: Piece, scores: Scores) -> None:
        """Take scores, and evaluate the trajectories that end here."""
        new = piece.rows[~self._seen[piece.rows]]  # a part that runs again has had its rows evaluated
        self.table.write(piece, scores)
        self._seen[new] = True
        first = np.searchsorted(self._ends, new)
        self._evaluate(self._order[ranges(first, np.searchsorted(self._ends, new, side="right") - first)])

    def finish(self) -> None:
        """Evaluate trajectories without predictions: a loss of the user's own is called with every row."""
        if self._loss.reads_untrained:
            self._evaluate(self._order[: np.searchsorted(self._ends, 0)])

    def _evaluate(self, numbers: Int64[np.ndarray, " k"]) -> None:
        if not len(numbers):
            return
        rows, table = self._batch.select(np.sort(numbers)), self.table
        total, sums, gradients = evaluate_gradients(
            self._loss, self._normaliser, rows, table.logprobs, table.entropies, table.values
        )
        self.total, self.sums = self.total + total, add_metrics(self.sums, sums)
        if gradients.values is not None and table.values is not None and self._values is None:
            self._values = torch.zeros_like(table.values, dtype=torch.float64)
        sums_of = (self._edges, self._rows, self._values)
        for sum_of, places, gradient in zip(sums_of, (rows.edges, rows.edge_rows, rows.edge_rows), gradients):
            if sum_of is not None and gradient is not None:
                sum_of.index_add_(0, on_device(places, table.device), gradient.double())


def sum_by_place(
    like: Float[Tensor, " places *c"], places: Int64[np.ndarray, " T"], gradients: Float[Tensor, " T *c"] | None
) -> Float[Tensor, " places *c"]:
    """Gradients (None: zeros), summed at the places that their scores came from, in the dtype of `like`."""
    # Summed in float64: thousands of rows may add to a place.
    total = torch.zeros_like(like, dtype=torch.float64)
    if gradients is not None:
        total.index_add_(0, on_device(places, like.device), gradients.double())
    return total.to(like.dtype)


def evaluate_gradients(
    loss: Loss,
    normaliser: float,
    rows: Selection,
    logprobs: Float[Tensor, " E"],
    entropies: Float[Tensor, " R"] | None,
    values: Float[Tensor, " R *c"] | None,
) -> tuple[Tensor, Metrics, ScoreGradients]:
    """A loss over some rows, divided by the normaliser, its metrics and its gradients per prediction.

    It is computed outside the model's graph, from the scores of all edges and rows. `values` is None where no row has
    been scored, or the loss needs none.
    """
    if values is None and "predicted_values" in loss.needs:
        values = logprobs.new_zeros(len(rows.edge_rows) and int(rows.edge_rows.max()) + 1)
    with torch.enable_grad():
        given = rows.at_edges(logprobs).requires_grad_()
        entropies, values = (None if x is None else rows.at_rows(x).requires_grad_() for x in (entropies, values))
        own, of_kept, asked = rows.scores(given, entropies)
        facts = rows.facts(given)
        facts.id_logprobs = asked
        total, sums = loss.packed(own, of_kept, facts, values)
        scores = [given, entropies, values]  # leaf tensors: autograd stops at them
        present = [x for x in scores if x is not None]
        slopes: Sequence[Tensor | None] = [None] * len(present)
        if total.requires_grad:  # a loss of the rows' own facts alone has none
            slopes = torch.autograd.grad(total / normaliser, present, allow_unused=True)
    left = iter(slopes)
    gradients = ScoreGradients(*(None if x is None else next(left) for x in scores))
    return total.detach() / normaliser, sums, gradients

"""The rows of a batch that a trainer calls its model with, and per-prediction numbers back in the batch's shape."""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from treetrain.data.trajectory import Trajectory
from treetrain.engine.padded import Span, packed_spans, padded_spans, placed
from treetrain.errors import DataError
from treetrain.tree.build import build_tree
from treetrain.tree.token_tree import TokenTree

IGNORED = -100
"""The label of tokens that are not predicted."""


class Rows(NamedTuple):
    """The rows of a batch."""

    ids: list[np.ndarray]
    masks: list[np.ndarray]
    """bool [L_k - 1]: the predictions that are wanted."""
    spans: list[Span]
    shape: torch.Size
    """[B, L] of the batch."""
    wanted: Tensor
    """bool [B, L - 1], on the device of the labels."""

    def batch(self, rows: list[Tensor] | None) -> Tensor | None:
        """Per-prediction rows as [B, L - 1], 0 where nothing is predicted; None stays None."""
        return None if rows is None else placed(rows, self.spans, self.shape).to(self.wanted.device)


def rows_of(kwargs: dict[str, Any], classifier: Any = None) -> Rows:
    """The rows of a batch that a model is called with: padded, packed or neither.

    Args:
        kwargs: of the call.
        classifier: the text configuration of a model that classifies sequences, whose calls have no labels of tokens.

    Raises:
        DataError: labels of other tokens than the next one of the same row, or a mask and positions that are not
            those of rows.
    """
    ids, mask, positions = kwargs["input_ids"], kwargs.get("attention_mask"), kwargs.get("position_ids")
    if mask is None and positions is not None:
        spans = packed_spans(positions.expand(ids.shape))
    else:
        spans = padded_spans(torch.ones_like(ids) if mask is None else mask)
        if positions is not None:
            _check_positions(positions.expand(ids.shape).cpu(), spans)
    host = ids.cpu()
    rows = [host[b, start:stop].numpy() for b, start, stop in spans]
    if classifier is not None:
        rows = [_to_scored_token(row, classifier.pad_token_id) for row in rows]
        return Rows(rows, [], spans, ids.shape, ids.new_zeros(0))
    labels = kwargs["labels"]
    wanted = labels[:, 1:] != IGNORED
    local, inside = wanted.cpu(), torch.zeros(len(ids), ids.shape[1] - 1, dtype=torch.bool)
    for b, start, stop in spans:
        inside[b, start : max(stop - 1, start)] = True
    if bool((local & ~inside).any()):
        b, t = (local & ~inside).nonzero()[0].tolist()
        raise DataError(
            f"row {b} of the batch has a label at column {t + 1}, whose token is padding or the first of a row: it "
            f"would be predicted from padding or another row. Set the label to {IGNORED}, or pad on the right"
        )
    if bool((local & (labels[:, 1:].cpu() != host[:, 1:])).any()):
        b, t = (local & (labels[:, 1:].cpu() != host[:, 1:])).nonzero()[0].tolist()
        raise DataError(
            f"row {b} of the batch has label {int(labels[b, t + 1])} at column {t + 1}, where its token is "
            f"{int(host[b, t + 1])}; labels must be the row's own tokens or {IGNORED}"
        )
    masks = [local[b, start : max(stop - 1, start)].numpy() for b, start, stop in spans]
    return Rows(rows, masks, spans, ids.shape, wanted)


def tree_of(ids: list[np.ndarray], masks: list[np.ndarray]) -> TokenTree:
    """Rows as a tree whose trained tokens are those that are predicted; all of them without masks."""
    if not masks:
        return build_tree(ids)
    weights = [np.concatenate([[0.0], mask])[: len(row)] for row, mask in zip(ids, masks)]
    return build_tree([Trajectory(row, loss_weights=weight) for row, weight in zip(ids, weights)])


def _to_scored_token(row: np.ndarray, padding: int | None) -> np.ndarray:
    """A row up to the token that transformers' classifiers score: the last one that is not the padding token."""
    real = np.flatnonzero(row != padding)
    return row[: int(real[-1]) + 1] if len(real) else row[:1]


def _check_positions(positions: Tensor, spans: list[Span]) -> None:
    for b, start, stop in spans:
        if not torch.equal(positions[b, start:stop], torch.arange(stop - start, dtype=positions.dtype)):
            raise DataError(
                f"row {b} of the batch has an attention_mask, and position_ids that do not count its tokens from 0; "
                "leave one of both out (packed batches have positions alone)"
            )

"""Recovers the rows of a trainer's batch, and puts per-prediction numbers back into the batch's shape."""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from treetrain.data.trajectory import Trajectory
from treetrain.errors import DataError
from treetrain.trainers.padded import packed_spans, padded_spans
from treetrain.tree.build import build_tree
from treetrain.tree.token_tree import TokenTree

IGNORED = -100
"""The label of tokens that are not predicted."""
TREE_INDEX = ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")
"""Keyword arguments by which TRL's `AsyncGRPOTrainer` describes a packed tree to its model."""


class Rows(NamedTuple):
    """The K rows of a batch."""

    ids: list[np.ndarray]
    masks: list[np.ndarray]
    """bool [L_k - 1]: the wanted predictions; an empty list for rewards."""
    places: list[np.ndarray]
    """int64 [L_k - 1]: where each prediction stands in the flattened `wanted`."""
    wanted: Tensor
    """bool [B, L - 1], or [1, N] for a packed tree of N tokens, on the device of the labels."""

    def batch(self, rows: list[Tensor] | None) -> Tensor | None:
        """Per-prediction rows in the shape of `wanted`, 0 where nothing is predicted; None stays None."""
        if rows is None:
            return None
        if [len(row) for row in rows] != [len(places) for places in self.places]:
            raise DataError("the scores are those of other rows than the batch has")
        # Rows of a packed tree share places: the first row with a place gives its value and gets all of its gradient.
        places, first = np.unique(np.concatenate(self.places), return_index=True)
        values = torch.cat(rows)
        index, target = (torch.from_numpy(x).to(values.device) for x in (first, places))
        flat = values.new_zeros(self.wanted.numel()).index_copy(0, target, values[index])
        return flat.view(self.wanted.shape).to(self.wanted.device)


def rows_of(kwargs: dict[str, Any], *, rewards: bool = False) -> Rows:
    """Recover the rows of a batch that is padded, packed, neither, or a packed tree.

    Args:
        kwargs: keyword arguments of the model's call.
        rewards: the model scores whole rows, so there are no token labels.

    Raises:
        DataError: a label that is not the next token of its row, or a mask with positions that do not fit it.
    """
    if "tree_kv_index" in kwargs:
        return _rows_of_packed_tree(kwargs)
    ids, mask, positions = kwargs["input_ids"], kwargs.get("attention_mask"), kwargs.get("position_ids")
    if mask is None and positions is not None:
        spans = packed_spans(positions.expand(ids.shape))
    else:
        spans = padded_spans(torch.ones_like(ids) if mask is None else mask)
    if mask is not None and positions is not None:
        for b, start, stop in spans:
            if positions.expand(ids.shape)[b, start:stop].tolist() != list(range(stop - start)):
                raise DataError(
                    f"row {b} of the batch has an attention_mask, and position_ids that do not count its tokens from "
                    "0; leave one of them out (packed batches have positions alone)"
                )
    host = ids.cpu()
    rows = [host[b, start:stop].numpy() for b, start, stop in spans]
    if rewards:
        return Rows(rows, [], [], ids.new_zeros(0))
    labels = kwargs["labels"][:, 1:]
    wanted, inside = (labels != IGNORED).cpu(), torch.zeros(labels.shape, dtype=torch.bool)
    columns = [(b, start, max(stop - 1, start)) for b, start, stop in spans]
    for b, start, stop in columns:
        inside[b, start:stop] = True
    for wrong, why in (
        (
            wanted & ~inside,
            "which is padding or the first token of a row: it would be predicted from padding or another row; set it "
            f"to {IGNORED}, or pad on the right",
        ),
        (wanted & (labels.cpu() != host[:, 1:]), f"where its token is another; set it to the row's token or {IGNORED}"),
    ):
        if bool(wrong.any()):
            b, t = wrong.nonzero()[0].tolist()
            label, token = int(labels[b, t]), int(host[b, t + 1])
            raise DataError(f"row {b} of the batch has label {label} at column {t + 1} (token {token}), {why}")
    return Rows(
        rows,
        masks=[wanted[b, start:stop].numpy() for b, start, stop in columns],
        places=[b * labels.shape[1] + np.arange(start, stop) for b, start, stop in columns],
        wanted=labels != IGNORED,
    )


def _rows_of_packed_tree(kwargs: dict[str, Any]) -> Rows:
    """Recover the samples that TRL's AsyncGRPO packed into a tree for its own kernel.

    As rows they run wherever the engine does, and together with the step's other micro-batches. See
    `TreeRow.pack` in trl/experimental/async_grpo/packing.py for the arguments.
    """
    tokens, labels = (kwargs[name][0].cpu().numpy() for name in ("input_ids", "shift_labels"))
    index, starts, path_starts = (kwargs[name].cpu().numpy().astype(np.int64) for name in TREE_INDEX)
    paths, own = np.split(index, path_starts[1:-1]), np.diff(starts)
    parents = {int(path[-length - 1]) for path, length in zip(paths, own) if len(path) > length}
    # A sample ends in a segment of its own, which no other segment continues.
    paths = [path for path in paths if int(path[-1]) not in parents]
    return Rows(
        ids=[tokens[path] for path in paths],
        masks=[labels[path[:-1]] != IGNORED for path in paths],
        places=[path[:-1] for path in paths],
        wanted=kwargs["shift_labels"] != IGNORED,
    )


def packed_tree_of(batch: dict[str, Any]) -> dict[str, Any]:
    """The arguments with which `AsyncGRPOTrainer` calls its model for one of its micro-batches."""
    real = batch["attention_mask"].bool()
    inputs = {name: batch[name][real][None] for name in ("input_ids", "shift_labels")}
    return inputs | {name: batch[name][batch[name] >= 0] for name in TREE_INDEX}


def tree_of(ids: list[np.ndarray], masks: list[np.ndarray]) -> TokenTree:
    """Rows as a tree whose trained tokens are the wanted ones; without masks all tokens are trained."""
    if not masks:
        return build_tree(ids)
    weights = [np.concatenate([[0.0], mask])[: len(row)] for row, mask in zip(ids, masks)]
    return build_tree([Trajectory(row, loss_weights=weight) for row, weight in zip(ids, weights)])

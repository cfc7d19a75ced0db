"""Converts between trainers' batches, padded [B, L] or packed, and rows of their own length."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from treetrain.data.trajectory import Trajectory
from treetrain.errors import DataError


class Span(NamedTuple):
    """The place of a row in a batch."""

    batch_row: int
    start: int
    stop: int
    """One past the last token."""


def from_padded(input_ids: Tensor, attention_mask: Tensor, **facts: Tensor) -> list[Trajectory]:
    """Rows of a padded batch as trajectories.

    Args:
        input_ids: int [B, L].
        attention_mask: bool or 0/1 [B, L], True at real tokens; padding left, right or both.
        facts: per-token facts of `Trajectory` by name, [B, L] (entry t belongs to the prediction of token t), or
            [B, L - 1] as `to_padded` returns them (entry t to that of token t + 1), or [B] for facts with one value per
            row (``reward``, ``chosen``; ``advantages`` and ``loss_weights`` may be [B] too).

    Raises:
        DataError: shapes that disagree, or a hole in a row's mask.
    """
    if input_ids.dim() != 2 or attention_mask.shape != input_ids.shape:
        raise DataError(
            f"input_ids has shape {tuple(input_ids.shape)} and attention_mask {tuple(attention_mask.shape)}; "
            "both must be [B, L]"
        )
    return _trajectories(input_ids, padded_spans(attention_mask), facts, per_row=True)


def to_padded(rows: Sequence[Tensor], attention_mask: Tensor, fill: float = 0.0) -> Tensor:
    """Pad per-prediction rows, as `logprobs` returns them, to a batch aligned with next-token logits.

    Args:
        rows: B tensors [L_b - 1], L_b being the number of real tokens of row b.
        attention_mask: [B, L], as given to `from_padded`.
        fill: value at padding.

    Returns:
        [B, L - 1]: column t belongs to the prediction of the token in column t + 1. Differentiable.
    """
    return _placed(rows, padded_spans(attention_mask), attention_mask, "an attention_mask of", fill)


def from_packed(input_ids: Tensor, position_ids: Tensor, **facts: Tensor) -> list[Trajectory]:
    """Rows of a packed (padding-free) batch as trajectories: a row begins wherever the positions return to 0.

    Args:
        input_ids: int [B, T], several rows one after another; B is usually 1.
        position_ids: int [B, T], counting from 0 within every row.
        facts: per-token facts of `Trajectory` by name, [B, T] (entry t belongs to the prediction of token t), or
            [B, T - 1] as `to_packed` returns them (entry t to that of token t + 1).

    Raises:
        DataError: shapes that disagree, or positions that do not count up from 0.
    """
    if position_ids.shape != input_ids.shape:
        raise DataError(
            f"position_ids has shape {tuple(position_ids.shape)} and input_ids {tuple(input_ids.shape)}; both must be "
            "[B, T]"
        )
    return _trajectories(input_ids, packed_spans(position_ids), facts, per_row=False)


def to_packed(rows: Sequence[Tensor], position_ids: Tensor, fill: float = 0.0) -> Tensor:
    """Pack per-prediction rows, as `logprobs` returns them, into a batch aligned with next-token logits.

    Args:
        rows: a tensor [L_k - 1] for every row that `from_packed` finds, in its order.
        position_ids: [B, T], as given to `from_packed`.
        fill: value where the next token begins another row.

    Returns:
        [B, T - 1]: column t belongs to the prediction of the token in column t + 1. Differentiable.
    """
    return _placed(rows, packed_spans(position_ids), position_ids, "position_ids that hold", fill)


def padded_spans(attention_mask: Tensor) -> list[Span]:
    """The real tokens of every row of a padded batch. Raises DataError for padding between real tokens."""
    spans = []
    for b, row in enumerate(attention_mask.detach().cpu().bool()):
        real = row.nonzero().flatten()
        start, stop = (int(real[0]), int(real[-1]) + 1) if len(real) else (0, 0)
        if len(real) != stop - start:
            hole = start + int((~row[start:stop]).nonzero()[0])
            raise DataError(
                f"row {b}: attention_mask is 0 at column {hole} between real tokens; only padding at the ends is "
                "allowed, since a hole would shift positions"
            )
        spans.append(Span(b, start, stop))
    return spans


def packed_spans(position_ids: Tensor) -> list[Span]:
    """The rows of a packed batch, in order. Raises DataError for positions that do not count up from 0."""
    spans = []
    for b, row in enumerate(position_ids.detach().cpu()):
        columns = torch.arange(len(row))
        begins = row == 0
        # Column of the latest 0 at or before each column: positions must count from there.
        latest = torch.where(begins, columns, -1).cummax(0).values if len(row) else columns
        wrong = (row != columns - latest) | (latest < 0)
        if wrong.any():
            first = int(wrong.nonzero()[0])
            raise DataError(
                f"row {b}: position_ids is {int(row[first])} at column {first}; positions must count up from 0 "
                "within every packed row"
            )
        starts = begins.nonzero().flatten().tolist()
        spans += [Span(b, start, stop) for start, stop in zip(starts, [*starts[1:], len(row)])]
    return spans


def _placed(rows: Sequence[Tensor], spans: Sequence[Span], like: Tensor, holder: str, fill: float) -> Tensor:
    """Per-prediction rows at their places in a batch of the shape of `like` [B, L]: [B, L - 1], differentiable."""
    if len(rows) != len(spans):
        raise DataError(f"{len(rows)} rows for {holder} {len(spans)}")
    height, columns = like.shape[0], like.shape[1] - 1
    places = []
    for k, (row, (b, start, stop)) in enumerate(zip(rows, spans)):
        if len(row) != max(stop - start - 1, 0):
            raise DataError(
                f"row {k} has {len(row)} predictions and {stop - start} tokens; expected one less than tokens"
            )
        places.append(torch.arange(b * columns + start, b * columns + start + len(row)))
    if not rows:
        return torch.full((height, columns), fill)
    values = torch.cat(list(rows))
    batch = values.new_full((height * columns,), fill)
    return batch.index_copy(0, torch.cat(places).to(values.device), values).view(height, columns)


def _trajectories(
    input_ids: Tensor, spans: Sequence[Span], facts: dict[str, Tensor], *, per_row: bool
) -> list[Trajectory]:
    height, length = input_ids.shape
    shapes = [(height, length), (height, length - 1)] + [(height,)] * per_row
    local = {}
    for name, value in facts.items():
        if tuple(value.shape) not in shapes:
            raise DataError(
                f"{name} has shape {tuple(value.shape)} and input_ids {(height, length)}; expected "
                f"{' or '.join(map(str, shapes))} (per token, per prediction{' or per row' if per_row else ''})"
            )
        value = value.detach().cpu()
        if value.dim() == 2 and value.shape[1] == length - 1:
            value = torch.nn.functional.pad(value, (1, 0))  # no prediction of the first column
        local[name] = value.double() if value.is_floating_point() else value
    ids, rows = input_ids.detach().cpu(), []
    for b, start, stop in spans:
        own: dict[str, Any] = {
            name: value[b, start:stop].numpy() if value.dim() == 2 else value[b].item() for name, value in local.items()
        }
        rows.append(Trajectory(ids[b, start:stop].numpy(), **own))
    return rows

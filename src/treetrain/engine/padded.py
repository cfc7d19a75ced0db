"""Between the batches that trainers hold, padded [B, L] or packed, and rows of their own length."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from treetrain.data.trajectory import Trajectory
from treetrain.errors import DataError


class Span(NamedTuple):
    """Where a row lies in a batch."""

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
            [B, L - 1] as `to_padded` returns them (entry t to that of token t + 1), or [B] for the facts a row has
            one of (``reward``, ``chosen``; ``advantages`` and ``loss_weights`` may be [B] too).

    Raises:
        DataError: shapes that disagree, or a hole in a row's mask.
    """
    if input_ids.dim() != 2 or attention_mask.shape != input_ids.shape:
        raise DataError(
            f"input_ids has shape {tuple(input_ids.shape)} and attention_mask {tuple(attention_mask.shape)}; "
            "both must be [B, L]"
        )
    for name, value in facts.items():
        shape = tuple(input_ids.shape)
        if value.shape not in (shape, (shape[0], shape[1] - 1), shape[:1]):
            raise DataError(
                f"{name} has shape {tuple(value.shape)}; expected {shape} (per token), "
                f"{(shape[0], shape[1] - 1)} (per prediction) or {shape[:1]} (per row)"
            )
    return _trajectories(input_ids, padded_spans(attention_mask), facts)


def to_padded(rows: Sequence[Tensor], attention_mask: Tensor, fill: float = 0.0) -> Tensor:
    """Per-prediction rows, as `logprobs` returns them, as a padded batch aligned with next-token logits.

    Args:
        rows: B tensors [L_b - 1], L_b being the number of real tokens of row b.
        attention_mask: [B, L], as given to `from_padded`.
        fill: value at padding.

    Returns:
        [B, L - 1]: column t belongs to the prediction of the token in column t + 1. Differentiable.
    """
    if len(rows) != len(attention_mask):
        raise DataError(f"{len(rows)} rows for an attention_mask of {len(attention_mask)}")
    return placed(rows, padded_spans(attention_mask), attention_mask.shape, fill)


def from_packed(input_ids: Tensor, position_ids: Tensor, **facts: Tensor) -> list[Trajectory]:
    """Rows of a packed (padding-free) batch as trajectories: a row begins wherever the positions return to 0.

    Args:
        input_ids: int [B, T], several rows behind each other; B is usually 1.
        position_ids: int [B, T], counting from 0 within every row.
        facts: per-token facts of `Trajectory` by name, [B, T] (entry t belongs to the prediction of token t), or
            [B, T - 1] as `to_packed` returns them (entry t to that of token t + 1).

    Raises:
        DataError: shapes that disagree, or positions that do not count up from 0.
    """
    for name, value in {"position_ids": position_ids, **facts}.items():
        shapes = [tuple(input_ids.shape)]
        if name in facts:
            shapes.append((input_ids.shape[0], input_ids.shape[1] - 1))
        if tuple(value.shape) not in shapes:
            raise DataError(
                f"{name} has shape {tuple(value.shape)} and input_ids {tuple(input_ids.shape)}; "
                f"expected {' or '.join(map(str, shapes))}"
            )
    return _trajectories(input_ids, packed_spans(position_ids), facts)


def to_packed(rows: Sequence[Tensor], position_ids: Tensor, fill: float = 0.0) -> Tensor:
    """Per-prediction rows, as `logprobs` returns them, as a packed batch aligned with next-token logits.

    Args:
        rows: a tensor [L_k - 1] for every row that `from_packed` finds, in its order.
        position_ids: [B, T], as given to `from_packed`.
        fill: value where the next token begins another row.

    Returns:
        [B, T - 1]: column t belongs to the prediction of the token in column t + 1. Differentiable.
    """
    spans = packed_spans(position_ids)
    if len(rows) != len(spans):
        raise DataError(f"{len(rows)} rows for position_ids that hold {len(spans)}")
    return placed(rows, spans, position_ids.shape, fill)


def padded_spans(attention_mask: Tensor) -> list[Span]:
    """The real tokens of every row of a padded batch.

    Raises:
        DataError: padding between real tokens.
    """
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
    """The rows of a packed batch, in order.

    Raises:
        DataError: positions that do not count up from 0.
    """
    spans = []
    for b, row in enumerate(position_ids.detach().cpu()):
        starts = (row == 0).nonzero().flatten().tolist()
        for start, stop in zip(starts, [*starts[1:], len(row)]):
            spans.append(Span(b, start, stop))
        counted = torch.cat([torch.arange(stop - start) for i, start, stop in spans if i == b] or [row[:0]])
        if len(counted) != len(row) or not torch.equal(counted.to(row.dtype), row):
            first = int((counted.to(row.dtype) != row).nonzero()[0]) if len(counted) == len(row) else 0
            raise DataError(
                f"row {b}: position_ids is {int(row[first])} at column {first}; positions must count up from 0 "
                "within every packed row"
            )
    return spans


def placed(rows: Sequence[Tensor], spans: Sequence[Span], shape: Sequence[int], fill: float = 0.0) -> Tensor:
    """Per-prediction rows at their places in a batch of ids of this shape [B, L]: [B, L - 1], differentiable.

    Raises:
        DataError: a row without one entry for each prediction.
    """
    columns = shape[1] - 1
    places = []
    for k, (row, (b, start, stop)) in enumerate(zip(rows, spans)):
        if len(row) != max(stop - start - 1, 0):
            raise DataError(
                f"row {k} has {len(row)} predictions and {stop - start} tokens; expected one less than tokens"
            )
        places.append(torch.arange(b * columns + start, b * columns + start + len(row)))
    if not rows:
        return torch.full((shape[0], columns), fill)
    values = torch.cat(list(rows))
    batch = values.new_full((shape[0] * columns,), fill)
    return batch.index_copy(0, torch.cat(places).to(values.device), values).view(shape[0], columns)


def _trajectories(input_ids: Tensor, spans: Sequence[Span], facts: dict[str, Tensor]) -> list[Trajectory]:
    ids = input_ids.detach().cpu()
    local = {name: _per_token(value.detach().cpu(), ids.shape[1]) for name, value in facts.items()}
    rows = []
    for b, start, stop in spans:
        own: dict[str, Any] = {
            name: value[b, start:stop].numpy() if value.dim() == 2 else value[b].item() for name, value in local.items()
        }
        rows.append(Trajectory(ids[b, start:stop].numpy(), **own))
    return rows


def _per_token(value: Tensor, length: int) -> Tensor:
    """A fact as [B, L] or [B]; one per prediction gets an unused entry for the first column."""
    if value.dim() == 2 and value.shape[1] == length - 1:
        value = torch.nn.functional.pad(value, (1, 0))
    return value.double() if value.is_floating_point() else value

"""Between right- or left-padded [B, L] batches, which RL frameworks hold, and rows of their own length."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from treetrain.data.trajectory import Trajectory
from treetrain.errors import DataError


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
    ids, mask = input_ids.detach().cpu(), attention_mask.detach().cpu().bool()
    if ids.dim() != 2 or mask.shape != ids.shape:
        raise DataError(
            f"input_ids has shape {tuple(ids.shape)} and attention_mask {tuple(mask.shape)}; both must be [B, L]"
        )
    for name, value in facts.items():
        if value.shape not in (ids.shape, (len(ids), ids.shape[1] - 1), ids.shape[:1]):
            raise DataError(
                f"{name} has shape {tuple(value.shape)}; expected {tuple(ids.shape)} (per token), "
                f"{(len(ids), ids.shape[1] - 1)} (per prediction) or {tuple(ids.shape[:1])} (per row)"
            )
    local = {name: _per_token(value.detach().cpu(), ids.shape[1]) for name, value in facts.items()}
    rows = []
    for b, (start, stop) in enumerate(_spans(mask)):
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


def to_padded(rows: Sequence[Tensor], attention_mask: Tensor, fill: float = 0.0) -> Tensor:
    """Per-prediction rows, as `logprobs` returns them, as a padded batch aligned with next-token logits.

    Args:
        rows: B tensors [L_b - 1], L_b being the number of real tokens of row b.
        attention_mask: [B, L], as given to `from_padded`.
        fill: value at padding.

    Returns:
        [B, L - 1]: column t belongs to the prediction of the token in column t + 1. Differentiable.
    """
    mask = attention_mask.detach().cpu().bool()
    if len(rows) != len(mask):
        raise DataError(f"{len(rows)} rows for an attention_mask of {len(mask)}")
    columns = mask.shape[1] - 1
    padded = []
    for b, ((start, stop), row) in enumerate(zip(_spans(mask), rows)):
        if len(row) != max(stop - start - 1, 0):
            raise DataError(
                f"row {b} has {len(row)} predictions, its mask {stop - start} tokens; expected one less than tokens"
            )
        room = (min(start, columns), columns - min(start, columns) - len(row))
        padded.append(torch.nn.functional.pad(row, room, value=fill))
    return torch.stack(padded)


def _spans(mask: Tensor) -> list[tuple[int, int]]:
    """(first, one past last) real token of every row."""
    spans = []
    for b, row in enumerate(mask):
        real = row.nonzero().flatten()
        start, stop = (int(real[0]), int(real[-1]) + 1) if len(real) else (0, 0)
        if len(real) != stop - start:
            hole = start + int((~row[start:stop]).nonzero()[0])
            raise DataError(
                f"row {b}: attention_mask is 0 at column {hole} between real tokens; only padding at the ends is "
                "allowed, since a hole would shift positions"
            )
        spans.append((start, stop))
    return spans

"""The check in the first training step: a few rows through the plain model and through the tree."""

import logging
import time
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from treetrain.data.columns import sorted_by_prefix
from treetrain.engine.costs import cost_if_countable
from treetrain.engine.engine import TreeEngine
from treetrain.engine.executor import gradients_of
from treetrain.models.capability import causal_lm
from treetrain.trainers.batches import IGNORED, Rows, tree_of
from treetrain.tree.stats import linear_work
from treetrain.verification.verify import relative_error

logger = logging.getLogger(__name__)
Seam = Literal["fused", "loss", "rewards"]
"""How a trainer calls its model: for log-probabilities by TRL's fused head, for a loss, or for rewards."""
LIMITS = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Largest allowed relative difference, by dtype of the computation. TRL's own head always sums in float32."""
ROWS = 3
"""How many rows are compared."""


def compare_with_plain(
    engine: TreeEngine, plain: Callable[..., Any], rows: Rows, seam: Seam
) -> tuple[dict[str, float], float | None]:
    """Compare a few rows between the model's own forward and the tree: scores, and gradients of a random sum of them.

    Args:
        engine: for the unwrapped model, so that other ranks take no part.
        plain: the forward that the trainer would have called.

    Returns:
        the relative differences, to be logged (empty if nothing is predicted), and the FLOP/s of the plain forward and
        backward (None if the model's FLOPs cannot be counted).

    Raises:
        RuntimeError: they differ by more than rounding.
    """
    chosen = rows_to_compare(rows.ids, rows.masks)
    if not chosen:
        return {}, None
    ids, masks = [rows.ids[k] for k in chosen], [rows.masks[k] for k in chosen] if rows.masks else []
    model, device = engine.model, next(engine.model.parameters()).device
    parameters, random = list(model.parameters()), torch.Generator().manual_seed(0)

    def gradients(run: Callable[[], None]) -> list[Tensor]:
        with torch.autocast(device.type, enabled=False):
            left = gradients_of(parameters, run)
        return [torch.zeros((), device=device) if grad is None else grad for grad in left]

    for _ in range(2):  # the first run warms up
        start = time.perf_counter()
        expected = _plain_scores(plain, model, ids, masks, seam)
        weights = torch.randn(expected.shape, generator=random).to(expected)
        expected_gradients = gradients((expected * weights).sum().backward)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - start

    scored = engine.score(ids, rewards=True) if seam == "rewards" else engine.score(ids, mask=masks)
    if scored.rewards is not None:
        shared = scored.rewards.reshape(expected.shape)
    else:
        shared = torch.cat([row[torch.from_numpy(mask)] for row, mask in zip(scored.logprobs, masks)])

    def run() -> None:
        (shared * weights.to(shared)).sum().backward()
        scored.backward(sync=False)

    apart = relative_error([shared.detach()], [expected.detach()])
    apart_gradients = relative_error(gradients(run), expected_gradients)
    dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else model.dtype
    limit = LIMITS.get(dtype, LIMITS[torch.bfloat16])  # type: ignore[arg-type]
    if dtype is torch.float32 and device.type == "cuda" and torch.get_float32_matmul_precision() != "highest":
        limit *= 10  # TF32
    said = (
        f"{len(ids)} rows of the first batch, plain and with shared prefixes: log-probabilities (or rewards) differ by "
        f"{apart:.1e}, gradients by {apart_gradients:.1e} (relative; at most {limit:g} in {dtype})"
    )
    if not (apart <= limit and apart_gradients <= limit):  # also true if one is NaN
        raise RuntimeError(
            f"{said}. The model does not give a tree what it gives rows: train without share_prefixes and report this "
            "model, or pass check=False if such a difference is expected"
        )
    logger.info(said)
    cost = cost_if_countable(model)
    logs = {"tree/score_difference": apart, "tree/gradient_difference": apart_gradients}
    if cost is None:
        return logs, None
    return logs, cost.counts.flops(*linear_work(tree_of(ids, masks), cost.counts.attention_ranges)) / seconds


def rows_to_compare(ids: list[Integer[np.ndarray, " _"]], masks: list[Bool[np.ndarray, " _"]]) -> list[int]:
    """Choose a few rows with something to predict: the two that share most, and a neighbour in prefix order."""
    wanted = [k for k in range(len(ids)) if len(ids[k]) and (not masks or masks[k].any())]
    if len(wanted) <= ROWS:
        return wanted
    order, shared = zip(*sorted_by_prefix(wanted, ids.__getitem__))
    first = min(int(np.argmax(shared[1:])), len(order) - ROWS)
    return list(order[first : first + ROWS])


def _plain_scores(
    plain: Callable[..., Any],
    model: nn.Module,
    ids: list[Integer[np.ndarray, " _"]],
    masks: list[Bool[np.ndarray, " _"]],
    seam: Seam,
) -> Float[Tensor, " scores"]:
    """The plain model's log-probabilities of the wanted predictions, or its rewards; rows are padded on the right."""
    padding = getattr(causal_lm(model).config.get_text_config(), "pad_token_id", None) or 0  # type: ignore[union-attr,operator]

    def padded(rows: list[Tensor], fill: int) -> Tensor:
        return pad_sequence(rows, batch_first=True, padding_value=fill).to(next(model.parameters()).device)

    rows = [torch.from_numpy(row).long() for row in ids]
    mask = padded([torch.ones_like(row) for row in rows], 0)
    batch = {"input_ids": padded(rows, padding), "attention_mask": mask, "use_cache": False}
    if seam == "rewards":
        return plain(**batch).logits.squeeze(-1)
    unwanted = [torch.from_numpy(~np.append(False, mask)) for mask in masks]
    labels = padded([row.masked_fill(skipped, IGNORED) for row, skipped in zip(rows, unwanted)], IGNORED)
    wanted = labels[:, 1:] != IGNORED
    if seam == "fused":
        return plain(**batch, labels=labels, fused_lm_head=True).log_probs[wanted]
    logits = plain(**batch).logits[:, :-1][wanted]
    logprobs = (logits.float() if logits.dtype.itemsize < 4 else logits).log_softmax(-1)
    return logprobs.gather(-1, labels[:, 1:][wanted][:, None])[:, 0]

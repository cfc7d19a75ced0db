"""Loss and log-likelihood of rows that a model is not trained on."""

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from treetrain.data.trajectory import Trajectory
from treetrain.engine.engine import TreeEngine
from treetrain.engine.loss import Metrics, add_metrics, mean_metrics
from treetrain.errors import DataError
from treetrain.trainers.policy_log import LoggedPolicyLoss
from treetrain.trainers.rollouts import OLD, REFERENCE, logprobs, missing_facts, on_policy, with_advantages

logger = logging.getLogger(__name__)


def loss_of_held_out(
    rows: Sequence[Trajectory], loss: Any, *, reference: bool
) -> tuple[Sequence[Trajectory], Any, bool]:
    """Add advantages to held-out rows, and choose the loss that they are evaluated by.

    Rows without old log-probabilities are measured on-policy (ratio 1).

    Args:
        loss: the training loss.
        reference: whether there is a reference policy to score rows with.

    Returns:
        the rows; the loss, None if they lack a fact that it needs; whether the reference must still score them (their
        ref_logprobs are zeros until then).
    """
    loss = loss.inner if isinstance(loss, LoggedPolicyLoss) else loss
    try:
        rows = with_advantages(rows, loss, None)
        missing = missing_facts(rows, loss)
    except DataError as error:
        logger.warning("held-out rows are evaluated by their log-likelihood alone: %s", error)
        return rows, None, False
    loss = on_policy(loss) if OLD in missing else loss
    if REFERENCE not in missing:
        return rows, loss, False
    if not reference:
        return rows, None, False
    return [row.replace(**{REFERENCE: np.zeros(len(row))}) for row in rows], loss, True


@torch.no_grad()
def evaluate(
    engine: TreeEngine, calls: Iterable[Sequence[Trajectory]], loss: Any, rows: Sequence[Trajectory]
) -> dict[str, float]:
    """Evaluate held-out rows.

    Args:
        engine: its ranks share every call.
        calls: the rows in whole groups, with all facts that the loss needs; memory does not grow with their number.
        loss: divided by its normaliser over all rows; None evaluates the likelihood alone.
        rows: all of them, for the normaliser and `for_step` of the loss.

    Returns:
        `nll`, the mean negative log-likelihood of the weighted tokens in nats; `trained_tokens`; and where there is a
        loss, `loss` and its metrics.
    """
    nll = weight = tokens = total = 0.0
    sums: Metrics = {}
    loss = None if loss is None else loss.for_step(rows)
    for members in calls:
        entropies = loss is not None and "entropies" in loss.needs
        every = loss is not None and loss.reads_untrained
        scores = logprobs(engine, members, entropies=entropies, every=every)
        scored, entropy_rows = scores if entropies else (scores, None)
        flat, weights = torch.cat(scored), np.concatenate([row.weights[1:] for row in members])
        used = weights != 0
        # An untrained token may be impossible, and 0 times infinity is not a number.
        nll -= float(weights[used] @ flat.double().cpu().numpy()[used])
        weight += float(weights.sum())
        tokens += int(used.sum())
        if loss is not None and (every or used.any()):
            facts = loss.pack(members, device=flat.device, dtype=flat.dtype, used=None if every else used)
            read = torch.from_numpy(np.flatnonzero(used | every)).to(flat.device)
            entropy = None if entropy_rows is None else torch.cat(entropy_rows)[read]
            part, metrics = loss.packed(flat[read], entropy, facts)
            total, sums = total + float(part), add_metrics(sums, metrics)
    numbers = mean_metrics(sums) | {"nll": nll / weight, "trained_tokens": tokens}
    return numbers if loss is None else numbers | {"loss": total / loss.normaliser(rows)}

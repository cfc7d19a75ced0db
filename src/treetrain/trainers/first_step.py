"""Compares a few rows of the first batch with the model's plain forward and backward, before anything is trained."""

import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from treetrain.data.prefix_order import sorted_by_prefix
from treetrain.engine.engine import TreeEngine
from treetrain.engine.gradients import gradients_of
from treetrain.models.capability import causal_lm

logger = logging.getLogger(__name__)

LIMITS = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Largest relative difference by the dtype of the arithmetic; TRL's own head sums in float32 whatever the model's."""
_ROWS, _PARAMETERS = 3, 8


class Compared(NamedTuple):
    """A few rows on the plain path and as a tree."""

    scores: float
    """Relative difference of their log-probabilities (or rewards)."""
    gradients: float
    """Relative difference of the gradients of a random sum of these, over a few parameters."""
    seconds: float
    """Time of the plain forward and backward."""
    ids: list[np.ndarray]
    """The rows."""
    masks: list[np.ndarray]


def compare_with_plain(
    engine: TreeEngine, plain: Callable[..., Any], ids: list[np.ndarray], masks: list[np.ndarray], *, seam: str
) -> Compared | None:
    """Scores and gradients of a few rows, by the model's own forward and from the tree.

    Args:
        engine: of the model, without other ranks.
        plain: the forward that the trainer would have called.
        ids: int [L_k] of every row of the batch.
        masks: bool [L_k - 1], the predictions that are wanted; none for rewards.
        seam: see `refusals.Seam`.

    Returns:
        None where nothing is predicted.

    Raises:
        RuntimeError: they differ by more than rounding.
    """
    chosen = rows_to_compare(ids, masks)
    if not chosen:
        return None
    ids, masks = [ids[k] for k in chosen], [masks[k] for k in chosen] if masks else []
    device = next(engine.model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    parameters = _few([p for p in engine.model.parameters() if p.requires_grad])

    padding = getattr(text_config(engine.model), "pad_token_id", None) or 0

    def run_plain() -> tuple[Tensor, Tensor, Any, float]:
        begin = time.perf_counter()
        scores = _plain_scores(plain, ids, masks, device, seam, padding)
        weights = torch.randn(scores.shape, generator=generator).to(scores)
        with torch.autocast(device.type, enabled=False):
            gradients = _gradients(engine.model, parameters, (scores * weights).sum().backward)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return scores, weights, gradients, time.perf_counter() - begin

    run_plain()  # the first run is not timed: it also warms up
    scores, weights, gradients, seconds = run_plain()

    if seam == "rewards":
        scored = engine.score(ids, rewards=True)
        assert scored.rewards is not None
        found = scored.rewards.reshape(scores.shape)
    else:
        scored = engine.score(ids, mask=masks)
        found = torch.cat([row[torch.from_numpy(mask)] for row, mask in zip(scored.logprobs, masks)])
    with torch.autocast(device.type, enabled=False):
        trees = _gradients(engine.model, parameters, lambda: _run(scored, (found * weights.to(found)).sum()))
    result = Compared(_relative([found.detach()], [scores.detach()]), _relative(trees, gradients), seconds, ids, masks)
    _judge(result, engine.model, device)
    return result


def text_config(model: nn.Module) -> Any:
    """The configuration of the language model inside a model."""
    lm: Any = causal_lm(model)
    return lm.config.get_text_config()


def rows_to_compare(ids: list[np.ndarray], masks: list[np.ndarray]) -> list[int]:
    """A few rows with something to predict: two that share most, and the shortest other one."""
    wanted = [k for k in range(len(ids)) if len(ids[k]) and (not masks or masks[k].any())]
    found = list(sorted_by_prefix(wanted, ids.__getitem__))
    order = [number for number, _ in found]
    if len(order) <= _ROWS:
        return order
    first = int(np.argmax([shared for _, shared in found[1:]]))
    pair = order[first : first + 2]
    return [*pair, min((k for k in order if k not in pair), key=lambda k: len(ids[k]))]


def _plain_scores(
    plain: Callable[..., Any],
    ids: list[np.ndarray],
    masks: list[np.ndarray],
    device: torch.device,
    seam: str,
    padding: int,
) -> Tensor:
    """[wanted predictions] log-probabilities or [K] rewards of the rows, padded on the right."""
    width = max(map(len, ids))
    tokens, real = torch.full((len(ids), width), padding), torch.zeros(len(ids), width, dtype=torch.long)
    labels = torch.full((len(ids), width), -100)
    for k, row in enumerate(ids):
        tokens[k, : len(row)], real[k, : len(row)] = torch.from_numpy(row), 1
        if masks:
            wanted = torch.from_numpy(masks[k])
            labels[k, 1 : len(row)] = torch.where(wanted, tokens[k, 1 : len(row)], -100)
    batch = {"input_ids": tokens.to(device), "attention_mask": real.to(device), "use_cache": False}
    if seam == "rewards":
        return plain(**batch).logits.squeeze(-1)
    labels = labels.to(device)
    wanted = labels[:, 1:] != -100
    if seam == "fused":
        return plain(**batch, labels=labels, fused_lm_head=True).log_probs[wanted]
    logits = plain(**batch).logits[:, :-1][wanted]
    return torch.log_softmax(logits.float() if logits.dtype.itemsize < 4 else logits, -1).gather(
        -1, labels[:, 1:][wanted][:, None]
    )[:, 0]


def _few(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    """Some of the trained parameters, from the first to the last."""
    places = np.unique(np.linspace(0, len(parameters) - 1, _PARAMETERS).astype(int))
    return [parameters[k] for k in places]


def _run(scored: Any, loss: Tensor) -> None:
    loss.backward()
    scored.backward(sync=False)


def _gradients(model: nn.Module, wanted: list[nn.Parameter], run: Callable[[], None]) -> list[Tensor | None]:
    """What a call leaves in ``.grad`` of some parameters; all are put back as they were."""
    parameters = list(model.parameters())
    found = dict(zip(parameters, gradients_of(parameters, run)))
    return [found[p] for p in wanted]


def _relative(found: Any, expected: Any) -> float:
    """|found - expected| / |expected|, pooled; None stands for zeros."""
    pairs = [(a, b) for a, b in zip(found, expected) if a is not None or b is not None]
    pairs = [(torch.zeros_like(b) if a is None else a, torch.zeros_like(a) if b is None else b) for a, b in pairs]
    error = sum(float((a.double() - b.double()).square().sum()) for a, b in pairs) ** 0.5
    size = sum(float(b.double().square().sum()) for _, b in pairs) ** 0.5
    return error / size if size else error


def _judge(result: Compared, model: nn.Module, device: torch.device) -> None:
    dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else model.dtype
    limit = LIMITS.get(dtype, LIMITS[torch.bfloat16])  # type: ignore[arg-type]
    if dtype is torch.float32 and device.type == "cuda" and torch.get_float32_matmul_precision() != "highest":
        limit = 10 * limit  # TF32
    said = (
        f"{len(result.ids)} rows of the first batch, plain and with shared prefixes: log-probabilities (or rewards) "
        f"differ by {result.scores:.1e}, gradients by {result.gradients:.1e} (relative; at most {limit:g} in {dtype})"
    )
    # `not <=`, so that NaN does not pass.
    if not max(result.scores, result.gradients) <= limit:
        raise RuntimeError(
            f"{said}. The model does not give a tree what it gives rows: train without share_prefixes and report this "
            "model, or pass check=False if such a difference is expected"
        )
    logger.info(said)

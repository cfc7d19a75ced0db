"""The check in the first training step: a few rows through the plain model and through the tree.

Both sides get one small batch, made from the trainer's own. So the plain side runs as it would in the trainer: with its
padding, its positions and its loss. The check must not be what runs out of memory. Rows are cut so that the plain
forward and backward need no more than the step itself will. Plain gradients are sketched and freed as they come
(`verification/sketch.py`), and the tree's are those of a step.
"""

import logging
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from treetrain.data.columns import sorted_by_prefix
from treetrain.data.trajectory import common_prefix
from treetrain.engine.costs import compute_dtype, cost_if_countable
from treetrain.engine.engine import TreeEngine
from treetrain.engine.score import Scored
from treetrain.kernel_checks import relative_error
from treetrain.models.capability import causal_lm
from treetrain.trainers.batches import IGNORED, TREE_INDEX, Rows, rows_of, tree_of
from treetrain.tree.stats import linear_work
from treetrain.verification.sketch import gradients_as_they_come, sketch_size, sketched

logger = logging.getLogger(__name__)
Seam = Literal["fused", "loss", "rewards"]
"""How a trainer calls its model: for log-probabilities by TRL's fused head, for a loss, or for rewards."""
Batch = dict[str, Any]
"""Keyword arguments of the model's forward."""
LIMITS = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Largest allowed relative difference of scores and gradients, by dtype of the computation. TRL's own head always sums
in float32."""
LOSS_LIMITS = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 0.02}
"""The same for the loss: a mean over tokens, in which rounding cancels."""
KIND_LIMIT = 5
"""The gradients of one kind of parameter, in all layers, may differ by this many times the limit."""
KIND_SHARE = 0.01
"""A kind's difference is relative to its norm, or to this share of the norm of all gradients if that is larger."""
ROWS = 3
"""How many rows are compared."""
LEAST_TOKENS, UNCOUNTED_TOKENS = 48, 512
"""At least so many tokens are compared, and at most so many of a model whose memory cannot be predicted."""
TRL_TILE, TRL_TILE_BYTES = 32_768, 36
"""The most tokens of the vocabulary in a tile of TRL's head, and bytes for each logit of a tile in its backward when
plain torch operations compute it: the tile, eight copies in float32 and a mask (trl/kernels/chunked_logprob.py)."""
_BY_TOKEN = ("input_ids", "attention_mask", "position_ids", "labels", "seq_idx")
_OF_PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_OF_TREES = (*TREE_INDEX, "tree_max_seqlen_q", "tree_max_seqlen_k", "shift_labels")


class Difference(NamedTuple):
    """How far the tree is from the plain model, all relative."""

    scores: float
    gradients: float
    worst: float
    """The difference for the kind of parameter whose gradients differ most."""
    worst_kind: str
    losses: tuple[float, float] | None
    """The plain model's loss and the tree's; None if the trainer computes its own."""


class FirstStep:
    """Compares a few rows between the model's own forward and the tree: scores, gradients, and the loss if it is used.

    The gradients are those of the loss, or of a random sum of the scores. The trainer's side makes both calls of the
    model, with `batch`, within `plain_run` and `tree_run`; then `judge` compares.

    Args:
        engine: for the unwrapped model, so that other ranks take no part.
        call: the arguments of the trainer's call.
        rows: the rows in it.
        chosen: the numbers of those to compare, see `rows_to_compare`.
    """

    def __init__(self, engine: TreeEngine, call: Batch, rows: Rows, seam: Seam, chosen: Sequence[int]):
        self.batch = small_batch(call, rows, chosen, tokens_within(engine, rows, seam))
        """The arguments of both calls."""
        self.device = self.batch["input_ids"].device
        self._engine, self._seam, self._count = engine, seam, len(chosen)
        self._names = {p: name for name, p in engine.model.named_parameters() if p.requires_grad}
        self._parameters = list(self._names)
        self._size = sketch_size(self._parameters)
        self._seconds = 0.0
        self._plain_scores: Tensor | None = None
        self._plain_loss: Tensor | None = None

    @contextmanager
    def plain_run(self, *, timed: bool = False) -> Iterator[None]:
        """The plain model is called inside the block; a second time to measure it, after the first has warmed up."""
        start = time.perf_counter()
        if timed:
            with gradients_as_they_come(self._parameters):
                yield
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self._seconds = time.perf_counter() - start
        else:
            with sketched(self._parameters, self._size, streamed=True) as self._plain_gradients:
                yield

    def backward_of_plain(self, output: Any) -> None:
        """Remember what the plain forward gave, and run its backward."""
        scores = output.log_probs if self._seam == "fused" else output.logits
        if self._seam == "loss":
            self._plain_loss = None if output.loss is None else output.loss.detach()
            scores = None if scores is None else _logprobs(scores.detach(), self.batch["labels"])
        self._plain_scores = None if scores is None else scores.detach()
        objective = self._objective(scores, output)
        del output, scores  # logits, which the backward does not need
        self._backward(objective)

    @contextmanager
    def tree_run(self) -> Iterator[None]:
        """The tree is scored inside the block."""
        with sketched(self._parameters, self._size) as self._tree_gradients:
            yield

    def backward_of_tree(self, output: Any, scores: Float[Tensor, "..."], scored: Scored) -> None:
        """Remember how the tree answers the call, and run its backward.

        Args:
            output: what the trainer gets.
            scores: log-probabilities [B, L - 1], 0 where nothing is predicted; or rewards.
            scored: runs backward after the scores.
        """
        self._tree_scores = scores.detach()
        self._tree_loss = output.loss.detach() if self._seam == "loss" else None
        self._backward(self._objective(scores, output))
        with torch.autocast(self.device.type, enabled=False):
            scored.backward(sync=False)

    def _objective(self, scores: Tensor | None, output: Any) -> Tensor:
        """The loss, or a random sum of the scores."""
        if self._seam == "loss" or scores is None:
            return output.loss
        weights = torch.randn(scores.shape, generator=torch.Generator().manual_seed(0))
        return (scores * weights.to(scores)).sum()

    def _backward(self, objective: Tensor) -> None:
        with torch.autocast(self.device.type, enabled=False):
            objective.backward()

    def judge(self) -> tuple[dict[str, float], float | None]:
        """Compare, after both runs.

        Returns:
            the relative differences, to be logged, and the FLOP/s of the plain forward and backward (None if the
            model's FLOPs cannot be counted).

        Raises:
            RuntimeError: they differ by more than rounding.
        """
        model, plain, tree = self._engine.model, self._plain_gradients, self._tree_gradients
        dtype = compute_dtype(model, self.device)
        worst, kind = _worst_kind([self._names[p] for p in self._parameters], tree, plain, dtype)
        plain_scores = self._plain_scores
        difference = Difference(
            scores=0.0 if plain_scores is None else relative_error([self._tree_scores], [plain_scores]),
            gradients=relative_error(tree, plain),
            worst=worst,
            worst_kind=kind,
            losses=None
            if self._plain_loss is None or self._tree_loss is None
            else (float(self._plain_loss), float(self._tree_loss)),
        )
        logger.info(_judged(difference, self.batch, self._count, dtype, self.device))
        logs = {"tree/score_difference": difference.scores, "tree/gradient_difference": difference.gradients}
        cost = cost_if_countable(model)
        if cost is None:
            return logs, None
        small = rows_of(self.batch, rewards=self._seam == "rewards")
        work = linear_work(tree_of(small.ids, small.masks), cost.counts.attention_ranges)
        return logs, cost.counts.flops(*work) / self._seconds


def _logprobs(logits: Float[Tensor, "B L V"], labels: Integer[Tensor, "B L"]) -> Float[Tensor, "B _"]:
    """Log-probabilities of the labels' tokens [B, L - 1], 0 where there is no label; a few positions at a time."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    logprobs = logits.new_zeros(labels[:, 1:].shape, dtype=wide)
    for row, column in zip(*(index.split(64) for index in (labels[:, 1:] != IGNORED).nonzero(as_tuple=True))):
        scores = logits[row, column].to(wide)
        chosen = scores.gather(1, labels[row, column + 1][:, None])[:, 0]
        logprobs[row, column] = chosen - scores.logsumexp(1)
    return logprobs


def _worst_kind(
    names: Sequence[str], gradients: Sequence[Tensor], expected: Sequence[Tensor], dtype: torch.dtype
) -> tuple[float, str]:
    """Return the largest relative error of one kind of parameter, over all layers, and the kind.

    A kind whose true gradient is 0 holds nothing but rounding, which would be a relative error of 1. So errors are
    relative to `KIND_SHARE` of all gradients at least (to more in low precision).
    """
    squares: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for name, a, b in zip(names, gradients, expected):
        kind = squares[re.sub(r"\.\d+(?=\.)", ".*", name)]
        kind[0] += float((a - b).square().sum())
        kind[1] += float(b.square().sum())
    share = max(KIND_SHARE, _limit(LIMITS, dtype) / 2)
    least = share * sum(norm for _, norm in squares.values()) ** 0.5
    errors = {kind: apart**0.5 / (max(norm**0.5, least) or 1.0) for kind, (apart, norm) in squares.items()}
    worst = max(errors, key=lambda kind: errors[kind], default="")
    return errors.get(worst, 0.0), worst


# ---- the verdict


def _limit(limits: Mapping[torch.dtype, float], dtype: torch.dtype) -> float:
    return limits.get(dtype, limits[torch.bfloat16])


def _judged(difference: Difference, batch: Batch, count: int, dtype: torch.dtype, device: torch.device) -> str:
    """One sentence that says how far apart they are.

    Raises:
        RuntimeError: by more than rounding.
    """
    tf32 = dtype is torch.float32 and device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    limit, loss_limit = (_limit(limits, dtype) * (10 if tf32 else 1) for limits in (LIMITS, LOSS_LIMITS))
    allowed = f"(relative; at most {limit:g} in {dtype})"
    if not difference.scores <= limit:  # also true of NaN
        raise RuntimeError(
            f"first step, {count} rows: log-probabilities (or rewards) of the plain model and with shared prefixes "
            f"differ by {difference.scores:.1e} {allowed}. {_why_scores_differ(batch)}, or pass check=False"
        )
    if difference.losses is not None:
        plain, ours = difference.losses
        if not abs(plain - ours) <= loss_limit * abs(plain):
            raise RuntimeError(
                f"first step, {count} rows: the model's own loss is {plain:.6g}, the cross-entropy that share_prefixes "
                f"would train {ours:.6g}; their log-probabilities agree. The first has another loss_function, a term "
                "that a forward adds, or an adapter's regularisation (AdaLoRA): remove it, train without "
                "share_prefixes, or use tt.TreeTrainer with a loss of your own"
            )
    if not (difference.gradients <= limit and difference.worst <= KIND_LIMIT * limit):
        raise RuntimeError(
            f"first step, {count} rows: gradients of the plain model and with shared prefixes differ by "
            f"{difference.gradients:.1e} {allowed}, those of {difference.worst_kind} by {difference.worst:.1e}. Train "
            "without share_prefixes and report this model, or pass check=False if such a difference is expected"
        )
    return (
        f"{count} rows of the first batch, plain and with shared prefixes: log-probabilities (or rewards) differ by "
        f"{difference.scores:.1e}, gradients by {difference.gradients:.1e} {allowed}"
    )


def _why_scores_differ(batch: Batch) -> str:
    """Say what may explain different scores, by how the batch holds its rows, and what to do."""
    mask = batch.get("attention_mask")
    if mask is None and batch.get("position_ids") is not None:
        return (
            "Shared prefixes compute each packed row alone, which is right. If this attention lets packed rows see one "
            "another, take another attn_implementation, or pad"
        )
    if mask is not None and not bool(mask[:, 0].all()):
        return (
            "Shared prefixes count positions from a row's first token, as generation does, which is right. If this "
            "model counts the padding on its left too, pad on the right"
        )
    return "The model does not give a tree what it gives rows: train without share_prefixes and report this model"


# ---- the batch that is compared


def rows_to_compare(ids: list[Integer[np.ndarray, " _"]], masks: list[Bool[np.ndarray, " _"]]) -> list[int]:
    """Choose a few rows with something to predict: the two that share most, and a neighbour in prefix order."""
    wanted = [k for k in range(len(ids)) if len(ids[k]) and (not masks or masks[k].any())]
    if len(wanted) <= ROWS:
        return wanted
    order, shared = zip(*sorted_by_prefix(wanted, ids.__getitem__))
    first = min(int(np.argmax(shared[1:])), len(order) - ROWS)
    return list(order[first : first + ROWS])


def tokens_within(engine: TreeEngine, rows: Rows, seam: Seam) -> int:
    """The most tokens, padding included, that the plain model may run forward and backward at once.

    They need no more memory than the tree of these rows, or than its gradients, which come as the graph goes; as far as
    memory can be predicted.
    """
    cost = cost_if_countable(engine.model)
    if cost is None:
        return UNCOUNTED_TOKENS
    plan, counts = engine.plan(tree_of(rows.ids, rows.masks)), cost.counts
    if engine.prepared.keeps_graphs(plan):
        plan = plan.with_all_kept()
    step = sum(bytes for name, bytes in cost.bytes_by(plan).items() if name != "allocator")
    gradients = sum(p.numel() * p.element_size() for p in engine.parameters if p.requires_grad)
    room = max(step, gradients) - counts.saved_pass - counts.weight_gradient
    token = counts.saved_token + counts.backward_token + (counts.saved_layer if counts.checkpointing else 0)
    if seam == "loss":  # logits, in float32 for the loss, their log-softmax, and the gradients of both
        logit, wide = counts.dtype_bytes, counts.wide_bytes
        token += counts.vocab * (3 * wide + (2 * logit if logit < wide else 0))
    elif seam == "fused":  # TRL's head works on tiles, in torch or by a kernel that needs no more than the tile
        kernel = rows.wanted.device.type in ("cuda", "xpu") and find_spec("triton") is not None
        token += min(counts.vocab, TRL_TILE) * (counts.dtype_bytes if kernel else TRL_TILE_BYTES)
    tokens = int(max(room / token, 0))
    config: Any = causal_lm(engine.model).config.get_text_config()  # type: ignore[union-attr, operator]
    if getattr(config, "_attn_implementation", None) == "eager":
        # Scores and softmax [heads, L, L] of every layer: `pair` n^2 + `token` n = room, for rows of n / ROWS tokens.
        layers = 1 if counts.checkpointing else counts.layers
        pair = layers * counts.heads * (counts.wide_bytes + 2 * counts.dtype_bytes) / ROWS
        tokens = int((-token + (token**2 + 4 * pair * max(room, 0)) ** 0.5) / (2 * pair))
    return max(tokens, LEAST_TOKENS)


def small_batch(call: Batch, rows: Rows, chosen: Sequence[int], tokens: int) -> Batch:
    """The call of the model for some rows of a batch: padded or packed as they are in it, and cut to so many tokens.

    Where rows need not be cut, a padded batch's are given with all of their columns. TRL's packed trees become padded.
    """
    ids = call["input_ids"]
    packed = call.get("attention_mask") is None and call.get("position_ids") is not None
    if not packed and TREE_INDEX[0] not in call and len(chosen) * ids.shape[1] <= tokens:
        index = torch.tensor([rows.spans[k].batch_row for k in chosen], device=ids.device)
        of_rows = {name: call[name] for name in _BY_TOKEN if isinstance(call.get(name), Tensor)}
        return call | {name: value.expand(len(ids), -1)[index] for name, value in of_rows.items()}
    pieces, masks = _cut([rows.ids[k] for k in chosen], [rows.masks[k] for k in chosen if rows.masks], tokens)
    columns: dict[str, list[Tensor]] = {"input_ids": [torch.from_numpy(piece).long() for piece in pieces]}
    if masks:
        wanted = [torch.from_numpy(np.append(False, mask)) for mask in masks]
        columns["labels"] = [row.masked_fill(~own, IGNORED) for row, own in zip(columns["input_ids"], wanted)]
    if packed or call.get("position_ids") is not None:
        columns["position_ids"] = [torch.arange(len(piece)) for piece in pieces]
    if packed and call.get("seq_idx") is not None:
        columns["seq_idx"] = [torch.full((len(piece),), k) for k, piece in enumerate(pieces)]
    batch = {name: value for name, value in call.items() if name not in (*_BY_TOKEN, *_OF_PACKING, *_OF_TREES)}
    if packed:
        batch |= {name: torch.cat(values)[None].to(ids.device) for name, values in columns.items()}
        if call.get("seq_idx") is not None:
            batch["seq_idx"] = batch["seq_idx"].to(call["seq_idx"].dtype)
        lengths = [len(piece) for piece in pieces]
        ends = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=ids.device)
        return batch | {name: ends if name.startswith("cu_") else max(lengths) for name in _OF_PACKING if name in call}
    columns["attention_mask"] = [torch.ones_like(row) for row in columns["input_ids"]]
    left = any(span.start > 0 for span in rows.spans)
    fills = {"labels": IGNORED}
    for name, values in columns.items():
        side = "left" if left else "right"
        batch[name] = pad_sequence(values, True, fills.get(name, 0), padding_side=side).to(ids.device)
    return batch


def _cut(
    ids: list[Integer[np.ndarray, " _"]], masks: list[Bool[np.ndarray, " _"]], tokens: int
) -> tuple[list[Integer[np.ndarray, " _"]], list[Bool[np.ndarray, " _"]]]:
    """Cut all rows to the same columns, with as many before the last fork as after it.

    The pieces are rows too, and both sides get the same. Rows that end before these columns are left out. If no token
    in them is a label, all become labels.
    """
    length, longest = max(tokens // len(ids), 2), max(map(len, ids))
    if longest <= length:
        return ids, masks
    fork = max((common_prefix(a, b) for n, a in enumerate(ids) for b in ids[:n]), default=longest // 2)
    start = max(min(fork - length // 2, longest - length), 0)
    left = [k for k, row in enumerate(ids) if len(row) > start + 1]
    masks = [masks[k][start : start + length - 1] for k in left if masks]
    if not any(mask.any() for mask in masks):
        masks = [np.ones_like(mask) for mask in masks]
    return [ids[k][start : start + length] for k in left], masks

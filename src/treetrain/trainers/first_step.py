"""The check in the first training step: a few rows through the plain model and through the tree.

It is `sample` (choose rows), `run` (both sides) and `judge`, in this order.

Both sides get one small batch, made from the trainer's own. So the plain side runs as it would in the trainer: with its
padding, its positions and its loss. The check must not be what runs out of memory, nor take long. Rows are cut so that
the plain forward and backward need no more memory than the step itself will, and a tenth of its time. Plain gradients
are sketched and freed as they come (`check/sketch.py`), and the tree's are those of a step.
"""

import logging
import re
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from treetrain.check.first_use import accept, advice
from treetrain.check.sketch import gradients_as_they_come, sketch_size, sketched
from treetrain.core.engine.engine_model import Sharing
from treetrain.core.engine.ranks import Ranks
from treetrain.core.hf.capability import causal_lm, model_device
from treetrain.core.tree.trajectory import common_prefix
from treetrain.engine import TreeEngine
from treetrain.kernels.checks import relative_error
from treetrain.layers.images.encoders import image_encoder, joined_images, reads_token_types
from treetrain.layers.images.image_rows import IMAGE_INPUTS, IMAGE_TYPES
from treetrain.layers.trajectory import Trajectory
from treetrain.logs.columns import sorted_by_prefix
from treetrain.models.work import linear_work
from treetrain.parallel.process_group import compute_dtype
from treetrain.trainers.batches import IGNORED, TOKEN_TYPES, TREE_INDEX, ModelInputs, Rows, Span, rows_of, tree_of
from treetrain.trainers.outputs import Answer, Compared, Output, Question, TokensOutput
from treetrain.trainers.patches import OwnForward
from treetrain.trainers.skipped_steps import not_finite
from treetrain.trainers.step_scores import TreeScores

logger = logging.getLogger(__name__)
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
STEP_SHARE = 40
"""Rows are cut to so many times fewer tokens than the tree of the call has: they run forward and backward twice in the
plain model and twice as a tree."""
PARTS = 8
"""The tree of the rows runs as one part, and again in parts of so many times fewer tokens."""
LEAST_TOKENS, UNCOUNTED_TOKENS = 48, 512
"""At least so many tokens are compared, and at most so many of a model whose memory cannot be predicted."""
_BY_TOKEN = ("input_ids", "attention_mask", "position_ids", "labels", "seq_idx", *TOKEN_TYPES)
_OF_PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_OF_TREES = (*TREE_INDEX, "tree_max_seqlen_q", "tree_max_seqlen_k", "shift_labels")


# ---- sample


@dataclass(frozen=True)
class Sample:
    """A few rows of a call as a batch, which both sides run."""

    question: Question
    """The call for these rows alone."""
    engine: TreeEngine
    """For the unwrapped model, so that other ranks take no part unless they hold shards of it."""
    alone: bool
    """Whether the plain model runs each row by itself, not the batch as the trainer gives it."""
    ranks: Ranks
    """Those that run every pass together, within their `together`."""

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The trained ones, by name."""
        return {name: p for name, p in self.engine.model.named_parameters() if p.requires_grad}

    @property
    def batch(self) -> ModelInputs:
        return self.question.inputs

    @property
    def rows(self) -> Rows:
        return self.question.rows

    @property
    def device(self) -> torch.device:
        return self.batch["input_ids"].device

    def plain(self, batch: ModelInputs) -> Compared:
        """Run the plain model."""
        return self.question.output.plain(self.question.forward.plain, batch)

    @cached_property
    def weights(self) -> Float[Tensor, " _"]:
        """Random weights of all scores, the same on both sides: a sum by them has gradients to compare."""
        count = self.rows.wanted.numel() if self.rows.places else len(self.rows.ids)
        return torch.randn(count, generator=torch.Generator().manual_seed(0))

    def engines(self) -> list[TreeEngine]:
        """The engine with two budgets: one runs the tree of the batch as one part, the other in several.

        Gradients between parts go through caches, which a tree of one part does not have.
        """
        tokens, engines = tree_of([self.rows]).num_tokens, []
        for budget in (tokens, max(tokens // PARTS, 1)):
            engine = copy(self.engine)
            engine.prepared = copy(self.engine.prepared)
            engine.prepared.budget = budget
            engines.append(engine)
        return engines

    @property
    def advice(self) -> str:
        """Advice where shared prefixes are wrong."""
        return advice(self.engine.model, "train without share_prefixes")

    def batches_alone(self) -> list[ModelInputs]:
        """The call of each row by itself: without padding, its positions from 0.

        Ranks that run passes together get equally many: those with fewer rows get their first row again. A collective
        call of these ranks.
        """
        batches = []
        shared = {name: value for name, value in self.batch.items() if name not in (*_BY_TOKEN, *_OF_PACKING)}
        for row, start, stop in self.rows.spans:
            of_row = {}
            for name in ("input_ids", "attention_mask", "labels", *TOKEN_TYPES):
                if isinstance(value := self.batch.get(name), Tensor):
                    of_row[name] = value[row : row + 1, start:stop]
            if "labels" in of_row:
                of_row["labels"] = of_row["labels"].clone()
                of_row["labels"][:, 0] = IGNORED
            batches.append(with_images_of(shared | of_row, self.rows, [len(batches)]))
        most = max(self.ranks.exchange(len(batches)))
        return batches + batches[:1] * (most - len(batches))


def sample(
    question: Question, engine: TreeEngine, sharing: Sharing, *, alone: bool, balanced: bool
) -> tuple[Sample | None, bool]:
    """Choose rows of a call, and make a small batch of them. A collective call of the ranks.

    Args:
        engine: for the unwrapped model.
        sharing: of the engine that the call trains.
        alone: see `Sample`.
        balanced: whether the routers' auxiliary loss is part of the loss.

    Returns:
        the sample, None on a rank without rows to compare; and whether any rank compares some: if not, a later call is
        sampled.
    """
    if alone and balanced and question.output.has_loss:
        raise ValueError(
            "check='rows' runs the plain model on each row by itself, which a loss with the routers' auxiliary loss of "
            "a whole batch does not allow: take True or False"
        )
    chosen = _rows_of_kinds(question.rows, by_images=sharing.collective)
    predicts = any(chosen)
    if sharing.collective and not predicts:  # it can run the passes with ranks that predict something
        question = _all_labelled(question, engine.model)
        chosen = _rows_of_kinds(question.rows, by_images=True)
    all_predict, all_run = zip(*sharing.ranks.exchange((predicts, [bool(rows) for rows in chosen])))
    kinds = [kind for kind, run in enumerate(zip(*all_run)) if all(run) or not sharing.collective]
    compares = any(all_predict) and bool(kinds)
    if not compares or not chosen[kinds[0]]:
        return None, compares
    return _small_sample(question, chosen[kinds[0]], engine, alone=alone, ranks=sharing.passes_with), True


def _rows_of_kinds(rows: Rows, *, by_images: bool) -> list[list[int]]:
    """The rows to compare; or those among rows with images, and those among rows of text.

    The plain model calls its encoder for rows with images alone, so where passes are collective all ranks must compare
    rows of one kind.
    """
    kinds = [range(len(rows.ids))]
    if by_images:
        pictured = [bool(rows.images and rows.images[k]) for k in kinds[0]]
        kinds = [np.flatnonzero(pictured).tolist(), np.flatnonzero(np.logical_not(pictured)).tolist()]
    return [rows_to_compare(rows.ids, rows.masks, rows.spans, among) for among in kinds]


def _small_sample(
    question: Question, chosen: Sequence[int], engine: TreeEngine, *, alone: bool = False, ranks: Ranks | None = None
) -> Sample:
    """A small batch of the chosen rows of a call; see `Sample` for the arguments."""
    if question.rows.masks and question.rows.spans and question.inputs.get("labels") is None:
        question = _all_labelled(question, engine.model)
    tokens = tokens_within(engine, question.rows, question.output)
    if not question.rows.images:  # rows with images are not cut
        tokens = min(tokens, tokens_in_time(engine, question.rows))
    batch = small_batch(question.inputs, question.rows, chosen, tokens)
    accept(engine)  # compared here
    small = question._replace(inputs=batch, rows=question.output.rows(batch, engine.model), shifted=False)
    return Sample(small, engine, alone, ranks or Ranks())


def _all_labelled(question: Question, model: nn.Module) -> Question:
    """The call with a label for every token of its rows except their first ones."""
    ids = question.inputs["input_ids"]
    labels = torch.full_like(ids, IGNORED)
    for row, start, stop in question.rows.spans:
        labels[row, start + 1 : stop] = ids[row, start + 1 : stop]
    inputs = question.inputs | {"labels": labels}
    return question._replace(inputs=inputs, rows=question.output.rows(inputs, model))


# ---- run


class Run(NamedTuple):
    """The results of one side for a sample."""

    scores: Tensor | None
    """Log-probabilities [B, L - 1], 0 where nothing is predicted, or rewards; None if the model gives none."""
    loss: Tensor | None
    """None if the trainer computes its own."""
    gradients: list[Tensor]
    """A sketch for each parameter: of the loss, or of a random sum of the scores."""
    seconds: float | None = None
    """Seconds of forward and backward, if they were timed."""


def run(sample: Sample, *, timed: bool = True) -> tuple[Run, list[Run]]:
    """Run the plain model forward and backward, and a tree of the rows as one part, then in parts.

    Args:
        timed: run the plain model once more to measure it, as the first run also warms up.
    """
    plain = _run_plain(sample)
    if timed:
        start = time.perf_counter()
        with gradients_as_they_come(list(sample.parameters.values())):
            _forward_backward(sample)
        if sample.device.type == "cuda":
            torch.cuda.synchronize(sample.device)
        plain = plain._replace(seconds=time.perf_counter() - start)
    return plain, [_run_tree(sample, engine) for engine in sample.engines()]


def _run_plain(sample: Sample) -> Run:
    parameters = list(sample.parameters.values())
    with sketched(parameters, sketch_size(parameters), streamed=True) as gradients:
        scores, loss = _forward_backward(sample)
    return Run(scores, loss, gradients)


def _run_tree(sample: Sample, engine: TreeEngine) -> Run:
    parameters, output = list(sample.parameters.values()), sample.question.output
    with sketched(parameters, sketch_size(parameters)) as gradients:
        scored = output.score(engine, TreeScores(0, [sample.rows]))
        answer = Answer(sample.question, scored, slice(None), lambda value: value, engine.capabilities.auxiliary)
        loss = output.answer(answer).loss if output.has_loss else None
        _backward(sample, _objective(sample, answer.scores, loss))
        with torch.autocast(sample.device.type, enabled=False):
            scored.backward(sync=sample.engine.sharing.collective)
    return Run(answer.scores.detach(), None if loss is None else loss.detach(), gradients)


def _forward_backward(sample: Sample) -> tuple[Tensor | None, Tensor | None]:
    """Run the plain model forward and backward on the batch, or on each row by itself; returns scores and loss."""
    if sample.alone:
        return _forward_backward_of_rows(sample)
    scores, loss, _ = sample.plain(sample.batch)
    objective = _objective(sample, scores, loss)
    scores, loss = (None if x is None else x.detach() for x in (scores, loss))
    _backward(sample, objective)
    return scores, loss


def _forward_backward_of_rows(sample: Sample) -> tuple[Tensor, Tensor | None]:
    """The same for each row by itself."""
    rows, all_scores, losses = sample.rows, [], []
    for k, batch in enumerate(sample.batches_alone()):
        scores, loss, zero = sample.plain(batch)
        objective = zero  # of a row that trains nothing: other ranks may wait for this backward
        if k < len(rows.ids):
            assert scores is not None
            all_scores.append(scores.detach().flatten())
            if loss is None:
                place = torch.from_numpy(rows.places[k]) if rows.places else torch.tensor([k])
                objective = (scores.flatten() * sample.weights[place].to(scores)).sum()
            else:
                is_mean = batch.get("num_items_in_batch") is None  # over the row's own predictions
                share = rows.masks[k].sum() / max(int(rows.wanted.sum()), 1) if is_mean else 1.0
                objective = loss * share if share else zero
                losses.append(objective.detach())
        if objective.requires_grad:
            _backward(sample, objective)
    return rows.batch(all_scores), torch.stack(losses).sum() if losses else None


def _objective(sample: Sample, scores: Tensor | None, loss: Tensor | None) -> Tensor:
    """The loss, or a random sum of the scores."""
    if loss is not None:
        return loss
    assert scores is not None
    return (scores.flatten() * sample.weights.to(scores)).sum()


def _backward(sample: Sample, objective: Tensor) -> None:
    with torch.autocast(sample.device.type, enabled=False):
        objective.backward()


# ---- judge


class Difference(NamedTuple):
    """How far a tree is from the plain model, all relative."""

    scores: float
    gradients: float
    worst: float
    """The difference for the kind of parameter whose gradients differ most."""
    worst_kind: str
    losses: tuple[float, float] | None
    """The plain model's loss and the tree's; None if the trainer computes its own."""

    @property
    def of_gradients(self) -> float:
        """To be compared with the limit."""
        return float(np.maximum(self.gradients, self.worst / KIND_LIMIT))  # NaN if one of them is


def judge(
    sample: Sample, plain: Run, trees: list[Run], *, repeatable: bool = True
) -> tuple[dict[str, float], float | None]:
    """Compare both sides.

    Args:
        repeatable: whether the plain model may be called again, to say which side is right if they differ; a
            collective call of ranks that run passes together.

    Returns:
        the relative differences, to be logged, and the FLOP/s of the plain forward and backward (None if the model's
        FLOPs cannot be counted, or the plain run was not timed).

    Raises:
        RuntimeError: they differ by more than rounding.
    """
    engine = sample.engine
    # Adapters may be narrower than their base (QLoRA), and then they compute in their own dtype.
    dtypes = {compute_dtype(engine.model, sample.device), *(p.dtype for p in sample.parameters.values())}
    dtype = max(dtypes, key=lambda candidate: _limit(LIMITS, candidate))
    tf32 = dtype is torch.float32 and sample.device.type == "cuda"
    tf32 = tf32 and torch.get_float32_matmul_precision() != "highest"
    limit, loss_limit = (_limit(limits, dtype) * (10 if tf32 else 1) for limits in (LIMITS, LOSS_LIMITS))
    differences = [_difference(sample, tree, plain, dtype) for tree in trees]
    why = _why(sample, plain, trees, differences, limit, repeatable=repeatable)
    for difference, how in zip(differences, ("as one part", "in parts")):
        rows = f"{len(sample.rows.ids)} rows {how}"
        logger.info(_judged(difference, why, sample.advice, rows, dtype, limit, loss_limit))
    logs = {
        "tree/score_difference": max(difference.scores for difference in differences),
        "tree/gradient_difference": max(difference.gradients for difference in differences),
    }
    if engine.prepared.cost is None or not plain.seconds:
        return logs, None
    counts = engine.prepared.cost.counts
    return logs, counts.flops(*linear_work(tree_of([sample.rows]), counts.attention_ranges)) / plain.seconds


def _difference(sample: Sample, tree: Run, plain: Run, dtype: torch.dtype) -> Difference:
    worst, kind = _worst_kind(list(sample.parameters), tree.gradients, plain.gradients, dtype)
    scores = 0.0
    if plain.scores is not None and tree.scores is not None:
        scores = relative_error([tree.scores.reshape(plain.scores.shape)], [plain.scores])
    return Difference(
        scores=scores,
        gradients=relative_error(tree.gradients, plain.gradients),
        worst=worst,
        worst_kind=kind,
        losses=None if plain.loss is None or tree.loss is None else (float(plain.loss), float(tree.loss)),
    )


def _why(
    sample: Sample, plain: Run, trees: list[Run], differences: list[Difference], limit: float, *, repeatable: bool
) -> str:
    """Say why both sides differ, and which is right where the plain model may be asked; empty if they agree."""
    by_scores = not all(difference.scores <= limit for difference in differences)  # also true of NaN
    by_gradients = not by_scores and not all(difference.of_gradients <= limit for difference in differences)
    asks_which = repeatable and not sample.alone
    of_ranks = sample.ranks.exchange((by_scores, by_gradients)) if asks_which else []
    if any(map(any, of_ranks)):  # on some rank: all of these ranks must run the passes
        why = _which_is_right(sample, plain, trees, limit, by_scores=any(scores for scores, _ in of_ranks))
    elif not by_scores and not by_gradients:
        why = ""
    elif sample.alone:
        why = f"The plain side is each row by itself, so shared prefixes are wrong for this model: {sample.advice}"
    else:
        cause, change = _layout_of(sample.batch, sample.rows)
        why = f"Shared prefixes compute each row by itself, which is right. If {cause}, {change}"
    if plain.scores is not None and not bool(plain.scores.isfinite().all()):
        weight = next((name for what, name in not_finite(sample.engine.model) if what == "weights"), None)
        why = "Those of the plain model are not finite" + (f": {weight} is not, either" if weight else "")
    return why


def _which_is_right(sample: Sample, plain: Run, trees: list[Run], limit: float, *, by_scores: bool) -> str:
    """Say which of both sides is right, by each row by itself, why, and what to do.

    Args:
        by_scores: compare scores; else gradients, which differ alone where a norm follows the rotary embedding.
    """
    alone = _run_plain(replace(sample, alone=True))
    dtype = compute_dtype(sample.engine.model, sample.device)

    def distance(side: Run) -> float:
        difference = _difference(sample, side, alone, dtype)
        return difference.scores if by_scores else difference.of_gradients

    tree, batch = max(map(distance, trees)), distance(plain)
    cause, change = _layout_of(sample.batch, sample.rows)
    if tree <= limit and not batch <= limit:
        return (
            f"Shared prefixes are right: they give what each row gives by itself (to {tree:.1e}). The trainer's "
            f"batch does not ({batch:.1e}): {cause}. To make both right, {change}. To go on as it is, set "
            "check='rows', which compares with each row by itself"
        )
    if batch <= limit and not tree <= limit:
        return (
            f"Shared prefixes are wrong here: the trainer's batch gives what each row gives by itself; {sample.advice}"
        )
    return f"Each row by itself differs from the tree by {tree:.1e} and from the batch by {batch:.1e}: {sample.advice}"


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


def _limit(limits: Mapping[torch.dtype, float], dtype: torch.dtype) -> float:
    return limits.get(dtype, limits[torch.bfloat16])


def _judged(
    difference: Difference, why: str, cure: str, rows: str, dtype: torch.dtype, limit: float, loss_limit: float
) -> str:
    """One sentence that says how far apart they are; `why` they differ, or else the cure.

    Args:
        rows: how many, and how they ran.

    Raises:
        RuntimeError: by more than rounding.
    """
    allowed = f"(relative; at most {limit:g} in {dtype})"
    if not difference.scores <= limit:  # also true of NaN
        raise RuntimeError(
            f"first step, {rows}: log-probabilities (or rewards) of the plain model and with shared prefixes "
            f"differ by {difference.scores:.1e} {allowed}. {why}. check=False does not compare"
        )
    if difference.losses is not None:
        plain, ours = difference.losses
        if not abs(plain - ours) <= loss_limit * abs(plain):
            raise RuntimeError(
                f"first step, {rows}: the model's own loss is {plain:.6g}, the cross-entropy that share_prefixes "
                f"would train {ours:.6g}; their log-probabilities agree. The first has another loss_function, a term "
                "that a forward adds, or an adapter's regularisation (AdaLoRA): remove it, train without "
                "share_prefixes, or use tt.TreeTrainer with a loss of your own"
            )
    if not difference.of_gradients <= limit:
        raise RuntimeError(
            f"first step, {rows}: gradients of the plain model and with shared prefixes differ by "
            f"{difference.gradients:.1e} {allowed}, those of {difference.worst_kind} by {difference.worst:.1e}. "
            f"{why or cure[0].upper() + cure[1:]}. check=False does not compare"
        )
    return (
        f"{rows} of the first batch, plain and with shared prefixes: log-probabilities (or rewards) differ by "
        f"{difference.scores:.1e}, gradients by {difference.gradients:.1e} {allowed}"
    )


def _layout_of(batch: ModelInputs, rows: Rows) -> tuple[str, str]:
    """How this batch holds its rows may change them: in which way, and what to do."""
    if batch.get("attention_mask") is None and batch.get("position_ids") is not None:
        return (
            "this model lets packed rows see one another",
            "pad the rows (no padding-free collator, packing=False), or take another attn_implementation",
        )
    if any(span.start > 0 for span in rows.spans):
        return (
            "this model counts the padding on a row's left in its positions, which no row has in generation",
            "pad on the right, or put position_ids that count from a row's first token into the batch",
        )
    return "rows of one batch change one another", "take batches of one row (per_device_train_batch_size=1)"


# ---- the batch of a sample


def rows_to_compare(
    ids: list[Integer[np.ndarray, " _"]],
    masks: list[Bool[np.ndarray, " _"]],
    spans: Sequence[Span] = (),
    among: Sequence[int] | None = None,
) -> list[int]:
    """Choose a few rows with something to predict: the two that share most, and a neighbour in prefix order.

    If rows have padding on their left, one of them is chosen: their positions may be others than a row's own.

    Args:
        among: the numbers of the rows to choose among; None: all.
    """
    among = range(len(ids)) if among is None else among
    wanted = [k for k in among if len(ids[k]) and (not masks or masks[k].any())]
    if len(wanted) <= ROWS:
        return wanted
    order, shared = zip(*sorted_by_prefix(wanted, ids.__getitem__))
    first = min(int(np.argmax(shared[1:])), len(order) - ROWS)
    chosen = list(order[first : first + ROWS])
    padded = [k for k in wanted if spans and spans[k].batch_row == k and spans[k].start > 0]
    return [*chosen[:-1], padded[0]] if padded and not {*padded} & {*chosen} else chosen


def tokens_within(engine: TreeEngine, rows: Rows, output: Output) -> int:
    """The most tokens, padding included, that the plain model may run forward and backward at once.

    As far as memory can be predicted, they need no more than the graph of these rows' tree, or than all gradients if
    those are larger. (The two are not held together: gradients come as the graph is freed.)
    """
    cost = engine.prepared.cost
    if cost is None:
        return UNCOUNTED_TOKENS
    plan, counts = engine.plan(tree_of([rows])), cost.counts
    plan = engine.prepared.call().plan_keeping_graphs(plan) or plan
    step = sum(bytes for name, bytes in cost.bytes_by(plan).items() if name != "allocator")
    gradients = sum(p.numel() * p.element_size() for p in engine.parameters if p.requires_grad)
    room = max(step, gradients) - counts.saved_pass - counts.weight_gradient
    token = counts.saved_token + counts.backward_token + (counts.saved_layer if counts.checkpointing else 0)
    token += output.head_bytes(counts, rows.wanted.device)
    tokens = int(max(room / token, 0))
    config = causal_lm(engine.model).config.get_text_config()
    if getattr(config, "_attn_implementation", None) == "eager":
        # It keeps scores and softmax [heads, L, L] of every layer. For n tokens in all, L is n / ROWS, so the memory is
        # pair * n^2 + token * n, and n is the root at which this is all the room.
        layers = 1 if counts.checkpointing else counts.layers
        pair = layers * counts.heads * (counts.wide_bytes + 2 * counts.dtype_bytes) / ROWS
        tokens = int((-token + (token**2 + 4 * pair * max(room, 0)) ** 0.5) / (2 * pair))
    return max(tokens, LEAST_TOKENS)


def tokens_in_time(engine: TreeEngine, rows: Rows) -> int:
    """The most tokens that are compared in a tenth of the time of these rows' tree.

    Rows are not cut to less than twice the smallest window or chunk of the model's layers, which tokens further apart
    do not see.
    """
    ranges = () if engine.prepared.cost is None else engine.prepared.cost.counts.attention_ranges
    sizes = [size for each in ranges for size in (each.window, each.chunk) if size is not None]
    least = max(LEAST_TOKENS, 2 * ROWS * min(sizes, default=0))
    return max(tree_of([rows]).num_tokens // STEP_SHARE, least)


def small_batch(call: ModelInputs, rows: Rows, chosen: Sequence[int], tokens: int) -> ModelInputs:
    """The call of the model for some rows of a batch: padded or packed as they are in it, and cut to so many tokens.

    Where rows need not be cut, a padded batch's are given with all of their columns. TRL's packed trees become padded.
    """
    width = call["input_ids"].shape[1]
    packed = call.get("attention_mask") is None and call.get("position_ids") is not None
    if rows.images:  # which cannot be cut: fewer rows are compared
        return _whole_rows(call, rows, chosen[: max(tokens // width, 1)])
    if not packed and TREE_INDEX[0] not in call and len(chosen) * width <= tokens:
        return _whole_rows(call, rows, chosen)
    left = not packed and any(span.start > 0 for span in rows.spans)
    ids, masks = [rows.ids[k] for k in chosen], [rows.masks[k] for k in chosen if rows.masks]
    ids, masks = _cut(ids, masks, tokens - len(chosen) * left)
    columns: dict[str, list[Tensor]] = {"input_ids": [torch.from_numpy(row).long() for row in ids]}
    if masks:
        wanted = [torch.from_numpy(np.append(False, mask)) for mask in masks]
        columns["labels"] = [row.masked_fill(~mask, IGNORED) for row, mask in zip(columns["input_ids"], wanted)]
    for name in TOKEN_TYPES:  # of text, see `unknown_arguments`
        if call.get(name) is not None:
            columns[name] = [torch.zeros_like(row) for row in columns["input_ids"]]
    if packed or call.get("position_ids") is not None:
        columns["position_ids"] = [torch.arange(len(row)) for row in ids]
    others = {name: value for name, value in call.items() if name not in (*_BY_TOKEN, *_OF_PACKING, *_OF_TREES)}
    return others | (_packed(columns, call) if packed else _padded(columns, call["input_ids"].device, left=left))


def _whole_rows(call: ModelInputs, rows: Rows, chosen: Sequence[int]) -> ModelInputs:
    """The call for some rows of a padded batch, with all of their columns."""
    ids = call["input_ids"]
    index = torch.tensor([rows.spans[k].batch_row for k in chosen], device=ids.device)
    by_token = {name: call[name] for name in _BY_TOKEN if isinstance(call.get(name), Tensor)}
    small = call | {name: value.expand(len(ids), -1)[index] for name, value in by_token.items()}
    return with_images_of(small, rows, chosen)


def _packed(columns: Mapping[str, list[Tensor]], call: ModelInputs) -> ModelInputs:
    """Arguments by token of some rows, one after another, with those that say where each row begins."""
    device, lengths = call["input_ids"].device, [len(row) for row in columns["input_ids"]]
    batch: ModelInputs = {name: torch.cat(values)[None].to(device) for name, values in columns.items()}
    if (number := call.get("seq_idx")) is not None:
        numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        batch["seq_idx"] = numbers[None].to(device, number.dtype)
    ends = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)
    return batch | {name: ends if name.startswith("cu_") else max(lengths) for name in _OF_PACKING if name in call}


def _padded(columns: Mapping[str, list[Tensor]], device: torch.device, *, left: bool) -> ModelInputs:
    """Arguments by token of some rows, padded, with their mask.

    Args:
        left: every row keeps some of the padding on its left, which positions may count.
    """
    batch, mask = {}, [torch.ones_like(row) for row in columns["input_ids"]]
    for name, values in {**columns, "attention_mask": mask}.items():
        fill = IGNORED if name == "labels" else 0
        values = [nn.functional.pad(row, (int(left), 0), value=fill) for row in values]
        batch[name] = pad_sequence(values, True, fill, padding_side="left" if left else "right").to(device)
    return batch


def with_images_of(call: ModelInputs, rows: Rows, chosen: Sequence[int]) -> ModelInputs:
    """The call with the images of some of the rows alone; without images where these are rows of text."""
    if not rows.images:
        return call
    images = [image for k in chosen for image in rows.images[k]]
    device, dtype = call["input_ids"].device, call["pixel_values"].dtype
    call = {name: value for name, value in call.items() if name not in IMAGE_INPUTS}
    if not images:
        return call
    own = joined_images(images, device)
    return call | own | {"pixel_values": own["pixel_values"].to(dtype)}


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


# ---- the check of a `TreeTrainer`


def compare_rows(engine: TreeEngine, trajectories: Sequence[Trajectory]) -> None:
    """Compare a few trajectories between the plain model and the tree, by their log-likelihood.

    Args:
        engine: for the unwrapped model, at temperature 1.

    Raises:
        RuntimeError: they differ by more than rounding.
    """
    masks = [row.weights[1:] != 0 for row in trajectories]
    chosen = [trajectories[k] for k in rows_to_compare([row.ids for row in trajectories], masks)]
    if not chosen:
        return
    ids = [torch.from_numpy(row.ids).long() for row in chosen]
    labels = [row.masked_fill(torch.from_numpy(one.weights == 0), IGNORED) for row, one in zip(ids, chosen)]
    columns, images = {"input_ids": ids, "labels": labels}, [image for row in chosen for image in row.images]
    if images and reads_token_types(image_encoder(engine.model)):
        columns[IMAGE_TYPES] = [torch.from_numpy(row.ids == row.image_token).long() for row in chosen]
    device = model_device(engine.model)
    call = (
        _padded(columns, device, left=False) | {"use_cache": False} | (joined_images(images, device) if images else {})
    )
    model = OwnForward(engine.model, "__call__")
    question = Question(model, TokensOutput(), call, rows_of(call, model=engine.model))
    small = _small_sample(question, range(len(chosen)), engine)
    judge(small, *run(small, timed=False), repeatable=False)

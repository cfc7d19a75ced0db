"""The check in the first training step: a few rows through the plain model and through the tree.

Both sides get one small batch, made from the trainer's own. So the plain side runs as it would in the trainer: with its
padding, its positions and its loss. The check must not be what runs out of memory, nor take long. Rows are cut so that
the plain forward and backward need no more memory than the step itself will, and a tenth of its time. Plain gradients
are sketched and freed as they come (`check/sketch.py`), and the tree's are those of a step.
"""

import logging
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers.modeling_outputs import CausalLMOutput

from treetrain.check.first_use import accept, advice
from treetrain.check.row_scores import POSITIONS, scores_of_logits
from treetrain.check.sketch import gradients_as_they_come, sketch_size, sketched
from treetrain.core.engine.ranks import Ranks
from treetrain.core.engine.score import Scored
from treetrain.core.hf.capability import causal_lm, model_device
from treetrain.core.tree.images import IMAGE_INPUTS, IMAGE_TYPES
from treetrain.core.tree.trajectory import Trajectory, common_prefix
from treetrain.engine import TreeEngine
from treetrain.kernels.checks import relative_error
from treetrain.layers.images.encoders import image_encoder, joined_images, reads_token_types
from treetrain.logs.columns import sorted_by_prefix
from treetrain.models.work import linear_work
from treetrain.parallel.process_group import compute_dtype
from treetrain.trainers.batches import (
    IGNORED,
    TOKEN_TYPES,
    TREE_INDEX,
    ModelInputs,
    OutputKind,
    Rows,
    Span,
    rows_of,
    tree_of,
)
from treetrain.trainers.skipped_steps import not_finite

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
TRL_TILE, TRL_TILE_BYTES = 32_768, 36
"""The most tokens of the vocabulary in a tile of TRL's head, and bytes for each logit of a tile in its backward when
plain torch operations compute it: the tile, eight copies in float32 and a mask (trl/kernels/chunked_logprob.py)."""
WITHOUT = "train without share_prefixes"
_BY_TOKEN = ("input_ids", "attention_mask", "position_ids", "labels", "seq_idx", *TOKEN_TYPES)
_OF_PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_OF_TREES = (*TREE_INDEX, "tree_max_seqlen_q", "tree_max_seqlen_k", "shift_labels")


class Answer(NamedTuple):
    """The answer of a tree to the call, under one plan."""

    scores: Tensor
    """Log-probabilities [B, L - 1], or rewards."""
    loss: Tensor | None
    """None if the trainer computes its own."""
    gradients: list[Tensor]
    """A sketch for each parameter."""


class Difference(NamedTuple):
    """How far an answer is from the plain model, all relative."""

    scores: float
    gradients: float
    worst: float
    """The difference for the kind of parameter whose gradients differ most."""
    worst_kind: str
    losses: tuple[float, float] | None
    """The plain model's loss and the tree's; None if the trainer computes its own."""


class Sample(NamedTuple):
    """Some rows of a call, which are compared."""

    call: ModelInputs
    """The arguments of the trainer's call."""
    rows: Rows
    """All rows in it."""
    chosen: Sequence[int]
    """The numbers of those to compare."""


def sample_of(call: ModelInputs, rows: Rows) -> Sample:
    """Choose rows of a call; none if nothing is predicted in it."""
    return Sample(call, rows, rows_to_compare(rows.ids, rows.masks, rows.spans))


class FirstStep:
    """Compares a few rows between the model's own forward and the tree: scores, gradients, and the loss if it is used.

    The gradients are those of the loss, or of a random sum of the scores. First `run_plain`, then a tree of each of
    `engines` answers `batch` within `tree_run`, then `judge`.

    Args:
        engine: for the unwrapped model, so that other ranks take no part unless they hold shards of it.
        plain: the plain model's forward.
        temperature: divides the logits before the softmax, for "tokens".
        alone: compare with each row by itself, not with the batch as the trainer gives it.
        ranks: those that run every pass together, within their `together`; None: this process runs its own.
    """

    def __init__(
        self,
        engine: TreeEngine,
        sample: Sample,
        output_kind: OutputKind,
        plain: Callable[..., Any],
        *,
        temperature: float = 1.0,
        alone: bool = False,
        ranks: Ranks | None = None,
    ):
        call, rows, chosen = sample
        if output_kind == "tokens" and call.get("labels") is None:
            call = all_labelled(call, rows)
        tokens = tokens_within(engine, rows, output_kind)
        if not rows.images:  # rows with images are not cut
            tokens = min(tokens, tokens_in_time(engine, rows))
        self.batch = small_batch(call, rows, chosen, tokens)
        """The arguments of the tree's call."""
        self._rows = rows_of(self.batch, rewards=output_kind == "rewards", model=engine.model)
        self._plain, self._temperature, self._alone = plain, temperature, alone
        self._ranks = ranks or Ranks()
        self.device = self.batch["input_ids"].device
        self._engine, self._output_kind, self._count = engine, output_kind, len(self._rows.ids)
        self._names = {p: name for name, p in engine.model.named_parameters() if p.requires_grad}
        self._parameters = list(self._names)
        self._size = sketch_size(self._parameters)
        self._seconds = 0.0
        self._plain_scores: Tensor | None = None
        self._plain_loss: Tensor | None = None
        self._answers: list[Answer] = []

    @property
    def engines(self) -> list[TreeEngine]:
        """The engine with two budgets: one runs the tree of the batch as one part, the other in several.

        Gradients between parts go through caches, which a tree of one part does not have.
        """
        tokens, engines = tree_of([self._rows]).num_tokens, []
        for budget in (tokens, max(tokens // PARTS, 1)):
            engine = copy(self._engine)
            engine.prepared = copy(self._engine.prepared)
            engine.prepared.budget = budget
            engines.append(engine)
        return engines

    def run_plain(self, *, timed: bool = True) -> None:
        """Run the plain model forward and backward; if `timed`, once more to measure it, as the first also warms up."""
        with sketched(self._parameters, self._size, streamed=True) as self._plain_gradients:
            self._run_plain()
        if not timed:
            return
        start = time.perf_counter()
        with gradients_as_they_come(self._parameters):
            self._run_plain()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._seconds = time.perf_counter() - start

    def _run_plain(self) -> None:
        """Call the plain model, on the batch or on each row by itself, and run its backward."""
        if self._alone:
            self._run_plain_on_rows()
        else:
            self._backward_of_plain(self._call(self.batch))

    def _run_plain_on_rows(self) -> None:
        """The same for each row by itself."""
        found, losses = [], []
        for k, batch in enumerate(self._batches_alone()):
            output, objective = self._call(batch), None
            if k < self._count:
                scores, share = self._scores_of(output, batch), 1.0
                if self._output_kind == "loss":
                    if batch.get("num_items_in_batch") is None:  # a mean over its own predictions
                        share = self._rows.masks[k].sum() / max(int(self._rows.wanted.sum()), 1)
                    objective = output.loss * share if share else None
                    losses += [] if objective is None else [objective.detach()]
                else:
                    weights = self._weights().flatten()
                    place = torch.from_numpy(self._rows.places[k]) if self._rows.places else torch.tensor([k])
                    objective = (scores.flatten() * weights[place].to(scores)).sum()
                found.append(scores.detach().flatten())
            if objective is None:  # other ranks may wait for this backward
                objective = self._scores_in(output).flatten()[0] * 0
            if objective.requires_grad:
                self._backward(objective)
        self._plain_scores = self._as_batch(found)
        self._plain_loss = torch.stack(losses).sum() if losses else None

    def _call(self, batch: ModelInputs) -> Any:
        """The plain model's output for a batch."""
        if self._output_kind != "tokens":
            return self._plain(**batch)
        logits = self._plain(**{name: value for name, value in batch.items() if name != "labels"}).logits
        return SimpleNamespace(log_probs=label_logprobs(logits, batch["labels"], self._temperature))

    def _batches_alone(self) -> list[ModelInputs]:
        """The call of each row by itself: without padding, its positions from 0.

        Ranks that run passes together get equally many: those with fewer rows get their first row again. A collective
        call of these ranks.
        """
        batches = []
        shared = {name: value for name, value in self.batch.items() if name not in (*_BY_TOKEN, *_OF_PACKING)}
        for row, start, stop in self._rows.spans:
            own = {}
            for name in ("input_ids", "attention_mask", "labels", *TOKEN_TYPES):
                if isinstance(value := self.batch.get(name), Tensor):
                    own[name] = value[row : row + 1, start:stop]
            if "labels" in own:
                own["labels"] = own["labels"].clone()
                own["labels"][:, 0] = IGNORED
            batches.append(with_images_of(shared | own, self._rows, [len(batches)]))
        most = max(self._ranks.exchange(len(batches)))
        return batches + batches[:1] * (most - len(batches))

    def _scores_in(self, output: Any) -> Tensor:
        """The log-probabilities in a plain model's output; logits or rewards if it has none."""
        return output.log_probs if self._output_kind in ("fused", "tokens") else output.logits

    def _scores_of(self, output: Any, batch: ModelInputs) -> Tensor:
        """The scores [1, L - 1] of a row by itself, 0 where nothing is predicted; or its reward."""
        scores = self._scores_in(output)
        return label_logprobs(scores.detach(), batch["labels"]) if self._output_kind == "loss" else scores

    def _as_batch(self, found: list[Tensor]) -> Tensor:
        """The scores of the rows in the shape of the batch's."""
        return torch.stack(found) if self._output_kind == "rewards" else self._rows.batch(found)

    def _backward_of_plain(self, output: Any) -> None:
        """Remember what the plain forward gave, and run its backward."""
        scores = self._scores_in(output)
        if self._output_kind == "loss":
            self._plain_loss = None if output.loss is None else output.loss.detach()
            scores = None if scores is None else label_logprobs(scores.detach(), self.batch["labels"])
        self._plain_scores = None if scores is None else scores.detach()
        objective = self._objective(scores, output)
        del output, scores  # logits, which the backward does not need
        self._backward(objective)

    @contextmanager
    def tree_run(self) -> Iterator[None]:
        """The tree is scored inside the block."""
        with sketched(self._parameters, self._size) as gradients:
            yield
        self._answers.append(Answer(self._tree_scores, self._tree_loss, gradients))

    def backward_of_tree(self, output: Any, scores: Float[Tensor, "..."], scored: Scored) -> None:
        """Remember how the tree answers the call, and run its backward.

        Args:
            output: what the trainer gets.
            scores: log-probabilities [B, L - 1], 0 where nothing is predicted; or rewards.
            scored: runs backward after the scores.
        """
        self._tree_scores = scores.detach()
        self._tree_loss = output.loss.detach() if self._output_kind == "loss" else None
        self._backward(self._objective(scores, output))
        with torch.autocast(self.device.type, enabled=False):
            scored.backward(sync=self._engine.sharing.collective)

    def _objective(self, scores: Tensor | None, output: Any) -> Tensor:
        """The loss, or a random sum of the scores."""
        if self._output_kind == "loss" or scores is None:
            return output.loss
        return (scores * self._weights(scores.shape).to(scores)).sum()

    def _weights(self, shape: Sequence[int] | None = None) -> Tensor:
        """Random weights of all scores, the same on both sides."""
        if shape is None:
            shape = self._rows.wanted.shape if self._rows.places else (len(self._rows.ids),)
        return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(0))

    def _backward(self, objective: Tensor) -> None:
        with torch.autocast(self.device.type, enabled=False):
            objective.backward()

    def judge(self, *, repeatable: bool = False) -> tuple[dict[str, float], float | None]:
        """Compare, after both runs.

        Args:
            repeatable: whether the plain model may be called again, to say which side is right if they differ; a
                collective call of ranks that run passes together.

        Returns:
            the relative differences, to be logged, and the FLOP/s of the plain forward and backward (None if the
            model's FLOPs cannot be counted, or the plain run was not timed).

        Raises:
            RuntimeError: they differ by more than rounding.
        """
        model, plain_scores = self._engine.model, self._plain_scores
        # Adapters may be narrower than their base (QLoRA), and then they compute in their own dtype.
        dtypes = {compute_dtype(model, self.device), *(p.dtype for p in self._parameters)}
        dtype = max(dtypes, key=lambda each: _limit(LIMITS, each))
        differences = [self._difference(answer, dtype) for answer in self._answers]
        tf32 = dtype is torch.float32 and self.device.type == "cuda"
        tf32 = tf32 and torch.get_float32_matmul_precision() != "highest"
        limit, loss_limit = (_limit(limits, dtype) * (10 if tf32 else 1) for limits in (LIMITS, LOSS_LIMITS))
        differs = not all(each.scores <= limit for each in differences)  # also true of NaN
        turned = not differs and not all(_gradients_agree(each, limit) for each in differences)
        asks_which = repeatable and not self._alone
        ranks = self._ranks.exchange((differs, turned)) if asks_which else []
        why = ""
        if any(theirs for theirs, _ in ranks):
            why = self._which_is_right(limit)
        elif any(theirs for _, theirs in ranks):
            why = self._whose_gradients_are_right(limit)
        elif differs or turned:
            why = self._why_they_differ()
        if plain_scores is not None and not bool(plain_scores.isfinite().all()):
            weight = next((name for what, name in not_finite(model) if what == "weights"), None)
            why = "Those of the plain model are not finite" + (f": {weight} is not, either" if weight else "")
        for each, how in zip(differences, ("as one part", "in parts")):
            rows = f"{self._count} rows {how}"
            logger.info(_judged(each, why, self._advice, rows, dtype, limit, loss_limit))
        logs = {
            "tree/score_difference": max(each.scores for each in differences),
            "tree/gradient_difference": max(each.gradients for each in differences),
        }
        cost = self._engine.prepared.cost
        if cost is None or not self._seconds:
            return logs, None
        small = rows_of(self.batch, rewards=self._output_kind == "rewards", model=self._engine.model)
        work = linear_work(tree_of([small]), cost.counts.attention_ranges)
        return logs, cost.counts.flops(*work) / self._seconds

    def _difference(self, answer: Answer, dtype: torch.dtype) -> Difference:
        """How far an answer is from the plain model."""
        names = [self._names[p] for p in self._parameters]
        worst, kind = _worst_kind(names, answer.gradients, self._plain_gradients, dtype)
        plain, loss = self._plain_scores, self._plain_loss
        return Difference(
            scores=0.0 if plain is None else relative_error([answer.scores], [plain]),
            gradients=relative_error(answer.gradients, self._plain_gradients),
            worst=worst,
            worst_kind=kind,
            losses=None if loss is None or answer.loss is None else (float(loss), float(answer.loss)),
        )

    def _why_they_differ(self) -> str:
        """Say why both sides differ where the plain model was not called on each row by itself, or only so."""
        if self._alone:
            return f"The plain side is each row by itself, so shared prefixes are wrong for this model: {self._advice}"
        why, change = _layout_of(self.batch, self._rows)
        return f"Shared prefixes compute each row by itself, which is right. If {why}, {change}"

    def _which_is_right(self, limit: float) -> str:
        """Say which of both sides is right, by each row by itself, why, and what to do."""
        assert self._plain_scores is not None  # without them nothing differs
        with torch.no_grad():
            batches = self._batches_alone()
            own = [self._scores_of(self._call(batch), batch).flatten() for batch in batches][: self._count]
        alone = self._as_batch(own)
        tree = max(relative_error([answer.scores.reshape(alone.shape)], [alone]) for answer in self._answers)
        batch = relative_error([self._plain_scores.reshape(alone.shape)], [alone])
        return self._verdict(tree, batch, limit)

    def _whose_gradients_are_right(self, limit: float) -> str:
        """The same where scores agree and gradients do not, as where a norm follows the rotary embedding."""
        with sketched(self._parameters, self._size, streamed=True) as alone:
            self._run_plain_on_rows()
        names = [self._names[p] for p in self._parameters]
        dtype = compute_dtype(self._engine.model, self.device)

        def distance(own: Sequence[Tensor]) -> float:
            return max(relative_error(own, alone), _worst_kind(names, own, alone, dtype)[0] / KIND_LIMIT)

        tree = max(distance(answer.gradients) for answer in self._answers)
        return self._verdict(tree, distance(self._plain_gradients), limit)

    def _verdict(self, tree: float, batch: float, limit: float) -> str:
        """Say which side is right.

        Args:
            tree, batch: how far the tree and the plain model on the batch are from each row by itself.
        """
        why, change = _layout_of(self.batch, self._rows)
        if tree <= limit and not batch <= limit:
            return (
                f"Shared prefixes are right: they give what each row gives by itself (to {tree:.1e}). The trainer's "
                f"batch does not ({batch:.1e}): {why}. To make both right, {change}. To go on as it is, set "
                "check='rows', which compares with each row by itself"
            )
        if batch <= limit and not tree <= limit:
            return (
                "Shared prefixes are wrong here: the trainer's batch gives what each row gives by itself; "
                f"{self._advice}"
            )
        return (
            f"Each row by itself differs from the tree by {tree:.1e} and from the batch by {batch:.1e}: {self._advice}"
        )

    @property
    def _advice(self) -> str:
        """Advice where shared prefixes are wrong."""
        return advice(self._engine.model, WITHOUT)


def label_logprobs(
    logits: Float[Tensor, "B L V"], labels: Integer[Tensor, "B L"], temperature: float = 1.0
) -> Float[Tensor, "B _"]:
    """Log-probabilities of the labels' tokens [B, L - 1], 0 where there is no label; a few positions at a time."""
    logprobs = logits.new_zeros(labels[:, 1:].shape, dtype=torch.promote_types(logits.dtype, torch.float32))
    for row, column in zip(*(index.split(POSITIONS) for index in (labels[:, 1:] != IGNORED).nonzero(as_tuple=True))):
        logprobs[row, column], _ = scores_of_logits(logits[row, column], labels[row, column + 1], temperature)
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
    columns = {"input_ids": (ids, 0), "attention_mask": ([torch.ones_like(row) for row in ids], 0)}
    columns["labels"] = (labels, IGNORED)
    device = model_device(engine.model)
    images = [image for one in chosen for image in one.images]
    if images and reads_token_types(image_encoder(engine.model)):
        types = [torch.from_numpy(one.ids == one.image_token).long() for one in chosen]
        columns[IMAGE_TYPES] = (types, 0)
    call = {name: pad_sequence(rows, True, fill).to(device) for name, (rows, fill) in columns.items()}
    if images:
        call |= joined_images(images, device)

    def plain(labels: Tensor, **inputs: object) -> CausalLMOutput:
        logits = engine.model(**inputs, use_cache=False).logits
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)  # type: ignore[arg-type]

    first = FirstStep(engine, Sample(call, rows_of(call, model=engine.model), range(len(chosen))), "loss", plain)
    accept(engine)  # compared here
    first.run_plain(timed=False)
    rows = rows_of(first.batch, model=engine.model)
    for each in first.engines:
        with first.tree_run():
            scored = each.score(tree_of([rows]), mask=rows.masks)
            scores = rows.batch(scored.logprobs)
            first.backward_of_tree(CausalLMOutput(loss=-scores.sum() / rows.wanted.sum()), scores, scored)  # type: ignore[arg-type]
    first.judge()


# ---- the verdict


def _limit(limits: Mapping[torch.dtype, float], dtype: torch.dtype) -> float:
    return limits.get(dtype, limits[torch.bfloat16])


def _gradients_agree(difference: Difference, limit: float) -> bool:
    return difference.gradients <= limit and difference.worst <= KIND_LIMIT * limit


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
    if not _gradients_agree(difference, limit):
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


# ---- the batch that is compared


def rows_to_compare(
    ids: list[Integer[np.ndarray, " _"]], masks: list[Bool[np.ndarray, " _"]], spans: Sequence[Span] = ()
) -> list[int]:
    """Choose a few rows with something to predict: the two that share most, and a neighbour in prefix order.

    If rows have padding on their left, one of them is chosen: their positions may be others than a row's own.
    """
    wanted = [k for k in range(len(ids)) if len(ids[k]) and (not masks or masks[k].any())]
    if len(wanted) <= ROWS:
        return wanted
    order, shared = zip(*sorted_by_prefix(wanted, ids.__getitem__))
    first = min(int(np.argmax(shared[1:])), len(order) - ROWS)
    chosen = list(order[first : first + ROWS])
    padded = [k for k in wanted if spans and spans[k].batch_row == k and spans[k].start > 0]
    return [*chosen[:-1], padded[0]] if padded and not {*padded} & {*chosen} else chosen


def tokens_within(engine: TreeEngine, rows: Rows, output_kind: OutputKind) -> int:
    """The most tokens, padding included, that the plain model may run forward and backward at once.

    As far as memory can be predicted, they need no more than the graph of these rows' tree, or than all gradients if
    those are larger. (The two are not held together: gradients come as the graph is freed.)
    """
    cost = engine.prepared.cost
    if cost is None:
        return UNCOUNTED_TOKENS
    plan, counts = engine.plan(tree_of([rows])), cost.counts
    plan = engine.prepared.plan_keeping_graphs(plan) or plan
    step = sum(bytes for name, bytes in cost.bytes_by(plan).items() if name != "allocator")
    gradients = sum(p.numel() * p.element_size() for p in engine.parameters if p.requires_grad)
    room = max(step, gradients) - counts.saved_pass - counts.weight_gradient
    token = counts.saved_token + counts.backward_token + (counts.saved_layer if counts.checkpointing else 0)
    if output_kind in ("loss", "tokens"):  # logits, their log-softmax in float32, and the gradients of both
        logit, wide = counts.dtype_bytes, counts.wide_bytes
        token += counts.vocab * (3 * wide + (2 * logit if logit < wide else 0))
    elif output_kind == "fused":  # TRL's head works on tiles, in torch or by a kernel that needs no more than the tile
        kernel = rows.wanted.device.type in ("cuda", "xpu") and find_spec("triton") is not None
        token += min(counts.vocab, TRL_TILE) * (counts.dtype_bytes if kernel else TRL_TILE_BYTES)
    tokens = int(max(room / token, 0))
    config = causal_lm(engine.model).config.get_text_config()
    if getattr(config, "_attn_implementation", None) == "eager":
        # Scores and softmax [heads, L, L] of every layer: `pair` n^2 + `token` n = room, for rows of n / ROWS tokens.
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


def all_labelled(call: ModelInputs, rows: Rows) -> ModelInputs:
    """The call with a label for every token of its rows except their first ones."""
    labels = torch.full_like(call["input_ids"], IGNORED)
    for row, start, stop in rows.spans:
        labels[row, start + 1 : stop] = call["input_ids"][row, start + 1 : stop]
    return call | {"labels": labels}


def small_batch(call: ModelInputs, rows: Rows, chosen: Sequence[int], tokens: int) -> ModelInputs:
    """The call of the model for some rows of a batch: padded or packed as they are in it, and cut to so many tokens.

    Where rows need not be cut, a padded batch's are given with all of their columns. TRL's packed trees become padded.
    """
    ids = call["input_ids"]
    packed = call.get("attention_mask") is None and call.get("position_ids") is not None
    if rows.images:  # which cannot be cut: fewer rows are compared
        chosen = chosen[: max(tokens // ids.shape[1], 1)]
    if rows.images or (not packed and TREE_INDEX[0] not in call and len(chosen) * ids.shape[1] <= tokens):
        index = torch.tensor([rows.spans[k].batch_row for k in chosen], device=ids.device)
        of_rows = {name: call[name] for name in _BY_TOKEN if isinstance(call.get(name), Tensor)}
        small = call | {name: value.expand(len(ids), -1)[index] for name, value in of_rows.items()}
        return with_images_of(small, rows, chosen)
    left = not packed and any(span.start > 0 for span in rows.spans)
    tokens -= len(chosen) * left
    pieces, masks = _cut([rows.ids[k] for k in chosen], [rows.masks[k] for k in chosen if rows.masks], tokens)
    columns: dict[str, list[Tensor]] = {"input_ids": [torch.from_numpy(piece).long() for piece in pieces]}
    if masks:
        wanted = [torch.from_numpy(np.append(False, mask)) for mask in masks]
        columns["labels"] = [row.masked_fill(~own, IGNORED) for row, own in zip(columns["input_ids"], wanted)]
    for name in TOKEN_TYPES:  # of text, see `PrefixSharing.answer`
        if call.get(name) is not None:
            columns[name] = [torch.zeros_like(row) for row in columns["input_ids"]]
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
    for name, values in columns.items():
        fill, side = IGNORED if name == "labels" else 0, "left" if left else "right"
        if left:  # every row keeps some of the padding on its left, which positions may count
            values = [nn.functional.pad(row, (1, 0), value=fill) for row in values]
        batch[name] = pad_sequence(values, True, fill, padding_side=side).to(ids.device)
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

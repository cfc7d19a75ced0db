"""The engine: gradients of any loss over branching trajectories, every shared prefix computed once."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from treetrain.attention.dispatch import Choice, choose_backend
from treetrain.data.trajectory import Trajectory
from treetrain.engine.batch import Part, as_tree, check_batch, make_parts
from treetrain.engine.evaluate import MetricSums, add_sums, evaluate, linear_coefficients, means
from treetrain.engine.packed import PackedRun, model_device
from treetrain.models.capability import check_model
from treetrain.tree.token_tree import TokenTree


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What one `forward_backward` did."""

    loss: float
    """Sum over all trajectories divided by the normaliser."""
    metrics: dict[str, float]
    """Means of what the loss reports."""
    metric_sums: MetricSums = field(repr=False)
    """The same as (weighted sum, weight), to be added over calls."""
    flat_tokens: int
    """Tokens summed over the trajectories."""
    unique_tokens: int
    """Tokens of the tree."""
    computed_tokens: int
    """Tokens that went through the model: the tree's, less what no wanted prediction depends on."""
    parts: int
    """Forward-backward passes it took."""


class TreeEngine:
    """Runs batches of trajectories on a Hugging Face causal LM as prefix trees.

    Args:
        model: a causal LM, plain or wrapped by peft; it is left as it was found after every call.
        budget: most tree tokens whose graph is alive at once; whole trees are run one after the other
            within it. None runs the batch at once, in parts only where rows share next to nothing.
        temperature: divides the logits before the softmax.

    Raises:
        UnsupportedModel: the model, or a setting of it, would not be exact on a tree.
        ValueError: a temperature that is not above 0, or a budget that is no positive number of tokens.
    """

    _merge = True
    _run_type: type = PackedRun

    def __init__(self, model: nn.Module, *, budget: int | None = None, temperature: float = 1.0):
        self.model, self.budget, self.temperature = model, check_budget(budget), check_temperature(temperature)
        self.capabilities = check_model(model)

    @property
    def attention(self) -> Choice:
        """Which tree attention runs on the model's device, and why."""
        return choose_backend(model_device(self.model))

    def forward_backward(
        self, trajectories: Sequence[Trajectory] | TokenTree, loss: Any, normaliser: float | None = None
    ) -> StepResult:
        """Accumulate d loss / d parameters into ``.grad``, exactly as if every row were trained by itself.

        Args:
            loss: called with log-probabilities [L - 1], entropies and a trajectory; returns an unnormalised sum
                and metrics. The losses of this library compute only what has a loss weight; a loss of your own
                gets every row and every prediction, whatever the weights.
            normaliser: what the sum is divided by; pass that of the whole step when accumulating over calls.
                None asks the loss.

        Raises:
            DataError: an id outside the vocabulary, a row longer than the model's positions, nothing to train,
                a fact that the loss needs and a row lacks.
            ValueError: no parameter to train, gradients switched off, a normaliser that is not above 0.
            UnsupportedModel: see the class.
        """
        self.capabilities = check_model(self.model)
        check_trainable(self.model)
        tree = as_tree(trajectories, merge=self._merge)
        check_batch(tree, self.capabilities)
        normaliser = step_normaliser(loss, list(tree.trajectories), normaliser)
        ours = hasattr(loss, "packed")
        parts = self._parts(tree, whole=getattr(loss, "scope", "trajectory") == "batch", weighted=ours)
        total, sums, computed = 0.0, {}, 0
        for part in parts:
            if ours and len(part.layout.edge_targets) == 0:
                continue
            part_loss, part_sums = self._train_part(part, loss, normaliser)
            total = total + part_loss
            sums = add_sums(sums, part_sums)
            computed += len(part.layout.input_ids)
        return StepResult(
            loss=float(total),
            metrics=means(sums),
            metric_sums=sums,
            flat_tokens=tree.num_flat_tokens,
            unique_tokens=tree.num_tokens,
            computed_tokens=computed,
            parts=len(parts),
        )

    def _parts(self, tree: TokenTree, *, whole: bool, weighted: bool) -> list[Part]:
        """The parts of a training step; a loss over several trajectories at once needs the whole batch in one."""
        if whole and self.budget is not None and tree.num_tokens > self.budget:
            raise ValueError(
                f"budget={self.budget} tokens, but the loss is over several trajectories at once and the batch has "
                f"{tree.num_tokens} unique tokens; the smallest possible budget is {tree.num_tokens}."
            )
        return make_parts(tree, budget=self.budget, merge=self._merge, weighted=weighted, whole=whole)

    def _train_part(self, part: Part, loss: Any, normaliser: float) -> tuple[Tensor, MetricSums]:
        run = self._run_type(self.model, self.capabilities, part.layout)
        wide = torch.promote_types(self.model.dtype, torch.float32)  # type: ignore[arg-type]
        coefficients = linear_coefficients(loss, part, model_device(self.model), wide)
        with run.active():
            if coefficients is not None:
                scores = run.scores(temperature=self.temperature, coefficients=coefficients / normaliser)
                assert scores.linear_loss is not None
                scores.linear_loss.backward()
                with torch.no_grad():
                    total, sums = evaluate(loss, scores, part)
            else:
                need_entropy = bool(getattr(loss, "needs_entropy", False))
                scores = run.scores(temperature=self.temperature, need_entropy=need_entropy)
                total, sums = evaluate(loss, scores, part)
                if total.requires_grad:  # not where a part has no prediction at all
                    (total / normaliser).backward()
        return total.detach() / normaliser, sums

    @torch.no_grad()
    def logprobs(self, trajectories: Sequence[Trajectory] | TokenTree, *, return_entropy: bool = False) -> Any:
        """Log-probabilities of every token but the first of every row, without gradient, with training's numerics.

        Returns:
            K tensors [L_k - 1], in nats; with ``return_entropy`` a second list of K tensors of entropies.
        """
        self.capabilities = check_model(self.model)
        tree = as_tree(trajectories, merge=self._merge)
        check_batch(tree, self.capabilities)
        parts = make_parts(tree, budget=self.budget, merge=self._merge, weighted=False)
        logprobs: list[Any] = [None] * tree.num_trajectories
        entropies: list[Any] = [None] * tree.num_trajectories
        for part in parts:
            run = PackedRun(self.model, self.capabilities, part.layout)
            with run.active():
                scores = run.scores(temperature=self.temperature, need_entropy=return_entropy)
            for number, row in zip(part.numbers, part.per_trajectory(part.per_prediction(scores.logprobs))):
                logprobs[number] = row
            if return_entropy:
                assert scores.entropies is not None
                rows = part.per_trajectory(part.per_prediction_entropy(scores.entropies))
                for number, row in zip(part.numbers, rows):
                    entropies[number] = row
        return (logprobs, entropies) if return_entropy else logprobs


def check_trainable(model: nn.Module) -> None:
    """Raise ValueError where a backward could not reach any parameter."""
    if not torch.is_grad_enabled():
        raise ValueError("gradients are switched off (torch.no_grad); use .logprobs, or leave that block")
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("every parameter of the model is frozen (requires_grad=False); nothing can be trained")


def step_normaliser(loss: Any, trajectories: list[Trajectory], normaliser: float | None) -> float:
    """What a step's sum is divided by; checks first that the loss finds every fact it needs.

    Raises:
        DataError: a fact is missing, or nothing is trained.
        ValueError: a normaliser that is not above 0 and finite.
    """
    if hasattr(loss, "check"):
        loss.check(trajectories)
    value = float(loss.normaliser(trajectories) if normaliser is None else normaliser)
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"the normaliser is {value}; a step's loss is divided by it, so it must be above 0 and finite")
    return value


def check_budget(budget: int | None) -> int | None:
    """A budget in tokens, or None. Raises ValueError for anything else."""
    if budget is None:
        return None
    if isinstance(budget, Integral) and not isinstance(budget, bool) and budget > 0:
        return int(budget)
    raise ValueError(f"budget={budget!r}: give a positive number of tokens, or None to run the batch at once")


def check_temperature(temperature: float) -> float:
    """A temperature above 0. Raises ValueError for anything else."""
    if temperature > 0 and temperature != float("inf"):
        return float(temperature)
    raise ValueError(f"temperature={temperature!r}: it divides the logits, so it must be above 0 and finite")

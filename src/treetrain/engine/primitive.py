"""`logprobs`: per-trajectory log-probabilities on a plain Hugging Face model, live in autograd. Any loss on top."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from treetrain.engine.batch import Part, as_tree, check_batch, make_parts
from treetrain.engine.engine import TreeEngine, check_budget, check_temperature
from treetrain.engine.packed import PackedRun, model_device
from treetrain.models.capability import check_model
from treetrain.tree.build import Row
from treetrain.tree.token_tree import TokenTree


def logprobs(
    model: nn.Module,
    sequences: Sequence[Row] | TokenTree,
    budget: int | None = None,
    temperature: float = 1.0,
    *,
    return_entropy: bool = False,
) -> Any:
    """Log-probability of every token but the first of every sequence, every shared prefix computed once.

    Args:
        model: a Hugging Face causal LM, plain or wrapped by peft.
        sequences: K lists or arrays of token ids (or trajectories, or a tree).
        budget: most tree tokens whose graph is alive at once. With one, whole trees are run one after the
            other and run again in backward; None keeps the graph of the whole batch.
        temperature: divides the logits before the softmax.
        return_entropy: also give the entropy of the distribution each token was drawn from.

    Returns:
        K tensors [L_k - 1], in nats, float32 or wider, with gradients to the model's parameters; with
        ``return_entropy`` a pair of such lists. ``.backward()`` and ``torch.autograd.grad`` both work, once.

    Raises:
        DataError: an id outside the vocabulary or a row longer than the model's positions.
        UnsupportedModel: the model, or a setting of it, would not be exact on a tree.
        RuntimeError: in backward, if it is the second one or the weights have changed since the forward.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not torch.is_grad_enabled() or not parameters:
        engine = TreeEngine(model, budget=budget, temperature=temperature)
        return engine.logprobs(as_tree(sequences, merge=True), return_entropy=return_entropy)
    capabilities = check_model(model)
    tree = as_tree(sequences, merge=True)
    check_batch(tree, capabilities)
    parts = make_parts(tree, budget=check_budget(budget), merge=True, weighted=False)
    rows: list[Any] = [None] * tree.num_trajectories
    entropy_rows: list[Any] = [None] * tree.num_trajectories
    for part in parts:
        run = PackedRun(model, capabilities, part.layout)
        walk = _Walk(run, parameters, check_temperature(temperature), return_entropy, keep=budget is None)
        per_edge, per_row = _TreeScores.apply(walk, *parameters)  # type: ignore[misc]
        _place(rows, part, part.per_prediction(per_edge))
        if return_entropy:
            _place(entropy_rows, part, part.per_prediction_entropy(per_row))
    return (rows, entropy_rows) if return_entropy else rows


def _place(rows: list[Any], part: Part, per_prediction: Tensor) -> None:
    for number, row in zip(part.numbers, part.per_trajectory(per_prediction)):
        rows[number] = row


class _Walk:
    """One part's forward, kept for its backward or run again there."""

    def __init__(self, run: PackedRun, parameters: list[nn.Parameter], temperature: float, entropy: bool, keep: bool):
        self.run, self.parameters, self.keep = run, parameters, keep
        self.temperature, self.entropy = temperature, entropy
        self.weights = self._fingerprint()
        kind = model_device(run.model).type
        # Backward usually happens outside the user's autocast; a part that is run again there needs it back.
        self.autocast = partial(
            torch.autocast,
            kind,
            dtype=torch.get_autocast_dtype(kind),
            enabled=torch.is_autocast_enabled(kind),
            cache_enabled=torch.is_autocast_cache_enabled(),
        )
        self.kept: tuple[Tensor, ...] | None = None
        self.spent = False

    def _fingerprint(self) -> Tensor:
        """[P] sums of the weights, frozen ones too (a part that is run again would see their new values).

        Version counters do not do: fused optimisers and writes through ``.data`` leave them as they are.
        """
        with torch.no_grad():
            sums = [p.sum(dtype=torch.float64) for p in self.run.model.parameters()]
        return torch.stack([total.to(sums[0].device) for total in sums])

    def forward(self) -> tuple[Tensor, Tensor]:
        with torch.set_grad_enabled(self.keep):
            outputs = self._scores()
        if self.keep:
            self.kept = outputs
        return outputs[0].detach(), outputs[1].detach()

    def _scores(self) -> tuple[Tensor, Tensor]:
        with self.autocast(), self.run.active():
            scores = self.run.scores(temperature=self.temperature, need_entropy=self.entropy)
        entropies = scores.logprobs.new_zeros(0) if scores.entropies is None else scores.entropies
        return scores.logprobs, entropies

    def backward(self, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if self.spent:
            raise RuntimeError(
                "a second backward through treetrain.logprobs: its graph is freed by the first; call it again"
            )
        if not torch.equal(self.weights, self._fingerprint()):
            raise RuntimeError(
                "the model's weights have changed between treetrain.logprobs and its backward (an optimiser step?); "
                "gradients would be those of other weights: call backward first, or logprobs again"
            )
        self.spent = True
        with torch.enable_grad():
            outputs = self.kept if self.kept is not None else self._scores()
        self.kept = None
        live = [(out, grad) for out, grad in zip(outputs, grads) if out.requires_grad]
        if not live:
            return (None,) * len(self.parameters)
        gradients = _by_accumulation if _has_reentrant_checkpoints(self.run.model) else _by_autograd_grad
        with self.run.active():
            return gradients([out for out, _ in live], [grad for _, grad in live], self.parameters)


Gradients = tuple[Tensor | None, ...]


def _has_reentrant_checkpoints(model: nn.Module) -> bool:
    return any(
        getattr(module, "gradient_checkpointing", False)
        and getattr(getattr(module, "_gradient_checkpointing_func", None), "keywords", {}).get("use_reentrant", True)
        for module in model.modules()
    )


def _by_autograd_grad(outputs: list[Tensor], grads: list[Tensor], parameters: list[nn.Parameter]) -> Gradients:
    return torch.autograd.grad(outputs, parameters, grads, allow_unused=True)


def _by_accumulation(outputs: list[Tensor], grads: list[Tensor], parameters: list[nn.Parameter]) -> Gradients:
    """Through ``.grad``, which is put back: a reentrant checkpoint hides its parameters from ``autograd.grad``."""
    before = [p.grad for p in parameters]
    try:
        for p in parameters:
            p.grad = None
        torch.autograd.backward(outputs, grads)
        return tuple(p.grad for p in parameters)
    finally:
        for p, grad in zip(parameters, before):
            p.grad = grad


class _TreeScores(torch.autograd.Function):
    """A whole part as one autograd node whose inputs are the parameters.

    The graph inside is not shown to the outer one, so that activation checkpointing finds the model in tree mode
    when it runs layers again in backward.
    """

    @staticmethod
    def forward(ctx, walk: _Walk, *parameters: Tensor):
        ctx.walk = walk
        return walk.forward()

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):
        return None, *ctx.walk.backward(*grads)

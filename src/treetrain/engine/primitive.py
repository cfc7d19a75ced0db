"""`logprobs`: per-trajectory log-probabilities on a plain Hugging Face model, live in autograd. Any loss on top."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from treetrain.engine.batch import Batch, as_tree, check_batch
from treetrain.engine.engine import TreeEngine, rows_of
from treetrain.engine.feed import Board, Known
from treetrain.engine.packed import PackedRun, model_device, wide_dtype
from treetrain.engine.walk import Walk
from treetrain.models.capability import Capabilities
from treetrain.models.switch import tree_attention
from treetrain.plan.budget import Bytes
from treetrain.plan.plan import Plan
from treetrain.tree.build import Row
from treetrain.tree.token_tree import TokenTree


def logprobs(
    model: nn.Module,
    sequences: Sequence[Row] | TokenTree,
    budget: int | str | Bytes | None = None,
    temperature: float = 1.0,
    *,
    return_entropy: bool = False,
) -> Any:
    """Log-probability of every token but the first of every sequence, every shared prefix computed once.

    Args:
        model: a Hugging Face causal LM, plain or wrapped by peft.
        sequences: K lists or arrays of token ids (or trajectories, or a tree).
        budget: tokens whose graph is alive at once, or bytes ("8GiB") of peak memory. A batch within it runs at once;
            a larger one runs in parts without graph, and again, part by part, in backward. None fits to the memory
            that is free.
        temperature: divides the logits before the softmax.
        return_entropy: also give the entropy of the distribution each token was drawn from.

    Returns:
        K tensors [L_k - 1], in nats, float32 or wider, with gradients to the model's parameters; with
        ``return_entropy`` a pair of such lists. ``.backward()`` and ``torch.autograd.grad`` both work, once.

    Raises:
        DataError: an id outside the vocabulary or a row longer than the model's positions.
        UnsupportedModel: the model, or a setting of it, would not be exact on a tree.
        ValueError: a budget that is neither tokens nor bytes, or bytes that no plan fits into.
        RuntimeError: in backward, if it is the second one or the weights have changed since the forward.
    """
    engine = TreeEngine(model, budget=budget, temperature=temperature)
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not torch.is_grad_enabled() or not parameters:
        return engine.logprobs(as_tree(sequences, merge=True), return_entropy=return_entropy)
    tree = as_tree(sequences, merge=True)
    check_batch(tree, engine.capabilities)
    batch = Batch.of(tree, weighted=False)
    sizes = batch.layout.num_edges, len(batch.layout.rows)
    board = Board(*sizes, wide_dtype(model), model_device(model), entropy=return_entropy)
    if batch.layout.num_tokens:
        plan = engine.plan_of(batch.layout)
        kind = _KeptGraph if plan.num_parts == 1 else _SecondWalk
        scores = kind(model, engine.capabilities, plan, parameters, temperature, board)
        board.logprobs, entropies = _TreeScores.apply(scores, *parameters)  # type: ignore[misc]
        board.entropies = entropies if return_entropy else None
    return rows_of(batch, board, return_entropy)


class _Scores:
    """A forward whose backward is asked for later, if at all, and once."""

    def __init__(
        self,
        model: nn.Module,
        capabilities: Capabilities,
        plan: Plan,
        parameters: list[nn.Parameter],
        temperature: float,
        board: Board,
    ):
        self.model, self.capabilities, self.plan, self.parameters = model, capabilities, plan, parameters
        self.temperature, self.board, self.entropy = temperature, board, board.entropies is not None
        self.weights = self._fingerprint()
        kind = model_device(model).type
        # Backward usually happens outside the user's autocast; what is run again there needs it back.
        self.autocast = partial(
            torch.autocast,
            kind,
            dtype=torch.get_autocast_dtype(kind),
            enabled=torch.is_autocast_enabled(kind),
            cache_enabled=torch.is_autocast_cache_enabled(),
        )
        self.spent = False

    def _fingerprint(self) -> Tensor:
        """[P] sums of the weights, frozen ones too (a part that is run again would see their new values).

        Version counters do not do: fused optimisers and writes through ``.data`` leave them as they are.
        """
        with torch.no_grad():
            sums = [p.sum(dtype=torch.float64) for p in self.model.parameters()]
        return torch.stack([total.to(sums[0].device) for total in sums])

    def forward(self) -> tuple[Tensor, Tensor]:
        """([E] log-probabilities, [R] entropies or an empty tensor), without a graph that anyone sees."""
        raise NotImplementedError

    def gradients(self, edges: Tensor, rows: Tensor | None) -> "Gradients":
        """Of the parameters, from those of the log-probabilities [E] and entropies [R]."""
        raise NotImplementedError

    def backward(self, edges: Tensor, rows: Tensor) -> "Gradients":
        """As `gradients`, refused the second time or on other weights."""
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
        return self.gradients(edges, rows if self.entropy else None)


class _KeptGraph(_Scores):
    """The whole tree at once, its graph kept."""

    def forward(self) -> tuple[Tensor, Tensor]:
        run = PackedRun(self.model, self.capabilities, self.plan.layout)
        with torch.enable_grad(), tree_attention(self.model):
            scores = run.scores(temperature=self.temperature, need_entropy=self.entropy)
        entropies = scores.logprobs.new_zeros(0) if scores.entropies is None else scores.entropies
        self.kept = scores.logprobs, entropies
        return scores.logprobs.detach(), entropies.detach()

    def gradients(self, edges: Tensor, rows: Tensor | None) -> "Gradients":
        outputs = self.kept
        del self.kept
        live = [(out, grad) for out, grad in zip(outputs, (edges, rows)) if out.requires_grad and grad is not None]
        if not live:
            return (None,) * len(self.parameters)
        outs, grads = [out for out, _ in live], [grad for _, grad in live]
        with tree_attention(self.model):
            if not _has_reentrant_checkpoints(self.model):
                return torch.autograd.grad(outs, self.parameters, grads, allow_unused=True)
            # Through .grad: a reentrant checkpoint hides its parameters from autograd.grad.
            return _collected(self.parameters, partial(torch.autograd.backward, outs, grads))


class _SecondWalk(_Scores):
    """Part by part without graph; backward walks the tree again."""

    def forward(self) -> tuple[Tensor, Tensor]:
        walk = Walk(self.model, self.capabilities, self.plan, temperature=self.temperature, gradients=False)
        walk.score(self.board, need_entropy=self.entropy)
        entropies = self.board.entropies
        return self.board.logprobs, self.board.logprobs.new_zeros(0) if entropies is None else entropies

    def gradients(self, edges: Tensor, rows: Tensor | None) -> "Gradients":
        walk = Walk(self.model, self.capabilities, self.plan, temperature=self.temperature, gradients=True)
        board = Board(len(edges), 0 if rows is None else len(rows), edges.dtype, edges.device, entropy=self.entropy)
        with self.autocast():
            return _collected(self.parameters, partial(walk.train, Known(board, edges, rows)))


Gradients = tuple[Tensor | None, ...]


def _has_reentrant_checkpoints(model: nn.Module) -> bool:
    return any(
        getattr(module, "gradient_checkpointing", False)
        and getattr(getattr(module, "_gradient_checkpointing_func", None), "keywords", {}).get("use_reentrant", True)
        for module in model.modules()
    )


def _collected(parameters: list[nn.Parameter], accumulate: Any) -> Gradients:
    """What a call leaves in ``.grad``, which is put back as it was."""
    before = [p.grad for p in parameters]
    try:
        for p in parameters:
            p.grad = None
        accumulate()
        return tuple(p.grad for p in parameters)
    finally:
        for p, grad in zip(parameters, before):
            p.grad = grad


class _TreeScores(torch.autograd.Function):
    """A whole batch as one autograd node whose inputs are the parameters.

    The graph inside is not shown to the outer one, so that activation checkpointing finds the model in tree mode
    when it runs layers again in backward.
    """

    @staticmethod
    def forward(ctx, scores: _Scores, *parameters: Tensor):
        ctx.scores = scores
        return scores.forward()

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):
        return None, *ctx.scores.backward(*grads)

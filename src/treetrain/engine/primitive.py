"""`logprobs`: per-trajectory log-probabilities on a plain Hugging Face model, live in autograd. Any loss on top."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from treetrain.engine.batch import Batch, as_tree, check_batch
from treetrain.engine.engine import TreeEngine, rows_of
from treetrain.engine.feed import Board, Known
from treetrain.engine.head import Scores
from treetrain.engine.hooks import hooks_aside
from treetrain.engine.memory import (
    Passes,
    Sizes,
    T,
    out_of_memory_in,
    within_memory,
)
from treetrain.engine.packed import PackedRun, model_device, wide_dtype
from treetrain.engine.routing import Routing, check_auxiliary, switched
from treetrain.engine.switches import check_switches, switches_of
from treetrain.engine.walk import Walk
from treetrain.errors import UnsupportedModel
from treetrain.plan.budget import Bytes
from treetrain.plan.plan import Plan
from treetrain.tree.build import Row
from treetrain.tree.layout import PackedLayout
from treetrain.tree.token_tree import TokenTree


def logprobs(
    model: nn.Module,
    sequences: Sequence[Row] | TokenTree,
    budget: int | str | Bytes | None = None,
    temperature: float = 1.0,
    *,
    return_entropy: bool = False,
    return_aux: bool = False,
    return_values: bool = False,
    value_head: nn.Module | None = None,
) -> Any:
    """Log-probability of every token but the first of every sequence, every shared prefix computed once.

    Args:
        model: a Hugging Face causal LM, plain or wrapped by peft.
        sequences: K lists or arrays of token ids (or trajectories, or a tree).
        budget: tokens whose graph is alive at once, or bytes ("8GiB") of peak memory. A batch within it runs at once;
            a larger one runs in parts without graph, and again, part by part, in backward. None fits to the memory
            that is free. Gradients that lie in ``.grad`` are set aside in backward, which bytes do not count.
        temperature: divides the logits before the softmax.
        return_entropy: also give the entropy of the distribution each token was drawn from.
        return_aux: also give the auxiliary loss of a mixture of experts' routers over all tokens of all sequences,
            before its coefficient.
        return_values: also give the value of the state before each of these tokens, by `value_head`, from the same
            pass: policy and critic on one trunk. `tt.values` gives values alone.
        value_head: maps the hidden states that the model hands to its head, [n, hidden], to values [n] or [n, c].

    Returns:
        K tensors [L_k - 1], in nats, float32 or wider, with gradients to the model's parameters (and the value
        head's); with ``return_entropy`` a second such list, with ``return_values`` another (of [L_k - 1, c] for
        several values), with ``return_aux`` a number at the end, as a tuple. ``.backward()`` and
        ``torch.autograd.grad`` both work, once.

    Raises:
        DataError: an id outside the vocabulary or a row longer than the model's positions.
        UnsupportedModel: the model, or a setting of it, would not be exact on a tree.
        ValueError: a budget that is neither tokens nor bytes, or bytes that no plan fits into; a model whose
            configuration asks for an auxiliary loss that is not asked for here, or the other way round.
        RuntimeError: in backward, if it is the second one, or if since the forward the weights have changed, another
            adapter is active or other parameters are trained.
    """
    engine = TreeEngine(model, budget=budget, temperature=temperature, value_head=value_head)

    def prepared() -> tuple[TokenTree, Batch]:
        engine.prepare(logprobs=True, values=return_values)
        check_auxiliary(engine.capabilities.experts, return_aux)
        check_whole_where_live(engine)
        tree = as_tree(sequences, merge=True)
        check_batch(tree, engine.capabilities)
        return tree, Batch.of(tree, weighted=False, every_token=return_aux and is_live(engine))

    tree, batch = engine.together("treetrain.logprobs", prepared)
    board, aux = scored(engine, tree, batch.layout, entropy=return_entropy, balanced=return_aux)
    found = rows_of(batch, board, return_entropy)
    if return_values:
        found = (*found, _values_of(batch, board)) if return_entropy else (found, _values_of(batch, board))
    if not return_aux:
        return found
    return (*found, aux) if return_entropy or return_values else (found, aux)


def _values_of(batch: Batch, board: Board) -> list[Tensor]:
    """The value of the state that makes each prediction, a tensor for every row."""
    rows = batch.everything()
    values = board.logprobs.new_zeros(len(batch.layout.rows)) if board.values is None else board.values
    return rows.per_trajectory(rows.per_prediction_entropy(values))


def is_live(engine: TreeEngine) -> bool:
    """Whether anybody could ask for gradients of what is scored now."""
    return torch.is_grad_enabled() and any(p.requires_grad for p in engine.parameters)


def check_whole_where_live(engine: TreeEngine) -> None:
    """Raise UnsupportedModel where a backward that autograd begins would meet other ranks in their own."""
    if engine.in_lockstep and is_live(engine):
        raise UnsupportedModel(
            "the model is sharded over ranks (fully_shard), whose passes must come in one order, and autograd does not "
            "wait for theirs: use TreeEngine(model).forward_backward with a loss of your own, or call this under "
            "torch.no_grad()."
        )


def scored(
    engine: TreeEngine, tree: TokenTree, layout: PackedLayout, *, entropy: bool = False, balanced: bool = False
) -> tuple[Board, Tensor]:
    """All scores of a layout that the engine has been prepared for, live where that can be, and the auxiliary loss."""
    if not is_live(engine):
        board = engine.board(tree, layout, entropy)
        return board, engine.router_balance(tree).loss if balanced else board.logprobs.new_zeros(())
    device = model_device(engine.model)
    board = Board(layout.num_edges, len(layout.rows), wide_dtype(engine.model), device, entropy=entropy)
    if not layout.num_tokens:
        return board, board.logprobs.new_zeros(())
    routing = engine.routing(tree, balanced=balanced)
    parameters = [p for p in engine.parameters if p.requires_grad]
    scores = _Scores(engine, engine.plan_of(layout), parameters, board, routing)
    found = _TreeScores.apply(scores, *parameters)
    board.logprobs, entropies, values, aux = found  # type: ignore[misc]
    board.entropies = entropies if entropy else None
    board.values = values if board.values is not None else None
    return board, aux


class _Scores:
    """A forward whose backward is asked for later, if at all, and once.

    One part keeps its graph; several are run without graph, and again, part by part, in backward. So is one part that
    runs out of memory, in either.
    """

    def __init__(
        self,
        engine: TreeEngine,
        plan: Plan,
        parameters: list[nn.Parameter],
        board: Board,
        routing: Routing | None,
    ):
        self.routing = routing
        self.engine, self.model, self.plan, self.parameters = engine, engine.model, plan, parameters
        self.capabilities = engine.capabilities
        self.board, self.entropy = board, board.entropies is not None
        self.kept: Scores | None = None
        self.scored: Sizes = []
        self.weights, self.switches = self._fingerprint(), switches_of(engine)
        kind = model_device(self.model).type
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
            sums = [p.sum(dtype=torch.float64) for p in self.engine.parameters]
        return torch.stack([total.to(sums[0].device) for total in sums])

    def forward(self) -> tuple[Tensor, ...]:
        """([E] log-probabilities, [R] entropies or an empty tensor, values or the same, auxiliary loss), without a
        graph to be seen."""
        scores, self.plan, passes = self._within_memory(self._forward)
        self.scored = passes.scored
        if self.routing is None:
            return *scores, scores[0].new_zeros(())
        self.routing.settle()
        return *scores, self.routing.loss.to(scores[0])

    def backward(self, edges: Tensor, rows: Tensor, values: Tensor, aux: Tensor) -> "Gradients":
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
        check_switches(self.switches, switches_of(self.engine))
        self.spent = True
        if self.routing is not None:
            self.routing.scale = aux.double()
        run = partial(self._gradients, edges, rows if self.entropy else None, values if self.valued else None)
        return self._within_memory(run)[0]

    def _within_memory(self, run: Callable[[Plan, Passes], T]) -> tuple[T, Plan, Passes]:
        smaller = partial(self.engine.smaller_plan, self.plan.layout)
        return within_memory(self.model, self.plan, run, smaller, scored=self.scored)

    @property
    def valued(self) -> bool:
        """Whether there are values."""
        return self.board.values is not None

    def _forward(self, plan: Plan, passes: Passes) -> tuple[Tensor, Tensor, Tensor]:
        if self.routing is not None:
            self.routing.begin()
        if plan.num_parts > 1:
            self._walk(plan, passes, gradients=False).score(self.board, need_entropy=self.entropy)
            found = self.board.logprobs, self.board.entropies, self.board.values
        else:
            with out_of_memory_in(plan):
                self.kept = self._keep_graph(plan)
            found = self.kept.logprobs, self.kept.entropies, self.kept.values
            self.board.values = self.kept.values
            passes.scored.append((0, plan.layout.num_tokens))
        nothing = found[0].new_zeros(0)
        logprobs, entropies, values = (nothing if x is None else x.detach() for x in found)
        return logprobs, entropies, values

    def _keep_graph(self, plan: Plan) -> Scores:
        routers = None
        if self.routing is not None and self.routing.needed:
            routers = self.routing.run(plan.layout.tree_index, final=True)
        run = PackedRun(self.model, self.capabilities, plan.layout, routers=routers)
        with torch.enable_grad(), run.mode(self.model), self._routers():
            return run.scores(temperature=self.engine.temperature, need_entropy=self.entropy)

    def _gradients(
        self, edges: Tensor, rows: Tensor | None, values: Tensor | None, plan: Plan, passes: Passes
    ) -> "Gradients":
        """Of the parameters, from those of the log-probabilities [E], entropies and values [R]."""
        if self.kept is not None:
            with out_of_memory_in(plan):
                return self._kept_gradients(edges, rows, values)
        walk = self._walk(plan, passes, gradients=True)
        board = Board(len(edges), len(plan.layout.rows), edges.dtype, edges.device, entropy=self.entropy)
        with self.autocast():
            return _collected(self.parameters, partial(walk.train, Known(board, edges, rows, values)))

    def _kept_gradients(self, edges: Tensor, rows: Tensor | None, values: Tensor | None) -> "Gradients":
        assert self.kept is not None
        outputs, self.kept = (self.kept.logprobs, self.kept.entropies, self.kept.values), None
        live = [
            (out, grad)
            for out, grad in zip(outputs, (edges, rows, values))
            if out is not None and out.requires_grad and grad is not None
        ]
        if not live:
            return (None,) * len(self.parameters)
        outs, grads = [out for out, _ in live], [grad for _, grad in live]
        with PackedRun.mode(self.model), self._routers():
            if not _has_reentrant_checkpoints(self.model):
                with hooks_aside(self.parameters):
                    return torch.autograd.grad(outs, self.parameters, grads, allow_unused=True)
            # Through .grad: a reentrant checkpoint hides its parameters from autograd.grad.
            return _collected(self.parameters, partial(torch.autograd.backward, outs, grads))

    def _walk(self, plan: Plan, passes: Passes, *, gradients: bool) -> Walk:
        engine = self.engine
        return Walk(
            self.model,
            self.capabilities,
            plan,
            temperature=engine.temperature,
            gradients=gradients,
            passes=passes,
            routing=self.routing,
        )

    def _routers(self) -> AbstractContextManager[None]:
        return switched(self.model, self.capabilities.experts, self.routing)


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
        # Hooks see what the outer backward delivers, once.
        with hooks_aside(parameters):
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

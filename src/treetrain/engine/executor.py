"""Runs the parts of a plan on the model, depth first, each against the cache of the path above it.

One code path serves every plan: the whole tree as one part, one segment per part, and everything in between.

Why the gradients are complete: later tokens of the same part read a token's keys and values within one autograd graph.
Tokens of parts below read copies from the cache, which adds up the gradients of these copies. Parts below run backward
first, so when a part runs backward its rows of the cache hold all gradients from below, and the attention Function adds
them.

    plan.events():   forward 0   forward 1   backward 1   forward 2   backward 2   backward 0
    rows in use:     0           0 1         0            0 2         0

Rows of the cache are allocated on the way down and freed on the way up, like a stack.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from treetrain.engine.gradients import GradientBuffers, gradient_buffers, hooks_once
from treetrain.engine.lm_head import ScoreRequest, Scores
from treetrain.engine.lockstep import Lockstep, Reduces, in_step
from treetrain.engine.loss_gradients import LossGradients, ScoreGradients, ScoreTable
from treetrain.engine.memory import PassCounts, StepOutOfMemory, out_of_memory_in
from treetrain.engine.packed import PackedRun, model_device
from treetrain.engine.routing import Routing, switched
from treetrain.linear_attention.state_cache import StateCache
from treetrain.models.capability import Capabilities
from treetrain.planning.plan import Plan
from treetrain.softmax_attention.kv_cache import KVCache
from treetrain.tree.layout import Piece, cut


class _Forward(NamedTuple):
    """A part whose forward has run and whose backward has not."""

    piece: Piece
    scores: Scores


class _Held(NamedTuple):
    """The places of a part's tokens in the caches."""

    rows: np.ndarray
    """int64: tokens that got a row for their keys and values."""
    states: np.ndarray
    """int64: tokens that got a slot for the recurrent states after them."""


class Executor:
    """Runs one plan, once.

    Args:
        plan: the plan of the batch.
        gradients: whether the parts run backward too.
        run_type: the class that runs a layout on the model.
        counts: counts the passes.
        routing: what the step does with the routers of experts.
        lockstep: the common order of passes under FSDP2, where every pass is a collective call.
        statistics: whether scores come with `Statistics`.
        keep_logits: whether `forward_all` keeps the head's logits with the graphs.
    """

    def __init__(
        self,
        model: nn.Module,
        capabilities: Capabilities,
        plan: Plan,
        *,
        temperature: float,
        gradients: bool,
        run_type: type[Any] = PackedRun,
        counts: PassCounts | None = None,
        routing: Routing | None = None,
        lockstep: Lockstep | None = None,
        statistics: bool = False,
        keep_logits: bool = False,
    ):
        self._model, self._capabilities, self._plan = model, capabilities, plan
        self._temperature, self._gradients, self._run_type = temperature, gradients, run_type
        self._counts = PassCounts() if counts is None else counts
        self._routing, self._lockstep = routing, lockstep
        self._statistics, self._keep_logits = statistics, keep_logits
        self._cache = KVCache(plan.cached_tokens, model_device(model), gradients=gradients)
        self._row_of = np.full(plan.layout.num_tokens, -1, np.int64)
        self._rows_in_use = 0
        self._states = StateCache(plan.layout.num_tokens, plan.cached_states, gradients=gradients)
        self._states.attach_at(plan.attach)
        self._held: dict[int, _Held] = {}
        self._graphs: dict[int, _Forward] = {}
        self._buffers: GradientBuffers | None = None
        self._alive, self._backward_begun = 0, False

    # ---- without gradients

    def score(self, table: ScoreTable, *, need_entropy: bool) -> None:
        """Fill a table with all log-probabilities, without graph, in the memory of one path.

        Raises:
            StepOutOfMemory: a part does not fit.
        """
        self._without_graph(table, need_entropy)

    def route(self) -> None:
        """Run all tokens through the layers, without graph or head, to record what the routers choose.

        Raises:
            StepOutOfMemory: a part does not fit.
        """
        self._without_graph(None, need_entropy=False)

    def _without_graph(self, table: ScoreTable | None, need_entropy: bool) -> None:
        plan = self._plan
        with (
            self._running(graph=False),
            in_step(self._lockstep),
        ):
            for kind, part in plan.traverse():
                if kind == "leave":
                    self._release(part)
                    continue
                self._allocate(part, plan.exported_tokens(part))
                done = self._forward(
                    plan.tokens(part), int(plan.attach[part]), need_entropy=need_entropy, score=table is not None
                )
                if table is not None:
                    table.write(*done)

    # ---- forward now, backward later

    def forward_all(self, table: ScoreTable, *, need_entropy: bool) -> None:
        """Fill a table, keeping the graphs of all parts for `backward_all`. The plan must keep all parts.

        Raises:
            StepOutOfMemory: the graphs of all parts do not fit at once.
        """
        plan = self._plan
        try:
            with (
                self._running(graph=True),
                self._gradient_buffers() as self._buffers,
                in_step(self._lockstep, forwards=True),
            ):
                # Parts are numbered depth first, so what a part continues has run. Nothing of the cache is released.
                for part in range(plan.num_parts):
                    self._allocate(part, plan.exported_tokens(part))
                    done = self._forward(plan.tokens(part), int(plan.attach[part]), need_entropy=need_entropy)
                    self._graphs[part] = done
                    table.write(*done)
        except Exception:
            self._graphs.clear()
            raise

    def backward_all(self, gradients: LossGradients, reduces: Reduces = "each") -> None:
        """Run the backwards of `forward_all`, last part first, so that all parts below a part precede it.

        Raises:
            StepOutOfMemory: gradients so far are incomplete.
        """
        if self._lockstep is not None:
            self._lockstep.begin_backwards(reduces)
        try:
            with (
                self._running(graph=True),
                hooks_once(*self._modules()),
                in_step(self._lockstep),
            ):
                while self._graphs:
                    self._backward(self._graphs.popitem()[1], gradients)
                if self._buffers is not None:
                    self._buffers.deliver()
        finally:
            self._graphs.clear()

    # ---- with gradients

    def train(self, gradients: LossGradients) -> None:
        """Run all parts forward and backward, and add to the parameters' ``.grad``.

        Raises:
            StepOutOfMemory: gradients so far are incomplete.
        """
        plan = self._plan
        with (
            self._running(graph=True),
            hooks_once(*self._modules()),
            self._gradient_buffers() as self._buffers,
            in_step(self._lockstep),
        ):
            for kind, number in plan.events():
                if kind == "prefill":
                    self._prefill(number, gradients)
                elif kind == "forward":
                    if plan.kept[number]:
                        self._allocate(number, plan.exported_tokens(number))
                    done = self._forward(
                        plan.tokens(number),
                        int(plan.attach[number]),
                        need_entropy=gradients.needs_entropy,
                        coefficients=gradients.coefficients,
                    )
                    gradients.scored(*done)
                    self._graphs[number] = done
                    del done  # or it would be alive while the next part runs
                else:
                    self._backward(self._graphs.pop(number), gradients)
                    self._release(number)
        self._buffers = None

    def _prefill(self, number: int, gradients: LossGradients) -> None:
        """A pass without graph over exported tokens, for their keys and values."""
        plan, first = self._plan, self._plan.prefill_parts(number)[0]
        tokens = plan.prefill_tokens(number)
        self._allocate(first, tokens)
        score = gradients.needs_scores_early
        with torch.no_grad():
            done = self._forward(
                tokens, int(plan.attach[first]), need_entropy=score and gradients.needs_entropy, score=score
            )
        if score:
            gradients.scored(*done)

    def _backward(self, done: _Forward, gradients: LossGradients) -> None:
        scores, self._backward_begun = done.scores, True
        if self._lockstep is not None:
            self._lockstep.before("backward")
        # Under the caller's autocast, backward would use 16-bit products where forward used float32.
        with torch.autocast(model_device(self._model).type, enabled=False):
            if scores.linear_loss is not None and scores.values is None and scores.carrier is None:
                scores.linear_loss.backward()
            else:
                live = _outputs_with_gradients(scores, gradients.gradients_of(done.piece))
                if live:
                    torch.autograd.backward([out for out, _ in live], [grad for _, grad in live])
        if self._lockstep is not None:
            self._lockstep.after("backward")
        self._alive -= done.piece.layout.num_tokens

    # ---- both

    def _forward(
        self,
        tokens: np.ndarray,
        attach: int,
        *,
        need_entropy: bool,
        coefficients: Callable[[Piece], Tensor | None] | None = None,
        score: bool = True,
    ) -> _Forward:
        """Run some tokens against the cache of the path down to the token that they continue (-1: none).

        Args:
            coefficients: gives the gradients of a piece's log-probabilities where they are known beforehand.
            score: False runs the layers without the head.
        """
        with_graph = torch.is_grad_enabled()
        kind = "forward" if with_graph else "prefill"
        self._alive += len(tokens)
        if self._lockstep is not None:
            self._lockstep.before(kind)
        piece, own = cut(self._plan.layout, tokens), self._row_of[tokens]
        options: dict[str, Any] = {}
        if attach >= 0 or (own >= 0).any():
            path = self._row_of[self._plan.path(attach)] if attach >= 0 else np.zeros(0, np.int64)
            options["cache"] = self._cache.view(path, own)
            if self._capabilities.recurrent_layers:
                options["states"] = self._states.view(tokens, attach)
        if not score:
            options["score"] = False
        if self._routing is not None and self._routing.needed:
            options["routers"] = self._routing.run(piece.layout.tree_index, final=with_graph or not self._gradients)
        request = ScoreRequest(
            temperature=self._temperature,
            need_entropy=need_entropy,
            coefficients=None if coefficients is None else coefficients(piece),
            buffers=self._buffers,
            meets_all=self._lockstep is not None,
            need_statistics=self._statistics and score,
            keep_logits=self._keep_logits,
        )
        scores = self._run_type(self._model, self._capabilities, piece.layout, **options).scores(request)
        if self._lockstep is not None:
            self._lockstep.after(kind, scores.live)
        if with_graph:
            self._counts.parts += 1
        else:
            self._alive -= len(tokens)
            self._counts.tokens_without_graph += len(tokens)
        return _Forward(piece, scores)

    def _out_of_memory(self) -> StepOutOfMemory:
        return StepOutOfMemory(self._alive or self._plan.peak_tokens, backward_begun=self._backward_begun)

    @contextmanager
    def _running(self, *, graph: bool) -> Iterator[None]:
        """Prepare the model for passes: tree mode, the step's routers, with or without graph, out of memory noticed."""
        with (
            out_of_memory_in(self._out_of_memory),
            torch.set_grad_enabled(graph),
            self._run_type.mode(self._model),
            switched(self._model, self._capabilities.experts, self._routing),
        ):
            yield

    def _gradient_buffers(self) -> AbstractContextManager[GradientBuffers | None]:
        """The buffers; None under FSDP2, where weights are unsharded only during a pass."""
        return gradient_buffers(self._model) if self._lockstep is None else nullcontext()

    def _modules(self) -> list[nn.Module]:
        """Everything with parameters: the model, and a value head that is not its own."""
        scalar = self._capabilities.scalar
        return [self._model] if scalar is None or scalar.is_models_own else [self._model, scalar.module]

    def _allocate(self, part: int, tokens: np.ndarray) -> None:
        """Allocate places in the caches for tokens, above those in use, until `part` is released."""
        rows = slice(self._rows_in_use, self._rows_in_use + len(tokens))
        self._cache.reserve(rows.stop)
        self._cache.clear_gradients(rows)
        self._row_of[tokens] = np.arange(rows.start, rows.stop)
        self._rows_in_use = rows.stop
        self._held[part] = _Held(tokens, self._states.allocate(tokens))

    def _release(self, part: int) -> None:
        """Free a part's places in the caches, the last ones allocated, if it has any."""
        held = self._held.pop(part, None)
        if held is not None:
            self._row_of[held.rows] = -1
            self._rows_in_use -= len(held.rows)
            self._states.release(held.states)


def _outputs_with_gradients(scores: Scores, gradients: ScoreGradients) -> list[tuple[Tensor, Tensor]]:
    """The outputs that a part's backward starts from, and the gradient of each."""
    pairs: list[tuple[Tensor, Tensor]] = [(scores.logprobs, gradients.edges)]
    if scores.linear_loss is not None:
        pairs = [(scores.linear_loss, torch.ones_like(scores.linear_loss))]
    if scores.entropies is not None and gradients.rows is not None:
        pairs.append((scores.entropies, gradients.rows))
    if scores.values is not None and gradients.values is not None:
        pairs.append((scores.values, gradients.values))
    if scores.carrier is not None:
        pairs.append((scores.carrier, torch.zeros_like(scores.carrier)))
    return [(out, grad) for out, grad in pairs if out.requires_grad]

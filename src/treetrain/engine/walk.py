"""Runs a plan on a model: parts depth first against the carry of their root path, gradients handed back up.

One code path for every plan: the whole tree as one part, one segment per part, and everything in between. A part that
runs out of memory in its forward is cut into smaller ones and run again, as a plan within the plan (`_Frame`).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from treetrain.attention.carry import Carry
from treetrain.engine.feed import Board, Feed, Seeds
from treetrain.engine.gradients import GradientBuffers, gradient_buffers, hooks_once
from treetrain.engine.head import Scores
from treetrain.engine.lockstep import Lockstep, Reduces, in_step
from treetrain.engine.memory import Passes, StepOutOfMemory, is_out_of_memory, out_of_memory_in, release_cached
from treetrain.engine.packed import PackedRun, model_device
from treetrain.engine.routing import Routing, switched
from treetrain.linear_attention.carry import StateCarry, state_slots
from treetrain.models.capability import Capabilities
from treetrain.planning.partition import uniform
from treetrain.planning.plan import Plan
from treetrain.tree.layout import Piece, cut


class _Frame(NamedTuple):
    """A plan over some tokens of the layout; the outermost is over all of them."""

    plan: Plan
    tokens: np.ndarray | None
    """int64: the layout's number of each token of the plan; None where they are the same."""
    attach: int
    """The layout's token that the plan's roots continue; -1 where they are roots."""

    def of_part(self, part: int) -> np.ndarray:
        """A part's tokens, as the layout numbers them."""
        return self.named(self.plan.tokens(part))

    def named(self, tokens: np.ndarray) -> np.ndarray:
        """The layout's numbers of the plan's tokens."""
        return tokens if self.tokens is None else self.tokens[tokens]

    def attach_of(self, part: int) -> int:
        """The layout's token that a part continues."""
        attach = int(self.plan.attach[part])
        return self.attach if attach < 0 else int(attach if self.tokens is None else self.tokens[attach])


class _Pass(NamedTuple):
    """A part whose forward has run and whose backward has not."""

    piece: Piece
    scores: Scores


class _Held(NamedTuple):
    """What a part has been given of the carry."""

    rows: np.ndarray
    """int64: tokens that got a row for their keys and values."""
    states: np.ndarray
    """int64: tokens that got a slot for the states after them."""


def _seeded(scores: Scores, seeds: Seeds) -> list[tuple[Tensor, Tensor]]:
    """What a part's backward starts from, and the gradient of each."""
    pairs: list[tuple[Tensor, Tensor]] = [(scores.logprobs, seeds.edges)]
    if scores.linear_loss is not None:
        pairs = [(scores.linear_loss, torch.ones_like(scores.linear_loss))]
    if scores.entropies is not None and seeds.rows is not None:
        pairs.append((scores.entropies, seeds.rows))
    if scores.values is not None and seeds.values is not None:
        pairs.append((scores.values, seeds.values))
    if scores.carrier is not None:
        pairs.append((scores.carrier, torch.zeros_like(scores.carrier)))
    return [(out, grad) for out, grad in pairs if out.requires_grad]


_NOTHING = _Held(np.zeros(0, np.int64), np.zeros(0, np.int64))


class Walk:
    """One walk over a plan.

    Args:
        plan: of the batch.
        gradients: whether the parts go backward too.
        run_type: what runs a layout on the model.
        passes: takes note of what fitted.
        routing: what the step does with the routers of experts.
        lockstep: the common order of passes, where every pass is one of all ranks.
        statistics: whether scores that are written to a board come with `Statistics`.
        keep_logits: whether `forward_all` keeps the head's logits beside the graphs.
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
        passes: Passes | None = None,
        routing: Routing | None = None,
        lockstep: Lockstep | None = None,
        statistics: bool = False,
        keep_logits: bool = False,
    ):
        self._lockstep, self._statistics, self._keep_logits = lockstep, statistics, keep_logits
        self._waiting: list[_Pass] = []
        self._routing, self._gradients = routing, gradients
        self._model, self._capabilities, self._temperature, self._run_type = model, capabilities, temperature, run_type
        self._layout = plan.layout
        self._outer = _Frame(plan, None, -1)
        self._carry = Carry(plan.cached_tokens, model_device(model), gradients=gradients)
        self._row_of = np.full(plan.layout.num_tokens, -1, np.int64)
        self._states = StateCarry(plan.layout.num_tokens, state_slots(plan), gradients=gradients)
        self._states.attach_at(plan.attach)
        self._top = 0
        self._buffers: GradientBuffers | None = None
        self._passes = Passes() if passes is None else passes
        self._alive, self._begun = 0, False

    # ---- without gradients

    def score(self, board: Board, *, need_entropy: bool) -> None:
        """Fill a board with all log-probabilities, without graph, in the memory of one path."""
        self._without_graph(board, need_entropy)

    def route(self) -> None:
        """Send all tokens through the layers, without graph and head, for what their routers choose."""
        self._without_graph(None, need_entropy=False)

    def _without_graph(self, board: Board | None, need_entropy: bool) -> None:
        with torch.no_grad(), self._run_type.mode(self._model), self._routers(), in_step(self._lockstep):
            self._score(self._outer, board, need_entropy)

    def _routers(self) -> AbstractContextManager[None]:
        return switched(self._model, self._capabilities.experts, self._routing)

    def _score(self, frame: _Frame, board: Board | None, need_entropy: bool) -> None:
        held: dict[int, _Held] = {}
        for kind, part in frame.plan.traverse():
            if kind == "leave":
                self._release(held.pop(part))
                continue
            tokens, attach = frame.of_part(part), frame.attach_of(part)
            held[part] = self._allocate(frame.named(frame.plan.exported_tokens(part)))
            forward = partial(self._forward, tokens, attach, need_entropy=need_entropy, score=board is not None)
            done = self._attempt(forward, len(tokens), self._passes.scored)
            if done is None:
                self._score(self._halves(tokens, attach), board, need_entropy)
            elif board is not None:
                board.write(*done)

    # ---- forward now, backward later

    def forward_all(self, board: Board, *, need_entropy: bool) -> None:
        """Fill a board, keeping the graphs of all parts for `backward_all`. The plan must keep all.

        Raises:
            StepOutOfMemory: the graphs do not fit beside each other.
        """
        plan = self._outer.plan
        try:
            with (
                out_of_memory_in(lambda: StepOutOfMemory(plan.peak_tokens, begun=False)),
                torch.enable_grad(),
                self._run_type.mode(self._model),
                self._routers(),
                self._gradient_buffers() as self._buffers,
                in_step(self._lockstep, forwards=True),
            ):
                # Parts are numbered depth first, so what a part continues has run. Nothing of the carry is released.
                for part in range(plan.num_parts):
                    tokens, attach = plan.tokens(part), int(plan.attach[part])
                    self._allocate(plan.exported_tokens(part))
                    if self._lockstep is not None:
                        self._lockstep.before("forward")
                    done = self._forward(tokens, attach, need_entropy=need_entropy)
                    if self._lockstep is not None:
                        self._lockstep.after("forward", done.scores.live)
                    self._passes.graph.append((self._alive, len(tokens)))
                    self._alive += len(tokens)
                    self._waiting.append(done)
                    board.write(*done)
        except Exception:
            self._waiting.clear()
            raise

    def backward_all(self, feed: Feed, reduces: Reduces = "each") -> None:
        """The backwards of `forward_all`, the last part first: all below a part stands after it.

        Raises:
            StepOutOfMemory: gradients so far are incomplete.
        """
        if self._lockstep is not None:
            self._lockstep.begin_backwards(reduces)
        try:
            with (
                out_of_memory_in(self._ran_out),
                torch.enable_grad(),
                self._run_type.mode(self._model),
                self._routers(),
                hooks_once(*self._modules()),
                in_step(self._lockstep),
            ):
                while self._waiting:
                    self._backward(self._waiting.pop(), feed)
                if self._buffers is not None:
                    self._buffers.deliver()
        finally:
            self._waiting.clear()

    # ---- with gradients

    def train(self, feed: Feed) -> None:
        """Accumulate gradients; `feed` says what they are.

        Raises:
            StepOutOfMemory: gradients so far are incomplete.
        """
        with (
            out_of_memory_in(self._ran_out),
            torch.enable_grad(),
            self._run_type.mode(self._model),
            self._routers(),
            hooks_once(*self._modules()),
            self._gradient_buffers() as self._buffers,
            in_step(self._lockstep),
        ):
            self._train(self._outer, feed)
        self._buffers = None

    def _ran_out(self) -> StepOutOfMemory:
        return StepOutOfMemory(self._alive or self._outer.plan.peak_tokens, begun=self._begun)

    def _gradient_buffers(self) -> AbstractContextManager[GradientBuffers | None]:
        """None where weights exist as a whole within a pass only."""
        return gradient_buffers(self._model) if self._lockstep is None else nullcontext()

    def _modules(self) -> list[nn.Module]:
        """What has parameters: the model, and a value head that is not its own."""
        scalar = self._capabilities.scalar
        return [self._model] if scalar is None or scalar.is_models_own else [self._model, scalar.module]

    def _train(self, frame: _Frame, feed: Feed) -> None:
        graphs: dict[int, _Pass] = {}
        held: dict[int, _Held] = {}
        plan = frame.plan
        for kind, part in plan.traverse():
            if kind == "enter":
                held[part] = self._open(frame, part, feed, graphs)
            elif part in graphs:
                self._backward(graphs.pop(part), feed)
            else:
                self._run(frame, part, feed)
            if kind == "leave":
                self._release(held.pop(part))

    def _open(self, frame: _Frame, part: int, feed: Feed, graphs: dict[int, _Pass]) -> _Held:
        """What happens before the parts below run; returns what was given of the carry."""
        plan, attach = frame.plan, frame.attach_of(part)
        if plan.kept[part]:
            held = self._allocate(frame.named(plan.exported_tokens(part)))
            done = self._forward_kept(frame, part, feed)
            if done is not None:
                graphs[part] = done
            return held
        if not plan.starts_prefill(part):
            return _NOTHING
        tokens = frame.named(plan.prefill_tokens(int(plan.prefill[part])))
        held = self._allocate(tokens)
        self._publish(tokens, attach, feed)
        return held

    def _forward_kept(self, frame: _Frame, part: int, feed: Feed) -> _Pass | None:
        """A kept part's forward. None where it did not fit: then it is published, and run when all below is done."""
        tokens, attach = frame.of_part(part), frame.attach_of(part)
        done = self._graph(tokens, attach, feed, known=feed.coefficients)
        if done is not None:
            feed.scored(*done)
            return done
        self._publish(tokens[self._row_of[tokens] >= 0], attach, feed)
        return None

    def _publish(self, tokens: np.ndarray, attach: int, feed: Feed) -> None:
        """A pass without graph over exported tokens, for their keys and values."""
        early = feed.needs_scores_early
        with torch.no_grad():
            forward = partial(self._forward, tokens, attach, need_entropy=early and feed.needs_entropy, score=early)
            done = self._attempt(forward, len(tokens), self._passes.published)
        if done is not None:
            if early:
                feed.scored(*done)
            return
        frame = self._halves(tokens, attach)
        between = self._states.allocate(tokens)  # rows they have
        for part in range(frame.plan.num_parts):
            self._publish(frame.of_part(part), frame.attach_of(part), feed)
        self._states.release(between)

    def _run(self, frame: _Frame, part: int, feed: Feed) -> None:
        """Forward and backward of a part of which everything below has run."""
        tokens, attach = frame.of_part(part), frame.attach_of(part)
        done = self._graph(tokens, attach, feed, known=feed.coefficients)
        if done is None and not (feed.in_parts and (self._routing is None or self._routing.in_parts)):
            raise StepOutOfMemory(len(tokens), begun=self._begun)
        if done is None:
            self._train(self._halves(tokens, attach), feed)
            return
        feed.scored(*done)
        self._backward(done, feed)

    def _graph(
        self, tokens: np.ndarray, attach: int, feed: Feed, known: Callable[[Piece], Tensor | None] | None = None
    ) -> _Pass | None:
        """A forward with graph; None where it did not fit."""
        forward = partial(self._forward, tokens, attach, need_entropy=feed.needs_entropy, known=known)
        self._alive += len(tokens)
        done = self._attempt(forward, len(tokens), self._passes.graph)
        if done is None:
            self._alive -= len(tokens)
        return done

    def _backward(self, done: _Pass, feed: Feed) -> None:
        scores, self._begun = done.scores, True
        if self._lockstep is not None:
            self._lockstep.before("backward")
        # The caller's autocast would make 16-bit products in the backward of what its forward computed in float32.
        with torch.autocast(model_device(self._model).type, enabled=False):
            if scores.linear_loss is not None and scores.values is None and scores.carrier is None:
                scores.linear_loss.backward()
            else:
                live = _seeded(scores, feed.seeds(done.piece))
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
        known: Callable[[Piece], Tensor | None] | None = None,
        score: bool = True,
    ) -> _Pass:
        """Run some tokens against the carry of the path down to their attach token."""
        piece, own = cut(self._layout, tokens), self._row_of[tokens]
        options: dict[str, Any] = {}
        if attach >= 0 or (own >= 0).any():
            path = self._row_of[self._outer.plan.path(attach)] if attach >= 0 else np.zeros(0, np.int64)
            options = {"carry": self._carry.view(path, own)}
            if self._capabilities.recurrent_layers:
                options["states"] = self._states.view(tokens, attach)
        if not score:
            options["score"] = False
        if self._routing is not None and self._routing.needed:
            final = torch.is_grad_enabled() or not self._gradients
            options["routers"] = self._routing.run(piece.layout.tree_index, final=final)
        run = self._run_type(self._model, self._capabilities, piece.layout, **options)
        coefficients = None if known is None else known(piece)
        scores = run.scores(
            temperature=self._temperature,
            need_entropy=need_entropy,
            coefficients=coefficients,
            buffers=self._buffers,
            meets_all=self._lockstep is not None,
            need_statistics=self._statistics and score,
            keep_logits=self._keep_logits,
        )
        return _Pass(piece, scores)

    def _attempt(self, forward: Callable[[], _Pass], tokens: int, fitted: list[tuple[int, int]]) -> _Pass | None:
        """A forward over so many tokens; None where memory ran out and fewer may fit.

        Args:
            fitted: takes note if it fits.
        """
        kind = "forward" if fitted is self._passes.graph else "prefill"
        if self._lockstep is not None:
            self._lockstep.before(kind)
        try:
            done = forward()
        except Exception as error:
            alone = self._run_type is PackedRun and self._lockstep is None
            if not is_out_of_memory(error) or tokens == 1 or not alone:
                raise
            if self._buffers is not None and self._buffers.uncertain:
                raise  # the fused head had begun to add gradients
        else:
            if self._buffers is not None:
                self._buffers.settle()
            if self._lockstep is not None:
                self._lockstep.after(kind, done.scores.live)
            fitted.append((self._alive - (tokens if fitted is self._passes.graph else 0), tokens))
            return done
        # Outside the handler, so that nothing holds on to what the forward had made.
        self._passes.split = max(self._passes.split, tokens)
        release_cached(self._model)
        return None

    def _halves(self, tokens: np.ndarray, attach: int) -> _Frame:
        """Tokens that did not fit as a plan of parts half as large."""
        frame = _Frame(uniform(cut(self._layout, tokens).layout, max(len(tokens) // 2, 1)), tokens, attach)
        self._states.attach_at(tokens[frame.plan.attach[frame.plan.attach >= 0]])
        return frame

    def _allocate(self, tokens: np.ndarray) -> _Held:
        """Give room in the carry to tokens that have none yet, on top of what is in use."""
        fresh = tokens[self._row_of[tokens] < 0]
        rows = slice(self._top, self._top + len(fresh))
        self._carry.reserve(rows.stop)
        self._carry.clear_gradients(rows)
        self._row_of[fresh] = np.arange(rows.start, rows.stop)
        self._top = rows.stop
        return _Held(fresh, self._states.allocate(tokens))

    def _release(self, held: _Held) -> None:
        """Take back what was given last."""
        self._row_of[held.rows] = -1
        self._top -= len(held.rows)
        self._states.release(held.states)

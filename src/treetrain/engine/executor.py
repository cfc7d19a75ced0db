"""Runs the parts of a plan on the model, depth first, each against the cache of the path above it.

One code path serves every plan: the whole tree as one part, one segment per part, and everything in between.

Why the gradients are complete: within a part, later tokens read a token's keys and values in one autograd graph.
Tokens of parts below read copies from the cache, which adds up the gradients of these copies. Parts below run backward
first. So when a part runs backward, its rows of the cache hold all gradients from below, and the attention Function
adds them.

    plan.events():   forward 0   forward 1   backward 1   forward 2   backward 2   backward 0
    rows in use:     0           0 1         0            0 2         0

Rows of the cache are allocated on the way down and freed on the way up, like a stack.

Under FSDP2 every forward and backward of the model is a collective call. All ranks agree on one sequence of passes
that contains every rank's own passes in order. Where a rank has no pass of its own, it runs a stand-in: a forward
over one token with coefficients of zero, and later a backward with gradients of zero. A stand-in gathers and reduces
the same weights as the other ranks' passes and adds zeros, so results do not change. Context-parallel ranks have the
same passes, so they run stand-ins together, each over the whole token.

    rank 0:        forward a    stand-in     backward a   stand-in
    rank 1:        forward b    forward c    backward c   backward b
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor, nn

from treetrain.engine.distributed import sharded_modules, waiting_gradients
from treetrain.engine.lm_head import GradientBuffers, ScoreRequest, Scores, gradient_buffers
from treetrain.engine.loss_gradients import KnownGradients, ScoreTable
from treetrain.engine.packed import model_device
from treetrain.engine.routing import Routing, switched
from treetrain.engine.runtime import PassCounts, Runtime
from treetrain.engine.tensor_parallel import tensor_parallel_mode, vocabulary_shard
from treetrain.linear_attention.paths import StateCache
from treetrain.models.tree_mode import compiled_layers
from treetrain.planning.collective_order import Kind, Turn, common_order
from treetrain.planning.plan import Plan
from treetrain.softmax_attention.kv_cache import KVCache
from treetrain.tree.build import build_tree
from treetrain.tree.layout import Piece, cut, pack

Reduces = Literal["each", "last", "never"]
"""The backwards of a run that reduce gradients over ranks."""


# ---- the common order of passes under FSDP2


class CollectivePasses:
    """Steps one rank through the common order of passes. Construction is a collective call.

    Args:
        plan, routing: of this rank's own passes.
        gradients: whether the parts run backward too.
    """

    def __init__(self, runtime: Runtime, plan: Plan, routing: Routing | None, *, gradients: bool, reduces: Reduces):
        self._runtime, self._routing, self._ranks = runtime, routing, runtime.ranks
        self._shards = sharded_modules(runtime.model, runtime.value_head)
        own = plan.kinds if gradients else "P" * plan.num_parts
        waits = gradients and reduces != "never" and bool(waiting_gradients(*self._shards))
        _, answers = self._ranks.agree("an order of passes", lambda: (None, (own, waits)))
        self._turns = common_order([order for order, _ in self._ranks.of_data(answers)])
        if not self._turns and any(waits for _, waits in answers):
            # Stand-ins, which reduce what earlier calls left.
            self._turns = [Turn("forward", ()), Turn("backward", ())]
        self._next = 0
        self._last_backward = max((n for n, turn in enumerate(self._turns) if turn.kind == "backward"), default=-1)
        self._idle_outputs: list[list[Tensor]] = []
        """Outputs of the stand-ins that have not run backward yet."""
        self.begin_backwards(reduces)

    def begin_backwards(self, reduces: Reduces) -> None:
        """Set which of the following backwards reduce gradients."""
        self._reduces = reduces
        if reduces != "each":
            self._set_reducing(False)

    def before(self, kind: Kind) -> None:
        """Run stand-ins up to this rank's next pass, which must be of this kind."""
        self._stand_in_until(lambda turn: self._ranks.data_rank in turn.takers)
        turn = self._turns[self._next].kind if self._next < len(self._turns) else None
        assert turn == kind, f"pass {self._next} of the common order is a {turn}, not a {kind}"
        self._begin()

    def finish(self, *, forwards: bool = False) -> None:
        """Run stand-ins to the end, or only up to the next backward."""
        if forwards:
            self._stand_in_until(lambda turn: turn.kind == "backward")
            return
        self._stand_in_until(lambda turn: False)
        self._idle_outputs.clear()

    def close(self) -> None:
        """Restore FSDP2's reduction setting, and reshard."""
        if self._reduces != "each":
            self._set_reducing(True)
        for module in self._shards:
            module.reshard()  # a forward without a backward leaves its weights unsharded

    def _set_reducing(self, wanted: bool) -> None:
        for module in self._shards:
            module.set_requires_gradient_sync(wanted, recurse=False)

    def _begin(self) -> None:
        if self._reduces == "last" and self._next == self._last_backward:
            self._set_reducing(True)
        self._next += 1

    def _stand_in_until(self, reached: Callable[[Turn], bool]) -> None:
        """Run stand-ins up to the first turn for which `reached` is true."""
        while self._next < len(self._turns) and not reached(self._turns[self._next]):
            kind = self._turns[self._next].kind
            self._begin()
            if kind == "backward":
                # This rank's own passes are over, and it has stood in for more forwards than backwards.
                if outputs := self._idle_outputs.pop():
                    torch.autograd.backward(outputs, [torch.zeros_like(output) for output in outputs])
            else:
                scores = self._stand_in(graph=kind == "forward")
                if kind == "forward":
                    self._idle_outputs.append(scores.live)

    def _stand_in(self, *, graph: bool) -> Scores:
        """A forward over one token that adds nothing to the result."""
        runtime, layout, options = self._runtime, pack(build_tree([[0, 0]])), {}
        if self._routing is not None and self._routing.needed:
            options["routers"] = self._routing.idle_run(layout.num_tokens)
        with torch.set_grad_enabled(graph):
            run = runtime.run_type(runtime.model, runtime.capabilities, layout, **options)
            zeros = torch.zeros(layout.num_edges, device=run.input_ids.device) if graph else None
            return run.scores(ScoreRequest(temperature=runtime.temperature, coefficients=zeros, meets_all=True))


# ---- gradients and the hooks on them


@contextmanager
def gradients_aside(parameters: Sequence[nn.Parameter]) -> Iterator[list[Tensor | None]]:
    """Collect the gradients of a block in the yielded list. No hook of the parameters runs.

    ``.grad`` is None at the start of the block; the old gradients are restored after it.
    """
    before, set_aside, found = [p.grad for p in parameters], [], []
    for p in parameters:
        p.grad = None
        for hooks in (p._backward_hooks, p._post_accumulate_grad_hooks):
            if hooks:
                set_aside.append((hooks, dict(hooks)))
                hooks.clear()  # in place: autograd keeps a reference to the dictionary
    try:
        yield found
        found += [p.grad for p in parameters]
    finally:
        for p, grad in zip(parameters, before):
            p.grad = grad
        for hooks, own in set_aside:
            hooks.update(own)


@contextmanager
def hooks_once(*modules: nn.Module | None) -> Iterator[None]:
    """Run hooks once, on the sum of the gradients of all backwards in the block, unless the block raises."""
    parameters = dict.fromkeys(p for module in modules if module is not None for p in module.parameters())
    hooked = [p for p in parameters if p._backward_hooks or p._post_accumulate_grad_hooks]
    with gradients_aside(hooked) as totals:
        yield
    for p, total in zip(hooked, totals):
        if total is not None:
            p.backward(total)  # as if a backward had just computed it: hooks run, and it is added to .grad


def gradients_of(parameters: Sequence[nn.Parameter], run: Callable[[], None]) -> tuple[Tensor | None, ...]:
    """Return the gradients that a call leaves in ``.grad``, and restore ``.grad``. No hook of the parameters runs."""
    with gradients_aside(parameters) as found:
        run()
    return tuple(found)


# ---- the passes of a plan


class _Forward(NamedTuple):
    """A part whose forward has run and whose backward has not."""

    piece: Piece
    scores: Scores


class Executor:
    """Runs one plan, once. Construction is a collective call under FSDP2.

    Args:
        plan: the plan of the batch.
        counts: counts the passes.
        routing: the routers' auxiliary loss and recorded experts.
        gradients: whether the parts run backward too.
        reduces: which backwards reduce sharded gradients.
    """

    def __init__(
        self,
        runtime: Runtime,
        plan: Plan,
        counts: PassCounts,
        routing: Routing | None = None,
        *,
        gradients: bool,
        reduces: Reduces = "each",
    ):
        self._runtime, self._plan, self.counts, self._routing = runtime, plan, counts, routing
        self._gradients, self._device = gradients, model_device(runtime.model)
        self._collective: CollectivePasses | None = None
        if runtime.collective:
            self._collective = CollectivePasses(runtime, plan, routing, gradients=gradients, reduces=reduces)
        tokens = plan.layout.num_tokens
        self._cache = KVCache(plan.cached_tokens, self._device, gradients=gradients, tokens=tokens)
        self._states = StateCache(tokens, plan.cached_states, plan.attach, gradients=gradients)
        self._held: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        # By part: tokens with a row for keys and values, and tokens with a slot for the recurrent state after them.
        self._graphs: dict[int, _Forward] = {}
        self._buffers: GradientBuffers | None = None
        self._error: Exception | None = None
        """The loss's first error, kept while other ranks wait in later passes."""

    def score(self, table: ScoreTable | None) -> None:
        """Run all parts without graph, in the memory of one path.

        Args:
            table: gets all scores; None runs the layers without the head, to record the routers' choices.
        """
        plan = self._plan
        with self._passes(graph=False):
            for kind, part in plan.traverse():
                if kind == "leave":
                    self._release(part)
                    continue
                self._allocate(part, plan.exported_tokens(part))
                self._forward(plan.tokens(part), int(plan.attach[part]), table, None if table is None else table.write)

    def forward_all(self, table: ScoreTable, *, keep_logits: bool) -> None:
        """Fill a table, keeping the graphs of all parts for `backward_all`. The plan must keep all parts.

        Args:
            keep_logits: whether the head keeps its logits with the graphs.
        """
        plan = self._plan
        with self._passes(graph=True, forwards=True):
            # Parts are numbered depth first, so the parts above have run. No row of the cache is released.
            for part in range(plan.num_parts):
                self._allocate(part, plan.exported_tokens(part))
                self._graphs[part] = self._forward(
                    plan.tokens(part), int(plan.attach[part]), table, table.write, keep_logits=keep_logits
                )

    def backward_all(self, gradients: KnownGradients, reduces: Reduces = "each") -> None:
        """Run the backwards of `forward_all`, last part first, so that all parts below a part precede it."""
        if self._collective is not None:
            self._collective.begin_backwards(reduces)
        with self._passes(graph=True):
            while self._graphs:
                self._backward(self._graphs.popitem()[1], gradients)
            if self._buffers is not None:
                self._buffers.deliver()

    def train(self, gradients: KnownGradients) -> None:
        """Run all parts forward and backward, and add to the parameters' ``.grad``."""
        plan, table, take = self._plan, gradients.table, gradients.scored
        with self._passes(graph=True):
            for kind, number in plan.events():
                if kind == "prefill":  # without graph, over exported tokens, for their keys and values
                    first, tokens = plan.prefill_parts(number)[0], plan.prefill_tokens(number)
                    self._allocate(first, tokens)
                    with torch.no_grad():
                        self._forward(
                            tokens, int(plan.attach[first]), table if gradients.needs_scores_early else None, take
                        )
                elif kind == "forward":
                    if plan.kept[number]:
                        self._allocate(number, plan.exported_tokens(number))
                    self._graphs[number] = self._forward(
                        plan.tokens(number), int(plan.attach[number]), table, take, gradients.coefficients
                    )
                else:
                    self._backward(self._graphs.pop(number), gradients)
                    self._release(number)

    def _backward(self, done: _Forward, gradients: KnownGradients) -> None:
        scores, self.counts.backward_begun = done.scores, True
        if self._collective is not None:
            self._collective.before("backward")
        # Under the caller's autocast, backward would use 16-bit products where forward used float32.
        with torch.autocast(self._device.type, enabled=False):
            if scores.linear_loss is not None and scores.values is None and scores.carrier is None:
                scores.linear_loss.backward()
            else:
                known = gradients.gradients_of(done.piece)
                first, edges = scores.logprobs, known.edges
                if scores.linear_loss is not None:
                    first, edges = scores.linear_loss, torch.ones_like(scores.linear_loss)
                zeros = None if scores.carrier is None else torch.zeros_like(scores.carrier)
                pairs = zip(
                    (first, scores.entropies, scores.values, scores.carrier), (edges, known.rows, known.values, zeros)
                )
                live = [(x, grad) for x, grad in pairs if x is not None and grad is not None and x.requires_grad]
                if live:
                    torch.autograd.backward([out for out, _ in live], [grad for _, grad in live])
        self.counts.alive -= done.piece.layout.num_tokens

    @contextmanager
    def _passes(self, *, graph: bool, forwards: bool = False) -> Iterator[None]:
        """Prepare the model for passes. After them, complete the ranks' common order, then raise `_error` if set.

        Args:
            graph: whether passes have a graph, so that gradients are collected too.
            forwards: stop before the backwards, which come later.
        """
        runtime, model, scalar = self._runtime, self._runtime.model, self._runtime.capabilities.scalar
        head = None if scalar is None or scalar.is_models_own else scalar.module
        buffers: AbstractContextManager[GradientBuffers | None] = nullcontext(self._buffers)
        if graph and self._buffers is None and self._collective is None:  # FSDP2 unshards weights only during a pass
            buffers = gradient_buffers(model)
        with (
            torch.set_grad_enabled(graph),
            runtime.run_type.mode(model),
            tensor_parallel_mode(model, runtime.tensor),
            switched(model, runtime.capabilities.experts, self._routing),
            compiled_layers(model, runtime.compiled) if runtime.compiles else nullcontext(),
            hooks_once(model, head) if graph else nullcontext(),
            buffers as self._buffers,
        ):
            try:
                yield
                if self._collective is not None:
                    self._collective.finish(forwards=forwards)
            except BaseException as error:
                self._graphs.clear()
                if not runtime.passes_with.alone:  # this process stops in the middle of a pass; others may wait there
                    runtime.same_rows.lost = True
                    runtime.ranks.leave(error)
                raise
            finally:
                if self._collective is not None:
                    self._collective.close()
            # All ranks stop here, before hooks see the gradients of a step that has failed on one of them.
            runtime.passes_with.agree("the passes", self._failure)

    def _failure(self) -> tuple[None, None]:
        if self._error is not None:
            raise self._error
        return None, None

    def _forward(
        self,
        tokens: Int64[np.ndarray, " n"],
        attach: int,
        table: ScoreTable | None,
        take: Callable[[Piece, Scores], None] | None,
        coefficients: Callable[[Piece], Tensor | None] | None = None,
        *,
        keep_logits: bool = False,
    ) -> _Forward:
        """Run some tokens against the cache of the path down to the token that they continue (-1: none).

        Args:
            table: says which scores to compute; None runs the layers without the head.
            take: gets the scores, if there are any.
            coefficients: gives the gradients of a piece's log-probabilities where they are known beforehand.
        """
        with_graph, runtime = torch.is_grad_enabled(), self._runtime
        kind = "forward" if with_graph else "prefill"
        self.counts.alive += len(tokens)
        if self._collective is not None:
            self._collective.before(kind)
        piece = cut(self._plan.layout, tokens)
        options: dict[str, Any] = {"cache": self._cache.view(self._plan.path(attach), tokens)}
        if options["cache"] is not None and runtime.capabilities.recurrent_layers:
            options["states"] = self._states.view(tokens, attach)
        if table is None:
            options["score"] = False
        if not runtime.context.alone:
            options["context"] = runtime.context
        if self._routing is not None and self._routing.needed:
            options["routers"] = self._routing.run(piece.layout.tree_index, final=with_graph or not self._gradients)
        request = ScoreRequest(
            temperature=runtime.temperature,
            need_entropy=table is not None and table.entropies is not None,
            coefficients=None if coefficients is None else coefficients(piece),
            buffers=self._buffers,
            meets_all=self._collective is not None,
            need_statistics=table is not None and table.statistics is not None,
            keep_logits=keep_logits,
            vocabulary=vocabulary_shard(runtime.capabilities, runtime.tensor),
        )
        run = runtime.run_type(runtime.model, runtime.capabilities, piece.layout, **options)
        scores = run.scores(request)
        self.counts.attention.update(run.attention_calls)
        if with_graph:
            self.counts.parts += 1
        else:
            self.counts.alive -= len(tokens)
            self.counts.tokens_without_graph += len(tokens)
        if table is not None and take is not None:
            try:
                take(piece, scores)
            except Exception as error:  # from the loss; the passes go on if other ranks wait in the next one
                if runtime.passes_with.alone:
                    raise
                self._error = self._error or error
        return _Forward(piece, scores)

    def _allocate(self, part: int, tokens: Int64[np.ndarray, " n"]) -> None:
        """Allocate places in the caches for tokens, above those in use, until `part` is released."""
        self._cache.allocate(tokens)
        self._held[part] = tokens, self._states.allocate_attached(tokens)

    def _release(self, part: int) -> None:
        """Free a part's cache rows and state slots, which were allocated last, if it has any."""
        if part in self._held:
            rows, states = self._held.pop(part)
            self._cache.release(rows)
            self._states.release(states)

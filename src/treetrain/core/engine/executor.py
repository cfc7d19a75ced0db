"""Runs the parts of a plan, depth first, each against the cache of the path above it.

One code path serves every plan: the whole tree as one part, one segment per part, and everything in between. It also
serves every model: a `PartRunner` runs a part's forward and backward, on a Hugging Face model (`ModelPasses`) or by a
function of the user's own (`Packed.forward_backward`).

Why the gradients are complete: within a part, later tokens read a token's keys and values in one autograd graph.
Tokens of parts below read copies from the cache, which adds up the gradients of these copies. Parts below run backward
first. So when a part runs backward, its slots of the cache hold all gradients from below, and the attention Function
adds them. A part below runs backward even if nothing of its own is trained (`kv_cache.GradientNeeds`).

    plan.events():   forward 0   forward 1   backward 1   forward 2   backward 2   backward 0
    slots in use:    0           0 1         0            0 2         0

Slots of the cache are allocated on the way down and freed on the way up, like a stack.
"""

from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from jaxtyping import Int64

from treetrain.core.attention.kv_cache import KVCache, KVCacheView
from treetrain.core.planning.plan import Plan
from treetrain.core.tree.layout import Piece, cut

Output = TypeVar("Output")


@dataclass(frozen=True, slots=True)
class Part:
    """The tokens of one pass, and the path that they continue."""

    piece: Piece
    """The tokens as a layout of their own."""
    tokens: Int64[np.ndarray, " n"]
    """Indices of the tokens in the plan's layout."""
    attach: int
    """The token of the plan's layout that they continue; -1 where they start at roots."""
    cache: KVCacheView | None
    """The keys and values of the path, and where to put those of the part; None if there are neither."""
    graph: bool
    """Whether a backward follows."""


@dataclass
class PassCounts:
    """Counts the passes of one try of a step."""

    parts: int = 0
    """Parts that ran forward with graph."""
    tokens_without_graph: int = 0
    alive: int = 0
    """Tokens that are being computed, or whose graph is alive."""
    backward_begun: bool = False
    """Whether a backward has started, so that an error leaves incomplete gradients."""
    attention: Counter[str] = field(default_factory=Counter)
    """Attention calls of forwards, by backend."""


class PartRunner(Protocol[Output]):
    """Runs a part of a plan on some model."""

    device: torch.device
    counts: PassCounts
    """The executor counts the passes here."""

    def begin(self, plan: Plan, *, gradients: bool) -> None:
        """A run of a plan begins; `gradients`: whether its parts run backward too."""

    def may_need_gradients(self, layer: Hashable) -> bool:
        """Whether something trained may come before the keys of a layer, in some token."""
        ...

    def passes(self, *, graph: bool, backward: bool) -> AbstractContextManager[None]:
        """Prepare the model for the passes of a block.

        Args:
            graph: whether the passes have a graph.
            backward: whether backwards are among them.
        """
        ...

    def forward(self, part: Part) -> Output:
        """Run a part forward. Autograd is on if the part has a graph."""
        ...

    def backward(self, part: Part, output: Output) -> None:
        """Run a part backward from what its forward returned. All parts below it have run backward."""


class Executor(Generic[Output]):
    """Runs one plan, once.

    Args:
        gradients: whether the parts run backward too.
    """

    def __init__(self, plan: Plan, runner: PartRunner[Output], *, gradients: bool):
        runner.begin(plan, gradients=gradients)
        self._plan, self._runner = plan, runner
        self._cache: KVCache | None = None  # a plan of parts without descendants needs none
        if plan.cached_tokens:
            self._cache = KVCache(
                plan.cached_tokens,
                runner.device,
                gradients=gradients,
                tokens=plan.layout.num_tokens,
                may_need=runner.may_need_gradients,
            )
        self._held: dict[int, Int64[np.ndarray, " n"]] = {}
        """The tokens that have slots of the cache, by the part that allocated them."""
        self._alive: dict[int, tuple[Part, Output]] = {}
        """The parts that have run forward and not backward."""

    def score(self) -> None:
        """Run all parts without graph, in the memory of one path."""
        plan = self._plan
        with self._passes(graph=False, backward=False):
            for kind, part in plan.traverse():
                if kind == "leave":  # nothing below reads its keys any more
                    self._release(part)
                else:
                    self._allocate(part, plan.exported_tokens(part))
                    self._forward(part, plan.tokens(part), graph=False)

    def forward_all(self) -> None:
        """Run all parts forward, and keep the graphs of those that the plan keeps for `backward_all`."""
        plan = self._plan
        with self._passes(graph=True, backward=False):
            # Parts are numbered depth first, so the parts above have run. No slot of the cache is released.
            for part in range(plan.num_parts):
                self._allocate(part, plan.exported_tokens(part))
                run = self._forward(part, plan.tokens(part), graph=bool(plan.kept[part]))
                if plan.kept[part]:
                    self._alive[part] = run
                del run

    def backward_all(self) -> None:
        """Run all parts backward, last part first, so that all parts below a part precede it.

        Parts whose graph was not kept run forward again, against the cache that their first forward has filled.
        """
        with self._passes(graph=True, backward=True):
            for part in reversed(range(self._plan.num_parts)):
                if not self._plan.kept[part]:
                    self._alive[part] = self._forward(part, self._plan.tokens(part), graph=True)
                self._backward(*self._alive.pop(part))

    def train(self) -> None:
        """Run all parts forward and backward."""
        plan = self._plan
        with self._passes(graph=True, backward=True):
            for kind, number in plan.events():
                if kind == "prefill":  # without graph, over exported tokens, for their keys and values
                    first, tokens = plan.prefill_parts(number)[0], plan.prefill_tokens(number)
                    self._allocate(first, tokens)
                    self._forward(first, tokens, graph=False)
                elif kind == "forward":
                    if plan.kept[number]:  # a recomputed part has its slots since its prefill, and leaves need none
                        self._allocate(number, plan.exported_tokens(number))
                    self._alive[number] = self._forward(number, plan.tokens(number), graph=True)
                else:
                    self._backward(*self._alive.pop(number))
                    self._release(number)

    @contextmanager
    def _passes(self, *, graph: bool, backward: bool) -> Iterator[None]:
        try:
            with torch.set_grad_enabled(graph), self._runner.passes(graph=graph, backward=backward):
                yield
        except BaseException:
            self._alive.clear()  # the error's traceback would keep their graphs alive
            raise

    def _forward(self, number: int, tokens: Int64[np.ndarray, " n"], *, graph: bool) -> tuple[Part, Output]:
        """Run tokens of a part, or of parts that one prefill serves, against the cache of the path above them."""
        self._runner.counts.alive += len(tokens)
        attach = int(self._plan.attach[number])
        cache = None if self._cache is None else self._cache.view(self._plan.path(attach), tokens)
        part = Part(cut(self._plan.layout, tokens), tokens, attach, cache, graph)
        with torch.set_grad_enabled(graph):
            output = self._runner.forward(part)
        if graph:
            self._runner.counts.parts += 1
        else:
            self._runner.counts.alive -= len(tokens)
            self._runner.counts.tokens_without_graph += len(tokens)
        return part, output

    def _backward(self, part: Part, output: Output) -> None:
        self._runner.counts.backward_begun = True
        self._runner.backward(part, output)
        self._runner.counts.alive -= len(part.tokens)

    def _allocate(self, part: int, tokens: Int64[np.ndarray, " n"]) -> None:
        """Allocate slots of the cache for tokens, above those in use, until `part` is released."""
        if self._cache is not None:
            self._cache.allocate(tokens)
            self._held[part] = tokens

    def _release(self, part: int) -> None:
        """Free a part's slots of the cache, which were allocated last, if it has any."""
        if self._cache is not None and part in self._held:
            self._cache.release(self._held.pop(part))

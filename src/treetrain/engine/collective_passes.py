"""The common order of passes under FSDP2, where every forward and backward of the model is a collective call.

All ranks agree on one sequence of passes that holds every rank's own passes in their order. Where a rank has no pass of
its own, it runs a stand-in: a forward over one token with coefficients of zero, and later a backward with gradients of
zero. A stand-in gathers and reduces the same weights as the other ranks' passes and adds zeros, so results do not
change. Context-parallel ranks have the same passes, so they run stand-ins together, each over the whole token.

    rank 0:        forward a    stand-in     backward a   stand-in
    rank 1:        forward b    forward c    backward c   backward b
"""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from treetrain.engine.distributed import sharded_modules, waiting_gradients
from treetrain.engine.lm_head import ScoreRequest, Scores
from treetrain.engine.routing import Routing
from treetrain.engine.runtime import Runtime
from treetrain.planning.collective_order import Kind, Turn, common_order, spelled
from treetrain.planning.plan import Plan
from treetrain.tree.build import build_tree
from treetrain.tree.layout import pack

Reduces = Literal["each", "last", "never"]
"""Which backwards of a run reduce gradients over ranks."""


class CollectivePasses:
    """Takes one rank through the common order; making it is a collective call.

    Args:
        plan, routing: those of this rank's passes.
        gradients: whether the parts run backward too.
    """

    def __init__(self, runtime: Runtime, plan: Plan, routing: Routing | None, *, gradients: bool, reduces: Reduces):
        self._runtime, self._routing, self._ranks = runtime, routing, runtime.ranks
        self._shards = sharded_modules(runtime.model, runtime.value_head)
        own = spelled(event.kind for event in plan.events()) if gradients else "P" * plan.num_parts
        waits = gradients and reduces != "never" and bool(waiting_gradients(*self._shards))
        _, answers = self._ranks.agree("an order of passes", lambda: (None, (own, waits)))
        self._turns = common_order([order for order, _ in self._ranks.of_data(answers)])
        if not self._turns and any(waits for _, waits in answers):
            # Stand-ins, which reduce what earlier calls left.
            self._turns = [Turn("forward", ()), Turn("backward", ())]
        self._next = 0
        self._last_backward = max((n for n, turn in enumerate(self._turns) if turn.kind == "backward"), default=-1)
        # Outputs that later backwards start from: those of stand-ins, and of this rank's own forwards.
        self._idle_outputs: list[Sequence[Tensor]] = []
        self._own_outputs: list[Sequence[Tensor]] = []
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

    def after(self, kind: Kind, outputs: Sequence[Tensor] = ()) -> None:
        """Record that a pass of this rank has ended.

        Args:
            outputs: of a forward with graph, the tensors that its backward starts from.
        """
        if kind == "forward":
            self._own_outputs.append(outputs)
        elif kind == "backward" and self._own_outputs:
            self._own_outputs.pop()

    def finish(self, *, forwards: bool = False) -> None:
        """Run stand-ins to the end, or only up to the next backward."""
        if forwards:
            self._stand_in_until(lambda turn: turn.kind == "backward")
            return
        self._stand_in_until(lambda turn: False)
        self._idle_outputs.clear()
        self._own_outputs.clear()

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
        """Run stand-ins up to the first turn for which this holds."""
        while self._next < len(self._turns) and not reached(self._turns[self._next]):
            kind = self._turns[self._next].kind
            self._begin()
            if kind == "backward":
                outputs = self._idle_outputs.pop() if self._idle_outputs else self._own_outputs.pop()
                if outputs:
                    torch.autograd.backward(list(outputs), [torch.zeros_like(output) for output in outputs])
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

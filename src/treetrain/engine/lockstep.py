"""The common order of passes under FSDP2, where every forward and backward of the model is a collective call.

All ranks agree on one sequence of passes that holds every rank's own passes in their order. Where a rank has no pass of
its own, it runs a stand-in: a forward over one token with coefficients of zero, and later a backward with gradients of
zero. A stand-in gathers and reduces the same weights as the other ranks' passes and adds zeros, so results do not
change.

    rank 0:        forward a    stand-in     backward a   stand-in
    rank 1:        forward b    forward c    backward c   backward b
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from treetrain.engine.distributed import Ranks, waiting_gradients, was_left_by_others
from treetrain.engine.lm_head import ScoreRequest, Scores
from treetrain.engine.routing import Routing
from treetrain.models.capability import Capabilities
from treetrain.planning.collective_order import Kind, Turn, common_order, spelled
from treetrain.planning.plan import Plan
from treetrain.tree.build import build_tree
from treetrain.tree.layout import pack

Reduces = Literal["each", "last", "never"]
"""Which backwards of a run reduce gradients over ranks."""


class StandIn:
    """Forwards over one token that add nothing to the result.

    Args:
        run_type: the class that runs a layout on the model.
    """

    def __init__(
        self,
        model: nn.Module,
        capabilities: Capabilities,
        temperature: float,
        routing: Routing | None,
        run_type: type[Any],
    ):
        self._model, self._capabilities, self._temperature = model, capabilities, temperature
        self._routing, self._run_type = routing, run_type
        self._layout = pack(build_tree([[0, 0]]))

    def forward(self, *, graph: bool) -> Scores:
        """Run the token, with or without graph."""
        options: dict[str, Any] = {}
        if self._routing is not None and self._routing.needed:
            options["routers"] = self._routing.idle_run(self._layout.num_tokens)
        with torch.set_grad_enabled(graph):
            run = self._run_type(self._model, self._capabilities, self._layout, **options)
            zeros = torch.zeros(self._layout.num_edges, device=run.input_ids.device) if graph else None
            return run.scores(ScoreRequest(temperature=self._temperature, coefficients=zeros, meets_all=True))


def agreed_order(ranks: Ranks, plan: Plan, modules: Sequence[Any], *, gradients: bool, reduces: Reduces) -> list[Turn]:
    """The common order of all ranks' passes over their plans; a collective call.

    Args:
        modules: those that FSDP2 has sharded.
        gradients: whether the parts run backward too.
    """
    own = spelled(event.kind for event in plan.events()) if gradients else "P" * plan.num_parts
    waits = gradients and reduces != "never" and bool(waiting_gradients(*modules))
    _, answers = ranks.agree("an order of passes", lambda: (None, (own, waits)))
    turns = common_order([order for order, _ in answers])
    if not turns and any(waits for _, waits in answers):
        return [Turn("forward", ()), Turn("backward", ())]  # stand-ins: they reduce what earlier calls left
    return turns


class Lockstep:
    """Takes one rank through the common order.

    Args:
        turns: the common order.
        stand_in: runs where this rank has no pass of its own.
        shards: the modules that FSDP2 has sharded.
    """

    def __init__(self, turns: Sequence[Turn], ranks: Ranks, stand_in: StandIn, shards: Sequence[Any], reduces: Reduces):
        self._turns, self._ranks, self._stand_in, self._shards = turns, ranks, stand_in, shards
        self._next = 0
        self._last_backward = max((n for n, turn in enumerate(turns) if turn.kind == "backward"), default=-1)
        # Outputs that later backwards start from: those of stand-ins, and of this rank's own forwards.
        self._idle_outputs: list[Sequence[Tensor]] = []
        self._own_outputs: list[Sequence[Tensor]] = []
        self._within_pass = False
        self.begin_backwards(reduces)

    def begin_backwards(self, reduces: Reduces) -> None:
        """Set which of the following backwards reduce gradients."""
        self._reduces = reduces
        if reduces != "each":
            self._set_reducing(False)

    def before(self, kind: Kind) -> None:
        """Run stand-ins up to this rank's next pass, which must be of this kind."""
        self._stand_in_until(lambda turn: self._ranks.rank in turn.takers)
        found = self._turns[self._next].kind if self._next < len(self._turns) else None
        assert found == kind, f"pass {self._next} of the common order is a {found}, not a {kind}"
        self._begin()

    def after(self, kind: Kind, outputs: Sequence[Tensor] = ()) -> None:
        """Record that a pass of this rank has ended.

        Args:
            outputs: of a forward with graph, the tensors that its backward starts from.
        """
        self._within_pass = False
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

    def abandon(self, error: BaseException, *, forwards: bool = False) -> None:
        """After a failure of this rank, run stand-ins, so that the others do not wait."""
        if not self._within_pass:
            self.finish(forwards=forwards)
            return
        self._ranks.lost = True
        error.add_note(
            "another rank has left this pass, by an error of its own or because its process ended: see what it said"
            if was_left_by_others(error)
            else "it came in the middle of a pass: the other ranks wait there until this process ends"
        )

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
        self._within_pass = True

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
                scores = self._stand_in.forward(graph=kind == "forward")
                if kind == "forward":
                    self._idle_outputs.append(scores.live)
            self._within_pass = False


@contextmanager
def in_step(lockstep: Lockstep | None, *, forwards: bool = False) -> Iterator[None]:
    """Complete the common order after the block, also if this rank fails.

    Args:
        forwards: stop before the backwards, which come later.
    """
    if lockstep is None:
        yield
        return
    try:
        yield
        lockstep.finish(forwards=forwards)
    except BaseException as error:
        lockstep.abandon(error, forwards=forwards)
        raise
    finally:
        lockstep.close()

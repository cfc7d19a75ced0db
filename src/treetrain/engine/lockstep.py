"""A rank's way through the passes of all ranks, where every call of the model is a collective.

Before each pass of its own a rank goes through the slots of the others with stand-ins: passes over one token whose
coefficients and gradients are zero, so that nothing changes but that the collectives are met.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from treetrain.engine.lm_head import ScoreRequest, Scores
from treetrain.engine.packed import PackedRun
from treetrain.engine.ranks import Ranks, waiting_gradients, was_left_by_others
from treetrain.engine.routing import Routing
from treetrain.models.capability import Capabilities
from treetrain.planning.collective_order import Kind, Turn, common_order, spelled
from treetrain.planning.plan import Plan
from treetrain.tree.build import build_tree
from treetrain.tree.layout import pack

Reduces = Literal["each", "last", "never"]
"""Which backwards of a walk reduce gradients over ranks."""


class StandIn:
    """Passes over one token that count for nothing; run inside the walk's contexts."""

    def __init__(
        self,
        model: nn.Module,
        capabilities: Capabilities,
        temperature: float,
        routing: Routing | None,
        run_type: type[Any] = PackedRun,
    ):
        self._model, self._capabilities, self._temperature = model, capabilities, temperature
        self._routing, self._run_type = routing, run_type
        self._layout = pack(build_tree([[0, 0]]))

    def forward(self, *, graph: bool) -> Scores:
        """A pass, with or without graph."""
        options: dict[str, Any] = {}
        if self._routing is not None and self._routing.needed:
            options["routers"] = self._routing.idle_run(self._layout.num_tokens)
        with torch.set_grad_enabled(graph):
            run = self._run_type(self._model, self._capabilities, self._layout, **options)
            nothing = torch.zeros(self._layout.num_edges, device=run.input_ids.device) if graph else None
            return run.scores(ScoreRequest(temperature=self._temperature, coefficients=nothing, meets_all=True))


def backward_of_nothing(roots: Sequence[Tensor]) -> None:
    """Go backward through a graph with zeros."""
    if roots:
        torch.autograd.backward(list(roots), [torch.zeros_like(root) for root in roots])


class Lockstep:
    """The order of one walk.

    Args:
        turns: of all ranks.
        ranks: that share the walk.
        stand_in: what runs in the slots of others.
        shards: the modules in the hands of FSDP2.
        reduces: which backward reduces gradients.
    """

    def __init__(
        self, turns: Sequence[Turn], ranks: Ranks, stand_in: StandIn, shards: Sequence[Any], reduces: Reduces = "each"
    ):
        self._slots = [_Slot(turn.kind, ranks.rank in turn.takers) for turn in turns]
        self._ranks = ranks
        self._stand_in, self._at = stand_in, 0
        self._waiting: list[Sequence[Tensor]] = []
        self._own: list[Sequence[Tensor]] = []
        self._shards, self._reduces = shards, reduces
        self._last_backward = max((n for n, slot in enumerate(self._slots) if slot.kind == "backward"), default=-1)
        self._within_pass = False
        if reduces != "each":
            self._reduce(False)

    def before(self, kind: Kind) -> None:
        """Go through the slots of others up to the next one of one's own, which must be of this kind."""
        while self._at < len(self._slots) and not self._slots[self._at].own:
            self._meet()
        found = self._slots[self._at].kind if self._at < len(self._slots) else None
        assert found == kind, f"pass {self._at} of the common order is a {found}, not a {kind}"
        self._begin()

    def after(self, kind: Kind, live: Sequence[Tensor] = ()) -> None:
        """A pass of one's own is done.

        Args:
            live: of a forward with graph: what its backward starts from.
        """
        self._within_pass = False
        if kind == "forward":
            self._own.append(live)
        elif kind == "backward" and self._own:
            self._own.pop()

    def finish(self) -> None:
        """Go through what is left of the others' slots."""
        while self._at < len(self._slots):
            self._meet()
        self._waiting.clear()
        self._own.clear()

    def finish_forwards(self) -> None:
        """Go through the others' slots up to the next backward."""
        while self._at < len(self._slots) and self._slots[self._at].kind != "backward":
            self._meet()

    def begin_backwards(self, reduces: Reduces) -> None:
        """The loss is known; only backwards are left. Says which of them reduces gradients."""
        self._reduces = reduces
        if reduces != "each":
            self._reduce(False)

    def abandon(self, error: BaseException, *, forwards: bool = False) -> None:
        """Something went wrong here: meet the others in what is left, so that they are not kept waiting."""
        if self._within_pass:
            self._ranks.lost = True
            error.add_note(
                "another rank has left this pass, by an error of its own or because its process ended: see what it said"
                if was_left_by_others(error)
                else "it came in the middle of a pass: the other ranks wait there until this process ends"
            )
            return
        if forwards:
            self.finish_forwards()
        else:
            self.finish()

    def close(self) -> None:
        """Leave the model as it was found."""
        if self._reduces != "each":
            self._reduce(True)
        for module in self._shards:
            module.reshard()  # a forward that no backward followed leaves its weights whole

    def _reduce(self, wanted: bool) -> None:
        """Whether the backwards that follow reduce gradients."""
        for module in self._shards:
            module.set_requires_gradient_sync(wanted, recurse=False)

    def _begin(self) -> None:
        """A slot begins."""
        if self._reduces == "last" and self._at == self._last_backward:
            self._reduce(True)
        self._at += 1
        self._within_pass = True

    def _meet(self) -> None:
        """Run a slot without a pass of one's own."""
        kind = self._slots[self._at].kind
        self._begin()
        if kind == "backward":
            backward_of_nothing(self._waiting.pop() if self._waiting else self._own.pop())
        else:
            scores = self._stand_in.forward(graph=kind == "forward")
            if kind == "forward":
                self._waiting.append(scores.live)
        self._within_pass = False


def agreed_order(ranks: Ranks, plan: Plan, modules: Sequence[Any], *, gradients: bool, reduces: Reduces) -> list[Turn]:
    """The common order of all ranks' passes over their plans; a collective call.

    Args:
        modules: those that FSDP2 has sharded.
        gradients: whether the parts go backward too.
    """
    own = spelled(event.kind for event in plan.events()) if gradients else "P" * plan.num_parts
    waits = gradients and reduces != "never" and bool(waiting_gradients(*modules))
    _, told = ranks.agree("an order of passes", lambda: (None, (own, waits)))
    turns = common_order([order for order, _ in told])
    if not turns and any(waits for _, waits in told):
        return [Turn("forward", ()), Turn("backward", ())]  # nobody's, for what earlier calls have left to reduce
    return turns


@contextmanager
def in_step(lockstep: Lockstep | None, *, forwards: bool = False) -> Iterator[None]:
    """A walk whose passes are met by those of the other ranks to the end, also where this rank's own went wrong.

    Args:
        forwards: only up to the backwards, which come later.
    """
    if lockstep is None:
        yield
        return
    try:
        yield
        if forwards:
            lockstep.finish_forwards()
        else:
            lockstep.finish()
    except BaseException as error:
        lockstep.abandon(error, forwards=forwards)
        raise
    finally:
        lockstep.close()


class _Slot(NamedTuple):
    kind: Kind
    own: bool

"""FSDP2: the common order of passes.

Under FSDP2 every forward and backward of the model is a collective call. All ranks agree on one sequence of passes
that contains every rank's own passes in order. Where a rank has no pass of its own, it runs a stand-in: a forward
over one token with coefficients of zero, and later a backward with gradients of zero. A stand-in gathers and reduces
the same weights as the other ranks' passes and adds zeros, so results do not change. Context-parallel ranks have the
same passes, so they run stand-ins together, each over the whole token.

    rank 0:        forward a    stand-in     backward a   stand-in
    rank 1:        forward b    forward c    backward c   backward b

An image encoder runs within the first pass, on all ranks if one has images. Its backward waits for the gradients of all
parts: it joins that of one more stand-in, the last pass of all ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.generic import ModelOutput

from treetrain.core.engine.engine_model import Call
from treetrain.core.engine.extension import Extension, ModelPass, Reduces
from treetrain.core.engine.ranks import Ranks
from treetrain.core.head.lm_head import Scores
from treetrain.core.planning.devices import MEMORY_MARGIN
from treetrain.core.planning.plan import Plan
from treetrain.core.tree.layout import PackedLayout, pack
from treetrain.core.tree.token_tree import TokenTree
from treetrain.parallel.collective_order import Kind, Turn, candidates, choose, common_order, offers_of
from treetrain.parallel.process_group import output_dtype, sharded_modules, waiting_gradients


class PassesTogether(Extension):
    """Keeps ranks together that wait for one another within passes, when one of them fails.

    Args:
        ranks: those that run every pass together.
        others: all ranks that must know when this one leaves them in the middle of a pass.
    """

    within_hooks = True

    def __init__(self, ranks: Ranks, *others: Ranks):
        self._ranks, self._others = ranks, others
        self._error: Exception | None = None
        """The loss's first error, kept while other ranks wait in later passes."""

    @contextmanager
    def around(self, *, graph: bool, backward: bool) -> Iterator[None]:
        # All ranks stop here, before hooks see the gradients of a step that has failed on one of them.
        with self._ranks.together("the passes"):
            try:
                yield
            except BaseException as error:  # in the middle of a pass
                for ranks in self._others:
                    ranks.lost = True
                self._ranks.leave(error)
                raise
            if self._error is not None:
                error, self._error = self._error, None
                raise error

    def postpones(self, error: Exception) -> bool:
        self._error = self._error or error
        return True


class ShardedEncoder(Extension):
    """Modules beside the layers that all ranks run once in a run, within its first pass, if one of them has to."""

    def offer(self) -> Any:
        """Return what the other ranks must know before a run."""
        raise NotImplementedError

    def agree(self, offers: Sequence[Any], *, gradients: bool) -> bool:
        """Prepare a run by the offers of all ranks; return whether the modules run backward in it."""
        raise NotImplementedError

    def attached(self) -> AbstractContextManager[None]:
        """Inside the block, which holds all passes, these take what the modules have made."""
        raise NotImplementedError

    def gradients(self) -> list[tuple[Tensor, Tensor]]:
        """Return what the modules have made, with its gradients, when all other backwards are over."""
        raise NotImplementedError


class Sharded(Extension):
    """Steps one rank through the common order of passes."""

    within_hooks = True

    def __init__(
        self, model: nn.Module, value_head: nn.Module | None, ranks: Ranks, encoder: ShardedEncoder | None = None
    ):
        self._model, self._ranks, self._encoder = model, ranks, encoder
        self._shards = sharded_modules(model, value_head)
        self._turns: list[Turn] = []
        self._next = 0
        self._idle_outputs: list[list[Tensor]] = []
        """Outputs of the stand-ins that have not run backward yet."""

    def begin(self, plan: Plan, *, gradients: bool, idle_pass: Callable[[], Scores]) -> None:
        """Agree on the order of a run's passes; a collective call."""
        self._idle_pass, self._next = idle_pass, 0
        own = plan.phases if gradients else ("", "P" * plan.num_parts)
        waits = gradients and self.reduces != "never" and bool(waiting_gradients(*self._shards))
        answers = self._ranks.exchange((own, waits, None if self._encoder is None else self._encoder.offer()))
        # No rank knows its loss, and runs backward, before all have been scored.
        scored, rest = (common_order(orders) for orders in zip(*(o for o, *_ in self._ranks.per_data_rank(answers))))
        self._encodes = self._encoder is not None and self._encoder.agree([o for *_, o in answers], gradients=gradients)
        if self._encodes or (not scored + rest and any(waits for _, waits, _ in answers)):
            # Stand-ins, which run the encoder backward, or reduce what earlier calls left.
            rest += [Turn("forward", ()), Turn("backward", ())]
        self._turns, self._scored = scored + rest, len(scored)
        self._last_backward = max((n for n, turn in enumerate(self._turns) if turn.kind == "backward"), default=-1)

    @contextmanager
    def around(self, *, graph: bool, backward: bool) -> Iterator[None]:
        if self.reduces != "each":
            self._set_reducing(False)
        try:
            with nullcontext() if self._encoder is None else self._encoder.attached():
                yield
                # A block without backwards ends when all are scored; the rest comes in a later block.
                self._stand_in_until(lambda _: graph and not backward and self._next >= self._scored)
            if not graph or backward:
                self._idle_outputs.clear()
        finally:
            if self.reduces != "each":
                self._set_reducing(True)
            for module in self._shards:
                module.reshard()  # a forward without a backward leaves its weights unsharded

    def before_forward(self, model_pass: ModelPass) -> None:
        if not model_pass.idle:
            self._reach("forward" if model_pass.part.graph else "prefill")
        model_pass.request = replace(
            model_pass.request, reaches_all_weights=True, carrier_dtype=output_dtype(self._model)
        )

    def after_forward(self, model_pass: ModelPass, outputs: ModelOutput, scores: Scores) -> Scores:
        return replace(scores, carrier=outputs["logits"])

    def before_backward(self) -> None:
        self._reach("backward")

    def _reach(self, kind: Kind) -> None:
        """Run stand-ins up to this rank's next pass, which must be of this kind."""
        self._stand_in_until(lambda turn: self._ranks.data_rank in turn.takers)
        turn = self._turns[self._next].kind if self._next < len(self._turns) else None
        assert turn == kind, f"pass {self._next} of the common order is a {turn}, not a {kind}"
        self._take_turn()

    def _stand_in_until(self, reached: Callable[[Turn], bool]) -> None:
        """Run stand-ins up to the first turn for which `reached` is true."""
        while self._next < len(self._turns) and not reached(self._turns[self._next]):
            kind = self._turns[self._next].kind
            self._take_turn()
            if kind == "backward":
                # This rank's own passes are over, and it has stood in for more forwards than backwards.
                pairs = [(output, torch.zeros_like(output)) for output in self._idle_outputs.pop()]
                if self._encodes and self._next == len(self._turns):
                    assert self._encoder is not None
                    pairs += self._encoder.gradients()
                if pairs:
                    with torch.autocast(pairs[0][0].device.type, enabled=False):
                        torch.autograd.backward([x for x, _ in pairs], [grad for _, grad in pairs])
                continue
            with torch.set_grad_enabled(kind == "forward"):
                scores = self._idle_pass()
            if kind == "forward":
                self._idle_outputs.append(scores.live)

    def _take_turn(self) -> None:
        if self.reduces == "last" and self._next == self._last_backward:
            self._set_reducing(True)
        self._next += 1

    def _set_reducing(self, wanted: bool) -> None:
        for module in self._shards:
            module.set_requires_gradient_sync(wanted, recurse=False)


def plan_together(
    call: Call, tree: TokenTree, plan: Plan, *, weighted: bool, apart: bool
) -> tuple[TokenTree, Plan, Reduces]:
    """Offer several plans on every rank, and take the combination with the fastest common order; a collective call.

    Args:
        tree, plan: this rank's own.
        weighted: whether only predictions with a loss weight are computed.
        apart: whether runs may be offered that share nothing.

    Returns:
        this rank's tree and plan, and which of its backwards reduce gradients.
    """

    def laid_out(tree: TokenTree) -> PackedLayout:
        return pack(tree, tree.trained_edges()[0] > 0) if weighted else pack(tree)

    ranks = call.sharing.ranks
    free = call.free / MEMORY_MARGIN if call.budget is None and call.free is not None else None
    own = candidates(tree, plan, laid_out, whole_rows=not weighted, apart=apart, free_bytes=free)
    room = [call.keeps_gradients(way.plan) for way in own]
    answers = ranks.per_data_rank(ranks.exchange((room, offers_of(own))))
    numbers = choose([offers for _, offers in answers])
    at_last = all(has[number] for (has, _), number in zip(answers, numbers))
    way = own[numbers[ranks.data_rank]]
    return way.tree, way.plan, "last" if at_last else "each"

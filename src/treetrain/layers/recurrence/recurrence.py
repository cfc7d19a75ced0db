"""Recurrent layers: their states travel from part to part beside the KV cache."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

from torch import nn

from treetrain.core.engine.extension import Extension, ModelPass
from treetrain.core.head.lm_head import Scores
from treetrain.core.hf.capability import model_device
from treetrain.core.hf.tree_mode import instance_of
from treetrain.core.planning.plan import Plan
from treetrain.layers.recurrence.paths import Paths, StateCache
from treetrain.layers.recurrence.recurrent_layers import tree_recurrence
from treetrain.parallel.context_parallel import Share


class Recurrence(Extension):
    """Gives recurrent layers the paths of a part, and the states that it continues.

    Args:
        may_need_gradients: whether something trained may come before the states of a layer.
    """

    def __init__(self, model: nn.Module, may_need_gradients: Callable[[Hashable], bool]):
        self._model, self._may_need_gradients = model, may_need_gradients
        self._states: StateCache | None = None

    def begin(self, plan: Plan, *, gradients: bool, idle_pass: Callable[[], Scores]) -> None:
        self._states = StateCache(
            plan.layout.num_tokens,
            plan.cached_states,
            plan.attach,
            gradients=gradients,
            may_need=lambda key: self._may_need_gradients(key[0]),
        )

    @contextmanager
    def around(self, *, graph: bool, backward: bool) -> Iterator[None]:
        try:
            with tree_recurrence(self._model):
                yield
        finally:
            if backward or not graph:  # the run is over, but a score holds its extensions until it is dropped
                self._states = None

    def before_forward(self, model_pass: ModelPass) -> None:
        part, states = model_pass.part, None
        if part.cache is not None and self._states is not None:
            self._states.follow(part.cache.row_of, part.tokens)
            states = self._states.view(part.tokens, part.attach)
        exchange = instance_of(Share, model_pass.extras)
        model_pass.extras.append(Paths(part.piece.layout, model_device(self._model), states, exchange=exchange))
        model_pass.keywords["attention_mask"] = None  # recurrent layers would look at a mask

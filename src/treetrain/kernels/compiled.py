"""Decoder layers that run compiled: before the first step that needs them, and what they save for backward.

PyTorch compiles a layer anew for passes without gradient and for parts of one token, and for other dtypes, autocast or
checkpointing. Lengths are dynamic, so one short row stands for all.

A compiled layer saves less for backward than its operations would one by one: what is cheap to compute again is not
kept. How much is the compiler's choice, so it is measured, on rows of two lengths; plans then count on it.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from treetrain.core.engine.deferred import gradients_aside
from treetrain.core.engine.engine_model import Call, EngineModel, Feature, StepBalance
from treetrain.core.engine.executor import Executor, PassCounts
from treetrain.core.engine.extension import Extension
from treetrain.core.engine.loss_gradients import KnownGradients
from treetrain.core.engine.model_passes import ModelPasses
from treetrain.core.engine.model_state import harmless
from treetrain.core.engine.parameter_hooks import HooksOnce
from treetrain.core.hf.tree_mode import forward_hooks, hooks_replaced
from treetrain.core.planning.cost import ModelCounts
from treetrain.core.planning.partition import whole_trees
from treetrain.core.planning.plan import Plan
from treetrain.core.tree.layout import pack
from treetrain.core.tree.token_tree import TokenTree, build_tree
from treetrain.core.tree.trajectory import Trajectory

COPIED = 1 << 20
"""Buffers of up to this many elements are copied."""
_LENGTHS = 32, 96
"""Tokens of the rows that are measured."""
COMPILATIONS = 64
"""Recompilation limit; PyTorch counts kinds of layers, dtypes and passes with and without gradients together."""


@contextmanager
def compiled_layers(model: nn.Module, compiled: dict[nn.Module, Callable[..., object]]) -> Iterator[None]:
    """Run decoder layers compiled within the block. Enter it last, when all hooks of the pass are in place.

    A layer's norms, rotary embedding, residuals and MLP read and write the hidden states a dozen times; compiled, a few
    times. They do not depend on the tree. Tree attention does, so it runs outside of the compiled graphs. Lengths are
    dynamic: one compilation of each kind of layer serves all parts.

    Args:
        compiled: the caller's cache of compiled modules; it keeps the model alive.

    A hook or a replaced forward (a router that records its choices, a recurrent layer) may run other code in every
    pass. A layer with one inside, or with a module that the user has compiled, is not compiled as a whole; those of its
    children that have none are. So are the children of a checkpointed layer: in recent releases of transformers its
    forward calls the checkpointing function, and PyTorch compiles nothing that breaks the graph inside of that.
    """
    with ExitStack() as stack:
        stack.enter_context(torch._dynamo.config.patch(recompile_limit=COMPILATIONS))
        for layer in model.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                whole = _is_plain(layer) and not (layer.gradient_checkpointing and layer.training)
                for module in [layer] if whole else filter(_is_plain, layer.children()):
                    if module not in compiled:
                        compiled[module] = torch.compile(module._call_impl, dynamic=True)
                    stack.callback(setattr, module, "_compiled_call_impl", None)
                    module._compiled_call_impl = compiled[module]
        yield


def _is_plain(module: nn.Module) -> bool:
    return not any(
        "forward" in vars(inner)
        or inner._compiled_call_impl is not None
        or inner._forward_hooks
        or inner._forward_pre_hooks
        or inner._backward_hooks
        or inner._backward_pre_hooks
        for inner in module.modules()
    )


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Restore the buffers after the block."""
    places = [(module._buffers, name, x) for module in model.modules() for name, x in module._buffers.items()]
    kept = [(x, x.clone()) for _, _, x in places if x is not None and x.numel() <= COPIED]
    try:
        yield
    finally:
        for holder, name, x in places:
            holder[name] = x
        with torch.no_grad():
            for x, values in kept:
                if not torch.equal(x, values):
                    x.copy_(values)


class CompiledLayers(Extension):
    """Runs decoder layers compiled.

    Args:
        compiled: the engine's cache of compiled modules.
    """

    def __init__(self, model: nn.Module, compiled: dict[nn.Module, Callable[..., object]]):
        self._model, self._compiled = model, compiled

    @contextmanager
    def around(self, *, graph: bool, backward: bool) -> Iterator[None]:
        with compiled_layers(self._model, self._compiled):
            yield


class CompiledFeature(Feature):
    """Runs decoder layers compiled, and counts what they save for backward.

    Args:
        wanted: whether layers run compiled; None: on a GPU, unless they communicate by hooks.
    """

    def __init__(self, wanted: bool | None):
        self._wanted = wanted
        self._compiled: dict[nn.Module, Callable[..., object]] = {}
        self._saved: dict[tuple[object, ...], float] = {}
        """The bytes per token that compiled layers, and what is around them, save for backward."""

    def runs(self, model: EngineModel | Call) -> bool:
        """Whether layers run compiled."""
        default = model.device.type == "cuda" and model.sharing.may_compile
        return default if self._wanted is None else self._wanted

    def can_warm_up(self, call: Call) -> bool:
        """Whether layers run compiled and a short row can stand for any; a loss of the routers is over all rows."""
        return self.runs(call) and call.capabilities.scores_tokens and not call.capabilities.auxiliary

    def warm_up(self, call: Call, passes_type: type[ModelPasses], plan: Plan | None) -> float:
        """Compile what a plan's passes need, or all kinds of passes but those of one token; returns the seconds."""
        if not self.can_warm_up(call):
            return 0.0
        start = time.perf_counter()
        trains = call.prepared.live
        kinds = {(trains, 2), (False, 2)}
        if plan is not None:
            lengths = {min(int(size), 2) for size in plan.sizes}
            prefills = {min(len(plan.prefill_tokens(number)), 2) for number in range(plan.num_prefills)}
            scored = lengths if plan.runs_twice.any() or not trains else set[int]()
            kinds = {(True, size) for size in lengths if trains} | {(False, size) for size in prefills | scored}
        for graph, size in sorted(kinds, reverse=True):
            _run(call, passes_type, _LENGTHS[0] if size > 1 else 1, graph=graph)
        self.before_plan(call, passes_type)
        if call.device.type == "cuda":
            torch.cuda.synchronize(call.device)
        return time.perf_counter() - start

    def before_plan(self, call: Call, passes_type: type[ModelPasses]) -> None:
        """Measure the bytes per token that a pass saves for backward, LM head excluded, once for a dtype.

        Checkpointed layers save their input alone.
        """
        model = call.prepared
        if not (self.can_warm_up(call) and model.live) or model.counted is None:
            return
        counts = model.counted.counts
        if counts.checkpointing or self._place(model, counts) in self._saved:
            return
        _run(call, passes_type, _LENGTHS[0], graph=True)  # compiles
        short, long = (_saved_by(call, passes_type, tokens) for tokens in _LENGTHS)
        self._saved[self._place(model, counts)] = (long - short) / (_LENGTHS[1] - _LENGTHS[0])

    def counts(self, model: EngineModel, counts: ModelCounts) -> ModelCounts:
        """Counts with the bytes that compiled layers were measured to save, if they have been."""
        saved = self._saved.get(self._place(model, counts)) if self.runs(model) else None
        return counts if saved is None else counts.saving(saved)

    def _place(self, model: EngineModel, counts: ModelCounts) -> tuple[object, ...]:
        """The key of the measured bytes: the device, and by its counts the model, its dtype and checkpointing."""
        return model.device, counts.dtype_bytes, counts.saved_token, counts.saved_layers, counts.saved_pass

    def extension(
        self, call: Call, tree: TokenTree, *, balanced: bool, scale: float, balance: StepBalance | None
    ) -> Extension | None:
        return CompiledLayers(call.model, self._compiled) if self.runs(call) else None


def _saved_by(call: Call, passes_type: type[ModelPasses], tokens: int) -> int:
    saved: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        _run(call, passes_type, tokens, graph=True)
    return sum(saved.values())


def _run(call: Call, passes_type: type[ModelPasses], tokens: int, *, graph: bool) -> None:
    """Run a row of which the last token is predicted. Gradients, hooks and buffers do not see it."""
    row = Trajectory(np.zeros(tokens, np.int32), loss_weights=np.arange(tokens) == tokens - 1)
    tree = build_tree([row])
    layout = pack(tree, tree.trained_edges()[0] > 0, trim=False)
    table = call.table(layout, entropy=False)
    gradients = KnownGradients(table, torch.zeros_like(table.logprobs)) if graph else None
    with ExitStack() as stack:
        stack.enter_context(buffers_kept(call.model))
        stack.enter_context(gradients_aside(call.prepared.parameters))
        stack.enter_context(hooks_replaced(forward_hooks(call.prepared.modules), _without_effect))
        extensions = [x for x in call.extensions(tree, balanced=False) if not isinstance(x, HooksOnce)]
        passes = passes_type(call, extensions, PassCounts(), table, gradients)
        executor = Executor(whole_trees(layout, tokens), passes, gradients=graph)
        executor.train() if graph else executor.score()


def _without_effect(hook: Callable[..., object]) -> Callable[..., object]:
    """A hook in place of a user's. Some hook stays: layers that have one are compiled in pieces, here as in steps."""
    return hook if harmless(hook) else lambda *_, **__: None

"""Compiles decoder layers before the first step that needs them, and measures what they save for backward.

PyTorch compiles a layer anew for passes without gradient and for parts of one token, and for other dtypes, autocast or
checkpointing. Lengths are dynamic, so one short row stands for all.

A compiled layer saves less for backward than its operations would one by one: what is cheap to compute again is not
kept. How much is the compiler's choice, so it is measured, on rows of two lengths; plans then count on it.
"""

import time
from contextlib import ExitStack

import numpy as np
import torch
from torch import Tensor

from treetrain.check.first_use import buffers_kept
from treetrain.core.engine.deferred import gradients_aside
from treetrain.core.engine.engine_model import HARMLESS_HOOKS, EngineModel
from treetrain.core.engine.executor import Executor, PassCounts
from treetrain.core.engine.loss_gradients import KnownGradients
from treetrain.core.engine.model_passes import ModelPasses
from treetrain.core.engine.parameter_hooks import HooksOnce
from treetrain.core.planning.partition import whole_trees
from treetrain.core.planning.plan import Plan
from treetrain.core.tree.layout import pack
from treetrain.core.tree.token_tree import build_tree
from treetrain.core.tree.trajectory import Trajectory

_LENGTHS = 32, 96
"""Tokens of the rows that are measured."""


def warm_up(engine: EngineModel, passes_type: type[ModelPasses], plan: Plan | None) -> float:
    """Compile what a plan's passes need, or all kinds of passes but those of one token; returns the seconds."""
    start = time.perf_counter()
    trains = engine.live
    kinds = {(trains, 2), (False, 2)}
    if plan is not None:
        lengths = {min(int(size), 2) for size in plan.sizes}
        prefills = {min(len(plan.prefill_tokens(number)), 2) for number in range(plan.num_prefills)}
        scored = lengths if plan.runs_twice.any() or not trains else set[int]()
        kinds = {(True, size) for size in lengths if trains} | {(False, size) for size in prefills | scored}
    for graph, size in sorted(kinds, reverse=True):
        _run(engine, passes_type, _LENGTHS[0] if size > 1 else 1, graph=graph)
    measure(engine, passes_type)
    if engine.device.type == "cuda":
        torch.cuda.synchronize(engine.device)
    return time.perf_counter() - start


def measure(engine: EngineModel, passes_type: type[ModelPasses]) -> None:
    """Measure the bytes per token that a pass saves for backward, LM head excluded, once for a dtype.

    Checkpointed layers save their input alone.
    """
    counted = engine.counted
    if not (engine.live and engine.can_warm_up) or counted is None or counted.counts.checkpointing:
        return
    if engine.measured(counted.counts) is counted.counts:
        _run(engine, passes_type, _LENGTHS[0], graph=True)  # compiles
        short, long = (_saved_by(engine, passes_type, tokens) for tokens in _LENGTHS)
        engine.set_measured(counted.counts, (long - short) / (_LENGTHS[1] - _LENGTHS[0]))


def _saved_by(engine: EngineModel, passes_type: type[ModelPasses], tokens: int) -> int:
    saved: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        _run(engine, passes_type, tokens, graph=True)
    return sum(saved.values())


def _run(engine: EngineModel, passes_type: type[ModelPasses], tokens: int, *, graph: bool) -> None:
    """Run a row of which the last token is predicted. Gradients, hooks and buffers do not see it."""
    row = Trajectory(np.zeros(tokens, np.int32), loss_weights=np.arange(tokens) == tokens - 1)
    tree = build_tree([row])
    layout = pack(tree, tree.trained_edges()[0] > 0, trim=False)
    table = engine.table(layout, entropy=False)
    gradients = KnownGradients(table, torch.zeros_like(table.logprobs)) if graph else None
    with ExitStack() as stack:
        stack.enter_context(buffers_kept(engine.model))
        stack.enter_context(gradients_aside(engine.parameters))
        for module in engine.modules:
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                own = {n: hook for n, hook in hooks.items() if getattr(hook, "__code__", None) not in HARMLESS_HOOKS}
                stack.callback(hooks.update, own)
                hooks.update(dict.fromkeys(own, _no_hook))
        extensions = [x for x in engine.extensions(tree, balanced=False) if not isinstance(x, HooksOnce)]
        passes = passes_type(engine, extensions, PassCounts(), table, gradients)
        executor = Executor(whole_trees(layout, tokens), passes, gradients=graph)
        executor.train() if graph else executor.score()


def _no_hook(*_: object, **__: object) -> None:
    """In place of a user's hook."""

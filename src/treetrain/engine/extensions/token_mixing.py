"""Finds adapters, hooks and replaced forwards that mix tokens, by running them.

On a tree one call of a layer holds the tokens of many rows. Attention and recurrences follow the tree; everything else
must treat every token alone. Tests show that transformers' own layers do. Adapters, forward hooks and forwards that
users add are tried: a small forest runs through the model, and at each such module a token of the module's input is
changed. If the output moves for a token that does not see the changed one, rows would be computed from one another's
tokens, and the module is refused.

A new adapter often adds zero, so the probe gives its parameters random values during these calls. Most hooks only
record: only one that has changed something in a real pass is run again. A hook or forward may act in training only, or
where gradients are computed, so each of these modes is tried when it first comes.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import copy
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from treetrain.engine.engine_model import EngineModel
from treetrain.engine.executor import Executor, PassCounts
from treetrain.engine.extensions.process_group import is_partitioned
from treetrain.engine.model_passes import DeviceLayout, ModelPasses
from treetrain.errors import UnsupportedModel
from treetrain.models.capability import causal_lm
from treetrain.models.tree_mode import TreeRun
from treetrain.planning.partition import whole_trees
from treetrain.tree.layout import pack
from treetrain.tree.token_tree import build_tree

_ROWS = [[0, 1, 2], [0, 3, 4], [5, 6]]
_TOKENS, _OTHER_ID = 7, 7
_SIZES = 1.0, 0.1
"""Standard deviations of random adapter weights. Large ones show small effects in bfloat16. Adapters that make matrices
orthogonal by a series are finite only for small ones."""
_TOLERANCE = 1e-5
"""Relative difference that another grouping of experts' products may make in float32."""
_BUFFER_SIZE = 1 << 20
_REMEMBERED = 16
"""Additions remembered for each module: four modes of some adapters. Hooks that are set anew in every step add more."""
_ACCEPTED: "WeakKeyDictionary[nn.Module, list[_Additions]]" = WeakKeyDictionary()
"""The additions that were accepted, by module."""


@contextmanager
def token_mixing_checked(engine: EngineModel) -> Iterator[set[nn.Module]]:
    """Check what users put on the model's layers, unless it was checked before; collective for a sharded model.

    Adapters and forwards are probed before the block, hooks after it if they have changed anything in its passes. The
    yielded set then holds the modules whose hooks did not run in the block and are still to be checked.

    Raises:
        UnsupportedModel: an adapter layer, hook or forward mixes tokens; names it.
    """
    sharing, unseen = engine.sharing, set[nn.Module]()
    if not sharing.same_rows.alone:  # these ranks divide the tokens or the weights of a call
        yield unseen
        return
    additions = _additions(engine).items()
    new = {name: (module, what) for name, (module, what) in additions if what not in _ACCEPTED.get(module, ())}
    names = {name for name, (_, what) in new.items() if what.adapter or what.forward}
    if sharing.collective:
        names = set().union(*sharing.ranks.exchange(names))
    if names:
        modules = {name: module for name, module in engine.model.named_modules() if name in names}
        with sharing.passes_with.together("probing layers"):
            _probe(engine, modules)
    with _observed([module for module, what in new.values() if what.hooks]) as (called, changing):
        yield unseen
    if changing:
        _probe(engine, {name: module for name, (module, _) in new.items() if module in changing})
    for module, what in new.values():
        if what.hooks and module not in called:
            unseen.add(module)
        else:
            _ACCEPTED[module] = [*_ACCEPTED.get(module, ()), what][-_REMEMBERED:]


class _Additions(NamedTuple):
    """An adapter, a forward and hooks that users have added to a module."""

    adapter: str | None
    """The names of the active and of the merged adapters."""
    forward: object
    """A forward of the instance: a weak reference, since its address may be another one's later."""
    hooks: tuple[int, ...]
    """The numbers of the hooks' handles; no two hooks of a process have the same."""
    mode: tuple[bool, bool] | None
    """Whether the module is in training mode, and whether gradients are computed; None if it has an adapter alone."""


def _additions(engine: EngineModel) -> dict[str, tuple[nn.Module, _Additions]]:
    """The modules to which users have added something, by name."""
    model, head, graph, found = engine.model, engine.capabilities.head, torch.is_grad_enabled(), {}
    whole = {model, causal_lm(model)}  # their outputs are compared with the head's in every pass
    for name, module in model.named_modules():
        fields, adapter, forward, hooks = vars(module), None, None, ()
        if "_active_adapter" in fields and not fields.get("_disable_adapters"):
            adapter = repr((fields["_active_adapter"], fields.get("merged_adapters")))
        if not engine.sharing.collective and module is not head:  # `fully_shard` has hooks of its own
            forward = _reference(fields["forward"]) if "forward" in fields else None
            hooks = engine.state.hooks.get(id(module), ())
        if (adapter or forward or hooks) and module not in whole and not whole & set(fields["_modules"].values()):
            mode = (module.training, graph) if forward or hooks else None
            found[name] = module, _Additions(adapter, forward, hooks, mode)
    return found


def _reference(forward: object) -> object:
    try:
        return ref(forward)
    except TypeError:  # a function in C, which nobody deletes
        return forward


@contextmanager
def _observed(modules: list[nn.Module]) -> Iterator[tuple[set[nn.Module], set[nn.Module]]]:
    """Yield the sets of those modules whose hooks run within the block, and whose hooks change an input or output."""
    called, changing = set[nn.Module](), set[nn.Module]()

    def observe(module: nn.Module, hook: Callable[..., object], *given: object, **options: object) -> object:
        tensors = [x for x in _tensors(given) if not x.is_inference()]
        versions = [x._version for x in tensors]
        called.add(module)
        result = hook(*given, **options)
        if result is not None or versions != [x._version for x in tensors]:
            changing.add(module)
        return result

    replaced = []
    for module in modules:
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for number, hook in hooks.items():
                replaced.append((hooks, number, hook))
                hooks[number] = partial(observe, module, hook)
    try:
        yield called, changing
    finally:
        for hooks, number, hook in replaced:
            if number in hooks:
                hooks[number] = hook


@contextmanager
def _other_hooks_off(model: nn.Module, modules: Collection[nn.Module]) -> Iterator[None]:
    """Remove the forward hooks of all other modules within the block: hooks that record should see real passes only."""
    off = []
    for module in model.modules():
        for hooks in () if module in modules else (module._forward_pre_hooks, module._forward_hooks):
            if hooks:
                off.append((hooks, dict(hooks)))
                hooks.clear()
    try:
        yield
    finally:
        for hooks, own in off:
            hooks.update(own)


def _probe(engine: EngineModel, modules: dict[str, nn.Module]) -> None:
    layout = pack(build_tree(_ROWS), trim=False)
    changed = int(np.flatnonzero(layout.input_ids == 1)[0])
    tokens = np.arange(_TOKENS)
    apart = torch.from_numpy((tokens < changed) | (tokens >= layout.ends[changed]))
    head, model, sharded = engine.capabilities.head, engine.model, engine.sharing.collective
    probe = _Probe(modules, head, changed, apart, graph=torch.is_grad_enabled() and not sharded)
    if any(map(is_partitioned, model.parameters())):
        from treetrain.engine.extensions.zero import called_alone

        probe.called_alone = called_alone
    with ExitStack() as stack:
        stack.enter_context(buffers_kept(model))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        if not sharded:
            stack.enter_context(_other_hooks_off(model, modules.values()))
        config = causal_lm(model).config.get_text_config()
        if getattr(config, "output_router_logits", False):  # transformers collects these by hooks
            config.output_router_logits = False
            stack.callback(setattr, config, "output_router_logits", True)
        plan, counts = whole_trees(layout, _TOKENS), PassCounts()
        uncompiled = copy(engine)
        uncompiled.compiles = False
        extensions = uncompiled.extensions(build_tree(_ROWS), balanced=False)
        passes = _ProbePasses(uncompiled, extensions, counts, None)
        passes.probe = probe
        Executor(plan, passes, gradients=False).score()
        if probe.of_head is not None and not sharded:  # its forward was replaced during the pass
            probe.compare(probe.names[head], head, *probe.of_head)


class _ProbePasses(ModelPasses):
    """Passes in which some modules are called again."""

    probe: "_Probe"

    def call(self, layout: DeviceLayout, run: TreeRun, keywords: dict[str, Any]) -> Any:
        with self.probe.installed():
            return super().call(layout, run, keywords)

    def check_layers(self, run: TreeRun) -> None:
        """Layers are called several times."""


class _Probe:
    """Calls modules again where they are called.

    Args:
        changed: the token whose input is changed.
        apart: the tokens that do not see it.
        graph: whether the modules compute gradients, since hooks and forwards may ask for that.
    """

    called_alone: Callable[[nn.Module], AbstractContextManager[object]] = nullcontext
    """Within it a module is called outside of a call of the model."""

    def __init__(
        self, modules: dict[str, nn.Module], head: nn.Module, changed: int, apart: Tensor, *, graph: bool = False
    ):
        self.names = {module: name for name, module in modules.items()}
        self.of_head: tuple[tuple[object, ...], dict[str, object]] | None = None
        self._head, self._changed, self._apart, self._graph = head, changed, apart, graph
        self._seen: set[nn.Module] = set()
        self._comparing = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Compare at the first call of each module within the block."""
        with ExitStack() as stack:
            for module in self.names:
                compiled = vars(module).get("_compiled_call_impl")
                if compiled is None:
                    stack.callback(delattr, module, "_compiled_call_impl")
                else:
                    stack.callback(setattr, module, "_compiled_call_impl", compiled)
                module._compiled_call_impl = partial(self._called, module, compiled or module._call_impl)
            yield

    def _called(self, module: nn.Module, call: Callable[..., object], *args: object, **kwargs: object) -> object:
        if self._comparing or module in self._seen:
            return call(*args, **kwargs)
        self._seen.add(module)
        if module is self._head:
            self.of_head = args, kwargs
            return call(*args, **kwargs)
        output = call(*args, **kwargs)
        self._comparing = True
        try:
            self.compare(self.names[module], module, args, kwargs)
        finally:
            self._comparing = False
        return output

    def compare(self, name: str, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Raise UnsupportedModel if a token's output depends on one that it does not see."""
        generator = torch.Generator().manual_seed(0)
        changed = self._changed_input(args, kwargs, generator)
        if changed is None:
            return
        own = _adapter_weights(module)
        for size in _SIZES if own else (0.0,):
            weights = {
                n: torch.randn(getattr(p, "ds_shape", p.shape), generator=generator).mul(size).to(p)
                for n, p in own.items()
            }
            with torch.set_grad_enabled(self._graph), self.called_alone(module):
                before, after = [functional_call(module, weights, *given) for given in ((args, kwargs), changed)]
            moved = max((self._moved(x, y) for x, y in zip(_tensors(before), _tensors(after))), default=0.0)
            if moved:
                raise UnsupportedModel(_message(name, module, moved))

    def _changed_input(
        self, args: tuple[object, ...], kwargs: dict[str, object], generator: torch.Generator
    ) -> tuple[tuple[object, ...], dict[str, object]] | None:
        """The arguments with another input at the changed token; None if the module is given no tokens."""
        for key, x in [*enumerate(args), *kwargs.items()]:
            if not isinstance(x, Tensor) or (by_token := _by_token(x)) is None:
                continue
            if x.is_floating_point():
                noise = torch.randn(by_token.shape[1:], generator=generator).to(x)
                entry = by_token[self._changed] + noise * (4 * by_token.float().std().to(x) + 1)
            else:
                entry = torch.full_like(by_token[self._changed], _OTHER_ID)
            new = by_token.clone()
            new[self._changed] = entry
            new = new.view_as(x)
            if isinstance(key, int):
                return (*args[:key], new, *args[key + 1 :]), kwargs
            return args, {**kwargs, key: new}
        return None

    def _moved(self, before: Tensor, after: Tensor) -> float:
        """By how much outputs move of tokens that do not see the changed one, relative to the largest; 0: by rounding.

        Numbers that are not finite tell nothing.
        """
        x, y = _by_token(before.detach()), _by_token(after.detach())
        if x is None or y is None or x.shape != y.shape or not x.is_floating_point():
            return 0.0
        apart = self._apart.to(x.device)
        largest, moved = float(x[apart].abs().max()), float((x[apart] - y[apart]).abs().max())
        if not np.isfinite(largest + moved) or moved <= max(_TOLERANCE, 2 * torch.finfo(x.dtype).eps) * largest:
            return 0.0
        return moved / largest if largest else np.inf


def _message(name: str, module: nn.Module, moved: float) -> str:
    kind = f"{type(module).__module__}.{type(module).__qualname__}".removeprefix("peft.tuners.")
    fields = vars(module)
    hooks = [*fields["_forward_pre_hooks"].values(), *fields["_forward_hooks"].values()]
    if "_active_adapter" in fields:
        what, cure = f"the adapter layer {name} ({kind})", "Use an adapter that treats every token alone, such as LoRA."
    else:
        own = ", ".join(getattr(hook, "__qualname__", type(hook).__name__) for hook in hooks) or "a forward of its own"
        what, cure = f"{name} ({kind}) with {own}", "Remove it, or let it treat every token alone."
    return (
        f"{what} mixes tokens: where one token changes, its output for a token of another row moves by {moved:.1g} of "
        f"its size. On a tree a call holds the tokens of many rows. {cure}"
    )


def _adapter_weights(module: nn.Module) -> dict[str, Tensor]:
    """The floating parameters of an adapter layer, without those of the layer that it adapts."""
    if "base_layer" not in module._modules:
        return {}
    own = {name: p for name, p in module.named_parameters() if not name.startswith("base_layer.")}
    return {name: p for name, p in own.items() if p.is_floating_point()}


def _by_token(x: Tensor) -> Tensor | None:
    """A view whose first dimension is the tokens; None for a tensor without such a dimension."""
    if x.dim() > 1 and x.shape[:2] == (1, _TOKENS):
        return x[0]
    return x if x.dim() and len(x) == _TOKENS else None


def _tensors(output: object) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict):
        output = list(output.values())
    if isinstance(output, tuple | list):
        for part in output:
            yield from _tensors(part)


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Restore the buffers after the block."""
    places = [(module._buffers, name, x) for module in model.modules() for name, x in module._buffers.items()]
    kept = [(x, x._version, x.clone()) for _, _, x in places if x is not None and x.numel() <= _BUFFER_SIZE]
    try:
        yield
    finally:
        for holder, name, x in places:
            holder[name] = x
        with torch.no_grad():
            for x, version, values in kept:
                if x._version != version:
                    x.copy_(values)

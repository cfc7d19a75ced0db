"""The tree run that a module belongs to, for modules that receive no keyword arguments."""

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from treetrain.core.hf.tree_mode import RUN_KEYWORD, TreeRun, replaced

_CHECKPOINT = "_gradient_checkpointing_func"
"""The attribute by which transformers' modules checkpoint a call; newer releases keep a layer's hooks outside of it."""


_ACTIVE_CALLS: "WeakKeyDictionary[nn.Module, list[tuple[object, TreeRun | None]]]" = WeakKeyDictionary()
"""By model, the stack of active calls, outermost first: callee and its run."""


@contextmanager
def enclosing_runs(model: nn.Module, inside: Collection[nn.Module]) -> Iterator[Callable[[], TreeRun | None]]:
    """Yield a function that returns the tree run of the current call; it works within the block.

    Routers and some recurrent layers receive no keyword arguments, but the modules around them do. In backward,
    activation checkpointing calls a part of the model a second time, when other runs may have gone forward meanwhile.
    The second call belongs to the run of the first call, not to the latest run. It may come in a later block than the
    first (a score's backward), so a model has one stack of calls for all blocks.

    The function returns None outside of a known call, for instance when something other than transformers checkpoints
    a part of a layer without the modules around it.

    Args:
        inside: the modules that need the run.
    """
    calls = _ACTIVE_CALLS.setdefault(model, [])
    outside = len(calls)

    def current() -> TreeRun | None:
        return calls[-1][1] if calls else None

    def enter(module: nn.Module, _args: object, kwargs: dict[str, Any]) -> None:
        calls.append((module, kwargs.get(RUN_KEYWORD, current())))

    def leave(module: nn.Module, _args: object, _output: object) -> None:
        if calls and calls[-1][0] is module:  # not if another hook failed before `enter`
            calls.pop()

    def call_in(run: TreeRun | None, function: Callable[..., object], *args: object, **kwargs: object) -> object:
        calls.append((function, run))
        depth = len(calls)
        try:
            return function(*args, **kwargs)
        finally:
            del calls[depth - 1 :]

    def remembering(checkpoint: Callable[..., object]) -> Callable[..., object]:
        """A checkpointing function whose second call belongs to the run of the first."""
        if isinstance(checkpoint, partial):  # transformers reads its keywords
            return partial(remembering(checkpoint.func), *checkpoint.args, **checkpoint.keywords)
        return lambda function, *args, **kwargs: checkpoint(partial(call_in, current(), function), *args, **kwargs)

    asking = {id(module) for module in inside}
    with ExitStack() as stack:
        for module in model.modules() if asking else ():
            if id(module) not in asking and any(id(child) in asking for child in module.modules()):
                stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(leave, always_call=True).remove)
                if _CHECKPOINT in vars(module):
                    checkpoint = remembering(vars(module)[_CHECKPOINT])
                    stack.enter_context(replaced(module, **{_CHECKPOINT: checkpoint}))
        try:
            yield current
        finally:
            del calls[outside:]

"""Tells modules that are handed no keyword arguments (routers, some recurrent layers) which tree run they are in.

What is around them is handed the run by keyword. Activation checkpointing calls a part of the model a second time, in
backward, when other runs may have been forward meanwhile: what is called again is in the run that it was in at first,
never in the one that happened to be last.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn

from treetrain.models.switch import RUN_KEYWORD, TreeRun

_CHECKPOINT = "_gradient_checkpointing_func"
"""By which transformers' modules call what is to be called again; newer releases leave a layer's hooks outside."""


@contextmanager
def runs_around(model: nn.Module, inside: Collection[nn.Module]) -> Iterator[Callable[[], TreeRun | None]]:
    """Gives a function that tells the run of the call that is under way, for the length of the block.

    It gives None outside of any call that is known, such as of a part of a layer that something other than transformers
    checkpoints without what is around it.

    Args:
        inside: the modules that will ask.
    """
    calls = _Calls()
    asking = {id(module) for module in inside}
    with ExitStack() as stack:
        for module in model.modules() if asking else ():
            if id(module) not in asking and any(id(child) in asking for child in module.modules()):
                stack.callback(module.register_forward_pre_hook(calls.enter, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(calls.leave, always_call=True).remove)
                if _CHECKPOINT in vars(module):
                    stack.callback(setattr, module, _CHECKPOINT, vars(module)[_CHECKPOINT])
                    setattr(module, _CHECKPOINT, calls.remembered_by(vars(module)[_CHECKPOINT]))
        yield calls.run


class _Calls:
    """The calls that are under way, from the outermost in: (what is called, the run that it is in)."""

    def __init__(self) -> None:
        self._open: list[tuple[Any, TreeRun | None]] = []

    def run(self) -> TreeRun | None:
        """Of the innermost call."""
        return self._open[-1][1] if self._open else None

    def enter(self, module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        """A call begins; one that is handed no run is in that of what is around it."""
        self._open.append((module, kwargs.get(RUN_KEYWORD, self.run())))

    def leave(self, module: nn.Module, _args: Any, _output: Any) -> None:
        """A call has ended, by whatever way; where another hook failed before `enter`, it had not begun."""
        if self._open and self._open[-1][0] is module:
            self._open.pop()

    def remembered_by(self, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        """A checkpointing function whose second call is in the run of the first."""
        if isinstance(checkpoint, partial):  # its keywords are looked at
            return partial(self.remembered_by(checkpoint.func), *checkpoint.args, **checkpoint.keywords)

        def checkpointed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return checkpoint(partial(self._call, function, self.run()), *args, **kwargs)

        return checkpointed

    def _call(self, function: Callable[..., Any], run: TreeRun | None, *args: Any, **kwargs: Any) -> Any:
        self._open.append((function, run))
        depth = len(self._open)
        try:
            return function(*args, **kwargs)
        finally:
            del self._open[depth - 1 :]

"""Decoder layers that run compiled."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from treetrain.core.engine.extension import Extension
from treetrain.core.hf.tree_mode import compiled_layers


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

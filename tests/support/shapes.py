"""Checks the array shapes that the library's signatures state.

`tests/conftest.py` calls `check_shapes`, so shapes are checked in pytest's processes and nowhere else. A function is
wrapped only if it is public and its annotations name a shape, and only these annotations are checked: pyright checks
the others. So closures that are traced, Triton kernels and hot loops stay as they are. See docs/log.md for why this is
not jaxtyping's own import hook, which wraps every function.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import FunctionType, ModuleType
from typing import Any, get_args

from beartype import beartype
from jaxtyping import AbstractArray, config, jaxtyped


def check_shapes() -> None:
    """Check the shapes in all modules of the library that are imported from now on."""
    early = [name for name in sys.modules if name.startswith("treetrain.")]
    assert not early, f"imported before check_shapes(): {early}"
    sys.meta_path.insert(0, _Finder())


def set_checked(checked: bool) -> None:
    """Check shapes from now on, or not."""
    config.update("jaxtyping_disable", not checked)


@contextmanager
def unchecked() -> Iterator[None]:
    """For calls whose wrong shapes the library itself must refuse."""
    before = config.jaxtyping_disable
    set_checked(False)
    try:
        yield
    finally:
        set_checked(not before)


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname.startswith("treetrain.") else None
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(fullname, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        classes = [x for x in vars(module).values() if isinstance(x, type) and not x.__name__.startswith("_")]
        for owner in (module, *classes):
            _wrap_functions(owner, module.__name__)


def _wrap_functions(owner: ModuleType | type, module: str) -> None:
    """Wrap what a module or class defines itself: functions, methods, properties, and the fields of data classes."""
    for name, value in list(vars(owner).items()):
        if name.startswith("_") and name not in ("__call__", "__init__"):
            continue  # private helpers and named tuples are made too often
        function = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
        ours = isinstance(function, FunctionType) and getattr(owner, "__module__", module) == module
        if ours and function.__module__ == module and any(map(_has_shape, function.__annotations__.values())):
            setattr(owner, name, jaxtyped(value, typechecker=_only_shapes))


def _only_shapes(function: Callable[..., Any]) -> Callable[..., Any]:
    function.__annotations__ = {name: hint for name, hint in function.__annotations__.items() if _has_shape(hint)}
    return beartype(function)


def _has_shape(hint: Any) -> bool:
    return (isinstance(hint, type) and issubclass(hint, AbstractArray)) or any(map(_has_shape, get_args(hint)))

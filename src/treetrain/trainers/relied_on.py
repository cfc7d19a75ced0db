"""Checks of what trainers rely on in transformers, TRL and torch, none of which promises to keep it.

No version is refused for its number. Methods that are overridden must be there with their parameters; what is missing
costs the promises that rest on it. A version outside the tested range warns once, and the comparison with the plain
model in the first step decides whether gradients are exact.
"""

import inspect
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module

from packaging.version import Version
from torch import nn
from transformers import Trainer

TESTED = {"transformers": ("5.3", "5.24"), "trl": ("1.15", "1.16")}
"""The oldest and the newest version of each package that the tests run with."""
Members = Mapping[str, Sequence[str]]
"""Names of methods, and the parameters that each must have."""


def is_tested(package: str) -> bool:
    """Whether the installed version is in the tested range, whose ends include their patch releases."""
    oldest, newest = (Version(version).release for version in TESTED[package])
    return oldest <= Version(import_module(package).__version__).release[:2] <= newest


def warn_if_untested(package: str) -> None:
    """Warn, once in a process, if the installed version is outside the tested range."""
    if not is_tested(package):
        _warn_once(package, import_module(package).__version__)


@cache
def _warn_once(package: str, installed: str) -> None:
    oldest, newest = TESTED[package]
    resume = " That a resumed run is bit-identical is not confirmed." if package == "transformers" else ""
    warnings.warn(
        f"{package} {installed} is outside the versions that treetrain is tested with ({oldest} to {newest}). What it "
        "relies on there was found, and the comparison with the plain model in the first step decides whether "
        f"gradients are exact.{resume}",
        RuntimeWarning,
        stacklevel=3,
    )


def calls_may_be_replaced() -> bool:
    """Whether a call of a module runs the `_call_impl` of that module, hooks included, so that it can be replaced."""
    module, answer = nn.Identity(), object()
    module.register_forward_pre_hook(lambda *_: None)
    module._call_impl = lambda: answer  # type: ignore[method-assign]
    try:
        return module() is answer
    except TypeError:  # its own forward, without an input
        return False


def missing_members(kind: type, members: Members) -> list[str]:
    """Return the methods that a class lacks, or that lack a parameter, as text such as ``_save_checkpoint(trial)``."""
    missing = []
    for name, parameters in members.items():
        method = getattr(kind, name, None)
        if method is None:
            missing.append(name)
            continue
        own = inspect.signature(method).parameters
        takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in own.values())
        lacking = [parameter for parameter in parameters if parameter not in own and not takes_all]
        missing += [f"{name}({', '.join(lacking)})"] if lacking else []
    return missing


def versions_of(trainer: Trainer) -> dict[str, str]:
    """The versions of the packages that a step runs through."""
    used = {kind.__module__.partition(".")[0] for kind in (*type(trainer).__mro__, *type(trainer.model).__mro__)}
    used |= {"deepspeed"} if trainer.is_deepspeed_enabled else set()
    packages = ("treetrain", "torch", "transformers", "accelerate", *sorted(used & {"trl", "peft", "deepspeed"}))
    return {name: import_module(name).__version__ for name in packages}

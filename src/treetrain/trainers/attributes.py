"""Attributes of a trainer as plain data and tensors, for a file that can be read without trusting it."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch


def plain_attributes(trainer: Any, names: Iterable[str]) -> dict[str, Any]:
    """Those of the attributes that are there and made of numbers, strings, tensors, lists and dictionaries."""
    found = {}
    for name in names:
        try:
            found[name] = _plain(getattr(trainer, name))
        except (AttributeError, TypeError):
            continue
    return found


def set_attributes(trainer: Any, values: Mapping[str, Any]) -> None:
    """Give them back. Dictionaries are filled in place, so that a `defaultdict` stays one."""
    for name, value in values.items():
        setattr(trainer, name, _filled(getattr(trainer, name, None), value))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if value is None or isinstance(value, bool | int | float | str | torch.Tensor):
        return value
    raise TypeError(f"{type(value).__name__} is no plain data")


def _filled(old: Any, new: Any) -> Any:
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    for key in [key for key in old if key not in new]:
        del old[key]
    for key, each in new.items():
        old[key] = _filled(old.get(key), each)
    return old

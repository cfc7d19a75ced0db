"""Detects that a model has changed between a score and its backward, which may run parts forward again."""

from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_ADAPTER_FIELDS = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")
"""Fields of peft's layers; `scaling` is set by adapter, at any time."""
_WITHOUT_EFFECT = {"training", "gradient_checkpointing", "use_cache", "return_dict", "output_router_logits", "dtype"}
"""Settings that generation, evaluation, saving and trainers switch. No pass in tree mode depends on them. (`training`
switches dropout, but a model with active dropout is refused.)"""
_SMALL = 1 << 20
"""Buffers of up to this many elements are copied. Larger ones are compared by `_checksum`, which misses some changes,
such as two experts that exchange their biases."""


def switches_of(model: nn.Module, parameters: list[nn.Parameter]) -> dict[str, str]:
    """The active adapters and the trained parameters, by name. They can change while all weights stay the same."""
    switches = {}
    for name, module in model.named_modules():
        if "_active_adapter" in vars(module):
            fields = vars(module)
            switches |= {f"{field.lstrip('_')} of {name}": repr(fields.get(field)) for field in _ADAPTER_FIELDS}
    names = {id(p): name for name, p in model.named_parameters()}
    for number, parameter in enumerate(parameters):
        name = names.get(id(parameter), f"value head, parameter {number}")
        switches[f"requires_grad of {name}"] = str(parameter.requires_grad)
    return switches


class ModelState:
    """Everything that a forward reads of a model: weights, adapters, buffers, and settings.

    Settings are the numbers, strings and flags on modules and configurations. Make the state before a forward, and call
    `leave_out_changes` after it: counters and caches that a forward writes are not what its result depends on.
    """

    def __init__(self, model: nn.Module, value_head: nn.Module | None, parameters: list[nn.Parameter]):
        self._model, self._value_head, self._parameters = model, value_head, parameters
        self._switches = switches_of(model, parameters)
        self._fields, self._weights = self._read(), self._sums()

    def leave_out_changes(self) -> None:
        """Do not compare the buffers and settings that have changed since the state was made."""
        now = self._read()
        self._fields = {place: value for place, value in self._fields.items() if _same(value, now.get(place))}

    def check(self, call: str) -> None:
        """Raise RuntimeError if a backward now would not match the scores that `call` gave."""
        if not torch.equal(self._weights, self._sums()):
            raise RuntimeError(
                f"the model's weights have changed between {call} and its backward (an optimiser step?); gradients "
                "would belong to other weights: call backward first, or score again"
            )
        change = self._change()
        if change is not None:
            raise RuntimeError(
                f"the model was switched between {call} and its backward ({change}); gradients would be those of "
                "another model: call backward first, or switch back, or score again"
            )

    def _change(self) -> str | None:
        switches = switches_of(self._model, self._parameters)
        for switch in [*self._switches, *switches]:
            then, now = self._switches.get(switch, "not there"), switches.get(switch, "not there")
            if then != now:
                return f"{switch} was {then} and is {now}"
        fields = self._read()
        for (holder, name), then in self._fields.items():
            now = fields.get((holder, name))
            if not _same(then, now):
                change = "has other values" if isinstance(then, Tensor) else f"was {then!r} and is {now!r}"
                return f"{name} of {self._name(holder)} {change}"
        return None

    def _sums(self) -> Int64[Tensor, " weights"]:
        """Checksums of the weights, frozen ones too (a part that runs again would see their new values).

        Version counters are not enough: fused optimisers and writes through ``.data`` do not change them.
        """
        sums = [_checksum(_own_part(p)) for p in self._parameters]
        return torch.stack([total.to(sums[0].device) for total in sums])

    def _read(self) -> dict[tuple[int, str], Any]:
        """Copy buffers and settings, by the identity of what holds them and their name."""
        found: dict[tuple[int, str], Any] = {}
        configurations: dict[int, Any] = {}
        for root in (self._model, self._value_head):
            for module in () if root is None else root.modules():
                holder, fields = id(module), vars(module)
                _add_settings(found, holder, fields)
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        found[holder, name] = _copy(_own_part(buffer))
                config = fields.get("config")
                if config is not None:
                    configurations[id(config)] = config
        for holder, config in configurations.items():
            _add_settings(found, holder, vars(config))
        return found

    def _name(self, holder: int) -> str:
        """Name a module by its path, a configuration by its class."""
        for name, module in self._model.named_modules():
            if id(module) == holder:
                return name or "the model"
            if id(vars(module).get("config")) == holder:
                return type(module.config).__name__
        return "the value head"


def _add_settings(found: dict[tuple[int, str], Any], holder: int, fields: dict[str, Any]) -> None:
    for name, value in fields.items():
        if name[0] != "_" and (value is None or type(value) in (bool, int, float, str)) and name not in _WITHOUT_EFFECT:
            found[holder, name] = value


def _own_part(tensor: Tensor) -> Tensor:
    """The part of a sharded tensor that this rank holds; any other tensor itself."""
    return getattr(tensor, "_local_tensor", getattr(tensor, "ds_tensor", tensor))


def _copy(buffer: Tensor) -> Tensor:
    return buffer.detach().clone() if buffer.numel() <= _SMALL else _checksum(buffer)


def _checksum(values: Tensor) -> Int64[Tensor, ""]:
    """Sum a tensor's bits as 64-bit integers, which wrap around: several times faster than a sum of floats."""
    if is_traceable_wrapper_subclass(values):  # quantised weights that are several tensors
        names, _ = values.__tensor_flatten__()  # type: ignore[attr-defined]
        return torch.stack([_checksum(getattr(values, name)) for name in names]).sum()
    flat = values.detach().reshape(-1)
    count, tail = flat.numel() * flat.itemsize, flat.numel() * flat.itemsize % 8
    if flat.storage_offset() * flat.itemsize % 8:
        flat = flat.clone()
    if not tail:
        return flat.view(torch.int64).sum()
    raw = flat.view(torch.uint8)
    return raw[: count - tail].view(torch.int64).sum() + raw[count - tail :].sum()


def _same(then: object, now: object) -> bool:
    if isinstance(then, Tensor) and isinstance(now, Tensor):
        return then.shape == now.shape and then.device == now.device and torch.equal(then, now)
    return then is now or (type(then) is type(now) and then == now)

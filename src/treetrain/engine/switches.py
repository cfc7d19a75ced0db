"""Records the active adapters and the trained parameters, which can change while all weights stay the same.

After such a switch, a forward that runs again in backward would give the gradients of another model, or of other
parameters.
"""

from typing import Any, Protocol

from torch import nn

_FIELDS = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")
"""Fields of peft's layers; `scaling` is set by adapter, at any time."""

Switches = dict[str, Any]
"""Values by the name of the setting."""


class _Trained(Protocol):
    model: nn.Module

    @property
    def parameters(self) -> list[nn.Parameter]: ...


def switches_of(engine: _Trained) -> Switches:
    """The current settings."""
    found: Switches = {}
    for name, module in engine.model.named_modules():
        if "_active_adapter" in vars(module):
            found |= {f"{field.lstrip('_')} of {name}": _copy(vars(module).get(field)) for field in _FIELDS}
    names = {id(p): name for name, p in engine.model.named_parameters()}
    for number, parameter in enumerate(engine.parameters):
        name = names.get(id(parameter), f"value head, parameter {number}")
        found[f"requires_grad of {name}"] = parameter.requires_grad
    return found


def check_switches(before: Switches, now: Switches, call: str) -> None:
    """Raise RuntimeError, naming the first difference, unless both are the same.

    Args:
        call: the call that scored.
    """
    for name in [*before, *now]:
        then, after = before.get(name, "not there"), now.get(name, "not there")
        if then != after:
            raise RuntimeError(
                f"the model was switched between {call} and its backward ({name} was {then} and is {after}); gradients "
                "would be those of another model: call backward first, or switch back, or score again"
            )


def _copy(value: Any) -> Any:
    """A copy that later changes do not reach."""
    if isinstance(value, dict):
        return tuple((key, _copy(entry)) for key, entry in value.items())
    return tuple(value) if isinstance(value, list) else value

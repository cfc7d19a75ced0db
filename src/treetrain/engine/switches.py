"""What of a model may be switched without a weight being touched: which adapters are active, and what is trained.

A forward that is run again in backward would be another one after such a switch, and its gradients would be those of
another model, or would land elsewhere.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treetrain.engine.engine import TreeEngine

_ADAPTERS = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")
"""Fields of peft's layers; `scaling` is set by adapter, at any time."""

Switches = dict[str, tuple[Any, ...]]
"""Of every module with adapters these fields, by its name; under a parameter's name, whether it is trained."""


def switches_of(engine: "TreeEngine") -> Switches:
    """How everything is switched now."""
    found: Switches = {}
    for name, module in engine.model.named_modules():
        fields = vars(module)
        if "_active_adapter" in fields:
            found[name] = tuple(_plain(fields.get(field)) for field in _ADAPTERS)
    names = {id(p): name for name, p in engine.model.named_parameters()}
    for number, parameter in enumerate(engine.parameters):
        name = names.get(id(parameter), f"value head, parameter {number}")
        found[name] = (parameter.requires_grad,)
    return found


def check_switches(before: Switches, now: Switches, what: str) -> None:
    """Raise RuntimeError, naming the first thing that was switched and how, unless both are the same.

    Args:
        what: the call that scored.
    """
    for name in [*before, *now]:
        then, after = before.get(name), now.get(name)
        if then == after:
            continue
        if then is None or after is None:
            changed = f"{name} was {'added' if then is None else 'taken away'}"
        elif len(then) == 1:
            changed = f"requires_grad of {name} was {then[0]} and is {after[0]}"
        else:
            field = next(field for field, a, b in zip(_ADAPTERS, then, after, strict=True) if a != b)
            at = _ADAPTERS.index(field)
            changed = f"{field.lstrip('_')} of {name} was {then[at]} and is {after[at]}"
        raise RuntimeError(
            f"the model was switched between {what} and its backward ({changed}); gradients would be those of another "
            "model: call backward first, or switch back, or score again"
        )


def _plain(value: Any) -> Any:
    """A copy that later changes do not reach."""
    if isinstance(value, dict):
        return tuple((key, _plain(entry)) for key, entry in value.items())
    return tuple(value) if isinstance(value, list) else value

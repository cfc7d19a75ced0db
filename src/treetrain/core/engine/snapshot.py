"""The fields of a model's modules at one moment, and a quick look at whether they still are what they were.

A model of 36 layers with LoRA has 3,000 modules with 60,000 fields. To read what they mean takes tens of milliseconds;
to compare them with copies takes two. So an engine looks at its model in every call, and reads it when something has
changed.
"""

from collections.abc import Iterable
from itertools import chain
from operator import attrgetter, eq, is_, itemgetter, methodcaller
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as _of_all_modules

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""PyTorch's own fields."""
HOOK_FIELDS = "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"
_COMPARED = "training", "_parameters", "_modules", *HOOK_FIELDS
"""Those among them that are compared; buffers are compared apart, since they are tensors."""

_VALUES, _PARAMETERS = methodcaller("values"), itemgetter("_parameters")
_FLAGS = type, attrgetter("requires_grad"), attrgetter("dtype")

_EMPTY: dict[str, object] = {}
_CONTAINERS = list, tuple, set, type(_EMPTY.values())
_DEPTH = 8
"""Containers within containers that are looked into; some hold themselves."""


def global_hooks() -> tuple[dict[int, object], ...]:
    return tuple(
        getattr(_of_all_modules, f"_global_{when}_hooks")
        for when in ("forward_pre", "forward", "backward_pre", "backward")
    )


class Snapshot:
    """The modules, parameters, configurations and classes below some roots, and PyTorch's hooks on all modules.

    Lists, dicts and sets are compared by their items, at any depth; parameters and configurations by identity. Of any
    other tensor only the type is compared: a hook may store activations, which this would keep alive.

    Args:
        roots: modules; what is none is left out.
    """

    modules: list[nn.Module]
    """All modules, each once."""
    configured: list[nn.Module]
    """Those with a configuration."""
    parameters: list[nn.Parameter]
    """All parameters, each once."""
    trained: list[nn.Parameter]
    """Those that require a gradient."""

    def __init__(self, roots: Iterable[object]):
        heads = [root for root in roots if isinstance(root, nn.Module)]
        self.modules = list(dict.fromkeys(module for root in heads for module in root.modules()))
        self.configured = [module for module in self.modules if hasattr(vars(module).get("config"), "model_type")]
        self._configs = [module.config for module in self.configured]
        configs = list({id(config): config for config in self._configs}.values())
        for config in configs:  # those within a configuration are added on the way
            inner = [value for value in vars(config).values() if hasattr(value, "model_type")]
            configs += [new for new in inner if not any(new is old for old in configs)]
        # Half of the modules of a model with LoRA are containers: of these only the class and what is in them counts.
        containers = [module for module in self.modules if is_container(module)]
        names, inside = ("_modules", "_parameters", "_keys"), [*map(vars, containers)]  # keys of a `ParameterDict`
        self._contents: list[Any] = [field[name] for field in inside for name in names if name in field]
        self._copies = [*map(_copied, self._contents)]
        apart = set(containers)
        read = [module for module in self.modules if module not in apart]
        holders: list[Any] = [*read, *configs]
        self._holders: list[Any] = [*holders, *containers]
        self._kinds = [*map(type, self._holders)]
        self._classes = list(dict.fromkeys(kind for of in set(self._kinds) for kind in of.__mro__))
        self._of_classes = [dict(vars(kind)) for kind in self._classes]

        # Holders with the same fields form a group, so that their values can be listed without a loop in Python.
        self._fields: list[dict[str, Any]] = [holder.__dict__ for holder in holders]
        self._sizes = [*map(len, self._fields)]
        self._odd: list[tuple[Any, str, object]] = []
        """Fields that are tensors or hold some, and copies of them."""
        groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for number, field in enumerate(self._fields):
            base, is_module = _OF_EVERY_MODULE, number < len(read)
            own = [name for name in field if name not in base] if is_module else [*field]
            odd = [name for name in own if _holds_tensors(field[name])]
            odd += ["_buffers"] if is_module and field["_buffers"] else []
            self._odd += [(field, name, _copied(field[name])) for name in odd]
            always = (name for name in _COMPARED if is_module and name in field)  # a compiled module lacks one
            names = (*always, *(name for name in own if name not in odd))
            groups.setdefault(names, []).append(field)
        self._groups = [
            (itemgetter(*names), same, [_copied(itemgetter(*names)(field)) for field in same])
            for names, same in groups.items()
            if names
        ]
        self._with_weights = [field for field in self._fields[: len(read)] if field["_parameters"]]
        self._weights = [*self._live_weights()]
        self.parameters = list(dict.fromkeys(p for p in self._weights if p is not None))
        self.trained = [p for p in self.parameters if p.requires_grad]
        self._packed = [p for p in self.parameters if type(p) is not nn.Parameter]
        self._flags = self._read_flags()
        self._global_hooks = [*map(dict, global_hooks())]

    def unchanged(self) -> bool:
        """Whether all fields are what they were; False if some cannot be compared."""
        try:
            return (
                [*map(type, self._holders)] == self._kinds
                and [*map(len, self._fields)] == self._sizes
                # First, so that no two tensors are compared by their values.
                and all(map(is_, self._live_weights(), self._weights))
                and self._contents == self._copies
                and all(map(is_, (vars(module)["config"] for module in self.configured), self._configs))
                and all(all(map(eq, map(getter, fields), copies)) for getter, fields, copies in self._groups)
                and self._read_flags() == self._flags
                and [*global_hooks()] == self._global_hooks
                and all(_copied(field[name]) == copy for field, name, copy in self._odd)
                and [*map(vars, self._classes)] == self._of_classes
            )
        except Exception:  # a field is gone; objects that have no truth value are compared
            return False

    def _live_weights(self) -> Iterable[nn.Parameter | None]:
        return chain.from_iterable(map(_VALUES, map(_PARAMETERS, self._with_weights)))

    def _read_flags(self) -> list[object]:
        packed = [getattr(getattr(p, "quant_state", None), "packing_format_for_cpu", None) for p in self._packed]
        return [*chain.from_iterable(map(read, self.parameters) for read in _FLAGS), *packed]


def is_container(module: nn.Module) -> bool:
    """Whether a module cannot be called and only holds others, or could hold parameters and has none yet.

    No hook of it can run, and its flags switch nothing.
    """
    own = map(vars(module).get, ("forward", "_parameters", "_buffers", "_keys"))
    return type(module) in (nn.ModuleDict, nn.ParameterDict) and not any(own)


def _holds_tensors(value: object, depth: int = 0) -> bool:
    if isinstance(value, Tensor) or depth == _DEPTH:
        return isinstance(value, Tensor)
    items = value.values() if isinstance(value, dict) else value
    return isinstance(items, _CONTAINERS) and any(_holds_tensors(item, depth + 1) for item in items)


def _copied(value: Any, depth: int = 0) -> Any:
    """A value with copies of the dicts, lists and sets in it, and types in place of tensors that are no parameters."""
    if depth == _DEPTH:
        return value
    if isinstance(value, dict):  # empty ones share a copy: what is compared should lie in few places of memory
        return {key: _copied(item, depth + 1) for key, item in value.items()} if value else _EMPTY
    if isinstance(value, list | tuple):
        return (list if isinstance(value, list) else tuple)(_copied(item, depth + 1) for item in value)
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        return type(value)
    return set(value) if isinstance(value, set) else value

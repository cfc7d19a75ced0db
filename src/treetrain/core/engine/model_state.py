"""Whether a model has changed between two moments.

A model may change at any time: an adapter, a dropout, a hook, a weight. Every call reads its settings once
(`ModelState`). While they are equal, the model need not be checked again; while its classes, forwards and hooks are
too, nor need it be compared with its rows one by one (`check/first_use.py`). A score also keeps weights and buffers
(`ScoredModel`), since parts that run again in its backward must compute what they computed before.
"""

from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from jaxtyping import Int64
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from treetrain.core.engine.snapshot import HOOK_FIELDS, global_hooks, is_container

_PLAIN = (bool, int, float, str, type(None))
_OF_ADAPTERS = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")
"""Fields by which peft's layers choose and scale their adapters. They can change while all weights stay the same."""
_WITHOUT_EFFECT = {"training", "gradient_checkpointing", "use_cache", "return_dict", "output_router_logits", "dtype"}
"""Settings that generation, evaluation, saving and trainers switch. No pass in tree mode depends on them. (`training`
switches dropout, but a model with active dropout is refused.)"""
_SMALL = 1 << 20
"""Buffers of up to this many elements are copied. Larger ones are compared by `_checksum`, which misses some changes,
such as two experts that exchange their biases."""


class ModelState(NamedTuple):
    """The settings of a model at one moment, by name and the address of the module or configuration that holds them.

    It is read again only if a `Snapshot` has changed, so whatever is read here must be compared there.
    """

    switches: dict[tuple[int, str], object]
    """The active adapters and the trained parameters: together with the weights they say which model this is."""
    settings: dict[tuple[int, str], object]
    """The other numbers, strings and flags that passes may read."""
    checked: dict[tuple[int, str], object]
    """Facts that checks alone read, such as the kinds of the weights."""
    code: dict[tuple[int, str], object]
    """The code that runs: classes and their forwards, forwards of instances, submodules, functions such as activations,
    and hooks. A hook that is set anew has another number. `harmless` ones are left out."""
    tensors: dict[tuple[int, str], tuple[Any, ...]]
    """Where buffers are, and tensors that are plain attributes or stand in lists: a dictionary, and keys to follow. The
    tensors there may be others by now, so that a state keeps none alive."""
    alive: list[object]
    """Objects of which the state has the address alone. While they are kept, no other object has the same address."""

    @classmethod
    def of(cls, model: nn.Module, value_head: nn.Module | None) -> "ModelState":
        """Read a model and a value head."""
        state = cls({}, {}, {}, {}, {}, [])
        state.code[0, "global hooks"] = tuple(number for hooks in global_hooks() for number in hooks)
        for root in (model, value_head):
            if isinstance(root, nn.Module):  # other heads are refused later
                for module in root.modules():
                    state._read_module(module)
        configs = [config for config in state.alive if hasattr(config, "model_type")]
        state._read_configurations([getattr(model, "config", None), *configs])
        return state

    def _read_module(self, module: nn.Module) -> None:
        """Read one module without its submodules."""
        fields = vars(module)
        holder = id(module)
        module_class = type(module)
        self.checked[holder, "__class__"] = self.code[holder, "__class__"] = module_class
        # A patch of a class shows in no module: the function that runs is compared too.
        self.code[id(module_class), "forward of the class"] = module_class.forward
        if fields["_modules"]:
            self.code[holder, "submodules"] = tuple(fields["_modules"].values())
        if is_container(module):
            return
        for name, value in fields.items():
            self._read_field(holder, fields, name, value)
        if any(fields[kind] for kind in HOOK_FIELDS):
            hooks = [[n for n, hook in fields[kind].items() if not harmless(hook)] for kind in HOOK_FIELDS]
            if any(hooks):
                self.code[holder, "hooks"] = tuple(map(tuple, hooks))
        for name, buffer in fields["_buffers"].items():
            if buffer is not None:
                self.tensors[holder, name] = fields["_buffers"], name
        for name, p in fields["_parameters"].items():
            if p is not None:
                packed = getattr(getattr(p, "quant_state", None), "packing_format_for_cpu", None)
                self.checked[holder, name] = id(p), p.dtype, packed
                self.switches[holder, name + _TRAINED] = p.requires_grad

    def _read_field(self, holder: int, fields: dict[str, Any], name: str, value: Any) -> None:
        """Read an attribute of a module. Private ones are PyTorch's and transformers': few of them matter."""
        private = name[0] == "_"
        plain = isinstance(value, _PLAIN)
        if name in _OF_ADAPTERS and "_active_adapter" in fields:
            self.switches[holder, name] = value if plain else repr(value)
        elif plain or name in _OF_ADAPTERS:
            kind = self.checked if private or name in _WITHOUT_EFFECT else self.settings
            kind[holder, name] = value if plain else repr(value)
        elif name in ("config", "forward", "_compiled_call_impl"):
            self.checked[holder, name] = id(value)
            self.alive.append(value)
            if name == "forward":
                self.code[holder, name] = value
        elif isinstance(value, _CONTAINERS) and (not private or "drop" in name):  # "drop": peft's dropouts
            if (content := _content(value)) is not None:
                self.settings[holder, name] = content
            else:
                self._read_container(holder, fields, name)
        elif not private:
            if isinstance(value, Tensor):
                self.tensors[holder, name] = fields, name
            elif callable(value):
                self.code[holder, name] = value

    def _read_container(self, holder: int, fields: dict[str, Any], name: str) -> None:
        """Read a field that holds objects: where its tensors are, and what a dictionary shows of the others."""
        value = fields[name]
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(item, Tensor):
                self.tensors[holder, f"{name}[{key!r}]"] = fields, name, key
        if isinstance(value, dict):
            self.checked[holder, name] = repr({key: x for key, x in value.items() if not isinstance(x, Tensor)})

    def _read_configurations(self, configs: list[Any]) -> None:
        """Read configurations and those within them, each once."""
        read = set[int]()
        for config in configs:  # those within a configuration are added on the way
            holder = id(config)
            if config is None or holder in read:
                continue
            read.add(holder)
            for name, value in vars(config).items():
                if hasattr(value, "model_type"):
                    configs.append(value)
                elif not isinstance(value, _PLAIN):
                    self.checked[holder, name] = repr(value)
                else:
                    kind = self.checked if name[0] == "_" or name in _WITHOUT_EFFECT else self.settings
                    kind[holder, name] = value


_CONTAINERS = dict, list, tuple


def _content(value: object) -> object:
    """The numbers, strings and flags in nested lists and dictionaries; None if there is something else in them."""
    items = [*value, *value.values()] if isinstance(value, dict) else value
    content = []
    for item in items:  # type: ignore[attr-defined]
        inner = _content(item) if isinstance(item, _CONTAINERS) else item
        if not isinstance(inner, (*_PLAIN, tuple)) or (inner is None and item is not None):
            return None
        content.append(inner)
    return tuple(content)


_TRAINED = ".requires_grad"
"""The end of the names of the requires_grad flags."""


def harmless(hook: object) -> bool:
    """Whether transformers has set a hook that changes no values: one that makes embeddings require gradients, which
    TRL's trainers set anew whenever they have generated, or one that records outputs, set in the first forward."""
    names = (getattr(hook, name, None) or "" for name in ("__module__", "__qualname__"))
    return ".".join(names).startswith(("transformers.modeling_utils.", "transformers.utils.output_capturing."))


class Watched(Protocol):
    """The part of an `EngineModel` that a `ScoredModel` reads."""

    model: nn.Module
    value_head: nn.Module | None
    sharing: Any
    state: ModelState
    parameters: Any  # list[nn.Parameter], a property

    def read(self) -> ModelState: ...


class ScoredModel:
    """The model that a score has read: settings, weights, buffers, and the code that runs.

    Make it before the forward, and call `leave_out_changes` after it: counters and caches that a forward writes are not
    what its result depends on.
    """

    def __init__(self, model: Watched):
        self._model = model
        self._before, self._weights, self._code = self._read(model.state), self._sums(), model.state.code

    def leave_out_changes(self) -> None:
        """Do not compare the settings and buffers that have changed since the state was read."""
        now = self._read(self._model.read())
        self._before = {at: value for at, value in self._before.items() if _same(value, now.get(at, _GONE))}

    def check(self, call: str, *, runs_again: bool) -> None:
        """Raise RuntimeError if a backward now would not match the scores that `call` gave.

        Args:
            runs_again: whether parts run forward again, so that settings, buffers and code must be the same too. The
                backward of a kept graph reads none of them, as in plain autograd; frozen weights are refused.
        """
        change = self.change(weights_alone=not runs_again)
        if change == _WEIGHTS:
            raise RuntimeError(
                f"the model's weights have changed between {call} and its backward (by an optimiser step? or "
                "did torch.func.functional_call put others in for a call?); gradients would belong to other weights: "
                "call backward first, or score again"
            )
        if change is not None:
            raise RuntimeError(
                f"the model was switched between {call} and its backward ({change}); gradients would be those of "
                "another model: call backward first, or switch back, or score again"
            )

    def change(self, *, weights_alone: bool = False) -> str | None:
        """Say what has changed in the model; None if nothing has."""
        state = self._model.read()
        now = self._sums()  # of the weights that are there now
        if self._weights.shape != now.shape or not torch.equal(self._weights, now):
            return _WEIGHTS
        now = {**state.switches} if weights_alone else self._read(state)
        for at, then in self._before.items():
            if weights_alone and not at[1].endswith(_TRAINED):
                continue
            if not _same(then, now.get(at, _GONE)):
                return self._change(*at, then, now.get(at, _GONE))
        if not (weights_alone or self._model.sharing.collective):  # sharded modules set their own hooks anew
            for at in (*self._code, *state.code):
                if self._code.get(at) != state.code.get(at):
                    return self._change_of_code(*at)
        return None

    def _read(self, state: ModelState) -> dict[tuple[int, str], object]:
        """The settings that passes may read, copies of small buffers, and checksums of large ones."""
        tensors: dict[tuple[int, str], object] = {}
        for at, (found, *keys) in state.tensors.items():
            with suppress(KeyError, IndexError, TypeError):  # it is gone
                for key in keys:
                    found = found[key]
            if isinstance(found, Tensor):
                x = own_part(found)
                tensors[at] = x.detach().clone() if x.numel() <= _SMALL else _checksum(x)
        return {**state.switches, **state.settings, **tensors}

    def _sums(self) -> Int64[Tensor, " weights"]:
        """Checksums of the weights, frozen ones too (a part that runs again would see their new values).

        Version counters are not enough: fused optimisers and writes through ``.data`` do not change them.
        """
        sums = [_checksum(own_part(p)) for p in self._model.parameters]  # no collective, whatever ranks do
        return torch.stack([total.to(sums[0].device) for total in sums])

    def _change(self, holder: int, name: str, then: object, now: object) -> str:
        if isinstance(then, Tensor):
            return f"{name} of {self._name(holder)} has other values"
        place = self._name(holder)
        if name.endswith(_TRAINED):
            name, place = "requires_grad", f"{place}.{name.removesuffix(_TRAINED)}"
        shown = str if name in _OF_ADAPTERS else repr
        return f"{name.lstrip('_')} of {place} was {shown(then)} and is {shown(now)}"

    def _change_of_code(self, holder: int, name: str) -> str:
        if not holder:
            return "PyTorch's hooks on all modules have changed"
        classes = {id(kind): kind for kind in map(type, self._model.model.modules())}
        place = classes[holder].__qualname__ if holder in classes else self._name(holder)
        return f"{name.strip('_')} of {place} {'have' if name.endswith('s') and name != '__class__' else 'has'} changed"

    def _name(self, holder: int) -> str:
        """Name a module by its path, a configuration by its class."""
        for name, module in self._model.model.named_modules():
            if id(module) == holder:
                return name or "the model"
            if id(vars(module).get("config")) == holder:
                return type(module.config).__name__
        in_head = self._model.value_head is not None and holder in map(id, self._model.value_head.modules())
        return "the value head" if in_head else "a module that is gone"


_WEIGHTS = "weights"
_GONE = "not there"


def own_part(tensor: Tensor) -> Tensor:
    """The part of a sharded tensor that this rank holds; any other tensor itself."""
    return getattr(tensor, "_local_tensor", getattr(tensor, "ds_tensor", tensor))


_COLUMNS, _ROWS = 1021, 128
"""A checksum reads a tensor as matrices of this size. The number of columns is prime, so that no row of a weight and no
expert moves by a multiple of it within a matrix."""
_PLACES = 2**14


@cache
def _multipliers(count: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Random odd numbers, or random numbers from 0 to 1 for a dtype of floats: the first of a fixed sequence."""
    if count < _PLACES:
        return _multipliers(_PLACES, device, dtype)[:count]
    random = torch.Generator().manual_seed(0)
    if dtype.is_floating_point:
        return torch.rand(_PLACES, generator=random, dtype=dtype).to(device)
    return torch.randint(-(2**62), 2**62, (_PLACES,), generator=random).mul_(2).add_(1).to(device)


def _checksum(values: Tensor) -> Int64[Tensor, ""]:
    """Sum a tensor's bits as 64-bit integers that wrap around, times random odd numbers that depend on their places.

    A large tensor is read as matrices, whose columns are summed before the sums are multiplied, by column and by
    matrix: no copy is made, and it takes about as long as a plain sum. An even number of changed signs in float64 would
    cancel, since signs are the highest bits; so its values are summed too.
    """
    if is_traceable_wrapper_subclass(values):  # quantised weights that are several tensors
        names, _ = values.__tensor_flatten__()  # type: ignore[attr-defined]
        return torch.stack([_checksum(getattr(values, name)) for name in names]).sum()
    flat = values.detach().reshape(-1)
    count, tail = flat.numel() * flat.itemsize, flat.numel() * flat.itemsize % 8
    if flat.storage_offset() * flat.itemsize % 8:
        flat = flat.clone()
    if tail:
        raw = flat.view(torch.uint8)
        last = raw[count - tail :].to(torch.int64)
        return _checksum(raw[: count - tail]) + (last * _multipliers(tail, flat.device, torch.int64)).sum()
    total = _sum_by_place(flat.view(torch.int64))
    if values.dtype == torch.float64:
        total = total + (_sum_by_place(flat).view(torch.int64) >> 1)  # the sign is not the highest bit then
    return total


def _sum_by_place(values: Tensor) -> Tensor:
    """The sum of numbers [n], each times a number that depends on its place."""
    device, dtype, size = values.device, values.dtype, _ROWS * _COLUMNS
    if len(values) <= _PLACES:
        return (values * _multipliers(len(values), device, dtype)).sum()
    by_column = _multipliers(_COLUMNS, device, dtype)
    if len(values) <= size:
        whole = len(values) // _COLUMNS * _COLUMNS
        return (values[:whole].view(-1, _COLUMNS).sum(0) * by_column).sum() + _sum_by_place(values[whole:])
    whole = len(values) // size * size
    by_matrix = (values[:whole].view(-1, _ROWS, _COLUMNS).sum(1) * by_column).sum(1)
    number = torch.arange(len(by_matrix), device=device) % _PLACES
    total = (by_matrix * _multipliers(_PLACES, device, dtype)[number]).sum()
    return total + 3 * _sum_by_place(values[whole:])


def _same(then: object, now: object) -> bool:
    if isinstance(then, Tensor) and isinstance(now, Tensor):
        return then.shape == now.shape and then.device == now.device and torch.equal(then, now)
    return not isinstance(then, Tensor) and not isinstance(now, Tensor) and then == now

"""A model as an engine sees it: what it can do, whether it has changed, what a pass costs, which plans fit into memory.

A model may change at any time: an adapter, a dropout, a hook, a weight. Every call reads its settings once
(`ModelState`). While they are equal, the model need not be checked again; while its classes, forwards and hooks are
too, nor need it be compared with its rows one by one (`extensions/first_use.py`). A score also keeps weights and
buffers (`ScoredModel`), since parts that run again in its backward must compute what they computed before.
"""

import os
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Int64
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel

from treetrain.engine import lm_head
from treetrain.engine.extension import Extension, Reduces
from treetrain.engine.loss_gradients import ScoreTable
from treetrain.engine.memory import Rollback, Try, free_bytes, tries
from treetrain.engine.ranks import Sharing
from treetrain.engine.snapshot import HOOK_FIELDS, Snapshot, global_hooks
from treetrain.errors import UnsupportedModel
from treetrain.models.capability import Capabilities, check_model, model_device
from treetrain.models.frozen_layers import frozen_layers
from treetrain.planning.cost import Beside, CostModel, ModelCounts
from treetrain.planning.devices import MEMORY_MARGIN
from treetrain.planning.make import PART_TOKENS, Bytes, make_plan
from treetrain.planning.partition import partition
from treetrain.planning.plan import Plan
from treetrain.tree.layout import PackedLayout
from treetrain.tree.token_tree import TokenTree

if TYPE_CHECKING:
    from treetrain.engine.extensions.experts import RouterBalance

LAST_RESORT_TOKENS = 256
"""The token budget that is tried if no plan is predicted to fit into free memory."""
PASS_TOKENS, FORWARD_SHARE = 40.0, 0.35
"""For a model that cannot be counted: the fixed cost of a pass in tokens, and a forward's share of a step. Every plan
within a budget is exact, so a wrong guess costs time only."""


def plan_of_any_model(layout: PackedLayout, budget: int | None, device: torch.device) -> Plan:
    """The plan of a model that cannot be counted; without a budget in tokens, parts are of a size that runs well."""

    def seconds(plan: Plan) -> float:
        passes = plan.num_parts + FORWARD_SHARE * plan.num_prefills
        return PASS_TOKENS * passes + plan.layout.num_tokens + FORWARD_SHARE * plan.recomputed_tokens

    size = PART_TOKENS["cuda" if device.type == "cuda" else "cpu"]
    tokens, target = (max(layout.num_tokens, 1), size) if budget is None else (budget, None)
    return partition(layout, tokens, seconds, part_tokens=target)


# ---- what can change

_PLAIN = (bool, int, float, str, type(None))
_OF_ADAPTERS = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")
"""Fields of peft's layers, at least one of which is set at any time by adapter. They can change while all weights stay
the same."""
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
    """What checks alone read, such as the kinds of the weights."""
    code: dict[tuple[int, str], object]
    """What runs: classes and their forwards, forwards of instances, submodules, functions such as activations, and
    hooks. A hook that is set anew has another number. `HARMLESS_HOOKS` are left out."""
    tensors: dict[tuple[int, str], tuple[Any, ...]]
    """Where buffers are, and tensors that are plain attributes or stand in lists: a dictionary, and keys to follow. The
    tensors there may be others by now, so that a state keeps none alive."""
    alive: list[object]
    """Objects of which the state has the address alone. While they are kept, no other object has the same address."""

    @classmethod
    def of(cls, model: nn.Module, value_head: nn.Module | None) -> "ModelState":
        """Read a model and a value head."""
        switches, settings, checked, code, tensors, alive = state = cls({}, {}, {}, {}, {}, [])
        code[0, "global hooks"] = tuple(number for hooks in global_hooks() for number in hooks)
        configs = [getattr(model, "config", None)]
        for root in (model, value_head):
            for module in root.modules() if isinstance(root, nn.Module) else ():  # other heads are refused later
                fields, holder = vars(module), id(module)
                checked[holder, "__class__"] = code[holder, "__class__"] = kind_of = type(module)
                code[id(kind_of), "forward of the class"] = kind_of.forward
                if fields["_modules"]:
                    code[holder, "submodules"] = tuple(fields["_modules"].values())
                adapted = "_active_adapter" in fields
                for name, value in fields.items():
                    plain = isinstance(value, _PLAIN)
                    if plain or name in _OF_ADAPTERS:
                        kind = checked if name[0] == "_" or name in _WITHOUT_EFFECT else settings
                        kind = switches if adapted and name in _OF_ADAPTERS else kind
                        kind[holder, name] = value if plain else repr(value)
                    elif name in ("config", "forward", "_compiled_call_impl"):
                        checked[holder, name] = id(value)
                        alive.append(value)
                        if name == "forward":
                            code[holder, name] = value
                    elif isinstance(value, _CONTAINERS) and (name[0] != "_" or "drop" in name):
                        if (content := _content(value)) is not None:
                            settings[holder, name] = content
                        else:
                            _read_container(holder, fields, name, checked, tensors)
                    elif name[0] != "_":
                        if isinstance(value, Tensor):
                            tensors[holder, name] = fields, name
                        elif callable(value):
                            code[holder, name] = value
                if any(fields[kind] for kind in HOOK_FIELDS):
                    hooks = [
                        [n for n, hook in fields[kind].items() if getattr(hook, "__code__", None) not in HARMLESS_HOOKS]
                        for kind in HOOK_FIELDS
                    ]
                    if any(hooks):
                        code[holder, "hooks"] = tuple(map(tuple, hooks))
                for name, buffer in fields["_buffers"].items():
                    if buffer is not None:
                        tensors[holder, name] = fields["_buffers"], name
                for name, p in fields["_parameters"].items():
                    if p is not None:
                        packed = getattr(getattr(p, "quant_state", None), "packing_format_for_cpu", None)
                        checked[holder, name] = id(p), p.dtype, packed
                        switches[holder, name + _TRAINED] = p.requires_grad
        configs += [config for config in alive if hasattr(config, "model_type")]
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
                    checked[holder, name] = repr(value)
                else:
                    kind = checked if name[0] == "_" or name in _WITHOUT_EFFECT else settings
                    kind[holder, name] = value
        return state


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


def _read_container(
    holder: int,
    fields: dict[str, Any],
    name: str,
    checked: dict[tuple[int, str], object],
    tensors: dict[tuple[int, str], tuple[Any, ...]],
) -> None:
    """Read a field that holds objects: where its tensors are, and what a dictionary shows of the others."""
    value = fields[name]
    items = value.items() if isinstance(value, dict) else enumerate(value)
    tensors.update({(holder, f"{name}[{key!r}]"): (fields, name, key) for key, x in items if isinstance(x, Tensor)})
    if isinstance(value, dict):
        checked[holder, name] = repr({key: item for key, item in value.items() if not isinstance(item, Tensor)})


_TRAINED = ".requires_grad"
"""The end of the names of the requires_grad flags."""
HARMLESS_HOOKS = tuple(
    x for x in PreTrainedModel.enable_input_require_grads.__code__.co_consts if isinstance(x, CodeType)
)
"""The code of the hook by which transformers makes embeddings require gradients, and which changes no values. TRL's
trainers set it anew whenever they have generated, and leave the old ones on."""


class ScoredModel:
    """The model that a score has read: settings, weights, buffers, and the code that runs.

    Make it before the forward, and call `leave_out_changes` after it: counters and caches that a forward writes are not
    what its result depends on.
    """

    def __init__(self, model: "EngineModel"):
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
                x = _own_part(found)
                tensors[at] = x.detach().clone() if x.numel() <= _SMALL else _checksum(x)
        return {**state.switches, **state.settings, **tensors}

    def _sums(self) -> Int64[Tensor, " weights"]:
        """Checksums of the weights, frozen ones too (a part that runs again would see their new values).

        Version counters are not enough: fused optimisers and writes through ``.data`` do not change them.
        """
        sums = [_checksum(_own_part(p)) for p in self._model.parameters]
        return torch.stack([total.to(sums[0].device) for total in sums])

    def _change(self, holder: int, name: str, then: object, now: object) -> str:
        """Describe a change."""
        if isinstance(then, Tensor):
            return f"{name} of {self._name(holder)} has other values"
        place = self._name(holder)
        if name.endswith(_TRAINED):
            name, place = "requires_grad", f"{place}.{name.removesuffix(_TRAINED)}"
        shown = str if name in _OF_ADAPTERS else repr
        return f"{name.lstrip('_')} of {place} was {shown(then)} and is {shown(now)}"

    def _change_of_code(self, holder: int, name: str) -> str:
        """Describe a change of what runs."""
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


def _own_part(tensor: Tensor) -> Tensor:
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


# ---- the model


class EngineModel:
    """A model, its value head, and the settings of an engine that its passes depend on.

    Args:
        budget: tokens whose graph may be alive at once, bytes of peak memory, or None for what is free.
        temperature: divides the logits before the softmax.
        compile_layers: whether decoder layers run compiled; None: on a GPU, if they can.

    Raises:
        UnsupportedModel: the model or its value head would not be exact on a tree.
    """

    def __init__(
        self,
        model: nn.Module,
        value_head: nn.Module | None,
        *,
        budget: int | Bytes | None,
        temperature: float,
        sharing: Sharing,
        compile_layers: bool | None = None,
    ):
        self.model, self.value_head, self.sharing = model, value_head, sharing
        self.budget, self.temperature = budget, temperature
        self._compile_layers = compile_layers
        self.compiles: bool
        """Whether decoder layers run compiled."""
        self._compiled: dict[nn.Module, Callable[..., object]] = {}
        """See `compiled_layers`."""
        self._saved: dict[tuple[object, ...], float] = {}
        """The bytes per token that compiled layers, and what is around them, were measured to save for backward."""
        self.state = ModelState({}, {}, {}, {}, {}, [])
        """Its settings in the latest call."""
        self._latest = Snapshot(()), self.state
        """The model as it was read last."""
        self._latest_hooked: list[nn.Module] = []
        """The modules with forward hooks, as they were read last."""
        self.undrawn: list[nn.Module] = []
        """Adapters (LoHa, LoKr) that draw a random number in training mode although their dropout is 0."""
        self._cost: tuple[object, CostModel | None] = None, None
        self._frozen_layers: int | None = None
        self.device: torch.device
        """The device that the model takes its input on."""
        self.wide_dtype: torch.dtype
        """The dtype of log-probabilities and entropies: float32, or float64 for a float64 model."""
        self.free: int | None = None
        """Bytes that plans of the current call may use; ranks that run the same plan agree on them. None with a budget
        in bytes."""
        self.beside: Beside | UnsupportedModel | None
        """What the current call needs besides its parts, if anything; an error if that cannot be counted."""
        self.capabilities = self._all = self.check()
        """The part of the model's capabilities that the current call asks for."""

    def check(self) -> Capabilities:
        """Check the model if it has changed since the last call (a dropout may have been switched on), and read how
        much memory is free."""
        now = self.read()
        if now[:3] != self.state[:3]:  # its hooks are checked elsewhere
            self._all = check_model(self.model, critics=True, value_head=self.value_head)
            self._cost, self._frozen_layers = (None, None), None
            modules = self.model.modules()
            self.undrawn = [m for m in modules if {*vars(m).get("module_dropout", {0: 1}).values()} == {0.0}]
        self.state = now
        self.device = model_device(self.model)
        self.wide_dtype = torch.promote_types(self.model.dtype, torch.float32)  # type: ignore[arg-type]
        default = self.device.type == "cuda" and self.sharing.may_compile
        self.compiles = default if self._compile_layers is None else self._compile_layers
        self.free = None if isinstance(self.budget, Bytes) else self.free_bytes()
        self.beside = None
        return self._all

    def read(self) -> ModelState:
        """The settings of the model and the value head as they are now."""
        snapshot, state = self._latest
        if not snapshot.modules or not snapshot.unchanged():
            snapshot, state = Snapshot((self.model, self.value_head)), ModelState.of(self.model, self.value_head)
            self._latest = snapshot, state
            self._latest_hooked = [m for m in snapshot.modules if m._forward_pre_hooks or m._forward_hooks]
        return state

    @property
    def modules(self) -> list[nn.Module]:
        """The modules of the model and the value head, each once, as they were read last."""
        return self._latest[0].modules

    @property
    def configured(self) -> list[nn.Module]:
        """The modules with a configuration, as they were read last."""
        return self._latest[0].configured

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of the model and the value head, each once, as they were read last."""
        return self._latest[0].parameters

    @property
    def live(self) -> bool:
        """Whether scores computed now can have gradients."""
        return torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters)

    def table(self, layout: PackedLayout, *, entropy: bool, statistics: bool = False) -> ScoreTable:
        """An empty table for the scores of a layout."""
        sizes = layout.num_edges, len(layout.rows)
        return ScoreTable(*sizes, self.wide_dtype, self.device, entropy=entropy, statistics=statistics)

    def may_need_gradients(self, layer: Hashable) -> bool:
        """Whether something trained may come before the keys or states of a layer, in some token of some row."""
        if self._frozen_layers is None:
            self._frozen_layers = frozen_layers(self.model, self._all)
        return not (isinstance(layer, int) and layer < self._frozen_layers)

    # ---- plans

    @property
    def counted(self) -> CostModel | None:
        """The cost model of the model, counted without running it; None if it cannot be counted."""
        autocast = torch.is_autocast_enabled(self.device.type)
        dtype = torch.get_autocast_dtype(self.device.type) if autocast else self.model.dtype
        key = self.device, dtype, os.environ.get(lm_head.ENVIRONMENT)  # `check` sees everything else
        if self._cost[0] != key:
            from treetrain.engine.costs import TRANSIENT, cost_of  # once for a model

            try:
                self._cost = key, cost_of(self.model)
            except UnsupportedModel:
                self._cost = key, None
            except TRANSIENT:
                return None  # the next call counts again
        return self._cost[1]

    @property
    def cost(self) -> CostModel | None:
        """The cost model of the current call; None if it cannot be counted."""
        cost = None if isinstance(self.beside, UnsupportedModel) else self.counted
        return None if cost is None else replace(cost, counts=self.measured(cost.counts), beside=self.beside)

    def measured(self, counts: ModelCounts) -> ModelCounts:
        """Counts of this model with the bytes that compiled layers were measured to save, if they have been."""
        saved = self._saved.get(self._place(counts)) if self.compiles else None
        return counts if saved is None else counts.saving(saved)

    def set_measured(self, counts: ModelCounts, saved_token: float) -> None:
        """Note the bytes per token that compiled layers, and what is around them, save for backward."""
        self._saved[self._place(counts)] = saved_token

    def _place(self, counts: ModelCounts) -> tuple[object, ...]:
        """The key of the measured bytes: the device, and by its counts the model, its dtype and checkpointing."""
        return self.device, counts.dtype_bytes, counts.saved_token, counts.saved_layers, counts.saved_pass

    @property
    def can_warm_up(self) -> bool:
        """Whether layers run compiled and a short row can stand for any; a loss of the routers is over all rows."""
        return self.compiles and self.capabilities.scores_tokens and not self.capabilities.auxiliary

    def plan(self, layout: PackedLayout, budget: int | Bytes | None) -> Plan:
        """The fastest plan within a budget: tokens, bytes, or None for what the device has free.

        Raises:
            ValueError: bytes that no plan fits into.
            UnsupportedModel: bytes, and a model that cannot be counted.
        """
        if isinstance(budget, Bytes):
            if isinstance(self.beside, UnsupportedModel):
                raise self.beside
            from treetrain.engine.costs import cost_of

            cost = self.cost or cost_of(self.model)
            cost.check_beside(budget)
            return make_plan(layout, cost, budget=budget)
        cost = self.cost
        if cost is None:
            return plan_of_any_model(layout, budget, self.device)
        try:
            return make_plan(layout, cost, budget=budget, free_bytes=self.free if budget is None else None)
        except ValueError as error:
            if budget is not None:
                raise
            # The user set no bound and predictions can be wrong, so small parts are tried; out of memory is handled.
            warnings.warn(f"more memory is predicted than is free ({error}); small parts are tried", stacklevel=2)
            return make_plan(layout, cost, budget=LAST_RESORT_TOKENS)

    def free_bytes(self) -> int:
        """Bytes that plans of this process may use now, minus gradients not yet allocated (``.grad`` is None)."""
        free, absent = free_bytes(self.device), 0
        if self.device.type == "cpu":
            free //= self.sharing.processes_on_host
        for p in self.parameters:
            grad = p.grad
            if grad is not None and type(grad) is not Tensor:
                grad = getattr(grad, "beneath", grad)  # of a `DeferredGradient`
            if grad is None and p.requires_grad:
                own = getattr(p, "_local_tensor", p)  # the part that this process holds of a sharded parameter
                absent += own.numel() * own.element_size()
        return max(free - absent, 0)

    def has_room(self, plan: Plan, extra: float | None = None) -> bool:
        """Whether a plan's predicted peak fits the budget or free memory; False if the model cannot be counted.

        Args:
            extra: further bytes that are optional; `MEMORY_MARGIN` times peak and extra must be free.
        """
        if self.cost is None:
            return False
        peak = self.cost.peak_bytes(plan)
        room = self.budget.count if isinstance(self.budget, Bytes) else self.free
        return room is not None and (peak <= room if extra is None else MEMORY_MARGIN * (peak + extra) <= room)

    def plan_keeping_graphs(self, plan: Plan) -> Plan | None:
        """The plan for a loss that is known after all parts are scored, with the graphs kept that fit until then.

        They fit into the budget or into free memory. None if the caches of all parts do not fit.
        """
        whole = plan.keeping_graphs()
        if plan.num_parts <= 1:
            return whole
        tokens, cost = self.budget if isinstance(self.budget, int) else None, self.cost
        if whole.peak_tokens <= tokens if tokens is not None else self.has_room(whole):
            return whole
        from treetrain.planning.kept_graphs import FINER, MOST_PARTS, keeping_most

        room = self.budget.count if isinstance(self.budget, Bytes) else self.free_bytes()
        found = [keeping_most(plan, cost, tokens=tokens, room=room)]
        if cost is not None:
            smaller = plan
            for share in FINER:
                if smaller.num_parts > MOST_PARTS:
                    break
                most = max((tokens or plan.peak_tokens) // share, 1)
                smaller = replace(partition(plan.layout, most, cost.seconds), purpose=plan.purpose)
                found.append(keeping_most(smaller, cost, tokens=tokens, room=room))
        plans = [each for each in found if each is not None]
        return min(plans, key=cost.seconds if cost is not None else lambda each: each.recomputed_tokens, default=None)

    def keeps_logits(self, plan: Plan) -> bool:
        """Whether the logits of kept parts fit in addition to the graphs of a plan, with room to spare.

        Keeping them saves a second product of the head's matrix with every row.
        """
        rows = int(plan.kept[plan.part_of[plan.layout.rows]].sum())
        return self.has_room(plan, extra=rows * self.capabilities.vocab_size * self.wide_dtype.itemsize)

    def keeps_gradients(self, plan: Plan) -> bool:
        """Whether unsharded gradients fit in addition to a plan, with room to spare, until the step's last backward.

        Where weights are sharded, they are then reduced once instead of after every part.
        """
        trained = sum(p.numel() for p in self.parameters if p.requires_grad)
        return self.has_room(plan, extra=trained * self.wide_dtype.itemsize)

    # ---- runs

    def tries(self, plan: Plan, rollback: Rollback | None = None) -> Iterator[Try]:
        """Tries of a plan, and of smaller ones while memory runs out; see `memory.tries`."""
        first = "no" if plan.scores_first == "no" else "recomputed"

        def smaller(tokens: int) -> Plan:
            return replace(self.plan(plan.layout, tokens), scores_first=first)

        together = not self.sharing.passes_with.alone
        return tries(plan, None if together else smaller, self.device, rollback)

    def extensions(
        self,
        tree: TokenTree,
        *,
        balanced: bool,
        whole: "RouterBalance | None" = None,
        scale: float = 1.0,
        reduces: Reduces = "each",
    ) -> list[Extension]:
        """The extensions of a try, outermost first; none for a dense model in one process.

        Args:
            balanced: whether the routers' auxiliary loss is added, with this balance of the whole step and this scale.
            reduces: which backwards reduce gradients over processes.
        """
        capabilities, model = self.capabilities, self.model
        extensions, innermost = self.sharing.extensions(capabilities)
        if capabilities.experts is not None:
            from treetrain.engine.extensions.experts import Experts, has_work

            if has_work(capabilities.experts, tree, balanced=balanced):
                extensions.append(
                    Experts(
                        model,
                        capabilities.experts,
                        tree,
                        self.device,
                        balanced=balanced,
                        whole=whole,
                        scale=scale,
                    )
                )
        if capabilities.recurrent_layers:
            from treetrain.engine.extensions.recurrence import Recurrence

            extensions.append(Recurrence(model, self.may_need_gradients))
        if self.compiles:  # last of those that change the model's modules
            from treetrain.engine.extensions.compiled import CompiledLayers

            extensions.append(CompiledLayers(model, self._compiled))
        extensions += innermost
        if tree.images is not None:  # last, since the gradients that it adds are reduced and hooked by those around it
            from treetrain.engine.extensions.images import Images

            extensions.append(Images(model, tree))
        if self.live and self._latest_hooked:
            from treetrain.engine.extensions.kept_activations import KeptActivations

            extensions.append(KeptActivations(model, self._latest_hooked))
        for extension in extensions:
            extension.reduces = reduces
        self.attach_hooks(extensions)
        return extensions

    def attach_hooks(self, extensions: list[Extension]) -> None:
        """Run the hooks that parameters have now once in a run. Some may be set between score and backward."""
        if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in self.parameters):
            from treetrain.engine.extensions.parameter_hooks import HooksOnce

            if not any(isinstance(extension, HooksOnce) for extension in extensions):
                place = sum(not extension.within_hooks for extension in extensions)
                extensions.insert(place, HooksOnce(self.parameters, self.sharing.shards(self.parameters)))

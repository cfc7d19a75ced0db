"""A model as an engine sees it: what it can do, whether it has changed, what a pass costs, which plans fit into memory.

A model may change at any time: an adapter, a dropout, a hook, a weight. Every call reads its settings once
(`ModelState`). While they are equal, the model need not be checked again; while its classes, forwards and hooks are
too, nor need it be compared with its rows one by one (`extensions/first_use.py`). A score also keeps weights and
buffers (`ScoredModel`), since parts that run again in its backward must compute what they computed before.
"""

import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from types import CodeType
from typing import Any, NamedTuple, Protocol

import torch
from jaxtyping import Int64
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel

from treetrain.core.attention.attention import STOCK, Backends
from treetrain.core.engine.extension import Extension, Reduces
from treetrain.core.engine.loss_gradients import ScoreTable
from treetrain.core.engine.memory import Rollback, Try, free_bytes, may_pass, tries
from treetrain.core.engine.parameter_hooks import HooksOnce
from treetrain.core.engine.ranks import Ranks
from treetrain.core.engine.snapshot import HOOK_FIELDS, Snapshot, global_hooks, is_container
from treetrain.core.errors import UnsupportedModel
from treetrain.core.head.lm_head import PLAIN, HeadKernels
from treetrain.core.hf.capability import Capabilities, check_model, model_device
from treetrain.core.hf.frozen_layers import frozen_layers
from treetrain.core.losses.protocol import Loss
from treetrain.core.planning.cost import Beside, CostModel, ModelCounts
from treetrain.core.planning.devices import MEMORY_MARGIN
from treetrain.core.planning.make import PART_TOKENS, Bytes, make_plan
from treetrain.core.planning.partition import partition
from treetrain.core.planning.plan import Plan, Purpose
from treetrain.core.tree.layout import PackedLayout
from treetrain.core.tree.token_tree import TokenTree
from treetrain.core.tree.trajectory import Trajectory

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
    and hooks. A hook that is set anew has another number. `HARMLESS_HOOKS` are left out."""
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
            hooks = [
                [n for n, hook in fields[kind].items() if getattr(hook, "__code__", None) not in HARMLESS_HOOKS]
                for kind in HOOK_FIELDS
            ]
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


# ---- what stands beside the core


class Sharing:
    """Says how processes share the steps of an engine. In this class one process has everything to itself.

    `parallel/sharing.py` has processes that share steps, hold the same rows, or each hold a part of the weights.
    """

    ranks = Ranks()
    """The processes whose rows make up a step."""
    same_rows = Ranks()
    """The processes among `ranks` that hold the same rows and run the same plan (context or tensor parallel)."""
    passes_with = Ranks()
    """The processes that run every pass together with this one: they wait for one another in it."""
    collective = False
    """Whether passes are collective calls, in an order that all ranks share: each holds a shard of the weights."""
    divides_parts = 1
    """The number of processes that divide the tokens of every part; their budgets add up."""

    processes_on_host = 1
    """The number of processes that share the memory of this host."""
    may_compile = True
    """Whether layers may run compiled: not where they communicate by hooks."""

    def check_model(self, capabilities: Capabilities) -> None:
        """Raise UnsupportedModel for a model that these processes cannot divide."""

    def extensions(self, capabilities: Capabilities) -> tuple[list[Extension], list[Extension]]:
        """The extensions of sharing, for a call: those around all others, and those within all others."""
        return [], []

    def agree_on_plan(self, ranks: Ranks, layout: PackedLayout, free: int | None) -> int | None:
        """Return the bytes that a plan of this layout may use, from those that this process has free (None: unknown).

        Processes that run the same plan must have the same layout, and get the same bytes. A collective call of these
        ranks within `Ranks.together`.

        Raises:
            RanksDisagree: on all of these ranks; some that run the same plan have other layouts.
        """
        return free

    def check_hooks(self, parameters: Sequence[nn.Parameter]) -> None:
        """Raise UnsupportedModel if hooks would see a rank's own gradients, before these are averaged."""

    def shards(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """The parameters whose gradients come into ``.grad`` from a reduction over processes, not from autograd."""
        return []

    def average_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Average the gradients of weights that several ranks hold as a whole, over these ranks."""

    @property
    def has_unreduced(self) -> bool:
        """Whether gradients wait to be reduced over processes, outside of ``.grad``."""
        return False

    def drop_unreduced(self) -> None:
        """Drop gradients that are not reduced yet: the next reduction would add them to another step."""

    def why_not_live(self) -> str | None:
        """The fault of gradients through autograd, in words that follow "they would"; None if there is none."""
        return None

    def rows_of_all_ranks(
        self, model: "EngineModel", kind: str, rows: list[Trajectory], loss: Loss, normaliser: float | None
    ) -> tuple[list[Trajectory] | None, float]:
        """Compare the ranks' settings, and exchange what they must know of one another's rows.

        Args:
            kind: the class of the engine.

        Returns:
            the rows of all ranks if the loss must see them, else None; the sum of the ranks' loss weights, 0 if it is
            not needed.
        """
        return rows, 0.0

    def plan_together(
        self, model: "EngineModel", tree: TokenTree, plan: Plan, *, weighted: bool, apart: bool
    ) -> tuple[TokenTree, Plan, Reduces]:
        """Choose this rank's tree and plan, and say which of its backwards reduce gradients; a collective call.

        Args:
            tree, plan: this rank's own.
            weighted: whether only predictions with a loss weight are computed.
            apart: whether plans that share nothing may be chosen.
        """
        return tree, plan, "each"


class StepBalance(Protocol):
    """The facts that a loss over all tokens of a step needs of the tokens in other calls."""

    def compared(self) -> object:
        """The part that all ranks must agree on."""


class Feature:
    """Something that some models, rows or devices have and a dense model in one process lacks. Here, nothing.

    An engine has its own objects of these, and asks each of them in every call.
    """

    takes: frozenset[str] = frozenset()
    """The fields of a tree, such as "images", that only this feature knows what to do with."""
    within_sharing = False
    """Whether its extension runs within those of several processes."""

    def check_rows(self, model: "EngineModel", tree: TokenTree) -> None:
        """Check the rows of a call, and note in ``model.beside`` what they need besides the parts.

        Raises:
            DataError: rows that the model cannot read.
            UnsupportedModel: a model or a setting that would not be exact with them.
        """

    def before_plan(self, model: "EngineModel", passes_type: type) -> None:
        """A call is about to be planned."""

    def counts(self, model: "EngineModel", counts: ModelCounts) -> ModelCounts:
        """The counts of a model under this feature."""
        return counts

    def extension(
        self, model: "EngineModel", tree: TokenTree, *, balanced: bool, scale: float, balance: StepBalance | None
    ) -> Extension | None:
        """The extension of a try; None if there is nothing to do.

        Args:
            balanced: whether special layers add a loss over all tokens of a step, times `scale`.
            balance: of the whole step, if the call is a part of it.
        """
        return None


@dataclass(frozen=True, kw_only=True)
class Registry:
    """Everything outside the core that an engine uses. An empty one runs dense models, planned in tokens."""

    check_model: Callable[..., Capabilities] = check_model
    """Describes a model, as `core.hf.capability.check_model` does; it may know more layers."""
    features: Sequence[Feature] = ()
    """Their extensions are nested in this order, the first outermost."""
    cost_of: Callable[[nn.Module], CostModel] | None = None
    """Counts what a model costs; raises UnsupportedModel for one that cannot be counted."""
    purpose: type[Purpose] = Purpose
    """Says what plans were made for."""
    attention: Backends = STOCK
    head: HeadKernels = PLAIN


# ---- the model


class EngineModel:
    """A model, its value head, and the settings of an engine that its passes depend on.

    Args:
        budget: tokens whose graph may be alive at once, bytes of peak memory, or None for what is free.
        temperature: divides the logits before the softmax.

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
        registry: Registry,
    ):
        self.model, self.value_head, self.sharing, self.registry = model, value_head, sharing, registry
        self.budget, self.temperature = budget, temperature
        self.state = ModelState({}, {}, {}, {}, {}, [])
        """Its settings in the latest call."""
        self._latest = Snapshot(()), self.state
        """The model as it was read last."""
        self.hooked: list[nn.Module] = []
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
        """Memory that the current call needs besides its parts, if any; an error if that cannot be counted."""
        self.capabilities = self._all = self.check()
        """The part of the model's capabilities that the current call asks for."""

    def check(self) -> Capabilities:
        """Check the model if it has changed since the last call (a dropout may have been switched on), and read how
        much memory is free."""
        now = self.read()
        if now[:3] != self.state[:3]:  # its hooks are checked elsewhere
            self._all = self.registry.check_model(self.model, critics=True, value_head=self.value_head)
            self._cost, self._frozen_layers = (None, None), None
            modules = self.model.modules()
            self.undrawn = [m for m in modules if {*vars(m).get("module_dropout", {0: 1}).values()} == {0.0}]
        if now is not self.state:
            self._dtype: torch.dtype = self.model.dtype  # type: ignore[assignment]
        self.state = now
        self.device = model_device(self.model)
        self.wide_dtype = torch.promote_types(self._dtype, torch.float32)
        self.free = None if isinstance(self.budget, Bytes) else self.free_bytes()
        self.beside = None
        return self._all

    def read(self) -> ModelState:
        """The settings of the model and the value head as they are now."""
        snapshot, state = self._latest
        if not snapshot.modules or not snapshot.unchanged():
            snapshot, state = (
                Snapshot((self.model, self.value_head)),
                ModelState.of(self.model, self.value_head),
            )
            self._latest = snapshot, state
            self.hooked = [m for m in snapshot.modules if m._forward_pre_hooks or m._forward_hooks]
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
    def trained(self) -> list[nn.Parameter]:
        """Those that require a gradient, as they were read last."""
        return self._latest[0].trained

    @property
    def live(self) -> bool:
        """Whether scores computed now can have gradients."""
        return torch.is_grad_enabled() and bool(self.trained)

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
        dtype = torch.get_autocast_dtype(self.device.type) if autocast else self._dtype
        key = self.device, dtype, self.registry.head.setting  # `check` sees everything else
        if self._cost[0] != key:
            try:
                self._cost = key, self.count()
            except UnsupportedModel:
                self._cost = key, None
            except Exception as error:
                if not may_pass(error):
                    raise
                return None  # the next call counts again
        return self._cost[1]

    def count(self) -> CostModel:
        """The cost model of the model, counted now.

        Raises:
            UnsupportedModel: the model cannot be counted.
        """
        if self.registry.cost_of is None:
            raise UnsupportedModel("nothing here counts what a model costs: give the budget in tokens")
        return self.registry.cost_of(self.model)

    def counts(self, counts: ModelCounts) -> ModelCounts:
        """Counts of the plain model as they are under the features."""
        for feature in self.registry.features:
            counts = feature.counts(self, counts)
        return counts

    @property
    def cost(self) -> CostModel | None:
        """The cost model of the current call; None if it cannot be counted."""
        cost = None if isinstance(self.beside, UnsupportedModel) else self.counted
        return None if cost is None else replace(cost, counts=self.counts(cost.counts), beside=self.beside)

    def plan(self, layout: PackedLayout, budget: int | Bytes | None) -> Plan:
        """The fastest plan within a budget: tokens, bytes, or None for what the device has free.

        Raises:
            ValueError: bytes that no plan fits into.
            UnsupportedModel: bytes, and a model that cannot be counted.
        """
        purpose = self.registry.purpose
        if isinstance(budget, Bytes):
            if isinstance(self.beside, UnsupportedModel):
                raise self.beside
            cost = self.cost or self.count()
            cost.check_beside(budget)
            return make_plan(layout, cost, budget=budget, purpose=purpose)
        cost = self.cost
        if cost is None:
            return plan_of_any_model(layout, budget, self.device)
        try:
            free = self.free if budget is None else None
            return make_plan(layout, cost, budget=budget, free_bytes=free, purpose=purpose)
        except ValueError as error:
            if budget is not None:
                raise
            # The user set no bound and predictions can be wrong, so small parts are tried; out of memory is handled.
            warnings.warn(f"more memory is predicted than is free ({error}); small parts are tried", stacklevel=2)
            return make_plan(layout, cost, budget=LAST_RESORT_TOKENS, purpose=purpose)

    def free_bytes(self) -> int:
        """Bytes that plans of this process may use now, minus gradients not yet allocated (``.grad`` is None)."""
        free, absent = free_bytes(self.device), 0
        if self.device.type == "cpu":
            free //= self.sharing.processes_on_host
        for p in self.trained:
            grad = p.grad
            if grad is not None and type(grad) is not Tensor:
                grad = getattr(grad, "beneath", grad)  # of a `DeferredGradient`
            if grad is None:
                # Of a sharded parameter, the part that this process holds.
                absent += p.nbytes if type(p) is nn.Parameter else getattr(p, "_local_tensor", p).nbytes
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
        from treetrain.core.planning.kept_graphs import FINER, MOST_PARTS, keeping_most

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
        trained = sum(p.numel() for p in self.trained)
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
        balance: StepBalance | None = None,
        scale: float = 1.0,
        reduces: Reduces = "each",
    ) -> list[Extension]:
        """The extensions of a try, outermost first; none for a dense model in one process.

        Args:
            balanced, balance, scale: see `Feature.extension`.
            reduces: which backwards reduce gradients over processes.
        """
        extensions, inner = self.sharing.extensions(self.capabilities)
        for feature in self.registry.features:
            made = feature.extension(self, tree, balanced=balanced, scale=scale, balance=balance)
            if made is not None:
                (inner if feature.within_sharing else extensions).append(made)
        extensions += inner
        for extension in extensions:
            extension.reduces = reduces
        self.attach_hooks(extensions)
        return extensions

    def attach_hooks(self, extensions: list[Extension]) -> None:
        """Run the hooks that parameters have now once in a run. Some may be set between score and backward."""
        hooked = any(p._backward_hooks or p._post_accumulate_grad_hooks for p in self.trained)
        if hooked and not any(isinstance(extension, HooksOnce) for extension in extensions):
            place = sum(not extension.within_hooks for extension in extensions)
            extensions.insert(place, HooksOnce(self.parameters, self.sharing.shards(self.parameters)))

"""Layers that mix tokens by recurrence or convolution: which are exact on a tree, and how they are switched.

A layer is known by what it is made of, never by its name; and because the same parts may be put together differently,
a tiny layer of its class is run once, by its own forward and by ours, before it is trusted.
"""

import copy
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from treetrain.attention.dispatch import Choice
from treetrain.errors import UnsupportedModel
from treetrain.linear_attention.dispatch import choose_rule
from treetrain.linear_attention.paths import Paths
from treetrain.models import deltanet
from treetrain.models.runs_around import runs_around
from treetrain.models.switch import TreeRun, replaced_forward
from treetrain.tree.build import build_tree
from treetrain.tree.layout import pack


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A way of building a recurrent layer."""

    what: str
    children: frozenset[str]
    """Names of its submodules with parameters."""
    parameters: frozenset[str]
    """Names of its own parameters."""
    forward: Callable[[Any, Tensor, Paths], Tensor]
    """(layer, hidden states [1, N, D], paths) -> [1, N, D]."""


_DELTA: dict[str, Any] = {"what": "gated DeltaNet", "parameters": frozenset({"dt_bias", "A_log"})}
KINDS = (
    Kind(
        children=frozenset({"conv1d", "in_proj_qkvz", "in_proj_ba", "norm", "out_proj"}),
        forward=deltanet.fused_projections,
        **_DELTA,
    ),
    Kind(
        children=frozenset({"conv1d", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "norm", "out_proj"}),
        forward=deltanet.split_projections,
        **_DELTA,
    ),
    Kind(
        children=frozenset(
            {"conv1d", "q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "g_proj", "o_norm", "o_proj"},
        ),
        forward=deltanet.separate_projections,
        **_DELTA,
    ),
    Kind(
        what="gated short convolution",
        children=frozenset({"conv", "in_proj", "out_proj"}),
        parameters=frozenset(),
        forward=deltanet.short_convolution,
    ),
)
_TINY = {  # the same layer, small
    "hidden_size": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 3,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 3,
    "conv_L_cache": 3,
}
_TINY_ROWS, _TINY_TOLERANCE = 9, 1e-4
_TRUSTED: dict[type, str | None] = {}
"""Classes that were tried, and what was wrong with them."""
_MISSING = {  # by what a class is called, since these are refused in any case
    "mamba2mixer": "a Mamba-2 scan (SSD)",
    "bambamixer": "a Mamba-2 scan (SSD)",
    "falconh1mixer": "a Mamba-2 scan (SSD)",
    "moehybridmambalayer": "a Mamba-2 scan (SSD)",
    "zamba2mambamixer": "a Mamba-2 scan (SSD)",
    "mamba": "a selective scan (Mamba)",
    "lightning": "lightning attention",
    "rwkv": "an RWKV recurrence",
    "rglru": "a gated linear recurrence (RG-LRU)",
    "recurrent": "a recurrence",
    "shortconv": "a short convolution",
    "deltaattention": "a delta rule with a decay of its own for every channel (Kimi delta attention)",
    "deltanet": "a delta rule put together in another way",
    "linearattention": "linear attention",
    "hyena": "a long convolution (Hyena)",
    "retention": "retention",
    "mlstm": "an xLSTM recurrence",
}


def kind_of(module: nn.Module) -> Kind | None:
    """The kind of a recurrent layer; None for any other module."""
    names = module._modules.keys()
    if not ("conv1d" in names or "conv" in names):
        return None
    parameters = frozenset(name for name, _ in module.named_parameters(recurse=False))
    children = frozenset(name for name, child in module.named_children() if any(True for _ in child.parameters()))
    return next((kind for kind in KINDS if (kind.children, kind.parameters) == (children, parameters)), None)


def check_recurrence(model: nn.Module, config: Any) -> int:
    """How many layers mix tokens by a recurrence, all of them exact on a tree.

    Args:
        config: of the text model.

    Raises:
        UnsupportedModel: naming a layer that is not known, and what is missing.
    """
    known: list[str] = []
    unknown: list[tuple[str, str, str]] = []
    for name, module in model.named_modules():
        if known and name.startswith(f"{known[-1]}."):
            continue
        if kind_of(module) is not None:
            wrong = _wrong_with(module, config)
            if wrong:
                raise UnsupportedModel(f"{name} ({type(module).__name__}) {wrong}.")
            known.append(name)
        elif what := _mixes_by(module):
            unknown.append((name, type(module).__name__, what))
    # What is merely called after a known layer inside it does not mix by itself.
    unknown = [
        entry for entry in unknown if not any(layer.startswith(f"{entry[0]}.") or not entry[0] for layer in known)
    ]
    if unknown:
        name, kind, what = _innermost(unknown)
        raise UnsupportedModel(
            f"{name} ({kind}) mixes tokens by {what}, whose state is not carried over the forks of a tree yet: a "
            "branch would go on from another branch's state. Exact so far: attention, gated DeltaNet and gated short "
            "convolutions."
        )
    return len(known)


def _mixes_by(module: nn.Module) -> str | None:
    """How a module that is no known layer mixes tokens; None for one that does not, as far as can be told."""
    kind = type(module).__name__.lower()
    for word, what in _MISSING.items():
        if word in kind and "norm" not in kind:
            return what
    if isinstance(module, nn.RNNBase | nn.Conv1d):
        return "a recurrence or convolution of unknown build"
    return None


def _innermost(found: list[tuple[str, str, str]]) -> tuple[str, str, str]:
    """The first module found, or what is inside it where that was found too (a model is called after its layers)."""
    at = found[0]
    for other in found[1:]:
        inside = not at[0] or other[0].startswith(f"{at[0]}.")
        if inside and "of unknown build" not in other[2]:
            at = other
    return at


def _wrong_with(layer: nn.Module, config: Any) -> str | None:
    kind = type(layer)
    if kind not in _TRUSTED:
        _TRUSTED[kind] = _try_tiny(layer, config)
    return _TRUSTED[kind]


def _try_tiny(layer: Any, config: Any) -> str | None:
    """Run a small layer of the same class on one row by its own forward and by ours; None where they agree."""
    small = copy.deepcopy(config)
    try:
        for field, value in _TINY.items():
            setattr(small, field, value)
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.autocast("cpu", enabled=False):
            torch.manual_seed(0)
            tiny = type(layer)(small, layer.layer_idx).to(device="cpu", dtype=torch.float32)
            for parameter in tiny.parameters():
                nn.init.normal_(parameter, std=0.5)
            hidden = torch.randn(1, _TINY_ROWS, small.hidden_size)
            kind = kind_of(tiny)
            if kind is None:
                return "is built otherwise where it is small; it is not supported"
            paths = Paths(pack(build_tree([range(_TINY_ROWS)]), trim=False), torch.device("cpu"))
            with torch.no_grad(), _torch_functions(type(layer)):
                own, ours = tiny(hidden), kind.forward(tiny, hidden, paths)
    except Exception as error:  # whatever an unknown class does with such a configuration
        return f"looks known, but a small one of its class cannot be tried ({type(error).__name__}: {error})"
    if own.shape != ours.shape or not torch.allclose(own, ours, rtol=_TINY_TOLERANCE, atol=_TINY_TOLERANCE):
        return f"has the parts of a {kind.what}, but its own forward gives something else; it is not supported"
    return None


@contextmanager
def _torch_functions(kind: type) -> Iterator[None]:
    """A class's module with the functions of torch that it wraps, not what takes their place where it is installed.

    transformers puts the kernels of other packages there, whatever the device; those have no CPU form.
    """
    names = vars(sys.modules[kind.__module__])
    wrapped = {key: value for key, value in names.items() if callable(value) and hasattr(value, "__wrapped__")}
    plain = {key: inspect.unwrap(value) for key, value in wrapped.items()}
    names.update({key: value for key, value in plain.items() if any(word in key for word in ("delta_rule", "conv1d"))})
    try:
        yield
    finally:
        names.update(wrapped)


def delta_rule_of(model: nn.Module, device: torch.device) -> Choice | None:
    """Which form of the gated delta rule runs on trees that suit it, and why; None for a model without such layers."""
    for module in model.modules():
        kind = kind_of(module)
        if kind is not None and kind.what == _DELTA["what"]:
            dtype = next(module.parameters()).dtype
            if torch.is_autocast_enabled(device.type):
                dtype = torch.get_autocast_dtype(device.type)
            return choose_rule(device, dtype, int(module.head_k_dim), int(module.head_v_dim))  # type: ignore[arg-type]
    return None


@contextmanager
def tree_recurrence(model: nn.Module) -> Iterator[None]:
    """Let recurrent layers follow the paths of the tree run for the length of the block; restored on any exit."""
    layers = [(module, kind) for module in model.modules() if (kind := kind_of(module)) is not None]
    with (
        runs_around(model, [layer for layer, _ in layers if not _takes_keywords(layer)]) as run_around,
        ExitStack() as stack,
    ):
        for layer, kind in layers:
            stack.enter_context(replaced_forward(layer, partial(_tree_forward, layer, kind, run_around)))
        yield


def _takes_keywords(layer: nn.Module) -> bool:
    """Whether what is around a layer could hand it the run; some releases of transformers hand it no keywords."""
    taken = inspect.signature(type(layer).forward).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken)


def _tree_forward(
    layer: Any,
    kind: Kind,
    run_around: Callable[[], TreeRun | None],
    hidden_states: Tensor,
    cache_params: Any = None,
    attention_mask: Tensor | None = None,
    treetrain_run: TreeRun | None = None,
    **kwargs: Any,
) -> Tensor:
    """In the place of a recurrent layer's forward. [1, N, D] -> [1, N, D]."""
    name = type(layer).__name__
    treetrain_run = treetrain_run or run_around()
    if treetrain_run is None or treetrain_run.paths is None:
        raise UnsupportedModel(
            f"{name} was called without the tree run: the model does not pass keyword arguments on to it, or "
            "activation checkpointing is around it alone (put it around whole layers), so it cannot be told which "
            "token follows which."
        )
    if attention_mask is not None or cache_params is not None or kwargs.get("past_key_values") is not None:
        raise UnsupportedModel(f"{name} is given a mask or a cache, which a tree has no place for.")
    if hidden_states.shape[:2] != (1, treetrain_run.tokens):
        raise UnsupportedModel(
            f"{name} is given {tuple(hidden_states.shape[:2])} tokens, but the tree has {treetrain_run.tokens}: "
            "something adds tokens of its own (a prompt adapter, a cache)."
        )
    number, seen = layer.layer_idx, treetrain_run.layers_seen
    (treetrain_run.recurrent_twice if number in seen else seen).add(number)
    return kind.forward(layer, hidden_states, treetrain_run.paths)

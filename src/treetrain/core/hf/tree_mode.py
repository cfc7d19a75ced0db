"""Puts a Hugging Face causal LM into tree mode for one call, and restores it.

Attention goes through transformers' attention interface, registered under our own name. The run reaches the attention
layers as a keyword argument of the model's forward, so it is still there when activation checkpointing calls a layer a
second time.

No mask is built. A model makes its masks by transformers' functions, which compose a *mask function* from a few known
ones and pass it to the mask interface registered for the attention implementation. Ours takes it apart and returns the
range that each layer sees in place of the mask (`RangeMask`). It refuses any unknown part, so a layer never sees more
or less than in the model itself.

Shape letters: N tokens, H query heads, G key/value heads, D size of query and key heads, V size of value heads.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NoReturn, TypeVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from treetrain.core.attention.kv_cache import AttentionCall
from treetrain.core.attention.schedule import AttentionSpec
from treetrain.core.errors import UnsupportedModel
from treetrain.core.tree.layout import FULL, AttentionRange

T = TypeVar("T")
INTERFACE = "treetrain"
RUN_KEYWORD = "treetrain_run"
# Keyword arguments that transformers' layers pass to attention and that do not change what a token sees.
_NEUTRAL = {
    "position_ids",
    "position_embeddings",
    "cache_position",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
    "num_items_in_batch",
    "logits_to_keep",
    "token_type_ids",
}


def instance_of(kind: type[T], among: Iterable[object]) -> T | None:
    """The first of some objects that is of a class; None if none is."""
    return next((x for x in among if isinstance(x, kind)), None)


class TreeRun:
    """Everything that the layers of one forward need, and a record of the layers that ran.

    It is no data class: FSDP2 copies these, to cast the tensors in them, where a module gets one as an argument.
    """

    def __init__(
        self,
        attention: AttentionCall,
        tokens: int,
        positions: Int64[Tensor, " N"] | None = None,
        extras: Sequence[object] = (),
    ):
        self.attention, self.tokens = attention, tokens
        self.positions = positions
        """Every token's position on its path."""
        self.extras = extras
        """Objects that layers of some kind need; see `instance_of`."""
        self.layers_seen: set[tuple[int, str]] = set()
        """The layers that have mixed tokens, and how: a layer may have attention and a recurrence."""
        self.repeated: dict[int, tuple[str, str]] = {}
        """Layers that called attention or recurrence more than once, with what they did and what it hands on. Layers
        that backward runs again are here too."""

    def saw(self, layer: int, call: str, hands_on: str) -> None:
        """Record that a layer has called its attention or recurrence."""
        if (layer, call) in self.layers_seen:
            self.repeated[layer] = call, hands_on
        self.layers_seen.add((layer, call))


@contextmanager
def tree_attention(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Route attention through the tree run within the block; restore it on any exit.

    Args:
        modules: the modules of a model, at least those with a configuration.
    """
    with ExitStack() as stack:
        for module in modules:
            config = vars(module).get("config")
            if getattr(config, "_attn_implementation_internal", INTERFACE) != INTERFACE:  # modules share config objects
                stack.enter_context(replaced(config, _attn_implementation_internal=INTERFACE))
            if _scales_queries(module):
                stack.enter_context(replaced(module, **{_TUNING: False}))
        yield


@contextmanager
def replaced(target: object, **values: object) -> Iterator[None]:
    """Set attributes of an object inside the block, such as a module's ``forward``, around which hooks still run."""
    before = {name: vars(target)[name] for name in values if name in vars(target)}
    vars(target).update(values)
    try:
        yield
    finally:
        for name in values:  # in their old order
            if name in before:
                vars(target)[name] = before[name]
            else:
                del vars(target)[name]


# ---- attention


@torch.compiler.disable  # its arguments are new objects for every part
def _tree_attention(
    module: nn.Module,
    query: Float[Tensor, "1 H N D"],
    key: Float[Tensor, "1 G N D"],
    value: Float[Tensor, "1 G N V"],
    attention_mask: "RangeMask | EmptyMask | Tensor | None",
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Float[Tensor, " H"] | None = None,
    is_causal: bool | None = None,
    treetrain_run: TreeRun | None = None,
    **kwargs: object,
) -> tuple[Float[Tensor, "1 N H V"], None]:
    name, run = type(module).__name__, treetrain_run
    if run is None:
        raise UnsupportedModel(
            f"{name} was called without the tree run: the model does not pass keyword arguments on to its "
            "attention, so it cannot be told which tokens see which. It cannot be trained on a tree."
        )
    seen = attention_mask.range if isinstance(attention_mask, RangeMask | EmptyMask) else FULL
    if isinstance(attention_mask, Tensor):
        kwargs["attention_mask"] = attention_mask
    if dropout:
        kwargs["dropout"] = dropout
    if is_causal is False or not getattr(module, "is_causal", True):
        kwargs["is_causal"] = False
    unknown = {k: v for k, v in kwargs.items() if v is not None and k not in _NEUTRAL}
    if unknown:
        listed = ", ".join(f"{k}={v if isinstance(v, (int, float, str)) else '...'}" for k, v in unknown.items())
        raise UnsupportedModel(f"{name} asks its attention for {listed}, which is not exact on a tree yet.")
    spec = AttentionSpec(seen, softcap or None)
    _check_agreement(module, spec, sliding_window, s_aux, query.shape[1])
    lengths = {x.shape[2] for x in (query, key, value)}
    if query.shape[0] != 1 or lengths != {run.tokens}:
        raise UnsupportedModel(
            f"{name} attends over a batch of {query.shape[0]} with {sorted(lengths)} tokens, but the tree has "
            f"{run.tokens}: something adds tokens or keys of its own (a prompt adapter, a cache)."
        )
    query = _scaled_by_position(module, query, run.positions)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    layer = getattr(module, "layer_idx", -1)
    layer = id(module) if layer == -1 else layer  # Zamba 2 numbers its shared attention -1 wherever it stands
    run.saw(layer, "calls its attention", "set of keys and values")
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    return run.attention(q, k, v, scale, layer, spec, s_aux).unsqueeze(0), None


def _check_agreement(
    module: nn.Module, spec: AttentionSpec, sliding_window: int | None, sinks: Tensor | None, heads: int
) -> None:
    """Check that mask, keywords and configuration agree; where they differ, stock backends differ from each other."""
    name, seen, config = type(module).__name__, spec.visible_range, getattr(module, "config", None)
    if sliding_window is not None and sliding_window != seen.window:
        raise UnsupportedModel(
            f"{name} asks its attention for sliding_window={sliding_window}, but its mask is {seen}."
        )
    declared = getattr(config, "attn_logit_softcapping", None) or None
    if declared != spec.softcap:
        raise UnsupportedModel(
            f"{name} asks its attention for softcap={spec.softcap}, its configuration for "
            f"attn_logit_softcapping={declared}."
        )
    own = getattr(module, "sinks", None)
    if (own is None) != (sinks is None) or (sinks is not None and sinks.shape != (heads,)):
        raise UnsupportedModel(
            f"{name} asks its attention for s_aux={'nothing' if sinks is None else tuple(sinks.shape)}, where one sink "
            f"for each of {heads} heads was expected ({'none' if own is None else 'some'} in the layer)."
        )


# Llama 4's layers without rotary embedding scale queries by their position ("temperature tuning"). They count positions
# in the call, which in a packed tree are not positions in the rows. So tree mode switches their scaling off and scales
# here by each token's position on its path.

_TUNING = "attn_temperature_tuning"


def _scales_queries(module: nn.Module) -> bool:
    fields = (_TUNING, "use_rope", "floor_scale", "attn_scale")
    return all(field in vars(module) for field in fields) and not module.use_rope


def _scaled_by_position(
    module: nn.Module, query: Float[Tensor, "1 H N D"], positions: Int64[Tensor, " N"] | None
) -> Float[Tensor, "1 H N D"]:
    """Scale queries as the layer would in a single row; unchanged for layers that do not scale."""
    if not _scales_queries(module) or not getattr(getattr(module, "config", None), _TUNING, False):
        return query
    assert positions is not None
    steps = torch.floor((positions.float() + 1.0) / module.floor_scale)  # type: ignore[operator]
    scales = torch.log1p(steps) * module.attn_scale + 1.0  # type: ignore[operator]
    return (query * scales[:, None]).to(query.dtype)


# ---- masks

_COMBINATIONS = {"and_masks.<locals>.and_mask", "remap_positions_for_packed_sequence.<locals>.inner_mask"}
# The interval rule already implies these: causal, and no token of one row sees another row.
_IMPLIED = {"causal_mask_function", "packed_sequence_mask_function.<locals>.inner_mask"}
_WINDOW = "sliding_window_overlay.<locals>.inner_mask"
_CHUNK = "chunked_overlay.<locals>.inner_mask"


class RangeMask:
    """Placeholder for a mask. Layers may only pass it on; a layer that computes with it is refused."""

    def __init__(self, seen: AttentionRange):
        self.range = seen

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse(f"reads .{name} of it")

    def __getitem__(self, key: object) -> "RangeMask":
        """The mask itself, for slices that leave nothing out (Gemma 4 before layers that share keys and values)."""
        keys = key if isinstance(key, tuple) else (key,)
        if not all(isinstance(part, slice) and part in (slice(None), slice(0, None)) for part in keys):
            self._refuse("takes a part of it")
        return self

    def _refuse(self, what: str) -> NoReturn:
        raise UnsupportedModel(
            f"the model computes with its attention mask, {self.range} (it {what}): what its layers see is not known."
        )


class EmptyMask:
    """Placeholder for the mask of a window of 0 tokens, which Qwen2-MoE makes in addition to the one it uses."""

    @property
    def range(self) -> NoReturn:
        raise UnsupportedModel("a layer takes an attention mask whose window is 0, so that no token sees any.")


def mask_of(mask_function: Callable) -> RangeMask | EmptyMask | None:
    """The placeholder for the mask of a mask function; None for full causal attention.

    Raises:
        UnsupportedModel: the mask is not causal, a window or chunks; names the unknown part.
    """
    ranges = []
    for function in _leaves(mask_function):
        name = function.__qualname__
        known = function.__module__ == "transformers.masking_utils"
        if known and name in _IMPLIED:
            continue
        size = inspect.getclosurevars(function).nonlocals
        if known and name == _WINDOW:
            if not size["sliding_window"]:
                return EmptyMask()
            ranges.append(AttentionRange(window=int(size["sliding_window"])))
        elif known and name == _CHUNK:
            ranges.append(AttentionRange(chunk=int(size["chunk_size"])))
        else:
            raise UnsupportedModel(f"the model's attention mask has a part that is not known here: {name}.")
    if len(ranges) > 1:
        raise UnsupportedModel(f"the model's attention mask has several bounds at once: {', '.join(map(str, ranges))}.")
    return RangeMask(ranges[0]) if ranges else None


def _leaves(function: Callable) -> Iterator[Callable]:
    """List the mask functions from which a function is composed."""
    if function.__qualname__ not in _COMBINATIONS:
        yield function
        return
    for value in inspect.getclosurevars(function).nonlocals.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            if callable(part):
                yield from _leaves(part)


AttentionInterface.register(INTERFACE, _tree_attention)
AttentionMaskInterface.register(INTERFACE, lambda *_args, mask_function, **_kwargs: mask_of(mask_function))

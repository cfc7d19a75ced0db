"""Puts a Hugging Face causal LM into tree mode for the length of one call, and back.

Attention goes through transformers' own attention interface under a name of ours; the run travels to the attention
layers as a keyword argument of the model's forward, so that it is still there when activation checkpointing calls a
layer a second time. The head module keeps its identity (hooks, FSDP, adapters) and only its ``forward`` is replaced.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from treetrain.attention.sight import Ask
from treetrain.errors import UnsupportedModel
from treetrain.models.masks import EmptyMask, SightMask, register_tree_masks
from treetrain.models.temperature import position_scales, without_own_scales
from treetrain.tree.attention_range import FULL

INTERFACE = "treetrain"
RUN_KEYWORD = "treetrain_run"
# Keyword arguments that transformers' layers hand to attention and that do not change what a token sees.
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


class AttentionBackend(Protocol):
    """Tree attention over one packed run."""

    name: str

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, layer: int, ask: Ask, sinks: Tensor | None
    ) -> Tensor:
        """query [N, H, D], key [N, G, D], value [N, G, V] -> [N, H, V]; `layer` tells the layers' carries apart."""
        ...


class TreeRun:
    """What the attention layers of one forward need, and a note of which layers have been through it."""

    def __init__(self, attention: AttentionBackend, tokens: int, positions: Tensor | None = None):
        self.attention = attention
        self.tokens = tokens
        self.positions = positions
        """int64 [N]: every token's place on its path."""
        self.layers_seen: set[int] = set()
        self.layers_twice: set[int] = set()
        """Layers that called attention more than once; what backward runs again is counted here too."""
        self.recurrent_twice: set[int] = set()
        """Likewise recurrent layers."""
        self.routers: Any = None
        """What is done with the routers of experts; None leaves them as they are."""
        self.paths: Any = None
        """What recurrent layers follow; None in a model without."""


def _tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: SightMask | EmptyMask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    treetrain_run: TreeRun | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention interface's function. query [1, H, N, D], key and value [1, G, N, D] -> [1, N, H, D]."""
    name = type(module).__name__
    if treetrain_run is None:
        raise UnsupportedModel(
            f"{name} was called without the tree run: the model does not pass keyword arguments on to its "
            "attention, so it cannot be told which tokens see which. It cannot be trained on a tree."
        )
    sight = attention_mask.sight if isinstance(attention_mask, SightMask | EmptyMask) else FULL
    if isinstance(attention_mask, Tensor):
        kwargs["attention_mask"] = attention_mask
    if dropout:
        kwargs["dropout"] = dropout
    if is_causal is False or not getattr(module, "is_causal", True):
        kwargs["is_causal"] = False
    _refuse_unknown(name, kwargs)
    ask = Ask(sight, softcap or None)
    _check_agreement(module, ask, sliding_window, s_aux, query.shape[1])
    lengths = {x.shape[2] for x in (query, key, value)}
    if query.shape[0] != 1 or lengths != {treetrain_run.tokens}:
        raise UnsupportedModel(
            f"{name} attends over a batch of {query.shape[0]} with {sorted(lengths)} tokens, but the tree has "
            f"{treetrain_run.tokens}: something adds tokens or keys of its own (a prompt adapter, a cache)."
        )
    query = position_scales(module, query, treetrain_run.positions)
    query, key, value = _one_dtype(query, key, value)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    layer = getattr(module, "layer_idx", id(module))
    (treetrain_run.layers_twice if layer in treetrain_run.layers_seen else treetrain_run.layers_seen).add(layer)
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    return treetrain_run.attention(q, k, v, scale, layer, ask, s_aux).unsqueeze(0), None


def _refuse_unknown(name: str, asked: dict[str, Any]) -> None:
    """Whatever a layer asks for that is not done here."""
    unknown = {k: v for k, v in asked.items() if v is not None and k not in _NEUTRAL}
    if unknown:
        listed = ", ".join(f"{k}={v if isinstance(v, (int, float, str)) else '...'}" for k, v in unknown.items())
        raise UnsupportedModel(f"{name} asks its attention for {listed}, which is not exact on a tree yet.")


_KINDS = {"full_attention": "full", "sliding_attention": "window", "chunked_attention": "chunk"}


def _check_agreement(module: nn.Module, ask: Ask, sliding_window: int | None, sinks: Tensor | None, heads: int) -> None:
    """The mask, the keywords and the configuration must say the same: where they differ, so do stock backends."""
    name, sight, config = type(module).__name__, ask.sight, getattr(module, "config", None)
    if sliding_window is not None and sliding_window != sight.window:
        raise UnsupportedModel(
            f"{name} asks its attention for sliding_window={sliding_window}, but its mask is {sight}."
        )
    kinds, number = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if kinds and number is not None and number < len(kinds):
        kind = "window" if sight.window else "chunk" if sight.chunk else "full"
        if _KINDS.get(kinds[number], kind) != kind:
            raise UnsupportedModel(f"layer {number} is of kind {kinds[number]!r}, but {name} asks for {sight}.")
    declared = getattr(config, "attn_logit_softcapping", None) or None
    if declared != ask.softcap:
        raise UnsupportedModel(
            f"{name} asks its attention for softcap={ask.softcap}, its configuration for "
            f"attn_logit_softcapping={declared}."
        )
    own = getattr(module, "sinks", None)
    if (own is None) != (sinks is None) or (sinks is not None and sinks.shape != (heads,)):
        raise UnsupportedModel(
            f"{name} asks its attention for s_aux={'nothing' if sinks is None else tuple(sinks.shape)}, where one sink "
            f"for each of {heads} heads was expected ({'none' if own is None else 'some'} in the layer)."
        )


def _one_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast a normalised query may be float32 beside a bfloat16 value: cast as stock attention would."""
    kind = tensors[0].device.type
    if torch.is_autocast_enabled(kind):
        return tuple(t.to(torch.get_autocast_dtype(kind)) for t in tensors)
    return tensors


AttentionInterface.register(INTERFACE, _tree_attention)
register_tree_masks(INTERFACE)


@contextmanager
def tree_attention(model: nn.Module) -> Iterator[None]:
    """Route the model's attention through the tree run for the length of the block; restored on any exit."""
    configs = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation_internal"):
            configs[id(config)] = config
    before = {key: config._attn_implementation_internal for key, config in configs.items()}
    try:
        for config in configs.values():
            config._attn_implementation_internal = INTERFACE
        with without_own_scales(model):
            yield
    finally:
        for key, config in configs.items():
            config._attn_implementation_internal = before[key]


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace one module's ``forward`` for the length of the block; hooks around it still run."""
    had_own = "forward" in module.__dict__
    before = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if had_own:
            module.forward = before  # type: ignore[assignment]
        else:
            del module.forward

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

from treetrain.errors import UnsupportedModel

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

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float, layer: int) -> Tensor:
        """query [N, H, D], key and value [N, G, D] -> [N, H, D]; `layer` tells the layers' carries apart."""
        ...


class TreeRun:
    """What the attention layers of one forward need, and a note of which layers have been through it."""

    def __init__(self, attention: AttentionBackend, tokens: int):
        self.attention = attention
        self.tokens = tokens
        self.layers_seen: set[int] = set()
        self.routers: Any = None
        """What is done with the routers of experts; None leaves them as they are."""


def _tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
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
    changed = {k: v for k, v in kwargs.items() if v is not None and k not in _NEUTRAL}
    if sliding_window is not None:
        changed["sliding_window"] = sliding_window
    if attention_mask is not None:
        changed["attention_mask"] = "a tensor"
    if dropout:
        changed["dropout"] = dropout
    if is_causal is False or not getattr(module, "is_causal", True):
        changed["is_causal"] = False
    if changed:
        listed = ", ".join(f"{k}={v if isinstance(v, (int, float, str)) else '...'}" for k, v in changed.items())
        raise UnsupportedModel(f"{name} asks its attention for {listed}, which is not exact on a tree yet.")
    lengths = {x.shape[2] for x in (query, key, value)}
    if query.shape[0] != 1 or lengths != {treetrain_run.tokens}:
        raise UnsupportedModel(
            f"{name} attends over a batch of {query.shape[0]} with {sorted(lengths)} tokens, but the tree has "
            f"{treetrain_run.tokens}: something adds tokens or keys of its own (a prompt adapter, a cache)."
        )
    if query.shape[-1] != value.shape[-1]:
        raise UnsupportedModel(
            f"{name} has query heads of size {query.shape[-1]} and value heads of size {value.shape[-1]}; "
            "unequal head sizes are not supported yet."
        )
    query, key, value = _one_dtype(query, key, value)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    layer = getattr(module, "layer_idx", id(module))
    treetrain_run.layers_seen.add(layer)
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    return treetrain_run.attention(q, k, v, scale, layer).unsqueeze(0), None


def _one_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast a normalised query may be float32 beside a bfloat16 value: cast as stock attention would."""
    kind = tensors[0].device.type
    if torch.is_autocast_enabled(kind):
        return tuple(t.to(torch.get_autocast_dtype(kind)) for t in tensors)
    return tensors


AttentionInterface.register(INTERFACE, _tree_attention)


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

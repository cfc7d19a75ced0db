"""Recognises the recurrent layers that are exact on a tree, and runs their forward in tree mode.

A layer is recognised by its submodules and parameters, not by its name. Another class may combine the same parts
differently, so a tiny layer of the class is run once, by its own forward and by ours, before the class is accepted.

In tree mode a layer's projections, gate, norm and output are called as the layer calls them, so adapters and hooks on
them work; only the convolution and the rule that mix tokens are replaced. Three kinds of gated DeltaNet are supported,
which differ in their projections (Qwen3-Next, Qwen3.5, OLMo hybrid), Mamba-2 (Bamba, Falcon-H1, Granite 4, Nemotron-H,
Zamba2), and gated short convolutions (LFM2).

Shape letters: N tokens, D size of hidden states, J heads of queries and keys (groups of Mamba-2), H heads of values,
K and V sizes of keys and values; a rank that shares the heads of a layer has its share of J and H.
"""

import copy
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from treetrain.core.engine.memory import is_out_of_memory
from treetrain.core.errors import UnsupportedModel
from treetrain.core.hf.capability import SpecialLayers, causal_lm
from treetrain.core.hf.tree_mode import TreeRun, instance_of, replaced
from treetrain.core.tree.layout import pack
from treetrain.core.tree.token_tree import build_tree
from treetrain.layers.enclosing_runs import enclosing_runs

if TYPE_CHECKING:
    from treetrain.layers.recurrence.paths import Paths

# ---- forwards in tree mode

Hidden = Float[Tensor, "1 N D"]
Layer = Any
"""A recurrent layer of transformers: `KINDS` has what each kind of layer must have."""


def _fused_projections(layer: Layer, hidden: Hidden, paths: "Paths") -> Hidden:
    """Run a layer of two projections whose outputs are interleaved by key head (Qwen3-Next)."""
    parts = layer.fix_query_key_value_ordering(layer.in_proj_qkvz(hidden), layer.in_proj_ba(hidden))
    query, key, value, gate, beta, step = parts
    mixed = torch.cat([x.flatten(2) for x in (query, key, value)], -1)
    out = _gated_delta(layer, mixed, beta.sigmoid(), step, paths)
    return layer.out_proj(_gated_norm(layer.norm, out, gate, hidden))


def _split_projections(layer: Layer, hidden: Hidden, paths: "Paths") -> Hidden:
    """Run a layer of one projection for queries, keys and values, and one for each other input (Qwen3.5)."""
    mixed, gate = layer.in_proj_qkv(hidden), layer.in_proj_z(hidden)
    beta, step = layer.in_proj_b(hidden), layer.in_proj_a(hidden)
    out = _gated_delta(layer, mixed, beta.sigmoid(), step, paths)
    return layer.out_proj(_gated_norm(layer.norm, out, gate, hidden))


def _separate_projections(layer: Layer, hidden: Hidden, paths: "Paths") -> Hidden:
    """Run a layer of a separate projection for each input; beta may be up to 2 (OLMo hybrid)."""
    mixed = torch.cat([layer.q_proj(hidden), layer.k_proj(hidden), layer.v_proj(hidden)], -1)
    beta = layer.b_proj(hidden).sigmoid()
    beta = beta * 2.0 if layer.allow_neg_eigval else beta
    out = _gated_delta(layer, mixed, beta, layer.a_proj(hidden), paths)
    return layer.o_proj(_gated_norm(layer.o_norm, out, layer.g_proj(hidden), hidden))


def _short_convolution(layer: Layer, hidden: Hidden, paths: "Paths") -> Hidden:
    """Run a layer of a convolution between two gates (LFM2)."""
    before, after, values = layer.in_proj(hidden).chunk(3, -1)
    gated = (before * values)[0]
    weight = layer.conv.weight.squeeze(1)
    bias = layer.conv.bias
    if (ranks := paths.exchange) is not None:
        (gated,), weight = ranks.to_heads(gated), ranks.own(weight)
        bias = None if bias is None else ranks.own(bias)
    out = paths.convolve(layer.layer_idx, gated, weight)
    out = (out if bias is None else out + bias).to(gated.dtype)
    return layer.out_proj(after * (out if ranks is None else ranks.to_tokens(out)))


def _gated_delta(
    layer: Layer,
    mixed: Float[Tensor, "1 N 2*J*K+H*V"],
    beta: Float[Tensor, "1 N H"],
    step: Float[Tensor, "1 N H"],
    paths: "Paths",
) -> Float[Tensor, "N H V"]:
    """Run convolution and rule; the result has the dtype of `mixed`."""
    from treetrain.layers.recurrence.paths import GATED_DELTA

    sizes, weights = [layer.key_dim, layer.key_dim, layer.value_dim], [layer.A_log, layer.dt_bias]
    (query, key, value), (beta, step), (log_rate, shift) = _convolved(layer, mixed, sizes, [beta, step], weights, paths)
    wide = torch.promote_types(mixed.dtype, torch.float32)
    decay = -log_rate.to(wide).exp() * torch.nn.functional.softplus(step.to(wide) + shift)
    query, key = (x.unflatten(-1, (-1, layer.head_k_dim)) for x in (query, key))
    value = value.unflatten(-1, (-1, layer.head_v_dim))
    out = paths.recur(layer.layer_idx, GATED_DELTA, query, key, value, decay, beta).to(mixed.dtype)
    return out if paths.exchange is None else paths.exchange.to_tokens(out.flatten(1)).unflatten(1, (-1, out.shape[2]))


def _convolved(
    layer: Layer, mixed: Tensor, sizes: list[int], by_head: list[Tensor], weights: list[Tensor], paths: "Paths"
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Run a layer's convolution and activation over its channels.

    Args:
        mixed: [1, N, channels].
        sizes: the channels of each block (queries, keys, values); the channels of a head are adjacent.
        by_head: what the rule takes for each head, [1, N, H] each.
        weights: the rule's weights for each head, [H] each.

    Returns:
        The blocks, [N, size] each, in the dtype of `mixed`; `by_head`, [N, H] each; and `weights`. Where ranks share
        the layer, they are those of all tokens and of this rank's heads.
    """
    mixed, by_head, dtype = mixed[0], [x[0] for x in by_head], mixed.dtype
    weight, bias = layer.conv1d.weight.squeeze(1), layer.conv1d.bias
    if (ranks := paths.exchange) is not None:
        exchanged = ranks.to_heads(*mixed.split(sizes, -1), *by_head)
        blocks, by_head = exchanged[: len(sizes)], exchanged[len(sizes) :]
        mixed = torch.cat(blocks, -1)
        weight = torch.cat([ranks.own(x) for x in weight.split(sizes)])
        bias = None if bias is None else torch.cat([ranks.own(x) for x in bias.split(sizes)])
        weights, sizes = [ranks.own(x) for x in weights], [x.shape[-1] for x in blocks]
    smoothed = paths.convolve(layer.layer_idx, mixed, weight)
    if bias is not None:
        smoothed = smoothed + bias
    return list(ACT2FN[layer.activation](smoothed).to(dtype).split(sizes, -1)), by_head, weights


def _state_space(layer: Layer, hidden: Hidden, paths: "Paths") -> Hidden:
    """Run a Mamba-2 layer."""
    from treetrain.layers.recurrence.paths import STATE_SPACE

    scaled = hasattr(layer, "mup_vector")  # Falcon-H1 scales what goes into the projection and what comes out of it
    projected = layer.in_proj(hidden * layer.ssm_in_multiplier if scaled else hidden)
    projected = projected * layer.mup_vector if scaled else projected
    inner = layer.intermediate_size
    keys = layer.n_groups * layer.ssm_state_size
    dtype = hidden.dtype
    gate, mixed, step = projected.split([inner, inner + 2 * keys, layer.num_heads], -1)
    weights = [layer.A_log, layer.dt_bias, layer.D]
    channels, (step,), (log_rate, shift, skip) = _convolved(layer, mixed, [inner, keys, keys], [step], weights, paths)
    value, key, query = channels
    wide = torch.promote_types(dtype, torch.float32)
    step = torch.nn.functional.softplus(step.to(wide) + shift).clamp(*layer.time_step_limit)[..., None]
    value = value.unflatten(-1, (-1, layer.head_dim)).to(wide)
    out = paths.recur(
        layer.layer_idx,
        STATE_SPACE,
        query.unflatten(-1, (-1, layer.ssm_state_size)),
        key.unflatten(-1, (-1, layer.ssm_state_size)),
        value * step,
        -log_rate.to(wide).exp() * step[..., 0],
    )
    out = torch.addcmul(out.to(wide), value, skip.to(wide)[:, None]).flatten(1)
    out = (out if paths.exchange is None else paths.exchange.to_tokens(out)).unsqueeze(0)
    # Falcon-H1 may have no norm.
    out = out * nn.functional.silu(gate) if isinstance(layer.norm, nn.Identity) else layer.norm(out, gate)
    return layer.out_proj(out.to(dtype))


def _gated_norm(
    norm: nn.Module, out: Float[Tensor, "N H V"], gate: Float[Tensor, "1 N ..."], hidden: Hidden
) -> Float[Tensor, "1 N H*V"]:
    size = out.shape[-1]
    return norm(out.reshape(-1, size), gate.reshape(-1, size)).reshape(*hidden.shape[:2], -1)


# ---- recognising layers


class Kind(NamedTuple):
    """A supported kind of recurrent layer."""

    what: str
    children: set[str]
    """Names of its submodules with parameters."""
    parameters: set[str]
    """Names of its own parameters."""
    forward: Callable[[Layer, Tensor, "Paths"], Tensor]
    heads: Callable[[Layer], int]
    """Returns its number of heads of queries and keys, or channels of a convolution, which ranks can share."""


_DELTA, _OWN = "gated DeltaNet", {"dt_bias", "A_log"}
_MAMBA, _MIXER = "Mamba-2 layer", {"conv1d", "in_proj", "out_proj"}
_SEPARATE = {"conv1d", "q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "g_proj", "o_norm", "o_proj"}
_SPLIT = {"conv1d", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "norm", "out_proj"}
_FUSED = {"conv1d", "in_proj_qkvz", "in_proj_ba", "norm", "out_proj"}


def _key_heads(layer: Layer) -> int:
    return layer.key_dim // layer.head_k_dim


def _groups(layer: Layer) -> int:
    return layer.n_groups


def _channels(layer: Layer) -> int:
    return layer.conv.weight.shape[0]


KINDS = (
    Kind(_DELTA, _FUSED, _OWN, _fused_projections, _key_heads),
    Kind(_DELTA, _SPLIT, _OWN, _split_projections, _key_heads),
    Kind(_DELTA, _SEPARATE, _OWN, _separate_projections, _key_heads),
    Kind(_MAMBA, {*_MIXER, "norm"}, {*_OWN, "D"}, _state_space, _groups),
    Kind(_MAMBA, _MIXER, {*_OWN, "D"}, _state_space, _groups),
    Kind("gated short convolution", {"conv", "in_proj", "out_proj"}, set(), _short_convolution, _channels),
)
_UNITS = {_DELTA: "key heads", _MAMBA: "groups of heads"}
_TINY = {  # configuration of the small test layer
    "hidden_size": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 3,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 3,
    "conv_L_cache": 3,
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), 6),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "mamba_ngroups"), 2),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size"), 5),
    **dict.fromkeys(("mamba_d_conv", "conv_kernel"), 3),
    "mamba_expand": 2,
    "mamba_d_ssm": 24,
}
_TINY_ROWS, _TINY_TOLERANCE = 9, 1e-4
_TRUSTED: dict[type, str | None] = {}
"""The classes tried so far, with what is wrong with each; None if nothing is."""
_RECURRENT = (
    "mamba", "bambamixer", "falconh1mixer", "lightning", "rwkv", "rglru", "recurrent", "shortconv", "deltaattention",
    "deltanet", "linearattention", "hyena", "retention", "mlstm",
)  # fmt: skip
"""Parts of the names of layers with a recurrence or convolution along the tokens."""


def kind_of(module: nn.Module) -> Kind | None:
    """The kind of a recurrent layer; None for any other module."""
    if not {"conv1d", "conv"} & module._modules.keys():
        return None
    parameters = {name for name, _ in module.named_parameters(recurse=False)}
    children = {name for name, child in module.named_children() if any(True for _ in child.parameters())}
    return next((kind for kind in KINDS if (kind.children, kind.parameters) == (children, parameters)), None)


@dataclass(frozen=True)
class RecurrentLayers(SpecialLayers):
    """The recurrent layers of a model."""

    modules: tuple[nn.Module, ...]

    @property
    def heads(self) -> dict[int, str]:
        """See `SpecialLayers`."""
        return {kind.heads(x): _UNITS.get(kind.what, "channels") for x in self.modules if (kind := kind_of(x))}


def check_recurrence(model: nn.Module, config: PreTrainedConfig) -> RecurrentLayers | None:
    """Find the recurrent layers, and check that all of them are exact on a tree; None if there are none.

    Args:
        config: configuration of the text model.

    Raises:
        UnsupportedModel: a layer is not supported; names it.
    """
    known: list[str] = []
    layers: list[nn.Module] = []
    by_name: list[tuple[str, str]] = []
    by_kind: list[tuple[str, str]] = []
    for name, module in causal_lm(model).named_modules():
        kind = type(module).__name__
        if known and name.startswith(f"{known[-1]}."):
            continue
        if kind_of(module) is not None:
            if type(module) not in _TRUSTED:
                _TRUSTED[type(module)] = _try_tiny(module, config)
            if wrong := _TRUSTED[type(module)]:
                raise UnsupportedModel(f"{name} ({kind}) {wrong}.")
            if "forward" in vars(module) and "_hf_hook" not in vars(module):  # accelerate's moves tensors to a device
                raise UnsupportedModel(
                    f"{name} ({kind}) has a forward of its own, which a tree cannot run: its recurrence follows the "
                    "tree in the place of this forward. Use forward hooks, which run, or wrap the module around it."
                )
            known.append(name)
            layers.append(module)
        elif any(word in kind.lower() for word in _RECURRENT) and "norm" not in kind.lower():
            by_name.append((name, kind))
        elif isinstance(module, nn.RNNBase | nn.Conv1d):
            by_kind.append((name, kind))
    # A module around a known layer may have a similar name, and does not mix tokens itself.
    unknown = [
        (name, kind)
        for name, kind in by_name or by_kind
        if name and not any(layer.startswith(f"{name}.") for layer in known)
    ]
    if unknown:
        name, kind = unknown[0]
        for inner, inner_kind in unknown[1:]:  # a block's name may contain its mixer's: name the innermost
            if inner.startswith(f"{name}."):
                name, kind = inner, inner_kind
        raise UnsupportedModel(
            f"{name} ({kind}) mixes tokens by a recurrence or convolution whose state is not carried over the forks of "
            "a tree: a branch would go on from another branch's state. Exact are attention, gated DeltaNet, Mamba-2 "
            "and gated short convolutions."
        )
    return RecurrentLayers(tuple(layers)) if layers else None


def _try_tiny(layer: Layer, config: PreTrainedConfig) -> str | None:
    """Run a small layer of the same class by its own forward and by ours; say what is wrong if they disagree."""
    from treetrain.layers.recurrence.paths import Paths

    small = copy.deepcopy(config)
    try:
        for field, value in _TINY.items():
            setattr(small, field, value)
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.autocast("cpu", enabled=False):
            torch.manual_seed(0)
            tiny = type(layer)(small, layer.layer_idx).to(device="cpu", dtype=torch.float32)
            if hasattr(layer, "mup_vector"):  # made by the model, not by the layer
                tiny.mup_vector = torch.rand(tiny.in_proj.out_features)
            for parameter in tiny.parameters():
                nn.init.normal_(parameter, std=0.5)
            hidden = torch.randn(1, _TINY_ROWS, small.hidden_size)
            kind = kind_of(tiny)
            if kind is None:
                return "is built otherwise where it is small; it is not supported"
            paths = Paths(pack(build_tree([range(_TINY_ROWS)]), trim=False), torch.device("cpu"))
            with torch.no_grad(), _torch_functions(type(layer)):
                own, ours = tiny(hidden), kind.forward(tiny, hidden, paths)
    except Exception as error:  # an unknown class may raise anything for such a configuration
        if is_out_of_memory(error):  # which says nothing about the class: the next model tries it again
            raise
        return f"looks known, but a small one of its class cannot be tried ({type(error).__name__}: {error})"
    if own.shape != ours.shape or not torch.allclose(own, ours, rtol=_TINY_TOLERANCE, atol=_TINY_TOLERANCE):
        return f"has the parts of a {kind.what}, but its own forward gives something else; it is not supported"
    return None


@contextmanager
def _torch_functions(kind: type) -> Iterator[None]:
    """Use the plain torch functions in a class's module within the block, instead of installed kernels.

    transformers wraps these functions to call other packages' kernels on any device, but those do not run on a CPU.
    """
    names = vars(sys.modules[kind.__module__])
    wrapped = {key: value for key, value in names.items() if callable(value) and hasattr(value, "__wrapped__")}
    plain = {key: inspect.unwrap(value) for key, value in wrapped.items()}
    names.update(
        {key: value for key, value in plain.items() if any(word in key for word in ("delta_rule", "conv1d", "mamba2"))}
    )
    try:
        yield
    finally:
        names.update(wrapped)


# ---- tree mode


@contextmanager
def tree_recurrence(model: nn.Module) -> Iterator[None]:
    """Let recurrent layers follow the paths of the tree run within the block; restore them on any exit."""
    layers = [(module, kind) for module in model.modules() if (kind := kind_of(module)) is not None]
    with (
        enclosing_runs(model, [layer for layer, _ in layers if not _takes_keywords(layer)]) as current_run,
        ExitStack() as stack,
    ):
        for layer, kind in layers:
            stack.enter_context(replaced(layer, forward=partial(_tree_forward, layer, kind, current_run)))
        yield


def _takes_keywords(layer: nn.Module) -> bool:
    """Whether a layer accepts the run as a keyword; in some releases of transformers it accepts no extra keywords."""
    taken = inspect.signature(type(layer).forward).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken)


def _tree_forward(
    layer: Layer,
    kind: Kind,
    current_run: Callable[[], TreeRun | None],
    hidden_states: Hidden,
    cache_params: object = None,
    attention_mask: Tensor | None = None,
    treetrain_run: TreeRun | None = None,
    **kwargs: object,
) -> Hidden:
    from treetrain.layers.recurrence.paths import Paths

    name, run = type(layer).__name__, treetrain_run or current_run()
    paths = None if run is None else instance_of(Paths, run.extras)
    if run is None or paths is None:
        raise UnsupportedModel(
            f"{name} was called without the tree run: the model does not pass keyword arguments on to it, or "
            "activation checkpointing is around it alone (put it around whole layers), so it cannot be told which "
            "token follows which."
        )
    caches = cache_params, kwargs.get("past_key_values"), kwargs.get("cache")
    if attention_mask is not None or any(cache is not None for cache in caches):
        raise UnsupportedModel(f"{name} is given a mask or a cache, which a tree has no place for.")
    if hidden_states.shape[:2] != (1, run.tokens):
        raise UnsupportedModel(
            f"{name} is given {tuple(hidden_states.shape[:2])} tokens, but the tree has {run.tokens}: "
            "something adds tokens of its own (a prompt adapter, a cache)."
        )
    run.saw(layer.layer_idx, "runs its recurrence", "state")
    return kind.forward(layer, hidden_states, paths)

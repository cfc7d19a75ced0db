"""Counts FLOPs and bytes of a model by running its own modules, layer by layer, without its weights.

The modules run once forward and backward, in tree mode, on *fake* tensors. These have a shape, a dtype and a device but
no data, so a pass over a model of any size takes a fraction of a second and no memory. Every operator of a real step is
seen, so the architecture need not be known:

    FLOPs   of every matrix product, by the shapes of its operands;
    bytes   of every storage while it lives: what forward saves for backward, and the peak of backward above that.

Both are constant per token, with two exceptions that are counted separately. Attention over pairs is not run: a
stand-in records heads, sizes and range of every layer and saves what tree attention saves. Tensors of the shape of a
weight (gradients; autocast's copies) belong to a pass, not to its tokens. Layers of one kind run once.

Shape letters: N tokens, H query heads, G key/value heads, D size of query and key heads, V size of value heads.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedConfig

from treetrain.core.engine.memory import may_pass
from treetrain.core.errors import UnsupportedModel
from treetrain.core.head.lm_head import Scaling
from treetrain.core.hf.capability import Capabilities, causal_lm, is_checkpointed, model_device
from treetrain.core.hf.frozen_layers import decoder_layers
from treetrain.core.hf.tree_mode import RUN_KEYWORD, RangeMask, TreeRun, instance_of, replaced, tree_attention
from treetrain.core.planning.cost import WIDE, CostModel, ModelCounts
from treetrain.core.planning.devices import Device
from treetrain.core.tree.layout import FULL, AttentionRange, pack
from treetrain.core.tree.token_tree import build_tree
from treetrain.kernels.lm_head import DeviceHeadKernels
from treetrain.layers.experts.routers import experts_of
from treetrain.layers.finders import check_model
from treetrain.layers.recurrence.recurrent_layers import RecurrentLayers, tree_recurrence
from treetrain.models.loading import load_config, model_without_weights
from treetrain.models.meters import CountedAttention, CountedPaths, Meter, Tallied
from treetrain.parallel.links import sharded_links
from treetrain.parallel.process_group import compute_dtype, is_sharded, meshes_of, whole_shapes

TOKENS = 512
"""Tokens of the counted pass; more if a weight has a dimension of that size."""
CPU = torch.device("cpu")
_COUNTED: dict[Hashable, ModelCounts | str] = {}
"""Counts by what they depend on; the message of the error for a model that cannot be counted."""


def cost_of(model: nn.Module) -> CostModel:
    """The cost model of a model as it is now: counted at its first use, with its device's published speeds.

    Counts are cached by everything that changes them (configuration, weights and which of them are trained, dtype,
    autocast), so all steps of an engine share one. Every rank gets the same counts; nothing runs on the device.

    Raises:
        UnsupportedModel: a model that cannot be counted; the message says why.
    """
    if any(p.shape != getattr(p, "ds_shape", p.shape) for p in model.parameters()):
        with whole_shapes(model):
            return cost_of(model)
    device, lm = model_device(model), causal_lm(model)
    dtype = compute_dtype(model, device)
    weights = tuple((p.shape, p.dtype, p.requires_grad) for p in model.parameters())
    config = lm.config.to_json_string()
    key = type(lm), config, weights, dtype, device.type, DeviceHeadKernels().setting
    if key not in _COUNTED:
        try:
            _COUNTED[key] = count(model, device)
        except UnsupportedModel as error:
            _COUNTED[key] = str(error)  # the error itself would hold the model, by its traceback
    counts = _COUNTED[key]
    if isinstance(counts, str):
        raise UnsupportedModel(counts)
    kind = "cuda" if device.type == "cuda" else "cpu"
    counts = counts.checkpointed(is_checkpointed(model))
    shards = 1
    copies = 1
    if any(hasattr(p, "device_mesh") for p in model.parameters()):
        if is_sharded(model):  # on a mesh of two dimensions, over the second one
            mesh = meshes_of(model)[0]
            shards, copies = mesh.shape[-1], mesh.size() // mesh.shape[-1]
    elif any(hasattr(p, "ds_tensor") for p in model.parameters()):
        shards = dist.get_world_size()
    described = Device.of_kind(kind, dtype.itemsize)
    return CostModel.on(described, counts, sharded_links(described, counts, shards=shards, copies=copies))


def cost_if_countable(model: nn.Module) -> CostModel | None:
    """`cost_of` a model; None for one that cannot be counted, or not now."""
    try:
        return cost_of(model)
    except Exception as error:
        if isinstance(error, UnsupportedModel) or may_pass(error):
            return None
        raise


def count(model: nn.Module, device: torch.device | None = None) -> ModelCounts:
    """Count a model, which may be on the meta device. It is not changed, and its own tensors are not used.

    Args:
        device: where its steps will run; None takes the model's own, or a CPU for the meta device.

    Raises:
        UnsupportedModel: the model is not exact on a tree, or computes with the values of its tensors.
    """
    own = model_device(model) if device is None else device
    device = CPU if own.type == "meta" else own
    capabilities = check_model(model, critics=True)
    lm = causal_lm(model)
    recurrent = instance_of(RecurrentLayers, capabilities.special) is not None
    weights = [p for p in lm.parameters() if p.dim() > 1]
    tokens = TOKENS
    while any(tokens in weight.shape for weight in weights):  # tensors of tokens and of weights are told by shape
        tokens += 64
    autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    meter = Meter({tuple(weight.shape) for weight in weights}, flash=device.type == "cuda")
    forward = Meter(meter.shapes, flash=meter.flash)
    try:
        with without_data(lm) as (copy, fake), fake, torch.autocast("cpu", autocast, enabled=autocast is not None):
            decoder = copy.base_model
            _, layers = decoder_layers(decoder, lm.config.get_text_config().num_hidden_layers)
            with meter, tallied(layers, meter), torch.enable_grad():
                output = _run(decoder, meter, tokens, recurrent=recurrent)
                # All that lives now is what backward needs. The peak from here on is what backward takes beside it.
                saved = meter.now
                copies = meter.weights_now
                meter.peak = meter.now
                output.sum().backward()
                working = meter.peak - saved
                del output
            # Without graph, storages are freed as layers go on: the peak is that of one layer.
            with forward, tallied(layers, forward), torch.no_grad():
                _run(decoder, forward, tokens, recurrent=recurrent)
    except Exception as error:  # any error from tensors without data
        if isinstance(error, UnsupportedModel) or may_pass(error):
            raise
        raise UnsupportedModel(
            f"what {type(lm).__name__} costs cannot be counted without running it ({type(error).__name__}: {error}), "
            "so bytes cannot be predicted: give the budget in tokens."
        ) from error
    dtype = compute_dtype(model, device)
    b, wide = dtype.itemsize, max(WIDE, dtype.itemsize)
    embedded = lm.get_input_embeddings()
    hidden = int(embedded.weight.shape[1])  # type: ignore[index]
    text = lm.config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None) or 0
    ranges: Counter[AttentionRange] = Counter()
    for name, flops in meter.tally.items():
        if isinstance(name, tuple):  # a window longer than any row is none
            ranges[FULL if name[1].window and name[1].window >= longest > 0 else name[1]] += flops
    # Embedding and head are counted apart: their gradients are summed over parts, and they may be one matrix.
    ends = {id(w): w for m in (embedded, capabilities.head) if (w := getattr(m, "weight", None)) is not None}
    own_layers = nn.ModuleList(decoder_layers(lm.base_model, text.num_hidden_layers)[1])
    in_layers = sum(p.numel() for p in own_layers.parameters() if id(p) not in ends)
    mixture = experts_of(capabilities)
    held = (mixture.experts or 0, mixture.top_k or 0) if mixture is not None else (0, 0)
    trained = [p.numel() for p in lm.parameters() if p.requires_grad and id(p) not in ends]
    logit, head_pass = _head_bytes(model, capabilities, device, dtype)
    return ModelCounts(
        layers=text.num_hidden_layers,
        hidden=hidden,
        vocab=text.vocab_size,
        parameters=sum(p.numel() for p in lm.parameters()),
        parameters_in_layers=in_layers,
        dtype_bytes=b,
        heads=text.num_attention_heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        experts=held[0],
        experts_per_token=held[1],
        expert_parameters=sum(p.numel() for p in lm.parameters() if p.dim() == 3 and p.shape[0] == held[0]),
        token_flops=meter.tally["flops"] / tokens,
        flops_by_range=dict(ranges),
        saved_layers=meter.tally["saved"] / tokens,
        saved_layer=meter.most_saved / tokens,
        saved_outside=max(saved - meter.run_saved, 0) / tokens,
        saved_pass=copies + meter.tally["copies"] - meter.run_copies,
        backward_token=max(working, 0) / tokens,
        weight_gradient=max(trained, default=0) * b,
        forward_token=forward.peak / tokens,
        cache_token=meter.tally["cache"] / tokens,
        cache_layer=meter.most_cached / tokens,
        cache_state=meter.tally["state"],
        logit=logit,
        head_pass=head_pass,
        step=sum(w.numel() for w in ends.values() if w.requires_grad) * wide,
    )


def count_config(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> ModelCounts:
    """Count a model of a transformers configuration, in a dtype, without weights.

    Raises:
        UnsupportedModel: as `count`, or a class that cannot be made without weights.
    """
    model = model_without_weights(config, dtype=dtype)
    if model is None:
        raise UnsupportedModel(
            f"a model of {type(config).__name__} cannot be made without its weights, so what it costs cannot be "
            "counted; name a shape of the same size instead (--shape on the command line, ModelShape.named in code)"
        )
    return count(model)


def count_named(name: str, dtype_bytes: int = 4) -> ModelCounts:
    """Count the model of a hub id, folder or preset, from its configuration alone.

    Raises:
        DataError: there is no such model.
        UnsupportedModel: as `count_config`.
    """
    return count_config(load_config(name), {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[dtype_bytes])


def _head_bytes(
    model: nn.Module, capabilities: Capabilities, device: torch.device, dtype: torch.dtype
) -> tuple[float, float]:
    """(bytes of a logit while it is scored, bytes of the head per pass)."""
    b, wide = dtype.itemsize, max(WIDE, dtype.itemsize)
    matrix = capabilities.vocab_size * getattr(capabilities.head, "in_features", 0)
    trained = any(p.requires_grad for p in capabilities.head.parameters())
    head_pass = 0
    if b < wide and trained:
        copies = (device.type != "cuda") + (model.dtype == torch.float32)  # a rounded gradient; autocast's matrix
        head_pass = copies * matrix * b
    if not capabilities.head_is_linear:
        # Every chunk goes through autograd: logits, the same in float32, log-softmax, its exp, their product.
        return 5 * wide + b, head_pass
    bias = getattr(capabilities.head, "bias", None)
    return DeviceHeadKernels().logit_bytes(dtype, device, bias, Scaling(capabilities.logit_map)), head_pass


def _run(decoder: Any, meter: Meter, tokens: int, *, recurrent: bool) -> Float[Tensor, "1 N hidden"]:
    """Run a chain; return its last hidden states. Its embeddings require a gradient."""
    layout = pack(build_tree([np.zeros(tokens, np.int32)]), trim=False)
    ids = torch.zeros(1, tokens, dtype=torch.int64)
    extras = [CountedPaths(layout, CPU, meter.tally)] if recurrent else []
    run = TreeRun(CountedAttention(meter), tokens, ids[0], extras)
    table = decoder.get_input_embeddings()

    def embed(ids: Int[Tensor, "1 N"], *_: object, **__: object) -> Float[Tensor, "1 N hidden"]:
        return torch.empty(*ids.shape, table.weight.shape[1], dtype=table.weight.dtype, requires_grad=True)

    recurrence = tree_recurrence(decoder) if recurrent else nullcontext()
    with tree_attention(decoder.modules()), recurrence, replaced(table, forward=embed):
        made = decoder(input_ids=ids, position_ids=ids, attention_mask=None, use_cache=False, **{RUN_KEYWORD: run})
    return made[0]


@contextmanager
def without_data(model: nn.Module) -> Iterator[tuple[Any, FakeTensorMode]]:
    """A copy of a model's modules with fake weights and no hooks, in evaluation mode; and the mode of fake tensors."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    made: dict[int, Any] = {}

    def tensor(old: Any) -> Any:  # each once, so that tied weights stay tied
        if old is not None and id(old) not in made:
            with fake:
                new = torch.empty(old.shape, dtype=old.dtype)
            made[id(old)] = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
            if new.is_floating_point() and old.requires_grad:  # weights' gradients are counted by their shapes
                made[id(old)].register_post_accumulate_grad_hook(_drop_gradient)
        return made.get(id(old))

    def module(old: nn.Module) -> Any:
        if id(old) not in made:
            new = made[id(old)] = object.__new__(type(old))  # no copy of tensors, and no constructor
            new.__dict__ = {name: value for name, value in vars(old).items() if name != "forward"}
            for name, value in vars(old).items():
                if name.endswith("_hooks") and isinstance(value, dict):
                    new.__dict__[name] = type(value)()
            new.__dict__["training"] = False
            if vars(old).get("_is_expert_parallel"):  # the counted weights are those of all ranks
                experts = next(iter(old._parameters.values())).shape[0]  # type: ignore[union-attr]
                new.__dict__.update(num_experts=experts, _is_expert_parallel=False)
            new.__dict__["_parameters"] = {name: tensor(value) for name, value in old._parameters.items()}
            new.__dict__["_buffers"] = {name: tensor(value) for name, value in old._buffers.items()}
            new.__dict__["_modules"] = {
                name: None if value is None else module(value) for name, value in old._modules.items()
            }
        return made[id(old)]

    copy = module(model)
    experts = "_experts_implementation_internal"
    configs = {id(c): c for m in copy.modules() if hasattr(c := getattr(m, "config", None), experts)}
    with ExitStack() as stack:
        # Experts as products of groups of rows, whose shapes do not depend on the routers' choices.
        for config in configs.values():
            stack.enter_context(replaced(config, **{experts: "grouped_mm"}))
        yield copy, fake


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


@contextmanager
def tallied(layers: list[nn.Module], meter: Meter) -> Iterator[None]:
    """Run only the first of identical layers, and add its tally again for each of the others."""
    seen: dict[Hashable, tuple[Counter[Tallied], Any]] = {}

    def counted(layer: nn.Module, forward: Callable[..., Any]) -> Callable[..., object]:
        weights = tuple((p.shape, p.requires_grad) for p in layer.parameters())

        def run(*args: object, **kwargs: object) -> object:
            given = (*args, *kwargs.values())
            masks = tuple(str(x.range) for x in given if isinstance(x, RangeMask))
            kind = type(layer), weights, masks, tuple(x.shape for x in given if isinstance(x, Tensor))
            if kind not in seen:
                before = meter.tally.copy()
                flops = meter.flops
                now = meter.now
                copies = meter.weights_now
                out = forward(*args, **kwargs)
                meter.tally["flops"] += meter.flops - flops
                meter.tally["saved"] += meter.now - now
                meter.tally["copies"] += meter.weights_now - copies
                meter.tally["outputs"] += (out[0] if isinstance(out, tuple) else out).nbytes
                meter.most_saved = max(meter.most_saved, meter.now - now)
                meter.run_saved += meter.now - now
                meter.run_copies += meter.weights_now - copies
                own = meter.tally.copy()
                own.subtract(before)
                seen[kind] = own, out
                return out
            own, out = seen[kind]
            meter.tally.update(own)
            hidden = args[0] if args else kwargs["hidden_states"]
            return (hidden, *out[1:]) if isinstance(out, tuple) else hidden

        return run

    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(replaced(layer, forward=counted(layer, layer.forward)))
        yield

"""What passes of a model cost as far as it is known before any is run: shape, dtypes, trained weights, adapters."""

import dataclasses
from typing import Any

import torch
from torch import nn

from treetrain.engine.lm_head import Scaling, TritonChunk, chunk_type
from treetrain.engine.packed import model_device
from treetrain.models.capability import Capabilities, causal_lm
from treetrain.planning.constants import Constants
from treetrain.planning.cost import ModelShape


def formula_constants(model: nn.Module, capabilities: Capabilities, shape: ModelShape) -> Constants:
    """What the shape says, corrected by what is known without running: trained weights, dtypes, adapters."""
    device = model_device(model)
    compute = compute_dtype(model, device)
    found = Constants.from_shape(
        shape,
        "cuda" if device.type == "cuda" else "cpu",
        dtype_bytes=compute.itemsize,
        checkpointing=is_checkpointed(model),
    )
    share, added = trained_share(model), _added_up(model, capabilities)
    weights = sum(p.numel() * p.element_size() for p in model.parameters()) - added * compute.itemsize
    reads = found.backward_ratio  # one read in forward, one or two (checkpointing) in backward
    changes: dict[str, float] = {
        "graph_pass_bytes": weights * (reads + 4 * share) + 4.0 * compute.itemsize * shape.vocab * shape.hidden,
        "step_bytes": float(added * max(4, compute.itemsize)),
    }
    if not any(p.requires_grad for p in capabilities.head.parameters()):
        changes["head_pass"] = 0.0
    elif compute.itemsize == 2 and model.dtype == torch.float32:  # autocast: a 16-bit copy of the head's matrix
        changes["head_pass"] = found.head_pass + 2.0 * shape.vocab * shape.hidden
    if not capabilities.head_is_linear:
        # Every chunk goes through autograd: logits, the same in float32, log-softmax, its exp, their product.
        changes["head_chunk_row"] = float(shape.vocab * (5 * max(4, compute.itemsize) + compute.itemsize))
    elif head_softmax(capabilities, device, compute) is TritonChunk:  # the logits become their gradient
        changes["head_chunk_row"] = float(shape.vocab * compute.itemsize)
    return dataclasses.replace(found, **changes)


def head_softmax(capabilities: Capabilities, device: torch.device, compute: torch.dtype) -> type[Any]:
    """What runs the softmax of a head that is a plain matrix."""
    like, bias = torch.empty(0, dtype=compute, device=device), getattr(capabilities.head, "bias", None)
    return chunk_type(like, bias, Scaling(capabilities.logit_map))


def _added_up(model: nn.Module, capabilities: Capabilities) -> int:
    """Entries of the matrices whose gradients are added up over a step: embedding and head, once where tied."""
    modules = [model.get_input_embeddings(), capabilities.head]  # type: ignore[operator]
    weights = {id(w): w.numel() for m in modules if (w := getattr(m, "weight", None)) is not None and w.requires_grad}
    return sum(weights.values())


def compute_dtype(model: nn.Module, device: torch.device) -> torch.dtype:
    """Of the arithmetic: that of the autocast which is on now, or the weights' own."""
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return model.dtype  # type: ignore[return-value]


def is_checkpointed(model: nn.Module) -> bool:
    """Whether a step runs every layer's forward again in its backward."""
    lm = causal_lm(model)
    # transformers 5 renamed it, and warns where the old name is read.
    name = "is_activation_checkpointing" if hasattr(lm, "is_activation_checkpointing") else "is_gradient_checkpointing"
    return model.training and bool(getattr(lm, name, False))


def trained_share(model: nn.Module) -> float:
    """Of a model's weights, those that are trained."""
    total = sum(p.numel() for p in model.parameters())
    return sum(p.numel() for p in model.parameters() if p.requires_grad) / max(total, 1)

"""Predicts the memory of an image encoder, as `costs` does that of a language model."""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from treetrain.core.engine.memory import may_pass
from treetrain.core.errors import UnsupportedModel
from treetrain.core.hf.capability import causal_lm, is_checkpointed, model_device
from treetrain.core.planning.cost import Beside
from treetrain.layers.images.encoders import (
    attention_of,
    encode_images,
    encoder_modules,
    image_encoder,
    is_trained,
    joined_images,
    own_attention,
)
from treetrain.layers.images.image_rows import SIZES, Image
from treetrain.models.costs import CPU, tallied, without_data
from treetrain.models.meters import Meter


class EncoderBytes(NamedTuple):
    """Bytes of the encoder for one image, weights and their gradients left out."""

    held: float
    """Alive while parts run: the graph, the features, and their gradients."""
    peak: float
    """Most bytes in the encoder's own forward and backward."""
    copies: float
    """Autocast's copies of weights, which all images share."""


_COUNTED: dict[Hashable, EncoderBytes | str] = {}
"""Counts by what they depend on, for one byte of an image; the message for an encoder that cannot be counted."""


def encoder_memory(model: nn.Module, images: Sequence[Image]) -> Beside | UnsupportedModel:
    """Predict the memory of a model's encoder in a step on these images, without running it; or say why that fails.

    One image is counted for each power of two of sizes, and others in proportion: an encoder's memory is linear in the
    size of images, unless its attention is eager.
    """
    inner = image_encoder(model)
    lm = causal_lm(model)
    device = model_device(model)
    assert inner is not None
    if SIZES in images[0].inputs:
        return UnsupportedModel(
            f"the image encoder of {type(lm).__name__} attends over all images of a step in one masked sequence, whose "
            "memory grows with the square of their pixels and is not predicted: give the budget in tokens."
        )
    graph = torch.is_grad_enabled() and is_trained(inner)
    autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    weights = tuple((p.shape, p.dtype, p.requires_grad) for part in encoder_modules(inner) for p in part.parameters())
    config = lm.config.to_json_string()
    settings = type(lm), config, weights, autocast, graph, is_checkpointed(model)
    held = peak = copies = 0.0
    for image in images:
        size = sum(array.nbytes for array in image.inputs.values())
        key = settings, size.bit_length()
        if key not in _COUNTED:
            try:
                whole = _count(model, inner, image, graph=graph, autocast=autocast)
                _COUNTED[key] = EncoderBytes(whole.held / size, whole.peak / size, whole.copies)
            except Exception as error:  # any error from tensors without data
                why = (
                    f"what the image encoder of {type(lm).__name__} needs cannot be counted without running it "
                    f"({type(error).__name__}: {error}), so bytes cannot be predicted: give the budget in tokens."
                )
                if may_pass(error):
                    return UnsupportedModel(why)  # the next call counts again
                _COUNTED[key] = why
        counted = _COUNTED[key]
        if isinstance(counted, str):
            return UnsupportedModel(counted)
        held, peak = held + counted.held * size, peak + counted.peak * size
        copies = max(copies, counted.copies)
    trained = [p.nbytes for part in encoder_modules(inner) for p in part.parameters() if p.requires_grad]
    peak += copies + (max(trained) if graph else 0)
    return Beside(f"the encoder of {len(images)} images", held + (copies if graph else 0), peak)


def _count(model: nn.Module, inner: Any, image: Image, *, graph: bool, autocast: torch.dtype | None) -> EncoderBytes:
    """Count the bytes of one image, as `costs.count` counts those of tokens."""
    encoder = nn.ModuleList(encoder_modules(inner))
    # Flash attention does not run without data; torch's own holds as much.
    attention = {key: "sdpa" if "flash" in own else own for key, own in attention_of(inner).items()}
    meter = Meter({tuple(p.shape) for p in encoder.parameters() if p.dim() > 1} if autocast else set(), flash=False)
    with without_data(inner) as (copy, fake), torch.autocast("cpu", autocast, enabled=autocast is not None):
        lists = [m for part in encoder_modules(copy) for m in part.modules() if isinstance(m, nn.ModuleList)]
        layers = max(lists, key=len, default=[])
        inputs = joined_images([image], CPU)
        with fake:  # sizes of images are read, and stay as they are
            inputs |= {name: torch.empty_like(x) for name, x in inputs.items() if x.is_floating_point()}
        for x in inputs.values():
            meter.add(x)
        with meter, tallied(list(layers), meter), own_attention(inner, attention), torch.set_grad_enabled(graph):
            made = encode_images(copy, inputs)
            del inputs, x
            # What lives after the forward is saved for backward, once for the layers that ran; the others are tallied.
            now, above = meter.now, meter.peak - meter.now
            saved = now + meter.tally["saved"] - meter.run_saved
            if is_checkpointed(model):  # layers keep their outputs alone, and run again one by one
                saved += meter.tally["outputs"] - meter.tally["saved"]
            copies = meter.weights_now + meter.tally["copies"] - meter.run_copies
            meter.peak = now
            kinds = [kind for kind in made.kinds if kind.requires_grad]
            if kinds:
                torch.autograd.backward(kinds, [torch.empty_like(kind) for kind in kinds])
            working = meter.peak - now + (meter.most_saved if is_checkpointed(model) else 0)
    wide = [kind.numel() * torch.promote_types(kind.dtype, torch.float32).itemsize for kind in made.kinds]
    leaves = sum(size for size, kind in zip(wide, made.kinds) if kind.dtype.itemsize < 4)
    if not kinds:  # nothing is trained, so there is no graph: features stay, in their dtype and as leaves
        features = sum(kind.nbytes for kind in made.kinds)
        return EncoderBytes(features + leaves, max(now + above, features + leaves), copies)
    gradients = sum(wide)
    # A part's backward makes a gradient of all features of a kind, and adds it to the sum.
    held = saved + leaves + gradients + max(wide)
    return EncoderBytes(held, max(saved + above, saved + leaves + gradients + working), copies)

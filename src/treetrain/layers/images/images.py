"""Images: every distinct image of a step goes through the encoder once, forward and backward.

The encoder runs before the parts, outside of tree mode. Parts read its features from leaf tensors, whose gradients add
up over parts in float32 or wider; after the last part they go through the encoder. So an image that many rows share, or
that stands in several parts, costs one forward and one backward of the encoder, whatever the plan.

Text after an image continues from the image's largest position, so positions are those of every token's own path.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from treetrain.core.device_arrays import on_device
from treetrain.core.engine.extension import Extension, ModelPass
from treetrain.core.errors import UnsupportedModel
from treetrain.core.head.lm_head import Scores
from treetrain.core.hf.capability import causal_lm, is_checkpointed, model_device
from treetrain.core.planning.cost import Beside
from treetrain.core.planning.plan import Plan
from treetrain.core.tree.images import SIZES, Image
from treetrain.core.tree.token_tree import TokenTree
from treetrain.layers.images.encoders import (
    ImageFeatures,
    attention_of,
    encode_images,
    encoder_modules,
    features_given,
    image_encoder,
    is_trained,
    joined_images,
    own_attention,
    path_positions,
)
from treetrain.models.costs import CPU, tallied, without_data
from treetrain.models.meters import Meter


class Images(Extension):
    """Gives passes the features and positions of images, and runs the gradients of the features through the encoder.

    Args:
        tree: a tree with images, which `check_images` has accepted.
    """

    within_hooks = True

    def __init__(self, model: nn.Module, tree: TokenTree):
        inner = image_encoder(model)
        assert inner is not None and tree.images is not None
        self._inner, self._images, self._device = inner, tree.images, model_device(model)
        self._positions = path_positions(inner, tree)
        self._attention: dict[int, str] = {}
        self._encoded: ImageFeatures | None = None
        """The encoder's output, with its graph if the encoder is trained."""
        self._leaves: list[Tensor] = []
        """The same numbers without graph, in float32 or wider. Backwards of parts add their gradients here."""
        self._of_pass: ImageFeatures | None = None

    def begin(self, plan: Plan, *, gradients: bool, idle_pass: Callable[[], Scores]) -> None:
        trained = is_trained(self._inner)
        if self._encoded is None or (gradients and trained and not self._encoded.kinds[0].requires_grad):
            self._attention = attention_of(self._inner)
            # The backward may come in a later run: that of a score, or of a second try after memory ran out.
            with torch.set_grad_enabled(trained and (gradients or torch.is_grad_enabled())):
                inputs = joined_images(self._images.distinct, self._device)
                self._encoded = encode_images(self._inner, inputs, self._images)
        self._leaves = []
        for kind in self._encoded.kinds:
            leaf = kind.detach().to(torch.promote_types(kind.dtype, torch.float32))
            self._leaves.append(leaf.requires_grad_(kind.requires_grad))

    @contextmanager
    def around(self, *, graph: bool, backward: bool) -> Iterator[None]:
        with features_given(self._inner, self._features), own_attention(self._inner, self._attention):
            yield
            if backward and self._encoded is not None:
                encoded, self._encoded = self._encoded, None
                pairs = [
                    (x, leaf.grad.to(x.dtype)) for x, leaf in zip(encoded.kinds, self._leaves) if leaf.grad is not None
                ]
                if pairs:
                    with torch.autocast(self._device.type, enabled=False):
                        torch.autograd.backward([x for x, _ in pairs], [grad for _, grad in pairs])

    def before_forward(self, model_pass: ModelPass) -> None:
        if model_pass.idle:
            return
        tokens = model_pass.part.piece.layout.tree_index
        if self._positions is not None:
            model_pass.keywords["position_ids"] = on_device(self._positions[:, None, tokens], self._device)
        features = self._images.feature[tokens]
        features = features[features >= 0]
        if not len(features):
            return
        assert self._encoded is not None
        index = on_device(features, self._device)
        kinds = [leaf[index].to(kind.dtype) for leaf, kind in zip(self._leaves, self._encoded.kinds)]
        self._of_pass = ImageFeatures(kinds, self._encoded.as_tensor)
        model_pass.keywords["pixel_values"] = torch.zeros(0, device=self._device)  # so that it asks for features

    def _features(self) -> ImageFeatures:
        assert self._of_pass is not None
        features, self._of_pass = self._of_pass, None
        return features


# ---- memory


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
    inner, lm, device = image_encoder(model), causal_lm(model), model_device(model)
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
                _COUNTED[key] = (
                    f"what the image encoder of {type(lm).__name__} needs cannot be counted without running it "
                    f"({type(error).__name__}: {error}), so bytes cannot be predicted: give the budget in tokens."
                )
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
            now, above = meter.now, meter.peak - meter.now
            saved = now + meter.tally["saved"] - meter.run_saved
            if is_checkpointed(model):
                saved += meter.tally["outputs"] - meter.tally["saved"]
            copies = meter.weights_now + meter.tally["copies"] - meter.run_copies
            meter.peak = now
            kinds = [kind for kind in made.kinds if kind.requires_grad]
            if kinds:
                torch.autograd.backward(kinds, [torch.empty_like(kind) for kind in kinds])
            working = meter.peak - now + (meter.most_saved if is_checkpointed(model) else 0)
    wide = [kind.numel() * torch.promote_types(kind.dtype, torch.float32).itemsize for kind in made.kinds]
    leaves = sum(size for size, kind in zip(wide, made.kinds) if kind.dtype.itemsize < 4)
    if not kinds:
        features = sum(kind.nbytes for kind in made.kinds)
        return EncoderBytes(features + leaves, max(now + above, features + leaves), copies)
    gradients = sum(wide)
    # A part's backward makes a gradient of all features of a kind, and adds it to the sum.
    held = saved + leaves + gradients + max(wide)
    return EncoderBytes(held, max(saved + above, saved + leaves + gradients + working), copies)
